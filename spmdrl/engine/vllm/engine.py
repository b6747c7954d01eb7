"""vLLM inside the process: its groups over the whole world, an engine per inference rank.

How that is done, and which versions it serves, stands in internals.py.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.kept_tensors import KeptTensors
from spmdrl.engine.protocol import Completion, Request
from spmdrl.engine.vllm import internals, patches
from spmdrl.engine.vllm.adapter import AdapterSlot, experts_in_files
from spmdrl.engine.vllm.arguments import engine_arguments, with_plain_weights
from spmdrl.engine.vllm.core_loop import CoreLoop, NewTokens
from spmdrl.engine.vllm.exact import exact_arguments, share_head
from spmdrl.engine.vllm.families import model_arguments, refusing_models, try_engine
from spmdrl.engine.vllm.images import make_prompt, reset_encoder_cache
from spmdrl.engine.vllm.outputs import Outputs
from spmdrl.engine.vllm.requests import GroupRequests, scoring_params
from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.machine.live_bytes import device_bytes
from spmdrl.world.world import World, any_algorithms


class VllmEngine:
    """One rank's vLLM engine; on ranks that do not generate, only its part in the groups.

    Every rank constructs it, at the same place: vLLM lays its process groups out over the
    whole world, and creating a group takes all ranks.

    Args:
        cfg: uses model, engine, layout and the lengths in data and sampling.
        world: the job.
    Raises:
        Refusal: vLLM is missing, or (on every rank) cannot run the model.
    """

    sleep_hint: ClassVar[str] = (
        "Set engine.options {enable_sleep_mode: false} and lower engine.gpu_memory_frac"
    )
    gap_cause: ClassVar[str] = (
        "vllm's own code or kernels for this model; engine.kind transformers has others"
    )

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        self.dtype = getattr(torch, cfg.engine.dtype)
        self.version = -1
        self.lend_memory: Callable[[], None] = lambda: None
        self._llm: Any = None
        self._slot: AdapterSlot | None = None
        self._unregistered = KeptTensors([])  # while it sleeps
        self._seeds: random.Random | None = None  # for requests without a seed
        self._has_groups = bool(world.inference_ranks)
        if not self._has_groups:
            return
        on_cpu = world.device.type == "cpu"
        internals.prepare_process(on_cpu=on_cpu, compiles=cfg.model.kernels.compile)
        with world.watch.wait("create engine groups", -1):
            self._sockets = internals.create_groups(
                world,
                tp=cfg.layout.inference_tp,
                dp=cfg.layout.inference_dp,
                has_custom_all_reduce=not cfg.engine.options.get("disable_custom_all_reduce"),
            )
        built = world.watch.wait("engines built", -1)
        with agree(group=world.control, waiting=built), world.watch.phase("build engine", -1):
            if world.is_inference:
                arguments = {
                    "skip_tokenizer_init": True,  # token ids in, token ids out
                    **self._model_arguments(),
                    **engine_arguments(cfg, on_cpu=on_cpu),
                }
                if cfg.layout.inference_dp > 1:
                    arguments["data_parallel_rank"] = world.inference_dp_rank
                with self._algorithms(), _generators_restored(), refusing_models(cfg):
                    self._build(arguments, on_cpu=on_cpu)

    def _model_arguments(self) -> dict[str, Any]:
        has_own_models = self.cfg.engine.traits.has_own_models
        return model_arguments(self.cfg) if has_own_models else exact_arguments(self.cfg)

    def _build(self, arguments: dict[str, Any], *, on_cpu: bool) -> None:
        cfg = self.cfg
        patches.patch_models()
        if on_cpu:
            patches.patch_cpu_build()
        self._llm = internals.make_llm(with_plain_weights(cfg, arguments))
        share_head(self._runner)
        self._loop = self._make_loop()
        if on_cpu:  # its build lacks some kernels
            try_engine(self._loop, params=scoring_params(max_tokens=2))
            self._llm.reset_prefix_cache()
        if internals.seeds_by_numpy(self._llm):
            # The ranks of a replica must draw the same, and replicas must not.
            self._seeds = random.Random(f"{cfg.seed} {self.world.replica}")
        if cfg.model.lora.pushes_adapter:
            self._slot = AdapterSlot(self._runner, experts_in_files(cfg))
        is_first = self.world.replica_rank % cfg.layout.inference_tp == 0
        self._outputs = Outputs(self._loop, self._llm, cfg, on_cpu=on_cpu, is_first=is_first)
        self._returns_masks = cfg.sampling.truncates and not on_cpu  # see sampling_params
        model_config = self._llm.vllm_config.model_config
        self._requests = GroupRequests(
            self._loop, model_config=model_config, returns_masks=self._returns_masks
        )
        self._has_prefixes = False
        """Whether requests came since vLLM's prefix cache was emptied."""

    def _make_loop(self) -> CoreLoop:
        parts = self.cfg.layout.inference_dp
        if parts == 1:
            return CoreLoop(self._llm)
        tp = self.cfg.layout.inference_tp

        def gather(own: list[NewTokens]) -> list[list[NewTokens]]:
            mine = own if self.world.replica_rank % tp == 0 else None
            with self.world.watch.wait("exchange drawn tokens", -1):
                return gather_objects(mine, group=self.world.replica_control)[::tp]

        return CoreLoop(self._llm, part=self.world.inference_dp_rank, parts=parts, gather=gather)

    def _algorithms(self) -> contextlib.AbstractContextManager:
        """Return a context for vLLM's own work: on GPUs torch's deterministic algorithms are off,
        which are slow, and which vLLM's own kernels do not heed."""
        on_gpu = self.world.device.type == "cuda"
        return any_algorithms() if on_gpu else contextlib.nullcontext()

    # ---------------------------------------------------------------- generation

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.seed is None and self._seeds is not None:
            request = replace(request, seed=self._seeds.getrandbits(63))
        self._has_prefixes = True
        lora = None if request.is_of_base else self._lora
        drawn = self._requests.add(request, salt=self._salt, lora=lora)
        self._outputs.add(request, drawn)

    @property
    def _salt(self) -> str:
        # It keeps a prompt from sharing what older weights computed for unfinished requests.
        return str(self.version)

    def step(self) -> list[Completion]:
        """Run one scheduling step and return what finished in it."""
        with self._algorithms():
            return self._outputs.step(self.version)

    def unfinished(self) -> list[Completion]:
        """Return what was drawn so far for unfinished requests, is_truncated False."""
        return self._outputs.unfinished(self.version)

    def tokens_so_far(self, keys: Collection[str]) -> dict[str, Sequence[int]]:
        """Return the ids that were drawn so far for those of these requests that are unfinished."""
        return {one.key: one.tokens for one in self._loop.unfinished if one.key in keys}

    def abort_all(self) -> list[Completion]:
        """End all requests, and return what was drawn for them."""
        return self._outputs.abort_all(self.version)

    @property
    def is_busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._loop.unfinished)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0.

        Raises: RuntimeError when requests are unfinished: scoring would mix with them.
        """
        if self.is_busy:
            raise RuntimeError("score() while requests are unfinished; finish them first")
        params = scoring_params(returns_masks=self._returns_masks)
        model_config = self._llm.vllm_config.model_config
        requests = []
        self._has_prefixes = True
        for i, tokens in enumerate(sequences):
            prompt = make_prompt(tokens, salt=self._salt, model_config=model_config)
            validated = self._loop.validate(prompt, params, lora=self._lora)
            requests.append(self._loop.add(f"score-{i}", validated, seed=None))
        while self.is_busy:
            with self._algorithms():
                self._loop.step()
        first = torch.zeros(1)  # the first token has no logprobs
        return [torch.cat([first, *drawn.prompt_logprobs]) for drawn in requests]

    # ---------------------------------------------------------------- weights

    @property
    def model(self) -> nn.Module:
        """The live model, whose parameters the weight stream writes in place."""
        return self._runner.get_model()

    @property
    def _runner(self) -> Any:
        return internals.model_runner(self._llm)

    def weights_changed(self, version: int) -> None:
        """Set the version of the weights. Prefixes of older weights are not used again.
        Unfinished requests keep their KV cache, or compute it again, as rollout.schedule says."""
        if self._llm is None:
            self.version = version
            return
        if version != self.version:
            self._outputs.weights_replaced(self.version)
        self.version = version
        if not self.is_busy:
            # vLLM visits every block of its cache, also of an empty one: 8 ms for 50 GiB.
            if self._has_prefixes:
                self._llm.reset_prefix_cache()
                self._has_prefixes = False
        elif self.cfg.rollout.schedule.kv_cache != "keep":
            self._llm.reset_prefix_cache(reset_running_requests=True)
            # A request that starts again keeps its salt, and would find the old encoder's outputs.
            reset_encoder_cache(self._llm)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors by checkpoint name into the live model, by vLLM's loader for it."""
        with self._slot.unwrapped() if self._slot else contextlib.nullcontext():
            self.model.load_weights(weights)

    @property
    def _lora(self) -> Any:
        return self._slot.request if self._slot else None

    def adapter(self, names: Iterable[str]) -> nn.Module:
        """Return the live memory of the adapters; see AdapterEngine."""
        assert self._slot is not None
        return self._slot.memory(names)

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole matrices A and scale * B by name into it."""
        assert self._slot is not None
        self._slot.load(weights)

    def reload_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors by checkpoint name through vLLM's layerwise reloading."""
        with self._algorithms():
            internals.reload_weights(self._llm, weights)

    # ---------------------------------------------------------------- sleep

    @property
    def can_sleep(self) -> bool:
        """Whether vLLM's sleep mode is on. vLLM has none on the CPU."""
        return self._llm is not None and self._llm.vllm_config.model_config.enable_sleep_mode

    def sleep(self, *, keeps_weights: bool) -> None:
        """Unmap the KV cache and the weights, which keep their addresses.

        Weights that a push will write are dropped (level 2): a host copy of them (level 1) takes as
        much pinned memory and goes over the bus twice in each step. At level 2 vLLM keeps the
        buffers itself; tensors that modules hold without registering them are copied here.
        """
        if not keeps_weights:
            self._unregistered = KeptTensors(internals.unregistered_tensors(self.model))
        self._llm.sleep(1 if keeps_weights else 2)
        self._has_prefixes = False  # it empties the cache first

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Map memory to the weights, and then to the KV cache."""
        # Memory that the update has freed is still torch's.
        if not internals.wake_empties_cache():
            gc.collect()
            torch.cuda.empty_cache()
        self._llm.wake_up(["weights" if part == "weights" else "kv_cache"])
        if part == "weights":
            self._unregistered.restore()
            self._unregistered = KeptTensors([])

    def held_bytes(self) -> int:
        """Return the bytes in use, see EngineProtocol."""
        if self.world.device.type == "cuda":
            return device_bytes(self.world.device)
        return sum(t.nbytes for t in (*self.model.parameters(), *self._runner.kv_caches))

    def close(self) -> None:
        """Free the engine and vLLM's groups. Every rank calls it, before the process group is
        destroyed."""
        if not self._has_groups:
            return
        self.world.meet(wait="close engines")
        if self._llm is not None:
            internals.close_llm(self._llm)
            self._llm = self._slot = None
            del self._loop, self._outputs, self._requests  # they hold the engine too
        internals.destroy_groups()
        self.world.meet(wait="close engines")
        self._sockets.close()
        self._has_groups = False


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    """Restore the process's generators, which vLLM seeds: a trainer may use them too."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
