"""Whether models fit the layout, known from their config.json before any group is created."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmdrl.check.values import MAX_RANK
from spmdrl.config import Config
from spmdrl.engine.vllm.expert_adapters import ADAPTED_MIXTURES
from spmdrl.engine.vllm.families import (
    check_data_parallel,
    check_drafts,
    check_mixers,
    model_arguments,
)
from spmdrl.errors import Refusal
from spmdrl.imports import attempt, is_missing_folder
from spmdrl.model.attention.packing_support import packing_support
from spmdrl.model.attention.pick import kernel_of
from spmdrl.model.blocks import experts_modules, uneven_experts, unshardable
from spmdrl.model.divisibility import misfits
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.files.reader import CheckpointReader, check_files, has_weights, instead, some
from spmdrl.model.head import check_fused_head
from spmdrl.model.load import build_meta_model, check_buffers, check_weights
from spmdrl.model.lora.expert_adapters import adaptable
from spmdrl.model.lora.files import AdapterFolder
from spmdrl.model.lora.layers import adapted_weights, lora_form
from spmdrl.model.lora.quantised_base import BLOCK
from spmdrl.model.lora.targets import (
    LoraForm,
    adapter_shapes,
    has_embedding,
    is_linear,
    largest_rank,
    targeted,
)
from spmdrl.model.model_shape import ModelCounts, counts_of
from spmdrl.model.parallel.recompute import check_offload
from spmdrl.model.parallel.tp_plan import tp_styles
from spmdrl.model.routers import WEIGHTS, check_balance, unknown_router
from spmdrl.model.scorer import head_form
from spmdrl.model.transformers_internals import check_liger, rewritten_on_loading
from spmdrl.model.vision.families import has_vision_tower, vision_parameters
from spmdrl.rewards.signatures import reward_models
from spmdrl.world.axes import axes_of
from spmdrl.world.machine.gpus import check_driver
from spmdrl.world.world import is_on_cpu


def check_fit(cfg: Config) -> None:
    """Refuse models that an axis of either mesh cannot divide, adapters that are not possible, and
    files of weights that are not those of the model.

    The weights of a hub model are not checked, because they would have to be fetched.

    Raises: Refusal for GPUs that torch cannot start; else with every problem of the models; else
        with every problem of the files.
    """
    check_driver(cfg)  # first: without a driver a GPU would be taken for a CPU below
    hf_model = build_policy(cfg)
    if problems := _problems(cfg, hf_model):
        raise Refusal("\n".join(problems))
    if problems := list(_weight_problems(cfg, hf_model)):
        raise Refusal("\n".join(problems))


def weight_problems(cfg: Config) -> list[str]:
    """Return the problems that headers of weight files show: files that are missing or cut, and
    tensors that the model does not have.

    Returns nothing for a folder without weights, see `absent_weights`, and for a model that cannot
    be built.
    """
    hf_model, _ = attempt(lambda: build_policy(cfg))
    if hf_model is None or absent_weights(cfg):
        return []
    return list(_weight_problems(cfg, hf_model))


def absent_weights(cfg: Config) -> str:
    """Return that the policy's folder has no weight files; empty if it has some, and for a hub
    model, whose files are fetched when the run starts."""
    folder = Path(cfg.model.path)
    if not folder.is_dir() or has_weights(folder):
        return ""
    found = some(path.name for path in folder.iterdir())
    return (
        f"model.path: {folder} has no files of weights (*.safetensors), only {found}; put them "
        "there before the run, converted to safetensors where they are of another kind"
    )


def _weight_problems(cfg: Config, hf_model: nn.Module) -> Iterator[str]:
    """Yield what is wrong with the weight files of the policy and of its companions, as far as they
    are in folders and not on the hub."""
    if Path(cfg.model.path).is_dir():
        yield from refusal(
            lambda: check_weights(
                CheckpointReader(Path(cfg.model.path), part=cfg.model.part),
                hf_model,
                file_tensors(hf_model),
                is_scalar=hasattr(hf_model, "score"),
            )
        )
    for field, path in _companions(cfg).items():
        folder = Path(path)
        # `inputs` checks reward models.
        if field.startswith("rewards."):
            continue
        if path and path != cfg.model.path and folder.is_dir():
            for problem in refusal(partial(check_files, folder)):
                yield f"{field}: {problem.removeprefix('model.path: ')}"


def fit_problems(cfg: Config) -> list[str]:
    """Return why models of a config do not fit its layout, each as `field: what, value seen`.

    A model that cannot be built is skipped: loading it says why.
    """
    hf_model, _ = attempt(lambda: build_policy(cfg))
    if hf_model is None:
        return _companion_problems(cfg)
    found, error = attempt(lambda: _problems(cfg, hf_model))
    return found if found is not None else [str(error)]


def _problems(cfg: Config, hf_model: nn.Module) -> list[str]:
    counts = counts_of(hf_model)
    problems = policy_problems(cfg, hf_model) + _companion_problems(
        cfg, is_seen=has_vision_tower(hf_model)
    )
    if cfg.engine.traits.has_own_models and axes_of(cfg).engines:
        problems += refusal(lambda: model_arguments(cfg))
        repeated = counts.repeated
        problems += refusal(lambda: check_mixers(hf_model, counts.mixers, repeated=repeated))
        is_seeing = has_vision_tower(hf_model)
        kinds = dict(mixers=counts.mixers, states=counts.states)
        problems += refusal(lambda: check_drafts(cfg, **kinds, is_seeing=is_seeing))
        mixers = counts.mixers
        problems += refusal(lambda: check_data_parallel(cfg, mixers=mixers, is_seeing=is_seeing))
    if is_on_cpu(cfg):
        offload = cfg.model.memory.offload
        problems += refusal(lambda: check_offload(offload, torch.device("cpu")))
    elif torch.cuda.device_count():
        problems += _lacking_kernels(cfg, hf_model)
    problems += refusal(
        lambda: kernel_of(
            hf_model,
            path=cfg.model.path,
            wanted=numerics_of(cfg).kernel(cfg.model.kernels.attention),
            device="cpu" if is_on_cpu(cfg) else "cuda",
            dtype=getattr(torch, cfg.model.compute_dtype),
        )
    )
    return problems


def _lacking_kernels(cfg: Config, hf_model: nn.Module) -> list[str]:
    """Return which of the trainer's kernels for CUDA cannot be imported."""
    kernels = cfg.model.kernels
    lacking = []
    if kernels.liger and not has_vision_tower(hf_model):
        lacking += refusal(check_liger)
    if kernels.fused_head and not hasattr(hf_model, "score"):
        lacking += refusal(check_fused_head)
    return lacking


