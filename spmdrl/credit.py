"""Credit assignment: from the rewards of a batch to an advantage for each of its tokens.

The methods are pure functions (`algorithms.advantages`, `algorithms.token_advantages`); here
they are given what they ask for. Only trainer ranks work, and wait for each other where a
method needs the whole batch's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.token_advantages import (
    combine_moments, mean_and_std, moment_sums, whiten,
)
from spmdrl.comm import gather_objects
from spmdrl.config import Config
from spmdrl.types import Advantages, Batch, Microbatch
from spmdrl.world import World


def advantages_of(batch: Batch, cfg: Config, world: World, *, step: int) -> Advantages:
    """Compute the configured advantage of every token of this rank's micro-batches.

    Args:
        batch: as exchanged and annotated.
        step: for the names of the waits.
    Returns: zeros for an objective without advantages; nothing off the trainers.
    Raises: ValueError for a result that does not fit the batch or is not finite.
    """
    if not world.is_trainer:
        return Advantages(())
    if cfg.algorithm.objective != "rl":
        return per_token(batch, torch.zeros(len(batch.scalars), dtype=torch.float64))
    method = registry.get("advantage", cfg.algorithm.advantage)
    with world.watch.wait("advantages", step):
        if registry.is_per_token(method):
            return _of_tokens(batch, cfg, world)
        if cfg.algorithm.kl_coef and cfg.algorithm.kl_in == "reward":
            batch = _with_kl(batch, cfg, world)
    return per_token(batch, sequence_advantages(batch, cfg))


def sequence_advantages(batch: Batch, cfg: Config) -> Tensor:
    """Compute an advantage that is one number per sequence.

    Returns: [S] float64, in the order of batch.scalars.
    Raises: ValueError for a result of a method of one's own that is not [S] finite numbers.
    """
    chosen, scalars = cfg.algorithm, batch.scalars
    method = registry.get("advantage", chosen.advantage)
    options = dict(chosen.advantage_options)
    if "part_weights" in registry.options_of(method) and cfg.rewards.weights:
        options["part_weights"] = cfg.rewards.weights
    advantages = registry.call(method, vars(scalars), options).double()
    if advantages.shape != (len(scalars),) or not advantages.isfinite().all():
        raise ValueError(f"algorithm.advantage: {chosen.advantage} gave shape "
                         f"{tuple(advantages.shape)} with "
                         f"{int((~advantages.isfinite()).sum())} values that are not finite; "
                         f"expected ({len(scalars)},), all finite")
    return advantages


def per_token(batch: Batch, advantages: Tensor) -> Advantages:
    """Give every token the advantage of its sequence.

    Args:
        advantages: [S] float64, by row of the batch's scalars.
    """
    values = torch.cat([advantages.cpu(), advantages.new_zeros(1)])  # a dummy's row is -1
    return Advantages(tuple(
        tuple(_spread(values, microbatch) for microbatch in update)
        for update in batch.updates))


def _spread(values: Tensor, microbatch: Microbatch) -> Tensor:
    rows = microbatch.sequence_ids
    return reduce.per_token(values.to(rows.device)[rows], microbatch.cu_seqlens,
                            num_tokens=microbatch.tokens.numel())


# --------------------------------------------------------------------------- per token


def _of_tokens(batch: Batch, cfg: Config, world: World) -> Advantages:
    chosen = cfg.algorithm
    method = registry.get("advantage", chosen.advantage)
    kept = _loss_masks(batch, cfg)
    rewards = torch.cat([batch.scalars.rewards, torch.zeros(1, dtype=torch.float64)])
    found = []
    for microbatch, columns, mask in _microbatches(batch, kept):
        rows = microbatch.sequence_ids
        inputs = {**columns, "rewards": rewards.to(rows.device)[rows], "loss_mask": mask,
                  "cu_seqlens": microbatch.cu_seqlens,
                  "rollout_logprobs": microbatch.rollout_logprobs,
                  "kl_rewards": _kl_rewards(columns, mask, cfg=cfg)}
        found.append(registry.call(method, inputs, chosen.advantage_options))
    advantages = [tokens for tokens, _ in found]
    if getattr(method, "whitened", False):
        advantages = _whiten(advantages, [mask for *_, mask in _microbatches(batch, kept)],
                             world=world)
    returns = [r for _, r in found if r is not None]
    return Advantages(_nested(advantages, batch), _nested(returns, batch) if returns else ())


def _whiten(advantages: Sequence[Tensor], masks: Sequence[Tensor], *, world: World
            ) -> list[Tensor]:
    """Whiten over the loss tokens of all trainer ranks; tp ranks of one dp index count once."""
    own = torch.stack([moment_sums(a, loss_mask=m) for a, m in zip(advantages, masks)])
    is_first = world.mesh.get_local_rank("tp") == 0
    parts = gather_objects(own.cpu() if is_first else None, group=world.trainer_control)
    mean, std = mean_and_std(combine_moments(torch.cat([p for p in parts if p is not None])))
    if not (mean.isfinite() and std.isfinite()):
        return list(advantages)  # as they are: the update is skipped on all ranks, and counted
    mean, std = mean.to(own.device), std.to(own.device)
    return [whiten(a, loss_mask=m, mean=mean, std=std) for a, m in zip(advantages, masks)]


def _loss_masks(batch: Batch, cfg: Config) -> Tensor:
    """Return [S+1] bool: whether a sequence is in the loss; False at the end, for dummies."""
    lengths = reduce.loss_lengths(batch.scalars, mask_truncated=cfg.algorithm.mask_truncated)
    return torch.cat([lengths > 0, torch.zeros(1, dtype=torch.bool)])


def _microbatches(batch: Batch, kept: Tensor) -> list[tuple[Microbatch, dict, Tensor]]:
    """Return every micro-batch with its columns and its loss mask [T]."""
    flat = []
    for u, update in enumerate(batch.updates):
        for m, microbatch in enumerate(update):
            columns = batch.columns[u][m] if batch.columns else {}
            mask = microbatch.response_mask & _spread(kept, microbatch)
            flat.append((microbatch, columns, mask))
    return flat


def _nested(flat: Sequence[Tensor], batch: Batch) -> tuple[tuple[Tensor, ...], ...]:
    tensors = iter(flat)
    return tuple(tuple(next(tensors) for _ in update) for update in batch.updates)


# --------------------------------------------------------------------------- KL in the reward


def _kl_rewards(columns: dict[str, Tensor], mask: Tensor, *, cfg: Config) -> Tensor:
    """Return -kl_coef times the KL estimate of each token: [T]; zeros when that is off."""
    chosen = cfg.algorithm
    if not chosen.kl_coef or chosen.kl_in != "reward":
        return torch.zeros(mask.shape, device=mask.device)
    old = columns["old_logprobs"]
    inputs = {"logprobs": old, "old_logprobs": old, "ref_logprobs": columns["ref_logprobs"],
              "loss_mask": mask}
    return -chosen.kl_coef * registry.call(registry.get("kl", chosen.kl), inputs,
                                           chosen.kl_options)


def _with_kl(batch: Batch, cfg: Config, world: World) -> Batch:
    """Return the batch with each sequence's KL rewards added to its reward, on all trainers."""
    total = torch.zeros(len(batch.scalars) + 1, dtype=torch.float64)
    if world.mesh.get_local_rank("tp") == 0:
        for microbatch, columns, mask in _microbatches(batch, _loss_masks(batch, cfg)):
            kl = reduce.sequence_sum(_kl_rewards(columns, mask, cfg=cfg), microbatch.cu_seqlens)
            total[microbatch.sequence_ids.cpu()] += kl.cpu()
    dist.all_reduce(total, group=world.trainer_control)
    rewards = batch.scalars.rewards + total[:-1]
    return replace(batch, scalars=replace(batch.scalars, rewards=rewards))
