"""Finished sequences as flat tensors, and such tensors joined and restored."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from spmdrl.rollout.burst import Sample
from spmdrl.types import Rollouts, Scalars, Sums, add_sums



def pack(samples: list[Sample], *, version: int, sums: Sums, num_shown: int) -> Rollouts:
    """Pack samples into flat tensors. A failed reward becomes is_valid = False, reward 0."""
    tokens, mask, logprobs, versions = [], [], [], []
    for s in samples:
        prompt, response = len(s.prompt.tokens), len(s.completion.tokens)
        tokens += [*s.prompt.tokens, *s.completion.tokens]
        mask += [False] * prompt + [True] * response
        logprobs += [0.0] * prompt + list(s.completion.logprobs)
        versions += [-1] * prompt + [version] * response
    lengths = [len(s.prompt.tokens) + len(s.completion.tokens) for s in samples]
    scalars = Scalars(
        lengths=ints(lengths),
        response_lengths=ints([len(s.completion.tokens) for s in samples]),
        group_ids=ints([s.slot for s in samples]), sample_ids=ints([s.sample for s in samples]),
        rewards=torch.tensor([s.reward.value or 0.0 for s in samples], dtype=torch.float64),
        is_truncated=torch.tensor([s.completion.is_truncated for s in samples], dtype=torch.bool),
        is_valid=torch.tensor([s.reward.value is not None for s in samples], dtype=torch.bool),
        min_versions=ints([version] * len(samples)),
    )
    shown = tuple({"prompt": s.prompt.text, "response": s.text, "reward": s.reward.value}
                  for s in samples[:num_shown])
    return Rollouts(
        tokens=ints(tokens), response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        policy_versions=ints(versions), cu_seqlens=cumulative(lengths), scalars=scalars,
        sums=sums, samples=shown,
    )


def empty_rollouts() -> Rollouts:
    """Return the rollouts of a rank that made none."""
    return pack([], version=0, sums={}, num_shown=0)


def concat_rollouts(parts: list[Rollouts]) -> Rollouts:
    """Return all sequences of several Rollouts in one."""
    packed = {
        name: torch.cat([getattr(p, name) for p in parts])
        for name in ("tokens", "response_mask", "rollout_logprobs", "policy_versions")
    }
    scalars = Scalars(**{
        f.name: torch.cat([getattr(p.scalars, f.name) for p in parts])
        for f in dataclasses.fields(Scalars)
    })
    return Rollouts(**packed, cu_seqlens=cumulative(scalars.lengths.tolist()), scalars=scalars,
                    sums=add_sums(*(p.sums for p in parts)),
                    samples=tuple(s for p in parts for s in p.samples))


def rollouts_from_dict(tree: dict[str, Any]) -> Rollouts:
    """Undo dataclasses.asdict."""
    return Rollouts(**{**tree, "scalars": Scalars(**tree["scalars"]),
                       "sums": {k: tuple(v) for k, v in tree["sums"].items()},
                       "samples": tuple(tree["samples"])})


def ints(values: list[int]) -> Tensor:
    """Return [n] int64."""
    return torch.tensor(values, dtype=torch.int64)


def cumulative(lengths: list[int]) -> Tensor:
    """Return [n + 1] int64, where each sequence starts, and the end."""
    return torch.cat([ints([0]), ints(lengths).cumsum(0)])
