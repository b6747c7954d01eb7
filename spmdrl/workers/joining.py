"""Join the results of several calls to the reward of a sample: for it, its group, its step."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spmdrl.rewards.samples import SCOPES, RewardList, RewardSample, Scope
from spmdrl.workers.messages import Done, ListResult, RewardResult


@dataclass(frozen=True)
class Call:
    """The samples that one job scores."""

    scope: Scope
    keys: tuple[Hashable, ...]
    """Keys of the samples, in order."""
    what: str
    """Origin of the samples, for messages: `data row 3`."""


@dataclass
class _PartialReward:
    """A sample with calls that are not done."""

    sample: RewardSample
    what: str
    position: int
    results: dict[Scope, RewardResult] = field(default_factory=dict)


class ResultJoiner:
    """Collects the results for the samples of a pool, and joins them.

    Args:
        otherwise_scored: sources whose samples also get a reward from a model or an environment. If
            no function applies to such a sample, the functions give it 0. For a sample of any other
            source, this is a failure.
    """

    def __init__(self, *, otherwise_scored: Collection[int] = ()):
        self._otherwise_scored = frozenset(otherwise_scored)
        self._partial: dict[Hashable, _PartialReward] = {}
        self._groups: dict[Hashable, list[Hashable]] = {}  # {group that is not closed: keys}

    def add(
        self, key: Hashable, sample: RewardSample, *, group: Hashable, what: str, position: int = 0
    ) -> Call:
        """Add a sample and return the call that scores it alone.

        Args:
            group: to be closed later; None if no function scores groups.
            position: its place in the group.
        """
        self._partial[key] = _PartialReward(sample, what, position)
        if group is not None:
            self._groups.setdefault(group, []).append(key)
        return Call("sample", (key,), what)

    def close(self, group: Hashable) -> tuple[Call, RewardList] | None:
        """Return the call that scores the samples of a group together; None without samples.

        The samples are in the order of their positions, not that in which they were added: short
        ones finish first.
        """
        keys = self._groups.pop(group, [])
        if not keys:
            return None
        keys.sort(key=lambda key: self._partial[key].position)
        samples = tuple(self._partial[key].sample for key in keys)
        call = Call("group", tuple(keys), self._partial[keys[0]].what)
        return call, RewardList("group", samples)

    def add_result(
        self, call: Call, done: Done, *, scopes: Collection[Scope], awaits_step: bool = False
    ) -> list[RewardResult]:
        """Add the result of a call, and return the rewards that are complete now.

        Args:
            scopes: of the calls that each sample needs.
            awaits_step: whether functions of whole steps follow. Then it is not yet a failure if no
                function applied.
        """
        rewards = []
        for key, result in zip(call.keys, _results_of(call, done)):
            partial = self._partial[key]
            partial.results[call.scope] = result
            if not set(scopes) <= partial.results.keys():
                continue
            del self._partial[key]
            results = [partial.results[scope] for scope in SCOPES if scope in partial.results]
            least = 0.0 if awaits_step else self._least(partial.sample.source)
            rewards.append(replace(_join(results, least=least), key=key))
        return rewards

    def with_step(
        self,
        call: Call,
        done: Done,
        *,
        rewards: Mapping[str, RewardResult],
        sources: Mapping[str, int],
    ) -> dict[str, RewardResult]:
        """Return rewards joined with the result of a call for their whole step.

        Args:
            sources: of the samples.
        """
        joined = {}
        for key, result in zip(map(str, call.keys), _results_of(call, done)):
            reward = rewards[key]
            if not reward.parts:  # no function applied, so its value 0 is no reward
                reward = replace(reward, value=None)
            whole = _join([reward, result], least=self._least(sources[key]))
            joined[key] = replace(whole, key=reward.key)
        return joined

    def _least(self, source: int) -> float | None:
        """Return the reward of a sample to which no function applies; None if that is a failure."""
        return 0.0 if source in self._otherwise_scored else None


def _join(results: Sequence[RewardResult], *, least: float | None) -> RewardResult:
    """Return the sum of results, or the first failure.

    Args:
        least: see `_least`.
    """
    seconds = sum(result.seconds for result in results)
    retries = sum(result.retries for result in results)
    for result in results:
        if result.failure:
            return replace(result, seconds=max(seconds, result.seconds), retries=retries)
    values = [result.value for result in results if result.value is not None]
    if not values and least is None:
        called = " and ".join(result.message for result in results if result.message)
        why = f"{called} for this row; one reward function at least must apply"
        return RewardResult(
            None, seconds=seconds, failure="bad_value", message=why, retries=retries
        )
    joined = RewardResult(None, sum(values) if values else least, seconds=seconds, retries=retries)
    for result in results:
        joined.parts.update(result.parts)
        joined.metrics.update(result.metrics)
        joined.extras.update(result.extras)
    return joined


def _results_of(call: Call, done: Done) -> list[RewardResult]:
    """Return the result of a call for each of its samples. If the call failed, all of them fail."""
    count = len(call.keys)
    failure = done.failure
    message = done.message
    results = done.result.results if isinstance(done.result, ListResult) else (done.result,)
    if failure is None and len(results) != count:
        failure = "error"
        message = f"the worker answered for {len(results)} of {count} samples"
    if failure is not None:
        if count > 1:
            message += f" (called with {count} samples of a {call.scope}; all of them fail)"
        failed = RewardResult(None, seconds=done.seconds, failure=failure, message=message)
        found = [failed] * count
    else:
        seconds = done.seconds / count  # the samples share the time of the call
        found = [replace(r, seconds=seconds) for r in results if isinstance(r, RewardResult)]
    # Retries belong to the call: the first sample has them, so that their sum is right.
    found[0] = replace(found[0], retries=done.retries)
    return found
