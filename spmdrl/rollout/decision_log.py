"""What time decided in a run, on disk: one file per engine replica, a line for each decision.

    OUTPUT_DIR/schedule/replica_0_of_2.jsonl

A line is a JSON list and, behind a tab, the first 16 digits of the sha256 of that text and of what
stands so in the line before: a line that is changed, missing or moved is found. The lists:

    ["run", {...}]              what must be alike for the same decisions to give the same numbers
    ["fill", version, last]     a stretch of generation begins, with these weights, up to this step
    ["evaluate", version, -1]   the same of an evaluation
    ["came", n, keys, failed]   after n engine steps of the stretch these answers of workers were
                                taken, in this order; failed: {key: [kind, message]}
    ["book", n, number, move]   the moves of the shared book up to this number were seen; the last
                                was this replica's own, unless it is null
    ["pause", n]                generation stops for new weights
    ["end", n]                  the stretch is over
    ["closed", step, digests]   of each group of this replica in the step: what it came to

A line is handed to the system as soon as its decision is made, before anything follows from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from spmdrl import run_files
from spmdrl.config import Config, flatten
from spmdrl.config.fields import replay_folder
from spmdrl.errors import Refusal
from spmdrl.imports import attempt, versions
from spmdrl.run_folder import make_folder, open_file, replace_file

FORMAT = 1
FOLDER = "schedule"
"""Of the files, in a run's output_dir."""
ASTRAY = "decide_anew"
"""File beside them: a resumed run could not make them again, and the next start is not to try."""
FILE_NAME = re.compile(r"replica_(\d+)_of_(\d+)\.jsonl")
STRETCHES = ("fill", "evaluate")
_FILLS_PER_VERSION = 2  # of train.py: the step itself, and those ahead

Line = list[Any]

# Fields that change where, how fast or how safely a run goes, or what it shows.
_FREE = (
    "output_dir",
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
)
_FREE_SECTIONS = ("report.", "checkpoint.")


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


def digest_of(before: str, text: str) -> str:
    """Return what stands behind a line's text, given that of the line before."""
    return hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:16]


class Writer:
    """Appends lines to a replica's file, from those that stay on.

    Args:
        lines: what the file holds then; it is written anew where it holds others.
    Raises: OSError.
    """

    def __init__(self, path: Path, lines: Sequence[Line]):
        output = path.parents[1]
        make_folder(path.parent, within=output)
        self.nbytes = 0
        self._digest = ""
        data = b"".join(map(self._packed, lines))
        if not path.exists() or path.read_bytes() != data:
            replace_file(path, data, within=output)
        self._file = open_file(path, "ab", within=output, buffering=0)

    def write(self, line: Line) -> None:
        """Append a line; what ends this process leaves it there."""
        data = self._packed(line)
        while data:
            data = data[self._file.write(data) :]

    def _packed(self, line: Line) -> bytes:
        text = json.dumps(line, separators=(",", ":"))
        self._digest = digest_of(self._digest, text)
        data = f"{text}\t{self._digest}\n".encode()
        self.nbytes += len(data)
        return data


def read_lines(path: Path) -> tuple[list[Line], str]:
    """Return the lines of a file up to the first that is not as it was written, and what is wrong
    with that; empty for nothing. Raises: OSError."""
    lines: list[Line] = []
    before = ""
    for number, own in enumerate(run_files.read_lines(path, run_files.DECISIONS), 1):
        if not own.endswith(b"\n"):
            return lines, f"{path}: line {number} breaks off"
        line = own[:-1].decode(errors="replace")
        text, _, digest = line.rpartition("\t")
        made, error = attempt(partial(run_files.json_of, text, place=f"{path}: line {number}"))
        if digest != digest_of(before, text) or error or not isinstance(made, list):
            return lines, (
                f"{path}: line {number} does not follow from those before it: it was changed, or "
                f"lines are missing before it: {line:.100}"
            )
        if why := problem_of(made):
            return lines, f"{path}: line {number} {why}: {line:.100}"
        lines.append(made)
        before = digest
    return lines, ""


def problem_of(line: Line) -> str:
    """Return what is wrong with a line's parts; empty for nothing."""
    kind = line[0] if line and isinstance(line[0], str) else ""
    forms = _FORMS.get(kind)
    if forms is None:
        return "is of no kind that is known"
    if len(line) - 1 != len(forms):
        return f"has {len(line) - 1} parts after {kind!r}, and must have {len(forms)}"
    wrong = [part for part, is_right in zip(line[1:], forms) if not is_right(part)]
    return f"holds {wrong[0]!r:.60}, which {kind!r} cannot have there" if wrong else ""


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _are_whole(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_whole, values))


