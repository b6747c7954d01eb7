"""The loop around vLLM's engine core: what it reads of steps, and what may overlap."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.outputs import LogprobsLists

from spmdrl.engine.protocol import Request, Truncation
from spmdrl.engine.vllm import patches
from spmdrl.engine.vllm.core_loop import CoreLoop, Drawn, NewTokens
from spmdrl.engine.vllm.requests import GroupRequests
from spmdrl.model_inputs import MultimodalItem, MultimodalItems, TokenIds
from tests.gpu.fake_llm import FakeLlm, drawn

PROMPT = (5, 6, 7)


def request(key: str = "a", prompt: tuple[int, ...] = PROMPT, **options: Any) -> Request:
    fields = dict(max_tokens=3, temperature=1.0, seed=1, stop_token_ids=()) | options
    return Request(key, prompt, **fields)


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm(nn.Module())


@pytest.fixture
def loop(llm) -> CoreLoop:
    return CoreLoop(llm)


def add(loop: CoreLoop, one: Request, *, salt: str = "0") -> Drawn:
    samples = GroupRequests(loop, model_config=None, returns_masks=False)
    return samples.add(one, salt=salt, lora=None)


# --------------------------------------------------------------------------- requests


def test_one_sample_of_a_group_is_validated(loop, llm, monkeypatch):
    images = []
    for key in ("cat", "dog"):
        item = MultimodalItem(key, 1, {"pixel_values": torch.zeros(1, 1)})
        places = torch.tensor([0, -1, -1])
        images.append(TokenIds(PROMPT, MultimodalItems(places, (item,))))
    monkeypatch.setattr(
        "spmdrl.engine.vllm.requests.make_prompt",
        lambda tokens, *, salt, **_: {"prompt_token_ids": list(tokens), "cache_salt": salt},
    )
    samples = GroupRequests(loop, model_config=None, returns_masks=False)
    asked = [
        (request("0"), "0"),
        (request("1", seed=2), "0"),
        (request("2", seed=None), "0"),  # it has no generator
        (request("3", temperature=0.5), "0"),
        (request("4", temperature=0.5), "1"),  # of other weights
        (request("5", temperature=0.5, truncation=Truncation(top_p=0.9)), "1"),
        (request("6", (8, 9)), "1"),
        (request("7", images[0]), "1"),
        (request("8", images[1]), "1"),
        (request("9", images[1], seed=7), "1"),
    ]
    process = llm.input_processor.process_inputs
    with mock.patch.object(llm.input_processor, "process_inputs", wraps=process) as validate:
        for one, salt in asked:
            samples.add(one, salt=salt, lora="policy")
    assert validate.call_count == len(asked) - 2
    queued = [queued for queued, _ in llm.engine_core.requests.values()]
    assert len({id(own.sampling_params) for own in queued}) == len(asked)
    for own, (one, salt) in zip(queued, asked):
        assert own.external_req_id == one.key
        assert tuple(own.prompt_token_ids) == tuple(one.prompt)
        assert (own.cache_salt, own.lora_request) == (salt, "policy")
        params = own.sampling_params
        assert (params.seed, params.temperature) == (one.seed, one.temperature)
        assert params.top_p == one.truncation.top_p


# --------------------------------------------------------------------------- outputs


def test_ids_and_logprobs_are_read_in_their_order(loop):
    own = add(loop, request())
    other = add(loop, request("b", (8, 9), max_tokens=1))
    assert loop.step() == [other]
    assert [*loop.unfinished] == [own]
    assert loop.step() == [] and loop.step() == [own]
    assert own.tokens == [drawn(PROMPT, i) for i in range(3)]
    assert own.logprobs.tolist() == [-0.25, -0.5, -0.75]
    assert own.is_truncated and not loop.unfinished


def test_what_is_drawn_for_an_aborted_request_goes_to_no_other_of_its_key(loop, llm):
    first = add(loop, request())
    loop.step()
    under_way = llm.engine_core.get_output()  # of an asynchronous step
    loop.abort([first])
    again = add(loop, request())
    assert again.key == first.key and again.name != first.name
    with mock.patch.object(llm.engine_core, "get_output", return_value=under_way):
        assert loop.step() == []
    assert again.tokens == [] and len(first.tokens) == 1
    assert [*loop.unfinished] == [again]


def test_several_tokens_of_a_step_are_taken():
    own = Drawn("a", "a-0", 3)
    values = np.array([[-1.0, -9.0], [-2.0, -9.0]], np.float32)
    lists = LogprobsLists(np.array([[3, 8], [4, 8]]), values, np.array([1, 1]))
    own.take(NewTokens.of(EngineCoreOutput("a-0", [3, 4], new_logprobs=lists)))
    assert (own.tokens, own.logprobs.tolist()) == ([3, 4], [-1.0, -2.0])


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_request_that_vllm_gives_up_is_an_error(loop, llm, reason):
    own = add(loop, request("lost"))
    failed = EngineCoreOutputs(outputs=[EngineCoreOutput(own.name, [], finish_reason=reason)])
    llm.engine_core.get_output = lambda: failed
    with pytest.raises(RuntimeError, match=f"request lost: .* after 0 tokens with '{reason}'"):
        loop.step()


# --------------------------------------------------------------------------- overlap


class Pipeline:
    """A scheduler and an executor that note when a step is scheduled, begun and waited for."""

    def __init__(self, num_steps: int):
        self.events: list[str] = []
        self.left = num_steps
        self.name = ""
        self.scheduled = 0
        self.read = 0

    def has_requests(self) -> bool:
        return self.left > 0

    def schedule(self, *_: Any) -> Any:
        self.scheduled += 1
        self.left -= 1
        self.events.append(f"schedule {self.scheduled}")
        return SimpleNamespace(total_num_scheduled_tokens=1, pending_structured_output_tokens=False)

    def get_grammar_bitmask(self, _: Any) -> None:
        return None

    def execute_model(self, *_: Any, non_block: bool) -> Future:
        done: Future = Future()
        done.set_result(None)
        return done

    def sample_tokens(self, *_: Any, non_block: bool) -> Any:
        step = self.scheduled

        def result() -> str:
            self.events.append(f"wait {step}")
            return "output"

        return SimpleNamespace(result=result)

    def update_from_output(self, *_: Any) -> dict[int, EngineCoreOutputs]:
        self.read += 1
        is_last = self.read == self.scheduled and not self.left
        reason = FinishReason.LENGTH if is_last else None
        output = EngineCoreOutput(self.name, [self.read], finish_reason=reason)
        return {0: EngineCoreOutputs(outputs=[output])}


def test_asynchronous_scheduling_prepares_a_step_while_the_last_one_runs(llm):
    pipeline = Pipeline(num_steps=4)
    core = EngineCore.__new__(EngineCore)
    core.scheduler = core.model_executor = pipeline
    core.batch_queue_size = 2
    core.batch_queue = deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue  # as vLLM chooses with async_scheduling
    core.aborts_queue = Queue()
    core.is_mm_encoder_only = core.is_pooling_model = core.log_stats = False
    core.check_for_draft_tokens = core.use_spec_decode = False
    core.async_scheduling = True
    core._weight_version = "default"
    core.vllm_config = mock.Mock()
    client = InprocClient.__new__(InprocClient)
    client.engine_core = core
    client.add_request = lambda queued: None
    llm.engine_core = client
    loop = CoreLoop(llm)
    own = add(loop, request())
    pipeline.name = own.name
    finished: list[Drawn] = []
    while loop.unfinished:
        finished += loop.step()
    assert finished == [own] and own.tokens == [1, 2, 3, 4]
    order = pipeline.events.index
    for step in range(1, 4):
        assert order(f"schedule {step + 1}") < order(f"wait {step}")


# --------------------------------------------------------------------------- random numbers


def test_numbers_that_are_drawn_ahead_are_those_that_vllm_draws_one_by_one():
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    patches.draw_numbers_ahead()
    patched = TopKTopPSampler.forward_cpu
    patches.draw_numbers_ahead()
    assert TopKTopPSampler.forward_cpu is patched, "a second call changes nothing"
    plain = patched.__wrapped__
    sampler = TopKTopPSampler("processed_logprobs")

    def run(draw: Any) -> list[list[float]]:
        """Draw 80 steps of rows that come, go and move, some without a generator."""
        torch.manual_seed(0)
        noise = torch.Generator().manual_seed(1)
        generators = {row: torch.Generator().manual_seed(2**62 + row) for row in (0, 2, 3)}
        found = []
        for step in range(80):
            if step == 30:
                generators[1] = generators.pop(3)
            if step == 50:
                del generators[0]
            logits = torch.randn(5, 40, generator=noise)
            cut = torch.full((5,), 0.8) if step % 3 == 0 else None
            tokens, logprobs = draw(sampler, logits, generators, None, cut)
            found.append([*tokens.tolist(), *logprobs.flatten().tolist()])
        return found

    assert run(patched) == run(plain)


# --------------------------------------------------------------------------- draft tokens


def test_each_draft_token_has_the_temperature_and_top_k_of_its_request():
    from vllm.v1.sample import rejection_sampler

    patches.keep_numbers_of_drafts()
    patched = rejection_sampler.apply_sampling_constraints
    patches.keep_numbers_of_drafts()
    assert rejection_sampler.apply_sampling_constraints is patched, "a second call changes nothing"
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second request has none
    temperatures = torch.tensor([0.7, 3.0, 0.0])
    top_k = torch.tensor([3, 9, 40], dtype=torch.int32)
    metadata = SimpleNamespace(all_greedy=False, temperature=temperatures, top_k=top_k, top_p=None)
    found = patched(logits.clone(), counts, metadata)
    assert (found != -torch.inf).sum(1).tolist() == [3, 3, 40, 40, 40]
    assert torch.equal(found[2:], logits[2:]), "greedy requests are not divided by 0"
    kept = found[:2] != -torch.inf
    torch.testing.assert_close(found[:2][kept], (logits[:2] / 0.7)[kept])
    assert patched(logits[:0], torch.zeros(3, dtype=torch.int32), metadata).shape == (0, 40)
