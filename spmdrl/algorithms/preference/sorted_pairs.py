"""AOT: losses that compare the sorted log-ratios of a whole batch; see the package for the inputs.

Optimal transport in one dimension pairs the k-th smallest value of one side with the k-th smallest
of the other. The partner of a response may be in another micro-batch or on another process. So a
pass before the update finds the partners (`matched`), with the policy that the update starts from.
In the loss the partner's value is a constant. `aot_unpaired` matches both responses of a pair, so
each sorted pair appears in two terms; each of the two has half of its value and the gradient of its
own response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.masked import attach, keep, making
from spmdrl.algorithms.preference.shared import Loss, Pairs, compared, smoothed

__all__ = ["aot", "aot_unpaired"]


def match_sorted(values: Tensor, others: Tensor, kept: Tensor) -> Tensor:
    """Return, for the k-th smallest of `values`, the k-th smallest of `others`: [P], 0 if not kept.

    Args:
        values, others: [P] float. kept: [P] bool, the pairs that are sorted, on both sides.
    """
    rows = kept.nonzero().squeeze(1)
    order = rows[values[rows].argsort(stable=True)]
    found = torch.zeros_like(others)
    found[order] = others[rows].sort().values
    return found


@making(pairs=compared)
def _matched_margins(
    pairs: Pairs, ref_chosen_logps: Tensor, ref_rejected_logps: Tensor
) -> dict[str, Tensor]:
    """Return matched_margin [P], nats: the reference's margin at each pair's place in the sort."""
    chosen, rejected = pairs.logps
    refs = ref_chosen_logps - ref_rejected_logps
    return {"matched_margin": match_sorted(chosen - rejected, refs, pairs.kept)}


@making(pairs=compared)
def _matched_ratios(pairs: Pairs) -> dict[str, Tensor]:
    """Return matched_rejected and matched_chosen [P], nats: the rejected log-ratio at the place in
    the sort of each pair's chosen one, and the chosen log-ratio at that of its rejected one."""
    chosen, rejected = pairs.own
    return {
        "matched_rejected": match_sorted(chosen, rejected, pairs.kept),
        "matched_chosen": match_sorted(rejected, chosen, pairs.kept),
    }


@attach(matched=_matched_margins)
@making(pairs=compared)
def aot(
    pairs: Pairs, *, matched_margin: Tensor, beta: float = 0.1, label_smoothing: float = 0.0
) -> Loss:
    """Classify sorted margins: the policy's k-th smallest against the reference's.

    The policy's margins log pi_w - log pi_l of the batch, sorted, are to exceed the reference's,
    sorted: -log sigma(beta (m_(k) - ref_(k))).

    Args:
        matched_margin: [P] float, nats: the reference's margin at the same place in the sort of
            the batch as the policy's; see `matched`.
        beta: above 0. label_smoothing: as in dpo, in [0, 0.5).
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2406.05882 (AOT, paired), sorted over the whole batch of a step; TRL's aot sorts a
        micro-batch, which depends on the layout.
    """
    kept = pairs.kept
    margin = keep(pairs.logps[0] - pairs.logps[1], kept) - keep(matched_margin.detach(), kept)
    return pairs.loss(smoothed(beta * margin.to(pairs.own[0].dtype), label_smoothing))


@attach(matched=_matched_ratios)
@making(pairs=compared)
def aot_unpaired(
    pairs: Pairs,
    *,
    matched_rejected: Tensor,
    matched_chosen: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Loss:
    """Classify sorted log-ratios: the k-th smallest chosen against the k-th smallest rejected.

    The batch's rho_w, sorted, are to exceed its rho_l, sorted: -log sigma(beta (w_(k) - l_(k))).
    A pair's term is half of the term of its chosen response plus half of that of its rejected
    one, with the gradient of both: over the batch value and gradient are those of the sum over k.

    Args:
        matched_rejected, matched_chosen: [P] float, nats: log-ratio of the rejected response
            at the place in the sort of this pair's chosen one, and the other way around.
        beta: above 0. label_smoothing: as in dpo, in [0, 0.5).
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2406.05882 (AOT, unpaired), sorted over the whole batch of a step; TRL's
        aot_unpaired (its former aot_pair) sorts a micro-batch.
    """
    (chosen, rejected), kept = pairs.own, pairs.kept
    lower, upper = (
        keep(m.detach(), kept).to(chosen.dtype) for m in (matched_rejected, matched_chosen)
    )
    both = smoothed(beta * (chosen - lower), label_smoothing)
    both = both + smoothed(beta * (upper - rejected), label_smoothing)
    return pairs.loss(both - both.detach() / 2)
