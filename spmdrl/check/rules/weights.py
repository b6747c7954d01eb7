"""Rules for the sections `model` and `optimizer`."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from spmdrl.check.rules.rule import Rule
from spmdrl.config.fields import Config
from spmdrl.config.tree import flatten

_DEFAULTS = flatten(Config())


def unused(
    names: list[str],
    other: str,
    when: Callable[[Config], object],
    remedy: str,
    *,
    reason: str = "it has no effect there",
) -> list[Rule]:
    """Return a rule for each field that has no effect under the value of another field.

    Args:
        names: of the fields. other: the field whose value makes them useless.
        when: returns whether it does in a config. reason, remedy: of the rules.
    """

    def rule(name: str) -> Rule:
        return Rule(
            fields=(name, other),
            when=lambda cfg: when(cfg) and attrgetter(name)(cfg) != _DEFAULTS[name],
            reason=reason,
            remedy=remedy,
        )

    return [rule(name) for name in names]


def _section(name: str) -> list[str]:
    return [field for field in _DEFAULTS if field.startswith(f"{name}.")]


def _has_lora(cfg: Config) -> bool:
    return cfg.model.lora.is_on


def _is_muon(cfg: Config) -> bool:
    return cfg.optimizer.kind == "muon"


_LORA_OPTIONS = [
    name for name in _section("model.lora") if name not in ("model.lora.rank", "model.lora.path")
]
_SAID_BY_ADAPTER = ["model.lora.rank", *_LORA_OPTIONS]
# An adapter's folder does not say how engines get it, or how the weights under it are stored.
_SAID_BY_ADAPTER.remove("model.lora.push")
_SAID_BY_ADAPTER.remove("model.lora.base")


def _kept_in_float32(name: str) -> Rule:
    return Rule(
        (f"model.memory.{name}", "optimizer.kind"),
        lambda cfg: _is_muon(cfg) and getattr(cfg.model.memory, name) != "float32",
        "Muon's weights and momentum are float32 (4 bytes of state instead of AdamW's 8)",
        "leave it out, or take adamw",
        "not built",
    )


WEIGHTS: list[Rule] = [
    # ------------------------------------------------------------------ parts of a model
    Rule(
        ("model.part", "model.trust_remote_code"),
        lambda cfg: cfg.model.part == "text" and cfg.model.trust_remote_code,
        "which tensors are the text model's is read off transformers' own classes",
        "take one of them out",
        "not built",
    ),
    Rule(
        ("model.part", "algorithm.objective"),
        lambda cfg: cfg.model.part == "text" and cfg.objective.is_scalar,
        "its model has a head of its own, for which the whole model has no place",
        "take a text model",
    ),
    Rule(
        ("model.vision_lr", "model.train"),
        lambda cfg: cfg.model.own_rates and cfg.model.train == "language",
        "tower and projector stay as they are",
        "leave one of them out",
    ),
    Rule(
        ("model.vision_lr", "optimizer.lr"),
        lambda cfg: cfg.model.own_rates and not cfg.optimizer.lr,
        "it follows the schedule of optimizer.lr",
        "set optimizer.lr above 0",
    ),
    # ------------------------------------------------------------------ adapters
    *unused(
        _LORA_OPTIONS,
        "model.lora.rank",
        lambda cfg: not _has_lora(cfg),
        "set model.lora.rank, e.g. to 16, or leave it out",
    ),
    *unused(
        _SAID_BY_ADAPTER,
        "model.lora.path",
        lambda cfg: cfg.model.lora.path,
        "the adapter in that folder says it: leave one of them out",
    ),
    Rule(
        ("model.memory.offload", "model.lora"),
        lambda cfg: _has_lora(cfg) and cfg.model.memory.offload == "parameters",
        "adapters are small, and merged on the device for every push",
        "take optimizer or activations",
        "not built",
    ),
    Rule(
        ("model.memory.master_dtype", "model.lora"),
        lambda cfg: _has_lora(cfg) and cfg.model.memory.master_dtype == "bfloat16",
        "adapters stay float32, and frozen weights are in model.compute_dtype",
        "leave it out",
        "not built",
    ),
    Rule(
        ("model.reference.sync_every", "model.lora"),
        lambda cfg: (
            _has_lora(cfg) and cfg.model.reference.sync_every and not cfg.model.reference.path
        ),
        "the reference is the policy without its adapters, which never changes",
        "leave one of them out",
    ),
    Rule(
        ("model.reference.sync_every", "model.lora", "model.reference.path"),
        lambda cfg: _has_lora(cfg) and cfg.model.reference.sync_every and cfg.model.reference.path,
        "adapters cannot be mixed into a reference",
        "leave one of them out",
        "not built",
    ),
    Rule(
        ("model.lora.push", "engine.kind"),
        lambda cfg: cfg.model.lora.pushes_adapter and not cfg.engine.traits.has_adapters,
        "only vllm computes with adapters of its own",
        "take merged",
        "not built",
    ),
    Rule(
        ("model.lora.push", "layout.placement"),
        lambda cfg: cfg.model.lora.pushes_adapter and not cfg.layout.roles.has_engines,
        "there is no engine to push to",
        "leave it out",
    ),
    Rule(
        ("model.lora.push", "stream.mode"),
        lambda cfg: cfg.model.lora.pushes_adapter and cfg.stream.mode == "reload",
        "adapters are written in place",
        "take auto, or push merged",
        "not built",
    ),
    Rule(
        ("model.lora.base", "engine.exact"),
        lambda cfg: cfg.model.lora.quantises and cfg.engine.exact,
        "exact layers multiply by merged weights, which are not kept quantised",
        "take full, or set exact to false",
        "not built",
    ),
    # ------------------------------------------------------------------ pushes of what changed
    Rule(
        ("stream.delta", "layout.placement"),
        lambda cfg: cfg.stream.delta == "always" and cfg.layout.roles.shares_devices,
        "engines drop their weights while they sleep",
        "take auto or never",
        "not built",
    ),
    Rule(
        ("stream.delta", "stream.mode"),
        lambda cfg: cfg.stream.delta == "always" and cfg.stream.mode == "reload",
        "the engine's own loader takes whole tensors",
        "take auto or never",
    ),
    Rule(
        ("stream.delta", "model.lora.push"),
        lambda cfg: cfg.stream.delta == "always" and cfg.model.lora.pushes_adapter,
        "adapters are small, and each step changes all of their elements",
        "take auto or never",
    ),
    *unused(
        ["stream.full_every"],
        "stream.delta",
        lambda cfg: cfg.stream.delta == "never",
        "take auto or always, or leave it out",
    ),
    # ------------------------------------------------------------------ routers
    Rule(
        ("model.moe.balance", "model.lora"),
        lambda cfg: cfg.model.moe.balance == "bias" and _has_lora(cfg),
        "adapters leave the model's own tensors as they are",
        "leave one of them out",
    ),
    *unused(
        ["model.moe.coef"],
        "model.moe.balance",
        lambda cfg: cfg.model.moe.balance != "aux",
        "take balance aux, or leave it out",
    ),
    *unused(
        ["model.moe.rate"],
        "model.moe.balance",
        lambda cfg: cfg.model.moe.balance != "bias",
        "take balance bias, or leave it out",
    ),
    # ------------------------------------------------------------------ the reference
    Rule(
        ("model.reference.sync_mix", "model.reference.sync_every"),
        lambda cfg: cfg.model.reference.sync_mix != 1 and not cfg.model.reference.sync_every,
        "nothing is mixed without sync_every, the steps between two syncs",
        "set sync_every, or leave sync_mix out",
    ),
    Rule(
        ("model.reference.cache_folder", "model.reference.cache"),
        lambda cfg: cfg.model.reference.cache_folder and not cfg.model.reference.cache,
        "without cache nothing is kept",
        "set cache to true, or leave cache_folder out",
    ),
    Rule(
        ("model.reference.cache", "model.reference.sync_every"),
        lambda cfg: cfg.model.reference.cache and cfg.model.reference.sync_every,
        "the logprobs of a reference that changes cannot be kept",
        "leave one of them out",
    ),
    Rule(
        ("model.reference.cache", "algorithm.objective"),
        lambda cfg: (
            cfg.model.reference.cache
            and not cfg.model.reference.sync_every
            and cfg.objective.samples
        ),
        "responses are sampled again in every step: there are no rows to look up",
        "leave cache out",
    ),
    # ------------------------------------------------------------------ the optimizer
    *unused(
        _section("optimizer.muon"),
        "optimizer.kind",
        lambda cfg: not _is_muon(cfg),
        "set kind to muon, or leave it out",
    ),
    Rule(
        ("optimizer.kind", "model.lora"),
        lambda cfg: _is_muon(cfg) and _has_lora(cfg),
        "Muon orthogonalises the step of a weight, and an adapter's factors are no weights",
        "take adamw",
    ),
    *(_kept_in_float32(name) for name in ("master_dtype", "optimizer_dtype")),
    Rule(
        ("model.memory.offload", "optimizer.kind"),
        lambda cfg: (
            _is_muon(cfg) and cfg.model.memory.offload in ("optimizer", "all", "parameters")
        ),
        "Muon's momentum is gathered on the device for each update",
        "take none or activations, or adamw",
        "not built",
    ),
    *unused(
        _section("optimizer.loss_scale"),
        "model.compute_dtype",
        lambda cfg: cfg.model.compute_dtype != "float16",
        "take compute_dtype float16, whose gradients need it, or leave it out",
    ),
    Rule(
        ("model.memory.master_dtype", "model.compute_dtype"),
        lambda cfg: (
            cfg.model.compute_dtype == "float16" and cfg.model.memory.master_dtype != "float32"
        ),
        "float16 has more digits than these weights",
        "leave master_dtype at float32",
    ),
]
