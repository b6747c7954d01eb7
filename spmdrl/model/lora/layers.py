"""Low-rank adapters on the linear layers, experts and embedding of a model, put there from outside.

y = W x + scale * B A x, with A [r, in] and B [out, r]. A layer gets two children, lora_A and
lora_B, so a parameter's name is PEFT's without its prefix, and FSDP2 and tensor parallelism treat
them like any other. Fused experts, [E, out, in], get A [E, r, in] and B [E, out, r] beside each of
their parameters, so that whatever shards experts shards these alike; see expert_adapters.py. An
embedding [V, H] gets those of a linear layer with as many output features as there are tokens, of
which a token takes its row: A [r, H] and B [V, r].
Source: arXiv 2106.09685, section 4.1; rank-stabilised scale: 2312.03732.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.config import LoraSettings
from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.load import SCALAR_HEAD
from spmdrl.model.lora.expert_adapters import adaptable, add_to_experts
from spmdrl.model.lora.files import AdapterFolder
from spmdrl.model.shards import held_boxes, to_local

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoraForm:
    """What adapters of a model are like."""

    rank: int
    alpha: float
    targets: str | tuple[str, ...]
    use_rslora: bool = False
    init: str = "kaiming"
    path: str = ""
    """Folder that they start from; empty: from random numbers."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class SentAdapter:
    """Adapters that engines compute with themselves: A and scale * B travel, in their dtype."""

    shapes: Mapping[str, tuple[int, ...]]  # by name, of all matrices
    factors: Mapping[str, float]  # by name of each B: the scale


def lora_form(lora: LoraSettings) -> LoraForm | None:
    """Return the form that `model.lora` asks for; None when it is off: all weights train.

    Raises: ValueError when its `path` holds no adapter, or one that cannot be trained here.
    """
    if not lora.is_on:
        return None
    if lora.path:
        folder = AdapterFolder(Path(lora.path))
        return LoraForm(**folder.form, targets=folder.targets, path=lora.path)
    return LoraForm(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.targets,
        use_rslora=lora.use_rslora,
        init=lora.init,
    )


def pair_names(weight: str) -> tuple[str, str]:
    """Return the names of the matrices A and B of a live tensor `weight`."""
    layer = weight.removesuffix(".weight")
    if layer == weight:  # fused experts
        return f"{weight}_lora_A", f"{weight}_lora_B"
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


class Adapters:
    """The adapters of one model, all on or all off.

    Args:
        hf_model: a transformers model on the meta device, changed in place: its linear layers and
            embedding, if they are meant, get float32 children lora_A and lora_B, its experts
            parameters such as gate_up_proj_lora_A. Before tensor and expert parallelism.
        form: what they are like.
    Raises: ValueError for targets that match nothing, with the names that exist.
    """

    def __init__(self, hf_model: nn.Module, form: LoraForm):
        self.form, self.is_on = form, True
        self.targets = targeted(hf_model, form.targets)
        for module, key in self.targets.values():
            if key == "weight":
                rows, columns = module.weight.shape
                module.lora_A = nn.Linear(columns, form.rank, bias=False, device="meta")
                module.lora_B = nn.Linear(form.rank, rows, bias=False, device="meta")
                adapted = _adapted if isinstance(module, nn.Linear) else _adapted_rows
                module.forward = functools.partial(adapted, module, module.forward)
            else:
                add_to_experts(module, key, rank=form.rank)
            module.adapters = self
        self.weights = [_weight_name(name, key) for name, (_, key) in self.targets.items()]
        """Names of the live tensors that have adapters."""
        self._matrices = {
            name: part for weight in self.weights for part, name in zip("AB", pair_names(weight))
        }

    @property
    def names(self) -> list[str]:
        """The parameters' names, see pair_names."""
        return list(self._matrices)

    def summary(self) -> str:
        """Return rank and number, for messages."""
        experts = sum(key != "weight" for _, key in self.targets.values())
        embeddings = sum(isinstance(module, nn.Embedding) for module, _ in self.targets.values())
        places = [
            f"{len(self.targets) - experts - embeddings} linear layers",
            *([f"{experts} parameters of experts"] if experts else []),
            *(["the embedding"] if embeddings else []),
        ]
        return f"rank {self.form.rank} on {' and '.join(places)}"

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute what it would without adapters."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    @torch.no_grad()
    def fill(self, shards: Mapping[str, Tensor], *, seed: int) -> None:
        """Give this rank's shards their first values, the same on every layout.

        Args:
            shards: {name: DTensor or Tensor with storage}: the adapters, and a scalar head, which
                only a file gives another value.
            seed: keys the random numbers, together with the name.
        Raises: ValueError when form.path does not hold these tensors.
        """
        folder = AdapterFolder(Path(self.form.path)) if self.form.path else None
        if folder:
            folder.check({name: tuple(shards[name].shape) for name in self.names})
        for name, parameter in shards.items():
            whole = self._first(name, parameter, folder=folder, seed=seed)
            for box, view in held_boxes(name, parameter) if whole is not None else ():
                view.copy_(whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))])

    def _first(
        self, name: str, parameter: Tensor, *, folder: AdapterFolder | None, seed: int
    ) -> Tensor | None:
        if folder:
            return folder.read(name)
        part = self._matrices.get(name)
        if part == "A":
            return initial_a(name, tuple(parameter.shape), init=self.form.init, seed=seed)
        return torch.zeros(parameter.shape) if part == "B" else None


