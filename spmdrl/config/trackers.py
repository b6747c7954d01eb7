"""Settings of experiment trackers: where each keeps a run, and how the run is named there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spmdrl.config.ranges import Address, PathText


@dataclass(frozen=True)
class MlflowSettings:
    """Where MLflow writes."""

    uri: Address = ""
    """A server, e.g. http://host:5000, or a file that all runs may share, e.g.
    sqlite:////shared/mlflow.db; empty: a SQLite file in output_dir. Put user names and passwords
    into MLflow's own variables MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN."""
    experiment: str = "spmdrl"
    """Name of the experiment."""
    run_name: str = ""
    """Name of the run; empty: the name of output_dir."""


@dataclass(frozen=True)
class WandbSettings:
    """The run in W&B. The key is W&B's own: `wandb login`, or WANDB_API_KEY."""

    project: str = "spmdrl"
    """Name of the project."""
    entity: str = ""
    """Team or user that owns the project; empty: the key's own."""
    name: str = ""
    """Name of the run; empty: the name of output_dir."""
    group: str = ""
    """Runs of one group are shown together."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files alone, which `wandb sync` uploads later. It replaces WANDB_MODE."""
    dir: PathText = ""
    """W&B writes below DIR/wandb; empty: below output_dir."""


@dataclass(frozen=True)
class TensorboardSettings:
    """Where TensorBoard's event files are."""

    log_dir: PathText = ""
    """A folder of this run alone; empty: `tensorboard` in output_dir."""


@dataclass(frozen=True)
class TrackioSettings:
    """The run in Trackio's store on this machine."""

    project: str = "spmdrl"
    """Name of the project."""
    name: str = ""
    """Name of the run; empty: the name of output_dir."""
    group: str = ""
    """Runs of one group are shown together."""
    dir: PathText = ""
    """Trackio's folder, TRACKIO_DIR, which runs may share; empty: `trackio` in output_dir."""
