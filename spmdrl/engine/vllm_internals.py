"""All that this program knows of vLLM: the one file that imports it, but for its tool-call parsers.

Serves vLLM 0.24 to 0.33; what says so, 0.32 and 0.33 only. Per line: the name here, vLLM's own, and
when it can go.

prepare_process     environment variables VLLM_*            never: its settings
create_groups, destroy_groups  distributed.parallel_state   once groups can be handed to it
make_llm            EngineArgs, v1 LLMEngine, UniProcExecutor   once a documented engine runs in a
                    process, at a rank that it is told, and asks its own group alone for memory
sampling_params, scoring_params  SamplingParams             never: documented
model_runner        LLMEngine.model_executor ... model_runner   once an engine gives its model
unfinished, Unfinished  output_processor.request_states         once outputs can be asked for
unregistered        attributes of layers                    once sleep level 2 keeps them
keep_linear_weights_live   model_executor.layers.utils.dispatch_cpu_unquantized_gemm (patched)
                                                            once CPU linears may stay unpacked
keep_expert_weights_live   fused_moe.experts.cpu_moe.CPUUnquantizedExperts (patched; 0.32, 0.33)
                                                            once CPU experts may stay unpacked
lora_rank, register_adapter  config.lora, lora_manager     once LoRA weights may be set (0.32, 0.33)
moe_layers, num_experts, watch_routers, SlotCache  fused_moe, forward_context, kv_cache_interface
                    (0.32, 0.33)                            once the CPU too returns routed experts
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.engine.protocol import Request
from spmdrl.imports import refusing
from spmdrl.world import World

_INSTALL_HINT = (
    ". On a GPU machine `pip install vllm==0.32.0`; on the CPU "
    "use the pinned list in requirements/cpu.txt (see the README). Where vLLM does not run, set "
    "engine.kind to transformers, which needs nothing more."
)
_SOCKETS = "VLLM_RPC_BASE_PATH"


# --------------------------------------------------------------------------- process and groups


def prepare_process(*, on_cpu: bool, compiles: bool) -> None:
    """Set what vLLM reads from the environment, and import it.

    Args:
        compiles: the trainer in this process needs dynamo.
    Raises: ValueError where vLLM is missing.
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
    with refusing("vLLM is not importable", ImportError, hint=_INSTALL_HINT):
        import vllm  # noqa: F401
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def create_groups(world: World, *, tp: int) -> tempfile.TemporaryDirectory:
    """Create vLLM's process groups over the whole world; every rank must call it.

    Returns: the folder of their sockets: the files stay when a replica's message queues close.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    before = os.environ.get(_SOCKETS)
    # Not in TMPDIR, which can be long: a socket's path may have 107 characters.
    sockets = tempfile.TemporaryDirectory(prefix="spmdrl-", dir=before or "/tmp")
    os.environ[_SOCKETS] = sockets.name
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world.world_size, world.rank, "env://", world.local_rank, world.backend
        )
        parallel_state.initialize_model_parallel(tp)
    del os.environ[_SOCKETS]
    os.environ.update({_SOCKETS: before} if before is not None else {})
    return sockets


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

    return LLMEngine.from_engine_args(
        EngineArgs(distributed_executor_backend=InWorldExecutor, **arguments)
    )


# --------------------------------------------------------------------------- requests


def sampling_params(request: Request) -> Any:
    """Return what vLLM asks to know of a sample to draw."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # else the model's own ends a response that no stop id was asked for
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """Return what vLLM asks to know of a sequence to score."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)


@dataclass(frozen=True)
class Unfinished:
    """A request under way."""

    key: str
    prompt_length: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    routes: Sequence[Any]
    """Arrays [n, layers, K] of consecutive tokens, where the engine returns them."""


def unfinished(llm: Any) -> Iterator[Unfinished]:
    """Yield the requests of an engine that go on."""
    for state in llm.output_processor.request_states.values():
        yield Unfinished(
            state.external_req_id,
            state.prompt_len,
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs.logprobs,
            getattr(state, "routed_experts_chunks", ()),
        )


# --------------------------------------------------------------------------- the model


def model_runner(llm: Any) -> Any:
    """Return an engine's model runner, which has `get_model`, `reload_weights`, `kv_caches`."""
    return llm.model_executor.driver_worker.worker.model_runner


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


