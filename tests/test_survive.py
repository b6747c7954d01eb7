"""Runs that go on without an engine whose process is gone: nothing is lost, nothing drawn twice.

By default an engine dies in generation, another as groups are made without it; `pytest -m kill
tests/test_survive.py` has more, and ten moments by chance (KILL_SEED=1 draws others).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from built import changed, good, made
from dying_rank import Moment
from kill_table import SEED, SURVIVING, Case, Stage, draw_cases, draw_moment
from test_kill import Ranks, Runs, diary_of, places_of, rows_of, runs  # noqa: F401
from test_train import final_weights

from spmdrl.check.settings import validate
from spmdrl.config import Config, LayoutSettings
from spmdrl.errors import Refusal, RewardFailed
from spmdrl.rollout.survivor import _offers
from spmdrl.world.check_launch import check_launch
from spmdrl.world.launch import SPARES, read_launch
from spmdrl.world.leaving import ended
from spmdrl.world.lost_engines.absent import Absent
from spmdrl.world.lost_peers.watch import PeersMissing, is_peer_error

GOES_ON_S = 5.0
"""Seconds from a death until the first rank goes on, on a machine that is not busy."""
BUSY = 6.0
STAGES: tuple[Stage, ...] = ("generation", "exchange", "push", "save", "evaluation", "teardown")


def run_without(kind: str, folder: Path, shared: Path, *moments: Moment) -> Ranks:
    """Run until all ranks have ended: well, but for those of the engines that die."""
    ranks, flags = Ranks(kind, folder, shared, *moments), SURVIVING[kind].flags
    size, trainers = flags.get("layout.inference-tp", 1), flags["layout.trainer-ranks"]
    engines = {(moment.rank - trainers) // size for moment in moments}
    every = range(SURVIVING[kind].ranks)
    left = [rank for rank in every if rank < trainers or (rank - trainers) // size not in engines]
    deadline = time.monotonic() + 500
    try:
        while not ranks.are_over(left):
            assert time.monotonic() < deadline, ranks.everything()
            assert not any(ranks.exits[rank] for rank in left), ranks.everything()
            time.sleep(0.05)
        assert [ranks.exits[rank] for rank in left] == [0] * len(left), ranks.everything()
        deeds = len([*ranks.diary.glob("deed*.json")])
        assert deeds == len(moments), f"{deeds} have died\n{ranks.everything()}"
        return ranks
    finally:
        ranks.kill()


def check_same_end(kind: str, runs: Runs, folder: Path, *moments: Moment) -> None:
    """A run that loses engines ends with the weights and metrics of one that does not."""
    whole, moment = runs.whole(kind) / "out", moments[0]
    print(f"seed {SEED}, {kind}: {moments}")
    killed = run_without(kind, folder, runs.folder, *moments)
    deed = json.loads((killed.diary / "deed.json").read_text())
    lines = diary_of(killed.diary, 0)
    on = [line["at"] for line in lines if line.get("leave") == "go on without an engine"]
    took = [at - deed["at"] for at in on]
    print("went on after", took, "s")
    assert took or moment.phase == "leave"  # at the very end nobody is waited for
    assert all(seconds < GOES_ON_S * BUSY for seconds in took)
    assert not on or f"rank {moment.rank} is missing" in killed.printed(0)
    assert_equal(whole, folder / "out")
    (rows, evaluated), (again, evaluated_again) = rows_of(whole), rows_of(folder / "out")
    assert [row["step"] for row in rows] == [row["step"] for row in again]
    assert [row["policy/loss"] for row in rows] == [row["policy/loss"] for row in again]
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in again]
    assert [row["policy/grad_norm"] > 0 for row in rows] == [True] * len(rows)
    assert evaluated == evaluated_again


def assert_equal(whole: Path, other: Path) -> None:
    """Two runs ended with the same weights and optimizer."""
    first, second = final_weights(whole), final_weights(other)
    assert first.pop("newest") == second.pop("newest")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def engine_dies(kind: str, stage: Stage, whole: Path) -> Moment:
    """Return a moment in which an engine's rank dies in a stage."""
    case = Case(0, kind, stage, "kill", "an engine")
    # The first evaluation is start-up, in which a death ends the job.
    places = {
        rank: [place for place in entered if stage != "evaluation" or place["step"]]
        for rank, entered in places_of(whole, kind).items()
        if rank >= SURVIVING[kind].flags["layout.trainer-ranks"]
    }
    return draw_moment(case, places)


