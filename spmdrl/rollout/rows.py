"""Dataset rows as batches (offline objectives): a function of the step, nothing is generated."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.offline import SupervisedSource
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.rollout.packing import cumulative, empty_rollouts, ints
from spmdrl.types import Rollouts, Scalars, Sums
from spmdrl.world import World


class RowSource:
    """Supervised rows, cut to this rank's share; the first tp rank of each dp index supplies."""

    def __init__(self, cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase):
        self.world = world
        self.rows = SupervisedSource(cfg, tokenizer)
        self.check_context = self.rows.check_context

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Do nothing: rows are at hand."""

    def take(self, step: int) -> Rollouts:
        """Return this rank's rows of `step`."""
        world = self.world
        if not world.is_trainer or world.rank % world.cfg.layout.tp:
            return empty_rollouts()
        rows = list(enumerate(self.rows.rows_at(step)))
        return pack_rows(rows[world.dp_index(world.rank) :: world.dp_size], version=step)

    def probe_tokens(self) -> list[tuple[int, ...]]:
        """Return nothing: there is no engine to compare with."""
        return []

    def evaluate(self, engine: EngineProtocol, *, step: int) -> Sums:
        """Return nothing: there is no engine to sample with."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return None: rows are a function of the step."""
        return None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Do nothing: rows are a function of the step."""

    def close(self) -> None:
        """Do nothing."""


def pack_rows(rows: list[tuple[int, tuple[list[int], list[bool]]]], *, version: int) -> Rollouts:
    """Pack supervised (slot, (tokens, response_mask)) rows as rollouts with reward 0."""
    lengths = [len(tokens) for _, (tokens, _) in rows]
    mask = torch.tensor([m for _, (_, row) in rows for m in row], dtype=torch.bool)
    count = len(rows)
    return Rollouts(
        tokens=ints([t for _, (row, _) in rows for t in row]), response_mask=mask,
        rollout_logprobs=torch.zeros(mask.numel()),
        policy_versions=torch.where(mask, version, -1), cu_seqlens=cumulative(lengths),
        scalars=Scalars(
            lengths=ints(lengths),
            response_lengths=ints([sum(row) for _, (_, row) in rows]),
            group_ids=ints([slot for slot, _ in rows]), sample_ids=ints([0] * count),
            rewards=torch.zeros(count, dtype=torch.float64),
            is_truncated=torch.zeros(count, dtype=torch.bool),
            is_valid=torch.ones(count, dtype=torch.bool), min_versions=ints([version] * count),
        ),
    )
