"""The private names of vLLM that are used here; those of its patches are in patches.py.

Serves vLLM 0.24 to 0.33; lines with versions in brackets serve only these. Each line has the name
here, vLLM's own, and when it can be removed.

prepare_process     environment variables VLLM_*            never: its settings
shared_memory_name  VLLM_DIST_IDENT (CPU alone)             once vLLM names it by the job
create_groups, destroy_groups  distributed.parallel_state   once groups can be handed to it
_take_ranks_as_they_are  ParallelConfig                     with make_llm
make_llm            EngineArgs, v1 LLMEngine, UniProcExecutor   once a documented engine runs in
                    this process, at a given rank, and asks only its own group for memory
close_llm           InprocClient._finalizer, EngineCore         once closing it destroys no groups
reload_weights      Worker.reload_weights                   never: documented
seeds_by_numpy      Worker.use_v2_model_runner              once V1 is gone
model_runner        LLMEngine.model_executor ... model_runner   once an engine gives its model
sampling_mask_of    EngineCoreOutput.new_sampling_mask (0.32, 0.33)   with core_loop.py
draft_metrics_of    EngineCoreOutput.spec_decode_metrics (0.32, 0.33)   with core_loop.py
unregistered_tensors  attributes of layers                  once sleep level 2 keeps them
lora_rank, register_adapter  config.lora, lora_manager     once LoRA weights may be set (0.32, 0.33)
wake_empties_cache  CuMemAllocator.wake_up                  with 0.24, the last that does not
name_in_engine      hf_to_vllm_mapper.orig_to_new_prefix, .orig_to_new_substr
                                                    as LoRA weights
moe_layers, num_experts  fused_moe.MoERunner, ModelConfig   once an engine returns its routes
ask_no_routes       Scheduler.aux_output_connector (0.33)   once a scheduler takes what its rank has
watch_drafts        RejectionSampler._get_logprobs_tensors (0.32, 0.33, CPU alone)
                                                            with requests.watch_sampler
watch_routers, SlotCache  fused_moe, forward_context, kv_cache_interface (0.32, 0.33, CPU alone)
                                                            once the CPU too returns routed experts
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.sandbox.removal import own_folder
from spmdrl.world.secret import mark
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


def shared_memory_name() -> str:
    """Return the prefix of the shared memory of this job's engines, the same on all ranks.

    A job that was killed leaves its shared memory on the machine, and vLLM fails if one of the same
    name is there. The port alone may come again.
    """
    return f"spmdrl-{os.environ['MASTER_PORT']}-{mark('vLLM shared memory', b'').hex()[:16]}"


def prepare_process(*, on_cpu: bool, compiles: bool) -> None:
    """Set the environment variables that vLLM reads, and import it.

    Args:
        compiles: the trainer in this process needs dynamo.
    Raises: Refusal where vLLM is missing.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core stays in this process
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It splits the job's own group, which is not bound to a device.
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "0"
    # vLLM would have Triton print each kernel that it tunes, also those of the trainer.
    os.environ.setdefault("TRITON_PRINT_AUTOTUNING", "0")
    if on_cpu:
        os.environ["VLLM_DIST_IDENT"] = shared_memory_name()
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # vLLM drafts tokens by numba, which sets the number of OpenMP threads, torch's too, to its
        # own: one per core.
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
        if not compiles:
            # vLLM compiles a small logprob helper: 5 to 19 s at the first generation.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    # Where vLLM is loaded already, it has set the variable itself.
    threads = None if "vllm" in sys.modules else os.environ.get(_COMPILE_THREADS)
    with refusing("vLLM is not importable", ImportError, hint=_INSTALL_HINT):
        import vllm  # noqa: F401
    if compiles:
        # vLLM lets one thread compile. The default is 32.
        os.environ.pop(_COMPILE_THREADS, None)
        if threads:
            os.environ[_COMPILE_THREADS] = threads
        count_compile_threads()
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def create_groups(
    world: World, *, tp: int, dp: int, has_custom_all_reduce: bool
) -> contextlib.ExitStack:
    """Create vLLM's process groups over the whole world; every rank must call it.

    Ranks that do not generate open no communicator of vLLM's own: each would take memory.

    Args:
        tp, dp: sizes of a replica; with dp its tp * dp ranks exchange tokens of experts.
        has_custom_all_reduce: whether engines may use vLLM's own all-reduce.
    Returns: a stack whose closing removes the folder of the groups' sockets, which vLLM's message
        queues leave there.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    # Not in TMPDIR, whose name can be long: a socket's path may have 107 characters.
    sockets = contextlib.ExitStack()
    base = os.environ.get(_SOCKETS, "/tmp")
    folder = sockets.enter_context(own_folder("sockets", base=base))
    # vLLM's own check whether GPUs reach each other ends in a wait for all ranks.
    variables = {_SOCKETS: folder, "VLLM_SKIP_P2P_CHECK": "1"}
    if not world.is_inference:
        variables |= _NO_COMMUNICATORS
    # The groups read this once, when they are created.
    parallel_state.set_custom_all_reduce(world.is_inference and has_custom_all_reduce)
    config = VllmConfig()
    if dp > 1:
        config.parallel_config = _parallel_config(tp=tp, dp=dp)
    with set_current_vllm_config(config), _environment(variables):
        parallel_state.init_distributed_environment(
            dist.get_world_size(), dist.get_rank(), "env://", world.local_rank, world.backend
        )
        parallel_state.initialize_model_parallel(tp)
    _remove_shared_memory(parallel_state.get_tp_group())
    return sockets


def _parallel_config(*, tp: int, dp: int) -> Any:
    """Return vLLM's description of a replica with data-parallel attention."""
    from vllm.config import ParallelConfig

    config = ParallelConfig(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=True,
        distributed_executor_backend="uni",
    )
    _take_ranks_as_they_are(config)
    return config


