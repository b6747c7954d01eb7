"""Distillation against plain loops over the vocabulary: value, gradient, limits, masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms.distillation import distill_topk, divergence, topk_divergence
from spmdrl.model.logit_passes import NEVER
from tests.helpers.built import examples
from tests.helpers.ragged import assert_loop, assert_nothing_is_read

KINDS = [
    ("forward", 0.5),
    ("reverse", 0.5),
    ("mixed", 0.3),
    ("mixed", 0.0),
    ("mixed", 1.0),
    ("jsd", 0.5),
    ("jsd", 0.1),
    ("jsd", 0.0),
    ("jsd", 1.0),
]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def logits(seed: int, *, dtype: torch.dtype = torch.float64) -> Case:
    """Draw student and teacher logits [T, V] and a mask that leaves out the first row."""
    g = torch.Generator().manual_seed(seed)
    num_tokens, vocab = int(torch.randint(2, 12, (), generator=g)), 7
    student, teacher = torch.randn(2, num_tokens, vocab, generator=g, dtype=torch.float64) * 2
    mask = torch.rand(num_tokens, generator=g) < 0.7
    mask[0], mask[1] = False, True
    return student.to(dtype).requires_grad_(), teacher.to(dtype), mask


def topk(seed: int, *, dtype: torch.dtype = torch.float64) -> Case:
    """Draw logprobs [T, K] of the teacher's 4 best of 7 tokens, with the same mask."""
    student, teacher, mask = logits(seed)
    best, ids = teacher.log_softmax(-1).topk(4)
    student = student.detach().log_softmax(-1).gather(1, ids)
    return student.to(dtype).requires_grad_(), best.to(dtype), mask


# ---------------------------------------------------------------- references


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q) if a > 0)


def value(p: list[float], q: list[float], kind: str, beta: float) -> float:
    """Return the divergence of teacher p and student q."""
    if kind == "jsd" and 0 < beta < 1:
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q)]
        return beta * kl(p, m) + (1 - beta) * kl(q, m)
    share = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    return (1 - share) * kl(p, q) + share * kl(q, p)


def slopes(p: list[float], q: list[float], kind: str, beta: float) -> list[float]:
    """Return the derivative by each q, all of them free."""
    if kind == "jsd" and 0 < beta < 1:
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q)]
        return [
            -beta * a / c * (1 - beta) + (1 - beta) * (math.log(b / c) + 1 - b / c * (1 - beta))
            for a, b, c in zip(p, q, m)
        ]
    share = {"forward": 0.0, "reverse": 1.0}.get(kind, beta)
    return [-(1 - share) * a / b + share * (math.log(b / a) + 1) for a, b in zip(p, q)]


def softmax(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in row]
    return [w / sum(weights) for w in weights]


def reference(case: Case, kind: str, beta: float, form: float | str) -> tuple[list, list]:
    """Return terms and gradients over all outcomes, at a temperature, or of the top with a tail."""
    terms, grads = [], []
    for s, t, kept in zip(*(x.tolist() for x in case)):
        scale = 1.0
        if form == "bucket":  # one more outcome, whose probability is what the others leave
            q, p = ([math.exp(x) for x in side] for side in (s, t))
            q, p = q + [1 - sum(q)], p + [1 - sum(p)]
        else:
            scale = 1.0 if form == "renormalise" else form
            q, p = softmax(s, scale), softmax(t, scale)
        by_q = slopes(p, q, kind, beta)
        free = by_q[-1] if form == "bucket" else sum(b * g for b, g in zip(q, by_q))
        terms.append(value(p, q, kind, beta) if kept else 0.0)
        grads.append([b * (g - free) / scale if kept else 0.0 for b, g in zip(q[: len(s)], by_q)])
    return terms, grads


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind, beta", KINDS)
def test_full_vocabulary_equals_a_plain_loop(kind, beta, seed):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        for temperature in (1.0, 2.5):
            case = logits(seed, dtype=dtype)
            terms, stats = divergence(
                case[0], case[1], loss_mask=case[2], kind=kind, beta=beta, temperature=temperature
            )
            assert terms.dtype == dtype
            expected = reference(case, kind, beta, temperature)
            assert_loop(terms, case[:1], expected, tolerance=tolerance)
            assert torch.equal(stats["policy/distill"][0], terms.detach().double().sum())
            assert stats["policy/distill"][1] == case[2].sum()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("kind, beta", KINDS)
