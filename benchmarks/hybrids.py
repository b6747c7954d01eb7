"""Compare the update of models with linear-attention or state-space layers with a softmax model's.

    python benchmarks/hybrids.py                    # about 20 M parameters on the CPU

All models have the same hidden size and layers, and about as many weights. In a hybrid, every
fourth layer is softmax attention. Each takes the same policy-gradient steps on packed rows of
sequences of many lengths, in turns; ratios are medians over the rounds of one round's. Each hybrid
also computes its layers with a state by transformers' own code, with one sequence per padded row,
as layers do that do not know packed rows. Prints a Markdown table.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tyro
from torch import Tensor
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.start import header, row, scalars_of
from benchmarks.trainer import Options, config_of, ours, seconds
from spmdrl.model.attention import packing_support
from spmdrl.roles import make_trainer
from spmdrl.tools.small_models.shrink import tiny_model
from spmdrl.types import Batch, Microbatch, Sums
from spmdrl.world.launch import launch_alone
from spmdrl.world.world import World

PADDED = ", padded"
"""After the name of a hybrid whose layers with a state compute padded rows."""


@dataclass(frozen=True)
class Sizes:
    """What to run."""

    hidden: int = 384
    layers: int = 8
    longest: int = 512
    """Tokens of the longest sequence; the shortest has 16."""
    sequences: int = 16
    rounds: int = 5
    """Steps of each that count, after one that does not."""


def configs(sizes: Sizes) -> dict[str, Any]:
    """Return the models' configs: softmax, gated delta nets, Mamba 2, short convolutions."""
    hidden = sizes.hidden
    heads = hidden // 64
    shared: dict[str, Any] = dict(
        hidden_size=hidden, num_hidden_layers=sizes.layers, vocab_size=128, pad_token_id=0
    )
    shared |= dict(num_attention_heads=heads, num_key_value_heads=heads, head_dim=64)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    linear = [kinds[at % 4] for at in range(sizes.layers)]
    attention = [at for at in range(sizes.layers) if at % 4 == 3]
    conv = ["conv" if kind == "linear_attention" else kind for kind in linear]
    return {
        "softmax (Qwen3)": AutoConfig.for_model("qwen3", **shared, intermediate_size=3 * hidden),
        "gated delta nets (Qwen3.5)": AutoConfig.for_model(
            "qwen3_5_text",
            **shared,
            intermediate_size=5 * hidden // 2,
            layer_types=linear,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        "Mamba 2 (Bamba)": AutoConfig.for_model(
            "bamba",
            **shared,
            intermediate_size=2 * hidden,
            attn_layer_indices=attention,
            mamba_n_heads=2 * heads,
            mamba_d_head=64,
            mamba_d_state=64,
        ),
        "short convolutions (LFM2)": AutoConfig.for_model(
            "lfm2",
            **shared,
            intermediate_size=3 * hidden,
            block_auto_adjust_ff_dim=False,
            layer_types=conv,
        ),
    }


def ragged_batch(lengths: Tensor) -> Batch:
    """Return sequences of these lengths in one micro-batch; a quarter of each is a prompt."""
    generator = torch.Generator().manual_seed(0)
    places = torch.cat([torch.arange(int(n)) for n in lengths])
    prompts = lengths // 4
    mask = places >= prompts.repeat_interleave(lengths)
    packed = Microbatch(
        tokens=torch.randint(8, 96, (len(places),), generator=generator),
        position_ids=places,
        cu_seqlens=torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.arange(len(lengths)),
    )
    return Batch(
        scalars=scalars_of(lengths, lengths - prompts),
        updates=((packed,),),
        update_ids=torch.zeros(len(lengths), dtype=torch.int64),
    )


def main(sizes: Sizes) -> None:
    """Time all models, in turns."""
    lengths = torch.linspace(16, sizes.longest, sizes.sequences).round().long()
    weights = torch.randn(len(lengths), generator=torch.Generator().manual_seed(1))
    batch = ragged_batch(lengths)
    launch_alone()
    options = Options(rows=1, length=int(lengths.sum()))
    steps: dict[str, Callable[[], Sums]] = {}
    counts = {}
    with tempfile.TemporaryDirectory() as scratch:
        world = None
        for name, config in configs(sizes).items():
            folder = Path(scratch) / str(len(steps))
            counts[name] = tiny_model(config, folder).num_parameters()
            cfg = config_of(options, str(folder), scratch)
            world = world or World.start(cfg)
            steps[name] = ours(make_trainer(cfg, world), batch, weights)
            if counts.keys() != {name}:  # the first has no state
                with mock.patch.object(packing_support, "supports_packed_states", lambda _: False):
                    padded = make_trainer(cfg, world)
                steps[name + PADDED] = ours(padded, batch, weights)
        found = time_in_turns(steps, rounds=sizes.rounds)
        assert world is not None
        world.close()
    first = next(iter(steps))
    total = int(lengths.sum())
    print(f"{len(lengths)} sequences of 16 to {sizes.longest} tokens, {total} together\n")
    header("", "M parameters", "s/step", "tokens/s", "of softmax", "of padded rows")
    for name, count in counts.items():
        took = found[name]
        of_padded = ratio(found[name + PADDED], took) if name + PADDED in found else ""
        median = statistics.median(took)
        rate = total / median
        numbers = (f"{count / 1e6:.1f}", f"{median:.3f}", f"{rate:.0f}")
        row(name, *numbers, ratio(found[first], took), of_padded)


def ratio(others: list[float], own: list[float]) -> str:
    """Return how many times as fast as the others: the median of the ratios of each round."""
    return f"{statistics.median(a / b for a, b in zip(others, own)):.2f}"


def time_in_turns(steps: dict[str, Callable[[], Sums]], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step, by name, after one that does not count, in which both ways
    of a hybrid must find the same gradient."""
    norms = {name: step()["policy/grad_norm"][0] for name, step in steps.items()}
    for name, norm in norms.items():
        assert abs(norm - norms[name.removesuffix(PADDED)]) < 1e-4 * norm, norms
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name, step in steps.items():
            found[name].append(seconds(step, torch.device("cpu")))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main(tyro.cli(Sizes))
