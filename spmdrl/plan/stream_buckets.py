"""Buckets of a push, as the weight stream will cut it, from sizes alone."""

from __future__ import annotations

import math

from spmdrl.plan.run import Run
from spmdrl.sync.bucket_size import best_count, overhead_s
from spmdrl.world.axes import Axes
from spmdrl.world.hardware import CPU_LINK, GPUS, LinkCost, gpu_link


def bucket_count(run: Run, axes: Axes, *, nbytes: float) -> int:
    """Return the number of buckets in which an engine rank takes `nbytes`."""
    if run.bucket_bytes:
        return max(1, math.ceil(nbytes / run.bucket_bytes))
    own, is_gathered = _messages(axes), axes.replicas > 1
    return best_count(nbytes, _link(run, axes), messages=own, is_gathered=is_gathered)


def rounds_s(run: Run, axes: Axes, *, nbytes: float) -> float:
    """Return the seconds of a push besides those in which bytes travel."""
    own, is_gathered = _messages(axes), axes.replicas > 1
    count = bucket_count(run, axes, nbytes=nbytes)
    return overhead_s(nbytes, count, _link(run, axes), messages=own, is_gathered=is_gathered)


def _link(run: Run, axes: Axes) -> LinkCost:
    """Return the links of a usual GPU: what rounds cost hardly depends on the kind."""
    return gpu_link(GPUS["H100"], is_one_node=axes.world_size <= 8) if run.on_gpu else CPU_LINK


def _messages(axes: Axes) -> int:
    """Return the messages that a rank sends and takes in a bucket, about."""
    return axes.inference_tp + math.ceil(axes.trainers / max(1, axes.replicas))
