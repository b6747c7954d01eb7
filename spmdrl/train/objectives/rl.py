"""From an exchanged batch to the loss of each micro-batch. S sequences, T packed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spmdrl.algorithms import reduce, registry
from spmdrl.algorithms.entropy import top_entropy
from spmdrl.algorithms.kl import kl_stats
from spmdrl.algorithms.mismatch import gap_histogram, mismatch_stats
from spmdrl.config import Config
from spmdrl.model.scorer import ScoredRow
from spmdrl.train.coefficients import Coefficients
from spmdrl.types import Advantages, Batch, Microbatch
from spmdrl.world import World

if TYPE_CHECKING:
    from spmdrl.model.sharded import ShardedModel

Stats = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Job:
    """One micro-batch, ready to run. Holds all that is known before the forward pass."""

    microbatch: Microbatch
    row: ScoredRow
    loss_mask: Tensor  # [T] bool
    weights: Tensor  # [T] float64, of each token's term in the loss
    num_tokens: int  # 0 for a dummy
    token_weight: float  # 1 / loss tokens of this update on all ranks; 1 without any
    sequence_weight: float  # 1 / sequences of this update that have loss tokens; 1 without any
    columns: Mapping[str, Tensor]  # [T] each: advantages, returns, what annotate found


def make_jobs(
    batch: Batch, advantages: Advantages | None, *, cfg: Config, model: ShardedModel
) -> list[list[Job]]:
    """Prepare every micro-batch of a step, so that nothing waits for the device later.

    Args:
        batch: as exchanged, and annotated where the methods need it.
        advantages: of its tokens; None for a pass that only scores.
        model: that is to read them.
    Returns: [updates][micro-batches].
    Raises: ValueError when a sequence's first token is marked as a response.
    """
    scalars = batch.scalars
    lengths = reduce.loss_lengths(scalars, mask_truncated=cfg.algorithm.mask_truncated)
    jobs = []
    for update, microbatches in enumerate(batch.updates):
        own = lengths * (batch.update_ids == update)
        weights = reduce.sequence_weights(
            scalars,
            own,
            aggregation=cfg.algorithm.aggregation,
            max_response_tokens=cfg.sampling.max_response_tokens,
        )
        per_sequence = torch.stack([weights.cpu(), own.cpu().double()])
        # A dummy's sequence id is -1: the zeros in the last column.
        per_sequence = torch.cat([per_sequence, per_sequence.new_zeros(2, 1)], dim=1)
        jobs.append(
            [
                _make_job(
                    m,
                    per_sequence,
                    model=model,
                    token_weight=1.0 / max(1, int(own.sum())),
                    sequence_weight=1.0 / max(1, int((own > 0).sum())),
                    columns=_columns(batch, advantages, update=update, index=i),
                )
                for i, m in enumerate(microbatches)
            ]
        )
    return jobs


def _columns(
    batch: Batch, advantages: Advantages | None, *, update: int, index: int
) -> dict[str, Tensor]:
    columns = dict(batch.columns[update][index]) if batch.columns else {}
    if advantages is not None:
        columns["advantages"] = advantages.tokens[update][index].float()
        if advantages.returns:
            columns["returns"] = advantages.returns[update][index].float()
    return columns


def on_host(microbatch: Microbatch) -> Microbatch:
    """Return a micro-batch on the CPU, its values there when this returns."""
    # Not Microbatch.to: its copies do not block, and from a GPU they may land later.
    return Microbatch(
        **{
            name: tensor if tensor is None else tensor.cpu()
            for name, tensor in vars(microbatch).items()
        }
    )


def _make_job(
    microbatch: Microbatch,
    per_sequence: Tensor,
    *,
    model: ShardedModel,
    token_weight: float,
    sequence_weight: float,
    columns: Mapping[str, Tensor],
) -> Job:
    host, device = on_host(microbatch), model.world.device
    lengths = host.cu_seqlens.diff().long()
    weights, in_loss = per_sequence[:, host.sequence_ids].repeat_interleave(
        lengths, dim=1, output_size=host.tokens.numel()
    )
    loss_mask = host.response_mask & (in_loss > 0)
    is_real = host.sequence_ids >= 0
    return Job(
        microbatch=microbatch.to(device),
        row=model.row(
            host.tokens,
            lengths.tolist(),
            mask=loss_mask,
            position_ids=host.position_ids,
            routes=host.routes,
        ),
        loss_mask=loss_mask.to(device),
        weights=weights.to(device),
        num_tokens=int(lengths[is_real].sum()),
        token_weight=token_weight,
        sequence_weight=sequence_weight,
        columns={name: column.to(device) for name, column in columns.items()},
    )


def needed_columns(cfg: Config) -> set[str]:
    """Return the per-token columns that the configured methods need from `Trainer.annotate`."""
    chosen = cfg.algorithm
    if not cfg.objective.samples:
        return set()
    methods = [
        registry.get(kind, getattr(chosen, kind)) for kind in ("loss", "correction", "advantage")
    ]
    needed = set().union(*map(registry.asked_by, methods)) & {
        "ref_logprobs",
        "teacher_logprobs",
        "values",
        "prm_logprobs",
        "square_probs",
    }
    if chosen.kl_coef:
        needed.add("ref_logprobs")
    # With one update the current logprobs are the old ones, unless something before the update
    # wants them. A loss that is anchored at the engine's policy asks for none at all.
    before = (
        any(map(registry.statistics_of, methods))
        or chosen.entropy_control.keep_frac < 1
        or "old_logprobs" in registry.asked_by(methods[2])
        or (chosen.kl_coef and chosen.kl_in == "reward")
        or "square_probs" in needed
    )
    anchored = "old_logprobs" in registry.inputs_of(methods[0]) or chosen.correction != "none"
    if before or (anchored and cfg.batch.updates_per_step > 1):
        needed.add("old_logprobs")
    return needed


class Objective:
    """The loss that a config names: its terms, correction, KL and entropy bonus.

    Args:
        cfg: the config.
        coefficients: of KL and entropy bonus; read anew at each call.
    Raises: ValueError for an unknown method.
    """

    def __init__(self, cfg: Config, coefficients: Coefficients):
        algorithm = self._algorithm = cfg.algorithm
        self._coefficients = coefficients
        self.is_rl = cfg.objective.samples
        self._loss = registry.get("loss", algorithm.loss if self.is_rl else "sft")
        self._loss_options = algorithm.loss_options if self.is_rl else {}
        self._correction = registry.get("correction", algorithm.correction)
        self._correction_options = algorithm.correction_options
        self._kl = registry.get("kl", algorithm.kl)
        self._kl_options = algorithm.kl_options
        keep_frac = algorithm.entropy_control.keep_frac
        self._filter_options = {"keep_frac": keep_frac} if keep_frac < 1 else {}
        self.columns = needed_columns(cfg)
        self._wants_keys = "token_keys" in registry.inputs_of(self._loss)

    def statistics(self, jobs: Sequence[Sequence[Job]], *, world: World) -> dict[str, Tensor]:
        """Return the whole-batch scalars that loss, correction and filter ask for, by name.

        Trainer ranks gather the columns of all loss tokens; {} when no method asks.
        """
        found: dict[str, Tensor] = {}
        methods = [(self._loss, self._loss_options), (self._correction, self._correction_options)]
        if self._filter_options:
            methods.append((top_entropy, self._filter_options))
        for method, options in methods:
            companion = registry.statistics_of(method)
            if companion is None or not self.is_rl:
                continue
            wanted = registry.inputs_of(companion)
            own = [
                torch.stack([_column(job, name)[job.loss_mask].double() for name in wanted])
                for update in jobs
                for job in update
            ]
            parts = world.gather_per_dp(torch.cat(own, dim=1).cpu().numpy())
            columns = torch.cat([torch.from_numpy(part) for part in parts], dim=1)
            found |= registry.call_statistics(method, dict(zip(wanted, columns)), options)
        return {name: value.to(world.device) for name, value in found.items()}

    def __call__(
        self, model: ShardedModel, job: Job, *, step: int, statistics: Mapping[str, Tensor]
    ) -> tuple[Tensor, Stats]:
        """Run one micro-batch forward and return its share of the loss and its metrics.

        Args:
            model: in training.
            step: policy version that is being trained.
            statistics: of the whole batch, as `statistics` returned.
        Returns: [] float64 share (shares of all micro-batches and dp ranks add up to the
            loss) and {metric: (numerator, denominator)}.
        Invariant under: dp size, micro-batching, packing order.
        """
        logprobs, entropy = map(job.row.spread, model.forward(job.row))
        batch, mask = job.microbatch, job.loss_mask
        inputs = {
            # Without a pass of their own the old logprobs are the current ones.
            "old_logprobs": logprobs.detach(),
            **job.columns,
            **statistics,
            "logprobs": logprobs,
            "rollout_logprobs": batch.rollout_logprobs,
            "loss_mask": mask,
            "cu_seqlens": batch.cu_seqlens,
            "entropy": entropy,
            "policy_versions": batch.policy_versions,
            "version": torch.tensor(step, device=mask.device),
        }
        if self._wants_keys:
            inputs["token_keys"] = _token_keys(batch, step=step)
        terms, stats = registry.call(self._loss, inputs, self._loss_options)
        count = mask.sum()
        stats = {**stats, "policy/entropy": (entropy.detach().double().sum(), count)}
        if self.is_rl:
            old = inputs["old_logprobs"]
            weights, own = registry.call(self._correction, inputs, self._correction_options)
            terms = terms * weights.detach()
            if self._filter_options:
                at_start = inputs | {"entropy": job.columns["old_entropy"]}
                kept, filtered = registry.call(top_entropy, at_start, self._filter_options)
                terms, stats = terms * kept, stats | filtered
            stats |= own | mismatch_stats(
                old, batch.rollout_logprobs, loss_mask=mask, cu_seqlens=batch.cu_seqlens
            )
            gaps = gap_histogram(old, batch.rollout_logprobs, loss_mask=mask)
            stats["gap_histogram"] = (gaps, torch.zeros_like(gaps))  # quantiles follow from it
            age = torch.where(mask, step - batch.policy_versions, 0)
            stats["policy/staleness"] = (age.sum(), count)
        if "ref_logprobs" in inputs:
            stats |= kl_stats(logprobs, inputs["ref_logprobs"], loss_mask=mask)
        coefficients = self._coefficients
        if self.is_rl and coefficients.kl and self._algorithm.kl_in == "loss":
            terms = terms + coefficients.kl * registry.call(self._kl, inputs, self._kl_options)
        if coefficients.entropy:
            terms = terms - coefficients.entropy * entropy
        return (terms.double() * job.weights).sum(), stats


def _column(job: Job, name: str) -> Tensor:
    if name == "entropy":
        return job.columns["old_entropy"]
    return job.columns[name] if name in job.columns else getattr(job.microbatch, name)


def _token_keys(batch: Microbatch, *, step: int) -> Tensor:
    """Return [T] int64, one key per token of the run, whatever the layout."""
    rows = batch.sequence_ids.repeat_interleave(
        batch.cu_seqlens.diff().long(), output_size=batch.tokens.numel()
    )
    return (((step << 20) + rows) << 22) + batch.position_ids
