"""How scored tokens were drawn, where that is more than a temperature that all share.

Shape letters: N scored tokens, n of them in a chunk, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.config import Penalties
from spmdrl.model.history import History, penalise
from spmdrl.model.kept_mask import KeptMask

_NEVER = -1e30  # finite: its product with a probability of 0 is 0


@dataclass(frozen=True)
class DrawRules:
    """Of N scored tokens."""

    kept: KeptMask | None = None
    """The ids that each was drawn among; None: all."""
    history: History | None = None
    """What came before each, for penalties; None: there are none."""

    def apply(
        self, logits: Tensor, part: slice, *, penalties: Penalties, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Apply penalties.

        Args:
            logits: [n, V] float32, before temperature, of ids from `first` on.
            part: the chunk, of consecutive tokens.
            penalties: of all tokens, if they have a history.
        Returns: see `penalise`.
        """
        if self.history is None:
            return logits, None
        where = dict(first=first, width=logits.shape[1])
        came = counts = None
        if penalties.repetition != 1:
            came = self.history.all.counts(part, **where) > 0
        if penalties.counts_response:
            counts = self.history.response.counts(part, **where)
        return penalise(logits, penalties, came=came, counts=counts, first=first)

    def drop(self, logits: Tensor, part: slice, *, first: int) -> Tensor | None:
        """Make the logits of ids that were not kept next to nothing, in place.

        Args: see `apply`; over temperature.
        Returns: [n, V] bool, which these are; None for none.
        """
        if self.kept is None:
            return None
        dropped = self.kept.dropped(part, first=first, width=logits.shape[1])
        logits.masked_fill_(dropped, _NEVER)
        return dropped
