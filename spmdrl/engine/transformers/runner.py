"""A whole transformers model with a KV cache: forward passes that draw and score.

Shape letters: t tokens of a packed row, L layers with experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.columns import RouterRoutes, TokenColumn
from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, MaskRows, Request, masks_of_rows, route_dtype
from spmdrl.engine.transformers.kv_cache import KVCache, Work, register_attention
from spmdrl.engine.transformers.layer_states import cache_states, keeps_known_states
from spmdrl.errors import Refusal
from spmdrl.model.attention.kernels import PADDING
from spmdrl.model.attention.packing import Packing, make_packing, packs
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.attention.pick import kernel_of
from spmdrl.model.blocks import base_of, experts_modules
from spmdrl.model.exact.numerics import numerics_of
from spmdrl.model.head import fitting_positions
from spmdrl.model.load import load_whole_model
from spmdrl.model.logit_passes import LogitForm, log_totals
from spmdrl.model.scorer import head_form
from spmdrl.model.vision.layout import RowLayout, vision_layout_of
from spmdrl.model.vision.tower import vision_tower_of
from spmdrl.model_inputs import TokenIds, concat_ids
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import flat

log = logging.getLogger(__name__)


@dataclass
class RunningSequence:
    """A request and what was drawn for it."""

    request: Request
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)
    """[n, L, K] of consecutive tokens from the first on, under model.moe.replay."""
    num_routed: int = 0
    is_at_string: bool = False
    """A string of `request.stop` is complete."""
    position_offset: int = 0
    """Rotary position of the next token, minus the number of tokens before it. Not 0 after an
    image, whose tokens share positions."""
    mask_rows: MaskRows | None = None
    """The sampling mask of each token; None where the trainer does not need it."""

    @property
    def all_tokens(self) -> TokenIds:
        """Prompt and response."""
        return concat_ids([self.request.prompt, self.tokens])

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response together."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def is_stopped(self) -> bool:
        """Whether the last token ends it."""
        is_at_id = bool(self.tokens) and self.tokens[-1] in self.request.stop_token_ids
        return is_at_id or self.is_at_string

    def completion(self, *, is_truncated: bool) -> Completion:
        """Return what was drawn."""
        tokens = flat(self.tokens, "int64")
        columns: dict[str, TokenColumn] = {}
        if self.routes:
            columns[RouterRoutes.key] = RouterRoutes(torch.cat(self.routes))
        if self.mask_rows is not None:
            masks = masks_of_rows(self.mask_rows, tokens, key=self.request.key)
            if masks is not None:
                columns[SamplingMasks.key] = masks
        return Completion(
            self.request.key,
            tokens,
            flat(self.logprobs, "float32"),
            flat(self.versions, "int64"),
            is_truncated,
            extra_columns=columns,
        )

    def add_routes(self, routes: Tensor, *, first: int) -> None:
        """Append the routes [n, L, K] of the tokens from `first` on. A token that is computed again
        keeps its first route."""
        if first + len(routes) > self.num_routed:
            self.routes.append(routes[self.num_routed - first :].clone())
            self.num_routed = first + len(routes)


class _RouteRecorder:
    """What the routers of a model chose in the last forward pass."""

    def __init__(self, hf_model: nn.Module):
        layers = list(experts_modules(hf_model).values())
        self._dtype = route_dtype(max(experts.num_experts for experts in layers))
        self._chosen: deque[Tensor] = deque(maxlen=len(layers))  # [t, K] of each
        for experts in layers:
            experts.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def read(self) -> Tensor:
        """Return the routes of the pass's tokens, [t, L, K] on the CPU."""
        return torch.stack(tuple(self._chosen), dim=1).to(self._dtype).cpu()


