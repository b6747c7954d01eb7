"""What of a model that sees is trained, and how fast; what does not go with it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.check.fit import fit_problems
from spmdrl.check.rules import rule_problems
from spmdrl.config import ModelSettings, OptimizerSettings
from spmdrl.model.load import load_whole_model
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.vision.families import vision_parameters
from spmdrl.model.vision.layout import vision_layout_of
from spmdrl.model.vision.noise_images import image_inputs, noise_image_sequence
from spmdrl.model_inputs import TokenIds
from spmdrl.train.adamw import AdamW
from spmdrl.train.microbatches import prepare
from tests.helpers.comparing import full_parameters
from tests.helpers.policy_runs import changed, config, small_model
from tests.helpers.vision_runs import batch, sequences, vision_config
from tests.helpers.vlm import FAMILIES, reader, seeing_model
from tests.helpers.worlds import another_trainer, with_trainer

TOWER_TARGETS = {"rank": 2, "targets": ["visual.blocks.0.attn.qkv", "q_proj"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "language": {"train": "language"},
    "slow": {"vision_lr": 1e-3},  # a tenth of the rest's
    "lora": {"lora": TOWER_TARGETS},
}


def _changes(base: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Take one step; return how far each parameter went, and what the stream is told."""
    cfg = changed(base.world.cfg, model=settings)
    trainer = another_trainer(base, cfg)
    folder, model = Path(cfg.model.path), trainer.policy.model
    updates = prepare(batch(folder, [[0, 1, 2, 3]]), None, cfg=cfg, model=model)

    def loss_of(one: Any) -> Any:
        return model.forward(one.row)[0].sum(), {}

    before = full_parameters(trainer)
    trainer.policy.update(updates, loss_of, step=0)
    after = full_parameters(trainer)
    return {
        "moved": {n: float((after[n] - t).abs().max()) for n, t in before.items()},
        "towers": {n for n in before if n in vision_parameters(model.hf_model)},
        "state": set(trainer.policy.state_dict()["optimizer"]["exp_avg"]),
        "frozen": {trainer.weights.parts[name].tensor for name in trainer.weights.frozen},
    }


def _values(trainer: Any) -> list[torch.Tensor]:
    """Return the values of the texts by a scalar head of equal weights."""
    model = ShardedModel(
        trainer.cfg, trainer.world, path=trainer.cfg.model.path, is_trained=True, is_scalar=True
    )
    torch.nn.init.constant_(model.scorer.score.weight, 0.1)
    return model.score(sequences(Path(trainer.cfg.model.path)))


