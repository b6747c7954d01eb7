"""Whether models fit the layout, known from their config.json before any group is created."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdrl.check.lora import MAX_RANK
from spmdrl.check.options import KERNELS, MEMORY
from spmdrl.config import Config, Model, inference_ranks
from spmdrl.imports import divisors
from spmdrl.model.blocks import blocks, mixtures
from spmdrl.model.file_tensors import file_tensors
from spmdrl.model.load import CheckpointReader, build_meta_model, check_weights, load_hf_config
from spmdrl.model.lora.files import AdapterFolder
from spmdrl.model.lora.layers import adapter_shapes, has_embedding, lora_form
from spmdrl.model.parallel.recompute import check_offload
from spmdrl.model.parallel.tensor_parallel import why_never
from spmdrl.model.parallel.tp_plan import heads_fields
from spmdrl.model.router_replay import WEIGHTS, unknown_router
from spmdrl.rewards.signatures import reward_models
from spmdrl.train.router_balance import check_balance
from spmdrl.world.world import is_on_cpu

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYERS = ("full_attention", "sliding_attention")  # of which packed attention knows all


def check_fit(cfg: Config) -> None:
    """Refuse models that an axis of either mesh cannot divide, and adapters that cannot be.

    Raises: ValueError with every problem; where there is none, for weights that lack tensors of the
        policy or have others.
    """
    policy = _Policy(cfg)
    problems = [*_problems(policy), *_offload_misfits(cfg)] or weights_misfits(policy)
    if problems:
        raise ValueError("\n".join(problems))


def fit_problems(cfg: Config) -> list[str]:
    """Return why models of a config do not fit its layout, each as `field: what, value seen`.

    A model whose config.json cannot be read is passed over: who loads it says why.
    """
    return _problems(_Policy(cfg))


class _Policy:
    """The policy's model, as far as its config.json tells: read and built once."""

    def __init__(self, cfg: Config):
        self.cfg, self.is_scalar = cfg, cfg.objective.is_scalar
        self.problem = ""
        """Why it cannot be built; "" as long as nobody asked."""

    @functools.cached_property
    def hf_config(self) -> Any | None:
        """transformers' config; None where it cannot be read."""
        model = self.cfg.model
        with contextlib.suppress(ValueError):
            return load_hf_config(model.path, trust_remote_code=model.trust_remote_code)

    @functools.cached_property
    def hf_model(self) -> nn.Module | None:
        """On the meta device; None where it cannot be built."""
        try:
            return build_meta_model(self.cfg.model, is_scalar=self.is_scalar)
        except ValueError as error:
            self.problem = str(error)


def _problems(policy: _Policy) -> list[str]:
    cfg, layout = policy.cfg, policy.cfg.layout
    problems = [
        *adapter_misfits(policy),
        *push_misfits(policy),
        *replay_misfits(policy),
        *balance_misfits(policy),
        *engine_misfits(policy),
    ]
    kernels = KERNELS | cfg.model.kernels
    if layout.cp == layout.ep == layout.tp == 1 and not kernels["compile"]:
        return problems
    named = {
        "model.path": cfg.model.path,
        "model.reference": cfg.model.reference,
        "model.teacher": cfg.model.teacher,
        "critic.path": cfg.critic.path,
    }
    models = reward_models(cfg.rewards.functions).values()
    named |= {f"rewards.functions model:{path}": path for path in models}
    for field, path in named.items():
        with contextlib.suppress(ValueError):
            hf_config = load_hf_config(path, trust_remote_code=cfg.model.trust_remote_code)
            never, has_mlp = "", True
            if layout.tp > 1:
                never, has_mlp = _under_tp(replace(cfg.model, path=path))
            if never:
                problems.append(
                    f"layout.tp: {layout.tp} with a {hf_config.model_type}: {never}; "
                    f"set layout.tp to 1 ({field} {path})"
                )
            problems += [
                f"{problem} ({field} {path})"
                for problem in misfits(
                    hf_config,
                    cp=layout.cp,
                    tp=layout.tp,
                    context=kernels["context"],
                    has_mlp=has_mlp,
                )
            ]
            problems += [
                f"{problem} ({field} {path})"
                for problem in expert_misfits(
                    hf_config,
                    ep=layout.ep,
                    compiles=kernels["compile"],
                    is_policy=field == "model.path",
                )
            ]
    return problems


