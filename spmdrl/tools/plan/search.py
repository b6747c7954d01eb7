"""Plan one layout, and search for the fastest layouts of a number of GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spmdrl.config.fields import least_tokens, useful_tokens
from spmdrl.model.divisibility import misfits
from spmdrl.tools.plan.engine_memory import engine_memory
from spmdrl.tools.plan.host_memory import host_memory
from spmdrl.tools.plan.memory import USABLE_FRAC, Memory
from spmdrl.tools.plan.run import Rates, Run
from spmdrl.tools.plan.seconds import Seconds, step_seconds
from spmdrl.tools.plan.traffic import Flow, exchange_flow, push_flows, trainer_flows
from spmdrl.tools.plan.trainer_memory import most_tokens, trainer_memory
from spmdrl.world.axes import Axes, rank_problems

_POWERS = (1, 2, 4, 8, 16, 32, 64)
_SHARED_FRACS = (0.3, 0.45, 0.6, 0.75)


@dataclass(frozen=True)
class Plan:
    """Memory, traffic and seconds of a layout."""

    axes: Axes
    tokens: int  # of a micro-batch
    most_tokens: int  # largest micro-batch that fits; 0 if none does
    trainer: Memory
    engine: Memory | None
    room: int  # bytes that a rank may use
    engine_frac: float  # engine.gpu_memory_frac
    flows: tuple[Flow, ...]
    seconds: Seconds  # by the best rates
    slow_seconds: Seconds  # by the worst
    host: Mapping[str, int]  # bytes of host memory of the fullest node, by cause
    problems: tuple[str, ...]  # why it cannot run

    @property
    def middle(self) -> float:
        """Seconds of a step in the middle of the range."""
        return (self.seconds.step + self.slow_seconds.step) / 2

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the ranks of the fullest node hold together."""
        return sum(self.host.values())

    @property
    def rank_bytes(self) -> int:
        """Bytes of the fullest rank."""
        if self.engine is None:
            return self.trainer.total
        if self.axes.roles.shares_devices:  # one role works while the other rests
            return max(
                self.trainer.total + self.engine.resting, self.engine.total + self.trainer.resting
            )
        return max(self.trainer.total, self.engine.total)


def make_plan(run: Run, axes: Axes, *, rates: Rates, tokens: int = 0) -> Plan:
    """Plan one layout.

    Args:
        tokens: budget of a micro-batch; 0: that of the run. If the run has none, the largest that
            fits and that an update can fill.
    """
    trainer_axes = replace(axes, inference_tp=1)  # has no effect on trainers: for the cache
    engine = None
    room = int(USABLE_FRAC * rates.memory_bytes)
    trainer_room = room
    if axes.engines:
        engine = engine_memory(run, axes, memory_bytes=rates.memory_bytes)
        if axes.roles.shares_devices:
            trainer_room = room - engine.resting
    most = most_tokens(run, trainer_axes, room=trainer_room)
    filled = useful_tokens(run.cfg, dp_size=axes.dp_size)
    # If nothing fits, most is 0. Then plan the longest sequence, to report how much is missing.
    most_useful = min(max(most, least_tokens(run.cfg)), filled)
    tokens = tokens or run.cfg.batch.tokens_per_microbatch or most_useful
    trainer = trainer_memory(run, trainer_axes, tokens=tokens)
    slots = engine.width if engine else 0
    seconds = step_seconds(run, axes, rates=rates, tokens=tokens, slots=slots)
    slow = step_seconds(run, axes, rates=rates.slowest, tokens=tokens, slots=slots)
    flows = (
        *trainer_flows(run, axes, tokens=tokens),
        *push_flows(run, axes),
        *([exchange_flow(run, axes)] if axes.engines else []),
    )
    frac = run.engine.gpu_memory_frac
    host = host_memory(
        run, axes, tokens=tokens, gpus_per_node=rates.gpus_per_node, trainer=trainer, engine=engine
    )
    plan = Plan(axes, tokens, most, trainer, engine, room, frac, flows, seconds, slow, host, ())
    problems = [
        *_memory_problems(plan, run, trainer_room=trainer_room),
        *_host_problems(plan, rates),
        *_node_problems(axes, rates),
    ]
    return replace(plan, problems=tuple(problems))


def _node_problems(axes: Axes, rates: Rates) -> Iterator[str]:
    if axes.world_size > rates.gpus_per_node and rates.gpus_per_node % axes.inference_tp:
        yield (
            f"an engine of layout.inference_tp {axes.inference_tp} would lie on several nodes of "
            f"{rates.gpus_per_node} GPUs (--gpus-per-node)"
        )


