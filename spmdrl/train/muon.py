"""Muon for the matrices of a model's blocks, beside AdamW for all else.

Muon orthogonalises the momentum of a whole matrix. The momentum is sharded like the parameters.
For an update the matrices are gathered one after another. Every rank that holds a part of a matrix
computes the same step and applies its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmdrl.config import OptimizerSettings
from spmdrl.errors import Refusal
from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.tensor_parts import Box, held_boxes, like, local_part, narrow, write
from spmdrl.train.adamw import AdamW

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic: the steepest at 0 whose values stay near 1. Keller Jordan, 2024."""
_EPS = 1e-7


def block_matrices(hf_model: nn.Module, shards: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the matrices that Muon trains: those of the blocks' linear layers.

    Embeddings, heads, norms, biases, routers, and experts that a model stores in one tensor of
    three dims are not among them.

    Args:
        shards: {name: parameter}, the objects that the model has.
    Raises: Refusal when there is none.
    """
    layers = [m for block in blocks(hf_model).values() for m in block.modules()]
    own = {id(m.weight) for m in layers if isinstance(m, nn.Linear) or _is_conv1d(m)}
    own -= {id(router.weight) for router in _linear_routers(hf_model)}
    found = {name for name, p in shards.items() if id(p) in own and p.dim() == 2}
    if not found:
        raise Refusal(
            f"optimizer.kind: muon trains the matrices of linear layers, and the blocks of "
            f"{type(hf_model).__name__} have none that train; take adamw"
        )
    return found


def _linear_routers(hf_model: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers next to experts that have one output for each expert.

    In some families these are the routers, in others they are inside them.
    """
    for name, experts in experts_modules(hf_model).items():
        beside = hf_model.get_submodule(name.rpartition(".")[0]).named_modules()
        yield from (
            module
            for at, module in beside
            if isinstance(module, nn.Linear)
            and len(module.weight) == experts.num_experts
            # Layers of the experts themselves may have as many rows by chance.
            and "expert" not in at
            and "shared" not in at
        )


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # transformers': a linear layer, transposed


def orthogonalised(matrix: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by Newton and Schulz's iteration.

    The singular values come into [0.7, 1.2], those near 0 more slowly.

    Args:
        matrix: [m, n]. steps: of the quintic iteration. dtype: to compute in.
    Returns: [m, n] of that dtype.
    Source: Keller Jordan, Muon (kellerjordan.github.io/posts/muon), as in torch.optim.Muon, whose
        bits this has in bfloat16.
    """
    a, b, c = _COEFFICIENTS
    # A copy, since it is divided in place.
    found = matrix.to(dtype, copy=True)
    is_tall = matrix.shape[0] > matrix.shape[1]
    # The Gram matrix of the shorter side is the smaller one.
    found = found.T if is_tall else found
    found.div_(found.norm().clamp(min=_EPS))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


class Muon(AdamW):
    """Muon for the matrices of the blocks and AdamW for all other parameters; used like AdamW.

    The step of a matrix [m, n] with momentum M <- mu M + (1 - mu) G is W <- (1 - lr wd) W - lr f
    NS(mu M + (1 - mu) G), f = 0.2 sqrt(max(m, n)) or sqrt(max(1, m / n)).

    Args:
        parameters: {name: DTensor or Tensor}, float32; updated in place.
        matrices: those that Muon trains, by name.
        options: the config's optimizer section.
        how: the other arguments of AdamW.
    Source: Keller Jordan 2024; arXiv 2502.16982 (Moonlight), its Algorithm 1 for shards, and the
        factor under which AdamW's learning rates serve.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        matrices: set[str],
        options: OptimizerSettings,
        **how: Any,
    ):
        rest = {name: p for name, p in parameters.items() if name not in matrices}
        super().__init__(rest, options=options, **how)
        # Sorted, since all ranks must gather the matrices in the same order.
        self.matrices = {name: parameters[name] for name in sorted(matrices)}
        self.parameters |= self.matrices
        # Made here and not in the first step, so that every checkpoint has them.
        self._momentum = {
            name: torch.zeros_like(local_part(p)) for name, p in self.matrices.items()
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update the parameters in place; ranks that share a matrix meet each other."""
        super().step(gradients, lr=lr)
        own = self.options.muon
        for name, parameter in self.matrices.items():
            if name not in gradients:
                continue
            momentum = self._momentum[name]
            gradient = gradients[name].float()
            momentum.lerp_(gradient, 1 - own.momentum)
            ahead = gradient.lerp(momentum, own.momentum) if own.nesterov else momentum
            whole = like(parameter, ahead)
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            dtype = getattr(torch, own.ns_dtype)
            whole = orthogonalised(whole, steps=own.ns_steps, dtype=dtype)
            rate = lr * own.lr_factor
            local_part(parameter).mul_(1 - rate * self.options.weight_decay)
            for box, view in held_boxes(name, parameter):
                part = narrow(whole, outer=Box.whole(whole.shape), part=box)
                view.add_(part, alpha=-rate * self._factor(parameter.shape))

    def _factor(self, shape: torch.Size) -> float:
        rows, columns = shape
        if self.options.muon.adjust_lr_fn == "original":
            return max(1, rows / columns) ** 0.5
        return 0.2 * max(rows, columns) ** 0.5

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state and {momentum: {name: ..}}, laid out and shared as there."""
        own = {name: like(p, self._momentum[name]) for name, p in self.matrices.items()}
        return super().state_dict() | {"momentum": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on this layout."""
        super().load_state_dict(state)
        for name, kept in self._momentum.items():
            write(kept, local_part(state["momentum"][name]))
