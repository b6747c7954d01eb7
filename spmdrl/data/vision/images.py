"""Images of rows and messages: where they stand among text, and their pixels, checked before they
are decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.errors import Refusal
from spmdrl.imports import refusing

if TYPE_CHECKING:  # what looks for images alone, as workers do, needs none of it
    from PIL.Image import Image

    from spmdrl.config.data import ImageSettings

COLUMNS = ("images", "image")
"""verl's and TRL's, by whose order places in text are filled."""
FEATURES = "picture_features"
"""Column of recorded rollouts with what towers read, which is large."""
MARK = "<image>"
"""The place of an image in text, as verl writes it."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_DATA_URI = re.compile(r"data:[\w.+/-]*(?:;[\w.+=-]+)*;base64,", re.ASCII)
_INLINE = ("image", "image_url", "url", "path", "base64", "bytes")
_MOST_RATIO = 200  # of the sides, as Qwen's own processor has it
_GREY_16 = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


# --------------------------------------------------------------------------- where they stand


def column_of(row: Mapping[str, Any], *, where: str) -> list[Any]:
    """Return the images of a row's own column, in order; those in its messages stand there.

    A text in `image` is one where it has the form of one: the name of a container image is none.

    Raises: Refusal where both columns hold some, and for what is no image.
    """
    found = {name: _listed(row.get(name)) for name in COLUMNS}
    if not isinstance(row.get("image"), list) and not all(map(_looks_like_one, found["image"])):
        found["image"] = []
    if found["images"] and found["image"]:
        raise Refusal(f"{where}: the row has columns `images` and `image`; leave one of them out")
    return found["images"] or found["image"]


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list) else [value]


def _looks_like_one(value: Any) -> bool:
    if not isinstance(value, str):
        return isinstance(value, bytes) or (isinstance(value, dict) and bool({*value} & {*_INLINE}))
    return value.startswith("data:") or value.lower().endswith(_SUFFIXES)


def marked(text: str, images: Sequence[Any], *, placeholder: str, where: str) -> str:
    """Return plain text with the model's placeholder where an image stands, by `<image>`.

    Raises: Refusal when images and places differ in number.
    """
    if not images:
        return text
    _check_count(images, text.count(MARK), where=where)
    return text.replace(MARK, placeholder)


def inlined(messages: list[dict], images: Sequence[Any], *, where: str) -> list[dict]:
    """Return messages each of whose places of an image holds that image.

    Places are parts `{"type": "image"}` and `image_url`, and, where the row has a column of images,
    `<image>` in texts that the assistant does not say. A conversation without any has its images
    before its first user message, which is TRL's rule.

    Args:
        images: of the row's column, see `column_of`.
    Raises: Refusal for parts that cannot be shown, and when images and places differ in number.
    """
    if images and not any(map(_has_place, messages)):
        messages = _with_leading_places(messages, len(images))
    supply = _Supply(images, where=where)
    filled = [_filled_message(message, supply) for message in messages]
    _check_count(images, supply.taken, where=where)
    return filled


def _check_count(images: Sequence[Any], places: int, *, where: str) -> None:
    if places != len(images):
        raise Refusal(
            f"{where}: the row has {len(images)} images, and its text {places} places for them "
            f"({MARK}, or a part of type image)"
        )


class _Supply:
    """The images of a row's column, taken in order by their places."""

    def __init__(self, images: Sequence[Any], *, where: str):
        self._images = images
        self._where = where
        self.taken = 0

    def filled(self, content: str | list) -> str | list[dict]:
        """Return the content of a message with an image in each place."""
        if isinstance(content, list):
            return [self._part(part) for part in content]
        if not self._images or MARK not in content:
            return content
        pieces = re.split(f"({MARK})", content)
        parts = [
            {"type": "image"} if p == MARK else {"type": "text", "text": p} for p in pieces if p
        ]
        return [self._part(part) for part in parts]

    def _part(self, part: Any) -> dict:
        # Parquet fills the fields that other parts have with nulls; templates test presence.
        own = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        kind = own.get("type", "text" if "text" in own else None)
        if kind == "text" and isinstance(own.get("text"), str):
            return {"type": "text", "text": own["text"]}
        if kind not in ("image", "image_url"):
            raise Refusal(
                f"{self._where}: a part of a message's content is {part!r:.80}; parts are "
                '{"type": "text", "text": ...}, {"type": "image"} and {"type": "image_url", ...}'
            )
        held = next((own[name] for name in _INLINE if name in own), None)
        if isinstance(held, dict) and "url" in held:
            held = held["url"]
        if held is None:
            held = self._images[self.taken] if self.taken < len(self._images) else None
            self.taken += 1
        return {"type": "image", "image": held}


def _filled_message(message: dict, supply: _Supply) -> dict:
    content = message.get("content")
    is_said = isinstance(content, str) and message.get("role") != "assistant"
    if isinstance(content, list) or (isinstance(content, str) and is_said):
        return message | {"content": supply.filled(content)}
    return message


def _has_place(message: dict) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(p, dict) and p.get("type") in ("image", "image_url") for p in content)
    return message.get("role") != "assistant" and MARK in str(content)


