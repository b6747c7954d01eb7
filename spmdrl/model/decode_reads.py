"""Bytes that engines read from memory to decode, and what share of a GPU's bandwidth they are.

Each step of an engine reads all weights once, and the keys and values of each sequence that it
draws for. Counted are these alone: no activations, logits, prefill of prompts or drafts. This
traffic usually limits decoding, so its share says how well an engine uses its device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.flops import visible_pairs
from spmdrl.model.model_shape import ModelShape
from spmdrl.types import Sums
from spmdrl.world.machine.hardware import known_gpu


def decode_reads(
    shape: ModelShape | None, *, lengths: Tensor, sampled: Tensor, steps: float, cfg: Config
) -> Sums:
    """Return perf/decode_bytes of a batch: what all replicas together read.

    Args:
        shape: of the policy; None where it cannot be counted.
        lengths: [S] tokens of each sequence. The sampled ones are taken as its last ones.
        sampled: [S] sampled tokens.
        steps: engine steps of all replicas together.
    Returns: empty where the bytes are not known: for mixtures of experts, whose step reads only the
        experts that are chosen, for blocks with a state, and for weights or caches in fewer bits.
    """
    options = cfg.engine.options
    if shape is None or not steps or "quantization" in options or "kv_cache_dtype" in options:
        return {}
    if any(block.experts or block.state for block, _ in shape.kinds):
        return {}
    values = 0.0
    for block, count in shape.kinds:
        own = block.attention
        per_token = own.kv_heads * (own.qk_dim + own.v_dim)
        if own.latent is not None:
            per_token = own.latent[1] + own.latent[2]
        pairs = visible_pairs(lengths, window=own.window)
        pairs -= visible_pairs(lengths - sampled, window=own.window)
        values += count * per_token * pairs
    size = getattr(torch, cfg.engine.dtype).itemsize
    return {"perf/decode_bytes": (size * (steps * shape.numel + values), 1.0)}


def device_bandwidth(device: torch.device) -> float | None:
    """Return the bytes/s of a device's memory; None if its kind is not in hardware.py."""
    gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu.memory_bytes_per_s if gpu else None


def decode_rate(
    nbytes: float, seconds: float, *, ranks: int, peak_bytes_per_s: float | None
) -> Sums:
    """Return perf/decode_gb_per_s and, if the peak is known, perf/decode_bandwidth_frac.

    Args:
        nbytes: that all engine ranks together read.
        seconds: that an engine took to draw.
        ranks: with an engine.
        peak_bytes_per_s: of one rank's memory; None where it is not known.
    """
    if not nbytes or seconds <= 0:
        return {}
    sums: Sums = {"perf/decode_gb_per_s": (nbytes / 1e9 / ranks, seconds)}
    if peak_bytes_per_s:
        sums["perf/decode_bandwidth_frac"] = (nbytes / ranks / peak_bytes_per_s, seconds)
    return sums
