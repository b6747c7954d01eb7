"""Runs of real agents by train.py: on every engine and on several replicas, repeated without the
agent, killed in the middle of episodes, evaluated."""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from spmdrl.rollout.recordings import find_recorded, read_table
from tests.helpers.built import small_model
from tests.helpers.runs import TINY, Run, command, finish, kill_all, metrics, run, start, wait_for
from tests.program.test_train import assert_same_end, final_weights
from tests.rollout.timed_runs import back_to, decisions_of, rollouts_of

AGENT = """
import asyncio, pathlib, random

HERE = pathlib.Path(__file__).parent

async def ask(client, messages, **options):
    await asyncio.sleep(random.SystemRandom().random() * float((HERE / "late").read_text()))
    done = await client.chat.completions.create(model="policy", messages=messages, **options)
    return [choice.message.content or "" for choice in done.choices]

def user(text):
    return {"role": "user", "content": text}

async def solve(row, client):
    begin = [user(row["prompt"])]
    (first,) = await ask(client, begin, max_tokens=6)
    with open(HERE / "begun", "a") as file:
        file.write("x")
    place = (HERE / "begun").stat().st_size
    while (HERE / "gate").exists() and place > int((HERE / "gate").read_text()):
        await asyncio.sleep(0.02)
    known = [*begin, {"role": "assistant", "content": first}]
    both = await asyncio.gather(
        ask(client, [*known, user("1")], max_tokens=5),
        ask(client, [*known, user("2")], max_tokens=5, n=2),
    )
    words = [text for texts in both for text in texts]
    messages = [user("+".join(map(str, map(len, words))))]
    stream = await client.chat.completions.create(
        model="policy", messages=messages, max_tokens=4, stream=True
    )
    last = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    total = sum(map(ord, first + last + "".join(words)))
    return {"reward": total % 7 / 7, "words": len(words)}
"""
FLAGS = TINY["rl"] | {
    "steps": 3,
    "engine.kind": "transformers",
    "data.max-prompt-tokens": 40,
    "data.eval-size": 4,
    "sampling.max-response-tokens": 32,
    "batch.prompts-per-step": 4,
    "batch.group-size": 2,
    "batch.tokens-per-microbatch": 1024,
    "checkpoint.every-steps": 1,
    "checkpoint.keep.last": 9,
    "evaluate.samples": 2,
    "layout.trainer-ranks": 1,
    "rollout.record.every": 1,
    "rewards.functions": "[]",
}
VLLM = {"engine.kind": "vllm"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "transformers": (2, {}),
    "transformers, two replicas": (3, {}),
    "vllm": (2, VLLM),
    "vllm, two replicas": (3, VLLM),
    "vllm, engine of two ranks": (4, VLLM | {"layout.inference-tp": 2, "layout.trainer-ranks": 2}),
}
"""Of each its ranks and its flags."""
EXACT = {"engine.exact": "true", "lag": 0, "algorithm.correction": "none"}


class AgentRuns:
    """Runs of one agent, which may answer late and may be held.

    Args:
        folder: of all of them.
    """

    def __init__(self, folder: Path, **model: Any):
        self.folder = folder
        sizes = dict(hidden_size=64, heads=2, initializer_std=0.2, chat_template=True)
        self.model = small_model(folder / "model", **sizes | model)
        self.agent = folder / "agent.py"
        self.agent.write_text(AGENT)

    def flags(self, name: str, **more: Any) -> dict[str, Any]:
        """Return the flags of a run, by its name."""
        own = {"model.path": self.model, "output-dir": self.folder / name}
        return FLAGS | own | {"rollout.agent": f"{self.agent}:solve"} | more

    def run(self, name: str, layout: str = "transformers", *, late_s: float, **more: Any) -> Path:
        """Run to the end; return its folder.

        Args:
            layout: of LAYOUTS.
            late_s: seconds by which requests come late at most.
        """
        (self.folder / "late").write_text(str(late_s))
        ranks, own = LAYOUTS[layout]
        run("demo_grpo.yaml", ranks, **self.flags(name, **own | more))
        return self.folder / name

    def check_rewards(self, out: Path) -> list[dict[str, Any]]:
        """Check that rewards are those of the tokens that are trained on, and that agents asked the
        replica that recorded them; return the recorded sequences."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        found = []
        for files in find_recorded(out).steps.values():
            for replica, path in enumerate(files):
                schedule = out / "schedule" / f"replica_{replica}_of_{len(files)}.jsonl"
                lines = map(json.loads, schedule.read_text().splitlines())
                asked = [line["ask"] for line in lines if "ask" in line]
                openings = {tuple(tokens) for _, _, _, parent, tokens, *_ in asked if parent < 0}
                rows = read_table(path).to_pylist()
                for _, traces in groupby(rows, key=itemgetter("group", "sample")):
                    texts = []
                    for trace in traces:
                        assert any(tuple(trace["tokens"][: len(own)]) == own for own in openings)
                        texts += _answers(trace, tokenizer)
                    assert len(texts) == 5
                    total = sum(ord(letter) for text in texts for letter in text)
                    assert trace["reward"] == total % 7 / 7
                found += rows
        assert found
        return found


def _answers(trace: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return the texts of the answers that a recorded trace is trained on."""
    texts = []
    marked = zip(trace["response_mask"], trace["tokens"])
    for is_sampled, pairs in groupby(marked, key=itemgetter(0)):
        if is_sampled:
            ids = [token for _, token in pairs]
            texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return texts


