"""What was found of steps, as a table for people and as plain data for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from spmdrl.tools.what_if.measures import disagreement, order
from spmdrl.tools.what_if.run import Outcome, StepFound

_NORM = "policy/grad_norm"
COLUMNS = ("grad norm", "cosine", "clipped", "masked", "ESS", "up", "down")


def table(found: StepFound, *, limit: int) -> str:
    """Return a step's outcomes, one line each, and the samples on which they differ most.

    Args:
        limit: of these samples.
    """
    lines = [about(found)]
    width = max(len(one.alternative.name) for one in found.outcomes)
    head = "".join(f"{name:>{10 if i < 2 else 9}}" for i, name in enumerate(COLUMNS))
    lines.append(f"  {'':{width}}{head}")
    for one in found.outcomes:
        cells = "".join(f"{t:>{10 if i < 2 else 9}}" for i, t in enumerate(row(one)))
        lines.append(f"  {one.alternative.name:{width}}{cells}")
    told = [f"  {_about_sample(one)}" for one in disputed(found, limit=limit)]
    if told:
        lines += ["samples on which they differ most, by their share of each one's whole push:"]
    return "\n".join([*lines, *told])


def about(found: StepFound) -> str:
    """Return where a step's numbers are from, and how its own gradient compares with the run's."""
    lines = [f"step {found.step}: {len(found.scalars)} samples, weights of {found.weights}"]
    if _NORM in found.recorded:
        here = found.outcomes[0].metrics[_NORM]
        there = found.recorded[_NORM]
        apart = abs(here - there) / there if there else 0.0
        lines.append(
            f"as run: gradient norm {here:.7g}, in metrics.jsonl {there:.7g} ({apart:.0e} apart)"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def row(one: Outcome) -> list[str]:
    """Return the cells of an outcome, as COLUMNS has them."""
    pushes = one.pushes[one.pushes.isfinite()]
    return [
        f"{one.metrics[_NORM]:.4g}",
        _number(one.cosine, 4),
        _number(one.clipped, 4),
        _number(one.masked, 4),
        _number(one.ess, 4),
        f"{int((pushes > 0).sum())}",
        f"{int((pushes < 0).sum())}",
    ]


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def disputed(found: StepFound, *, limit: int) -> list[dict[str, Any]]:
    """Return the samples on which outcomes differ most, most first, as plain data.

    Returns: of each `row` (in the batch), `group`, `sample`, `reward`, `amount` (see
        measures.disagreement), `up` and `down` (who pushes up more, and down more) and, by name of
        the alternative, `pushes` and `shares` of its whole push; none on which all agree.
    """
    scalars = found.scalars
    pushes = torch.stack([one.pushes for one in found.outcomes])
    known = torch.nonzero(pushes.isfinite().all(0)).flatten()
    pushes = pushes[:, known]
    amounts, up, down = disagreement(pushes)
    sizes = pushes.abs().sum(1, keepdim=True)
    shares = torch.where(sizes > 0, pushes / sizes, 0.0)
    names = [one.alternative.name for one in found.outcomes]
    return [
        {
            "row": int(known[at]),
            "group": int(scalars.group_ids[known[at]]),
            "sample": int(scalars.sample_ids[known[at]]),
            "reward": float(scalars.rewards[known[at]]),
            "amount": float(amounts[at]),
            "up": names[int(up[at])],
            "down": names[int(down[at])],
            "pushes": dict(zip(names, pushes[:, at].tolist())),
            "shares": dict(zip(names, shares[:, at].tolist())),
        }
        for at in order(amounts)[:limit]
        if amounts[at] > 0
    ]


def push_text(one: dict[str, Any], name: str) -> str:
    """Return what an alternative does with one of the `disputed` samples: its push, and the share
    of its whole push."""
    return f"{name} {one['pushes'][name]:+.2e} ({one['shares'][name]:+.2%})"


def _about_sample(one: dict[str, Any]) -> str:
    told = "; ".join(push_text(one, one[side]) for side in ("up", "down"))
    return f"group {one['group']} sample {one['sample']} (reward {one['reward']:.4g}): {told}"


def plain(found: StepFound) -> dict[str, Any]:
    """Return all that was found of a step as JSON has it: NaN becomes null."""
    return {
        "step": found.step,
        "weights": found.weights,
        "notes": found.notes,
        "recorded": found.recorded,
        "alternatives": [_plain_outcome(one) for one in found.outcomes],
        "samples": list(_samples(found)),
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


def _samples(found: StepFound) -> Iterator[dict[str, Any]]:
    """Yield every sample, those first on which the outcomes differ most."""
    told = disputed(found, limit=len(found.scalars))
    yield from ({k: v for k, v in one.items() if k != "row"} for one in told)
    seen = {one["row"] for one in told}
    for at in range(len(found.scalars)):
        if at in seen:
            continue
        pushes = {one.alternative.name: float(one.pushes[at]) for one in found.outcomes}
        yield {
            "group": int(found.scalars.group_ids[at]),
            "sample": int(found.scalars.sample_ids[at]),
            "reward": float(found.scalars.rewards[at]),
            "amount": 0.0,
            "pushes": _finite(pushes),
        }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
