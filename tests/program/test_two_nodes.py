"""Runs over two nodes, which are namespaces of this machine: see nodes.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import (
    ROOT,
    TINY,
    Run,
    arguments,
    finish,
    kill_all,
    metrics,
    run,
    wait_for_step,
)

NODES = Path(__file__).with_name("nodes.sh")
# As docs/gpu.md has it; the second node knows the first by its name.
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node-0:29500"]
COMPARED = ("policy/loss", "policy/grad_norm", "policy/mismatch_k3", "reward/mean")


def _why_not() -> str:
    """Return why this machine cannot have two nodes; empty when it can."""
    missing = [
        name for name in ("ip", "unshare", "nsenter") if not shutil.which(name, path=_path())
    ]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install iproute2 util-linux"
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    tried = subprocess.run(
        ["unshare", *user, "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        + ["--mount-proc"]
        + ["ip", "link", "add", "net0", "type", "veth", "peer", "name", "net1"],
        env=os.environ | {"PATH": _path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"this machine allows no namespaces with networks: {said}" if tried.returncode else ""


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if why := _why_not():
        pytest.skip(why)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where nodes write; no process of theirs may be left, and with the last one all else goes."""
    yield tmp_path
    deadline = time.monotonic() + 20
    while left := [p for p in psutil.process_iter(["cmdline"]) if _names(p, tmp_path)]:
        assert time.monotonic() < deadline, f"still there: {[p.info for p in left]}"
        time.sleep(0.2)


def _names(process: psutil.Process, path: Path) -> bool:
    return any(str(path) in part for part in process.info["cmdline"] or ())


def on_both(folder: Path, *command: str, **env: str) -> Run:
    """Start a command on both nodes; the run's status is the worse of theirs."""
    folder.mkdir(exist_ok=True)
    with open(folder / "nodes.out", "w") as out:
        process = subprocess.Popen(
            ["bash", str(NODES), "run", str(folder), *command],
            env=_environment() | env,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run([process.pid], process.poll, folder / "nodes.out")


def _environment() -> dict[str, str]:
    """Return this process's environment without what a launcher or a person chose for ranks."""
    chosen = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in chosen and not k.startswith("SLURM_") and not k.endswith("_SOCKET_IFNAME")
    }
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def train(config: str, folder: Path, **flags: object) -> Run:
    """Start train.py on two nodes with a rank on each, by torchrun."""
    flags |= {"output-dir": folder / "out"}
    return on_both(folder, sys.executable, *TORCHRUN, *arguments(config, 2, **flags))


def said(folder: Path) -> str:
    return "\n".join(
        f"--- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-4000:]}"
        for path in [*folder.glob("node*.out"), *folder.glob("slurm*.out"), *folder.glob("*.log")]
    )


def assert_trained_alike(two: Path, one: Path, steps: int) -> None:
    rows, of_one = metrics(two), metrics(one)
    assert [row["step"] for row in rows] == list(range(steps))
    assert all(row["sync/bytes"] > 0 for row in rows)
    assert [[row[k] for k in COMPARED] for row in rows] == [
        [row[k] for k in COMPARED] for row in of_one
    ]


def test_a_node_trains_and_another_generates_as_on_one_node(folder, tiny_model):
    flags = TINY["rl"] | {"model.path": tiny_model, "steps": 3, "engine.kind": "vllm"}
    two = folder / "two"
    finished = finish(train("demo_grpo.yaml", two, **flags), timeout_s=400)
    assert finished.status == 0, finished.output + said(two)
    run("demo_grpo.yaml", 2, **flags, **{"output-dir": folder / "one"})
    assert_trained_alike(two / "out", folder / "one", 3)


@pytest.mark.grid
def test_a_node_without_power_ends_the_other_whichever_keeps_the_store(folder, tiny_model):
    flags = TINY["sft"] | {"model.path": tiny_model, "steps": 20000, "layout.wait-timeout-s": 15}
    folders = [folder / f"without_{lost}" for lost in (0, 1)]
    both = [train("demo_sft.yaml", own, **flags) for own in folders]
    try:
        for lost, (own, under_way) in enumerate(zip(folders, both, strict=True)):
            wait_for_step(under_way, own / "out", 0, timeout_s=300)
            (own / f"cut_{lost}").touch()
        for lost, own in enumerate(folders):
            left = own / f"node_{1 - lost}.out"
            _wait_for_text(left, "This rank ends with exit code 13", timeout_s=60)
        of_rank_1 = (folders[0] / "node_1.out").read_text()
        named = r"\[rank 1\] in '[a-z ]+' at step \d+: the job's store has not answered for \d+ s"
        assert re.search(named, of_rank_1), of_rank_1
        of_rank_0 = (folders[1] / "node_0.out").read_text()
        assert "[rank 0] deadline of 15 s passed\nrank 0 waited" in of_rank_0, of_rank_0
        assert "rank 1 is missing: no sign of life" in of_rank_0, of_rank_0
        # The other torchrun asks the lost node for minutes.
        assert finish(both[1], timeout_s=100).status != 0
    finally:
        for under_way in both:
            kill_all(under_way)


def _wait_for_text(file: Path, text: str, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in file.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{said(file.parent)}"
        time.sleep(0.2)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for Slurm's sockets, which a folder of pytest's is too long for."""
    with tempfile.TemporaryDirectory(prefix="slurm_") as name:
        yield Path(name)


@pytest.mark.grid
@pytest.mark.slurm
def test_slurm_trains_on_a_node_and_generates_on_another(folder, short_folder, tiny_model):
    checkout, state = folder / "checkout", short_folder
    for name in ("slurm", "configs"):
        shutil.copytree(ROOT / name, checkout / name)
    shutil.copy(ROOT / "train.py", checkout)
    flags = TINY["rl"] | {"model.path": tiny_model, "steps": 3, "engine.kind": "transformers"}
    job = [
        *["timeout", "300"],  # so that what Slurm's logs say of a job that never ends is shown
        "sbatch",
        "--wait",
        f"--chdir={checkout}",
        *["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"],
        str(checkout / "slurm" / "multi_node_split.sbatch"),
        *arguments("demo_grpo.yaml", 2, **flags, **{"output-dir": folder / "two"})[1:],
    ]
    command = ["bash", str(NODES.with_name("slurm_node.sh")), "both", str(state), *job]
    finished = finish(on_both(state, *command, PYTHON=sys.executable), timeout_s=400)
    assert finished.status == 0, said(state) + said(checkout)
    (log,) = checkout.glob("slurm-*.out")
    assert "on node-[0-1];" in log.read_text()
    run("demo_grpo.yaml", 2, **flags, **{"output-dir": folder / "one"})
    assert_trained_alike(folder / "two", folder / "one", 3)
