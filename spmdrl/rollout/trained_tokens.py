"""Record what each sampled token of a step was trained with: advantage, and the trainer's logprob.

There is one parquet file for each recorded step and data-parallel index, next to the rollouts of
that step. docs/rollouts.md describes the columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.rollout.recorded_tables import VIEW_BYTES, RecordedFile
from spmdrl.rollout.recorder import FOLDER, ORDER, publish
from spmdrl.run_folder import make_folder
from spmdrl.types import Advantages, Batch
from spmdrl.world.world import World

FILE_NAME = re.compile(r"step_(\d+)_trainer_(\d+)_of_(\d+)\.parquet")
SCHEMA = pa.schema(
    [
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("trace", pa.int64()),
        ("advantages", pa.list_(pa.float32())),
        ("trainer_logprobs", pa.list_(pa.float32())),
    ]
)


class TrainedTokens:
    """Writes what one data-parallel index trained on; made on its first rank alone."""

    def __init__(self, cfg: Config, world: World):
        self._every = cfg.rollout.record.every
        self._folder = Path(cfg.output_dir) / FOLDER
        make_folder(self._folder, within=self._folder.parent)
        self._part = world.dp_index(world.rank)
        self._num_parts = world.dp_size
        self._logprobs: list[Tensor] = []
        self._is_due = False

    def begin(self, step: int) -> None:
        """Forget the last step, and collect logprobs if this one is recorded."""
        self._logprobs = []
        self._is_due = step % self._every == 0

    def add(self, logprobs: Tensor) -> None:
        """Keep the policy's logprobs [T] of the next micro-batch, as before the step's updates."""
        if self._is_due:
            self._logprobs.append(logprobs)

    def write(self, step: int, batch: Batch, advantages: Advantages) -> None:
        """Write the file of a step, if it is recorded, and begin the next step.

        Raises: RunFailed if it cannot be written; then no part of it is left.
        """
        if self._is_due:
            name = f"step_{step:06d}_trainer_{self._part}_of_{self._num_parts}.parquet"
            publish(self._folder / name, _table(batch, advantages, self._logprobs), {})
        self.begin(step + 1)


def _table(batch: Batch, advantages: Advantages, logprobs: Sequence[Tensor]) -> pa.Table:
    """Return a row for each sequence.

    Args:
        logprobs: of each micro-batch; none in a step that does not train the policy.
    """
    scalars = batch.scalars
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    flat = [one for update in advantages.tokens for one in update]
    # Later epochs added more; the first one took the micro-batches in the batch's order.
    for index, microbatch in enumerate(batch.microbatches):
        mask = microbatch.response_mask.cpu()
        values = flat[index].cpu().float()
        own = logprobs[index].cpu() if logprobs else None
        rows = microbatch.sequence_ids.tolist()
        for row, (start, end) in zip(rows, pairwise(microbatch.cu_seqlens.tolist())):
            if row < 0:
                continue
            is_sampled = mask[start:end]
            columns["group"].append(int(scalars.group_ids[row]))
            columns["sample"].append(int(scalars.sample_ids[row]))
            columns["trace"].append(int(scalars.traces[row]))
            columns["advantages"].append(values[start:end][is_sampled].numpy())
            found = None if own is None else own[start:end][is_sampled].numpy()
            columns["trainer_logprobs"].append(found)
    return pa.table(columns, schema=SCHEMA).sort_by(ORDER)


@dataclass(frozen=True)
class TrainedWith:
    """What the sampled tokens of a sequence were trained with."""

    advantages: list[float]
    """Of each sampled token, in order."""
    logprobs: list[float] | None
    """The trainer's, nats, before the step's updates; None if the policy was not trained."""


def read_trained(files: Sequence[Path], *, group: int | None) -> dict[tuple[int, ...], TrainedWith]:
    """Return {(group, sample, trace): what its tokens were trained with}.

    Args:
        files: of one step.
        group: None for all groups.
    Raises: Refusal if a file cannot be read, or a sequence is in it twice.
    """
    found: dict[tuple[int, ...], TrainedWith] = {}
    for path in files:
        file = RecordedFile(path, schema=SCHEMA)
        chosen = range(file.num_groups) if group is None else file.groups_with(group)
        for row in file.read(chosen, most_bytes=VIEW_BYTES).to_pylist():
            place = (row["group"], row["sample"], row["trace"])
            if place in found:
                raise Refusal(f"{path}: group, sample and trace {place} are in it twice")
            found[place] = TrainedWith(row["advantages"], row["trainer_logprobs"])
    return found
