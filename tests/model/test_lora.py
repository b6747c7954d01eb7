"""Low-rank adapters: values, gradients, memory, the reference, what engines get, restarts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from spmdrl.config import Config, LoraSettings
from spmdrl.model.lora.files import write_adapter
from spmdrl.model.lora.layers import Adapters, initial_a, lora_form
from spmdrl.model.tensor_parts import Box, Held, held_boxes
from spmdrl.tools.commands.export import export
from spmdrl.train.companions.reference import Frozen
from tests.helpers.checkpoint_runs import restore, save
from tests.helpers.comparing import (
    assert_near,
    differing,
    full_parameters,
    full_state,
    plain_scores,
    whole,
)
from tests.helpers.policy_runs import (
    batch,
    changed,
    config,
    meta_model,
    scalars,
    sequence,
    small_model,
    update,
    updated,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.worlds import another_trainer, in_world, make_trainer, with_trainer

LORA = {"rank": 3, "alpha": 12}  # 3 rows of A are not even over 2 ranks


def _config(
    folder: Path, out: Path, *, lora: dict | None = None, model: dict | None = None, **options
) -> Config:
    return config(folder, out, model={"lora": lora or LORA} | (model or {}), **options)


def _spread(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values for a B matrix, which starts at zero: the same on every layout."""
    return initial_a(name, shape, init="kaiming", seed=5) * 0.1


@torch.no_grad()
def set_b(trainer: object) -> None:
    for name, tensor in trainer.state_dict()["model"].items():
        if "lora_B" in name:
            for box, view in held_boxes(name, tensor):
                part = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))
                view.copy_(_spread(name, tuple(tensor.shape))[part])


# --------------------------------------------------------------------------- one process


def _one(trainer: Any) -> dict:
    """All that one start of one rank can show."""
    cfg, world, own = trainer.cfg, trainer.world, batch(0, 1)
    before, found = full_parameters(trainer), {}
    found["first"] = trainer.annotate(own, step=0).columns[0]
    set_b(trainer)
    found["b_set"] = {n: t for n, t in full_parameters(trainer).items() if "lora" in n}
    packed = trainer._prepare(own)[0]
    rows = [trainer.policy.model.forward(one.row)[0] for one in packed]
    sum((torch.linspace(-1, 2, len(row)) * row).sum() for row in rows).backward()
    found["logprobs"] = [row.detach() for row in rows]
    found["gradients"] = {
        n: p.grad.full_tensor() for n, p in trainer.weights.shards().items() if p.grad is not None
    }
    trainer.policy.optimizer.zero_grad()
    found["sums"] = update(trainer, own, step=0)
    frozen = Frozen(cfg, world, path=cfg.model.path, column="ref_logprobs").columns(packed)
    found["second"] = list(zip(trainer.annotate(own, step=1).columns[0], frozen))
    found["moved"] = {*differing(full_parameters(trainer), before)}
    moments = trainer.state_dict()["optimizer"]
    found["bytes"] = sum(
        t.to_local().nbytes for key in ("exp_avg", "exp_avg_sq") for t in moments[key].values()
    )
    trainer = another_trainer(trainer, changed(cfg, model={"compute_dtype": "bfloat16"}))
    set_b(trainer)
    found["half"] = update(trainer, own, step=0)
    found["dtypes"] = {n: p.dtype for n, p in trainer.weights.shards().items()}
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[Path, dict]:
    folder = small_model(tmp_path_factory.mktemp("one"))
    model = {"memory": {"activation_checkpointing": "full"}}
    cfg = _config(folder, folder.parent / "out", model=model, kl_coef=0.1, kl_in="reward", kl="k1")
    return folder, with_trainer(cfg, _one)[0]


