"""The configuration: frozen dataclasses, one YAML file, any field overridable by flag.

`fields` documents every field; `read` turns a file and flags into a Config; `check` lists
what is wrong with one. Importing this package pulls in neither torch nor vllm, so that
`--help` and `--dry-run` answer at once.
"""

from spmdrl.check.settings import validate
from spmdrl.config.fields import (
    Algorithm,
    Batch,
    Checkpoint,
    Config,
    Critic,
    Data,
    Engine,
    Evaluate,
    Layout,
    Model,
    Optimizer,
    Options,
    Report,
    Rewards,
    Rollout,
    Sampling,
    Stream,
    inference_ranks,
    trainer_ranks,
)
from spmdrl.config.read import dump, flatten, from_dict, load_yaml, parse

__all__ = [
    "Algorithm",
    "Batch",
    "Checkpoint",
    "Config",
    "Critic",
    "Data",
    "Engine",
    "Evaluate",
    "Layout",
    "Model",
    "Optimizer",
    "Options",
    "Report",
    "Rewards",
    "Rollout",
    "Sampling",
    "Stream",
    "dump",
    "flatten",
    "from_dict",
    "inference_ranks",
    "load_yaml",
    "parse",
    "trainer_ranks",
    "validate",
]
