"""Replicas that share out prompts, with real generation: nothing changes but who draws what."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmdrl.config import Config
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.rollout.idle import CAUSES, Idle, empty_shares, trainer_wait
from spmdrl.types import Batch
from tests.helpers.built import changed, generating, made
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, metrics, run


def config_of(model: str, world_size: int, **changes) -> Config:
    cfg = made(
        layout=dict(placement="colocated", world_size=world_size, device="cpu"),
        model=dict(path=model),
        steps=6,
        data=dict(train="task:addition", size=64, max_prompt_tokens=24),
        batch=dict(prompts_per_step=6, group_size=2),
        sampling=dict(max_response_tokens=24),
        engine=dict(kind="transformers", dtype="float32", cpu_kv_cache_gib=0.1, max_num_seqs=2),
    )
    return changed(cfg, **changes)


# --------------------------------------------------------------------------- who draws what


def responses(rollouts) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return {(group, sample): (tokens, versions)}."""
    scalars, ends = rollouts.scalars, rollouts.cu_seqlens.tolist()
    tokens, versions = rollouts.tokens.tolist(), rollouts.policy_versions.tolist()
    return {
        (int(g), int(s)): (tokens[a:b], versions[a:b])
        for g, s, a, b in zip(scalars.group_ids, scalars.sample_ids, ends, ends[1:])
    }


def _drawn(episode: dict) -> list[int]:
    """Return what a saved episode's policy sampled."""
    trajectory = episode["trajectory"]
    return trajectory["tokens"][trajectory["response_mask"]].tolist()


def shared_out(cfg: Config) -> dict:
    """Sample under each balance, replica 0 slowly where that matters (`_paced`); save unfinished
    work and go on from it."""
    from spmdrl.rollout import make_source

    with generating(cfg) as (world, engine):
        tokenizer, step, found = load_tokenizer(cfg), engine.step, {}
        for balance in ("even", "length", "steal"):
            source = make_source(_with(cfg, balance=balance), world, tokenizer=tokenizer)
            engine.weights_changed(0)
            dist.barrier(group=world.control)
            engine.step = _paced(step, engine, world, balance)
            source.generate(engine, until=0)
            found[balance] = source.take(0)
            source.close()
            _forget(world)
        over = _with(cfg, over_sample=2.0)
        source = make_source(over, world, tokenizer=tokenizer)
        dist.barrier(group=world.control)
        engine.step = _paced(step, engine, world, "over")
        source.generate(engine, until=0)
        world.store.set(f"over/left by {world.rank}", "")
        engine.step = step
        dist.barrier(group=world.control)
        found["over"], found["state"] = source.take(0), source.state_dict()
        source.close()
        while engine.is_busy:  # as if the process had ended
            step()
        states: list = [None] * world.world_size
        dist.all_gather_object(states, found["state"], group=world.control)
        _forget(world)
        found["resumed"] = _go_on(over, world, engine, states=states, tokenizer=tokenizer)
    return found


def _paced(step: Callable, engine, world, balance: str) -> Callable:
    """Return the engine's step, with pauses of replica 0 that no machine's pace can undo.

    steal: both begin a group, then replica 1 draws four before replica 0 goes on.
    over: replica 0 draws a group and the beginning of another; then replica 1 closes the step.
    """
    store, num_drawn = world.store, 0

    def await_(key: str) -> None:
        store.wait([key], timedelta(seconds=200))

    def paced() -> list:
        nonlocal num_drawn
        if balance == "steal":
            store.set(f"steal/begun by {world.rank}", "")
            await_("steal/begun by 0" if world.rank else "steal/four groups")
        elif world.rank:
            await_("over/halfway")
        elif num_drawn >= 2 and any(len(c.tokens) > 1 for c in engine.unfinished()):
            store.set("over/halfway", "")
            await_("over/left by 1")
        completions = step()
        num_drawn += len(completions)
        if balance == "steal" and world.rank and num_drawn >= 8:
            store.set("steal/four groups", "")
        return completions

    return paced if balance in ("steal", "over") else step


def _forget(world) -> None:
    """Take the book out of the store, as if another job began."""
    dist.barrier(group=world.control)
    if world.rank == 0:
        for number in range(1, 1000):
            world.store.delete_key(f"rollout/move/{number}")
    dist.barrier(group=world.control)


