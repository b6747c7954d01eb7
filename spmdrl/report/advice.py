"""What a run's metrics say is going wrong, in words: nothing is learnt, or soon nothing will be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spmdrl.algorithms.mismatch import correction_advice
from spmdrl.algorithms.registry import needs_group
from spmdrl.config import Config

Values = Mapping[str, float]
MIN_ENTROPY_FRAC = 0.05
"""Of the entropy at the start of the run, below which it counts as collapsed."""
MAX_TRUNCATED_FRAC = 0.5
"""Of the responses; beyond it most are cut before their end."""
MAX_GAP_GROWTH, MIN_GAP = 10.0, 1e-3
"""A gap between engine and trainer has grown when it is so many times the run's first, and is at
least so many nats."""
_SAME = 1e-9


class Sign(NamedTuple):
    """One thing that can go wrong."""

    is_seen: Callable[[Values, Values, Config], bool]
    """Whether a step shows it; given (step's metrics, means over the run's first steps, config)."""
    text: Callable[[Values, Values, Config], str]
    """What is seen and the likeliest cause, for people."""


class Advisor:
    """Warns of what has lasted `report.warn_after` steps; once, and again after it had ended.

    Args:
        cfg: of the run.
    """

    def __init__(self, cfg: Config):
        self._cfg, self._steps = cfg, cfg.report.warn_after
        self._lasted = dict.fromkeys(_SIGNS, 0)
        self._first: list[Values] = []
        self._has_corrected = False

    def resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take up the metrics of earlier attempts: with what the run began."""
        self._first = [row for row in rows if "policy/loss" in row][: self._steps]

    def look(self, values: Values) -> list[str]:
        """Count in one step's metrics and return what to warn of now.

        Args:
            values: of one training step, by name. A metric that is not there shows nothing.
        """
        if not self._steps:
            return []
        found = [f"{text} (so for {self._steps} steps)" for text in self._signs(values)]
        advice = correction_advice(values, self._cfg.algorithm.correction, self._cfg.lag)
        if advice and not self._has_corrected:
            self._has_corrected = True
            found.append(advice)
        # A critic's warm-up and a skipped update say nothing of the policy.
        if len(self._first) < self._steps and "policy/loss" in values:
            self._first.append(dict(values))
        return found

    def _signs(self, values: Values) -> list[str]:
        start, found = _means(self._first), []
        for name, sign in _SIGNS.items():
            is_seen = sign.is_seen(values, start, self._cfg)
            self._lasted[name] = self._lasted[name] + 1 if is_seen else 0
            if self._lasted[name] == self._steps:
                found.append(sign.text(values, start, self._cfg))
        return found


def _means(rows: Sequence[Values]) -> dict[str, float]:
    known: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (int, float)):  # metrics.jsonl has null for what is not finite
                known.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in known.items()}


# --------------------------------------------------------------------------- the signs


def _has_no_spread(values: Values, start: Values, cfg: Config) -> bool:
    # Distillation samples too, and its rewards are measured alone.
    compares = cfg.objective.trains_on_pairs or (
        cfg.objective.has_advantages and needs_group(cfg.algorithm.advantage)
    )
    return compares and values.get("reward/zero_spread_groups_frac", 0.0) >= 1.0


def _no_spread_text(values: Values, start: Values, cfg: Config) -> str:
    reward = values.get("reward/mean", 0.0)
    cause = (
        "The likeliest causes: the task is too hard for the model as it is (warm it up by sft, "
        "take easier rows first, give part of the reward for form), or the reward does not read "
        "the answer as the model writes it"
        if abs(reward) <= _SAME
        else "The likeliest causes: the task is solved (stop, or take harder rows), the reward "
        "does not depend on the response, or sampling.temperature is too low for samples to differ"
    )
    result = "every advantage is 0" if cfg.objective.has_advantages else "there are no pairs"
    return (
        f"nothing is learnt: within each group all {cfg.batch.group_size} rewards are equal (mean "
        f"reward {reward:.3f}), so that {result}. {cause}: read {cfg.output_dir}/samples.jsonl"
    )


def _has_no_gradient(values: Values, start: Values, cfg: Config) -> bool:
    # Where no group has a spread the other sign says why.
    return values.get("policy/grad_norm") == 0.0 and not _has_no_spread(values, start, cfg)


