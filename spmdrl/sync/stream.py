"""The weight stream: the trainers' current weights into the engines, once per step.

`WeightStream` traces, plans and proves at construction; `push` moves. Every rank calls each
method at the same place: all of them cross roles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from spmdrl.engine.handover import Handover
from spmdrl.engine.protocol import AdapterEngine, EngineProtocol
from spmdrl.errors import Refusal
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import model_folder
from spmdrl.model.sharded import SentWeights
from spmdrl.sync.buckets import StreamPlan
from spmdrl.sync.in_place import TracedTensors, trace_adapter
from spmdrl.sync.live_shards import LiveShards
from spmdrl.sync.reload import ReloadedTensors
from spmdrl.sync.trace import Copy, trace_loader
from spmdrl.sync.verify import layout_problems, probe_gap, shown
from spmdrl.types import Sums
from spmdrl.world.comm import await_all, gather_problems
from spmdrl.world.world import World

log = logging.getLogger(__name__)


class WeightStream:
    """Moves weights from trainer shards into engine storage.

    Construct it while the engines still hold what they loaded from `model.path`: that is what
    the proof of layout compares with.

    Args:
        sent: what travels: names on every rank, shards on trainers.
        engine: holds a live model on inference ranks.
        world: the job; `world.cfg.stream` says how.
    Raises: Refusal on every rank, when `stream.mode` is `traced` and some engine parameter
        cannot be traced (it lists parameter and reason; with `auto` the log has that list), or
        when vLLM's own reloading is to be used and does not restore what the engine holds.
    """

    def __init__(self, sent: SentWeights, engine: EngineProtocol, world: World):
        self._sent, self._engine, self._world = sent, engine, world
        self._cfg, self._pushes, self.mode = world.cfg.stream, 0, "idle"
        self._adapter: TracedTensors | None = None
        self._changing: TracedTensors | None = None  # without what is frozen, of later pushes
        self._probed: Sequence[Sequence[int]] = ()
        if not world.inference_ranks:
            return
        with world.watch.wait("plan stream", -1):
            self._plan()
        self._pointers = self._engine_pointers()
        self._handover = Handover(engine, world)

    @property
    def plans(self) -> list[StreamPlan]:
        """How the weights travel, in this order."""
        return [] if self.mode == "idle" else self._weights.plans

    @property
    def nbytes(self) -> int:
        """Bytes that leave the trainers in one push, all of them together; where adapters travel
        by themselves, or a part is frozen, in one after the first."""
        later = self._adapter or self._changing
        return later.plan.nbytes if later else self._weight_bytes

    @property
    def _weight_bytes(self) -> int:
        return sum(plan.nbytes for plan in self.plans)

    def release(self) -> None:
        """Lend the engine's memory, which nothing needs until the next push; see Handover."""
        if self.mode != "idle":
            # A traced push writes every weight that counts (not what pads a vocabulary), but for
            # those under adapters that travel by themselves, and those of a model that drafts.
            is_whole = (
                self.mode == "traced"
                and self._adapter is None
                and "speculative_config" not in self._world.cfg.engine.options
            )
            self._handover.release(keeps_weights=not is_whole)

    def push(self, version: int) -> Sums:
        """Write the policy's weights into every engine, in the engines' dtype.

        Args:
            version: of the policy; the engines are told it, and drop their cached prefixes.
        Returns: what Handover.wake_cache does, sync/bytes, sync/seconds and sync/gb_per_s (1e9
            bytes), by this rank's clock, from when all ranks are there; the bytes are those that
            leave the trainers of the whole world.
        Raises: RuntimeError on every rank when a checksum differs, or an engine's loader fails.
        """
        if self.mode == "idle":
            return {}
        nbytes = self.nbytes if self._pushes or self._adapter else self._weight_bytes
        with self._world.watch.wait("push", version):
            await_all(group=self._world.control)
            began = time.perf_counter()
            self._handover.wake_weights()
            if self._adapter is None or not self._pushes:
                self._push_weights()
            if self._adapter is not None:
                if not self._pushes:  # the weights under it stay as they are
                    assert isinstance(self._weights, TracedTensors)
                    self._weights.release()
                    nbytes += self._weight_bytes
                self._adapter.move()
            woken = self._handover.wake_cache()
            if self._world.device.type == "cuda":
                torch.cuda.synchronize(self._world.device)
        seconds = time.perf_counter() - began
        if self._world.is_inference:
            self._engine.weights_changed(version)
        self._pushes += 1
        every = self._cfg.verify_every
        if self._pushes == 1 or (every and self._pushes % every == 0):
            self.verify(version)
        return woken | {
            "sync/bytes": (float(nbytes), 1.0),
            "sync/seconds": (seconds, 1.0),
            "sync/gb_per_s": (nbytes / 1e9, seconds),
        }

    def verify(self, version: int) -> None:
        """Compare checksums of what trainers hold with what engines hold, slice by slice.

        In reload mode every tensor is loaded once more, over rubbish: that has to give the same
        parameters from tensors that arrived as they were sent. The last probe is repeated then,
        for what vLLM makes of the parameters besides.

        Raises: RuntimeError on every rank, naming engine, tensor and both sums.
        """
        with self._world.watch.wait("verify push", version):
            problems = self._weights.differences()
            if self._adapter is not None:
                problems += self._adapter.differences()
        if problems:
            raise RuntimeError(
                f"push {version}: engine weights differ from the trainers'\n{shown(problems)}"
            )
        if self.mode == "reload":
            if self._world.is_inference:
                self._engine.weights_changed(version)
            self.probe(self._probed, version=version)

    def probe(self, sequences: Sequence[Sequence[int]], *, version: int = 0) -> Sums:
        """Score token sequences by engines and trainers and compare.

        Args:
            sequences: token ids, the same on every rank; Given where they show something.
            version: of the weights, for messages.
        Returns: sync/probe_gap: (sum of |engine - trainer| logprob in nats, tokens), over all
            replicas; equal on every rank.
        Raises: RuntimeError on every rank when the mean is above `stream.max_logprob_gap` or
            not a number.
        """
        if self.mode == "idle" or not sequences:
            return {}
        world, self._probed = self._world, sequences
        with world.watch.wait("probe", version):
            of_engine = self._engine.score(sequences) if world.is_inference else []
            of_trainer = self._sent.score(sequences) if world.is_trainer else []
            limit = self._cfg.max_logprob_gap
            return probe_gap(of_engine, of_trainer, limit=limit, version=version, world=world)

    # ---------------------------------------------------------------- construction

    def _plan(self) -> None:
        sent, world = self._sent, self._world
        live = LiveShards(sent.shards, sent.parts, deltas=sent.deltas)
        copies, reasons = self._trace()
        problems = gather_problems(reasons, group=world.control)
        if self._cfg.mode == "traced" and problems:
            raise Refusal(
                f"stream.mode is traced, but these engine parameters cannot be "
                f"written in place; use auto or reload\n{shown(problems)}"
            )
        if problems:
            log.warning(
                "weight stream: falling back to vLLM's own reloading, which is slower, because\n%s",
                shown(problems),
            )
        self.mode = "reload" if self._cfg.mode == "reload" or problems else "traced"
        self._weights: TracedTensors | ReloadedTensors
        if self.mode == "traced":
            self._weights = TracedTensors(world, kind="weights", copies=copies, live=live)
            # An engine that shares its devices drops all weights while it sleeps.
            if sent.frozen and sent.adapter is None and not world.cfg.layout.roles.shares_devices:
                left = [copy for copy in copies if copy.name not in sent.frozen]
                self._changing = TracedTensors(world, kind="changing", copies=left, live=live)
        elif sent.adapter is not None:
            raise Refusal(
                "model.lora.push: adapter, but this engine's weights cannot be "
                "written in place (the log says why); push merged"
            )
        else:
            self._weights = ReloadedTensors(world, names=sent.names, engine=self._engine, live=live)
        if sent.adapter is not None:
            assert isinstance(self._engine, AdapterEngine)
            self._adapter = trace_adapter(
                sent.adapter, sent.shards, engine=self._engine, world=world
            )

    def _trace(self) -> tuple[list[Copy], list[str]]:
        if not self._world.is_inference or self._cfg.mode == "reload":
            return [], []
        trace = trace_loader(self._engine.model, self._sent.names, load=self._engine.load_weights)
        if trace.reasons:
            return [], trace.reasons
        model = self._world.cfg.model
        reader = CheckpointReader(model_folder(model.path), part=model.part)
        return trace.copies, layout_problems(trace.copies, reader)

    # ---------------------------------------------------------------- moving

    def _push_weights(self) -> None:
        if self._pushes and self._changing is not None:
            if self._pushes == 1:
                assert isinstance(self._weights, TracedTensors)
                self._weights.release()
            self._changing.move()
        else:
            self._weights.move()
        if self.mode == "traced":
            assert self._engine_pointers() == self._pointers, "an engine's parameters have moved"

    def _engine_pointers(self) -> tuple[int, ...]:
        if not self._world.is_inference:
            return ()
        return tuple(p.data_ptr() for p in self._engine.model.parameters())
