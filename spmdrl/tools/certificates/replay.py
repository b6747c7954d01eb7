"""Repeat certified steps of a run on its recorded rollouts, from a checkpoint or the first weights.

`plan_ways` finds where to start for each step, and `replay_steps` takes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from spmdrl.certificate.fingerprint_collector import FingerprintCollector
from spmdrl.certificate.line_form import Line
from spmdrl.certificate.lines import RunCertificate, has_norms
from spmdrl.config import Config, trainer_ranks
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.rollout.recordings import ranges
from spmdrl.run_folder import remove
from spmdrl.same_run.differences import config_of, differences
from spmdrl.same_run.made_of import made_of
from spmdrl.same_run.user_code import PROGRAM
from spmdrl.tools.certificates.report import changes_result, changes_rounding
from spmdrl.tools.recorded_run import RecordedRun, Replayer, WayToStep
from spmdrl.world.launch import read_launch
from spmdrl.world.secret import private_folder
from spmdrl.world.world import World


def plan_ways(
    certificate: RunCertificate, run: RecordedRun, *, requested: Sequence[int] = ()
) -> list[WayToStep]:
    """Return how to reach the certified steps, or the requested ones, ascending.

    Raises: Refusal for a requested step that cannot be reached, with the reason; if no step can be
        reached; or for a checkpoint or recording of another run, layout or model.
    """
    ways = []
    reasons = []
    for step in sorted(requested or certificate.steps):
        way = run.way_to(step)
        if way is not None and step in certificate.steps:
            ways.append(way)
        else:
            why = _why_out_of_reach(step, certificate, run)
            reasons.append(f"{run.folder}: step {step} cannot be verified: {why}")
    if reasons and (requested or not ways):
        raise Refusal("\n".join(reasons))
    for way in ways:
        _check_config(certificate, run, step=way.step)
        run.check(way)
    return ways


def _why_out_of_reach(step: int, certificate: RunCertificate, run: RecordedRun) -> str:
    if step not in certificate.steps:
        return f"it is not certified; the certified steps are {ranges(certificate.steps)}"
    before = [start for start in run.weights if start <= step]
    begin = max(before, default=0)
    gaps = _gaps([s for s in run.recorded.steps if begin <= s <= step], begin=begin, end=step)
    return (
        f"there are weights of {ranges(before) or 'no step'}, and after these steps {gaps} are not "
        "recorded"
    )


def _gaps(steps: Sequence[int], *, begin: int, end: int) -> str:
    """Return the numbers from begin to end, inclusive, that are not in `steps`, as text.

    Args:
        steps: ascending.
    """
    # There may be very many numbers, so do not loop over them.
    texts = []
    for step in [*steps, end + 1]:
        if begin < step:
            texts.append(f"{begin}" if begin == step - 1 else f"{begin} to {step - 1}")
        begin = step + 1
    return ", ".join(texts)


def _check_config(certificate: RunCertificate, run: RecordedRun, *, step: int) -> None:
    """Raise Refusal for a step that was trained under another config than config.yaml has now."""
    cfg = run.cfg
    for one in differences(certificate.made_at(step), {"config": config_of(cfg)}):
        if changes_result(one, schedule=cfg.optimizer.schedule) or changes_rounding(one):
            raise Refusal(
                f"{run.folder}: step {step} was made under another config or layout than "
                f"config.yaml has now: {one}"
            )


def replay_config(cfg: Config) -> Config:
    """Return a run's config with the same number of trainers, and no engines.

    Raises: Refusal if this program was started on another number of ranks.
    """
    count = len(trainer_ranks(cfg))
    launch = read_launch()
    if launch.world_size != count:
        raise Refusal(
            f"the run trained on {count} ranks, and {launch.world_size} are started here. Sums "
            f"repeat only on the same number of ranks: torchrun --standalone --nproc-per-node "
            f"{count} -m spmdrl verify RUN"
        )
    layout = replace(cfg.layout, placement="offline", world_size=count, trainer_ranks=count)
    return replace(
        cfg,
        # The same name on all ranks of this job, in a folder that no other user can enter.
        output_dir=str(private_folder() / f"verify-{launch.port}"),
        layout=replace(layout, inference_tp=1, inference_dp=1),
        evaluate=replace(cfg.evaluate, every_steps=0),
    )


def replay_steps(
    certificate: RunCertificate, run: RecordedRun, ways: Sequence[WayToStep]
) -> RunCertificate:
    """Repeat steps and return their numbers as a certificate. Every rank must call it.

    Raises: Refusal for a checkpoint or recording that cannot be loaded.
    """
    own = replay_config(run.cfg)
    world = World.start(own)
    try:
        steps = dict(_replay(certificate, run, ways, cfg=own, world=world))
        made = made_of(own, world)
        world.close()
    finally:
        attempt(lambda: remove(Path(own.output_dir)), OSError)
    made["config"] = config_of(run.cfg)
    # train.py does not run here, so take its digest from the certificate. A change of it would
    # change the numbers.
    code = {name: digest for name, digest in made["code"].items() if not _is_program(name)}
    certified_code = certificate.made_at(ways[0].step)["code"]
    program = {name: digest for name, digest in certified_code.items() if _is_program(name)}
    made["code"] = code | program
    # Recordings have the rows.
    made["data"] = certificate.made_at(ways[0].step)["data"]
    return RunCertificate(run.folder, steps, {0: made})


def _is_program(name: str) -> bool:
    return name == PROGRAM or name.startswith(f"{PROGRAM}: ")


def _replay(
    certificate: RunCertificate,
    run: RecordedRun,
    ways: Sequence[WayToStep],
    *,
    cfg: Config,
    world: World,
) -> Iterator[tuple[int, Line]]:
    """Yield each step and its numbers."""
    replayer = Replayer(run, cfg, world)
    wanted = {way.step for way in ways}
    steps_with_norms = {step for step in wanted if has_norms(certificate.steps[step])}
    collector = FingerprintCollector(
        world,
        replayer.trainer,
        is_due=wanted.__contains__,
        with_norms=steps_with_norms.__contains__,
    )
    at = 0
    for way in ways:
        if way.start > at or (way.checkpoint and not at):
            assert way.checkpoint is not None
            replayer.go_to(way.checkpoint, cfg)
            at = way.start
        world.found_tokens = certificate.steps[way.step]["plan"]["tokens_per_microbatch"]
        for step in range(at, way.step + 1):
            done = replayer.train(step)
        yield way.step, collector.content(way.step, *done)
        at = way.step + 1
