"""What time decided in a run, on disk: a sealed journal for each engine replica.

    OUTPUT_DIR/schedule/replica_0_of_2.jsonl

A line is a JSON object of one kind of decision and its parts:

    {"run": [facts]}             what must be alike for equal decisions to give equal numbers
    {"fill": [version, last]}    a stretch of generation begins, with these weights, to this step
    {"evaluate": [version, -1]}  the same of an evaluation
    {"came": [n, keys, failed]}  after n engine steps of the stretch these answers of workers were
                                 taken, in this order; failed: {key: [kind, message]}
    {"book": [n, number, move]}  the moves of the shared book up to this number were seen; the last
                                 was this replica's own, unless it is null
    {"pause": [n]}               generation stops for new weights
    {"end": [n]}                 the stretch is over
    {"closed": [step, digests]}  of each group of this replica in the step: a digest of it

In memory a line is a list, [kind, *parts]. It is written as soon as its decision is made, before
anything follows from it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from spmdrl import run_files
from spmdrl.config import Config
from spmdrl.config.fields import replay_folder
from spmdrl.errors import Refusal
from spmdrl.imports import versions
from spmdrl.journal import Journal, Row
from spmdrl.same_run.differences import config_of, differences, is_among
from spmdrl.value_forms import Form, are_texts, are_wholes, is_list, is_object, is_text, is_whole

FOLDER = "schedule"
"""Of the files, in a run's output_dir."""
ASTRAY = "decide_again"
"""File beside them: a resumed run could not repeat them, and the next start is not to try."""
STRETCHES = ("fill", "evaluate")
_FILLS_PER_VERSION = 2  # of train.py: the step itself, and those ahead
_REPLAY = "rollout.replay_schedule"

Line = list[Any]

_FREE = (
    "dry_run",
    "layout.wait_timeout_s",
    "layout.startup_timeout_s",
    "stream.verify_every",
    "stream.max_logprob_gap",
    "rollout.replay_schedule",
    "rollout.record.every",
    "rewards.workers",
    "rewards.timeout_s",
    "model.path",  # its files are compared
    "report.",
    "checkpoint.",
)
"""Fields that change where, how fast or how safely a run goes, or what it shows."""


def is_timed(cfg: Config) -> bool:
    """Return whether time decides on what engines compute together, or on batches."""
    schedule = cfg.rollout.schedule
    is_early = schedule.in_flight or schedule.leaves_unfinished or bool(schedule.dynamic)
    is_sampled = cfg.objective.samples and not replay_folder(cfg)
    return is_sampled and bool(is_early or schedule.balance == "steal" or cfg.environment_fields())


def unrepeatable(cfg: Config) -> str:
    """Return the field under which the same decisions do not give the same numbers, and why; empty
    where they do."""
    if not cfg.deterministic:
        return "deterministic: false, so that sums do not repeat; set it to true"
    if not cfg.engine.seed_per_request:
        return (
            "engine.seed_per_request: false, so that samples are drawn from the engine's own "
            "generator; set it to true"
        )
    if cfg.rollout.schedule.kv_cache == "keep":
        return (
            "rollout.schedule.kv_cache: keep, and a cache that older weights made is not in "
            "checkpoints; set it to recompute"
        )
    return ""


# --------------------------------------------------------------------------- lines


def journal_of(folder: Path, *, replica: int, replicas: int) -> Journal:
    """Return the journal of a replica's decisions.

    Args:
        folder: of the files, in a run's output_dir.
    """
    path = folder / f"replica_{replica}_of_{replicas}.jsonl"
    return Journal(path, run_files.DECISIONS, is_sealed=True, must_write=True, within=folder.parent)


def row_of(line: Line) -> Row:
    """Return a line as a journal has it."""
    return {line[0]: line[1:]}


def read_lines(journal: Journal) -> tuple[list[Line], str]:
    """Return the lines of a file up to the first that is not as it was written, and what is wrong
    with that; empty for nothing. Raises: OSError."""
    lines: list[Line] = []
    for entry in journal.read():
        if entry.problem:
            return lines, entry.problem
        if problem := _problem_of(entry.row):
            return lines, f"{journal.path}: line {entry.number} {problem}: {entry.row!s:.100}"
        ((kind, parts),) = entry.row.items()
        lines.append([kind, *parts])
    return lines, ""


