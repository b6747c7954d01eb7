"""What `model.lora` asks for: the form of the adapters, and what of them engines get."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from spmdrl.config import LoraSettings
from spmdrl.model.lora.files import AdapterFolder
from spmdrl.model.lora.targets import LoraForm, SentAdapter, adapter_shapes


def lora_form(lora: LoraSettings) -> LoraForm:
    """Return the form that `model.lora`, which is on, asks for.

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
    """Return what engines get of adapters under `push: adapter`; None where weights are merged.

    Args:
        lora: model.lora.
    Raises: Refusal as `lora_form` and `targeted` do.
    """
    if not lora.pushes_adapter:
        return None
    form = lora_form(lora)
    shapes = adapter_shapes(hf_model, form)
    return SentAdapter(shapes, {name: form.scale for name in shapes if "lora_B" in name})
