"""Recorded rollouts, read for people: a step's groups in short, one group with all we know."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from spmdrl.config import Config
from spmdrl.config.files import load_yaml
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.world.own_runs import is_own

if TYPE_CHECKING:
    import pyarrow

    from spmdrl.data.attachments import Preview
    from spmdrl.rollout.recordings import Recorded

_GROUP = itemgetter("group")


@dataclass(frozen=True)
class Answer:
    """One recorded response, greedy or drawn."""

    row: dict[str, Any]
    """Its columns, those per token too."""
    advantage: float | None
    """None where it is not known, or the response is the greedy one."""
    pieces: list[str] | None
    """Text of each token; None without a tokenizer."""
    shows: dict[int, Preview | None]
    """What is to be seen at tokens, see `previews_of`."""
    prompt: list[str | Preview]
    """What was given: text, and what it shows between; before it without a tokenizer."""

    @property
    def start(self) -> int:
        """Return the position of the first token after the prompt."""
        mask = self.row["response_mask"]
        return mask.index(True) if True in mask else len(mask)


@dataclass(frozen=True)
class View:
    """One group, as it is shown."""

    step: int
    group: int
    header: dict[str, Any]
    sequences: list[Answer]
    notes: list[str]
    """What is not known, and why."""


@dataclass(frozen=True)
class Summary:
    """One group in a list."""

    group: int
    row: int
    samples: int
    mean: float
    """Of the rewards that did not fail, task units; NaN where all did."""
    spread: float
    """Their standard deviation, population form."""
    length: float
    """Mean sampled tokens."""
    truncated: int
    prompt: str


# --------------------------------------------------------------------------- reading


def summaries(recorded: Recorded, step: int) -> list[Summary]:
    """Return the groups of a step, by number. Raises: Refusal for a step that is not there."""
    found = []
    for number, group in groupby(_sequences(recorded, step).to_pylist(), key=_GROUP):
        rows = list(group)
        rewards = [row["reward"] for row in rows if row["is_valid"]]
        found.append(
            Summary(
                number,
                rows[0]["row"],
                len(rows),
                statistics.fmean(rewards) if rewards else math.nan,
                statistics.pstdev(rewards) if rewards else 0.0,
                statistics.fmean(row["response_length"] for row in rows),
                sum(row["is_truncated"] for row in rows),
                rows[0]["prompt"],
            )
        )
    return found


def _sequences(recorded: Recorded, step: int) -> pyarrow.Table:
    """Return the drawn sequences of a step, without what is per token, sorted as a batch is."""
    import pyarrow
    import pyarrow.compute

    from spmdrl.rollout.episode import GREEDY
    from spmdrl.rollout.recorder import SEQUENCE_COLUMNS
    from spmdrl.rollout.recordings import read_table

    table = pyarrow.concat_tables(
        [read_table(path, columns=SEQUENCE_COLUMNS) for path in recorded.files_of(step)]
    )
    table = table.filter(pyarrow.compute.field("sample") != GREEDY)
    return table.sort_by([("group", "ascending"), ("sample", "ascending")])


def advantages(
    recorded: Recorded, step: int, cfg: Config, *, trusts: bool = False
) -> dict[tuple[int, int], float]:
    """Recompute a step's advantages where they are one number per sequence.

    Args:
        cfg: of the run. trusts: run a function that it names and that is not ours.
    Returns: {(group, sample): advantage}.
    Raises: Refusal saying why they cannot be known.
    """
    import torch

    from spmdrl.algorithms import registry
    from spmdrl.credit import sequence_advantages
    from spmdrl.rollout.recordings import read_header, scalars_of
    from spmdrl.types import Batch

    chosen = cfg.algorithm
    if read_header(recorded.files_of(step)[0])["is_partial"]:
        raise Refusal("the part of reward models, which trainers add, is not recorded")
    if ":" in chosen.advantage and not trusts:
        raise Refusal(
            f"the run's config.yaml names the code {chosen.advantage} for them; look at it, and "
            "run it by --trust-run"
        )
    method = registry.get("advantage", chosen.advantage)
    if registry.is_per_token(method):
        raise Refusal(f"{chosen.advantage} gives each token its own, and they are not recorded")
    if chosen.kl_coef and chosen.kl_in == "reward":
        raise Refusal("the KL in the rewards, which trainers add, is not recorded")
    scalars = scalars_of(_sequences(recorded, step))
    values = sequence_advantages(
        Batch(scalars, updates=(), update_ids=torch.zeros(len(scalars), dtype=torch.int64)),
        method,
        cfg=cfg,
    )
    places = zip(scalars.group_ids.tolist(), scalars.sample_ids.tolist())
    return dict(zip(places, values.tolist()))


def read_groups(
    recorded: Recorded,
    step: int,
    group: int | None,
    *,
    tokenizer: str = "",
    needs_text: bool = False,
    trust_remote_code: bool = False,
    trust_run: bool = False,
) -> list[View]:
    """Return one group of a step, or all by number, with all that is known of them.

    Args:
        group: its number; None for all.
        tokenizer: folder or hub name; empty takes the run's own.
        needs_text: of single tokens, which takes the tokenizer.
        trust_remote_code: run Python code of the tokenizer's folder. trust_run: that of an
            advantage which is no built-in one. What the run's own config says is believed of a
            run of this user's own alone, see `own_runs`.
    Raises: Refusal for a step or group that is not there, naming those that are.
    """
    from spmdrl.rollout.recordings import ranges, read_header, read_table

    files = recorded.files_of(step)
    tables = [read_table(path, group=group, without_features=True) for path in files]
    rows = [row for table in tables for row in table.to_pylist()]
    if not rows:
        others = {one.group for one in summaries(recorded, step)}
        raise Refusal(
            f"step {step} of {recorded.folder} has no group {group}; it has groups {ranges(others)}"
        )
    # It may be missing.
    path = recorded.folder.resolve().parent / "config.yaml"
    cfg, error = attempt(lambda: load_yaml(path))
    known = None
    is_yours = cfg is not None and is_own(path)[0]
    if cfg:
        trusts = trust_run or is_yours
        known, error = attempt(lambda: advantages(recorded, step, cfg, trusts=trusts))
    notes = [f"advantages are not available: {error}"] if error else []
    header = read_header(files[0])
    if header["is_partial"]:
        notes.append("rewards are without the part of reward models, and not shaped")
    decode = None
    if needs_text:
        trusts = trust_remote_code
        if cfg and is_yours and not tokenizer:
            trusts |= cfg.model.trust_remote_code
        decode, error = attempt(lambda: _decoder(cfg, tokenizer, trusts=trusts))
        notes += [f"tokens are shown as ids: {error}"] if error else []
    rows.sort(key=itemgetter("group", "sample"))
    return [
        View(step, number, header, _answers(list(own), known or {}, decode), notes)
        for number, own in groupby(rows, key=_GROUP)
    ]


def _answers(
    rows: list[dict[str, Any]],
    known: dict[tuple[int, int], float],
    decode: Callable[[list[int]], str] | None,
) -> list[Answer]:
    """Return the responses of a group's rows.

    Args:
        known: advantages, {(group, sample): advantage}.
    """
    from spmdrl.data.attachments import previews_of

    return [
        Answer(
            row,
            known.get((row["group"], row["sample"])),
            [decode([token]) for token in row["tokens"]] if decode else None,
            shows,
            _prompt(row, shows, decode),
        )
        for row, shows in zip(rows, previews_of(rows))
    ]


def _prompt(
    row: dict[str, Any], shows: dict[int, Preview | None], decode: Callable[[list[int]], str] | None
) -> list[str | Preview]:
    given = row["response_mask"].index(True) if True in row["response_mask"] else None
    begins = [(at, item) for at, item in shows.items() if item is not None]
    begins = [(at, item) for at, item in begins if given is None or at < given]
    if decode is None or not begins:
        return [*(item for _, item in begins), row["prompt"]]
    parts: list[str | Preview] = []
    start = 0
    for at, item in begins:
        parts += [decode(row["tokens"][start:at]), item]
        start = next(
            t for t in range(at + 1, len(row["tokens"]) + 1) if shows.get(t, b"") is not None
        )
    return [*parts, decode(row["tokens"][start:given])]


def _decoder(cfg: Config | None, name: str, *, trusts: bool) -> Callable[[list[int]], str]:
    """Return what gives the text of token ids. Raises: Refusal when there is nothing."""
    from spmdrl.data.tokenizer import read_tokenizer

    name = name or (cfg.model.tokenizer or cfg.model.path if cfg else "")
    if not name:
        raise Refusal("there is no config, which names the tokenizer; give --tokenizer")
    tokenizer, _error = attempt(
        lambda: read_tokenizer(name, local_files_only=True, trust_remote_code=trusts)
    )
    if tokenizer is None:
        needs = cfg is not None and cfg.model.trust_remote_code and not trusts
        raise Refusal(
            f"no tokenizer can be loaded from {name!r}; give another by --tokenizer"
            + (", or, if you trust the code that comes with it, --trust-remote-code" * needs)
        )
    return tokenizer.decode
