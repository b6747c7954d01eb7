"""Saving: copy the state, write it in a background thread, complete it by one rename.

Every rank calls the same methods at the same steps. At the next step boundary where all ranks
have written, rank 0 writes the manifest and renames `step_N.partial` to `step_N`. A job killed
at any moment leaves complete checkpoints, or a `.partial` folder that nobody reads.
"""

from __future__ import annotations

import concurrent.futures
import io
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import spmdrl.checkpoint.keep as keep
import spmdrl.checkpoint.manifest as disk
from spmdrl import run_folder
from spmdrl.checkpoint.restore import TrainState, restore
from spmdrl.checkpoint.state import Saved, SavedSource, rng_state, tensor_leaves
from spmdrl.config import Config
from spmdrl.errors import RunFailed
from spmdrl.imports import attempt
from spmdrl.plain import record
from spmdrl.report.glossary import values_of
from spmdrl.same_run.data_files import data_digests
from spmdrl.same_run.differences import config_of
from spmdrl.types import Sums
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_NOTICED_S = 1.0
"""A wait for the disk that is shorter than this is not reported."""
_Files = dict[str, disk.FileEntry]


@record
@dataclass(frozen=True)
class _Outcome:
    """What one rank wrote, or why it could not."""

    files: _Files
    problem: str = ""
    is_disk: bool = True  # the problem is an OSError, which a later save may not have


@dataclass(frozen=True)
class _Pending:
    """The save that is under way."""

    step: int
    written: Future[_Files]
    rollout_ranks: tuple[int, ...]
    began: float
    evaluated: dict[str, float]


