"""Rollouts on real vLLM: groups that go on over steps, checkpoints and new weights."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator

import pytest
import torch

from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.data.tokenizer import load_tokenizer
from tests.helpers.built import changed, generating, made
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, metrics, run

COLUMNS = ("tokens", "policy_versions")


def source_config(model: str, schedule: dict, **rest) -> Config:
    cfg = made(
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=model),
        steps=4,
        data=dict(train="task:addition", size=64, max_prompt_tokens=24),
        batch=dict(prompts_per_step=4, group_size=3),
        sampling=dict(max_response_tokens=40),
        # Few at a time, so that one is half drawn whenever a step is complete.
        engine=dict(dtype="float32", cpu_kv_cache_gib=0.1, max_num_seqs=2),
        rollout=dict(schedule=schedule),
    )
    return changed(cfg, **rest)


@contextlib.contextmanager
def replica(cfg: Config) -> Iterator[tuple]:
    """An engine with weights of version 0, and a function that makes a source for it."""
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.rollout import make_source

    with generating(cfg) as (world, engine):
        engine.weights_changed(0)
        yield engine, functools.partial(make_source, cfg, world, tokenizer=load_tokenizer(cfg))


def over_sampled(cfg: Config) -> dict:
    """Close a step early, save what is under way, and go on elsewhere on newer weights."""
    with replica(cfg) as (engine, make_source):
        source = make_source()
        source.generate(engine, until=0)
        first, state = source.take(0), source.state_dict()
        under_way = {group["slot"]: group for group in state["waiting"]}
        while engine.is_busy:  # as if the process had ended: nobody takes what it goes on to draw
            engine.step()
        source.close()
        resumed = make_source()
        resumed.load_state_dict([state], 1)
        engine.weights_changed(1)
        resumed.generate(engine, until=1)
        second = resumed.take(1)
        keys = [(group.step, group.slot) for group in resumed.filler.waiting.values()]
        resumed.close()
    return {
        "first": first,
        "under_way": under_way,
        "second": second,
        "left": keys,
        "opened": (state["opened"], state["left"]),
    }


def test_groups_that_a_step_left_behind_go_on_after_a_resume(chat_model):
    cfg = source_config(chat_model, {"over_sample": 2.0})
    # What is half drawn when the step closes depends on how fast its last reward came.
    assert any(_goes_on(*run_ranks(1, over_sampled, cfg)) for _ in range(4))


def _goes_on(found: dict) -> bool:
    """Check what became of groups under way; return whether a sequence was half drawn."""
    first, second = found["first"], found["second"]
    assert len(first) == len(second) == 12 and found["opened"] == (2, {})
    assert set(first.policy_versions[first.response_mask].tolist()) == {0}
    assert first.sums["rollout/carried_groups"] == (4, 1)
    under_way = found["under_way"]
    assert len(under_way) == 4
    partial = [e for group in under_way.values() for e in group["episodes"]]
    assert partial, "nothing was unfinished: the case is not tested"
    had = [e["trajectory"] for e in partial]
    had = [{name: t[name][t["response_mask"]].tolist() for name in COLUMNS} for t in had]
    drawn = [t for t in had if t["tokens"]]
    assert drawn and all(set(t["policy_versions"]) == {0} for t in drawn)
    # Each goes on from exactly what it had, with the version that drew it.
    responses, versions = (
        [
            column[a:b][second.response_mask[a:b]].tolist()
            for a, b in zip(second.cu_seqlens, second.cu_seqlens[1:])
        ]
        for column in (second.tokens, second.policy_versions)
    )
    for episode in drawn:
        tokens, count = episode["tokens"], len(episode["tokens"])
        at = [i for i, response in enumerate(responses) if response[:count] == tokens]
        assert at, "a sequence under way was lost"
        assert any(versions[i][:count] == [0] * count for i in at)
    # Step 1 must take the old groups, lest they get too old; the new ones stay.
    assert sorted(found["left"]) == [(2, slot) for slot in range(4)]
    assert second.scalars.min_versions.tolist() == [min(v) for v in versions]
    return any(set(v) == {0, 1} for v in versions)


def dynamic(cfg: Config) -> tuple:
    with replica(cfg) as (engine, make_source):
        source = make_source()
        source.generate(engine, until=0)
        rollouts = source.take(0)
        source.filler.schedule = changed(source.filler.schedule, dynamic=2)
        source.pool.close()
        source.pool._is_closed, source.pool._num_workers = False, 0  # every reward is 0
        engine.weights_changed(1)
        with pytest.raises(RuntimeError) as caught:
            source.generate(engine, until=1)
    return rollouts, str(caught.value)


def test_dynamic_sampling_replaces_groups_without_spread_up_to_a_limit(chat_model, tmp_path):
    (tmp_path / "r.py").write_text(
        "def even(completions, **row):\n    return [float(len(c) % 3 == 0) for c in completions]\n"
    )
    rewards = dict(functions=(f"{tmp_path}/r.py:even",))
    cfg = source_config(chat_model, {"dynamic": 50}, rewards=rewards)
    ((rollouts, error),) = run_ranks(1, dynamic, cfg)
    rewards = rollouts.scalars.rewards.view(4, 3)
    assert (rewards.std(dim=1) > 0).all()
    assert rollouts.scalars.group_ids.tolist() == [g for g in range(4) for _ in range(3)]
    dropped, _ = rollouts.sums["rollout/dropped_groups"]
    assert dropped > 0
    for part in (
        "step 1",
        "rollout.schedule.dynamic 2 is used up",
        "groups had the same reward",
        "raise batch.group_size",
    ):
        assert part in error


def test_in_flight_updates_train_and_resume(chat_model, tmp_path):
    """Engines take weights in the middle of sequences, on two ranks that must agree."""
    flags = TINY["rl"] | {
        "layout.trainer-ranks": 2,
        "layout.inference-tp": 2,
        "model.path": chat_model,
        "output-dir": tmp_path,
        "lag": 2,
        "sampling.max-response-tokens": 64,
        "checkpoint.every-steps": 1,
        "evaluate.every-steps": 2,
        "data.eval-size": 4,
        "batch.tokens-per-microbatch": 1024,
        "algorithm.correction": "none",
        "rollout.schedule.in_flight": "true",
        "rollout.schedule.over_sample": "1.5",
    }
    run("demo_grpo.yaml", 4, **flags | {"steps": 4})
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    run("demo_grpo.yaml", 4, **flags | {"steps": 4})
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(torch.tensor(row["policy/loss"]).isfinite() for row in rows)
    assert max(row["policy/staleness"] for row in rows) > 0
    assert max(row["policy/staleness"] for row in rows) <= 3  # lag 2, over-sampled by one step
    assert any(row["rollout/carried_groups"] for row in rows)


def played(cfg: Config) -> dict:
    """Play a step of episodes of several turns; say what the engine was asked and what it drew."""
    seen: dict[str, list] = {}
    with replica(cfg) as (engine, make_source):
        add, step = engine.add, engine.step

        def spied_add(request):
            seen[request.key] = [request.prompt]
            add(request)

        def spied_step():
            finished = step()
            for completion in finished:
                seen[completion.key].append(tuple(completion.tokens.tolist()))
            return finished

        engine.add, engine.step = spied_add, spied_step
        source = make_source()
        source.generate(engine, until=0)
        found = {
            "rollouts": source.take(0),
            "seen": seen,
            "eval": source.outcomes(source.evaluate(engine, step=0)),
        }
        source.close()
    return found


def test_the_turns_of_an_episode_are_the_tokens_that_the_engine_saw_and_drew(chat_model):
    game = dict(train="task:guess_number", eval="task:guess_number", eval_size=3)
    cfg = source_config(
        chat_model,
        {},
        rollout=dict(environment={"name": "guess_number"}),
        data=game | dict(task_options={"low": 1, "high": 9}, max_prompt_tokens=64),
        sampling=dict(max_response_tokens=160, temperature=1.0),
        engine=dict(max_num_seqs=12),
    )
    assert not [p for p in validate(cfg) if p.startswith("rollout")]
    (found,) = run_ranks(1, played, cfg)
    rollouts, seen = found["rollouts"], found["seen"]
    assert len(rollouts) == 12 and len(found["eval"]) == 3
    several = 0
    for i, (a, b) in enumerate(zip(rollouts.cu_seqlens, rollouts.cu_seqlens[1:])):
        tokens, mask = rollouts.tokens[a:b].tolist(), rollouts.response_mask[a:b].tolist()
        group, sample = rollouts.scalars.group_ids[i], rollouts.scalars.sample_ids[i]
        turns = sorted(
            (v for k, v in seen.items() if k.startswith(f"train-0-{group}-{sample}@")),
            key=lambda v: len(v[0]),
        )
        several += len(turns) > 1
        drawn = [False] * len(tokens)
        for prompt, completion in turns:
            begin = len(prompt)
            assert tuple(tokens[:begin]) == prompt, "the engine saw other tokens"
            assert tuple(tokens[begin : begin + len(completion)]) == completion
            drawn[begin : begin + len(completion)] = [True] * len(completion)
        assert drawn == mask
        assert rollouts.scalars.response_lengths[i] == sum(mask)
        versions = rollouts.policy_versions[a:b]
        assert (versions[rollouts.response_mask[a:b]] == 0).all()
        assert (versions[~rollouts.response_mask[a:b]] == -1).all()
    assert several >= 2, "no episode had a second turn: the case is not tested"
    tokenizer = load_tokenizer(cfg)
    begins = {tuple(prompt) for key, (prompt, _) in seen.items() if key.endswith("@0")}
    openings = set(tokenizer.batch_decode(list(begins), skip_special_tokens=False))
    assert tokenizer.eos_token in min(openings), "no special token: the case is not tested"
    assert rollouts.samples and {sample["prompt"] for sample in rollouts.samples} <= openings
    for sample in rollouts.samples:
        assert tokenizer.eos_token not in sample["response"]
        assert sample["reward_parts"] == {"environment": sample["reward"]}
    assert rollouts.sums["rollout/turns"][0] > 12


def test_an_environment_that_fails_ends_the_run_by_name(chat_model, tmp_path):
    (tmp_path / "env.py").write_text(
        "class Broken:\n"
        "    def reset(self, row):\n        return [{'role': 'user', 'content': row['prompt']}]\n"
        "    def step(self, response):\n        raise KeyError('lost')\n"
    )
    finished = run(
        "demo_grpo.yaml",
        2,
        status=1,
        **TINY["rl"]
        | {
            "model.path": chat_model,
            "output-dir": tmp_path / "out",
            "steps": 1,
            "rollout.environment": f"{{name: '{tmp_path}/env.py:Broken'}}",
            "data.max-prompt-tokens": 64,
        },
    )
    assert "environment: KeyError: 'lost'" in finished.output
    assert "step 0: the reward of " in finished.output
