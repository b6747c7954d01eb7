"""What a worker has loaded, and any job done with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spmdrl.rewards.samples import RewardList, RewardSample
from spmdrl.workers.environment_jobs import EnvironmentServer
from spmdrl.workers.messages import Done, Open, Setup, SourceSetup, TurnResult, Work
from spmdrl.workers.reward_jobs import RewardScorer, RunningJob

_METHODS = {"Open": "reset", "Respond": "step"}
"""Of an environment, that its jobs call."""


class Server:
    """Does every kind of job.

    Raises (on construction): Refusal for what cannot be loaded.
    """

    def __init__(self, setup: Setup):
        self._environments = {
            field: EnvironmentServer(options, field=field)
            for field, options in setup.environments.items()
        }
        self.scorer = RewardScorer(replace(setup, sources=tuple(map(self._graded, setup.sources))))

    def _graded(self, source: SourceSetup) -> SourceSetup:
        """Return a source as it is graded: by its task not where that is here to make the rows, and
        the environment knows what they are worth."""
        environment = self._environments.get(source.environment)
        if environment is None or environment.is_graded:
            return source
        return replace(source, is_own_grader=False)

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the parent may want to know of what was loaded."""
        scorer = self.scorer
        servers = self._environments
        called = {
            "RewardSample": scorer.called(is_list=False),
            "RewardList": scorer.called(is_list=True),
        }
        for job, method in _METHODS.items():
            called[job] = " or ".join(dict.fromkeys(s.called(method) for s in servers.values()))
        return {
            "concurrency": scorer.concurrency,
            "scopes": scorer.scopes,
            "called": called,
            "environments": {field: server.facts for field, server in servers.items()},
        }

    def serve(self, id: int, work: Work) -> Done:
        """Do a job; whatever the user's code does is part of the result."""
        if isinstance(work, RewardSample | RewardList):
            return self.scorer.score(id, work)
        server = self._environments[work.environment]
        job = RunningJob(id=id)
        result = None
        with job.blaming():
            if isinstance(work, Open):
                moved = server.open(work.row, seed=work.seed)
            else:
                moved = server.turn(work.packed, work.response)
            packed, turn, state = moved
            result = TurnResult(
                None, packed, tuple(turn.messages), turn.is_done, turn.reward, turn.info, state
            )
        return job.done(result)