def keep_linear_weights_live() -> None:
    """Stop vLLM's CPU build from packing linear weights into copies and freeing the originals.

    With packed copies an update in place finds empty tensors. Costs under 3% of throughput.
    """
    from vllm.model_executor.layers import utils

    def unpacked(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def keep_expert_weights_live() -> None:
    """Have vLLM's CPU build compute experts from their weights as they were loaded.

    It packs them into storage of the same shape, and its reload (0.32.0) leaves the new ones
    unpacked, so that neither a write in place nor a reload would be right. Without that module
    the proof of layout refuses.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return

    def keep(self: Any, layer: nn.Module) -> None:
        self._use_zentorch = False

    CPUUnquantizedExperts.process_weights_after_loading = keep
    CPUUnquantizedExperts.apply = _apply_experts


def _apply_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **others: Any,
) -> None:
    """Write the experts' weighted sum into output, [T, H], as `CPUUnquantizedExperts.apply` does.

    w1: [E, 2 I, H], gate before up. w2: [E, H, I]. topk_weights, topk_ids: [T, K]. others: what
    vLLM hands over besides, for kernels that need it.
    """
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    num_tokens, num_chosen = topk_ids.shape
    ids, order = torch.sort(topk_ids.flatten().long(), stable=True)
    rows = hidden_states[order // num_chosen]
    parts = []
    for index, part in enumerate(rows.split(torch.bincount(ids, minlength=len(w1)).tolist())):
        bias1, bias2 = (b if b is None else b[index] for b in (self.w1_bias, self.w2_bias))
        gate_up = nn.functional.linear(part, w1[index], bias1)
        inner = gate_up.new_empty(len(part), w2.shape[2])
        if len(part):
            apply_moe_activation(activation, inner, gate_up)
        parts.append(nn.functional.linear(inner, w2[index], bias2))
    computed = torch.empty_like(rows).index_copy_(0, order, torch.cat(parts))
    computed = computed.view(num_tokens, num_chosen, -1)
    if not apply_router_weight_on_input:  # else the rows came weighted
        computed = computed * topk_weights[..., None]
    output.copy_(computed.sum(dim=1))


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


# --------------------------------------------------------------------------- routers


def moe_layers(model: nn.Module) -> list[int]:
    """Return the indices of the layers with experts, ascending.

    Raises: ValueError when this vLLM cannot say which experts it chooses.
    """
    what = "model.moe.replay: this vLLM cannot say which experts it chooses"
    with refusing(what, ImportError, hint="; take 0.32, or set it to false"):
        import vllm.model_executor.layers.fused_moe.routed_experts_capturer  # noqa: F401
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
    return sorted(m.layer_id for m in model.modules() if isinstance(m, MoERunner))


def num_experts(runner: Any) -> tuple[int, int]:
    """Return the experts of a layer, and how many of them a token goes to."""
    config = runner.vllm_config.model_config
    return config.get_num_experts(), config.get_num_experts_per_tok()


class SlotCache:
    """Where the KV cache keeps which token of which request.

    Raises: ValueError for a model without layers that keep all keys of a sequence.
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
            raise ValueError(
                "model.moe.replay: vLLM drops keys of this model that are out of its "
                "attention's window, and the routes of these tokens with them; set "
                "it to false, or engine.kind to transformers"
            )
        self._group, group = found[0]
        self._attention, self._runner = group.layer_names[0], runner
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
        table, at = batch.block_table[self._group], torch.arange(tokens.start, tokens.stop)
        blocks = torch.from_numpy(table.block_table.np[row])[at // table.block_size].long()
        return blocks * table.block_size + at % table.block_size


def watch_routers(model: nn.Module, watcher: Any) -> None:
    """Have each router tell `watcher.capture(layer index, chosen experts [n, K])`."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    bind_routed_experts_capturer(model, watcher)
