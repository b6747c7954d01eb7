"""Types that the parts of a run exchange: prompts, rollouts, batches.

Shape letters: S sequences, T packed tokens, M micro-batches. Sequences are packed, never
padded: flat [T] tensors plus `cu_seqlens` [S+1]. Every per-token tensor is aligned with the
token that it scores: `logprobs[t]` is log p(tokens[t] | tokens before t of its sequence).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from spmdrl.columns import Columns, column_class, concat_columns, to_device
from spmdrl.model_inputs import TokenIds

Sums = dict[str, tuple[float, float]]
"""Named (numerator, denominator) pairs. Sums from any number of ranks and micro-batches add
up pairwise; the metric is numerator / denominator of the total."""


def add_sums(*parts: Sums) -> Sums:
    """Return the pairwise total of several Sums."""
    total: Sums = {}
    for part in parts:
        for name, pair in part.items():
            numerator, denominator = as_pair(name, pair)
            a, b = total.get(name, (0.0, 0.0))
            total[name] = (a + numerator, b + denominator)
    return total


PartialSums = dict[str, tuple[float | list[float], float]]
"""Sums of one rank whose total has the same bits in any order of addition. A numerator that no
float holds exactly is a list of floats with this exact sum."""


def exact_sum(values: Sequence[float]) -> float | list[float]:
    """Return the sum of numbers without rounding; a list if it takes several floats."""
    total = sum(values)
    if not math.isfinite(total):
        return total
    # Each part is the rounded value of what the parts before it leave, until nothing is left.
    parts: list[float] = []
    while rest := math.fsum([*values, *(-part for part in parts)]):
        parts.append(rest)
    return parts if len(parts) > 1 else sum(parts)


def join_sums(*parts: PartialSums) -> PartialSums:
    """Return the pairwise total of several ranks' sums, without rounding."""
    numerators: dict[str, list[float]] = defaultdict(list)
    denominators: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, (numerator, denominator) in part.items():
            numerators[name] += numerator if isinstance(numerator, list) else [numerator]
            denominators[name] += denominator
    return {name: (exact_sum(own), denominators[name]) for name, own in numerators.items()}


def round_sums(sums: PartialSums) -> Sums:
    """Return the sums with each numerator rounded to the nearest float."""
    return {
        name: (math.fsum(own) if isinstance(own, list) else own, denominator)
        for name, (own, denominator) in sums.items()
    }


def as_pair(name: str, value: Any) -> tuple[float, float]:
    """Return a metric's (numerator, denominator).

    Raises: TypeError naming the metric if its value is not a pair of numbers.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if is_pair and all(hasattr(number, "__float__") for number in value):
        return value[0], value[1]
    got = f"{type(value).__name__} {value!r:.60}"
    raise TypeError(
        f"metric {name!r}: expected a pair of numbers (numerator, denominator), got {got}; a value "
        f"that every rank knows is given as {{{name!r}: (value, 1.0)}}"
    )


@dataclass(frozen=True)
class Prompt:
    """One row of data, ready to generate from."""

    index: int
    """Position of the row in its data source: stable across epochs, ranks and runs."""
    tokens: TokenIds
    """Token ids of the prompt, after the chat template, with its images."""
    text: str
    """The text that was tokenised, for people and string-based rewards."""
    row: dict
    """The whole row as read; reward functions get its columns by name."""
    source: int = 0
    """Index of its source among those of data.train followed by those of data.eval."""
    where: str = ""
    """Origin of the row for messages, e.g. `train.jsonl:12`; empty if it is not known."""

    @property
    def origin(self) -> str:
        """Return the row's origin for messages; rows are counted from 1, as lines are."""
        return self.where or f"data row {self.index + 1}"


_LEFT_OUT = torch.empty(0)
"""Default of a column of Scalars, which `__post_init__` then makes from the others."""


