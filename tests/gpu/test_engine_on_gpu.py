"""The engine of vLLM where it believes in a GPU: its sleep, the memory it lends, what it returns.

vLLM itself is a stand-in (fake_llm.py). All else is what runs on a GPU: engine, handover, stream.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from spmdrl.columns import RouterRoutes
from spmdrl.config import Config
from spmdrl.engine import handover
from spmdrl.engine.protocol import Request, Truncation
from spmdrl.engine.vllm import internals, patches, records
from spmdrl.engine.vllm.core_loop import CoreLoop
from spmdrl.engine.vllm.engine import VllmEngine
from spmdrl.engine.vllm.outputs import Outputs
from spmdrl.engine.vllm.requests import GroupRequests
from spmdrl.sampling_masks import SamplingMasks
from tests.gpu.fake_cuda import DEVICE, FakeCuda
from tests.gpu.fake_llm import CACHE, CHOICES, LAYERS, WEIGHTS, FakeLlm, FakeModel, drawn, route
from tests.helpers.built import changed, made, small_model, started
from tests.helpers.comparing import full_parameters
from tests.helpers.policy_runs import own_batch, update
from tests.helpers.ranks import run_ranks

PROMPT = (7, 8, 9, 10)
SLEEPS = ["sleep 2", "wake_up weights", "wake_up kv_cache"]
"""Without reset_prefix_cache: vLLM empties that cache when it sleeps."""


def _request(key: str = "a", *, max_tokens: int = 3, **options: Any) -> Request:
    return Request(key, PROMPT, max_tokens, 1.0, 5, (), **options)


def _config(where: Path, **fields: Any) -> Config:
    model = small_model(where / "model", hidden_size=64, heads=2, kv_heads=1)
    cfg = made(
        output_dir=str(where / "run"),
        steps=10,
        layout=dict(placement="colocated", world_size=1, device="cpu", startup_timeout_s=300),
        model=dict(path=str(model), compute_dtype="float32"),
        data=dict(max_prompt_tokens=16),
        sampling=dict(max_response_tokens=16),
        batch=dict(tokens_per_microbatch=64),
        engine=dict(kind="vllm", dtype="float32"),
    )
    return changed(cfg, **fields)


# --------------------------------------------------------------------------- in the loop


@contextlib.contextmanager
def _on_gpu(cfg: Config, patch: pytest.MonkeyPatch) -> Any:
    """Yield the world, an engine that believes in a GPU, vLLM's stand-in and the stub of CUDA."""
    from transformers import AutoModelForCausalLM

    model = FakeModel(AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32))
    cuda = FakeCuda()
    made_with: dict[str, Any] = {}

    def make_llm(arguments: dict[str, Any]) -> FakeLlm:
        made_with.update(arguments)
        return FakeLlm(model, can_sleep=arguments["enable_sleep_mode"])

    def unregistered(model: nn.Module, find: Any = internals.unregistered_tensors) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return find(model)

    with started(cfg) as world:
        patch.setattr(internals, "prepare_process", lambda **asked: made_with.update(asked))
        patch.setattr(internals, "create_groups", lambda *_, **__: contextlib.ExitStack())
        patch.setattr(internals, "destroy_groups", lambda: None)
        patch.setattr(internals, "close_llm", lambda llm: cuda.called.append("close"))
        patch.setattr(internals, "make_llm", make_llm)
        patch.setattr(internals, "unregistered_tensors", unregistered)
        patch.setattr(internals, "wake_empties_cache", lambda: True)
        patch.setattr(patches, "patch_models", lambda: None)
        cuda.install(patch)
        own = VllmEngine(changed(cfg, layout=dict(device="cuda")), replace(world, device=DEVICE))
        llm = own._llm
        cuda.total = 10 * (WEIGHTS + CACHE)
        cuda.taken = lambda: llm.taken
        assert not made_with["on_cpu"] and own._seeds is not None
        yield world, own, llm, cuda
        own.close()
        assert cuda.called[-1] == "close"


