"""Write a run's certificate, one line per step, also across kills and resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.certificate.compare import step_differences
from spmdrl.certificate.fingerprint_collector import FingerprintCollector
from spmdrl.certificate.line_form import FORMAT, Line, problem_of
from spmdrl.certificate.lines import NAME, is_due, journal_of
from spmdrl.config import Config
from spmdrl.same_run.made_of import made_of
from spmdrl.types import Advantages, Batch, Sums
from spmdrl.world.world import World

if TYPE_CHECKING:
    from spmdrl.roles import NullTrainer
    from spmdrl.train.trainer import Trainer

log = logging.getLogger(__name__)


class Certificate:
    """Writes output_dir/certificate.jsonl on rank 0. Every rank constructs and calls it.

    An earlier attempt may have written lines of `step` and later steps. They are moved to a file
    in `aside`, and compared with the lines that this attempt writes. If the file was edited, all
    lines after the edit are moved as well.

    Args:
        trainer: of this rank.
        step: number of steps that are done.
        aside: folder of this attempt's logs.
    """

    def __init__(
        self, cfg: Config, world: World, trainer: Trainer | NullTrainer, *, step: int, aside: Path
    ):
        self._cfg = cfg
        self._rank = world.rank
        self._journal = journal_of(Path(cfg.output_dir))
        self._earlier_lines = dict[int, Line]()
        self._collector: FingerprintCollector | None = None
        every = cfg.report.certificate
        if world.is_trainer and every:
            self._collector = FingerprintCollector(
                world, trainer, is_due=self._is_due, with_norms=self._has_norms
            )
        # Also if this attempt writes none, move away the lines of steps that are repeated.
        if world.rank == 0 and (every or self._journal.path.exists()):
            self._continue(made_of(cfg, world), step=step, aside=aside / f"removed_{NAME}")

    def _is_due(self, step: int) -> bool:
        return is_due(step, every=self._cfg.report.certificate, steps=self._cfg.steps)

    def _has_norms(self, step: int) -> bool:
        return is_due(step, every=self._cfg.report.certificate_norms, steps=self._cfg.steps)

    def add(self, step: int, batch: Batch, advantages: Advantages, updated: Sums) -> None:
        """Certify a step after its update, if it is due. All trainers must call it.

        Args:
            batch: with its columns.
            updated: sums that the update returned.
        """
        if self._collector is None or not self._is_due(step):
            return
        content = self._collector.content(step, batch, advantages, updated)
        if self._rank:
            return
        if copies := content.get("differing_copies"):
            log.warning("step %d: ranks hold copies that differ, of %s", step, ", ".join(copies))
        if step in self._earlier_lines:
            difference = next(step_differences(self._earlier_lines.pop(step), content), None)
            if difference:
                log.warning("step %d does not repeat the earlier attempt's: %s", step, difference)
        self._append({"step": step, **content})

    def _append(self, content: Line) -> None:
        self._journal.append({"format": FORMAT, **content})

    def _continue(self, run_parts: dict[str, Any], *, step: int, aside: Path) -> None:
        known_parts: dict[str, Any] = {}

        # `known_parts` becomes the last `made_of` that stays. An equal one needs no new line.
        def is_past(line: Line) -> bool:
            if problem_of(line) or line["step"] >= step:
                return False
            known_parts.update(line.get("made_of", {}))
            return True

        for line in self._journal.keep(is_past, removed=aside):
            if not problem_of(line) and "made_of" not in line:
                self._earlier_lines[line["step"]] = line
        if run_parts != known_parts:
            self._append({"step": step, "made_of": run_parts})
