"""torch.cuda with one H100 that is not there. It records what it is asked to do, and by whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"


class FakeCuda:
    """Answers for torch.cuda. Install it for the time of a test, or of a process."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.threads: set[str] = set()
        """Names of the threads that called any function of torch.cuda."""
        self.total = 1000
        self.taken: Callable[[], int] = lambda: 700
        """Bytes in use by all processes."""
        self.allocated = 100
        self.most_allocated = 700
        self.capability = (9, 0)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let torch.cuda answer from here."""
        answers: dict[str, Callable[..., Any]] = {
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda device=None: NAME,
            "get_device_capability": lambda device=None: self.capability,
            "mem_get_info": lambda device=None: (self.total - self.taken(), self.total),
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.most_allocated,
            "get_rng_state": lambda device=None: torch.tensor([7], dtype=torch.uint8),
            "set_rng_state": self._set_rng_state,
        }
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            answers[name] = self._done(name)
        for name in ("init", "set_device", "current_stream", "current_device"):
            answers[name] = self._done(name)
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, self._asked(answer))

    def _set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        self.called.append(f"set_rng_state {state.tolist()}")

    def _done(self, name: str) -> Callable[..., None]:
        return lambda device=None: self.called.append(name)

    def _asked(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return answer(*args, **options)

        return noted