def _host_problems(plan: Plan, rates: Rates) -> Iterator[str]:
    room = rates.host_memory_bytes
    if room and plan.host_bytes > room:
        cause = max(plan.host, key=lambda name: plan.host[name])
        yield (
            f"the ranks of a node hold {_gib(plan.host_bytes)} of host memory, "
            f"{_gib(plan.host_bytes - room)} more than the node's {_gib(room)} "
            f"(--host-memory-gib); most of it is {cause} ({_gib(plan.host[cause])})"
        )


def _memory_problems(plan: Plan, run: Run, *, trainer_room: int) -> Iterator[str]:
    left = max(0, trainer_room)
    over = plan.trainer.total - left
    if over > 0:
        cause = max(plan.trainer.causes, key=lambda name: plan.trainer.causes[name])
        beside = " beside the engine" if plan.axes.roles.shares_devices else ""
        yield (
            f"a trainer rank needs {_gib(plan.trainer.total)}, {_gib(over)} more than the "
            f"{_gib(left)} it may use{beside}; most of it is "
            f"{cause} ({_gib(plan.trainer.causes[cause])})"
        )
    if plan.engine is None:
        return
    is_shared = plan.axes.roles.shares_devices
    left = max(0, plan.room - plan.trainer.resting) if is_shared else plan.room
    short = plan.engine.total - left
    is_short = run.on_gpu and short > 0
    if is_short:
        remedy = "; lower engine.gpu_memory_frac" if plan.engine.sequences and left else ""
        whose = "that the trainer's weights and optimizer state leave it"
        yield (
            f"an engine rank needs {_gib(plan.engine.total)}, {_gib(short)} more than the "
            f"{_gib(left)} {whose if is_shared else 'it may use'}{remedy}"
        )
    if not plan.engine.sequences:
        setting = "engine.gpu_memory_frac" if run.on_gpu else "engine.cpu_kv_cache_gib"
        yield (
            f"an engine rank has no room for one sequence of {run.cfg.longest_in_engine} tokens "
            f"beside {_gib(plan.engine.causes['engine weights'])} of weights; raise "
            f"layout.inference_tp{'' if is_short else f' or {setting}'}"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def remedies(run: Run, plan: Plan, *, rates: Rates) -> list[str]:
    """Return changes of a config with which the layout fits: single ones, or else pairs."""
    changes = list(_changes(run, plan, gpus_per_node=rates.gpus_per_node))
    recomputing = replace(run, kernels=replace(run.kernels, recomputes=True))

    def fits(*chosen: _Change) -> bool:
        own = recomputing if any(change.recomputes for change in chosen) else run
        sizes: dict[str, Any] = {n: size for change in chosen for n, size in change.sizes.items()}
        axes = replace(plan.axes, **sizes)
        tokens = max(change.tokens for change in chosen) or plan.tokens
        if not is_possible(axes, own):
            return False
        return not make_plan(own, axes, rates=rates, tokens=tokens).problems

    single = _first_of_each([(c,) for c in changes if fits(c)])
    if single:
        return single
    pairs = itertools.combinations(changes, 2)
    return _first_of_each(
        [pair for pair in pairs if pair[0].setting != pair[1].setting and fits(*pair)]
    )


@dataclass(frozen=True)
class _Change:
    setting: str
    value: str
    recomputes: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)  # {axis: new size}
    tokens: int = 0


def _changes(run: Run, plan: Plan, *, gpus_per_node: int) -> Iterator[_Change]:
    """Yield changes of a config; for each field, the smallest change first."""
    axes = plan.axes
    if plan.tokens > (least := least_tokens(run.cfg)):
        tokens = plan.most_tokens or least
        yield _Change("batch.tokens_per_microbatch", str(tokens), tokens=tokens)
    if not run.kernels.recomputes:
        yield _Change("model.memory.activation_checkpointing", "full", recomputes=True)
    for name in ("tp", "cp", "ep", "inference_tp"):
        # Only larger sizes help, because more ranks then share the memory.
        most = gpus_per_node if name in ("tp", "inference_tp") else _POWERS[-1]
        for size in _POWERS[1:]:
            if getattr(axes, name) < size <= most:
                yield _Change(f"layout.{name}", str(size), sizes={name: size})
    if axes.dp_replicate > 1:
        yield _Change("layout.dp_replicate", "1", sizes={"dp_replicate": 1})
    for factor in (2, 4, 8, 16):
        ranks = {name: factor * getattr(axes, name) for name in ("world_size", "trainers")}
        value = f"{ranks['world_size']} (of each role {factor} times as many)"
        yield _Change("layout.world_size", value, sizes=ranks)


