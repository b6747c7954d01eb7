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
from spmdrl.workers.messages import Done, Open, Respond, RewardResult, Setup, TurnResult, Work
from spmdrl.workers.worker_process import QueuedJob


class RewardPool(JobQueue):
    """Worker processes of one engine replica. For one thread; nothing in it blocks but
    `start`, `wait`, `results` and `drain`, all bounded. Where models are the only rewards it has
    no workers, and every sample's value is 0. So is it where the environment's rewards are all.

    Args:
        cfg: rewards.*, rollout.environment, and data.* for the graders of generated tasks.
        steps_per_epoch: for the state of the run that functions may ask for.
    Raises (on construction): Refusal when there is nothing to score with.
    """

    def __init__(self, cfg: Config, *, steps_per_epoch: float = math.inf):
        rewards, environment = cfg.rewards, dict(cfg.rollout.environment)
        sources, functions = cfg.data.all_sources(), cfg.reward_functions
        tasks = tuple(s.path if is_generated(s.path) else "" for s in sources)
        has_graders = any(tasks) and not rewards.functions
        if not functions and not has_graders and not environment:
            raise Refusal("rewards.functions: is empty and no generated task brings a grader")
        models = reward_models(functions)  # the trainers'
        weights = cfg.reward_weights
        own = [i for i in range(len(functions)) if i not in models]
        names = part_names(functions)
        setup = Setup(
            functions={names[i]: functions[i] for i in own},
            applies=_applies(cfg, names) if any(s.rewards for s in sources) else (),
            tasks=tasks,
            task_options=tuple(dict(source.task_options) for source in sources),
            weights=tuple(weights[i] for i in own),
            scope=rewards.scope,
            environment=environment,
            grades_tasks=has_graders,
            timeout_s=rewards.timeout_s,
            memory_gib=rewards.worker_memory_gib,
        )
        is_needed = bool(own or has_graders or environment)
        super().__init__(
            setup, workers=rewards.workers if is_needed else 0, timeout_s=rewards.timeout_s
        )
        self._early: list[RewardResult | TurnResult] = []  # to be polled
        self._max_steps, self._steps_per_epoch = cfg.steps, steps_per_epoch
        # Models, or the environment, score every sample: no function need apply to its row.
        self._joining = Joining(least=0.0 if models or environment else None)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Return the environment's tool descriptions for the chat template, after `start`."""
        return self.facts.get("tools", [])

    @property
    def tool_parser(self) -> str:
        """Return the format of tool calls to read, after `start`; empty for none."""
        return self.facts.get("tool_parser", "")

    @property
    def not_plain(self) -> str:
        """Return what of the environment is no plain data, after `start`; empty for nothing."""
        return self.facts.get("not_plain", "")

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
                    return self._joining.added(call, done, rewards=rewards)
                self._early += self._read(job, done)
            super().wait()

    def open(self, key: Hashable, *, row: dict, seed: int = 0) -> None:
        """Begin an episode; its TurnResult comes out of `poll` or `drain` under `key`.

        Args:
            row: the data row.
            seed: of the episode's randomness, for environments that ask for it.
        Raises: Refusal when the data row cannot be sent to another process.
        """
        assert self._setup.environment, "rollout.environment is empty"
        self._send(key, Open(row, seed), what="a data row")

    def turn(self, key: Hashable, *, environment: bytes, response: Response) -> None:
        """Play a turn; its TurnResult comes out of `poll` or `drain` under `key`.

        Args:
            environment: of the episode's last TurnResult.
            response: what the policy sampled since.
        """
        self._send(key, Respond(environment, response), what="a response")

    def poll(self) -> list[RewardResult | TurnResult]:
        """Return the results that are there, without waiting.

        Raises: Refusal as `start`; RuntimeError when workers cannot be started again.
        """
        found, self._early = self._early, []
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


def _applies(cfg: Config, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the functions that score each source's rows."""
    by_spec = dict(zip(cfg.reward_functions, names))
    common = tuple(names[: len(cfg.rewards.functions)])
    return tuple(
        common
        if common and not source.rewards
        else tuple(by_spec[spec] for spec in cfg.functions_of(source))
        for source in cfg.data.all_sources()
    )


def _turn(job: QueuedJob, done: Done) -> TurnResult:
    found = done.result if isinstance(done.result, TurnResult) else TurnResult(None)
    return replace(
        found, key=job.key, seconds=done.seconds, failure=done.failure, message=done.message
    )
