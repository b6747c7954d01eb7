"""Ragged batches and configs for the policy's tests, the same whatever the layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import (
    BatchSettings,
    Config,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    SamplingSettings,
    from_tree,
)
from spmdrl.credit import advantages_of, per_token
from spmdrl.exchange import dummy_microbatch
from spmdrl.model.load import build_meta_model
from spmdrl.tools.proof import jobs
from spmdrl.types import Advantages, Batch, Microbatch, Scalars
from tests.helpers import built
from tests.helpers.built import changed
from tests.helpers.comparing import full_parameters
from tests.helpers.worlds import ON_CPU, with_trainer

LENGTHS = (9, 5, 16, 12, 7, 2, 20, 11)
"""Tokens of the batch's sequences; the first third of each is its prompt."""
VOCABULARY = 96
AXES = {"world_size", "dp_replicate", "cp", "tp", "ep"}
OWN = {"compute_dtype": "float32", "memory": {"head_chunk_tokens": 7}}
"""Settings of the model where a test names no other."""


VALID = Config(model=ModelSettings(path="m"), data=DataSettings(train="task:addition", size=10))
"""What the checks of settings let pass."""


def config(
    path: str | Path,
    out: str | Path,
    *,
    objective: str = "rl",
    updates: int = 1,
    model: dict | None = None,
    **options: Any,
) -> Config:
    """A float32 CPU config; options are of the layout, or else of the algorithm."""
    layout = {name: options.pop(name) for name in AXES & options.keys()}
    return Config(
        output_dir=str(out),
        steps=10,
        layout=replace(ON_CPU, **layout),
        model=from_tree({"model": OWN | {"path": str(path)} | (model or {})}).model,
        batch=BatchSettings(tokens_per_microbatch=64, updates_per_step=updates),
        sampling=SamplingSettings(temperature=0.8),
        algorithm=from_tree({"algorithm": {"objective": objective, **options}}).algorithm,
        # A large eps keeps Adam's step smooth in the gradient, so that layouts can be compared.
        optimizer=OptimizerSettings(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.2),
    )


def small_model(
    where: Path, name: str = "model", *, hf_config: dict | None = None, **options: Any
) -> Path:
    """Write a model of two narrow layers; `hf_config` are fields of its config.json."""
    folder = built.small_model(where / name, **options)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (hf_config or {})))
    return folder


def meta_model(folder: Path | str) -> torch.nn.Module:
    """Return transformers' model of a folder, with no weights."""
    return build_meta_model(ModelSettings(path=str(folder)))


def sequence(index: int) -> Tensor:
    """Tokens of one sequence."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(8, VOCABULARY, (LENGTHS[index],), generator=generator)


def scalars() -> Scalars:
    """Of all sequences: groups of two, one invalid, one truncated."""
    return jobs.scalars_of(LENGTHS)


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
        return dummy_microbatch(torch.device("cpu"))
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


def with_prompts(own: Microbatch, count: int) -> Microbatch:
    """Prepend `count` tokens to each sequence, the same to both of a pair; the dummy stays."""
    if int(own.sequence_ids[0]) < 0:
        return own
    sizes = own.cu_seqlens.diff().tolist()

    def prepended(column: Tensor, prompts: list[Tensor]) -> Tensor:
        parts = zip(prompts, column.split(sizes))
        return torch.cat([part.to(column.dtype) for pair in parts for part in pair])

    pairs = [index // 2 for index in own.sequence_ids.tolist()]
    generators = [torch.Generator().manual_seed(200 + pair) for pair in pairs]
    prompts = [torch.randint(8, VOCABULARY, (count,), generator=g) for g in generators]
    nothing = [torch.zeros(count)] * len(sizes)
    lengths = torch.tensor(sizes) + count
    return replace(
        own,
        tokens=prepended(own.tokens, prompts),
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        response_mask=prepended(own.response_mask, nothing),
        rollout_logprobs=prepended(own.rollout_logprobs, nothing),
        policy_versions=prepended(own.policy_versions, [x - 1 for x in nothing]),
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


def own_batch(world: Any, *, rewards: Tensor | None = None) -> Batch:
    """This rank's part of the batch, with other rewards of the sequences where given."""
    updates = world.cfg.batch.updates_per_step
    own = batch(world.dp_index(world.rank), world.dp_size, updates=updates)
    return own if rewards is None else changed(own, scalars={"rewards": rewards})


def step_as_train_does(trainer: Any, own: Batch, *, step: int) -> tuple[Batch, Advantages, dict]:
    """Annotate, credit, update; return what each gives."""
    own = trainer.annotate(own, step=step)
    found = advantages_of(own, cfg=trainer.cfg, world=trainer.world, step=step)
    return own, found, trainer.update(own, found, step=step)


def train(cfg: Config, steps: int = 2) -> list[dict]:
    """Take steps on the batch; return sums and the whole parameters of every rank."""
    return with_trainer(cfg, updated, steps)


def updated(trainer: Any, steps: int = 2) -> dict:
    """Take steps on the batch; return sums and the whole parameters."""
    own = own_batch(trainer.world)
    sums = [update(trainer, own, step=step) for step in range(steps)]
    return {"sums": sums, "parameters": full_parameters(trainer)}
