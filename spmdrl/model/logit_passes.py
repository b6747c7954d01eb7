"""The float32 passes over logits [n, V] of the language-model head, by torch's own operations.

CPUs use these, and they are the reference of logit_kernels.py, which has the same functions in
Triton. A few rows are computed at a time, so that what one pass writes is in the cache when the
next pass reads it; no sum goes over rows, so the results are those of all rows at once.

Shape letters: n positions, V vocabulary (this rank's part of it under tp).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e30
"""The logit of an id that is masked out. It is finite, so that its product with 0 is 0."""

_ROW_ELEMENTS = {"cpu": 2**18}
"""Logits of the rows that are computed at a time, by device: 1 MiB in float32 on the CPU."""
_SUMMED_AT_ONCE = 2**14
"""Elements of a row that are summed at a time: few enough for one thread."""
_MANY_ELEMENTS = 2**24  # elsewhere: enough for a kernel to be worth its launch


@dataclass(frozen=True)
class LogitForm:
    """How the head's matrix products become logits: scaled, softcapped, over the temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def factor(self) -> float:
        """The derivative of logits by products, without that of the softcap."""
        return self.scale / self.temperature

    def logits(self, products: Tensor) -> Tensor:
        """Return float32 logits [n, V]. May overwrite products that are float32."""
        logits = products.float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            # Autograd needs the output of tanh.
            logits = logits.div_(self.softcap).tanh_() * self.softcap
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits


@dataclass(frozen=True)
class Positions:
    """What the gradient of logits needs to know of each position: tensors [n]."""

    targets: Tensor
    """int64, relative to the first id of this rank's part of the vocabulary, perhaps outside."""
    log_total: Tensor
    """float32, the log of the partition function."""
    entropy: Tensor
    """float32, nats."""
    grad_logprobs: Tensor
    """float32, the gradient of the loss by the target's logprob."""
    grad_entropy: Tensor | None
    """float32, the gradient of the loss by the entropy; None: 0."""

    def __getitem__(self, part: slice) -> Positions:
        return Positions(
            self.targets[part],
            self.log_total[part],
            self.entropy[part],
            self.grad_logprobs[part],
            None if self.grad_entropy is None else self.grad_entropy[part],
        )


def summarize(
    products: Tensor, targets: Tensor, form: LogitForm, *, dropped: Tensor | None, sums: Tensor
) -> None:
    """Summarize each row of this rank's logits z.

    Args:
        products: [n, V] the head's matrix products.
        targets: [n] int64, as in Positions.
        form: how products become logits.
        dropped: [n, V] bool, ids that are masked out; None for none.
        sums: [4 or 5, n] float32, written: top = max z, sum exp(z - top), sum exp(z - top) *
            (z - top), the target's z (0 if it is outside), and if there is a fifth row, sum
            exp(z - top)^2.
    """
    for rows in _row_blocks(products):
        # A copy of a block stays in the cache; the gradient needs the products unchanged.
        logits = form.logits(products[rows].to(torch.float32, copy=True))
        if dropped is not None:
            logits.masked_fill_(dropped[rows], NEVER)
        top = logits.amax(dim=-1)
        is_own, at = _own_targets(targets[rows], logits.shape[1])
        target = logits.gather(1, at)[:, 0] * is_own
        shifted = logits.sub_(top[:, None])
        weights = shifted.exp()
        if len(sums) == 5:
            # vector_norm needs no further [n, V] for the squares.
            sums[4, rows] = torch.linalg.vector_norm(weights, dim=-1).square()
        sums[0, rows] = top
        sums[1, rows] = row_sums(weights)
        sums[2, rows] = weights.mul_(shifted).sum(-1)
        sums[3, rows] = target


def differentiate(
    products: Tensor, positions: Positions, form: LogitForm, *, dropped: Tensor | None
) -> None:
    """Overwrite the head's products with the gradient of the loss by them, in their dtype.

    With p = exp(z - log_total): d logprob/dz = onehot - p and
    d entropy/dz = -p * (z - log_total + entropy).

    Args: see `summarize`.
    """
    for rows in _row_blocks(products):
        own = positions[rows]
        logits = form.logits(products[rows])
        slope = None
        if form.softcap is not None:
            capped = logits * (form.temperature / form.softcap)
            slope = capped.square_().neg_().add_(1)  # of softcap * tanh(x / softcap)
        is_own, at = _own_targets(own.targets, logits.shape[1])
        grad_target = own.grad_logprobs * form.factor
        logp = logits.sub_(own.log_total[:, None])
        if own.grad_entropy is None:
            grad = logp.exp_().mul_(-grad_target[:, None])
        else:
            weights = logp.exp()
            grad = logp.add_(own.entropy[:, None])
            grad.mul_(own.grad_entropy[:, None] * -form.factor)
            grad.sub_(grad_target[:, None]).mul_(weights)
        grad.scatter_add_(1, at, (grad_target * is_own)[:, None])
        if slope is not None:
            grad.mul_(slope)
        if dropped is not None:
            grad.masked_fill_(dropped[rows], 0.0)
        # Else the logits are the products themselves, see LogitForm.logits.
        if products.dtype != torch.float32 or form.softcap is not None:
            products[rows] = grad


def row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row of [n, V], with bits that depend on the row alone."""
    # torch cuts the sum of a single long row at places that depend on the number of threads.
    parts = values.split(_SUMMED_AT_ONCE, dim=-1)
    total = parts[0].sum(-1)
    for part in parts[1:]:
        total += part.sum(-1)
    return total


def log_totals(logits: Tensor) -> Tensor:
    """Return the log of the partition function of each row of float32 logits, [n]: the numbers that
    the trainer's head finds, bit for bit. Logits of ids that are left out may be -inf."""
    top = logits.amax(dim=-1)
    weights = (logits - top[:, None]).exp_()
    return row_sums(weights).log() + top


def log_probs(logits: Tensor) -> Tensor:
    """Return the float32 logprobs of all ids, nats, for logits [n, V] of any dtype; see
    `log_totals`."""
    logits = logits.float()
    return logits - log_totals(logits)[:, None]


def _own_targets(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in this rank's part [n], and an index within it [n, 1]."""
    is_own = (targets >= 0) & (targets < width)
    return is_own, targets.clamp(0, width - 1)[:, None]


def _row_blocks(logits: Tensor) -> list[slice]:
    elements = _ROW_ELEMENTS.get(logits.device.type, _MANY_ELEMENTS)
    return chunks(len(logits), max(1, elements // logits.shape[1]))


def chunks(count: int, size: int) -> list[slice]:
    """Cut `count` positions into runs of at most `size`."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
