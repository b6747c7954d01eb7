"""What vLLM must not do to the process that it lives in, shown on its CPU build."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spmdrl.check.settings import validate
from spmdrl.config import Config, EngineSettings, LayoutSettings, ModelSettings, MoeSettings
from spmdrl.engine.protocol import Request
from spmdrl.engine.vllm import internals
from spmdrl.engine.vllm.engine import VllmEngine
from tests.engine.test_engine import PROMPTS, draw, engine_config
from tests.gpu.fake_llm import FakeLlm
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def _randomness() -> tuple[object, ...]:
    return random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def _twice(cfg: Config) -> dict[str, Any]:
    """Build two engines one after the other, and close both."""
    import torch.distributed as dist

    from spmdrl.engine import make_engine
    from spmdrl.world.world import World

    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    found: dict[str, Any] = {"drawn": [], "is_up": [], "reloaded_in_config": [], "is_same": []}
    world = World.start(cfg)
    for _ in range(2):
        before = _randomness()
        engine = make_engine(cfg, world)
        found["is_same"].append(_randomness() == before)
        if world.is_inference:
            found["drawn"].append({k: c.tokens for k, c in draw(engine, (0, 1, 2)).items()})
            engine.reload_weights(_watched(found, cfg.model.path))
        engine.close()
        found["is_up"].append(dist.is_initialized())
        dist.barrier(group=world.control)
        dist.all_reduce(torch.ones(1))  # by the group of all ranks itself
    world.close()
    return found


def _watched(found: dict[str, Any], folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors; note whether vLLM has a current configuration meanwhile."""
    from vllm.config import get_current_vllm_config_or_none

    for pair in load_file(f"{folder}/model.safetensors").items():
        found["reloaded_in_config"].append(get_current_vllm_config_or_none() is not None)
        yield pair


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory) -> dict[str, Any]:
    """What vLLM decides where it believes in GPUs; see cuda_vllm.py."""
    folder = tmp_path_factory.mktemp("on_gpus")
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.cuda_vllm", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_the_runner_of_gpus_gets_what_it_needs_for_each_model_and_option(on_gpus):
    found = on_gpus["configurations"]
    assert len(found) == 25
    for name, made in found.items():
        case = name.split()[1]
        assert made["v2"], name
        assert made["autotune"] == case.startswith("tuned"), name  # only where it was asked for
        assert made["moe_backend"] == ("auto" if case == "tuned" else "triton"), name
        # With routes, or weights that change between two tokens, no step may be under way.
        assert made["async"] == (case not in ("replay", "in_flight")), name
        assert made["routes"] == (case == "replay"), name
        assert made["sleeps"] == (case == "colocated"), name
        assert made["graphs"] == ("NONE" if case == "eager" else "FULL_AND_PIECEWISE"), name
        assert made["chunked"] and made["logprobs"] == "processed_logprobs", name


@pytest.mark.parametrize("has_custom", [True, False])
def test_every_rank_makes_vllms_groups_and_only_engines_open_communicators(on_gpus, has_custom):
    ranks = on_gpus["groups"][str(has_custom)]
    assert len(ranks) == 4 and ranks[0]["made"]
    assert all(rank["made"] == ranks[0]["made"] for rank in ranks)
    assert not any(rank["splits"] for rank in ranks)
    assert {timeout for _, _, timeout in ranks[0]["made"]} == {99.0}
    assert [rank["opened"] for rank in ranks[:2]] == [[], []], "trainers hold nothing of vLLM's"
    for rank in ranks[2:]:
        assert ("custom" in rank["opened"]) == has_custom
        assert {"pynccl", "symm_mem"} <= set(rank["opened"])


def test_vllm_does_not_have_triton_print_what_the_trainer_tunes(on_gpus):
    assert on_gpus["prints_tuning"] is False


def test_threads_are_as_many_as_before_vllm(on_gpus):
    assert on_gpus["threads"] == {"asked": "3", "compile": 3, "torch": 5}


