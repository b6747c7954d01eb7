"""AOT: losses that compare the sorted log-ratios of a whole batch; see the package for the inputs.

Optimal transport in one dimension matches the k-th smallest value of one side with the k-th
smallest of the other. The match of a response may be in another micro-batch or on another rank. So
a pass before the update finds the matches (`matched`), with the policy that the update starts from,
and in the loss the value of the match is a constant. `aot_unpaired` matches both responses of a
pair, so each match appears in two terms. Each of the two has half of the value, and the gradient of
its own response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algorithms.masked import attach, derive, keep
from spmdrl.algorithms.preference.shared import Loss, Pairs, pairs_with_reference, smoothed_loss

__all__ = ["aot", "aot_unpaired"]


def match_sorted(values: Tensor, others: Tensor, in_loss: Tensor) -> Tensor:
    """Return, at the place of the k-th smallest of `values`, the k-th smallest of `others`: [P].

    Args:
        values, others: [P] float.
        in_loss: [P] bool, the entries to match; the result is 0 at all others.
    """
    rows = in_loss.nonzero().squeeze(1)
    order = rows[values[rows].argsort(stable=True)]
    matched = torch.zeros_like(others)
    matched[order] = others[rows].sort().values
    return matched


@derive(pairs=pairs_with_reference)
def _matched_margins(
    pairs: Pairs, ref_chosen_logps: Tensor, ref_rejected_logps: Tensor
) -> dict[str, Tensor]:
    """Return matched_margin [P], nats: the margin of the reference that has the pair's rank."""
    chosen, rejected = pairs.logps
    refs = ref_chosen_logps - ref_rejected_logps
    return {"matched_margin": match_sorted(chosen - rejected, refs, pairs.in_loss)}


@derive(pairs=pairs_with_reference)
def _matched_ratios(pairs: Pairs) -> dict[str, Tensor]:
    """Return matched_rejected and matched_chosen [P], nats.

    These are the rejected log-ratio with the rank of the pair's chosen one, and the chosen
    log-ratio with the rank of its rejected one.
    """
    chosen, rejected = pairs.log_ratios
    return {
        "matched_rejected": match_sorted(chosen, rejected, pairs.in_loss),
        "matched_chosen": match_sorted(rejected, chosen, pairs.in_loss),
    }


@attach(matched=_matched_margins)
@derive(pairs=pairs_with_reference)
def aot(
    pairs: Pairs, *, matched_margin: Tensor, beta: float = 0.1, label_smoothing: float = 0.0
) -> Loss:
    """Classify sorted margins: the policy's k-th smallest against the reference's.

    -log sigma(beta (m_(k) - ref_(k))), where m_(k) and ref_(k) are the k-th smallest margins
    log pi_w - log pi_l of the batch under the policy and under the reference.

    Args:
        matched_margin: [P] float, nats: ref_(k) for the pair whose margin is m_(k); see `matched`.
        beta: above 0. label_smoothing: as in dpo, in [0, 0.5).
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2406.05882 (AOT, paired), sorted over the whole batch of a step; TRL's aot sorts a
        micro-batch, which depends on the layout.
    """
    in_loss = pairs.in_loss
    margin = keep(pairs.logps[0] - pairs.logps[1], in_loss) - keep(matched_margin.detach(), in_loss)
    return pairs.loss(smoothed_loss(beta * margin.to(pairs.log_ratios[0].dtype), label_smoothing))


@attach(matched=_matched_ratios)
@derive(pairs=pairs_with_reference)
def aot_unpaired(
    pairs: Pairs,
    *,
    matched_rejected: Tensor,
    matched_chosen: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Loss:
    """Classify sorted log-ratios: the k-th smallest chosen against the k-th smallest rejected.

    -log sigma(beta (w_(k) - l_(k))), where w_(k) and l_(k) are the k-th smallest rho_w and rho_l of
    the batch. A pair's term has half of the value of the two k at which its responses are, and
    their full gradient by these responses. The sum over the batch has the value and the gradient
    of the sum over k.

    Args:
        matched_rejected, matched_chosen: [P] float, nats: l_(k) for the pair whose chosen response
            has w_(k), and w_(k) for the pair whose rejected response has l_(k).
        beta: above 0. label_smoothing: as in dpo, in [0, 0.5).
    Returns: terms [P] and stats.
    Raises: Refusal for an option out of range.
    Source: arXiv 2406.05882 (AOT, unpaired), sorted over the whole batch of a step; TRL's
        aot_unpaired (its former aot_pair) sorts a micro-batch.
    """
    chosen, rejected = pairs.log_ratios
    lower = keep(matched_rejected.detach(), pairs.in_loss).to(chosen.dtype)
    upper = keep(matched_chosen.detach(), pairs.in_loss).to(chosen.dtype)
    terms = smoothed_loss(beta * (chosen - lower), label_smoothing)
    terms = terms + smoothed_loss(beta * (upper - rejected), label_smoothing)
    # Halve the value but not the gradient.
    return pairs.loss(terms - terms.detach() / 2)