def _are_keys(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, (int, str)) for v in values)


def _are_failures(values: Any) -> bool:
    return isinstance(values, dict) and all(
        isinstance(told, list) and len(told) == 2 and all(isinstance(part, str) for part in told)
        for told in values.values()
    )


def _is_move(value: Any) -> bool:
    if value is None:
        return True
    is_list = isinstance(value, list) and len(value) == 6
    return is_list and _are_whole(value[:4]) and all(map(_are_whole, value[4:]))


def _are_digests(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(v, str) for v in values.values())


def _are_facts(values: Any) -> bool:
    return isinstance(values, dict) and all(
        isinstance(values.get(name, {}), dict) for name in ("versions", "settings")
    )


_FORMS: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "run": (_are_facts,),
    "fill": (_is_whole, _is_whole),
    "evaluate": (_is_whole, _is_whole),
    "came": (_is_whole, _are_keys, _are_failures),
    "book": (_is_whole, _is_whole, _is_move),
    "pause": (_is_whole,),
    "end": (_is_whole,),
    "closed": (_is_whole, _are_digests),
}
"""{kind of a line: what each of its parts must be}."""


def file_of(folder: Path, *, replica: int, replicas: int) -> Path:
    """Return where the decisions of a replica are."""
    return folder / f"replica_{replica}_of_{replicas}.jsonl"


def until_version(lines: Sequence[Line], version: int) -> list[Line]:
    """Return the lines before the first stretch with weights of a version, or later ones."""
    for at, line in enumerate(lines):
        if line[0] in STRETCHES and line[1] >= version:
            return list(lines[:at])
    return list(lines)


# --------------------------------------------------------------------------- what is known of a run


def facts(cfg: Config, *, tokens_per_microbatch: int) -> dict[str, Any]:
    """Return what must be alike for the same decisions to give the same numbers.

    Args:
        tokens_per_microbatch: of the run, which may have been found.
    """
    own = json.loads(json.dumps(flatten(cfg)))
    own |= {"batch.tokens_per_microbatch": tokens_per_microbatch}
    settings = {
        name: value
        for name, value in own.items()
        if name not in _FREE and not name.startswith(_FREE_SECTIONS)
    }
    return {
        "format": FORMAT,
        "versions": versions(),
        "model": _files_of_model(cfg),
        "replicas": _replicas(cfg),
        "settings": settings,
    }


def _replicas(cfg: Config) -> int:
    from spmdrl.world.axes import axes_of  # here: with torch, which the check of settings has not

    return axes_of(cfg).replicas


def _files_of_model(cfg: Config) -> str:
    """Return what the files of a model are known by: what small ones say, and sizes of weights."""
    folder = Path(cfg.model.path)
    found = hashlib.sha256()
    if not folder.is_dir():
        return cfg.model.path  # of the hub
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            found.update(f"{path.name} {path.stat().st_size} ".encode())
            found.update(path.read_bytes() if path.suffix == ".json" else b"")
    return found.hexdigest()[:16]


