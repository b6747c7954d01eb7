"""Where the time of a step goes, by cause, from the metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

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
_LAST_STEPS = 50
_ADVICE = {
    "generate": "give more ranks to the engines (layout.trainer_ranks), let them sample ahead of "
    "the trainers (lag), or shorten responses (sampling.max_response_tokens)",
    "tail": "let the engines go on with later steps while the last long responses end (lag with "
    "rollout.schedule in flight), or start more samples than a step needs",
    "reward": "raise rewards.workers, or make the reward function faster",
    "environment": "raise rewards.workers, which also play environments, or make their answers "
    "faster",
    "exchange": "look at the network between engines and trainers (layout.backend)",
    "annotate": "leave out the columns that the loss does not need, such as the reference "
    "(algorithm.kl_coef), or share prefixes (batch.share_prefixes)",
    "update": "give more ranks to the trainers, set batch.tokens_per_microbatch to 0 so that "
    "micro-batches fill the memory, or share prefixes (batch.share_prefixes)",
    "push": "look at the network between trainers and engines, and at stream.*",
    "peers": "find the rank that the others wait for on the timeline of a step",
    "evaluate": "raise evaluate.every_steps, or evaluate fewer problems (data.eval_size)",
    "save": "raise checkpoint.every_steps",
    "report": "raise report.certificate",
    "other": "look at the log of rank 0 and at edits of the loop",
}
_NAMES = {
    "generate": "waiting for engines that sample",
    "tail": "waiting for the last, long responses",
    "reward": "waiting for rewards",
    "environment": "waiting for environments or agents",
    "exchange": "sending rollouts to the trainers",
    "annotate": "computing what loss and advantage ask for",
    "update": "the update",
    "push": "pushing the weights",
    "peers": "waiting for other ranks",
    "evaluate": "the evaluation",
    "save": "the checkpoint",
    "report": "the certificate",
    "other": "everything outside of the named phases",
}


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


def time_sentence(rows: Sequence[Mapping[str, float]]) -> str:
    """Return one sentence: which cause took most of the last steps, and what to try.

    Args:
        rows: metrics of training steps, by name.
    """
    last = [causes_of(row) for row in rows[-_LAST_STEPS:]]
    if not last:
        return ""
    means = {cause: fmean(one[cause] for one in last) for cause in last[0]}
    total = sum(means.values())
    if not total:
        return ""
    cause = max(means, key=lambda name: means[name])
    share = means[cause] / total
    return (
        f"In the last {len(last)} steps, {_NAMES[cause]} took {share:.0%} of rank 0's time "
        f"({means[cause]:.3g} of {total:.3g} s a step). To shorten it: {_ADVICE[cause]}."
    )
