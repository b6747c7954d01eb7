"""The program end to end, as a user starts it: training, resume, faults, bad input."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time

import pytest

from spmdrl.check import dry_run
from spmdrl.check.settings import parse
from spmdrl.config import dump
from spmdrl.tools.commands.create_model import create_model
from tests.helpers.runs import (
    ROOT,
    TINY,
    Finished,
    arguments,
    command,
    finish,
    metrics,
    run,
    start,
    torchrun,
    wait_for_step,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "start"
    create_model(folder, hidden_size=64, layers=2, heads=2, kv_heads=1)
    return str(folder)


def rl(model: str, folder, **flags) -> dict:
    # What is no matter of the engine is shown with the one that starts in a tenth of the time.
    return (
        {"model.path": model, "output-dir": folder, "engine.kind": "transformers"}
        | TINY["rl"]
        | flags
    )


def grpo(model: str, folder, flags: dict | None = None, *, ranks: int = 2, **how) -> Finished:
    """Run GRPO with flags; `how` is of `run`."""
    return run("demo_grpo.yaml", ranks, **how, **rl(model, folder, **flags or {}))


def reward(folder, name: str) -> str:
    """Write REWARDS into a folder; return what names one of them."""
    (folder / "r.py").write_text(REWARDS)
    return f"{folder / 'r.py'}:{name}"


def final_weights(folder) -> dict:
    """Return {name: tensor} of the newest checkpoint's model and optimizer state."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    newest = max(folder.glob("checkpoints/step_*"), key=lambda p: int(p.name.split("_")[1]))
    tree = _load_state_dict_from_keys(storage_reader=FileSystemReader(newest / "policy"))
    flat = {}

    def walk(prefix, node):
        if isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}.{key}", value)
        elif isinstance(node, torch.Tensor):
            flat[prefix] = node

    walk("", tree)
    assert flat
    return {"newest": newest.name} | flat


def assert_same_end(a, b) -> None:
    import torch

    first, second = final_weights(a), final_weights(b)
    assert first.keys() == second.keys() and first.pop("newest") == second.pop("newest")
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"
    assert all(row["policy/grad_norm"] > 0 for row in metrics(a))
    logged = [
        [(r["step"], r.get("reward/mean"), r["policy/loss"]) for r in metrics(f)] for f in (a, b)
    ]
    assert logged[0] == logged[1]


@pytest.mark.proves("lag", "split")
def test_warm_start_export_and_grpo_in_one_chain(model, tmp_path):
    warm = tmp_path / "sft"
    run("demo_sft.yaml", 2, **TINY["sft"], **{"model.path": model, "output-dir": warm, "steps": 4})
    losses = [row["policy/loss"] for row in metrics(warm)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    exported = tmp_path / "warm"
    command("export", warm, "--out", exported)
    out = tmp_path / "grpo"
    flags = {
        "steps": 3,
        "engine.kind": "vllm",
        "evaluate.every-steps": 2,
        "report.console.table_every": "1",
        "data.eval-size": 8,
        "report.trackers": ["mlflow"],
    }
    finished = grpo(str(exported), out, flags)
    rows = metrics(out)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["policy/staleness"] == 0 and rows[2]["policy/staleness"] == 1  # lag 1
    assert all(row["sync/bytes"] > 0 and row["policy/mismatch_k3"] < 1e-3 for row in rows)
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in every if "eval/reward" in row] == [0, 2, 3]
    assert (out / "config.yaml").exists() and (out / "environment.json").exists()
    assert len(list((out / "logs").glob("*/rank_*.log"))) == 2
    assert "gap" in finished.output  # the start-up probe is printed


def test_saving_at_every_step_never_meets_the_update(model, tmp_path):
    # The writing thread and the update both use collectives of the trainer ranks at once.
    run(
        "demo_sft.yaml",
        2,
        **TINY["sft"],
        **{"model.path": model, "output-dir": tmp_path, "steps": 12, "checkpoint.every-steps": 1},
    )
    assert [row["step"] for row in metrics(tmp_path)] == list(range(12))
    assert max(int(p.name.split("_")[1]) for p in tmp_path.glob("checkpoints/step_*")) == 12


