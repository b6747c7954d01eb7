"""Created model folders: ordinary, reproducible, with a tokenizer that loses nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from spmdrl.errors import Refusal
from spmdrl.tools.commands.create_model import TowerSizes, create_model
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import examples
from tests.helpers.vlm import noise, reader
from tests.tools.test_commands import spmdrl

ARCHITECTURES = ("qwen3", "qwen2", "llama", "gemma2", "gemma3", "mistral")
SMALL = dict(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate=96, max_positions=128)
WORDS = character_tokenizer(chat_template=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folder_loads_with_plain_transformers(architecture, tmp_path):
    folder = create_model(tmp_path / "model", architecture=architecture, **SMALL)
    words = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    ids = words("12+34=", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, 6, model.config.vocab_size)
    assert torch.isfinite(logits).all()
    assert model.config.head_dim == 32
    assert model.config.vocab_size % 8 == 0 and model.config.vocab_size >= len(words)
    eos = words.convert_tokens_to_ids("<eos>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == eos


@examples(200, st.text(alphabet=[chr(i) for i in range(32, 127)] + ["\n", "\t"], max_size=60))
def test_each_character_is_one_token_and_comes_back(text):
    ids = WORDS.encode(text)
    if not any(token in text for token in WORDS.all_special_tokens):
        assert len(ids) == len(text)
    assert WORDS.decode(ids) == text


def test_tokenizer_is_the_same_after_saving(tmp_path):
    WORDS.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "x  = 1 .\n\n don 't , ok ?\t"
    assert loaded.encode(text) == WORDS.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    ended = loaded.encode("7") + [loaded.eos_token_id]
    assert loaded.decode(ended, skip_special_tokens=True) == "7"
    assert loaded.get_vocab() == WORDS.get_vocab() and len(loaded) % 8 == 0


def test_characters_outside_ascii_become_unk():
    assert WORDS.encode("a\u00e9b") == [*WORDS.encode("a"), WORDS.unk_token_id, *WORDS.encode("b")]


def test_chat_template_marks_assistant_text_and_ends_turns_with_eos():
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    out = WORDS.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"]) if m]
    assert WORDS.decode(marked) == "2<eos>"
    prompt = WORDS.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    assert WORDS.apply_chat_template(turns, tokenize=False) == prompt + "2<eos>\n"
    assert character_tokenizer().chat_template is None


def test_chat_template_shows_tools_by_signature_and_calls_as_hermes_writes_them():
    from spmdrl.environments.tool_calls import make_parser
    from spmdrl.environments.tools import make_tools

    tools = [tool.description for tool in make_tools(["calculator"]).values()]
    call = {"name": "calculator", "arguments": {"expression": "1+1"}}
    turns = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
    ]
    text = WORDS.apply_chat_template(turns, tools=tools, tokenize=False)
    assert text == (
        "<|im_start|>tools\ncalculator(expression)<eos>\n<|im_start|>user\n1+1=<eos>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "calculator", "arguments": '
        '{"expression": "1+1"}}</tool_call><eos>\n<|im_start|>tool\n2<eos>\n'
    )
    (read,) = make_parser("auto", WORDS)(text)
    assert (read.name, read.arguments) == (call["name"], call["arguments"])


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = create_model(tmp_path / "a", seed=1, **SMALL)
    assert torch.equal(torch.rand(3), expected)
    again = create_model(tmp_path / "b", seed=1, **SMALL)
    other = create_model(tmp_path / "c", seed=2, **SMALL)
    assert _digest(first) == _digest(again) != _digest(other)


def test_defaults_have_the_size_that_the_help_states(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(create_model(tmp_path), dtype=torch.float32)
    assert 0.66e6 < model.num_parameters() < 0.68e6


def test_weights_can_be_cut_into_several_files(tmp_path):
    folder = create_model(tmp_path, max_shard_size="100KB", **SMALL)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(heads=3), "hidden_size 64 is not a multiple of heads 3"),
        (dict(heads=4, kv_heads=3), "heads 4 is not a multiple of kv_heads 3"),
        (dict(architecture="gemma2", tied=False), "tied False with gemma2"),
    ],
)
def test_impossible_shapes_are_refused_before_writing(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        create_model(tmp_path / "model", **{**SMALL, **change})
    assert not (tmp_path / "model").exists()


def test_command_line_makes_a_tied_model_with_a_template(tmp_path):
    flags = ["--layers", "1", "--architecture", "qwen2", "--tied", "True", "--chat-template"]
    done = spmdrl("create_model", str(tmp_path / "m"), *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"]
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template


@pytest.mark.parametrize(
    "architecture", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3_vision", "internvl"]
)
def test_a_model_that_sees_is_made_with_its_processor(architecture, tmp_path):
    options = dict(SMALL, tower=TowerSizes(width=32, layers=1, image_side=84))
    folder = create_model(tmp_path / "model", architecture=architecture, **options)
    again = create_model(tmp_path / "again", architecture=architecture, **options)
    names = sorted(path.name for path in folder.iterdir())
    assert "preprocessor_config.json" in names
    assert all((folder / n).read_bytes() == (again / n).read_bytes() for n in names)
    read = reader(folder)
    ids = read.encode(f"{read.placeholder} what?", [noise(60, 40)])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert model.config.text_config.num_hidden_layers == SMALL["layers"]
    given = dict(ids.items[0].features)
    if "qwen" in architecture:
        given["mm_token_type_ids"] = torch.tensor([ids.are_placeholders]).long()
    logits = model(input_ids=torch.tensor([ids]), **given).logits
    assert torch.isfinite(logits).all() and logits.shape[1] == len(ids)


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(tower=TowerSizes(width=40)), "tower.width 40 is not a multiple of 16"),
        (dict(tower=TowerSizes(image_side=60)), "tower.image_side 60 is not a multiple of 28"),
        (dict(tower=TowerSizes(layers=0)), "tower.layers 0"),
        (dict(tokenizer="some/folder"), "is made with the character tokenizer"),
        (dict(architecture="gemma3_vision", tied=False), "tied False with gemma3_vision"),
    ],
)
def test_sizes_of_a_tower_are_refused_by_name(options, says, tmp_path):
    with pytest.raises(Refusal, match=says):
        create_model(tmp_path / "model", **dict(dict(SMALL, architecture="qwen3_vl"), **options))
