"""Preference losses: one term per pair of responses, or per labelled response.

log pi is summed over a response's loss tokens; rho_w, rho_l = log pi / pi_ref of the chosen
and the rejected response, h = rho_w - rho_l, |w| and |l| their lengths in tokens, sigma the
logistic function. Inputs of the losses on pairs, P pairs:

    chosen_logps, rejected_logps          [P] float, nats, with gradient
    ref_chosen_logps, ref_rejected_logps  [P] float, nats, of the reference; constants
    chosen_lengths, rejected_lengths      [P] int64, loss tokens

A pair with a length of 0 (padding, or a response cut away) is not in the loss: term and
gradient are exactly 0, whatever the inputs hold there, and it enters no stats. Returned are
terms [P], in the dtype of `chosen_logps`, not divided by anything, and stats {name:
(numerator, denominator)}, detached float64 sums that add up over micro-batches and dp ranks.
Invariant under: permuting pairs, micro-batching, dp size, padding. The losses that sort a batch
(aot) are so too: a helper, `matched`, finds what each pair is compared with, from all of them.

Stats, each per pair in the loss:
    preference/accuracy: 1 if the chosen reward is above the rejected one, 1/2 if equal.
    preference/margin: chosen minus rejected reward.
    preference/chosen_reward, preference/rejected_reward: beta rho, or what the loss compares.
    preference/chosen_logprob, preference/rejected_logprob: log pi per token, nats.
"""
