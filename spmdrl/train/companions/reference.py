"""The models that score and are not trained: a teacher; a reference that stays, or follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.tensor_parts import local_part
from spmdrl.train.companions.companion import Companion
from spmdrl.train.companions.reference_cache import cached_logprobs, look_up
from spmdrl.train.microbatches import PreparedMicrobatch
from spmdrl.world.world import World


class Scoring(Companion):
    """A language model that scores.

    Args:
        column: name of its logprobs; empty: `columns` has none.
    """

    def __init__(self, *, column: str):
        self._column = column

    def reading(self) -> AbstractContextManager[ShardedModel]:
        """Return the model for passes inside a `with` block."""
        raise NotImplementedError

    def columns(self, microbatches: Sequence[PreparedMicrobatch]) -> list[dict[str, Tensor]]:
        """Score micro-batches: for each, its column [T] float32, nats, 0 off the scored tokens."""
        if not self._column:
            return [{} for _ in microbatches]
        # It routes tokens itself; replayed routes are the policy's.
        rows = [one.row.without_routes() for one in microbatches]
        with self.reading() as model:
            return [{self._column: logprobs} for logprobs, _ in model.columns(rows)]


class Itself(Scoring):
    """The policy as it is now, as a teacher that reads another prompt."""

    def __init__(self, policy: ShardedModel):
        super().__init__(column="")
        self._policy = policy

    @contextmanager
    def reading(self) -> Iterator[ShardedModel]:
        """Yield the policy."""
        yield self._policy


class Frozen(Scoring):
    """A causal LM of its own that only scores: a reference or a teacher.

    Args:
        cfg, world: the config and this rank's view of the job.
        path: folder or hub name of its weights.
        column: see Scoring.
        is_float32: keep its parameters so, whatever it computes in.
    Raises: Refusal when the model cannot be loaded or laid out.
    """

    def __init__(
        self, cfg: Config, world: World, *, path: str, column: str, is_float32: bool = False
    ):
        super().__init__(column=column)
        self.model = ShardedModel(cfg, world, path=path, is_trained=False, is_float32=is_float32)

    @contextmanager
    def reading(self) -> Iterator[ShardedModel]:
        """Yield the model."""
        yield self.model


class WithoutAdapters(Scoring):
    """The policy as it would be without its adapters: a reference that takes no memory.

    Args:
        policy: a model with adapters.
        column: see Scoring.
    """

    def __init__(self, policy: ShardedModel, *, column: str = "ref_logprobs"):
        super().__init__(column=column)
        assert policy.adapters is not None
        self._policy = policy
        self._adapters = policy.adapters

    @contextmanager
    def reading(self) -> Iterator[ShardedModel]:
        """Yield the policy, its adapters switched off."""
        with self._adapters.off():
            yield self._policy


class Synced(Frozen):
    """A reference that takes over a share of the policy every few steps.

    reference <- mix * policy + (1 - mix) * reference after steps every, 2 * every, ... With a mix
    of 1 it becomes the policy, and the compute dtype is all that is ever read of it. Below 1 it
    is kept in float32: bfloat16 has 8 bits, so a reference in it would not move at all where
    mix * (policy - reference) is under about 1/500 of a weight.

    Args:
        cfg, world: the config and this rank's view of the job.
        path: folder or hub name that it starts from.
        column: see Scoring.
        policy: the model that it follows.
        every: steps from one sync to the next, at least 1.
        mix: the policy's share, in (0, 1].
    Raises: Refusal when the model cannot be loaded, or is not of the policy's form.
    Source: arXiv 2404.09656 (TR-DPO): its hard update, and with a mix below 1 the soft one.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        path: str,
        column: str,
        policy: ShardedModel,
        every: int,
        mix: float,
    ):
        super().__init__(cfg, world, path=path, column=column, is_float32=mix < 1)
        self._every = every
        self._mix = mix
        own, other = (
            {name: tuple(p.shape) for name, p in model.named_shards().items()}
            for model in (self.model, policy)
        )
        differing = sorted(n for n in own.keys() | other.keys() if own.get(n) != other.get(n))
        if differing:
            name = differing[0]
            raise Refusal(
                f"model.reference.sync_every: {every} with model.reference.path {path}, which "
                f"is not of the policy's form: {name} is {own.get(name, 'missing')} there and "
                f"{other.get(name, 'missing')} in the policy ({len(differing)} tensors differ); "
                "take a model of the same architecture and size"
            )

    @torch.no_grad()
    def follow(self, policy: ShardedModel, *, step: int) -> None:
        """Sync if it is time, after the policy's update of `step` (from 0)."""
        if (step + 1) % self._every:
            return
        theirs = policy.named_shards()  # in the same sharding: each rank mixes its own parts
        for name, parameter in self.model.named_shards().items():
            own = local_part(parameter)
            other = local_part(theirs[name])
            if self._mix == 1:
                own.copy_(other)
            else:
                own.lerp_(other.to(own.dtype), self._mix)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters by name, as TrainedModel does, sharing live storage."""
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        self.model.load_state_dict(state["model"])


class Cached(Companion):
    """A reference whose logprobs were computed at start and saved; see reference_cache."""

    def __init__(self, cfg: Config, world: World, *, path: str):
        self._table = cached_logprobs(cfg, world, path=path)

    def columns(self, microbatches: Sequence[PreparedMicrobatch]) -> list[dict[str, Tensor]]:
        """Look up micro-batches: for each, ref_logprobs [T] float32, nats, 0 off the scored."""
        return [{"ref_logprobs": look_up(self._table, one.row)} for one in microbatches]
