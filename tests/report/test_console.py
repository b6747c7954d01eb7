"""The console: table, progress line, samples, start."""

from __future__ import annotations

import io
import re

import pytest

from spmdrl.config import ConsoleSettings
from spmdrl.journal import read_rows
from spmdrl.report import console
from tests.helpers.built import changed
from tests.helpers.report_world import config, record_steps, reporting


def test_time_left_is_steps_left_times_the_mean_of_recent_steps():
    assert console.time_left([], 10) is None
    assert console.time_left([30.0], 10) == 300.0
    assert console.time_left([30.0, 1.0, 3.0], 10) == pytest.approx(20.0)  # first: warm-up
    assert console.time_left([9.0] * 50 + [2.0] * 20, 5) == pytest.approx(10.0)
    assert console.time_left([1.0, 1.0], 0) == 0.0


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (750, "12:30"),
        (3599.7, "1h00m"),
        (11100, "3h05m"),
        (187200, "2d04h"),
        (None, "-"),
    ],
)
def test_durations_are_short(seconds, text):
    assert console.duration(seconds) == text


@pytest.mark.parametrize(
    "value",
    [0, 0.5, -0.5, 12.25, 999.94, 1e5, 123456789.0, 3e-4, -3e-14, float("nan"), float("inf"), None],
)
def test_numbers_fit_their_column(value):
    assert len(console.number(value, width=7)) == 7


def test_a_sparkline_shows_the_whole_history_in_its_width():
    blocks = "01234567"
    assert console.sparkline([], width=4, blocks=blocks) == ""
    assert console.sparkline([5.0] * 3, width=4, blocks=blocks) == "000"
    rising = console.sparkline([float(i) for i in range(1000)], width=8, blocks=blocks)
    assert rising == "01234567"


def test_the_table_is_readable_at_80_columns(tmp_path, capsys):
    with reporting(config(tmp_path, steps=200)) as report:
        record_steps(report, 0, 200)
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.strip().startswith("done "))
    rows = [line for line in lines if line.strip()[:3].strip().isdigit()]
    for title in ("reward", "length", "KL", "entropy", "gen s", "upd s", "push s", "tok/s", "left"):
        assert title in header
    assert "clip" not in header  # one update per step: nothing moves that could be clipped
    assert "done: steps done; each row: means over the 5 steps since the row before" in lines
    assert len(rows) == 41  # the first step, then every 5
    assert {len(line) for line in [header, *rows]} == {len(header)}
    assert len(header) <= console.WIDTH == 80
    assert "0.500" in rows[-1] and "0.310" in rows[-1] and "4.297" in rows[-1]
    assert any("step 1/200" in line and "left" in line for line in lines)


def test_a_row_is_the_mean_over_the_steps_since_the_row_before(tmp_path, capsys):
    with reporting(config(tmp_path, steps=10, console=ConsoleSettings(table_every=4))) as report:
        for step, reward in enumerate([9.0, 0.0, 1.0, 2.0]):
            report.record(step, {"reward/mean": (reward * (step + 1), step + 1)}, seconds={})
    last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("     4 ")]
    assert f"{(0 * 2 + 1 * 3 + 2 * 4) / 9:.3f}" in last[0]


def test_supervised_runs_have_a_table_of_their_own(tmp_path, capsys):
    cfg = changed(config(tmp_path, steps=5), algorithm=dict(objective="sft"))
    with reporting(cfg) as report:
        values = report.record(
            0, {"policy/loss": (2.5, 1), "perf/trained_tokens": (1000, 1)}, seconds={"update": 0.1}
        )
    out = capsys.readouterr().out
    assert "loss" in out and "2.500" in out and "clip" not in out and "eval" not in out
    assert "entropy" not in out  # no value, no column
    assert values["perf/tokens_per_s"] == pytest.approx(1000 / values["perf/step_s"])


def test_a_column_comes_with_its_first_value():
    columns = console.table_columns(True, spark=str)
    titles = [c.title for c in console.drop_empty(columns, {"step", "policy/clip_frac"})]
    assert titles == ["done", "left", "trend", "clip"]


