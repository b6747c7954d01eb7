"""Lay a model out over the trainer mesh, by every kind of parallelism that the config asks for.

In this order: tp (tensor_parallel.py), ep (expert_parallel.py), activation checkpointing
(recompute.py), compile, activations on the host (recompute.py), FSDP2 (fsdp.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from spmdrl.config import Config
from spmdrl.model.blocks import base_of, blocks, experts_modules
from spmdrl.model.head import head_chunk_tokens
from spmdrl.model.parallel import fsdp, recompute, tensor_parallel
from spmdrl.model.parallel.expert_parallel import apply_ep
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, Valuer
from spmdrl.model.transformers_internals import apply_liger, zero_idle_experts
from spmdrl.world import World
from spmdrl.world.torch_internals import pin_exactly


def lay_out(
    hf_model: nn.Module, cfg: Config, world: World, *, dtype: torch.dtype, temperature: float
) -> tuple[nn.Module, dict[str, str]]:
    """Shard a meta model over the trainer ranks.

    Args:
        hf_model: a transformers causal LM, or sequence classifier, changed in place.
        dtype: of forward and backward.
        temperature: of the distribution that is scored.
    Returns: the module that scores, without storage; and the parameters that every tp rank holds
        whole, see tensor_parallel.apply_tp.
    Raises: Refusal for what the model cannot do.
    """
    kernels, spared, mesh = cfg.model.kernels, cfg.model.memory, world.mesh
    whole, tp_group = {}, None
    if experts_modules(hf_model) and _is_blackwell(world.device):
        zero_idle_experts()
    if kernels.liger and world.device.type == "cuda":
        apply_liger(
            hf_model,
            base_of(hf_model)[1],
            has_rope=spared.activation_checkpointing != "selective",
            is_dense=not experts_modules(hf_model),
        )
    if mesh["tp"].size() > 1:
        whole = tensor_parallel.apply_tp(hf_model, mesh["tp"])
        head = hf_model.get_output_embeddings()
        if hf_model.config.tie_word_embeddings:
            head = hf_model.get_input_embeddings()
        is_split = head is not None and hasattr(head.weight, "placements")
        tp_group = mesh["tp"].get_group() if is_split else None
    if cfg.layout.ep > 1:
        assert world.experts is not None
        apply_ep(hf_model, world.experts["ep"])
    hf_blocks = _wrapped_blocks(hf_model, cfg)
    if hasattr(hf_model, "score"):
        scorer = Valuer(hf_model)
    else:
        chunk_tokens = head_chunk_tokens(cfg.model, hf_model)
        scorer = Scorer(
            hf_model,
            chunk_tokens=chunk_tokens,
            tp_group=tp_group,
            temperature=temperature,
            penalties=cfg.sampling.penalties,
        )
    fsdp.apply_fsdp(
        scorer,
        hf_blocks,
        mesh=world.sharding,
        expert_mesh=world.experts,
        dtype=dtype,
        reshard_blocks=spared.reshard,
        ahead=recompute.blocks_ahead(spared.prefetch, world),
        is_on_host=recompute.has(spared.offload, "parameters"),
    )
    return scorer, whole


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _wrapped_blocks(hf_model: nn.Module, cfg: Config) -> list[nn.Module]:
    """Return the blocks, first to last, with what spares their activations around them."""
    names, spared = list(blocks(hf_model)), cfg.model.memory
    recompute.checkpoint(hf_model, spared.activation_checkpointing)
    if cfg.model.kernels.compile:
        fsdp.apply_compile([hf_model.get_submodule(name) for name in names])
    if recompute.has(spared.offload, "activations"):
        recompute.keep_on_host(hf_model, names)
    return [hf_model.get_submodule(name) for name in names]


def give_storage(scorer: nn.Module, offload: str, *, device: torch.device) -> None:
    """Give parameters and buffers storage, on the meta device until here.

    Args:
        offload: model.memory.offload.
    """
    recompute.check_offload(offload, device)
    if recompute.pins_exactly(offload):
        pin_exactly()
    if recompute.has(offload, "parameters"):
        scorer.to_empty(device="cpu")  # FSDP2 pins them
        recompute.move_buffers(scorer, device)
    else:
        scorer.to_empty(device=device)


def slicing_of(world: World, *, is_padded: bool, chunk: int | None) -> Slicing:
    """Return which part of every packed row this rank computes; see Slicing."""
    mesh, tp = world.mesh["cp"], world.mesh["tp"]
    whole = Slicing(
        multiple=tp.size(),
        part=tp.get_local_rank(),
        is_padded=is_padded,
        chunk=chunk,
        device=world.device,
    )
    if mesh.size() == 1:
        return whole
    return replace(whole, group=mesh.get_group(), rank=mesh.get_local_rank(), size=mesh.size())
