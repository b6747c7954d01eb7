"""Hub datasets, read by `datasets` from a folder in the hub's own layout."""

from __future__ import annotations

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from spmdrl.check.inputs import input_problems
from spmdrl.config import SourceSettings
from spmdrl.data.prompts import PromptSource
from spmdrl.data.rows import RowRules, read_rows
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import made, refused

CARD = """\
---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: hard
  data_files:
  - {split: train, path: hard/train-*}
---
# Sums
"""


def questions(first, count):
    return [
        {
            "question": f"{i}+1=",
            "extra_info": {"index": i, "tags": ["sum"] * (i % 2)},
            "messages": [{"role": "user", "content": f"{i}+1="}],
            "answer": str(i + 1) if i % 3 else None,
        }
        for i in range(first, first + count)
    ]


FILES = {
    "data/train-00000-of-00002.parquet": questions(0, 5),
    "data/train-00001-of-00002.parquet": questions(5, 4),
    "data/test-00000-of-00001.parquet": questions(20, 2),
    "hard/train-00000-of-00001.parquet": questions(100, 3),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A dataset of two configs, in shards; whatever is made of it lies beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, rows in FILES.items():
        path = tmp_path / "sums" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (tmp_path / "sums" / "README.md").write_text(CARD)
    return tmp_path / "sums"


def test_rows_are_those_of_the_files_by_config_and_split(folder):
    spelt = {"prompt": "question"}
    train, test = ("data/train-00000-of-00002", "data/train-00001-of-00002"), ("data/test-",)
    for rest, begins in {
        "": train,
        ":train": train,
        ":main:train": train,
        ":test": test,
        ":main:test": test,
        ":hard:train": ("hard/train-",),
    }.items():
        names = [name for begin in begins for name in FILES if name.startswith(begin)]
        held = [
            row
            for name in names
            for row in read_rows(str(folder / name), rules=RowRules(columns=spelt))
        ]
        rows = read_rows(f"{folder}{rest}", rules=RowRules(columns=spelt))
        assert list(rows) == held
        assert rows.where(1) == f"{folder}{rest}: row 2"
    assert len(read_rows(str(folder), size=6, rules=RowRules(columns=spelt))) == 6
    with refused(f"{folder}:test: row 2: the row has nothing to imitate"):
        read_rows(f"{folder}:test", rules=RowRules(need="example", columns=spelt))


def test_what_the_dataset_lacks_is_refused_with_what_it_has(folder, tmp_path):
    for rest, words in {
        ":dev": ("split dev", "train", "test"),
        ":easy:train": ("config easy", "main", "hard"),
        ":hard:test": ("config hard, split test", "train"),
        ":a:b:c": ("NAME:CONFIG:SPLIT",),
    }.items():
        with refused(str(folder), *words):
            read_rows(f"{folder}{rest}")
    (tmp_path / "none").mkdir()
    with refused(f"hub dataset {tmp_path / 'none'}"):
        read_rows(str(tmp_path / "none"))


def test_a_folder_without_a_card_has_the_splits_of_its_names(folder, tmp_path):
    (folder / "README.md").unlink()
    rows = tmp_path / "plain" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "ab"))
    assert [row["prompt"] for row in read_rows(str(rows.parent))] == ["a", "b"]


def test_a_run_and_its_dry_run_read_all_of_a_folder(folder):
    data = dict(
        train=(SourceSettings(str(folder)), SourceSettings(f"{folder}:hard:train")),
        columns={"prompt": "question"},
        eval=f"{folder}:test",
        max_prompt_tokens=64,
    )
    cfg = made(data=data, batch=dict(prompts_per_step=3), model=dict(path="m"))
    source = PromptSource(cfg, character_tokenizer())
    rows = {prompt.text for step in range(9) for prompt in source.at(step)}
    assert rows == {row["question"] for n, own in FILES.items() if "train" in n for row in own}
    assert [prompt.text for prompt in source.eval()] == ["20+1=", "21+1="]
    found = "\n".join(input_problems(made(data=data | dict(train=f"{folder}:dev"))))
    assert f"{folder}" in found and "split dev" in found
