"""vLLM inside the process: its groups over the whole world, an engine per inference rank.

Serves vLLM 0.24 to 0.33. Everything this program knows of vLLM's internals stands here:
how its groups are laid out, and how its executor is told its rank; but for what its CPU build
needs, see vllm_cpu.py, its LoRA, see vllm_adapter.py, and its routers, see vllm_routes.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.engine.protocol import Completion, Request
from spmdrl.engine.vllm_adapter import AdapterSlot, lora_arguments
from spmdrl.engine.vllm_cpu import keep_expert_weights_live, keep_linear_weights_live
from spmdrl.engine.vllm_routes import Routes, make_routes, route_arguments
from spmdrl.model.live_bytes import device_bytes
from spmdrl.world import World

log = logging.getLogger(__name__)

INSTALL_HINT = (
    "vLLM is not importable: {error}. On a GPU machine `pip install vllm==0.32.0`; on the CPU "
    "use the pinned list in requirements/cpu.txt (see the README). Where vLLM does not run, set "
    "engine.kind to transformers, which needs nothing more."
)


class Engine:
    """One rank's vLLM engine; on ranks that do not generate, only its part in the groups.

    Every rank constructs it, at the same place: vLLM lays its process groups out over the
    whole world, and creating a group takes all ranks.

    Args:
        cfg: uses model, engine, layout and the lengths in data and sampling.
        world: the job.
    Raises:
        ValueError: vLLM is missing, or refuses the model.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.dtype = getattr(torch, cfg.engine.dtype)
        self.version = -1
        self._llm: Any = None
        self._slot: AdapterSlot | None = None
        # {request: [(tokens drawn when these weights were replaced, their version)]}
        self._replaced: dict[str, list[tuple[int, int]]] = {}
        self._unregistered: list[tuple[Tensor, Tensor]] = []  # live, and kept while it sleeps
        self._routes: Routes | None = None  # under model.moe.replay
        self._has_groups = bool(world.inference_ranks)
        if not self._has_groups:
            return
        _prepare_process(cfg, world)
        # Not in TMPDIR, which can be long: a socket's path may have 107 characters.
        self._sockets = tempfile.TemporaryDirectory(
            prefix="spmdrl-", dir=os.environ.get("VLLM_RPC_BASE_PATH", "/tmp")
        )
        with world.watch.wait("create engine groups", -1):
            with _set("VLLM_RPC_BASE_PATH", self._sockets.name):
                _create_groups(cfg, world)
        with world.watch.phase("build engine", -1):
            if world.is_inference:
                with _rng_kept():
                    self._llm = _build(cfg, world)
                    if cfg.model.lora.get("push") == "adapter":
                        self._slot = AdapterSlot(self._runner)
                    if cfg.model.moe.get("replay"):
                        self._routes = make_routes(self._llm, on_cpu=world.device.type == "cpu")
        with world.watch.wait("engines built", -1):
            dist.barrier(group=world.control)

    # ---------------------------------------------------------------- generation

    def add(self, request: Request) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # else the model's own ends a response that no stop id was asked for
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt keeps it from prefixes that older weights computed for unfinished requests.
        prompt = {"prompt_token_ids": list(request.prompt), "cache_salt": str(self.version)}
        request_id = self._llm.add_request(request.key, prompt, params, lora_request=self._lora)
        if self._routes:
            self._routes.added(request.key, request_id)

    def step(self) -> list[Completion]:
        """Run one scheduling step and return what finished in it."""
        found = []
        for output in self._llm.step():
            if output.finished:
                sample = output.outputs[0]
                found.append(
                    self._completion(
                        output.request_id,
                        sample.token_ids,
                        sample.logprobs.logprobs,
                        is_truncated=sample.finish_reason == "length",
                        routes=self._routes and self._routes.finished(output.request_id, output),
                    )
                )
                self._replaced.pop(output.request_id, None)
        return found

    def unfinished(self) -> list[Completion]:
        """Return what was drawn so far for the requests that go on, is_truncated False."""
        return [
            self._completion(
                state.external_req_id,
                state.detokenizer.output_token_ids,
                state.logprobs_processor.logprobs.logprobs,
                is_truncated=False,
                routes=self._routes and self._routes.unfinished(state),
            )
            for state in self._requests()
        ]

    def _requests(self) -> Iterable[Any]:
        return self._llm.output_processor.request_states.values()

    def _completion(
        self,
        key: str,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        *,
        is_truncated: bool,
        routes: Tensor | None,
    ) -> Completion:
        versions: list[int] = []
        for count, version in self._replaced.get(key, ()):
            versions += [version] * (count - len(versions))
        versions += [self.version] * (len(tokens) - len(versions))
        return Completion(
            key, tuple(tokens), tuple(logprobs), is_truncated, tuple(versions), routes
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests are unfinished."""
        return self._llm.has_unfinished_requests()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return per sequence [len] float32 natural logprobs at temperature 1; first is 0.

        Raises: RuntimeError when requests are unfinished: scoring would mix with them.
        """
        from vllm import SamplingParams

        if self.is_busy:
            raise RuntimeError("score() while requests are unfinished; finish them first")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        for i, tokens in enumerate(sequences):
            self._llm.add_request(
                f"score-{i}", {"prompt_token_ids": list(tokens)}, params, lora_request=self._lora
            )
        scored: dict[str, Tensor] = {}
        while self.is_busy:
            for output in self._llm.step():
                if output.finished:
                    pairs = zip(output.prompt_token_ids, output.prompt_logprobs)
                    values = [at[token].logprob if at else 0.0 for token, at in pairs]
                    scored[output.request_id] = torch.tensor(values, dtype=torch.float32)
        return [scored[f"score-{i}"] for i in range(len(sequences))]

    # ---------------------------------------------------------------- weights

    @property
    def model(self) -> nn.Module:
        """The live model, whose parameters the weight stream writes in place."""
        return self._runner.get_model()

    @property
    def _runner(self) -> Any:
        return self._llm.model_executor.driver_worker.worker.model_runner

    def weights_changed(self, version: int) -> None:
        """Take `version` as that of the weights. Prefixes of older weights are not used again;
        unfinished requests keep their KV cache, or compute it anew, as rollout.schedule says."""
        if self._llm is not None and version != self.version:
            for state in self._requests():
                drawn = len(state.detokenizer.output_token_ids)
                self._replaced.setdefault(state.external_req_id, []).append((drawn, self.version))
                if self._routes:
                    self._routes.keep(state)
        self.version = version
        if self._llm is None:
            return
        if not self.is_busy:
            self._llm.reset_prefix_cache()
        elif self.cfg.rollout.schedule.get("kv_cache") != "keep":
            self._llm.reset_prefix_cache(reset_running_requests=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole tensors by checkpoint name into the live model, by vLLM's loader for it."""
        with self._slot.left_out() if self._slot else contextlib.nullcontext():
            self.model.load_weights(weights)

    @property
    def _lora(self) -> Any:
        return self._slot.request if self._slot else None

    def adapter(self, names: Iterable[str]) -> nn.Module:
        """Return the live memory that matrices of these names go into; see AdapterEngine."""
        return self._slot.memory(names)

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole matrices A and scale * B by name into that memory."""
        self._slot.load(weights)

    def reload_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole tensors by checkpoint name through vLLM's layerwise reloading."""
        self._runner.reload_weights(weights_iterator=weights)

    # ---------------------------------------------------------------- sleep

    @property
    def can_sleep(self) -> bool:
        """Whether vLLM's sleep mode is on: on CUDA, unless engine.options says otherwise. vLLM has
        none on the CPU."""
        return self._llm is not None and self._llm.vllm_config.model_config.enable_sleep_mode

    def sleep(self, *, keeps_weights: bool) -> None:
        """Unmap the KV cache and the weights, which keep their addresses.

        Weights that are written anew anyway are dropped (level 2): a host copy (level 1) takes as
        much pinned memory and goes over the bus twice in each step. vLLM keeps the buffers
        through level 2 itself; tensors that modules hold without registering them are kept here.
        """
        self._unregistered = (
            []
            if keeps_weights
            else [(tensor, tensor.cpu()) for tensor in _unregistered_tensors(self.model)]
        )
        self._llm.sleep(1 if keeps_weights else 2)

    def wake(self, part: Literal["weights", "cache"]) -> None:
        """Map memory to the weights, and then to the KV cache."""
        self._llm.wake_up(["weights" if part == "weights" else "kv_cache"])
        if part == "weights":
            for tensor, kept in self._unregistered:
                tensor.copy_(kept)
            self._unregistered = []

    def held_bytes(self) -> int:
        """Return the bytes in use, see EngineProtocol."""
        if self.world.device.type == "cuda":
            return device_bytes(self.world.device)
        return sum(t.nbytes for t in (*self.model.parameters(), *self._runner.kv_caches))

    def close(self) -> None:
        """Free the engine and vLLM's groups. On every rank, before the process group goes."""
        if not self._has_groups:
            return
        from vllm.distributed import parallel_state

        with self.world.watch.wait("close engines", -1):
            dist.barrier(group=self.world.control)
            if self._llm is not None:
                # The executor's shutdown destroys vLLM's groups itself, and with them the
                # default process group, which World still needs: free only what is the model's.
                self._llm = self._slot = None
            parallel_state.destroy_model_parallel()
            dist.barrier(group=self.world.control)
        self._sockets.cleanup()  # of a replica's message queues: their files stay when they close
        self._has_groups = False


# --------------------------------------------------------------------------- construction


def _prepare_process(cfg: Config, world: World) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core stays in this process
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if world.device.type == "cpu":
        os.environ["VLLM_DIST_IDENT"] = f"spmdrl-{os.environ['MASTER_PORT']}"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not cfg.model.kernels.get("compile"):
            # vLLM compiles a small logprob helper: 5 to 19 s at the first generation.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL_HINT.format(error=error)) from error
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _create_groups(cfg: Config, world: World) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    backend = "nccl" if world.device.type == "cuda" else "gloo"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world.world_size, world.rank, "env://", world.local_rank, backend
        )
        parallel_state.initialize_model_parallel(cfg.layout.inference_tp)


def _build(cfg: Config, world: World) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = world.device.type == "cpu"
    if on_cpu:
        keep_linear_weights_live()
        keep_expert_weights_live()
    is_shared = cfg.layout.roles.shares_devices
    options = {
        "enable_prefix_caching": True,
        "enable_sleep_mode": is_shared and not on_cpu,
    } | cfg.engine.options
    if is_shared and on_cpu:
        log.info(
            "vLLM has no sleep mode on the CPU: its KV cache, engine.cpu_kv_cache_gib %g, "
            "stays during updates",
            cfg.engine.cpu_kv_cache_gib,
        )
    if on_cpu:
        # A prompt computed in parts has the draw behind each part but the last taken back, and
        # vLLM cannot take back that of a seeded request here: CPU generators have no offset.
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    return LLMEngine.from_engine_args(
        EngineArgs(
            distributed_executor_backend=_executor_class(),
            **lora_arguments(cfg),
            **_own_arguments(cfg, on_cpu=on_cpu),
            **options,
        )
    )


def _own_arguments(cfg: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that engine.options may not hold; see config/options.py."""
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
    tokens_per_step = max(cfg.engine.max_batched_tokens, cfg.engine.max_num_seqs)
    recorded = route_arguments(on_cpu=on_cpu) if cfg.model.moe.get("replay") else {}
    return (
        dict(
            model=cfg.model.path,
            skip_tokenizer_init=True,  # token ids in, token ids out
            trust_remote_code=cfg.model.trust_remote_code,
            dtype=cfg.engine.dtype,
            seed=cfg.seed,
            tensor_parallel_size=cfg.layout.inference_tp,
            max_model_len=longest,
            max_num_seqs=cfg.engine.max_num_seqs,
            # On the CPU no prompt is computed in parts (see _build), so a step must hold one whole.
            max_num_batched_tokens=max(tokens_per_step, longest) if on_cpu else tokens_per_step,
            gpu_memory_utilization=cfg.engine.gpu_memory_frac,
            kv_cache_memory_bytes=int(cfg.engine.cpu_kv_cache_gib * 2**30) if on_cpu else None,
            # With it a step is under way while its predecessor's tokens are handed out, and weights
            # could not be exchanged between two steps.
            async_scheduling=False if cfg.rollout.schedule else None,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        | recorded
    )


def _unregistered_tensors(model: nn.Module) -> list[Tensor]:
    """Return the device tensors that modules hold as plain attributes, or hold objects that do,
    the KV cache left out."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for held in _held(module):
            for tensor in (held, *([] if isinstance(held, Tensor) else _held(held))):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    found[id(tensor)] = tensor
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    return [tensor for key, tensor in found.items() if key not in known]


def _held(thing: Any) -> Iterator[Any]:
    """Yield what the attributes of an object are, or contain."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if name == "kv_cache" or isinstance(value, nn.Module):
            continue
        value = [*value.values()] if isinstance(value, dict) else value
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _executor_class() -> type:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class InWorldExecutor(UniProcExecutor):
        """One worker in this process, at this rank's place in the job's own world."""

        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

        def determine_available_memory(self) -> list[int]:
            # Ranks of a replica must agree on the KV cache. vLLM's own launcher-executor
            # reduces over the world, where trainer ranks never answer.
            smallest = torch.tensor(super().determine_available_memory(), dtype=torch.int64)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=get_tp_group().cpu_group)
            return smallest.tolist()

    return InWorldExecutor


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _rng_kept() -> Iterator[None]:
    """vLLM seeds the process's generators; the trainer in the same process keeps its own."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
