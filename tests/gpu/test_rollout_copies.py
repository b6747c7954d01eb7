"""Rollouts go to the device once, and never back: shown with the meta device in place of a GPU,
which nothing can be read from."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.columns import RouterRoutes, to_device
from spmdrl.exchange import exchange_rollouts
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import make_row
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.train.microbatches import on_host, prepare
from spmdrl.types import Batch, Microbatch, Rollouts
from spmdrl.world.torch_internals import TorchDispatchMode, tree_leaves
from tests.helpers.built import made
from tests.helpers.policy_runs import LENGTHS, microbatch, scalars

CPU, META = torch.device("cpu"), torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts the tensors that go to another device, and the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        places = {t.device.type for t in tree_leaves((args, out)) if isinstance(t, Tensor)}
        if name in ("aten::_to_copy", "aten::copy_") and len(places) > 1:
            self.found["copies"] += 1
        elif name.startswith("c10d::") and "alltoall" in name:
            self.found["all to all"] += 1
        return out


@pytest.fixture
def group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def made_rollouts() -> Rollouts:
    whole = microbatch([*range(len(LENGTHS))])
    count = len(whole.tokens)
    drawn = torch.Generator().manual_seed(1)
    routes = torch.randint(0, 8, (count, 2, 2), generator=drawn, dtype=torch.int8)
    masks = SamplingMasks.from_ids([[1, 2]] * count, vocab=96)
    return Rollouts(
        tokens=whole.tokens,
        response_mask=whole.response_mask,
        rollout_logprobs=whole.rollout_logprobs,
        policy_versions=whole.policy_versions,
        extra_columns={"routes": RouterRoutes(routes), masks.key: masks},
        cu_seqlens=whole.cu_seqlens.long(),
        scalars=scalars(),
    )


def exchanged(group: Any, device: torch.device) -> tuple[Batch, dict[str, int]]:
    """Exchange rollouts in a world of one rank; return the batch, and what was copied."""
    world = SimpleNamespace(
        cfg=made(),
        rank=0,
        world_size=1,
        is_trainer=True,
        trainer_ranks=[0],
        dp_size=1,
        dp_index=lambda rank: 0,
        tokens_per_microbatch=48,
        shares_prefixes=True,
        device=device,
        control=group,
        watch=SimpleNamespace(wait=lambda *_: contextlib.nullcontext()),
    )
    with Copies() as copies:
        batch = exchange_rollouts(made_rollouts(), world, step=0)
    return batch, dict(copies.found)


FIELDS = 7  # tensors of a micro-batch: 4 of tokens, positions, borders, ids
COLUMNS = 3  # routes; sizes and data of sampling masks


def test_a_single_rank_on_the_host_moves_nothing(group) -> None:
    batch, copied = exchanged(group, CPU)
    assert copied == {} and len(batch.microbatches) > 1


def test_each_tensor_goes_to_the_device_once_and_never_back(group) -> None:
    batch, copied = exchanged(group, META)
    count = len(batch.microbatches)
    assert copied == {"copies": count * (FIELDS + COLUMNS)} and count > 1
    slicing = Slicing(device=META, is_padded=False)
    model = SimpleNamespace(
        world=SimpleNamespace(device=META), row=partial(make_row, slicing=slicing), give_room=list
    )
    with Copies() as copies:
        updates = prepare(batch, None, cfg=made(), model=model)
    prepared = [one for update in updates for one in update]
    for one, source in zip(prepared, batch.microbatches, strict=True):
        assert one.packed.tokens is source.tokens, "it is there already"
        assert on_host(one.packed) is source.host
        assert one.row.tokens.device == one.loss_mask.device == META
        assert one.row.own.routes.device == META
    # Of rows and their packing; no column of the rollouts goes again but routes, by row.
    assert copies.found["copies"] <= 24 * count


def test_copies_of_rollouts_are_those_of_the_host(group) -> None:
    (plain, _), (moved, _) = exchanged(group, CPU), exchanged(group, META)
    for one, other in zip(plain.microbatches, moved.microbatches, strict=True):
        ours, theirs = one.state_dict(), other.host.state_dict()
        assert ours.keys() == theirs.keys() and "host" not in ours
        for name, value in ours.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, theirs[name]), name
        assert torch.equal(
            RouterRoutes.of(one.extra_columns).rows, RouterRoutes.of(other.host.extra_columns).rows
        )


@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("source, target", [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")])
def test_memory_is_pinned_on_the_way_to_a_gpu_that_nobody_waits_for(
    source, target, non_blocking
) -> None:
    tensor = mock.Mock(device=torch.device(source))
    to_device(tensor, target, non_blocking=non_blocking)
    is_pinned = non_blocking and (source, target) == ("cpu", "cuda")
    assert tensor.pin_memory.called == is_pinned
    sent = tensor.pin_memory() if is_pinned else tensor
    sent.to.assert_called_once_with(torch.device(target), non_blocking=non_blocking)


def test_a_micro_batch_remembers_what_it_is_a_copy_of() -> None:
    host = microbatch([0, 1])
    assert host.host is None and on_host(host).tokens is host.tokens
    there: Microbatch = host.to(META)
    assert there.host is host and there.to(META).host is host
    assert on_host(there) is host