def _take_ranks_as_they_are(config: Any) -> None:
    """Have vLLM neither number the ranks of a data-parallel replica nor connect them itself.

    Args:
        config: vLLM's ParallelConfig. A new one of this backend is refused where the job has more
            ranks than the replica.
    """
    config.distributed_executor_backend = "external_launcher"


def _remove_shared_memory(group: Any) -> None:
    """Remove the names of this rank's shared memory from /dev/shm. Its memory ends with the ranks.

    vLLM leaves the file of its CPU ranks there, and that of its message queue if it is killed. All
    ranks of the group have opened both by now.
    """
    shared = getattr(group.device_communicator, "dist_module", None)
    if name := getattr(shared, "group_name", ""):
        os.unlink(f"/dev/shm/{name}_{group.rank_in_group}")
    ring = getattr(group.mq_broadcaster, "buffer", None)
    if ring is not None and ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # otherwise it would remove the file once more at its end


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them at the end."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)


def destroy_groups() -> None:
    """Destroy the groups of `create_groups`, but not the job's own."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()


def make_llm(arguments: Mapping[str, Any]) -> Any:
    """Build an engine of one worker in this process, at this rank's place in the job's world."""
    from vllm.distributed.parallel_state import get_dp_group, get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class InWorldExecutor(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

        def determine_available_memory(self) -> list[int]:
            # Ranks of a replica must agree on the size of the KV cache. vLLM's executor for
            # external launchers reduces over the whole world, where trainer ranks never answer.
            smallest = torch.tensor(super().determine_available_memory(), dtype=torch.int64)
            for group in (get_tp_group(), get_dp_group()):
                dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group.cpu_group)
            return smallest.tolist()

    num_threads = torch.get_num_threads()
    engine_args = EngineArgs(distributed_executor_backend=InWorldExecutor, **arguments)
    if engine_args.enable_prefix_caching is None and engine_args.enable_chunked_prefill is False:
        # vLLM keeps the states of layers (SSM and the like) only at the ends of chunks.
        engine_args.enable_prefix_caching = not engine_args.create_model_config().has_inner_state
    config = engine_args.create_engine_config()
    if config.parallel_config.data_parallel_size > 1:
        _take_ranks_as_they_are(config.parallel_config)
    llm = LLMEngine(config, executor_class=InWorldExecutor, log_stats=False)
    torch.set_num_threads(num_threads)  # vLLM leaves one where OMP_NUM_THREADS is not set
    return llm


def close_llm(llm: Any) -> None:
    """Free an engine's memory, but keep the job's process groups.

    vLLM's engine destroys the default group too when it is dropped (0.32) or shut down.
    """
    client = llm.engine_core
    if hasattr(client, "_finalizer"):
        client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()  # the engine froze its objects, so that they would never be collected


# --------------------------------------------------------------------------- the model


def model_runner(llm: Any) -> Any:
    """Return an engine's model runner, which has `get_model` and `kv_caches`."""
    return llm.model_executor.driver_worker.worker.model_runner


