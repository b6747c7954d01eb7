"""What time decides on an engine replica, asked of one object: made now and written down, or made
again as it was.

Time decides four things: which answers of workers are there after an engine step, which moves of
other replicas are in the shared book by then, when engines pause for new weights, and by these
which groups close a step. Each is asked here, in the order in which it comes about; everything else
follows. Engine steps since the begin of a stretch of generation are the clock.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.config import Config
from spmdrl.rollout.book import Move, OwnBook, SharedBook, Ticket
from spmdrl.rollout.decision_log import (
    ASTRAY,
    FOLDER,
    Decided,
    Line,
    Writer,
    agreeing,
    check_schedule,
    differences,
    facts,
    file_of,
    is_timed,
    made_of,
    read_lines,
    unrepeatable,
    until_version,
)
from spmdrl.rollout.episode import Episode, Group
from spmdrl.run_folder import remove, write_file
from spmdrl.workers.messages import Failure, RewardResult, TurnResult
from spmdrl.workers.pool import RewardPool
from spmdrl.world.world import World

log = logging.getLogger(__name__)

Answer = RewardResult | TurnResult
_PURPOSE = {"fill": "train-", "evaluate": "eval-"}
"""How the keys of the episodes begin whose answers a stretch takes; others wait."""
_MESSAGE_CHARS = 300
_UNLIKE = "What is computed is not alike: another machine, data or reward"


class _Mail:
    """Answers of workers that are there and were not taken yet."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, Answer] = {}
        self._given_up: set[Hashable] = set()  # nobody waits for them any more

    def fetch(self, pool: RewardPool) -> None:
        """Take in what the workers have done."""
        for answer in pool.poll():
            if answer.key in self._given_up:
                self._given_up.remove(answer.key)
            else:
                self._answers[answer.key] = answer

    def of(self, prefix: str, pool: RewardPool, *, must_wait: bool) -> list[Answer]:
        """Return the answers to keys that begin so.

        Args:
            must_wait: where there are none, sleep until a worker has something.
        """
        if must_wait and not self._keys(prefix):
            pool.wait()
        self.fetch(pool)
        return [self._answers.pop(key) for key in self._keys(prefix)]

    def _keys(self, prefix: str) -> list[Hashable]:
        return [key for key in self._answers if str(key).startswith(prefix)]

    def wait_for(self, key: Hashable, pool: RewardPool) -> Answer:
        """Return the answer to a key, as soon as it is there."""
        self.fetch(pool)
        while key not in self._answers:
            pool.wait()
            self.fetch(pool)
        return self._answers.pop(key)

    def give_up(self, key: Hashable) -> None:
        """Leave out the answer to a key, whenever it comes."""
        if self._answers.pop(key, None) is None:
            self._given_up.add(key)


