"""Score several samples at once in one worker, for functions that wait, e.g. for a judge.

The main thread takes jobs in order and calls the functions that run one at a time. All other
functions run in an event loop in another thread: `async def` functions directly, others each in a
thread. This module checks the deadline of each sample. A late call is cancelled, or its thread is
abandoned, without an effect on other samples. If the whole process hangs, the parent kills it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from spmdrl.rewards.samples import RewardList, RewardSample
from spmdrl.workers.messages import Done, Work, no_result
from spmdrl.workers.reports import Began, Report
from spmdrl.workers.reward_jobs import PartialScore, RewardScorer


def serve_concurrently(
    scorer: RewardScorer,
    *,
    serve: Callable[[int, Work], Done],
    take: Callable[[], Any],
    write: Callable[[Report], None],
) -> None:
    """Serve jobs until there are no more.

    Args:
        scorer: does the jobs of rewards.
        serve: does all other jobs, see `Server.serve`.
        take: waits for the next (id, work); returns None at the end.
        write: sends a report; any thread may call it.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    slots = threading.Semaphore(scorer.concurrency)

    async def finish(partial: PartialScore) -> None:
        """Do the rest of a sample and send its result."""
        done = await _finish(scorer, partial)
        slots.release()
        write(done)

    while True:
        slots.acquire()
        message = take()
        if message is None:
            return
        id, work = message
        write(Began(id, time.monotonic()))
        if isinstance(work, RewardSample | RewardList):
            asyncio.run_coroutine_threadsafe(finish(scorer.begin(id, work)), loop)
        else:
            write(serve(id, work))
            slots.release()


async def _finish(scorer: RewardScorer, partial: PartialScore) -> Done:
    """Call the remaining functions of a sample, within its deadline."""
    task = asyncio.ensure_future(_call(scorer, partial))
    left_s = partial.began + scorer.timeout_s - time.monotonic()
    done, _ = await asyncio.wait({task}, timeout=max(0.0, min(left_s, 1e6)))
    if done:
        return scorer.result(partial)
    task.cancel()  # do not wait for the task, which may ignore the cancellation
    called = " or ".join(f"{name}{reward.place}" for name, reward in scorer.remaining(partial))
    partial.failure = "timeout"
    partial.message = no_result(scorer.timeout_s, called=called)
    return partial.done(None)


async def _call(scorer: RewardScorer, partial: PartialScore) -> None:
    for name, reward in scorer.remaining(partial):
        if reward.is_async:
            await partial.call_async(name, reward)
        else:
            await _in_thread(partial.call, name, reward)
        if partial.failure:
            return


async def _in_thread(work: Callable[..., None], *args: Any) -> None:
    """Run work, which must not raise, in a new thread and wait for it.

    This does not use asyncio's thread pool: a call that hangs would block one of its threads, and
    at its end the process would wait for that thread.
    """
    loop = asyncio.get_running_loop()
    is_done = asyncio.Event()

    def run() -> None:
        work(*args)
        loop.call_soon_threadsafe(is_done.set)

    threading.Thread(target=run, daemon=True).start()
    await is_done.wait()
