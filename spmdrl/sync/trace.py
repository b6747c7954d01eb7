"""Find out where an engine's loader puts each slice of each checkpoint tensor, by watching it once.

The engine's own `load_weights` runs with a placeholder (a meta tensor) per checkpoint name,
under a dispatch mode that records every write instead of doing it: from which box of which
placeholder, into which view of which parameter. That works for any architecture and any
tensor-parallel rank, without a table of fused layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.imports import attempt
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.tensor_parts import Box, box_within, extent, narrow
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
    """What the loader did. Use the copies only when there are no reasons against it."""

    copies: list[Copy] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    """Live views of what the loader set to a constant, and no copy writes."""
    reasons: list[str] = field(default_factory=list)
    """Why these copies would not give the whole model; each names an engine parameter."""


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
    placeholders = {}
    for name, (shape, dtype) in names.items():
        placeholders[name] = torch.empty(shape, dtype=dtype, device="meta")
    watcher = _Watcher(model, placeholders)
    with torch.no_grad(), watcher:
        # A model's loader may raise anything. The caller then falls back to reloading.
        _, error = attempt(lambda: load(iter(placeholders.items())), Exception)
    if error:
        watcher.trace.reasons.append(
            f"load_weights of {type(model).__name__} on the live model failed at "
            f"{watcher.last}: {first_line(error)}"
        )
    else:
        watcher.trace.constants = watcher.constants()
        watcher.trace.reasons += watcher.replaced_parameters(model)
        watcher.trace.reasons += watcher.unwritten_parameters()
        watcher.trace.reasons += derived_tensors(model)
    return watcher.trace


def derived_tensors(model: nn.Module) -> list[str]:
    """Name tensors that a module made after loading and keeps beside its parameters and buffers.

    A write in place would leave such a copy (MLA's absorbed projections, say) stale.
    """
    reasons = []
    known = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
    """Records writes into a model's parameters instead of doing them.

    Args:
        placeholders: {checkpoint name: meta tensor}.
    """

    def __init__(self, model: nn.Module, placeholders: Mapping[str, Tensor]):
        super().__init__()
        self.trace = Trace()
        self.last = "its start"
        """What the loader did last, for messages."""

        # What the loader reads. A storage is known by its id, which stays its own while the
        # storage lives: _alive holds those that the loader may drop.
        self._sources = {}
        for name, placeholder in placeholders.items():
            self._sources[storage_id(placeholder)] = (name, placeholder)
        self._computed: dict[int, str] = {}  # {storage: the operation that computed it}
        self._cloned: set[int] = set()  # storages that a clone shares, see __torch_dispatch__
        self._zeros: set[int] = set()  # storages that the loader set to zero as a whole
        self._scalars: dict[float, tuple[str, Box]] = {}  # see _scalar
        self._alive: list[Tensor] = []

        # What the loader writes. Persistent buffers too, but it need not: some belong to the
        # engine alone.
        self._by_name = {name: tensor.data for name, tensor in live_tensors(model).items()}
        self._must_be_written = {name for name, _ in model.named_parameters()}
        self._by_storage: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in self._by_name.items():
            self._by_storage.setdefault(storage_id(parameter), []).append((name, parameter))
        self._written: dict[str, list[Box]] = {}  # {parameter: boxes copied from a checkpoint}
        self._filled: dict[str, list[Box]] = {}  # {parameter: boxes set to a constant}

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
            # A clone may order the memory otherwise, but the values stay those of the checkpoint:
            # a view stands for it, so that the loader's next operation is still seen as a copy.
            self._cloned.add(storage_id(args[0]))
            return aten.alias.default(args[0])
        result = func(*args, **kwargs)
        if is_write(func) and args and isinstance(args[0], Tensor):
            self._source_overwritten(func, args[0])
        self._note_computed(func, args, result=result)
        return result

    def _target(self, func: Any, args: Any) -> str | None:
        """Return the parameter that this operation writes into, if any."""
        if not (is_write(func) and args and isinstance(args[0], Tensor)):
            return None
        candidates = self._by_storage.get(storage_id(args[0]))
        if candidates is None:
            return None
        # Several parameters may share a storage: take the one in which the target begins.
        offset = args[0].storage_offset()
        for name, parameter in candidates:
            begin = parameter.storage_offset()
            if begin <= offset <= begin + extent(parameter):
                return name
        return candidates[0][0]

    def _write(self, func: Any, args: Any, *, name: str) -> None:
        """Record an operation that writes into the parameter `name`."""
        target = args[0]
        if target.numel() == 0:
            return  # padding of no rows
        inside = box_within(target, self._by_name[name])
        if inside is None:
            self._refuse(name, f"{func} writes a part that is not a box of it")
        elif func is aten.copy_.default and storage_id(args[1]) in self._sources:
            self._record_tensor(target, args[1], name=name, inside=inside)
        elif func is aten.fill_.Scalar and args[1] in self._scalars:
            source, box = self._scalars[args[1]]
            self._record(Copy(source, box, name, target.reshape(box.shape)), inside)
        elif self._is_constant(func, args):
            self._filled.setdefault(name, []).append(inside)
            if any(inside.intersect(box) for box in self._written.get(name, ())):
                self._refuse(name, f"{func} overwrites what was loaded")
        elif func is aten.copy_.default and storage_id(args[1]) in self._computed:
            self._refuse(name, f"is written from {self._computed[storage_id(args[1])]}")
        else:
            self._refuse(name, f"is changed by {func}")

    def _is_constant(self, func: Any, args: Any) -> bool:
        """Return whether this operation sets its target to a constant."""
        if func in (aten.fill_.Scalar, aten.zero_.default):
            return True
        if func is aten.copy_.default:
            return storage_id(args[1]) in self._zeros
        if func is aten.fill_.Tensor:  # part[i] = number, which no checkpoint tensor gave
            value = storage_id(args[1])
            return value not in self._sources and value not in self._computed
        return False

    def _source_overwritten(self, func: Any, target: Tensor) -> None:
        """If the loader writes into a placeholder, no longer take it for the checkpoint's."""
        key = storage_id(target)
        source = self._sources.pop(key, None)
        if source is None:
            return
        name, whole = source
        self._alive.append(whole)
        is_whole = target.numel() == whole.numel() and key not in self._cloned
        if func is aten.zero_.default and is_whole:
            self._zeros.add(key)
        else:
            self._computed[key] = f"{func} of {name}"

    def _record_tensor(self, target: Tensor, source: Tensor, *, name: str, inside: Box) -> None:
        """Record a copy of a part of a placeholder into the box `inside` of a parameter."""
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
        self._record(Copy(key, box, name, view), inside)

    def _record(self, copy: Copy, inside: Box) -> None:
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
        """Return what `source.item()` gives the loader: a number that occurs nowhere else.

        A later fill_ with that number is a copy of this element.
        """
        key, whole = self._sources[storage_id(source)]
        value = 1.0 + math.pi * 2.0**-20 * (len(self._scalars) + 1)
        box = box_within(source, whole)
        assert box is not None, "a single element is a box"
        self._scalars[value] = (key, box)
        return value

    def _note_computed(self, func: Any, args: Any, *, result: Any) -> None:
        """Remember that a result was computed from placeholders, for messages."""
        used = [storage_id(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        computed = [self._computed[key] for key in used if key in self._computed]
        names = [self._sources[key][0] for key in used if key in self._sources]
        if computed:
            made_by = computed[0]
        elif names:
            made_by = f"{func} of {names[0]}"
        else:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_id(leaf) not in self._sources:
                self._computed.setdefault(storage_id(leaf), made_by)
                self._alive.append(leaf)

    def constants(self) -> list[Tensor]:
        """Return the views of what was set to a constant, and not written later."""
        views = []
        for name, filled in self._filled.items():
            parameter = self._by_name[name]
            whole = Box.whole(parameter.shape)
            for box in _minus(filled, self._written.get(name, [])):
                views.append(narrow(parameter, outer=whole, part=box))
        return views

    def replaced_parameters(self, model: nn.Module) -> list[str]:
        """Name the parameters that are other tensors than before the load."""
        reasons = []
        for name, parameter in model.named_parameters():
            if storage_id(parameter) not in self._by_storage:
                reasons.append(f"{name}: the loader replaces it by another tensor")
        return reasons

    def unwritten_parameters(self) -> list[str]:
        """Name the parameters some of whose elements no write reaches."""
        reasons = []
        for name, parameter in self._by_name.items():
            if name not in self._must_be_written or self._is_view(name):
                continue
            known = self._written.get(name, []) + self._filled.get(name, [])
            rest = _minus([Box.whole(parameter.shape)], known)
            count = sum(box.numel for box in rest)
            if count:
                reasons.append(
                    f"{name}: {count} of {parameter.numel()} elements are not loaded from any "
                    f"checkpoint tensor, the first at {list(min(rest).start)}"
                )
        return reasons

    def _is_view(self, name: str) -> bool:
        """Return whether a parameter lies in the memory of another one that is written, as MLA's
        W_UV and W_UK_T lie in that of kv_b_proj. Then a write in place reaches it too."""
        parameter = self._by_name[name]
        begin = parameter.storage_offset()
        end = begin + extent(parameter)
        for other, whole in self._by_storage[storage_id(parameter)]:
            first = whole.storage_offset()
            last = first + extent(whole)
            is_dense = whole.numel() == last - first + 1
            is_inside = first <= begin and end <= last and whole.dtype == parameter.dtype
            if other != name and other in self._written and is_dense and is_inside:
                return True
        return False


def _minus(boxes: Sequence[Box], holes: Sequence[Box]) -> list[Box]:
    """Return boxes that cover what is in some of `boxes` and in none of `holes`."""
    rest = list(boxes)
    for hole in holes:
        remaining = []
        for box in rest:
            remaining += box.minus(hole)
        rest = remaining
    return rest
