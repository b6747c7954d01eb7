"""What vLLM is asked for a request, and what is read of a request before it is finished.

Serves the versions that internals.py serves. Per line: the name here, vLLM's own, and when it can
go.

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
    """Return vLLM's parameters of a sample to draw.

    Args:
        returns_masks: the engine has return_sampling_mask. Such an engine takes neither greedy
            requests nor requests without top_k. top_k 1 stands for greedy, and a top_k above any
            vocabulary for none.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

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
        ignore_eos=True,  # otherwise the model's own id ends a response that did not ask for it
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
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
        detokenize=False,
    )


@dataclass(frozen=True)
class Unfinished:
    """A request that is not finished."""

    key: str
    prompt_length: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    routes: Sequence[Any]
    """Arrays [n, layers, K] of consecutive tokens, where the engine returns them."""
    masks: Sequence[Any]
    """Chunks of sampling masks with `to_nested_list`, where the engine returns them."""


def unfinished(llm: Any) -> Iterator[Unfinished]:
    """Yield the unfinished requests of an engine."""
    for state in llm.output_processor.request_states.values():
        yield Unfinished(
            state.external_req_id,
            state.prompt_len,
            state.detokenizer.output_token_ids,
            state.logprobs_processor.logprobs.logprobs,
            getattr(state, "routed_experts_chunks", ()),
            getattr(state, "sampling_mask_chunks", ()),
        )


def vocab_size(runner: Any) -> int:
    """Return the size of the last dim of logits."""
    return runner.vllm_config.model_config.get_vocab_size()


def watch_sampler(runner: Any, take: Callable[[list[str], Tensor], None]) -> None:
    """Have the sampler of the V1 runner call `take(request ids, logprobs [N, V])` with the
    distribution that it draws from, in each step with a request that is not greedy."""
    stage = runner.sampler.topk_topp_sampler
    draw = stage.forward

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        drawn, logprobs = draw(*args, **kwargs)
        take(runner.input_batch.req_ids, logprobs)
        return drawn, logprobs

    stage.forward = watched
