"""Sequences with images for the policy's tests, and what plain transformers makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.model_inputs import MultimodalItems, TokenIds, concat_ids
from spmdrl.types import Batch, Microbatch, Scalars, Tokens
from tests.helpers.policy_runs import changed, config
from tests.helpers.vlm import noise, reader

IMAGES = (noise(60, 40, seed=1), noise(84, 84, seed=2), noise(30, 80, seed=3))
TEXTS = (
    ("abc{0}de{0}fgh sees two of them", (0, 1)),
    ("no picture at all", ()),
    ("x{0}y sees the first one again", (0,)),
    ("{0} first and last thing", (2,)),
)
"""Each text, {0} for a placeholder, and the numbers of its images."""


@dataclass(frozen=True)
class Plain:
    """What transformers makes of the texts, by its own processor's inputs."""

    logprobs: list[Tensor]  # [n - 1] each, float32 nats
    gradients: dict[str, Tensor]  # of the sum of all logprobs by `weights`


@cache
def sequences(folder: Path) -> list[TokenIds]:
    """Return the ids of the texts, with what they show."""
    own = reader(folder)
    images = [[IMAGES[i] for i in shown] for _, shown in TEXTS]
    return [own.encode(t.format(own.placeholder), i) for (t, _), i in zip(TEXTS, images)]


def weights(length: int) -> Tensor:
    """Return the weight of each token in the loss; the first has none."""
    return torch.nn.functional.pad(torch.linspace(-1, 1.5, length - 1), (1, 0))


def plain(folder: Path) -> Plain:
    """Compute the texts one by one."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    own, found = reader(folder), []
    for text, shown in TEXTS:
        inputs = own._processor(
            text=[text.format(own.placeholder)],
            images=[[IMAGES[i] for i in shown]] if shown else None,
            return_tensors="pt",
            return_mm_token_type_ids=True,
        )
        inputs.pop("num_crops", None)
        if not shown or model.config.model_type == "internvl":
            inputs.pop("mm_token_type_ids", None)
        ids = inputs["input_ids"][0]
        logits = model(**inputs).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    sum((own * weights(len(own) + 1)[1:]).sum() for own in found).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Plain([own.detach() for own in found], gradients)


def vision_config(folder: Path, out: Path, **options: Any) -> Config:
    """Return a float32 CPU config that clips nothing."""
    own = config(folder, out, **options)
    return changed(own, sampling={"temperature": 1.0}, optimizer={"max_grad_norm": 0.0})


def microbatch(folder: Path, numbers: list[int], *, has_pictures: bool = True) -> Microbatch:
    """Pack sequences; none gives the dummy token."""
    chosen = [sequences(folder)[i] for i in numbers] or [TokenIds([0], MultimodalItems.none(1))]
    lengths = torch.tensor([len(ids) for ids in chosen])
    own = Tokens.unsampled(concat_ids(chosen))
    positions = torch.cat([torch.arange(n) for n in lengths])
    columns = own.token_fields() | {"response_mask": positions > 0}
    if not has_pictures:
        columns["extra_columns"] = {}
    return Microbatch(
        **columns,
        position_ids=positions,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        sequence_ids=torch.tensor(numbers or [-1]),
    )


def batch(folder: Path, rows: list[list[int]]) -> Batch:
    """Return a rank's part of a batch of all texts: one update, a micro-batch for each row."""
    lengths = torch.tensor([len(ids) for ids in sequences(folder)])
    count = torch.arange(len(lengths))
    scalars = Scalars(
        lengths=lengths,
        response_lengths=lengths - 1,
        group_ids=count,
        sample_ids=torch.zeros_like(count),
        rewards=torch.zeros(len(lengths)).double(),
        is_truncated=count < 0,
        is_valid=count >= 0,
        min_versions=torch.zeros_like(count),
    )
    updates = (tuple(microbatch(folder, row) for row in rows),)
    return Batch(scalars=scalars, updates=updates, update_ids=torch.zeros_like(count))
