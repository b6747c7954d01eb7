"""All that this program uses of torch which is private, or not the same in the versions it serves.

Serves torch 2.11 to 2.13. Each line has the name here, torch's own, and when it can be
removed.

TorchDispatchMode         utils._python_dispatch            once its module is public
tree_leaves, tree_map     utils._pytree                     once its module is public
checkpoint_wrapper, CheckpointImpl, Wrapper, plain_name
                          distributed.algorithms._checkpoint    once its module is public
StridedShard              placement_types._StridedShard     once it is public
sharded_like              tensor._dtensor_spec              once from_local keeps a tensor's device
sharded_rows_like         tensor._dtensor_spec              once from_local keeps a tensor's device
unflatten_axis            DeviceMesh._unflatten             once it is public
split_no_groups           ProcessGroup.bound_device_id      once a gloo group splits nothing
set_group_timeout         distributed_c10d.default_pg_*timeout  once meshes take a timeout
pin_exactly               _accelerator_setAllocatorSettings   once it is public (2.13: 2.11 cannot)
count_compile_threads     torch._inductor.config            once its module is public
GROUPED_MM                _grouped_mm                       never: what grouped_mm is seen as
LOCAL_SCALAR, UNSAFE_VIEW aten._local_scalar_dense, _unsafe_view    never: names of operations
FLASH_FORWARD, FLASH_BACKWARD  aten._flash_attention_*      once varlen_attn differentiates its lse
operation_name, is_write  OpOverload._schema                once schemas are public
storage_id, write_count   UntypedStorage._cdata, Tensor._version    once they are public
is_persistent             Module._non_persistent_buffers_set    once named_buffers tells them apart
put_parameter             Module._parameters                once a parameter may be a plain tensor
zeros_in                  Module._parameters, _buffers      never: where a module keeps its own
multiply_all, copy_all, norms_of  _foreach_mul_, _copy_, _norm  once they are public
fused_adamw               _fused_adamw_                     once it is public
flight_record             distributed_c10d._dump_nccl_trace, _dump_fr_trace    once public
all_gather_single         all_gather_into_tensor            with 2.12, the last to call it so
INDEX_CLASSES, is_storage_info    DCP's _StorageInfo ...    once its index is no pickle
varlen                    varlen_attn(is_causal=)           with 2.11, the last to have it
use_flash_3, flash_version    nn.attention.*_flash_attention_impl   with 2.12, the last without them
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spmdrl.errors import Refusal

__all__ = [
    "CheckpointImpl",
    "StridedShard",
    "TorchDispatchMode",
    "checkpoint_wrapper",
    "tree_leaves",
    "tree_map",
]

log = logging.getLogger(__name__)

GROUPED_MM = torch._grouped_mm
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
"""What `tensor.item()` calls."""
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""What a reshape that had to copy ends in."""
FLASH_FORWARD = torch.ops.aten._flash_attention_forward
_ROUND_PINNED = "pinned_max_round_threshold_mb"
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward
INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
"""{module: what the pickled index of a checkpoint by DCP may name}. Dtypes are allowed too."""
multiply_all = torch._foreach_mul_
copy_all = torch._foreach_copy_
norms_of = torch._foreach_norm
fused_adamw = torch._fused_adamw_
# 2.13 renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wrapper(ActivationWrapper):
    """A wrapper of a block, whose parameters keep the block's names."""

    @property
    def block(self) -> nn.Module:
        """The block that is wrapped."""
        return self._checkpoint_wrapped_module


def is_storage_info(value: Any) -> bool:
    """Return whether a value is DCP's record of where a part of a tensor lies in its files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return isinstance(value, _StorageInfo)


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers of its block add."""
    return name.replace("_checkpoint_wrapped_module.", "")


def operation_name(operation: Any) -> str:
    """Return an operation's name, such as aten::mm; empty if it is not one of torch's own."""
    schema = getattr(operation, "_schema", None)
    return schema.name if schema is not None else ""


def is_write(operation: Any) -> bool:
    """Return whether an operation changes one of its arguments."""
    return operation._schema.is_mutable


def storage_id(tensor: Tensor) -> int:
    """Return an id of the storage that stays the same when its memory is freed and taken again."""
    return tensor.untyped_storage()._cdata


