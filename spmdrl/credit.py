"""Credit assignment: from the rewards of a batch to an advantage for each of its tokens.

The methods are pure functions (`algorithms.advantages`, `algorithms.token_advantages`). This module
collects their arguments and calls them. Only trainer ranks compute advantages. They wait for each
other if a method needs sums over the whole batch's tokens. Letters: S sequences, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.registry import Method
from spmdrl.algorithms.token_advantages import combine_moments, mean_and_std, moment_sums, whiten
from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.types import Advantages, Batch, Microbatch
from spmdrl.world.world import World

Inputs = dict[str, Tensor]
"""The arguments that a method may have for one micro-batch, by name."""


def advantages_of(
    batch: Batch, method: Method | None = None, *, cfg: Config, world: World, step: int
) -> Advantages:
    """Compute the advantage of every token of this rank's micro-batches.

    Args:
        batch: the step's batch, after exchange and annotation.
        method: a method of the registry or of the user; None for the one that the config names.
        step: for the names of the waits.
    Returns: the advantages: zeros for an objective without advantages, and none on ranks that do
        not train.
    Raises: Refusal for a result with a wrong shape or with values that are not finite.
    """
    if not world.is_trainer:
        return Advantages(())
    if not cfg.objective.has_advantages:
        return per_token(batch, torch.zeros(len(batch.scalars), dtype=torch.float64))
    method = method or registry.get("advantage", cfg.algorithm.advantage)
    with world.watch.wait("advantages", step):
        if registry.is_per_token(method):
            return _token_advantages(batch, method, cfg=cfg, world=world)
        if cfg.algorithm.kl_coef and cfg.algorithm.kl_in == "reward":
            batch = _add_kl_rewards(batch, cfg=cfg, world=world)
    return per_token(batch, sequence_advantages(batch, method, cfg=cfg))


def sequence_advantages(batch: Batch, method: Method | None = None, *, cfg: Config) -> Tensor:
    """Compute the advantages of a method that gives one number per episode.

    Args:
        batch, method: as for `advantages_of`.

    Returns: [S] float64, in the order of batch.scalars; the same for all sequences of an episode.
    Raises: Refusal if the method returns anything but one finite number per episode.
    """
    method = method or registry.get("advantage", cfg.algorithm.advantage)
    episodes = batch.scalars.episodes()
    options: dict[str, Any] = dict(cfg.algorithm.advantage_options)
    if "part_weights" in registry.options_of(method) and cfg.rewards.weights:
        # cfg.reward_weights also has the weights of data sources' own functions.
        options["part_weights"] = cfg.reward_weights
    advantages = registry.call(method, vars(episodes.scalars), options).double()
    if advantages.shape != (len(episodes),) or not advantages.isfinite().all():
        raise Refusal(
            f"algorithm.advantage: {method.__name__} gave shape {tuple(advantages.shape)} with "
            f"{int((~advantages.isfinite()).sum())} values that are not finite; "
            f"expected ({len(episodes)},), all finite"
        )
    return episodes.spread(advantages)


def per_token(batch: Batch, advantages: Tensor) -> Advantages:
    """Give every token the advantage of its sequence.

    Args:
        advantages: [S] float64, in the order of batch.scalars.
    """
    # A dummy micro-batch has the sequence id -1, which gets the zero at the end.
    values = torch.cat([advantages.cpu(), advantages.new_zeros(1)])

    def expand(microbatch: Microbatch) -> Tensor:
        rows = microbatch.sequence_ids
        return _of_tokens(values.to(rows.device)[rows], microbatch)

    return Advantages(tuple(tuple(map(expand, update)) for update in batch.updates))


def _of_tokens(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Expand [s] values of a micro-batch's sequences to its tokens, [T]."""
    return reduce.per_token(values, microbatch.cu_seqlens, num_tokens=microbatch.tokens.numel())


# --------------------------------------------------------------------------- per token


