"""A plan as text for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from spmdrl.config.fields import useful_tokens
from spmdrl.tools.plan.engine_memory import best_num_seqs
from spmdrl.tools.plan.memory import Memory
from spmdrl.tools.plan.run import FORMULA_RATES, Rates, Run
from spmdrl.tools.plan.search import Plan
from spmdrl.tools.plan.seconds import step_seconds
from spmdrl.tools.plan.slower_links import push_lines
from spmdrl.world.axes import Axes

_GIB = 2**30


def page(plan: Plan, best: Sequence[Plan], *, run: Run, rates: Rates) -> Iterator[str]:
    """Yield the lines of a plan and of the layouts to compare it with."""
    parts = [
        _head(run, rates),
        [f"Layout: {layout_text(plan.axes)}"],
        _memory_lines(plan, run, rates),
        _host_lines(plan, rates),
    ]
    if not plan.problems:
        parts += [_flow_lines(plan, rates), _second_lines(plan, run, rates)]
        slower = list(push_lines(run, plan.axes))
        parts += [slower] if slower else []
        parts += [_best_lines(best)] if best else []
    for at, lines in enumerate(parts):
        yield from [""] if at else []
        yield from lines


def _head(run: Run, rates: Rates) -> Iterator[str]:
    shape = run.shape
    active = (
        f", {shape.active_numel / 1e9:.1f} G in a token's matmuls" if shape.counts.experts else ""
    )
    yield (
        f"{shape.name}: {shape.numel / 1e9:.2f} G parameters{active}, {len(shape.blocks)} "
        f"blocks of {shape.hidden}"
    )
    gpu = rates.gpu
    if run.on_gpu:
        yield (
            f"{gpu.name}: {gpu.memory_gib:g} GiB, {gpu.flops / 1e12:g} TFLOP/s, memory "
            f"{gpu.memory_bytes_per_s / 1e12:g} TB/s, node {gpu.node_bytes_per_s / 1e9:g} GB/s, "
            f"network {gpu.network_bytes_per_s / 1e9:g} GB/s, {rates.gpus_per_node} to a node"
        )
    yield f"rates: {'; '.join(_rate_texts(rates))}"
    yield f"step: {_step_text(run)}"
    if shape.counts.experts:
        yield "routing: assumed to be even over experts; uneven routing takes more time and memory"
    if run.cfg.layout.roles.has_engines:
        pushed = "slices, written in place"
        if run.reloads:
            pushed = f"whole tensors to each engine rank, because {run.reloads}"
        yield f"push: {pushed}"


def _step_text(run: Run) -> str:
    """Return the size of one step's batch."""
    return (
        f"{run.sequences} sequences of {run.prompt_tokens:g} + {run.response_tokens:g} "
        f"tokens (mean; longest {run.cfg.longest_sequence}), {run.cfg.batch.updates_per_step} "
        f"update{'s' * (run.cfg.batch.updates_per_step > 1)}"
        + (f", {run.cfg.batch.epochs} times" if run.cfg.batch.epochs > 1 else "")
        + (
            f"; teachers read prompts of {run.teacher_prompt_tokens:g} tokens (mean)"
            if run.teacher_passes and run.cfg.hints_teacher
            else ""
        )
        + ("; seconds are without a tower's work" if run.shape.tower else "")
    )


def _rate_texts(rates: Rates) -> Iterator[str]:
    """Yield for each source its rates, and the source."""
    for source in dict.fromkeys(map(rates.source, FORMULA_RATES)):
        if rates.scales and source != "formula":
            times = ", ".join(f"{name} {scale:.3g}" for name, scale in rates.scales.items())
            yield f"times the formula's seconds: {times} ({source})"
            continue
        own = [name for name in FORMULA_RATES if rates.source(name) == source]
        yield ", ".join(f"{name} {_rate(rates, name)}" for name in own) + f" ({source})"


def _rate(rates: Rates, name: str) -> str:
    """Return a rate, or its range from the smaller to the larger value."""
    ends = {getattr(rates, name), rates.slow.get(name, getattr(rates, name))}
    return " to ".join(f"{value:g}" for value in sorted(ends))


def _range(plan: Plan, name: str, digits: int) -> str:
    """Return the seconds of a phase by the best and by the worst rates."""
    return _ends((getattr(plan.seconds, name), getattr(plan.slow_seconds, name)), digits)


def _ends(ends: Sequence[float], digits: int) -> str:
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in ends))


