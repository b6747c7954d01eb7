"""Digests of a folder's files, shared out over trainer ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from spmdrl.errors import Refusal
from spmdrl.model.files.digests import shared_digests
from spmdrl.world.world import World
from tests.helpers.policy_runs import config, small_model
from tests.helpers.worlds import in_world

NAMES = ("a", "b", "c")


def _found(world: World, folder: Path) -> dict[str, str] | str:
    try:
        return shared_digests(folder, NAMES, world, field="model.path")
    except Refusal as error:
        return str(error)


@pytest.mark.parametrize("lacks", ["", "b"])
def test_all_ranks_have_all_digests_or_the_same_refusal(tmp_path, lacks):
    folder = tmp_path / "files"
    folder.mkdir()
    for name in set(NAMES) - {lacks}:
        (folder / name).write_text(name)
    cfg = config(small_model(tmp_path), tmp_path / "run", world_size=2)
    found = in_world(cfg, _found, folder)
    if lacks:  # of rank 1's share
        assert found[0] == found[1]
        assert found[0].startswith(f"rank 1: model.path: cannot read {folder / lacks}: [Errno 2]")
    else:
        own = {name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES}
        assert found == [own, own]
