"""AdamW on this rank's shards, its schedule, and the one gradient norm that clips them.

Everything here is elementwise on local shards, so that no step goes through DTensor dispatch
and one fused kernel serves parameters of any mesh.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from spmdrl.config import OptimizerSettings
from spmdrl.model.packing import packs
from spmdrl.model.shards import held_boxes, local_part, write
from spmdrl.train.eight_bits import LEAST, Quantised
from spmdrl.train.rounding import stochastic_round
from spmdrl.world.torch_internals import fused_adamw, norms_of, sharded_like

MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK = 2**24
"""Elements that are converted, or brought from the host, at once: 64 MiB of each tensor."""


def learning_rate(options: OptimizerSettings, step: int, *, steps: int) -> float:
    """Return the learning rate of a step: a pure function, so that a resume needs no state.

    Args:
        options: schedule, peak, warm-up.
        step: from 0.
        steps: of the whole run.
    """
    warmup_steps, min_lr_frac = options.warmup_steps, options.min_lr_frac
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    if options.schedule == "constant":
        return options.lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    done = min(1.0, done)
    left = 1 - done if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return options.lr * (min_lr_frac + (1 - min_lr_frac) * left)


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
        gradients: {name: local gradient}; their norms are taken in float32.
        copies_of: {name: ranks that hold the same part}.
    Returns: [] float64.
    """
    names = [name for name, g in gradients.items() if g.numel()]
    if not names:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(norms_of([gradients[name] for name in names], 2, torch.float32)).double()
    shares = torch.tensor([1.0 / copies_of[name] for name in names], dtype=torch.float64)
    return (norms.square() * shares.to(norms.device)).sum()