def layout_text(axes: Axes) -> str:
    """Return a layout in one line."""
    parts = [f"{axes.placement}, {axes.world_size} ranks"]
    names = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
    sizes = {name: getattr(axes, name) for name in names}
    mesh = [f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "dp_shard"]
    parts.append(f"{axes.trainers} train ({', '.join(mesh)})")
    if axes.engines:
        parts.append(f"{axes.engines} generate ({axes.replicas} engines, tp {axes.inference_tp})")
    return "; ".join(parts)


def brief(plan: Plan, *, run: Run, rates: Rates) -> Iterator[str]:
    """Yield a plan in three lines: memory of a rank, seconds of a step, size of the step."""
    engine = f", engine {plan.engine.total / _GIB:.1f}" if plan.engine else ""
    verdict = "does not fit" if plan.problems else "fits"
    yield (
        f"{verdict}: the fullest rank holds {plan.rank_bytes / _GIB:.1f} of {plan.room / _GIB:.1f} "
        f"GiB on {rates.gpu.name} (trainer {plan.trainer.total / _GIB:.1f}{engine}); a node's "
        f"host memory {plan.host_bytes / _GIB:.0f} GiB"
    )
    phases = ", ".join(f"{n} {_range(plan, n, 1)}" for n in ("generate", "update", "push"))
    sources = sorted(set(map(rates.source, FORMULA_RATES)))
    yield f"step: {_range(plan, 'step', 1)} s ({phases}; rates: {', '.join(sources)})"
    yield f"of {_step_text(run)}"


# --------------------------------------------------------------------------- parts


def _memory_lines(plan: Plan, run: Run, rates: Rates) -> Iterator[str]:
    yield f"Memory of a rank, GiB (of {plan.room / _GIB:.1f} that it may use)"
    auto = "" if run.cfg.batch.tokens_per_microbatch else " (auto)"
    own = f"trainer, {plan.trainer.moment}, micro-batch of {plan.tokens} tokens{auto}"
    yield from _cause_lines(own, plan.trainer)
    if plan.engine is not None:
        yield from _cause_lines("engine", plan.engine)
        yield (
            f"    the cache holds {plan.engine.sequences} of the longest sequences "
            f"(engine.max_num_seqs {run.engine.max_num_seqs})"
        )
        yield from _waves(plan, run, rates)
    most = str(plan.most_tokens)
    if plan.most_tokens == 0:
        most = "none: not even the longest sequence"
    elif plan.most_tokens >= useful_tokens(run.cfg, dp_size=plan.axes.dp_size):
        most += " (no update fills more)"
    yield f"  largest tokens_per_microbatch that fits: {most}"


