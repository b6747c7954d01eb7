"""Generation with the transformers model itself, where vLLM does not run.

The model's own modules compute, as in the trainer; only attention is ours, with a cache of keys
and values (kv_cache.py). Sequences are admitted and retired between steps: a step is one forward
pass over the prompts of new sequences and one token of each that is under way, packed without
padding, and draws a token for each. It needs nothing but what the trainer has. One rank holds the
whole model, a sequence takes room in the cache for the longest one, and a GPU gets no CUDA graphs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.kv_cache import KVCache, Work, register_attention
from spmdrl.engine.protocol import Completion, Request, route_dtype
from spmdrl.engine.sampling import draw, numbers
from spmdrl.model.attention import pick_attention
from spmdrl.model.blocks import experts_modules
from spmdrl.model.file_tensors import file_tensors, live_tensors
from spmdrl.model.head import head_chunk_tokens
from spmdrl.model.live_bytes import device_bytes
from spmdrl.model.load import load_whole_model
from spmdrl.model.packing import Packing, make_packing
from spmdrl.model.sharded import packs
from spmdrl.model.shards import Held
from spmdrl.types import flat
from spmdrl.world import World

log = logging.getLogger(__name__)


@dataclass
class _Sequence:
    """A request and what was drawn for it."""

    request: Request
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)
    """[n, L, K] of consecutive tokens from the first on, under model.moe.replay."""
    num_routed: int = 0

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def is_stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.request.stop_token_ids

    def completion(self, *, is_truncated: bool) -> Completion:
        return Completion(
            self.request.key,
            flat(self.tokens, "int64"),
            flat(self.logprobs, "float32"),
            flat(self.versions, "int64"),
            is_truncated,
            torch.cat(self.routes) if self.routes else None,
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


class TransformersEngine:
    """One rank's model and cache; nothing on ranks that do not generate.

    Args:
        cfg: uses model, engine, rollout.schedule and the lengths in data and sampling.
        world: the job.
    Raises: ValueError when the model cannot be loaded, or the cache has no room for a sequence.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.dtype = getattr(torch, cfg.engine.dtype)
        self.version = -1
        self._longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # the i-th has slot i
        self._hf_model: nn.Module | None = None
        self._routes: _Routes | None = None
        if not world.inference_ranks:
            return
        with world.watch.phase("build engine", -1):
            if world.is_inference:
                self._build()
        with world.watch.wait("engines built", -1):
            dist.barrier(group=world.control)

    def _build(self) -> None:
        cfg, device = self.cfg, self.world.device
        register_attention()
        self._hf_model = load_whole_model(
            cfg.model, attention="spmdrl_cached", dtype=self.dtype, device=device
        )
        self._held = Held(live_tensors(self._hf_model), file_tensors(self._hf_model))
        if cfg.model.moe.replay:
            self._routes = _Routes(self._hf_model)
        config = self._hf_model.config
        self._kernel = pick_attention(
            "auto",
            device=device,
            dtype=self.dtype,
            has_softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        )
        # Replicas draw for different prompts.
        self._seeds = torch.Generator().manual_seed(1000003 * cfg.seed + self.world.replica)
        self._cache = KVCache(1, 1)
        self._forward([_Sequence(Request("", (0,), 1, 0.0, None, ()), 0)], old=0)
        per_sequence, room = self._cache.nbytes * self._longest, self._cache_bytes()
        num_slots = min(cfg.engine.max_num_seqs, room // per_sequence)
        if not num_slots:
            what = "gpu_memory_frac" if device.type == "cuda" else "cpu_kv_cache_gib"
            raise ValueError(
                f"engine.{what}: {getattr(cfg.engine, what)} leaves {room:,} bytes for keys and "
                f"values, and a sequence of {self._longest} tokens (data.max_prompt_tokens + "
                f"sampling.max_response_tokens) takes {per_sequence:,}; raise it"
            )
        self._cache = self._cache.resized(num_slots, self._longest)
        log.info(
            "engine: transformers, %d sequences at a time, %d bytes of keys and values",
            num_slots,
            self._cache.nbytes,
        )

    def _cache_bytes(self) -> int:
        engine = self.cfg.engine
        if self.world.device.type != "cuda":
            return int(engine.cpu_kv_cache_gib * 2**30)
        free, total = torch.cuda.mem_get_info(self.world.device)
        return max(0, int(engine.gpu_memory_frac * total) - (total - free))

    # ---------------------------------------------------------------- generation

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises: ValueError for a prompt that is empty or leaves no room for a token.
        """
        if not 0 < len(request.prompt) < self._longest:
            raise ValueError(
                f"request {request.key}: a prompt of {len(request.prompt)} tokens; "
                f"from 1 to {self._longest - 1} can go on (data.max_prompt_tokens + "
                "sampling.max_response_tokens - 1)"
            )
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        self._waiting.append(_Sequence(request, seed))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draw a token for each sequence under way and for as many new ones as there is room.

        Returns: what finished.
        Raises: RuntimeError when a logit is not a number.
        """
        old = len(self._running)
        self._running += self._admitted()
        if not self._running:
            return []
        self._draw(self._forward(self._running, old=old))
        return self._retire()

    def _admitted(self) -> list[_Sequence]:
        """Take new sequences while there are slots, and tokens in the step's budget.

        At least one, if there is a slot: a prompt above the budget goes without other new ones.
        Equal prompts count once.
        """
        free = self._cache.num_slots - len(self._running)
        budget = self.cfg.engine.max_batched_tokens - len(self._running)
        admitted, prompts = [], set()
        while self._waiting and len(admitted) < free:
            prompt = self._waiting[0].all_tokens
            if prompt not in prompts:
                if admitted and len(prompt) > budget:
                    break
                budget -= len(prompt)
                prompts.add(prompt)
            admitted.append(self._waiting.popleft())
        return admitted

    def _forward(self, sequences: Sequence[_Sequence], *, old: int) -> Tensor:
        """Return the logits of each sequence's next token, [len(sequences), V].

        Args:
            sequences: the i-th has slot i; the first `old` have all but their last token in the
                cache, the others nothing.
        """
        prompts: dict[tuple[int, ...], int] = {}  # {tokens: where they begin in the row}
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
        num, lengths = len(tokens), [sequence.num_tokens for sequence in sequences[:old]]
        tokens += [sequence.tokens[-1] for sequence in sequences[:old]]
        positions += [length - 1 for length in lengths]
        row = range(num, len(tokens))
        at = self._tensor(positions)
        where = self._tensor([*row, *kept])
        work = Work(
            self._cache,
            self._kernel,
            packing=self._packing([len(own) for own in prompts]),
            num_prompt_tokens=num,
            kept=where,
            slots=self._tensor([*range(old), *slots]),
            positions=at[where],
            lengths=self._tensor(lengths),
            longest=max(lengths, default=0),
        )
        logits = self._logits(tokens, at, work=work, wanted=self._tensor([*row, *last]))
        if self._routes:
            found = self._routes.read()
            for sequence, end in zip(sequences, (*row, *last)):
                count = 1 if end >= num else sequence.num_tokens
                sequence.went(found[end + 1 - count : end + 1], first=sequence.num_tokens - count)
        return logits

    def _logits(
        self, tokens: Sequence[int], positions: Tensor, *, work: Work, wanted: Tensor
    ) -> Tensor:
        return self._hf_model(
            input_ids=self._tensor(tokens)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            work=work,
        ).logits[0]

    def _packing(self, lengths: Sequence[int]) -> Packing | None:
        if not lengths:
            return None
        return make_packing(lengths, self.world.device, padded=self._kernel == "padded")

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.world.device)

    def _draw(self, logits: Tensor) -> None:
        device, running = self.world.device, self._running
        at = numbers(
            self._tensor([s.seed for s in running]), self._tensor([len(s.tokens) for s in running])
        )
        temperatures = torch.tensor([s.request.temperature for s in running], device=device)
        drawn = draw(logits, temperatures=temperatures, at=at)
        if not bool(drawn[1].isfinite().all()):
            first = running[int(drawn[1].isfinite().logical_not().nonzero()[0])]
            raise RuntimeError(
                f"request {first.request.key}: the logits of token "
                f"{len(first.tokens)} are not all numbers, with the weights of "
                f"version {self.version}"
            )
        for sequence, token, logprob in zip(running, *(part.tolist() for part in drawn)):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)

    def _retire(self) -> list[Completion]:
        """Take out what is finished, and close the gaps from the end."""
        found, gaps = [], []
        for slot, sequence in enumerate(self._running):
            is_full = (
                len(sequence.tokens) >= sequence.request.max_tokens
                or sequence.num_tokens >= self._longest
            )
            if sequence.is_stopped or is_full:
                found.append(sequence.completion(is_truncated=not sequence.is_stopped))
                gaps.append(slot)
        left = len(self._running) - len(gaps)
        finished = set(gaps)
        to = [slot for slot in gaps if slot < left]
        of = [slot for slot in range(left, len(self._running)) if slot not in finished]
        for source, target in zip(of, to):
            self._running[target] = self._running[source]
        del self._running[left:]
        if to:
            self._cache.move(of, to, length=max(s.num_tokens for s in self._running))
        return found

    @property
    def is_busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._waiting or self._running)

    def unfinished(self) -> list[Completion]:
        """Return what was drawn so far for the requests that go on, is_truncated False."""
        return [
            sequence.completion(is_truncated=False) for sequence in (*self._running, *self._waiting)
        ]

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0.

        Raises: RuntimeError when requests are unfinished, as vLLM's engine does.
        """
        if self.is_busy:
            raise RuntimeError("score() while requests are unfinished; finish them first")
        scored: list[Tensor] = []
        for rows in packs(sequences, head_chunk_tokens(self.cfg.model, self.model)):
            lengths = [len(row) for row in rows]
            tokens = [token for row in rows for token in row]
            positions = self._tensor([at for length in lengths for at in range(length)])
            work = Work(
                None, self._kernel, packing=self._packing(lengths), num_prompt_tokens=len(tokens)
            )
            logits = self._logits(
                tokens, positions, work=work, wanted=self._tensor(range(len(tokens) - 1))
            )
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            own = logprobs.gather(1, self._tensor(tokens[1:])[:, None])[:, 0]
            own = torch.cat([own.new_zeros(1), own]).masked_fill(positions == 0, 0.0)
            scored += own.cpu().split(lengths)
        return scored

    # ---------------------------------------------------------------- weights

    @property
    def model(self) -> nn.Module:
        """The live model, whose parameters the weight stream writes in place."""
        return self._hf_model

    def weights_changed(self, version: int) -> None:
        """Take `version` as that of the weights. Unfinished requests keep their keys and values,
        or compute them anew, as rollout.schedule says; no request uses those of another step."""
        self.version = version
        if self.cfg.rollout.schedule.kv_cache != "keep":
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors by checkpoint name into the live model.

        Raises: ValueError for a name that the model does not have.
        """
        boxes = self._held.boxes()
        for name, tensor in weights:
            if name not in boxes:
                raise ValueError(f"{type(self._hf_model).__name__} has no tensor {name}")
            (whole,) = boxes[name]
            self._held.value(name, whole).live.copy_(tensor)

    reload_weights = load_weights

    # ---------------------------------------------------------------- sleep

    can_sleep = True

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the KV cache. Weights stay: they are memory like any other here."""
        self._num_slots = self._cache.num_slots
        self._cache = self._cache.resized(0, self._longest)

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Make a new cache."""
        if part == "cache":
            self._cache = self._cache.resized(self._num_slots, self._longest)

    def held_bytes(self) -> int:
        """Return the bytes in use, see EngineProtocol."""
        if self.world.device.type == "cuda":
            return device_bytes(self.world.device)
        return self._cache.nbytes + sum(t.nbytes for t in live_tensors(self._hf_model).values())

    def close(self) -> None:
        """Free the model and its cache."""
        self._hf_model, self._held, self._cache = None, None, None