def _weights(engine: VllmEngine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


def _loop(cfg: Config) -> dict[str, Any]:
    """Train three steps as train.py does; return what vLLM was asked, and what its tensors hold."""
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream

    found: dict[str, Any] = {"asked": [], "sums": [], "kept": [], "same": [], "drawn": []}
    with pytest.MonkeyPatch.context() as patch, _on_gpu(cfg, patch) as (world, engine, llm, cuda):
        trainer = make_trainer(cfg, world)
        before = engine.model.range.tolist(), engine.model.tables[0].tolist()
        stream = WeightStream(trainer.weights, engine, world)
        stream._world = replace(world, device=DEVICE)  # it waits for the device at a push's end
        for step in range(3):
            if step:
                engine.add(_request())
                while engine.is_busy:
                    found["drawn"] += [c.tokens.tolist() for c in engine.step()]
                engine.lend_memory()
                update(trainer, own_batch(world), step=step)
            asleep = all(w.isnan().all() for w in _weights(engine))
            cuda.called.clear()
            found["sums"].append(stream.push(version=step))
            found["waits"] = cuda.called[-1] == "synchronize" or cuda.called
            found["asked"].append([asleep, *llm.calls])
            llm.calls.clear()
            now = engine.model.range.tolist(), engine.model.tables[0].tolist()
            found["kept"].append(now == before)
            sent = full_parameters(trainer)
            own = dict(engine.model.inner.named_parameters())
            assert len(sent) == len(own)
            found["same"].append(all(torch.equal(own[name], sent[name]) for name in sent))
        engine.add(_request("cached"))
        while engine.is_busy:
            engine.step()
        for version in (5, 5, 6):
            engine.weights_changed(version)
        found["resets"] = [*llm.calls]
        llm.calls.clear()
        engine.add(_request("left"))
        engine.lend_memory()
        found["stays"] = [*llm.calls]
        engine.abort_all()
        found["scores"] = [score.tolist() for score in engine.score([PROMPT])]
        engine.lend_memory()
        llm.leaks = 2**30
        warned: list[str] = []
        patch.setattr(handover.log, "warning", lambda *w: warned.append(w[0] % w[1:]))
        stream.push(version=9)
        (found["grown"],) = warned
        llm.frees = False
        with pytest.raises(RuntimeError) as caught:
            engine.lend_memory()
        found["freed"] = str(caught.value)
        found["threads"] = cuda.threads
    return found


def test_a_sleeping_engine_gets_its_weights_and_unregistered_tensors_back(tmp_path):
    (found,) = run_ranks(1, _loop, _config(tmp_path))
    assert found["asked"] == [[True, *SLEEPS], [True, *SLEEPS], [True, *SLEEPS]]
    assert found["kept"] == found["same"] == [True] * 3
    assert found["waits"] is True
    for sums in found["sums"]:
        assert sums["mem/engine_freed_gib"] == ((WEIGHTS + CACHE) / 2**30, 1.0)
    assert found["drawn"] == [[drawn(PROMPT, i) for i in range(3)]] * 2
    assert found["resets"] == ["reset_prefix_cache"]  # the first time, since a request came
    assert found["stays"] == [], "with a request under way it stays awake"
    assert found["scores"] == [[0.0, -4.0, -4.5, -5.0]]
    assert found["grown"].startswith("memory grows: "), found["grown"]
    assert found["freed"].startswith("the engine sleeps, and 0 GiB more are in use")
    assert found["threads"] == {"MainThread"}


def _kept_weights(cfg: Config, vllm_empties: bool) -> list[Any]:
    """Sleep and wake an engine whose weights no push will write."""
    from spmdrl.engine.handover import Handover

    with pytest.MonkeyPatch.context() as patch, _on_gpu(cfg, patch) as (world, engine, llm, gpu):
        before = _weights(engine)
        patch.setattr(internals, "wake_empties_cache", lambda: vllm_empties)
        handover = Handover(engine, world)
        handover.release(keeps_weights=True)
        gpu.called.clear()
        handover.wake_weights()
        is_emptied = gpu.called == ([] if vllm_empties else ["empty_cache"])
        handover.wake_cache()
        is_same = all(map(torch.equal, before, _weights(engine)))
        return [is_emptied, is_same, *llm.calls]


class _Of24:
    def wake_up(self) -> None:
        return


class _Of32:
    def wake_up(self) -> None:
        torch.accelerator.empty_cache()


@pytest.mark.parametrize("own, expected", [(_Of24, False), (_Of32, True)])
def test_a_wake_of_vllm_that_empties_the_cache_is_known(own, expected, monkeypatch):
    module = SimpleNamespace(CuMemAllocator=own)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", SimpleNamespace(cumem=module))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    internals.wake_empties_cache.cache_clear()
    assert internals.wake_empties_cache() is expected
    internals.wake_empties_cache.cache_clear()


@pytest.mark.parametrize("vllm_empties", [True, False])
def test_weights_that_no_push_writes_are_kept_while_it_sleeps(vllm_empties, tmp_path):
    (found,) = run_ranks(1, _kept_weights, _config(tmp_path), vllm_empties)
    assert found == [True, True, "sleep 1", "wake_up weights", "wake_up kv_cache"]


# --------------------------------------------------------------------------- what it returns

WITH_EXPERTS = [1, 3, 4]


@pytest.fixture
def outputs(monkeypatch):
    """Return outputs that record routes and masks, and the stand-in that they step."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers = nn.ModuleList()
    for index in WITH_EXPERTS:
        layer = MoERunner.__new__(MoERunner)
        nn.Module.__init__(layer)
        layer.layer_name = f"model.layers.{index}.mlp.experts"
        layers.append(layer)
    llm = FakeLlm(layers, has_routes=True)
    cfg = made(model=dict(moe=dict(replay=True)), sampling=dict(top_p=0.9))
    return Outputs(CoreLoop(llm), llm, cfg, on_cpu=False, is_first=True), llm


def _add(outputs: Outputs, request: Request) -> None:
    samples = GroupRequests(outputs._loop, model_config=None, returns_masks=True)
    outputs.add(request, samples.add(request, salt="0", lora=None))


def _routes(count: int) -> list[Any]:
    """Routes of the first tokens, of the layers with experts alone."""
    return np.stack([route(position)[WITH_EXPERTS] for position in range(count)]).tolist()


CUT = {"truncation": Truncation(top_p=0.9)}


def test_returned_routes_and_masks_become_columns(outputs):
    own, _ = outputs
    _add(own, _request("cut", max_tokens=3, **CUT))
    _add(own, _request("whole", max_tokens=2))
    done = {c.key: c for _ in range(3) for c in own.step(4)}
    for key, count in (("cut", 3), ("whole", 2)):
        routes = RouterRoutes.of(done[key].extra_columns).rows
        assert routes.dtype == torch.int8 and routes.tolist() == _routes(len(PROMPT) + count - 1)
        assert done[key].versions.tolist() == [4] * count
    masks = SamplingMasks.of(done["cut"].extra_columns)
    assert len(masks) == 3
    assert SamplingMasks.of(done["whole"].extra_columns) is None
    assert len(WITH_EXPERTS) < LAYERS and routes.shape[-1] == CHOICES


def test_unfinished_requests_have_the_columns_of_what_was_computed(outputs):
    own, llm = outputs
    _add(own, _request("a", max_tokens=9, **CUT))
    _add(own, _request("b", max_tokens=9))
    own.step(0)
    own.weights_replaced(0)
    own.step(1)
    a, b = own.unfinished(1)
    for one in (a, b):
        assert one.tokens.tolist() == [drawn(PROMPT, 0), drawn(PROMPT, 1)]
        assert one.versions.tolist() == [0, 1] and not one.is_truncated
        assert RouterRoutes.of(one.extra_columns).rows.tolist() == _routes(len(PROMPT) + 1)
    assert len(SamplingMasks.of(a.extra_columns)) == 2
    assert SamplingMasks.of(b.extra_columns) is None
    assert [c.key for c in own.abort_all(1)] == ["a", "b"]
    assert not llm.engine_core.requests
    _add(own, _request("new", max_tokens=9))
    assert RouterRoutes.of(own.unfinished(1)[0].extra_columns) is None, "nothing was computed yet"


def test_missing_routes_are_an_error_that_names_the_request(outputs):
    own, llm = outputs
    llm.engine_core.loses_routes = True
    _add(own, _request("lost", max_tokens=1))
    with pytest.raises(RuntimeError, match=r"request lost: .* for 0 of its 4 tokens"):
        own.step(0)


def test_the_other_ranks_of_an_engine_are_asked_for_no_routes():
    llm = FakeLlm(nn.ModuleList())
    scheduler = llm.engine_core.engine_core.scheduler
    request = SimpleNamespace(request_id="a")
    with pytest.raises(AssertionError, match="worker output is missing a"):
        scheduler.aux_output_connector.take_output(request, None)  # as vLLM's worker has it there
    cfg = made(model=dict(moe=dict(replay=True)))
    own = Outputs(CoreLoop(llm), llm, cfg, on_cpu=False, is_first=False)
    assert scheduler.aux_output_connector is None
    _add(own, _request("a", max_tokens=1))
    (done,) = own.step(0)
    assert done.key == "a" and not done.extra_columns


def test_the_hooks_of_the_cpu_build_are_not_used(outputs, monkeypatch):
    _, llm = outputs
    for name in ("watch_routers", "watch_sampler", "SlotCache"):
        monkeypatch.setattr(records, name, None)  # a call would fail
    Outputs(
        CoreLoop(llm),
        llm,
        made(model=dict(moe=dict(replay=True)), sampling=dict(top_k=4)),
        on_cpu=False,
        is_first=True,
    )
