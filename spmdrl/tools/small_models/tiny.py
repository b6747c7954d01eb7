"""A small vision model of the same code as a large one, with random weights and a processor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.model.transformers_internals import has_towers
from spmdrl.tools.small_models.random_vision import make_vision_model
from spmdrl.tools.small_models.shrink import shrunk, tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYERS = 4  # of the tower
_WIDTH = 32  # of the tower
_PLACES = {"fullatt_block_indexes": [1, 3], "deepstack_visual_indexes": [0, 2]}
"""Two blocks of each kind: of windows, or over all of a picture; shown to deeper layers, or not."""
_TOKEN = re.compile(r"_token_(id|index)$")


def tiny_of(config: Any, folder: Path, *, kv_heads: int) -> PreTrainedModel:
    """Write a small model of the same code into a folder; a vision model gets its tower.

    Args:
        config: of transformers; one with a tower is of a family in towers.py.
        kv_heads: see `shrunk`.
    Returns: the model as transformers holds it: float32, in evaluation mode.
    Raises: Refusal when the small model is not of the same kinds of layers.
    """
    text = shrunk(config, kv_heads=kv_heads)
    if not has_towers(config):
        return tiny_model(text, folder)
    own = text.to_dict() | {"tie_word_embeddings": bool(config.tie_word_embeddings)}
    own.setdefault("head_dim", own["hidden_size"] // own["num_attention_heads"])

    def whole(small: dict[str, Any]) -> dict[str, Any]:
        return _like(config.to_dict(), small=small, text=own)

    return make_vision_model(
        config.model_type, folder, text=own, width=_WIDTH, layers=_LAYERS, fields=whole
    )


def _like(real: dict[str, Any], *, small: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a small config, with those of the real one that are no sizes or tokens.

    Args:
        small: fields as random_vision.py has them.
        text: fields of the text model, shrunk.
    """
    made = small["text_config"]
    rope = text["rope_parameters"]
    words = {n: v for n, v in text.items() if n != "vocab_size" and not _TOKEN.search(n)}
    for name in ("rope_parameters", "rope_scaling"):
        if name in made:
            words[name] = made[name] | rope
    tower = real["vision_config"] | small["vision_config"] | {"initializer_range": _WIDTH**-0.5}
    tower |= {name: places for name, places in _PLACES.items() if name in tower}
    kept = {n: v for n, v in real.items() if n != "model_type" and not _TOKEN.search(n)}
    return kept | small | {"text_config": made | words, "vision_config": tower}
