"""Models that see, by every objective and beside every companion: three steps of train.py."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl import config
from spmdrl.check.settings import validate
from spmdrl.config import Config
from spmdrl.config.objectives import OBJECTIVES
from tests.helpers.policy_runs import changed
from tests.helpers.policy_runs import config as policy_config
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import metrics
from tests.helpers.vlm import noise, seeing_model
from tests.program.test_methods import _run_all
from tests.program.test_train import final_weights

FIRST = math.log(2)  # of a pair of which neither is preferred yet
# A row's own column, as it stands in the row: TRL's functions get it by name.
REWARDS = """
import base64, io
from PIL import Image

def width(prompts, completions, images, **columns):
    assert len(images) == len(completions) == 2
    sizes = [[Image.open(io.BytesIO(base64.b64decode(one.partition(",")[2]))).size for one in row]
             for row in images]
    return [sum(width for width, _ in row) for row in sizes]
"""
TOPK = {"loss_options": {"kind": "forward", "k": 8}}
CASES: dict[str, tuple[float | None, dict[str, Any]]] = {
    "dpo": (FIRST, {"objective": "preference", "loss": "dpo"}),
    "a reward model": (FIRST, {"objective": "reward_model", "loss": "bradley_terry"}),
    "a teacher of rows": (None, {"objective": "distill", "loss": "distill_topk"} | TOPK),
    "a teacher of samples": (
        None,
        {"objective": "on_policy_distill", "loss": "distill_topk"} | TOPK,
    ),
    "ppo of a reward model": (
        None,
        {"objective": "rl", "advantage": "gae", "kl": "k1", "kl_coef": 0.05, "kl_in": "reward"},
    ),
}
"""{objective: (its loss at first, nats; its settings)}."""


def rows_of(path: Path) -> Path:
    """Write rows to compare and to imitate, each with one image or two of its own."""
    lines = []
    for i in range(16):
        uris = []
        for j in range(1 + i % 2):
            written = io.BytesIO()
            noise(60, 40, seed=2 * i + j).save(written, "PNG")
            uris.append(f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}")
        own = {"prompt": "<image> and " * len(uris) + "how many? ", "images": uris}
        own |= {"chosen": f"{i % 10}", "rejected": "none", "completion": f"{i % 10}!"}
        lines.append(json.dumps(own) + "\n")
    path.write_text("".join(lines))
    return path


def reward_model(folder: Path, of: Path) -> None:
    """Write a model of another's weights and a scalar head."""
    shutil.copytree(of, folder)
    weights = load_file(of / "model.safetensors")
    width = weights.pop("lm_head.weight").shape[1]
    weights["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def run_config(where: Path, name: str, settings: dict[str, Any]) -> Config:
    """Return a float32 config of one rank; samples come from transformers."""
    samples = OBJECTIVES[settings["objective"]].samples
    rewards = f"model:{where / 'judge'}" if "reward model" in name else f"{where / 'r.py'}:width"
    return changed(
        policy_config(where / "start", where / "runs" / name.replace(" ", "_"), **settings),
        steps=3,
        layout={"placement": "colocated" if samples else "offline"},
        model={"teacher": str(where / "teacher")},
        data={"train": str(where / "rows.jsonl"), "max_prompt_tokens": 64},
        batch={"prompts_per_step": 4, "group_size": 2, "tokens_per_microbatch": 256},
        sampling={"max_response_tokens": 8, "temperature": 1.0},
        optimizer=config.OptimizerSettings(lr=1e-3, weight_decay=0.0),
        engine={"kind": "transformers", "dtype": "float32", "max_num_seqs": 16},
        critic={"lr": 1e-3},
        rewards={"functions": (rewards,) if samples else ()},
        report={"trackers": []},
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder of all runs, and what failed in which."""
    where = tmp_path_factory.mktemp("objectives")
    rows_of(where / "rows.jsonl")
    (where / "r.py").write_text(REWARDS)
    seeing_model("qwen3_vl", where / "start")
    seeing_model("qwen3_vl", where / "teacher", seed=5)
    reward_model(where / "judge", where / "teacher")
    configs = {name: run_config(where, name, own) for name, (_, own) in CASES.items()}
    assert not {name: found for name, cfg in configs.items() if (found := validate(cfg))}
    (failures,) = run_ranks(1, _run_all, configs)
    return where, failures


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.proves("images", "preference")
@pytest.mark.proves("images", "distillation", "colocated", "transformers")
@pytest.mark.proves("images", "critic", "reward_model", "kl_reference", "colocated", "transformers")
def test_what_is_seen_is_trained(name, ran):
    where, failures = ran
    assert name not in failures, failures[name]
    folder = where / "runs" / name.replace(" ", "_")
    rows, first = metrics(folder), CASES[name][0]
    assert len(rows) == 3 and all(row["policy/grad_norm"] > 0 for row in rows)
    assert first is None or rows[0]["policy/loss"] == pytest.approx(first, abs=1e-6)
    if "of samples" in name:
        assert all(60 <= row["reward/mean"] <= 120 for row in rows)
    if "of a reward model" in name:
        assert all(row["reward/std"] > 0 for row in rows)
    before = load_file(where / "start/model.safetensors")
    saved = final_weights(folder).items()
    after = {n.removeprefix(".model."): t for n, t in saved if n.startswith(".model.")}
    still = [n for n in before.keys() & after.keys() if torch.equal(before[n], after[n])]
    assert sum("visual" in name for name in after) > 10 and not still, still
