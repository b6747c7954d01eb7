"""Outcomes of steps as a table for people, and as plain data for programs."""

from __future__ import annotations

import math
from typing import Any

import torch

from spmdrl.tools.rollouts.terminal import aligned
from spmdrl.tools.what_if.measures import disagreement, push_shares
from spmdrl.tools.what_if.run import Outcome, StepOutcomes

_NORM = "policy/grad_norm"
COLUMNS = ("grad norm", "cosine", "clipped", "masked", "ESS", "up", "down")
Sample = dict[str, Any]
"""See `samples_of`."""


def table(result: StepOutcomes, *, limit: int) -> str:
    """Return a step's outcomes, one line each, and the samples on which they differ most.

    Args:
        limit: number of these samples.
    """
    width = max(len(one.alternative.name) for one in result.outcomes)
    rows = [["".ljust(width), *COLUMNS]]
    rows += [[one.alternative.name.ljust(width), *row(one)] for one in result.outcomes]
    lines = [about(result), *(f"  {line}" for line in aligned(rows))]
    most = most_disputed(result, limit=limit)
    if most:
        lines.append("samples on which they differ most, by their share of each one's whole push:")
    for one in most:
        pushes = "; ".join(push_text(one, one[side]) for side in ("up", "down"))
        lines.append(
            f"  group {one['group']} sample {one['sample']} (reward {one['reward']:.4g}): {pushes}"
        )
    return "\n".join(lines)


def about(result: StepOutcomes) -> str:
    """Return the source of a step's numbers, and compare its own gradient norm with the run's."""
    lines = [f"step {result.step}: {len(result.episodes)} samples, weights of {result.weights}"]
    if _NORM in result.recorded:
        here = result.outcomes[0].metrics[_NORM]
        there = result.recorded[_NORM]
        apart = abs(here - there) / there if there else 0.0
        lines.append(
            f"as run: gradient norm {here:.7g}, in metrics.jsonl {there:.7g} ({apart:.0e} apart)"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def row(one: Outcome) -> list[str]:
    """Return the cells of an outcome, in the order of COLUMNS."""
    pushes = one.pushes[one.pushes.isfinite()]
    shares = [one.cosine, one.clipped, one.masked, one.ess]
    return [
        f"{one.metrics[_NORM]:.4g}",
        *("-" if math.isnan(value) else f"{value:.4f}" for value in shares),
        f"{int((pushes > 0).sum())}",
        f"{int((pushes < 0).sum())}",
    ]


def samples_of(result: StepOutcomes) -> list[Sample]:
    """Return every sample of a step as plain data, largest disagreement first.

    Returns: for each sample: `rows` of its sequences in the batch, `group`, `sample`, `reward`;
        `amount`, the disagreement (see measures; 0 if a push is not known); `up` and `down`, the
        alternatives with the largest and the smallest share; `pushes` and `shares` by name of the
        alternative.
    """
    episodes = result.episodes
    scalars = episodes.scalars
    pushes = torch.stack([one.pushes for one in result.outcomes])
    shares = push_shares(torch.where(pushes.isfinite().all(0), pushes, 0.0))
    amounts, up, down = disagreement(shares)
    names = [one.alternative.name for one in result.outcomes]
    return [
        {
            "rows": (episodes.index == at).nonzero().flatten().tolist(),
            "group": int(scalars.group_ids[at]),
            "sample": int(scalars.sample_ids[at]),
            "reward": float(scalars.rewards[at]),
            "amount": float(amounts[at]),
            "up": names[int(up[at])],
            "down": names[int(down[at])],
            "pushes": dict(zip(names, pushes[:, at].tolist())),
            "shares": dict(zip(names, shares[:, at].tolist())),
        }
        for at in torch.argsort(-amounts, stable=True).tolist()
    ]


def most_disputed(result: StepOutcomes, *, limit: int) -> list[Sample]:
    """Return the samples with the largest disagreement, without those on which all agree."""
    return [one for one in samples_of(result)[:limit] if one["amount"] > 0]


def push_text(one: Sample, name: str) -> str:
    """Return an alternative's push on a sample, and its share of all its pushes, as text."""
    return f"{name} {one['pushes'][name]:+.2e} ({one['shares'][name]:+.2%})"


def as_plain_data(result: StepOutcomes) -> dict[str, Any]:
    """Return a step's outcomes as plain data for JSON: None for numbers that are not finite."""
    return {
        "step": result.step,
        "weights": result.weights,
        "notes": result.notes,
        "recorded": result.recorded,
        "alternatives": [_plain_outcome(one) for one in result.outcomes],
        "samples": [one | {"pushes": _finite(one["pushes"])} for one in samples_of(result)],
    }


def _plain_outcome(one: Outcome) -> dict[str, Any]:
    numbers = {
        "grad_norm": one.metrics[_NORM],
        "cosine": one.cosine,
        "clipped": one.clipped,
        "masked": one.masked,
        "ess": one.ess,
    }
    return {
        "name": one.alternative.name,
        "settings": dict(one.alternative.settings),
        **_finite(numbers),
        "metrics": _finite(one.metrics),
    }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