def test_logprobs_and_gradients_are_those_of_peft(one, tmp_path):
    folder, found = one
    write_adapter(tmp_path, found["b_set"], rank=3, alpha=12, use_rslora=False, base=str(folder))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path, is_trainable=True
    )
    total = torch.zeros(())
    for row, micro in zip(found["logprobs"], batch(0, 1).updates[0]):
        own = []
        for index in (i for i in micro.sequence_ids.tolist() if scalars().is_valid[i]):
            tokens = sequence(index)
            logits = model(tokens[None]).logits[0, :-1] / 0.8
            logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            own.append(logprobs[(len(tokens) + 2) // 3 - 1 :])
        own = torch.cat(own)
        torch.testing.assert_close(row, own, rtol=1e-5, atol=1e-5)
        total = total + (torch.linspace(-1, 2, len(own)) * own).sum()
    total.backward()
    theirs = {
        n.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert theirs.keys() == found["gradients"].keys() and len(theirs) == 2 * 7 * 2
    for name, gradient in theirs.items():
        atol = 1e-5 * float(gradient.abs().max())
        assert_near({name: found["gradients"][name]}, {name: gradient}, rtol=0, atol=atol)


def test_the_reference_is_the_policy_without_adapters_and_no_second_model(one):
    _, found = one
    for row in found["first"]:  # B is zero
        assert torch.equal(row["old_logprobs"], row["ref_logprobs"])
        assert row["ref_logprobs"].abs().sum() > 0
    for row, frozen in found["second"]:
        assert torch.equal(row["ref_logprobs"], frozen["ref_logprobs"])
        assert not torch.equal(row["ref_logprobs"], row["old_logprobs"])


def test_only_adapters_move_have_state_and_stay_float32(one):
    _folder, found = one
    adapters = set(found["b_set"])
    assert found["moved"] == adapters
    assert found["bytes"] == 2 * sum(t.numel() * 4 for t in found["b_set"].values())
    assert {dtype for n, dtype in found["dtypes"].items() if n in adapters} == {torch.float32}
    assert {dtype for n, dtype in found["dtypes"].items() if n not in adapters} == {torch.bfloat16}
    norms = [sums["policy/grad_norm"][0] for sums in (found["sums"], found["half"])]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)  # gathered in bfloat16, reduced in float32


# --------------------------------------------------------------------------- many ranks


def train_and_save(trainer: Any) -> dict:
    """Train on a mesh, save, and read all boxes as the stream does."""
    updated(trainer)
    save(trainer, 1)
    held = Held(trainer.weights.shards(), trainer.weights.parts, trainer.weights.deltas())
    values = []
    for name, boxes in held.boxes().items():
        for box in boxes:
            values.append((name, box, held.value(name, box).read()))
            if box.numel > 4:  # a part of a row
                at = Box(
                    tuple(a + n // 2 for a, n in zip(box.start, box.shape)), (1,) * len(box.shape)
                )
                values.append((name, at, held.value(name, at).read()))
    return {"values": values, "state": _state(trainer)}


def _state(trainer: Any) -> dict[str, Tensor]:
    live = {f"live {n}": t for n, t in full_parameters(trainer).items()}
    return full_state(trainer) | live


def resume(world: Any, cfgs: dict[str, Config]) -> dict[str, object]:
    """Restore under each config: the whole state, or why not."""
    found = {}
    for name, cfg in cfgs.items():
        world.cfg = cfg
        trainer = make_trainer(cfg, world)
        try:
            restore(trainer, step=1)
            found[name] = _state(trainer)
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Config, list[dict]]:
    where = tmp_path_factory.mktemp("saved")
    cfg = _config(
        small_model(where),
        where / "out",
        world_size=4,
        tp=2,
        lora=LORA | {"use_rslora": True, "targets": ".*(_proj|embed_tokens)"},
    )
    return cfg, with_trainer(cfg, train_and_save)


def merged_by_hand(state: dict[str, Tensor], *, scale: float = 12 / 3**0.5) -> dict[str, Tensor]:
    """W + scale * B A by loops over the rank, in the order that engines get it."""
    found = {}
    for name, tensor in state.items():
        if not name.startswith("live ") or "lora" in name:
            continue
        layer = name.removesuffix(".weight")
        matrix = f"{layer}.lora_%s.weight" if layer != name else f"{name}_lora_%s"  # of experts
        if matrix % "A" in state:
            a, b = state[matrix % "A"], state[matrix % "B"]
            delta = torch.zeros_like(tensor)
            for k in range(a.shape[-2]):
                delta = delta + (scale * b[..., k])[..., None] * a[..., k, None, :]
            assert delta.abs().max() > 1e-3, f"{name}: the test wants an adapter that matters"
            tensor = tensor + delta
        found[name.removeprefix("live ")] = tensor
    return found


def assert_sent(ranks: list[dict], expected: dict[str, Tensor]) -> None:
    """Each value that a rank reads is float32 and bit-equal, and together they are everything."""
    covered = {name: torch.zeros_like(t) for name, t in expected.items()}
    for found in ranks:
        for name, box, value in found["values"]:
            part = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape))
            assert value.dtype == torch.float32 and torch.equal(value, expected[name][part]), name
            covered[name][part] = 1
    assert all(bool(t.all()) for t in covered.values())


