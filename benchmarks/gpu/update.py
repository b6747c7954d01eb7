"""Part of `make gpu`: the trainer's update against a bare hand-written loop, at real shapes.

    python -m benchmarks.gpu.update --shape 1b            # or 4b; tiny for a rehearsal on the CPU

Random weights, 8192 packed tokens in four rows, the work of benchmarks/trainer.py: policy-gradient
steps with AdamW and a clipped gradient norm. The bare loop gives transformers a [rows, length]
batch and computes all logits at once. One after the other, as both do not fit beside each other;
that the gradient norms of the first step agree is asserted. Tells tokens/s, MFU, the share of the
bare loop's speed, memory against the planner's, and what deterministic mode costs. That is timed in
a process of its own: cuBLAS reads CUBLAS_WORKSPACE_CONFIG once, when it starts.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from benchmarks.gpu.rows import Clock, Row, attempt, judged, median_seconds, read_rows
from benchmarks.start import quick_folder, torchrun
from benchmarks.trainer import LR, MAX_NORM, bare, ours, packed_batch
from spmdrl import config
from spmdrl.config import Config
from spmdrl.model.flops import training_flops
from spmdrl.model.head import head_chunk_tokens
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import ModelShape, model_shape
from spmdrl.roles import make_trainer
from spmdrl.tools.plan.run import run_of
from spmdrl.tools.plan.trainer_memory import trainer_memory
from spmdrl.world.axes import axes_of
from spmdrl.world.launch import launch_alone
from spmdrl.world.machine.hardware import known_gpu
from spmdrl.world.world import World

_AIM_OF_BARE = 0.95
_AIM_MFU = 0.36
"""Of the peak. Arithmetic for 1b on an H100, milliseconds of a step of 8192 tokens:

    matmuls and attention  111   6.1e13 flops at 610 TFLOP/s, attention at half of that
    logits                   4   8 GB by the kernels of the head; 40 by torch's operations
    AdamW, norm, casts      29   64 GB
    norms, rope, SwiGLU     17   40 GB
    all                    161   38%; 41% on an H200, whose memory is faster

and for 4b 37%, where the blocks are computed twice and only once counts.
"""
_COMPILED_S, _DETERMINISTIC_S = 30.0, 30.0  # that these ways take at least
_MEMORY_OFF = 0.15  # of the planner's figure

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(model_type="qwen3", hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512),
    # As Llama 3.2 1B and Qwen3 4B.
    "1b": dict(model_type="llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
               num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256),
    "4b": dict(model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
               num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936),
}  # fmt: skip

FILE_BYTES = {"tiny": 1e6, "1b": 2.5e9, "4b": 8.1e9}
"""{shape: bytes of its weights in bfloat16}."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    shape: Literal["tiny", "1b", "4b"] = "1b"
    device: Literal["cpu", "cuda"] = "cuda"
    rows: int = 4
    length: int = 2048
    rounds: int = 8
    """Steps that count, after three that do not."""
    lean: bool = False
    """For a model of which 16 bytes a weight are too many: bfloat16 weights and moments, on both
    sides, and activations made again."""
    limit_s: float = 120.0
    """Seconds of this process; see `rows.Clock`."""
    side: Literal["", "deterministic"] = ""
    """One way to compute alone, of the model in `model`: what the parent starts."""
    model: str = ""


def write_model(folder: Path, options: Options, *, embedding_std: float = 0.0) -> str:
    """Write random weights of a shape, made on the device: on the host it would take minutes.

    Args:
        embedding_std: of the embedding, which is the head too; 0 leaves it as the family has it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SHAPES[options.shape] | {
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**sizes), dtype=torch.bfloat16
        )
    if embedding_std:
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=embedding_std)
    model.save_pretrained(folder)
    return str(folder)


def config_of(options: Options, path: str, *, compile: bool, deterministic: bool = False) -> Config:
    """Return what train.py would be given."""
    prompt, dtype = options.length // 4, "bfloat16" if options.lean else "float32"
    return Config(
        output_dir=str(Path(path).parent / "run"),
        steps=1000,
        deterministic=deterministic,
        layout=config.LayoutSettings(placement="offline", world_size=1, device=options.device),
        model=config.ModelSettings(
            path=path,
            kernels=config.KernelsSettings(compile=compile),
            memory=config.MemorySettings(
                activation_checkpointing="full" if options.lean else "none",
                master_dtype=dtype,
                optimizer_dtype=dtype,
            ),
        ),
        data=config.DataSettings(max_prompt_tokens=prompt),
        sampling=config.SamplingSettings(max_response_tokens=options.length - prompt),
        batch=config.BatchSettings(tokens_per_microbatch=options.rows * options.length),
        algorithm=config.AlgorithmSettings(correction="none"),
        optimizer=config.OptimizerSettings(lr=LR, max_grad_norm=MAX_NORM),
    )


@dataclass(frozen=True)
class Timed:
    """One side's figures."""

    seconds: float
    grad_norm: float
    """Of the first step, before clipping."""
    peak_bytes: int


