"""Products, attention and functions that give a row the same bits in every batch."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.attention.kernels import KERNELS
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.exact import linear
from spmdrl.model.exact.attention import DenseKeys, Seen, attend
from spmdrl.model.exact.functions import ExactFunctions, compute_exactly
from spmdrl.model.exact.units import attention_unit
from spmdrl.model.logit_passes import LogitForm, log_totals, summarize
from spmdrl.model.lora import merged_layers

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest):
    """Run with other numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_product_have_the_same_bits_in_every_batch(threads: int, dtype: torch.dtype):
    torch.manual_seed(0)
    for inputs, outputs in ((64, 176), (333, 77), (17, 5), (48, 1)):
        weight = (torch.randn(outputs, inputs) * 0.05).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        rows = torch.randn(300, inputs).to(dtype)
        for own_bias in (None, bias):
            whole = linear.linear(rows, weight, own_bias)
            wide = None if own_bias is None else bias.double()
            close = F.linear(rows.double(), weight.double(), wide)
            assert torch.allclose(whole.double(), close, atol=0.1, rtol=0.02)
            for begin, end in ((0, 1), (299, 300), (7, 10), (3, 36), (100, 217)):
                part = linear.linear(rows[begin:end], weight, own_bias)
                assert torch.equal(part, whole[begin:end]), (inputs, outputs, begin, end)


def test_a_product_has_the_gradients_of_a_linear_layer():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 19, 12), torch.randn(8, 12), torch.randn(8)]
    inputs = [one.double().requires_grad_() for one in inputs]
    own = torch.autograd.grad(linear.linear(*inputs).square().sum(), inputs)
    plain = torch.autograd.grad(F.linear(*inputs).square().sum(), inputs)
    for found, expected in zip(own, plain):
        assert torch.allclose(found, expected)


def test_a_shape_whose_bits_depend_on_rows_is_cut_into_blocks(monkeypatch: pytest.MonkeyPatch):
    """A library that adds the rows of a product into its bits, unless it has exactly 64."""
    plain = F.linear

    def odd(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(rows, weight, bias) * (1 + (len(rows) != linear.BLOCK) * len(rows) * 1e-4)

    def odd_multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
        out.copy_(odd(rows, weight, bias))

    monkeypatch.setattr(linear.F, "linear", odd)
    monkeypatch.setattr(linear, "_multiply", odd_multiply)
    linear._unit.cache_clear()
    try:
        rows = torch.randn(100, 16)
        weight = torch.randn(6, 16)
        whole = linear.linear(rows, weight)
        assert torch.equal(whole[70:90], linear.linear(rows[70:90], weight))
        monkeypatch.setattr(linear, "BLOCK", 32)
        linear._unit.cache_clear()
        monkeypatch.setattr(
            linear, "_multiply", lambda rows, weight, bias, *, out: out.copy_(torch.rand_like(out))
        )
        with pytest.raises(Refusal, match=r"engine.exact: products of 16 inputs and 6 outputs"):
            linear.linear(rows, weight)
    finally:
        linear._unit.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_rows_have_the_same_bits_in_every_batch(threads: int, dtype: torch.dtype):
    torch.manual_seed(0)
    weights = torch.randn(4, 40, 24).to(dtype).transpose(1, 2)
    rows = torch.randn(60, 24).to(dtype)
    chosen = torch.randint(4, (60,)).sort().values

    def computed(which: Tensor) -> Tensor:
        ends = torch.bincount(chosen[which], minlength=4).cumsum(0)
        with ExactFunctions():
            return F.grouped_mm(rows[which], weights, offs=ends.int())

    whole = computed(torch.arange(60))
    for count in (1, 2, 17, 59):
        which = torch.randperm(60)[:count].sort().values
        assert torch.equal(computed(which), whole[which])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "sigmoid"])
def test_functions_of_elements_have_the_same_bits_at_every_place(
    threads: int, dtype: torch.dtype, name: str
):
    plain = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
    }[name]

    def own(x: Tensor) -> Tensor:
        with ExactFunctions():
            return plain(x)

    torch.manual_seed(0)
    x = (torch.randn(100, 176) * 3).to(dtype)
    whole = own(x)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(whole, plain(x), rtol=4 * eps, atol=4 * eps)
    flat = x.flatten()
    for count in (1, 3, 7, 17, 1001, 17600):
        assert torch.equal(own(flat[:count].clone()), whole.flatten()[:count])
    assert own(torch.tensor([-200.0, 200.0])).isfinite().all()
    x = torch.randn(5, 7, dtype=torch.float32, requires_grad=True)
    found = torch.autograd.grad(own(x).square().sum(), x)[0]
    assert torch.allclose(found, torch.autograd.grad(plain(x).square().sum(), x)[0], atol=1e-6)


def test_a_module_computes_exactly_within_its_forward_alone():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(sum(isinstance(mode, ExactFunctions) for mode in _modes()))
            return self.inner(x)

    seen: list[int] = []
    model = Outer()
    compute_exactly(model, model.inner)
    expected = linear.linear(torch.ones(3, 4), model.inner.weight, model.inner.bias)
    assert torch.equal(model(torch.ones(3, 4)), expected)
    assert torch.equal(model.inner(torch.ones(3, 4)), expected)
    assert seen == [1]
    assert not _modes()


