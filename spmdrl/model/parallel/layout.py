"""Shard a model over the trainer mesh, by every kind of parallelism in the config.

In this order: tp (tensor_parallel.py), ep (expert_parallel.py), activation checkpointing
(recompute.py), compile, activations on the host (recompute.py), FSDP2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from spmdrl.config import Config, MemorySettings
from spmdrl.model.attention.state_layers import supports_packed_states
from spmdrl.model.blocks import base_of, blocks, experts_modules
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.head import HeadOptions, check_fused_head, head_chunk_tokens
from spmdrl.model.parallel import recompute, tensor_parallel
from spmdrl.model.parallel.expert_parallel import apply_ep, replicated, shard_experts
from spmdrl.model.parallel.on_host import keep_on_host
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, Valuer
from spmdrl.model.transformers_internals import apply_liger, zero_idle_experts
from spmdrl.model.vision.families import has_vision_tower, vision_blocks
from spmdrl.world.torch_internals import pin_exactly
from spmdrl.world.world import World

log = logging.getLogger(__name__)


def lay_out(
    hf_model: nn.Module, cfg: Config, world: World, *, dtype: torch.dtype, temperature: float
) -> tuple[nn.Module, dict[str, str]]:
    """Shard a meta model over the trainer ranks.

    Args:
        hf_model: a transformers causal LM, or sequence classifier, changed in place.
        dtype: of forward and backward.
        temperature: of the distribution that is scored.
    Returns: the module that scores, without storage; and the parameters that are whole on every tp
        rank, see tensor_parallel.apply_tp.
    Raises: Refusal for what the model cannot do.
    """
    kernels = cfg.model.kernels
    spared = cfg.model.memory
    mesh = world.mesh
    whole = {}
    tp_group = None
    if experts_modules(hf_model) and _is_blackwell(world.device):
        zero_idle_experts()
    if kernels.liger and world.device.type == "cuda" and has_vision_tower(hf_model):
        kind = type(hf_model).__name__
        log.warning("%s goes without liger's kernels: not compared beside a tower", kind)
    elif kernels.liger and world.device.type == "cuda":
        apply_liger(
            hf_model,
            base_of(hf_model)[1],
            has_rope=spared.activation_checkpointing != "selective",
            is_dense=not experts_modules(hf_model),
        )
    if mesh["tp"].size() > 1:
        whole = tensor_parallel.apply_tp(hf_model, mesh["tp"])
        head = hf_model.get_output_embeddings()
        # A tied head uses the embedding's weight, which tp may have sharded by rows.
        if hf_model.config.tie_word_embeddings:
            head = hf_model.get_input_embeddings()
        is_split = head is not None and hasattr(head.weight, "placements")
        tp_group = mesh["tp"].get_group() if is_split else None
    if cfg.layout.ep > 1:
        assert world.experts is not None
        apply_ep(hf_model, world.experts["ep"])
    # Only names: wrapping replaces the modules.
    towers = list(vision_blocks(hf_model))
    inner_blocks = [*blocks(hf_model).values()]
    hf_blocks = _wrapped_blocks(hf_model, cfg)
    if hasattr(hf_model, "score"):
        scorer = Valuer(hf_model)
    else:
        on_gpu = world.device.type == "cuda"
        if on_gpu and kernels.fused_head:
            check_fused_head()
        options = HeadOptions(
            head_chunk_tokens(cfg, hf_model, on_gpu=on_gpu),
            temperature=temperature,
            penalties=cfg.sampling.penalties,
            group=tp_group,
            is_fused=on_gpu and kernels.fused_head,
        )
        scorer = Scorer(hf_model, options)
    numerics_of(cfg).apply(scorer, *inner_blocks)
    others = [hf_model.get_submodule(name) for name in towers]
    apply_fsdp(scorer, hf_blocks, world, memory=spared, dtype=dtype, others=others)
    return scorer, whole


def _is_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _wrapped_blocks(hf_model: nn.Module, cfg: Config) -> list[nn.Module]:
    """Return the blocks, first to last, wrapped for activation checkpointing and offloading."""
    names = list(blocks(hf_model))
    spared = cfg.model.memory
    if cfg.model.kernels.compile:
        _compile(hf_model, names, with_state=True)
    recompute.checkpoint(hf_model, spared.activation_checkpointing)
    if cfg.model.kernels.compile:
        _compile(hf_model, names, with_state=False)
    if recompute.has(spared.offload, "activations"):
        keep_on_host(hf_model, names)
    return [hf_model.get_submodule(name) for name in names]


def _compile(hf_model: nn.Module, names: list[str], *, with_state: bool) -> None:
    """Compile the blocks that have a layer with a state, or those that have none.

    Layers with a state are not compiled. Dynamo compiles what checkpointing wraps as one graph or
    not at all, so blocks that have one are compiled before they are wrapped.
    """
    # Rows are packed to any length. Only sizes that were seen to vary become symbols, so the second
    # length compiles once more. With dynamic=True the width would be a symbol too, and torch 2.11
    # cannot trace liger's norms, which compute from it the size of a Triton block.
    for name in names:
        block = hf_model.get_submodule(name)
        if any(map(supports_packed_states, block.modules())) == with_state:
            block.compile()


def give_storage(scorer: nn.Module, offload: str, *, device: torch.device) -> None:
    """Allocate parameters and buffers, which were on the meta device.

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
    """Return which slice of every packed row this rank computes."""
    mesh = world.mesh["cp"]
    tp = world.mesh["tp"]
    return Slicing(
        group=mesh.get_group() if mesh.size() > 1 else None,
        rank=mesh.get_local_rank(),
        size=mesh.size(),
        multiple=tp.size(),
        part=tp.get_local_rank(),
        is_padded=is_padded,
        chunk=chunk,
        device=world.device,
    )


