"""Read tool calls in the policy's responses, on the engine's leader.

This module has parsers for the formats of Hermes and Qwen, and of Llama 3. vLLM's parsers treat a
malformed call as plain text and log a traceback for each, and a policy in training writes many such
calls. All other formats use vLLM's parsers, by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.environments.fit_values import fit_problem
from spmdrl.environments.protocol import ToolCall
from spmdrl.errors import Refusal
from spmdrl.imports import attempt, nearest, parsed_json, refusing

Parser = Callable[[str], tuple[ToolCall, ...]]
"""Returns the calls in a response's text, which has all special tokens except one that ended it."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OBJECT = re.compile(r'\{\s*+"')
# The search for calls reads a response at most this many times. Without a limit, a response of many
# unclosed braces would be read once for each of them, while the whole engine waits.
_MAX_READINGS = 16
_COUNTED_AT_ONCE = 256  # an error counts line feeds 256 times as fast as the parser reads
_PYTHON_TAG = "<|python_tag|>"
_VLLM = "vllm:"


def make_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser:
    """Return the parser of a format.

    Args:
        name: `hermes` (also Qwen 2.5 and 3), `llama3`, `vllm:NAME` for one of vLLM's own, or
            `auto`: the format whose markers are in the chat template.
    Raises: Refusal for an unknown name, or if `auto` finds no known markers.
    """
    if name == "auto":
        name = _format_of_template(tokenizer)
    if name.startswith(_VLLM):
        return vllm_parser(name.removeprefix(_VLLM), tokenizer)
    if name not in _PARSERS:
        raise Refusal(
            f"tool parser: unknown name {name!r}{nearest(name, [*_PARSERS, 'auto'])}; "
            "or vllm:NAME for one of vLLM's"
        )
    return _PARSERS[name]


def _format_of_template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = str(tokenizer.chat_template or "")
    # Qwen3-Coder writes XML between the same tags.
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if _PYTHON_TAG in template or '{"name": function name, "parameters"' in template:
        return "llama3"
    raise Refusal(
        "tool parser: auto knows the formats of Hermes/Qwen and Llama 3, and the "
        "chat template shows neither; name one: hermes, llama3, vllm:NAME"
    )


def hermes(text: str) -> tuple[ToolCall, ...]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

    Text outside of the tags is not a call. The last call may lack its closing tag.
    """
    if "<tool_call>" not in text:
        return ()
    return tuple(_call_of_json(call.strip()) for call in _HERMES.findall(text))


def llama3(text: str) -> tuple[ToolCall, ...]:
    """Read `{"name": ..., "parameters": {...}}`, separated by `;`, perhaps after a python tag.

    A JSON object with a name and arguments is a call wherever it is. A response that begins like a
    call and has none is a malformed call.
    """
    calls = []
    at = 0
    decoder = json.JSONDecoder()
    left = _MAX_READINGS * len(text)  # characters that tries may still read before they fail
    while (match := _OBJECT.search(text, at)) and left > 0:
        at = match.start()
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:  # ValueError: an integer of many digits
            end = error.pos if isinstance(error, json.JSONDecodeError) else len(text)
            left -= end - at + len(text) // _COUNTED_AT_ONCE
            at += 1
            continue
        if "name" in value and ("parameters" in value or "arguments" in value):
            calls.append(call_of(value))
    begin = text.lstrip()
    if not calls and begin.startswith((_PYTHON_TAG, '{"name"', "{'name'")):
        return (_call_of_json(begin.removeprefix(_PYTHON_TAG).strip()),)
    return tuple(calls)


def _call_of_json(text: str) -> ToolCall:
    value, problem = _from_json(text)
    return ToolCall("", {}, error=problem) if problem else call_of(value)


def call_of(value: Any) -> ToolCall:
    """Return the call in a decoded object; if it is not a call, one whose `error` says why."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, error='expected a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    problem = ""
    if isinstance(arguments, str):  # as OpenAI's API has them
        arguments, problem = _from_json(arguments)
    if unfit := fit_problem([value["name"], arguments]):
        return ToolCall("", {}, error=unfit)
    if not isinstance(arguments, dict):
        why = f"; it is {problem}" if problem else ""
        return ToolCall(value["name"], {}, error=f'"arguments" must be a JSON object{why}')
    return ToolCall(value["name"], arguments)


def _from_json(text: str) -> tuple[Any, str]:
    value, problem = parsed_json(text)
    return value, f"not valid JSON ({problem}): {text[:100]}" if problem else ""


_PARSERS: dict[str, Parser] = {"hermes": hermes, "llama3": llama3}


def vllm_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser:
    """Return one of vLLM's parsers as a function of a response's text.

    These parsers treat a malformed call as plain text, so that it looks like an answer. They are
    called as vLLM documents it for plugins (ToolParserManager; 0.32 and 0.33) and need no engine.
    Importing them takes seconds, so only engine ranks do it.

    Args:
        name: as in `vllm serve --tool-call-parser`.
    Raises: Refusal for an unknown name, a tokenizer without the format's special tokens, or
        where vLLM is missing.
    """
    kinds = (KeyError, ImportError, RuntimeError, ValueError)
    with refusing(f"tool parser vllm:{name}", *kinds, names_kind=True):
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    request = ChatCompletionRequest(model="", messages=[])

    def parse(text: str) -> tuple[ToolCall, ...]:
        result, error = attempt(lambda: parser.extract_tool_calls(text, request), Exception)
        if result is None:  # one bad response must not end the engine
            return (ToolCall("", {}, error=f"vllm:{name} cannot read it: {error!r:.200}"),)
        calls = (call.function for call in result.tool_calls)
        return tuple(call_of({"name": c.name, "arguments": c.arguments}) for c in calls)

    return parse
