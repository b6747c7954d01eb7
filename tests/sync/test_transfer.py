"""The transfer: values that are live memory and values that are computed travel alike."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spmdrl.model.cuts import TensorCut
from spmdrl.model.tensor_parts import Box, Part, Value
from spmdrl.sync import stream, transfer
from spmdrl.sync.change_choice import Moved
from spmdrl.sync.tables import FileTable, Want
from spmdrl.sync.transfer import RankSide, Transfer
from tests.helpers.ranks import run_ranks
from tests.sync.planned import plan_all

SHAPES = {"a": (6, 4), "b": (5,), "c": (3, 8)}


def _arrived(computed: tuple[str, ...], bucket_bytes: int) -> list[str]:
    """Return the names of tensors that rank 1 does not get right from rank 0."""
    rank, boxes = dist.get_rank(), {n: Box((0,) * len(s), s) for n, s in SHAPES.items()}
    held = {
        name: torch.arange(box.numel, dtype=torch.float32).view(box.shape) + 100 * i
        for i, (name, box) in enumerate(boxes.items())
    }
    parts = {name: Part.whole(name, shape) for name, shape in SHAPES.items()}
    wants = [Want(name, box, torch.float32) for name, box in boxes.items()]
    cuts = {name: TensorCut(shape) for name, shape in SHAPES.items()}
    plan = plan_all([cuts, {}], [[], wants], parts, bucket_bytes=bucket_bytes)[rank]

    def source(name: str, box: Box) -> Value:
        part = held[name][tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))]
        return Value(part, (lambda: torch.full(box.shape, 0.5)) if name in computed else None)

    targets = [(want.box, torch.full(want.box.shape, -1.0)) for want in wants]
    live = SimpleNamespace(table=FileTable(parts), held=SimpleNamespace(value=source))
    Transfer(RankSide(plan, live, torch.device("cpu"), targets if rank == 1 else [], {})).run()
    return (
        []
        if rank == 0
        else [
            want.name
            for want, (_, got) in zip(wants, targets)
            if not torch.equal(got, held[want.name] + 0.5 * (want.name in computed))
        ]
    )


def _all_mixtures() -> dict[str, list[str]]:
    dist.init_process_group("gloo")
    mixtures = [names for n in range(4) for names in itertools.combinations(SHAPES, n)]
    found = {
        f"{names} {size}": _arrived(names, size) for names in mixtures for size in (40, 100, 10_000)
    }
    dist.destroy_process_group()
    return found


def test_any_mixture_of_live_and_computed_values_arrives():
    for found in run_ranks(2, _all_mixtures):
        assert len(found) == 24 and not any(found.values()), found


def test_a_rank_alone_copies_from_shards_to_the_engine_without_a_bucket(monkeypatch):
    # A kind of copy for each dtype of the engine, so at most two calls for a bucket.
    calls = []

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(len(targets))
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(transfer, "copy_all", counted)
    boxes = {name: Box.whole(shape) for name, shape in SHAPES.items()}
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    held = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    parts = {name: Part.whole(name, shape) for name, shape in SHAPES.items()}
    wants = [Want(name, box, dtypes[name]) for name, box in boxes.items()]
    cuts = {name: TensorCut(shape) for name, shape in SHAPES.items()}
    (plan,) = plan_all([cuts], [wants], parts, bucket_bytes=64)

    def source(name: str, box: Box) -> Value:
        return Value(held[name][tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))])

    live = SimpleNamespace(table=FileTable(parts), held=SimpleNamespace(value=source))
    targets = [(want.box, torch.empty(want.box.shape, dtype=want.dtype)) for want in wants]
    own = Transfer(RankSide(plan, live, torch.device("cpu"), targets, {}))
    buffers = [*own._send_buffers, *own._receive_buffers]
    assert plan.num_buckets > 1 and plan.bucket_bytes[1] > 0
    assert all(buffer.is_meta or not buffer.numel() for buffer in buffers)
    own.run()
    for want, (_, got) in zip(wants, targets):
        assert torch.equal(got, held[want.name].to(want.dtype)), want.name
    assert len(calls) <= 2 * plan.num_buckets


def test_a_push_is_timed_from_when_all_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.repeat(1.0))  # each event takes a second
    monkeypatch.setattr(stream, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(stream, "await_all", lambda group: [next(clock) for _ in range(100)])

    def move() -> Moved:
        next(clock)
        return Moved(6 * 10**9)

    weights = SimpleNamespace(move=move)
    pushing = object.__new__(stream.WeightStream)
    vars(pushing).update(
        mode="traced",
        _pushes=1,
        _first=[weights],
        _later=[weights],
        _pointers=(),
        _cfg=SimpleNamespace(verify_every=0),
        _world=SimpleNamespace(
            watch=SimpleNamespace(wait=lambda *_: contextlib.nullcontext()),
            control=None,
            device=torch.device("cpu"),
            is_inference=False,
        ),
        _handover=SimpleNamespace(wake_weights=lambda: next(clock), wake_cache=dict),
    )
    assert pushing.push(7) == {
        "sync/bytes": (6e9, 1.0),
        "sync/seconds": (3.0, 1.0),
        "sync/gb_per_s": (6.0, 3.0),
    }


def test_copies_of_one_call_have_the_same_dtypes_and_are_dense_or_not(monkeypatch):
    calls = []

    def recorded(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        kinds = [(t.dtype, s.dtype, t.is_contiguous()) for t, s in zip(targets, sources)]
        calls.append(kinds)
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(transfer, "copy_all", recorded)
    source = torch.arange(12.0).view(3, 4)
    engine = torch.zeros(3, 8, dtype=torch.bfloat16)
    pairs = [
        (torch.zeros(3, 4, dtype=torch.bfloat16), source),
        (torch.zeros(3, 4), source + 1),
        (engine[:, 2:6], source + 2),
        (torch.zeros(3, 4, dtype=torch.bfloat16), source + 3),
        (torch.zeros(3, 4, dtype=torch.bfloat16), source.bfloat16()),
    ]
    copies = transfer.CopyList()
    for target, value in pairs:
        copies.add([target], [Value(value)])
    copies.run()
    assert all(torch.equal(target.float(), value.float()) for target, value in pairs)
    assert [len(kinds) for kinds in calls] == [2, 1, 1, 1]
    assert all(len(set(kinds)) == 1 for kinds in calls)
    assert not engine[:, :2].any() and not engine[:, 6:].any()
