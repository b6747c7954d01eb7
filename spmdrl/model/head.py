"""The logprob head: logprobs and entropy from hidden states, without full logits in memory.

Shape letters: N scored positions, H hidden, V vocabulary (this rank's part of it under tp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.config import NO_PENALTIES, ModelSettings, Penalties
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


def head_chunk_tokens(model: ModelSettings, hf_model: nn.Module) -> int:
    """Return the positions whose logits may be in memory at the same time.

    That is the setting or, if it is 0, as many as take 512 MiB in float32, within [256, 8192]:
    fewer make small matmuls, and more gain nothing.
    """
    rows = hf_model.get_input_embeddings().weight.shape[0]
    return model.memory.head_chunk_tokens or max(256, min(8192, 512 * 2**20 // (4 * rows)))


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
        local = _local(targets, weight, options)
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
        local = _local(targets, weight, options)
        logprobs, entropy, log_total = _scores(hidden, weight, bias, local, options, rules)
        ctx.save_for_backward(hidden, weight, bias, local, log_total, entropy)
        ctx.options = options
        ctx.rules = rules
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs: Tensor, grad_entropy: Tensor):
        hidden, weight, bias, local, log_total, entropy = ctx.saved_tensors
        options = ctx.options
        rules = ctx.rules
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else grad_weight.new_zeros(bias.shape)
        for part in chunks(hidden.shape[0], options.chunk_tokens):
            own = [x[part] for x in (local, log_total, entropy, grad_logprobs, grad_entropy)]
            found = _ruled(hidden[part], weight, options, bias=bias, rules=rules, part=part)
            grad = _grad_ruled(found, own, options)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            # The sum is in float32, and addmm_ takes one dtype only.
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
        # Each rank has the gradient through its part of the vocabulary.
        if options.group is not None:
            dist.all_reduce(grad_hidden, group=options.group)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def _local(targets: Tensor, weight: Tensor, options: HeadOptions) -> Tensor:
    """Return targets relative to the first row of this rank."""
    rank = 0 if options.group is None else dist.get_rank(options.group)
    return targets - rank * weight.shape[0]


def _scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    local: Tensor,
    options: HeadOptions,
    rules: SamplingRules | None,
    *,
    squares: bool = False,
) -> list[Tensor]:
    """Return what `_summarize` does for all positions, chunk by chunk: [N] float32 each."""
    count = hidden.shape[0]
    found = [
        torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3 + squares)
    ]
    for part in chunks(count, options.chunk_tokens):
        logits = _ruled(hidden[part], weight, options, bias=bias, rules=rules, part=part).logits
        for whole, values in zip(found, _summarize(logits, local[part], options, squares=squares)):
            whole[part] = values
    return found


@dataclass(frozen=True)
class _Ruled:
    """Logits [n, V], divided by the temperature, and what the gradient needs if there are rules."""

    logits: Tensor
    slope: Tensor | float | None = None  # derivative by the scaled products
    dropped: Tensor | None = None  # [n, V] bool, ids that are masked out


def _ruled(
    hidden: Tensor,
    weight: Tensor,
    options: HeadOptions,
    *,
    bias: Tensor | None,
    rules: SamplingRules | None,
    part: slice,
) -> _Ruled:
    """Return the logits of consecutive positions, by rules if any; see `scaled_logits`."""
    if rules is None:
        return _Ruled(scaled_logits(hidden, weight, options, bias=bias))
    rank = 0 if options.group is None else dist.get_rank(options.group)
    # Penalties are applied before the temperature.
    plain = scaled_logits(hidden, weight, replace(options, temperature=1.0), bias=bias)
    # Computed first: without penalties `plain` itself is divided in place below.
    slope: Tensor | float = 1 / options.temperature
    if options.softcap is not None:
        slope = slope * (1 - (plain / options.softcap).square())
    first = rank * weight.shape[0]
    logits, own = rules.apply(plain, part, penalties=options.penalties, first=first)
    if options.temperature != 1.0:
        logits.div_(options.temperature)
    dropped = rules.drop(logits, part, first=first)
    return _Ruled(logits, slope if own is None else slope * own, dropped)


def _grad_ruled(ruled: _Ruled, own: Sequence[Tensor], options: HeadOptions) -> Tensor:
    """Return the gradient of the raw logits, also for logits by rules; see `_grad_logits`."""
    if ruled.slope is None:
        return _grad_logits(ruled.logits, own, options)
    # The slope includes softcap and temperature.
    plain = replace(options, softcap=None, temperature=1.0)
    grad = _grad_logits(ruled.logits, own, plain).mul_(ruled.slope)
    return grad if ruled.dropped is None else grad.masked_fill_(ruled.dropped, 0.0)


def chunks(count: int, size: int) -> list[slice]:
    """Cut `count` positions into runs of at most `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def scaled_logits(
    hidden: Tensor, weight: Tensor, options: HeadOptions, *, bias: Tensor | None = None
) -> Tensor:
    """Return float32 logits [n, V] of this rank's vocabulary, divided by the temperature."""
    logits = F.linear(hidden, weight, bias).float()
    if options.scale != 1.0:
        logits.mul_(options.scale)
    if options.softcap is not None:
        logits = logits.div_(options.softcap).tanh_() * options.softcap  # tanh keeps its output
    if options.temperature != 1.0:
        logits.div_(options.temperature)
    return logits


def _summarize(
    logits: Tensor, local: Tensor, options: HeadOptions, *, squares: bool
) -> tuple[Tensor, ...]:
    """Return logprobs, entropy and log of the partition function, each [n] float32.

    With `squares` also the sum of squared probabilities.
    """
    group = options.group
    top = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    is_own = (local >= 0) & (local < logits.shape[1])
    at = local.clamp(0, logits.shape[1] - 1)
    # 0 on all ranks but the one that has the target, so that their sum is its logit.
    target = logits.gather(1, at[:, None])[:, 0] * is_own
    shifted = logits - top[:, None]
    weights = shifted.exp()
    # vector_norm needs no further [n, V] for the squares.
    square = [torch.linalg.vector_norm(weights, dim=-1).square()] if squares else []
    # [3 or 4, n]: sum of exp, sum of exp * shifted logit, the target's logit, sum of exp^2.
    sums = torch.stack([weights.sum(-1), weights.mul_(shifted).sum(-1), target, *square])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, moment, target, *square = sums
    log_total = total.log() + top
    return (
        target - log_total,
        total.log() - moment / total,
        log_total,
        *(value / total.square() for value in square),
    )


def _grad_logits(logits: Tensor, own: Sequence[Tensor], options: HeadOptions) -> Tensor:
    """Return the [n, V] float32 gradient of the raw logits; overwrites `logits`.

    With p = exp(z - log_total): d logprob/dz = onehot - p and
    d entropy/dz = -p * (z - log_total + entropy).

    Args:
        own: targets, log_total, entropy, and the gradients of logprobs and of entropy, [n] each.
    """
    local, log_total, entropy, grad_logprobs, grad_entropy = own
    # Computed first, because the logits are overwritten below.
    if options.softcap is not None:
        capped = logits * (options.temperature / options.softcap)
        slope = capped.square_().neg_().add_(1)  # of softcap * tanh(x / softcap)
    is_own = (local >= 0) & (local < logits.shape[1])
    at = local.clamp(0, logits.shape[1] - 1)
    logp = logits.sub_(log_total[:, None])
    grad = logp.exp()
    factor = logp.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
    grad = grad.mul_(factor).neg_()
    grad.scatter_add_(1, at[:, None], (grad_logprobs * is_own)[:, None])
    if options.softcap is not None:
        grad.mul_(slope)
    return grad.mul_(options.scale / options.temperature)
