"""Estimates of a policy from held-out samples: means over problems, with their intervals.

P problems, n samples of each. Samples of one problem are correlated, so the problem is the unit: a
mean is over problems, and its interval follows from the variance between problems.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from spmdrl.algorithms.shaping import RIGHT_AT, ROUNDING, best_at_k_estimate, pass_at_k_estimate
from spmdrl.plain import record
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.types import Sums

_Z95 = 1.96
_ANSWER = "pred"  # verl's name


@record
@dataclass(frozen=True)
class ProblemOutcome:
    """The results of one held-out problem's samples."""

    index: int
    """Position of the row in data.eval."""
    source: str
    """The name of its source if data.eval has several; else the row's `data_source`, or empty if
    it has none."""
    rewards: tuple[float, ...]
    """Rewards of the samples whose reward did not fail, in order."""
    answers: tuple[str, ...]
    """Answers that a reward function extracted from these samples and returned as `pred`; empty
    if any of them has none."""
    lengths: tuple[int, ...]
    """Sampled tokens of every sample."""
    num_truncated: int
    """Samples cut at the length limit."""
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """{name: one number for each sample that has it}: the value of each reward function if there
    are several, and the metrics that they report."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems."""

    mean: float
    half_width: float | None
    """Half the width of the 95% interval: 1.96 standard errors of the mean over problems (normal;
    arXiv 2411.00640). None for one problem. It is 0 if all problems have the same value, which
    does not mean that the mean is exact."""
    num_problems: int


def outcomes_of(
    samples: Iterable[FinishedEpisode], *, names: Mapping[int, str]
) -> list[ProblemOutcome]:
    """Group samples by problem, in the order of the rows.

    Args:
        names: {`Prompt.source`: name} if there are several sources, else empty.
    """
    by_index: dict[int, list[FinishedEpisode]] = defaultdict(list)
    for sample in samples:
        by_index[sample.prompt.index].append(sample)
    return [_outcome(by_index[index], names) for index in sorted(by_index)]


def _outcome(samples: Sequence[FinishedEpisode], names: Mapping[int, str]) -> ProblemOutcome:
    prompt = samples[0].prompt
    valid = [s.reward for s in samples if s.reward.value is not None]
    answers = tuple(filter(None, (_answer({**r.extras, **r.metrics}) for r in valid)))
    parts: dict[str, list[float]] = defaultdict(list)
    for reward in valid:
        own = reward.parts if len(reward.parts) > 1 else {}
        for name, value in (own | reward.metrics).items():
            if not is_answer(name):
                parts[name].append(value)
    return ProblemOutcome(
        index=prompt.index,
        source=names.get(prompt.source, str(prompt.row.get("data_source") or "")),
        rewards=tuple(r.value for r in valid if r.value is not None),
        answers=answers if len(answers) == len(valid) else (),
        lengths=tuple(s.num_sampled for s in samples),
        num_truncated=sum(s.is_truncated for s in samples),
        parts={name: tuple(values) for name, values in parts.items()},
    )


def _answer(reported: dict[str, object]) -> str:
    """Return the answer of the first function that reports one; empty if none does."""
    return next((str(value) for name, value in reported.items() if is_answer(name)), "")


def is_answer(name: str) -> bool:
    """Return whether a function reports its extracted answer by this name."""
    return name.rpartition("/")[2] == _ANSWER  # with several functions: FUNCTION/pred


# --------------------------------------------------------------------------- estimates


