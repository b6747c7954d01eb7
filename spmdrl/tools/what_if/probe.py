"""The gradient of one alternative on one batch, by parameters and by each token's logprob.

The loss runs as in training, on the same parts. `_Observer` records two more gradients: that of the
whole loss by the model's logprobs; and that of the loss function alone, without KL and entropy
bonus, by a copy of the logprobs that only the loss function gets. T packed tokens.
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
    """The effect of one alternative in one batch's first update."""

    gradients: Gradients
    """Unclipped."""
    metrics: dict[str, float]
    """policy/grad_norm, policy/loss and the loss's own metrics, as a run reports them."""
    clipped: float
    """Share of the loss tokens that have an advantage and no gradient from the loss function."""
    masked: float
    """Share of the loss tokens whose terms are multiplied by 0: correction, entropy filter."""
    ess: float
    """Effective share of the loss tokens with an advantage, by the factors of the advantages."""
    pushes: Tensor
    """[S] float64: minus the gradient of the loss by the sample's summed logprob; NaN for samples
    of other updates."""
    token_pushes: dict[int, list[float]]
    """{row of the batch's scalars: the push of each token, 0 in the prompt}."""


@dataclass
class _Row:
    """One micro-batch, and the tensors of its loss; None where the loss had none."""

    microbatch: PreparedMicrobatch
    scored: Tensor | None = None
    """[N] logprobs of the model, whose gradient is that of the whole loss."""
    apart: Tensor | None = None
    """[T] the loss function's copy of the logprobs."""
    terms: Tensor | None = None
    """[T] result of the loss function."""
    slopes: Tensor | None = None
    """[T] gradient of the sum of the terms over the loss tokens, by each token's logprob."""


class _Observer:
    """Takes the places of the policy and of the loss function in a loss, and records their results.

    Args:
        model, loss_fn: the real ones.
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
        """Return a function in place of the loss function, with the same attributes."""

        @functools.wraps(self._loss)
        def watched(**given: Any) -> Any:
            """Call the loss function with a copy of the logprobs."""
            logprobs = given.get("logprobs")
            if logprobs is None or not logprobs.requires_grad:
                return self._loss(**given)
            apart = logprobs.clone()
            found = self._loss(**given | {"logprobs": apart})
            self._note(apart, found[0])
            return found

        return watched

    def _note(self, apart: Tensor, terms: Tensor) -> None:
        if terms.shape != apart.shape or not terms.requires_grad:
            return  # the loss refuses another shape, and constant terms have no gradient
        row = self.rows[-1]
        row.apart = apart
        row.terms = terms
        total = terms[row.microbatch.loss_mask].sum()
        # The graph is kept, since the backward pass of the whole loss comes later.
        (row.slopes,) = torch.autograd.grad(total, apart, retain_graph=True, allow_unused=True)
        apart.retain_grad()  # not before: the pass above must not add to these gradients
        terms.retain_grad()

    def of(self, loss_of: LossOf) -> LossOf:
        """Return a loss of micro-batches that is recorded."""

        def observed(microbatch: PreparedMicrobatch) -> tuple[Tensor, Stats]:
            """Call the loss, with a new row for its tensors."""
            self.rows.append(_Row(microbatch))
            return loss_of(microbatch)

        return observed


def probe(trainer: Trainer, batch: Batch, alternative: Alternative, *, step: int) -> Probe:
    """Return the gradients of an alternative in a batch's first update.

    Args:
        trainer: with the weights that the step trained; it is not changed.
        batch: as exchanged and annotated, with the columns of all alternatives.
        step: of the run.
    Raises: Refusal for a result of a function that does not fit the batch.
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
    found = {"policy/grad_norm": totals.grad_norm, "policy/loss": totals.loss}
    return Probe(
        gradients=gradients,
        metrics=found | values_of(totals.stats),
        **_reached(observer.rows, batch, scale=trainer.policy.loss_scale.value),
    )


