"""Every family, in one process: rows that hold several sequences are scored as rows of one are, and
as plain transformers scores each; or the family is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoPreTrainedModel

from spmdrl.check.fit import check_fit
from spmdrl.config import ModelSettings
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.attention.packing_support import packing_support
from spmdrl.model.load import build_meta_model, check_buffers, compute_buffers
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.targets import LoraForm, targeted
from spmdrl.model.model_shape import model_shape
from spmdrl.model.parallel.recompute import checkpoint
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.model.transformers_internals import rewritten_on_loading
from spmdrl.tools.proof.jobs import ROWS, random_rows
from spmdrl.tools.proof.prove import EXACT
from spmdrl.tools.small_models.families import FAMILIES, family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from spmdrl.world.lost_peers.watch import first_line
from tests.helpers.built import changed, good
from tests.helpers.comparing import plain_scores
from tests.model.test_forward import plain_scorer

REFUSED = {"falcon+alibi"}
"""By what their attention does; see docs/models.md."""


def scores(scorer: Scorer, rows: list[list[int]], *, chunk: int | None) -> list[Tensor]:
    """Return per sequence [len] logprobs, first 0, of one packed row.

    Args:
        chunk: tokens of the chunks that some layers attend within.
    """
    lengths = [len(row) for row in rows]
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    tokens = torch.tensor([*itertools.chain(*rows)])
    row = make_row(tokens, lengths, mask=mask, slicing=Slicing(chunk=chunk))
    return list(row.spread(scorer(row)[0]).split(lengths))


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the mean absolute difference, first tokens left out."""
    pairs = zip(ours, theirs, strict=True)
    return float(torch.cat([(a[1:].double() - b[1:]).abs() for a, b in pairs]).mean())


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def plain_gradients(folder: Path, rows: list[list[int]]) -> tuple[list[Tensor], nn.Module]:
    model = plain_model(folder)
    expected = plain_scores(model, rows)
    for row in rows:
        tokens = torch.tensor(row)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double()
        logits.log_softmax(-1).gather(1, tokens[1:, None]).sum().backward()
    return expected, model


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_single_equals_plain_or_is_refused(family, tmp_path):
    small = shrunk(family_config(family))
    tiny_model(small, tmp_path)
    meta = build_meta_model(ModelSettings(path=str(tmp_path)))
    attempt(lambda: model_shape(meta))  # its sizes are known, or refused
    found = packing_support(meta)
    reason = "; ".join(found.reasons)
    assert bool(reason) == (family in REFUSED), reason
    if not reason:
        assert_scored_as_plain(tmp_path, small.vocab_size, chunk=found.chunk)


SMALL: dict[str, dict[str, int]] = {
    "mvp": dict(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    ),
    "trocr": dict(d_model=64, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64),
    "hrm_text": dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        intermediate_size=64,
    ),
    "longcat_flash": dict(
        hidden_size=128,
        num_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=64,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        head_dim=32,
        v_head_dim=32,
        moe_topk=2,
        n_routed_experts=8,
        zero_expert_num=4,
        expert_ffn_hidden_size=32,
    ),
    "minimax_m3_vl_text": dict(
        hidden_size=128,
        intermediate_size=64,
        dense_intermediate_size=64,
        shared_intermediate_size=64,
        num_hidden_layers=3,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=8,
        index_topk_blocks=2,
    ),
}
"""Sizes of families whose configs shrink.py does not know."""


def small_config(family: str) -> Any:
    """Return the config of a small model of a family's class. Raises: what its classes raise."""
    if family in SMALL:
        return AutoConfig.for_model(
            family, vocab_size=104, max_position_embeddings=512, **SMALL[family]
        )
    return shrunk(family_config(family))


def refusal(folder: Path) -> str:
    """Return why a run refuses a model; empty where it does not."""
    own = {"path": str(folder), "compute_dtype": "float32"}
    cfg = changed(good(), model=own, engine={"kind": "transformers"})
    _, refused = attempt(lambda: check_fit(cfg))
    return "" if refused is None else str(refused)


@pytest.mark.models
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_of_transformers_is_right_or_refused(family, tmp_path):
    small, error = attempt(lambda: small_config(family), Exception)
    if error is None:
        _, error = attempt(lambda: tiny_model(small, tmp_path), Exception)
    if error is not None:
        assert_refused_by_its_config(family, tmp_path, why=first_line(error))
    if why := refusal(tmp_path):
        pytest.skip(f"refused: {why}")
    meta = build_meta_model(ModelSettings(path=str(tmp_path)))
    attempt(lambda: model_shape(meta))
    assert_scored_as_plain(tmp_path, small.vocab_size, chunk=packing_support(meta).chunk)


