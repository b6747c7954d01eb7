"""The policy's adapter as a LoRA of vLLM's own, which is written in place.

One LoRA of zeros is registered. It keeps vLLM's only slot, and every request to the policy names
it; one that does not is answered by the frozen weights. vLLM stacks the matrices of its slots per
layer, [slots, 1, rank or out, in or rank], in the engine's dtype, and multiplies x by A and B
without a scale: B is scaled before it is sent.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.vllm.expert_adapters import is_of_experts, load_experts, name_experts, stacks
from spmdrl.engine.vllm.internals import lora_rank, name_in_engine, register_adapter
from spmdrl.model.blocks import experts_modules
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.layers import lora_form
from spmdrl.model.lora.targets import pair_names, targeted


def lora_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for `model.lora.push: adapter`; {} without it.

    Only layers named like targets get memory for adapters. The head gets none: with an adapter of
    the head, vLLM's CPU build cannot return logprobs of prompts.
    """
    if not cfg.model.lora.pushes_adapter:
        return {}
    form = lora_form(cfg.model.lora)
    targets = targeted(build_meta_model(cfg.model), form.targets)
    # A parameter of experts is no layer of vLLM's: the layer is the experts' module.
    layers = [n if key == "weight" else n.rpartition(".")[0] for n, (_, key) in targets.items()]
    names = {name.rpartition(".")[2] for name in layers}
    if "shared_expert_gate" in names:  # vLLM computes it under this second name
        names.add("expert_gate")
    return dict(
        enable_lora=True,
        max_loras=1,
        max_cpu_loras=1,
        max_lora_rank=lora_rank(form.rank),
        lora_target_modules=sorted(names),
    )


def experts_in_files(cfg: Config) -> dict[str, str]:
    """Return {name of a live module of experts: what files, and so vLLM, call it}."""
    hf_model = build_meta_model(cfg.model)
    live = experts_modules(hf_model)
    if not live:
        return {}
    found = {}
    for name, part in file_tensors(hf_model).items():
        module = part.tensor.rpartition(".")[0]
        if module in live:  # files may have each expert's matrices by themselves
            found[module] = re.sub(r"(\.\d+)?\.\w+(\.weight)?$", "", name)
    return found


class AdapterSlot:
    """The slot of one engine.

    Args:
        runner: vLLM's model runner, which was built with `lora_arguments`.
        experts: of `experts_in_files`.
    """

    def __init__(self, runner: Any, experts: Mapping[str, str]):
        self._model = runner.get_model()
        self._experts = experts
        self.request, self._manager, self._slot = register_adapter(runner)

    def memory(self, names: Iterable[str]) -> nn.Module:
        """Return the parameters that matrices of these names are part of; see AdapterEngine."""
        wanted = {self._name(name) for name in names}
        memory = nn.Module()
        for layer, module in self._manager.modules.items():
            if not any(wanted.intersection(pair) for pair in self._pairs(layer)):
                continue
            for part in stacks(module):
                for index, stacked in enumerate(getattr(module, part)):
                    key = f"{layer}.{part}.{index}".replace(".", "/")
                    memory.register_parameter(key, nn.Parameter(stacked, requires_grad=False))
        return memory

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole matrices by name, as vLLM does for a LoRA from a folder."""
        tensors = {self._name(name): tensor for name, tensor in weights}
        for layer, module in self._manager.modules.items():
            pairs = [(tensors.get(a), tensors.get(b)) for a, b in self._pairs(layer)]
            if all(a is None for a, _ in pairs):
                continue
            if is_of_experts(module):
                load_experts(module, self._slot, pairs)
            elif layer in self._manager.packed_modules:
                module.set_lora(self._slot, [a for a, _ in pairs], [b for _, b in pairs])
            else:
                module.set_lora(self._slot, *pairs[0])

    def _name(self, name: str) -> str:
        module, _, rest = name.rpartition(".")
        if module in self._experts:
            name = f"{self._experts[module]}.{rest}"
        return name_in_engine(self._model, name)

    def _pairs(self, layer: str) -> list[tuple[str, str]]:
        """Return the names of A and B of each checkpoint layer that this layer fuses."""
        if is_of_experts(self._manager.modules[layer]):
            return [pair_names(f"{layer}.{key}") for key in ("gate_up_proj", "down_proj")]
        return [
            pair_names(f"{name}.weight")
            for name in self._manager.packed_modules.get(layer) or [layer]
        ]

    @contextlib.contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Put the model's own layers in the place of those with adapters: otherwise the model's
        `load_weights` does not find them."""
        layers = self._manager.modules
        for name, module in layers.items():
            self._model.set_submodule(name, module.base_layer)
            name_experts(module, is_wrapped=False)
        yield
        for name, module in layers.items():
            self._model.set_submodule(name, module)
            name_experts(module, is_wrapped=True)