def refusal(check: Callable[[], object]) -> list[str]:
    """Return the message of the Refusal that a check raises, or an empty list."""
    _, error = attempt(check)
    return [str(error)] if error else []


def build_policy(cfg: Config) -> nn.Module:
    """Build the policy's model on the meta device.

    Raises: Refusal when its config.json cannot be read, or is of no model of this kind.
    """
    return build_meta_model(cfg.model, is_scalar=cfg.objective.is_scalar)


def policy_problems(cfg: Config, hf_model: nn.Module) -> list[str]:
    """Return why the policy does not fit its layout, its adapters or its engines.

    Args:
        hf_model: of the policy, with any head.
    Raises: Refusal when the blocks of the model cannot be found.
    """
    counts = counts_of(hf_model)
    return [
        *_model_problems(cfg, hf_model, counts, at=f"model.path {cfg.model.path}"),
        *_exact_problems(cfg, hf_model, counts),
        *_own_teacher_problems(cfg, hf_model, counts),
        *_adapter_problems(cfg, hf_model, counts=counts),
        *_router_problems(cfg, hf_model, counts=counts),
        *_tower_problems(cfg, hf_model),
        *_axes_problems(cfg, counts, at=f"(model.path {cfg.model.path})", is_policy=True),
    ]


def _exact_problems(cfg: Config, hf_model: nn.Module, counts: ModelCounts) -> Iterator[str]:
    """Yield why the policy's bits cannot be the same in engine and trainer."""
    if not cfg.engine.exact:
        return
    why = ""
    if counts.states:
        why = f"whose {', '.join(counts.states)} keeps a state, which is not computed exactly"
    elif counts.mixers:
        why = f"whose {', '.join(counts.mixers)} computes by code of its own, which is not exact"
    elif counts.repeated:
        why = f"whose {', '.join(counts.repeated)} attends more than once, which no cache keeps"
    elif has_vision_tower(hf_model):
        why = "which sees, and towers are not computed exactly"
    elif chunk := packing_support(hf_model).chunk:
        why = f"which attends within chunks of {chunk} tokens, whose keys an engine cuts elsewhere"
    if why:
        yield (
            f"engine.exact: true with a {counts.model_type}, {why}; set it to false "
            f"(model.path {cfg.model.path})"
        )


