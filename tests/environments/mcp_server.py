"""A small MCP server with tools that work, fail, hang and end it. `--http PORT` serves an address.

python tests/environments/mcp_server.py [--none] [--http PORT]
"""

import os
import sys
import time
from typing import Literal

from mcp.server import MCPServer

server = MCPServer("small")


def power(base: int, exponent: int = 2, kind: Literal["int", "text"] = "int") -> str:
    """Raise a number to a power."""
    return str(base**exponent)


def fail(reason: str) -> str:
    """Fail."""
    raise RuntimeError(reason)


def look(name: str) -> str:
    """Read an environment variable, or the folder."""
    return os.getcwd() if name == "folder" else os.environ.get(name, "not set")


def process() -> str:
    """Return the number of the server's process."""
    return str(os.getpid())


def hang() -> str:
    """Do not return."""
    time.sleep(600)
    return ""


def end() -> str:
    """End the server."""
    os._exit(3)


if "--none" not in sys.argv:
    for tool in (power, fail, look, process, hang, end):
        server.tool()(tool)

if __name__ == "__main__":
    if "--http" in sys.argv:
        port = int(sys.argv[sys.argv.index("--http") + 1])
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run("stdio")
