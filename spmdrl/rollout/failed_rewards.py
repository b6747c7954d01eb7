"""Log the samples that are left out because their reward failed."""

from __future__ import annotations

import logging
from collections import Counter

from spmdrl.rollout.episode import FinishedEpisode, failure_text

log = logging.getLogger(__name__)

_MOST_KINDS = 20
_OTHER = "another kind"


class FailedRewardLog:
    """Logs the failed rewards of one replica.

    It logs the first sample of each kind of failure in full, then the count of the kind at 10, 100,
    1000 and so on.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, sample: FinishedEpisode, *, where: str) -> None:
        """Count a sample whose reward failed, and log it if it is the first of its kind."""
        # The failure and the first two parts of its message, e.g. `error: score: KeyError`.
        words = sample.reward.message.split(": ")[:2]
        kind = ": ".join([str(sample.reward.failure), *(word[:60] for word in words)])
        if kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            kind = _OTHER  # a user's function may raise a new message for every sample
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            log.warning("%s: left out: %s", where, failure_text(sample))
        # 10, 100, 1000, ...
        elif count >= 10 and str(count).strip("0") == "1":
            log.warning("%s: %d samples of this replica left out so far: %s", where, count, kind)