def test_topk_equals_a_plain_loop(kind, beta, tail, seed):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        case = topk(seed, dtype=dtype)
        terms, stats = topk_divergence(
            case[0], case[1], loss_mask=case[2], kind=kind, beta=beta, tail=tail
        )
        assert terms.dtype == dtype
        expected = reference(case, kind, beta, tail)
        assert_loop(terms, case[:1], expected, tolerance=tolerance)
        for side, x in (("student", case[0]), ("teacher", case[1])):
            mass = x.detach().double().exp().sum(-1)[case[2]].sum()
            assert torch.isclose(stats[f"policy/distill_{side}_mass"][0], mass)


# ---------------------------------------------------------------- properties


def both(case: Case, kind: str, beta: float, *, full: bool) -> torch.Tensor:
    function = divergence if full else topk_divergence
    return function(case[0], case[1], loss_mask=case[2], kind=kind, beta=beta)[0]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind, beta", KINDS)
@examples(
    8, seed=st.integers(0, 10_000), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
)
def test_masked_tokens_have_zero_term_and_gradient_whatever_they_hold(
    kind, beta, full, seed, garbage
):
    clean, dirty = ((logits if full else topk)(seed) for _ in range(2))
    with torch.no_grad():
        for tensor in dirty[:2]:
            tensor[~dirty[2]] = garbage

    def own(case: Case) -> tuple[torch.Tensor, dict]:
        return both(case, kind, beta, full=full), {}

    assert_nothing_is_read(own, (dirty, clean), lambda case: case[:1], off=~clean[2])


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind, beta", KINDS)
@examples(8, seed=st.integers(0, 10_000))
def test_permuting_and_splitting_tokens_changes_no_term(kind, beta, full, seed):
    case = (logits if full else topk)(seed)
    whole = both(case, kind, beta, full=full)
    assert (whole >= -1e-12).all()
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
    pieces = [
        both(tuple(x[members] for x in case), kind, beta, full=full)
        for members in order.tensor_split(2)
    ]
    assert torch.allclose(torch.cat(pieces), whole[order], atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("kind, beta", KINDS)
@examples(8, seed=st.integers(0, 10_000))
def test_the_bucket_is_a_lower_bound_and_exact_with_all_but_one_id(kind, beta, seed):
    student, teacher, mask = logits(seed)
    whole = both((student, teacher, mask), kind, beta, full=True)
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    assert (both((s[:, :3], t[:, :3], mask), kind, beta, full=False) <= whole + 1e-12).all()
    exact = both((s[:, :6], t[:, :6], mask), kind, beta, full=False)
    assert torch.allclose(exact, whole, atol=1e-10)


# ---------------------------------------------------------------- anchors, limits, traps


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind, beta", KINDS)
def test_equal_distributions_give_zero_and_no_gradient(kind, beta, full):
    uniform = (
        torch.zeros(3, 6, dtype=torch.float64)
        if full
        else (torch.full((3, 4), -math.log(6), dtype=torch.float64))
    )
    student = uniform.clone().requires_grad_()
    terms = both((student, uniform, torch.tensor([True, True, False])), kind, beta, full=full)
    (gradient,) = torch.autograd.grad(terms.sum(), student)
    assert terms.abs().max() < 1e-15 and gradient.abs().max() < 1e-15


def test_jsd_limits_are_the_forward_and_the_reverse_kl():
    case = logits(4)
    for beta, near, kind in ((0.0, 1e-7, "forward"), (1.0, 1 - 1e-7, "reverse")):
        at_limit = both(case, "jsd", beta, full=True)
        assert torch.equal(at_limit, both(case, kind, 0.5, full=True))
        close = both(case, "jsd", near, full=True) / min(near, 1 - near)
        assert torch.allclose(close, at_limit, rtol=1e-4, atol=1e-6)


def test_jsd_at_one_half_is_symmetric_and_at_most_ln_2():
    student, teacher, mask = logits(3)
    one = both((student, teacher, mask), "jsd", 0.5, full=True)
    other = both((teacher, student, mask), "jsd", 0.5, full=True)
    assert torch.allclose(one, other.detach()) and one.max().item() < math.log(2)


def test_the_bucket_punishes_probability_outside_the_teachers_ids_and_renormalising_does_not():
    teacher = torch.tensor([[0.6, 0.3]], dtype=torch.float64).log()
    student = (torch.tensor([[0.06, 0.03]], dtype=torch.float64).log()).requires_grad_()
    mask = torch.tensor([True])
    seen, stats = topk_divergence(student, teacher, loss_mask=mask)
    blind, _ = topk_divergence(student, teacher, loss_mask=mask, tail="renormalise")
    assert seen.item() == pytest.approx(0.9 * math.log(10) + 0.1 * math.log(0.1 / 0.91))
    assert abs(blind.item()) < 1e-15
    assert float(stats["policy/distill_student_mass"][0]) == pytest.approx(0.09)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind, beta", KINDS)
def test_a_teacher_or_student_sure_of_its_ids_stays_finite(kind, beta, dtype):
    sure = torch.tensor([[0.9, 0.1], [0.9, 0.1000001]], dtype=dtype).log()  # mass 1 and above
    open_minded = torch.tensor([[0.5, 0.2], [0.5, 0.2]], dtype=dtype).log()
    for s, t in ((sure, open_minded), (open_minded, sure), (sure, sure)):
        student = s.clone().requires_grad_()
        terms = both((student, t, torch.ones(2, dtype=torch.bool)), kind, beta, full=False)
        (gradient,) = torch.autograd.grad(terms.sum(), student)
        assert terms.isfinite().all() and gradient.isfinite().all() and (terms > -1e-6).all()


@pytest.mark.parametrize("kind, beta", KINDS)
def test_outcomes_that_both_rule_out_count_nothing(kind, beta):
    for full, draw in ((True, logits), (False, topk)):
        student, teacher, mask = draw(5)
        plain = both((student, teacher, mask), kind, beta, full=full)
        (gradient,) = torch.autograd.grad(plain.sum(), student)
        nothing = torch.full((len(mask), 2), -math.inf, dtype=torch.float64)
        padded = torch.cat([student.detach(), nothing], dim=1).requires_grad_()
        terms = both((padded, torch.cat([teacher, nothing], dim=1), mask), kind, beta, full=full)
        (found,) = torch.autograd.grad(terms.sum(), padded)
        assert torch.allclose(terms, plain) and torch.allclose(found[:, :-2], gradient)
        assert (found[:, -2:] == 0).all()


def test_a_token_that_only_the_student_rules_out_is_infinite_and_visible():
    student, teacher, mask = logits(5)
    with torch.no_grad():
        student[1, 0] = -math.inf
    assert both((student, teacher, mask), "forward", 0.5, full=True)[1].isinf()
    assert both((student, teacher, mask), "reverse", 0.5, full=True)[1].isfinite()


@pytest.mark.parametrize("full", [True, False])
def test_nothing_in_the_loss_gives_zero_with_a_gradient_of_zero(full):
    student, teacher, mask = (logits if full else topk)(2)
    terms = both((student, teacher, mask & False), "jsd", 0.5, full=full)
    (gradient,) = torch.autograd.grad(terms.sum(), student)
    assert (terms == 0).all() and (gradient == 0).all()


def test_the_teacher_gets_no_gradient_and_bfloat16_is_computed_in_float32():
    student, teacher, mask = logits(2)
    teacher.requires_grad_()
    divergence(student, teacher, loss_mask=mask)[0].sum().backward()
    topk_divergence(student, teacher, loss_mask=mask)[0].sum().backward()
    assert teacher.grad is None
    half = divergence(student.bfloat16(), teacher.bfloat16(), loss_mask=mask)[0]
    exact = divergence(student.bfloat16().double(), teacher.bfloat16().double(), loss_mask=mask)[0]
    assert half.dtype == torch.float32 and (half - exact).abs().max() < 1e-5


def test_options_out_of_range_are_refused():
    student, teacher, mask = topk(0)
    for function, options, message in (
        (divergence, dict(kind="forwards"), "kind: must be forward, reverse, mixed or jsd"),
        (divergence, dict(beta=1.5), "beta: must be in"),
        (divergence, dict(temperature=0.0), "temperature: must be above 0"),
        (topk_divergence, dict(tail="drop"), "tail: must be bucket or renormalise"),
        (topk_divergence, dict(beta=-0.1), "beta: must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            function(student, teacher, loss_mask=mask, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_teachers_top_tokens_come_from_its_logits(dtype):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(2, 7, 12, generator=generator)).to(dtype)
    mask = torch.arange(7) != 3
    logprobs = [x.float().log_softmax(-1) for x in (student, teacher)]
    for k in (1, 4, 12, 50):
        ids = logprobs[1].topk(min(k, 12)).indices
        expected, stats = topk_divergence(
            *(x.gather(-1, ids) for x in logprobs), loss_mask=mask, kind="reverse", tail="bucket"
        )
        terms, ours = distill_topk(student, teacher, loss_mask=mask, k=k, kind="reverse")
        torch.testing.assert_close(terms, expected, rtol=1e-5, atol=1e-5)
        assert {name: float(n) for name, (_, n) in ours.items()} == {name: 6.0 for name in stats}
    with pytest.raises(ValueError, match="^k: must be at least 1, got 0"):
        distill_topk(student, teacher, loss_mask=mask, k=0)


def test_off_the_mask_the_top_tokens_give_no_gradient_whatever_stands_there():
    student = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    student[1] = math.nan
    student.requires_grad_()
    teacher = torch.randn(3, 9, generator=torch.Generator().manual_seed(2))
    teacher[1] = math.nan
    terms, _ = distill_topk(student, teacher, loss_mask=torch.tensor([True, False, True]), k=4)
    terms.sum().backward()
    assert terms[1] == 0 and not student.grad[1].any() and student.grad[0].any()


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_ids_that_both_sides_leave_out_are_no_outcomes(kind, beta):
    """As under sampling masks: the rest is scaled to sum 1, and ids outside have no gradient."""
    student, teacher, mask = logits(3)
    kept = torch.tensor([True, False, True, True, False, False, True])
    student.retain_grad()
    cut = [side.masked_fill(~kept, NEVER) for side in (student, teacher)]
    terms, _ = divergence(*cut, loss_mask=mask, kind=kind, beta=beta)
    terms.sum().backward()
    p, q = (side.detach()[:, kept].softmax(-1).tolist() for side in (teacher, student))
    rows = mask.nonzero()[:, 0].tolist()
    expected = sum(value(p[row], q[row], kind, beta) for row in rows)
    assert float(terms.detach().sum()) == pytest.approx(expected, rel=1e-12)
    assert not student.grad[:, ~kept].any() and student.grad[mask][:, kept].all()


def test_the_reverse_divergence_on_kept_ids_has_the_gradient_of_the_sampled_one():
    """Expected over draws from the kept ids, that of the advantage log p - log q."""
    student, teacher, mask = logits(5)
    kept = torch.tensor([True, True, False, True, False, True, True])
    cut = [side.masked_fill(~kept, NEVER) for side in (student, teacher)]
    divergence(*cut, loss_mask=mask, kind="reverse")[0].sum().backward()
    found, student.grad = student.grad.clone(), None
    logq = student[mask].masked_fill(~kept, NEVER).log_softmax(-1)
    logp = teacher[mask].masked_fill(~kept, NEVER).log_softmax(-1)
    advantages = torch.where(kept, logp - logq, 0.0).detach()
    (-(logq.exp().detach() * advantages * logq)[:, kept].sum()).backward()
    torch.testing.assert_close(found, student.grad, rtol=1e-10, atol=1e-12)
