"""The queue of the worker that runs agents.

It is one process, and it runs many agents, for long. An agent's time runs only while the policy
answers requests of its purpose (`serve`). If the worker ends, no agent is to blame, since each runs
in a process of its own: all that ran are lost, and the caller may run them again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from spmdrl.agents.containers import Labels
from spmdrl.config import Config
from spmdrl.workers.job_queue import JobQueue
from spmdrl.workers.messages import LOST, AgentSetup, Done, Serve, Setup
from spmdrl.workers.worker_process import QueuedJob, WorkerProcess

_REPORT_S = 15.0  # so soon after its deadline, an agent and everything that it started has ended


class AgentQueue(JobQueue):
    """Runs the agent of a config. Its jobs are of the kind Solve.

    Args:
        labels: of the containers that its agents start.
    """

    _limit = "rollout.agent_timeout_s"

    def __init__(self, cfg: Config, labels: Labels):
        timeout_s = cfg.rollout.agent_timeout_s
        agent = AgentSetup(
            function=cfg.rollout.agent,
            command=cfg.rollout.agent_command,
            at_once=cfg.agents_at_once,
            timeout_s=timeout_s,
            memory_gib=cfg.rewards.worker_memory_gib,
            container=cfg.rollout.agent_container,
            labels=labels,
        )
        setup = Setup(functions={}, weights=(), timeout_s=timeout_s, agent=agent)
        self._served = Serve("")
        self._served_since = 0.0
        """time.monotonic()."""
        self._informed: set[WorkerProcess] = set()  # those that know what is served
        super().__init__(setup, workers=1, timeout_s=timeout_s)

    def serve(self, purpose: str) -> None:
        """Answer agents of one purpose from now on. The time of others stands still.

        Args:
            purpose: of their jobs; empty for none.
        """
        self._served = Serve(purpose)
        self._served_since = time.monotonic()
        self._informed.clear()
        self.hand_out()

    def hand_out(self) -> None:
        """Give waiting jobs to the worker, after it knows whom the policy answers."""
        for worker in self._workers:
            if worker.is_ready and worker not in self._informed:
                worker.send(self._served)
                self._informed.add(worker)
        super().hand_out()

    def _kill_after_s(self, worker: WorkerProcess) -> float:
        return self._timeout_s + _REPORT_S

    def _running_s(self, worker: WorkerProcess, at: float | None = None) -> float:
        # This deadline is only for a worker that does not end its agents. So time before the last
        # change of what is served need not count.
        own = [job.began for job in worker.jobs.values() if job.purpose == self._served.purpose]
        began = [max(one, self._served_since) for one in own if one is not None]
        now = time.monotonic() if at is None else at
        return now - min(began) if began else 0.0

    def _blame(self, worker: WorkerProcess, suspects: Sequence[QueuedJob], done: Done) -> None:
        for job in suspects:
            self._end(worker, job, replace(done, failure=LOST))
