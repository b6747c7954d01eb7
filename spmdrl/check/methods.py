"""Whether the methods of an algorithm exist, take their options, and go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spmdrl.check.epochs import epoch_problems
from spmdrl.config.data import SPLITS
from spmdrl.config.fields import Config
from spmdrl.data.tasks import is_generated
from spmdrl.errors import Refusal, place_of
from spmdrl.imports import divisors, is_missing_folder, missing_folder
from spmdrl.rewards.signatures import reward_models

if TYPE_CHECKING:
    from spmdrl.algorithms.registry import Kind


def method_problems(cfg: Config) -> list[str]:
    """Return what is wrong with methods and their options, each as `field: what, value seen`."""
    problems = []
    rewards = cfg.rewards
    if rewards.weights and len(rewards.weights) != len(rewards.functions):
        problems.append(
            f"rewards.weights: {len(rewards.weights)} weights for "
            f"{len(rewards.functions)} functions; give one for each, or none, which is 1 each"
        )
    if rewards.weights and not any(rewards.weights):
        problems.append("rewards.weights: are all 0, so every reward would be 0; give one another")
    if cfg.objective.only_loss:
        return problems
    if not cfg.objective.samples:
        return [*problems, *_loss_problems(cfg)]
    ungraded = [
        f"data.{split} ({source.path})"
        for split in SPLITS
        for source in cfg.data.sources(split)
        if not cfg.functions_of(source)
        and not source.is_generated
        and not cfg.environment_of(source)
    ]
    if ungraded:
        problems.append(
            f"rewards.functions: is empty and {ungraded[0]} is not a generated task with a grader "
            "of its own; name at least one reward function"
        )
    problems += [*_reward_problems(cfg), *_shaping_problems(cfg)]
    problems += _advantage_problems(cfg) if cfg.objective.has_advantages else _loss_problems(cfg)
    if cfg.batch.prompts_per_step % cfg.batch.updates_per_step:
        problems.append(
            f"batch.updates_per_step: prompts_per_step {cfg.batch.prompts_per_step} / "
            f"updates_per_step {cfg.batch.updates_per_step} = "
            f"{cfg.batch.prompts_per_step / cfg.batch.updates_per_step:g} prompts, not whole; take "
            f"one of {divisors(cfg.batch.prompts_per_step)}"
        )
    return problems


def _advantage_problems(cfg: Config) -> list[str]:
    """Return what is wrong with the methods of an objective that trains by advantages."""
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    problems = []
    kinds: tuple[registry.Kind, ...] = ("advantage", "loss", "correction", "kl")
    for kind in kinds:
        name = getattr(chosen, kind)
        options = getattr(chosen, f"{kind}_options")
        problems += [f"algorithm.{kind}{text}" for text in registry.problems(kind, name, options)]
    if not problems:
        problems += [*epoch_problems(cfg), *_critic_problems(cfg)]
        loss_fn = registry.get("loss", chosen.loss)
        found = _statistic_problems("loss", loss_fn, chosen.loss_options)
        problems += [f"algorithm.loss{text}" for text in found]
    problems += [*_entropy_problems(cfg), *_kl_problems(cfg)]
    problems += _coefficient_schedule_problems(cfg)
    return problems


class Tried(Exception):
    """The two functions of train.py are as they should be, and a dry run needs no more of it."""


def try_functions(cfg: Config, *, loss_fn: Callable, advantage_fn: Callable) -> None:
    """Try the loss and the advantage of train.py on three tokens, before anything is loaded: they
    may be a user's own, which no config names. A dry run ends with it: nothing has a world there.

    Raises: Refusal saying what is expected, with file and line of the function; Tried in a dry run.
    """
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    kind = cfg.objective.loss_kind
    options = {} if cfg.objective.only_loss else chosen.loss_options
    problems = [f"loss{text}" for text in registry.function_problems(kind, loss_fn, options)]
    if cfg.objective.has_advantages:
        found = registry.function_problems("advantage", advantage_fn, chosen.advantage_options)
        problems += [f"advantage{text}" for text in found]
        problems += [] if problems else epoch_problems(cfg, loss_fn)
    problems = problems or [f"loss{text}" for text in _statistic_problems(kind, loss_fn, options)]
    problems += _matched_problems(cfg, loss_fn)
    if problems:
        raise Refusal("\n".join(problems))
    if cfg.dry_run:
        raise Tried


def _statistic_problems(kind: Kind, function: Callable, options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the names that a loss gives to its statistics."""
    from spmdrl.algorithms import registry
    from spmdrl.report.glossary import unknown

    names = registry.own_statistics(kind, function, options)
    return [
        f": the statistic {name!r} of {function.__name__} {text}{place_of(function)}"
        for name in names
        if (text := unknown(name))
    ]


