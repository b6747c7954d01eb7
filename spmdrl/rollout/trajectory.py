"""The tokens of a sequence: a prompt, and what followed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spmdrl.engine.protocol import Completion
from spmdrl.model_inputs import MultimodalItems, TokenIds
from spmdrl.types import Prompt, Tokens, token_fields_from


def drawn_tokens(completion: Completion) -> Tokens:
    """Return the tokens of a completion, without the columns that cover its prompt."""
    columns = completion.extra_columns.items()
    return Tokens(
        tokens=completion.tokens,
        response_mask=torch.ones_like(completion.tokens, dtype=torch.bool),
        rollout_logprobs=completion.logprobs,
        policy_versions=completion.versions,
        extra_columns={key: own for key, own in columns if not own.covers_prompt},
    )


@dataclass(frozen=True, kw_only=True)
class Trajectory(Tokens):
    """A prompt and all tokens after it: the sampled ones, and the environment's between turns.

    An extra column that covers the prompt may end before the last tokens.
    """

    num_prompt_tokens: int
    """Tokens of the prompt."""
    is_truncated: bool = False
    """Whether the last turn was cut at the length limit."""
    states: tuple[int, ...] = ()
    """Number of the environment's state before each finished turn of the policy; -1 for none."""
    earned: tuple[float, ...] = ()
    """Reward of each finished turn from the environment, task units."""

    @classmethod
    def from_prompt(cls, prompt: Sequence[int]) -> Trajectory:
        """Return a trajectory that has only a prompt."""
        return Trajectory(**Tokens.unsampled(prompt).token_fields(), num_prompt_tokens=len(prompt))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Trajectory:
        """Return the trajectory from the result of its `state_dict`."""
        return Trajectory(**token_fields_from(state))

    @property
    def num_turns(self) -> int:
        """Return the number of finished turns of the policy."""
        return len(self.states)

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return int(self.response_mask.sum())

    @property
    def response(self) -> list[int]:
        """Return the ids that follow the prompt."""
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def token_ids(self) -> TokenIds:
        """Return all tokens in the form that an engine takes."""
        return TokenIds(self.tokens.tolist(), MultimodalItems.of(self.extra_columns))

    @property
    def prompt(self) -> TokenIds:
        """Return the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    def update_prompt(self, prompt: Prompt, *, text: str) -> Prompt:
        """Return a copy of a row's prompt with this trajectory's prompt tokens and this text.

        The two differ if an environment opened the episode.
        """
        return replace(prompt, tokens=self.prompt, text=text)

    @property
    def num_following(self) -> int:
        """Return the number of tokens after the prompt."""
        return len(self.tokens) - self.num_prompt_tokens

    def append_completion(self, completion: Completion) -> Trajectory:
        """Return a copy with a completion of the engine appended."""
        followed = self._append(drawn_tokens(completion))
        extra = dict(followed.extra_columns)
        for key, column in completion.extra_columns.items():
            known = self.extra_columns.get(key)
            if not column.covers_prompt:
                continue
            if known is not None:
                # Each turn reports the earlier tokens again. Keep the first report of a token: it
                # was drawn with that one.
                column = known.cat([known, column[torch.arange(len(known), len(column))]])
            extra[key] = column
        return replace(followed, is_truncated=completion.is_truncated, extra_columns=extra)

    def append_answer(self, ids: Sequence[int]) -> Trajectory:
        """Return a copy with an environment's answer, and its images, appended."""
        return self._append(Tokens.unsampled(ids))

    def end_turn(self, state: int) -> Trajectory:
        """Return a copy in which the last turn is finished, with reward 0.

        Args:
            state: number of the environment's state before the turn.
        """
        return replace(self, states=(*self.states, state), earned=(*self.earned, 0.0))

    def _append(self, tokens: Tokens) -> Trajectory:
        fields = Tokens.concat([self, tokens]).token_fields()
        # A column that covers the prompt ends at the last token that the engine has read.
        partial = {key: own for key, own in self.extra_columns.items() if own.covers_prompt}
        return replace(self, **fields | {"extra_columns": fields["extra_columns"] | partial})
