"""Packed scoring of real architectures against plain transformers, one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.config import ModelSettings
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing import make_packing, pad, unpad
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.attention.pick import head_sizes, pick_attention
from spmdrl.model.head import HeadOptions
from spmdrl.model.load import load_whole_model
from spmdrl.model.scorer import ScoredRow, Scorer, make_row
from tests.helpers.comparing import next_logprobs
from tests.helpers.policy_runs import small_model

LENGTHS = (5, 70, 1, 33, 9, 90, 66)
ARCHITECTURES = ("qwen3", "qwen2", "llama", "gemma2", "gemma3", "mistral")


def _folder(architecture: str, where: Path) -> Path:
    """A tiny model whose sliding window, where it has one, is shorter than the sequences."""
    fields = {}
    if architecture in ("gemma2", "gemma3", "mistral"):
        fields["sliding_window"] = 6
    if architecture == "gemma2":  # caps low enough to matter at these tiny logits
        fields |= {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}
    return small_model(where, architecture, architecture=architecture, hf_config=fields)


def plain_scorer(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, Scorer]:
    """The model of a folder, and what scores packed rows with it."""
    register_attention()
    hf_model = load_whole_model(
        ModelSettings(path=str(folder)),
        attention="spmdrl_padded",
        dtype=dtype,
        device=torch.device("cpu"),
    ).requires_grad_()
    enable_packing(hf_model)
    return hf_model, Scorer(hf_model, HeadOptions(16)).eval()


def _rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 90, (n,), generator=generator) for n in LENGTHS]


def _work(rows: list[torch.Tensor]) -> ScoredRow:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return make_row(torch.cat(rows), [len(row) for row in rows], mask=positions > 0)


def assert_scored_as_by_transformers(
    folder: Path, scorer: Scorer, parameters: dict[str, torch.nn.Parameter]
) -> None:
    """Compare logprobs of packed rows, and gradients of a sum of them, with the plain model's."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = torch.cat([next_logprobs(model, row) for row in _rows()])
    logprobs, _ = scorer(_work(_rows()))
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    signs = torch.cos(torch.arange(logprobs.numel()).double())
    (logprobs.double() * signs).sum().backward()
    (expected * signs).sum().backward()
    theirs = dict(model.named_parameters())
    assert theirs.keys() == parameters.keys()
    for name, parameter in parameters.items():
        grad = theirs[name].grad
        gap = (parameter.grad - grad).abs().max().item()
        assert gap <= 1e-5 * max(1.0, grad.abs().max().item()), f"{name}: differs by {gap}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logprobs_and_gradients_equal_plain_transformers(architecture, tmp_path):
    folder = _folder(architecture, tmp_path)
    hf_model, scorer = plain_scorer(folder)
    assert_scored_as_by_transformers(folder, scorer, dict(hf_model.named_parameters()))


def test_packing_order_changes_no_score(tmp_path):
    (_, scorer), rows = plain_scorer(_folder("qwen3", tmp_path)), _rows()
    order = [3, 0, 6, 2, 5, 1, 4]
    with torch.no_grad():
        scores = []
        for chosen in (rows, [rows[i] for i in order]):
            work = _work(chosen)
            values = work.spread(scorer(work)[0])
            scores.append(values.split([len(row) for row in chosen]))
    for at, index in enumerate(order):
        torch.testing.assert_close(scores[1][at], scores[0][index], rtol=1e-5, atol=1e-6)


def test_padded_layout_holds_every_token_once_and_wastes_little():
    lengths = [1, 400, 390, 3, 3000, 2900, 17, 310]
    packing = make_packing(lengths, torch.device("cpu"), padded=True)
    rows = packing.unpad_index
    assert rows.unique().numel() == sum(lengths)
    assert torch.equal(packing.pad_index[rows], torch.arange(sum(lengths)))
    assert packing.pad_index.numel() < 1.1 * sum(lengths)
    assert packing.max_seqlen == 3000 and packing.cu_seqlens.tolist()[:3] == [0, 1, 401]


def test_rows_of_sequences_of_one_length_are_not_copied():
    cpu = torch.device("cpu")
    x = torch.randn(12, 2, 4)
    alike = make_packing([4, 4, 4], cpu, padded=True)
    assert pad(x, alike) is x and unpad(x, alike) is x
    for other in ([4, 3, 5], [5, 4, 3], [12, 1]):
        packing = make_packing(other, cpu, padded=True)
        own = torch.randn(sum(other), 2, 4)
        assert not packing.is_in_order and torch.equal(unpad(pad(own, packing), packing), own)
    varlen = make_packing([4, 4, 4], cpu, padded=False)
    assert not varlen.is_in_order


def test_kernels_are_refused_where_they_cannot_run():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    f32, bf16 = torch.float32, torch.bfloat16
    assert pick_attention("auto", device=cpu, dtype=bf16, has_softcap=False) == "padded"
    assert pick_attention("auto", device=cuda, dtype=bf16, has_softcap=False) == "varlen"
    assert pick_attention("auto", device=cuda, dtype=bf16, has_softcap=True) == "padded"
    assert pick_attention("flash", device=cuda, dtype=bf16, has_softcap=True) == "flash"
    for wanted, device, dtype, softcap in (
        ("varlen", cpu, bf16, False),
        ("flash", cuda, f32, False),
        ("varlen", cuda, bf16, True),
    ):
        with pytest.raises(ValueError, match="model.kernels.attention"):
            pick_attention(wanted, device=device, dtype=dtype, has_softcap=softcap)
    on_gpu = dict(device=cuda, dtype=bf16, has_softcap=False)
    assert pick_attention("auto", **on_gpu, sizes={128, 256}) == "varlen"
    for sizes in ({256, 512}, {100}):
        assert pick_attention("auto", **on_gpu, sizes=sizes) == "padded"
        with pytest.raises(ValueError, match=rf"has heads of {max(sizes)}; set it to auto"):
            pick_attention("varlen", **on_gpu, sizes=sizes)
    both = dict(device=cpu, dtype=bf16, has_softcap=True, bidirectional_images=True)
    with pytest.raises(ValueError, match="caps its logits .* does both; take another model, or so"):
        pick_attention("auto", **both, otherwise=", or so")


def test_the_large_heads_of_some_layers_are_found():
    config = AutoConfig.for_model("gemma4_text")
    assert head_sizes(config) == {256, 512}
    config = AutoConfig.for_model("gpt2", n_embd=300, n_head=3)
    assert head_sizes(config) == {100}


def test_a_first_token_cannot_be_scored():
    row = torch.arange(5, 9)
    with pytest.raises(ValueError, match="first token of a sequence"):
        make_row(row, [4], mask=torch.ones(4, dtype=torch.bool))
