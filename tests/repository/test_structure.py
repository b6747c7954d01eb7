"""The rooms: who imports whom, one word per thing, pages that show them."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import rooms  # noqa: E402

FILES = sorted((ROOT / "spmdrl").rglob("*.py"))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return {file: its syntax tree} of the package and the program."""
    return {path: ast.parse(path.read_text()) for path in [*FILES, ROOT / "train.py"]}


@functools.cache
def imports() -> list[rooms.Import]:
    """Return every import of a module of ours by another."""
    return [*rooms.imports()]


def test_every_module_has_a_room() -> None:
    unknown = {rooms.room_of(m) for m in rooms.modules() if m} - {*rooms.LEVELS, "__main__"}
    assert not unknown, f"rooms without a place in docs/rooms.py: {unknown}"


def test_rooms_import_only_from_rooms_below() -> None:
    wrong = [
        f"{one.path.relative_to(ROOT)}:{one.line} imports {one.imported}"
        for one in imports()
        if (here := rooms.room_of(one.module)) in rooms.LEVELS
        and (there := rooms.room_of(one.imported)) != here
        and rooms.LEVELS[there] >= rooms.LEVELS[here]
    ]
    assert not wrong, "\n".join(wrong)


OTHER_TESTS = {
    "common": "modules of spmdrl that are in no room",
    "gpu": "what only CUDA does, as far as a machine without a GPU can show it",
    "helpers": "what tests of several rooms import",
    "program": "whole runs of train.py",
    "repository": "the tree, its pages, its pinned packages",
}


def test_every_test_is_in_the_folder_of_a_room() -> None:
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    rooms_with_folders = {path.name for path in (ROOT / "spmdrl").iterdir() if path.is_dir()}
    assert folders <= rooms_with_folders | OTHER_TESTS.keys() - {"helpers"}
    # Packages, since two rooms may have a file of one name.
    assert not [name for name in folders if not (tests / name / "__init__.py").exists()]


def test_tests_that_pages_and_comments_name_are_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "slurm" / "README.md"]
    texts = "\n".join(path.read_text() for path in [*pages, *trees()])
    named = {*re.findall(r"\btests/[\w./]+\.\w+", texts)}
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_there_is_no_import_ring() -> None:
    uses = defaultdict(set)
    for one in imports():
        uses[one.module].add(one.imported)
    TopologicalSorter(uses).prepare()  # raises CycleError, which names the ring


def test_config_imports_no_room_but_three_light_ones() -> None:
    assert not [
        (one.module, one.imported)
        for one in imports()
        if rooms.room_of(one.module) == "config"
        and rooms.room_of(one.imported) not in ("config", "errors", "imports", "run_files")
    ]
    loaded = _modules_after("import spmdrl.config")
    assert "torch" not in loaded and "transformers" not in loaded
    ours = {name.split(".")[1] for name in loaded if name.startswith("spmdrl.")}
    assert ours == {"config", "errors", "imports", "run_files"}


def test_an_inference_rank_never_imports_training() -> None:
    own = {"engine", "sync", "model", "rollout"}
    names = {f"spmdrl.{m}" for m in rooms.modules() if rooms.room_of(m) in own}
    names.remove("spmdrl.model.logit_kernels")  # needs Triton
    lazily = [  # what stands inside functions is not loaded by importing the module
        (one.module, one.imported)
        for one in imports()
        if rooms.room_of(one.module) in own and rooms.room_of(one.imported) == "train"
    ]
    assert not lazily
    # vLLM itself is loaded inside functions alone.
    loaded = _modules_after("\n".join(f"import {name}" for name in sorted(names)))
    assert not [name for name in loaded if name.startswith("spmdrl.train")]


def _modules_after(code: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter has loaded after some code."""
    code += "\nimport sys; print(' '.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_nothing_that_trains_imports_the_tools() -> None:
    users = {one.module for one in imports() if rooms.room_of(one.imported) == "tools"}
    assert {rooms.room_of(module) for module in users} == {"tools"}
    script = {name.split(".")[0] for name in rooms.imports_of(ROOT / "train.py")}
    assert "api" in script and "tools" not in script
    # A command is found by its name: nobody else loads the tools by a text.
    texts = {path.relative_to(ROOT / "spmdrl").as_posix(): path.read_text() for path in FILES}
    naming = {name for name, text in texts.items() if "spmdrl.tools" in text}
    assert {name for name in naming if not name.startswith("tools/")} == {"__main__.py"}


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_files_of_a_room_differ_by_an_s_alone() -> None:
    stems = defaultdict(set)
    for path in FILES:
        stems[path.parent].add(path.stem)
    assert not [
        path / stem for path, found in stems.items() for stem in found if stem + "s" in found
    ]


def test_no_file_imports_one_of_its_own_name() -> None:
    # A command is named as a person types it, and a package may show what is in it.
    assert not [
        (one.module, one.imported)
        for one in imports()
        if one.module.split(".")[-1] == one.imported.split(".")[-1]
        and not one.imported.startswith(one.module + ".")
        and not one.module.startswith("tools.commands.")
    ]


_NESTS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)


def test_statements_nest_at_most_three_deep() -> None:
    deep = []

    def walk(node: ast.AST, depth: int, path: Path) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                walk(child, 0, path)
                continue
            is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and (
                node.orelse == [child])  # fmt: skip
            inner = depth + (isinstance(child, _NESTS) and not is_elif)
            if inner > 3 and isinstance(child, _NESTS) and not is_elif:
                deep.append(f"{path.relative_to(ROOT)}:{child.lineno}")
            walk(child, inner, path)

    for path, tree in trees().items():
        walk(tree, 0, path)
    assert not deep, "\n".join(deep)


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page == rooms.page_with(rooms.picture(), page), "run `python docs/rooms.py`"


def test_the_tree_on_the_page_is_the_real_tree_in_the_order_of_imports() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = page.split("## The tree")[1].split("\n## ")[0]
    named = re.findall(r"^ {6}(\w+(?:/|\.py))", block, flags=re.M)
    real = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "spmdrl").iterdir()
        if not path.name.startswith("__")
    }
    assert {*named} == real, ({*named} - real, real - {*named})
    places = {name.removesuffix("/").removesuffix(".py"): i for i, name in enumerate(named)}
    wrong = {
        (here, there)
        for one in imports()
        if (here := rooms.room_of(one.module)) in places
        and (there := rooms.room_of(one.imported)) != here
        and places[there] > places[here]
    }
    assert not wrong


VISION_ROOMS = ("spmdrl/data/vision/",)


def test_only_their_doors_import_the_rooms_of_vision() -> None:
    rooms_of_vision = tuple(name.removeprefix("spmdrl/").replace("/", ".") for name in VISION_ROOMS)
    outside = {
        one.path.relative_to(ROOT).as_posix()
        for one in imports()
        if f"{one.imported}.".startswith(rooms_of_vision)
        and not f"{one.module}.".startswith(rooms_of_vision)
    }
    assert outside == {"spmdrl/data/attachments.py"}


def test_the_architecture_names_files_that_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    there = {path.relative_to(ROOT / "spmdrl").as_posix() for path in FILES} | {"train.py"}
    assert named and not {*named} - there


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    command = ["git", "grep", "-nE", "^(<{7}|>{7}) "]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1, found.stdout + found.stderr
