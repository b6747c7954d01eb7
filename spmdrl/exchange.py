"""Rollouts to trainer ranks: gather the scalars, plan alike everywhere, move the tokens once.

Who waits: every rank, in `exchange`, for all others. Letters: S sequences of the whole batch,
N sequences of one rank, T packed tokens, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.microbatch_plan import Partition, partition
from spmdrl.errors import Refusal
from spmdrl.kept_sets import KeptSets
from spmdrl.plain import pack, unpack
from spmdrl.types import Batch, Microbatch, Rollouts, Scalars, Sums, Tokens, add_sums
from spmdrl.world import World
from spmdrl.world.comm import gather_bytes, gather_sizes


@dataclass(frozen=True)
class _Gathered:
    """The batch's scalars and where each of its sequences is now."""

    scalars: Scalars  # [S], sorted by (group, sample)
    sources: Tensor  # [S] int64, rank that holds the sequence
    positions: Tensor  # [S] int64, its position there
    sums: Sums
    samples: tuple[dict, ...]
    routes: Tensor | None
    """[0, L, K]: of what shape and dtype the tokens' routes are; None where nobody has any."""
    vocab: int
    """Ids that kept sets are of; 0 where nobody has any."""


def exchange(rollouts: Rollouts, world: World, *, step: int) -> Batch:
    """Give every trainer rank its micro-batches of this step, and every rank all scalars.

    Tensor-parallel ranks of one dp index get the same sequences. Sequences that are not valid
    travel too: the loss mask leaves them out.

    Args:
        rollouts: this rank's finished sequences, possibly none. Each (group, sample) must be
            held by exactly one rank.
        step: for the names of the waits.
    Returns: the Batch; micro-batch tensors on world.device, scalars on the CPU.
    Raises, on all ranks alike: RuntimeError for a (group, sample) held twice, no sequence at
        all, or none that is valid; Refusal for a valid reward that is not finite, a sequence
        without tokens, or one longer than batch.tokens_per_microbatch.
    """
    assert torch.equal(rollouts.cu_seqlens.diff(), rollouts.scalars.lengths)
    table = _gather(rollouts, world, step=step)
    _check(table, step=step)
    cfg = world.cfg.batch
    plan = partition(
        table.scalars.lengths,
        group_ids=table.scalars.group_ids,
        dp_size=world.dp_size,
        tokens_per_microbatch=world.tokens_per_microbatch,
        num_updates=cfg.updates_per_step,
        whole_groups=world.cfg.objective.trains_on_pairs,
    )
    received, starts = _move(rollouts, table, plan=plan, world=world, step=step)
    return Batch(
        scalars=table.scalars,
        updates=_cut(received, starts, lengths=table.scalars.lengths, plan=plan, world=world),
        update_ids=plan.update_ids,
        sums=table.sums,
        samples=table.samples,
    )


# --------------------------------------------------------------------------- the scalars


def _gather(rollouts: Rollouts, world: World, *, step: int) -> _Gathered:
    """Gather everyone's scalars, sums and samples, and sort the sequences."""
    own = {name: column.numpy() for name, column in vars(rollouts.scalars).items()}
    routes = None if rollouts.routes is None else rollouts.routes[:0].numpy()
    vocab = () if rollouts.kept_sets is None else (rollouts.kept_sets.vocab,)
    payload = pack((own, rollouts.sums, rollouts.samples, routes, *vocab))
    with world.watch.wait("await rollouts", step):  # timed apart: the other role's work
        sizes = gather_sizes(payload, group=world.control)
    with world.watch.wait("exchange scalars", step):
        payloads = gather_bytes(payload, sizes, group=world.control)
    gathered = [unpack(payload) for payload in payloads]
    columns, sums, samples, routes = zip(*(one[:4] for one in gathered))
    parts = [Scalars(**{k: torch.from_numpy(v) for k, v in own.items()}) for own in columns]
    scalars = Scalars.concat(parts)
    num_samples = int(scalars.sample_ids.max()) + 1 if len(scalars) else 1
    order = torch.argsort(scalars.group_ids * num_samples + scalars.sample_ids, stable=True)
    counts = torch.tensor([len(part) for part in parts])
    return _Gathered(
        scalars=Scalars(**{name: column[order] for name, column in vars(scalars).items()}),
        sources=torch.arange(len(parts)).repeat_interleave(counts)[order],
        positions=_ranges(torch.zeros_like(counts), counts)[order],
        sums=add_sums(*sums),
        samples=tuple(sample for part in samples for sample in part),
        routes=next((torch.from_numpy(part) for part in routes if part is not None), None),
        vocab=next((one[4] for one in gathered if len(one) > 4), 0),
    )


