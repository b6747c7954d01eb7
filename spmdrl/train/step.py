"""One optimizer step: micro-batches forward and backward, one norm, one decision on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algorithms.mismatch import gap_sums
from spmdrl.run_folder import make_folder, open_file
from spmdrl.train.microbatches import PreparedMicrobatch, Stats, on_host
from spmdrl.world.world import World

log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Sums of one optimizer step on the device, without a copy to the host."""

    loss: list[Tensor] = field(default_factory=list)
    stats: dict[str, list[Tensor]] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, microbatch: PreparedMicrobatch, loss: Tensor, stats: Stats) -> None:
        """Add one micro-batch."""
        self.loss.append(loss.detach())
        self.num_tokens += microbatch.num_tokens
        for name, (numerator, denominator) in stats.items():
            pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
            self.stats.setdefault(name, []).append(pair)

    def pack(self) -> Tensor:
        """Return [loss, tokens, pairs by name] float64.

        A pair is two numbers, or for `gap_histogram` two rows of numbers.
        """
        # One stack and one copy to the host per optimizer step. Names are sorted, since ranks add
        # these numbers up by place.
        pairs = [torch.stack(self.stats[name]).sum(0).flatten() for name in sorted(self.stats)]
        loss = torch.stack(self.loss).sum().double()[None]
        return torch.cat([loss, loss.new_full((1,), self.num_tokens), *pairs])


@dataclass(frozen=True)
class GlobalTotals:
    """What all trainer ranks know after the sums of an optimizer step were exchanged."""

    grad_norm: float
    loss: float
    num_tokens: float
    stats: dict[str, tuple[float, float]]
    layer_norms: dict[str, float]
    """{layer: norm of its gradient}, of the layers that were asked for."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken; the same on all trainer ranks."""
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


def exchange_totals(
    totals: Totals, norm_shares: Tensor, *, world: World, layers: Sequence[str] = ()
) -> GlobalTotals:
    """Add the totals of all trainer ranks up, in one small collective.

    Args:
        norm_shares: [1 + layers] float64, see square_sums.
        layers: the same on all trainer ranks.
    """
    # Every rank has norm shares of its own parameters. The totals are the same on all ranks of a
    # data-parallel index, so one of these counts them.
    share, layer_shares = norm_shares.cpu().split([1, len(layers)])
    packed = torch.cat([share, world.count_once(totals.pack()), layer_shares])
    dist.all_reduce(packed, group=world.trainer_control)
    square, loss, num_tokens = packed[:3].tolist()
    names = sorted(totals.stats)
    sizes = [totals.stats[name][0].numel() for name in names]
    *parts, squares = packed[3:].split([*sizes, len(layers)])
    found = {name: part.view(2, -1) for name, part in zip(names, parts)}
    # A histogram is not one pair of numbers: metrics are computed from its counts.
    histogram = found.pop("gap_histogram", None)
    stats = {name: tuple(pair.flatten().tolist()) for name, pair in found.items()}
    if histogram is not None:
        stats |= gap_sums(histogram[0])
    grad_norm = math.sqrt(square) if square >= 0 else math.nan
    layer_norms = dict(zip(layers, squares.sqrt().tolist()))
    return GlobalTotals(grad_norm, loss, num_tokens, stats, layer_norms)


def dump_skipped(
    microbatches: Sequence[PreparedMicrobatch],
    totals: GlobalTotals,
    file: Path,
    *,
    step: int,
    update: int,
) -> None:
    """Save this rank's micro-batches of a step that was not taken, to look at later."""
    output = file.parents[1]
    make_folder(file.parent, within=output)
    saved = [
        on_host(one.packed).state_dict()
        | {
            "loss_mask": one.loss_mask.cpu(),
            "weights": one.weights.cpu(),
            **{name: column.cpu() for name, column in one.columns.items()},
        }
        for one in microbatches
    ]
    content = {
        "step": step,
        "update": update,
        "loss": totals.loss,
        "grad_norm": totals.grad_norm,
        "microbatches": saved,
    }
    with open_file(file, "wb", within=output) as opened:
        torch.save(content, opened)
    log.warning(
        "step %d update %d: loss %g, gradient norm %g: not finite, update skipped on all "
        "ranks; micro-batches saved to %s",
        step,
        update,
        totals.loss,
        totals.grad_norm,
        file,
    )
