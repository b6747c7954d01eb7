"""Images of rows and messages: their places among text, and their pixels, which are checked before
they are decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config.data import ImageSettings
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

if TYPE_CHECKING:  # workers, which only look for images, do not need it
    from PIL.Image import Image

COLUMNS = ("images", "image")
"""verl's and TRL's columns of images, in the order of their places in the text."""
MARK = "<image>"
"""The place of an image in text, as verl writes it."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_DATA_URI = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*;base64,", re.ASCII)
_INLINE = ("image", "image_url", "url", "path", "base64", "bytes")
_PLACES = ("image", "image_url")
_MAX_RATIO = 200  # of the sides, as in Qwen's own processor
_GREY_16 = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


# --------------------------------------------------------------------------- places among text


def row_images(row: Mapping[str, Any], *, where: str) -> list[Any]:
    """Return the images in a row's columns `images` or `image`, in order.

    A text in the column `image` counts only if it looks like an image: it may be the name of a
    container image.

    Raises: Refusal if both columns hold images.
    """
    images = _as_list(row.get("images"))
    image = _as_list(row.get("image"))
    if not isinstance(row.get("image"), list) and not all(map(_looks_like_image, image)):
        image = []
    if images and image:
        raise Refusal(f"{where}: the row has columns `images` and `image`; leave one of them out")
    return images or image


def _as_list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list) else [value]