def assert_refused_by_its_config(family: str, folder: Path, *, why: str) -> None:
    """Skip a family that a run refuses before it looks for weights.

    Args:
        why: no small model of it is made.
    """
    real, error = attempt(lambda: AutoConfig.for_model(family), Exception)
    if real is None:
        pytest.skip(f"its class has no defaults: {first_line(error)}")
    real.save_pretrained(folder)
    refused = refusal(folder)
    assert refused and "neither model.safetensors" not in refused, f"no small model: {why}"
    pytest.skip(f"refused: {refused}")


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_states_of_float32_before_a_head_of_bfloat16_are_cast_as_by_transformers(family, tmp_path):
    small = shrunk(family_config(family))
    tiny_model(small, tmp_path)
    rows = random_rows(small.vocab_size)
    exact = plain_scores(plain_model(tmp_path), rows)
    _, scorer = plain_scorer(tmp_path, torch.bfloat16)
    rounding = apart(plain_scores(plain_model(tmp_path, torch.bfloat16), rows), exact)
    with torch.no_grad():
        packed = scores(scorer, rows, chunk=None)
    assert apart(packed, exact) < 1.5 * rounding


@pytest.mark.parametrize("family", ["gpt_neo", "gpt_neox_japanese", "xglm"])
def test_code_of_older_families_is_scored_as_plain(family, tmp_path):
    """Masks that are buffers, a bias that attention returns, sinusoids by position."""
    small = small_config(family)
    tiny_model(small, tmp_path)
    assert not refusal(tmp_path)
    assert_scored_as_plain(tmp_path, small.vocab_size, chunk=None)


def test_a_buffer_of_booleans_that_no_code_computes_is_refused(tmp_path, monkeypatch):
    tiny_model(small_config("gpt_neo"), tmp_path)
    hf_model, _ = plain_scorer(tmp_path)
    mask = hf_model.transformer.h[0].attn.attention.bias
    assert mask[0, 0].equal(torch.ones_like(mask[0, 0]).tril())
    monkeypatch.setattr(GPTNeoPreTrainedModel, "_init_weights", lambda *_: None)
    for check in (compute_buffers, check_buffers):
        with pytest.raises(Refusal, match="transformer.h.0.attn.attention.bias"):
            check(hf_model)


@pytest.mark.parametrize("family", ["mvp", "trocr"])
def test_embeddings_of_places_in_the_row_are_refused(family, tmp_path):
    tiny_model(small_config(family), tmp_path)
    assert "embed_positions" in refusal(tmp_path)


def assert_scored_as_plain(tmp_path: Path, vocabulary: int, *, chunk: int | None) -> None:
    """Compare packed and single rows of a folder's model, and gradients, with transformers'."""
    rows = random_rows(vocabulary)
    expected, plain = plain_gradients(tmp_path, rows)
    hf_model, scorer = plain_scorer(tmp_path)
    packed = scores(scorer, rows, chunk=chunk)
    torch.cat(packed).double().sum().backward()
    with torch.no_grad():
        single = [scores(scorer, [row], chunk=chunk)[0] for row in rows]
    assert apart(single, expected) <= EXACT
    assert apart([one.detach() for one in packed], expected) <= EXACT
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    own = dict(hf_model.named_parameters())
    for name, grad in theirs.items():
        gap = float((own[name].grad - grad).abs().max())
        assert gap <= 1e-3 * max(float(grad.abs().max()), 1e-3 * largest), f"{name}: {gap}"


def test_norms_without_weights_count_as_norms(tmp_path):
    for family in ("olmo", "llama"):
        shrunk(family_config(family)).save_pretrained(tmp_path / family)
    shapes = [
        model_shape(build_meta_model(ModelSettings(path=str(tmp_path / family))))
        for family in ("olmo", "llama")
    ]
    assert [shape.blocks[0].norms for shape in shapes] == [2, 2]


def test_what_no_code_here_expects_of_a_module_is_refused(tmp_path):
    shrunk(family_config("llama")).save_pretrained(tmp_path)
    hf_model = build_meta_model(ModelSettings(path=str(tmp_path)))
    del hf_model.model.layers[0].self_attn.head_dim
    with pytest.raises(Refusal, match="sizes of LlamaForCausalLM cannot be read.*head_dim"):
        model_shape(hf_model)


