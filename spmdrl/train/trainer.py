"""The policy and the models beside it, on a rank that trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.algorithms.registry import Method
from spmdrl.config import Config
from spmdrl.config.data import Split
from spmdrl.model.decode_reads import decode_reads
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.flops import countable_shape, trained_flops
from spmdrl.model.load import longest_sequence, model_folder
from spmdrl.model.lora.files import AdapterRecord
from spmdrl.model.lora.layers import lora_form
from spmdrl.model.sharded_model import SentWeights, ShardedModel
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.companions.companion import Companion
from spmdrl.train.companions.make import make_companions
from spmdrl.train.companions.model_rewards import RewardModels
from spmdrl.train.companions.teachers import Teachers
from spmdrl.train.microbatch_size import SizeProbe
from spmdrl.train.microbatches import PreparedMicrobatch, prepare
from spmdrl.train.objectives.objective_loss import loss_class, named_methods
from spmdrl.train.packing_check import check_packing
from spmdrl.train.trained_model import TrainedModel, in_epochs
from spmdrl.types import Advantages, Batch, Sums, add_sums
from spmdrl.world.microbatch_tokens import agree_on_tokens
from spmdrl.world.world import World


class Trainer:
    """Train and score with a sharded transformers model; made by `roles.make_trainer`.

    Args:
        cfg: the config.
        world: the view of a trainer rank.
        hf_model: the policy on the meta device.
        weights: what the stream sends; it gets the policy.
        loss_fn, advantage_fn: the methods, those of the config by default. Their parameters decide
            which models are needed beside the policy.
        columns: columns for `annotate` to add that these two do not ask for.
    Raises: Refusal when a model cannot be loaded or laid out.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        hf_model: nn.Module,
        weights: SentWeights,
        loss_fn: Method | None = None,
        advantage_fn: Method | None = None,
        columns: Collection[str] = (),
    ):
        self.cfg = cfg
        self.world = world
        self.weights = weights
        self._shape = countable_shape(hf_model)
        self._vocab = hf_model.get_input_embeddings().weight.shape[0]
        given = {"loss_fn": loss_fn, "advantage_fn": advantage_fn}
        methods = named_methods(cfg) | {name: f for name, f in given.items() if f}
        self.coefficients = Coefficients(cfg)
        kind = loss_class(cfg)
        self._numerics = numerics_of(cfg)
        self.columns = kind.columns_of(cfg, **methods) | {*columns}
        """Per-token columns that `annotate` finds."""
        model = ShardedModel(
            cfg,
            world,
            path=cfg.model.path,
            is_trained=True,
            is_scalar=cfg.objective.is_scalar,
            lora=lora_form(cfg.model.lora) if cfg.model.lora.is_on else None,
        )
        weights.model = model
        self.policy = TrainedModel(model, cfg.optimizer)
        self.companions = make_companions(cfg, world, policy=model, columns=self.columns)
        self._loss = kind(
            cfg,
            world,
            loss_fn=methods["loss_fn"],
            coefficients=self.coefficients,
            companions=self.companions,
        )
        self._reward_models = RewardModels(cfg, world)
        self._kept: dict[str, Coefficients | AdapterRecord | Companion] = {
            **self.companions,
            "coefficients": self.coefficients,
        }

    def joined(self) -> None:
        """Run the set-up that trainers share, after each of them is built."""
        model = self.policy.model
        if model.adapters:
            folder = model_folder(self.cfg.model.path)
            quantised = model.base.form.numbers() if model.base else (0, 0)
            self._kept["lora"] = AdapterRecord(
                model.adapters.form, folder, self.world, quantised=quantised
            )

    def watch_logprobs(self, on_logprobs: Callable[[Tensor], None]) -> None:
        """Have a function called for each micro-batch of an update, see ObjectiveLoss."""
        self._loss.on_logprobs = on_logprobs

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, by name, sharing live storage; see TrainedModel.

        The parts of companions that change, such as the value model, are under their names,
        coefficients that move under `coefficients`, and the scale and base weights of adapters
        under `lora`.
        """
        state = self.policy.state_dict()
        parts = {name: part.state_dict() for name, part in self._kept.items()}
        return state | {name: part for name, part in parts.items() if part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        self.policy.load_state_dict(state)
        for name, part in self._kept.items():
            if name in state:
                part.load_state_dict(state[name])

    # ---------------------------------------------------------------- scoring

    def scores(self, batch: Batch, *, step: int, split: Split) -> dict[int, Tensor]:
        """Return the scores that the reward models of rewards.functions give to a batch's
        sequences, whose prompts are rows of data.train or data.eval. Trainer ranks meet each other.

        Returns: {position in rewards.functions: [S] float64, task units}, the same on all.
        """
        return self._reward_models.scores(batch, step=step, split=split)

    def annotate(self, batch: Batch, *, step: int) -> Batch:
        """Add the columns that loss and advantage ask for.

        The scores of reward models go into the rewards, see `model_rewards.with_scores`; the rest
        are per-token columns. Each model takes one forward pass over the batch: `old_logprobs`
        (with `old_entropy` and, if asked for, `square_probs`) of the policy before its update
        (under engine.exact the engine's, without a pass, where nothing asks for its entropy),
        `ref_logprobs` of the reference, `teacher_logprobs`, `prm_logprobs`, and `values`, task
        units, of the state before each token. Trainer ranks meet each other.

        Returns: the batch with columns, [T] float32 (nats), 0 off the loss mask; unchanged
            where no column is needed.
        Raises: Refusal, on all trainer ranks, for a score that is not finite under
            rewards.on_failure=fail.
        """
        self.coefficients.begin(step)
        # A score that fails may take its sample out of the loss.
        batch = self._reward_models.add_to(batch, step=step)
        if not self.columns:
            return batch
        with self.world.watch.wait("annotate", step):
            is_taught = "teacher_logprobs" in self.columns
            updates = self._prepare(batch, reads_teachers=is_taught)
            flat = [one for microbatches in updates for one in microbatches]
            found: list[dict[str, Tensor]] = [{} for _ in flat]
            asks_old = "old_logprobs" in self.columns
            if asks_old and self._numerics.samples_as_scored and "old_entropy" not in self.columns:
                found = [_as_sampled(one) for one in flat]
            elif asks_old:
                names = ("old_logprobs", "old_entropy", "square_probs")
                rows = [one.row for one in flat]
                own = self.policy.model.columns(rows, squares="square_probs" in self.columns)
                found = [dict(zip(names, values)) for values in own]
            for companion in self.companions.values():
                found = [a | b for a, b in zip(found, companion.columns(flat))]
        # They are flat, so that each model takes one pass. Divide the result into updates again.
        each = iter(found)
        columns = tuple(tuple(next(each) for _ in microbatches) for microbatches in updates)
        return replace(batch, columns=columns, kl_coef=self.coefficients.kl)

    def logprobs(self, batch: Batch, *, step: int = -1) -> list[Tensor]:
        """Score a batch's loss tokens without gradients.

        Returns: per micro-batch, in order of updates, [T] float32 nats, 0 off the loss mask.
        """
        with self.world.watch.wait("logprobs", step):
            rows = [one.row for microbatches in self._prepare(batch) for one in microbatches]
            return [logprobs for logprobs, _ in self.policy.model.columns(rows)]

    def _prepare(
        self, batch: Batch, advantages: Advantages | None = None, *, reads_teachers: bool = False
    ) -> list[list[PreparedMicrobatch]]:
        batch = self._loss.with_columns(batch)
        lessons = None
        if reads_teachers:
            teachers = self.companions["teacher"]
            assert isinstance(teachers, Teachers)
            lessons = teachers.lessons
        model = self.policy.model
        return prepare(batch, advantages, cfg=self.cfg, model=model, lessons=lessons)

    # ---------------------------------------------------------------- training

    def check_packing(self) -> Sums:
        """Compare packed rows with single ones, and with plain transformers; trainers meet.

        Returns, raises: see packing_check.check_packing.
        """
        with self.world.watch.wait("check rows", -1):
            return check_packing(self.policy.model, self.cfg, self.world)

    def size_microbatches(self) -> None:
        """Find the token budget of a micro-batch if batch.tokens_per_microbatch is 0. Every rank
        calls this, after the checkpoint was loaded.

        Raises: see `SizeProbe.find`.
        """
        probe = SizeProbe(
            self._rehearse,
            self.world,
            vocab=self._vocab,
            columns=self.columns,
            longest=longest_sequence(self.cfg),
        )
        agree_on_tokens(self.world, probe.find)

    def _rehearse(self, batch: Batch, advantages: Advantages) -> None:
        is_taught = self.cfg.objective.needs_teacher
        updates = self._prepare(batch, advantages, reads_teachers=is_taught)
        for companion in self.companions.values():
            companion.rehearse(updates[0])
        loss_of = self._loss.of_updates(updates, self.policy.model, step=0)
        self.policy.rehearse(updates[0], loss_of)

    def update(self, batch: Batch, advantages: Advantages, *, step: int) -> Sums:
        """Take the optimizer steps of a batch, for the policy and the companions that train.

        Args:
            batch: as exchanged and annotated; on trainers every update has the same number of
                micro-batches.
            advantages: of its tokens.
            step: training step, for the schedules. Before critic.warmup_steps the policy
                does not change, and its sums are missing.
        Returns: policy/, loss/, value/ or prm/ and perf/ sums over all trainer ranks, equal on
            each of them.
        """
        companions = self.companions.values()
        with self.world.watch.wait("update", step):
            is_taught = self.cfg.objective.needs_teacher
            updates = self._prepare(batch, advantages, reads_teachers=is_taught)
            ordered = partial(in_epochs, updates, seed=self.cfg.seed, step=step)
            epochs = self.cfg.batch.epochs
            own = ordered(epochs=self.cfg.critic.epochs or epochs)
            sums = add_sums(*[companion.update(own, step=step) for companion in companions])
            # Without a trained companion there is nothing to warm up.
            warms_up = step < self.cfg.critic.warmup_steps
            if not (warms_up and any(companion.is_trained for companion in companions)):
                loss_of = self._loss.of_updates(updates, self.policy.model, step=step)
                sums |= self.policy.update(ordered(epochs=epochs), loss_of, step=step)
                self._numerics.check_step(sums, step=step)
                sums |= self._work(updates, batch)
                sums |= decode_reads(
                    self._shape,
                    lengths=batch.scalars.lengths,
                    sampled=batch.scalars.response_lengths,
                    steps=batch.sums.get("perf/engine_steps", (0.0, 0.0))[0],
                    cfg=self.cfg,
                )
                sums |= self.coefficients.move(sums, num_samples=len(batch.scalars.episodes()))
            for companion in companions:
                companion.follow(self.policy.model, step=step)
        self.world.announce_updated(step)  # engines that sample ahead pause for the new weights
        return sums

    def _work(self, updates: Sequence[Sequence[PreparedMicrobatch]], batch: Batch) -> Sums:
        """Return what an epoch over a batch took: perf/trainer_flops and perf/computed_frac."""
        count = partial(trained_flops, self._shape, cfg=self.cfg)
        lengths = batch.scalars.lengths
        if not self.world.shares_prefixes:
            num_scored = sum(update[0].update_counts[0] for update in updates)
            return count(lengths=lengths, num_scored=num_scored)
        real = [one.row for update in updates for one in update if one.num_tokens]
        spans = [span for row in real for span in row.own.computed]
        before, ends = torch.tensor(spans, dtype=torch.int64).view(-1, 2).T
        own = count(lengths=ends, before=before, num_scored=sum(len(row.scored) for row in real))
        computed = torch.tensor([(ends - before).sum(), *(flops for flops, _ in own.values())])
        tokens, *flops = self.world.sum_over_trainers(computed.double()).tolist()
        found = {name: (total, 1.0) for name, total in zip(own, flops)}
        return found | {"perf/computed_frac": (tokens, float(lengths.sum()))}


def _as_sampled(microbatch: PreparedMicrobatch) -> dict[str, Tensor]:
    """Return the logprobs that the engine sampled with as the policy's before its update."""
    sampled = microbatch.packed.rollout_logprobs
    return {"old_logprobs": torch.where(microbatch.loss_mask, sampled, 0.0)}
