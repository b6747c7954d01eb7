"""From an exchanged batch to the loss of each micro-batch. S sequences, T packed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.mismatch import mismatch_stats
from spmdrl.config import Config
from spmdrl.policy.attention import make_packing
from spmdrl.policy.scorer import Scoring
from spmdrl.types import Batch, Microbatch

Stats = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Job:
    """One micro-batch, ready to run. Holds all that is known before the forward pass."""

    microbatch: Microbatch
    scoring: Scoring
    loss_mask: Tensor  # [T] bool
    weights: Tensor  # [T] float64, of each token's term in the loss
    advantages: Tensor  # [T] float32
    num_tokens: int  # 0 for a dummy


def make_jobs(
    batch: Batch, advantages: Tensor, *, cfg: Config, device: torch.device, padded: bool
) -> list[list[Job]]:
    """Prepare every micro-batch of a step, so that nothing waits for the device later.

    Args:
        batch: as exchanged.
        advantages: [S] float64, by row of the batch's scalars.
        padded: attention pads on this device.
    Returns: [updates][micro-batches].
    Raises: ValueError when a sequence's first token is marked as a response.
    """
    scalars = batch.scalars
    lengths = reduce.loss_lengths(scalars, mask_truncated=cfg.algorithm.mask_truncated)
    jobs = []
    for update, microbatches in enumerate(batch.updates):
        own = lengths * (batch.update_ids == update)
        weights = reduce.sequence_weights(
            scalars, own, aggregation=cfg.algorithm.aggregation,
            max_response_tokens=cfg.sampling.max_response_tokens,
        )
        per_sequence = torch.stack([weights.cpu(), advantages.cpu().double(), own.cpu().double()])
        # A dummy's sequence id is -1: the zeros in the last column.
        per_sequence = torch.cat([per_sequence, per_sequence.new_zeros(3, 1)], dim=1)
        jobs.append([_make_job(m, per_sequence, device=device, padded=padded)
                     for m in microbatches])
    return jobs


def on_host(microbatch: Microbatch) -> Microbatch:
    """Return a micro-batch on the CPU, its values there when this returns."""
    # Not Microbatch.to: its copies do not block, and from a GPU they may land later.
    return Microbatch(**{name: tensor.cpu() for name, tensor in vars(microbatch).items()})


def _make_job(
    microbatch: Microbatch, per_sequence: Tensor, *, device: torch.device, padded: bool
) -> Job:
    host = on_host(microbatch)
    lengths = host.cu_seqlens.diff().long()
    weights, advantages, in_loss = per_sequence[:, host.sequence_ids].repeat_interleave(
        lengths, dim=1, output_size=host.tokens.numel())
    loss_mask = host.response_mask & (in_loss > 0)
    is_real = host.sequence_ids >= 0
    return Job(
        microbatch=microbatch.to(device),
        scoring=make_scoring(host.tokens, lengths.tolist(), mask=loss_mask, device=device,
                             padded=padded, position_ids=host.position_ids),
        loss_mask=loss_mask.to(device), weights=weights.to(device),
        advantages=advantages.float().to(device), num_tokens=int(lengths[is_real].sum()),
    )


def make_scoring(
    tokens: Tensor, lengths: Sequence[int], *, mask: Tensor, position_ids: Tensor,
    device: torch.device, padded: bool,
) -> Scoring:
    """Return what the scorer needs to score the masked tokens of a packed row.

    Args:
        tokens, position_ids: [T] int64 on the CPU.
        lengths: tokens per sequence.
        mask: [T] bool on the CPU.
    Raises: ValueError when the mask holds a sequence's first token, which nothing predicts.
    """
    if bool((mask & (position_ids == 0)).any()):
        at = int((mask & (position_ids == 0)).nonzero()[0])
        raise ValueError(f"response_mask holds the first token of a sequence (packed position "
                         f"{at}), which no token comes before; mask it out where rows are read")
    scored = mask.nonzero()[:, 0]
    return Scoring(
        tokens=tokens.to(device), position_ids=position_ids.to(device),
        packing=make_packing(lengths, device, padded=padded),
        scored=scored.to(device), targets=tokens[scored].to(device),
    )


def spread(values: Tensor, scoring: Scoring) -> Tensor:
    """Return [N] values of the scored positions as [T], 0 elsewhere; differentiable."""
    return values.new_zeros(scoring.tokens.shape).index_copy(0, scoring.scored, values)


class Objective:
    """The loss that a config names.

    Raises: ValueError for an unknown loss or correction.
    """

    def __init__(self, cfg: Config):
        algorithm = cfg.algorithm
        self.is_rl = algorithm.objective == "rl"
        self.entropy_coef = algorithm.entropy_coef
        self._loss = registry.get("loss", algorithm.loss if self.is_rl else "sft")
        self._loss_options = algorithm.loss_options if self.is_rl else {}
        self._correction = registry.get("correction", algorithm.correction)
        self._correction_options = algorithm.correction_options

    def __call__(
        self, job: Job, logprobs: Tensor, *, entropy: Tensor, old_logprobs: Tensor | None,
        step: int,
    ) -> tuple[Tensor, Stats]:
        """Return one micro-batch's share of the loss and its metrics.

        Args:
            logprobs, entropy: [N] float32 of the scored positions, nats.
            old_logprobs: [T] float32; None means that they are the current ones.
            step: policy version that is being trained, for the staleness.
        Returns: [] float64 share (shares of all micro-batches and dp ranks add up to the
            loss) and {metric: (numerator, denominator)}.
        Invariant under: dp size, micro-batching, packing order.
        """
        logprobs, entropy = spread(logprobs, job.scoring), spread(entropy, job.scoring)
        batch, mask = job.microbatch, job.loss_mask
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        inputs = {
            "logprobs": logprobs, "old_logprobs": old, "rollout_logprobs": batch.rollout_logprobs,
            "advantages": job.advantages, "loss_mask": mask, "cu_seqlens": batch.cu_seqlens,
            "entropy": entropy,
        }
        terms, stats = registry.call(self._loss, inputs, self._loss_options)
        count = mask.sum()
        stats = {**stats, "policy/entropy": (entropy.detach().double().sum(), count)}
        if self.is_rl:
            weights, own = registry.call(self._correction, inputs, self._correction_options)
            terms = terms * weights.detach()
            stats |= own | mismatch_stats(old, batch.rollout_logprobs, loss_mask=mask,
                                          cu_seqlens=batch.cu_seqlens)
            age = torch.where(mask, step - batch.policy_versions, 0)
            stats["policy/staleness"] = (age.sum(), count)
        if self.entropy_coef:
            terms = terms - self.entropy_coef * entropy
        return (terms.double() * job.weights).sum(), stats