@dataclass(frozen=True)
class _Piece:
    """A run of one parameter's local elements, with the same of its moments; flat views."""

    key: str  # of its random bits: name and place in the whole tensor
    name: str
    begin: int
    parameter: Tensor
    exp_avg: Tensor | Quantised
    exp_avg_sq: Tensor | Quantised

    def gradient(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return its part of the local gradients, [n] float32."""
        flat = gradients[self.name].reshape(-1)
        return flat[self.begin : self.begin + self.parameter.numel()].float()


class AdamW:
    """AdamW over local shards, with state that is saved by parameter name.

    The update is computed in float32 on the parameters' device, whatever the state is kept in
    and wherever: what is kept elsewhere comes and goes in pieces. What is kept in bfloat16 is
    rounded stochastically, keyed by update, name and place in the whole tensor, so that copies
    of a part stay equal and a resumed run repeats the bits.

    Args:
        parameters: {name: DTensor or Tensor}, float32 or bfloat16; updated in place.
        no_decay: names excluded from weight decay besides the tensors of fewer than two dims.
        options: the config's optimizer section.
        dtype: of both moments: float32, bfloat16, or int8 for blocks of 8 bits (eight_bits.py).
        is_on_host: keep the moments in (pinned) host memory.
        device: that computes the update; None for that of the parameters, which may be on the host
            instead, with their gradients.
        key: of the random bits, with the rest: of the run and of the model in it.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        no_decay: set[str],
        options: OptimizerSettings,
        dtype: torch.dtype = torch.float32,
        is_on_host: bool = False,
        device: torch.device | None = None,
        key: str = "",
    ):
        self.parameters, self._key, self._own = dict(parameters), key, options
        self.local = {name: local_part(p) for name, p in parameters.items()}
        self._device = device or next(iter(self.local.values())).device
        self._is_away = is_on_host and self._device.type == "cuda"
        place = {"device": "cpu", "pin_memory": True} if self._is_away else {"device": self._device}
        # From the start, so that a checkpoint has them.
        self._moments = {
            moment: {
                name: _zeros(
                    parameters[name],
                    tensor,
                    dtype=dtype,
                    place=place,
                    is_signed=moment == MOMENTS[0],
                )
                for name, tensor in self.local.items()
            }
            for moment in MOMENTS
        }
        self._updates = torch.zeros((), dtype=torch.float32, device=self._device)
        decays = {n for n, p in parameters.items() if p.dim() >= 2 and n not in no_decay}
        dtypes = {dtype, *(tensor.dtype for tensor in self.local.values())}
        # Without anything to convert there are no copies to bound: one kernel for all.
        most = _CHUNK if self._is_away or dtypes != {torch.float32} else sys.maxsize
        self._chunks = [
            (decay, chunk)
            for decay, names in (
                (self._own.weight_decay, [n for n in self.local if n in decays]),
                (0.0, [n for n in self.local if n not in decays]),
            )
            for chunk in packs(
                (p for n in names for p in self._pieces(n, most=most)), most, size=_size
            )
        ]

    def _pieces(self, name: str, *, most: int) -> Iterator[_Piece]:
        start = [box.start for box, _ in held_boxes(name, self.parameters[name])]
        kept = self.local[name], *(self._moments[m][name] for m in MOMENTS)
        for begin in range(0, kept[0].numel(), most):
            yield _Piece(
                f"{name}/{start}/{begin}", name, begin, *(_run(t, begin, count=most) for t in kept)
            )

    def gradients(self) -> dict[str, Tensor]:
        """Return {name: local gradient} of the parameters that have one."""
        return {n: local_part(p.grad) for n, p in self.parameters.items() if p.grad is not None}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update the parameters in place."""
        self._updates += 1
        key = f"{self._key}/{int(self._updates)}"
        for decay, chunk in self._chunks:
            self._update(
                [piece for piece in chunk if piece.name in gradients],
                gradients,
                lr=lr,
                decay=decay,
                key=key,
            )
        if self._is_away:
            torch.cuda.synchronize(self._device)  # a checkpoint may read the moments next

    def _update(
        self,
        pieces: Sequence[_Piece],
        gradients: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        key: str,
    ) -> None:
        if not pieces:
            return
        kept = {
            part: [getattr(piece, part) for piece in pieces] for part in ("parameter", *MOMENTS)
        }
        own = {
            part: [t.to(self._device, torch.float32, non_blocking=True) for t in tensors]
            for part, tensors in kept.items()
        }  # the very same tensors where nothing differs
        fused_adamw(
            own["parameter"],
            [piece.gradient(gradients).to(self._device) for piece in pieces],
            own["exp_avg"],
            own["exp_avg_sq"],
            [],
            [self._updates] * len(pieces),
            lr=lr,
            beta1=self._own.beta1,
            beta2=self._own.beta2,
            weight_decay=decay,
            eps=self._own.eps,
            amsgrad=False,
            maximize=False,
        )
        for part, tensors in kept.items():
            for piece, tensor, value in zip(pieces, tensors, own[part]):
                if tensor.dtype != value.dtype:
                    value = stochastic_round(value, key=f"{key}/{part}/{piece.key}")
                if tensor is not value:
                    tensor.copy_(value, non_blocking=True)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, dict[str, Tensor] | Tensor]:
        """Return {exp_avg: {name: ..}, exp_avg_sq: {name: ..}, updates: []}.

        The tensors are laid out like the parameters (DTensors where those are) and share
        storage with the live state, so that loading in place restores it. Of moments in 8 bits
        these are the codes; each element's scale is beside them, under exp_avg_scales and so on,
        a copy on the host: any layout can read them, and the same one restores all bits.
        """
        state: dict[str, dict[str, Tensor] | Tensor] = {}
        for moment, own in self._moments.items():
            scales = {}
            state[moment] = {
                name: self._like(name, t) for name, t in own.items() if isinstance(t, Tensor)
            }
            for name, kept in own.items():
                if isinstance(kept, Quantised):
                    state[moment][name] = self._like(name, kept.codes[: kept.count])
                    scales[name] = self._like(name, kept.scale_of_each())
            state |= {f"{moment}_scales": scales} if scales else {}
        return state | {"updates": self._updates.clone()}

    def _like(self, name: str, kept: Tensor) -> Tensor:
        return _like(self.parameters[name], kept.view(self.local[name].shape))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on this layout."""
        for moment, own in self._moments.items():
            for name, kept in own.items():
                saved = local_part(state[moment][name])
                if isinstance(kept, Quantised):
                    write(kept.codes[: kept.count], saved.flatten())
                    kept.take_scales(local_part(state[f"{moment}_scales"][name]).flatten())
                else:
                    write(kept, saved)
        self._updates.fill_(float(state["updates"]))


def _zeros(
    parameter: Tensor,
    local: Tensor,
    *,
    dtype: torch.dtype,
    is_signed: bool,
    place: Mapping[str, object],
) -> Tensor | Quantised:
    if dtype != torch.int8:
        return torch.zeros(local.shape, dtype=dtype, **place)
    if parameter.numel() < LEAST:  # of the whole tensor, so that all layouts agree
        return torch.zeros(local.shape, dtype=torch.float32, **place)
    return Quantised.zeros(local.numel(), is_signed=is_signed, **place)


def _size(piece: _Piece) -> int:
    return piece.parameter.numel()


def _run(kept: Tensor | Quantised, begin: int, *, count: int) -> Tensor | Quantised:
    if isinstance(kept, Quantised):
        return kept.part(begin, count)
    return kept.view(-1)[begin : begin + count]


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    return sharded_like(parameter, local) if isinstance(parameter, DTensor) else local