def _own_teacher_problems(cfg: Config, hf_model: nn.Module, counts: ModelCounts) -> Iterator[str]:
    """Yield why teachers cannot read rows of their own, or the policy cannot be its own teacher."""
    has_rows = len(cfg.teachers) > 1 or cfg.hints_teacher
    if has_rows and has_vision_tower(hf_model):
        text = instead(cfg.model.path)
        yield (
            "model.teacher: several teachers, or data.teacher_prompt, with a "
            f"{counts.model_type}, which sees: rows of images were not tried there; take one "
            f"teacher, and no data.teacher_prompt{text} (model.path {cfg.model.path})"
        )
    reference = cfg.model.reference.path
    reads = {"policy"} | ({"reference"} if cfg.model.lora.is_on and not reference else set())
    if cfg.objective.needs_teacher and counts.experts and reads & {*cfg.teachers}:
        yield (
            f"model.teacher: {min(reads & {*cfg.teachers})} with a {counts.model_type}, a mixture: "
            "the policy's routers count each pass of an update, and the teacher's would be "
            f"counted too; name a folder (model.path {cfg.model.path})"
        )


def _tower_problems(cfg: Config, hf_model: nn.Module) -> Iterator[str]:
    """Yield settings that need a vision tower, without one, or are not built for one."""
    model = cfg.model
    asking = {"rollout.agent": cfg.rollout.has_agent, "rewards.judge": cfg.rewards.judge.is_on}
    asking |= {"rollout.serve": bool(cfg.rollout.serve)}
    for field in [field for field, is_set in asking.items() if is_set and cfg.objective.samples]:
        if has_vision_tower(hf_model):
            yield (
                f"{field}: is set with a {hf_model.config.model_type}, which sees: requests with "
                f"images are not built; take a model that reads text{instead(model.path)} "
                f"(model.path {model.path})"
            )
    kind = hf_model.config.model_type  # type: ignore[union-attr]
    text = instead(model.path) if has_vision_tower(hf_model) else ""
    asked: dict[str, Any] = {} if model.train == "all" else {"train": model.train}
    for name, value in ({} if has_vision_tower(hf_model) else (asked | model.own_rates)).items():
        yield (
            f"model.{name}: {value} with a {kind}, which has no tower (model.path "
            f"{model.path}, model.part {model.part}); leave it out"
        )
    if has_vision_tower(hf_model) and not cfg.batch.tokens_per_microbatch:
        yield (
            f"batch.tokens_per_microbatch: 0 with a {kind}, which sees: sizes are tried on rows of "
            "text, and what its tower keeps would come on top; set a number (python -m "
            f"spmdrl plan names the largest that fits){text} (model.path {model.path})"
        )
    if has_vision_tower(hf_model) and model.kernels.compile:
        yield (
            f"model.kernels.compile: true with a {kind}, which sees: rows that show something were "
            f"never proved compiled; set it to false{text} (model.path {model.path})"
        )
    if model.lora.pushes_adapter and adapted_weights(hf_model, model.lora) & vision_parameters(
        hf_model
    ):
        yield (
            "model.lora.push: adapter with targets in the tower or projector, of which engines "
            f"take no adapter here; take merged, or leave them out (model.path {model.path})"
        )


def _kind_problem(cfg: Config, hf_model: nn.Module, *, at: str) -> Iterator[str]:
    """Yield that a companion of a vision model is of another kind, which cannot read its images."""
    policy, _ = attempt(lambda: build_policy(cfg))
    kinds = [getattr(m.config, "model_type", "") for m in (policy, hf_model) if m is not None]
    if policy is not None and has_vision_tower(policy) and len({*kinds}) > 1:
        yield (
            f"{at}: is a {kinds[1]} beside a policy that sees, a {kinds[0]}: what rows show is as "
            "the policy's processor prepared it; take a model of the policy's kind"
        )


