"""Rules for sampling: layout, engines, sampling, schedules, recordings, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from spmdrl.check.rules.rule import Rule, RuleKind, of_agents
from spmdrl.check.rules.weights import unused
from spmdrl.config.fields import Config, replay_folder
from spmdrl.data.tasks import is_generated
from spmdrl.rewards.signatures import reward_models
from spmdrl.rollout.decision_log import is_timed


def _is_sampled(cfg: Config) -> bool:
    """Return whether a run samples the responses that it trains on."""
    return cfg.objective.samples and not replay_folder(cfg)


def _is_on_cpu(cfg: Config) -> bool:
    from spmdrl.world.world import is_on_cpu  # here: it comes with torch

    return is_on_cpu(cfg)


def _has_reward_model(cfg: Config) -> bool:
    return bool(reward_models(cfg.rewards.functions))


def _counts_turn(cfg: Config, name: str) -> object:
    return cfg.objective.samples and getattr(cfg.sampling, name) and cfg.environment_fields()


def _counts_again(cfg: Config, name: str, schedule: str) -> object:
    own = cfg.rollout.schedule
    is_on = own.leaves_unfinished if schedule == "over_sample" else own.in_flight
    return (
        cfg.objective.samples
        and getattr(cfg.sampling, name)
        and not cfg.environment_fields()
        and is_on
    )


def _option(cfg: Config, name: str) -> object:
    """Return an option of the engine by its dotted name."""
    section, _, own = name.rpartition(".")
    options = cfg.engine.options.get(section) if section else cfg.engine.options
    return isinstance(options, dict) and options.get(own)


def _gloo_over_axis(name: str) -> Rule:
    return Rule(
        ("layout.backend", f"layout.{name}", "layout.device"),
        lambda cfg: (
            cfg.layout.backend == "gloo"
            and cfg.layout.device != "cpu"
            and getattr(cfg.layout, name) > 1
        ),
        "between ranks of this axis messages go straight from GPU to GPU",
        "leave layout.backend at auto (or say layout.device cpu, if no GPU is meant)",
        "not built",
    )


def _tuning_of_all_ranks(name: str) -> Rule:
    return Rule(
        (f"engine.options.{name}", "layout.placement"),
        lambda cfg: (
            cfg.engine.traits.has_options
            and not cfg.layout.roles.shares_devices
            and _option(cfg, name)
        ),
        "vLLM tunes in a group of all ranks, and those that train would never come",
        "take it out",
        "not built",
    )


def _penalty_per_turn(name: str) -> Rule:
    return Rule(
        (f"sampling.{name}", "rollout.environment"),
        lambda cfg: _counts_turn(cfg, name),
        "each turn is a request of its own, and turns may follow one another without a mark "
        "between them",
        "take repetition_penalty, which counts prompt and response alike, or leave it out",
        "not built",
    )


def _penalty_per_request(name: str) -> Rule:
    return of_agents(
        f"sampling.{name}",
        lambda cfg: getattr(cfg.sampling, name),
        "each request of an agent counts its own tokens, and a trace has those of several",
        "take repetition_penalty, which counts prompt and response alike, or leave it out",
        "not built",
    )


def _penalty_of_resumed(name: str, schedule: str) -> Rule:
    return Rule(
        (f"sampling.{name}", f"rollout.schedule.{schedule}"),
        lambda cfg: _counts_again(cfg, name, schedule),
        "a resumed run takes what a response has so far for its prompt, and would penalise "
        "otherwise than the trainers",
        "take repetition_penalty, which counts both alike, or leave one out",
        "not built",
    )


def _drafts_with(
    name: str, when: Callable[[Config], object], reason: str, remedy: str, kind: RuleKind
) -> Rule:
    """Return a rule for speculative decoding with another field."""
    return Rule(
        ("engine.options.speculative_config", name),
        lambda cfg: cfg.engine.draft_tokens and when(cfg),
        reason,
        remedy,
        kind,
    )


_LAYOUT = [
    Rule(
        ("layout.placement", "algorithm.objective", "rollout.record.replay"),
        lambda cfg: cfg.layout.roles.has_engines != _is_sampled(cfg),
        "sft, preference, reward_model, distill, and rl by rollout.record.replay, run without "
        "engines",
        "take offline for these, else split or colocated",
    ),
    Rule(
        ("layout.backend", "layout.device"),
        lambda cfg: cfg.layout.backend == "nccl" and cfg.layout.device == "cpu",
        "NCCL needs GPUs",
        "take gloo or auto",
    ),
    *(_gloo_over_axis(name) for name in ("cp", "ep", "tp", "inference_tp", "inference_dp")),
]


def _data_parallel(
    fields: tuple[str, ...],
    when: Callable[[Config], object],
    reason: str,
    remedy: str,
    kind: RuleKind = "not built",
) -> Rule:
    """Return the rule against data-parallel attention in an engine with other settings."""
    return Rule(
        ("layout.inference_dp", *fields),
        lambda cfg: cfg.layout.inference_dp > 1 and when(cfg),
        reason,
        remedy,
        kind,
    )


_DATA_PARALLEL = [
    _data_parallel(
        ("engine.options.enable_expert_parallel",),
        lambda cfg: (
            cfg.engine.traits.has_own_models
            and not cfg.engine.options.get("enable_expert_parallel")
        ),
        "the parts of an engine share nothing but whole experts",
        "set engine.options.enable_expert_parallel to true, or layout.inference_dp to 1 (more "
        "engines)",
    ),
    _data_parallel(
        ("layout.inference_tp", "model.moe.replay"),
        lambda cfg: cfg.model.moe.replay and cfg.layout.inference_tp > 1,
        "each rank of a part routes some of its tokens, and the first records the routes",
        "set layout.inference_tp to 1, or model.moe.replay to false",
    ),
    _data_parallel(
        ("sampling.top_p", "sampling.top_k", "sampling.min_p"),
        attrgetter("sampling.truncates"),
        "the leader of an engine has the sampling masks of its own part alone",
        "leave these at their defaults, or set layout.inference_dp to 1",
    ),
    _data_parallel(
        ("model.lora.push",),
        attrgetter("model.lora.pushes_adapter"),
        "on the CPU adapters of experts are not told whose tokens they get from other parts",
        "set model.lora.push to merged",
    ),
    _data_parallel(
        ("engine.options.speculative_config",),
        attrgetter("engine.draft_tokens"),
        "parts would draft different numbers of tokens",
        "leave one of them out",
        "untried",
    ),
    _data_parallel(
        ("engine.options.quantization",),
        lambda cfg: cfg.engine.options.get("quantization"),
        "experts were exchanged with plain weights alone",
        "leave one of them out",
        "untried",
    ),
]
_ENGINES = [
    *(
        _tuning_of_all_ranks(name)
        for name in ("enable_flashinfer_autotune", "kernel_config.enable_flashinfer_autotune")
    )
]


def _exact(
    field: str, when: Callable[[Config], object], reason: str, remedy: str, kind: RuleKind
) -> Rule:
    """Return the rule against engine.exact with another setting."""
    return Rule(
        (field, "engine.exact"), lambda cfg: cfg.engine.exact and when(cfg), reason, remedy, kind
    )


_EXACT_OPTIONS = {"block_size", "enable_prefix_caching"}
_EXACT = [
    Rule(
        ("engine.exact", "layout.placement"),
        lambda cfg: cfg.engine.exact and not _is_sampled(cfg),
        "there is no engine",
        "leave it out",
    ),
    Rule(
        ("engine.exact", "algorithm.objective"),
        lambda cfg: cfg.engine.exact and _is_sampled(cfg) and not cfg.objective.has_advantages,
        "its loss compares no log-probabilities with the engine's, so that no step proves it",
        "leave it out",
        "not built",
    ),
    _exact(
        "stream.max_logprob_gap",
        attrgetter("stream.max_logprob_gap"),
        "no gap is allowed",
        "leave it out",
        "principle",
    ),
    _exact(
        "engine.options",
        lambda cfg: {*cfg.engine.options} - _EXACT_OPTIONS,
        f"it was tried with {' and '.join(sorted(_EXACT_OPTIONS))} alone",
        "leave out the others",
        "untried",
    ),
    _exact(
        "layout.inference_tp",
        lambda cfg: cfg.layout.inference_tp > 1,
        "an engine computes the trainer's modules, which are whole",
        "set it to 1",
        "not built",
    ),
    Rule(
        ("model.moe.replay", "engine.kind", "engine.exact"),
        lambda cfg: cfg.engine.exact and cfg.model.moe.replay and cfg.engine.traits.has_options,
        "vLLM does not record what this model's routers choose; with the same bits they choose "
        "the same experts anyway",
        "set it to false",
        "not built",
    ),
    _exact(
        "layout.device",
        lambda cfg: not _is_on_cpu(cfg),
        "kernels for GPUs are not proved to keep the bits of rows",
        "set it to cpu, or engine.exact to false",
        "not built",
    ),
    _exact(
        "lag",
        lambda cfg: cfg.lag and not cfg.rollout.schedule.in_flight,
        "tokens are sampled with older weights than those that score them",
        "set it to 0, or rollout.schedule.in_flight to true, where those of a push are compared",
        "principle",
    ),
    _exact(
        "rollout.schedule.kv_cache",
        lambda cfg: cfg.rollout.schedule.in_flight and cfg.rollout.schedule.kv_cache != "recompute",
        "keys of older weights stay, which the trainer does not have",
        "set it to recompute",
        "principle",
    ),
    Rule(
        ("model.moe.replay", "rollout.schedule.in_flight", "engine.exact"),
        lambda cfg: cfg.engine.exact and cfg.model.moe.replay and cfg.rollout.schedule.in_flight,
        "a token that is computed again keeps its first route; with the same bits engine and "
        "trainer choose the same experts anyway",
        "set it to false",
        "principle",
    ),
    _exact(
        "rollout.schedule.over_sample",
        lambda cfg: cfg.rollout.schedule.leaves_unfinished,
        "a step gets tokens that older weights sampled",
        "leave it at 1",
        "principle",
    ),
    _exact(
        "engine.dtype",
        lambda cfg: cfg.engine.dtype != cfg.model.compute_dtype,
        "model.compute_dtype is another: the same weights round otherwise",
        "set both to the same",
        "principle",
    ),
    _exact(
        "model.compute_dtype",
        lambda cfg: cfg.model.compute_dtype == "float16",
        "it was tried in float32 and bfloat16 alone",
        "take one of these",
        "untried",
    ),
    _exact(
        "algorithm.correction",
        lambda cfg: (
            cfg.objective.has_advantages and cfg.algorithm.correction != "none" and not cfg.lag
        ),
        "there is no gap to correct: every weight would be 1",
        "set it to none",
        "principle",
    ),
    _exact(
        "model.kernels.attention",
        lambda cfg: cfg.model.kernels.attention not in ("auto", "padded"),
        "it has an attention of its own",
        "set it to auto",
        "principle",
    ),
    _exact(
        "model.kernels.context",
        lambda cfg: cfg.layout.cp > 1 and cfg.model.kernels.context == "ring",
        "a ring adds keys up in the order in which ranks pass them on",
        "take ulysses",
        "not built",
    ),
    _exact(
        "model.kernels.compile",
        lambda cfg: cfg.model.kernels.compile,
        "compiled blocks compute by kernels of their own",
        "set it to false",
        "not built",
    ),
    _exact(
        "layout.tp",
        lambda cfg: cfg.layout.tp > 1,
        "sums over its ranks are in an order that no engine has",
        "set it to 1",
        "not built",
    ),
    _exact(
        "layout.ep",
        lambda cfg: cfg.layout.ep > 1,
        "no test shows that the exchange of rows keeps their bits",
        "set it to 1",
        "untried",
    ),
    _exact(
        "model.lora.push",
        lambda cfg: cfg.model.lora.pushes_adapter,
        "engines add the products of two more matrices in an order of their own",
        "take merged",
        "not built",
    ),
    Rule(
        ("model.lora", "engine.exact", "engine.kind"),
        lambda cfg: cfg.engine.exact and cfg.model.lora.is_on and cfg.engine.traits.has_options,
        "no test shows that merged weights have the same bits there",
        "take transformers, or train all weights",
        "untried",
    ),
    Rule(
        ("model.lora", "engine.exact", "model.compute_dtype"),
        lambda cfg: (
            cfg.engine.exact and cfg.model.lora.is_on and cfg.model.compute_dtype != "float32"
        ),
        "a push merges adapters in float32, and a forward pass has them in model.compute_dtype",
        "take float32, or train all weights",
        "not built",
    ),
]
_DRAFTS = [
    _drafts_with(
        "layout.device",
        lambda cfg: not _is_on_cpu(cfg),
        "the log-probabilities of draft tokens were compared with the model's on the CPU alone "
        "(there vLLM's kernel loses the temperature, which is mended)",
        "leave it out",
        "untried",
    ),
    _drafts_with(
        "model.lora.push",
        lambda cfg: cfg.model.lora.pushes_adapter,
        "the log-probabilities of draft tokens were compared without adapters in the engine alone",
        "leave it out, or set model.lora.push to merged",
        "untried",
    ),
    *(
        _drafts_with(
            name,
            attrgetter(name),
            "vLLM does not apply it to draft tokens",
            "leave one of them out",
            "not built",
        )
        for name in ("sampling.min_p", "evaluate.min_p", "sampling.logit_bias")
    ),
]
_SAMPLING = [
    *unused(
        ["evaluate.top_p", "evaluate.top_k", "evaluate.min_p"],
        "evaluate.temperature",
        lambda cfg: cfg.objective.samples and cfg.evaluate.temperature == 0,
        "the likeliest token is taken: leave it out, or raise the temperature",
    ),
    *(_penalty_per_turn(name) for name in ("presence_penalty", "frequency_penalty")),
    *(_penalty_per_request(name) for name in ("presence_penalty", "frequency_penalty")),
    *(
        _penalty_of_resumed(name, schedule)
        for name in ("presence_penalty", "frequency_penalty")
        for schedule in ("over_sample", "in_flight")
    ),
]
_SCHEDULE = [
    Rule(
        ("rollout.schedule.in_flight", "layout.placement"),
        lambda cfg: (
            _is_sampled(cfg) and cfg.rollout.schedule.in_flight and not cfg.layout.roles.overlaps
        ),
        "nothing is sampled while the policy trains",
        "take split, or leave it out",
    ),
    Rule(
        ("rollout.schedule.in_flight", "lag"),
        lambda cfg: (
            _is_sampled(cfg)
            and cfg.rollout.schedule.in_flight
            and cfg.layout.roles.overlaps
            and not cfg.lag
        ),
        "nothing is sampled while the policy trains",
        "set lag to 1 or more",
    ),
    Rule(
        ("rollout.schedule.dynamic", "batch.group_size"),
        lambda cfg: _is_sampled(cfg) and cfg.rollout.schedule.dynamic and cfg.batch.group_size == 1,
        "no group of one sample has a spread of rewards",
        "leave it out, or use groups of at least 2",
    ),
    Rule(
        ("rollout.schedule.dynamic", "rewards.functions"),
        lambda cfg: _is_sampled(cfg) and cfg.rollout.schedule.dynamic and _has_reward_model(cfg),
        "trainers compute the rewards of a model, and the spread of a group's rewards is not known "
        "where prompts are drawn",
        "leave it out",
        "not built",
    ),
    Rule(
        ("rollout.schedule.curriculum", "rollout.schedule.dynamic"),
        lambda cfg: (
            _is_sampled(cfg)
            and cfg.rollout.schedule.curriculum != 1
            and cfg.rollout.schedule.dynamic
        ),
        "dynamic takes prompts before it is known what earlier steps measured",
        "leave one of them out",
        "not built",
    ),
    Rule(
        ("rollout.schedule.curriculum", "rewards.functions"),
        lambda cfg: (
            _is_sampled(cfg)
            and cfg.rollout.schedule.curriculum != 1
            and not cfg.rollout.schedule.dynamic
            and _has_reward_model(cfg)
        ),
        "trainers compute the rewards of a model, and pass rates are not known where prompts are "
        "drawn",
        "leave it out",
        "not built",
    ),
]


def _judged(
    field: str, when: Callable[[Config], object], reason: str, remedy: str, kind: RuleKind
) -> Rule:
    """Return the rule against rewards.judge with another setting."""
    return Rule(
        ("rewards.judge.engine", field),
        lambda cfg: cfg.objective.samples and cfg.rewards.judge.is_on and when(cfg),
        reason,
        remedy,
        kind,
    )


_JUDGE = [
    _judged(
        "model.lora.push",
        lambda cfg: cfg.rewards.judge.engine == "base" and not cfg.model.lora.pushes_adapter,
        "only engines that get adapters apart from the weights have frozen weights",
        "train adapters (model.lora.rank) with model.lora.push adapter, take policy, or ask a "
        "server",
        "principle",
    ),
    _judged(
        "rewards.functions",
        lambda cfg: all(
            is_generated(spec) or reward_models([spec]) for spec in cfg.reward_functions
        ),
        "no function can ask it",
        "name a function that does, as docs/rewards.md shows, or set it to none",
        "principle",
    ),
    *(
        _judged(
            f"rollout.schedule.{name}",
            attrgetter(f"rollout.schedule.{field}"),
            "checkpoints do not hold verdicts that are under way",
            "leave one of them out, or ask a server",
            "not built",
        )
        for name, field in (("in_flight", "in_flight"), ("over_sample", "leaves_unfinished"))
    ),
    _judged(
        "engine.options.speculative_config",
        attrgetter("engine.draft_tokens"),
        "no test shows that verdicts keep their tokens",
        "leave one of them out",
        "untried",
    ),
    _judged(
        "rollout.record.replay",
        replay_folder,
        "recorded rollouts have their rewards",
        "set it to none",
        "principle",
    ),
    *unused(
        ["rewards.judge.max_prompt_tokens", "rewards.judge.max_response_tokens"],
        "rewards.judge.engine",
        lambda cfg: cfg.objective.samples and not cfg.rewards.judge.is_on,
        "set the engine to base or policy, or leave it out",
    ),
]


_TIMED: dict[str, Callable[[Config], object]] = {
    "rollout.environment": lambda cfg: cfg.environment_fields(),
    "rollout.agent": attrgetter("rollout.has_agent"),
    "rewards.judge.engine": attrgetter("rewards.judge.is_on"),
    "rollout.schedule.in_flight": attrgetter("rollout.schedule.in_flight"),
    "rollout.schedule.over_sample": attrgetter("rollout.schedule.leaves_unfinished"),
    "rollout.schedule.dynamic": attrgetter("rollout.schedule.dynamic"),
    "rollout.schedule.balance": lambda cfg: cfg.rollout.schedule.balance == "steal",
}
"""What makes a run timed, see `is_timed`."""


def _served_timed(field: str, when: Callable[[Config], object]) -> Rule:
    """Return the rule against rollout.serve where time decides what is sampled (`is_timed`)."""
    return Rule(
        ("rollout.serve", field),
        lambda cfg: cfg.rollout.serve and when(cfg),
        "time decides what such a run samples, and its schedule does not hold requests of other "
        "programs",
        "leave one of them out",
        "not built",
    )


_SERVE = [
    Rule(
        ("rollout.serve", "deterministic", "engine.exact"),
        lambda cfg: cfg.rollout.serve and cfg.deterministic and not cfg.engine.exact,
        "requests of other programs change which sequences are computed together, and so the last "
        "bits of each",
        "set engine.exact true, or deterministic false",
    ),
    *(_served_timed(field, when) for field, when in _TIMED.items()),
    Rule(
        ("rollout.serve", "engine.max_num_seqs"),
        lambda cfg: 2 * cfg.rollout.serve > cfg.engine.max_num_seqs,
        "other programs may have half of an engine's places",
        "lower it, or raise engine.max_num_seqs",
    ),
    Rule(
        ("rollout.serve", "engine.options.speculative_config"),
        lambda cfg: cfg.rollout.serve and cfg.engine.draft_tokens,
        "no test shows that both go together",
        "leave one of them out",
        "untried",
    ),
    Rule(
        ("rollout.serve", "rollout.record.replay"),
        lambda cfg: cfg.rollout.serve and replay_folder(cfg),
        "nothing is sampled, so no engine can answer",
        "leave one of them out",
    ),
]
_RECORD = [
    Rule(
        ("rollout.record.every", "rollout.record.replay"),
        lambda cfg: cfg.rollout.record.every and cfg.rollout.record.replay,
        "replaying samples nothing new to record",
        "leave one of them out",
    ),
    Rule(
        ("rollout.replay_schedule", "rollout.schedule"),
        lambda cfg: (
            cfg.rollout.replay_schedule
            and not (cfg.rollout.record.every and cfg.rollout.record.replay)
            and not is_timed(cfg)
        ),
        "time decides nothing in this run: its engines neither work ahead nor judge nor have an "
        "environment or an agent, and it repeats by itself",
        "leave it out",
    ),
]
_EVALUATION = [
    Rule(
        ("evaluate.every_steps", "data.eval"),
        lambda cfg: cfg.evaluate.every_steps and not cfg.data.eval,
        "there is nothing to evaluate on",
        "name held-out rows in data.eval",
    ),
    Rule(
        ("checkpoint.keep.mode", "checkpoint.keep.best"),
        lambda cfg: cfg.checkpoint.keep.mode != "max" and not cfg.checkpoint.keep.best,
        "it says which value of the metric in keep.best is the best",
        "set keep.best, or leave it out",
    ),
    Rule(
        ("checkpoint.keep.best", "layout.placement"),
        lambda cfg: cfg.checkpoint.keep.best and not cfg.layout.roles.has_engines,
        "the metrics of the evaluation are measured by sampling held-out problems, and nothing "
        "samples",
        "take it out",
    ),
    Rule(
        ("checkpoint.keep.best", "evaluate.every_steps"),
        lambda cfg: (
            cfg.checkpoint.keep.best
            and cfg.layout.roles.has_engines
            and not cfg.evaluate.every_steps
        ),
        "nothing measures it",
        "set evaluate.every_steps (a new best is saved when it is found, whatever "
        "checkpoint.every_steps says)",
    ),
    Rule(
        ("data.chat_template_kwargs", "data.chat_template"),
        # An environment's conversations go through the template all the same.
        lambda cfg: (
            cfg.data.chat_template_kwargs
            and cfg.data.chat_template == "never"
            and not cfg.environment_fields()
        ),
        "they are for the chat template, which is never applied",
        "leave them out, or set data.chat_template to auto",
    ),
]

SAMPLING: list[Rule] = [
    *_LAYOUT,
    *_DATA_PARALLEL,
    *_ENGINES,
    *_EXACT,
    *_DRAFTS,
    *_SAMPLING,
    *_SCHEDULE,
    *_JUDGE,
    *_SERVE,
    *_RECORD,
    *_EVALUATION,
]