@pytest.fixture
def runs(tmp_path) -> AgentRuns:
    return AgentRuns(tmp_path)


def groups_of(out: Path) -> list[Any]:
    """Return the digests of a run's groups, by step."""
    return [row["groups"] for row in decisions_of(out) if "groups" in row]


@pytest.mark.parametrize(
    "layout",
    [
        "transformers",
        *(pytest.param(own, marks=pytest.mark.grid) for own in LAYOUTS if own != "transformers"),
    ],
)
@pytest.mark.proves(
    "agents", "replay_schedule", "in_flight", "lag", "split", "record", "transformers"
)
@pytest.mark.proves("agents", "replay_schedule", "in_flight", "inference_tp", "lag", "split")
@pytest.mark.proves("agents", "replay_schedule", "in_flight", "steal", "lag", "split", "record")
def test_a_run_repeats_without_its_agent_and_evaluates_with_it(layout, runs):
    flags = {"lag": 1, "rollout.schedule.in-flight": "true", "evaluate.every-steps": 2}
    # Those of the next step are under way when an evaluation begins, and leave it no place.
    flags |= {"rollout.agents-at-once": 4}
    once = runs.run("once", layout, late_s=0.1, **flags)
    runs.check_rewards(once)
    assert all(row["reward/agent/mean"] >= 0 for row in metrics(once))
    assert {row["agent/words"] for row in metrics(once)} == {3.0}
    in_loop = json.loads((once / "evaluations" / "evaluation_2.json").read_text())
    file = runs.folder / "evaluation.json"
    command("evaluate", once / "checkpoints" / "step_2", "--out", file, ranks=2)
    alone = json.loads(file.read_text())
    assert len(alone["problems"]) == 4
    assert [own["rewards"] for own in alone["problems"]] == [
        own["rewards"] for own in in_loop["problems"]
    ]
    assert {len(own["rewards"]) for own in alone["problems"]} == {2}
    runs.agent.unlink()
    again = runs.run("again", layout, late_s=0.0, **flags, **{"rollout.replay-schedule": once})
    assert_same_end(once, again)
    assert rollouts_of(once) == rollouts_of(again)
    assert decisions_of(once) == decisions_of(again)


@pytest.mark.grid
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.proves("agents", "in_flight", "inference_tp", "lag", "split", "record")
def test_a_run_that_is_killed_between_steps_repeats_what_it_had_decided(layout, runs):
    flags = {"lag": 1, "rollout.schedule.in-flight": "true"}
    out = runs.run("out", layout, late_s=0.1, **flags)
    whole = [rollouts_of(out), decisions_of(out), metrics(out), final_weights(out)]
    back_to(out, 1)
    runs.run("out", layout, late_s=0.1, **flags)
    assert [rollouts_of(out), decisions_of(out)] == whole[:2]
    for before, after in zip(whole[2], metrics(out), strict=True):
        assert before["policy/loss"] == after["policy/loss"]
    ends = final_weights(out)
    assert ends.pop("newest") == whole[3].pop("newest")
    assert all(torch.equal(value, ends[name]) for name, value in whole[3].items())


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
@pytest.mark.proves("agents", "split", "record")
def test_replicas_draw_what_one_draws(kind, runs):
    flags = EXACT | {"steps": 1}
    one = runs.run("one", kind, late_s=0.0, **flags)
    two = runs.run("two", f"{kind}, two replicas", late_s=0.0, **flags)
    shown = ("group", "sample", "trace", "reward", "tokens", "response_mask", "rollout_logprobs")
    drawn = []
    for out in (one, two):
        rows = sorted(runs.check_rewards(out), key=itemgetter("group", "sample", "trace"))
        drawn.append([[row[name] for name in shown] for row in rows])
    assert len(drawn[0]) == 8 * 4 and drawn[0] == drawn[1]