def _companions(cfg: Config) -> dict[str, str]:
    """Return {field: folder or hub name} of the policy's companions; empty for none."""
    paths = {
        "model.reference.path": cfg.model.reference.path,
        **cfg.teacher_paths,
        "critic.path": cfg.critic.path,
    }
    models = reward_models(cfg.rewards.functions).values()
    return paths | {f"rewards.functions model:{path}": path for path in models}


def _companion_problems(cfg: Config, *, is_seen: bool = False) -> list[str]:
    """Return why companions of the policy cannot be packed, or do not fit the layout.

    Args:
        is_seen: the policy has a vision tower, so its rows may show images.
    """
    problems: list[str] = []
    text = instead(cfg.model.path) if is_seen else ""
    if is_seen and cfg.model.reference.cache:
        problems.append(
            "model.reference.cache: true, and the policy sees: logprobs are found by tokens, which "
            f"rows that show other things may share; set it to false{text}"
        )
    for field, path in _companions(cfg).items():
        if not path or path == cfg.model.path:
            continue
        # A companion that cannot be built is refused where it is loaded.
        with contextlib.suppress(Refusal):
            hf_model = build_meta_model(replace(cfg.model, path=path))
            counts = counts_of(hf_model)
            problems += _model_problems(cfg, hf_model, counts, at=f"{field} {path}")
            problems += _kind_problem(cfg, hf_model, at=f"{field} {path}")
            problems += _axes_problems(cfg, counts, at=f"({field} {path})", is_policy=False)
            if is_seen and not has_vision_tower(hf_model):
                problems.append(
                    f"{field} {path}: it does not see, and the policy does: of what is shown "
                    f"it would read the placeholders alone; take one that sees{text}"
                )
    return problems + _teacher_problems(cfg)


def _teacher_problems(cfg: Config) -> list[str]:
    """Return why teachers cannot be followed. A model that cannot be read is skipped: loading it
    says why."""
    if not cfg.teachers or any(map(is_missing_folder, cfg.teacher_paths.values())):
        return []
    # A rank that does not train, in a run without teachers, loads nothing of training.
    from spmdrl.train.companions.teacher_checks import check_teachers
    from spmdrl.train.objectives.objective_loss import follows_teacher

    follows, _ = attempt(lambda: follows_teacher(cfg))
    if not follows:
        return []
    _, error = attempt(lambda: check_teachers(cfg))
    # Other Refusals are of a config.json or a tokenizer that cannot be read.
    is_own = isinstance(error, Refusal) and error.field in cfg.teacher_fields()
    return [str(error)] if is_own else []


def _model_problems(
    cfg: Config, hf_model: nn.Module, counts: ModelCounts, *, at: str
) -> Iterator[str]:
    """Yield why a model, policy or companion, cannot be packed, sharded or computed here."""
    if counts.leak:
        yield (
            f"{at}: {type(hf_model).__name__} is not served: {counts.leak}, so that sequences "
            "packed into one row would not be computed as single ones are; take a model of another "
            "family"
        )
    yield from _rope_problems(cfg, hf_model, at=at)
    yield from _build_problems(cfg, hf_model, at=at)


def _rope_problems(cfg: Config, hf_model: nn.Module, *, at: str) -> Iterator[str]:
    """Yield that a row's rotary frequencies would depend on its longest sequence."""
    longest = cfg.longest_in_engine
    config = hf_model.config.get_text_config()
    own = getattr(config, "rope_parameters", None) or {}
    # Some families have one mapping of rope parameters, others one for each type of layer.
    for rope in (own, *(part for part in own.values() if isinstance(part, dict))):
        names = ("original_max_position_embeddings", "max_position_embeddings")
        lengths = [rope.get(names[0]), *(getattr(config, name, None) for name in names)]
        kind = rope.get("rope_type")
        # The length above which the frequencies change: the first of these that is set.
        known = next(filter(None, lengths), None)
        if kind in ("dynamic", "longrope") and known and longest > known:
            yield (
                f"data.max_prompt_tokens + sampling.max_response_tokens: {longest} tokens (or "
                f"those of rewards.judge), and the rotary frequencies of {at} (rope_type {kind}) "
                f"change for a whole row once a sequence of it is longer than {known}; take at "
                f"most {known}, or a rope_type such as yarn"
            )


