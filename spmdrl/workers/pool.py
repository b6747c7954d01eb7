"""Score responses and play environments in worker processes: users' code cannot block a run.

Every call ends in exactly one RewardResult or TurnResult, see `messages`. If user code raises,
exits, crashes, hangs or returns a wrong value, only its sample or episode fails, see `job_queue`.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from spmdrl.agents.containers import Sweeper, make_labels
from spmdrl.config import Config
from spmdrl.data.tasks import is_generated
from spmdrl.environments.protocol import Response
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.rewards.samples import SCOPES, RewardList, RewardSample, Scope, TrainerState
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.types import Prompt
from spmdrl.workers.agent_queue import AgentQueue
from spmdrl.workers.job_queue import JobQueue, wait_for_any
from spmdrl.workers.joining import Call, ResultJoiner
from spmdrl.workers.messages import (
    Done,
    Open,
    Respond,
    RewardResult,
    Setup,
    Solve,
    SolveResult,
    SourceSetup,
    TurnResult,
    Work,
)
from spmdrl.workers.worker_process import QueuedJob

PoolResult = RewardResult | TurnResult | SolveResult


class RewardPool(JobQueue):
    """The worker processes of one engine replica. Not thread-safe.

    Only `start`, `wait` and `score_step` block, and not forever.

    If all rewards come from models or from an environment, no function scores a sample, and its
    value is 0. If there is no environment either, there are no workers.

    Args:
        cfg: its rewards.*, environments, and data.* (for sources and graders of generated tasks)
            are used.
        steps_per_epoch: part of the TrainerState that functions may take.
        environ: environment variables of the workers.
    Raises (on construction): Refusal if nothing scores the samples of a source.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        steps_per_epoch: float = math.inf,
        environ: Mapping[str, str] = MappingProxyType({}),
    ):
        rewards = cfg.rewards
        functions = cfg.reward_functions
        models = reward_models(functions)  # trainers compute these
        weights = cfg.reward_weights
        own = [i for i in range(len(functions)) if i not in models]
        names = part_names(functions)
        sources = _source_setups(cfg, names)
        environments = cfg.environment_fields()
        setup = Setup(
            functions={names[i]: functions[i] for i in own},
            sources=sources,
            environments={field: dict(options) for field, options in environments.items()},
            weights=tuple(weights[i] for i in own),
            scope=rewards.scope,
            concurrency=rewards.concurrency,
            retries=rewards.retries,
            timeout_s=rewards.timeout_s,
            memory_gib=rewards.worker_memory_gib,
            environ=dict(environ),
        )
        is_needed = bool(own or environments or any(source.is_own_grader for source in sources))
        super().__init__(
            setup, workers=rewards.workers if is_needed else 0, timeout_s=rewards.timeout_s
        )
        self._container = cfg.rollout.agent_container
        self._labels = make_labels(cfg.output_dir)
        self._sweeper: Sweeper | None = None
        self._agents = AgentQueue(cfg, self._labels) if cfg.rollout.runs_agent else None
        self._unpolled: list[PoolResult] = []
        self._max_steps = cfg.steps
        self._steps_per_epoch = steps_per_epoch
        # No function needs to apply to a sample that a model or an environment scores.
        self._are_scored = [
            own.is_own_grader or bool(cfg.functions_of(source))
            for own, source in zip(sources, cfg.data.all_sources())
        ]
        otherwise = models or cfg.rollout.has_agent
        scored = [i for i, source in enumerate(sources) if otherwise or source.environment]
        self._joiner = ResultJoiner(otherwise_scored=scored)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of calls that are submitted and not done."""
        return sum(JobQueue.__len__(queue) for queue in self._queues)

    def start(self) -> None:
        """Start the workers and wait until they have loaded the setup.

        Raises: Refusal if something cannot be loaded.
        """
        super().start()
        if self._agents is not None:
            if self._container.image:
                self._sweeper = Sweeper(self._container, self._labels)
            self._agents.start()

    def close(self) -> None:
        """End all workers; jobs that are not done are dropped."""
        super().close()
        if self._agents is not None:
            self._agents.close()
        if self._sweeper is not None:
            self._sweeper.close()

    @property
    def _queues(self) -> list[JobQueue]:
        return [self] if self._agents is None else [self, self._agents]

    @property
    def environments(self) -> dict[str, dict[str, Any]]:
        """{config field: `EnvironmentServer.facts` of its environment}, after `start`."""
        return self.facts.get("environments", {})

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes in which functions score samples. This starts the workers, which know them."""
        if not self._num_workers:
            return ()
        if not self.facts:
            self.start()
        return tuple(scope for scope in SCOPES if scope in self.facts["scopes"])

    @property
    def _own_scopes(self) -> tuple[Scope, ...]:
        """The scopes in which a sample is scored before its step is complete."""
        return tuple(scope for scope in self.scopes if scope != "step")

    def submit(
        self,
        key: Hashable,
        *,
        prompt: Prompt,
        response_text: str,
        response_tokens: list[int],
        truncated: bool,
        group: Hashable = None,
        position: int = 0,
        step: int = 0,
    ) -> None:
        """Submit one response; `poll` returns its RewardResult with this `key`.

        Args:
            group: name of its group, which is scored after `close_group`; None: the group has only
                this response.
            position: its place in the group; functions of groups get samples in this order.
            step: of its prompt.
        Raises: Refusal if the data row cannot be sent to another process.
        """
        if not self._own_scopes:
            self._unpolled.append(RewardResult(key, 0.0))
            return
        state = self.state(step)
        sample = RewardSample(
            prompt.row, response_text, response_tokens, truncated, state, prompt.source
        )
        is_alone = group is None
        if "group" not in self.scopes:
            group = None
        elif is_alone:
            group = ("alone", key)
        call = self._joiner.add(key, sample, group=group, what=prompt.origin, position=position)
        if "sample" in self.scopes:
            self._send(call, sample, what=call.what)
        if is_alone:
            self.close_group(group)

    def close_group(self, group: Hashable) -> None:
        """Score a group. All its responses must be submitted.

        Raises: Refusal as `submit`.
        """
        if "group" in self.scopes and (found := self._joiner.close(group)) is not None:
            call, samples = found
            self._send(call, samples, what=call.what)

    def score_step(
        self, samples: Mapping[str, RewardSample], rewards: Mapping[str, RewardResult], *, what: str
    ) -> dict[str, RewardResult]:
        """Let the functions of scope `step` score all samples of a step, and wait for them.

        Results of other calls that arrive meanwhile are kept for `poll`.

        Args:
            samples: of the step, by key.
            rewards: what the functions of other scopes gave them, by key.
            what: origin of the samples, for messages.
        Returns: {key: the reward of all functions}.
        Raises: Refusal as `submit` and `poll`; RuntimeError as `poll`.
        """
        call = Call("step", tuple(samples), what)
        self._send(call, RewardList("step", tuple(samples.values())), what=what)
        while True:
            for job, done in self.take():
                if job.key is call:
                    sources = {key: sample.source for key, sample in samples.items()}
                    return self._joiner.with_step(call, done, rewards=rewards, sources=sources)
                self._unpolled += self._read(job, done)
            super().wait()

    def open(self, key: Hashable, *, row: dict, seed: int = 0, source: int = 0) -> None:
        """Begin an episode; `poll` returns its TurnResult with this `key`.

        Args:
            row: the data row.
            seed: of the episode's randomness, for environments that ask for it.
            source: of the row, see `Prompt`; it says which environment to play.
        Raises: Refusal if the data row cannot be sent to another process.
        """
        field = self._setup.sources[source].environment
        assert field, f"source {source} has no environment"
        self._send(key, Open(field, row, seed), what="a data row")

    def turn(
        self, key: Hashable, *, environment: bytes, response: Response, source: int = 0
    ) -> None:
        """Play a turn; `poll` returns its TurnResult with this `key`.

        Args:
            environment: of the episode's last TurnResult.
            response: what the policy has sampled since then.
            source: as in `open`.
        """
        field = self._setup.sources[source].environment
        self._send(key, Respond(field, environment, response), what="a response")

    def solve(
        self,
        key: Hashable,
        *,
        row: dict,
        seed: int,
        source: int = 0,
        purpose: str,
        base_url: str,
        api_key: str,
    ) -> None:
        """Run the agent for one episode, once fewer than rollout.agents_at_once of its purpose run;
        `poll` returns its SolveResult with this `key`. Its failure is LOST if the worker ended.

        Args:
            row: the data row.
            seed: of the episode's randomness.
            source: of the row, see `Prompt`.
            purpose: see `serve_agents`.
            base_url: address of the gateway, `Gateway.address`.
            api_key: of the episode, `Gateway.open`.
        Raises: Refusal if the data row cannot be sent to another process.
        """
        assert self._agents is not None, "the run has no agent"
        work = Solve(
            row,
            seed,
            needs_reward=not self._are_scored[source],
            base_url=base_url,
            api_key=api_key,
            purpose=purpose,
        )
        _put(self._agents, key, work, what="a data row")

    def serve_agents(self, purpose: str) -> None:
        """Note that the policy answers agents of one purpose from now on, `Draw.purpose`; of none
        if it is empty. Others do not start, and their time stands still."""
        if self._agents is not None:
            self._agents.serve(purpose)

    def poll(self) -> list[PoolResult]:
        """Return the available results, without waiting.

        Raises: Refusal as `start`; RuntimeError if workers cannot be started again.
        """
        results = self._unpolled
        self._unpolled = []
        for job, done in self.take():
            results += self._read(job, done)
        for job, done in self._agents.take() if self._agents is not None else ():
            results.append(_solve_result(job, done))
        return results

    def wait(self, *, also: Iterable[int] = ()) -> None:
        """Wait as JobQueue does, but not if there is something to poll."""
        if not self._unpolled:
            wait_for_any(self._queues, also=also)

    def _read(self, job: QueuedJob, done: Done) -> Sequence[RewardResult | TurnResult]:
        if not isinstance(job.key, Call):  # of an episode
            return [_turn_result(job, done)]
        return self._joiner.add_result(
            job.key, done, scopes=self._own_scopes, awaits_step="step" in self.scopes
        )

    def state(self, step: int) -> TrainerState:
        """Return the state of the run at a step."""
        epochs = math.ceil(self._max_steps / self._steps_per_epoch)
        return TrainerState(step, self._max_steps, step / self._steps_per_epoch, epochs)

    def _send(self, key: Hashable, work: Work, *, what: str) -> None:
        _put(self, key, work, what=what)


