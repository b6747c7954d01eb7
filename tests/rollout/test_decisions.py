"""What time decided is written down and decided again: runs end bit-equal though answers come late,
and what cannot be made again is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl import imports
from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.journal import Journal
from spmdrl.rollout.book import Book, OwnBook
from spmdrl.rollout.decision_log import (
    check_schedule,
    facts,
    journal_of,
    read_lines,
    row_of,
    without_lost_moves,
)
from spmdrl.rollout.decisions import Decisions
from tests.helpers.built import changed, good, refused
from tests.helpers.runs import run
from tests.program.test_train import assert_same_end, final_weights
from tests.rollout.timed_runs import TimedRuns, back_to, decisions_of, rollouts_of

LATE_S = 0.3


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> TimedRuns:
    return TimedRuns(tmp_path_factory.mktemp("timed"))


def assert_same_run(one: Path, other: Path) -> None:
    assert_same_end(one, other)
    assert rollouts_of(one) == rollouts_of(other)
    assert decisions_of(one) == decisions_of(other)


def differ(one: Path, other: Path) -> bool:
    first, second = final_weights(one), final_weights(other)
    return any(not torch.equal(first[name], second[name]) for name in first if name != "newest")


def check_kind(kind: str, timed: TimedRuns, *, shows_time: bool = True, **more: str) -> None:
    """A run, a late one of its schedule, the same taken up again in the middle; and a late one by
    itself, which shows that time decides."""
    name = "_".join([*kind.split(), *more.values(), str(shows_time)])
    late_s = LATE_S if shows_time else LATE_S / 3  # some steps of the engine are enough
    once = timed.run(kind, f"{name}_once", late_s=0.0, **more)
    again = timed.run(kind, f"{name}_again", late_s=late_s, again=once.name, **more)
    assert_same_run(once, again)
    back_to(again, 2)
    timed.run(kind, again.name, late_s=late_s / 2, again=once.name, **more)
    assert_same_run(once, again)
    if shows_time:
        assert differ(once, timed.run(kind, f"{name}_free", late_s=LATE_S, **more))


@pytest.mark.proves("environments", "replay_schedule", "lag", "split", "record", "transformers")
def test_a_run_that_follows_a_schedule_is_the_same_though_answers_come_late(timed):
    check_kind("environment", timed, shows_time=False)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.kill)])
@pytest.mark.proves("in_flight", "lag", "split", "record", "transformers")
def test_a_run_that_keeps_caches_goes_on_from_a_checkpoint_as_it_went_on_before(kind, timed):
    more = {"rollout.schedule.kv-cache": "keep", "engine.kind": kind}
    out = timed.run("in flight", f"kept_{kind}", late_s=LATE_S, **more)
    weights = final_weights(out)
    rollouts = rollouts_of(out)
    decisions = decisions_of(out)
    assert sum("pause" in row for row in decisions)
    back_to(out, 2)
    timed.run("in flight", out.name, late_s=LATE_S / 2, **more)
    assert decisions_of(out) == decisions
    assert rollouts_of(out) == rollouts
    again = final_weights(out)
    assert again.pop("newest") == weights.pop("newest")
    assert all(torch.equal(value, again[name]) for name, value in weights.items())


@pytest.mark.kill
@pytest.mark.parametrize("kind", ["environment", "stolen", "in flight", "over-sampled", "dynamic"])
@pytest.mark.proves(
    "in_flight", "over_sample", "steal", "replay_schedule", "lag", "split", "record", "transformers"
)
@pytest.mark.proves("dynamic", "replay_schedule", "lag", "split", "record", "transformers")
def test_so_is_one_of_any_kind_where_time_decides(kind, timed):
    check_kind(kind, timed)


@pytest.mark.kill
@pytest.mark.parametrize("kind", ["stolen", "in flight", "in flight, engine of two ranks"])
@pytest.mark.proves("in_flight", "inference_tp", "replay_schedule", "lag", "split", "record")
def test_so_are_those_of_vllm(kind, timed):
    check_kind(kind, timed, **{"engine.kind": "vllm"})


# --------------------------------------------------------------------------- what is refused

FILE = "replica_0_of_1.jsonl"


def recorded(folder: Path, cfg: Config) -> Path:
    """Write the schedule of a run of one replica that decided nothing; return its file."""
    tokens = cfg.batch.tokens_per_microbatch
    lines = [["run", facts(cfg, tokens_per_microbatch=tokens)]]
    for version in range(cfg.steps):
        lasts = [version]
        if cfg.lag:
            lasts.append(min(version + cfg.lag, cfg.steps - 1))
        for last in lasts:
            lines += [["fill", version, last], ["end", 0]]
    write(folder, lines)
    return folder / "schedule" / FILE


def journal(folder: Path) -> Journal:
    return journal_of(folder / "schedule", replica=0, replicas=1)


def write(folder: Path, lines: list[list[Any]]) -> None:
    """Write a file of decisions, in place of one that is there."""
    (folder / "schedule").mkdir(exist_ok=True)
    (folder / "schedule" / FILE).unlink(missing_ok=True)
    file = journal(folder)
    for line in lines:
        file.append(row_of(line))


def config_of(folder: Path, **changes) -> Config:
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"12345678")
    cfg = good(
        steps=3,
        lag=1,
        model=dict(path=str(model)),
        rollout=dict(schedule=dict(in_flight=True), replay_schedule=str(folder)),
    )
    return changed(cfg, **changes)


def test_decisions_of_another_run_are_refused_by_what_differs(tmp_path):
    recorded(tmp_path, config_of(tmp_path))
    assert len(check_schedule(config_of(tmp_path))[0]) == 13
    same = dict(output_dir="x", rewards=dict(timeout_s=99.0), checkpoint=dict(every_steps=5))
    check_schedule(config_of(tmp_path, **same))
    cases = [
        (dict(optimizer=dict(lr=0.5)), "optimizer.lr: 1e-06 there, 0.5 now"),
        (dict(layout=dict(world_size=3)), "has replica_0_of_1.jsonl and not replica_0_of_2.jsonl"),
        (dict(layout=dict(dp_replicate=2)), "layout.dp_replicate: 1 there, 2 now"),
        (dict(steps=4), "steps: 3 there, 4 now"),
        (dict(deterministic=False), "deterministic: false"),
        (dict(engine=dict(seed_per_request=False)), "engine.seed_per_request: false"),
        (dict(rollout=dict(schedule=dict(kv_cache="keep"))), "rollout.schedule.kv_cache: keep"),
        (dict(rollout=dict(replay_schedule="nowhere")), "nowhere holds no decisions"),
    ]
    for changes, words in cases:
        with refused(words):
            check_schedule(config_of(tmp_path, **changes))
    with open(tmp_path / "model" / "model.safetensors", "ab") as file:
        file.write(b"9")
    with refused("model's files: '"):
        check_schedule(config_of(tmp_path))


def test_decisions_of_a_run_without_a_lag_have_one_fill_for_each_step(tmp_path):
    cfg = config_of(tmp_path, lag=0)
    recorded(tmp_path, cfg)
    assert len(check_schedule(cfg)[0]) == 7


def test_times_of_checkpoints_decide_on_numbers_if_caches_are_kept(tmp_path):
    for kept in ("keep", "recompute"):
        cfg = config_of(tmp_path, rollout=dict(schedule=dict(kv_cache=kept)))
        before = facts(cfg, tokens_per_microbatch=1)
        for other in (dict(every_steps=5), dict(keep=dict(best="x")), dict(keep=dict(mode="min"))):
            after = facts(changed(cfg, checkpoint=other), tokens_per_microbatch=1)
            assert (after != before) is (kept == "keep"), (kept, other)


def test_decisions_of_a_run_on_other_rows_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}')
    cfg = config_of(tmp_path, data=dict(train=str(rows)))
    recorded(tmp_path, cfg)
    check_schedule(cfg)
    rows.write_text('{"prompt": "b"}')
    with refused("content of data.train: '"):
        check_schedule(cfg)


def test_decisions_of_another_version_are_refused(tmp_path, monkeypatch):
    recorded(tmp_path, config_of(tmp_path))
    monkeypatch.setattr(imports, "__version__", "9.9")
    with refused("version of package spmdrl: '0.1.0' there, '9.9' now"):
        check_schedule(config_of(tmp_path))


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda lines: [*lines[:5], lines[5].replace("1", "2", 1), *lines[6:]], "line 6 does not"),
        (lambda lines: [*lines[:5], *lines[6:]], "line 6 does not follow"),
        (lambda lines: lines[:8], "breaks off at step 1 of 3"),
        (lambda lines: [*lines[:-1], lines[-1][:9]], "line 13 breaks off"),
        (lambda lines: [], "has no line that describes its run"),
    ],
)
def test_files_that_were_changed_or_cut_are_refused_at_the_first_place(edit, words, tmp_path):
    path = recorded(tmp_path, config_of(tmp_path))
    path.write_text("".join(edit(path.read_text().splitlines(keepends=True))))
    with refused(words):
        check_schedule(config_of(tmp_path))


def test_a_schedule_is_refused_where_time_decides_nothing_or_of_this_very_run(tmp_path):
    plain = config_of(tmp_path, rollout=dict(schedule=dict(in_flight=False)))
    assert any("time decides nothing" in problem for problem in validate(plain))
    own = config_of(tmp_path, output_dir=str(tmp_path))
    assert any("is this run's own output_dir" in problem for problem in validate(own))


def test_a_move_that_its_replica_did_not_write_down_is_made_by_nobody():
    own = [
        ["book", 0, 1, [0, 0, 0, 1, [], []]],
        ["book", 3, 3, None],
        ["answers", 4, ["a"], {}, {}],
    ]
    other = [["book", 0, 2, [1, 0, 0, 1, [], []]]]
    assert without_lost_moves([own, other]) == [own[:1], other]
    other.append(["book", 5, 3, [1, 0, 0, 0, [7], []]])
    assert without_lost_moves([own, other]) == [own, other]


def test_a_line_that_breaks_off_is_left_out_and_lines_are_appended_after_the_others(tmp_path):
    write(tmp_path, [["fill", 0, 0], ["end", 3]])
    path = tmp_path / "schedule" / FILE
    with open(path, "a") as file:
        file.write('{"fill": [1')
    lines, wrong = read_lines(journal(tmp_path))
    assert lines == [["fill", 0, 0], ["end", 3]] and wrong.endswith("line 3 breaks off")
    again = journal(tmp_path)
    again.keep(lambda row: True)
    again.append(row_of(["fill", 1, 1]))
    assert read_lines(journal(tmp_path)) == ([*lines, ["fill", 1, 1]], "")


def test_a_dry_run_and_a_run_refuse_alike(timed, tmp_path):
    once = tmp_path / "once"
    flags = timed.flags("over-sampled", "refused")
    timed.be_late(0.0)
    flags |= {"rollout.replay-schedule": once}
    for more in ({}, {"dry-run": "true"}):
        done = run("demo_grpo.yaml", 2, status=1, **flags | more)
        assert f"rollout.replay_schedule: {once} holds no decisions" in done.output
        assert "Traceback" not in done.output


def test_a_resumed_run_that_comes_to_other_numbers_is_not_kept_from_going_on(tmp_path, caplog):
    cfg = config_of(tmp_path, rollout=dict(replay_schedule=""), output_dir=str(tmp_path))
    recorded(tmp_path, cfg)
    tokens = cfg.batch.tokens_per_microbatch
    world: Any = SimpleNamespace(replica=0, num_replicas=1, tokens_per_microbatch=tokens)
    lines, _ = read_lines(journal(tmp_path))
    lines[2:2] = [["groups", 0, {"train-0": "another"}]]
    book_rules: Any = None  # no moves are made
    begin: Any = dict(version=0, book=OwnBook(Book(), book_rules), last=0)

    write(tmp_path, lines)
    other = Decisions()
    other.start(cfg, world, version=0)
    other.begin("fill", **begin)
    other.record_groups(0, [])
    assert "group train-0 of step 0 has the digest another in that run and None here" in caplog.text
    other.end()  # goes on

    astray = Decisions()
    astray.start(cfg, world, version=0)
    with pytest.raises(RuntimeError, match="start again: the next start makes new decisions"):
        astray.begin("fill", **begin | dict(last=1))
    once_more = Decisions()
    once_more.start(cfg, world, version=0)
    once_more.begin("fill", **begin | dict(last=1))
    once_more.end()
    kept = [["fill", 0, 1], ["end", 0]]
    assert read_lines(journal(tmp_path))[0][1:] == kept
