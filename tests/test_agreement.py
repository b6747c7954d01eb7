"""A model's rows are proved at start, and what is wrong with them is told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from built import made, training
from ranks import run_ranks
from torch import Tensor, nn

from spmdrl.model.attention.mask_spans import Span
from spmdrl.train import agreement
from spmdrl.train.agreement import check_agreement, lengths_of


def _mean_so_far(states: Tensor) -> Tensor:
    return 20 * states.cumsum(1) / torch.arange(1, states.shape[1] + 1)[None, :, None]


def _place_in_row(states: Tensor) -> Tensor:
    """A direction by a token's place in the row, as learned positions would be."""
    places = torch.arange(states.shape[1])[:, None] * torch.arange(1, states.shape[2] + 1)
    return torch.sin(places / 7)[None]


@contextmanager
def _plus(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have the first block add something to its output."""
    block = next(m for m in model.hf_model.modules() if isinstance(m, nn.ModuleList))[0]
    hook = block.register_forward_hook(
        lambda module, args, output: output + change(output).to(output)
    )
    yield
    hook.remove()


def _narrow(hf_model: nn.Module) -> Any:
    found = agreement_separate(hf_model)
    for name in found.spans:
        hf_model.get_submodule(name).span = Span(window=2)
    return found


agreement_separate = agreement.separate


def _said(path: str) -> dict[str, Any]:
    """Return what the check finds of a model as it is, and what it says of one that is changed."""
    cfg = made(
        model=dict(path=path, compute_dtype="float32"),
        data=dict(train="task:addition", size=10, max_prompt_tokens=24),
        sampling=dict(max_response_tokens=24),
        layout=dict(world_size=1, trainer_ranks=1, device="cpu", placement="colocated"),
        batch=dict(tokens_per_microbatch=64),
    )
    with training(cfg) as (world, trainer):
        model = trainer.policy.model
        found: dict[str, Any] = {"right": check_agreement(model, cfg, world)}
        changes = {
            "leak": _plus(model, _mean_so_far),
            "row": _plus(model, _place_in_row),
            "narrow": mock.patch.object(agreement, "separate", _narrow),
        }
        for name, change in changes.items():
            with change, pytest.raises(RuntimeError) as error:
                check_agreement(model, cfg, world)
            found[name] = str(error.value)
    return found


@pytest.fixture(scope="module")
def said(tiny_model: Path) -> dict[str, Any]:
    return run_ranks(1, _said, str(tiny_model))[0]


def test_rows_that_are_right_are_told_by_numbers(said):
    found = said["right"]
    assert found.keys() == {"proof/leak", "proof/packed_gap", "proof/plain_gap"}
    assert found["proof/leak"] == (0.0, 1.0)
    assert 0 <= found["proof/packed_gap"][0] < 1e-5 and found["proof/plain_gap"][0] < 1e-5


def test_what_is_wrong_is_told_apart(said):
    assert "other tokens in one sequence change another's logprobs, by" in said["leak"]
    assert "rows of several sequences and of one differ in logprobs, by" in said["row"]
    assert "disagree with transformers' own forward pass" in said["narrow"]
    assert not any("limit" in said[name] for name in ("leak", "row", "narrow"))


def test_lengths_are_those_that_a_run_may_see():
    assert lengths_of(48) == [48, 24, 12, 6, 3, 2]
    assert lengths_of(2) == [2]
    assert lengths_of(10**5)[:3] == [100000, 50000, 25000] and len(lengths_of(10**5)) == 8
