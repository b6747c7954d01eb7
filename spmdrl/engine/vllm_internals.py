"""All that this program knows of vLLM: the one file that imports it, but for its tool-call
parsers, a loader (vllm_plain.py), what is said of requests (vllm_requests.py) and patches, in
vllm_patches_models.py (of its Transformers backend) and vllm_patches_cpu.py (of its CPU build).

Serves vLLM 0.24 to 0.33; what says so, 0.32 and 0.33 only. Per line: the name here, vLLM's own, and
when it can go.

prepare_process     environment variables VLLM_*            never: its settings
create_groups, destroy_groups  distributed.parallel_state   once groups can be handed to it
make_llm            EngineArgs, v1 LLMEngine, UniProcExecutor   once a documented engine runs in a
                    process, at a rank that it is told, and asks its own group alone for memory
close_llm           InprocClient._finalizer, EngineCore         once an engine leaves groups alone
reload_weights      Worker.reload_weights                   never: documented
seeds_by_numpy      Worker.use_v2_model_runner              once V1 is gone
model_runner        LLMEngine.model_executor ... model_runner   once an engine gives its model
unregistered        attributes of layers                    once sleep level 2 keeps them
lora_rank, register_adapter  config.lora, lora_manager     once LoRA weights may be set (0.32, 0.33)
name_in_engine      hf_to_vllm_mapper.orig_to_new_prefix    as LoRA weights
moe_layers, num_experts  fused_moe.MoERunner, ModelConfig   once an engine says which it chooses
watch_routers, SlotCache  fused_moe, forward_context, kv_cache_interface (0.32, 0.33, CPU alone)
                                                            once the CPU too returns routed experts
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.sandbox.removal import own_folder
from spmdrl.world.torch_internals import count_compile_threads
from spmdrl.world.world import World

_INSTALL_HINT = (
    ". On a GPU machine `pip install vllm==0.32.0`; on the CPU "
    "use the pinned list in requirements/cpu.txt (see the README). Where vLLM does not run, set "
    "engine.kind to transformers, which needs nothing more."
)
_SOCKETS = "VLLM_RPC_BASE_PATH"
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_NO_COMMUNICATORS = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


# --------------------------------------------------------------------------- process and groups


def prepare_process(*, on_cpu: bool, compiles: bool) -> None:
    """Set what vLLM reads from the environment, and import it.

    Args:
        compiles: the trainer in this process needs dynamo.
    Raises: Refusal where vLLM is missing.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core stays in this process
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if on_cpu:
        os.environ["VLLM_DIST_IDENT"] = f"spmdrl-{os.environ['MASTER_PORT']}"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not compiles:
            # vLLM compiles a small logprob helper: 5 to 19 s at the first generation.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    # Where it is loaded already, what is there is its own.
    asked = None if "vllm" in sys.modules else os.environ.get(_COMPILE_THREADS)
    with refusing("vLLM is not importable", ImportError, hint=_INSTALL_HINT):
        import vllm  # noqa: F401
    if compiles:  # vLLM has it done by one thread, 32 else
        os.environ.pop(_COMPILE_THREADS, None)
        os.environ.update({_COMPILE_THREADS: asked} if asked else {})
        count_compile_threads()
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def create_groups(world: World, *, tp: int, has_custom_all_reduce: bool) -> contextlib.ExitStack:
    """Create vLLM's process groups over the whole world; every rank must call it.

    Ranks that do not generate open no communicator of vLLM's own: each would take memory.

    Args:
        has_custom_all_reduce: whether engines may use vLLM's own all-reduce.
    Returns: what removes the folder of their sockets when it is closed: the files stay when a
        replica's message queues close.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    # Not in TMPDIR, which can be long: a socket's path may have 107 characters.
    sockets = contextlib.ExitStack()
    base = os.environ.get(_SOCKETS, "/tmp")
    folder = sockets.enter_context(own_folder("sockets", base=base))
    idle = {} if world.is_inference else _NO_COMMUNICATORS
    # Its own check whether GPUs reach each other ends in a wait for all ranks.
    told = {_SOCKETS: folder, "VLLM_SKIP_P2P_CHECK": "1"} | idle
    # Before the groups, which read it once.
    parallel_state.set_custom_all_reduce(world.is_inference and has_custom_all_reduce)
    with set_current_vllm_config(VllmConfig()), _environment(told):
        parallel_state.init_distributed_environment(
            dist.get_world_size(), dist.get_rank(), "env://", world.local_rank, world.backend
        )
        parallel_state.initialize_model_parallel(tp)
    return sockets


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that vLLM reads inside, and set them back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})


def destroy_groups() -> None:
    """Destroy the groups of `create_groups`, and not the job's own."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()


