"""Time the transformers engine on hybrids, with and without its cache of states.

    python benchmarks/state_cache.py

The models are those of hybrids.py, smaller. Without the cache, the engine computes all tokens of
its sequences at each step, as it does for layers whose states it does not cache. Both engines draw
the same requests with the same seeds, in turns, after a short round that does not count; the ratio
is the median over the rounds of one round's. Prints a Markdown table.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import hybrids
from benchmarks.start import draw_all, header, leave, row
from spmdrl import config
from spmdrl.config import Config
from spmdrl.engine import make_engine
from spmdrl.engine.protocol import Request
from spmdrl.engine.transformers import runner
from spmdrl.tools.small_models.shrink import tiny_model
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World


@dataclass(frozen=True)
class Sizes:
    """What to draw."""

    hidden: int = 256
    layers: int = 4
    sequences: int = 8
    prompt: int = 16
    """Tokens of a prompt."""
    response: int = 256
    """Tokens of a response."""
    rounds: int = 3


def config_of(sizes: Sizes, folder: str) -> Config:
    """Return the config of an engine."""
    return Config(
        layout=config.LayoutSettings(placement="colocated", world_size=1, device="cpu"),
        model=config.ModelSettings(path=folder),
        data=config.DataSettings(max_prompt_tokens=sizes.prompt),
        sampling=config.SamplingSettings(max_response_tokens=sizes.response),
        engine=config.EngineSettings(
            kind="transformers", dtype="float32", max_num_seqs=sizes.sequences
        ),
    )


def without_states() -> Any:
    """Return a context in which the engine knows no layer whose state it can cache."""
    return mock.patch.object(runner, "keeps_known_states", lambda _: False)


def requests(sizes: Sizes, *, length: int, seed: int) -> list[Request]:
    """Return the requests of one round."""
    prompts = [
        tuple(8 + (7 * i + 3 * place) % 88 for place in range(sizes.prompt))
        for i in range(sizes.sequences)
    ]
    return [
        Request(str(i), prompt, length, 1.0, 1000 * seed + i, ())
        for i, prompt in enumerate(prompts)
    ]


def measure(sizes: Sizes, cfg: Config, world: World) -> None:
    """Draw with both engines in turns, and print a row's figures after the model's name."""
    cached = make_engine(cfg, world)
    with without_states():
        plain = make_engine(cfg, world)
    seconds: list[tuple[float, float]] = []
    same = 0
    for seed in range(sizes.rounds + 1):
        length = sizes.response if seed else 8
        asked = requests(sizes, length=length, seed=seed)
        own, tokens = draw_all(cached, asked)
        with without_states():
            other, expected = draw_all(plain, asked)
        if seed:
            seconds.append((own, other))
            same += sum(a == b for a, b in zip(tokens, expected))
    cached.close()
    plain.close()
    count = sizes.sequences * sizes.response
    rates = [count / statistics.median(each) for each in zip(*seconds)]
    ratio = statistics.median(other / own for own, other in seconds)
    numbers = (f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{ratio:.1f}")
    agree = f"{same} of {sizes.rounds * sizes.sequences}"
    row(Path(cfg.model.path).name, *numbers, agree)


def main(sizes: Sizes) -> None:
    """Measure each hybrid."""
    models = hybrids.configs(hybrids.Sizes(hidden=sizes.hidden, layers=sizes.layers))
    del models["softmax (Qwen3)"]
    launch_alone()
    world = None
    print(f"{sizes.sequences} sequences of {sizes.prompt} + {sizes.response} tokens\n")
    header("", "cached, tokens/s", "without, tokens/s", "times as many", "same sequences")
    with tempfile.TemporaryDirectory() as scratch:
        for name, hf_config in models.items():
            folder = Path(scratch) / name
            tiny_model(hf_config, folder)
            cfg = config_of(sizes, str(folder))
            world = world or World.start(cfg)
            measure(sizes, cfg, world)
        assert world is not None
        world.close()


if __name__ == "__main__":
    main(tyro.cli(Sizes))
    leave()
