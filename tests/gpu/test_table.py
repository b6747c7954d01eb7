"""`make gpu`: its parts run, its table says what happened, and nothing passes unseen."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
gpu = pytest.importorskip("benchmarks.gpu.__main__")
from benchmarks.gpu import cuda_tests, engine, memory, push, rows, table, train_runs  # noqa: E402
from benchmarks.gpu.parts import PARTS, Part  # noqa: E402
from benchmarks.gpu.process import end_of  # noqa: E402
from benchmarks.gpu.process import run as run_part  # noqa: E402
from benchmarks.gpu.rows import Clock, Row, attempt, judged, read_rows  # noqa: E402

ON_ONE = [part for part in PARTS if part.gpus == 1]


def run(*words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_without_a_gpu_every_part_says_that_it_was_not_run():
    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(PARTS)
    assert all(line.startswith("  not run") and "no CUDA device" in line for line in lines)


def test_an_unknown_part_is_refused_with_those_there_are():
    done = run("--parts", "grop")
    assert done.returncode == 1
    assert "--parts grop: not a part; known: grpo, update_1b" in done.stderr


FOUND = {
    "parity": "met      update, no liger: cosine 0.99",
    "update_1b": "update at tiny, as it is: ",
    "engine_1b": "of it as vLLM ships",
    **dict.fromkeys(("push", "push_2", "push_4", "push_8"), "of plain"),
    "tests": "skipped",
    "update_4b": "update at tiny, as it is: ",
    "head": "measured head by torch",
    "memory": "measured memory of a colocated run at tiny",
}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part.name, marks=() if part.name == "parity" else pytest.mark.grid)
        for part in PARTS
    ],
)
def test_parts_run_small_on_the_cpu(part):
    done = run("--rehearse", "--parts", part, timeout_s=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert FOUND.get(part, "  met  ") in done.stdout, done.stdout


# --------------------------------------------------------------------------- limits


def test_every_part_has_a_rehearsal_and_takes_a_limit_that_it_can_meet():
    for part in PARTS:
        assert 0 < part.needs_s < part.limit_s, part.name
        assert part.rehearsal, part.name
        module = importlib.import_module(part.command[1])
        assert module.Options.__dataclass_fields__["limit_s"].type == "float", part.name


def test_what_is_worth_most_comes_first_and_fits_into_ten_minutes_at_its_slowest():
    first = [part.name for part in PARTS[:5]]
    assert first == ["grpo", "update_1b", "engine_1b", "push", "parity"]
    starting_s = 30
    assert sum(part.limit_s for part in PARTS[:5]) + starting_s <= 600
    assert PARTS[: len(ON_ONE)] == ON_ONE, "those for several GPUs come last"
    on_two = [part for part in PARTS if part.gpus == 2]
    assert sum(part.needs_s for part in on_two) <= 600


@pytest.mark.parametrize(
    "name, module, options, starter",
    [
        ("push", push, push.Options(limit_s=70), "torchrun"),
        ("grpo", train_runs, train_runs.Options("grpo", "cpu", limit_s=70), "torchrun"),
        ("tests", cuda_tests, cuda_tests.Options("cpu", limit_s=70), "output_of"),
        ("memory", memory, memory.Options("tiny", "cpu", limit_s=70), "torchrun"),
        ("engine_1b", engine, engine.Options("tiny", "cpu", limit_s=70), "output_of"),
    ],
)
def test_what_a_part_starts_ends_before_the_part(
    name, module, options, starter, monkeypatch, capsys
):
    limits = []

    def never_ends(*words: Any, timeout_s: float, **others: Any) -> str:
        limits.append(timeout_s)
        raise RuntimeError(f"no end in {timeout_s:.0f} s; last words: none\nand all it printed")

    process = SimpleNamespace(create_time=time.time, children=lambda recursive: [])
    monkeypatch.setattr(rows.psutil, "Process", lambda: process)
    monkeypatch.setattr(module, starter, never_ends)
    module.main(options)
    assert limits and all(limit <= 70 - 8 for limit in limits), limits
    told = list(read_rows(capsys.readouterr().out))
    assert len(told) == len(limits) and {row.verdict for row in told} == {"failed"}
    assert "RuntimeError: no end in " in told[0].found and "\n" not in told[0].found


def test_a_clock_counts_from_the_start_of_the_process_and_says_what_does_not_fit(capsys):
    clock = Clock(100, began=time.time() - 50)
    assert 41 < clock.left_s <= 42
    assert clock.has(30, what="a")
    assert not clock.has(60, what="b")
    (row,) = read_rows(capsys.readouterr().out)
    assert row == Row("b", "42 s left, needs 60", verdict="not run")
    assert Clock(100, began=time.time() - 1000).left_s == 1


def test_parts_that_do_not_fit_are_rows_and_the_table_is_kept_after_each(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(table, "machine", lambda caches: {"GPU": "1 x H200"})
    monkeypatch.setattr(table, "keep", lambda *a, **k: kept.append(len(a[0])) or ROOT / "x.md")
    monkeypatch.setattr(gpu, "share_caches", lambda: "nothing")
    started = []

    def stub(part: Part, options: Any, *, left_s: float) -> list[Row]:
        started.append(part.name)
        return [Row(part.name, "1", verdict="met")]

    monkeypatch.setattr(gpu, "run_part", stub)
    monkeypatch.setattr(gpu.psutil, "Process", lambda: SimpleNamespace(create_time=time.time))
    assert gpu.main(gpu.Options(parts=("grpo", "push", "split"), minutes=45 / 60)) == 0
    assert started == ["push"] and kept == [1, 2, 3]
    needs = next(part.needs_s for part in PARTS if part.name == "grpo")
    why = gpu.why_not(PARTS[0], gpu.Options(), gpus=1, left_s=45)
    assert why.startswith(f"45 s left, needs {needs:.0f}: --parts grpo")


def test_compiled_kernels_are_shared_by_all_parts_unless_the_user_chose(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "LOGS", tmp_path)
    for variable in gpu.CACHES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    assert gpu.share_caches() == "nothing"
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "compiled" / "vllm")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    assert os.environ["TRITON_CACHE_DIR"] == "/own"
    (tmp_path / "compiled" / "vllm").mkdir(parents=True)
    (tmp_path / "compiled" / "vllm" / "one").touch()
    assert gpu.share_caches() == "the kernels of an earlier table"


# --------------------------------------------------------------------------- failures


def test_what_fails_or_does_not_end_is_a_row(tmp_path):
    good = judged("a", "1", met=True, aim="1")
    script = tmp_path / "part.py"
    script.write_text(
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from benchmarks.gpu.rows import Row, attempt, judged\n"
        "judged('a', '1', met=True, aim='1').tell()\n"
        "with attempt('b'): raise ValueError('too small\\nat great length')\n"
        "if sys.argv[2] == 'hang': time.sleep(1000)\n"
        "if sys.argv[2] == 'die': raise KeyError('gone')\n"
    )
    failed = Row("b", "ValueError: too small", verdict="failed")
    ends = {
        "end": None,
        "hang": "no end in 20 s: ValueError: too small",
        "die": "exit status 1: KeyError: 'gone'",
    }
    for how, last in ends.items():
        part = Part("p", (str(script), str(ROOT), how), 1, 20)
        log = tmp_path / "logs" / f"{how}.log"
        told: list[Row] = []
        found = run_part(part, words=(), limit_s=20, log=log, tell=told.append)
        assert found == told and found[:2] == [good, failed]
        assert [row.found for row in found[2:]] == ([last] if last else [])
        assert "at great length" in end_of(log), "the traceback of what was attempted is in the log"
        assert 'ROW {"what": "a"' in log.read_text() and "ROW" not in end_of(log)
    assert found[2].beside == str(log)
    page = table.page([("p", row) for row in found], {"GPU": "1 x H", "torch": "2"}, command="c")
    assert "| p | b | ValueError: too small | - | - | failed |" in page


# --------------------------------------------------------------------------- single parts


def test_the_tests_part_names_every_file_with_tests_for_cuda():
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text()) and path != Path(__file__)
    }
    assert found == set(cuda_tests.FILES)


def test_where_pytest_is_missing_the_tests_part_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cuda_tests, "find_spec", lambda name: None)
    cuda_tests.main(cuda_tests.Options("cpu"))
    (row,) = read_rows(capsys.readouterr().out)
    assert row.verdict == "not run"
    assert row.found == "pytest, hypothesis not installed: pip install .[test]"


def test_the_pushed_model_is_shallow_and_fits_beside_its_engine_on_80_gb(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as the program has it
    from stream import Options, layers_of

    from spmdrl.world.machine.hardware import GPUS

    asked = push.Options()
    layers = layers_of(Options(megabytes=asked.megabytes, hidden=asked.hidden))
    assert 4 <= layers <= 8
    visible = GPUS["H100"].memory_gib
    weights = asked.megabytes * 1e6 / 2
    trainer = 12 * weights
    plain = 2 * 2 * weights
    others = 4.0
    needed = push.ENGINE_FRAC * visible + (trainer + plain) / 2**30 + others
    assert needed < 0.75 * visible


def test_the_row_of_the_engine_says_both_ratios(capsys):
    options = engine.Options(requests=2, length=3)
    engine.tell_shares(options, {"ours": 90.0, "limited": 100.0, "shipped": 150.0})
    engine.tell_shares(options, {"ours": 99.0, "limited": 100.0})
    engine.tell_shares(options, {"ours": 99.0, "shipped": 100.0})
    both, one = read_rows(capsys.readouterr().out)
    assert "0.900 of LLM.generate with our limits, 0.600 of it as vLLM ships" in both.found
    assert both.beside == "100 tokens/s, 150 as it ships" and both.verdict == "missed"
    assert one.found.endswith("0.990 of LLM.generate with our limits") and one.verdict == "met"


def test_the_best_utilisation_becomes_the_planners_rate():
    both = [("u", judged("x", "", met=True, aim="", kind="matmul_frac", mfu=m)) for m in (0.3, 0.4)]
    assert table.rates_of(both, {"GPU": "1 x H200"}) == {"gpu": "1 x H200", "matmul_frac": 0.4}
    assert [*read_rows('noise\nROW {"what": "a", "found": "b"}')] == [Row("a", "b")]
    with pytest.raises(KeyboardInterrupt), attempt("stops for nobody"):
        raise KeyboardInterrupt
