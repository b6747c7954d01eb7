"""The trainer's model inside vLLM, for engine.exact: vLLM schedules, keeps the cache and draws.

vLLM's own classes, and its Transformers backend too, put layers of its own in the place of a
model's, whose formulas differ. So vLLM gets a model from outside its tree, which holds the
transformers model as the trainers load it (documented: ModelRegistry.register_model), and a loader
that leaves the weights as they are (register_model_loader). Its attention is in paged.py.

Serves vLLM 0.32 and 0.33, on the CPU. Each line has the name here, vLLM's own, and when it can be
removed.

_layer_class        AttentionLayerBase, FullAttentionSpec       never: how models ask for a cache
_layer_class        AttentionBackend, AttentionMetadataBuilder  with it
ExactModel          VllmConfig, get_forward_context             never: documented
share_head          GPUModelRunner.get_model, Sampler.compute_logprobs, TopKTopPSampler.logprobs_of
                                                    once logprobs may be computed elsewhere
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.config import Config, ModelSettings
from spmdrl.engine.vllm.paged import PagedLayer, PagedStep, paged_attention
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.blocks import base_of
from spmdrl.model.exact.functions import compute_exactly
from spmdrl.model.exact.units import ALIGNED, padded
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.load import load_whole_model
from spmdrl.model.logit_passes import LogitForm, log_probs
from spmdrl.model.scorer import head_form
from spmdrl.model.tensor_parts import Held

_MODEL = "SpmdrlExactForCausalLM"
_FORMAT = "spmdrl_loaded"
_ATTENTION = "spmdrl_paged"


def exact_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs with which it runs the model of a config."""
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(_FORMAT)
    class LoadedLoader(BaseModelLoader):
        """Leaves a model as it is: it has read its weights."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Do nothing."""

    class ModelOfRun(ExactModel):
        settings = cfg.model

    ModelRegistry.register_model(_MODEL, ModelOfRun)
    return {"load_format": _FORMAT, "hf_overrides": {"architectures": [_MODEL]}}


def share_head(runner: Any) -> None:
    """Have the sampler of a model runner whose model is the trainer's compute logprobs as the
    trainer's head does."""
    if not isinstance(runner.get_model(), ExactModel):
        return
    runner.sampler.compute_logprobs = log_probs
    runner.sampler.topk_topp_sampler.logprobs_of = log_probs


class PagedModel(nn.Module):
    """A transformers model over paged caches, with the bits of the trainers' models.

    Args:
        settings: the config's model section.
        dtype: of weights and caches.
        layer_class: of its caches.
    """

    def __init__(
        self,
        settings: ModelSettings,
        *,
        dtype: torch.dtype,
        layer_class: type[PagedLayer] = PagedLayer,
    ):
        super().__init__()
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, paged_attention)
        with _float32_default():
            self.hf_model = load_whole_model(
                settings, attention=_ATTENTION, dtype=dtype, device=torch.device("cpu")
            )
            enable_packing(self.hf_model)
            form = head_form(self.hf_model)
        self._form = LogitForm(form.scale, form.softcap)
        _, self._base = base_of(self.hf_model)
        self._head = self.hf_model.get_output_embeddings()
        compute_exactly(self._base, self._head)
        self.layers: dict[str, PagedLayer] = {}
        """By name."""
        for index, (module, (key, value)) in enumerate(self._keys_and_values().items()):
            # vLLM reads the number of a layer in its name.
            module.paged_layer = layer_class(f"layers.{index}.attention", key, value)
            self.layers[module.paged_layer.name] = module.paged_layer

    def _keys_and_values(self) -> dict[Any, tuple[Tensor, Tensor]]:
        """Return keys and values of one token by attention module, in the order of the layers."""
        from transformers import AttentionInterface

        found: dict[Any, tuple[Tensor, Tensor]] = {}

        def note(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, None]:
            found[module] = (key, value)
            return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None

        AttentionInterface.register(_ATTENTION, note)
        try:
            zero = torch.zeros(1, dtype=torch.int64)
            with torch.no_grad():
                self.states(zero, zero, None)
        finally:
            AttentionInterface.register(_ATTENTION, paged_attention)
        return found

    def states(self, ids: Tensor, positions: Tensor, work: PagedStep | None) -> Tensor:
        """Return the hidden states [T, H] of tokens [T]; None for `work` caches nothing."""
        # Padded once here, products need no padding of their own.
        missing = padded(len(ids), ALIGNED) - len(ids)
        states = self._base(
            input_ids=F.pad(ids, (0, missing))[None],
            position_ids=F.pad(positions, (0, missing))[None],
            attention_mask=None,
            use_cache=False,
            work=work,
        ).last_hidden_state[0]
        return states[: len(ids)]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [n, V] float32 of hidden states [n, H]."""
        return self._form.logits(self._head(hidden_states))


class ExactModel(PagedModel):
    """A PagedModel in vLLM's form."""

    settings: ModelSettings
    """The config's model section."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        dtype = vllm_config.model_config.dtype
        super().__init__(self.settings, dtype=dtype, layer_class=_layer_class())
        self._held = Held(live_tensors(self.hf_model), file_tensors(self.hf_model))
        vllm_config.compilation_config.static_forward_context.update(self.layers)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of ids; vLLM asks every model for it."""
        return self.hf_model.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Tensor:
        """Return the hidden states of a packed row of tokens, [T, H].

        Args:
            input_ids, positions: [T].
            intermediate_tensors, inputs_embeds: None, for a text model on one rank.
        """
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a warm-up, whose output is not used
            return self.embed_input_ids(input_ids)
        return self.states(input_ids.long(), positions, PagedStep(metadata))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write whole tensors by checkpoint name into the live model; return all names.

        Raises: Refusal for a name that the model does not have.
        """
        return self._held.write(weights, model=self.hf_model)


@contextlib.contextmanager
def _float32_default() -> Iterator[None]:
    """Build as trainers do: vLLM's default is the engine's dtype while it builds a model."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _layer_class() -> type[PagedLayer]:
    """Return PagedLayer as a layer of vLLM, which gives it a cache and metadata of each pass."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

    class Builder(AttentionMetadataBuilder):
        def __init__(self, *args: Any):
            super().__init__(*args)

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            return common_attn_metadata

    class Backend(AttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "SPMDRL_PAGED"

        @staticmethod
        def get_impl_cls() -> Any:
            return None

        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
            return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)  # a block is dense in both

    class Layer(PagedLayer, AttentionLayerBase):
        def get_attn_backend(self) -> type[Backend]:
            return Backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            """Return the cache that this layer needs."""
            # Layers with windows too keep all keys: their masks leave out the older ones.
            return FullAttentionSpec(
                block_size=vllm_config.cache_config.block_size,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_dim,
                head_size_v=self.value_dim,
                dtype=self.dtype,
            )

    return Layer
