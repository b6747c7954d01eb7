"""Mistakes that people make every day: a dry run says what is wrong, where, and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spmdrl.check import dry_run
from spmdrl.check.settings import parse

CONFIG = """
model: {path: MODEL}
output_dir: HERE/run
layout: {placement: colocated, world_size: 2}
lag: 0
engine: {kind: transformers}
data: {train: HERE/rows.jsonl, max_prompt_tokens: 16}
sampling: {max_response_tokens: 8}
rewards: {functions: HERE/mine.py:score}
batch: {prompts_per_step: 4}
"""


@pytest.fixture(scope="module")
def here(tiny_model, tmp_path_factory) -> Path:
    """A folder with a config that nothing is wrong with, and files to be wrong with."""
    folder = tmp_path_factory.mktemp("everyday")
    text = CONFIG.replace("HERE", str(folder)).replace("MODEL", str(tiny_model))
    (folder / "run.yaml").write_text(text)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    others = [{"question": "1+1=", "gold": "2"}] * 9
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
    (folder / "empty.jsonl").write_text("")
    (folder / "list.jsonl").write_text(json.dumps(rows))
    (folder / "table.csv").write_text("prompt,answer\n1+1=,2\n")
    (folder / "mine.py").write_text("def score(solution_str, ground_truth): return 1.0\n")
    shutil.copytree(tiny_model, folder / "old")
    (folder / "old" / "model.safetensors").rename(folder / "old" / "pytorch_model.bin")
    return folder


def said(argv: list[str], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """Return the exit status of a dry run and what it says is wrong."""
    try:
        status = dry_run.show(parse([*argv, "--dry-run"]))
    except SystemExit as error:
        status = int(str(error.code))
    return status, capsys.readouterr().err


def test_nothing_is_wrong_with_the_config_itself(here, capsys):
    status, text = said(["--config", f"{here}/run.yaml"], capsys)
    assert status == 0, text


# What is written, and what is said of it.
MISTAKES = {
    "--model.path HERE/run.yaml": "run.yaml' is a file; name the folder that holds it",
    "--model.path HERE/oldd": "oldd' does not exist (looked from CWD); did you mean HERE/old?",
    "--data.train HERE/row.jsonl": "no such data file (looked from CWD); did you mean HERE/rows",
    "--data.train https://a.org/a.jsonl": "is an address, and nothing is fetched from addresses",
    "--data.train $HOME/a.jsonl": "variables of the shell are not replaced here",
    "--data.train HERE/*.jsonl": "patterns are not expanded here: name each file",
    "--data.train HERE/nowhere": "HERE/nowhere: no such file or folder (looked from CWD)",
    "--data.train HERE/table.csv": "must end in .jsonl, .json, .parquet; write its rows as one of",
    "--data.train HERE/empty.jsonl": "empty.jsonl: the dataset is empty (0 rows)",
    "--data.train HERE/others.jsonl": "set --data.columns '{prompt: question}'",
    "--data.train HERE/others.jsonl --data.columns {question: prompt}": "new name first, {prompt:",
    "--data.train task:adition": "data.train: task:adition: unknown task; did you mean addition?",
    "--rewards.functions HERE/mine.py": "did you mean HERE/mine.py:score?",
    "--rewards.functions mine.score": "'mine.score' must be `module:function` or `path/file.py:fun",
    "--output-dir ": "output_dir: is required and empty",
    "--steps 1.5": "--steps: expected int, got 1.5",
    "--steps 3 lag 0": "expected one value, got 3 lag 0; flags begin with two hyphens: --lag",
    "--layout.device gpu": "'gpu' is not one of auto, cpu, cuda; that is cuda here",
    "--engine.dtype fp32": "'fp32' is not one of bfloat16, float16, float32; that is float32 here",
    "--algorithm.objective grpo": "that is rl here, with the method in algorithm.advantage and",
    "--algorithm.objective dpo": "that is preference here, with the method in algorithm.advantage",
    "--algorithm.loss-options {clip_low:0.2}": "{clip_low:0.2}: a space is missing after the colon",
    "--sampling.stop-token-ids 99999": "sampling.stop_token_ids: 99999 is no id of this model, whi",
    "--checkpoint.resume yes": "name one, such as RUN/checkpoints/step_100, or auto, or never",
    "--rollout.environment {max_turns: 3}": "rollout.environment.name: is missing; name one of",
    "--engine.kind vllm --engine.options {gpu_memory_util: 0.5}": "That is set by engine.gpu",
    "--model.path HERE/old": "pytorch_model.bin",
    "--steps 5 --steps 6": "--steps: stands here 2 times; leave all but one out",
    "--report.mlflow.uri localhost:5000": "how to reach the server; write http://localhost:5000",
    "--output-dir /proc/run": "/proc/run cannot be written to (its files are the kernel's); set an",
    "--output-dir HERE/rows.jsonl": "cannot be written to (HERE/rows.jsonl is a file); set another",
    "--output-dir HERE/old --model.path HERE/old": "is model.path too, and the run would write amo",
    "--data.train HERE/list.jsonl": "begins a list, and a .jsonl file has one row on each line, as",
    "--data.train HERE/rows.jsonl,HERE/b.jsonl": "several files are a list, [HERE/rows.jsonl, HERE",
    "--sampling.stop \\n": "is a backslash and a letter, which no response ends with; for the char",
    "--rewards.weights 1 1": "2 weights for 1 functions; give one for each, or none, which is 1 ea",
    "--batch.updates-per-step 3": "1.33333 prompts, not whole; take one of 1, 2, 4",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_every_day_is_named_with_what_to_do(mistake, here, capsys):
    argv: list[str] = []
    for part in mistake.split("--")[1:]:
        flag, _, value = part.strip(" ").partition(" ")
        words = [value] if value.startswith("{") or " " not in value else value.split()
        argv += [f"--{flag}", *(word.replace("HERE", str(here)) for word in words)]
    status, text = said(["--config", f"{here}/run.yaml", *argv], capsys)
    expected = MISTAKES[mistake].replace("HERE", str(here)).replace("CWD", str(Path.cwd()))
    assert status in (2, 3) and expected in text, text
    assert "Traceback" not in text


# What a run does as it is written, and is seldom meant.
SELDOM_MEANT = {
    "--optimizer.warmup-steps 200": "200 of steps 100: the learning rate ends at 5e-07 and never",
    "--data.eval HERE/rows.jsonl": "data.eval: HERE/rows.jsonl is in data.train too: the evaluati",
}


@pytest.mark.parametrize("setting", SELDOM_MEANT)
def test_what_is_seldom_meant_is_noted_and_not_refused(setting, here, capsys):
    flag, value = setting.replace("HERE", str(here)).split()
    status, text = said(["--config", f"{here}/run.yaml", flag, value], capsys)
    assert status == 0
    assert f"note: {flag[2:].replace('-', '_')}: " in text
    assert SELDOM_MEANT[setting].replace("HERE", str(here)) in text
