"""Find out where an engine's loader puts each slice of each checkpoint tensor, by watching it once.

The engine's own `load_weights` runs with a placeholder (a meta tensor) per checkpoint name,
under a dispatch mode that keeps every write from happening and notes it instead: from which
box of which placeholder, into which view of which parameter. That holds for any architecture
and any tensor-parallel rank, without a table of fused layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.imports import attempt
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.shards import Box, box_within, extent
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.torch_internals import (
    LOCAL_SCALAR,
    TorchDispatchMode,
    is_write,
    storage_id,
    tree_leaves,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Copy:
    """One write of the loader."""

    name: str  # checkpoint tensor
    box: Box  # part of it that is read
    parameter: str  # engine parameter written to, for messages
    view: Tensor  # box.shape, engine's dtype: the part of that parameter, live


@dataclass
class Trace:
    """What the loader did. The copies are to be trusted only when there are no reasons."""

    copies: list[Copy] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Why these copies would not make up the whole model; each names an engine parameter."""


def trace_loader(
    model: nn.Module,
    names: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    *,
    load: Callable[[Iterator[tuple[str, Tensor]]], object],
) -> Trace:
    """Trace an engine's `load_weights` for checkpoint tensors of the given names; writes nothing.

    Args:
        model: an engine's live model (one tensor-parallel rank of it).
        names: checkpoint name -> (shape, dtype) of every tensor that will be sent.
        load: copies whole tensors by checkpoint name into that model.
    Returns: the copies and, when they do not cover every element of every parameter exactly
        once or the loader computes with the tensors, the reasons.
    """
    placeholders = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in names.items()
    }
    watcher = _Watcher(model, placeholders)
    with torch.no_grad(), watcher:
        # A model's loader may raise anything; falling back is the answer.
        _, error = attempt(lambda: load(iter(placeholders.items())), Exception)
    if error:
        watcher.trace.reasons.append(
            f"load_weights of {type(model).__name__} on the live model failed at "
            f"{watcher.last}: {first_line(error)}"
        )
    else:
        watcher.trace.reasons += watcher.uncovered(model) + derived_tensors(model)
    return watcher.trace


def derived_tensors(model: nn.Module) -> list[str]:
    """Name tensors that a module keeps beside its parameters and buffers, made after loading.

    A write in place would leave such a copy (MLA's absorbed projections, say) stale.
    """
    reasons = []
    known = {storage_id(t) for t in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.dim() > 1
                and name != "kv_cache"
                and storage_id(value) not in known
            ):
                reasons.append(
                    f"{path}.{name}: is a {list(value.shape)} tensor made after "
                    "loading, which a write in place does not reach"
                )
    return reasons