Targets = dict[str, tuple[nn.Module, str]]
"""{name: (module, its parameter)}: a linear layer or the embedding by its own name, with `weight`;
a parameter of fused experts by the parameter's name."""


def _weight_name(target: str, key: str) -> str:
    return f"{target}.weight" if key == "weight" else target


def targeted(hf_model: nn.Module, targets: str | tuple[str, ...]) -> Targets:
    """Return the linear layers, experts and embedding that `targets` mean; never the output head.

    Args:
        targets: `all-linear` for the layers and experts of the blocks; a regular expression of
            whole names; or names and ends of names, as PEFT's target_modules and
            target_parameters. A module of experts stands for all its parameters.
    Raises: ValueError for an entry that matches none, and for an embedding that cannot have one.
    """
    heads = (hf_model.get_output_embeddings(), getattr(hf_model, "score", None))
    known: Targets = {
        name: (module, "weight")
        for name, module in hf_model.named_modules()
        if isinstance(module, nn.Linear) and all(module is not h for h in heads)
    }
    experts = {
        f"{name}.{key}": (module, key)
        for name, module in experts_modules(hf_model).items()
        for key in adaptable(module)
    }
    embedding = hf_model.get_input_embeddings()
    known |= experts | {
        name: (module, "weight") for name, module in hf_model.named_modules() if module is embedding
    }
    if targets == "all-linear":
        inside = {id(m) for block in blocks(hf_model).values() for m in block.modules()}
        found = {name: place for name, place in known.items() if id(place[0]) in inside}
        if not found:
            raise _no_match("all-linear", known, hf_model)
        if rest := _others(hf_model, known):
            log.warning(
                "model.lora.targets: all-linear leaves out what is neither a linear layer "
                "nor experts that transformers computes fused: %s",
                ", ".join(rest),
            )
        return found
    names = {name: {name, name.rpartition(".")[0]} if name in experts else {name} for name in known}
    if isinstance(targets, str):
        matches = {
            targets: {
                name for name, own in names.items() if any(re.fullmatch(targets, n) for n in own)
            }
        }
    else:
        matches = {
            t: {
                name
                for name, own in names.items()
                if any(n == t or n.endswith(f".{t}") for n in own)
            }
            for t in targets
        }
    for target, hits in matches.items():
        if not hits:
            raise _no_match(target, known, hf_model)
    wanted = set().union(*matches.values())
    found = {name: place for name, place in known.items() if name in wanted}
    for name, (module, _) in found.items():
        if module is embedding and (problem := _why_no_rows(hf_model)):
            raise ValueError(
                f"model.lora.targets: {name} of {type(hf_model).__name__} {problem}; leave it out"
            )
    return found


def _why_no_rows(hf_model: nn.Module) -> str:
    """Return why the embedding can have no adapter; empty if it can."""
    if hf_model.config.tie_word_embeddings:
        return "is the output head too, which an adapter of the embedding alone would part from it"
    kind = type(hf_model.get_input_embeddings())
    return "" if kind is nn.Embedding else f"is a {kind.__name__}, which does more than look up"


def has_embedding(hf_model: nn.Module, form: LoraForm) -> bool:
    """Return whether the embedding is to have an adapter. Raises: as `targeted`."""
    return any(
        isinstance(module, nn.Embedding) for module, _ in targeted(hf_model, form.targets).values()
    )


