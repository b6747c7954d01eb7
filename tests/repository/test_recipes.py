"""Recipes for GPUs, by their models' shapes alone: valid, they fit, what their heads say is so."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import datasets
import pytest

from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import Config, ModelSettings
from spmdrl.config.read import read
from spmdrl.data import row_files
from spmdrl.data.rows import ground_truth_of, prompt_of, read_rows
from spmdrl.model.model_shape import SHAPES, with_known_shape
from spmdrl.report.config_sizes import config_sizes
from spmdrl.rewards import graders
from spmdrl.tools.commands import fetch_problems, plan
from spmdrl.tools.commands.plan_examples import renewed
from spmdrl.tools.problem_sets import ASK
from tests.helpers.runs import ROOT

RECIPES = sorted(path.name for path in (ROOT / "configs").glob("gpu_*.yaml"))
RANKS = {"1.7b_1": 1, "1.7b_8": 8, "qwen3_8b_8": 8, "30b_a3b_16": 16}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def _recipe(name: str) -> Config:
    """Return a recipe with the shape that its head plans with for its model."""
    (shape,) = re.findall(r"--shape (\S+)", (ROOT / "configs" / name).read_text())
    cfg = read(["--config", f"configs/{name}"], prog="test")
    return replace(cfg, model=replace(cfg.model, path=str(SHAPES / shape)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_on_its_ranks_as_far_as_a_shape_can_tell(name):
    cfg = _recipe(name)
    (ranks,) = [count for part, count in RANKS.items() if name.endswith(f"{part}.yaml")]
    assert cfg.layout.world_size == ranks and config_sizes(cfg)
    assert validate(cfg) == [] and fit_problems(cfg) == []
    problems = {"gsm8k", "math"} & set(cfg.data.train.split("/"))
    assert f"fetch_problems {problems.pop()}" in (ROOT / "configs" / name).read_text()
    assert cfg.output_dir == f"runs/{name.removesuffix('.yaml')}"
    is_mixture = "30b" in name
    assert (cfg.algorithm.loss == "gspo") == is_mixture and cfg.algorithm.correction == "tis"


@pytest.mark.parametrize("name", RECIPES)
def test_the_shape_of_a_recipe_comes_along(name):
    cfg = read(["--config", f"configs/{name}"], prog="test")
    assert with_known_shape(cfg) == _recipe(name)


def test_a_folder_goes_before_a_shape_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = Config(model=ModelSettings(path="Qwen/Qwen3-8B"))
    assert with_known_shape(cfg).model.path == str(SHAPES / "qwen3-8b")
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    assert with_known_shape(cfg) == cfg
    other = Config(model=ModelSettings(path="somebody/Qwen3-8B"))
    assert with_known_shape(other) == other


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_of_a_recipe_says_what_the_planner_says_and_that_it_fits(name):
    text = (ROOT / "configs" / name).read_text()
    assert f"$ python -m spmdrl plan --config configs/{name} --shape " in text
    assert renewed(text) == text, "run `python -m spmdrl plan_examples configs/gpu_*.yaml`"
    (held, room) = re.search(r"^#     fits: .* holds ([\d.]+) of ([\d.]+) GiB", text, re.M).groups()
    assert float(held) <= float(room) < 80
    assert renewed(text.replace("#     fits", "#     is far too large")) == text
    assert "What to expect of the reward" in text and "arXiv" in text


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_decodes_all_sequences_of_a_step_at_once(name, capsys):
    assert config_sizes(_recipe(name))["engine rounds per step"].startswith("1: ")
    command = ["--config", f"configs/{name}", "--top", "0"]
    assert plan.main(command) == 0 and "would decode" not in capsys.readouterr().out
    assert plan.main([*command, "--engine.max-num-seqs", "8"]) == 0
    assert "engine.max_num_seqs" in capsys.readouterr().out.partition("would decode")[0]


def test_every_recipe_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert len(RECIPES) == len(RANKS)
    assert [name for name in RECIPES if f"`configs/{name}`" not in readme] == []


# --------------------------------------------------------------------------- their problems


HUB = {
    ("openai/gsm8k", "main"): [
        {"question": "How many clips? ", "answer": "She sold 48/2 = <<48/2=24>>24\n#### 1,072"}
    ],
    ("nlile/hendrycks-MATH-benchmark", "default"): [
        {"problem": "Find the distance.", "solution": "...", "answer": "3\\sqrt{13}"},
        {"problem": "Solve.", "solution": "...", "answer": "(-\\infty, 2) \\cup (3, \\infty)"},
        {"problem": "Who wins?", "solution": "...", "answer": "\\text{Evelyn}"},
    ],
}
RIGHT = {"1,072": "1072", "3\\sqrt{13}": "\\sqrt{117}"}


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(HUB[name, config])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(row_files, "find_on_hub", lambda *_, **__: None)
    return asked


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_fetched_problems_are_rows_of_ours_whose_right_answers_are_rewarded(name, hub, tmp_path):
    fetch_problems.main([name, "--out", str(tmp_path / "new" / name)])
    assert [split for _, _, split in hub] == ["train", "test"]
    for split in ("train", "test"):
        rows = read_rows(str(tmp_path / "new" / name / f"{split}.jsonl"))
        (origin,) = {key for key in HUB if key[0] == rows[0]["data_source"]}
        assert len(rows) == len(HUB[origin])
        for row, theirs in zip(rows, HUB[origin]):
            (message,) = prompt_of(row)
            problem = theirs.get("question") or theirs.get("problem")
            assert message["content"] == f"{problem.strip()}\n\n{ASK}"
            answer = theirs["answer"].rpartition("#### ")[2]
            right = ground_truth_of(row)
            for given in (answer, RIGHT.get(answer, answer)):
                response = f"So it is \\boxed{{{given}}}."
                assert graders.math(row["data_source"], response, right)["score"] == 1, row
            for wrong in ("3", "13", "24", "2"):
                response = f"So it is \\boxed{{{wrong}}}."
                assert graders.math(row["data_source"], response, right)["score"] == 0, row


def test_a_set_with_other_columns_is_refused_and_leaves_no_file(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(HUB, ("openai/gsm8k", "main"), [{"problem": "1 + 1?", "answer": "2"}])
    with pytest.raises(ValueError, match="no text in column 'question'; the columns are problem"):
        fetch_problems.fetch("gsm8k", out=tmp_path / "gsm8k")
    assert not list(tmp_path.iterdir())


def test_a_line_of_a_fetched_file_is_json_of_its_own(hub, tmp_path):
    fetch_problems.main(["math", "--out", str(tmp_path)])
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["answer"][:7] for line in lines] == ["\\boxed{"] * 3