def time_bare(options: Options, path: str, tokens: Tensor, advantages: Tensor) -> Timed:
    """Time a loop as one writes it by hand."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if options.lean else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    model = model.to(tokens.device).train()
    if options.lean:
        model.gradient_checkpointing_enable()
    norms: list[Tensor] = []
    step = bare(model, tokens, advantages, compute_dtype="bfloat16")
    return timed(lambda: norms.append(step()), options, lambda: float(norms[0]))


def time_ours(cfg: Config, options: Options, tokens: Tensor, advantages: Tensor) -> Timed:
    """Time the trainer's update, from a batch on the host."""
    launch_alone()
    world = World.start(cfg)
    try:
        trainer = make_trainer(cfg, world)
        norms: list[float] = []
        update = trainer.update

        def noted(*args: Any, **named: Any) -> Any:
            """Update, and note the norm."""
            sums = update(*args, **named)
            total, count = sums["policy/grad_norm"]
            norms.append(float(total) / float(count))
            return sums

        trainer.update = noted
        batch = packed_batch(tokens, prompt=tokens.shape[1] // 4)
        return timed(ours(trainer, batch, advantages), options, lambda: norms[0])
    finally:
        world.close()


def timed(step: Callable[[], None], options: Options, norm: Callable[[], float]) -> Timed:
    """Run the steps and return what they took."""
    is_cuda = options.device == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if is_cuda else lambda: None
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, warm=3, rounds=options.rounds, wait=wait)
    return Timed(seconds, norm(), torch.cuda.max_memory_allocated() if is_cuda else 0)


def free() -> None:
    """Give the memory of what went out of use back."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def tell(name: str, found: Timed, bare: Timed, *, options: Options, shape: ModelShape) -> None:
    """Print the rows of one way to compute."""
    off = abs(found.grad_norm / bare.grad_norm - 1)
    assert off < 0.05, (
        f"gradient norm {found.grad_norm} against the bare loop's {bare.grad_norm}: "
        "the two did not do the same work"
    )
    lengths = torch.full((options.rows,), options.length)
    scored = options.rows * (options.length - options.length // 4)
    flops = training_flops(shape, lengths=lengths, num_scored=scored)
    gpu = known_gpu(torch.cuda.get_device_name()) if options.device == "cuda" else None
    tokens, share = options.rows * options.length, bare.seconds / found.seconds
    mfu = flops / found.seconds / gpu.flops if gpu else None
    numbers = dict(seconds=found.seconds, bare_s=bare.seconds, share=share, mfu=mfu, grad_off=off)
    judged(
        f"update at {options.shape}, {name}",
        f"{tokens / found.seconds:,.0f} tokens/s, {share:.3f} of the bare loop",
        beside=f"{tokens / bare.seconds:,.0f} tokens/s",
        met=share >= _AIM_OF_BARE,
        aim=f"{_AIM_OF_BARE} of it",
        **numbers,
    ).tell()
    if mfu is not None:
        judged(
            f"update at {options.shape}, {name}: MFU", f"{mfu:.1%}", met=mfu >= _AIM_MFU,
            beside=f"{flops / bare.seconds / gpu.flops:.1%}", aim=f"{_AIM_MFU:.0%}",
            kind="matmul_frac", mfu=mfu,
        ).tell()  # fmt: skip


def tell_memory(found: Timed, cfg: Config, *, options: Options, shape: ModelShape) -> None:
    """Print what torch allocated at most, beside what the planner says."""
    hf_model, prompt = build_meta_model(cfg.model), options.length // 4
    run = run_of(
        cfg, shape, on_gpu=True, chunk_tokens=head_chunk_tokens(cfg, hf_model, on_gpu=True),
        prompt_tokens=prompt, response_tokens=options.length - prompt,
    )  # fmt: skip
    causes = dict(trainer_memory(run, axes_of(cfg)).causes)
    causes.pop("CUDA context")
    planned = sum(causes.values())
    off = found.peak_bytes / planned - 1
    what, beside = f"memory of the update at {options.shape}", f"{planned / 2**30:.2f} GiB planned"
    if options.device == "cpu":
        Row(what, "needs CUDA", beside, verdict="not run").tell()
        return
    judged(
        what,
        f"{found.peak_bytes / 2**30:.2f} GiB at most",
        beside=beside,
        met=abs(off) <= _MEMORY_OFF,
        aim=f"within {_MEMORY_OFF:.0%}",
        peak=found.peak_bytes,
        planned=planned,
        causes=causes,
    ).tell()


def batch_of(options: Options) -> tuple[Tensor, Tensor]:
    """Return the tokens [rows, length] and an advantage for each row, on the device."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(8, 96, (options.rows, options.length), generator=drawn)
    advantages = torch.randn(options.rows, generator=drawn)
    return tokens.to(options.device), advantages.to(options.device)


