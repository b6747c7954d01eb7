"""Distillation on the rows' tokens: against plain transformers, on every layout, and learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.check.settings import validate
from spmdrl.config import Config
from tests.helpers.comparing import assert_near
from tests.helpers.policy_runs import VALID, batch, changed, config, sequence, small_model, train


def _cfg(
    where: Path, student: Path, teacher: Path, *, loss: str = "divergence", layout=None, **options
) -> Config:
    cfg = config(
        student,
        where,
        objective="distill",
        loss=loss,
        loss_options=options,
        model={"teacher": str(teacher)},
        **(layout or {}),
    )
    return changed(cfg, optimizer={"max_grad_norm": 0.0})


def _kl(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


def _top(p: Tensor, q: Tensor, k: int) -> float:
    """Return KL(p || q) over p's k most likely tokens and one outcome for the rest."""
    ids = p.argsort(descending=True)
    p, q = (torch.cat([x[ids[:k]], x[ids[k:]].exp().sum().log()[None]]) for x in (p, q))
    return _kl(p, q)


def _by_transformers(student: Path, teacher: Path, compare: Callable) -> float:
    """Return the mean of `compare` per response token, from full logits and a plain sum."""
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval()
        for p in (student, teacher)
    ]
    total, count = 0.0, 0
    for micro in batch(0, 1).updates[0]:
        for at, index in enumerate(micro.sequence_ids.tolist()):
            if index == 4:  # not valid
                continue
            row, begin = sequence(index), int(micro.cu_seqlens[at])
            with torch.no_grad():
                q, p = (torch.log_softmax(m(row[None]).logits[0].double(), -1) for m in models)
            for t in range(1, len(row)):
                if micro.response_mask[begin + t]:
                    total += compare(p[t - 1], q[t - 1])
                    count += 1
    return total / count


CASES = {
    "forward": (dict(kind="forward"), lambda p, q: _kl(p, q)),
    "reverse": (dict(kind="reverse"), lambda p, q: _kl(q, p)),
    "top": (dict(loss="distill_topk", k=5), lambda p, q: _top(p, q, 5)),
}


@pytest.mark.parametrize(
    "case", ["forward", pytest.param("reverse", marks=pytest.mark.grid), "top"]
)
def test_the_loss_is_that_of_plain_transformers_and_falls_alike_on_every_layout(case, tmp_path):
    options, compare = CASES[case]
    student, teacher = (
        small_model(tmp_path, "student"),
        small_model(tmp_path, "teacher", seed=3, initializer_std=0.3),
    )
    one = train(_cfg(tmp_path, student, teacher, **options), 4)[0]
    losses = [sums["policy/loss"][0] for sums in one["sums"]]
    assert losses[0] == pytest.approx(_by_transformers(student, teacher, compare), rel=1e-4)
    assert losses[-1] < 0.9 * losses[0], losses
    for tp in (1, 2):
        layout = {"world_size": 2, "tp": tp}
        for ours in train(_cfg(tmp_path, student, teacher, layout=layout, **options), 4):
            for a, b in zip(ours["sums"], one["sums"]):
                assert a.keys() == b.keys()
                for name in ("policy/loss", "policy/distill", "policy/grad_norm"):
                    assert math.isclose(a[name][0], b[name][0], rel_tol=1e-5), (layout, name)
            assert_near(ours["parameters"], one["parameters"], rtol=1e-4, atol=1e-5)
    has_mass = "policy/distill_teacher_mass" in one["sums"][0]
    assert has_mass == (case == "top")


def test_on_sampled_responses_both_sides_are_at_the_temperature_of_sampling(tmp_path):
    """GKD on what the policy sampled: the same divergence, at its own states."""
    student, teacher = (
        small_model(tmp_path, "student"),
        small_model(tmp_path, "teacher", seed=3, initializer_std=0.3),
    )

    def jsd(p: Tensor, q: Tensor) -> float:
        p, q = (torch.log_softmax(x / 0.8, -1) for x in (p, q))
        middle = (0.3 * p.exp() + 0.7 * q.exp()).log()
        return 0.3 * _kl(p, middle) + 0.7 * _kl(q, middle)

    cfg = _cfg(tmp_path, student, teacher, kind="jsd", beta=0.3)
    cfg = changed(
        cfg,
        algorithm={"objective": "on_policy_distill"},
        batch={"updates_per_step": 2, "epochs": 2},
    )
    one = train(changed(cfg, batch={"updates_per_step": 1, "epochs": 1}), 3)[0]
    losses = [sums["policy/loss"][0] for sums in one["sums"]]
    assert losses[0] == pytest.approx(_by_transformers(student, teacher, jsd), rel=1e-4)
    assert losses[-1] < losses[0]
    several = changed(cfg, batch={"updates_per_step": 2, "epochs": 2})
    several = train(several, 1)[0]["sums"][0]
    assert several["policy/loss"][1] == 4.0 and several["policy/loss"][0] / 4 < losses[0]


def _found(**fields: dict) -> list[str]:
    chosen = {"objective": "on_policy_distill", "loss": "divergence"}
    fields = {"model": {"teacher": "t"}} | fields
    fields["algorithm"] = chosen | fields.get("algorithm", {})
    return validate(changed(VALID, **fields))


def test_what_sampled_responses_do_not_go_with_is_refused():
    for fields in ({}, {"batch": {"epochs": 3}}, {"sampling": {"top_p": 0.9, "min_p": 0.01}}):
        assert not _found(**fields)
    for fields, text in (
        ({"model": {"teacher": ""}}, "model.teacher: is empty"),
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm.kl_coef: 0.1 with algorithm.objective"),
        ({"algorithm": {"loss": "ppo_clip"}}, "algorithm.loss: unknown distillation 'ppo_clip'"),
        ({"sampling": {"logit_bias": {"7": 1.0}}}, "sampling.logit_bias: {'7': 1.0} with"),
        ({"batch": {"updates_per_step": 7}}, "batch.updates_per_step: prompts_per_step 64 / "),
        (
            {"model": {"teacher": "t", "reference": {"cache": True}}},
            "model.reference.cache: true with",
        ),
    ):
        found = _found(**fields)
        assert any(one.startswith(text) for one in found), (text, found)
