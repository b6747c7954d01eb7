"""A taskset of verifiers: sums of two small numbers, worth more the nearer the answer is."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """The data of a task."""

    answer: int


class Sum(vf.Task[SumData]):
    """A sum."""

    @vf.reward
    async def nearness(self, task, trace) -> float:
        """1 for the right digit, less for others, 0 for anything else."""
        reply = trace.last_reply
        return 1 - abs(int(reply) - task.answer) / 9 if reply in set("0123456789") else 0.0

    @vf.metric
    async def right(self, task, trace) -> float:
        """Whether the answer is right."""
        return float(trace.last_reply == str(task.answer))


class Shared(vf.Toolset[vf.SharedToolsetConfig]):
    """A tool for all rollouts."""

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumsConfig(vf.TasksetConfig):
    """Options of the taskset."""

    has_tool: bool = False


class Sums(vf.Taskset[Sum, SumsConfig]):
    """All sums of two digits below five."""

    def load(self):
        """Yield the sums."""
        for a in range(5):
            for b in range(5):
                data = SumData(prompt=f"{a}+{b}=", answer=a + b)
                yield Sum(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        """Return the shared tools."""
        return [Shared(vf.SharedToolsetConfig())] if config.has_tool else []


__all__ = ["Sums"]
