"""What the program asks of an engine: requests in, finished samples out, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from spmdrl.config import NO_PENALTIES, Penalties
from spmdrl.sampling_masks import SamplingMasks


@dataclass(frozen=True)
class Truncation:
    """Which ids a token is drawn among; min_p first, then top_k, then top_p, of what is left."""

    top_p: float = 1.0
    """Of the likeliest ids so many as have at least this probability together."""
    top_k: int = 0
    """So many of the likeliest ids, and those that are as likely as the last; 0: all."""
    min_p: float = 0.0
    """Those at least this times as likely as the likeliest."""

    @property
    def is_on(self) -> bool:
        """Whether ids may be left out."""
        return self != UNTRUNCATED


UNTRUNCATED = Truncation()
"""Among all ids."""


@dataclass(frozen=True)
class Request:
    """One sample to draw."""

    key: str
    """Unique among unfinished requests."""
    prompt: tuple[int, ...]
    """Token ids; TokenIds where they show something."""
    max_tokens: int
    """Longest response in tokens."""
    temperature: float
    """Softmax temperature; 0 is greedy."""
    seed: int | None
    """Keys this sample's randomness; None draws from the engine's own generator."""
    stop_token_ids: tuple[int, ...]
    """Ids that end the response; the one that did is its last token. Nothing else ends it but
    `stop` and max_tokens, in either engine."""
    truncation: Truncation = UNTRUNCATED
    """Not of greedy ones."""
    penalties: Penalties = NO_PENALTIES
    """Of greedy ones too. What the prompt holds is its prompt, what is drawn its response."""
    stop: tuple[str, ...] = ()
    """Strings that end the response at the token that completes one."""
    num_begun: int = 0
    """So many of the prompt's last ids are the begin of the response, drawn by an earlier request:
    a string of `stop` may begin there."""

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn among a part of the vocabulary."""
        return self.truncation.is_on and self.temperature > 0


@dataclass(frozen=True)
class Completion:
    """What was drawn for one request."""

    key: str
    tokens: Tensor
    """[n] int64, sampled ids, the stop token included."""
    logprobs: Tensor
    """[n] float32, natural, of each sampled id under the distribution it was drawn from."""
    versions: Tensor
    """[n] int64, policy version of the weights that drew each."""
    is_truncated: bool
    """Cut at max_tokens (or at the context's end) instead of stopping by itself."""
    routes: Tensor | None = None
    """[n, L, K] int8 or int16: the K experts of each of L layers with experts that the request's
    first n tokens went to, prompt included. n is all but the last token, which the engine never
    read; fewer for a request that is unfinished. A token keeps the route of its first computation.
    None without model.moe.replay."""
    sampling_masks: SamplingMasks | None = None
    """Of the sampled ids; None where the config's sampling leaves out none, or it is greedy."""

    def until(self, count: int) -> Completion:
        """Return what was drawn up to a token that ended it, the first `count`."""
        routes = self.routes
        over = len(self.tokens) - count
        return replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            is_truncated=False,
            routes=None if routes is None else routes[: len(routes) - over],
            sampling_masks=self.sampling_masks and self.sampling_masks[torch.arange(count)],
        )


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the narrowest dtype that holds the index of an expert, and -1."""
    return torch.int8 if num_experts <= 128 else torch.int16


class EngineProtocol(Protocol):
    """A replica's engine as one of its ranks sees it. Off the inference ranks it is empty.

    Every tensor-parallel rank of a replica must make the same calls in the same order.
    """

    dtype: torch.dtype
    """Dtype of the weights."""
    version: int
    """Policy version of the weights, as last told to `weights_changed`."""

    @property
    def model(self) -> nn.Module:
        """The live model, whose parameters the weight stream writes in place."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[Completion]:
        """Run one scheduling step and return what finished in it."""

    @property
    def is_busy(self) -> bool:
        """Whether requests are unfinished."""

    def unfinished(self) -> list[Completion]:
        """Return what was drawn so far for the requests that go on, is_truncated False."""

    def take_back(self) -> list[Completion]:
        """End the requests that go on, and return what `unfinished` does: nothing is left."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0.

        Args:
            sequences: token ids; TokenIds where they show something.
        """

    def weights_changed(self, version: int) -> None:
        """Take `version` as that of the weights. New requests share nothing that older weights
        computed; unfinished ones go on, from a KV cache that is kept or computed anew as
        rollout.schedule says."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors by checkpoint name into the live model. The weight stream watches
        it once, to learn which slice goes where."""

    def reload_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors by checkpoint name, with whatever the engine makes of them."""

    @property
    def can_sleep(self) -> bool:
        """Whether its memory can be had for a while; see handover.py."""

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the KV cache, and the weights or a part of them, until `wake`. No request is
        unfinished, and none comes meanwhile.

        Args:
            keeps_weights: they must be what they were after `wake`; else they are written anew.
        """

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Take back the memory of the weights, and then of the KV cache, which is empty. Weights
        have the addresses that they had."""

    def held_bytes(self) -> int:
        """Return the bytes in use: on CUDA of the whole device, by whomever; on the CPU those of
        weights and KV cache."""

    def close(self) -> None:
        """Free the engine. On every rank, before the process group goes."""


@runtime_checkable
class AdapterEngine(Protocol):
    """What an engine that computes with the policy's adapters itself has besides."""

    def adapter(self, names: Iterable[str]) -> nn.Module:
        """Return the live memory of the adapters that matrices of these names (as
        lora.pair_names) go into, as parameters; 0 where nothing is written."""

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole A [r, in] and scale * B [out, r] by name into it."""
