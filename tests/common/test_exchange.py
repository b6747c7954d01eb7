"""The exchange over real gloo ranks: every token arrives, where the plan says, once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spmdrl.columns import RouterRoutes
from spmdrl.config import Config, LayoutSettings, inference_ranks
from spmdrl.exchange import exchange_rollouts
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import Batch as ExchangedBatch
from spmdrl.types import Rollouts, Scalars
from spmdrl.world.world import World
from tests.helpers.built import changed, made, started
from tests.helpers.ranks import run_ranks


def config(layout: LayoutSettings, **batch: int) -> Config:
    objective = "sft" if layout.placement == "offline" else "rl"
    sizes = dict(prompts_per_step=4, group_size=3, tokens_per_microbatch=64) | batch
    return made(layout=layout, batch=sizes, algorithm=dict(objective=objective))


def lay(placement: str, world_size: int, **sizes: int) -> LayoutSettings:
    return LayoutSettings(
        placement=placement,
        world_size=world_size,
        device="cpu",
        wait_timeout_s=200,
        startup_timeout_s=300,
        **sizes,
    )


def sequence(group: int, sample: int) -> dict:
    """Make one sequence whose every number tells where it comes from."""
    prompt, response = 2 + group % 3, (group * 5 + sample * 7) % 11  # some responses are empty
    if (group, sample) == (1, 1):
        response = 50  # one very long sequence
    n, base = prompt + response, 1000 * group + 100 * sample
    mask = torch.arange(n) >= prompt
    return dict(
        tokens=base + torch.arange(n),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, -(base + torch.arange(n)) / 7.0, 0.0),
        policy_versions=torch.where(mask, torch.arange(n) % 3, -1),
        response=response,
    )


def rollouts(keys: list[tuple[int, int]], **changes) -> Rollouts:
    parts = [sequence(*key) for key in keys]
    lengths = torch.tensor([len(p["tokens"]) for p in parts], dtype=torch.int64)
    groups, samples = (torch.tensor([k[i] for k in keys], dtype=torch.int64) for i in (0, 1))
    scalars = Scalars(
        lengths=lengths,
        group_ids=groups,
        sample_ids=samples,
        response_lengths=torch.tensor([p["response"] for p in parts], dtype=torch.int64),
        rewards=groups + samples / 3.0,
        is_truncated=samples == 2,
        is_valid=(groups + samples) % 4 != 3,
        min_versions=groups * 0,
        greedy_rewards=groups.double() / 7,
    )
    if keys:  # two reward functions; a rank without sequences does not know how many there are
        parts_of = torch.stack([groups / 3.0, samples / 5.0], dim=1).double()
        scalars = dataclasses.replace(scalars, reward_parts=parts_of)

    def flat(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([torch.zeros(0), *[p[name] for p in parts]]).to(dtype)

    return Rollouts(
        tokens=flat("tokens", torch.int64),
        response_mask=flat("response_mask", torch.bool),
        rollout_logprobs=flat("rollout_logprobs", torch.float32),
        policy_versions=flat("policy_versions", torch.int64),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        scalars=dataclasses.replace(scalars, **{k: v(scalars) for k, v in changes.items()}),
        sums={"rollout/samples": (float(len(keys)), 1.0)},
        samples=({"keys": keys},) * bool(keys),
    )


ALL = [(g, s) for g in range(4) for s in range(3)]


def share(world: World, how: str) -> list[tuple[int, int]]:
    """Say which sequences this rank holds; only the leader of a replica holds any."""
    if world.cfg.layout.placement == "offline":
        leads, index = world.is_dp_leader, world.dp_index(world.rank)
        count = world.dp_size
    else:
        leads, index, count = world.replica_rank == 0, world.replica, world.num_replicas
    if not leads:
        return []
    if how == "last has all":
        return ALL if index == count - 1 else []
    return [key for i, key in enumerate(reversed(ALL)) if (i * i) % count == index]


HOWS = ("spread", "last has all")


def deliver(cfg: Config) -> tuple[list[ExchangedBatch], int]:
    with started(cfg) as world:
        batches = [exchange_rollouts(rollouts(share(world, how)), world, step=3) for how in HOWS]
        return batches, world.dp_index(world.rank) if world.is_trainer else -1


def check_microbatch(mb, scalars: Scalars, budget: int) -> list[int]:
    """Compare every token with what it was made as; return the sequences found."""
    ids = mb.sequence_ids.tolist()
    assert mb.cu_seqlens.dtype == torch.int32 and mb.tokens.numel() <= budget
    if ids == [-1]:
        assert mb.tokens.tolist() == [0] and mb.response_mask.tolist() == [False]
        assert mb.cu_seqlens.tolist() == [0, 1] and mb.policy_versions.tolist() == [-1]
        return []
    cu = mb.cu_seqlens.tolist()
    for row, a, b in zip(ids, cu, cu[1:]):
        made = sequence(int(scalars.group_ids[row]), int(scalars.sample_ids[row]))
        for name in ("tokens", "response_mask", "policy_versions"):
            assert torch.equal(getattr(mb, name)[a:b], made[name]), name
        assert torch.equal(mb.rollout_logprobs[a:b], made["rollout_logprobs"].float())
        assert mb.position_ids[a:b].tolist() == list(range(b - a))
    return ids


LAYOUTS = [
    (lay("split", 2), {}),
    (lay("split", 4, trainer_ranks=2, inference_tp=2), {"updates_per_step": 2}),
    (lay("split", 4, trainer_ranks=2), {"tokens_per_microbatch": 400}),
    (lay("split", 4, trainer_ranks=3), {}),
    (lay("colocated", 2), {"updates_per_step": 4}),
    (lay("colocated", 4, tp=2, inference_tp=2), {}),
    (lay("offline", 2, tp=2), {}),
    (lay("split", 4, trainer_ranks=3, cp=3), {}),
    (lay("offline", 4, cp=2), {}),
]


@pytest.mark.parametrize(
    "layout, sizes",
    [pytest.param(*one, marks=[pytest.mark.grid] * (one in LAYOUTS[::2])) for one in LAYOUTS],
)
def test_every_sequence_arrives_whole_at_one_dp_index(layout, sizes):
    cfg = config(layout, **sizes)
    results = run_ranks(layout.world_size, deliver, cfg)
    for i, _ in enumerate(HOWS):
        check_delivery([(batches[i], dp) for batches, dp in results], cfg)
    for (spread, single), _ in results:  # the batch does not depend on who generated what
        for one, other in zip(sum(spread.updates, ()), sum(single.updates, ()), strict=True):
            own, others = one.state_dict(), other.state_dict()
            assert own.pop("extra_columns") == others.pop("extra_columns") == {}
            assert all(torch.equal(a, b) for a, b in zip(own.values(), others.values()))


def routes_of(group: int, sample: int, dtype: torch.dtype) -> torch.Tensor:
    """Three layers of two experts, of all tokens but the last."""
    n = len(sequence(group, sample)["tokens"])
    routes = (torch.arange(n * 6).view(n, 3, 2) * (group + 2) + sample) % 120
    routes[-1] = -1
    return (routes + 200 * (routes >= 0) * (dtype == torch.int16)).to(dtype)


def deliver_routes(cfg: Config, dtype: torch.dtype) -> tuple[list[ExchangedBatch], int]:
    """Exchange with routes everywhere, and where the first leader has none."""
    batches = []
    with started(cfg) as world:
        for silent in (-1, inference_ranks(cfg)[0]):
            mine = share(world, "spread")
            own = rollouts(mine)
            if mine and world.rank != silent:
                parts = [routes_of(*key, dtype) for key in mine]
                own = dataclasses.replace(
                    own, extra_columns={"routes": RouterRoutes(torch.cat(parts))}
                )
            batches.append(exchange_rollouts(own, world, step=3))
        return batches, world.dp_index(world.rank) if world.is_trainer else -1


@pytest.mark.parametrize(
    "layout, dtype",
    [
        (lay("split", 4, trainer_ranks=2), torch.int16),
        (lay("colocated", 2), torch.int8),
        (lay("colocated", 4, cp=2, inference_tp=2), torch.int8),
    ],
)
def test_routes_arrive_with_their_tokens(layout, dtype):
    results = run_ranks(layout.world_size, deliver_routes, config(layout), dtype)
    for which in range(2):
        check_delivery([(batches[which], dp) for batches, dp in results], config(layout))
        known, unknown = 0, 0
        for batches, _dp in results:
            scalars = batches[which].scalars
            for mb in sum(batches[which].updates, ()):
                ids, cu = mb.sequence_ids.tolist(), mb.cu_seqlens.tolist()
                if ids == [-1]:
                    assert not mb.extra_columns
                    continue
                routes = mb.extra_columns["routes"].rows
                for row, a, b in zip(ids, cu, cu[1:]):
                    made = routes_of(
                        int(scalars.group_ids[row]), int(scalars.sample_ids[row]), dtype
                    )
                    is_unknown = bool((routes[a:b] == -1).all())
                    assert routes.dtype == dtype
                    assert is_unknown or torch.equal(routes[a:b], made)
                    known, unknown = known + (not is_unknown), unknown + is_unknown
        assert known > 0 and (unknown > 0) == (which == 1)


def sets_of(group: int, sample: int) -> SamplingMasks:
    """Of sizes that differ, 0 too; each has its own token."""
    tokens = sequence(group, sample)["tokens"]
    kept = torch.rand(len(tokens), 4000, generator=torch.Generator().manual_seed(group)) < 0.002
    kept[3::5], kept[4::5] = True, kept[4::5].roll(7, 1) | (torch.arange(4000) % (sample + 2) == 0)
    kept[torch.arange(len(tokens)), tokens] = True
    return SamplingMasks.from_allowed(kept)


def deliver_sets(cfg: Config) -> tuple[list[ExchangedBatch], int]:
    """Exchange with sampling masks everywhere, and where the first leader has none."""
    batches = []
    with started(cfg) as world:
        for silent in (-1, inference_ranks(cfg)[0]):
            mine = share(world, "spread")
            own = rollouts(mine)
            if mine and world.rank != silent:
                parts = [sets_of(*key) for key in mine]
                sets = SamplingMasks.concat(parts, [len(part) for part in parts])
                own = dataclasses.replace(own, extra_columns={"sampling_masks": sets})
            batches.append(exchange_rollouts(own, world, step=3))
        return batches, world.dp_index(world.rank) if world.is_trainer else -1


@pytest.mark.parametrize(
    "layout", [lay("split", 4, trainer_ranks=2), lay("colocated", 4, cp=2, inference_tp=2)]
)
def test_sampling_masks_arrive_with_their_tokens(layout):
    results = run_ranks(layout.world_size, deliver_sets, config(layout))
    for which in range(2):
        check_delivery([(batches[which], dp) for batches, dp in results], config(layout))
        known, unknown = 0, 0
        for batches, _dp in results:
            scalars = batches[which].scalars
            for mb in sum(batches[which].updates, ()):
                if mb.sequence_ids.tolist() == [-1]:
                    assert not mb.extra_columns
                    continue
                cu = mb.cu_seqlens.tolist()
                for row, a, b in zip(mb.sequence_ids.tolist(), cu, cu[1:]):
                    made = sets_of(int(scalars.group_ids[row]), int(scalars.sample_ids[row]))
                    own = mb.extra_columns["sampling_masks"][torch.arange(a, b)]
                    is_unknown = not bool(own.sizes.any())
                    assert is_unknown or torch.equal(own.data, made.data)
                    assert is_unknown or torch.equal(own.sizes, made.sizes)
                    known, unknown = known + (not is_unknown), unknown + is_unknown
        assert known > 0 and (unknown > 0) == (which == 1)


def check_delivery(results: list[tuple[ExchangedBatch, int]], cfg: Config) -> None:
    scalars, update_ids = results[0][0].scalars, results[0][0].update_ids
    for name, values in vars(rollouts(ALL).scalars).items():
        assert torch.equal(getattr(scalars, name), values), name
    arrived: dict[int, list[list[int]]] = {}
    for batch, dp in results:
        for name, values in vars(scalars).items():
            assert torch.equal(getattr(batch.scalars, name), values), "ranks differ"
        assert torch.equal(batch.update_ids, update_ids)
        assert batch.sums["rollout/samples"][0] == len(ALL)
        assert sum(len(s["keys"]) for s in batch.samples) == len(ALL)
        if dp < 0:
            assert batch.updates == ()
            continue
        assert len(batch.updates) == cfg.batch.updates_per_step
        assert [len(u) for u in batch.updates] == [len(u) for u in results[0][0].updates]
        rows = []
        for u, update in enumerate(batch.updates):
            for mb in update:
                found = check_microbatch(mb, scalars, cfg.batch.tokens_per_microbatch)
                assert (update_ids[found] == u).all()
                rows += found
        arrived.setdefault(dp, []).append(rows)
    for per_rank in arrived.values():
        assert len(per_rank) == cfg.layout.cp * cfg.layout.tp
        assert all(r == per_rank[0] for r in per_rank)
    assert sorted(row for ranks in arrived.values() for row in ranks[0]) == list(range(len(ALL)))


# ---------------------------------------------------------------- refused on all ranks alike


FAULTS = {
    "nan": "Refusal: reward of group 2 sample 0 (from rank 1, step 7) is nan",
    "nan, not valid": "accepted",
    "none valid": "RewardFailed: step 7: the rewards of all 12 samples failed",
    "twice": "RuntimeError: group 1 sample 2 (from rank 0, step 7) also comes from rank 1",
    "traces": "accepted",
    "a trace twice": "RuntimeError: group 2 sample 0 trace 1 (from rank 1, step 7) also comes from",
    "nothing": "RuntimeError: step 7: no rank has a sequence",
    "empty": "Refusal: group 0 sample 0 (from rank 1, step 7) has 0 tokens",
    "long": "Refusal: batch.tokens_per_microbatch: a sequence of group 1 has 53 tokens, above "
    "the budget of 40",
}


def faulty(world: World, fault: str) -> Rollouts:
    mine = share(world, "spread")
    if fault == "nan":
        return rollouts(
            mine,
            rewards=lambda s: torch.where(
                (s.group_ids == 2) & (s.sample_ids == 0), torch.nan, s.rewards
            ),
        )
    if fault == "nan, not valid":
        return rollouts(mine, rewards=lambda s: torch.where(s.is_valid, s.rewards, torch.nan))
    if fault == "none valid":
        return rollouts(mine, is_valid=lambda s: torch.zeros_like(s.is_valid))
    if fault in ("traces", "a trace twice"):
        numbers = [0, 1] if fault == "traces" else [1, 1]
        keys = [(2, 0)] * 2 if mine else []
        return rollouts(keys, traces=lambda s: torch.tensor(numbers[: len(s)], dtype=torch.int64))
    if fault == "empty":
        none = rollouts([(0, 0)] if mine else [])
        zeros = {
            name: getattr(none, name)[:0]
            for name in ("tokens", "response_mask", "rollout_logprobs", "policy_versions")
        }
        lengths = none.scalars.lengths * 0
        return changed(none, scalars=dict(lengths=lengths), cu_seqlens=none.cu_seqlens * 0, **zeros)
    return rollouts({"twice": [(1, 2)], "nothing": []}.get(fault, mine))


def fail(cfg: Config) -> dict[str, str]:
    messages = {}
    with started(cfg) as world:
        for fault in FAULTS:
            world.cfg = changed(
                cfg, batch=dict(tokens_per_microbatch=40 if fault == "long" else 64)
            )
            try:
                exchange_rollouts(faulty(world, fault), world, step=7)
                messages[fault] = "accepted"
            except (ValueError, RuntimeError) as error:
                messages[fault] = f"{type(error).__name__}: {error}"
    return messages


def test_bad_batches_are_refused_by_every_rank_at_the_same_point():
    for messages in run_ranks(2, fail, config(lay("split", 2))):
        for fault, text in FAULTS.items():
            assert messages[fault].startswith(text)
