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
    from spmdrl.rollout.trained_tokens import TrainedWith

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
    trained: TrainedWith | None
    """None if it was not recorded, or for the greedy response."""
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


def _sequences(recorded: RecordedSteps, step: int) -> pyarrow.Table:
    """Return the sampled sequences of a step in a batch's order, without the columns per token."""
    import pyarrow
    import pyarrow.compute

    from spmdrl.rollout.episode import GREEDY
    from spmdrl.rollout.recorder import ORDER, SEQUENCE_COLUMNS
    from spmdrl.rollout.recordings import read_table

    files = recorded.files_of(step)
    table = pyarrow.concat_tables([read_table(path, columns=SEQUENCE_COLUMNS) for path in files])
    table = table.filter(pyarrow.compute.field("sample") != GREEDY)
    return table.sort_by(ORDER)


class GroupReader:
    """Reads groups of a run's recorded steps; config and tokenizer are loaded once.

    Without `trust_remote_code`, code of a tokenizer runs only for this user's own runs, see
    `own_runs`.

    Args:
        recorded: the run's recorded steps.
        tokenizer: folder or hub name; empty: that of the run.
        needs_text: load the tokenizer and decode each token.
        trust_remote_code: run Python code of the tokenizer's folder.
    """

    def __init__(
        self,
        recorded: RecordedSteps,
        *,
        tokenizer: str = "",
        needs_text: bool = False,
        trust_remote_code: bool = False,
    ):
        self.recorded = recorded
        self._name = tokenizer
        self._needs_text = needs_text
        self._texts: dict[int, str] = {}
        path = recorded.folder.resolve().parent / "config.yaml"
        cfg, _ = attempt(lambda: load_yaml(path))
        self._cfg: Config | None = cfg
        is_yours = cfg is not None and is_own(path)[0]
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
        from spmdrl.rollout.trained_tokens import read_trained

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
        notes = []
        trained = recorded.trained.get(step, ())
        if not trained:
            notes.append("what the trainers did with this step is not recorded: no advantages")
        known = read_trained(trained, group=group)
        header = read_header(files[0])
        if header["is_partial"]:
            notes.append("rewards do not include those of reward models, and are not shaped")
        decode = None
        if self._needs_text or any(row["trace"] for row in rows):
            decode, error = self._decoder
            notes += [f"tokens are printed as ids: {error}"] if error else []
        rows.sort(key=itemgetter("group", "sample", "trace"))
        return [
            View(step, number, header, _answers([*own], known, decode, self._texts), notes)
            for number, own in groupby(rows, key=_GROUP)
        ]

    @cached_property
    def _decoder(self) -> tuple[Callable[[list[int]], str], None] | tuple[None, BaseException]:
        """The function from token ids to text, or why there is none."""
        return attempt(lambda: _decoder(self._cfg, self._name, trusts=self._trusts_code))


def _answers(
    rows: list[dict[str, Any]],
    known: Mapping[tuple[int, ...], TrainedWith],
    decode: Callable[[list[int]], str] | None,
    texts: dict[int, str],
) -> list[RecordedResponse]:
    """Return the responses of a group's rows.

    Args:
        known: {(group, sample, trace): what its tokens were trained with}.
        texts: {token: its text}, to which tokens are added.
    """
    from spmdrl.data.attachments import previews_of

    return [
        RecordedResponse(
            row,
            _fitting(known.get((row["group"], row["sample"], row["trace"])), row),
            _pieces(row["tokens"], decode, texts) if decode else None,
            images,
            _prompt(row, images, decode),
            branch,
        )
        for row, images, branch in zip(rows, previews_of(rows), branches_of(rows))
    ]


def _fitting(trained: TrainedWith | None, row: Mapping[str, Any]) -> TrainedWith | None:
    """Return what a sequence was trained with. Raises: Refusal if it is not of its tokens."""
    if trained is None:
        return None
    count = sum(row["response_mask"])
    for values in (trained.advantages, trained.logprobs):
        if values is not None and len(values) != count:
            raise Refusal(
                f"step {row['step']}, group {row['group']}, sample {row['sample']}: {count} tokens "
                f"were sampled, and {len(values)} trained on; the files are of two attempts"
            )
    return trained


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