class _Watcher(TorchDispatchMode):
    """Notes writes into a model's parameters instead of doing them."""

    def __init__(self, model: nn.Module, placeholders: Mapping[str, Tensor]):
        super().__init__()
        self.trace, self.last = Trace(), "its start"
        self._sources = {storage_id(t): (name, t) for name, t in placeholders.items()}
        self._computed: dict[int, str] = {}  # storage -> what it was computed by
        self._cloned: set[int] = set()  # storages of which there are copies, as views
        self._zeros: set[int] = set()  # storages that the loader made zero as a whole
        self._kept: list[Tensor] = []  # storages must outlive their ids
        self._scalars: dict[float, tuple[str, Box]] = {}
        # A loader may write persistent buffers too, but need not: some are of the engine's own.
        self._by_name = {name: tensor.data for name, tensor in live_tensors(model).items()}
        self._needed = {name for name, _ in model.named_parameters()}
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in self._by_name.items():
            self._parameters.setdefault(storage_id(parameter), []).append((name, parameter))
        self._written: dict[str, list[Box]] = {}
        self._filled: dict[str, list[Box]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is LOCAL_SCALAR and storage_id(args[0]) in self._sources:
            return self._scalar(args[0])
        target = self._target(func, args)
        if target is not None:
            self._write(func, args, name=target)
            return args[0]
        if func is aten.clone.default and storage_id(args[0]) in self._sources:
            # What is only put in another order of memory is still what it was.
            self._cloned.add(storage_id(args[0]))
            return aten.alias.default(args[0])
        result = func(*args, **kwargs)
        if is_write(func) and args and isinstance(args[0], Tensor):
            self._overwritten(func, args[0])
        self._follow(func, args, result=result)
        return result

    def _target(self, func: Any, args: Any) -> str | None:
        """Return the parameter that this operation writes into, if any."""
        if not (is_write(func) and args and isinstance(args[0], Tensor)):
            return None
        own = self._parameters.get(storage_id(args[0]))
        if own is None:
            return None
        first = args[0].storage_offset()
        for name, parameter in own:
            low = parameter.storage_offset()
            if low <= first <= low + extent(parameter):
                return name
        return own[0][0]

    def _write(self, func: Any, args: Any, *, name: str) -> None:
        if args[0].numel() == 0:
            return  # padding of no rows
        inside = box_within(args[0], self._by_name[name])
        if inside is None:
            self._refuse(name, f"{func} writes a part that is not a box of it")
        elif func is aten.copy_.default and storage_id(args[1]) in self._sources:
            self._copy(args[0], args[1], name=name, inside=inside)
        elif func is aten.fill_.Scalar and args[1] in self._scalars:
            source, box = self._scalars[args[1]]
            self._note(Copy(source, box, name, args[0].reshape(box.shape)), inside)
        elif (
            func in (aten.fill_.Scalar, aten.zero_.default)
            or self._is_constant(func, args)
            or (func is aten.copy_.default and storage_id(args[1]) in self._zeros)
        ):
            self._filled.setdefault(name, []).append(inside)
            if any(inside.intersect(box) for box in self._written.get(name, ())):
                self._refuse(name, f"{func} overwrites what was loaded")
        else:
            made = self._computed.get(storage_id(args[1])) if func is aten.copy_.default else None
            self._refuse(name, f"is written from {made}" if made else f"is changed by {func}")

    def _overwritten(self, func: Any, target: Tensor) -> None:
        """Take note that the loader writes into what it was given: no longer the checkpoint's."""
        key = storage_id(target)
        source = self._sources.pop(key, None)
        if source is None:
            return
        name, whole = source
        self._kept.append(whole)
        is_whole = target.numel() == whole.numel() and key not in self._cloned
        if func is aten.zero_.default and is_whole:
            self._zeros.add(key)
        else:
            self._computed[key] = f"{func} of {name}"

    def _is_constant(self, func: Any, args: Any) -> bool:
        """Whether this is `part[i] = number`, of no checkpoint tensor."""
        known = self._sources.keys() | self._computed.keys()
        return func is aten.fill_.Tensor and storage_id(args[1]) not in known

    def _copy(self, target: Tensor, source: Tensor, *, name: str, inside: Box) -> None:
        key, whole = self._sources[storage_id(source)]
        self.last = f"{name} (from {key})"
        box = box_within(source, whole)
        if box is None or target.numel() != source.numel():
            self._refuse(name, f"takes a part of {key} that is not a box, or repeats it")
            return
        if target.shape != source.shape:
            target = target.view(source.shape)
        # Dims in the order in which the source lies in the checkpoint tensor.
        order = sorted(range(source.dim()), key=lambda d: -source.stride(d))
        try:
            view = target.permute(order).view(box.shape)
        except RuntimeError:
            self._refuse(name, f"takes {key} in another order of elements")
            return
        self._note(Copy(key, box, name, view), inside)

    def _note(self, copy: Copy, inside: Box) -> None:
        if any(inside.intersect(box) for box in self._written.get(copy.parameter, ())):
            self._refuse(
                copy.parameter,
                f"{inside.numel} elements are written twice, the second time from {copy.name}",
            )
        self._written.setdefault(copy.parameter, []).append(inside)
        self.trace.copies.append(copy)

    def _refuse(self, parameter: str, why: str) -> None:
        self.trace.reasons.append(f"{parameter}: {why}")

    def _scalar(self, source: Tensor) -> float:
        # A number that occurs nowhere else, so that a later fill_ with it can be told apart.
        key, whole = self._sources[storage_id(source)]
        value = 1.0 + math.pi * 2.0**-20 * (len(self._scalars) + 1)
        box = box_within(source, whole)
        assert box is not None, "a single element is a box"
        self._scalars[value] = (key, box)
        return value

    def _follow(self, func: Any, args: Any, *, result: Any) -> None:
        """Remember results that were computed from placeholders, for the message."""
        used = [storage_id(t) for t in tree_leaves(args) if isinstance(t, Tensor)]
        origin = next((self._sources[key][0] for key in used if key in self._sources), None)
        made = next((self._computed[key] for key in used if key in self._computed), None)
        if origin is None and made is None:
            return
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and storage_id(t) not in self._sources:
                self._computed.setdefault(storage_id(t), made or f"{func} of {origin}")
                self._kept.append(t)

    def uncovered(self, model: nn.Module) -> list[str]:
        """Say which elements of which parameters no write reaches."""
        reasons = [
            f"{name}: the loader replaces it by another tensor"
            for name, p in model.named_parameters()
            if storage_id(p) not in self._parameters
        ]
        for name, parameter in self._by_name.items():
            if name not in self._needed:
                continue
            rest = [Box.whole(parameter.shape)]
            for box in self._written.get(name, []) + self._filled.get(name, []):
                rest = [part for old in rest for part in old.minus(box)]
            count = sum(box.numel for box in rest)
            if count:
                reasons.append(
                    f"{name}: {count} of {parameter.numel()} elements are not loaded from any "
                    f"checkpoint tensor, the first at {list(min(rest).start)}"
                )
        return reasons
