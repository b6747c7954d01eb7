"""Score responses and play environments in worker processes: no user code can stall us.

Every call ends in exactly one RewardResult or TurnResult, see `messages`. User code that raises,
exits, crashes, hangs or returns nonsense costs its own sample or episode and nothing else: the
worker is replaced and the calls behind it are served by another.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmdrl.config import Config
from spmdrl.data.tasks import is_generated
from spmdrl.environments.protocol import Response
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.rewards.samples import SCOPES, RewardList, RewardSample, Scope, TrainerState
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.types import Prompt
from spmdrl.workers.job_queue import JobQueue
from spmdrl.workers.joining import Call, Joining
from spmdrl.workers.messages import (
    Done,
    Open,
    Respond,
    RewardResult,
    Setup,
    SourceSetup,
    TurnResult,
    Work,
)
from spmdrl.workers.worker_process import QueuedJob


class RewardPool(JobQueue):
    """Worker processes of one engine replica. For one thread; nothing in it blocks but
    `start`, `wait`, `results` and `drain`, all bounded. Where models are the only rewards it has
    no workers, and every sample's value is 0. So is it where an environment's rewards are all.

    Args:
        cfg: rewards.*, environments, and data.* for its sources and the graders of generated tasks.
        steps_per_epoch: for the state of the run that functions may ask for.
    Raises (on construction): Refusal when there is nothing to score with.
    """

    def __init__(self, cfg: Config, *, steps_per_epoch: float = math.inf):
        rewards = cfg.rewards
        functions = cfg.reward_functions
        models = reward_models(functions)  # the trainers'
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
        )
        is_needed = bool(own or environments or any(source.is_own_grader for source in sources))
        super().__init__(
            setup, workers=rewards.workers if is_needed else 0, timeout_s=rewards.timeout_s
        )
        self._early: list[RewardResult | TurnResult] = []  # to be polled
        self._max_steps = cfg.steps
        self._steps_per_epoch = steps_per_epoch
        # Models, or an environment, score every sample: no function need apply to its row.
        scored = [i for i, source in enumerate(sources) if models or source.environment]
        self._joining = Joining(otherwise_scored=scored)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def environments(self) -> dict[str, dict[str, Any]]:
        """Return {config field: what conversations with its environment take}, after `start`; see
        `EnvironmentServer.facts`."""
        return self.facts.get("environments", {})

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Return in how many at once functions score samples; starts the workers, who know."""
        if not self._num_workers:
            return ()
        if not self.facts:
            self.start()
        return tuple(scope for scope in SCOPES if scope in self.facts["scopes"])

    @property
    def _own_scopes(self) -> tuple[Scope, ...]:
        """Return those in which a sample is scored before its step is whole."""
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
        """Hand in one response; its RewardResult comes out of `poll` or `drain` under `key`.

        Args:
            group: name of its group, which functions of lists score after `close_group`; None: it
                is one by itself.
            position: its place in the group, whose functions get samples in this order.
            step: whose prompt it answers.
        Raises: Refusal when the data row cannot be sent to another process.
        """
        if not self._own_scopes:
            self._early.append(RewardResult(key, 0.0))
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
        call = self._joining.add(key, sample, group=group, what=prompt.origin, position=position)
        if "sample" in self.scopes:
            self._send(call, sample, what=call.what)
        if is_alone:
            self.close_group(group)

    def close_group(self, group: Hashable) -> None:
        """Say that all responses of a group are handed in.

        Raises: Refusal as `submit`.
        """
        if "group" in self.scopes and (found := self._joining.close(group)) is not None:
            call, samples = found
            self._send(call, samples, what=call.what)

    def score_step(
        self, samples: Mapping[str, RewardSample], rewards: Mapping[str, RewardResult], *, what: str
    ) -> dict[str, RewardResult]:
        """Have functions of whole steps score samples in one call, wait for it, and return the
        rewards with what they add. Other results stay to be polled.

        Args:
            samples: of the step, by key.
            rewards: of them so far.
            what: where they are from, for messages.
        Raises: Refusal as `submit`; as `poll`.
        """
        call = Call("step", tuple(samples), what)
        self._send(call, RewardList("step", tuple(samples.values())), what=what)
        while True:
            for job, done in self.take():
                if job.key is call:
                    sources = {key: sample.source for key, sample in samples.items()}
                    return self._joining.added(call, done, rewards=rewards, sources=sources)
                self._early += self._read(job, done)
            super().wait()

    def open(self, key: Hashable, *, row: dict, seed: int = 0, source: int = 0) -> None:
        """Begin an episode; its TurnResult comes out of `poll` or `drain` under `key`.

        Args:
            row: the data row.
            seed: of the episode's randomness, for environments that ask for it.
            source: that the row is of, see `Prompt`; it says which environment.
        Raises: Refusal when the data row cannot be sent to another process.
        """
        field = self._setup.sources[source].environment
        assert field, f"source {source} has no environment"
        self._send(key, Open(field, row, seed), what="a data row")

    def turn(
        self, key: Hashable, *, environment: bytes, response: Response, source: int = 0
    ) -> None:
        """Play a turn; its TurnResult comes out of `poll` or `drain` under `key`.

        Args:
            environment: of the episode's last TurnResult.
            response: what the policy sampled since.
            source: as of `open`.
        """
        field = self._setup.sources[source].environment
        self._send(key, Respond(field, environment, response), what="a response")

    def poll(self) -> list[RewardResult | TurnResult]:
        """Return the results that are there, without waiting.

        Raises: Refusal as `start`; RuntimeError when workers cannot be started again.
        """
        found = self._early
        self._early = []
        for job, done in self.take():
            found += self._read(job, done)
        return found

    def wait(self) -> None:
        """As JobQueue; does not wait where there is something to poll."""
        if not self._early:
            super().wait()

    def _read(self, job: QueuedJob, done: Done) -> Sequence[RewardResult | TurnResult]:
        if not isinstance(job.key, Call):
            return [_turn(job, done)]
        return self._joining.scored(
            job.key, done, scopes=self._own_scopes, awaits_step="step" in self.scopes
        )

    def drain(self) -> list[RewardResult | TurnResult]:
        """Wait for every call and return the results not yet polled, in the order of the calls.
        Raises as `poll`."""
        self.wait_for_all()
        return self.poll()

    def results(self) -> Iterator[RewardResult | TurnResult]:
        """Yield the results not yet polled, each as soon as it is there, until every call is
        served. Raises as `poll`."""
        yield from self.poll()
        while len(self):
            self.wait()
            yield from self.poll()

    def state(self, step: int) -> TrainerState:
        """Return where the run is at a step."""
        epochs = math.ceil(self._max_steps / self._steps_per_epoch)
        return TrainerState(step, self._max_steps, step / self._steps_per_epoch, epochs)

    def _send(self, key: Hashable, work: Work, *, what: str) -> None:
        kinds = (pickle.PicklingError, TypeError, AttributeError)
        with refusing(f"{what} cannot be sent to a worker process", *kinds):
            self.put(key, work)


def _source_setups(cfg: Config, names: Sequence[str]) -> tuple[SourceSetup, ...]:
    """Return how the rows of each source are scored, by functions of these names, and played.

    Raises: Refusal where nothing says what the rows of a source are worth.
    """
    by_spec = dict(zip(cfg.reward_functions, names))
    sources = cfg.data.all_sources()
    differ = any(source.rewards for source in sources)
    found = []
    for source, (field, environment) in zip(sources, cfg.environments()):
        functions = cfg.functions_of(source)
        is_task = is_generated(source.path)
        if not functions and not is_task and not environment:
            raise Refusal(
                f"rewards.functions: is empty, and {source.path} has neither an environment nor, "
                "as a generated task, a grader"
            )
        # Rewards in common have their names by their places: one function may be named twice.
        common = names[: len(functions)] if not source.rewards and cfg.rewards.functions else ()
        own = tuple(common) or tuple(by_spec[spec] for spec in functions)
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


def _turn(job: QueuedJob, done: Done) -> TurnResult:
    found = done.result if isinstance(done.result, TurnResult) else TurnResult(None)
    return replace(
        found, key=job.key, seconds=done.seconds, failure=done.failure, message=done.message
    )
