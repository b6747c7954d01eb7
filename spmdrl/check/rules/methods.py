"""Rules for objectives, methods and rewards.

These rules ignore a method that does not exist: check/methods.py reports its name.
"""

from __future__ import annotations

from typing import Literal

from spmdrl.check.rules.rule import Rule, of_agents
from spmdrl.check.rules.weights import unused
from spmdrl.config.fields import Config, replay_folder
from spmdrl.config.tree import settings
from spmdrl.imports import attempt
from spmdrl.rewards.signatures import reward_models

_OF_ADVANTAGES = (
    "algorithm.advantage",
    "algorithm.correction",
    "algorithm.entropy_coef",
    "algorithm.entropy_control.",
    "algorithm.entropy_schedule.",
    "algorithm.kl_coef",
    "algorithm.kl_control.",
    "algorithm.kl_schedule.",
    "sampling.frequency_penalty",
    "sampling.logit_bias",
    "sampling.presence_penalty",
    "sampling.repetition_penalty",
)
_OF_KEPT_IDS = ("sampling.column", "sampling.min_p", "sampling.top_k", "sampling.top_p")
_OF_SAMPLES = (
    "data.generation_prefix",
    "model.moe.replay",
    "rewards.judge.",
    "rollout.agent",
    "rollout.environment",
    "rollout.record.",
    "rollout.replay_schedule",
    "rollout.schedule.",
    "rollout.serve",
    "sampling.stop",
)


def _fields(prefixes: tuple[str, ...]) -> list[str]:
    return [name for name in settings() if name.startswith(prefixes)]


def _is_rl(cfg: Config) -> bool:
    return cfg.objective.has_advantages


def _found(cfg: Config, kind: Literal["loss", "advantage"]) -> object:
    """Return the policy loss or the advantage of a config; None if it does not exist."""
    from spmdrl.algorithms import registry  # here: it comes with torch

    if not _is_rl(cfg):
        return None
    return attempt(lambda: registry.get(kind, getattr(cfg.algorithm, kind)))[0]


def _inputs(cfg: Config, kind: Literal["loss", "advantage"]) -> tuple[str, ...]:
    from spmdrl.algorithms import registry

    method = _found(cfg, kind)
    return registry.inputs_of(method) if callable(method) else ()


def _asks(cfg: Config, name: str) -> bool:
    """Return whether the loss or the advantage asks for an input."""
    return name in (*_inputs(cfg, "loss"), *_inputs(cfg, "advantage"))


def _compares_turns(cfg: Config) -> bool:
    from spmdrl.algorithms import registry

    method = _found(cfg, "advantage")
    return callable(method) and "turns" in registry.inputs_with_helpers(method)


def _is_per_token(cfg: Config) -> bool:
    from spmdrl.algorithms import registry

    method = _found(cfg, "advantage")
    return callable(method) and registry.is_per_token(method)


def _needs_group(cfg: Config) -> bool:
    from spmdrl.algorithms import registry

    return _is_rl(cfg) and registry.needs_group(cfg.algorithm.advantage)


def _aggregations(cfg: Config) -> tuple[str, ...]:
    """Return the aggregations that the loss allows."""
    return getattr(_found(cfg, "loss"), "aggregations", (cfg.algorithm.aggregation,))


def _is_online_pair(cfg: Config) -> bool:
    return cfg.objective.trains_on_pairs and cfg.objective.samples


def _is_unpaired(cfg: Config) -> bool:
    from spmdrl.algorithms import registry

    loss = attempt(lambda: registry.get("preference", cfg.algorithm.loss))[0]
    return loss is not None and registry.is_unpaired(loss)


def _kl_in_reward(cfg: Config) -> bool:
    return _is_rl(cfg) and cfg.algorithm.kl_coef != 0 and cfg.algorithm.kl_in == "reward"


def _reads_parts(cfg: Config) -> bool:
    """Return whether a method reads the reward functions one by one, not their sum."""
    return _asks(cfg, "reward_parts") and not _asks(cfg, "rewards")


