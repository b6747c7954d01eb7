"""Waits for other ranks, each with a name and a deadline.

Every statement that can block on another rank stands inside `watch.wait(name, step)`. A thread of
each rank writes a heartbeat into the job's store. When a deadline passes, a peer's heartbeat stops,
or a collective fails because a peer is gone, the rank reports who is missing, in which phase and
step, and ends with EXIT_CODE. A rank that ends by an error of its own writes it into the store; the
others show it and end too. When a process dies silently, a rank on the same machine reports it
within two seconds. Ranks do not outlive the process that started them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from spmdrl.errors import RunFailed, message_of, say, users_place
from spmdrl.world.lost_peers.board import Board
from spmdrl.world.lost_peers.last_collectives import leave_record
from spmdrl.world.lost_peers.local_ranks import LocalRanks, own_process
from spmdrl.world.lost_peers.place import Place, death_text, in_wait, place_after, report_text
from spmdrl.world.lost_peers.silence import Silence
from spmdrl.world.sealed_store import SealedStore
from spmdrl.world.spans import Spans

Ending = Literal["stopped", "failed"]
EXIT_CODE = 13
_LEAST_BEAT_S = 1.0
# The store bears some 40000 requests a second on one core (benchmarks/results/scale.md). These are
# for all ranks together: the more ranks, the longer the interval of each.
_BEATS_PER_S = 1000
_LOOKS_PER_S = 32  # at all ranks' heartbeats
_FEW_RANKS = 64  # up to so many ranks write each change of place at once
_LINGER_S = 5.0
_LEAST_SILENT = 3  # beats without progress of the other thread: it may miss one
_DEAD_AFTER_S = 60.0  # a rank may hold the interpreter lock for seconds while it compiles


class PeersMissing(RuntimeError):
    """A collective failed because other ranks are gone; the message names them."""


class Watch:
    """Names and times the waits of one rank, and reports who is missing when a deadline passes.

    Args:
        store: a key-value store of the job, used by this object alone.
        rank, world_size: of the whole job.
        timeout_s: deadline of one wait, seconds; may be changed between waits.
        store_rank: rank whose process holds the store; None: the launcher holds it.
        is_orphaned: returns whether the launcher is gone.
        flight_folder: for this rank's last collectives, written when a wait does not end.
    """

    def __init__(
        self,
        store: SealedStore,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        store_rank: int | None = None,
        is_orphaned: Callable[[], bool] = lambda: False,
        flight_folder: Path | None = None,
    ):
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.before_exit: list[Callable[[Ending], None]] = []
        """Called when the process ends before its work is done. Each must be quick."""
        self.seconds = dict[str, float]()
        self.totals = dict[str, float]()
        """Per phase and wait: since `take_seconds`, and since the start."""
        self.spans = Spans()
        self.mark: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext
        """Entered around each phase and wait with its name; a profiler takes its ranges from it."""
        self.board = Board(store, rank, store_rank=store_rank)
        self._store_rank = store_rank
        self._flight_folder = flight_folder
        self.is_orphaned = is_orphaned
        self._is_leaving = False
        self._process = own_process()
        self._main = threading.get_ident()
        self._local_ranks = LocalRanks(self._process)
        self._silence = Silence(self._process["machine"])
        self._dead: dict[int, str] = {}  # `death_text` of dead ranks on this machine
        self._ending = threading.Lock()  # taken once, by the thread that ends the process
        # Replaced as a whole: the thread reads it.
        self.place = Place("start", -1, time.monotonic(), False)
        self.beat_s = max(_LEAST_BEAT_S, world_size / _BEATS_PER_S)
        self._spacing_s = 0.0 if world_size <= _FEW_RANKS else self.beat_s
        self._beat_at = 0.0
        self.turns = 0
        self._beats_per_look = -(-world_size // int(_LOOKS_PER_S * self.beat_s))
        self.closed = threading.Event()
        run = functools.partial(_ending_with, self.leave, self._run)
        self._thread = threading.Thread(target=run, daemon=True, name="spmdrl-watch")
        self._thread.start()
        threading.Thread(
            target=_watch_store, args=(self,), daemon=True, name="spmdrl-store"
        ).start()

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Name local work, so that other ranks can report where this one is. It is timed too."""
        with self._entered(name, step, waits=False):
            yield

    @contextlib.contextmanager
    def wait(self, name: str, step: int, *, timeout_s: float | None = None) -> Iterator[None]:
        """Name a block that can wait for other ranks, and bound its time.

        Args:
            timeout_s: deadline of this wait, seconds; None takes the watch's.
        Raises: PeersMissing naming the missing ranks when a collective inside fails because a
            peer is gone. Past the deadline the process exits with EXIT_CODE.
        """
        with self._entered(name, step, waits=True, timeout_s=timeout_s), in_wait(name, step):
            try:
                yield
            except (dist.DistError, RuntimeError) as error:
                if not is_peer_error(error):
                    raise
                raise self.as_peers_missing(error) from error

    def as_peers_missing(self, error: Exception) -> PeersMissing:
        """Return an error of a collective or of the store as one that names the missing ranks."""
        return PeersMissing(f"{self._find_missing()}\ncaused by: {first_line(error)}")

    @contextlib.contextmanager
    def _entered(
        self, name: str, step: int, *, waits: bool, timeout_s: float | None = None
    ) -> Iterator[None]:
        before = self.place
        began = time.monotonic()
        self.place = Place(name, step, began, waits, timeout_s)
        if began - self._beat_at >= self._spacing_s:  # else the thread writes it with its next beat
            self._beat()
            self.board.read_store_rank()
        try:
            with self.mark(name):
                yield
        finally:
            self.place = place_after(self.place, before)
            ended = time.monotonic()
            self.spans.add(name, began, ended)
            for seconds in (self.seconds, self.totals):
                seconds[name] = seconds.get(name, 0.0) + ended - began

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase and wait since the last call, and reset them."""
        seconds = self.seconds
        self.seconds = {}
        return seconds

    def report(self) -> str:
        """Describe where every rank is: who waits, who is missing, whose heartbeat stopped."""
        states = self.board.read(range(self.world_size))
        return report_text(
            states,
            rank=self.rank,
            own=self.place,
            beat_s=self.beat_s,
            dead=self._dead,
            silence=self._silence,
        )

    def close(self) -> None:
        """Stop the heartbeat."""
        self.closed.set()
        self._thread.join(timeout=10)

    # ---------------------------------------------------------------- ending

    @property
    def is_ending(self) -> bool:
        """Whether some thread is ending this process."""
        return self._ending.locked()

    def claim_ending(self, *, wait: bool = False) -> bool:
        """Return whether the caller is the first thread that ends this process.

        Args:
            wait: if another thread was first, sleep until it ends the process.
        """
        return self._ending.acquire(blocking=wait)

    @contextlib.contextmanager
    def start_up(self) -> Iterator[None]:
        """Mark this rank as leaving if the block raises: it reports its own error."""
        try:
            yield
        except Exception:
            self.announce_leaving()
            raise

    def announce_leaving(self) -> None:
        """Tell other ranks that this process ends in order, or that its error is reported."""
        self._is_leaving = True
        self.board.write(self._state())

    def close_early(self, ending: Ending) -> None:
        """Run `before_exit`."""
        for close in self.before_exit:
            close(ending)

    def announce_end(self, text: str) -> None:
        """Make the other ranks end; they show `text` as the error of this rank."""
        self.board.announce_end(text, self._state())
        self._linger()

    def announce_missing(self, text: str) -> None:
        """Make the other ranks end; they show `text`, which names the missing ranks."""
        self.board.announce_missing(text)
        self.announce_leaving()
        self._linger()

    def report_dead_neighbours(self) -> None:
        """Report ranks of this machine whose processes have died silently to all ranks."""
        for rank in self._local_ranks.find_dead():
            state = self.board.read([rank])[0]
            self._dead[rank] = death_text(rank, state, self._process["host"])
            is_explained = state is not None and ("error" in state or "left" in state)
            if not self._is_leaving and not is_explained:
                self.board.announce_missing(self._dead[rank])

    def _find_missing(self) -> str:
        """Return who is missing after a collective failed. The thread may end the process first."""
        for _ in range(4):  # let a dying peer's last heartbeat grow old; see Silence
            time.sleep(self.beat_s)
            if not self.board.has_store:
                return self.board.lost_text()
            if self._dead and self._is_leaving:
                break
        return self.report()

    def leave_after_peer(self, cause: str) -> None:
        """End this process because a peer failed. Returns only if another thread is ending it."""
        self.leave(f"[rank {self.rank}] ends in {self.place}: {cause}")

    def _run(self) -> None:
        beats = self.rank  # ranks look in turns
        while not self.closed.wait(self.beat_s):
            self._beat()
            beats = beats + 1
            self.turns = self.turns + 1
            place = self.place
            waited = time.monotonic() - place.since if place.waits else 0.0
            is_peer_silent = False
            if not beats % self._beats_per_look:
                if waited > _DEAD_AFTER_S or not self._local_ranks.are_known:
                    states = self.board.read(range(self.world_size))
                    self._local_ranks.update(states)
                    is_peer_silent = self._has_silent_rank(states)
            self.report_dead_neighbours()
            self.board.read_store_rank(again=self.world_size <= _FEW_RANKS)
            cause = self.board.cause()
            if not self.board.has_store and not self._is_leaving:
                cause = cause or self.board.lost_text()
            if cause and not self.closed.is_set():  # the store may have answered late
                self.leave_after_peer(cause)
            deadline = self.timeout_s if place.timeout_s is None else place.timeout_s
            if waited > deadline:
                self._die(f"deadline of {deadline:.0f} s passed")
            elif waited > _DEAD_AFTER_S and is_peer_silent:
                self._die("a peer is dead")

    def _has_silent_rank(self, states: Sequence[dict | None]) -> bool:
        """Return whether some rank has written a state, but none for long."""
        # Of every rank: the first states that are seen tell how the clocks of hosts differ.
        silent = [self._silence.seconds(rank, state) for rank, state in enumerate(states) if state]
        return max(silent, default=0.0) > _DEAD_AFTER_S

    def _die(self, why: str) -> None:
        self.leave(f"[rank {self.rank}] {why}\n{self.report()}\n{self.last_line()}")

    def last_line(self) -> str:
        """Write this rank's last collectives; return the last line of its report."""
        left = leave_record(self._flight_folder, rank=self.rank)
        return f"{left}This rank ends with exit code {EXIT_CODE}."

    def leave(self, text: str, *, is_told: bool = True) -> None:
        """End this process with EXIT_CODE. Returns only if another thread ends it already."""
        if not self.claim_ending():
            return
        try:
            with contextlib.suppress(OSError):  # the launcher may have held the other end
                say(text, file=sys.stderr, flush=True)
            if is_told:
                self.announce_leaving()
            self.close_early("failed")
            self._linger()
        finally:
            # Not sys.exit: the main thread is inside a collective and never gets to see it.
            os._exit(EXIT_CODE)

    def _linger(self) -> None:
        # Under srun the store lives in rank 0: leave it up until the others have read it.
        if self._store_rank == self.rank and self.world_size > 1:
            time.sleep(_LINGER_S)

    def _beat(self) -> None:
        if not self.is_ending:
            self._beat_at = time.monotonic()
            self.board.write(self._state())

    def _state(self) -> dict[str, Any]:
        state = {"place": self.place._asdict(), "line": users_place(self._main)} | self._process
        return state | {"beat": self._beat_at} | ({"left": True} if self._is_leaving else {})


