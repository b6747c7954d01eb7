"""Layers with a state on rows that have common prefixes once, against whole sequences."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.data.prefix_tree import PrefixTree
from spmdrl.model.attention import packed_states, recurrences
from spmdrl.model.attention.packing import Packing
from spmdrl.model.attention.state_layers import with_functions, with_packed_states
from spmdrl.model.parallel.row_slices import Slicing, _packing
from spmdrl.model.parallel.state_exchange import StateRow
from tests.model.test_packed_states import (
    CANCELLING,
    LAYERS,
    PARTS,
    REFERENCE,
    WHOLE,
    _own_forward,
    _with_gradients,
    layer_of,
)

LENGTHS = (400, 1, 70, 2, 64, 1, 2, 130, 63, 64, 3, 1, 1)
PARENTS = (-1, 0, 0, 2, 2, -1, 5, 5, -1, -1, 9, 9, 11)
"""Prompts of 400, 64 and 1 tokens, whose samples have 1 token and more; some of these branch."""

SUMS = {*CANCELLING, "D", "forget_gate.A_log", "forget_gate.dt_bias"}
"""Gradients that sum all tokens to a few numbers: without sharing they are up to 2.1e-6 off."""


def _tree() -> PrefixTree:
    tokens = torch.arange(sum(LENGTHS))
    return PrefixTree(tokens, tokens, LENGTHS, PARENTS)


def row_packing() -> Packing:
    """Return the packing of the row."""
    return _packing(_tree().paths(), PARENTS, Slicing(is_padded=False), spans=None)


def whole_sequences() -> list[Tensor]:
    """Return where the tokens of each sequence that none continues are in the row."""
    return [
        torch.cat([torch.arange(*span) for span in path])
        for number, path in enumerate(_tree().paths())
        if number not in PARENTS
    ]


def _expanded(forward: Any) -> Any:
    """Return a forward over the row, whose output is that of all tokens of all sequences."""
    at = torch.cat(whole_sequences())

    def of_sequences(states: Tensor) -> Tensor:
        output = forward(states)
        return (output[0] if isinstance(output, tuple) else output)[:, at]

    return of_sequences


def _daily(family: str) -> Any:
    return family if family in PARTS else pytest.param(family, marks=pytest.mark.models)


@pytest.mark.parametrize("family", map(_daily, LAYERS))
def test_sequences_that_continue_others_are_computed_as_whole_ones_token_by_token(family):
    layer = layer_of(family)
    packing = row_packing()
    packed = with_packed_states(layer, lambda: StateRow(packing))
    states = torch.randn(1, sum(LENGTHS), 64)
    direction = torch.randn(1, sum(map(len, whole_sequences())), 64)
    own = _with_gradients(layer, _expanded(packed), states, direction)
    exact = copy.deepcopy(layer).double()
    recurrent = _own_forward(exact) if family in WHOLE else with_functions(exact, REFERENCE)

    def alone(states: Tensor) -> Tensor:
        return torch.cat([recurrent(states[:, at]) for at in whole_sequences()], dim=1)

    expected = _with_gradients(exact, alone, states.double(), direction.double())
    for name, value in expected.items():
        error = float((own[name] - value).abs().max() / value.abs().max())
        assert error < (4e-6 if name in SUMS else 1e-6), (name, error)


KERNELS = {
    "qwen3_next": ("torch_chunk_gated_delta_rule",),
    "kimi_linear": ("chunk_kimi_delta_attention",),
    "mamba2": ("mamba2_chunk_scan",),
    "mamba": ("mamba_selective_scan",),
}


@pytest.mark.parametrize("family", KERNELS)
def test_kernels_get_the_states_after_what_sequences_continue(family, monkeypatch):
    layer = layer_of(family)
    packing = row_packing()
    states = torch.randn(1, sum(LENGTHS), 64)
    direction = torch.randn(1, sum(LENGTHS), 64)
    forward = with_packed_states(layer, lambda: StateRow(packing))
    expected = _with_gradients(layer, forward, states, direction)
    known = inspect.unwrap(type(layer).forward).__globals__
    original = known["causal_conv1d_fn"]

    def convolution(x, weight, bias, *, activation, seq_idx):
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = x.split(lengths, dim=-1)
        return torch.cat([original(part, weight, bias, activation) for part in parts], dim=-1)

    monkeypatch.setitem(known, "causal_conv1d_fn", convolution)
    for name in KERNELS[family]:
        monkeypatch.setitem(known, name, _by_bounds(known[name]))
    monkeypatch.setattr(packed_states, "has_kernel", lambda package, x: True)
    monkeypatch.setattr(recurrences, "has_kernel", lambda package, x: True)
    forward = with_packed_states(layer, lambda: StateRow(packing))
    found = _with_gradients(layer, forward, states.detach(), direction)
    for name, value in expected.items():
        error = float((found[name] - value).abs().max() / value.abs().max())
        assert error < (3e-5 if name in SUMS else 5e-6), (name, error)


def _by_bounds(function: Any) -> Any:
    """Return transformers' function, with a kernel's boundaries of sequences."""

    def kernel(*args: Any, cu_seqlens: Tensor | None = None, **options: Any) -> Any:
        if cu_seqlens is None:
            return function(*args, **options)
        before = options.pop("initial_state")
        tensors = {name: options.pop(name) for name in ("g", "beta")}
        found = []
        for number, (at, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:])):
            own = {name: value[:, at:end] for name, value in tensors.items()}
            state = None if before is None else before[number, None]
            found.append(
                function(*(x[:, at:end] for x in args), **own, initial_state=state, **options)
            )
        outputs, states = zip(*found)
        return torch.cat(outputs, dim=1), torch.cat(states)

    return kernel