def _lacks_teacher(cfg: Config) -> bool:
    """Return whether some rows have no teacher."""
    return "" in cfg.teacher_fields().values()


def _follows_teacher(cfg: Config) -> bool:
    """Return whether a method follows a teacher; false if its inputs are not known."""
    return cfg.objective.needs_teacher or _asks(cfg, "teacher_logprobs")


def _follows_samples(cfg: Config) -> bool:
    return cfg.objective.needs_teacher and cfg.objective.samples


def _hints(cfg: Config) -> bool:
    """Return whether a method follows a teacher that reads other prompts."""
    return cfg.hints_teacher and _follows_teacher(cfg)


def _follows_itself(cfg: Config) -> bool:
    """Return whether the policy is its own teacher on prompts that it reads itself."""
    sources = cfg.data.sources("train")
    unhinted = [source for source in sources if not source.teacher_prompt]
    teachers = [cfg.teacher_of(source) for source in unhinted] if sources else [cfg.model.teacher]
    return _follows_teacher(cfg) and "policy" in teachers


def _names_teacher(cfg: Config) -> bool:
    """Return whether a source has a teacher, or a teacher's prompt, of its own."""
    shared = cfg.data.teacher_prompt
    sources = cfg.data.sources("train")
    return any(one.teacher or one.teacher_prompt != shared for one in sources)


def _trains_critic(cfg: Config) -> bool:
    return _asks(cfg, "values") or _asks(cfg, "prm_logprobs")


def _uses_reference(cfg: Config) -> bool:
    """Return whether a method uses a reference; true if its inputs are not known."""
    from spmdrl.train.objectives.objective_loss import needed_columns

    columns, _ = attempt(lambda: needed_columns(cfg))
    if columns is None or "ref_logprobs" in columns:
        return True
    return _follows_teacher(cfg) and "reference" in cfg.teachers


def _has_labels(cfg: Config) -> bool:
    from spmdrl.data.examples import row_kind

    return attempt(lambda: row_kind(cfg))[0] == "label"


def _only_caches_reference(cfg: Config) -> bool:
    """Return whether a run caches the logprobs of its reference and no other setting forbids it."""
    # Rules of rules/weights.py refuse the other two cases.
    own = cfg.model.reference
    return own.cache and not own.sync_every and not cfg.objective.samples


def _sets_reference(cfg: Config, name: str) -> bool:
    """Return whether a run sets model.reference.`name`, unless a rule of weights.py forbids it."""
    own = cfg.model.reference
    return _only_caches_reference(cfg) if name == "cache" else own.sync_every > 0 and not own.cache


def _reference_field(cfg: Config) -> str:
    """Return the field that decides whether a reference is used."""
    if _is_rl(cfg):
        return "algorithm.kl_coef"
    return "algorithm.loss" if cfg.objective.trains_on_pairs else "algorithm.objective"


def _two_movers(name: str) -> Rule:
    return Rule(
        (f"algorithm.{name}_schedule.steps", f"algorithm.{name}_control"),
        lambda cfg: (
            _is_rl(cfg)
            and getattr(cfg.algorithm, f"{name}_schedule").is_on
            and getattr(cfg.algorithm, f"{name}_control").is_on
        ),
        f"both move algorithm.{name}_coef",
        "leave one of them out",
    )


def _unused_reference(name: str, field: str) -> Rule:
    """Return the rule against model.reference.`name` where `field` leaves no use for a reference.

    Which field decides depends on the objective, so each field has a rule of its own.
    """
    return Rule(
        (f"model.reference.{name}", field),
        lambda cfg: (
            field == _reference_field(cfg)
            and _sets_reference(cfg, name)
            and not _uses_reference(cfg)
        ),
        "no reference is used",
        "leave it out",
    )


