"""Expert parallelism without waits for the device: the host knows the sizes of replayed routes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.config import Config, LoraSettings
from spmdrl.model.blocks import experts_modules
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.targets import LoraForm
from spmdrl.model.parallel import expert_parallel, expert_room
from spmdrl.model.parallel.expert_room import Room
from spmdrl.model.transformers_internals import grouped_linear
from spmdrl.train.microbatches import prepare
from tests.helpers.built import changed, training
from tests.helpers.ranks import run_ranks
from tests.model.test_moe import make_moe
from tests.model.test_router_replay import EXPERTS, _config, routed_batch

READS = ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "nonzero")
"""Methods of a tensor that wait for its device."""


class Reads:
    """Counts what the host reads of tensors inside layers with experts, in spmdrl's own code."""

    def __init__(self, hf_model: nn.Module, patch: pytest.MonkeyPatch):
        self.found: Counter[str] = Counter()
        self._depth = 0
        for name in READS:
            patch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        for experts in experts_modules(hf_model).values():
            patch.setattr(experts, "forward", self._inside(experts.forward))

    def _counted(self, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(own: Tensor, *args: Any) -> Any:
            if self._depth and "/spmdrl/" in sys._getframe(1).f_code.co_filename:
                self.found[name] += 1
            return read(own, *args)

        return counted

    def _inside(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def inside(*args: Any, **options: Any) -> Tensor:
            self.found["passes"] += 1
            self._depth += 1
            try:
                return forward(*args, **options)
            finally:  # a repeated pass ends early, by an error of torch's
                self._depth -= 1

        return inside

    def take(self) -> dict[str, int]:
        found = dict(self.found)
        self.found.clear()
        return found


def passed(cfg: Config) -> list[dict[str, Any]]:
    """Run all rows forward and backward, with room for rows of experts and without; return what
    each gives, and what the host reads meanwhile."""
    results = []
    with training(cfg) as (world, trainer), pytest.MonkeyPatch.context() as patch:
        model = trainer.policy.model
        for tensor in model.state_dict().values():  # adapters begin at zero, and would do nothing
            tensor.add_(0.01)
        reads = Reads(model.hf_model, patch)
        batch = routed_batch(world.dp_index(world.rank), world.dp_size, 2)
        rows = [one.row for update in prepare(batch, None, cfg=cfg, model=model) for one in update]
        assert all(row.own.room for row in rows)
        for has_room in (True, False):
            logprobs = []
            for row in rows:
                own = row if has_room else replace(row, own=replace(row.own, room=None))
                found, entropy = model.forward(own)
                logprobs.append(found.detach())
                signs = torch.cos(torch.arange(len(found), dtype=torch.float32))
                ((found * signs).sum() + entropy.sum()).backward()
            gradients = trainer.policy.optimizer.gradients()
            own = {name: gradient.clone() for name, gradient in gradients.items()}
            trainer.policy.optimizer.zero_grad()
            results.append({"logprobs": logprobs, "gradients": own, "reads": reads.take()})
    return results


@pytest.mark.parametrize("lora", [False, True])
def test_layers_read_nothing_on_the_host_and_give_the_same(tmp_path: Path, lora: bool) -> None:
    cfg = _config(make_moe(tmp_path, "qwen3_moe"), tmp_path, "qwen3_moe", world_size=2, ep=2)
    if lora:
        cfg = changed(cfg, model=dict(lora=LoraSettings(rank=2, targets=("experts", "q_proj"))))
    for ours, theirs in run_ranks(2, passed, cfg):
        passes = ours["reads"]["passes"]
        assert ours["reads"] == {"passes": passes}
        assert theirs["reads"] == {"passes": passes, "tolist": passes}
        assert passes == len(ours["logprobs"]) * 2 * 2  # layers, and passes that are repeated
        assert all(map(torch.equal, ours["logprobs"], theirs["logprobs"]))
        for name, gradient in theirs["gradients"].items():
            own = ours["gradients"][name]
            # The CPU's products of rows and gradients round otherwise for another number of rows.
            torch.testing.assert_close(own, gradient, rtol=2e-5, atol=2e-6, msg=name)
        assert any(gradient.abs().max() > 1e-3 for gradient in theirs["gradients"].values())


# --------------------------------------------------------------------------- one layer

TOKENS = 40


@pytest.fixture
def group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def layer(dtype: torch.dtype, *, lora: bool) -> nn.Module:
    """Experts of one layer, with adapters that do something."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=32, num_hidden_layers=1, moe_intermediate_size=24, vocab_size=50)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    config = AutoConfig.for_model(
        "qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=2, **sizes, **heads
    )
    model = AutoModelForCausalLM.from_config(config)
    if lora:
        Adapters(model, LoraForm(rank=2, alpha=4.0, targets=("experts",)))
    (experts,) = experts_modules(model).values()
    experts.to_empty(device="cpu")  # adapters are on meta
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return experts.to(dtype)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_stay_empty_change_nothing(group, dtype: torch.dtype, lora: bool) -> None:
    experts = layer(dtype, lora=lora)
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :2]
    values = torch.randn(TOKENS, 32, generator=generator).to(dtype)
    shares = torch.rand(TOKENS, 2, generator=generator)
    signs = torch.cos(torch.arange(TOKENS * 32.0)).view(TOKENS, 32)
    results = []
    for rows in (None, 2 * TOKENS, 2 * TOKENS + 17):
        experts.room = None if rows is None else Room([rows], [rows])
        inputs = (values.clone().requires_grad_(), shares.clone().requires_grad_())
        for parameter in experts.parameters():
            parameter.grad = None
        out = expert_parallel._forward(experts, inputs[0], index, inputs[1], group=group)
        (out.float() * signs).sum().backward()
        gradients = [p.grad for p in experts.parameters()]
        results.append(([out.detach(), *(x.grad for x in inputs)], gradients))
    (tokens, weights), *others = results
    for own, gradients in others:
        assert all(map(torch.equal, own, tokens))
        for ours, theirs in zip(gradients, weights, strict=True):
            # The CPU's products of rows and gradients round otherwise for another number of rows.
            error = 2e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours, theirs, rtol=error, atol=error)
    assert all(map(torch.equal, others[0][1], weights)), "no row is empty"


# --------------------------------------------------------------------------- what is planned


def _described(routes: Tensor, size: int) -> list[int]:
    return expert_room._described(routes, local=EXPERTS // size, size=size).tolist()


def test_room_is_what_routes_say_and_every_choice_of_tokens_without_one() -> None:
    first = torch.tensor([[[0, 4]], [[1, 2]], [[-1, -1]]])  # experts 0-3 are of rank 0
    second = torch.full((2, 1, 0), -1)  # a rank without records
    ranks = [_described(first, 2), _described(second, 2)]
    assert ranks == [[3, 2, 1, 3, 1], [2, 0, 2, 0, 0]]
    room = [expert_room._room(ranks, rank=rank, num_layers=1, copies=2) for rank in (0, 1)]
    # A token without a record may send both copies to either rank.
    assert room[0] == [Room([3 + 2, 1 + 2], [3 + 2, 0 + 4])]
    assert room[1] == [Room([0 + 4, 0 + 4], [1 + 2, 0 + 4])]


def test_dummies_have_room_for_as_many_experts_as_other_tokens(group) -> None:
    layers = dict(num_layers=1, num_experts=EXPERTS, group=group, device=torch.device("cpu"))
    routes = torch.zeros(5, 1, 2, dtype=torch.int8)
    first, second = expert_room.plan_room([routes, None], [5, 1], **layers)
    assert first == [Room([10], [10])] and second == [Room([2], [2])]
    assert expert_room.plan_room([None, None], [5, 1], **layers) == [None, None]


@pytest.mark.parametrize("num_tokens, has_room", [(64, True), (80, False), (800, True)])
def test_rows_with_few_routes_have_no_room_on_any_rank(num_tokens: int, has_room: bool) -> None:
    unknown = min(num_tokens, 90)
    routes = torch.zeros(num_tokens, 1, 2, dtype=torch.int8)
    routes[:unknown] = -1
    ranks = [_described(routes, 2), _described(torch.zeros(5, 1, 2, dtype=torch.int8), 2)]
    for rank in (0, 1):
        room = expert_room._room(ranks, rank=rank, num_layers=1, copies=2)
        assert (room is not None) == has_room


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_of_a_rank_that_gets_no_row_have_zero_gradients(device) -> None:
    # Not None: ranks that have the same experts wait for each other to reduce their gradients.
    rows = torch.empty(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.ones(4, 32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    offsets = torch.zeros(4, dtype=torch.int32, device=device)
    out = grouped_linear(rows * 1, weight, offsets)
    assert out.shape == (0, 32)
    (out * out.new_ones(0, 1)).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
