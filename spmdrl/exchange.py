"""Send rollouts to trainer ranks: gather the scalars, plan on every rank, move the tokens once.

Every rank waits in `exchange` for all others. All ranks compute the same plan from the same
scalars. Letters: S sequences of the whole batch, N sequences of one rank, T packed tokens, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.columns import AllToAll, RouterRoutes, TokenColumn, column_class
from spmdrl.data.microbatch_plan import Partition, partition
from spmdrl.data.prefix_tree import by_prefix, surely_shared
from spmdrl.errors import Refusal, RewardFailed
from spmdrl.plain import pack, unpack
from spmdrl.types import Batch, Microbatch, Rollouts, Scalars, Sums, Tokens, join_sums, round_sums
from spmdrl.world.comm import gather_bytes, gather_sizes
from spmdrl.world.world import World


@dataclass(frozen=True)
class _GatheredBatch:
    """What all ranks know of the batch before the tokens are sent."""

    scalars: Scalars  # [S], sorted by (group, sample, trace)
    sources: Tensor  # [S] int64, rank that holds the sequence
    positions: Tensor  # [S] int64, position of the sequence on that rank
    sums: Sums
    samples: tuple[dict, ...]
    columns: dict[str, TokenColumn]
    """This rank's extra columns, with the keys of all ranks."""
    plan_order: Tensor
    """[S] int64, the sequences in the order in which they are planned: those of a group that share
    a prefix are neighbours."""
    shared: Tensor
    """[S] int64, in that order: tokens that a sequence surely shares with the one before it, of its
    group."""

    @property
    def added_cost(self) -> Tensor | None:
        """Return the cost of training beyond the sequences' own tokens: [S] int64, in tokens.

        None if there is no such cost.
        """
        total = None
        for column in self.columns.values():
            cost = column.training_cost(len(self.scalars))
            if cost is not None:
                total = cost if total is None else total + cost
        return total


class BatchSource(Protocol):
    """The members of a source that the exchange uses."""

    has_rewards: bool

    def take(self, step: int) -> Rollouts:
        """Return this rank's share of the batch of `step`."""

    def observe(self, batch: Batch, *, step: int) -> None:
        """Record the results of the whole batch of `step`."""


def exchange(source: BatchSource, world: World, *, step: int) -> Batch:
    """Take this rank's share of a step's batch and send it to the trainers.

    Then the source observes the whole batch, since later prompts may depend on it. See
    `exchange_rollouts`.
    """
    batch = exchange_rollouts(source.take(step), world, step=step)
    source.observe(batch, step=step)
    return replace(batch, has_rewards=source.has_rewards)


def exchange_rollouts(rollouts: Rollouts, world: World, *, step: int) -> Batch:
    """Send every trainer rank its micro-batches of this step, and every rank all scalars.

    Tensor-parallel ranks of one dp index get the same sequences. Invalid sequences are sent too,
    and the loss leaves them out.

    Args:
        rollouts: this rank's finished sequences, possibly none. Exactly one rank must hold each
            (group, sample, trace).
        step: for the names of the waits.
    Returns: the Batch, with micro-batches on world.device, which remember those on the host that
        they are copies of, and scalars on the CPU.
    Raises, on all ranks: RuntimeError if two ranks hold the same sequence or if there is no
        sequence; RewardFailed if no sequence is valid; Refusal for a valid reward that is not
        finite, a sequence without tokens, or one longer than batch.tokens_per_microbatch.
    """
    assert torch.equal(rollouts.cu_seqlens.diff(), rollouts.scalars.lengths)
    table = _gather(rollouts, world, step=step)
    _check(table, step=step)
    cfg = world.cfg.batch
    order = table.plan_order
    added = table.added_cost
    plan = partition(
        table.scalars.lengths[order],
        group_ids=table.scalars.group_ids[order],
        dp_size=world.dp_size,
        tokens_per_microbatch=world.tokens_per_microbatch,
        num_updates=cfg.updates_per_step,
        whole_groups=world.cfg.objective.trains_on_pairs,
        added=None if added is None else added[order],
        shared=table.shared,
    ).for_order(order)
    received, starts, nbytes = _move(rollouts, table, plan=plan, world=world, step=step)
    sums = table.sums | ({"perf/exchange_bytes": (float(nbytes), 1.0)} if nbytes else {})
    return Batch(
        scalars=table.scalars,
        updates=_cut(received, starts, table, plan=plan, world=world),
        update_ids=plan.update_ids,
        sums=sums,
        samples=table.samples,
    )


