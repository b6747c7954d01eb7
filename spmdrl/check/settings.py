"""Every problem of a config, each as `field: what, value seen, what to do`."""

from __future__ import annotations

import operator

from spmdrl.check.options import option_problems
from spmdrl.config.fields import Config, replay_folder
from spmdrl.data.tasks import is_generated
from spmdrl.rewards.signatures import reward_models


def validate(cfg: Config) -> list[str]:
    """Return every problem of a config as `field: what, value seen, what to do`."""
    return [
        *_layout_problems(cfg),
        *_range_problems(cfg),
        *_method_problems(cfg),
        *option_problems(cfg),
    ]


def _layout_problems(cfg: Config) -> list[str]:
    from spmdrl.world.axes import axes_of, rank_problems

    layout, problems = cfg.layout, []
    for name in ("world_size", "trainer_ranks", "dp_replicate", "cp", "ep", "tp", "inference_tp"):
        if getattr(layout, name) < 1:
            problems.append(f"layout.{name}: must be at least 1, got {getattr(layout, name)}")
    if problems:
        return problems
    problems += rank_problems(axes_of(cfg), engine_kind=cfg.engine.kind)
    samples = cfg.objective.samples and not replay_folder(cfg)
    if layout.roles.has_engines != samples:
        problems.append(
            f"layout.placement: {layout.placement} with objective {cfg.algorithm.objective}; sft, "
            "preference, reward_model, distill, and rl by rollout.record.replay, run `offline` (no "
            "engine), else rl `split` or `colocated`"
        )
    return problems


def _range_problems(cfg: Config) -> list[str]:
    problems = []
    at_least = {
        "steps": 1,
        "lag": 0,
        "batch.prompts_per_step": 1,
        "batch.group_size": 1,
        "batch.tokens_per_microbatch": 0,
        "batch.updates_per_step": 1,
        "data.size": 0,
        "data.eval_size": 0,
        "data.max_prompt_tokens": 1,
        "sampling.max_response_tokens": 1,
        "optimizer.max_grad_norm": 0,
        "optimizer.lr": 0,
        "critic.lr": 0,
        "engine.max_num_seqs": 1,
        "engine.max_batched_tokens": 1,
        "stream.bucket_bytes": 1024,
        "stream.verify_every": 0,
        "rewards.workers": 1,
        "checkpoint.every_steps": 0,
        "evaluate.every_steps": 0,
        "evaluate.samples": 1,
        "evaluate.temperature": 0,
        "algorithm.kl_coef": 0,
        "layout.wait_timeout_s": 1,
        "layout.startup_timeout_s": 1,
    }
    for name, low in at_least.items():
        value = operator.attrgetter(name)(cfg)
        if not value >= low:
            problems.append(f"{name}: must be at least {low}, got {value}")
    if not cfg.sampling.temperature > 0:
        problems.append(
            f"sampling.temperature: must be above 0, got {cfg.sampling.temperature}; greedy "
            "samples of one prompt are all the same and carry no signal"
        )
    if not 0 < cfg.engine.gpu_memory_frac < 1:
        problems.append(
            f"engine.gpu_memory_frac: must be in (0, 1), got {cfg.engine.gpu_memory_frac}"
        )
    for name in ("model.path", "data.train"):
        if not operator.attrgetter(name)(cfg):
            problems.append(f"{name}: is required and empty")
    if is_generated(cfg.data.train) and not cfg.data.size:
        problems.append(
            f"data.size: a generated task ({cfg.data.train}) has no size of its own; "
            "set how many problems to make"
        )
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
    budget = cfg.batch.tokens_per_microbatch  # 0: found at start, no less than it must be
    if budget and cfg.objective.samples and budget < longest:
        problems.append(
            f"batch.tokens_per_microbatch: {budget} is below "
            f"data.max_prompt_tokens {cfg.data.max_prompt_tokens} + "
            f"sampling.max_response_tokens {cfg.sampling.max_response_tokens} = {longest}, so "
            "one sequence may not fit; raise it or lower those"
        )
    if budget and cfg.objective.trains_on_pairs and budget < 2 * longest:
        problems.append(
            f"batch.tokens_per_microbatch: {budget} is below 2 * "
            f"(data.max_prompt_tokens {cfg.data.max_prompt_tokens} + sampling.max_response_tokens "
            f"{cfg.sampling.max_response_tokens}) = {2 * longest}, so one pair, which stays "
            "together, may not fit; raise it or lower those"
        )
    if cfg.evaluate.every_steps and not cfg.data.eval:
        problems.append(
            f"evaluate.every_steps: {cfg.evaluate.every_steps}, but data.eval is "
            "empty; name held-out rows"
        )
    return problems


