"""Messages from an engine replica's leader to its other ranks: one per engine step.

Only the leader knows rewards, answers of environments and whether the trainers are ready. It
decides which requests enter the engine, and the other ranks add exactly the same ones.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist

from spmdrl.config import Penalties
from spmdrl.engine.protocol import EngineProtocol, Request, Truncation
from spmdrl.model_inputs import ItemCodec, TokenIds, multimodal_of
from spmdrl.plain import pack, unpack
from spmdrl.world.secret import MARK_BYTES, Unauthentic, is_marked, mark
from spmdrl.world.world import World

_END = -1
_SIZE = struct.Struct("<q")


class Link:
    """Sends the leader's requests to the replica's other ranks; does nothing if it is alone.

    Args:
        world: this rank's view of the job.
    """

    def __init__(self, world: World):
        self.world = world
        self._has_followers = world.cfg.layout.replica_ranks > 1
        self._count = 0  # messages so far; a part of each mark, so that no message can be replayed
        self._items = ItemCodec()

    def step(self, requests: Sequence[Request]) -> None:
        """Tell the followers to add these requests and to take an engine step.

        The leader does the same right after this call.
        """
        if self._has_followers:
            # Most steps have no new request, and then the size alone is sent.
            payload = pack([self._to_plain(request) for request in requests]) if requests else b""
            self._announce(len(payload))
            if payload:
                self._send(payload)

    def end(self) -> None:
        """Tell the followers to leave `follow`."""
        if self._has_followers:
            self._announce(_END)

    def follow(self, engine: EngineProtocol) -> None:
        """Repeat the leader's engine steps until it calls `end`; ignore finished sequences.

        Raises: Unauthentic for a message without the mark of the job's secret.
        """
        while (size := _SIZE.unpack(self._receive(_SIZE.size))[0]) != _END:
            if size:
                for plain in unpack(self._receive(size)):
                    engine.add(self._to_request(plain))
            engine.step()

    def _to_plain(self, request: Request) -> dict[str, Any]:
        return vars(request) | {
            "prompt": numpy.array(request.prompt, numpy.int64),
            "truncation": tuple(vars(request.truncation).values()),
            "penalties": tuple(vars(request.penalties).values()),
            "multimodal": self._items.encode(multimodal_of(request.prompt)),
        }

    def _to_request(self, plain: dict[str, Any]) -> Request:
        multimodal = self._items.decode(plain.pop("multimodal"))
        own = {
            "prompt": TokenIds(plain["prompt"].tolist(), multimodal),
            "truncation": Truncation(*plain["truncation"]),
            "penalties": Penalties(*plain["penalties"]),
        }
        return Request(**plain | own)

    def _announce(self, size: int) -> None:
        # A broadcast needs a buffer of the right size on every rank, so the size goes first.
        self._send(_SIZE.pack(size))

    def _send(self, message: bytes) -> None:
        self._count += 1
        data = bytearray(mark(f"link {self._count}", message) + message)
        self._broadcast(torch.frombuffer(data, dtype=torch.uint8))

    def _receive(self, size: int) -> bytes:
        self._count += 1
        marked = torch.empty(MARK_BYTES + size, dtype=torch.uint8)
        with self.world.watch.wait("await the replica's leader", -1):
            self._broadcast(marked)
        data = marked.numpy().tobytes()
        if not is_marked(f"link {self._count}", data[MARK_BYTES:], data[:MARK_BYTES]):
            raise Unauthentic(
                f"rank {self.world.rank}: a message of the replica's leader does not bear the mark "
                "of the job's secret; see docs/security.md"
            )
        return data[MARK_BYTES:]

    def _broadcast(self, message: torch.Tensor) -> None:
        dist.broadcast(message, group=self.world.replica_control, group_src=0)
