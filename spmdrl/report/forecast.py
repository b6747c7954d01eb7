"""What held-out reward to expect of more training: a sigmoid through a run's evaluations.

The curve is that of Khatri et al. 2025, "The Art of Scaling Reinforcement Learning Compute for
LLMs" (arXiv 2510.13786), equation 1:

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

C is what was spent, in steps or tokens; R0 is the reward before training, A the ceiling, C_mid
where half of the rise is done, and B how steep it is. The paper takes R0 as measured. Here it is
fitted like A, since the first evaluation has as much noise as the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from spmdrl.errors import Refusal
from spmdrl.report.curves import Rows, series

LEAST_POINTS = 7
"""Evaluations that a fit of four parameters needs, to leave three for the noise."""
FURTHEST_MIDDLE = 10.0
"""C_mid is sought up to this many times what was spent: beyond it the points show no bend."""
STEEPNESS = (0.5, 8.0)
"""B is sought in this range. The paper's runs have 1 to 2.5."""
_CONFIDENCE = 0.95
_GRID = 64
_ZOOMS = 4


@dataclass(frozen=True)
class Forecast:
    """A fitted curve. An interval is (low, high), of 95%."""

    start: float
    """R0, the reward before training."""
    ceiling: float
    """A, the reward that the curve approaches."""
    ceiling_interval: tuple[float, float]
    middle: float
    """C_mid, in the unit of x."""
    steepness: float
    """B."""
    noise: float
    """Standard deviation of an evaluation around the curve."""
    curve: list[tuple[float, float, float, float]]
    """(x, reward, low, high) from 0 to twice the last x, to draw; low and high are the interval of
    the curve, not of an evaluation."""
    sentence: str
    """What going on would give, for people."""


def held_out_points(
    rows: Rows, *, metric: str = "eval/reward", over: str = "steps"
) -> list[tuple[float, float]]:
    """Return (spent, reward) of the evaluations in a run's rows of metrics.jsonl.

    Args:
        metric: an `eval/` metric.
        over: `steps`, or `tokens`: those trained on before the evaluation.
    """
    steps, rewards = series(rows, metric)
    if over == "steps":
        return [(float(step), reward) for step, reward in zip(steps, rewards)]
    trained = dict(zip(*series(rows, "perf/trained_tokens")))
    most = max(steps, default=0)
    spent = list(accumulate((trained.get(step, 0.0) for step in range(most)), initial=0.0))
    return [(spent[step], reward) for step, reward in zip(steps, rewards)]


def forecast(points: Sequence[tuple[float, float]], *, unit: str = "steps") -> Forecast:
    """Fit the curve to evaluations, and say what twice as much training would give.

    The fit is least squares. An interval holds every value of a curve whose sum of squares is not
    significantly larger (profile likelihood): near the end of a rise the ceiling is known well,
    in its straight part hardly at all.

    Args:
        points: (x, y): spent, at least 0 and in `unit`; held-out reward.
        unit: name of what x counts, for the sentence.
    Raises: Refusal if the points are too few, show no rise above their noise, or no bend.
    """
    own = sorted(dict(points).items())
    x = np.array([point[0] for point in own], float)
    y = np.array([point[1] for point in own], float)
    if not (np.isfinite(x) & np.isfinite(y)).all() or (x < 0).any():
        raise Refusal("forecast: a point is not finite, or its x is below 0; leave it out")
    if len(x) < LEAST_POINTS:
        raise Refusal(
            f"forecast: {len(x)} evaluations are too few to fit four parameters, "
            f"{LEAST_POINTS} are needed; evaluate more often (evaluate.every_steps)"
        )
    from scipy.optimize import least_squares
    from scipy.stats import t

    last = x[-1]
    bounds = np.log([(x[x > 0][0] / 10, FURTHEST_MIDDLE * last), STEEPNESS]).T
    coarse = _Curves(x, y, _cells(*bounds))
    begin = np.clip(coarse.cells[coarse.squares.argmin()], bounds[0] + 1e-6, bounds[1] - 1e-6)
    fit = least_squares(lambda cell: _Curves(x, y, cell[None]).residuals[0], begin, bounds=bounds)
    best = _Curves(x, y, fit.x[None])
    start, ceiling = best.ends[0]
    middle, steepness = np.exp(fit.x)

    freedom = len(x) - 4
    quantile = t.ppf((1 + _CONFIDENCE) / 2, freedom)
    most = best.squares[0] * (1 + quantile**2 / freedom) + 1e-12
    flat = ((y - y.mean()) ** 2).sum()
    noise = math.sqrt(best.squares[0] / freedom)
    if flat <= most or ceiling <= start:
        raise Refusal(
            f"forecast: held-out reward does not rise above the noise of its evaluations "
            f"({y[0]:.3g} at first, {y[-1]:.3g} at last, noise {noise:.2g}); there is no curve to "
            "go on along. Train on, or take more held-out rows and evaluate.samples"
        )
    if coarse.squares[coarse.cells[:, 0] == bounds[1][0]].min() <= most:
        raise Refusal(
            f"forecast: held-out reward still rises without a bend (half of the rise may lie over "
            f"{FURTHEST_MIDDLE:g} times further than {_amount(last)} {unit}), so its "
            "ceiling is unknown; train on and ask again"
        )
    curves = _likely(x, y, bounds, coarse, best, most=most)
    grid = np.linspace(0, 2 * last, 41)
    drawn = []
    for spent in grid.tolist():
        low, high = curves.interval(spent, most=most)
        drawn.append((spent, float(best.at(spent)[0]), low, high))
    low, high = curves.interval(math.inf, most=most)
    return Forecast(
        start=float(start),
        ceiling=float(ceiling),
        ceiling_interval=(low, high),
        middle=float(middle),
        steepness=float(steepness),
        noise=noise,
        curve=drawn,
        sentence=_sentence(drawn, ceiling, (low, high), last=last, unit=unit),
    )