def reload_weights(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load whole tensors by checkpoint name through vLLM's layerwise reloading."""
    from vllm.config import set_current_vllm_config

    worker = llm.model_executor.driver_worker.worker
    with set_current_vllm_config(worker.vllm_config):  # 0.24 does not set it
        worker.reload_weights(weights_iterator=weights)


@cache
def wake_empties_cache() -> bool:
    """Return whether vLLM empties torch's cache before it maps memory again."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return "empty_cache" in inspect.getsource(CuMemAllocator.wake_up)


def sampling_mask_of(output: Any) -> Any:
    """Return the chunk of sampling masks of a core's output; None where it has none."""
    return getattr(output, "new_sampling_mask", None)  # 0.24 has no such field


def draft_metrics_of(output: Any) -> Any:
    """Return vLLM's RequestSpecDecodeMetrics of a core's output; None where it has none."""
    return getattr(output, "spec_decode_metrics", None)  # 0.24 has no such field


def seeds_by_numpy(llm: Any) -> bool:
    """Return whether requests without a seed get one from the process's numpy generator."""
    return getattr(llm.model_executor.driver_worker.worker, "use_v2_model_runner", False)


def unregistered_tensors(model: nn.Module) -> list[Tensor]:
    """Return the CUDA tensors that are neither parameters nor buffers, but attributes of modules or
    of objects that are attributes of modules, without the KV cache."""
    values = [value for module in model.modules() for value in _attributes(module)]
    for value in list(values):
        if not isinstance(value, Tensor):
            values += _attributes(value)
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = {}
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda and id(value) not in registered:
            found[id(value)] = value
    return list(found.values())


def _attributes(thing: Any) -> Iterator[Any]:
    """Yield the attributes of an object, and the elements of those that are containers."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if name == "kv_cache" or isinstance(value, nn.Module):
            continue
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


# --------------------------------------------------------------------------- LoRA


def lora_rank(rank: int) -> int:
    """Return the smallest of vLLM's ranks that has room for an adapter of this rank."""
    from vllm.config.lora import MaxLoRARanks

    return min(known for known in get_args(MaxLoRARanks) if known >= rank)


def register_adapter(runner: Any) -> tuple[Any, Any, int]:
    """Register one LoRA of zeros, which keeps an engine's only slot.

    Returns: vLLM's request for it, which requests to the policy name; the manager of its layers;
        and its slot in their stacked matrices.
    """
    from vllm.lora.request import LoRARequest

    manager = runner.lora_manager._adapter_manager
    # vLLM never reads the path, because a LoRA with this id is registered.
    request = LoRARequest("policy", 1, "/written/by/the/trainers")
    runner.lora_manager.add_dummy_lora(request, rank=1)  # all zero
    manager.activate_adapter(1)
    manager.pin_adapter(1)
    return request, manager, manager.lora_index_to_id.index(1)


def name_in_engine(model: nn.Module, name: str) -> str:
    """Return what vLLM's class for a model calls the tensor that files call `name`: models with a
    vision tower nest their parts in another order, and GPT-OSS's attention has another name."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return name
    for part, own in mapper.orig_to_new_substr.items():
        if own is not None:
            name = name.replace(part, own, 1)
    for prefix, own in mapper.orig_to_new_prefix.items():
        if own is not None and name.startswith(prefix):
            name = name.replace(prefix, own, 1)
    return name


# --------------------------------------------------------------------------- routers


def moe_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers with experts, ascending.

    Raises: Refusal when this vLLM cannot return which experts it chooses.
    """
    what = "model.moe.replay: this vLLM cannot say which experts it chooses"
    with refusing(what, ImportError, hint="; take 0.32, or set it to false"):
        import vllm.model_executor.layers.fused_moe.routed_experts_capturer  # noqa: F401
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
    return sorted(m.layer_id for m in model.modules() if isinstance(m, MoERunner))


def ask_no_routes(llm: Any) -> None:
    """Have a scheduler not ask its worker for routes. vLLM's workers keep them on the first rank of
    an engine alone, and under an external launcher each rank has a scheduler."""
    scheduler = llm.engine_core.engine_core.scheduler
    if getattr(scheduler, "aux_output_connector", None) is not None:
        scheduler.aux_output_connector = None


def num_experts(runner: Any) -> tuple[int, int]:
    """Return the number of experts of a layer, and to how many of them a token goes."""
    config = runner.vllm_config.model_config
    if hasattr(config, "get_num_experts_per_tok"):
        return config.get_num_experts(), config.get_num_experts_per_tok()
    return config.get_num_experts(), config.hf_text_config.num_experts_per_tok  # 0.24


class SlotCache:
    """Which slot of the KV cache holds which token of which request.

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
        """Return the slots of the tokens that are computed now, negative where there is no token;
        None in a warm-up."""
        from vllm.forward_context import get_forward_context

        return get_forward_context().slot_mapping.get(self._attention)

    def of_request(self, request_id: str, tokens: range) -> Tensor | None:
        """Return the slots of some of a request's tokens; None where the request has no slots."""
        batch = self._runner.input_batch
        row = batch.req_id_to_index.get(request_id)
        if row is None:
            return None
        table = batch.block_table[self._group]
        at = torch.arange(tokens.start, tokens.stop)
        blocks = torch.from_numpy(table.block_table.np[row])[at // table.block_size].long()
        return blocks * table.block_size + at % table.block_size


def watch_routers(model: nn.Module, watcher: Any) -> None:
    """Have each router call `watcher.capture(layer index, chosen experts [n, K])`."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    bind_routed_experts_capturer(model, watcher)


def watch_drafts(runner: Any, take: Callable[[list[str], Tensor], None]) -> None:
    """Have the sampler of the V1 runner call `take` as `requests.watch_sampler` says, in each step
    of an engine with speculative decoding."""
    sampler = runner.rejection_sampler
    gather = sampler._get_logprobs_tensors

    def watched(
        max_num_logprobs: int,
        metadata: Any,
        logits: Tensor,
        target_logits: Tensor,
        bonus_logits: Tensor,
        sampled_token_ids: Tensor,
    ) -> Any:
        """target_logits: of the draft tokens, and bonus_logits [N, V] of the token after all of a
        request's, cut; sampled_token_ids: [N, longest], -1 after a request's last one."""
        gathered = gather(
            max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids
        )
        rows = torch.empty_like(logits, dtype=torch.float32)
        rows[metadata.target_logits_indices] = target_logits
        rows[metadata.bonus_logits_indices] = bonus_logits
        counts = (sampled_token_ids >= 0).sum(dim=1).tolist()
        ids: list[str] = []
        drawn: list[int] = []
        first = 0
        for request_id, drafted, count in zip(
            runner.input_batch.req_ids, metadata.num_draft_tokens, counts, strict=True
        ):
            ids += [request_id] * count
            drawn += range(first, first + count)
            first += drafted + 1
        take(ids, rows[drawn])
        return gathered

    sampler._get_logprobs_tensors = watched