def _put(queue: JobQueue, key: Hashable, work: Work, *, what: str) -> None:
    kinds = (pickle.PicklingError, TypeError, AttributeError)
    with refusing(f"{what} cannot be sent to a worker process", *kinds):
        queue.put(key, work)


def _source_setups(cfg: Config, names: Sequence[str]) -> tuple[SourceSetup, ...]:
    """Return how the rows of each source are scored and played.

    Args:
        names: of the reward functions.
    Raises: Refusal if nothing scores the rows of a source.
    """
    by_spec = dict(zip(cfg.reward_functions, names))
    sources = cfg.data.all_sources()
    differ = any(source.rewards for source in sources)
    found = []
    for source, (field, environment) in zip(sources, cfg.environments()):
        functions = cfg.functions_of(source)
        is_task = is_generated(source.path)
        if not (functions or is_task or environment or cfg.rollout.has_agent):
            raise Refusal(
                f"rewards.functions: is empty, and {source.path} has neither an environment, an "
                "agent nor, as a generated task, a grader"
            )
        if cfg.rewards.functions and not source.rewards:
            # By position, because the config may list one function twice.
            own = tuple(names[: len(functions)])
        else:
            own = tuple(by_spec[spec] for spec in functions)
        found.append(
            SourceSetup(
                task=source.path if is_task else "",
                task_options=dict(source.task_options),
                is_own_grader=is_task and not functions,
                applies=own if differ else None,
                environment=field if environment else "",
            )
        )
    return tuple(found)


def _turn_result(job: QueuedJob, done: Done) -> TurnResult:
    result = done.result if isinstance(done.result, TurnResult) else TurnResult(None)
    return replace(
        result, key=job.key, seconds=done.seconds, failure=done.failure, message=done.message
    )


def _solve_result(job: QueuedJob, done: Done) -> SolveResult:
    result = done.result if isinstance(done.result, SolveResult) else SolveResult(None)
    return replace(
        result, key=job.key, seconds=done.seconds, failure=done.failure, message=done.message
    )
