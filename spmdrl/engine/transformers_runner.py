"""A transformers model, whole, with keys and values of sequences: forward passes to draw and score.

Shape letters: t tokens of a packed row, L layers with experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.kv_cache import KVCache, Work, register_attention
from spmdrl.engine.protocol import Completion, Request, route_dtype
from spmdrl.engine.truncation import SampledRows, kept_of
from spmdrl.errors import Refusal
from spmdrl.model.attention.packing import Packing, make_packing, packs
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.attention.pick import kernel_of
from spmdrl.model.blocks import base_of, experts_modules
from spmdrl.model.head import head_chunk_tokens
from spmdrl.model.load import load_whole_model
from spmdrl.model.multimodal import sight_of, vision_tower_of
from spmdrl.model.multimodal_rows import RowSight
from spmdrl.model.scorer import head_form
from spmdrl.model_inputs import TokenIds, concat_ids
from spmdrl.types import flat

log = logging.getLogger(__name__)


@dataclass
class Sampled:
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
    lead: int = 0
    """Rotary position of the next token, less the tokens before it: those of an item take fewer."""
    kept: SampledRows | None = None
    """Among what each token was drawn, where the trainer is to know."""

    @property
    def all_tokens(self) -> TokenIds:
        """Prompt and response."""
        return concat_ids([self.request.prompt, self.tokens])

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def is_stopped(self) -> bool:
        """Whether the last token ends it."""
        is_at_id = bool(self.tokens) and self.tokens[-1] in self.request.stop_token_ids
        return is_at_id or self.is_at_string

    def completion(self, *, is_truncated: bool) -> Completion:
        """Return what was drawn."""
        tokens = flat(self.tokens, "int64")
        return Completion(
            self.request.key,
            tokens,
            flat(self.logprobs, "float32"),
            flat(self.versions, "int64"),
            is_truncated,
            torch.cat(self.routes) if self.routes else None,
            None if self.kept is None else kept_of(self.kept, tokens, key=self.request.key),
        )

    def went(self, routes: Tensor, *, first: int) -> None:
        """Take the routes [n, L, K] of the tokens from `first` on; those of tokens that are
        computed anew are not taken."""
        if first + len(routes) > self.num_routed:
            self.routes.append(routes[self.num_routed - first :].clone())
            self.num_routed = first + len(routes)


class _Routes:
    """What the routers of a model chose in the latest forward pass over a row."""

    def __init__(self, hf_model: nn.Module):
        layers = list(experts_modules(hf_model).values())
        self._dtype = route_dtype(max(experts.num_experts for experts in layers))
        self._chosen: deque[Tensor] = deque(maxlen=len(layers))  # [t, K] of each
        for experts in layers:
            experts.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def read(self) -> Tensor:
        """Return the routes of the row's tokens, [t, L, K] on the CPU."""
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
        self._form = head_form(self.hf_model)
        self._packing_support = enable_packing(self.hf_model)
        self._sight, self._vision_tower = (
            sight_of(self.hf_model, device=device),
            vision_tower_of(self.hf_model),
        )
        self._routes = _Routes(self.hf_model) if cfg.model.moe.replay else None
        self._kernel = kernel_of(
            self.hf_model, path=cfg.model.path, wanted="auto", device=device, dtype=dtype
        )
        self.cache = KVCache(1, 1)
        self.next_logits([Sampled(Request("", (0,), 1, 0.0, None, ()), 0)], old=0)
        self.cache = self.cache.resized(self._fitting_slots(), longest)
        log.info(
            "engine: transformers, %d sequences at a time, %d bytes of keys and values%s",
            self.cache.num_slots,
            self.cache.nbytes,
            "" if self._keeps else ": layers that keep a state compute all tokens at each step",
        )

    @property
    def _keeps(self) -> bool:
        """Whether what was computed of a sequence is kept: states of layers besides attention are
        not."""
        return not self._packing_support.mixers

    def _fitting_slots(self) -> int:
        engine = self._cfg.engine
        per_sequence = self.cache.nbytes * self._longest
        what = "cpu_kv_cache_gib"
        room = int(engine.cpu_kv_cache_gib * 2**30)
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            what = "gpu_memory_frac"
            room = int(engine.gpu_memory_frac * total) - total + free
        if not self._keeps:
            return max(1, min(engine.max_num_seqs, engine.max_batched_tokens // self._longest))
        if room < per_sequence:
            raise Refusal(
                f"engine.{what}: {getattr(engine, what)} leaves {max(0, room):,} bytes for keys "
                f"and values, and a sequence of {self._longest} tokens (data.max_prompt_tokens + "
                f"sampling.max_response_tokens) takes {per_sequence:,}; raise it"
            )
        return min(engine.max_num_seqs, room // per_sequence)

    def next_logits(self, sequences: Sequence[Sampled], *, old: int) -> Tensor:
        """Return the logits of each sequence's next token, [len(sequences), V].

        Args:
            sequences: the i-th has slot i; the first `old` have all but their last token in the
                cache, the others nothing.
        """
        old = old if self._keeps else 0
        prompts: dict[TokenIds, int] = {}  # {context: where its tokens begin in the row}
        tokens: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        slots: list[int] = []
        last: list[int] = []  # where in the row each sequence ends
        for slot, sequence in enumerate(sequences[old:], start=old):
            own = sequence.all_tokens
            if own not in prompts:
                prompts[own] = len(tokens)
                tokens += own
                positions += range(len(own))
            kept += range(prompts[own], prompts[own] + len(own))
            slots += [slot] * len(own)
            last.append(prompts[own] + len(own) - 1)
        num = len(tokens)
        lengths = [sequence.num_tokens for sequence in sequences[:old]]
        tokens += [sequence.tokens[-1] for sequence in sequences[:old]]
        positions += [length - 1 for length in lengths]
        row = range(num, len(tokens))
        at = self.tensor(positions)
        where = self.tensor([*row, *kept])
        counts = [len(own) for own in prompts]
        seen = self._seen([*prompts, *((last,) for last in tokens[num:])])
        turned = self._turned(at, seen, sequences, old=old, last=last)
        work = Work(
            self.cache if self._keeps else None,
            self._kernel,
            packing=self._packing(counts, seen),
            num_prompt_tokens=num,
            kept=where,
            slots=self.tensor([*range(old), *slots]),
            positions=at[where],
            lengths=self.tensor(lengths),
            longest=max(lengths, default=0),
        )
        wanted = self.tensor([*row, *last])
        logits = self._logits(tokens, turned, work=work, wanted=wanted, seen=seen)
        if self._routes:
            found = self._routes.read()
            for sequence, end in zip(sequences, (*row, *last)):
                count = 1 if end >= num else sequence.num_tokens
                sequence.went(found[end + 1 - count : end + 1], first=sequence.num_tokens - count)
        return logits

    def _seen(self, sequences: Sequence[Sequence[int]]) -> RowSight | None:
        """Return what the sequences of a row show; None where none shows anything."""
        row = concat_ids(sequences)
        if self._sight is None or row.multimodal is None or not row.items:
            return None
        return self._sight.row(torch.tensor(row), [len(own) for own in sequences], row.multimodal)

    def _turned(
        self,
        at: Tensor,
        seen: RowSight | None,
        sequences: Sequence[Sampled],
        *,
        old: int,
        last: Sequence[int],
    ) -> Tensor:
        """Return the rotary positions of a row, [T] or [3, T], and note those of what follows.

        Args:
            at: [T], places in their sequences.
            last: where the sequences behind the first `old` end.
        """
        if self._sight is None:
            return at
        positions = at if seen is None else seen.position_ids.to(at)
        begin = len(at) - old
        leads = self.tensor([sequence.lead for sequence in sequences[:old]])
        positions = torch.cat(
            [positions[..., :begin], (at[begin:] + leads).expand(*positions.shape[:-1], old)], -1
        )
        ends = torch.atleast_2d(positions)[:, self.tensor(last)].amax(0).tolist()
        for sequence, end in zip(sequences[old:], ends, strict=True):
            sequence.lead = end + 1 - sequence.num_tokens
        return positions

    def _logits(
        self,
        tokens: Sequence[int],
        positions: Tensor,
        *,
        work: Work,
        wanted: Tensor,
        seen: RowSight | None = None,
    ) -> Tensor:
        # As the trainer's scorer: not every model with a head hands on what its base is to know.
        _, base = base_of(self.hf_model)
        given = {"input_ids": self.tensor(tokens)[None]}
        if seen is not None:
            assert self._vision_tower is not None
            every = torch.arange(len(tokens))
            embeddings = base.get_input_embeddings()(given["input_ids"])
            given = self._vision_tower(embeddings, seen.of_slice(every, every))
        states = base(
            **given,
            position_ids=positions.unsqueeze(-2),
            attention_mask=None,
            use_cache=False,
            work=work,
        ).last_hidden_state[0]
        return self._form.logits(self.hf_model.get_output_embeddings()(states[wanted]))

    def _packing(self, lengths: Sequence[int], seen: RowSight | None = None) -> Packing | None:
        if not lengths:
            return None
        spans = None if seen is None or seen.spans is None else seen.spans[: sum(lengths)]
        is_padded = self._kernel == "padded" or not self._keeps
        return make_packing(
            lengths, self._device, padded=is_padded, chunk=self._packing_support.chunk, spans=spans
        )

    def tensor(self, values: Sequence[int]) -> Tensor:
        """Return whole numbers as int64 on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0."""
        scored: list[Tensor] = []
        budget = head_chunk_tokens(self._cfg.model, self.hf_model)
        for rows in packs(sequences, budget):
            lengths = [len(row) for row in rows]
            tokens = [token for row in rows for token in row]
            at = self.tensor([at for length in lengths for at in range(length)])
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
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            own = logprobs.gather(1, self.tensor(tokens[1:])[:, None])[:, 0]
            own = torch.cat([own.new_zeros(1), own]).masked_fill(at == 0, 0.0)
            scored += own.cpu().split(lengths)
        return scored
