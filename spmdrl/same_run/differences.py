"""In what two runs differ. Does not load torch, so that settings can be checked without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.config import Config, flatten

Made = Mapping[str, Mapping[str, Any]]
"""What a run is made of, {section: {name: value}}, see `made_of`; a part of it will do."""
_WORDS = {
    "packages": "version of package",
    "code": "code of",
    "machine": "machine's",
    "model": "model's",
}
"""{section: words before its names in messages}; fields of the config have none."""
_MISSING = "none"


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in two runs."""

    section: str
    name: str
    there: Any
    now: Any

    @property
    def what(self) -> str:
        """Return what differs, for people: `optimizer.lr`, `version of package torch`."""
        return f"{_WORDS.get(self.section, '')} {self.name}".strip()

    def __str__(self) -> str:
        return f"{self.what}: {self.there!r} there, {self.now!r} now"


def config_of(cfg: Config) -> dict[str, Any]:
    """Return {field: value} of a config, without output_dir: a run may be moved."""
    # Through JSON, which makes lists of tuples, so it equals a config that was read from a file.
    fields: dict[str, Any] = json.loads(json.dumps(flatten(cfg)))
    del fields["output_dir"]
    return fields


def differences(there: Made, now: Made, *, may_differ: Sequence[str] = ()) -> list[Difference]:
    """Return in what two runs differ, by section and name.

    A section that only one of them has is not compared. If one of them lacks a field of the config,
    because its program did not have this field, the default stands for it.

    Args:
        may_differ: names that are not compared, see `is_among`.
    """
    defaults = config_of(Config())
    found = []
    for section in now:
        if section not in there:
            continue
        known = defaults if section == "config" else {}
        for name in sorted(there[section].keys() | now[section].keys()):
            missing = known.get(name, _MISSING)
            old = there[section].get(name, missing)
            new = now[section].get(name, missing)
            if old != new and not is_among(name, may_differ):
                found.append(Difference(section, name, old, new))
    return found


def is_among(name: str, fields: Sequence[str]) -> bool:
    """Return whether a list has a field's name, or that of its section, which ends in a dot."""
    return name in fields or name.startswith(tuple(one for one in fields if one.endswith(".")))
