"""Files of a run that somebody else may have written: what no run writes is refused at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmdrl import run_files
from spmdrl.certificate import lines as certificate
from spmdrl.checkpoint import manifest
from spmdrl.config import load_yaml
from spmdrl.errors import printable
from spmdrl.journal import Journal, read_rows
from spmdrl.rollout import decision_log
from spmdrl.tools.commands import curves, diff, view
from spmdrl.tools.plan.run import read_measured
from tests.helpers.built import refused

GIB = 2**30


def _pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is a pipe"


def _device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a device"


def _folder(path: Path) -> str:
    path.mkdir()
    return "is a folder"


def _sparse(path: Path) -> str:
    path.touch()
    os.truncate(path, 2048 * GIB)
    return f"has {2048 * GIB} bytes"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_pipe, _device, _folder, _sparse])
def test_what_is_no_regular_file_of_a_size_is_refused_by_every_reader(make, tmp_path):
    def read_at(name: str, read: Callable[[Path], Any]) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        says = make(path)
        with refused(str(path), says):
            read(path)

    read_at("m/metrics.jsonl", read_rows)
    read_at("k/metrics.jsonl", lambda path: Journal(path).rows())
    read_at("c/certificate.jsonl", lambda path: certificate.read(path.parent))
    read_at("s/step_1/manifest.json", lambda path: manifest.read_manifest(path.parent))
    read_at("rng_0.pt", manifest.load_plain)
    read_at("p/.metadata", lambda path: manifest.TensorReader(path.parent).read_metadata())
    read_at(
        "replica_0_of_1.jsonl",
        lambda path: decision_log.read_lines(
            decision_log.journal_of(path.parent, replica=0, replicas=1)
        ),
    )
    read_at("rates.json", lambda path: read_measured(str(path)))
    if make is not _folder:
        read_at("config.yaml", load_yaml)


def test_the_commands_refuse_them_with_status_2(tmp_path, capsys):
    (tmp_path / "rollouts").mkdir()
    os.mkfifo(tmp_path / "rollouts" / "step_000000_replica_0_of_1.parquet")
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "certificate.jsonl")
    assert curves.main([str(tmp_path)]) == 2
    assert diff.main([str(tmp_path), str(tmp_path)]) == 2
    assert view.main([str(tmp_path), "--step", "0"]) == 2
    said = capsys.readouterr().err
    assert said.count("is a pipe") == 3


def test_json_is_read_within_bounds_and_names_the_field():
    def refuses(text: str, *says: str) -> None:
        with refused("here: ", *says):
            run_files.json_of(text, place="here")

    refuses("1" + "0" * 400, "does not fit into 64 bits")
    refuses('{"a": {"lr": 1e999}}', "lr: the number 1e999 does not fit into 64 bits")
    refuses('{"seed": [18446744073709551616]}', "seed: the number 18446744073709551616")
    refuses("[" * 100 + "]" * 100, "more than 64 deep")
    refuses("[" * 10**5 + "]" * 10**5, "more than 64 deep")
    refuses("[" + "0," * (4 * 10**6) + "0]", "more than 4000000 values")
    refuses("{", "is no JSON")
    assert run_files.json_of('{"a": [1, -2.5, null]}', place="here") == {"a": [1, -2.5, None]}
    with refused("here: holds a JSON list, and must hold an object"):
        run_files.json_object("[]", place="here")


def test_lines_of_any_length_are_not_read_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n')
    os.truncate(path, GIB)
    with refused(f"{path}: line 2 has more than {16 * 2**20} bytes"):
        read_rows(path)


def test_metrics_are_numbers_and_what_is_kept_of_them_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "policy/loss": 1, "policy/lr": null}\n{"step": 1, "policy/lo')
    assert read_rows(path) == [{"step": 0, "policy/loss": 1, "policy/lr": None}]
    for value in ('"x"', "[1]", "true", "{}"):
        path.write_text(f'{{"step": 0, "policy/loss": {value}}}\n')
        with refused(f"{path}: line 1: policy/loss is ", "must be a number or null"):
            read_rows(path)
        assert curves.main([str(tmp_path)]) == 2
    path.write_text('{"step": 0}\n' * 100)
    monkeypatch.setattr("spmdrl.journal._MAX_BYTES", 10**4)
    with refused(f"{path}: line 30: the rows up to here take more than"):
        read_rows(path)
    newest = Journal(path).rows(newest=3, holds_texts=True)
    assert len(newest) == 3


def test_text_of_others_cannot_steer_a_terminal():
    assert printable("a\x1b[2J\r\x07\x9b\n\tb") == "a\\x1b[2J\\r\\x07\\x9b\n\tb"
    assert printable("\u202e\ud800") == "\\u202e\\ud800"
    assert printable("naïve 東京\u3000😀") == "naïve 東京\u3000😀"


def test_a_sealed_journal_is_cut_at_the_first_line_that_does_not_follow(tmp_path, caplog):
    def journal() -> Journal:
        return Journal(tmp_path / "j.jsonl", is_sealed=True)

    written = journal()
    rows = [{"n": number} for number in range(4)]
    for row in rows:
        written.append(row)
    path = written.path
    text = path.read_text()
    assert [json.loads(line)["n"] for line in text.splitlines()] == [0, 1, 2, 3]
    assert [entry.row for entry in journal().read()] == rows
    lines = text.splitlines(keepends=True)
    spoiled = {
        "line 2 does not follow": text.replace('"n": 1', '"n": 5'),
        "line 3 does not follow": "".join([*lines[:2], lines[3]]),
        "line 4 breaks off": text[:-1],
    }
    for says, changed in spoiled.items():
        path.write_text(changed)
        *good, last = journal().read()
        assert says in last.problem and [entry.row for entry in good] == rows[: len(good)]
        again = journal()
        again.keep(lambda row: True, removed=tmp_path / "removed")
        assert says in caplog.text
        again.append({"n": "new"})
        assert [e.row for e in journal().read()] == [*rows[: len(good)], {"n": "new"}]
        assert (tmp_path / "removed").read_text() == "".join(
            changed[len("".join(lines[: len(good)])) :]
        )
    path.write_text(text)
    again = journal()
    assert again.keep(lambda row: row["n"] < 2) == rows[2:]
    assert path.read_text() == "".join(lines[:2])
    again.append(rows[2])
    assert path.read_text() == "".join(lines[:3]), "the same seals again"
