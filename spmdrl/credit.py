"""Credit assignment: from the rewards of a batch to an advantage for each of its tokens.

The methods are pure functions (`algorithms.advantages`, `algorithms.token_advantages`); here
they are given what they ask for. Only trainer ranks work, and wait for each other where a
method needs the whole batch's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.token_advantages import combine_moments, mean_and_std, moment_sums, whiten
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
    if not cfg.objective.samples:
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
        raise ValueError(
            f"algorithm.advantage: {chosen.advantage} gave shape "
            f"{tuple(advantages.shape)} with "
            f"{int((~advantages.isfinite()).sum())} values that are not finite; "
            f"expected ({len(scalars)},), all finite"
        )
    return advantages


def per_token(batch: Batch, advantages: Tensor) -> Advantages:
    """Give every token the advantage of its sequence.

    Args:
        advantages: [S] float64, by row of the batch's scalars.
    """
    values = torch.cat([advantages.cpu(), advantages.new_zeros(1)])  # a dummy's row is -1
    return Advantages(
        tuple(
            tuple(_spread(values, microbatch) for microbatch in update) for update in batch.updates
        )
    )


def _spread(values: Tensor, microbatch: Microbatch) -> Tensor:
    rows = microbatch.sequence_ids
    return reduce.per_token(
        values.to(rows.device)[rows], microbatch.cu_seqlens, num_tokens=microbatch.tokens.numel()
    )


# --------------------------------------------------------------------------- per token


def _of_tokens(batch: Batch, cfg: Config, world: World) -> Advantages:
    chosen = cfg.algorithm
    method = registry.get("advantage", chosen.advantage)
    inputs = _inputs(batch, cfg)
    totals, per_sequence = _whole_batch(method, inputs, batch=batch, cfg=cfg, world=world)
    found = []
    for one in inputs:
        own = {name: values[one["sequence_ids"]] for name, values in per_sequence.items()}
        found.append(registry.call(method, one | totals | own, chosen.advantage_options))
    advantages = [tokens for tokens, _ in found]
    if getattr(method, "whitened", False):
        advantages = _whiten(advantages, [one["loss_mask"] for one in inputs], world=world)
    returns = [r for _, r in found if r is not None]
    return Advantages(_nested(advantages, batch), _nested(returns, batch) if returns else ())


def _inputs(batch: Batch, cfg: Config) -> list[dict[str, Tensor]]:
    """Return all that a method may ask for of each micro-batch, by name."""
    scalars = batch.scalars
    rewards = torch.cat([scalars.rewards, scalars.rewards.new_zeros(1)])  # a dummy's row is -1
    groups = torch.cat([scalars.group_ids, scalars.group_ids.new_zeros(1)])
    found = []
    for microbatch, columns, mask in _microbatches(batch, _loss_lengths(batch, cfg)):
        rows = microbatch.sequence_ids
        found.append(
            {
                **columns,
                "rewards": rewards.to(rows.device)[rows],
                "group_ids": groups.to(rows.device)[rows],
                "sequence_ids": rows,
                "loss_mask": mask,
                "cu_seqlens": microbatch.cu_seqlens,
                "rollout_logprobs": microbatch.rollout_logprobs,
                "kl_rewards": _kl_rewards(columns, mask, batch=batch, cfg=cfg),
            }
        )
    return found


def _whole_batch(
    method: Callable[..., object],
    inputs: Sequence[dict[str, Tensor]],
    *,
    batch: Batch,
    cfg: Config,
    world: World,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a method asks for of the whole batch: sums, and [B, ...] per sequence.

    See `token_baselines.with_totals`. Trainers meet for each sum.
    """
    if not registry.companions_of(method):
        return {}, {}
    options, lengths = cfg.algorithm.advantage_options, _loss_lengths(batch, cfg)
    sizes = {
        "num_sequences": len(lengths),
        "num_groups": int(batch.scalars.group_ids.max()) + 1,
        "num_positions": int(lengths.max()),
    }
    totals = registry.call_totals(method, [one | sizes for one in inputs], options)
    totals = {name: world.sum_over_trainers(totals[name]) for name in sorted(totals)}
    known = vars(batch.scalars) | totals | {"loss_lengths": lengths}
    per_sequence = registry.call_per_sequence(method, known, options)
    device = inputs[0]["loss_mask"].device
    return tuple(
        {name: value.to(device) for name, value in part.items()} for part in (totals, per_sequence)
    )


def _whiten(advantages: Sequence[Tensor], masks: Sequence[Tensor], *, world: World) -> list[Tensor]:
    """Whiten over the loss tokens of all trainer ranks."""
    own = torch.stack([moment_sums(a, loss_mask=m) for a, m in zip(advantages, masks)])
    mean, std = mean_and_std(combine_moments(torch.cat(world.gather_per_dp(own.cpu()))))
    if not (mean.isfinite() and std.isfinite()):
        return list(advantages)  # as they are: the update is skipped on all ranks, and counted
    mean, std = mean.to(own.device), std.to(own.device)
    return [whiten(a, loss_mask=m, mean=mean, std=std) for a, m in zip(advantages, masks)]


def _loss_lengths(batch: Batch, cfg: Config) -> Tensor:
    """Return [S] int64, tokens of each sequence that are in the loss."""
    return reduce.loss_lengths(batch.scalars, mask_truncated=cfg.algorithm.mask_truncated)


def _microbatches(batch: Batch, lengths: Tensor) -> list[tuple[Microbatch, dict, Tensor]]:
    """Return every micro-batch with its columns and its loss mask [T]."""
    kept = torch.cat([lengths > 0, torch.zeros(1, dtype=torch.bool)])  # a dummy's row is -1
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


def _kl_rewards(columns: dict[str, Tensor], mask: Tensor, *, batch: Batch, cfg: Config) -> Tensor:
    """Return -kl_coef times the KL estimate of each token: [T]; zeros when that is off."""
    chosen = cfg.algorithm
    if not chosen.kl_coef or chosen.kl_in != "reward":
        return torch.zeros(mask.shape, device=mask.device)
    old = columns["old_logprobs"]
    inputs = {
        "logprobs": old,
        "old_logprobs": old,
        "ref_logprobs": columns["ref_logprobs"],
        "loss_mask": mask,
    }
    return -batch.kl_coef * registry.call(registry.get("kl", chosen.kl), inputs, chosen.kl_options)


def _with_kl(batch: Batch, cfg: Config, world: World) -> Batch:
    """Return the batch with each sequence's KL rewards added to its reward, on all trainers."""
    total = torch.zeros(len(batch.scalars) + 1, dtype=torch.float64)
    for microbatch, columns, mask in _microbatches(batch, _loss_lengths(batch, cfg)):
        kl = _kl_rewards(columns, mask, batch=batch, cfg=cfg)
        kl = reduce.sequence_sum(kl, microbatch.cu_seqlens)
        total[microbatch.sequence_ids.cpu()] += kl.cpu()
    rewards = batch.scalars.rewards + world.sum_over_trainers(total)[:-1]
    return replace(batch, scalars=replace(batch.scalars, rewards=rewards))
