"""Preference losses: one term per pair of responses, or per labelled response.

log pi is summed over a response's loss tokens. rho_w and rho_l are log pi / pi_ref of the chosen
and the rejected response, h = rho_w - rho_l, |w| and |l| are their lengths in tokens, and sigma is
the logistic function. Inputs of the losses on P pairs:

    chosen_logps, rejected_logps          [P] float, nats, with gradient
    ref_chosen_logps, ref_rejected_logps  [P] float, nats, of the reference; constants
    chosen_lengths, rejected_lengths      [P] int64, loss tokens

A pair with a length of 0 (padding, or a response that was cut away) is not in the loss: its term
and gradient are exactly 0 for any input, and it does not count in the stats.

Each loss returns terms [P], in the dtype of `chosen_logps` and not divided by a count; and stats
{name: (numerator, denominator)}, detached float64 sums to be added up over micro-batches and dp
ranks.
Invariant under: permuting pairs, micro-batching, dp size, padding. This holds for the losses that
sort (aot) too, because their helper `matched` sorts the whole batch.

Stats, each per pair in the loss:
    preference/accuracy: 1 if the chosen reward is above the rejected one, 1/2 if equal.
    preference/margin: chosen minus rejected reward.
    preference/chosen_reward, preference/rejected_reward: beta rho, or the loss's own reward.
    preference/chosen_logprob, preference/rejected_logprob: log pi per token, nats.
"""
