"""Runs of agents in one process. The engine draws by arithmetic, and agents are generators.

What an agent asks reaches the loop late by chance. The logprobs that the engine reports depend on
which requests it computes together, so that runs with other timing have other numbers.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.agents.messages import NO_PARENT, Answer, Ask
from spmdrl.config import Config
from spmdrl.data.hashed import hashed
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.engine.protocol import Completion, Request
from spmdrl.rollout import sampled_source
from spmdrl.rollout.sampled_source import SampledSource
from spmdrl.types import Rollouts
from spmdrl.workers.messages import LOST, RewardResult, SolveResult
from spmdrl.world.spans import Spans
from tests.helpers.built import changed, made
from tests.helpers.drawn import completion

STOP = 1
VOCABULARY = 20


class Killed(BaseException):
    """The process is killed here."""


@dataclass(frozen=True)
class Call:
    """What an agent of these tests asks for."""

    tokens: tuple[int, ...]
    parent: int = NO_PARENT
    samples: int = 1
    max_tokens: int = 6


End = tuple[float | None, dict[str, float]]
Agent = Callable[[int], Generator[list[Call], list[Answer], End]]
"""A function of the episode's seed. It yields calls, which it makes at once, and gets an answer to
each; it returns its reward and its metrics."""


def wanderer(seed: int) -> Generator[list[Call], list[Answer], End]:
    """Ask, continue twice at once, sum up what came, and draw two samples of that."""
    begin = (3 + seed % 5, 4)
    (first,) = yield [Call(begin)]
    both = yield [Call((5,), first.nodes[0]), Call((6, 7), first.nodes[0], max_tokens=3)]
    summary = (8, *(own.tokens[0][0] for own in both))
    (last,) = yield [Call(summary, samples=2)]
    count = sum(map(len, last.tokens))
    if count % 2:
        yield [Call((9,), last.nodes[1])]
    return count % 7 / 7, {"calls": 3.0 + count % 2}


class Engine:
    """Draws a token a step for each of the first requests, by arithmetic.

    Args:
        kill_at: step at which the process is killed; 0 for none.
        is_invariant: whether logprobs do not depend on the requests that are computed together.
    """

    def __init__(self, *, max_num_seqs: int = 3, kill_at: int = 0, is_invariant: bool = False):
        self.version = 0
        self.lend_memory = lambda: None
        self.seen: list[Request] = []
        self.num_steps = 0
        self._max = max_num_seqs
        self._kill_at = kill_at
        self._is_invariant = is_invariant
        self._open: dict[str, tuple[Request, list[int], list[float], list[int]]] = {}

    def add(self, request: Request) -> None:
        assert request.key not in self._open and request.max_tokens > 0
        self.seen.append(request)
        self._open[request.key] = (request, [], [], [])

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Completion]:
        self.num_steps += 1
        if self.num_steps == self._kill_at:
            raise Killed
        together = list(self._open.values())[: self._max]
        finished = []
        for request, tokens, logprobs, versions in together:
            number = hashed(f"{request.seed}/{len(tokens)}/{request.prompt[-3:]}/{self.version}")
            tokens.append(STOP if number % 5 == 0 else 2 + number % (VOCABULARY - 2))
            computed = [request] if self._is_invariant else [own[0] for own in together]
            logprobs.append(-sum((one.seed or 0) % 97 for one in computed) / 97 - len(tokens))
            versions.append(self.version)
            if tokens[-1] == STOP or len(tokens) == request.max_tokens:
                finished.append(self._completion(request.key, is_finished=True))
                del self._open[request.key]
        return finished

    def _completion(self, key: str, *, is_finished: bool) -> Completion:
        _, tokens, logprobs, versions = self._open[key]
        is_cut = is_finished and tokens[-1] != STOP
        return completion(
            tokens, key=key, logprobs=logprobs, versions=versions, is_truncated=is_cut
        )

    def unfinished(self) -> list[Completion]:
        return [self._completion(key, is_finished=False) for key in self._open]

    def tokens_so_far(self, keys: Collection[str]) -> dict[str, list[int]]:
        return {key: own[1] for key, own in self._open.items() if key in keys}

    def abort_all(self) -> list[Completion]:
        aborted = self.unfinished()
        self._open = {}
        return aborted

    def weights_changed(self, version: int) -> None:
        self.version = version


@dataclass
class _Running:
    """An agent and what it waits for."""

    steps: Generator[list[Call], list[Answer], End]
    num_calls: int = 0
    answers: dict[int, Answer | None] = field(default_factory=dict)


class Agents:
    """Stands in for the pool and the gateway: runs agents in this process.

    Args:
        late: seed of the chance by which requests and ends come late; None: they come at once.
        score: reward of a response's text; None: no function scores.
        losses: how often the worker of some agents ends when they have their first answers.
        streams: whether agents read along while their answers are drawn.
    """

    address = "http://127.0.0.1:1/v1"
    scopes: tuple[str, ...] = ()

    def __init__(
        self,
        agent: Agent,
        *,
        late: int | None = None,
        score: Callable[[str], float] | None = None,
        scopes: tuple[str, ...] = ("sample",),
        losses: int = 0,
        streams: bool = False,
    ):
        self.agent = agent
        self.served: list[str] = []
        self.begun: list[str] = []
        self.score = score
        self.scopes = scopes if score else ()
        self.started = 0
        self.waited = 0
        self.is_closed = False
        self.answered: list[Answer] = []
        self.streams: dict[tuple[str, int], Counter[int]] = {}
        self.shown: dict[tuple[str, int, int], list[list[int]]] = {}
        self._streams = streams
        self._late = None if late is None else random.Random(late)
        self._running: dict[str, _Running] = {}
        self._losses = losses
        self._asks: list[Ask] = []
        self._results: list[RewardResult | SolveResult] = []
        self._groups: dict[str, list[RewardResult]] = {}
        self._is_urgent = False

    # ------------------------------------------------------------ the gateway's methods

    def start(self) -> None:
        self.started += 1

    def fileno(self) -> int:
        return 77

    def open(self, episode: str) -> str:
        for own in (self.streams, self.shown):
            for key in [key for key in own if key[0] == episode]:
                del own[key]
        self._asks = [ask for ask in self._asks if ask.episode != episode]
        return f"key of {episode}"

    def end(self, episode: str) -> None:
        self._running.pop(episode, None)

    def close(self) -> None:
        self.is_closed = True

    def poll(self) -> list[Any]:
        return self._some(self._asks)

    def show(self, episode: str, id: int, sample: int, tokens: list[int]) -> None:
        assert tokens
        self.streams[episode, id][sample] += len(tokens)
        self.shown.setdefault((episode, id, sample), []).append(tokens)

    def answer(self, answer: Answer) -> None:
        self.answered.append(answer)
        self.streams.pop((answer.episode, answer.id), None)
        running = self._running.get(answer.episode)
        if running is None or answer.id not in running.answers:
            return
        running.answers[answer.id] = answer
        if None not in running.answers.values():
            answers = [running.answers[number] for number in sorted(running.answers)]
            self._go_on(answer.episode, answers)

    # ------------------------------------------------------------ the pool's methods

    def serve_agents(self, purpose: str) -> None:
        self.served.append(purpose)

    def solve(
        self,
        key: str,
        *,
        row: dict,
        seed: int,
        source: int,
        purpose: str,
        base_url: str,
        api_key: str,
    ) -> None:
        assert api_key == f"key of {key}" and base_url == self.address
        assert key.startswith(purpose) and self.served[-1] == purpose
        self.begun.append(key)
        self._running[key] = _Running(self.agent(seed))
        self._go_on(key, None)

    def submit(self, key: str, *, response_text: str, group: str, **_: Any) -> None:
        assert self.score is not None
        result = RewardResult(key, self.score(response_text), metrics={"scored": 1.0})
        if "group" in self.scopes:
            self._groups.setdefault(group, []).append(result)
        else:
            self._results.append(result)

    def close_group(self, group: str) -> None:
        self._results += self._groups.pop(group, [])

    def poll_results(self) -> list[Any]:
        return self._some(self._results)

    def wait(self, *, also: Sequence[int]) -> None:
        assert self._asks or self._results, "nothing will ever come"
        self.waited += 1
        self._is_urgent = True

    # ------------------------------------------------------------ chance

    def _some(self, waiting: list[Any]) -> list[Any]:
        """Remove and return what has arrived by now."""
        taken = []
        for one in list(waiting):
            if self._late is None or self._is_urgent or self._late.random() < 0.3:
                self._is_urgent = False
                taken.append(one)
                waiting.remove(one)
        if self._late is not None:
            self._late.shuffle(taken)
        return taken

    def _go_on(self, key: str, answers: list[Answer] | None) -> None:
        running = self._running[key]
        if answers and hashed(key) % 2 and self.begun.count(key) <= self._losses:
            del self._running[key]
            message = "the worker process ended with signal 9"
            self._results.append(SolveResult(key, failure=LOST, message=message))
            return
        try:
            calls = running.steps.send(answers) if answers else next(running.steps)
        except StopIteration as stop:
            value, metrics = stop.value
            self._results.append(SolveResult(key, value=value, metrics=metrics))
            return
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._results.append(SolveResult(key, failure="error", message=message))
            return
        running.answers = {}
        for call in calls:
            number = running.num_calls
            running.num_calls += 1
            running.answers[number] = None
            if self._streams:
                self.streams[key, number] = Counter()
            stop = ()
            own = (key, number, call.parent, call.tokens, call.samples, call.max_tokens, stop)
            self._asks.append(Ask(*own))


class _Pool:
    """The pool's side of `Agents`, in the shape of RewardPool."""

    def __init__(self, agents: Agents):
        self._agents = agents
        self.poll = agents.poll_results
        for name in ("solve", "serve_agents", "submit", "close_group", "wait"):
            setattr(self, name, getattr(agents, name))

    @property
    def scopes(self) -> tuple[str, ...]:
        return self._agents.scopes

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def world_of(cfg: Config, *, is_updated: Callable[[int], bool]) -> Any:
    """Return the world of the one rank of the one replica."""
    return SimpleNamespace(
        cfg=cfg,
        rank=0,
        inference_ranks=[0],
        replica_rank=0,
        is_inference=True,
        replica=0,
        num_replicas=1,
        watch=_Watch(),
        tokens_per_microbatch=cfg.batch.tokens_per_microbatch,
        is_updated=is_updated,
    )


