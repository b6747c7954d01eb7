"""Recorded routes in the trainer: the experts are those, weights and gradients the trainer's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spmdrl import config as configs
from spmdrl.check.fit import fit_problems
from spmdrl.columns import RouterRoutes
from spmdrl.config import Config
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.blocks import experts_modules
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.head import HeadOptions
from spmdrl.model.load import build_meta_model, compute_buffers, model_folder, read_tensors
from spmdrl.model.parallel import recompute
from spmdrl.model.routers import WEIGHTS, RouterReplay
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.types import Batch
from tests.helpers.built import changed, training
from tests.helpers.policy_runs import LENGTHS, batch, config, full_parameters, sequence, update
from tests.helpers.ranks import run_ranks
from tests.model.test_forward import _rows
from tests.model.test_moe import make_moe

EXPERTS, CHOICES = 8, 2


def routes_of(length: int, layers: int, *, seed: int, unknown: int = 1) -> Tensor:
    """Routes [length, layers, CHOICES] drawn at random; none for the last `unknown` tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(length, layers, EXPERTS, generator=generator).argsort(-1)[..., :CHOICES]
    drawn[length - unknown :] = -1
    return drawn.to(torch.int8)


# --------------------------------------------------------------------------- one router


ROUTERS = {
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen2_moe": "Qwen2MoeTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "flex_olmo": "FlexOlmoTopKRouter",
    "mixtral": "MixtralTopKRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
    "glm4_moe": "Glm4MoeTopkRouter",
    "glm4_moe_lite": "Glm4MoeLiteTopkRouter",
    "dots1": "Dots1TopkRouter",
    "exaone_moe": "ExaoneMoeTopkRouter",
    "gpt_oss": "GptOssTopKRouter",
    "qwen3_vl_moe": "Qwen3VLMoeTextTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "qwen3_5_moe": "Qwen3_5MoeTopKRouter",
    "nemotron_h": "NemotronHTopkRouter",
    "kimi_linear": "KimiLinearTopkRouter",
}


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("family", ROUTERS)
def test_each_familys_routers_weigh_as_the_replay_does(family, norm):
    import importlib

    from transformers import AutoConfig

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, ROUTERS[family])
    hf_config = AutoConfig.for_model(family).get_text_config()
    sizes = dict(
        hidden_size=32,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        n_group=2,
        topk_group=1,
        norm_topk_prob=norm,
        routed_scaling_factor=2.5,
    )
    for name, value in sizes.items():
        setattr(hf_config, name, value)
    router = kind(hf_config)
    generator = torch.Generator().manual_seed(4)
    nn.init.normal_(router.weight, std=0.3, generator=generator)
    if hasattr(router, "e_score_correction_bias"):
        router.e_score_correction_bias += torch.rand(EXPERTS, generator=generator)
    logits, weights, chosen = router(torch.randn(64, 32, generator=generator))
    assert chosen.shape == (64, CHOICES) and len(chosen.unique()) > CHOICES
    assert torch.equal(WEIGHTS[family](router, logits, chosen).to(weights.dtype), weights)


def test_every_family_has_a_router_here():
    assert {*WEIGHTS} == {*ROUTERS, "qwen3_5_moe_text"}


# --------------------------------------------------------------------------- a model


def expected_block(block: nn.Module, x: Tensor, routes: Tensor, *, family: str) -> Tensor:
    """What a block of experts computes of [t, H] float64 rows, by its formulas, token by token."""
    outputs = []
    for row, route in zip(x, routes):
        logits = block.gate.weight @ row
        if family == "deepseek_v3":
            scores = 1 / (1 + torch.exp(-logits))
            choice = scores + block.gate.e_score_correction_bias
        else:
            scores = torch.exp(logits - logits.max())
            scores = choice = scores / scores.sum()
        if int(route[0]) < 0:
            route = choice.topk(CHOICES).indices  # the tests' groups are of all experts
        total = sum(scores[int(e)] for e in route)
        experts, output = block.experts, torch.zeros_like(row)
        for e in map(int, route):
            gate, up = (experts.gate_up_proj[e] @ row).chunk(2)
            own = experts.down_proj[e] @ (gate / (1 + torch.exp(-gate)) * up)
            output = output + scores[e] / total * own
        if family == "deepseek_v3":
            output = output * block.gate.routed_scaling_factor + block.shared_experts(row)
        outputs.append(output)
    return torch.stack(outputs)