def _with(cfg: Config, **schedule) -> Config:
    return changed(cfg, rollout=dict(schedule=schedule))


def _go_on(cfg: Config, world, engine, *, states, tokenizer):
    """Resume what `states` hold at step 1, and make two steps more."""
    from spmdrl.rollout import make_source

    source = make_source(cfg, world, tokenizer=tokenizer)
    source.load_state_dict(states, 1)
    taken = []
    for step in (1, 2):
        engine.weights_changed(step)
        source.generate(engine, until=step)
        taken.append(source.take(step))
        gathered: list = [None] * world.world_size
        dist.all_gather_object(gathered, taken[-1].scalars, group=world.control)
        scalars = type(gathered[0]).concat(gathered)
        source.observe(Batch(scalars, (), torch.zeros(len(scalars))), step=step)
    source.close()
    return taken


def alone(cfg: Config, states: list[dict]) -> dict:
    """Sample step 0 with one replica, and go on from two replicas' state."""
    from spmdrl.rollout import make_source

    with generating(cfg) as (world, engine):
        tokenizer = load_tokenizer(cfg)
        engine.weights_changed(0)
        source = make_source(cfg, world, tokenizer=tokenizer)
        source.generate(engine, until=0)
        found = {"plain": source.take(0)}
        source.close()
        over = _with(cfg, over_sample=2.0)
        found["resumed"] = _go_on(over, world, engine, states=states, tokenizer=tokenizer)
    return found


@pytest.fixture(scope="module")
def replicas(chat_model) -> tuple[dict, dict, dict]:
    """What each of two replicas did, and one alone that takes up what they had under way."""
    first, second = run_ranks(2, shared_out, config_of(chat_model, 2))
    (single,) = run_ranks(1, alone, config_of(chat_model, 1), [first["state"], second["state"]])
    return first, second, single


def test_replicas_share_out_prompts_and_their_number_changes_no_token(replicas):
    first, second, single = replicas
    plain = responses(single["plain"])
    assert plain.keys() == {(g, s) for g in range(6) for s in range(2)}
    for balance in ("even", "length", "steal"):
        one, two = responses(first[balance]), responses(second[balance])
        assert not one.keys() & two.keys()
        assert one | two == plain, balance
        if balance != "steal":
            assert len(one) == len(two) == 6
    assert {g for g, _ in responses(first["even"])} == {0, 2, 4}
    assert 0 < len(first["steal"]) < len(second["steal"])


def under_way(cfg: Config) -> dict[tuple[bool, int], tuple[list[int], int]]:
    """Sample step 0 in flight or not, in runs of one and two steps. Return the steps of the groups
    that are under way then, and how many tokens they have. Finish them."""
    from spmdrl.rollout import make_source

    found = {}
    with generating(cfg) as (world, engine):
        tokenizer = load_tokenizer(cfg)
        for in_flight, steps in itertools.product((False, True), (1, 2)):
            engine.weights_changed(0)
            own = changed(_with(cfg, in_flight=in_flight), steps=steps)
            source = make_source(own, world, tokenizer=tokenizer)
            source.generate(engine, until=0)
            waiting = [group.step for group in source.filler.waiting.values()]
            unfinished = source.loop.unfinished(engine)
            drawn = sum(episode.trajectory.num_following for episode in unfinished)
            found[in_flight, steps] = (waiting, drawn)
            assert len(source.take(0)) == 12
            if waiting:
                source.generate(engine, until=1)
                assert len(source.take(1)) == 12
            source.close()
    return found


def test_places_that_a_step_leaves_free_in_flight_go_to_the_next(chat_model):
    # Of 12 samples, the last do not fill five places.
    cfg = config_of(chat_model, 1, engine=dict(max_num_seqs=5), lag=1)
    (found,) = run_ranks(1, under_way, cfg)
    waiting, drawn = found.pop((True, 2))
    assert waiting == [1] * 6
    assert drawn > 0
    assert len(found) == 3
    assert all(one == ([], 0) for one in found.values())


def check_whole(batches: list[dict]) -> None:
    """Every step has each slot once, and no response stands in two steps."""
    for batch in batches:
        assert batch.keys() == {(g, s) for g in range(6) for s in range(2)}
        assert all(set(versions) - {-1} for _, versions in batch.values())