def apply_fsdp(
    scorer: nn.Module,
    hf_blocks: list[nn.Module],
    world: World,
    *,
    memory: MemorySettings,
    dtype: torch.dtype,
    others: Sequence[nn.Module] = (),
) -> None:
    """Shard every block, and the rest as one unit, over the axes dp_replicate and fsdp.

    This is also done for one rank, so that all layouts take the same path. Parameters keep their
    dtype and are gathered in `dtype`; gradients are reduced in float32. FSDP2 averages gradients
    over the ranks of these axes; the loss is multiplied by their number to get sums.

    Args:
        scorer: the root module, on the meta device.
        hf_blocks: its transformer blocks, first to last.
        world: its meshes `sharding`, with axes dp_replicate, fsdp, tp, and `experts`, with axes
            dp_replicate, efsdp and ep (None: experts are sharded like all other weights).
        memory: reshard `always`: a block's weights are freed after its forward pass and gathered
            again for the backward pass; `auto`: not the last block's, whose backward pass comes
            next; `never`. Other weights stay gathered from forward to backward pass. prefetch: how
            many blocks are gathered ahead; 0: FSDP2 gathers the next block when the host reaches
            it. Neither changes a result. offload `parameters`: shards and their gradients are in
            pinned host memory, where the caller allocates the model; gathered weights are on the
            device (CUDA).
        dtype: of forward and backward.
        others: blocks of towers, which run first and are not gathered ahead.
    """
    mesh = world.sharding
    # Inputs are ids and masks: there is nothing to cast, and float32 outputs must stay so.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    is_on_host = recompute.has(memory.offload, "parameters")
    offload = CPUOffloadPolicy(pin_memory=True) if is_on_host else OffloadPolicy()
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    if world.experts is not None:
        shard_experts(scorer, mesh=world.experts, shard=shard)
    shard = partial(shard, mesh=replicated(mesh, "fsdp"))
    for block in (*others, *hf_blocks):
        shard(block, reshard_after_forward=mesh["fsdp"].size() > 1)
    shard(scorer, reshard_after_forward=False)
    kept = {"auto": hf_blocks[-1:], "always": [], "never": hf_blocks}[memory.reshard]
    for block in kept:  # with its experts
        block.set_reshard_after_forward(False)
    _ask_ahead(scorer, hf_blocks, ahead=recompute.blocks_ahead(memory.prefetch, world))


def _ask_ahead(scorer: nn.Module, hf_blocks: list[nn.Module], *, ahead: int) -> None:
    """Have every block gather the next `ahead` blocks, in both passes, and its own experts.

    The host may wait for the numbers of rows of experts in between.
    """
    if not ahead:
        return
    units = [[m for m in block.modules() if isinstance(m, FSDPModule)] for block in hf_blocks]
    scorer.set_modules_to_forward_prefetch([m for unit in units[:ahead] for m in unit])
    for index, unit in enumerate(units):
        following = units[index + 1 : index + 1 + ahead]
        before = units[max(0, index - ahead) : index][::-1]
        for others, ask in (
            (following, unit[0].set_modules_to_forward_prefetch),
            (before, unit[0].set_modules_to_backward_prefetch),
        ):
            ask([*unit[1:], *(m for other in others for m in other)])


def reshard(scorer: nn.Module) -> None:
    """Free gathered parameters: after a forward pass that no backward pass follows."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
