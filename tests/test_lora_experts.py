"""Adapters of fused experts: what they compute, sharded in every way, PEFT's files, engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from policy_runs import batch, config, full_parameters, update
from ranks import run_ranks
from safetensors.torch import load_file
from test_lora import _merged, _resume, _save, _set_b
from test_moe import make_moe
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from spmdrl.commands.export import export
from spmdrl.config import Config, LoraSettings, ModelSettings
from spmdrl.model.file_tensors import file_tensors
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.settings import lora_form
from spmdrl.model.lora.targets import LoraForm
from spmdrl.model.shards import Held

RANK, ALPHA = 3, 12
CASES = {  # ranks, ep, experts, rank of the adapters
    "ep": (4, 2, 8, RANK),
    "fsdp alone": (2, 1, 8, RANK),
    "by rows, A by expert": (4, 2, 2, RANK),  # fewer experts than ranks, and 3 rows for 2 ranks
    "by rows": (4, 2, 2, 4),
}


# --------------------------------------------------------------------------- one layer


def _layer(where: Path, family: str) -> tuple[nn.Module, Adapters, dict[str, Tensor]]:
    """A layer of experts with adapters, and its parameters in float64."""
    hf_model = build_meta_model(ModelSettings(path=str(make_moe(where, family))))
    adapters = Adapters(hf_model, LoraForm(rank=RANK, alpha=ALPHA, targets=("experts",)))
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


def _expected(own: dict[str, Tensor], x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Each token through its experts, one by one, with W + scale * B A."""
    scale, rows = ALPHA / RANK, []
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
        torch.testing.assert_close(
            ours.double(), theirs, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    with torch.no_grad():
        on = experts(x, chosen, weights)
        for name, parameter in experts.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
        with adapters.off():
            off = experts(x, chosen, weights)
        assert torch.equal(experts(x, chosen, weights), off)  # B is zero: the same bits
        assert (on - off).abs().max() > 0.1


# --------------------------------------------------------------------------- many ranks


@pytest.fixture(scope="module", params=list(CASES))
def saved(request, tmp_path_factory) -> tuple[Config, list[dict]]:
    """Two steps on a mesh, a checkpoint, and all that would be sent."""
    where, (ranks, ep, experts, rank) = tmp_path_factory.mktemp("saved"), CASES[request.param]
    folder = make_moe(where, "qwen3_moe", moe_experts=experts)
    cfg = config(
        folder,
        where / "out",
        world_size=ranks,
        model={
            "lora": {"rank": rank, "alpha": ALPHA},
            "memory": {"activation_checkpointing": "selective"},
        },
    )
    cfg = replace(cfg, layout=replace(cfg.layout, ep=ep))
    return cfg, run_ranks(ranks, _save, cfg)


def _scale(cfg: Config) -> float:
    return ALPHA / cfg.model.lora.rank


def test_what_is_sent_of_experts_is_merged_bit_by_bit(saved):
    cfg, ranks = saved
    merged = _merged(ranks[0]["state"], scale=_scale(cfg))
    held = Held(merged, file_tensors(build_meta_model(cfg.model)))
    expected = {name: held.value(name, box).read() for name, (box,) in held.boxes().items()}
    assert "model.layers.1.mlp.experts.1.up_proj.weight" in expected
    covered = {name: torch.zeros_like(t) for name, t in expected.items()}
    for found in ranks:
        for name, box, value in found["values"]:
            part = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))
            assert torch.equal(value, expected[name][part]), name
            covered[name][part] = 1
    assert all(bool(t.all()) for t in covered.values())


@pytest.mark.parametrize("saved", ["ep", "by rows, A by expert"], indirect=True)
def test_a_checkpoint_of_experts_adapters_resumes_on_another_layout(saved):
    cfg, ranks = saved
    one = replace(cfg, layout=replace(cfg.layout, world_size=1, ep=1))
    found, expected = run_ranks(1, _resume, {"one": one})[0]["one"], ranks[0]["state"]
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    trained = {key.rpartition(".")[2] for key in expected if key.startswith("optimizer.exp_avg.")}
    assert "gate_up_proj_lora_A" in trained and "down_proj" not in trained


