"""Losses on pairs of sequences: preferences and reward models. P pairs, S sequences, T tokens.

A pair is a group of two sequences in one micro-batch: sample 0 is the chosen response, or the
labelled one (kto), sample 1 the rejected one, or the response of another prompt. What a loss
needs to know of the pairs travels as columns of the micro-batch, see `PairLoss.with_columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.groups import best_and_worst
from spmdrl.algorithms.losses.common import log_ratio
from spmdrl.algorithms.masked import masked_mean
from spmdrl.algorithms.preference.shared import pairs_in_loss
from spmdrl.algorithms.preference.unpaired import kto_kl
from spmdrl.algorithms.registry import Method
from spmdrl.config import Config
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.microbatches import PreparedMicrobatch, Stats
from spmdrl.train.objectives.objective_loss import Known, ObjectiveLoss, gather_columns
from spmdrl.types import Batch, Microbatch, Scalars
from spmdrl.world.world import World

_SIDES = ("chosen", "rejected")
_STATISTICS = {"kl", "mean_log_ratio"}


class PairLoss(ObjectiveLoss):
    """The mean over a batch's pairs of a preference loss, or of a reward model's."""

    def __init__(self, cfg: Config, world: World, **given: Any):
        super().__init__(cfg, world, **given)
        self._is_unpaired = registry.is_unpaired(self._loss)
        self._statistics = _STATISTICS.intersection(registry.inputs_of(self._loss))
        self._is_matched = hasattr(self._loss, "matched")

    @classmethod
    def columns_of(cls, cfg: Config, *, loss_fn: Method, advantage_fn: Method) -> set[str]:
        """Return the reference's logprobs for losses that ask for them, and the policy's old ones
        for those that compare with a mean over the batch, or with other pairs of it."""
        asked = set(registry.inputs_of(loss_fn))
        if asked & _STATISTICS or hasattr(loss_fn, "matched"):
            return {"ref_logprobs", "old_logprobs"}
        return {"ref_logprobs"} if any(name.startswith("ref_") for name in asked) else set()

    def with_columns(self, batch: Batch) -> Batch:
        """Add the columns of the pairs, which the loss reads, to those of every micro-batch.

        `pair_positions` [P, 2] int64: the micro-batch's sequences of each pair. `pair_ids` [P]
        int64: its place among all pairs of the batch. `pair_weights`
        [P] float64: 1 / pairs of the update that are in the loss, on all ranks; 0 for a pair
        that is not. `pair_rewards` [P, 2] float64: the sequences' rewards, which hold margin or
        label.
        """
        pairs, in_loss = self._paired(batch.scalars)
        rewards = batch.scalars.rewards[pairs]
        updates = []
        for number, update in enumerate(batch.updates):
            own = in_loss & (batch.update_ids[pairs[:, 0]] == number)
            weights = own.double() / own.sum().clamp(min=1)
            found = batch.columns[number] if batch.columns else [{}] * len(update)
            updates.append(
                tuple(
                    columns | _pairs_of(microbatch, pairs, weights=weights, rewards=rewards)
                    for columns, microbatch in zip(found, update)
                )
            )
        return replace(batch, columns=tuple(updates))

    def _paired(self, scalars: Scalars) -> tuple[Tensor, Tensor]:
        """Return the rows of each pair's two sequences, [P, 2] int64, and whether it is in the
        loss, [P] bool."""
        ids = scalars.group_ids.view(-1, 2)
        assert (ids[:, 0] == ids[:, 1]).all() and (ids[1:, 0] != ids[:-1, 0]).all()
        lengths = reduce.loss_lengths(scalars, mask_truncated=self.cfg.algorithm.mask_truncated)
        present = lengths.view(-1, 2) > 0
        in_loss = present[:, 0] if self._is_unpaired else present.all(dim=1)
        return torch.arange(len(scalars)).view(-1, 2), in_loss

    def statistics(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], *, world: World
    ) -> dict[str, Tensor]:
        """Return the values of the whole batch, before its update, that the loss asks for.

        `kl`: kto's z, over the mismatched responses. `mean_log_ratio`: bco's m, over the pairs
        in the loss. The latter is the batch's own mean, not a running one over steps: no state
        is kept, so a resumed run repeats it. What `matched` of the loss gives is per pair.

        Returns: {name: [] float64, nats, or [pairs of the batch]}; {} for a loss that asks for
            none. Trainer ranks meet each other where it asks.
        """
        if self._is_matched:
            return self._matches(updates, world=world)
        if not self._statistics:
            return {}
        own = torch.zeros(2, dtype=torch.float64)
        for microbatch in (one for microbatches in updates for one in microbatches):
            own += torch.stack(self._mean_parts(microbatch)).cpu()
        total, count = world.sum_over_trainers(own)
        mean = (total / count.clamp(min=1)).to(world.device)
        return {name: mean for name in self._statistics}

    def _matches(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], *, world: World
    ) -> dict[str, Tensor]:
        """Return the results of the loss's `matched`, computed from the pairs of all ranks."""
        own = [self._at_start(one) for microbatches in updates for one in microbatches]
        columns = gather_columns(own, world=world)
        # Into the order of the batch, since `__call__` reads the result by `pair_ids`.
        columns = {name: c[columns["pair_ids"].argsort()] for name, c in columns.items()}
        options = self.cfg.algorithm.loss_options
        found = registry.call_helper(self._loss, "matched", columns, options)
        return {name: values.to(world.device) for name, values in found.items()}

    def _at_start(self, microbatch: PreparedMicrobatch) -> dict[str, Tensor]:
        """Return the inputs of a loss's `matched`, by the policy at the batch's start: [P] each."""
        known = self._known(microbatch)
        old = _sums(microbatch.columns["old_logprobs"], microbatch)
        known |= {f"{side}_logps": total for side, total in zip(_SIDES, old)}
        known["pair_ids"] = microbatch.columns["pair_ids"]
        return dict(sorted(known.items()))

    def _mean_parts(self, microbatch: PreparedMicrobatch) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator of the scalar that the loss asks for."""
        columns = microbatch.columns
        old, ref = (_sums(columns[n], microbatch) for n in ("old_logprobs", "ref_logprobs"))
        lengths = _lengths(microbatch)
        if "kl" in self._statistics:
            return kto_kl(old[1], ref[1], lengths=lengths[1])
        kept = pairs_in_loss(*lengths)
        ratios = [log_ratio(o, r, kept) for o, r in zip(old, ref)]
        return masked_mean((ratios[0] + ratios[1]) / 2, kept)

    def __call__(
        self, model: ShardedModel, microbatch: PreparedMicrobatch, *, known: Known
    ) -> tuple[Tensor, Stats]:
        """See ObjectiveLoss. A reward model's score of a sequence is the value after its last
        token."""
        inputs = self._known(microbatch) | dict(known)
        if self._is_matched:
            rows = microbatch.columns["pair_ids"]
            inputs |= {n: v[rows] for n, v in known.items() if v.dim()}
        stats: Stats = {}
        if self.cfg.objective.is_scalar:
            ends = microbatch.packed.cu_seqlens[1:].long() - 1
            scores = _sides(model.values(microbatch.row).index_select(0, ends), microbatch)
            inputs |= {f"{side}_scores": score for side, score in zip(_SIDES, scores)}
        else:
            logprobs, entropy = model.forward(microbatch.row)
            sums = _sums(microbatch.row.spread(logprobs), microbatch)
            inputs |= {f"{side}_logps": total for side, total in zip(_SIDES, sums)}
            inputs["logps"] = inputs["chosen_logps"]
            stats["policy/entropy"] = (entropy.detach().double().sum(), microbatch.loss_mask.sum())
        terms, own = registry.call(self._loss, inputs, self.cfg.algorithm.loss_options)
        return (terms.double() * microbatch.columns["pair_weights"]).sum(), own | stats

    def _known(self, microbatch: PreparedMicrobatch) -> dict[str, Tensor]:
        """Return the loss's inputs that do not come from the model in training."""
        columns = microbatch.columns
        lengths = _lengths(microbatch)
        rewards = columns["pair_rewards"]
        inputs = {"margins": rewards[:, 0] - rewards[:, 1]}
        inputs |= {f"{side}_lengths": n for side, n in zip(_SIDES, lengths)}
        if "ref_logprobs" in columns:
            refs = _sums(columns["ref_logprobs"], microbatch)
            inputs |= {f"ref_{side}_logps": total for side, total in zip(_SIDES, refs)}
        if self._is_unpaired:
            inputs |= {
                "ref_logps": inputs["ref_chosen_logps"],
                "lengths": lengths[0],
                "is_chosen": rewards[:, 0] > 0.5,
            }
        return inputs


