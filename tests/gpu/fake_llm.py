"""vLLM's engine as the adapter sees it on a GPU: it draws by a formula and records what is asked.

Its sleep does to tensors what vLLM's does: level 1 keeps the weights and loses nothing, level 2
loses the weights and what modules hold without registering it, and keeps buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists

LAYERS = 5  # of the model; some have no experts
EXPERTS = 8
CHOICES = 2
WEIGHTS = 400  # bytes of the fake GPU
CACHE = 300
OTHERS = 100  # the trainer's


def drawn(prompt: Sequence[int], index: int) -> int:
    """Return the token that a request draws at this index."""
    return (sum(prompt) + 3 * index) % 90 + 5


def route(position: int) -> np.ndarray:
    """Return the experts of the token at this position, [LAYERS, CHOICES]."""
    layers = np.arange(LAYERS)[:, None]
    choices = np.arange(CHOICES)[None]
    return ((position * 3 + layers * 2 + choices) % EXPERTS).astype(np.uint8)


class FakeModel(nn.Module):
    """A model whose loader copies tensors of the same names, with tensors that are no buffers."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        with torch.inference_mode():  # as what a first forward pass of vLLM makes
            self.range = torch.arange(6.0)
        self.tables = [torch.ones(3)]
        self.kv_cache = torch.ones(2)

    def load_weights(self, weights: Any) -> None:
        """Copy whole tensors by checkpoint name."""
        own = dict(self.inner.named_parameters())
        for name, tensor in weights:
            if name in own:
                own[name].data.copy_(tensor)


def validated(
    name: str, prompt: Any, params: Any, *, supported_tasks: Any, lora_request: Any
) -> EngineCoreRequest:
    """Return a request of the core, as vLLM's input processor does."""
    assert "generate" in supported_tasks
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt["prompt_token_ids"],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=lora_request,
        cache_salt=prompt["cache_salt"],
        data_parallel_rank=None,
    )


class FakeCore:
    """Its engine core, which runs `max_tokens` steps per request.

    Args:
        has_routes: it returns the experts of each token that it computed.
    """

    def __init__(self, *, has_routes: bool):
        self.calls: list[str] = []
        self.loses_routes = False
        self.awake = {"weights", "kv_cache"}
        self.requests: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        """{name: (request, tokens drawn)}"""
        self._has_routes = has_routes
        scheduler = SimpleNamespace(aux_output_connector=AuxOutputSchedulerConnector())
        self.engine_core = SimpleNamespace(scheduler=scheduler)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self.requests[request.request_id] = (request, [])

    def abort_requests(self, names: list[str]) -> None:
        """Forget requests."""
        self.calls.append(f"abort {names}")
        for name in names:
            del self.requests[name]

    def get_output(self) -> EngineCoreOutputs:
        """Draw a token for each request."""
        assert self.awake == {"weights", "kv_cache"}, f"a step while only {self.awake} is mapped"
        outputs = [self._draw(*found) for found in self.requests.values()]
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return EngineCoreOutputs(outputs=outputs)

    def _draw(self, request: EngineCoreRequest, tokens: list[int]) -> EngineCoreOutput:
        prompt, params = request.prompt_token_ids, request.sampling_params
        computed = len(prompt) + len(tokens)
        rows = range(computed - 1 if tokens else 0, computed)
        is_first = not tokens
        tokens.append(drawn(prompt, len(tokens)))
        values = np.array([[-0.25 * len(tokens)]], np.float32)
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens[-1:],
            new_logprobs=LogprobsLists(np.array([tokens[-1:]]), values, np.array([1])),
            new_sampling_mask=SamplingMaskLists(np.array(sorted({tokens[-1], 1, 2}))),
        )
        if is_first and params.prompt_logprobs is not None:
            scores = -0.5 * torch.tensor(prompt[1:])[:, None]
            output.new_prompt_logprobs_tensors = LogprobsTensors(scores, scores, scores)
        if self._has_routes and not self.loses_routes:
            output.routed_experts = np.stack([route(position) for position in rows])
        if len(tokens) == params.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output


class FakeLlm:
    """An engine.

    Args:
        model: that it serves.
        can_sleep: enable_sleep_mode.
        has_routes: it returns the experts of each token that it computed.
    """

    def __init__(self, model: nn.Module, *, can_sleep: bool = True, has_routes: bool = False):
        self.engine_core = FakeCore(has_routes=has_routes)
        self.input_processor = SimpleNamespace(process_inputs=validated)
        self.calls = self.engine_core.calls
        self.leaks = 0
        """Bytes that stay in use at each wake."""
        self.frees = True
        """Whether a sleep frees memory."""
        self.taken = WEIGHTS + CACHE + OTHERS
        self._model = model
        self._kept: dict[str, Tensor] = {}
        config = SimpleNamespace(
            enable_sleep_mode=can_sleep,
            get_num_experts=lambda: EXPERTS,
            get_num_experts_per_tok=lambda: CHOICES,
            get_vocab_size=lambda: 96,
        )
        self.vllm_config = SimpleNamespace(model_config=config)
        runner = SimpleNamespace(
            get_model=lambda: model, kv_caches=[], vllm_config=self.vllm_config
        )
        worker = SimpleNamespace(model_runner=runner, use_v2_model_runner=True)
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what it can do."""
        return ("generate",)

    # ---------------------------------------------------------------- memory

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget prefixes."""
        again = " and runs again" if reset_running_requests else ""
        self.calls.append(f"reset_prefix_cache{again}")

    def sleep(self, level: int) -> None:
        """Unmap weights and cache."""
        assert not self.engine_core.requests, "vLLM aborts requests when it sleeps"
        self.calls.append(f"sleep {level}")
        self.engine_core.awake = set()
        if level == 1:
            self._kept = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        else:
            with torch.inference_mode():
                for tensor in (self._model.range, *self._model.tables):
                    tensor.fill_(torch.nan)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(torch.nan)
        if self.frees:
            self.taken -= WEIGHTS + CACHE

    def wake_up(self, tags: list[str]) -> None:
        """Map one of them."""
        (tag,) = tags
        self.calls.append(f"wake_up {tag}")
        assert tag not in self.engine_core.awake, f"{tag} is mapped already"
        self.engine_core.awake.add(tag)
        if self.frees:
            self.taken += {"weights": WEIGHTS, "kv_cache": CACHE}[tag]
        self.taken += self.leaks
        if tag == "weights":
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    if name in self._kept:
                        parameter.copy_(self._kept[name])
            self._kept = {}