def write_count(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a module's own buffer of this name is in its state dict."""
    return buffer not in module._non_persistent_buffers_set


def put_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a parameter of a module to any tensor, a plain one too."""
    module._parameters[name] = tensor


def sharded_like(whole: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor sharded as `whole`, with `local` as this rank's part.

    The part stays on its device; DTensor.from_local would move it to the mesh's.
    """
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def sharded_rows_like(whole: Tensor, local: Tensor, *, columns: int) -> Tensor:
    """Return a tensor that is sharded like `whole` and has another last dim.

    Args:
        whole: a DTensor, or a plain tensor. local: [.., columns], this rank's part.
        columns: of all ranks.
    """
    if not isinstance(whole, DTensor):
        return local
    shape = torch.Size((*whole.shape[:-1], columns))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def split_no_groups() -> None:
    """Let later groups make communicators of their own, instead of splitting that of all ranks."""
    dist.distributed_c10d._get_default_group().bound_device_id = None


def set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of later groups that are made without one. Else it is 10 or 30 minutes."""
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


def flight_record() -> bytes:
    """Return the last collectives of this process, as `torchfrtrace` reads them."""
    c10d: Any = torch._C._distributed_c10d
    # A build with CUDA has both; each knows its own backend's collectives alone.
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return c10d._dump_nccl_trace() if is_nccl else c10d._dump_fr_trace()


def pin_exactly() -> None:
    """Stop rounding pinned memory above 1 MiB up to a power of 2.

    Call it before any is allocated. torch 2.11 cannot do it, and a warning says so.
    """
    asked = f"{_ROUND_PINNED}:1"
    try:
        before = torch._C._accelerator_getAllocatorSettings()
        if _ROUND_PINNED not in before:  # else by PYTORCH_ALLOC_CONF: the user's
            torch._C._accelerator_setAllocatorSettings(f"{before},{asked}" if before else asked)
    except (AttributeError, RuntimeError, ValueError) as error:
        log.warning("pinned host memory is rounded up to powers of 2: %s", error)


def count_compile_threads() -> None:
    """Read the number of compile threads from the environment again; torch read it at import."""
    from torch._inductor import config

    config.compile_threads = config.decide_compile_threads()


def unflatten_axis(
    mesh: DeviceMesh, axis: int, *, sizes: Sequence[int], names: Sequence[str]
) -> DeviceMesh:
    """Return the mesh with one axis cut into several.

    Both meshes have one root, as DTensor requires of meshes that shard one parameter.
    """
    return mesh._unflatten(axis, tuple(sizes), tuple(names))


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend causally within each packed sequence (CUDA, bfloat16).

    Args:
        query: [T, Hq, D]; key, value: [K, Hkv, D].
        ends: cu_seqlens of queries and keys, [S+1] int32 each.
        longest: tokens of the longest sequence, likewise.
        scale: of the scores; None is D ** -0.5. window: tokens seen, itself included; None is all.
    Returns: [T, Hq, D].
    Raises: Refusal for a window that this torch cannot do.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, object] = {"scale": scale}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None and window < longest[1]:
        raise Refusal(
            f"model.kernels.attention: varlen of torch {torch.__version__} has no sliding window "
            f"and the model's is {window} tokens; set it to flash or padded"
        )
    else:
        options["is_causal"] = True
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            shared = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    return varlen_attn(query, key, value, *ends, *longest, **options)


def use_flash_3() -> None:
    """Have torch's flash kernels be those of FlashAttention 3, for the whole process.

    Raises: ImportError, OSError or RuntimeError where that is not installed, or not for this torch;
        AttributeError for a torch that cannot.
    """
    torch.nn.attention.activate_flash_attention_impl("FA3")


def flash_version() -> int:
    """Return which FlashAttention torch's flash kernels are: 2 or 3."""
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return 3 if active == "FA3" else 2


@contextmanager
def zeros_in(module: nn.Module) -> Iterator[None]:
    """Replace the module's own parameters and buffers by zeros on the CPU, until the block ends."""
    parameters = dict(module._parameters)
    buffers = dict(module._buffers)
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is not None:
                own[name] = torch.zeros(tensor.shape)
    try:
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
