"""Compare the trainer's update with a bare hand-written loop, on one device, in one process.

    python benchmarks/trainer.py                                    # a small model on the CPU
    python benchmarks/trainer.py --device cuda --model Qwen/Qwen3-1.7B --compute-dtype bfloat16 \\
        --rows 4 --length 2048 --kernels '{liger: true, compile: true}'

Both take the same policy-gradient steps on the same full rows of equal length, of which the first
quarter is a prompt, with AdamW and a clipped gradient norm; that their weights agree at the end is
asserted. The bare loop gives transformers a [rows, length] batch, which needs no packing, under
autocast where --compute-dtype asks for it, and computes all logits at once. Ours packs the rows,
computes as `train.py` does, and reports its metrics. They go in turns, and the ratio is the median
over the rounds of one round's. Prints a Markdown table.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
import yaml
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import header, row, scalars_of
from spmdrl import config
from spmdrl.config import Config
from spmdrl.credit import per_token
from spmdrl.model.flops import training_flops
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import model_shape
from spmdrl.roles import make_trainer
from spmdrl.tools.commands.create_model import create_model
from spmdrl.train.trainer import Trainer
from spmdrl.types import Batch, Microbatch, Sums
from spmdrl.world.launch import launch_alone
from spmdrl.world.machine.hardware import known_gpu
from spmdrl.world.world import World

LR, MAX_NORM = 1e-5, 1.0


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = ""
    """Hugging Face folder or hub name; empty makes a Qwen3 of `hidden` and `layers`."""
    hidden: int = 256
    layers: int = 4
    rows: int = 8
    """Rows of a step; all are one micro-batch."""
    length: int = 256
    """Tokens of a row."""
    rounds: int = 9
    """Steps of each that count, after two that do not."""
    device: Literal["cpu", "cuda"] = "cpu"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    kernels: str = "{}"
    """model.kernels of ours, as JSON or YAML."""


def bare_model(path: str, device: torch.device) -> nn.Module:
    """Return the model as transformers gives it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)


