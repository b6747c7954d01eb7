"""Adapters to the environment protocol: generated tasks, and environments like those of
gymnasium."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

from spmdrl.data.hashed import hashed
from spmdrl.data.tasks import Task, make_task
from spmdrl.environments.plain_state import environment_of, text_of
from spmdrl.environments.protocol import Message, Response, Turn, check_at_least, opening_messages
from spmdrl.errors import Refusal
from spmdrl.imports import construct, import_object, ran


class TaskEnvironment:
    """A generated task as an environment of one turn: the prompt, and the task's own grader.

    Args:
        task: `task:NAME` or `reasoning_gym:NAME`, as in data.train, which must make the rows.
        **options: of the task, as in data.task_options.
    """

    def __init__(self, *, task: str, **options: Any):
        if ":" not in task:
            raise Refusal(f"task: expected task:NAME or reasoning_gym:NAME, got {task!r}")
        self.task = task
        # As text, by which `_task` caches: the task itself is not packed with the episode.
        self._options = json.dumps(options)
        self.row: dict = {}
        # Raises for a task or options that do not exist.
        _task(task, self._options)

    def reset(self, row: dict) -> list[Message]:
        """Open with the row's prompt."""
        if row.get("data_source") != self.task:
            raise Refusal(
                f"the row's data_source is {row.get('data_source')!r}, the "
                f"environment grades {self.task}; set data.train to it"
            )
        self.row = row
        return opening_messages(row)

    def step(self, response: Response) -> Turn:
        """Grade the response."""
        score = _task(self.task, self._options).score_answer(response.text, self.row)
        return Turn(is_done=True, reward=score)


@functools.lru_cache(maxsize=8)
def _task(spec: str, options: str) -> Task:
    return make_task(spec, json.loads(options))


class GymEnvironment:
    """An environment like those of gymnasium. Its observations become text, and text its actions.

    It must have `reset(seed=...) -> (observation, info)` and `step(action) -> (observation,
    reward, terminated, truncated, info)`, and must pickle, as most without a window do. The samples
    of a group have one seed: the row's `seed`, or one made from its prompt. Numbers in the last
    `info` become metrics.

    Args:
        env: `module:Class` or `path/file.py:Class`, or a function that makes it, for instance
            `gymnasium:make` with env_options {id: FrozenLake-v1}.
        env_options: its keyword options.
        action: how a response becomes an action: `text`, `int` or `float` (the last number in the
            response), or `module:function` of the text. A response without an action gets an error
            text and costs a turn.
        show: `module:function` that turns an observation into text; str() by default.
        max_turns: responses per episode.
    """

    def __init__(
        self,
        *,
        env: str,
        env_options: dict[str, Any] | None = None,
        action: str = "text",
        show: str = "",
        max_turns: int = 16,
    ):
        check_at_least(1, max_turns=max_turns)
        # Names and not functions, since the environment is packed after every call. They are
        # looked up here too, so that a wrong name is refused at start.
        self._action = action
        self._show = show
        _reader(action)
        _shower(show)
        make = import_object(env, kind="Class", field="env")
        self.env = construct(make, env_options or {}, field="env_options")
        self.max_turns = max_turns
        self.turns = 0

    def reset(self, row: dict) -> list[Message]:
        """Open with the row's prompt and the first observation."""
        messages = opening_messages(row)
        seed = row.get("seed")
        if seed is None:
            text = json.dumps(messages, sort_keys=True, default=str)
            seed = hashed(text, num_bytes=4) >> 1
        observation, _ = ran(self.env.reset(seed=int(seed)))
        shown = _shower(self._show)(observation)
        if messages[-1]["role"] == "user":
            messages[-1] = dict(messages[-1], content=f"{messages[-1]['content']}\n\n{shown}")
            return messages
        return [*messages, {"role": "user", "content": shown}]

    def step(self, response: Response) -> Turn:
        """Take the action in a response, and show the observation."""
        self.turns += 1
        is_last = self.turns >= self.max_turns or response.is_truncated
        try:
            action = _reader(self._action)(response.text)
        except ValueError as error:
            return self._turn(str(error), reward=0.0, is_done=is_last, info={"bad_actions": 1.0})
        observation, reward, terminated, truncated, info = ran(self.env.step(action))
        is_done = bool(terminated or truncated) or is_last
        metrics = {}
        if is_done:
            kinds = (bool, int, float)
            metrics = {name: float(v) for name, v in info.items() if isinstance(v, kinds)}
        shown = _shower(self._show)(observation)
        return self._turn(shown, reward=float(reward), is_done=is_done, info=metrics)

    def save(self) -> dict[str, Any]:
        """Return the state as plain data. Raises: NotPlain if the gym holds other data."""
        return {"turns": self.turns, "env": text_of(self.env)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a state that `save` returned."""
        env = self.env
        self.turns = saved["turns"]
        self.env = environment_of(saved["env"], type(env), lambda: env)

    def _turn(self, text: str, *, reward: float, is_done: bool, info: dict[str, float]) -> Turn:
        if is_done:
            return Turn(is_done=True, reward=reward, info=info | {"turns": float(self.turns)})
        return Turn(messages=[{"role": "user", "content": text}], reward=reward, info=info)


def _reader(name: str) -> Callable[[str], Any]:
    if name == "text":
        return str.strip
    if name in ("int", "float"):
        return functools.partial(_last_number, kind=int if name == "int" else float)
    known = dict.fromkeys(("text", "int", "float"), "")
    return import_object(name, known=known, kind="function", field="action")


def _last_number(text: str, *, kind: type) -> int | float:
    for word in reversed(text.replace(",", " ").split()):
        with contextlib.suppress(ValueError):
            return kind(word.strip("().;:!*'\"[]"))
    raise ValueError(f"expected a number ({kind.__name__}) as the action")


def _shower(name: str) -> Callable[[Any], str]:
    return import_object(name, kind="function", field="show") if name else str
