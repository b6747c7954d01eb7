"""Part of `make gpu`: one update on the device, in each way it can be computed, against the CPU.

    python -m benchmarks.gpu.parity [--device cuda] [--variants plain compile]

The same ragged rows, the same random model; the reference is float32 on the CPU. AdamW gets a large
epsilon, with which its first step is the gradient times the learning rate: so the change of the
weights shows gradients, whatever memory and kernels were asked for. Tells per variant the loss, the
length of the change and its angle to the reference's; and whether an update of longer rows repeats
to the last bit.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks.gpu.rows import Clock, Row, attempt, judged
from benchmarks.start import scalars_of
from spmdrl import config
from spmdrl.config import Config
from spmdrl.credit import per_token
from spmdrl.exchange import dummy_microbatch
from spmdrl.roles import make_trainer
from spmdrl.tools.commands.create_model import create_model
from spmdrl.types import Batch, Microbatch
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

LENGTHS = (37, 128, 3, 250, 90, 64, 199, 5)
LONG = (1500, 600, 40)
"""Attention adds up gradients over so many blocks of keys that another order of them shows."""
_BF16_ANGLE, _BF16_LENGTH = 0.995, 0.02  # least cosine, most relative difference in bfloat16
_F32_ANGLE, _F32_LENGTH = 0.9999, 1e-3


_VARIANT_S, _COMPILED_S = 3.0, 20.0  # that a variant takes at least


def _kernels(**how: Any) -> dict[str, Any]:
    return {"kernels": config.KernelsSettings(**how)}


def _memory(**how: Any) -> dict[str, Any]:
    return {"memory": config.MemorySettings(**how)}


PLAIN = _kernels(liger=False)
VARIANTS: dict[str, dict[str, Any]] = {
    # Before any with liger: it changes classes of transformers for the whole process.
    "float32, no liger": PLAIN | {"compute_dtype": "float32"},
    "no liger": PLAIN,
    "no liger, padded": _kernels(liger=False, attention="padded"),
    "no liger, flash-attn": _kernels(liger=False, attention="flash"),
    "plain": {},
    "compile": _kernels(compile=True),
    "selective checkpointing": _memory(activation_checkpointing="selective"),
    "full checkpointing": _memory(activation_checkpointing="full"),
    "activations on the host": _memory(offload="activations"),
    "optimizer on the host": _memory(offload="optimizer"),
    "parameters on the host": _memory(offload="parameters"),
    "8-bit moments": _memory(optimizer_dtype="int8"),
    "bfloat16 moments": _memory(optimizer_dtype="bfloat16"),
}
"""{name: fields of the model's settings}, in bfloat16 unless said otherwise."""

_REPEATED = ("no liger", "no liger, padded", "plain")
"""Variants of which an update is taken twice."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    device: str = "cuda"
    variants: tuple[str, ...] = field(default_factory=lambda: (*VARIANTS,))
    limit_s: float = 60.0
    """Seconds of this process; see `rows.Clock`."""


@dataclass(frozen=True)
class Updated:
    """What one update did."""

    loss: float
    grad_norm: float
    change: dict[str, Tensor]
    """By parameter: float32 on the CPU, after minus before."""

    @property
    def flat(self) -> Tensor:
        """All changes in one row."""
        return torch.cat([self.change[name].flatten() for name in sorted(self.change)])


def batch_of(lengths: tuple[int, ...]) -> tuple[Batch, Tensor]:
    """Return ragged rows packed into one micro-batch, of which the first third is a prompt, and an
    advantage for each."""
    drawn = torch.Generator().manual_seed(0)
    count, each = len(lengths), torch.tensor(lengths)
    mask = torch.cat([torch.arange(n) >= max(1, n // 3) for n in lengths])
    packed = Microbatch(
        tokens=torch.randint(8, 96, (sum(lengths),), generator=drawn),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.nn.functional.pad(each.cumsum(0), (1, 0)).int(),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -4.5, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.arange(count),
    )
    scalars = scalars_of(each, each - (each // 3).clamp(min=1))
    batch = Batch(scalars=scalars, updates=((packed,),), update_ids=torch.zeros_like(each))
    return batch, torch.randn(count, generator=drawn, dtype=torch.float64)


def config_of(path: Path, device: str, model: dict[str, Any], **layout: Any) -> Config:
    """Return what train.py would be given for one way to compute, by one rank or a `layout`."""
    own = {"compute_dtype": "bfloat16"} | model
    return Config(
        output_dir=str(path.parent / "run"),
        steps=10,
        layout=config.LayoutSettings(
            **dict(placement="offline", world_size=1, device=device) | layout
        ),
        model=config.ModelSettings(path=str(path), **own),
        data=config.DataSettings(max_prompt_tokens=128),
        sampling=config.SamplingSettings(max_response_tokens=256),
        batch=config.BatchSettings(tokens_per_microbatch=sum(LENGTHS)),
        algorithm=config.AlgorithmSettings(correction="none"),
        optimizer=config.OptimizerSettings(lr=1.0, eps=100.0, max_grad_norm=0.0),
    )


def update(cfg: Config, lengths: tuple[int, ...] = LENGTHS) -> Updated:
    """Take one update, in a world of this process alone if nobody launched it with others."""
    launch_alone()
    world = World.start(cfg)
    try:
        trainer = make_trainer(cfg, world)
        before = _whole(trainer)
        batch, advantages = batch_of(lengths)
        batch = trainer.annotate(replace(batch, updates=_on(world, batch)), step=0)
        sums = trainer.update(batch, per_token(batch, advantages), step=0)
        after = _whole(trainer)
        mean = {name: float(total / count) for name, (total, count) in sums.items() if count}
        change = {name: after[name] - before[name] for name in before}
        return Updated(mean["policy/loss"], mean["policy/grad_norm"], change)
    finally:
        world.close()


def _on(world: World, batch: Batch) -> tuple[tuple[Microbatch, ...], ...]:
    """Return the micro-batches of this rank: all rows are those of the first dp index."""
    if world.dp_index(world.rank):
        return ((dummy_microbatch(world.device),),)
    return tuple(tuple(one.to(world.device) for one in rows) for rows in batch.updates)


def _whole(trainer: Any) -> dict[str, Tensor]:
    shards = trainer.weights.shards()
    return {name: w.detach().full_tensor().float().cpu().clone() for name, w in shards.items()}


def tell(name: str, found: Updated, reference: Updated, *, is_float32: bool) -> None:
    """Print how a variant compares with the reference."""
    ours, right = found.flat.double(), reference.flat.double()
    cosine = float(ours @ right / ours.norm() / right.norm())
    length = abs(float(ours.norm() / right.norm()) - 1)
    least, most = (_F32_ANGLE, _F32_LENGTH) if is_float32 else (_BF16_ANGLE, _BF16_LENGTH)
    judged(
        f"update, {name}",
        f"cosine {cosine:.6f}, length off by {length:.2%}",
        beside=f"loss {found.loss:.5f} against {reference.loss:.5f}",
        met=cosine >= least and length <= most,
        aim=f"cosine {least}, length {most:.1%}",
        cosine=cosine,
        length=length,
        grad_norms=[found.grad_norm, reference.grad_norm],
    ).tell()


def tell_repeated(name: str, cfg: Config) -> None:
    """Take one update twice and print whether the two are equal."""
    first, second = update(cfg, LONG).flat, update(cfg, LONG).flat
    count = int((first != second).sum())
    found = f"{count} of {len(first)} weights differ" if count else "equal"
    judged(f"update, {name}: bits of two", found, met=not count, aim="equal").tell()


def main(options: Options) -> None:
    """Compute the reference, then every variant."""
    clock = Clock(options.limit_s)
    with tempfile.TemporaryDirectory() as scratch:
        path = create_model(
            Path(scratch) / "model", hidden_size=256, heads=4, kv_heads=2, intermediate=512,
            initializer_std=256**-0.5,
        )  # fmt: skip
        reference = update(config_of(path, "cpu", PLAIN | {"compute_dtype": "float32"}))
        for name in options.variants:
            what = f"update, {name}"
            if not clock.has(_COMPILED_S if name == "compile" else _VARIANT_S, what=what):
                continue
            with attempt(what):
                cfg = config_of(path, options.device, VARIANTS[name])
                if lacking := _lacking(name, options.device):
                    Row(what, lacking, verdict="not run").tell()
                    continue
                is_float32 = cfg.model.compute_dtype == "float32"
                tell(name, update(cfg), reference, is_float32=is_float32)
                if name in _REPEATED:
                    tell_repeated(name, cfg)


def _lacking(name: str, device: str) -> str:
    """Return what a variant cannot do without; empty where it can be tried."""
    needs = {"flash-attn": "flash_attn", "8-bit": "torchao"}
    for word, module in needs.items():
        if word in name and find_spec(module) is None:
            return f"{module} is not installed"
    return "needs CUDA" if "on the host" in name and device == "cpu" else ""


if __name__ == "__main__":
    main(tyro.cli(Options))
