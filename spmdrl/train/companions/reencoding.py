"""Sequences of the policy in the tokens of a reward model that has another tokenizer.

The response is decoded by the policy's tokenizer, as for reward functions, and appended to the
row's own prompt. A conversation goes through the reward model's chat template; text stays text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.config.data import Split
from spmdrl.data.attachments import may_hold_images, plain_token_ids, reads_images
from spmdrl.data.rows import prompt_of
from spmdrl.data.sources import load_rows
from spmdrl.data.templates import apply_template
from spmdrl.data.tokenizer import load_tokenizer, read_tokenizer
from spmdrl.errors import Refusal
from spmdrl.model.files.reader import instead
from spmdrl.types import Microbatch, Scalars


class Reencoder:
    """Encodes the policy's sequences with the tokenizer of another model.

    Args:
        folder: of the model, with its tokenizer.
        limit: longest sequence that it reads, tokens; None for any.
    Raises: Refusal where rows or tokenizers cannot be read, or cannot be encoded.
    """

    def __init__(self, cfg: Config, *, folder: Path, limit: int | None):
        self.cfg = cfg
        self.limit = limit
        self._ours = load_tokenizer(cfg)
        self._theirs = read_tokenizer(str(folder), trust_remote_code=cfg.model.trust_remote_code)
        self._rows = {"train": load_rows(cfg, split="train")}
        check_prompt(cfg, self._theirs, self._rows["train"][0])

    def sequences(
        self, host: Microbatch, scalars: Scalars, *, split: Split
    ) -> tuple[list[list[int]], list[bool]]:
        """Return the ids of each sequence, and whether it is longer than the model reads: it is cut
        then, and its score means nothing.

        Args:
            host: a micro-batch on the host. A dummy stays one token.
            scalars: of the whole batch.
            split: which data their rows are of.
        """
        starts = host.cu_seqlens.tolist()
        found = []
        for row, begin, end in zip(host.sequence_ids.tolist(), starts, starts[1:]):
            if row < 0:
                found.append([0])
                continue
            is_own = host.response_mask[begin:end].tolist()
            given = is_own.index(True) if True in is_own else len(is_own)
            response = host.tokens[begin + given : end]
            at = int(scalars.rows[row])
            is_cut = bool(scalars.is_truncated[row])
            found.append(self._encoded(at, response, is_cut=is_cut, split=split))
        limit = self.limit or max(map(len, found))
        return [ids[:limit] for ids in found], [len(ids) > limit for ids in found]

    def _encoded(self, index: int, response: Tensor, *, is_cut: bool, split: Split) -> list[int]:
        if index < 0:
            raise Refusal(
                "a reward model with another tokenizer needs the rows that sequences answer, and "
                "these were sampled by a version that did not note them; sample again"
            )
        text = self._ours.decode(response, skip_special_tokens=True)
        if split not in self._rows:
            self._rows[split] = load_rows(self.cfg, split=split)
        rows = self._rows[split]
        row = rows[index]
        if may_hold_images(row):
            raise Refusal(
                f"{rows.where(index)}: holds more than text, and a reward model with another "
                "tokenizer is shown text alone; take one with the policy's tokenizer"
            )
        prompt = _conversation(self.cfg, prompt_of(row))
        prefix = self.cfg.data.generation_prefix
        if isinstance(prompt, str):
            ids = plain_token_ids(prompt + prefix + text, self._theirs)
            # A response that was cut at the limit has no end.
            ends = not is_cut and self._theirs.eos_token_id is not None
            return [*ids, self._theirs.eos_token_id] if ends else ids
        *before, last = prompt
        if last["role"] == "assistant":  # which the policy went on with
            answer = {**last, "content": f"{last['content']}{text}"}
        else:
            before = prompt
            answer = {"role": "assistant", "content": prefix + text}
        whole = apply_template(
            [*before, answer], self._theirs, tools=row.get("tools"), where=rows.where(index)
        )
        # The template has written the special tokens.
        return self._theirs(whole, add_special_tokens=False)["input_ids"]


def _conversation(cfg: Config, prompt: Any) -> Any:
    """Return a prompt as the policy is given it: text, or messages."""
    if isinstance(prompt, str) and cfg.data.chat_template == "always":
        return [{"role": "user", "content": prompt}]
    return prompt


def check_prompt(cfg: Config, theirs: PreTrainedTokenizerBase, row: dict) -> None:
    """Refuse a conversation that the other tokenizer has no template for.

    Raises: Refusal saying what to do.
    """
    is_chat = not isinstance(_conversation(cfg, prompt_of(row)), str)
    if is_chat and not theirs.chat_template:
        raise Refusal(
            "its tokenizer is not the policy's and has no chat template, and the rows are "
            "conversations; give it the one that it was trained with"
        )


def other_tokens(cfg: Config, folder: Path) -> str:
    """Describe how a model's tokens differ from the policy's; empty if they are the same, or if
    it has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    # Without its added tokens: it does no harm if those have other names.
    theirs = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False)
    by_id = {index: token for token, index in theirs.items()}
    ours = load_tokenizer(cfg).get_vocab()
    other = sorted(
        (index, token) for token, index in ours.items() if by_id.get(index, token) != token
    )
    if not other:
        return ""
    index, token = other[0]
    return (
        f"{len(other)} of {len(ours)} tokens differ, e.g. {index} is {token!r} to the policy and "
        f"{by_id[index]!r} to it"
    )


def check_other_tokenizer(cfg: Config, folder: Path, *, vocab_size: int, row: dict | None) -> None:
    """Check that sequences can be encoded by a model's own, other tokenizer.

    Args:
        vocab_size: tokens that it embeds.
        row: the first of data.train; None if it is not known.
    Raises: Refusal saying what to do.
    """
    theirs = read_tokenizer(str(folder), trust_remote_code=cfg.model.trust_remote_code)
    highest = max(theirs.get_vocab().values())
    if highest >= vocab_size:
        raise Refusal(
            f"its tokenizer has the token {highest}, and it embeds {vocab_size}; give it its own"
        )
    if reads_images(load_tokenizer(cfg)):
        raise Refusal(
            "its tokenizer is not the policy's, which sees, and what that is shown is not put into "
            f"its words; take one with the policy's tokenizer{instead(cfg.model.path)}"
        )
    if environments := cfg.environment_fields("train"):
        raise Refusal(
            f"its tokenizer is not the policy's, and of an episode in {next(iter(environments))} "
            "there is no conversation to put into its words; take one with the policy's tokenizer"
        )
    if row is not None:
        check_prompt(cfg, theirs, row)


def packed(sequences: list[list[int]]) -> tuple[Tensor, list[int]]:
    """Return sequences one after the other, [T] int64, and their lengths."""
    lengths = [len(ids) for ids in sequences]
    return torch.tensor([token for ids in sequences for token in ids]), lengths
