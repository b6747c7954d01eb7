"""Teachers that read other prompts, sources, vocabularies and kept ids, against plain transformers
in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import Config, SourceSettings
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.train.companions.reference import Synced
from spmdrl.types import Batch
from tests.helpers.built import changed
from tests.helpers.comparing import assert_near, full_parameters
from tests.helpers.policy_runs import (
    LENGTHS,
    VALID,
    batch,
    config,
    own_batch,
    sequence,
    small_model,
    update,
)
from tests.helpers.worlds import with_trainer

HINTS = ["the answer is seven, so write it", "say five: three and two are it"]
"""Longer than a shared prefix has to be."""


@dataclass(frozen=True)
class Reads:
    """What the teacher of a sequence is, and what it reads before the response."""

    model: Path
    prompt: str = ""


def write_rows(where: Path, name: str, count: int) -> Path:
    rows = [{"prompt": f"{name}{i}?", "answer": i, "hint": HINTS[i % 2]} for i in range(count)]
    file = where / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def distilling(where: Path, student: Path, *, layout: Mapping = {}, **changes: Any) -> Config:
    """Return a config of on-policy distillation at temperature 0.8."""
    cfg = config(
        student,
        where,
        objective="on_policy_distill",
        loss="divergence",
        loss_options={"kind": "forward"},
        **layout,
    )
    sampling = {"max_response_tokens": 64} | changes.pop("sampling", {})
    return changed(cfg, optimizer={"max_grad_norm": 0.0}, sampling=sampling, **changes)


def with_rows(own: Batch) -> Batch:
    """Let each group answer a row of its own: rows 0 and 1 are of the first source."""
    return changed(own, scalars={"rows": torch.arange(len(LENGTHS)) // 2})


def kept_ids(index: int, vocab: int) -> Tensor:
    """Return which ids each token of a sequence was drawn from: few, many, all; [tokens, V]."""
    tokens = sequence(index)
    generator = torch.Generator().manual_seed(300 + index)
    shares = torch.tensor([0.05, 0.6, 1.0])[torch.arange(len(tokens)) % 3]
    kept = torch.rand(len(tokens), vocab, generator=generator) < shares[:, None]
    return kept.index_put((torch.arange(len(tokens)), tokens), torch.tensor(True))


def masked(own: Batch, vocab: int) -> Batch:
    """Give every token of a batch the ids that it was drawn from."""
    updates = []
    for update_ in own.updates:
        microbatches = []
        for one in update_:
            rows = [kept_ids(i, vocab) for i in one.sequence_ids.tolist() if i >= 0]
            allowed = torch.cat([*rows, torch.ones(0, vocab, dtype=torch.bool)])
            if not rows:
                allowed = torch.ones(1, vocab, dtype=torch.bool)
            columns = {SamplingMasks.key: SamplingMasks.from_allowed(allowed)}
            microbatches.append(replace(one, extra_columns=columns))
        updates.append(tuple(microbatches))
    return replace(own, updates=tuple(updates))


def steps(trainer: Any, count: int, *, vocab: int = 0) -> dict:
    """Take steps; return sums, parameters and the teacher's logprobs of the first."""
    own = with_rows(own_batch(trainer.world))
    if vocab:
        own = masked(own, vocab)
    found = trainer.annotate(own, step=0).columns
    sums = [update(trainer, own, step=step) for step in range(count)]
    return {"sums": sums, "parameters": full_parameters(trainer), "columns": found}


