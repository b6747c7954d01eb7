"""Text with images as token ids and multimodal items, by the model's own processor."""

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

_CACHE_BYTES = 2**30
"""Of prepared images, so that a small data set is prepared once and not in each epoch."""

_HINT = (
    "; a model that reads images needs its preprocessor_config.json, with image_processor_type "
    "and processor_class: copy it from the original model"
)


class ImageReader:
    """Prepares images, and the text around them, as a model's own processor does.

    Args:
        folder: of the model, with its preprocessor_config.json.
        tokenizer: of the model.
        image_token_id: id of the tokens that stand for parts of an image.
    Raises: Refusal when there is no processor, or none that can be used.
    """

    def __init__(
        self, folder: str, *, tokenizer: PreTrainedTokenizerBase, image_token_id: int
    ) -> None:
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        with refusing(
            f"model.path: no image processor can be loaded from {folder}",
            Exception,  # the files may hold anything
            hint=_HINT,
            names_kind=True,
        ):
            self._processor = _load_processor(folder, tokenizer)
        self._processor_settings = json.dumps(
            self._processor.image_processor.to_dict(), sort_keys=True, default=str
        )
        self._cache: OrderedDict[str, tuple[MultimodalItem, str]] = OrderedDict()
        self._cached_bytes = 0

    @property
    def placeholder(self) -> str:
        """Return the text that stands for an image, before it is expanded."""
        return self._processor.image_token

    def marked_placeholder(self) -> str:
        """Return the placeholder with the marks around it that the chat template writes; without a
        chat template, the placeholder alone."""
        if not self._tokenizer.chat_template:
            return self.placeholder
        # Whatever the template writes between these two words belongs to the image.
        begin = "spmdrl-begin"
        end = "spmdrl-end"
        parts = [{"type": "text", "text": begin}, {"type": "image"}, {"type": "text", "text": end}]
        messages = [{"role": "user", "content": parts}]
        what = "the chat template refuses a message with an image"
        with refusing(what, Exception, names_kind=True):
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        found = text.partition(begin)[2].partition(end)[0].strip()
        return found if self.placeholder in found else self.placeholder

    def encode(self, text: str, images: Sequence[Image]) -> TokenIds:
        """Return the ids of a text with its placeholders expanded, and their items.

        Args:
            text: as the chat template wrote it, a placeholder for each image.
            images: RGB, in the order of their placeholders.
        Raises: ValueError if images and placeholders differ in number, or two images have nothing
            between them.
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
        """Return an image as the vision tower takes it, and the text that stands for it."""
        # Pixels alone do not say how wide an image is.
        digest = hashlib.sha256(f"{self._processor_settings} {image.mode} {image.size}".encode())
        digest.update(image.tobytes())
        key = digest.hexdigest()[:32]
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        features = self._processor.image_processor([image], return_tensors="pt")
        replacement = self._processor.replace_image_token(features, 0)
        ids = self._tokenizer(replacement, add_special_tokens=False)["input_ids"]
        named = {k: v for k, v in features.items() if k not in _COUNTS}
        count = ids.count(self._image_token_id)
        found = MultimodalItem(key, count, named, _small(image)), replacement
        self._cache[key] = found
        self._cached_bytes += found[0].held_bytes
        while self._cached_bytes > _CACHE_BYTES:
            self._cached_bytes -= self._cache.popitem(last=False)[1][0].held_bytes
        return found


def _check_apart(is_placeholder: Tensor, pictures: Sequence[MultimodalItem]) -> None:
    """Raise ValueError for images side by side: model families separate images by the tokens
    between them."""
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
"""Longest side of an image for people, pixels."""


def _small(image: Image) -> Tensor:
    """Return an image for people: [height, width, 3] uint8."""
    small = image.copy()
    small.thumbnail((_SMALL, _SMALL))
    return torch.from_numpy(numpy.array(small))


_COUNTS = ("num_crops", "num_patches")
"""Features that image processors return only for the text."""


def _load_processor(folder: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a transformers processor of images and text, without videos.

    Its images go through PIL, which gives the same numbers with and without torchvision.
    """
    import transformers
    from transformers import AutoImageProcessor

    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    options: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = Path(folder) / name
        options |= json.loads(file.read_text()) if file.is_file() else {}
    kind = getattr(transformers, options["processor_class"])
    # Its check of arguments imports the class for videos, which needs torchvision.
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    kind = type(kind.__name__, (kind,), unchecked)
    length = {k: options[k] for k in ("image_seq_length",) if k in options}
    return kind(image_processor=images, tokenizer=tokenizer, **length)


def image_reader(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, *, families: Collection[str]
) -> ImageReader | None:
    """Return the image reader of a model with a vision tower that this run uses; else None.

    Also None for a family that is not in `families`: such models are not loaded.

    Args:
        families: model types whose images it prepares.
    Raises: Refusal as ImageReader.
    """
    folder = Path(cfg.model.path)
    if cfg.model.part == "text" or (folder.is_dir() and not (folder / "config.json").is_file()):
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            cfg.model.path, trust_remote_code=cfg.model.trust_remote_code
        )
    except Exception:  # a config that cannot be read is refused where the model is loaded
        return None
    if getattr(config, "vision_config", None) is None or config.model_type not in families:
        return None
    token_id = config.image_token_id
    return ImageReader(cfg.model.path, tokenizer=tokenizer, image_token_id=token_id)
