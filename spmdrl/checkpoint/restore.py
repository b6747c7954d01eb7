"""Resume: find the newest whole checkpoint that this run can continue from, and load it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

import spmdrl.checkpoint.keep as keep
import spmdrl.checkpoint.manifest as disk
from spmdrl.checkpoint.state import Saved, SavedSource, set_rng_state, tensor_leaves
from spmdrl.config import Config
from spmdrl.errors import Refusal, say
from spmdrl.imports import attempt, refusing
from spmdrl.same_run.data_files import data_digests
from spmdrl.same_run.differences import Difference, config_of, differences, is_among
from spmdrl.world.comm import gather_objects, gather_problems
from spmdrl.world.world import World

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "output_dir",
    "steps",
    "dry_run",
    "layout.",
    "stream.",
    "checkpoint.",
    "evaluate.",
    "report.",
    "data.eval",
    "data.eval_size",
    "rewards.workers",
    "rewards.timeout_s",
    "engine.gpu_memory_frac",
    "engine.cpu_kv_cache_gib",
    "engine.max_num_seqs",
    "engine.max_batched_tokens",
    "model.memory.",
    "batch.share_prefixes",
    "batch.tokens_per_microbatch",
    "rollout.record.every",
)
"""Fields, and sections (names that end in a dot), that may change at a resume. They say where, how
fast or how long a run trains, or what it prints, and do not change its result."""
_SIZE_FIELDS = (
    "layout.",
    "model.",
    "batch.",
    "data.max_prompt_tokens",
    "sampling.max_response_tokens",
    "algorithm.",
    "critic.",
    "engine.",
    "stream.bucket_bytes",
    "rollout.schedule.",
)
"""Fields and sections that the memory of a micro-batch depends on, except `_NO_SIZE_FIELDS`."""
_NO_SIZE_FIELDS = ("layout.startup_timeout_s", "layout.wait_timeout_s")
"""Fields of these sections that it does not depend on."""
_MOST_SHOWN = 8


@dataclass(frozen=True)
class TrainState:
    """Where training starts."""

    step: int
    """Steps already done; 0 when fresh."""
    resumed_from: str = ""
    """Checkpoint folder; empty when fresh."""


def restore(cfg: Config, world: World, *, policy: Saved, source: SavedSource) -> TrainState:
    """Fill policy and source from the checkpoint that `checkpoint.resume` asks for.

    A damaged checkpoint is named, set aside as `.damaged`, and the one before it is used. The
    layout may differ from the one that wrote it.

    Args:
        cfg, world: of this job; every rank calls.
        policy: its tensors are written in place (trainer ranks).
        source: gets the rollouts that were made ahead.
    Returns: step 0 when there is nothing to resume.
    Raises: Refusal when the requested checkpoint does not exist, none is whole, the config
        differs in what shapes the result, or the model is another one.
    """
    folders, problem = world.from_rank_0(lambda: candidate_folders(cfg), wait="find checkpoint")
    if problem:
        raise Refusal(problem)
    state = TrainState(0)
    damaged: dict[Path, str] = {}
    for folder in folders:
        content, problem = _verify(folder, world)
        if content is not None:
            _check_config(content, cfg, folder=folder, is_speaker=world.rank == 0)
            problem = _load(folder, content, cfg=cfg, world=world, policy=policy, source=source)
        if content is not None and not problem:
            world.found_tokens = _found_tokens(content, cfg)
            state = TrainState(content.step, str(folder))
            break
        damaged[folder] = problem
        if world.rank == 0:
            log.warning("checkpoint %s cannot be used: %s", folder, problem)
    # Before `_tidy`: a run that is refused renames and removes nothing.
    if damaged and not state.resumed_from:
        raise Refusal(_none_usable(damaged))
    if world.rank == 0:
        _tidy(cfg, damaged)
    return state


def _none_usable(damaged: Mapping[Path, str]) -> str:
    lines = "\n".join(f"  {folder}: {problem}" for folder, problem in damaged.items())
    return (
        f"no checkpoint can be used:\n{lines}\nGive another by checkpoint.resume, or start afresh "
        "in another output_dir"
    )


def already_finished(cfg: Config, world: World) -> bool:
    """Return on all ranks whether this run has already done all its steps; rank 0 prints it.

    It is called before any engine is built. It returns False for a checkpoint that is damaged or
    has another config; `restore` deals with these.
    """
    done = world.from_rank_0(lambda: _finished_steps(cfg), wait="find checkpoint")
    if done and world.rank == 0:
        more = ""
        if cfg.optimizer.schedule != "constant":
            more = " and allow that the schedule changes, by --checkpoint.allow-config-change,"
        say(
            f"{cfg.output_dir}: already finished: {done} of {cfg.steps} steps; raise --steps"
            f"{more} to go on",
            flush=True,
        )
    return done > 0


def _finished_steps(cfg: Config) -> int:
    folders, _ = candidate_folders(cfg)
    if not folders:
        return 0
    content, problem = _read(folders[0])
    if content is None or problem or content.step < cfg.steps:
        return 0
    return 0 if config_differences(content.config, cfg) else content.step


def candidate_folders(cfg: Config) -> tuple[list[Path], str]:
    """Return the checkpoints to try, newest first, and what is wrong with the request."""
    root = disk.checkpoints_folder(cfg.output_dir)
    resume = cfg.checkpoint.resume
    found = disk.complete_checkpoints(root)
    if resume == "auto":
        return found, ""
    if resume == "never":
        if not found:
            return [], ""
        return [], (
            f"checkpoint.resume is never, but {found[0]} exists; resume it with `auto`, "
            "or set another output_dir"
        )
    path = Path(resume)
    if not (path / disk.NAME).is_file():
        inside = disk.complete_checkpoints(path)
        inside = inside or disk.complete_checkpoints(disk.checkpoints_folder(path))
        hint = "; name one, such as RUN/checkpoints/step_100, or auto, or never"
        if inside:
            hint = f"; did you mean {inside[0]}?"
        return [], (
            f"checkpoint.resume: {path} has no {disk.NAME}, so it is not a complete "
            f"checkpoint{hint}"
        )
    content, _ = attempt(lambda: disk.read_manifest(path))
    if content is not None and found and disk.step_of(found[0]) > content.step:
        return [], (
            f"checkpoint.resume: {path} is of step {content.step}, older than {found[0]}; going "
            "on from it would mix two histories in one output_dir. Set another output_dir, move "
            "the newer ones away, or resume with `auto`"
        )
    return [path], ""


def resume_problems(cfg: Config) -> list[str]:
    """Return why a run could not resume from its checkpoints. This reads their manifests, the sizes
    of their files and their indices of tensors, but no contents; and digests of data.train."""
    folders, problem = candidate_folders(cfg)
    if problem:
        return [problem]
    damaged: dict[Path, str] = {}
    # As in `restore`, damaged checkpoints are skipped and the first whole one decides.
    for folder in folders:
        content, problem = _read(folder)
        if content is None or problem:
            damaged[folder] = problem
            continue
        text = _difference_text(content, cfg, folder=folder)
        if text and not cfg.checkpoint.allow_config_change:
            return [f"{text}\n{_advice()}"]
        if text := _data_text(content, cfg, folder=folder):
            if not cfg.checkpoint.allow_config_change:
                return [text]
            log.warning("%s\nallowed by checkpoint.allow_config_change", text)
        _, error = attempt(disk.TensorReader(folder / disk.POLICY).read_metadata)
        return [str(error)] if error else []
    return [_none_usable(damaged)] if damaged else []


def _read(folder: Path) -> tuple[disk.Manifest | None, str]:
    """Return a checkpoint's manifest, and what is wrong with it or with the sizes of files."""
    content, error = attempt(lambda: disk.read_manifest(folder))
    if content is None:
        return None, str(error)
    return content, "; ".join(disk.damages(folder, content, digests=False))


