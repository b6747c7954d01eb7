"""Sampling masks: compressed, moved, and scored among, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.config import Config, ModelSettings, SamplingSettings
from spmdrl.engine.protocol import Truncation
from spmdrl.engine.transformers.draws import draw, truncate
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.sampling_rules import SamplingRules, make_sampling_mask
from spmdrl.sampling_masks import SamplingMasks
from tests.helpers.ranks import run_ranks


def masks(seed: int, tokens: int, vocab: int) -> torch.Tensor:
    """Sets of all sizes: a few ids, many, and all."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(tokens, 1, generator=generator) ** 4 * 1.3
    kept = torch.rand(tokens, vocab, generator=generator) < share
    kept[torch.arange(tokens), torch.randint(0, vocab, (tokens,), generator=generator)] = True
    return kept


def opened(sets: SamplingMasks, *, part: slice, first: int, width: int) -> torch.Tensor:
    return ~make_sampling_mask(sets, "cpu").dropped(part, first=first, width=width)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**30), st.integers(0, 9), st.sampled_from([1, 7, 8, 64, 65, 900]))
def test_sets_come_back_whole_and_in_any_order(seed, tokens, vocab):
    kept = masks(seed, tokens, vocab)
    sets = SamplingMasks.from_allowed(kept)
    again = SamplingMasks.from_ids([row.nonzero()[:, 0].tolist() for row in kept], vocab=vocab)
    assert torch.equal(sets.sizes, again.sizes) and torch.equal(sets.data, again.data)
    most = torch.minimum(4 * kept.sum(1), torch.tensor((vocab + 7) // 8))
    assert torch.equal(sets.sizes.long(), most.masked_fill(kept.all(1), 0))
    assert sets.num_ids() == int(kept[~kept.all(1)].sum())
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[: tokens // 2 + 1]
    taken = SamplingMasks.concat([sets[order], None, sets], [len(order), 2, tokens])
    want = torch.cat([kept[order], torch.ones(2, vocab, dtype=torch.bool), kept])
    assert torch.equal(opened(taken, part=slice(0, len(want)), first=0, width=vocab), want)
    for part in (slice(1, len(want)), slice(0, 1)):
        half = vocab // 2
        assert torch.equal(
            opened(taken, part=part, first=half, width=half), want[part, half : 2 * half]
        )
    if tokens:
        own = torch.stack([row.nonzero()[-1, 0] for row in kept])
        sets.check(own)
        outside = (~kept).nonzero()
        if len(outside):
            row, other = outside[-1].tolist()
            own[row] = other
            with pytest.raises(ValueError, match=f"token {row} "):
                sets.check(own)


def test_sets_that_make_no_sense_are_refused():
    sets = SamplingMasks.from_allowed(masks(0, 6, 900))
    own = torch.stack([row.nonzero()[0, 0] for row in masks(0, 6, 900)])
    sets.check(own)
    for bad in (
        SamplingMasks(900, sets.sizes[:-1], sets.data),
        SamplingMasks(900, sets.sizes, sets.data[1:]),
        SamplingMasks(900, torch.tensor([3]), sets.data[:3]),
        SamplingMasks(900, torch.tensor([8]), torch.tensor([own[0], 999]).int().view(torch.uint8)),
    ):
        with pytest.raises(ValueError):
            bad.check(own[: len(bad)] if len(bad) < 5 else own)


# --------------------------------------------------------------------------- the head

N, H, V = 13, 8, 264


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, H, generator=generator) for n in (N, V))
    kept = masks(3, N, V)
    kept[4], kept[5] = True, False  # all of them; one alone
    targets = torch.stack([row.nonzero()[len(row.nonzero()) // 2, 0] for row in kept[:5]])
    targets = torch.cat(
        [targets, torch.tensor([200]), torch.randint(0, V, (N - 6,), generator=generator)]
    )
    kept[torch.arange(N), targets] = True
    return hidden, weight, targets, kept, torch.randn(2, N, generator=generator)


def reference(options: HeadOptions) -> list[torch.Tensor]:
    hidden, weight, targets, kept, upstream = inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.t() * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    found = []
    for row, own in zip(logits / options.temperature, kept):
        found.append(torch.log_softmax(row[own], 0))
    at = [int(own[:t].sum()) for own, t in zip(kept, targets)]
    logprobs = torch.stack([logp[i] for logp, i in zip(found, at)])
    entropy = torch.stack([-(logp.exp() * logp).sum() for logp in found])
    squares = torch.stack([logp.exp().square().sum() for logp in found])
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    return [x.detach() for x in (logprobs, entropy, squares, hidden.grad, weight.grad)]


def ours(options: HeadOptions, rows: slice = slice(None)) -> list[torch.Tensor]:
    hidden, weight, targets, kept, upstream = inputs()
    weight = weight[rows].clone().requires_grad_()
    hidden.requires_grad_()
    rules = SamplingRules(make_sampling_mask(SamplingMasks.from_allowed(kept), "cpu"))
    given = dict(targets=targets, options=options, rules=rules)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, **given)
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    again = logprobs_and_entropy(hidden, weight, **given, squares=True)
    assert torch.equal(again[0], logprobs) and torch.equal(again[1], entropy)
    return [x.detach() for x in (logprobs, entropy, again[2], hidden.grad, weight.grad)]


def assert_equal(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for name, a, b in zip(("logprobs", "entropy", "squares", "hidden", "weight"), found, want):
        gap = (a.double() - b).abs().max().item()
        assert gap < 2e-5, f"{name}: {gap}"


FORMS = [(1.0, None, 1.0), (0.7, None, 1.0), (1.3, 2.0, 1.0), (0.8, 3.0, 2.0)]


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_scores_and_gradients_are_those_of_the_kept_ids_in_float64(chunk):
    for temperature, softcap, scale in FORMS:
        options = HeadOptions(chunk, temperature=temperature, softcap=softcap, scale=scale)
        assert_equal(ours(options), reference(options))


def test_only_kept_ids_get_a_gradient():
    hidden, weight, targets, kept, _ = inputs()
    rules = SamplingRules(make_sampling_mask(SamplingMasks.from_allowed(kept), "cpu"))
    for row in range(N):
        weight.grad = None
        logprobs, entropy = logprobs_and_entropy(
            hidden, weight.requires_grad_(), targets=targets, options=HeadOptions(4), rules=rules
        )
        (logprobs[row] + entropy[row]).backward()
        assert not weight.grad[~kept[row]].any(), row


def half_vocabulary() -> bool:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    half = V // 2
    rows = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    for temperature, softcap, scale in FORMS:
        options = HeadOptions(5, temperature, softcap, scale, group=dist.group.WORLD)
        whole = reference(options)
        assert_equal(ours(options, rows), [*whole[:4], whole[4][rows]])
    dist.destroy_process_group()
    return True


def test_two_ranks_with_half_the_vocabulary_each_score_among_the_same_ids():
    assert run_ranks(2, half_vocabulary) == [True, True]


# --------------------------------------------------------------------------- the rule


def kept_by_hand(logits: torch.Tensor, how: Truncation) -> set[int]:
    probs = torch.softmax(logits.double(), 0)
    kept = {i for i in range(len(probs)) if probs[i] >= how.min_p * probs.max()}
    if how.top_k:
        last = sorted((float(probs[i]) for i in kept), reverse=True)[: how.top_k][-1]
        kept = {i for i in kept if float(probs[i]) >= last}
    total, mass, left = sum(float(probs[i]) for i in kept), 0.0, set()
    for i in sorted(kept, key=lambda i: -float(probs[i])):
        if mass / total < how.top_p:
            left.add(i)
        mass += float(probs[i])
    return left


HOWS = [
    Truncation(top_p=0.7),
    Truncation(top_k=5),
    Truncation(min_p=0.1),
    Truncation(top_p=0.8, top_k=9, min_p=0.05),
    Truncation(),
    Truncation(top_p=1e-6),
    Truncation(top_k=10**9),
]


def test_rows_keep_what_their_own_rule_says_and_draws_stay_inside():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(400, 60, generator=generator) * 2
    hows = [HOWS[i % len(HOWS)] for i in range(len(logits))]
    kept = truncate(logits, hows) != -torch.inf
    for row, how, own in zip(logits, hows, kept):
        assert set(own.nonzero()[:, 0].tolist()) == kept_by_hand(row, how), how
    at = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens, logprobs, sets = draw(
        logits * 0.9, temperatures=torch.full((400,), 0.9), at=at, truncations=hows
    )
    sets.check(tokens)
    want = torch.log_softmax(logits.double().masked_fill(~kept, -torch.inf), -1)
    torch.testing.assert_close(
        logprobs.double(), want.gather(1, tokens[:, None])[:, 0], rtol=0, atol=2e-6
    )
    assert len(set(zip(hows, tokens.tolist()))) > 60


# --------------------------------------------------------------------------- what is refused


def test_engines_that_cannot_say_what_they_kept_are_refused(monkeypatch):
    from spmdrl.check import engine_options
    from spmdrl.check.settings import validate
    from tests.helpers.built import good

    cut = dict(sampling=dict(top_p=0.9), layout=dict(device="cpu"))
    assert validate(good(**cut)) == []
    monkeypatch.setattr("spmdrl.world.world.is_on_cpu", lambda cfg: False)
    monkeypatch.setattr(engine_options, "build_problems", list)
    gpus = dict(sampling=dict(min_p=0.1))
    assert validate(good(**gpus)) == []
    names = tuple(n for n in engine_options.engine_argument_names() if n != "return_sampling_mask")
    monkeypatch.setattr(engine_options, "engine_argument_names", lambda: names)
    (found,) = validate(good(**gpus))
    assert "install 0.32" in found
    assert validate(good(**gpus, engine=dict(kind="transformers"))) == []


def test_gpus_get_requests_that_vllm_returns_masks_for():
    from spmdrl.engine.protocol import Request
    from spmdrl.engine.vllm.arguments import engine_arguments
    from spmdrl.engine.vllm.requests import sampling_params, scoring_params

    cfg = Config(model=ModelSettings("m"), sampling=SamplingSettings(top_p=0.9))
    assert engine_arguments(cfg, on_cpu=False)["return_sampling_mask"]
    assert "return_sampling_mask" not in engine_arguments(cfg, on_cpu=True)
    cut = Request("k", (1,), 3, 0.7, 1, (), Truncation(top_p=0.9, min_p=0.1))
    greedy = Request("k", (1,), 3, 0.0, None, ())
    for request, temperature, top_k in ((cut, 0.7, 2**31 - 1), (greedy, 1.0, 1)):
        params = sampling_params(request, returns_masks=True)
        assert (params.temperature, params.top_k) == (temperature, top_k)
    params = scoring_params(returns_masks=True)
    assert params.temperature > 0 and params.top_k == 1 and params.prompt_logprobs == 0
    params = sampling_params(cut)
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 0, 0.1)


def test_sets_that_vllm_returns_are_taken_for_truncated_requests_alone():
    from types import SimpleNamespace

    from spmdrl.engine.protocol import Request
    from spmdrl.engine.vllm.core_loop import Drawn
    from spmdrl.engine.vllm.records import make_mask_recorder

    config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 900))
    worker = SimpleNamespace(
        worker=SimpleNamespace(model_runner=SimpleNamespace(vllm_config=config))
    )
    llm = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
    source = make_mask_recorder(llm, on_cpu=False)
    requests = (
        Request("cut", (1,), 3, 1.0, 1, (), Truncation(top_p=0.9)),
        Request("whole", (1,), 3, 1.0, 1, ()),
        Request("greedy", (1,), 3, 0, 1, ()),
    )
    drawn = {request.key: Drawn(request.key, f"{request.key}-0", 1) for request in requests}
    for request in requests:
        source.add(request, drawn[request.key])
    ids = [[3, 800], list(range(100, 200)), list(range(900))]
    tokens = torch.tensor([800, 150, 5])
    chunks = [SimpleNamespace(to_nested_list=lambda own=own: own) for own in (ids[:1], ids[1:])]

    cut = drawn["cut"]
    assert source.unfinished(cut, tokens[:0]) is None
    with pytest.raises(RuntimeError, match="no sampling mask of its 3 tokens"):
        source.finished(cut, tokens)
    cut.masks.append(chunks[0])
    assert source.unfinished(cut, tokens[:1]).sizes.tolist() == [8]
    with pytest.raises(RuntimeError, match="request cut: sampling masks of 1 tokens, where 3 are"):
        source.finished(cut, tokens)
    for one in drawn.values():
        one.masks[:] = chunks
    for key in ("whole", "greedy"):
        assert source.finished(drawn[key], tokens) is None
    assert source.finished(cut, tokens).sizes.tolist() == [8, 113, 0]
    source.drop(cut)
    assert source.finished(cut, tokens) is None  # it is known no more
