"""Low-rank adapters on the linear layers, experts and embedding of a transformers model.

y = W x + scale * B A x, with A [r, in] and B [out, r]. A layer gets two children, lora_A and
lora_B. So a parameter's name is PEFT's without its prefix, and FSDP2 and tensor parallelism shard
it like any other. Fused experts, [E, out, in], get A [E, r, in] and B [E, out, r] for each of their
parameters, which are sharded as the experts are; see expert_adapters.py. An embedding [V, H] gets A
[r, H] and B [V, r], as a linear layer with V output features; a token takes its row.
Source: arXiv 2106.09685, section 4.1; rank-stabilised scale: 2312.03732.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.config import LoraSettings
from spmdrl.model.load import SCALAR_HEAD
from spmdrl.model.lora.expert_adapters import add_to_experts
from spmdrl.model.lora.files import AdapterFolder
from spmdrl.model.lora.targets import (
    LoraForm,
    SentAdapter,
    adapter_shapes,
    pair_names,
    targeted,
    weight_name,
)
from spmdrl.model.tensor_parts import held_boxes, to_local

log = logging.getLogger(__name__)


class Adapters:
    """The adapters of one model, all on or all off.

    Args:
        hf_model: a transformers model on the meta device, changed in place, before tensor and
            expert parallelism. Targeted linear layers and embeddings get float32 children lora_A
            and lora_B, experts get parameters such as gate_up_proj_lora_A.
        form: settings of the adapters.
    Raises: Refusal for targets that match nothing, with the names that exist.
    """

    def __init__(self, hf_model: nn.Module, form: LoraForm):
        self.form = form
        self.is_on = True
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
        self.weights = [weight_name(name, key) for name, (_, key) in self.targets.items()]
        """Names of live tensors with adapters."""
        self._matrices = {
            name: part for weight in self.weights for part, name in zip("AB", pair_names(weight))
        }

    @property
    def names(self) -> list[str]:
        """The parameters' names, see pair_names."""
        return list(self._matrices)

    def summary(self) -> str:
        """Return the rank and the number of adapters, for messages."""
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
        """Switch the adapters off inside a `with` block."""
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
        Raises: Refusal when form.path does not hold these tensors.
        """
        folder = AdapterFolder(Path(self.form.path)) if self.form.path else None
        if folder:
            folder.check({name: tuple(shards[name].shape) for name in self.names})
        for name, parameter in shards.items():
            whole = self._first(name, parameter, folder=folder, seed=seed)
            if whole is None:
                continue
            for box, view in held_boxes(name, parameter):
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


def train_adapters_only(
    hf_model: nn.Module, adapters: Adapters, *, dtype: torch.dtype
) -> list[str]:
    """Freeze all parameters but adapters and a scalar head, and cast the frozen ones to `dtype`.

    A forward pass would cast float32 weights to the same values.

    Returns: the names of the trained parameters.
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
    """Return the initial value of a matrix A, [r, in] or for experts [E, r, in], float32.

    It depends on the arguments only, not on the layout.

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
    """Add the output of a layer's adapter to `out`; return `out` if there is none or it is off.

    Under tensor parallelism x and out are local, and so is one of A and B: the sum is local in the
    same way as `out`.

    Args:
        out: [.., out] = W x, and x [.., in], in the compute dtype.
    """
    adapters = getattr(module, "adapters", None)
    if adapters is None or not adapters.is_on:
        return out
    a = to_local(module.lora_A.weight)
    b = to_local(module.lora_B.weight)
    return out + F.linear(F.linear(x, a), b) * adapters.form.scale


def _adapted(module: nn.Linear, forward: Any, x: Tensor) -> Tensor:
    return plus_adapter(module, forward(x), x=x)


def _adapted_rows(module: nn.Embedding, forward: Any, ids: Tensor) -> Tensor:
    """Add the rows of B A to those of the weight: [.., H] for ids [..], which are local under
    tp."""
    out = forward(ids)
    adapters = module.adapters
    if not adapters.is_on:
        return out
    a = to_local(module.lora_A.weight)
    b = to_local(module.lora_B.weight)
    rows = F.embedding(ids, b, padding_idx=module.padding_idx)
    return out + F.linear(rows, a.t()) * adapters.form.scale


def adapted_weights(hf_model: nn.Module, lora: LoraSettings) -> set[str]:
    """Return the names of the live tensors that get adapters; none if model.lora is off.

    Raises: Refusal as `lora_form` and `targeted` do.
    """
    if not lora.is_on:
        return set()
    found = targeted(hf_model, lora_form(lora).targets)
    return {weight_name(name, key) for name, (_, key) in found.items()}


def lora_form(lora: LoraSettings) -> LoraForm:
    """Return the settings of adapters from `model.lora`, which must be on.

    Raises: Refusal when its `path` holds no adapter, or one that cannot be trained here.
    """
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


def sent_adapter(hf_model: nn.Module, lora: LoraSettings) -> SentAdapter | None:
    """Return the adapters that engines receive under `push: adapter`; None if weights are merged.

    Args:
        lora: model.lora.
    Raises: Refusal as `lora_form` and `targeted` do.
    """
    if not lora.pushes_adapter:
        return None
    form = lora_form(lora)
    shapes = adapter_shapes(hf_model, form)
    return SentAdapter(shapes, {name: form.scale for name in shapes if "lora_B" in name})
