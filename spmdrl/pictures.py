"""What tokens show: images as a model's processor prepared them, from data to engine and trainer.

Letters: T tokens, P pictures, E rows of embeddings: what the model's tower makes of the pictures,
one row for each token that stands for a part of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEEING = ("gemma3", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types that see: proved against plain transformers, their images prepared one by one as
together."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One image, as the model's processor prepared it. Two of one key are the same."""

    key: str
    """Digest of the image and of how it was prepared."""
    num_tokens: int
    """Tokens that stand for it, which is also the rows of its embedding."""
    features: Mapping[str, Tensor]
    """{argument of the tower: tensor [rows of its own, ...]}; those of several pictures follow one
    another. On the CPU."""
    image: Tensor | None = None
    """[height, width, 3] uint8, RGB, on the CPU: the image for people, small; None where it is not
    known. It does not go to trainers."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of its features."""
        return sum(tensor.nbytes for tensor in self.features.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all that it holds, the image for people too."""
        return self.nbytes + (0 if self.image is None else self.image.nbytes)


@dataclass(frozen=True)
class Pictures:
    """The pictures of T tokens, each once, and which row of their embeddings each token shows."""

    places: Tensor
    """[T] int64, row among the embeddings of `items`, one after the other; -1 for a token that
    shows nothing."""
    items: tuple[Picture, ...]
    """[P], without repetition, in the order in which tokens first show them."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def starts(self) -> Tensor:
        """Return where the rows of each picture begin, and the end: [P + 1] int64."""
        counts = torch.tensor([0, *(item.num_tokens for item in self.items)])
        return counts.cumsum(0)

    @property
    def repeated(self) -> list[Picture]:
        """Return the pictures in the order of the tokens that show them, as often as they do."""
        begins = dict(zip(self.starts.tolist(), self.items))
        return [begins[place] for place in self.places.tolist() if place in begins]

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(item.nbytes for item in self.items)

    @classmethod
    def none(cls, count: int) -> Pictures:
        """Return those of `count` tokens that show nothing."""
        return cls(torch.full((count,), -1), ())

    @classmethod
    def shown(cls, is_shown: Tensor, pictures: Sequence[Picture]) -> Pictures:
        """Return pictures whose tokens follow one another.

        Args:
            is_shown: [T] bool, tokens that stand for a part of a picture.
            pictures: in the order of their tokens; one may come twice.
        Raises: ValueError when the tokens are not as many as the pictures have.
        """
        expected, found = sum(p.num_tokens for p in pictures), int(is_shown.sum())
        if expected != found:
            raise ValueError(f"{found} tokens stand for pictures that have {expected}")
        items = tuple(dict.fromkeys(pictures))
        starts, at, rows = (
            cls(torch.empty(0), items).starts,
            {},
            [torch.empty(0, dtype=torch.int64)],
        )
        for item, start in zip(items, starts.tolist()):
            at[item] = torch.arange(start, start + item.num_tokens)
        rows += [at[picture] for picture in pictures]
        places = torch.full(is_shown.shape, -1)
        places[is_shown] = torch.cat(rows)
        return cls(places, items)

    @staticmethod
    def restored(plain: Mapping[str, Any] | None) -> Pictures | None:
        """Undo `plain`; None for none."""
        if plain is None:
            return None
        return Pictures(plain["places"], tuple(Picture(**item) for item in plain["items"]))

    def plain(self) -> dict[str, Any]:
        """Return all fields, as dictionaries; tensors are shared."""
        items = [vars(item) | {"features": dict(item.features)} for item in self.items]
        return {"places": self.places, "items": items}

    @staticmethod
    def concat(parts: Sequence[Pictures | None], lengths: Sequence[int]) -> Pictures | None:
        """Join those of consecutive tokens, `lengths` of them each; None shows nothing.

        Returns: None where all parts are None.
        """
        if not any(part is not None for part in parts):
            return None
        items = tuple(dict.fromkeys(item for part in parts if part for item in part.items))
        starts = dict(zip(items, Pictures(torch.empty(0), items).starts.tolist()))
        places = []
        for part, length in zip(parts, lengths):
            part = part or Pictures.none(length)
            assert len(part) == length, f"pictures of {len(part)} tokens, where {length} are"
            places.append(part.placed(starts))
        return Pictures(torch.cat(places), items)

    def __getitem__(self, order: Tensor) -> Pictures:
        """Return those of the tokens at `order` [n] int64, without the pictures that none shows."""
        places = self.places[order]
        used = torch.bucketize(places[places >= 0].cpu(), self.starts[1:], right=True).unique()
        items = tuple(self.items[i] for i in used.tolist())
        own = Pictures(places, self.items)
        return Pictures(
            own.placed(dict(zip(items, Pictures(places, items).starts.tolist()))), items
        )

    def placed(self, starts: Mapping[Picture, int]) -> Tensor:
        """Return the places where each picture's rows begin elsewhere; those left out keep none."""
        if not self.items:
            return self.places
        device = self.places.device
        shifts = [starts.get(item, 0) - own for item, own in zip(self.items, self.starts.tolist())]
        counts = torch.tensor([item.num_tokens for item in self.items])
        shift = torch.tensor(shifts).repeat_interleave(counts).to(device)
        is_shown = self.places >= 0
        return torch.where(is_shown, self.places + shift[self.places.clamp(min=0)], self.places)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Pictures:
        """Return the same with the places on a device; features, which are large, stay on the host
        until a tower reads them."""
        return Pictures(self.places.to(device, non_blocking=non_blocking), self.items)

    def cpu(self) -> Pictures:
        """Return the same with the places on the CPU."""
        return self.to("cpu")


_REMEMBERED = 256


class ToldPictures:
    """Pictures that are told one after another, each once: `said` at one end, `meant` at the other.

    Both ends remember the same ones, the latest, since they hear of the same ones in one order.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, Picture] = OrderedDict()

    def said(self, pictures: Pictures | None) -> dict[str, Any] | None:
        """Return pictures as plain data, without those that were said before."""
        if pictures is None:
            return None
        new = [item for item in pictures.items if item.key not in self._known]
        self._remember(pictures)
        return Pictures(pictures.places, tuple(new)).plain() | {
            "keys": [item.key for item in pictures.items]
        }

    def meant(self, said: Mapping[str, Any] | None) -> Pictures | None:
        """Return the pictures that were said."""
        if said is None:
            return None
        new = {item["key"]: Picture(**item) for item in said["items"]}
        items = tuple(new.get(key) or self._known[key] for key in said["keys"])
        pictures = Pictures(said["places"], items)
        self._remember(pictures)
        return pictures

    def _remember(self, pictures: Pictures) -> None:
        for item in pictures.items:
            self._known[item.key] = item
            self._known.move_to_end(item.key)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
