"""What the adapters use of vLLM, and where it stands in the versions that they serve.

`vllm_contract.json` has, per version, what `contract` reads in vLLM's sources: for a function its
parameters, for a class its bases, for a constant its text, null for what is not there. To add a
version, or to write one anew, unpack a wheel's Python files and run

    pip download vllm==0.24.0 --no-deps -d /tmp/wheel     # any platform's: sources are the same
    unzip -q '/tmp/wheel/*.whl' 'vllm/*.py' -d /tmp/sources
    python -m tests.engine.vllm_contract 0.24.0 /tmp/sources/vllm

Nothing of vLLM is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("vllm_contract.json")

_RUNNERS = ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")
NAMES: tuple[tuple[str, str], ...] = (
    ("config/__init__.py", "ParallelConfig"),
    ("config/__init__.py", "VllmConfig"),
    ("config/__init__.py", "set_current_vllm_config"),
    ("config/lora.py", "MaxLoRARanks"),
    ("config/model.py", "ModelConfig.get_num_experts"),
    ("config/model.py", "ModelConfig.get_num_experts_per_tok"),
    ("config/model.py", "ModelConfig.hf_text_config"),
    ("config/parallel.py", "ParallelConfig.data_parallel_size"),
    ("config/parallel.py", "ParallelConfig.distributed_executor_backend"),
    ("config/parallel.py", "ParallelConfig.enable_expert_parallel"),
    ("config/vllm.py", "VllmConfig.use_v2_model_runner"),
    ("device_allocator/cumem.py", "CuMemAllocator.wake_up"),
    ("distributed/device_communicators/cpu_communicator.py", "CpuCommunicator"),
    ("distributed/parallel_state.py", "get_dp_group"),
    ("distributed/parallel_state.py", "init_distributed_environment"),
    ("distributed/parallel_state.py", "initialize_model_parallel"),
    ("distributed/parallel_state.py", "set_custom_all_reduce"),
    ("distributed/parallel_state.py", "destroy_model_parallel"),
    ("distributed/parallel_state.py", "get_tp_group"),
    ("distributed/parallel_state.py", "_ENABLE_CUSTOM_ALL_REDUCE"),
    ("distributed/aux_output_connector/worker.py", "AuxOutputWorkerConnector.begin_step"),
    ("engine/arg_utils.py", "EngineArgs"),
    ("engine/arg_utils.py", "EngineArgs.create_engine_config"),
    ("envs.py", "VLLM_DISABLE_PYNCCL"),
    ("envs.py", "VLLM_ALLREDUCE_USE_SYMM_MEM"),
    ("envs.py", "VLLM_ALLREDUCE_USE_FLASHINFER"),
    ("envs.py", "VLLM_SKIP_P2P_CHECK"),
    ("envs.py", "VLLM_RPC_BASE_PATH"),
    ("forward_context.py", "get_forward_context"),
    ("lora/model_manager.py", "LoRAModelManager.activate_adapter"),
    ("lora/model_manager.py", "LoRAModelManager.pin_adapter"),
    ("lora/model_manager.py", "LoRAModelManager.lora_index_to_id"),
    ("lora/model_manager.py", "LoRAModelManager.packed_modules"),
    ("lora/request.py", "LoRARequest"),
    ("lora/layers/base.py", "BaseLayerWithLoRA.set_lora"),
    ("lora/worker_manager.py", "WorkerLoRAManager._adapter_manager"),
    ("lora/worker_manager.py", "WorkerLoRAManager.add_dummy_lora"),
    ("model_executor/layers/fused_moe/routed_experts_capturer.py", "bind_routed_experts_capturer"),
    ("model_executor/layers/fused_moe/experts/cpu_moe.py", "CPUUnquantizedExperts.apply"),
    ("model_executor/layers/fused_moe/runner/moe_runner.py", "MoERunner.layer_id"),
    ("model_executor/layers/utils.py", "dispatch_cpu_unquantized_gemm"),
    ("sampling_params.py", "SamplingParams"),
    ("v1/engine/__init__.py", "EngineCoreRequest"),
    ("v1/engine/__init__.py", "EngineCoreOutput"),
    ("v1/engine/__init__.py", "EngineCoreOutput.new_sampling_mask"),
    ("v1/engine/__init__.py", "EngineCoreOutput.spec_decode_metrics"),
    ("v1/sample/rejection_sampler.py", "RejectionSampler._get_logprobs_tensors"),
    ("v1/sample/rejection_sampler.py", "apply_sampling_constraints"),
    ("v1/sample/rejection_sampler.py", "expand_batch_to_tokens"),
    ("v1/engine/__init__.py", "EngineCoreOutputs"),
    ("v1/engine/__init__.py", "FINISH_REASON_STRINGS"),
    ("v1/engine/core.py", "EngineCore.step_with_batch_queue"),
    ("v1/engine/core.py", "EngineCore.structured_output_manager"),
    ("v1/engine/core.py", "EngineCore.shutdown"),
    ("v1/engine/core_client.py", "InprocClient.abort_requests"),
    ("v1/engine/core_client.py", "InprocClient.add_request"),
    ("v1/engine/core_client.py", "InprocClient.engine_core"),
    ("v1/engine/core_client.py", "InprocClient.execute_dummy_batch"),
    ("v1/engine/core_client.py", "InprocClient.get_output"),
    ("v1/engine/core_client.py", "InprocClient._finalizer"),
    ("v1/engine/input_processor.py", "InputProcessor.process_inputs"),
    ("v1/engine/llm_engine.py", "LLMEngine.engine_core"),
    ("v1/engine/llm_engine.py", "LLMEngine.get_supported_tasks"),
    ("v1/engine/llm_engine.py", "LLMEngine.input_processor"),
    ("v1/engine/llm_engine.py", "LLMEngine.model_executor"),
    ("v1/engine/llm_engine.py", "LLMEngine.__init__"),
    ("v1/engine/llm_engine.py", "LLMEngine.reset_prefix_cache"),
    ("v1/engine/llm_engine.py", "LLMEngine.sleep"),
    ("v1/engine/llm_engine.py", "LLMEngine.wake_up"),
    ("v1/outputs.py", "LogprobsLists"),
    ("v1/outputs.py", "LogprobsTensors"),
    ("v1/executor/abstract.py", "SLEEP_TAGS"),
    ("v1/executor/abstract.py", "Executor.determine_available_memory"),
    ("v1/executor/uniproc_executor.py", "UniProcExecutor._distributed_args"),
    ("v1/executor/uniproc_executor.py", "UniProcExecutor.shutdown"),
    ("v1/executor/uniproc_executor.py", "UniProcExecutor.driver_worker"),
    ("v1/kv_cache_interface.py", "FullAttentionSpec"),
    ("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_cpu"),
    ("v1/worker/gpu_worker.py", "Worker.reload_weights"),
    ("v1/worker/gpu_worker.py", "Worker.use_v2_model_runner"),
    *((file, "GPUModelRunner.get_model") for file in _RUNNERS),
    *((file, "GPUModelRunner.reload_weights") for file in _RUNNERS),
    *((file, "GPUModelRunner.kv_caches") for file in _RUNNERS),
)
"""(file, name in it) of all that the adapters name, and of what they work around."""

TEXTS = {
    "numbers of requests are lost on the CPU": (
        "utils/cpu_triton_utils.py",
        "torch.ops._C.expand_kernel_impl(\n        _ensure_int64(output),",
    ),
    "requests of one new token are padded": (
        "v1/core/sched/scheduler.py",
        "self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None",
    ),
    "only the first rank has routes": (
        "distributed/aux_output_connector/worker.py",
        "if not get_tp_group().is_first_rank:",
    ),
    "dropping an engine shuts it down": (
        "v1/engine/core_client.py",
        "weakref.finalize(self, self.engine_core.shutdown)",
    ),
    "a shutdown destroys the groups": ("v1/engine/core.py", "cleanup_dist_env_and_memory()"),
    "a step calls the core's own, asynchronous or not": (
        "v1/engine/core_client.py",
        "outputs, model_executed = self.engine_core.step_fn()",
    ),
    "asynchronous scheduling has a queue of steps": (
        "v1/engine/core.py",
        "self.step if self.batch_queue is None else self.step_with_batch_queue",
    ),
    "ranks of external launchers are as they are": (
        "distributed/parallel_state.py",
        'config.parallel_config.distributed_executor_backend != "external_launcher"',
    ),
    "a launcher's world is one replica": (
        "config/parallel.py",
        'self.data_parallel_rank = int(os.environ["RANK"]) // (',
    ),
    "the sampler takes one number per request": (
        "v1/sample/ops/topk_topp_sampler.py",
        "            seeds[i] = torch.randint(\n                0, 2**31, (1,), generator=gen",
    ),
    "requests without a seed draw one": ("v1/worker/gpu/sample/states.py", "np.random.randint"),
    "reloads know their configuration": (
        "v1/worker/gpu_worker.py",
        "with set_current_vllm_config(self.vllm_config):\n            self.model_runner.reload",
    ),
    "one thread compiles": ("env_override.py", 'os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"'),
}
"""What the adapters work around, as vLLM's sources say it."""


