"""Pictures in a table of recorded rollouts: each once in its group, with the first row that has it.

A row holds the keys of its pictures, and for each token a row of their embeddings. It also holds
the pictures that no earlier row of its group has: their features, bit for bit, and images for
people as PNG.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pyarrow as pa
import torch

from spmdrl.data.vision.images import FEATURES
from spmdrl.model_inputs import MultimodalItem, MultimodalItems
from spmdrl.run_files import json_object

_SHOWN = pa.field("picture_keys", pa.list_(pa.string()))
_PLACES = pa.field("picture_places", pa.list_(pa.int32()))
_FORMS = pa.field("picture_forms", pa.list_(pa.string()))
"""JSON of each new picture: key, num_tokens, features {name: (dtype, shape)}."""
_FEATURES = pa.field(FEATURES, pa.list_(pa.large_binary()))
"""Of each new picture, one feature after the other."""
_IMAGES = pa.field("picture_images", pa.list_(pa.binary()))
"""Of each new picture; empty where the image is not known."""
FIELDS = (_SHOWN, _PLACES, _FORMS, _FEATURES, _IMAGES)
"""Columns for pictures."""
_PNG = b"\x89PNG\r\n\x1a\n"


def with_pictures(table: pa.Table, pictures: MultimodalItems | None) -> pa.Table:
    """Return a table of sequences with the pictures of their tokens, if there are any.

    Args:
        pictures: of all tokens of the table's rows, in its order.
    """
    if pictures is None or not pictures.items:
        return table
    columns: list[list[Any]] = [[] for _ in FIELDS]
    seen: set[tuple[int, MultimodalItem]] = set()
    ends = torch.tensor(table["length"].to_pylist()).cumsum(0).tolist()
    for group, begin, end in zip(table["group"].to_pylist(), [0, *ends], ends):
        own = pictures[torch.arange(begin, end)]
        new = [item for item in own.items if (group, item) not in seen]
        seen |= {(group, item) for item in new}
        packed = [_packed(item) for item in new]
        values = (
            [item.key for item in own.items],
            own.places.int().numpy(),
            [form for form, _, _ in packed],
            [features for _, features, _ in packed],
            [image for _, _, image in packed],
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    for field, column in zip(FIELDS, columns, strict=True):
        table = table.append_column(field, pa.array(column, type=field.type))
    return table


def _packed(picture: MultimodalItem) -> tuple[str, bytes, bytes]:
    """Return a picture's form, its features' bytes, and its image as PNG."""
    features = {}
    for name, tensor in picture.features.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        features[name] = (dtype, list(tensor.shape))
    form = {"key": picture.key, "num_tokens": picture.num_tokens, "features": features}
    return json.dumps(form), picture.as_bytes().numpy().tobytes(), _png(picture)


def _png(picture: MultimodalItem) -> bytes:
    from PIL import Image

    if picture.view is None:
        return b""
    written = io.BytesIO()
    Image.fromarray(picture.view.numpy()).save(written, "PNG")
    return written.getvalue()


def recorded_pictures(table: pa.Table) -> MultimodalItems | None:
    """Return the pictures of the tokens of a table's sequences; None if there are none.

    Args:
        table: whole groups; their greedy rows may be left out.
    Raises: ValueError for values that no run records.
    """
    if _SHOWN.name not in table.column_names or not table.num_rows:
        return None
    known: dict[str, MultimodalItem] = {}
    parts: list[MultimodalItems | None] = []
    lengths = table["length"].to_pylist()
    for row, length in zip(table.select([f.name for f in FIELDS]).to_pylist(), lengths):
        shown, places, forms, features, _images = row.values()
        if shown is None:  # a sequence of a replica without pictures
            parts.append(None)
            continue
        for form, data in zip(forms, features, strict=True):
            found = _unpacked(_checked(form), data)
            known.setdefault(found.key, found)
        items = tuple(known[key] for key in shown)
        own = MultimodalItems(torch.tensor(places, dtype=torch.int64), items)
        low, high = own.places.aminmax()
        if len(own) != length or low < -1 or high >= own.starts[-1]:
            raise ValueError(f"places of {len(own)} tokens in {len(items)} pictures, of {length}")
        parts.append(own)
    return MultimodalItems.concat(parts, lengths)


def _checked(text: str) -> dict[str, Any]:
    """Return a picture's form. Raises: ValueError for a form that no run records."""
    form = json_object(text, place="a picture's form")
    count = form.get("num_tokens")
    features = form.get("features")
    is_counted = type(count) is int and 0 <= count < 2**31
    if not is_counted or not isinstance(form.get("key"), str) or not isinstance(features, dict):
        raise ValueError(f"a picture's form is {text!r:.100}")
    for feature in features.values():
        dtype, shape = feature
        is_dtype = isinstance(getattr(torch, dtype, None), torch.dtype)
        if not is_dtype or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
            raise ValueError(f"a picture's feature is {feature!r:.100}")
    return form


def _unpacked(form: Mapping[str, Any], data: bytes) -> MultimodalItem:
    features = {}
    for name, (dtype, shape) in form["features"].items():
        features[name] = (getattr(torch, dtype), shape)
    found = MultimodalItem.formed(form["key"], form["num_tokens"], features)
    # A copy, since a tensor must be writable.
    content = numpy.frombuffer(data, numpy.uint8).copy()
    return found.of_bytes(torch.from_numpy(content))


class Preview(bytes):
    """A picture for people: PNG; empty if its image is not known."""

    @property
    def label(self) -> str:
        """Return the text that marks its place."""
        if len(self) < 24:
            return "image"
        width, height = struct.unpack(">II", self[16:24])
        return f"image {width} x {height}"

    @property
    def html(self) -> str:
        """Return it as HTML."""
        if not self:
            return f"[{self.label}]"
        name = self.label
        data = base64.b64encode(self).decode()
        return f'<img alt="{name}" title="{name}" src="data:image/png;base64,{data}">'


def picture_previews(rows: Sequence[Mapping[str, Any]]) -> list[dict[int, Preview | None]]:
    """Return what people see at the tokens of each row of a group.

    Returns: {position: the picture that begins there; None for its other tokens}; empty for rows
        without pictures.
    """
    known: dict[str, tuple[int, Preview]] = {}
    for row in rows:
        for form, png in zip(row.get(_FORMS.name) or (), row.get(_IMAGES.name) or ()):
            checked = _checked(form)
            if png and not png.startswith(_PNG):
                raise ValueError(f"an image of {len(png)} bytes is no PNG")
            known[checked["key"]] = checked["num_tokens"], Preview(png)
    found: list[dict[int, Preview | None]] = []
    for row in rows:
        previews = {}  # {the first place of a picture: its image}
        start = 0
        for key in row.get(_SHOWN.name) or ():
            num_tokens, preview = known[key]
            previews[start] = preview
            start += num_tokens
        shown = {}
        for position, place in enumerate(row.get(_PLACES.name) or ()):
            if place >= 0:
                shown[position] = previews.get(place)
        found.append(shown)
    return found
