"""Rows whose common prefixes are computed once, against the same rows without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spmdrl.columns import RouterRoutes
from spmdrl.model.attention.packing import make_copies
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import ScoredRow, Valuer, make_row
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from tests.helpers.policy_runs import small_model
from tests.model.test_forward import plain_scorer
from tests.model.test_moe import make_moe
from tests.model.test_router_replay import replaying_scorer

CLOSE = 1.5e-6
"""Of a tensor's largest value. In float32 the row without sharing is itself about 0.8e-6 from
float64, with Gemma 3 up to 2.6e-6. Sums over branches in float64 would spare 0.2e-6."""
FAMILIES = {
    "qwen3": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0},
    "gemma3": {"sliding_window": 6},
    "mistral": {"sliding_window": 40},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {"sliding_window": 6},
}
STATES = ("qwen3_5_text", "bamba", "lfm2")
"""Families with layers that have a state, and attention between."""
SUMS = ("A_log", "dt_bias")
"""Gradients of these layers that sum all tokens to a few numbers, and cancel: without sharing they
are up to 13e-6 from float64."""


def group_rows() -> tuple[Tensor, list[int]]:
    """Return tokens and lengths of three groups: a long prompt, a short one, and branches."""
    drawn = torch.Generator().manual_seed(4)

    def some(count: int) -> list[int]:
        return torch.randint(5, 90, (count,), generator=drawn).tolist()

    long, short, turn = some(90), some(20), some(33)
    rows = [long + some(n) for n in (3, 17, 40, 9)]
    rows += [short + some(n) for n in (80, 70, 2)]
    rows += [some(12)]
    rows += [long + turn + some(n) for n in (5, 1, 60)]
    rows += [short, long + turn + some(25), rows[1]]
    return torch.tensor([token for row in rows for token in row]), [len(row) for row in rows]


def _row(**options) -> ScoredRow:
    tokens, lengths = group_rows()
    places = torch.cat([torch.arange(n) for n in lengths])
    return make_row(tokens, lengths, mask=places > 0, slicing=Slicing(**options))


def gaps(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, in parts of its largest value."""
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - own).abs().max() / own.abs().max().clamp(min=1e-30))
        for name, own in expected.items()
    }


def _passed(scorer: nn.Module, row: ScoredRow) -> dict[str, Tensor]:
    """Return logprobs, entropy and gradients of a sum of both."""
    scorer.zero_grad()
    logprobs, entropy = scorer(row)
    signs = torch.cos(torch.arange(logprobs.numel())) + 0.5
    ((logprobs + 0.1 * entropy) * signs).sum().backward()
    found = {"logprobs": logprobs, "entropy": entropy, **gradients(scorer)}
    return {name: own.detach() for name, own in found.items()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each gradient by name."""
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", [*FAMILIES, *STATES])
def test_scores_and_gradients_are_those_of_the_row_without_sharing(architecture, tmp_path):
    options = {"initializer_std": 0.1} if architecture in ("qwen3_moe", "gpt_oss") else {}
    folder = tmp_path
    if architecture in STATES:
        tiny_model(shrunk(family_config(architecture)), folder)
    else:
        fields = FAMILIES[architecture]
        folder = small_model(folder, architecture=architecture, hf_config=fields, **options)
    _, scorer = plain_scorer(folder)
    row = _row(shares_prefixes=True)
    assert row.own.row_length < 0.55 * len(row.tokens)
    wrong = gaps(_passed(scorer, row), _passed(scorer, _row()))
    sums = [wrong.pop(name) for name in [*wrong] if name.endswith(SUMS)]
    assert max(wrong.values()) < CLOSE and max(sums, default=0) < 2 * CLOSE, (wrong, sums)


def test_values_are_those_of_the_row_without_sharing(tmp_path):
    hf_model, _ = plain_scorer(small_model(tmp_path))
    hf_model.score = nn.Linear(hf_model.config.hidden_size, 1, bias=False)
    valuer = Valuer(hf_model)
    found = []
    for row in (_row(shares_prefixes=True), _row()):
        valuer.zero_grad()
        values = row.join_tokens(valuer(row))
        (values * torch.cos(torch.arange(len(values)))).sum().backward()
        found.append({"values": values.detach(), **gradients(valuer)})
    assert max(gaps(*found).values()) < CLOSE


def test_tokens_whose_routes_differ_are_computed_apart_and_replayed(tmp_path):
    tokens, lengths = group_rows()
    folder = make_moe(tmp_path, "qwen3_moe")
    scorer, _ = replaying_scorer(folder, "qwen3_moe", checkpointing="none")
    places = torch.cat([torch.arange(n) for n in lengths])
    drawn = torch.Generator().manual_seed(1)
    at = torch.randint(8, (100,), generator=drawn)
    # The choice depends on token and place, so that equal prefixes have equal routes; but for one.
    first = (at[tokens] + places) % 8
    first[lengths[0] + 60] += 1
    routes = torch.stack([first % 8, (first + 3) % 8], dim=-1)[:, None].expand(-1, 2, -1)
    columns = {"routes": RouterRoutes(routes.to(torch.int8).contiguous())}
    found = []
    for shares in (True, False):
        row = make_row(
            tokens,
            lengths,
            mask=places > 0,
            slicing=Slicing(shares_prefixes=shares),
            columns=columns,
        )
        if shares:
            computed = row.own.row_length
            assert computed == _row(shares_prefixes=True).own.row_length + 47
        found.append(_passed(scorer, row))
    assert max(gaps(*found).values()) < CLOSE


@pytest.mark.parametrize("padded", [True, False])
def test_each_sequence_has_its_keys_and_places(padded):
    row = _row(shares_prefixes=True, is_padded=padded)
    packing = row.own.packing
    assert torch.equal(packing.places(row.own.row_length), row.own.position_ids)
    keys = packing.keys_in_order(row.own.tokens) if not padded else None
    if keys is not None:
        ends = packing.keys.cu_seqlens.tolist()
        spelt = [keys[a:b].tolist() for a, b in zip(ends, ends[1:])]
        sequences = [own.tolist() for own in row.tokens.split(list(row.lengths))]
        assert all(own in spelt for own in sequences)
        assert all(any(own[: len(s)] == s for own in sequences) for s in spelt)


def test_gradients_of_copies_are_added_up():
    index = torch.tensor([3, 0, 3, 1, 3, 0])
    x = torch.randn(5, 2, dtype=torch.float64).float().requires_grad_()
    weights = torch.randn(6, 2)
    (make_copies(index, "cpu").of(x) * weights).sum().backward()
    expected = torch.zeros(5, 2).index_add(0, index, weights)
    torch.testing.assert_close(x.grad, expected)
    assert not x.grad[[2, 4]].any()
