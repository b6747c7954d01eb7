"""An adapter to environments of the `verifiers` package, and to others with the same members.

It does not import the package. It uses the documented members, sync or async:
`setup_state(state)`, `env_response(messages, state)`, `is_completed`, `system_prompt`, `oai_tools`,
and `rubric` with `funcs` and `weights`, or with `rubrics` of that kind. `env_response` may return
messages, or messages and state; `is_completed` may take the state, or messages and state. Reward
functions may have the parameters prompt, completion, answer, state, task, info and parser.

It does not use the package's client and rollout loop, its datasets (rows come from data.train),
judges that call other models through the client of that loop, or reward functions of whole groups.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

from spmdrl.environments.plain_state import NotPlain
from spmdrl.environments.protocol import Message, Response, Turn, check_at_least, opening_messages
from spmdrl.errors import Refusal
from spmdrl.imports import construct, import_object, refusing, resolve

_GROUP_PARAMETERS = {"prompts", "completions", "answers", "states", "tasks", "infos"}


class VerifiersEnvironment:
    """An episode of a verifiers environment.

    Args:
        load: `module:function` or `path/file.py:function` that returns the environment; in that
            package usually `MODULE:load_environment`. Called once per worker process.
        load_options: keyword options of the function.
        max_turns: responses per episode; 0 leaves it to the environment.
    """

    def __init__(
        self, *, load: str, load_options: dict[str, Any] | None = None, max_turns: int = 0
    ):
        check_at_least(0, max_turns=max_turns)
        self.load = load
        self.max_turns = max_turns
        self._options = json.dumps(load_options or {}, sort_keys=True)
        self.state: dict[str, Any] = {}
        environment = self._environment()
        if not _reward_funcs(environment.rubric):
            raise Refusal(f"load: the rubric of {load} has no reward functions")
        for function, _ in _reward_funcs(environment.rubric):
            of_groups = _GROUP_PARAMETERS & set(inspect.signature(function).parameters)
            if of_groups:
                raise Refusal(
                    f"load: reward function {_name_of(function)} asks for "
                    f"{', '.join(sorted(of_groups))} of a whole group, which does not exist while "
                    "one episode runs"
                )

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Return the environment's tool descriptions."""
        return list(getattr(self._environment(), "oai_tools", None) or [])

    def reset(self, row: dict) -> list[Message]:
        """Make the state, and open with the row's prompt."""
        environment = self._environment()
        prompt = opening_messages(row)
        rules = getattr(environment, "system_prompt", None)
        if rules and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": rules}, *prompt]
        info = row.get("info") or {}
        self.state = {
            "prompt": prompt,
            "completion": [],
            "answer": row.get("answer", ""),
            "task": row.get("task", "default"),
            "turn": 0,
            "responses": [],
            "trajectory": [],
            "info": json.loads(info) if isinstance(info, str) else info,
            "input": row,
            "timing": {"start_time": time.time(), "generation_ms": 0.0, "total_ms": 0.0},
            "error": None,
            "final_env_response": None,
        }
        if hasattr(environment, "setup_state"):
            self.state = resolve(environment.setup_state(self.state)) or self.state
        return prompt

    def step(self, response: Response) -> Turn:
        """Let the environment answer, or score the episode by its rubric at the end."""
        environment = self._environment()
        state = self.state
        state["completion"].append(_assistant_message(response, turn=state["turn"]))
        # The package's stop conditions count turns by one of these.
        state["turn"] += 1
        state["trajectory"].append({"prompt": None, "completion": state["completion"][-1:]})
        is_last = response.is_truncated or 0 < self.max_turns <= state["turn"]
        if is_last or self._is_completed():
            return self._score()
        messages = [*state["prompt"], *state["completion"]]
        answer = resolve(environment.env_response(messages, state))
        if isinstance(answer, tuple):
            answer, self.state = answer
        if isinstance(answer, str):
            answer = [{"role": "user", "content": answer}]
        self.state["completion"] += answer
        # An environment may end the episode while it answers.
        if not answer or self.state.get("final_env_response") is not None:
            return self._score()
        return Turn(messages=list(answer))

    def save(self) -> dict[str, Any]:
        """Return the state. An object in two of its entries becomes two copies.

        Raises: NotPlain for an object that cannot be copied.
        """
        with refusing(f"the state of {self.load}", Exception, kind=NotPlain, names_kind=True):
            return {name: copy.deepcopy(value) for name, value in self.state.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the state that `save` returned."""
        self.state = saved

    def _is_completed(self) -> bool:
        method = getattr(self._environment(), "is_completed", None)
        if method is None:
            return False
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(method).parameters.values()
        if sum(parameter.kind in kinds for parameter in parameters) < 2:
            return bool(resolve(method(self.state)))
        messages = [*self.state["prompt"], *self.state["completion"]]
        return bool(resolve(method(messages, self.state)))

    def _score(self) -> Turn:
        """Return the last turn, with the rubric's reward."""
        environment = self._environment()
        state = self.state
        names = ("prompt", "completion", "answer", "task", "info")
        arguments = {name: state.get(name) for name in names}
        arguments |= getattr(environment.rubric, "class_objects", {}) | {"state": state}
        parser = getattr(environment.rubric, "parser", getattr(environment, "parser", None))
        arguments.setdefault("parser", parser)
        reward = 0.0
        info = {"turns": float(state["turn"])}
        for function, weight in _reward_funcs(environment.rubric):
            value = float(resolve(function(**_select_arguments(function, arguments))))
            info[_name_of(function)] = value
            reward += weight * value
        return Turn(is_done=True, reward=reward, info=info)

    def _environment(self) -> Any:
        return _load(self.load, self._options)


@functools.lru_cache(maxsize=4)
def _load(load: str, options: str) -> Any:
    # One environment per process: it holds datasets and clients, which cannot be packed.
    make = import_object(load, kind="function", field="load")
    environment = construct(make, json.loads(options), field="load_options")
    for name in ("env_response", "rubric"):
        if not hasattr(environment, name):
            raise Refusal(
                f"load: {load} returned a {type(environment).__name__}, which has no `{name}`; an "
                "environment of several turns needs it"
            )
    return environment


def _reward_funcs(rubric: Any) -> list[tuple[Callable[..., Any], float]]:
    """Return the functions of a rubric, or of a group of them, with their weights."""
    if hasattr(rubric, "rubrics"):
        return [pair for part in rubric.rubrics for pair in _reward_funcs(part)]
    functions = list(rubric.funcs)
    weights = list(getattr(rubric, "weights", None) or [1.0] * len(functions))
    return list(zip(functions, weights))


def _select_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _assistant_message(response: Response, *, turn: int) -> Message:
    message: Message = {"role": "assistant", "content": response.text}
    if response.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call{turn}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(response.tool_calls)
        ]
    return message
