"""Write the page of one or more runs: one HTML file with all its data, styles and code.

The data of a part (a run, a step's rollouts) is JSON, compressed and in base64, in a `script`
element that no browser runs. The page unpacks a part when it is shown. No text of a run is ever
part of the HTML.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from spmdrl.config import Config
from spmdrl.imports import attempt, version_text
from spmdrl.report.bottleneck import explain
from spmdrl.report.glossary import GLOSSARY
from spmdrl.report.page.folder import (
    Notes,
    config_of,
    config_values,
    environment_values,
    evaluations,
    forecast_of,
    metric_tables,
    path_causes,
    step_times,
)
from spmdrl.report.page.layer_norms import layer_norms
from spmdrl.report.page.timelines import newest_steps, timeline_chunk
from spmdrl.report.timeline import RankStep
from spmdrl.run_folder import rename, write_file

if TYPE_CHECKING:
    from spmdrl.report.recorded_groups import GroupReader

PAGE = "page.html"
"""The page's name in a run's output_dir."""
_HERE = Path(__file__).parent
_SCRIPTS = ("vendor/uplot.js", "page.js")
_STYLES = ("vendor/uplot.css", "page.css")
_MIB = 2**20
_KINDS = ("rollouts", "timeline")
"""Parts of a page that there is one of for each step."""


@dataclass(frozen=True)
class PageLimits:
    """How much of recorded rollouts and timelines a page holds."""

    mib: float = 64.0
    """Of each of the two."""
    seconds: float = math.inf
    """For reading each of the two."""


@dataclass(frozen=True)
class RolloutChoice:
    """Which recorded rollouts a page shows, and how it may read them."""

    step: int | None = None
    """None for all steps."""
    group: int | None = None
    """None for all groups of a step."""
    tokenizer: str = ""
    trust_remote_code: bool = False


@dataclass
class RunPage:
    """The page of some runs. It may be written many times; unchanged files are read once.

    Args:
        folders: output_dir of each run.
        plan_of: takes a run's folder and returns the planned bytes of a rank by cause, see
            `as_dict` of tools/plan/text.py; or raises Refusal.
    """

    folders: Sequence[Path]
    limits: PageLimits = PageLimits()
    choice: RolloutChoice = RolloutChoice()
    plan_of: Callable[[Path], dict[str, Any]] | None = None
    _packed: dict[Any, str] = field(default_factory=dict)
    """{(kind, folder, step, states of its files): part of the page}."""
    is_done: bool = False
    """Whether the runs had done all their steps when the page was written."""

    def write(self, out: Path, *, within: Path | None = None, reload_s: float = 0.0) -> str:
        """Write the page, and return what it leaves out, as a sentence or nothing.

        Args:
            within: see `run_folder.open_file`.
            reload_s: seconds after which an open page loads itself again; 0 for never.
        Raises: OSError.
        """
        parts: dict[str, str] = {}
        runs = []
        left_out = ""
        budgets = {name: _Budget(self.limits) for name in _KINDS}
        for number, folder in enumerate(self.folders):
            run, own = self._run(folder, number, budgets)
            runs.append(run)
            parts |= own
        skipped = [f"{b.left_out} of {name}" for name, b in budgets.items() if b.left_out]
        if skipped:
            left_out = (
                f"some steps are left out of the page ({', '.join(skipped)}), for each of which at "
                f"most {self.limits.mib:g} MiB and {self.limits.seconds:g} s are used"
            )
        self.is_done = all(_is_done(run) for run in runs)
        metrics = {name: [one.unit, one.description] for name, one in GLOSSARY.items()}
        main = {"runs": runs, "glossary": metrics, "left_out": left_out, "reload_s": reload_s}
        main |= {"written_unix_s": round(time.time()), "versions": version_text()}
        main |= {"defaults": config_values(Config())}
        text = _html({"main": packed(main), **parts}, title=_title(self.folders))
        draft = out.with_name(f".{out.name}.partial")
        write_file(draft, text, within=within)
        rename(draft, out, within=within)
        return left_out

    def _run(
        self, folder: Path, number: int, budgets: dict[str, _Budget]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a run's description, and its parts by key."""
        notes = Notes()
        cfg = config_of(folder, notes)
        tables = metric_tables(folder, notes)
        evaluated, problems = evaluations(folder, notes)
        parts = {f"problems-{number}": packed(problems)} if evaluated else {}
        rollouts = self._rollouts(folder, notes, budgets["rollouts"])
        by_step = self._ranks(folder, notes)
        timeline = self._timeline(folder, by_step, budgets["timeline"])
        what = "what takes a step's time is not known"
        training = tables["training"]
        path = notes.attempt(what, lambda: path_causes([*by_step.values()], training)) or {}
        for kind, own in (("rollouts", rollouts), ("timeline", timeline)):
            parts |= {f"{kind}-{number}-{step}": part for step, part in own.items()}
        run = {
            "name": folder.name or str(folder),
            "path": str(folder),
            "config": config_values(cfg),
            "environment": environment_values(folder, notes),
            "steps": cfg.steps if cfg else 0,
            "tables": tables,
            "times": step_times(training, path),
            "layer_norms": layer_norms(training),
            "sentence": explain(path, cfg) if cfg else "",
            "evaluations": evaluated,
            "forecast": forecast_of(tables["evaluation"]),
            "rollouts": sorted(rollouts),
            "timeline": sorted(timeline),
            "plan": notes.attempt("the plan of its memory", lambda: self._plan(folder)),
            "notes": notes.lines,
        }
        return run, parts

    def _plan(self, folder: Path) -> dict[str, Any] | None:
        return self.plan_of(folder) if self.plan_of else None

    def _rollouts(self, folder: Path, notes: Notes, budget: _Budget) -> dict[int, str]:
        """Return the parts of the recorded steps, by step, as far as the budget lasts.

        Raises: Refusal for a chosen step that cannot be shown.
        """
        if not any(folder.glob("rollouts/*")) and not any(folder.glob("step_*.parquet")):
            return {}  # without loading the reader
        from spmdrl.report.recorded_groups import GroupReader
        from spmdrl.rollout.recordings import find_recorded

        recorded = notes.attempt("rollouts", lambda: find_recorded(folder))
        if recorded is None:
            return {}
        steps = [*recorded.steps] if self.choice.step is None else [self.choice.step]
        reader = GroupReader(
            recorded,
            tokenizer=self.choice.tokenizer,
            needs_text=True,
            trust_remote_code=self.choice.trust_remote_code,
        )
        found = {}
        for step in budget.steps(steps):
            files = (*recorded.steps.get(step, ()), *recorded.trained.get(step, ()))
            key = ("rollouts", folder, step, _state(files))
            if key not in self._packed:
                self._packed[key] = self._part(reader, step, notes)
            if budget.takes(self._packed[key]):
                found[step] = self._packed[key]
        return found

    def _ranks(self, folder: Path, notes: Notes) -> dict[int, list[RankStep]]:
        """Return {step: what its ranks did}, of the newest steps that fit."""
        what = "the timeline is not shown"
        most = int(self.limits.mib * _MIB)
        read = notes.attempt(what, lambda: newest_steps(folder, most_bytes=most))
        if read is None:
            return {}
        by_step, is_whole = read
        if not is_whole:
            notes.add(
                f"the timeline has more than {self.limits.mib:g} MiB: its newest steps are shown"
            )
        return by_step

    def _timeline(
        self, folder: Path, by_step: dict[int, list[RankStep]], budget: _Budget
    ) -> dict[int, str]:
        """Return the parts of the steps that ranks recorded, by step."""
        found = {}
        for step in budget.steps([*by_step]):
            ranks = by_step[step]
            key = ("timeline", folder, step, *((one.rank, one.began_unix_s) for one in ranks))
            if key not in self._packed:
                self._packed[key] = packed(timeline_chunk(ranks))
            if budget.takes(self._packed[key]):
                found[step] = self._packed[key]
        return found

    def _part(self, reader: GroupReader, step: int, notes: Notes) -> str:
        from spmdrl.report.page.rollouts import step_chunk
        from spmdrl.rollout.recordings import reading

        def read() -> str:
            with reading(reader.recorded.folder):
                return packed(step_chunk(reader.read(step, self.choice.group)))

        if self.choice.step is not None:
            return read()
        return notes.attempt(f"rollouts of step {step} are not shown", read) or ""


