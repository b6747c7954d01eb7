"""vLLM with models that see: it draws and scores as transformers does, and takes pushed towers."""

from __future__ import annotations

import pytest

from spmdrl.config import LayoutSettings
from tests.engine.test_vision import assert_exact, in_each, seeing_cfg
from tests.helpers.vlm import seeing_model
from tests.helpers.worlds import in_world
from tests.sync.test_vision_stream import assert_pushed

pytestmark = pytest.mark.usefixtures("torchvision")
SPLIT = LayoutSettings(world_size=2, trainer_ranks=1)


@pytest.mark.parametrize(
    "families",  # those that its CPU build serves
    [
        ("qwen3_vl",),
        pytest.param(
            ("internvl", "glm4v", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe"), marks=pytest.mark.grid
        ),
    ],
    ids=" ".join,
)
def test_vllm_draws_and_scores_images_as_transformers_does(tmp_path, families):
    folders = {f: str(seeing_model(f, tmp_path / f)) for f in families}
    cfg = seeing_cfg(folders[families[0]], kind="vllm")
    (found,) = in_world(cfg, in_each, folders)
    assert_exact(found)


@pytest.mark.parametrize(
    ("family", "train"),
    [("qwen3_vl_moe", "all"), pytest.param("qwen2_5_vl", "language", marks=pytest.mark.grid)],
)
def test_towers_are_pushed_into_vllm_bit_equal(tmp_path, family, train):
    folder = seeing_model(family, tmp_path / "model")
    assert_pushed(folder, kind="vllm", layout=SPLIT, train=train)
