"""The routers of a mixture of experts in training: what is measured, how load is balanced, and that
their state is kept. That nothing of it depends on the layout, test_parity_grid.py shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.check.fit import fit_problems
from spmdrl.check.settings import validate
from spmdrl.config import Config, MoeSettings
from spmdrl.model.files.file_tensors import live_tensors
from spmdrl.tools.commands.export import export
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import differing, full_parameters
from tests.helpers.policy_runs import (
    LENGTHS,
    VALID,
    batch,
    changed,
    config,
    own_batch,
    sequence,
    update,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.worlds import another_trainer, refusal, with_trainer
from tests.model.test_moe import make_moe

COEF, RATE, EXPERTS, CHOICES = 0.3, 0.02, 8, 2


def _hooked(folder: Path) -> tuple[torch.nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    """Run plain transformers over the batch: per layer and sequence, the router's logits and the
    experts that it chose."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers = [m.gate for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for at, gate in enumerate(layers):
        gate.register_forward_hook(lambda _, __, out, at=at: seen[at].append((out[0], out[2])))
    for index in range(len(LENGTHS)):
        model(sequence(index)[None])
    return model, seen


def _expected(seen: list[list[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    """The loss and the metrics, written from their definitions in float64."""
    loss, entropies, counts = torch.zeros((), dtype=torch.float64), [], []
    for layer in seen:
        logits = torch.cat([logits for logits, _ in layer]).double()
        chosen = torch.cat([chosen for _, chosen in layer])
        count = torch.tensor([(chosen == e).sum().item() for e in range(EXPERTS)]).double()
        probs = logits.softmax(-1)
        loss = loss + EXPERTS * (count / count.sum() * probs.mean(0)).sum()
        entropies.append(-(probs * probs.log()).sum(-1).mean())
        counts.append(count)
    loads = torch.stack(counts)
    return {
        "loss": loss,
        "entropy": torch.stack(entropies).mean(),
        "counts": loads,
        "max_load": (loads.amax(1) / loads.mean(1)).mean(),
        "idle": (loads == 0).double().mean(),
    }


def _one_step(trainer: Any) -> dict:
    """An update whose only gradient is of the balancing loss: all advantages are 0."""
    gradients, step = {}, trainer.policy.optimizer.step

    def take(found: dict[str, Tensor], *, lr: float) -> None:
        gradients.update({name: g.clone() for name, g in found.items()})
        step(found, lr=lr)

    trainer.policy.optimizer.step = take
    sums = update(trainer, batch(0, 1), step=0, values=torch.zeros(len(LENGTHS)).double())
    return {"sums": sums, "gradients": gradients, "after": full_parameters(trainer)}


def _config(folder: Path, out: Path, **options: object) -> Config:
    cfg = config(folder, out, model={"compute_dtype": "float32", "moe": options})
    return changed(cfg, optimizer={"max_grad_norm": 0.0})


def test_the_balancing_loss_its_gradient_and_the_metrics_are_those_of_their_definitions(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe")
    model, seen = _hooked(folder)
    expected = _expected(seen)
    (found,) = with_trainer(_config(folder, tmp_path, balance="aux", coef=COEF), _one_step)
    metrics = {name: total / count for name, (total, count) in found["sums"].items() if count}
    for name, value in (
        ("router_balance_loss", expected["loss"] / len(seen)),
        ("router_entropy", expected["entropy"]),
        ("router_max_load", expected["max_load"]),
        ("router_idle_experts_frac", expected["idle"]),
    ):
        assert metrics[f"policy/{name}"] == pytest.approx(value.item(), rel=1e-6, abs=1e-9), name
    (COEF * expected["loss"]).backward()
    seen_gradient = 0.0
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gap = (found["gradients"][name] - grad).abs().max().item()
        assert gap <= 1e-5 * max(0.1, grad.abs().max().item()), f"{name}: differs by {gap}"
        seen_gradient = max(seen_gradient, grad.abs().max().item())
    assert seen_gradient > 1e-3, "the balancing loss should have a gradient to compare"


def test_the_correction_bias_moves_by_the_sign_of_the_load_error(tmp_path):
    folder = make_moe(tmp_path, "deepseek_v3")
    model, seen = _hooked(folder)
    counts = _expected(seen)["counts"]
    assert counts.sum() == CHOICES * sum(LENGTHS)
    (found,) = with_trainer(_config(folder, tmp_path, balance="bias", rate=RATE), _one_step)
    ((name, bias),) = [(n, b) for n, b in live_tensors(model).items() if n.endswith("_bias")]
    expected = bias + RATE * torch.sign(counts.mean() - counts[0]).float()
    assert torch.equal(found["after"][name], expected)
    assert (expected != bias).sum() >= EXPERTS - 2
    total, count = found["sums"]["policy/router_max_load"]
    assert total / count == pytest.approx(float(counts.max() / counts.mean()))


def _save(trainer: Any) -> dict[str, Tensor]:
    update(trainer, own_batch(trainer.world), step=0)
    save(trainer, 1)
    return full_parameters(trainer)


def _restore(trainer: Any, missing: list[dict]) -> tuple[dict[str, Tensor], list[str]]:
    restore(trainer, step=1)
    refusals = []
    for model in missing:
        with pytest.raises(ValueError) as refused:
            another_trainer(trainer, changed(trainer.cfg, model=model))
        refusals.append(str(refused.value))
    return full_parameters(trainer), refusals


def test_experts_and_biases_survive_a_resume_on_another_layout_and_an_export(tmp_path, tiny_model):
    folder = make_moe(tmp_path, "deepseek_v3")
    cfg = _config(folder, tmp_path / "out", balance="bias", rate=RATE)
    cfg = changed(cfg, checkpoint={"every_steps": 1})
    saved, _ = with_trainer(changed(cfg, layout={"world_size": 2, "ep": 2}), _save)
    others = [
        {"path": str(tiny_model)},
        {"path": str(make_moe(tmp_path, "mixtral"))},
        {"moe": MoeSettings(balance="aux")},
    ]
    restored, refusals = with_trainer(cfg, _restore, others)[0]
    assert "with a qwen3, which has no experts; leave it out" in refusals[0]
    assert "which a mixtral does not have; take aux" in refusals[1]
    assert "take bias" in refusals[2] and len(refusals) == 3
    start = dict(live_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    assert not differing(restored, saved)
    assert set(differing(start, saved)) == saved.keys(), "all should have been trained"
    # Files of 20 kB, so that the experts of a layer are cut.
    out = export(tmp_path / "out", out=tmp_path / "exported", max_shard_gib=20_000 / 2**30)
    assert len(list(out.glob("*.safetensors"))) > 3
    exported, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert not differing(saved, live_tensors(exported))


def test_experts_that_do_not_divide_and_dense_models_are_refused_with_values_that_work(
    tmp_path, tiny_model
):
    three = config(make_moe(tmp_path, "qwen3_moe", moe_experts=3), tmp_path, world_size=2, ep=2)
    dense = changed(three, model={"path": str(tiny_model)})
    for text in run_ranks(2, refusal, three):
        assert "layout.ep: 2 does not divide the 3 experts" in text
        assert "values that do: 1, 3" in text
    (problem,) = fit_problems(dense)
    assert problem.startswith("layout.ep: 2 with a qwen3, which has no experts; set layout.ep to 1")
    compiled = changed(three, layout={"ep": 1}, model={"kernels": {"compile": True}})
    (problem,) = fit_problems(compiled)
    assert problem.startswith("model.kernels.compile: true with a qwen3_moe, whose experts cannot")
    assert fit_problems(changed(compiled, model={"path": str(tiny_model)})) == []


def test_a_model_without_a_layer_of_experts_is_dense_whatever_its_config_says(tmp_path):
    kinds = dict(layers_block_type=["linear_attention", "mlp", "full_attention"])
    AutoConfig.for_model("nemotron_h", **kinds).save_pretrained(tmp_path)  # with n_routed_experts
    cfg = config(tmp_path, tmp_path / "run", world_size=2, ep=2)
    (problem,) = fit_problems(cfg)
    assert problem.startswith("layout.ep: 2 with a nemotron_h, which has no experts; set layout.ep")
    quantised = {"lora": {"rank": 4, "base": "nf4"}}
    assert fit_problems(changed(cfg, layout={"ep": 1}, model=quantised)) == []


@pytest.mark.parametrize(
    "family, balance, says",
    [
        ("qwen3_moe", "bias", "bias moves the routers' e_score_correction_bias, which a qwen3_moe"),
        ("deepseek_v3", "aux", "aux, whose loss is on softmax probabilities, with a deepseek_v3"),
        ("dense", "aux", "model.moe.balance: aux with a qwen3, which has no experts"),
        ("deepseek_v3", "bias", ""),
        ("qwen3_moe", "aux", ""),
    ],
)
def test_a_balance_that_cannot_be_is_refused_from_the_config_alone(
    family, balance, says, tmp_path, tiny_model
):
    folder = tiny_model if family == "dense" else make_moe(tmp_path, family)
    found = fit_problems(config(folder, tmp_path, model={"moe": {"balance": balance}}))
    assert (says in found[0]) if says else found == []


def test_tp_must_divide_what_it_cuts_and_leaves_experts_whole(tmp_path):
    def problems(family: str, *, tp: int) -> list[str]:
        folder = make_moe(tmp_path, family, hf_config={"intermediate_size": 25})
        return fit_problems(config(folder, tmp_path, world_size=tp, tp=tp))

    assert problems("qwen3_moe", tp=2) == []  # every layer has experts
    (problem,) = problems("qwen3_moe", tp=3)
    assert problem.startswith(
        "layout.tp: 3 does not divide num_attention_heads 4, "
        "num_key_value_heads 2, vocab_size 104; values that divide all that "
        "tp cuts: 1, 2 ("
    )
    (problem,) = problems("deepseek_v3", tp=2)  # its first layer has an MLP
    assert problem.startswith("layout.tp: 2 does not divide intermediate_size 25; values")


def test_options_of_the_section_are_checked():
    def problems(**moe: object) -> str:
        return "\n".join(validate(changed(VALID, model={"moe": moe})))

    assert problems() == problems(balance="aux", coef=0.1) == problems(balance="none") == ""
    assert problems(balance="bias", rate=0.1) == ""
    assert problems(balance="aux", coef=0) == ("model.moe.coef: must be above 0, got 0")
    assert problems(coef=0.1) == (
        "model.moe.coef: 0.1 with model.moe.balance none; it has no effect there; "
        "take balance aux, or leave it out"
    )
    layout = dict(world_size=8, trainer_ranks=6)
    assert validate(changed(VALID, layout=layout | {"cp": 2, "ep": 4})) == [
        "layout.ep: 4 does not divide the 6 ranks of dp_shard * cp * tp; values that do: 1, 2, 3, 6"
    ]
    assert validate(changed(VALID, layout=layout | {"tp": 2, "ep": 6})) == []
