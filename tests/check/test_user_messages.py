"""What a person is told when something is wrong, stops, or is done already."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from spmdrl.algorithms import registry
from spmdrl.check import dry_run
from spmdrl.check.dry_run import mesh_map
from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.restore import already_finished
from spmdrl.data.templates import render
from spmdrl.data.tokenizer import read_tokenizer
from spmdrl.errors import RAISED, Refusal, error_text
from spmdrl.imports import attempt, construct, import_file, import_object, is_missing_folder
from spmdrl.report.config_sizes import config_sizes
from spmdrl.same_run.differences import config_of
from spmdrl.tools.commands.ask import ask
from spmdrl.tools.commands.create_model import create_model
from spmdrl.tools.proof.ranks import launch_env, start_rank
from spmdrl.world.launch import Launch, check_launch, report_refusal
from tests.helpers.built import changed, made, refused
from tests.helpers.pool_runs import wait_until
from tests.helpers.ranks import free_port
from tests.helpers.report_world import SmallWorld, group  # noqa: F401
from tests.helpers.runs import ROOT, TINY, finish, metrics, run, torchrun, wait_for_step

RANK = """
import os, sys, time
from datetime import timedelta
import spmdrl.world.leaving
import torch.distributed as dist
from spmdrl.config import Config, LayoutSettings
from spmdrl.errors import Refusal
from spmdrl.world.world import World
from spmdrl.world.leaving import report_end

def work(world):
    if mode == "start-up":
        block()
    if mode == "signals":
        world.started()
        spmdrl.world.leaving.time = Clock()
        block()
    if mode == "same":
        raise Refusal("data.train: no such file")
    with world.watch.phase("build engine", -1):
        dist.barrier()  # a slow rank has come here too when the other raises
        if world.rank == 1:
            raise RuntimeError("out of memory\\nand more lines")
        time.sleep(1000)

def block():
    # In C, where a Python signal handler does not run.
    print("blocked", flush=True)
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=1000))

class Clock:  # what the time is when a signal is obeyed; says that it was
    times = iter([10.0, 10.9, 11.1])
    def monotonic(self):
        print("obeyed", flush=True)
        return next(self.times)

mode, size = sys.argv[1], int(os.environ["WORLD_SIZE"])
layout = LayoutSettings(world_size=size, placement="colocated", device="cpu")
world = World.start(Config(layout=layout))
world.watch.before_exit.append(lambda ending: print("closed as", ending, flush=True))
try:
    work(world)
    status = 0
except Exception as error:
    status = report_end(error, world)
