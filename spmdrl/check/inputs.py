"""What is refused in data, rewards and checkpoints before anything is loaded.

One list: `--dry-run` prints it, and a run asks for it before its engines are built.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spmdrl.agents.chats import FIELD, JUDGE_FIELD, SERVE_FIELD, make_agent_chat, make_judge_chat
from spmdrl.agents.solve import check_agent
from spmdrl.algorithms import registry
from spmdrl.check.fit import refusal
from spmdrl.check.values import ids_above
from spmdrl.checkpoint.restore import resume_problems
from spmdrl.config import Config, SourceSettings
from spmdrl.config.data import Split
from spmdrl.config.fields import replay_folder
from spmdrl.data.examples import ExampleSource, example_source, row_kind
from spmdrl.data.hub import find_on_hub
from spmdrl.data.prompts import PromptSource, check_context, held_out_prompts
from spmdrl.data.row_files import SUFFIXES
from spmdrl.data.rows import checked_rows
from spmdrl.data.sources import row_rules
from spmdrl.data.tasks import is_generated, make_task
from spmdrl.data.tokenizer import end_token_ids, load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.imports import attempt, in_child, is_missing_folder
from spmdrl.rewards.columns import RowKind, function_problems, row_kinds
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout import model_limits
from spmdrl.rollout.chats import make_chat
from spmdrl.rollout.decision_log import check_schedule
from spmdrl.rollout.judging import NO_STEP_OF_JUDGE
from spmdrl.rollout.replay_source import check_recorded
from spmdrl.workers.environment_jobs import check_environment
from spmdrl.world.axes import axes_of
from spmdrl.world.world import World

_SHARE_OF_START = 0.8
"""Share of layout.startup_timeout_s that the user's code may take. Other ranks wait for rank 0
here, and after the whole of it their wait fails."""


def check_inputs(cfg: Config, world: World) -> None:
    """Refuse, on all ranks together, what rank 0 finds.

    The rows of data.train are left out: each rank opens all of them right after this, by the same
    functions.

    Raises: Refusal with every problem.
    """
    found = world.from_rank_0(
        lambda: [*dict.fromkeys(input_problems(cfg, opens_all=False))], wait="check the inputs"
    )
    if found:
        raise Refusal("\n".join(found))


def input_problems(cfg: Config, *, opens_all: bool = True) -> Iterator[str]:
    """Yield what is wrong, each as `field: what, value seen`, or with the place of a row.

    Args:
        opens_all: check all rows of data.train, not only the first. No rows are fetched from the
            hub for it.
    """
    began = time.monotonic()
    yield from resume_problems(cfg)
    if "wandb" in cfg.report.trackers and cfg.report.wandb.mode == "online":
        from spmdrl.report.trackers.wandb_tracker import key_problem

        yield from filter(None, [key_problem()])
    if replay_folder(cfg):  # recorded rollouts need no data and no rewards
        yield from refusal(lambda: check_recorded(cfg))
        yield from refusal(lambda: load_tokenizer(cfg))
        return
    if cfg.rollout.replay_schedule:
        yield from refusal(lambda: check_schedule(cfg))
    tokenizer, error = attempt(lambda: load_tokenizer(cfg))
    if error:
        yield str(error)
    if tokenizer:
        yield from _context_problems(cfg, tokenizer)
    looked_at = []
    errors = []
    for source in cfg.data.sources("train"):
        found, error = attempt(partial(_looked_at, cfg, source, split="train"))
        looked_at.append(found or (None, []))
        errors += [str(error)] if error else []
    row = looked_at[0][0] if looked_at else None
    yield from errors
    if not errors and tokenizer and opens_all and not _are_fetched(cfg, "train"):
        yield from refusal(lambda: _open(cfg, tokenizer))
    opens_eval = tokenizer and cfg.objective.samples and not _are_fetched(cfg, "eval")
    if cfg.data.eval and opens_eval:
        yield from refusal(lambda: held_out_prompts(cfg, tokenizer))
    if opens_all:  # a dry run: checking all rows may have taken long, and no rank waits
        began = time.monotonic()
    until = began + _SHARE_OF_START * cfg.layout.startup_timeout_s
    for i, (own, _) in enumerate(looked_at):
        yield from _environment_problems(
            cfg, own, split="train", number=i, until=until, tokenizer=tokenizer
        )
    if cfg.rollout.runs_agent:
        yield from _agent_problems(cfg, tokenizer, until=until)
    if cfg.rollout.serve:
        yield from _gateway_problems(SERVE_FIELD)
        yield from _chat_problems(cfg, tokenizer)
    if cfg.rewards.judge.is_on and cfg.objective.samples:
        yield from _gateway_problems(JUDGE_FIELD)
        if tokenizer is not None:
            stops = end_token_ids(cfg, tokenizer)
            yield from refusal(lambda: make_judge_chat(cfg, tokenizer, stops=stops))
    if cfg.objective.samples:
        yield from _model_problems(cfg, row)
        # The grader of a generated task was made with its first row.
        for source, (_, kinds) in zip(cfg.data.sources("train"), looked_at):
            yield from _function_problems(cfg, source, kinds, split="train", until=until)
        for i, source in enumerate(cfg.data.sources("eval")):
            found, error = attempt(partial(_looked_at, cfg, source, split="eval"))
            if error and not opens_eval:  # else it is refused with the held-out prompts
                yield str(error)
            if found:
                own = found[0]
                yield from _environment_problems(
                    cfg, own, split="eval", number=i, until=until, tokenizer=tokenizer
                )
                yield from _function_problems(cfg, source, found[1], split="eval", until=until)


def _environment_problems(
    cfg: Config,
    row: dict | None,
    *,
    split: Split,
    number: int,
    until: float,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Iterator[str]:
    """Yield why the environment of a source cannot open its first row, or why the chat template
    cannot join its turns. An environment that data.train tried is not tried on held-out rows.

    Args:
        row: the first one; None if it is not known.
        number: of the source.
        until: deadline on the clock of `time.monotonic`.
    """
    field, options = cfg.environments(split)[number]
    is_tried = split == "eval" and field in cfg.environment_fields("train")
    if not options or row is None or is_tried:
        return
    is_list = not isinstance(getattr(cfg.data, split), str)
    place = f"data.{split}[{number}]" if is_list else f"data.{split}"
    facts, problem = in_child(
        check_environment,
        options,
        row,
        what=f"{field}: opening the first row of {place} with {options.get('name')}",
        timeout_s=until - time.monotonic(),
        field=field,
        rows=place,
    )
    if problem:
        yield problem
    elif tokenizer is not None:
        yield from refusal(
            lambda: make_chat(
                cfg, tokenizer, field, facts=facts, stops=end_token_ids(cfg, tokenizer)
            )
        )


def _agent_problems(
    cfg: Config, tokenizer: PreTrainedTokenizerBase | None, *, until: float
) -> Iterator[str]:
    """Yield why the agent cannot run, or why the chat template cannot join its conversations.

    Args:
        until: deadline on the clock of `time.monotonic`.
    """
    yield from _gateway_problems(FIELD)
    function = cfg.rollout.agent
    command = cfg.rollout.agent_command
    _, problem = in_child(
        check_agent,
        function,
        command,
        cfg.rollout.agent_container,
        what=f"{FIELD}: importing {function or command[0]}",
        timeout_s=until - time.monotonic(),
    )
    if problem:
        yield problem
    yield from _chat_problems(cfg, tokenizer)


def _chat_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    """Yield why the chat template cannot be used; without one there are completions alone."""
    if tokenizer is not None and tokenizer.chat_template:
        yield from refusal(
            lambda: make_agent_chat(cfg, tokenizer, tools=[], stops=end_token_ids(cfg, tokenizer))
        )


def _gateway_problems(field: str) -> Iterator[str]:
    """Yield why no gateway can serve.

    Args:
        field: that needs it.
    """
    if importlib.util.find_spec("aiohttp") is None:
        yield (
            f"{field}: its endpoint needs the package aiohttp, which is not installed; pip install "
            "'spmdrl[agents]'"
        )


def _function_problems(
    cfg: Config, source: SourceSettings, kinds: Sequence[RowKind], *, split: Split, until: float
) -> Iterator[str]:
    """Yield why the reward functions of a source cannot be used on its rows.

    Args:
        until: deadline on the clock of `time.monotonic`.
    """
    functions = cfg.functions_of(source)
    # `_model_problems` checks reward models, and a generated task has a grader of its own.
    own = [spec for spec in functions if not is_generated(spec) and not reward_models([spec])]
    if own:
        inputs = registry.inputs_of(registry.get("advantage", cfg.algorithm.advantage))
        found, problem = in_child(
            function_problems,
            own,
            kinds,
            what=f"rewards.functions: importing {', '.join(own)}",
            timeout_s=until - time.monotonic(),
            scope=cfg.rewards.scope,
            has_greedy=split == "train" and "greedy_rewards" in inputs,
            no_step=_no_step(cfg),
            has_judge=cfg.rewards.judge.is_on,
        )
        yield from [problem] if problem else found


def _no_step(cfg: Config) -> str:
    """Return why no function can see a whole step; empty where it can."""
    if (replicas := axes_of(cfg).replicas) > 1:
        return (
            f"each of {replicas} engine replicas has a share of one; set rewards.scope to group, "
            "or have one replica (layout.inference_tp, inference_dp)"
        )
    if cfg.rollout.schedule.dynamic:
        return (
            "rollout.schedule.dynamic replaces groups by their rewards before the step is whole; "
            "leave it out, or set rewards.scope to group"
        )
    if cfg.rewards.judge.is_on:
        return NO_STEP_OF_JUDGE
    return ""


def _open(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSource | ExampleSource:
    """Return the source of data.train, which checks all rows as it is made."""
    if cfg.objective.samples:
        return PromptSource(cfg, tokenizer)
    limits, _ = attempt(lambda: model_limits(cfg))
    positions = limits["max_positions"] if limits else None
    return example_source(cfg, tokenizer, max_positions=positions)


def _context_problems(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    limits, _ = attempt(lambda: model_limits(cfg))
    # A model that cannot be read is refused where it is built.
    if not limits:
        return []
    unknown = ids_above(cfg, limits["vocab_size"])
    return [*unknown, *refusal(lambda: check_context(cfg, tokenizer, **limits))]


def _is_fetched(spec: str) -> bool:
    """Return whether a spec names a hub dataset, which would be fetched."""
    name = spec.partition(":")[0]
    is_here = Path(spec).suffix in SUFFIXES or Path(name).expanduser().exists()
    is_fetched = not is_here and not is_generated(spec)
    return is_fetched and not is_missing_folder(name)


def _are_fetched(cfg: Config, split: Split) -> bool:
    return any(_is_fetched(path) for path in cfg.data.paths(split))


def _looked_at(
    cfg: Config, source: SourceSettings, *, split: Split
) -> tuple[dict | None, list[RowKind]]:
    """Return the first row of a source and the kinds of its rows; None and [] for a dataset that
    would be fetched. The rows of a generated task are all of one kind."""
    if _is_fetched(source.path):
        find_on_hub(source.path.partition(":")[0], field=f"data.{split}", kind="dataset")
        return None, []
    if is_generated(source.path):
        task = make_task(source.path, source.task_options, size=max(1, source.size))
        rows = iter([(source.path, task.row(cfg.seed, 0, split="train"))])
    else:
        rules = row_rules(cfg, source, need=row_kind(cfg))
        rows = checked_rows(source.path, size=source.size, rules=rules)
    first = next(rows)
    return first[1], row_kinds(itertools.chain([first], rows))


def _model_problems(cfg: Config, row: dict | None) -> Iterator[str]:
    """Yield why a reward model cannot be used."""
    models = reward_models(cfg.rewards.functions)
    if not models:
        return  # before the import: without reward models nothing of training is loaded
    from spmdrl.train.companions.model_rewards import check_reward_model

    for path in models.values():
        # The files of a hub model would have to be fetched.
        folder = Path(path) if Path(path).is_dir() else None
        found = refusal(partial(check_reward_model, cfg, path, folder=folder, row=row))
        yield from (f"rewards.functions: model:{path} cannot be a reward: {p}" for p in found)
