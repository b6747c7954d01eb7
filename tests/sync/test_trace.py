"""The loader trace on small loaders of every kind, and the boxes of real DTensor shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spmdrl.model.tensor_parts import Box, held_boxes
from spmdrl.sync.trace import trace_loader
from tests.helpers.ranks import run_ranks

F32 = torch.float32


class Loader(nn.Module):
    """A model whose `load_weights` is the given function of (parameters, weights)."""

    def __init__(self, load: Any, **shapes: tuple[int, ...]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 7.0)))
        self._load = load

    def load_weights(self, weights: Any) -> None:
        """Call the function."""
        self._load(dict(self.named_parameters()), dict(weights))


def replay(model: nn.Module, weights: dict[str, Tensor]) -> tuple[list[Tensor], list[str]]:
    """Trace, then do the traced copies by hand; return the parameters and the reasons."""
    names = {n: (tuple(w.shape), w.dtype) for n, w in weights.items()}
    trace = trace_loader(model, names, load=model.load_weights)
    assert all(bool((p == 7).all()) for p in model.parameters()), "tracing wrote something"
    for copy in trace.copies:
        at = tuple(slice(a, a + n) for a, n in zip(copy.box.start, copy.box.shape))
        with torch.no_grad():
            copy.view.copy_(weights[copy.name][at])
    return [p.detach() for p in model.parameters()], trace.reasons


def test_fused_sliced_transposed_and_reshaped_loads_are_replayed_exactly():
    def load(p, w):
        p["qkv"].data.narrow(0, 0, 4).copy_(w["q"].narrow(0, 4, 4))
        p["qkv"].data[4:6].copy_(w["k"].chunk(2)[1])
        p["qkv"].data[6:].copy_(w["v"][2:4, :])
        p["turned"].data.copy_(w["t"].t())
        p["split"].data.copy_(w["s"].view(2, 3, 5))
        p["row"].data.view(8, 2).copy_(w["q"][:, 2:4])
        p["inner"].data.view(3, 2, 2).permute(1, 0, 2).copy_(w["i"])
        p["one"].data.fill_(w["scale"].item())

    model, right = (
        Loader(load, qkv=(8, 5), turned=(3, 4), split=(2, 3, 5), row=(16,), inner=(12,), one=(1,))
        for _ in range(2)
    )
    shapes = dict(q=(8, 5), k=(4, 5), v=(5, 5), t=(4, 3), s=(6, 5), i=(2, 3, 2), scale=())
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    got, reasons = replay(model, weights)
    assert reasons == []
    with torch.no_grad():
        right.load_weights(weights.items())
    for a, b in zip(got, right.parameters()):
        assert torch.equal(a, b)


def test_a_tensor_put_in_another_order_of_memory_is_still_the_files():
    def load(p, w):
        p["turned"].data.copy_(w["t"].permute(0, 2, 1).contiguous())
        p["part"].data.copy_(w["t"][1:, :, 2:].clone())

    model, right = (Loader(load, turned=(3, 5, 4), part=(2, 4, 3)) for _ in range(2))
    weights = {"t": torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))}
    got, reasons = replay(model, weights)
    assert reasons == []
    with torch.no_grad():
        right.load_weights(weights.items())
    assert all(torch.equal(a, b) for a, b in zip(got, right.parameters()))


def test_what_a_loader_changed_in_place_is_not_the_files_any_more():
    def load(p, w):
        w["zeros"].zero_()  # as vLLM does with a bias on all ranks but one
        p["zeros"].data.copy_(w["zeros"])
        w["scaled"].mul_(2)
        p["scaled"].data.copy_(w["scaled"])
        copy = w["copied"].clone()
        copy.zero_()
        p["copied"].data.copy_(w["copied"])

    model = Loader(load, zeros=(4,), scaled=(4,), copied=(4,))
    weights = {name: torch.ones(4) for name in ("zeros", "scaled", "copied")}
    got, reasons = replay(model, weights)
    assert [reason.partition(": ")[0] for reason in reasons[:2]] == ["scaled", "copied"]
    assert "is written from aten.mul_.Tensor of scaled" in reasons[0]
    assert not any(reason.startswith("zeros") for reason in reasons)
    assert bool((got[0] == 7).all()), "zeros are the engine's own, and no tensor is sent for them"


def test_padding_and_tied_parameters_count_as_covered():
    def load(p, w):
        p["table"].data[:5].copy_(w["table"])
        p["table"].data[5:].fill_(0)
        p["table"].data[8:].fill_(0)  # no rows

    model = Loader(load, table=(8, 2))
    model.head = nn.Module()
    model.head.weight = model.table
    trace = trace_loader(model, {"table": ((5, 2), F32)}, load=model.load_weights)
    assert trace.reasons == [] and [c.box for c in trace.copies] == [Box((0, 0), (5, 2))]


def test_a_parameter_in_the_memory_of_a_written_one_is_written_too():
    model = Loader(lambda p, w: p["kv_b"].data.copy_(w["kv_b"]), kv_b=(6, 4))
    model.kv_b.data.copy_(torch.zeros(6, 4))
    heads = model.kv_b.data.t().view(4, 2, 3)
    model.W_UK_T = nn.Parameter(heads[..., :1].permute(1, 2, 0))  # as vLLM's MLA makes them
    model.W_UV = nn.Parameter(heads[..., 1:].transpose(0, 1))
    names = {"kv_b": ((6, 4), F32)}
    trace = trace_loader(model, names, load=model.load_weights)
    assert trace.reasons == []
    (copy,) = trace.copies
    copy.view.copy_(torch.arange(24.0).view(6, 4))
    assert model.W_UV[1, :, 0].tolist() == [16, 17, 18, 19]

    model.W_UV = nn.Parameter(model.W_UV.detach().clone())  # a copy, as of quantised weights
    assert trace_loader(model, names, load=model.load_weights).reasons == [
        "W_UV: 16 of 16 elements are not loaded from any checkpoint tensor, the first at [0, 0, 0]"
    ]
    model.W_UV = None
    half = Loader(lambda p, w: p["a"].data[:1].copy_(w["a"][:1]), a=(2, 2))
    half.b = nn.Parameter(half.a.data[1])
    reasons = trace_loader(half, {"a": ((2, 2), F32)}, load=half.load_weights).reasons
    assert reasons == [
        "a: 2 of 4 elements are not loaded from any checkpoint tensor, the first at [1, 0]"
    ]


def test_what_stays_constant_after_loading_is_known_by_its_place():
    def load(p, w):
        p["bias"].data.zero_()
        p["table"].data.fill_(1)
        p["table"].data[1:3, 1:].copy_(w["table"])
        p["scale"].data.fill_(2)

    model = Loader(load, table=(4, 2), bias=(3,), scale=())
    trace = trace_loader(model, {"table": ((2, 1), F32)}, load=model.load_weights)
    assert trace.reasons == []
    for view in trace.constants:
        view.fill_(5)
    written = torch.zeros(4, 2, dtype=torch.bool)
    written[1:3, 1] = True
    assert torch.equal(model.table.data == 5, ~written)
    assert bool((model.bias == 5).all()) and model.scale.item() == 5


def reasons_of(load: Any, **shapes: tuple[int, ...]) -> str:
    """Return why a loader of one or two parameters cannot be traced."""
    model = Loader(load, **shapes)
    names = {n: (s, F32) for n, s in shapes.items()}
    return "\n".join(trace_loader(model, names, load=model.load_weights).reasons)


def test_reasons_name_the_parameter_and_what_is_wrong_with_it():
    w = (4, 2)
    assert reasons_of(lambda p, w: p["a"].data[:3].copy_(w["a"][:3]), a=w) == (
        "a: 2 of 8 elements are not loaded from any checkpoint tensor, the first at [3, 0]"
    )
    assert "b: 8 of 8 elements are not" in reasons_of(
        lambda p, w: p["a"].data.copy_(w["a"]), a=w, b=w
    )
    assert "a: 8 elements are written twice, the second time from b" in reasons_of(
        lambda p, w: [p["a"].data.copy_(w[n]) for n in w], a=w, b=w
    )
    assert "a: is written from aten.mul.Tensor of a" in reasons_of(
        lambda p, w: p["a"].data.copy_(w["a"] * 2), a=w
    )
    assert "a: is changed by aten.add_.Tensor" in reasons_of(
        lambda p, w: [p["a"].data.copy_(w["a"]), p["a"].data.add_(1)], a=w
    )
    assert "a: aten.fill_.Scalar overwrites what was loaded" in reasons_of(
        lambda p, w: [p["a"].data.copy_(w["a"]), p["a"].data[1:].fill_(0)], a=w
    )
    assert "a: takes a part of a that is not a box" in reasons_of(
        lambda p, w: p["a"].data.copy_(w["a"][:1].expand(4, 2)), a=w
    )
    assert "a: takes a in another order of elements" in reasons_of(
        lambda p, w: p["a"].data.view(2, 2, 2).transpose(0, 1).copy_(w["a"].view(2, 2, 2)), a=(8,)
    )
    assert "load_weights of Loader on the live model failed at its start: KeyError: 'c'" in (
        reasons_of(lambda p, w: p["c"], a=w)
    )


def test_a_tensor_made_from_weights_after_loading_is_a_reason():
    model = Loader(lambda p, w: p["a"].data.copy_(w["a"]), a=(4, 2))
    model.absorbed = torch.zeros(4, 2)
    assert "absorbed: is a [4, 2] tensor made after loading" in "".join(
        trace_loader(model, {"a": ((4, 2), F32)}, load=model.load_weights).reasons
    )


def check_held_boxes(mesh_shape: tuple[int, int, int]) -> list[str]:
    """Compare each rank's boxes with the tensors that torch assembles from the same shards."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(5, 3), nn.Linear(1, 7))
    if mesh_shape[2] > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for module in model:
        fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
    tensors = dict(model.named_parameters())
    odd = torch.arange(35.0).view(5, 7)
    tensors["both"] = distribute_tensor(odd, mesh["dp_shard", "tp"], [Shard(0), Shard(0)])
    tensors["columns"] = distribute_tensor(odd, mesh["dp_shard", "tp"], [Shard(1), Shard(0)])
    problems = []
    for name, tensor in tensors.items():
        whole, seen = tensor.full_tensor().detach(), torch.zeros(tensor.shape)
        for box, view in held_boxes(name, tensor):
            at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))
            if not torch.equal(whole[at], view):
                problems.append(f"{name} {tensor.placements} {box}")
            seen[at] += 1
        dist.all_reduce(seen)
        if seen.min() < 1:
            problems.append(f"{name} {tensor.placements}: elements that nobody holds")
    dist.destroy_process_group()
    return problems


def test_boxes_of_fsdp_and_tensor_parallel_shards_show_the_right_elements():
    for mesh_shape in ((1, 2, 2), (1, 3, 1), (2, 1, 2)):
        world_size = mesh_shape[0] * mesh_shape[1] * mesh_shape[2]
        assert run_ranks(world_size, check_held_boxes, mesh_shape) == [[]] * world_size
