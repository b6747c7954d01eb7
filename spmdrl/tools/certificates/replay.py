"""Certified steps taken again from what a run left: a checkpoint, or the weights that it began
with, and recorded rollouts.

`plan_ways` says from where each step can be reached, `replayed` goes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from spmdrl.certificate.fingerprint_collector import FingerprintCollector
from spmdrl.certificate.line_form import Line
from spmdrl.certificate.lines import Certified, has_norms
from spmdrl.config import Config, trainer_ranks
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.rollout.recordings import ranges
from spmdrl.run_folder import remove
from spmdrl.same_run.differences import config_of, differences
from spmdrl.same_run.made_of import made_of
from spmdrl.same_run.user_code import PROGRAM
from spmdrl.tools.certificates.report import rounds, shapes
from spmdrl.tools.recorded_run import RecordedRun, Replayer, WayToStep
from spmdrl.world.launch import read_launch
from spmdrl.world.secret import private_folder
from spmdrl.world.world import World


def plan_ways(
    certified: Certified, run: RecordedRun, *, asked: Sequence[int] = ()
) -> list[WayToStep]:
    """Return how to reach the certified steps, or those asked for, ascending.

    Raises: Refusal naming a step asked for that cannot be reached, and why; or that none can; or
        a checkpoint or recording of another run, layout or model.
    """
    ways = []
    reasons = []
    for step in sorted(asked or certified.steps):
        way = run.way_to(step)
        if way is not None and step in certified.steps:
            ways.append(way)
        else:
            why = _why_out_of_reach(step, certified, run)
            reasons.append(f"{run.folder}: step {step} cannot be verified: {why}")
    if reasons and (asked or not ways):
        raise Refusal("\n".join(reasons))
    for way in ways:
        _check_config(certified, run, step=way.step)
        run.check(way)
    return ways


def _why_out_of_reach(step: int, certified: Certified, run: RecordedRun) -> str:
    if step not in certified.steps:
        return f"it is not certified; certified are {ranges(certified.steps)}"
    before = [start for start in run.weights if start <= step]
    begin = max(before, default=0)
    gaps = _gaps([s for s in run.recorded.steps if begin <= s <= step], begin=begin, end=step)
    return (
        f"weights there are of {ranges(before) or 'no step'}, and from there steps {gaps} are not "
        "recorded"
    )


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


def _check_config(certified: Certified, run: RecordedRun, *, step: int) -> None:
    """Refuse a step that was trained under another config than the run's config.yaml."""
    cfg = run.cfg
    for one in differences(certified.made_at(step), {"config": config_of(cfg)}):
        if shapes(one, schedule=cfg.optimizer.schedule) or rounds(one):
            raise Refusal(
                f"{run.folder}: step {step} was made under another config or layout than "
                f"config.yaml has now: {one}"
            )


def replay_config(cfg: Config) -> Config:
    """Return a run's config for as many ranks as trained, and none that generates.

    Raises: Refusal where another number of ranks was started.
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


def replayed(certified: Certified, run: RecordedRun, ways: Sequence[WayToStep]) -> Certified:
    """Take steps again and return their numbers, as a certificate; every rank calls it.

    Raises: Refusal for what cannot be loaded.
    """
    own = replay_config(run.cfg)
    world = World.start(own)
    try:
        steps = dict(_replay(certified, run, ways, cfg=own, world=world))
        made = made_of(own, world)
        world.close()
    finally:
        attempt(lambda: remove(Path(own.output_dir)), OSError)
    made["config"] = config_of(run.cfg)
    # train.py is not what runs here; its work shows in the numbers.
    code = {name: digest for name, digest in made["code"].items() if not _is_program(name)}
    there = certified.made_at(ways[0].step)["code"]
    made["code"] = code | {name: own for name, own in there.items() if _is_program(name)}
    return Certified(run.folder, steps, {0: made})


def _is_program(name: str) -> bool:
    return name == PROGRAM or name.startswith(f"{PROGRAM}: ")


def _replay(
    certified: Certified, run: RecordedRun, ways: Sequence[WayToStep], *, cfg: Config, world: World
) -> Iterator[tuple[int, Line]]:
    """Yield each step and its numbers."""
    replayer = Replayer(run, cfg, world)
    wanted = {way.step for way in ways}
    with_norms = {step for step in wanted if has_norms(certified.steps[step])}
    collector = FingerprintCollector(
        world, replayer.trainer, is_due=wanted.__contains__, is_near=with_norms.__contains__
    )
    at = 0
    for way in ways:
        if way.start > at or (way.checkpoint and not at):
            assert way.checkpoint is not None
            replayer.go_to(way.checkpoint, cfg)
            at = way.start
        world.found_tokens = certified.steps[way.step]["plan"]["tokens_per_microbatch"]
        for step in range(at, way.step + 1):
            done = replayer.train(step)
        yield way.step, collector.content(way.step, *done)
        at = way.step + 1
