"""Which part of a live tensor each tensor of the safetensors files is.

transformers stores some weights differently than files do. The experts of a layer are one
parameter, with gate and up projections joined; files have a tensor for each expert and projection.
What saving does to weights is watched once, on placeholders, so that no table of families is
needed. A model without such weights takes the same path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.tensor_parts import Part, box_within
from spmdrl.model.transformers_internals import as_saved
from spmdrl.world.torch_internals import UNSAFE_VIEW, TorchDispatchMode, is_persistent, storage_id

aten = torch.ops.aten


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of a model's parameters, tied ones once, and persistent buffers, which
    routers like DeepSeek-V3's have."""
    found = dict(module.named_parameters())
    for path, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if is_persistent(child, name):
                found[f"{path}.{name}" if path else name] = buffer
    return found


def file_tensors(hf_model: nn.Module, *, within: Sequence[str] = ("",)) -> dict[str, Part]:
    """Return {name in the safetensors files: part of a live tensor}, in the order of the model.

    Args:
        hf_model: a transformers model as it was built, on any device; nothing is read.
        within: only tensors whose live names begin with one of these.
    Raises: Refusal naming a file tensor that is no part of one live tensor, or a live tensor of
        which the files do not have all parts.
    """
    live = live_tensors(hf_model)
    placeholders = {name: torch.empty(tensor.shape, device="meta") for name, tensor in live.items()}
    by_storage = {storage_id(tensor): name for name, tensor in placeholders.items()}
    try:
        with torch.no_grad(), _Views():
            saved = as_saved(hf_model, placeholders)
    except Exception as error:  # of any of transformers' conversions
        raise _refused(hf_model, f"they cannot be followed ({error})") from error
    parts: dict[str, Part] = {}
    for name, tensor in saved.items():
        own = by_storage.get(storage_id(tensor))
        part = own and _part(own, tensor, placeholders[own])
        if part and part.tensor.startswith((*within,)):
            parts[name] = part
        elif not part and "" in within:
            raise _refused(hf_model, f"{name} is computed")
    # If a tensor within was computed, its own elements are missing.
    wanted = {n: tensor for n, tensor in placeholders.items() if n.startswith((*within,))}
    _check_whole(hf_model, parts, wanted)
    order = {name: index for index, name in enumerate(live)}
    return dict(sorted(parts.items(), key=lambda item: (order[item[1].tensor], item[1].box)))


class _Views(TorchDispatchMode):
    """Replaces copies of a tensor by views, whose storage shows where they are from. What cannot be
    a view gets a new storage."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.clone.default:
            return aten.alias.default(args[0])
        if func is UNSAFE_VIEW:  # a reshape that had to copy
            return torch.empty(args[1], device="meta")
        return func(*args, **(kwargs or {}))


def _part(name: str, view: Tensor, whole: Tensor) -> Part | None:
    """Return the part of the live tensor `whole` that `view` is; None if it is no box of it."""
    if view.dim() == whole.dim() and view.shape == whole.shape and view.stride() == whole.stride():
        return Part.whole(name, tuple(whole.shape))
    box = box_within(view, whole)
    if box is None:
        return None
    left = list(range(whole.dim()))
    dims: dict[int, int] = {}
    # The stride of a dim of size 1 says nothing: these dims get what is left, in order.
    for dim in sorted(range(view.dim()), key=lambda d: (view.shape[d] == 1, d)):
        fitting = [
            d
            for d in left
            if box.shape[d] == view.shape[dim]
            and (view.shape[dim] == 1 or whole.stride(d) == view.stride(dim))
        ]
        if not fitting:
            return None
        dims[dim] = fitting[0]
        left.remove(fitting[0])
    # A dim that the file does not have must be one index, such as one expert.
    if any(box.shape[d] != 1 for d in left):
        return None
    return Part(name, box, tuple(dims[d] for d in range(view.dim())))


def _check_whole(hf_model: nn.Module, parts: dict[str, Part], live: dict[str, Tensor]) -> None:
    counts = dict.fromkeys(live, 0)
    for part in parts.values():
        counts[part.tensor] += part.box.numel
    for name, tensor in live.items():
        if counts[name] != tensor.numel():
            why = f"those of {name} have {counts[name]} of its {tensor.numel()} elements"
            raise _refused(hf_model, why)


def _refused(hf_model: nn.Module, why: str) -> Refusal:
    kind = getattr(hf_model.config, "model_type", type(hf_model).__name__)
    return Refusal(
        f"model.path: the tensors in the files of a {kind} are not parts of the parameters that "
        f"transformers has for them: {why}. Such a model cannot be trained here; take one of a "
        "family whose files are, such as qwen3_moe, mixtral or deepseek_v3"
    )