def _pairs_of(
    microbatch: Microbatch, pairs: Tensor, *, weights: Tensor, rewards: Tensor
) -> dict[str, Tensor]:
    """Return what `with_columns` adds to one micro-batch, from that of all pairs."""
    rows = microbatch.sequence_ids.cpu()
    real = (rows >= 0).nonzero().squeeze(1)  # without a dummy's -1
    # places[row of the batch] is the sequence's position here; -1 if it is not here.
    places = torch.full((1 + int(torch.cat([rows, pairs.flatten()]).max()),), -1)
    places[rows[real]] = real
    positions = places[pairs]
    own = (positions >= 0).all(dim=1).nonzero().squeeze(1)
    assert len(own) == (positions >= 0).any(dim=1).sum(), "a pair is in two micro-batches"
    return {
        "pair_positions": positions[own],
        "pair_ids": own,
        "pair_weights": weights[own],
        "pair_rewards": rewards[own],
    }


def _sums(values: Tensor, microbatch: PreparedMicrobatch) -> tuple[Tensor, Tensor]:
    """Sum [T] values over the loss tokens of either side's sequences: [P] float64 each."""
    kept = torch.where(microbatch.loss_mask, values, 0.0)
    return _sides(reduce.sequence_sum(kept, microbatch.packed.cu_seqlens), microbatch)