@pytest.mark.kill
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", SURVIVING)
def test_a_run_that_loses_an_engine_ends_as_one_that_does_not(kind, stage, runs, tmp_path):
    moment = engine_dies(kind, stage, runs.whole(kind))
    check_same_end(kind, runs, tmp_path, moment)


@pytest.mark.kill
@pytest.mark.parametrize("case", draw_cases(list(SURVIVING), count=10), ids=str)
def test_an_engine_may_die_at_any_moment(case, runs, tmp_path):
    if case.stage not in STAGES:
        case = Case(case.number, case.kind, "generation", "kill", "an engine")
    moment = engine_dies(case.kind, case.stage, runs.whole(case.kind))
    check_same_end(case.kind, runs, tmp_path, moment)


SECOND = {
    "two steps later": Moment(3, "generate", 3),
    "with it": Moment(3, "generate", 1),
    "as it closes its connections": Moment(3, "go on without an engine", -1),
    "as it makes groups": Moment(3, "make groups", 1),
    "as it draws what is lost": Moment(3, "generate", 1, behind="go on without an engine"),
    "as it plans anew": Moment(3, "push", None, behind="go on without an engine"),
}
"""When another engine is lost."""
FEW_SECOND = ("as it makes groups",)


@pytest.mark.parametrize(
    "second",
    [pytest.param(when, marks=[pytest.mark.kill] * (when not in FEW_SECOND)) for when in SECOND],
)
def test_two_engines_may_be_lost_the_second_as_one_goes_on_without_the_first(
    second, runs, tmp_path
):
    moments = Moment(2, "generate", 1), SECOND[second]
    check_same_end("survives, lag 1, three engines", runs, tmp_path, *moments)


SURVIVES = dict(world_size=3, trainer_ranks=1, survive_engines=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(layout=SURVIVES | dict(placement="colocated")), "layout.placement colocated"),
        (dict(layout=SURVIVES | dict(world_size=2)), "with 1 engine; when it is lost nobody"),
        (dict(rollout=dict(schedule=dict(in_flight=True))), "rollout.schedule.in_flight: True"),
        (dict(rollout=dict(schedule=dict(dynamic=3.0))), "rollout.schedule.dynamic: 3.0"),
        (dict(rollout=dict(record=dict(every=1))), "rollout.record.every: 1"),
        (dict(model=dict(lora=dict(rank=8))), "model.lora.rank: 8"),
        (dict(model=dict(moe=dict(replay=True))), "model.moe.replay: True"),
        (
            dict(engine=dict(options=dict(quantization="fp8_per_channel"))),
            "engine.options: {'quantization': 'fp8_per_channel'}",
        ),
    ],
)
def test_what_was_not_tried_is_refused_by_name(changes, why):
    found = "\n".join(validate(changed(good(), **dict(layout=SURVIVES) | changes)))
    assert why in found
    assert "survive_engines" not in "\n".join(validate(changed(good(), layout=SURVIVES)))


