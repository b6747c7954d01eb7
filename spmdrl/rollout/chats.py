"""Make the `Chat` that joins the turns of episodes, for each data source with an environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.attachments import ImageFiles
from spmdrl.environments.conversation import Chat
from spmdrl.environments.tool_calls import make_parser
from spmdrl.workers.pool import RewardPool

log = logging.getLogger(__name__)


def make_chat(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    field: str,
    *,
    facts: Mapping[str, Any],
    stops: Sequence[int],
) -> Chat:
    """Return the Chat that joins the turns of an environment's episodes.

    Args:
        field: field of the config that names the environment.
        facts: facts about the environment; see `EnvironmentServer.facts`.
        stops: token ids that end a turn.
    Raises: Refusal as `Chat`, and for an unknown format of tool calls.
    """
    parser = facts["tool_parser"]
    return Chat(
        tokenizer,
        stop_token_ids=stops,
        tools=facts["tools"],
        parser=make_parser(parser, tokenizer) if parser else None,
        rewrites=cfg.environment_fields()[field].get("rewrites", "auto"),
        prefix=cfg.data.generation_prefix,
        field=field,
    )


def make_chats(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    pool: RewardPool,
    *,
    stops: Sequence[int],
    is_first: bool,
) -> dict[int, Chat]:
    """Return {index of a data source: Chat of its episodes}.

    Args:
        pool: has the facts of the environments.
        stops: token ids that end a turn.
        is_first: whether this is the first replica, which alone logs warnings.
    Raises: Refusal as `Chat`.
    """
    made = {}
    for field in cfg.environment_fields():
        facts = pool.environments[field]
        if facts["not_plain"] and is_first:
            log.warning(
                "%s: %s is not plain data. Checkpoints store unfinished episodes of it as "
                "pickles, and a resume needs --checkpoint.trust-pickles true; "
                "docs/environments.md says how `save` and `restore` make it plain",
                field,
                facts["not_plain"],
            )
        chat = made[field] = make_chat(cfg, tokenizer, field, facts=facts, stops=stops)
        if chat.drops_reasoning and is_first:
            log.warning(
                "%s: the chat template leaves reasoning (<think>) out of "
                "earlier turns; this run keeps it, and the policy is trained with it. With this "
                "template, later users of the model leave it out. Set {rewrites: refuse} to end "
                "the run instead",
                field,
            )
    fields = [field for field, _ in cfg.environments()]
    return {
        i: made[field].with_files(ImageFiles(cfg.data.images, source.folder))
        for i, (field, source) in enumerate(zip(fields, cfg.data.all_sources()))
        if field in made
    }
