"""From the leader of an engine replica to its other tensor-parallel ranks, once per engine step.

What is not the same by itself on all of them (rewards, environments, the trainers being ready)
is known to the leader alone. It decides what enters the engine, and they repeat it exactly.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist

from spmdrl.engine.protocol import EngineProtocol, Request
from spmdrl.world import World

_END = -1


class Link:
    """The leader's voice; silent where a replica is one rank.

    Args:
        world: this rank's view of the job.
    """

    def __init__(self, world: World):
        self.world = world
        self._has_followers = world.cfg.layout.inference_tp > 1

    def step(self, requests: Sequence[Request]) -> None:
        """Tell the followers to add these requests and take an engine step. The leader does
        the same right after."""
        if self._has_followers:
            payload = pickle.dumps(list(requests)) if requests else b""
            self._send(torch.tensor([len(payload)]))
            if payload:
                self._send(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def end(self) -> None:
        """Tell the followers that this generation is over."""
        if self._has_followers:
            self._send(torch.tensor([_END]))

    def follow(self, engine: EngineProtocol) -> None:
        """Do as the leader says until it ends; what finishes is the leader's business."""
        while (size := int(self._receive(torch.zeros(1, dtype=torch.int64)))) != _END:
            if size:
                payload = self._receive(torch.empty(size, dtype=torch.uint8))
                for request in pickle.loads(payload.numpy().tobytes()):
                    engine.add(request)
            engine.step()

    def _send(self, message: torch.Tensor) -> None:
        dist.broadcast(message, group=self.world.replica_control, group_src=0)

    def _receive(self, message: torch.Tensor) -> torch.Tensor:
        with self.world.watch.wait("await the replica's leader", -1):
            dist.broadcast(message, group=self.world.replica_control, group_src=0)
        return message
