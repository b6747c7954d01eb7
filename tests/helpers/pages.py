"""What stands in a run's page."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any


def part_of(page: Path, key: str) -> Any:
    """Return the value of a part of a page, such as `main` or `rollouts-0-12`."""
    (found,) = re.findall(f'id="part-{key}">([^<]*)</script>', page.read_text())
    return json.loads(gzip.decompress(base64.b64decode(found)))


def parts_of(page: Path) -> list[str]:
    """Return the keys of a page's parts."""
    return re.findall(
        r'<script type="application/octet-stream" id="part-([^"]*)">', page.read_text()
    )