def summarize(
    outcomes: Sequence[ProblemOutcome], *, samples: int, right_at: float = RIGHT_AT
) -> dict[str, Estimate]:
    """Estimate how a policy does on problems of this kind.

    Failed rewards leave a problem with fewer than n rewards. An estimate leaves out the problems
    that have too few for it.

    Args:
        outcomes: of P problems.
        samples: n, the number of samples of each problem.
        right_at: a sample is right if its reward is at least this, task units. pass@k and maj@n
            count all other samples as wrong; `reward` and best@k use the reward itself.
    Returns: {name: estimate}, without estimates that no problem has enough samples for:
        `reward` (avg@n);
        `pass_at_K`, unbiased: at least one of K samples is right, for K = 1, 2, 4, ... and n;
        `best_at_K`, unbiased: the best reward of K samples, for the same K;
        `maj_at_n`: the most frequent answer is right (mean over equally frequent answers);
        `response_length`, tokens; `truncated_frac`; `failed_frac`.
    """
    scored = {k: [o for o in outcomes if len(o.rewards) >= k] for k in (1, *sizes(samples))}
    voted = [o for o in outcomes if len(o.answers) >= samples]
    estimates = {"reward": _estimate(scored[1], lambda o: fmean(o.rewards))}
    for k in sizes(samples):
        estimates[f"pass_at_{k}"] = _estimate(
            scored[k], lambda o: pass_at_k_estimate(len(o.rewards), sum(_are_right(o, right_at)), k)
        )
    for k in sizes(samples):
        estimates[f"best_at_{k}"] = _estimate(scored[k], lambda o: best_at_k_estimate(o.rewards, k))
    estimates |= {
        f"maj_at_{samples}": _estimate(
            voted, lambda o: _majority(o.answers, _are_right(o, right_at))
        ),
        "response_length": _estimate(outcomes, lambda o: fmean(o.lengths)),
        "truncated_frac": _estimate(outcomes, lambda o: o.num_truncated / len(o.lengths)),
        "failed_frac": _estimate(outcomes, lambda o: 1 - len(o.rewards) / len(o.lengths)),
    }
    return {name: estimate for name, estimate in estimates.items() if estimate}


def evaluation_file(output_dir: str | Path, step: int) -> Path:
    """Return the file for the training loop's evaluation after `step` steps."""
    return Path(output_dir) / "evaluations" / f"evaluation_{step}.json"


def by_source(outcomes: Sequence[ProblemOutcome]) -> dict[str, list[ProblemOutcome]]:
    """Return the outcomes by `data_source`, in alphabetical order."""
    sources = sorted({o.source for o in outcomes})
    return {name: [o for o in outcomes if o.source == name] for name in sources}


def part_means(outcomes: Sequence[ProblemOutcome]) -> dict[str, float]:
    """Return {name: mean over samples} of the numbers that reward functions report."""
    values: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, own in outcome.parts.items():
            values[name] += own
    return {name: fmean(own) for name, own in sorted(values.items())}


def eval_sums(outcomes: Sequence[ProblemOutcome], *, samples: int) -> Sums:
    """Return the eval/ metrics: all of them over all problems, and a few for each source.

    Args:
        outcomes: of all replicas; if there are none, there are no metrics.
        samples: number of samples of each problem.
    """
    estimates = summarize(outcomes, samples=samples)
    names = [name for name in estimates if not name.startswith("best_at_")]
    if samples == 1:  # with one sample these repeat the reward
        names = [name for name in names if not name.startswith(("pass_at_", "maj_at_"))]
    sums: Sums = {}
    for name in names:
        sums[f"eval/{name}"] = (estimates[name].mean, 1)
        if name == "reward" and (half_width := estimates[name].half_width) is not None:
            sums["eval/reward_ci95"] = (half_width, 1)
    sums |= {f"eval/{name}/mean": (mean, 1) for name, mean in part_means(outcomes).items()}
    sources = by_source(outcomes)
    for source, own in sources.items() if len(sources) > 1 else ():
        of_source = summarize(own, samples=samples)
        several = (f"pass_at_{samples}", f"maj_at_{samples}") if samples > 1 else ()
        for name in ("reward", *several):
            if name in of_source:
                short = name.replace(f"_{samples}", "_n")
                sums[f"eval/{source or 'none'}/{short}"] = (of_source[name].mean, 1)
    return sums


def sizes(samples: int) -> list[int]:
    """Return each k of pass@k and best@k: powers of two, and the number of samples."""
    return [2**i for i in range(samples.bit_length()) if 2**i < samples] + [samples]


def _are_right(outcome: ProblemOutcome, right_at: float) -> list[bool]:
    # A weighted sum of several functions' values may be just below the threshold by rounding.
    return [reward >= right_at - ROUNDING for reward in outcome.rewards]


def _majority(answers: Sequence[str], rights: Sequence[bool]) -> float:
    votes = Counter(answers)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    # A grader may judge the same answer differently in two responses, so take the mean.
    judged = [[r for own, r in zip(answers, rights) if own == answer] for answer in first]
    return fmean(map(fmean, judged))


def _estimate(
    outcomes: Sequence[ProblemOutcome], value: Callable[[ProblemOutcome], float]
) -> Estimate | None:
    values = list(map(value, outcomes))
    if not values:
        return None
    mean = fmean(values)
    count = len(values)
    if count == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (count - 1)
    return Estimate(mean, _Z95 * math.sqrt(variance / count), count)
