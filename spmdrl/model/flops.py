"""Floating point operations of a model on real tokens, and what share of a GPU's peak they are.

A multiply-add counts as two operations. Counted are the necessary matmuls: weights times tokens
(for experts, the chosen ones), attention over visible pairs of tokens, layers with a state token by
token, and the output head on scored positions. Elementwise operations, padding, recomputation
(activation checkpointing, and the head's logits in its backward pass) and towers are not counted.
Source: arXiv 2204.02311, appendix B (model FLOPs utilisation). Deviation: attention is causal, so
only half of its pairs count.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.imports import attempt
from spmdrl.model.model_shape import ModelShape, model_shape
from spmdrl.types import Sums
from spmdrl.world.machine.hardware import known_gpu

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flops:
    """One forward pass, in floating point operations by where they happen."""

    blocks: float  # linear layers, experts and routers
    attention: float  # scores and their weighted sums; states
    head: float  # logits

    @property
    def total(self) -> float:
        """All of them."""
        return self.blocks + self.attention + self.head


def forward_flops(
    shape: ModelShape, *, lengths: Tensor, num_scored: int, before: Tensor | None = None
) -> Flops:
    """Count a forward pass over sequences.

    Args:
        shape: of the model.
        lengths: [S] tokens of each sequence, prompt and response.
        num_scored: positions whose logits are computed, over all sequences.
        before: [S], how many of these tokens are computed with another sequence; None: none.
    """
    before = torch.zeros_like(lengths) if before is None else before
    tokens = int((lengths - before).sum())
    attention = 0.0
    for block, count in shape.kinds:
        own = block.attention
        per_pair = 2 * own.heads * (own.qk_dim + own.v_dim)
        pairs = visible_pairs(lengths, window=own.window)
        pairs -= visible_pairs(before, window=own.window)
        attention += count * per_pair * pairs
        if block.state is not None:
            attention += count * tokens * block.state.flops
    return Flops(
        blocks=2.0 * tokens * sum(count * block.matmul_numel for block, count in shape.kinds),
        attention=attention,
        head=2.0 * num_scored * shape.vocab * shape.hidden,
    )


def visible_pairs(lengths: Tensor, *, window: int | None) -> float:
    """Return the number of visible (query, key) pairs under a causal mask.

    That is half of the squared length of each sequence, or the area of the band of a window.

    Args:
        lengths: [S] tokens.
        window: tokens that a query attends to, itself included; None: all.
    """
    own = lengths.double()
    seen = own if window is None else own.clamp(max=window)
    return float((seen * own - seen.square() / 2).sum())


def training_flops(
    shape: ModelShape,
    *,
    lengths: Tensor,
    num_scored: int,
    before: Tensor | None = None,
    trains_weights: bool = True,
) -> float:
    """Count a forward and a backward pass over sequences.

    A backward pass costs two forward passes: one for gradients of inputs, one for those of weights.

    Args:
        lengths, num_scored, before: as of `forward_flops`.
        trains_weights: False with adapters, where weights get no gradient. The few operations of
            adapters are not counted.
    """
    own = forward_flops(shape, lengths=lengths, num_scored=num_scored, before=before)
    # Both factors of attention's products are activations, so both always get gradients.
    times = 3 if trains_weights else 2
    return times * (own.blocks + own.head) + 3 * own.attention


# --------------------------------------------------------------------------- in a run


def countable_shape(hf_model: nn.Module) -> ModelShape | None:
    """Return the shape of a model; None, with a line in the log, if its build is not known."""
    shape, error = attempt(lambda: model_shape(hf_model))
    if error:
        log.info("perf/trainer_flops is not counted: %s", error)
    return shape


def trained_flops(
    shape: ModelShape | None,
    *,
    lengths: Tensor,
    num_scored: int,
    cfg: Config,
    before: Tensor | None = None,
) -> Sums:
    """Return perf/trainer_flops of a step: every sequence forward and backward, once per epoch.

    Args:
        shape: None where the model cannot be counted.
        lengths: [S] tokens, of the whole batch, all ranks.
        num_scored: loss tokens; the cost of a scalar head is ignored.
        before: see `forward_flops`.
    """
    if shape is None:
        return {}
    flops = training_flops(
        shape,
        lengths=lengths,
        num_scored=0 if cfg.objective.is_scalar else num_scored,
        before=before,
        trains_weights=not cfg.model.lora.is_on,
    )
    return {"perf/trainer_flops": (flops * cfg.batch.epochs, 1.0)}


def utilisation(flops: float, seconds: float, *, ranks: int, peak_flops: float | None) -> Sums:
    """Return perf/trainer_tflops_per_s and, if the peak is known, perf/mfu.

    Args:
        flops: of all trainer ranks together.
        seconds: that the update took.
        ranks: that trained.
        peak_flops: of one rank's device, 1/s; None where it is not known.
    """
    if not flops or not seconds:
        return {}
    sums: Sums = {"perf/trainer_tflops_per_s": (flops / 1e12 / ranks, seconds)}
    if peak_flops:
        sums["perf/mfu"] = (flops / ranks / peak_flops, seconds)
    return sums


def device_peak_flops(device: torch.device, *, dtype: str) -> float | None:
    """Return the peak of a device for matmuls in the compute dtype, 1/s; None if it is not known.

    It is known for the GPUs of hardware.py in bfloat16.
    """
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return gpu.flops if gpu else None