def deterministic_side(options: Options) -> None:
    """Print the seconds of the deterministic way as a row for the parent."""
    cfg = config_of(options, options.model, compile=False, deterministic=True)
    found = time_ours(cfg, options, *batch_of(options))
    Row(options.side, "", numbers={"seconds": found.seconds}).tell()


def tell_deterministic(options: Options, path: str, plain: Timed, *, timeout_s: float) -> None:
    """Print what deterministic mode costs, from a process of its own."""
    words = ["-m", "benchmarks.gpu.update", "--side", "deterministic"]
    words += ["--model", path, *(["--lean"] if options.lean else [])]
    for name in ("shape", "device", "rows", "length", "rounds"):
        words += [f"--{name}", str(getattr(options, name))]
    # By torchrun, since this process has the port of a job of its own in its environment.
    printed = torchrun(1, *words, timeout_s=timeout_s)
    seconds = next(read_rows(printed)).numbers["seconds"]
    ratio = seconds / plain.seconds
    what = f"deterministic mode of the update at {options.shape}"
    Row(what, f"{ratio:.2f} of the time", numbers={"ratio": ratio}).tell()


def main(options: Options) -> None:
    """Time the bare loop, then ours in each way."""
    if options.side:
        return deterministic_side(options)
    clock = Clock(options.limit_s)
    with tempfile.TemporaryDirectory(dir=quick_folder(FILE_BYTES[options.shape])) as scratch:
        path = write_model(Path(scratch) / "model", options)
        free()
        tokens, advantages = batch_of(options)
        bare = time_bare(options, path, tokens, advantages)
        free()
        cfg = config_of(options, path, compile=False)
        shape = model_shape(build_meta_model(cfg.model))
        plain: Timed | None = None
        what = f"update at {options.shape}"
        with attempt(f"{what}, as it is"):
            plain = time_ours(cfg, options, tokens, advantages)
            tell("as it is", plain, bare, options=options, shape=shape)
            tell_memory(plain, cfg, options=options, shape=shape)
        free()
        # A rehearsal compiles nothing: on a CPU it takes minutes.
        is_compiled = options.device == "cuda" and clock.has(_COMPILED_S, what=f"{what}, compile")
        if is_compiled:
            with attempt(f"{what}, compile"):
                compiled = config_of(options, path, compile=True)
                found = time_ours(compiled, options, tokens, advantages)
                tell("compile", found, bare, options=options, shape=shape)
            free()
        if plain and clock.has(_DETERMINISTIC_S, what=f"{what}, deterministic"):
            with attempt(f"{what}, deterministic"):
                tell_deterministic(options, path, plain, timeout_s=clock.left_s)


if __name__ == "__main__":
    main(tyro.cli(Options))
    sys.stdout.flush()
