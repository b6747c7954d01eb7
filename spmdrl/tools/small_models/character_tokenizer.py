"""A tokenizer of single characters, for small models that are made here."""

from __future__ import annotations

import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported in the function too: `--help` does not need it
    from transformers import PreTrainedTokenizerFast

# Ids 0, 1, 2, ... in this order; then the characters; then filler up to a multiple of 8.
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>")
_CHARACTERS = (
    string.digits + string.ascii_lowercase + string.ascii_uppercase + string.punctuation + " \n\t"
)
# A turn ends with <eos>, so that a chat model stops by the same token as a plain one. Of a tool the
# template shows the signature only: each character of a full description would be a token.
_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}"
    "{{ tool['function']['name'] + '(' }}"
    "{{ tool['function']['parameters']['properties'] | join(', ') + ')' }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}{{ '<eos>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<eos>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer(
    *, chat_template: bool = False, special: Mapping[str, str] = MappingProxyType({}), say: str = ""
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each printable ASCII character, newline and tab.

    Any other character becomes `<unk>`. No token is added at the beginning or the end, and
    decode(encode(text)) == text for text of these characters.

    Args:
        chat_template: attach a template whose turns read `<|im_start|>role NEWLINE text <eos>`.
        special: {attribute of the tokenizer: another token with an id of its own}.
        say: the Jinja macro `say`, which turns a message's content into text; empty if content is
            text.
    Returns: a tokenizer with pad, bos, eos and unk tokens, its size a multiple of 8.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*_SPECIAL, *_CHARACTERS, *special.values()]
    fillers = [f"<reserved_{i}>" for i in range(-len(tokens) % 8)]
    vocabulary = {token: i for i, token in enumerate(tokens + fillers)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    words = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>", *fillers],
        model_specific_special_tokens=dict(special),
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        words.chat_template = _CHAT_TEMPLATE
    if chat_template and say:
        words.chat_template = say + _CHAT_TEMPLATE.replace(
            "message['content'] + '<eos>'", "say(message['content']) + '<eos>'"
        )
    return words
