"""What mkdocs needs to make a site of these pages: `make docs`.

Pages link to files all over the repository, as on GitHub. Each file that a page links to becomes a
page or a picture of the site, and the links are written again. The navigation is the table of
README.md. Two pages are made from the program: all settings and all commands.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

import docstring_parser
from mkdocs.structure.files import File

from spmdrl.__main__ import _COMMANDS
from spmdrl.config import Config, flatten
from spmdrl.config.tree import fields_of, sections, settings, type_text

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_ROW = re.compile(r"^\| (?:\*\*(?P<section>.+?)\*\*|\[.*?\]\((?P<link>\S+)\)) \|", re.M)
_PICTURES = (".png", ".svg")
_SETTINGS = "reference/settings.md"
_COMMANDS_PAGE = "reference/commands.md"


def on_config(config: Any) -> Any:
    """Write the navigation from the table of README.md."""
    nav: list[dict[str, Any]] = [{"Documentation": "README.md"}]
    nav.append({"Overview": _page("README.md")})
    for row in _ROW.finditer((ROOT / "docs/README.md").read_text()):
        if row["section"]:
            nav.append({row["section"]: []})
        else:
            last = nav[-1]
            (title,) = last
            last[title].append(_page(_in_repository(row["link"], "docs/README.md")))
    nav[-1]["Reference"] += [_SETTINGS, _COMMANDS_PAGE]
    results = sorted((ROOT / "benchmarks/results").rglob("*.md"))
    nav.append({"Measured": [_page(str(path.relative_to(ROOT))) for path in results]})
    config.nav = nav
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add every file of the repository that a page links to, and the pages of the program."""
    made = {_SETTINGS: settings_page(), _COMMANDS_PAGE: commands_page()}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    waiting = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")]
    waiting += [str(p.relative_to(ROOT)) for p in (ROOT / "benchmarks/results").rglob("*.md")]
    waiting += ["README.md"]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if not name.startswith("docs/"):
            files.append(_file(name, config))
        if name.endswith(".md"):
            waiting += [link for link in _links((ROOT / name).read_text(), name)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write the links of a page again, from the repository's paths to those of the site."""
    source = _sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replaced(match: re.Match[str]) -> str:
        name = _in_repository(match[1], source)
        if not (ROOT / name).exists():
            return match[0]  # mkdocs says that it leads nowhere
        target = posixpath.relpath(_page(name), posixpath.dirname(page.file.src_uri) or ".")
        return f"]({target}{match[2] or ''})"

    return _LINK.sub(replaced, markdown)


def _in_repository(link: str, source: str) -> str:
    """Return the repository's path of what a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _links(text: str, source: str) -> list[str]:
    """Return the repository's paths of what a page links to, as far as they exist."""
    found = {_in_repository(match[1], source) for match in _LINK.finditer(text)}
    return sorted(name for name in found if (ROOT / name).exists())


def _page(name: str) -> str:
    """Return the path in the site of a file or folder of the repository."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if (ROOT / name).is_dir():
        return f"repository/{name}/index.md"
    if name.endswith("/README.md") and name.count("/") == 1:
        return f"repository/{name.replace('/README', '')}"
    return f"repository/{name}" if name.endswith((".md", *_PICTURES)) else f"repository/{name}.md"


_sources: dict[str, str] = {}
"""{path in the site: path in the repository} of files outside docs/"""


def _file(name: str, config: Any) -> File:
    """Return a file of the repository as one of the site: source code as a page that shows it, and
    a folder as a list of its pages."""
    path = ROOT / name
    uri = _page(name)
    _sources[uri] = name
    if name.endswith(_PICTURES):
        return File.generated(config, uri, abs_src_path=str(path))
    if path.is_dir():
        _sources[uri] = f"{name}/index.md"
        inside = [p for p in sorted(path.iterdir()) if p.suffix == ".md"]
        text = f"# {name}\n\n" + "\n".join(f"- [{p.name}]({p.name})" for p in inside)
    elif path.suffix == ".md":
        text = path.read_text()
    else:
        fence = "````"
        text = f"# {path.name}\n\n`{name}`\n\n{fence}{path.suffix[1:]}\n{path.read_text()}{fence}\n"
    return File.generated(config, uri, content=text)


def settings_page() -> str:
    """Return the page of all settings, from the fields and their docstrings."""
    lines = ["# Settings", "", "Each is a flag of train.py, and a key of its YAML.", ""]
    defaults = flatten(Config())
    for section, cls in sections().items():
        own = fields_of(section)
        docs = {
            param.arg_name: param.description
            for param in docstring_parser.parse_from_object(cls).params
        }
        lines += [f"## `{section}`" if section else "## Without a section", ""]
        lines += [" ".join((cls.__doc__ or "").split()), ""]
        lines += (
            ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"] if own else []
        )
        for name in own:
            said = " ".join((docs.get(name.rpartition(".")[2]) or "").split())
            kind = type_text(settings()[name]).replace("|", ", ")
            default = json.dumps(defaults[name])
            lines.append(
                f"| `{name.rpartition('.')[2]}` | {_cell(kind)} | `{default}` | {_cell(said)} |"
            )
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """Return the page of all commands, from their modules' docstrings."""
    lines = ["# Commands", "", "`python -m spmdrl NAME --help` shows the options.", ""]
    for name, path in _COMMANDS.items():
        first, _, rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")
        code = "\n".join(f"    {line}".rstrip() for line in rest.strip("\n").splitlines())
        lines += [f"## {name}", "", first, "", code, ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return text for a cell of a table, with characters that would be read as HTML escaped."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")
