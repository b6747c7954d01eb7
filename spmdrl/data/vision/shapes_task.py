"""`task:shapes`: small drawn scenes, with questions that only a model that sees them can answer."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spmdrl.data.hashed import hashed, split_of
from spmdrl.errors import Refusal
from spmdrl.imports import nearest

if TYPE_CHECKING:  # reward workers grade with this module and need neither
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

    from spmdrl.config.data import Split

_TRIES = 256
_COLOURS = {
    "red": (220, 30, 30),
    "blue": (30, 60, 220),
    "green": (20, 150, 40),
    "black": (0, 0, 0),
    "orange": (240, 140, 0),
    "purple": (150, 30, 180),
}
_BRIGHT = {
    "white": (255, 255, 255),
    "yellow": (255, 220, 60),
    "blue": (90, 200, 255),
    "green": (120, 240, 120),
    "red": (255, 150, 150),
    "purple": (240, 160, 255),
}
_FORMS = ("squares", "circles", "triangles")
_KINDS = ("digits", "count", "colour", "form", "compare")
_MAX_SIDE = 1024
_FONT = (  # rows of 5 bits, from the top
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


@dataclass(frozen=True)
class Thing:
    """A digit or shape in a cell of the scene."""

    cell: int
    shift: tuple[int, int]
    """Pixels from the middle of its cell."""
    colour: str
    form: str
    """A digit, or one of the shapes."""
    room: int
    """Side of the square that it fills, pixels."""


@dataclass(frozen=True)
class Scene:
    """The things to draw, a question and its answer."""

    things: tuple[Thing, ...]
    question: str
    answer: str
    slip: str
    """A careless answer."""


@dataclass(kw_only=True)
class Shapes:
    """Questions about drawn scenes. A row has the column `images`, with PNG bytes, and a prompt
    that begins with the image's place.

    Options:
        kind: `digits`, read digits from left to right; `count`, count all shapes; `colour` or
            `form`, count the shapes of one colour or form; `compare`, name the more frequent of two
            colours; or several, as `count+compare`.
        side: of the image, pixels.
        most: digits to read; or the largest number of shapes. A scene has at least one shape, but
            it may have none of a colour or form.
        cells: of a row of the grid of shapes; digits have `most`.
        colours, forms: how many there are, up to 6 and 3.
        dark: bright colours on black instead of strong colours on white.
        jitter: the most by which things are moved, in both directions, pixels.
        least: side of the smallest thing, pixels; each thing then has a size of its own and any
            place in its cell. With 0 all fill their cells except for the jitter.
        mistakes: share of training rows whose demonstration (`completion`, for supervised
            training) is careless, while `answer` stays right: a number or digit that is one too
            high (the lowest after the highest), or the other colour.
        noise: show noise instead of every scene, as a control without information.
    """

    kind: str = "count"
    side: int = 56
    most: int = 3
    cells: int = 4
    colours: int = 3
    forms: int = 1
    dark: bool = False
    jitter: int = 0
    least: int = 0
    mistakes: float = 0.0
    noise: bool = False

    def __post_init__(self) -> None:
        self.kinds = self.kind.split("+")
        self.paints, self.ground = (_BRIGHT, "black") if self.dark else (_COLOURS, "white")
        self.hues = list(self.paints)[: self.colours]
        self.outlines = _FORMS[: self.forms]
        what = "data.task_options"
        for one in self.kinds:
            if one not in _KINDS:
                raise Refusal(f"{what}.kind: unknown {one!r}{nearest(one, list(_KINDS))}")
        ranges = dict(
            side=(8, _MAX_SIDE), most=(1, 64), cells=(1, 64), colours=(1, 6), forms=(1, 3)
        )
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise Refusal(f"{what}.{name}: must be from {low} to {high}, got {value}")
        if not 0.0 <= self.mistakes <= 1.0:
            raise Refusal(f"{what}.mistakes: must be a share from 0 to 1, got {self.mistakes}")
        self._check_room(what)

    def _check_room(self, what: str) -> None:
        if self.kinds != ["digits"] and self.most > self.cells**2:
            raise Refusal(
                f"{what}.most: {self.most} shapes do not fit into {self.cells} x {self.cells} cells"
            )
        if "compare" in self.kinds and (self.colours < 2 or self.most < 1):
            raise Refusal(f"{what}.colours: kind compare needs two, got {self.colours}")
        if self.least and self.jitter:
            raise Refusal(
                f"{what}.jitter: with least, things may be anywhere in their cells; leave it out"
            )
        for kind in self.kinds:
            cell = self._cell_of(kind)
            least = 8 if kind == "digits" else 4
            if cell < least:
                raise Refusal(
                    f"{what}.side: {self.side} pixels have cells of {cell} (kind {kind}), and "
                    f"{least} is the least; take a larger side"
                )
            if self.least and not least - 2 <= self.least <= cell - 2:
                raise Refusal(
                    f"{what}.least: must be 0, or from {least - 2} to {cell - 2} pixels in cells "
                    f"of {cell} (kind {kind}), got {self.least}"
                )
            if not 0 <= self.jitter <= (cell - least) // 2:
                raise Refusal(
                    f"{what}.jitter: must be from 0 to {(cell - least) // 2} pixels in cells of "
                    f"{cell} (kind {kind}), got {self.jitter}; a larger side has larger cells"
                )

    def _cells_of(self, kind: str) -> int:
        return self.most if kind == "digits" else self.cells

    def _cell_of(self, kind: str) -> int:
        """Return the side of a cell, pixels."""
        return self.side // self._cells_of(kind)

    def row(self, seed: int, index: int, *, split: Split) -> dict:
        """Return problem `index`; see the class.

        Raises: Refusal when the options leave no scene for a split.
        """
        draw = random.Random(f"shapes/{seed}/{split}/{index}")
        for _ in range(_TRIES):
            kind = draw.choice(self.kinds)
            scene = self._digits(draw) if kind == "digits" else self._scene(kind, draw)
            if split_of(f"{kind} {scene.question} {sorted(map(repr, scene.things))}") == split:
                break
        else:
            raise Refusal(
                f"task:shapes: no {split} scene among {_TRIES}; give it more colours, cells or "
                "jitter, so that some can be held out"
            )
        row = {
            "prompt": f"<image>{scene.question}? ",
            "images": [{"bytes": self._png(kind, scene, draw)}],
            "answer": scene.answer,
            "data_source": "task:shapes",
        }
        if self.mistakes and split == "train" and draw.random() < self.mistakes:
            row["completion"] = scene.slip
        return row

    def score_answer(self, answer: str, entry: dict) -> float:
        """Return 1.0 for the exact answer, else 0.0."""
        return float(answer.strip() == entry["answer"])

    # ---------------------------------------------------------------- scenes

    def _digits(self, draw: random.Random) -> Scene:
        answer = "".join(draw.choice("0123456789") for _ in range(self.most))
        things = tuple(
            self._thing("digits", cell=i, form=digit, draw=draw) for i, digit in enumerate(answer)
        )
        at = draw.randrange(self.most)
        wrong = (int(answer[at]) + 1) % 10
        slip = f"{answer[:at]}{wrong}{answer[at + 1 :]}"
        return Scene(things, "digits" if self.most > 1 else "digit", answer, slip)

    def _scene(self, kind: str, draw: random.Random) -> Scene:
        count = draw.randint(1, self.most)
        cells = draw.sample(range(self.cells**2), count)
        things = tuple(
            self._thing(kind, cell=cell, form=draw.choice(self.outlines), draw=draw)
            for cell in cells
        )
        if kind == "compare":
            return self._compared(things, draw)
        asked = "count"
        if kind == "colour":
            asked = draw.choice(self.hues)
        elif kind == "form":
            asked = draw.choice(self.outlines)
        found = sum(asked in ("count", one.colour, one.form) for one in things)
        slip = found % self.most + 1 if self.most > 1 else 1 - found
        return Scene(things, asked, str(found), str(slip))

    def _compared(self, things: tuple[Thing, ...], draw: random.Random) -> Scene:
        """Ask which of two colours there are more of; if they are equal, repaint one thing."""
        first, second = draw.sample(self.hues, 2)
        last = things[-1]
        if _balance(things, first, second) == 0:
            colour = second if last.colour == first else first
            things = (*things[:-1], replace(last, colour=colour))
        order = (first, second) if _balance(things, first, second) > 0 else (second, first)
        return Scene(things, f"{first} or {second}", order[0], order[1])

    def _thing(self, kind: str, *, cell: int, form: str, draw: random.Random) -> Thing:
        whole = self._cell_of(kind)
        low = -self.jitter
        high = self.jitter
        room = whole - 2 * self.jitter - 2
        if self.least:
            room = draw.randint(self.least, room)
            low = room // 2 - whole // 2
            high = low + whole - 1 - room  # leaves a pixel between neighbours
        shift = (draw.randint(low, high), draw.randint(low, high))
        return Thing(cell, shift, draw.choice(self.hues), form, room)

    # ---------------------------------------------------------------- pixels

    def _png(self, kind: str, scene: Scene, draw: random.Random) -> bytes:
        image = self._noise(scene, draw) if self.noise else self._drawn(kind, scene)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    def _noise(self, scene: Scene, draw: random.Random) -> Image:
        from PIL import Image as pillow

        seed = hashed(repr((scene, draw.random())))
        pixels = random.Random(seed).randbytes(3 * self.side**2)
        return pillow.frombytes("RGB", (self.side, self.side), pixels)

    def _drawn(self, kind: str, scene: Scene) -> Image:
        from PIL import Image as pillow
        from PIL import ImageDraw as drawing

        image = pillow.new("RGB", (self.side, self.side), self.ground)
        pen = drawing.Draw(image)
        cells = self._cells_of(kind)
        cell = self._cell_of(kind)
        for one in scene.things:
            row, column = divmod(one.cell, cells)
            x = column * cell + cell // 2
            y = row * cell + cell // 2
            if kind == "digits":  # a single row, in the middle
                y = self.side // 2
            at = (x + one.shift[0], y + one.shift[1])
            _draw(pen, one, at=at, colour=self.paints[one.colour])
        return image


def _balance(things: tuple[Thing, ...], first: str, second: str) -> int:
    """Return how many more there are of one colour than of another."""
    return sum((one.colour == first) - (one.colour == second) for one in things)


def _draw(pen: ImageDraw, one: Thing, *, at: tuple[int, int], colour: tuple[int, int, int]) -> None:
    """Draw a thing around a point."""
    x, y = at
    left = x - one.room // 2
    top = y - one.room // 2
    right = left + one.room - 1
    bottom = top + one.room - 1
    box = (left, top, right, bottom)
    if one.form == "squares":
        pen.rectangle(box, fill=colour)
    elif one.form == "circles":
        pen.ellipse(box, fill=colour)
    elif one.form == "triangles":
        pen.polygon([(x, top), (left, bottom), (right, bottom)], fill=colour)
    else:
        _draw_digit(pen, int(one.form), at=at, block=max(1, one.room // 7), colour=colour)


def _draw_digit(
    pen: ImageDraw, digit: int, *, at: tuple[int, int], block: int, colour: tuple[int, int, int]
) -> None:
    left = at[0] - 5 * block // 2
    top = at[1] - 7 * block // 2
    for row, bits in enumerate(_FONT[digit]):
        for column in range(5):
            if bits >> (4 - column) & 1:
                x = left + column * block
                y = top + row * block
                pen.rectangle((x, y, x + block - 1, y + block - 1), fill=colour)