class ModelRunner:
    """One rank's model, and the cache of the sequences that it draws for.

    Args:
        cfg: uses model, engine and the lengths in data and sampling.
        device: of both.
        longest: tokens of the longest sequence.
    Raises: Refusal when the model cannot be loaded, or the cache has no room for a sequence.
    """

    def __init__(self, cfg: Config, device: torch.device, *, longest: int):
        self._cfg = cfg
        self._device = device
        self._longest = longest
        dtype = getattr(torch, cfg.engine.dtype)
        register_attention()
        self.hf_model = load_whole_model(
            cfg.model, attention="spmdrl_cached", dtype=dtype, device=device
        )
        form = head_form(self.hf_model)
        self._form = LogitForm(form.scale, form.softcap)
        self._packing_support = enable_packing(self.hf_model)
        if self._is_cached:
            cache_states(self.hf_model, chain(*self._packing_support.states.values()))
        self._vision_layout = vision_layout_of(self.hf_model, device=device)
        self._vision_tower = vision_tower_of(self.hf_model)
        self._routes = _RouteRecorder(self.hf_model) if cfg.model.moe.replay else None
        numerics = numerics_of(cfg)
        self._kernel = kernel_of(
            self.hf_model,
            path=cfg.model.path,
            wanted=numerics.kernel("auto"),
            device=device,
            dtype=dtype,
        )
        numerics.apply(base_of(self.hf_model)[1], self.hf_model.get_output_embeddings())
        self.cache = KVCache(1, 1)
        # One forward pass tells which layers keep keys and values or states, and how large.
        trial = Request("", (0,), 1, 0.0, None, ())
        self.next_logits([RunningSequence(trial, 0)], num_old=0)
        slot_tokens = numerics.slot_tokens(longest)
        self.cache = self.cache.resized(self._fitting_slots(slot_tokens), slot_tokens)
        log.info(
            "engine: transformers, %d sequences at a time, %d bytes of keys, values and states%s",
            self.cache.num_slots,
            self.cache.nbytes,
            "" if self._is_cached else ": its layers compute all tokens at each step",
        )

    @property
    def _is_cached(self) -> bool:
        """Whether keys, values and states are cached. They are not in a model with layers that
        compute one sequence per row, have another state, or attend more than once: every step
        computes all tokens of its sequences."""
        support = self._packing_support
        names = chain(*support.states.values())
        has_known = all(keeps_known_states(self.hf_model.get_submodule(name)) for name in names)
        return has_known and not support.mixers and not support.repeated

    def _fitting_slots(self, slot_tokens: int) -> int:
        engine = self._cfg.engine
        state_bytes = self.cache.state_bytes  # of one sequence, as the cache has room for one token
        per_sequence = (self.cache.nbytes - state_bytes) * slot_tokens + state_bytes
        if not self._is_cached:
            return max(1, min(engine.max_num_seqs, engine.max_batched_tokens // self._longest))
        field = "cpu_kv_cache_gib"
        room = int(engine.cpu_kv_cache_gib * 2**30)
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            field = "gpu_memory_frac"
            room = int(engine.gpu_memory_frac * total) - total + free
        if room < per_sequence:
            raise Refusal(
                f"engine.{field}: {getattr(engine, field)} leaves {max(0, room):,} bytes for keys, "
                f"values and states, and a sequence of {self._longest} tokens "
                "(data.max_prompt_tokens + sampling.max_response_tokens, or those of "
                f"rewards.judge) takes {per_sequence:,}; raise it"
            )
        return min(engine.max_num_seqs, room // per_sequence)

    def next_logits(self, sequences: Sequence[RunningSequence], *, num_old: int) -> Tensor:
        """Return the float32 logits of each sequence's next token, [len(sequences), V].

        Args:
            sequences: the i-th has slot i. The first `num_old` have all but their last token in the
                cache, the others nothing.
        """
        if not self._is_cached:
            num_old = 0
        old = sequences[:num_old]
        new = sequences[num_old:]
        # The row: the distinct prompts of new sequences, then one token of each old sequence.
        prompts: dict[TokenIds, int] = {}  # {prompt: where its tokens begin in the row}
        tokens: list[int] = []
        positions: list[int] = []
        cached: list[int] = []  # places in the row of the tokens to cache
        slots: list[int] = []
        ends: list[int] = []  # where in the row each new sequence ends
        for slot, sequence in enumerate(new, start=num_old):
            prompt = sequence.all_tokens
            if prompt not in prompts:
                prompts[prompt] = len(tokens)
                tokens += prompt
                positions += range(len(prompt))
            begin = prompts[prompt]
            cached += range(begin, begin + len(prompt))
            slots += [slot] * len(prompt)
            ends.append(begin + len(prompt) - 1)
        number_at = {begin: number for number, begin in enumerate(prompts.values())}
        numbers = [number_at[end + 1 - own.num_tokens] for own, end in zip(new, ends)]
        num_prompt_tokens = len(tokens)
        tokens += [sequence.tokens[-1] for sequence in old]
        positions += [sequence.num_tokens - 1 for sequence in old]
        old_ends = range(num_prompt_tokens, len(tokens))

        at = self.tensor(positions)
        to_cache = self.tensor([*old_ends, *cached])
        lengths = [sequence.num_tokens for sequence in old]
        seen = self._seen([*prompts, *((token,) for token in tokens[num_prompt_tokens:])])
        work = Work(
            self.cache if self._is_cached else None,
            self._kernel,
            packing=self._packing([len(prompt) for prompt in prompts], seen),
            num_prompt_tokens=num_prompt_tokens,
            cached=to_cache,
            slots=self.tensor([*range(num_old), *slots]),
            positions=at[to_cache],
            prompts=self.tensor(numbers),
            lengths=self.tensor(lengths),
            longest=max(lengths, default=0),
        )
        logits = self._logits(
            tokens,
            self._rotary_positions(at, seen, old=old, new=new, ends=ends),
            work=work,
            wanted=self.tensor([*old_ends, *ends]),
            seen=seen,
        )
        if self._routes:
            routes = self._routes.read()
            for sequence, end in zip(old, old_ends):
                sequence.add_routes(routes[end : end + 1], first=sequence.num_tokens - 1)
            for sequence, end in zip(new, ends):
                begin = end + 1 - sequence.num_tokens
                sequence.add_routes(routes[begin : end + 1], first=0)
        return logits

    def _seen(self, sequences: Sequence[Sequence[int]]) -> RowLayout | None:
        """Return the images of a row of sequences; None where there are none."""
        row = concat_ids(sequences)
        if self._vision_layout is None or row.multimodal is None or not row.items:
            return None
        return self._vision_layout.row(
            torch.tensor(row), [len(own) for own in sequences], row.multimodal
        )

    def _rotary_positions(
        self,
        at: Tensor,
        seen: RowLayout | None,
        *,
        old: Sequence[RunningSequence],
        new: Sequence[RunningSequence],
        ends: Sequence[int],
    ) -> Tensor:
        """Return a row's rotary positions, [T] or [3, T], and set the offsets of new sequences.

        Args:
            at: [T], positions in their sequences.
            ends: where in the row the new sequences end.
        """
        if self._vision_layout is None:
            return at
        positions = at if seen is None else seen.position_ids.to(at)
        first_old = len(at) - len(old)
        offsets = self.tensor([sequence.position_offset for sequence in old])
        of_old = (at[first_old:] + offsets).expand(*positions.shape[:-1], len(old))
        positions = torch.cat([positions[..., :first_old], of_old], -1)
        largest = torch.atleast_2d(positions)[:, self.tensor(ends)].amax(0).tolist()
        for sequence, position in zip(new, largest, strict=True):
            sequence.position_offset = position + 1 - sequence.num_tokens
        return positions

    def _logits(
        self,
        tokens: Sequence[int],
        positions: Tensor,
        *,
        work: Work,
        wanted: Tensor,
        seen: RowLayout | None = None,
    ) -> Tensor:
        # As in the trainer's scorer, the base is called: not every model with a head passes all
        # keyword arguments on to its base.
        _, base = base_of(self.hf_model)
        inputs = {"input_ids": self.tensor(tokens)[None]}
        if seen is not None:
            assert self._vision_tower is not None
            every = torch.arange(len(tokens))
            embeddings = base.get_input_embeddings()(inputs["input_ids"])
            inputs = self._vision_tower(embeddings, seen.of_slice(every, every))
        states = base(
            **inputs,
            position_ids=positions.unsqueeze(-2),
            attention_mask=None,
            use_cache=False,
            work=work,
        ).last_hidden_state[0]
        head = self.hf_model.get_output_embeddings()
        return self._form.logits(head(states[wanted].to(head.weight.dtype)))

    def _packing(self, lengths: Sequence[int], seen: RowLayout | None = None) -> Packing | None:
        if not lengths:
            return None
        spans = None if seen is None or seen.spans is None else seen.spans[: sum(lengths)]
        is_padded = self._kernel in PADDING or not self._is_cached
        return make_packing(
            lengths, self._device, padded=is_padded, chunk=self._packing_support.chunk, spans=spans
        )

    def tensor(self, values: Sequence[int]) -> Tensor:
        """Return integers as an int64 tensor on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0."""
        scored: list[Tensor] = []
        budget = self._cfg.model.memory.head_chunk_tokens or fitting_positions(
            self.hf_model, budget=2**29, logit_bytes=4
        )
        for rows in packs(sequences, budget):
            lengths = [len(row) for row in rows]
            tokens = [token for row in rows for token in row]
            at = torch.cat([torch.arange(length) for length in lengths]).to(self._device)
            seen = self._seen(rows)
            work = Work(
                None,
                self._kernel,
                packing=self._packing(lengths, seen),
                num_prompt_tokens=len(tokens),
            )
            positions = at if seen is None else seen.position_ids.to(at)
            wanted = self.tensor(range(len(tokens) - 1))
            logits = self._logits(tokens, positions, work=work, wanted=wanted, seen=seen)
            own = logits.gather(1, self.tensor(tokens[1:])[:, None])[:, 0] - log_totals(logits)
            own = torch.cat([own.new_zeros(1), own]).masked_fill(at == 0, 0.0)
            scored += own.cpu().split(lengths)
        return scored