def _no_gradient_text(values: Values, start: Values, cfg: Config) -> str:
    seen = {
        "policy/clip_frac": "tokens clipped by the loss",
        "policy/correction_cut_frac": "tokens left out by the correction",
        "rollout/left_out_frac": "samples left out by an edit of the loop",
        "rollout/truncated_frac": "responses cut at sampling.max_response_tokens",
    }
    shares = ", ".join(f"{values[n]:.0%} {what}" for n, what in seen.items() if n in values)
    return (
        "nothing is learnt: the gradient is 0. The likeliest causes: every advantage is 0 (equal "
        "rewards), or every token is clipped or masked"
        + (f" ({shares})" if shares else "")
        + ", or a loss of your own that does not depend on `logprobs` where it is not masked"
    )


def _is_skipped(values: Values, start: Values, cfg: Config) -> bool:
    return values.get("policy/skipped_updates", 0.0) > 0 and "policy/grad_norm" not in values


def _skipped_text(values: Values, start: Values, cfg: Config) -> str:
    return (
        "nothing is learnt: every update is skipped, since its loss or gradient is not finite. The "
        f"batches are in {cfg.output_dir}; the likeliest causes: a loss, an advantage or a reward "
        f"that overflows, or an optimizer.lr ({cfg.optimizer.lr:g}) that has broken the weights "
        "(go back to a checkpoint)"
    )


def _is_collapsed(values: Values, start: Values, cfg: Config) -> bool:
    entropy, first = values.get("policy/entropy"), start.get("policy/entropy", 0.0)
    # Where rows are fitted, low entropy is what comes of it.
    is_low = entropy is not None and entropy < MIN_ENTROPY_FRAC * first
    return is_low and cfg.objective.samples


def _collapsed_text(values: Values, start: Values, cfg: Config) -> str:
    rewards = [f"{v['reward/mean']:.3f}" for v in (start, values) if "reward/mean" in v]
    return (
        f"the entropy has collapsed from {start['policy/entropy']:.3f} to "
        f"{values['policy/entropy']:.4f} nats"
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


def _is_cut(values: Values, start: Values, cfg: Config) -> bool:
    return values.get("rollout/truncated_frac", 0.0) > MAX_TRUNCATED_FRAC


def _cut_text(values: Values, start: Values, cfg: Config) -> str:
    return (
        f"{values['rollout/truncated_frac']:.0%} of the responses are cut at "
        f"sampling.max_response_tokens ({cfg.sampling.max_response_tokens}). The likeliest causes: "
        "the limit is too low for the task, the model does not know its end token (see "
        "sampling.stop_token_ids, data.chat_template), or length is rewarded (see "
        "rewards.shaping, algorithm.mask_truncated)"
    )


def _has_gap(values: Values, start: Values, cfg: Config) -> bool:
    gap, first = values.get("policy/mismatch_k3", 0.0), start.get("policy/mismatch_k3", 0.0)
    return gap >= MIN_GAP and gap > MAX_GAP_GROWTH * first > 0


def _gap_text(values: Values, start: Values, cfg: Config) -> str:
    causes = (
        f"optimizer.lr ({cfg.optimizer.lr:g}) or batch.updates_per_step "
        f"({cfg.batch.updates_per_step}) move the policy too far within lag {cfg.lag}"
        if cfg.lag or cfg.batch.updates_per_step > 1
        else "engine and trainer hold the same weights but compute ever more differently: the "
        "precision of one is too low for these weights (engine.dtype, model.compute_dtype)"
    )
    return (
        f"the gap between engine and trainer grows: policy/mismatch_k3 "
        f"{start['policy/mismatch_k3']:.1e} -> {values['policy/mismatch_k3']:.1e} nats. The "
        f"likeliest cause: {causes}"
    )


_SIGNS = {
    "spread": Sign(_has_no_spread, _no_spread_text),
    "skipped": Sign(_is_skipped, _skipped_text),
    "gradient": Sign(_has_no_gradient, _no_gradient_text),
    "entropy": Sign(_is_collapsed, _collapsed_text),
    "length": Sign(_is_cut, _cut_text),
    "gap": Sign(_has_gap, _gap_text),
}