# --------------------------------------------------------------------------- the scalars


def _gather(rollouts: Rollouts, world: World, *, step: int) -> _GatheredBatch:
    """Gather the scalars, sums and samples of all ranks, and sort the sequences."""
    described = {
        key: column.describe(rollouts.scalars.lengths)
        for key, column in rollouts.extra_columns.items()
    }
    shared = [(0, 0)] * len(rollouts.scalars)
    if world.shares_prefixes:
        shared = _shared_tokens(rollouts)
    payload = pack((vars(rollouts.scalars), rollouts.sums, rollouts.samples, described, shared))
    # The sizes arrive when every rank has its rollouts, so this is the wait for the other role.
    with world.watch.wait("await rollouts", step):
        sizes = gather_sizes(payload, group=world.control)
    with world.watch.wait("exchange scalars", step):
        payloads = gather_bytes(payload, sizes, group=world.control)
    of_ranks, sums, samples, descriptions, shares = zip(*map(unpack, payloads))
    parts = [Scalars(**own) for own in of_ranks]
    scalars = Scalars.concat(parts)
    # So the batch does not depend on where sequences were sampled.
    order = _by_group(scalars)
    counts = torch.tensor([len(part) for part in parts])
    rows = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))
    sources = torch.arange(len(parts)).repeat_interleave(counts)[order]
    own_shares = torch.tensor([pair for own in shares for pair in own], dtype=torch.int64)
    places, counts_shared = own_shares.view(-1, 2)[order].unbind(1)
    groups = scalars.group_ids[order]
    plan_order = torch.arange(len(order))
    if scalars.traces.any():
        plan_order = _sorted_by(groups, sources, places)
    # Sequences of two ranks are not compared.
    is_compared = torch.zeros(len(order), dtype=torch.bool)
    is_compared[1:] = (groups[plan_order].diff() == 0) & (sources[plan_order].diff() == 0)
    return _GatheredBatch(
        scalars=Scalars(**{name: column[order] for name, column in vars(scalars).items()}),
        sources=sources,
        plan_order=plan_order,
        shared=torch.where(is_compared, counts_shared[plan_order], 0),
        positions=_ranges(torch.zeros_like(counts), counts)[order],
        sums=round_sums(join_sums(*sums)),
        samples=tuple(sample for part in samples for sample in part),
        columns=_agree_on_columns(rollouts, descriptions, rows.split(counts.tolist())),
    )


def _by_group(scalars: Scalars) -> Tensor:
    """Return the order of the sequences by (group, sample, trace): [S] int64."""
    return _sorted_by(scalars.group_ids, scalars.sample_ids, scalars.traces)


def _sorted_by(first: Tensor, *others: Tensor) -> Tensor:
    """Return the order of columns [S] int64 of at least 0, by the first, then by the others."""
    keys = first
    for ids in others:
        most = int(ids.max()) + 1 if len(ids) else 1
        keys = keys * most + ids
    return torch.argsort(keys, stable=True)


def _shared_tokens(rollouts: Rollouts) -> list[tuple[int, int]]:
    """Return for each sequence of this rank its place in an order, and the tokens that it surely
    shares with the one before it.

    The order is by group and sample. A group of which an episode has several traces is sorted by
    tokens instead: what a trace shares, it may share with any earlier one.
    """
    scalars = rollouts.scalars
    if not len(scalars):
        return []
    ends = rollouts.cu_seqlens.tolist()
    spans = [*pairwise(ends)]
    routes = RouterRoutes.of(rollouts.extra_columns)
    also = () if routes is None else (routes.rows,)
    order = _by_group(scalars)
    branched = torch.isin(scalars.group_ids, scalars.group_ids[scalars.traces > 0])
    if branched.any():
        places = torch.empty_like(order)
        places[torch.tensor(by_prefix(rollouts.tokens, spans))] = torch.arange(len(order))
        own = torch.where(branched, places, 0)[order]
        order = order[_sorted_by(scalars.group_ids[order], own)]
    in_order = order.tolist()
    found = surely_shared(rollouts.tokens, [spans[at] for at in in_order], also=also)
    shares = [(0, 0)] * len(in_order)
    for place, (at, count) in enumerate(zip(in_order, found)):
        shares[at] = (place, count)
    return shares