def _build_problems(cfg: Config, hf_model: nn.Module, *, at: str) -> Iterator[str]:
    """Yield why a model's parameters cannot be sharded, or its experts or logits not computed."""
    dtype = getattr(torch, cfg.model.compute_dtype)
    if uneven := uneven_experts(hf_model, dtype=dtype):
        yield (
            f"{at}: {uneven} has rows that are no multiple of 16 bytes in model.compute_dtype "
            f"{cfg.model.compute_dtype}, as torch's grouped products of experts need; take a "
            "mixture whose hidden size and expert width are multiples of 8"
        )
    if cfg.model.compute_dtype == "float16" and experts_modules(hf_model):
        yield (
            f"{at}: has experts, and torch's grouped products of experts are in bfloat16 or "
            "float32 on GPUs; set model.compute_dtype to one of them, not float16"
        )
    if reason := unshardable(hf_model):
        yield f"{at}: {type(hf_model).__name__} is not served: {reason}; take another family"
    yield from (f"{at}: {reason}" for reason in refusal(lambda: check_buffers(hf_model)))
    if changed := rewritten_on_loading(hf_model):
        pad = hf_model.config.get_text_config().pad_token_id  # type: ignore[union-attr]
        yield (
            f"{at}: transformers changes {some(changed)} of a {type(hf_model).__name__} after it "
            "read it from files, so that an export would compute otherwise there than here; if "
            f"this is the embedding, whose row of pad_token_id ({pad}) is set to zero, set "
            "pad_token_id to null in config.json"
        )
    if not hasattr(hf_model, "score"):
        yield from (f"{at}: {reason}" for reason in refusal(lambda: head_form(hf_model)))


def _axes_problems(cfg: Config, counts: ModelCounts, *, at: str, is_policy: bool) -> Iterator[str]:
    kernels = cfg.model.kernels
    checkpointing = cfg.model.memory.activation_checkpointing
    for problem in misfits(
        counts,
        axes_of(cfg),
        context=kernels.context,
        engine_kind=cfg.engine.kind,
        is_policy=is_policy,
    ):
        yield f"{problem} {at}"
    if counts.padded and kernels.compile:
        yield (
            f"model.kernels.compile: true with a {counts.model_type}, whose "
            f"{', '.join(counts.padded)} computes in as many parts as the lengths ask for; set it "
            f"to false {at}"
        )
    if counts.states and kernels.compile and checkpointing == "selective":
        # Results that inductor's code wrote in place cannot be kept.
        yield (
            "model.memory.activation_checkpointing: selective with model.kernels.compile and a "
            f"{counts.model_type}, whose {', '.join(counts.states)} is not compiled: products of "
            f"the compiled rest of a block cannot be kept; take full or none {at}"
        )
    if counts.experts and kernels.compile:
        # Inductor of torch 2.13 crashes in their backward pass on the CPU.
        yield (
            f"model.kernels.compile: true with a {counts.model_type}, whose experts "
            f"cannot be compiled; set it to false {at}"
        )


