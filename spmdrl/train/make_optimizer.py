"""Makes the optimizer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from spmdrl.config import OptimizerSettings
from spmdrl.model.parallel.recompute import has
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.vision.families import vision_parameters
from spmdrl.train.adamw import AdamW
from spmdrl.train.muon import Muon, block_matrices
from spmdrl.world.torch_internals import plain_name


def make_optimizer(
    model: ShardedModel, shards: Mapping[str, Tensor], options: OptimizerSettings, *, name: str
) -> AdamW:
    """Return the optimizer of a model's shards, as the config's sections say."""
    cfg = model.cfg
    device = model.world.device
    kept = cfg.model.memory
    embedding = model.hf_model.get_input_embeddings().weight
    matrices = block_matrices(model.hf_model, shards) if options.kind == "muon" else set()
    make = partial(Muon, matrices=matrices) if matrices else AdamW
    own_rate = sum(cfg.model.own_rates.values()) if name == "policy" else 0.0
    seeing = vision_parameters(model.hf_model) if own_rate else set()
    return make(
        shards,
        options=options,
        no_decay={n for n, p in shards.items() if p is embedding},
        dtype=getattr(torch, kept.optimizer_dtype),
        key=f"{cfg.seed}/{name}",
        is_on_host=has(kept.offload, "optimizer"),
        device=device,
        factors={plain_name(n): own_rate / options.lr for n in seeing},
    )
