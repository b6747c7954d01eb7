"""Time what engine.exact costs: decode, update, the pass for old logprobs, and a whole step.

    OMP_NUM_THREADS=1 python benchmarks/exact.py
    OMP_NUM_THREADS=1 python benchmarks/exact.py --shapes 128x4x512x6x8 --kind vllm

A shape is HIDDENxLAYERSxSEQUENCESxPROMPTxRESPONSE. Plain and exact have the same weights and
sequences, in one process, in turns; with vLLM one after the other. That exact engines and trainers
agree to the bit is asserted. Prints a Markdown table of medians. A step with several updates also
takes the pass for old logprobs, which exact leaves out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import trainer as plain
from benchmarks.start import header, row
from spmdrl import config
from spmdrl.config import Config
from spmdrl.credit import per_token
from spmdrl.engine import make_engine
from spmdrl.engine.protocol import EngineProtocol, Request
from spmdrl.roles import make_trainer
from spmdrl.train.trainer import Trainer
from spmdrl.types import Batch
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World


@dataclass(frozen=True)
class Options:
    """What to run."""

    shapes: tuple[str, ...] = ("128x4x512x6x8", "512x6x32x64x64")
    dtype: str = "float32"
    kind: Literal["transformers", "vllm"] = "transformers"
    """Of the engine."""
    rounds: int = 5
    """Steps of each that count, after one that does not."""


def config_of(options: Options, path: str, *, rows: int, prompt: int, response: int) -> Config:
    """Return the config without engine.exact."""
    sizes = plain.Options(rows=rows, length=prompt + response, compute_dtype=options.dtype)  # type: ignore[arg-type]
    own = plain.config_of(sizes, path, path)
    return replace(
        own,
        layout=replace(own.layout, placement="colocated"),
        data=config.DataSettings(max_prompt_tokens=prompt),
        sampling=config.SamplingSettings(max_response_tokens=response),
        engine=config.EngineSettings(kind=options.kind, dtype=options.dtype, max_num_seqs=rows),  # type: ignore[arg-type]
        # The weights stay, so that every round does the same.
        optimizer=replace(own.optimizer, lr=0.0),
    )


def generate(engine: EngineProtocol, prompts: Tensor, *, response: int) -> tuple[Tensor, Tensor]:
    """Return sequences [rows, length] and the logprobs of their responses [rows, response]."""
    engine.weights_changed(engine.version + 1)  # keeps no prefixes
    for index, prompt in enumerate(prompts.tolist()):
        engine.add(Request(f"{index:06}", tuple(prompt), response, 1.0, index, ()))
    done = []
    while engine.is_busy:
        done += engine.step()
    done.sort(key=lambda one: one.key)
    tokens = torch.stack([one.tokens for one in done])
    return torch.cat([prompts, tokens], dim=1), torch.stack([one.logprobs for one in done])


def sampled(batch: Batch, logprobs: Tensor) -> Batch:
    """Return the batch with the logprobs that it was sampled with."""
    ((packed,),) = batch.updates
    column = torch.zeros(packed.tokens.shape)
    column[packed.response_mask] = logprobs.flatten()
    return replace(batch, updates=((replace(packed, rollout_logprobs=column),),))


@dataclass(frozen=True)
class Side:
    """An engine and a trainer with the same weights."""

    cfg: Config
    engine: EngineProtocol
    trainer: Trainer

    def parts(self, prompts: Tensor, *, response: int) -> dict[str, Callable[[], object]]:
        """Return what a step consists of, to be timed."""
        rows, logprobs = generate(self.engine, prompts, response=response)
        batch = sampled(plain.packed_batch(rows, prompt=prompts.shape[1]), logprobs)
        advantages = torch.ones(len(rows)).double()
        if self.cfg.engine.exact:
            (found,) = self.trainer.logprobs(batch)
            assert torch.equal(found[batch.updates[0][0].response_mask], logprobs.flatten())
        return {
            "decode": partial(generate, self.engine, prompts, response=response),
            "old logprobs": partial(self.trainer.logprobs, batch),
            "update": lambda: self.trainer.update(batch, per_token(batch, advantages), step=0),
        }


def main(options: Options) -> None:
    """Time both in turns, shape after shape."""
    launch_alone()
    world = None
    header("shape", "part", "plain, s", "exact, s", "exact / plain")
    for shape in options.shapes:
        hidden, layers, count, prompt, response = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as scratch:
            path = plain.small_model(
                Path(scratch) / "model", hidden=hidden, layers=layers, longest=prompt + response
            )
            own = config_of(options, path, rows=count, prompt=prompt, response=response)
            world = world or World.start(own)
            both = [own, replace(own, engine=replace(own.engine, exact=True))]
            generator = torch.Generator().manual_seed(0)
            prompts = torch.randint(8, 96, (count, prompt), generator=generator)
            found: dict[str, list[float]] = {}
            # A process has one engine of vLLM at a time.
            together = [both] if options.kind == "transformers" else [[cfg] for cfg in both]
            for cfgs in together:
                sides = []
                for cfg in cfgs:
                    sides.append(Side(cfg, make_engine(cfg, world), make_trainer(cfg, world)))
                times = timed(sides, prompts, response=response, rounds=options.rounds)
                for name, medians in times.items():
                    found.setdefault(name, []).extend(medians)
                for side in sides:
                    side.engine.close()
            show(shape, found)
    if world:
        world.close()


def timed(
    sides: list[Side], prompts: Tensor, *, response: int, rounds: int
) -> dict[str, list[float]]:
    """Return {part: median seconds of each side}."""
    parts = [side.parts(prompts, response=response) for side in sides]
    found: dict[str, list[list[float]]] = {name: [[] for _ in sides] for name in parts[0]}
    for turn in range(rounds + 1):
        for name in found:
            for side, own in enumerate(parts):
                took = plain.seconds(own[name], torch.device("cpu"))
                if turn:
                    found[name][side].append(took)
    return {name: [statistics.median(own) for own in times] for name, times in found.items()}


def show(shape: str, found: dict[str, list[float]]) -> None:
    """Print the parts, and the steps that are made of them."""
    decode, old, update = (found[name] for name in ("decode", "old logprobs", "update"))
    both = range(2)
    steps = {
        "step of one update": [decode[side] + update[side] for side in both],
        # Exact takes no pass for old logprobs.
        "step of several updates": [decode[0] + old[0] + update[0], decode[1] + update[1]],
    }
    for name, (own, exact) in (found | steps).items():
        row(shape, name, f"{own:.3f}", f"{exact:.3f}", f"{exact / own:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options))
