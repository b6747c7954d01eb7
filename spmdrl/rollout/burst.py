"""Generate one step's share of samples on one engine replica, and have them rewarded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from spmdrl.engine.protocol import Completion, EngineProtocol, Request
from spmdrl.rewards.pool import RewardPool, RewardResult
from spmdrl.types import Prompt

GREEDY = -1
"""Position in its group of a prompt's greedy response: a baseline, never trained on."""


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
    has_greedy: bool = False
    """Draw one more response per prompt at temperature 0."""
    must_score: bool = True
    """The first reward that fails ends the burst."""


@dataclass(frozen=True)
class Sample:
    """One finished response with its reward."""

    slot: int
    """Position of the prompt in the step's batch."""
    sample: int
    """Position within the prompt's group, or GREEDY."""
    prompt: Prompt
    completion: Completion
    text: str
    """Decoded response, special tokens left out."""
    reward: RewardResult


@dataclass
class _Open:
    """Bookkeeping of one burst on a replica's leader."""

    draw: Draw
    where: dict[str, tuple[int, int, Prompt]] = field(default_factory=dict)
    """By key: slot, sample and prompt."""
    done: dict[str, tuple[Completion, str]] = field(default_factory=dict)
    rewards: dict[str, RewardResult] = field(default_factory=dict)

    def sample(self, key: str) -> Sample:
        """Return a sample that is finished and rewarded."""
        return Sample(*self.where[key], *self.done[key], self.rewards[key])


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
    Raises: RuntimeError naming the sample as soon as a reward fails, if draw.must_score. What
        the engine has not finished is left in it: the run ends.
    """
    state = _Open(draw)
    for slot, prompt in prompts:
        for sample in range(GREEDY if draw.has_greedy else 0, draw.samples):
            request = _request(draw, slot=slot, sample=sample, prompt=prompt)
            state.where[request.key] = (slot, sample, prompt)
            engine.add(request)
    while engine.is_busy:
        finished = engine.step()
        if pool is not None:
            _submit(finished, tokenizer=tokenizer, pool=pool, state=state)
            _accept(pool.poll(), state=state)
    if pool is None:
        return []
    _accept(pool.results(), state=state)
    return sorted(map(state.sample, state.where), key=lambda s: (s.slot, s.sample))


def _request(draw: Draw, *, slot: int, sample: int, prompt: Prompt) -> Request:
    is_drawn = draw.is_seeded and sample != GREEDY
    name = "greedy" if sample == GREEDY else sample
    return Request(
        key=f"{draw.purpose}-{draw.step}-{slot}-{name}", prompt=prompt.tokens,
        max_tokens=draw.max_tokens, temperature=0.0 if sample == GREEDY else draw.temperature,
        stop_token_ids=draw.stop_token_ids,
        seed=sample_seed(draw, slot, sample) if is_drawn else None,
    )


def _submit(
    finished: list[Completion], *, tokenizer: PreTrainedTokenizerBase, pool: RewardPool,
    state: _Open,
) -> None:
    if not finished:
        return
    texts = tokenizer.batch_decode([c.tokens for c in finished], skip_special_tokens=True)
    for completion, text in zip(finished, texts):
        state.done[completion.key] = (completion, text)
        pool.submit(completion.key, prompt=state.where[completion.key][2], response_text=text,
                    response_tokens=list(completion.tokens), truncated=completion.is_truncated)


def _accept(results: Iterable[RewardResult], *, state: _Open) -> None:
    for result in results:
        state.rewards[result.key] = result
        if result.failure and state.draw.must_score:
            raise RuntimeError(
                f"{place(state.draw)}: {failure_text(state.sample(result.key))}\nThis is the first "
                "reward that failed; more may follow. Mend the reward function, or set "
                "rewards.on_failure=drop to leave such samples out")


def place(draw: Draw) -> str:
    """Return where in the run a burst is, for messages."""
    is_eval = draw.purpose == "eval"
    return f"evaluation after {draw.step} steps" if is_eval else f"step {draw.step}"


def failure_text(sample: Sample) -> str:
    """Say which sample's reward failed and how."""
    which = "the greedy sample" if sample.sample == GREEDY else f"sample {sample.sample}"
    reward = sample.reward
    return (f"the reward of data row {sample.prompt.index}, {which} failed: {reward.failure} after "
            f"{reward.seconds:.1f} s: {reward.message}\n  response: {sample.text[:200]!r}")
