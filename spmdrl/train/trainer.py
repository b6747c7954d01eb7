"""The policy of this rank and the models beside it; or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from spmdrl.config import Config
from spmdrl.model.flops import countable_shape, trained_flops
from spmdrl.model.load import build_meta_model, model_folder
from spmdrl.model.lora.files import AdapterRecord
from spmdrl.model.lora.form import lora_form
from spmdrl.model.sharded import ShardedModel
from spmdrl.model.weights import SentWeights
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.companions.model_rewards import RewardModels
from spmdrl.train.companions.protocol import Companion, make_companions
from spmdrl.train.companions.trained import TrainedCompanion
from spmdrl.train.microbatch_size import find_tokens
from spmdrl.train.objectives.pairs import with_pairs
from spmdrl.train.objectives.protocol import make_objective
from spmdrl.train.objectives.rl import Job, Stats, make_jobs
from spmdrl.train.trained_model import LossOf, TrainedModel
from spmdrl.types import Advantages, Batch, Sums, add_sums
from spmdrl.world import World
from spmdrl.world.comm import agree

log = logging.getLogger(__name__)


class Trainer:
    """Train and score with a sharded transformers model. Off the trainers it holds nothing.

    Args:
        cfg: the config.
        world: this rank's view of the job. Every rank constructs, trainers or not.
    Raises: ValueError, on all ranks together, when a model cannot be loaded or laid out.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.policy: TrainedModel | None = None
        self.companions: dict[str, Companion] = {}
        self._records: dict[str, AdapterRecord] = {}
        with agree(group=world.control, waiting=world.watch.wait("load the policy", -1)):
            self._build()
        if self.policy and self.policy.model.adapters:  # together: no rank has failed
            self._records["lora"] = AdapterRecord(
                self.policy.model.adapters.form, model_folder(cfg.model.path), world
            )

    def _build(self) -> None:
        cfg, world = self.cfg, self.world
        self._is_scalar = cfg.objective.is_scalar
        hf_model = build_meta_model(cfg.model, is_scalar=self._is_scalar)
        lora = lora_form(cfg.model.lora)
        self._shape = countable_shape(hf_model)
        self._vocab = hf_model.get_input_embeddings().weight.shape[0]
        self.weights = SentWeights(hf_model, cfg.model.lora)
        if not world.is_trainer:
            return
        self._coefficients = Coefficients(cfg)
        self._objective = make_objective(cfg, world, coefficients=self._coefficients)
        model = ShardedModel(
            cfg, world, path=cfg.model.path, is_trained=True, is_scalar=self._is_scalar, lora=lora
        )
        self.weights.model = model
        self.policy = TrainedModel(model, cfg=cfg, world=world, options=cfg.optimizer)
        self.companions = make_companions(cfg, world, policy=model, columns=self._objective.columns)
        self._reward_models = RewardModels(cfg, world)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint keeps, by name, sharing live storage; see TrainedModel.

        The parts of companions that change, such as the value model, are under their names,
        coefficients that move under `coefficients`, and what adapters belong to under `lora`.
        """
        state = self.policy.state_dict() if self.policy else {}
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return state | {name: part for name, part in parts.items() if part}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        if self.policy:
            self.policy.load_state_dict(state)
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Companion | Coefficients | AdapterRecord]:
        coefficients = {"coefficients": self._coefficients} if self.policy else {}
        return self.companions | self._records | coefficients

    # ---------------------------------------------------------------- scoring

    def annotate(self, batch: Batch, *, step: int) -> Batch:
        """Add what the configured methods ask for besides; call on every rank.

        The scores of reward models go into the rewards, see `reward_model.with_scores`; the rest
        are per-token columns. Each model takes one forward pass over the batch: `old_logprobs`
        (with `old_entropy` and, if asked for, `square_probs`) of the policy before its update,
        `ref_logprobs` of the reference, `teacher_logprobs`, `prm_logprobs`, and `values`, task
        units, of the state before each token. Trainer ranks meet each other.

        Returns: the batch with columns, [T] float32 (nats), 0 off the loss mask; as it was
            where nothing is asked for. Off the trainers as it was.
        Raises: ValueError, on all trainer ranks, for a score that is not finite under
            rewards.on_failure=fail.
        """
        if self.policy is None:
            return batch
        # First: a score that fails may take its sample out of the loss.
        batch = self._reward_models.add_to(batch, step=step)
        if not self._objective.columns:
            return batch
        with self.world.watch.wait("annotate", step):
            jobs = self._jobs(batch)
            rows = [job.row for update in jobs for job in update]
            found: list[dict[str, Tensor]] = [{} for _ in rows]
            if "old_logprobs" in self._objective.columns:
                own = self.policy.model.columns(
                    rows, squares="square_probs" in self._objective.columns
                )
                for one, values in zip(found, own):
                    one |= dict(zip(("old_logprobs", "old_entropy", "square_probs"), values))
            for companion in self.companions.values():
                for one, columns in zip(found, companion.columns(rows)):
                    one |= columns
        each = iter(found)
        columns = tuple(tuple(next(each) for _ in update) for update in jobs)
        return replace(batch, columns=columns, kl_coef=self._coefficients.kl)

    def logprobs(self, batch: Batch, *, step: int = -1) -> list[Tensor]:
        """Score a batch's loss tokens without gradients.

        Returns: per micro-batch, in order of updates, [T] float32 nats, 0 off the loss mask.
        """
        if self.policy is None:
            return []
        with self.world.watch.wait("logprobs", step):
            rows = [job.row for update in self._jobs(batch) for job in update]
            return [logprobs for logprobs, _ in self.policy.model.columns(rows)]

    def _jobs(self, batch: Batch, advantages: Advantages | None = None) -> list[list[Job]]:
        batch = with_pairs(batch, self.cfg)
        return make_jobs(batch, advantages, cfg=self.cfg, model=self.policy.model)

    # ---------------------------------------------------------------- training

    def size_microbatches(self, *, known: int = 0) -> None:
        """Find the token budget of a micro-batch where the config leaves it open, by 0, and make
        it the world's; call on every rank, once what is to be trained was loaded.

        Args:
            known: what a checkpoint says was found; nothing is tried then.
        Raises: see microbatch.find_tokens.
        """
        world = self.world
        if self.cfg.batch.tokens_per_microbatch:
            return
        with world.watch.wait("size micro-batches", -1):
            world.found_tokens = known or find_tokens(
                self._rehearse,
                world,
                vocab=self._vocab,
                columns=self._objective.columns if self.policy else (),
            )
        if world.rank == 0:
            log.info(
                "micro-batches of %d tokens (batch.tokens_per_microbatch: 0%s)",
                world.found_tokens,
                ", as the checkpoint says" if known else "",
            )

    def _rehearse(self, batch: Batch, advantages: Advantages) -> None:
        jobs = self._jobs(batch, advantages)
        for companion in self.companions.values():
            if isinstance(companion, TrainedCompanion):
                companion.rehearse(jobs[0])
        self.policy.rehearse(jobs[0], self._loss_of(jobs, step=0))

    def update(self, batch: Batch, advantages: Advantages, *, step: int) -> Sums:
        """Take the batch's optimizer steps, those of companions too; call on every rank.

        Args:
            batch: as exchanged and annotated; on trainers every update has the same number of
                micro-batches.
            advantages: of its tokens.
            step: training step, for the schedules. Before critic.warmup_steps the policy
                stands still, and its sums are absent.
        Returns: policy/, loss/, value/ or prm/ and perf/ sums over all trainer ranks, equal on
            each of them; {} elsewhere.
        """
        if self.policy is None:
            return {}
        with self.world.watch.wait("update", step):
            jobs = self._jobs(batch, advantages)
            sums = add_sums(*[c.update(jobs, step=step) for c in self.companions.values()])
            if not self._stands_still(step):
                sums |= self._update(jobs, step=step)
                sums |= trained_flops(
                    self._shape,
                    batch.scalars,
                    has_head=not self._is_scalar,
                    mask_truncated=self.cfg.algorithm.mask_truncated,
                    trains_weights=not self.cfg.model.lora.is_on,
                )
                sums |= self._coefficients.move(sums, num_samples=len(batch.scalars))
            for companion in self.companions.values():
                companion.follow(self.policy.model, step=step)
            if self.cfg.rollout.schedule.in_flight:
                self.world.announce_updated(step)  # engines pause between two tokens
            return sums

    def _stands_still(self, step: int) -> bool:
        """Whether the model of the section `critic` is to train alone for now."""
        is_there = not self.companions.keys().isdisjoint(("critic", "prm"))
        return is_there and step < self.cfg.critic.warmup_steps

    def _update(self, jobs: Sequence[Sequence[Job]], *, step: int) -> Sums:
        loss_of = self._loss_of(jobs, step=step)
        return add_sums(
            *[
                self.policy.take_step(update, loss_of, step=step, number=number)
                for number, update in enumerate(jobs)
            ]
        )

    def _loss_of(self, jobs: Sequence[Sequence[Job]], *, step: int) -> LossOf:
        statistics = self._objective.statistics(jobs, world=self.world)

        def loss_of(job: Job) -> tuple[Tensor, Stats]:
            return self._objective(self.policy.model, job, step=step, statistics=statistics)

        return loss_of