def test_what_is_sent_is_merged_bit_by_bit_wherever_it_is_cut(saved):
    _, ranks = saved
    assert_sent(ranks, merged_by_hand(ranks[0]["state"]))


def test_a_checkpoint_of_adapters_resumes_on_another_layout_and_no_other_base(saved, tmp_path):
    cfg, ranks = saved
    other = tmp_path / "other"
    shutil.copytree(cfg.model.path, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    allow = {"allow_config_change": True}
    two = changed(cfg, layout={"world_size": 2})
    cfgs = {
        "tp": two,
        "dp": changed(two, layout={"tp": 1}),
        "base": changed(two, checkpoint=allow, model={"path": str(other)}),
        "alpha": changed(two, checkpoint=allow, model={"lora": {"alpha": 13}}),
        "full": changed(two, checkpoint=allow, model={"lora": LoraSettings()}),
        "config": changed(two, model={"lora": LoraSettings(**LORA)}),
    }
    for found in in_world(two, resume, cfgs):
        for name in ("tp", "dp"):
            assert not differing(found[name], ranks[0]["state"]), name
        assert "other weights than" in found["base"] and str(other) in found["base"]
        assert "have alpha 12" in found["alpha"] and "has 13" in found["alpha"]
        assert "only there: lora." in found["full"] or "only there: model." in found["full"]
        assert "model.lora" in found["config"]


def exports(cfg: Config, where: Path) -> tuple[Any, Any]:
    """Export adapters merged and by themselves; return the first as transformers loads it, and
    the logits of the base, of PEFT's adapter on it, and of the merged model."""
    export(Path(cfg.output_dir), out=where / "merged")
    export(Path(cfg.output_dir), out=where / "adapter", adapter=True)
    base, merged = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (cfg.model.path, where / "merged")
    )
    tokens = torch.randint(5, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, ours = base(tokens).logits, merged(tokens).logits
        theirs = PeftModel.from_pretrained(base, where / "adapter")(tokens).logits
    return merged, (plain, theirs, ours)


def as_read(adapter: Path, base: Path | str) -> tuple[Adapters, dict[str, Tensor]]:
    """Return the adapters of a folder, and what a policy starts with that starts from them."""
    hf_model = meta_model(base)
    adapters = Adapters(hf_model, lora_form(LoraSettings(path=str(adapter))))
    shards = {name: torch.empty(hf_model.get_parameter(name).shape) for name in adapters.names}
    adapters.fill(shards, seed=1)
    return adapters, shards


def test_an_export_merges_or_is_peft_s_own(saved, tmp_path):
    cfg, ranks = saved
    _, (plain, theirs, ours) = exports(cfg, tmp_path)
    expected = merged_by_hand(ranks[0]["state"])
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert (plain - ours).abs().max() > 1e-2
    with pytest.raises(ValueError, match="--model"):
        export(Path(cfg.output_dir), out=tmp_path / "no", model=str(small_model(tmp_path, seed=1)))
    # What starts from it, starts with its very numbers.
    form = lora_form(LoraSettings(path=str(tmp_path / "adapter")))
    assert (form.rank, form.alpha, form.use_rslora) == (3, 12, True)
    adapters, shards = as_read(tmp_path / "adapter", cfg.model.path)
    assert len(adapters.targets) == 15  # the embedding is one
    for name, tensor in shards.items():
        assert torch.equal(tensor, ranks[0]["state"][f"model.{name}"]), name


def test_an_embedding_of_pefts_is_read_without_the_weight_under_it(tmp_path):
    folder = small_model(tmp_path)
    torch.manual_seed(0)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=3, lora_alpha=12, target_modules=["embed_tokens", "q_proj"]),
    )
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3) if "lora_" in name else None
    theirs.save_pretrained(tmp_path / "with")
    theirs.save_pretrained(tmp_path / "without", save_embedding_layers=False)
    own = _config(folder, tmp_path / "out", lora={"path": str(tmp_path / "without")})
    (scores,) = with_trainer(own, scores_and_parameters)[0][0]
    torch.testing.assert_close(scores, plain_scores(theirs, TOKENS)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="embed_tokens.*save_embedding_layers is False"):
        as_read(tmp_path / "with", folder)


