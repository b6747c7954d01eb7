"""Whether reference, adapters, routers and memory of a model go together."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace

from spmdrl.check.ranges import idle_problems
from spmdrl.config import LoraSettings
from spmdrl.config.fields import Config
from spmdrl.config.tree import changed
from spmdrl.imports import attempt

MAX_RANK = 512
"""Of vLLM's adapters."""


def model_problems(cfg: Config) -> list[str]:
    """Return what is wrong with the section `model`, each as `field: what, value seen`."""
    return [
        *_part_problems(cfg),
        *_memory_problems(cfg),
        *_lora_problems(cfg),
        *_push_problems(cfg),
        *_moe_problems(cfg),
        *_reference_problems(cfg),
    ]


def _part_problems(cfg: Config) -> Iterator[str]:
    model = cfg.model
    if model.part == "text" and model.trust_remote_code:
        yield (
            "model.part: text with model.trust_remote_code: which tensors are the text model's is "
            "read off transformers' own classes; take one of them out"
        )
    for name, rate in model.own_rates.items():
        if model.train == "language":
            yield (
                f"model.{name}: {rate:g} with model.train language, which leaves tower and "
                "projector as they are; leave one of them out"
            )
        if not cfg.optimizer.lr:
            yield (
                f"model.{name}: {rate:g} with optimizer.lr 0, whose schedule it follows; set "
                "optimizer.lr above 0"
            )
    if model.part == "text" and cfg.objective.is_scalar:
        yield (
            f"model.part: text with the objective {cfg.algorithm.objective}, whose model has a "
            "head of its own, for which the whole has no place; take a text model"
        )


def _memory_problems(cfg: Config) -> Iterator[str]:
    memory = cfg.model.memory
    if memory.optimizer_dtype == "int8" and importlib.util.find_spec("torchao") is None:
        yield (
            "model.memory.optimizer_dtype: int8 takes its quantisation from torchao, "
            "which is not installed: pip install --no-deps torchao==0.18.0"
        )
    if cfg.model.lora.is_on and memory.offload == "parameters":
        yield (
            "model.memory.offload: parameters with model.lora, whose adapters are "
            "small and merged on the device for every push; take optimizer or "
            "activations"
        )
    if cfg.model.lora.is_on and memory.master_dtype == "bfloat16":
        yield (
            "model.memory.master_dtype: bfloat16 with model.lora, whose adapters stay "
            "float32 and whose frozen weights are in model.compute_dtype; leave it out"
        )


def _lora_problems(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    if not lora.is_on:
        yield from idle_problems(
            lora, "model.lora", "without adapters; set model.lora.rank, e.g. to 16"
        )
    elif lora.path:
        why = f"with path {lora.path}: the adapter there says it; leave one of them out"
        said = replace(lora, path="", push=LoraSettings.push)
        yield from idle_problems(said, "model.lora", why)
    pattern = lora.targets if isinstance(lora.targets, str) else ""
    _, error = attempt(lambda: re.compile(pattern), re.error)
    if error or not lora.targets or not all(lora.targets):
        yield (
            "model.lora.targets: expected all-linear, a regular expression of module names, or a "
            f"list of names or their ends, got {lora.targets!r}"
        )
    every = cfg.model.reference.sync_every
    if lora.is_on and every and not cfg.model.reference.path:
        yield (
            f"model.reference.sync_every: {every} with model.lora, whose reference is the "
            "policy without its adapters, which never changes; leave one of them out"
        )
    elif lora.is_on and every:
        yield (
            f"model.reference.sync_every: {every} with model.lora: adapters cannot be "
            "mixed into a reference; leave one of them out"
        )


def _push_problems(cfg: Config) -> Iterator[str]:
    lora = cfg.model.lora
    if not lora.pushes_adapter:
        return
    if cfg.engine.kind != "vllm":
        yield (
            f"model.lora.push: adapter with engine.kind {cfg.engine.kind}: only vllm "
            "computes with adapters of its own; take merged"
        )
    if not cfg.layout.roles.has_engines:
        yield (
            "model.lora.push: adapter under placement offline, where there is no "
            "engine to push to; leave it out"
        )
    if cfg.stream.mode == "reload":
        yield (
            "model.lora.push: adapter with stream.mode reload: adapters are written in "
            "place; take auto, or push merged"
        )
    if lora.rank > MAX_RANK:
        yield (
            f"model.lora.push: adapter with rank {lora.rank}: vLLM has adapters up to rank "
            f"{MAX_RANK}; take merged"
        )


def _moe_problems(cfg: Config) -> Iterator[str]:
    moe = cfg.model.moe
    if moe.balance == "bias" and cfg.model.lora.is_on:
        yield (
            "model.moe.balance: bias with model.lora, which leaves the model's own "
            "tensors as they are; leave one of them out"
        )
    for name, balance in (("coef", "aux"), ("rate", "bias")):
        if name in changed(moe) and moe.balance != balance:
            yield (
                f"model.moe.{name}: is an option of balance {balance}, and balance is "
                f"{moe.balance}; take it out"
            )


# --------------------------------------------------------------------------- the reference


def _reference_problems(cfg: Config) -> list[str]:
    own, problems = cfg.model.reference, []
    if own.sync_mix != 1 and not own.sync_every:
        problems.append(f"sync_mix: {own.sync_mix} without sync_every, the steps between two syncs")
    if own.cache_folder and not own.cache:
        problems.append(f"cache_folder: {own.cache_folder} without cache; set cache to true")
    if own.sync_every and own.cache:
        problems.append(
            f"cache: true with sync_every {own.sync_every}: the logprobs of a reference "
            "that changes cannot be kept; leave one of them out"
        )
    if not problems and (own.sync_every or own.cache):
        problems = _use_problems(cfg)
    return [f"model.reference.{problem}" for problem in problems]


def _use_problems(cfg: Config) -> list[str]:
    """Return what is wrong with options that are right by themselves."""
    from spmdrl.data.examples import row_kind
    from spmdrl.train.objectives.objective_loss import needed_columns

    chosen, cached = cfg.algorithm, cfg.model.reference.cache
    objective = cfg.objective
    columns, _error = attempt(lambda: needed_columns(cfg))
    row, _error = attempt(lambda: row_kind(cfg))
    if columns is None or row is None:
        return []  # an unknown method, which is reported as such
    name = "cache" if cached else "sync_every"
    if cached and objective.samples:
        return [
            f"cache: with the objective {chosen.objective}, whose responses are sampled anew in "
            "every step: there are no rows to look up; leave it out"
        ]
    if "ref_logprobs" not in columns:
        used = f"the objective {chosen.objective}"
        if objective.has_advantages:
            used = f"kl_coef {chosen.kl_coef}"
        elif objective.trains_on_pairs:
            used = f"the loss {chosen.loss}"
        return [f"{name}: {used} uses no reference; leave it out"]
    if cached and row == "label":
        return [
            f"cache: the loss {chosen.loss} puts each response to another prompt of its step "
            "for the KL, other pairs in every epoch: there are no fixed rows whose logprobs "
            "could be kept; leave it out"
        ]
    return []
