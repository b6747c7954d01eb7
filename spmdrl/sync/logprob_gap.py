"""Whether engines compute what the trainers compute: their logprobs of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.rounding import MOST, allowed_gap
from spmdrl.types import Sums
from spmdrl.world.comm import gather_objects
from spmdrl.world.world import World

LEAST = 0.1
"""Nats, half of what losses clip: what may be allowed however small the rounding is."""


@dataclass(frozen=True)
class Scores:
    """What one rank's engine or model makes of some sequences; empty where there is none.

    Args:
        whole: per sequence [len] float32 logprobs, the first 0.
        halves: the same of their first halves, see first_halves; [] if rounding is not asked for.
    """

    whole: Sequence[Tensor] = ()
    halves: Sequence[Tensor] = ()

    @property
    def rounding(self) -> float:
        """Return the mean difference of the tokens that were scored twice, in nats."""
        gaps = [torch.empty(0)]
        for whole, half in zip(self.whole, self.halves):
            if len(half) < len(whole):
                gaps.append((whole[1 : len(half)] - half[1:]).abs().float().cpu())
        found = torch.cat(gaps)
        return float(found.mean()) if len(found) else 0.0


def probe_gap(
    engine: Scores, trainer: Scores, *, limit: float, version: int, gap_cause: str, world: World
) -> Sums:
    """Compare engines' logprobs of some sequences with the trainers'; every rank calls.

    Args:
        engine, trainer: of this rank.
        limit: stream.max_logprob_gap, in nats; 0 chooses one by the rounding of the two.
        version: of the weights, for messages.
        gap_cause: of the engine, see EngineProtocol.
    Returns: sync/probe_gap: (sum of |engine - trainer| in nats, tokens), over all replicas;
        sync/probe_limit: (the mean that is allowed, 1).
    Raises: RuntimeError on every rank when the mean is above the limit or not a number.
    """
    scores = gather_objects(
        (_flat(engine.whole), _flat(trainer.whole), engine.rounding, trainer.rounding),
        group=world.control,
    )
    of_engines = [own[0] for own in scores if len(own[0])]
    of_trainer = next(own[1] for own in scores if len(own[1]))
    rounding = max(own[2] for own in scores) + max(own[3] for own in scores)
    numerics = numerics_of(world.cfg)
    allowed = numerics.allowed_gap(limit or _chosen(world.cfg, of_trainer, rounding=rounding))
    gaps = torch.stack([(own - of_trainer).abs() for own in of_engines]).double()
    mean = float(gaps.mean())
    numerics.check_probe(mean, version=version)
    if not mean <= allowed:  # a mean that is not a number fails too
        raise RuntimeError(
            f"probe at version {version}: engine and trainer logprobs differ by {mean:.4g} nats on "
            f"average (largest {float(gaps.max()):.4g}), more than the {allowed:.3g} of "
            f"stream.max_logprob_gap {limit:g}, where each of them rounds by {rounding / 2:.2g}; "
            f"mean logprob {float(of_engines[0].mean()):.4f} by the engine, "
            f"{float(of_trainer.mean()):.4f} by the trainer, whose rows were found right, so look "
            f"at the engine: {_suspects(world.cfg, gap_cause)}"
        )
    return {
        "sync/probe_gap": (float(gaps.sum()), float(gaps.numel())),
        "sync/probe_limit": (allowed, 1.0),
    }


def _chosen(cfg: Config, scores: Tensor, *, rounding: float) -> float:
    """Return the mean gap that rounding may make, in nats.

    Args:
        scores: of the trainer.
        rounding: what rounding does in engine and trainer together.
    """
    dtypes = [getattr(torch, name) for name in (cfg.engine.dtype, cfg.model.compute_dtype)]
    coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return min(MOST, max(LEAST, allowed_gap(rounding, [scores], dtype=coarser)))


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