def _offload_misfits(cfg: Config) -> list[str]:
    """Return why nothing can be offloaded here, where the run is about to start."""
    if not is_on_cpu(cfg):
        return []
    try:
        check_offload((MEMORY | cfg.model.memory)["offload"], torch.device("cpu"))
    except ValueError as error:
        return [str(error)]
    return []


def weights_misfits(policy: _Policy) -> list[str]:
    """Return what the policy's files lack or have too much, if they are here; of a hub model they
    would have to be fetched. Engines say less of it, and come first."""
    folder = Path(policy.cfg.model.path)
    if not folder.is_dir():
        return []
    if policy.hf_model is None:
        return [policy.problem]
    try:
        check_weights(
            CheckpointReader(folder),
            policy.hf_model,
            file_tensors(policy.hf_model),
            is_scalar=policy.is_scalar,
        )
    except ValueError as error:
        return [str(error)]
    return []


def adapter_misfits(policy: _Policy) -> list[str]:
    """Return why the policy can have no such adapters: targets that match nothing, a folder that
    holds none, or one of another model."""
    lora = policy.cfg.model.lora
    if not lora or policy.hf_model is None:
        return []
    try:
        form = lora_form(lora)
        shapes = adapter_shapes(policy.hf_model, form)
        if form.path:
            AdapterFolder(Path(form.path)).check(shapes)
    except ValueError as error:
        return [str(error)]
    return []


def engine_misfits(policy: _Policy) -> list[str]:
    """Return why vLLM cannot cut the policy over layout.inference_tp."""
    cfg, tp = policy.cfg, policy.cfg.layout.inference_tp
    if tp == 1 or not inference_ranks(cfg) or cfg.engine.kind != "vllm" or not policy.hf_config:
        return []
    return [
        f"{problem} (model.path {cfg.model.path})"
        for problem in inference_misfits(policy.hf_config, tp=tp)
    ]


