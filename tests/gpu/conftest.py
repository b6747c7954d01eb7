"""The stub of CUDA, for all tests here."""

from __future__ import annotations

import pytest

from tests.gpu.fake_cuda import FakeCuda


@pytest.fixture
def gpu(monkeypatch) -> FakeCuda:
    """Let torch.cuda believe in one H100, of which it records what it is asked to do."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake
