"""Recipes of configs/recipes/: valid, they fit, and their heads say what is so."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks import recipes as twins
from benchmarks.start import as_flags
from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.config.read import read
from spmdrl.model.model_shape import SHAPES, with_known_shape
from spmdrl.report.config_sizes import config_sizes
from spmdrl.report.glossary import lookup
from spmdrl.tools.commands.plan_examples import renewed
from spmdrl.tools.problem_sets import SETS
from tests.helpers.runs import ROOT

FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PARTS = (
    "Paper: arXiv ",
    "Run",
    "The plan (docs/planning.md; computed, not measured",
    "It works when:",
)
NEEDS_TORCHVISION = "engine.kind: vllm with a qwen2_5_vl: vLLM's classes for models that see import"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def head_of(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text().partition("\n\n")[0]


def recipe(name: str) -> Config:
    """Return a recipe with the shape that its head plans with for its model."""
    cfg = read(["--config", f"configs/recipes/{name}.yaml"], prog="test")
    if shape := re.search(r"--shape (\S+)", head_of(name)):
        return replace(cfg, model=replace(cfg.model, path=str(SHAPES / shape[1])))
    return with_known_shape(cfg)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_as_far_as_a_shape_can_tell(name):
    cfg = recipe(name)
    assert validate(cfg) == [] and config_sizes(cfg)
    # The CPU's installation leaves torchvision out.
    assert [p for p in fit_problems(cfg) if not p.startswith(NEEDS_TORCHVISION)] == []
    assert cfg.output_dir == f"runs/{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_of_a_recipe_has_its_parts_and_names_what_exists(name):
    head = head_of(name)
    places = [head.find(f"\n# {part}") for part in PARTS]
    assert places == sorted(places) and places[0] > 0, dict(zip(PARTS, places))
    works = head.partition("# It works when:")[2]
    assert re.search(r"as dapo_qwen3_8b|`\w+/\w+", works), "it names no metric"
    for metric in re.findall(r"`(\w+/[\w/]+)`", works):
        assert lookup(metric)
    names = {source.name for source in recipe(name).data.sources("eval")}
    assert set(re.findall(r"`eval/(\w+)/reward`", works)) <= names


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_a_recipe_starts_its_ranks_and_fetches_its_data(name):
    cfg = recipe(name)
    head = head_of(name)
    own = rf"--config configs/recipes/{re.escape(name)}\.yaml"
    starts = {
        1: rf"python train\.py {own}",
        8: rf"torchrun --standalone --nproc-per-node 8 train\.py {own}",
        16: rf"sbatch slurm/multi_node_{cfg.layout.placement}\.sbatch {own}",
    }
    assert re.search(starts[cfg.layout.world_size], head)
    read_here = {
        path.split("/")[1]
        for split in ("train", "eval")
        for path in cfg.data.paths(split)
        if path.startswith("data/")
    }
    fetched = set(re.findall(r"fetch_problems (\w+)", head))
    assert fetched == read_here and fetched <= SETS.keys()
    for split in ("train", "eval"):
        for path in cfg.data.paths(split):
            if path.startswith("data/"):
                assert (
                    path.rpartition("/")[2].removesuffix(".jsonl")
                    in SETS[path.split("/")[1]].splits
                )


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_of_a_recipe_says_what_the_planner_says_and_that_it_fits(name):
    head = head_of(name)
    assert f"$ python -m spmdrl plan --config configs/recipes/{name}.yaml" in head
    assert renewed(head) == head, "run `python -m spmdrl plan_examples configs/recipes/*.yaml`"
    (held, room) = re.search(r"^#     fits: .* holds ([\d.]+) of ([\d.]+) GiB", head, re.M).groups()
    assert float(held) <= float(room)
    assert re.search(r"^#     step: [\d.]+ to [\d.]+ s", head, re.M)


def test_recipes_stay_short_because_they_have_bases():
    texts = {name: (FOLDER / f"{name}.yaml").read_text() for name in RECIPES}
    assert len(RECIPES) == 15
    alone = {name for name, text in texts.items() if "\nbase: " not in text}
    assert alone == {"sft_llama3_8b", "ppo_reward_model_llama3_8b"}
    assert all(len(text.splitlines()) < 95 for text in texts.values())


def test_every_recipe_and_its_paper_is_in_the_page():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"`(\w[\w.]*_(?:qwen|llama)[\w.]*)`", page)) == set(RECIPES)
    for line in page.splitlines():
        names = [name for name in RECIPES if f"`{name}`" in line]
        heads = "".join(map(head_of, names))
        assert [n for n in re.findall(r"\d{4}\.\d{5}", line) if names and n not in heads] == []


@pytest.mark.parametrize("name", twins.RUNS)
def test_a_twin_runs_as_far_as_its_config_tells(name):
    run = twins.RUNS[name]
    flags = as_flags(run.flags)
    cfg = read(["--config", f"configs/{run.config}", *flags], prog="test")
    # The program makes some models before it runs this.
    problems = [problem for problem in validate(cfg) if str(twins.FOLDER) not in problem]
    assert not problems and cfg.layout.world_size == run.ranks


def test_twins_compare_runs_that_are_there_by_metrics_that_are():
    for name, twin in twins.TWINS.items():
        assert any(recipe.startswith(f"{name}_") for recipe in RECIPES)
        assert {twin.run, twin.against or twin.run} <= twins.RUNS.keys()
        for metric in twin.metrics:
            assert lookup(metric)
