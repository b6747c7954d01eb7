"""Requests in vLLM's form, and a hook that sees the distributions that its sampler draws from.

Serves the versions that internals.py serves. Each line has the name here, vLLM's own name, and when
it can be removed.

sampling_params, scoring_params  SamplingParams             never: documented
vocab_size          ModelConfig.get_vocab_size              never
watch_sampler       Sampler.topk_topp_sampler (0.32, 0.33, CPU alone)
                                                            once the CPU too returns sampling masks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from spmdrl.engine.protocol import Request
from spmdrl.engine.vllm.core_loop import CoreLoop, Drawn
from spmdrl.engine.vllm.images import make_prompt
from spmdrl.engine.vllm.internals import watch_drafts
from spmdrl.model_inputs import multimodal_of

_ALL_TOKENS = 2**31 - 1


def sampling_params(request: Request, *, returns_masks: bool = False) -> Any:
    """Return vLLM's parameters of a sample to draw.

    Args:
        returns_masks: the engine has return_sampling_mask. Such an engine takes neither greedy
            requests nor requests without top_k. So greedy becomes top_k 1, and no top_k becomes one
            above any vocabulary.
    """
    from vllm import SamplingParams

    temperature = request.temperature
    top_k = request.truncation.top_k
    if returns_masks and temperature == 0:
        temperature = 1.0
        top_k = 1
    elif returns_masks:
        top_k = top_k or _ALL_TOKENS
    return SamplingParams(
        temperature=temperature,
        top_p=request.truncation.top_p,
        top_k=top_k,
        min_p=request.truncation.min_p,
        repetition_penalty=request.penalties.repetition,
        presence_penalty=request.penalties.presence,
        frequency_penalty=request.penalties.frequency,
        logit_bias=dict(request.penalties.bias) or None,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only stop_token_ids end a response: vLLM would add the model's end token
        logprobs=0,
    )


def scoring_params(max_tokens: int = 1, *, returns_masks: bool = False) -> Any:
    """Return vLLM's parameters of a sequence to score and then to continue by `max_tokens`.

    Args:
        returns_masks: see `sampling_params`.
    """
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if returns_masks else 0.0,
        top_k=1 if returns_masks else 0,
        prompt_logprobs=0,
    )


class GroupRequests:
    """Makes requests of vLLM's core. vLLM validates the request for the first sample of a prompt;
    those for the other samples are copies with seeds of their own.

    Args:
        loop: of the engine.
        model_config: vLLM's.
        returns_masks: see `sampling_params`.
    """

    def __init__(self, loop: CoreLoop, *, model_config: Any, returns_masks: bool):
        self._loop = loop
        self._model_config = model_config
        self._returns_masks = returns_masks
        self._last: tuple[Any, ...] = ()
        self._validated: Any = None

    def add(self, request: Request, *, salt: str, lora: Any) -> Drawn:
        """Queue a request.

        Args:
            salt: prompts of different salts share neither keys and values nor encoded images.
            lora: vLLM's request for an adapter, or None.
        """
        group = replace(request, key="", seed=None if request.seed is None else 0)
        images = multimodal_of(request.prompt)
        asked = (group, images.items if images else (), salt, lora)
        if asked != self._last:
            params = sampling_params(request, returns_masks=self._returns_masks)
            prompt = make_prompt(request.prompt, salt=salt, model_config=self._model_config)
            self._validated = self._loop.validate(prompt, params, lora=lora)
            self._last = asked
        return self._loop.add(request.key, self._validated, seed=request.seed)


def vocab_size(runner: Any) -> int:
    """Return the size of the last dim of logits."""
    return runner.vllm_config.model_config.get_vocab_size()


def watch_sampler(runner: Any, take: Callable[[list[str], Tensor], None]) -> None:
    """Have the sampler of the V1 runner call `take(request ids, logprobs [N, V])` with the
    distribution that it draws from, in each step with a request that is not greedy.

    With speculative decoding a request may have several rows, in the order of its tokens.
    """
    if runner.speculative_config is not None:
        watch_drafts(runner, take)
        return
    stage = runner.sampler.topk_topp_sampler
    draw = stage.forward

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        drawn, logprobs = draw(*args, **kwargs)
        take(runner.input_batch.req_ids, logprobs)
        return drawn, logprobs

    stage.forward = watched