class Checkpointer:
    """Saves and restores one job. Every method is called by every rank, in one order.

    Args:
        cfg: output_dir, steps and the checkpoint section say when and where.
        world: ranks, and the gloo groups; `saving` is used by the writing thread
            and must be left alone while a save is under way.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.root = disk.checkpoints_folder(cfg.output_dir)
        # Now, since a file that is replaced later may be in memory.
        self._data = data_digests(cfg) if world.rank == 0 else {}
        self.is_stopped = False
        """Whether all ranks agreed to end the run before its last step."""
        self._pending: _Pending | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="spmdrl-checkpoint")
        self._stager: DefaultStager | None = None

    def restore(self, policy: Saved, source: SavedSource) -> TrainState:
        """Fill policy and source from the checkpoint of `checkpoint.resume`; see `restore`."""
        state = restore(self.cfg, self.world, policy=policy, source=source)
        source.start(state.step)
        return state

    def save_or_stop(
        self, step: int, policy: Saved, source: SavedSource, evaluated: Sums, *, stop: bool = False
    ) -> bool:
        """Save if it is time, and return on every rank whether the run ends here.

        It ends when any rank got a signal (Ctrl-C, SIGTERM, SIGUSR1), or if any rank passes `stop`.

        Args, raises: see `maybe_save`.
        """
        self.is_stopped = self.world.agree_to_stop(step, stop=stop)
        self.maybe_save(step, policy, source, evaluated=evaluated, stop=self.is_stopped)
        return self.is_stopped

    def maybe_save(
        self,
        step: int,
        policy: Saved,
        source: SavedSource,
        *,
        evaluated: Sums | None = None,
        stop: bool = False,
    ) -> None:
        """Save when `checkpoint.every_steps` divides `step`, after the last step, on `stop`, or
        when `checkpoint.keep.best` is better than in every checkpoint that there is.

        Blocks for a copy of the state; writing goes on beside training. The last save of a
        job is waited for. A full disk costs that checkpoint: it is reported, removed, and the
        run goes on.

        Args:
            step: training steps done.
            evaluated: the evaluation of these weights, equal on every rank; empty when not due.
            stop: this is the last call of the job (a signal arrived).
        Raises: RunFailed when the disk fails in the last save; RuntimeError when any save fails for
            another reason.
        """
        self._settle()
        is_last = stop or step == self.cfg.steps
        every = self.cfg.checkpoint.every_steps
        values = values_of(evaluated or {})
        is_due = is_last or (every > 0 and step % every == 0)
        if not is_due and not self._is_new_best(step, values):
            return
        # Only one save at a time: the writing thread uses `world.saving`.
        self._settle(wait=True)
        self._begin(step, policy, source, evaluated=values, is_last=is_last)
        if is_last:
            self._settle(wait=True, must_succeed=True)

    def check(self, evaluated: Sums) -> None:
        """Refuse a `checkpoint.keep.best` that the first evaluation did not measure.

        Raises: Refusal naming the nearest metric.
        """
        keep.check_measured(self.cfg, values_of(evaluated))

    def _is_new_best(self, step: int, values: dict[str, float]) -> bool:
        options = self.cfg.checkpoint.keep
        if options.best not in values:
            return False
        self._settle(wait=True)  # the save under way may hold the best so far
        return self.world.from_rank_0(
            lambda: keep.is_new_best(self.root, options, values), wait="checkpoint", step=step
        )

    def finish(self) -> None:
        """Wait until the save under way is complete. Raises: as `maybe_save` for the last one."""
        self._settle(wait=True, must_succeed=True)
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _staging(self) -> DefaultStager:
        """Return what copies tensors to the host before they are written.

        It keeps its memory from save to save, as much as this rank's part of the state; on CUDA
        this is pinned. It returns when all is copied, so that a save is of the state at its call.
        Only one save is under way, so that no memory is written into while it is saved.
        """
        if self._stager is None:
            on_gpu = self.world.device.type == "cuda"
            options = StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
            self._stager = DefaultStager(options)
        return self._stager

    def _begin(
        self,
        step: int,
        policy: Saved,
        source: SavedSource,
        *,
        evaluated: dict[str, float],
        is_last: bool,
    ) -> None:
        began = time.monotonic()
        partial = self._partial(step)
        held = source.state_dict()
        problem = _os_error(lambda: _make_folder(partial)) if self.world.rank == 0 else ""
        # Also a barrier: no rank writes before rank 0 has made the folder.
        shared = self.world.gather((problem, held is not None), wait="begin checkpoint", step=step)
        if shared[0][0]:
            self._give_up(step, shared[0][0], is_fatal=is_last, is_disk=True)
            return
        tensors: Future | None = None
        with self.world.watch.phase("copy checkpoint", step):
            extra = {f"rng_{self.world.rank}.pt": _packed(rng_state())}
            if held is not None:
                extra[f"rollouts_{self.world.rank}.pt"] = _packed(held)
            if self.world.is_trainer:
                # Returns as soon as the tensors are copied.
                tensors = dcp.async_save(
                    tensor_leaves(policy.state_dict()),
                    storage_writer=_TensorWriter(partial / disk.POLICY),
                    process_group=self.world.saving,
                    async_stager=self._staging(),
                )
        written = self._writer.submit(
            _write, partial, self.world.rank, tensors=tensors, extra=extra
        )
        ranks = tuple(rank for rank, (_, holds) in enumerate(shared) if holds)
        self._pending = _Pending(step, written, ranks, began, evaluated)

    def _settle(self, *, wait: bool = False, must_succeed: bool = False) -> None:
        """Complete the save under way, if all ranks have written or are to be waited for."""
        pending = self._pending
        if pending is None:
            return
        limit = self.cfg.checkpoint.write_timeout_s if wait else None
        if wait:
            self._wait_for_disk(pending, limit)
        found = self._gather(_outcome(pending.written), pending, limit)
        outcomes = [outcome for outcome in found if outcome is not None]
        # Some rank still writes: a later call completes the save.
        if len(outcomes) < len(found):
            return
        failed = [f"rank {r}: {o.problem}" for r, o in enumerate(outcomes) if o.problem]
        if not failed:
            problem = ""
            if self.world.rank == 0:
                problem = _os_error(lambda: self._complete(pending, outcomes))
            problem = self._gather(problem, pending, limit)[0]
            failed = [f"rank 0: {problem}"] if problem else []
        self._pending = None
        if failed:
            # If only rank 0's `_complete` failed, this is True, which is right: it was an OSError.
            is_disk = all(outcome.is_disk for outcome in outcomes)
            is_fatal = must_succeed or not is_disk
            self._give_up(pending.step, "; ".join(failed), is_fatal=is_fatal, is_disk=is_disk)

    def _gather(self, own: Any, pending: _Pending, limit: float | None) -> list[Any]:
        return self.world.gather(own, wait="checkpoint", step=pending.step, timeout_s=limit)

    def _wait_for_disk(self, pending: _Pending, limit: float | None) -> None:
        # A separate wait: at the deadline it tells the rank with the slow disk from its peers.
        with self.world.watch.wait("write checkpoint", pending.step, timeout_s=limit):
            _, unfinished = concurrent.futures.wait([pending.written], timeout=_NOTICED_S)
            if unfinished:
                log.info(
                    "the checkpoint of step %d has been written for %.0f s; training waits for it",
                    pending.step,
                    time.monotonic() - pending.began,
                )
                concurrent.futures.wait(unfinished)

    def _complete(self, pending: _Pending, outcomes: list[_Outcome]) -> None:
        partial = self._partial(pending.step)
        files = {name: entry for o in outcomes for name, entry in o.files.items()}
        model = self.cfg.model
        content = disk.Manifest(
            step=pending.step,
            config=config_of(self.cfg),
            model=_absolute_folder(model.path),
            tokenizer=_absolute_folder(model.tokenizer or model.path),
            rollout_ranks=pending.rollout_ranks,
            files=files,
            evaluated=pending.evaluated,
            found_tokens=self.world.found_tokens,
            data=self._data,
        )
        missing = disk.damages(partial, content, digests=False)
        if missing:
            raise OSError(
                f"{missing[0]}; output_dir must be on a file system that every rank shares"
            )
        # All of it is on the disk before the rename, so a machine that crashes right after the
        # rename leaves a whole checkpoint.
        disk.write_manifest(partial, content)
        disk.sync_folder(partial / disk.POLICY)
        disk.sync_folder(partial)
        final = disk.step_folder(self.root, pending.step)
        disk.rename(partial, final)
        disk.sync_folder(self.root)
        size = sum(entry.size for entry in files.values())
        log.info("saved %s (%.1f MB, %.1f s)", final, size / 1e6, time.monotonic() - pending.began)
        problem = _os_error(lambda: keep.prune(self.root, self.cfg.checkpoint.keep))
        if problem:
            log.warning("an old checkpoint could not be removed: %s", problem)

    def _give_up(self, step: int, problem: str, *, is_fatal: bool, is_disk: bool) -> None:
        kept = disk.complete_checkpoints(self.root)
        text = (
            f"checkpoint of step {step} could not be written: {problem}. "
            f"Newest complete checkpoint: {kept[0] if kept else 'none'}"
        )
        if is_disk:
            text += ". Free disk space, or set another output_dir"
        if self.world.rank == 0:
            _os_error(lambda: disk.remove(self._partial(step)))
        if is_fatal:
            raise RunFailed(text) if is_disk else RuntimeError(text)
        if self.world.rank == 0:
            log.warning("%s; training goes on", text)

    def _partial(self, step: int) -> Path:
        final = disk.step_folder(self.root, step)
        return final.with_name(final.name + ".partial")


def _write(partial: Path, rank: int, *, tensors: Future | None, extra: dict[str, bytes]) -> _Files:
    """Run in the writing thread: finish this rank's files and return their digests."""
    if tensors is not None:
        tensors.result()
    for name, content in extra.items():
        disk.write_file(partial / name, content)
    # DCP numbers its files by rank in the trainer group, which starts at rank 0.
    own = [*partial.glob(f"{disk.POLICY}/__{rank}_*.distcp")] if tensors is not None else []
    own += [partial / disk.POLICY / ".metadata"] if rank == 0 else []
    own += [partial / name for name in extra]
    return {str(p.relative_to(partial)): disk.file_entry(p) for p in own}


