"""The decisions of a run that depend on timing, on disk: a sealed journal for each engine replica.

    OUTPUT_DIR/schedule/replica_0_of_2.jsonl

A line is a JSON object with one kind of decision and its parts. A stretch is one call that
generates, for training or for an evaluation. n counts the engine steps since the stretch began.

    {"run": [facts]}                two runs need equal facts to get equal numbers
    {"fill": [version, last]}       a stretch begins: it samples steps up to `last`
    {"evaluate": [version, -1]}     a stretch begins: it is an evaluation
    {"answers": [n, keys, failed, ended]}   the replica took the workers' answers to these keys, in
                                    this order; failed: {key: [kind, message]}; ended: {key: [reward
                                    or null, metrics, parts, extras]} of agents, and, with a judge,
                                    of reward functions
    {"agents": [n, keys]}           the agents of these episodes begin, or begin again
    {"ask": [n, ...]}               the replica took a request of an agent or to the judge, with the
                                    fields of Ask
    {"book": [n, number, move]}     the replica played the shared book's moves up to this number;
                                    move: the last one if this replica made it, else null
    {"pause": [n]}                  generation stops for new weights
    {"end": [n]}                    the stretch ends
    {"groups": [step, digests]}     {key: digest} of this replica's groups of a step

In memory a line is a list, [kind, *parts]. A line is written as soon as its decision is made,
before the decision has any effect.
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
from spmdrl.same_run.data_files import data_digests
from spmdrl.same_run.differences import config_of, differences, is_among
from spmdrl.value_forms import (
    Form,
    are_texts,
    are_wholes,
    is_list,
    is_number,
    is_object,
    is_text,
    is_whole,
)

FOLDER = "schedule"
"""Name of the folder of these files in a run's output_dir."""
DIVERGED_FILE = "decide_again"
"""An empty file in this folder. A resumed run that could not repeat the decisions writes it; the
next start then makes new decisions."""
STRETCHES = ("fill", "evaluate")
_REPLAY = "rollout.replay_schedule"

Line = list[Any]

_MAY_DIFFER = (
    "dry_run",
    "layout.wait_timeout_s",
    "layout.startup_timeout_s",
    "stream.delta",
    "stream.full_every",
    "stream.gbit_per_s",
    "stream.verify_every",
    "stream.max_logprob_gap",
    "rollout.replay_schedule",
    "rollout.record.every",
    "rollout.agent_timeout_s",
    "rollout.agents_at_once",
    "rewards.workers",
    "rewards.timeout_s",
    "model.path",  # the model's files are compared instead
    "report.",
    "checkpoint.",
)
"""Fields of the config that change neither decisions nor numbers."""
_TIMES_OF_CHECKPOINTS = ("checkpoint.every_steps", "checkpoint.keep.best", "checkpoint.keep.mode")


def is_timed(cfg: Config) -> bool:
    """Return whether timing decides which sequences engines compute together, or which groups a
    step gets."""
    schedule = cfg.rollout.schedule
    is_early = schedule.in_flight or schedule.leaves_unfinished or bool(schedule.dynamic)
    is_sampled = cfg.objective.samples and not replay_folder(cfg)
    own = cfg.rewards.judge.is_on or cfg.rollout.has_agent
    has_answers = own or bool(cfg.environment_fields())
    return is_sampled and (is_early or schedule.balance == "steal" or has_answers)


