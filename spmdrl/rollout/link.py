"""From the leader of an engine replica to its other tensor-parallel ranks, once per engine step.

What is not the same by itself on all of them (rewards, environments, the trainers being ready)
is known to the leader alone. It decides what enters the engine, and they repeat it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from spmdrl.config import Penalties
from spmdrl.engine.protocol import EngineProtocol, Request, Truncation
from spmdrl.given import Given, ToldItems, shown_by
from spmdrl.plain import pack, record, unpack
from spmdrl.world import World
from spmdrl.world.comm import bytes_from

record(Truncation)
record(Penalties)


class Link:
    """The leader's voice; silent where a replica is one rank.

    Args:
        world: this rank's view of the job.
    """

    def __init__(self, world: World):
        self.world = world
        self._has_followers = world.cfg.layout.inference_tp > 1
        self._shown = ToldItems()

    def step(self, requests: Sequence[Request]) -> None:
        """Tell the followers to add these requests and take an engine step. The leader does
        the same right after."""
        self._tell([self._said(request) for request in requests] if self._has_followers else [])

    def end(self) -> None:
        """Tell the followers that this generation is over."""
        self._tell(None)

    def _tell(self, said: list[dict[str, Any]] | None) -> None:
        if self._has_followers:
            bytes_from(0, pack(said), group=self.world.replica_control)

    def follow(self, engine: EngineProtocol) -> None:
        """Do as the leader says until it ends; what finishes is the leader's business.

        Raises: Unauthentic for words that are not the leader's.
        """
        while (requests := self._told()) is not None:
            for said in requests:
                engine.add(self._meant(said))
            engine.step()

    def _told(self) -> list[dict[str, Any]] | None:
        with self.world.watch.wait("await the replica's leader", -1):
            return unpack(bytes_from(0, b"", group=self.world.replica_control))

    def _said(self, request: Request) -> dict[str, Any]:
        return vars(request) | {
            "prompt": numpy.array(request.prompt, numpy.int64),
            "shown": self._shown.said(shown_by(request.prompt)),
        }

    def _meant(self, said: dict[str, Any]) -> Request:
        shown = self._shown.meant(said.pop("shown"))
        return Request(**said | {"prompt": Given(said["prompt"].tolist(), shown)})