def adapter_shapes(hf_model: nn.Module, form: LoraForm) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the matrices A and B that a model would get; it stays as it is.

    Raises: ValueError as `targeted` does.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (module, key) in targeted(hf_model, form.targets).items():
        *experts, rows, columns = getattr(module, key).shape
        a, b = pair_names(_weight_name(name, key))
        shapes |= {a: (*experts, form.rank, columns), b: (*experts, rows, form.rank)}
    return shapes


def sent_adapter(hf_model: nn.Module, lora: LoraSettings) -> SentAdapter | None:
    """Return what engines get of adapters under `push: adapter`; None where weights are merged.

    Args:
        lora: model.lora.
    Raises: ValueError as `lora_form` and `targeted` do.
    """
    if not lora.pushes_adapter:
        return None
    form = lora_form(lora)
    shapes = adapter_shapes(hf_model, form)
    return SentAdapter(shapes, {name: form.scale for name in shapes if "lora_B" in name})


def adapter_numel(hf_model: nn.Module, form: LoraForm) -> int:
    """Return the elements of all adapters that a model would get. Raises: as `targeted`."""
    return sum(math.prod(shape) for shape in adapter_shapes(hf_model, form).values())


def _no_match(target: str, known: Targets, hf_model: nn.Module) -> ValueError:
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in known)
    rest = ", ".join(_others(hf_model, known))
    return ValueError(
        f"model.lora.targets: {target!r} matches no linear layer of {type(hf_model).__name__}, and "
        f"no parameter of its experts; it has {', '.join(names) or 'none'}"
        + (f"; what is no matrix gets none: {rest}" if rest else "")
    )


def _others(hf_model: nn.Module, known: Targets) -> list[str]:
    """Return the parameters that are more than a matrix, and cannot be adapted, for messages."""
    return list(
        dict.fromkeys(
            re.sub(r"\.\d+\.", ".*.", name)
            for name, p in hf_model.named_parameters()
            if p.dim() > 2 and name not in known
        )
    )


def train_adapters_only(
    hf_model: nn.Module, adapters: Adapters, *, dtype: torch.dtype
) -> list[str]:
    """Freeze all but the adapters, and a scalar head, and keep what is frozen in `dtype`.

    Frozen weights in the compute dtype are what a forward pass would see of float32 ones.

    Returns: the names of what is trained.
    """
    names = {*adapters.names, SCALAR_HEAD}
    for name, parameter in hf_model.named_parameters():
        parameter.requires_grad = name in names
        parameter.data = parameter.data if name in names else parameter.data.to(dtype)
    trained = sum(p.numel() for p in hf_model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in hf_model.parameters())
    log.info("lora: %s: %d of %d parameters are trained", adapters.summary(), trained, total)
    return [name for name, parameter in hf_model.named_parameters() if parameter.requires_grad]


def initial_a(name: str, shape: tuple[int, ...], *, init: str, seed: int) -> Tensor:
    """Return the first value of an A: [r, in] or, of experts, [E, r, in] float32; a function of
    its arguments alone.

    Args:
        init: `kaiming`, uniform in +-1/sqrt(in), as PEFT and nn.Linear do; `gaussian`, of
            standard deviation 1/r, as PEFT does.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if init == "gaussian":
        return torch.empty(shape).normal_(std=1 / shape[-2], generator=generator)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def plus_adapter(module: nn.Linear, out: Tensor, *, x: Tensor) -> Tensor:
    """Add what a layer's adapter makes of x; `out` as it is where there is none, or it is off.

    Under tensor parallelism x and out are local, and so is one of A and B: the term is a part of
    the layer's output in the same way as `out`.

    Args:
        out: [.., out] = W x, and x [.., in], in the compute dtype.
    """
    adapters = getattr(module, "adapters", None)
    if adapters is None or not adapters.is_on:
        return out
    a, b = to_local(module.lora_A.weight), to_local(module.lora_B.weight)
    return out + F.linear(F.linear(x, a), b) * adapters.form.scale


def _adapted(module: nn.Linear, forward: Any, x: Tensor) -> Tensor:
    return plus_adapter(module, forward(x), x=x)


def _adapted_rows(module: nn.Embedding, forward: Any, ids: Tensor) -> Tensor:
    """Add the rows of B A to those of the weight, [.., H] from ids [..]; of own rows under tp."""
    out, adapters = forward(ids), module.adapters
    if not adapters.is_on:
        return out
    a, b = to_local(module.lora_A.weight), to_local(module.lora_B.weight)
    rows = F.embedding(ids, b, padding_idx=module.padding_idx)
    return out + F.linear(rows, a.t()) * adapters.form.scale
