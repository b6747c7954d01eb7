"""Preference losses and reward models on real rows and meshes: data, packing, loss, training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from spmdrl.algorithms import registry
from spmdrl.check.settings import validate
from spmdrl.config import AlgorithmSettings, Config, LayoutSettings
from spmdrl.credit import advantages_of
from spmdrl.data.examples import LabelledSource, PairSource
from spmdrl.data.rows import RowRules, pair_of, read_rows
from spmdrl.data.tasks import GeneratedRows
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.exchange import exchange
from spmdrl.rollout.row_source import RowSource
from spmdrl.tools.commands.create_model import create_model
from spmdrl.tools.commands.export import export
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from spmdrl.train.objectives.objective_loss import needed_columns
from tests.helpers.checkpoint_runs import save
from tests.helpers.comparing import assert_near, assert_same_sums, full_parameters
from tests.helpers.policy_runs import VALID, changed, small_model, step_as_train_does
from tests.helpers.policy_runs import config as policy_config
from tests.helpers.runs import TINY, metrics, run
from tests.helpers.worlds import in_world, make_trainer

PLAIN, CHAT = character_tokenizer(), character_tokenizer(chat_template=True)
USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "ho"), ("assistant", "hm?"))
)
NAMES = registry.names("preference")
BUDGET = 400  # tokens per micro-batch that hold several pairs
NARROW = 64  # about one pair


def config(
    train: object,
    *,
    model: object = "m",
    out: object = "out",
    objective: str = "preference",
    loss: str = "dpo",
    world_size: int = 1,
    tp: int = 1,
    rows: int = 6,
    budget: int = BUDGET,
    **options: object,
) -> Config:
    """A float32 CPU config on pairs."""
    cfg = policy_config(
        str(model),
        out,
        world_size=world_size,
        tp=tp,
        objective=objective,
        loss=loss,
        loss_options=options,
    )
    return changed(
        cfg,
        data={"train": str(train), "size": 64, "max_prompt_tokens": 16},
        batch={"prompts_per_step": rows, "tokens_per_microbatch": budget},
        sampling={"max_response_tokens": 16, "temperature": 1.0},
        optimizer={"max_grad_norm": 0.5},
    )


def jsonl(folder: Path, rows: list) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ragged(count: int = 24) -> list[dict]:
    """Rows of all lengths that serve every loss."""
    draw = random.Random(5)

    def text() -> str:
        return "".join(draw.choices("abcdefgh", k=draw.randint(1, 12)))

    return [
        {
            "prompt": f"{i:02d}{text()}",
            "chosen": text() + "a",
            "rejected": text() + "b",
            "margin": draw.random(),
            "completion": text(),
            "label": draw.random() < 0.5,
        }
        for i in range(count)
    ]


# --------------------------------------------------------------------------- rows


def test_every_form_of_a_pair_gives_prompt_and_responses():
    def forms(**row: object) -> tuple:
        return pair_of(row, place="x")

    assert forms(prompt="p", chosen="a", rejected="b", margin=2) == ("p", "a", "b", 2.0)
    assert forms(chosen="12+3= a", rejected="12+3= b") == ("12+3=", " a", " b", 0.0)
    talk = forms(prompt=[USER], chosen=[GOOD], rejected=[BAD])
    assert talk == ([USER], [GOOD], [BAD], 0.0)
    whole = [USER, BAD, USER]  # an earlier answer belongs to the prompt
    assert forms(prompt="hi", chosen=[*whole, GOOD], rejected=[*whole, BAD]) == (
        whole,
        [GOOD],
        [BAD],
        0.0,
    )


FINE = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "need", "words"),
    [
        ({"prompt": "p", "chosen": "a"}, "pair", ["no column `rejected`", "prompt, chosen"]),
        (FINE | {"chosen": "b"}, "pair", ["equal"]),
        (FINE | {"rejected": ""}, "pair", ["`rejected`", "not empty"]),
        (FINE | {"rejected": []}, "pair", ["`rejected`", "not empty"]),
        ({"chosen": "12 a", "rejected": "12"}, "pair", ["`rejected` is empty after the prompt"]),
        ({"chosen": "a", "rejected": "b"}, "pair", ["no `prompt`", "begin alike"]),
        (FINE | {"chosen": [GOOD]}, "pair", ["must both be text or both be lists"]),
        (FINE | {"chosen": 3}, "pair", ["column 'chosen': expected text", "3"]),
        (FINE | {"margin": "much"}, "pair", ["`margin` must be a number", "much"]),
        (FINE | {"chosen": [{"role": "user"}]}, "pair", ["message 0", "content"]),
        (FINE, "label", ["no column `completion`"]),
        ({"prompt": "p", "completion": "c"}, "label", ["`label` must be true"]),
        ({"prompt": "p", "completion": "c", "label": "yes"}, "label", ["`label` must be", "yes"]),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path, row, need, words):
    fine = FINE | {"completion": "c", "label": True}
    file = jsonl(tmp_path, [fine, row])
    with pytest.raises(ValueError) as caught:
        read_rows(file, rules=RowRules(need=need))
    for word in [f"{file}:2", *words]:
        assert word in str(caught.value)


def test_a_generated_task_without_pairs_is_refused_with_its_name():
    with pytest.raises(ValueError, match=r"task:addition \(train, seed 0\): row 1: .*`chosen`"):
        PairSource(config("task:addition"), PLAIN)


def test_pairs_are_encoded_side_by_side_and_too_long_ones_are_named(tmp_path):
    file = jsonl(tmp_path, [{"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 1.5}])
    cfg = changed(config(file, rows=1), sampling={"max_response_tokens": 64})
    unit = PairSource(cfg, CHAT).units_at(0)[0]
    texts = [CHAT.decode([t for t, m in zip(*example[:2]) if m]) for example in unit.examples]
    assert texts == ["ho<eos>", "hm?<eos>"] and unit.rewards == (1.5, 0.0)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: \d+ tokens, above data\.max_prompt"):
        PairSource(changed(cfg, sampling={"max_response_tokens": 1}), CHAT)


def test_labelled_rows_come_with_a_response_to_another_prompt(tmp_path):
    rows = ragged(8)
    rows[1]["prompt"] = rows[0]["prompt"]  # not mismatched: the same prompt
    source = LabelledSource(config(jsonl(tmp_path, rows), rows=8), PLAIN)
    by_text = {row["prompt"] + row["completion"] + "<eos>": row for row in rows}
    for unit in source.units_at(3):
        own, other = (PLAIN.decode(tokens) for tokens, *_ in unit.examples)
        row = by_text[own]
        assert unit.rewards == (float(row["label"]), 0.0) and other.startswith(row["prompt"])
        reply = other.removeprefix(row["prompt"]).removesuffix("<eos>")
        assert any(reply == r["completion"] and r["prompt"] != row["prompt"] for r in rows)
    with pytest.raises(ValueError, match="step 0: all 4 samples are of prompt"):
        LabelledSource(config(jsonl(tmp_path, [rows[0]] * 4), rows=4), PLAIN).units_at(0)


def test_the_generated_task_has_one_right_and_one_near_answer():
    def rows(mistakes: float) -> GeneratedRows:
        return GeneratedRows(
            "task:addition_pairs",
            {"digits": 2, "mistakes": mistakes},
            size=99,
            seed=3,
            split="train",
        )

    for row in rows(0.0):
        assert row["chosen"] == row["answer"]
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1
        assert str(int(row["rejected"])) == row["rejected"]  # no zero in front
        assert row["completion"] == row["chosen" if row["label"] else "rejected"]
    assert all(int(row["rejected"]) == int(row["chosen"]) + 1 for row in rows(1.0))
    assert 30 < sum(row["label"] for row in rows(0.0)) < 70 and rows(0.5)[7] == rows(0.5)[7]


# --------------------------------------------------------------------------- config


def test_objective_loss_and_placement_must_fit():
    def problems(**changes: object) -> str:
        return "\n".join(validate(config("task:addition_pairs", **changes)))

    assert problems() == "" and problems(beta=0.3) == ""
    assert problems(objective="reward_model", loss="bradley_terry") == ""
    assert "did you mean dpo" in problems(loss="dpoo")
    assert "method of the kind loss" in problems(loss="ppo_clip")
    assert "method of the kind preference" in problems(objective="reward_model", loss="dpo")
    assert "algorithm.loss_options.beta" in problems(beta="much")
    assert "beta: must be above 0" in problems(beta=-1.0)
    assert "did you mean beta" in problems(bta=1.0)
    assert "one pair, which stays together, may not fit" in problems(budget=40)
    split = changed(config("x"), layout=LayoutSettings(placement="split"))
    assert "with algorithm.objective preference" in "\n".join(validate(split))


@pytest.mark.parametrize(
    ("loss", "columns"),
    [
        ("dpo", {"ref_logprobs"}),
        ("simpo", set()),
        ("orpo", set()),
        ("cpo", set()),
        ("kto", {"ref_logprobs", "old_logprobs"}),
        ("bco", {"ref_logprobs", "old_logprobs"}),
        ("aot", {"ref_logprobs", "old_logprobs"}),
    ],
)
def test_a_loss_without_a_reference_builds_none(loss, columns):
    assert needed_columns(config("x", loss=loss)) == columns


# --------------------------------------------------------------------------- meshes


def batch_of_pairs(cfg: Config, world: object, *, step: int) -> object:
    """Read, pack, exchange: the batch of a step as train.py makes it."""
    world.cfg = cfg
    source = RowSource(cfg, world, tokenizer=load_tokenizer(cfg))
    return exchange(source, world, step=step)


def train_on_pairs(cfg: Config, world: object, *, steps: int, trainer: object = None) -> dict:
    """Take steps and return their sums and the whole parameters."""
    trainer, sums = trainer or make_trainer(cfg, world), []
    for step in range(steps):
        own = batch_of_pairs(cfg, world, step=step)
        sums.append(step_as_train_does(trainer, own, step=step)[2])
    return {"sums": sums, "parameters": full_parameters(trainer)}


BY_HAND = ("dpo", "kto", "aot_unpaired")
COMPARED = (
    ("preference", "dpo", {"beta": 0.5}),
    ("preference", "kto", {"beta": 0.5}),
    ("preference", "orpo", {}),
    ("preference", "bco", {"beta": 0.5}),
    ("preference", "aot_unpaired", {"beta": 0.5}),
    ("reward_model", "bradley_terry", {"center_coef": 0.1}),
)


def _named(
    cfg: Config, objective: str, loss: str, options: dict, *, budget: int = BUDGET, updates: int = 1
) -> Config:
    return changed(
        cfg,
        algorithm=AlgorithmSettings(objective=objective, loss=loss, loss_options=options),
        batch={"tokens_per_microbatch": budget, "updates_per_step": updates},
    )


def _compared(world: Any) -> dict:
    base = world.cfg
    return {
        loss: train_on_pairs(_named(base, objective, loss, options), world, steps=2)
        for objective, loss, options in COMPARED
    }


def _everything(world: Any) -> dict:
    """What one process can check: the reference, other packings, all names, sums by hand."""
    cfg = world.cfg
    found = {"reference": _compared(world), "narrow": {}, "all": {}}
    for objective, loss, options in COMPARED:
        narrow = _named(cfg, objective, loss, options, budget=NARROW)
        found["narrow"][loss] = train_on_pairs(narrow, world, steps=2)
    for loss in NAMES:
        updates = 1 if hasattr(registry.get("preference", loss), "matched") else 2
        own = _named(cfg, "preference", loss, {}, updates=updates)
        found["all"][loss] = train_on_pairs(own, world, steps=3)["sums"]
    found["by_hand"] = {
        loss: _by_hand(_named(cfg, "preference", loss, {"beta": 0.5}), world) for loss in BY_HAND
    }
    found["scores"] = _saved_scores(_named(cfg, *COMPARED[-1]), world)
    return found


def _by_hand(cfg: Config, world: object) -> tuple[float, float, dict]:
    """Return the loss of a policy that has left its reference by hand and by the program.

    One pair has a side that is not valid, so it is in nothing.
    """
    trainer = make_trainer(cfg, world)
    train_on_pairs(cfg, world, steps=2, trainer=trainer)
    batch = batch_of_pairs(cfg, world, step=5)
    is_valid = batch.scalars.is_valid.clone()
    is_valid[2] = False
    batch = trainer.annotate(changed(batch, scalars={"is_valid": is_valid}), step=5)
    rho = torch.zeros(len(batch.scalars), dtype=torch.float64)
    for logprobs, micro, columns in zip(
        trainer.logprobs(batch), batch.updates[0], batch.columns[0]
    ):
        for at, row in enumerate(micro.sequence_ids.tolist()):
            span = slice(int(micro.cu_seqlens[at]), int(micro.cu_seqlens[at + 1]))
            gap = logprobs[span].double() - columns["ref_logprobs"][span].double()
            rho[row] = gap[micro.response_mask[span]].sum()
    own, other = rho.view(-1, 2).unbind(1)
    kept = is_valid.view(-1, 2)
    if cfg.algorithm.loss == "dpo":
        terms = -logsigmoid(0.5 * (own - other))[kept.all(1)]
    elif cfg.algorithm.loss == "aot_unpaired":
        upper, lower = (side[kept.all(1)].sort().values for side in (own, other))
        terms = -logsigmoid(0.5 * (upper - lower))
    else:
        zero = other[kept[:, 1]].mean().clamp(min=0)
        sign = torch.where(batch.scalars.rewards.view(-1, 2)[:, 0] > 0.5, 1, -1)
        terms = torch.sigmoid(-0.5 * sign * (own - zero))[kept[:, 0]]
    sums = trainer.update(batch, advantages_of(batch, cfg=cfg, world=world, step=5), step=5)
    return float(terms.mean()), sums["policy/loss"][0], sums


def _saved_scores(cfg: Config, world: object) -> list[tuple[list[int], float]]:
    """Train, save a checkpoint, and return token sequences with the policy's scores."""
    trainer = make_trainer(cfg, world)
    train_on_pairs(cfg, world, steps=3, trainer=trainer)
    save(trainer, 3)
    scored = []
    for one in trainer._prepare(batch_of_pairs(cfg, world, step=7))[0]:
        values, micro = trainer.policy.model.values(one.row).detach(), one.packed
        for start, end in zip(micro.cu_seqlens[:-1].tolist(), micro.cu_seqlens[1:].tolist()):
            scored.append((micro.tokens[start:end].tolist(), float(values[end - 1])))
    return scored


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """One process's results, and where the model and the rows are."""
    folder = tmp_path_factory.mktemp("pairs")
    cfg = config(jsonl(folder, ragged()), model=small_model(folder), out=folder / "run")
    return {"cfg": cfg, **in_world(cfg, _everything)[0]}


