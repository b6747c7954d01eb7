"""Bytes of host memory that the ranks of a node hold together, by cause.

Copies of weights and optimizer state are exact; the others are formulas or assumptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from spmdrl.model.parallel.recompute import has
from spmdrl.tools.plan.engine_memory import engine_weight_bytes
from spmdrl.tools.plan.memory import Memory, lora_numel, shards_numel
from spmdrl.tools.plan.run import Run, item_bytes, moment_bytes
from spmdrl.tools.plan.trainer_memory import trainer_memory
from spmdrl.world.axes import Axes

PROCESS = 4 * 2**30
"""Bytes of a rank's own process on a GPU (libraries, CUDA's modules, vLLM), assumed."""
_CPU_PROCESS = 2**30
_WORKER = 2**29  # bytes of a worker process of rewards and environments, assumed
_TOKEN = 64  # bytes of a rollout's token: ids, logprobs, versions, marks, columns; assumed


def host_memory(
    run: Run, axes: Axes, *, tokens: int, gpus_per_node: int, trainer: Memory, engine: Memory | None
) -> dict[str, int]:
    """Return what the fullest node holds, by cause.

    Args:
        tokens: budget of a micro-batch.
        trainer, engine: what a rank of each role holds on its device; on the CPU that is the host.
    """
    of_trainer = dict(_trainer_causes(run, axes, tokens=tokens))
    of_engine = dict(_engine_causes(run, axes)) if axes.engines else {}
    of_rank = {"processes": PROCESS if run.on_gpu else _CPU_PROCESS}
    if not run.on_gpu and axes.roles.shares_devices and engine is not None:
        resting = max(trainer.total + engine.resting, engine.total + trainer.resting)
        of_rank["trainers and engines"] = resting
    elif not run.on_gpu:
        of_trainer["trainers"] = trainer.total
        of_engine |= {"engines": engine.total} if engine is not None else {}
    nodes = []
    for trainers, engines in sorted(set(_nodes(axes, gpus_per_node))):
        ranks = max(trainers, engines) if axes.roles.shares_devices else trainers + engines
        held: Counter[str] = Counter()
        for count, causes in ((ranks, of_rank), (trainers, of_trainer), (engines, of_engine)):
            for name, size in causes.items():
                held[name] += int(count * size)
        nodes.append({name: size for name, size in held.items() if size})
    return max(nodes, key=lambda causes: sum(causes.values()))


def _nodes(axes: Axes, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """Yield the trainer ranks and the engine ranks of each node."""
    size = axes.world_size
    training = axes.roles.trainer_ranks(size, trainers=axes.trainers)
    generating = axes.roles.inference_ranks(size, trainers=axes.trainers)
    for first in range(0, size, gpus_per_node):
        last = min(first + gpus_per_node, size)
        yield _count(training, first, last), _count(generating, first, last)


def _count(ranks: range, first: int, last: int) -> int:
    """Return how many of `ranks` are in [first, last)."""
    return max(0, min(ranks.stop, last) - max(ranks.start, first))


def _trainer_causes(run: Run, axes: Axes, *, tokens: int) -> Iterator[tuple[str, int]]:
    alone = replace(axes, inference_tp=1)
    memory = run.cfg.model.memory
    state = shards_numel(run.shape, axes)
    trained = lora_numel(run, axes) if run.lora_numel else state
    master = 4 if run.lora_numel else item_bytes(memory.master_dtype)
    moments = 2 * moment_bytes(memory.optimizer_dtype)
    critic = run.trained_models * state * (master + moments)
    # checkpoint/save.py copies what it saves, and writes the copy while training goes on.
    yield "copies for checkpoints", int(trained * (master + moments) + critic)
    if run.on_gpu and has(memory.offload, "optimizer"):
        yield "optimizer offloaded", int(trained * moments)
    if run.on_gpu and has(memory.offload, "parameters"):
        yield "weights and gradients offloaded", int(state * master + trained * master)
    if run.kernels.on_host:
        kept = replace(run, kernels=replace(run.kernels, on_host=False))
        before = trainer_memory(kept, alone, tokens=tokens).causes["activations"]
        after = trainer_memory(run, alone, tokens=tokens).causes["activations"]
        yield "activations offloaded", max(0, before - after)
    yield "rollouts", int(run.tokens / axes.dp_size * _token_bytes(run) * (1 + run.cfg.lag))


def _engine_causes(run: Run, axes: Axes) -> Iterator[tuple[str, int]]:
    if run.keeps_weights(axes):
        yield "engine weights while it sleeps", engine_weight_bytes(run, axes)
    own = run.tokens / axes.replicas
    yield "rollouts", int(own * _token_bytes(run) * (1 + run.cfg.lag))
    # A replica's workers belong to its first rank.
    yield "reward workers", run.cfg.rewards.workers * _WORKER // axes.inference_tp


def _token_bytes(run: Run) -> int:
    """Return the bytes of a token of a rollout, with the experts that it went to."""
    if not run.cfg.model.moe.replay:
        return _TOKEN
    routes = 0
    for block, count in run.shape.kinds:
        if block.experts:
            routes += count * block.experts.top_k * (1 if block.experts.count <= 128 else 2)
    return _TOKEN + routes
