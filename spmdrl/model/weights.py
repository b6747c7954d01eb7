"""The policy's weights as the engines are to get them: names on every rank, values on trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from spmdrl.config import LoraSettings
from spmdrl.model.file_tensors import file_tensors, live_tensors
from spmdrl.model.lora.merge import deltas
from spmdrl.model.lora.settings import sent_adapter
from spmdrl.model.shards import Delta

if TYPE_CHECKING:
    from spmdrl.model.sharded import ShardedModel


class SentWeights:
    """What travels from one model to engines; all that the weight stream knows of the trainers.

    Args:
        hf_model: the model on the meta device, as it was built.
        lora: model.lora.
    Raises: Refusal for files that are no parts of the model's tensors, or LoRA targets that
        match nothing.
    """

    def __init__(self, hf_model: nn.Module, lora: LoraSettings):
        live = live_tensors(hf_model)
        self.parts = file_tensors(hf_model)
        """{name in the safetensors files: part of a live tensor}."""
        self.names = {
            name: (tuple(part.shape), live[part.tensor].dtype) for name, part in self.parts.items()
        }
        """{name in the safetensors files: (shape, float32)}."""
        self.adapter = sent_adapter(hf_model, lora)
        """Adapters that travel instead of merged weights; their matrices are in `shards`."""
        self.model: ShardedModel | None = None
        """On trainers, once it is built."""

    def shards(self) -> dict[str, Tensor]:
        """Return {live name: DTensor, or plain buffer}, see ShardedModel; {} off the trainers."""
        return self.model.named_shards() if self.model else {}

    def deltas(self) -> dict[str, Delta]:
        """Return {live name: what adapters add to it when it is sent}, {} where they travel by
        themselves. Trainer ranks call it together, before each push."""
        adapters = self.model.adapters if self.model and not self.adapter else None
        return deltas(adapters, self.shards()) if adapters else {}

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 logprobs at temperature 1, first 0; [] off the
        trainers, which call it together."""
        return self.model.score(sequences) if self.model else []
