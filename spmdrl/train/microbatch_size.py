"""How many tokens a micro-batch may have: found by forward and backward passes before training.

The ranks train on rows of growing size and discard the result: gradients, metrics, the routers'
counts and the random state are as before. A line through the last two peaks says how many tokens
fit into the free memory. Trainer ranks try the same sizes at the same time, since their collectives
must match, and all use the smallest of their answers.

Sequences of a row may have nothing in common, or groups may begin with a prompt that is computed
once. Both are tried, and the smaller size is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from spmdrl.config.fields import sequences_together, useful_tokens
from spmdrl.data.microbatch_plan import room_of
from spmdrl.data.prefix_tree import LEAST, surely_of
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.types import Advantages, Batch, Microbatch, Scalars
from spmdrl.world.machine.live_bytes import free_bytes, peak_bytes
from spmdrl.world.world import World

log = logging.getLogger(__name__)

ROOM_FRAC = 0.9
"""Of the free memory that a micro-batch may take. The rest covers fragmentation in
the allocator, and rows whose sequences, or tokens to experts, fall less evenly."""
_STEP = 256  # tokens; the result is rounded down to a multiple

Rehearse = Callable[[Batch, Advantages], None]
"""Trains on a batch and discards the result."""


@dataclass(frozen=True)
class Point:
    """What was measured."""

    tokens: int
    bytes: int


def line(first: Point, second: Point) -> tuple[float, float]:
    """Return (a, b) of bytes = a + b * tokens through two points of different tokens."""
    slope = (second.bytes - first.bytes) / (second.tokens - first.tokens)
    return first.bytes - slope * first.tokens, slope


def fitting_tokens(first: Point, second: Point, *, room: float, most: int) -> int:
    """Return the tokens that `room` bytes hold by the line through two points, at most `most`."""
    constant, slope = line(first, second)
    # The larger row took no more memory, so the line says nothing about still larger ones.
    if slope <= 0:
        return most if second.bytes <= room else 0
    return max(0, min(most, int((room - constant) / slope)))


@dataclass(frozen=True)
class RowSequences:
    """What a micro-batch is full of."""

    length: int  # tokens of each
    group: int = 1  # sequences that begin with the same prompt
    prompt: int = 0  # tokens of this prompt, which are not in the loss

    def tokens(self, count: int) -> int:
        """Return how much of its budget a micro-batch of `count` sequences takes, in tokens."""
        pieces = -(-count // self.group)
        return pieces * self.length + (count - pieces) * self._of_another

    def fitting(self, budget: int) -> int:
        """Return how many sequences a micro-batch of so many tokens holds."""
        groups, left = divmod(budget, self.tokens(self.group))
        others = 1 + (left - self.length) // self._of_another if left >= self.length else 0
        return groups * self.group + others

    @property
    def _of_another(self) -> int:
        """Tokens of the budget that each sequence of a group takes after the first."""
        return room_of(self.length, surely_of(self.prompt))


def sequences_to_try(world: World, *, longest: int) -> Iterator[RowSequences]:
    """Yield what fills a micro-batch: first sequences that share nothing.

    Where groups share their prompt, a micro-batch computes fewer tokens and copies keys. Memory
    grows about linearly with both, so that it is largest with the longest or with the shortest
    responses.

    Args:
        longest: tokens of the longest sequence.
    """
    yield RowSequences(longest)
    cfg = world.cfg
    prompt = min(cfg.data.max_prompt_tokens, longest - 1)
    group = cfg.sequences_per_row
    if world.shares_prefixes and group > 1 and prompt >= LEAST:
        yield RowSequences(longest, group, prompt)
        yield RowSequences(prompt + 1, group, prompt)


def make_rows(
    world: World, sequences: RowSequences, *, count: int, columns: Collection[str], vocab: int
) -> tuple[Batch, Advantages]:
    """Return two equal micro-batches of `count` sequences, the same on every trainer rank.

    There are two, so that the second one runs while the gradients of the first are in memory. All
    tokens but a sequence's first and its shared prompt are in the loss, which takes the most
    memory.

    Args:
        columns: that `Trainer.annotate` would add; zeros here.
    """
    device = world.device
    length = sequences.length
    total = count * length
    rows = 2 * count
    ids = torch.arange(rows)
    # Of a few thousand different tokens, in no order, so that routers spread them.
    each = (torch.arange(total) * 7919 % 65521 % vocab).view(count, length)
    first_of_group = torch.arange(count) // sequences.group * sequences.group
    each[:, : sequences.prompt] = each[first_of_group, : sequences.prompt]
    tokens = each.flatten().to(device)
    positions = torch.arange(length, device=device).repeat(count)
    is_sampled = positions >= max(1, sequences.prompt)
    scalars = Scalars(
        lengths=torch.full((rows,), length),
        response_lengths=torch.full((rows,), length - 1),
        group_ids=ids // 2,
        sample_ids=ids % 2,
        rewards=torch.zeros(rows, dtype=torch.float64),
        is_truncated=torch.zeros(rows, dtype=torch.bool),
        is_valid=torch.ones(rows, dtype=torch.bool),
        min_versions=torch.zeros_like(ids),
    )
    microbatches = tuple(
        Microbatch(
            tokens=tokens,
            position_ids=positions,
            cu_seqlens=torch.arange(0, total + 1, length, dtype=torch.int32, device=device),
            response_mask=is_sampled,
            rollout_logprobs=torch.zeros(total, device=device),
            policy_versions=is_sampled.long() - 1,
            sequence_ids=own.to(device),
        )
        for own in ids.split(count)
    )
    zeros = torch.zeros(total, device=device)
    # `annotate` adds these two together with the old logprobs.
    names = {*columns} | ({"old_entropy", "square_probs"} if "old_logprobs" in columns else set())
    batch = Batch(
        scalars=scalars,
        updates=(microbatches,),
        update_ids=torch.zeros_like(ids),
        columns=(tuple(dict.fromkeys(names, zeros) for _ in microbatches),),
    )
    ones = tuple(zeros.double() + 1 for _ in microbatches)
    return batch, Advantages((ones,), (tuple(map(torch.zeros_like, ones)),))


class SizeProbe:
    """Tries rows on a trainer rank, in step with the others.

    Args:
        columns, vocab: see `make_rows`.
        longest: tokens of the longest sequence.
    """

    def __init__(
        self,
        rehearse: Rehearse,
        world: World,
        *,
        columns: Collection[str],
        vocab: int,
        longest: int,
    ):
        self._rehearse = rehearse
        self._world = world
        self._columns = columns
        self._vocab = vocab
        self._unit = sequences_together(world.cfg)
        self._sequences = [*sequences_to_try(world, longest=longest)]
        self._longest = longest
        self._least = self._unit * longest
        self._most = useful_tokens(world.cfg)
        self._room = 0.0

    def find(self, shares: int) -> int:
        """Return the tokens of the largest micro-batch that fits; every trainer rank calls it.

        Args:
            shares: ranks that share this one's memory.
        Returns: at least the tokens of the longest sequence (pair), and at most those of a dp rank
            in one update; in between, a multiple of 256. The same on every trainer rank.
        Raises: Refusal when not even the longest sequence (pair) fits; RuntimeError on a rank that
            runs out of GPU memory, which it tells the others.
        """
        devices = [self._world.device] if self._world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return self._found(shares)

    def _found(self, shares: int) -> int:
        longest = self._longest
        # Small rows first: in them FSDP2 and the libraries allocate what they keep. They also say
        # whether the longest sequence can be tried at all.
        short = [max(2, longest // n) for n in (4, 2)]
        quarter, half = (self._measure(RowSequences(n), self._unit * n) for n in short)
        self._room = ROOM_FRAC * free_bytes(self._world.device) / shares
        constant, slope = line(quarter, half) if half.tokens > quarter.tokens else (half.bytes, 0)
        self._check(constant + slope * self._least)
        separate, *shared = self._sequences
        tokens = self._least
        largest = self._measure(separate, tokens)
        self._check(largest.bytes)
        points = {separate: (half, largest)}
        points |= {sequences: (half, self._measure(sequences, tokens)) for sequences in shared}
        # A line through larger rows is more exact, so sizes double as long as twice the size fits.
        while tokens < self._most and self._fitting(points.values()) >= 2 * tokens:
            tokens *= 2
            for sequences, (_, before) in points.items():
                points[sequences] = (before, self._measure(sequences, tokens))
        found = self._fitting(points.values())
        found = found if found == self._most else found // _STEP * _STEP
        return max(self._least, found)

    def _fitting(self, points: Iterable[tuple[Point, Point]]) -> int:
        """Return the tokens that fit by each of the pairs of points, the least of all trainer
        ranks."""
        own = min(self._fitting_by(*pair) for pair in points)
        # The least value is the largest negative one, with its sign changed back.
        return int(-self._most_of(-own))

    def _fitting_by(self, before: Point, last: Point) -> int:
        if last.tokens == before.tokens:
            return self._least
        return fitting_tokens(before, last, room=self._room, most=self._most)

    def _check(self, needed: float) -> None:
        """Raises: Refusal when the longest sequence (pair) does not fit on every rank."""
        short = self._most_of(needed - self._room)
        if short > 0:
            what = "pair of sequences" if self._unit == 2 else "sequence"
            raise Refusal(
                f"batch.tokens_per_microbatch: 0, and not even the longest {what}, "
                f"{self._least} tokens (data.max_prompt_tokens + sampling.max_response_tokens), "
                f"fits: a forward and backward pass takes about {_gib(needed)}, and of the free "
                f"memory {_gib(self._room)} may be used; {_gib(short)} are lacking on the "
                "fullest trainer rank. Use model.memory.activation_checkpointing full, more "
                "trainer ranks, layout.cp or tp, or shorter sequences"
            )

    def _most_of(self, own: float) -> float:
        largest = torch.tensor(float(own), dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._world.trainer_control)
        return float(largest)

    def _measure(self, sequences: RowSequences, budget: int) -> Point:
        """Train on a row that `sequences` fill, and return what it took."""
        count = sequences.fitting(budget) // self._unit * self._unit
        rows = make_rows(
            self._world, sequences, count=count, columns=self._columns, vocab=self._vocab
        )
        tokens = sequences.tokens(count)
        what = (
            f"batch.tokens_per_microbatch: 0, and {tokens} tokens (at least "
            f"{self._least} have to fit) ran out of memory"
        )
        hint = ". Set a number, or use model.memory.activation_checkpointing full"
        with refusing(what, torch.OutOfMemoryError, hint=hint, kind=RuntimeError):
            with peak_bytes(self._world.device) as peak:
                self._rehearse(*rows)
        found = Point(tokens, peak.bytes)
        row = f"micro-batch of {tokens} tokens"
        if sequences.prompt:
            row += f", in groups of {sequences.group} with one prompt of {sequences.prompt}"
        log.info("%s: %s at its peak", row, _gib(found.bytes))
        return found


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
