"""Colocated engines lend their memory to the update: it goes, it comes back, nothing changes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmdrl.config import Config
from spmdrl.engine.handover import Handover
from spmdrl.engine.protocol import Request
from tests.helpers.built import changed, generating, made, small_model
from tests.helpers.policy_runs import batch, update
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, metrics, run

PROMPTS = [tuple(range(10, 10 + n)) for n in (1, 14, 7, 7, 3)]


def _config(
    where: Path, *, world_size: int = 1, cache_gib: float = 0.02, **engine: object
) -> Config:
    model = small_model(where / "model", hidden_size=64, heads=2, kv_heads=1)
    patience = dict(startup_timeout_s=300, wait_timeout_s=200)
    own = dict(kind="transformers", dtype="float32", max_num_seqs=1000, cpu_kv_cache_gib=cache_gib)
    return made(
        output_dir=str(where / "run"),
        steps=10,
        layout=dict(placement="colocated", world_size=world_size, device="cpu") | patience,
        model=dict(path=str(model), compute_dtype="float32"),
        data=dict(max_prompt_tokens=16),
        sampling=dict(max_response_tokens=16),
        batch=dict(tokens_per_microbatch=64),
        optimizer=dict(lr=1e-2),
        engine=own | engine,
    )


def _drawn(engine: object) -> list[tuple]:
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(str(index), prompt, 16, 1.0, index, ()))
    done = {}
    while engine.is_busy:
        done |= {c.key: (c.tokens.tolist(), c.logprobs.tolist()) for c in engine.step()}
    return [done[str(index)] for index in range(len(PROMPTS))]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ------------------------------------------------------------------ the engine


def _touch(engine: object) -> None:
    """Write to all of the cache: only then does the host give pages."""
    for layer in engine._runner.cache.layers.values():
        for part in layer:
            part.fill_(1.0)


def _sleep(cfg: Config) -> dict:
    with generating(cfg) as (_, engine):
        before = _drawn(engine)
        _touch(engine)
        addresses = [p.data_ptr() for p in engine.model.parameters()]
        held, resident, cache = engine.held_bytes(), _resident(), engine._runner.cache.nbytes
        engine.sleep(keeps_weights=False)
        freed = {"counted": held - engine.held_bytes(), "resident": resident - _resident()}
        engine.wake("weights")
        assert held - engine.held_bytes() == freed["counted"]
        engine.wake("cache")
        assert engine.held_bytes() == held
        assert addresses == [p.data_ptr() for p in engine.model.parameters()]
        same = _drawn(engine) == before
    return freed | {"cache": cache, "same": same}


def test_a_sleeping_engine_frees_its_cache_and_draws_alike_after(tmp_path):
    (found,) = run_ranks(1, _sleep, _config(tmp_path, cache_gib=0.1, max_num_seqs=10**5))
    assert found["cache"] > 0.09 * 2**30 and found["counted"] == found["cache"]
    assert found["resident"] > 0.9 * found["cache"], "the host has the memory again"
    assert found["same"]


# ------------------------------------------------------------------ in the loop


def _steps(cfg: Config, sleeps: bool) -> dict:
    from spmdrl.engine import handover
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream

    drawn, pushed, levels, text = [], [], [], ""
    with generating(cfg) as (world, engine):
        trainer = make_trainer(cfg, world)
        monkeypatch = pytest.MonkeyPatch()
        if not sleeps:
            monkeypatch.setattr(type(engine), "can_sleep", False)
        stream = WeightStream(trainer.weights, engine, world)
        for step in range(3):
            if step:
                drawn.append(_drawn(engine))
            if sleeps:
                if step:
                    engine.lend_memory()
                engine.lend_memory()  # asleep already
                levels.append(engine.held_bytes())
            if step:
                update(trainer, batch(world.dp_index(world.rank), world.dp_size), step=step)
            pushed.append(stream.push(version=step))
            levels.append(engine.held_bytes())
        engine.add(Request("left", PROMPTS[1], 16, 1.0, 7, ()))
        engine.step()
        engine.lend_memory()
        awake = engine.held_bytes() == levels[-1] and bool(engine.step() is not None)
        while engine.is_busy:
            engine.step()
        assert stream.push(version=9).keys() == {"sync/bytes", "sync/seconds", "sync/gb_per_s"}
        if sleeps:  # an engine that takes more each time it wakes
            handover.GROWTH_BYTES = handover.GROWTH_FRAC = 0
            engine.lend_memory()
            engine._num_slots += 5
            warned: list[str] = []
            monkeypatch.setattr(handover.log, "warning", lambda *w: warned.append(w[0] % w[1:]))
            stream.push(version=10)
            (text,) = warned
    return {"drawn": drawn, "pushed": pushed, "levels": levels, "awake": awake, "text": text}


def test_samples_are_the_same_and_every_push_says_what_came_back(tmp_path):
    cfg = _config(tmp_path, world_size=2)
    for _rank, (slept, awake) in enumerate(
        zip(run_ranks(2, _steps, cfg, True), run_ranks(2, _steps, cfg, False))
    ):
        assert slept["drawn"] == awake["drawn"] and len(slept["drawn"]) == 2
        down, up = slept["levels"][::2], slept["levels"][1::2]
        assert len(set(down)) == len(set(up)) == 1 and set(up) == set(awake["levels"])
        for sums in slept["pushed"]:
            assert sums["mem/engine_freed_gib"] == ((up[0] - down[0]) / 2**30, 1.0)
            assert sums["mem/after_wake_gib"] == (up[0] / 2**30, 1.0)
        assert not any("mem/engine_freed_gib" in sums for sums in awake["pushed"])
        assert slept["awake"], "with a request under way it stays awake"
        per_slot = 2 * 2 * 1 * 32 * 32 * 4  # layers, keys and values, heads, dim, tokens, float32
        assert slept["text"].startswith("memory grows: "), slept["text"]
        assert f"{5 * per_slot / 2**30:.3g} GiB more than the" in slept["text"]


def test_a_run_logs_what_its_engine_freed(tmp_path):
    flags = {
        "model.path": small_model(tmp_path / "start"),
        "engine.kind": "transformers",
        "layout.placement": "colocated",
        "lag": 1,
        "steps": 3,
        "output-dir": tmp_path / "run",
        "report.aliases": "verl",
    }
    run("demo_grpo.yaml", 2, **TINY["rl"] | flags)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3 and all(row["mem/engine_freed_gib"] > 0 for row in rows)
    assert len({row["mem/after_wake_gib"] for row in rows}) == 1


# ------------------------------------------------------------------ what is measured and kept


class _Sleeper:
    """An engine whose sleep drops the weights."""

    can_sleep = True
    is_busy = False
    sleep_hint = ""

    def __init__(self) -> None:
        with torch.inference_mode():
            self.weights = torch.ones(4, 3)
        self.measured = 0
        self._held = 10

    def held_bytes(self) -> int:
        self.measured += 1
        return self._held

    def sleep(self, *, keeps_weights: bool) -> None:
        self._held = 0
        with torch.inference_mode():
            self.weights.fill_(torch.nan)

    def wake(self, part: str) -> None:
        self._held = 10


def _handover(engine: _Sleeper, constants: list[torch.Tensor]) -> Handover:
    cfg = made(layout=dict(placement="colocated"))
    return Handover(engine, SimpleNamespace(cfg=cfg, is_inference=True), constants=constants)


def test_constants_of_the_loader_are_written_again():
    engine = _Sleeper()
    own = _handover(engine, [engine.weights[3:]])
    own.release(keeps_weights=False)
    own.wake_weights()
    assert engine.weights.isnan().sum(1).tolist() == [3, 3, 3, 0]
    assert engine.weights[3].tolist() == [1, 1, 1]


def test_memory_is_measured_at_the_first_wakes_and_at_few_later():
    engine = _Sleeper()
    own = _handover(engine, [])
    measured = []
    for wake in range(102):
        own.release(keeps_weights=False)
        own.wake_weights()
        if own.wake_cache():
            measured.append(wake)
    assert measured == [0, 1, 2, 3, 4, 50, 100]
    assert engine.measured == 3 * len(measured)


# ------------------------------------------------------------------ vLLM


def _vllm(cfg: Config) -> dict:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("spmdrl").addHandler(handler)
    logging.getLogger("spmdrl").setLevel(logging.INFO)
    with generating(cfg) as (world, engine):
        held, own = engine.held_bytes(), Handover(engine, world)
        own.release(keeps_weights=False)
        own.wake_weights()
        return {
            "can_sleep": engine.can_sleep,
            "held": held,
            "same": engine.held_bytes() == held,
            "sums": own.wake_cache(),
            "drawn": len(_drawn(engine)),
            "log": records,
        }


def test_vllm_on_the_cpu_stays_awake_and_says_so(tmp_path):
    pytest.importorskip("vllm")
    cfg = _config(tmp_path, kind="vllm", max_num_seqs=8)
    (found,) = run_ranks(1, _vllm, cfg)
    assert not found["can_sleep"] and found["same"] and found["sums"] == {}
    assert found["held"] > 0.02 * 2**30 * 0.9 and found["drawn"] == len(PROMPTS)
    assert any("vLLM has no sleep mode on the CPU" in line for line in found["log"])


def test_what_modules_hold_without_registering_it_is_found(tmp_path, monkeypatch):
    from spmdrl.engine.vllm.internals import unregistered_tensors

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("scale", torch.ones(1))
    layer.range, layer.parts, layer.again = torch.ones(1), [torch.ones(2), 3], layer.weight.data
    layer.kv_cache, layer.shared = [torch.ones(8)], layer.scale
    layer.also = layer.range
    found = unregistered_tensors(torch.nn.Sequential(layer))
    assert [id(t) for t in found] == [id(layer.range), id(layer.parts[0]), id(layer.again)]


# ------------------------------------------------------------------ the planner


def test_the_planner_lends_memory_from_role_to_role():
    from transformers import AutoModelForCausalLM

    from spmdrl.model.model_shape import model_shape
    from spmdrl.tools.plan.run import rates_of, run_of
    from spmdrl.tools.plan.search import make_plan
    from spmdrl.world.axes import Axes
    from tests.helpers.plan_runs import run_config, tiny_config

    shape = model_shape(AutoModelForCausalLM.from_config(tiny_config("llama")))
    cfg = run_config("m", "o", world_size=1)
    prompts = {"prompts_per_step": 2**12}  # more than fit at once
    cfg = changed(cfg, engine=dict(kind="vllm", gpu_memory_frac=0.6), batch=prompts)

    def planned(**engine: object):
        own = changed(cfg, engine=engine)
        run = run_of(own, shape, on_gpu=True, chunk_tokens=64, prompt_tokens=20, response_tokens=80)
        return make_plan(run, Axes("colocated", 1, 1), rates=rates_of("H100", memory_gib=6))

    asleep, awake = planned(), planned(options={"enable_sleep_mode": False})
    assert asleep.most_tokens > 1.5 * awake.most_tokens
    assert asleep.engine.total == awake.engine.total
    assert asleep.engine.resting == 2**30 and awake.engine.resting == awake.engine.total
    full = planned(gpu_memory_frac=0.97)
    assert any("lower engine.gpu_memory_frac" in problem for problem in full.problems)
