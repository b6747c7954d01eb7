"""The gradient of one alternative on one batch, by parameters and by each token's logprob.

The loss runs as in training. `_Observer` also records two other gradients: the gradient of the
whole loss by the model's logprobs; and the gradient of the loss function alone, without KL and
entropy bonus, by a copy of the logprobs that only the loss function gets. T packed tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from spmdrl.algorithms.registry import Method
from spmdrl.config import Config
from spmdrl.credit import advantages_of
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.report.glossary import values_of
from spmdrl.tools.what_if.alternatives import Alternative
from spmdrl.tools.what_if.measures import Gradients, effective_share, share
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.microbatches import LossOf, PreparedMicrobatch, Stats, prepare
from spmdrl.train.objectives.objective_loss import loss_class, named_methods
from spmdrl.train.trainer import Trainer
from spmdrl.types import Batch


@dataclass(frozen=True)
class Probe:
    """The effect of one alternative in the first update on a batch."""

    gradients: Gradients
    """By parameter, before clipping."""
    metrics: dict[str, float]
    """policy/grad_norm, policy/loss and the metrics of the loss, as a run reports them."""
    clipped: float
    """Share of the loss tokens that have an advantage but no gradient from the loss function."""
    masked: float
    """Share of the loss tokens whose terms a correction or entropy filter multiplies by 0."""
    ess: float
    """Effective share of the loss tokens with an advantage, by the factors of the advantages."""
    pushes: Tensor
    """[E] float64: the negative gradient of the loss by the summed logprob of an episode; NaN for
    an episode of another update."""
    token_pushes: dict[int, list[float]]
    """{row of the batch's scalars: push of each token, 0 in the prompt}."""


@dataclass
class _Row:
    """One micro-batch, and the tensors of its loss; None if the loss did not compute them."""

    microbatch: PreparedMicrobatch
    scored: Tensor | None = None
    """[N] logprobs of the model; their gradient is that of the whole loss."""
    loss_logprobs: Tensor | None = None
    """[T] copy of the logprobs that the loss function gets."""
    terms: Tensor | None = None
    """[T] result of the loss function."""
    slopes: Tensor | None = None
    """[T] gradient of the sum of the terms over the loss tokens, by each token's logprob."""


class _Observer:
    """Replaces the policy and the loss function in a loss, calls them, and records their results.

    Args:
        model, loss_fn: to call.
    """

    def __init__(self, model: ShardedModel, loss_fn: Method):
        self.world = model.world
        self._model = model
        self._loss = loss_fn
        self.rows: list[_Row] = []

    def forward(self, row: ScoredRow) -> tuple[Tensor, Tensor]:
        """See ShardedModel.forward."""
        logprobs, entropy = self._model.forward(row)
        if logprobs.requires_grad:
            logprobs.retain_grad()
            self.rows[-1].scored = logprobs
        return logprobs, entropy

    def loss_fn(self) -> Method:
        """Return a function that replaces the loss function and has the same attributes."""

        @functools.wraps(self._loss)
        def call_and_record(**inputs: Any) -> Any:
            """Call the loss function with a copy of the logprobs."""
            logprobs = inputs.get("logprobs")
            if logprobs is None or not logprobs.requires_grad:
                return self._loss(**inputs)
            loss_logprobs = logprobs.clone()
            result = self._loss(**inputs | {"logprobs": loss_logprobs})
            self._record(loss_logprobs, result[0])
            return result

        return call_and_record

    def _record(self, loss_logprobs: Tensor, terms: Tensor) -> None:
        if terms.shape != loss_logprobs.shape or not terms.requires_grad:
            return  # the loss will refuse another shape; constant terms have no gradient
        row = self.rows[-1]
        row.loss_logprobs = loss_logprobs
        row.terms = terms
        total = terms[row.microbatch.loss_mask].sum()
        # The backward pass of the whole loss comes later and needs the graph too.
        (row.slopes,) = torch.autograd.grad(
            total, loss_logprobs, retain_graph=True, allow_unused=True
        )
        loss_logprobs.retain_grad()  # only now, so that the pass above does not add to `.grad`
        terms.retain_grad()

    def of(self, loss_of: LossOf) -> LossOf:
        """Return a loss of micro-batches that records each micro-batch in a new row."""

        def record(microbatch: PreparedMicrobatch) -> tuple[Tensor, Stats]:
            self.rows.append(_Row(microbatch))
            return loss_of(microbatch)

        return record


def probe(trainer: Trainer, batch: Batch, alternative: Alternative, *, step: int) -> Probe:
    """Return the gradients of an alternative in a batch's first update.

    Args:
        trainer: with the weights at the beginning of the step; it does not change.
        batch: as exchanged and annotated, with the columns of all alternatives.
        step: of the run.
    Raises: Refusal for a function whose result does not fit the batch.
    """
    cfg = alternative.cfg
    world = trainer.world
    model = trainer.policy.model
    methods = named_methods(cfg)
    kind = loss_class(cfg)
    observer = _Observer(model, methods["loss_fn"])
    coefficients = _coefficients(trainer, cfg)
    coefficients.begin(step)
    batch = replace(_with_columns(batch, kind.columns_of(cfg, **methods)), kl_coef=coefficients.kl)
    advantages = advantages_of(batch, methods["advantage_fn"], cfg=cfg, world=world, step=step)
    loss = kind(cfg, world, loss_fn=observer.loss_fn(), coefficients=coefficients)
    updates = prepare(loss.with_columns(batch), advantages, cfg=cfg, model=model)
    loss_of = observer.of(loss.of_updates(updates, cast(ShardedModel, observer), step=step))
    gradients, totals = trainer.policy.gradient(updates[0], loss_of)
    metrics = {"policy/grad_norm": totals.grad_norm, "policy/loss": totals.loss}
    return Probe(
        gradients=gradients,
        metrics=metrics | values_of(totals.stats),
        **_token_fields(observer.rows, batch, scale=trainer.policy.loss_scale.value),
    )


def _with_columns(batch: Batch, names: set[str]) -> Batch:
    """Return a batch with only these columns, and not those of other alternatives."""
    # The pass that scores old_logprobs gives old_entropy too.
    needed = names | ({"old_entropy"} if "old_logprobs" in names else set())
    columns = tuple(
        tuple({name: column for name, column in own.items() if name in needed} for own in update)
        for update in batch.columns
    )
    return replace(batch, columns=columns if needed else ())


def _coefficients(trainer: Trainer, cfg: Config) -> Coefficients:
    """Return the coefficients of KL and entropy bonus.

    A coefficient that changes during a run has the run's value at this step, if the alternative
    has the same settings for it.
    """
    coefficients = Coefficients(cfg)
    chosen = cfg.algorithm
    run = trainer.cfg.algorithm
    state = trainer.coefficients.state_dict()
    if (chosen.kl_coef, chosen.kl_control) != (run.kl_coef, run.kl_control):
        state.pop("kl", None)
    if (chosen.entropy_coef, chosen.entropy_control) != (run.entropy_coef, run.entropy_control):
        state.pop("entropy", None)
    coefficients.load_state_dict(state)
    return coefficients


def _token_fields(rows: Sequence[_Row], batch: Batch, *, scale: float) -> dict[str, Any]:
    """Return the fields of Probe that are computed from tokens.

    Args:
        scale: factor on the loss in the backward pass.
    """
    pushes = torch.full((len(batch.scalars),), math.nan, dtype=torch.float64)
    pushes[batch.update_ids == 0] = 0.0
    token_pushes: dict[int, list[float]] = {}
    marks: list[Tensor] = []
    for row in rows:
        packed = row.microbatch.packed
        push = _token_push(row, scale=scale)
        parts = push.split(packed.cu_seqlens.diff().tolist())
        for number, part in zip(packed.sequence_ids.tolist(), parts):
            if number >= 0:  # -1 is a dummy
                pushes[number] = part.sum()
                token_pushes[number] = part.tolist()
        marks.append(_marks(row, scale=scale))
    in_loss, has_advantage, is_flat, is_cut, weights = torch.cat(marks, dim=1)
    counts = (in_loss > 0) & (has_advantage > 0)
    return {
        "pushes": batch.scalars.episodes().sum(pushes),
        "token_pushes": token_pushes,
        "clipped": share(counts & (is_flat > 0), in_loss > 0),
        "masked": share(is_cut > 0, in_loss > 0),
        "ess": effective_share(weights[counts]),
    }


def _token_push(row: _Row, *, scale: float) -> Tensor:
    """Return [T] float64: the negative gradient of the loss by each token's logprob."""
    if row.scored is None or row.scored.grad is None:
        return torch.zeros(row.microbatch.packed.tokens.shape, dtype=torch.float64)
    return -row.microbatch.row.spread(row.scored.grad).double().cpu() / scale


def _marks(row: _Row, *, scale: float) -> Tensor:
    """Return [5, T] float64 for the tokens of a micro-batch.

    Four rows say whether the token is in the loss, has an advantage, has no gradient from the loss
    function, and has a term that is multiplied by 0. The last row is the factor that ratio,
    clipping and correction put on its advantage.
    """
    microbatch = row.microbatch
    weights = microbatch.weights.double()
    advantages = microbatch.columns["advantages"].double()
    in_loss = microbatch.loss_mask & (weights > 0)
    has_advantage = advantages != 0
    zeros = torch.zeros_like(weights)
    gradients = zeros
    term_factors = zeros
    if row.loss_logprobs is not None and row.loss_logprobs.grad is not None:
        gradients = row.loss_logprobs.grad.double().abs() / scale
    if row.terms is not None and row.terms.grad is not None:
        term_factors = row.terms.grad.double() / scale
    slopes = zeros if row.slopes is None else row.slopes
    factors = gradients / (weights * advantages.abs())
    factors = torch.where(in_loss & has_advantage, factors, 0.0)
    marks = [in_loss, has_advantage, slopes == 0, term_factors == 0, factors]
    return torch.stack([mark.double().cpu() for mark in marks])