def make_llm(arguments: Mapping[str, Any]) -> Any:
    """Build an engine of one worker in this process, at this rank's place in the job's world."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class InWorldExecutor(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

        def determine_available_memory(self) -> list[int]:
            # Ranks of a replica must agree on the KV cache. vLLM's own launcher-executor
            # reduces over the world, where trainer ranks never answer.
            smallest = torch.tensor(super().determine_available_memory(), dtype=torch.int64)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=get_tp_group().cpu_group)
            return smallest.tolist()

    num_threads = torch.get_num_threads()
    asked = EngineArgs(distributed_executor_backend=InWorldExecutor, **arguments)
    if asked.enable_prefix_caching is None and asked.enable_chunked_prefill is False:
        # vLLM keeps states of layers (SSM and the like) at the ends of chunks alone.
        asked.enable_prefix_caching = not asked.create_model_config().has_inner_state
    llm = LLMEngine.from_engine_args(asked)
    torch.set_num_threads(num_threads)  # it leaves one where OMP_NUM_THREADS says nothing
    return llm


def close_llm(llm: Any) -> None:
    """Free an engine's memory, and leave the job's process groups alone.

    Where vLLM's engine is dropped (0.32), or told to shut down, it destroys the default group too.
    """
    client = llm.engine_core
    if hasattr(client, "_finalizer"):
        client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()  # the engine froze what it had made, so that nothing of it would be collected


# --------------------------------------------------------------------------- the model


def model_runner(llm: Any) -> Any:
    """Return an engine's model runner, which has `get_model` and `kv_caches`."""
    return llm.model_executor.driver_worker.worker.model_runner


