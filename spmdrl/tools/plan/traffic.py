"""Bytes that one rank sends in a step, by cause and by link."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from spmdrl.model.block_shape import StateLayer
from spmdrl.sync.buckets import LARGEST
from spmdrl.tools.plan.engine_memory import engine_weight_bytes, reload_bytes
from spmdrl.tools.plan.memory import (
    bucket_count,
    expert_shards_numel,
    lora_numel,
    policy_bytes,
    rounds_s,
    shards_numel,
)
from spmdrl.tools.plan.run import Rates, Run
from spmdrl.tools.plan.shared_prompts import group_of
from spmdrl.tools.plan.trainer_memory import cut_of
from spmdrl.world.axes import Axes
from spmdrl.world.machine.hardware import CPU_LINK

_TOKEN_BYTES = 12  # id, marks and logprob, see exchange.py


@dataclass(frozen=True)
class Flow:
    """What one rank sends in one step."""

    name: str
    bytes: float
    calls: float  # collectives
    span: int  # neighbouring ranks that its group reaches over
    hides: bool = False  # overlaps with computation
    rounds_s: float = 0.0  # seconds of the rounds in which it travels
    over: Literal["", "host", "gloo"] = ""
    """`host`: between a GPU and its host's memory; `gloo`: between processes, through their hosts'
    memory; else between GPUs."""
    bytes_per_s: float = 0.0
    """Rate of its link; 0: by the hardware."""

    def link(self, rates: Rates) -> str:
        """Return which link it is on."""
        return self.over or ("network" if self.leaves_node(rates) else "node")

    def leaves_node(self, rates: Rates) -> bool:
        """Return whether its group reaches over several nodes."""
        return self.span > rates.gpus_per_node

    def seconds(self, rates: Rates) -> float:
        """Return the time it takes on its link, if nothing else is on it."""
        if self.over == "gloo":
            return self.bytes / CPU_LINK.bytes_per_s + self.calls * CPU_LINK.round_s
        known = rates.host_link if self.over == "host" else rates.link(self.span)
        bandwidth = self.bytes_per_s or known
        return self.bytes / bandwidth + self.calls * rates.collective_s + self.rounds_s


def microbatches(run: Run, axes: Axes, *, tokens: int) -> int:
    """Return the micro-batches of a dp rank in one step, all updates together."""
    group = group_of(run, axes, tokens=tokens)
    planned = run.sequences / group.size * group.planned_tokens
    each = planned / axes.dp_size / run.cfg.batch.updates_per_step
    return run.cfg.batch.updates_per_step * max(1, math.ceil(each / tokens))


def trainer_flows(run: Run, axes: Axes, *, tokens: int) -> list[Flow]:
    """Return the flows of a trainer rank in annotation and update.

    Args:
        tokens: budget of a micro-batch.
    """
    count = microbatches(run, axes, tokens=tokens)
    group = group_of(run, axes, tokens=tokens)
    computed = run.sequences / group.size * group.computed_tokens
    found = [
        *_weight_flows(run, axes, count=count),
        *_activation_flows(run, axes, count=count, computed=computed),
    ]
    return [flow for flow in found if flow.bytes]


def _weight_flows(run: Run, axes: Axes, *, count: int) -> Iterator[Flow]:
    """Yield what sharding and replicating weights sends in `count` micro-batches."""
    shape = run.shape
    n = axes.fsdp
    memory = run.cfg.model.memory
    updates = run.cfg.batch.optimizer_steps
    epochs = run.cfg.batch.epochs
    blocks = len(shape.blocks)
    state = shards_numel(shape, axes)
    trained = lora_numel(run, axes) if run.lora_numel else state
    apart = expert_shards_numel(shape, axes)  # gathered among the ranks that ep leaves
    # A gather sends a rank's shard to each of the other ranks.
    sent = (n - 1) * (state - apart) + (axes.replica // axes.ep - 1) * apart
    reduced = (n - 1) * trained if run.lora_numel and sent else sent
    # For the forward pass, and again for the backward pass unless weights stay gathered; once for
    # passes without a backward pass. Every teacher takes part in each micro-batch.
    teachers = run.teacher_passes * max(1, len(run.cfg.teachers))
    gathers = count * (epochs * (1 if memory.reshard == "never" else 2) + run.forwards + teachers)
    reduces = updates if memory.reduce == "last" else count * epochs
    c = run.kernels.compute_bytes
    span = axes.span("fsdp")
    nbytes = (n - 1) * policy_bytes(run, axes) if run.base else c * sent
    yield Flow("FSDP gathers", gathers * nbytes, gathers * blocks, span, hides=True)
    yield Flow("FSDP reduces", reduces * 4 * reduced, reduces * blocks, span, hides=True)
    copies = axes.dp_replicate
    span = axes.span("dp_replicate")
    # A ring all-reduce.
    summed = updates * (2 * (copies - 1) / copies) * 4 * trained
    yield Flow("dp_replicate reduces", summed, updates * blocks, span, hides=True)


def _activation_flows(run: Run, axes: Axes, *, count: int, computed: float) -> Iterator[Flow]:
    """Yield what sharing out the work on rows sends in `count` micro-batches.

    Args:
        computed: tokens of a step, of all ranks.
    """
    shape = run.shape
    c = run.kernels.compute_bytes
    own = computed / axes.dp_size / axes.cp  # tokens of this rank in a step
    # Forward, again where it is computed again, backward.
    longer = (run.teacher_prompt_tokens + run.response_tokens) / (run.tokens / run.sequences)
    trained = run.cfg.batch.epochs * (3 if run.kernels.recomputes else 2)
    passes = run.forwards + trained + run.teacher_passes * longer
    calls = 2 * passes * count  # there and back, of a layer
    # Hidden states are summed for attention and each MLP; with sequence parallelism that is a
    # reduce-scatter and an all-gather, the same bytes.
    times = sum(block.dense_layers for block in shape.blocks) * passes
    share = 2 * (axes.tp - 1) / axes.tp
    sent = times * share * own * shape.hidden * c
    yield Flow("tp all-reduces", sent, times * count, axes.span("tp"))
    states = [block.state for block in shape.blocks if block.state]
    width = sum(map(_state_width, states))
    sent = passes * (axes.tp - 1) / axes.tp * own / axes.tp * width * c
    yield Flow("tp exchanges of states", sent, calls * len(states), axes.span("tp"))
    sent = passes * own * c * _context_width(run, axes)
    mixers = len(states) + sum(block.attention.heads > 0 for block in shape.blocks)
    yield Flow("cp exchanges", sent, calls * mixers, axes.span("cp"))
    experts = [block.experts for block in shape.blocks if block.experts]
    width = sum(each.top_k * each.width for each in experts)
    sent = 2 * passes * ((axes.ep - 1) / axes.ep) * own / axes.tp * width * c
    yield Flow("ep exchanges", sent, calls * len(experts), axes.span("ep"))


def _context_width(run: Run, axes: Axes) -> float:
    """Return the elements that a token's attention or state sends over cp, in all blocks.

    Ulysses moves queries, keys, values and outputs once. If cp does not divide the heads, keys and
    values go to all other ranks.
    """
    total = 0.0
    for block, count in run.shape.kinds:
        if block.state is not None:  # tokens for heads, and back
            total += count * (axes.cp - 1) / axes.cp * _state_width(block.state) / axes.tp
        own = block.attention
        keys = own.kv_heads * (own.qk_dim + own.v_dim)
        if cut_of(run, axes).method != "ulysses":
            total += count * (axes.cp - 1) * keys / axes.tp
        else:
            queries = own.heads * (own.qk_dim + own.v_dim)
            total += count * (axes.cp - 1) / axes.cp * (keys + queries) / axes.tp
    return total


def _state_width(own: StateLayer) -> int:
    """Return the elements that a token of a layer with a state sends to other ranks: twice the
    channels of its convolution, the keys, values and gates of its heads, and its output."""
    return 2 * own.channels + own.heads * (2 * own.keys + 2 * own.values + 2)


def push_flows(run: Run, axes: Axes) -> list[Flow]:
    """Return what a rank sends in a push of the weights, and what a sleeping engine stores on its
    host and fetches again."""
    if not axes.engines:
        return []
    flows = _reload_flows(run, axes) if run.reloads else _slice_flows(run, axes)
    rate = run.cfg.stream.gbit_per_s * 1e9 / 8
    flows = [replace(flow, bytes_per_s=rate) for flow in flows]
    if run.keeps_weights(axes):
        both_ways = 2 * engine_weight_bytes(run, axes)
        flows.append(Flow("engine weights to and from host", both_ways, 0, 1, over="host"))
    return flows


def _slice_flows(run: Run, axes: Axes) -> list[Flow]:
    """Return the flows of a push that writes slices in place.

    A trainer sends its share of the weights, or what one engine rank takes if that is more. An
    engine rank sends its part to the other replicas.
    """
    whole, busiest = busiest_bytes(run, axes)
    flows = []
    if axes.roles.overlaps:
        rounds = rounds_s(run, axes, nbytes=whole)
        flows.append(Flow("stream", busiest, 0, axes.world_size, rounds_s=rounds))
    if axes.replicas > 1:
        share = (axes.replicas - 1) / axes.replicas
        buckets = bucket_count(run, axes, nbytes=whole)
        flows.append(Flow("stream among replicas", whole * share, buckets, axes.engines))
    return flows


def busiest_bytes(run: Run, axes: Axes) -> tuple[float, float]:
    """Return the bytes that an engine rank takes, and those that the busiest rank sends or receives
    between trainers and engines."""
    whole = engine_weight_bytes(run, axes)
    if run.cfg.model.lora.pushes_adapter:  # every tp rank takes whole adapters
        whole = run.engine_bytes * run.lora_numel
    return whole, whole * max(axes.inference_tp / axes.trainers, 1 / axes.replicas)


def _reload_flows(run: Run, axes: Axes) -> list[Flow]:
    """Return the flows of whole tensors: every engine rank gets all of them. Each of them leaves
    the trainers once, and engine ranks gather their parts."""
    whole = reload_bytes(run)
    count = max(1, math.ceil(whole / (run.cfg.stream.bucket_bytes or LARGEST)))
    flows = []
    if axes.roles.overlaps:
        busiest = whole * max(1 / axes.trainers, 1 / axes.engines)
        flows.append(Flow("whole tensors", busiest, count, axes.world_size))
    if axes.engines > 1:
        share = (axes.engines - 1) / axes.engines
        flows.append(Flow("whole tensors among engines", whole * share, count, axes.engines))
    return flows


def exchange_flow(run: Run, axes: Axes) -> Flow:
    """Return what an engine rank sends of its rollouts to the trainers."""
    copies = axes.cp * axes.tp
    sent = run.tokens * _TOKEN_BYTES * copies / max(1, axes.replicas)
    return Flow("rollouts", sent if axes.engines else 0, 1, axes.world_size, over="gloo")
