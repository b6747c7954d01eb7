"""Saved tensors on the host: copies beside the computation, in the right order, and no value
changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spmdrl.model.parallel import on_host
from spmdrl.model.parallel.on_host import Beside, keep_on_host

CPU = torch.device("cpu")
WIDTH, ROWS, BLOCKS = 16, 32, 5


class Late(Beside):
    """Copies that run as late as their marks allow, where a GPU may run them at any time."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.asked: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self.done = 0
        self.freed_early = 0

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
        self.asked.append((targets, sources))
        return len(self.asked)

    def wait(self, mark: int) -> None:
        for targets, sources in self.asked[self.done : mark]:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        self.done = max(self.done, mark)

    def fetch(self, storages: Sequence[Any]) -> None:
        super().fetch(storages)
        for storage in storages:
            storage.here.fill_(255)  # not a number, until it has come

    def leave(self, block: Any) -> None:
        before = [one for _, one in self._leaving]
        super().leave(block)
        self.freed_early += sum(one.left > self.done for one in before)


class Careless(Late):
    """The same, where nobody waits."""

    def wait(self, mark: int) -> None:
        pass


def made_blocks() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks)


def gradients(model: nn.Module, *, passes: int = 2) -> list[Tensor]:
    """Run passes forward before any of them runs backward, as no step does, and then one more."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(passes + 1)]
    losses = [model(x).square().sum() for x in inputs[:passes]]
    for loss in reversed(losses):
        loss.backward()
    model(inputs[-1]).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture
def use(monkeypatch) -> Any:
    """Have copies run on something else."""

    def use(own: Beside) -> Beside:
        monkeypatch.setattr(on_host, "beside", lambda device: own)
        return own

    return use


def kept(model: nn.Module) -> nn.Module:
    keep_on_host(model, [name for name, _ in model.named_children()])
    return model


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("kind", [lambda: Beside(CPU), Late])
def test_gradients_are_the_same_bits_however_late_copies_run(use, kind, passes) -> None:
    own = use(kind())
    expected = gradients(made_blocks(), passes=passes)
    assert all(map(torch.equal, expected, gradients(kept(made_blocks()), passes=passes)))
    if isinstance(own, Late):
        assert len(own.asked) - own.done <= 1  # the last block's of the last pass
        assert own.freed_early == 0 and len(own.asked) > 2 * BLOCKS


def test_without_a_wait_they_would_differ(use) -> None:
    use(Careless())
    expected = gradients(made_blocks(), passes=0)
    found = gradients(kept(made_blocks()), passes=0)
    assert not all(map(torch.equal, expected, found))


# --------------------------------------------------------------------------- streams


class Square(nn.Module):
    """Saves its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Stream:
    """A stream of CUDA that notes what it is told."""

    def __init__(self, log: list[str], name: str):
        self._log = log
        self._name = name

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def wait_event(self, mark: int) -> None:
        self._log.append(f"{self._name} waits for mark {mark}")

    def record_event(self) -> int:
        mark = sum("mark" in line and "waits" not in line for line in self._log) + 1
        self._log.append(f"mark {mark}")
        return mark


def streamed(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> Beside:
    """Return the copies of a stand-in GPU, whose streams record their calls."""
    device = torch.device("cuda", 0)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append("copy")
        yield

    compute = Stream(log, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, "side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    own = Beside(device)
    assert own.is_async
    own.device = CPU  # tensors are there
    monkeypatch.setattr(own, "host_room", lambda like: torch.empty_like(like))
    return own


def test_streams_wait_for_each_other_in_this_order(monkeypatch, use) -> None:
    log: list[str] = []
    use(streamed(monkeypatch, log))
    model = kept(nn.Sequential(Square(), Square(), Square()))
    x = torch.full((ROWS, WIDTH), 1.1, requires_grad=True)
    out = model(x)
    copied = lambda mark: ["side waits for compute", "copy", f"mark {mark}"]  # noqa: E731
    # The memory of a block is free once the next one has run and the copies are done.
    freed = [[], ["compute waits for mark 1"], ["compute waits for mark 2"]]
    assert log == [line for i in range(3) for line in copied(i + 1) + freed[i]]
    log.clear()
    out.sum().backward()
    # The last block's are still there. The others come while the block after them computes.
    first = ["side waits for compute", "copy", "mark 1"]
    second = ["side waits for compute", "copy", "mark 2"]
    assert log == [*first, "compute waits for mark 1", *second, "compute waits for mark 2"]
    torch.testing.assert_close(x.grad, 8 * x.detach() ** 7)


def test_memory_of_the_host_is_pinned_for_a_gpu_alone(monkeypatch) -> None:
    seen = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, pin_memory, **k: seen.append(pin_memory) or empty(*a, **k)
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for device in (CPU, torch.device("cuda", 0)):
        Beside(device).host_room(torch.zeros(3))
    assert seen == [False, True]