def _agree_on_columns(
    tokens: Tokens, descriptions: Sequence[Mapping[str, Any]], rows: Sequence[Tensor]
) -> dict[str, TokenColumn]:
    """Return this rank's extra columns in the form that all ranks send, with keys sorted.

    Args:
        descriptions: {key: description} of each rank; see `TokenColumn.describe`.
        rows: for each rank, [N] int64: the positions of its sequences in the batch.
    """
    columns = {}
    for key in sorted({key for own in descriptions for key in own}):
        described = {
            rank: own[key] for rank, own in enumerate(descriptions) if own.get(key) is not None
        }
        if described:
            own = tokens.extra_columns.get(key)
            count = len(tokens.tokens)
            columns[key] = column_class(key).agree(own, described, rows, count=count)
    return columns


def _check(table: _GatheredBatch, *, step: int) -> None:
    scalars = table.scalars
    if not len(scalars):
        raise RuntimeError(f"step {step}: no rank has a sequence")

    def name(row: int) -> str:
        trace = f"trace {int(scalars.traces[row])} " if scalars.traces.any() else ""
        return (
            f"group {int(scalars.group_ids[row])} sample {int(scalars.sample_ids[row])} {trace}"
            f"(from rank {int(table.sources[row])}, step {step})"
        )

    ids = torch.stack([scalars.group_ids, scalars.sample_ids, scalars.traces])
    same = (ids.diff(dim=1) == 0).all(0)
    if same.any():
        row = int(same.nonzero()[0])
        raise RuntimeError(
            f"{name(row)} also comes from rank {int(table.sources[row + 1])}; each sequence must "
            "come from one rank"
        )
    if not scalars.is_valid.any():
        first = next((s["failure"] for s in table.samples if "failure" in s), "see the ranks' logs")
        count = len(scalars.episodes())
        raise RewardFailed(
            f"step {step}: the rewards of all {count} samples failed, so that there is "
            f"nothing to train on. First: {first}\nFix the reward function"
        )
    bad = scalars.is_valid & ~scalars.rewards.isfinite()
    if bad.any():
        row = int(bad.nonzero()[0])
        raise Refusal(
            f"reward of {name(row)} is {float(scalars.rewards[row])}; rewards must "
            "be finite: check the reward function for this sample"
        )
    if (scalars.lengths < 1).any():
        row = int((scalars.lengths < 1).nonzero()[0])
        raise Refusal(
            f"{name(row)} has {int(scalars.lengths[row])} tokens; prompt and "
            "response together need at least one"
        )


# --------------------------------------------------------------------------- the tokens


def _move(
    rollouts: Rollouts, table: _GatheredBatch, *, plan: Partition, world: World, step: int
) -> tuple[Tokens, Tensor, int]:
    """Send each sequence to all ranks of its dp index.

    This takes one all-to-all for the tokens, and one for each extra column that needs it.

    Returns: the tokens that this rank received; the index of each sequence's first token in them,
        [S] int64, -1 for sequences of other ranks; and the bytes of tokens that all ranks together
        send to others.
    """
    lengths = table.scalars.lengths
    dp_ids = plan.dp_ids
    dp_of_rank = [
        world.dp_index(r) if r in world.trainer_ranks else -1 for r in range(world.world_size)
    ]
    # Look only at rows that leave or reach this rank, not at all S rows for each rank: with 65536
    # sequences and 1024 ranks this takes 0.3 s.
    mine = torch.nonzero(table.sources == world.rank).flatten()
    to_rank = [mine[dp_ids[mine] == dp] for dp in dp_of_rank]
    arriving = torch.nonzero(dp_ids == dp_of_rank[world.rank]).flatten()
    from_rank = [arriving[table.sources[arriving] == r] for r in range(world.world_size)]
    positions = table.positions[torch.cat(to_rank)]
    order = _ranges(rollouts.cu_seqlens[positions], rollouts.cu_seqlens.diff()[positions])
    all_to_all = AllToAll(
        rank=world.rank,
        num_leaving=[int(lengths[rows].sum()) for rows in to_rank],
        num_arriving=[int(lengths[rows].sum()) for rows in from_rank],
        dp_of_rank=dp_of_rank,
        dp_of_sequence=dp_ids,
        group=world.control,
    )
    with world.watch.wait("exchange tokens", step):
        received, row_bytes = _send(rollouts, table.columns, order=order, all_to_all=all_to_all)
    rows = torch.cat(from_rank)
    starts = torch.full_like(lengths, -1)
    starts[rows] = lengths[rows].cumsum(0) - lengths[rows]
    holders = torch.tensor(dp_of_rank)
    copies = (
        torch.bincount(holders[holders >= 0])[dp_ids] - (holders[table.sources] == dp_ids).int()
    )
    return received, starts, int((lengths * copies).sum()) * row_bytes