class Decisions:
    """The decisions of one replica; its leader has one. Until `start` they are neither kept nor
    made again, as in an evaluation of a model that is no run."""

    def __init__(self) -> None:
        self._open: Callable[[], tuple[Decided, Writer, bool]] | None = None  # at first
        self._source = ""  # whose decisions are made again, for messages
        self._must_repeat = False  # by rollout.replay_schedule, to the end
        self._astray: Path | None = None  # marks that what was decided cannot be made again
        self._drops = True  # samples whose reward failed; else the run ends
        self._made = Decided()  # what is made again
        self._is_known = False  # what is decided stands in this run's file already
        self._writer: Writer | None = None
        self._ahead: deque[Line] = deque()  # of this stretch, to be made again
        self._what = ("", 0)  # the stretch: its kind, and the version of its weights
        self._counts: Counter[tuple[str, int]] = Counter()
        self._clock = 0  # engine steps of the stretch
        self._noted = 0  # moves of the shared book that are written down
        self._mail = _Mail()

    def start(self, cfg: Config, world: World, *, version: int) -> None:
        """Keep decisions from here on, and make again those that were made of the steps to come.

        Files are read here, and written at the first stretch, when all replicas have read.

        Args:
            version: of the weights that the run goes on with.
        Raises: OSError.
        """
        if not is_timed(cfg):
            return
        folder = Path(cfg.output_dir) / FOLDER
        replicas = max(1, world.num_replicas)
        paths = [file_of(folder, replica=r, replicas=replicas) for r in range(replicas)]
        found = [read_lines(path) if path.exists() else ([], "") for path in paths]
        if wrong := found[world.replica][1]:
            log.warning("%s; what follows is decided anew", wrong)
        self._source = cfg.rollout.replay_schedule or str(folder)
        self._must_repeat = bool(cfg.rollout.replay_schedule)
        self._astray = folder / ASTRAY
        self._drops = cfg.rewards.on_failure == "drop"
        files = agreeing([lines for lines, _ in found])
        path = paths[world.replica]
        was_astray = ["the start before this one came to other numbers"] * self._astray.exists()
        self._open = partial(
            _taken_up, cfg, world, version=version, path=path, files=files, anew=was_astray
        )

    # ---------------------------------------------------------------- stretches

    def begin(self, kind: str, *, version: int, book: OwnBook, last: int = -1) -> None:
        """Begin a stretch of generation.

        Args:
            kind: `fill` or `evaluate`.
            version: of the weights.
            last: step up to which it goes.
        """
        if self._open is not None:
            self._made, self._writer, self._is_known = self._open()
            self._open = None
            if isinstance(book, SharedBook):
                book.take_up(self._made.moves, begun=self._made.begun)
            self._noted = self._made.begun
        self._what = (kind, version)
        self._clock = 0
        number = self._counts[self._what]
        opening = [kind, version, last]
        self._counts[self._what] += 1
        lines = self._made.stretches.get((kind, version, number), [])
        self._ahead = deque(lines)
        if lines and lines[0] != opening:
            raise self._differs(str(opening))
        if lines:
            self._again()
            return
        if kind == "fill":  # an evaluation changes nothing that others follow from
            self._is_known = False
        self._write(opening)

    def stepped(self) -> None:
        """Note that the engine took a step."""
        self._clock += 1

    def end(self) -> None:
        """End the stretch."""
        if not self._ahead:
            self._write(["end", self._clock])
        elif self._due("end"):
            self._again()
        else:
            raise self._differs("the end")
        self._what = ("", 0)

    # ---------------------------------------------------------------- what time decides

    def pauses(self, must_pause: Callable[[], bool]) -> bool:
        """Whether generation stops here for new weights."""
        if self._ahead:
            return bool(self._due("pause") and self._again())
        if is_pausing := must_pause():
            self._write(["pause", self._clock])
        return is_pausing

    def move(self, book: OwnBook, move: Move, *, is_urgent: bool) -> list[Ticket] | None:
        """Make a move in a book, where it is due; return its tickets, or None for none made.

        Args:
            is_urgent: there is something to say, or nothing else to do.
        """
        if not isinstance(book, SharedBook):
            return book.move(move)
        if self._ahead:
            if not (line := self._due("book")):
                return None
            _, _, number, own = line
            if own is not None and own != json.loads(json.dumps(move)):
                raise self._differs(f"the move {list(move)}")
            self._again()
            self._noted = number
            tickets = book.repeat(number)
            return None if own is None else tickets
        if not (book.is_due or is_urgent):
            return None
        tickets = book.move(move)
        if book.number > self._noted:
            is_own = book.number == book.latest_own
            self._write(["book", self._clock, book.number, list(move) if is_own else None])
            self._noted = book.number
        return tickets

    def waits(self) -> bool:
        """Whether a replica that has nothing to do must wait for others: what they did in the run
        that is made again is known."""
        if self._ahead:
            self._check_due("nothing is left to do")
        return not self._ahead

    def answers(
        self, pool: RewardPool, awaited: Mapping[Hashable, Episode], *, is_idle: bool
    ) -> list[Answer]:
        """Return the answers of workers that there are now.

        Args:
            awaited: the episodes that are with the workers, by key.
            is_idle: the engine has nothing to do, so that there must be some before long.
        """
        if line := self._due("came"):
            found = [self._answer(pool, key, awaited, failed=line[3]) for key in line[2]]
            self._again()
            return found
        if self._ahead:
            if is_idle:
                self._check_due("the engine has nothing to do")
            self._mail.fetch(pool)
            return []
        found = self._mail.of(_PURPOSE.get(self._what[0], ""), pool, must_wait=is_idle)
        failed = {a.key: [a.failure, a.message[:_MESSAGE_CHARS]] for a in found if a.failure}
        if found and (self._drops or not failed):  # what ends the run is not to end the next
            self._write(["came", self._clock, [answer.key for answer in found], failed])
        return found

    def _answer(
        self,
        pool: RewardPool,
        key: Hashable,
        awaited: Mapping[Hashable, Episode],
        *,
        failed: Mapping[Hashable, tuple[Failure, str]],
    ) -> Answer:
        """Wait for an answer, or make a failure again."""
        if key not in awaited:
            raise self._differs(f"{key} is not with the workers")
        if key in failed:
            self._mail.give_up(key)
            kind = RewardResult if awaited[key].stage == "score" else TurnResult
            failure, message = failed[key]
            return kind(key, failure=failure, message=message)
        answer = self._mail.wait_for(key, pool)
        if answer.failure:
            raise self._differs(f"{key} failed: {answer.failure}: {answer.message}")
        return answer

    # ---------------------------------------------------------------- what follows

    def closed(self, step: int, groups: Sequence[Group]) -> None:
        """Note what this replica's groups of a step came to, or compare it.

        A resumed run may well come to other numbers: a reward was mended, or the machine is
        another. It says so and goes on.

        Raises: RuntimeError naming the first group that differs from the run of replay_schedule.
        """
        if self._writer is None:
            return
        own = {group.key: _digest(group) for group in groups}
        there = self._made.digests.get(step)
        if there is not None and (wrong := [k for k in there | own if there.get(k) != own.get(k)]):
            was = there.get(wrong[0])
            now = own.get(wrong[0])
            what = f"group {wrong[0]} of step {step} came to {was} there and to {now} here"
            if self._must_repeat:
                raise RuntimeError(f"{self._source}: {what}. {_UNLIKE}")
            log.warning("%s: %s. %s; the run goes on", self._source, what, _UNLIKE)
        self._write(["closed", step, own])

    # ---------------------------------------------------------------- lines

    def _write(self, line: Line) -> None:
        if self._writer is not None and not self._is_known:
            self._writer.write(line)

    def _due(self, kind: str) -> Line | None:
        """Return the next decision to be made again, if it is of this kind and due now."""
        if not self._ahead:
            return None
        line = self._ahead[0]
        if line[1] < self._clock:
            raise self._differs("nothing of the kind")
        return line if line[0] == kind and line[1] == self._clock else None

    def _check_due(self, here: str) -> None:
        """Raise RuntimeError where no decision is due that would change something."""
        if self._ahead[0][0] not in ("book", "pause") or self._ahead[0][1] != self._clock:
            raise self._differs(here)

    def _again(self) -> bool:
        """Take the next decision as made; where it was the last that is known, others follow."""
        self._write(line := self._ahead.popleft())
        if not self._ahead and line[0] != "end":
            self._is_known = False
        return True

    def _differs(self, here: str) -> RuntimeError:
        kind, version = self._what
        advice = ""
        if not self._must_repeat and self._astray is not None:
            write_file(self._astray, "", within=self._astray.parents[1])
            advice = "; start again: the next start decides anew"
        there = json.dumps(self._ahead[0]) if self._ahead else "nothing"
        return RuntimeError(
            f"{self._source}: {kind} with the weights of step {version}, after {self._clock} "
            f"engine steps: there {there:.300}, here {here}. {_UNLIKE}{advice}"
        )


