"""Limits and penalties of sampling, in engines and whole runs: trainers score what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmdrl.engine.protocol import Completion, Request, Truncation
from spmdrl.rollout.recordings import find_recorded, read_header, read_table
from spmdrl.sampling_masks import SamplingMasks
from tests.helpers.built import changed, generating, made, small_model
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, metrics, run
from tests.program.test_train import assert_same_end, final_weights

PROMPTS = ((5, 6, 7, 8), (9, 10, 11), (5, 6, 7, 8), (12,))
HOWS = (
    Truncation(top_p=0.8),
    Truncation(top_k=7),
    Truncation(min_p=0.2),
    Truncation(top_p=0.9, top_k=12, min_p=0.02),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(
        tmp_path_factory.mktemp("model") / "m",
        initializer_std=0.2,
        hidden_size=64,
        heads=2,
        kv_heads=2,
    )


def engine_config(folder: Path, kind: str):
    return made(
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=str(folder)),
        data=dict(max_prompt_tokens=16),
        sampling=dict(max_response_tokens=24, top_p=0.9),
        engine=dict(kind=kind, dtype="float32", cpu_kv_cache_gib=0.01, max_num_seqs=6),
    )


def drain(engine, found: dict[str, Completion]) -> dict[str, Completion]:
    while engine.is_busy:
        found |= {c.key: c for c in engine.step()}
    return found


def drawn(cfg) -> dict[str, tuple]:
    """Draw a crowd by different rules, some untruncated and greedy, exchanging weights midway."""
    found: dict[str, Completion] = {}
    prompts: dict[str, tuple[int, ...]] = {}
    with generating(cfg) as (_, engine):

        def add(key: str, temperature: float = 0.9, how: Truncation = Truncation()) -> None:
            i = len(prompts)
            prompts[key] = PROMPTS[i % 4]
            engine.add(Request(key, prompts[key], 8 + i % 3, temperature, i, (), how))

        for i in range(16):
            add(f"cut-{i}", 0.9, HOWS[i % 4])
        add("whole")
        add("greedy", 0.0)
        for mode in ("keep", "recompute"):
            engine.cfg = changed(cfg, rollout=dict(schedule=dict(kv_cache=mode)))
            for _ in range(3):
                found |= {c.key: c for c in engine.step()}
            before = {c.key: c for c in engine.unfinished()}
            engine.weights_changed(engine.version + 1)
            for key, part in before.items():
                assert (not part.extra_columns) == (key[:3] != "cut" or not len(part.tokens))
        drain(engine, found)
        scored = engine.score([prompts[k] + tuple(c.tokens.tolist()) for k, c in found.items()])
    assert any(len(part.tokens) for part in before.values())
    plain = {
        k: (prompts[k], c.tokens, c.logprobs, c.extra_columns.get("sampling_masks"))
        for k, c in found.items()
    }
    return plain | {"scored": dict(zip(found, scored))}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_engines_say_among_what_each_token_was_drawn(kind, model):
    from transformers import AutoModelForCausalLM

    (found,) = run_ranks(1, drawn, engine_config(model, kind))
    scored = found.pop("scored")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    sizes: dict[int, list[int]] = {}
    for key, (prompt, tokens, logprobs, sets) in found.items():
        ids = torch.tensor(prompt + tuple(tokens.tolist()))
        with torch.no_grad():
            raw = lm(ids[None]).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(raw, -1).gather(1, tokens[:, None])[:, 0]
        assert float((scored[key][len(prompt) :] - own).abs().max()) < 2e-5  # as ever
        if key in ("whole", "greedy"):
            assert sets is None
            continue
        sets.check(tokens)
        kept = opened(sets)
        logits = (raw / 0.9).masked_fill(~kept, -torch.inf)
        want = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        assert float((logprobs - want).abs().max()) < 1e-5, key
        probs = torch.softmax(raw / 0.9, -1)
        how = HOWS[int(key[4:]) % 4]
        for row, left in zip(probs, kept):
            inside, outside = row[left], row[~left]
            assert float(inside.min()) >= float(outside.max() if len(outside) else 0) - 1e-6
            assert not how.top_k or len(inside) <= how.top_k
            assert float(inside.min()) >= how.min_p * float(row.max()) - 1e-6
            sizes.setdefault(int(key[4:]) % 4, []).append(len(inside))
    assert all(len(set(own)) > 1 for which, own in sizes.items() if which != 1), sizes


def opened(sets: SamplingMasks) -> torch.Tensor:
    from spmdrl.model.sampling_rules import make_sampling_mask

    width = sets.vocab
    return ~make_sampling_mask(sets, "cpu").dropped(slice(0, len(sets)), first=0, width=width)


# --------------------------------------------------------------------------- whole runs

REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""


def flags_of(model: Path, out: Path, **flags: object) -> dict[str, object]:
    (out.parent / "r.py").write_text(REWARD)
    own = {
        "model.path": model,
        "model.compute-dtype": "float32",
        "engine.dtype": "float32",
        "output-dir": out,
        "sampling.top-p": 0.9,
        "sampling.top-k": 20,
        "sampling.min-p": 0.01,
        "sampling.temperature": 0.8,
        "sampling.repetition-penalty": 1.2,
        "sampling.presence-penalty": 0.3,
        "sampling.frequency-penalty": 0.1,
        "sampling.logit-bias": '{"20": -2.0, "30": 1.0}',
        "rollout.record.every": "1",
        "rewards.functions": f"{out.parent / 'r.py'}:varied",
        "optimizer.lr": "1e-3",
    }
    return TINY["rl"] | own | {k.replace("_", "-"): v for k, v in flags.items()}


def check_run(out: Path, steps: int) -> None:
    for row in metrics(out):
        if row["policy/staleness"] == 0:
            assert row["policy/mismatch_logprob_diff"] < 2e-6, row
            assert row["policy/mismatch_prob_diff_max"] < 2e-5, row
        assert 1 < row["rollout/sampling_mask_ids"] <= 20
        assert 0 < row["rollout/sampling_mask_bytes"] <= 16
        assert 0 <= row["rollout/kept_all_frac"] < 0.5
    (file,) = find_recorded(out).files_of(steps - 1)
    assert read_header(file)["columns"]["sampling_masks"] > 20
    assert all(row["sampling_masks"] for row in read_table(file).to_pylist())


@pytest.mark.proves("truncated", "tp", "split", "record")
def test_what_vllm_truncates_is_scored_so_by_tensor_parallel_trainers(model, tmp_path):
    out = tmp_path / "out"
    run(
        "demo_grpo.yaml",
        3,
        **flags_of(model, out) | {"layout.trainer-ranks": 2, "layout.tp": 2},
        steps=2,
    )
    check_run(out, 2)


@pytest.mark.proves("truncated", "lag", "split", "record", "transformers")
@pytest.mark.proves("truncated", "replay", "lag")
def test_a_run_resumes_and_replays_with_its_sampling_masks(model, tmp_path):
    whole, later, again = tmp_path / "whole", tmp_path / "later", tmp_path / "again"
    flags = {
        "engine.kind": "transformers",
        "lag": 1,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": 9,
    }
    run("demo_grpo.yaml", 2, **flags_of(model, whole) | flags, steps=3)
    check_run(whole, 3)
    flags["checkpoint.resume"] = whole / "checkpoints" / "step_1"  # with a batch made ahead
    resumed = run("demo_grpo.yaml", 2, **flags_of(model, later) | flags, steps=3)
    assert "resume" in resumed.output
    ends = [final_weights(folder) for folder in (whole, later)]
    assert ends[0].pop("newest") == ends[1].pop("newest")
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    replay = {"layout.placement": "offline", "rollout.record.replay": whole, "lag": 1}
    flags = flags_of(model, again) | replay | {"rollout.record.every": "0"}
    run("demo_grpo.yaml", 1, **flags, steps=3)
    assert_same_end(whole, again)
