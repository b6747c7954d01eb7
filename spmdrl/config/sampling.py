"""Settings of sampling, and the penalties that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from spmdrl.config.options import Options
from spmdrl.config.ranges import Fraction, Share, Tokens, above, within


@dataclass(frozen=True)
class Penalties:
    """Changes of a token's logits, before temperature, by its id and by earlier tokens. As in vLLM
    the order is bias, repetition, frequency, presence."""

    repetition: float = 1.0
    """Positive logits of ids that are in prompt or response already are divided by it, negative
    ones multiplied."""
    presence: float = 0.0
    """Subtracted from the logits of ids that are in the response already."""
    frequency: float = 0.0
    """Subtracted once for each time that they are in the response."""
    bias: tuple[tuple[int, float], ...] = ()
    """(id, number added to its logit)."""

    @property
    def is_on(self) -> bool:
        """Return whether any logit changes."""
        return self != NO_PENALTIES

    @property
    def counts_response(self) -> bool:
        """Return whether the response counts apart from the prompt."""
        return self.presence != 0 or self.frequency != 0


NO_PENALTIES = Penalties()


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled in training."""

    temperature: Annotated[
        float,
        above(0, 100, why="greedy samples of one prompt are all the same and carry no signal"),
    ] = 1.0
    """Softmax temperature. The trainer scores at the same temperature."""
    max_response_tokens: Tokens = 512
    """Longest response in tokens; longer ones are cut and marked truncated. With an environment it
    limits a whole episode after its opening: all turns and all answers of the environment."""
    stop_token_ids: tuple[Annotated[int, within(0, 2**31 - 1)], ...] = ()
    """Further token ids that end a response, with the tokenizer's eos and the ids of the model's
    generation_config.json, or of its config.json where there is none."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in training and evaluation. The token that completes one is the
    last that is sampled and trained on, and reward functions see it."""
    top_p: Share = 1.0
    """Draw among the likeliest tokens whose probabilities sum to this; 1: among all. With top_p,
    top_k or min_p the trainer gets for each token the ids that it was drawn among, and scores it
    among these (docs/rollouts.md)."""
    top_k: Annotated[int, within(0, 2**31 - 1)] = 0
    """Draw among this many likeliest tokens; 0: among all."""
    min_p: Fraction = 0.0
    """Draw among tokens that are at least this many times as likely as the likeliest; 0: all."""

    repetition_penalty: Annotated[float, above(0, 10)] = 1.0
    """Positive logits of tokens that are in prompt or response already are divided by it, negative
    ones multiplied; 1: no change. Penalties and logit_bias hold in training and evaluation, for
    engines and trainers (docs/sampling.md)."""
    presence_penalty: Annotated[float, within(-10, 10)] = 0.0
    """Subtracted from the logits of tokens that are in the response already."""
    frequency_penalty: Annotated[float, within(-10, 10)] = 0.0
    """Subtracted from the logits of a token once for each time that it is in the response."""
    logit_bias: Options = field(default_factory=dict)
    """Numbers added to the logits of tokens, by id: {"271": -2.5}; within [-100, 100]."""

    column: str = ""
    """Column of the data in which a row sets its own max_tokens, top_p, top_k or min_p, e.g.
    `sampling` in {"prompt": ..., "sampling": {"top_p": 0.9}}; empty: none."""

    @property
    def penalties(self) -> Penalties:
        """Return the changes of logits before temperature."""
        return Penalties(
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            bias=tuple((int(token), float(added)) for token, added in self.logit_bias.items()),
        )

    @property
    def truncates(self) -> bool:
        """Return whether tokens may be drawn among a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or bool(self.column)
