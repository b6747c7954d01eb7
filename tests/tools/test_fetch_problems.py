"""Public sets of problems, from small files with the columns that the sets have on the hub."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import get_args

import PIL.Image
import pyarrow
import pyarrow.parquet

from configs.recipes import rewards as recipe_rewards
from spmdrl.data.rows import ground_truth_of, prompt_of, read_rows
from spmdrl.environments.retrieval import Search
from spmdrl.rewards import graders
from spmdrl.tools.commands import fetch_problems
from spmdrl.tools.problem_sets import SETS, split_files


def parquet(folder: Path, name: str, rows: list[dict]) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def jsonl(folder: Path, name: str, rows: list[dict]) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def fetched(name: str, source: Path, out: Path, *, split: str = "test"):
    status = fetch_problems.main([name, "--source", str(source), "--out", str(out)])
    assert status in (None, 0)
    return list(read_rows(str(out / f"{split}.jsonl")))


def content(row: dict) -> str:
    (message,) = prompt_of(row)
    assert message["role"] == "user"
    return message["content"]


def score(row: dict, response: str, *, grader=graders.math) -> float:
    return grader(row["data_source"], response, ground_truth_of(row))["score"]


def test_every_set_is_a_choice_of_the_command():
    assert set(get_args(fetch_problems.Name)) == SETS.keys()


def dapo_row(problem: str, answer: str, index: str) -> dict:
    text = (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        f'\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def test_problems_of_dapo_are_taken_once_and_without_their_form_of_the_answer(tmp_path, capsys):
    own = [dapo_row("What is $3+31$?", "34", "a"), dapo_row("What is $2^5$?", "32", "b")]
    odd = [dapo_row("What is $x$?", "1", "c"), dapo_row("What is $x$?", "2", "c")]
    parquet(tmp_path / "hub", "data/dapo-math-17k.parquet", [*own * 100, *odd])
    rows = fetched("dapo_math", tmp_path / "hub", tmp_path / "out", split="train")
    assert [content(row).partition("\n\n")[0] for row in rows] == [
        "What is $3+31$?",
        "What is $2^5$?",
    ]
    assert not any("Answer:" in content(row) for row in rows)
    assert "2 rows; left out: 199 repetitions, 1 problems" in capsys.readouterr().out
    assert score(rows[0], r"So it is \boxed{34}.") == 1 and score(rows[0], r"\boxed{3}") == 0


def test_answers_of_aime_are_read_with_and_without_zeros(tmp_path):
    row = {"id": 60, "problem": "Find it.", "solution": "...", "answer": "025", "url": "u"}
    parquet(tmp_path / "24", "data/train-00000-of-00001.parquet", [{**row, "year": "2024"}])
    (problem,) = fetched("aime_2024", tmp_path / "24", tmp_path / "a")
    assert score(problem, r"\boxed{25}") == score(problem, r"\boxed{025}") == 1
    jsonl(tmp_path / "25", "test.jsonl", [{"problem": "Find it.", "answer": "70", "id": "0"}])
    (problem,) = fetched("aime_2025", tmp_path / "25", tmp_path / "b")
    assert score(problem, r"\boxed{70}") == 1 and score(problem, r"\boxed{7}") == 0


def test_math_500_has_answers_of_latex(tmp_path):
    row = {"problem": "Convert.", "solution": "s", "answer": r"\left( 3, \frac{\pi}{2} \right)"}
    row |= {"subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"}
    jsonl(tmp_path / "hub", "test.jsonl", [row])
    (problem,) = fetched("math_500", tmp_path / "hub", tmp_path / "out")
    assert problem["data_source"] == "HuggingFaceH4/MATH-500"
    assert score(problem, r"\boxed{(3, \pi/2)}") == 1 and score(problem, r"\boxed{(3, \pi)}") == 0


def test_choices_of_gpqa_stand_in_an_order_that_never_changes(tmp_path):
    rows = [
        {
            "Question": f"Which is number {i}?",
            "Correct Answer": "this",
            "Incorrect Answer 1": "that",
            "Incorrect Answer 2": "those\n",
            "Incorrect Answer 3": "none",
            "High-level domain": "Physics",
        }
        for i in range(20)
    ]
    parquet(tmp_path / "hub", "gpqa_diamond/train-00000-of-00001.parquet", rows)
    first = fetched("gpqa", tmp_path / "hub", tmp_path / "a")
    assert first == fetched("gpqa", tmp_path / "hub", tmp_path / "b")
    letters = {ground_truth_of(row) for row in first}
    assert letters == {rf"\boxed{{{letter}}}" for letter in "ABCD"}
    for row in first:
        right = ground_truth_of(row)[len(r"\boxed{") : -1]
        assert f"\n{right}. this\n" in content(row)
        assert score(row, rf"Thus \boxed{{{right}}}") == 1
        wrong = next(letter for letter in "ABCD" if letter != right)
        assert score(row, rf"Thus \boxed{{{wrong}}}") == 0


def test_drawings_of_geometry3k_become_files_beside_the_rows(tmp_path):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (40, 30)).save(buffer, "PNG")
    image = {"bytes": buffer.getvalue(), "path": None}
    row = {"images": [image], "problem": "<image>Find $x$.", "answer": r"2 \sqrt { 221 }"}
    for split in ("train", "test"):
        parquet(tmp_path / "hub", f"data/{split}-00000-of-00001.parquet", [row])
    (problem,) = fetched("geometry3k", tmp_path / "hub", tmp_path / "out")
    (path,) = problem["images"]
    assert (tmp_path / "out" / path).read_bytes() == buffer.getvalue()
    assert content(problem).startswith("<image>Find $x$.")
    assert score(problem, r"\boxed{2\sqrt{221}}") == 1 and score(problem, r"\boxed{221}") == 0
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "drawing.png").write_bytes(buffer.getvalue())
    for split in ("train", "test"):
        jsonl(tmp_path / "own", f"{split}.jsonl", [{**row, "images": ["drawing.png"]}])
    (again,) = fetched("geometry3k", tmp_path / "own", tmp_path / "again")
    assert again == problem
    jsonl(tmp_path / "own", "train.jsonl", [{**row, "images": ["../own/../secret.png"]}])
    assert fetch_problems.main(["geometry3k", "--source", str(tmp_path / "own")]) == 2


def test_questions_of_hotpotqa_come_with_the_texts_that_the_search_finds(tmp_path):
    row = {
        "id": "5a7a06935542990198eaf050",
        "question": "Which magazine was started first?",
        "answer": "Arthur's Magazine",
        "type": "comparison",
        "level": "medium",
        "supporting_facts": {"title": ["Arthur's Magazine"], "sent_id": [0]},
        "context": {
            "title": ["Arthur's Magazine", "First for Women"],
            "sentences": [["It was a periodical ", "of 1844."], ["It began in 1989."]],
        },
    }
    for split in ("train", "validation"):
        parquet(tmp_path / "hub", f"distractor/{split}-00000-of-00001.parquet", [row, row])
        parquet(tmp_path / "hub", f"fullwiki/{split}-00000-of-00001.parquet", [])
    rows = fetched("hotpotqa", tmp_path / "hub", tmp_path / "out")
    assert len(rows) == 2
    corpus = tmp_path / "out" / "corpus.jsonl"
    assert len(corpus.read_text().splitlines()) == 2
    assert "1844" in Search(corpus=str(corpus), results=1)("periodical 1844")
    grader = recipe_rewards.tagged_answer
    assert score(rows[0], "So <answer>arthur's magazine</answer>", grader=grader) == 1
    assert score(rows[0], "Arthur's Magazine", grader=grader) == 0


def test_of_eurus_the_programs_are_taken_with_their_tests(tmp_path):
    row = {
        "data_source": "taco",
        "prompt": [
            {"content": "You think in steps.", "role": "system"},
            {"content": "Print twice the number.", "role": "user"},
        ],
        "ability": "code",
        "reward_model": {
            "ground_truth": json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["6\n", "8\n"]}),
            "style": "rule",
        },
        "extra_info": {"index": 0, "split": "train"},
    }
    for split in ("train", "validation"):
        parquet(tmp_path / "hub", f"{split}.parquet", [row, {**row, "ability": "math"}])
    (problem,) = fetched("eurus_code", tmp_path / "hub", tmp_path / "out")
    assert content(problem) == "Print twice the number."
    graded = recipe_rewards.fenced_program("", "no program", ground_truth_of(problem))
    assert graded["score"] == 0


def test_files_of_other_columns_or_splits_are_refused_and_nothing_is_written(tmp_path, capsys):
    jsonl(tmp_path / "hub", "test.jsonl", [{"question": "1+1?", "answer": "2"}])
    out = ["--out", str(tmp_path / "out")]
    assert fetch_problems.main(["aime_2025", "--source", str(tmp_path / "hub"), *out]) == 2
    assert "test.jsonl:1: no text in column 'problem'; the columns" in capsys.readouterr().err
    assert fetch_problems.main(["gsm8k", "--source", str(tmp_path / "hub"), *out]) == 2
    assert "no file of the split 'train'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_of_a_split_are_found_by_name_or_folder(tmp_path):
    for name in ("train-0.parquet", "trained.parquet", "test/0.parquet", "data/test_1.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = {
        split: [path.name for path in split_files(SETS["geometry3k"], split, folder=tmp_path)]
        for split in ("train", "test")
    }
    assert found == {"train": ["train-0.parquet"], "test": ["test_1.jsonl", "0.parquet"]}
