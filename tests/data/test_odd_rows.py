"""Rows that nobody should write: each is taken, or refused with file, line or row, and a reason."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from spmdrl.data.examples import example_source
from spmdrl.data.prompts import PromptSource
from spmdrl.data.rows import read_rows
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.check.test_odd_settings import counts, says
from tests.helpers import odd
from tests.helpers.built import made

PLAIN, CHAT = character_tokenizer(), character_tokenizer(chat_template=True)
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# By objective (and loss): rows that are right.
GOOD: dict[str, list[dict]] = {
    "rl": [
        {"prompt": "a", "answer": "b", "data_source": "c", "extra_info": {"index": 1}},
        {"prompt": [USER], "reward_model": {"ground_truth": "4", "style": "rule"}},
        {"messages": [USER, REPLY], "tools": [TOOL]},
    ],
    "sft": [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "answer": "b"},
        {"prompt": [USER], "completion": [REPLY]},
        {"messages": [USER, REPLY, USER, REPLY]},
        {"text": "some words"},
    ],
    "dpo": [
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.5},
        {"chosen": [USER, REPLY], "rejected": [USER, {"role": "assistant", "content": "no"}]},
    ],
    "kto": [{"prompt": "a", "completion": "b", "label": True}],
    "distill": [{"prompt": "a", "completion": "b"}],
}
OBJECTIVES = {
    "dpo": dict(objective="preference", loss="dpo"),
    "kto": dict(objective="preference", loss="kto"),
    "distill": dict(objective="distill", loss="divergence"),
    "rl": dict(objective="rl"),
    "sft": dict(objective="sft"),
}


def use(path: Path, kind: str, *, is_chat: bool) -> None:
    """Open a file as a run does, and make all of its prompts or examples."""
    cfg = made(
        algorithm=OBJECTIVES[kind],
        data=dict(train=str(path), max_prompt_tokens=2**16, max_row_mib=1.0),
        batch=dict(prompts_per_step=1),
        model=dict(path="m"),
    )
    tokenizer = CHAT if is_chat else PLAIN
    if kind == "rl":
        prompts = PromptSource(cfg, tokenizer)
        prompts.of(range(len(prompts.kept)))
        return
    source = example_source(cfg, tokenizer)
    for index in source.rows_of_run():
        source.unit(index)


# --------------------------------------------------------------------------- drawing


def row_of(draw: random.Random, kind: str) -> Any:
    """Draw a row: a right one, with odd values at any depth."""
    if draw.random() < 0.05:
        return odd.value(draw)
    row = copy.deepcopy(draw.choice(GOOD[kind]))
    if draw.random() < 0.1:
        row |= copy.deepcopy(draw.choice(GOOD[draw.choice(list(GOOD))]))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        spoil(draw, row)
    return row


def spoil(draw: random.Random, inside: Any) -> None:
    """Put something odd into a row, at any depth."""
    if not inside:
        return
    at = draw.choice([*inside] if isinstance(inside, dict) else range(len(inside)))
    if isinstance(inside[at], (dict, list)) and draw.random() < 0.5:
        return spoil(draw, inside[at])
    what = draw.random() if isinstance(inside, dict) else 1.0
    if what < 0.15:
        del inside[at]
    else:
        inside[odd.text(draw) if what < 0.25 else at] = odd.value(draw)


def as_json(draw: random.Random, row: Any) -> str:
    text = json.dumps(plain(row), default=str, ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1:
        at = draw.randrange(len(text) + 1)
        put = draw.choice(
            (odd.text(draw), "[" * 9000, "9" * 5000, '"\\ud800"', "1e999", "NaN", "{")
        )
        text = text[:at] + put + text[at + draw.choice((0, 0, 1, 9)) :]
    return text.replace("\n", " ")


def plain(value: Any) -> Any:
    """Return a value with keys that JSON can write."""
    if isinstance(value, dict):
        return {str(key): plain(own) for key, own in value.items()}
    return [plain(own) for own in value] if isinstance(value, list) else value


def write(draw: random.Random, path: Path, rows: list[Any]) -> bool:
    """Write rows as the file's kind; return whether that can be."""
    if path.suffix == ".parquet":
        columns = {str(key) for row in rows if isinstance(row, dict) for key in row}
        try:
            table = pyarrow.table(
                {c: [row.get(c) for row in rows if isinstance(row, dict)] for c in columns}
            )
            pyarrow.parquet.write_table(table, path)
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
            return False
        return True
    texts = [as_json(draw, row) for row in rows]
    text = "\n".join(texts) if path.suffix == ".jsonl" else f"[{', '.join(texts)}]"
    data = text.encode(errors="surrogatepass")
    if draw.random() < 0.03:
        data = data[: draw.randrange(len(data) + 1)] + b"\xff" + data[: draw.randrange(9)]
    path.write_bytes(data)
    return True


@counts(500, 10_000)
def test_random_rows_are_taken_or_refused_with_their_place(count, tmp_path):
    draw, taken, written = random.Random(3), 0, 0
    while written < count:
        kind = draw.choice(list(GOOD))
        path = tmp_path / f"rows{draw.choice(('.jsonl', '.jsonl', '.json', '.parquet'))}"
        rows = [row_of(draw, kind) for _ in range(draw.randrange(1, 4))]
        if not write(draw, path, rows):
            continue
        written += len(rows)
        said = says(lambda: use(path, kind, is_chat=draw.random() < 0.8), of=(kind, rows))
        place = rf"{re.escape(str(path))}(:\d+|: row \d+|:|$| and all)"
        is_of_all = "usable rows of data.train" in said or "data.train, step" in said
        assert not said or is_of_all or re.search(place, said), (kind, rows, said)
        taken += not said
    assert taken > count // 20


