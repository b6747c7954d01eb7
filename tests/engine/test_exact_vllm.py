"""engine.exact with vLLM: logprobs over its paged cache are the trainer's, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spmdrl.config import ModelSettings
from spmdrl.engine.vllm.exact import PagedModel
from spmdrl.engine.vllm.paged import PagedStep
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.blocks import base_of
from spmdrl.model.exact.functions import compute_exactly
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.load import load_whole_model
from spmdrl.model.logit_passes import log_probs
from spmdrl.model.scorer import head_form
from tests.engine import test_exact
from tests.engine.test_exact import counts, exact_config
from tests.helpers.built import changed
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import in_world

LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 200, 257, 300)
FAMILIES = {
    "qwen3": dict(num_key_value_heads=2, head_dim=24),
    "llama": dict(num_key_value_heads=1, tie_word_embeddings=True),
    # Windows, and caps of scores and of logits.
    "gemma2": dict(num_key_value_heads=2, head_dim=32, sliding_window=40, tie_word_embeddings=True),
    # Attention sinks, and experts.
    "gpt_oss": dict(num_key_value_heads=2, head_dim=32, num_local_experts=4, sliding_window=40),
}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("llama", "bfloat16"),
        ("gemma2", "float32"),
        ("gpt_oss", "bfloat16"),
    ],
)
def test_logprobs_over_a_paged_cache_are_the_trainers(family: str, dtype: str, tmp_path: Path):
    folder = tiny_folder(tmp_path / "model", family, **FAMILIES[family])
    settings = ModelSettings(path=str(folder))
    model = PagedModel(settings, dtype=getattr(torch, dtype))
    assert len(model.layers) == 2
    draw = random.Random(0)
    sequences = [[draw.randrange(3, 100) for _ in range(length)] for length in LENGTHS]
    expected = trained(settings, sequences, getattr(torch, dtype))
    for block_size in (128, 32):
        found = generated(model, sequences, block_size=block_size, draw=draw)
        for own, right in zip(found, expected, strict=True):
            assert torch.equal(own, right)


def test_vllm_draws_with_the_bits_that_a_trainer_finds(tmp_path: Path):
    cases = {}
    for family, dtype in (("qwen3", "float32"), ("gemma2", "bfloat16")):
        folder = tiny_folder(tmp_path / family, family, **test_exact.FAMILIES[family])
        cfg = exact_config(folder, dtype=dtype)
        cases[family] = changed(cfg, engine=dict(kind="vllm", cpu_kv_cache_gib=0.05))
    sampling = dict(top_k=9, top_p=0.9) | test_exact.PENALTIES
    cases["gemma2"] = changed(cases["gemma2"], sampling=sampling)
    cases["two threads"] = cases["qwen3"]
    cases["in flight"] = changed(cases["qwen3"], **test_exact.IN_FLIGHT)
    (found,) = in_world(cases["qwen3"], counts, cases)
    assert min(total for _, total in found.values()) > 60
    assert {name: wrong for name, (wrong, _) in found.items() if wrong} == {}


def trained(
    settings: ModelSettings,
    sequences: list[list[int]],
    dtype: torch.dtype,
    *,
    temperature: float = 1.0,
) -> list[Tensor]:
    """Return the logprobs of each sequence's tokens but the first, by one packed row and the
    trainer's head."""
    register_attention()
    hf_model = load_whole_model(
        settings, attention="spmdrl_exact", dtype=dtype, device=torch.device("cpu")
    )
    enable_packing(hf_model)
    _, base = base_of(hf_model)
    compute_exactly(base)
    form = head_form(hf_model)
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    with torch.no_grad():
        states = base(
            input_ids=ids[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            attention_mask=None,
            use_cache=False,
            packing=make_packing(lengths, torch.device("cpu"), padded=True),
        ).last_hidden_state[0]
        logprobs, _ = logprobs_and_entropy(
            states,
            hf_model.get_output_embeddings().weight,
            targets=ids.roll(-1),
            options=HeadOptions(100, temperature, softcap=form.softcap, scale=form.scale),
        )
    return [own[:-1] for own in logprobs.split(lengths)]


@torch.inference_mode()
def generated(
    model: PagedModel, sequences: list[list[int]], *, block_size: int, draw: random.Random
) -> list[Tensor]:
    """Return the same by passes over a few tokens of some sequences, with a paged cache."""
    layers = model.layers
    sizes = [-(-len(sequence) // block_size) for sequence in sequences]
    free = draw.sample(range(sum(sizes) + 3), sum(sizes))
    tables = torch.zeros(len(sequences), max(sizes), dtype=torch.int32)
    for table, size in zip(tables, sizes):
        table[:size] = torch.tensor([free.pop() for _ in range(size)])
    for layer in layers.values():
        # Blocks keep what was in them before.
        dims = layer.head_dim + layer.value_dim
        shape = (sum(sizes) + 3, layer.num_kv_heads, block_size, dims)
        layer.bind_kv_cache(torch.full(shape, 7.5, dtype=layer.dtype))
    done = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    while any(count < len(own) for count, own in zip(done, sequences)):
        left = [i for i, own in enumerate(sequences) if done[i] < len(own)]
        chosen = draw.sample(left, draw.randint(1, len(left)))
        sizes = [draw.choice((1, 1, 40, 150)) for _ in chosen]
        ends = [min(done[i] + size, len(sequences[i])) for i, size in zip(chosen, sizes)]
        counts = [end - done[i] for i, end in zip(chosen, ends)]
        at = torch.cat([torch.arange(done[i], end) for i, end in zip(chosen, ends)])
        rows = torch.repeat_interleave(torch.tensor(chosen), torch.tensor(counts))
        metadata = SimpleNamespace(
            num_reqs=len(chosen),
            num_actual_tokens=len(at),
            query_start_loc_cpu=torch.tensor([0, *counts]).cumsum(0),
            seq_lens=torch.tensor(ends),
            block_table_tensor=tables[chosen],
            slot_mapping=tables[rows, at // block_size].long() * block_size + at % block_size,
        )
        ids = torch.tensor([sequences[i][place] for i, place in zip(rows.tolist(), at.tolist())])
        states = model.states(ids, at, PagedStep(dict.fromkeys(layers, metadata)))
        logprobs = log_probs(model.compute_logits(states))
        for i, end, own in zip(chosen, ends, logprobs.split(counts)):
            targets = torch.tensor(sequences[i][done[i] + 1 : end + 1], dtype=torch.int64)
            found[i].append(own[: len(targets)].gather(1, targets[:, None])[:, 0])
            done[i] = end
    return [torch.cat(own) for own in found]
