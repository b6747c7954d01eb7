"""The reference's logprobs of all rows: computed once before training, then looked up."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.data.examples import PairSource, example_source
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.model.attention.packing import packs
from spmdrl.model.files.digests import shared_digests
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import hf_config_of, max_positions, model_folder
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel, scoring_temperature
from spmdrl.run_folder import remove
from spmdrl.same_run.differences import RunParts
from spmdrl.train.companions.reference_table import (
    Table,
    other_parts,
    sequence_key,
    shared_table,
    table_file,
    write_table,
)
from spmdrl.world.comm import agree
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_PACKS = 8  # rows of tokens_per_microbatch that a rank scores between two gathers
_LOG_EVERY_S = 10.0  # seconds between two lines of progress
_SAVE_EVERY_S = 600.0  # seconds between two saves of partial results


@dataclass(frozen=True)
class Row:
    """A sequence whose logprobs are needed."""

    key: int
    tokens: Tensor  # [T] int32
    mask: Tensor  # [T] bool, tokens to score

    def __len__(self) -> int:
        return len(self.tokens)


def cached_logprobs(cfg: Config, world: World, *, path: str) -> Table:
    """Return the reference's logprobs of every sequence that the run trains on.

    The ranks compute the logprobs that the file of this reference lacks, each dp rank for its share
    of the rows, and add them to the file. If the file lacks none, no model is loaded. The logprobs
    equal those of `ShardedModel.columns` up to rounding: packed rows differ in their sequences.

    Args:
        cfg, world: the config and this rank's view of the job; all trainer ranks call together.
        path: folder or hub name of the reference.
    Raises: Refusal, on all trainer ranks, if the model or the rows cannot be read; RuntimeError
        if the file cannot be written.
    """
    made = _made_of(cfg, world, path=path)
    within = _within(cfg)
    folder = within if cfg.model.reference.cache_folder else within / "reference_logprobs"
    file = table_file(folder, made)
    table, problem = shared_table(file, made, world)
    with _agree_on_errors(world):
        own, num_own = _missing(cfg, world, table)
    keys = hashlib.sha256(repr([s.key for s in own]).encode()).hexdigest()
    with world.watch.wait("count rows", -1):
        counts = world.gather_per_dp((num_own, len(own), keys))
    rows = sum(n for n, _, _ in counts)
    lacking = sum(n for _, n, _ in counts)
    if world.rank == 0:
        _log_start(file, made, problem=problem, rows=rows, lacking=lacking)
    if not lacking:
        return table
    # Partial results go to a file of their own. So a run that is killed and started again lacks the
    # same sequences, packs them the same way and ends with the same bits.
    aside = made | {"unfinished": {"rows": repr([count[2] for count in counts])}}
    filled = _compute(cfg, world, own, path=path, file=table_file(folder, aside), made=aside)
    gc.collect()  # the model's modules refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if world.rank == 0:
        write_table(file, table.joined(filled.pieces()), made, within=within)
        remove(table_file(folder, aside), within=within)
    return shared_table(file, made, world)[0]


def _within(cfg: Config) -> Path:
    """Return the folder of the config that has the files, or has their folder."""
    return Path(cfg.model.reference.cache_folder or cfg.output_dir)


def look_up(table: Table, row: ScoredRow) -> Tensor:
    """Return the logprobs of a packed row: [T] float32 nats, 0 for tokens that are not scored.

    Raises: RuntimeError for a sequence that is not in the table.
    """
    tokens = row.tokens.cpu()
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[row.scored.cpu()] = True
    logprobs = torch.zeros(tokens.shape)
    # The splits are views: writing to `values` fills `logprobs`.
    for sequence, own, values in zip(*(t.split(row.lengths) for t in (tokens, mask, logprobs))):
        if not own.any():
            continue
        known = table.find(sequence_key(sequence, own))
        if known is None:
            raise RuntimeError(
                f"a sequence of {len(sequence)} tokens, which begins {sequence[:8].tolist()}, is "
                "not among the reference's logprobs: the rows of data.train have changed since the "
                "run began; start it again, and it will compute the missing ones"
            )
        values[own] = known
    return logprobs.to(row.tokens.device)


# --------------------------------------------------------------------------- missing sequences


def _made_of(cfg: Config, world: World, *, path: str) -> dict[str, dict[str, Any]]:
    """Return everything that determines the logprobs, apart from the sequences."""
    with _agree_on_errors(world):
        folder = model_folder(path)
        names = {
            *CheckpointReader(folder).files(),
            "config.json",
            *(p.name for p in folder.glob("*.py")),
        }
    files = sorted(shared_digests(folder, names, world, field="model.reference.path").items())
    return {
        "model": {"files": hashlib.sha256(json.dumps(files).encode()).hexdigest()},
        "config": {
            "model.compute_dtype": cfg.model.compute_dtype,
            "sampling.temperature": float(scoring_temperature(cfg)),
        },
    }


def _missing(cfg: Config, world: World, table: Table) -> tuple[list[Row], int]:
    """Return the sequences of this dp rank's rows that the table lacks, longest first.

    The longest come first, so that a lack of memory is noticed at once.

    Returns: these sequences, and how many different sequences the rank's rows have in all.
    Raises: Refusal for rows that cannot be read.
    """
    source = example_source(
        cfg, load_tokenizer(cfg), max_positions=max_positions(hf_config_of(cfg.model))
    )
    assert isinstance(source, PairSource), "only losses on pairs ask for a reference"
    known = set(table.keys.tolist())
    missing = {}
    seen = set()
    for index in source.rows_of_run()[world.dp_index(world.rank) :: world.dp_size]:
        for tokens, mask in source.unit(index).examples:
            if tokens.items:
                raise Refusal(
                    f"{source.rows.where(index)}: has images, and model.reference.cache finds "
                    "logprobs by the tokens alone; leave model.reference.cache out"
                )
            row = torch.tensor(tokens)
            own = torch.tensor(mask)
            if own[0]:
                raise Refusal(
                    f"{source.rows.where(index)}: the first token belongs to the "
                    "response, and nothing predicts it; the prompt is empty"
                )
            key = sequence_key(row, own)
            seen.add(key)
            if key not in known:
                missing[key] = Row(key, row.int(), own)
    return sorted(missing.values(), key=lambda s: (-len(s), s.key)), len(seen)


def _log_start(file: Path, made: RunParts, *, problem: str, rows: int, lacking: int) -> None:
    if problem:
        log.warning("%s %s; its logprobs are computed again", file, problem)
    elif lacking == rows and (differing := other_parts(file, made)):
        log.info(
            "reference logprobs: the file in %s is of another reference (other %s) and is not used",
            file.parent,
            ", ".join(differing),
        )
    if lacking:
        log.info("reference logprobs: computing %d of %d sequences, for %s", lacking, rows, file)
    else:
        log.info(
            "reference logprobs: all %d sequences are in %s; no reference is loaded", rows, file
        )


# --------------------------------------------------------------------------- computing


def _compute(
    cfg: Config, world: World, own: Sequence[Row], *, path: str, file: Path, made: RunParts
) -> Table:
    """Return the logprobs of all ranks' sequences on rank 0; other ranks return those they had.

    Args:
        own: sequences of this dp rank, longest first.
        path: folder or hub name of the reference, which is loaded here and freed at the end.
        file, made: file and description of the partial results, which an earlier start may have
            written.
    """
    with _agree_on_errors(world):
        model = ShardedModel(cfg, world, path=path, is_trained=False)
    known = shared_table(file, made, world)[0]
    began = time.monotonic()
    done = set(known.keys.tolist())
    rows = [
        row
        for row in packs(own, world.tokens_per_microbatch)
        if any(s.key not in done for s in row)
    ]
    with world.watch.wait("count rows", -1):
        counts = world.gather_per_dp((len(rows), sum(len(s) for row in rows for s in row)))
    rounds = max(count for count, _ in counts)
    progress = _Progress(sum(tokens for _, tokens in counts))
    if world.rank == 0 and done:
        log.info("reference logprobs: an earlier start computed %d sequences", len(done))
    rows += [[]] * (rounds - len(rows))  # all ranks run the same number of forward passes
    computed: dict[int, Tensor] = {}
    saved = began
    for begin in range(0, rounds, _PACKS):
        chunk = rows[begin : begin + _PACKS]
        with world.watch.wait("reference logprobs", -1):
            scored = _score(model, chunk)
            shares = world.gather_per_dp((sum(len(s) for row in chunk for s in row), scored))
        if world.rank:
            continue
        for tokens, part in shares:
            progress.done += tokens
            computed |= {key: torch.from_numpy(values) for key, values in part.items()}
        progress.log()
        if time.monotonic() - saved > _SAVE_EVERY_S and begin + _PACKS < rounds:
            saved = time.monotonic()
            write_table(file, known.joined(computed), made, within=_within(cfg))
    return known.joined(computed)


class _Progress:
    """Logs how many tokens are done, and an estimate of the time left."""

    def __init__(self, num_tokens: int):
        self.done = 0
        self._total = num_tokens
        self._began = time.monotonic()
        self._logged_at = self._began

    def log(self) -> None:
        """Log a line if the last one is old or all tokens are done."""
        now = time.monotonic()
        is_done = self.done == self._total
        if now - self._logged_at < _LOG_EVERY_S and not is_done:
            return
        self._logged_at = now
        seconds = now - self._began
        left = seconds * (self._total / self.done - 1)
        log.info(
            "reference logprobs: %s of %s tokens in %.0f s%s",
            f"{self.done:,}",
            f"{self._total:,}",
            seconds,
            "" if is_done else f", about {left:.0f} s left",
        )


def _score(model: ShardedModel, rows: Sequence[Sequence[Row]]) -> dict[int, numpy.ndarray]:
    """Return {key: logprobs of the scored tokens} of packed rows; an empty row is a dummy."""
    scored = []
    for row in rows:
        lengths = [len(s) for s in row] or [1]
        dummy = torch.zeros(0 if row else 1, dtype=torch.int64)
        scored.append(
            model.row(
                torch.cat([dummy, *(s.tokens.long() for s in row)]),
                lengths,
                mask=torch.cat([dummy.bool(), *(s.mask for s in row)]),
            )
        )
    logprobs_of: dict[int, numpy.ndarray] = {}
    for row, (logprobs, _) in zip(rows, model.columns(scored)):
        pieces = logprobs.cpu().split([len(s) for s in row]) if row else ()
        logprobs_of |= {s.key: piece[s.mask].numpy() for s, piece in zip(row, pieces)}
    return logprobs_of


def _agree_on_errors(world: World) -> AbstractContextManager[None]:
    """Make an error on one trainer rank an error on all of them."""
    return agree(
        group=world.trainer_control, waiting=world.watch.wait("agree on the reference", -1)
    )
