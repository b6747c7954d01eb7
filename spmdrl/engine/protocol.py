"""What the program asks of an engine: requests in, finished samples out, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from spmdrl.columns import Columns
from spmdrl.config import NO_PENALTIES, Penalties
from spmdrl.imports import refusing
from spmdrl.sampling_masks import SamplingMasks


@dataclass(frozen=True)
class Truncation:
    """Which ids a token is drawn among: min_p is applied first, then top_k, then top_p."""

    top_p: float = 1.0
    """Keep the likeliest ids whose probabilities add up to at least this."""
    top_k: int = 0
    """Keep this many of the likeliest ids, and those as likely as the last one; 0: all."""
    min_p: float = 0.0
    """Keep ids with at least this times the probability of the likeliest one."""

    @property
    def is_on(self) -> bool:
        """Whether ids may be left out."""
        return self != UNTRUNCATED


UNTRUNCATED = Truncation()
"""All ids are kept."""


@dataclass(frozen=True)
class Request:
    """One sample to draw."""

    key: str
    """Unique among unfinished requests."""
    prompt: tuple[int, ...]
    """Token ids; TokenIds where they have images."""
    max_tokens: int
    """Longest response in tokens."""
    temperature: float
    """Softmax temperature; 0 is greedy."""
    seed: int | None
    """Seed of this sample's randomness; None draws from the engine's own generator."""
    stop_token_ids: tuple[int, ...]
    """Ids that end the response; the id that ends it is its last token. Only these, `stop` and
    max_tokens end a response, in either engine."""
    truncation: Truncation = UNTRUNCATED
    """Greedy requests ignore it."""
    penalties: Penalties = NO_PENALTIES
    """Greedy requests have them too. The response that they count is that of this request alone."""
    stop: tuple[str, ...] = ()
    """Strings that end the response at the token that completes one."""
    num_begun: int = 0
    """How many of the prompt's last ids are the start of the response, drawn by an earlier request:
    a string of `stop` may begin there."""
    is_of_base: bool = False
    """Draw with the weights that the policy's adapters are added to; for an AdapterEngine alone."""

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn among a part of the vocabulary."""
        return self.truncation.is_on and self.temperature > 0


@dataclass(frozen=True)
class Drafts:
    """Tokens of a request that an engine drafted, for the model to accept or to replace."""

    num_tokens: int
    num_accepted: int
    num_steps: int
    """Engine steps with draft tokens. Each draws one more token than it accepts."""


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
    """It ended at max_tokens, or at the end of the context, and not by a stop token or string."""
    extra_columns: Columns = field(default_factory=dict)
    """Columns of the sampled tokens. Those that cover the prompt are of the request's first tokens:
    all but the last, which the engine never reads, and fewer for an unfinished request."""
    drafts: Drafts | None = None
    """Of a finished request of an engine that drafts tokens."""

    def until(self, count: int) -> Completion:
        """Return the completion as it is when its token `count` - 1 ends it."""
        dropped = len(self.tokens) - count
        return replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            is_truncated=False,
            extra_columns={
                key: column[torch.arange(max(0, len(column) - dropped))]
                for key, column in self.extra_columns.items()
            },
        )


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the narrowest dtype that holds the index of an expert, and -1."""
    return torch.int8 if num_experts <= 128 else torch.int16


MaskRows = list[tuple[SamplingMasks, int]]
"""For each token of a request: the masks of the engine step that drew it, and its row in them."""


def masks_of_rows(rows: MaskRows, tokens: Tensor, *, key: str) -> SamplingMasks | None:
    """Return the sampling masks of a request's tokens [n] int64; None for no tokens.

    Raises: RuntimeError as `check_masks`.
    """
    own = [masks[torch.tensor([row])] for masks, row in rows]
    return check_masks(SamplingMasks.concat(own, [1] * len(own)), tokens, key=key)


def check_masks(masks: SamplingMasks | None, tokens: Tensor, *, key: str) -> SamplingMasks | None:
    """Return the sampling masks of a request's tokens [n] int64.

    Raises: RuntimeError naming the request, when a token has no mask or is not in its mask.
    """
    hint = "; leave sampling.top_p, top_k and min_p out"
    with refusing(f"request {key}", ValueError, kind=RuntimeError, hint=hint):
        if masks is not None:
            masks.check(tokens)
        elif len(tokens):
            raise ValueError(f"no sampling mask of its {len(tokens)} tokens")
    return masks


class EngineProtocol(Protocol):
    """A replica's engine as one of its ranks sees it. On ranks that do not generate it is empty.

    Every rank of a replica must make the same calls in the same order. What an
    engine can do is known before it is built: see config/engine_traits.py.
    """

    sleep_hint: ClassVar[str]
    """What to do where `sleep` frees no memory, for messages."""
    gap_cause: ClassVar[str]
    """Why its logprobs may differ from the trainer's at the same precision, for messages."""
    dtype: torch.dtype
    """Dtype of the weights."""
    version: int
    """Policy version of the weights, see `weights_changed`."""
    lend_memory: Callable[[], None]
    """Called when nothing is generated until the next push. The weight stream sets it."""

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
        """Return what was drawn so far for unfinished requests, is_truncated False."""

    def tokens_so_far(self, keys: Collection[str]) -> dict[str, Sequence[int]]:
        """Return the ids that were drawn so far for those of these requests that are unfinished."""

    def abort_all(self) -> list[Completion]:
        """End all requests, and return what `unfinished` would."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0.

        Args:
            sequences: token ids; TokenIds where they have images.
        """

    def weights_changed(self, version: int) -> None:
        """Set the version of the weights. New requests share nothing that older weights computed.
        Unfinished ones keep their KV cache, or compute it again, as rollout.schedule says."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors by checkpoint name into the live model. The weight stream watches
        it once, to learn which slice goes where."""

    def reload_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors by checkpoint name, and process them as after the first loading."""

    @property
    def can_sleep(self) -> bool:
        """Whether it can free memory for a while; see handover.py."""

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the KV cache, and the weights or a part of them, until `wake`. No request may be
        unfinished, and none may be added before `wake`.

        Args:
            keeps_weights: `wake` must restore the weights; otherwise they will be written again.
        """

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Allocate the memory of the weights, and then of the KV cache, which is empty. Weights
        have the same addresses as before."""

    def held_bytes(self) -> int:
        """Return the bytes in use: on CUDA all of the device, also by other processes; on the CPU
        those of weights and KV cache."""

    def close(self) -> None:
        """Free the engine. Every rank calls it, before the process group is destroyed."""


@runtime_checkable
class AdapterEngine(Protocol):
    """What an engine that computes with the policy's adapters itself has in addition."""

    def adapter(self, names: Iterable[str]) -> nn.Module:
        """Return the live memory of the adapters that matrices of these names (as
        lora.pair_names) go into, as parameters; 0 where nothing is written."""

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole A [r, in] and scale * B [out, r] by name into it."""