def _token_advantages(batch: Batch, method: Method, *, cfg: Config, world: World) -> Advantages:
    """Compute the advantages of a method that gives one number per token.

    A method may need sums over the whole batch, and values per sequence [S, ...] that it computes
    from these sums; see `masked.attach`. All trainers take part in each sum.

    Raises: Refusal for episodes of several traces: no method says how a reward is divided over a
        tree.
    """
    if batch.scalars.traces.any():
        raise Refusal(
            f"algorithm.advantage: {method.__name__} gives each token a number, and an episode of "
            "the batch has several traces; take an advantage with one number per episode"
        )
    options = cfg.algorithm.advantage_options
    inputs = _inputs(batch, cfg)
    totals: dict[str, Tensor] = {}
    per_sequence: dict[str, Tensor] = {}
    if registry.helpers_of(method):
        lengths = inputs[0]["loss_lengths"]
        whole = {
            "num_sequences": len(lengths),
            "num_groups": int(batch.scalars.group_ids.max()) + 1,
            "num_positions": int(lengths.max()),
        }
        totals = registry.call_totals(method, [one | whole for one in inputs], options)
        totals = {name: world.sum_over_trainers(totals[name]) for name in sorted(totals)}
        known = vars(batch.scalars) | totals | {"loss_lengths": lengths}
        per_sequence = registry.call_helper(method, "per_sequence", known, options)
    device = inputs[0]["loss_mask"].device
    totals = {name: total.to(device) for name, total in totals.items()}
    results = []
    for one in inputs:
        rows = one["sequence_ids"]
        own = {name: values.to(device)[rows] for name, values in per_sequence.items()}
        results.append(registry.call(method, one | totals | own, options))
    advantages = [tokens for tokens, _ in results]
    if getattr(method, "is_whitened", False):
        advantages = _whiten(advantages, [one["loss_mask"] for one in inputs], world=world)
    returns = [r for _, r in results if r is not None]
    sizes = [len(update) for update in batch.updates]

    def nest(flat: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        each = iter(flat)
        return tuple(tuple(islice(each, size)) for size in sizes)

    return Advantages(nest(advantages), nest(returns) if returns else ())


def _inputs(batch: Batch, cfg: Config) -> list[Inputs]:
    """Return the arguments that a method may have, for each micro-batch."""
    scalars = batch.scalars
    chosen = cfg.algorithm
    lengths = reduce.loss_lengths(scalars, mask_truncated=chosen.mask_truncated)
    of_sequences = {
        "rewards": scalars.rewards,
        "group_ids": scalars.group_ids,
        "in_loss": lengths > 0,
    }
    # A dummy micro-batch has the sequence id -1, which gets the zero at the end.
    of_sequences = {n: torch.cat([v, v.new_zeros(1)]) for n, v in of_sequences.items()}
    columns_of = [columns for update in batch.columns for columns in update]
    if not columns_of:
        columns_of = [{}] * len(batch.microbatches)
    inputs = []
    for microbatch, columns in zip(batch.microbatches, columns_of):
        rows = microbatch.sequence_ids
        own = {name: values.to(rows.device)[rows] for name, values in of_sequences.items()}
        mask = microbatch.response_mask & _of_tokens(own["in_loss"], microbatch)
        inputs.append(
            {
                **columns,
                "rewards": own["rewards"],
                "group_ids": own["group_ids"],
                "sequence_ids": rows,
                "loss_mask": mask,
                "loss_lengths": lengths,
                "cu_seqlens": microbatch.cu_seqlens,
                "rollout_logprobs": microbatch.rollout_logprobs,
                "kl_rewards": torch.zeros(mask.shape, device=mask.device),
            }
        )
        if chosen.kl_coef and chosen.kl_in == "reward":
            arguments = inputs[-1] | {"logprobs": columns["old_logprobs"]}
            kl = registry.call(registry.get("kl", chosen.kl), arguments, chosen.kl_options)
            inputs[-1]["kl_rewards"] = -batch.kl_coef * kl
    return inputs


def _whiten(advantages: Sequence[Tensor], masks: Sequence[Tensor], *, world: World) -> list[Tensor]:
    """Whiten over the loss tokens of all trainer ranks."""
    own = torch.stack([moment_sums(a, loss_mask=m) for a, m in zip(advantages, masks)])
    mean, std = mean_and_std(combine_moments(torch.cat(world.gather_per_dp(own.cpu()))))
    if not (mean.isfinite() and std.isfinite()):
        # Return them unchanged: all ranks then skip this update and count it.
        return list(advantages)
    mean = mean.to(own.device)
    std = std.to(own.device)
    return [whiten(a, loss_mask=m, mean=mean, std=std) for a, m in zip(advantages, masks)]


def _add_kl_rewards(batch: Batch, *, cfg: Config, world: World) -> Batch:
    """Return the batch with the KL rewards of all tokens of an episode added to its reward.

    All trainers must call it together.
    """
    total = torch.zeros(len(batch.scalars) + 1, dtype=torch.float64)
    for one in _inputs(batch, cfg):
        kl = reduce.sequence_sum(one["kl_rewards"], one["cu_seqlens"])
        total[one["sequence_ids"].cpu()] += kl.cpu()
    episodes = batch.scalars.episodes()
    kl = episodes.sum(world.sum_over_trainers(total)[:-1])
    rewards = batch.scalars.rewards + episodes.spread(kl)
    return replace(batch, scalars=replace(batch.scalars, rewards=rewards))
