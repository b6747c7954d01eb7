"""What is wrong with data, rewards and checkpoints: the dry run and the run say the same, and the
run before anything is loaded."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spmdrl.checkpoint.manifest as disk
import train as program
from spmdrl.check import dry_run, inputs
from spmdrl.check.inputs import check_inputs
from spmdrl.config import Config
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.imports import in_child
from spmdrl.rewards.columns import function_problems, row_kinds
from spmdrl.rollout import make_source
from spmdrl.same_run.data_files import data_digests
from spmdrl.same_run.differences import config_of
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from spmdrl.workers.environment_jobs import check_environment
from spmdrl.world.world import World
from tests.helpers.built import changed, made, started
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, finish, start

PLAIN = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(80)]
CHAT = {"prompt": [{"role": "user", "content": "hi"}]}
REWARDS = """
import os, sys
def fine(prompts, completions, **columns): return [1.0 for _ in prompts]
def column(prompts, completions, level): return [1.0 for _ in prompts]
def answer(solution_str, ground_truth): return 1.0
class Gone:
    def reset(self, row): os._exit(7)
    def step(self, response): pass
"""


def with_row(at: int, row: Any) -> list[Any]:
    return [row if i == at else own for i, own in enumerate(PLAIN)]


# By what is wrong: rows, other fields, and what is said.
ODD: dict[str, tuple[list[Any], dict, str]] = {
    "nothing": (PLAIN, {}, ""),
    "a chat row without a template": (with_row(56, CHAT), {}, ":57: the row needs a chat template"),
    "a line that is no JSON": (with_row(56, '{"prompt": '), {}, ":57: not a JSON value"),
    "a row without a prompt": (with_row(56, {"answer": "1"}), {}, ":57: the row has no prompt"),
    "an empty prompt": (with_row(56, {"prompt": ""}), {}, ":57: the row has no prompt"),
    "a long prompt": (with_row(56, {"prompt": "1" * 99}), {}, ":57: 99 tokens, above data.max_pro"),
    "few rows": (PLAIN[:5], {}, "prompts_per_step: 16 is above the 5 usable rows"),
    "a small context": (
        PLAIN,
        dict(sampling=dict(max_response_tokens=512)),
        "512 = 576 tokens, above the model's context of 256",
    ),
    "a reward that asks for a column": (
        PLAIN,
        dict(rewards=dict(functions=("column",))),
        "rows.jsonl:1 has prompt, answer",
    ),
    "a reward that asks for a column that a later row lacks": (
        [{**row, "level": 1} for row in PLAIN[:40]] + PLAIN[40:],
        dict(rewards=dict(functions=("column",))),
        "rows.jsonl:41 has prompt, answer",
    ),
    "a reward that asks for an answer that a later row lacks": (
        with_row(56, {"prompt": "a", "answer": None}),
        dict(rewards=dict(functions=("answer",))),
        "rows.jsonl:57: the row has no reference answer",
    ),
    "a reward that asks for a column of held-out rows": (
        [{**row, "level": 1} for row in PLAIN],
        dict(rewards=dict(functions=("column",)), data=dict(eval=PLAIN)),
        "eval.jsonl:1 has prompt, answer",
    ),
    "an environment that ends its process": (
        PLAIN,
        dict(rollout=dict(environment=dict(name="Gone"))),
        "r.py:Gone ended its process, with status 7",
    ),
    "a held-out row that is none": (
        PLAIN,
        dict(data=dict(eval=[*PLAIN, {"prompt": 3}])),
        "eval.jsonl:81: column 'prompt': expected text",
    ),
    "another config than that of a checkpoint": (PLAIN, dict(seed=3), "seed: 0 there, 3 now"),
    "supervised rows without a response": (
        with_row(56, {"prompt": "a"}),
        dict(algorithm=dict(objective="sft"), layout=dict(placement="offline")),
        ":57: the row has nothing to imitate",
    ),
    "pairs that are equal": (
        [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 20,
        dict(algorithm=dict(objective="preference", loss="dpo"), layout=dict(placement="offline")),
        ":1: `chosen` and `rejected` are equal",
    ),
}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("start")
    (folder / "r.py").write_text(REWARDS)
    cfg = made(
        output_dir=str(folder / "run"),
        model=dict(path=str(tiny_model)),
        data=dict(train=write(folder / "rows.jsonl", PLAIN), max_prompt_tokens=64),
        sampling=dict(max_response_tokens=32),
        batch=dict(prompts_per_step=16),
        rewards=dict(functions=(f"{folder / 'r.py'}:fine",)),
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        engine=dict(kind="transformers"),
    )
    step = disk.step_folder(disk.checkpoints_folder(cfg.output_dir), 5)
    step.mkdir(parents=True)
    own = config_of(cfg)
    disk.write_manifest(step, disk.Manifest(5, own, "m", "m", (), {}, data=data_digests(cfg)))
    return cfg


def case_of(base: Config, case: str, folder: Path) -> Config:
    rows, other, _ = ODD[case]
    own = {name: dict(value) if isinstance(value, dict) else value for name, value in other.items()}
    data = own.setdefault("data", {})
    data["train"] = write(folder / "rows.jsonl", rows)
    if "eval" in data:
        data["eval"] = write(folder / "eval.jsonl", data["eval"])
    if "rewards" in own:
        (name,) = own["rewards"]["functions"]
        own["rewards"] = dict(functions=(base.rewards.functions[0].replace("fine", name),))
    if "rollout" in own:
        own["rollout"] = dict(
            environment=dict(name=base.rewards.functions[0].replace("fine", "Gone"))
        )
    if case != "another config than that of a checkpoint":
        own["output_dir"] = str(folder / "run")
    return changed(base, **own)


def start_of_a_run(cfg: Config, world: World) -> str:
    try:
        check_inputs(cfg, world)
        make_source(cfg, world, tokenizer=load_tokenizer(cfg)).close()
    except Refusal as error:
        return str(error)
    return ""


def say_both(cfgs: dict[str, Config]) -> dict[str, tuple[str, str]]:
    """Return what the dry run and the run say of each config."""
    with started(cfgs["nothing"]) as world:
        return {
            case: ("\n".join(dry_run.problems(cfg)), start_of_a_run(cfg, world))
            for case, cfg in cfgs.items()
        }


@pytest.fixture(scope="module")
def said_by_both(base, tmp_path_factory) -> dict[str, tuple[str, str]]:
    cfgs = {case: case_of(base, case, tmp_path_factory.mktemp("case")) for case in ODD}
    (found,) = run_ranks(1, say_both, cfgs)
    return found


@pytest.mark.parametrize("case", ODD)
def test_the_dry_run_and_the_run_say_the_same(case, said_by_both):
    dry, ran = said_by_both[case]
    said = ODD[case][2]
    assert dry == ran
    assert (said in ran) if said else not ran


def test_a_run_says_it_before_anything_is_loaded():
    main, body = inspect.getsource(program.main), inspect.getsource(program.train)
    assert main.index("check_inputs(") < main.index("train(cfg, world)")
    order = ["try_functions(cfg", "make_source(cfg", "make_engine(cfg", "make_trainer(cfg"]
    places = [body.index(call) for call in order]
    assert places == sorted(places)


def test_the_users_code_has_its_time_however_long_a_dry_run_opens_rows(base, monkeypatch):
    now, given = [0.0], []

    def opened(*_):
        now[0] += 1e6

    def noted(*_, timeout_s, **__):
        given.append(timeout_s)
        return [], ""

    monkeypatch.setattr(inputs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(inputs, "PromptSource", opened)
    monkeypatch.setattr(inputs, "in_child", noted)
    for opens_all in (True, False):
        list(inputs.input_problems(base, opens_all=opens_all))
    assert given == [pytest.approx(0.8 * base.layout.startup_timeout_s)] * 2 and now == [1e6]


def test_a_run_whose_reward_asks_for_a_column_ends_at_once(base):
    flags = TINY["rl"] | {
        "layout.placement": "colocated",
        "engine.kind": "transformers",
        "model.path": base.model.path,
        "data.train": base.data.train,
        "batch.prompts-per-step": 16,
        "batch.group-size": 2,
        "lag": 0,
        "output-dir": base.output_dir + "2",
        "rewards.functions": base.rewards.functions[0].replace("fine", "column"),
    }
    ended = finish(start("demo_grpo.yaml", 1, **flags), timeout_s=600)
    assert ended.status == 2 and f"asks for level; {base.data.train}:1 has" in ended.output
    assert "Traceback" not in ended.output
    assert not list(Path(base.output_dir + "2").glob("metrics.jsonl"))  # the report had not begun


# --------------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    "code, said",
    [
        ("import os; os._exit(7)", "ended its process, with status 7"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence ("),
        ("print('noise'); 1 / 0", "ZeroDivisionError: division by zero"),
        ("print('noise')\ndef f(prompts, completions, level): pass", "asks for level"),
        ("print('noise')\ndef f(prompts, completions): pass", ""),
    ],
)
def test_a_reward_is_imported_in_a_process_of_its_own(code, said, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    kinds = row_kinds([("a.jsonl:1", {"prompt": "a"})])
    given = [f"{tmp_path}/mine.py:f"], kinds
    found, problem = in_child(function_problems, *given, what="importing it", timeout_s=600)
    told = [*(found or []), problem]
    assert said in told[0] if said else told == [""]
    assert "spmdrl_user_mine" not in sys.modules


@pytest.mark.parametrize(
    "code, timeout_s, said",
    [
        ("import sys; sys.exit('no licence')", 600, "SystemExit: no licence ("),
        ("import os; os._exit(7)", 600, "playing it ended its process, with status 7"),
        ("import os; os.abort()", 600, "playing it ended its process, with status -6"),
        ("import time; time.sleep(9999)", 1, "playing it took longer than 1 s"),
        ("import threading; threading.Thread(target=threading.Event().wait).start()", 600, ""),
    ],
)
def test_an_environment_is_opened_in_a_process_of_its_own(code, timeout_s, said, tmp_path):
    path = tmp_path / "game.py"
    path.write_text(
        f"class Game:\n def step(self, response): pass\n def reset(self, row):\n  {code}\n"
        "  print('noise')\n  return [{'role': 'user', 'content': row['prompt']}]\n"
    )
    given = {"name": f"{path}:Game"}, {"prompt": "a"}
    facts, problem = in_child(check_environment, *given, what="playing it", timeout_s=timeout_s)
    assert (said in problem and facts is None) if said else (not problem and facts["tools"] == [])
    assert "spmdrl_user_game" not in sys.modules


def test_a_tokenizer_of_characters_has_no_template():
    assert not character_tokenizer().chat_template  # what a case above builds on
