"""Distillation losses: a divergence between teacher and student at each token.

P is the teacher's distribution of the next token, Q the student's; gradients go to Q alone.

    forward  KL(P || Q)    covers what the teacher does
    reverse  KL(Q || P)    keeps to what the teacher would do
    mixed    (1 - beta) forward + beta reverse
    jsd      beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q

The formula of the jsd is 0 at beta 0 and 1. Divided by beta, it tends to the forward KL as beta
goes to 0; divided by 1 - beta, it tends to the reverse KL as beta goes to 1. So at exactly 0 and 1,
`jsd` returns these limits. Between them it is not divided. In KL(p || q), an outcome with p = 0
adds 0. An outcome with p > 0 and q = 0 makes the term infinite; this is not hidden.

`loss_mask` [T] bool: where it is False, term and gradient are exactly 0 for any input. Terms are
nats, at least 0 up to rounding, not divided by a count.
Invariant under: dp size, micro-batching, packing order, padding.
Source: arXiv 2306.13649 (GKD), eq. 1 for the jsd; at 0 and 1 as in TRL.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.masked import Stats, check_positive, check_unit, keep, log1mexp, masked_mean
from spmdrl.errors import Refusal

__all__ = ["distill_topk", "divergence"]  # the methods, for the registry

Kind = Literal["forward", "reverse", "mixed", "jsd"]
_MAX_LOG_MASS = -1e-7  # closer to 1, a sum of float32 probabilities is only rounding error


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    loss_mask: Tensor,
    kind: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Compare student and teacher over the whole vocabulary.

    Args:
        student_logits, teacher_logits: [T, V] float, not normalised. V vocabulary.
        loss_mask: [T] bool.
        kind: which divergence. beta: of mixed and jsd, in [0, 1].
        temperature: divides both logits, above 0. Terms are not multiplied by its square.
    Returns: terms [T], nats, in the dtype of `student_logits` and at least float32, and
        stats: policy/distill, the term per loss token.
    Raises: Refusal for an option out of range.
    Source: arXiv 2306.13649 (GKD) eq. 1 and 2; 1503.02531 for forward.
    """
    _check_options(kind, beta)
    check_positive(temperature=temperature)
    # Copy the rows of loss tokens: at [T, V] this costs less than softmaxes of the other rows.
    rows = loss_mask.nonzero().squeeze(1)
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student = (student_logits[rows].to(dtype) / temperature).log_softmax(-1)
    teacher = (teacher_logits.detach()[rows].to(dtype) / temperature).log_softmax(-1)
    row_terms = _divergence(teacher, student, kind=kind, beta=beta)
    terms = row_terms.new_zeros(loss_mask.shape).index_put((rows,), row_terms)
    return terms, {"policy/distill": masked_mean(terms, loss_mask)}


def distill_topk(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    loss_mask: Tensor,
    k: int = 64,
    kind: Kind = "forward",
    beta: float = 0.5,
    tail: Literal["bucket", "renormalise"] = "bucket",
) -> tuple[Tensor, Stats]:
    """Compare student and teacher on the k most likely tokens of the teacher.

    Args:
        student_logits, teacher_logits: [T, V] float, not normalised. V vocabulary.
        loss_mask: [T] bool.
        k: tokens to compare on, at least 1; V of them if there are fewer.
        kind, beta, tail: as in `topk_divergence`.
    Returns: terms and stats as of `topk_divergence`.
    Raises: Refusal for an option out of range.
    Source: `topk_divergence`, with a teacher that runs in the trainer instead of logprobs that a
        server reported.
    """
    if k < 1:
        raise Refusal(f"k: must be at least 1, got {k}")
    rows = loss_mask.nonzero().squeeze(1)  # as in `divergence`
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    student = student_logits[rows].to(dtype)
    teacher = teacher_logits.detach()[rows].to(dtype)
    top, ids = teacher.topk(min(k, teacher.shape[-1]), dim=-1)
    at_ids = student.gather(-1, ids) - student.logsumexp(-1, keepdim=True)
    row_terms, stats = topk_divergence(
        at_ids,
        top - teacher.logsumexp(-1, keepdim=True),
        kind=kind,
        beta=beta,
        tail=tail,
        loss_mask=torch.ones_like(rows, dtype=torch.bool),
    )
    return row_terms.new_zeros(loss_mask.shape).index_put((rows,), row_terms), stats


