"""Time a vLLM engine with n-gram draft tokens and one without on the same requests, on two ranks of
one run, one after the other in each round.

    python benchmarks/drafts.py
    python benchmarks/drafts.py --draft-tokens 8 --rounds 9

The model is a random one. At temperature 0 its text often goes round in circles, at temperature 1
it does not: a good and a bad case for draft tokens. No stop id is asked for, so each sequence has
its full length in both engines, which every round asserts. The first round is not counted.
Prints medians of sampled tokens per second, the share of draft tokens that were accepted, and the
tokens drawn in a step that had draft tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import begin, header, in_ranks, row

SEQUENCES = (1, 8, 32)
TEMPERATURES = (0.0, 1.0)
LENGTH = 96
KINDS = ("without", "with")


@dataclass(frozen=True)
class Options:
    """What to measure."""

    draft_tokens: int = 4
    """Most draft tokens of a sequence in a step."""
    rounds: int = 5
    """Timed rounds of each load; the median counts."""


def make_config(model: Path, draft_tokens: int) -> Any:
    """Return the config of one engine."""
    from spmdrl import config

    ngram = {"method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_min": 2}
    engine_options = {"speculative_config": ngram | {"prompt_lookup_max": 4}}
    return config.Config(
        layout=config.LayoutSettings(placement="colocated", world_size=2, device="cpu"),
        model=config.ModelSettings(path=str(model)),
        data=config.DataSettings(max_prompt_tokens=16),
        sampling=config.SamplingSettings(max_response_tokens=LENGTH),
        engine=config.EngineSettings(
            dtype="float32",
            max_num_seqs=32,
            cpu_kv_cache_gib=1.0,
            options=engine_options if draft_tokens else {},
        ),
    )


def requests(sequences: int, temperature: float, seed: int) -> list[Any]:
    """Return the requests of one round."""
    from spmdrl.engine.protocol import Request

    return [
        Request(str(i), (5 + i % 40, 6, 7 + i % 30), LENGTH, temperature, 1000 * seed + i, ())
        for i in range(sequences)
    ]


def complete_all(engine: Any, asked: list[Any]) -> tuple[float, list[Any]]:
    """Return the seconds that requests take, and what was drawn."""
    began = time.perf_counter()
    for request in asked:
        engine.add(request)
    drawn = []
    while engine.is_busy:
        drawn += engine.step()
    seconds = time.perf_counter() - began
    assert [len(one.tokens) for one in drawn] == [LENGTH] * len(asked)
    return seconds, drawn


def work(folder: Path, given: dict[str, int]) -> None:
    """Draw on one rank at a time, and write a row for each load."""
    from spmdrl.engine import make_engine
    from spmdrl.tools.commands.create_model import create_model
    from spmdrl.world.comm import gather_objects
    from spmdrl.world.world import World

    options = Options(**given)
    model = folder / "model"
    world = World.start(make_config(model, 0))
    if world.rank == 0:
        sizes = dict(hidden_size=256, layers=6, heads=8, kv_heads=4, intermediate=768)
        create_model(model, initializer_std=0.03, **sizes)
    world.meet(wait="model written")
    engine = make_engine(make_config(model, options.draft_tokens * world.rank), world)
    rows = []
    for temperature in TEMPERATURES:
        for sequences in SEQUENCES:
            rates = []
            drafts = []
            for seed in range(options.rounds + 1):
                asked = requests(sequences, temperature, seed)
                for rank in range(len(KINDS)):
                    if rank == world.rank:
                        engine.weights_changed(0)  # as in training: no prefix of the last round
                        seconds, drawn = complete_all(engine, asked)
                        if seed:
                            rates.append(sequences * LENGTH / seconds)
                            drafts += [one.drafts for one in drawn if one.drafts is not None]
                    world.meet(wait="turns")
            accepted = sum(one.num_accepted for one in drafts)
            steps = sum(one.num_steps for one in drafts)
            share = accepted / max(1, sum(one.num_tokens for one in drafts))
            own = statistics.median(rates), share, (accepted + steps) / max(1, steps)
            without, with_drafts = gather_objects(own, group=world.control)
            rows.append([temperature, sequences, without[0], *with_drafts])
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(rows))
    engine.close()
    world.close()


def main(options: Options) -> None:
    """Measure, print."""
    header("temperature", "sequences", *KINDS, "ratio", "accepted", "tokens per step")
    for temperature, sequences, without, *own in json.loads(in_ranks(2, __file__, asdict(options))):
        with_drafts, accepted, step_tokens = own
        numbers = (f"{x:.2f}" for x in (with_drafts / without, accepted, step_tokens))
        row(temperature, sequences, f"{without:.0f}", f"{with_drafts:.0f}", *numbers)


if __name__ == "__main__":
    begin(main, work, Options)
