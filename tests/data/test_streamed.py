"""Files that stay on disk: rows, places, order and refusals of files in memory, without them."""

from __future__ import annotations

import json
import os
import random
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from spmdrl.data import row_files, streamed
from spmdrl.data.examples import SupervisedSource
from spmdrl.data.prompts import PromptSource
from spmdrl.data.rows import RowRules, read_rows
from spmdrl.data.streamed import stream_rows
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import made, refused

PLAIN = character_tokenizer()


def opened(path, *, size=0, max_bytes=2**20, **columns):
    return stream_rows(path, size=size, rules=RowRules("prompt", max_bytes, columns))


def test_rows_and_places_are_those_of_a_file_in_memory(tmp_path):
    draw, path = random.Random(1), tmp_path / "a.jsonl"
    for _ in range(120):
        lines = [
            draw.choice(("", "  ", "\t", "\r"))
            if draw.random() < 0.3
            else draw.choice(("", " ")) + json.dumps({"prompt": "x\u20ac" * draw.randrange(1, 9)})
            for _ in range(draw.randrange(1, 12))
        ]
        text = "\n".join([*lines, json.dumps({"prompt": "last"})]) + draw.choice(("", "\n", "\n\n"))
        is_marked = bool(lines and lines[0].strip()) and draw.random() < 0.5  # by a BOM
        path.write_bytes((b"\xef\xbb\xbf" if is_marked else b"") + text.encode())
        held, size = read_rows(str(path)), draw.choice((0, 1, 3))
        rows = opened(path, size=size)
        count = min(size or len(held), len(held))
        assert list(rows) == list(held)[:count]
        assert [rows.where(i) for i in range(count)] == [held.where(i) for i in range(count)]


