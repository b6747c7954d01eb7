"""Part of `make gpu`: our engine against vLLM's own `LLM.generate`, on the same requests.

    python -m benchmarks.gpu.engine --shape 1b            # tiny for a rehearsal on the CPU

Each side has a process of its own and the whole GPU; a seed per request on all, no
end-of-sequence, so that every request has its full length, which is asserted. Ours records the
logprob of every sampled token, so `LLM.generate` is asked for it too. It runs twice: `limited` as
ours, in one process with our limits of an engine step, which shows what our code costs; and
`shipped` with vLLM's defaults, its core in a process of its own and more sequences at a time, which
shows what our limits and the one process cost.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks.gpu import update
from benchmarks.gpu.rows import Clock, Row, attempt, judged, read_rows
from benchmarks.start import draw_all, output_of, quick_folder
from spmdrl import config
from spmdrl.config import Config
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import ModelShape, model_shape
from spmdrl.tools.plan.run import Rates, run_of
from spmdrl.tools.plan.seconds import step_seconds
from spmdrl.world.axes import axes_of
from spmdrl.world.machine.hardware import Gpu, known_gpu

_AIM = 0.98  # of LLM.generate's tokens/s with our limits: the rest is noise of two processes
_SEQS = config.EngineSettings.max_num_seqs
_SIDE_S = 30.0  # that a side takes at least
_PROMPT = 256


@dataclass(frozen=True)
class Options:
    """What to run."""

    shape: Literal["tiny", "1b", "4b"] = "1b"
    device: Literal["cpu", "cuda"] = "cuda"
    requests: int = 512
    length: int = 256
    """Tokens of a response."""
    rounds: int = 2
    """Rounds that count, after one that does not."""
    side: Literal["", "ours", "deterministic", "limited", "shipped"] = ""
    """One side alone, on the model in `model`: what the parent starts."""
    model: str = ""
    limit_s: float = 200.0
    """Seconds of this process; see `rows.Clock`."""


def prompts(options: Options, turn: int) -> list[list[int]]:
    """Return the prompts of one round: [requests] of random ids, other ones in each."""
    drawn = torch.Generator().manual_seed(turn)
    return torch.randint(8, 400, (options.requests, _PROMPT), generator=drawn).tolist()


def ours(options: Options) -> list[float]:
    """Return the seconds of each round of our engine."""
    from spmdrl.engine import make_engine
    from spmdrl.engine.protocol import Request
    from spmdrl.world.launch import launch_alone
    from spmdrl.world.world import World

    dtype: Literal["bfloat16", "float32"] = "float32" if options.device == "cpu" else "bfloat16"
    cfg = Config(
        deterministic=options.side == "deterministic",
        layout=config.LayoutSettings(placement="colocated", world_size=1, device=options.device),
        model=config.ModelSettings(path=options.model),
        data=config.DataSettings(max_prompt_tokens=_PROMPT),
        sampling=config.SamplingSettings(max_response_tokens=options.length),
        engine=config.EngineSettings(dtype=dtype, options={"enable_sleep_mode": False}),
    )
    launch_alone()
    world = World.start(cfg)
    engine, took = make_engine(cfg, world), []
    for turn in range(options.rounds + 1):
        asked = [
            Request(str(i), tuple(prompt), options.length, 1.0, 7919 * turn + i, ())
            for i, prompt in enumerate(prompts(options, turn))
        ]
        engine.weights_changed(turn)
        seconds, _ = draw_all(engine, asked)
        took.append(seconds)
    engine.close()
    world.close()
    return took[1:]


def _limits() -> dict[str, Any]:
    """Return arguments of vLLM that make an engine's steps as large as ours."""
    return dict(
        max_num_seqs=_SEQS,
        max_num_batched_tokens=config.EngineSettings.max_batched_tokens,
        gpu_memory_utilization=config.EngineSettings.gpu_memory_frac,
    )


def llm(options: Options) -> list[float]:
    """Return the seconds of each round of LLM.generate."""
    is_limited = options.side == "limited"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if is_limited:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    on_cpu: dict[str, Any] = {}
    if options.device == "cpu":
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # A seeded request cannot be prefilled in chunks on a CPU.
        on_cpu = {"enforce_eager": True, "enable_chunked_prefill": False}
    from vllm import LLM, SamplingParams

    own = LLM(
        options.model,
        dtype="float32" if options.device == "cpu" else "bfloat16",
        max_model_len=_PROMPT + options.length,
        skip_tokenizer_init=True,
        seed=0,
        **(_limits() if is_limited else {}),
        **on_cpu,
    )
    took = []
    for turn in range(options.rounds + 1):
        asked = [
            SamplingParams(
                temperature=1.0, max_tokens=options.length, seed=7919 * turn + i,
                ignore_eos=True, detokenize=False, logprobs=0,
            )
            for i in range(options.requests)
        ]  # fmt: skip
        own.reset_prefix_cache()
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts(options, turn)]
        began = time.perf_counter()
        done = own.generate(inputs, asked, use_tqdm=False)
        took.append(time.perf_counter() - began)
        tokens = sum(len(each.outputs[0].token_ids) for each in done)
        assert tokens == options.requests * options.length, f"{tokens} tokens were drawn"
    if not is_limited:
        own.llm_engine.engine_core.shutdown()  # its process would outlive this one
    return took[1:]