def _verify(folder: Path, world: World) -> tuple[disk.Manifest | None, str]:
    """Return a checkpoint's manifest, or what is wrong; each rank reads its share of the files."""
    content, problem = world.from_rank_0(lambda: _read(folder), wait="find checkpoint")
    if content is None or problem:
        return None, problem
    with world.watch.wait("verify checkpoint", content.step):
        mine = disk.damages(folder, content, part=world.rank, num_parts=world.world_size)
        problems = [p for part in gather_objects(mine, group=world.control) for p in part]
    return (None, "; ".join(problems)) if problems else (content, "")


# --------------------------------------------------------------------------- comparing


def config_differences(saved: dict[str, Any], cfg: Config) -> list[Difference]:
    """Return the fields that shape the result and differ.

    Args:
        saved: config of the checkpoint.
        cfg: the present config.
    """
    return _differences(saved, cfg, may_differ=may_change(cfg.optimizer.schedule))


def may_change(schedule: str) -> tuple[str, ...]:
    """Return what may change at a resume of a run of such an optimizer.schedule."""
    if schedule == "constant":
        return MAY_CHANGE
    # A decaying learning rate is a function of the number of steps.
    return tuple(name for name in MAY_CHANGE if name != "steps")


def _differences(
    saved: dict[str, Any], cfg: Config, *, may_differ: tuple[str, ...] = ()
) -> list[Difference]:
    return differences({"config": saved}, {"config": config_of(cfg)}, may_differ=may_differ)


