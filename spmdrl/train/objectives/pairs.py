"""Losses on pairs of sequences: preferences and reward models. P pairs, S sequences, T tokens.

A pair is a group of two sequences in one micro-batch: sample 0 is the chosen response, or the
labelled one (kto), sample 1 the rejected one, or the response of another prompt. What a loss
needs to know of the pairs travels as columns of the micro-batch, see `with_pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.preference.shared import log_ratio_of, masked_mean, pairs_in_loss
from spmdrl.algorithms.preference.unpaired import kto_kl
from spmdrl.config import Config
from spmdrl.data.examples import row_kind
from spmdrl.model.sharded import ShardedModel
from spmdrl.train.objectives.rl import Job, Stats
from spmdrl.types import Batch
from spmdrl.world import World

_SIDES = ("chosen", "rejected")


def with_pairs(batch: Batch, cfg: Config) -> Batch:
    """Add the columns that PairObjective reads to every micro-batch; others stay.

    `pair_positions` [P, 2] int64: the micro-batch's sequences of each pair. `pair_weights` [P]
    float64: 1 / pairs of the update that are in the loss, on all ranks; 0 for a pair that is
    not. `pair_rewards` [P, 2] float64: the sequences' rewards, which hold margin or label.

    Returns: the batch as it was under an objective that is not on pairs.
    """
    if not cfg.objective.trains_on_pairs:
        return batch
    scalars = batch.scalars
    ids = scalars.group_ids.view(-1, 2)
    assert (ids[:, 0] == ids[:, 1]).all() and (ids[1:, 0] != ids[:-1, 0]).all()
    lengths = reduce.loss_lengths(scalars, mask_truncated=cfg.algorithm.mask_truncated)
    present = lengths.view(-1, 2) > 0
    in_loss = present[:, 0] if row_kind(cfg) == "label" else present.all(dim=1)
    updates = []
    for number, update in enumerate(batch.updates):
        own = in_loss & (batch.update_ids[::2] == number)
        weights = own.double() / own.sum().clamp(min=1)
        found = []
        for index, microbatch in enumerate(update):
            rows = microbatch.sequence_ids.cpu()
            order = rows.argsort()
            positions = order[rows[order] >= 0].view(-1, 2)  # without a dummy's -1
            pairs = rows[positions[:, 0]] // 2
            assert (rows[positions] == torch.stack([2 * pairs, 2 * pairs + 1], dim=1)).all()
            found.append(
                {
                    **(batch.columns[number][index] if batch.columns else {}),
                    "pair_positions": positions,
                    "pair_weights": weights[pairs],
                    "pair_rewards": scalars.rewards.view(-1, 2)[pairs],
                }
            )
        updates.append(tuple(found))
    return replace(batch, columns=tuple(updates))


class PairObjective:
    """The mean over a batch's pairs of a preference loss, or of a reward model's.

    `columns` names what `Trainer.annotate` is to find: the reference's logprobs only for losses
    that ask for them, the policy's old ones for those that compare with a mean over the batch.

    Raises: ValueError for an unknown method.
    """

    def __init__(self, cfg: Config):
        chosen = cfg.algorithm
        self._loss = registry.get(cfg.objective.loss_kind, chosen.loss)
        self._options = chosen.loss_options
        self._is_scalar = cfg.objective.is_scalar
        self._is_unpaired = row_kind(cfg) == "label"
        asked = set(registry.inputs_of(self._loss))
        self._statistics = asked & {"kl", "mean_log_ratio"}
        self.columns: set[str] = set()
        if self._statistics or any(name.startswith("ref_") for name in asked):
            self.columns.add("ref_logprobs")
        if self._statistics:
            self.columns.add("old_logprobs")

    def statistics(self, jobs: Sequence[Sequence[Job]], *, world: World) -> dict[str, Tensor]:
        """Return the scalars of the whole batch that the loss asks for, before its update.

        `kl`: kto's z, over the mismatched responses. `mean_log_ratio`: bco's m, over the pairs
        in the loss. The latter is the batch's own mean, not a running one over steps: no state
        is kept, so a resumed run repeats it.

        Returns: {name: [] float64, nats}; {} for a loss that asks for none. Trainer ranks meet
            each other where it asks.
        """
        if not self._statistics:
            return {}
        own = torch.zeros(2, dtype=torch.float64)
        for job in (job for update in jobs for job in update):
            own += torch.stack(self._mean_parts(job)).cpu()
        total, count = world.sum_over_trainers(own)
        mean = (total / count.clamp(min=1)).to(world.device)
        return {name: mean for name in self._statistics}

    def _mean_parts(self, job: Job) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator of the scalar that the loss asks for."""
        old, ref = (
            _sides(_sums(job.columns[name], job), job) for name in ("old_logprobs", "ref_logprobs")
        )
        lengths = _sides(_lengths(job), job)
        if "kl" in self._statistics:
            return kto_kl(old[1], ref[1], lengths=lengths[1])
        kept = pairs_in_loss(*lengths)
        ratios = [log_ratio_of(o, r, kept) for o, r in zip(old, ref)]
        return masked_mean((ratios[0] + ratios[1]) / 2, kept)

    def __call__(
        self, model: ShardedModel, job: Job, *, step: int, statistics: Mapping[str, Tensor]
    ) -> tuple[Tensor, Stats]:
        """Run one micro-batch forward and return its share of the loss and its metrics.

        Args:
            model: in training: a scalar one for a reward model, whose score of a sequence is
                the value after its last token.
            job: with the columns of `with_pairs`.
            step: not used.
            statistics: of the whole batch, as `statistics` returned.
        Returns: [] float64 share (shares of all micro-batches and dp ranks add up to the
            loss) and {metric: (numerator, denominator)}.
        Invariant under: dp size, micro-batching, packing order.
        """
        inputs = self._known(job) | dict(statistics)
        stats: Stats = {}
        if self._is_scalar:
            ends = job.microbatch.cu_seqlens[1:].long() - 1
            scores = model.values(job.row).index_select(0, ends)
            inputs |= {f"{side}_scores": s for side, s in zip(_SIDES, _sides(scores, job))}
        else:
            logprobs, entropy = model.forward(job.row)
            sums = _sides(_sums(job.row.spread(logprobs), job), job)
            inputs |= {f"{side}_logps": s for side, s in zip(_SIDES, sums)}
            stats["policy/entropy"] = (entropy.detach().double().sum(), job.loss_mask.sum())
        if self._is_unpaired:
            inputs["logps"] = inputs["chosen_logps"]
        terms, own = registry.call(self._loss, inputs, self._options)
        return (terms.double() * job.columns["pair_weights"]).sum(), own | stats

    def _known(self, job: Job) -> dict[str, Tensor]:
        """Return the loss's inputs that do not come from the model in training."""
        rewards, lengths = job.columns["pair_rewards"], _sides(_lengths(job), job)
        inputs = {"margins": rewards[:, 0] - rewards[:, 1]}
        inputs |= {f"{side}_lengths": n for side, n in zip(_SIDES, lengths)}
        if "ref_logprobs" in job.columns:
            refs = _sides(_sums(job.columns["ref_logprobs"], job), job)
            inputs |= {f"ref_{side}_logps": s for side, s in zip(_SIDES, refs)}
        if self._is_unpaired:
            inputs |= {
                "ref_logps": inputs["ref_chosen_logps"],
                "lengths": lengths[0],
                "is_chosen": rewards[:, 0] > 0.5,
            }
        return inputs


def _sums(values: Tensor, job: Job) -> Tensor:
    """Sum [T] values over each sequence's loss tokens: [S] float64."""
    kept = torch.where(job.loss_mask, values, 0.0)
    return reduce.sequence_sum(kept, job.microbatch.cu_seqlens)


def _lengths(job: Job) -> Tensor:
    """Count each sequence's loss tokens: [S] int64."""
    return reduce.sequence_sum(job.loss_mask, job.microbatch.cu_seqlens).long()


def _sides(values: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Return [S] values as those of the pairs' first and of their second sequences, [P] each."""
    first, second = job.columns["pair_positions"].unbind(dim=1)
    return values.index_select(0, first), values.index_select(0, second)
