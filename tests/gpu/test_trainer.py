"""What the trainers do on GPUs, as far as a machine without one can show it.

Kernels run on meta tensors: shapes, dtypes and signatures are those of this torch, numbers are
none. (Not FakeTensor on "cuda": its backward pass wants a device that CPU builds lack.)
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import Config, LayoutSettings
from spmdrl.model.attention import pick
from spmdrl.model.attention.pick import pick_attention
from spmdrl.model.parallel import layout
from spmdrl.model.parallel.recompute import pins_exactly
from spmdrl.world.lost_peers import watch
from spmdrl.world.lost_peers.watch import Watch
from spmdrl.world.torch_internals import pin_exactly
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[2]
META, CUDA = torch.device("meta"), torch.device("cuda")
LENGTHS = (5, 17, 10)


def test_softcap_takes_flash_attention_where_it_is_installed(monkeypatch) -> None:
    def picked(*, softcap: bool) -> str:
        return pick_attention("auto", device=CUDA, dtype=torch.bfloat16, has_softcap=softcap)

    for is_there, kernel in ((object(), "flash"), (None, "padded")):
        monkeypatch.setattr(pick, "find_spec", lambda name, found=is_there: found)
        assert picked(softcap=True) == kernel
        assert picked(softcap=False) == "varlen"


# --------------------------------------------------------------------------- kernels of others


@pytest.fixture(scope="module")
def liger() -> dict[str, list[str]]:
    if not (Path(sys.prefix) / "liger").exists():
        pytest.skip("liger-kernel is not there: make .venv/liger")
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.liger_on_meta"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_liger_goes_into_every_causal_and_scalar_model(liger) -> None:
    found = {name: norms for name, norms in liger.items() if name.endswith(("causal", "scalar"))}
    assert len(found) == 18
    assert {name for name, norms in found.items() if norms != ["LigerRMSNorm.forward"]} == set()


def test_a_model_of_transformers_own_layers_can_be_built_after_liger(liger) -> None:
    assert liger["qwen3 built later"] == ["LigerRMSNorm.forward"]
    assert liger["qwen3 of its own layers"] == ["Qwen3RMSNorm.forward"]
    assert liger["rope"] == ["transformers.models.qwen3.modeling_qwen3"]


def _garbage_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """A grouped product whose weight gradient is NaN where an expert has no rows."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, weight):
            ctx.save_for_backward(rows, weight)
            return torch.cat([r @ w for r, w in zip(rows.split(sizes), weight)])

        @staticmethod
        def backward(ctx, grad):
            rows, weight = ctx.saved_tensors
            parts = zip(rows.split(sizes), grad.split(sizes))
            grads = [r.T @ g if len(r) else torch.full_like(weight[0], torch.nan) for r, g in parts]
            return None, torch.stack(grads)

    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return Product.apply(rows, weight)


def test_experts_without_tokens_get_no_gradient_on_blackwell(monkeypatch) -> None:
    from transformers.integrations import moe

    from spmdrl.model.transformers_internals import grouped_linear, zero_idle_experts

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", _garbage_mm, raising=False)
    monkeypatch.setattr(moe, "_grouped_mm", moe._grouped_mm)  # to have it back
    weight, rows = torch.randn(4, 5, 3, requires_grad=True), torch.randn(6, 3)
    offsets = torch.tensor([2, 2, 6, 6], dtype=torch.int32)
    grouped_linear(rows, weight, offsets).sum().backward()
    assert weight.grad[[1, 3]].isnan().all(), "the stand-in no longer shows the fault"
    weight.grad = None
    zero_idle_experts()
    zero_idle_experts()  # a second model in the process
    grouped_linear(rows, weight, offsets).sum().backward()
    assert (weight.grad[[1, 3]] == 0).all()
    expected = torch.stack([rows[:2].sum(0), rows[2:].sum(0)])[:, None].expand(2, 5, 3)
    torch.testing.assert_close(weight.grad[[0, 2]], expected)