def reload_weights(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load whole tensors by checkpoint name through vLLM's layerwise reloading."""
    from vllm.config import set_current_vllm_config

    worker = llm.model_executor.driver_worker.worker
    with set_current_vllm_config(worker.vllm_config):  # 0.24 does not itself
        worker.reload_weights(weights_iterator=weights)


def seeds_by_numpy(llm: Any) -> bool:
    """Return whether requests without a seed get theirs from numpy's generator of the process."""
    return getattr(llm.model_executor.driver_worker.worker, "use_v2_model_runner", False)


def unregistered(model: nn.Module) -> list[Tensor]:
    """Return the device tensors that modules hold as plain attributes, or hold objects that do,
    the KV cache left out."""
    direct = [held for module in model.modules() for held in _held(module)]
    inner = [own for held in direct if not isinstance(held, Tensor) for own in _held(held)]
    tensors = (t for t in (*direct, *inner) if isinstance(t, Tensor) and t.is_cuda)
    found = {id(tensor): tensor for tensor in tensors}
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    return [tensor for key, tensor in found.items() if key not in known]


def _held(thing: Any) -> Iterator[Any]:
    """Yield what the attributes of an object are, or contain."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if name == "kv_cache" or isinstance(value, nn.Module):
            continue
        value = [*value.values()] if isinstance(value, dict) else value
        yield from value if isinstance(value, (list, tuple)) else (value,)


# --------------------------------------------------------------------------- LoRA


def lora_rank(rank: int) -> int:
    """Return the least rank of vLLM's that an adapter of this rank fits into."""
    from vllm.config.lora import MaxLoRARanks

    return min(known for known in get_args(MaxLoRARanks) if known >= rank)


def register_adapter(runner: Any) -> tuple[Any, Any, int]:
    """Register one LoRA of zeros, which takes an engine's only slot for good.

    Returns: vLLM's request for it, which each request names, the manager of its layers, and its
        slot in their stacked matrices.
    """
    from vllm.lora.request import LoRARequest

    manager = runner.lora_manager._adapter_manager
    # The path is never read: the id is known.
    request = LoRARequest("policy", 1, "/written/by/the/trainers")
    runner.lora_manager.add_dummy_lora(request, rank=1)  # all zero
    manager.activate_adapter(1)
    manager.pin_adapter(1)
    return request, manager, manager.lora_index_to_id.index(1)


def name_in_engine(model: nn.Module, name: str) -> str:
    """Return what vLLM's class for a model calls a tensor, of which files have `name`: models that
    see have another order of the parts within."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for prefix, own in mapper.orig_to_new_prefix.items() if mapper else ():
        if own is not None and name.startswith(prefix):
            name = name.replace(prefix, own, 1)
    return name


# --------------------------------------------------------------------------- routers


def moe_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers with experts, ascending.

    Raises: Refusal when this vLLM cannot say which experts it chooses.
    """
    what = "model.moe.replay: this vLLM cannot say which experts it chooses"
    with refusing(what, ImportError, hint="; take 0.32, or set it to false"):
        import vllm.model_executor.layers.fused_moe.routed_experts_capturer  # noqa: F401
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
    return sorted(m.layer_id for m in model.modules() if isinstance(m, MoERunner))


def num_experts(runner: Any) -> tuple[int, int]:
    """Return the experts of a layer, and how many of them a token goes to."""
    config = runner.vllm_config.model_config
    if hasattr(config, "get_num_experts_per_tok"):
        return config.get_num_experts(), config.get_num_experts_per_tok()
    return config.get_num_experts(), config.hf_text_config.num_experts_per_tok  # 0.24


class SlotCache:
    """Where the KV cache keeps which token of which request.

    Raises: Refusal for a model without layers that keep all keys of a sequence.
    """

    def __init__(self, runner: Any):
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        config = runner.kv_cache_config
        found = [
            (index, group)
            for index, group in enumerate(config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, FullAttentionSpec)
        ]
        if not found:
            raise Refusal(
                "model.moe.replay: vLLM drops keys of this model that are out of its "
                "attention's window, and the routes of these tokens with them; set "
                "it to false, or engine.kind to transformers"
            )
        self._group, group = found[0]
        self._attention = group.layer_names[0]
        self._runner = runner
        self.num_slots = config.num_blocks * group.kv_cache_spec.block_size

    def of_step(self) -> Tensor | None:
        """Return the slots of the tokens that are computed now; below 0 nobody's. None in a
        warm-up."""
        from vllm.forward_context import get_forward_context

        return get_forward_context().slot_mapping.get(self._attention)

    def of_request(self, request_id: str, tokens: range) -> Tensor | None:
        """Return the slots of some of a request's tokens; None where it has none."""
        batch = self._runner.input_batch
        row = batch.req_id_to_index.get(request_id)
        if row is None:
            return None
        table = batch.block_table[self._group]
        at = torch.arange(tokens.start, tokens.stop)
        blocks = torch.from_numpy(table.block_table.np[row])[at // table.block_size].long()
        return blocks * table.block_size + at % table.block_size


def watch_routers(model: nn.Module, watcher: Any) -> None:
    """Have each router tell `watcher.capture(layer index, chosen experts [n, K])`."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    bind_routed_experts_capturer(model, watcher)
