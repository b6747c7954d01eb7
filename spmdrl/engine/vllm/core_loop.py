"""vLLM's engine core, driven without vLLM's front end.

vLLM's LLMEngine validates and copies the settings of each request, and makes Python objects for
each token. With small models that takes longer than the core's own work. Here vLLM validates only
the first request of a prompt, and those for other samples are copies of it. Ids and
log-probabilities are read from the output of a step. The core's own step is called, so asynchronous
scheduling on GPUs still overlaps with the model.

With data-parallel attention a replica has several cores, its parts. Each has some of the replica's
requests, and in each step all of them compute, because the experts of a layer are divided among
them. After a step they tell each other what they drew. So every rank knows of all requests, and
the replica is one engine for all that is above.

Serves the versions that internals.py serves. Each line has the name here, vLLM's own name, and when
it can be removed.

CoreLoop.validate   LLMEngine.input_processor, get_supported_tasks   with CoreLoop
CoreLoop.add        InprocClient.add_request, EngineCoreRequest      with CoreLoop
CoreLoop.step       InprocClient.get_output, EngineCoreOutput        with CoreLoop
CoreLoop.abort      InprocClient.abort_requests                      with CoreLoop
CoreLoop.step       InprocClient.execute_dummy_batch                 with CoreLoop
CoreLoop            all of these              once LLMEngine.step takes no time per token in Python
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from spmdrl.engine.vllm.internals import draft_metrics_of, sampling_mask_of
from spmdrl.plain import record

_IS_TRUNCATED = {"stop": False, "length": True}
"""{vLLM's reason for the end of a request: whether it reached its length limit}"""


@record
@dataclass(slots=True)
class NewTokens:
    """What one step drew for a request."""

    name: str
    """vLLM's own name for the request."""
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: Tensor | None
    routes: Any
    mask: Any
    drafts: Any
    end: str | None
    """vLLM's reason, if the request ended."""

    @classmethod
    def of(cls, output: Any) -> NewTokens:
        """Return what an EngineCoreOutput has."""
        own = output.new_logprobs
        of_prompt = output.new_prompt_logprobs_tensors
        has_ended = output.finish_reason is not None
        return cls(
            output.request_id,
            output.new_token_ids,
            [] if own is None else own.logprobs[:, 0].tolist(),
            None if of_prompt is None else of_prompt.logprobs[:, 0].cpu(),
            output.routed_experts,
            sampling_mask_of(output),
            draft_metrics_of(output) if has_ended else None,
            str(output.finish_reason) if has_ended else None,
        )


@dataclass(eq=False, slots=True)
class Drawn:
    """What was drawn for a request so far."""

    key: str
    name: str
    """vLLM's own name for the request."""
    prompt_length: int
    part: int = 0
    """Index of the core that draws for it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: array = field(default_factory=lambda: array("f"))
    """Of each token."""
    prompt_logprobs: list[Tensor] = field(default_factory=list)
    """Parts [n] of the logprobs of the prompt after its first token, if the request wants them."""
    routes: list[Any] = field(default_factory=list)
    """Arrays [n, layers, K] of consecutive tokens, where the engine returns them."""
    masks: list[Any] = field(default_factory=list)
    """Chunks of sampling masks with `to_nested_list`, where the engine returns them."""
    drafts: Any = None
    """vLLM's RequestSpecDecodeMetrics of a finished request, with speculative decoding."""
    is_truncated: bool = False
    """It is finished because it reached its length limit."""

    def take(self, piece: NewTokens) -> None:
        """Append what a step has drawn for the request."""
        self.tokens += piece.tokens
        self.logprobs.extend(piece.logprobs)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs.append(piece.prompt_logprobs)
        if piece.routes is not None:
            self.routes.append(piece.routes)
        if piece.mask is not None:
            self.masks.append(piece.mask)


class CoreLoop:
    """The unfinished requests of an engine, and the steps that draw for them.

    With several parts, all ranks of a replica make the same calls in the same order.

    Args:
        llm: vLLM's engine.
        part, parts: index of this rank's core, and the number of cores of its replica.
        gather: returns what each part passes to it, in order; needed for several parts.
    """

    def __init__(
        self,
        llm: Any,
        *,
        part: int = 0,
        parts: int = 1,
        gather: Callable[[list[NewTokens]], list[list[NewTokens]]] | None = None,
    ):
        self._llm = llm
        self._client = llm.engine_core
        self._part = part
        self._gather = gather
        self._loads = [0] * parts  # unfinished requests of each
        self.read_routes: Callable[[str, range], Any] | None = None
        """Returns the routes of some tokens of a request of this part, where vLLM's outputs have
        none."""
        self._unfinished: dict[str, Drawn] = {}  # by vLLM's name
        self._num_added = 0

    @property
    def parts(self) -> int:
        """The number of cores that share the requests."""
        return len(self._loads)

    @property
    def unfinished(self) -> Collection[Drawn]:
        """The requests that are not finished, in the order in which they were added."""
        return self._unfinished.values()

    def validate(self, prompt: Any, params: Any, *, lora: Any) -> Any:
        """Return a request of the core.

        Args:
            prompt, params: in vLLM's form.
            lora: vLLM's request for an adapter, or None.
        Raises: ValueError of vLLM's where it cannot serve them.
        """
        return self._llm.input_processor.process_inputs(
            "",  # add() names it
            prompt,
            params,
            supported_tasks=self._llm.get_supported_tasks(),
            lora_request=lora,
        )

    def add(self, key: str, validated: Any, *, seed: int | None) -> Drawn:
        """Queue a sample of a request that `validate` has returned, with a seed of its own.

        The part with the fewest unfinished requests takes it.
        """
        # A key may come again while an asynchronous step still draws for the aborted request.
        name = f"{key}-{self._num_added}"
        self._num_added += 1
        part = self._loads.index(min(self._loads))
        drawn = Drawn(key, name, len(validated.prompt_token_ids), part)
        if part == self._part:
            request = copy(validated)
            request.request_id = name
            request.external_req_id = key
            request.sampling_params = copy(validated.sampling_params)
            request.sampling_params.seed = seed
            self._client.add_request(request)
        self._loads[part] += 1
        self._unfinished[name] = drawn
        return drawn

    def step(self) -> list[Drawn]:
        """Run one scheduling step and return what finished in it.

        Raises: RuntimeError when vLLM fails to serve a request.
        """
        finished = []
        for piece in self._pieces():
            drawn = self._unfinished.get(piece.name)
            if drawn is None:  # it was aborted while an asynchronous step drew for it
                continue
            drawn.take(piece)
            if piece.end is None:
                continue
            if piece.end not in _IS_TRUNCATED:
                raise RuntimeError(
                    f"request {drawn.key}: vLLM ended it after {len(drawn.tokens)} tokens with "
                    f"{piece.end!r}; its log says why (VLLM_LOGGING_LEVEL=INFO)"
                )
            drawn.is_truncated = _IS_TRUNCATED[piece.end]
            drawn.drafts = piece.drafts
            self._drop(drawn)
            finished.append(drawn)
        return finished

    def _pieces(self) -> list[NewTokens]:
        """Run a step of all parts; return what they drew."""
        if self._gather is None:
            return self._own_pieces()
        if not self._unfinished:
            return []
        if self._loads[self._part]:
            own = self._own_pieces()
        else:
            self._client.execute_dummy_batch()  # the others wait for its experts
            own = []
        return [piece for pieces in self._gather(own) for piece in pieces]

    def _own_pieces(self) -> list[NewTokens]:
        pieces = [NewTokens.of(output) for output in self._client.get_output().outputs]
        if self.read_routes is not None:
            pieces = [replace(piece, routes=self._routes(piece)) for piece in pieces]
        return pieces

    def _routes(self, piece: NewTokens) -> Any:
        """Return the routes of the tokens that a step has read: all but those read before, and but
        the last one drawn."""
        assert self.read_routes is not None
        drawn = self._unfinished[piece.name]
        begin = drawn.prompt_length + len(drawn.tokens) - 1 if drawn.tokens else 0
        end = drawn.prompt_length + len(drawn.tokens) + len(piece.tokens) - 1
        return self.read_routes(piece.name, range(begin, end))

    def abort(self, requests: Iterable[Drawn]) -> None:
        """End requests that are not finished."""
        names = []
        for drawn in requests:
            self._drop(drawn)
            if drawn.part == self._part:
                names.append(drawn.name)
        self._client.abort_requests(names)

    def _drop(self, drawn: Drawn) -> None:
        del self._unfinished[drawn.name]
        self._loads[drawn.part] -= 1