def _method_problems(cfg: Config) -> list[str]:
    from spmdrl.algorithms import registry
    from spmdrl.algorithms.kl import estimator_options

    problems = []
    rewards = cfg.rewards
    if rewards.weights and len(rewards.weights) != len(rewards.functions):
        problems.append(
            f"rewards.weights: {len(rewards.weights)} weights for "
            f"{len(rewards.functions)} functions"
        )
    problems += _coefficient_problems(cfg)
    if cfg.objective.only_loss:
        return problems
    if not cfg.objective.samples:
        if cfg.rollout.environment:
            problems.append(
                f"rollout.environment: the objective {cfg.algorithm.objective} samples "
                "nothing; empty it"
            )
        return problems + _offline_problems(cfg)
    environment = cfg.rollout.environment
    if not rewards.functions and not environment and not is_generated(cfg.data.train):
        problems.append(
            "rewards.functions: is empty and data.train is not a generated task with "
            "a grader of its own; name at least one reward function"
        )
    chosen = cfg.algorithm
    for kind, name, options in (
        ("advantage", chosen.advantage, chosen.advantage_options),
        ("loss", chosen.loss, chosen.loss_options),
        ("correction", chosen.correction, chosen.correction_options),
        ("kl", chosen.kl, estimator_options(chosen.kl_options)),
    ):
        problems += [f"algorithm.{kind}{text}" for text in registry.problems(kind, name, options)]
    if not problems:
        problems += _combination_problems(cfg)
    problems += _reward_problems(cfg)
    if cfg.batch.group_size == 1 and registry.needs_group(chosen.advantage):
        problems.append(
            f"batch.group_size: 1 with advantage {chosen.advantage}, whose baseline is the other "
            "samples of the prompt: every advantage would be 0; use at least 2"
        )
    if cfg.batch.prompts_per_step % cfg.batch.updates_per_step:
        problems.append(
            f"batch.updates_per_step: prompts_per_step {cfg.batch.prompts_per_step} / "
            f"updates_per_step {cfg.batch.updates_per_step} = "
            f"{cfg.batch.prompts_per_step / cfg.batch.updates_per_step:g} prompts, not whole"
        )
    return problems


def _offline_problems(cfg: Config) -> list[str]:
    """Return what is wrong with the method of an offline objective other than sft."""
    from spmdrl.algorithms import registry

    chosen = cfg.algorithm
    found = registry.problems(cfg.objective.loss_kind, chosen.loss, chosen.loss_options)
    problems = [f"algorithm.loss{text}" for text in found]
    for name in ("kl_coef", "entropy_coef"):
        if getattr(chosen, name):
            problems.append(
                f"algorithm.{name}: {getattr(chosen, name)} has no effect under the "
                f"objective {chosen.objective}; set it to 0"
            )
    if cfg.objective.needs_teacher and not cfg.model.teacher:
        problems.append(
            f"model.teacher: is empty, and the objective {chosen.objective} follows a teacher; "
            "name a model"
        )
    return problems


def _coefficient_problems(cfg: Config) -> list[str]:
    """Return what is wrong with the options that move the weights of entropy and KL."""
    from spmdrl.algorithms.entropy import entropy_problems
    from spmdrl.algorithms.shaping import KL_CONTROLLER, kl_controller_problems

    chosen = cfg.algorithm
    moved = {
        "entropy_options": list(chosen.entropy_options),
        "kl_options": [name for name in KL_CONTROLLER if name in chosen.kl_options],
    }
    if not cfg.objective.samples:
        return [
            f"algorithm.{field}.{names[0]}: has no effect under the objective "
            f"{chosen.objective}, only under rl; take it out"
            for field, names in moved.items()
            if names
        ]
    entropy = entropy_problems(chosen.entropy_options, entropy_coef=chosen.entropy_coef)
    kl = kl_controller_problems(
        chosen.kl_options,
        kl_coef=chosen.kl_coef,
        num_samples=cfg.batch.prompts_per_step * cfg.batch.group_size,
    )
    return [
        *(f"algorithm.entropy_options.{problem}" for problem in entropy),
        *(f"algorithm.kl_options.{problem}" for problem in kl),
    ]


