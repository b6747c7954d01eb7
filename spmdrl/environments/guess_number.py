"""A number guessing game of several turns."""

from __future__ import annotations

import random
import re

from spmdrl.environments.protocol import Message, Response, Turn, check_at_least, opening_messages
from spmdrl.errors import Refusal

_NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """The policy guesses a number and learns whether the secret is higher or lower.

    The last whole number of a response is the guess. The reward is 1 if the first guess is right,
    `turn_cost` less for each later turn, and 0 if no guess is right.

    `task:guess_number` makes rows for it. Any other row with a prompt will do: its `answer` is the
    secret. Without an answer the secret is drawn from the prompt, so that all samples of a group
    look for the same number.

    Args:
        low, high: smallest and largest secret of rows without an answer.
        max_turns: guesses per episode.
        turn_cost: of each turn after the first; at most 1 / max_turns.
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
        self.known = (low, high)  # bounds that follow from the answers

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
        found = _NUMBER.findall(response.text)
        # Cut, since int() refuses a number of thousands of digits.
        guess = int(found[-1][:20]) if found else None
        if guess == self.secret and not response.is_truncated:
            return self._end(reward=1.0 - self.turn_cost * (self.turns - 1), solved=1.0)
        if self.turns >= self.max_turns or response.is_truncated:
            return self._end(reward=0.0, solved=0.0)
        answer, (low, high) = "no number", self.known
        if guess is not None and guess < self.secret:
            answer = "higher"
            self.known = (max(low, guess + 1), high)
        elif guess is not None:
            answer = "lower"
            self.known = (low, min(high, guess - 1))
        return Turn(messages=[{"role": "user", "content": answer}])

    def state(self) -> str:
        """Return what the player can know: the turns played, and the numbers that are left."""
        return f"{self.turns} {self.known}"

    def _end(self, *, reward: float, solved: float) -> Turn:
        return Turn(is_done=True, reward=reward, info={"solved": solved, "turns": self.turns})
