"""Recorded rollouts for people: summaries of a step's groups, and whole groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    from spmdrl.rollout.recordings import RecordedSteps

_GROUP = itemgetter("group")


@dataclass(frozen=True)
class Branch:
    """Where a trace leaves an earlier trace of its episode."""

    start: int
    """Position of its first token that no earlier trace has shown."""
    parent: int | None
    """The trace that has the tokens before; None if the trace begins from nothing."""
    depth: int
    """How many traces there are above it."""


@dataclass(frozen=True)
class RecordedResponse:
    """One recorded response, greedy or sampled; of an episode of several traces, one of them."""

    row: dict[str, Any]
    """All its columns, also those per token."""
    advantage: float | None
    """None if it is not known, or for the greedy response."""
    pieces: list[str] | None
    """Text of each token; None without a tokenizer."""
    images: dict[int, Preview | None]
    """{position: image that begins there}, see `previews_of`."""
    prompt: list[str | Preview]
    """Text and images in order. Without a tokenizer, the images come first."""

    branch: Branch | None = None
    """None if its episode has one trace."""

    @property
    def start(self) -> int:
        """Return the position of the first token to show: after the prompt, or where a trace
        leaves the earlier ones."""
        if self.branch is not None:
            return self.branch.start
        mask = self.row["response_mask"]
        return mask.index(True) if True in mask else len(mask)


@dataclass(frozen=True)
class View:
    """One group with all its responses."""

    step: int
    group: int
    header: dict[str, Any]
    sequences: list[RecordedResponse]
    notes: list[str]
    """Sentences on what is missing, and why."""


@dataclass(frozen=True)
class Summary:
    """Numbers of one group, for a list of groups."""

    group: int
    row: int
    samples: int
    mean: float
    """Mean of the rewards that did not fail, task units; NaN if all failed."""
    spread: float
    """Population standard deviation of these rewards."""
    length: float
    """Mean number of sampled tokens."""
    truncated: int
    prompt: str


# --------------------------------------------------------------------------- reading


def summaries(recorded: RecordedSteps, step: int) -> list[Summary]:
    """Return summaries of the groups of a step, by number.

    Raises: Refusal for a step that was not recorded.
    """
    result = []
    for number, group in groupby(_sequences(recorded, step).to_pylist(), key=_GROUP):
        rows = list(group)
        firsts = [row for row in rows if row["trace"] == 0]
        rewards = [row["reward"] for row in firsts if row["is_valid"]]
        result.append(
            Summary(
                number,
                rows[0]["row"],
                len(firsts),
                statistics.fmean(rewards) if rewards else math.nan,
                statistics.pstdev(rewards) if rewards else 0.0,
                sum(row["response_length"] for row in rows) / len(firsts),
                len({row["sample"] for row in rows if row["is_truncated"]}),
                rows[0]["prompt"],
            )
        )
    return result


def _sequences(
    recorded: RecordedSteps, step: int, tables: Sequence[pyarrow.Table] = ()
) -> pyarrow.Table:
    """Return the sampled sequences of a step in a batch's order, without the columns per token.

    Args:
        tables: the step's files, if they have been read.
    """
    import pyarrow
    import pyarrow.compute

    from spmdrl.rollout.episode import GREEDY
    from spmdrl.rollout.recorder import ORDER, SEQUENCE_COLUMNS
    from spmdrl.rollout.recordings import read_table

    columns = SEQUENCE_COLUMNS
    own = [table.select(columns) for table in tables]
    own = own or [read_table(path, columns=columns) for path in recorded.files_of(step)]
    table = pyarrow.concat_tables(own)
    table = table.filter(pyarrow.compute.field("sample") != GREEDY)
    return table.sort_by(ORDER)


def advantages(
    recorded: RecordedSteps,
    step: int,
    cfg: Config,
    *,
    trusts: bool = False,
    tables: Sequence[pyarrow.Table] = (),
) -> dict[tuple[int, int], float]:
    """Compute a step's advantages again, if there is one number per sequence.

    Args:
        cfg: of the run.
        trusts: run a user's function that the config names.
        tables: the step's files, if they have been read.
    Returns: {(group, sample): advantage}.
    Raises: Refusal with the reason why they cannot be computed.
    """
    import torch

    from spmdrl.algorithms import registry
    from spmdrl.credit import sequence_advantages
    from spmdrl.rollout.recordings import read_header, scalars_of
    from spmdrl.types import Batch

    chosen = cfg.algorithm
    if read_header(recorded.files_of(step)[0])["is_partial"]:
        raise Refusal("the rewards of reward models, which trainers add, are not recorded")
    if ":" in chosen.advantage and not trusts:
        raise Refusal(
            f"the run's config.yaml names the code {chosen.advantage} for them; look at it, then "
            "run it with --trust-run"
        )
    method = registry.get("advantage", chosen.advantage)
    if registry.is_per_token(method):
        raise Refusal(
            f"{chosen.advantage} computes one per token, and the columns it needs are not recorded"
        )
    if chosen.kl_coef and chosen.kl_in == "reward":
        raise Refusal("the KL in the rewards, which trainers add, is not recorded")
    scalars = scalars_of(_sequences(recorded, step, tables))
    values = sequence_advantages(
        Batch(scalars, updates=(), update_ids=torch.zeros(len(scalars), dtype=torch.int64)),
        method,
        cfg=cfg,
    )
    places = zip(scalars.group_ids.tolist(), scalars.sample_ids.tolist())
    return dict(zip(places, values.tolist()))


class GroupReader:
    """Reads groups of a run's recorded steps; config and tokenizer are loaded once.

    Without the `trust` flags, code that the config names runs only for this user's own runs, see
    `own_runs`.

    Args:
        recorded: the run's recorded steps.
        tokenizer: folder or hub name; empty: that of the run.
        needs_text: load the tokenizer and decode each token.
        trust_remote_code: run Python code of the tokenizer's folder.
        trust_run: run a user's advantage function that the run's config names.
    """

    def __init__(
        self,
        recorded: RecordedSteps,
        *,
        tokenizer: str = "",
        needs_text: bool = False,
        trust_remote_code: bool = False,
        trust_run: bool = False,
    ):
        self.recorded = recorded
        self._name = tokenizer
        self._needs_text = needs_text
        self._texts: dict[int, str] = {}
        path = recorded.folder.resolve().parent / "config.yaml"
        cfg, error = attempt(lambda: load_yaml(path))
        self._cfg: Config | None = cfg
        self._config_error = error
        is_yours = cfg is not None and is_own(path)[0]
        self._trusts_run = trust_run or is_yours
        self._trusts_code = trust_remote_code
        if cfg and is_yours and not tokenizer:
            self._trusts_code |= cfg.model.trust_remote_code

    def read(self, step: int, group: int | None) -> list[View]:
        """Return one group of a step with all its responses, or all groups by number.

        Args:
            group: its number; None for all.
        Raises: Refusal for a step or group that was not recorded, with those that were.
        """
        from spmdrl.rollout.recordings import ranges, read_header, read_table

        recorded = self.recorded
        files = recorded.files_of(step)
        tables = [read_table(path, group=group, without_features=True) for path in files]
        rows = [row for table in tables for row in table.to_pylist()]
        if not rows:
            others = {one.group for one in summaries(recorded, step)}
            raise Refusal(
                f"step {step} of {recorded.folder} has no group {group}; it has groups "
                f"{ranges(others)}"
            )
        known, error = self._advantages(step, tables if group is None else ())
        notes = [f"advantages are not available: {error}"] if error else []
        header = read_header(files[0])
        if header["is_partial"]:
            notes.append("rewards do not include those of reward models, and are not shaped")
        decode = None
        if self._needs_text or any(row["trace"] for row in rows):
            decode, error = self._decoder
            notes += [f"tokens are printed as ids: {error}"] if error else []
        rows.sort(key=itemgetter("group", "sample", "trace"))
        return [
            View(step, number, header, _answers([*own], known or {}, decode, self._texts), notes)
            for number, own in groupby(rows, key=_GROUP)
        ]

    def _advantages(
        self, step: int, tables: Sequence[pyarrow.Table]
    ) -> tuple[dict[tuple[int, int], float] | None, BaseException | None]:
        cfg = self._cfg
        if cfg is None:
            return None, self._config_error
        trusts = self._trusts_run
        return attempt(lambda: advantages(self.recorded, step, cfg, trusts=trusts, tables=tables))

    @cached_property
    def _decoder(self) -> tuple[Callable[[list[int]], str], None] | tuple[None, BaseException]:
        """The function from token ids to text, or why there is none."""
        return attempt(lambda: _decoder(self._cfg, self._name, trusts=self._trusts_code))


def _answers(
    rows: list[dict[str, Any]],
    known: dict[tuple[int, int], float],
    decode: Callable[[list[int]], str] | None,
    texts: dict[int, str],
) -> list[RecordedResponse]:
    """Return the responses of a group's rows.

    Args:
        known: advantages, {(group, sample): advantage}.
        texts: {token: its text}, to which tokens are added.
    """
    from spmdrl.data.attachments import previews_of

    return [
        RecordedResponse(
            row,
            known.get((row["group"], row["sample"])),
            _pieces(row["tokens"], decode, texts) if decode else None,
            images,
            _prompt(row, images, decode),
            branch,
        )
        for row, images, branch in zip(rows, previews_of(rows), branches_of(rows))
    ]


def _pieces(
    tokens: Sequence[int], decode: Callable[[list[int]], str], texts: dict[int, str]
) -> list[str]:
    for token in {*tokens} - texts.keys():
        texts[token] = decode([token])
    return [texts[token] for token in tokens]


def branches_of(rows: Sequence[Mapping[str, Any]]) -> list[Branch | None]:
    """Return where each trace of a group leaves the earlier traces of its episode.

    Args:
        rows: of the group, sorted by sample and trace.
    """
    branches: list[Branch | None] = []
    for _, episode in groupby(rows, key=itemgetter("sample")):
        earlier: list[tuple[list[int], Branch]] = []
        for row in episode:
            shared = [_num_shared(row, tokens) for tokens, _ in earlier]
            start = max(shared, default=0)
            parent = shared.index(start) if start else None
            depth = 0 if parent is None else earlier[parent][1].depth + 1
            earlier.append((row["tokens"], Branch(start, parent, depth)))
        branches += [branch for _, branch in earlier] if len(earlier) > 1 else [None]
    return branches


def _num_shared(row: Mapping[str, Any], earlier: Sequence[int]) -> int:
    """Return how many tokens a trace begins with that are those of an earlier one. What it trains
    on is its own, even if it is equal."""
    pairs = zip(row["tokens"], row["response_mask"])
    for at, (token, is_trained_on) in enumerate(pairs):
        if is_trained_on or at == len(earlier) or token != earlier[at]:
            return at
    return len(row["tokens"])


def _prompt(
    row: dict[str, Any],
    images: dict[int, Preview | None],
    decode: Callable[[list[int]], str] | None,
) -> list[str | Preview]:
    """Return a prompt's text and images, in their order."""
    mask = row["response_mask"]
    end = mask.index(True) if True in mask else len(mask)
    prompt_images = {at: item for at, item in images.items() if item is not None and at < end}
    if decode is None or not prompt_images:
        return [*prompt_images.values(), row["prompt"]]
    parts: list[str | Preview] = []
    start = 0
    for at, item in prompt_images.items():
        parts += [decode(row["tokens"][start:at]), item]
        start = at + 1
        while start in images and images[start] is None:  # the rest of the image's tokens
            start += 1
    return [*parts, decode(row["tokens"][start:end])]


def _decoder(cfg: Config | None, name: str, *, trusts: bool) -> Callable[[list[int]], str]:
    """Return a function from token ids to text. Raises: Refusal if no tokenizer can be loaded."""
    from spmdrl.data.tokenizer import read_tokenizer

    name = name or (cfg.model.tokenizer or cfg.model.path if cfg else "")
    if not name:
        raise Refusal("there is no config.yaml that names the tokenizer; give --tokenizer")
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
