"""Cross-rank waits with a name and a deadline, and the small exchanges built on them.

Every statement that can block on another rank stands inside `watch.wait(name, step)`. A
thread per rank keeps a heartbeat in the job's store; when a deadline passes, or a peer's
heartbeat stops, or the collective fails because a peer is gone, the rank says who is missing,
in which phase and step, and the process ends with EXIT_CODE. A rank that ends by an error of its
own says so in the store; the others repeat its words and end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from spmdrl.world.torch_internals import all_gather_single

Ending = Literal["stopped", "failed"]
EXIT_CODE = 13
_BEAT_S = 1.0
_LINGER_S = 5.0
_CAUSE, _ENDED = "watch/cause", "watch/ended"
_DEAD_AFTER_S = 60.0  # a rank may hold the interpreter lock for seconds while it compiles


class PeersMissing(RuntimeError):
    """A collective failed because other ranks are gone; the message names them."""


class Watch:
    """Names and times the waits of one rank, and reports who is missing when one is late.

    Args:
        store: a key-value store of the job, used by this object alone.
        rank, world_size: of the whole job.
        timeout_s: deadline of one wait, seconds; may be changed between waits.
        hosts_store: whether the store lives in this process and ends with it.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        hosts_store: bool = False,
    ):
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.before_exit: list[Callable[[Ending], None]] = []
        """Called when the process ends before its work is done; each must be quick."""
        self.seconds: dict[str, float] = {}
        """Per phase and wait, since `take_seconds`."""
        self.totals: dict[str, float] = {}
        """The same since the start."""
        self._store, self._lock, self._hosts_store = store, threading.Lock(), hosts_store
        self._ending = threading.Lock()  # taken once, by the thread that ends the process
        self._phase, self._step, self._since, self._waiting = "start", -1, time.time(), False
        self._has_store, self._closed = True, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="spmdrl-watch")
        self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Name local work, so that others can say where this rank is; adds to `seconds`."""
        with self._entered(name, step, waiting=False):
            yield

    @contextlib.contextmanager
    def wait(self, name: str, step: int) -> Iterator[None]:
        """Name a stretch that can block on other ranks and bound it by `timeout_s`.

        Raises: PeersMissing naming the missing ranks when a collective inside fails because a
            peer is gone. Past the deadline the process exits with EXIT_CODE.
        """
        with self._entered(name, step, waiting=True):
            try:
                yield
            except (dist.DistError, RuntimeError) as error:
                if not _is_peer_error(error):
                    raise
                time.sleep(3 * _BEAT_S)  # let a dying peer's last heartbeat grow old
                message = f"{self.report()}\ncaused by: {first_line(error)}"
                self._linger()
                raise PeersMissing(message) from error

    @contextlib.contextmanager
    def _entered(self, name: str, step: int, *, waiting: bool) -> Iterator[None]:
        before = (self._phase, self._step, self._since, self._waiting)
        began = time.time()
        with self._lock:
            self._phase, self._step, self._since, self._waiting = name, step, began, waiting
        self._beat()
        try:
            yield
        finally:
            with self._lock:
                self._phase, self._step, self._since, self._waiting = before
            for seconds in (self.seconds, self.totals):
                seconds[name] = seconds.get(name, 0.0) + time.time() - began

    def take_seconds(self) -> dict[str, float]:
        """Return seconds spent per phase and wait since the last call, and start anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def report(self) -> str:
        """Say where every rank is: who waits, who is missing, whose heartbeat stopped."""
        now, states = time.time(), {}
        for rank in range(self.world_size):
            states[rank] = self._read(rank)
        me = f"'{self._phase}' at step {self._step}"
        lines = [f"rank {self.rank} waited {now - self._since:.0f} s in {me}"]
        for rank, state in states.items():
            if rank == self.rank:
                continue
            if state is None:
                lines.append(f"  rank {rank} is missing: it never reported, or the store is gone")
                continue
            if "error" in state:
                lines.append(f"  rank {rank} ended with {state['error']}")
                continue
            silent = now - state["beat"]
            where = f"'{state['phase']}' at step {state['step']}"
            if silent > 2.5 * _BEAT_S:
                lines.append(
                    f"  rank {rank} is missing: no sign of life for {silent:.0f} s, "
                    f"last seen in {where} (killed, or its process stopped)"
                )
            elif (state["phase"], state["step"]) != (self._phase, self._step):
                lines.append(f"  rank {rank} is missing: {now - state['since']:.0f} s in {where}")
            else:
                lines.append(f"  rank {rank} waits in {where} too")
        return "\n".join(lines)

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()
        self._thread.join(timeout=10)

    # ---------------------------------------------------------------- ending

    @property
    def is_ending(self) -> bool:
        """Whether some thread is ending this process."""
        return self._ending.locked()

    def claim_ending(self, *, wait: bool = False) -> bool:
        """Return whether the caller is the first thread to end this process.

        Args:
            wait: sleep instead of returning False: the thread that was first ends us all.
        """
        return self._ending.acquire(blocking=wait)

    def close_early(self, ending: Ending) -> None:
        """Run `before_exit`."""
        for close in self.before_exit:
            close(ending)

    def claim_cause(self, text: str) -> bool:
        """Say why this rank ends; return whether no rank has given the same reason before."""
        said = json.dumps({"rank": self.rank, "error": text})
        try:
            first = json.loads(self._store.compare_set(_CAUSE, "", said))
        except (dist.DistError, RuntimeError):  # the store is gone, and its host with it
            return True
        return first["rank"] == self.rank or first["error"] != text

    def tell_end(self, text: str) -> None:
        """Let the other ranks end: they show `text` as what this rank ended with."""
        with contextlib.suppress(dist.DistError, RuntimeError):  # as above
            self._store.set(f"watch/{self.rank}", json.dumps({"error": text}))
            self._store.set(_ENDED, str(self.rank))
        self._linger()

    def peer_error(self) -> str:
        """Return `rank R ended with ...` of the rank that failed first; empty for none."""
        try:
            if self._has_store and self._store.check([_CAUSE, _ENDED]):
                first = json.loads(self._store.get(_CAUSE))
                return f"rank {first['rank']} ended with {first['error']}"
        except (dist.DistError, RuntimeError):
            self._has_store = False
        return ""

    def _run(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self._beat()
            if cause := self.peer_error():
                self.leave_after_peer(cause)
            with self._lock:
                waited = time.time() - self._since if self._waiting else 0.0
            if waited > self.timeout_s or (waited > _DEAD_AFTER_S and self._some_rank_is_dead()):
                self._die(
                    f"deadline of {self.timeout_s:.0f} s passed"
                    if waited > self.timeout_s
                    else "a peer is dead"
                )

    def leave_after_peer(self, cause: str) -> None:
        """End this process because a peer failed; returns only when it is ending already."""
        self._leave(f"[rank {self.rank}] ends in '{self._phase}' at step {self._step}: {cause}")

    def _die(self, why: str) -> None:
        self._leave(
            f"[rank {self.rank}] {why}\n{self.report()}\nThis rank ends with exit code {EXIT_CODE}."
        )

    def _leave(self, text: str) -> None:
        if not self.claim_ending():
            return
        try:
            print(text, file=sys.stderr, flush=True)
            self.close_early("failed")
            self._linger()
        finally:
            # Not sys.exit: the main thread is inside a collective and never gets to see it.
            os._exit(EXIT_CODE)

    def _linger(self) -> None:
        # Under srun the store lives in rank 0: leave it up until the others have read it.
        if self._hosts_store and self.world_size > 1:
            time.sleep(_LINGER_S)

    def _some_rank_is_dead(self) -> bool:
        states = [self._read(rank) for rank in range(self.world_size)]
        return any(
            s is not None and time.time() - s.get("beat", 0.0) > _DEAD_AFTER_S for s in states
        )

    def _beat(self) -> None:
        with self._lock:
            state = dict(phase=self._phase, step=self._step, since=self._since, beat=time.time())
        if self._has_store and not self.is_ending:
            try:
                self._store.set(f"watch/{self.rank}", json.dumps(state))
            except (dist.DistError, RuntimeError):
                self._has_store = False  # its host is gone; the collectives will say so

    def _read(self, rank: int) -> dict | None:
        if self._has_store:
            try:
                if self._store.check([f"watch/{rank}"]):
                    return json.loads(self._store.get(f"watch/{rank}"))
            except (dist.DistError, RuntimeError):
                self._has_store = False
        return None


def _is_peer_error(error: Exception) -> bool:
    words = ("connection", "peer", "socket", "timed out", "timeout", "gloo", "nccl", "store")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['(no text)'])[0]}"


