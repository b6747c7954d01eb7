"""Plans by measured rates: where each is from, what wins over what, which files are refused."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import statistics

import pytest

from spmdrl.tools.commands.plan import main
from spmdrl.tools.plan.run import FORMULA_RATES

table = pytest.importorskip("benchmarks.gpu.table")
from benchmarks.gpu import engine  # noqa: E402
from benchmarks.gpu.push import link_row  # noqa: E402
from benchmarks.gpu.rows import Row  # noqa: E402
from spmdrl.config import ModelSettings  # noqa: E402
from spmdrl.model.load import build_meta_model  # noqa: E402
from spmdrl.model.model_shape import SHAPES, model_shape  # noqa: E402
from spmdrl.world.machine.hardware import GPUS  # noqa: E402
from tests.helpers.policy_runs import small_model  # noqa: E402
from tests.helpers.runs import TINY, run  # noqa: E402

PLAN = "--shape qwen3-1.7b --layout.world-size 2 --top 0 --model.memory.reshard always"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes a file as the benchmark does, of the given numbers of rows."""

    def write(*numbers, device="NVIDIA H200"):
        about = {"GPU": f"1 x {device}", "torch": "2"}
        monkeypatch.setattr(table, "RESULTS", tmp_path)
        rows = [("part", Row("what", "found", numbers=own)) for own in numbers]
        return table.keep(rows, about, command="make gpu").with_suffix(".json")

    return write


def _plan(command: str) -> int:
    return main(shlex.split(f"{PLAN} {command}"))


def test_measured_rates_replace_the_formulas_and_flags_replace_them(written, capsys):
    assert _plan("") == 0
    assert (
        "\nrates: matmul_frac 0.31 to 0.45, memory_frac 0.7, link_frac 0.7, "
        "engine_step_s 0.003 to 0.012, collective_s 2e-05 (formula)\n"
    ) in capsys.readouterr().out
    numbers = (
        {"kind": "matmul_frac", "mfu": 0.41},
        {"kind": "engine_step_s", "engine_step_s": 0.002},
    )
    path = written(*numbers)
    assert _plan(f"--measured {path}") == 0
    out = capsys.readouterr().out
    assert "\nH200: 139 GiB" in out, "the file's GPU"
    assert (
        f"\nrates: matmul_frac 0.41, engine_step_s 0.002 (measured: {path}); "
        "memory_frac 0.7, link_frac 0.7, collective_s 2e-05 (formula)\n"
    ) in out
    assert _plan(f"--measured {path} --gpu H200 --matmul-frac 0.6 --brief") == 0
    assert f"rates: --matmul-frac, formula, measured: {path})" in capsys.readouterr().out


