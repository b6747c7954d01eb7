"""Generate one step's share of samples on one engine replica, and have them rewarded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from spmdrl.engine.protocol import Completion, EngineProtocol, Request
from spmdrl.rewards.pool import RewardPool, RewardResult
from spmdrl.types import Prompt


@dataclass(frozen=True)
class Draw:
    """How one burst samples."""

    seed: int
    step: int
    purpose: str
    """`train` or `eval`: keeps their randomness apart."""
    samples: int
    """Responses per prompt."""
    max_tokens: int
    temperature: float
    is_seeded: bool
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One finished response with its reward."""

    slot: int
    """Position of the prompt in the step's batch."""
    sample: int
    """Position within the prompt's group."""
    prompt: Prompt
    completion: Completion
    text: str
    """Decoded response, special tokens left out."""
    reward: RewardResult


@dataclass
class _Open:
    """Bookkeeping of one burst on a replica's leader."""

    done: dict[str, tuple[Completion, str]] = field(default_factory=dict)
    rewards: dict[str, RewardResult] = field(default_factory=dict)


def sample_seed(draw: Draw, slot: int, sample: int) -> int:
    """Return the 63-bit seed of one sample: a function of the run's seed, the step, the
    prompt's slot and the sample's position, never of a rank."""
    name = f"{draw.seed}/{draw.purpose}/{draw.step}/{slot}/{sample}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def burst(
    engine: EngineProtocol, prompts: Sequence[tuple[int, Prompt]], *, draw: Draw,
    tokenizer: PreTrainedTokenizerBase, pool: RewardPool | None,
) -> list[Sample]:
    """Sample every prompt and reward the responses while the engine goes on.

    Every tensor-parallel rank of the replica calls it with the same prompts; only the leader
    has a pool, and only it gets samples back.

    Args:
        prompts: (slot, prompt) pairs of this replica.
        draw: sampling settings.
        pool: the leader's reward workers; None on followers.
    Returns: samples ordered by (slot, sample); empty on followers.
    """
    where: dict[str, tuple[int, int, Prompt]] = {}
    for slot, prompt in prompts:
        for sample in range(draw.samples):
            key = f"{draw.purpose}-{draw.step}-{slot}-{sample}"
            where[key] = (slot, sample, prompt)
            engine.add(Request(
                key=key, prompt=prompt.tokens, max_tokens=draw.max_tokens,
                temperature=draw.temperature, stop_token_ids=draw.stop_token_ids,
                seed=sample_seed(draw, slot, sample) if draw.is_seeded else None,
            ))
    state = _Open()
    while engine.is_busy:
        finished = engine.step()
        if pool is not None and finished:
            _submit(finished, where, tokenizer=tokenizer, pool=pool, state=state)
    if pool is None:
        return []
    state.rewards |= {result.key: result for result in pool.drain()}
    samples = [
        Sample(*where[key], *state.done[key], state.rewards[key]) for key in where
    ]
    return sorted(samples, key=lambda s: (s.slot, s.sample))


def _submit(
    finished: list[Completion], where: dict[str, tuple[int, int, Prompt]], *,
    tokenizer: PreTrainedTokenizerBase, pool: RewardPool, state: _Open,
) -> None:
    texts = tokenizer.batch_decode([c.tokens for c in finished], skip_special_tokens=True)
    for completion, text in zip(finished, texts):
        state.done[completion.key] = (completion, text)
        pool.submit(completion.key, prompt=where[completion.key][2], response_text=text,
                    response_tokens=list(completion.tokens), truncated=completion.is_truncated)
    state.rewards |= {result.key: result for result in pool.poll()}
