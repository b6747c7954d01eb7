"""Make the `Chat` that turns the conversations of agents into token ids."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.environments.conversation import Chat
from spmdrl.environments.tool_calls import make_parser
from spmdrl.errors import Refusal

FIELD = "rollout.agent"
JUDGE_FIELD = "rewards.judge.engine"
SERVE_FIELD = "rollout.serve"


def make_judge_chat(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, *, stops: Collection[int]
) -> Chat:
    """Return the Chat of requests to a judge, which begin a conversation each.

    Args:
        stops: token ids that end an answer.
    Raises: Refusal as `Chat`, and if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise Refusal(
            f"{JUDGE_FIELD}: {cfg.rewards.judge.engine}, and the model's tokenizer has no chat "
            "template, by which a judge is asked; use a model folder with a template"
        )
    return Chat(tokenizer, stop_token_ids=stops, rewrites="keep", field=JUDGE_FIELD)


def make_agent_chat(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, *, tools: list[dict], stops: Collection[int]
) -> Chat:
    """Return the Chat of requests with these tools: an agent's, or another program's.

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
        # Only an agent's requests continue a conversation.
        rewrites="auto" if cfg.rollout.has_agent else "keep",
        prefix=cfg.data.generation_prefix,
        field=FIELD if cfg.rollout.has_agent else SERVE_FIELD,
    )