def test_seconds_and_the_output_for_programs_follow_the_measured_rates(written, capsys):
    found = {}
    path = written({"kind": "matmul_frac", "mfu": 0.25})
    capsys.readouterr()
    for flags in ("--gpu H200", f"--measured {path}", f"--measured {path} --matmul-frac 0.45"):
        assert _plan(f"--json {flags}") == 0
        found[flags] = json.loads(capsys.readouterr().out)
    formula = found["--gpu H200"]
    rates = [each["rates"]["matmul_frac"] for each in found.values()]
    assert rates == [
        {"best": 0.45, "worst": 0.31, "source": "formula"},
        {"best": 0.25, "worst": 0.25, "source": f"measured: {path}"},
        {"best": 0.45, "worst": 0.45, "source": "--matmul-frac"},
    ]
    assert set(formula["rates"]) == set(FORMULA_RATES)
    update = [each["plan"]["seconds"]["update"] for each in found.values()]
    assert update[1] > 1.5 * update[0] and update[2] == update[0]


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "cannot be read as JSON"),
        ("{", "is no JSON"),
        ("[]", "not what `python -m benchmarks.gpu` writes"),
        ('{"rates": {"matmul_frac": 0.4}}', "not what `python -m benchmarks.gpu` writes"),
        ('{"rates": {"gpu": "1 x NVIDIA H100 80GB HBM3"}}', "it holds no rate"),
        ('{"rates": {"gpu": "1 x H100", "matmul": 0.4}}', "rates.matmul: unknown; known: gpu, mat"),
        ('{"rates": {"gpu": "1 x H100", "link_frac": 1.2}}', "link_frac: 1.2: expected a fraction"),
        ('{"rates": {"gpu": "1 x H100", "engine_step_s": -1}}', "engine_step_s: -1: expected sec"),
        ('{"rates": {"gpu": "1 x H100", "matmul_frac": "0.4"}}', "matmul_frac: '0.4': expected a"),
        ('{"rates": {"gpu": "1 x H100", "matmul_frac": NaN}}', "matmul_frac: nan: expected a"),
        ('{"rates": {"gpu": "1 x L40S", "matmul_frac": 0.4}}', "on '1 x L40S', which is not in"),
        ('{"rates": {"gpu": "2 x H100 PCIe", "matmul_frac": 0.4}}', "'2 x H100 PCIe', which is"),
    ],
)
def test_files_that_say_nothing_sure_are_refused(text, says, tmp_path, capsys):
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    assert _plan(f"--measured {path}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"--measured {path}: ") and says in error


def test_another_gpu_than_the_measured_one_is_refused(written, capsys):
    path = written({"kind": "matmul_frac", "mfu": 0.4})
    assert _plan(f"--measured {path} --gpu H100") == 2
    assert f"--gpu H100: {path} was measured on H200" in capsys.readouterr().err


# --------------------------------------------------------------------------- what is measured


def test_rates_are_the_best_of_the_rows_of_each_kind():
    rows = [
        ("update_1b", Row("a", "", numbers={"kind": "matmul_frac", "mfu": 0.3})),
        ("update_4b", Row("a", "", numbers={"kind": "matmul_frac", "mfu": 0.4})),
        ("push_2", link_row(270.0, senders=1, gpu=GPUS["H100"])),
        ("push_8", link_row(720.0, senders=4, gpu=GPUS["H100"])),
        ("engine_1b", Row("b", "", numbers={"kind": "engine_step_s", "engine_step_s": 0.004})),
        ("engine_1b", Row("c", "", numbers={"seconds": 3})),
    ]
    assert table.rates_of(rows, {"GPU": "8 x NVIDIA H100 80GB HBM3"}) == {
        "gpu": "8 x NVIDIA H100 80GB HBM3",
        "matmul_frac": 0.4,
        "link_frac": pytest.approx(0.6),
        "engine_step_s": 0.004,
    }


def test_an_engine_step_is_what_makes_the_planner_say_the_measured_speed(capsys):
    options = engine.Options(requests=512, length=256)
    shape = model_shape(build_meta_model(ModelSettings(path=str(SHAPES / "qwen3-1.7b"))))
    found = engine.engine_step_s(options, shape, tokens_per_s=30000, gpu=GPUS["H100"])
    # 512 steps of 256 sequences take 4.37 s, 8.5 ms each: 1.5 ms for 3.4 GB of weights, 4.8 ms for
    # the cache of 256 * 384 tokens, 2.0 ms for the share of the prompts; the rest is the host's.
    assert 0.0002 < found < 0.0004
    slower = engine.engine_step_s(options, shape, tokens_per_s=15000, gpu=GPUS["H100"])
    assert slower - found == pytest.approx(512 * 256 / 30000 / 512, rel=1e-6)
    assert engine.engine_step_s(options, shape, tokens_per_s=1e6, gpu=GPUS["H100"]) < 0
    command = (
        "--shape qwen3-1.7b --layout.placement colocated --layout.world-size 1 --json --top 0 "
        "--batch.prompts-per-step 512 --batch.group-size 1 --algorithm.advantage reinforce "
        "--data.max-prompt-tokens 256 --prompt-tokens 256 --response-tokens 256 "
        "--sampling.max-response-tokens 256"
    )
    assert main(shlex.split(command)) in (0, 1), capsys.readouterr().err
    planned = json.loads(capsys.readouterr().out)["plan"]["seconds"]["generate"]
    at_3_ms = 512 * 256 / 30000 + 512 * (0.003 - found)
    assert planned == pytest.approx(at_3_ms, rel=1e-3)


# --------------------------------------------------------------------------- by a run


def test_a_plan_by_a_run_predicts_that_runs_own_step(tmp_path):
    model = small_model(tmp_path)
    flags = TINY["rl"] | {
        "model.path": model,
        "engine.kind": "transformers",
        "output-dir": tmp_path / "run",
        "steps": 8,
    }
    run("demo_grpo.yaml", 2, **flags)
    folder = tmp_path / "run"
    command = f"--config {folder}/config.yaml --measured {folder} --json --top 0"
    found = _printed(command)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/step_s" in row][1:]
    steps = [row["perf/step_s"] - row.get("time/copy_checkpoint", 0.0) for row in rows]
    planned = found["plan"]["seconds"]
    assert planned == found["plan"]["slow_seconds"]
    assert planned["step"] == pytest.approx(statistics.median(steps), rel=0.2)
    for name in ("generate", "update", "push"):
        own = statistics.median(row[f"time/{name}"] for row in rows)
        assert planned[name] == pytest.approx(own, rel=0.2)
    # The engine decodes 32 sequences at a time: twice as many prompts take twice as long.
    twice = _printed(f"{command} --batch.prompts-per-step 16")["plan"]["seconds"]
    assert 1.5 < twice["generate"] / planned["generate"] < 2.1
    assert planned["update"] < twice["update"] < 2.1 * planned["update"]
    assert main(shlex.split(f"--shape qwen3-8b --measured {folder} --layout.device cuda")) == 2


def _printed(command: str) -> dict:
    """Return what the planner prints for programs."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(shlex.split(command)) == 0
    return json.loads(printed.getvalue())


def _write_run(folder, *, rows, gpus):
    """Write the files of a run of the default config that a plan reads."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"model: {{path: {SHAPES / 'qwen3-1.7b'}}}\n")
    (folder / "environment.json").write_text(json.dumps({"gpus": gpus}))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i} | row) + "\n" for i, row in enumerate(rows))
    )
    return folder


