"""Adapters of fused experts: what they compute, sharded in every way, PEFT's files, engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from spmdrl.config import Config
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.targets import LoraForm
from spmdrl.model.tensor_parts import Held
from tests.helpers.comparing import assert_near, differing, plain_scores
from tests.helpers.policy_runs import changed, config, meta_model, own_batch, update
from tests.helpers.worlds import another_trainer, in_world, with_trainer
from tests.model.test_lora import (
    TOKENS,
    as_read,
    assert_sent,
    exports,
    merged_by_hand,
    resume,
    scores_and_parameters,
    set_b,
    train_and_save,
)
from tests.model.test_moe import make_moe

RANK, ALPHA = 3, 12
CASES = {  # ranks, ep, experts, rank of the adapters
    "ep": (4, 2, 8, RANK),
    "fsdp alone": (2, 1, 8, RANK),
    "by rows, A by expert": (4, 2, 2, RANK),  # fewer experts than ranks, and 3 rows for 2 ranks
    "by rows": (4, 2, 2, 4),
}
DEFAULT = ("ep", "by rows, A by expert")


# --------------------------------------------------------------------------- one layer


def _layer(
    where: Path, family: str, rank: int = RANK
) -> tuple[nn.Module, Adapters, dict[str, Tensor]]:
    """A layer of experts with adapters, and its parameters in float64."""
    hf_model = meta_model(make_moe(where, family))
    adapters = Adapters(hf_model, LoraForm(rank=rank, alpha=ALPHA, targets=("experts",)))
    experts = hf_model.model.layers[1].mlp.experts.to_empty(device="cpu")
    torch.manual_seed(0)
    for name, parameter in experts.named_parameters():
        nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad = "lora" in name
    return (
        experts,
        adapters,
        {n: p.detach().double().requires_grad_("lora" in n) for n, p in experts.named_parameters()},
    )


def _expected(
    own: dict[str, Tensor], x: Tensor, chosen: Tensor, weights: Tensor, rank: int = RANK
) -> Tensor:
    """Each token through its experts, one by one, with W + scale * B A."""
    scale, rows = ALPHA / rank, []
    full = {
        key: own[key] + scale * own[f"{key}_lora_B"] @ own[f"{key}_lora_A"]
        for key in ("gate_up_proj", "down_proj")
    }
    for token, ids, shares in zip(x, chosen.tolist(), weights):
        total = torch.zeros_like(token)
        for expert, share in zip(ids, shares):
            gate, up = (full["gate_up_proj"][expert] @ token).chunk(2)
            total = total + share * (full["down_proj"][expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_values_and_gradients_are_those_of_materialised_weights(family, tmp_path):
    experts, adapters, own = _layer(tmp_path, family)
    x, weights = torch.randn(11, 32), torch.rand(11, 2)
    # One expert gets no token, another most of them.
    chosen = torch.tensor([[0, k % 6 + 1] for k in range(11)])
    inputs = [t.clone().requires_grad_() for t in (x, weights)]
    out = experts(inputs[0], chosen, inputs[1])
    doubles = [t.double().requires_grad_() for t in (x, weights)]
    right = _expected(own, doubles[0], chosen, doubles[1])
    atol = 1e-5 * float(right.detach().abs().max())
    torch.testing.assert_close(out.double(), right, rtol=0, atol=atol)
    slope = torch.linspace(-1, 2, out.numel()).view_as(out)
    (out * slope).sum().backward()
    (right * slope.double()).sum().backward()
    for name, parameter in experts.named_parameters():
        assert (parameter.grad is None) == ("lora" not in name), name
    pairs = {n: (p.grad, own[n].grad) for n, p in experts.named_parameters() if "lora" in n}
    pairs |= {"x": (inputs[0].grad, doubles[0].grad), "weights": (inputs[1].grad, doubles[1].grad)}
    for name, (ours, theirs) in pairs.items():
        atol = 1e-5 * float(theirs.abs().max())
        assert theirs.abs().max() > 0
        assert_near({name: ours.double()}, {name: theirs}, rtol=0, atol=atol)
    with torch.no_grad():
        on = experts(x, chosen, weights)
        for name, parameter in experts.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        with adapters.off():
            off = experts(x, chosen, weights)
        assert torch.equal(experts(x, chosen, weights), off)  # B is zero: the same bits
        assert (on - off).abs().max() > 0.1


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_ranks_whose_rows_are_no_multiple_of_16_bytes_are_computed_in_bfloat16(rank, tmp_path):
    experts, _, own = _layer(tmp_path, "qwen3_moe", rank)
    experts.bfloat16()
    x, weights = torch.randn(11, 32), torch.rand(11, 2)
    chosen = torch.tensor([[0, k % 6 + 1] for k in range(11)])
    out = experts(x.bfloat16(), chosen, weights.bfloat16())
    right = _expected(own, x.double(), chosen, weights.double(), rank)
    assert (out.double() - right).norm() < 0.03 * right.norm()
    out.float().sum().backward()
    right.sum().backward()
    for name, parameter in experts.named_parameters():
        if "lora" in name:
            gap = (parameter.grad.double() - own[name].grad).norm()
            assert gap < 0.05 * own[name].grad.norm(), name


# --------------------------------------------------------------------------- many ranks


@pytest.fixture(
    scope="module",
    params=[
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.grid) for name in CASES
    ],
)
def saved(request, tmp_path_factory) -> tuple[Config, list[dict]]:
    """Two steps on a mesh, a checkpoint, and all that would be sent."""
    where, (ranks, ep, experts, rank) = tmp_path_factory.mktemp("saved"), CASES[request.param]
    folder = make_moe(where, "qwen3_moe", moe_experts=experts)
    cfg = config(
        folder,
        where / "out",
        world_size=ranks,
        ep=ep,
        model={
            "lora": {"rank": rank, "alpha": ALPHA},
            "memory": {"activation_checkpointing": "selective"},
        },
    )
    return cfg, with_trainer(cfg, train_and_save)


def _scale(cfg: Config) -> float:
    return ALPHA / cfg.model.lora.rank


def test_what_is_sent_of_experts_is_merged_bit_by_bit(saved):
    cfg, ranks = saved
    merged = merged_by_hand(ranks[0]["state"], scale=_scale(cfg))
    held = Held(merged, file_tensors(meta_model(cfg.model.path)))
    expected = {name: held.value(name, box).read() for name, (box,) in held.boxes().items()}
    assert "model.layers.1.mlp.experts.1.up_proj.weight" in expected
    assert_sent(ranks, expected)


@pytest.mark.parametrize("saved", ["ep", "by rows, A by expert"], indirect=True)
def test_a_checkpoint_of_experts_adapters_resumes_on_another_layout(saved):
    cfg, ranks = saved
    one, expected = changed(cfg, layout={"world_size": 1, "ep": 1}), ranks[0]["state"]
    assert not differing(in_world(one, resume, {"one": one})[0]["one"], expected)
    trained = {key.rpartition(".")[2] for key in expected if key.startswith("optimizer.exp_avg.")}
    assert "gate_up_proj_lora_A" in trained and "down_proj" not in trained


def test_exports_of_experts_adapters_compute_alike_in_peft_and_load_again(saved, tmp_path):
    cfg, ranks = saved
    merged, (plain, theirs, ours) = exports(cfg, tmp_path)
    expected = merged_by_hand(ranks[0]["state"], scale=_scale(cfg))
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert (plain - ours).abs().max() > 1e-2
    for name, tensor in as_read(tmp_path / "adapter", cfg.model.path)[1].items():
        assert torch.equal(tensor, ranks[0]["state"][f"model.{name}"]), name


def _norms(first: Any, cfgs: list[Config]) -> list[dict]:
    """The first update's norms under each config, with the dtypes of what is trained and not."""
    found = []
    for cfg in cfgs:
        trainer, own = another_trainer(first, cfg), own_batch(first.world)
        set_b(trainer)
        sums = update(trainer, own, step=0)
        experts = {n: p.dtype for n, p in trainer.weights.shards().items() if ".experts." in n}
        rows = trainer.annotate(own, step=1).columns[0]
        found.append(
            {
                "norm": sums["policy/grad_norm"][0],
                "own": {d for n, d in experts.items() if "lora" in n},
                "frozen": {d for n, d in experts.items() if "lora" not in n},
                "same": [torch.equal(row["old_logprobs"], row["ref_logprobs"]) for row in rows],
            }
        )
    return found