def differences(there: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs between the facts of two runs, one line each with both values."""
    pairs = [
        *((name, there.get(name), now.get(name)) for name in ("format", "model", "replicas")),
        *_pairs("version of ", there, now, name="versions"),
        *_pairs("", there, now, name="settings"),
    ]
    return [f"{name}: {old!r} there, {new!r} now" for name, old, new in pairs if old != new]


def _pairs(
    prefix: str, there: dict[str, Any], now: dict[str, Any], *, name: str
) -> list[tuple[str, Any, Any]]:
    old = there.get(name, {})
    new = now[name]
    return [(prefix + key, old.get(key), new.get(key)) for key in sorted({*old, *new})]


# --------------------------------------------------------------------------- what was decided


@dataclass
class Decided:
    """What was decided on one replica from some version on."""

    stretches: dict[tuple[str, int, int], list[Line]] = field(default_factory=dict)
    """{(kind, version, how many of these came before): its lines, the first says what it is}."""
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    """{step: {group: what it came to}}."""
    moves: list[bytes] = field(default_factory=list)
    """Of all replicas in the book that they share, from the run's first on."""
    begun: int = 0
    """Of these such as were made with weights before that version."""


def made_of(files: Sequence[Sequence[Line]], *, replica: int, version: int) -> Decided:
    """Return what was decided on a replica with weights of a version and later ones.

    Args:
        files: lines of all replicas, in their order.
    """
    found = Decided()
    seen = Counter[tuple[str, int]]()
    moves = moves_of(files)
    own: list[Line] = []
    for line in files[replica]:
        if line[0] == "closed":
            found.digests[line[1]] = line[2]
        elif line[0] in STRETCHES:
            what = line[0], line[1]
            own = found.stretches[*what, seen[what]] = []
            seen[what] += 1
        if line[0] not in ("run", "closed"):
            own.append(line)
    found.moves = [json.dumps(move).encode() for move in moves]
    found.begun = sum(move[1] < version for move in moves)  # a Move's second is its version
    return found


def moves_of(files: Iterable[Sequence[Line]]) -> list[Line]:
    """Return the moves of a shared book, up to the first that no replica wrote down."""
    by_number = {
        line[2]: line[3] for lines in files for line in lines if line[0] == "book" and line[3]
    }
    return [by_number[k] for k in range(1, next(k for k in count(1) if k not in by_number))]


def agreeing(files: Sequence[Sequence[Line]]) -> list[list[Line]]:
    """Return of each replica the lines that ask for no move which nobody wrote down: a replica that
    is killed right after a move may leave others who saw it."""
    known = len(moves_of(files))
    found = []
    for lines in files:
        beyond = (at for at, line in enumerate(lines) if line[0] == "book" and line[2] > known)
        found.append(list(lines[: next(beyond, len(lines))]))
    return found


# --------------------------------------------------------------------------- to be made again


def check_schedule(cfg: Config, *, tokens_per_microbatch: int | None = None) -> list[list[Line]]:
    """Return the lines of the run that rollout.replay_schedule names, of each replica.

    Args:
        tokens_per_microbatch: of this run; None: as its config says.
    Raises: Refusal naming the first thing by which its decisions cannot be made again.
    """
    what = "rollout.replay_schedule"
    if why := unrepeatable(cfg):
        raise Refusal(f"{what}: {cfg.rollout.replay_schedule} with {why}")
    folder = Path(cfg.rollout.replay_schedule).expanduser()
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    names = sorted(path.name for path in folder.glob("replica_*.jsonl"))
    if not names:
        raise Refusal(
            f"{what}: {folder} holds no decisions (looked from {Path.cwd()}); name the output_dir "
            "of a run whose engines worked ahead, or had an environment"
        )
    replicas = _replicas(cfg)
    paths = [file_of(folder, replica=r, replicas=replicas) for r in range(replicas)]
    missing = [path.name for path in paths if path.name not in names]
    if missing:
        raise Refusal(
            f"{what}: {folder} has {', '.join(names)} and not {missing[0]}: take as many engine "
            "replicas (layout.world_size, trainer_ranks, inference_tp) as that run had"
        )
    tokens = tokens_per_microbatch or cfg.batch.tokens_per_microbatch
    now = facts(cfg, tokens_per_microbatch=tokens)
    files = []
    for path in paths:
        lines, wrong = read_lines(path)
        if wrong:
            raise Refusal(f"{what}: {wrong}")
        _check_facts(path, lines, now)
        _check_whole(path, lines, steps=cfg.steps)
        files.append(lines)
    if short := [path for path, a, b in zip(paths, files, agreeing(files)) if len(a) != len(b)]:
        raise Refusal(
            f"{what}: {short[0]} names move {len(moves_of(files)) + 1} of the shared book, which "
            "no replica's file has: these files are not of one run"
        )
    return files


def _check_facts(path: Path, lines: Sequence[Line], now: dict[str, Any]) -> None:
    """Refuse decisions that were made under other circumstances. Raises: Refusal."""
    known = [line[1] for line in lines if line[0] == "run"]
    if not known:
        raise Refusal(f"rollout.replay_schedule: {path} does not say of what run it is")
    if known[0].get("format") == FORMAT and known[1:]:
        changed = differences(known[0], known[1])
        raise Refusal(
            f"rollout.replay_schedule: {path}: the run was taken up otherwise than it began, and "
            "cannot be made again in one: " + "; ".join(changed)
        )
    if found := differences(known[0], now):
        raise Refusal(
            f"rollout.replay_schedule: the decisions in {path} give the same numbers only where "
            "these are alike:\n  " + "\n  ".join(found)
        )


def _check_whole(path: Path, lines: Sequence[Line], *, steps: int) -> None:
    """Refuse decisions that do not go from the first step to the last. Raises: Refusal."""
    made = made_of([lines], replica=0, version=0).stretches
    for version in range(steps):
        for number in range(_FILLS_PER_VERSION):
            own = made.get(("fill", version, number), [])
            if not own or own[-1][0] != "end":
                raise Refusal(
                    f"rollout.replay_schedule: {path} breaks off at step {version} of {steps}: the "
                    "run has not come to its end, or the file was cut"
                )
