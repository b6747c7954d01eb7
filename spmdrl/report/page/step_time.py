"""Where the time of a step goes, by cause, from the metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping

from spmdrl.rollout.idle import CAUSES

_PHASES = {
    "exchange": ("exchange_scalars", "exchange_tokens"),
    "annotate": ("annotate", "advantages"),
    "update": ("update",),
    "push": ("push", "verify_push"),
    "peers": ("await_peers", "agree_to_stop"),
    "evaluate": ("evaluate", "gather_evaluation"),
    "save": ("begin_checkpoint", "copy_checkpoint", "write_checkpoint", "checkpoint"),
    "report": ("certificate",),
}
"""{cause: phases of rank 0, as time/... names them}. Phases inside these are not counted again."""
_WITHIN_GENERATION = ("tail", "reward", "environment")


def causes_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step of rank 0 by cause, in the order of a step.

    They add up to `perf/step_s`, or to more if phases overlap.

    Args:
        values: metrics of one training step, by name.
    """
    seconds: dict[str, float] = {}
    waited = values.get("time/await_rollouts")
    if waited is None:
        # Rank 0 generates itself, and its engine's idle times are parts of time/generate.
        inside = {c: values.get(f"time/engine_idle_{c}", 0.0) for c in _WITHIN_GENERATION}
        seconds["generate"] = max(0.0, values.get("time/generate", 0.0) - sum(inside.values()))
    else:
        inside = {c: values.get(f"time/await_rollouts_{c}", 0.0) for c in _WITHIN_GENERATION}
        seconds["generate"] = max(0.0, waited - sum(inside.values()))
    seconds |= inside
    for cause, phases in _PHASES.items():
        seconds[cause] = sum(values.get(f"time/{phase}", 0.0) for phase in phases)
    known = sum(seconds.values())
    seconds["other"] = max(0.0, values.get("perf/step_s", known) - known)
    return seconds


def engine_causes_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step of the engines: sampling, and idle time by cause."""
    if "time/engine_idle" not in values:
        return {}
    idle = {cause: values.get(f"time/engine_idle_{cause}", 0.0) for cause in CAUSES}
    inside = sum(idle[cause] for cause in _WITHIN_GENERATION)
    return {"sampling": max(0.0, values.get("time/generate", 0.0) - inside), **idle}
