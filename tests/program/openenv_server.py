"""A server of OpenEnv with a game: name the digit that is shown, three times.

python tests/program/openenv_server.py PORT
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

TURNS = 3


class Answer(Action):
    """A digit."""

    digit: int


class Seen(Observation):
    """What the player sees."""

    text: str


class Digits(Environment):
    """Worth 1 if every answer is the digit that was shown, and less the further they are off."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._seed = 0
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        """Show the first digit."""
        self._seed = seed or 0
        self._state = State(episode_id=episode_id, step_count=0)
        return Seen(text=str(self._shown()), done=False)

    def step(self, action, timeout_s=None, **kwargs):
        """Score an answer, and show the next digit."""
        if not 0 <= action.digit <= 9:
            raise ValueError("answer with a digit")
        reward = 1 - abs(action.digit - self._shown()) / 9
        self._state.step_count += 1
        is_done = self._state.step_count == TURNS
        return Seen(text=str(self._shown()), reward=reward / TURNS, done=is_done)

    @property
    def state(self):
        """The number of answers."""
        return self._state

    def _shown(self):
        return (self._seed * 7 + self._state.step_count * 3) % 10


if __name__ == "__main__":
    app = create_fastapi_app(Digits, Answer, Seen, max_concurrent_envs=1024)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
