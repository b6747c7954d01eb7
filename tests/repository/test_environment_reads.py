"""Environment variables are read and set in the files named here."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "spmdrl/world/launch.py": "what the launcher told, and what children are told",
    "spmdrl/agents/messages.py": "proxies that are set already; clients in workers read these",
    "spmdrl/rewards/columns.py": "user's functions find the judge by variables",
    "spmdrl/rewards/judge.py": "the judge's address, which a worker is started with",
    "spmdrl/agents/solve.py": "adapter: clients of agents find the policy by variables",
    "spmdrl/engine/vllm/internals.py": "adapter: vLLM is set by variables",
    "spmdrl/report/trackers/mlflow_tracker.py": "adapter: MLflow is told to report to nobody",
    "spmdrl/report/trackers/wandb_tracker.py": "adapter: W&B is told to send no errors",
    "spmdrl/report/trackers/trackio_tracker.py": "adapter: Trackio is told its folder",
    "spmdrl/tools/proof/preloaded.py": "adapter: vLLM and dynamo read theirs as they are imported",
    "spmdrl/tools/proof/ranks.py": "a fork takes another environment than that of its fork server",
    "spmdrl/environments/mcp_tools.py": "passes on what the user names, such as a server's keys",
    "spmdrl/imports.py": "a child inherits it; this room is below world/",
    "spmdrl/rewards/endpoint.py": "an API key, in the variable that the user names",
    "spmdrl/sandbox/request.py": "LD_LIBRARY_PATH, for Python's own library; below world/",
    "spmdrl/workers/main.py": "puts back what a user's function has changed",
}
"""{file: why}. It may get shorter."""
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _touches(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in ("os", "posix") and any(alias.name in NAMES for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in NAMES


def test_few_files_touch_environment_variables() -> None:
    found: dict[str, list[int]] = {}
    for path in [*sorted((ROOT / "spmdrl").rglob("*.py")), ROOT / "train.py"]:
        for node in filter(_touches, ast.walk(ast.parse(path.read_text()))):
            found.setdefault(path.relative_to(ROOT).as_posix(), []).append(node.lineno)
    new = {file: lines for file, lines in found.items() if file not in ALLOWED}
    assert not new, f"ask world/launch.py: {new}"
    assert not ALLOWED.keys() - found.keys(), "take it off the list"
