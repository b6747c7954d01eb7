"""What engines read to decode, against a loop over tokens, and the metrics made of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spmdrl.model.decode_reads import decode_rate, decode_reads
from spmdrl.model.model_shape import model_shape
from spmdrl.report.derived_metrics import derived_sums
from spmdrl.report.glossary import values_of
from tests.helpers.built import made
from tests.helpers.plan_runs import tiny_model

LENGTHS = torch.tensor([9, 4, 20])
SAMPLED = torch.tensor([5, 4, 1])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_each_token_reads_the_keys_and_values_that_it_attends_to(window, dtype, size):
    shape = model_shape(tiny_model("qwen3"))
    block = shape.blocks[0]
    attention = dataclasses.replace(block.attention, window=window)
    block = dataclasses.replace(block, attention=attention)
    shape = dataclasses.replace(shape, blocks=(block,) * 3)
    cfg = made(engine=dict(dtype=dtype))
    found = decode_reads(shape, lengths=LENGTHS, sampled=SAMPLED, steps=7, cfg=cfg)
    seen = 0.0
    for length, sampled in zip(LENGTHS.tolist(), SAMPLED.tolist()):
        for position in range(length - sampled, length):
            # A causal mask counts half of the own token, as perf/trainer_flops does.
            own = position + 0.5
            seen += own if window is None else min(own, window)
    each = attention.kv_heads * (attention.qk_dim + attention.v_dim)
    expected = size * (7 * shape.numel + 3 * each * seen)
    assert found["perf/decode_bytes"][0] == pytest.approx(expected, rel=0.01)
    if window is None:
        assert found["perf/decode_bytes"][0] == expected


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_what_is_not_known_is_absent(options):
    known = dict(lengths=LENGTHS, sampled=SAMPLED)
    shape = model_shape(tiny_model("qwen3"))
    cfg = made(engine=dict(options=options))
    assert decode_reads(shape, steps=7, cfg=cfg, **known) == {}
    assert decode_reads(shape, steps=0, cfg=made(), **known) == {}
    assert decode_reads(None, steps=7, cfg=made(), **known) == {}
    mixture = model_shape(tiny_model("qwen3_moe"))
    assert decode_reads(mixture, steps=7, cfg=made(), **known) == {}


def test_the_share_of_the_bandwidth_is_that_of_one_device():
    sums = decode_rate(6e12, 2.0, ranks=3, peak_bytes_per_s=4e12)
    values = values_of(sums)
    assert values["perf/decode_gb_per_s"] == 1000
    assert values["perf/decode_bandwidth_frac"] == 0.25
    unknown = decode_rate(6e12, 2.0, ranks=3, peak_bytes_per_s=None)
    assert [*unknown] == ["perf/decode_gb_per_s"]
    assert decode_rate(6e12, 0.0, ranks=3, peak_bytes_per_s=4e12) == {}


def test_idle_time_is_not_decoding_and_bubbles_are_shares_of_the_step():
    cfg = made(layout=dict(placement="split", world_size=4, trainer_ranks=2), lag=1)
    seconds = {
        "generate": 3.0,
        "engine_idle": 4.0,
        "engine_idle_tail": 0.5,
        "engine_idle_reward": 1.0,
        "engine_idle_environment": 0.0,
        "engine_idle_replicas": 0.0,
        "await_rollouts": 1.0,
        "exchange_tokens": 0.5,
        "await_peers": 0.25,
        "push": 0.25,
        "evaluate": 2.0,
    }
    sums = {f"time/{name}": (value, 1.0) for name, value in seconds.items()}
    sums |= {"perf/step_s": (10.0, 1.0), "perf/decode_bytes": (8e9, 1.0)}
    sums |= {"perf/exchange_bytes": (1e9, 1.0)}
    values = values_of(derived_sums(sums, cfg, peak_flops=None, peak_bytes_per_s=8e9))
    assert values["perf/decode_gb_per_s"] == 2  # 8 GB by two ranks in 3 - 1 s
    assert values["perf/decode_bandwidth_frac"] == 0.25
    assert values["perf/exchange_gb_per_s"] == 2
    assert values["perf/trainer_bubble_frac"] == 0.25  # of 10 - 2 s
    assert values["perf/engine_bubble_frac"] == 0.5