def _loss_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the loss of an objective without advantages, other than sft."""
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    found = registry.problems(cfg.objective.loss_kind, chosen.loss, chosen.loss_options)
    yield from (f"algorithm.loss{text}" for text in found)
    if not found:
        yield from _matched_problems(cfg, registry.get(cfg.objective.loss_kind, chosen.loss))


def _matched_problems(cfg: Config, loss: Callable) -> Iterator[str]:
    """Yield what is wrong with a loss that compares a pair with others of the whole batch."""
    name = "updates_per_step" if cfg.batch.updates_per_step > 1 else "epochs"
    if hasattr(loss, "matched") and cfg.batch.optimizer_steps > 1:
        yield (
            f"batch.{name}: {getattr(cfg.batch, name)} with the loss {loss.__name__}, which sorts "
            "all pairs of a step by the policy as the step begins: after the first update they "
            "would be in the wrong order; set it to 1 (prompts_per_step says how many are sorted)"
        )


def _entropy_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with an entropy that is held at a target."""
    coef = cfg.algorithm.entropy_coef
    control = cfg.algorithm.entropy_control
    place = "algorithm.entropy_control"
    if not (control.target or control.delta):
        for name, default in (("lower", 0.0), ("upper", 1.0)):
            if (value := getattr(control, name)) != default:
                yield f"{place}.{name}: {value} without target and delta; leave it out"
    elif not (control.target and control.delta):
        yield (
            f"{place}.{'delta' if control.target else 'target'}: is missing; an entropy that is "
            "held at a target takes both target, nats, and delta, the step of the coefficient"
        )
    elif not control.lower <= control.upper:
        yield f"{place}: must be 0 <= lower <= upper, got {control.lower}, {control.upper}"
    elif not control.lower <= coef <= control.upper:
        yield (
            f"{place}: algorithm.entropy_coef starts at {coef}, outside lower, upper "
            f"[{control.lower}, {control.upper}]"
        )


def _coefficient_schedule_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with a coefficient that follows a schedule."""
    chosen = cfg.algorithm
    for name in ("kl", "entropy"):
        schedule = getattr(chosen, f"{name}_schedule")
        if schedule.end and not schedule.is_on:
            yield (
                f"algorithm.{name}_schedule.steps: is missing; `end` {schedule.end:g} is reached "
                "after so many"
            )


def _kl_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with a KL that is held at a target."""
    control = cfg.algorithm.kl_control
    place = "algorithm.kl_control"
    num_samples = cfg.batch.prompts_per_step * cfg.batch.group_size
    if not (control.target or control.horizon):
        return
    if not (control.target and control.horizon):
        yield (
            f"{place}.{'horizon' if control.target else 'target'}: is missing; a KL that is held "
            "at a target takes both target, nats per token, and horizon, samples"
        )
    elif num_samples >= 5 * control.horizon:
        yield (
            f"{place}.horizon: {control.horizon:g} is too short for {num_samples} samples a step: "
            f"the coefficient could reach 0; use more than {num_samples / 5:g}"
        )


def _shaping_problems(cfg: Config) -> list[str]:
    shaping = cfg.rewards.shaping
    most = cfg.sampling.max_response_tokens
    problems = []
    if shaping.overlong_tokens > most:
        problems.append(
            f"overlong_tokens: must be at most sampling.max_response_tokens = {most}, got "
            f"{shaping.overlong_tokens}"
        )
    if not shaping.scale:
        problems.append("scale: must not be 0, which makes all rewards alike, got 0")
    if not shaping.clamp_low < shaping.clamp_high:
        problems.append(
            f"clamp_low: must be below clamp_high = {shaping.clamp_high}, got {shaping.clamp_low}"
        )
    return [f"rewards.shaping.{problem}" for problem in problems]


def _reward_problems(cfg: Config) -> Iterator[str]:
    functions = cfg.reward_functions
    sources = cfg.data.all_sources()
    for spec in filter(is_generated, functions):
        options = [source.task_options for source in sources if source.path == spec]
        if not options:
            yield (
                f"rewards.functions: {spec} grades problems of its own, and data.train is "
                f"{', '.join(cfg.data.paths('train'))}; name it there, or another reward function"
            )
        elif any(own != options[0] for own in options):
            yield (
                f"rewards.functions: {spec} would grade sources with different task_options, "
                f"{' and '.join(map(str, options))}; give these sources reward functions that need "
                "no options, or leave all rewards empty, so that each source is graded by its own"
            )
    models = reward_models(functions)
    if models and any(source.rewards for source in sources):
        yield (
            f"rewards.functions: model:{next(iter(models.values()))} scores the rows of all "
            "sources, and some name rewards of their own; leave one of the two out"
        )
    if "" in models.values():
        yield "rewards.functions: `model:` names no folder; write model:PATH"


def _critic_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the section `critic`, where a method uses it."""
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    loss = registry.get("loss", chosen.loss)
    advantage = registry.get("advantage", chosen.advantage)
    asked = registry.inputs_of(loss) + registry.inputs_of(advantage)
    if "values" not in asked and "prm_logprobs" not in asked:
        return
    if is_missing_folder(cfg.critic.path):
        yield f"critic.path: {missing_folder(cfg.critic.path)}"
    if registry.trial("advantage", advantage, chosen.advantage_options)[1] is None:
        yield (
            f"algorithm.advantage: {chosen.advantage} asks for a model that is trained beside the "
            "policy and returns None as its targets; return (advantages, returns)"
        )
