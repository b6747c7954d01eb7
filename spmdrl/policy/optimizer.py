"""AdamW on this rank's shards, its schedule, and the one gradient norm that clips them.

Everything here is elementwise on local shards, so that no step goes through DTensor dispatch
and one fused kernel serves parameters of any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from spmdrl.config import Optimizer
from spmdrl.config.options import ADAMW, LEARNING_RATE


def learning_rate(options: Optimizer, step: int, *, steps: int) -> float:
    """Return the learning rate of a step: a pure function, so that a resume needs no state.

    Args:
        options: schedule, peak, warm-up.
        step: from 0.
        steps: of the whole run.
    """
    own = LEARNING_RATE | options.schedule_options
    warmup_steps, min_lr_frac = own["warmup_steps"], own["min_lr_frac"]
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    if options.schedule == "constant":
        return options.lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    done = min(1.0, done)
    left = 1 - done if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return options.lr * (min_lr_frac + (1 - min_lr_frac) * left)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its storage; a plain tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(parameter: Tensor, *, num_trainers: int) -> int:
    """Return how many trainer ranks hold the same part of a parameter."""
    parts = 1
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            parts *= 1 if isinstance(placement, Replicate) else mesh.size(axis)
    return num_trainers // parts


def square_sum(gradients: Mapping[str, Tensor], copies_of: Mapping[str, int]) -> Tensor:
    """Return this rank's share of the squared global gradient norm.

    The shares of all trainer ranks add up to it under any mesh: a part that several ranks
    hold counts once.

    Args:
        gradients: {name: local float32 gradient}.
        copies_of: {name: ranks that hold the same part}.
    Returns: [] float64.
    """
    names = [name for name, g in gradients.items() if g.numel()]
    if not names:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm([gradients[name] for name in names])).double()
    shares = torch.tensor([1.0 / copies_of[name] for name in names], dtype=torch.float64)
    return (norms.square() * shares.to(norms.device)).sum()


class AdamW:
    """AdamW over local shards, with state that is saved by parameter name.

    Args:
        parameters: {name: DTensor or Tensor}, float32; storage is updated in place.
        no_decay: names excluded from weight decay besides the tensors of fewer than two dims.
        options: the config's optimizer section.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, no_decay: set[str],
                 options: Optimizer):
        self.parameters = dict(parameters)
        self.local = {name: local_part(p) for name, p in parameters.items()}
        decays = {n for n, p in parameters.items() if p.dim() >= 2 and n not in no_decay}
        own = ADAMW | options.options
        groups = [
            {"params": [self.local[n] for n in self.local if n in decays],
             "weight_decay": own["weight_decay"]},
            {"params": [self.local[n] for n in self.local if n not in decays],
             "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=options.lr,
            betas=(own["beta1"], own["beta2"]), eps=own["eps"], fused=True,
        )
        for tensor in self.local.values():  # from the start, so that a checkpoint has them
            self._adamw.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
                "exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor),
            }

    def gradients(self) -> dict[str, Tensor]:
        """Return {name: local gradient} of the parameters that have one."""
        return {n: local_part(p.grad) for n, p in self.parameters.items() if p.grad is not None}

    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update the parameters in place."""
        for name, tensor in self.local.items():
            tensor.grad = gradients.get(name)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for tensor in self.local.values():
            tensor.grad = None

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, dict[str, Tensor] | Tensor]:
        """Return {exp_avg: {name: ..}, exp_avg_sq: {name: ..}, updates: []}.

        The tensors are laid out like the parameters (DTensors where those are) and share
        storage with the live state, so that loading in place restores it.
        """
        state: dict[str, dict[str, Tensor] | Tensor] = {}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = {
                name: _like(p, self._adamw.state[self.local[name]][key])
                for name, p in self.parameters.items()
            }
        first = next(iter(self.local.values()))
        return state | {"updates": self._adamw.state[first]["step"].detach().clone()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor] | Tensor]) -> None:
        """Restore what `state_dict` returned, on this layout."""
        for name, local in self.local.items():
            own = self._adamw.state[local]
            for key in ("exp_avg", "exp_avg_sq"):
                _copy(own[key], local_part(state[key][name]))
            own["step"].fill_(float(state["updates"]))


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