TOKENS = torch.randint(5, 90, (1, 20), generator=torch.Generator().manual_seed(0)).tolist()


def scores_and_parameters(trainer: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    return trainer.weights.score(TOKENS), full_parameters(trainer)


@pytest.mark.parametrize(
    "architecture, tied, reason",
    [("qwen2", True, "is the output head too"), ("gemma3", False, "Gemma3TextScaledWordEmbedding")],
)
def test_an_embedding_that_can_have_no_adapter_is_refused(architecture, tied, reason, tmp_path):
    folder = small_model(tmp_path, architecture=architecture, layers=1, tied=tied)
    hf_model = meta_model(folder)
    with pytest.raises(ValueError, match=f"model.embed_tokens of .* {reason}"):
        Adapters(hf_model, lora_form(LoraSettings(targets=("embed_tokens",), rank=8)))


def test_adapters_are_on_again_after_an_error(tmp_path):
    adapters = Adapters(
        meta_model(small_model(tmp_path, layers=1)), lora_form(LoraSettings(rank=2))
    )
    with pytest.raises(RuntimeError), adapters.off():
        assert not adapters.is_on
        raise RuntimeError
    assert adapters.is_on


def _reward_model(trainer: Any) -> dict[str, Tensor]:
    """Save adapters with a scalar head, which trains in full."""
    set_b(trainer)
    with torch.no_grad():
        head = trainer.state_dict()["model"]["score.weight"].to_local()
        head.copy_(torch.linspace(-1, 1, head.numel()).view_as(head))
    save(trainer, 1)
    return whole(trainer.state_dict()["model"])


def test_a_reward_model_keeps_its_head_with_its_adapters(tmp_path):
    cfg = _config(
        small_model(tmp_path), tmp_path / "out", objective="reward_model", loss="bradley_terry"
    )
    state = with_trainer(cfg, _reward_model)[0]
    merged = export(tmp_path / "out", out=tmp_path / "merged")
    adapter = export(tmp_path / "out", out=tmp_path / "adapter", adapter=True)
    ours = AutoModelForSequenceClassification.from_pretrained(merged)
    assert torch.equal(ours.score.weight, state["score.weight"])
    base = AutoModelForSequenceClassification.from_pretrained(cfg.model.path, num_labels=1)
    base.config.pad_token_id = ours.config.pad_token_id
    tokens = torch.randint(8, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, adapter)(tokens).logits
        torch.testing.assert_close(theirs, ours(tokens).logits, rtol=1e-5, atol=1e-5)
    assert theirs.abs().max() > 0.1


def _loaded_by_vllm(folder: Path, layer: str) -> Tensor:
    """Return scale * B A of a layer as vLLM's loader has it."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=256)
    helper.validate_legal(LoRAConfig(max_lora_rank=8))
    loaded = LoRAModel.from_local_checkpoint(
        str(folder),
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        helper,
        device="cpu",
        dtype=torch.float32,
    )
    found = loaded.loras[layer]
    return found.lora_b @ found.lora_a * found.scaling


def test_vllm_s_loader_takes_an_adapter_of_layers(saved, tmp_path):
    _, ranks = saved
    layers = {
        name.removeprefix("model."): t
        for name, t in ranks[0]["state"].items()
        if name.startswith("model.") and "lora_" in name and "embed_tokens" not in name
    }
    assert len(layers) == 28
    write_adapter(tmp_path, layers, rank=3, alpha=12, use_rslora=True, base="")
    layer = "model.layers.1.mlp.down_proj"
    product = run_ranks(1, _loaded_by_vllm, tmp_path, layer)[0]
    a, b = (ranks[0]["state"][f"live {layer}.{part}.weight"] for part in ("lora_A", "lora_B"))
    torch.testing.assert_close(product, b @ a * 12 / 3**0.5, rtol=1e-5, atol=1e-6)