_OBJECTIVES = [
    *unused(
        _fields(_OF_ADVANTAGES),
        "algorithm.objective",
        lambda cfg: not _is_rl(cfg),
        "leave it out",
        reason="it acts under the objective rl alone",
    ),
    *unused(
        _fields(_OF_KEPT_IDS),
        "algorithm.objective",
        lambda cfg: not (_is_rl(cfg) or _follows_samples(cfg)),
        "leave it out",
        reason="it acts under the objectives rl and on_policy_distill alone",
    ),
    *unused(
        _fields(_OF_SAMPLES),
        "algorithm.objective",
        lambda cfg: not cfg.objective.samples,
        "leave it out",
        reason="it acts on sampled responses, and nothing is sampled there",
    ),
    Rule(
        ("model.teacher", "algorithm.objective"),
        lambda cfg: cfg.objective.needs_teacher and _lacks_teacher(cfg),
        "this objective follows a teacher",
        "name a model",
    ),
    Rule(
        ("algorithm.loss", "algorithm.objective"),
        lambda cfg: _is_online_pair(cfg) and _is_unpaired(cfg),
        "the loss judges single responses, and the objective compares two",
        "take dpo, sppo or another loss on pairs",
    ),
    Rule(
        ("batch.group_size", "algorithm.objective"),
        lambda cfg: _is_online_pair(cfg) and cfg.batch.group_size == 1,
        "two samples of a prompt are compared",
        "use at least 2",
    ),
    Rule(
        ("batch.epochs", "algorithm.objective"),
        lambda cfg: cfg.batch.epochs > 1 and not cfg.objective.samples,
        "its rows come again with further steps",
        "leave it at 1 and raise steps",
    ),
]
_ADVANTAGES = [
    Rule(
        ("batch.group_size", "algorithm.advantage"),
        lambda cfg: cfg.batch.group_size == 1 and _needs_group(cfg),
        "its baseline is the other samples of the prompt: every advantage would be 0",
        "use at least 2",
    ),
    Rule(
        ("algorithm.advantage", "data"),
        lambda cfg: _compares_turns(cfg) and not cfg.environment_fields("train"),
        "it compares turns that answer the same state, and no rows of data.train have an "
        "environment",
        "name an environment",
    ),
    Rule(
        ("model.teacher", "algorithm.advantage", "algorithm.loss"),
        lambda cfg: _asks(cfg, "teacher_logprobs") and _lacks_teacher(cfg),
        "one of these follows a teacher",
        "name a model",
    ),
    # Both change only the sum of the rewards, and would silently do nothing.
    Rule(
        ("rewards.shaping", "algorithm.advantage"),
        lambda cfg: _reads_parts(cfg) and cfg.rewards.shaping.is_on,
        "it reads the reward functions one by one, which are not shaped",
        "leave rewards.shaping out",
        "not built",
    ),
    Rule(
        ("algorithm.kl_in", "algorithm.advantage"),
        lambda cfg: _reads_parts(cfg) and _kl_in_reward(cfg),
        "it reads the reward functions one by one",
        "set it to loss",
        "not built",
    ),
    Rule(
        ("algorithm.kl_in", "algorithm.advantage"),
        lambda cfg: _kl_in_reward(cfg) and _is_per_token(cfg) and not _asks(cfg, "kl_rewards"),
        "it has no place for a KL in the reward",
        "set it to loss",
    ),
    Rule(
        ("rewards.functions", "algorithm.advantage"),
        lambda cfg: _asks(cfg, "greedy_rewards") and reward_models(cfg.rewards.functions),
        "a reward model scores sampled responses alone, and the advantage needs the reward of "
        "greedy ones",
        "take another advantage, or functions only",
        "not built",
    ),
    Rule(
        ("critic.warmup_steps", "steps"),
        lambda cfg: _trains_critic(cfg) and cfg.critic.warmup_steps >= cfg.steps,
        "it leaves no step that trains the policy",
        "lower it or raise steps",
    ),
]
_LOSSES = [
    Rule(
        ("algorithm.correction", "algorithm.loss"),
        lambda cfg: (
            "rollout_logprobs" in _inputs(cfg, "loss") and cfg.algorithm.correction != "none"
        ),
        "this loss weighs by pi / mu itself: the engine would be corrected for twice",
        "set it to none",
    ),
    Rule(
        ("algorithm.kl", "algorithm.kl_in"),
        lambda cfg: (
            _is_rl(cfg)
            and cfg.algorithm.kl == "k1"
            and cfg.algorithm.kl_coef != 0
            and cfg.algorithm.kl_in == "loss"
            and not cfg.algorithm.kl_options.get("unbiased")
        ),
        "k1 in the loss has an expected gradient of 0, no penalty at all",
        "take k2 or k3, set kl_options {unbiased: true}, or kl_in: reward",
    ),
    Rule(
        ("algorithm.aggregation", "algorithm.loss"),
        lambda cfg: cfg.algorithm.aggregation not in _aggregations(cfg),
        "its terms are of whole sequences, and this would not be its paper's objective",
        lambda cfg: f"take {' or '.join(_aggregations(cfg))}",
    ),
]
_COEFFICIENTS = [
    *(_two_movers(name) for name in ("kl", "entropy")),
    Rule(
        ("algorithm.kl_schedule.steps", "algorithm.kl_coef"),
        lambda cfg: (
            _is_rl(cfg) and cfg.algorithm.kl_schedule.is_on and not cfg.algorithm.kl_coef > 0
        ),
        "the schedule begins at kl_coef, and at 0 there is no reference",
        "set algorithm.kl_coef above 0",
    ),
    Rule(
        ("algorithm.kl_control.target", "algorithm.kl_coef"),
        lambda cfg: (
            _is_rl(cfg)
            and cfg.algorithm.kl_control.target > 0
            and cfg.algorithm.kl_control.horizon > 0
            and not cfg.algorithm.kl_coef > 0
        ),
        "kl_coef is what is moved toward the target, and it never leaves 0",
        "set algorithm.kl_coef above 0",
    ),
    Rule(
        ("rewards.shaping.overlong_penalty", "rewards.shaping.overlong_tokens"),
        lambda cfg: (
            cfg.objective.samples
            and cfg.rewards.shaping.overlong_penalty != 1
            and not cfg.rewards.shaping.overlong_tokens
        ),
        "overlong_tokens is the buffer that the penalty acts in",
        "set overlong_tokens, or leave overlong_penalty out",
    ),
]
_REFERENCE = [
    *(
        _unused_reference(name, field)
        for name in ("cache", "sync_every")
        for field in ("algorithm.kl_coef", "algorithm.loss", "algorithm.objective")
    ),
    Rule(
        ("model.reference.cache", "algorithm.loss"),
        lambda cfg: _only_caches_reference(cfg) and _uses_reference(cfg) and _has_labels(cfg),
        "the loss puts each response to another prompt of its step for the KL, other pairs in "
        "every epoch: there are no fixed rows whose logprobs could be kept",
        "leave it out",
    ),
]
_TEACHERS = [
    Rule(
        ("model.teacher", "data.teacher_prompt"),
        _follows_itself,
        "the policy would follow itself, which teaches it nothing",
        "set data.teacher_prompt, or name another teacher",
    ),
    Rule(
        ("data.teacher_prompt", "algorithm.objective"),
        lambda cfg: cfg.data.teacher_prompt and not _follows_teacher(cfg),
        "nothing follows a teacher",
        "leave it out",
    ),
    Rule(
        ("data", "algorithm.objective"),
        lambda cfg: not _follows_teacher(cfg) and _names_teacher(cfg),
        "a source of data.train has a teacher or a teacher_prompt, and nothing follows a teacher",
        "leave it out",
    ),
    *unused(
        ["data.max_teacher_prompt_tokens"],
        "data.teacher_prompt",
        lambda cfg: not cfg.hints_teacher,
        "leave it out",
        reason="no teacher reads a prompt of its own",
    ),
    Rule(
        ("data.teacher_prompt", "rollout.environment"),
        lambda cfg: _hints(cfg) and cfg.environment_fields("train"),
        "an environment may add to the prompt before the first response",
        "leave one of them out",
        "not built",
    ),
    Rule(
        ("data.teacher_prompt", "rollout.agent"),
        lambda cfg: _hints(cfg) and cfg.objective.samples and cfg.rollout.has_agent,
        "an agent writes its prompts itself",
        "leave one of them out",
        "not built",
    ),
    Rule(
        ("data.teacher_prompt", "rollout.record.replay"),
        lambda cfg: _hints(cfg) and replay_folder(cfg),
        "recorded rollouts are trained on without their rows",
        "leave one of them out",
        "not built",
    ),
    Rule(
        ("model.teacher", "rollout.record.replay"),
        lambda cfg: len(cfg.teachers) > 1 and _follows_teacher(cfg) and replay_folder(cfg),
        "sources of data.train name others, and recorded rollouts do not say which source they are "
        "of",
        "name one teacher",
        "not built",
    ),
    Rule(
        ("sampling.repetition_penalty", "data.teacher_prompt"),
        lambda cfg: _hints(cfg) and _is_rl(cfg) and cfg.sampling.repetition_penalty != 1,
        "it counts the tokens of the prompt, and the teacher reads others",
        "leave one of them out",
    ),
    Rule(
        ("batch.tokens_per_microbatch", "data.teacher_prompt"),
        lambda cfg: _hints(cfg) and not cfg.batch.tokens_per_microbatch,
        "sizes are tried on rows that the policy reads, and the teacher's may be longer",
        "set a number",
        "not built",
    ),
    Rule(
        ("batch.tokens_per_microbatch", "data"),
        lambda cfg: (
            len(cfg.teachers) > 1
            and _follows_teacher(cfg)
            and not cfg.hints_teacher
            and not cfg.batch.tokens_per_microbatch
        ),
        "sources have different teachers, and sizes are tried on rows of no source",
        "set a number",
        "not built",
    ),
    Rule(
        ("model.reference.cache", "model.teacher"),
        lambda cfg: (
            _only_caches_reference(cfg) and _follows_teacher(cfg) and "reference" in cfg.teachers
        ),
        "logprobs of tokens are kept, and a teacher is compared by whole distributions",
        "leave cache out",
    ),
]