def test_experts_adapters_stay_float32_and_are_gathered_in_the_compute_dtype(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe")
    full = config(
        folder,
        tmp_path / "out",
        world_size=2,
        ep=2,
        kl_coef=0.1,
        kl_in="reward",
        kl="k1",
        model={"lora": {"rank": RANK, "targets": ["experts"]}},
    )
    half = changed(full, model={"compute_dtype": "bfloat16"})
    for first, second in with_trainer(full, _norms, [full, half]):
        assert second["norm"] == pytest.approx(first["norm"], rel=0.1) and first["norm"] > 0
        assert first["own"] == second["own"] == {torch.float32}
        assert first["frozen"] == {torch.float32} and second["frozen"] == {torch.bfloat16}
        assert not all(first["same"])  # one row may have no tokens in the loss


# --------------------------------------------------------------------------- PEFT's own


@pytest.mark.parametrize(
    "parameters",
    [
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        ["experts.down_proj"],
        ["model.layers.1.mlp.experts.gate_up_proj"],
    ],
    ids=["both", "down", "one layer"],
)
def test_what_peft_wrote_is_computed_as_peft_does(parameters, tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe")
    torch.manual_seed(0)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(
            r=RANK,
            lora_alpha=2,
            target_modules=["q_proj"],
            target_parameters=parameters,
            init_lora_weights=False,
            use_rslora=True,
        ),
    )
    theirs.save_pretrained(tmp_path / "adapter")
    model = {"lora": {"path": str(tmp_path / "adapter")}}
    cfg = config(folder, tmp_path / "out", world_size=2, ep=2, model=model)
    (scores, whole), _ = with_trainer(cfg, scores_and_parameters)
    torch.testing.assert_close(scores[0], plain_scores(theirs, TOKENS)[0], rtol=1e-5, atol=1e-5)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == sum("lora" in name for name in whole)
    outer = stored["base_model.model.model.layers.1.mlp.experts.lora_B.weight"]
    key = "down_proj" if "down" in parameters[0] else "gate_up_proj"
    own = whole[f"model.layers.1.mlp.experts.{key}_lora_B"]
    assert torch.equal(own[5, :, 1], outer[:, 1 * 8 + 5])  # [out, r E], experts innermost
