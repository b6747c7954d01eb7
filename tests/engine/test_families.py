"""Small models of many families in vLLM: what they score and draw, before and after a push."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import Config, LayoutSettings
from spmdrl.engine.protocol import Request
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from tests.helpers.built import changed
from tests.helpers.comparing import plain_scores
from tests.helpers.worlds import WeightStream, in_world, make_engine
from tests.sync.test_engine import FileShards, make_config

# family: (fields, engine.dtype, how weights travel, largest mean gap in nats)
FAMILIES: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "starcoder2": ({}, "float32", "traced", 1e-5),  # by vLLM's Transformers backend
    "phi": ({}, "float32", "traced", 1e-5),  # so too, and its head has a bias
    "cohere2": ({}, "float32", "traced", 1e-5),  # so too: its own class has longer windows
    "apertus": ({}, "bfloat16", "traced", 0.1),  # tensors without dims
    "deepseek_v2": ({}, "float32", "traced", 1e-5),  # projections absorbed after loading
    "deepseek_v3": ({}, "float32", "traced", 1e-5),
    # Layers with state. In transformers' Mamba2 norms are of all groups at once.
    "mamba2": ({"n_groups": 1}, "float32", "reload", 1e-5),
    "lfm2": ({}, "float32", "traced", 1e-5),  # heads are a dim of their own for its rotary kernel
    # Routers without groups, by sigmoids, by a bias; vLLM's class of the third has no head's bias.
    "minimax_m2": ({}, "float32", "traced", 1e-5),
    "ernie4_5_moe": ({}, "float32", "traced", 1e-5),
    "phimoe": ({}, "float32", "traced", 1e-5),
    "qwen3_next": (
        {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"num_experts": 2, "num_experts_per_tok": 2},  # no choice to flip in bfloat16
        *("bfloat16", "traced", 0.1),
    ),
}
LENGTHS = (3, 9, 40, 70)  # tokens: the windows have eight
ROWS = [random.Random(n).choices(range(3, 100), k=n) for n in LENGTHS]


def family_cfg(folder: Path, *, dtype: str) -> Config:
    """Return a config of one rank that trains and generates, with room for the rows."""
    layout = LayoutSettings(placement="colocated", world_size=1)
    cfg = make_config(folder, layout=layout, dtype=dtype)
    return changed(cfg, data={"max_prompt_tokens": 96}, stream={"max_logprob_gap": 1.0})


def folder_of(where: Path, family: str, fields: dict[str, Any]) -> Path:
    config = shrunk(family_config(family))
    for name, value in fields.items():
        setattr(config, name, value)
    tiny_model(config, where / family)
    return where / family


def gap(ours: list[Tensor], right: list[Tensor]) -> float:
    """Return the mean distance in nats, first tokens left out."""
    return float(torch.cat([(a - b)[1:].abs() for a, b in zip(ours, right)]).mean())


def plain(folder: Path, rows: list[list[int]]) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return plain_scores(model, rows)


def in_each(world: Any, folders: dict[str, str]) -> dict[str, Any]:
    """Build an engine of each folder, one after the other, and push changed weights into it."""
    found: dict[str, Any] = {}
    for family, name in folders.items():
        own, folder = copy.copy(world), Path(name)
        own.cfg = family_cfg(folder, dtype=FAMILIES[family][1])
        # Of processors that have AMX, whose latent attention would pack its weights.
        has_amx = mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True)
        with has_amx if family.startswith("deepseek") else contextlib.nullcontext():
            engine = make_engine(own.cfg, own)
        found[family] = {"gaps": [gap(engine.score(ROWS), plain(folder, ROWS))]}
        found[family] |= pushed(engine, own, folder=folder, found=found[family]["gaps"])
        engine.close()
    return found


def pushed(engine: Any, world: Any, *, folder: Path, found: list[float]) -> dict[str, Any]:
    weights = FileShards(str(folder), True)
    stream = WeightStream(weights, engine, world)
    stream.push(1)  # and verify
    for index, row in enumerate(ROWS):
        engine.add(Request(str(index), tuple(row), 16, 1.0, index, ()))
    for _ in range(4):  # each sequence gets a few tokens by the weights that it began with
        engine.step()
    for tensor in weights.shards().values():
        wave = torch.sin(torch.arange(tensor.numel())).view(tensor.shape)
        tensor.mul_((1 + 0.3 * wave).to(tensor.dtype))
    engine.cfg = changed(engine.cfg, rollout={"schedule": {"kv_cache": "recompute"}})
    stream.push(2)
    drawn: dict[str, Any] = {}
    while engine.is_busy:
        drawn |= {done.key: done for done in engine.step()}
    new = shutil.copytree(folder, f"{folder}-new")
    save_file(weights.shards(), Path(new) / "model.safetensors", metadata={"format": "pt"})
    right = plain(Path(new), ROWS)
    found.append(gap(engine.score(ROWS), right))
    rows = [row + drawn[str(i)].tokens.tolist() for i, row in enumerate(ROWS)]
    late = [len(row) + int((drawn[str(i)].versions == 1).sum()) for i, row in enumerate(ROWS)]
    ours = [drawn[str(i)].logprobs[n - len(ROWS[i]) :] for i, n in enumerate(late)]
    theirs = [scores[n:] for scores, n in zip(plain(Path(new), rows), late)]
    found.append(float(torch.cat([(a - b).abs() for a, b in zip(ours, theirs)]).mean()))
    return {
        "mode": stream.mode,
        "late": min(map(len, ours)),
        "change": gap(right, plain(folder, ROWS)),
    }


DAILY = {"deepseek_v2", "mamba2", "minimax_m2"}
"""Latent attention, a reload with states, routers; the others, in the grid, have kinds of their own
too."""


@pytest.mark.parametrize(
    "families",
    [sorted(DAILY), pytest.param(sorted(FAMILIES.keys() - DAILY), marks=pytest.mark.grid)],
    ids=["of the day", "others"],
)
def test_engines_of_many_families_score_as_transformers_does(families, tmp_path):
    folders = {f: str(folder_of(tmp_path, f, FAMILIES[f][0])) for f in families}
    cfg = family_cfg(Path(folders[families[0]]), dtype="float32")
    (found,) = in_world(cfg, in_each, folders)
    for family in families:
        _, _, mode, limit = FAMILIES[family]
        of = found[family]
        assert max(of["gaps"]) < limit < of["change"] / 2, (family, of)
        assert of["mode"] == mode and of["late"] > 4, (family, of)
