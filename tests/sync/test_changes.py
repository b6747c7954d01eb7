"""Pushes of what changed: any bits arrive as they are, on any mesh."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist

from spmdrl.config import StreamSettings
from spmdrl.model.tensor_parts import Box, Value
from spmdrl.sync import change_choice
from spmdrl.sync.buckets import Traffic
from spmdrl.sync.change_choice import ChangeChoice, Moved, why_not
from spmdrl.sync.change_transfer import ChangeTransfer
from spmdrl.sync.changes import BITMAP, GAPS, WHOLE, bits_of, encode, payload_bytes, write
from spmdrl.sync.tables import DTYPES, FileTable
from spmdrl.sync.transfer import RankSide, Transfer, make_gather_groups
from spmdrl.world.machine.hardware import CPU_LINK
from tests.helpers.ranks import run_ranks
from tests.sync.planned import at, boxes_in_files, plan_all, random_mesh_pair


def arrived(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bits that a receiver of `old` holds after `new` was sent, and the form."""
    kept = old.clone()
    encoded = encode(new, kept)
    assert torch.equal(kept, new)
    assert encoded.changed == int((new != old).sum())
    assert len(encoded.payload) == payload_bytes(encoded.header, new.itemsize)
    target = old.clone()
    write(target, encoded.header, encoded.payload)
    return target, encoded.header[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 7, 8, 513, 4096, 4099])
def test_any_share_of_changed_elements_arrives_bit_by_bit(dtype: torch.dtype, numel: int):
    seed = torch.Generator().manual_seed(numel)
    raw = torch.randint(0, 2, (numel, dtype.itemsize), generator=seed, dtype=torch.uint8)
    old = bits_of(raw.flatten().view(dtype))
    for share in (0.0, 0.001, 0.05, 0.3, 0.9, 1.0):
        new = old.clone()
        new[torch.rand(numel, generator=seed) < share] ^= 1
        assert torch.equal(arrived(new, old)[0], new)


def test_no_element_is_no_block_of_trouble():
    empty = torch.empty(0, dtype=torch.int16)
    assert len(arrived(empty, empty)[0]) == 0


def test_bits_are_compared_and_not_values():
    nan = float("nan")
    old = torch.tensor([0.0, nan, 1.0, nan] * 64, dtype=torch.bfloat16)
    new = old.clone()
    new[0] = -0.0
    bits_of(new)[5] += 1  # another payload of a NaN
    target, form = arrived(bits_of(new), bits_of(old))
    assert torch.equal(target, bits_of(new)) and form == GAPS
    assert encode(bits_of(new), bits_of(new).clone()).changed == 0


@pytest.mark.parametrize(
    ("share", "form", "most"), [(0.02, GAPS, 0.04), (0.4, BITMAP, 0.49), (1.0, WHOLE, 1.0)]
)
def test_the_smallest_form_is_taken(share: float, form: int, most: float):
    numel = 20_000
    old = torch.zeros(numel, dtype=torch.int16)
    new = old.clone()
    new[torch.rand(numel, generator=torch.Generator().manual_seed(1)) < share] = 1
    encoded = encode(new, old.clone())
    assert encoded.header[0] == form and len(encoded.payload) <= most * 2 * numel + 16


@pytest.mark.parametrize("distance", [254, 255, 256, 509, 510, 511, 9000])
def test_long_gaps_are_skipped_over(distance: int):
    old = torch.zeros(10_000, dtype=torch.int16)
    new = old.clone()
    new[[distance - 1, distance, 2 * distance % 10_000]] = 3
    assert torch.equal(arrived(new, old)[0], new)


@pytest.mark.parametrize(
    ("delta", "gbit", "is_on_gpu", "reason"),
    [
        ("auto", 0.0, False, "faster than to compare"),
        ("auto", 1.0, False, ""),
        ("auto", 1.0, True, "never run on GPUs"),
        ("always", 0.0, True, ""),
        ("never", 1.0, False, "stream.delta is never"),
    ],
)
def test_auto_compares_only_over_links_that_are_slower_than_that(
    delta: str, gbit: float, is_on_gpu: bool, reason: str
):
    cfg = StreamSettings(delta=delta, gbit_per_s=gbit)
    link = CPU_LINK.at(gbit)
    against = why_not(cfg, link, busiest=10**8, itemsize=2, is_on_gpu=is_on_gpu)
    assert reason in against and bool(reason) == bool(against)


