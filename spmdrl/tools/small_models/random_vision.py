"""Small random models that see, with the processors that belong to them: for demos and tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.model.transformers_internals import as_saved
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PATCH = 14
"""Pixels of a patch's side, in all that are made here."""

# A message's content is text, or a list of texts and images.
_SAY = (
    "{%- macro say(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content -%}{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}"
    "{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)

_QWEN = dict(
    vision_start_token="<|vision_start|>",
    vision_end_token="<|vision_end|>",
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    vision_pad_token="<|vision_pad|>",
)


@dataclass(frozen=True)
class Made:
    """How a family's small model, its tokenizer and its processor are made."""

    special: Mapping[str, str]
    """{attribute of the tokenizer: a further token with an id of its own}."""
    text: str
    """What the chat template writes for an image."""
    config: Callable[[Any, Sizes], dict[str, Any]]
    """From the tokenizer and the sizes to the fields of the model's config."""
    processor: Callable[[Sizes], dict[str, dict[str, Any]]]
    """From the sizes to {file name: its content}."""


@dataclass(frozen=True)
class Sizes:
    """Of a small model."""

    text: dict[str, Any]
    """Fields of the text model's config."""
    width: int
    """Hidden size of the tower, a multiple of 8 * heads of it."""
    layers: int
    """Blocks of the tower."""
    image_side: int
    """Pixels of the side of the largest image, a multiple of 28; larger ones are shrunk."""


def make_vision_model(
    family: str,
    folder: Path | str,
    *,
    text: Mapping[str, Any],
    width: int = 32,
    layers: int = 2,
    image_side: int = 84,
    fan_in: bool = False,
    seed: int = 0,
    max_shard_size: str = "5GB",
    fields: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> PreTrainedModel:
    """Write random float32 weights, a character tokenizer with a chat template, and a processor.

    Args:
        family: one of MADE.
        folder: where to write; made when missing.
        text: fields of the text model's config, head_dim among them.
        width, layers, image_side: of the tower, see Sizes.
        fan_in: draw the matrices of tower and projector with a standard deviation of inputs ** -0.5
            each, from which small ones learn soon.
        seed: the same seed gives the same bytes.
        max_shard_size: weights above this are cut into several files.
        fields: from those of the config to the ones that it gets.
    Returns: the model as transformers holds it, in evaluation mode.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    made = MADE[family]
    folder = Path(folder)
    words = character_tokenizer(
        chat_template=True, special=made.special, say=_SAY.replace("IMAGE", made.text)
    )
    ends = dict(
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    rows = -(-len(words) // 8) * 8
    sizes = Sizes(dict(text, vocab_size=rows, **ends), width, layers, image_side)
    config = AutoConfig.for_model(family, **fields(made.config(words, sizes)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        _spread(model, fan_in=fan_in)
    model.generation_config = GenerationConfig(
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id
    )
    # As released files are, which saving by itself is not in all families.
    released = as_saved(model, live_tensors(model))
    model.save_pretrained(
        folder, max_shard_size=max_shard_size, state_dict=released, save_original_format=False
    )
    words.save_pretrained(folder)
    for name, content in made.processor(sizes).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return model.eval()


def _spread(model: PreTrainedModel, *, fan_in: bool) -> None:
    """Draw what transformers leaves alike, and with `fan_in` the matrices that see."""
    import torch

    for name, parameter in model.named_parameters():
        if fan_in and parameter.dim() > 1 and not _is_of_text(name):
            parameter.data.normal_(0, parameter[0].numel() ** -0.5)
        if not parameter.any():  # Gemma 3's projector would show nothing of any image
            parameter.data += 0.1 * torch.randn_like(parameter)
        if parameter.dim() == 1:  # norms start at 1 and biases at 0
            parameter.data += 0.02 * torch.randn_like(parameter)


def _is_of_text(name: str) -> bool:
    return "language_model" in name or "lm_head" in name


def _id(words: PreTrainedTokenizerBase, token: str) -> int:
    return words.convert_tokens_to_ids(token)


def _mrope(sizes: Sizes, *, share: float = 1.0, **more: Any) -> dict[str, Any]:
    half = int(sizes.text["head_dim"] * share) // 2
    side = half // 3
    sections = [half - 2 * side, side, side]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


def _qwen_ids(words: PreTrainedTokenizerBase) -> dict[str, Any]:
    names = ("vision_start_token", "vision_end_token", "image_token", "video_token")
    return {f"{name}_id": _id(words, _QWEN[name]) for name in names}


def _merging_tower(sizes: Sizes, **own: Any) -> dict[str, Any]:
    return dict(
        depth=sizes.layers,
        hidden_size=sizes.width,
        num_heads=2,
        intermediate_size=2 * sizes.width,
        out_hidden_size=sizes.text["hidden_size"],
        patch_size=PATCH,
        **own,
    )


def _glm4(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    share = 0.5
    rope = _mrope(sizes, share=share, partial_rotary_factor=share)
    return dict(
        {f"{name}_id": _id(words, token) for name, token in _GLM_TOKENS.items()},
        text_config=dict(sizes.text, rope_parameters=rope),
        vision_config=_merging_tower(sizes, image_size=sizes.image_side),
        tie_word_embeddings=sizes.text["tie_word_embeddings"],
    )


def _of_qwen2(
    words: PreTrainedTokenizerBase, sizes: Sizes, *, tower: dict[str, Any]
) -> dict[str, Any]:
    rope = _mrope(sizes)
    return dict(
        _qwen_ids(words),
        # vLLM's loader and transformers read the same from either name.
        text_config=dict(sizes.text, rope_parameters=rope, rope_scaling=rope),
        vision_config=tower,
        vocab_size=sizes.text["vocab_size"],
        tie_word_embeddings=sizes.text["tie_word_embeddings"],
    )


def _qwen2(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    tower = dict(
        depth=sizes.layers,
        embed_dim=sizes.width,
        hidden_size=sizes.text["hidden_size"],
        num_heads=2,
        mlp_ratio=2,
        patch_size=PATCH,
    )
    return _of_qwen2(words, sizes, tower=tower)


def _qwen2_5(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    windows = dict(fullatt_block_indexes=[sizes.layers - 1], window_size=4 * PATCH)
    return _of_qwen2(words, sizes, tower=_merging_tower(sizes, **windows))


def _qwen3(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    return dict(
        _qwen_ids(words),
        text_config=dict(sizes.text, rope_parameters=_mrope(sizes, mrope_interleaved=True)),
        vision_config=_merging_tower(
            sizes, num_position_embeddings=16, deepstack_visual_indexes=[0]
        ),
        tie_word_embeddings=sizes.text["tie_word_embeddings"],
    )


def _qwen3_5(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    found = _qwen3(words, sizes)
    share = 0.25
    rope = _mrope(sizes, share=share, mrope_interleaved=True, partial_rotary_factor=share)
    del found["vision_config"]["deepstack_visual_indexes"]
    kinds = ("linear_attention", "full_attention")
    own = dict(
        layer_types=[kinds[i % 2] for i in range(sizes.text["num_hidden_layers"])],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    return found | {"text_config": own | dict(sizes.text, rope_parameters=rope)}


def _files(kind: str) -> Callable[[Sizes], dict[str, dict[str, Any]]]:
    def files(sizes: Sizes) -> dict[str, dict[str, Any]]:
        pixels = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": sizes.image_side**2}
        own = dict(size=pixels, patch_size=PATCH, temporal_patch_size=2, merge_size=2)
        return {
            "preprocessor_config.json": dict(
                own,
                image_processor_type=f"{_IMAGE.get(kind, kind)}ImageProcessor",
                processor_class=f"{kind}Processor",
            ),
            "video_preprocessor_config.json": dict(
                own, video_processor_type=f"{_VIDEO.get(kind, kind)}VideoProcessor"
            ),
            "processor_config.json": {"processor_class": f"{kind}Processor"},
        }

    return files


_IMAGE = {"Qwen2_5_VL": "Qwen2VL", "Qwen3VL": "Qwen2VL"}
_VIDEO = {"Qwen2_5_VL": "Qwen2VL"}


def _tower(sizes: Sizes) -> dict[str, Any]:
    return dict(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=2,
        intermediate_size=2 * sizes.width,
        image_size=sizes.image_side,
        patch_size=PATCH,
    )


def _gemma3(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    own = dict(
        layer_types=[kinds[i % 2] for i in range(sizes.text["num_hidden_layers"])],
        sliding_window=32,
        query_pre_attn_scalar=sizes.text["head_dim"],
    )
    return dict(
        text_config=dict(sizes.text, **own),
        vision_config=dict(_tower(sizes), model_type="siglip_vision_model", vision_use_head=False),
        mm_tokens_per_image=_image_tokens(sizes),
        image_token_id=_id(words, "<image_soft_token>"),
        boi_token_id=_id(words, "<start_of_image>"),
        eoi_token_id=_id(words, "<end_of_image>"),
        tie_word_embeddings=True,
    )


def _side(sizes: Sizes) -> dict[str, int]:
    return dict(height=sizes.image_side, width=sizes.image_side)


def _image_tokens(sizes: Sizes) -> int:
    return (sizes.image_side // PATCH // 2) ** 2


def _gemma3_files(sizes: Sizes) -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": dict(
            image_processor_type="Gemma3ImageProcessor",
            processor_class="Gemma3Processor",
            size=_side(sizes),
            image_seq_length=_image_tokens(sizes),
        ),
        "processor_config.json": dict(
            processor_class="Gemma3Processor", image_seq_length=_image_tokens(sizes)
        ),
    }


def _internvl(words: PreTrainedTokenizerBase, sizes: Sizes) -> dict[str, Any]:
    return dict(
        text_config=dict(sizes.text, model_type="qwen2"),
        vision_config=_tower(sizes),
        image_token_id=_id(words, "<IMG_CONTEXT>"),
        image_seq_length=_image_tokens(sizes),
        tie_word_embeddings=sizes.text["tie_word_embeddings"],
    )


def _internvl_files(sizes: Sizes) -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": dict(
            image_processor_type="GotOcr2ImageProcessor",
            processor_class="InternVLProcessor",
            size=_side(sizes),
            crop_to_patches=True,
            min_patches=1,
            max_patches=4,
        ),
        "video_preprocessor_config.json": dict(
            video_processor_type="InternVLVideoProcessor", size=_side(sizes)
        ),
        "processor_config.json": dict(
            processor_class="InternVLProcessor", image_seq_length=_image_tokens(sizes)
        ),
    }


_GEMMA3_TOKENS = dict(
    boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
)
_GLM_TOKENS = dict(
    image_start_token="<|begin_of_image|>",
    image_end_token="<|end_of_image|>",
    video_start_token="<|begin_of_video|>",
    video_end_token="<|end_of_video|>",
    image_token="<|image|>",
    video_token="<|video|>",
)
_INTERNVL_TOKENS = dict(
    start_image_token="<img>",
    end_image_token="</img>",
    context_image_token="<IMG_CONTEXT>",
    video_token="<video>",
)
_QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"

_GLM_TEXT = "<|begin_of_image|><|image|><|end_of_image|>"

MADE: dict[str, Made] = {
    "qwen2_vl": Made(_QWEN, _QWEN_TEXT, _qwen2, _files("Qwen2VL")),
    "qwen2_5_vl": Made(_QWEN, _QWEN_TEXT, _qwen2_5, _files("Qwen2_5_VL")),
    "qwen3_vl": Made(_QWEN, _QWEN_TEXT, _qwen3, _files("Qwen3VL")),
    "qwen3_vl_moe": Made(_QWEN, _QWEN_TEXT, _qwen3, _files("Qwen3VL")),
    "qwen3_5": Made(_QWEN, _QWEN_TEXT, _qwen3_5, _files("Qwen3VL")),
    "qwen3_5_moe": Made(_QWEN, _QWEN_TEXT, _qwen3_5, _files("Qwen3VL")),
    "gemma3": Made(_GEMMA3_TOKENS, "<start_of_image>", _gemma3, _gemma3_files),
    "glm4v": Made(_GLM_TOKENS, _GLM_TEXT, _glm4, _files("Glm4v")),
    "internvl": Made(_INTERNVL_TOKENS, "<IMG_CONTEXT>\\n", _internvl, _internvl_files),
}
"""{model type: how it is made}."""