_ROW = {
    "perf/step_s": 50.0, "time/generate": 30.0, "time/update": 15.0, "time/push": 0.5,
    "rollout/prompt_length": 100.0, "rollout/response_length": 200.0,
}  # fmt: skip


def test_a_run_on_a_gpu_scales_the_phases_of_another_layout(tmp_path, capsys):
    rows = [{"perf/step_s": 900.0}, *[_ROW] * 3]
    folder = _write_run(tmp_path / "run", rows=rows, gpus=["NVIDIA H200"])
    assert _plan(f"--measured {folder} --model.memory.activation-checkpointing full") == 0
    printed = capsys.readouterr().out
    assert "\nH200: 139 GiB" in printed and "of 100 + 200 tokens" in printed
    assert f"(measured: {folder})" in printed and "rates: times the formula's seconds" in printed


@pytest.mark.parametrize(
    "rows, gpus, flags, says",
    [
        ([_ROW], ["NVIDIA H200"], "", "metrics.jsonl has no step after the first"),
        ([_ROW] * 3, ["NVIDIA L40S"], "", "'NVIDIA L40S', which is not in"),
        ([_ROW] * 3, [], "", "the run was on the CPU, and this plan is for H100"),
        ([_ROW] * 3, ["NVIDIA H200"], "--gpu H100", "the run was on H200, and this plan is for H1"),
    ],
)
def test_runs_that_say_nothing_of_a_plan_are_refused(rows, gpus, flags, says, tmp_path, capsys):
    folder = _write_run(tmp_path / "run", rows=rows, gpus=gpus)
    assert _plan(f"--measured {folder} {flags}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"--measured {folder}: ") and says in error
    assert _plan(f"--measured {tmp_path}") == 2
    assert "no config.yaml in it" in capsys.readouterr().err