def _with_leading_places(messages: Sequence[dict], count: int) -> list[dict]:
    """Return messages with places before what the first user says."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "user"), None)
    if first is None:
        return list(messages)
    content = messages[first].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    opened = messages[first] | {"content": [*[{"type": "image"}] * count, *parts]}
    return [*messages[:first], opened, *messages[first + 1 :]]


def holds_some(row: Mapping[str, Any]) -> bool:
    """Return whether images may stand in a row: in a column of its own, or in messages."""
    talks = [value for value in row.values() if isinstance(value, list)]
    messages = [m for talk in talks for m in talk if isinstance(m, dict)]
    own = [*_listed(row.get("images")), *filter(_looks_like_one, _listed(row.get("image")))]
    return bool(own) or any(isinstance(m.get("content"), list) and _has_place(m) for m in messages)


def split(messages: Sequence[dict]) -> tuple[list[dict], list[Any]]:
    """Return messages as a chat template takes them, and the images that they hold, in order."""
    bare = []
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            found += [part["image"] for part in content if part.get("type") == "image"]
            message = message | {"content": [_bare(part) for part in content]}
        bare.append(message)
    return bare, found


def _bare(part: dict) -> dict:
    return {"type": "image"} if part.get("type") == "image" else part


def as_text(image: Any) -> Any:
    """Return an image that is given by its bytes as a data URI, which JSON can hold; any other as
    it is."""
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        return image
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def portable(messages: Sequence[dict]) -> list[dict]:
    """Return messages whose images JSON can hold, see `as_text`."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [p | {"image": as_text(p["image"])} if "image" in p else p for p in content]
            message = message | {"content": parts}
        found.append(message)
    return found


# --------------------------------------------------------------------------- what they show


@dataclass(frozen=True)
class ImageFiles:
    """Where images of one source of rows are, and what they may be."""

    settings: ImageSettings
    folder: Path | None = None
    """Of the data file, in which its images are; None where images are in the rows themselves."""

    def opened(self, images: Sequence[Any], *, where: str) -> list[Image]:
        """Return the pixels of images, RGB.

        Turned as their EXIF says; transparent pixels are blended with white, palettes and CMYK
        converted.

        Args:
            images: bytes, data URIs, paths in the folder, or mappings with `bytes` or `path`.
            where: origin of the row, for messages.
        Raises: Refusal for more than are allowed, and naming the one that cannot be used.
        """
        most = self.settings.max_per_prompt
        if len(images) > most:
            raise Refusal(
                f"{where}: {len(images)} images, above data.images.max_per_prompt = {most}; raise "
                "it, or leave the row out"
            )
        return [self._opened(one, f"{where}: image {i}") for i, one in enumerate(images, 1)]

    def _opened(self, image: Any, where: str) -> Image:
        from PIL import ImageOps

        data = self._bytes(image, where)
        # Decoders raise errors of many kinds at bytes that somebody made.
        reading = partial(
            refusing,
            f"{where}: cannot be read as an image ({len(data)} bytes that begin {data[:12]!r})",
            Exception,
            names_kind=True,
        )
        with warnings.catch_warnings(), reading():  # of what is looked at here
            warnings.simplefilter("ignore")
            opened = self._begun(data)
            frames = getattr(opened, "n_frames", 1)
        self._check(opened, where, frames=frames)
        with warnings.catch_warnings(), reading():
            warnings.simplefilter("ignore")
            return _rgb(ImageOps.exif_transpose(opened))

    def _begun(self, data: bytes) -> Any:
        """Return an image of which the header is read."""
        from PIL import Image as pillow

        try:
            return pillow.open(io.BytesIO(data), formats=_FORMATS)
        except pillow.DecompressionBombError as error:
            most = f"{error} It is above data.images.max_pixels = {self.settings.max_pixels} anyhow"
            raise ValueError(most) from error

    def _check(self, image: Any, where: str, *, frames: int) -> None:
        """Refuse by its header an image that must not be decoded."""
        width, height = image.size
        most = self.settings.max_pixels
        if min(width, height) < 1:
            raise Refusal(f"{where}: is {width} x {height}, which holds no pixel")
        if width * height > most:
            raise Refusal(
                f"{where}: is {width} x {height}, {width * height} pixels, above "
                f"data.images.max_pixels = {most}; shrink it, or raise that"
            )
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise Refusal(
                f"{where}: is {width} x {height}; one side may be at most {_MOST_RATIO} times the "
                "other, as processors of images have it"
            )
        # The further frames of a phone's MPO are previews of the first.
        if frames > 1 and image.format != "MPO":
            raise Refusal(
                f"{where}: is a {image.format} of several frames; a model is shown one: save "
                "the frame that is meant"
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
            return _decoded(image, where)
        if re.match(r"[A-Za-z][\w+.-]*://", image) and not image.startswith("file://"):
            raise Refusal(
                f"{where}: {image[:80]!r} is not fetched, since a run reads its own files alone; "
                "download it beside the data file, or put its bytes into the row"
            )
        return self._file(image.removeprefix("file://"), where)

    def _file(self, name: str, where: str) -> bytes:
        shown = f"{where}: {name[:200]!r}"
        if self.folder is None:
            raise Refusal(f"{shown} is a path, and there is no data file beside which it could be")
        reading = partial(refusing, f"{shown} cannot be read", OSError, ValueError)
        root = self.folder.resolve()
        with reading():  # a name may hold what no path can
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


def _decoded(uri: str, where: str) -> bytes:
    begin = _DATA_URI.match(uri)
    if not begin:
        raise Refusal(
            f"{where}: {uri[:60]!r} is no data URI of base64, as in data:image/png;base64,iVBOR..."
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
