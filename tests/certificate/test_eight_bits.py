"""Certificate lines of moments in 8 bits: what they detect, and the memory that they take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.certificate.digests import of_places
from spmdrl.certificate.fingerprint_collector import State
from spmdrl.certificate.fingerprints import Tally
from spmdrl.config import OptimizerSettings
from spmdrl.model.tensor_parts import BlockValues, local_part
from spmdrl.train.adamw import AdamW
from spmdrl.world.torch_internals import TorchDispatchMode, tree_leaves
from tests.helpers.policy_runs import config, own_batch, small_model, update
from tests.helpers.torchao import needs_torchao
from tests.helpers.worlds import in_world, with_trainer


def test_every_bit_of_every_block_changes_the_digest():
    values = torch.randn(5, generator=torch.Generator().manual_seed(1))
    blocks = BlockValues("w", torch.empty(9, 7), values, 13)
    places = blocks.places(0, 5)
    assert places.tolist() == [0, 13, 26, 39, 52]
    assert torch.equal(blocks.tensor.flatten(), values.repeat_interleave(13)[:63])
    found = {int(of_places(values, places))}
    for at in range(5):
        for bit in range(32):
            flipped = values.clone()
            flipped[at : at + 1].view(torch.int32)[0] ^= -(2**31) if bit == 31 else 1 << bit
            found.add(int(of_places(flipped, places)))
    assert len(found) == 1 + 5 * 32
    assert int(of_places(values, blocks.places(1, 6))) not in found


class _Allocations(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for own in tree_leaves(result):
            if isinstance(own, Tensor) and own.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, own.untyped_storage().nbytes())
        return result


def _largest(world: Any) -> int:
    count = 2**24
    moments = AdamW(
        {"w": torch.zeros(4096, 4096)},
        no_decay=set(),
        options=OptimizerSettings(),
        dtype=torch.int8,
    )
    state = State(moments.state_dict, world, section="after", with_norms=True)
    with _Allocations() as seen:
        for _ in range(2):
            tally = Tally(world, with_norms=True)
            state.add_to(tally)
            names = tally.total().rows
    assert {"after/exp_avg.w", "after/exp_avg_scales.w"} <= names.keys()
    return seen.largest / count


@needs_torchao
def test_no_copy_of_a_moment_is_made(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path)
    # Pieces have a fixed size: here about a tenth of a byte per element, and 4 before.
    assert in_world(cfg, _largest)[0] < 0.2


def _lines(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return the rows of the state after an update, as it is and with a bit of a scale flipped; and
    that of blocks whose values are their places."""
    update(trainer, own_batch(trainer.world), step=0)
    found = {}
    scales = trainer.policy.optimizer.state_dict()["exp_avg_scales"]["lm_head.weight"]
    placed = scales.places(0, len(scales.values)).float()
    tally = Tally(trainer.world, with_norms=True)
    tally.add_blocks("places", dataclasses.replace(scales, values=placed))
    found["placed"] = tally.total().rows
    own = trainer.policy.optimizer._moments["exp_avg"]["lm_head.weight"]
    for kind in ("plain", "flipped"):
        if kind == "flipped" and trainer.world.rank == trainer.world.world_size - 1:
            local_part(own.scales)[-1:].view(torch.int32)[0] ^= 1
        tally = Tally(trainer.world, with_norms=True)
        State(trainer.state_dict, trainer.world, section="after", with_norms=True).add_to(tally)
        found[kind] = tally.total().rows
    return found


@needs_torchao
def test_scales_of_two_ranks_are_those_of_one(tmp_path):
    path = small_model(tmp_path, hidden_size=64, heads=2, intermediate=96)
    memory = {"memory": {"optimizer_dtype": "int8"}}
    alone, *_ = with_trainer(config(path, tmp_path, model=memory), _lines)
    cut, other = with_trainer(config(path, tmp_path, world_size=2, model=memory), _lines)
    assert cut["plain"] == other["plain"]
    assert alone["placed"] == cut["placed"] == other["placed"]
    name = "after/optimizer.exp_avg_scales.lm_head.weight"
    for found in (alone, cut):
        assert {n for n, row in found["plain"].items() if found["flipped"][n] != row} == {name}
    # The rows of both shards are whole blocks: scales differ by rounding alone.
    one, two = (found["plain"][name][1:] for found in (alone, cut))
    assert one == pytest.approx(two, rel=1e-3)