@pytest.mark.grid
@pytest.mark.proves("agents", "inference_tp", "split", "record")
def test_an_engine_of_two_ranks_draws_what_one_rank_draws(runs):
    drawn = []
    for layout in ("vllm", "vllm, engine of two ranks"):
        out = runs.run(layout, layout, late_s=0.0, steps=1, lag=0)
        rows = sorted(runs.check_rewards(out), key=itemgetter("group", "sample", "trace"))
        drawn.append(rows)
    assert [row["tokens"] for row in drawn[0]] == [row["tokens"] for row in drawn[1]]
    for one, two in zip(*drawn):
        assert one["rollout_logprobs"] == pytest.approx(two["rollout_logprobs"], abs=1e-4)


@pytest.mark.grid
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.proves("agents", "moe", "moe_replay", "truncated", "split", "record")
@pytest.mark.proves("agents", "moe", "moe_replay", "truncated", "in_flight", "lag", "split")
def test_routes_and_sampling_masks_of_an_agents_traces_are_those_of_the_engine(lag, tmp_path):
    runs = AgentRuns(tmp_path, architecture="qwen3_moe", initializer_std=0.1, hidden_size=128)
    flags = {"lag": lag, "rollout.schedule.in-flight": str(lag > 0).lower()}
    flags |= {"model.moe.replay": "true", "engine.dtype": "float32"}
    flags |= {"model.compute-dtype": "float32", "sampling.temperature": 0.8}
    flags |= {"sampling.top-p": 0.9, "sampling.top-k": 20}
    out = runs.run("out", "vllm", late_s=0.05, **flags)
    rows = runs.check_rewards(out)
    for row in rows:
        routes = numpy.frombuffer(row["routes"], "int8").reshape(row["length"], 2, 2)
        # The last token was never read by the engine.
        assert (routes[:-1] >= 0).all() and (routes[-1] == -1).all()
        assert row["sampling_masks"]
    carried = [row for row in rows if len({*row["policy_versions"]} - {-1}) > 1]
    assert bool(carried) == bool(lag)
    for logged in metrics(out):
        assert logged["policy/router_replayed_frac"] > 0.9
        assert 0 <= logged["policy/router_disagreement"] < 0.2
        assert 1 < logged["rollout/sampling_mask_ids"] <= 20
        if logged["policy/staleness"] == 0:
            assert logged["policy/mismatch_logprob_diff"] < 5e-6


def start_held(runs: AgentRuns, name: str, **flags: Any) -> Run:
    """Start a run; return it when two agents of its second step wait after their first answer, and
    the other six have gone on."""
    (runs.folder / "begun").unlink()
    (runs.folder / "gate").write_text("14")
    under_way = start("demo_grpo.yaml", 2, **runs.flags(name, **flags))
    schedule = runs.folder / name / "schedule"

    def is_held() -> bool:
        lines = [line for file in schedule.glob("*") for line in file.read_text().splitlines()]
        return sum('"ask": ' in line and '"train-1-' in line for line in lines) >= 8 + 6 * 2

    wait_for(under_way, is_held, "the agents are not held", timeout_s=200)
    return under_way


def check_begun_again(again: Path, whole: Path) -> None:
    """Check that agents of a run began again, and that it gave what another one gave."""
    begun = [row["agents"] for row in decisions_of(again) if "agents" in row]
    keys = [key for _, keys in begun for key in keys]
    assert len(keys) > len(set(keys)) == 24, "no agent began again"
    assert groups_of(again) == groups_of(whole)
    assert_same_end(whole, again)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.kill)])
@pytest.mark.proves("agents", "split", "record", "transformers")
@pytest.mark.proves("agents", "split", "record")
def test_a_run_that_is_killed_in_the_middle_of_episodes_ends_as_one_that_was_not(kind, runs):
    exact = EXACT | {"engine.kind": kind}
    whole = runs.run("whole", late_s=0.0, **exact)
    kill_all(start_held(runs, "killed", **exact))
    (runs.folder / "gate").unlink()
    check_begun_again(runs.run("killed", late_s=0.0, **exact), whole)


@pytest.mark.kill
@pytest.mark.proves("agents", "split", "record", "transformers")
def test_a_run_whose_worker_of_agents_is_killed_ends_as_one_that_kept_it(runs):
    whole = runs.run("whole", late_s=0.0, **EXACT)
    under_way = start_held(runs, "lost", **EXACT)
    ranks = [psutil.Process(pid) for pid in under_way.pids]
    reapers = [own for rank in ranks for own in rank.children() if "workers.main" in _words_of(own)]
    workers = [own for reaper in reapers for own in reaper.children()]
    (worker,) = [own for own in workers if own.children()]  # the grader starts no process
    worker.kill()
    (runs.folder / "gate").unlink()
    finished = finish(under_way, timeout_s=300)
    assert finished.status == 0, finished.output[-4000:]
    assert "ended with signal 9 at work; 2 agents begin again" in finished.output
    check_begun_again(runs.folder / "lost", whole)


def _words_of(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
