"""Which rows each step takes: a pure function of (seed, epoch)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy

from spmdrl.errors import Refusal


class Order:
    """Which rows each step takes: epoch after epoch, each a permutation by (seed, epoch).

    A step that crosses the end of an epoch goes on into the next, so that every row is taken
    equally often.
    """

    def __init__(self, num_rows: int, *, per_step: int, seed: int, shuffle: bool):
        if per_step > num_rows:
            raise Refusal(
                f"batch.prompts_per_step: {per_step} is above the {num_rows} usable rows of "
                "data.train, so one step would repeat rows; lower it or give more rows"
            )
        self.num_rows, self.per_step, self.seed, self.shuffle = num_rows, per_step, seed, shuffle
        self._epoch = functools.lru_cache(maxsize=2)(self._permutation)

    def at(self, step: int) -> list[int]:
        """Return the row positions of `step`."""
        begin = step * self.per_step
        return [self.row(place) for place in range(begin, begin + self.per_step)]

    def row(self, place: int) -> int:
        """Return the row position at a place of the endless order of all epochs."""
        epoch, i = divmod(place, self.num_rows)
        return int(self._epoch(epoch)[i])

    def _permutation(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.num_rows)
        entropy = numpy.random.SeedSequence([self.seed % 2**64, epoch])
        return numpy.random.Generator(numpy.random.PCG64(entropy)).permutation(self.num_rows)