def _assert_same(ours: dict[str, dict], reference: dict[str, dict], what: str) -> None:
    assert ours.keys() == reference.keys()
    for loss, expected in reference.items():
        where = f"{what}, {loss}"
        assert_same_sums(ours[loss]["sums"], expected["sums"], where, rel=1e-5, abs_=1e-5)
        assert_near(ours[loss]["parameters"], expected["parameters"], where, rtol=1e-5, atol=3e-6)


def test_other_micro_batches_change_neither_loss_nor_gradient(found):
    _assert_same(found["narrow"], found["reference"], "narrow micro-batches")


@pytest.mark.parametrize("tp", [1, 2])
def test_two_ranks_train_like_one(found, tp):
    cfg = changed(found["cfg"], layout={"world_size": 2, "tp": tp})
    for rank, result in enumerate(in_world(cfg, _compared)):
        _assert_same(result, found["reference"], f"tp {tp}, rank {rank}")


def test_a_policy_that_is_its_reference_has_the_known_losses(found):
    first = {loss: result["sums"][0] for loss, result in found["reference"].items()}
    assert first["dpo"]["policy/loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert first["dpo"]["preference/accuracy"] == (3.0, 6.0)  # ties count one half
    assert first["kto"]["policy/loss"][0] == pytest.approx(0.5, abs=1e-6)
    assert first["kto"]["preference/kl"][0] == pytest.approx(0.0, abs=1e-6)
    assert first["bradley_terry"]["reward_model/chosen_score"][0] == 0.0  # the head starts at 0
    moved = found["reference"]["bradley_terry"]["sums"][1]
    assert moved["reward_model/margin"][0] != 0.0


@pytest.mark.parametrize("loss", BY_HAND)
def test_the_loss_is_the_mean_over_whole_pairs(found, loss):
    expected, given, sums = found["by_hand"][loss]
    assert given == pytest.approx(expected, rel=1e-5), (given, expected)
    assert abs(given - (0.5 if loss == "kto" else math.log(2))) > 1e-3, "still the reference"
    assert sums["preference/accuracy"][1] == 5.0


@pytest.mark.parametrize("loss", NAMES)
def test_every_name_trains(found, loss):
    for sums in found["all"][loss]:
        assert math.isfinite(sums["policy/loss"][0]) and sums["policy/grad_norm"][0] > 0
        assert sums["policy/skipped_updates"][0] == 0
        assert 0 <= sums["preference/accuracy"][0] <= sums["preference/accuracy"][1] == 6.0


def test_an_exported_reward_model_scores_alike_in_transformers(found, tmp_path):
    out = export(Path(found["cfg"].output_dir), out=tmp_path / "scorer")
    model, report = AutoModelForSequenceClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    rows, scores = zip(*found["scores"])
    assert len(set(scores)) > 6
    width = max(map(len, rows))
    padded = torch.tensor(
        [[*row, *[model.config.pad_token_id] * (width - len(row))] for row in rows]
    )
    given: Tensor = model(padded, attention_mask=padded != model.config.pad_token_id).logits[:, 0]
    torch.testing.assert_close(given.detach(), torch.tensor(scores), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_a_loss_that_sorts_the_batch_takes_one_update(loss):
    cfg = changed(
        VALID,
        algorithm={"objective": "preference", "loss": loss},
        layout={"placement": "offline"},
        data={"train": "rows.jsonl"},
    )
    own = [text for text in validate(cfg) if "updates_per_step" in text]
    assert not own
    found = validate(changed(cfg, batch={"updates_per_step": 2}))
    assert any(
        f"batch.updates_per_step: 2 with the loss {loss}, which sorts" in text for text in found
    ), found


# --------------------------------------------------------------------------- train.py


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_the_demo_runs_end_to_end(name, tmp_path):
    model = create_model(tmp_path / "model", hidden_size=32, layers=2, heads=2, kv_heads=1)
    out = tmp_path / "run"
    run(
        f"demo_{name}.yaml",
        2,
        **TINY["sft"],
        **{"model.path": model, "output-dir": out, "steps": 3, "optimizer.lr": 1e-2},
    )
    rows = metrics(out)
    assert not any(name.startswith("reward/") for row in rows for name in row)
    assert len(rows) == 3
    kind = "preference" if name == "dpo" else "reward_model"
    centred = 0.0 if name == "dpo" else rows[0]["reward_model/chosen_score"]
    assert centred == 0.0 and rows[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0][f"{kind}/accuracy"] == 0.5
    assert rows[-1]["policy/loss"] != rows[0]["policy/loss"]