class _Curves:
    """Curves with C_mid and B given. R0 and A, which it is linear in, are fitted to the points.

    Args:
        x, y: [points].
        cells: [curves, 2], log C_mid and log B.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, cells: np.ndarray):
        self.cells = cells
        done = self._done(x)  # [curves, points]
        design = np.stack([1 - done, done], -1)
        self._inverse = np.linalg.pinv(design.swapaxes(1, 2) @ design, hermitian=True)
        self.ends = (self._inverse @ (design.swapaxes(1, 2) @ y)[..., None])[..., 0]
        """[curves, 2]: R0 and A."""
        self.residuals = (design @ self.ends[..., None])[..., 0] - y
        self.squares = (self.residuals**2).sum(-1)

    def _done(self, x: Any) -> np.ndarray:
        """Return which share of the rise is done at each x, [curves, number of x]."""
        with np.errstate(divide="ignore"):
            far = np.log(np.atleast_1d(x)) - self.cells[:, :1]
        return 1 / (1 + np.exp(np.clip(-far * np.exp(self.cells[:, 1:]), -700, 700)))

    def at(self, x: float) -> np.ndarray:
        """Return each curve's reward."""
        done = self._done(x)[:, 0]
        return (1 - done) * self.ends[:, 0] + done * self.ends[:, 1]

    def interval(self, x: float, *, most: float) -> tuple[float, float]:
        """Return the lowest and highest reward at `x` of a curve through the points, with any R0
        and A, whose sum of squares is at most `most`."""
        done = self._done(x)
        weights = np.concatenate([1 - done, done], -1)
        room = np.clip(most - self.squares, 0, None)
        spread = np.sqrt(room * np.einsum("ci,cij,cj->c", weights, self._inverse, weights))
        middle = self.at(x)
        likely = self.squares <= most
        return float((middle - spread)[likely].min()), float((middle + spread)[likely].max())


def _cells(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the points of an even grid between two corners, [cells, 2]."""
    axes = [np.linspace(begin, end, _GRID) for begin, end in zip(low, high)]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)


def _likely(
    x: np.ndarray, y: np.ndarray, bounds: np.ndarray, curves: _Curves, best: _Curves, *, most: float
) -> _Curves:
    """Return curves on a grid as narrow as those whose sum of squares is at most `most`.

    With little noise, few or no cells of the first grid are among them.
    """
    for _ in range(_ZOOMS):
        likely = np.concatenate([curves.cells[curves.squares <= most], best.cells])
        cell = (curves.cells[-1] - curves.cells[0]) / (_GRID - 1)
        low = np.maximum(likely.min(0) - 2 * cell, bounds[0])
        high = np.minimum(likely.max(0) + 2 * cell, bounds[1])
        curves = _Curves(x, y, np.concatenate([_cells(low, high), best.cells])[:-1])
    return _Curves(x, y, np.concatenate([curves.cells, best.cells]))


def _sentence(
    drawn: list[tuple[float, float, float, float]],
    ceiling: float,
    interval: tuple[float, float],
    *,
    last: float,
    unit: str,
) -> str:
    """Return what going on would give."""
    now = next(value for at, value, *_ in drawn if at >= last)
    _, then, low, high = drawn[-1]
    if interval[1] - interval[0] > now - drawn[0][1]:
        return (
            f"The evaluations do not say yet what going on would give: the curve's ceiling is "
            f"between {interval[0]:.3f} and {interval[1]:.3f} (95%), which is wider than the whole "
            "rise so far."
        )
    return (
        f"Going on from {_amount(last)} to {_amount(2 * last)} {unit} would change held-out reward "
        f"from {now:.3f} to {then:.3f} (95%: {low:.3f} to {high:.3f}); the curve's ceiling is "
        f"{ceiling:.3f} (95%: {interval[0]:.3f} to {interval[1]:.3f})."
    )


def _amount(x: float) -> str:
    """Return a number of steps or tokens, for people."""
    return f"{x:,.0f}" if x < 1e6 else f"{x:.3g}"