def expected_scores(
    folder: Path, family: str, routes: list[Tensor]
) -> tuple[list[Tensor], nn.Module]:
    """Logprobs under given routes by plain transformers in float64, with blocks of our own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
    given: list[Tensor] = []

    def computed(block: nn.Module, layer: int) -> Any:
        return lambda x: expected_block(block, x[0], given[-1][:, layer], family=family)[None]

    for layer, block in enumerate(blocks):
        block.forward = computed(block, layer)
    scored = []
    for row, route in zip(_rows(), routes):
        given.append(route)
        logp = torch.log_softmax(model(row[None]).logits[0].double(), -1)
        scored.append(logp[:-1].gather(1, row[1:, None])[:, 0])
    return scored, model


def replaying_scorer(folder: Path, family: str, *, checkpointing: str) -> tuple[Scorer, list]:
    register_attention()
    hf_model = build_meta_model(configs.ModelSettings(path=str(folder)), attention="spmdrl_padded")
    parts = file_tensors(hf_model)
    enable_packing(hf_model)
    hf_model.to_empty(device="cpu")
    read_tensors(
        CheckpointReader(model_folder(str(folder))), live_tensors(hf_model), parts, copies={}
    )
    compute_buffers(hf_model)
    recompute.checkpoint(hf_model, checkpointing)
    scorer = Scorer(hf_model, HeadOptions(16)).eval()
    layers = [m for m in hf_model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
    RouterReplay(scorer, [layer.gate for layer in layers], model_type=family)
    seen: list[Tensor] = []
    for experts in experts_modules(hf_model).values():
        experts.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(
                args[1] if len(args) > 1 else kwargs["top_k_index"]
            ),
            with_kwargs=True,
        )
    return scorer, seen


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_experts_are_the_recorded_ones_and_gradients_those_of_float64(
    family, checkpointing, tmp_path
):
    folder, rows = make_moe(tmp_path, family), _rows()
    layers = 1 if family == "deepseek_v3" else 2
    routes = [routes_of(len(row), layers, seed=i, unknown=1 + i % 3) for i, row in enumerate(rows)]
    scorer, seen = replaying_scorer(folder, family, checkpointing=checkpointing)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    row = make_row(
        torch.cat(rows),
        [len(row) for row in rows],
        mask=positions > 0,
        columns={"routes": RouterRoutes(torch.cat(routes))},
    )
    logprobs, _ = scorer(row)
    expected, model = expected_scores(folder, family, routes)
    torch.testing.assert_close(logprobs.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    signs = torch.cos(torch.arange(logprobs.numel()).double())
    (logprobs.double() * signs).sum().backward()
    recorded = torch.cat(routes)
    passes = 1 if checkpointing == "none" else 2
    assert len(seen) == passes * layers
    known = recorded[:, 0, 0] >= 0
    for at, chosen in enumerate(seen):  # the repeated passes run from the last layer to the first
        layer = at if at < layers else 2 * layers - 1 - at
        assert torch.equal(chosen[known], recorded[known, layer].long())
        assert bool((chosen[~known] >= 0).all()) and chosen.shape == (len(recorded), CHOICES)
    (torch.cat(expected) * signs).sum().backward()
    theirs, largest = dict(model.named_parameters()), 0.0
    for name, parameter in scorer.named_parameters():
        name = name.replace("base.", "model.").replace("_checkpoint_wrapped_module.", "")
        grad = theirs[name].grad
        gap = (parameter.grad - grad).abs().max().item()
        assert gap <= 2e-5 * max(1.0, grad.abs().max().item()), f"{name}: differs by {gap}"
        if name.endswith("mlp.gate.weight"):
            largest = max(largest, grad.abs().max().item())
    assert largest > 1e-2, "routers should have a gradient to compare"
    plain, _ = scorer(row.without_routes())
    assert (plain - logprobs).abs().max() > 0.01, "other experts should give other logprobs"


# --------------------------------------------------------------------------- meshes


def routed_batch(dp_index: int, dp_size: int, layers: int) -> Batch:
    """The batch with routes: of all tokens but the last, and of none of the fourth sequence."""
    own = batch(dp_index, dp_size)

    def routed(microbatch: Any) -> Any:
        ids = microbatch.sequence_ids.tolist()
        if ids == [-1]:
            return microbatch
        parts = [
            routes_of(LENGTHS[i], layers, seed=i, unknown=LENGTHS[i] if i == 3 else 1) for i in ids
        ]
        return replace(microbatch, extra_columns={"routes": RouterRoutes(torch.cat(parts))})

    return replace(own, updates=tuple(tuple(map(routed, update)) for update in own.updates))


def trained(cfg: Config, layers: int) -> dict[str, Any]:
    """Take two steps with old logprobs and a reference; also score without replay."""
    with training(cfg) as (world, trainer):
        own = routed_batch(world.dp_index(world.rank), world.dp_size, layers)
        trainer.annotate(own, step=0)
        score = trainer.weights.score([sequence(0).tolist()])[0]
        sums = [update(trainer, own, step=step) for step in range(2)]
        return {"sums": sums, "parameters": full_parameters(trainer), "score": score}


def _config(folder: Path, out: Path, family: str, **layout: int) -> Config:
    balance = {"balance": "aux", "coef": 0.2}
    if family == "deepseek_v3":
        balance = {"balance": "bias", "rate": 0.02}
    memory = {"activation_checkpointing": "full"}
    model = {"moe": {"replay": True} | balance, "memory": memory}
    cfg = config(folder, out, kl_coef=0.1, correction="tis", model=model)
    return changed(cfg, layout=layout)


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_moe", marks=pytest.mark.grid), "deepseek_v3"]
)
def test_every_mesh_replays_like_one_process(family, tmp_path):
    folder, layers = make_moe(tmp_path, family), 1 if family == "deepseek_v3" else 2
    (alone,) = run_ranks(1, trained, _config(folder, tmp_path, family), layers)
    recorded = layers * sum(n - 1 for i, n in enumerate(LENGTHS) if i != 3)
    tokens = layers * sum(LENGTHS)
    for sums in alone["sums"]:
        assert sums["policy/router_replayed_frac"] == (recorded, tokens)
        others, known = sums["policy/router_disagreement"]
        # Random routes are the router's own with a probability of 1 / 28.
        assert known == recorded and 0.8 < others / known < 1
    for layout in ({"world_size": 4, "cp": 2, "ep": 2}, {"world_size": 2, "tp": 2}):
        results = run_ranks(
            layout["world_size"], trained, _config(folder, tmp_path, family, **layout), layers
        )
        for result in results:
            for ours, theirs in zip(result["sums"], alone["sums"]):
                assert ours.keys() == theirs.keys()
                for name in ours:
                    assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), name
            for name, parameter in alone["parameters"].items():
                torch.testing.assert_close(
                    result["parameters"][name], parameter, rtol=2e-5, atol=1e-6, msg=name
                )
            torch.testing.assert_close(result["score"], alone["score"], rtol=1e-5, atol=1e-5)


def test_scores_and_the_reference_choose_their_experts_themselves(tmp_path):
    folder = make_moe(tmp_path, "qwen3_moe")
    replayed = changed(_config(folder, tmp_path, "qwen3_moe"), batch=dict(updates_per_step=2))
    lora = configs.LoraSettings(rank=2, targets=("q_proj",))
    kept = {
        "replayed": replayed,
        "adapted": changed(replayed, model=dict(lora=lora)),
        "plain": changed(replayed, model=dict(moe=configs.MoeSettings())),
    }
    found = {name: run_ranks(1, annotated, cfg)[0] for name, cfg in kept.items()}
    plain = found["plain"]
    for name in ("replayed", "adapted"):
        own = found[name]
        assert torch.equal(own["score"], plain["score"])
        torch.testing.assert_close(own["ref"], plain["ref"], rtol=1e-5, atol=1e-5)
        assert (own["old"] - plain["old"]).abs().max() > 0.01
    torch.testing.assert_close(
        found["adapted"]["old"], found["replayed"]["old"], rtol=1e-5, atol=1e-5
    )  # adapters begin at nothing
    torch.testing.assert_close(plain["old"], plain["ref"], rtol=1e-5, atol=1e-5)


def annotated(cfg: Config) -> dict[str, Tensor]:
    with training(cfg) as (_, trainer):
        columns = sum(trainer.annotate(routed_batch(0, 1, 2), step=0).columns, ())
        score = trainer.weights.score([sequence(0).tolist()])[0]
    return {
        "score": score,
        "old": torch.cat([c["old_logprobs"] for c in columns]),
        "ref": torch.cat([c["ref_logprobs"] for c in columns]),
    }


# --------------------------------------------------------------------------- refusals


def test_what_cannot_be_replayed_is_refused_before_anything_starts(tmp_path, tiny_model):
    moe = _config(make_moe(tmp_path, "qwen3_moe"), tmp_path, "qwen3_moe")
    assert fit_problems(moe) == []
    (problem,) = fit_problems(changed(moe, model=dict(path=str(tiny_model))))
    assert problem.startswith("model.moe.replay: true with a qwen3, which has no experts (model.")
    dense = changed(moe, model=dict(path=str(tiny_model), moe=dict(replay=False)))
    divided = changed(dense, engine=dict(options=dict(enable_expert_parallel=True)))
    assert "enable_expert_parallel: true with a qwen3, which" in "\n".join(fit_problems(divided))
    other = make_moe(tmp_path, "mixtral")
    text = (other / "config.json").read_text().replace('"mixtral"', '"phimoe"')
    (other / "config.json").write_text(text)
    (problem,) = fit_problems(changed(moe, model=dict(path=str(other))))
    assert problem.startswith("model.moe.replay: true with a phimoe, whose routers are not among")
