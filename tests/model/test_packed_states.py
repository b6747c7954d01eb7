"""Layers with a state on packed rows, against the same layers on one sequence at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN

from spmdrl.model.attention import packed_states, recurrences
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.attention.recurrences import linear_recurrence
from spmdrl.model.attention.state_layers import (
    supports_packed_states,
    with_functions,
    with_packed_states,
)
from spmdrl.model.parallel.row_slices import RowSlice, Slicing, make_slice
from spmdrl.model.parallel.state_exchange import StateRow
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
LENGTHS = (1, 63, 2, 64, 400, 3, 65, 1, 130)
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16)
LINEAR |= dict(linear_value_head_dim=24, linear_conv_kernel_dim=4)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=16)
SELECTIVE = dict(state_size=8, time_step_rank=4)
LAYERS = {
    "qwen3_next": dict(LINEAR, layer_types=["linear_attention", "full_attention"]),
    "qwen3_5_text": dict(LINEAR, layer_types=["linear_attention", "full_attention"]),
    "olmo_hybrid": dict(LINEAR, layer_types=["linear_attention", "full_attention"]),
    "mamba2": dict(num_heads=4, head_dim=32, n_groups=2, state_size=16, expand=2),
    "bamba": dict(MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": dict(MAMBA, layer_types=["linear_attention", "full_attention"]),
    "falcon_h1": dict(MAMBA, mamba_d_ssm=128),
    "lfm2": dict(layer_types=["conv", "full_attention"], conv_bias=True),
    "kimi_linear": dict(
        linear_num_heads=4,
        linear_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
    ),
    "mamba": dict(SELECTIVE, intermediate_size=128),
    "falcon_mamba": dict(SELECTIVE, intermediate_size=128),
    "jamba": dict(mamba_d_state=8, mamba_dt_rank=4, num_experts=2, attn_layer_offset=1),
    "minimax": dict(
        layer_types=["linear_attention", "full_attention"], num_local_experts=2, block_size=8
    ),
    "recurrent_gemma": dict(lru_width=64, block_types=["recurrent", "attention"]),
}
CANCELLING = {"A_log", "dt_bias", "dt_proj.weight", "b_layernorm.weight", "c_layernorm.weight"}
"""Gradients that sum all tokens to a few numbers, and cancel. With transformers' own forward in
float32, which computes one sequence at a time, they are as far off."""
WHOLE = {"minimax", "recurrent_gemma"}
"""Families whose layer is replaced as a whole."""


def layer_of(family: str) -> Any:
    """Return a family's first layer with a state, small, with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family)
    sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=64)
    sizes |= dict(num_key_value_heads=2, head_dim=32, intermediate_size=64, pad_token_id=0)
    for name, value in {**sizes, **LAYERS[family]}.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = next(part for part in model.modules() if supports_packed_states(part))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.05)
    return layer.eval()


def _convolved(x, weight, bias=None, activation=None, **_):
    last = weight.shape[-1] - 1
    out = nn.functional.conv1d(
        nn.functional.pad(x, (last, 0)), weight[:, None], bias, groups=len(weight)
    )
    return out if activation is None else ACT2FN[activation](out)