def _drawn_seeds(monkeypatch, path: Path, *, seed: int, replica: int) -> list[int | None]:
    """Return the seeds with which an engine that seeds by numpy is asked for three samples."""
    llm = FakeLlm(torch.nn.Module())
    monkeypatch.setattr(internals, "make_llm", lambda arguments: llm)
    engine = object.__new__(VllmEngine)
    engine.cfg = Config(seed=seed, model=ModelSettings(path=str(path)))
    engine.world = SimpleNamespace(replica=replica, replica_rank=0)
    engine.version, engine._slot, engine._seeds = 0, None, None
    engine._build({}, on_cpu=False)
    for own in (None, 7, None):
        engine.add(Request("k", (1, 2), max_tokens=3, temperature=1.0, seed=own, stop_token_ids=()))
    return [request.sampling_params.seed for request, _ in llm.engine_core.requests.values()]


def test_requests_without_a_seed_get_one_that_the_ranks_share(monkeypatch, tiny_model):
    drawn = partial(_drawn_seeds, monkeypatch, tiny_model)
    first = drawn(seed=1, replica=0)
    np.random.seed(99)  # whatever the process has drawn meanwhile
    assert first == drawn(seed=1, replica=0)
    assert first[1] == 7 and None not in first and first[0] != first[2]
    for seed, replica in ((1, 1), (2, 0)):
        other = drawn(seed=seed, replica=replica)
        assert not {first[0], first[2]} & {other[0], other[2]}


@pytest.fixture(scope="module")
def engines_twice(tiny_model) -> list[dict[str, Any]]:
    cfg = engine_config(str(tiny_model), placement="split", world_size=2, trainer_ranks=1)
    return run_ranks(2, _twice, cfg)


def test_closing_an_engine_leaves_the_group_of_all_ranks(engines_twice):
    assert [found["is_up"] for found in engines_twice] == [[True, True]] * 2


def test_a_second_engine_draws_what_the_first_drew(engines_twice):
    first, second = engines_twice[1]["drawn"]
    assert first == second and len(first) == len(PROMPTS)


def test_building_vllm_leaves_the_generators_of_the_process_alone(engines_twice):
    assert [found["is_same"] for found in engines_twice] == [[True, True]] * 2


def test_a_reload_knows_the_engines_own_configuration(engines_twice):
    seen = engines_twice[1]["reloaded_in_config"]
    assert seen and all(seen)


def test_options_that_would_hang_or_crash_on_gpus_are_refused():
    split = {"device": "cuda", "world_size": 4, "trainer_ranks": 2}

    def problems(options: dict[str, Any], *, replay: bool = False, **layout: Any) -> str:
        cfg = Config(
            layout=LayoutSettings(**(split | layout)),
            engine=EngineSettings(options=options),
            model=ModelSettings(moe=MoeSettings(replay=replay)),
        )
        return "\n".join(validate(cfg))

    for tuned in (
        {"enable_flashinfer_autotune": True},
        {"kernel_config": {"enable_flashinfer_autotune": True}},
    ):
        found = problems(tuned)
        assert "enable_flashinfer_autotune: true with layout.placement split" in found
        assert "autotune" not in problems(tuned, placement="colocated")
    assert "model.moe.replay" not in problems({}, replay=True, inference_tp=2)
    assert "is set by model.moe.replay" in problems({"enable_return_routed_experts": True})


# --------------------------------------------------------------------------- determinism


def test_deterministic_algorithms_are_off_in_vllm_alone(monkeypatch):
    seen = []

    def step(*_: Any) -> list[Any]:
        seen.append(torch.are_deterministic_algorithms_enabled())
        if len(seen) == 3:
            raise RuntimeError("a step fails")
        return []

    engine: Any = VllmEngine.__new__(VllmEngine)
    engine.version = 0
    engine._outputs = SimpleNamespace(step=step)
    monkeypatch.setattr(internals, "reload_weights", step)
    engine._llm = None
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for kind in ("cpu", "cuda"):
            engine.world = SimpleNamespace(device=torch.device(kind))
            engine.step()
            assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError):
            engine.reload_weights([])
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert seen == [True, False, False]