def logits_of(folder: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(ids[None]).logits[0] / 0.8


def by_transformers(
    student: Path, reads: Callable[[int], Reads], *, vocab: int = 0, shared: int = 10**9
) -> tuple[float, dict[int, list[float]]]:
    """Return the mean KL(teacher || student) per response token, and {sequence: the teacher's
    logprobs of its response}, in float64 and one sequence at a time."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(student)
    total = 0.0
    count = 0
    logprobs = {}
    for index in (i for i in range(len(LENGTHS)) if i != 4):  # which is not valid
        row = sequence(index)
        first = (len(row) + 2) // 3
        taught = row
        if prompt := reads(index).prompt:
            taught = torch.cat([torch.tensor(tokenizer(prompt)["input_ids"]), row[first:]])
        own = logits_of(student, row)
        other = logits_of(reads(index).model, taught)[len(taught) - len(row) :]
        logprobs[index] = []
        for t in range(first, len(row)):
            kept = torch.ones(min(own.shape[1], other.shape[1], shared), dtype=torch.bool)
            if vocab:
                kept = kept_ids(index, vocab)[t]
            p = other[t - 1][: len(kept)][kept].log_softmax(-1)
            q = own[t - 1][: len(kept)][kept].log_softmax(-1)
            total += float((p.exp() * (p - q)).sum())
            count += 1
            logprobs[index].append(float(other[t - 1].log_softmax(-1)[row[t]]))
    return total / count, logprobs


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    return {
        "student": small_model(where, "student"),
        "first": small_model(where, "first", seed=3, initializer_std=0.3),
        "second": small_model(where, "second", seed=5, initializer_std=0.3),
    }


def two_sources(where: Path, *, teachers: tuple[str, str], prompts: tuple[str, str]) -> dict:
    """Return the section data with two sources of two rows."""
    sources = [
        SourceSettings(path=str(write_rows(where, name, 2)), teacher=teacher, teacher_prompt=prompt)
        for name, teacher, prompt in zip("ab", teachers, prompts)
    ]
    return {"train": tuple(sources), "max_teacher_prompt_tokens": 64}


def assert_layouts_agree(cfg: Config, one: dict, layouts: list[dict], **options: Any) -> None:
    for layout in layouts:
        for ours in with_trainer(changed(cfg, layout=layout), partial(steps, **options), 3):
            for a, b in zip(ours["sums"], one["sums"]):
                assert a.keys() == b.keys()
                for name in ("policy/loss", "policy/distill", "policy/grad_norm"):
                    assert math.isclose(a[name][0], b[name][0], rel_tol=1e-5), (layout, name)
            assert_near(ours["parameters"], one["parameters"], rtol=1e-4, atol=1e-5)


def test_each_source_follows_its_teacher_with_its_prompt_on_every_layout(models, tmp_path):
    """A model of its own reads a column, and the policy itself reads a template."""
    data = two_sources(
        tmp_path,
        teachers=(str(models["first"]), "policy"),
        prompts=("hint", "{prompt} ({answer}: {hint})"),
    )
    cfg = distilling(tmp_path, models["student"], data=data)

    def reads(index: int) -> Reads:
        row = index // 2
        if row < 2:
            return Reads(models["first"], HINTS[row])
        return Reads(models["student"], f"b{row - 2}? ({row - 2}: {HINTS[row - 2]})")

    (one,) = with_trainer(cfg, steps, 3)
    losses = [sums["policy/loss"][0] for sums in one["sums"]]
    expected, _ = by_transformers(models["student"], reads)
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert_layouts_agree(
        cfg, one, [{"world_size": 2}, {"world_size": 2, "tp": 2}, {"world_size": 2, "cp": 2}]
    )


def test_sequences_of_several_teachers_are_read_by_their_own(models, tmp_path):
    """Without prompts of their own, and with ids left out of the draws."""
    data = two_sources(
        tmp_path, teachers=tuple(str(models[n]) for n in ("first", "second")), prompts=("", "")
    )
    cfg = distilling(tmp_path, models["student"], data=data, sampling={"top_p": 0.9})
    vocab = _rows(models["student"])
    (one,) = with_trainer(cfg, partial(steps, vocab=vocab), 3)
    expected, _ = by_transformers(
        models["student"], lambda i: Reads(models["first" if i < 4 else "second"]), vocab=vocab
    )
    assert one["sums"][0]["policy/loss"][0] == pytest.approx(expected, rel=1e-5)
    assert_layouts_agree(cfg, one, [{"world_size": 2, "cp": 2}], vocab=vocab)


def test_ids_left_out_of_a_draw_are_in_neither_distribution(models, tmp_path):
    cfg = distilling(
        tmp_path,
        models["student"],
        model={"teacher": str(models["first"])},
        sampling={"top_p": 0.9},
    )
    vocab = _rows(models["student"])
    (one,) = with_trainer(cfg, partial(steps, vocab=vocab), 3)
    expected, _ = by_transformers(models["student"], lambda i: Reads(models["first"]), vocab=vocab)
    assert one["sums"][0]["policy/loss"][0] == pytest.approx(expected, rel=1e-5)
    assert_layouts_agree(cfg, one, [{"world_size": 2, "tp": 2}], vocab=vocab)


def test_the_averaged_policy_teaches_by_the_logprobs_that_an_advantage_asks_for(models, tmp_path):
    """`rl` with the advantage distill: the teacher is the reference, which follows the policy."""
    data = {"train": str(write_rows(tmp_path, "a", 4)), "teacher_prompt": "hint"}
    data["max_teacher_prompt_tokens"] = 64
    reference = {"sync_every": 1, "sync_mix": 0.25}
    cfg = config(models["student"], tmp_path, advantage="distill")
    cfg = changed(cfg, sampling={"max_response_tokens": 64})
    cfg = changed(cfg, data=data, model={"teacher": "reference", "reference": reference})
    (found,) = with_trainer(cfg, _followed)
    _, logprobs = by_transformers(
        models["student"], lambda i: Reads(models["student"], HINTS[i // 2 % 2])
    )
    for one, columns in zip(batch(0, 1).updates[0], found["columns"]):
        assert "ref_logprobs" not in columns
        for index, ours in zip(
            one.sequence_ids.tolist(),
            columns["teacher_logprobs"].split(one.cu_seqlens.diff().tolist()),
        ):
            first = (LENGTHS[index] + 2) // 3
            assert not ours[:first].any()
            theirs = torch.tensor(logprobs.get(index, [0.0] * (LENGTHS[index] - first)))
            torch.testing.assert_close(ours[first:], theirs.float(), rtol=1e-5, atol=1e-5)
    assert found["moved"] == pytest.approx(0.25, rel=1e-3)


def _followed(trainer: Any) -> dict:
    own = with_rows(own_batch(trainer.world))
    annotated = trainer.annotate(own, step=0)
    name, policy = next(iter(trainer.policy.model.named_shards().items()))
    before = policy.to_local().clone()
    update(trainer, own, step=0)
    reference = trainer.companions["reference"]
    assert isinstance(reference, Synced) and "reference" in trainer.state_dict()
    after = reference.model.named_shards()[name].to_local()
    moved = (after - before).norm() / (policy.to_local() - before).norm()
    return {"columns": annotated.columns[0], "moved": float(moved)}


# ---------------------------------------------------------------- vocabularies


def _rows(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def padded(folder: Path, where: Path, *, by: int) -> Path:
    """Write a model with more rows of its vocabulary, and the same tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    model.resize_token_embeddings(_rows(folder) + by, mean_resizing=False)
    model.save_pretrained(where)
    AutoTokenizer.from_pretrained(folder).save_pretrained(where)
    return where


@pytest.mark.parametrize("larger", ["teacher", "policy"])
def test_vocabularies_of_other_sizes_are_compared_on_the_ids_of_both(models, tmp_path, larger):
    sides = {"teacher": models["first"], "policy": models["student"]}
    sides[larger] = padded(sides[larger], tmp_path / "larger", by=16)
    cfg = distilling(tmp_path, sides["policy"], model={"teacher": str(sides["teacher"])})
    assert not fit_problems(changed(cfg, data={"train": "task:addition", "size": 9}))
    (one,) = with_trainer(cfg, steps, 3)
    expected, _ = by_transformers(sides["policy"], lambda i: Reads(sides["teacher"]))
    assert one["sums"][0]["policy/loss"][0] == pytest.approx(expected, rel=1e-5)
    if larger == "teacher":
        assert_layouts_agree(cfg, one, [{"world_size": 2, "tp": 2}])


def test_teachers_with_other_tokens_are_refused(models, tmp_path):
    """Before anything is loaded: in the dry run and at the start."""
    from transformers import AutoTokenizer

    other = small_model(tmp_path, "other", hf_config={"vocab_size": _rows(models["first"]) + 8})
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    cases = {
        str(other): "model.teacher: {} has another tokenizer than the policy: 1 ids differ, e.g."
    }
    bare = small_model(tmp_path, "bare", hf_config={"vocab_size": 200})
    for file in bare.glob("tokenizer*"):
        file.unlink()
    cases[str(bare)] = "model.teacher: has a vocabulary of 200 rows, the policy one of"
    for teacher, text in cases.items():
        cfg = distilling(tmp_path, models["student"], model={"teacher": teacher})
        (found,) = fit_problems(changed(cfg, data={"train": "task:addition", "size": 9}))
        assert found.startswith(text.format(teacher)), found
    one = changed(
        config(models["student"], tmp_path, advantage="distill"), model={"teacher": str(bare)}
    )
    assert any("logprobs of whole vocabularies" in found for found in fit_problems(one))


def test_an_id_that_the_teacher_does_not_embed_is_refused_by_name(models, tmp_path):
    policy = padded(models["student"], tmp_path / "larger", by=16)
    cfg = distilling(tmp_path, policy, model={"teacher": str(models["first"])})
    with pytest.raises(AssertionError, match=r"id \d+, which the teacher .* does not embed"):
        with_trainer(cfg, _unknown_id, _rows(policy) - 1)


def _unknown_id(trainer: Any, index: int) -> None:
    own = own_batch(trainer.world)
    own.updates[0][0].tokens[-1] = index
    trainer.annotate(own, step=0)
    update(trainer, own, step=0)


# ---------------------------------------------------------------- refusals


def test_a_mixture_is_no_teacher_of_itself_and_models_that_see_have_one_teacher(tmp_path):
    mixture = small_model(tmp_path, "mixture", architecture="qwen3_moe")
    data = {"train": "task:addition", "size": 9, "teacher_prompt": "{answer}"}
    limits = {"max_teacher_prompt_tokens": 64}
    cfg = distilling(tmp_path, mixture, model={"teacher": "policy"}, data=data | limits)
    (found,) = fit_problems(cfg)
    assert found.startswith("model.teacher: policy with a qwen3_moe, a mixture")
    assert not fit_problems(changed(cfg, model={"teacher": str(mixture)}))
    adapted = changed(cfg, model={"teacher": "reference", "lora": {"rank": 2}})
    assert any("model.teacher: reference with a qwen3_moe" in one for one in fit_problems(adapted))
    seeing = small_model(tmp_path, "seeing", architecture="qwen3_vl")
    cfg = distilling(tmp_path, seeing, model={"teacher": str(seeing)}, data=data | limits)
    assert any(
        "several teachers, or data.teacher_prompt, with a" in one for one in fit_problems(cfg)
    )


POLICY = {"teacher": "policy"}
HINTED = {"train": "task:addition", "size": 10, "teacher_prompt": "{prompt} {answer}"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": POLICY}, "model.teacher: policy with data.teacher_prompt empty"),
        ({"model": POLICY, "data": HINTED}, ""),
        ({"model": {"teacher": ""}, "data": HINTED}, "model.teacher: is empty with"),
        (
            {"model": POLICY, "data": HINTED | {"teacher_prompt": "{answer!r}"}},
            "data.teacher_prompt: '{answer!r}': braces hold the name of a column",
        ),
        (
            {"model": POLICY, "data": HINTED, "rollout": {"environment": {"name": "guess_number"}}},
            "data.teacher_prompt: '{prompt} {answer}' with rollout.environment",
        ),
        (
            {"model": POLICY, "data": HINTED, "rollout": {"agent": "mine.py:solve"}},
            "data.teacher_prompt: '{prompt} {answer}' with rollout.agent",
        ),
        (
            {"model": POLICY, "data": HINTED, "batch": {"tokens_per_microbatch": 0}},
            "batch.tokens_per_microbatch: 0 with data.teacher_prompt",
        ),
        (
            {"model": {"teacher": "t"}, "data": {"max_teacher_prompt_tokens": 9}},
            "data.max_teacher_prompt_tokens: 9 with data.teacher_prompt empty",
        ),
        (
            {"data": HINTED, "algorithm": {"objective": "rl", "loss": "ppo_clip"}},
            "data.teacher_prompt: '{prompt} {answer}' with algorithm.objective rl",
        ),
        (
            {
                "model": POLICY,
                "data": HINTED,
                "algorithm": {"objective": "rl", "loss": "ppo_clip", "advantage": "distill"},
                "sampling": {"repetition_penalty": 1.1},
            },
            "sampling.repetition_penalty: 1.1 with data.teacher_prompt",
        ),
        (
            {
                "model": {"teacher": "reference", "reference": {"cache": True}},
                "layout": {"placement": "offline"},
                "algorithm": {"objective": "distill"},
            },
            "model.reference.cache: true with model.teacher reference",
        ),
        (
            {"model": {"teacher": "t"}, "data": {"eval": (SourceSettings("e", teacher="u"),)}},
            "data.eval: teacher: evaluation follows no teacher",
        ),
        (
            {
                "model": {"teacher": "t"},
                "data": {"train": (SourceSettings("task:addition", size=9, teacher="u"),)},
            },
            "model.teacher: t is of no rows",
        ),
        (
            {
                "data": {"train": (SourceSettings("task:addition", size=9, teacher="u"),)},
                "algorithm": {"objective": "rl", "loss": "ppo_clip"},
            },
            "data: is set with algorithm.objective rl; a source of data.train has a teacher",
        ),
    ],
)
def test_what_teachers_do_not_go_with_is_refused(fields, text):
    chosen = {"objective": "on_policy_distill", "loss": "divergence"}
    fields = fields | {"algorithm": chosen | fields.get("algorithm", {})}
    found = validate(changed(VALID, **fields))
    if not text:
        assert not found
    assert not text or any(one.startswith(text) for one in found), found
