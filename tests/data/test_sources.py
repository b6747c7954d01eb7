"""Several sources of rows: how they are written down, their shares, metrics and evaluations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from spmdrl import config
from spmdrl.check.settings import validate
from spmdrl.config import Config, SourceSettings
from spmdrl.credit import sequence_advantages
from spmdrl.data.examples import SupervisedSource
from spmdrl.data.prompt_order import WeightedOrder
from spmdrl.data.prompts import PromptSource
from spmdrl.data.sources import Chain
from spmdrl.rollout.recordings import find_recorded, read_table
from spmdrl.tools.commands.evaluate import evaluation_config
from spmdrl.tools.foreign_code import named_code
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from spmdrl.types import Batch, Prompt
from spmdrl.workers.pool import RewardPool
from tests.helpers.built import changed, examples, good, made, refused, small_model
from tests.helpers.pool_runs import drained
from tests.helpers.ragged import scalars_of
from tests.helpers.ranks import run_ranks

PLAIN = character_tokenizer()


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --------------------------------------------------------------------------- as they are written


def test_sources_are_read_from_files_and_flags_and_written_back(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: m}\n"
        "data:\n"
        "  size: 7\n"
        "  task_options: {digits: 1}\n"
        "  train:\n"
        "    - {path: 'task:addition', weight: 3, task_options: {digits: 2}}\n"
        "    - {path: a/b.jsonl, weight: 1, size: 5, columns: {prompt: q}}\n"
        "  eval: [x/b.jsonl, y/b.jsonl]\n"
    )
    cfg = config.load_yaml(path)
    path.write_text(config.dump(cfg))
    assert config.load_yaml(path) == cfg
    assert parse_flags(path, "--rewards.functions", "f:g").data == cfg.data
    first, second = cfg.data.sources("train")
    assert (first.name, first.size, first.task_options) == ("addition", 7, {"digits": 2})
    assert (second.name, second.size, second.columns) == ("b", 5, {"prompt": "q"})
    assert [(s.name, s.size) for s in cfg.data.sources("eval")] == [("b_0", 256), ("b_1", 256)]
    by_flag = parse_flags(path, "--data.train", "a.jsonl", "b.jsonl", "--rewards.functions", "f:g")
    assert by_flag.data.train == (SourceSettings("a.jsonl"), SourceSettings("b.jsonl"))
    flow = "[{path: a.jsonl, weight: 2}, b.jsonl]"
    by_flag = parse_flags(path, f"--data.train={flow}", "--rewards.functions", "f:g")
    assert by_flag.data.train == (SourceSettings("a.jsonl", weight=2.0), SourceSettings("b.jsonl"))
    one = made(data=dict(train="data/gsm8k/train.jsonl", size=3)).data.sources("train")
    assert one == (SourceSettings("data/gsm8k/train.jsonl", name="train", size=3),)


def parse_flags(path: Path, *words: str) -> Config:
    from spmdrl.config.read import read

    return read(["--config", str(path), *words], prog="p")


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([{"path": "a.jsonl", "weigth": 1}], "data.train: [0]: unknown key 'weigth'; did you mean"),
        ([{"path": "a.jsonl"}, {"path": 7}], "data.train: [1]: {path: ...}: expected str, got 7"),
        ([["a.jsonl"]], "data.train: [0]: expected {path, name, weight"),
    ],
)
def test_sources_that_cannot_be_read_are_refused_by_place(sources, said):
    with refused(said):
        config.from_tree({"data": {"train": sources}})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (dict(train=[{"weight": 1}]), "data.train[0].path: is required and empty"),
        (dict(train=["a.jsonl", {"path": "b.jsonl", "weight": -1}]), "data.train[1].weight: must"),
        (dict(train=["a.jsonl", {"path": "b.jsonl", "weight": 1}]), "data.train[0].weight: is mis"),
        (
            dict(train=[{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 99_999}]),
            "the least share that a source can have is 0.0001",
        ),
        (dict(eval=[{"path": "a.jsonl", "weight": 1}]), "data.eval[0].weight: evaluation takes"),
        (dict(train=["a.jsonl", "task:addition"], size=0), "data.train[1].size: a generated task"),
        (dict(eval=["task:addition"], eval_size=0), "data.eval[0].size: a generated task"),
        (dict(train=[{"path": "a.jsonl", "name": "a b"}]), "data.train[0].name: 'a b' names metr"),
        (
            dict(train=[{"path": "a.jsonl", "name": "x"}, {"path": "b.jsonl", "name": "x"}]),
            "data.train: two sources are called 'x'",
        ),
        (
            dict(train=[{"path": "task:addition", "columns": {"prompt": "q"}}]),
            "data.train[0].columns: renames columns of files",
        ),
        (
            dict(train=[{"path": "a.jsonl", "task_options": {"digits": 1}}]),
            "data.train[0].task_options: a.jsonl is no generated task",
        ),
        (
            dict(train="a.jsonl", task_options={"digits": 1}),
            "data.task_options: {'digits': 1} are of a generated task, and of a.jsonl none takes",
        ),
        (
            dict(
                train=[{"path": "task:addition", "task_options": {"digits": 2}}, "a.jsonl"],
                task_options={"digits": 1},
            ),
            "and of task:addition, a.jsonl none takes them",
        ),
        (dict(train=["task:addition", "a.jsonl"]), "is empty and data.train (a.jsonl) is not"),
        (dict(eval="a.jsonl"), "is empty and data.eval (a.jsonl) is not"),
    ],
)
def test_sources_that_cannot_be_used_are_refused_by_name(data, said):
    tree = {"model": {"path": "m"}, "data": {"train": "task:addition", "size": 10} | data}
    problems = validate(config.from_tree(tree))
    assert any(said in problem for problem in problems), problems


def test_an_agent_may_return_the_rewards_of_rows_without_a_function():
    tree = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}}
    assert any("rewards.functions: is empty" in own for own in validate(config.from_tree(tree)))
    assert not validate(config.from_tree(tree | {"rollout": {"agent": "a.py:solve"}}))


def test_a_grader_for_sources_with_different_options_is_refused():
    sources = [{"path": "task:addition", "task_options": {"digits": n}} for n in (1, 2)]
    cfg = config.from_tree({"model": {"path": "m"}, "data": {"train": sources, "size": 9}})
    assert not validate(cfg)
    problems = validate(changed(cfg, rewards=dict(functions=("task:addition",))))
    assert any("different task_options" in problem for problem in problems), problems
    assert not validate(good(rewards=dict(functions=("task:addition",))))


def test_a_run_is_evaluated_with_the_options_that_its_held_out_rows_take():
    held_out = [{"path": "task:addition", "task_options": {"digits": 3}}]
    data = {"train": "task:addition", "size": 9, "task_options": {"digits": 2}}
    for own, taken in ((held_out, {}), ("task:addition", {"digits": 2})):
        tree = {"model": {"path": "m"}, "data": data | {"eval": own, "eval_size": 9}}
        cfg = evaluation_config(config.from_tree(tree), model="m", world_size=1)
        assert cfg.data.task_options == taken and not validate(cfg)


# --------------------------------------------------------------------------- their order


def test_a_chain_is_its_parts_one_after_the_other():
    chain = Chain([range(3), [10, 12], range(0), range(20, 22)])
    assert list(chain) == [0, 1, 2, 10, 12, 20, 21] and chain[2:5] == [2, 10, 12]
    assert [chain.place(i) for i in (2, 3, 5)] == [(0, 2), (1, 0), (3, 0)]
    with pytest.raises(IndexError):
        chain[7]


@examples(
    30,
    parts=st.lists(st.tuples(st.integers(30, 60), st.floats(0.05, 10)), min_size=1, max_size=4),
    per_step=st.integers(1, 24),
    seed=st.integers(0, 2**70),
    shuffle=st.booleans(),
    steps=st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
)
def test_every_step_has_of_each_source_what_its_weight_says(parts, per_step, seed, shuffle, steps):
    sizes, weights = zip(*parts)
    names = [str(i) for i in range(len(parts))]
    how = dict(names=names, per_step=per_step, seed=seed, shuffle=shuffle)
    order, fresh = WeightedOrder(sizes, weights, **how), WeightedOrder(sizes, weights, **how)
    begins = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for step in steps:
        rows = order.at(step)
        assert len(rows) == per_step  # some twice, where an epoch ends within the step
        assert rows == [fresh.row(step * per_step + slot) for slot in range(per_step)]
        counts = Counter(next(i for i, b in enumerate(begins) if row < b) for row in rows)
        for i, weight in enumerate(weights):
            share = per_step * weight / sum(weights)
            assert abs(counts[i] - share) < len(parts) + 0.01


def test_a_source_gives_each_of_its_rows_before_any_of_them_again():
    how = dict(names=["a", "b"], per_step=8, seed=3, shuffle=True)
    order = WeightedOrder([30, 40], [1, 3], **how)
    rows = [row for step in range(60) for row in order.at(step)]
    small, large = [r for r in rows if r < 30], [r for r in rows if r >= 30]
    assert (len(small), len(large)) == (120, 360)
    for own, size in ((small, 30), (large, 40)):
        epochs = [own[i : i + size] for i in range(0, len(own), size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert epochs[0] != epochs[1]
    slots = {slot for step in range(60) for slot, row in enumerate(order.at(step)) if row < 30}
    assert slots == set(range(8))  # no place of a batch is always one source's
    plain = WeightedOrder([30, 40], [1, 3], **how | {"shuffle": False})
    assert plain.at(0) == plain.at(0) and [r for r in plain.at(0) if r < 30] == [0, 1]


def test_a_source_too_small_for_its_weight_is_refused():
    how = dict(per_step=8, seed=0, shuffle=True)
    with refused("data.train: few has 3 usable rows", "up to 4 of the 8 prompts"):
        WeightedOrder([100, 3], [1, 1], names=["many", "few"], **how)
    WeightedOrder([100, 4], [1, 1], names=["many", "few"], **how)


# --------------------------------------------------------------------------- their rows


def sources_of(tmp_path: Path, **data: object) -> Config:
    ours = jsonl(
        tmp_path / "ours.jsonl", [{"q": f"ours{i}", "a": "x", "answer": "7"} for i in range(40)]
    )
    columns = {"prompt": "q", "completion": "a"}
    tree = {
        "train": [
            {"path": ours, "columns": columns, "weight": 1},
            {"path": "task:addition", "size": 90, "weight": 3},
        ],
        "eval": [
            {"path": "task:addition", "name": "two", "task_options": {"digits": 2}},
            {"path": ours, "columns": columns, "size": 3},
        ],
        "eval_size": 5,
    }
    cfg = config.from_tree({"model": {"path": "m"}, "data": tree | data})
    return changed(cfg, batch=dict(prompts_per_step=8), data=dict(max_prompt_tokens=64))


def test_prompts_come_from_each_source_by_weight_and_say_which(tmp_path):
    source = PromptSource(sources_of(tmp_path), PLAIN)
    for step in (0, 7):
        prompts = source.at(step)
        assert Counter(p.source for p in prompts) == {0: 2, 1: 6}
        assert all(p.text.startswith("ours") == (p.source == 0) for p in prompts)
        assert all((p.index < 40) == (p.source == 0) for p in prompts)
    held_out = source.eval()
    assert [p.source for p in held_out] == [2] * 5 + [3] * 3
    assert [p.index for p in held_out] == list(range(8))
    units = SupervisedSource(sources_of(tmp_path), PLAIN).units_at(0)
    assert Counter(unit.source for unit in units) == {0: 2, 1: 6}


def test_without_weights_an_epoch_takes_each_row_of_all_sources_once(tmp_path):
    files = [jsonl(tmp_path / f"{n}.jsonl", [{"prompt": f"{n}"}] * 12) for n in "ab"]
    source = PromptSource(sources_of(tmp_path, train=files), PLAIN)
    rows = [p.index for step in range(3) for p in source.at(step)]
    assert sorted(rows) == list(range(24)) and rows != sorted(rows)


def test_rows_of_a_later_source_are_refused_by_file_and_line(tmp_path):
    bad = jsonl(tmp_path / "bad.jsonl", [{"prompt": "fine"}, {"prompt": "x" * 99}])
    with refused(f"{bad}:2: 99 tokens"):
        PromptSource(sources_of(tmp_path, train=["task:addition", bad], size=20), PLAIN)


# --------------------------------------------------------------------------- their rewards

FUNCTIONS = """
def one(data_source, solution_str, ground_truth=None, extra_info=None):
    return 1.0