def test_sigterm_saves_before_leaving_and_the_run_goes_on_from_there(model, tmp_path):
    flags = {"steps": 4000, "checkpoint.every-steps": 0}
    under_way = torchrun("demo_grpo.yaml", 2, **rl(model, tmp_path, **flags))
    wait_for_step(under_way, tmp_path, 1, timeout_s=300)
    os.kill(under_way.pids[0], signal.SIGTERM)
    finish(under_way, timeout_s=200)
    (saved,) = tmp_path.glob("checkpoints/step_*")
    step = int(saved.name.split("_")[1])
    assert 1 < step < 4000
    grpo(model, tmp_path, flags | {"steps": step + 1})
    assert metrics(tmp_path)[-1]["step"] == step


def test_a_checkpoint_resumes_on_another_layout_but_not_with_another_config(model, tmp_path):
    split = {"layout.placement": "split"}
    grpo(model, tmp_path, split | {"steps": 2})
    refused = grpo(model, tmp_path, {"steps": 4, "optimizer.lr": 0.5}, status=2)
    assert "optimizer.lr" in refused.output and "0.5" in refused.output
    grpo(model, tmp_path, split | {"steps": 4, "layout.trainer-ranks": 2}, ranks=3)
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.kill  # by itself in world/test_world.py, and in world/test_launcher.py
def test_a_killed_rank_is_named_and_ends_the_run(model, tmp_path):
    import psutil

    under_way = torchrun("demo_grpo.yaml", 2, **rl(model, tmp_path, steps=4000))
    wait_for_step(under_way, tmp_path, 1, timeout_s=300)
    ranks = [
        p
        for p in psutil.Process(under_way.pids[0]).children()
        if any("train.py" in part for part in p.cmdline())
    ]
    victim = next(p for p in ranks if p.environ()["RANK"] == "1")
    victim.kill()
    began = time.monotonic()
    finished = finish(under_way, timeout_s=200)
    assert finished.status != 0
    assert time.monotonic() - began < 60
    logs = "".join(p.read_text() for p in (tmp_path / "logs").glob("*/rank_0.log"))
    assert "rank 1 is missing" in finished.output + logs, finished.output[-4000:]


REWARDS = """
import math, time
def raising(prompts, completions, **columns): raise KeyError("no such column")
def hanging(prompts, completions, **columns): time.sleep(1000)
def nan(prompts, completions, **columns): return [math.nan for _ in completions]
def text(prompts, completions, **columns): return ["good"]
def varied(prompts, completions, **columns):
    return [sum(map(ord, c)) % 7 / 7 for c in completions]
def odd(prompts, completions, **columns):
    assert len(completions) == 1
    if len(completions[0]) % 2: raise ValueError("odd")
    return [1.0]
odd.scope = "sample"
"""


# What else a reward may do wrong is in tests/workers/test_pool.py and tests/rollout/test_inputs.py.
@pytest.mark.parametrize(
    "function, every, says",
    [
        ("raising", 0, ("step 0: the reward of task:", "no such column' (", "r.py:3, in raising")),
        (
            "hanging",
            1,
            ("evaluation after 0 steps: the reward of task:", "of hanging (", "r.py:4)"),
        ),
    ],
)
def test_a_failing_reward_ends_the_run_by_name(function, every, says, model, tmp_path):
    flags = {
        "steps": 2,
        "rewards.functions": reward(tmp_path, function),
        "rewards.timeout-s": 1.0 if function == "hanging" else 300.0,
        "evaluate.every-steps": every,
    }
    finished = grpo(model, tmp_path / "out", flags, status=1)
    for part in (*says, "Fix the reward function"):
        assert part in finished.output
    assert "Traceback" not in finished.output  # what called it is the program's


def test_a_step_whose_rewards_all_failed_ends_with_the_first_and_no_traceback(model, tmp_path):
    rewards = {"rewards.functions": reward(tmp_path, "raising"), "rewards.on-failure": "drop"}
    said = grpo(model, tmp_path / "out", rewards, status=1).output
    assert "step 0: the rewards of all 32 samples failed, so that there is nothing to train" in said
    assert "First: the reward of " in said and "Fix the reward function" in said
    assert "Traceback" not in said


def test_failing_rewards_can_be_dropped_and_are_counted(model, tmp_path):
    rewards = {"rewards.functions": reward(tmp_path, "odd"), "rewards.on-failure": "drop"}
    grpo(model, tmp_path / "out", rewards | {"steps": 3})
    rows = metrics(tmp_path / "out")
    assert sum(row["rollout/failed_rewards"] for row in rows) > 0
    assert all(row["reward/mean"] == 1.0 for row in rows)