def test_a_launcher_that_ends_all_ranks_is_refused():
    cfg = changed(made(), layout=SURVIVES)
    place = dict(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with pytest.raises(Refusal, match="torchrun ends all ranks when one ends"):
        check_launch(cfg, read_launch(place | {"TORCHELASTIC_RUN_ID": "x"}))
    check_launch(cfg, read_launch(place | {"TORCHELASTIC_RUN_ID": "x", SPARES: "1"}))


def test_a_reward_that_timed_out_is_no_lost_engine():
    assert is_peer_error(RuntimeError("gloo: Connection closed by peer"))
    assert not is_peer_error(RewardFailed("no result of f within rewards.timeout_s = 1 s"))


def test_who_has_joined_makes_no_copy_count_that_it_does_not_have():
    """As the replicas tell it: two have copies, one of them older ones; one has joined."""
    old, new = [(4, [0, 3])], [(4, [0, 3, 5]), (4, [1])]
    told = [{"copies": old + new}, {"copies": new}, {"copies": []}]
    assert _offers(told) == {(4, (0, 3, 5)): [0, 1], (4, (0, 3)): [0], (4, (1,)): [0, 1]}


class _Heard:
    """What a watch has heard of others."""

    def __init__(self) -> None:
        self.beats, self.board, self.neighbours = {1: 0.0, 2: 0.0, 3: 0.0}, self, self

    def look_beside(self) -> None:
        """Nobody is."""

    def knows(self, rank: int) -> bool:
        return rank == 3

    def lost(self, ranks: list[int]) -> dict[int, str]:
        return {}

    def read(self, ranks: list[int]) -> list[dict[str, float]]:
        return [{"beat": self.beats[rank]} for rank in ranks]


def test_who_is_silent_is_gone_whatever_the_clock_of_its_machine_says(monkeypatch):
    now, heard = [1000.0], _Heard()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    absent = Absent(heard)
    assert absent.among([1, 2, 3]) == {}
    for _ in range(8):
        now[0] += 1.0
        heard.beats[1] += 1.0  # an hour behind would be the same
        found = absent.among([1, 2, 3])
    assert found == {2: "rank 2 is missing: no sign of life for 8 s"}


class _Silent:
    """A rank, and what it tells others but for its errors."""

    rank, is_started, stop_requested, may_lose = 2, False, False, (2, 3)

    def __init__(self, *, is_alone: bool, tp: int = 1):
        self.watch, self.said, self.is_alone = self, list[str](), is_alone
        self.cfg = Config(layout=LayoutSettings(inference_tp=tp))

    def claim_ending(self, *, wait: bool) -> None:
        assert wait

    def close_early(self, ending: str) -> None:
        self.said.append(ending)

    def say_leaving(self) -> None:
        self.said.append("leaves")


def test_what_ends_a_process_that_waits_to_join_ends_nothing_else(capfd):
    alone = _Silent(is_alone=True)
    assert ended(Refusal("no such model"), alone) == 2
    assert ended(PeersMissing("rank 0 is missing"), alone) == 1
    assert alone.said == ["failed", "leaves"] * 2
    assert "[rank 2] no such model" in capfd.readouterr().err


def test_who_has_lost_another_rank_of_its_engine_ends_nothing_else(capfd):
    left = _Silent(is_alone=False, tp=2)
    assert ended(RuntimeError("gloo: Connection closed by peer"), left) == 1
    assert ended(PeersMissing("rank 3 is missing"), left) == 1
    assert left.said == ["failed", "leaves"] * 2
    for other, error in [
        (_Silent(is_alone=False), PeersMissing("rank 0 is missing")),
        (_Silent(is_alone=False, tp=2), RewardFailed("no result within rewards.timeout_s = 1 s")),
    ]:
        other.claim_cause = other.tell_end = other.tell_missing = lambda text: True
        other.board = other
        ended(error, other)
        assert other.said == ["failed"]


def test_to_join_a_job_takes_a_config_with_which_it_goes_on():
    place = dict(RANK="2", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    joins = read_launch(place | {"SPMDRL_JOINS": "1"})
    with pytest.raises(Refusal, match="rank 2 cannot join a job: layout.survive_engines is false"):
        check_launch(changed(made(), layout=SURVIVES | dict(survive_engines=False)), joins)
    check_launch(changed(made(), layout=SURVIVES), joins)
