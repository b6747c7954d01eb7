"""A column of tokens that only this test knows, from an engine's completion to a micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmdrl.columns import RowColumn, column_class, register
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion
from spmdrl.errors import Refusal
from spmdrl.exchange import exchange_rollouts
from spmdrl.model_inputs import TokenIds
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.rollout.packing import concat_rollouts, pack, rollouts_from_dict, rollouts_to_dict
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.types import Prompt
from spmdrl.workers.messages import RewardResult
from tests.common.test_exchange import config, lay
from tests.helpers.built import started
from tests.helpers.ranks import run_ranks


@register
class DraftScores(RowColumn):
    """[T, 2] float32: what a draft model said of each sampled token."""

    key = "draft_scores"


def scores_of(slot: int, sample: int) -> Tensor:
    """Return the scores of a sample's response."""
    return torch.arange(2.0 * (3 + sample)).view(-1, 2) + 100 * slot


def episode(slot: int, sample: int, *, has_scores: bool) -> FinishedEpisode:
    """Return a sample of two turns, the second of one token."""
    scores = scores_of(slot, sample)
    count = len(scores)
    columns = {DraftScores.key: DraftScores(scores)} if has_scores else {}
    drawn = Completion(
        f"{slot}-{sample}",
        torch.arange(count),
        torch.full((count,), -1.0),
        torch.zeros(count, dtype=torch.int64),
        is_truncated=False,
        extra_columns=columns,
    )
    begun = Trajectory.from_prompt(TokenIds([7, 8]))
    trajectory = (
        begun.append_completion(drawn)
        .append_answer([9])
        .append_completion(drawn.until(1))
        .append_answer([9])
    )
    restored = Trajectory.from_state_dict(trajectory.state_dict())
    prompt = Prompt(slot, TokenIds([7, 8]), "", {})
    reward = RewardResult(None, float(sample))
    return FinishedEpisode(slot, sample, prompt, (restored,), "", reward)


def deliver(cfg: Config) -> list[tuple[int, int, Tensor]]:
    """Exchange four groups of three samples, one of which has no scores; return each sequence's
    group, sample and scores as this rank trains on them."""
    with started(cfg) as world:
        parts = []
        for slot in range(2 * world.rank, 2 * world.rank + 2):
            episodes = [episode(slot, sample, has_scores=slot != 3) for sample in range(3)]
            packed = pack(episodes, sums={}, num_shown=0)
            parts.append(rollouts_from_dict(rollouts_to_dict(packed)))
        batch = exchange_rollouts(concat_rollouts(parts), world, step=0)
    found = []
    for microbatch in batch.microbatches:
        if microbatch.sequence_ids.tolist() == [-1]:
            continue
        scores = DraftScores.of(microbatch.extra_columns)
        assert scores is not None
        own = scores.rows.split(microbatch.cu_seqlens.diff().tolist())
        for row, rows in zip(microbatch.sequence_ids.tolist(), own, strict=True):
            group = int(batch.scalars.group_ids[row])
            found.append((group, int(batch.scalars.sample_ids[row]), rows))
    return found


def test_a_fourth_column_needs_no_change_of_the_product() -> None:
    of_ranks = run_ranks(2, deliver, config(lay("colocated", 2)))
    found = [one for own in of_ranks for one in own]
    assert sorted((group, sample) for group, sample, _ in found) == [
        (group, sample) for group in range(4) for sample in range(3)
    ]
    assert all(of_ranks), "each rank should train on some"
    for group, sample, rows in found:
        scores = scores_of(group, sample)
        none = torch.full((1, 2), -1.0)
        first = scores[:1]
        expected = torch.cat([none, none, scores, none, first, none])
        if group == 3:
            expected = torch.full_like(expected, -1)
        assert torch.equal(rows, expected)


def test_a_column_that_is_not_registered_is_refused_by_name() -> None:
    with pytest.raises(Refusal, match="column 'speed' of tokens is not registered.*draft_scores"):
        column_class("speed")
