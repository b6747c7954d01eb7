"""Speculative decoding: draft tokens change how fast vLLM draws, and nothing of what it draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import Config, Penalties
from spmdrl.engine.protocol import UNTRUNCATED, Completion, Request, Truncation
from spmdrl.engine.vllm.core_loop import Drawn
from spmdrl.engine.vllm.records import _WatchedMasks
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.scorer import make_row
from spmdrl.sampling_masks import SamplingMasks
from tests.engine.test_router_replay import differing
from tests.helpers.built import made
from tests.helpers.tiny import tiny_folder
from tests.helpers.worlds import in_world, make_engine
from tests.model.test_moe import make_moe

NGRAM = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)
VOCAB = 12
LONGEST = 40
LOOP = (3, 4, 5, 3, 4, 5, 3, 4)
PROMPTS = (LOOP, (9,), (6, 7, 6, 7), (9,), (8, 3, 8))
HOWS = (
    (1.0, UNTRUNCATED, Penalties()),
    (0.6, UNTRUNCATED, Penalties()),
    (0.0, UNTRUNCATED, Penalties()),
    (0.8, Truncation(top_p=0.8), Penalties()),
    (1.0, Truncation(top_k=3), Penalties()),
    (0.7, Truncation(top_p=0.9, top_k=6), Penalties(1.2, 0.3, 0.2)),
    (1.0, UNTRUNCATED, Penalties(repetition=1.3, frequency=-0.2)),
)


def drafting(folder: Path, *, tp: int = 1, **sections) -> Config:
    layout = dict(placement="colocated", world_size=tp, inference_tp=tp, device="cpu")
    engine = dict(
        dtype="float32",
        cpu_kv_cache_gib=0.02,
        max_num_seqs=6,
        options={"speculative_config": NGRAM},
    )
    fields = dict(
        layout=layout,
        model=dict(path=str(folder)),
        data=dict(max_prompt_tokens=8),
        sampling=dict(max_response_tokens=LONGEST - 8, top_p=0.9),
        engine=engine,
    )
    for name, changes in sections.items():
        fields[name] = fields.get(name, {}) | changes
    return made(**fields)


def model_folder(folder: Path) -> Path:
    return tiny_folder(folder, "qwen3", vocab_size=VOCAB, num_key_value_heads=2, head_dim=32)


def asked() -> list[Request]:
    """Requests of all kinds. Most end early, and others take their places while some still draw."""
    requests = []
    for i in range(42):
        temperature, truncation, penalties = HOWS[i % len(HOWS)]
        prompt = PROMPTS[i % len(PROMPTS)]
        tokens = LONGEST - len(prompt) if i % 3 == 0 else 5 + i % 11
        stops = (10,) if i % 4 == 0 else ()
        requests.append(
            Request(str(i), prompt, tokens, temperature, i, stops, truncation, penalties)
        )
    return requests


def draw(engine, requests: list[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    return rest(engine)


def rest(engine) -> dict[str, Completion]:
    found = {}
    while engine.is_busy:
        found |= {completion.key: completion for completion in engine.step()}
    return found


def logprobs_of(lm, request: Request, tokens: Tensor, masks: SamplingMasks | None) -> Tensor:
    """Return what a trainer finds for the tokens of a response by one full pass."""
    prompt = len(request.prompt)
    ids = torch.cat([torch.tensor(request.prompt), tokens])
    drawn = torch.arange(len(ids)) >= prompt
    columns = {}
    if masks is not None:
        whole = SamplingMasks.from_allowed(torch.ones(prompt, VOCAB, dtype=torch.bool))
        every = SamplingMasks.concat([whole, masks], [prompt, len(masks)])
        columns = {"sampling_masks": every}
    row = make_row(ids, [len(ids)], mask=drawn, drawn=drawn, columns=columns)
    options = HeadOptions(64, temperature=request.temperature or 1.0, penalties=request.penalties)
    with torch.no_grad():
        hidden = lm.model(ids[None]).last_hidden_state[0]
        found, _ = logprobs_and_entropy(
            hidden[prompt - 1 : -1],
            lm.lm_head.weight,
            targets=ids[prompt:],
            options=options,
            rules=row.own.rules,
        )
    return found


def assert_scored(lm, request: Request, completion: Completion) -> None:
    masks = SamplingMasks.of(completion.extra_columns)
    assert (masks is not None) == request.is_cut
    want = logprobs_of(lm, request, completion.tokens, masks)
    gap = float((completion.logprobs - want).abs().max())
    assert gap < 3e-5, (request, gap)


def loaded(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


# --------------------------------------------------------------------------- logprobs


def lowest_ids(engine) -> list[int]:
    """Note the lowest draft token of each step that has any."""
    sampler = engine._runner.rejection_sampler
    sample = sampler.forward
    found = []

    def watched(metadata, *others):
        if len(metadata.draft_token_ids):
            found.append(int(metadata.draft_token_ids.min()))
        return sample(metadata, *others)

    sampler.forward = watched
    return found


def drawn_twice(world) -> tuple[dict, dict, list[Tensor]]:
    threads = torch.get_num_threads()
    engine = make_engine(world.cfg, world)
    assert torch.get_num_threads() == threads
    lowest = lowest_ids(engine)
    first = draw(engine, asked())
    engine.weights_changed(engine.version)
    again = draw(engine, asked())
    scored = engine.score([LOOP, LOOP[2:]])
    engine.close()
    assert min(lowest) >= 0, "none is a mere place"
    return first, again, scored


@pytest.mark.proves("drafts", "truncated")
@pytest.mark.proves("drafts", "penalties")
@pytest.mark.proves("drafts", "inference_tp")
@pytest.mark.parametrize("tp", [1, 2])
def test_every_logprob_is_that_of_a_pass_without_drafts(tp, tmp_path):
    folder = model_folder(tmp_path / "m")
    found = in_world(drafting(folder, tp=tp), drawn_twice)
    lm = loaded(folder)
    requests = {request.key: request for request in asked()}
    first, again, scored = found[0]
    assert first.keys() == again.keys() == requests.keys()
    for key, completion in first.items():
        assert_scored(lm, requests[key], completion)
        for other in (again, *(own[0] for own in found[1:])):
            assert completion.tokens.tolist() == other[key].tokens.tolist()
            assert completion.logprobs.tolist() == other[key].logprobs.tolist()
    drafts = [completion.drafts for completion in first.values()]
    accepted = sum(one.num_accepted for one in drafts)
    assert 50 < accepted < sum(one.num_tokens for one in drafts) - 50, "some are replaced"
    for prompt, logprobs in zip((LOOP, LOOP[2:]), scored):
        plain = Request("", prompt[:1], 1, 1.0, None, ())
        want = logprobs_of(lm, plain, torch.tensor(prompt[1:]), None)
        torch.testing.assert_close(logprobs[1:], want, rtol=0, atol=3e-5)


def test_a_mask_of_no_token_is_dropped_for_draft_tokens_alone():
    recorder = _WatchedMasks.__new__(_WatchedMasks)
    masks = SamplingMasks.from_allowed(torch.arange(VOCAB).expand(3, -1) < 6)
    recorder._rows = {"name": [(masks, row) for row in range(3)]}
    drawn = Drawn("key", "name", 1)
    tokens = torch.tensor([4, 5])
    with pytest.raises(RuntimeError, match="sampling masks of 3 tokens, where 2 are"):
        recorder.finished(drawn, tokens)
    drawn.drafts = object()
    assert len(recorder.finished(drawn, tokens)) == 2


# --------------------------------------------------------------------------- routes


def routed(world) -> dict[str, tuple]:
    engine = make_engine(world.cfg, world)
    requests = {str(i): Request(str(i), LOOP[: 3 + i], 24, 0.5, i, ()) for i in range(6)}
    found = draw(engine, [*requests.values()])
    engine.close()
    assert sum(completion.drafts.num_accepted for completion in found.values()) > 10
    return {
        key: (requests[key].prompt + tuple(c.tokens.tolist()), c.extra_columns["routes"].rows)
        for key, c in found.items()
    }


@pytest.mark.proves("drafts", "moe", "moe_replay")
def test_experts_of_accepted_draft_tokens_are_recorded(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe", hidden_size=128, intermediate=48)
    cfg = drafting(folder, model=dict(moe=dict(replay=True)), sampling=dict(top_p=1.0))
    (found,) = in_world(cfg, routed)
    assert all(len(routes) == len(tokens) - 1 for tokens, routes in found.values())
    assert differing(folder, found, margin=1e-4) == []


# --------------------------------------------------------------------------- weights


def replaced(world, other: Path) -> dict[str, Completion]:
    """Replace the weights while requests are under way, which have draft tokens to check."""
    engine = make_engine(world.cfg, world)
    engine.weights_changed(0)
    for i in range(12):
        engine.add(Request(str(i), PROMPTS[i % 3], 24 - i, 1.0, i, ()))
    found = {}
    for _ in range(5):
        found |= {completion.key: completion for completion in engine.step()}
    assert len(engine.unfinished()) > 6
    engine.reload_weights(load_file(other / "model.safetensors").items())
    engine.weights_changed(1)
    found |= rest(engine)
    engine.close()
    return found


@pytest.mark.proves("drafts", "in_flight")
def test_weights_may_change_between_draft_tokens_and_their_check(tmp_path):
    folders = [model_folder(tmp_path / name) for name in ("old", "new")]
    weights = load_file(folders[1] / "model.safetensors")
    save_file(
        {name: tensor * 1.1 for name, tensor in weights.items()},
        folders[1] / "model.safetensors",
        {"format": "pt"},
    )
    cfg = drafting(folders[0], sampling=dict(top_p=1.0))
    (found,) = in_world(cfg, replaced, folders[1])
    lms = [loaded(folder) for folder in folders]
    num_both = 0
    for key, completion in found.items():
        request = Request(key, PROMPTS[int(key) % 3], 24, 1.0, None, ())
        of_each = torch.stack([logprobs_of(lm, request, completion.tokens, None) for lm in lms])
        want = of_each.gather(0, completion.versions[None])[0]
        torch.testing.assert_close(completion.logprobs, want, rtol=0, atol=3e-5)
        num_both += len(completion.versions.unique()) == 2
    assert num_both >= 6


# --------------------------------------------------------------------------- distribution

DRAWS = 4000
DRAWN = 3
CIRCLE = (5, 8, 8, 8, 8, 8, 8, 8)  # the model's own: it accepts many draft tokens
HEAT = 0.5


def drawn_often(world) -> tuple[Tensor, int, int]:
    engine = make_engine(world.cfg, world)
    requests = [Request(str(i), CIRCLE, DRAWN, HEAT, i, ()) for i in range(DRAWS)]
    found = draw(engine, requests).values()
    engine.close()
    drafts = [completion.drafts for completion in found]
    accepted = sum(one.num_accepted for one in drafts)
    return torch.stack([c.tokens for c in found]), accepted, sum(one.num_tokens for one in drafts)


def test_responses_come_as_often_as_the_model_says(tmp_path):
    folder = model_folder(tmp_path / "m")
    cfg = drafting(folder, sampling=dict(top_p=1.0), engine=dict(max_num_seqs=128))
    ((tokens, accepted, drafted),) = in_world(cfg, drawn_often)
    assert accepted > DRAWS // 20 and drafted - accepted > DRAWS // 20
    every = torch.cartesian_prod(*[torch.arange(VOCAB)] * DRAWN)
    ids = torch.cat([torch.tensor(CIRCLE).expand(len(every), -1), every], dim=1)
    with torch.no_grad():
        logits = loaded(folder)(ids).logits[:, len(CIRCLE) - 1 : -1].double()
    logprobs = (logits / HEAT).log_softmax(-1).gather(2, every[..., None])[..., 0].sum(1)
    want = logprobs.exp() * DRAWS
    index = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    seen = torch.bincount(index, minlength=len(every)).double()
    is_often = want >= 5
    want = torch.cat([want[is_often], want[~is_often].sum()[None]])
    seen = torch.cat([seen[is_often], seen[~is_often].sum()[None]])
    freedom = len(want) - 1
    chi_square = float(((seen - want) ** 2 / want).sum())
    assert freedom > 100 and (chi_square - freedom) / (2 * freedom) ** 0.5 < 4, chi_square
