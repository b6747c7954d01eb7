"""One reward of a sample from the calls that score it: alone, and beside others of its group."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spmdrl.rewards.samples import SCOPES, RewardList, RewardSample, Scope
from spmdrl.workers.messages import Done, ListResult, RewardResult

NONE_APPLIES = "every reward function returned None for this row; one at least must apply"


@dataclass(frozen=True)
class Call:
    """What one job scores."""

    scope: Scope
    keys: tuple[Hashable, ...]
    """Of the samples, in order."""
    what: str
    """Where they are from, for messages: `data row 3`."""


@dataclass
class _Awaited:
    """A sample that is not scored by all yet."""

    sample: RewardSample
    what: str
    position: int
    found: dict[Scope, RewardResult] = field(default_factory=dict)


class Joining:
    """The samples of a pool, and what is known of their rewards.

    Args:
        otherwise_scored: sources whose samples have a reward of 0 where no function applies,
            beside another's; elsewhere that is a failure.
    """

    def __init__(self, *, otherwise_scored: Collection[int] = ()):
        self._otherwise_scored = frozenset(otherwise_scored)
        self._awaited: dict[Hashable, _Awaited] = {}
        self._groups: dict[Hashable, list[Hashable]] = {}  # keys of those not closed yet

    def add(
        self, key: Hashable, sample: RewardSample, *, group: Hashable, what: str, position: int = 0
    ) -> Call:
        """Take a sample in; return the call that scores it alone.

        Args:
            group: which is closed later; None where no function scores groups.
            position: its place in the group.
        """
        self._awaited[key] = _Awaited(sample, what, position)
        if group is not None:
            self._groups.setdefault(group, []).append(key)
        return Call("sample", (key,), what)

    def close(self, group: Hashable) -> tuple[Call, RewardList] | None:
        """Return the call that scores a group's samples together, in their order and not in that
        in which they came to their ends: the short ones came first. None of a group without any."""
        keys = sorted(self._groups.pop(group, []), key=lambda key: self._awaited[key].position)
        own = {key: self._awaited[key] for key in keys}
        if not own:
            return None
        what = next(iter(own.values())).what
        samples = tuple(a.sample for a in own.values())
        return Call("group", tuple(own), what), RewardList("group", samples)

    def scored(
        self, call: Call, done: Done, *, scopes: Collection[Scope], awaits_step: bool = False
    ) -> list[RewardResult]:
        """Note what a call came to; return the rewards that are known now.

        Args:
            scopes: in which each sample is scored.
            awaits_step: functions of whole steps come behind: that none applied is no failure yet.
        """
        for key, result in zip(call.keys, _of_each(call, done)):
            self._awaited[key].found[call.scope] = result
        whole = [key for key in call.keys if self._awaited[key].found.keys() >= set(scopes)]
        rewards = []
        for key in whole:
            awaited = self._awaited.pop(key)
            found = [awaited.found[scope] for scope in SCOPES if scope in awaited.found]
            least = 0.0 if awaits_step else self._least(awaited.sample.source)
            rewards.append(replace(_joined(found, least=least), key=key))
        return rewards

    def added(
        self,
        call: Call,
        done: Done,
        *,
        rewards: Mapping[str, RewardResult],
        sources: Mapping[str, int],
    ) -> dict[str, RewardResult]:
        """Return rewards with what a call on top of them came to.

        Args:
            sources: that the samples are of.
        """
        of_each = zip(call.keys, _of_each(call, done))
        joined = {}
        for key, result in of_each:
            so_far = rewards[str(key)]
            if not so_far.parts:  # 0 because nothing had scored it yet
                so_far = replace(so_far, value=None)
            least = self._least(sources[str(key)])
            joined[str(key)] = replace(_joined([so_far, result], least=least), key=so_far.key)
        return joined

    def _least(self, source: int) -> float | None:
        """Return the reward of a sample to which no function applies; None: it fails."""
        return 0.0 if source in self._otherwise_scored else None


def _joined(found: Sequence[RewardResult], *, least: float | None) -> RewardResult:
    seconds = sum(result.seconds for result in found)
    retries = sum(result.retries for result in found)
    failed = next((result for result in found if result.failure), None)
    if failed is not None:
        return replace(failed, seconds=max(seconds, failed.seconds), retries=retries)
    values = [result.value for result in found if result.value is not None]
    if not values and least is None:
        return RewardResult(
            None, seconds=seconds, failure="bad_value", message=NONE_APPLIES, retries=retries
        )
    joined = RewardResult(None, sum(values) if values else least, seconds=seconds, retries=retries)
    for result in found:
        joined.parts.update(result.parts)
        joined.metrics.update(result.metrics)
        joined.extras.update(result.extras)
    return joined


def _of_each(call: Call, done: Done) -> list[RewardResult]:
    """Return what a call came to, for each of its samples."""
    count = len(call.keys)
    failure = done.failure
    message = done.message
    results = done.result.results if isinstance(done.result, ListResult) else (done.result,)
    if failure is None and len(results) != count:
        failure = "error"
        message = f"the worker answered for {len(results)} of {count} samples"
    if failure is not None:
        if count > 1:
            message += f" (called with {count} samples of a {call.scope}, which all fail by it)"
        failed = RewardResult(None, seconds=done.seconds, failure=failure, message=message)
        found = [failed] * count
    else:
        seconds = done.seconds / count  # of the call, shared out
        found = [replace(r, seconds=seconds) for r in results if isinstance(r, RewardResult)]
    found[0] = replace(found[0], retries=done.retries)
    return found
