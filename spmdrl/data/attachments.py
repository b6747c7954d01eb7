"""What rows and messages hold beside text, their attachments: the one door to data/vision. Images
are all that there is.

Nothing here imports torch before an attachment is prepared: workers look into rows too.
"""

# ruff: noqa: F401  (others import from here what stands behind it)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spmdrl.config.data import DataSettings, ImageSettings
from spmdrl.data.vision.images import (
    COLUMNS,
    FEATURES,
    ImageFiles,
    as_text,
    column_of,
    holds_some,
    inlined,
    marked,
    portable,
    split,
)
from spmdrl.data.vision.shapes_task import Shapes
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from spmdrl.config import Config
    from spmdrl.data.vision.image_tokens import ImageReader
    from spmdrl.data.vision.recorded import Preview
    from spmdrl.model_inputs import MultimodalItems, TokenIds

VISION_FAMILIES = ("gemma3", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types that see: proved against plain transformers, their images prepared one by one as
together."""


class AttachedFiles(Protocol):
    """Where the attachments of one source of rows are, and what they may be."""

    def opened(self, held: Sequence[Any], *, where: str) -> list[Any]:
        """Return attachments as a processor takes them. Raises: Refusal naming the one that cannot
        be used."""


def files_of(data: DataSettings | None = None, folder: Path | None = None) -> AttachedFiles:
    """Return where attachments are.

    Args:
        data: says what they may be; by default as data.images has it.
        folder: of the data file, in which they are; None where they are in the rows themselves.
    """
    return ImageFiles(data.images if data else ImageSettings(), folder)


def give_reader(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer what prepares attachments, where the model has a tower that this run keeps.

    Raises: Refusal when there is no processor, or none that can be used.
    """
    from spmdrl.data.vision.image_tokens import give_image_reader

    give_image_reader(cfg, tokenizer, families=VISION_FAMILIES)


def _reader_of(tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Return what `give_reader` gave; None for a model that does not see."""
    return getattr(tokenizer, "image_reader", None)


def reads(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer's model is shown more than text."""
    return _reader_of(tokenizer) is not None


def with_items(table: pa.Table, multimodal: MultimodalItems | None) -> pa.Table:
    """Return a table of sequences with what their tokens show, each item once in its group; as it
    was where they show nothing.

    Args:
        multimodal: by all tokens of the table's rows, in its order.
    """
    from spmdrl.data.vision.recorded import with_pictures

    return with_pictures(table, multimodal)


def recorded_items(table: pa.Table) -> MultimodalItems | None:
    """Return what the tokens of a table's sequences show; None where none shows anything.

    Args:
        table: whole groups; their greedy rows may be left out.
    Raises: ValueError for what no run records.
    """
    from spmdrl.data.vision.recorded import recorded_pictures

    return recorded_pictures(table)


def item_fields() -> Sequence[pa.Field]:
    """Return the columns that items have in a table of recorded sequences."""
    from spmdrl.data.vision.recorded import recorded_fields

    return recorded_fields()


def previews_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[int, Preview | None]]:
    """Return what is to be seen at the tokens of each row of a recorded group.

    Returns: {position: the item that begins there; None for the rest of its tokens}; empty of rows
        that show nothing.
    """
    from spmdrl.data.vision.recorded import picture_previews

    return picture_previews(rows)


@dataclass(frozen=True)
class Seen:
    """Turns text, and attachments in its places, into ids and what they show."""

    tokenizer: PreTrainedTokenizerBase
    files: AttachedFiles
    where: str
    """Origin of the row, for messages."""

    def encoded(self, text: str, held: Sequence[Any]) -> TokenIds:
        """Return ids of rendered text, no special tokens added, and what they show.

        Raises: Refusal for attachments that cannot be used, and of a model that does not see.
        """
        return self.encoded_of(text, self.opened(held))

    def opened(self, held: Sequence[Any]) -> list[Any]:
        """Return attachments as a processor takes them. Raises: Refusal as `encoded`."""
        self.check(held)
        return self.files.opened(held, where=self.where)

    def encoded_of(self, text: str, opened: Sequence[Any]) -> TokenIds:
        """Return what `encoded` does, of attachments that are opened."""
        from spmdrl.model_inputs import TokenIds

        if (reader := _reader_of(self.tokenizer)) is None:
            return TokenIds(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        with refusing(self.where, ValueError):
            return reader.encode(text, opened)

    def count(self, text: str) -> int:
        """Return how many attachments stand in rendered text."""
        reader = _reader_of(self.tokenizer)
        return 0 if reader is None else text.count(reader.placeholder)

    def check(self, held: Sequence[Any]) -> None:
        """Raise Refusal for attachments of a model that does not see."""
        if held and not reads(self.tokenizer):
            raise Refusal(
                f"{self.where}: it holds {len(held)} images, and the model does not see; take "
                "one that does (with model.part: all), or leave the images out of the data"
            )

    def plain(self, text: str, held: Sequence[Any], *, end: str = "") -> tuple[TokenIds, str]:
        """Return ids of plain text with the tokenizer's opening special tokens (bos), and the text
        with placeholders.

        Args:
            end: further text.
        Raises: Refusal as `encoded`, and for attachments and places that differ in number.
        """
        from spmdrl.data.plain_ids import encode_plain
        from spmdrl.model_inputs import TokenIds

        self.check(held)
        if (reader := _reader_of(self.tokenizer)) is None:
            return TokenIds(encode_plain(text + end, self.tokenizer)), text + end
        text = marked(text, held, placeholder=reader.written(), where=self.where) + end
        return encode_plain("", self.tokenizer) + self.encoded(text, held), text
