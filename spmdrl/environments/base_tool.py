"""One tool that the policy may call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.environments.protocol import ToolCall
from spmdrl.environments.tool_schema import argument_problem
from spmdrl.imports import resolve
from spmdrl.sandbox import LaunchError


class BrokenTool(Exception):
    """Raised by a tool that cannot work for any call; the episode fails."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    call: Callable[..., Any]
    description: dict[str, Any]
    """For the chat template, see `tool_schema.describe`."""
    prepare: Callable[[], None] | None = None
    """Function to call once per worker before any deadline runs."""

    def run(self, call: ToolCall) -> tuple[str, bool]:
        """Return the result as text, and whether the call succeeded.

        Raises: BrokenTool, LaunchError. The policy reads any other error of the tool as the result.
        """
        problem = argument_problem(call.arguments, self.description["function"]["parameters"])
        if problem:
            return f"Error: {self.name}: {problem}", False
        try:
            result = resolve(self.call(**call.arguments))
        except (BrokenTool, LaunchError):
            raise
        except Exception as error:  # of a user's code
            return f"Error: {self.name}: {type(error).__name__}: {error}", False
        if not isinstance(result, str):
            result = json.dumps(result, ensure_ascii=False, default=str)
        return result, True
