"""Environments by themselves: what they answer, count, refuse."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import textwrap
import threading
from collections import Counter

import pytest

from spmdrl.data.tasks import make_task
from spmdrl.environments.guess_number import GuessNumber
from spmdrl.environments.plain_state import PICKLED, PLAIN, NotPlain, environment_of, text_of
from spmdrl.environments.protocol import Response, Turn
from spmdrl.imports import construct, import_object
from spmdrl.rewards.samples import BadValue
from spmdrl.rollout.resumed_work import check_environments
from spmdrl.workers.environment_jobs import BUILT_IN, check_environment, checked_turn, pack
from tests.environments.environment_runs import ROW, play, served
from tests.helpers.built import refused

# --------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("guess_numbr", {}, ["did you mean guess_number"]),
        ("guess_number", {"hihg": 3}, ["rollout.environment.hihg", "did you mean high"]),
        ("guess_number", {"low": 5, "high": 5}, ["low: must be below high"]),
        ("guess_number", {"turn_cost": 0.5}, ["turn_cost"]),
        ("tools", {}, ["rollout.environment.tools", "needs this option"]),
        ("tools", {"tools": ["calculater"]}, ["did you mean calculator"]),
        ("tools", {"tools": " , "}, ["expected names", "known: calculator"]),
        ("", {}, ["rollout.environment.name", "guess_number"]),
        ("tools", {"tools": {"calculator": {"digits": 3}}}, ["takes no options"]),
        ("tools", {"tools": {"search": {"corpus": "nowhere.jsonl"}}}, ["no such file"]),
        ("tools", {"tools": {"search": {"file": "x"}}}, ["unknown option of Search"]),
        ("tools", {"tools": ["json:dumps"]}, ["tool dumps"]),
        ("task", {"task": "task:additoin"}, ["did you mean addition"]),
        ("task", {"task": "task:addition", "digit": 3}, ["did you mean digits"]),
        ("gym", {"env": "json:nothing"}, ["has no class 'nothing'"]),
        ("no_module_of_this_name:Class", {}, ["ModuleNotFoundError"]),
        ("nofile.py:Class", {}, ["no such file"]),
        ("json:JSONDecoder", {}, ["no method `reset`"]),
    ],
)
def test_unusable_environments_are_refused_at_start(name, options, words):
    with refused(*words):
        served(name, **options)


def test_a_dry_run_checks_the_options_and_opens_a_row():
    for options, words in (
        ({}, "environment.name: is missing; name one of tools, guess_number"),
        ({"name": "verifier"}, "did you mean verifiers"),
        ({"name": "guess_number", "rewrites": "x"}, "rewrites: must be auto, refuse or keep"),
    ):
        with pytest.raises(ValueError, match=words):
            check_environment(options, ROW)
    check_environment({"name": "guess_number"}, ROW)
    with pytest.raises(ValueError, match="guess_number cannot open the first row .*'seven'"):
        check_environment({"name": "guess_number"}, ROW | {"answer": "seven"})


def test_every_built_in_name_can_be_imported():
    for name in BUILT_IN:
        assert callable(import_object(name, known=BUILT_IN, kind="Class", field="x").reset)


def test_a_missing_or_failing_constructor_argument_is_named():
    def make(*, size):
        raise KeyError(size)

    with pytest.raises(ValueError, match="opts.size: .* needs this option"):
        construct(make, {}, field="opts")
    with pytest.raises(ValueError, match="KeyError: 3"):
        construct(make, {"size": 3}, field="opts")


# --------------------------------------------------------------------------- pickling


class Holds:
    def __init__(self, **parts):
        vars(self).update(parts)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (Holds(a=1, lock=threading.Lock()), "Holds.lock (lock)"),
        (Holds(inner=Holds(deep={"f": lambda: 1})), "Holds.inner.deep['f'] (function)"),
        (Holds(items=[1, (x for x in "ab")]), "Holds.items[1] (generator)"),
    ],
)
def test_what_does_not_pickle_is_named(environment, place):
    with pytest.raises(BadValue) as caught:
        pack(environment)
    assert str(caught.value).startswith(f"{place} cannot be pickled")


def test_an_environment_too_large_to_travel_is_refused_with_its_largest_attribute():
    with pytest.raises(BadValue, match="most of it is 'corpus'"):
        pack(Holds(small=b"x" * 1000, corpus=b"x" * 20_000_000))


LOCKED = """
import threading
class Locked:
    def __init__(self):
        self.client = threading.Lock()
    def reset(self, row): return []
    def step(self, response): ...
