"""Prompts as a model reads them: chat templates, token ids, and what they show."""

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
    held: Sequence[Any] = (),
    files: ImageFiles | None = None,
) -> tuple[TokenIds, str]:
    """Turn a prompt into token ids with what they show, and the text that they stand for.

    Args:
        prompt: plain text, or a conversation.
        template: `auto`, `always` or `never`; see data.chat_template.
        tools: tool descriptions for the template.
        where: origin of the row, for error messages.
        prefix: text that the response begins with, where the prompt does not begin it itself.
        held: attachments of the row's column, see `row_images`.
        files: where they are; by default in the row itself.
    Returns: ids; text, a placeholder for each attachment.
    Raises: Refusal when a conversation cannot be rendered, or an attachment cannot be used.
    """
    encoder = MultimodalEncoder(tokenizer, files=files or ImageFiles(), where=where)
    if isinstance(prompt, str) and template != "always":
        return encoder.encode_plain(prompt, held, end=prefix)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    bare, held = split_images(inline_images(prompt, held, where=where))
    encoder.check(held)
    text = render(bare, tokenizer, template=template, tools=tools, where=where, prefix=prefix)
    return encoder.encode(text, held), text


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
    **options: bool,
) -> str:
    """Return a conversation as text by the tokenizer's chat template.

    Args:
        options: of `apply_chat_template`, such as add_generation_prompt.
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
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
