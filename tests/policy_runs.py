"""Ragged batches and configs for the policy's tests, the same whatever the layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spmdrl.config import (
    BatchSettings,
    Config,
    LayoutSettings,
    OptimizerSettings,
    SamplingSettings,
    from_tree,
)
from spmdrl.credit import per_token
from spmdrl.types import Batch, Microbatch, Scalars

LENGTHS = (9, 5, 16, 12, 7, 2, 20, 11)
"""Tokens of the batch's sequences; the first third of each is its prompt."""
VOCABULARY = 96
OWN = {"compute_dtype": "float32", "memory": {"head_chunk_tokens": 7}}
"""Settings of the model where a test names no other."""


def config(
    path: str | Path,
    out: str | Path,
    *,
    world_size: int = 1,
    dp_replicate: int = 1,
    cp: int = 1,
    tp: int = 1,
    objective: str = "rl",
    updates: int = 1,
    model: dict | None = None,
    **algorithm: object,
) -> Config:
    """A float32 CPU config. `offline` placement: every rank trains, no engine is built."""
    return Config(
        output_dir=str(out),
        steps=10,
        layout=LayoutSettings(
            placement="offline",
            world_size=world_size,
            dp_replicate=dp_replicate,
            cp=cp,
            tp=tp,
            device="cpu",
            startup_timeout_s=300,
            wait_timeout_s=200,
        ),
        model=from_tree({"model": OWN | {"path": str(path)} | (model or {})}).model,
        batch=BatchSettings(tokens_per_microbatch=64, updates_per_step=updates),
        sampling=SamplingSettings(temperature=0.8),
        algorithm=from_tree({"algorithm": {"objective": objective, **algorithm}}).algorithm,
        # A large eps keeps Adam's step smooth in the gradient, so that layouts can be compared.
        optimizer=OptimizerSettings(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.2),
    )


def sequence(index: int) -> Tensor:
    """Tokens of one sequence."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(8, VOCABULARY, (LENGTHS[index],), generator=generator)


def scalars() -> Scalars:
    """Of all sequences: groups of two, one invalid, one truncated."""
    count, lengths = len(LENGTHS), torch.tensor(LENGTHS)
    flags = torch.arange(count)
    return Scalars(
        lengths=lengths,
        response_lengths=lengths - (lengths + 2) // 3,
        group_ids=flags // 2,
        sample_ids=flags % 2,
        rewards=torch.zeros(count).double(),
        is_truncated=flags == 6,
        is_valid=flags != 4,
        min_versions=torch.zeros_like(flags),
    )


def advantages() -> Tensor:
    """One per sequence, both signs."""
    return torch.linspace(-1.0, 1.5, len(LENGTHS)).double()


def update(trainer: object, own: Batch, *, step: int, values: Tensor | None = None) -> dict:
    """Annotate and update as train.py does, with given advantages per sequence."""
    values = advantages() if values is None else values
    own = trainer.annotate(own, step=step)
    return trainer.update(own, per_token(own, values), step=step)


def microbatch(ids: list[int]) -> Microbatch:
    """Pack sequences; no sequence gives the dummy token."""
    if not ids:
        zero = torch.zeros(1, dtype=torch.int64)
        return Microbatch(
            tokens=zero,
            position_ids=zero,
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            response_mask=zero.bool(),
            rollout_logprobs=zero.float(),
            policy_versions=zero - 1,
            sequence_ids=zero - 1,
        )
    lengths = torch.tensor([LENGTHS[i] for i in ids])
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask = torch.cat([torch.arange(n) >= (n + 2) // 3 for n in lengths])
    generator = torch.Generator().manual_seed(7)
    drawn = -3 - torch.rand(len(LENGTHS), max(LENGTHS), generator=generator)
    drawn = torch.cat([drawn[i, : LENGTHS[i]] for i in ids])
    return Microbatch(
        tokens=torch.cat([sequence(i) for i in ids]),
        position_ids=positions,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, drawn, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.tensor(ids),
    )


def batch(dp_index: int, dp_size: int, *, updates: int = 1) -> Batch:
    """This dp rank's part of the batch, packed in another order for each dp size.

    Rank 0 of several takes most sequences, and the last rank's last micro-batch is a dummy.
    """
    update_ids = torch.arange(len(LENGTHS)) // 2 % updates
    parts = []
    for update in range(updates):
        ids = [i for i in range(len(LENGTHS)) if update_ids[i] == update]
        if dp_size == 1:
            cuts = [ids[:3], ids[3:]]
        else:
            last = ids[-1:]
            cuts = [ids[:-2][::-1], ids[-2:-1]] if dp_index == 0 else [last, []]
            cuts = cuts if dp_index in (0, dp_size - 1) else [[], []]
        parts.append(tuple(microbatch(cut) for cut in cuts))
    return Batch(scalars=scalars(), updates=tuple(parts), update_ids=update_ids)


def train(cfg: Config, steps: int = 2) -> dict:
    """Start a world, take steps on the batch, return sums and the whole parameters."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    trainer = make_trainer(cfg, world)
    own = batch(world.dp_index(world.rank), world.dp_size, updates=cfg.batch.updates_per_step)
    sums = [update(trainer, own, step=step) for step in range(steps)]
    whole = full_parameters(trainer)
    world.close()
    return {"sums": sums, "parameters": whole}


def full_parameters(trainer: object) -> dict[str, Tensor]:
    """Gather every parameter; all trainer ranks take part."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.weights.shards().items()
    }