_AGENTS = [
    of_agents(
        "rollout.environment",
        lambda cfg: cfg.environment_fields(),
        "an agent and an environment would both make the conversation",
        "leave one out",
        "principle",
    ),
    of_agents(
        "rollout.agent_command",
        lambda cfg: cfg.rollout.agent and cfg.rollout.agent_command,
        "both would play the same episodes",
        "leave one out",
        "principle",
    ),
    Rule(
        ("rollout.agent_container.image", "rollout.agent_command"),
        lambda cfg: cfg.rollout.agent_container.image and not cfg.rollout.agent_command,
        "a function runs in a worker of the job, and a command in the container",
        "set the command, or leave the image out",
    ),
    of_agents(
        "algorithm.advantage",
        _is_per_token,
        "it gives each token a number, and no method says how a reward is divided over the traces "
        "of an episode",
        "take one with a number per episode, such as grpo or rloo",
        "not built",
    ),
    of_agents(
        "algorithm.objective",
        lambda cfg: cfg.objective.trains_on_pairs,
        "it compares two sequences, and an episode may have several",
        "take rl or on_policy_distill",
        "not built",
    ),
    of_agents(
        "rewards.functions",
        lambda cfg: reward_models(cfg.rewards.functions),
        "a reward model scores one sequence, and an episode may have several traces",
        "take functions",
        "not built",
    ),
    of_agents(
        "rewards.shaping.overlong_tokens",
        lambda cfg: cfg.rewards.shaping.overlong_tokens,
        "the length limit is of one trace, and the reward of an episode that may have several",
        "leave it out, or have the agent's reward count tokens",
        "not built",
    ),
]

METHODS: list[Rule] = [
    *_OBJECTIVES,
    *_ADVANTAGES,
    *_LOSSES,
    *_COEFFICIENTS,
    *_REFERENCE,
    *_TEACHERS,
    *_AGENTS,
]
