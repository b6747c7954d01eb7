"""Every function with lines that only CUDA reaches: which test executes them, or which part of
`make gpu`; the table in cuda_lines.md is complete."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.parts import PARTS
from spmdrl.checkpoint.state import rng_state, set_rng_state
from spmdrl.config import Config, ProfileSettings, ReportSettings
from spmdrl.model.decode_reads import device_bandwidth
from spmdrl.model.flops import device_peak_flops
from spmdrl.report.profile import StepProfiler
from spmdrl.report.provenance import describe_environment
from spmdrl.same_run.made_of import device_name
from spmdrl.sync.negotiation import link_of
from spmdrl.world.machine.live_bytes import free_bytes, peak_bytes
from tests.gpu.cuda_lines import BY_NATURE, functions, places, table
from tests.gpu.fake_cuda import DEVICE, NAME

ROOT = Path(__file__).parents[2]


def test_the_table_of_lines_that_only_cuda_reaches_is_complete():
    assert sorted(table()) == sorted(functions())
    assert sum(len(table()[name]) > 0 for name in BY_NATURE) == len(BY_NATURE)


def test_statements_after_a_condition_on_the_cpu_are_found():
    found = {f"{place.file}:{place.function}": place.text for place in places()}
    assert "engine/vllm/records.py:_ReturnedMasks.add" in found  # by `if on_cpu: return`
    assert found["engine/vllm/records.py:make_mask_recorder"].startswith("_ReturnedMasks(")
    assert found["train/adamw.py:AdamW.step"].startswith("torch.cuda.synchronize")
    assert not any(name.startswith("engine/vllm/records.py:_Slot") for name in found)


def test_what_the_table_names_exists():
    parts = {part.name for part in PARTS}
    for function, reached in table().items():
        assert reached, f"nothing reaches {function}"
        for one in reached:
            if "::" in one:
                file, _, test = one.partition("::")
                text = (ROOT / "tests" / f"{file}.py").read_text()
                assert f"def {test}(" in text, f"{function}: no {one}"
            else:
                assert one in parts, f"{function}: no part {one} of make gpu"


def test_a_certificate_names_the_gpu(gpu):
    assert device_name(DEVICE) == NAME
    assert device_name(torch.device("cpu")) == "cpu"


def test_generators_of_the_gpu_are_kept_and_restored(gpu):
    state = rng_state()
    assert state["cuda"].tolist() == [7]
    set_rng_state(state)
    assert gpu.called == ["set_rng_state [7]"]


def test_memory_is_asked_of_the_device_when_it_is_done(gpu):
    with peak_bytes(DEVICE) as peak:
        gpu.called.append("work")
    assert peak.bytes == 700 - 100
    assert gpu.called == ["synchronize", "reset_peak_memory_stats", "work", "synchronize"]
    assert free_bytes(DEVICE) == 1000 - (1000 - 300)
    assert gpu.called[-2:] == ["synchronize", "empty_cache"]


def test_rates_of_a_known_gpu_are_taken(gpu, monkeypatch):
    assert device_peak_flops(DEVICE, dtype="bfloat16") == 989e12
    assert device_peak_flops(DEVICE, dtype="float32") is None
    world = SimpleNamespace(wire=DEVICE, device=DEVICE, world_size=1, cfg=Config())
    h100 = link_of(world)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L4")
    assert device_peak_flops(DEVICE, dtype="bfloat16") is None
    a100 = link_of(world)  # the careful guess for what is not listed
    assert a100 != h100


def test_the_bandwidth_of_a_known_gpu_is_taken(gpu, monkeypatch):
    assert device_bandwidth(DEVICE) == 3.35e12
    assert device_bandwidth(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L4")
    assert device_bandwidth(DEVICE) is None


def test_a_profile_traces_the_gpu_too(gpu, monkeypatch):
    made = mock.Mock()
    monkeypatch.setattr("spmdrl.report.profile.profile", made)
    cfg = Config(report=ReportSettings(profile=ProfileSettings(steps=(3,), ranks=(0,))))
    profiler = StepProfiler(cfg, SimpleNamespace(rank=0, watch=mock.Mock()))
    profiler.begin(2)
    assert not made.called
    profiler.begin(3)
    assert ProfilerActivity.CUDA in made.call_args.kwargs["activities"]


def test_a_run_records_the_gpus_it_had(gpu):
    assert NAME in str(describe_environment())
