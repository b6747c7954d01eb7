"""Layers with a state in the transformers engine: each step computes one token of a sequence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.columns import RouterRoutes
from spmdrl.config import Config, LayoutSettings
from spmdrl.engine.protocol import Request
from spmdrl.engine.transformers.runner import _RouteRecorder
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from tests.helpers.built import changed
from tests.helpers.comparing import plain_scores
from tests.helpers.worlds import in_world, make_engine
from tests.sync.test_engine import make_config

FAMILIES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "nemotron_h",
    "lfm2",
    "granitemoehybrid",
    "bamba",
    "falcon_h1",
    "olmo_hybrid",
    "mamba2",
    "kimi_linear",
)
DAILY = ("qwen3_5_moe_text", "nemotron_h")
MIXTURES = ("qwen3_5_moe_text", "nemotron_h")
LONGEST = 400
# Two prompts come twice: their samples share the states at the prompt's end.
PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 2, 90, 90, 65, 3, 64, 1, 7)]
MIDDLE = 40  # steps before the weights change


def make_cfg(folder: Path, *, keeps: bool, replays: bool) -> Config:
    layout = LayoutSettings(placement="colocated", world_size=1)
    return changed(
        make_config(folder, layout=layout, kind="transformers", dtype="float32"),
        data={"max_prompt_tokens": 96},
        sampling={"max_response_tokens": LONGEST},
        model={"moe": {"replay": replays}},
        engine={"max_num_seqs": 6, "max_batched_tokens": 120},
        rollout={"schedule": {"kv_cache": "keep" if keeps else "recompute"}},
    )


def row_lengths(engine: Any) -> list[int]:
    """Return a list that gets the tokens of each forward pass."""
    lengths: list[int] = []
    embeddings = engine.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, args, out: lengths.append(args[0].numel()))
    return lengths


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            wave = torch.sin(torch.arange(parameter.numel())).view(parameter.shape)
            parameter.mul_(1 + 0.3 * wave)


def drawn(engine: Any, *, changes: bool) -> dict[str, Any]:
    """Draw with version 0, and from the middle on with version 1."""
    engine.weights_changed(0)
    for i, prompt in enumerate(PROMPTS):
        length = LONGEST if i == 2 else 20 + 9 * i  # others finish, begin and move meanwhile
        engine.add(Request(str(i), prompt, length, 1.0, i, ()))
    done = {own.key: own for _ in range(MIDDLE) for own in engine.step()}
    if changes:
        change(engine.model)
    engine.weights_changed(1)
    while engine.is_busy:
        done |= {own.key: own for own in engine.step()}
    return done


def gap(done: dict[str, Any], before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest difference of logprobs, nats."""
    found = []
    for i, prompt in enumerate(PROMPTS):
        own = done[str(i)]
        right = torch.where(own.versions == 0, before[i][len(prompt) :], after[i][len(prompt) :])
        found.append((own.logprobs - right).abs().max())
    return float(torch.stack(found).max())


def differing_routes(model: Any, rows: list[list[int]], done: dict[str, Any]) -> int:
    """Return how many tokens went through other experts than in plain transformers."""
    recorder = _RouteRecorder(model)
    count = 0
    for i, row in enumerate(rows):
        with torch.no_grad():
            model(torch.tensor([row[:-1]]))
        own = done[str(i)].extra_columns[RouterRoutes.key].rows
        count += int((own.sort(-1).values != recorder.read().sort(-1).values).any(-1).sum())
    return count


def in_each(world: Any, folders: dict[str, str]) -> dict[str, Any]:
    """Draw while weights change, and while they do not and the states are kept."""
    found: dict[str, Any] = {}
    for family, name in folders.items():
        of = found[family] = {"routes": 0}
        for changes in (True, False):
            own = copy.copy(world)
            own.cfg = make_cfg(Path(name), keeps=not changes, replays=family in MIXTURES)
            engine = make_engine(own.cfg, own)
            lengths = row_lengths(engine)
            done = drawn(engine, changes=changes)
            model = AutoModelForCausalLM.from_pretrained(Path(name), dtype=torch.float32)
            rows = [[*prompt, *done[str(i)].tokens.tolist()] for i, prompt in enumerate(PROMPTS)]
            before = plain_scores(model, rows)
            if family in MIXTURES and not changes:
                of["routes"] = differing_routes(model, rows, done)
            if changes:
                change(model)
            after = plain_scores(model, rows)
            of[changes] = gap(done, before, after)
            if changes:
                of["change"] = float((before[2] - after[2]).abs().mean())
                scores = zip(engine.score(rows), after, strict=True)
                of["scored"] = max(float((a - b).abs().max()) for a, b in scores)
            else:
                of["row"] = max(lengths[MIDDLE : MIDDLE + 3])  # nothing begins then
            of["last"] = lengths[-1]
            of["longest"] = max(len(own.tokens) for own in done.values())
            engine.close()
    return found


@pytest.mark.parametrize(
    "family",
    [*DAILY, *(pytest.param(f, marks=pytest.mark.grid) for f in FAMILIES if f not in DAILY)],
)
def test_sequences_continue_from_their_states_as_if_all_were_computed(family, tmp_path):
    tiny_model(shrunk(family_config(family)), tmp_path / family)
    cfg = make_cfg(tmp_path / family, keeps=False, replays=False)
    (found,) = in_world(cfg, in_each, {family: str(tmp_path / family)})
    of = found[family]
    assert max(of[True], of[False], of["scored"]) < 1e-4 < of["change"] / 10, of
    assert of["longest"] == LONGEST and of["last"] == 1, of
    assert of["row"] <= 6 and of["routes"] == 0, of
