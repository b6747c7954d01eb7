"""Text with images to token ids and what these show, by the processor that belongs to a model."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from spmdrl.imports import refusing
from spmdrl.model_inputs import MultimodalItem, MultimodalItems, TokenIds

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from spmdrl.config import Config

_KEPT_BYTES = 2**30
"""Of prepared images, so that an epoch does not prepare a small set anew."""

_HINT = (
    "; a model that sees needs its preprocessor_config.json, with image_processor_type and "
    "processor_class: copy it from the model that it was made of"
)


class ImageReader:
    """Prepares images as a model's own processor does, and text around them.

    Args:
        folder: of the model, with its preprocessor_config.json.
        tokenizer: of the model.
        image_token_id: id that stands for a part of a picture, of the model's config.
    Raises: Refusal when there is no processor, or none that can be used.
    """

    def __init__(
        self, folder: str, *, tokenizer: PreTrainedTokenizerBase, image_token_id: int
    ) -> None:
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        with refusing(
            f"model.path: no image processor can be loaded from {folder}",
            Exception,  # of files that may hold anything
            hint=_HINT,
            names_kind=True,
        ):
            self._processor = _load_processor(folder, tokenizer)
        self._how = json.dumps(
            self._processor.image_processor.to_dict(), sort_keys=True, default=str
        )
        self._known: OrderedDict[str, tuple[MultimodalItem, str]] = OrderedDict()
        self._known_bytes = 0

    @property
    def placeholder(self) -> str:
        """Return what stands for an image in text, before it is expanded."""
        return self._processor.image_token

    def written(self) -> str:
        """Return what stands for an image in text, marks around it included, as the chat template
        writes it; without one, the processor's own placeholder."""
        if not self._tokenizer.chat_template:
            return self.placeholder
        begin = "spmdrl-begin"
        end = "spmdrl-end"
        parts = [{"type": "text", "text": begin}, {"type": "image"}, {"type": "text", "text": end}]
        said = [{"role": "user", "content": parts}]
        what = "the chat template refuses a message with an image"
        with refusing(what, Exception, names_kind=True):
            text = self._tokenizer.apply_chat_template(said, tokenize=False)
        found = text.partition(begin)[2].partition(end)[0].strip()
        return found if self.placeholder in found else self.placeholder

    def encode(self, text: str, images: Sequence[Image]) -> TokenIds:
        """Return the ids of a text, its placeholders expanded, and what they show.

        Args:
            text: as the chat template wrote it, a placeholder for each image.
            images: RGB, in the order of their placeholders.
        Raises: ValueError when there are more or fewer images than placeholders, or nothing stands
            between two.
        """
        found = text.count(self.placeholder)
        if found != len(images):
            raise ValueError(
                f"{len(images)} images, and {found} placeholders {self.placeholder!r} for them"
            )
        prepared = [self._prepare(image) for image in images]
        (whole,), _ = self._processor.get_text_with_replacements(
            [text], images_replacements=[replacement for _, replacement in prepared]
        )
        ids = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        is_placeholder = torch.tensor(ids, dtype=torch.int64) == self._image_token_id
        pictures = [picture for picture, _ in prepared]
        given = TokenIds(ids, MultimodalItems.at_placeholders(is_placeholder, pictures))
        _check_apart(is_placeholder, pictures)
        return given

    def _prepare(self, image: Image) -> tuple[MultimodalItem, str]:
        """Return an image as the tower takes it, and the text that stands for it."""
        digest = hashlib.sha256(f"{self._how} {image.mode} {image.size}".encode())
        digest.update(image.tobytes())
        key = digest.hexdigest()[:32]
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        features = self._processor.image_processor([image], return_tensors="pt")
        replacement = self._processor.replace_image_token(features, 0)
        ids = self._tokenizer(replacement, add_special_tokens=False)["input_ids"]
        named = {k: v for k, v in features.items() if k not in _COUNTS}
        count = ids.count(self._image_token_id)
        found = MultimodalItem(key, count, named, _small(image)), replacement
        self._known[key] = found
        self._known_bytes += found[0].held_bytes
        while self._known_bytes > _KEPT_BYTES:
            self._known_bytes -= self._known.popitem(last=False)[1][0].held_bytes
        return found


def _check_apart(is_placeholder: Tensor, pictures: Sequence[MultimodalItem]) -> None:
    """Refuse pictures side by side, which towers' families tell apart by what is between them."""
    at = is_placeholder.nonzero()[:, 0]
    ends = torch.tensor([p.num_tokens for p in pictures[:-1]], dtype=torch.int64).cumsum(0)
    close = (at[ends] == at[ends - 1] + 1).nonzero()[:, 0].tolist()
    if close:
        raise ValueError(
            f"images {close[0] + 1} and {close[0] + 2} stand side by side with no token between "
            "them, as one image would; put a text between them, or messages through the model's "
            "chat template, which marks where each begins and ends"
        )


_SMALL = 512
"""Longest side of what people are shown, pixels."""


def _small(image: Image) -> Tensor:
    """Return an image for people: [height, width, 3] uint8."""
    small = image.copy()
    small.thumbnail((_SMALL, _SMALL))
    return torch.from_numpy(numpy.array(small))


_COUNTS = ("num_crops", "num_patches")
"""What image processors return for their own text alone."""


def _load_processor(folder: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a transformers processor of images and text, without a part for videos.

    Its images go through PIL: the same numbers with and without torchvision.
    """
    import transformers
    from transformers import AutoImageProcessor

    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    options: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = Path(folder) / name
        options |= json.loads(file.read_text()) if file.is_file() else {}
    kind = getattr(transformers, options["processor_class"])
    # Its check of arguments imports the class for videos, which takes torchvision.
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    kind = type(kind.__name__, (kind,), unchecked)
    length = {k: options[k] for k in ("image_seq_length",) if k in options}
    return kind(image_processor=images, tokenizer=tokenizer, **length)


def give_image_reader(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, *, families: Collection[str]
) -> None:
    """Give a tokenizer what reads images, where the model has a tower that this run keeps.

    Of families whose processors are not known it gets none: such models are not loaded.

    Args:
        families: model types whose images it prepares.
    Raises: Refusal as ImageReader.
    """
    folder = Path(cfg.model.path)
    if cfg.model.part == "text" or (folder.is_dir() and not (folder / "config.json").is_file()):
        return
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            cfg.model.path, trust_remote_code=cfg.model.trust_remote_code
        )
    except Exception:  # a config that cannot be read is refused by name where the model is loaded
        return
    if getattr(config, "vision_config", None) is None or config.model_type not in families:
        return
    tokenizer.image_reader = ImageReader(  # type: ignore[attr-defined]
        cfg.model.path, tokenizer=tokenizer, image_token_id=config.image_token_id
    )
