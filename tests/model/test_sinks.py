"""Attention sinks: every kernel against a softmax written out, and GPT-OSS against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.model.attention import sinks
from spmdrl.model.attention.kernels import KERNELS
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from tests.model.test_forward import assert_scored_as_by_transformers, plain_scorer
from tests.model.test_moe import make_moe

CPU, META = torch.device("cpu"), torch.device("meta")
LENGTHS, KEY_LENGTHS = [5, 3, 80, 1, 70, 130], [120, 3, 80, 4, 70, 130]
HEADS, KV_HEADS = 4, 2
WINDOWS = [None, 3, 70]


def _drawn(lengths: list[int], key_lengths: list[int], *, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values of another head dim, sinks, and signs of the outputs."""
    generator = torch.Generator().manual_seed(0)
    count, keys = sum(lengths), sum(key_lengths)
    sizes = ((1, HEADS, count, 32), (1, KV_HEADS, keys, 32), (1, KV_HEADS, keys, 24), (HEADS,))
    drawn = [torch.randn(*size, generator=generator).to(dtype) for size in sizes]
    signs = torch.randn(1, count, HEADS, 24, generator=generator)
    return [*(x.requires_grad_() for x in drawn), signs]


def _expected(
    drawn: list[Tensor],
    lengths: list[int],
    keys: list[int],
    window: int | None,
    spans: Tensor | None = None,
) -> list:
    """Output and gradients of a softmax over the keys that are seen and the sink, in float64."""
    q, k, v, own = (x.detach().double().requires_grad_() for x in drawn[:4])
    of_query, of_key = (
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in (lengths, keys)
    )
    at_query = torch.cat([torch.arange(m - n, m) for n, m in zip(lengths, keys)])
    behind = at_query[:, None] - torch.cat([torch.arange(m) for m in keys])
    seen = behind >= 0
    if spans is not None:
        seen |= (spans[:, None] == spans) & (spans >= 0)
    seen &= (of_query[:, None] == of_key) & (behind < (window or 10**6))
    wide_k, wide_v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = (q @ wide_k.transpose(2, 3) * 0.25).masked_fill(~seen, float("-inf"))
    column = own.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    out = (weights @ wide_v).transpose(1, 2)
    (out * drawn[4].double()).sum().backward()
    return [out, *(x.grad for x in (q, k, v, own))]


def _found(kernel: str, drawn: list[Tensor], packing: Any, window: int | None) -> list[Tensor]:
    q, k, v, own, signs = drawn
    options = {"scaling": 0.25, "s_aux": own}
    module = SimpleNamespace(is_causal=True, mask_pattern=MaskPattern(window))
    out, _ = KERNELS[kernel](module, q, k, v, None, packing=packing, **options)
    (out * signs).sum().backward()
    return [out, *(x.grad for x in (q, k, v, own))]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("are_last", [False, True])
def test_padded_attention_is_the_softmax_with_the_sink(window, are_last):
    keys = KEY_LENGTHS if are_last else LENGTHS
    packing = make_packing(LENGTHS, CPU, padded=True, key_lengths=keys if are_last else None)
    drawn = _drawn(LENGTHS, keys, dtype=torch.float32)
    found = _found("padded", drawn, packing, window)
    for ours, right in zip(found, _expected(drawn, LENGTHS, keys, window)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_sinks_are_in_the_softmax_of_tokens_that_see_each_other(window):
    spans = torch.full((sum(LENGTHS),), -1)
    spans[1:4] = 0  # of the first sequence
    spans[10:75] = 1  # of the third
    packing = make_packing(LENGTHS, CPU, padded=True, spans=spans)
    drawn = _drawn(LENGTHS, LENGTHS, dtype=torch.float32)
    found = _found("padded", drawn, packing, window)
    for ours, right in zip(found, _expected(drawn, LENGTHS, LENGTHS, window, spans)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=2e-5)


# --------------------------------------------------------------------------- CUDA's kernels


def _spans(ends: tuple[Tensor, Tensor]) -> list[tuple[slice, slice]]:
    both = (zip(e.tolist(), e.tolist()[1:]) for e in ends)
    return [(slice(*rows), slice(*keys)) for rows, keys in zip(*both)]


def _weights(q: Tensor, k: Tensor, lse: Tensor | None, *, scale: float, left: int) -> Any:
    """exp(score - lse), [H, n, m], of queries that are the last tokens of the keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    seen = (behind >= 0) & ((behind <= left) if left >= 0 else True)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *places: Any, **options: Any
) -> tuple[Tensor, ...]:
    """What torch's flash attention returns: [T, H, D], and lse [H, T]."""
    assert places[2:] == (0.0, options["window_size_left"] == -1, False)
    out, lse = q.new_empty(*q.shape), q.new_empty(q.shape[1], len(q))
    for rows, keys in _spans((ends_q, ends_k)):
        own = {"scale": options["scale"], "left": options["window_size_left"]}
        weights, lse[:, rows] = _weights(q[rows], k[keys], None, **own)
        wide = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, wide)
    return out, lse, None, None, None


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    *places: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """What its backward pass computes: weights exp(score - lse), and the sum of grad * out."""
    shared, grads = q.shape[1] // k.shape[1], [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys in _spans((ends_q, ends_k)):
        own = {"scale": options["scale"], "left": options["window_size_left"]}
        weights, _ = _weights(q[rows], k[keys], lse[:, rows], **own)
        wide_k, wide_v = (x[keys].repeat_interleave(shared, dim=1) for x in (k, v))
        delta = (grad[rows] * out[rows]).sum(-1).T
        of_scores = torch.einsum("nhd,mhd->hnm", grad[rows], wide_v) - delta[..., None]
        of_scores = of_scores * weights * options["scale"]
        grads[0][rows] = torch.einsum("hnm,mhd->nhd", of_scores, wide_k)
        of_keys = torch.einsum("hnm,nhd->mhd", of_scores, q[rows])
        of_values = torch.einsum("hnm,nhd->mhd", weights, grad[rows])
        for to, of in zip(grads[1:], (of_keys, of_values)):
            to[keys] = of.unflatten(1, (-1, shared)).sum(2)
    return tuple(grads)


