"""Which runs are killed, and when: kinds of runs, stages of a run, cases drawn from a seed."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tests.program.dying_rank import Death, Moment

SEED = os.environ.get("KILL_SEED", "0")
"""Of the cases and their moments; another gives others."""
CASES = 50

Stage = Literal[
    "start-up",
    "first push",
    "generation",
    "exchange",
    "annotate",
    "update",
    "push",
    "save",
    "evaluation",
    "teardown",
]
Role = Literal["rank 0", "another trainer", "an engine"]

_STAGE_OF: dict[str, Stage] = {
    "probe": "first push",
    "verify push": "first push",
    "generate": "generation",
    "await other replicas": "generation",
    "await the replica's leader": "generation",
    "await rollouts": "exchange",
    "exchange scalars": "exchange",
    "exchange tokens": "exchange",
    "annotate": "annotate",
    "logprobs": "annotate",
    "advantages": "annotate",
    "reward model": "annotate",
    "certificate": "update",
    "update": "update",
    "await peers": "push",
    "agree to stop": "save",
    "push": "push",
    "begin checkpoint": "save",
    "copy checkpoint": "save",
    "write checkpoint": "save",
    "checkpoint": "save",
    "evaluate": "evaluation",
    "gather evaluation": "evaluation",
    "close engines": "teardown",
    "leave": "teardown",
}


@dataclass(frozen=True)
class Kind:
    """A run that is killed: what it is asked, beyond what all of them are."""

    ranks: int
    flags: Mapping[str, Any] = field(default_factory=dict)
    config: str = "demo_grpo.yaml"
    model: Literal["dense", "moe"] = "dense"
    samples: bool = True
    """Has engines; without, it trains on rows and has no stage of theirs."""
    is_timed: bool = False
    """Time decides on its batches: to be compared, it follows the schedule of the whole run."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that it goes through."""
        if self.samples:
            return get_args(Stage)
        return ("start-up", "update", "save", "teardown")


_VLLM = {"engine.kind": "vllm"}
_TWO_TRAIN = {"layout.trainer-ranks": 2}
_ALL_AHEAD = {
    "layout.trainer-ranks": 1,
    "lag": 2,
    "rollout.schedule.in-flight": "true",
    "rollout.schedule.over-sample": "1.5",
    "rollout.schedule.balance": "steal",
}

KINDS: dict[str, Kind] = {
    "split": Kind(2, {"lag": 0}),
    "split of three, lag 1": Kind(3, _TWO_TRAIN | {"lag": 1}),
    "split, lag 1, vllm": Kind(2, _VLLM | {"lag": 1}),
    "two engines": Kind(3, {"layout.trainer-ranks": 1, "lag": 1}),
    "colocated": Kind(2, {"layout.placement": "colocated", "lag": 0}),
    "colocated, vllm": Kind(2, _VLLM | {"layout.placement": "colocated", "lag": 0}),
    "tp": Kind(3, _TWO_TRAIN | {"layout.tp": 2, "lag": 0}),
    "engines of tp 2, vllm": Kind(4, _VLLM | _TWO_TRAIN | {"layout.inference-tp": 2, "lag": 1}),
    "ep": Kind(3, _TWO_TRAIN | {"layout.ep": 2, "lag": 0}, model="moe"),
    "lora": Kind(2, {"model.lora.rank": 8, "algorithm.kl-coef": 1e-3, "lag": 0}),
    "critic": Kind(2, {"critic.warmup_steps": 1, "batch.group-size": 1}, "demo_ppo.yaml"),
    "environment": Kind(2, {}, "demo_game.yaml", is_timed=True),
    "in flight": Kind(2, {"lag": 2, "rollout.schedule.in-flight": "true"}, is_timed=True),
    "over-sampling": Kind(2, {"lag": 1, "rollout.schedule.over-sample": "1.5"}, is_timed=True),
    "stolen": Kind(3, _ALL_AHEAD, is_timed=True),
    "supervised": Kind(2, {}, "demo_sft.yaml", samples=False),
}

DEFAULT = ("split of three, lag 1", "split, lag 1, vllm", "colocated", "colocated, vllm")
"""Kinds of the eight cases of which the default suite runs two."""

TIMED = tuple(name for name, kind in KINDS.items() if kind.is_timed)


@dataclass(frozen=True)
class Case:
    """A run of a kind that loses a rank in a stage."""

    number: int
    kind: str
    stage: Stage
    death: Death
    role: Role

    def __str__(self) -> str:
        return f"{self.number:02d} {self.kind}: {self.death} {self.role} in {self.stage}"


def draw_cases(kinds: Iterable[str], *, count: int, seed: str = SEED) -> list[Case]:
    """Return cases in which kinds, stages, deaths and roles all come about equally often."""
    dice, used = random.Random(seed), Counter[str]()
    stages = _dealt(get_args(Stage), count, dice)
    deaths = _dealt(("kill", "kill", "kill", "stop", "cut"), count, dice)
    roles = _dealt(get_args(Role), count, dice)
    cases = []
    for number, stage in enumerate(stages):
        able = [kind for kind in kinds if stage in KINDS[kind].stages]
        kind = min(able, key=lambda name: (used[name], dice.random()))
        used[kind] += 1
        cases.append(Case(number, kind, stage, deaths[number], roles[number]))
    return cases


def _dealt(values: Sequence[Any], count: int, dice: random.Random) -> list[Any]:
    """Return each value equally often, in an order by chance."""
    cards = [values[i % len(values)] for i in range(count)]
    dice.shuffle(cards)
    return cards


def draw_moment(case: Case, places: Mapping[int, Sequence[Mapping[str, Any]]]) -> Moment:
    """Return when a case's rank dies.

    Args:
        places: of each rank what a whole run of the kind wrote down: each place entered, with its
            phase, step and seconds.
    """
    dice = random.Random(f"{SEED} {case}")
    found = [
        (rank, place)
        for rank, entered in places.items()
        for place in entered
        if stage_of(place["phase"], place["step"]) == case.stage
    ]
    assert found, f"{case}: no rank is ever in this stage"
    own = [(rank, place) for rank, place in found if _has_role(rank, case)]
    rank, place = dice.choice(own or found)  # some stages are one role's alone
    after_s = dice.choice((0.0, 1.0)) * dice.random() * place["seconds"]
    if case.stage == "teardown":
        after_s = 0.0  # a little later nobody would miss it
    return Moment(rank, place["phase"], place["step"], after_s, case.death)


def stage_of(phase: str, step: int) -> Stage:
    """Return the stage of a run that a place lies in."""
    if phase == "push" and step == 0:
        return "first push"
    if phase in _STAGE_OF:
        return _STAGE_OF[phase]
    assert step < 1, f"{phase!r} at step {step}: give it a stage in kill_table.py"
    return "start-up"


def _has_role(rank: int, case: Case) -> bool:
    flags = KINDS[case.kind].flags
    is_split = KINDS[case.kind].samples and flags.get("layout.placement") != "colocated"
    trains = not is_split or rank < flags.get("layout.trainer-ranks", 1)
    if case.role == "rank 0":
        return rank == 0
    return rank > 0 and trains if case.role == "another trainer" else not trains
