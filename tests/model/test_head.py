"""The chunked, vocab-parallel head against a full softmax in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdrl.model import head
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from tests.helpers.ranks import run_ranks

N, H, V = 13, 8, 24


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    upstream = torch.randn(2, N, generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets, upstream


def _bias() -> torch.Tensor:
    return torch.linspace(-1.5, 2.0, V).cos()


def _reference(options: HeadOptions, *, has_bias: bool = False) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, upstream = _inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    bias = (_bias() * has_bias).double().requires_grad_()
    logits = (hidden @ weight.t() + bias) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logp = torch.log_softmax(logits / options.temperature, dim=-1)
    logprobs = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    squares = logp.exp().square().sum(-1)
    own = [bias.grad] if has_bias else []
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad, squares.detach(), *own


def _ours(
    options: HeadOptions, rows: slice = slice(None), *, has_bias: bool = False
) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, upstream = _inputs()
    hidden = hidden.requires_grad_()
    weight = weight[rows].clone().requires_grad_()
    bias = _bias()[rows].clone().requires_grad_() if has_bias else None
    logprobs, entropy = logprobs_and_entropy(hidden, weight, bias, targets=targets, options=options)
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    again = logprobs_and_entropy(
        hidden, weight, bias, targets=targets, options=options, squares=True
    )
    assert torch.equal(again[0], logprobs) and torch.equal(again[1], entropy)
    own = [] if bias is None else [bias.grad]
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad, again[2], *own


def _assert_equal(ours: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]) -> None:
    names = ("logprobs", "entropy", "grad hidden", "grad weight", "squares", "grad bias")
    for name, a, b in zip(names[: len(reference)], ours, reference, strict=True):
        gap = (a.double() - b).abs().max().item()
        assert gap < 2e-5, f"{name}: max difference {gap}"


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize(
    "temperature,softcap,scale",
    [(1.0, None, 1.0), (0.7, None, 1.0), (1.3, 2.0, 1.0), (0.9, None, 0.5), (0.8, 3.0, 2.0)],
)
def test_values_and_gradients_equal_the_full_softmax(chunk, temperature, softcap, scale):
    options = HeadOptions(chunk_tokens=chunk, temperature=temperature, softcap=softcap, scale=scale)
    for has_bias in (False, True):
        _assert_equal(_ours(options, has_bias=has_bias), _reference(options, has_bias=has_bias))


def test_chunking_changes_no_value():
    whole, parts = (_ours(HeadOptions(chunk_tokens=c)) for c in (64, 4))
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_no_scored_position_gives_empty_values_and_zero_gradients():
    hidden, weight = torch.randn(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(
        hidden,
        weight,
        targets=torch.empty(0, dtype=torch.int64),
        options=HeadOptions(chunk_tokens=4),
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, H) and not weight.grad.any()


def test_large_logits_stay_finite():
    hidden, weight, targets, _ = _inputs()
    logprobs, entropy = logprobs_and_entropy(
        hidden * 1e4, weight, targets=targets, options=HeadOptions(chunk_tokens=4)
    )
    assert logprobs.isfinite().all() and entropy.isfinite().all()


def test_bfloat16_scores_in_float32():
    hidden, weight, targets, _ = _inputs(torch.bfloat16)
    logprobs, _ = logprobs_and_entropy(
        hidden, weight, targets=targets, options=HeadOptions(chunk_tokens=4)
    )
    logits = (hidden @ weight.t()).float()
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)


class _Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = [own.alias_info for own in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if is_view or "empty" in func.__name__:
            return result
        used = tree_leaves((args, kwargs, result))
        if "gather" in func.__name__ or "scatter" in func.__name__:  # one element per row
            used = [args[2]]
        self.moved([own for own in used if isinstance(own, torch.Tensor)])
        return result

    def moved(self, tensors: list[torch.Tensor]) -> None:
        """Count tensors."""
        self.bytes += sum(own.numel() * own.itemsize for own in tensors)
        self.shapes |= {tuple(own.shape) for own in tensors if own.dtype == torch.float32}


def _traffic(options: HeadOptions, *, has_entropy: bool = False, trains: bool = True) -> _Traffic:
    """Return what scoring and differentiating 8192 tokens moves, in the sizes of Qwen3 1.7B."""
    count, width, vocabulary = 16384, 2048, 151936
    states = dict(dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(count, width, **states, requires_grad=True)
    weight = torch.empty(vocabulary, width, **states, requires_grad=trains)
    targets = torch.empty(count, dtype=torch.int64, device="meta")
    with _Traffic() as traffic:
        logprobs, entropy = logprobs_and_entropy(hidden, weight, targets=targets, options=options)
        (logprobs.sum() + (entropy.sum() if has_entropy else 0)).backward()
    return traffic


def _per_logit(traffic: _Traffic) -> float:
    return traffic.bytes / 16384 / 151936


def test_bytes_moved_per_logit_are_few(monkeypatch):
    options = HeadOptions(3533)
    # A further pass in float32 would be 8.
    assert 100 < _per_logit(_traffic(options)) < 108
    assert _per_logit(_traffic(options, has_entropy=True)) < 136

    def summarize(products: torch.Tensor, *_: Any, sums: torch.Tensor, **__: Any) -> None:
        fused.moved([products, sums])

    def differentiate(products: torch.Tensor, *_: Any, **__: Any) -> None:
        fused.moved([products, products])

    kernels = SimpleNamespace(summarize=summarize, differentiate=differentiate)
    monkeypatch.setattr(head, "_passes", lambda options: kernels)
    fused = _Traffic()
    found = _traffic(options)
    # Products: written, read; again written, read, overwritten by the gradient, and read twice.
    assert 14 < _per_logit(found) + _per_logit(fused) < 29


@pytest.mark.parametrize("chunk,products", [(64, 1), (5, 5)])
def test_backward_computes_the_last_chunk_of_logits_only_once(monkeypatch, chunk, products):
    computed = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        head.F, "linear", lambda *args: computed.append(len(args[0])) or linear(*args)
    )
    hidden, weight, targets, _ = _inputs()
    hidden = hidden.requires_grad_()
    options = HeadOptions(chunk_tokens=chunk)
    total = logprobs_and_entropy(hidden, weight, targets=targets, options=options)[0].sum()
    first = torch.autograd.grad(total, hidden, retain_graph=True)[0]
    assert len(computed) == products
    # A second pass finds none, as the first one overwrote it.
    assert torch.equal(torch.autograd.grad(total, hidden)[0], first)
    assert len(computed) == products + -(-N // chunk)


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_it():
    traffic = _traffic(HeadOptions(3533), trains=False)
    assert (151936, 2048) not in traffic.shapes
    hidden, weight, targets, _ = _inputs()
    hidden = hidden.requires_grad_()
    logprobs, _ = logprobs_and_entropy(
        hidden, weight, targets=targets, options=HeadOptions(chunk_tokens=4)
    )
    logprobs.sum().backward()
    assert weight.grad is None and hidden.grad.any()


def _half_vocabulary() -> bool:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    half = V // 2
    rows = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    for softcap in (None, 2.0):
        options = HeadOptions(
            chunk_tokens=5, temperature=0.7, softcap=softcap, group=dist.group.WORLD
        )
        whole = _reference(options, has_bias=True)
        parts = (*whole[:3], whole[3][rows], whole[4], whole[5][rows])
        _assert_equal(_ours(options, rows, has_bias=True), parts)
    dist.destroy_process_group()
    return True


def test_two_ranks_with_half_the_vocabulary_each_equal_the_full_softmax():
    assert run_ranks(2, _half_vocabulary) == [True, True]
