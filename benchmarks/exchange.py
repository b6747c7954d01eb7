"""Measure a batch's way from what the engine drew to the trainers' micro-batches.

    python benchmarks/exchange.py

Three stretches: the lists that an engine holds become finished samples (collect), the groups of a
step become flat tensors (pack), and these go to the ranks that train on them (exchange). Nothing is
sampled: every number is a function of group, sample and position, so that what arrives can be
checked. A rank's seconds are those of the slower rank.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from start import begin, header, in_ranks, row

CASES = {
    "1 rank": dict(placement="colocated", world_size=1),
    "2 ranks, colocated": dict(placement="colocated", world_size=2),
    "2 ranks, one generates and one trains": dict(placement="split", world_size=2),
}
STRETCHES = ("collect", "pack", "exchange")


@dataclass(frozen=True)
class Options:
    """What to run."""

    groups: int = 256
    group_size: int = 16
    prompt: int = 200
    """Tokens of a prompt."""
    response: int = 800
    """Tokens of a response."""
    tokens_per_microbatch: int = 16384
    rounds: int = 5
    """That count, after one that does not."""


def main(options: Options) -> None:
    """Run every case in ranks of its own, and print a table."""
    header("ranks", *(f"{stretch} s" for stretch in STRETCHES), "all s", "from", "to")
    for name, layout in CASES.items():
        found = in_ranks(layout["world_size"], __file__, asdict(options), layout)
        rounds = json.loads(found)
        alls = [sum(own) for own in rounds]
        medians = [statistics.median(each) for each in (*zip(*rounds), alls)]
        row(name, *(f"{seconds:.2f}" for seconds in (*medians, min(alls), max(alls))))


def work(folder: Path, given: dict, layout: dict) -> None:
    """Do the rounds, as one of the ranks."""
    import torch.distributed as dist

    from spmdrl import config
    from spmdrl.exchange import exchange_rollouts
    from spmdrl.rollout.packing import empty_rollouts, pack_step
    from spmdrl.world.comm import gather_objects
    from spmdrl.world.world import World

    options = Options(**given)
    cfg = config.Config(
        layout=config.LayoutSettings(device="cpu", **layout),
        output_dir=str(folder),
        batch=config.BatchSettings(
            prompts_per_step=options.groups,
            group_size=options.group_size,
            tokens_per_microbatch=options.tokens_per_microbatch,
        ),
        sampling=config.SamplingSettings(max_response_tokens=options.response),
    )
    world = World.start(cfg)
    mine = range(world.replica, options.groups, world.num_replicas) if world.is_inference else ()
    drawn = {(g, s): lists(options, g, s) for g in mine for s in range(options.group_size)}
    found = []
    for step in range(1 + options.rounds):
        dist.barrier(group=world.control)
        times = [time.perf_counter()]
        groups = [finished_group(options, g, drawn) for g in mine]
        times.append(time.perf_counter())
        own = (
            pack_step(
                groups,
                cfg,
                is_first=world.replica == 0,
                seconds=0.0,
                measured={},
                dropped=[],
                num_carried=0,
            )
            if groups
            else empty_rollouts()
        )
        times.append(time.perf_counter())
        dist.barrier(group=world.control)  # a rank that packs nothing does not count the wait
        began = time.perf_counter()
        batch = exchange_rollouts(own, world, step=step)
        seconds = [b - a for a, b in zip(times, times[1:])] + [time.perf_counter() - began]
        check(options, gather_objects(totals(batch), group=world.control))
        found.append([max(of) for of in zip(*gather_objects(seconds, group=world.control))])
        del groups, own, batch
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found[1:]))
    world.close()


def lists(options: Options, group: int, sample: int) -> tuple[list[int], list[float]]:
    """Return the tokens and logprobs of a response, as vLLM holds them."""
    base = 1 + 31 * group + 7 * sample
    tokens = [(base + 97 * t) % 150_000 for t in range(options.response)]
    return tokens, [-(token % 1024) / 256 for token in tokens]


def finished_group(options: Options, group: int, drawn: dict) -> object:
    """Return a group whose samples have come out of the engine and were rewarded."""
    import torch

    from spmdrl.engine.protocol import Completion
    from spmdrl.rollout.episode import Draw, FinishedEpisode, Group
    from spmdrl.rollout.trajectory import Trajectory
    from spmdrl.types import Prompt, flat
    from spmdrl.workers.pool import RewardResult

    prompt = Prompt(group, tuple(range(group, group + options.prompt)), "", {})
    draw = Draw(0, "train", options.group_size, options.response, 1.0, True, ())
    found = Group(group, 0, group, prompt, 0, draw)
    for sample in range(options.group_size):
        tokens, logprobs = drawn[group, sample]
        drawn_by = torch.full((len(tokens),), group % 3)
        completion = Completion(
            "", flat(tokens, "int64"), flat(logprobs, "float32"), drawn_by, False
        )
        made = Trajectory.from_prompt(prompt.tokens).append_completion(completion).end_turn(-1)
        found.samples[sample] = FinishedEpisode(
            group, sample, prompt, (made,), "", RewardResult("", float(sample % 2))
        )
    return found


def totals(batch: object) -> list[float]:
    """Return what a rank got: sequences, tokens, sampled tokens, and sums of its columns."""
    sums = [0.0] * 6
    for microbatch in sum(batch.updates, ()):
        if int(microbatch.sequence_ids[0]) < 0:
            continue
        mask = microbatch.response_mask
        weights = microbatch.position_ids + 1
        own = (
            len(microbatch.sequence_ids),
            len(microbatch.tokens),
            int(mask.sum()),
            int((microbatch.tokens * weights).sum()),
            float((microbatch.rollout_logprobs.double() * weights).sum()),
            int(microbatch.policy_versions.sum()),
        )
        sums = [a + b for a, b in zip(sums, own)]
    return sums


def check(options: Options, per_rank: list[list[float]]) -> None:
    """Compare with what was drawn; whole numbers and binary fractions, so sums are exact."""
    import numpy

    size, count = options.group_size, options.groups * options.group_size
    groups = numpy.arange(options.groups)[:, None, None]
    samples = numpy.arange(options.group_size)[None, :, None]
    t = numpy.arange(options.response)[None, None, :]
    tokens = (1 + 31 * groups + 7 * samples + 97 * t) % 150_000
    weights = options.prompt + t + 1
    places = numpy.arange(options.prompt)
    prompts = (numpy.arange(options.groups)[:, None] + places) * (places + 1)
    expected = [
        count,
        count * (options.prompt + options.response),
        count * options.response,
        int(prompts.sum()) * size + int((tokens * weights).sum()),
        float((-(tokens % 1024) / 256 * weights).sum()),
        size * sum(options.response * (g % 3) - options.prompt for g in range(options.groups)),
    ]
    got = [sum(own) for own in zip(*per_rank)]
    assert got == expected, f"arrived: {got}; drawn: {expected}"


if __name__ == "__main__":
    begin(main, work, Options)
