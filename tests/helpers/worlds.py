"""Run functions of a test on real ranks, within the world that a config describes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from spmdrl.config import Config, LayoutSettings
from spmdrl.engine import make_engine
from spmdrl.roles import make_trainer
from spmdrl.sync.stream import WeightStream
from spmdrl.world.world import World
from tests.helpers.ranks import run_ranks

ON_CPU = LayoutSettings(
    placement="offline", world_size=1, device="cpu", startup_timeout_s=300, wait_timeout_s=200
)
"""Every rank trains, no engine is built, and a busy machine has time."""


def in_world(cfg: Config, body: Callable, *args: Any, **options: Any) -> list[Any]:
    """Run `body(world, *args)` on every rank; return what it gave, in rank order.

    Options are those of `run_ranks`.
    """
    return run_ranks(cfg.layout.world_size, _within, cfg, body, args, **options)


def with_trainer(cfg: Config, body: Callable, *args: Any) -> list[Any]:
    """Run `body(trainer, *args)` on every rank, in `trainer.world`."""
    return in_world(cfg, _train, body, args)


def with_engine(cfg: Config, body: Callable, *args: Any, **options: Any) -> list[Any]:
    """Run `body(engine, trainer, *args)` on every rank."""
    return in_world(cfg, _generate, body, args, **options)


def with_stream(cfg: Config, body: Callable, *args: Any) -> list[Any]:
    """Run `body(stream, engine, trainer, *args)` on every rank."""
    return with_engine(cfg, _push, body, args)


def another_trainer(trainer: Any, cfg: Config | None = None) -> Any:
    """Return a trainer of the same world, as it starts under a config, its own by default."""
    return make_trainer(cfg or trainer.world.cfg, trainer.world)


def refusal(cfg: Config) -> str:
    """Return why no trainer is made of a config; "accepted" when one is."""
    world = World.start(cfg)
    try:
        make_trainer(cfg, world)
    except ValueError as error:
        return str(error)
    finally:
        world.close()
    return "accepted"


class Said(logging.Handler):
    """Collects the lines of the program's log."""

    def __init__(self, level: int = logging.INFO):
        super().__init__(level)
        self.lines: list[str] = []
        logger = logging.getLogger("spmdrl")
        logger.setLevel(level)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> str:
        text, self.lines = "\n".join(self.lines), []
        return text


def _within(cfg: Config, body: Callable, args: tuple) -> Any:
    world = World.start(cfg)
    found = body(world, *args)
    world.close()
    return found


def _train(world: World, body: Callable, args: tuple) -> Any:
    return body(make_trainer(world.cfg, world), *args)


def _generate(world: World, body: Callable, args: tuple) -> Any:
    engine = make_engine(world.cfg, world)
    found = body(engine, make_trainer(world.cfg, world), *args)
    engine.close()
    return found


def _push(engine: Any, trainer: Any, body: Callable, args: tuple) -> Any:
    return body(WeightStream(trainer.weights, engine, trainer.world), engine, trainer, *args)
