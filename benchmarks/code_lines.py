"""Count the lines of code of two revisions, in one layout.

    python benchmarks/code_lines.py 0a5ae62 HEAD
    python benchmarks/code_lines.py a6aaf8e HEAD --rooms

Docstrings, comments and blank lines do not count. Both trees are laid out by the same `ruff format`
first, since a formatter's habits are worth more lines than most changes. Beside the lines stand the
number of `try:` blocks outside tests, and of syntax-tree nodes in thousands, which no layout moves.

With --rooms the lines of spmdrl/ by room, and those of files that hold nothing but what the older
revision could not do (FEATURES, by hand). What such a feature adds to other files is not in them.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

_WITH_DOCS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FEATURES = {
    "models that see": "model/vision/* data/vision/* data/attachments.py given.py model/senses.py "
    "model/shown_rows.py model/towers.py",
    "certificates, compared and taken again": "certificate/* commands/diff.py commands/verify.py",
    "other methods on recorded steps": "what_if/* commands/what_if.py",
    "proof of a model on a small one of its code": "proof/* commands/check.py model/shrink.py "
    "model/families.py",
    "masks, sinks and packing of any family": "model/attention/mask_spans.py "
    "model/attention/separation.py model/attention/sinks.py",
    "a schedule decided again": "rollout/decision*.py",
    "truncated and penalised sampling, stop strings": "kept_sets.py engine/penalties.py "
    "engine/stop_strings.py engine/truncation.py engine/vllm_kept_sets.py model/draw_rules.py "
    "check/sampling.py data/row_sampling.py",
    "no pickles between ranks, all of it sealed": "plain.py world/secret.py "
    "world/sealed_store.py environments/plain_state.py",
    "workers and programs that leave nothing": "workers/keeper.py workers/surroundings.py "
    "sandbox/removal.py",
    "a lost rank, full host, taken folder named": "world/lost_peers/board.py "
    "world/lost_peers/neighbours.py world/lost_peers/place.py world/lost_peers/last_collectives.py "
    "world/machine/host_memory.py world/machine/gpus.py world/folder_lock.py",
    "numbers out of range refused by name": "config/ranges.py config/yaml_text.py check/ranges.py",
    "several sources, rows left on disk, fetching": "data/sources.py data/streamed.py "
    "check/sources.py commands/fetch_problems.py",
    "rewards of groups and steps in one call": "rollout/step_scores.py workers/joining.py",
    "Muon, float16, several epochs": "train/muon.py train/loss_scale.py check/optimizer.py "
    "check/epochs.py",
    "reward models of another tokenizer": "train/companions/reencoding.py",
    "quantised files": "model/files/quantised.py engine/vllm_plain.py",
    "what vLLM cannot run, said before": "engine/vllm_families.py engine/vllm_trial.py",
    "foreign code refused, disagreement at start": "check/foreign_code.py train/agreement.py",
    "advice, other programs' names, a launcher": "report/advice.py report/learnt.py "
    "config/elsewhere.py algorithms/combinations.py commands/launch.py",
    "five preference methods more": "algorithms/preference/sorted_pairs.py",
}
"""{what spmdrl could not do at a6aaf8e: files that hold nothing else}"""


def code_lines(text: str) -> int:
    """Return the lines of a file that hold code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _WITH_DOCS):
            continue
        for line in node.body:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                docs |= {*range(line.lineno, (line.end_lineno or 0) + 1)}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - docs)


def measure(revision: str) -> Counter[str]:
    """Return {measure: count} of one revision of this repository."""
    packed = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
    ).stdout
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        layout = ["--config", str(ROOT / "pyproject.toml"), "-q", folder]
        subprocess.run([sys.executable, "-m", "ruff", "format", *layout], check=True)
        for path in Path(folder).rglob("*.py"):
            text, top = path.read_text(), path.relative_to(folder).parts[0]
            found[f"code lines, {top}"] += code_lines(text)
            found["code lines, all"] += code_lines(text)
            nodes = [*ast.walk(ast.parse(text))]
            found["syntax nodes, thousands"] += len(nodes)
            if top in ("spmdrl", "train.py"):
                found["lines, spmdrl and train.py"] += len(text.splitlines())
                found.update(filter(None, map(_catch, nodes)))
            if top == "spmdrl":
                found.update(_by_room(path.relative_to(Path(folder) / top), code_lines(text)))
    found["syntax nodes, thousands"] //= 1000
    return found


def _by_room(inside: Path, lines: int) -> Counter[str]:
    found = Counter({f"room {inside.parts[0]}": lines})
    for feature, files in FEATURES.items():
        if any(map(inside.match, files.split())):
            found += Counter({f"feature: {feature}": lines, "features, all": lines})
    return found


def _catch(node: ast.AST) -> str:
    """Return how a node keeps an error from flying; empty where it does not."""
    if isinstance(node, ast.Try):
        return "catches: try .. except" if node.handlers else "cleans up: try .. finally"
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in ("suppress", "attempt", "refusing"):
            return f"catches: {name}"
    return ""


def main() -> None:
    """Print both revisions and the ratio of the second to the first."""
    before, after = map(measure, sys.argv[1:3])
    shown = [
        name
        for name in sorted(before | after)
        if "--rooms" in sys.argv or not name.startswith(("room ", "feature"))
    ]
    width = max(map(len, shown)) + 1
    print(f"{'':{width}}{sys.argv[1]:>10}{sys.argv[2]:>10}{'ratio':>8}")
    for name in shown:
        ratio = f"{after[name] / before[name]:.2f}" if before[name] else ""
        print(f"{name:{width}}{before[name]:>10}{after[name]:>10}{ratio:>8}")


if __name__ == "__main__":
    main()
