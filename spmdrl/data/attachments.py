"""Attachments: what rows and messages hold beside text. Only images are supported.

Other rooms import data/vision through this module alone. It imports torch only when an attachment
is prepared, because workers read rows too.
"""

# ruff: noqa: F401  (the names of data/vision are imported for others)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spmdrl.data.vision.images import (
    COLUMNS,
    ImageFiles,
    as_data_uri,
    inline_images,
    json_messages,
    may_hold_images,
    row_images,
    split_images,
    with_placeholders,
)
from spmdrl.data.vision.shapes_task import Shapes
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spmdrl.config import Config
    from spmdrl.data.vision.image_tokens import ImageReader
    from spmdrl.data.vision.recorded import Preview
    from spmdrl.model_inputs import TokenIds

VISION_FAMILIES = (
    "gemma3",
    "glm4v",
    "internvl",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""Model types that read images. Tests prove each against plain transformers, and that its images
can be prepared one by one."""


def attach_image_reader(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `tokenizer.image_reader` if the model has a vision tower that this run uses.

    Raises: Refusal when there is no processor, or none that can be used.
    """
    from spmdrl.data.vision.image_tokens import image_reader

    if reader := image_reader(cfg, tokenizer, families=VISION_FAMILIES):
        tokenizer.image_reader = reader  # type: ignore[attr-defined]


def _reader_of(tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    return getattr(tokenizer, "image_reader", None)


def reads_images(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the model of a tokenizer reads images."""
    return _reader_of(tokenizer) is not None


def plain_token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of plain text after the tokenizer's opening special tokens (bos)."""
    tokens = tokenizer(text)["input_ids"]
    # Some tokenizers close every text with eos, and nothing can continue it.
    if tokens and tokens[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        tokens = tokens[:-1]
    return tokens


def previews_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[int, Preview | None]]:
    """Return previews of the items in each row of a recorded group.

    Returns: {position: the preview that begins there; None for its other tokens}; empty for rows
        without items.
    """
    from spmdrl.data.vision.recorded import picture_previews

    return picture_previews(rows)


@dataclass(frozen=True)
class MultimodalEncoder:
    """Turns text and its images into token ids with multimodal items."""

    tokenizer: PreTrainedTokenizerBase
    files: ImageFiles
    where: str
    """Origin of the row, for messages."""

    def encode(self, text: str, images: Sequence[Any]) -> TokenIds:
        """Return the ids of rendered text, without special tokens around it, and its items.

        Args:
            images: as the row holds them, one for each placeholder in the text.
        Raises: Refusal for images that cannot be used, or if the model reads none.
        """
        return self.encode_opened(text, self.open(images))

    def open(self, images: Sequence[Any]) -> list[Any]:
        """Return images as a processor takes them. Raises: Refusal as `encode`."""
        self.check(images)
        return self.files.open(images, where=self.where)

    def encode_opened(self, text: str, opened: Sequence[Any]) -> TokenIds:
        """Do what `encode` does, with images that are open already."""
        from spmdrl.model_inputs import TokenIds

        reader = _reader_of(self.tokenizer)
        if reader is None:
            return TokenIds(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        with refusing(self.where, ValueError):
            return reader.encode(text, opened)

    def count_placeholders(self, text: str) -> int:
        """Return how many images stand in rendered text."""
        reader = _reader_of(self.tokenizer)
        return 0 if reader is None else text.count(reader.placeholder)

    def check(self, images: Sequence[Any]) -> None:
        """Raise Refusal if there are images and the model reads none."""
        if images and not reads_images(self.tokenizer):
            raise Refusal(
                f"{self.where}: it holds {len(images)} images, and the model reads none; take a "
                "model that does (with model.part: all), or leave the images out of the data"
            )

    def encode_plain(
        self, text: str, images: Sequence[Any], *, end: str = ""
    ) -> tuple[TokenIds, str]:
        """Return the ids of plain text after the tokenizer's opening special tokens (bos), and the
        text with its placeholders.

        Args:
            end: text to append, which holds no place of an image.
        Raises: Refusal as `encode`, and if images and their places differ in number.
        """
        from spmdrl.model_inputs import TokenIds

        self.check(images)
        reader = _reader_of(self.tokenizer)
        if reader is None:
            return TokenIds(plain_token_ids(text + end, self.tokenizer)), text + end
        placeholder = reader.marked_placeholder()
        text = with_placeholders(text, images, placeholder=placeholder, where=self.where) + end
        return plain_token_ids("", self.tokenizer) + self.encode(text, images), text
