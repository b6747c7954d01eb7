"""Every family, in one process: rows that hold several sequences are scored as rows of one are, and
as plain transformers scores each; or the family is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from built import changed, good
from comparing import plain_scores
from test_policy_forward import plain_scorer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spmdrl.check.fit import check_fit
from spmdrl.config import ModelSettings
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.attention.separation import separation_of
from spmdrl.model.divisibility import why_never
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.targets import targeted
from spmdrl.model.parallel.recompute import checkpoint
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.model.shape import model_shape
from spmdrl.model.transformers_internals import rewritten_on_loading
from spmdrl.tools.proof.jobs import ROWS, drawn_rows
from spmdrl.tools.proof.prove import EXACT
from spmdrl.tools.small_models.families import FAMILIES, family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from spmdrl.world.lost_peers.watch import first_line

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


def plain_gradients(folder: Path, rows: list[list[int]]) -> tuple[list[Tensor], nn.Module]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
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
    found = separation_of(meta)
    reason = "; ".join(found.reasons)
    assert bool(reason) == (family in REFUSED), reason
    if not reason:
        assert_scored_as_plain(tmp_path, small.vocab_size, chunk=found.chunk)


@pytest.mark.models
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_of_transformers_is_right_or_refused(family, tmp_path):
    small, error = attempt(lambda: shrunk(family_config(family)), Exception)
    if small is None:
        pytest.skip(f"no small model of its defaults can be made: {first_line(error)}")
    _, error = attempt(lambda: tiny_model(small, tmp_path), Exception)
    if error is not None:
        pytest.skip(f"no small model of its defaults can be made: {first_line(error)}")
    own = {"path": str(tmp_path), "compute_dtype": "float32"}
    engine = {"engine": {"kind": "transformers"}}
    _, refused = attempt(lambda: check_fit(changed(good(), model=own, **engine)))
    if refused is not None:
        pytest.skip(f"refused: {refused}")
    meta = build_meta_model(ModelSettings(path=str(tmp_path)))
    attempt(lambda: model_shape(meta))
    assert_scored_as_plain(tmp_path, small.vocab_size, chunk=separation_of(meta).chunk)


def assert_scored_as_plain(tmp_path: Path, vocabulary: int, *, chunk: int | None) -> None:
    """Compare packed and single rows of a folder's model, and gradients, with transformers'."""
    rows = drawn_rows(vocabulary)
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


@pytest.mark.parametrize("family", ["codegen", "nemotron"])
def test_a_recomputation_knows_the_sequences_of_its_own_row(family, tmp_path):
    # The model's code hands on to none of its layers, or not to attention, where they begin.
    small = shrunk(family_config(family))
    tiny_model(small, tmp_path)
    rows = drawn_rows(small.vocab_size)
    gradients = []
    for mode in ("none", "full"):
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


def test_an_activation_with_parameters_is_not_split_over_ranks(tmp_path):
    shrunk(family_config("apertus")).save_pretrained(tmp_path)
    reason = why_never(build_meta_model(ModelSettings(path=str(tmp_path))))
    assert "XIELUActivation" in reason and "has parameters" in reason


@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_a_router_that_is_a_linear_layer_and_more_gets_no_adapter(family, tmp_path):
    shrunk(family_config(family)).save_pretrained(tmp_path)
    hf_model = build_meta_model(ModelSettings(path=str(tmp_path)))
    routers = {n for n, m in hf_model.named_modules() if "Router" in type(m).__name__}
    found = targeted(hf_model, "all-linear")
    assert routers and not routers & found.keys()
    assert all(any(n.endswith(end) for n in found) for end in ("q_proj", "o_proj"))
