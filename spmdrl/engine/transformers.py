"""Generation with the transformers model itself, where vLLM does not run.

The model's own modules compute, as in the trainer (transformers_runner.py); only attention is ours,
with a cache of keys and values (kv_cache.py). Sequences are admitted and retired between steps: a
step is one forward pass over the prompts of new sequences and one token of each that is under way,
packed without padding, and draws a token for each. It needs nothing but what the trainer has. One
rank holds the whole model, a sequence takes room in the cache for the longest one, and a GPU gets
no CUDA graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.penalties import penalised
from spmdrl.engine.protocol import Completion, Request
from spmdrl.engine.seeded_draws import draw, numbers
from spmdrl.engine.stop_strings import make_stop_strings
from spmdrl.engine.transformers_runner import ModelRunner, Sampled
from spmdrl.engine.truncation import SampledRows
from spmdrl.errors import Refusal
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.tensor_parts import Held
from spmdrl.model_inputs import TokenIds
from spmdrl.world.comm import await_all
from spmdrl.world.machine.live_bytes import device_bytes
from spmdrl.world.world import World


class TransformersEngine:
    """One rank's model and cache; nothing on ranks that do not generate.

    Args:
        cfg: uses model, engine, rollout.schedule and the lengths in data and sampling.
        world: the job.
    Raises: Refusal when the model cannot be loaded, or the cache has no room for a sequence.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.dtype = getattr(torch, cfg.engine.dtype)
        self.version = -1
        self._longest = cfg.longest_sequence
        self._keeps_sets = cfg.sampling.truncates
        self._waiting: deque[Sampled] = deque()
        self._running: list[Sampled] = []  # the i-th has slot i
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
        # Replicas draw for different prompts.
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
                "sampling.max_response_tokens - 1)"
            )
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**63 - 1, (), generator=self._seeds))
        kept: SampledRows | None = [] if self._keeps_sets and request.is_cut else None
        self._stops.added(request)
        self._waiting.append(Sampled(request, seed, kept=kept))

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
        self._draw(self._runner.next_logits(self._running, old=old))
        return self._retire()

    def _admitted(self) -> list[Sampled]:
        """Take new sequences while there are slots, and tokens in the step's budget.

        At least one, if there is a slot: a prompt above the budget goes without other new ones.
        Equal prompts count once.
        """
        free = self._runner.cache.num_slots - len(self._running)
        budget = self.cfg.engine.max_batched_tokens - len(self._running)
        admitted: list[Sampled] = []
        prompts: set[TokenIds] = set()
        while self._waiting and len(admitted) < free:
            first = self._waiting[0]
            if (own := first.all_tokens) not in prompts:
                if admitted and first.num_tokens > budget:
                    break
                budget -= first.num_tokens
                prompts.add(own)
            admitted.append(self._waiting.popleft())
        return admitted

    def _draw(self, logits: Tensor) -> None:
        device = self.world.device
        running = self._running
        seeds, counts = zip(*((s.seed, len(s.tokens)) for s in running))
        at = numbers(self._runner.tensor(seeds), self._runner.tensor(counts))
        temperatures = torch.tensor([s.request.temperature for s in running], device=device)
        logits = penalised(logits, running)
        truncations = [s.request.truncation for s in running]
        *drawn, sets = draw(
            logits,
            temperatures=temperatures,
            at=at,
            truncations=truncations if any(t.is_on for t in truncations) else (),
        )
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
            sequence.is_at_string = bool(self._stops.end(sequence.request.key, sequence.tokens))
        for place, sequence in enumerate(running):
            if sequence.kept is not None and sets is not None:
                sequence.kept.append((sets, place))

    def _retire(self) -> list[Completion]:
        """Take out what is finished, and close the gaps from the end."""
        found = []
        gaps = []
        for slot, sequence in enumerate(self._running):
            is_full = (
                len(sequence.tokens) >= sequence.request.max_tokens
                or sequence.num_tokens >= self._longest
            )
            if sequence.is_stopped or is_full:
                found.append(sequence.completion(is_truncated=not sequence.is_stopped))
                self._stops.drop(sequence.request.key)
                gaps.append(slot)
        left = len(self._running) - len(gaps)
        finished = set(gaps)
        to = [slot for slot in gaps if slot < left]
        of = [slot for slot in range(left, len(self._running)) if slot not in finished]
        for source, target in zip(of, to):
            self._running[target] = self._running[source]
        del self._running[left:]
        if to:
            self._runner.cache.move(of, to, length=max(s.num_tokens for s in self._running))
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

    def take_back(self) -> list[Completion]:
        """End the requests that go on, and return what was drawn for them."""
        found = self.unfinished()
        for completion in found:
            self._stops.drop(completion.key)
        self._running.clear()
        self._waiting.clear()
        return found

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
        """Take `version` as that of the weights. Unfinished requests keep their keys and values,
        or compute them anew, as rollout.schedule says; no request uses those of another step."""
        self.version = version
        if self.cfg.rollout.schedule.kv_cache != "keep":
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole tensors by checkpoint name into the live model.

        Raises: Refusal for a name that the model does not have.
        """
        boxes = self._held.boxes()
        for name, tensor in weights:
            if name not in boxes:
                raise Refusal(f"{type(self.model).__name__} has no tensor {name}")
            (whole,) = boxes[name]
            self._held.value(name, whole).live.copy_(tensor)

    reload_weights = load_weights

    # ---------------------------------------------------------------- sleep

    @property
    def can_sleep(self) -> bool:
        """Whether there are keys and values, which alone are freed."""
        return self.world.is_inference and self._runner.cache.nbytes > 0

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the KV cache. Weights stay: they are memory like any other here."""
        self._num_slots = self._runner.cache.num_slots
        self._runner.cache = self._runner.cache.resized(0, self._longest)

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Make a new cache."""
        if part == "cache":
            self._runner.cache = self._runner.cache.resized(self._num_slots, self._longest)

    def held_bytes(self) -> int:
        """Return the bytes in use, see EngineProtocol."""
        if self.world.device.type == "cuda":
            return device_bytes(self.world.device)
        return self._runner.cache.nbytes + sum(t.nbytes for t in live_tensors(self.model).values())

    def close(self) -> None:
        """Free the model and its cache."""
        if self.world.is_inference:
            del self._runner, self._held