"""


def test_an_unpicklable_environment_is_refused_at_start(tmp_path):
    (tmp_path / "locked_env.py").write_text(LOCKED)
    with pytest.raises(ValueError, match="Locked.client .* cannot be pickled"):
        served(f"{tmp_path}/locked_env.py:Locked")


# --------------------------------------------------------------------------- plain data


class Part:
    def __init__(self, **parts):
        vars(self).update(parts)


class Slots:
    __slots__ = ("a",)


class Reduces(Part):
    def __reduce__(self):
        return Reduces, ()


class Says(Part):
    """Says its state itself."""

    def __init__(self, **parts):
        super().__init__(made=True, **parts)

    def save(self):
        return {"lock": "held", "numbers": [1, 2]}

    def restore(self, saved):
        self.saved = saved


def test_plain_attributes_come_back_as_they_were():
    values = {
        "scalars": [None, True, 3, -(2**2000), 0.1, -0.0, math.inf, "a\ud800", b"\x00\xff"],
        "tuple": (1, (2.5, [3])),
        "sets": [{1, 2}, frozenset({"a"})],
        "dict": {1: "a", "1": "b", (2, True): {None: 1.5}},
        "inner": Part(x=Part(y=[1])),
    }
    draw = random.Random(5)
    draw.gauss(0, 1)
    environment = Part(**values, draw=draw)
    again = environment_of(text_of(environment), Part, Part)
    assert pickle.dumps(again.inner.x.y) == pickle.dumps([1]) and type(again.inner) is Part
    for name in ("scalars", "tuple", "sets", "dict"):
        assert repr(getattr(again, name)) == repr(values[name])
    assert [again.draw.gauss(0, 1) for _ in range(3)] == [draw.gauss(0, 1) for _ in range(3)]
    empty = environment_of(text_of(Part(nan=math.nan)), Part, Part)
    assert math.isnan(empty.nan)


def test_what_is_no_plain_data_is_named():
    shared: list[int] = []
    for environment, says in (
        (Part(a=shared, b={"c": shared}), r"Part.b\['c'\] is also in another place"),
        (Part(a=threading.Lock()), r"Part.a \(_thread.lock\)"),
        (Part(a=Turn()), r"Part.a \(spmdrl.environments.protocol.Turn\)"),
        (Part(a=[Slots()]), r"Part.a\[0\]"),
        (Reduces(), "Reduces"),
        (Part(a=Counter("aab")), "Part.a"),
    ):
        with pytest.raises(NotPlain, match=says):
            text_of(environment)
        assert pack(Part(a=Turn()))[:1] == PICKLED


def test_an_environment_may_say_its_state_itself():
    text = text_of(Says(lock=threading.Lock()))
    again = environment_of(text, Says, Says)
    assert again.made and again.saved == {"lock": "held", "numbers": [1, 2]}
    with pytest.raises(NotPlain, match="does not write the form 'saved'"):
        environment_of(text, Part, Part)


@pytest.mark.parametrize(
    "state",
    [
        ["object", "pickle.loads", {}],
        ["object", "pytest.Session", {}],
        ["object", "Reduces", {}],
        ["object", "test_an_environment_may_say_its_state_itself", {}],
        ["list", "abc"],
        ["call", []],
        {"a": 1},
        1.5,
    ],
)
def test_plain_data_makes_nothing_but_what_an_environment_has(state):
    with pytest.raises(NotPlain):
        environment_of(json.dumps(["attributes", {"a": state}]), Part, Part)


def test_pickled_environments_of_a_checkpoint_are_refused_unless_they_are_trusted(tmp_path):
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    def states(*packed: bytes) -> list[dict]:
        episodes = [{"environment": one.decode("latin-1")} for one in packed]
        return [{"waiting": [{"episodes": episodes}]}, {"waiting": []}]

    plain, evil = pack(GuessNumber()), pickle.dumps(Evil())
    check_environments(states(plain, b""), trusts_pickles=False)
    with refused("hold 1 of 2 unfinished environments", "--checkpoint.trust-pickles true"):
        check_environments(states(plain, PICKLED + evil), trusts_pickles=False)
    check_environments(states(plain, PICKLED + evil), trusts_pickles=True)
    assert not marker.exists()
    server = served("guess_number")
    with pytest.raises((NotPlain, ValueError, AttributeError)):  # said to be plain, and none
        server.turn(PLAIN + evil, Response("1"))
    assert not marker.exists()
    with pytest.raises(AttributeError):
        server.turn(PICKLED + evil, Response("1"))
    assert marker.exists()  # the bait was live


# --------------------------------------------------------------------------- turns


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ("ok", "must return a Turn"),
        (Turn(), "at least one message"),
        (Turn([{"role": "assistant", "content": "x"}]), "role 'assistant'"),
        (Turn([{"role": "user", "content": None}]), "content"),
        (Turn(is_done=True, reward=math.nan), "reward: expected a finite number"),
        (Turn(is_done=True, info={"n": "3"}), "info['n']"),
    ],
)
def test_unusable_turns_are_refused(turn, words):
    with refused(words, by=BadValue):
        checked_turn(turn)


def test_async_environments_and_seeds_are_served(tmp_path):
    (tmp_path / "async_env.py").write_text(
        textwrap.dedent("""
        import asyncio
        from spmdrl.environments.protocol import Turn
        class Slow:
            def __init__(self, *, start=0): self.count = start
            async def reset(self, row, seed):
                await asyncio.sleep(0)
                self.seed = seed
                return [{"role": "user", "content": row["prompt"]}]
            async def step(self, response):
                await asyncio.sleep(0)
                self.count += 1
                return Turn([{"role": "user", "content": f"{self.seed} {self.count}"}])
    """)
    )
    server = served(f"{tmp_path}/async_env.py:Slow", start=3)
    opened, turn, state = server.open(ROW, seed=41)
    assert state == -1  # it names none
    assert turn.messages == [{"role": "user", "content": ROW["prompt"]}]
    first = server.turn(opened, Response("a"))
    again = server.turn(opened, Response("a"))
    second = server.turn(first[0], Response("b"))
    said = [turn.messages[0]["content"] for _, turn, _ in (first, again, second)]
    assert said == ["41 4", "41 4", "41 5"]


def test_guessing_by_halves_wins_and_earns_more_for_fewer_turns():
    server, rows = served("guess_number", max_turns=8), make_task("task:guess_number", {})
    rewards = {}
    for index in range(60):
        row, low, high = rows.row(0, index, split="train"), 1, 100
        (environment, turn, state), turns, guess = server.open(row, seed=0), 0, 0
        assert state == server.open(row, seed=1)[2] >= 0
        while not turn.is_done:
            if turns:
                word = turn.messages[0]["content"]
                low, high = (guess + 1, high) if word == "higher" else (low, guess - 1)
            guess, turns = (low + high) // 2, turns + 1
            environment, turn, state = server.turn(environment, Response(f"Is it {guess}?"))
        assert turn.info == {"solved": 1.0, "turns": turns}
        rewards[turns] = turn.reward
    assert max(rewards) <= 7
    assert all(r == pytest.approx(1 - 0.05 * (n - 1)) for n, r in rewards.items())


@pytest.mark.parametrize(
    "text, guess", [("it is in 10-20", 20), ("x-20", 20), ("-20", -20), ("from 5 to -20", -20)]
)
def test_a_range_has_no_negative_number(text, guess):
    game = GuessNumber()
    game.reset(ROW | {"answer": str(guess)})
    assert game.step(Response(text)).info["solved"] == 1.0


@pytest.mark.parametrize("guess", ["0" * 30 + "7", "12345678901234567890"])
def test_a_guess_is_read_whole(guess):
    turns = play(served("guess_number"), ROW | {"answer": int(guess)}, ["1" + "0" * 9999, guess])
    assert turns[0].messages[0]["content"] == "lower" and turns[1].info["solved"]
    (turn,) = play(served("guess_number", max_turns=1), ROW | {"answer": int(guess)}, [f"{guess}1"])
    assert not turn.info["solved"]


def test_a_game_without_a_right_guess_is_worth_nothing():
    turns = play(served("guess_number", max_turns=3), ROW | {"answer": 7}, ["what?", "9", "1"])
    assert [t.messages[0]["content"] for t in turns[:2]] == ["no number", "lower"]
    assert turns[2] == Turn(is_done=True, info={"solved": 0.0, "turns": 3})
    game, other = GuessNumber(), GuessNumber()
    for one in (game, other):
        one.reset({"prompt": "find it"})
    assert game.secret == other.secret  # one group looks for one number
    assert game.step(Response(str(game.secret), is_truncated=True)).is_done


def test_secrets_of_the_task_are_split_between_training_and_evaluation():
    task = make_task("task:guess_number", {"low": 1, "high": 50})
    train, held_out = (
        {task.row(0, i, split=s)["answer"] for i in range(300)} for s in ("train", "eval")
    )
    assert train and held_out and not train & held_out
    task = make_task("task:guess_number", {"low": 1, "high": 9, "held_out": False})
    for split in ("train", "eval"):
        assert len({task.row(0, i, split=split)["answer"] for i in range(300)}) == 9


# --------------------------------------------------------------------------- adapters


def test_generated_tasks_are_environments_of_one_turn():
    row = make_task("task:addition", {"digits": 2}).row(0, 0, split="train")
    server = served("task", task="task:addition", digits=2)
    assert play(server, row, [row["answer"]]) == [Turn(is_done=True, reward=1.0)]
    assert play(server, row, ["x"]) == [Turn(is_done=True, reward=0.0)]
    with pytest.raises(ValueError, match="data_source"):
        server.open(ROW, seed=0)


def test_reasoning_gym_is_an_environment_of_one_turn():
    pytest.importorskip("reasoning_gym")
    spec = "reasoning_gym:chain_sum"
    row = make_task(spec, {}, size=10).row(0, 3, split="train")
    assert play(served("task", task=spec), row, [row["answer"]])[0].reward == 1.0


GYM = '''
import random

class Steps:
    def contains(self, action): return -2 < action < 2
    def __str__(self): return "-1, 0 or 1"

class Walk:
    """Reach `goal` on a line."""

    action_space = Steps()
    def __init__(self, *, goal=3): self.goal = goal
    def reset(self, *, seed=None, options=None):
        self.at, self.random = 0, random.Random(seed)
        self.noise = self.random.random()
        return self.at, {}
    def step(self, action):
        self.at += action
        return self.at, -0.1, self.at == self.goal, abs(self.at) > 9, {"at": self.at, "x": "y"}

def words(observation): return f"You are at {observation}."
'''


def test_gym_like_environments_are_played_in_words(tmp_path):
    place = tmp_path / "walk_env.py"
    place.write_text(GYM)
    options = dict(env_options={"goal": 4}, action="int", show=f"{place}:words", max_turns=5)
    server = served("gym", env=f"{place}:Walk", **options)
    environment, turn, _ = server.open({"prompt": "Go to 4."}, seed=0)
    assert turn.messages == [{"role": "user", "content": "Go to 4.\n\nYou are at 0."}]
    same = server.open({"prompt": "Go to 4."}, seed=1)[0]
    assert same == environment and b"noise" in same and same[:1] == PLAIN
    turns = play(server, {"prompt": "Go to 4."}, ["I step 1.", "left?", "3", "1", "(1)!"])
    assert turns[0].messages[0]["content"] == "You are at 1." and turns[0].reward == -0.1
    assert turns[1].info == {"bad_actions": 1.0} and "number" in turns[1].messages[0]["content"]
    assert turns[2].messages[0]["content"] == "3 is not one of the actions, -1, 0 or 1"
    assert turns[2].info == {"bad_actions": 1.0}
    assert turns[4] == Turn(is_done=True, reward=-0.1, info={"at": 3.0, "turns": 5.0})
    assert len(play(server, {"prompt": "Go."}, ["0"] * 9)) == 5
    with pytest.raises(ValueError, match="did you mean int"):
        served("gym", env=f"{place}:Walk", action="itn")
