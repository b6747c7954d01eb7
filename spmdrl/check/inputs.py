"""What is refused in data, rewards and checkpoints before anything is loaded.

One list: `--dry-run` prints it, and a run asks for it before its engines are built.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spmdrl.algorithms import registry
from spmdrl.check.fit import refusal
from spmdrl.check.sampling import bias_ids_above
from spmdrl.checkpoint.restore import resume_problems
from spmdrl.config import Config, SourceSettings
from spmdrl.config.data import Split
from spmdrl.config.fields import replay_folder
from spmdrl.data.examples import example_source, row_kind
from spmdrl.data.prompts import PromptSource, check_context, held_out_prompts
from spmdrl.data.row_files import SUFFIXES
from spmdrl.data.sources import read_source
from spmdrl.data.tasks import is_generated, make_task
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.rewards.columns import problems_in_child
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout import model_limits
from spmdrl.rollout.replay_source import check_recorded
from spmdrl.workers.environment_jobs import check_environment
from spmdrl.world import World
from spmdrl.world.axes import axes_of


def check_inputs(cfg: Config, world: World) -> None:
    """Refuse, on all ranks together, what rank 0 finds.

    All rows of data.train are opened by each rank right after it, by the same functions.

    Raises: Refusal with every problem.
    """
    found = world.from_rank_0(
        lambda: [*dict.fromkeys(input_problems(cfg, opens_all=False))], wait="check the inputs"
    )
    if found:
        raise Refusal("\n".join(found))


def input_problems(cfg: Config, *, opens_all: bool = True) -> Iterator[str]:
    """Yield what is wrong, each as `field: what, value seen`, or with the origin of a row.

    Args:
        opens_all: look at all rows of data.train, not at the first alone. The hub's are not
            fetched for it.
    """
    yield from resume_problems(cfg)
    if replay_folder(cfg):  # recorded rollouts need no data and no rewards
        yield from refusal(lambda: check_recorded(cfg))
        yield from refusal(lambda: load_tokenizer(cfg))
        return
    tokenizer, error = attempt(lambda: load_tokenizer(cfg))
    if error:
        yield str(error)
    if tokenizer:
        yield from _context_problems(cfg, tokenizer)
    rows, errors = _first_rows(cfg)
    row = rows[0] if rows else None
    yield from errors
    if not errors and tokenizer and opens_all and not _are_fetched(cfg, "train"):
        yield from refusal(lambda: _open_all(cfg, tokenizer))
    if cfg.data.eval and tokenizer and cfg.objective.samples and not _are_fetched(cfg, "eval"):
        yield from refusal(lambda: held_out_prompts(cfg, tokenizer))
    environment = cfg.rollout.environment
    if environment and row:
        yield from refusal(lambda: check_environment(environment, row))
    if cfg.objective.samples:
        yield from _model_problems(cfg, row)
        # The grader of a generated task was made with its first row.
        for source, first in zip(cfg.data.sources("train"), rows):
            yield from _function_problems(cfg, source, first, split="train")
        for source in cfg.data.sources("eval"):
            # One that cannot be read is refused with the held-out prompts.
            first, error = attempt(partial(_first_row, cfg, source))
            if not error:
                yield from _function_problems(cfg, source, first, split="eval")


def _function_problems(
    cfg: Config, source: SourceSettings, row: dict | None, *, split: Split
) -> Iterator[str]:
    """Yield why the reward functions of a source cannot be used on its first row."""
    functions = cfg.functions_of(source)
    own = [spec for spec in functions if not is_generated(spec) and not reward_models([spec])]
    if own:
        yield from problems_in_child(
            own,
            row,
            timeout_s=cfg.layout.startup_timeout_s,
            scope=cfg.rewards.scope,
            has_greedy=split == "train" and _has_greedy(cfg),
            no_step=_no_step(cfg),
            data=f"data.{split}",
        )


def _has_greedy(cfg: Config) -> bool:
    """Return whether each prompt has a greedy response beside its group."""
    advantage = registry.get("advantage", cfg.algorithm.advantage)
    return "greedy_rewards" in registry.inputs_of(advantage)


def _no_step(cfg: Config) -> str:
    """Return why no function can see a whole step; empty where it can."""
    if (replicas := axes_of(cfg).replicas) > 1:
        return (
            f"each of {replicas} engine replicas has a share of one; set rewards.scope to group, "
            "or have one replica (layout.inference_tp)"
        )
    if cfg.rollout.schedule.dynamic:
        return (
            "rollout.schedule.dynamic replaces groups by their rewards before the step is whole; "
            "leave it out, or set rewards.scope to group"
        )
    return ""


def _context_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    limits, _ = attempt(lambda: model_limits(cfg))
    # A model that cannot be read is refused where it is built.
    if not limits:
        return []
    unknown = bias_ids_above(cfg, limits["vocab_size"])
    return [*unknown, *refusal(lambda: check_context(cfg, tokenizer, **limits))]


def _open_all(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    opened = PromptSource if cfg.objective.samples else example_source
    opened(cfg, tokenizer)


def _is_fetched(spec: str) -> bool:
    """Return whether a spec names a hub dataset, which would be fetched."""
    is_file = Path(spec).suffix in SUFFIXES
    return not is_file and not is_generated(spec) and bool(importlib.util.find_spec("datasets"))


def _are_fetched(cfg: Config, split: Split) -> bool:
    return any(_is_fetched(path) for path in cfg.data.paths(split))


def _first_rows(cfg: Config) -> tuple[list[dict | None], list[str]]:
    """Return the first row of each source of data.train, None of a dataset that would be fetched,
    and what is wrong with them."""
    found = [attempt(partial(_first_row, cfg, source)) for source in cfg.data.sources("train")]
    return [row for row, _ in found], [str(error) for _, error in found if error]


def _first_row(cfg: Config, source: SourceSettings) -> dict | None:
    if _is_fetched(source.path):
        return None
    if is_generated(source.path):
        task = make_task(source.path, source.task_options, size=max(1, source.size))
        return task.row(cfg.seed, 0, split="train")
    return read_source(cfg, source, size=1, need=row_kind(cfg))[0]


def _model_problems(cfg: Config, row: dict | None) -> Iterator[str]:
    """Yield why a reward model cannot be used."""
    models = reward_models(cfg.rewards.functions)
    if not models:
        return  # and a rank that does not train loads nothing of training
    from spmdrl.train.companions.model_rewards import check_reward_model

    for path in models.values():
        # The files of a hub model would have to be fetched.
        folder = Path(path) if Path(path).is_dir() else None
        found = refusal(partial(check_reward_model, cfg, path, folder=folder, row=row))
        yield from (f"rewards.functions: model:{path} cannot be a reward: {p}" for p in found)