def _check_config(content: disk.Manifest, cfg: Config, *, folder: Path, is_speaker: bool) -> None:
    text = _difference_text(content, cfg, folder=folder)
    if not text:
        return
    if not cfg.checkpoint.allow_config_change:
        raise Refusal(f"{text}\n{_advice()}")
    if is_speaker:
        log.warning("%s\nallowed by checkpoint.allow_config_change", text)


def _difference_text(content: disk.Manifest, cfg: Config, *, folder: Path) -> str:
    found = config_differences(content.config, cfg)
    lines = [f"the config differs from that of {folder}:", *(f"  {one}" for one in found)]
    return "\n".join(lines) if found else ""


def _data_text(content: disk.Manifest, cfg: Config, *, folder: Path) -> str:
    """Return which files of data.train hold other rows than when a checkpoint was saved, or why
    one cannot be read."""
    now, error = attempt(lambda: data_digests(cfg))
    if now is None:
        return str(error)
    found = differences({"data": content.data}, {"data": now})
    if not found:
        return ""
    return (
        f"{'; '.join(map(str, found))}: by its sha256 the file is not that of {folder}, so later "
        "steps would take other rows; put the old file back, or continue with the new one by "
        "--checkpoint.allow-config-change"
    )


def _advice() -> str:
    free = ", ".join(f"{name}*" if name.endswith(".") else name for name in MAY_CHANGE)
    return (
        "Set the old values, or go on with the new ones by --checkpoint.allow-config-change, or "
        f"start in another output_dir. These may change freely: {free}; steps only where "
        "optimizer.schedule is constant"
    )


def _found_tokens(content: disk.Manifest, cfg: Config) -> int:
    """Return the tokens of a micro-batch that the run chose before; with the same size even the
    last bits repeat. Return 0 if a setting changed on which the memory depends: that size may be
    too large, or a larger one may fit."""
    differing = _differences(content.config, cfg, may_differ=_NO_SIZE_FIELDS)
    names = [one.name for one in differing if is_among(one.name, _SIZE_FIELDS)]
    if names and content.found_tokens:
        log.info(
            "the size of a micro-batch is found again, since these differ: %s", ", ".join(names)
        )
    return 0 if names else content.found_tokens


def _tensor_differences(reader: disk.TensorReader, tensors: dict[str, Tensor]) -> list[str]:
    """Return in which tensors a checkpoint and the live state differ, the first few."""
    metadata, error = attempt(reader.read_metadata)
    if metadata is None:
        return [str(error)]
    saved = metadata.state_dict_metadata
    problems = []
    other_dtypes = []
    for name in tensors.keys() & saved.keys():
        own = tensors[name]
        entry = saved[name]
        if tuple(entry.size) != tuple(own.shape):
            problems.append(f"{name} has shape {tuple(entry.size)} there, {tuple(own.shape)} here")
        if entry.properties.dtype != own.dtype:
            other_dtypes.append(
                f"{name} is {entry.properties.dtype} there, {own.dtype} here; set "
                "model.memory.master_dtype and optimizer_dtype as they were"
            )
    # One setting changes the dtype of all tensors, so one line stands for all.
    problems = sorted(problems) + sorted(other_dtypes)[:1]
    only = {"there": saved.keys() - tensors.keys(), "here": tensors.keys() - saved.keys()}
    for where, names in only.items():
        if names:
            more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
            problems.append(f"only {where}: {', '.join(sorted(names)[:_MOST_SHOWN])}{more}")
    return problems[:_MOST_SHOWN]


