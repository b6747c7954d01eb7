"""Statistics of batches whose episodes have several traces are those of the episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from spmdrl.algorithms import registry
from spmdrl.algorithms.reduce import AGGREGATIONS, loss_lengths, sequence_weights
from spmdrl.credit import advantages_of, sequence_advantages
from spmdrl.data.prompt_plan import Measured
from spmdrl.rollout.metrics import batch_sums
from spmdrl.rollout.packing import pack, pack_step
from spmdrl.rollout.resumed_work import group_from_dict, group_to_dict
from spmdrl.rollout.sums import has_spread
from spmdrl.tools.what_if.run import Outcome, StepOutcomes
from spmdrl.tools.what_if.text import samples_of, table
from spmdrl.types import Batch, Scalars
from tests.helpers.built import made
from tests.helpers.drawn import values
from tests.helpers.trees import episodes, group_of

KINDS = [["plain", "compacted", "turns", "retry"], ["compacted", "plain"]]
TRACES = [1, 3, 1, 2, 3, 1]
SAMPLES = episodes(KINDS)


def scalars_of(samples: Any = SAMPLES) -> Scalars:
    return pack(samples, sums={}, num_shown=0).scalars


def batch_of(scalars: Scalars) -> Batch:
    ids = torch.zeros(len(scalars), dtype=torch.int64)
    return Batch(scalars, updates=(), update_ids=ids)


def single(scalars: Scalars) -> Scalars:
    """Return the episodes as if each had been one sequence."""
    lengths = torch.tensor([sum(len(t.tokens) for t in s.traces) for s in SAMPLES])
    first = {name: column[scalars.traces == 0] for name, column in vars(scalars).items()}
    sampled = torch.tensor([s.num_sampled for s in SAMPLES])
    cut = torch.tensor([s.is_truncated for s in SAMPLES])
    return Scalars(**first | dict(lengths=lengths, response_lengths=sampled, is_truncated=cut))


def test_an_episode_has_the_numbers_of_all_its_traces():
    scalars = scalars_of()
    scalars.is_truncated[2] = True  # the second trace of the second episode
    scalars.min_versions[:] = torch.tensor([4, -1, 3, 5, 7, 9, 2, 1, 1, 1, 6])
    order = torch.randperm(len(scalars), generator=torch.Generator().manual_seed(0))
    for rows in (torch.arange(len(scalars)), order):
        moved = Scalars(**{name: column[rows] for name, column in vars(scalars).items()})
        found = moved.episodes()
        own = found.scalars
        assert (
            found.index.tolist()
            == torch.arange(6).repeat_interleave(torch.tensor(TRACES))[rows].tolist()
        )
        assert own.sample_ids.tolist() == [0, 1, 2, 3, 0, 1]
        assert own.group_ids.tolist() == [0, 0, 0, 0, 1, 1]
        assert own.rewards.tolist() == [s.reward.value for s in SAMPLES]
        assert own.response_lengths.tolist() == [s.num_sampled for s in SAMPLES]
        assert own.lengths.tolist() == [sum(len(t.tokens) for t in s.traces) for s in SAMPLES]
        assert own.is_truncated.tolist() == [False, True, False, False, False, False]
        assert own.min_versions.tolist() == [4, 3, 7, 2, 1, 6]
        assert (own.turns[:, :, 1] != -2).sum(1).tolist() == [s.num_turns for s in SAMPLES]
        assert torch.equal(found.sum(torch.ones(len(moved))), torch.tensor(TRACES).float())


def test_turns_of_an_episode_are_those_of_its_traces_in_order():
    turns = [[[1.0, 7.0], [2.0, 8.0]], [[3.0, 9.0], [0.0, -2.0]], [[4.0, 5.0], [0.0, -2.0]]]
    scalars = Scalars(**{name: column[3:6] for name, column in vars(scalars_of()).items()})
    scalars = replace(
        scalars,
        sample_ids=torch.tensor([0, 0, 1]),
        traces=torch.tensor([0, 1, 0]),
        turns=torch.tensor(turns).double(),
    )
    assert scalars.episodes().scalars.turns.tolist() == [
        [[1.0, 7.0], [2.0, 8.0], [3.0, 9.0]],
        [[4.0, 5.0], [0.0, -2.0], [0.0, -2.0]],
    ]


def test_a_batch_of_single_traces_is_its_own_episodes():
    scalars = single(scalars_of())
    found = scalars.episodes()
    assert found.scalars is scalars and found.index.tolist() == list(range(6))


SEQUENCE_METHODS = [
    name
    for name in registry.names("advantage")
    if not registry.is_per_token(registry.get("advantage", name))
]


@pytest.mark.parametrize("name", SEQUENCE_METHODS)
def test_advantages_are_those_of_episodes_of_one_sequence(name):
    cfg = made(algorithm=dict(advantage=name))
    scalars = scalars_of()
    scalars = replace(scalars, rewards=scalars.rewards.abs(), greedy_rewards=0 * scalars.rewards)
    found = sequence_advantages(batch_of(scalars), cfg=cfg)
    expected = sequence_advantages(batch_of(single(scalars)), cfg=cfg)
    assert expected.any()
    assert torch.equal(found, expected.repeat_interleave(torch.tensor(TRACES)))


def test_advantages_of_tokens_are_refused_with_their_reason():
    batch = batch_of(scalars_of())
    trainer = type("World", (), {"is_trainer": True, "watch": _Watch()})()
    with pytest.raises(ValueError, match="gae gives each token a number, and an episode of the"):
        advantages_of(batch, cfg=made(algorithm=dict(advantage="gae")), world=trainer, step=0)


class _Watch:
    def wait(self, what: str, step: int) -> Any:
        return torch.no_grad()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_an_episode_weighs_as_much_as_one_sequence(aggregation, mask_truncated):
    scalars = scalars_of()
    scalars.is_truncated[5] = True  # one trace of the fourth episode
    whole = replace(single(scalars), is_truncated=torch.arange(6) == 3)
    options = dict(aggregation=aggregation, max_response_tokens=32)
    found, expected = (
        sequence_weights(own, loss_lengths(own, mask_truncated=mask_truncated), **options)
        for own in (scalars, whole)
    )
    spread = expected.repeat_interleave(torch.tensor(TRACES))
    assert torch.equal(found, spread) and bool((found == 0).any()) == mask_truncated


def test_metrics_of_a_batch_count_episodes():
    scalars = scalars_of()
    found, expected = (batch_sums(batch_of(own)) for own in (scalars, single(scalars)))
    assert found == expected and found["rollout/samples"] == (6, 1)
    left_out = torch.arange(len(scalars)) == 0
    batch = batch_of(scalars).without(left_out)
    assert batch_sums(batch)["rollout/left_out_frac"] == (1, 6)
    one_trace = batch_of(scalars).without(torch.arange(len(scalars)) == 1)
    assert batch_sums(one_trace)["rollout/left_out_frac"] == (0, 6)
    assert loss_lengths(one_trace.scalars)[1] == 0 and loss_lengths(one_trace.scalars)[2] > 0


def test_pass_rates_and_lengths_of_prompts_count_episodes():
    scalars = replace(scalars_of(), rewards=(scalars_of().rewards > 0).double())
    measured = [Measured(), Measured()]
    for one, own in zip(measured, (scalars, single(scalars))):
        one.observe(own)
    assert measured[0] == measured[1] and 0 < measured[0].rates[0] < 1


def test_a_groups_spread_is_of_its_episodes_and_agents_report_traces():
    groups = [group_of(SAMPLES[:4]), group_of(SAMPLES[4:])]
    assert has_spread(groups[0].drawn_samples)
    assert not has_spread(groups[1].drawn_samples[:1])
    share = dict(is_first=True, seconds=1.0, measured={}, dropped=[], num_carried=0)
    sums = pack_step(groups, made(rollout=dict(agent="a.py:solve")), **share).sums
    assert sums["rollout/traces"] == (11, 6)
    assert sums["rollout/branched_frac"] == (3, 6)
    assert sums["rollout/trace_length"][1] == 11
    assert sums["rollout/turns"] == (1 + 4 + 2 + 4 + 4 + 1, 6)
    assert "rollout/traces" not in pack_step(groups, made(), **share).sums


def test_finished_episodes_of_several_traces_come_through_a_checkpoint():
    group = group_of(SAMPLES[:4])
    again, _ = group_from_dict(
        group_to_dict(group, []), number=0, draw=group.draw, prompt=group.prompt
    )
    for number, sample in group.samples.items():
        for own, other in zip(sample.traces, again.samples[number].traces, strict=True):
            mine, theirs = (replace(s, traces=(t,)) for s, t in ((sample, own), (sample, other)))
            assert values(mine) == values(theirs)


def test_what_if_compares_pushes_on_episodes():
    found = scalars_of().episodes()
    pushes = torch.tensor([0.1, -0.4, 0.2, 0.0, 0.3, -0.1]).double()
    shared = dict(gradients={}, metrics={"policy/grad_norm": 1.0}, clipped=0.0, masked=0.0, ess=1.0)
    alternatives = [type("Named", (), {"name": name, "settings": {}})() for name in ("a", "b")]
    outcomes = [
        Outcome(**shared, pushes=own, token_pushes={}, alternative=one, cosine=1.0)
        for one, own in zip(alternatives, (pushes, -pushes))
    ]
    result = StepOutcomes(3, "w", found, outcomes, {}, [])
    most = samples_of(result)[0]
    assert (most["group"], most["sample"], most["rows"]) == (0, 1, [1, 2, 3])
    assert table(result, limit=1).startswith("step 3: 6 samples, weights of w")
