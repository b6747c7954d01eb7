"""How tests compare: gathered tensors bit by bit or nearly, sums of steps, plain transformers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.checkpoint.state import tensor_leaves


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather copies of tensors, sharded or not; all ranks that hold them take part."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in tensors.items()
    }


def full_parameters(trainer: Any) -> dict[str, Tensor]:
    """Gather every parameter; all trainer ranks take part."""
    return whole(trainer.weights.shards())


def full_state(trainer: Any) -> dict[str, Tensor]:
    """Gather everything that a checkpoint keeps; all trainer ranks take part."""
    return whole(tensor_leaves(trainer.state_dict()))


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bit-equal; both must have the same names."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]


def assert_same_sums(
    ours: Sequence[dict], reference: Sequence[dict], what: str = "", *, rel: float, abs_: float
) -> None:
    """Compare the sums of steps; counts are equal but for 1e-6, and scale the absolute gap."""
    for step, (a, b) in enumerate(zip(ours, reference, strict=True)):
        assert a.keys() == b.keys()
        for name, (value, count) in b.items():
            gap = abs_ * max(1.0, abs(count))
            is_near = math.isclose(a[name][0], value, rel_tol=rel, abs_tol=gap)
            assert is_near and a[name][1] == pytest.approx(count, rel=1e-6), (
                f"{what}, step {step}: {name} {a[name]} != {(value, count)}"
            )


def assert_near(
    ours: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    what: str = "",
    *,
    rtol: float,
    atol: float,
) -> None:
    """Compare tensors by name."""
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )


def next_logprobs(model: Any, tokens: Iterable[int]) -> Tensor:
    """Return float64 logprobs of all tokens but the first, by a plain model of transformers."""
    row = torch.as_tensor(tokens)
    logprobs = model(row[None]).logits[0].double().log_softmax(-1)
    return logprobs[:-1].gather(1, row[1:, None])[:, 0]


def plain_scores(model: Any, rows: Iterable[Iterable[int]]) -> list[Tensor]:
    """Return what `weights.score` should: float32, a 0 for the first token."""
    with torch.no_grad():
        return [torch.nn.functional.pad(next_logprobs(model, row), (1, 0)).float() for row in rows]
