"""Make the `Chat` that turns the conversations of agents into token ids."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.environments.conversation import Chat
from spmdrl.environments.tool_calls import make_parser

FIELD = "rollout.agent"


def make_agent_chat(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, *, tools: list[dict], stops: Collection[int]
) -> Chat:
    """Return the Chat of requests with these tools.

    Args:
        stops: token ids that end an answer.
    Raises: Refusal as `Chat`, and for an unknown format of tool calls.
    """
    name = cfg.rollout.agent_tool_parser
    # A format that is named is checked at start, before any request has tools.
    parser = make_parser(name, tokenizer) if tools or name != "auto" else None
    return Chat(
        tokenizer,
        stop_token_ids=stops,
        tools=tools,
        parser=parser if tools else None,
        prefix=cfg.data.generation_prefix,
        field=FIELD,
    )