class _Watch:
    """Names no waits."""

    totals: dict[str, float] = {}
    spans = Spans()

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        yield

    wait = phase


def config_of(model: Path, out: Path, **changes: Any) -> Config:
    """Return the config of a run of agents."""
    cfg = made(
        output_dir=str(out),
        steps=3,
        lag=0,
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=str(model)),
        data=dict(train="task:addition", eval="task:addition", size=32, eval_size=2),
        batch=dict(prompts_per_step=2, group_size=2, tokens_per_microbatch=64),
        sampling=dict(max_response_tokens=24),
        rewards=dict(on_failure="drop"),
        rollout=dict(agent="agent.py:solve", schedule=dict(balance="even")),
    )
    return changed(cfg, **changes)


@dataclass
class Result:
    """What a run made."""

    shares: dict[int, Rollouts] = field(default_factory=dict)
    evaluations: dict[int, Any] = field(default_factory=dict)
    states: dict[int, Any] = field(default_factory=dict)
    agents: Agents | None = None
    engine: Engine | None = None

    def numbers(self) -> list[str]:
        """Return all that a run is compared by, as text: a NaN equals no other."""
        found = []
        for step, share in sorted(self.shares.items()):
            columns = [share.tokens, share.response_mask, share.rollout_logprobs]
            columns += [share.policy_versions, *vars(share.scalars).values()]
            found.append(f"step {step}: {[column.tolist() for column in columns]}")
        return [*found, *(f"{step}: {own}" for step, own in sorted(self.evaluations.items()))]


