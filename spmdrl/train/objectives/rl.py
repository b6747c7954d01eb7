"""The loss on sampled rollouts: its terms, correction, KL and entropy bonus. T packed tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.algorithms import registry
from spmdrl.algorithms.entropy import top_entropy
from spmdrl.algorithms.kl import kl_stats
from spmdrl.algorithms.mismatch import carried_stats, gap_histogram, mismatch_stats
from spmdrl.algorithms.registry import Method
from spmdrl.config import Config
from spmdrl.errors import Refusal, place_of
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.microbatches import LossOf, PreparedMicrobatch, Stats
from spmdrl.train.objectives.objective_loss import Known, ObjectiveLoss, gather_columns
from spmdrl.types import Microbatch
from spmdrl.world.world import World

_OF_MODELS = {"ref_logprobs", "teacher_logprobs", "values", "prm_logprobs", "square_probs"}


class RolloutLoss(ObjectiveLoss):
    """The policy loss of the config, with its correction, KL, entropy bonus and token filter."""

    def __init__(self, cfg: Config, world: World, **given: Any):
        super().__init__(cfg, world, **given)
        chosen = cfg.algorithm
        self._correction = registry.get("correction", chosen.correction)
        self._kl = registry.get("kl", chosen.kl)
        keep_frac = chosen.entropy_control.keep_frac
        self._filter_options = {"keep_frac": keep_frac} if keep_frac < 1 else {}
        self._comparison = numerics_of(cfg).comparison()
        self._wants_keys = "token_keys" in registry.inputs_of(self._loss)

    @classmethod
    def columns_of(cls, cfg: Config, *, loss_fn: Method, advantage_fn: Method) -> set[str]:
        """See ObjectiveLoss."""
        chosen = cfg.algorithm
        methods = (loss_fn, advantage_fn, registry.get("correction", chosen.correction))
        needed = set().union(*map(registry.inputs_with_helpers, methods)) & _OF_MODELS
        if chosen.kl_coef:
            needed.add("ref_logprobs")
        asks_entropy = (
            any(map(registry.statistics_of, methods))
            or chosen.entropy_control.keep_frac < 1
            or "square_probs" in needed
        )
        # With one update the current logprobs are the old ones, unless something before the
        # update wants them. A loss that is anchored at the engine's policy asks for none at all.
        before = (
            asks_entropy
            or "old_logprobs" in registry.inputs_with_helpers(advantage_fn)
            or (chosen.kl_coef and chosen.kl_in == "reward")
        )
        if asks_entropy:
            needed.add("old_entropy")
        anchored = "old_logprobs" in registry.inputs_of(loss_fn) or chosen.correction != "none"
        if before or (anchored and cfg.batch.optimizer_steps > 1):
            needed.add("old_logprobs")
        return needed

    def of_updates(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], model: ShardedModel, *, step: int
    ) -> LossOf:
        """See ObjectiveLoss."""
        self._comparison.begin(updates[0])
        return super().of_updates(updates, model, step=step)

    def statistics(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], *, world: World
    ) -> dict[str, Tensor]:
        """Return the whole-batch scalars that loss, correction and filter ask for, by name.

        Trainer ranks gather the columns of all loss tokens; {} when no method asks.
        """
        chosen = self.cfg.algorithm
        found: dict[str, Tensor] = {}
        methods: list[tuple[Method, Mapping[str, Any]]] = [
            (self._loss, chosen.loss_options),
            (self._correction, chosen.correction_options),
            *([(top_entropy, self._filter_options)] if self._filter_options else []),
        ]
        for method, options in methods:
            statistics = registry.statistics_of(method)
            if statistics is None:
                continue
            wanted = registry.inputs_of(statistics)
            own = [
                {name: _column(one, name)[one.loss_mask] for name in wanted}
                for microbatches in updates
                for one in microbatches
            ]
            columns = gather_columns(own, world=world)
            found |= registry.call_helper(method, "statistics", columns, options)
        return {name: value.to(world.device) for name, value in found.items()}

    def __call__(
        self, model: ShardedModel, microbatch: PreparedMicrobatch, *, known: Known
    ) -> tuple[Tensor, Stats]:
        """See ObjectiveLoss."""
        chosen = self.cfg.algorithm
        coefficients = self._coefficients
        logprobs, entropy = map(microbatch.row.spread, model.forward(microbatch.row))
        inputs = self._inputs(microbatch, logprobs, entropy=entropy, known=known)
        if self.on_logprobs:
            self.on_logprobs(inputs["old_logprobs"])
        terms, stats = registry.call(self._loss, inputs, chosen.loss_options)
        if terms.shape != logprobs.shape:
            raise Refusal(
                f"{self._loss.__name__} must return one term per token, [T] = "
                f"{tuple(logprobs.shape)}, got {tuple(terms.shape)}{place_of(self._loss)}"
            )
        weights, own = registry.call(self._correction, inputs, chosen.correction_options)
        # KL and entropy bonus are added below, so neither correction nor filter acts on them.
        terms = terms * weights.detach()
        stats = stats | own | _sampling_stats(inputs, microbatch)
        compared = self._comparison.chosen(
            microbatch,
            old=inputs["old_logprobs"],
            current=logprobs.detach(),
            version=inputs["version"],
        )
        if compared is not None:
            stats |= _mismatch(*compared, microbatch.packed)
        if self.cfg.rollout.schedule.mixes_versions:
            names = ("old_logprobs", "rollout_logprobs", "policy_versions", "version", "loss_mask")
            stats |= carried_stats(**{name: inputs[name] for name in names})
        if self._filter_options:
            # The filter's statistics are of the old entropy, so it is compared with them.
            at_start = inputs | {"entropy": microbatch.columns["old_entropy"]}
            kept, filtered = registry.call(top_entropy, at_start, self._filter_options)
            terms = terms * kept
            stats = stats | filtered
        if "ref_logprobs" in inputs:
            mask = microbatch.loss_mask
            stats |= kl_stats(logprobs, inputs["ref_logprobs"], loss_mask=mask)
        if coefficients.kl and chosen.kl_in == "loss":
            terms = terms + coefficients.kl * registry.call(self._kl, inputs, chosen.kl_options)
        if coefficients.entropy:
            terms = terms - coefficients.entropy * entropy
        return (terms.double() * microbatch.weights).sum(), stats

    def _inputs(
        self, microbatch: PreparedMicrobatch, logprobs: Tensor, *, entropy: Tensor, known: Known
    ) -> dict[str, Tensor]:
        """Return all that a method may ask for, by name."""
        packed = microbatch.packed
        keys = {"token_keys": _token_keys(packed, known["version"])} if self._wants_keys else {}
        return {
            # Without a pass of their own the old logprobs are the current ones.
            "old_logprobs": logprobs.detach(),
            **microbatch.columns,
            **keys,
            "logprobs": logprobs,
            "rollout_logprobs": packed.rollout_logprobs,
            "loss_mask": microbatch.loss_mask,
            "cu_seqlens": packed.cu_seqlens,
            "entropy": entropy,
            "policy_versions": packed.policy_versions,
            **known,
        }


def _sampling_stats(inputs: Mapping[str, Tensor], microbatch: PreparedMicrobatch) -> Stats:
    """Return how old the policy that sampled is, and how sure the current one is."""
    packed = microbatch.packed
    mask = microbatch.loss_mask
    age = torch.where(mask, inputs["version"] - packed.policy_versions, 0)
    return {
        "policy/entropy": (inputs["entropy"].detach().double().sum(), mask.sum()),
        "policy/staleness": (age.sum(), mask.sum()),
    }


def _mismatch(logprobs: Tensor, mask: Tensor, packed: Microbatch) -> Stats:
    """Return how far the engine's logprobs are from the policy's, where a mask [T] is set."""
    gaps = gap_histogram(logprobs, packed.rollout_logprobs, loss_mask=mask)
    return {
        **mismatch_stats(
            logprobs, packed.rollout_logprobs, loss_mask=mask, cu_seqlens=packed.cu_seqlens
        ),
        "gap_histogram": (gaps, torch.zeros_like(gaps)),  # quantiles follow from it
    }


def _column(microbatch: PreparedMicrobatch, name: str) -> Tensor:
    columns = microbatch.columns
    # Whole-batch statistics are of the policy before the update.
    name = "old_entropy" if name == "entropy" else name
    return columns[name] if name in columns else getattr(microbatch.packed, name)


def _token_keys(packed: Microbatch, version: Tensor) -> Tensor:
    """Return [T] int64, one key per token of the run, whatever the layout."""
    rows = packed.sequence_ids.repeat_interleave(
        packed.cu_seqlens.diff().long(), output_size=packed.tokens.numel()
    )
    # From the lowest bit: 22 bits of position, 20 of the sequence in the batch, then the version.
    return (((version << 20) + rows) << 22) + packed.position_ids