def test_what_was_under_way_goes_on_with_any_number_of_replicas(replicas):
    first, second, single = replicas
    states = [first["state"], second["state"]]
    assert all(state["is_shared"] for state in states)
    waiting = [(g["step"], g["slot"]) for state in states for g in state["waiting"]]
    assert 0 < len(waiting) == len(set(waiting))  # as many as the engines have places for
    begun = [
        _drawn(e) for state in states for g in state["waiting"] for e in g["episodes"] if _drawn(e)
    ]
    assert begun, "nothing was half drawn: the case is not tested"
    for one, two in zip(first["resumed"], second["resumed"]):
        assert not responses(one).keys() & responses(two).keys()
    pair = [responses(a) | responses(b) for a, b in zip(first["resumed"], second["resumed"])]
    for steps in (pair, [responses(one) for one in single["resumed"]]):
        check_whole([responses(first["over"]) | responses(second["over"]), *steps])
        drawn = [response for step in steps for response in step.values()]
        for tokens in begun:
            assert any(_follows(tokens, *one) for one in drawn), "half a response was lost"
        # Groups left behind at version 0 may be one step late, so all are in step 1.
        assert any(0 in versions for _, versions in steps[0].values())
        assert not any(0 in versions for _, versions in steps[1].values())


def _follows(begun: list[int], tokens: list[int], versions: list[int]) -> bool:
    at = sum(version < 0 for version in versions)
    return tokens[at : at + len(begun)] == begun and set(versions[at : at + len(begun)]) == {0}


# --------------------------------------------------------------------------- idle time


def test_the_places_of_an_engine_are_empty_for_one_reason_each():
    assert empty_shares(4, drawing=4, playing=3) == {"environment": 0, "tail": 0}
    assert empty_shares(4, drawing=1, playing=0) == {"environment": 0, "tail": 0.75}
    assert empty_shares(4, drawing=1, playing=1) == {"environment": 0.25, "tail": 0.5}
    assert empty_shares(4, drawing=9, playing=1) == {"environment": 0, "tail": 0}
    idle = Idle(4)
    idle.resume({"push": 9.0})  # the first push is no part of a step
    idle.count_step(2.0, drawing=1, playing=1)
    idle.add("reward", 3.0)
    idle.pause({"push": 9.0, "update": 1.0})
    idle.resume(
        {
            "push": 9.5,
            "update": 3.0,
            "exchange tokens": 0.25,
            "await rollouts": 1.0,
            "evaluate": 50.0,
        }
    )
    sums = idle.take()
    assert {name: value for name, (value, _) in sums.items()} == {
        "perf/engine_steps": 1,
        "time/engine_idle": 8.25,
        "time/engine_idle_tail": 1.0,
        "time/engine_idle_reward": 3.0,
        "time/engine_idle_environment": 0.5,
        "time/engine_idle_replicas": 1.0,
        "time/engine_idle_exchange": 0.25,
        "time/engine_idle_update": 2.0,
        "time/engine_idle_push": 0.5,
    }
    again = idle.take()
    assert again["time/engine_idle"] == again["perf/engine_steps"] == (0, 1)


def test_the_trainers_wait_is_split_as_the_engines_time_was():
    sums = {
        "time/engine_idle_tail": (2.0, 2),
        "time/engine_idle_reward": (1.0, 2),
        "time/engine_idle_environment": (0.0, 2),
    }  # two replicas
    found = trainer_wait(3.0, 4.0, sums)
    assert {name: value for name, (value, _) in found.items()} == {
        "time/await_rollouts_sampling": 3 * (1 - 1.5 / 4),
        "time/await_rollouts_tail": 0.75,
        "time/await_rollouts_reward": 0.375,
        "time/await_rollouts_environment": 0.0,
    }
    assert trainer_wait(3.0, 0.0, sums)["time/await_rollouts_sampling"] == (3.0, 1)


