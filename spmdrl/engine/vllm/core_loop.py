"""vLLM's engine core, driven without vLLM's front end.

vLLM's LLMEngine validates and copies the settings of each request, and makes Python objects for
each token. With small models that takes longer than the core's own work. Here vLLM validates only
the first request of a prompt, and those for other samples are copies of it. Ids and
log-probabilities are read from the output of a step. The core's own step is called, so asynchronous
scheduling on GPUs still overlaps with the model.

Serves the versions that internals.py serves. Each line has the name here, vLLM's own name, and when
it can be removed.

CoreLoop.validate   LLMEngine.input_processor, get_supported_tasks   with CoreLoop
CoreLoop.add        InprocClient.add_request, EngineCoreRequest      with CoreLoop
CoreLoop.step       InprocClient.get_output, EngineCoreOutput        with CoreLoop
CoreLoop.abort      InprocClient.abort_requests                      with CoreLoop
CoreLoop            all of these              once LLMEngine.step takes no time per token in Python
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spmdrl.engine.vllm.internals import draft_metrics_of, sampling_mask_of

_IS_TRUNCATED = {"stop": False, "length": True}
"""{vLLM's reason for the end of a request: whether it reached its length limit}"""


@dataclass(eq=False, slots=True)
class Drawn:
    """What was drawn for a request so far."""

    key: str
    name: str
    """vLLM's own name for the request."""
    prompt_length: int
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

    def take(self, output: Any) -> None:
        """Append what a step has drawn for the request, an EngineCoreOutput."""
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs.append(output.new_prompt_logprobs_tensors.logprobs[:, 0].cpu())
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        mask = sampling_mask_of(output)
        if mask is not None:
            self.masks.append(mask)


class CoreLoop:
    """The unfinished requests of an engine, and the steps that draw for them.

    Args:
        llm: vLLM's engine.
    """

    def __init__(self, llm: Any):
        self._llm = llm
        self._client = llm.engine_core
        self._unfinished: dict[str, Drawn] = {}  # by vLLM's name
        self._num_added = 0

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
        """Queue a sample of a request that `validate` has returned, with a seed of its own."""
        request = copy(validated)
        # A key may come again while an asynchronous step still draws for the aborted request.
        request.request_id = f"{key}-{self._num_added}"
        request.external_req_id = key
        request.sampling_params = copy(validated.sampling_params)
        request.sampling_params.seed = seed
        drawn = Drawn(key, request.request_id, len(request.prompt_token_ids))
        self._num_added += 1
        self._client.add_request(request)
        self._unfinished[drawn.name] = drawn
        return drawn

    def step(self) -> list[Drawn]:
        """Run one scheduling step and return what finished in it.

        Raises: RuntimeError when vLLM fails to serve a request.
        """
        finished = []
        for output in self._client.get_output().outputs:
            drawn = self._unfinished.get(output.request_id)
            if drawn is None:  # it was aborted while an asynchronous step drew for it
                continue
            drawn.take(output)
            if output.finish_reason is None:
                continue
            reason = str(output.finish_reason)
            if reason not in _IS_TRUNCATED:
                raise RuntimeError(
                    f"request {drawn.key}: vLLM ended it after {len(drawn.tokens)} tokens with "
                    f"{reason!r}; its log says why (VLLM_LOGGING_LEVEL=INFO)"
                )
            drawn.is_truncated = _IS_TRUNCATED[reason]
            drawn.drafts = draft_metrics_of(output)
            finished.append(self._unfinished.pop(drawn.name))
        return finished

    def abort(self, requests: Iterable[Drawn]) -> None:
        """End requests that are not finished."""
        names = [self._unfinished.pop(drawn.name).name for drawn in requests]
        self._client.abort_requests(names)
