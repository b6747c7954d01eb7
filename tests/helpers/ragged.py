"""Random ragged batches for the algorithm tests, with the corner cases in every one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdrl.types import Scalars


@dataclass
class Ragged:
    """One micro-batch: S sequences packed into T tokens, float64."""

    logprobs: Tensor  # requires grad
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    policy_versions: Tensor | None = None  # [T] int64; all fresh unless given
    token_keys: Tensor | None = None  # [T] int64; positions unless given

    version = torch.tensor(9)  # being trained; no field: it is no column

    def __post_init__(self) -> None:
        count = len(self.logprobs)
        if self.policy_versions is None:
            self.policy_versions = torch.full((count,), int(self.version))
        if self.token_keys is None:
            self.token_keys = torch.arange(count)

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors by the names that methods ask for."""
        return dict(vars(self))

    def rows(self) -> list[range]:
        """Return the token range of each sequence."""
        cu = self.cu_seqlens.tolist()
        return [range(a, b) for a, b in zip(cu, cu[1:])]

    def select(self, members: list[int]) -> Ragged:
        """Return the micro-batch of these sequences, in this order."""
        order = torch.tensor([t for s in members for t in self.rows()[s]], dtype=torch.int64)
        return self._mapped(
            lambda v: v.detach()[order], lengths=[len(self.rows()[s]) for s in members]
        )

    def single(self) -> Ragged:
        """Return it in float32."""
        return self._mapped(lambda v: v.detach().float() if v.is_floating_point() else v)

    def dirty(self, garbage: float, **others: float) -> Ragged:
        """Put garbage into every column of numbers off the loss mask; return it."""
        with torch.no_grad():
            for name, column in vars(self).items():
                if column.is_floating_point():
                    column[~self.loss_mask] = others.get(name, garbage)
        return self

    def _mapped(self, change: Callable, *, lengths: list[int] | None = None) -> Ragged:
        flat = {k: change(v) for k, v in vars(self).items() if k != "cu_seqlens"}
        flat["logprobs"].requires_grad_()
        cu = self.cu_seqlens if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
        return Ragged(**flat, cu_seqlens=cu)


def assert_loop(
    terms: Tensor, learned: Sequence[Tensor], expected: Iterable, *, tolerance: float
) -> None:
    """Compare terms, and the gradients of their sum by what is learned, with those of a loop."""
    found = (terms, *torch.autograd.grad(terms.sum(), learned))
    for got, wanted in zip(found, expected, strict=True):
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        assert ((got - wanted).abs() <= tolerance * wanted.abs().clamp(min=1)).all()


def assert_nothing_is_read(
    call: Callable, cases: Sequence, learned: Callable[..., Sequence[Tensor]], *, off: Tensor
) -> None:
    """Compare two cases that differ where nothing may be read: terms and gradients are 0 there."""
    found, stats = [], []
    for case in cases:
        terms, own = call(case)
        found.append((terms, *torch.autograd.grad(terms.sum(), learned(case))))
        stats.append(own)
    for got, expected in zip(*found):
        assert torch.equal(got, expected) and (got[off] == 0).all()
    assert stats[0] == stats[1]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return a mean and a population's standard deviation, as exact sums give them."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def packed(*lengths: int) -> dict[str, Tensor]:
    """Return loss_mask and cu_seqlens of sequences whose tokens are all in the loss."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return dict(loss_mask=torch.ones(sum(lengths), dtype=torch.bool), cu_seqlens=cu)


def ragged(seed: int, *, drift: float = 0.4) -> Ragged:
    """Draw a batch with an empty sequence, a row masked whole and one of a single token."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.tensor([0, 4, 1]), torch.randint(1, 12, (5,), generator=g)])
    num_tokens = int(lengths.sum())

    def normal() -> Tensor:
        return torch.randn(num_tokens, generator=g, dtype=torch.float64)

    old = -normal().abs() - 0.01
    mask = torch.rand(num_tokens, generator=g) < 0.7
    mask[:4] = False  # the second sequence: masked whole
    mask[4] = True
    per_sequence = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    case = Ragged(
        logprobs=(old + drift * normal()).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old + drift * normal(),
        advantages=per_sequence.repeat_interleave(lengths),
        loss_mask=mask,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
    )
    versions = int(case.version) - torch.randint(0, 4, (num_tokens,), generator=g)
    case.policy_versions = torch.where(mask, versions, -1)
    case.token_keys = torch.arange(num_tokens) * 1_000_003 + seed
    return case


def scalars_of(
    rewards: Sequence[float] | Tensor,
    group_ids: Sequence[int] | Tensor = (),
    *,
    response_lengths: Sequence[int] | Tensor = (),
    prompt_length: int = 1,
    **columns: Any,
) -> Scalars:
    """Return a batch's scalars, of one group unless told: samples in order, all valid and whole."""
    count = len(rewards)
    groups = torch.as_tensor(group_ids if len(group_ids) else [0] * count)
    lengths = torch.as_tensor(response_lengths if len(response_lengths) else [4] * count)
    before = (groups[:, None] == groups[None, :]).tril(-1)
    own = dict(
        sample_ids=before.sum(1),
        is_truncated=torch.zeros(count, dtype=torch.bool),
        is_valid=torch.ones(count, dtype=torch.bool),
        min_versions=torch.zeros(count, dtype=torch.int64),
    )
    return Scalars(
        lengths=lengths + prompt_length,
        response_lengths=lengths,
        group_ids=groups,
        rewards=torch.as_tensor(rewards, dtype=torch.float64),
        **(own | {name: torch.as_tensor(column) for name, column in columns.items()}),
    )


def scalars(seed: int, *, num_groups: int = 6) -> Scalars:
    """Draw a batch's scalars with groups of one, equal rewards, and samples not valid."""
    g = torch.Generator().manual_seed(seed)
    sizes = [1, 4, 3, *torch.randint(2, 9, (num_groups - 3,), generator=g).tolist()]
    group_ids = torch.tensor([i for i, size in enumerate(sizes) for _ in range(size)]) * 3
    count = len(group_ids)
    rewards = torch.rand(count, generator=g, dtype=torch.float64).round(decimals=1)
    rewards[1:5] = 0.3  # the second group: all equal
    is_valid = torch.rand(count, generator=g) < 0.85
    response_lengths = torch.randint(0, 20, (count,), generator=g)
    response_lengths[-1] = 5
    return scalars_of(
        rewards,
        group_ids,
        response_lengths=response_lengths,
        prompt_length=3,
        is_truncated=torch.rand(count, generator=g) < 0.2,
        is_valid=is_valid,
    )
