"""`make gpu`: its parts run, its table says what happened, and nothing passes unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
gpu = pytest.importorskip("benchmarks.gpu.__main__")
from benchmarks.gpu.rows import Row, attempt, judged, read_rows  # noqa: E402


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
    assert len(lines) == len(gpu.PARTS)
    assert all(line.startswith("  not run") and "no CUDA device" in line for line in lines)


def test_an_unknown_part_is_refused_with_those_there_are():
    done = run("--parts", "grop")
    assert done.returncode == 1
    assert "--parts grop: not a part; known: tests, grpo" in done.stderr


@pytest.mark.parametrize(
    "part, found",
    [
        ("parity", "met      update, no liger: cosine 0.99"),
        pytest.param("update_1b", "update at tiny, as it is: ", marks=pytest.mark.grid),
        pytest.param("push", "of plain", marks=pytest.mark.grid),
    ],
)
def test_parts_run_small_on_the_cpu(part, found):
    done = run("--rehearse", "--parts", part)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found in done.stdout, done.stdout


def test_what_fails_or_does_not_end_is_a_row(tmp_path):
    good = judged("a", "1", met=True, aim="1")
    told = tmp_path / "part.py"
    told.write_text(
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from benchmarks.gpu.rows import Row, attempt, judged\n"
        "judged('a', '1', met=True, aim='1').tell()\n"
        "with attempt('b'): raise ValueError('too small')\n"
        "if sys.argv[2] == 'hang': time.sleep(1000)\n"
        "if sys.argv[2] == 'die': raise KeyError('gone')\n"
    )
    failed = Row("b", "ValueError: too small", verdict="failed")
    for how, last in (("end", None), ("hang", "no end in 20 s"), ("die", "KeyError: 'gone'")):
        part = gpu.Part("p", (str(told), str(ROOT), how), 20)
        rows = gpu.run(part, words=(), limit_s=20)
        assert rows[:2] == [good, failed]
        assert [row.found for row in rows[2:]] == ([last] if last else [])
    page = gpu.page([("p", row) for row in rows], {"GPU": "1 x H", "torch": "2"}, command="c")
    assert "| p | b | ValueError: too small | - | - | failed |" in page


def test_the_best_utilisation_becomes_the_planners_rate():
    rows = [("u", judged("x", "", met=True, aim="", kind="matmul_frac", mfu=m)) for m in (0.3, 0.4)]
    assert gpu.rates_of(rows, {"GPU": "1 x H200"}) == {"gpu": "1 x H200", "matmul_frac": 0.4}
    assert [*read_rows('noise\nROW {"what": "a", "found": "b"}')] == [Row("a", "b")]
    with pytest.raises(KeyboardInterrupt), attempt("stops for nobody"):
        raise KeyboardInterrupt