def rank(prompts, completions, **columns):
    return [sum(other < own for other in completions) for own in completions]
"""


def rewards_of(tmp_path: Path, **fields: object) -> Config:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    own = f"{tmp_path}/own.py"
    train = [
        {"path": "a.jsonl", "rewards": [f"{own}:one"]},
        {"path": "task:addition", "size": 5, "task_options": {"digits": 1, "partial": True}},
        {"path": "b.jsonl", "rewards": [f"{own}:rank", f"{own}:one"]},
    ]
    return config.from_tree({"model": {"path": "m"}, "data": {"train": train}} | fields)


def test_each_source_has_its_own_rewards_and_a_task_its_grader(tmp_path):
    cfg = rewards_of(tmp_path)
    assert not validate(cfg)
    assert [spec.rpartition(":")[2] for spec in cfg.reward_functions] == ["one", "addition", "rank"]
    with RewardPool(cfg) as pool:
        pool.start()
        for source in range(3):
            for i, text in enumerate(("12", "22")):
                prompt = Prompt(0, (1,), "q", {"prompt": "q", "answer": "12"}, source=source)
                pool.submit(
                    (source, i),
                    prompt=prompt,
                    response_text=text,
                    response_tokens=[1],
                    truncated=False,
                    group=source,
                )
            pool.close_group(source)
        found = {result.key: result for result in drained(pool)}
    assert not [result.message for result in found.values() if result.failure]
    parts = {key: result.parts for key, result in found.items()}
    assert parts[0, 0] == parts[0, 1] == {"one": 1.0}
    assert (parts[1, 0], parts[1, 1]) == ({"addition": 1.0}, {"addition": 0.5})
    assert (parts[2, 0], parts[2, 1]) == ({"rank": 0.0, "one": 1.0}, {"rank": 1.0, "one": 1.0})
    assert [found[2, i].value for i in (0, 1)] == [1.0, 2.0]


def test_rewards_in_common_have_their_weights_and_own_ones_weight_one(tmp_path):
    own = f"{tmp_path}/own.py"
    cfg = rewards_of(tmp_path, rewards={"functions": [f"{own}:rank"], "weights": [3.0]})
    pool = RewardPool(cfg)
    assert pool._setup.functions == {"rank": f"{own}:rank", "one": f"{own}:one"}
    assert pool._setup.weights == (3.0, 1.0)
    applies = [source.applies for source in pool._setup.sources]
    assert applies == [("one",), ("rank",), ("rank", "one")]


def test_an_advantage_of_parts_weighs_the_sources_own_functions_too(tmp_path):
    rewards = {"functions": [f"{tmp_path}/own.py:rank"], "weights": [3.0]}
    cfg = rewards_of(tmp_path, rewards=rewards, algorithm={"advantage": "gdpo"})
    assert not validate(cfg)
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    rewards = parts @ torch.tensor([3.0, 1.0], dtype=torch.float64)
    scalars = scalars_of(rewards, [0, 0, 1, 1], reward_parts=parts)
    own = Batch(scalars, updates=(), update_ids=torch.zeros(4, dtype=torch.int64))
    found = sequence_advantages(own, cfg=cfg)
    # 3 and -3 of the first group, 3 - 1 and 1 - 3 of the second, over their spread.
    assert found.tolist() == pytest.approx([x / 6.5**0.5 for x in (3, -3, 2, -2)], rel=1e-5)


def test_rewards_of_sources_that_cannot_be_are_refused(tmp_path):
    whole = rewards_of(tmp_path, rewards={"scope": "step"})
    with RewardPool(whole) as pool, refused("rank scores whole steps, and some sources"):
        pool.start()
    model = rewards_of(tmp_path, rewards={"functions": ["model:m"]})
    assert any("model:m scores the rows of all sources" in text for text in validate(model))
    offline = rewards_of(tmp_path, algorithm={"objective": "sft"}, layout={"placement": "offline"})
    assert any("data.train[0].rewards: nothing is sampled" in text for text in validate(offline))
    assert any("own.py:one" in text for text in named_code(rewards_of(tmp_path)))


# --------------------------------------------------------------------------- a run of them


def _trained(cfg: Config) -> None:
    from spmdrl.world.world import World
    from train import train

    train(cfg, World.start(cfg))


def test_a_run_reports_each_source_and_resumes_in_the_same_order_on_other_ranks(tmp_path):
    model = small_model(tmp_path / "m", hidden_size=32, layers=1, heads=2, kv_heads=1)
    (tmp_path / "own.py").write_text(
        "def grade(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(sum(map(ord, solution_str)) % 5)\n"
        "def of_sums(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'task:addition'\n"
        "    return 10 + len(solution_str)\n"
    )
    sources = sources_of(tmp_path).data
    train = tuple(
        changed(source, rewards=(f"{tmp_path}/own.py:of_sums",)) if source.weight == 3 else source
        for source in sources.train
    )
    sources = changed(sources, train=train)
    cfg = made(
        output_dir=str(tmp_path / "whole"),
        steps=4,
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=str(model), compute_dtype="float32"),
        batch=dict(prompts_per_step=8, group_size=2, tokens_per_microbatch=256),
        sampling=dict(max_response_tokens=3),
        engine=dict(kind="transformers", dtype="float32", max_num_seqs=64),
        rewards=dict(functions=(f"{tmp_path}/own.py:grade",)),
        rollout=dict(record=dict(every=1)),
        evaluate=dict(every_steps=4),
        report=dict(trackers=[]),
    )
    cfg = changed(cfg, data=vars(sources) | dict(max_prompt_tokens=16))
    run_ranks(1, _trained, cfg)
    cut = changed(cfg, output_dir=str(tmp_path / "cut"), steps=2)
    run_ranks(1, _trained, cut)
    run_ranks(2, _trained, changed(cut, steps=4, layout=dict(world_size=2)))

    whole, resumed = (prompts_of(tmp_path / name) for name in ("whole", "cut"))
    assert whole == resumed and len(whole) == 4
    for name in ("whole", "cut"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        trained = [row for row in rows if "policy/loss" in row]
        assert [row["source/ours/samples"] for row in trained] == [4] * 4
        assert [row["source/addition/samples"] for row in trained] == [12] * 4
        for row in trained:
            parts = 4 * row["source/ours/reward"] + 12 * row["source/addition/reward"]
            assert parts / 16 == pytest.approx(row["reward/mean"])
            assert row["source/ours/reward"] == row["reward/grade/mean"] < 5
            assert row["source/addition/reward"] == row["reward/of_sums/mean"] >= 10
        last = next(row for row in reversed(rows) if "eval/reward" in row)
        both = 5 * last["eval/two/reward"] + 3 * last["eval/ours/reward"]
        assert both / 8 == pytest.approx(last["eval/reward"])


def prompts_of(run: Path) -> dict[int, list[str]]:
    """Return the prompts of each recorded step."""
    found = find_recorded(run)
    return {
        step: sorted(
            row["prompt"] for file in found.files_of(step) for row in read_table(file).to_pylist()
        )
        for step in range(4)
    }
