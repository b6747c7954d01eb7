"""The world: launchers, roles and meshes, refused layouts, named waits."""

from __future__ import annotations

import gc
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmdrl.check.rules import rule_problems
from spmdrl.config import Config, LayoutSettings
from spmdrl.errors import Refusal
from spmdrl.tools.proof.ranks import RankError, launch_env, on_ranks, start_rank
from spmdrl.world import launch as launch_module
from spmdrl.world.comm import agree, gather_objects, gather_problems
from spmdrl.world.launch import Launch, find_launch, first_host, read_launch
from spmdrl.world.world import World, pick_backend, pick_device
from tests.helpers.built import made, started
from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.worlds import in_world


def test_torchrun_and_slurm_variables_are_read():
    torchrun = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="a", MASTER_PORT="1")
    assert read_launch(torchrun).rank == 3
    slurm = dict(
        SLURM_PROCID="5",
        SLURM_NTASKS="8",
        SLURM_LOCALID="1",
        SLURM_JOB_ID="77",
        SLURM_STEP_NODELIST="gpu[003-004]",
    )
    launch = read_launch(slurm)
    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)
    assert (launch.address, launch.launcher) == ("gpu003", "srun")
    assert 20000 <= launch.port < 60000
    assert read_launch(torchrun).nodes == launch.nodes == 1
    assert read_launch(torchrun | {"GROUP_WORLD_SIZE": "2"}).nodes == 2
    assert read_launch(slurm | {"SLURM_NNODES": "4"}).nodes == 4
    assert read_launch(slurm | {"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}).nodes == 2
    with pytest.raises(ValueError, match="no launcher"):
        read_launch({})


def test_one_rank_needs_no_launcher_and_several_are_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(launch_module.os, "environ", {})
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "a b.yaml"])
    several = Config(layout=LayoutSettings(world_size=4, trainer_ranks=2))
    says = r"world_size is 4, and no launcher .*\n  torchrun --standalone --nproc-per-node 4 train"
    with pytest.raises(Refusal, match=says + r".py --config 'a b.yaml'\n"):
        find_launch(several)
    alone = LayoutSettings(world_size=1, trainer_ranks=1, placement="colocated")
    launch = find_launch(Config(layout=alone))
    assert (launch.rank, launch.world_size, launch.address) == (0, 1, "127.0.0.1")
    assert find_launch(Config(layout=alone)).port == launch.port
    launch_module.os.environ.clear()
    launch_module.os.environ.update(SLURM_PROCID="1", SLURM_NTASKS="2")
    with pytest.raises(Refusal, match="world_size is 1, but srun started 2"):  # not alone
        find_launch(Config(layout=alone))


@pytest.mark.parametrize(
    "nodes, chosen, passed_on", [(1, "", None), (2, "", "found"), (2, "mine", "mine")]
)
def test_gloo_is_told_the_interface_where_there_are_several_nodes(
    nodes, chosen, passed_on, monkeypatch
):
    monkeypatch.setattr(launch_module, "interface_towards", {"a": "found"}.__getitem__)
    environ = {"GLOO_SOCKET_IFNAME": chosen} if chosen else {}
    monkeypatch.setattr(launch_module.os, "environ", environ)
    Launch(0, 2, 0, "a", 1, "torchrun", nodes=nodes).pass_on()
    assert environ.get("GLOO_SOCKET_IFNAME") == passed_on


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-007,9],x", "gpu003"), ("a-[1,3]-ib", "a-1-ib")],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def roles(world: World) -> dict:
    place = world.mesh.get_coordinate()
    mesh = None if place is None else tuple(place)
    found = dict(
        trainer=world.is_trainer,
        inference=world.is_inference,
        mesh=mesh,
        replica=world.replica,
        place=world.replica_rank,
        stop=world.agree_to_stop(0),
    )
    world.stop_requested = world.rank == 1
    return found | {"stop_after_request": world.agree_to_stop(1)}


