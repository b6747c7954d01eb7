"""What tests begin with: configs changed by name, the roles of a job, a small model's folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from spmdrl.config import Config


def changed(settings: Any, **fields: Any) -> Any:
    """Return settings with fields replaced; a dict replaces those of a section within."""
    own = {name: getattr(settings, name) for name in fields}
    return dataclasses.replace(
        settings,
        **{
            name: changed(own[name], **value)
            if isinstance(value, dict) and dataclasses.is_dataclass(own[name])
            else value
            for name, value in fields.items()
        },
    )


def made(**fields: Any) -> Config:
    """Return a config of defaults, changed."""
    return changed(Config(), **fields)


def good(**fields: Any) -> Config:
    """Return a config that is refused for nothing but its changes."""
    return changed(made(model=dict(path="m"), data=dict(train="task:addition", size=10)), **fields)


@contextlib.contextmanager
def started(cfg: Config) -> Iterator[Any]:
    """Yield this rank's world."""
    from spmdrl.world.world import World

    world = World.start(cfg)
    yield world
    world.close()


@contextlib.contextmanager
def training(cfg: Config) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's world and trainer."""
    from spmdrl.roles import make_trainer

    with started(cfg) as world:
        yield world, make_trainer(cfg, world)


@contextlib.contextmanager
def generating(cfg: Config) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's world and engine."""
    from spmdrl.engine import make_engine

    with started(cfg) as world:
        engine = make_engine(cfg, world)
        yield world, engine
        engine.close()


def small_model(folder: Path, **changes: Any) -> Path:
    """Create a model of some ten thousand parameters."""
    from spmdrl.tools.commands.create_model import create_model

    sizes = dict(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate=48)
    return create_model(folder, **(sizes | changes))


@contextlib.contextmanager
def refused(*words: str, by: type[Exception] = ValueError) -> Iterator[None]:
    """Expect an error that says all of this."""
    with pytest.raises(by) as caught:
        yield
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def examples(count: int, *drawn: Any, **named: Any) -> Callable[[Callable], Callable]:
    """Call a test with so many examples of what hypothesis draws, however long each takes."""
    return lambda test: settings(max_examples=count, deadline=None)(given(*drawn, **named)(test))