def _with_columns(batch: Batch, names: set[str]) -> Batch:
    """Return a batch with only these columns, without those for other alternatives."""
    # The pass that scores old_logprobs gives old_entropy too.
    kept = names | ({"old_entropy"} if "old_logprobs" in names else set())
    columns = tuple(
        tuple({name: column for name, column in own.items() if name in kept} for own in update)
        for update in batch.columns
    )
    return replace(batch, columns=columns if kept else ())


def _coefficients(trainer: Trainer, cfg: Config) -> Coefficients:
    """Return the coefficients of KL and entropy bonus. Coefficients that change in a run are those
    of the run at this step, if the alternative has the same settings for them."""
    found = Coefficients(cfg)
    chosen = cfg.algorithm
    own = trainer.cfg.algorithm
    state = trainer.coefficients.state_dict()
    if (chosen.kl_coef, chosen.kl_control) != (own.kl_coef, own.kl_control):
        state.pop("kl", None)
    if (chosen.entropy_coef, chosen.entropy_control) != (own.entropy_coef, own.entropy_control):
        state.pop("entropy", None)
    found.load_state_dict(state)
    return found


def _reached(rows: Sequence[_Row], batch: Batch, *, scale: float) -> dict[str, Any]:
    """Return the fields of Probe that are measured on tokens.

    Args:
        scale: factor on the loss in the backward pass.
    """
    pushes = torch.full((len(batch.scalars),), math.nan, dtype=torch.float64)
    pushes[batch.update_ids == 0] = 0.0
    token_pushes: dict[int, list[float]] = {}
    marks: list[Tensor] = []
    for row in rows:
        packed = row.microbatch.packed
        push = _spread_push(row, scale=scale)
        parts = push.split(packed.cu_seqlens.diff().tolist())
        for number, part in zip(packed.sequence_ids.tolist(), parts):
            if number >= 0:  # else a dummy
                pushes[number], token_pushes[number] = part.sum(), part.tolist()
        marks.append(_marks(row, scale=scale))
    in_loss, has_advantage, is_flat, is_cut, weights = torch.cat(marks, dim=1)
    counts = (in_loss > 0) & (has_advantage > 0)
    return {
        "pushes": pushes,
        "token_pushes": token_pushes,
        "clipped": share(counts & (is_flat > 0), in_loss > 0),
        "masked": share(is_cut > 0, in_loss > 0),
        "ess": effective_share(weights[counts]),
    }


def _spread_push(row: _Row, *, scale: float) -> Tensor:
    """Return [T] float64: minus the gradient of the loss by each token's logprob."""
    if row.scored is None or row.scored.grad is None:
        return torch.zeros(row.microbatch.packed.tokens.shape, dtype=torch.float64)
    return -row.microbatch.row.spread(row.scored.grad).double().cpu() / scale


def _marks(row: _Row, *, scale: float) -> Tensor:
    """Return [5, T] float64 for each token: whether it is in the loss; has an advantage; has no
    gradient from the loss function; has terms that are multiplied by 0; and the factor of its
    advantage, by ratio, clipping and correction."""
    one = row.microbatch
    weights = one.weights.double()
    advantages = one.columns["advantages"].double()
    in_loss = one.loss_mask & (weights > 0)
    zeros = torch.zeros_like(weights)
    through = zeros
    factors = zeros
    if row.apart is not None and row.apart.grad is not None:
        through = row.apart.grad.double().abs() / scale
    if row.terms is not None and row.terms.grad is not None:
        factors = row.terms.grad.double() / scale
    slopes = zeros if row.slopes is None else row.slopes
    own = torch.where(in_loss & (advantages != 0), through / (weights * advantages.abs()), 0.0)
    marks = [in_loss, advantages != 0, slopes == 0, factors == 0, own]
    return torch.stack([mark.double().cpu() for mark in marks])