def _measured(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {n: _changes(trainer, own) for n, own in SETTINGS.items()}
    return found | {"agreement": trainer.check_packing(), "values": _values(trainer)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("sees")
    cfg = vision_config(seeing_model("qwen3_vl", where / "model"), where)
    (found,) = with_trainer(cfg, _measured)
    return found | {"folder": where / "model"}


def test_a_frozen_tower_stays_and_has_no_state(measured):
    own, whole = measured["language"], measured["all"]
    assert own["frozen"] == own["towers"] and own["towers"] and not whole["frozen"]
    assert all(not own["moved"][name] for name in own["towers"])
    assert not own["towers"] & own["state"] and whole["towers"] <= whole["state"]
    rest = own["moved"].keys() - own["towers"]
    assert all(own["moved"][name] == whole["moved"][name] > 0 for name in rest)


def test_a_tower_has_a_learning_rate_of_its_own(measured):
    slow, whole = measured["slow"]["moved"], measured["all"]["moved"]
    for name, moved in whole.items():
        factor = 0.1 if name in measured["all"]["towers"] else 1.0
        assert slow[name] == pytest.approx(moved * factor, rel=1e-3), name


def test_adapters_of_a_tower_train_and_the_rest_of_it_is_known_to_stay(measured):
    own = measured["lora"]
    moved = {name for name, far in own["moved"].items() if far}
    assert moved == own["state"] and all("lora_" in name for name in moved)
    assert any("visual.blocks.0.attn.qkv" in name for name in moved)
    adapted = "model.visual.blocks.0.attn.qkv.weight"
    assert adapted not in own["frozen"] and "model.visual.blocks.1.attn.qkv.weight" in own["frozen"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_proof_of_its_rows_shows_it_a_picture(family, tmp_path):
    """Which plain transformers takes, and which changes what follows it."""
    folder = seeing_model(family, tmp_path)
    model = ModelSettings(path=str(folder))
    hf_model = load_whole_model(
        model, attention=None, dtype=torch.float32, device=torch.device("cpu")
    )
    ids = noise_image_sequence(hf_model, longest=64)
    tokens, cpu = torch.tensor(ids)[None], torch.device("cpu")
    with torch.no_grad():
        seen = hf_model(input_ids=tokens, **image_inputs(hf_model, ids, cpu)).logits[0]
        blind = hf_model(input_ids=tokens).logits[0]
    assert float((seen - blind)[-1].abs().max()) > 1e-3
    assert noise_image_sequence(hf_model, longest=8) is None


def test_its_rows_are_proved_at_a_run_s_start(measured):
    for name in ("plain_gap", "loaded_gap"):
        assert 0 <= measured["agreement"][f"proof/{name}"][0] < 1e-5


def test_values_are_those_of_transformers_states(measured):
    from transformers import AutoModelForImageTextToText

    folder = measured["folder"]
    hf_model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for ids, values in zip(sequences(folder), measured["values"]):
        tokens = torch.tensor(ids)[None]
        given = {}
        if ids.items:
            names = ids.items[0].features
            given = {n: torch.cat([p.features[n] for p in ids.items]) for n in names}
            given["mm_token_type_ids"] = torch.tensor([ids.are_placeholders]).int()
        with torch.no_grad():
            states = hf_model.model(input_ids=tokens, **given).last_hidden_state[0]
        torch.testing.assert_close(values, 0.1 * states.sum(-1), rtol=1e-5, atol=1e-5)


def test_one_learning_rate_is_a_factor_of_the_other():
    given = {name: torch.ones(3) for name in ("a", "b")}
    options = OptimizerSettings(lr=0.1, weight_decay=0.5)
    AdamW(given, no_decay=set(), options=options, factors={"a": 0.25}).step(
        {name: torch.ones(3) for name in given}, lr=0.1
    )
    torch.testing.assert_close(1 - given["a"], 0.25 * (1 - given["b"]))


@pytest.mark.parametrize(
    "model, said",
    [
        ({"train": "language"}, "model.train: language with a qwen3, which has no tower"),
        ({"vision_lr": 0.1}, "model.vision_lr: 0.1 with a qwen3, which has no tower"),
    ],
)
def test_a_tower_that_is_not_there_is_not_asked_for(model, said, tmp_path):
    problems = fit_problems(config(small_model(tmp_path), tmp_path, model=model))
    assert len(problems) == 1 and problems[0].startswith(said), problems


def test_what_does_not_go_with_a_tower_is_refused(tmp_path):
    folder = seeing_model("gemma3", tmp_path / "gemma3")
    cp = config(folder, tmp_path, world_size=2, cp=2, model={"kernels": {"context": "ring"}})
    (problem,) = fit_problems(cp)
    assert problem.startswith("layout.cp: 2 with a gemma3 by model.kernels.context ring")
    other = config(folder, tmp_path, model={"reference": {"path": str(small_model(tmp_path))}})
    assert any("beside a policy that sees" in problem for problem in fit_problems(other))
    tried = changed(config(folder, tmp_path), batch={"tokens_per_microbatch": 0})
    (problem,) = fit_problems(tried)
    assert problem.startswith("batch.tokens_per_microbatch: 0 with a gemma3, which sees")
    (problem,) = fit_problems(config(folder, tmp_path, model={"kernels": {"compile": True}}))
    assert problem.startswith("model.kernels.compile: true with a gemma3, which sees")
    both = {"train": "language", "vision_lr": 0.1}
    found = rule_problems(config(folder, tmp_path, model=both))
    assert any(text.startswith("model.vision_lr: 0.1 with model.train language") for text in found)


def test_a_token_that_the_policy_drew_shows_nothing(tmp_path):
    """Its id is that of pictures' tokens, as vLLM embeds it too."""
    folder = seeing_model("qwen2_5_vl", tmp_path / "model")
    own = reader(folder)
    ids = own.encode("no picture", [])
    assert not ids.items and not any(ids.are_placeholders)
    (alone,) = with_trainer(vision_config(folder, tmp_path), _drawn, own._image_token_id, ids)
    assert torch.equal(*alone)


def _drawn(trainer: Any, image_token: int, ids: TokenIds) -> tuple[torch.Tensor, torch.Tensor]:
    """Score a drawn image token beside a sequence with pictures, and where there are none."""
    model, drawn = trainer.policy.model, [*ids, image_token, image_token]
    others = sequences(Path(trainer.cfg.model.path))
    silent = TokenIds(drawn, others[1].multimodal[torch.zeros(len(drawn)).long()])
    return model.score([others[0], silent], row_tokens=1)[1], model.score([drawn])[0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_sequence_that_ends_within_a_picture_keeps_its_positions(family, tmp_path):
    folder = seeing_model(family, tmp_path)
    hf_model = load_whole_model(
        ModelSettings(path=str(folder)),
        attention=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    sight, ids = vision_layout_of(hf_model, device="cpu"), sequences(folder)[0]
    whole = sight.row(torch.tensor(ids), [len(ids)], ids.multimodal).position_ids
    assert whole.shape == (3, len(ids)) and not torch.equal(whole[1], whole[2])
    for count in range(1, len(ids)):
        own = ids[:count]
        found = sight.row(torch.tensor(own), [count], own.multimodal).position_ids
        assert torch.equal(found.expand(3, -1), whole[:, :count]), count
