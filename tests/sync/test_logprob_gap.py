"""How far engines and trainers may be apart follows from the rounding of the two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.model.rounding import first_halves
from spmdrl.model_inputs import TokenIds
from spmdrl.sync import logprob_gap
from spmdrl.sync.logprob_gap import Scores, probe_gap
from tests.helpers.built import made


def _probed(gap: float, rounding: float, monkeypatch: Any, *, limit: float = 0.0) -> float:
    """Return the limit for an engine that is `gap` away and rounds, as the trainer, by this."""
    trainer = [torch.tensor([0.0, -2.0, -2.0, -2.0])]
    engine = [trainer[0] + torch.tensor([0.0, gap, gap, gap])]
    halves = [[whole[0][:2] + torch.tensor([0.0, rounding])] for whole in (engine, trainer)]
    monkeypatch.setattr(logprob_gap, "gather_objects", lambda value, group: [value])
    world: Any = SimpleNamespace(cfg=made(), control=None)
    sums = probe_gap(
        Scores(engine, halves[0]),
        Scores(trainer, halves[1]),
        limit=limit,
        version=0,
        gap_cause="its kernels",
        world=world,
    )
    return sums["sync/probe_limit"][0]


def test_a_gap_may_be_five_times_the_rounding_and_never_half_a_nat(monkeypatch):
    of_bfloat16 = 2.0**-7 * 2  # one rounding of logprobs of 2 nats
    assert _probed(0.09, 0.0, monkeypatch) == 0.1
    assert _probed(0.25, 0.03, monkeypatch) == pytest.approx(5 * 0.06 + of_bfloat16)
    assert _probed(0.4, 0.2, monkeypatch) == 0.5
    for gap, rounding in ((0.11, 0.0), (0.4, 0.03), (1.0, 0.2), (torch.nan, 0.0)):
        with pytest.raises(RuntimeError, match="logprobs differ by"):
            _probed(gap, rounding, monkeypatch)


def test_a_limit_of_the_config_holds_whatever_the_rounding_is(monkeypatch):
    assert _probed(0.9, 0.0, monkeypatch, limit=1.0) == 1.0
    with pytest.raises(RuntimeError, match="more than the 0.001 of stream.max_logprob_gap 0.001"):
        _probed(0.002, 0.1, monkeypatch, limit=1e-3)


def test_halves_have_two_tokens_at_least():
    halves = first_halves([TokenIds(range(9)), TokenIds(range(3)), TokenIds(range(2))])
    assert halves == [(0, 1, 2, 3, 4), (0, 1), (0, 1)]
