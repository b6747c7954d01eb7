"""Which rows each step takes: a pure function of (seed, epoch), and of the step if sources have
weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy

from spmdrl.errors import Refusal

_PERIOD = 10_000
"""Places after which the pattern of sources repeats, so that shares are exact to 1 in 10,000."""


class RowOrder:
    """An endless order of rows."""

    def __init__(self, num_rows: int, *, per_step: int, seed: int, shuffle: bool):
        self.num_rows = num_rows
        self.per_step = per_step
        self.seed = seed
        self.shuffle = shuffle

    def at(self, step: int) -> list[int]:
        """Return the row positions of `step`."""
        begin = step * self.per_step
        return [self.row(place) for place in range(begin, begin + self.per_step)]

    def row(self, place: int) -> int:
        """Return the row position at a place of the order of all steps."""
        raise NotImplementedError

    def check_num_rows(self, saved: int) -> None:
        """Raise Refusal if a checkpoint was saved with another number of rows."""
        if saved != self.num_rows:
            raise Refusal(
                f"data.train: has {self.num_rows} usable rows and had {saved} when the checkpoint "
                "was saved, so later steps would take other rows; put the old rows back, or "
                "continue with the new ones by --checkpoint.allow-config-change"
            )


class Order(RowOrder):
    """Epoch after epoch, each a permutation by (seed, epoch).

    A step that crosses the end of an epoch continues in the next, so that every row is taken
    equally often.

    Args:
        source: number of the source with these rows, so that sources have different orders; None
            if all sources share one order.
    """

    def __init__(
        self, num_rows: int, *, per_step: int, seed: int, shuffle: bool, source: int | None = None
    ):
        if per_step > num_rows:
            raise Refusal(
                f"batch.prompts_per_step: {per_step} is above the {num_rows} usable rows of "
                "data.train, so one step would repeat rows; lower it or give more rows"
            )
        super().__init__(num_rows, per_step=per_step, seed=seed, shuffle=shuffle)
        # SeedSequence takes no negative number.
        self._key = [seed % 2**64]
        # Sources count from 1: WeightedOrder shuffles the places of a step by (seed, 0, step).
        if source is not None:
            self._key.append(1 + source)
        # Two, since a step may cross the end of an epoch.
        self._epoch = functools.lru_cache(maxsize=2)(self._permutation)

    def row(self, place: int) -> int:
        """Return the row position at a place of the endless order of all epochs."""
        epoch, i = divmod(place, self.num_rows)
        return int(self._epoch(epoch)[i])

    def _permutation(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.num_rows)
        return _random(*self._key, epoch).permutation(self.num_rows)


class WeightedOrder(RowOrder):
    """The order of sources that have weights.

    Every step has each source's share of its rows, to the nearest row, in random places. Each
    source goes through its rows in an order of its own, epoch after epoch.

    Args:
        sizes: rows of each source; positions count one source after the other.
        weights: of each, above 0.
        names: of the sources, for messages.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        names: Sequence[str],
        per_step: int,
        seed: int,
        shuffle: bool,
    ):
        super().__init__(sum(sizes), per_step=per_step, seed=seed, shuffle=shuffle)
        self._pattern = _pattern(weights)
        # [place, source]: how many places of the period before this one are of a source.
        taken = numpy.eye(len(sizes), dtype=numpy.int64)[self._pattern].cumsum(0)
        self._before = numpy.concatenate([numpy.zeros((1, len(sizes)), numpy.int64), taken])
        self._begins = [sum(sizes[:i]) for i in range(len(sizes))]
        most = self._most_per_step()
        for name, size, count in zip(names, sizes, most):
            if count > size:
                raise Refusal(
                    f"data.train: {name} has {size} usable rows, and its weight gives it up to "
                    f"{count} of the {per_step} prompts of a step (batch.prompts_per_step), so one "
                    "step would repeat rows; lower its weight or give it more rows"
                )
        # Without rows per step: the check above has found that no step repeats a row.
        self._orders = [
            Order(size, per_step=0, seed=seed, shuffle=shuffle, source=i)
            for i, size in enumerate(sizes)
        ]
        self._step = functools.lru_cache(maxsize=4)(self._rows)

    def row(self, place: int) -> int:
        """Return the row position at a place of the endless order of all steps."""
        step, slot = divmod(place, self.per_step)
        return self._step(step)[slot]

    def _rows(self, step: int) -> list[int]:
        begin = step * self.per_step
        sources = self._pattern[(begin + numpy.arange(self.per_step)) % _PERIOD]
        if self.shuffle:
            sources = _random(self.seed % 2**64, 0, step).permutation(sources)
        taken = self._taken(begin)
        rows = []
        for source in sources.tolist():
            row = self._orders[source].row(taken[source])
            rows.append(self._begins[source] + row)
            taken[source] += 1
        return rows

    def _taken(self, place: int) -> list[int]:
        """Return how many places before this one are of each source."""
        periods, rest = divmod(place, _PERIOD)
        return [
            periods * whole + part
            for whole, part in zip(self._before[-1].tolist(), self._before[rest].tolist())
        ]

    def _most_per_step(self) -> list[int]:
        """Return the largest number of rows that a step can have of each source."""
        begins = numpy.arange(_PERIOD)
        periods, rest = numpy.divmod(begins + self.per_step, _PERIOD)
        after = periods[:, None] * self._before[-1] + self._before[rest]
        return (after - self._before[begins]).max(0).tolist()


def _pattern(weights: Sequence[float]) -> numpy.ndarray:
    """Return the source of each place of a period, [places] int64: always the source that lacks
    most of its share."""
    shares = numpy.asarray(weights, numpy.float64) / sum(weights)
    found: numpy.ndarray = numpy.zeros(_PERIOD, numpy.int64)
    counts = numpy.zeros(len(shares))
    for place in range(_PERIOD):
        source = int(numpy.argmax(shares * (place + 1) - counts))
        found[place] = source
        counts[source] += 1
    return found


def _random(*key: int) -> numpy.random.Generator:
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(key)))
