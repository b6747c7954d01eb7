"""Policy losses: per-token terms to be minimised, and what to report about them.

`loss_mask` [T] bool says which tokens are in the loss. Where it is False the term is exactly
0 and the gradient exactly 0, whatever the other inputs hold there (NaN and inf included).
`advantages` [T] is one value per token (a sequence's, repeated). Log-probabilities are
natural, in nats; log-ratios are clamped to +-20. Terms are not yet divided by anything:
`reduce` does that. No loss knows about micro-batches or ranks, which is why all of them are
invariant under dp size, micro-batching, packing order and padding.

pi is the policy being trained, pi_old the trainer's at the batch's start, mu the engine that
sampled; r = pi / pi_old, rho = pi_old / mu, w = pi / mu; sg() stops the gradient. A loss that
asks for `rollout_logprobs` corrects for mu itself and goes without a correction. Where the
engine's logprob is not finite, mu counts as the policy that it is compared with. Only `logprobs`
carries a gradient.

A loss with a `statistics` function takes scalars of the whole batch from it
(`masked.attach`).

Stats are {name: (numerator, denominator)}, detached float64 scalars summed over loss tokens;
add up pairwise over micro-batches and dp ranks, then divide.
"""