@pytest.mark.parametrize(
    "family, recomputes",
    [
        # The model's code hands on to none of its layers, or not to attention, where they begin.
        ("codegen", "full"),
        ("nemotron", "full"),
        ("gpt_oss", "selective"),  # biases are added in place to products that could be kept
    ],
)
def test_a_recomputation_knows_the_sequences_of_its_own_row(family, recomputes, tmp_path):
    small = shrunk(family_config(family))
    tiny_model(small, tmp_path)
    rows = random_rows(small.vocab_size)
    gradients = []
    for mode in ("none", recomputes):
        hf_model, scorer = plain_scorer(tmp_path)
        checkpoint(hf_model, mode)
        packed = torch.cat(scores(scorer, rows, chunk=None))
        with torch.no_grad():
            scores(scorer, rows[:2], chunk=None)  # another row, before the first's backward pass
        packed.double().sum().backward()
        gradients.append(
            {
                n.replace("_checkpoint_wrapped_module.", ""): p.grad
                for n, p in hf_model.named_parameters()
            }
        )
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, msg=name)


def test_a_model_of_which_transformers_changes_loaded_weights_is_refused(tmp_path):
    config = shrunk(family_config("youtu"))
    for pad, is_changed in ((None, False), (0, True)):
        config.pad_token_id = pad
        config.save_pretrained(tmp_path)
        found = rewritten_on_loading(build_meta_model(ModelSettings(path=str(tmp_path))))
        assert found == (["model.embed_tokens.weight"] if is_changed else [])
    own = {"path": str(tmp_path), "compute_dtype": "float32"}
    with pytest.raises(Refusal, match="changes model.embed_tokens.weight.*pad_token_id to null"):
        check_fit(changed(good(), model=own))


def test_the_sequences_are_longer_than_every_window_and_chunk():
    config = shrunk(family_config("llama4_text"))
    assert max(ROWS) > 2 * config.attention_chunk_size
    assert max(ROWS) > 4 * shrunk(family_config("gemma2")).sliding_window
    assert max(ROWS) > 2 * shrunk(family_config("mamba2")).chunk_size


@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_a_router_that_is_a_linear_layer_and_more_gets_no_adapter(family, tmp_path):
    shrunk(family_config(family)).save_pretrained(tmp_path)
    hf_model = build_meta_model(ModelSettings(path=str(tmp_path)))
    routers = {n for n, m in hf_model.named_modules() if "Router" in type(m).__name__}
    found = targeted(hf_model, "all-linear")
    assert routers and not routers & found.keys()
    assert all(any(n.endswith(end) for n in found) for end in ("q_proj", "o_proj"))


def test_layers_that_are_linear_by_code_of_their_own_get_adapters(tmp_path):
    tiny_model(shrunk(family_config("falcon")), tmp_path)
    hf_model, _ = plain_scorer(tmp_path)
    adapters = Adapters(hf_model, LoraForm(rank=2, alpha=4, targets="all-linear"))
    assert {type(module).__name__ for module, _ in adapters.targets.values()} == {"FalconLinear"}
    layer = hf_model.transformer.h[0].mlp.dense_h_to_4h
    layer.lora_A.to_empty(device="cpu")
    layer.lora_B.to_empty(device="cpu")
    for matrix in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(matrix.weight)
    layer.double()  # else the order of the two sums shows
    x = torch.randn(1, 3, layer.in_features, dtype=torch.float64)
    merged = layer.weight + 2 * layer.lora_B.weight @ layer.lora_A.weight
    expected = torch.nn.functional.linear(x, merged, layer.bias)
    torch.testing.assert_close(layer(x), expected)


class Clipped(nn.Linear):
    """A linear layer whose results are cut where they are large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


def test_a_linear_layer_that_computes_more_gets_no_adapter_and_is_named(tmp_path):
    shrunk(family_config("llama")).save_pretrained(tmp_path)
    hf_model = build_meta_model(ModelSettings(path=str(tmp_path)))
    hf_model.model.layers[0].self_attn.q_proj = Clipped(64, 64, device="meta")
    assert "model.layers.0.self_attn.q_proj" not in targeted(hf_model, "all-linear")
    with pytest.raises(Refusal, match=r"more than x W \+ b .*q_proj \(Clipped\)"):
        targeted(hf_model, "other_proj")
