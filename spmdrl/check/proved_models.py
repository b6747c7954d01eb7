"""Records of checks of models with their versions. Runs name a model that has no such proof."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from spmdrl.config import Config
from spmdrl.imports import versions
from spmdrl.model.transformers_internals import has_towers

Verdict = Literal["proved", "refused", "WRONG", "not finished"]


@dataclass(frozen=True)
class Line:
    """One check of a model, and its result."""

    name: str
    verdict: Verdict
    note: str
    """The measurement, or why it is refused or wrong."""
    seconds: float
    kind: str = ""
    """Mode of a stream into an engine: traced or reload."""

    def __str__(self) -> str:
        says = f"{self.verdict}: {self.note}" if self.note else self.verdict
        return f"{self.name:<24} {says}  ({self.seconds:.1f} s)"


SHIPPED = Path(__file__).with_name("proved_models.jsonl")
"""Records of the families in docs/models.md."""


def own_records() -> Path:
    """Return the file with the records of this user on this machine."""
    return Path.home() / ".cache" / "spmdrl" / "checked.jsonl"


@dataclass(frozen=True)
class Record:
    """All lines of one model."""

    model: str
    """Family or folder, as the command line names it."""
    model_type: str
    class_name: str
    """In transformers; empty if the model could not be built."""
    date: str
    """ISO day."""
    versions: dict[str, str]
    lines: tuple[Line, ...]

    @property
    def is_proved(self) -> bool:
        """Return whether one rank trains it right, an engine serves it, and nothing is wrong or
        unfinished."""
        verdicts = {line.name: line.verdict for line in self.lines}
        needed = [v for n, v in verdicts.items() if n not in _OPTIONAL and "engine" not in n]
        engines = [v for n, v in verdicts.items() if "engine" in n]
        return (
            not {"WRONG", "not finished"} & {*verdicts.values()}
            and {*needed} == {"proved"}
            and (not engines or "proved" in engines)
        )

    @property
    def is_unfinished(self) -> bool:
        """Return whether nothing is wrong, and a line took longer than its time limit."""
        verdicts = {line.verdict for line in self.lines}
        return "not finished" in verdicts and "WRONG" not in verdicts


_OPTIONAL = ("tp 2", "cp 2", "ep 2", "LoRA", "resume on dp 2")
"""Lines that may be refused, because a run that needs them is refused at its start too."""


def record_of(model: str, hf_config: Any, lines: Iterable[Line], *, class_name: str) -> Record:
    """Return a record of today with the installed versions."""
    return Record(
        model=model,
        model_type=_type_of(hf_config),
        class_name=class_name,
        date=datetime.date.today().isoformat(),
        versions=versions(),
        lines=tuple(lines),
    )


def _type_of(hf_config: Any) -> str:
    """Return the model type. A model with a tower and its text part have different ones."""
    own = hf_config if has_towers(hf_config) else hf_config.get_text_config()
    return own.model_type


def keep(record: Record, path: Path) -> None:
    """Put a record into a file, in place of an earlier one of the model."""
    lines = {one.model: json.dumps(asdict(one)) + "\n" for one in [*read(path), record]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(text for _, text in sorted(lines.items())))
    partial.replace(path)


def read(path: Path) -> list[Record]:
    """Return the records of a file; none if it does not exist."""
    plain = map(json.loads, path.read_text().splitlines() if path.is_file() else ())
    return [Record(**own | {"lines": tuple(Line(**x) for x in own["lines"])}) for own in plain]


def unchecked_policy(cfg: Config) -> str:
    """Return why the policy's code does not count as proved with the installed versions, with the
    command that proves it; empty if it does."""
    from spmdrl.model.load import hf_config_of

    model_type = _type_of(hf_config_of(cfg.model))
    reason = unchecked(model_type, [*read(own_records()), *read(SHIPPED)])
    return f"{reason}: python -m spmdrl check {cfg.model.path}" if reason else ""


def pushed_by(model_type: str, *, engine_kind: str) -> str:
    """Return how weights of a family reach an engine by the shipped records: traced or reload;
    empty where there is no record."""
    for record in read(SHIPPED):
        for line in record.lines:
            if record.model_type == model_type and line.name == f"{engine_kind} engine":
                return line.kind
    return ""


def unchecked(model_type: str, records: Sequence[Record]) -> str:
    """Return why a model's code does not count as proved with the installed versions; empty if it
    does."""
    own = [record for record in records if record.model_type == model_type]
    installed = versions()
    same = [record for record in own if record.versions == installed]
    if any(record.is_proved for record in same):
        return ""
    if same:
        wrong = next((str(line) for line in same[0].lines if line.verdict != "proved"), "")
        return f"{model_type} was checked and is not proved ({wrong})"
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    other = " (only with other versions)" if own else ""
    return f"{model_type} was never checked{other} with {named}; it takes some minutes"