def inference_misfits(hf_config: Any, *, tp: int) -> list[str]:
    """Return why vLLM cannot cut a model: its ranks may hold the same key/value heads, but share
    out all else that is cut, of the vocabulary a multiple of 64 rows."""
    heads, kv_heads, width, vocab = (
        getattr(hf_config, name, None)
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        )
    )
    if not isinstance(heads, int):
        return []
    whole = {"num_attention_heads": heads}
    if isinstance(width, int) and not _num_experts(hf_config):
        whole["intermediate_size"] = width
    if isinstance(vocab, int):
        whole["padded vocab_size"] = -(-vocab // 64) * 64
    shared = (
        {"num_key_value_heads": kv_heads}
        if isinstance(kv_heads, int) and ("num_key_value_heads" in heads_fields(hf_config))
        else {}
    )

    def unsuited(size: int) -> list[str]:
        return [
            *(f"{name} {count}" for name, count in whole.items() if count % size),
            *(
                f"{name} {count}, nor is it a multiple"
                for name, count in shared.items()
                if count % size and size % count
            ),
        ]

    if not unsuited(tp):
        return []
    fitting = ", ".join(str(size) for size in range(1, heads + 1) if not unsuited(size))
    return [
        f"layout.inference_tp: {tp} does not divide {', '.join(unsuited(tp))}; values that "
        f"suit the model: {fitting}"
    ]


def push_misfits(policy: _Policy) -> list[str]:
    """Return why the policy's adapters cannot be those of an engine."""
    model = policy.cfg.model
    if model.lora.get("push") != "adapter":
        return []
    with contextlib.suppress(ValueError):  # which adapter_misfits says
        form = lora_form(model.lora)
        if form.rank > MAX_RANK:  # of a folder
            return [
                f"model.lora.push: adapter with rank {form.rank} of {form.path}: vLLM has "
                f"adapters up to rank {MAX_RANK}; take merged"
            ]
        if policy.hf_model is None:
            return []
        if has_embedding(policy.hf_model, form):
            return [
                "model.lora.push: adapter with targets that name the embedding, of which "
                "vLLM takes no adapter; take merged, or leave it out"
            ]
        if _num_experts(policy.hf_config):
            # On the CPU there is no Triton, and the path is not proved on CUDA.
            return [
                f"model.lora.push: adapter with a {policy.hf_config.model_type}: with LoRA of "
                "its own vLLM computes experts by Triton kernels only; take merged "
                f"(model.path {model.path})"
            ]
    return []


def replay_misfits(policy: _Policy) -> list[str]:
    """Return why the routes of model.path cannot be replayed, if they are to be."""
    model, hf_config = policy.cfg.model, policy.hf_config
    if not model.moe.get("replay") or not hf_config:
        return []
    if not _num_experts(hf_config):
        return [
            f"model.moe.replay: true with a {hf_config.model_type}, which has no experts "
            f"(model.path {model.path}); take it out"
        ]
    if hf_config.model_type not in WEIGHTS:
        return [f"{unknown_router(hf_config.model_type)} (model.path {model.path})"]
    return []


def balance_misfits(policy: _Policy) -> list[str]:
    """Return why the load of the policy's experts cannot be balanced in the way that is asked."""
    model, balance = policy.cfg.model, policy.cfg.model.moe.get("balance", "none")
    # What keeps routes from being replayed says that there are no experts, too.
    if balance == "none" or replay_misfits(policy) or policy.hf_model is None:
        return []
    try:
        check_balance(policy.hf_model, balance=balance)
    except ValueError as error:
        return [f"{error} (model.path {model.path})"]
    return []


def _under_tp(model: Model) -> tuple[str, bool]:
    """Return why a model cannot be tensor-parallel, and whether tp cuts the MLP of some layer."""
    try:
        hf_model = build_meta_model(model)
        return why_never(hf_model), len(mixtures(hf_model)) < len(blocks(hf_model))
    except ValueError:  # who loads it says why
        return "", True


def expert_misfits(hf_config: Any, *, ep: int, compiles: bool, is_policy: bool) -> list[str]:
    """Return why the experts of a model cannot be dealt out, or compiled. Models beside the
    policy may be dense under any ep."""
    experts = _num_experts(hf_config)
    if not experts:
        return (
            [
                f"layout.ep: {ep} with a {hf_config.model_type}, which has no experts; set "
                "layout.ep to 1"
            ]
            if ep > 1 and is_policy
            else []
        )
    problems = []
    if experts % ep:
        problems.append(
            f"layout.ep: {ep} does not divide the {experts} experts; values that do: "
            f"{divisors(experts)}"
        )
    if compiles:  # inductor of torch 2.13 crashes in their backward pass on the CPU
        problems.append(
            f"model.kernels.compile: true with a {hf_config.model_type}, whose experts "
            "cannot be compiled; set it to false"
        )
    return problems


def _num_experts(hf_config: Any) -> int:
    return next(
        (number for name in _EXPERTS if isinstance(number := getattr(hf_config, name, None), int)),
        0,
    )


def misfits(hf_config: Any, *, cp: int, tp: int, context: str, has_mlp: bool = True) -> list[str]:
    """Return why a model cannot be cut along these axes.

    Args:
        hf_config: a transformers config.
        context: model.kernels.context.
        has_mlp: some layer has an MLP that is no mixture of experts.
    """
    problems = []
    cut = (*heads_fields(hf_config), *(("intermediate_size",) if has_mlp else ()), "vocab_size")
    sizes = {name: size for name in cut if isinstance(size := getattr(hf_config, name, None), int)}
    uncut = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    if uncut:
        problems.append(
            f"layout.tp: {tp} does not divide {', '.join(uncut)}; values that divide "
            f"all that tp cuts: {divisors(math.gcd(*sizes.values()))}"
        )
    if cp == 1:
        return problems
    heads = sizes.get("num_attention_heads")
    others = sorted(set(getattr(hf_config, "layer_types", None) or ()) - set(_LAYERS))
    if heads is None or others:
        problems.append(
            f"layout.cp: {cp} with a {hf_config.model_type}, whose layers "
            + (f"({', '.join(others)}) " if others else "without attention heads ")
            + "cannot be computed on slices of a sequence; set layout.cp to 1"
        )
    elif context == "ulysses" and not uncut and heads // tp % cp:
        problems.append(
            f"layout.cp: {cp} does not divide the {heads} / tp {tp} = {heads // tp} query heads "
            f"that ulysses deals out; values that do: {divisors(heads // tp)}; or set "
            "model.kernels.context to auto, which gathers where heads do not divide"
        )
    return problems
