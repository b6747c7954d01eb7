"""engine.exact on the trainer: no pass for old logprobs, and a run whose bits differ ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.check import engine_options
from spmdrl.check.engine_options import engine_option_problems
from spmdrl.check.fit import build_policy, policy_problems
from spmdrl.check.rules import rule_problems
from spmdrl.config import Config
from spmdrl.model.exact.numerics import Exact
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk
from spmdrl.types import Batch
from tests.helpers.built import changed, good
from tests.helpers.comparing import differing, full_parameters
from tests.helpers.policy_runs import config, own_batch, small_model, update
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import another_trainer, with_trainer


def _sampled_by(trainer: Any, batch: Batch) -> Batch:
    """Return a batch whose engine sampled with what the trainer computes."""
    found = iter(trainer.logprobs(batch))
    updates = tuple(
        tuple(dataclasses.replace(one, rollout_logprobs=next(found)) for one in microbatches)
        for microbatches in batch.updates
    )
    return dataclasses.replace(batch, updates=updates)


def _runs(trainer: Any) -> dict:
    world = trainer.world
    batch = _sampled_by(trainer, own_batch(world))
    annotated = trainer.annotate(batch, step=0)
    found: dict[str, Any] = {"annotated": annotated.columns}
    found["sums"] = update(trainer, annotated, step=0)
    found["parameters"] = full_parameters(trainer)
    passing = another_trainer(trainer)
    passing.columns = passing.columns | {"old_entropy"}  # which takes a pass
    found["with a pass"] = passing.annotate(batch, step=0).columns
    update(passing, passing.annotate(batch, step=0), step=0)
    found["parameters with a pass"] = full_parameters(passing)
    for name, where in (("first", 0), ("second", 1)):
        odd = [list(own) for own in batch.updates]
        logprobs = odd[where][0].rollout_logprobs.clone()
        at = int(odd[where][0].response_mask.nonzero()[0])
        logprobs[at] = torch.nextafter(logprobs[at], torch.tensor(0.0))
        odd[where][0] = dataclasses.replace(odd[where][0], rollout_logprobs=logprobs)
        wrong = dataclasses.replace(batch, updates=tuple(map(tuple, odd)))
        try:
            other = another_trainer(trainer)
            update(other, other.annotate(wrong, step=3), step=3)
        except RuntimeError as error:
            found[name] = str(error)
    return found


def test_a_step_takes_the_engines_logprobs_and_proves_those_of_its_first_update(tmp_path: Path):
    cfg = changed(
        config(small_model(tmp_path), tmp_path, updates=2, correction="none"),
        engine=dict(exact=True),
    )
    (found,) = with_trainer(cfg, _runs)
    sums = found["sums"]
    assert sums["policy/mismatch_logprob_diff"][0] == 0 < sums["policy/mismatch_logprob_diff"][1]
    assert sums["policy/mismatch_k1"][0] == sums["policy/mismatch_k3"][0] == 0
    assert sums["policy/kl_old"][0] != 0  # the second update is of a policy that has moved
    assert not differing(found["parameters"], found["parameters with a pass"])
    assert "step 3: log-probabilities of engine and trainer differ by" in found["first"]
    assert "check MODEL --exact" in found["first"]
    assert "second" not in found
    for own, other in zip(found["annotated"], found["with a pass"]):
        for one, passed in zip(own, other):
            assert set(one) == {"old_logprobs"}
            assert torch.equal(one["old_logprobs"], passed["old_logprobs"])


def _one_update(trainer: Any) -> dict:
    batch = _sampled_by(trainer, own_batch(trainer.world))
    trainer.columns = {"ref_logprobs"}
    (first, *_), *_ = trainer.annotate(batch, step=0).columns
    return {"columns": set(first), "sums": update(trainer, batch, step=0)}


def test_the_pass_that_balances_experts_leaves_the_comparison_to_the_next(tmp_path: Path):
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, vocab_size=128)
    heads = dict(num_key_value_heads=2, head_dim=32)
    folder = tiny_folder(tmp_path / "model", "qwen3_moe", **sizes, **heads)
    balanced = {"moe": {"balance": "aux"}}
    cfg = changed(
        config(folder, tmp_path, correction="none", model=balanced), engine=dict(exact=True)
    )
    (found,) = with_trainer(cfg, _one_update)
    gap, count = found["sums"]["policy/mismatch_logprob_diff"]
    assert gap == 0 < count
    assert found["columns"] == set(), "nothing asks for old logprobs"


def test_with_a_push_in_flight_tokens_of_older_weights_are_not_compared():
    packed = SimpleNamespace(policy_versions=torch.tensor([-1, 3, 4, 4]))
    one: Any = SimpleNamespace(packed=packed, loss_mask=torch.tensor([False, True, True, True]))
    logprobs = torch.zeros(4)
    for in_flight, mask in ((False, one.loss_mask), (True, packed.policy_versions == 4)):
        comparison = Exact(in_flight=in_flight).comparison()
        comparison.begin([one])
        version = torch.tensor(4)
        chosen = comparison.chosen(one, old=logprobs + 1, current=logprobs, version=version)
        assert chosen is not None
        assert chosen[0] is logprobs
        assert torch.equal(chosen[1], mask)
        assert comparison.chosen(one, old=logprobs, current=logprobs, version=version) is None


def test_a_step_without_a_comparison_ends_the_run():
    with pytest.raises(RuntimeError, match="step 4: engine and trainer were not compared"):
        Exact().check_step({"policy/skipped_updates": (1.0, 1.0)}, step=4)


EXACT = dict(kind="transformers", dtype="float32", exact=True)
PLAIN = dict(
    lag=0, model=dict(compute_dtype="float32"), engine=EXACT, algorithm=dict(correction="none")
)


def _exact(**fields: Any) -> Config:
    return changed(changed(good(), **PLAIN), **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(lag=1), "lag: 1 with engine.exact true"),
        (
            dict(lag=1, rollout=dict(schedule=dict(in_flight=True, kv_cache="keep"))),
            "rollout.schedule.kv_cache: keep with engine.exact true",
        ),
        (
            dict(
                lag=1,
                rollout=dict(schedule=dict(in_flight=True)),
                model=dict(moe=dict(replay=True)),
            ),
            "model.moe.replay: true with rollout.schedule.in_flight true and engine.exact true",
        ),
        (dict(engine=dict(dtype="bfloat16")), "engine.dtype: bfloat16 with engine.exact true"),
        (dict(algorithm=dict(correction="tis")), "algorithm.correction: tis with engine.exact"),
        (
            dict(layout=dict(cp=2), model=dict(kernels=dict(context="ring"))),
            "model.kernels.context: ring with engine.exact true",
        ),
        (dict(rollout=dict(schedule=dict(over_sample=1.5))), "rollout.schedule.over_sample: 1.5"),
        (dict(model=dict(kernels=dict(compile=True))), "model.kernels.compile: true with engine"),
        (dict(layout=dict(tp=2)), "layout.tp: 2 with engine.exact true"),
        (
            dict(algorithm=dict(objective="online_preference", loss="dpo")),
            "engine.exact: true with algorithm.objective online_preference",
        ),
        (dict(stream=dict(max_logprob_gap=0.2)), "stream.max_logprob_gap: 0.2 with engine.exact"),
        (dict(layout=dict(inference_tp=2)), "layout.inference_tp: 2 with engine.exact true"),
        (
            dict(engine=dict(kind="vllm"), model=dict(moe=dict(replay=True))),
            "model.moe.replay: true with engine.kind vllm and engine.exact true",
        ),
        (
            dict(engine=dict(kind="vllm", options={"kv_cache_dtype": "fp8"})),
            "with engine.exact true; it was tried with block_size and enable_prefix_caching alone",
        ),
        (
            dict(model=dict(lora=dict(rank=4)), engine=dict(kind="vllm")),
            "model.lora: is set with engine.exact true and engine.kind vllm",
        ),
        (
            dict(
                model=dict(lora=dict(rank=4), compute_dtype="bfloat16"),
                engine=dict(dtype="bfloat16"),
            ),
            "model.lora: is set with engine.exact true and model.compute_dtype bfloat16",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(fields: dict, words: str):
    in_flight = dict(lag=1, rollout=dict(schedule=dict(in_flight=True)))
    for allowed in ({}, in_flight, in_flight | dict(algorithm=dict(correction="tis"))):
        problems = rule_problems(_exact(**allowed))
        assert not [problem for problem in problems if "engine.exact" in problem]
    assert [problem for problem in rule_problems(_exact(**fields)) if words in problem]


def test_adapters_of_experts_are_refused_and_those_beside_them_are_not(tmp_path: Path):
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, vocab_size=128)
    folder = tiny_folder(tmp_path / "model", "qwen3_moe", num_key_value_heads=2, **sizes)
    found = {}
    for targets in ("all-linear", ("q_proj",)):
        cfg = _exact(model=dict(path=str(folder), lora=dict(rank=4, targets=targets)))
        problems = policy_problems(cfg, build_policy(cfg))
        found[targets] = [problem for problem in problems if "engine.exact" in problem]
    assert found["q_proj",] == []
    (problem,) = found["all-linear"]
    assert problem.startswith("engine.exact: true with model.lora on the experts model.layers.0")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("lfm2", "whose Lfm2ShortConv keeps a state, which is not computed exactly"),
        ("deepseek_v32", "whose DeepseekV32Attention computes by code of its own, which is not"),
        ("llama4_text", "which attends within chunks of 32 tokens"),
        ("diffllama", "whose DiffLlamaAttention attends more than once, which no cache keeps"),
    ],
)
def test_layers_that_are_not_exact_are_refused_by_what_they_do(family, words, tmp_path: Path):
    shrunk(family_config(family)).save_pretrained(tmp_path)
    cfg = _exact(model=dict(path=str(tmp_path)))
    (problem,) = [one for one in policy_problems(cfg, build_policy(cfg)) if "exact:" in one]
    assert words in problem


def test_a_vllm_with_other_caches_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch):
    cfg = _exact(engine=dict(kind="vllm"))
    assert not [problem for problem in engine_option_problems(cfg) if "engine.exact" in problem]
    monkeypatch.setattr(engine_options, "has_cache_layouts", lambda: False)
    (problem,) = [one for one in engine_option_problems(cfg) if "engine.exact" in one]
    assert "lays its caches out otherwise; install 0.32" in problem
