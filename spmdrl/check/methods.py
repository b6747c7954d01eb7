"""Whether methods and rewards exist, take their options, and go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spmdrl.config.data import SPLITS
from spmdrl.config.fields import Config
from spmdrl.data.tasks import is_generated
from spmdrl.errors import Refusal, place_of
from spmdrl.imports import divisors, is_missing_folder, missing_folder
from spmdrl.rewards.signatures import reward_models

if TYPE_CHECKING:
    from spmdrl.algorithms.registry import Kind


def method_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with methods and their options, each as `field: what, value seen`."""
    weights = cfg.rewards.weights
    functions = cfg.rewards.functions
    if weights and len(weights) != len(functions):
        yield (
            f"rewards.weights: {len(weights)} weights for {len(functions)} functions; give one for "
            "each, or none, which is 1 each"
        )
    if weights and not any(weights):
        yield "rewards.weights: are all 0, so every reward would be 0; give one another"
    if cfg.objective.only_loss:
        return
    if not cfg.objective.samples:
        yield from _loss_problems(cfg)
        return
    yield from _reward_problems(cfg)
    yield from _shaping_problems(cfg)
    if cfg.objective.has_advantages:
        yield from _advantage_problems(cfg)
        yield from _coefficient_problems(cfg)
    else:
        yield from _loss_problems(cfg)
    prompts = cfg.batch.prompts_per_step
    updates = cfg.batch.updates_per_step
    if prompts % updates:
        yield (
            f"batch.updates_per_step: prompts_per_step {prompts} / updates_per_step {updates} = "
            f"{prompts / updates:g} prompts, not whole; take one of {divisors(prompts)}"
        )


def _advantage_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the methods of an objective that trains by advantages."""
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    kinds: tuple[registry.Kind, ...] = ("advantage", "loss", "correction", "kl")
    problems = []
    for kind in kinds:
        name = getattr(chosen, kind)
        options = getattr(chosen, f"{kind}_options")
        problems += [f"algorithm.{kind}{text}" for text in registry.problems(kind, name, options)]
    yield from problems
    if problems:
        return
    yield from epoch_problems(cfg)
    yield from _critic_problems(cfg)
    loss_fn = registry.get("loss", chosen.loss)
    for text in _statistic_problems("loss", loss_fn, chosen.loss_options):
        yield f"algorithm.loss{text}"


class FunctionsAccepted(Exception):
    """Ends a dry run: the loss and the advantage of train.py have no problems."""


def try_functions(cfg: Config, *, loss_fn: Callable, advantage_fn: Callable) -> None:
    """Try the loss and the advantage of train.py on three tokens, before anything is loaded. They
    may be functions that no config names. A dry run ends here, since it has no world.

    Raises: Refusal with the expected form and the function's file and line; FunctionsAccepted in a
            dry run.
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
        raise FunctionsAccepted