USER = """
import time

from spmdrl.environments.protocol import Turn

def slow(completions, **row):
    time.sleep(2.5)
    return [1.0 for _ in completions]

def fast(completions, **row):
    return [1.0 for _ in completions]

class Env:
    wait, turns = 0.0, 0
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, response):
        time.sleep(self.wait)
        self.turns += 1
        done = self.turns == 2
        return Turn([] if done else [{"role": "user", "content": "on"}], is_done=done)

class Slow(Env):
    wait = 2.5

class Long(Env):
    def reset(self, row):
        words = 200 if row["prompt"] == self.long else 1
        return [{"role": "user", "content": "7" * words}]
"""


def idle_by_cause(cases: dict[str, Config]) -> dict[str, dict[str, float]]:
    from spmdrl.rollout import make_source

    found, first = {}, next(iter(cases.values()))
    with generating(first) as (world, engine):
        tokenizer, step = load_tokenizer(first), engine.step
        for name, cfg in cases.items():

            def uneven_step():
                for sequence in engine._waiting:  # the first group draws long
                    is_long = name == "tail" and sequence.request.key.startswith("train-0-0-")
                    sequence.request = dataclasses.replace(
                        sequence.request, stop_token_ids=(), max_tokens=24 if is_long else 3
                    )
                time.sleep(0.12)
                return step()

            engine.step = uneven_step
            engine.weights_changed(0)
            source = make_source(cfg, world, tokenizer=tokenizer)
            source.generate(engine, until=0)
            sums = source.take(0).sums
            found[name] = {cause: sums[f"time/engine_idle_{cause}"][0] for cause in CAUSES}
            found[name]["all"] = sums["time/engine_idle"][0]
            found[name]["generate"] = sums["time/generate"][0]
            source.close()
    return found


def test_a_slow_reward_a_slow_environment_and_a_long_response_are_told_apart(chat_model, tmp_path):
    user = tmp_path / "user.py"
    user.write_text(USER)
    fast = config_of(
        chat_model,
        1,
        batch=dict(prompts_per_step=2),
        sampling=dict(max_response_tokens=60),
        data=dict(max_prompt_tokens=64),
        engine=dict(max_num_seqs=8),
        rewards=dict(functions=(f"{user}:fast",), workers=4),
    )
    cases = {
        "tail": fast,
        "reward": changed(fast, rewards=dict(functions=(f"{user}:slow",))),
        "environment": changed(fast, rollout=dict(environment={"name": f"{user}:Slow"})),
    }
    (found,) = run_ranks(1, idle_by_cause, cases)
    for name, causes in found.items():
        own = {cause: causes[cause] for cause in CAUSES}
        assert sum(own.values()) == pytest.approx(causes["all"])
        assert causes["all"] <= causes["generate"] * (1 + 1e-6)  # no step came before
        assert max(own, key=own.get) == name, found
    # Four rewards, or answers, of 2.5 s on four workers. Its token limit ends each response, so an
    # episode has one turn.
    assert found["reward"]["reward"] >= 1.5
    assert found["environment"]["environment"] >= 1.5
    assert found["tail"]["environment"] == found["reward"]["environment"] == 0
    assert found["environment"]["reward"] < 2.0
    # 21 steps of 120 ms and more in which two of four places are empty.
    assert found["tail"]["tail"] >= 1.2
    assert found["tail"]["reward"] < found["tail"]["tail"]


# --------------------------------------------------------------------------- train.py


def flags_of(model: str, rows: Path) -> dict[str, object]:
    own = {"data.train": rows, "data.eval": "", "data.size": 0, "data.task-options": "{}"}
    return TINY["rl"] | own | {"engine.kind": "transformers", "model.path": model}


