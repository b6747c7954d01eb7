"""Warnings from a run's metrics: nothing is learnt, or soon nothing will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmdrl.algorithms.mismatch import correction_advice
from spmdrl.algorithms.registry import needs_group
from spmdrl.config import Config

Values = Mapping[str, float]
MIN_ENTROPY_FRAC = 0.05
"""Share of the entropy at the start of the run, below which it has collapsed."""
MAX_TRUNCATED_FRAC = 0.5
"""Share of the responses; above it most are cut before their end."""
MAX_GAP_GROWTH = 10.0
MIN_GAP = 1e-3
"""The gap between engine and trainer has grown if it is MAX_GAP_GROWTH times that of the run's
begin and at least MIN_GAP nats."""
_SAME = 1e-9


class Advisor:
    """Warns of a sign that lasts `report.warn_after` steps: once, and again if it ended meanwhile.

    Args:
        cfg: of the run.
    """

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self._steps = cfg.report.warn_after
        self._lasted = [0] * len(_SIGNS)
        self._first: list[Values] = []
        self._has_corrected = False

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the metrics of the run's first steps from earlier attempts."""
        self._first = [row for row in rows if "policy/loss" in row][: self._steps]

    def look(self, values: Values) -> list[str]:
        """Take one step's metrics, and return the warnings that are due now.

        Args:
            values: of one training step, by name. A missing metric is no sign.
        """
        if not self._steps:
            return []
        warnings = [f"{text} (so for {self._steps} steps)" for text in self._signs(values)]
        advice = correction_advice(values, self._cfg.algorithm.correction, self._cfg.lag)
        if advice and not self._has_corrected:
            self._has_corrected = True
            warnings.append(advice)
        # Steps of a critic's warm-up and skipped updates do not describe the policy.
        if len(self._first) < self._steps and "policy/loss" in values:
            self._first.append(dict(values))
        return warnings

    def _signs(self, values: Values) -> list[str]:
        start = _means(self._first)
        texts = []
        for i, sign in enumerate(_SIGNS):
            text = sign(values, start, self._cfg)
            self._lasted[i] = self._lasted[i] + 1 if text else 0
            if self._lasted[i] == self._steps:
                texts.append(text)
        return texts


def _means(rows: Sequence[Values]) -> dict[str, float]:
    known: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)):  # metrics.jsonl has null for what is not finite
                known.setdefault(name, []).append(value)
    # Not fmean, which raises where infinities of both signs meet.
    return {name: sum(values) / len(values) for name, values in known.items()}


# --------------------------------------------------------------------------- the signs
# Each function takes a step's metrics, the means over the run's first steps, and the config. It
# returns the sign and its likeliest cause, for people; empty if the step does not show the sign.


def _no_spread(values: Values, start: Values, cfg: Config) -> str:
    # Pairs of dataset rows are no groups of rewards; distillation only measures rewards.
    objective = cfg.objective
    compares = (objective.samples and objective.trains_on_pairs) or (
        objective.has_advantages and needs_group(cfg.algorithm.advantage)
    )
    if not (compares and values.get("reward/zero_spread_groups_frac", 0.0) >= 1.0):
        return ""
    reward = values.get("reward/mean", 0.0)
    cause = (
        "The likeliest causes: the task is too hard for the model as it is (warm it up by sft, "
        "take easier rows first, give part of the reward for form), or the reward does not read "
        "the answer as the model writes it"
        if abs(reward) <= _SAME
        else "The likeliest causes: the task is solved (stop, or take harder rows), the reward "
        "does not depend on the response, or sampling.temperature is too low for samples to differ"
    )
    result = "every advantage is 0" if objective.has_advantages else "there are no pairs"
    return (
        f"nothing is learnt: within each group all {cfg.batch.group_size} rewards are equal (mean "
        f"reward {reward:.3f}), so that {result}. {cause}: read {cfg.output_dir}/samples.jsonl"
    )


