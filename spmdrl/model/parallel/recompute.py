"""Save the memory of activations: recompute them in the backward pass.

This and on_host.py wrap blocks and change no value. A block ends up as FSDP2(on the host(compiled(
checkpointed(block)))): compile knows which products checkpointing keeps, and the hooks of FSDP2,
which gather and free weights, run neither in a recomputation nor under the hooks that move tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from spmdrl.errors import Refusal
from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.vision.families import vision_blocks
from spmdrl.world.torch_internals import CheckpointImpl, checkpoint_wrapper, operation_name
from spmdrl.world.world import World

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Operations whose results selective checkpointing keeps: those that cost more than reading memory.

All products of linear layers are kept. (Keeping every second one, as others do, depends on the
order in which a model calls its layers.) Batched products (bmm, baddbmm) are not kept: they are
attention over short sequences, which is cheap, and their scores are the largest tensors.
Collectives write in place and run again, and so does all of ring attention, whose exchanges are
part of one function.
"""


def checkpoint(hf_model: nn.Module, mode: str) -> None:
    """Wrap every block, also of towers, so that activations are recomputed in the backward pass.

    Args:
        mode: `none`; `full`: a block keeps only its input; `selective`: also the results of KEPT,
            so that only cheap operations run twice.
    """
    if mode == "none":
        return
    # Nothing random runs in a block (dropout is refused), so no RNG state is kept.
    options: dict[str, Any] = {"preserve_rng_state": False}
    if mode == "selective":
        policy = partial(_policy, _kept(hf_model))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
    for name, block in (blocks(hf_model) | vision_blocks(hf_model)).items():
        hf_model.set_submodule(name, wrap(block))


def _kept(hf_model: nn.Module) -> frozenset[str]:
    """Return the operations of KEPT whose results this model does not change in place:
    transformers adds the biases of experts (GPT-OSS) to their products."""
    has_biases = any(getattr(e, "has_bias", False) for e in experts_modules(hf_model).values())
    return KEPT - {"aten::_grouped_mm"} if has_biases else KEPT


def _policy(
    kept: frozenset[str], context: Any, operation: Any, *args: Any, **options: Any
) -> CheckpointPolicy:
    is_kept = operation_name(operation) in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def has(offload: str, what: str) -> bool:
    """Return whether model.memory.offload includes `what`: activations, optimizer or parameters.

    Offloaded parameters have their optimizer state on the host too.
    """
    named = {"all": ("activations", "optimizer"), "parameters": ("parameters", "optimizer")}
    return what in named.get(offload, (offload,))


def pins_exactly(offload: str) -> bool:
    """Return whether pinned memory gets the exact size, not the next power of 2.

    That saves up to half of memory that is allocated once. Activations are allocated again and
    again in different sizes; rounded up, their memory can be used again.
    """
    return has(offload, "optimizer") and not has(offload, "activations")


def blocks_ahead(prefetch: int | Literal["auto"], world: World) -> int:
    """Return how many blocks are gathered ahead: model.memory.prefetch.

    `auto` is 1 with expert parallelism on CUDA, where the host waits in each block for the numbers
    of rows and could not gather the next block; not where routes are replayed, which tell the
    numbers beforehand. In all other cases FSDP2 gathers early enough.
    """
    if prefetch != "auto":
        return prefetch
    cfg = world.cfg
    waits = cfg.layout.ep > 1 and not cfg.model.moe.replay
    return int(waits and world.device.type == "cuda")


def check_offload(offload: str, device: torch.device) -> None:
    """Refuse to offload parameters or optimizer state that are in host memory already.

    Raises: Refusal on any device but CUDA.
    """
    if has(offload, "optimizer") and device.type != "cuda":
        what = (
            "parameters and the optimizer's state are"
            if has(offload, "parameters")
            else "optimizer's state is"
        )
        raise Refusal(
            f"model.memory.offload: {offload} on device {device.type}: nothing to "
            f"offload, the {what} in host memory anyway; leave it out"
        )


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Allocate the buffers of a model on another device than its parameters."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
