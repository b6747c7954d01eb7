"""Measure how far engine and trainer are apart on a mixture of experts, with and without replay.

    python -m spmdrl create_model runs/moe --architecture qwen3_moe --hidden-size 256 --layers 6 \\
        --heads 4 --moe-experts 32 --initializer-std 0.0625
    python benchmarks/router_replay.py runs/moe

One process samples with an engine and scores the very same samples with trainers of several compute
dtypes, from the same files, each once with its own routers' choice of experts and once with the
engine's. Prints |engine's logprob - trainer's| over the sampled tokens, the share of (token, layer)
pairs whose experts the trainer would have chosen otherwise, and one line of JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from start import conditions, leave, scalars_of
from torch import Tensor

from spmdrl import config
from spmdrl.config import Config, MoeSettings
from spmdrl.credit import per_token
from spmdrl.engine import make_engine
from spmdrl.engine.protocol import Completion, EngineProtocol, Request
from spmdrl.exchange import exchange_rollouts
from spmdrl.roles import make_trainer
from spmdrl.rollout.packing import cumulative
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.train.trainer import Trainer
from spmdrl.types import Batch, Rollouts, Tokens
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

PROMPT, RESPONSE = 16, 112


@dataclass(frozen=True)
class Options:
    """What to measure."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a mixture of experts."""
    engine: str = "vllm"
    """Its kind."""
    engine_dtype: str = "bfloat16"
    trainer_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    samples: int = 64


def make_config(options: Options, compute_dtype: str) -> Config:
    """Return the config of the engine and of one trainer."""
    return Config(
        layout=config.LayoutSettings(placement="colocated", world_size=1, device="cpu"),
        steps=1,
        model=config.ModelSettings(
            path=str(options.model), compute_dtype=compute_dtype, moe=MoeSettings(replay=True)
        ),
        data=config.DataSettings(max_prompt_tokens=PROMPT),
        sampling=config.SamplingSettings(max_response_tokens=RESPONSE),
        batch=config.BatchSettings(
            prompts_per_step=options.samples, group_size=1, tokens_per_microbatch=4096
        ),
        engine=config.EngineSettings(
            kind=options.engine,
            dtype=options.engine_dtype,
            max_num_seqs=64,
            max_batched_tokens=2048,
            cpu_kv_cache_gib=1.0,
        ),
    )


def sampled(
    options: Options, engine: EngineProtocol
) -> tuple[list[tuple[int, ...]], list[Completion]]:
    """Return prompts, and what followed each."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(8, 96, (PROMPT,), generator=generator).tolist())
        for _ in range(options.samples)
    ]
    done: dict[str, Completion] = {}
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, RESPONSE, 1.0, i, ()))
    while engine.is_busy:
        done |= {c.key: c for c in engine.step()}
    assert all(len(c.tokens) == RESPONSE for c in done.values()), "a response ended early"
    return prompts, [done[str(i)] for i in range(len(prompts))]


def packed(prompts: list[tuple[int, ...]], completions: list[Completion]) -> Rollouts:
    """Pack samples, each a group of its own."""
    drawn = torch.tensor([len(c.tokens) for c in completions])
    lengths = PROMPT + drawn
    samples = [Trajectory.from_prompt(p).append_completion(c) for p, c in zip(prompts, completions)]
    columns = Tokens.concat(samples).token_fields()
    return Rollouts(**columns, cu_seqlens=cumulative(lengths), scalars=scalars_of(lengths, drawn))


def gaps(trainer: Trainer, batch: Batch) -> Tensor:
    """Return |engine's - trainer's| logprob of the sampled tokens, nats."""
    found = [
        (own - m.rollout_logprobs)[m.response_mask].abs()
        for m, own in zip(batch.microbatches, trainer.logprobs(batch))
    ]
    return torch.cat(found).double()


def without_routes(batch: Batch) -> Batch:
    """Return the same batch, nothing to replay."""
    return replace(
        batch,
        updates=tuple(
            tuple(replace(m, extra_columns={}) for m in update) for update in batch.updates
        ),
    )


def measure(options: Options) -> dict[str, Any]:
    """Return the figures by trainer."""
    world = World.start(make_config(options, "float32"))
    engine = make_engine(world.cfg, world)
    prompts, completions = sampled(options, engine)
    found: dict[str, Any] = {"tokens": sum(len(c.tokens) for c in completions)}
    batch = exchange_rollouts(packed(prompts, completions), world, step=0)
    for dtype in options.trainer_dtypes:
        cfg = make_config(options, dtype)
        trainer = make_trainer(cfg, replace(world, cfg=cfg))
        row = found[dtype] = {}
        for name, own in (("own choice", without_routes(batch)), ("replayed", batch)):
            gap = gaps(trainer, own)
            row[name] = {
                "mean": float(gap.mean()),
                "largest": float(gap.max()),
                "q99": float(gap.quantile(0.99)),
                "above_0.1": float((gap > 0.1).double().mean()),
            }
        sums = trainer.update(
            batch, per_token(batch, torch.zeros(options.samples).double()), step=0
        )
        others, known = sums["policy/router_disagreement"]
        row["disagreement"] = others / known
    engine.close()
    world.close()
    return found


def main() -> None:
    """Measure, print."""
    options = tyro.cli(Options, description=__doc__)
    launch_alone()
    found = measure(options)
    print(f"{found['tokens']} sampled tokens")
    print(f"{'trainer':<10}{'experts':<12}{'mean gap':>10}{'99%':>10}{'largest':>10}{'> 0.1':>10}")
    for dtype in options.trainer_dtypes:
        for name in ("own choice", "replayed"):
            row = found[dtype][name]
            print(
                f"{dtype:<10}{name:<12}{row['mean']:>10.5f}{row['q99']:>10.4f}"
                f"{row['largest']:>10.4f}{row['above_0.1']:>10.4f}"
            )
        print(f"{dtype:<10}other experts than the engine's: {found[dtype]['disagreement']:.4f}")
    conditions(engine=[options.engine, options.engine_dtype], **found)


if __name__ == "__main__":
    main()
    leave()
