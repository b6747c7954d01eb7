"""The configuration: frozen dataclasses, one YAML file, any field overridable by flag.

`fields` has the sections, with every field's unit, default and reason. `files` reads a Config from
YAML and writes it, and `read` reads one from the command line. Of other rooms only errors, imports
and run_files are imported here, and no torch, so that `--help` answers at once.
"""

from spmdrl.config.data import DataSettings, SourceSettings
from spmdrl.config.fields import (
    BatchSettings,
    CheckpointSettings,
    Config,
    ConsoleSettings,
    EvaluateSettings,
    KeepSettings,
    LayoutSettings,
    ProfileSettings,
    ReportSettings,
    inference_ranks,
    trainer_ranks,
)
from spmdrl.config.files import dump, from_tree, load_yaml
from spmdrl.config.generation import (
    EngineSettings,
    RewardsSettings,
    RolloutSettings,
    ScheduleSettings,
    ShapingSettings,
    StreamSettings,
)
from spmdrl.config.method import (
    AlgorithmSettings,
    CoefficientScheduleSettings,
    LossScaleSettings,
    MuonSettings,
    OptimizerSettings,
)
from spmdrl.config.model import (
    KernelsSettings,
    LoraSettings,
    MemorySettings,
    ModelSettings,
    MoeSettings,
    ReferenceSettings,
)
from spmdrl.config.sampling import NO_PENALTIES, Penalties, SamplingSettings
from spmdrl.config.trackers import (
    MlflowSettings,
    TensorboardSettings,
    TrackioSettings,
    WandbSettings,
)
from spmdrl.config.tree import flatten
