"""The decisions of an engine replica that depend on timing: made and written, or repeated.

Five things depend on timing: which answers of workers and which requests of agents have arrived
after an engine step, which moves of other replicas the shared book then has, when engines pause for
new weights, and, as a consequence, which groups a step gets. `Decisions` makes or repeats them in
the order in which they are needed. Everything else in a run follows from them. `decision_log`
describes the journal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spmdrl.agents.messages import JUDGE, NO_EPISODES, Ask
from spmdrl.config import Config
from spmdrl.journal import Journal
from spmdrl.rollout.book import Move, OwnBook, SharedBook, Ticket
from spmdrl.rollout.decision_log import (
    DIVERGED_FILE,
    FOLDER,
    Line,
    PastDecisions,
    check_schedule,
    facts,
    facts_of,
    is_timed,
    journal_of,
    past_decisions,
    read_lines,
    repeat_problem,
    row_of,
    until_version,
    without_lost_moves,
)
from spmdrl.rollout.episode import Episode, Group, Stage
from spmdrl.run_folder import make_folder, remove, write_file
from spmdrl.same_run.differences import differences
from spmdrl.workers.messages import Failure, RewardResult, SolveResult, TurnResult
from spmdrl.world.world import World

log = logging.getLogger(__name__)

Answer = RewardResult | TurnResult | SolveResult
Report = Answer | Ask
_RESULTS: dict[Stage, type[Answer]] = {"score": RewardResult, "solve": SolveResult}
"""{stage: kind of the workers' answer}; at other stages it is a TurnResult."""
_PURPOSE = {"fill": "train-", "evaluate": "eval-"}
"""{kind of stretch: prefix of the keys of its episodes}. Answers to other keys wait."""
_MESSAGE_CHARS = 300
_CAUSES = "The machine, the data or a reward function differs from that run's"


class Outside(Protocol):
    """What reports to a loop: the workers, or workers and agents."""

    def poll(self) -> Sequence[Report]:
        """Return what has arrived, without waiting."""

    def wait(self) -> None:
        """Sleep until something may have arrived, or a deadline may have passed."""


class Decisions:
    """Makes, writes and repeats the decisions of one replica; only its leader has one.

    Before `start`, decisions are neither written nor repeated. An evaluation outside of a run
    does not call `start`.
    """

    def __init__(self) -> None:
        self._files: _DecisionFiles | None = None  # set by `start` until the first stretch
        self._source = ""  # folder of the decisions to repeat, for messages
        self._must_repeat = False  # rollout.replay_schedule is set: repeat all decisions
        self._diverged_file: Path | None = None
        self._drops_failed = True  # drop samples whose reward failed; if False, the run ends
        self._has_judge = False  # rewards are written too: no function runs to repeat them
        self._past = PastDecisions()  # the decisions to repeat
        self._is_written = False  # the journal already has the lines to repeat
        self._journal: Journal | None = None
        self._ahead: deque[Line] = deque()  # lines to repeat in this stretch
        self._stretch = ("", 0)  # its kind, and the version of its weights
        self._counts: Counter[tuple[str, int]] = Counter()  # {stretch: how many have begun}
        self._clock = 0  # engine steps of the stretch
        self._moves_written = 0  # number of moves of the shared book that the journal has
        self._inbox = _Inbox()

    def start(self, cfg: Config, world: World, *, version: int) -> None:
        """Begin to write decisions, and to repeat those that the journal has for later steps.

        This method only reads files. The first stretch writes them, when all replicas have read
        them.

        Args:
            version: version of the weights that the run begins or continues with.
        Raises: OSError.
        """
        if not is_timed(cfg):
            return
        folder = Path(cfg.output_dir) / FOLDER
        self._source = cfg.rollout.replay_schedule or str(folder)
        self._must_repeat = bool(cfg.rollout.replay_schedule)
        self._diverged_file = folder / DIVERGED_FILE
        self._drops_failed = cfg.rewards.on_failure == "drop"
        self._has_judge = cfg.rewards.judge.is_on
        self._files = _DecisionFiles(cfg, world, version=version)

    # ---------------------------------------------------------------- stretches

    def begin(self, kind: str, *, version: int, book: OwnBook, last: int = -1) -> None:
        """Begin a stretch of generation.

        Args:
            kind: `fill` or `evaluate`.
            version: version of the weights.
            book: this replica's book, which repeats the past moves.
            last: last step to wait for.
        """
        if self._files is not None:
            self._past, self._journal, self._is_written = self._files.take()
            self._files = None
            self._moves_written = self._past.begun
            if isinstance(book, SharedBook):
                book.remember(self._past.moves, begun=self._past.begun)
        self._stretch = (kind, version)
        self._clock = 0
        number = self._counts[self._stretch]
        self._counts[self._stretch] += 1
        opening = [kind, version, last]
        lines = self._past.stretches.get((kind, version, number), [])
        self._ahead = deque(lines)
        if lines and lines[0] != opening:
            raise self._divergence(f"the stretch {opening}")
        if lines:
            self._repeat()
            return
        # This stretch is new, so the journal has no lines of later ones. An evaluation does not
        # count, since no later decision depends on it.
        if kind == "fill":
            self._is_written = False
        self._write(opening)

    def count_step(self) -> None:
        """Count an engine step."""
        self._clock += 1

    def end(self) -> None:
        """End the stretch."""
        if not self._ahead:
            self._write(["end", self._clock])
        elif self._due("end"):
            self._repeat()
        else:
            raise self._divergence("the end")
        self._stretch = ("", 0)

    # ---------------------------------------------------------------- timing

    def pauses(self, must_pause: Callable[[], bool]) -> bool:
        """Return whether generation stops now for new weights."""
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
            is_urgent: whether to move even if no move is due, because generation pauses or the
                replica has nothing else to do.
        """
        if not isinstance(book, SharedBook):
            return book.move(move)
        if self._ahead:
            line = self._due("book")
            if line is None:
                return None  # the past run made no move here
            _, _, number, own = line
            # As JSON, which has lists and no tuples.
            if own is not None and own != json.loads(json.dumps(move)):
                raise self._divergence(f"the move {list(move)}")
            self._repeat()
            self._moves_written = number
            tickets = book.play_until(number)
            # A line without a move of this replica brings it no tickets.
            return None if own is None else tickets
        if not (book.is_due or is_urgent):
            return None
        tickets = book.move(move)
        if book.number > self._moves_written:
            is_own = book.number == book.latest_own
            self._write(["book", self._clock, book.number, list(move) if is_own else None])
            self._moves_written = book.number
        return tickets

    def waits(self) -> bool:
        """Return whether a replica that has nothing to do must wait for other replicas.

        It need not wait while it repeats decisions, since it knows the moves of the others.
        """
        if self._ahead:
            self._check_due("nothing to do for the replica", "book", "pause")
        return not self._ahead

    @property
    def is_repeating(self) -> bool:
        """Return whether past decisions are repeated now."""
        return bool(self._ahead)

    def answers(
        self, outside: Outside, awaited: Mapping[Hashable, Episode], *, is_idle: bool
    ) -> list[Answer]:
        """Return the answers of workers that have arrived.

        Args:
            outside: the workers, and the agents.
            awaited: {key: episode} of the episodes that the workers have.
            is_idle: whether the engine has nothing to do; then wait for an answer or a request.
        """
        line = self._due("answers")
        if line is not None:
            _, _, keys, failed, ended = line
            answers = [
                self._repeat_answer(outside, key, awaited, failed=failed, ended=ended)
                for key in keys
            ]
            self._repeat()
            return answers
        if self._ahead:
            if is_idle:
                self._check_due("nothing to do for the engine", "book", "pause", "ask")
            self._inbox.fetch(outside)
            return []
        answers = self._inbox.take(self._prefix, outside, must_wait=is_idle)
        failed = {a.key: [a.failure, a.message[:_MESSAGE_CHARS]] for a in answers if a.failure}
        ended = {}
        for answer in answers:
            if isinstance(answer, SolveResult) and not answer.failure:
                ended[answer.key] = [answer.value, answer.metrics, {}, {}]
            elif isinstance(answer, RewardResult) and not answer.failure and self._has_judge:
                own = [answer.value, answer.metrics, answer.parts, answer.extras]
                ended[answer.key] = own
        # Do not write a failure that ends the run: the next attempt must not repeat it.
        if answers and (self._drops_failed or not failed):
            self._write(["answers", self._clock, [answer.key for answer in answers], failed, ended])
        return answers

    def _repeat_answer(
        self,
        outside: Outside,
        key: Hashable,
        awaited: Mapping[Hashable, Episode],
        *,
        failed: Mapping[Hashable, tuple[Failure, str]],
        ended: Mapping[Hashable, tuple[float | None, dict, dict, dict]],
    ) -> Answer:
        """Return the answer to a key: wait for it, or repeat a failure, an agent's reward, or one
        that a judge may have decided."""
        if key not in awaited:
            raise self._divergence(f"no job {key} at the workers")
        stage = awaited[key].stage
        is_unasked = stage == "solve" or (stage == "score" and self._has_judge)
        if key in failed:
            if not is_unasked:
                self._inbox.discard(key)
            failure, message = failed[key]
            return _RESULTS.get(stage, TurnResult)(key, failure=failure, message=message)
        if is_unasked:
            value, metrics, parts, extras = ended[key]
            if stage == "solve":
                return SolveResult(key, value=value, metrics=metrics)
            return RewardResult(key, value, parts, metrics, extras)
        answer = self._inbox.wait_for(key, outside)
        if answer.failure:
            raise self._divergence(f"a failure of {key}: {answer.failure}: {answer.message}")
        return answer

    # ---------------------------------------------------------------- agents

    def agents_begin(self, waiting: Sequence[str]) -> list[str]:
        """Return the keys of episodes whose agents begin now, for the first time or again.

        Args:
            waiting: keys of the episodes that wait for their agent to begin.
        """
        line = self._due("agents")
        if line is not None:
            self._repeat()
            return line[2]
        keys = [key for key in waiting if key.startswith(self._prefix)]
        if self._ahead or not keys:
            return []
        if self._must_repeat:
            raise self._divergence("agents to start")
        self._inbox.drop_asks(keys)  # of an agent that was lost
        self._write(["agents", self._clock, keys])
        return keys

    def asks(self, awaited: Mapping[Hashable, Episode]) -> list[Ask]:
        """Return the requests of agents, and to the judge, that have arrived, in order.

        Args:
            awaited: {key: episode} of the episodes that the workers have. Requests of others are
                dropped.
        """
        asks = []
        while (line := self._due("ask")) is not None:
            _, _, episode, number, parent, tokens, samples, max_tokens, stop, *how = line
            if episode not in awaited and episode != JUDGE:
                raise self._divergence(f"no agent of {episode}")
            asks.append(
                Ask(episode, number, parent, tuple(tokens), samples, max_tokens, tuple(stop), *how)
            )
            self._repeat()
        if asks or self._ahead:
            return asks
        for ask in self._inbox.take_asks(self._prefix):
            is_awaited = ask.episode in awaited and awaited[ask.episode].stage == "solve"
            if is_awaited or ask.episode in NO_EPISODES:
                asks.append(ask)
                self._write(["ask", self._clock, *vars(ask).values()])
        return asks

    # ---------------------------------------------------------------- results

    def record_groups(self, step: int, groups: Sequence[Group]) -> None:
        """Write digests of this replica's groups of a step, and compare them with past ones.

        A resumed run may get other results, if somebody corrected a reward function or the machine
        differs. It logs this and continues.

        Raises: RuntimeError naming the first group that differs from the run of replay_schedule.
        """
        if self._journal is None:
            return
        own = {group.key: _digest(group) for group in groups}
        past = self._past.digests.get(step, own)
        differing = [key for key in past | own if past.get(key) != own.get(key)]
        if differing:
            key = differing[0]
            what = (
                f"group {key} of step {step} has the digest {past.get(key)} in that run and "
                f"{own.get(key)} here"
            )
            if self._must_repeat:
                raise RuntimeError(f"{self._source}: {what}. {_CAUSES}")
            log.warning("%s: %s. %s; the run continues", self._source, what, _CAUSES)
        self._write(["groups", step, own])

    # ---------------------------------------------------------------- lines

    def _write(self, line: Line) -> None:
        if self._journal is not None and not self._is_written:
            self._journal.append(row_of(line))

    def _due(self, kind: str) -> Line | None:
        """Return the next line to repeat if it is of this kind and due now, else None."""
        if not self._ahead:
            return None
        line = self._ahead[0]
        # This decision was due earlier, and this run did not need it then.
        if line[1] < self._clock:
            raise self._divergence("another decision")
        return line if line[0] == kind and line[1] == self._clock else None

    def _check_due(self, here: str, *kinds: str) -> None:
        """Raise RuntimeError unless a line of one of these kinds is due now."""
        kind, clock, *_ = self._ahead[0]
        if kind not in kinds or clock != self._clock:
            raise self._divergence(here)

    @property
    def _prefix(self) -> str:
        return _PURPOSE.get(self._stretch[0], "")

    def _repeat(self) -> None:
        """Remove the line that was repeated; after the last one, make and write new decisions."""
        line = self._ahead.popleft()
        self._write(line)
        if not self._ahead and line[0] != "end":
            self._is_written = False

    def _divergence(self, here: str) -> RuntimeError:
        """Return the error of a run that cannot repeat its decisions.

        Args:
            here: what this run has in place of the next decision.
        """
        kind, version = self._stretch
        advice = ""
        if not self._must_repeat and self._diverged_file is not None:
            write_file(self._diverged_file, "", within=self._diverged_file.parents[1])
            advice = "; start again: the next start makes new decisions"
        past = json.dumps(self._ahead[0]) if self._ahead else "nothing"
        return RuntimeError(
            f"{self._source}: {kind} with the weights of step {version}, after {self._clock} "
            f"engine steps: that run has {past:.300}, this run has {here}. {_CAUSES}{advice}"
        )


class _Inbox:
    """Answers of workers and requests of agents that have arrived and that nobody has taken yet."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, Answer] = {}
        self._asks: list[Ask] = []
        self._discarded: set[Hashable] = set()  # drop the answers to these keys when they arrive

    def fetch(self, outside: Outside) -> None:
        """Store what has arrived, without waiting."""
        for report in outside.poll():
            if isinstance(report, Ask):
                self._asks.append(report)
            elif report.key in self._discarded:
                self._discarded.remove(report.key)
            else:
                self._answers[report.key] = report

    def take(self, prefix: str, outside: Outside, *, must_wait: bool) -> list[Answer]:
        """Remove and return the answers to keys that begin with a prefix.

        Args:
            must_wait: whether to wait first, if there are neither answers nor requests.
        """
        if must_wait and not self._keys(prefix) and not self._asks_of(prefix):
            outside.wait()
        self.fetch(outside)
        return [self._answers.pop(key) for key in self._keys(prefix)]

    def take_asks(self, prefix: str) -> list[Ask]:
        """Remove and return the requests of episodes whose keys begin with a prefix, and those of
        no episode."""
        taken = self._asks_of(prefix)
        self._asks = [ask for ask in self._asks if ask not in taken]
        return taken

    def drop_asks(self, episodes: Collection[str]) -> None:
        """Remove the requests of episodes."""
        self._asks = [ask for ask in self._asks if ask.episode not in episodes]

    def _keys(self, prefix: str) -> list[Hashable]:
        return [key for key in self._answers if str(key).startswith(prefix)]

    def _asks_of(self, prefix: str) -> list[Ask]:
        return [ask for ask in self._asks if ask.episode.startswith((prefix, *NO_EPISODES))]

    def wait_for(self, key: Hashable, outside: Outside) -> Answer:
        """Wait for the answer to a key; remove and return it."""
        self.fetch(outside)
        while key not in self._answers:
            outside.wait()
            self.fetch(outside)
        return self._answers.pop(key)

    def discard(self, key: Hashable) -> None:
        """Drop the answer to a key, now or when it arrives."""
        if self._answers.pop(key, None) is None:
            self._discarded.add(key)


class _DecisionFiles:
    """The files of a run's decisions, read at start.

    Args:
        version: version of the weights that the run begins or continues with.
    """

    def __init__(self, cfg: Config, world: World, *, version: int):
        self._cfg = cfg
        self._world = world
        self._version = version
        self._folder = Path(cfg.output_dir) / FOLDER
        self._has_diverged = (self._folder / DIVERGED_FILE).exists()
        replicas = max(1, world.num_replicas)
        files = []
        for replica in range(replicas):
            journal = journal_of(self._folder, replica=replica, replicas=replicas)
            files.append(read_lines(journal)[0] if journal.path.exists() else [])
            if replica == world.replica:
                self._journal = journal
        self._files = without_lost_moves(files)

    def take(self) -> tuple[PastDecisions, Journal, bool]:
        """Cut the journal to the lines that stay valid, and return the decisions to repeat.

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
                log.info("%s: later steps get new decisions: %s", path, reason)
        # Cut off the decisions after the checkpoint: this start makes new ones.
        if not is_known:
            files = [until_version(lines, self._version) for lines in files]
        own = files[replica]
        if must_repeat:
            files = check_schedule(cfg, tokens_per_microbatch=tokens)
        make_folder(self._folder, within=self._folder.parent)
        # `own` may be shorter than the journal: a line about a lost move is cut off too.
        position = itertools.count()
        self._journal.keep(lambda row: next(position) < len(own))
        if self._has_diverged:
            remove(self._folder / DIVERGED_FILE, within=self._folder.parent)
        written_facts = facts_of(own)
        if not written_facts or differences(written_facts[-1], now):
            self._journal.append(row_of(["run", now]))
        past = past_decisions(files, replica=replica, version=self._version)
        return past, self._journal, is_known

    def _reason_to_decide_again(self, own: Sequence[Line], now: dict[str, Any]) -> str:
        """Return why this run cannot repeat the later decisions; empty if it can."""
        if self._has_diverged:
            return "the previous start could not repeat the decisions"
        for difference in differences(facts_of(own)[-1], now):
            return str(difference)
        return repeat_problem(self._cfg)


def _digest(group: Group) -> str:
    """Return a digest of a group: tokens, logprobs, versions and rewards, bit for bit."""
    digest = hashlib.sha256()
    for sample in group.all_samples:
        for own in sample.traces:
            for column in (own.tokens, own.rollout_logprobs, own.policy_versions):
                digest.update(column.contiguous().numpy().tobytes())
            digest.update(repr((own.is_truncated, own.earned)).encode())
        digest.update(repr((sample.reward.value, sample.reward.failure)).encode())
    return digest.hexdigest()[:16]