def _reward_problems(cfg: Config) -> list[str]:
    from spmdrl.algorithms.shaping import shaping_problems

    limit, functions = cfg.sampling.max_response_tokens, cfg.rewards.functions
    problems = [
        f"rewards.shaping.{problem}"
        for problem in shaping_problems(cfg.rewards.shaping, max_response_tokens=limit)
    ]
    for spec in filter(is_generated, functions):
        if spec not in (cfg.data.train, cfg.data.eval):
            problems.append(
                f"rewards.functions: {spec} grades problems of its own, and data.train "
                f"is {cfg.data.train}; name it there, or another reward function"
            )
    models = reward_models(functions)
    if "" in models.values():
        problems.append("rewards.functions: `model:` names no folder; write model:PATH")
    if models and len(models) == len(functions) and cfg.evaluate.every_steps:
        problems.append(
            f"rewards.functions: all {len(models)} are models, which score in training alone, so "
            "held-out problems would have no reward; add a reward function, or set "
            f"evaluate.every_steps to 0 (it is {cfg.evaluate.every_steps})"
        )
    return problems


def _combination_problems(cfg: Config) -> list[str]:
    """Return what is wrong with methods that are each right by themselves."""
    from spmdrl.algorithms import registry

    problems, chosen = [], cfg.algorithm
    loss, advantage = (registry.get(kind, getattr(chosen, kind)) for kind in ("loss", "advantage"))
    if "rollout_logprobs" in registry.inputs_of(loss) and chosen.correction != "none":
        problems.append(
            f"algorithm.correction: {chosen.correction} with the loss {chosen.loss}, which weighs "
            "by pi / mu itself: the engine would be corrected for twice; set it to none"
        )
    if (
        chosen.kl == "k1"
        and chosen.kl_coef
        and chosen.kl_in == "loss"
        and not (chosen.kl_options.get("unbiased"))
    ):
        problems.append(
            "algorithm.kl: k1 in the loss has an expected gradient of 0, no penalty at all; take "
            "k2 or k3, set kl_options {unbiased: true}, or kl_in: reward"
        )
    allowed = getattr(loss, "aggregations", (chosen.aggregation,))
    if chosen.aggregation not in allowed:
        problems.append(
            f"algorithm.aggregation: {chosen.aggregation} with the loss {chosen.loss}, "
            "whose terms are of whole sequences, would not be its paper's objective; "
            f"take {' or '.join(allowed)}"
        )
    asked = registry.inputs_of(loss) + registry.inputs_of(advantage)
    if "turns" in registry.asked_by(advantage) and not cfg.rollout.environment:
        problems.append(
            f"rollout.environment: is empty, and the advantage {chosen.advantage} "
            "compares turns that answer the same state; name an environment"
        )
    if "teacher_logprobs" in asked and not cfg.model.teacher:
        problems.append(
            f"model.teacher: is empty, and {chosen.advantage} / {chosen.loss} follows "
            "a teacher; name a model"
        )
    if "reward_parts" in asked and "rewards" not in asked:
        # Both change the rewards alone, and would do nothing without a word.
        if cfg.rewards.shaping:
            problems.append(
                f"rewards.shaping: the advantage {chosen.advantage} reads the reward "
                "functions one by one, which are not shaped; empty it"
            )
        if chosen.kl_coef and chosen.kl_in == "reward":
            problems.append(
                f"algorithm.kl_in: reward with the advantage {chosen.advantage}, which "
                "reads the reward functions one by one; set it to loss"
            )
    if "greedy_rewards" in asked and reward_models(cfg.rewards.functions):
        problems.append(
            f"rewards.functions: has a model, which scores sampled responses alone, "
            f"and the advantage {chosen.advantage} needs the reward of greedy ones; "
            "take another advantage, or functions only"
        )
    if (
        chosen.kl_coef
        and chosen.kl_in == "reward"
        and registry.is_per_token(advantage)
        and ("kl_rewards" not in asked)
    ):
        problems.append(
            f"algorithm.kl_in: reward with the advantage {chosen.advantage}, which has "
            "no place for a KL in the reward; set it to loss"
        )
    if "values" in asked or "prm_logprobs" in asked:
        problems += _critic_problems(cfg)
    return problems


def _critic_problems(cfg: Config) -> list[str]:
    """Return what is wrong with the section `critic`, asked where the advantage uses it."""
    from spmdrl.algorithms import registry

    problems, chosen = [], cfg.algorithm
    warmup_steps = cfg.critic.options.get("warmup_steps", 0)
    if warmup_steps >= cfg.steps:
        problems.append(
            f"critic.options.warmup_steps: {warmup_steps} of steps {cfg.steps} leaves none "
            "that trains the policy; lower it or raise steps"
        )
    advantage = registry.get("advantage", chosen.advantage)
    if registry.trial_of_advantage(advantage, chosen.advantage_options)[1] is None:
        problems.append(
            f"algorithm.advantage: {chosen.advantage} asks for a model that is trained beside the "
            "policy and returns None as its targets; return (advantages, returns)"
        )
    return problems