def _looks_like_image(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("data:") or value.lower().endswith(_SUFFIXES)
    if isinstance(value, dict):
        return any(name in value for name in _INLINE)
    return isinstance(value, bytes)


def with_placeholders(text: str, images: Sequence[Any], *, placeholder: str, where: str) -> str:
    """Return plain text with the model's placeholder in place of each `<image>`.

    Raises: Refusal if images and places differ in number.
    """
    if not images:
        return text
    _check_count(images, text.count(MARK), where=where)
    return text.replace(MARK, placeholder)


def inline_images(messages: list[dict], images: Sequence[Any], *, where: str) -> list[dict]:
    """Return messages with an image in each of its places.

    Places are parts `{"type": "image"}` and `image_url`. If the row has a column of images,
    `<image>` in texts that are not the assistant's is a place too, and a conversation without any
    place gets the images before its first user message, as in TRL.

    Args:
        images: of the row's column, see `row_images`.
    Raises: Refusal for parts that are no text or image, and if images and places differ in number.
    """
    if images and not any(map(_has_place, messages)):
        messages = _with_leading_places(messages, len(images))
    filled = [_with_parts(message, has_column=bool(images), where=where) for message in messages]
    places = [part for part in _image_parts(filled) if part["image"] is None]
    _check_count(images, len(places), where=where)
    for part, image in zip(places, images):
        part["image"] = image
    return filled


def _check_count(images: Sequence[Any], places: int, *, where: str) -> None:
    if places != len(images):
        raise Refusal(
            f"{where}: the row has {len(images)} images, and its text {places} places for them "
            f"({MARK}, or a part of type image)"
        )


def _with_parts(message: dict, *, has_column: bool, where: str) -> dict:
    """Return a message whose content is a list of parts if it holds places of images."""
    content = message.get("content")
    if has_column and isinstance(content, str) and _has_place(message):
        pieces = [piece for piece in re.split(f"({MARK})", content) if piece]
        content = [
            {"type": "image"} if piece == MARK else {"type": "text", "text": piece}
            for piece in pieces
        ]
    if not isinstance(content, list):
        return message
    return message | {"content": [_checked_part(part, where=where) for part in content]}


def _checked_part(part: Any, *, where: str) -> dict:
    """Return a part as a text, or as an image: None if the row's column holds it."""
    # Parquet adds the fields of other parts as nulls.
    fields = part if isinstance(part, dict) else {}
    own = {name: value for name, value in fields.items() if value is not None}
    kind = own.get("type", "text" if "text" in own else None)
    if kind == "text" and isinstance(own.get("text"), str):
        return {"type": "text", "text": own["text"]}
    if kind not in _PLACES:
        raise Refusal(
            f"{where}: a part of a message's content is {part!r:.80}; parts are "
            '{"type": "text", "text": ...}, {"type": "image"} and {"type": "image_url", ...}'
        )
    image = next((own[name] for name in _INLINE if name in own), None)
    if isinstance(image, dict) and "url" in image:
        image = image["url"]
    return {"type": "image", "image": image}


def _image_parts(messages: Sequence[dict]) -> list[dict]:
    """Return the parts of messages that are images, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if part.get("type") == "image"]


def _has_place(message: dict) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(part, dict) and part.get("type") in _PLACES for part in content)
    return message.get("role") != "assistant" and MARK in str(content)


def _with_leading_places(messages: Sequence[dict], count: int) -> list[dict]:
    """Return messages with places at the beginning of the first user message."""
    found = list(messages)
    for i, message in enumerate(found):
        if message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            found[i] = message | {"content": [*[{"type": "image"}] * count, *parts]}
            break
    return found


def may_hold_images(row: Mapping[str, Any]) -> bool:
    """Return whether a row may hold images: in a column of its own, or in messages."""
    if _as_list(row.get("images")) or any(map(_looks_like_image, _as_list(row.get("image")))):
        return True
    conversations = [value for value in row.values() if isinstance(value, list)]
    messages = [m for talk in conversations for m in talk if isinstance(m, dict)]
    return any(isinstance(m.get("content"), list) and _has_place(m) for m in messages)


def split_images(messages: Sequence[dict]) -> tuple[list[dict], list[Any]]:
    """Return messages as a chat template takes them, and their images in order."""
    bare = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [{"type": "image"} if p.get("type") == "image" else p for p in content]
            message = message | {"content": parts}
        bare.append(message)
    return bare, [part["image"] for part in _image_parts(messages)]


def as_data_uri(image: Any) -> Any:
    """Return an image that is bytes as a data URI, which JSON can hold; any other unchanged."""
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        return image
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def json_messages(messages: Sequence[dict]) -> list[dict]:
    """Return messages with images that JSON can hold, see `as_data_uri`."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = message | {"content": [_json_part(part) for part in content]}
        found.append(message)
    return found


def _json_part(part: dict) -> dict:
    return part | {"image": as_data_uri(part["image"])} if "image" in part else part


# --------------------------------------------------------------------------- pixels


@dataclass(frozen=True)
class ImageFiles:
    """Opens the images of one source of rows."""

    settings: ImageSettings = field(default_factory=ImageSettings)
    """Limits of images."""
    folder: Path | None = None
    """The folder of the data file, where paths of images begin; None if rows hold no paths."""

    def open(self, images: Sequence[Any], *, where: str) -> list[Image]:
        """Return the pixels of images, RGB.

        They are rotated by their EXIF, blended with white where they are transparent, and converted
        from palettes and CMYK.

        Args:
            images: bytes, data URIs, paths in the folder, or mappings with `bytes` or `path`.
            where: origin of the row, for messages.
        Raises: Refusal for too many images, and naming the one that cannot be used.
        """
        most = self.settings.max_per_prompt
        if len(images) > most:
            raise Refusal(
                f"{where}: {len(images)} images, above data.images.max_per_prompt = {most}; raise "
                "it, or leave the row out"
            )
        return [self._open(one, f"{where}: image {i}") for i, one in enumerate(images, 1)]

    def _open(self, image: Any, where: str) -> Image:
        from PIL import ImageOps

        data = self._bytes(image, where)
        # Decoders raise errors of many kinds for bytes that were made to break them.
        reading = partial(
            refusing,
            f"{where}: cannot be read as an image ({len(data)} bytes that begin {data[:12]!r})",
            Exception,
            names_kind=True,
        )
        with warnings.catch_warnings(), reading():
            warnings.simplefilter("ignore")  # the checks below say what matters
            opened = self._read_header(data)
            frames = getattr(opened, "n_frames", 1)
        self._check_header(opened, where, frames=frames)
        with warnings.catch_warnings(), reading():
            warnings.simplefilter("ignore")
            return _rgb(ImageOps.exif_transpose(opened))

    def _read_header(self, data: bytes) -> Any:
        """Return an image that is not decoded yet."""
        from PIL import Image as pillow

        try:
            return pillow.open(io.BytesIO(data), formats=_FORMATS)
        except pillow.DecompressionBombError as error:
            most = f"{error} It is above data.images.max_pixels = {self.settings.max_pixels} anyhow"
            raise ValueError(most) from error

    def _check_header(self, image: Any, where: str, *, frames: int) -> None:
        """Raise Refusal for an image that must not be decoded, by its header."""
        width, height = image.size
        most = self.settings.max_pixels
        if min(width, height) < 1:
            raise Refusal(f"{where}: is {width} x {height}, which holds no pixel")
        if width * height > most:
            raise Refusal(
                f"{where}: is {width} x {height}, {width * height} pixels, above "
                f"data.images.max_pixels = {most}; shrink it, or raise that"
            )
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise Refusal(
                f"{where}: is {width} x {height}; one side may be at most {_MAX_RATIO} times the "
                "other, as image processors require"
            )
        # The other frames of a phone's MPO are previews of the first.
        if frames > 1 and image.format != "MPO":
            raise Refusal(
                f"{where}: is a {image.format} of several frames, and a model reads one; save the "
                "frame that you want"
            )
        if image.mode in _GREY_16:
            raise Refusal(
                f"{where}: has grey values of more than 8 bits (mode {image.mode}), which would be "
                "cut; save it with 8 bits"
            )

    def _bytes(self, image: Any, where: str) -> bytes:
        if isinstance(image, dict):
            named = [image.get(name) for name in ("bytes", "path", "url", "image")]
            image = next((value for value in named if value is not None), None)
        if isinstance(image, bytes):
            return image
        if not isinstance(image, str) or not image:
            raise Refusal(
                f"{where}: expected bytes, a data URI or the path of a file, got {image!r:.80}"
            )
        if image.startswith("data:"):
            return _decode(image, where)
        if re.match(r"[A-Za-z][\w+.-]*://", image) and not image.startswith("file://"):
            raise Refusal(
                f"{where}: {image[:80]!r} is not fetched: a run reads local files only; download "
                "it into the folder of the data file, or put its bytes into the row"
            )
        return self._file(image.removeprefix("file://"), where)

    def _file(self, name: str, where: str) -> bytes:
        shown = f"{where}: {name[:200]!r}"
        if self.folder is None:
            raise Refusal(f"{shown} is a path, and there is no data file whose folder holds it")
        reading = partial(refusing, f"{shown} cannot be read", OSError, ValueError)
        root = self.folder.resolve()
        with reading():  # a name may hold characters that no path can
            path = (root / name).resolve()
            is_file = path.is_file()
        if not path.is_relative_to(root):
            raise Refusal(f"{shown} is not in the folder of the data file, {root}; move it there")
        if not is_file:
            raise Refusal(f"{shown} is no file (looked in {root})")
        most = 8 * self.settings.max_pixels + 2**20
        if path.stat().st_size > most:
            raise Refusal(
                f"{shown} has {path.stat().st_size} bytes, more than data.images.max_pixels = "
                f"{self.settings.max_pixels} take"
            )
        with reading():
            return path.read_bytes()


def _decode(uri: str, where: str) -> bytes:
    begin = _DATA_URI.match(uri)
    if not begin:
        raise Refusal(
            f"{where}: {uri[:60]!r} is no data URI in base64, as in data:image/png;base64,iVBOR..."
        )
    with refusing(f"{where}: the data URI is no base64", binascii.Error, ValueError):
        return base64.b64decode(uri[begin.end() :], validate=True)


def _rgb(image: Image) -> Image:
    from PIL import Image as pillow

    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        white = pillow.new("RGBA", image.size, "white")
        image = pillow.alpha_composite(white, image)
    return image.convert("RGB")
