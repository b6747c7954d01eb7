"""Looks for names that are no local folder on the hub: once, with a short deadline.

The hub's own client would try for a minute, at each file, if the hub does not answer. For
huggingface_hub 1 and 2.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Literal

from spmdrl.errors import Refusal

log = logging.getLogger(__name__)

Kind = Literal["model", "dataset"]
_DEADLINE_S = 5.0
_ABSENT = (401, 404)  # 401: the hub does not say whether a private repository exists
_MARKS: dict[Kind, str] = {"model": "config.json", "dataset": "README.md"}
"""A file that is in the cache if a repository is."""


def find_on_hub(name: str, *, field: str, kind: Kind = "model") -> None:
    """Check that a name is a folder, or may be in the cache or on the hub.

    If the hub is out of reach, this sets its client to use only the cache.

    Args:
        field: the setting that holds the name, for messages.
    Raises: Refusal if it is neither, or is not in the cache and the hub does not answer.
    """
    if Path(name).expanduser().is_dir():
        return
    if problem := _problem(name, kind):
        raise Refusal(
            f"{field}: there is no folder {name!r} here (looked from {Path.cwd()}), and none in "
            f"the hub's cache; {problem}"
        )


@functools.cache
def _problem(name: str, kind: Kind) -> str:
    """Return why a name cannot be loaded from the hub; empty if it may be."""
    from huggingface_hub import constants

    is_cached = _is_cached(name, kind)
    if constants.HF_HUB_OFFLINE:
        return "" if is_cached else "HF_HUB_OFFLINE is set, so the hub is not asked"
    status, failure = _request(f"{constants.ENDPOINT}/api/{kind}s/{name}")
    if status in _ABSENT and not is_cached:
        return (
            f"{constants.ENDPOINT} has no {kind} {name!r} that can be read (status {status}); for "
            "a private one log in by `hf auth login` or HF_TOKEN"
        )
    if not failure:
        return ""
    if is_cached:
        log.warning("%s: %s; %s is taken from the cache", constants.ENDPOINT, failure, name)
        constants.HF_HUB_OFFLINE = True
        return ""
    hint = "give a folder's path, or fetch it where there is a network"
    return f"{constants.ENDPOINT}: {failure}; {hint}"


def _is_cached(name: str, kind: Kind) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, _MARKS[kind], repo_type=kind), str)
    except HFValidationError:  # it is no valid name: the hub's answer says so
        return False


def _request(url: str) -> tuple[int, str]:
    """Return the status of the hub's answer, 0 for none, and why there is none."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers

    try:
        answer = get_session().get(url, headers=build_hf_headers(), timeout=_DEADLINE_S)
    except Exception as error:  # of the HTTP library, names, proxies or tokens
        text = str(error).partition("\n")[0]
        why = f"{type(error).__name__}: {text:.100}"
        return 0, f"the hub did not answer in {_DEADLINE_S:g} s ({why})"
    return answer.status_code, ""
