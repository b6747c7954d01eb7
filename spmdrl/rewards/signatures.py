"""Reward functions as users have them, recognised by their parameter names.

Reward workers import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from spmdrl.errors import Refusal, place_of
from spmdrl.imports import import_object, resolve
from spmdrl.rewards.forms import KNOWN_LISTS, Form, Parameters, form_of
from spmdrl.rewards.retries import Errors
from spmdrl.rewards.samples import SCOPES, RewardSample, Scope, Score

ASYNC_CONCURRENCY = 32
"""Concurrent calls of an `async def` function in one worker, unless the function or the config sets
another number."""
_MODEL = "model:"


@dataclass(frozen=True)
class Reward:
    """A reward function of any signature: `reward(samples)` gives a Score for each."""

    call: Callable[[Sequence[RewardSample], Sequence[Score]], Any]
    """Calls the function and returns its result, which may be awaitable. Metrics that it logs go
    into the scores."""
    read: Callable[[Any, Sequence[Score]], None]
    """Writes the result into the scores. Raises: BadValue."""
    scope: Scope = "sample"
    """Which samples one call gets."""
    concurrency: int = 1
    """Concurrent calls in one worker; 1: one at a time, in the main thread."""
    is_async: bool = False
    """Whether the function is `async def`."""
    place: str = ""
    """` (FILE:LINE)` of a user's function."""
    transient: Errors = ()
    """Its errors after which a call is repeated, see `retries.may_pass`."""

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        scores = [Score() for _ in samples]
        self.read(resolve(self.call(samples, scores)), scores)
        return scores

    async def awaited(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Call an `async def` function."""
        scores = [Score() for _ in samples]
        self.read(await self.call(samples, scores), scores)
        return scores


def load_reward(spec: str, *, scope: str = "auto", concurrency: int = 0) -> Reward:
    """Import a reward function and adapt it to calls with samples.

    A function may have these attributes. `prepare` is a function for slow imports or files to read.
    It is called once per worker before any deadline runs, with the arguments that functools.partial
    bound, if any. `concurrency` is the number of threads of a worker that may call the function,
    for functions that wait and are safe in threads; it overrides rewards.concurrency. `async def`
    functions share one event loop per worker, ASYNC_CONCURRENCY calls at a time. `scope` overrides
    rewards.scope. `transient` holds exception classes after which a call is repeated.

    Args:
        spec: `module:function` or `path/file.py:function`.
        scope: rewards.scope, for functions that take lists.
        concurrency: rewards.concurrency.
    Raises: Refusal when it cannot be found or imported, or its parameters fit no known
        signature.
    """
    function = import_function(spec)
    reward = adapt(function, spec=spec, scope=scope, concurrency=concurrency)
    if callable(prepare := _own(function, "prepare", None)):
        prepare(**(function.keywords if isinstance(function, functools.partial) else {}))
    return reward


def reward_models(specs: Sequence[str]) -> dict[int, str]:
    """Return {position: folder or hub name} of the entries `model:PATH`.

    Trainer ranks score with these models; workers call the other entries.
    """
    models = {}
    for i, spec in enumerate(specs):
        if spec.startswith(_MODEL):
            models[i] = spec.removeprefix(_MODEL)
    return models


def part_names(specs: Sequence[str]) -> tuple[str, ...]:
    """Return one name per entry, of the function, task or model folder, with its position if two
    entries share a name."""
    names = [_own_name(spec) for spec in specs]
    return tuple(name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names))


def _own_name(spec: str) -> str:
    if spec.startswith(_MODEL):
        return PurePath(spec.removeprefix(_MODEL)).name or "model"
    return spec.rpartition(":")[2]


def import_function(spec: str) -> Callable:
    """Return the function that `module:function` or `path/file.py:function` names.

    Raises: Refusal when module, file or function does not exist, or importing fails.
    """
    return import_object(spec, kind="function", field="rewards.functions")


def adapt(function: Callable, *, spec: str, scope: str = "auto", concurrency: int = 0) -> Reward:
    """Wrap a function of a known signature into `samples -> scores`.

    Args:
        scope, concurrency: as of `load_reward`.
    Raises: Refusal showing the known signatures when the parameter names fit none.
    """
    wanted = Parameters.of(function)
    form = form_of(wanted, spec=spec)

    def call(samples: Sequence[RewardSample], scores: Sequence[Score]) -> Any:
        """Call the function with those of the arguments that it takes."""
        return function(**wanted.select(form.arguments(samples, scores, wanted)))

    is_async = _is_async(function)
    return Reward(
        call,
        form.read,
        _scope(function, form, scope=scope, spec=spec),
        _concurrency(function, chosen=concurrency, is_async=is_async, spec=spec),
        is_async,
        place_of(function),
        _transient(function, spec=spec),
    )


def _is_async(function: Callable) -> bool:
    method = getattr(function, "__call__", None)  # noqa: B004, that of an object may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


def _own(function: Callable, name: str, default: Any) -> Any:
    """Return an attribute of a function, or of the one that functools.partial wraps."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(function, name, getattr(inner, name, default))


def _scope(function: Callable, form: Form, *, scope: str, spec: str) -> Scope:
    own = _own(function, "scope", None)
    if own is not None and own not in SCOPES:
        raise Refusal(f"rewards.functions: {spec} has scope {own!r}; expected {', '.join(SCOPES)}")
    if not form.takes_lists:
        if own not in (None, "sample"):
            raise Refusal(
                f"rewards.functions: {spec} has scope {own!r}, and its parameters take one sample; "
                "take lists, as these do:\n" + KNOWN_LISTS
            )
        return "sample"
    found = own or ("group" if scope == "auto" else scope)
    return next(known for known in SCOPES if known == found)


def _concurrency(function: Callable, *, chosen: int, is_async: bool, spec: str) -> int:
    default = ASYNC_CONCURRENCY if is_async else 1
    own = _own(function, "concurrency", chosen or default)
    if type(own) is not int or own < 1:
        raise Refusal(
            f"rewards.functions: {spec} has concurrency {own!r}; expected the "
            "number of concurrent calls in a worker, 1 or more"
        )
    return own


def _transient(function: Callable, *, spec: str) -> Errors:
    own = _own(function, "transient", ())
    errors = own if isinstance(own, tuple) else (own,)
    if not all(isinstance(one, type) and issubclass(one, Exception) for one in errors):
        raise Refusal(
            f"rewards.functions: {spec} has transient {own!r:.200}; expected exception classes "
            "after which a call is repeated, such as (ConnectionError,)"
        )
    return errors
