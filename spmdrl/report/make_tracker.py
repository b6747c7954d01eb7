"""Makes the tracker that `report.tracker` names."""

from __future__ import annotations

from pathlib import Path

from spmdrl.config import Config
from spmdrl.report.tracker import Tracker


def make_tracker(cfg: Config, folder: Path) -> Tracker | None:
    """Return the tracker that `report.tracker` names; None for none.

    Args:
        folder: the run's output_dir.
    """
    if cfg.report.tracker == "none":
        return None
    from spmdrl.report.mlflow_tracker import MlflowTracker  # here: mlflow takes 1.5 s to import

    settings = cfg.report.mlflow
    return MlflowTracker(
        settings.uri,
        folder=folder,
        experiment=settings.experiment,
        run_name=settings.run_name or folder.resolve().name,
    )
