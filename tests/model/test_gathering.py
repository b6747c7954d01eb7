"""When FSDP2 gathers weights and reduces gradients changes traffic and memory, not results."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmdrl.config import Config
from spmdrl.model.parallel.recompute import blocks_ahead
from tests.helpers.built import changed, made, small_model, started
from tests.helpers.policy_runs import batch, config, update
from tests.helpers.ranks import run_ranks

LAYERS = 3
WAYS = {
    "auto": {},
    "always": {"reshard": "always"},
    "never": {"reshard": "never"},
    "last": {"reduce": "last"},
    "never, last": {"reshard": "never", "reduce": "last"},
    "prefetch 1": {"prefetch": 1},
    "prefetch 2": {"prefetch": 2, "reshard": "always"},
    "full, prefetch 1": {"activation_checkpointing": "full", "prefetch": 1},
}


class Collectives(TorchDispatchMode):
    """Counts collectives by the name of their operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def _unreduced_bytes(trainer: object) -> int:
    """Bytes of gradients that FSDP2 has not reduced yet."""
    from torch.distributed.fsdp import FSDPModule

    found = 0
    for module in trainer.policy.model.scorer.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                kept = [
                    p.unsharded_accumulated_grad
                    if p.unsharded_accumulated_grad is not None
                    else getattr(p, "_unsharded_param", torch.empty(0)).grad
                    for p in group.fsdp_params
                ]
                found += sum(gradient.nbytes for gradient in kept if gradient is not None)
    return found


def _in_all_ways(cfg: Config) -> dict[str, dict]:
    with started(cfg) as world:
        return {
            way: _in_one_way(changed(cfg, model=dict(memory=own)), world)
            for way, own in WAYS.items()
        }


def _in_one_way(cfg: Config, world: object) -> dict:
    from spmdrl.roles import make_trainer

    trainer, own = make_trainer(cfg, world), batch(world.dp_index(world.rank), world.dp_size)
    gradients: dict[str, Tensor] = {}
    take, waiting = trainer.policy.optimizer.step, []
    updates = trainer._prepare(own)

    def step(found: dict[str, Tensor], *, lr: float) -> None:
        gradients.update({name: g.clone() for name, g in found.items()})
        take(found, lr=lr)

    trainer.policy.optimizer.step = step
    reduce = trainer.policy._reduce

    def watch(*, is_last: bool) -> None:
        waiting.append(_unreduced_bytes(trainer))
        reduce(is_last=is_last)

    trainer.policy._reduce = watch
    with Collectives() as seen:
        sums = [update(trainer, own, step=0)]
    first = dict(gradients)
    sums.append(update(trainer, own, step=1))
    return {
        "counts": dict(seen.counts),
        "first": first,
        "second": dict(gradients),
        "sums": sums,
        "microbatches": len(updates[0]),
        "waiting": waiting[1],
        "numel": sum(p.numel() for p in trainer.weights.shards().values()),
    }


def _assert_alike(found: dict[str, dict]) -> None:
    plain = found["auto"]
    for way, one in found.items():
        for which in ("first", "second"):
            assert one[which].keys() == plain[which].keys()
            for name, gradient in plain[which].items():
                if "last" in way:  # sums are in another order
                    torch.testing.assert_close(one[which][name], gradient, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(one[which][name], gradient), (way, name)
        assert one["sums"][0]["policy/grad_norm"] == pytest.approx(
            plain["sums"][0]["policy/grad_norm"], rel=1e-6
        )
        assert one["sums"][1]["policy/loss"] == pytest.approx(
            plain["sums"][1]["policy/loss"], rel=1e-4, abs=1e-6
        ), way


def _counts(found: dict[str, dict], kind: str) -> dict[str, int]:
    return {way: one["counts"].get(kind, 0) for way, one in found.items()}


def test_fewer_collectives_and_the_same_gradients(tmp_path):
    model = small_model(tmp_path / "model", layers=LAYERS)
    for found in run_ranks(2, _in_all_ways, config(model, tmp_path, world_size=2)):
        _assert_alike(found)
        microbatches = found["auto"]["microbatches"]
        assert microbatches == 2
        gathers, reduces = (_counts(found, k) for k in ("allgather_base", "reduce_scatter_base"))
        # The root once; each block forward and, unless its weights are still there, backward.
        assert gathers["always"] == gathers["prefetch 2"] == microbatches * (1 + 2 * LAYERS)
        assert (
            gathers["auto"] == gathers["last"] == gathers["prefetch 1"] == microbatches * 2 * LAYERS
        )
        assert gathers["never"] == gathers["never, last"] == microbatches * (1 + LAYERS)
        for way, count in reduces.items():
            assert count == (1 if "last" in way else microbatches) * (1 + LAYERS), way
            held = 4 * found[way]["numel"] if "last" in way else 0
            assert found[way]["waiting"] == held, "float32 of every weight, before the last"


def test_nor_do_copies_and_experts_of_their_own_shards(tmp_path):
    model = small_model(tmp_path / "moe", architecture="qwen3_moe", intermediate=16)
    cfg = changed(config(model, tmp_path, world_size=4, dp_replicate=2), layout=dict(ep=2))
    for found in run_ranks(4, _in_all_ways, cfg):
        _assert_alike(found)
        counts = _counts(found, "reduce_scatter_base")
        assert counts["last"] * found["auto"]["microbatches"] == counts["auto"] > 0
        # Over copies gradients are reduced once per update in any way.
        assert len(set(_counts(found, "allreduce").values())) == 1


@pytest.mark.parametrize(
    "memory, expected",
    [
        ({"reshard": "sometimes"}, "reshard: 'sometimes' is not one of auto, always, never"),
        ({"reduce": "first"}, "model.memory.reduce: 'first' is not one of each, last"),
        ({"prefetch": True}, r"model.memory.prefetch: expected INT\|auto, got True"),
    ],
)
def test_unknown_ways_are_refused(memory, expected, tmp_path):
    with pytest.raises(ValueError, match=expected):
        config("model", tmp_path, model={"memory": memory})


def test_blocks_are_asked_for_ahead_where_the_host_waits_within_them():
    class Place:
        device, cfg = torch.device("cuda"), made(layout=dict(ep=2))

    assert blocks_ahead("auto", Place) == 1
    assert blocks_ahead(0, Place) == 0
    Place.cfg = made(layout=dict(ep=2), model=dict(moe=dict(replay=True)))
    assert blocks_ahead("auto", Place) == 0 and blocks_ahead(2, Place) == 2
    Place.cfg = made(layout=dict(tp=2))
    assert blocks_ahead("auto", Place) == 0
    Place.cfg = made(layout=dict(ep=2))
    Place.device = torch.device("cpu")
    assert blocks_ahead("auto", Place) == 0 and blocks_ahead(3, Place) == 3
