"""Sources of rows with environments of their own, beside others and beside final responses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from spmdrl import config
from spmdrl.check.inputs import input_problems
from spmdrl.check.settings import validate
from spmdrl.checkpoint.restore import config_differences
from spmdrl.config import Config
from spmdrl.data.tokenizer import read_tokenizer
from spmdrl.environments.protocol import Response
from spmdrl.environments.tool_calls import hermes
from spmdrl.rollout.episode import Draw, Episode, Group
from spmdrl.rollout.loop import Loop
from spmdrl.rollout.recordings import find_recorded, read_table
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.rollout.tree import Tree
from spmdrl.same_run.differences import config_of
from spmdrl.tools.commands.evaluate import evaluation_config
from spmdrl.tools.foreign_code import named_code
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardPool
from tests.helpers.built import changed, generating, refused
from tests.helpers.pool_runs import drained
from tests.helpers.ranks import run_ranks

GAME = {"path": "task:guess_number", "environment": {"name": "guess_number"}}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'


def tree_of(*train: Any, data: dict | None = None, **sections: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"train": list(train), "size": 9} | (data or {})}
    return config.from_tree(tree | sections)


# --------------------------------------------------------------------------- as they are written


def test_a_source_is_silent_names_its_own_or_has_none(tmp_path):
    tools = {"name": "tools", "tools": {"search": {"results": 3}, "calculator": {}}}
    cfg = tree_of(
        GAME,
        "a.jsonl",
        {"path": "b.jsonl", "environment": "none"},
        data={"eval": ["c.jsonl", GAME, {"path": "d.jsonl", "environment": "none"}]},
        rollout={"environment": tools},
    )
    game = GAME["environment"]
    given = [("data.train[0].environment", game), ("rollout.environment", tools)]
    assert cfg.environments("train") == [*given, ("data.train[2].environment", {})]
    fields = dict(given) | {"data.eval[1].environment": game}
    assert cfg.environment_fields() == fields
    assert len(cfg.environments()) == len(cfg.data.all_sources()) == 6
    path = tmp_path / "c.yaml"
    path.write_text(config.dump(cfg))
    assert config.load_yaml(path) == cfg
    with refused("data.train: [0]: {environment: ...}: expected {NAME: VALUE}|none, got 'no"):
        tree_of({"path": "a.jsonl", "environment": "not"})


def test_another_environment_of_a_source_makes_it_another_config():
    cfg = tree_of("a.jsonl", GAME)
    saved = config_of(cfg)
    assert config_differences(saved, cfg) == []
    saved["data.train"][1]["environment"] = {}
    (line,) = config_differences(saved, cfg)
    assert line.name == "data.train" and "guess_number" in str(line)


PENALTY = {"sampling": {"presence_penalty": 0.5}}


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (tree_of(GAME, **PENALTY), "presence_penalty: 0.5 with data.train[0].environment"),
        (
            tree_of("task:addition", data={"eval": ["task:addition", GAME]}, **PENALTY),
            "presence_penalty: 0.5 with data.eval[1].environment",
        ),
        (
            tree_of(GAME, algorithm={"objective": "sft"}, layout={"placement": "offline"}),
            "data.train[0].environment: nothing is sampled under this objective",
        ),
        (
            tree_of(GAME, rollout={"environment": {"name": "task"}}),
            "rollout.environment: {'name': 'task'} is of no rows, since data.train[0].environment",
        ),
        (
            tree_of("task:addition", data={"eval": [GAME]}, algorithm={"advantage": "gigpo"}),
            "algorithm.advantage: gigpo with data; it compares turns",
        ),
        (
            tree_of(
                "a.jsonl",
                {"path": "b.jsonl", "environment": "none"},
                rollout={"environment": {"name": "guess_number"}},
            ),
            "rewards.functions: is empty and data.train (b.jsonl) is not a generated task",
        ),
    ],
)
def test_what_an_environment_of_a_source_does_not_go_with_is_refused_by_its_field(cfg, said):
    problems = validate(cfg)
    assert any(said in problem for problem in problems), problems
    assert not [p for p in validate(tree_of(GAME, "task:addition")) if "environment" in p]


def test_one_that_cannot_open_its_first_row_is_refused_with_source_and_field(tiny_model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Guess.", "answer": "seven"}) + "\n")
    bad = {"path": str(rows), "environment": {"name": "guess_number"}}
    cfg = changed(tree_of(GAME, bad, data={"eval": [bad]}), model=dict(path=str(tiny_model)))
    cfg = changed(cfg, layout=dict(world_size=2), output_dir=str(tmp_path / "out"))
    found = [problem for problem in input_problems(cfg) if "cannot open" in problem]
    assert [problem.partition(": ")[0] for problem in found] == [
        "data.train[1].environment",
        "data.eval[0].environment",
    ]
    for problem, place in zip(found, ("data.train[1]", "data.eval[0]")):
        assert f"guess_number cannot open the first row of {place}" in problem


def test_code_that_a_source_names_is_named_as_any_other():
    cfg = tree_of({"path": "a.jsonl", "environment": {"name": "my.py:Game", "of": "x:y"}}, GAME)
    assert named_code(cfg) == [
        "data.train[0].environment.name: my.py:Game",
        "data.train[0].environment.of: x:y",
    ]


def test_an_evaluation_takes_what_held_out_sources_are_played_in():
    tools = {"name": "tools", "tools": "calculator"}
    cfg = tree_of("task:addition", data={"eval": [GAME]}, rollout={"environment": tools})
    own = evaluation_config(cfg, model="m", world_size=1)
    assert set(own.environment_fields()) == {f"data.{s}[0].environment" for s in ("train", "eval")}
    assert not [problem for problem in validate(own) if "environment" in problem]
    common = changed(cfg, data=dict(eval="task:addition"))
    own = evaluation_config(common, model="m", world_size=1)
    assert own.environment_fields() == {"rollout.environment": tools}
    agent = dict(agent="a.py:solve", agents_at_once=3, replay_schedule="run")
    own = evaluation_config(
        changed(cfg, rollout=agent | dict(environment={})), model="m", world_size=1
    )
    assert (own.rollout.agent, own.rollout.agents_at_once) == ("a.py:solve", 3)
    assert not own.rollout.replay_schedule


# --------------------------------------------------------------------------- in the workers


def test_one_pool_plays_and_scores_each_source_as_it_says(tmp_path):
    (tmp_path / "own.py").write_text("def nothing(completions, **row): return [None]\n")
    cfg = tree_of(
        GAME,
        {"path": "task:addition", "name": "called"},
        {"path": "task:addition", "name": "final", "environment": "none"},
        {"path": "b.jsonl", "environment": "none", "rewards": [f"{tmp_path}/own.py:nothing"]},
        rollout={"environment": {"name": "tools", "tools": "calculator"}},
    )
    assert not validate(cfg)
    row = {"prompt": "2+3=", "answer": "5", "data_source": "task:addition"}
    with RewardPool(cfg) as pool:
        pool.start()
        assert list(pool.environments) == ["data.train[0].environment", "rollout.environment"]
        game, tools = pool.environments.values()
        assert (game["tools"], game["tool_parser"]) == ([], "")
        assert [tool["function"]["name"] for tool in tools["tools"]] == ["calculator"]
        for source in (0, 1):
            pool.open(source, row=row, source=source)
        opened = {result.key: result for result in drained(pool)}
        for source, text in ((0, "Is it 4?"), (1, CALL)):
            response = Response(text, hermes(text))
            packed = opened[source].environment
            pool.turn(source, environment=packed, response=response, source=source)
        said = {result.key: result.messages[0]["content"] for result in drained(pool)}
        assert said == {0: "higher", 1: "5"}
        for source in range(4):
            pool.submit(
                source,
                prompt=Prompt(0, (1,), "q", row, source=source),
                response_text="5",
                response_tokens=[1],
                truncated=False,
            )
        found = {result.key: result for result in drained(pool)}
    assert [found[i].value for i in range(4)] == [0.0, 1.0, 1.0, None]
    assert [found[i].parts for i in range(3)] == [{}, {"addition": 1.0}, {"addition": 1.0}]
    assert found[3].failure == "bad_value"
    says = f"nothing ({tmp_path}/own.py:1) returned None for this row; one reward function at least"
    assert says in found[3].message


def test_a_task_grades_its_rows_where_its_source_has_no_environment():
    sources = RewardPool(tree_of(GAME, "task:addition"))._setup.sources
    assert [source.environment for source in sources] == ["data.train[0].environment", ""]
    assert [source.is_own_grader for source in sources] == [True, True]  # GAME's worker says no
    assert [source.applies for source in sources] == [None, None]
    with refused("a.jsonl has neither an environment, an agent nor, as a generated task, a grader"):
        RewardPool(tree_of(GAME, "a.jsonl"))


# --------------------------------------------------------------------------- in a run


def mixed(model: str, folder: Path, **sections: Any) -> Config:
    """Return a run of games of several turns and sums of one."""
    (folder / "own.py").write_text(
        "def letters(completions, **row):\n    return [sum(map(ord, c)) % 5 for c in completions]\n"
    )
    game = GAME | {"name": "game", "task_options": {"low": 1, "high": 9, "held_out": False}}
    own = {"environment": {"name": "guess_number", "max_turns": 3}}
    sums = {"path": "task:addition", "name": "sums", "task_options": {"digits": 1, "partial": True}}
    cfg = tree_of(
        game | own | {"weight": 1, "rewards": [f"{folder}/own.py:letters"]},
        sums | {"weight": 1},
        data={"eval": [game | own, sums], "eval_size": 2, "size": 40, "max_prompt_tokens": 64},
    )
    cfg = changed(
        cfg,
        output_dir=str(folder / "out"),
        layout=dict(placement="split", world_size=2, trainer_ranks=1, device="cpu"),
        model=dict(path=model, compute_dtype="float32"),
        batch=dict(prompts_per_step=4, group_size=3, tokens_per_microbatch=512),
        # So that turns end soon: an untrained model draws every token about as often.
        sampling=dict(max_response_tokens=96, logit_bias={end_of_turn(model): 3.0}),
        engine=dict(kind="transformers", dtype="float32", max_num_seqs=1),
        report=dict(trackers=[]),
    )
    return changed(cfg, **sections)


def end_of_turn(model: str) -> str:
    return str(read_tokenizer(model).eos_token_id)


def trained(cfg: Config) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Run train.py; return what its engine was asked, and what it drew, by request."""
    from spmdrl.engine.transformers.engine import TransformersEngine
    from spmdrl.world.world import World
    from train import train

    asked, drawn = {}, {}
    add, step = TransformersEngine.add, TransformersEngine.step

    def spied_add(self, request):
        asked[request.key] = request.prompt
        add(self, request)

    def spied_step(self):
        finished = step(self)
        drawn.update((own.key, tuple(own.tokens.tolist())) for own in finished)
        return finished

    TransformersEngine.add, TransformersEngine.step = spied_add, spied_step
    train(cfg, World.start(cfg))
    return {key: (prompt, drawn[key]) for key, prompt in asked.items()}


