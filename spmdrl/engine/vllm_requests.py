"""What vLLM is told of a request, and what is read of one that is under way.

Serves the versions that vllm_internals.py does. Per line: the name here, vLLM's own, and when it
can go.

sampling_params, scoring_params  SamplingParams             never: documented
unfinished, Unfinished  output_processor.request_states         once outputs can be asked for
vocab_size          ModelConfig.get_vocab_size              never
watch_sampler       Sampler.topk_topp_sampler (0.32, 0.33, CPU alone)
                                                            once the CPU too returns sampling masks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spmdrl.engine.protocol import Request

_ALL_TOKENS = 2**31 - 1


def sampling_params(request: Request, *, returns_masks: bool = False) -> Any:
    """Return what vLLM asks to know of a sample to draw.

    Args:
        returns_masks: by an engine with return_sampling_mask, which takes no greedy request and
            none without top_k: the likeliest token alone is as good, and a limit that is none.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    temperature = request.temperature
    limits = request.truncation
    penalties = request.penalties
    top_k = limits.top_k
    if returns_masks:
        top_k = 1 if temperature == 0 else top_k or _ALL_TOKENS
        temperature = temperature or 1.0
    return SamplingParams(
        temperature=temperature,
        top_p=limits.top_p,
        top_k=top_k,
        min_p=limits.min_p,
        repetition_penalty=penalties.repetition,
        presence_penalty=penalties.presence,
        frequency_penalty=penalties.frequency,
        logit_bias=dict(penalties.bias) or None,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # else the model's own ends a response that no stop id was asked for
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params(max_tokens: int = 1, *, returns_masks: bool = False) -> Any:
    """Return what vLLM asks to know of a sequence to score, and to continue by so many tokens.

    Args:
        returns_masks: see `sampling_params`.
    """
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if returns_masks else 0.0,
        top_k=1 if returns_masks else 0,
        prompt_logprobs=0,
        detokenize=False,
    )


@dataclass(frozen=True)
class Unfinished:
    """A request under way."""

    key: str
    prompt_length: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    routes: Sequence[Any]
    """Arrays [n, layers, K] of consecutive tokens, where the engine returns them."""
    kept: Sequence[Any]
    """From these `to_nested_list` makes sampling masks, where the engine returns them."""


def unfinished(llm: Any) -> Iterator[Unfinished]:
    """Yield the requests of an engine that go on."""
    for state in llm.output_processor.request_states.values():
        yield Unfinished(
            state.external_req_id,
            state.prompt_len,
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs.logprobs,
            getattr(state, "routed_experts_chunks", ()),
            getattr(state, "sampling_mask_chunks", ()),
        )


class RequestRecord:
    """What an engine says of its requests besides their tokens, for the trainer: experts' routes,
    or sampling masks."""

    def added(self, request: Request, request_id: str) -> None:
        """Take up a request, which vLLM calls so."""

    def finished(self, key: str, output: Any, tokens: Tensor) -> Any:
        """Return what is known of a request's tokens [n] int64, which finished in this step."""
        raise NotImplementedError

    def unfinished(self, request: Unfinished, tokens: Tensor) -> Any:
        """Return what is known so far of a request that has these tokens."""
        raise NotImplementedError

    def keep(self, request: Unfinished) -> None:
        """Hold on to what is known of a request whose KV cache may be dropped."""

    def drop(self, key: str) -> None:
        """Forget a request that was ended here."""


def vocab_size(runner: Any) -> int:
    """Return the ids that logits are of."""
    return runner.vllm_config.model_config.get_vocab_size()


def watch_sampler(runner: Any, take: Callable[[list[str], Tensor], None]) -> None:
    """Have the sampler of the V1 runner tell `take(request ids, logprobs [N, V])` what each step's
    tokens are drawn by; steps in which all requests are greedy are left out."""
    stage = runner.sampler.topk_topp_sampler
    draw = stage.forward

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        drawn, logprobs = draw(*args, **kwargs)
        take(runner.input_batch.req_ids, logprobs)
        return drawn, logprobs

    stage.forward = watched