def test_a_wide_terminal_has_all_columns_and_a_narrow_one_the_first(monkeypatch):
    columns = console.table_columns(True, spark=str)
    values = {c.metric: 0.5 for c in columns if c.metric} | {"step": 3}

    def titles(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        stream = Terminal("utf-8")
        console.Console(stream=stream).table_row(columns, values)
        lines = stream.getvalue().splitlines()
        assert {len(line) for line in lines[1:]} == {len(lines[1])}
        assert len(lines[1]) <= max(80, width)
        return [c.title for c in columns if c.title in lines[1]]

    assert titles(200) == [c.title for c in columns]
    assert titles(40) == titles(80) == [c.title for c in columns[:11]]


class Terminal(io.StringIO):
    """A stream that says it is a terminal, of some encoding."""

    def __init__(self, encoding: str):
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return True


def test_a_terminal_keeps_one_progress_line_below_the_text():
    stream = Terminal("utf-8")
    shown = console.Console(stream=stream)
    shown.progress("first")
    shown.progress("second")
    shown.line("a message")
    shown.progress("")
    assert stream.getvalue() == ("first\r\x1b[Ksecond\r\x1b[Ka message\nsecond\r\x1b[K")


def test_a_plain_stream_gets_no_carriage_return():
    stream = io.StringIO()
    shown = console.Console(stream=stream)
    shown.progress("never seen")
    shown.line("seen")
    assert stream.getvalue() == "seen\n"


def test_a_terminal_without_unicode_is_served_in_ascii():
    stream = Terminal("ascii")
    shown = console.Console(stream=stream)
    shown.line("caf\u00e9")
    assert stream.getvalue() == "caf\\xe9\n"
    assert shown.blocks().isascii()


def test_samples_are_printed_on_demand_and_cannot_steer_the_terminal(tmp_path, capsys):
    with reporting(config(tmp_path, console=ConsoleSettings(samples_every=2))) as report:
        for step in range(3):
            report.record(
                step,
                {},
                seconds={},
                samples=(
                    {"prompt": f"2+{step}=", "response": "\x1b[2J\rx\ny", "reward": 0.25}
                    | {"reward_parts": {"right": 0.5, "short": -1.0}},
                ),
            )
    out = capsys.readouterr().out
    assert "2+0=" in out and "2+2=" in out and "2+1=" not in out
    assert "\\x1b[2J\\rx" in out and "\x1b" not in out and "0.250" in out
    assert "| reward_parts right 0.500, short -1.000" in out
    rows = read_rows(tmp_path / "samples.jsonl", holds_texts=True)
    assert [row["step"] for row in rows] == [0, 2]


def test_an_evaluation_is_said_in_lines_of_80_columns(tmp_path, capsys):
    names = ("reward", "reward_ci95", "response_length", "truncated_frac", "failed_frac")
    with reporting(config(tmp_path)) as report:
        capsys.readouterr()
        report.evaluation(125, {f"eval/{name}": (0.5, 1) for name in names})
        lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and lines[1].startswith("  ") and max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert all(f"{name} 0.500" in said for name in names)


def test_the_derived_arithmetic_is_printed_at_start(tmp_path, capsys):
    with reporting(config(tmp_path)):
        pass
    out = capsys.readouterr().out
    assert re.search(r"  sequences per step +64 prompts \* 8 = 512\n", out)
    assert "start-up: build engine 12.3 s\n" in out


def test_the_probe_of_engine_against_trainer_is_printed_and_recorded(tmp_path, capsys):
    cfg = config(tmp_path)
    sums = {
        "sync/bytes": (4_000_000, 1),
        "sync/gb_per_s": (1.5, 1),
        "sync/probe_gap": (0.016, 10),
        "sync/probe_gap_max": (1.2e-6, 1),
        "sync/probe_limit": (0.12345, 1),
        "proof/plain_gap": (3e-7, 1),
    }
    with reporting(cfg, sums=sums):
        pass
    out = capsys.readouterr().out
    assert "first push of the weights: 4,000,000 bytes, 1.500 GB/s" in out
    assert "probe_gap 0.0016, probe_gap_max 1.2e-06 (mean allowed: 0.123)" in " ".join(out.split())
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["sync/probe_gap"] == pytest.approx(0.0016) and row["proof/plain_gap"] == 3e-7


def test_what_was_proved_of_the_rows_is_recorded_without_an_engine_too(tmp_path):
    with reporting(config(tmp_path), sums={"proof/leak": (0.0, 1), "proof/packed_gap": (2e-7, 1)}):
        pass
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 0 and row["proof/leak"] == 0.0 and row["proof/packed_gap"] == 2e-7


def test_the_last_line_says_what_was_lost_in_all_attempts(tmp_path, capsys):
    for attempt in range(2):
        with reporting(config(tmp_path, steps=4), step=2 * attempt) as report:
            for step in (2 * attempt, 2 * attempt + 1):
                lost = {"rollout/failed_rewards": (3, 1), "policy/skipped_updates": (step == 3, 1)}
                report.record(step, {"reward/mean": (step, 4), **lost}, seconds={})
    said = capsys.readouterr().out.replace("\n  ", " ").splitlines()
    lines = [line for line in said if line.startswith("finished")]
    assert lines[0].endswith("in the last; 6 rewards failed")
    assert "reward/mean 0.000 in the first step, 0.750 in the last" in lines[1]
    assert lines[1].endswith("; 12 rewards failed; 1 updates were skipped: not finite")
