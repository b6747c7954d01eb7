"""The text part of models that see: trained as a model of its own, exported into the whole."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from spmdrl.check.fit import check_fit
from spmdrl.check.rules import rule_problems
from spmdrl.config import LayoutSettings, from_tree
from spmdrl.model import load
from spmdrl.model.files.reader import CheckpointReader, instead, text_part
from spmdrl.model.load import load_hf_config
from spmdrl.model.transformers_internals import has_towers
from spmdrl.tools.commands.export import export
from tests.helpers.checkpoint_runs import save
from tests.helpers.comparing import plain_scores
from tests.helpers.policy_runs import changed, config
from tests.helpers.worlds import with_stream, with_trainer
from tests.sync.test_engine import change, make_config

ROWS = ([5, 6, 7, 8, 40, 41], [9, 10, 11])
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT
        | {
            "model_type": "gemma3_text",
            "layer_types": ["full_attention"] * 2,
            "query_pre_attn_scalar": 8,
        },
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "tie_word_embeddings": False,
    },
    # Its files hold queries, keys and values of the tower as one tensor.
    "qianfan_ocr": {
        "text_config": TEXT | {"model_type": "qwen3", "tie_word_embeddings": False},
        "vision_config": VISION,
        "tie_word_embeddings": False,
    },
}


_OF_EXPERTS = dict(
    moe_intermediate_size=24,
    num_experts_per_tok=2,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
_SEES = VISION | dict(depth=1, num_heads=2, out_hidden_size=32)


def _text(section: list[int], *, share: float | None = None, **fields: Any) -> dict[str, Any]:
    rope = dict(rope_type="default", rope_theta=10.0, mrope_section=section)
    own = {} if share is None else {"partial_rotary_factor": share}
    return TEXT | {"rope_parameters": rope | own} | fields


WITHOUT_CLASS: dict[str, dict[str, Any]] = {
    "glm4v": {"text_config": _text([2, 1, 1], head_dim=8), "vision_config": _SEES},
    "glm4v_moe": {
        "text_config": _text([4, 2, 2], share=0.5, **_OF_EXPERTS),
        "vision_config": _SEES,
    },
    "qwen2_vl": {
        "text_config": _text([2, 1, 1], head_dim=8),
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    },
    "qwen2_5_vl": {"text_config": _text([2, 1, 1], head_dim=8), "vision_config": _SEES},
    "qwen3_vl": {
        "text_config": _text([8, 4, 4]),
        "vision_config": _SEES | {"deepstack_visual_indexes": [0]},
    },
}
"""Those whose text part is loaded as a model of another type."""


def _folder(where: Path, family: str, *, noise: float = 0.05) -> Path:
    torch.manual_seed(0)
    own = AutoConfig.for_model(family, **(WHOLES | WITHOUT_CLASS)[family])
    model = AutoModelForImageTextToText.from_config(own, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(where / family)
    return where / family


class _Plain(torch.nn.Module):
    def __init__(self, whole: torch.nn.Module):
        super().__init__()
        self.whole = whole.eval()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.whole(*inputs, **options)


def _trained(trainer: Any) -> list[torch.Tensor]:
    scores = trainer.weights.score(ROWS)
    change(trainer, 0.02)
    save(trainer, 1)
    return scores


@pytest.mark.parametrize("family", WHOLES)
def test_the_text_part_is_scored_as_within_the_whole_and_exported_into_it(family, tmp_path):
    folder = _folder(tmp_path, family)
    cfg = config(folder, tmp_path / "run", world_size=2, model={"part": "text"})
    check_fit(cfg)
    whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    expected = plain_scores(_Plain(whole), ROWS)
    for scores in with_trainer(cfg, _trained):
        for ours, theirs in zip(scores, expected):
            assert (ours - theirs).abs().mean() < 2e-6
    out = export(tmp_path / "run", out=tmp_path / "out", dtype="float32")
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys()
    text = {*text_part(str(folder)).names.values()}
    assert text and before.keys() - text
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == before.keys() - text
    own = [json.loads((path / "config.json").read_text()) for path in (folder, out)]
    assert own[0] == own[1]
    _, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report


@pytest.mark.parametrize("family", WITHOUT_CLASS)
def test_a_text_part_of_another_type_is_scored_as_within_the_whole(family, tmp_path):
    folder = _folder(tmp_path, family, noise=0.3)
    whole = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    expected = plain_scores(_Plain(whole), ROWS)
    model = from_tree({"model": {"path": str(folder), "part": "text"}}).model
    text = load.load_whole_model(
        model, attention="eager", dtype=torch.float32, device=torch.device("cpu")
    )
    assert not has_towers(text.config)
    assert _apart(text, expected) < 2e-6
    for frequencies in text.model.rotary_emb.buffers():
        frequencies.mul_(1.01)
    assert _apart(text, expected) > 1e-4  # so a difference of positions would show


def _apart(model: torch.nn.Module, expected: list[torch.Tensor]) -> float:
    pairs = zip(plain_scores(model, ROWS), expected, strict=True)
    return max(float((ours - theirs).abs().mean()) for ours, theirs in pairs)


def _pushed(stream: Any, engine: Any, trainer: Any) -> dict[str, Any]:
    found = {"mode": stream.mode, "probes": [stream.probe(ROWS)["sync/probe_gap"]]}
    change(trainer, 0.02)
    stream.push(1)
    return found | {"probes": [*found["probes"], stream.probe(ROWS)["sync/probe_gap"]]}


@pytest.mark.parametrize(
    "family, kind",
    [
        ("gemma3", "vllm"),
        ("gemma3", "transformers"),
        pytest.param("qwen3_vl", "vllm", marks=pytest.mark.grid),
        pytest.param("glm4v_moe", "vllm", marks=pytest.mark.grid),
    ],
)
def test_an_engine_is_that_of_the_text_part_alone(family, kind, tmp_path):
    layout = LayoutSettings(world_size=1, placement="colocated")
    cfg = make_config(_folder(tmp_path, family), layout=layout, dtype="float32", kind=kind)
    (found,) = with_stream(changed(cfg, model={"part": "text"}), _pushed)
    assert found["mode"] == "traced"
    for gap, count in found["probes"]:
        assert count == 7 and gap / count < 1e-4, found


def test_a_tied_head_of_other_values_is_refused_of_the_text_part_too(tmp_path):
    folder = _folder(tmp_path, "gemma3")
    cfg = config(folder, tmp_path / "run", model={"part": "text"})
    tensors = load_file(folder / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file(tensors | {"lm_head.weight": tensors[name].clone()}, folder / "model.safetensors")
    check_fit(cfg)
    save_file(tensors | {"lm_head.weight": tensors[name] + 1}, folder / "model.safetensors")
    for part in ("text", "all"):
        with pytest.raises(ValueError, match="ties lm_head.weight to .*embed_tokens.weight"):
            check_fit(changed(cfg, model={"part": part}, engine={"kind": "transformers"}))


def test_whoever_reads_a_config_says_which_part():
    """Or a run of a text part is refused half-way through its start: a run's model is named by its
    settings, and a path alone by the command that proves a model."""
    package = Path(load.__file__).parents[1]
    calling = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_hf_config"
    }
    assert calling == {"model/load.py", "tools/commands/check.py"}


def test_what_is_no_text_part_is_refused_or_kept_apart(tmp_path):
    folder = _folder(tmp_path, "mistral3")
    with pytest.raises(ValueError, match="set model.part to text"):
        load_hf_config(str(folder))
    reader = CheckpointReader(folder, part="text")
    assert "model.embed_tokens.weight" in reader.names()
    assert not [name for name in reader.rest if name.startswith("language_model.model")]
    for fields in ({"objective": "reward_model"}, {"model": {"trust_remote_code": True}}):
        model = {"part": "text", **fields.pop("model", {})}
        found = rule_problems(config(folder, tmp_path, model=model, **fields))
        assert any(text.startswith("model.part: text with") for text in found)
    AutoConfig.for_model("qwen3_vl_moe").save_pretrained(tmp_path / "qwen")
    with pytest.raises(ValueError, match="model.part: text of a qwen3_vl_moe .* cannot be told"):
        load_hf_config(str(tmp_path / "qwen"), part="text")


@pytest.mark.parametrize(
    "family, has_text",
    [
        ("fuyu", True),
        ("emu3", False),
        ("got_ocr2", True),
        ("glm46v", True),
        ("ernie4_5_vl_moe", False),
        ("mllama", False),
        ("granite_speech", True),
    ],
)
def test_the_text_part_is_advised_where_it_can_be_trained(family, has_text, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"is a {family} with a tower") as found:
        load_hf_config(str(tmp_path))
    assert ("set model.part to text" in str(found.value)) == has_text
    assert ("its text part cannot be trained alone either" in str(found.value)) != has_text
    if has_text:
        assert load_hf_config(str(tmp_path), part="text").model_type != family
    else:
        with pytest.raises(ValueError, match="cannot be told from the rest"):
            load_hf_config(str(tmp_path), part="text")
    assert bool(instead(str(tmp_path))) == has_text


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral4", "gemma4_text", "blt", "dbrx", "deepseek_v3"]
)
def test_a_model_of_text_has_no_tower(family):
    assert not has_towers(AutoConfig.for_model(family))