# --------------------------------------------------------------------------- what is known


@pytest.mark.parametrize(
    "kind, line, said",
    [
        ("rl", '{"messages": 1}', "column 'messages': expected a list of messages, got 1"),
        ("sft", '{"prompt": 1, "completion": "3"}', "column 'prompt': expected text or a list"),
        ("sft", '{"prompt": "1", "completion": 3}', "column 'completion': expected text or a list"),
        ("sft", '{"prompt": "1", "answer": {}}', "got a mapping of 0"),
        ("sft", '{"prompt": "1", "answer": 3}', "column 'answer': the response to imitate is text"),
        ("sft", '{"text": ["a"]}', "column 'text': expected text, got a list of 1"),
        ("rl", '{"prompt": ["a"]}', "message 0 must have a `role`"),
        ("rl", '{"prompt": "a", "tools": 3}', "column 'tools': expected a list, got 3"),
        ("rl", '{"prompt": "\\ud83d"}', "holds half of a character, '\\ud83d', at 1"),
        ("rl", '{"prompt": ', "not a JSON value: Expecting value at column 11; the line begins"),
        ("rl", '{"prompt": "a", "b": ' + "9" * 5000 + "}", "not a JSON value: Exceeds the limit"),
        ("rl", '{"prompt": "a", "b": ' + "[" * 90 + "]" * 90 + "}", "'b' holds lists or mappings"),
        (
            "rl",
            '{"prompt": "a", "b": {"c": 1, "c": 2}}',
            "the name 'c' stands twice in one mapping",
        ),
        ("rl", '{"prompt": ' + "[" * 100_000, "nested too deep to be read"),
        ("rl", '{"prompt": "' + "x" * 2**20 + '"}', "longer than data.max_row_mib allows"),
        (
            "dpo",
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1' + "0" * 400 + "}",
            "`margin` must be a number of at most 1000000, got a whole number of over 40 digits",
        ),
        ("kto", '{"prompt": "a", "completion": "b", "label": 2}', "`label` must be true"),
    ],
)
def test_what_a_row_cannot_be_is_refused_with_file_line_and_column(kind, line, said, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD[kind][0]) + "\n\n" + line + "\n")
    found = says(lambda: use(path, kind, is_chat=True), of=line)
    assert found.startswith(f"{path}:3: ") and said in found


def test_what_is_no_file_or_too_large_a_list_is_refused_before_it_is_read(tmp_path):
    folder, pipe, large = (tmp_path / name for name in ("d.jsonl", "p.jsonl", "l.json"))
    folder.mkdir()
    os.mkfifo(pipe)
    large.write_text("[")
    os.truncate(large, 5 * 2**30)  # sparse: it takes no place
    for path, said in (
        (folder, "is a folder"),
        (pipe, "is a pipe or device"),
        (large, "write its rows as lines of a .jsonl file"),
    ):
        assert said in says(lambda path=path: read_rows(str(path)), of=path)


def test_integers_of_many_digits_are_answers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": ' + "9" * 400 + "}\n")
    assert read_rows(str(path))[0]["answer"] == int("9" * 400)


def table_of(**columns: Any) -> pyarrow.Table:
    return pyarrow.table({"prompt": ["a", "b"], **columns})


def of_bytes(*texts: bytes) -> pyarrow.Array:
    binary = pyarrow.array(texts, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(texts), binary.buffers())


@pytest.mark.parametrize(
    "columns, said",
    [
        (dict(prompt=of_bytes(b"fine", b"\xff")), "row 2: column 'prompt' cannot be read: 'utf-8'"),
        (
            dict(at=pyarrow.array([0, 10**15], pyarrow.timestamp("s"))),
            "row 2: column 'at' cannot be read: ",
        ),
        (
            dict(at=pyarrow.array([0, 1], pyarrow.timestamp("us", tz="Nowhere/At_all"))),
            "row 1: column 'at' cannot be read: 'Nowhere/At_all'",
        ),
        (dict(blob=[b"\x89", b""]), "row 1: column 'blob' holds bytes, which"),
        (dict(prompt=pyarrow.array([1, 2])), "row 1: column 'prompt': expected text or a list"),
    ],
)
def test_what_a_column_of_parquet_cannot_be_is_refused_with_its_row(columns, said, tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table_of(**columns), path)
    found = says(lambda: use(path, "rl", is_chat=False), of=columns)
    assert found.startswith(f"{path}: ") and said in found


def test_dates_and_decimals_of_parquet_are_texts(tmp_path):
    path = tmp_path / "rows.parquet"
    columns = dict(day=pyarrow.array([0, 1], pyarrow.date32()))
    columns["price"] = pyarrow.array([1, 2]).cast(pyarrow.decimal128(21, 2))
    pyarrow.parquet.write_table(table_of(**columns), path)
    assert read_rows(str(path))[1] == {"prompt": "b", "day": "1970-01-02", "price": "2.00"}


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "rows.parquet"
    text = pyarrow.array(["x" * 2**20])
    indices = pyarrow.array([0] * 2700, pyarrow.int32())
    table = pyarrow.table({"prompt": pyarrow.DictionaryArray.from_arrays(indices, text)})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 2**12
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = says(lambda: read_rows(str(path)), of="bomb")
    assert "unpack to more than 64 MiB" in found
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20  # KiB: not the 2.7 GiB that it holds


def test_damaged_parquet_is_refused(tmp_path):
    draw, path = random.Random(4), tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table_of(b=[1, 2]), path)
    whole = path.read_bytes()
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data))))])
        says(lambda: use(path, "rl", is_chat=False), of=bytes(data))