def _adapter_problems(cfg: Config, hf_model: nn.Module, *, counts: ModelCounts) -> Iterator[str]:
    """Yield why the policy cannot have these adapters, for targets that match nothing or a folder
    without an adapter of this model, or why engines cannot apply them."""
    if not cfg.model.lora.is_on:
        return
    if cfg.model.lora.quantises:
        yield from _base_problems(cfg, hf_model, counts=counts)
    form, error = attempt(lambda: _form_of(cfg, hf_model))
    if form is None:
        yield str(error)
    elif (largest := largest_rank(hf_model, form)) < cfg.model.lora.rank:
        yield (
            f"model.lora.rank: {cfg.model.lora.rank} is above {largest}, the rank of the largest "
            "matrix that has an adapter: more would add nothing but parameters; take at most "
            f"{largest} (model.path {cfg.model.path})"
        )
    elif not cfg.model.lora.pushes_adapter:
        return
    elif form.rank > MAX_RANK:  # of a folder
        yield (
            f"model.lora.push: adapter with rank {form.rank} of {form.path}: vLLM has "
            f"adapters up to rank {MAX_RANK}; take merged"
        )
    elif has_embedding(hf_model, form):
        yield (
            "model.lora.push: adapter with targets that name the embedding, of which "
            "vLLM takes no adapter; take merged, or leave it out"
        )
    elif latent := [name for name in targeted(hf_model, form.targets) if "kv_b_proj" in name]:
        yield (
            f"model.lora.push: adapter with the target {latent[0]}: vLLM's latent attention "
            "computes with products of this weight that it makes once, and would leave the adapter "
            f"out; name other targets, or take merged (model.path {cfg.model.path})"
        )
    elif counts.experts and counts.model_type not in ADAPTED_MIXTURES:
        yield (
            f"model.lora.push: adapter with a {counts.model_type}, a mixture whose adapters do not "
            f"fit vLLM's layers, or were not compared; those that do: "
            f"{', '.join(sorted(ADAPTED_MIXTURES))}; take merged (model.path {cfg.model.path})"
        )
    elif counts.experts and not is_on_cpu(cfg):
        yield (
            f"model.lora.push: adapter with a {counts.model_type} on CUDA, where vLLM may compute "
            "experts with LoRA from shuffled weights (TrtLlmBf16LoRAExperts), which none could "
            f"write in place; take merged (model.path {cfg.model.path})"
        )


def _base_problems(cfg: Config, hf_model: nn.Module, *, counts: ModelCounts) -> Iterator[str]:
    """Yield why the policy's weights cannot be quantised, or not be split so."""
    base = f"model.lora.base: {cfg.model.lora.base} with"
    at = f"(model.path {cfg.model.path})"
    experts = experts_modules(hf_model)
    if counts.experts and not (experts and all(map(adaptable, experts.values()))):
        yield (
            f"{base} a {counts.model_type}, whose experts are not stored as [experts, out, in]: "
            f"they are most of its weights, and would not be quantised; take full {at}"
        )
    tp = cfg.layout.tp
    styles, _ = attempt(lambda: tp_styles(hf_model)) if tp > 1 else ({}, None)
    cut = {
        name: module.in_features
        for name, style in (styles or {}).items()
        if style.startswith("rowwise") and is_linear(module := hf_model.get_submodule(name))
    }
    if uneven := [name for name, columns in cut.items() if columns % (BLOCK * tp)]:
        yield (
            f"{base} layout.tp {tp}, which cuts the {cut[uneven[0]]} columns of {uneven[0]} within "
            f"blocks of {BLOCK}; take a tp for which {BLOCK} * tp divides the columns, or full {at}"
        )


def _form_of(cfg: Config, hf_model: nn.Module) -> LoraForm:
    form = lora_form(cfg.model.lora)
    shapes = adapter_shapes(hf_model, form)
    numerics_of(cfg).check_targets(targeted(hf_model, form.targets))
    if form.path:
        AdapterFolder(Path(form.path)).check(shapes)
    return form


def _router_problems(cfg: Config, hf_model: nn.Module, *, counts: ModelCounts) -> list[str]:
    """Return why the policy's routes cannot be replayed, or its experts not be divided or
    balanced."""
    moe = cfg.model.moe
    kind = counts.model_type
    at = f"(model.path {cfg.model.path})"
    divides = "engine.options.enable_expert_parallel"
    if cfg.engine.options.get("enable_expert_parallel") and not counts.experts:
        return [f"{divides}: true with a {kind}, which has no experts {at}; take it out"]
    if moe.replay and not counts.experts:
        return [f"model.moe.replay: true with a {kind}, which has no experts {at}; take it out"]
    if moe.replay and kind not in WEIGHTS:
        return [f"{unknown_router(kind)} {at}"]
    if (balance := moe.balance) == "none":
        return []
    found = refusal(lambda: check_balance(hf_model, balance=balance))
    return [f"{problem} {at}" for problem in found]