def _outcome(written: Future[_Files]) -> _Outcome | None:
    """Return the result of this rank's writing thread; None while it writes."""
    if not written.done():
        return None
    error = written.exception()
    if error is None:
        return _Outcome(written.result())
    causes = [error]
    if isinstance(error, dcp.api.CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    text = "; ".join(dict.fromkeys(f"{type(c).__name__}: {c}" for c in causes))
    return _Outcome({}, text, is_disk=all(isinstance(c, OSError) for c in causes))


class _TensorWriter(dcp.FileSystemWriter):
    """DCP's writer for tensors on the host, which lets the disk's own error through.

    On a full disk torch.save reports a broken zip file, with the OSError only as its context.
    """

    def __init__(self, folder: Path):
        # To copy ahead from GPUs, it would call CUDA. Its thread's device is the first GPU of the
        # node, where each rank would take some hundred MB.
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors. Raises: OSError as the disk gave it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None


def _make_folder(path: Path) -> None:
    disk.remove(path)
    run_folder.make_folder(path / disk.POLICY, within=path.parents[1])


def _os_error(work: Callable[[], None]) -> str:
    """Do some work and return its OSError as text, "" if it had none."""
    _, error = attempt(work, OSError)
    return f"{type(error).__name__}: {error}" if error else ""


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # refuse now what no resume could read
    return buffer.getvalue()


def _absolute_folder(model: str) -> str:
    """Return a model's folder as an absolute path; the name of one on the hub as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