def bare(
    model: nn.Module, tokens: Tensor, advantages: Tensor, *, compute_dtype: str
) -> Callable[[], Tensor]:
    """Return one step of a loop as one writes it by hand; it gives the gradient's norm before it is
    clipped."""
    prompt = tokens.shape[1] // 4
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    is_16_bits = compute_dtype == "bfloat16"

    def step() -> Tensor:
        """Take a step of policy gradient on all rows."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=is_16_bits):
            logits = model(tokens, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, 1:, None])[..., 0][:, prompt - 1 :]
        ratio = (chosen - chosen.detach()).exp()
        (-(ratio * advantages[:, None]).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).detach()
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def packed_batch(tokens: Tensor, *, prompt: int) -> Batch:
    """Return a batch of rows of equal length, all in one micro-batch on the host.

    Args:
        tokens: [rows, length]. prompt: tokens at the beginning of each that are a prompt.
    """
    rows, length = tokens.shape
    mask = (torch.arange(length) >= prompt).repeat(rows)
    one = torch.ones(rows, dtype=torch.int64)
    packed = Microbatch(
        tokens=tokens.flatten().cpu(),
        position_ids=torch.arange(length).repeat(rows),
        cu_seqlens=torch.arange(0, rows * length + 1, length, dtype=torch.int32),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.arange(rows),
    )
    scalars = scalars_of(length * one, (length - prompt) * one)
    return Batch(scalars=scalars, updates=((packed,),), update_ids=0 * one)


def ours(trainer: Trainer, batch: Batch, advantages: Tensor) -> Callable[[], Sums]:
    """Return one step of the trainer, which returns its sums."""
    weights = advantages.double().cpu()
    steps = itertools.count()

    def step() -> Sums:
        """Take a step as train.py does."""
        number = next(steps)
        annotated = trainer.annotate(batch, step=number)
        return trainer.update(annotated, per_token(annotated, weights), step=number)

    return step


def small_model(folder: Path, *, hidden: int, layers: int, longest: int) -> str:
    """Write a random Qwen3 with heads of 64 elements, and return its folder."""
    made = create_model(
        folder,
        hidden_size=hidden,
        layers=layers,
        heads=hidden // 64,
        kv_heads=hidden // 64,
        intermediate=3 * hidden,
        max_positions=longest,
    )
    return str(made)


def config_of(options: Options, path: str, out: str) -> Config:
    """Return what train.py would be given, but for data and engines."""
    prompt = options.length // 4
    return Config(
        output_dir=out,
        steps=1000,
        layout=config.LayoutSettings(placement="offline", world_size=1, device=options.device),
        model=config.ModelSettings(
            path=path,
            compute_dtype=options.compute_dtype,
            kernels=config.KernelsSettings(**yaml.safe_load(options.kernels)),
        ),
        data=config.DataSettings(max_prompt_tokens=prompt),
        sampling=config.SamplingSettings(max_response_tokens=options.length - prompt),
        batch=config.BatchSettings(tokens_per_microbatch=options.rows * options.length),
        algorithm=config.AlgorithmSettings(correction="none"),
        optimizer=config.OptimizerSettings(lr=LR, schedule="constant", max_grad_norm=MAX_NORM),
    )


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return how long one step takes, everything that it put on the device done."""
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(options: Options) -> None:
    """Time both, in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        path = options.model or small_model(
            Path(scratch) / "model",
            hidden=options.hidden,
            layers=options.layers,
            longest=options.length,
        )
        launch_alone()
        cfg = config_of(options, path, scratch)
        world = World.start(cfg)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(8, 96, (options.rows, options.length), generator=generator)
        advantages = torch.randn(options.rows, generator=generator)
        tokens, advantages = tokens.to(world.device), advantages.to(world.device)
        model, trainer = bare_model(path, world.device), make_trainer(cfg, world)
        steps = {
            "bare loop": bare(model, tokens, advantages, compute_dtype=options.compute_dtype),
            "spmdrl": ours(trainer, packed_batch(tokens, prompt=options.length // 4), advantages),
        }
        found: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(options.rounds + 2):
            for name, step in steps.items():
                took = seconds(step, world.device)
                if turn >= 2:
                    found[name].append(took)
            print(f"round {turn + 1} of {options.rounds + 2}", file=sys.stderr, flush=True)
        check_same_weights(model, trainer, steps=options.rounds + 2)
        show(options, path, found)
        world.close()


def check_same_weights(model: nn.Module, trainer: Trainer, *, steps: int) -> None:
    """Raise AssertionError unless both took the same steps: AdamW moves a weight by up to the
    learning rate in each, and the two must stay within a tenth of that way, in the mean."""
    own = trainer.weights.shards()
    for name, weight in model.named_parameters():
        gap = float((own[name].full_tensor() - weight).abs().mean()) / (LR * steps)
        assert gap < 0.1, f"{name} is {gap:.3f} of the way apart: the two did not do the same work"


def show(options: Options, path: str, found: dict[str, list[float]]) -> None:
    """Print the table."""
    lengths = torch.full((options.rows,), options.length)
    shape = model_shape(build_meta_model(config.ModelSettings(path=path)))
    flops = training_flops(
        shape, lengths=lengths, num_scored=options.rows * (options.length - options.length // 4)
    )
    gpu = known_gpu(torch.cuda.get_device_name()) if options.device == "cuda" else None
    print(
        f"{shape.numel / 1e6:.1f} M parameters, {options.rows} rows of {options.length} tokens, "
        f"{options.compute_dtype}, {options.device}, torch {torch.__version__}, kernels "
        f"{options.kernels}\n"
    )
    header("", "s/step", "tokens/s", "TFLOP/s", "MFU")
    for name, took in found.items():
        median = statistics.median(took)
        share = f"{flops / median / gpu.flops:.3f}" if gpu else "-"
        rate = options.rows * options.length / median
        row(name, f"{median:.4f}", f"{rate:.0f}", f"{flops / median / 1e12:.4f}", share)
    ratios = [a / b for a, b in zip(found["bare loop"], found["spmdrl"])]
    print(
        f"\nspmdrl's tokens/s are {statistics.median(ratios):.3f} of the bare loop's "
        f"({min(ratios):.3f} to {max(ratios):.3f} in single rounds)"
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
