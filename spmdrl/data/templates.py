"""Prompts as a model reads them: chat templates, token ids, and the images that they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import ImageSettings
from spmdrl.data.images import ImageFiles, inlined, marked, split
from spmdrl.data.processor import encode, image_reader_of, placeholder_text
from spmdrl.data.rows import Messages
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.pictures import Pictures


def encode_prompt(
    prompt: str | Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    tools: list | None,
    where: str,
    prefix: str = "",
    images: Sequence[Any] = (),
    files: ImageFiles | None = None,
) -> tuple[list[int], str, Pictures | None]:
    """Turn a prompt into token ids, the text they stand for, and what they show.

    Args:
        prompt: plain text, or a conversation.
        template: `auto`, `always` or `never`; see data.chat_template.
        tools: tool descriptions for the template.
        where: origin of the row, for error messages.
        prefix: text that the response begins with, where the prompt does not begin it itself.
        images: of the row's column, see `images.column_images`.
        files: where images are; by default in the row itself.
    Returns: ids; text, a placeholder for each image; pictures, None of a model that does not see.
    Raises: Refusal when a conversation cannot be rendered, or an image cannot be used.
    """
    seen = Seen(tokenizer, files=files or ImageFiles(ImageSettings()), where=where)
    if isinstance(prompt, str) and template != "always":
        ids, text, pictures = seen.plain(prompt, images, end=prefix)
        return ids, text, pictures
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    bare, held = split(inlined(prompt, images, where=where))
    seen.check(held)
    text = render(bare, tokenizer, template=template, tools=tools, where=where, prefix=prefix)
    ids, pictures = seen.encoded(text, held)
    return ids, text, pictures


@dataclass(frozen=True)
class Seen:
    """Turns text, and images in its places, into ids and pictures."""

    tokenizer: PreTrainedTokenizerBase
    files: ImageFiles
    where: str
    """Origin of the row, for messages."""

    def encoded(self, text: str, images: Sequence[Any]) -> tuple[list[int], Pictures | None]:
        """Return ids of rendered text, no special tokens added, and what they show.

        Raises: Refusal for images that cannot be used, and of a model that does not see.
        """
        self.check(images)
        pixels = self.files.opened(images, where=self.where)
        return encode(text, self.tokenizer, images=pixels, where=self.where)

    def check(self, images: Sequence[Any]) -> None:
        """Raise Refusal for images of a model that does not see."""
        if images and image_reader_of(self.tokenizer) is None:
            raise Refusal(
                f"{self.where}: it holds {len(images)} images, and the model does not see; take "
                "one that does (with model.part: all), or leave the images out of the data"
            )

    def plain(
        self, text: str, images: Sequence[Any], *, end: str = ""
    ) -> tuple[list[int], str, Pictures | None]:
        """Return ids of plain text with the tokenizer's opening special tokens (bos), the text with
        placeholders, and what they show.

        Args:
            end: further text.
        Raises: Refusal as `encoded`, and for images and places that differ in number.
        """
        self.check(images)
        if image_reader_of(self.tokenizer) is None:
            return encode_plain(text + end, self.tokenizer), text + end, None
        mark = placeholder_text(self.tokenizer)
        text = marked(text, images, placeholder=mark, where=self.where) + end
        opening = encode_plain("", self.tokenizer)
        ids, pictures = self.encoded(text, images)
        lengths = [len(opening), len(ids)]
        return opening + ids, text, Pictures.concat([None, pictures], lengths)


def encode_plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of plain text, with the tokenizer's opening special tokens (bos)."""
    tokens = tokenizer(text)["input_ids"]
    # Some tokenizers close every text with eos, after which there is nothing to continue.
    if tokens and tokens[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        tokens = tokens[:-1]
    return tokens


def render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: list | None,
    where: str,
    template: str = "auto",
    prefix: str = "",
) -> str:
    """Return a conversation as text, up to where the policy goes on: the opening of an assistant
    turn, with a prefix, or a last turn of the assistant's, left open. Raises as `apply_template`.
    """
    opens_reply = messages[-1]["role"] != "assistant"
    text = apply_template(
        messages,
        tokenizer,
        template=template,
        tools=tools,
        where=where,
        add_generation_prompt=opens_reply,
        continue_final_message=not opens_reply,
    )
    return text + prefix if opens_reply else text


def apply_template(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: list | None,
    where: str,
    template: str = "auto",
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Return a conversation as text by the tokenizer's chat template.

    Raises: Refusal when the template is missing, switched off, or refuses the messages.
    """
    if template == "never":
        raise Refusal(
            f"{where}: the row is a list of messages, but data.chat_template is "
            "`never`; use `auto`, or rows with plain text prompts"
        )
    if not tokenizer.chat_template:
        raise Refusal(
            f"{where}: the row needs a chat template and the tokenizer of "
            f"{tokenizer.name_or_path or 'the model'} has none; set model.tokenizer to one that "
            "has, or give rows with plain text prompts"
        )
    # Templates are programs: jinja's errors, and TypeError, KeyError.
    with refusing(f"{where}: the chat template refuses the messages", Exception, names_kind=True):
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