def _taken_up(
    cfg: Config, world: World, *, version: int, path: Path, files: list[list[Line]], anew: list[str]
) -> tuple[Decided, Writer, bool]:
    """Decide what is made again, and have the file hold what comes before.

    Args:
        version: of the weights that the run goes on with.
        path: of this replica.
        files: lines of all replicas.
        anew: why the steps to come are to be decided anew; [] where they are not.
    Returns: what is made again, what writes the file, and whether it has these lines already.
    """
    tokens = world.tokens_per_microbatch
    must_repeat = bool(cfg.rollout.replay_schedule)
    now = facts(cfg, tokens_per_microbatch=tokens)
    own = files[world.replica]
    is_known = False
    said = _said(own)
    if said is not None and not must_repeat:
        why = [*anew, *differences(said, now), *filter(None, [unrepeatable(cfg)])]
        is_known = not why
        if why and until_version(own, version) != own:
            log.info("%s: the steps to come are decided anew: %s", path, why[0])
    if not is_known:
        files = [until_version(lines, version) for lines in files]
    own = files[world.replica]
    if must_repeat:
        files = check_schedule(cfg, tokens_per_microbatch=tokens)
    writer = Writer(path, own)
    if anew:
        remove(path.parent / ASTRAY, within=path.parents[1])
    if _said(own) != now:
        writer.write(["run", now])
    return made_of(files, replica=world.replica, version=version), writer, is_known


def _said(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return the facts of a run, as its file says them last."""
    return next((line[1] for line in reversed(lines) if line[0] == "run"), None)


def _digest(group: Group) -> str:
    """Return what a group came to: tokens, logprobs, versions and rewards, bit for bit."""
    found = hashlib.sha256()
    for sample in group.placed:
        own = sample.trajectory
        reward = sample.reward
        for column in (own.tokens, own.rollout_logprobs, own.policy_versions):
            found.update(column.contiguous().numpy().tobytes())
        found.update(repr((own.is_truncated, own.earned, reward.value, reward.failure)).encode())
    return found.hexdigest()[:16]