def recorded(run: Path, step: int) -> dict[tuple[int, int], dict[str, Any]]:
    files = find_recorded(run).files_of(step)
    rows = [row for file in files for row in read_table(file).to_pylist()]
    assert all(math.isnan(row.pop("greedy_reward")) for row in rows)  # which equals nothing
    return {(row["group"], row["sample"]): row for row in rows}


LEARNT = ("step", "reward/", "rollout/", "environment/", "source/", "policy/", "eval/")


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without what a clock or the machine says."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in row.items() if k.startswith(LEARNT) and k != "reward/seconds"}
        for row in rows
    ]


def check_tokens(row: dict[str, Any], turns: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Check that a sample is, turn for turn, what the engine saw and drew."""
    tokens, mask = row["tokens"], [False] * len(row["tokens"])
    for prompt, completion in sorted(turns, key=lambda turn: len(turn[0])):
        begin, end = len(prompt), len(prompt) + len(completion)
        assert tuple(tokens[:end]) == prompt + completion
        mask[begin:end] = [True] * len(completion)
    assert mask == row["response_mask"] and row["turns"] == len(turns)


@pytest.mark.proves("environments", "split", "record", "transformers")
def test_a_run_mixes_games_and_final_responses_and_resumes(chat_model, tmp_path):
    cfg = mixed(
        chat_model,
        tmp_path,
        steps=3,
        rollout=dict(record=dict(every=1)),
        checkpoint=dict(every_steps=2),
        evaluate=dict(every_steps=3),
    )
    assert not [*validate(cfg), *input_problems(cfg)]
    seen = {key: turn for rank in run_ranks(2, trained, cfg) for key, turn in rank.items()}
    run, several = Path(cfg.output_dir), 0
    whole = {step: recorded(run, step) for step in range(3)}
    for step, rows in whole.items():
        is_sum = [bool(re.fullmatch(r"\d\+\d=", row["prompt"])) for row in rows.values()]
        assert (len(rows), sum(is_sum)) == (12, 6)
        for (group, sample), row in rows.items():
            begin = f"train-{step}-{group}-{sample}@"
            check_tokens(row, [turn for key, turn in seen.items() if key.startswith(begin)])
            several += row["turns"] > 1
            assert row["turns"] == 1 or "Guess my number from 1 to 9." in row["prompt"]
    assert several >= 3, "no game had a second turn: the case is not tested"
    before = [row for row in metrics_of(run) if "policy/loss" in row]
    for row in before:
        assert row["source/game/samples"] == row["source/sums/samples"] == 6
        assert row["source/sums/reward"] == row["reward/addition/mean"]
        game = row["reward/environment/mean"] + row["reward/letters/mean"]
        assert row["source/game/reward"] == pytest.approx(game)
        assert row["policy/grad_norm"] > 0
    last = metrics_of(run)[-1]
    assert {"eval/game/reward", "eval/sums/reward"} <= last.keys()

    shutil.rmtree(run / "checkpoints" / "step_3")
    run_ranks(2, trained, cfg)
    assert recorded(run, 2) == whole[2]  # one sequence at a time: no company to depend on
    again = [row for row in metrics_of(run) if "policy/loss" in row]
    assert again == before


def gone_on(cfg: Config) -> list[dict[str, Any]]:
    """Leave games in their second turn and sums not begun, and take both up elsewhere."""
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.rollout import make_source
    from spmdrl.rollout.resumed_work import group_from_dict, group_to_dict

    with generating(cfg) as (world, engine):
        engine.weights_changed(0)
        source = make_source(cfg, world, tokenizer=load_tokenizer(cfg))
        draw = source._make_draw("train", cfg.sampling, samples=cfg.batch.group_size)
        prompts = source.prompts.at(0)
        groups = [Group(i, 0, i, own, 0, draw) for i, own in enumerate(prompts)]
        for group in (group for group in groups if group.prompt.source == 0):
            source.loop.admit(group)
        while not any(
            episode.environment and episode.trajectory.num_turns and episode.stage == "draw"
            for episode in source.loop.unfinished(engine)
        ):
            assert source.loop.is_busy, "no game had a second turn"
            source.loop.tick(engine)
        for group in (group for group in groups if group.prompt.source == 1):
            source.loop.admit(group)
        unfinished = source.loop.unfinished(engine)
        saved = [group_to_dict(group, unfinished) for group in groups]
        while engine.is_busy:  # as if the process had ended: nobody takes what it goes on to draw
            engine.step()
        source.close()
        resumed = make_source(cfg, world, tokenizer=load_tokenizer(cfg))
        found = [
            group_from_dict(plain, number=i, draw=draw, prompt=prompts[plain["slot"]])
            for i, plain in enumerate(saved)
        ]
        for _, episodes in found:
            for episode in episodes:
                resumed.loop.start(episode)
        while resumed.loop.is_busy:
            resumed.loop.tick(engine)
        resumed.close()
    ended = {group.slot: group for group, _ in found}
    return [
        {
            "source": prompts[plain["slot"]].source,
            "stage": episode["stage"],
            "turns": len(episode["trajectory"]["states"]),
            "before": episode["trajectory"]["tokens"].tolist(),
            "after": sample.trajectory.tokens.tolist(),
            "parts": sample.reward.parts,
        }
        for plain in saved
        for episode in plain["episodes"]
        for sample in [ended[plain["slot"]].samples[episode["sample"]]]
    ]


def test_episodes_under_way_of_each_source_are_taken_up_from_a_checkpoint(chat_model, tmp_path):
    cfg = mixed(chat_model, tmp_path, layout=dict(placement="colocated", world_size=1))
    cfg = changed(cfg, engine=dict(max_num_seqs=8))
    (found,) = run_ranks(1, gone_on, cfg)
    games, sums = ([one for one in found if one["source"] == i] for i in (0, 1))
    assert games and len(sums) == 6
    assert any(game["turns"] for game in games)
    for one in found:
        assert one["after"][: len(one["before"])] == one["before"]
        # All tokens of one that is scored, or that its environment has just ended, are drawn.
        assert one["after"] != one["before"] or one["stage"] in ("answer", "score")
    assert any(one["stage"] == "draw" for one in games)
    assert all(game["parts"].keys() == {"environment", "letters"} for game in games)
    assert all(own["parts"].keys() == {"addition"} for own in sums)


def test_an_episode_left_in_an_environment_that_is_gone_is_refused():
    draw = Draw(
        seed=0,
        purpose="train",
        samples=1,
        max_tokens=9,
        temperature=1.0,
        is_seeded=True,
        stop_token_ids=(),
    )
    loop = Loop(tree_of("task:addition"), tokenizer=None, pool=None, link=None)
    group = Group(0, 0, 0, Prompt(0, (1,), "q", {}), version=0, draw=draw)
    left = Episode(group, 0, Trajectory.from_prompt((1,)), stage="answer", environment=b"x")
    with refused("row 1: the checkpoint holds an unfinished episode", "with an environment"):
        loop.start(left)
    asked = dataclasses.replace(left, environment=b"", stage="solve", tree=Tree(0))
    with refused("with an agent, and its data source has no environment now"):
        loop.start(asked)
    loop.chats = {0: object()}
    with refused("with no environment, and its data source has an environment now"):
        loop.start(dataclasses.replace(left, environment=b""))