def _watch_store(watch: Watch) -> None:
    # A node that loses power closes no connection. A request to a store there takes a quarter of
    # an hour, and until then the other thread checks no deadline.
    turns = -1
    silent_s = 0.0
    while not watch.closed.wait(watch.beat_s):
        if watch.is_orphaned():
            watch.leave_after_peer("its launcher is gone")
        silent_s = silent_s + watch.beat_s if turns == watch.turns else 0.0
        turns = watch.turns
        if silent_s > max(watch.timeout_s, _LEAST_SILENT * watch.beat_s):
            watch.leave(
                f"[rank {watch.rank}] in {watch.place}: the job's store has not answered for "
                f"{silent_s:.0f} s: {watch.board.lost_text()}\n{watch.last_line()}",
                is_told=False,
            )
            os._exit(EXIT_CODE)  # the thread that was ending it waits for the store too


def _ending_with(leave: Callable[[str], None], run: Callable[[], None]) -> None:
    """Run a thread of the watch. If it fails, end the process: nobody would notice lost ranks."""
    try:
        run()
    except Exception as error:
        traceback.print_exc()
        leave(f"the watch over the other ranks failed: {first_line(error)}")


_PEER_TEXTS = (
    "connection closed",  # gloo, and NCCL with "by remote peer"
    "connection reset",
    "connection refused",
    "broken pipe",
    "by peer",
    "remote process",
    "ncclremoteerror",
    "communicator was aborted",
    "timed out",
    "timeout",
)
_LOCAL_TEXTS = ("cuda error", "out of memory")


def is_peer_error(error: Exception) -> bool:
    """Return whether a collective failed because another rank is gone, rather than for lack of
    memory or a wrong call."""
    if isinstance(error, RunFailed):
        return False  # a user's code or a disk may have timed out
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    is_local = any(words in text for words in _LOCAL_TEXTS)
    return not is_local and any(words in text for words in _PEER_TEXTS)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(message_of(error).splitlines() or ['(no text)'])[0]}"


def store_timeout(seconds: float) -> timedelta:
    """Return a group timeout that is longer than a Watch deadline, which should report first."""
    return timedelta(seconds=seconds + 60)
