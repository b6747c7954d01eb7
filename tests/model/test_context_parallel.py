"""Context parallelism: slices of a row, attention over them, scores, and models that do not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.data.prefix_tree import separate
from spmdrl.model.attention.kernels import KERNELS
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.divisibility import context_method, misfits
from spmdrl.model.model_shape import ModelCounts
from spmdrl.model.parallel import context_parallel
from spmdrl.model.parallel.context_parallel import METHODS, by_rank, in_row_order
from spmdrl.model.parallel.ring_attention import DENSE, FLASH, Tile, plan_rounds
from spmdrl.model.parallel.row_slices import RowSlice, Slicing, chunk_spans, make_slice
from spmdrl.tools.proof.ranks import launch_env
from spmdrl.world.axes import Axes
from tests.helpers.comparing import plain_scores
from tests.helpers.policy_runs import config
from tests.helpers.runs import arguments, call
from tests.helpers.worlds import with_trainer

CPU, SIZE = torch.device("cpu"), 4
LENGTHS = (37, 1, 150, 9, 2, 71, 14)  # 284 tokens, padded to 288: chunks of 36
CASES = {  # (query heads, key/value heads, window, softcap, are there sinks)
    "one key head": (4, 1, None, None, False),
    "grouped": (8, 2, 20, None, False),
    "all heads": (8, 8, None, 0.7, False),
    "uneven": (6, 3, None, None, False),
    "uneven, window, softcap": (3, 3, 50, 0.7, False),
    "sinks": (8, 2, None, None, True),
    "uneven, sinks, window": (6, 2, 50, None, True),
}


class _Module:
    is_causal = True

    def __init__(self, window: int | None = None):
        self.mask_pattern = MaskPattern(window)


# --------------------------------------------------------------------------- slices


def _fake_group() -> dist.ProcessGroup:
    return object()  # make_slice only passes it on


def _slices(lengths: tuple[int, ...], size: int, *, multiple: int = 1) -> list:
    positions = torch.cat([torch.arange(n) for n in lengths])
    tokens = torch.arange(sum(lengths)) + 1
    scored = (positions > 0).nonzero()[:, 0][::2]
    return [
        make_slice(
            tokens, lengths, scored=scored, slicing=Slicing(_fake_group(), rank, size, multiple)
        )
        for rank in range(size)
    ], scored


@pytest.mark.parametrize("size, multiple", [(2, 1), (4, 1), (3, 2)])
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (5, 3), (400,)])
def test_slices_hold_each_token_and_each_scored_one_once(lengths, size, multiple):
    parts, scored = _slices(lengths, size, multiple=multiple)
    rows, total = torch.cat([p.rows for p in parts]), parts[0].row_length
    assert sorted(rows.tolist()) == list(range(total))
    assert total % (2 * size * multiple) == 0 and total - sum(lengths) < 2 * size * multiple
    tokens = torch.cat([p.tokens for p in parts])[rows.argsort()]
    assert tokens.tolist() == [*range(1, sum(lengths) + 1), *[0] * (total - sum(lengths))]
    assert sorted(torch.cat([p.scored for p in parts]).tolist()) == list(range(len(scored)))
    for part in parts:
        assert torch.equal(part.rows[part.before.index] + 1, scored[part.scored])
        assert torch.equal(part.targets, scored[part.scored] + 1)  # tokens count from 1


def test_ranks_have_equal_work_on_one_long_sequence():
    pairs = [
        sum(at + 1 for span in chunk_spans(480, rank=rank, size=SIZE) for at in range(*span))
        for rank in range(SIZE)
    ]
    assert pairs == [480 * 481 // 2 // SIZE] * SIZE


def test_rows_are_put_together_from_slices_and_cut_again():
    row = torch.arange(3 * 16 * 2).view(3, 16, 2)
    slices = by_rank(row, size=SIZE)
    for rank in range(SIZE):
        at = torch.cat([torch.arange(*span) for span in chunk_spans(16, rank=rank, size=SIZE)])
        assert torch.equal(slices[rank], row[:, at])
    assert torch.equal(in_row_order(slices), row)


def _attend_by_mask(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, softcap: float | None
) -> Tensor:
    """[1, H, T, D] and [T, K] bool, in float64: softmax over what a query sees."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1).double() for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _last_tokens(window: int | None) -> tuple[list[int], list[int], list[Tensor], Tensor]:
    """Return lengths of queries and keys; q, k, v; and which keys a query sees."""
    lengths, key_lengths = [5, 3, 80, 1, 3], [120, 3, 80, 4, 3]
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(1, heads, n, 32, generator=generator)
        for heads, n in ((4, sum(lengths)), (2, sum(key_lengths)), (2, sum(key_lengths)))
    ]
    of_query = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    of_key = torch.arange(5).repeat_interleave(torch.tensor(key_lengths))
    at_query = torch.cat([torch.arange(m - n, m) for n, m in zip(lengths, key_lengths)])
    at_key = torch.cat([torch.arange(m) for m in key_lengths])
    behind = at_query[:, None] - at_key
    seen = (of_query[:, None] == of_key) & (behind >= 0)
    return lengths, key_lengths, drawn, seen & (behind < (window or 10**6))


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_queries_may_be_the_last_tokens_of_their_keys(window, softcap):
    lengths, key_lengths, drawn, seen = _last_tokens(window)
    packing = make_packing(lengths, CPU, padded=True, key_lengths=key_lengths)
    out, _ = KERNELS["padded"](_Module(window), *drawn, None, packing=packing, softcap=softcap)
    expected = _attend_by_mask(*drawn, seen, softcap=softcap)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("kernel", ["varlen", "flash"])
