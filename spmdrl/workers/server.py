"""What a worker has loaded, and any job done with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmdrl.rewards.samples import RewardList, RewardSample
from spmdrl.workers.environment_jobs import EnvironmentServer
from spmdrl.workers.messages import Done, Open, Setup, TurnResult, Work
from spmdrl.workers.reward_jobs import RewardScorer, RunningJob


class Server:
    """Does every kind of job.

    Raises (on construction): Refusal for what cannot be loaded.
    """

    def __init__(self, setup: Setup):
        self._environments = EnvironmentServer(setup.environment) if setup.environment else None
        if self._environments is not None and not self._environments.is_graded:
            # A generated task is here to make the rows; its environment knows what they are worth.
            setup = replace(setup, grades_tasks=False)
        self.scorer = RewardScorer(setup)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the parent may want to know of what was loaded."""
        scorer = self.scorer
        facts: dict[str, Any] = {"concurrency": scorer.concurrency, "scopes": scorer.scopes}
        if self._environments is None:
            return facts
        return facts | {
            "tools": self._environments.tools,
            "tool_parser": self._environments.tool_parser,
            "not_plain": self._environments.not_plain,
        }

    def serve(self, id: int, work: Work) -> Done:
        """Do a job; whatever the user's code does is part of the result."""
        if isinstance(work, RewardSample | RewardList):
            return self.scorer.score(id, work)
        assert self._environments is not None, "a job of an environment needs one"
        job, result = RunningJob(id=id), None
        with job.blaming():
            if isinstance(work, Open):
                moved = self._environments.open(work.row, seed=work.seed)
            else:
                moved = self._environments.turn(work.environment, work.response)
            environment, turn, state = moved
            result = TurnResult(
                None, environment, tuple(turn.messages), turn.is_done, turn.reward, turn.info, state
            )
        return job.done(result)
