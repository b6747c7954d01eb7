"""vLLM's parsers of tool calls, without its server.

They are found and called as vLLM documents for plugins (ToolParserManager; 0.32 and 0.33), and need
no engine: so they stand here, below engines, and not in engine/vllm_internals.py.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from spmdrl.environments.protocol import ToolCall
from spmdrl.environments.tool_calls import call_of


def vllm_parser(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> Callable[[str], tuple[ToolCall, ...]]:
    """Return one of vLLM's parsers as a function of a response's text.

    They take a call that they cannot read for plain text, so malformed calls are not told from
    answers. Importing them takes seconds: for engine ranks.

    Args:
        name: as in `vllm serve --tool-call-parser`.
    Raises: ValueError for an unknown name, a tokenizer without the format's special tokens, or
        where vLLM is missing.
    """
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except (KeyError, ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"tool parser vllm:{name}: {type(error).__name__}: {error}") from error
    request = ChatCompletionRequest(model="", messages=[])

    def parse(text: str) -> tuple[ToolCall, ...]:
        found = parser.extract_tool_calls(text, request)
        calls = (call.function for call in found.tool_calls)
        return tuple(call_of({"name": c.name, "arguments": c.arguments}) for c in calls)

    return parse
