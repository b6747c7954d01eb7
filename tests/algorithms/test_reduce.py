"""Aggregation by global counts, and the registry that finds methods by name."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from hypothesis import strategies as st

from spmdrl.algorithms import registry
from spmdrl.algorithms.reduce import (
    AGGREGATIONS,
    loss_lengths,
    per_token,
    sequence_mean,
    sequence_sum,
    sequence_weights,
)
from spmdrl.types import Scalars
from tests.helpers.built import examples
from tests.helpers.ragged import scalars


def weights_of(batch: Scalars, lengths: torch.Tensor, aggregation: str) -> torch.Tensor:
    return sequence_weights(batch, lengths, aggregation=aggregation, max_response_tokens=32)


def reference(batch: Scalars, terms: list[list[float]], aggregation: str) -> float:
    """Reduce each sequence's terms, the definition of the aggregation read aloud."""
    kept = [(g, row) for g, row in zip(batch.group_ids.tolist(), terms) if row]
    if not kept:
        return 0.0
    if aggregation == "token_mean":
        return sum(sum(row) for _, row in kept) / sum(len(row) for _, row in kept)
    if aggregation == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for _, row in kept) / len(kept)
    if aggregation == "seq_mean_token_sum":
        return sum(sum(row) for _, row in kept) / len(kept)
    if aggregation == "seq_mean_token_sum_norm":
        return sum(sum(row) for _, row in kept) / (len(kept) * 32)
    prompts: dict[int, list[float]] = {}
    for group, row in kept:
        prompts.setdefault(group, []).extend(row)
    return sum(sum(p) / len(p) for p in prompts.values()) / len(prompts)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@examples(25, seed=st.integers(0, 10_000), mask_truncated=st.booleans(), pieces=st.integers(1, 5))
def test_any_split_into_micro_batches_adds_up_to_the_definition(
    aggregation, seed, mask_truncated, pieces
):
    batch = scalars(seed)
    lengths = loss_lengths(batch, mask_truncated=mask_truncated)
    g = torch.Generator().manual_seed(seed)
    terms = [torch.randn(n, generator=g, dtype=torch.float64).tolist() for n in lengths.tolist()]
    weights = weights_of(batch, lengths, aggregation)
    assert weights.dtype == torch.float64
    total = 0.0
    for members in torch.randperm(len(batch), generator=g).chunk(pieces):
        flat = torch.tensor([x for s in members for x in terms[s]], dtype=torch.float64)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[members].cumsum(0)]).int()
        total += (flat * per_token(weights[members], cu, num_tokens=len(flat))).sum().item()
    assert total == pytest.approx(reference(batch, terms, aggregation), abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_in_the_loss_gives_zero_and_not_nan(aggregation):
    batch = scalars(0)
    assert (weights_of(batch, torch.zeros_like(batch.lengths), aggregation) == 0).all()


def test_loss_lengths_leave_out_invalid_and_on_request_truncated_responses():
    batch = scalars(3)
    plain, masked = loss_lengths(batch), loss_lengths(batch, mask_truncated=True)
    for i in range(len(batch)):
        length = int(batch.response_lengths[i]) * bool(batch.is_valid[i])
        assert plain[i] == length
        assert masked[i] == length * (not batch.is_truncated[i])


def test_an_update_is_normalised_by_its_own_sequences():
    batch = dataclasses.replace(scalars(1), is_valid=torch.ones(len(scalars(1)), dtype=bool))
    update_ids = torch.arange(len(batch)) % 2
    for update in (0, 1):
        lengths = loss_lengths(batch) * (update_ids == update)
        weights = weights_of(batch, lengths, "token_mean")
        assert (weights[update_ids != update] == 0).all()
        assert float((weights * lengths).sum()) == pytest.approx(1.0)


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="unknown 'mean'"):
        weights_of(scalars(0), scalars(0).lengths, "mean")


def test_segment_helpers_handle_empty_sequences():
    cu = torch.tensor([0, 0, 2, 2, 3], dtype=torch.int32)
    values = torch.tensor([1.0, 3.0, 5.0])
    assert sequence_sum(values, cu).tolist() == [0, 4, 0, 5]
    mask = torch.tensor([False, True, False])
    assert sequence_mean(values, cu, loss_mask=mask).tolist() == [0, 3, 0, 0]
    assert per_token(torch.arange(4), cu, num_tokens=3).tolist() == [1, 1, 3]