sys.stdout.flush()
os._exit(status)
"""


@dataclass
class Rank:
    """A rank that runs RANK, and what it has printed so far."""

    process: BaseProcess
    printed: Path

    def wait_for(self, line: str, *, times: int = 1) -> None:
        assert wait_until(lambda: self.printed.read_text().count(f"{line}\n") == times)


def _be_rank(mode: str, printed: Path) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["-c", mode]
    exec(RANK, {"__name__": "__main__"})


def start_ranks(folder: Path, mode: str, size: int) -> list[Rank]:
    port, ranks = free_port(), []
    for rank in range(size):
        printed = folder / f"printed_{rank}"
        printed.touch()
        environment = os.environ | launch_env(rank, size, port)
        ranks.append(Rank(start_rank(environment, _be_rank, mode, printed), printed))
    return ranks


def texts_of(ranks: list[Rank]) -> list[str]:
    try:
        for rank in ranks:
            rank.process.join(300)
            assert rank.process.exitcode is not None, "it does not end"
        return [rank.printed.read_text() for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()


@pytest.mark.parametrize("has_template", [True, False])
def test_a_question_goes_by_the_chat_template_and_bare_on_request(
    has_template, tmp_path, monkeypatch, capsys
):
    create_model(tmp_path / "m", chat_template=has_template, layers=1)
    tokenizer, asked = read_tokenizer(str(tmp_path / "m")), []

    def answer(model, tokens, **how) -> list[int]:
        asked.append(tokenizer.decode(tokens))
        return list(tokens)

    monkeypatch.setattr("spmdrl.tools.commands.ask._response", answer)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    for chosen in ("auto", "never"):
        ask(tmp_path / "m", prompt=("3+4=",), data=str(rows), chat_template=chosen)
    message = [{"role": "user", "content": "3+4="}]
    rendered = "3+4="
    if has_template:
        rendered = render(message, tokenizer, tools=None, where="here")
        assert rendered != "3+4=" and rendered in asked[0]
    assert asked == [rendered, "1+1=", "3+4=", "1+1="]
    if not has_template:
        with pytest.raises(Refusal, match="needs a chat template"):
            ask(tmp_path / "m", prompt=("3+4=",), chat_template="always")


def test_a_rank_that_raises_is_quoted_by_the_others_which_end_quietly(tmp_path):
    ranks = start_ranks(tmp_path, "raise", 2)
    zero, one = texts_of(ranks)  # which waits less than the 1000 s that rank 0 would sleep
    assert "Traceback" in one and "[rank 1] ended with RuntimeError: out of memory" in one
    assert (
        "[rank 0] ends in 'build engine' at step -1: rank 1 ended with "
        "RuntimeError: out of memory\n"
    ) in zero
    assert "Traceback" not in zero
    assert "closed as failed" in zero and "closed as failed" in one
    assert all(rank.process.exitcode != 0 for rank in ranks)


def test_what_all_ranks_say_is_said_once(tmp_path):
    text = "".join(texts_of(start_ranks(tmp_path, "same", 2)))
    assert text.count("data.train: no such file") in (1, 2) and "Traceback" not in text
    assert (
        "ends for the same reason" in text
        or "rank 0 ended with" in text
        or ("rank 1 ended with" in text)
    )


def test_a_signal_in_start_up_ends_a_blocked_rank_at_once(tmp_path):
    (rank,) = start_ranks(tmp_path, "start-up", 1)
    rank.wait_for("blocked")
    os.kill(rank.process.pid, signal.SIGTERM)
    began = time.monotonic()
    (text,) = texts_of([rank])
    assert rank.process.exitcode == 128 + signal.SIGTERM and time.monotonic() - began < 10
    assert "nothing to save before the first step" in text and "closed as stopped" in text


def test_the_first_ctrl_c_asks_for_a_stop_and_the_second_ends_at_once(tmp_path):
    (rank,) = start_ranks(tmp_path, "signals", 1)
    rank.wait_for("blocked")
    for count in (1, 2):  # the same key press, passed on twice
        os.kill(rank.process.pid, signal.SIGINT)
        rank.wait_for("obeyed", times=count)
    os.kill(rank.process.pid, signal.SIGINT)
    (text,) = texts_of([rank])
    assert rank.process.exitcode == 128 + signal.SIGINT and text.count("obeyed\n") == 3
    assert "this step is finished and saved" in text and "the second signal" in text


def test_ctrl_c_saves_and_a_finished_run_is_not_built_again(tiny_model, tmp_path):
    flags = TINY["sft"] | {
        "model.path": tiny_model,
        "output-dir": tmp_path,
        "optimizer.schedule": "constant",
    }
    under_way = torchrun("demo_sft.yaml", 2, **flags, steps=4000)
    wait_for_step(under_way, tmp_path, 1, timeout_s=300)
    os.kill(under_way.pids[0], signal.SIGINT)
    stopped = finish(under_way, timeout_s=200)
    (saved,) = tmp_path.glob("checkpoints/step_*")
    done = disk.step_of(saved)
    assert done == len(metrics(tmp_path)) and "SIGINT" in stopped.output
    assert "KeyboardInterrupt" not in stopped.output
    again = run("demo_sft.yaml", 2, **flags, steps=done)
    assert f"already finished: {done} of {done} steps; raise --steps" in again.output
    assert not (tmp_path / "logs" / "attempt_2").exists()


LOSS = """
import json

def parsed(text):
    return json.loads(text)