def repeat_problem(cfg: Config) -> str:
    """Return the setting that makes numbers differ although the decisions are equal, and why.

    Returns: an empty text if there is no such setting.
    """
    if not cfg.deterministic:
        return "deterministic: false, so that sums do not repeat; set it to true"
    if not cfg.engine.seed_per_request:
        return (
            "engine.seed_per_request: false, so that samples are drawn from the engine's own "
            "generator; set it to true"
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
    """Return the journal row of a line."""
    return {line[0]: line[1:]}


def read_lines(journal: Journal) -> tuple[list[Line], str]:
    """Read the lines of a journal up to the first damaged one.

    Returns: the lines, and what is wrong with the damaged one; empty if no line is damaged.
    Raises: OSError.
    """
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
    """Return what is wrong with a row; empty if nothing is."""
    kind = next(iter(row), "")
    forms = _FORMS.get(kind)
    parts = row.get(kind)
    if forms is None or len(row) > 1:
        return "is of an unknown kind"
    if not isinstance(parts, list) or len(parts) != len(forms):
        return f"must have a list of {len(forms)} parts for {kind!r}"
    for part, is_right in zip(parts, forms):
        if not is_right(part):
            return f"holds {part!r:.60}, which is no valid part of {kind!r}"
    return ""


def _are_keys(values: Any) -> bool:
    return is_list(values) and all(isinstance(key, (int, str)) for key in values)


def _are_failures(values: Any) -> bool:
    if not is_object(values):
        return False
    return all(are_texts(failure) and len(failure) == 2 for failure in values.values())


def _are_ended(values: Any) -> bool:
    return is_object(values) and all(map(_is_end, values.values()))


def _is_end(value: Any) -> bool:
    if not is_list(value) or len(value) != 4:
        return False
    reward, metrics, parts, extras = value
    if not all(map(is_object, (metrics, parts, extras))):
        return False
    numbers = [0 if reward is None else reward, *metrics.values(), *parts.values()]
    return all(map(is_number, numbers)) and are_texts([*extras.values()])


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
    "answers": (is_whole, _are_keys, _are_failures, _are_ended),
    "agents": (is_whole, are_texts),
    "ask": (
        *(is_whole, is_text, is_whole, is_whole, are_wholes),
        *(is_whole, is_whole, are_texts, is_number, is_whole),
    ),
    "book": (is_whole, is_whole, _is_move),
    "pause": (is_whole,),
    "end": (is_whole,),
    "groups": (is_whole, _are_digests),
}
"""{kind of a line: the form of each of its parts}."""


def until_version(lines: Sequence[Line], version: int) -> list[Line]:
    """Return the lines before the first stretch with weights of a version or a later one."""
    for at, line in enumerate(lines):
        if line[0] in STRETCHES and line[1] >= version:
            return list(lines[:at])
    return list(lines)


# --------------------------------------------------------------------------- facts of a run


def facts(cfg: Config, *, tokens_per_microbatch: int) -> dict[str, dict[str, Any]]:
    """Return everything on which a run's numbers depend, apart from the decisions.

    Args:
        tokens_per_microbatch: the run's value. With 0 in the config it was measured at start.
    """
    config = config_of(cfg) | {"batch.tokens_per_microbatch": tokens_per_microbatch}
    compared = {name: value for name, value in config.items() if not is_among(name, _MAY_DIFFER)}
    if cfg.rollout.schedule.kv_cache == "keep":  # a checkpoint has keys and values computed again
        compared |= {name: config[name] for name in _TIMES_OF_CHECKPOINTS}
    return {
        "config": compared,
        "packages": versions(),
        "model": {"files": _files_of_model(cfg)},
        "data": data_digests(cfg),
    }


def facts_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the facts in lines: those of the first start, then those of starts with others."""
    return [line[1] for line in lines if line[0] == "run"]


def _files_of_model(cfg: Config) -> str:
    """Return a digest of a model's small files and of the sizes of its weights."""
    folder = Path(cfg.model.path)
    digest = hashlib.sha256()
    if not folder.is_dir():
        return cfg.model.path  # a name on the hub
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes() if path.suffix == ".json" else b"")
    return digest.hexdigest()[:16]


# --------------------------------------------------------------------------- past decisions


@dataclass
class PastDecisions:
    """The recorded decisions of one replica, for a run that begins with weights of some version."""

    stretches: dict[tuple[str, int, int], list[Line]] = field(default_factory=dict)
    """{(kind, version, number of earlier stretches of that kind and version): lines}."""
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    """{step: {key of a group: digest}}."""
    moves: list[Line] = field(default_factory=list)
    """Moves of all replicas in the book that they share, since the run began."""
    begun: int = 0
    """Number of these moves that were made with weights before that version."""


def past_decisions(files: Sequence[Sequence[Line]], *, replica: int, version: int) -> PastDecisions:
    """Return the recorded decisions of a replica.

    Args:
        files: lines of each replica, in order.
        replica: index of the replica.
        version: version of the weights that the run begins or continues with.
    """
    past = PastDecisions(moves=moves_of(files))
    counts = Counter[tuple[str, int]]()
    stretch: list[Line] = []
    for line in files[replica]:
        kind = line[0]
        if kind == "groups":
            past.digests[line[1]] = line[2]
        elif kind in STRETCHES:
            name = (kind, line[1])
            stretch = [line]
            past.stretches[*name, counts[name]] = stretch
            counts[name] += 1
        elif kind != "run":
            stretch.append(line)
    # The second field of a Move is its version. `Move` itself needs torch.
    past.begun = sum(move[1] < version for move in past.moves)
    return past


