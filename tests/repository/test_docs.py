"""Pages of docs/ are short, and the flags, settings and links that they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from spmdrl.config import Config, flatten
from spmdrl.tools.import_config.table import table_of
from spmdrl.types import Batch

ROOT = Path(__file__).parents[2]
WRITTEN_BY_PROGRAMS = {"algorithms.md", "models.md"}
PAGES = [
    page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in WRITTEN_BY_PROGRAMS
]
PAGES += [ROOT / "slurm/README.md", ROOT / "CONTRIBUTING.md"]
MOST_WORDS = 900
OF_A_BATCH = {*Batch.__dataclass_fields__, "without"}
IN_TRAIN_PY = set(re.findall(r"\b\w+\.\w+", (ROOT / "train.py").read_text()))

FIELDS = set(flatten(Config()))
SECTIONS = {name.rpartition(".")[0] for name in FIELDS if "." in name}
SECTIONS |= {name.rpartition(".")[0] for name in SECTIONS if "." in name}
TOP_SECTIONS = {name.partition(".")[0] for name in SECTIONS}

OF_OTHER_PROGRAMS = {
    "pip": {"--no-index", "--find-links"},
    "sbatch, srun": {
        "--account",
        "--container-image",
        "--container-mounts",
        "--container-remap-root",
        "--container-workdir",
        "--kill-on-bad-exit",
        "--partition",
        "--signal",
    },
    "apptainer": {"--bind", "--cleanenv", "--nv", "--pwd"},
    "trl": {"--beta", "--learning-rate"},
    "verl": {"--config-name"},
    "docker run": {"--ipc", "--rm"},
    "benchmarks.gpu": {"--list", "--rehearse"},
    "benchmarks.recipes": {"--only"},
}


def without_code(text: str) -> str:
    """Return a page without its fenced and indented blocks."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"^ {4,}.*\n", "", text, flags=re.M)


def flags_of_commands() -> set[str]:
    """Return parameters and fields of `python -m spmdrl` commands, from which tyro makes flags."""
    names: set[str] = set()
    for path in (ROOT / "spmdrl/tools/commands").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names |= {one.arg for one in node.args.args + node.args.kwonlyargs}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return {f"--{name.replace('_', '-')}" for name in names}


def flags_of_torchrun() -> set[str]:
    options = (action.option_strings for action in get_args_parser()._actions)
    return {name for names in options for name in names}


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    own = {f"--{name.replace('_', '-')}" for name in FIELDS | SECTIONS}
    own |= {"--config", "--help", "--version"}
    others = {flag for flags in OF_OTHER_PROGRAMS.values() for flag in flags}
    return own | flags_of_commands() | flags_of_torchrun() | others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_read_in_one_sitting(page):
    words = re.findall(r"[^\s|]*\w[^\s|]*", without_code(page.read_text()))
    assert len(words) <= MOST_WORDS, f"{len(words)} words: split the page, or leave something out"


def test_the_text_around_the_tables_of_models_is_read_in_one_sitting():
    text, marker, _ = (
        (ROOT / "docs/models.md").read_text().partition("<!-- by python -m spmdrl check")
    )
    assert marker
    lines = without_code(text).splitlines()
    words = " ".join(line for line in lines if not line.startswith("|")).split()
    assert len(words) <= MOST_WORDS, f"{len(words)} words: leave something out"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_exists(page, known_flags):
    text = page.read_text()
    named = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text)}
    unknown = {flag for flag in named - known_flags if not is_nested(flag, known_flags)}
    assert not unknown


def is_nested(flag: str, known_flags: set[str]) -> bool:
    """Return whether a flag such as --tower.width is made of names that are flags alone."""
    parts = flag.removeprefix("--").split(".")
    return len(parts) > 1 and all(f"--{part}" in known_flags for part in parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page):
    text = page.read_text()
    named = re.findall(r"(?<![\w./-])((?:" + "|".join(sorted(TOP_SECTIONS)) + r")(?:\.\w+)+)", text)
    others = re.fullmatch(r"from_(\w+)\.md", page.name)
    table = table_of(others[1]) if others else None
    theirs = {name for name in named if table and table.row_of(name)}
    assert not [name for name in named if name not in theirs and not is_setting(name)]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda f: f.stem)
def test_every_setting_that_a_benchmark_sets_exists(file):
    pattern = re.compile(r"(?:--)?((?:" + "|".join(sorted(TOP_SECTIONS)) + r")(?:\.[\w-]+)+)")
    nodes = ast.walk(ast.parse(file.read_text()))
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    named = {match[1].replace("-", "_") for text in texts if (match := pattern.fullmatch(text))}
    assert not [name for name in named - {"model.safetensors"} if not is_setting(name)]


def is_setting(name: str) -> bool:
    """Return whether a dotted name is a field, a section, a key of a mapping, or no setting."""
    if re.search(r"\.(py|md|jsonl|json|yaml|txt)$", name) or name.startswith("model.layers."):
        return True  # a file, or a weight
    first = ".".join(name.split(".")[:2])
    if first in IN_TRAIN_PY or first.removeprefix("batch.") in OF_A_BATCH:
        return True  # an object of train.py, which shares its name with a section
    parents = {name.rsplit(".", times)[0] for times in range(name.count(".") + 1)}
    return name in SECTIONS or bool(parents & FIELDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