@dataclass(frozen=True)
class Scalars:
    """Per-sequence numbers of a whole batch: small, gathered, equal on every rank.

    An episode is a sample of a group: a sequence, or several if an agent's calls branch. Its
    rewards, is_valid, reward_parts, greedy_rewards and rows are the same in all its sequences.

    Sorted by (group_ids, sample_ids, traces), so nothing depends on which rank generated what.
    """

    lengths: Tensor  # [S] int64, tokens in all (prompt + response)
    response_lengths: Tensor  # [S] int64, sampled tokens
    group_ids: Tensor  # [S] int64, position of the prompt within the step's batch
    sample_ids: Tensor  # [S] int64, sample within the group
    rewards: Tensor
    """[S] float64, task units, after rewards.shaping. If there are reward models,
    `Trainer.annotate` adds their rewards and shapes the sum; before it, these are the functions'
    rewards alone."""
    is_truncated: Tensor  # [S] bool, cut at max_response_tokens
    is_valid: Tensor  # [S] bool, False: reward failed under on_failure=drop
    min_versions: Tensor  # [S] int64, oldest policy version among the sampled tokens
    reward_parts: Tensor = _LEFT_OUT
    """[S, K] float64, each reward function's value without weight or shaping; 0 if it does not
    apply. Default: the rewards as [S, 1]."""
    greedy_rewards: Tensor = _LEFT_OUT
    """[S] float64, reward of the prompt's greedy response, after shaping; NaN if there is none.
    Default: all NaN."""

    turns: Tensor = _LEFT_OUT
    """[S, U, 2] float64, for each turn of the policy: its reward from the environment, task units,
    and the number of the state that it answers (-1: no state is known). Sequences with fewer
    than U turns are padded with state -2. Default: one turn without a state."""
    rows: Tensor = _LEFT_OUT
    """[S] int64, position of the prompt's row in its data, as `Prompt.index`; -1 if it is not
    known. Default: all -1."""
    traces: Tensor = _LEFT_OUT
    """[S] int64, number of the sequence in its episode. Default: all 0."""

    def __post_init__(self) -> None:
        if self.reward_parts is _LEFT_OUT:
            object.__setattr__(self, "reward_parts", self.rewards.double()[:, None])
        if self.greedy_rewards is _LEFT_OUT:
            none = torch.full_like(self.rewards, torch.nan, dtype=torch.float64)
            object.__setattr__(self, "greedy_rewards", none)
        if self.turns is _LEFT_OUT:
            one = torch.tensor([[0.0, -1.0]], dtype=torch.float64)
            object.__setattr__(self, "turns", one.repeat(len(self), 1, 1))
        if self.rows is _LEFT_OUT:
            object.__setattr__(self, "rows", torch.full_like(self.lengths, -1))
        if self.traces is _LEFT_OUT:
            object.__setattr__(self, "traces", torch.zeros_like(self.lengths))

    def __len__(self) -> int:
        return self.lengths.numel()

    @classmethod
    def concat(cls, parts: Sequence[Scalars]) -> Scalars:
        """Join at least one part, in order. Parts without sequences may have another K."""
        filled = [part for part in parts if len(part)] or parts[:1]
        joined = {
            f.name: torch.cat([getattr(part, f.name) for part in filled])
            for f in fields(cls)
            if f.name != "turns"
        }
        return cls(**joined, turns=join_turns([part.turns for part in filled]))

    def episodes(self) -> Episodes:
        """Return the episodes of these sequences, by group and sample.

        All sequences of an episode must be here.
        """
        if not self.traces.any():
            return Episodes(self, torch.arange(len(self)))
        pairs = torch.stack([self.group_ids, self.sample_ids], dim=1)
        ids, index = torch.unique(pairs, dim=0, return_inverse=True)
        sums = self.lengths.new_zeros(len(ids))
        unknown = torch.iinfo(torch.int64).max
        versions = self.min_versions.where(self.min_versions >= 0, unknown)
        oldest = (sums + unknown).scatter_reduce(0, index, versions, "amin")
        first = (sums + len(self)).scatter_reduce(0, index, torch.arange(len(self)), "amin")
        own = {name: values[first] for name, values in vars(self).items() if name != "turns"}
        own |= {
            "lengths": sums.index_add(0, index, self.lengths),
            "response_lengths": sums.index_add(0, index, self.response_lengths),
            "is_truncated": sums.index_add(0, index, self.is_truncated.long()) > 0,
            "is_valid": sums.index_add(0, index, self.is_valid.long()) > 0,
            "min_versions": oldest.where(oldest < unknown, -1),
            "traces": sums,
        }
        return Episodes(Scalars(**own, turns=_turns_of(self.turns, index, len(ids))), index)


