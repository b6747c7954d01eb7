"""Floating point operations against torch's own counter, and the metrics made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spmdrl.algorithms.reduce import loss_lengths
from spmdrl.config import AlgorithmSettings, Config, ModelSettings
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.blocks import experts_modules
from spmdrl.model.flops import (
    forward_flops,
    trained_flops,
    training_flops,
    utilisation,
    visible_pairs,
)
from spmdrl.model.head import HeadOptions
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import SHAPES, model_shape
from spmdrl.model.scorer import Scorer
from spmdrl.report.glossary import lookup, values_of
from spmdrl.world.machine.hardware import GPUS, known_gpu
from tests.helpers.plan_runs import FAMILIES, scoring, tiny_model
from tests.helpers.ragged import scalars_of

LENGTHS = [48, 48, 48]
"""Equal, so that nothing is padded, and short, so that attention is plain matmuls: the counter
knows no CPU attention kernel."""


def _scorer(family: str) -> tuple[Any, Scorer, Any]:
    """A model, what scores with it, and a row to score."""
    register_attention()
    model = tiny_model(family)
    enable_packing(model)
    model.set_attn_implementation("spmdrl_padded")
    if experts_modules(model):
        model.set_experts_implementation("eager")  # the counter knows no grouped matmul
    scorer = Scorer(model, HeadOptions(29))
    return model, scorer, scoring(LENGTHS, first_scored=11, vocab=model.config.vocab_size)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_forward_pass_has_as_many_operations_as_torch_counts(family):
    model, scorer, work = _scorer(family)
    own = forward_flops(
        model_shape(model),
        lengths=torch.tensor(LENGTHS),
        num_scored=sum(LENGTHS) - 11 * len(LENGTHS),
    )
    with FlopCounterMode(display=False) as counter:
        scorer(work)
    # Padded attention computes the masked half of the scores too, and those out of a window.
    square = _square_attention(model, LENGTHS)
    assert counter.get_total_flops() == own.blocks + own.head + square
    if "sliding_window" not in FAMILIES[family]:
        assert square == 2 * own.attention


def test_blocks_of_one_layer_have_as_many_operations_as_torch_counts():
    model, scorer, work = _scorer("nemotron_h")
    shape, lengths = model_shape(model), torch.tensor(LENGTHS)
    own = forward_flops(shape, lengths=lengths, num_scored=sum(LENGTHS) - 11 * len(LENGTHS))
    with FlopCounterMode(display=False) as counter:
        scorer(work)
    # The state's recurrence is planned token by token, and computed in chunks.
    chunks = counter.get_flop_counts()["Scorer.base.layers.0.mixer"][torch.ops.aten.bmm]
    square = sum(2 * 2 * 4 * 16 * n * n for n in LENGTHS)
    assert counter.get_total_flops() - chunks == own.blocks + own.head + square
    channels = 4 * 32 + 2 * 2 * 32
    state = sum(LENGTHS) * (2 * 2 * 4 * 32 * 32 + 2 * 4 * channels)
    assert own.attention == square / 2 + state


def test_blocks_of_one_layer_have_the_parameters_of_the_model():
    nano = build_meta_model(ModelSettings(path=str(SHAPES / "nemotron-3-nano-30b-a3b")))
    for model in (nano, tiny_model("nemotron_h")):
        shape = model_shape(model)
        assert shape.numel == sum(p.numel() for p in model.parameters())
        assert shape.layers == len(shape.blocks) == model.config.num_hidden_layers
    layers = {
        (block.attention.heads > 0, block.state is not None, bool(block.experts)): count
        for block, count in model_shape(nano).kinds
    }
    assert layers == {(False, True, False): 23, (False, False, True): 23, (True, False, False): 6}


def test_a_backward_pass_has_twice_the_operations_of_a_forward_pass():
    model, scorer, work = _scorer("qwen3")
    with FlopCounterMode(display=False) as forward:
        states = scorer(work, lambda before, *rows, targets: before)
    with FlopCounterMode(display=False) as backward:
        states.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    shape, lengths = model_shape(model), torch.tensor(LENGTHS)
    own = forward_flops(shape, lengths=lengths, num_scored=0)
    assert forward.get_total_flops() == own.blocks + 2 * own.attention
    assert training_flops(shape, lengths=lengths, num_scored=7) == (
        3 * own.total + 3 * 2 * 7 * 104 * 64
    )
    assert training_flops(shape, lengths=lengths, num_scored=7, trains_weights=False) == (
        2 * own.blocks + 3 * own.attention + 2 * 2 * 7 * 104 * 64
    )


def _square_attention(model, lengths: list[int]) -> int:
    config = model.config
    width = config.num_attention_heads * config.head_dim * 2
    return sum(2 * width * n * n for n in lengths) * config.num_hidden_layers


@pytest.mark.parametrize("window", [None, 1, 7, 400])
def test_pairs_are_those_of_a_causal_band(window):
    lengths = [1, 6, 7, 8, 300]
    seen = sum(min(i + 1, window or n) for n in lengths for i in range(n))
    pairs = visible_pairs(torch.tensor(lengths), window=window)
    # Half of the square leaves out half of the diagonal.
    diagonal = sum(min(n, window or n) for n in lengths) / 2
    assert pairs == pytest.approx(seen - diagonal)


def test_flops_of_a_step_count_every_token_and_score_the_loss_tokens():
    shape = model_shape(tiny_model("llama"))
    flags = torch.arange(4)
    scalars = scalars_of(
        [0.0] * 4,
        flags // 2,
        response_lengths=[4, 8, 12, 16],
        prompt_length=torch.tensor([6, 12, 18, 24]),
        is_truncated=flags == 3,
        is_valid=flags != 0,
    )
    scored = int(loss_lengths(scalars, mask_truncated=True).sum())
    asked = dict(lengths=scalars.lengths, num_scored=scored)
    sums = trained_flops(shape, **asked, cfg=Config())
    expected = training_flops(shape, lengths=scalars.lengths, num_scored=8 + 12)
    assert sums == {"perf/trainer_flops": (expected, 1.0)}
    scalar = Config(algorithm=AlgorithmSettings(objective="reward_model"))
    without = trained_flops(shape, **asked, cfg=scalar)
    assert without["perf/trainer_flops"][0] == expected - 3 * 2 * 20 * 104 * 64
    assert trained_flops(None, **asked, cfg=Config()) == {}


def test_utilisation_is_a_share_of_the_peak_where_that_is_known():
    sums = utilisation(6e15, 2.0, ranks=4, peak_flops=1e15)
    assert values_of(sums) == {"perf/trainer_tflops_per_s": 750.0, "perf/mfu": 0.75}
    assert list(utilisation(6e15, 2.0, ranks=4, peak_flops=None)) == ["perf/trainer_tflops_per_s"]
    assert utilisation(0.0, 2.0, ranks=4, peak_flops=1e15) == {}
    assert lookup("perf/mfu").unit == "share" and lookup("perf/trainer_flops")
    assert known_gpu("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert known_gpu("NVIDIA H100 PCIe") is None and known_gpu("Tesla V100") is None