def gather_objects(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's small picklable value, in rank order of `group` (a gloo group)."""
    payload = pickle.dumps(value)
    return list(
        map(pickle.loads, gather_bytes(payload, gather_sizes(payload, group=group), group=group))
    )


def gather_problems(own: Sequence[str], *, group: dist.ProcessGroup) -> list[str]:
    """Return what is wrong on any rank of `group` (gloo), equal on all of them; [] for nothing.

    Each text stands there once, with the first rank that gave it, or by itself when rank 0 has
    given all of them.
    """
    gathered = gather_objects(list(own), group=group)
    first_rank: dict[str, int] = {}
    for rank, texts in enumerate(gathered):
        for text in texts:
            first_rank.setdefault(text, rank)
    if not any(first_rank.values()):
        return list(first_rank)
    return [f"rank {rank}: {text}" for text, rank in first_rank.items()]


@contextlib.contextmanager
def agree(
    *,
    group: dist.ProcessGroup,
    kind: type[Exception] = ValueError,
    waiting: AbstractContextManager = contextlib.nullcontext(),
) -> Iterator[None]:
    """Let a block of each rank's own work succeed on all ranks of `group` (gloo), or on none.

    Args:
        kind: what the block may raise. Anything else ends this rank at once.
        waiting: entered for the exchange after the block, e.g. a named wait of Watch.
    Raises: `kind` on every rank when any block raised it: what the first of them said.
    """
    own = None
    try:
        yield
    except kind as error:
        own = error
    with waiting:
        texts = gather_objects(None if own is None else str(own), group=group)
    for rank, text in enumerate(texts):
        if text is not None:
            raise kind(f"rank {rank}: {text}" if rank else text) from own


def gather_sizes(payload: bytes, *, group: dist.ProcessGroup) -> list[int]:
    """Return the length of every rank's payload: the first half of a gather, which waits."""
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    all_gather_single(sizes, torch.tensor([len(payload)]), group=group)
    return sizes.tolist()


def gather_bytes(payload: bytes, sizes: Sequence[int], *, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's payload, in rank order of `group`: the second half of a gather."""
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8)
    all_gather_single(gathered, padded, group=group)
    return [row[:size].numpy().tobytes() for row, size in zip(gathered.chunk(len(sizes)), sizes)]


def store_timeout(seconds: float) -> timedelta:
    """Return the group timeout that lies behind a Watch deadline, which should speak first."""
    return timedelta(seconds=seconds + 60)
