"""Preferences among sampled responses: the best and the worst of each group, by their rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms import reduce
from spmdrl.algorithms.groups import best_and_worst
from spmdrl.train.objectives.pairs import PairLoss
from spmdrl.types import Scalars


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
