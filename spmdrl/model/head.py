"""The logprob head: logprobs and entropy from hidden states, without full logits in memory.

Shape letters: N scored positions, H hidden, V vocabulary (this rank's part of it under tp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.config import NO_PENALTIES, Config, Penalties
from spmdrl.imports import refusing
from spmdrl.model import logit_passes
from spmdrl.model.logit_passes import LogitForm, Positions, chunks
from spmdrl.model.sampling_rules import SamplingRules


@dataclass(frozen=True)
class HeadOptions:
    """How logits become a distribution."""

    chunk_tokens: int
    """Positions whose logits are in memory at the same time."""
    temperature: float = 1.0
    """Logits are divided by it."""
    softcap: float | None = None
    """Gemma's final softcap: logits become softcap * tanh(logits / softcap)."""
    scale: float = 1.0
    """Factor on the raw logits (Cohere's logit_scale, 1 / Granite's logits_scaling)."""
    penalties: Penalties = NO_PENALTIES
    """For targets whose rules have a history."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the parts of the vocabulary, in order; None: this rank holds all of it."""
    is_fused: bool = False
    """Compute the passes over logits by Triton kernels, on CUDA; see logit_kernels.py."""

    @property
    def form(self) -> LogitForm:
        """How the head's matrix products become logits."""
        return LogitForm(self.scale, self.softcap, self.temperature)


def head_chunk_tokens(cfg: Config, hf_model: nn.Module, *, on_gpu: bool) -> int:
    """Return the positions whose logits may be in memory at the same time.

    That is the setting or, if it is 0, as many as take 512 MiB, or 1 GiB on GPUs: there each chunk
    reads and writes the whole float32 gradient of the head's weight.
    """
    budget = 2**30 if on_gpu else 2**29
    return cfg.model.memory.head_chunk_tokens or fitting_positions(
        hf_model, budget=budget, logit_bytes=logit_bytes(cfg)
    )


def logit_bytes(cfg: Config) -> int:
    """Return the memory that a chunk takes for each logit, forward or backward, in bytes."""
    # The head's products, which their gradient overwrites.
    total = getattr(torch, cfg.model.compute_dtype).itemsize
    if cfg.sampling.penalties != NO_PENALTIES:
        # Plain and penalised logits, counts, and what is computed between them, in 32 bits.
        total += 24
    if cfg.objective.needs_teacher:
        # Logits and distributions of both models, their divergence and gradients, in float32.
        total += 40
        if cfg.sampling.truncates:
            # Which ids are masked out, and both models' logits without these.
            total += 9
    return total


def fitting_positions(hf_model: nn.Module, *, budget: int, logit_bytes: int) -> int:
    """Return how many positions have logits of `budget` bytes, within [256, 8192].

    Fewer make small matrix products, and more gain nothing.
    """
    rows = hf_model.get_input_embeddings().weight.shape[0]
    return max(256, min(8192, budget // (logit_bytes * rows)))


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    targets: Tensor,
    options: HeadOptions,
    rules: SamplingRules | None = None,
    squares: bool = False,
) -> tuple[Tensor, ...]:
    """Score one target per position under softmax(logits / temperature), by `rules` if any.

    Args:
        hidden: [N, H] compute dtype. The state before each scored token. May be empty.
        weight: [V, H] compute dtype. Rows of this rank's part of the vocabulary; parts are
            equal in size and in the order of the ranks of `options.group`.
        bias: [V] compute dtype, of the same rows; None for a head without one.
        targets: [N] int64. Token ids in the whole vocabulary.
        options: chunk size, temperature, softcap, group.
        rules: how each target was sampled. Ids that are masked out have probability 0 and get no
            gradient. None: by softmax alone.
        squares: also return sum_v pi_v^2; then nothing has gradients.
    Returns: logprobs [N] and entropy [N], float32, in nats, differentiable in hidden, weight and
        bias, and equal on all ranks of the group; with `squares` also these sums [N], float32.
    Invariant under: chunk_tokens, the number of ranks in the group (to rounding).
    """
    if not squares:
        return _Head.apply(hidden, weight, bias, targets, options, rules)
    with torch.no_grad():
        local = targets - _first_id(weight, options)
        logprobs, entropy, _, sums = _scores(
            hidden, weight, bias, local, options, rules, squares=True
        )
    return logprobs, entropy, sums


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: HeadOptions,
        rules: SamplingRules | None,
    ) -> tuple[Tensor, Tensor]:
        local = targets - _first_id(weight, options)
        # Backward begins with the chunk that forward computed last, and need not compute it again.
        # Nothing else takes memory between the two, so that their peak is the same.
        ctx.kept = {} if any(ctx.needs_input_grad) else None
        logprobs, entropy, log_total = _scores(
            hidden, weight, bias, local, options, rules, kept=ctx.kept
        )
        ctx.save_for_backward(hidden, weight, bias, local, log_total, entropy)
        ctx.options = options
        ctx.rules = rules
        # The loss often leaves the entropy out; its gradient is None then instead of zeros.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, bias, local, log_total, entropy = ctx.saved_tensors
        options = ctx.options
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_total)
        positions = Positions(local, log_total, entropy, grad_logprobs, grad_entropy)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        if ctx.needs_input_grad[2]:
            grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=weight.device)
        for part in reversed(chunks(hidden.shape[0], options.chunk_tokens)):
            # `differentiate` overwrites the values: a second backward pass computes them again.
            found = ctx.kept.pop(part.start, None) or _products(
                hidden[part], weight, bias, options, rules=ctx.rules, part=part
            )
            _passes(options).differentiate(
                found.values, positions[part], found.form, dropped=found.dropped
            )
            grad = found.values if found.slope is None else found.values.mul_(found.slope)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0, dtype=torch.float32)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[part])
        # Each rank has the gradient through its part of the vocabulary.
        if options.group is not None:
            dist.all_reduce(grad_hidden, group=options.group)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _first_id(weight: Tensor, options: HeadOptions) -> int:
    """Return the id of this rank's first row of the vocabulary."""
    rank = 0 if options.group is None else dist.get_rank(options.group)
    return rank * weight.shape[0]


