"""Losses and advantages of a user's own, tried on three tokens before anything is loaded."""

from __future__ import annotations

import inspect

import pytest
import torch

from spmdrl.algorithms import registry
from spmdrl.check.methods import try_functions
from spmdrl.errors import Refusal
from tests.helpers.built import good, made

LOSS, ADVANTAGE = registry.get("loss", "ppo_clip"), registry.get("advantage", "grpo")
ONE = torch.tensor(1.0, dtype=torch.float64)


def detached(logprobs, advantages):
    return -logprobs.detach() * advantages, {}


def without_gradient(logprobs, advantages):
    with torch.no_grad():
        return -logprobs * advantages, {}


def of_numbers(logprobs, advantages):
    return -logprobs * advantages, {"mine": (3.0, 1)}


def of_one_number(logprobs, advantages):
    return -logprobs * advantages, {"mine": ONE}


def of_tokens(logprobs, advantages):
    return -logprobs * advantages, {"mine": (logprobs, ONE)}


def unnamed(logprobs, advantages):
    return -logprobs * advantages, {3: (ONE, ONE)}


def no_pair(logprobs, advantages):
    return -logprobs * advantages


def of_whole_numbers(logprobs, advantages):
    return (-logprobs * advantages).long(), {}


def reduced(logprobs, advantages):
    return (-logprobs * advantages).sum(), {}


def wrong_in_torch(logprobs, advantages):
    return logprobs @ torch.zeros(5), {}


def of_no_number(logprobs):
    return -logprobs * float("nan"), {}


def of_sequences(logprobs, cu_seqlens):
    lengths = cu_seqlens.diff().tolist()
    return torch.stack([-part.sum() for part in logprobs.split(lengths)]), {}


def unknown_metric(logprobs):
    return -logprobs, {"policy/entropi": (logprobs.detach().sum(), ONE)}


def asks_for_more(logprobs, reward):
    return -logprobs * reward, {}


@pytest.mark.parametrize(
    "function, said",
    [
        (detached, "returns terms without a gradient, so that nothing would be learnt"),
        (without_gradient, "returns terms without a gradient"),
        (of_numbers, "the statistic 'mine' must be (sum, count), two tensors of one number"),
        (of_one_number, "the statistic 'mine' must be (sum, count)"),
        (of_tokens, "got (a tensor of shape (3,), a tensor of shape ())"),
        (unnamed, "names of statistics are texts, got 3"),
        (of_no_number, "returned [nan, nan, nan] for 3 tokens: every value must be finite"),
        (unknown_metric, "the statistic 'policy/entropi' of unknown_metric is not in"),
        (no_pair, "must return ([T] tensor, stats dict), got Tensor"),
        (of_whole_numbers, "of floating point, got torch.int64"),
        (reduced, "of one value per token, got () for 3"),
        (of_sequences, "of one value per token, got (2,) for 3"),
        (wrong_in_torch, "RuntimeError: "),
        (asks_for_more, "has the parameter 'reward' without a default"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused_at_its_line(function, said):
    with pytest.raises(Refusal) as found:
        try_functions(good(), loss_fn=function, advantage_fn=ADVANTAGE)
    text = str(found.value)
    assert text.startswith("loss") and said in text
    lines, first = inspect.getsourcelines(function)
    assert any(f"{__file__}:{first + i}" in text for i in range(len(lines)))


def test_an_advantage_of_the_wrong_form_is_refused_at_its_line():
    with pytest.raises(Refusal, match=r"advantage.* of one value per sequence, got \(\) for 2 \("):
        try_functions(good(), loss_fn=LOSS, advantage_fn=lambda rewards: rewards.sum())


@pytest.mark.parametrize("number", [float("nan"), 1e18, -1e18, 10**18])
def test_options_that_are_nonsense_are_refused(number):
    for kind, name, option in (("loss", "dro", "beta"), ("preference", "dpo", "beta")):
        (problem,) = registry.problems(kind, name, {option: number})
        assert f"_options.{option}: must be a number of at most 1000000000" in problem


def test_what_is_right_is_taken():
    def fine(logprobs, advantages):
        return -logprobs * advantages, {"my/own": (logprobs.detach().sum(), ONE)}

    try_functions(good(), loss_fn=fine, advantage_fn=lambda rewards: rewards - 0.5)
    for objective in ("sft", "rl"):
        cfg = made(algorithm=dict(objective=objective))
        own = registry.get(cfg.objective.loss_kind, cfg.loss_name)
        try_functions(cfg, loss_fn=own, advantage_fn=ADVANTAGE)
