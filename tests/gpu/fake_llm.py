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


class FakeLlm:
    """An engine with `max_tokens` steps per request.

    Args:
        model: that it serves.
        can_sleep: enable_sleep_mode.
        has_routes: it returns the experts of each token that it computed.
    """

    def __init__(self, model: nn.Module, *, can_sleep: bool = True, has_routes: bool = False):
        self.calls: list[str] = []
        self.leaks = 0
        """Bytes that stay in use at each wake."""
        self.frees = True
        """Whether a sleep frees memory."""
        self.loses_routes = False
        self.taken = WEIGHTS + CACHE + OTHERS
        self._model = model
        self._has_routes = has_routes
        self._kept: dict[str, Tensor] = {}
        self._awake = {"weights", "kv_cache"}
        self.output_processor = SimpleNamespace(request_states={})
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

    # ---------------------------------------------------------------- requests

    @property
    def _states(self) -> dict[str, Any]:
        return self.output_processor.request_states

    def add_request(self, key: str, prompt: Any, params: Any, *, lora_request: Any = None) -> str:
        """Queue a request; return the engine's own name for it."""
        ids = prompt["prompt_token_ids"]
        self._states[f"0-{key}"] = SimpleNamespace(
            external_req_id=key,
            prompt_len=len(ids),
            prompt=ids,
            params=params,
            salt=prompt["cache_salt"],
            detokenizer=SimpleNamespace(output_token_ids=[]),
            logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[])),
            routed_experts_chunks=[],
            sampling_mask_chunks=[],
        )
        return f"0-{key}"

    def abort_request(self, keys: list[str]) -> None:
        """Forget requests."""
        self.calls.append(f"abort {keys}")
        for name in [n for n, state in self._states.items() if state.external_req_id in keys]:
            del self._states[name]

    def has_unfinished_requests(self) -> bool:
        """Return whether any is left."""
        return bool(self._states)

    def step(self) -> list[Any]:
        """Draw a token for each request, and return what finished."""
        assert self._awake == {"weights", "kv_cache"}, f"a step while only {self._awake} is mapped"
        outputs = []
        for name, state in [*self._states.items()]:
            self._draw(state)
            if len(state.detokenizer.output_token_ids) == state.params.max_tokens:
                outputs.append(self._output(state))
                del self._states[name]
        return outputs

    def _draw(self, state: Any) -> None:
        tokens = state.detokenizer.output_token_ids
        computed = len(state.prompt) + len(tokens)
        first = computed - 1 if tokens else 0
        if self._has_routes and not self.loses_routes:
            rows = [route(position) for position in range(first, computed)]
            state.routed_experts_chunks.append(np.stack(rows))
        token = drawn(state.prompt, len(tokens))
        tokens.append(token)
        state.logprobs_processor.logprobs.logprobs.append(-0.25 * len(tokens))
        mask = [sorted({token, 1, 2})]
        state.sampling_mask_chunks.append(SimpleNamespace(to_nested_list=lambda: mask))

    def _output(self, state: Any) -> Any:
        chunks = state.routed_experts_chunks
        masks = [ids for chunk in state.sampling_mask_chunks for ids in chunk.to_nested_list()]
        sample = SimpleNamespace(
            token_ids=state.detokenizer.output_token_ids,
            logprobs=state.logprobs_processor.logprobs,
            finish_reason="length",
            routed_experts=np.concatenate(chunks) if chunks else None,
            sampling_mask=SimpleNamespace(token_ids=masks),
        )
        return SimpleNamespace(
            request_id=state.external_req_id,
            finished=True,
            prompt_token_ids=state.prompt,
            prompt_logprobs=_prompt_logprobs(state.prompt),
            outputs=[sample],
        )

    # ---------------------------------------------------------------- memory

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Forget prefixes."""
        again = " and runs again" if reset_running_requests else ""
        self.calls.append(f"reset_prefix_cache{again}")

    def sleep(self, level: int) -> None:
        """Unmap weights and cache."""
        assert not self._states, "vLLM aborts requests when it sleeps"
        self.calls.append(f"sleep {level}")
        self._awake = set()
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
        assert tag not in self._awake, f"{tag} is mapped already"
        self._awake.add(tag)
        if self.frees:
            self.taken += {"weights": WEIGHTS, "kv_cache": CACHE}[tag]
        self.taken += self.leaks
        if tag == "weights":
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    if name in self._kept:
                        parameter.copy_(self._kept[name])
            self._kept = {}


def _prompt_logprobs(prompt: Sequence[int]) -> list[Any]:
    values = [{token: SimpleNamespace(logprob=-0.5 * token)} for token in prompt]
    return [None, *values[1:]]
