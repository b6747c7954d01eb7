"""Adapters to the environment protocol, for generated tasks and for gymnasium's environments."""

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
from spmdrl.imports import construct, import_object, resolve


class TaskEnvironment:
    """A generated task as an environment of one turn: the prompt, and the task's own grader.

    Args:
        task: `task:NAME` or `reasoning_gym:NAME`. data.train must name it too, to make the rows.
        **options: options of the task, as in data.task_options.
    """

    def __init__(self, *, task: str, **options: Any):
        if ":" not in task:
            raise Refusal(f"task: expected task:NAME or reasoning_gym:NAME, got {task!r}")
        self.task = task
        # Only the options are packed with the episode, as the key by which `_task` caches tasks.
        self._options = json.dumps(options)
        self.row: dict = {}
        # Refuse a task or options that do not exist.
        _task(task, self._options)

    def reset(self, row: dict) -> list[Message]:
        """Open with the row's prompt."""
        if row.get("data_source") != self.task:
            raise Refusal(
                f"the row's data_source is {row.get('data_source')!r}, and the environment "
                f"grades {self.task}; set data.train to it"
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
    """An environment with gymnasium's interface. Observations become text, and responses actions.

    It must have `reset(seed=...) -> (observation, info)` and `step(action) -> (observation,
    reward, terminated, truncated, info)`. It must be possible to pickle it, as it is for most
    environments without a window. All samples of a group have one seed: the row's `seed`, or a hash
    of its prompt. Numbers in the last `info` become metrics.

    Args:
        env: `module:Class` or `path/file.py:Class`, or a function that makes the environment, for
            instance `gymnasium:make` with env_options {id: FrozenLake-v1}.
        env_options: keyword options of the class or function.
        action: the action that a response stands for: `text`, `int` or `float` (the last number in
            it), or `module:function` that computes it from the text. A response without an action,
            or with one outside of the environment's `action_space`, gets an error text and costs a
            turn.
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
        # Keep the names, since the environment is packed after every call. Look them up here too,
        # so that a wrong name is refused at start.
        self._action = action
        self._show = show
        action_parser(action)
        _observation_formatter(show)
        make = import_object(env, kind="Class", field="env")
        self.env = construct(make, env_options or {}, field="env_options")
        self.max_turns = max_turns
        self.turns = 0

    def reset(self, row: dict) -> list[Message]:
        """Open with the row's prompt and the first observation."""
        messages = opening_messages(row)
        observation, _ = resolve(self.env.reset(seed=seed_of(row, messages)))
        return with_observation(messages, _observation_formatter(self._show)(observation))

    def step(self, response: Response) -> Turn:
        """Take the action in a response, and answer with the observation."""
        self.turns += 1
        is_last = self.turns >= self.max_turns or response.is_truncated
        try:
            action = action_parser(self._action)(response.text)
            space = getattr(self.env, "action_space", None)
            if space is not None and not space.contains(action):
                raise ValueError(f"{action!r} is not one of the actions, {space}")
        except ValueError as error:
            return self._turn(str(error), reward=0.0, is_done=is_last, info={"bad_actions": 1.0})
        observation, reward, terminated, truncated, info = resolve(self.env.step(action))
        is_done = bool(terminated or truncated) or is_last
        metrics = {}
        if is_done:
            kinds = (bool, int, float)
            metrics = {name: float(v) for name, v in info.items() if isinstance(v, kinds)}
        text = _observation_formatter(self._show)(observation)
        return self._turn(text, reward=float(reward), is_done=is_done, info=metrics)

    def save(self) -> dict[str, Any]:
        """Return the state as plain data. Raises: NotPlain if the environment has other data."""
        return {"turns": self.turns, "env": text_of(self.env)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the state that `save` returned."""
        env = self.env
        self.turns = saved["turns"]
        self.env = environment_of(saved["env"], type(env), lambda: env)

    def _turn(self, text: str, *, reward: float, is_done: bool, info: dict[str, float]) -> Turn:
        if is_done:
            return Turn(is_done=True, reward=reward, info=info | {"turns": float(self.turns)})
        return Turn(messages=[{"role": "user", "content": text}], reward=reward, info=info)


def seed_of(row: dict, messages: list[Message]) -> int:
    """Return the seed of all samples of a group: the row's `seed`, or a hash of its prompt."""
    seed = row.get("seed")
    if seed is None:
        prompt = json.dumps(messages, sort_keys=True, default=str)
        seed = hashed(prompt, num_bytes=4) >> 1
    return int(seed)


def with_observation(messages: list[Message], text: str) -> list[Message]:
    """Return opening messages with the first observation after the user's prompt."""
    if messages[-1]["role"] == "user":
        last = dict(messages[-1], content=f"{messages[-1]['content']}\n\n{text}")
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": text}]


def action_parser(name: str) -> Callable[[str], Any]:
    """Return the function that finds the action in a response; it raises ValueError if there is
    none.

    Args:
        name: see `GymEnvironment`.
    """
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


def _observation_formatter(name: str) -> Callable[[Any], str]:
    return import_object(name, kind="function", field="show") if name else str
