"""Layers that multiply by the merged weight W + scale * B A, as engines do after a push.

A forward pass then has the bits of the engine's (engine.exact). It takes a matrix product's memory
for each gradient of a merged weight, which `W x + scale * B A x` does without.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.merge import low_rank_product
from spmdrl.model.lora.targets import Targets
from spmdrl.model.tensor_parts import to_local


def check_mergeable(targets: Targets) -> None:
    """Refuse adapters of experts, whose weights are not merged in a forward pass.

    Raises: Refusal.
    """
    experts = [name for name, (_, key) in targets.items() if key != "weight"]
    if experts:
        raise Refusal(
            f"engine.exact: true with model.lora on the experts {experts[0]}, whose weights are "
            "not merged in a forward pass; name other targets (model.lora.targets), or set it to "
            "false"
        )


def compute_merged(adapters: Adapters) -> None:
    """Have the layers with adapters compute by merged weights; see `check_mergeable`."""
    for module, _ in adapters.targets.values():
        merged = _linear if isinstance(module, nn.Linear) else _rows
        module.forward = partial(merged, module, partial(type(module).forward, module))


class _Product(torch.autograd.Function):
    """scale * B A by the sum that a push takes, and its gradients by matrix products."""

    @staticmethod
    def forward(ctx, b: Tensor, a: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(b, a)
        ctx.scale = scale
        return low_rank_product(b, a, scale=scale)

    @staticmethod
    def backward(ctx, grad: Tensor):
        b, a = ctx.saved_tensors
        return grad @ a.t() * ctx.scale, b.t() @ grad * ctx.scale, None


def _linear(module: Any, plain: Any, x: Tensor) -> Tensor:
    if not module.adapters.is_on:
        return plain(x)
    b = to_local(module.lora_B.weight)
    a = to_local(module.lora_A.weight)
    delta = _Product.apply(b, a, module.adapters.form.scale)
    return F.linear(x, to_local(module.weight) + delta, to_local(module.bias))


def _rows(module: Any, plain: Any, ids: Tensor) -> Tensor:
    out = plain(ids)
    if not module.adapters.is_on:
        return out
    b = F.embedding(ids.flatten(), to_local(module.lora_B.weight), module.padding_idx)
    a = to_local(module.lora_A.weight)
    return out + _Product.apply(b, a, module.adapters.form.scale).view_as(out)
