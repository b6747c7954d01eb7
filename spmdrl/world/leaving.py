"""How a rank leaves before its work is done: by a signal, or by an error that it reports."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn, Protocol

import torch.distributed as dist

from spmdrl.errors import Refusal, RunFailed, error_text, say, users_line, users_traceback
from spmdrl.imports import attempt
from spmdrl.world.launch import known_rank, report_refusal, report_to_launcher, say_once
from spmdrl.world.lost_peers.watch import PeersMissing, Watch, first_line

_ONE_KEY_PRESS_S = 1.0  # terminal and launcher may both pass on the same Ctrl-C
_WHOLE = logging.getLogger("traceback")  # no child of ours: the console shows what those say
_WHOLE.setLevel(logging.INFO)


class Member(Protocol):
    """The part of a World that is needed to leave it."""

    rank: int
    watch: Watch
    is_started: bool
    stop_requested: bool


def handle_signals(world: Member) -> None:
    """Start a thread that acts on SIGINT, SIGTERM and SIGUSR1 as they arrive.

    Python runs signal handlers in the main thread, which may be inside a collective for minutes.
    The wake-up descriptor is written at once.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # A forked child's signals are not ours.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_handle, args=(world, read), daemon=True, name="spmdrl-signals").start()


def _handle(world: Member, pipe: int) -> None:
    first_at = None
    while received := os.read(pipe, 1):
        number = signal.Signals(received[0])
        now = time.monotonic()
        if number == signal.SIGUSR1:  # Slurm's --signal=USR1@N
            world.stop_requested = True
        elif number not in (signal.SIGINT, signal.SIGTERM):
            continue
        elif first_at is None:
            first_at = now
            _handle_first(world, number)
        elif now - first_at > _ONE_KEY_PRESS_S:
            _leave_at_once(world, number, why="the second signal")


def _handle_first(world: Member, number: signal.Signals) -> None:
    if world.watch.is_ending:
        return
    world.watch.report_dead_neighbours()
    if cause := world.watch.board.cause():  # the launcher ends us because of a peer
        world.watch.leave_after_peer(cause)
    elif not world.is_started:
        _leave_at_once(world, number, why="nothing to save before the first step")
    else:
        world.stop_requested = True
        _say_on_rank_0(
            world,
            f"{number.name}: this step is finished and saved, then the run stops; a second signal "
            "ends it at once",
        )


def _leave_at_once(world: Member, number: signal.Signals, *, why: str) -> None:
    try:
        _say_on_rank_0(world, f"{number.name}: ends at once ({why})")
        if world.watch.claim_ending():
            world.watch.announce_leaving()
            world.watch.close_early("stopped")
    finally:
        os._exit(128 + number)


def _say_on_rank_0(world: Member, text: str) -> None:
    if world.rank == 0:
        say(f"[rank 0] {text}", file=sys.stderr, flush=True)


def report_end(error: BaseException, world: Member | None) -> int:
    """Report why this rank ends to people, to the launcher and to the other ranks.

    Args:
        error: for a Refusal or missing peers, the message is shown; for any other error, the
            traceback from the user's own code on. The rank's log gets the whole traceback.
        world: None if the error came before there was one.
    Returns: the exit status.
    """
    if isinstance(error, dist.DistError) and world is not None:  # of the job's store
        error = world.watch.as_peers_missing(error)
    rank = known_rank() if world is None else world.rank
    text = first_line(error)
    is_own = not isinstance(error, PeersMissing)
    if isinstance(error, Refusal):
        report_refusal(str(error))
    if is_own:
        report_to_launcher(error_text(error))
    if world is not None:
        world.watch.claim_ending(wait=True)
        if is_own and not world.watch.board.claim_cause(text):
            say(f"[rank {rank}] ends for the same reason", file=sys.stderr, flush=True)
            return 1
    _show(error, rank, has_world=world is not None)
    if world is not None:
        world.watch.close_early("failed")
        if is_own:
            world.watch.announce_end(text)
        else:
            world.watch.announce_missing(f"rank {rank} says: {error}")
    return 2 if isinstance(error, Refusal) else 1


def _show(error: BaseException, rank: int | str, *, has_world: bool) -> None:
    """Print what a person needs, and write the whole traceback into the rank's log."""
    whole = "".join(traceback.format_exception(error))
    if isinstance(error, Refusal) and not has_world:  # all ranks raise it
        say_once(error_text(error), of_rank="" if rank == "?" else f"[rank {rank}] ")
        return
    if isinstance(error, (Refusal, RunFailed, PeersMissing)):
        shown = f"[rank {rank}] {error_text(error) if isinstance(error, Refusal) else error}"
    else:
        shown = users_traceback(error)
        place = users_line(error)
        shown += f"[rank {rank}] ended with {first_line(error)}" + (f" ({place})" if place else "")
    say(shown, file=sys.stderr, flush=True)
    if not shown.startswith(whole):  # what is printed goes to the log too
        _WHOLE.info("rank %s ends:\n%s", rank, whole)


def end_process(status: int) -> NoReturn:
    """Flush what was printed, and end this process at once.

    Other ranks may be gone: a thread or group that waits for them must not keep the process.
    """
    for stream in (sys.stdout, sys.stderr):
        attempt(stream.flush, BrokenPipeError)
    os._exit(status)
