"""Folders of runs that somebody made to break their readers: each is a refusal with status 2."""

from __future__ import annotations

import copy
import json
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from spmdrl import run_files
from spmdrl.certificate.fingerprint_collector import SECTIONS
from spmdrl.certificate.line_form import FORMAT
from spmdrl.certificate.lines import NAME, RunCertificate, journal_of, read
from spmdrl.checkpoint import manifest
from spmdrl.checkpoint.manifest import read_manifest, write_manifest
from spmdrl.config import Config, dump, flatten
from spmdrl.errors import Refusal
from spmdrl.rollout import decision_log
from spmdrl.rollout.packing import pack_step
from spmdrl.rollout.recorder import HEADER, Recorder, digest_line
from spmdrl.rollout.recordings import find_recorded, read_header, read_rollouts
from spmdrl.tools.certificates.replay import plan_ways
from spmdrl.tools.certificates.report import compare_runs
from spmdrl.tools.commands import view
from spmdrl.tools.recorded_run import RecordedRun
from tests.helpers.built import refused
from tests.helpers.pages import part_of
from tests.rollout.test_record import config_of, group_of, record, record_groups

ODD: tuple[Any, ...] = (None, True, -1, 2**62, 1.5, "", "x" * 50, [], [[]], {}, {"a": 1}, [1, "x"])


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value in a tree of JSON."""
    if at:
        yield at
    if not isinstance(value, (dict, list)):
        return
    for key, own in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _places(own, (*at, key))


def _changed(value: Any, at: tuple[Any, ...], now: Any) -> Any:
    """Return a copy of a tree with another value at a place, or without it for `_changed`."""
    found = copy.deepcopy(value)
    inner = found
    for key in at[:-1]:
        inner = inner[key]
    if now is _changed:
        del inner[at[-1]]
    else:
        inner[at[-1]] = now
    return found


def _mutants(value: Any, *, count: int, seed: int) -> Iterator[Any]:
    draw = random.Random(seed)
    places = list(_places(value))
    for _ in range(count):
        yield _changed(value, draw.choice(places), draw.choice((*ODD, _changed)))


def _reads(work: Any) -> bool:
    """Return whether something is read; a refusal is right too, any other error is not."""
    try:
        work()
    except Refusal:
        return False
    return True


def _step_line() -> dict[str, Any]:
    row = ["00ff", 1.0, 0.5, -0.5, 0.25, None]
    line: dict[str, Any] = {section: {"a": "00ff", "b": row} for section in SECTIONS}
    line["plan"]["tokens_per_microbatch"] = 64
    line["losses"] = {"policy/loss": 0.5}
    line["norms"] = {"policy/grad_norm": "nan"}
    line["rollouts"] |= {"tokens": row, "rewards": row}
    packed = "AAAAAAAAAAAAAAAAAAAAAA=="
    line["sequences"] = {"tokens": packed, "rewards": packed, "group_size": 2}
    return line


@pytest.mark.timeout(120)
def test_chained_certificates_of_odd_values_are_refused_or_compared(tmp_path):
    made = {
        "config": json.loads(json.dumps(flatten(Config(steps=2)))) | {"report.certificate": 1},
        "packages": {"torch": "2"},
        "code": {"train.py": "00"},
        "data": {"data.train": "00"},
        "machine": {"threads": 1},
    }
    lines = [{"step": 0, "made_of": made}, *({"step": s, **_step_line()} for s in range(2))]

    def write(run: Path, contents: list[Any]) -> Path:
        run.mkdir(exist_ok=True)
        (run / NAME).unlink(missing_ok=True)
        journal = journal_of(run)
        for own in contents:
            journal.append({"format": FORMAT, **own})
        return run

    good, odd = write(tmp_path / "good", lines), tmp_path / "odd"
    assert _reads(lambda: compare_runs(read(good), read(good)).text())
    num_refused = 0
    for content in _mutants(lines, count=600, seed=0):
        if not all(isinstance(line, dict) for line in content):
            continue
        run = write(odd, content)
        num_refused += not _reads(lambda: compare_runs(read(good), read(run)).text())
    assert num_refused > 200


def test_resealed_manifests_of_odd_values_are_refused_or_read(tmp_path):
    folder = tmp_path / "step_3"
    folder.mkdir()
    content = manifest.Manifest(
        step=3,
        config=json.loads(json.dumps(flatten(Config()))) | {"seed": 1},
        model="m",
        tokenizer="t",
        rollout_ranks=(0, 1),
        files={"policy/a": manifest.FileEntry(1, "00")},
        evaluated={"eval/reward": 0.5},
    )
    write_manifest(folder, content)
    body = json.loads((folder / manifest.NAME).read_text())
    del body["sha256"]
    config = body.pop("config")
    for own in _mutants(body, count=400, seed=1):
        text = {"config": config} | own
        sealed_body = {"sha256": manifest._digest(text), **text}
        (folder / manifest.NAME).write_text(json.dumps(sealed_body))
        if _reads(lambda: read_manifest(folder)):
            manifest.damages(folder, read_manifest(folder))


def _rewritten(path: Path, table: pa.Table, header: Any, **options: Any) -> None:
    table = table.replace_schema_metadata({HEADER: json.dumps(header)})
    parquet.write_table(table, path, **options)
    path.with_suffix(".sha256").write_text(digest_line(path, path.name))


def _view(folder: Path, *flags: str) -> int:
    return view.main([str(folder), "--step", "0", *flags])


@pytest.mark.timeout(300)
def test_resealed_recordings_of_odd_values_are_refused_or_shown(tmp_path, capsys):
    record(config_of(tmp_path), 0, range(2), has_greedy=True)
    recorded = find_recorded(tmp_path)
    (path,) = recorded.files_of(0)
    table, header = parquet.read_table(path), read_header(path)
    page = ("--html", str(tmp_path / "page.html"))

    def look() -> None:
        statuses = {_view(tmp_path), _view(tmp_path, "--group", "0"), _view(tmp_path, *page)}
        assert statuses <= {0, 2}
        _reads(lambda: read_rollouts([path], part=0, num_parts=1))

    for own in _mutants(header, count=80, seed=2):
        _rewritten(path, table, own)
        look()
    draw = random.Random(3)
    rows = table.to_pylist()
    for _ in range(80):
        name = draw.choice(table.column_names)
        field = table.schema.field(name)
        odd = copy.deepcopy(rows)
        draw.choice(odd)[name] = draw.choice((None, 0, -1, 2**31 - 1, 1e308, "x\x1b[2J", [], [7]))
        try:
            column = pa.array([row[name] for row in odd], type=field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            column = pa.array(["<img src=x onerror=alert(1)>"] * len(rows))
        at = table.column_names.index(name)
        _rewritten(path, table.set_column(at, name, column), header)
        look()
    data = path.read_bytes()
    for _ in range(60):
        path.with_suffix(".sha256").unlink(missing_ok=True)
        damaged = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged) - 600, len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        look()
    capsys.readouterr()


def test_texts_of_a_recording_run_nothing_in_a_page_or_a_terminal(tmp_path, capsys):
    group = group_of(0)
    evil = "<img src=x onerror=alert(1)>\x1b[2J\x9b"
    for episode in group.samples.values():
        episode.__dict__["text"] = evil
        episode.prompt.__dict__["text"] = evil
    record_groups(config_of(tmp_path), 0, [group])
    page = tmp_path / "page.html"
    assert _view(tmp_path, "--group", "0") == 0
    assert _view(tmp_path, "--group", "0", "--html", str(page)) == 0
    assert "<img" not in page.read_text()
    assert part_of(page, "rollouts-0-0")["groups"][0]["prompt"] == [evil]
    shown = capsys.readouterr().out
    assert "\\x1b[2J" in shown and not {"\x1b", "\x9b"} & set(shown)
    # Tokens that are texts, which no tokenizer stands between: another type than a run records.
    (path,) = find_recorded(tmp_path).files_of(0)
    table, header = parquet.read_table(path), read_header(path)
    tokens = pa.array([["<img src=x onerror=alert(1)>"] * 5] * len(table))
    at = table.column_names.index("tokens")
    _rewritten(path, table.set_column(at, "tokens", tokens), header)
    assert _view(tmp_path, "--group", "0", "--html", str(page)) == 2
    assert "column tokens is of type list<" in capsys.readouterr().err


_BOMB = """
import re, sys
from spmdrl.tools.commands.view import main
status = main(sys.argv[1:])
# Not ru_maxrss: a process that was just started inherits its parent's.
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)
print(status, int(peak) // 1024)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("column", ["prompt", "tokens"])
def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before_that(column, tmp_path):
    record(config_of(tmp_path), 0, range(1))
    (path,) = find_recorded(tmp_path).files_of(0)
    table, header = parquet.read_table(path).slice(0, 1), read_header(path)
    field = table.schema.field(column)
    if column == "prompt":  # one text in a dictionary, of which there are four thousand
        value, count = "a" * 2**20, 4000
    else:
        value, count = [table[column].to_pylist()[0][0] or 0] * 4 * 10**6, 40
    own = pa.array([value], type=field.type)
    at = table.column_names.index(column)
    table = table.set_column(at, field, own)
    table = table.replace_schema_metadata({HEADER: json.dumps(header)})
    with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
        if column == "prompt":
            writer.write_table(table.take(pa.array([0] * 1000)))
        else:
            for _ in range(count):
                writer.write_table(table)
    path.with_suffix(".sha256").write_text(digest_line(path, path.name))
    assert path.stat().st_size < 3 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", _BOMB, tmp_path, "--step", "0", "--group", "0"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    status, peak_mib = map(int, done.stdout.split())
    assert status == 2 and "MiB; to look at it" in done.stderr, done.stderr[-2000:]
    assert peak_mib < 1500


def test_equal_steps_leave_equal_bytes_whatever_time_they_took(tmp_path):
    found = []
    for name, seconds in (("a", 1.5), ("b", 2.5)):
        cfg = config_of(tmp_path / name)
        groups = [group_of(slot) for slot in range(2)]
        measured = {"time/engine_idle": (seconds, 1)}
        how = dict(seconds=seconds, measured=measured, dropped=[], num_carried=0)
        share = pack_step(groups, cfg, is_first=True, **how)
        Recorder(cfg, replica=0, num_replicas=1).record(0, groups, share)
        (path,) = find_recorded(tmp_path / name).files_of(0)
        found.append(path.read_bytes())
    assert found[0] == found[1]


def test_a_far_step_of_a_name_takes_no_memory(tmp_path):
    record(config_of(tmp_path), 0, range(1))
    folder = tmp_path / "rollouts"
    (folder / f"step_{10**15}_replica_0_of_{10**15}.parquet").touch()
    assert list(find_recorded(tmp_path).steps) == [0]


def test_decisions_that_are_chained_again_are_refused_or_read(tmp_path):
    lines: list[Any] = [
        {"run": [{"packages": {"torch": "2"}, "config": {"seed": 0}}]},
        {"fill": [0, 1]},
        {"answers": [3, [1, "k"], {"k": ["error", "no"]}]},
        {"book": [4, 1, [0, 0, 1, 2, [1], []]]},
        {"end": [5]},
        {"groups": [0, {"0": "00"}]},
    ]
    for content in [lines, *_mutants(lines, count=300, seed=4)]:
        journal = decision_log.journal_of(tmp_path, replica=0, replicas=1)
        journal.path.unlink(missing_ok=True)
        rows = [row for row in content if isinstance(row, dict) and row]
        for row in rows:
            journal.append(row)
        if not rows:
            continue
        found, wrong = decision_log.read_lines(journal)
        assert wrong or len(found) == len(rows)
        decision_log.past_decisions([found], replica=0, version=0)
        decision_log.without_lost_moves([found])


def test_configs_of_random_bytes_are_refused(tmp_path):
    path, draw = tmp_path / "config.yaml", random.Random(5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    from spmdrl.config import load_yaml

    data = dump(Config()).encode()
    for _ in range(30):
        damaged = bytearray(data[: draw.randrange(200, len(data))])
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        _reads(lambda: load_yaml(path))
    with refused("must hold an object"):
        run_files.json_object("3", place="it")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_a_far_certified_step_is_named_without_a_count_to_it(tmp_path):
    record(config_of(tmp_path), 0, range(1))
    record(config_of(tmp_path), 2, range(1))
    far = 10**15
    certified = RunCertificate(tmp_path, {far: {}}, {0: {}})
    run = RecordedRun(tmp_path, config_of(tmp_path), find_recorded(tmp_path), {0: None})
    with refused(f"steps 1, 3 to {far} are not recorded"):
        plan_ways(certified, run, requested=[far])