def test_an_opening_that_is_too_long_is_refused_by_name_or_dropped(chat_model, tmp_path):
    (tmp_path / "user.py").write_text(USER.replace("self.long", "'12'"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{10 + i}", "answer": "1"}}\n' for i in range(8)))
    flags = flags_of(chat_model, rows) | {
        "steps": 1,
        "layout.placement": "colocated",
        "data.max-prompt-tokens": 64,
        "rewards.functions": f"{tmp_path}/user.py:fast",
        "rollout.environment": f"{{name: '{tmp_path}/user.py:Long'}}",
    }
    finished = run("demo_grpo.yaml", 1, status=1, **flags | {"output-dir": tmp_path / "refused"})
    found = re.search(
        rf"rollout.environment {tmp_path}/user.py:Long: its opening of {rows}:3 "
        r"has (\d+) tokens, above data.max_prompt_tokens = 64; raise it, "
        r"shorten the opening, or set data.overlong_prompts=drop",
        finished.output,
    )
    assert found and int(found[1]) > 200, finished.output[-3000:]
    run(
        "demo_grpo.yaml",
        1,
        **flags | {"output-dir": tmp_path / "dropped", "data.overlong-prompts": "drop"},
    )
    (row,) = metrics(tmp_path / "dropped")
    assert row["rollout/overlong_openings"] == row["rollout/failed_rewards"] == 4
    assert row["reward/errors"] == 0 and row["rollout/samples"] == 32


REWARDS = """
def uneven(completions, hard, **row):
    # Rows with `hard` 0 are always solved, with 2 never, with 1 by every other response.
    return [float(h == 0 or (h == 1 and len(c) % 2)) for h, c in zip(hard, completions)]
"""


def test_a_curriculum_passes_over_what_is_settled_and_resumes_bit_by_bit(chat_model, tmp_path):
    (tmp_path / "r.py").write_text(REWARDS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+1=", "hard": {i % 3}}}\n' for i in range(12)))
    flags = flags_of(chat_model, rows) | {
        "steps": 8,
        "lag": 1,
        "batch.prompts-per-step": 4,
        "checkpoint.every-steps": 5,
        "optimizer.lr": 1e-4,
        "rewards.functions": f"{tmp_path}/r.py:uneven",
        "rollout.schedule.curriculum": "0.05",
    }
    out = tmp_path / "out"
    run("demo_grpo.yaml", 2, **flags | {"output-dir": out})
    whole = metrics(out)
    assert [row["step"] for row in whole] == list(range(8))
    for row in whole:
        assert sum(row[f"time/engine_idle_{cause}"] for cause in CAUSES) == pytest.approx(
            row["time/engine_idle"]
        )
        assert sum(
            value for name, value in row.items() if name.startswith("time/await_rollouts_")
        ) == pytest.approx(row["time/await_rollouts"])
    # With lag 1 the shares of steps 0 and 1 are made before the first update.
    assert all(row["time/engine_idle_update"] > 0 for row in whole[2:])
    assert all(row["time/engine_idle_update"] == 0 for row in whole[:2])
    assert [row["data/passed_over_prompts"] for row in whole[:1]] == [0]
    # After three steps all 12 rows were sampled, 8 of them settled.
    assert max(row["data/settled_prompts_frac"] for row in whole[1:]) >= 0.6
    assert sum(row["data/passed_over_prompts"] for row in whole) > 8
    early = sum(row["reward/zero_spread_groups_frac"] for row in whole[:3]) / 3
    late = sum(row["reward/zero_spread_groups_frac"] for row in whole[4:]) / 4
    assert late < early
    shutil.rmtree(out / "checkpoints" / "step_8")
    run("demo_grpo.yaml", 2, **flags | {"output-dir": out})
    again = metrics(out)
    timed = ("time/", "perf/", "mem/", "sync/", "unix_s", "reward/seconds")
    for one, two in zip(whole, again, strict=True):
        for name in one.keys() & two.keys():
            assert name.startswith(timed) or one[name] == two[name], (one["step"], name)


def test_replicas_share_a_book_through_updates_in_flight_and_a_resume(chat_model, tmp_path):
    flags = TINY["rl"] | {
        "engine.kind": "transformers",
        "model.path": chat_model,
        "steps": 4,
        "lag": 2,
        "layout.trainer-ranks": 1,
        "sampling.max-response-tokens": 32,
        "engine.max-num-seqs": 8,
        "batch.tokens-per-microbatch": 1024,
        "algorithm.correction": "none",
        "checkpoint.every-steps": 2,
        "output-dir": tmp_path,
        "rollout.schedule.in_flight": "true",
        "rollout.schedule.over_sample": "1.5",
    }
    run("demo_grpo.yaml", 3, **flags)
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    run("demo_grpo.yaml", 2, **flags)  # on one replica instead of two
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["data/groups"] == 8 and row["rollout/samples"] == 32 for row in rows)
    assert max(row["policy/staleness"] for row in rows) <= 3  # lag 2, over-sampled by one step