def _check(table: _Gathered, *, step: int) -> None:
    scalars = table.scalars
    if not len(scalars):
        raise RuntimeError(f"step {step}: no rank handed over a single sequence")

    def name(row: int) -> str:
        return (
            f"group {int(scalars.group_ids[row])} sample {int(scalars.sample_ids[row])} "
            f"(from rank {int(table.sources[row])}, step {step})"
        )

    same = (scalars.group_ids.diff() == 0) & (scalars.sample_ids.diff() == 0)
    if same.any():
        row = int(same.nonzero()[0])
        raise RuntimeError(
            f"{name(row)} was handed over twice, again by rank "
            f"{int(table.sources[row + 1])}; each sequence must have one holder"
        )
    if not scalars.is_valid.any():
        raise RuntimeError(
            f"step {step}: the reward of all {len(scalars)} samples failed, which "
            "leaves nothing to train on; warnings above and in the ranks' logs "
            "name the first of each replica. Mend the reward function"
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
    rollouts: Rollouts, table: _Gathered, *, plan: Partition, world: World, step: int
) -> tuple[Tokens, Tensor]:
    """Send each sequence to all ranks of its dp index: one all-to-all, and one each for
    routes and kept sets.

    Returns: the tokens that this rank received, and where in them each sequence begins: [S]
        int64, -1 for those that went elsewhere.
    """
    lengths, dp_ids = table.scalars.lengths, plan.dp_ids
    dp_of_rank = [
        world.dp_index(r) if r in world.trainer_ranks else -1 for r in range(world.world_size)
    ]
    # Rows that begin or end here, not all S for each rank: 0.3 s for 65536 over 1024 ranks.
    mine = torch.nonzero(table.sources == world.rank).flatten()
    to_rank = [mine[dp_ids[mine] == dp] for dp in dp_of_rank]
    arriving = torch.nonzero(dp_ids == dp_of_rank[world.rank]).flatten()
    from_rank = [arriving[table.sources[arriving] == r] for r in range(world.world_size)]
    positions = table.positions[torch.cat(to_rank)]
    order = _ranges(rollouts.cu_seqlens[positions], rollouts.cu_seqlens.diff()[positions])
    sizes = dict(
        input_split_sizes=[int(lengths[rows].sum()) for rows in to_rank],
        output_split_sizes=[int(lengths[rows].sum()) for rows in from_rank],
    )
    with world.watch.wait("exchange tokens", step):
        sent = _kept_sets(rollouts, table)
        payload = _all_to_all(_to_payload(rollouts, sent)[order], world, sizes=sizes)
        kept_sets = _move_kept_sets(sent, payload, world, order=order, sizes=sizes)
        routes = _move_routes(rollouts, table, world, order=order, sizes=sizes)
    rows = torch.cat(from_rank)
    starts = torch.full_like(lengths, -1)
    starts[rows] = lengths[rows].cumsum(0) - lengths[rows]
    return _from_payload(payload, routes=routes, kept_sets=kept_sets), starts


def _to_payload(tokens: Tokens, sets: KeptSets | None) -> Tensor:
    """Return [T, 3] int32: id, version (-1 or more) with the mask as lowest bit, logprob's bits;
    with kept sets [T, 4]: the bytes of its set."""
    marks = (tokens.policy_versions + 1) * 2 + tokens.response_mask
    bits = tokens.rollout_logprobs.float().view(torch.int32)
    own = [] if sets is None else [sets.sizes]
    return torch.stack([tokens.tokens.int(), marks.int(), bits, *own], dim=1)


