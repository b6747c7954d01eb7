"""Reports: metrics, glossary, files, log folders."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config import load_yaml
from spmdrl.journal import Journal, read_rows
from spmdrl.report import glossary
from spmdrl.report.curves import series
from spmdrl.report.glossary import GLOSSARY, values_of, with_aliases
from spmdrl.report.report import Report
from spmdrl.same_run.made_of import made_of
from spmdrl.tools.commands.curves import main as curves
from spmdrl.types import add_sums
from tests.helpers.built import changed
from tests.helpers.ranks import run_ranks
from tests.helpers.report_world import SmallWorld, config, record_steps, reporting

# --------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    "ranks, values",
    [
        ([{"reward/mean": (3.0, 4)}, {"reward/mean": (1.0, 4)}], {"reward/mean": 0.5}),
        ([{"reward/mean": (0.0, 0), "policy/entropy": (2.0, 1)}], {"policy/entropy": 2.0}),
        ([{"reward/timeouts": (2, 1)}, {"reward/timeouts": (3, 1)}], {"reward/timeouts": 5.0}),
        ([{"reward/timeouts": (0, 1)}], {"reward/timeouts": 0.0}),
    ],
)
def test_a_metric_is_its_numerator_over_its_denominator_and_a_total_adds_up(ranks, values):
    assert values_of(add_sums(*ranks)) == values


@pytest.mark.parametrize("value", [3.0, (1.0, 2.0, 3.0), "ab", ("a", 1), None])
@pytest.mark.parametrize("take", [add_sums, values_of])
def test_a_metric_that_is_no_pair_is_named(take, value):
    with pytest.raises(TypeError, match=r"metric 'my/x': expected a pair .*'my/x': \(value, 1.0\)"):
        take({"my/x": value})


def test_a_step_names_the_metric_that_is_no_pair(tmp_path):
    with reporting(config(tmp_path)) as report:
        with pytest.raises(TypeError, match="metric 'my/x': expected a pair"):
            report.record(0, {"my/x": 3.0}, seconds={})


def test_an_unknown_metric_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match="policy/entropi.*did you mean policy/entropy"):
        values_of({"policy/entropi": (1, 1)})


@pytest.mark.parametrize(
    "name",
    [
        "time/update",
        "reward/accuracy/mean",
        "loss/my_statistic",
        "reward/package.file:score/mean",
        "my/own",
    ],
)
def test_names_with_a_free_part_are_known(name):
    glossary.lookup(name)


@pytest.mark.parametrize("name", ["time/", "reward/accuracy", "loss", "reward//mean"])
def test_a_free_part_must_be_there(name):
    with pytest.raises(ValueError):
        glossary.lookup(name)


def test_every_entry_of_the_glossary_is_filled_and_prefixed():
    objectives = {"policy", "value", "prm", "preference", "reward_model", "loss", "<model>"}
    generation = {
        "rollout",
        "reward",
        "source",
        "environment",
        "agent",
        "judge",
        "serve",
        "data",
        "eval",
        "sync",
        "mine",
        "my",
    }
    prefixes = objectives | generation | {"proof", "time", "perf", "mem"}
    for name, metric in GLOSSARY.items():
        assert name.split("/")[0] in prefixes, name
        assert all(metric), name


def test_every_alias_belongs_to_a_metric_and_is_used_once():
    for system, names in glossary.ALIASES.items():
        for name in names:
            glossary.lookup(name)
        assert len(set(names.values())) == len(names), system


def test_aliases_come_besides_our_names():
    values = with_aliases({"reward/mean": 0.5, "sync/bytes": 1.0}, "verl")
    assert values == {"reward/mean": 0.5, "sync/bytes": 1.0, "critic/score/mean": 0.5}


def test_a_row_of_the_page_is_a_metric_with_its_names_elsewhere():
    text = glossary.PAGE.read_text()
    assert len(GLOSSARY) == text.count("\n| `") > 150
    for name, found in GLOSSARY.items():
        cells = [cell.replace("|", r"\|") for cell in found]
        assert f"| `{name}` | {' | '.join(cells)} |" in text
    assert GLOSSARY["reward/timeouts"].estimator == "total"
    assert glossary.ALIASES["trl"]["reward/std"] == "reward_std"
    assert "reward/std" not in glossary.ALIASES["verl"]


# --------------------------------------------------------------------------- time


def test_evaluations_and_checkpoints_do_not_count_against_a_step(tmp_path):
    with reporting(config(tmp_path)) as report:
        values = report.record(
            0,
            {"perf/step_s": (3.0, 1), "perf/generated_tokens": (500, 1)},
            seconds={"update": 0.9, "gather evaluation": 1.5, "checkpoint": 0.5},
        )
    assert values["perf/tokens_per_s"] == pytest.approx(500)
    assert values["perf/other_frac"] == pytest.approx(0.1)


def test_time_outside_the_work_counts_overlapped_generation_once(tmp_path):
    sums = {"perf/step_s": (1.0, 1), "time/generate": (0.6, 1)}
    seconds = {"update": 0.5, "push": 0.2, "exchange": 0.1}
    for lag, other in ((1, 0.2), (0, 0.0)):
        cfg = dataclasses.replace(config(tmp_path / str(lag)), lag=lag)
        with reporting(cfg) as report:
            values = report.record(0, sums, seconds=seconds)
        assert values["perf/other_frac"] == pytest.approx(other)
        assert values["time/generate"] == 0.6 and values["time/exchange"] == 0.1


# --------------------------------------------------------------------------- files


def test_metrics_are_written_at_every_step_with_aliases(tmp_path):
    with reporting(config(tmp_path, aliases="trl")) as report:
        record_steps(report, 0, 3)
        rows = read_rows(tmp_path / "metrics.jsonl")  # before close: nothing waits in a buffer
        report.evaluation(3, {"eval/reward": (40, 100)})
        report.evaluation(4, {})
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["reward/mean"] == rows[0]["reward"] == 0.5
    assert rows[0]["time/await_peers"] == 0.001 and rows[0]["mem/rss_gib"] > 0
    assert read_rows(tmp_path / "metrics.jsonl")[3]["eval/reward"] == 0.4
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 4


def test_a_resumed_run_takes_out_the_rows_it_writes_again(tmp_path, capsys):
    with reporting(config(tmp_path), ending="stopped") as report:
        record_steps(report, 0, 4)
        report.evaluation(4, {"eval/reward": (1, 4)})
        record_steps(report, 4, 6)
        report.evaluation(6, {"eval/reward": (2, 4)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')  # killed while writing
    with reporting(config(tmp_path), step=4) as report:
        record_steps(report, 4, 5, reward=0.75)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 4]
    assert rows[4]["eval/reward"] == 0.25 and rows[5]["reward/mean"] == 0.75
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    removed = tmp_path / "logs" / "attempt_2" / "removed_metrics.jsonl"
    assert len(removed.read_text().splitlines()) == 4
    assert "resumed at step 4 of 10" in capsys.readouterr().out


def test_a_start_from_nothing_over_earlier_metrics_says_so(tmp_path, capsys):
    with reporting(config(tmp_path), ending="stopped") as report:
        record_steps(report, 0, 2)
    assert "no checkpoint" not in capsys.readouterr().out
    with reporting(config(tmp_path), ending="stopped"):
        pass
    assert "10 steps, no checkpoint, starting at step 0" in capsys.readouterr().out


def test_numbers_that_are_not_finite_leave_valid_json(tmp_path):
    with reporting(config(tmp_path)) as report:
        report.record(0, {"policy/loss": (float("nan"), 1)}, seconds={})
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert row["policy/loss"] is None


def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path, caplog):
    file = Journal(tmp_path / "full" / "metrics.jsonl")  # no folder: every write fails
    file.append({"step": 0})
    file.append({"step": 1})
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "stay in memory" in caplog.text
    (tmp_path / "full").mkdir()
    file.append({"step": 2})
    assert [row["step"] for row in read_rows(file.path)] == [0, 1, 2]


def test_the_run_keeps_its_config_and_environment(tmp_path):
    cfg = config(tmp_path)
    with reporting(cfg, ending="finished"):
        pass
    assert load_yaml(str(tmp_path / "config.yaml")) == cfg
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["command"] == sys.argv
    assert (tmp_path / "logs" / "attempt_1" / "config.yaml").exists()


def test_the_started_program_and_what_it_uses_are_recorded_whatever_their_names(
    tmp_path, monkeypatch
):
    work, out = tmp_path / "work", tmp_path / "out"
    (work / "mine").mkdir(parents=True)
    for name, source in {
        "known.py": "",
        "mine/my_train.py": "import torch, helpers\nfrom parts import shown",
        "mine/helpers.py": "import deeper, my_train",
        "mine/deeper.py": "",
        "mine/parts/__init__.py": "",
        "mine/idle.py": "",
        "rewards.py": "def grade(): ...",
    }.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(source)
    git = ["git", "-C", str(work), "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "known.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (work / "known.py").write_text("1")
    monkeypatch.setattr(sys, "argv", [str(work / "mine/my_train.py"), "--lag", "0"])
    rewards = dict(functions=(f"{work}/rewards.py:grade", "task:addition"))
    cfg = changed(config(out), rewards=rewards)
    with reporting(cfg):
        pass
    environment = json.loads((out / "environment.json").read_text())
    code = environment["code"]
    helpers = ("deeper.py", "helpers.py", "parts/__init__.py")
    programs = ["program", *(f"program: {name}" for name in helpers)]
    assert [*code] == ["rewards.functions: rewards.py", *programs]
    assert environment["program"] == str(work / "mine/my_train.py")
    names = environment["program_git"]["changed_files"]
    assert names[:3] == ["known.py", "mine/", "rewards.py"]
    assert {"mine/my_train.py", "mine/helpers.py"} < {*names} and "mine/idle.py" not in names
    kept = out / "logs" / "attempt_1" / "program.py"
    assert kept.read_text() == (work / "mine/my_train.py").read_text()

    def certified() -> dict[str, str]:
        return made_of(cfg, SimpleNamespace(device=torch.device("cpu")))["code"]

    first = certified()
    assert code.items() <= first.items() and "spmdrl/types.py" in first
    (work / "mine/my_train.py").write_text("import helpers")
    changed_names = {name for name, own in certified().items() if own != first.get(name)}
    assert changed_names == {"program"}


def test_records_warnings_and_stderr_reach_the_log_file(tmp_path, capsys):
    before = sys.stderr
    with reporting(config(tmp_path)):
        logging.getLogger("spmdrl.anything").info("a plain record")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("a python warning", stacklevel=1)
        print("Traceback: something broke", file=sys.stderr)
    text = (tmp_path / "logs" / "attempt_1" / "rank_0.log").read_text()
    for part in ("a plain record", "a python warning", "Traceback: something broke"):
        assert part in text
    assert sys.stderr is before
    shown = capsys.readouterr()
    assert "a plain record" in shown.out and "something broke" in shown.err


def test_a_finished_run_has_a_picture_of_its_curves(tmp_path, capsys):
    with reporting(config(tmp_path / "a")) as report:
        record_steps(report, 0, 5)
        report.evaluation(5, {"eval/reward": (1, 2)})
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "both.svg"
    assert curves([str(tmp_path / "a"), str(tmp_path / "a"), "--out", str(out)]) == 0
    assert "<svg" in out.read_text()
    assert curves([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
    assert curves([]) == 2 and "at least one run" in capsys.readouterr().err


def test_curves_draw_ones_own_metrics_and_those_that_are_named(tmp_path, capsys):
    values = {"reward/mean": 0.5, "my/longest": 3.0, "eval/loss": 1.0}
    rows = [{"step": step} | values for step in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "curves.svg"

    def drawn(*metrics: str) -> list[str]:
        chosen = ["--metrics", *metrics] if metrics else []
        assert curves([str(tmp_path), *chosen, "--out", str(out)]) == 0
        titles = ("reward", "loss", "my/longest", "reward/mean", "eval/loss")
        return [title for title in titles if f"<!-- {title} -->" in out.read_text()]

    assert drawn() == ["reward", "loss", "my/longest"]
    assert drawn("my/longest", "eval/loss") == ["my/longest", "eval/loss"]
    assert drawn("reward/mean") == ["reward/mean"]
    capsys.readouterr()
    assert curves([str(tmp_path), "--metrics", "my/longer"]) == 2
    assert "--metrics my/longer: no run has it; did you mean my/longest?" in capsys.readouterr().err


def test_of_several_rows_of_a_step_curves_show_the_last():
    rows = [{"step": 0, "x": 1.0}, {"step": 1, "x": 2.0}, {"step": 1, "x": 3.0}, {"step": 2}]
    assert series(rows, "x") == ([0, 1], [1.0, 3.0])


def test_curves_leave_out_what_is_no_row_and_say_where_no_picture_can_be(tmp_path, capsys):
    rows = b'{"step": 0, "policy/loss": 1.0}\n{"step": 1, "policy/loss": null}\n{"step": "2"}\n'
    (tmp_path / "metrics.jsonl").write_bytes(rows + b"[1]\n{}\n\xff\n" + b'{"st')
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1]
    for out in (tmp_path / "a.doc", tmp_path / "none" / "a.png"):
        assert curves([str(tmp_path), "--out", str(out)]) == 2
        assert f"--out {out}: no chart can be written there" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert curves([str(tmp_path)]) == 2
    assert "metrics.jsonl is a folder" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").rmdir()
    assert curves([str(tmp_path)]) == 2
    assert "name the output_dir of a run" in capsys.readouterr().err


# --------------------------------------------------------------------------- ranks


def _two_ranks(folder: str) -> list[str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    cfg = config(Path(folder))
    found = []
    for _ in range(2):
        world = SmallWorld(cfg, dist.group.WORLD, rank=dist.get_rank(), world_size=2)
        report = Report(cfg, world)
        report.start({}, step=0)
        logging.getLogger("spmdrl.test").info("hello from %d", world.rank)
        assert bool(report.record(0, {"reward/mean": (1, 1)}, seconds={})) == (world.rank == 0)
        report.close("finished")
        found.append(report.attempt_folder.name)
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_every_rank_has_a_log_in_the_folder_of_its_attempt(tmp_path):
    (tmp_path / "logs" / "attempt_6").mkdir(parents=True)
    assert run_ranks(2, _two_ranks, str(tmp_path)) == [["attempt_7", "attempt_8"]] * 2
    for attempt in (7, 8):
        for rank in (0, 1):
            path = tmp_path / "logs" / f"attempt_{attempt}" / f"rank_{rank}.log"
            assert f"hello from {rank}" in path.read_text()
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
