"""Token ids of what a teacher reads instead of prompts, such as the prompt with a hint."""

from __future__ import annotations

import functools
import json

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.attachments import may_hold_images
from spmdrl.data.rows import Messages
from spmdrl.data.sources import SourcesRows
from spmdrl.data.teacher_templates import teacher_prompt_of
from spmdrl.data.templates import encode_prompt
from spmdrl.errors import Refusal
from spmdrl.model_inputs import TokenIds

_CACHED = 16384
_OF_TEMPLATE = 512  # tokens that a chat template may add, such as a system prompt


class TeacherPrompts:
    """Token ids of what a teacher reads instead of the prompts of rows.

    Args:
        rows: of data.train.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, rows: SourcesRows):
        self.cfg = cfg
        self._tokenizer = tokenizer
        self._rows = rows
        self._sources = cfg.data.sources("train")
        self._of_row = functools.lru_cache(maxsize=_CACHED)(self._encode)

    def check(self, *, tried: int) -> None:
        """Check all rows in memory, and the first of each source that is not.

        Args:
            tried: rows of a source that are always tokenised. Others are only if they have so many
                bytes that they may have too many tokens.
        Raises: Refusal as `tokens`.
        """
        for part, source in enumerate(self._rows.parts):
            indices = self._rows.indices(part)
            for index in indices if source.is_held else indices[:tried]:
                held = [self._prompt(index), self._rows[index].get("tools")]
                size = len(json.dumps(held, ensure_ascii=False, default=str).encode())
                is_short = size + _OF_TEMPLATE <= self.cfg.data.max_teacher_prompt_tokens
                if index - indices.start < tried or not is_short:
                    self.tokens(index)

    def tokens(self, index: int) -> TokenIds | None:
        """Return what the teacher of a row reads before the response; None for the prompt itself.

        Raises: Refusal for a row that does not have it, or has more of it than
            data.max_teacher_prompt_tokens.
        """
        return self._of_row(index)

    def _prompt(self, index: int) -> str | Messages | None:
        spec = self._sources[self._rows.source(index)].teacher_prompt
        if not spec:
            return None
        row = self._rows[index]
        where = self._rows.where(index)
        if may_hold_images(row):
            raise Refusal(
                f"{where}: holds more than text, and data.teacher_prompt is for rows of text; "
                "leave it out"
            )
        prompt = teacher_prompt_of(row, spec, where=where)
        return prompt if self.cfg.objective.samples else _as_in_example(row, prompt, where=where)

    def _encode(self, index: int) -> TokenIds | None:
        prompt = self._prompt(index)
        if prompt is None:
            return None
        cfg = self.cfg
        where = self._rows.where(index)
        tokens, _ = encode_prompt(
            prompt,
            self._tokenizer,
            template=cfg.data.chat_template,
            tools=self._rows[index].get("tools"),
            where=where,
            prefix=cfg.data.generation_prefix,
        )
        most = cfg.data.max_teacher_prompt_tokens
        if not 0 < len(tokens) <= most:
            raise Refusal(
                f"{where}: the teacher's prompt has {len(tokens)} tokens, and may have 1 to "
                f"data.max_teacher_prompt_tokens = {most}; raise it, or shorten the hint"
            )
        return tokens


def _as_in_example(row: dict, prompt: str | Messages, *, where: str) -> str | Messages:
    """Return the teacher's prompt of a row that has its response, in the form of the prompt.

    Raises: Refusal for a row whose response does not follow one prompt.
    """
    if not row.get("prompt"):
        raise Refusal(
            f"{where}: has no column `prompt`, and data.teacher_prompt replaces what comes before "
            "one response; give rows with `prompt` and `completion`"
        )
    response = row.get("completion") or row.get("answer")
    is_chat = isinstance(row["prompt"], list) or isinstance(response, list)
    if is_chat and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise Refusal(
            f"{where}: the teacher's prompt ends with an assistant turn, and the row's response is "
            "a turn of its own; end it with another turn"
        )
    return prompt
