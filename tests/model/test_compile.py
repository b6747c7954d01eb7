"""Compiled blocks: which sizes the compiler knows, and which vary."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from transformers import AutoModelForCausalLM

from spmdrl.config import Config, KernelsSettings, ModelSettings
from spmdrl.model.parallel.layout import _wrapped_blocks
from tests.helpers.plan_runs import tiny_config

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
