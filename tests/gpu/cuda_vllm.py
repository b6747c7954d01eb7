"""vLLM as it is on GPUs, in a process of its own without one: its configuration, its groups.

Run as `python -m tests.gpu.cuda_vllm FOLDER`, it prints as JSON what `facts` finds. vLLM's
platform is made to believe in eight H100 (compiled extensions are empty modules, torch.cuda answers
from a table), so that what vLLM decides for GPUs is decided here. Nothing is computed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

_EXTENSIONS = (
    "_C",
    "_moe_C",
    "_flashmla_C",
    "_qutlass_C",
    "_rocm_C",
    "cumem_allocator",
    "_vllm_fa",
)
_GIB = 2**30


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives modules without content in place of vLLM's CUDA extensions."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        last = name.rpartition(".")[2]
        is_one = name.startswith("vllm.") and last.startswith(_EXTENSIONS)
        return importlib.machinery.ModuleSpec(name, self) if is_one else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
            setattr(module, name, lambda *_: None)


class _Runtime:
    """The CUDA runtime library, which answers 0 to everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


def believe_in_gpus() -> None:
    """Have torch.cuda say that there are eight H100, and vLLM find its extensions."""
    sys.meta_path.insert(0, _Empty())
    gpu = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=80 * _GIB,
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
    )
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda device=None: (gpu.major, gpu.minor)
    torch.cuda.get_device_name = lambda device=None: gpu.name
    torch.cuda.get_device_properties = lambda device=None: gpu


def have_vllm_believe() -> None:
    """Have vLLM, which has found what it is built for, take the CUDA platform.

    Before anything else of it is imported: its modules take the platform as they load.
    """
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()
    from vllm.distributed.device_communicators import cuda_wrapper

    cuda_wrapper.CudaRTLibrary = _Runtime
    import vllm.config.vllm as config
    import vllm.device_allocator.cumem as cumem

    config.HAS_TRITON = cumem.cumem_available = True
    # Asked of the extension while a module loads, where no cache of vLLM's knows the models yet.
    torch.ops._C.cutlass_scaled_mm_supports_block_fp8 = lambda capability: capability >= 90


# --------------------------------------------------------------------------- what is found

_SMALL = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=96,
    head_dim=64,
    vocab_size=128,
    max_position_embeddings=512,
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
    "llama": dict(architectures=["LlamaForCausalLM"], model_type="llama"),
    "gemma3": dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text"),
    "qwen3_moe": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "colocated": {"layout": {"placement": "colocated"}},
    "replay": {"model": {"moe": {"replay": True}}},
    "in_flight": {"rollout": {"schedule": {"in_flight": True}}},
    "eager": {"engine": {"options": {"enforce_eager": True}}},
    "tuned": {"engine": {"options": {"enable_flashinfer_autotune": True, "moe_backend": "auto"}}},
    "tuned_kernels": {
        "engine": {"options": {"kernel_config": {"enable_flashinfer_autotune": True}}}
    },
}


def _with(settings: Any, changes: dict[str, Any]) -> Any:
    """Return settings with nested changes."""
    new = {
        name: _with(getattr(settings, name), value)
        if isinstance(value, dict) and hasattr(getattr(settings, name), "__dataclass_fields__")
        else value
        for name, value in changes.items()
    }
    return replace(settings, **new)


