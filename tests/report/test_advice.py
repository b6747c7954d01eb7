"""Warnings that a run learns nothing, or soon will not: when, how often, with which cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config import AlgorithmSettings, Config, ReportSettings
from spmdrl.report.advice import Advisor
from tests.helpers.report_world import config, reporting

HEALTHY = {
    "reward/mean": 0.4,
    "reward/zero_spread_groups_frac": 0.2,
    "policy/loss": 0.1,
    "policy/grad_norm": 0.7,
    "policy/entropy": 1.0,
    "policy/mismatch_k3": 1e-5,
    "rollout/truncated_frac": 0.1,
}
NO_SPREAD = HEALTHY | {"reward/zero_spread_groups_frac": 1.0, "policy/grad_norm": 0.0}


def advisor(*, after: int = 3, advantage: str = "grpo", objective: str = "rl") -> Advisor:
    return Advisor(
        Config(
            report=ReportSettings(warn_after=after),
            algorithm=AlgorithmSettings(objective=objective, advantage=advantage),
        )
    )


def told(advise: Advisor, *steps: dict) -> list[str]:
    return [text for values in steps for text in advise.look(values)]


def test_a_healthy_run_is_told_nothing():
    assert not told(advisor(), *[HEALTHY] * 20)


def test_metrics_that_are_not_finite_end_no_run():
    odd = [
        HEALTHY | {"policy/loss": value} for value in (float("inf"), -float("inf"), 1e308, 1e308)
    ]
    assert not told(advisor(after=4), *odd, HEALTHY)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (NO_SPREAD | {"reward/mean": 0.0}, ["all 8 rewards are equal", "0.000", "too hard"]),
        (NO_SPREAD | {"reward/mean": 1.0}, ["all 8 rewards are equal", "1.000", "is solved"]),
        ({"policy/grad_norm": 0.0, "policy/clip_frac": 1.0}, ["gradient is 0", "100% tokens cl"]),
        (
            {"policy/grad_norm": None, "policy/skipped_updates": 2.0},
            ["every update is skipped", "not finite"],
        ),
        ({"policy/entropy": 0.04}, ["entropy has collapsed from 1.000 to 0.0400", "optimizer.lr"]),
        ({"rollout/truncated_frac": 0.9}, ["90% of the responses", "max_response_tokens (512)"]),
        ({"policy/mismatch_k3": 0.002}, ["gap between engine and trainer grows", "1.0e-05 -> 2.0"]),
    ],
)
def test_what_lasts_is_told_once_with_its_likeliest_cause(bad, words):
    advise = advisor()
    healthy, bad = [HEALTHY] * 4, HEALTHY | bad
    bad = {name: value for name, value in bad.items() if value is not None}
    assert not told(advise, *healthy, bad, bad)
    (text,) = told(advise, *[bad] * 10)
    assert all(word in text for word in [*words, "so for 3 steps"]), text
    assert not told(advise, *healthy)
    assert told(advise, bad, bad, bad) == [text], "it came back"


def test_what_does_not_last_is_not_told():
    assert not told(advisor(), *[NO_SPREAD, NO_SPREAD, HEALTHY] * 10)


def test_a_method_without_groups_needs_no_spread_of_them():
    bad = HEALTHY | {"reward/zero_spread_groups_frac": 1.0}
    assert told(advisor(), *[bad] * 3) and not told(advisor(advantage="gae"), *[bad] * 9)


def test_a_resumed_run_remembers_with_what_it_began():
    advise, low = advisor(), HEALTHY | {"policy/entropy": 0.01}
    assert not told(advise, *[low] * 9)
    advise = advisor()
    advise.resume([{"step": 0, "eval/reward": 1.0}, *({"step": s} | HEALTHY for s in range(9))])
    assert "collapsed" in told(advise, *[low] * 3)[0]


def test_a_resumed_run_that_began_with_a_number_that_was_not_finite_still_warns():
    advise, low = advisor(), HEALTHY | {"policy/entropy": 0.01}
    first = {"step": 0} | HEALTHY | {"policy/mismatch_k3": None}  # as metrics.jsonl has it
    advise.resume([first, *({"step": s} | HEALTHY for s in range(1, 9))])
    assert "collapsed" in told(advise, *[low] * 3)[0]


def test_a_run_begins_where_its_policy_trains_not_in_the_warm_up_of_a_critic():
    advise, warm_up = advisor(advantage="gae"), {"reward/mean": 0.4, "value/loss": 1.0}
    low = HEALTHY | {"policy/entropy": 0.01}
    assert not told(advise, *[warm_up] * 9, *[HEALTHY] * 3)
    assert "collapsed" in told(advise, *[low] * 3)[0]


def test_distillation_needs_no_spread_of_rewards_and_comparing_pairs_does():
    bad = HEALTHY | {"reward/zero_spread_groups_frac": 1.0}
    assert not told(advisor(objective="on_policy_distill"), *[bad] * 9)
    (text,) = told(advisor(objective="online_preference", advantage="gae"), *[bad] * 9)
    assert "there are no pairs" in text


@pytest.mark.parametrize("objective", ["sft", "preference", "reward_model", "distill"])
def test_what_fits_rows_is_told_nothing_of_rewards(objective):
    assert not told(advisor(objective=objective), *[NO_SPREAD | {"policy/grad_norm": 0.7}] * 9)
    (text,) = told(advisor(objective=objective), *[NO_SPREAD] * 9)
    assert "the gradient is 0" in text and "reward" not in text


def test_what_fits_rows_may_lose_all_entropy():
    low = HEALTHY | {"policy/entropy": 0.01}
    for objective in ("sft", "preference"):
        assert not told(advisor(objective=objective), *[HEALTHY] * 3, *[low] * 9)
    (text,) = told(advisor(objective="online_preference"), *[HEALTHY] * 3, *[low] * 9)
    assert "loss_options.beta" in text and "clip_high" not in text


def test_warnings_can_be_switched_off():
    assert not told(advisor(after=0), *[NO_SPREAD] * 9)


def test_a_run_at_reward_0_warns_in_console_and_log(tmp_path: Path, capsys):
    with reporting(config(tmp_path, steps=9)) as report:
        for step in range(9):
            report.record(
                step,
                {
                    "reward/mean": (0.0, 8),
                    "reward/zero_spread_groups_frac": (2.0, 2),
                    "policy/grad_norm": (0.0, 1),
                },
                seconds={},
            )
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("nothing is learnt") == 1
    (log,) = tmp_path.glob("logs/attempt_*/rank_0.log")
    assert "step 4: nothing is learnt: within each group" in log.read_text()