@pytest.mark.parametrize(
    "layout, trainers, engines",
    [
        (dict(world_size=2, trainer_ranks=1), [0], [1]),
        (dict(world_size=4, trainer_ranks=2, inference_tp=2, tp=2), [0, 1], [2, 3]),
        (dict(world_size=4, trainer_ranks=3), [0, 1, 2], [3]),
        (dict(world_size=4, placement="colocated", tp=2, inference_tp=2), range(4), range(4)),
        (dict(world_size=4, placement="colocated", inference_dp=2), range(4), range(4)),
    ],
)
def test_roles_and_meshes(layout, trainers, engines):
    found = in_world(Config(layout=LayoutSettings(device="cpu", **layout)), roles)
    assert [r for r, f in enumerate(found) if f["trainer"]] == list(trainers)
    assert [r for r, f in enumerate(found) if f["inference"]] == list(engines)
    coordinates = [f["mesh"] for f in found if f["trainer"]]
    assert len(set(coordinates)) == len(coordinates)
    size = layout.get("inference_tp", 1) * layout.get("inference_dp", 1)
    assert [(f["replica"], f["place"]) for f in found if f["inference"]] == [
        (i // size, i % size) for i in range(len(list(engines)))
    ]
    assert not any(f["stop"] for f in found)
    assert all(f["stop_after_request"] for f in found)


def agreed_and_summed(world: World) -> dict:
    said = {}
    for name, fails in {"nobody": (), "one": (2,), "all": (0, 1, 2, 3), "two": (0, 3)}.items():
        text = f"of rank {world.rank}" if name == "two" else "the same"
        said[name] = ""
        try:
            with agree(group=world.control):
                if world.rank in fails:
                    raise Refusal(text)
        except ValueError as error:
            said[name] = str(error)
    lines = ["a", "b"] if world.rank else ["a"]
    problems = [gather_problems(own, group=world.control) for own in ((), ["a"], lines)]
    own = torch.tensor([1.0, 10.0]) * (world.dp_index(world.rank) + 1)
    return dict(
        said=said,
        problems=problems,
        sum=world.sum_over_trainers(own).tolist(),
        parts=world.gather_per_dp(world.rank),
        first=world.from_rank_0(lambda: world.rank + 7, wait="ask rank 0"),
    )


def test_ranks_fail_together_and_a_dp_index_counts_once():
    cfg = Config(layout=LayoutSettings(device="cpu", world_size=4, placement="colocated", tp=2))
    for found in in_world(cfg, agreed_and_summed):
        assert found["said"] == {
            "nobody": "",
            "one": "rank 2: the same",
            "all": "the same",
            "two": "of rank 0",
        }
        assert found["problems"] == [[], ["a"], ["rank 0: a", "rank 1: b"]]
        assert found["sum"] == [3.0, 30.0]  # dp index 0 has 1 and 10, dp index 1 twice that
        assert found["parts"] == [0, 2]
        assert found["first"] == 7


def wrong_size(cfg: Config) -> str:
    import torch.distributed as dist

    with pytest.raises(ValueError) as error:
        World.start(cfg)
    assert not dist.is_initialized()
    return str(error.value)


def test_a_launch_of_the_wrong_size_is_refused_before_any_group_exists():
    (message,) = run_ranks(1, wrong_size, Config(layout=LayoutSettings(world_size=2, device="cpu")))
    assert "layout.world_size is 2, but torchrun started 1 ranks" in message


def differing(cfg: Config) -> str:
    import dataclasses

    with pytest.raises(RuntimeError) as error:
        World.start(dataclasses.replace(cfg, seed=int(os.environ["RANK"])))
    return str(error.value)


@pytest.mark.parametrize("backend, places", [("gloo", [0, 1, 0]), ("auto", [0, 1, None])])
def test_ranks_share_a_gpu_by_gloo_alone(backend, places, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    cfg = Config(layout=LayoutSettings(world_size=3, device="cuda", backend=backend))
    assert pick_backend(cfg) == ("gloo" if backend == "gloo" else "nccl")
    for local_rank, index in enumerate(places):
        if index is None:
            with pytest.raises(ValueError, match="GPU 2, but 2 are .* --layout.backend gloo"):
                pick_device(cfg, local_rank)
        else:
            assert pick_device(cfg, local_rank) == torch.device("cuda", index)


def test_messages_of_gloo_start_and_end_on_the_host():
    world = object.__new__(World)
    world.device, world.backend = torch.device("cuda", 0), "gloo"
    assert world.wire == torch.device("cpu")
    world.backend = "nccl"
    assert world.wire == torch.device("cuda", 0)


@pytest.mark.parametrize("axis", ["cp", "ep", "tp", "inference_tp", "inference_dp"])
def test_what_goes_from_gpu_to_gpu_is_refused_on_gloo(axis):
    sizes = {axis: 2, "world_size": 4, "trainer_ranks": 2, "backend": "gloo"}
    asked = f"layout.backend: gloo with layout.{axis} 2"
    on_gpus = rule_problems(Config(layout=LayoutSettings(device="cuda", **sizes)))
    assert any(asked in problem for problem in on_gpus)
    on_cpus = rule_problems(Config(layout=LayoutSettings(device="cpu", **sizes)))
    assert not any("layout.backend" in problem for problem in on_cpus)


def test_nccl_without_gpus_is_refused():
    layout = LayoutSettings(device="cpu", backend="nccl")
    assert any("NCCL needs GPUs" in problem for problem in rule_problems(Config(layout=layout)))


def test_ranks_with_different_configs_are_refused():
    messages = run_ranks(2, differing, Config(layout=LayoutSettings(device="cpu")))
    assert all("rank 1 has seed = 1, rank 0 has 0" in m for m in messages)


def _last_collective(path: Path) -> str:
    """Return what is said of the last one that torch's flight recorder saw."""
    return path.read_text().splitlines()[-1]


WAITER = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch.distributed as dist
from spmdrl.config import Config, LayoutSettings
from spmdrl.errors import Refusal
from spmdrl.world.world import World
from spmdrl.world.comm import agree, gather_objects, gather_problems
layout = LayoutSettings(world_size=3, trainer_ranks=2, device="cpu", wait_timeout_s=4)
world = World.start(Config(output_dir=sys.argv[2], layout=layout))
world.started()
fault = sys.argv[1]
if world.rank == 2:
    with world.watch.phase("generate", 7):
        dist.barrier(group=world.control)  # the others know where this rank is
        if fault == "stall":
            time.sleep(1000)
        os._exit(9)
dist.barrier(group=world.control)
try:
    with world.watch.wait("exchange", 7):
        dist.barrier(group=world.control)
except RuntimeError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
"""


def _be_script(argv: list[str], said: Path) -> None:
    """Become `python SCRIPT`, writing to a file."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


@pytest.mark.parametrize(
    "fault, says", [("stall", "rank 2 is missing: "), ("kill", "rank 2 is missing: its process")]
)
def test_a_stalled_or_dead_rank_is_named_in_time(fault, says, tmp_path):
    root = str(Path(__file__).parents[2])
    script = tmp_path / "waiter.py"
    script.write_text(WAITER.format(root=root))
    port = free_port()
    said = [tmp_path / f"said_{rank}" for rank in range(3)]
    processes = []
    for rank in range(3):
        own = [str(script), fault, str(tmp_path)]
        environment = os.environ | launch_env(rank, 3, port)
        processes.append(start_rank(environment, _be_script, own, said[rank]))
    try:
        for rank, process in enumerate(processes[:2]):
            process.join(200)  # in time: rank 2 sleeps for 1000 s
            err = said[rank].read_text()
            assert process.exitcode in (1, 13), err
            own = f"rank {rank} waited" if fault == "stall" else f"[rank {rank}] ends in"
            assert own in err and "'exchange' at step 7" in err, err
            assert says in err and "'generate' at step 7" in err, err
            assert f" on {socket.gethostname()}" in err, err
            if fault == "stall":  # the deadline ended it
                assert pickle.loads((tmp_path / "flight" / f"rank_{rank}").read_bytes())["entries"]
                last = _last_collective(tmp_path / "flight" / f"collectives_{rank}.txt")
                assert "gloo:barrier" in last and "waiter.py:" in last, last
        # Of a dead peer the failed collective may speak first, which this program ends with 1.
        codes = {process.exitcode for process in processes[:2]}
        assert codes == {13} or (fault == "kill" and codes <= {1, 13})
    finally:
        for process in processes:
            process.kill()
            process.join()


RESTARTED = """
import os, sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from spmdrl.config import Config, LayoutSettings
from spmdrl.errors import Refusal
from spmdrl.world.world import World
world = World.start(Config(layout=LayoutSettings(world_size=2, trainer_ranks=1, device="cpu")))
total = torch.ones(1)
dist.all_reduce(total)
if world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
world.close()
# One write: the ranks share a pipe, and two prints of several pieces may mix.
os.write(1, f"rank {{world.rank}} sums to {{int(total)}}\\n".encode())
"""


@pytest.mark.kill  # a whole run does so in tests/world/test_launcher.py
def test_ranks_that_torchrun_starts_anew_meet_again(tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED.format(root=str(Path(__file__).parents[2])))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        + ["--max-restarts", "1", "--master-port", str(free_port()), str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    said = sorted(line for line in run.stdout.splitlines() if line.startswith("rank"))
    assert said == ["rank 0 sums to 2", "rank 1 sums to 2"]


def at_different_lines(world: World) -> str:
    """Skip a line on one rank, as an edit of train.py may."""
    try:
        if world.rank == 1:
            with world.watch.wait("gather evaluation", 3):
                gather_objects(("a", "b"), group=world.control)
        world.agree_to_stop(3)
    except Refusal as error:
        return str(error)
    return ""


def test_ranks_at_different_lines_are_named_on_all_of_them():
    cfg = Config(layout=LayoutSettings(device="cpu", world_size=3, trainer_ranks=2))
    said, *others = in_world(cfg, at_different_lines)
    assert others == [said, said]
    ends, other = re.findall(r"\(([^()]*test_world\.py:\d+), in at_different_lines\)", said)
    assert ends != other
    assert re.search(r"each of the ranks 0, 2 \(\S+\) at `agree to stop` of step 3", said)
    assert re.search(r"rank 1 \(\S+\) at `gather evaluation` of step 3", said)
    assert "# all" in said and "condition" in said


def crashes(cfg: Config) -> None:
    World.start(cfg)
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_of_native_code_says_where_python_stood(tmp_path):
    cfg = Config(layout=LayoutSettings(placement="offline", world_size=1, device="cpu"))
    with pytest.raises(RankError, match="exit status of rank 0: -11"):
        on_ranks(1, crashes, cfg, timeout_s=200, log=tmp_path / "log", port=free_port())
    said = (tmp_path / "log").read_text()
    assert "Segmentation fault" in said and f'"{__file__}", line' in said and "in crashes" in said


def _frozen() -> list[int]:
    from tests.helpers import preloaded

    gc.freeze = preloaded.real_freeze
    gc.unfreeze = preloaded.real_unfreeze
    # The fork server has frozen what it imported.
    gc.unfreeze()
    before = gc.get_freeze_count()
    with started(made(layout=dict(world_size=1, trainer_ranks=1, device="cpu"))) as world:
        world.started()
        during = gc.get_freeze_count()
    return [before, during, gc.get_freeze_count()]


def test_the_garbage_collector_leaves_out_what_exists_before_the_loop():
    ((before, during, after),) = run_ranks(1, _frozen)
    assert during > before + 10_000 and after == 0
