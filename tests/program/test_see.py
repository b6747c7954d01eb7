"""A model that sees, end to end by train.py: imitation, GRPO, evaluation, export, and a resume."""

from __future__ import annotations

import json
import shutil

import pytest

from spmdrl.errors import Refusal
from spmdrl.tools.commands.ask import ask
from spmdrl.tools.commands.create_model import TowerSizes, create_model
from tests.helpers.runs import TINY, command, metrics, run
from tests.helpers.vlm import noise
from tests.program.test_train import assert_same_end

SCENES = {"kind": "count", "most": 2, "cells": 2, "colours": 6, "dark": True, "least": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("see") / "init"
    sizes = dict(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate=96)
    tower = TowerSizes(width=32, layers=1, fan_in=True)
    return create_model(
        folder, architecture="qwen2_5_vl", tower=tower, initializer_std=0.12, **sizes
    )


@pytest.mark.proves("images", "sft")
@pytest.mark.proves("images", "lag", "split", "transformers")
def test_a_model_that_sees_imitates_learns_by_grpo_and_goes_on_as_if_never_stopped(model, tmp_path):
    warm, whole, again = tmp_path / "sft", tmp_path / "grpo", tmp_path / "again"
    scenes = {"data.task-options": json.dumps(SCENES)}
    flags = scenes | {"model.path": model, "output-dir": warm, "steps": 12, "optimizer.lr": 5e-3}
    run("demo_see_sft.yaml", 2, **TINY["sft"], **flags, **{"optimizer.warmup-steps": 0})
    losses = [row["policy/loss"] for row in metrics(warm)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    exported = tmp_path / "warm"
    command("export", warm, "--out", exported)

    flags = (
        scenes | TINY["rl"] | {"model.path": exported, "engine.kind": "transformers", "steps": 4}
    )
    flags |= {
        "steps": 4,
        "evaluate.every-steps": 4,
        "data.eval-size": 8,
        "checkpoint.every-steps": 2,
    }
    run("demo_see.yaml", 2, **flags, **{"output-dir": whole})
    rows = metrics(whole)
    assert [row["policy/staleness"] for row in rows] == [0, 1, 1, 1]
    # Rank 1 saw by pushed weights what rank 0 sees: towers that differed would show here.
    assert rows[0]["policy/mismatch_k3"] < 1e-6 and all(row["sync/bytes"] > 0 for row in rows)
    every = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in every if "eval/reward" in row] == [0, 4]

    shutil.copytree(whole, again, ignore=shutil.ignore_patterns("step_4", "run.lock"))
    run("demo_see.yaml", 2, **flags, **{"output-dir": again})
    assert len(list((again / "logs").iterdir())) == 2  # attempts
    assert_same_end(whole, again)


def test_a_model_is_asked_about_scenes_and_about_images_of_files(model, tmp_path, capsys):
    assert ask(model, task="task:shapes", task_option=("most=9",), num_problems=3) in (0, 1 / 3)
    noise(56, 56).save(tmp_path / "a.png")
    question, image = ("<image> and <image>: same? ",), tmp_path / "a.png"
    ask(model, prompt=question, image=(image, image), max_response_tokens=2)
    assert "same?   ->  " in capsys.readouterr().out
    with pytest.raises(Refusal, match="1 images, and its text 2 places"):
        ask(model, prompt=question, image=(image,))
    with pytest.raises(Refusal, match="--image goes with --prompt"):
        ask(model, image=(image,))
    with pytest.raises(Refusal, match="--image"):
        ask(model, prompt=question, image=(tmp_path / "missing.png",))
