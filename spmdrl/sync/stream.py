"""The weight stream: the trainers' current weights into the engines, once per step.

`WeightStream` traces, plans and proves at construction; `push` moves. Every rank calls each
method at the same place: all of them cross roles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.engine.handover import Handover
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.model.load import CheckpointReader, model_folder
from spmdrl.model.lora.layers import SentAdapter
from spmdrl.model.shards import Box, Delta, Held, Part, addresses
from spmdrl.sync.adapter import AdapterPush
from spmdrl.sync.plan import Plan, Want, make_plan
from spmdrl.sync.prove import layout_problems, parameter_checksums
from spmdrl.sync.trace import Copy, trace_loader
from spmdrl.sync.traced import TracedTensors
from spmdrl.sync.transfer import Transfer, make_gather_groups
from spmdrl.types import Sums
from spmdrl.world import World
from spmdrl.world.comm import agree, gather_objects, gather_problems
from spmdrl.world.watch import first_line

log = logging.getLogger(__name__)

_SHOWN = 8  # problems spelled out in a message


class Sender(Protocol):
    """What the stream asks of the policy."""

    def named_shards(self) -> Mapping[str, Tensor]:
        """Return live name -> this rank's live shard (trainer ranks)."""

    def parts(self) -> Mapping[str, Part]:
        """Return checkpoint name -> the part of a live tensor that it is (trainer ranks)."""

    def deltas(self) -> Mapping[str, Delta]:
        """Return live name -> what to add to it when it is sent, of the same names each time
        (trainer ranks, together, before each push)."""

    def adapter(self) -> SentAdapter | None:
        """Return the adapters that travel by themselves, if they do (every rank)."""

    def names(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return checkpoint name -> (shape, dtype) of the whole tensor (every rank)."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 logprobs, first 0 (trainer ranks, together)."""


class WeightStream:
    """Moves weights from trainer shards into engine storage.

    Construct it while the engines still hold what they loaded from `model.path`: that is what
    the proof of layout compares with.

    Args:
        policy: holds shards on trainer ranks, knows names on every rank.
        engine: holds a live model on inference ranks.
        world: the job; `world.cfg.stream` says how.
    Raises: ValueError on every rank, when `stream.mode` is `traced` and some engine parameter
        cannot be traced (it lists parameter and reason; with `auto` the log has that list), or
        when vLLM's own reloading is to be used and does not restore what the engine holds.
    """

    def __init__(self, policy: Sender, engine: EngineProtocol, world: World):
        self._policy, self._engine, self._world = policy, engine, world
        self._cfg, self.mode = world.cfg.stream, "idle"
        self._pushes, self.plans = 0, []
        self._weights: TracedTensors | None = None
        self._adapter: AdapterPush | None = None
        self._held, self._addresses = Held({}, {}), ()
        if not world.inference_ranks:
            return
        self._names = dict(policy.names())
        self._hold()
        with world.watch.wait("plan stream", -1):
            copies, reasons = self._trace()
            self.mode = self._agree_on_mode(reasons)
            if self.mode == "traced":
                self._weights = TracedTensors(
                    world,
                    shapes={name: shape for name, (shape, _) in self._names.items()},
                    copies=copies,
                    held=self._held,
                )
                self.plans = [self._weights.plan]
            else:
                self._prove_reloading()
                self.plans = self._reload_plans(
                    gather_objects(self._held.boxes(), group=world.control)
                )
                self._groups = make_gather_groups(self.plans[0])
            self._adapter = self._plan_adapter()
        self._pointers = self._engine_pointers()
        self._handover = Handover(engine, world)
        log.info(
            "weight stream: %s, %d bytes, buckets: %d",
            self.mode,
            self.nbytes,
            sum(plan.num_buckets for plan in self.plans),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that leave the trainers in one push, all of them together; where adapters travel
        by themselves, in one after the first."""
        return self._adapter.nbytes if self._adapter else self._weight_bytes

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
            bytes), by this rank's clock, which should start when the peers are there too
            (`World.agree_to_stop` sees to that); the bytes are those that leave the trainers of the
            whole world.
        Raises: RuntimeError on every rank when a checksum differs, or an engine's loader fails.
        """
        if self.mode == "idle":
            return {}
        began, nbytes = time.perf_counter(), self.nbytes
        with self._world.watch.wait("push", version):
            self._handover.wake_weights()
            if self._adapter is None:
                self._push_weights()
            else:
                if not self._pushes:  # they stay as they are
                    self._push_weights()
                    self._weights.release()
                    nbytes += self._weight_bytes
                self._adapter.push(self._policy.named_shards())
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

        Nothing is compared in reload mode: what vLLM makes of the tensors is its own affair.

        Raises: RuntimeError on every rank, naming engine, checkpoint tensor and both sums.
        """
        if self._weights is None:
            return
        with self._world.watch.wait("verify push", version):
            problems = self._weights.differences()
            problems += self._adapter.differences() if self._adapter else []
        _raise_if(problems, f"push {version}: engine weights differ from the trainers'")

    def probe(self, sequences: Sequence[Sequence[int]], *, version: int = 0) -> Sums:
        """Score token sequences by engines and trainers and compare.

        Args:
            sequences: token ids, the same on every rank.
            version: of the weights, for messages.
        Returns: sync/probe_gap: (sum of |engine - trainer| logprob in nats, tokens), over all
            replicas; equal on every rank.
        Raises: RuntimeError on every rank when the mean is above `stream.max_logprob_gap` or
            not a number.
        """
        if self.mode == "idle" or not sequences:
            return {}
        world = self._world
        with world.watch.wait("probe", version):
            of_engine = self._engine.score(sequences) if world.is_inference else None
            of_trainer = self._policy.score(sequences) if world.is_trainer else None
            scores = gather_objects(
                (of_engine and _flat(of_engine), of_trainer and _flat(of_trainer)),
                group=world.control,
            )
        trainer = next(t for _, t in scores if t is not None)
        gaps = torch.stack([(e - trainer).abs() for e, _ in scores if e is not None]).double()
        mean, limit = float(gaps.mean()), self._cfg.max_logprob_gap
        if not mean <= limit:
            engine = next(e for e, _ in scores if e is not None)
            raise RuntimeError(
                f"probe at version {version}: engine and trainer logprobs differ by {mean:.4g} "
                f"nats on average (largest {float(gaps.max()):.4g}), more than "
                f"stream.max_logprob_gap {limit:g}; mean logprob {float(engine.mean()):.4f} by "
                f"the engine, {float(trainer.mean()):.4f} by the trainer. The two do not compute "
                f"the same model: {self._suspects()}"
            )
        return {"sync/probe_gap": (float(gaps.sum()), float(gaps.numel()))}

    def _suspects(self) -> str:
        kind = self._world.cfg.engine.options.get("quantization")
        if kind:
            return (
                f"engine.options quantization {kind} may be all of it; then raise the limit, "
                "and keep an algorithm.correction"
            )
        return "compare dtypes and attention settings, or raise the limit"

    # ---------------------------------------------------------------- construction

    def _hold(self) -> None:
        """Take the trainer's shards anew if they have moved (a restored checkpoint may), and
        what is to be added to them."""
        if not self._world.is_trainer:
            return
        shards, deltas = self._policy.named_shards(), self._policy.deltas()
        if addresses(shards) != self._addresses:
            self._held = Held(shards, self._policy.parts())
            self._addresses = addresses(shards)
            if self._weights:
                self._weights.hold(self._held)
        self._held.deltas = dict(deltas)

    def _trace(self) -> tuple[list[Copy], list[str]]:
        if not self._world.is_inference or self._cfg.mode == "reload":
            return [], []
        trace = trace_loader(self._engine.model, self._names, load=self._engine.load_weights)
        if trace.reasons:
            return [], trace.reasons
        reader = CheckpointReader(model_folder(self._world.cfg.model.path))
        return trace.copies, layout_problems(trace.copies, reader)

    def _agree_on_mode(self, reasons: list[str]) -> str:
        if self._cfg.mode == "reload":
            return "reload"
        lines = gather_problems(reasons, group=self._world.control)
        if not lines:
            return "traced"
        shown = _shown(lines)
        if self._cfg.mode == "traced":
            raise ValueError(
                f"stream.mode is traced, but these engine parameters cannot be "
                f"written in place; use auto or reload\n{shown}"
            )
        log.warning(
            "weight stream: falling back to vLLM's own reloading, which is slower, because\n%s",
            shown,
        )
        return "reload"

    def _prove_reloading(self) -> None:
        """Have vLLM reload the very weights that the engine holds: nothing may change.

        On the CPU vLLM 0.32 fails this where it packs weights, as those of DeepSeek-V3's MLA.
        """
        changed = self._changed_by_reload() if self._world.is_inference else []
        lines = gather_problems(changed, group=self._world.control)
        if lines:
            raise ValueError(
                "weight stream: no way to update this engine. Its weights cannot be written in "
                "place, and vLLM's own reload of the weights that it already holds fails, or "
                f"changes parameters:\n{_shown(lines)}\nUse engine.kind transformers, a model "
                "without them, or another device or vLLM version"
            )

    def _changed_by_reload(self) -> list[str]:
        reader = CheckpointReader(model_folder(self._world.cfg.model.path))
        before = parameter_checksums(self._engine.model)
        try:
            self._engine.reload_weights(
                (name, reader.read(name, start=(0,) * len(shape), shape=tuple(shape)))
                for name, (shape, _) in self._names.items()
            )
        except Exception as error:  # anything that loading and repacking may do
            return [first_line(error)]
        after = parameter_checksums(self._engine.model)
        return [name for name in before if before[name] != after[name]]

    def _plan_adapter(self) -> AdapterPush | None:
        sent = self._policy.adapter()
        if sent is None:
            return None
        if self._weights is None:
            raise ValueError(
                "model.lora.push: adapter, but this engine's weights cannot be "
                "written in place (the log says why); push merged"
            )
        return AdapterPush(
            sent, self._policy.named_shards(), engine=self._engine, world=self._world
        )

    def _reload_plans(self, holders: list[dict[str, tuple[Box, ...]]]) -> list[Plan]:
        """Plan whole tensors to every inference rank, a bucket's worth of names at a time."""
        groups: list[list[Want]] = []
        size = self._cfg.bucket_bytes
        for name, (shape, dtype) in self._names.items():
            want = Want(
                name,
                Box((0,) * len(shape), tuple(shape)),
                str(dtype).removeprefix("torch."),
                dtype.itemsize,
            )
            nbytes = want.box.numel * want.itemsize
            if size + nbytes > self._cfg.bucket_bytes:
                groups, size = groups + [[]], 0
            groups[-1].append(want)
            size += nbytes
        inference = self._world.inference_ranks
        return [
            make_plan(
                holders,
                [group if rank in inference else [] for rank in range(self._world.world_size)],
                bucket_bytes=self._cfg.bucket_bytes,
            )
            for group in groups
        ]

    # ---------------------------------------------------------------- moving

    def _push_weights(self) -> None:
        self._hold()
        if self._weights is None:
            self._push_reloaded()
            return
        self._weights.move()
        assert self._engine_pointers() == self._pointers, "an engine's parameters have moved"

    def _push_reloaded(self) -> None:
        tensors = self._whole_tensors()
        with agree(group=self._world.control, kind=RuntimeError):
            try:
                if self._world.is_inference:
                    self._engine.reload_weights(tensors)
            except Exception as error:
                text = f"vLLM could not reload the weights: {type(error).__name__}: {error}"
                raise RuntimeError(text) from error
            finally:
                for _ in tensors:  # the others wait in these exchanges
                    pass

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every checkpoint tensor whole (on inference ranks), a plan's worth at a time."""
        device = self._world.device
        for plan in self.plans:
            wants = plan.receivers[0].wants if self._world.is_inference else ()
            # New memory each time: vLLM keeps tensors until their layer is complete.
            whole = [
                torch.empty(want.box.shape, dtype=getattr(torch, want.dtype), device=device)
                for want in wants
            ]
            Transfer(
                plan,
                rank=self._world.rank,
                device=device,
                source=self._held.value,
                targets=whole,
                groups=self._groups,
            ).run()
            yield from zip([want.name for want in wants], whole)

    def _engine_pointers(self) -> tuple[int, ...]:
        if not self._world.is_inference:
            return ()
        return tuple(p.data_ptr() for p in self._engine.model.parameters())


def _flat(scores: Sequence[Tensor]) -> Tensor:
    """Join scores without each sequence's first token, which has none."""
    return torch.cat([one[1:].float().cpu() for one in scores])


def _shown(lines: Sequence[str]) -> str:
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"  - {line}" for line in lines[:_SHOWN]] + more)


def _raise_if(problems: Sequence[str], what: str) -> None:
    if problems:
        raise RuntimeError(f"{what}\n{_shown(problems)}")