def _lengths(microbatch: PreparedMicrobatch) -> tuple[Tensor, Tensor]:
    """Count the loss tokens of either side's sequences: [P] int64 each."""
    found = reduce.sequence_sum(microbatch.loss_mask, microbatch.packed.cu_seqlens).long()
    return _sides(found, microbatch)


def _sides(values: Tensor, microbatch: PreparedMicrobatch) -> tuple[Tensor, Tensor]:
    """Return [S] values as those of the pairs' first and of their second sequences, [P] each."""
    first, second = microbatch.columns["pair_positions"].unbind(dim=1)
    return values.index_select(0, first), values.index_select(0, second)


class OnlinePairLoss(PairLoss):
    """A preference loss on pairs that the policy sampled and rewards judged.

    A group whose rewards are all the same makes no pair. The other samples of a group are in no
    loss. Log-probabilities, the reference's too, are at the temperature of sampling.

    Source: arXiv 2402.04792 (OAIF, online DPO) for two samples a prompt; the pair of the best and
        the worst of more as in 2405.00675 (SPPO) and 2312.16682. With the loss sppo and
        model.reference.sync_every 1 it is SPPO's self-play, its win rates 1 and 0.
    """

    def _paired(self, scalars: Scalars) -> tuple[Tensor, Tensor]:
        lengths = reduce.loss_lengths(scalars, mask_truncated=self.cfg.algorithm.mask_truncated)
        pairs = best_and_worst(scalars.rewards, scalars.group_ids, is_valid=lengths > 0)
        return pairs, torch.ones(len(pairs), dtype=torch.bool)
