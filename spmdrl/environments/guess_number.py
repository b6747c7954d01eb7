"""A game of several turns: guess a number."""

from __future__ import annotations

import random
import re
from decimal import Decimal

from spmdrl.environments.protocol import Message, Response, Turn, check_at_least, opening_messages
from spmdrl.errors import Refusal

_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+")
"""A sign after a digit or a name is none: the range 10-20."""


class GuessNumber:
    """The policy guesses a number and learns whether the secret is higher or lower.

    The last whole number of a response is the guess. The reward is 1 if the first guess is right,
    `turn_cost` less for each later turn, and 0 if no guess is right.

    `task:guess_number` makes rows for it. Any other row with a prompt can be used: its `answer` is
    the secret. Without an answer the prompt seeds the secret, so that all samples of a group have
    the same one.

    Args:
        low, high: smallest and largest secret of rows without an answer.
        max_turns: guesses per episode.
        turn_cost: reward that each turn after the first costs; at most 1 / max_turns.
    """

    def __init__(
        self, *, low: int = 1, high: int = 100, max_turns: int = 8, turn_cost: float = 0.05
    ):
        if low >= high:
            raise Refusal(f"low: must be below high, got {low} and {high}")
        check_at_least(1, max_turns=max_turns)
        if not 0 <= turn_cost * max_turns <= 1:
            raise Refusal(
                f"turn_cost: must be from 0 to 1 / max_turns = {1 / max_turns:g}, so "
                f"that a late success is worth more than none, got {turn_cost}"
            )
        self.low = low
        self.high = high
        self.max_turns = max_turns
        self.turn_cost = turn_cost
        self.secret = low
        self.turns = 0
        self.bounds = (low, high)  # of the secret, from the answers so far

    def reset(self, row: dict) -> list[Message]:
        """Choose the secret and open with the row's prompt."""
        messages = opening_messages(row)
        if row.get("answer") not in (None, ""):
            self.secret = int(row["answer"])
        else:
            draw = random.Random(str(messages[-1]["content"]))
            self.secret = draw.randint(self.low, self.high)
        return messages

    def step(self, response: Response) -> Turn:
        """Compare the guess with the secret; info has `solved` and, at the end, `turns`."""
        self.turns += 1
        numbers = _NUMBER.findall(response.text)
        # Exact, while int() refuses thousands of digits.
        guess = Decimal(numbers[-1]) if numbers else None
        if guess == self.secret and not response.is_truncated:
            return self._end(reward=1.0 - self.turn_cost * (self.turns - 1), solved=1.0)
        if self.turns >= self.max_turns or response.is_truncated:
            return self._end(reward=0.0, solved=0.0)
        low, high = self.bounds
        if guess is None:
            answer = "no number"
        elif guess < self.secret:
            answer = "higher"
            low = low if guess < low else int(guess) + 1
        else:
            answer = "lower"
            high = high if guess > high else int(guess) - 1
        self.bounds = (low, high)
        return Turn(messages=[{"role": "user", "content": answer}])

    def state(self) -> str:
        """Return what the player can know: the turns played, and the numbers that are left."""
        return f"{self.turns} {self.bounds}"

    def _end(self, *, reward: float, solved: float) -> Turn:
        return Turn(is_done=True, reward=reward, info={"solved": solved, "turns": self.turns})
