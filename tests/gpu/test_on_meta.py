"""Kernels of CUDA on meta tensors: shapes, dtypes and signatures are those of this torch, numbers
are none.

(Not FakeTensor on "cuda": its backward pass wants a device that CPU builds lack.)
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from spmdrl.data.prefix_tree import separate
from spmdrl.model.attention import kernels
from spmdrl.model.attention.kernels import KERNELS, Weighing
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.parallel.ring_attention import FLASH, plan_rounds

META = torch.device("meta")
LENGTHS = (5, 17, 10)


def _inputs(heads: int, kv_heads: int, *, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    count = sum(LENGTHS)
    sizes = ((heads, 64), (kv_heads, 64), (kv_heads, 32))  # values narrower than keys
    return [
        torch.empty(1, h, count, d, dtype=dtype, device=META, requires_grad=True) for h, d in sizes
    ]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_varlen_attends_and_differentiates(kv_heads: int, window: int | None) -> None:
    inputs, packing = _inputs(4, kv_heads), make_packing(LENGTHS, META, padded=False)
    module = SimpleNamespace(is_causal=True, mask_pattern=MaskPattern(window))
    out, _ = KERNELS["varlen"](module, *inputs, None, packing=packing)
    assert out.shape == (1, sum(LENGTHS), 4, 32) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


def test_the_rings_flash_kernels_attend_and_differentiate() -> None:
    count = sum(LENGTHS)
    half = count // 2
    spans = lambda rank: ((rank * 8, rank * 8 + 8), (half + 8 - rank * 8, half + 16 - rank * 8))  # noqa: E731
    paths = separate(LENGTHS).paths()
    tiles = [t for turn in plan_rounds(paths, spans, rank=0, size=2, device=META) for t in turn]
    assert {tile.is_causal for tile in tiles} == {True, False}
    for tile in tiles:
        rows, keys = (s.stop - s.start for s in (tile.queries, tile.keys))
        q, k, v = (
            torch.empty(n, heads, dim, dtype=torch.bfloat16, device=META)
            for n, heads, dim in ((rows, 4, 64), (keys, 2, 64), (keys, 2, 32))
        )
        out, lse = FLASH[0](q, k, v, tile, scale=0.125)
        assert out.shape == (rows, 4, 32) and out.dtype == torch.float32
        assert lse.shape == (rows, 4) and lse.dtype == torch.float32
        of_queries = (out.bfloat16(), q, out.bfloat16(), lse)
        grads = FLASH[1](of_queries, k, v, tile, scale=0.125)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    "dtype, dim, window, is_grouped",
    [
        (torch.bfloat16, 64, None, True),
        (torch.float32, 64, None, False),
        (torch.bfloat16, 64, 6, False),
        (torch.bfloat16, 512, None, False),
    ],
)
def test_groups_are_spread_where_flash_attention_cannot_be_used(
    dtype, dim, window, is_grouped
) -> None:
    long = kernels.SHORT + 1
    q = torch.empty(2, long, 4, dim, dtype=dtype, device=META)
    k = v = torch.empty(2, long, 2, dim, dtype=dtype, device=META)
    seen = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.update(options, heads=k.shape[1])
        return q

    with mock.patch.object(kernels.F, "scaled_dot_product_attention", attend):
        kernels._attend(q, k, v, Weighing(None, window, None))
    assert (seen["heads"], seen["enable_gqa"]) == ((2, True) if is_grouped else (4, False))