def engine_step_s(options: Options, shape: ModelShape, *, tokens_per_s: float, gpu: Gpu) -> float:
    """Return the host's seconds in an engine step with which the planner, all else by its
    formula, gives the measured tokens/s; below 0 where reading weights alone takes longer."""
    cfg = Config(
        layout=config.LayoutSettings(placement="colocated", world_size=1),
        data=config.DataSettings(max_prompt_tokens=_PROMPT),
        batch=config.BatchSettings(prompts_per_step=options.requests, group_size=1),
        sampling=config.SamplingSettings(max_response_tokens=options.length),
    )
    run = run_of(
        cfg, shape, on_gpu=True, chunk_tokens=1,
        prompt_tokens=_PROMPT, response_tokens=options.length,
    )  # fmt: skip

    def generate(step_s: float) -> float:
        """Return the planner's seconds of generation."""
        rates = Rates(gpu, engine_step_s=step_s)
        return step_seconds(run, axes_of(cfg), rates=rates, tokens=1, slots=_SEQS).generate

    took = options.requests * options.length / tokens_per_s
    return (took - generate(0.0)) / (generate(1.0) - generate(0.0))


def tell_step(options: Options, model: str, *, tokens_per_s: float) -> None:
    """Print the host's part of an engine step, where the GPU is in the planner's table."""
    gpu = known_gpu(torch.cuda.get_device_name()) if options.device == "cuda" else None
    if gpu is None:
        return
    shape = model_shape(build_meta_model(config.ModelSettings(path=model)))
    found = engine_step_s(options, shape, tokens_per_s=tokens_per_s, gpu=gpu)
    # A rate of 0 or less says that the formula's share of the memory bandwidth is too small.
    numbers = {"kind": "engine_step_s", "engine_step_s": found} if found > 0 else {}
    what = f"host's part of an engine step at {options.shape}"
    Row(what, f"{1000 * found:.2f} ms", beside="3 to 12 ms planned", numbers=numbers).tell()


def one_side(options: Options) -> None:
    """Print one side's seconds as a row for the parent."""
    took = llm(options) if options.side in ("limited", "shipped") else ours(options)
    Row(options.side, "", numbers={"seconds": took}).tell()
    sys.stdout.flush()
    os._exit(0)


def run_side(side: str, options: Options, model: str, *, timeout_s: float) -> float:
    """Return the tokens per second of the best round of one side, from its own process.

    Raises: RuntimeError when it fails, see `output_of`.
    """
    words = [sys.executable, "-m", "benchmarks.gpu.engine", "--side", side, "--model", model]
    for name in ("device", "requests", "length", "rounds"):
        words += [f"--{name}", str(getattr(options, name))]
    printed = output_of(words, timeout_s=timeout_s)
    seconds = next(read_rows(printed)).numbers["seconds"]
    return options.requests * options.length / min(seconds)


def tell_shares(options: Options, found: dict[str, float]) -> None:
    """Print our tokens/s beside those of vLLM alone.

    Args:
        found: {side: tokens/s}, of those that ran.
    """
    if not {"ours", "limited"} <= set(found):
        return
    share = found["ours"] / found["limited"]
    said = f"{found['ours']:,.0f} tokens/s, {share:.3f} of LLM.generate with our limits"
    beside = f"{found['limited']:,.0f} tokens/s"
    if "shipped" in found:
        said += f", {found['ours'] / found['shipped']:.3f} of it as vLLM ships"
        beside += f", {found['shipped']:,.0f} as it ships"
    judged(
        f"engine at {options.shape}, {options.requests} of {_PROMPT} + {options.length}",
        said,
        beside=beside,
        met=share >= _AIM,
        aim=f"{_AIM} with our limits",
        tokens_per_s=found,
    ).tell()


def main(options: Options) -> None:
    """Run all sides, and ours in deterministic mode."""
    if options.side:
        one_side(options)
    clock = Clock(options.limit_s)
    file_bytes = update.FILE_BYTES[options.shape]
    with tempfile.TemporaryDirectory(dir=quick_folder(file_bytes)) as scratch:
        shaped = update.Options(shape=options.shape, device=options.device)
        model = update.write_model(Path(scratch) / "model", shaped)
        update.free()
        found: dict[str, float] = {}

        def measure(side: str) -> None:
            what = f"engine at {options.shape}, {side}"
            if clock.has(_SIDE_S, what=what):
                with attempt(what):
                    found[side] = run_side(side, options, model, timeout_s=clock.left_s)

        for side in ("ours", "limited", "shipped"):
            measure(side)
        if "ours" in found:
            tell_step(options, model, tokens_per_s=found["ours"])
        tell_shares(options, found)
        measure("deterministic")
        if {"ours", "deterministic"} <= set(found):
            ratio = found["ours"] / found["deterministic"]
            what = f"deterministic mode of the engine at {options.shape}"
            Row(what, f"{ratio:.2f} of the time", numbers={"ratio": ratio}).tell()


if __name__ == "__main__":
    main(tyro.cli(Options))
