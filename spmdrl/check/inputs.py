"""What a run would stumble over at its start in its data, tokenizer, environment and rewards.

Opened as far as that is quick: the first row, the import of a function.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

from spmdrl.check.fit import refusal
from spmdrl.config import Config
from spmdrl.config.fields import replay_folder
from spmdrl.data.examples import row_kind
from spmdrl.data.rows import ground_truth_of, read_rows
from spmdrl.data.tasks import is_generated, make_task
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.rewards.signatures import import_function, load_reward, reward_models
from spmdrl.rollout.replay_source import check_recorded
from spmdrl.train.companions.model_rewards import check_reward_model
from spmdrl.workers.environment_jobs import check_environment

_TRL_GIVEN = {"prompts", "completions", "completion_ids", "log_metric", "log_extra"}


def input_problems(cfg: Config) -> Iterator[str]:
    """Yield what a run would stumble over, each as `field: what, value seen`."""
    if replay_folder(cfg):  # recorded rollouts need no data and no rewards
        yield from refusal(lambda: check_recorded(cfg))
        yield from refusal(lambda: load_tokenizer(cfg))
        return
    rows: dict[str, dict | None] = {"data.train": None}
    for field, spec in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        rows[field], error = attempt(lambda: _first_row(cfg, spec))
        if error:
            yield f"{field}: {error}"
    row, environment = rows["data.train"], cfg.rollout.environment
    yield from refusal(lambda: load_tokenizer(cfg))
    if environment and row:
        yield from refusal(lambda: check_environment(environment, row))
    for spec in cfg.rewards.functions if cfg.objective.samples else ():
        # A module of the user's may exit.
        _, error = attempt(lambda: _check_reward(spec, row, cfg=cfg), (Refusal, SystemExit))
        if error:
            yield str(error) or f"rewards.functions: importing {spec!r} exits"


def _first_row(cfg: Config, spec: str) -> dict | None:
    """Return the first row; None without a spec, or of a hub dataset, which would be fetched."""
    if not spec:
        return None
    if is_generated(spec):
        task = make_task(spec, cfg.data.task_options, size=max(1, cfg.data.size))
        return task.row(cfg.seed, 0, split="train")
    is_file = Path(spec).suffix in (".jsonl", ".json", ".parquet")
    if not is_file and importlib.util.find_spec("datasets"):
        return None
    return read_rows(spec, size=1, need=row_kind(cfg))[0]


def _check_reward(spec: str, row: dict | None, *, cfg: Config) -> None:
    """Raises: Refusal when a function or model cannot be used, or asks for what a row does
    not have."""
    if is_generated(spec):
        return  # made with the first row of data.train
    for path in reward_models([spec]).values():
        # The files of a hub model would have to be fetched.
        folder = Path(path) if Path(path).is_dir() else None
        for problem in refusal(lambda: check_reward_model(cfg, path, folder=folder)):
            raise Refusal(f"rewards.functions: model:{path} cannot be a reward: {problem}")
        return
    load_reward(spec)
    parameters = inspect.signature(import_function(spec)).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names, required = {p.name for p in named}, {p.name for p in named if p.default is p.empty}
    if row is None:
        return
    if "ground_truth" in required and "solution_str" in names:
        for problem in refusal(lambda: ground_truth_of(row)):
            raise Refusal(
                f"rewards.functions: {spec} asks for ground_truth, and in the first "
                f"row of data.train {problem}"
            )
    elif "completions" in names and (absent := required - set(row) - _TRL_GIVEN):
        raise Refusal(
            f"rewards.functions: {spec} asks for {', '.join(sorted(absent))}; the "
            f"first row of data.train has {', '.join(map(str, row))}"
        )
