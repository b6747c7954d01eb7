"""Metrics that are computed from other metrics of a step: shares of its time, speed, memory."""

from __future__ import annotations

import resource

import torch

from spmdrl.config import Config, inference_ranks, trainer_ranks
from spmdrl.model.decode_reads import decode_rate
from spmdrl.model.flops import utilisation
from spmdrl.report.glossary import clean_name
from spmdrl.rollout.idle import trainer_wait
from spmdrl.types import Sums

WORK_PHASES = ("generate", "update", "push")
"""Phases that are a step's work; the rest of its time is `perf/other_frac`. If generation overlaps
the update (split placement, lag above 0), the longer of the two counts."""
BESIDE_PHASES = (
    "evaluate",
    "gather evaluation",
    "begin checkpoint",
    "copy checkpoint",
    "write checkpoint",
    "checkpoint",
)
"""Phases between two steps, left out of `perf/other_frac` and `perf/tokens_per_s`."""

TRAINER_WAITS = ("await rollouts", "exchange scalars", "exchange tokens", "await peers", "push")
"""Phases in which trainers do not train, where others generate."""
NO_DRAWS = ("reward", "environment", "replicas")
"""Causes of idle time inside time/generate in which an engine takes no steps."""


def derived_sums(
    sums: Sums, cfg: Config, *, peak_flops: float | None, peak_bytes_per_s: float | None = None
) -> Sums:
    """Return the computed metrics, as sums that add up over steps.

    Args:
        sums: of one step, with its `time/...` and `perf/step_s`.
        peak_flops: of one trainer's device, 1/s; None if unknown.
        peak_bytes_per_s: of the memory of one engine's device; None if unknown.
    """

    def of(name: str) -> float:
        numerator, denominator = sums.get(name, (0.0, 0.0))
        return numerator / denominator if denominator else 0.0

    step_s = of("perf/step_s")
    generate, update, push = (of(f"time/{name}") for name in WORK_PHASES)
    layout = cfg.layout
    overlaps = layout.roles.overlaps and cfg.lag > 0
    work = push + (max(generate, update) if overlaps else generate + update)
    inside = step_s - sum(of(clean_name(f"time/{name}")) for name in BESIDE_PHASES)
    tokens = sums.get("perf/generated_tokens", sums.get("perf/trained_tokens", (0, 0)))[0]
    own: Sums = {
        "perf/other_frac": (max(0.0, inside - work), max(0.0, inside)),
        "mem/rss_gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }
    if "time/engine_idle" in sums and layout.roles.overlaps:
        own |= trainer_wait(of("time/await_rollouts"), generate, sums)
        waiting = sum(of(clean_name(f"time/{name}")) for name in TRAINER_WAITS)
        own["perf/trainer_bubble_frac"] = (waiting, max(waiting, inside))
        idle = of("time/engine_idle")
        own["perf/engine_bubble_frac"] = (idle, max(idle, inside))
    if tokens:
        own["perf/tokens_per_s"] = (tokens, max(0.0, inside))
    own |= utilisation(
        of("perf/trainer_flops"), update, ranks=len(trainer_ranks(cfg)), peak_flops=peak_flops
    )
    if "perf/exchange_bytes" in sums:
        own["perf/exchange_gb_per_s"] = (
            of("perf/exchange_bytes") / 1e9,
            of("time/exchange_tokens"),
        )
    no_draws = sum(of(f"time/engine_idle_{cause}") for cause in NO_DRAWS)
    own |= decode_rate(
        of("perf/decode_bytes"),
        generate - no_draws,
        ranks=len(inference_ranks(cfg)),
        peak_bytes_per_s=peak_bytes_per_s,
    )
    if torch.cuda.is_initialized():
        own["mem/cuda_gib"] = (torch.cuda.max_memory_allocated() / 2**30, 1)
    return own
