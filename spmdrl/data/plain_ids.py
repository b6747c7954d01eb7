"""Plain text as token ids."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def encode_plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of plain text, with the tokenizer's opening special tokens (bos)."""
    tokens = tokenizer(text)["input_ids"]
    # Some tokenizers close every text with eos, after which there is nothing to continue.
    if tokens and tokens[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        tokens = tokens[:-1]
    return tokens