@pytest.mark.parametrize("kernel", ["varlen", "flash"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("are_last", [False, True])
def test_what_flash_attention_returns_becomes_that_with_sinks(
    kernel, window, are_last, monkeypatch
):
    monkeypatch.setattr(sinks, "FLASH_FORWARD", _forward)
    monkeypatch.setattr(sinks, "FLASH_BACKWARD", _backward)
    keys = KEY_LENGTHS if are_last else LENGTHS
    packing = make_packing(LENGTHS, CPU, padded=False, key_lengths=keys if are_last else None)
    drawn = _drawn(LENGTHS, keys, dtype=torch.float32)
    found = _found(kernel, drawn, packing, window)
    for ours, right in zip(found, _expected(drawn, LENGTHS, keys, window)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_torchs_own_kernel_takes_what_it_is_given(window):
    drawn = _drawn(LENGTHS, LENGTHS, dtype=torch.bfloat16)
    own = [x.detach().to(META).requires_grad_() for x in drawn]
    packing = make_packing(LENGTHS, META, padded=False)
    out, *grads = _found("varlen", own, packing, window)
    assert out.dtype == torch.bfloat16 and out.shape == (1, sum(LENGTHS), HEADS, 24)
    assert [g.shape for g in grads] == [x.shape for x in drawn[:4]]


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", ["varlen", "padded"])
def test_so_it_is_with_the_kernels_of_cuda(kernel, window):
    cuda = torch.device("cuda")
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    drawn = _drawn(LENGTHS, LENGTHS, dtype=dtype)
    own = [x.detach().to(cuda).requires_grad_() for x in drawn]
    packing = make_packing(LENGTHS, cuda, padded=kernel == "padded")
    found = _found(kernel, own, packing, window)
    limit = 3e-2 if kernel == "varlen" else 1e-4
    for ours, right in zip(found, _expected(drawn, LENGTHS, LENGTHS, window)):
        assert (ours.cpu().double() - right).norm() < limit * right.norm()


@pytest.mark.parametrize(
    "option, what",
    [
        ({"softcap": 30.0}, "attention sinks beside a softcap"),
        ({"block_indices": 1}, "asks for block_indices"),
        ({"is_causal": False}, "bidirectional attention"),
    ],
)
def test_what_attention_would_leave_out_is_refused(option, what):
    packing = make_packing(LENGTHS, CPU, padded=True)
    q, k, v, own, _ = _drawn(LENGTHS, LENGTHS, dtype=torch.float32)
    with pytest.raises(ValueError, match=what):
        KERNELS["padded"](
            SimpleNamespace(is_causal=True, mask_pattern=MaskPattern()),
            q,
            k,
            v,
            None,
            packing=packing,
            s_aux=own,
            **option,
        )


# --------------------------------------------------------------------------- GPT-OSS


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture with windows of 6 in every other layer and sinks of both signs."""
    fields = {"sliding_window": 6}
    return make_moe(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", hf_config=fields)


def test_scores_and_gradients_are_those_of_plain_transformers(gpt_oss):
    hf_model, scorer = plain_scorer(gpt_oss)
    parameters = dict(hf_model.named_parameters())
    assert_scored_as_by_transformers(gpt_oss, scorer, parameters)
    grads = [p.grad.abs().max() for name, p in parameters.items() if name.endswith(".sinks")]
    assert len(grads) == 2 and min(grads) > 1e-3
