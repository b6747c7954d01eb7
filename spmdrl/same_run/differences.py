"""The differences between what two runs are made of.

This does not load torch, so that settings can be checked without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.config import Config, flatten

RunParts = Mapping[str, Mapping[str, Any]]
"""What a run is made of, {section: {name: value}}, see `made_of`; or only some sections."""
_PREFIXES = {
    "packages": "version of package",
    "code": "code of",
    "data": "content of",
    "machine": "machine's",
    "model": "model's",
}
"""{section: words before its names in messages}; fields of the config have no prefix."""
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
        """Return a description, e.g. `optimizer.lr`, `version of package torch`."""
        return f"{_PREFIXES.get(self.section, '')} {self.name}".strip()

    def __str__(self) -> str:
        return f"{self.what}: {self.there!r} there, {self.now!r} now"


def config_of(cfg: Config) -> dict[str, Any]:
    """Return {field: value} of a config, without output_dir, because a run may be moved."""
    # Convert to JSON and back, so that tuples become lists as in a config that is read from a file.
    fields: dict[str, Any] = json.loads(json.dumps(flatten(cfg)))
    del fields["output_dir"]
    return fields


def differences(
    there: RunParts, now: RunParts, *, may_differ: Sequence[str] = ()
) -> list[Difference]:
    """Return the differences of two runs, by section and name.

    A section that only one of them has is not compared. If one run's program did not have a field
    of the config, the default is compared.

    Args:
        may_differ: names that are not compared, see `is_among`.
    """
    defaults = config_of(Config())
    result = []
    for section in now:
        if section not in there:
            continue
        known = defaults if section == "config" else {}
        for name in sorted(there[section].keys() | now[section].keys()):
            missing = known.get(name, _MISSING)
            old = there[section].get(name, missing)
            new = now[section].get(name, missing)
            if old != new and not is_among(name, may_differ):
                result.append(Difference(section, name, old, new))
    return result


def is_among(name: str, fields: Sequence[str]) -> bool:
    """Return whether `fields` has the name of a field, or of its section with a dot at the end."""
    return name in fields or name.startswith(tuple(one for one in fields if one.endswith(".")))