def topk_divergence(
    student_logprobs_at_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    kind: Kind = "forward",
    beta: float = 0.5,
    tail: Literal["bucket", "renormalise"] = "bucket",
) -> tuple[Tensor, Stats]:
    """Compare student and teacher on the K tokens that the teacher reported.

    Args:
        student_logprobs_at_ids, teacher_logprobs: [T, K] float, nats: logprobs in the whole
            vocabulary of the same K distinct ids; -inf in both for a slot not used.
        loss_mask: [T] bool.
        kind: which divergence. beta: of mixed and jsd, in [0, 1].
        tail: how to treat the rest of the vocabulary. `bucket`: as one more outcome on both sides,
            so that the student's probability outside the K tokens counts. `renormalise`: leave it
            out and scale both sides to sum 1, so that this probability does not count.
    Returns: terms [T], nats, in the dtype of the student's, and stats per loss token:
        policy/distill, the term; policy/distill_teacher_mass and
        policy/distill_student_mass, probability of the K ids.
    Raises: Refusal for an option out of range.
    Source: the data-processing inequality. The bucket merges outcomes, so each divergence is at
        most that of the whole vocabulary, and 0 if that is 0. Computed in float64, because the
        bucket is a difference from 1; a mass above exp(-1e-7) counts as exp(-1e-7).
    """
    _check_options(kind, beta)
    if tail not in ("bucket", "renormalise"):
        raise Refusal(f"tail: must be bucket or renormalise, got {tail!r}")
    num_ids = student_logprobs_at_ids.shape[1]
    filler = -math.log(num_ids + 1)  # off the mask, any valid distribution
    mask = loss_mask[:, None]
    student = torch.where(mask, student_logprobs_at_ids, filler).double()
    teacher = torch.where(mask, teacher_logprobs.detach(), filler).double()
    student_mass = student.logsumexp(-1)
    teacher_mass = teacher.logsumexp(-1)
    if tail == "bucket":
        student = _with_rest(student, student_mass)
        teacher = _with_rest(teacher, teacher_mass)
    else:
        student = student - student_mass[:, None]
        teacher = teacher - teacher_mass[:, None]
    terms = keep(_divergence(teacher, student, kind=kind, beta=beta), loss_mask)
    stats = {
        "policy/distill": masked_mean(terms, loss_mask),
        "policy/distill_teacher_mass": masked_mean(teacher_mass.exp(), loss_mask),
        "policy/distill_student_mass": masked_mean(student_mass.exp(), loss_mask),
    }
    return terms.to(student_logprobs_at_ids.dtype), stats


def _with_rest(logprobs: Tensor, log_mass: Tensor) -> Tensor:
    rest = log1mexp(log_mass.clamp(max=_MAX_LOG_MASS))
    return torch.cat([logprobs, rest[:, None]], dim=-1)


def _divergence(teacher: Tensor, student: Tensor, *, kind: Kind, beta: float) -> Tensor:
    """Return [T] from normalised logprobs [T, outcomes]."""
    if kind == "forward" or (beta == 0 and kind in ("mixed", "jsd")):
        return _kl(teacher, student)
    if kind == "reverse" or (beta == 1 and kind in ("mixed", "jsd")):
        return _kl(student, teacher)
    if kind == "mixed":
        return (1 - beta) * _kl(teacher, student) + beta * _kl(student, teacher)
    # If both are -inf, the gradient of logaddexp would be NaN.
    is_absent = teacher.isneginf() & student.isneginf()
    teacher_share = torch.where(is_absent, 0.0, teacher) + math.log(beta)
    student_share = torch.where(is_absent, 0.0, student) + math.log1p(-beta)
    middle = torch.logaddexp(teacher_share, student_share)
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) over the last dim. An outcome with p = 0 adds 0, also to the gradient."""
    p = log_p.exp()
    absent = p == 0
    ratio = torch.where(absent, 0.0, log_p) - torch.where(absent, 0.0, log_q)
    return (p * ratio).sum(-1)


def _check_options(kind: str, beta: float) -> None:
    if kind not in ("forward", "reverse", "mixed", "jsd"):
        raise Refusal(f"kind: must be forward, reverse, mixed or jsd, got {kind!r}")
    check_unit(beta=beta)