def _statistic_problems(kind: Kind, function: Callable, options: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the names of a loss's statistics."""
    from spmdrl.algorithms import registry
    from spmdrl.report.glossary import unknown

    names = registry.user_statistics(kind, function, options)
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
    """Yield that a loss that compares pairs of the whole batch has several updates per batch."""
    name = "updates_per_step" if cfg.batch.updates_per_step > 1 else "epochs"
    if hasattr(loss, "matched") and cfg.batch.optimizer_steps > 1:
        yield (
            f"batch.{name}: {getattr(cfg.batch, name)} with the loss {loss.__name__}, which sorts "
            "all pairs of a step by the policy as the step begins: after the first update they "
            "would be in the wrong order; set it to 1 (prompts_per_step says how many are sorted)"
        )


def _coefficient_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with coefficients that follow a schedule, or that hold the entropy or the
    KL at a target."""
    chosen = cfg.algorithm
    for name, schedule in (("kl", chosen.kl_schedule), ("entropy", chosen.entropy_schedule)):
        if schedule.end and not schedule.is_on:
            yield (
                f"algorithm.{name}_schedule.steps: is missing; set the number of steps "
                f"after which the coefficient is `end`, {schedule.end:g}"
            )
    entropy = chosen.entropy_control
    place = "algorithm.entropy_control"
    if not (entropy.target or entropy.delta):
        if entropy.lower:
            yield f"{place}.lower: {entropy.lower} without target and delta; leave it out"
        if entropy.upper != 1:
            yield f"{place}.upper: {entropy.upper} without target and delta; leave it out"
    elif not (entropy.target and entropy.delta):
        yield (
            f"{place}.{'delta' if entropy.target else 'target'}: is missing; an entropy that is "
            "held at a target takes both target, nats, and delta, the step of the coefficient"
        )
    elif not entropy.lower <= entropy.upper:
        yield f"{place}: must be 0 <= lower <= upper, got {entropy.lower}, {entropy.upper}"
    elif not entropy.lower <= chosen.entropy_coef <= entropy.upper:
        yield (
            f"{place}: algorithm.entropy_coef starts at {chosen.entropy_coef}, outside lower, "
            f"upper [{entropy.lower}, {entropy.upper}]"
        )
    kl = chosen.kl_control
    num_samples = cfg.batch.prompts_per_step * cfg.batch.group_size
    if bool(kl.target) != bool(kl.horizon):
        yield (
            f"algorithm.kl_control.{'horizon' if kl.target else 'target'}: is missing; a KL that "
            "is held at a target takes both target, nats per token, and horizon, samples"
        )
    # A step may lower the coefficient by a fifth per horizon, so by all of it in five.
    elif kl.target and num_samples >= 5 * kl.horizon:
        yield (
            f"algorithm.kl_control.horizon: {kl.horizon:g} is too short for {num_samples} samples "
            f"a step: the coefficient could reach 0; use more than {num_samples / 5:g}"
        )


def _shaping_problems(cfg: Config) -> Iterator[str]:
    shaping = cfg.rewards.shaping
    most = cfg.sampling.max_response_tokens
    place = "rewards.shaping"
    if shaping.overlong_tokens > most:
        yield (
            f"{place}.overlong_tokens: must be at most sampling.max_response_tokens = {most}, got "
            f"{shaping.overlong_tokens}"
        )
    if not shaping.scale:
        yield f"{place}.scale: must not be 0, which makes all rewards alike, got 0"
    if not shaping.clamp_low < shaping.clamp_high:
        yield (
            f"{place}.clamp_low: must be below clamp_high = {shaping.clamp_high}, got "
            f"{shaping.clamp_low}"
        )


def _reward_problems(cfg: Config) -> Iterator[str]:
    ungraded = [
        f"data.{split} ({source.path})"
        for split in SPLITS
        for source in cfg.data.sources(split)
        if not (cfg.functions_of(source) or source.is_generated or cfg.environment_of(source))
    ]
    # An agent may return the reward itself; one that does not fails its sample by name.
    if ungraded and not cfg.rollout.has_agent:
        yield (
            f"rewards.functions: is empty and {ungraded[0]} is not a generated task with a grader "
            "of its own; name at least one reward function"
        )
    functions = cfg.reward_functions
    sources = cfg.data.all_sources()
    for spec in filter(is_generated, functions):
        options = [source.task_options for source in sources if source.path == spec]
        if not options:
            yield (
                f"rewards.functions: {spec} grades its own problems, and data.train is "
                f"{', '.join(cfg.data.paths('train'))}; name it there, or another reward function"
            )
        elif any(other != options[0] for other in options):
            yield (
                f"rewards.functions: {spec} would grade sources with different task_options, "
                f"{' and '.join(map(str, options))}; give these sources reward functions that need "
                "no options, or leave all rewards empty, so that each source is graded by its own"
            )
    models = list(reward_models(functions).values())
    if models and any(source.rewards for source in sources):
        yield (
            f"rewards.functions: model:{models[0]} scores the rows of all sources, and some name "
            "rewards of their own; leave one of the two out"
        )
    if "" in models:
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


def epoch_problems(cfg: Config, loss: Callable[..., Any] | None = None) -> Iterator[str]:
    """Yield that the loss does not allow several epochs over a batch.

    Args:
        cfg: whose methods exist and take their options.
        loss: to use instead of the one that it names.
    """
    if cfg.batch.epochs == 1 or not cfg.objective.has_advantages:
        return  # a divergence is right wherever the policy is
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    loss = loss or registry.get("loss", chosen.loss)
    if not depends_on_distance(loss, chosen.loss_options):
        name = getattr(loss, "__name__", chosen.loss)
        yield (
            f"batch.epochs: {cfg.batch.epochs} with the loss {name}, whose gradient is the same "
            "however far the policy has moved since the batch was sampled: from the second epoch "
            "on it would not be that of the expected reward; take a loss with a ratio such as "
            "ppo_clip, or epochs 1"
        )


def depends_on_distance(loss: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether a policy loss's gradient changes as the policy leaves the one that sampled.

    It is tried on three tokens whose probability is the old one, and e times and 1/e of it.
    """
    import torch

    from spmdrl.algorithms import registry

    gradients = set()
    for nats in (0.0, -1.0, 1.0):
        inputs = registry.trial_inputs("loss")
        inputs |= {name: inputs[name] + nats for name in ("old_logprobs", "rollout_logprobs")}
        inputs |= registry.call_helper(loss, "statistics", inputs, options)
        terms, _ = registry.call(loss, inputs, options)
        (gradient, _) = torch.autograd.grad(
            terms.sum(), [inputs["logprobs"], inputs["entropy"]], allow_unused=True
        )
        gradients.add(() if gradient is None else tuple(gradient.tolist()))
    return len(gradients) > 1
