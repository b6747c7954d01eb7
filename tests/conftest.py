"""What all tests share: skips for what a machine lacks, and one tiny model folder."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and a slow machine is no failure. To look for new ones:
# HYPOTHESIS_PROFILE=default.
settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


gc.disable()  # until all tests are collected: a third of the time, and there is no garbage


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of each later collection of garbage."""
    gc.freeze()
    gc.enable()


def _slurm_missing() -> str:
    """Return why the Slurm tests cannot run here; empty when they can."""
    programs = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
    missing = [name for name in programs if not shutil.which(name, path=_system_path())]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "starting a Slurm daemon needs root"


def _system_path() -> str:
    """Return PATH with the folders of system daemons, which a user's PATH may leave out."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


LONGEST_FILES = (
    # Its ranks need a fork server of their own: before another one has been started.
    "engine/test_vision_vllm.py",
    "train/test_parity_grid.py",
    "program/test_train.py",
    "workers/test_pool.py",
    "program/test_methods.py",
    "model/test_families.py",
    "train/test_microbatch.py",
    "rollout/test_rollout.py",
    "engine/test_handover.py",
    "tools/test_what_if.py",
    "rollout/test_balance.py",
    "world/test_launcher.py",
    "world/test_world.py",
    "model/test_lora_experts.py",
    "report/test_tracker.py",
    "environments/test_sources.py",
    "rollout/test_decisions.py",
    "check/test_user_messages.py",
    "repository/test_readme.py",
    "gpu/test_table.py",
    "program/test_see.py",
    "program/test_lora.py",
    "train/test_critic.py",
    "program/test_two_nodes.py",
    "gpu/test_head_kernels.py",
    "repository/test_structure.py",
    "tools/test_export.py",
    "check/test_odd_settings.py",
    "common/test_evaluate.py",
    "certificate/test_runs.py",
)
"""Those that begin first, so that no process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and skip what this machine cannot run, with the reason."""
    import torch

    tests = Path(__file__).parent
    gone = [name for name in LONGEST_FILES if not (tests / name).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: LONGEST_FILES: no such files: {gone}")
    places = {tests / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    reasons = {
        "gpu": "" if torch.cuda.is_available() else "no CUDA device on this machine",
        "slurm": _slurm_missing(),
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


_watches: weakref.WeakSet[Any] = weakref.WeakSet()


@pytest.fixture(scope="session", autouse=True)
def _remember_watches() -> Iterator[None]:
    """Know each Watch of this process: one that a test leaves behind would end pytest itself, as it
    ends a rank, when the store of its job goes."""
    from spmdrl.world.lost_peers.watch import Watch

    first = Watch.__init__

    def remember(self: Watch, *args: Any, **options: Any) -> None:
        _watches.add(self)
        first(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "__init__", remember)
        yield


@pytest.fixture(autouse=True)
def _leave_nothing(_remember_watches: None) -> Iterator[None]:
    """Let no watch live longer than its test, and no test change what a broken pipe does."""
    yield
    for watch in list(_watches):
        watch.closed.set()
    # Else the first worker that dies in a later test ends pytest without a word.
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN, "a test changed SIGPIPE"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Qwen3 of 0.08 M parameters; read it, do not write to it."""
    from spmdrl.tools.commands.create_model import create_model

    return create_model(
        tmp_path_factory.mktemp("tiny_model"),
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=2,
        intermediate=96,
        max_positions=256,
    )


@pytest.fixture(scope="module")
def torchvision() -> Iterator[None]:
    """What vLLM's classes for models that see import, on the path of a module's ranks."""
    from tests.helpers.vlm import torchvision_shown

    with torchvision_shown():
        yield


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with such a model whose words are far from even, and a chat template."""
    from tests.helpers.built import small_model

    folder = tmp_path_factory.mktemp("chat_model")
    sizes = dict(hidden_size=64, heads=2, intermediate=96)
    return str(small_model(folder, **sizes, initializer_std=0.2, chat_template=True))