def _first_of_each(alternatives: list[tuple[_Change, ...]]) -> list[str]:
    """Return the first change, which is the smallest, of each field or pair of fields."""
    texts: dict[tuple[str, ...], str] = {}
    for changes in alternatives:
        texts.setdefault(
            tuple(c.setting for c in changes),
            " with ".join(f"{c.setting} {c.value}" for c in changes),
        )
    return list(texts.values())


def is_possible(axes: Axes, run: Run) -> bool:
    """Return whether the ranks can be arranged and the model can be divided like this."""
    kind = run.engine.kind
    return not any(rank_problems(axes, engine_kind=kind)) and not any(
        misfits(run.shape.counts, axes, context=run.cfg.model.kernels.context, engine_kind=kind)
    )


def layouts(run: Run, *, gpus: int, gpus_per_node: int) -> Iterator[Axes]:
    """Yield the layouts of `gpus` GPUs that the model and this program allow.

    Tensor parallelism of trainers and engines stays within a node. Each replica of the shards has
    whole nodes.
    """
    tps = [n for n in _POWERS if n <= min(gpus_per_node, gpus)]
    engine_tps = tps if run.cfg.objective.samples else [1]
    eps = [n for n in _POWERS if n <= gpus] if run.shape.counts.experts else [1]
    cps = [n for n in _POWERS if n == 1 or run.cfg.longest_sequence // n >= 2048]
    for placement, trainers in _splits(run, gpus=gpus, gpus_per_node=gpus_per_node):
        sizes = itertools.product(_POWERS, tps, cps, eps, engine_tps)
        for replicate, tp, cp, ep, inference_tp in sizes:
            axes = Axes(placement, gpus, trainers, replicate, cp, tp, ep, inference_tp)
            has_whole_nodes = replicate == 1 or trainers // replicate % gpus_per_node == 0
            if has_whole_nodes and is_possible(axes, run):
                yield axes


def _splits(run: Run, *, gpus: int, gpus_per_node: int) -> Iterator[tuple[str, int]]:
    if not run.cfg.objective.samples:
        yield "offline", gpus
        return
    yield "colocated", gpus
    unit = gpus_per_node if gpus >= 4 * gpus_per_node else max(1, gpus // 8)
    eighths = {max(unit, gpus * i // 8 // unit * unit) for i in range(1, 8)}
    for trainers in sorted(eighths):
        if trainers < gpus:
            yield "split", trainers


def distinct(plans: list[Plan]) -> list[Plan]:
    """Return the first of all plans that differ only in details.

    Plans with engines are grouped by how ranks are divided into roles and engines; plans without
    engines, by how the model and its sequences are sharded.
    """
    first: dict[tuple, Plan] = {}
    for plan in plans:
        axes = plan.axes
        key = (
            (axes.placement, axes.trainers, axes.inference_tp)
            if axes.engines
            else (axes.tp, axes.cp, axes.ep)
        )
        first.setdefault(key, plan)
    return list(first.values())


def best_plans(run: Run, *, gpus: int, rates: Rates) -> tuple[list[Plan], Plan | None]:
    """Return the plans that fit, fastest step first; and of the others the one closest to fitting.

    A micro-batch has the run's number of tokens, or fewer if only fewer fit. If both roles share a
    GPU, smaller shares for the engine are tried too.
    """
    # The share in the config is the upper bound.
    own_frac = run.engine.gpu_memory_frac
    fracs = {min(frac, own_frac) for frac in _SHARED_FRACS} if run.on_gpu else {own_frac}
    shared = [
        replace(run, engine=replace(run.engine, gpu_memory_frac=frac)) for frac in sorted(fracs)
    ]
    fitting = []
    nearest = None
    for axes in layouts(run, gpus=gpus, gpus_per_node=rates.gpus_per_node):
        for own in shared if axes.roles.shares_devices else [run]:
            plan = make_plan(own, axes, rates=rates)
            if 0 < plan.most_tokens < plan.tokens:
                plan = make_plan(own, axes, rates=rates, tokens=plan.most_tokens)
            if not plan.problems:
                fitting.append(plan)
            elif nearest is None or plan.rank_bytes < nearest.rank_bytes:
                nearest = plan
    # Of equally fast layouts, the simpler one comes first.
    fitting.sort(
        key=lambda p: (
            round(p.middle, 2),
            p.axes.tp * p.axes.cp * p.axes.ep,
            p.axes.dp_replicate,
            p.axes.inference_tp,
        )
    )
    return fitting, nearest
