"""Part of `make gpu`: the tests that need CUDA.

python -m benchmarks.gpu.cuda_tests
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

import tyro

from benchmarks.gpu.rows import Clock, Row, attempt
from benchmarks.start import output_of

FILES = (
    "tests/algorithms/test_token_advantages.py",
    "tests/gpu/test_head_kernels.py",
    "tests/model/test_context_parallel.py",
    "tests/model/test_expert_room.py",
    "tests/model/test_sinks.py",
)
"""Those with tests that are marked gpu. To collect the whole suite for them takes a minute."""

_WHAT = "tests that need CUDA"


@dataclass(frozen=True)
class Options:
    """What to run."""

    device: str = "cuda"
    """cpu: a rehearsal, in which pytest collects and skips them."""
    limit_s: float = 120.0
    """Seconds of this process; see `rows.Clock`."""


def main(options: Options) -> None:
    """Run them, and tell what pytest says last."""
    clock = Clock(options.limit_s)
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} not installed: pip install .[test]"
        Row(_WHAT, why, verdict="not run").tell()
        return
    with attempt(_WHAT):
        words = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *FILES)
        printed = output_of([sys.executable, *words], timeout_s=clock.left_s)
        summary = printed.strip().splitlines()[-1]
        # pytest ends with 0 where it skips all of them too.
        verdict = "met" if "passed" in summary else "not run"
        Row(_WHAT, summary, aim="all pass", verdict=verdict).tell()


if __name__ == "__main__":
    main(tyro.cli(Options))