@dataclass(frozen=True)
class Episodes:
    """The E episodes of S sequences."""

    scalars: Scalars
    """[E], a row for each episode. Its lengths and response_lengths are the sums over its
    sequences, min_versions the oldest, turns those of all its sequences in order. It is truncated
    if any of them is, so that the order of traces does not matter: its reward comes from all of
    them. It is valid if any of them is."""
    index: Tensor
    """[S] int64, the episode of each sequence."""

    def __len__(self) -> int:
        return len(self.scalars)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of [S] values over each episode: [E]."""
        return values.new_zeros(len(self)).index_add(0, self.index, values)

    def spread(self, values: Tensor) -> Tensor:
        """Return [E, ...] values for each sequence: [S, ...]."""
        return values[self.index]


def _turns_of(turns: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the turns [E, U, 2] of episodes.

    Args:
        turns: [S, U, 2], of their sequences. index: [S], the episode of each. count: E.
    """
    exists = turns[:, :, 1] != -2
    owners = index[:, None].expand_as(exists)[exists]
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=count)
    ends = counts.cumsum(0)
    place = torch.arange(len(owners)) - (ends - counts)[owners[order]]
    joined = torch.tensor([0.0, -2.0], dtype=torch.float64).repeat(count, int(counts.max()), 1)
    joined[owners[order], place] = turns[exists][order]
    return joined


def join_turns(parts: Sequence[Tensor]) -> Tensor:
    """Join turns [S, U, 2] of Scalars, in order; pad them to the largest U."""
    most = max(part.shape[1] for part in parts)
    none = torch.tensor([0.0, -2.0], dtype=torch.float64)
    return torch.cat(
        [
            torch.cat([part, none.expand(len(part), most - part.shape[1], 2)], dim=1)
            for part in parts
        ]
    )


TOKEN_COLUMNS = {
    "tokens": torch.int64,
    "response_mask": torch.bool,
    "rollout_logprobs": torch.float32,
    "policy_versions": torch.int64,
}
"""{column that all tokens have, from the engine to the loss: its dtype}."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """T consecutive tokens, with a column for each property of a token."""

    tokens: Tensor  # [T] int64
    response_mask: Tensor  # [T] bool, sampled by the policy
    rollout_logprobs: Tensor  # [T] float32, nats, at the sampling temperature; 0 for others
    policy_versions: Tensor  # [T] int64, version that sampled the token; -1 for others
    extra_columns: Columns = field(default_factory=dict)
    """Columns that only some runs have: router routes, sampling masks, images."""

    @classmethod
    def unsampled(cls, ids: Sequence[int]) -> Tokens:
        """Return tokens that the policy did not sample, with the images of TokenIds."""
        tokens = flat(ids, "int64")
        return Tokens(
            tokens=tokens,
            response_mask=torch.zeros_like(tokens, dtype=torch.bool),
            rollout_logprobs=torch.zeros_like(tokens, dtype=torch.float32),
            policy_versions=torch.full_like(tokens, -1),
            extra_columns=TokenIds(ids).extra_columns,
        )

    @classmethod
    def concat(cls, parts: Sequence[Tokens]) -> Tokens:
        """Join at least one part, in order."""
        columns = {name: torch.cat([getattr(p, name) for p in parts]) for name in TOKEN_COLUMNS}
        lengths = [len(p.tokens) for p in parts]
        extra = concat_columns([p.extra_columns for p in parts], lengths)
        return Tokens(**columns, extra_columns=extra)

    def at(self, order: Tensor) -> Tokens:
        """Return the tokens at `order` [n] int64."""
        columns = {name: getattr(self, name)[order] for name in TOKEN_COLUMNS}
        extra = {key: column[order] for key, column in self.extra_columns.items()}
        return Tokens(**columns, extra_columns=extra)

    def token_fields(self) -> dict[str, Any]:
        """Return the fields that all kinds of Tokens share, by name."""
        names = (*TOKEN_COLUMNS, "extra_columns")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return all fields by name, with extra columns as plain values; tensors are shared."""
        extra = {key: column.state_dict() for key, column in self.extra_columns.items()}
        return vars(self) | {"extra_columns": extra}


