"""The passes over logits of the language-model head as two Triton kernels, for CUDA.

They have the arguments of the functions in logit_passes.py, which are their reference. Each reads
the head's products once, in their own dtype, and computes in float32. A row is summed by one
program, in an order that depends on the size of the vocabulary alone, and nothing is added
atomically: a position has the same bits in every batch, chunk and run. The sizes of blocks are
fixed for the same reason: tuned ones could differ between two runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmdrl.model.logit_passes import NEVER, LogitForm, Positions

_BLOCK = 4096
_WARPS = 8
_NEVER = tl.constexpr(NEVER)


def summarize(
    products: Tensor, targets: Tensor, form: LogitForm, *, dropped: Tensor | None, sums: Tensor
) -> None:
    """See logit_passes.summarize."""
    count, width = products.shape
    _summarize[(count,)](
        products,
        products if dropped is None else dropped,
        targets,
        sums,
        products.stride(0),
        0 if dropped is None else dropped.stride(0),
        sums.stride(0),
        width,
        *_numbers(form),
        HAS_SOFTCAP=form.softcap is not None,
        HAS_DROPPED=dropped is not None,
        HAS_SQUARES=len(sums) == 5,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def differentiate(
    products: Tensor, positions: Positions, form: LogitForm, *, dropped: Tensor | None
) -> None:
    """See logit_passes.differentiate."""
    count, width = products.shape
    grad_target = positions.grad_logprobs * form.factor
    grad_entropy = positions.grad_entropy
    _differentiate[(count, triton.cdiv(width, _BLOCK))](
        products,
        products if dropped is None else dropped,
        positions.targets,
        positions.log_total,
        positions.entropy,
        grad_target,
        grad_target if grad_entropy is None else grad_entropy * -form.factor,
        products.stride(0),
        0 if dropped is None else dropped.stride(0),
        width,
        *_numbers(form),
        HAS_SOFTCAP=form.softcap is not None,
        HAS_DROPPED=dropped is not None,
        HAS_ENTROPY=grad_entropy is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def _numbers(form: LogitForm) -> tuple[float, float, float]:
    """Return scale, softcap (any number if there is none) and 1 / temperature."""
    return float(form.scale), float(form.softcap or 1.0), 1.0 / form.temperature


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _load_logits(
    products,
    dropped,
    at,
    mask,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPPED: tl.constexpr,
):
    """Return the float32 logits of the ids `at` of a row, NEVER if they are masked out."""
    z = tl.load(products + at, mask=mask, other=0.0).to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    z = z * inverse_temperature
    if HAS_DROPPED:
        z = tl.where(tl.load(dropped + at, mask=mask, other=0) != 0, _NEVER, z)
    return z


@triton.jit
def _summarize(
    products,
    dropped,
    targets,
    sums,
    products_stride,
    dropped_stride,
    sums_stride,
    width,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPPED: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums of one row. Each lane has sums of its own until the end."""
    row = tl.program_id(0).to(tl.int64)
    products += row * products_stride
    dropped += row * dropped_stride
    lanes = tl.arange(0, BLOCK)
    # Finite like NEVER, so that no difference of two is NaN.
    top = tl.full((), _NEVER, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + lanes
        inside = at < width
        z = _load_logits(
            products,
            dropped,
            at,
            inside,
            scale,
            softcap,
            inverse_temperature,
            HAS_SOFTCAP,
            HAS_DROPPED,
        )
        # Below NEVER, so that they count for nothing in a row whose ids are all masked out.
        z = tl.where(inside, z, 2 * _NEVER)
        # What is summed so far is relative to the old top.
        new_top = tl.maximum(top, tl.max(z, axis=0))
        shift = top - new_top
        factor = tl.exp(shift)
        shifted = z - new_top
        weight = tl.exp(shifted)
        moment = (moment + shift * total) * factor + weight * shifted
        total = total * factor + weight
        if HAS_SQUARES:
            square = square * (factor * factor) + weight * weight
        top = new_top
    sums += row
    tl.store(sums, top)
    tl.store(sums + sums_stride, tl.sum(total, axis=0))
    tl.store(sums + 2 * sums_stride, tl.sum(moment, axis=0))
    if HAS_SQUARES:
        tl.store(sums + 4 * sums_stride, tl.sum(square, axis=0))
    target = tl.load(targets + row)
    is_own = (target >= 0) & (target < width)
    chosen = _load_logits(
        products,
        dropped,
        target,
        is_own,
        scale,
        softcap,
        inverse_temperature,
        HAS_SOFTCAP,
        HAS_DROPPED,
    )
    tl.store(sums + 3 * sums_stride, chosen)


@triton.jit
def _differentiate(
    products,
    dropped,
    targets,
    log_totals,
    entropies,
    grad_targets,
    grad_entropies,
    products_stride,
    dropped_stride,
    width,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPPED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a block of one row by its gradient."""
    row = tl.program_id(0).to(tl.int64)
    products += row * products_stride
    dropped += row * dropped_stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    target = tl.load(targets + row)
    grad_target = tl.load(grad_targets + row)
    z = tl.load(products + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_SOFTCAP:
        capped = _tanh(z / softcap)
        z = softcap * capped
    logp = z * inverse_temperature - tl.load(log_totals + row)
    coefficient = -grad_target
    if HAS_ENTROPY:
        entropy = tl.load(entropies + row)
        coefficient = (logp + entropy) * tl.load(grad_entropies + row) - grad_target
    grad = tl.exp(logp) * coefficient
    grad = tl.where(at == target, grad + grad_target, grad)
    if HAS_SOFTCAP:
        grad = grad * (1.0 - capped * capped)
    if HAS_DROPPED:
        grad = tl.where(tl.load(dropped + at, mask=inside, other=0) != 0, 0.0, grad)
    tl.store(products + at, grad.to(products.dtype.element_ty), mask=inside)