def _problem_of(row: Row) -> str:
    """Return what is wrong with a row; empty for nothing."""
    kind = next(iter(row), "")
    forms = _FORMS.get(kind)
    parts = row.get(kind)
    if forms is None or len(row) > 1:
        return "is of no kind that is known"
    if not isinstance(parts, list) or len(parts) != len(forms):
        return f"must have a list of {len(forms)} parts for {kind!r}"
    for part, is_right in zip(parts, forms):
        if not is_right(part):
            return f"holds {part!r:.60}, which {kind!r} cannot have there"
    return ""


def _are_keys(values: Any) -> bool:
    return is_list(values) and all(isinstance(key, (int, str)) for key in values)


def _are_failures(values: Any) -> bool:
    if not is_object(values):
        return False
    return all(are_texts(failure) and len(failure) == 2 for failure in values.values())


def _is_move(value: Any) -> bool:
    if value is None:
        return True
    if not is_list(value) or len(value) != 6:
        return False
    return are_wholes(value[:4]) and all(map(are_wholes, value[4:]))


def _are_digests(values: Any) -> bool:
    return is_object(values) and all(map(is_text, values.values()))


def _are_facts(values: Any) -> bool:
    return is_object(values) and all(map(is_object, values.values()))


_FORMS: dict[str, tuple[Form, ...]] = {
    "run": (_are_facts,),
    "fill": (is_whole, is_whole),
    "evaluate": (is_whole, is_whole),
    "came": (is_whole, _are_keys, _are_failures),
    "book": (is_whole, is_whole, _is_move),
    "pause": (is_whole,),
    "end": (is_whole,),
    "closed": (is_whole, _are_digests),
}
"""{kind of a line: what each of its parts must be}."""


def until_version(lines: Sequence[Line], version: int) -> list[Line]:
    """Return the lines before the first stretch with weights of a version, or later ones."""
    for at, line in enumerate(lines):
        if line[0] in STRETCHES and line[1] >= version:
            return list(lines[:at])
    return list(lines)


# --------------------------------------------------------------------------- what is known of a run


def facts(cfg: Config, *, tokens_per_microbatch: int) -> dict[str, dict[str, Any]]:
    """Return what must be alike for the same decisions to give the same numbers.

    Args:
        tokens_per_microbatch: of the run, which may have been found.
    """
    config = config_of(cfg) | {"batch.tokens_per_microbatch": tokens_per_microbatch}
    return {
        "config": {name: value for name, value in config.items() if not is_among(name, _FREE)},
        "packages": versions(),
        "model": {"files": _files_of_model(cfg)},
    }


def facts_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the facts that stand among lines, the first ones first."""
    return [line[1] for line in lines if line[0] == "run"]


def _files_of_model(cfg: Config) -> str:
    """Return a digest of a model's small files and of the sizes of its weights."""
    folder = Path(cfg.model.path)
    found = hashlib.sha256()
    if not folder.is_dir():
        return cfg.model.path  # of the hub
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            found.update(f"{path.name} {path.stat().st_size} ".encode())
            found.update(path.read_bytes() if path.suffix == ".json" else b"")
    return found.hexdigest()[:16]


# --------------------------------------------------------------------------- what was decided


@dataclass
class Decided:
    """What was decided on one replica from some version on."""

    stretches: dict[tuple[str, int, int], list[Line]] = field(default_factory=dict)
    """{(kind, version, how many of these came before): its lines, the first says what it is}."""
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    """{step: {group: digest}}."""
    moves: list[Line] = field(default_factory=list)
    """Of all replicas in the book that they share, from the run's first on."""
    begun: int = 0
    """How many of these were made with weights before that version."""


def decided(files: Sequence[Sequence[Line]], *, replica: int, version: int) -> Decided:
    """Return what was decided on a replica with weights of a version and later ones.

    Args:
        files: lines of all replicas, in their order.
    """
    found = Decided(moves=moves_of(files))
    seen = Counter[tuple[str, int]]()
    stretch: list[Line] = []
    for line in files[replica]:
        kind = line[0]
        if kind == "closed":
            found.digests[line[1]] = line[2]
        elif kind in STRETCHES:
            what = kind, line[1]
            stretch = [line]
            found.stretches[*what, seen[what]] = stretch
            seen[what] += 1
        elif kind != "run":
            stretch.append(line)
    found.begun = sum(move[1] < version for move in found.moves)  # a Move's second is its version
    return found