@pytest.mark.parametrize(
    "by, flags, says",
    [
        (torchrun, {"model.path": "nowhere/at/all"}, "nowhere/at/all"),
        (start, {"data.train": "missing.jsonl", "rewards.functions": "r:f"}, "missing.jsonl"),
        (start, {"data.max-prompt-tokens": 3}, "max_prompt_tokens"),
        (start, {"data.max-prompt-tokens": 4096, "batch.tokens-per-microbatch": 9000}, "4096"),
    ],
)
def test_bad_input_is_refused_with_what_and_where(by, flags, says, model, tmp_path):
    finished = grpo(model, tmp_path, flags, by=by, status=2)
    assert says in finished.output
    ours = finished.output.split("torch/distributed/elastic")[0]
    assert "Traceback" not in ours, finished.output
    told = [line for line in ours.splitlines() if line.startswith(("  - ", "[rank "))]
    assert sum(says in line for line in told) == 1, "one rank says it"


def test_a_dry_run_tries_the_functions_of_an_edited_train(model, tmp_path, capsys, monkeypatch):
    text = (ROOT / "train.py").read_text()
    line = "    loss_fn = rl.registry.get(cfg.objective.loss_kind, cfg.loss_name)\n"
    for name, becomes, says in (
        ("fine", "    loss_fn = lambda logprobs, advantages: (-logprobs * advantages, {})\n", ""),
        ("summed", "    loss_fn = lambda logprobs: (logprobs.sum(), {})\n", "loss: "),
        ("early", f"    world.rank\n{line}", ""),
    ):
        script = tmp_path / f"{name}.py"
        script.write_text(text.replace(line, becomes))
        flags = rl(model, tmp_path, **{"dry-run": "true", "algorithm.loss-options": "{}"})
        monkeypatch.setattr(sys, "argv", arguments("demo_grpo.yaml", 2, script=script, **flags))
        status = runpy.run_path(str(script))["main"]()
        out, err = capsys.readouterr()
        assert (status == 2) == bool(says), err
        assert f"{script}:" in err if says else not err
        assert ("are not tried here" in out) == (name == "early")


def test_dry_run_needs_no_launcher_and_no_weights(tmp_path, capsys):
    model = str(create_model(tmp_path / "chat", chat_template=True))
    talk = [{"role": "user", "content": "1-9?"}, {"role": "assistant", "content": "5"}]
    demonstrations = tmp_path / "demonstrations.jsonl"  # a step before makes them
    demonstrations.write_text(64 * (json.dumps({"messages": talk}) + "\n"))
    # Those for GPUs name hub models and problems to fetch: tests/repository/test_recipes.py.
    paths = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if not p.name.startswith("gpu_")]
    assert len(paths) > 8
    sees = str(create_model(tmp_path / "sees", architecture="qwen2_5_vl"))
    for path in paths:
        made = "demonstrations.jsonl" in path.read_text()
        own = str(tmp_path / path.stem)  # the folder of the file may hold a run
        argv = ["--config", str(path), "--dry-run", "--output-dir", own, "--model.path", model]
        if "task:shapes" in path.read_text():  # the engine that asks for no torchvision
            argv[-1:] = [sees, "--engine.kind", "transformers"]
        argv += ["--data.train", str(demonstrations)] if made else []
        assert dry_run.show(parse(argv)) == 0, path.name
        shown = capsys.readouterr().out
        for part in ("sequences per step", "micro-batches", "rank 0", "parameters"):
            assert part in shown, path.name
        lines = shown.splitlines()
        assert len(lines) < 35 and lines[-1].startswith("no problems (the whole config"), path.name
    full = parse([*argv[:2], "--dry-run", "full", *argv[3:]])
    assert dry_run.show(full) == 0 and dump(full) in capsys.readouterr().out


def test_a_dry_run_names_each_folder_of_a_model_that_is_not_there(tmp_path, capsys):
    path, model = str(ROOT / "configs" / "demo_ppo.yaml"), str(create_model(tmp_path / "policy"))
    argv = ["--config", path, "--dry-run", "--model.path", model, "--algorithm.kl-coef", "0.1"]
    capsys.readouterr()  # of writing the model
    assert dry_run.show(parse([*argv, "--model.reference.path", "./nowhere"])) == 2
    said = capsys.readouterr().err.splitlines()
    assert "problem: model.reference.path: folder './nowhere' does not exist" in said[0]
    assert len(said) == 2 and said[-1].startswith("1 problem (")
    with pytest.raises(SystemExit):
        parse([*argv, "--critic.path", "./gone"])
    assert "critic.path: folder './gone' does not exist" in capsys.readouterr().err
