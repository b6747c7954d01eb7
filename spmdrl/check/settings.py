"""Every problem of a config, each as `field: what, value seen, what to do`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

from spmdrl.check.engine_options import engine_option_problems
from spmdrl.check.methods import method_problems
from spmdrl.check.rules import rule_problems
from spmdrl.check.sources import source_problems
from spmdrl.check.values import range_problems, value_problems
from spmdrl.config.fields import Config
from spmdrl.config.read import read, refuse
from spmdrl.data.tasks import is_generated
from spmdrl.errors import Refusal
from spmdrl.imports import is_missing_folder, is_same_file, missing_folder, version_text
from spmdrl.rewards.signatures import reward_models
from spmdrl.world.axes import axes_of, rank_problems
from spmdrl.world.launch import report_refusal, say_once


def parse(argv: list[str] | None = None, *, prog: str = "train.py --config FILE") -> Config:
    """Read `--config FILE` and command-line overrides into a checked Config.

    Args:
        argv: arguments without the program name; None takes sys.argv.
        prog: for the help.
    Returns: the Config, valid as far as can be told without starting anything.
    Raises: SystemExit(2) with every problem listed, one per line, by one rank of a machine;
        SystemExit(0) after `--help` and `--version`.
    """
    if argv is None and {"-h", "--help"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... --help | head` ends without a message
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--version" in argv:
        print(version_text())
        raise SystemExit(0)
    try:
        cfg = read(argv, prog=prog)
        # A dry run lists missing models itself, with the other problems.
        problems = validate(cfg) + ([] if cfg.dry_run else missing_models(cfg))
        refuse(problems, argv=argv)
        if lines := [f"note: {note}" for note in notes(cfg)]:
            say_once("\n".join(lines))
    except Refusal as error:
        report_refusal(str(error))
        say_once(str(error))
        raise SystemExit(2) from None
    return cfg


def validate(cfg: Config) -> list[str]:
    """Return every problem of a config as `field: what, value seen, what to do`.

    If values are out of range, only these are returned: the other checks compute with values.
    """
    if problems := range_problems(cfg):
        return problems
    return [
        *rank_problems(axes_of(cfg), engine_kind=cfg.engine.kind),
        *source_problems(cfg),
        *rule_problems(cfg),
        *method_problems(cfg),
        *engine_option_problems(cfg),
        *value_problems(cfg),
    ]


def notes(cfg: Config) -> Iterator[str]:
    """Yield values that are allowed but probably wrong: `field: what, value seen, what to do`."""
    warmup = cfg.optimizer.warmup_steps
    if warmup > cfg.steps:
        reached = cfg.optimizer.lr * cfg.steps / warmup
        yield (
            f"optimizer.warmup_steps: {warmup} of steps {cfg.steps}: the learning rate ends at "
            f"{reached:g} and never comes to optimizer.lr {cfg.optimizer.lr:g}; lower it, or raise "
            "steps"
        )
    for path in cfg.data.paths("eval"):
        if is_generated(path):  # its held-out problems are others
            continue
        if any(path == train or is_same_file(path, train) for train in cfg.data.paths("train")):
            yield (
                f"data.eval: {path} is in data.train too: the evaluation asks what was trained on; "
                "name rows that are held out"
            )


def missing_models(cfg: Config, *, but_policy: bool = False) -> list[str]:
    """Return which folders of models are not there, each as `field: what, value seen`.

    Args:
        but_policy: leave the policy out.
    """
    model = cfg.model
    pairs = [
        ("model.path", "" if but_policy else model.path),
        ("model.tokenizer", model.tokenizer),
        ("model.reference.path", model.reference.path),
        *cfg.teacher_paths.items(),
    ]
    if cfg.objective.samples:
        pairs += [("rewards.functions", p) for p in reward_models(cfg.rewards.functions).values()]
    return [f"{field}: {missing_folder(path)}" for field, path in pairs if is_missing_folder(path)]
