"""What failing rewards cost: hangs, crashes, wrong types and slow tails among normal samples.

    python benchmarks/rewards.py --faulty 0.05 --timeout-s 1 --workers 8

A normal reward sleeps for --cost-ms, as one that waits for another process does, so the figures
do not depend on how many processors are free. One in four of the faulty samples each hangs,
crashes, returns no number, or is slow: ten times the cost, or half the deadline if that is less.
Both runs get the samples

    at once    what the workers can take
    paced      at --load of what the clean run took at once, as an engine would bring them

Throughput is samples over the time until the last result, and, besides, over the time until the
last that has a value: a sample that hangs at the end makes the first longer by up to a deadline,
which says something of the end of the run and nothing of what goes on beside it. Every sample
must come back once, with the result that its kind says; otherwise this ends with an error.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from start import say_commit

from spmdrl.config import Config, DataSettings, RewardsSettings
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardPool

KINDS = ("hang", "crash", "type", "slow")
EXPECTED = {"normal": None, "slow": None, "hang": "timeout", "crash": "error", "type": "bad_value"}
REWARD = """
import os, time
def score(data_source, solution_str, ground_truth):
    kind, cost_s = solution_str.split()
    if kind == "hang":
        time.sleep(1000)
    if kind == "crash":
        os._exit(1)
    if kind == "type":
        return "good"
    time.sleep(float(cost_s))
    return 1.0
"""


def kinds_of(args: argparse.Namespace, *, faulty: float) -> list[str]:
    """Return the kinds of all samples, in a random order that does not change."""
    num_faulty = round(faulty * args.samples)
    kinds = [KINDS[i % 4] if i < num_faulty else "normal" for i in range(args.samples)]
    random.Random(0).shuffle(kinds)
    return kinds


def throughput(
    args: argparse.Namespace, functions: str, *, faulty: float, rate: float
) -> tuple[float, float]:
    """Return samples per second until the last result, and until the last that has a value.

    Args:
        rate: samples/s that come in, 0 for at once.
    """
    kinds, results, valued_s = kinds_of(args, faulty=faulty), [], 0.0
    cost_s = args.cost_ms / 1000
    slow_s = min(10 * cost_s, args.timeout_s / 2)
    cfg = Config(
        data=DataSettings(train="rows.jsonl"),
        rewards=RewardsSettings(
            functions=(functions,), workers=args.workers, timeout_s=args.timeout_s
        ),
    )
    with RewardPool(cfg) as pool:
        pool.start()
        began = time.monotonic()

        def take(found: Iterable) -> None:
            """Keep results, and when the last with a value came."""
            nonlocal valued_s
            for result in found:
                results.append(result)
                valued_s = valued_s if result.failure else time.monotonic() - began

        for number, kind in enumerate(kinds):
            while rate and time.monotonic() - began < number / rate:
                take(pool.poll())
                time.sleep(0.001)
            prompt = Prompt(index=number, tokens=(1,), text="q", row={"prompt": "q", "answer": "1"})
            pool.submit(
                number,
                prompt=prompt,
                truncated=False,
                response_tokens=[1],
                response_text=f"{kind} {slow_s if kind == 'slow' else cost_s}",
            )
        while len(pool):
            pool.wait()
            take(pool.poll())
        took_s = time.monotonic() - began
    check(kinds, results)
    return len(kinds) / took_s, len(kinds) / valued_s


def check(kinds: list[str], results: list) -> None:
    """Raise AssertionError unless each sample came back once as its kind says."""
    assert sorted(r.key for r in results) == list(range(len(kinds))), "samples lost or doubled"
    wrong = [
        (kinds[r.key], r.failure, r.message)
        for r in results
        if r.failure != EXPECTED[kinds[r.key]] or (r.value is None) != (r.failure is not None)
    ]
    assert not wrong, f"{len(wrong)} samples ended otherwise: {wrong[:3]}"


def main() -> None:
    """Measure and print a table row for each way that samples come in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--faulty", type=float, default=0.05)
    parser.add_argument("--cost-ms", type=float, default=20.0)
    parser.add_argument("--timeout-s", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.5)
    args = parser.parse_args()
    counts = Counter(kinds_of(args, faulty=args.faulty))
    say_commit()
    print(
        f"{args.samples} samples of {args.cost_ms:g} ms, {dict(counts)}; {args.workers} workers, "
        f"deadline {args.timeout_s:g} s"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reward.py")
        path.write_text(REWARD)
        rates = {"at once": 0.0}
        for name in ("at once", f"paced at {args.load:g}"):
            clean, faulty = (
                throughput(args, f"{path}:score", faulty=share, rate=rates[name])
                for share in (0.0, args.faulty)
            )
            print(
                f"| {name} | {clean[0]:.0f}/s clean | {faulty[0]:.0f}/s faulty | "
                f"{1 - faulty[0] / clean[0]:.1%} lost, {1 - faulty[1] / clean[1]:.1%} until the "
                "last value | all accounted for |",
                flush=True,
            )
            rates[f"paced at {args.load:g}"] = args.load * clean[0]


if __name__ == "__main__":
    main()
