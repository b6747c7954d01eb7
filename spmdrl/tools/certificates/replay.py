"""Certified steps taken again from what a run left: a checkpoint, or the weights that it began
with, and recorded rollouts. No engine is built, and nothing of the run is changed.

`plan_ways` says from where each step can be reached, `replayed` goes there. Who wants a recorded
step for another purpose finds in `take_step` what train.py does with a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.certificate.compare import rounds, shapes
from spmdrl.certificate.fingerprint_collector import FingerprintCollector
from spmdrl.certificate.lines import Certified, Line, has_norms
from spmdrl.config import Config, trainer_ranks
from spmdrl.credit import advantages_of
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.roles import make_trainer
from spmdrl.rollout import model_limits
from spmdrl.rollout.recordings import Recorded, find_recorded, ranges
from spmdrl.rollout.replay_source import ReplaySource
from spmdrl.run_folder import remove
from spmdrl.same_run.differences import config_of, differences
from spmdrl.same_run.made_of import made_of
from spmdrl.same_run.user_code import PROGRAM
from spmdrl.tools.certificates.recorded import (
    check_checkpoint,
    check_files,
    go_to,
    take_batch,
    weights_of,
)
from spmdrl.types import Advantages, Batch, Sums
from spmdrl.world.launch import read_launch
from spmdrl.world.secret import private_folder
from spmdrl.world.world import World


@dataclass(frozen=True)
class Reached:
    """A certified step, and from where it is reached."""

    step: int
    start: int
    checkpoint: Path | None
    """Of `start`; None: the weights that the run began with, at step 0."""


def plan_ways(
    run: Certified, cfg: Config, *, asked: Sequence[int] = ()
) -> tuple[list[Reached], Recorded]:
    """Return how to reach the certified steps, or those asked for, ascending; and the recordings.

    Args:
        cfg: of the run.
    Raises: Refusal naming a step asked for that cannot be reached, and why; or that none can; or
        a checkpoint or recording of another run, layout or model.
    """
    recorded = find_recorded(run.run)
    starts = weights_of(run.run, cfg)
    ways = []
    reasons = []
    for step in sorted(asked or run.steps):
        way = _way(step, run, starts, recorded=recorded)
        if isinstance(way, Reached):
            ways.append(way)
        else:
            reasons.append(f"{run.run}: step {step} cannot be verified: {way}")
    if reasons and (asked or not ways):
        raise Refusal("\n".join(reasons))
    for way in ways:
        _check(run, cfg, way, recorded=recorded)
    return ways, recorded


def _way(
    step: int, run: Certified, starts: Mapping[int, Path | None], *, recorded: Recorded
) -> Reached | str:
    if step not in run.steps:
        return f"it is not certified; certified are {ranges(run.steps)}"
    before = [start for start in starts if start <= step]  # newest first
    for start in before:
        if all(s in recorded.steps for s in range(start, step + 1)):
            return Reached(step, start, starts[start])
    begin = before[0] if before else 0
    known = ranges(before) or "no step"
    gaps = _gaps([s for s in recorded.steps if begin <= s <= step], begin=begin, end=step)
    return f"weights there are of {known}, and from there steps {gaps} are not recorded"


def _gaps(steps: Sequence[int], *, begin: int, end: int) -> str:
    """Return what is missing between two steps, both included, for people.

    Args:
        steps: that are there, ascending. They may be few, and the end far.
    """
    texts = []
    for step in [*steps, end + 1]:
        if begin < step:
            texts.append(f"{begin}" if begin == step - 1 else f"{begin} to {step - 1}")
        begin = step + 1
    return ", ".join(texts)


def _check(run: Certified, cfg: Config, way: Reached, *, recorded: Recorded) -> None:
    """Refuse what is not of this run as its config.yaml has it."""
    for one in differences(run.made_at(way.step), {"config": config_of(cfg)}):
        if shapes(one, schedule=cfg.optimizer.schedule) or rounds(one):
            raise Refusal(
                f"{run.run}: step {way.step} was made under another config or layout than "
                f"config.yaml has now: {one}"
            )
    for step in range(way.start, way.step + 1):
        check_files(recorded.files_of(step), cfg, run=run.run, step=step)
    check_checkpoint(way.checkpoint, cfg, run=run.run)


def replay_config(cfg: Config) -> Config:
    """Return a run's config for as many ranks as trained, and none that generates.

    Raises: Refusal where other than these were started.
    """
    count = len(trainer_ranks(cfg))
    launch = read_launch()
    if launch.world_size != count:
        raise Refusal(
            f"the run trained on {count} ranks, and {launch.world_size} are started here; sums "
            f"repeat on the same ranks alone: torchrun --standalone --nproc-per-node {count} -m "
            "spmdrl verify RUN"
        )
    layout = replace(cfg.layout, placement="offline", world_size=count, trainer_ranks=count)
    return replace(
        cfg,
        # Of this job: ranks name it alike, in a folder that nobody else may enter.
        output_dir=str(private_folder() / f"verify-{launch.port}"),
        layout=replace(layout, inference_tp=1),
        evaluate=replace(cfg.evaluate, every_steps=0),
    )


def replayed(run: Certified, cfg: Config, ways: Sequence[Reached], recorded: Recorded) -> Certified:
    """Take steps again and return what they come to, as a certificate; every rank calls it.

    Raises: Refusal for what cannot be loaded.
    """
    own = replay_config(cfg)
    world = World.start(own)
    try:
        steps = dict(_steps(run, own, ways, recorded=recorded, world=world))
        made = made_of(own, world) | {"config": config_of(cfg)}
        world.close()
    finally:
        attempt(lambda: remove(Path(own.output_dir)), OSError)
    # The program's loop is not what runs here; what it did shows in the numbers.
    was = run.made_at(ways[0].step)["code"]
    own_code = {name: own for name, own in made["code"].items() if not _is_program(name)}
    made["code"] = own_code | {name: own for name, own in was.items() if _is_program(name)}
    return Certified(run.run, steps, {0: made})


def _is_program(name: str) -> bool:
    return name == PROGRAM or name.startswith(f"{PROGRAM}: ")


def _steps(
    run: Certified, cfg: Config, ways: Sequence[Reached], *, recorded: Recorded, world: World
) -> Iterator[tuple[int, Line]]:
    """Yield each step and what it comes to."""
    trainer: Any = make_trainer(cfg, world)
    source = ReplaySource(cfg, world, recorded=recorded, **model_limits(cfg))
    wanted = {way.step for way in ways}
    with_norms = {step for step in wanted if has_norms(run.steps[step])}
    collector = FingerprintCollector(
        world, trainer, is_due=wanted.__contains__, is_near=with_norms.__contains__
    )
    at = 0
    for way in ways:
        if way.start > at or (way.checkpoint and not at):
            assert way.checkpoint is not None
            go_to(way.checkpoint, cfg, trainer=trainer, source=source)
            at = way.start
        world.found_tokens = run.steps[way.step]["plan"]["tokens_per_microbatch"]
        for step in range(at, way.step + 1):
            done = take_step(trainer, source, step=step)
        yield way.step, collector.content(way.step, *done)
        at = way.step + 1


def take_step(trainer: Any, source: ReplaySource, *, step: int) -> tuple[Batch, Advantages, Sums]:
    """Do with a recorded batch what train.py does; return it annotated, its advantages, and what
    the update returned. Trainers meet."""
    batch = take_batch(trainer, source, step=step)
    advantages = advantages_of(batch, cfg=trainer.cfg, world=trainer.world, step=step)
    return batch, advantages, trainer.update(batch, advantages, step=step)
