"""The weight stream: the trainers' current weights into the engines, once per step.

`WeightStream` traces, plans and checks at construction; `push` moves the weights. Every rank calls
each method at the same place: each of them involves trainers and engines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.engine.handover import Handover
from spmdrl.engine.protocol import AdapterEngine, EngineProtocol
from spmdrl.errors import Refusal
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import model_folder
from spmdrl.model.rounding import first_halves
from spmdrl.model.sharded_model import SentWeights
from spmdrl.sync.buckets import StreamPlan
from spmdrl.sync.in_place import TracedTensors, trace_adapter
from spmdrl.sync.logprob_gap import Scores, probe_gap
from spmdrl.sync.reload import ReloadedTensors
from spmdrl.sync.tables import LiveShards
from spmdrl.sync.trace import Copy, trace_loader
from spmdrl.sync.verify import bullet_list, layout_problems
from spmdrl.types import Sums
from spmdrl.world.comm import await_all, gather_problems
from spmdrl.world.world import World

log = logging.getLogger(__name__)


class WeightStream:
    """Moves weights from trainer shards into engine storage.

    Construct it while the engines still hold what they loaded from `model.path`: that is what
    the check of the layout compares with.

    Args:
        sent: the weights to push: names on every rank, shards on trainers.
        engine: holds a live model on inference ranks.
        world: the job, with the settings in `world.cfg.stream`.
    Raises: Refusal on every rank, when `stream.mode` is `traced` and some engine parameter
        cannot be traced (it lists parameter and reason; with `auto` the log has that list), or
        when vLLM's own reloading is used and does not restore what the engine holds.
    """

    def __init__(self, sent: SentWeights, engine: EngineProtocol, world: World):
        self._sent = sent
        self._engine = engine
        self._world = world
        self._cfg = world.cfg.stream
        self._pushes = 0
        self.mode = "idle"
        """idle (no engines), traced or reload."""
        self._probed: Sequence[Sequence[int]] = ()
        self._constants: Sequence[Tensor] = ()
        if not world.inference_ranks:
            return
        with world.watch.wait("plan stream", -1):
            self._plan()
        self._pointers = self._engine_pointers()
        self._handover = Handover(engine, world, constants=self._constants)
        engine.lend_memory = self.lend_memory
        self.lend_memory()

    @property
    def plans(self) -> list[StreamPlan]:
        """How all weights travel, push after push."""
        return [] if self.mode == "idle" else self._weights.plans

    @property
    def nbytes(self) -> int:
        """Bytes that leave all trainers together in one push.

        Where adapters are pushed separately, or a part of the model is frozen, the first push is
        larger.
        """
        return 0 if self.mode == "idle" else _nbytes(self._later)

    def lend_memory(self) -> None:
        """Let the update use the engine's memory until the next push; see Handover.

        Called at construction, and by the source when nothing is generated until the next push.
        """
        # A traced push writes every weight but constants of the loader, which the handover keeps.
        # It does not write the weights under adapters that are pushed separately.
        writes_all_weights = self.mode == "traced" and self._sent.adapter is None
        self._handover.release(keeps_weights=not writes_all_weights)

    def push(self, version: int) -> Sums:
        """Write the policy's weights into every engine, in the engines' dtype.

        Args:
            version: of the policy. The engines learn it, and drop their cached prefixes.
        Returns: the sums of Handover.wake_cache; sync/bytes, which leave all trainers together;
            sync/changed_frac, if the push sent only changes: changed elements of all elements;
            sync/seconds and sync/gb_per_s (1e9 bytes), by this rank's clock, from when all ranks
            have arrived.
        Raises: RuntimeError on every rank when a checksum differs, or an engine's loader fails.
        """
        if self.mode == "idle":
            return {}
        is_first = self._pushes == 0
        pushed = self._first if is_first else self._later
        # This wait has a name of its own, so that sync/seconds leaves out the others' work.
        with self._world.watch.wait("await peers", version):
            await_all(group=self._world.control)
        with self._world.watch.wait("push", version):
            began = time.perf_counter()
            self._handover.wake_weights()
            moved = []
            for tensors in pushed:
                moved.append(tensors.move())
                if tensors not in self._later:  # only the first push moves them
                    tensors.release()
            if self.mode == "traced":
                is_same = self._engine_pointers() == self._pointers
                assert is_same, "an engine's parameters have moved"
            woken = self._handover.wake_cache()
            if self._world.device.type == "cuda":
                torch.cuda.synchronize(self._world.device)
        seconds = time.perf_counter() - began
        nbytes = sum(own.nbytes for own in moved)
        changed = sum(own.changed for own in moved)
        compared = sum(own.compared for own in moved)
        if self._world.is_inference:
            self._engine.weights_changed(version)
        self._pushes += 1
        every = self._cfg.verify_every
        if is_first or (every and self._pushes % every == 0):
            # A full push can mend an error of a push of changes.
            self._prove(version, may_push_again=compared > 0)
        if compared:
            woken["sync/changed_frac"] = (float(changed), float(compared))
        return woken | {
            "sync/bytes": (float(nbytes), 1.0),
            "sync/seconds": (seconds, 1.0),
            "sync/gb_per_s": (nbytes / 1e9, seconds),
        }

    def verify(self, version: int) -> None:
        """Compare checksums of what trainers hold with what engines hold, slice by slice.

        In reload mode every tensor is loaded once more, over flipped bits: tensors that arrived as
        they were sent must give the same parameters. Then the last probe is repeated, because vLLM
        may derive other tensors from the parameters.

        Raises: RuntimeError on every rank, naming engine, tensor and both sums.
        """
        self._prove(version, may_push_again=False)

    def _prove(self, version: int, *, may_push_again: bool) -> None:
        """Verify a push. Args: may_push_again: where sums differ, send everything once more."""
        problems = self._differences(version)
        if problems and may_push_again:
            log.warning(
                "push %d: after a push of what changed, engine weights differ from the trainers'; "
                "everything is sent again\n%s",
                version,
                bullet_list(problems),
            )
            with self._world.watch.wait("push", version):
                for tensors in self._later:
                    tensors.move(is_full=True)
            problems = self._differences(version)
        if problems:
            raise RuntimeError(
                f"push {version}: engine weights differ from the trainers'\n{bullet_list(problems)}"
            )
        if self.mode == "reload":
            if self._world.is_inference:
                self._engine.weights_changed(version)
            self.probe(self._probed, version=version)

    def _differences(self, version: int) -> list[str]:
        """Return what differs, on every rank."""
        with self._world.watch.wait("verify push", version):
            problems = []
            for tensors in self._first:
                problems += tensors.differences()
        return problems

    def probe(self, sequences: Sequence[Sequence[int]], *, version: int = 0) -> Sums:
        """Score token sequences by engines and trainers and compare.

        Args:
            sequences: token ids, the same on every rank; TokenIds where they show something.
            version: of the weights, for messages.
        Returns: sync/probe_gap: (sum of |engine - trainer| logprob in nats, tokens), over all
            replicas; sync/probe_limit: (the mean that is allowed, 1); equal on every rank.
        Raises: RuntimeError on every rank when the mean is above what `stream.max_logprob_gap`
            allows, or not a number.
        """
        if self.mode == "idle" or not sequences:
            return {}
        world = self._world
        self._probed = sequences
        with world.watch.wait("probe", version):
            halves = [] if self._cfg.max_logprob_gap else first_halves(sequences)
            engine = Scores()
            trainer = Scores()
            if world.is_inference:
                engine = Scores(self._engine.score(sequences), self._engine.score(halves))
            if world.is_trainer:
                trainer = Scores(self._sent.score(sequences), self._sent.score(halves))
            return probe_gap(
                engine,
                trainer,
                limit=self._cfg.max_logprob_gap,
                version=version,
                gap_cause=self._engine.gap_cause,
                world=world,
            )

    # ---------------------------------------------------------------- construction

    def _plan(self) -> None:
        """Choose the mode, and plan the pushes of weights and adapters."""
        sent = self._sent
        world = self._world
        live = LiveShards(sent.shards, sent.parts, deltas=sent.deltas)
        copies, reasons = self._trace()
        problems = gather_problems(reasons, group=world.control)
        if self._cfg.mode == "traced" and problems:
            raise Refusal(
                f"stream.mode is traced, but these engine parameters cannot be "
                f"written in place; use auto or reload\n{bullet_list(problems)}"
            )
        if problems:
            log.warning(
                "weight stream: falling back to vLLM's own reloading, which is slower, because\n%s",
                bullet_list(problems),
            )
        self.mode = "reload" if self._cfg.mode == "reload" or problems else "traced"
        if self.mode == "reload" and self._cfg.delta == "always":
            raise Refusal(
                "stream.delta: always, but this engine's weights cannot be written in place (the "
                "log says why), and its own loader takes whole tensors; take auto or never"
            )
        if self.mode == "reload" and sent.adapter is not None:
            raise Refusal(
                "model.lora.push: adapter, but this engine's weights cannot be "
                "written in place (the log says why); push merged"
            )
        # An engine that shares its devices drops its weights while it sleeps, also frozen ones.
        keeps_weights = not world.cfg.layout.roles.shares_devices
        self._weights: TracedTensors | ReloadedTensors
        if self.mode == "reload":
            names = sent.reloaded_names(getattr(torch, world.cfg.engine.dtype))
            self._weights = ReloadedTensors(world, names=names, engine=self._engine, live=live)
        else:
            self._weights = TracedTensors(
                world,
                kind="weights",
                copies=copies,
                live=live,
                may_send_changes=keeps_weights and not sent.frozen and sent.adapter is None,
            )
        # What the first push moves, and what later ones do.
        self._first: list[TracedTensors | ReloadedTensors] = [self._weights]
        self._later = self._first
        if sent.adapter is not None:
            assert isinstance(self._engine, AdapterEngine)
            adapter = trace_adapter(sent.adapter, sent.shards, engine=self._engine, world=world)
            self._first = [self._weights, adapter]
            self._later = [adapter]
        elif self.mode == "traced" and sent.frozen and keeps_weights:
            changing = [copy for copy in copies if copy.name not in sent.frozen]
            self._later = [
                TracedTensors(
                    world, kind="changing", copies=changing, live=live, may_send_changes=True
                )
            ]

    def _trace(self) -> tuple[list[Copy], list[str]]:
        """Return the loader's copies on this rank, and the reasons against writing in place."""
        if not self._world.is_inference or self._cfg.mode == "reload":
            return [], []
        trace = trace_loader(self._engine.model, self._sent.names, load=self._engine.load_weights)
        if trace.reasons:
            return [], trace.reasons
        self._constants = trace.constants
        model = self._world.cfg.model
        reader = CheckpointReader(model_folder(model.path), part=model.part)
        return trace.copies, layout_problems(trace.copies, reader)

    def _engine_pointers(self) -> tuple[int, ...]:
        """Return the addresses of this rank's engine's parameters."""
        if not self._world.is_inference:
            return ()
        return tuple(p.data_ptr() for p in self._engine.model.parameters())


def _nbytes(pushed: Sequence[TracedTensors | ReloadedTensors]) -> int:
    """Return the bytes that leave all trainers together when these tensors are pushed."""
    return sum(plan.nbytes for tensors in pushed for plan in tensors.plans)