# ---------------------------------------------------------------- registry


def test_every_built_in_method_passes_its_own_check():
    for kind in typing.get_args(registry.Kind):
        for name in registry.names(kind):
            assert registry.problems(kind, name, {}) == []
            assert registry.get(kind, name).__doc__


@pytest.mark.parametrize(
    "kind, name, options, texts",
    [
        ("loss", "ppo_clp", {}, [": unknown loss 'ppo_clp'; did you mean ppo_clip?"]),
        (
            "loss",
            "ppo_clip",
            {"clip_lo": 0.1},
            ["_options.clip_lo: unknown", "did you mean clip_low?"],
        ),
        ("loss", "ppo_clip", {"clip_low": "a"}, ["_options.clip_low: expected float, got 'a'"]),
        ("loss", "ppo_clip", {"clip_low": True}, ["_options.clip_low: expected float, got True"]),
        ("loss", "ppo_clip", {"clip_low": 2}, ["_options: clip_low, clip_high", "got 2, 0.2"]),
        ("correction", "tis", {"level": "tokn"}, ["_options.level: 'tokn'", "did you mean token?"]),
        ("advantage", "grpo", {"std_eps": 0.0}, ["_options: std_eps", "above 0, got 0.0"]),
        ("advantage", "no_such_module:f", {}, [": cannot import 'no_such_module'"]),
        ("advantage", "math:sqrtt", {}, [": math has no function 'sqrtt'", "did you mean sqrt?"]),
        ("advantage", f"{__name__}:strange", {}, ["parameter 'prices'", "known: rewards"]),
        ("advantage", f"{__name__}:scalar", {}, ["one value per sequence, got ()"]),
        ("loss", f"{__name__}:bare", {}, ["must return ([T] tensor, stats dict)"]),
        ("loss", f"{__name__}:failing", {}, ["_options: ZeroDivisionError"]),
    ],
)
def test_a_wrong_choice_is_named_with_what_to_do(kind, name, options, texts):
    (problem,) = registry.problems(kind, name, options)
    assert problem.startswith((": ", "_options"))
    assert all(text in problem for text in texts), problem


def strange(rewards: torch.Tensor, prices: torch.Tensor) -> torch.Tensor:
    return rewards * prices


def scalar(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.sum()


def bare(logprobs: torch.Tensor) -> torch.Tensor:
    return -logprobs


def failing(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict]:
    return logprobs * (1 // 0), {}


def ones(rewards: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return torch.ones_like(rewards) * scale


def test_a_function_of_ones_own_is_used_by_its_path():
    name = f"{__name__}:ones"
    assert registry.problems("advantage", name, {"scale": 2.0}) == []
    assert not registry.needs_group(name)
    inputs = {"rewards": torch.zeros(2), "group_ids": torch.zeros(2)}
    assert registry.call(registry.get("advantage", name), inputs, {"scale": 2}).tolist() == [2, 2]


def test_needs_group_tells_baselines_from_plain_rewards():
    assert registry.needs_group("grpo") and not registry.needs_group("reinforce")
    assert not registry.needs_group("no_such_method")
    assert not registry.needs_group("no_such_module:f")


def test_call_refuses_missing_inputs_and_unknown_options():
    function = registry.get("advantage", "grpo")
    with pytest.raises(ValueError, match="asks for group_ids, is_valid; available: rewards"):
        registry.call(function, {"rewards": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="no option 'eps'"):
        registry.call(function, registry.trial_inputs("advantage"), {"eps": 1.0})


LOSS = """
import torch
def plain(logprobs, advantages, loss_mask, *, scale=1.0):
    terms = torch.where(loss_mask, -scale * logprobs * advantages, 0.0)
    return terms, {"NAME": (terms.detach().sum(), loss_mask.sum())}
"""


def test_a_loss_of_ones_own_is_named_by_its_file(tmp_path):
    (tmp_path / "own_loss.py").write_text(LOSS.replace("NAME", "my/term"))
    name = f"{tmp_path}/own_loss.py:plain"
    assert registry.get("loss", name).__name__ == "plain"
    assert registry.problems("loss", name, {"scale": 2.0}) == []
    (missing,) = registry.problems("loss", f"{tmp_path}/none.py:plain", {})
    assert "no such file" in missing and "PYTHONPATH" not in missing
    (other,) = registry.problems("loss", f"{tmp_path}/own_loss.py:plane", {})
    assert "has no function 'plane'; did you mean plain?" in other