def token_fields_from(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Tokens from the result of `Tokens.state_dict`."""
    extra = {
        key: column_class(key).from_state_dict(own) for key, own in state["extra_columns"].items()
    }
    return {**state, "extra_columns": extra}


def flat(values: Sequence[float], dtype: str) -> Tensor:
    """Return numbers as [n]. For 1000 numbers it takes a fifth of the time of torch.tensor."""
    return torch.from_numpy(numpy.fromiter(values, dtype, len(values)))


@dataclass(frozen=True, kw_only=True)
class Rollouts(Tokens):
    """Finished sequences held by one rank. Ranks that generate nothing hold zero sequences."""

    cu_seqlens: Tensor  # [S+1] int64
    scalars: Scalars  # of these sequences, same order
    sums: PartialSums = field(default_factory=dict)
    """This rank's share of rollout/ and reward/ metrics."""
    samples: tuple[dict, ...] = ()
    """A few {prompt, response, reward} as text for people; with {group, sample} if reward models
    will still add their rewards."""

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1


@dataclass(frozen=True, kw_only=True)
class Microbatch(Tokens):
    """The tokens of one forward pass of one dp rank.

    A micro-batch without sequences holds one dummy token with an empty mask, so that collectives
    stay matched.
    """

    position_ids: Tensor  # [T] int64, restarting at 0 in every sequence
    cu_seqlens: Tensor  # [S+1] int32
    sequence_ids: Tensor  # [S] int64, row of each sequence in the batch's Scalars; -1 dummy
    host: Microbatch | None = field(default=None, repr=False)
    """The micro-batch that this one is a copy of, if it is not on the host itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return all fields by name; see Tokens."""
        state = super().state_dict()
        del state["host"]
        return state

    def to(self, device: torch.device, *, non_blocking: bool = True) -> Microbatch:
        """Return the same micro-batch on `device`.

        Args:
            non_blocking: copies may still be under way when this returns.
        """
        moved = {
            name: to_device(value, device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        extra = {
            key: column.to(device, non_blocking=non_blocking)
            for key, column in self.extra_columns.items()
        }
        was_on_host = self.tokens.device.type == "cpu"
        host = self if was_on_host and device.type != "cpu" else self.host
        return Microbatch(**moved, extra_columns=extra, host=host)


@dataclass(frozen=True)
class Batch:
    """One step's batch as one rank sees it after the exchange."""

    scalars: Scalars
    updates: tuple[tuple[Microbatch, ...], ...]  # [updates_per_step][M]; empty off the trainers
    update_ids: Tensor  # [S] int64, which of the updates a sequence belongs to
    sums: Sums = field(default_factory=dict)  # whole world's rollout/ and reward/ metrics
    samples: tuple[dict, ...] = ()
    columns: tuple[tuple[dict[str, Tensor], ...], ...] = ()
    """[updates][M] of {name: [T]}, computed by `Trainer.annotate`; empty if nothing is needed."""
    was_valid: Tensor | None = None
    """[S] bool, scalars.is_valid before `without`, for metrics of all valid samples; None if
    `without` was not called."""
    has_rewards: bool = True
    """Whether scalars.rewards are rewards; for dataset rows they are labels or margins."""
    kl_coef: float = 0.0
    """Weight of a KL in the reward at this step, in task units per nat; set by `annotate`."""

    @property
    def microbatches(self) -> list[Microbatch]:
        """Return the micro-batches of all updates, in order."""
        return [one for update in self.updates for one in update]

    def without(self, sequences: Tensor) -> Batch:
        """Return the batch without some sequences in the loss and in baselines.

        Metrics of rewards still count them, since these describe the policy, not the training. An
        episode counts in baselines as long as one of its sequences is left.

        Args:
            sequences: [S] bool, True for each sequence to leave out.
        Raises: TypeError for another dtype or shape.
        """
        valid = self.scalars.is_valid
        if sequences.dtype != torch.bool or sequences.shape != valid.shape:
            raise TypeError(
                f"batch.without: expected a bool for each of the batch's {len(valid)} sequences, "
                f"got {list(sequences.shape)} {sequences.dtype}"
            )
        return replace(
            self,
            scalars=replace(self.scalars, is_valid=valid & ~sequences),
            was_valid=valid if self.was_valid is None else self.was_valid,
        )


@dataclass(frozen=True)
class Advantages:
    """The advantages of all tokens of a batch's micro-batches; empty off the trainers."""

    tokens: tuple[tuple[Tensor, ...], ...]  # [updates][M] of [T] float64
    returns: tuple[tuple[Tensor, ...], ...] = ()  # the same, targets of a value model

    def columns(self, update: int, microbatch: int) -> dict[str, Tensor]:
        """Return {name: [T] float32} of one micro-batch: its advantages, and returns if any."""
        known = {"advantages": self.tokens} | ({"returns": self.returns} if self.returns else {})
        return {name: parts[update][microbatch].float() for name, parts in known.items()}