def moves_of(files: Iterable[Sequence[Line]]) -> list[Line]:
    """Return the moves of a shared book, up to the first that no replica wrote down."""
    by_number = {
        line[2]: line[3] for lines in files for line in lines if line[0] == "book" and line[3]
    }
    end = next(number for number in count(1) if number not in by_number)
    return [by_number[number] for number in range(1, end)]


def agreeing(files: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """Return of each replica the lines before the first that names a move which nobody wrote down:
    a replica that is killed right after its move may leave others that saw it."""
    known = len(moves_of(files))
    found = []
    for lines in files:
        beyond = (at for at, line in enumerate(lines) if line[0] == "book" and line[2] > known)
        found.append(list(lines[: next(beyond, len(lines))]))
    return found


# --------------------------------------------------------------------------- to be repeated


def check_schedule(cfg: Config, *, tokens_per_microbatch: int | None = None) -> list[list[Line]]:
    """Return the lines of the run that rollout.replay_schedule names, of each replica.

    Args:
        tokens_per_microbatch: of this run; None: as its config says.
    Raises: Refusal naming the first thing by which its decisions cannot be repeated.
    """
    from spmdrl.world.axes import axes_of  # here: with torch, which the check of settings has not

    if why := unrepeatable(cfg):
        raise Refusal(f"{_REPLAY}: {cfg.rollout.replay_schedule} with {why}")
    folder = Path(cfg.rollout.replay_schedule).expanduser()
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    names = sorted(path.name for path in folder.glob("replica_*.jsonl"))
    if not names:
        raise Refusal(
            f"{_REPLAY}: {folder} holds no decisions (looked from {Path.cwd()}); name the "
            "output_dir of a run whose engines worked ahead, or had an environment"
        )
    replicas = axes_of(cfg).replicas
    journals = [journal_of(folder, replica=i, replicas=replicas) for i in range(replicas)]
    for journal in journals:
        if journal.path.name not in names:
            raise Refusal(
                f"{_REPLAY}: {folder} has {', '.join(names)} and not {journal.path.name}: take as "
                "many engine replicas (layout.world_size, trainer_ranks, inference_tp) as that run "
                "had"
            )
    tokens = tokens_per_microbatch or cfg.batch.tokens_per_microbatch
    now = facts(cfg, tokens_per_microbatch=tokens)
    files = []
    for journal in journals:
        lines, problem = read_lines(journal)
        if problem:
            raise Refusal(f"{_REPLAY}: {problem}")
        _check_facts(journal.path, lines, now)
        _check_whole(journal.path, lines, steps=cfg.steps)
        files.append(lines)
    for journal, lines, known in zip(journals, files, agreeing(files)):
        if len(known) < len(lines):
            raise Refusal(
                f"{_REPLAY}: {journal.path} names move {len(moves_of(files)) + 1} of the shared "
                "book, which no replica's file has: these files are not of one run"
            )
    return files


def _check_facts(path: Path, lines: Sequence[Line], now: dict[str, Any]) -> None:
    """Refuse decisions that were made under other circumstances. Raises: Refusal."""
    known = facts_of(lines)
    if not known:
        raise Refusal(f"{_REPLAY}: {path} does not say of what run it is")
    if known[1:]:
        changed = differences(known[0], known[1])
        raise Refusal(
            f"{_REPLAY}: {path}: the run was resumed with other settings than it began with, and "
            "cannot be repeated in one: " + "; ".join(map(str, changed))
        )
    if found := differences(known[0], now):
        raise Refusal(
            f"{_REPLAY}: the decisions in {path} give the same numbers only where these are "
            "alike:\n  " + "\n  ".join(map(str, found))
        )


def _check_whole(path: Path, lines: Sequence[Line], *, steps: int) -> None:
    """Refuse decisions that do not go from the first step to the last. Raises: Refusal."""
    stretches = decided([lines], replica=0, version=0).stretches
    for version in range(steps):
        for number in range(_FILLS_PER_VERSION):
            own = stretches.get(("fill", version, number), [])
            if not own or own[-1][0] != "end":
                raise Refusal(
                    f"{_REPLAY}: {path} breaks off at step {version} of {steps}: the run has not "
                    "reached its end, or the file was cut"
                )
