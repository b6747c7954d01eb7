"""The forecast of held-out reward: its intervals cover, and it refuses what shows no curve."""

from __future__ import annotations

import numpy as np
import pytest

from spmdrl.errors import Refusal
from spmdrl.report.forecast import Forecast, forecast, held_out_points

START, CEILING, MIDDLE, STEEPNESS = 0.3, 0.9, 60.0, 1.5


def reward(x: np.ndarray) -> np.ndarray:
    """The published curve, as the paper writes it."""
    x = np.maximum(x, 1e-12)
    return START + (CEILING - START) / (1 + (MIDDLE / x) ** STEEPNESS)


def measured(*, to: float, count: int, noise: float, seed: int) -> list[tuple[float, float]]:
    x = np.linspace(0, to, count)
    y = reward(x) + np.random.default_rng(seed).normal(0, noise, count)
    return list(zip(x.tolist(), y.tolist()))


def test_without_noise_it_finds_the_curve_and_a_narrow_interval():
    found = forecast(measured(to=150, count=12, noise=0.0, seed=0))
    own = (found.start, found.ceiling, found.middle, found.steepness)
    assert own == pytest.approx((START, CEILING, MIDDLE, STEEPNESS), rel=1e-3)
    assert np.ptp(found.ceiling_interval) < 1e-3
    for x, value, low, high in found.curve:
        assert value == pytest.approx(reward(x), abs=1e-4)
        assert low <= value + 1e-9 and value - 1e-9 <= high


def test_nineteen_of_twenty_intervals_hold_the_true_value():
    """Of 60 draws of a 95% interval, 52 to 60 hold it with a probability above 0.99."""
    runs = [forecast(measured(to=150, count=20, noise=0.01, seed=seed)) for seed in range(60)]
    assert 52 <= sum(holds(run.ceiling_interval, CEILING) for run in runs) < 60
    ahead = reward(np.array(300.0))
    assert 52 <= sum(holds(run.curve[-1][2:], ahead) for run in runs) <= 60
    noises = [run.noise**2 for run in runs]
    assert np.mean(noises) ** 0.5 == pytest.approx(0.01, rel=0.1)


def holds(interval: tuple[float, float], value: float) -> bool:
    low, high = interval
    return low <= value <= high


def test_more_noise_gives_a_wider_interval_and_then_no_forecast():
    sharp, vague = (measured(to=150, count=12, noise=noise, seed=3) for noise in (0.002, 0.02))
    widths = [np.ptp(forecast(points).ceiling_interval) for points in (sharp, vague)]
    assert 5 * widths[0] < widths[1]
    assert forecast(sharp).sentence.startswith("Going on from")
    assert "which is wider than the whole rise so far" in forecast(vague).sentence


@pytest.mark.parametrize(
    "points, text",
    [
        (measured(to=150, count=6, noise=0.0, seed=0), "6 evaluations are too few.*7 are needed"),
        ([], "0 evaluations are too few"),
        ([(0.0, 0.1)] * 9, "1 evaluations are too few"),
        (measured(to=8, count=12, noise=0.005, seed=0), "rises without a bend.*than 8 steps"),
        ([(x, 0.4 + 0.01 * (x % 3)) for x in range(12)], "does not rise above the noise"),
        ([(x, 0.9 - 0.04 * x) for x in range(12)], "does not rise"),
        ([(0.0, 0.5)] * 6 + [(1.0, float("nan"))], "not finite"),
        ([(x - 1.0, 0.5) for x in range(9)], "below 0"),
    ],
)
def test_what_shows_no_curve_is_refused_by_its_name(points, text):
    with pytest.raises(Refusal, match=f"forecast: .*{text}"):
        forecast(points)


def test_the_unit_of_x_changes_nothing_but_its_name():
    points = measured(to=150, count=12, noise=0.003, seed=1)
    steps = forecast(points)
    tokens = forecast([(1e5 * x, y) for x, y in points], unit="tokens")
    assert tokens.middle == pytest.approx(1e5 * steps.middle, rel=1e-3)
    assert tokens.ceiling_interval == pytest.approx(steps.ceiling_interval, rel=1e-2)
    assert "from 1.5e+07 to 3e+07 tokens" in tokens.sentence
    assert "from 150 to 300 steps" in steps.sentence and isinstance(steps, Forecast)


def test_the_points_of_a_run_are_its_evaluations_over_what_it_had_spent():
    rows = [{"step": 0, "eval/reward": 0.1}]
    rows += [{"step": step, "perf/trained_tokens": 10.0 + step} for step in range(3)]
    rows += [{"step": 3, "eval/reward": 0.4}, {"step": 1, "eval/reward": 0.2}]
    rows += [{"step": 3, "eval/reward": 0.5}]  # again, after a resume
    assert held_out_points(rows) == [(0, 0.1), (1, 0.2), (3, 0.5)]
    assert held_out_points(rows, over="tokens") == [(0, 0.1), (10, 0.2), (33, 0.5)]
    assert held_out_points([]) == []
