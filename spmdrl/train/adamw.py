"""AdamW on this rank's shards.

Everything here is elementwise on local shards, so that no step goes through DTensor dispatch
and one fused kernel serves parameters of any mesh.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import OptimizerSettings
from spmdrl.model.attention.packing import packs
from spmdrl.model.tensor_parts import BlockValues, held_boxes, like, local_part, write
from spmdrl.train.eight_bits import BLOCK, LEAST, Quantised
from spmdrl.world.torch_internals import fused_adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK = 2**24
"""Elements that are converted, or brought from the host, at once: 64 MiB of each tensor."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive local elements of a parameter and of its moments, as flat views."""

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

    The update is computed in float32 on the parameters' device. State that is kept on the host
    is copied there and back in pieces. State that is kept in bfloat16 is rounded stochastically,
    keyed by update, name and place in the whole tensor, so that copies of a part stay equal and a
    resumed run repeats the bits.

    Args:
        parameters: {name: DTensor or Tensor}, float32 or bfloat16; updated in place.
        no_decay: names excluded from weight decay, in addition to tensors of fewer than two dims.
        options: the config's optimizer section.
        dtype: of both moments: float32, bfloat16, or int8 for blocks of 8 bits (eight_bits.py).
        is_on_host: keep the moments in (pinned) host memory.
        device: where the update is computed; None: on the device of the parameters. With a device,
            parameters and gradients may be on the host.
        key: first part of the keys of the random bits: the seed of the run and the model's name.
        factors: {name: factor on the learning rate}, 1 for those left out.
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
        factors: Mapping[str, float] | None = None,
    ):
        self.parameters = dict(parameters)
        self._key = key
        self.options = options
        self.local = {name: local_part(p) for name, p in parameters.items()}
        self._device = device or next(iter(self.local.values())).device
        self._is_away = is_on_host and self._device.type == "cuda"
        place = {"device": "cpu", "pin_memory": True} if self._is_away else {"device": self._device}
        # Made here and not in the first step, so that every checkpoint has them.
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
        # If nothing is converted, there are no copies whose size matters: one kernel for all.
        most = _CHUNK if self._is_away or dtypes != {torch.float32} else sys.maxsize
        alike: dict[tuple[float, float], list[str]] = {}
        for name in self.local:
            decay = self.options.weight_decay if name in decays else 0.0
            alike.setdefault(((factors or {}).get(name, 1.0), decay), []).append(name)
        self._chunks = [
            (how, chunk)
            for how, names in sorted(alike.items(), reverse=True)
            for chunk in packs(
                (p for n in names for p in self._pieces(n, most=most)),
                most,
                size=lambda piece: piece.parameter.numel(),
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
        for (factor, decay), chunk in self._chunks:
            pieces = [piece for piece in chunk if piece.name in gradients]
            self._update(pieces, gradients, lr=lr * factor, decay=decay, key=key)
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
        }
        # `to` returns the same tensor if device and dtype agree: AdamW updates that one in place.
        # The operator does not advance the count of updates, which `step` has done.
        fused_adamw(
            own["parameter"],
            [piece.gradient(gradients).to(self._device) for piece in pieces],
            own["exp_avg"],
            own["exp_avg_sq"],
            [],  # maxima, which only amsgrad has
            [self._updates] * len(pieces),
            lr=lr,
            beta1=self.options.beta1,
            beta2=self.options.beta2,
            weight_decay=decay,
            eps=self.options.eps,
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

    def state_dict(self) -> dict[str, Any]:
        """Return {exp_avg: {name: ..}, exp_avg_sq: {name: ..}, updates: []}.

        The tensors are laid out like the parameters (DTensors where those are) and share
        storage with the live state, so that loading in place restores it. For moments in 8 bits
        these are the codes. The scales are under exp_avg_scales and so on, as BlockValues. Any
        layout can read their tensors, and the same layout restores all bits.
        """
        state: dict[str, Any] = {}
        for moment, own in self._moments.items():
            scales: dict[str, BlockValues] = {}
            state[moment] = {
                name: self._like(name, t) for name, t in own.items() if isinstance(t, Tensor)
            }
            for name, kept in own.items():
                if isinstance(kept, Quantised):
                    state[moment][name] = self._like(name, kept.codes[: kept.count])
                    scales[name] = BlockValues(name, self.parameters[name], kept.scales, BLOCK)
            state |= {f"{moment}_scales": scales} if scales else {}
        return state | {"updates": self._updates}

    def _like(self, name: str, kept: Tensor) -> Tensor:
        return like(self.parameters[name], kept.view(self.local[name].shape))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on this layout."""
        for moment, own in self._moments.items():
            for name, kept in own.items():
                saved = local_part(state[moment][name])
                if isinstance(kept, Quantised):
                    write(kept.codes[: kept.count], saved.flatten())
                    scales = state[f"{moment}_scales"][name]
                    kept.take_scales(local_part(scales.tensor).flatten())
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


def _run(kept: Tensor | Quantised, begin: int, *, count: int) -> Tensor | Quantised:
    if isinstance(kept, Quantised):
        return kept.part(begin, count)
    return kept.view(-1)[begin : begin + count]


def stochastic_round(values: Tensor, *, key: str) -> Tensor:
    """Round float32 to one of the two nearest bfloat16 values, so that the mean is exact.

    A bfloat16 value has 8 significant bits. With rounding to the nearest value, each update below
    1/512 of a weight is lost. Here a value is rounded up with a probability that is its distance
    from the lower neighbour over the distance of the two neighbours. So the mean over many small
    updates is right.

    Args:
        values: float32, any shape. What is not finite is cast.
        key: of the random bits; one for each tensor of each update.
    Returns: bfloat16, a function of the arguments and of the kind of device alone.
    Source: arXiv 2010.06192, section 3 (stochastic rounding of weight updates).
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # bfloat16 drops the lower 16 bits. Adding 16 random bits to them may carry into the upper ones.
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()
