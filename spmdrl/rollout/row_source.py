"""Batches of dataset rows, for offline objectives. A batch depends on the step alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.examples import Unit, example_source
from spmdrl.model_inputs import concat_ids
from spmdrl.rollout.packing import cumulative, doubles, empty_rollouts, ints
from spmdrl.rollout.source import Source
from spmdrl.types import PartialSums, Rollouts, Scalars, Tokens
from spmdrl.world.world import World


class RowSource(Source):
    """Returns the rows of each step; the first rank of each dp index has a share of them.

    The sequences of a row are one group: one sequence to imitate, or a pair. Their scalars.rewards
    hold the row's label or margin, which is not a reward.
    """

    has_rewards = False

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_positions: int | None = None,
    ):
        self.cfg = cfg
        self.world = world
        self._names = [source.name for source in cfg.data.sources("train")]
        self.rows = example_source(cfg, tokenizer, max_positions=max_positions)

    def take(self, step: int) -> Rollouts:
        """Return this rank's rows of `step`."""
        world = self.world
        if not world.is_dp_leader:
            return empty_rollouts()
        units = list(enumerate(self.rows.units_at(step)))
        own = units[world.dp_index(world.rank) :: world.dp_size]
        return replace(pack_units(own, version=step), sums=self._sums(own))

    def state_dict(self) -> dict[str, Any] | None:
        """Return the number of rows, on which their order depends; None off rank 0."""
        return {"num_rows": self.rows.order.num_rows} if self.world.rank == 0 else None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Check that data.train has as many rows as the checkpoint. Raises: Refusal."""
        if not self.cfg.checkpoint.allow_config_change:
            self.rows.order.check_num_rows(states[0]["num_rows"])

    def _sums(self, own: list[tuple[int, Unit]]) -> PartialSums:
        """Return the source/ sums of this rank's rows; empty if there is a single source."""
        one = 1 if self.world.dp_index(self.world.rank) == 0 else 0
        return {
            f"source/{name}/samples": (
                sum(len(unit.examples) for _, unit in own if unit.source == i),
                one,
            )
            for i, name in enumerate(self._names if len(self._names) > 1 else ())
        }


def pack_units(units: list[tuple[int, Unit]], *, version: int) -> Rollouts:
    """Pack (slot, unit) pairs as rollouts.

    The slot becomes group_ids, and the position of an example in its unit becomes sample_ids.
    """
    rows = [
        (slot, sample, unit.index, *example, reward)
        for slot, unit in units
        for sample, (example, reward) in enumerate(zip(unit.examples, unit.rewards))
    ]
    slots, samples, indices, tokens, masks, rewards = zip(*rows) if rows else [()] * 6
    lengths = ints([len(row) for row in tokens])
    count = len(rows)
    packed = Tokens.unsampled(concat_ids(tokens))
    mask = torch.tensor([*chain(*masks)], dtype=torch.bool)
    packed = replace(packed, response_mask=mask, policy_versions=torch.where(mask, version, -1))
    return Rollouts(
        **packed.token_fields(),
        cu_seqlens=cumulative(lengths),
        scalars=Scalars(
            lengths=lengths,
            response_lengths=ints([sum(row) for row in masks]),
            group_ids=ints(slots),
            sample_ids=ints(samples),
            rewards=doubles(rewards),
            is_truncated=torch.zeros(count, dtype=torch.bool),
            is_valid=torch.ones(count, dtype=torch.bool),
            min_versions=ints([version] * count),
            rows=ints(indices),
        ),
    )