def contract(folder: Path) -> dict[str, Any]:
    """Return what a folder of vLLM's sources has of NAMES and TEXTS, and who uses its world."""
    return {
        "names": {f"{file}: {name}": _found(folder / file, name) for file, name in NAMES},
        "texts": {
            name: (folder / file).is_file() and text in (folder / file).read_text()
            for name, (file, text) in TEXTS.items()
        },
        "waits in the group of all ranks": sorted(
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*.py")
            if "third_party" not in path.parts and "get_world_group()" in path.read_text()
        ),
    }


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _found(path: Path, name: str) -> Any:
    """Return what a name is: parameters, bases or fields, text, `there` for an attribute."""
    if not path.is_file():
        return None
    tree: ast.AST = _tree(path)
    *outer, last = name.split(".")
    for part in outer:
        tree = next((n for n in ast.iter_child_nodes(tree) if _name(n) == part), ast.Pass())
    for node in [*ast.iter_child_nodes(tree), *_later(tree)]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == last:
            return [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
        if isinstance(node, ast.ClassDef) and node.name == last:
            return _fields(node)
        if isinstance(node, ast.alias) and (node.asname or node.name) == last:
            return "there"
        for target in _targets(node):
            if target == last and isinstance(tree, ast.Module):
                return ast.unparse(node.value) if node.value else "there"
            if target in (last, f"self.{last}"):
                return "there"
    return None


def _later(tree: ast.AST) -> list[ast.AST]:
    """Return what stands deeper: imports of a module, `if TYPE_CHECKING`, methods' assignments."""
    kinds = (ast.alias, ast.Assign, ast.AnnAssign)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _name(node: ast.AST) -> str:
    return getattr(node, "name", "")


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(t) for t in node.targets] if isinstance(node, ast.Assign) else []


def _fields(node: ast.ClassDef) -> list[str]:
    own = [t for line in node.body for t in _targets(line) if isinstance(line, ast.AnnAssign)]
    return own or [ast.unparse(base) for base in node.bases]


def read() -> dict[str, Any]:
    """Return {version: contract}."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


if __name__ == "__main__":
    table = read() | {sys.argv[1]: contract(Path(sys.argv[2]))}
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
