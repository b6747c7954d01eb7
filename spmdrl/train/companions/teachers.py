"""The teachers that distillation follows, and what they say about a micro-batch.

Each sequence is read by the teacher of its source, once. All teachers are sharded like the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.model.head import HeadOptions
from spmdrl.model.sampling_rules import SamplingRules
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.companions.companion import Companion
from spmdrl.train.companions.reference import Frozen, Itself, Scoring
from spmdrl.train.companions.teacher_checks import check_teachers
from spmdrl.train.lessons import Lessons, Places
from spmdrl.train.microbatches import PreparedMicrobatch
from spmdrl.world.world import World


@dataclass(frozen=True)
class Taught:
    """What makes the logits of a teacher, for scored tokens in this rank's slice of a row.

    Shape letters: k such tokens, H hidden and V vocabulary of the teacher.
    """

    states: Tensor  # [k, H]
    weight: Tensor  # [V, H], this rank's rows
    bias: Tensor | None  # [V]
    options: HeadOptions
    rules: SamplingRules | None
    """How the policy sampled these tokens."""
    places: Places | None
    """Where these tokens are among those of the policy's row; None: they are all of these."""


class Teachers(Companion):
    """The teachers of a config. They neither learn nor keep state.

    Args:
        cfg, world: the config and this rank's view of the job.
        policy: whose rows they read.
        reference: what the teacher `reference` is, where there is one.
        gives_logprobs: whether `columns` has their logprobs.
    Raises: Refusal when one cannot be loaded or laid out.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        policy: ShardedModel,
        reference: Companion | None,
        gives_logprobs: bool,
    ):
        if "" in cfg.teacher_fields().values():
            raise Refusal("model.teacher: is empty, and some rows follow no other; name a model")
        check_teachers(cfg)
        own: Mapping[str, Companion | None] = {"policy": Itself(policy), "reference": reference}
        self._models: list[Scoring] = []
        for teacher in cfg.teachers:
            model = own.get(teacher) or Frozen(cfg, world, path=teacher, column="")
            assert isinstance(model, Scoring), "refused: a cached reference"
            self._models.append(model)
        num_ids = []
        for model in self._models:
            with model.reading() as read:
                num_ids.append(read.hf_model.get_input_embeddings().weight.shape[0])
        self.lessons = Lessons(cfg, policy=policy, num_ids=num_ids)
        self._gives_logprobs = gives_logprobs

    def columns(self, microbatches: Sequence[PreparedMicrobatch]) -> list[dict[str, Tensor]]:
        """Return teacher_logprobs [T] float32 of each micro-batch, nats, 0 off the scored."""
        if not self._gives_logprobs:
            return [{} for _ in microbatches]
        found = [one.row.spread(_zeros(one.row)) for one in microbatches]
        for number, teacher in enumerate(self._models):
            lessons = [one.lessons[number] for one in microbatches]
            with teacher.reading() as model:
                scored = model.columns([lesson.row for lesson in lessons])
            for at, (lesson, (logprobs, _)) in enumerate(zip(lessons, scored)):
                if lesson.places is None:
                    found[at] = logprobs
                else:
                    own = microbatches[at].row.scored[lesson.places.order]
                    found[at] = found[at].index_copy(0, own, logprobs[lesson.row.scored])
        return [{"teacher_logprobs": logprobs} for logprobs in found]

    @torch.no_grad()
    def read(self, microbatch: PreparedMicrobatch) -> list[Taught]:
        """Run the teachers on what they read of a micro-batch; trainer ranks meet."""
        found = []
        for teacher, lesson in zip(self._models, microbatch.lessons, strict=True):
            with teacher.reading() as model:
                # The head returns its inputs: the loss makes logits chunk by chunk.
                states, weight, bias = model.scorer(lesson.row, lambda *given, targets: given)
            if lesson.places is not None:
                # Another row has other slices.
                states = lesson.row.join_scored(states)[lesson.places.picked]
            options = model.scorer.head_options
            found.append(
                Taught(states, weight, bias, options, rules=lesson.rules, places=lesson.places)
            )
        return found


def _zeros(row: ScoredRow) -> Tensor:
    return torch.zeros(len(row.scored), device=row.scored.device)
