"""Time both engines on the same requests, in one process, one after the other in each round; and
vLLM's own `LLM.generate` around the core of our vLLM engine, which must draw the same tokens.

    python benchmarks/engines.py runs/demo/warm
    python benchmarks/engines.py runs/demo/warm --rounds 9 --dtype bfloat16

Two loads: 512 sequences of 4 tokens (as in the demo: 8 samples of each of 64 two-digit sums), and
64 sequences of 128 tokens. No stop id is asked for, so each sequence has its full length in both
engines, whatever the model would say, and every round asserts it. Each round has seeds of its own,
the same for both; the first round warms up and is not counted. Prints medians of sampled tokens per
second and one line of JSON.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import tyro
from start import conditions, draw_all, leave

from spmdrl import config
from spmdrl.config import Config
from spmdrl.engine import make_engine
from spmdrl.engine.protocol import Request
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

LOADS = {"512 of 4": (64, 8, 4), "64 of 128": (64, 1, 128)}
"""{name: (prompts, samples of each, tokens of a response)}"""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of a model with a character tokenizer."""
    dtype: str = "float32"
    """Dtype of the engines."""
    rounds: int = 5
    """Timed rounds of each load; the median counts."""


def make_config(options: Options, kind: str) -> Config:
    """Return the config of one engine."""
    return Config(
        layout=config.LayoutSettings(placement="colocated", world_size=1, device="cpu"),
        model=config.ModelSettings(path=str(options.model)),
        data=config.DataSettings(max_prompt_tokens=16),
        sampling=config.SamplingSettings(max_response_tokens=128),
        engine=config.EngineSettings(
            kind=kind, dtype=options.dtype, max_num_seqs=512, cpu_kv_cache_gib=1.0
        ),
    )


def requests(options: Options, load: str, seed: int) -> list[Request]:
    """Return the requests of one round."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    num_prompts, samples, length = LOADS[load]
    prompts = [tuple(tokenizer(f"{10 + i}+{90 - i}=")["input_ids"]) for i in range(num_prompts)]
    return [
        Request(f"{i}-{k}", prompt, length, 1.0, 1000003 * seed + 512 * i + k, ())
        for i, prompt in enumerate(prompts)
        for k in range(samples)
    ]


def by_generate(engine: Any) -> Any:
    """Return vLLM's `LLM` around the core of one of our engines."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    with mock.patch.object(LLMEngine, "from_engine_args", lambda *_, **__: engine._llm):
        return LLM(engine.cfg.model.path, skip_tokenizer_init=True)


def generate_all(llm: Any, asked: list[Request]) -> tuple[float, list[list[int]]]:
    """Return the seconds that `LLM.generate` takes for requests, and the tokens that it draws."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    began = time.perf_counter()
    prompts = [{"prompt_token_ids": [*request.prompt]} for request in asked]
    params = [
        SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in asked
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, [[*output.outputs[0].token_ids] for output in outputs]


def measure(options: Options) -> dict[str, Any]:
    """Return per load and engine the tokens per second of each round."""
    world = World.start(make_config(options, "vllm"))
    engines = {
        kind: make_engine(make_config(options, kind), world) for kind in ("vllm", "transformers")
    }
    llm = by_generate(engines["vllm"])
    found: dict[str, Any] = {}
    for load in LOADS:
        rates: dict[str, list[float]] = {kind: [] for kind in (*engines, "generate")}
        for seed in range(options.rounds + 1):
            asked = requests(options, load, seed)
            count = sum(request.max_tokens for request in asked)
            drawn: dict[str, Any] = {}
            for kind, engine in engines.items():
                engine.weights_changed(0)  # as in training: no prefix of the last round
                seconds, drawn[kind] = draw_all(engine, asked)
                rates[kind] += [count / seconds] if seed else []
            engines["vllm"].weights_changed(0)
            seconds, generated = generate_all(llm, asked)
            rates["generate"] += [count / seconds] if seed else []
            assert generated == drawn["vllm"], "LLM.generate drew other tokens"
        found[load] = rates
    for engine in engines.values():
        engine.close()
    world.close()
    return found


def main() -> None:
    """Measure, print."""
    options = tyro.cli(Options, description=__doc__)
    launch_alone()
    found = measure(options)
    print(f"{'sequences, tokens':<20}{'generate':>12}{'vllm':>12}{'transformers':>14}")
    for load, rates in found.items():
        kinds = ("generate", "vllm", "transformers")
        generate, vllm, own = (statistics.median(rates[kind]) for kind in kinds)
        print(f"{load:<20}{generate:>12.0f}{vllm:>12.0f}{own:>14.0f}")
    conditions(dtype=options.dtype, tokens_per_s=found)


if __name__ == "__main__":
    main()
    leave()
