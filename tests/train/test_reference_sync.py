"""A reference that follows the policy: the mix, its dtype, every mesh, resume; bad options."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.check.settings import parse, validate
from spmdrl.config import Config
from spmdrl.tools.commands.create_model import create_model
from tests.helpers.comparing import assert_near, differing, full_parameters, whole
from tests.helpers.policy_runs import VALID, batch, changed, config, own_batch, small_model, update
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import ROOT, TINY
from tests.helpers.worlds import in_world, make_trainer, refusal
from tests.program.test_train import assert_same_end, final_weights

MIXES = {"soft": {"sync_every": 2, "sync_mix": 0.3}, "hard": {"sync_every": 2}}
STEPS = 5
LAYOUTS = {
    "one": {},
    "dp": dict(world_size=2),
    "tp": dict(world_size=2, tp=2),
    "replicate": dict(world_size=2, dp_replicate=2),
}


def _config(
    folder: Path, out: Path, mix: str, *, model: dict | None = None, **options: object
) -> Config:
    chosen = {"reference": MIXES[mix]} | (model or {})
    return config(folder, out, kl_coef=0.5, model=chosen, **options)


def _reference(trainer: Any) -> dict[str, torch.Tensor]:
    return whole(trainer.companions["reference"].model.named_shards())


def _follow(world: Any, configs_of: dict[str, Config]) -> dict[str, dict]:
    """Train under each config; return policy and reference after each step, and their columns."""
    found = {}
    for name, cfg in configs_of.items():
        trainer, own = make_trainer(cfg, world), own_batch(world)
        trainers, references = [full_parameters(trainer)], [_reference(trainer)]
        for step in range(STEPS):
            update(trainer, own, step=step)
            trainers.append(full_parameters(trainer))
            references.append(_reference(trainer))
            if step == 3:  # of the policy as it is now: a sync has just been
                scored, columns = trainer.logprobs(own), trainer.annotate(own, step=4).columns[0]
                same = all(torch.equal(a, b["ref_logprobs"]) for a, b in zip(scored, columns))
        found[name] = {"policies": trainers, "references": references, "is_policy": same}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_the_mix_of_the_paper_on_every_mesh(layout, tmp_path):
    tied = layout in ("dp", "tp")
    folder = small_model(tmp_path, tied=tied)
    other = small_model(tmp_path, "other", seed=7, tied=tied)
    wanted = {
        mix: _config(
            folder,
            tmp_path,
            mix,
            model={"reference": {"path": str(other)} | MIXES[mix]},
            **LAYOUTS[layout],
        )
        for mix in MIXES
    }
    for result in in_world(wanted["soft"], _follow, wanted):
        for mix, found in result.items():
            share = MIXES[mix].get("sync_mix", 1.0)
            expected = {n: t.double() for n, t in found["references"][0].items()}
            for done in range(1, STEPS + 1):
                trainer, reference = found["policies"][done], found["references"][done]
                assert trainer.keys() == reference.keys() == expected.keys()
                if done % 2 == 0:
                    expected = {
                        n: share * trainer[n].double() + (1 - share) * t
                        for n, t in expected.items()
                    }
                doubles = {name: value.double() for name, value in reference.items()}
                assert_near(doubles, expected, mix, rtol=0, atol=1e-7)
                moved = differing(reference, found["references"][done - 1])
                assert bool(moved) == (done % 2 == 0)
            assert found["is_policy"] == (mix == "hard")


def _dtypes(world: Any) -> dict[str, object]:
    """In bfloat16: what the reference is kept in, and whether small shares add up in it."""
    found = {}
    for mix, options in {
        "hard": {"sync_every": 1},
        "soft": {"sync_every": 1, "sync_mix": 0.001},
    }.items():
        trainer = make_trainer(changed(world.cfg, model={"reference": options}), world)
        reference = trainer.companions["reference"]
        own, before = batch(0, 1), _reference(trainer)
        update(trainer, own, step=0)
        for step in range(1, 200):
            reference.follow(trainer.policy.model, step=step)
        after, target = _reference(trainer), full_parameters(trainer)
        name = next(n for n in after if n.endswith("q_proj.weight"))
        found[mix] = (
            after[name].dtype,
            float((after[name] - before[name]).norm() / (target[name] - before[name]).norm()),
        )
        assert all(
            torch.isfinite(c["ref_logprobs"]).all()
            for c in trainer.annotate(own, step=1).columns[0]
        )
    return found


def test_a_mixed_reference_is_kept_in_float32_so_that_small_shares_add_up(tmp_path):
    cfg = _config(small_model(tmp_path), tmp_path, "hard", model={"compute_dtype": "bfloat16"})
    found = in_world(cfg, _dtypes)[0]
    assert found["hard"][0] == torch.bfloat16 and found["soft"][0] == torch.float32
    assert found["soft"][1] == pytest.approx(1 - 0.999**200, rel=1e-2)


def test_a_reference_of_another_form_cannot_follow(tmp_path):
    other = small_model(tmp_path, "other", layers=1)
    cfg = _config(
        small_model(tmp_path),
        tmp_path,
        "hard",
        model={"reference": {"path": str(other)} | MIXES["hard"]},
    )
    text = run_ranks(1, refusal, cfg)[0]
    assert "model.reference.sync_every: 2" in text and "layers.1" in text, text


def test_options_are_checked_by_name_range_and_use():
    def problems(options: dict, **algorithm: object) -> str:
        offline = algorithm.get("objective", "rl") != "rl"
        cfg = changed(
            VALID,
            model={"reference": options},
            data={"train": "task:addition_pairs" if offline else "task:addition"},
            layout={"placement": "offline" if offline else "split"},
            algorithm=algorithm,
        )
        return "\n".join(validate(cfg))

    kl, dpo = dict(kl_coef=0.1), dict(objective="preference", loss="dpo")
    assert problems({"sync_every": 5, "sync_mix": 0.6}, **kl) == ""
    assert problems({"sync_every": 5}, **dpo) == problems({"cache": True}, **dpo) == ""
    assert problems({"cache": True, "cache_folder": "a/folder"}, **dpo) == ""
    for options, method, words in (
        ({"sync_every": -1}, kl, ["sync_every", "-1"]),
        ({"sync_every": 5, "sync_mix": 0}, kl, ["sync_mix: must be above 0", "got 0"]),
        ({"sync_every": 5, "sync_mix": 1.5}, kl, ["sync_mix: must be at most 1", "1.5"]),
        ({"sync_mix": 0.5}, kl, ["sync_mix: 0.5 with model.reference.sync_every 0"]),
        ({"cache_folder": "a"}, dpo, ["cache_folder: a with model.reference.cache false"]),
        ({"cache": True, "sync_every": 5}, dpo, ["cache: true with model.reference.sync_every 5"]),
        ({"cache": True}, kl, ["cache: true with algorithm.objective rl", "sampled again"]),
        ({"sync_every": 5}, {}, ["sync_every: 5 with algorithm.kl_coef 0.0; no reference is used"]),
        (
            {"sync_every": 5},
            dpo | {"loss": "simpo"},
            ["with algorithm.loss simpo; no reference is used"],
        ),
        (
            {"cache": True},
            dict(objective="sft"),
            ["with algorithm.objective sft; no reference is used"],
        ),
        (
            {"cache": True},
            dpo | {"loss": "kto"},
            ["with algorithm.loss kto; the loss puts each response to another"],
        ),
    ):
        found = problems(options, **method)
        assert found.startswith("model.reference."), (options, found)
        for word in words:
            assert word in found, (options, found)


# --------------------------------------------------------------------------- whole runs


def _run(argv: list[str], killed_after: str) -> list[int]:
    """Run train.py in this process, killed once a checkpoint is there; return the steps taken."""
    from spmdrl.train.trainer import Trainer
    from spmdrl.world.world import World

    sys.path.insert(0, str(ROOT))
    from train import train

    cfg, steps, update = parse(argv), [], Trainer.update

    def counted(self: Trainer, *args: object, step: int) -> dict:
        if killed_after and Path(cfg.output_dir, "checkpoints", killed_after).is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(step)
        return update(self, *args, step=step)

    Trainer.update = counted
    train(cfg, World.start(cfg))
    return steps


@pytest.mark.parametrize(
    "name, options",
    [
        ("dpo", ["--model.reference.sync_every", "2", "--model.reference.sync_mix", "0.5"]),
        pytest.param("reward_model", [], marks=pytest.mark.kill),
    ],
)
def test_a_killed_and_resumed_offline_run_ends_bit_identical(name, options, tmp_path):
    model = create_model(tmp_path / "start", hidden_size=32, layers=2, heads=2, kv_heads=1)
    flags = TINY["sft"] | {
        "model.path": model,
        "optimizer.lr": 1e-2,
        "steps": 9,
        "checkpoint.every-steps": 3,
        "checkpoint.keep.last": "9",
    }

    def go(out: Path, killed_after: str = "", **changes: object) -> list[int]:
        pairs = (flags | {"output-dir": out} | changes).items()
        argv = ["--config", str(ROOT / "configs" / f"demo_{name}.yaml"), *options]
        argv += [word for key, value in pairs for word in (f"--{key}", str(value))]
        return run_ranks(2, _run, argv, killed_after)[0]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with pytest.raises(AssertionError, match="died without a result"):
        go(killed, "step_3", steps=4000)  # one sync before the checkpoint, some after it
    assert go(killed)[0] in (3, 6) and go(whole) == list(range(9))
    assert_same_end(whole, killed)
    parts = {part.split(".")[1] for part in final_weights(whole) if part != "newest"}
    assert ("reference" in parts) == (name == "dpo"), parts
