"""Data-parallel attention inside an engine replica: what one rank would draw, in every part."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spmdrl.check.settings import rule_problems
from spmdrl.config import Config, LayoutSettings
from spmdrl.engine.protocol import Completion, Request
from spmdrl.engine.vllm import patches
from spmdrl.engine.vllm.core_loop import CoreLoop, Drawn, NewTokens
from spmdrl.engine.vllm.families import check_data_parallel
from spmdrl.engine.vllm.requests import GroupRequests
from spmdrl.errors import Refusal
from tests.gpu.fake_llm import FakeLlm, drawn
from tests.helpers.built import changed
from tests.helpers.worlds import in_world, with_engine
from tests.model.test_moe import make_moe
from tests.sync.test_engine import make_config

PROMPTS = [tuple(range(3, 8 + i)) for i in range(5)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SIZES = {"hidden_size": 128, "intermediate": 48}  # which vLLM's CPU build takes


def request(i: int, key: str = "", **options: Any) -> Request:
    fields = dict(max_tokens=5 + 2 * i, temperature=1.0, seed=i, stop_token_ids=()) | options
    return Request(f"{key}{i}", PROMPTS[i], **fields)


# --------------------------------------------------------------------------- by vLLM


def plain(completions: list[Completion]) -> dict[str, tuple]:
    """Return {key: (tokens, logprobs, versions)}."""
    return {
        c.key: (c.tokens.tolist(), c.logprobs.tolist(), c.versions.tolist()) for c in completions
    }


def run_to_end(engine: Any) -> list[Completion]:
    found = []
    while engine.is_busy:
        found += engine.step()
    return found


def draw(engine: Any, trainer: Any) -> dict[str, Any]:
    """Draw more and fewer requests than parts, abort some, replace weights within others, score."""
    found: dict[str, Any] = {}
    for i in range(5):
        engine.add(request(i))
    found["parts"] = Counter(one.part for one in engine._loop.unfinished)
    found["all"] = plain(run_to_end(engine))
    engine.add(request(2, "alone "))
    found["alone"] = plain(run_to_end(engine))
    for i in range(4):
        engine.add(request(i, "aborted "))
    for _ in range(4):
        engine.step()
    found["so far"] = {k: [*v] for k, v in engine.tokens_so_far(["aborted 1", "other"]).items()}
    found["unfinished"] = plain(engine.unfinished())
    found["aborted"] = plain(engine.abort_all())
    assert not engine.is_busy and engine.step() == []
    for i in range(4):
        engine.add(request(i, "later ", max_tokens=7 + i))
    finished = [*engine.step(), *engine.step()]
    engine.weights_changed(3)
    found["later"] = plain([*finished, *run_to_end(engine)])
    found["scores"] = tuple(scores.tolist() for scores in engine.score(PROMPTS))
    return found


def drawn_by(folder: Path, **layout: Any) -> list[dict[str, Any]]:
    cfg = make_config(
        folder, layout=LayoutSettings(placement="colocated", **layout), dtype="float32"
    )
    if layout["world_size"] > 1:
        options = cfg.engine.options | {"enable_expert_parallel": True}
        cfg = changed(cfg, engine=dict(options=options))
    return with_engine(cfg, draw)


def assert_alike(found: Any, right: Any) -> None:
    """Compare nested values, numbers up to rounding."""
    if isinstance(right, dict):
        assert found.keys() == right.keys()
        for key in right:
            assert_alike(found[key], right[key])
    elif isinstance(right, tuple):
        for one, other in zip(found, right, strict=True):
            assert_alike(one, other)
    else:
        assert found == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        dict(world_size=2, inference_dp=2),
        pytest.param(dict(world_size=4, inference_dp=2, inference_tp=2), marks=pytest.mark.grid),
        pytest.param(dict(world_size=4, inference_dp=4), marks=pytest.mark.grid),
    ],
)
def test_a_replica_of_several_parts_draws_what_one_rank_draws(layout, tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe", **SIZES)
    (right,) = drawn_by(folder, world_size=1)
    assert right.pop("parts") == {0: 5} and len(right["all"]) == 5
    assert {*right["later"]["later 2"][2]} == {-1, 3}
    for found in drawn_by(folder, **layout):
        numbers = found.pop("parts")
        assert len(numbers) == layout["inference_dp"] and max(numbers.values()) <= 3
        assert_alike(found, right)


# --------------------------------------------------------------------------- the exchange on CPUs


def exchange(world: Any) -> list[Any]:
    """Gather and sum rows of which rank r has r + 1, of two dtypes; one rank has none."""
    group = SimpleNamespace(
        world_size=world.world_size, rank_in_group=world.rank, device_group=dist.group.WORLD
    )
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in ([1, 2, 3], [2, 0, 1], None):
            counts = sizes or [2, 2, 2]
            generator = torch.Generator().manual_seed(0)
            whole = torch.randn(sum(counts), 4, generator=generator).to(dtype)
            own = whole.split(counts)[world.rank]
            rows, ids = patches._gather_rows(group, [own, own[:, 0].contiguous()], sizes=sizes)
            assert torch.equal(rows, whole) and torch.equal(ids, whole[:, 0])
            parts = torch.randn(3, sum(counts), 4, generator=generator).to(dtype)
            summed = patches._sum_rows(group, parts[world.rank], sizes=sizes)
            right = parts.double().sum(dim=0).split(counts)[world.rank]
            assert summed.dtype == dtype and summed.shape == right.shape
            error = (summed.double() - right).abs()
            limit = 4 * torch.finfo(dtype).eps * parts.double().abs().sum(dim=0).max()
            found.append(bool((error <= limit).all()))
    return found


def test_ranks_exchange_different_numbers_of_rows():
    cfg = Config(layout=LayoutSettings(placement="offline", world_size=3, device="cpu"))
    assert in_world(cfg, exchange) == [[True] * 6] * 3


# --------------------------------------------------------------------------- the loop


class Parts:
    """The loops of two parts, each in a thread of its own."""

    def __init__(self) -> None:
        self.llms = [FakeLlm(nn.Module()) for _ in range(2)]
        self._barrier = threading.Barrier(2, timeout=30)
        self._told: list[Any] = [None, None]
        self.loops = [
            CoreLoop(llm, part=i, parts=2, gather=self._gather(i))
            for i, llm in enumerate(self.llms)
        ]
        for llm in self.llms:
            llm.engine_core.execute_dummy_batch = mock.Mock()

    def _gather(self, part: int) -> Callable[[list[NewTokens]], list[list[NewTokens]]]:
        def gather(own: list[NewTokens]) -> list[list[NewTokens]]:
            self._told[part] = own
            self._barrier.wait()
            told = [*self._told]
            self._barrier.wait()
            return told

        return gather

    def each(self, do: Callable[[CoreLoop], Any]) -> list[Any]:
        """Return what both loops return, once both have."""
        found: list[Any] = [None, None]

        def run(part: int) -> None:
            found[part] = do(self.loops[part])

        threads = [threading.Thread(target=run, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return found

    def add(self, one: Request) -> list[Drawn]:
        def add(loop: CoreLoop) -> Drawn:
            samples = GroupRequests(loop, model_config=None, returns_masks=False)
            return samples.add(one, salt="0", lora=None)

        return self.each(add)

    def queued(self) -> list[int]:
        return [len(llm.engine_core.requests) for llm in self.llms]


def test_the_part_with_the_fewest_requests_takes_the_next():
    parts = Parts()
    for i, (tokens, part) in enumerate([(2, 0), (4, 1), (3, 0)]):
        assert [own.part for own in parts.add(request(i, max_tokens=tokens))] == [part] * 2
    assert parts.queued() == [2, 1]
    for done in ([], ["0"], ["2"]):
        finished = parts.each(CoreLoop.step)
        assert [[own.key for own in of_part] for of_part in finished] == [done] * 2
    # Part 0 is idle, and every rank knows it.
    assert parts.queued() == [0, 1]
    idle, busy = (llm.engine_core.execute_dummy_batch for llm in parts.llms)
    assert [[own.key for own in each] for each in parts.each(CoreLoop.step)] == [["1"]] * 2
    assert (idle.call_count, busy.call_count) == (1, 0)
    assert parts.each(CoreLoop.step) == [[], []] and idle.call_count == 1
    assert [own.part for own in parts.add(request(3))] == [0, 0]


def test_every_part_knows_what_was_drawn_and_aborts_its_own():
    parts = Parts()
    own = [parts.add(request(i)) for i in range(3)]
    parts.each(CoreLoop.step)
    for i, pair in enumerate(own):
        assert [[*one.tokens] for one in pair] == [[drawn(PROMPTS[i], 0)]] * 2
        assert [one.logprobs.tolist() for one in pair] == [[-0.25]] * 2
    parts.each(lambda loop: loop.abort([*loop.unfinished][1:]))
    assert parts.queued() == [1, 0]
    assert [one.key for one in parts.loops[1].unfinished] == ["0"]
    assert parts.add(request(4))[0].part == 1


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "changes, why",
    [
        (
            dict(model=dict(moe=dict(replay=True)), layout=dict(inference_tp=2)),
            "each rank of a part routes some of its tokens",
        ),
        (dict(sampling=dict(top_p=0.9)), "the sampling masks of its own part alone"),
        (
            dict(model=dict(lora=dict(rank=4, push="adapter"))),
            "layout.inference_dp: 2 with model.lora.push adapter",
        ),
        (
            dict(engine=dict(options=dict(speculative_config=NGRAM))),
            "parts would draft different numbers of tokens",
        ),
        (dict(engine=dict(options=dict(quantization="fp8"))), "exchanged with plain weights alone"),
    ],
)  # fmt: skip
def test_what_parts_do_not_share_is_refused(changes, why):
    layout = LayoutSettings(world_size=4, trainer_ranks=2, inference_dp=2, device="cpu")
    cfg = changed(Config(layout=layout), **changes)
    assert any(why in problem for problem in rule_problems(cfg)), rule_problems(cfg)
    one = replace(cfg, layout=replace(layout, inference_dp=1))
    assert not any("inference_dp" in problem for problem in rule_problems(one))


def test_models_that_parts_were_not_tried_with_are_refused(tmp_path):
    layout = LayoutSettings(world_size=4, trainer_ranks=2, inference_dp=2)
    for family, options, says in [
        ("qwen3_moe", dict(mixers=["mamba"], is_seeing=False), "of their own (mamba)"),
        ("qwen3_moe", dict(mixers=[], is_seeing=True), "with a qwen3_moe, which has images"),
        ("deepseek_v3", dict(mixers=[], is_seeing=False), "latent attention"),
    ]:
        cfg = make_config(make_moe(tmp_path / says[:4], family), layout=layout)
        with pytest.raises(Refusal, match=re.escape(says)):
            check_data_parallel(cfg, **options)
    cfg = make_config(make_moe(tmp_path / "plain", "qwen3_moe"), layout=layout)
    check_data_parallel(cfg, mixers=[], is_seeing=False)
