"""Decisions that depend on timing on an engine replica: written to a journal, or repeated from it.

Four things depend on timing: which answers of workers have arrived after an engine step, which
moves of other replicas the shared book then has, when engines pause for new weights, and, because
of these, which groups close a step. `Decisions` makes or repeats each of them, in the order in
which they are needed; everything else follows from them. A stretch is one call that generates, for
training or evaluation; its clock counts engine steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import Config
from spmdrl.journal import Journal
from spmdrl.rollout.book import Move, OwnBook, SharedBook, Ticket
from spmdrl.rollout.decision_log import (
    ASTRAY,
    FOLDER,
    Decided,
    Line,
    agreeing,
    check_schedule,
    decided,
    facts,
    facts_of,
    is_timed,
    journal_of,
    read_lines,
    row_of,
    unrepeatable,
    until_version,
)
from spmdrl.rollout.episode import Episode, Group
from spmdrl.run_folder import make_folder, remove, write_file
from spmdrl.same_run.differences import differences
from spmdrl.workers.messages import Failure, RewardResult, TurnResult
from spmdrl.workers.pool import RewardPool
from spmdrl.world.world import World

log = logging.getLogger(__name__)

Answer = RewardResult | TurnResult
_PURPOSE = {"fill": "train-", "evaluate": "eval-"}
"""{kind of stretch: prefix of the keys of its episodes}. Answers to other keys wait."""
_MESSAGE_CHARS = 300
_UNLIKE = "The results differ from that run's: the machine, data or a reward function is another"


class Decisions:
    """Makes, writes and repeats the decisions of one replica; only its leader has one.

    Before `start`, decisions are neither written nor repeated. `start` is not called where a model
    is evaluated outside a run.
    """

    def __init__(self) -> None:
        self._known: _KnownDecisions | None = None  # read by `start`, until the first stretch
        self._source = ""  # folder of the decisions that are repeated, for messages
        self._must_repeat = False  # rollout.replay_schedule is set: repeat all decisions
        self._astray: Path | None = None  # this file marks decisions that cannot be repeated
        self._drops = True  # drop samples whose reward failed; if False, the run ends
        self._decided = Decided()  # the decisions to repeat
        self._is_written = False  # this run's journal already has the lines that are repeated
        self._journal: Journal | None = None
        self._ahead: deque[Line] = deque()  # lines of this stretch that are still to be repeated
        self._stretch = ("", 0)  # its kind, and the version of its weights
        self._counts: Counter[tuple[str, int]] = Counter()
        self._clock = 0  # engine steps of the stretch
        self._noted = 0  # number of moves of the shared book that the journal has
        self._answers = _Answers()

    def start(self, cfg: Config, world: World, *, version: int) -> None:
        """Write decisions from here on, and repeat those that the journal has for later steps.

        This only reads files. They are written at the first stretch, when all replicas have read
        them.

        Args:
            version: of the weights that the run begins or continues with.
        Raises: OSError.
        """
        if not is_timed(cfg):
            return
        folder = Path(cfg.output_dir) / FOLDER
        self._source = cfg.rollout.replay_schedule or str(folder)
        self._must_repeat = bool(cfg.rollout.replay_schedule)
        self._astray = folder / ASTRAY
        self._drops = cfg.rewards.on_failure == "drop"
        self._known = _KnownDecisions(cfg, world, version=version)

    # ---------------------------------------------------------------- stretches

    def begin(self, kind: str, *, version: int, book: OwnBook, last: int = -1) -> None:
        """Begin a stretch of generation.

        Args:
            kind: `fill` or `evaluate`.
            version: of the weights.
            book: this replica's book, which repeats the known moves.
            last: last step to sample for.
        """
        if self._known is not None:
            self._decided, self._journal, self._is_written = self._known.take()
            self._known = None
            self._noted = self._decided.begun
            if isinstance(book, SharedBook):
                book.remember(self._decided.moves, begun=self._decided.begun)
        self._stretch = (kind, version)
        self._clock = 0
        number = self._counts[self._stretch]
        self._counts[self._stretch] += 1
        opening = [kind, version, last]
        lines = self._decided.stretches.get((kind, version, number), [])
        self._ahead = deque(lines)
        if lines and lines[0] != opening:
            raise self._differs(str(opening))
        if lines:
            self._repeat()
            return
        if kind == "fill":  # no later decision depends on an evaluation
            self._is_written = False
        self._write(opening)

    def stepped(self) -> None:
        """Count an engine step."""
        self._clock += 1

    def end(self) -> None:
        """End the stretch."""
        if not self._ahead:
            self._write(["end", self._clock])
        elif self._due("end"):
            self._repeat()
        else:
            raise self._differs("the end")
        self._stretch = ("", 0)

    # ---------------------------------------------------------------- timing

    def pauses(self, must_pause: Callable[[], bool]) -> bool:
        """Return whether generation stops here for new weights."""
        if self._ahead:
            is_due = self._due("pause") is not None
            if is_due:
                self._repeat()
            return is_due
        is_pausing = must_pause()
        if is_pausing:
            self._write(["pause", self._clock])
        return is_pausing

    def move(self, book: OwnBook, move: Move, *, is_urgent: bool) -> list[Ticket] | None:
        """Make a move in a book if it is due; return its tickets, or None if it was not made.

        Args:
            is_urgent: make the move now: generation pauses, or there is nothing else to do.
        """
        if not isinstance(book, SharedBook):
            return book.move(move)
        if self._ahead:
            line = self._due("book")
            if line is None:
                return None
            _, _, number, own = line
            if own is not None and own != json.loads(json.dumps(move)):
                raise self._differs(f"the move {list(move)}")
            self._repeat()
            self._noted = number
            tickets = book.play_until(number)
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
        """Return whether a replica that has nothing to do must wait for other replicas.

        It need not while decisions are repeated: the moves of the others are known then.
        """
        if self._ahead:
            self._check_due("nothing is left to do")
        return not self._ahead

    def answers(
        self, pool: RewardPool, awaited: Mapping[Hashable, Episode], *, is_idle: bool
    ) -> list[Answer]:
        """Return the answers of workers that have arrived.

        Args:
            awaited: {key: episode} of the episodes that the workers have.
            is_idle: the engine has nothing to do, so wait for at least one answer.
        """
        line = self._due("came")
        if line is not None:
            answers = [self._answer(pool, key, awaited, failed=line[3]) for key in line[2]]
            self._repeat()
            return answers
        if self._ahead:
            if is_idle:
                self._check_due("the engine has nothing to do")
            self._answers.fetch(pool)
            return []
        prefix = _PURPOSE.get(self._stretch[0], "")
        answers = self._answers.of(prefix, pool, must_wait=is_idle)
        failed = {a.key: [a.failure, a.message[:_MESSAGE_CHARS]] for a in answers if a.failure}
        # A failure that ends the run is not written: the next attempt must not repeat it.
        if answers and (self._drops or not failed):
            self._write(["came", self._clock, [answer.key for answer in answers], failed])
        return answers

    def _answer(
        self,
        pool: RewardPool,
        key: Hashable,
        awaited: Mapping[Hashable, Episode],
        *,
        failed: Mapping[Hashable, tuple[Failure, str]],
    ) -> Answer:
        """Wait for an answer, or make one again that failed in the repeated run."""
        if key not in awaited:
            raise self._differs(f"{key} is not with the workers")
        if key in failed:
            self._answers.give_up(key)
            kind = RewardResult if awaited[key].stage == "score" else TurnResult
            failure, message = failed[key]
            return kind(key, failure=failure, message=message)
        answer = self._answers.wait_for(key, pool)
        if answer.failure:
            raise self._differs(f"{key} failed: {answer.failure}: {answer.message}")
        return answer

    # ---------------------------------------------------------------- results

    def closed(self, step: int, groups: Sequence[Group]) -> None:
        """Write digests of this replica's groups of a step, and compare them with known ones.

        A resumed run may get other results, because a reward function was corrected or the machine
        is another. It logs this and goes on.

        Raises: RuntimeError naming the first group that differs from the run of replay_schedule.
        """
        if self._journal is None:
            return
        own = {group.key: _digest(group) for group in groups}
        there = self._decided.digests.get(step, own)
        differing = [key for key in there | own if there.get(key) != own.get(key)]
        if differing:
            key = differing[0]
            what = (
                f"group {key} of step {step} has the digest {there.get(key)} in that run and "
                f"{own.get(key)} here"
            )
            if self._must_repeat:
                raise RuntimeError(f"{self._source}: {what}. {_UNLIKE}")
            log.warning("%s: %s. %s; the run goes on", self._source, what, _UNLIKE)
        self._write(["closed", step, own])

    # ---------------------------------------------------------------- lines

    def _write(self, line: Line) -> None:
        if self._journal is not None and not self._is_written:
            self._journal.append(row_of(line))

    def _due(self, kind: str) -> Line | None:
        """Return the next line to repeat if it is of this kind and due now, else None."""
        if not self._ahead:
            return None
        line = self._ahead[0]
        if line[1] < self._clock:
            raise self._differs("nothing of the kind")
        return line if line[0] == kind and line[1] == self._clock else None

    def _check_due(self, here: str) -> None:
        """Raise RuntimeError unless a move of the book or a pause is due now."""
        if self._ahead[0][0] not in ("book", "pause") or self._ahead[0][1] != self._clock:
            raise self._differs(here)

    def _repeat(self) -> None:
        """Go on to the next line; after the last known one, new decisions are made and written."""
        line = self._ahead.popleft()
        self._write(line)
        if not self._ahead and line[0] != "end":
            self._is_written = False

    def _differs(self, here: str) -> RuntimeError:
        kind, version = self._stretch
        advice = ""
        if not self._must_repeat and self._astray is not None:
            write_file(self._astray, "", within=self._astray.parents[1])
            advice = "; start again: the next start decides again"
        there = json.dumps(self._ahead[0]) if self._ahead else "nothing"
        return RuntimeError(
            f"{self._source}: {kind} with the weights of step {version}, after {self._clock} "
            f"engine steps: there {there:.300}, here {here}. {_UNLIKE}{advice}"
        )


class _Answers:
    """Answers of workers that have arrived and were not taken yet."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, Answer] = {}
        self._given_up: set[Hashable] = set()  # keys whose answers are thrown away on arrival

    def fetch(self, pool: RewardPool) -> None:
        """Store the answers that have arrived, without waiting."""
        for answer in pool.poll():
            if answer.key in self._given_up:
                self._given_up.remove(answer.key)
            else:
                self._answers[answer.key] = answer

    def of(self, prefix: str, pool: RewardPool, *, must_wait: bool) -> list[Answer]:
        """Return the answers to keys that begin with a prefix.

        Args:
            must_wait: if there are none, first sleep until a worker has an answer.
        """
        if must_wait and not self._keys(prefix):
            pool.wait()
        self.fetch(pool)
        return [self._answers.pop(key) for key in self._keys(prefix)]

    def _keys(self, prefix: str) -> list[Hashable]:
        return [key for key in self._answers if str(key).startswith(prefix)]

    def wait_for(self, key: Hashable, pool: RewardPool) -> Answer:
        """Wait for the answer to a key and return it."""
        self.fetch(pool)
        while key not in self._answers:
            pool.wait()
            self.fetch(pool)
        return self._answers.pop(key)

    def give_up(self, key: Hashable) -> None:
        """Throw away the answer to a key, now or when it arrives."""
        if self._answers.pop(key, None) is None:
            self._given_up.add(key)