def _configuration(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    from spmdrl.config import Config
    from spmdrl.engine.vllm.arguments import engine_arguments

    base = {"model": {"path": str(folder)}, "data": {"max_prompt_tokens": 128}}
    base |= {"sampling": {"max_response_tokens": 128}}
    cfg = _with(_with(Config(), base), changes)
    made = EngineArgs(**engine_arguments(cfg, on_cpu=False)).create_engine_config()
    return {
        "v2": made.use_v2_model_runner,
        "async": made.scheduler_config.async_scheduling,
        "autotune": made.kernel_config.enable_flashinfer_autotune,
        "moe_backend": made.kernel_config.moe_backend,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "chunked": made.scheduler_config.enable_chunked_prefill,
        "sleeps": made.model_config.enable_sleep_mode,
        "routes": made.aux_output_config.enable_return_routed_experts,
        "logprobs": made.model_config.logprobs_mode,
    }


def _configurations(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for model, own in MODELS.items():
        place = folder / model
        place.mkdir()
        (place / "config.json").write_text(json.dumps(_SMALL | own))
        for case, changes in CASES.items():
            if case != "replay" or "num_experts" in own:
                found[f"{model} {case}"] = _configuration(place, changes)
    return found


def _groups(layout: dict[str, int], *, has_custom: bool) -> list[dict[str, Any]]:
    """Return per rank which groups vLLM makes, and what communicators of its own it opens."""
    from vllm import envs
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import (
        custom_all_reduce,
        flashinfer_all_reduce,
        pynccl,
        shm_broadcast,
        symm_mem,
    )

    from spmdrl.engine.vllm.internals import create_groups, destroy_groups
    from spmdrl.world.groups import join_world
    from tests.gpu.cuda_world import records

    opened: list[list[str]] = [[] for _ in range(layout["world"])]

    def stub(name: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            assert envs.VLLM_SKIP_P2P_CHECK, "the check waits for all ranks"
            is_off = name == "pynccl" and envs.VLLM_DISABLE_PYNCCL
            if not is_off:
                opened[torch.distributed.get_rank()].append(name)
            return SimpleNamespace(disabled=is_off, destroy=lambda: None, close=lambda: None)

        return make

    def start(rank: int) -> None:
        from datetime import timedelta

        device = torch.device("cuda", rank)
        world = SimpleNamespace(
            rank=rank,
            world_size=layout["world"],
            local_rank=rank,
            backend="nccl",
            is_inference=rank >= layout["trainers"],
        )
        store, timeout = torch.distributed.HashStore(), timedelta(seconds=99)
        join_world("nccl", world, store=store, device=device, timeout=timeout)
        create_groups(world, tp=layout["tp"], dp=1, has_custom_all_reduce=has_custom).close()
        destroy_groups()
        parallel_state._WORLD = None

    none = mock.Mock(return_value=None)
    with (
        mock.patch.object(pynccl, "PyNcclCommunicator", stub("pynccl")),
        mock.patch.object(custom_all_reduce, "CustomAllreduce", stub("custom")),
        mock.patch.object(symm_mem, "SymmMemCommunicator", stub("symm_mem")),
        mock.patch.object(flashinfer_all_reduce, "FlashInferAllReduce", stub("flashinfer")),
        mock.patch.object(shm_broadcast.MessageQueue, "create_from_process_group", none),
        mock.patch.object(parallel_state, "_node_count", lambda *_: 1),
    ):
        found = records(layout["world"], start)
    return [
        {
            "made": [(m.backend, m.ranks, m.timeout.total_seconds()) for m in record.made],
            "splits": record.splits,
            "opened": sorted(set(own)),
        }
        for record, own in zip(found, opened)
    ]


def _threads() -> dict[str, Any]:
    from torch._inductor import config

    return {
        "asked": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"),
        "compile": config.compile_threads,
    }


def _threads_after_engine(model: Path) -> int:
    """Return torch's threads after an engine is built that leaves one, as on GPUs."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from spmdrl.engine.vllm.internals import make_llm

    torch.set_num_threads(5)
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    with (
        mock.patch.object(EngineArgs, "create_engine_config", lambda _: config),
        mock.patch.object(LLMEngine, "__init__", lambda *_, **__: torch.set_num_threads(1)),
    ):
        make_llm({"model": str(model)})
    return torch.get_num_threads()


def _prints_tuning() -> bool:
    """Return whether vLLM has Triton print what it tunes, in the whole process."""
    import vllm.utils.jit_monitor as monitor

    triton = ModuleType("triton")
    triton.knobs = SimpleNamespace(autotuning=SimpleNamespace(print=False))
    with (
        mock.patch.object(monitor, "HAS_TRITON", True),
        mock.patch.dict(sys.modules, {"triton": triton}),
    ):
        monitor._setup_triton_autotuning_print()
    return triton.knobs.autotuning.print


def facts(folder: Path) -> dict[str, Any]:
    """Return what vLLM decides on GPUs, for the arguments and groups of this program."""
    from spmdrl.engine.vllm.internals import prepare_process

    believe_in_gpus()
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="3", VLLM_SKIP_P2P_CHECK="0")
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "1"
    prepare_process(on_cpu=False, compiles=True)
    threads = _threads()
    have_vllm_believe()
    layout = {"world": 4, "trainers": 2, "tp": 2}
    configurations = _configurations(folder)
    return {
        "threads": threads | {"torch": _threads_after_engine(folder / "qwen3")},
        "configurations": configurations,
        "groups": {str(c): _groups(layout, has_custom=c) for c in (True, False)},
        "prints_tuning": _prints_tuning(),
    }


if __name__ == "__main__":
    print(json.dumps(facts(Path(sys.argv[1]))))
