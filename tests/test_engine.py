"""The engine adapter on real vLLM: what it samples, what it says of it, and where it runs."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from spmdrl import config
from spmdrl.config import Config, Layout
from spmdrl.engine.protocol import Request

PROMPTS = ((5, 6, 7, 8), (9, 10, 11, 12, 13), (5, 6, 7, 8))


def engine_config(model: str, **layout) -> Config:
    return Config(
        layout=Layout(device="cpu", **layout), model=config.Model(path=model),
        data=config.Data(max_prompt_tokens=48), sampling=config.Sampling(max_response_tokens=16),
        engine=config.Engine(dtype="float32", cpu_kv_cache_gib=0.1),
    )


def draw(engine, order, *, temperature=1.0, max_tokens=12, stop=()):
    for i in order:
        engine.add(Request(key=str(i), prompt=PROMPTS[i % 3], max_tokens=max_tokens,
                           temperature=temperature, seed=100 + i, stop_token_ids=stop))
    done = {}
    while engine.is_busy:
        done |= {c.key: c for c in engine.step()}
    return done


def on_engine(cfg: Config) -> dict | None:
    from spmdrl.engine.vllm import Engine
    from spmdrl.world import World

    world = World.start(cfg)
    before = torch.random.get_rng_state()
    engine = Engine(cfg, world)
    assert torch.equal(before, torch.random.get_rng_state()), "the engine moved our generator"
    found = None
    if world.is_inference:
        warm = draw(engine, range(12), temperature=0.7)
        found = {
            "forward": draw(engine, range(12)), "backward": draw(engine, reversed(range(12))),
            "warm": warm, "greedy": draw(engine, range(3), temperature=0.0),
            "scored": [engine.score([PROMPTS[int(k) % 3] + c.tokens])[0]
                       for k, c in sorted(warm.items())],
        }
        stop = found["greedy"]["0"].tokens[2]
        found["stopped"] = draw(engine, [0], temperature=0.0, stop=(stop,))["0"]
        engine.add(Request("gone", PROMPTS[0], 12, 1.0, 1, ()))
        engine.abort(["gone"])
        assert not engine.is_busy
        engine.weights_changed(3)
        assert engine.version == 3
    engine.close()
    world.close()
    return found


@pytest.fixture(scope="module")
def found(tiny_model) -> dict:
    trainer, generator = run_ranks(
        2, on_engine, engine_config(str(tiny_model), placement="split", world_size=2))
    assert trainer is None
    return generator


def test_samples_do_not_depend_on_request_order(found):
    for key, completion in found["forward"].items():
        assert found["backward"][key].tokens == completion.tokens
    # different seeds of the same prompt differ
    assert found["forward"]["0"].tokens != found["forward"]["3"].tokens


def test_logprobs_are_those_of_the_distribution_sampled_from(found, tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for (key, completion), scored in zip(sorted(found["warm"].items()), found["scored"]):
        prompt = PROMPTS[int(key) % 3]
        tokens = torch.tensor([prompt + completion.tokens])
        with torch.no_grad():
            logits = model(tokens).logits[0].float()
        for temperature, got in ((0.7, torch.tensor(completion.logprobs)),
                                 (1.0, scored[len(prompt):])):
            logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
            want = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            assert torch.allclose(got, want, atol=2e-4), (got - want).abs().max()


def test_finish_reasons_and_the_stop_token_are_kept(found):
    assert all(c.is_truncated and len(c.tokens) == 12 for c in found["greedy"].values())
    assert not found["stopped"].is_truncated
    assert found["stopped"].tokens == found["greedy"]["0"].tokens[: len(found["stopped"].tokens)]


def test_tensor_parallel_ranks_agree_with_each_other_and_with_one_rank(found, tiny_model):
    layout = dict(placement="split", world_size=4, trainer_ranks=2, inference_tp=2)
    results = run_ranks(4, on_engine, engine_config(str(tiny_model), **layout))
    assert results[:2] == [None, None]
    for part in ("forward", "greedy"):
        assert {k: c.tokens for k, c in results[2][part].items()} == {
            k: c.tokens for k, c in results[3][part].items()}
    assert {k: c.tokens for k, c in results[2]["greedy"].items()} == {
        k: c.tokens for k, c in found["greedy"].items()}