class _KnownDecisions:
    """The decisions that a run's files have for later steps.

    Args:
        version: of the weights that the run begins or continues with.
    """

    def __init__(self, cfg: Config, world: World, *, version: int):
        self._cfg = cfg
        self._world = world
        self._version = version
        self._folder = Path(cfg.output_dir) / FOLDER
        self._was_astray = (self._folder / ASTRAY).exists()
        replicas = max(1, world.num_replicas)
        files = []
        for replica in range(replicas):
            journal = journal_of(self._folder, replica=replica, replicas=replicas)
            files.append(read_lines(journal)[0] if journal.path.exists() else [])
            if replica == world.replica:
                self._journal = journal
        self._files = agreeing(files)

    def take(self) -> tuple[Decided, Journal, bool]:
        """Cut the journal to the lines that stay valid and prepare to repeat decisions.

        Returns: the decisions to repeat, the journal to write to, and whether the journal already
            has the decisions to repeat.
        """
        cfg = self._cfg
        must_repeat = bool(cfg.rollout.replay_schedule)
        tokens = self._world.tokens_per_microbatch  # not known yet when `start` is called
        replica = self._world.replica
        now = facts(cfg, tokens_per_microbatch=tokens)
        files = self._files
        own = files[replica]
        is_known = bool(facts_of(own)) and not must_repeat
        if is_known and (reason := self._reason_to_decide_again(own, now)):
            is_known = False
            if until_version(own, self._version) != own:
                path = self._journal.path
                log.info("%s: the steps to come are decided again: %s", path, reason)
        if not is_known:
            files = [until_version(lines, self._version) for lines in files]
        own = files[replica]
        if must_repeat:
            files = check_schedule(cfg, tokens_per_microbatch=tokens)
        make_folder(self._folder, within=self._folder.parent)
        numbers = itertools.count()
        self._journal.keep(lambda row: next(numbers) < len(own))
        if self._was_astray:
            remove(self._folder / ASTRAY, within=self._folder.parent)
        known = facts_of(own)
        if not known or differences(known[-1], now):
            self._journal.append(row_of(["run", now]))
        known_decisions = decided(files, replica=replica, version=self._version)
        return known_decisions, self._journal, is_known

    def _reason_to_decide_again(self, own: Sequence[Line], now: dict[str, Any]) -> str:
        """Return why the later decisions cannot be repeated; empty if they can."""
        if self._was_astray:
            return "the start before this one computed other results"
        for difference in differences(facts_of(own)[-1], now):
            return str(difference)
        return unrepeatable(self._cfg)


def _digest(group: Group) -> str:
    """Return a digest of a group: tokens, logprobs, versions and rewards, bit for bit."""
    digest = hashlib.sha256()
    for sample in group.placed:
        own = sample.trajectory
        reward = sample.reward
        for column in (own.tokens, own.rollout_logprobs, own.policy_versions):
            digest.update(column.contiguous().numpy().tobytes())
        digest.update(repr((own.is_truncated, own.earned, reward.value, reward.failure)).encode())
    return digest.hexdigest()[:16]
