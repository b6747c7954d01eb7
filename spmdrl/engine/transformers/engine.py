"""An engine that generates with the transformers model itself, where vLLM does not run.

The model's own modules compute, as in the trainer (runner.py); only what mixes tokens is ours:
attention with a cache of keys and values (kv_cache.py), layers that keep a state (layer_states.py).
A step is one forward pass over the prompts of new sequences and one token of each running sequence,
packed without padding, and draws a token for each. Sequences start and finish between steps. The
engine needs no package that the trainer does not need. One rank holds the whole model, every
sequence takes room in the cache for the longest one, and a GPU gets no CUDA graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, MaskRows, Request
from spmdrl.engine.stop_strings import make_stop_strings
from spmdrl.engine.transformers.draws import draw, numbers, penalise_rows
from spmdrl.engine.transformers.runner import ModelRunner, RunningSequence
from spmdrl.errors import Refusal
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.tensor_parts import Held
from spmdrl.model_inputs import TokenIds
from spmdrl.world.comm import await_all
from spmdrl.world.machine.host_memory import return_freed_memory
from spmdrl.world.machine.live_bytes import device_bytes
from spmdrl.world.world import World


class TransformersEngine:
    """One rank's model and cache; nothing on ranks that do not generate.

    Args:
        cfg: uses model, engine, rollout.schedule and the lengths in data and sampling.
        world: the job.
    Raises: Refusal when the model cannot be loaded, or the cache has no room for a sequence.
    """

    sleep_hint: ClassVar[str] = (
        "Raise engine.max_num_seqs: so small a cache shares pages with other memory"
    )
    gap_cause: ClassVar[str] = (
        "its weights are not the trainer's, or its attention is wrong; this is a bug here"
    )

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.dtype = getattr(torch, cfg.engine.dtype)
        self.version = -1
        self.lend_memory: Callable[[], None] = lambda: None
        self._longest = cfg.longest_in_engine
        self._records_masks = cfg.sampling.truncates
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []  # the i-th has slot i
        if not world.inference_ranks:
            return
        with world.watch.phase("build engine", -1):
            if world.is_inference:
                self._build()
        with world.watch.wait("engines built", -1):
            await_all(group=world.control)

    def _build(self) -> None:
        self._runner = ModelRunner(self.cfg, self.world.device, longest=self._longest)
        self._held = Held(live_tensors(self.model), file_tensors(self.model))
        self._stops = make_stop_strings(self.cfg)
        # Replicas sample different prompts, so each has seeds of its own.
        self._seeds = torch.Generator().manual_seed(1000003 * self.cfg.seed + self.world.replica)

    # ---------------------------------------------------------------- generation

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises: Refusal for a prompt that is empty or leaves no room for a token.
        """
        if not 0 < len(request.prompt) < self._longest:
            raise Refusal(
                f"request {request.key}: a prompt of {len(request.prompt)} tokens; "
                f"from 1 to {self._longest - 1} can go on (data.max_prompt_tokens + "
                "sampling.max_response_tokens - 1, or the same of rewards.judge)"
            )
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        mask_rows: MaskRows | None = [] if self._records_masks and request.is_cut else None
        self._stops.add(request)
        self._waiting.append(RunningSequence(request, seed, mask_rows=mask_rows))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draw a token for each running sequence and for as many new ones as there is room for.

        Returns: what finished.
        Raises: RuntimeError when a logit is not a number.
        """
        num_old = len(self._running)
        self._running += self._take_waiting()
        if not self._running:
            return []
        self._draw(self._runner.next_logits(self._running, num_old=num_old))
        return self._retire()

    def _take_waiting(self) -> list[RunningSequence]:
        """Take waiting sequences while there are slots, and tokens in the step's budget.

        If there is a slot, at least one is taken: a prompt above the budget goes without other new
        ones. Equal prompts count once, because they are computed once.
        """
        num_free = self._runner.cache.num_slots - len(self._running)
        budget = self.cfg.engine.max_batched_tokens - len(self._running)
        taken: list[RunningSequence] = []
        prompts: set[TokenIds] = set()
        while self._waiting and len(taken) < num_free:
            first = self._waiting[0]
            prompt = first.all_tokens
            if prompt not in prompts:
                if taken and first.num_tokens > budget:
                    break
                budget -= first.num_tokens
                prompts.add(prompt)
            taken.append(self._waiting.popleft())
        return taken

    def _draw(self, logits: Tensor) -> None:
        running = self._running
        requests = [sequence.request for sequence in running]
        temperatures = [request.temperature for request in requests]
        truncations = [request.truncation for request in requests]
        logits = penalise_rows(
            logits,
            [request.penalties for request in requests],
            prompts=[request.prompt for request in requests],
            responses=[sequence.tokens for sequence in running],
        )
        tokens, logprobs, masks = draw(
            logits,
            temperatures=torch.tensor(temperatures, device=self.world.device),
            at=numbers(
                self._runner.tensor([sequence.seed for sequence in running]),
                self._runner.tensor([len(sequence.tokens) for sequence in running]),
            ),
            truncations=truncations if any(t.is_on for t in truncations) else (),
            is_exact=self.cfg.engine.exact,
        )
        is_finite = logprobs.isfinite()
        if not bool(is_finite.all()):
            first = running[int(is_finite.logical_not().nonzero()[0])]
            raise RuntimeError(
                f"request {first.request.key}: the logits of token "
                f"{len(first.tokens)} are not all numbers, with the weights of "
                f"version {self.version}"
            )
        drawn = zip(running, tokens.tolist(), logprobs.tolist())
        for row, (sequence, token, logprob) in enumerate(drawn):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            sequence.is_at_string = bool(self._stops.end(sequence.request.key, sequence.tokens))
            if sequence.mask_rows is not None and masks is not None:
                sequence.mask_rows.append((masks, row))

    def _retire(self) -> list[Completion]:
        """Remove the finished sequences, and move the last ones into their slots."""
        completions = []
        finished = []
        for slot, sequence in enumerate(self._running):
            is_full = (
                len(sequence.tokens) >= sequence.request.max_tokens
                or sequence.num_tokens >= self._longest
            )
            if sequence.is_stopped or is_full:
                completions.append(sequence.completion(is_truncated=not sequence.is_stopped))
                self._stops.drop(sequence.request.key)
                finished.append(slot)
        num_left = len(self._running) - len(finished)
        targets = [slot for slot in finished if slot < num_left]
        sources = sorted(set(range(num_left, len(self._running))).difference(finished))
        for source, target in zip(sources, targets):
            self._running[target] = self._running[source]
        del self._running[num_left:]
        if targets:
            longest = max(sequence.num_tokens for sequence in self._running)
            self._runner.cache.move(sources, targets, length=longest)
        return completions

    @property
    def is_busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._waiting or self._running)

    def unfinished(self) -> list[Completion]:
        """Return what was drawn so far for unfinished requests, is_truncated False."""
        sequences = (*self._running, *self._waiting)
        return [sequence.completion(is_truncated=False) for sequence in sequences]

    def tokens_so_far(self, keys: Collection[str]) -> dict[str, Sequence[int]]:
        """Return the ids that were drawn so far for those of these requests that are unfinished."""
        return {
            sequence.request.key: sequence.tokens
            for sequence in (*self._running, *self._waiting)
            if sequence.request.key in keys
        }

    def abort_all(self) -> list[Completion]:
        """End all requests, and return what was drawn for them."""
        completions = self.unfinished()
        for completion in completions:
            self._stops.drop(completion.key)
        self._running.clear()
        self._waiting.clear()
        return completions

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0.

        Raises: RuntimeError when requests are unfinished, as vLLM's engine does.
        """
        if self.is_busy:
            raise RuntimeError("score() while requests are unfinished; finish them first")
        return self._runner.score(sequences)

    # ---------------------------------------------------------------- weights

    @property
    def model(self) -> nn.Module:
        """The live model, whose parameters the weight stream writes in place."""
        return self._runner.hf_model

    def weights_changed(self, version: int) -> None:
        """Set the version of the weights. Unfinished requests keep their cache, or
        compute it again, as rollout.schedule says. Requests never share any."""
        self.version = version
        if self.cfg.rollout.schedule.kv_cache != "keep":
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors by checkpoint name into the live model.

        Raises: Refusal for a name that the model does not have.
        """
        self._held.write(weights, model=self.model)

    reload_weights = load_weights

    # ---------------------------------------------------------------- sleep

    @property
    def can_sleep(self) -> bool:
        """Whether there are keys and values: only these are freed."""
        return self.world.is_inference and self._runner.cache.nbytes > 0

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the KV cache. The weights stay."""
        self._num_slots = self._runner.cache.num_slots
        self._runner.cache = self._runner.cache.resized(0)
        return_freed_memory()

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Allocate the KV cache again. The weights are there."""
        if part == "cache":
            self._runner.cache = self._runner.cache.resized(self._num_slots)

    def held_bytes(self) -> int:
        """Return the bytes in use, see EngineProtocol."""
        if self.world.device.type == "cuda":
            return device_bytes(self.world.device)
        return self._runner.cache.nbytes + sum(t.nbytes for t in live_tensors(self.model).values())

    def close(self) -> None:
        """Free the model and its cache."""
        if self.world.is_inference:
            del self._runner, self._held