def test_so_it_is_with_the_kernels_of_cuda(kernel, window):
    if kernel == "flash":
        pytest.importorskip("flash_attn")
    lengths, key_lengths, drawn, seen = _last_tokens(window)
    device = torch.device("cuda")
    drawn = [x.to(device, torch.bfloat16) for x in drawn]
    packing = make_packing(lengths, device, padded=False, key_lengths=key_lengths)
    out, _ = KERNELS[kernel](_Module(window), *drawn, None, packing=packing)
    expected = _attend_by_mask(*drawn, seen.to(device), softcap=None)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


# --------------------------------------------------------------------------- attention, scores


def _slice(lengths: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> RowSlice:
    """A rank's part of a row, whose second token alone is scored."""
    return make_slice(
        torch.zeros(sum(lengths), dtype=torch.int64),
        lengths,
        scored=torch.tensor([1]),
        slicing=Slicing(group, rank, SIZE),
    )


def _attention_gaps(rank: int, group: dist.ProcessGroup) -> dict[tuple[str, str], float]:
    """Return {(case, method): largest difference of outputs and gradients from whole rows'}."""
    own = _slice(LENGTHS, rank, group)
    gaps = {}
    for case, (heads, kv_heads, window, softcap, has_sinks) in CASES.items():
        drawn = torch.Generator().manual_seed(len(case))
        sizes = (heads, kv_heads, kv_heads, heads)
        *whole, signs = (torch.randn(1, n, own.row_length, 8, generator=drawn) for n in sizes)
        leaves = [x.requires_grad_() for x in whole]
        sinks = torch.randn(heads, generator=drawn).requires_grad_() if has_sinks else None
        module, options = _Module(window), {"softcap": softcap, "s_aux": sinks}
        out, _ = KERNELS["padded"](module, *leaves, None, packing=own.packing.whole, **options)
        (out * signs.transpose(1, 2)).sum().backward()
        for method, attend in METHODS.items():
            if method == "ulysses" and heads % SIZE:
                continue
            parts = [x.detach()[:, :, own.rows].requires_grad_() for x in leaves]
            theirs = None
            if sinks is not None:
                theirs = options["s_aux"] = sinks.detach().requires_grad_()
            ours, _ = attend(
                module, *parts, None, packing=own.packing, kernel=KERNELS["padded"], **options
            )
            (ours * signs[:, :, own.rows].transpose(1, 2)).sum().backward()
            pairs = [(ours, out[:, own.rows])]
            pairs += [(part.grad, x.grad[:, :, own.rows]) for part, x in zip(parts, leaves)]
            if theirs is not None:  # each rank has that of its tokens, or of its heads
                dist.all_reduce(theirs.grad, group=group)
                pairs.append((theirs.grad, sinks.grad))
            gaps[case, method] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return gaps


def _most_gathered(rank: int, group: dist.ProcessGroup) -> float:
    """Return the most keys or values gathered at a time, over those of the own slice."""
    sizes, gather = [], context_parallel.gather

    def counted(own: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = gather(own, group)
        sizes.append(parts.numel())
        return parts

    own = _slice((64,), rank, group)
    q, k, v = (torch.randn(1, 8, 16, 4, requires_grad=True) for _ in range(3))
    context_parallel.gather = counted
    try:
        METHODS["gather"](_Module(), q, k, v, None, packing=own.packing, kernel=KERNELS["padded"])[
            0
        ].sum().backward()
    finally:
        context_parallel.gather = gather
    assert len(sizes) == 2 * SIZE * 2  # keys and values; forward and again in the backward pass
    return max(sizes) / k.numel()


def _on_ranks(trainer: Any) -> dict:
    world, cp = trainer.world, trainer.world.mesh["cp"]
    return {
        "gaps": _attention_gaps(cp.get_local_rank(), cp.get_group()),
        "gathered": _most_gathered(cp.get_local_rank(), cp.get_group()),
        "dp": (world.dp_index(world.rank), world.dp_size, world.is_dp_leader),
        "scores": trainer.weights.score(_rows()),
    }


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    cfg = config(tiny_model, tmp_path_factory.mktemp("cp"), world_size=SIZE, cp=SIZE)
    return with_trainer(cfg, _on_ranks)


def _rows() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(2)
    return [torch.randint(5, 90, (n,), generator=drawn).tolist() for n in (3, 50, 17, 64, 2)]


def test_attention_over_slices_is_that_over_whole_rows(found):
    for rank, result in enumerate(found):
        assert len(result["gaps"]) == 2 * len(CASES) + 4  # ulysses where heads divide
        for case, gap in result["gaps"].items():
            assert gap < 1e-5, f"rank {rank}: {case} is off by {gap:.2g}"


def test_no_more_keys_are_gathered_at_a_time_than_a_slice_has(found):
    assert [result["gathered"] for result in found] == [1.0] * SIZE


def test_cp_ranks_share_one_batch(found):
    assert [result["dp"] for result in found] == [(0, 1, rank == 0) for rank in range(SIZE)]


def test_scores_under_cp_are_those_of_plain_transformers(found, tiny_model):
    right = plain_scores(AutoModelForCausalLM.from_pretrained(tiny_model), _rows())
    for at, expected in enumerate(right):
        for result in found:
            torch.testing.assert_close(result["scores"][at], expected, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------- the ring's plan


def _rounds(lengths: tuple[int, ...], size: int) -> list[tuple[tuple[Tile, ...], ...]]:
    total = sum(lengths)
    paths = separate(lengths).paths()
    return [
        plan_rounds(
            paths, lambda r: chunk_spans(total, rank=r, size=size), rank=rank, size=size, device=CPU
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(96,), (1,) * 96, (37, 1, 50, 8), (11, 12, 1, 72), (95, 1)])
def test_each_pair_that_sees_each_other_is_in_one_tile(lengths, size):
    total = sum(lengths)
    of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    visible, met = (of[:, None] == of).tril().int(), torch.zeros(total, total, dtype=torch.int32)
    for rank, rounds in enumerate(_rounds(lengths, size)):
        rows = [
            torch.cat([torch.arange(*span) for span in chunk_spans(total, rank=r, size=size)])
            for r in range(size)
        ]
        for turn, tiles in enumerate(rounds):
            for tile in tiles:
                queries, keys = rows[rank][tile.queries], rows[(rank - turn) % size][tile.keys]
                seen = tile.is_visible()
                met[queries[:, None], keys] += 1 if seen is None else seen.int()
    assert torch.equal(met, visible)


def test_ranks_have_equal_work_in_each_round():
    work = [
        [
            sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in tiles)
            for tiles in rounds
        ]
        for rounds in _rounds((480,), SIZE)
    ]
    # A diagonal tile counts whole here; on every rank the first round has two of them.
    assert work == [[3 * 60 * 60] + [2 * 60 * 60] * (SIZE - 1)] * SIZE


@pytest.mark.gpu
def test_a_tile_of_the_ring_by_flash_attention_is_that_by_matrix_products():
    device, scale = torch.device("cuda"), 0.3
    drawn = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(96, heads, dim, generator=drawn, device=device).bfloat16()
        for heads, dim in ((4, 32), (2, 32), (2, 16), (4, 16))
    )
    rounds = plan_rounds(
        separate((30, 70, 92)).paths(),
        lambda r: chunk_spans(192, rank=r, size=2),
        rank=1,
        size=2,
        device=device,
    )
    for tile in (tile for tiles in rounds for tile in tiles):
        parts = q[tile.queries], k[tile.keys], v[tile.keys]
        results = []
        for forward, backward in (DENSE, FLASH):
            out, lse = forward(*parts, tile, scale=scale)
            of_queries = (grad[tile.queries], parts[0], out.bfloat16(), lse)
            grads = backward(of_queries, *parts[1:], tile, scale=scale)
            results.append((out, lse, *grads))
        for ours, right in zip(*results):
            torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


# --------------------------------------------------------------------------- what does not fit


def test_what_an_axis_does_not_divide_is_named_with_values_that_do():
    counts = ModelCounts("qwen3", heads=12, kv_heads=4, intermediate=96, vocab=64)
    assert list(misfits(counts, Axes(cp=8, tp=4))) == []
    (problem,) = misfits(counts, Axes(tp=3))
    assert "layout.tp: 3 does not divide num_key_value_heads 4, vocab_size 64" in problem
    assert problem.endswith("1, 2, 4")
    (problem,) = misfits(counts, Axes(cp=4, tp=2), context="ulysses")
    assert "layout.cp: 4 does not divide the 12 / tp 2 = 6" in problem and "1, 2, 3, 6;" in problem
    (problem,) = misfits(replace(counts, unsliced=("linear_attention",)), Axes(cp=2))
    assert "layout.cp: 2 with a qwen3, whose layers (linear_attention)" in problem
    (problem,) = misfits(ModelCounts("mamba", vocab=64), Axes(cp=2))
    assert "layout.cp: 2 with a mamba, whose layers without attention heads" in problem


def test_the_method_follows_the_heads():
    assert context_method("auto", heads=8, cp=4) == "ulysses"
    assert context_method("auto", heads=6, cp=4) == "gather"
    assert context_method("gather", heads=8, cp=4) == "gather"
    assert context_method("ring", heads=8, cp=4) == "ring"


def test_a_model_that_does_not_fit_is_refused_before_any_group_exists(tiny_model, tmp_path):
    flags = {
        "output-dir": tmp_path,
        "model.path": tiny_model,
        "layout.cp": 4,
        "model.kernels.context": "ulysses",
    }
    # One process of four: would it wait for its peers, it would not end.
    ended = call(*arguments("demo_sft.yaml", 4, **flags), **launch_env(0, 4, 1))
    assert ended.returncode == 2, ended.stderr
    assert "layout.cp: 4 does not divide the 2 / tp 1 = 2 query heads" in ended.stderr
    assert f"model.path {tiny_model}" in ended.stderr


def test_what_attention_returns_can_be_viewed_in_another_shape():
    """JetMoE's and AFMoE's code does so; what comes back from other ranks is no plain view."""
    module = torch.nn.Module()
    strided = torch.zeros(1, 4, 3, 2).transpose(1, 2)  # [1, t, Hq, D]
    attend = partial(context_parallel._method, kernel=KERNELS["padded"], packing=None)
    out, _ = attend(module, *(None,) * 4, method=lambda *_: strided)
    assert not strided.is_contiguous() and out.view(1, 3, 8).shape == (1, 3, 8)