def _delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **_):
    """Token by token, as equation 10 of arXiv 2412.06464 says."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = v.new_zeros(*v.shape[2:3], k.shape[-1], v.shape[-1])
    outputs = []
    for at in range(v.shape[1]):
        state = state * g[0, at].exp()[:, None, None]
        answer = torch.einsum("hk,hkv->hv", k[0, at], state)
        written = beta[0, at][:, None] * (v[0, at] - answer)
        state = state + k[0, at][:, :, None] * written[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[0, at], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs)[None], None


def _mamba2(x, dt, A, B, C, D, dt_bias, dt_limit, **_):
    """Token by token, as equation 1 of arXiv 2405.21060 says."""
    dt = nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)[0]
    B, C = (each[0].repeat_interleave(len(A) // each.shape[2], dim=1) for each in (B, C))
    state = x.new_zeros(*x.shape[2:], B.shape[-1])
    outputs = []
    for at in range(x.shape[1]):
        step = x[0, at] * dt[at][:, None]
        state = state * (dt[at] * A).exp()[:, None, None] + step[:, :, None] * B[at][:, None]
        outputs.append(torch.einsum("hvk,hk->hv", state, C[at]) + D[:, None] * x[0, at])
    return torch.stack(outputs)[None]


def _kimi_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **_):
    """Token by token, as equation 1 of arXiv 2510.26692 says."""
    assert use_qk_l2norm_in_kernel
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = v.new_zeros(v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for at in range(v.shape[1]):
        state = state * g[0, at].exp()[..., None]
        answer = torch.einsum("hk,hkv->hv", k[0, at], state)
        written = beta[0, at][:, None] * (v[0, at] - answer)
        state = state + k[0, at][:, :, None] * written[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[0, at], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs)[None], None


def _selective_scan(x, dt, A, B, C, D, z, delta_bias, delta_softplus, **_):
    """Token by token, as equation 2a of arXiv 2312.00752 says."""
    assert delta_softplus
    dt = nn.functional.softplus(dt[0] + delta_bias[:, None])
    state = torch.zeros_like(A)
    outputs = []
    for at in range(x.shape[-1]):
        step = dt[:, at, None]
        state = state * (step * A).exp() + step * B[0, :, at] * x[0, :, at, None]
        outputs.append(state @ C[0, :, at] + D * x[0, :, at])
    return torch.stack(outputs, dim=-1)[None] * nn.functional.silu(z)


REFERENCE = {
    "causal_conv1d_fn": _convolved,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,
    "chunk_kimi_delta_attention": _kimi_delta_rule,
    "mamba_selective_scan": _selective_scan,
}


@pytest.mark.parametrize("family", LAYERS)
def test_packed_rows_are_computed_as_single_sequences_token_by_token(family):
    layer = layer_of(family)
    packing = make_packing(LENGTHS, CPU, padded=False)
    packed = with_packed_states(layer, lambda: StateRow(packing))
    states = torch.randn(1, sum(LENGTHS), 64)
    direction = torch.randn(1, sum(LENGTHS), 64)
    own = _with_gradients(layer, packed, states, direction)
    bounds = list(pairwise(accumulate(LENGTHS, initial=0)))
    exact = copy.deepcopy(layer).double()
    recurrent = _own_forward(exact) if family in WHOLE else with_functions(exact, REFERENCE)

    def alone(states: torch.Tensor) -> torch.Tensor:
        return torch.cat([recurrent(states[:, at:end]) for at, end in bounds], dim=1)

    for name, value in _with_gradients(exact, alone, states.double(), direction.double()).items():
        error = float((own[name] - value).abs().max() / value.abs().max())
        assert error < (4e-6 if name in CANCELLING else 1e-6), (name, error)


def _own_forward(layer: Any) -> Any:
    """Return transformers' forward of one sequence, the output alone."""

    def forward(states: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(states.shape[1])[None]
        return layer(states, positions, None, use_cache=False)[0]

    return forward


def _with_gradients(
    layer: Any, forward: Any, states: torch.Tensor, direction: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the output, and its gradients along a direction."""
    inputs = {"states": states.requires_grad_(), **dict(layer.named_parameters())}
    output = forward(states)
    output = output[0] if isinstance(output, tuple) else output
    gradients = torch.autograd.grad((output * direction).sum(), [*inputs.values()])
    return {"output": output.detach(), **dict(zip(inputs, gradients))}


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_recurrence_is_computed_token_by_token(tokens, is_empty):
    torch.manual_seed(0)
    bounds = torch.tensor([0, tokens // 2, tokens] if tokens > 1 else [0, tokens])
    log_decay = torch.rand(tokens, 3, 2, dtype=torch.float64).log().requires_grad_()
    values = torch.randn(tokens, 3, 2, dtype=torch.float64, requires_grad=True)
    before = torch.randn(len(bounds) - 1, 3, 2, dtype=torch.float64, requires_grad=True)
    inputs = [log_decay, values] if is_empty else [log_decay, values, before]
    states = []
    for number, (at, end) in enumerate(pairwise(bounds.tolist())):
        state = torch.zeros_like(before[0]) if is_empty else before[number]
        for token in range(at, end):
            state = log_decay[token].exp() * state + values[token]
            states.append(state)
    expected = torch.stack(states)
    own, after = linear_recurrence(
        log_decay, values, bounds=bounds, before=None if is_empty else before
    )
    direction = torch.randn_like(own)
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(after, expected[bounds[1:] - 1])
    torch.testing.assert_close(
        torch.autograd.grad((own * direction).sum() + after.sum(), inputs),
        torch.autograd.grad((expected * direction).sum() + expected[bounds[1:] - 1].sum(), inputs),
    )


def test_kernels_are_called_where_they_can_be_imported():
    on_gpu = SimpleNamespace(is_cuda=True)
    assert packed_states.has_kernel("json", on_gpu)
    assert not packed_states.has_kernel("no_such_package", on_gpu)
    assert not packed_states.has_kernel("json", torch.zeros(1))


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2"])
def test_kernels_get_the_boundaries_of_sequences(family, monkeypatch):
    layer = layer_of(family)
    row = StateRow(make_packing((3, 2), CPU, padded=False))
    numbers = [[0, 0, 0, 1, 1]]
    seen = []

    def convolution(x, weight, bias, *, activation, seq_idx):
        assert x.stride(1) == 1, "causal-conv1d takes seq_idx with channels last alone"
        assert seq_idx.tolist() == numbers and seq_idx.dtype == torch.int32
        seen.append("convolution")
        return x

    def delta_rule(q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens, **states):
        assert states == {"initial_state": None, "output_final_state": False}
        assert cu_seqlens.tolist() == [0, 3, 5] and use_qk_l2norm_in_kernel
        assert beta.shape == v.shape[:3] and q.shape == k.shape
        assert g.shape == (k.shape if family == "kimi_linear" else v.shape[:3])
        seen.append("state")
        return v, None

    def scan(x, dt, A, B, C, *, chunk_size, D, seq_idx):
        assert seq_idx.tolist() == numbers and dt.shape == x.shape[:3]
        assert B.shape == C.shape == (*x.shape[:3], 16) and A.shape == D.shape == x.shape[2:3]
        seen.append("state")
        return x

    kernels = {
        "causal_conv1d_fn": convolution,
        "torch_chunk_gated_delta_rule": delta_rule,
        "chunk_kimi_delta_attention": delta_rule,
        "mamba2_chunk_scan": scan,
    }
    known = inspect.unwrap(type(layer).forward).__globals__
    for name in kernels.keys() & known.keys():
        monkeypatch.setitem(known, name, kernels[name])
    monkeypatch.setattr(packed_states, "has_kernel", lambda package, x: True)
    assert with_packed_states(layer, lambda: row)(torch.randn(1, 5, 64)).shape == (1, 5, 64)
    assert seen == ["convolution", "state"]


def test_mambas_kernel_is_called_once_per_sequence(monkeypatch):
    layer = layer_of("mamba")
    row = StateRow(make_packing((3, 1, 2), CPU, padded=False))
    states = torch.randn(1, 6, 64)
    expected = with_packed_states(layer, lambda: row)(states)
    lengths = []

    def kernel(x, dt, A, B, C):
        lengths.append(x.shape[-1])
        state = torch.zeros_like(A)
        outputs = []
        for at in range(x.shape[-1]):
            step = dt[0, :, at, None]
            state = state * (step * A).exp() + step * B[0, :, at] * x[0, :, at, None]
            outputs.append(state @ C[0, :, at])
        return torch.stack(outputs, dim=-1)[None]

    known = inspect.unwrap(type(layer).forward).__globals__
    monkeypatch.setitem(known, "mamba_selective_scan", kernel)
    monkeypatch.setattr(recurrences, "has_kernel", lambda package, x: True)
    torch.testing.assert_close(with_packed_states(layer, lambda: row)(states), expected)
    assert lengths == [3, 1, 2]


PARTS = ("qwen3_next", "kimi_linear", "mamba2", "jamba", "minimax", "recurrent_gemma")


SHARED = torch.arange(40)
ROWS = {
    "apart": (PARTS, [torch.arange(n) + at for at, n in ((0, 37), (40, 1), (50, 143), (200, 9))]),
    "branches": (
        PARTS[:4],
        [torch.arange(50, 87), *(torch.cat([SHARED, torch.arange(n) + n]) for n in (1, 9, 64))],
    ),
}
"""{row: families, and tokens of its sequences, which have a prefix in common or not}."""


def _gaps_of_parts() -> dict[tuple[str, str, str], float]:
    """Return how far outputs and gradients of parts of the tokens are from those of the row."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank = dist.get_rank()
    size = dist.get_world_size()
    slicing = Slicing(group, rank, size, is_padded=False, shares_prefixes=True)
    gaps: dict[tuple[str, str, str], float] = {}
    for name, (families, sequences) in ROWS.items():
        tokens = torch.cat(sequences)
        lengths = [len(own) for own in sequences]
        part = make_slice(tokens, lengths, scored=torch.tensor([1]), slicing=slicing)
        assert (part.packing.whole.parents is None) == (name == "apart")
        for key, gap in _gaps_of_row(part, group, families).items():
            gaps[name, *key] = gap
    dist.destroy_process_group()
    return gaps


def _gaps_of_row(
    part: RowSlice, group: dist.ProcessGroup, families: Sequence[str]
) -> dict[tuple[str, str], float]:
    rank = dist.get_rank()
    size = dist.get_world_size()
    places = {
        "cp": (part.rows, StateRow.of(part.packing, None)),
        "tp": (
            torch.arange(part.row_length).chunk(size)[rank],
            StateRow.of(part.packing.whole, group),
        ),
    }
    gaps: dict[tuple[str, str], float] = {}
    for family in families:
        layer = layer_of(family)
        states = torch.randn(1, part.row_length, 64)
        direction = torch.randn(1, part.row_length, 64)
        forward = with_packed_states(layer, lambda: StateRow(part.packing.whole))
        whole = _with_gradients(layer, forward, states, direction)
        for kind, (at, row) in places.items():
            forward = with_packed_states(layer, lambda row=row: row)
            own = _with_gradients(layer, forward, states.detach()[:, at], direction[:, at])
            for name, value in own.items():
                if name in ("output", "states"):
                    expected = whole[name][:, at]
                else:
                    dist.all_reduce(value)
                    expected = whole[name]
                gap = float((value - expected).abs().max() / whole[name].abs().max())
                gaps[family, kind] = max(gap, gaps.get((family, kind), 0.0))
    return gaps


@pytest.mark.parametrize("size", [2, 3])  # of four heads: a rank has two, or all
def test_ranks_with_a_part_of_the_tokens_compute_the_whole_row(size):
    for gaps in run_ranks(size, _gaps_of_parts):
        assert len(gaps) == 2 * (len(PARTS) + 4) and max(gaps.values()) < 1e-5, gaps
