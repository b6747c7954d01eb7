"""Peak memory of an update and of a push on real ranks, beside what the planner says of them.

    python benchmarks/memory.py                            # a trainer and an engine rank, on CPUs
    python benchmarks/memory.py --hidden 512 --layers 8

Bytes are those of all storages that torch's operations make (`LiveBytes`), which slows the work
down but not its memory. The update is the second one: the first sets FSDP2 up. The push is the
first one, which allocates the buckets. The plan's figures are what a rank holds beside its weights
and its optimizer's moments. Prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import begin, header, in_ranks, row

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "bfloat16, full recomputation": {
        "compute_dtype": "bfloat16",
        "memory": {"activation_checkpointing": "full"},
    },
    "bfloat16, reduce last": {"compute_dtype": "bfloat16", "memory": {"reduce": "last"}},
}


@dataclass(frozen=True)
class Options:
    """The model and the row."""

    hidden: int = 256
    layers: int = 6
    rows: int = 8
    """Sequences of the micro-batch."""
    length: int = 256
    """Tokens of each; the first quarter is a prompt."""


def main(options: Options) -> None:
    """Measure each case and print a table."""
    header("", "what", "measured MiB", "planned MiB", "planned / measured")
    for name, model in CASES.items():
        given = (asdict(options), model)
        for what, measured, planned in json.loads(in_ranks(2, __file__, *given)):
            cells = (f"{measured / 2**20:.1f}", f"{planned / 2**20:.1f}")
            row(name, what, *cells, f"{planned / measured:.2f}")


def work(folder: Path, given: dict[str, int], model: dict[str, Any]) -> None:
    """Build trainer, engine and stream, and write what an update and a push took at most."""
    import torch

    from benchmarks.trainer import ours, packed_batch, small_model
    from spmdrl.engine import make_engine
    from spmdrl.roles import make_trainer
    from spmdrl.sync.stream import WeightStream
    from spmdrl.world.comm import gather_objects
    from spmdrl.world.machine.live_bytes import peak_bytes
    from spmdrl.world.world import World

    options = Options(**given)
    cfg = config_of(options, folder, model)
    if os.environ["RANK"] == "0":
        small_model(
            folder / "model", hidden=options.hidden, layers=options.layers, longest=options.length
        )
    world = World.start(cfg)
    world.meet(wait="model written")
    engine = make_engine(cfg, world)
    trainer = make_trainer(cfg, world)
    found = []
    with peak_bytes(world.device) as peak:
        stream = WeightStream(trainer.weights, engine, world)
        stream.push(version=0)
    found.append((f"push, {'sender' if world.is_trainer else 'receiver'}", peak.bytes))
    if world.is_trainer:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(8, 96, (options.rows, options.length), generator=generator)
        batch = packed_batch(tokens, prompt=options.length // 4)
        step = ours(trainer, batch, torch.randn(options.rows, generator=generator))
        step()
        with peak_bytes(world.device) as peak:
            step()
        found.append(("update", peak.bytes))
    everything = [one for own in gather_objects(found, group=world.control) for one in own]
    if world.rank == 0:
        planned = dict(plans(cfg))
        table = [(what, nbytes, planned[what]) for what, nbytes in everything]
        (folder / "found.json").write_text(json.dumps(table))
    engine.close()
    world.close()


def plans(cfg: Any) -> Iterator[tuple[str, int]]:
    """Yield what the planner says of each."""
    from spmdrl.model.load import build_meta_model
    from spmdrl.tools.plan.engine_memory import engine_memory
    from spmdrl.tools.plan.run import run_of_model
    from spmdrl.tools.plan.trainer_memory import sent_proof_bytes, trainer_memory
    from spmdrl.world.axes import axes_of

    run = run_of_model(
        cfg,
        build_meta_model(cfg.model),
        prompt_tokens=cfg.data.max_prompt_tokens,
        response_tokens=cfg.sampling.max_response_tokens,
    )
    axes = axes_of(cfg)
    causes = trainer_memory(run, axes).causes
    buckets = "stream buckets"
    yield "update", sum(causes.values()) - sum(causes[n] for n in ("weights", "optimizer", buckets))
    yield "push, sender", causes[buckets] + sent_proof_bytes(run, axes)
    of_engine = engine_memory(run, axes, memory_bytes=0).causes
    yield "push, receiver", of_engine[buckets] + of_engine["checksums of a push"]


def config_of(options: Options, folder: Path, model: dict[str, Any]) -> Any:
    """Return what train.py would be given."""
    from spmdrl import config

    prompt = options.length // 4
    memory = config.MemorySettings(**model.get("memory", {}))
    settings = replace(
        config.ModelSettings(path=str(folder / "model"), memory=memory),
        compute_dtype=model.get("compute_dtype", "float32"),
    )
    return config.Config(
        output_dir=str(folder / "run"),
        steps=10,
        layout=config.LayoutSettings(
            placement="split", world_size=2, trainer_ranks=1, device="cpu"
        ),
        model=settings,
        data=config.DataSettings(train="task:addition", max_prompt_tokens=prompt),
        sampling=config.SamplingSettings(max_response_tokens=options.length - prompt),
        batch=config.BatchSettings(tokens_per_microbatch=options.rows * options.length),
        algorithm=config.AlgorithmSettings(correction="none"),
        engine=config.EngineSettings(
            kind="transformers", dtype=settings.compute_dtype, max_num_seqs=8, cpu_kv_cache_gib=0.1
        ),
    )


if __name__ == "__main__":
    begin(main, work, Options)