def _from_payload(payload: Tensor, *, routes: Tensor | None, kept_sets: KeptSets | None) -> Tokens:
    tokens, marks, bits, *_ = payload.t().contiguous()
    return Tokens(
        tokens=tokens.long(),
        response_mask=marks % 2 == 1,
        rollout_logprobs=bits.view(torch.float32),
        policy_versions=(marks // 2 - 1).long(),
        routes=routes,
        kept_sets=kept_sets,
    )


def _kept_sets(rollouts: Rollouts, table: _Gathered) -> KeptSets | None:
    """Return those of a rank's tokens; None where nobody in the world has any."""
    if not table.vocab or rollouts.kept_sets is not None:
        return rollouts.kept_sets
    none = torch.zeros(len(rollouts.tokens), dtype=torch.int32)
    return KeptSets(table.vocab, none, torch.empty(0, dtype=torch.uint8))


def _move_kept_sets(
    sent: KeptSets | None,
    payload: Tensor,
    world: World,
    *,
    order: Tensor,
    sizes: dict[str, list[int]],
) -> KeptSets | None:
    """Send the tokens' sets the way of the tokens.

    Args:
        payload: the tokens that came, with the bytes of their sets.
    """
    if sent is None:
        return None
    leaving, arriving = sent[order], payload[:, 3].contiguous()
    bytes_of = dict(
        input_split_sizes=_sums(leaving.sizes, sizes["input_split_sizes"]),
        output_split_sizes=_sums(arriving.cpu(), sizes["output_split_sizes"]),
    )
    data = _all_to_all(leaving.data, world, sizes=bytes_of)
    return KeptSets(sent.vocab, arriving, data)


def _sums(values: Tensor, counts: list[int]) -> list[int]:
    """Return the sums of consecutive runs of values."""
    return [int(part.sum()) for part in values.split(counts)]


def _move_routes(
    rollouts: Rollouts,
    table: _Gathered,
    world: World,
    *,
    order: Tensor,
    sizes: dict[str, list[int]],
) -> Tensor | None:
    """Send the tokens' routes the way of the tokens, in their own dtype."""
    form = table.routes
    if form is None:
        return None
    own = rollouts.routes
    if own is None:  # such as samples that were under way when replay was switched on
        own = form.new_full((len(rollouts.tokens), *form.shape[1:]), -1)
    payload = own[order].flatten(1).contiguous().view(torch.uint8)
    received = _all_to_all(payload, world, sizes=sizes)
    return received.view(form.dtype).unflatten(1, form.shape[1:])


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the integer ranges [start, start + length): int64, on the CPU."""
    ends = lengths.cumsum(0)
    offsets = (starts - (ends - lengths)).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) + offsets


def _all_to_all(payload: Tensor, world: World, *, sizes: dict[str, list[int]]) -> Tensor:
    payload = payload.to(world.wire)
    received = payload.new_empty(sum(sizes["output_split_sizes"]), *payload.shape[1:])
    dist.all_to_all_single(received, payload, **sizes)
    return received.to(world.device)


# --------------------------------------------------------------------------- micro-batches


def _cut(
    received: Tokens, starts: Tensor, *, lengths: Tensor, plan: Partition, world: World
) -> tuple[tuple[Microbatch, ...], ...]:
    """Cut what arrived into this rank's micro-batches; nothing off the trainers."""
    if not world.is_trainer:
        return ()
    dp_id = world.dp_index(world.rank)
    return tuple(
        tuple(
            _microbatch(
                received, plan.rows(dp_id, update=update, microbatch=m), starts, lengths=lengths
            )
            for m in range(num_microbatches)
        )
        for update, num_microbatches in enumerate(plan.num_microbatches)
    )


def _microbatch(received: Tokens, rows: Tensor, starts: Tensor, *, lengths: Tensor) -> Microbatch:
    """Pack the sequences `rows` [s] in their order, or one dummy token for none."""
    device = received.tokens.device
    if not len(rows):
        return dummy_microbatch(device)
    own = lengths[rows]
    return Microbatch(
        **received.at(_ranges(starts[rows], own).to(device)).columns(),
        position_ids=_ranges(torch.zeros_like(own), own).to(device),
        cu_seqlens=torch.nn.functional.pad(own.cumsum(0), (1, 0)).int().to(device),
        sequence_ids=rows.to(device),
    )


def dummy_microbatch(device: torch.device) -> Microbatch:
    """Return a micro-batch of one token that is in no loss, which keeps collectives matched."""
    dummy = Microbatch(
        **Tokens.given([0]).columns(),
        position_ids=torch.zeros(1, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        sequence_ids=torch.tensor([-1]),
    )
    return dummy.to(device)