def check_fused_head() -> None:
    """Refuse a machine without Triton.

    Raises: Refusal.
    """
    hint = "; install it or set fused_head to false"
    with refusing("model.kernels.fused_head: cannot import triton", ImportError, hint=hint):
        import spmdrl.model.logit_kernels  # noqa: F401


def _passes(options: HeadOptions) -> ModuleType:
    """Return the module that computes the passes over logits."""
    if not options.is_fused:
        return logit_passes
    from spmdrl.model import logit_kernels

    return logit_kernels


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, which is float32, in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.device.type == "cpu":
        # It has no matrix product of 16-bit numbers with a float32 result.
        total += left @ right
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    local: Tensor,
    options: HeadOptions,
    rules: SamplingRules | None,
    *,
    squares: bool = False,
    kept: dict[int, _Products] | None = None,
) -> tuple[Tensor, ...]:
    """Return logprobs, entropy and log of the partition function of all positions, [N] float32.

    With `squares` also the sums of squared probabilities.

    Args:
        kept: gets the products of the last chunk, by its first position.
    """
    count = hidden.shape[0]
    sums = torch.empty(4 + squares, count, dtype=torch.float32, device=hidden.device)
    for part in chunks(count, options.chunk_tokens):
        found = _products(hidden[part], weight, bias, options, rules=rules, part=part)
        _passes(options).summarize(
            found.values, local[part], found.form, dropped=found.dropped, sums=sums[:, part]
        )
        if kept is not None and part.stop == count and not isinstance(found.slope, Tensor):
            kept[part.start] = found
    top, *rest = sums
    if options.group is not None:
        top, rest = _join(top, torch.stack(rest), options.group)
    total, moment, target, *square = rest
    log_total = total.log() + top
    return (
        target - log_total,
        total.log() - moment / total,
        log_total,
        *(value / total.square() for value in square),
    )


def _join(top: Tensor, sums: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Sequence[Tensor]]:
    """Join the sums of ranks that have parts of the vocabulary; see logit_passes.summarize.

    Args:
        top: [N] of this rank. sums: [3 or 4, N], the rows after it.
    Returns: both, of the whole vocabulary.
    """
    whole = top.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    # With z - whole = (z - top) + shift:
    shift = top - whole
    factor = shift.exp()
    total, moment, target, *square = sums
    parts = [total * factor, (moment + shift * total) * factor, target]
    parts += [value * factor.square() for value in square]
    joined = torch.stack(parts)
    dist.all_reduce(joined, group=group)
    return whole, joined.unbind()


@dataclass(frozen=True)
class _Products:
    """What becomes logits, of consecutive positions."""

    values: Tensor
    """[n, V] the head's matrix products; under penalties the penalised logits in float32."""
    form: LogitForm
    """How the values become logits."""
    dropped: Tensor | None = None
    """[n, V] bool, ids that are masked out."""
    slope: Tensor | float | None = None
    """[n, V], or one number: the derivative of the values by the head's products; None: 1."""


def _products(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    *,
    rules: SamplingRules | None,
    part: slice,
) -> _Products:
    values = F.linear(hidden, weight, bias)
    if rules is None:
        return _Products(values, options.form)
    where = dict(first=_first_id(weight, options), width=weight.shape[0])
    dropped = rules.dropped(part, **where)
    if rules.history is None:
        return _Products(values, options.form, dropped)
    # Penalties are applied before the temperature.
    plain = replace(options.form, temperature=1.0).logits(values)
    slope: Tensor | float = options.scale
    if options.softcap is not None:
        slope = slope * (1 - (plain / options.softcap).square())
    logits, own = rules.penalise(plain, part, penalties=options.penalties, **where)
    slope = slope if own is None else slope * own
    return _Products(logits, LogitForm(temperature=options.temperature), dropped, slope)


def scaled_logits(
    hidden: Tensor, weight: Tensor, options: HeadOptions, *, bias: Tensor | None = None
) -> Tensor:
    """Return float32 logits [n, V] of this rank's vocabulary, divided by the temperature."""
    return options.form.logits(F.linear(hidden, weight, bias))
