"""Both engines, really run: what they sample, what they say of it, and where they run."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spmdrl import config
from spmdrl.check.engine_options import engine_argument_names
from spmdrl.config import Config, LayoutSettings
from spmdrl.engine.protocol import UNTRUNCATED, Request, Truncation
from spmdrl.engine.vllm import internals
from tests.helpers.drawn import finished, plain
from tests.helpers.policy_runs import changed
from tests.helpers.worlds import in_world, make_engine

PROMPTS = ((5, 6, 7, 8), (9, 10, 11, 12, 13), (5, 6, 7, 8))
SAMPLINGS = ((0.0, UNTRUNCATED), (0.7, UNTRUNCATED), (1.0, Truncation(top_p=0.9, top_k=20)))
LONG = tuple(tuple(range(5 + i, 45 + i)) for i in range(6))  # one and a half fit into a step


def engine_config(
    model: str, *, kind: str = "vllm", options: dict | None = None, **layout
) -> Config:
    return Config(
        layout=LayoutSettings(device="cpu", **layout),
        model=config.ModelSettings(path=model),
        data=config.DataSettings(max_prompt_tokens=48),
        sampling=config.SamplingSettings(max_response_tokens=16),
        engine=config.EngineSettings(
            kind=kind,
            dtype="float32",
            cpu_kv_cache_gib=0.1,
            max_num_seqs=8,
            max_batched_tokens=60,
            options=options or {},
        ),
    )


def draw(engine, order, *, temperature=1.0, max_tokens=12, stop=()) -> dict:
    for i in order:
        engine.add(Request(str(i), PROMPTS[i % 3], max_tokens, temperature, 100 + i, stop))
    return finished(engine)


def crowd(engine, order) -> dict:
    """Draw seeded behind prompts that do not fit into one step together."""
    for i in order:
        engine.add(Request(f"long-{i}", LONG[i], 8, 1.0, 100 + i, ()))
    return finished(engine)


def most_under_way(engine) -> int:
    """Queue more than fit; return the most that had tokens and were unfinished after a step."""
    for i in range(12):
        engine.add(Request(f"many-{i}", PROMPTS[i % 3], 4, 1.0, i, ()))
    most = 0
    while engine.is_busy:
        engine.step()
        most = max(most, sum(len(c.tokens) > 0 for c in engine.unfinished()))
    return most


def swap(engine, *, mode: str, folders: tuple[str, str]) -> dict:
    """Exchange the weights in the middle of sequences; they are the old ones again at the end."""
    engine.cfg = changed(engine.cfg, rollout={"schedule": {"kv_cache": mode}})
    engine.weights_changed(7)
    for i in range(6):
        # The last two come later, and share the prompt of one that is under way.
        engine.add(Request(f"{mode}-{i}", PROMPTS[i % 3], 12 - i, 1.0, 100 + i, ()))
    done: dict = {}
    for _ in range(4):
        done |= {c.key: plain(c) for c in engine.step()}
    partial = {c.key: c for c in map(plain, engine.unfinished())}
    some = sorted(partial)[1:]
    so_far = {key: tuple(tokens) for key, tokens in engine.tokens_so_far([*some, "no"]).items()}
    assert so_far == {key: partial[key].tokens for key in some}
    for version, folder in ((8, folders[0]), (9, folders[1])):
        engine.reload_weights(load_file(f"{folder}/model.safetensors").items())
        engine.weights_changed(version)
        engine.add(Request(f"{mode}-{version}", PROMPTS[0], 5, 1.0, version, ()))
        for _ in range(3):
            done |= {c.key: plain(c) for c in engine.step()}
    return {"partial": partial, "done": done | finished(engine)}


def vllm_details(engine) -> dict:
    from vllm.engine.arg_utils import EngineArgs

    names = {f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_")}
    assert set(engine_argument_names()) == names
    caches = engine._llm.vllm_config.cache_config.enable_prefix_caching
    return {"caches": caches, "generated": by_both_loops(engine)}


def by_both_loops(engine) -> tuple[list, list, int]:
    """Draw by this engine's loop, and by `LLM.generate` around the same engine core; also return
    how many requests were validated by vLLM in this engine's loop."""
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    requests = []
    for i, prompt in enumerate(PROMPTS):
        for temperature, truncation in SAMPLINGS:
            for k in range(2):
                key, seed = f"{i} {temperature} {truncation} {k}", 1000 * i + k
                requests.append(Request(key, prompt, 8, temperature, seed, (9, 30), truncation))
    engine.weights_changed(engine.version)
    processor = engine._llm.input_processor
    with mock.patch.object(processor, "process_inputs", wraps=processor.process_inputs) as validate:
        for request in requests:
            engine.add(request)
    done = finished(engine)
    engine.weights_changed(engine.version)
    with mock.patch.object(LLMEngine, "from_engine_args", lambda *_, **__: engine._llm):
        llm = LLM(engine.cfg.model.path, skip_tokenizer_init=True)
    outputs = llm.generate(
        [{"prompt_token_ids": [*request.prompt]} for request in requests],
        [
            SamplingParams(
                temperature=request.temperature,
                top_p=request.truncation.top_p,
                top_k=request.truncation.top_k,
                max_tokens=request.max_tokens,
                seed=request.seed,
                stop_token_ids=[*request.stop_token_ids],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    generated = []
    for output in outputs:
        (sample,) = output.outputs
        tokens = tuple(sample.token_ids)
        logprobs = [known[token].logprob for token, known in zip(tokens, sample.logprobs)]
        generated.append((tokens, logprobs, sample.finish_reason == "length"))
    own = [done[request.key] for request in requests]
    by_loop = [(c.tokens, list(c.logprobs), c.is_truncated) for c in own]
    return by_loop, generated, validate.call_count


def on_engine(world, other: str = "") -> dict | None:
    cfg, before = world.cfg, torch.random.get_rng_state()
    engine = make_engine(cfg, world)
    assert torch.equal(before, torch.random.get_rng_state()), "the engine moved our generator"
    found = None
    if world.is_inference:
        warm = draw(engine, range(12), temperature=0.7)
        found = {
            "forward": draw(engine, range(12)),
            "backward": draw(engine, reversed(range(12))),
            "crowd": crowd(engine, range(6)),
            "single": crowd(engine, [3]),
            "alone": draw(engine, [7]),
            "most": most_under_way(engine),
            "warm": warm,
            "greedy": draw(engine, range(3), temperature=0.0),
            "scored": engine.score(
                [PROMPTS[int(k) % 3] + c.tokens for k, c in sorted(warm.items())]
            ),
        }
        if cfg.engine.kind == "vllm":
            found |= vllm_details(engine)
        stop = found["greedy"]["0"].tokens[2]
        found["stopped"] = draw(engine, [0], temperature=0.0, stop=(stop,))["0"]
        engine.weights_changed(3)
        assert engine.version == 3
        if other:
            found["swapped"] = {
                mode: swap(engine, mode=mode, folders=(other, cfg.model.path))
                for mode in ("recompute", "keep")
            }
    engine.close()
    return found


@pytest.fixture(scope="module")
def other_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    save_file(
        {n: w + 0.1 * torch.randn(w.shape, generator=noise) for n, w in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def ending_model(tiny_model, tmp_path_factory) -> Path:
    """The tiny model, whose config says that every token ends a response."""
    folder = tmp_path_factory.mktemp("models") / "ending"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    content = json.loads((folder / "config.json").read_text())
    content["eos_token_id"] = [*range(content["vocab_size"])]
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def found_by(kind: str, tiny_model: Path, other_model: Path) -> dict:
    cfg = engine_config(str(tiny_model), kind=kind, placement="split", world_size=2)
    trainer, generator = in_world(cfg, on_engine, str(other_model))
    assert trainer is None
    return generator


@pytest.fixture(scope="module")
def vllm_found(ending_model, other_model) -> dict:
    return found_by("vllm", ending_model, other_model)


@pytest.fixture(scope="module")
def transformers_found(ending_model, other_model) -> dict:
    return found_by("transformers", ending_model, other_model)


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def found(request) -> dict:
    return request.getfixturevalue(f"{request.param}_found")


def test_samples_do_not_depend_on_what_else_is_drawn(found):
    for key, completion in found["forward"].items():
        for other in (found["backward"][key], found["alone"].get(key, completion)):
            assert other.tokens == completion.tokens
            assert other.logprobs == pytest.approx(completion.logprobs, abs=1e-5)
    # different seeds of the same prompt differ
    assert found["forward"]["0"].tokens != found["forward"]["3"].tokens


def test_the_loop_draws_to_the_bit_what_vllms_own_loop_draws(vllm_found):
    by_loop, generated, num_validated = vllm_found["generated"]
    assert by_loop == generated
    assert {is_truncated for _, _, is_truncated in by_loop} == {False, True}
    assert len({tokens for tokens, _, _ in by_loop}) > 2 * len(SAMPLINGS)
    assert num_validated == len(PROMPTS) * len(SAMPLINGS) == len(by_loop) / 2


def test_nothing_but_stop_ids_ends_a_response_not_even_the_models_own_eos(found):
    assert {len(completion.tokens) for completion in found["forward"].values()} == {12}


def test_seeded_samples_do_not_depend_on_how_prompts_are_cut_into_steps(found):
    ((key, single),) = found["single"].items()
    assert len(found["crowd"]) == len(LONG)
    assert found["crowd"][key].tokens == single.tokens
    assert found["crowd"][key].logprobs == pytest.approx(single.logprobs, abs=1e-5)


def test_no_more_sequences_are_under_way_than_max_num_seqs(found):
    assert found["most"] == 8


def test_logprobs_are_those_of_the_distribution_sampled_from(found, tiny_model):
    for (key, completion), scored in zip(sorted(found["warm"].items()), found["scored"]):
        prompt = PROMPTS[int(key) % 3]
        for temperature, got in (
            (0.7, torch.tensor(completion.logprobs)),
            (1.0, scored[len(prompt) :]),
        ):
            want = logprobs_of(tiny_model, prompt, completion, temperature=temperature)
            assert torch.allclose(got, want, atol=2e-4), (got - want).abs().max()


@functools.cache
def plain_model(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs_of(folder: Path, prompt, completion, *, temperature=1.0) -> torch.Tensor:
    """What transformers says of a completion's tokens."""
    with torch.no_grad():
        logits = plain_model(folder)(torch.tensor([prompt + completion.tokens])).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def swapped_logprobs(folder: Path, key: str, completion) -> torch.Tensor:
    number = int(key.split("-")[1])
    return logprobs_of(folder, PROMPTS[number % 3 if number < 6 else 0], completion)


def test_each_token_carries_the_version_that_sampled_it(found, tiny_model, other_model):
    swapped = found["swapped"]["recompute"]
    mixed = 0
    for key, completion in swapped["done"].items():
        number = int(key.split("-")[1])
        assert list(completion.versions) == sorted(completion.versions)
        assert set(completion.versions) <= ({7, 8, 9} if number < 6 else {number, 9})
        assert len(completion.versions) == len(completion.tokens) == len(completion.logprobs)
        mixed += len(set(completion.versions)) == 3
        by_model = {
            folder: swapped_logprobs(folder, key, completion)
            for folder in (tiny_model, other_model)
        }
        for i, version in enumerate(completion.versions):
            own = by_model[other_model if version == 8 else tiny_model][i]
            assert abs(own - completion.logprobs[i]) < 2e-4, (key, i, version)
    assert mixed >= 4
    # What was drawn before the exchange is kept, as it was seen then.
    for key, partial in swapped["partial"].items():
        done, count = swapped["done"][key], len(partial.tokens)
        assert count >= 3 and set(partial.versions) == {7} and not partial.is_truncated
        assert done.tokens[:count] == partial.tokens
        assert done.logprobs[:count] == partial.logprobs


def test_a_kept_cache_serves_unfinished_sequences_and_no_new_one(found, tiny_model, other_model):
    swapped = found["swapped"]["keep"]
    gaps = []
    for key, completion in swapped["done"].items():
        is_new = int(key.split("-")[1]) > 6
        for version, folder in ((8, other_model), (9, tiny_model)):
            own = swapped_logprobs(folder, key, completion)
            at = [i for i, v in enumerate(completion.versions) if v == version]
            gap = [abs(float(own[i]) - completion.logprobs[i]) for i in at]
            if is_new and set(completion.versions) == {version}:
                assert max(gap) < 2e-4, "a new sequence used what older weights computed"
            elif not is_new:
                gaps += gap
    assert max(gaps) > 1e-2, "the cache was made anew"


def test_finish_reasons_and_the_stop_token_are_kept(found):
    assert all(c.is_truncated and len(c.tokens) == 12 for c in found["greedy"].values())
    assert not found["stopped"].is_truncated
    assert found["stopped"].tokens == found["greedy"]["0"].tokens[: len(found["stopped"].tokens)]


def test_tensor_parallel_ranks_agree_with_each_other_and_with_one_rank(
    vllm_found, tiny_model, monkeypatch
):
    sockets = tempfile.TemporaryDirectory()  # tmp_path is too long for one
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", sockets.name)
    found = vllm_found
    layout = dict(placement="split", world_size=4, trainer_ranks=2, inference_tp=2)
    options = {"enable_prefix_caching": False, "enforce_eager": False}
    results = in_world(engine_config(str(tiny_model), options=options, **layout), on_engine)
    assert results[:2] == [None, None] and not os.listdir(sockets.name)
    assert found["caches"] and not results[2]["caches"], "engine.options reach vLLM"
    for part in ("forward", "greedy"):
        assert {k: c.tokens for k, c in results[2][part].items()} == {
            k: c.tokens for k, c in results[3][part].items()
        }
    assert {k: c.tokens for k, c in results[2]["greedy"].items()} == {
        k: c.tokens for k, c in found["greedy"].items()
    }


def names_in_shared_memory(world) -> tuple[list[str], list[float]]:
    """Make an engine's groups; return what they have in /dev/shm, and a sum over their ranks."""
    internals.prepare_process(on_cpu=True, compiles=False)
    sockets = internals.create_groups(world, tp=2, dp=1, has_custom_all_reduce=False)
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    own = {group.mq_broadcaster.buffer.shared_memory.name}
    job = internals.shared_memory_name()
    total = group.all_reduce(torch.tensor([1.0, world.rank]))
    assert group.broadcast_object(world.rank if world.rank == 0 else None, src=0) == 0
    found = [name for name in os.listdir("/dev/shm") if name in own or name.startswith(job)]
    internals.destroy_groups()
    gc.collect()
    sockets.close()
    return found, total.tolist()


def test_a_killed_engine_leaves_no_shared_memory_because_nothing_there_has_a_name(tiny_model):
    layout = dict(placement="colocated", world_size=2, inference_tp=2)
    results = in_world(engine_config(str(tiny_model), **layout), names_in_shared_memory)
    assert results == [([], [2.0, 1.0])] * 2
