"""Whether the ranks of a layout add up."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.fields import Config, LayoutSettings, replay_folder
from spmdrl.world.axes import axes_of, rank_problems


def layout_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the section `layout`, each as `field: what, value seen`."""
    layout = cfg.layout
    yield from rank_problems(axes_of(cfg), engine_kind=cfg.engine.kind)
    yield from _backend_problems(layout)
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
