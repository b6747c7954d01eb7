"""What a dry run finds without reading weights or having the run's device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from built import changed, made

from spmdrl.check import dry_run
from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.world.world import pick_device


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A folder whose weights stand in several files."""
    from built import small_model

    return small_model(tmp_path_factory.mktemp("shards"), max_shard_size="20KB")


def config(model: Path, folder: Path, **fields: Any) -> Config:
    """Return a config that nothing is wrong with."""
    cfg = made(
        model=dict(path=str(model)),
        output_dir=str(folder / "run"),
        data=dict(train="task:addition", size=64, max_prompt_tokens=32),
        sampling=dict(max_response_tokens=16),
        batch=dict(prompts_per_step=4),
        engine=dict(kind="transformers"),
    )
    return changed(cfg, **fields)


def copied(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder / "model")
    return folder / "model"


def shown(cfg: Config, capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    status = dry_run.show(cfg)
    return status, *capsys.readouterr()


# --------------------------------------------------------------------------- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPUs")
@pytest.mark.parametrize("layout", [dict(device="cuda"), dict(backend="nccl")])
def test_a_device_that_is_not_here_is_named_last_and_sizes_are_shown(
    layout, tiny_model, tmp_path, capsys
):
    cfg = config(tiny_model, tmp_path, layout=layout)
    status, out, err = shown(cfg, capsys)
    assert status == 3 and "sequences per step" in out and "parameters" in out
    lack, last = err.splitlines()
    (field,) = layout
    assert lack.startswith(f"here the run would stop: layout.{field}: {layout[field]} needs ")
    assert last.startswith("no problems but for this machine (")
    with pytest.raises(Refusal) as refused:  # as the run is
        pick_device(cfg, 0)
    assert str(refused.value) in lack
    broken = changed(cfg, data=dict(max_prompt_tokens=1))
    assert shown(broken, capsys)[0] == 2


@pytest.mark.parametrize("attention", ["flash", "varlen"])
def test_attention_of_gpus_is_refused_on_the_cpu(attention, tiny_model, tmp_path):
    cfg = config(tiny_model, tmp_path, layout=dict(device="cpu"))
    cfg = changed(cfg, model=dict(kernels=dict(attention=attention)))
    (found,) = dry_run.problems(cfg)
    assert f"model.kernels.attention: {attention} needs CUDA" in found


# --------------------------------------------------------------------------- files


def cut(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    return "cut short or corrupted"


def header_cut(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:100])
    return "cut short or corrupted"


def no_header(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return "cut short or corrupted"


def gone(folder: Path) -> str:
    sorted(folder.glob("*.safetensors"))[1].unlink()
    return "the file is missing"


def no_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return "is not a weight index"


def other_shapes(folder: Path) -> str:
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"intermediate_size": 64}))
    return "by config.json"


DAMAGES = [cut, header_cut, no_header, gone, no_index, other_shapes]


@pytest.mark.parametrize("damage", DAMAGES, ids=[own.__name__ for own in DAMAGES])
def test_files_of_weights_are_looked_at_by_their_headers(damage, shards, tmp_path):
    folder = copied(shards, tmp_path)
    cfg = config(folder, tmp_path)
    assert not list(dry_run.problems(cfg))
    says = damage(folder)
    (found,) = dry_run.problems(cfg)
    assert found.startswith("model.path: ") and says in found and str(folder) in found


def test_files_of_models_beside_the_policy_are_looked_at(shards, tmp_path):
    folder = copied(shards, tmp_path)
    cfg = config(shards, tmp_path, algorithm=dict(kl_coef=0.1))
    cfg = changed(cfg, model=dict(reference=dict(path=str(folder))))
    assert not list(dry_run.problems(cfg))
    gone(folder)
    (found,) = dry_run.problems(cfg)
    assert found.startswith("model.reference.path: cannot read ") and "missing" in found


def test_a_folder_without_weights_can_be_planned_with_and_is_named(tiny_model, tmp_path, capsys):
    folder = copied(tiny_model, tmp_path)
    (folder / "model.safetensors").unlink()
    status, out, err = shown(config(folder, tmp_path), capsys)
    assert status == 3 and "bytes per push" in out
    assert f"here the run would stop: model.path: {folder} has no files of weights" in err


def test_a_rank_above_the_matrices_is_refused(tiny_model, tmp_path):
    cfg = config(tiny_model, tmp_path)
    assert not list(dry_run.problems(changed(cfg, model=dict(lora=dict(rank=64)))))
    (found,) = dry_run.problems(changed(cfg, model=dict(lora=dict(rank=10**9))))
    assert "model.lora.rank: 1000000000 is above 64" in found and "take at most 64" in found
