"""Settings of sampling, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from spmdrl.config.options import Options
from spmdrl.config.ranges import Fraction, Share, Tokens, above, within


@dataclass(frozen=True)
class Penalties:
    """What is done to a token's logits, before temperature, because of what it is and what came
    before it; as vLLM does it: bias, repetition, frequency and presence, in this order."""

    repetition: float = 1.0
    """Positive logits of ids that came before, in prompt or response, are divided by it, others
    multiplied."""
    presence: float = 0.0
    """Taken off the logits of ids that came in the response."""
    frequency: float = 0.0
    """Taken off as often as they came."""
    bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)."""

    @property
    def is_on(self) -> bool:
        """Whether anything is done."""
        return self != NO_PENALTIES

    @property
    def counts_response(self) -> bool:
        """Whether it matters what came in the response, apart from the prompt."""
        return self.presence != 0 or self.frequency != 0


NO_PENALTIES = Penalties()


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn in training."""

    temperature: Annotated[
        float,
        above(0, 100, why="greedy samples of one prompt are all the same and carry no signal"),
    ] = 1.0
    """Softmax temperature. The trainer scores at the same temperature."""
    max_response_tokens: Tokens = 512
    """Longest response in tokens; longer ones are cut and marked truncated. With an environment: of
    a whole episode behind its opening, all turns and what the environment says in them."""
    stop_token_ids: tuple[Annotated[int, within(0, 2**31 - 1)], ...] = ()
    """Token ids that end a response besides the tokenizer's eos and the model's own: those of
    its generation_config.json, or of its config.json where there is none."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, at the token that completes one: it is the last that was sampled
    and trained on, and reward functions see it. In training and evaluation."""
    top_p: Share = 1.0
    """Draw among the likeliest tokens that have this probability together; 1: among all. With
    top_p, top_k or min_p the ids that each token was drawn among go to the trainer with it, which
    scores it among these (docs/rollouts.md)."""
    top_k: Annotated[int, within(0, 2**31 - 1)] = 0
    """Draw among so many likeliest tokens; 0: among all."""
    min_p: Fraction = 0.0
    """Draw among tokens that are at least so many times as likely as the likeliest; 0: all."""

    repetition_penalty: Annotated[float, above(0, 10)] = 1.0
    """Positive logits of tokens that came before, in prompt or response, are divided by it, others
    multiplied; 1: nothing. Penalties and logit_bias hold in training and evaluation, for the
    engine and for trainers alike (docs/sampling.md)."""
    presence_penalty: Annotated[float, within(-10, 10)] = 0.0
    """Taken off the logits of tokens that came in the response."""
    frequency_penalty: Annotated[float, within(-10, 10)] = 0.0
    """Taken off the logits of tokens for each time that they came in the response."""
    logit_bias: Options = field(default_factory=dict)
    """What is added to the logits of tokens, by their ids: {"271": -2.5}; within [-100, 100]."""

    column: str = ""
    """Column of the data in which a row sets max_tokens, top_p, top_k or min_p for itself, as in
    {"prompt": ..., "sampling": {"top_p": 0.9}}; empty: none."""

    @property
    def penalties(self) -> Penalties:
        """What is done to logits before temperature."""
        return Penalties(
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            bias=tuple((int(token), float(added)) for token, added in self.logit_bias.items()),
        )

    @property
    def truncates(self) -> bool:
        """Whether tokens may be drawn among a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(self.column)
