"""Whether engines compute what the trainers compute: their logprobs of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.types import Sums
from spmdrl.world.comm import gather_objects
from spmdrl.world.world import World


def probe_gap(
    of_engine: Sequence[Tensor],
    of_trainer: Sequence[Tensor],
    *,
    limit: float,
    version: int,
    gap_cause: str,
    world: World,
) -> Sums:
    """Compare engines' logprobs of some sequences with the trainers'; every rank calls.

    Args:
        of_engine, of_trainer: per sequence [len] float32, first 0, of this rank's engine and model;
            empty where there is none.
        limit: stream.max_logprob_gap, in nats.
        version: of the weights, for messages.
        gap_cause: of the engine, see EngineProtocol.
    Returns: sync/probe_gap: (sum of |engine - trainer| in nats, tokens), over all replicas.
    Raises: RuntimeError on every rank when the mean is above the limit or not a number.
    """
    scores = gather_objects((_flat(of_engine), _flat(of_trainer)), group=world.control)
    engines = [engine for engine, _ in scores if len(engine)]
    trainer = next(trainer for _, trainer in scores if len(trainer))
    gaps = torch.stack([(engine - trainer).abs() for engine in engines]).double()
    mean = float(gaps.mean())
    if not mean <= limit:  # a mean that is not a number fails too
        raise RuntimeError(
            f"probe at version {version}: engine and trainer logprobs differ by {mean:.4g} "
            f"nats on average (largest {float(gaps.max()):.4g}), more than "
            f"stream.max_logprob_gap {limit:g}; mean logprob {float(engines[0].mean()):.4f} by "
            f"the engine, {float(trainer.mean()):.4f} by the trainer, whose rows "
            f"were found right, so look at the engine: {_suspects(world.cfg, gap_cause)}"
        )
    return {"sync/probe_gap": (float(gaps.sum()), float(gaps.numel()))}


def _flat(scores: Sequence[Tensor]) -> Tensor:
    """Join scores without the first token of each sequence, which has none: [tokens] float32."""
    without_first = [torch.empty(0)]
    for score in scores:
        without_first.append(score[1:].float().cpu())
    return torch.cat(without_first)


def _suspects(cfg: Config, gap_cause: str) -> str:
    """Return what may cause a gap with these settings."""
    quantization = cfg.engine.options.get("quantization")
    if quantization:
        return (
            f"engine.options quantization {quantization} may be all of it; then raise the limit, "
            "and keep an algorithm.correction"
        )
    if cfg.engine.dtype != "float32" or cfg.model.compute_dtype != "float32":
        return (
            f"engine.dtype {cfg.engine.dtype} beside model.compute_dtype "
            f"{cfg.model.compute_dtype} may be all of it, which float32 for both would show; else "
            f"{gap_cause}"
        )
    return gap_cause