class Runs:
    """Runs with a model folder of their own; each keeps its decisions in its output_dir."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder = folder
        self.model = model
        self._monkeypatch = monkeypatch

    def run(
        self,
        name: str,
        agent: Agent | None = wanderer,
        *,
        late: int | None = None,
        kill_at: int = 0,
        resumed: Result | None = None,
        step: int = 0,
        evaluates: bool = False,
        is_invariant: bool = False,
        agents: Agents | None = None,
        **changes: Any,
    ) -> Result:
        """Run to the end, or until the engine is killed.

        Args:
            agent: None where none may run.
            late: see Agents.
            kill_at: step of the engine at which the process is killed.
            resumed: a run whose checkpoint of `step` this one continues.
            evaluates: whether to evaluate after each step.
            is_invariant: see Engine.
            changes: of the config.
        """
        cfg = config_of(self.model, self.folder / name, **changes)
        result = Result()
        result.agents = agents or Agents(agent or _nobody, late=late)
        result.engine = engine = Engine(kill_at=kill_at, is_invariant=is_invariant)
        self._monkeypatch.setattr(
            sampled_source, "RewardPool", lambda *_, **__: _pool_of(result.agents)
        )
        self._monkeypatch.setattr(sampled_source, "Gateway", lambda *_: result.agents)
        updates = random.Random(late)
        world = world_of(cfg, is_updated=lambda version: updates.random() < 0.1)
        source = SampledSource(cfg, world, tokenizer=load_tokenizer(cfg))
        with contextlib.suppress(Killed):
            engine.weights_changed(step)
            if resumed is not None:
                source.load_state_dict([copy.deepcopy(resumed.states[step])], step)
            source.start(step)
            for now in range(step, cfg.steps):
                source.generate(engine, until=now)
                share = result.shares[now] = source.take(now)
                source.observe(SimpleNamespace(scalars=share.scalars), step=now)
                source.generate(engine, until=now + cfg.lag)
                engine.weights_changed(now + 1)
                if evaluates:
                    samples = source.evaluate(engine, step=now + 1)
                    result.evaluations[now + 1] = [
                        (s.reward.value, [t.tokens.tolist() for t in s.traces]) for s in samples
                    ]
                result.states[now + 1] = copy.deepcopy(source.state_dict())
            source.close()
        return result

    def replayed(self, name: str, **changes: Any) -> dict[str, Any]:
        """Return changes of the config by which a run repeats another one's decisions."""
        rollout = changed(config_of(self.model, self.folder), **changes).rollout
        replay = str(self.folder / name)
        return changes | {"rollout": changed(rollout, replay_schedule=replay)}

    def decisions(self, name: str) -> list[str]:
        """Return the lines of a run's schedule, without seals and facts."""
        (path,) = (self.folder / name / "schedule").glob("*.jsonl")
        lines = path.read_text().splitlines()
        return [line.partition(', "sha256"')[0] for line in lines if '"run"' not in line]


def _nobody(seed: int) -> Generator[list[Call], list[Answer], End]:
    raise AssertionError("no agent may run")
    yield []


def _pool_of(agents: Agents | None) -> Any:
    assert agents is not None
    return _Pool(agents)
