"""Reading rows: formats, errors that name the place, generated tasks."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from spmdrl.data.rows import RowRules, ground_truth_of, prompt_of, read_rows
from spmdrl.data.tasks import GeneratedRows, make_task
from tests.helpers.built import refused

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def write_jsonl(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return str(path)


def test_jsonl_rows_of_verl_trl_and_openai_give_their_prompts(tmp_path):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    file = write_jsonl(
        tmp_path / "a.jsonl",
        [
            VERL,
            {"prompt": "text", "level": 3},
            {"messages": talk + [{"role": "assistant", "content": "ho"}]},
            {"messages": talk},
        ],
    )
    rows = read_rows(file)
    assert [prompt_of(row) for row in rows] == [VERL["prompt"], "text", talk, talk]
    assert ground_truth_of(rows[0]) == "4"
    assert rows[1]["level"] == 3
    assert rows.where(2) == f"{file}:3"


def test_parquet_gives_the_same_rows_as_jsonl_and_drops_null_message_fields(tmp_path):
    rows = [VERL | {"extra_info": {"index": i}} for i in range(5)]
    rows[1] = rows[1] | {"prompt": [{"role": "user", "content": "a", "name": "bob"}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(read_rows(str(tmp_path / "a.parquet"))) == rows
    assert list(read_rows(str(tmp_path / "a.parquet"), size=2)) == rows[:2]
    assert list(read_rows(write_jsonl(tmp_path / "a.jsonl", rows))) == rows


def test_json_array_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "x"}, {"prompt": "y"}]))
    assert [r["prompt"] for r in read_rows(str(tmp_path / "a.json"))] == ["x", "y"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "x"}', ["no prompt", "question"]),
        ('{"prompt": ""}', ["no prompt"]),
        ('{"prompt": []}', ["no prompt"]),
        ('{"prompt": null, "a": 1}', ["no prompt"]),
        ('{"prompt": 7}', ["column 'prompt'", "expected text", "7"]),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ["before the final assistant"]),
        ('{"prompt": [{"role": "user"}]}', ["message 0", "content"]),
        ('{"prompt": ["x"]}', ["message 0", "role"]),
        ("[1, 2]", ["object"]),
        ('{"prompt": "x"', ["JSON", "column"]),
    ],
)
def test_bad_row_is_refused_with_file_and_line(tmp_path, line, words):
    file = write_jsonl(tmp_path / "bad.jsonl", ['{"prompt": "fine"}', "", line])
    with refused(f"{file}:3", *words):
        read_rows(file)


def test_bad_parquet_row_is_refused_with_file_and_row(tmp_path):
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": ["x", None], "b": [1, 2]})
    pyarrow.parquet.write_table(table, file)
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: the row has no prompt"):
        read_rows(str(file))
    file.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        read_rows(str(file))


def test_empty_missing_and_unknown_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"e\.jsonl: the dataset is empty"):
        read_rows(write_jsonl(tmp_path / "e.jsonl", [""]))
    with pytest.raises(ValueError, match="no such data file"):
        read_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="must end in"):
        read_rows(str(tmp_path / "rows.csv"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match="UTF-8"):
        read_rows(str(tmp_path / "latin.jsonl"))


def test_supervised_row_without_a_response_is_refused_with_the_line(tmp_path):
    file = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"text": "t"},
            {"prompt": "p", "completion": "c"},
            {"prompt": "p", "answer": "c"},
            {"messages": [{"role": "user", "content": "x"}]},
        ],
    )
    with pytest.raises(ValueError, match=r"a\.jsonl:4: the row has nothing to imitate"):
        read_rows(file, rules=RowRules(need="example"))


@pytest.mark.parametrize(
    ("need", "columns", "row", "found"),
    [
        ("prompt", {"prompt": "question"}, {"question": "q", "n": 1}, {"prompt": "q", "n": 1}),
        (
            "example",
            {"prompt": "instruction", "completion": "output"},
            {"instruction": "i", "output": "o"},
            {"prompt": "i", "completion": "o"},
        ),
        ("example", {"text": "content"}, {"content": "t"}, {"text": "t"}),
        (
            "pair",
            {"chosen": "win", "rejected": "lose"},
            {"prompt": "p", "win": "w", "lose": "l"},
            {"chosen": "w", "rejected": "l", "prompt": "p"},
        ),
        (
            "label",
            {"completion": "reply", "label": "liked"},
            {"prompt": "p", "reply": "r", "liked": False},
            {"completion": "r", "label": False, "prompt": "p"},
        ),
        # Two names that change places, and one column that gets two names.
        (
            "prompt",
            {"prompt": "a", "a": "prompt"},
            {"a": "q", "prompt": 7},
            {"prompt": "q", "a": 7},
        ),
        ("prompt", {"prompt": "q", "again": "q"}, {"q": "q"}, {"prompt": "q", "again": "q"}),
    ],
)
def test_columns_are_renamed_in_every_kind_of_row(need, columns, row, found, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [row, row])
    assert list(read_rows(file, rules=RowRules(need=need, columns=columns))) == [found, found]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert list(
        read_rows(str(tmp_path / "a.parquet"), rules=RowRules(need=need, columns=columns))
    ) == [found]


def test_a_column_to_rename_that_is_missing_or_would_hide_another_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "x"}, "", {"query": "x", "n": 1}])
    with refused(f"{file}:3", "{prompt: question}", "no column 'question'", "query, n"):
        read_rows(file, rules=RowRules(columns={"prompt": "question"}))
    file = write_jsonl(tmp_path / "b.jsonl", [{"question": "x", "prompt": "y"}])
    with refused(f"{file}:1", "also has a column 'prompt'", "{own_prompt: prompt}"):
        read_rows(file, rules=RowRules(columns={"prompt": "question"}))
    (row,) = read_rows(file, rules=RowRules(columns={"prompt": "question", "own_prompt": "prompt"}))
    assert row == {"prompt": "x", "own_prompt": "y"}


# --------------------------------------------------------------------------- tasks


def test_addition_is_a_function_of_seed_split_and_index():
    options = {"digits": 3}
    rows, longer, other = (
        GeneratedRows("task:addition", options, size=size, seed=seed, split="train")
        for size, seed in ((50, 4), (500, 4), (50, 5))
    )
    assert list(rows) == [longer[i] for i in range(50)]
    assert rows[49] == rows[49]
    assert sum(a == b for a, b in zip(rows, other)) < 5
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("+")
        assert len(a) == len(b) == 3
        assert int(a) + int(b) == int(row["answer"])
        assert rows.task.score_answer(f" {row['answer']}\n", row) == 1.0
        assert rows.task.score_answer(row["answer"] + "1", row) == 0.0


@pytest.mark.parametrize(
    "options",
    [{"digits": 1}, {"digits": 2}, {"digits": 2, "subtraction": True}, {"digits": 2, "terms": 3}],
)
def test_no_held_out_problem_is_ever_a_training_problem(options):
    def problems(split, seed):
        rows = GeneratedRows("task:addition", options, size=3000, seed=seed, split=split)
        kinds = set()
        for row in rows:
            sign = "+" if "+" in row["prompt"] else "-"
            kinds.add((sign, *sorted(row["prompt"].rstrip("=").split(sign))))
        return kinds

    held_out = problems("eval", 0)
    assert held_out
    for seed in range(3):
        assert not held_out & problems("train", seed)


def test_sums_have_as_many_terms_as_asked_for():
    rows = GeneratedRows("task:addition", {"digits": 2, "terms": 3}, size=50, seed=0, split="train")
    for row in rows:
        numbers = row["prompt"].rstrip("=").split("+")
        assert len(numbers) == 3 and sum(map(int, numbers)) == int(row["answer"])
    for options in ({"terms": 1}, {"terms": 3, "subtraction": True}):
        with pytest.raises(ValueError, match="data.task_options.terms: must be from 2 to 100"):
            GeneratedRows("task:addition", options, size=1, seed=0, split="train")


def test_subtraction_is_right_and_partial_reward_counts_digits():
    options = {"digits": 2, "subtraction": True, "partial": True}
    rows = GeneratedRows("task:addition", options, size=200, seed=0, split="train")
    assert any("-" in row["prompt"] for row in rows)
    for row in rows:
        assert str(eval(row["prompt"].rstrip("="))) == row["answer"]  # our own digits and signs
    assert rows.task.score_answer("579", {"answer": "579"}) == 1.0
    assert rows.task.score_answer("570", {"answer": "579"}) == pytest.approx(2 / 3)
    assert rows.task.score_answer("", {"answer": "579"}) == 0.0


def test_slips_fall_on_single_digits_of_the_mistaken_rows():
    options = {"digits": 3, "mistakes": 0.5, "slips": 0.6}
    rows = GeneratedRows("task:addition", options, size=2000, seed=0, split="train")
    slipped = [row for row in rows if "completion" in row]
    assert len(slipped) / len(rows) == pytest.approx(0.5, abs=0.05)
    off = [
        (int(given) - int(right)) % 10
        for row in slipped
        for given, right in zip(row["completion"], row["answer"], strict=True)
    ]
    assert set(off) == {0, 1} and sum(off) / len(off) == pytest.approx(0.6, abs=0.03)
    whole = make_task("task:addition", {"mistakes": 1.0}).row(0, 7, split="train")
    assert int(whole["completion"]) == int(whole["answer"]) + 1


def test_unknown_tasks_and_options_name_the_nearest():
    for task, options, words in (
        ("task:adition", {}, "did you mean addition"),
        ("task:addition", {"digit": 3}, "did you mean digits"),
        ("task:addition", {"digits": "3"}, "expected int"),
        ("task:addition", {"digits": 0}, "from 1 to 100"),
        ("task:addition", {"mistakes": 0.5, "slips": 1.5}, "slips: must be a share"),
        ("task:addition", {"slips": 0.5}, "mistakes is 0"),
        ("task:addition_pairs", {"slips": 0.5}, "slips: task:addition_pairs has no such option"),
    ):
        with refused(words):
            make_task(task, options)
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="did you mean chain_sum"):
        make_task("reasoning_gym:chain_sums", {})
    with pytest.raises(ValueError, match="task_options.*colour"):
        make_task("reasoning_gym:chain_sum", {"colour": 3}).row(0, 0, split="train")


def test_reasoning_gym_rows_are_deterministic_disjoint_and_graded():
    pytest.importorskip("reasoning_gym")

    def rows(split, seed=0, size=200):
        options = {"max_terms": 2, "max_digits": 1}
        name = "reasoning_gym:chain_sum"
        return GeneratedRows(name, options, size=size, seed=seed, split=split)

    train, held_out = rows("train"), rows("eval")
    assert list(train) == list(rows("train"))
    assert train[7] == rows("train")[7]
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    near = rows("train", seed=1)
    same = sum(train[i + 1]["prompt"] == near[i]["prompt"] for i in range(50))
    assert same < 25, "near seeds give shifted copies"
    assert train.task.score_answer(train[3]["answer"], train[3]) == 1.0
    assert train.task.score_answer("nothing", train[3]) < 0.5
