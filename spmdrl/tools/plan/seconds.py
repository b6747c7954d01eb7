"""Seconds of a step by phase, from a GPU's rates.

These estimates serve to compare layouts. They assume that work is spread evenly and that rates are
constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spmdrl.model.flops import forward_flops
from spmdrl.tools.plan.engine_memory import cache_bytes_per_token, decode_step_bytes
from spmdrl.tools.plan.memory import shards_numel
from spmdrl.tools.plan.run import Rates, Run
from spmdrl.tools.plan.shared_prompts import group_of
from spmdrl.tools.plan.traffic import exchange_flow, push_flows, trainer_flows
from spmdrl.world.axes import Axes

_OPTIMIZER_BYTES = 28  # read and written per float32 parameter: weight, gradient, two moments


@dataclass(frozen=True)
class Seconds:
    """One step."""

    generate: float
    update: float
    push: float
    overlaps: bool  # generate and update run at the same time
    limits: dict[str, str]  # {phase: what limits it}
    step_scale: float = 1.0  # seconds of the step over those of its phases

    @property
    def step(self) -> float:
        """The whole step."""
        if self.overlaps:
            work = max(self.generate, self.update) + self.push
        else:
            work = self.generate + self.update + self.push
        return work * self.step_scale

    def scaled(self, scales: Mapping[str, float]) -> Seconds:
        """Return these seconds, each multiplied by the scale that a run measured; see
        measured_run.py."""
        return replace(
            self,
            generate=self.generate * scales.get("generate", 1.0),
            update=self.update * scales.get("update", 1.0),
            push=self.push * scales.get("push", 1.0),
            step_scale=scales.get("step", 1.0),
        )

    @property
    def limit(self) -> str:
        """The longest phase, and what limits it."""
        phases = {"generate": self.generate, "update": self.update, "push": self.push}
        longest = max(phases, key=lambda name: phases[name])
        return f"{longest}: {self.limits[longest]}"


def step_seconds(run: Run, axes: Axes, *, rates: Rates, tokens: int, slots: int) -> Seconds:
    """Estimate a step.

    Args:
        tokens: budget of a micro-batch.
        slots: sequences that an engine decodes together.
    """
    generate, of_generate = _generate(run, axes, rates=rates, slots=slots)
    update, of_update = _update(run, axes, rates=rates, tokens=tokens)
    push = {flow.name: flow.seconds(rates) for flow in push_flows(run, axes)}
    generate += exchange_flow(run, axes).seconds(rates) if axes.engines else 0.0
    found = Seconds(
        generate,
        update,
        sum(push.values()),
        run.cfg.lag > 0 and axes.roles.overlaps,
        {
            "generate": of_generate,
            "update": of_update,
            "push": max(push, key=lambda name: push[name]) if push else "nothing",
        },
    )
    return found.scaled(rates.scales)


def _update(run: Run, axes: Axes, *, rates: Rates, tokens: int) -> tuple[float, str]:
    shape = run.shape
    epochs = run.cfg.batch.epochs
    # A backward pass has twice the matmuls of a forward pass; recomputation is one more of these.
    passes = run.forwards + epochs * (4 if run.kernels.recomputes else 3)
    passes += 3 * run.trained_models * (run.cfg.critic.epochs or epochs)
    each = passes * _sequence_flops(run, axes, tokens=tokens)
    each += run.teacher_passes * _sequence_flops(run.taught, axes, tokens=tokens)
    compute = run.sequences * each / axes.trainers / rates.flops
    flows = trainer_flows(run, axes, tokens=tokens)
    hidden = {f.name: f.seconds(rates) for f in flows if f.hides}
    open_ = {f.name: f.seconds(rates) for f in flows if not f.hides}
    steps = (
        run.cfg.batch.optimizer_steps
        * shards_numel(shape, axes)
        * _OPTIMIZER_BYTES
        / (rates.gpu.memory_bytes_per_s * rates.memory_frac)
    )
    work = compute + sum(open_.values())
    overlapped = sum(hidden.values())
    parts = {"matmuls": compute} | open_ | ({"FSDP": overlapped} if overlapped > work else {})
    return max(work, overlapped) + steps, max(parts, key=lambda name: parts[name])


def _sequence_flops(run: Run, axes: Axes, *, tokens: int) -> float:
    """Return the FLOPs of a forward pass over a sequence, with its share of the group's prompt."""
    group = group_of(run, axes, tokens=tokens)
    own = forward_flops(
        run.shape,
        lengths=group.lengths,
        num_scored=group.size * int(run.response_tokens),
        before=group.before,
    ).total
    return own / group.size


def _generate(run: Run, axes: Axes, *, rates: Rates, slots: int) -> tuple[float, str]:
    """Estimate decode steps of a full engine, then those until the longest sequence ends."""
    shape = run.shape
    if not axes.engines or not slots:
        return 0.0, "nothing"
    tp = axes.inference_tp
    each = run.sequences / axes.replicas
    width = max(1.0, min(slots, each))
    steps = max(1.0, each * run.response_tokens / width) + (
        run.cfg.sampling.max_response_tokens - run.response_tokens
    )
    mean_width = max(1.0, each * run.response_tokens / steps)
    bandwidth = rates.gpu.memory_bytes_per_s * rates.memory_frac
    weights = decode_step_bytes(run, axes, width=mean_width)
    context = run.prompt_tokens + run.response_tokens / 2
    cache = mean_width * context * cache_bytes_per_token(run, axes)
    reduces = 0.0
    if tp > 1:
        sent = 2 * (tp - 1) / tp * mean_width * shape.hidden * run.engine_bytes
        reduces = shape.layers * (sent / rates.link(tp) + rates.collective_s)
    parts = {
        "reading weights": weights / bandwidth,
        "reading the KV cache": cache / bandwidth,
        "tp all-reduces": reduces,
        "work on the host": rates.engine_step_s,
    }
    matmuls = 2 * shape.active_numel * mean_width / tp / rates.flops
    reading = parts["reading weights"] + parts["reading the KV cache"]
    # Reading and matmuls overlap, so only the longer one counts.
    if matmuls > reading:
        parts |= {"matmuls": matmuls, "reading weights": 0.0, "reading the KV cache": 0.0}
    prompts = run.cfg.batch.prompts_per_step / axes.replicas
    prefill = 2 * shape.active_numel * prompts * run.prompt_tokens / tp
    limit = max(parts, key=lambda name: parts[name])
    if steps > 2 * each * run.response_tokens / width:
        limit += ", few sequences at once"
    return steps * sum(parts.values()) + prefill / rates.flops, limit
