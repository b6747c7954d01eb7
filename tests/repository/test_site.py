"""The site of the pages builds without warnings, links and pictures in place, without a network."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv/docs"

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="mkdocs is not installed: `make docs` installs it"
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess:
    own = {"PYTHONPATH": f"{PACKAGES}{os.pathsep}{ROOT}", "NO_MKDOCS_2_WARNING": "1"}
    # Addresses where nothing answers: what would use the network fails.
    own |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_of_docs_is_in_the_navigation(site):
    start = (site / "index.html").read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {name for name in pages if f'href="{name}/"' not in start} == set()
    for title in ("Start", "Reference", "Measured"):
        assert f">\n    {title}\n" in start or re.search(rf">\s*{title}\s*<", start), title


def test_links_into_the_repository_become_pages_of_the_site(site):
    assert 'href="repository/benchmarks/results/demo/"' in (site / "index.html").read_text()
    shown = (site / "repository/train.py/index.html").read_text()
    assert "source" in shown and "generate" in shown
    from_verl = (site / "from_verl/index.html").read_text()
    assert 'href="../repository/spmdrl/tools/import_config/verl/"' in from_verl
    assert (site / "repository/benchmarks/results/demo_seed0.png").is_file()


def test_the_reference_has_all_settings_and_commands(site):
    page = (site / "reference/settings/index.html").read_text()
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert "algorithm.kl_control" in text and "Advantage estimator." in text
    assert "prompts_per_step" in text and "{clip_low: 0.2, clip_high: 0.28}" in text
    commands = (site / "reference/commands/index.html").read_text()
    assert 'id="import_config"' in commands and "python -m spmdrl what-if" in commands


def test_no_page_loads_anything_from_elsewhere(site):
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^\"]*")
    for page in site.rglob("*.html"):
        found = [tag for tag in loads.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert found == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?:|@import \"?https?:", style.read_text()), style
