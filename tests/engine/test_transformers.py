"""What is the transformers engine's own: its draws, its attention, and training without vLLM."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl import config
from spmdrl.check.settings import validate
from spmdrl.config import Config, MemorySettings
from spmdrl.engine.protocol import Request
from spmdrl.engine.transformers.draws import draw, numbers
from spmdrl.engine.transformers.kv_cache import KVCache, Work
from spmdrl.model.logit_passes import log_probs
from spmdrl.world.world import World
from tests.helpers.comparing import plain_scores
from tests.helpers.drawn import finished
from tests.helpers.policy_runs import small_model
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import in_world, make_engine

# --------------------------------------------------------------------------- draws


def test_numbers_are_uniform_and_differ_by_seed_and_position():
    seeds = torch.tensor([0, 1, 2**62, 2**63 - 1, -1]).repeat_interleave(20000)
    at = numbers(seeds, torch.arange(20000).repeat(5))
    assert at.dtype == torch.float64 and bool(((at >= 0) & (at < 1)).all())
    assert len(at.unique()) == len(at)
    for one in at.view(5, -1):
        counts = torch.histc(one.float(), 20, 0.0, 1.0)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square of 19: p < 2e-4
    neighbours = torch.corrcoef(at.view(5, -1))
    assert float((neighbours - torch.eye(5)).abs().max()) < 0.04


def test_draws_follow_the_distribution_of_each_rows_temperature():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, float("-inf"), -30.0])
    count = 40000
    for temperature in (0.5, 1.0, 3.0):
        at = numbers(torch.full((count,), 7), torch.arange(count))
        tokens, logprobs, kept = draw(
            logits.expand(count, -1), at=at, temperatures=torch.full((count,), temperature)
        )
        assert kept is None
        want = torch.softmax(logits.double() / temperature, 0)
        got = torch.bincount(tokens, minlength=6) / count
        assert float((got - want).abs().max()) < 0.01
        assert torch.allclose(logprobs.double(), want.log()[tokens], atol=1e-6)
    mixed, logprobs, _ = draw(
        logits.expand(3, -1),
        temperatures=torch.tensor([0.0, 1.0, 1.0]),
        at=torch.tensor([0.999, 0.0, 1 - 2.0**-53], dtype=torch.float64),
    )
    assert mixed.tolist() == [0, 0, 5]  # greedy; the two ends of the distribution
    assert float(logprobs[0]) == pytest.approx(float(torch.log_softmax(logits, 0)[0]))


def test_only_exact_draws_have_the_bits_of_the_trainers_head():
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    settings: Any = dict(temperatures=torch.zeros(64), at=torch.zeros(64, dtype=torch.float64))
    likeliest = logits.argmax(-1, keepdim=True)
    plain, exact = (draw(logits, **settings, is_exact=is_exact)[1] for is_exact in (False, True))
    assert torch.equal(plain, logits.log_softmax(-1).gather(1, likeliest)[:, 0])
    assert torch.equal(exact, log_probs(logits).gather(1, likeliest)[:, 0])
    assert not torch.equal(plain, exact), "the case is not tested"


# --------------------------------------------------------------------------- the model


def engine_config(model: Path | str, **engine) -> Config:
    return Config(
        layout=config.LayoutSettings(placement="colocated", world_size=1, device="cpu"),
        model=config.ModelSettings(path=str(model), memory=MemorySettings(head_chunk_tokens=40)),
        data=config.DataSettings(max_prompt_tokens=24),
        sampling=config.SamplingSettings(max_response_tokens=20),
        engine=config.EngineSettings(**({"kind": "transformers", "dtype": "float32"} | engine)),
    )


PROMPTS = [tuple(range(10, 10 + n)) for n in (1, 24, 7, 7, 3, 15)]


def draws_of(world: World, folders: list[Path]) -> dict[Path, tuple]:
    """Return per model what a crowd of unequal sequences drew, and its scores."""
    found = {}
    for folder in folders:
        engine = make_engine(engine_config(folder, max_num_seqs=4, max_batched_tokens=16), world)
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(str(i), prompt, 20 - i, 1.0, i, ()))
        with pytest.raises(RuntimeError, match="unfinished"):
            engine.score([PROMPTS[1]])
        done = finished(engine)
        rows = [prompt + done[str(i)].tokens for i, prompt in enumerate(PROMPTS)]
        found[folder] = rows, [done[str(i)].logprobs for i in range(len(rows))], engine.score(rows)
        engine.close()
    return found


def test_attention_over_the_cache_is_that_of_the_plain_model(tmp_path):
    # Windows and soft caps smaller than what these sequences and scores come to.
    narrow = {
        "qwen2": {},
        "mistral": {"sliding_window": 5},
        "gemma3": {"sliding_window": 4},
        "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    }
    for name, fields in narrow.items():
        sizes = dict(hidden_size=64, initializer_std=0.08)
        small_model(tmp_path, name, architecture=name, hf_config=fields, **sizes)
    # It attends twice in a layer, with other values each time.
    twice = dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    tiny_folder(tmp_path / "diffllama", "diffllama", **twice)
    folders = [tmp_path / name for name in (*narrow, "diffllama")]
    (found,) = in_world(engine_config(folders[0]), draws_of, folders)
    for folder, (rows, logprobs, scores) in found.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        right = plain_scores(model, rows)
        for want, prompt, drawn, score in zip(right, PROMPTS, logprobs, scores):
            assert float(score[0]) == 0
            assert torch.allclose(score, want, atol=1e-4), folder
            assert torch.allclose(torch.tensor(drawn), want[len(prompt) :], atol=1e-4), folder


def test_a_layer_that_is_cached_twice_in_a_pass_is_refused():
    work = Work(KVCache(1, 1), "spmdrl_padded")
    work.note(0)
    work.note(1)
    with pytest.raises(ValueError, match="layer 0 of the model attends more than once"):
        work.note(0)


def forbid_vllm() -> None:
    """Make any import of it fail, as where it is not installed."""
    for name in {"vllm", *(name for name in sys.modules if name.startswith("vllm."))}:
        sys.modules[name] = None
    # These were imported before the fork, with vLLM.
    for name in [name for name in sys.modules if name.startswith("spmdrl.engine.vllm")]:
        if name != "spmdrl.engine.vllm.core_loop":  # has a record, and no import of vLLM
            del sys.modules[name]


def refusals(world: World, model: str) -> dict[str, str]:
    engine, found = make_engine(world.cfg, world), {}
    with torch.no_grad():
        engine.model.get_input_embeddings().weight[9] = math.nan

    def step():
        engine.add(Request("odd", (9,), 4, 1.0, 0, ()))
        engine.step()

    forbid_vllm()
    for name, call in {
        "long": lambda: engine.add(Request("a", (5,) * 44, 1, 1.0, 0, ())),
        "empty": lambda: engine.add(Request("a", (), 1, 1.0, 0, ())),
        "name": lambda: engine.load_weights([("other.weight", torch.zeros(1))]),
        "room": lambda: make_engine(engine_config(model, cpu_kv_cache_gib=1e-6), world),
        "vllm": lambda: make_engine(engine_config(model, kind="vllm"), world),
        "nan": step,
    }.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        found[name] = str(caught.value)
    engine.close()
    return found


def test_what_cannot_be_done_is_refused_with_the_reason(tiny_model):
    (found,) = in_world(engine_config(tiny_model), refusals, str(tiny_model))
    assert "a prompt of 44 tokens; from 1 to 43" in found["long"]
    assert "a prompt of 0 tokens" in found["empty"]
    assert "no tensor other.weight" in found["name"]
    assert found["room"].startswith("engine.cpu_kv_cache_gib: 1e-06 leaves 1,073 bytes")
    assert "pip install vllm" in found["vllm"] and "engine.kind to transformers" in found["vllm"]
    assert "request odd: the logits of token 0 are not all numbers" in found["nan"]


# --------------------------------------------------------------------------- training


def _train(*configs: Config) -> None:
    import train
    from spmdrl.report import report

    class Lasting(World):
        """One that several runs take part in."""

        def close(self) -> None:
            pass

    forbid_vllm()
    report.draw = lambda *runs, **options: False  # the picture at the end takes seconds
    world = Lasting.start(configs[0])
    for cfg in configs:
        assert train.train(cfg, dataclasses.replace(world, cfg=cfg)) == 0
    World.close(world)


def _run_config(model: Path, out: Path, **fields) -> Config:
    (model.parent / "r.py").write_text(
        "def varied(prompts, completions, **columns):\n"
        "    return [sum(map(ord, c)) % 11 / 11 for c in completions]\n"
    )
    return Config(
        output_dir=str(out),
        model=config.ModelSettings(path=str(model), compute_dtype="float32"),
        data=config.DataSettings(
            train="task:addition",
            eval="task:addition",
            size=1000,
            eval_size=8,
            task_options={"digits": 2},
            max_prompt_tokens=8,
        ),
        batch=config.BatchSettings(prompts_per_step=4, group_size=4, tokens_per_microbatch=128),
        sampling=config.SamplingSettings(max_response_tokens=8),
        optimizer=config.OptimizerSettings(lr=1e-3),
        engine=config.EngineSettings(kind="transformers", dtype="float32", max_num_seqs=12),
        stream=config.StreamSettings(mode="traced", verify_every=1, max_logprob_gap=1e-4),
        rewards=config.RewardsSettings(functions=(f"{model.parent / 'r.py'}:varied",)),
        report=config.ReportSettings(trackers=()),
        **fields,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    sizes = dict(hidden_size=64, layers=1, heads=2, kv_heads=1, max_positions=64)
    return small_model(tmp_path_factory.mktemp("model"), "start", **sizes)


def _rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "schedule", [pytest.param({}, marks=pytest.mark.grid), {"in_flight": True, "kv_cache": "keep"}]
)
def test_three_steps_without_vllm_while_another_rank_trains(schedule, model, tmp_path):
    cfg = _run_config(
        model,
        tmp_path / "run",
        steps=3,
        lag=1,
        evaluate=config.EvaluateSettings(every_steps=2),
        rollout=config.RolloutSettings(schedule=config.ScheduleSettings(**schedule)),
        layout=config.LayoutSettings(world_size=2, device="cpu", wait_timeout_s=200),
    )
    assert validate(cfg) == []
    run_ranks(2, _train, cfg)
    rows = _rows(tmp_path / "run")
    steps = [row for row in rows if "policy/loss" in row]
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 2, 3]
    assert all(row["policy/grad_norm"] > 0 and row["sync/bytes"] > 0 for row in steps)
    assert steps[0]["policy/mismatch_k3"] < 1e-8 < steps[2]["policy/mismatch_k3"]
    assert steps[0]["policy/staleness"] == 0 < steps[2]["policy/staleness"] <= 1


def test_a_run_that_both_trains_and_generates_resumes_to_the_same_end(model, tmp_path):
    def cfg(out: str, steps: int) -> Config:
        return _run_config(
            model,
            tmp_path / out,
            steps=steps,
            layout=config.LayoutSettings(placement="colocated", world_size=1, device="cpu"),
        )

    run_ranks(1, _train, cfg("whole", 3), cfg("parts", 2), cfg("parts", 3))
    whole, parts = (
        [row for row in _rows(tmp_path / out) if "policy/loss" in row] for out in ("whole", "parts")
    )
    for one, other in zip(whole, parts, strict=True):
        assert one["policy/loss"] == other["policy/loss"] and one["policy/mismatch_k3"] < 1e-8
        assert one["policy/grad_norm"] == other["policy/grad_norm"] > 0
