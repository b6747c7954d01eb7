"""TensorBoard as a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import TensorboardSettings
from spmdrl.journal import Journal
from spmdrl.report.tracker import MetricsRow, Status
from spmdrl.report.trackers.helpers import columns_of


class TensorboardTracker:
    """A folder of TensorBoard event files, written by torch; see `tracker.Tracker`.

    Args:
        settings: the section of the config.
        folder: the run's output_dir.
    """

    def __init__(self, settings: TensorboardSettings, *, folder: Path):
        self._log_dir = Path(settings.log_dir or folder / "tensorboard").resolve()
        self._writer: Any = None
        # Now, since the thread may start when the run has added rows.
        self._last_rows = Journal(folder / "metrics.jsonl").rows(newest=1)
        self.name = f"TensorBoard in {self._log_dir}"
        self.view_command = f"tensorboard --logdir {self._log_dir}"
        import torch.utils.tensorboard  # noqa: F401  # in the main thread, as MLflow

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Open an event file. TensorBoard hides what earlier ones have from `step` on."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._log_dir, purge_step=step)
        self._step = step
        rows = [{"name": name, "value": value} for name, value in {**params, **tags}.items()]
        self._writer.add_text("config", _markdown(rows), step)
        # The evaluation of step `step` is done, and hidden with the rest of that step.
        for row in self._last_rows:
            if row["step"] == step:
                values = {
                    name: value
                    for name, value in row.items()
                    if value is not None and name not in ("step", "unix_s")
                }
                self.metrics([MetricsRow(row["step"], row["unix_s"], values)])

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Log steps, in order."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, walltime=row.unix_s)
            self._step = max(self._step, row.step)
        self._writer.flush()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as a table of text."""
        self._writer.add_text(name.removesuffix(".json"), _markdown(rows), self._step)
        self._writer.flush()

    def artifact(self, path: Path) -> None:
        """Show a picture or a text; TensorBoard has no place for other files."""
        if path.suffix == ".png":
            from matplotlib.image import imread

            self._writer.add_image(path.stem, imread(path), self._step, dataformats="HWC")
        elif path.suffix in (".txt", ".yaml"):
            text = "".join(f"    {line}\n" for line in path.read_text().splitlines())
            self._writer.add_text(path.name, text, self._step)
        self._writer.flush()

    def close(self, status: Status) -> None:
        """End the event file with how the run ended."""
        self._writer.add_text("status", status, self._step)
        self._writer.close()


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    columns, data = columns_of(rows)
    lines = [columns, ["---"] * len(columns), *data]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
