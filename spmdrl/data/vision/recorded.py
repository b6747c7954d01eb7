"""Previews of the images in recorded rollouts."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from spmdrl.model_inputs import PICTURE_FORMS, PICTURE_IMAGES, item_form

_PNG = b"\x89PNG\r\n\x1a\n"


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
    """Return previews of the images in each row of a group.

    Returns: {position: the picture that begins there; None for its other tokens}; empty for rows
        without pictures.
    """
    known: dict[str, tuple[int, Preview]] = {}
    for row in rows:
        for form, png in zip(row.get(PICTURE_FORMS) or (), row.get(PICTURE_IMAGES) or ()):
            checked = item_form(form)
            if png and not png.startswith(_PNG):
                raise ValueError(f"an image of {len(png)} bytes is no PNG")
            known[checked["key"]] = checked["num_tokens"], Preview(png)
    found: list[dict[int, Preview | None]] = []
    for row in rows:
        previews = {}  # {the first place of a picture: its image}
        start = 0
        for key in row.get("picture_keys") or ():
            num_tokens, preview = known[key]
            previews[start] = preview
            start += num_tokens
        shown = {}
        for position, place in enumerate(row.get("picture_places") or ()):
            if place >= 0:
                shown[position] = previews.get(place)
        found.append(shown)
    return found