def moves_of(files: Iterable[Sequence[Line]]) -> list[Line]:
    """Return the moves of a shared book, up to the first that no journal has."""
    by_number = {}
    for lines in files:
        for line in lines:
            if line[0] == "book" and line[3]:
                by_number[line[2]] = line[3]
    end = next(number for number in count(1) if number not in by_number)
    return [by_number[number] for number in range(1, end)]


def without_lost_moves(files: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """Return the lines of each replica before the first line about a move that no journal has.

    A replica may be killed after it made a move and before it wrote the line. Other replicas may
    have seen the move.
    """
    num_moves = len(moves_of(files))
    valid = []
    for lines in files:
        lost = (at for at, line in enumerate(lines) if line[0] == "book" and line[2] > num_moves)
        valid.append(list(lines[: next(lost, len(lines))]))
    return valid


# --------------------------------------------------------------------------- repeat another run


def check_schedule(cfg: Config, *, tokens_per_microbatch: int | None = None) -> list[list[Line]]:
    """Return each replica's lines of the run that rollout.replay_schedule names.

    Args:
        tokens_per_microbatch: the value of this run; None takes it from the config.
    Raises: Refusal naming the first reason why this run cannot repeat the decisions.
    """
    # Imported here, since it imports torch, and the check of settings works without torch.
    from spmdrl.world.axes import axes_of

    problem = repeat_problem(cfg)
    if not problem and cfg.rollout.schedule.kv_cache == "keep":
        problem = (
            "rollout.schedule.kv_cache: keep; a resumed run computes keys and values again, and "
            "decisions do not say at which step; set it to recompute"
        )
    if problem:
        raise Refusal(f"{_REPLAY}: {cfg.rollout.replay_schedule} with {problem}")
    folder = Path(cfg.rollout.replay_schedule).expanduser()
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    names = sorted(path.name for path in folder.glob("replica_*.jsonl"))
    if not names:
        raise Refusal(
            f"{_REPLAY}: {folder} holds no decisions (looked from {Path.cwd()}); name the "
            "output_dir of a run whose engines worked ahead or that had an environment or an agent"
        )
    replicas = axes_of(cfg).replicas
    journals = [journal_of(folder, replica=i, replicas=replicas) for i in range(replicas)]
    for journal in journals:
        if journal.path.name not in names:
            raise Refusal(
                f"{_REPLAY}: {folder} has {', '.join(names)} and not {journal.path.name}: use as "
                "many engine replicas (layout.world_size, trainer_ranks, inference_tp) as that run"
            )
    tokens = tokens_per_microbatch or cfg.batch.tokens_per_microbatch
    now = facts(cfg, tokens_per_microbatch=tokens)
    files = []
    for journal in journals:
        lines, problem = read_lines(journal)
        if problem:
            raise Refusal(f"{_REPLAY}: {problem}")
        _check_facts(journal.path, lines, now)
        # train.py samples the step itself and then, with a lag, the steps ahead.
        _check_whole(journal.path, lines, steps=cfg.steps, fills=2 if cfg.lag else 1)
        files.append(lines)
    for journal, lines, valid in zip(journals, files, without_lost_moves(files)):
        if len(valid) < len(lines):
            raise Refusal(
                f"{_REPLAY}: {journal.path} names move {len(moves_of(files)) + 1} of the shared "
                "book, which no replica's file has: the files are not from one run"
            )
    return files


def _check_facts(path: Path, lines: Sequence[Line], now: dict[str, Any]) -> None:
    """Refuse decisions of a run with other facts. Raises: Refusal."""
    known = facts_of(lines)
    if not known:
        raise Refusal(f"{_REPLAY}: {path} has no line that describes its run")
    if len(known) > 1:
        changed = differences(known[0], known[1])
        raise Refusal(
            f"{_REPLAY}: {path}: the run was resumed with other settings, and a single run cannot "
            "repeat it: " + "; ".join(map(str, changed))
        )
    if changed := differences(known[0], now):
        raise Refusal(
            f"{_REPLAY}: to repeat the decisions in {path}, these must be equal:\n  "
            + "\n  ".join(map(str, changed))
        )


def _check_whole(path: Path, lines: Sequence[Line], *, steps: int, fills: int) -> None:
    """Refuse decisions that do not cover all steps, each of so many fills. Raises: Refusal."""
    stretches = past_decisions([lines], replica=0, version=0).stretches
    for version in range(steps):
        for number in range(fills):
            own = stretches.get(("fill", version, number), [])
            if not own or own[-1][0] != "end":
                raise Refusal(
                    f"{_REPLAY}: {path} breaks off at step {version} of {steps}: the run did not "
                    "reach its end, or the file was cut"
                )
