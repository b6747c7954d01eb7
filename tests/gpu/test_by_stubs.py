"""Single statements that only CUDA reaches, with a stub of what is around them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.certificate import digests
from spmdrl.config import OptimizerSettings
from spmdrl.engine.transformers.engine import TransformersEngine
from spmdrl.engine.transformers.runner import ModelRunner
from spmdrl.engine.vllm.arguments import engine_arguments
from spmdrl.errors import Refusal
from spmdrl.model import head
from spmdrl.model.attention.kernels import KERNELS
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.lora.expert_adapters import counts
from spmdrl.model.parallel import layout
from spmdrl.report.derived_metrics import derived_sums
from spmdrl.train import adamw
from spmdrl.train.microbatch_size import SizeProbe
from spmdrl.world import microbatch_tokens, torch_internals, world
from spmdrl.world.launch import Launch
from tests.gpu.fake_cuda import DEVICE
from tests.helpers.built import made

CPU, META = torch.device("cpu"), torch.device("meta")


class Reached(Exception):
    """The statement after those that are looked at."""


def stop(*args: Any, **options: Any) -> Any:
    raise Reached


# --------------------------------------------------------------------------- sums and counts


def test_sums_of_words_on_a_gpu_are_those_of_the_cpu(monkeypatch) -> None:
    words = torch.randint(-(2**62), 2**62, (5, digests._WORDS))
    weights = digests.odd_weights(0, digests._WORDS, dim=0, device=CPU)
    ways = (digests._sums_by_numpy, digests._sums_by_torch)
    ours, theirs = (way(words, weights, room=torch.empty_like(words)) for way in ways)
    assert torch.equal(ours, theirs)
    monkeypatch.setitem(digests._CHUNK, "meta", 2**12)
    pieces = [torch.empty(n, dtype=torch.bfloat16, device=META) for n in (4 * digests._WORDS,) * 3]
    assert digests._block_sums(pieces).shape == (3,)


def test_experts_are_counted_as_integers_off_the_cpu() -> None:
    chosen = torch.tensor([0, 2, 2, 9], device=META)
    with mock.patch.object(torch, "histc", lambda x, **_: x):
        assert counts(chosen, 4).dtype == torch.int32
        assert counts(torch.tensor([1]), 4).dtype == torch.float32


@pytest.mark.parametrize("device, is_one", [(META, True), (CPU, False)])
def test_16_bit_products_are_added_in_float32_by_one_kernel_on_gpus(device, is_one) -> None:
    total = torch.zeros(4, 3, device=device)
    left, right = (
        torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((4, 2), (2, 3))
    )
    with mock.patch.object(torch, "addmm") as addmm:
        head._add_product(total, left, right)
    options = dict(out_dtype=torch.float32, out=total)
    assert addmm.call_args_list == [mock.call(total, left, right, **options)] * is_one


# --------------------------------------------------------------------------- engines


def test_the_transformers_engine_has_the_room_that_gpus_have(gpu) -> None:
    gpu.total = 1000
    gpu.taken = lambda: 400
    runner = object.__new__(ModelRunner)
    runner._device, runner._longest = DEVICE, 10
    runner.cache = SimpleNamespace(nbytes=5, state_bytes=0)
    runner._packing_support = SimpleNamespace(mixers=(), states={}, repeated=())
    runner._cfg = made(engine=dict(gpu_memory_frac=0.8))
    assert runner._fitting_slots(10) == (800 - 400) // 50
    runner._cfg = made(engine=dict(gpu_memory_frac=0.4))
    with pytest.raises(Refusal, match=r"engine.gpu_memory_frac: 0.4 leaves 0 bytes"):
        runner._fitting_slots(10)
    engine = object.__new__(TransformersEngine)
    engine.world = SimpleNamespace(device=DEVICE)
    assert engine.held_bytes() == 400


def test_truncated_samples_come_with_their_masks_on_gpus_alone() -> None:
    cfg = made(sampling=dict(top_p=0.9))
    on_gpu, on_cpu = (engine_arguments(cfg, on_cpu=on_cpu) for on_cpu in (False, True))
    assert on_gpu["return_sampling_mask"]
    assert "return_sampling_mask" not in on_cpu


# --------------------------------------------------------------------------- attention


@pytest.mark.parametrize("window, passed", [(None, (-1, -1)), (6, (5, 0))])
def test_flash_attention_gets_what_attention_is_asked_for(monkeypatch, window, passed) -> None:
    seen: dict[str, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, *ends: Any, **options: Any) -> Tensor:
        seen.update(options, ends=ends, width=v.shape[-1])
        return torch.zeros_like(q)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = attend
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q, k = (torch.zeros(1, heads, 7, 64, dtype=torch.bfloat16) for heads in (4, 2))
    packing = make_packing((3, 4), CPU, padded=False)
    own = SimpleNamespace(is_causal=True, mask_pattern=MaskPattern(window))
    out, _ = KERNELS["flash"](own, q, k, k[..., :32], None, packing=packing, softcap=30.0)
    assert out.shape == (1, 7, 4, 32) and seen["width"] == 64
    assert seen["causal"] and seen["softcap"] == 30.0 and seen["window_size"] == passed
    ends, keys, *longest = seen["ends"]
    assert ends.tolist() == keys.tolist() == [0, 3, 7] and longest == [4, 4]


def test_the_varlen_kernel_of_an_older_torch_has_no_windows_and_no_groups(monkeypatch) -> None:
    from torch.nn.attention import varlen

    seen: dict[str, Any] = {}

    def varlen_attn(q, k, v, end_q, end_k, max_q, max_k, is_causal=False, scale=None):  # 2.11
        seen.update(is_causal=is_causal, heads=k.shape[1])
        return q

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    q, k = (torch.zeros(7, heads, 8) for heads in (4, 2))
    ends = (torch.tensor([0, 7]),) * 2
    options = dict(ends=ends, longest=(7, 7), scale=None)
    torch_internals.varlen(q, k, k, window=7, **options)  # a window that holds all tokens
    assert seen == {"is_causal": True, "heads": 4}
    with pytest.raises(Refusal, match=r"no sliding window and the model's is 6 tokens"):
        torch_internals.varlen(q, k, k, window=6, **options)


# --------------------------------------------------------------------------- the trainer


@pytest.mark.parametrize("has_tower", [False, True])
def test_liger_goes_into_models_on_gpus_but_not_beside_a_tower(
    monkeypatch, caplog, has_tower
) -> None:
    calls = []
    monkeypatch.setattr(layout, "experts_modules", lambda model: {})
    monkeypatch.setattr(layout, "has_vision_tower", lambda model: has_tower)
    monkeypatch.setattr(layout, "base_of", lambda model: ("model", "base"))
    monkeypatch.setattr(layout, "apply_liger", lambda *args, **options: calls.append(options))
    own = SimpleNamespace(device=DEVICE, mesh=mock.MagicMock())
    own.mesh.__getitem__.side_effect = stop
    cfg = made(
        model=dict(kernels=dict(liger=True), memory=dict(activation_checkpointing="selective"))
    )
    with pytest.raises(Reached):
        layout.lay_out(nn.Linear(1, 1), cfg, own, dtype=torch.bfloat16, temperature=1.0)
    assert calls == ([] if has_tower else [{"has_rope": False, "is_dense": True}])
    assert ("goes without liger's kernels" in caplog.text) == has_tower


@pytest.mark.parametrize("offload, is_pinned", [("parameters", True), ("optimizer", False)])
def test_offloaded_parameters_are_pinned(monkeypatch, offload, is_pinned) -> None:
    seen = []

    def shard(module: nn.Module, **options: Any) -> None:
        seen.append(options["offload_policy"])
        raise Reached

    monkeypatch.setattr(layout, "fully_shard", shard)
    monkeypatch.setattr(layout, "replicated", lambda mesh, axis: None)
    own = SimpleNamespace(sharding=mock.MagicMock(), experts=None)
    memory = made(model=dict(memory=dict(offload=offload))).model.memory
    with pytest.raises(Reached):
        layout.apply_fsdp(nn.Linear(1, 1), [], own, memory=memory, dtype=torch.bfloat16)
    assert getattr(seen[0], "pin_memory", False) == is_pinned


def test_moments_on_the_host_are_pinned_and_have_arrived_after_a_step(monkeypatch, gpu) -> None:
    pinned = []
    zeros = torch.zeros

    def allocate(*shape: Any, pin_memory: bool = False, device: Any = None, **own: Any) -> Tensor:
        pinned.append((pin_memory, str(device)))
        return zeros(*shape, **own)

    monkeypatch.setattr(torch, "zeros", allocate)
    parameters = {"w": nn.Parameter(torch.ones(3))}
    optimizer = adamw.AdamW(
        parameters, no_decay=set(), options=OptimizerSettings(), is_on_host=True, device=DEVICE
    )
    assert pinned[:2] == [(True, "cpu"), (True, "cpu")]
    work = lambda *_, **__: gpu.called.append("update")  # noqa: E731
    monkeypatch.setattr(optimizer, "_update", work)
    optimizer.step({"w": torch.ones(3)}, lr=0.1)
    assert gpu.called == ["update", "synchronize"]


def test_a_probe_of_sizes_leaves_the_generator_of_its_gpu_alone(gpu) -> None:
    probe = object.__new__(SizeProbe)
    probe._world = SimpleNamespace(device=DEVICE)
    probe._found = lambda shares: gpu.called.append(f"probe {shares}") or 256
    assert probe.find(3) == 256
    assert gpu.called == ["probe 3", "set_rng_state [7]"]


@pytest.mark.parametrize("device, shares", [(DEVICE, 1), (CPU, 2)])
def test_ranks_of_a_host_share_its_memory_but_not_their_gpus(monkeypatch, device, shares) -> None:
    found = []
    monkeypatch.setattr(microbatch_tokens, "gather_objects", lambda own, group: [own, own])
    monkeypatch.setattr(microbatch_tokens, "agree", lambda group: mock.MagicMock())
    own = SimpleNamespace(
        cfg=made(batch=dict(tokens_per_microbatch=0)),
        found_tokens=0,
        watch=mock.MagicMock(),
        control=None,
        device=device,
        rank=1,
        trainer_ranks=[0, 1],
    )
    microbatch_tokens.agree_on_tokens(own, lambda shares: found.append(shares) or 512)
    assert found == [shares] and own.found_tokens == 512


def test_a_step_reports_the_most_memory_of_its_gpu(gpu) -> None:
    gpu.most_allocated = 3 * 2**30
    sums = derived_sums({"perf/step_s": (1.0, 1.0)}, made(), peak_flops=None)
    assert sums["mem/cuda_gib"] == (3.0, 1)


# --------------------------------------------------------------------------- the world


def test_the_record_of_collectives_is_that_of_nccl(monkeypatch) -> None:
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda: b"nccl", raising=False)
    for backend, is_nccl in (("nccl", True), ("gloo", False)):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        assert (torch_internals.flight_record() == b"nccl") == is_nccl


def test_a_gpu_is_checked_before_the_ranks_meet(monkeypatch) -> None:
    seen: list[Any] = []
    launch = Launch(3, 4, 5, "127.0.0.1", 1, "torchrun")

    def join(cfg: Any, own: Launch, **_: Any) -> None:
        seen.append(own.local_rank)
        raise Reached

    monkeypatch.setattr(world, "find_launch", lambda cfg: launch)
    monkeypatch.setattr(world, "check_driver", lambda cfg: seen.append("driver"))
    monkeypatch.setattr(world, "pick_device", lambda cfg, local_rank: torch.device("cuda", 1))
    monkeypatch.setattr(world, "check_memory", lambda cfg, own, device: seen.append("memory"))
    monkeypatch.setattr(world, "warn_of_detours", lambda own: seen.append("detours"))
    monkeypatch.setattr(world, "_join", join)
    switch = mock.Mock()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switch)
    with pytest.raises(Reached):
        world.World.start(made())
    assert seen == ["driver", "memory", "detours", 1]  # with gloo, local rank 5 shares GPU 1
    assert switch.call_args_list == [mock.call(False)]


@pytest.mark.parametrize("backend, checks", [("nccl", ["own gpus"]), ("gloo", [])])
def test_ranks_compare_their_gpus_before_nccl_starts(monkeypatch, backend, checks) -> None:
    seen: list[str] = []
    monkeypatch.setattr(world, "pick_backend", lambda cfg: backend)
    monkeypatch.setattr(world, "meet", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(world, "SealedStore", mock.MagicMock())
    monkeypatch.setattr(world, "Watch", mock.MagicMock())
    monkeypatch.setattr(world, "check_own_gpus", lambda *_: seen.append("own gpus"))
    monkeypatch.setattr(world, "join_world", lambda *_, **__: seen.append("join"))
    launch = mock.MagicMock(rank=0, world_size=1)
    world._join(made(), launch, device=DEVICE, timeout=None)
    assert seen == [*checks, "join"]


class _OnGpu(torch.Tensor):
    """A tensor of the host that says that it is on a GPU."""

    device = torch.device("cuda", 0)


def test_changes_are_found_on_a_gpu_as_on_the_cpu():
    from spmdrl.sync.changes import _between, _differing

    kept = torch.arange(50, dtype=torch.int16)
    new = kept.clone()
    new[[3, 4, 49]] = -1
    found = _differing(new.as_subclass(_OnGpu), kept.as_subclass(_OnGpu))
    assert found.tolist() == _differing(new, kept).tolist() == [3, 4, 49]
    places = torch.tensor([3, 4, 49])
    assert _between(places.as_subclass(_OnGpu)).tolist() == _between(places).tolist() == [3, 0, 44]
