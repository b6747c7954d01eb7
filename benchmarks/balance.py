"""Compare how prompts come to engine replicas on an uneven, long-tailed load.

    python benchmarks/balance.py

Every rank is a replica (colocated placement) with the transformers engine and a tiny random model.
A step is sampled, and the step's time is that of the last replica, so the times are of generation
alone. Some rows are long and the others short (lognormal about the row's own median), whatever
the model would say; each sample's length is a function of its prompt and its place, so that all
balances do the same work. All run in one start of the ranks, in turns, in each round.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start import begin, header, in_ranks, row

CASES: dict[str, dict] = {
    "even": {"balance": "even"},
    "length": {"balance": "length"},
    "steal": {"balance": "steal"},
    "over_sample 1.5, even": {"over_sample": 1.5, "balance": "even"},
    "over_sample 1.5, steal": {"over_sample": 1.5, "balance": "steal"},
}


@dataclass(frozen=True)
class Options:
    """What to run."""

    replicas: int = 2
    rows: int = 36
    """Rows of the data: few, so that each is measured before it comes again."""
    prompts: int = 12
    """Prompts of a step."""
    group_size: int = 4
    seqs: int = 8
    """Places of each engine."""
    limit: int = 160
    """Longest response in tokens."""
    long_frac: float = 0.25
    """Share of rows whose median is 96 tokens; of the others it is 8."""
    epochs: int = 2
    """Passes over the rows that count, after one that does not."""
    rounds: int = 1
    step_s: float = 0.015
    """Least duration of an engine step: a stand-in for a device that is the replica's own, where
    replicas share the cores."""


def main(options: Options) -> None:
    """Start the ranks, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        given = dataclasses.asdict(options)
        found = json.loads(in_ranks(options.replicas, __file__, given, model))
    totals = {name: own["tokens"] for name, own in found.items() if "over_sample" not in name}
    assert len(set(totals.values())) == 1, f"not the same work, sampled tokens: {totals}"
    base = statistics.median(found["even"]["seconds"])
    waits, steps = "mean wait of a replica s", "engine steps of the busiest"
    header("balance", "median step s", "of even", waits, steps, "its share of tokens")
    for name, own in found.items():
        seconds = statistics.median(own["seconds"])
        waits, steps, shares = (statistics.fmean(own[k]) for k in ("waits", "steps", "shares"))
        row(
            name,
            f"{seconds:.3f}",
            f"{seconds / base:.2f}",
            f"{waits:.3f}",
            f"{steps:.0f}",
            f"{shares:.2f}",
        )


def make_model(folder: Path) -> str:
    """Write a tiny random model, and return its folder."""
    import torch

    from spmdrl.tools.commands.create_model import create_model

    torch.manual_seed(0)
    return str(create_model(folder, hidden_size=32, layers=1, heads=2, kv_heads=2, intermediate=48))


def length_of(options: Options, prompt: tuple[int, ...], sample: str) -> int:
    """Return how long a response is to be: a function of prompt and sample."""
    median = 96 if random.Random(str(prompt)).random() < options.long_frac else 8
    drawn = random.Random(f"{prompt}{sample}").lognormvariate(math.log(median), 0.5)
    return max(1, min(int(drawn), options.limit))


def config_of(options: Options, model: str, folder: Path) -> Any:
    """Return the config of all cases, but for their schedules."""
    from spmdrl import config

    return config.Config(
        layout=config.LayoutSettings(
            placement="colocated", world_size=options.replicas, device="cpu"
        ),
        model=config.ModelSettings(path=model),
        output_dir=str(folder),
        steps=10**6,
        data=config.DataSettings(train="task:addition", size=options.rows, max_prompt_tokens=24),
        batch=config.BatchSettings(prompts_per_step=options.prompts, group_size=options.group_size),
        sampling=config.SamplingSettings(max_response_tokens=options.limit),
        engine=config.EngineSettings(
            kind="transformers", dtype="float32", max_num_seqs=options.seqs
        ),
    )


def make_slow(engine: Any, options: Options, *, stop: int) -> None:
    """Have an engine take its time for a step, count steps, and draw to lengths of this load.

    Args:
        stop: token that ends a prompt.
    """
    step, add = engine.step, engine.add

    def timed_step() -> Any:
        """Take a step, in `step_s` at least."""
        engine.num_steps += 1
        until = time.perf_counter() + options.step_s
        done = step()
        time.sleep(max(0.0, until - time.perf_counter()))
        return done

    def long_tailed(request: Any) -> None:
        """Add a request, of its sample's length."""
        prompt = request.prompt[: request.prompt.index(stop) + 1]
        sample = request.key.split("@")[0].rsplit("-", 1)[1]
        left = length_of(options, prompt, sample) - (len(request.prompt) - len(prompt))
        add(dataclasses.replace(request, max_tokens=max(1, left), stop_token_ids=()))

    engine.step, engine.add, engine.num_steps = timed_step, long_tailed, 0


def work(folder: Path, given: dict, model: str) -> None:
    """Generate, as one of the ranks."""
    import torch.distributed as dist

    from spmdrl.config import RolloutSettings, ScheduleSettings
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.engine import make_engine
    from spmdrl.world.world import World

    options = Options(**given)
    cfg = config_of(options, model, folder)
    world = World.start(cfg)
    engine, tokenizer = make_engine(cfg, world), load_tokenizer(cfg)
    make_slow(engine, options, stop=tokenizer.encode("=")[0])
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "waits": [], "shares": [], "steps": [], "tokens": 0} for name in CASES
    }
    for _ in range(options.rounds):
        for name, case in CASES.items():
            rollout = RolloutSettings(schedule=ScheduleSettings(**case))
            own = dataclasses.replace(cfg, rollout=rollout)
            named = {"engine": engine, "world": world, "tokenizer": tokenizer}
            _run(own, options, found=found[name], **named)
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier(group=world.control)


def _run(cfg, options: Options, *, engine, world, tokenizer, found) -> None:
    """Sample an epoch to measure, and those that count."""
    import torch.distributed as dist

    from spmdrl.rollout import make_source
    from spmdrl.types import Batch, Scalars
    from spmdrl.world.comm import gather_objects

    source = make_source(cfg, world, tokenizer=tokenizer)
    per_epoch = options.rows // options.prompts
    for k in range(per_epoch * (1 + options.epochs)):
        engine.weights_changed(k)
        dist.barrier(group=world.control)
        began, engine.num_steps = time.perf_counter(), 0
        source.generate(engine, until=k)
        own = time.perf_counter() - began
        share = source.take(k)
        parts = gather_objects((own, engine.num_steps, share.scalars), group=world.control)
        seconds, steps, scalars = zip(*parts)
        batch = Batch(Scalars.concat(scalars), (), update_ids=None)
        source.observe(batch, step=k)
        if k >= per_epoch:
            tokens = [int(part.response_lengths.sum()) for part in scalars]
            idle = share.sums["time/engine_idle_replicas"][0]
            waits = gather_objects(max(seconds) - own + idle, group=world.control)
            found["seconds"].append(max(seconds))
            found["waits"] += waits
            found["steps"].append(max(steps))
            found["shares"].append(max(tokens) / sum(tokens))
            found["tokens"] += sum(tokens)
    source.close()
    while engine.is_busy:  # what over-sampling left under way
        engine.step()
    dist.barrier(group=world.control)
    if world.rank == 0:
        for key in [key for key in world.store.list_keys() if key.startswith("rollout/move")]:
            world.store.delete_key(key)
    dist.barrier(group=world.control)


if __name__ == "__main__":
    begin(main, work, Options)
