"""Penalties and biases of logits: engines and trainers do the same, in float64's eyes too."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from spmdrl.check.settings import validate
from spmdrl.check.values import ids_above
from spmdrl.config import Penalties, dump, load_yaml
from spmdrl.engine.protocol import Request, Truncation
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import make_row
from spmdrl.sampling_masks import SamplingMasks
from tests.helpers.built import good, made, small_model
from tests.helpers.drawn import finished
from tests.helpers.ranks import run_ranks
from tests.helpers.worlds import in_world, make_engine

H, V = 8, 40
LENGTHS = (9, 1, 14, 6)
PROMPTS = (3, 1, 2, 5)
EVERYTHING = Penalties(1.3, 0.7, 0.25, ((3, -2.0), (39, 1.5), (20, 4.0)))
SOME = [
    EVERYTHING,
    Penalties(repetition=0.8),
    Penalties(presence=1.0),
    Penalties(frequency=-0.5),
    Penalties(bias=((0, 100.0), (7, -100.0))),
]


def row_and_kept(how: str = "all"):
    generator = torch.Generator().manual_seed(2)
    total = sum(LENGTHS)
    tokens = torch.randint(0, V, (total,), generator=generator) // 3 * 3 % V  # many come again
    drawn = torch.cat([torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS)])
    drawn[[9]] = False  # a sequence of one token
    mask = drawn & (torch.rand(total, generator=generator) < 0.8)
    kept = torch.rand(total, V, generator=generator) < 0.5
    kept[torch.arange(total), tokens] = True
    sets = SamplingMasks.from_allowed(kept) if how == "kept" else None
    row = make_row(
        tokens, LENGTHS, mask=mask, drawn=drawn, columns={"sampling_masks": sets} if sets else {}
    )
    return tokens, drawn, mask, kept if how == "kept" else torch.ones_like(kept), row


def reference(penalties: Penalties, options: HeadOptions, how: str) -> list[torch.Tensor]:
    """One position at a time, in float64."""
    tokens, drawn, mask, kept, row = row_and_kept(how)
    hidden, weight = (x.double().requires_grad_() for x in states(len(row.scored)))
    starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    logprobs, entropy = [], []
    for i, at in enumerate(mask.nonzero()[:, 0].tolist()):
        start = int(starts[starts <= at].max())
        before, own = tokens[start:at], tokens[start:at][drawn[start:at]]
        z = hidden[i] @ weight.t() * options.scale
        if options.softcap is not None:
            z = options.softcap * torch.tanh(z / options.softcap)
        bias = torch.zeros(V, dtype=torch.float64)
        for token, added in penalties.bias:
            bias[token] += added
        z = z + bias
        factor = torch.ones(V, dtype=torch.float64)
        factor[before] = penalties.repetition
        z = torch.where(z > 0, z / factor, z * factor)
        counts = torch.bincount(own, minlength=V)
        z = z - penalties.frequency * counts - penalties.presence * (counts > 0)
        logp = torch.log_softmax((z / options.temperature)[kept[at]], 0)
        logprobs.append(logp[int(kept[at, : tokens[at]].sum())])
        entropy.append(-(logp.exp() * logp).sum())
    values = torch.stack(logprobs), torch.stack(entropy)
    (values[0] * 1.5 - values[1] * 0.3).sum().backward()
    return [x.detach() for x in (*values, hidden.grad, weight.grad)]


def states(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, H, generator=generator), torch.randn(V, H, generator=generator)


def ours(options: HeadOptions, how: str, rows: slice = slice(None)) -> list[torch.Tensor]:
    own = row_and_kept(how)[-1].own
    hidden, weight = states(len(own.targets))
    hidden, weight = hidden.requires_grad_(), weight[rows].clone().requires_grad_()
    values = logprobs_and_entropy(
        hidden, weight, targets=own.targets, options=options, rules=own.rules
    )
    (values[0] * 1.5 - values[1] * 0.3).sum().backward()
    return [x.detach() for x in (*values, hidden.grad, weight.grad)]


def assert_close(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for name, a, b in zip(("logprobs", "entropy", "hidden", "weight"), found, want):
        gap = (a.double() - b).abs().max().item()
        assert gap < 5e-5, f"{name}: {gap}"


FORMS = [(1.0, None, 1.0), (0.7, 3.0, 2.0)]


@pytest.mark.parametrize("penalties", SOME)
def test_trainers_penalise_as_the_rule_says_in_float64(penalties):
    for temperature, softcap, scale in FORMS:
        for how in ("all", "kept"):
            options = HeadOptions(
                5, temperature=temperature, softcap=softcap, scale=scale, penalties=penalties
            )
            want = reference(penalties, options, how)
            for chunk in (1, 5, 64):
                assert_close(ours(replace(options, chunk_tokens=chunk), how), want)


def half_vocabulary() -> bool:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    half = V // 2
    rows = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    for temperature, softcap, scale in FORMS:
        options = HeadOptions(4, temperature, softcap, scale, EVERYTHING, dist.group.WORLD)
        whole = reference(EVERYTHING, options, "kept")
        assert_close(ours(options, "kept", rows), [*whole[:3], whole[3][rows]])
    dist.destroy_process_group()
    return True


def test_two_ranks_with_half_the_vocabulary_each_penalise_alike():
    assert run_ranks(2, half_vocabulary) == [True, True]


# --------------------------------------------------------------------------- engines

HOWS = [*SOME[:4], replace(EVERYTHING, bias=((3, -5.0), (5, 3.0)))]


def drawn_by(world) -> dict[str, tuple]:
    engine = make_engine(world.cfg, world)
    requests = {}
    for i, how in enumerate(HOWS * 2 + [Penalties()]):
        limits = Truncation(top_p=0.9) if i % 2 else Truncation()
        prompt = (5, 6, 7, 5, 6) if i % 3 else (9, 10, 11)
        seed = i if i % 5 else None
        temperature = 0.8 if i % 5 else 0.0
        limits = limits if temperature else Truncation()
        requests[str(i)] = Request(str(i), prompt, 20, temperature, seed, (), limits, how)
    for request in requests.values():
        engine.add(request)
    found = finished(engine)
    engine.close()
    return {key: (requests[key], one.tokens, one.logprobs) for key, one in found.items()}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_engines_penalise_as_trainers_do(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = small_model(tmp_path / "m", initializer_std=0.2, hidden_size=64, heads=2, kv_heads=2)
    cfg = made(
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=str(folder)),
        data=dict(max_prompt_tokens=16),
        sampling=dict(max_response_tokens=24, top_p=0.9),
        engine=dict(kind=kind, dtype="float32", cpu_kv_cache_gib=0.01, max_num_seqs=6),
    )
    (found,) = in_world(cfg, drawn_by)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request, tokens, logprobs in found.values():
        prompt = len(request.prompt)
        ids = torch.tensor(request.prompt + tokens)
        drawn = torch.arange(len(ids)) >= prompt
        row = make_row(ids, [len(ids)], mask=drawn, drawn=drawn)
        options = HeadOptions(
            7, temperature=request.temperature or 1.0, penalties=request.penalties
        )
        with torch.no_grad():
            hidden = lm.model(ids[None]).last_hidden_state[0]
            own, _ = logprobs_and_entropy(
                hidden[prompt - 1 : -1],
                lm.lm_head.weight,
                targets=ids[prompt:],
                options=options,
                rules=row.own.rules,
            )
        gaps = torch.tensor(logprobs) - own
        if request.truncation.is_on:
            assert float(gaps.min()) > -2e-5 and float(gaps.max()) < 0.1054 + 2e-5  # -log 0.9
        else:
            assert float(gaps.abs().max()) < 2e-5, request
    assert len(found) == 11


# --------------------------------------------------------------------------- settings


def problems(**sampling) -> list[str]:
    return validate(good(sampling=sampling, layout=dict(device="cpu")))


def test_settings_read_back_and_what_trainers_cannot_score_is_refused(tmp_path):
    asked = dict(repetition_penalty=1.1, logit_bias={"7": -2, "9": 1.5})
    assert problems(**asked) == [] and problems(presence_penalty=1.0, frequency_penalty=0.1) == []
    cfg = good(sampling=asked)
    (tmp_path / "c.yaml").write_text(dump(cfg))
    assert load_yaml(tmp_path / "c.yaml") == cfg
    assert cfg.sampling.penalties == Penalties(1.1, bias=((7, -2.0), (9, 1.5)))
    for bias, word in (({"x": 1}, "no id"), ({"7": 101}, "in \\[-100"), ({"07": 1}, "no id")):
        (found,) = problems(logit_bias=bias)
        assert re.search(word, found), found
    assert ids_above(cfg, 10) == [] and "9 is no id" in ids_above(cfg, 9)[0]
    (found,) = validate(
        good(
            sampling=dict(presence_penalty=1.0),
            rollout=dict(schedule=dict(over_sample=1.5)),
            layout=dict(device="cpu"),
        )
    )
    assert "rollout.schedule.over_sample" in found and "repetition_penalty" in found
    (found,) = validate(
        good(
            sampling=dict(frequency_penalty=1.0),
            rollout=dict(environment=dict(name="guess_number")),
            layout=dict(device="cpu"),
        )
    )
    assert "each turn is a request" in found


def test_context_parallel_ranks_have_the_rules_of_their_own_tokens():
    tokens, drawn, mask, kept, whole = row_and_kept("kept")
    sets, count = SamplingMasks.from_allowed(kept), len(whole.scored)
    every, seen = whole.own.rules, []
    for rank in range(2):
        slicing = Slicing(group=object(), rank=rank, size=2)
        own = make_row(
            tokens,
            LENGTHS,
            mask=mask,
            slicing=slicing,
            drawn=drawn,
            columns={"sampling_masks": sets} if sets else {},
        ).own
        at, part = own.scored, slice(0, len(own.scored))
        dropped = own.rules.kept.dropped(part, first=0, width=V)
        assert torch.equal(dropped, every.kept.dropped(slice(0, count), first=0, width=V)[at])
        for name in ("all", "response"):
            found, want = (getattr(rules.history, name) for rules in (own.rules, every))
            counts = want.counts(slice(0, count), first=0, width=V)[at]
            assert torch.equal(found.counts(part, first=0, width=V), counts)
        seen += at.tolist()
    assert sorted(seen) == list(range(count))