def _skipped(values: Values, start: Values, cfg: Config) -> str:
    if not values.get("policy/skipped_updates", 0.0) > 0 or "policy/grad_norm" in values:
        return ""
    return (
        "nothing is learnt: every update is skipped, since its loss or gradient is not finite. The "
        f"batches are in {cfg.output_dir}; the likeliest causes: a loss, an advantage or a reward "
        f"that overflows, or an optimizer.lr ({cfg.optimizer.lr:g}) that has broken the weights "
        "(go back to a checkpoint)"
    )


def _no_gradient(values: Values, start: Values, cfg: Config) -> str:
    # Without a spread in any group, _no_spread gives the cause.
    if values.get("policy/grad_norm") != 0.0 or _no_spread(values, start, cfg):
        return ""
    seen = {
        "policy/clip_frac": "tokens clipped by the loss",
        "policy/correction_cut_frac": "tokens left out by the correction",
        "rollout/left_out_frac": "samples left out by an edit of the loop",
        "rollout/truncated_frac": "responses cut at sampling.max_response_tokens",
    }
    causes = "every token is clipped or masked"
    if cfg.objective.has_advantages:
        causes = f"every advantage is 0 (equal rewards), or {causes}"
    shares = [f"{values[name]:.0%} {what}" for name, what in seen.items() if name in values]
    if shares:
        causes += f" ({', '.join(shares)})"
    return (
        f"nothing is learnt: the gradient is 0. The likeliest causes: {causes}, or a loss of your "
        "own that does not depend on `logprobs` where it is not masked"
    )


def _collapsed(values: Values, start: Values, cfg: Config) -> str:
    entropy = values.get("policy/entropy")
    first = start.get("policy/entropy", 0.0)
    # An objective that fits rows lowers the entropy on purpose.
    if entropy is None or not entropy < MIN_ENTROPY_FRAC * first or not cfg.objective.samples:
        return ""
    rewards = [f"{v['reward/mean']:.3f}" for v in (start, values) if "reward/mean" in v]
    return (
        f"the entropy has collapsed from {first:.3f} to {entropy:.4f} nats"
        + (f" (reward from {rewards[0]} to {rewards[1]})" if len(rewards) == 2 else "")
        + ": samples of a prompt hardly differ any more. Where the task is not solved, lower "
        f"optimizer.lr (now {cfg.optimizer.lr:g}), "
        + (
            "raise the upper clip (loss_options.clip_high), or set algorithm.entropy_coef, "
            "algorithm.entropy_control or a kl_coef"
            if cfg.objective.has_advantages
            else "or hold the policy closer to its reference (loss_options.beta)"
        )
    )


def _cut(values: Values, start: Values, cfg: Config) -> str:
    if not (cut := values.get("rollout/truncated_frac", 0.0)) > MAX_TRUNCATED_FRAC:
        return ""
    return (
        f"{cut:.0%} of the responses are cut at "
        f"sampling.max_response_tokens ({cfg.sampling.max_response_tokens}). The likeliest causes: "
        "the limit is too low for the task, the model does not know its end token (see "
        "sampling.stop_token_ids, data.chat_template), or length is rewarded (see "
        "rewards.shaping, algorithm.mask_truncated)"
    )


def _gap(values: Values, start: Values, cfg: Config) -> str:
    gap = values.get("policy/mismatch_k3", 0.0)
    first = start.get("policy/mismatch_k3", 0.0)
    if gap < MIN_GAP or not gap > MAX_GAP_GROWTH * first > 0:
        return ""
    causes = (
        f"optimizer.lr ({cfg.optimizer.lr:g}) or batch.updates_per_step "
        f"({cfg.batch.updates_per_step}) move the policy too far within lag {cfg.lag}"
        if cfg.lag or cfg.batch.updates_per_step > 1
        else "engine and trainer hold the same weights but compute ever more differently: the "
        "precision of one is too low for these weights (engine.dtype, model.compute_dtype)"
    )
    return (
        f"the gap between engine and trainer grows: policy/mismatch_k3 {first:.1e} -> {gap:.1e} "
        f"nats. The likeliest cause: {causes}"
    )


_SIGNS = (_no_spread, _skipped, _no_gradient, _collapsed, _cut, _gap)