def _waves(plan: Plan, run: Run, rates: Rates) -> Iterator[str]:
    """Yield which engine.max_num_seqs would be better, if one would."""
    own = replace(run, engine=replace(run.engine, gpu_memory_frac=plan.engine_frac))
    best = best_num_seqs(own, plan.axes, memory_bytes=rates.memory_bytes)
    each = -(-run.sequences // plan.axes.replicas)
    if best > run.engine.max_num_seqs < each:
        yield (
            f"    engine.max_num_seqs {best} would decode {best} of an engine's {each} sequences "
            f"of a step at once"
        )


def _cause_lines(title: str, memory: Memory) -> Iterator[str]:
    yield f"  {title:<66} {memory.total / _GIB:9.2f}"
    for name, size in memory.causes.items():
        yield f"    {name:<30} {size / _GIB:9.2f}"


def _host_lines(plan: Plan, rates: Rates) -> Iterator[str]:
    room = rates.host_memory_bytes
    has = f"of {room / _GIB:.1f}" if room else "give --host-memory-gib to compare"
    yield f"{f'Host memory of a node, GiB ({has})':<68} {plan.host_bytes / _GIB:9.2f}"
    for name, size in plan.host.items():
        yield f"    {name:<30} {size / _GIB:9.2f}"


def _flow_lines(plan: Plan, rates: Rates) -> Iterator[str]:
    yield "A rank sends in a step, GB             node  network   seconds"
    for flow in plan.flows:
        gigabytes = f"{flow.bytes / 1e9:9.3f}"
        cells = " " * 9 + gigabytes if flow.leaves_node(rates) else gigabytes + " " * 9
        where = ""
        if flow.hides:
            where = "  during matmuls"
        elif flow.over:
            where = {"host": "  over PCIe", "gloo": "  by gloo"}[flow.over]
        yield f"  {flow.name:<31} {cells} {flow.seconds(rates):9.3f}{where}"


def _second_lines(plan: Plan, run: Run, rates: Rates) -> Iterator[str]:
    """Yield the seconds of each phase."""
    own = plan.slow_seconds
    yield "Seconds of a step (estimate)"
    for name in ("generate", "update", "push"):
        if getattr(own, name):
            yield f"  {name:<10} {_range(plan, name, 2):>18}  limited by {own.limits[name]}"
    # Of the same layout, where every sequence computes its own prompt.
    without = replace(run, shares_prefixes=False)
    alone = [
        step_seconds(without, plan.axes, rates=ends, tokens=plan.tokens, slots=0).update
        for ends in (rates, rates.slowest)
    ]
    if own.update < alone[-1]:
        yield (
            "    the prompt of a group is computed once (with batch.share_prefixes never: "
            f"{_ends(alone, 2)} s)"
        )
    if run.unshared and run.cfg.sequences_per_row > 1:
        yield f"    each sequence computes its own prompt: {run.unshared}"
    beside = "  (generate beside update)" if own.overlaps else ""
    what = ""
    if run.cfg.objective.samples and own.step:
        tokens = run.sequences * run.response_tokens
        ends = (f"{tokens / seconds.step:,.0f}" for seconds in (own, plan.seconds))
        what = f", {' to '.join(dict.fromkeys(ends))} sampled tokens/s"
    yield f"  step       {_range(plan, 'step', 2):>18}{beside}{what}"


def _best_lines(best: Sequence[Plan]) -> Iterator[str]:
    yield "Best layouts by estimated seconds, in the middle of their ranges"
    yield (
        "  placement  train replicate shard  cp  tp  ep  engine tp  frac  micro-batch   GiB"
        "  gen s  upd s push s step s  limited by"
    )
    for plan in best:
        axes = plan.axes
        own = plan.slow_seconds
        gen, upd, push = (
            (getattr(plan.seconds, name) + getattr(own, name)) / 2
            for name in ("generate", "update", "push")
        )
        engine = (
            f"{axes.inference_tp:>9} {plan.engine_frac:>5.2f}"
            if axes.engines
            else f"{'-':>9} {'-':>5}"
        )
        yield (
            f"  {axes.placement:<10} {axes.trainers:>5} {axes.dp_replicate:>9} "
            f"{axes.dp_shard:>5} {axes.cp:>3} {axes.tp:>3} {axes.ep:>3}  {engine} "
            f"{plan.tokens:>12} {plan.rank_bytes / _GIB:5.1f} {gen:6.1f} "
            f"{upd:6.1f} {push:6.2f} {plan.middle:6.1f}  {own.limit}"
        )


# --------------------------------------------------------------------------- for programs


def rates_dict(rates: Rates) -> dict[str, Any]:
    """Return each rate that can be measured, at its best and at its worst, and its source."""
    found: dict[str, Any] = {}
    for name in FORMULA_RATES:
        best = getattr(rates, name)
        worst = rates.slow.get(name, best)
        found[name] = {"best": best, "worst": worst, "source": rates.source(name)}
    return found | ({"scales": dict(rates.scales)} if rates.scales else {})


def as_dict(plan: Plan, *, rates: Rates) -> dict[str, Any]:
    """Return a plan as plain values: bytes, seconds, tokens."""
    axes = plan.axes
    names = ("generate", "update", "push", "step")
    return {
        "layout": vars(axes) | {"dp_shard": axes.dp_shard, "engines": axes.engines},
        "problems": list(plan.problems),
        "tokens_per_microbatch": plan.tokens,
        "largest_tokens_per_microbatch": plan.most_tokens,
        "room_bytes": plan.room,
        "trainer_bytes": dict(plan.trainer.causes),
        "trainer_moment": plan.trainer.moment,
        "engine_bytes": dict(plan.engine.causes) if plan.engine else {},
        "host_bytes": dict(plan.host),
        "cache_sequences": plan.engine.sequences if plan.engine else 0,
        "sent_bytes": {
            f.name: {"bytes": f.bytes, "seconds": f.seconds(rates), "link": f.link(rates)}
            for f in plan.flows
        },
        "seconds": {name: getattr(plan.seconds, name) for name in names},
        "slow_seconds": {name: getattr(plan.slow_seconds, name) for name in names},
        "limits": plan.slow_seconds.limits,
    }