@pytest.mark.parametrize("capability, is_so", [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_that_is_done_on_blackwell_alone(monkeypatch, capability, is_so) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert layout._is_blackwell(CUDA) == is_so
    assert not layout._is_blackwell(torch.device("cpu"))


# --------------------------------------------------------------------------- memory


def test_pinned_memory_is_exact_where_it_is_taken_once() -> None:
    exact = [
        w for w in ("none", "activations", "optimizer", "all", "parameters") if pins_exactly(w)
    ]
    assert exact == ["optimizer", "parameters"]
    with (
        mock.patch.object(layout, "pin_exactly") as pin,
        mock.patch.object(layout.recompute, "check_offload"),
    ):
        layout.give_storage(torch.nn.Linear(2, 2, device="meta"), "optimizer", device=META)
    pin.assert_called_once()


@pytest.mark.parametrize(
    "before, after",
    [
        ("", "pinned_max_round_threshold_mb:1"),
        ("max_split_size_mb:64", "max_split_size_mb:64,pinned_max_round_threshold_mb:1"),
        ("pinned_max_round_threshold_mb:7", None),
    ],
)
def test_the_users_allocator_settings_stay(monkeypatch, before: str, after: str | None) -> None:
    made = []
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: before)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    pin_exactly()
    assert made == ([] if after is None else [after])


def test_a_torch_that_cannot_pin_exactly_says_so(monkeypatch, caplog) -> None:
    def refuse(settings: str) -> None:
        raise ValueError("Unrecognized key")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    with caplog.at_level(logging.WARNING):
        pin_exactly()
    assert "rounded up to powers of 2: Unrecognized key" in caplog.text


def _deterministic(cfg: Config) -> tuple[bool, bool]:
    from spmdrl.world.world import World

    world = World.start(cfg)
    found = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    world.close()
    return found, fills


def test_deterministic_runs_do_not_fill_new_memory() -> None:
    cfg = Config(layout=LayoutSettings(device="cpu", world_size=1, placement="offline"))
    assert run_ranks(1, _deterministic, _replaced(cfg, deterministic=True)) == [(True, False)]


def _replaced(cfg: Config, **changes: object) -> Config:
    from dataclasses import replace

    return replace(cfg, **changes)


# --------------------------------------------------------------------------- waits


@pytest.mark.parametrize(
    "error, is_peers",
    [
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("[unbound_buffer.cc:81] Timed out waiting 4000ms for recv"), True),
        (dist.DistBackendError("ncclRemoteError: a remote process has exited"), True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (dist.DistStoreError("wait timeout after 300000ms"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 3."), True),
        (dist.DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"), False),
        (dist.DistBackendError("ncclUnhandledCudaError: CUDA error: out of memory"), False),
        (dist.DistBackendError("ncclSystemError: System call (e.g. socket, malloc) failed"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("CUDA error: peer access is not supported between these devices"), False),
        (RuntimeError("shape '[4]' is invalid for input of size 5 in the store"), False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_only_what_peers_cause_is_said_of_peers(error: Exception, is_peers: bool) -> None:
    assert watch.is_peer_error(error) == is_peers


def test_a_wait_may_have_a_deadline_of_its_own(monkeypatch) -> None:
    died = []
    monkeypatch.setattr(Watch, "_die", lambda self, why: died.append(why))
    one = Watch(dist.HashStore(), rank=0, world_size=1, timeout_s=0.1)
    with one.wait("checkpoint", 3, timeout_s=60.0):
        one.closed.wait(1.3)  # the thread looks once a second
    assert not died
    with one.wait("exchange", 3):
        one.closed.wait(1.3)  # the thread looks once a second
    one.close()
    assert died and died[0] == "deadline of 0 s passed"


def test_a_save_that_is_waited_for_has_its_own_deadline() -> None:
    from spmdrl.checkpoint import Checkpointer

    cfg, waits = Config(), []

    class Waited(Exception):
        pass

    def wait(name: str, step: int, *, timeout_s: float | None = None) -> None:
        waits.append((name, timeout_s))
        raise Waited

    def gather(own: object, *, wait: str, step: int, timeout_s: float | None) -> None:
        waits.append((wait, timeout_s))
        raise Waited

    watch = SimpleNamespace(wait=wait)
    saver = Checkpointer(cfg, SimpleNamespace(watch=watch, gather=gather, rank=1))
    saver._pending = SimpleNamespace(step=4, written=Future())
    saver._pending.written.set_result({})
    for settle in (saver.finish, saver._settle):
        with pytest.raises(Waited):
            settle()
    assert waits == [("write checkpoint", cfg.checkpoint.write_timeout_s), ("checkpoint", None)]


@pytest.mark.parametrize("own", [{}, {"VLLM_CACHE_ROOT": "/mine"}])
def test_what_ranks_compile_stays_on_their_node(tmp_path, own: dict[str, str]) -> None:
    (tmp_path / "train.py").touch()
    script = f'source {ROOT}/slurm/attempt.sh; echo "$VLLM_CACHE_ROOT $TRITON_CACHE_DIR"'
    job = {"SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n"}
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=job | {"PATH": "/usr/bin:/bin", "TMPDIR": "/scratch", "PYTHON": "bash"} | own,
        capture_output=True,
        text=True,
        check=True,
    )
    vllm, triton = run.stdout.splitlines()[-1].split()
    assert triton.startswith("/scratch/spmdrl-cache-")
    assert vllm == own.get("VLLM_CACHE_ROOT", triton.replace("triton", "vllm"))