def test_after_a_push_that_saved_no_time_the_next_ones_are_full(monkeypatch):
    monkeypatch.setattr(change_choice, "gather_objects", lambda own, group: [own])
    stream = StreamSettings(delta="auto", gbit_per_s=1.0, full_every=0)
    world = SimpleNamespace(
        cfg=SimpleNamespace(stream=stream), control=None, wire=torch.device("cpu")
    )
    monkeypatch.setattr(change_choice, "link_of", lambda world: CPU_LINK.at(1.0))
    traffic = Traffic(((1,),), numpy.array([[10**8], [0]]))
    choice = ChangeChoice(traffic, world, itemsize=2, kind="weights")
    assert choice.is_on and not choice.is_full()
    choice.note(Moved(10**7, changed=1, compared=20), full_bytes=10**8)
    assert not choice.is_full()
    choice.note(Moved(10**8, changed=20, compared=20), full_bytes=10**8)
    paused = 0
    while choice.is_full():
        assert not choice.keeps
        choice.note(Moved(10**8), full_bytes=10**8)
        paused += 1
    assert paused == 20 and choice.keeps


def _differing(world_size: int, seeds: range) -> list[str]:
    """Return the pushes after which an engine does not hold what a full push writes."""
    dist.init_process_group("gloo")
    found = []
    for seed in seeds:
        found += _pushes(seed, random.Random(seed))
    dist.destroy_process_group()
    return found


def _pushes(seed: int, rng: random.Random) -> list[str]:
    held, wants, parts = random_mesh_pair(seed)
    if len(held) > dist.get_world_size():
        return []
    idle = dist.get_world_size() - len(held)
    held += [{}] * idle
    wants += [[]] * idle
    rank = dist.get_rank()
    plan = plan_all(held, wants, parts, bucket_bytes=rng.choice((200, 2000, 10**6)))[rank]
    own = boxes_in_files(held[rank], parts, rank)
    whole = {}
    for name, part in parts.items():
        generator = torch.Generator().manual_seed(seed)
        whole[name] = torch.randn(part.shape, generator=generator)

    def value(name: str, box: Box) -> Value:
        assert any(outer.intersect(box) == box for outer in own[name])
        return Value(whole[name][at(box, Box.whole(whole[name].shape))])

    live = SimpleNamespace(table=FileTable(parts), held=SimpleNamespace(value=value))
    gathers = make_gather_groups(plan)
    targets = {}
    for kind in ("full", "changes"):
        made = []
        for want in wants[rank]:
            # Every other view has gaps, as that of a column has.
            padded = torch.zeros((*want.box.shape, 2), dtype=want.dtype)
            view = padded[..., 0] if len(made) % 2 else padded[..., 0].contiguous()
            made.append((want.box, view))
        targets[kind] = made
    wire = torch.device("cpu")
    sides = {kind: RankSide(plan, live, wire, own, gathers) for kind, own in targets.items()}
    full = Transfer(sides["full"])
    changes = ChangeTransfer(sides["changes"])
    changes.keep()
    Transfer(sides["changes"]).run()
    problems = []
    for share in (0.1, 0.0, 1.0, 0.02):
        for name in whole:
            generator = torch.Generator().manual_seed(seed + int(100 * share))
            mask = torch.rand(whole[name].shape, generator=generator) < share
            whole[name][mask] += 1
        full.run()
        changes.run()
        for (_, expected), (_, got) in zip(targets["full"], targets["changes"]):
            if not torch.equal(expected, got):
                problems.append(f"seed {seed} share {share} rank {rank}")
    return problems


@pytest.mark.parametrize("world_size", [4])
def test_on_any_pair_of_meshes_changes_arrive_as_a_full_push_does(world_size: int):
    for found in run_ranks(world_size, _differing, world_size, range(60)):
        assert found == []
