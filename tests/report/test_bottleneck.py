"""What a step's time is spent on, and the settings that are named against it."""

from __future__ import annotations

import re

import pytest

from spmdrl.config.tree import sections, settings
from spmdrl.report.bottleneck import (
    _ADVICE,
    CAUSES,
    MEAN_STEPS,
    advice,
    bottleneck,
    causes_by_step,
    explain,
    explain_run,
    step_causes,
)
from spmdrl.report.timeline_writer import PHASES, clean_name
from tests.helpers.built import made
from tests.helpers.report_world import config, record_steps, reporting
from tests.report.test_waits import step_of_two


def seconds(**causes: float) -> dict[str, float]:
    return dict.fromkeys(CAUSES, 0.0) | causes


def test_every_phase_of_the_loop_has_a_cause():
    known = {phase for phases in CAUSES.values() for phase in phases}
    assert {clean_name(name) for name in PHASES} <= known


def test_the_causes_of_a_step_add_up_to_it_and_follow_the_critical_path():
    found = step_causes([step_of_two(), step_of_two(4, at=10.0)])
    # Rank 0 updates for 3 s while rank 1 samples: the update makes no step longer.
    expected = seconds(generate=5, reward=2, exchange=0.25, push=1.25, other=0.25)
    assert found == {cause: pytest.approx(value) for cause, value in expected.items()}
    assert sum(found.values()) == pytest.approx(8.75)


def test_the_tail_is_the_share_of_drawing_that_the_metrics_give():
    row = {
        "time/generate": 7.0,
        "time/engine_idle_tail": 1.0,
        "time/engine_idle_reward": 2.0,
        "time/engine_idle_environment": 0.0,
    }
    found = step_causes([step_of_two()], [row, {"step": 1, "eval/reward": 0.5}, row])
    assert found["tail"] == pytest.approx(5 * 0.2) and found["generate"] == pytest.approx(4)
    assert found["reward"] == pytest.approx(2)


def test_a_run_is_explained_by_the_mean_of_its_newest_complete_steps():
    timeline = [step_of_two(step) for step in range(MEAN_STEPS + 10)]
    causes = causes_by_step([*timeline, step_of_two(90)[:1]])
    assert [*causes] == [*range(MEAN_STEPS + 10)]
    causes[9] = seconds(save=1e9)
    assert explain(causes, made()).startswith("mean of steps 10 to 59: a step takes 8.75 s, and ")
    assert explain({}, made()) == ""


@pytest.mark.parametrize(
    "causes, changes, what, settings_named",
    [
        (
            dict(generate=6, update=4),
            dict(layout=dict(placement="split", world_size=4, trainer_ranks=1), lag=0),
            "60% of it (6 s) is sampling",
            ["lag 1", "layout.world_size is 4", "layout.trainer_ranks 1"],
        ),
        (
            dict(update=6, generate=4),
            dict(layout=dict(placement="colocated", world_size=4)),
            "60% of it (6 s) is the update",
            ["batch.tokens_per_microbatch 0"],
        ),
        (
            dict(tail=8, update=1),
            dict(layout=dict(placement="split", world_size=4, trainer_ranks=1), lag=1),
            "sampling the last, long sequences",
            ["rollout.schedule.in_flight", "over_sample", "sampling.max_response_tokens below"],
        ),
        (
            dict(generate=8),
            dict(batch=dict(prompts_per_step=64, group_size=16), engine=dict(max_num_seqs=128)),
            "sampling; try",
            ["engine.max_num_seqs above 128"],
        ),
        (dict(reward=8), dict(rewards=dict(workers=3)), "rewards", ["rewards.workers above 3"]),
        (dict(other=8), {}, "outside of all phases", ["report.profile"]),
    ],
)
def test_the_sentence_names_the_largest_cause_and_settings(causes, changes, what, settings_named):
    found = bottleneck(seconds(**causes), made(**changes))
    assert found.startswith(f"a step takes {sum(causes.values())} s, and ")
    assert what in found
    assert all(name in found for name in settings_named), found


def test_what_would_not_help_is_not_named():
    beside = made(layout=dict(placement="split", world_size=4, trainer_ranks=1), lag=1)
    assert "lag 1" not in bottleneck(seconds(generate=6, update=4), beside)
    alone = made(layout=dict(placement="split", world_size=4, trainer_ranks=1), lag=0)
    assert "lag 1" not in bottleneck(seconds(generate=99, update=1), alone)
    fits = made(engine=dict(max_num_seqs=4096))
    assert "max_num_seqs" not in bottleneck(seconds(generate=6), fits)
    assert bottleneck(seconds(), made()) == ""


def test_advice_names_settings_that_exist():
    known = {*settings(), *sections()}
    text = " ".join(row[2] for row in _ADVICE)
    named = re.findall(r"\b(?<!cfg\.)[a-z_]+(?:\.[a-z_]+)+\b", re.sub(r"\{[^}]*\}", "", text))
    assert named and set(named) <= known
    for cause in CAUSES:
        assert advice(cause, seconds(), made())


def test_a_run_says_at_its_end_what_its_steps_spent_time_on(tmp_path, capsys):
    with reporting(config(tmp_path)) as report:
        for step in range(3):
            with report._watch.phase("update", step):
                pass
            report._timeline.write(step)
        record_steps(report, 0, 3)
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"mean of steps 0 to 2: a step takes \S+ s, and \d+% of it .* try ", out)
    assert explain_run(tmp_path, config(tmp_path)) in out


def test_a_timeline_that_somebody_changed_does_not_fail_the_run(tmp_path, caplog):
    with reporting(config(tmp_path)) as report:
        report._timeline.write(0)
        (tmp_path / "timeline" / "rank_0.jsonl").write_text('{"step": 0}\n')
    assert "the run's time is not explained" in caplog.text
    assert explain_run(tmp_path / "none", config(tmp_path)) == ""


def test_steps_without_a_span_are_not_explained(tmp_path):
    with reporting(config(tmp_path)) as report:
        report._timeline.write(0)
    assert explain_run(tmp_path, config(tmp_path)) == ""
