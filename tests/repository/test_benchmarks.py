"""Pages of results name what was measured."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_names_commits_that_are_there(page):
    if _git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a whole repository")
    text = page.read_text()
    named = set(re.findall(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}\b", text))
    assert named, "it names no commit"
    # A commit from before a rebase is not in a clone.
    missing = [n for n in named if _git("merge-base", "--is-ancestor", n, "HEAD").returncode]
    assert not missing
