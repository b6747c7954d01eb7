"""Whether the ranks of a layout add up."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config import flatten
from spmdrl.config.fields import Config, LayoutSettings, replay_folder
from spmdrl.rewards.signatures import reward_models
from spmdrl.world.axes import axes_of, rank_problems


def layout_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the section `layout`, each as `field: what, value seen`."""
    layout = cfg.layout
    yield from rank_problems(axes_of(cfg), engine_kind=cfg.engine.kind)
    yield from _backend_problems(layout)
    if layout.survive_engines:
        yield from _survival_problems(cfg)
    samples = cfg.objective.samples and not replay_folder(cfg)
    if layout.roles.has_engines != samples:
        yield (
            f"layout.placement: {layout.placement} with objective {cfg.algorithm.objective}; sft, "
            "preference, reward_model, distill, and rl by rollout.record.replay, run `offline` (no "
            "engine), else rl `split` or `colocated`"
        )


def _backend_problems(layout: LayoutSettings) -> list[str]:
    if layout.backend == "nccl" and layout.device == "cpu":
        return ["layout.backend: nccl with layout.device cpu; NCCL needs GPUs: take gloo or auto"]
    if layout.backend != "gloo" or layout.device == "cpu":
        return []
    return [
        f"layout.backend: gloo with layout.{name} {getattr(layout, name)}; between ranks of this "
        "axis messages go straight from GPU to GPU: leave layout.backend at auto (or say "
        "layout.device cpu, if no GPU is meant)"
        for name in ("cp", "ep", "tp", "inference_tp")
        if getattr(layout, name) > 1
    ]


def _survival_problems(cfg: Config) -> Iterator[str]:
    """Yield what keeps a run from going on without an engine that is gone."""
    from spmdrl.world.axes import axes_of

    layout, schedule = cfg.layout, cfg.rollout.schedule
    if not layout.roles.overlaps:
        yield (
            f"layout.survive_engines: true with layout.placement {layout.placement}; a rank that "
            "trains cannot be spared: take split, or set it to false"
        )
        return
    if (engines := axes_of(cfg).replicas) < 2:
        yield (
            f"layout.survive_engines: true with {engines} engine; when it is lost nobody samples: "
            "raise layout.world_size, or set it to false"
        )
    untried = {
        "rollout.schedule.in_flight": schedule.in_flight,
        "rollout.schedule.over_sample": schedule.over_sample > 1,
        "rollout.schedule.dynamic": schedule.dynamic,
        "rollout.schedule.balance": schedule.balance == "steal",
        "rollout.record.every": cfg.rollout.record.every,
        "model.lora.rank": cfg.model.lora.rank,
        "model.moe.replay": cfg.model.moe.replay,
        "engine.options": cfg.engine.options.keys() & {"quantization", "speculative_config"},
        "batch.tokens_per_microbatch": not cfg.batch.tokens_per_microbatch,
        "rewards.functions": reward_models(cfg.rewards.functions),
    }
    values = flatten(cfg)
    for name in [name for name, is_on in untried.items() if is_on]:
        yield (
            f"{name}: {values[name]} with layout.survive_engines true; whether a run goes on with "
            "it after a loss was not tried: leave out one of them"
        )