def test_exports_of_experts_adapters_compute_alike_in_peft_and_load_again(saved, tmp_path):
    cfg, ranks = saved
    export(Path(cfg.output_dir), out=tmp_path / "merged")
    export(Path(cfg.output_dir), out=tmp_path / "adapter", adapter=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = _merged(ranks[0]["state"], scale=_scale(cfg))
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    tokens = torch.randint(5, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(cfg.model.path)
    with torch.no_grad():
        plain, ours = base(tokens).logits, merged(tokens).logits
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert (plain - ours).abs().max() > 1e-2
    for name, tensor in _read(tmp_path / "adapter", cfg).items():
        assert torch.equal(tensor, ranks[0]["state"][f"model.{name}"]), name


def _read(folder: Path, cfg: Config) -> dict[str, Tensor]:
    """What a policy that starts from an adapter's folder starts with."""
    hf_model = build_meta_model(ModelSettings(path=cfg.model.path))
    adapters = Adapters(hf_model, lora_form(LoraSettings(path=str(folder))))
    shards = {name: torch.empty(hf_model.get_parameter(name).shape) for name in adapters.names}
    adapters.fill(shards, seed=1)
    return shards


def _norms(cfgs: list[Config]) -> list[dict]:
    """The first update's norms under each config, with the dtypes of what is trained and not."""
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world, found = World.start(cfgs[0]), []
    for cfg in cfgs:
        trainer = make_trainer(cfg, world)
        _set_b(trainer)
        own = batch(world.dp_index(world.rank), world.dp_size)
        sums = update(trainer, own, step=0)
        shards = trainer.weights.shards()
        experts = {n: p.dtype for n, p in shards.items() if ".experts." in n}
        found.append(
            {
                "norm": sums["policy/grad_norm"][0],
                "own": {d for n, d in experts.items() if "lora" in n},
                "frozen": {d for n, d in experts.items() if "lora" not in n},
                "same": _equals_reference(trainer, own),
            }
        )
    world.close()
    return found


def _equals_reference(trainer: object, own: object) -> list[bool]:
    """Whether the reference is the policy as it is with adapters, per row."""
    return [
        bool(torch.equal(row["old_logprobs"], row["ref_logprobs"]))
        for row in trainer.annotate(own, step=1).columns[0]
    ]


def test_experts_adapters_stay_float32_and_are_gathered_in_the_compute_dtype(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe")
    full = config(
        folder,
        tmp_path / "out",
        world_size=2,
        kl_coef=0.1,
        kl_in="reward",
        kl="k1",
        model={"lora": {"rank": RANK, "targets": ["experts"]}},
    )
    full = replace(full, layout=replace(full.layout, ep=2))
    half = replace(full, model=replace(full.model, compute_dtype="bfloat16"))
    for first, second in run_ranks(2, _norms, [full, half]):
        assert second["norm"] == pytest.approx(first["norm"], rel=0.1) and first["norm"] > 0
        assert first["own"] == second["own"] == {torch.float32}
        assert first["frozen"] == {torch.float32} and second["frozen"] == {torch.bfloat16}
        assert not all(first["same"])  # one row may have no tokens in the loss


# --------------------------------------------------------------------------- PEFT's own


def _scored(cfg: Config, tokens: list[list[int]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    from spmdrl.roles import make_trainer
    from spmdrl.world import World

    world = World.start(cfg)
    trainer = make_trainer(cfg, world)
    scores, whole = trainer.weights.score(tokens), full_parameters(trainer)
    world.close()
    return scores, whole


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
    tokens = torch.randint(5, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = theirs(tokens).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    cfg = config(
        folder, tmp_path / "out", world_size=2, model={"lora": {"path": str(tmp_path / "adapter")}}
    )
    cfg = replace(cfg, layout=replace(cfg.layout, ep=2))
    (scores, whole), _ = run_ranks(2, _scored, cfg, tokens.tolist())
    torch.testing.assert_close(scores[0][1:], expected, rtol=1e-5, atol=1e-5)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == sum("lora" in name for name in whole)
    outer = stored["base_model.model.model.layers.1.mlp.experts.lora_B.weight"]
    key = "down_proj" if "down" in parameters[0] else "gate_up_proj"
    own = whole[f"model.layers.1.mlp.experts.{key}_lora_B"]
    assert torch.equal(own[5, :, 1], outer[:, 1 * 8 + 5])  # [out, r E], experts innermost