def _send(
    tokens: Tokens, columns: Mapping[str, TokenColumn], *, order: Tensor, all_to_all: AllToAll
) -> tuple[Tokens, int]:
    """Send the tokens at `order` [n] int64; return the received ones, and the bytes of one."""
    # The version (-1 or more) and the mask share a number: the mask is its lowest bit.
    marks = (tokens.policy_versions + 1) * 2 + tokens.response_mask
    logprob_bits = tokens.rollout_logprobs.float().view(torch.int32)
    numbers = [tokens.tokens.int(), marks.int(), logprob_bits]
    of_columns = {key: column.numbers() for key, column in columns.items()}
    for own in of_columns.values():
        numbers += own
    rows = torch.stack(numbers, dim=1)
    received = all_to_all.send(rows[order])
    ids, marks, logprob_bits, *others = received.t().contiguous()
    remaining = iter(others)
    extra = {}
    for key, column in columns.items():
        own = list(islice(remaining, len(of_columns[key])))
        extra[key] = column[order].exchange(own, all_to_all)
    tokens = Tokens(
        tokens=ids.long(),
        response_mask=marks % 2 == 1,
        rollout_logprobs=logprob_bits.view(torch.float32),
        policy_versions=(marks // 2 - 1).long(),
        extra_columns=extra,
    )
    return tokens, rows.shape[1] * rows.element_size()


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenated integer ranges [start, start + length): int64, on the CPU."""
    ends = lengths.cumsum(0)
    offsets = (starts - (ends - lengths)).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) + offsets


# --------------------------------------------------------------------------- micro-batches


def _cut(
    received: Tokens, starts: Tensor, table: _GatheredBatch, *, plan: Partition, world: World
) -> tuple[tuple[Microbatch, ...], ...]:
    """Cut the received tokens into this rank's micro-batches, by update.

    Returns: an empty tuple on ranks that do not train.
    """
    if not world.is_trainer:
        return ()
    dp_id = world.dp_index(world.rank)
    lengths = table.scalars.lengths
    of_dummy = {key: column.of_dummy() for key, column in table.columns.items()}
    extra = {key: column for key, column in of_dummy.items() if column is not None}
    dummy = replace(dummy_microbatch(torch.device("cpu")), extra_columns=extra)
    updates = []
    for update, num_microbatches in enumerate(plan.num_microbatches):
        microbatches = []
        for i in range(num_microbatches):
            rows = plan.rows(dp_id, update=update, microbatch=i)
            is_dummy = len(rows) == 0
            own = dummy if is_dummy else _microbatch(received, rows, starts, lengths=lengths)
            microbatches.append(own.to(world.device))
        updates.append(tuple(microbatches))
    return tuple(updates)


def _microbatch(received: Tokens, rows: Tensor, starts: Tensor, *, lengths: Tensor) -> Microbatch:
    """Pack the sequences `rows` [s], at least one, in this order."""
    own = lengths[rows]
    return Microbatch(
        **received.at(_ranges(starts[rows], own)).token_fields(),
        position_ids=_ranges(torch.zeros_like(own), own),
        cu_seqlens=torch.nn.functional.pad(own.cumsum(0), (1, 0)).int(),
        sequence_ids=rows,
    )


def dummy_microbatch(device: torch.device) -> Microbatch:
    """Return a micro-batch of one token that no loss counts.

    A rank with fewer micro-batches than others runs it, so that all ranks run the same collectives.
    """
    dummy = Microbatch(
        **Tokens.unsampled([0]).token_fields(),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        sequence_ids=torch.tensor([-1]),
    )
    return dummy.to(device)