def _modes() -> list:
    from torch.overrides import _get_current_function_mode_stack

    return _get_current_function_mode_stack()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"softcap": 5.0}, {"sinks": True}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_attention_of_a_token_is_the_same_alone_and_in_a_row(
    threads: int, dtype: torch.dtype, options: dict
):
    torch.manual_seed(0)
    random.seed(0)
    window = options.get("window")
    for heads, kv_heads, dim in ((4, 2, 16), (8, 1, 32), (4, 4, 20)):
        sinks = torch.randn(heads).to(dtype) if "sinks" in options else None
        how = {"softcap": options.get("softcap"), "sinks": sinks, "scale": dim**-0.5}
        for length in (1, 17, 129, 300):
            count = random.choice((1, 2, 3))
            shape = (count, kv_heads, length)
            query = torch.randn(count, kv_heads, heads // kv_heads, length, dim).to(dtype)
            key = torch.randn(*shape, dim).to(dtype)
            value = torch.randn(*shape, dim).to(dtype)
            at = torch.arange(length)
            seen = at[None] <= at[:, None]
            if window:
                seen &= at[None] > at[:, None] - window
            whole = attend(query, DenseKeys(key, value), seen=Seen(seen), **how)
            for position in {0, length // 2, length - 1}:
                own = random.randrange(count)
                longer = torch.randn(1, kv_heads, length + 50, dim).to(dtype)
                keys = longer.clone()
                keys[:, :, :length] = key[own]
                values = longer.clone()
                values[:, :, :length] = value[own]
                seen_here = F.pad(seen[position], (0, 50))[None, None]
                alone = attend(
                    query[own : own + 1, :, :, position : position + 1],
                    DenseKeys(keys, values),
                    seen=Seen(seen_here),
                    **how,
                )
                assert torch.equal(alone[0, :, :, 0], whole[own, :, :, position]), (
                    (heads, kv_heads, dim, length, position),
                )


def test_a_block_of_keys_takes_the_queries_that_see_it_alone(monkeypatch: pytest.MonkeyPatch):
    counts = []
    bmm = torch.bmm

    def counted(rows: Tensor, others: Tensor) -> Tensor:
        counts.append(rows.shape[1])
        return bmm(rows, others)

    monkeypatch.setattr(torch, "bmm", counted)
    attention_unit(16, 16, torch.float32, torch.get_num_threads(), torch.device("cpu"))
    counts.clear()
    query = torch.randn(1, 1, 2, 512, 16)
    key = torch.randn(1, 1, 512, 16)
    causal = torch.ones(512, 512, dtype=torch.bool).tril()
    keys = DenseKeys(key, key)
    attend(query, keys, seen=Seen(causal), scale=0.25)
    assert counts[::2] == counts[1::2] == [1024, 768, 512, 256]
    counts.clear()
    attend(query, keys, seen=Seen(causal.triu(-39)), scale=0.25)
    assert counts[::2] == [1024, 336, 336, 256]


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": True}])
def test_exact_attention_is_that_of_the_padded_kernel_to_rounding(options: dict):
    torch.manual_seed(0)
    lengths = [3, 90, 150, 20]
    packing = make_packing(lengths, torch.device("cpu"), padded=True)
    total = sum(lengths)
    shapes = [(1, 4, total, 16), (1, 2, total, 16), (1, 2, total, 16)]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    if "s_aux" in options:
        inputs.append(torch.randn(4, requires_grad=True))
        options = {"s_aux": inputs[-1]}
    module = nn.Module()
    module.mask_pattern = MaskPattern()
    found = []
    for name in ("padded", "exact"):
        out, _ = KERNELS[name](module, *inputs[:3], None, packing=packing, **options)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for own, plain in zip(found[1], found[0]):
        assert torch.allclose(own, plain, atol=2e-5)


def test_a_long_row_has_the_same_log_total_alone_and_among_others(threads: int):
    torch.manual_seed(0)
    logits = torch.randn(5, 150_001) * 3
    whole = log_totals(logits)
    assert torch.allclose(whole, logits.logsumexp(-1), atol=1e-4)
    for row in range(5):
        assert torch.equal(log_totals(logits[row : row + 1]), whole[row : row + 1])
    sums = torch.empty(4, 5)
    targets = torch.arange(5)
    summarize(logits.clone(), targets, LogitForm(), dropped=None, sums=sums)
    assert torch.equal(sums[1].log() + sums[0], whole)


def test_a_merged_adapter_has_the_gradients_of_its_product():
    torch.manual_seed(0)
    inputs = [torch.randn(shape).double().requires_grad_() for shape in ((6, 3), (3, 5))]
    assert torch.autograd.gradcheck(lambda b, a: merged_layers._Product.apply(b, a, 0.5), inputs)
    assert torch.allclose(merged_layers._Product.apply(*inputs, 0.5), inputs[0] @ inputs[1] * 0.5)
