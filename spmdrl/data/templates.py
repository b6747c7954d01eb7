"""Prompts as token ids: chat templates and multimodal items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.data.attachments import ImageFiles, MultimodalEncoder, inline_images, split_images
from spmdrl.data.rows import Messages
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model_inputs import TokenIds


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
) -> tuple[TokenIds, str]:
    """Turn a prompt into token ids with multimodal items, and the text that they encode.

    Args:
        prompt: plain text, or a conversation.
        template: `auto`, `always` or `never`; see data.chat_template.
        tools: tool descriptions for the template.
        where: origin of the row, for error messages.
        prefix: text that the response begins with, unless the prompt itself begins the response.
        images: of the row's column, see `row_images`.
        files: opens the images; by default they are in the row itself.
    Returns: ids; text, with a placeholder for each image.
    Raises: Refusal when a conversation cannot be rendered, or an image cannot be used.
    """
    encoder = MultimodalEncoder(tokenizer, files=files or ImageFiles(), where=where)
    if isinstance(prompt, str) and template != "always":
        return encoder.encode_plain(prompt, images, end=prefix)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    bare, images = split_images(inline_images(prompt, images, where=where))
    encoder.check(images)
    text = render(bare, tokenizer, template=template, tools=tools, where=where, prefix=prefix)
    return encoder.encode(text, images), text


def render(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: list | None,
    where: str,
    template: str = "auto",
    prefix: str = "",
) -> str:
    """Return a conversation as text that the policy continues.

    It ends with the opening of an assistant turn and the prefix; or, if the last message is the
    assistant's, with that message, not closed. Raises as `apply_template`.
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
    **options: bool,
) -> str:
    """Return a conversation as text by the tokenizer's chat template.

    Args:
        options: of `apply_chat_template`, such as add_generation_prompt.
    Raises: Refusal when there is no template, it is switched off, or it refuses the messages.
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
    # Templates are programs: they raise jinja's errors, TypeError, KeyError and others.
    with refusing(f"{where}: the chat template refuses the messages", Exception, names_kind=True):
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
