"""The parts of train.py's loop, each under its own name: `import spmdrl.api as rl`.

A part is imported when it is first asked for. Most parts load torch, which takes seconds, and
`train.py --help` needs none of them; a rank that does not train never loads what trains.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmdrl.algorithms import registry as registry
    from spmdrl.certificate.writer import Certificate as Certificate
    from spmdrl.check import dry_run as dry_run
    from spmdrl.check.fit import check_fit as check_fit
    from spmdrl.check.inputs import check_inputs as check_inputs
    from spmdrl.check.methods import try_functions as try_functions
    from spmdrl.checkpoint import Checkpointer as Checkpointer
    from spmdrl.checkpoint.restore import already_finished as already_finished
    from spmdrl.credit import advantages_of as advantages_of
    from spmdrl.data.tokenizer import load_tokenizer as load_tokenizer
    from spmdrl.engine import make_engine as make_engine
    from spmdrl.evaluate import evaluate as evaluate
    from spmdrl.exchange import exchange as exchange
    from spmdrl.report.exit_status import exit_status as exit_status
    from spmdrl.report.report import Report as Report
    from spmdrl.roles import NullTrainer as NullTrainer
    from spmdrl.roles import make_trainer as make_trainer
    from spmdrl.rollout import make_source as make_source
    from spmdrl.rollout.source import Source as Source
    from spmdrl.sync.stream import WeightStream as WeightStream
    from spmdrl.train.trainer import Trainer as Trainer
    from spmdrl.types import Sums as Sums
    from spmdrl.types import add_sums as add_sums
    from spmdrl.world.folder_lock import own_folder as own_folder
    from spmdrl.world.leaving import end_process as end_process
    from spmdrl.world.leaving import report_end as report_end
    from spmdrl.world.world import World as World

_MODULES = {
    "registry": "spmdrl.algorithms",
    "Certificate": "spmdrl.certificate.writer",
    "dry_run": "spmdrl.check",
    "check_fit": "spmdrl.check.fit",
    "check_inputs": "spmdrl.check.inputs",
    "try_functions": "spmdrl.check.methods",
    "Checkpointer": "spmdrl.checkpoint",
    "already_finished": "spmdrl.checkpoint.restore",
    "advantages_of": "spmdrl.credit",
    "load_tokenizer": "spmdrl.data.tokenizer",
    "make_engine": "spmdrl.engine",
    "evaluate": "spmdrl.evaluate",
    "exchange": "spmdrl.exchange",
    "exit_status": "spmdrl.report.exit_status",
    "Report": "spmdrl.report.report",
    "NullTrainer": "spmdrl.roles",
    "make_trainer": "spmdrl.roles",
    "make_source": "spmdrl.rollout",
    "Source": "spmdrl.rollout.source",
    "WeightStream": "spmdrl.sync.stream",
    "Trainer": "spmdrl.train.trainer",
    "Sums": "spmdrl.types",
    "add_sums": "spmdrl.types",
    "own_folder": "spmdrl.world.folder_lock",
    "end_process": "spmdrl.world.leaving",
    "report_end": "spmdrl.world.leaving",
    "World": "spmdrl.world.world",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"spmdrl.api has no {name}; it has {', '.join(sorted(_MODULES))}")
    value = getattr(importlib.import_module(_MODULES[name]), name, None)
    if value is None:  # a module of a package that does not import it itself
        value = importlib.import_module(f"{_MODULES[name]}.{name}")
    # So that Python does not call this function for it again.
    globals()[name] = value
    return value