def _is_done(run: dict[str, Any]) -> bool:
    steps = run["tables"]["training"]["steps"]
    return bool(steps) and steps[-1] + 1 >= run["steps"] > 0


class _Budget:
    """What is left of a page's limits."""

    def __init__(self, limits: PageLimits):
        self._bytes = limits.mib * _MIB
        self._seconds = limits.seconds
        self._ends_at = 0.0  # 0 before the first step is read
        self.left_out = 0
        """Steps that did not fit."""

    def steps(self, steps: Sequence[int]) -> Iterator[int]:
        """Yield steps, those that show most of a run first, while the budget lasts."""
        self._ends_at = self._ends_at or time.monotonic() + self._seconds
        for count, step in enumerate(spread(steps)):
            if self._bytes <= 0 or time.monotonic() > self._ends_at:
                self.left_out += len(steps) - count
                return
            yield step

    def takes(self, part: str) -> bool:
        """Count a part, and return whether it is there and fits."""
        if len(part) > self._bytes:
            self.left_out += 1
            return False
        self._bytes -= len(part)
        return bool(part)


def spread(steps: Sequence[int]) -> list[int]:
    """Return steps in an order whose every beginning is spread over all: last, first, middle."""
    order = [*steps[-1:], *steps[:1]]
    spans = [(0, len(steps) - 1)]
    for low, high in spans:
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(steps[middle])
            spans += [(low, middle), (middle, high)]
    return list(dict.fromkeys(order))


def packed(value: Any) -> str:
    """Return a value as JSON, compressed, in base64. Numbers must be finite."""
    text = json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _state(files: Iterable[Path]) -> tuple[Any, ...]:
    """Return what changes if one of the files is written again."""
    states = (attempt(path.stat, OSError)[0] for path in files)
    return tuple((one.st_mtime_ns, one.st_size, one.st_ino) if one else None for one in states)


def _title(folders: Sequence[Path]) -> str:
    return ", ".join(folder.name for folder in folders)[:200]


def _html(parts: dict[str, str], *, title: str) -> str:
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    style = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _STYLES)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((_HERE / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        parts=parts,
        script=script,
        style=style,
        script_digest=_digest(script),
        style_digest=_digest(style),
    )


def _digest(text: str) -> str:
    """Return the digest by which the page's policy allows a script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