# --------------------------------------------------------------------------- loading


def _load(
    folder: Path,
    content: disk.Manifest,
    *,
    cfg: Config,
    world: World,
    policy: Saved,
    source: SavedSource,
) -> str:
    """Load a checkpoint; return why it cannot be read, the same on every rank, empty where it was.

    Raises: Refusal when it is of another model, or a file has other contents than expected.
    """
    state: dict[str, Any] = {}
    reader = disk.TensorReader(folder / disk.POLICY)
    problems = []
    if world.is_trainer:
        state = policy.state_dict()
        problems = _tensor_differences(reader, tensor_leaves(state))
    with world.watch.wait("compare tensors", content.step):
        problems = gather_problems(problems, group=world.control)
    if problems:
        raise Refusal(f"{folder} does not hold this model: " + "; ".join(problems))
    rollout_files = [folder / f"rollouts_{rank}.pt" for rank in content.rollout_ranks]
    rng_file = folder / f"rng_{world.rank}.pt"
    # Generators are saved for each rank: on another layout they belong to no rank.
    differing = _differences(content.config, cfg)
    is_same_layout = not any(is_among(one.name, ("layout.",)) for one in differing)

    def load_own() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rollouts = [disk.load_plain(path) for path in rollout_files]
        return rollouts, disk.load_plain(rng_file) if is_same_layout else {}

    with world.watch.wait("load checkpoint", content.step):
        loaded, error = attempt(load_own, OSError)
        problems = _agree_on(error, world)
        if not problems:  # all ranks or none may enter the collective load below
            _, error = attempt(lambda: _read_tensors(state, reader, world), OSError)
            problems = _agree_on(error, world)
    if problems or loaded is None:
        return "; ".join(problems)
    rollouts, rng = loaded
    if world.is_trainer:
        policy.load_state_dict(state)
    kinds = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)
    hint = "; they were changed, or are of another version"
    fitting = partial(refusing, hint=hint, names_kind=True, passes_refusals=True)
    with fitting(f"{folder}: its rollouts_*.pt do not hold what they should", *kinds):
        source.load_state_dict(rollouts, content.step)
    if is_same_layout:
        with fitting(f"{rng_file} does not hold what it should", *kinds):
            set_rng_state(rng)
    return ""


def _agree_on(error: BaseException | None, world: World) -> list[str]:
    """Return the read errors of all ranks, on each of them."""
    own = [f"cannot be read: {error}"] if error else []
    return gather_problems(own, group=world.control)


def _read_tensors(state: dict[str, Any], reader: disk.TensorReader, world: World) -> None:
    """Read the live tensors of a state in place, on trainers. Raises: OSError, on all of them, if
    the disk of one failed."""
    if not world.is_trainer:
        return
    try:
        dcp.load(tensor_leaves(state), storage_reader=reader, process_group=world.saving)
    except dcp.api.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if not all(isinstance(cause, OSError) for cause in causes):
            raise disk.unreadable(reader, error) from error
        raise OSError("; ".join(dict.fromkeys(map(str, causes)))) from error


def _tidy(cfg: Config, damaged: Mapping[Path, str]) -> None:
    """Rename damaged checkpoints, so that the names of their steps are free again, and remove the
    unfinished ones of an earlier job."""
    for folder in damaged:
        aside = folder.with_name(folder.name + ".damaged")
        disk.remove(aside)
        disk.rename(folder, aside)
    root = disk.checkpoints_folder(cfg.output_dir)
    if root.is_dir():  # the best one may have been set aside, or be another by a new metric
        keep.link_best(root, cfg.checkpoint.keep)
    for left in sorted(root.glob("step_*.partial")):
        log.warning("removing %s: the job that wrote it ended before it was complete", left)
        disk.remove(left)
