"""Several epochs over one batch: the order of its updates, and what the last epoch shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy

from spmdrl.types import Sums, add_sums

Update = TypeVar("Update")

_AT_THE_END = ("policy/kl_old", "policy/clip_frac")


def in_epochs(updates: Sequence[Update], *, epochs: int, seed: int, step: int) -> list[Update]:
    """Return the updates of a batch as often as there are epochs, in the order they are taken in.

    The first epoch has the batch's order. Each later one has an order of its own, drawn by
    (seed, step, epoch) and never by the rank, so that it is the same on all of them and a resumed
    run repeats it.

    Args:
        updates: what each consists of.
        epochs: at least 1.
        seed, step: of the run, and the training step.
    Returns: [epochs * updates]; an update is the same object each time.
    Source: Schulman et al. 2017, PPO (arXiv 1707.06347), algorithm 1: K epochs over a batch. An
        update holds the same sequences in every epoch, as in verl and TRL; their order is drawn as
        in openai/baselines ppo2.
    """
    found = list(updates)
    for epoch in range(1, epochs):
        entropy = numpy.random.SeedSequence([seed, step, epoch])
        order = numpy.random.Generator(numpy.random.PCG64(entropy)).permutation(len(updates))
        found += [updates[i] for i in order]
    return found


def of_last_epoch(found: Sequence[Sums], *, epochs: int) -> Sums:
    """Return how far the policy has come by the last of several epochs.

    Args:
        found: sums of each update, in the order they were taken in.
    Returns: policy/kl_old_last and policy/clip_frac_last, where the loss reports them; {} for one
        epoch, and for the other models.
    """
    if epochs == 1:
        return {}
    last = add_sums(*found[-(len(found) // epochs) :])
    return {f"{name}_last": last[name] for name in _AT_THE_END if name in last}
