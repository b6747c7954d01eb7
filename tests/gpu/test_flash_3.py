"""FlashAttention 3 is used where it is installed on Hopper, and never in a deterministic run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _fa3

from spmdrl.model import sharded_model
from spmdrl.model.attention import flash_3
from spmdrl.model.attention.flash_3 import choose_flash
from spmdrl.same_run import made_of
from spmdrl.world import torch_internals
from spmdrl.world.torch_internals import flash_version
from tests.gpu.fake_cuda import DEVICE
from tests.helpers.built import made


@pytest.fixture(autouse=True)
def restored(gpu) -> Iterator[None]:
    """Have FlashAttention 2 again after each test, and no choice remembered."""
    choose_flash.cache_clear()
    yield
    choose_flash.cache_clear()
    attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def installed(monkeypatch) -> SimpleNamespace:
    """Install a module of that name, whose kernels are stubs."""
    kernels = SimpleNamespace(fwd=mock.Mock(), bwd=mock.Mock())
    module = ModuleType("flash_attn_interface")
    module.__spec__ = SimpleNamespace(name="flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(torch.ops, "flash_attn_3", kernels, raising=False)
    monkeypatch.setattr(_fa3, "_fa3_register_kernels", lambda: mock.Mock())
    return kernels


def said(caplog: pytest.LogCaptureFixture, *, deterministic: bool = False) -> str:
    with caplog.at_level(logging.INFO):
        choose_flash(DEVICE, deterministic=deterministic)
        choose_flash(DEVICE, deterministic=deterministic)  # another model of the run
    return caplog.text.strip().partition("attention: ")[2]


def test_it_is_used_and_logged_once_where_it_is_installed(gpu, installed, caplog) -> None:
    assert flash_version() == 2
    assert said(caplog) == "FlashAttention 3"
    assert flash_version() == 3
    assert attention.current_flash_attention_impl() == "FA3"


def test_a_deterministic_run_keeps_version_2(gpu, installed, caplog) -> None:
    found = said(caplog, deterministic=True)
    assert found.startswith("FlashAttention 2, since `deterministic` is true")
    assert flash_version() == 2


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_keep_version_2(gpu, installed, caplog, capability) -> None:
    gpu.capability = capability
    assert "needs compute capability 9.0" in said(caplog)
    assert flash_version() == 2


def test_without_the_module_it_is_version_2(gpu, caplog) -> None:
    assert "is not installed (module flash_attn_interface)" in said(caplog)


@pytest.mark.parametrize("error", [ImportError("undefined symbol"), RuntimeError("no FA3 kernels")])
def test_a_module_that_cannot_be_used_is_named(gpu, installed, monkeypatch, caplog, error) -> None:
    monkeypatch.setattr(flash_3, "use_flash_3", mock.Mock(side_effect=error))
    found = said(caplog)
    assert found.startswith("FlashAttention 2, since flash_attn_interface cannot be used by torch")
    assert str(error) in found and flash_version() == 2


def test_an_older_torch_keeps_version_2(gpu, installed, monkeypatch, caplog) -> None:
    monkeypatch.delattr(torch_internals.torch.nn.attention, "activate_flash_attention_impl")
    assert "cannot be used by torch" in said(caplog)
    monkeypatch.delattr(torch_internals.torch.nn.attention, "current_flash_attention_impl")
    assert flash_version() == 2


def test_torch_hands_its_deterministic_flag_to_the_kernels(gpu, installed, monkeypatch) -> None:
    """What the choice rests on: the flag is passed, and split keys are off."""
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", installed.bwd)
    q = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    lse, ends = torch.zeros(2, 3), torch.tensor([0, 3])
    sizes = (ends, ends, 3, 3, None, True, -1, 0)
    for flag in (False, True):
        _fa3._fa3_run_backward(q, q, q, q, q, lse, *sizes, flag)
        assert installed.bwd.call_args.args[-2] is flag


def test_a_certificate_says_which_one_made_the_numbers(gpu, monkeypatch) -> None:
    monkeypatch.setattr(made_of, "user_files", lambda cfg: {})
    monkeypatch.setattr(made_of, "digest", lambda file: "0")
    for device, version in ((DEVICE, "FlashAttention 2"), (torch.device("cpu"), None)):
        found = made_of.made_of(made(), SimpleNamespace(device=device))
        assert found["machine"].get("attention") == version


@pytest.mark.parametrize("kernel, is_asked", [("varlen", True), ("padded", False)])
def test_a_model_chooses_for_kernels_of_cuda_alone(monkeypatch, kernel, is_asked) -> None:
    asked = []
    stop = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(sharded_model, "kernel_of", lambda *_, **__: kernel)
    monkeypatch.setattr(sharded_model, "choose_flash", lambda *_, **own: asked.append(own))
    monkeypatch.setattr(sharded_model, "slicing_of", stop)
    own = object.__new__(sharded_model.ShardedModel)
    own.__dict__.update(hf_model=mock.MagicMock(), world=mock.MagicMock())
    own.__dict__["cfg"] = made(deterministic=False)
    with pytest.raises(InterruptedError):
        own._set_attention(made(model=dict(path="m")).model, SimpleNamespace(mixers=(), chunk=None))
    assert asked == [{"deterministic": False}] * is_asked
