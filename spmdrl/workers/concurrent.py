"""Several samples under way in one worker: functions that wait, for a judge say.

The main thread takes jobs in order and runs what runs one at a time. What may run beside others
goes to one event loop in a thread: `async def` functions as they are, the others in a thread each.
A deadline is kept here, to the call: it is cancelled, or its thread left to itself, and no other
sample notices. Where the whole process stands still, the parent ends it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from spmdrl.rewards.samples import RewardList, RewardSample
from spmdrl.workers.deadlines import no_result, seconds_left
from spmdrl.workers.messages import Done
from spmdrl.workers.reports import Began, Report
from spmdrl.workers.reward_jobs import PartialScore, RewardScorer
from spmdrl.workers.server import Server


def serve_concurrently(
    server: Server, take: Callable[[], Any], write: Callable[[Report], None]
) -> None:
    """Serve jobs until there are no more.

    Args:
        take: waits for the next (id, work), None at the end.
        write: sends a report; of any thread.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    slots = threading.Semaphore(server.scorer.concurrency)

    async def finish(partial: PartialScore) -> None:
        """Do the rest of a sample and send its result."""
        done = await _rest(server.scorer, partial)
        slots.release()
        write(done)

    while True:
        slots.acquire()
        if (message := take()) is None:
            return
        id, work = message
        write(Began(id, time.monotonic()))
        if isinstance(work, RewardSample | RewardList):
            asyncio.run_coroutine_threadsafe(finish(server.scorer.begin(id, work)), loop)
        else:
            write(server.serve(id, work))
            slots.release()


async def _rest(scorer: RewardScorer, partial: PartialScore) -> Done:
    """Call what is left to call of a sample, within its deadline."""
    task = asyncio.ensure_future(_call(scorer, partial))
    left_s = seconds_left(partial.began, timeout_s=scorer.timeout_s)
    done, _ = await asyncio.wait({task}, timeout=left_s)
    if done:
        return scorer.result(partial)
    task.cancel()  # and not waited for: it may not listen
    called = " or ".join(f"{name}{reward.place}" for name, reward in scorer.left(partial))
    partial.failure = "timeout"
    partial.message = no_result(scorer.timeout_s, called=called)
    return partial.done(None)


async def _call(scorer: RewardScorer, partial: PartialScore) -> None:
    for name, reward in scorer.left(partial):
        if reward.is_async:
            await partial.call_async(name, reward)
        else:
            await _in_thread(partial.call, name, reward)
        if partial.failure:
            return


async def _in_thread(work: Callable[..., None], *args: Any) -> None:
    """Wait for work, which does not raise, in a thread of its own.

    Not asyncio's pool: a call that hangs would keep a place there, and the process's end waiting.
    """
    loop = asyncio.get_running_loop()
    is_done = asyncio.Event()

    def run() -> None:
        work(*args)
        loop.call_soon_threadsafe(is_done.set)

    threading.Thread(target=run, daemon=True).start()
    await is_done.wait()
