"""Compiled blocks: which sizes the compiler knows, what is compiled beside layers with a state."""

from __future__ import annotations

import re
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from transformers import AutoModelForCausalLM

from spmdrl.check.fit import fit_problems
from spmdrl.config import Config, KernelsSettings, ModelSettings
from spmdrl.model.parallel.layout import _wrapped_blocks
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from tests.helpers.built import changed
from tests.helpers.plan_runs import tiny_config
from tests.helpers.policy_runs import config, updated
from tests.helpers.worlds import another_trainer, with_trainer

SHAPES: list[torch.Size] = []
"""Of the first norm's input, once for each compilation of a block."""


def note(context: Any) -> None:
    """Append the shape that is known while a block is compiled."""
    SHAPES.append(context.get_local("hidden").as_fake().shape)


class Norm(nn.Module):
    """The first operation of a block, before a product tells the compiler the width."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input."""
        comptime(note)
        return hidden


def test_a_compiled_block_knows_its_width_and_serves_every_length(monkeypatch) -> None:
    # liger's norms compute the size of a Triton block from the width, and torch 2.11 asserts that
    # such a number is no symbol.
    SHAPES.clear()
    torch.compiler.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    hf_model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    for block in hf_model.model.layers:
        block.input_layernorm = Norm()
    cfg = Config(model=ModelSettings(kernels=KernelsSettings(compile=True)))
    assert len(_wrapped_blocks(hf_model, cfg)) == 2
    with torch.no_grad():
        for length in (12, 20, 28, 36):
            hf_model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    widths = [shape[-1] for shape in SHAPES]
    assert all(isinstance(width, int) for width in widths), widths
    is_length_known = [isinstance(shape[1], int) for shape in SHAPES]
    assert is_length_known == [True, False]


# ------------------------------------------------------------------ layers with a state

GRAPHS: list[int] = []
"""Linear layers of each graph that was compiled."""


def _run(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Note a graph, also the part that is checkpointed, and run it as it was traced."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    GRAPHS.append(sum(node.target is nn.functional.linear for node in nodes))
    return graph.forward


def _eager_and_compiled(first: Any, backend: Any, memories: list[dict]) -> list[dict[str, Any]]:
    """Take two updates in each way, compiled and not; this rank is a process of its own."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend=backend)  # type: ignore[method-assign]
    found = []
    for memory in memories:
        torch.compiler.reset()
        GRAPHS.clear()
        weights = {}
        for compiles in (True, False):
            own = {"memory": memory, "kernels": {"compile": compiles}}
            trainer = another_trainer(first, changed(first.world.cfg, model=own))
            weights[compiles] = updated(trainer)["parameters"]
        gaps = [
            float((weights[True][name] - own).abs().max() / own.abs().max())
            for name, own in weights[False].items()
        ]
        found.append({"gap": max(gaps), "graphs": [*GRAPHS]})
    return found


MEMORY = [{}, {"activation_checkpointing": "full"}]


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("bamba", marks=pytest.mark.grid)])
def test_blocks_are_compiled_around_layers_with_a_state(family, tmp_path):
    tiny_model(shrunk(family_config(family)), tmp_path / "model")
    cfg = config(tmp_path / "model", tmp_path)
    (ways,) = with_trainer(cfg, _eager_and_compiled, _run, MEMORY)
    # What is before and after the state, then a block of attention as a whole; the second length
    # compiles once more.
    assert ways == 2 * [{"gap": 0.0, "graphs": [0, 3, 7, 0, 3, 7]}]


@pytest.mark.grid
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_inductor_computes_blocks_around_layers_with_a_state(family, tmp_path):
    tiny_model(shrunk(family_config(family)), tmp_path / "model")
    cfg = config(tmp_path / "model", tmp_path)
    (ways,) = with_trainer(cfg, _eager_and_compiled, "inductor", MEMORY)
    assert all(0 < found["gap"] < 2e-5 for found in ways), ways


@pytest.mark.parametrize(
    "family, checkpointing, says",
    [
        ("qwen3_5_text", "selective", "selective .* qwen3_5_text, whose Qwen3_5GatedDeltaNet is"),
        ("gptj", "none", "compile: true with a gptj, whose GPTJAttention computes in as many"),
    ],
)
def test_what_cannot_be_compiled_is_refused(family, checkpointing, says, tmp_path):
    shrunk(family_config(family)).save_pretrained(tmp_path)
    own = {"kernels": {"compile": True}, "memory": {"activation_checkpointing": checkpointing}}
    (problem,) = fit_problems(config(tmp_path, tmp_path / "run", model=own))
    assert re.search(says, problem)