def loss(logprobs, advantages, *, limit: float = 3.0):
    if len(logprobs) > limit:  # not in the trial call
        parsed("{")
    return -logprobs * advantages, {}
"""
BEGIN = "    loss_fn = rl.registry.get("


def copied(tmp_path, **edits: str) -> Path:
    """Return a copy of train.py in which lines became others, with a loss beside it."""
    text = (ROOT / "train.py").read_text()
    for before, after in edits.values():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "mine.py").write_text(LOSS)
    (tmp_path / "script.py").write_text(text)
    return tmp_path / "script.py"


ALONE = {"layout.placement": "colocated", "lag": 0, "engine.kind": "transformers", "steps": 1}


def test_an_error_deep_in_a_loss_shows_the_users_lines_and_the_log_has_all(tiny_model, tmp_path):
    flags = TINY["rl"] | ALONE | {"model.path": tiny_model, "output-dir": tmp_path / "out"}
    flags |= {
        "script": copied(tmp_path),
        "algorithm.loss": "mine:loss",
        "algorithm.loss-options": "{}",
    }
    flags["sampling.max-response-tokens"] = 8
    text = run("demo_grpo.yaml", 1, by=torchrun, status=1, **flags).output
    ours, footer = text.split("ChildFailedError", 1)
    shown = ours[ours.index("Traceback") : ours.index("[rank 0] ended")].splitlines()
    assert shown[1].endswith('mine.py", line 9, in loss'), ours  # nothing of what called it
    assert not [line for line in shown if "/spmdrl/" in line or "/torch/" in line]
    said = rf"JSONDecodeError: .* \({tmp_path}/mine.py:5, in parsed"
    assert re.search(rf"\[rank 0\] ended with {said}\)", ours)
    assert re.search(rf"traceback : {said}; raised at .*decoder.py", footer)
    (log,) = (tmp_path / "out" / "logs").glob("*/rank_0.log")
    assert "spmdrl/train/trainer.py" in log.read_text() and "mine.py" in log.read_text()


@pytest.mark.parametrize(
    "line, error",
    [('int("many")', "ValueError: .*'many'"), ("raise SystemExit(0)", "SystemExit: 0")],
)
def test_an_error_in_an_edit_of_train_py_shows_its_line(tiny_model, tmp_path, line, error):
    edit = (BEGIN, f"    {line}\n{BEGIN}")
    flags = TINY["sft"] | {"model.path": tiny_model, "output-dir": tmp_path / "out"}
    text = run("demo_sft.yaml", 1, script=copied(tmp_path, edit=edit), status=1, **flags).output
    assert re.search(rf'script.py", line \d+, in train\n +{re.escape(line)}', text), text
    at = re.escape(f"({tmp_path}/script.py:")
    assert re.search(rf"ended with {error} {at}\d+, in train\)", text), text


# --------------------------------------------------------------------------- without ranks


def test_a_refusal_that_the_users_code_ran_into_says_where(tmp_path):
    (tmp_path / "asks.py").write_text(
        "from spmdrl.algorithms import registry\ndef ask():\n    registry.get('loss', 'nope')\n"
    )
    ask = import_file(str(tmp_path / "asks.py")).ask
    _, called_back = attempt(lambda: ask())
    assert f"(asked for at {tmp_path}/asks.py:3, in ask)" in error_text(called_back)
    with pytest.raises(Refusal) as own:
        registry.get("loss", "nope")
    assert error_text(own.value) == str(own.value)


def test_a_file_that_cannot_be_imported_is_named_with_its_line(tmp_path):
    (tmp_path / "torn.py").write_text("limit = 3\nassert limit < 3, 'too many'\n")
    (tmp_path / "typo.py").write_text("limit = 3\ndef f(:\n")
    with refused(f"AssertionError: too many ({tmp_path}/torn.py:2, in <module>)"):
        import_object(f"{tmp_path}/torn.py:f", field="field", kind="function")
    with refused("SyntaxError", f"({tmp_path}/typo.py:2)"):
        import_object(f"{tmp_path}/typo.py:f", field="field", kind="function")


HOSTILE = {
    "exits": ("raise SystemExit(0)", "SystemExit: 0"),
    "says_nothing": (
        "raise type('E', (Exception,), {'__str__': None})()",
        "E: (its message cannot",
    ),
    "surrogate": (r"raise ValueError('\ud800')", r"ValueError: \ud800"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_the_users_code_raises_is_refused_at_its_line(tmp_path, monkeypatch, name):
    line, says = HOSTILE[name]
    monkeypatch.syspath_prepend(tmp_path)
    body = f"class Game:\n    def __init__(self):\n        {line}\n\ndef loss():\n    {line}\n"
    (tmp_path / f"{name}_called.py").write_text(body)
    (tmp_path / f"{name}_imported.py").write_text(f"{line}\n")
    file = tmp_path / f"{name}_imported.py"
    with refused(says, f"({file}:1, in <module>)"):
        import_object(f"{file}:f", field="field", kind="function")
    (found,) = registry.problems("loss", f"{name}_imported:loss", {})
    assert says in found and f"({file}:1, in <module>)" in found
    (found,) = registry.problems("loss", f"{name}_called:loss", {})
    assert says in found and f"{name}_called.py:6, in loss)" in found
    module = import_file(str(tmp_path / f"{name}_called.py"))
    with refused(says, f"{name}_called.py:3, in __init__)"):
        construct(module.Game, {}, field="rollout.environment")
    _, error = attempt(module.loss, RAISED)
    assert error is not None
    error_text(error).encode()  # any file can take it
    monkeypatch.setenv("SPMDRL_REFUSED", str(tmp_path / "refused"))
    report_refusal("\ud800")
    assert (tmp_path / "refused").read_text() == "\\ud800\n"


def test_only_a_whole_checkpoint_of_the_same_run_counts_as_finished(tmp_path, group, capsys):
    cfg = made(output_dir=str(tmp_path), steps=5)
    world = SmallWorld(cfg, group)
    assert not already_finished(cfg, world)
    folder = disk.step_folder(disk.checkpoints_folder(tmp_path), 5)
    folder.mkdir(parents=True)
    assert not already_finished(cfg, world)  # no manifest
    settings = config_of(cfg)
    own = disk.Manifest(
        step=5, config=settings, model="m", tokenizer="m", rollout_ranks=(), files={}
    )
    disk.write_manifest(folder, own)
    assert already_finished(cfg, world)
    assert "5 of 5 steps; raise --steps" in capsys.readouterr().out
    assert not already_finished(changed(cfg, steps=6), world)
    assert not already_finished(changed(cfg, seed=1), world)


def test_a_name_under_a_folder_that_exists_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "there").mkdir(parents=True)
    for name in ("runs/nope", "./a", "a/b/c"):
        assert is_missing_folder(name)
    assert not is_missing_folder("runs/there")
    assert not is_missing_folder("Qwen/Qwen3-0.6B") and not is_missing_folder("gpt2")


@pytest.mark.parametrize(
    "layout, size, says",
    [
        (dict(world_size=2), 1, "--layout.world-size 1 --layout.placement colocated"),
        (dict(world_size=8, trainer_ranks=4), 4, "--layout.world-size 4 --layout.trainer-ranks 2"),
        (dict(world_size=8, trainer_ranks=4), 6, "set --layout.world-size 6"),
        (dict(world_size=2, placement="colocated"), 1, "set --layout.world-size 1"),
    ],
)
def test_the_layout_that_is_proposed_can_be_had(layout, size, says):
    with refused(says):
        check_launch(made(layout=layout), Launch(0, size, 0, "a", 1, "torchrun"))


def test_an_engine_on_several_nodes_is_refused():
    cfg = made(layout=dict(world_size=16, trainer_ranks=8, inference_tp=8))

    def launch(nodes: int) -> Launch:
        return Launch(0, 16, 0, "a", 1, "torchrun", nodes=nodes)

    check_launch(cfg, launch(1))
    check_launch(cfg, launch(2))
    with refused("layout.inference_tp: 8 does not divide the 4 ranks of each of 4 nodes"):
        check_launch(cfg, launch(4))
    parts = made(layout=dict(world_size=16, trainer_ranks=8, inference_tp=2, inference_dp=4))
    check_launch(parts, launch(2))
    with refused("layout.inference_tp * inference_dp: 8 does not divide the 4 ranks"):
        check_launch(parts, launch(4))
    assert mesh_map(parts)["inference mesh"] == "replica 1 x dp 4 x tp 2"
    assert mesh_map(parts)["rank 11"] == "generates replica=0 dp=1 tp=1"


def test_a_dry_run_finds_what_a_run_would_stumble_over(tiny_model, tmp_path):
    data, code = tmp_path / "rows.jsonl", tmp_path / "r.py"
    data.write_text('{"prompt": "1+1="}\n')
    code.write_text(
        "import sys\n"
        "def fine(prompts, completions, **columns): return [1.0]\n"
        "def column(prompts, completions, level): return [1.0]\n"
        "def truth(data_source, solution_str, ground_truth): return 1.0\n"
    )
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")

    def found(*functions: str, **other: object) -> str:
        rows = dict(train=str(data), max_prompt_tokens=64) | other
        cfg = made(
            output_dir=str(tmp_path / "run"),
            model=dict(path=str(tiny_model)),
            rewards=dict(functions=functions),
            data=rows,
            sampling=dict(max_response_tokens=64),
            batch=dict(prompts_per_step=1),
        )
        return "\n".join(dry_run.problems(cfg))

    assert found(f"{code}:fine") == ""
    assert "asks for level" in found(f"{code}:column")
    assert "asks for ground_truth" in found(f"{code}:truth")
    assert "not_installed_anywhere" in found(f"{tmp_path}/broken.py:f")
    assert "nowhere.jsonl: no such data file" in found(f"{code}:fine", eval="nowhere.jsonl")
    assert "unknown task" in found(train="task:additon", size=4)


def test_derived_numbers_are_whole():
    cfg = made(
        data=dict(train="task:addition"),
        layout=dict(world_size=8, trainer_ranks=6),
        batch=dict(prompts_per_step=128, group_size=8),
    )
    sizes = config_sizes(cfg)
    assert sizes["sequences per dp rank"] == "1024 / 6 = about 171"
    assert sizes["engine rounds per step"] == (
        "2: 512 sequences, 256 at a time; engine.max_num_seqs 512 would decode them at once, if "
        "its KV cache holds them (python -m spmdrl plan)"
    )
    sizes = config_sizes(changed(cfg, engine={"max_num_seqs": 512}))
    assert sizes["engine rounds per step"] == "1: 512 sequences, 512 at a time"
    sft = made(
        data=dict(train="task:addition"),
        layout=dict(placement="offline"),
        batch=dict(prompts_per_step=128, group_size=8),
        algorithm=dict(objective="sft"),
    )
    assert "steps of generation ahead" not in config_sizes(sft)


def test_help_names_the_config_file_and_may_be_cut_short():
    done = subprocess.run(
        f"{sys.executable} train.py --help | head -3",
        shell=True,
        text=True,
        capture_output=True,
        cwd=ROOT,
        timeout=300,
    )
    assert "--config FILE" in done.stdout and done.stderr == ""


def test_ask_takes_texts_and_rows_and_hints_at_the_options_of_a_task(tiny_model, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "5+5="}\n')
    assert ask(tiny_model, prompt=("3+4=",), data=str(path), max_response_tokens=2) is None
    out = capsys.readouterr().out
    assert "3+4=  ->" in out and "5+5=  ->" in out and out.count("right: 2") == 1
    assert ask(tiny_model, num_problems=2, max_response_tokens=2) == 0.0
    assert "--task-option digits=2" in capsys.readouterr().out
    ask(tiny_model, num_problems=1, max_response_tokens=2, task_option=("digits=2",))
    assert "--task-option" not in capsys.readouterr().out
