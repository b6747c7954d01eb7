"""What teachers read instead of prompts: columns, templates, conversations, and bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config import Config
from spmdrl.data.examples import SupervisedSource
from spmdrl.data.imitation import encode_example
from spmdrl.data.prompts import PromptSource
from spmdrl.data.sources import load_rows
from spmdrl.data.teacher_prompts import TeacherPrompts
from spmdrl.data.teacher_templates import teacher_prompt_of, template_fields
from spmdrl.rollout.row_source import pack_units
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import changed, made, refused

PLAIN = character_tokenizer()
CHAT = character_tokenizer(chat_template=True)


def config(
    where: Path, rows: list[dict], *, objective: str = "on_policy_distill", **data: Any
) -> Config:
    file = where / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = made(model=dict(path="m", teacher="t"), batch=dict(prompts_per_step=1))
    cfg = changed(cfg, algorithm=dict(objective=objective, loss="divergence"))
    return changed(cfg, data=dict(train=str(file)) | data)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "spec", "expected"),
    [
        ({"prompt": "3+4=", "answer": 7}, "{prompt}{answer};", "3+4=7;"),
        ({"prompt": "a", "hint": "b"}, "hint", "b"),
        ({"prompt": "a", "gold": {"x": "b"}}, "{{{gold.x}}}", "{b}"),
        ({"prompt": "a", "a.b": "c"}, "{a.b}", "c"),
        (
            {"prompt": [user("q"), user("r")], "answer": "7"},
            "{prompt} ({answer})",
            [user("q"), user("r (7)")],
        ),
        ({"prompt": "a", "hinted": [user("b")]}, "hinted", [user("b")]),
        (
            {"messages": [user("q"), {"role": "assistant", "content": "a"}]},
            "{prompt}!",
            [user("q!")],
        ),
    ],
)
def test_a_column_or_a_template_makes_what_the_teacher_reads(row, spec, expected):
    assert teacher_prompt_of(row, spec, where="f:1") == expected


@pytest.mark.parametrize(
    ("row", "spec", "text"),
    [
        ({"prompt": "a"}, "hint", "f:1: the row has no 'hint', which data.teacher_prompt names"),
        ({"prompt": "a", "gold": {"y": 1}}, "{gold.x}", "f:1: the row has no 'gold.x'"),
        ({"prompt": "a", "hint": ""}, "hint", "f:1: column 'hint', which the teacher reads"),
        ({"prompt": "a", "hint": ["x"]}, "hint", "f:1: column 'hint', which the teacher reads"),
        ({"prompt": "a", "hint": ["x"]}, "{hint}", "f:1: column 'hint', which data.teacher_prompt"),
        ({"prompt": "a", "hint": True}, "{hint}", "expected text or a number, got"),
        (
            {"prompt": [{"role": "user", "content": []}]},
            "{prompt}",
            "the last message of the prompt",
        ),
    ],
)
def test_a_row_without_it_is_refused_by_its_place(row, spec, text):
    with refused(text):
        teacher_prompt_of(row, spec, where="f:1")


@pytest.mark.parametrize("spec", ["{}", "{0}", "{a!r}", "{a:>9}", "{a[b]}", "{a", "a}", "{a b}"])
def test_a_template_holds_names_of_columns_alone(spec):
    with refused("brace"):
        template_fields(spec)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["plain", "chat"])
def test_a_teacher_of_examples_reads_the_prompt_as_an_example_has_it(tokenizer, tmp_path):
    """Its tokens before the response are those of the row with the other prompt."""
    row: dict[str, Any] = {"prompt": "q", "completion": "a", "hint": "the hint"}
    if tokenizer is CHAT:
        row |= {"prompt": [user("q")], "hint": [user("the hint")]}
    cfg = config(tmp_path, [row, row], objective="distill", teacher_prompt="hint")
    rows = load_rows(cfg, split="train", need="example")
    found = TeacherPrompts(cfg, tokenizer, rows).tokens(1)
    tokens, mask = encode_example(
        row | {"prompt": row["hint"]}, tokenizer, template="auto", where="f:1"
    )
    assert [*found] == [*tokens[: mask.index(True)]]
    units = SupervisedSource(cfg, tokenizer).units_at(1)
    packed = pack_units(list(enumerate(units)), version=1)
    assert packed.scalars.rows.tolist() == [units[0].index]
    assert {units[0].index, SupervisedSource(cfg, tokenizer).units_at(0)[0].index} == {0, 1}


def test_prompts_of_teachers_are_checked_when_the_rows_are_opened(tmp_path):
    """With file and line, whatever the row's own length."""
    good = {"prompt": "q", "hint": "h", "completion": "a"}
    bare = {"prompt": "q", "completion": "a"}
    for objective, source in (("on_policy_distill", PromptSource), ("distill", SupervisedSource)):
        cfg = config(tmp_path, [good] * 300 + [bare], objective=objective, teacher_prompt="hint")
        with refused("rows.jsonl:301: the row has no 'hint'"):
            source(cfg, PLAIN)
        cfg = config(
            tmp_path,
            [good, good | {"hint": "x" * 9}],
            objective=objective,
            teacher_prompt="{hint}",
            max_teacher_prompt_tokens=8,
        )
        with refused("rows.jsonl:2: the teacher's prompt has 9 tokens"):
            source(cfg, PLAIN)
    messages = {"messages": [user("q"), {"role": "assistant", "content": "a"}], "hint": "h"}
    cfg = config(tmp_path, [messages], objective="distill", teacher_prompt="hint")
    with refused("rows.jsonl:1: has no column `prompt`"):
        SupervisedSource(cfg, CHAT)
