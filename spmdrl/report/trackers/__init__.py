"""Experiment trackers, each through its own library: an adapter per file.

A library is imported where its tracker is made. mlflow belongs to the installation, the others are
extras of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spmdrl.config import Config
from spmdrl.imports import installed_versions
from spmdrl.report.tracker import Tracker

_PACKAGES = {
    "mlflow": "mlflow>=3",
    "wandb": "wandb==0.31.0",
    "tensorboard": "tensorboard==2.21.0",
    "trackio": "trackio==0.43.0",
}
"""{tracker: its package, as pyproject.toml names it}."""


def tracker_problems(cfg: Config) -> Iterator[str]:
    """Yield why trackers of a config cannot be used, each as `field: what, value, what to do`."""
    names = cfg.report.trackers
    installed = installed_versions()
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"report.trackers: {name} stands there {names.count(name)} times; once is enough"
        if name not in installed:
            yield (
                f"report.trackers: {name} is not installed: pip install '{_PACKAGES[name]}', or "
                f"take it out of [{', '.join(names)}]"
            )


def make_trackers(cfg: Config, folder: Path) -> list[Tracker]:
    """Return the trackers that `report.trackers` names.

    Args:
        folder: the run's output_dir.
    """
    return [_made(name, cfg, folder) for name in cfg.report.trackers]


def _made(name: str, cfg: Config, folder: Path) -> Tracker:
    own_name = folder.resolve().name
    if name == "mlflow":
        from spmdrl.report.trackers.mlflow_tracker import MlflowTracker

        mlflow = cfg.report.mlflow
        return MlflowTracker(
            mlflow.uri,
            folder=folder,
            experiment=mlflow.experiment,
            run_name=mlflow.run_name or own_name,
        )
    if name == "wandb":
        from spmdrl.report.trackers.wandb_tracker import WandbTracker

        return WandbTracker(cfg.report.wandb, folder=folder, own_name=own_name)
    if name == "tensorboard":
        from spmdrl.report.trackers.tensorboard_tracker import TensorboardTracker

        return TensorboardTracker(cfg.report.tensorboard, folder=folder)
    from spmdrl.report.trackers.trackio_tracker import TrackioTracker

    return TrackioTracker(cfg.report.trackio, folder=folder, own_name=own_name)
