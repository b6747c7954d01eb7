"""Policy losses: per-token terms to minimise, and stats to report.

`loss_mask` [T] bool marks the tokens in the loss. Where it is False, term and gradient are exactly
0 for any input, including NaN and inf. `advantages` [T] has one value per token. Logprobs are in
nats; log-ratios are clamped to +-20. Terms are not divided by a count: `reduce` does that. No loss
depends on micro-batches or ranks, so all are invariant under dp size, micro-batching, packing order
and padding.

pi is the policy that trains, pi_old the trainer's policy at the batch's start, and mu the engine's
policy, which sampled. r = pi / pi_old, rho = pi_old / mu, w = pi / mu; sg() stops the gradient. A
loss with the input `rollout_logprobs` corrects for mu itself and must not be combined with a
correction. Where the engine's logprob is not finite, mu is set to the policy that it is compared
with. Only `logprobs` has a gradient.

A loss with a `statistics` function gets scalars of the whole batch from it (`masked.attach`).

Stats are {name: (numerator, denominator)}, detached float64 sums over loss tokens, to be added up
over micro-batches and dp ranks and then divided.
"""