def test_a_row_is_checked_when_it_is_read_by_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "fine"}\n\n{"q": \n{"other": 1}\n{"q": ""}\n')
    rows = opened(path, prompt="q")
    assert rows[0] == {"prompt": "fine"}
    for index, words in enumerate(
        ((":3", "JSON"), (":4", "no column 'q'"), (":5", "no prompt")), 1
    ):
        with refused(f"{path}{words[0]}", words[1]):
            rows[index]
    with refused(f"{path}:1: the line is longer than data.max_row_mib"):
        opened(path, max_bytes=4)
    path.write_text("\n \n")
    with refused("the dataset is empty"):
        opened(path)


def test_a_file_that_changes_under_a_run_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n' * 3)
    rows = opened(path)
    assert rows[2] == {"prompt": "a"}
    with path.open("a") as file:
        file.write('{"prompt": "b"}\n')
    with refused(f"{path}: was changed while the run uses it"):
        rows[2]


# --------------------------------------------------------------------------- parquet


def written(path, rows, *, group):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_rows_of_row_groups_are_those_of_a_file_in_memory(group, tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_MAX_BATCH_ROWS", 2)
    rows = [
        {"q": "x\u20ac" * (i + 1), "n": i, "info": {"tags": ["a"] * i} if i % 2 else None}
        for i in range(10)
    ]
    path = written(tmp_path / "a.parquet", rows, group=group)
    for size in (0, 1, 4):
        held, on_disk = (
            read_rows(str(path), size=size, rules=RowRules(columns={"prompt": "q"})),
            opened(path, size=size, prompt="q"),
        )
        assert list(on_disk) == list(held) and len(on_disk) == (size or 10)
        for i in random.Random(0).choices(range(len(held)), k=20):
            assert on_disk[i] == held[i] and on_disk.where(i) == held.where(i)


def test_what_of_row_groups_cannot_be_read_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", [{"prompt": "x" * 100}] * 3 + [{"prompt": ""}], group=2)
    rows = opened(path)
    with refused(f"{path}: row 4: the row has no prompt"):
        rows[3]
    with refused("the dataset is empty"):
        opened(written(tmp_path / "none.parquet", [{"prompt": "a"}][:0], group=1))
    (tmp_path / "odd.parquet").write_bytes(path.read_bytes()[:-9])
    with refused(f"{tmp_path / 'odd.parquet'}: cannot be read as parquet"):
        opened(tmp_path / "odd.parquet")
    os.utime(path, ns=(1, 1))
    with refused(f"{path}: was changed while the run uses it"):
        rows[0]
    monkeypatch.setattr(streamed, "_MAX_GROUP_BYTES", 10)
    with refused(f"{path}: row group 1 unpacks to", "row_group_size=1000", "stream_above_mib"):
        opened(path)


def test_a_group_that_unpacks_to_more_than_its_metadata_says_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", [{"prompt": "x" * 100}] * 4000, group=4000)
    monkeypatch.setattr(streamed, "_MAX_GROUP_BYTES", 200_000)
    rows = opened(path)  # a dictionary of one text
    with refused("row group 1 unpacks to 0 MiB"):
        rows[7]


def config(path, *, stream_above_mib, **data):
    own = dict(train=str(path), max_prompt_tokens=64, stream_above_mib=stream_above_mib)
    return made(data=own | data, batch=dict(prompts_per_step=8), model=dict(path="m"))


def write(path, rows):
    if path.suffix == ".parquet":
        written(path, rows, group=100)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_streamed_file_gives_the_same_steps(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    rows = [{"prompt": f"q{i}" * (1 + i % 3), "completion": f"a{i}"} for i in range(600)]
    write(path, rows)
    for data in ({}, dict(overlong_prompts="drop", max_prompt_tokens=9), dict(size=300)):
        held, on_disk = (
            PromptSource(config(path, stream_above_mib=mib, **data), PLAIN) for mib in (1, 0)
        )
        assert list(held.kept) == list(on_disk.kept) and held.num_dropped == on_disk.num_dropped
        for step in (0, 1, 80, 10_000):
            assert held.at(step) == on_disk.at(step)
    held, on_disk = (SupervisedSource(config(path, stream_above_mib=m), PLAIN) for m in (1, 0))
    assert held.units_at(5) == on_disk.units_at(5)
    # What is too long behind the first rows is told when its turn comes.
    write(path, [*rows, {"prompt": "x" * 65}])
    late = PromptSource(config(path, stream_above_mib=0, shuffle=False), PLAIN)
    with refused(str(path), "601: 65 tokens"):
        late.at(75)


def test_a_large_file_takes_little_memory(tmp_path):
    path = tmp_path / "large.jsonl"
    row = json.dumps({"prompt": "2+2", "note": "x" * 2000}) + "\n"
    with path.open("w") as file:
        for _ in range(60):
            file.write(row * 1000)
    assert os.path.getsize(path) > 120e6
    tracemalloc.start()
    source = PromptSource(config(path, stream_above_mib=100), PLAIN)
    for step in range(0, 40_000, 997):
        source.at(step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6  # 60,000 rows hold 1 MB
    assert source.order.num_rows == 60_000


def test_a_large_parquet_file_takes_little_memory(tmp_path):
    path, draw = tmp_path / "large.parquet", random.Random(0)
    texts = [draw.randbytes(20_000).hex() for _ in range(1000)]
    schema = pyarrow.schema({"prompt": pyarrow.string(), "note": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(path, schema, use_dictionary=False) as file:
        for i in range(20):
            rows = [{"prompt": f"{i}", "note": text} for text in texts[i * 50 : (i + 1) * 50]]
            file.write_table(pyarrow.Table.from_pylist(rows, schema))
    size, before = os.path.getsize(path), pyarrow.total_allocated_bytes()
    assert size > 20e6
    source = PromptSource(config(path, stream_above_mib=1), PLAIN)
    held = []
    for step in range(50):
        source.at(step)
        held.append(pyarrow.total_allocated_bytes() - before)
    assert max(held) < 6e6  # of 40 MB: one row group of 2 MB, and another while it is read
    assert source.order.num_rows == 1000
