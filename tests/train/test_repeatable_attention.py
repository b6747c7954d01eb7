"""In deterministic runs, attention's backward functions alone must have deterministic kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spmdrl.model.attention.kernels import KERNELS
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from spmdrl.train.repeatable_attention import _is_attention, repeat_attention
from spmdrl.train.trained_model import TrainedModel

META = torch.device("meta")


class OwnAttention(torch.autograd.Function):
    """Notes in its backward pass whether operations without deterministic kernels raise."""

    raised: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        OwnAttention.raised.append(_raises())
        return grad


def _raises() -> bool:
    return not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    OwnAttention.raised = []
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture
def modes(monkeypatch) -> list[str]:
    """The modes that are set, in order."""
    found: list[str] = []
    own = torch.set_deterministic_debug_mode
    monkeypatch.setattr(
        torch, "set_deterministic_debug_mode", lambda mode: (found.append(mode), own(mode))
    )
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_only_attention_must_have_deterministic_kernels(recomputes) -> None:
    elsewhere = []
    x = torch.randn(4, device=META, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        before = x * 2
        before.register_hook(lambda grad: elsewhere.append(_raises()))
        after = OwnAttention.apply(before)
        after.register_hook(lambda grad: elsewhere.append(_raises()))
        return after.exp()

    out = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
    loss = out.sum()
    repeat_attention(loss)
    loss.backward()
    assert OwnAttention.raised == [True]
    assert set(elsewhere) == {False}
    assert not _raises()


def test_torchs_own_attention_is_known(modes) -> None:
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    loss = F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
    repeat_attention(loss)
    assert modes == [], "kernels of CPUs are deterministic"
    names = [node.name() for node, _ in loss.grad_fn.next_functions]
    assert [_is_attention(name) for name in names] == [True], names


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_kernel_of_packed_rows_is_known(modes, has_sinks) -> None:
    q, k, v = (
        torch.empty(1, 4, 12, 32, dtype=torch.bfloat16, device=META, requires_grad=True)
        for _ in range(3)
    )
    module = torch.nn.Module()
    module.mask_pattern = MaskPattern()
    sinks = torch.empty(4, device=META) if has_sinks else None
    packing = make_packing((5, 7), META, padded=False)
    out, _ = KERNELS["varlen"](module, q, k, v, None, packing=packing, s_aux=sinks)
    loss = out.sum()
    repeat_attention(loss)
    loss.backward()
    assert modes == ["error", "warn"]


@pytest.mark.parametrize("mode", ["default", "error"])
def test_nothing_changes_where_no_mode_was_asked_for(mode) -> None:
    torch.set_deterministic_debug_mode(mode)
    loss = OwnAttention.apply(torch.randn(4, device=META, requires_grad=True)).sum()
    repeat_attention(loss)
    loss.backward()
    assert OwnAttention.raised == [_raises()]


def test_no_graph_is_walked_on_a_cpu() -> None:
    loss = OwnAttention.apply(torch.randn(4, requires_grad=True)).sum()
    repeat_attention(loss)
    loss.backward()
    assert OwnAttention.raised == [False]


def test_an_update_asks_for_it() -> None:
    model = object.__new__(TrainedModel)
    model._averaged = 1
    model._reduces_last = False
    model.loss_scale = SimpleNamespace(value=1.0)
    model.model = SimpleNamespace(scorer=SimpleNamespace(set_requires_all_reduce=lambda _: None))
    model.routers = SimpleNamespace(
        prepare=lambda *_: None, watching=lambda _: nullcontext(), take=lambda: 0.0
    )
    weight = torch.randn(4, device=META, requires_grad=True)
    microbatch = SimpleNamespace(num_tokens=4)
    model._accumulate([microbatch], lambda _: (OwnAttention.apply(weight).sum(), {}))
    assert OwnAttention.raised == [True]
