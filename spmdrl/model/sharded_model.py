"""A transformers model over the trainer mesh: this rank's shards and a packed forward pass.

Policy, reference, teacher, value model and reward model are all of this class. They are sharded in
the same way, and loaded without any rank holding a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.columns import Columns
from spmdrl.config import Config, LoraSettings, ModelSettings
from spmdrl.errors import Refusal
from spmdrl.model.attention.flash_3 import choose_flash
from spmdrl.model.attention.kernels import PADDING, register_attention
from spmdrl.model.attention.packing import packs
from spmdrl.model.attention.packing_support import PackingSupport, enable_packing
from spmdrl.model.attention.pick import kernel_of
from spmdrl.model.blocks import experts_parameters, layers_of
from spmdrl.model.divisibility import context_method, misfits
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.head import logprobs_and_entropy
from spmdrl.model.load import (
    build_meta_model,
    check_weights,
    compute_buffers,
    model_folder,
    read_tensors,
)
from spmdrl.model.lora.layers import Adapters, adapted_weights, sent_adapter, train_adapters_only
from spmdrl.model.lora.merge import deltas
from spmdrl.model.lora.quantised_base import BaseForm, QuantisedBase
from spmdrl.model.lora.targets import LoraForm
from spmdrl.model.model_shape import counts_of
from spmdrl.model.parallel.context_parallel import register_context_attention
from spmdrl.model.parallel.layout import give_storage, lay_out, reshard, slicing_of
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.parallel.tensor_parallel import sum_replicated_gradients
from spmdrl.model.scorer import Head, ScoredRow, Valuer, make_row, scorer_prefixes
from spmdrl.model.tensor_parts import Delta, local_part, write
from spmdrl.model.vision.families import (
    freeze_vision,
    has_vision_tower,
    set_attention,
    vision_modules,
    vision_parameters,
)
from spmdrl.model.vision.layout import vision_layout_of
from spmdrl.model_inputs import concat_ids
from spmdrl.world.axes import axes_of
from spmdrl.world.torch_internals import multiply_all, plain_name
from spmdrl.world.world import World


class ShardedModel:
    """A causal LM, or a model with a scalar head, built, sharded and loaded on the trainer ranks.

    Args:
        cfg, world: the config and this rank's view of the job.
        path: folder or hub name of the weights.
        is_trained: False for a model that only scores: its parameters have no gradients, and are in
            the compute dtype unless `is_float32`.
        is_scalar: with a head of one output per token (`values`) instead of the vocabulary's
            (`forward`, `columns`, `score`); it starts at zero if the files are a causal LM's.
        lora: train these adapters instead of the weights; see lora/layers.py.
    Raises: Refusal when the model cannot be loaded or laid out.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        path: str,
        is_trained: bool,
        is_scalar: bool = False,
        is_float32: bool = False,
        lora: LoraForm | None = None,
    ):
        self.cfg = cfg
        self.world = world
        model = replace(cfg.model, path=path)
        dtype = getattr(torch, model.compute_dtype)
        register_attention()
        register_context_attention()
        self.hf_model = hf_model = build_meta_model(model, is_scalar=is_scalar)
        found = misfits(
            counts_of(hf_model), axes_of(cfg), context=model.kernels.context, is_policy=False
        )
        if problems := list(found):
            raise Refusal("\n".join(problems))
        support = enable_packing(hf_model)
        if why := unshared(hf_model, support):
            world.unshared[path] = why
        # Before adapters are added: the model's files have none.
        self._names = list(live_tensors(hf_model))
        self.parts = file_tensors(hf_model)
        if not is_trained:
            for parameter in hf_model.parameters():
                parameter.requires_grad = False
                parameter.data = parameter.data if is_float32 else parameter.data.to(dtype)
        self._changing = self._names
        self.base: QuantisedBase | None = None
        """The quantised weights under the adapters."""
        if lora and model.lora.quantises:
            self.base = QuantisedBase(hf_model, BaseForm(model.lora.base, dtype))
        self.adapters = Adapters(hf_model, lora) if lora else None
        if self.adapters:
            self._names = [*self._names, *self.adapters.names]
            self._changing = train_adapters_only(hf_model, self.adapters, dtype=dtype)
            numerics_of(cfg).apply_to_adapters(self.adapters)
        elif is_trained:
            master = getattr(torch, model.memory.master_dtype)
            for parameter in hf_model.parameters():
                parameter.data = parameter.data.to(master)
            freeze_vision(hf_model, model)
        self._experts = experts_parameters(hf_model)
        self.layers = layers_of(hf_model, self._names, towers=vision_modules(hf_model))
        """{name in `named_shards`: layer, see layers_of}."""
        self._prefixes = scorer_prefixes(hf_model)
        self.slicing = self._set_attention(model, support)
        self.give_room: Callable[[Sequence[ScoredRow]], Sequence[ScoredRow]] = list
        """Returns rows of a step with all that their passes need; trainer ranks meet in it."""
        reader = CheckpointReader(model_folder(path), part=model.part)
        copies = check_weights(reader, hf_model, self.parts, is_scalar=is_scalar)
        if self.base:
            self.base.pack()
        self.scorer, self.whole = lay_out(
            hf_model, cfg, world, dtype=dtype, temperature=scoring_temperature(cfg)
        )
        give_storage(self.scorer, model.memory.offload, device=world.device)
        self.scorer.eval()  # no dropout: current and old logprobs must come out alike
        shards = self.named_shards()
        if self.base:
            self.base.load(reader, shards, self.parts, copies=copies)
            shards = {name: shards[name] for name in shards.keys() - self.base.names}
        read_tensors(reader, shards, self.parts, copies=copies)
        if self.adapters:
            self.adapters.fill(self.state_dict(), seed=cfg.seed)
        compute_buffers(hf_model)

    def _set_attention(self, model: ModelSettings, support: PackingSupport) -> Slicing:
        config = self.hf_model.config.get_text_config()
        world = self.world
        attention = kernel_of(
            self.hf_model,
            path=model.path,
            wanted=numerics_of(self.cfg).kernel(model.kernels.attention),
            device=world.device,
            dtype=getattr(torch, model.compute_dtype),
        )
        if attention not in PADDING:
            choose_flash(world.device, deterministic=self.cfg.deterministic)
        is_padded = attention in PADDING or bool(support.mixers)
        slicing = slicing_of(world, is_padded=is_padded, chunk=support.chunk)
        method = ""
        if slicing.group is not None:
            # 0 without attention: then no layer exchanges by this method.
            heads = getattr(config, "num_attention_heads", 0) // world.mesh["tp"].size()
            method = "_" + context_method(model.kernels.context, heads=heads, cp=slicing.size)
        set_attention(self.hf_model, f"spmdrl_{attention}{method}")
        return replace(slicing, vision=vision_layout_of(self.hf_model, device=world.device))

    def row(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        *,
        mask: Tensor,
        columns: Columns = MappingProxyType({}),
        drawn: Tensor | None = None,
    ) -> ScoredRow:
        """Prepare a packed row for this model, and for all others of the run; see make_row."""
        slicing = replace(self.slicing, shares_prefixes=self.world.shares_prefixes)
        return make_row(tokens, lengths, mask=mask, slicing=slicing, columns=columns, drawn=drawn)

    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Complete the gradients of FSDP2 to those of the sum over all ranks, in place.

        FSDP2 averages over the ranks that share a parameter's shards. The loss is multiplied by the
        number of ranks that share the shards of most parameters; experts have another number.

        Args:
            gradients: {parameter name: local float32 gradient}, of one update.
        """
        own = [gradients[name] for name in self._experts if name in gradients]
        if own and self.world.experts is not None:
            multiply_all(own, self.world.experts.size(1) / self.world.sharding.size(1))
        if not self.whole:
            return
        # Gradients may be on the host, where the group has no collectives.
        there = {
            name: gradients[name].to(self.world.device) for name in self.whole if name in gradients
        }
        sum_replicated_gradients(there, self.whole, group=self.world.mesh["tp"].get_group())
        for name, gradient in there.items():
            if gradient is not gradients[name]:
                gradients[name].copy_(gradient)

    def named_shards(self) -> dict[str, Tensor]:
        """Return {name: live tensor}: parameters, tied ones once, and persistent buffers.

        Adapters have the name of their layer, with lora_A.weight or lora_B.weight. Quantised
        weights are uint8, in the shape in which they are stored. Parameters are
        DTensors over (dp_replicate,) fsdp and tp; buffers are plain tensors, equal on every rank.
        Their storage never changes. File tensors are parts of them, see `parts`.
        """
        named = {}
        for name, tensor in live_tensors(self.scorer).items():
            part, _, rest = plain_name(name).partition(".")
            named[f"{self._prefixes[part]}.{rest}"] = tensor
        return {name: named[name] for name in self._names}

    def state_dict(self) -> dict[str, Tensor]:
        """Return those of `named_shards` that may change, detached, sharing live storage: all, or
        with adapters only what is trained."""
        shards = self.named_shards()
        return {name: shards[name].detach() for name in self._changing}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        for name, parameter in self.state_dict().items():
            write(local_part(parameter), local_part(state[name]))

    def forward(self, row: ScoredRow, head: Head | None = None) -> Any:
        """Return logprobs and entropy of the scored tokens: each [N] float32, nats.

        Args:
            head: computes something else from the states; see scorer.Head.
        """
        return row.join_scored(self.scorer(row, head))

    def values(self, row: ScoredRow) -> Tensor:
        """Return the value of the state after each token: [T] float32."""
        return row.join_tokens(self.scorer(row))

    @torch.no_grad()
    def columns(
        self, rows: Sequence[ScoredRow], *, squares: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """Score packed rows without gradients.

        Args:
            squares: also return the sums of squared probabilities.
        Returns: per row, logprobs and entropy, [T] float32 in nats, 0 where nothing is scored; with
            `squares` also these sums.
        """
        scored = []
        for row in rows:
            options = self.scorer.head_options
            rules = row.own.rules
            head = partial(logprobs_and_entropy, options=options, rules=rules, squares=squares)
            scored.append(tuple(map(row.spread, self.forward(row, head))))
        reshard(self.scorer)
        return scored

    @torch.no_grad()
    def score(
        self, tokens: Sequence[Sequence[int]], *, row_tokens: int | None = None
    ) -> list[Tensor]:
        """Score sequences at temperature 1; every trainer rank must call it with the same ones.

        Args:
            tokens: ids of each sequence, on the CPU; TokenIds where they show something.
            row_tokens: the most tokens of a row that holds several sequences; by default
                batch.tokens_per_microbatch.
        Returns: per sequence, logprobs [len] float32 in nats on the CPU; the first is 0. With a
            scalar head, the values of all tokens.
        """
        scored: list[Tensor] = []
        for pack in packs(tokens, row_tokens or self.world.tokens_per_microbatch):
            lengths = [len(sequence) for sequence in pack]
            ids = concat_ids(pack)
            row = self.row(
                torch.tensor(ids),
                lengths,
                mask=torch.cat([torch.arange(n) > 0 for n in lengths]),
                columns=ids.extra_columns,
            )
            if isinstance(self.scorer, Valuer):
                scored += self.values(row).cpu().split(lengths)
                continue
            options = replace(self.scorer.head_options, temperature=1.0)
            logprobs, _ = self.forward(row, partial(logprobs_and_entropy, options=options))
            scored += row.spread(logprobs).cpu().split(lengths)
        reshard(self.scorer)
        return scored


def scoring_temperature(cfg: Config) -> float:
    """Return the temperature of the distribution that is scored: that of the samples, or 1."""
    return cfg.sampling.temperature if cfg.objective.samples else 1.0


def unshared(hf_model: nn.Module, support: PackingSupport) -> str:
    """Return why rows of a model cannot share prefixes; empty if they can."""
    if has_vision_tower(hf_model):
        return "it reads images, whose places are found sequence by sequence"
    return support.unshared


class SentWeights:
    """The weights that are sent from one model to engines.

    Args:
        hf_model: the model on the meta device, as it was built.
        lora: model.lora.
        train: model.train.
    Raises: Refusal for files whose tensors are no parts of the model's, or LoRA targets that match
        nothing.
    """

    def __init__(self, hf_model: nn.Module, lora: LoraSettings, *, train: str = "all"):
        live = live_tensors(hf_model)
        self.parts = file_tensors(hf_model)
        """{name in the safetensors files: part of a live tensor}."""
        self.names = {
            name: (tuple(part.shape), live[part.tensor].dtype) for name, part in self.parts.items()
        }
        """{name in the safetensors files: (shape, float32)}."""
        experts = experts_parameters(hf_model)
        self._of_experts = {name for name, part in self.parts.items() if part.tensor in experts}
        towers = vision_parameters(hf_model)
        unadapted = towers - adapted_weights(hf_model, lora)
        self.frozen = frozenset(
            name
            for name, part in self.parts.items()
            if part.tensor in unadapted and (lora.is_on or train == "language")
        )
        """File tensors of towers that never change, so that engines need them only once."""
        self.adapter = sent_adapter(hf_model, lora)
        """Adapters that are sent instead of merged weights; their matrices are in `shards`."""
        self.model: ShardedModel | None = None
        """On trainers, once it is built."""

    def reloaded_names(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return `names` in the dtypes in which vLLM's own loader gets whole tensors.

        It creates experts, which are most of a mixture, in the engine's dtype. Of others it may
        keep float32, or compute something in float32.

        Args:
            dtype: of the engine.
        """
        experts = dict.fromkeys(self._of_experts, dtype)
        return {name: (shape, experts.get(name, own)) for name, (shape, own) in self.names.items()}

    def shards(self) -> dict[str, Tensor]:
        """Return {live name: DTensor, or plain buffer}, see ShardedModel; {} off the trainers.

        A quantised weight is zero here, and `deltas` has its value.
        """
        if not self.model:
            return {}
        shards = self.model.named_shards()
        return shards | self.model.base.stand_ins(shards) if self.model.base else shards

    def deltas(self) -> dict[str, Delta]:
        """Return {live name: what is added to it when it is sent}: adapters, if they are not sent
        themselves, and quantised weights.

        Trainer ranks call it together, before each push.
        """
        if not self.model:
            return {}
        shards = self.model.named_shards()
        adapters = self.model.adapters if not self.adapter else None
        added = deltas(adapters, shards) if adapters else {}
        return added | self.model.base.values(shards, added) if self.model.base else added

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 logprobs at temperature 1, first 0; [] off the
        trainers, which call it together."""
        return self.model.score(sequences) if self.model else []
