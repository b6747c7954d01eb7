"""Part of `make gpu`: the memory in use on the GPU in a colocated run, against the plan.

    python -m benchmarks.gpu.memory --shape 1b             # tiny for a rehearsal on the CPU

train.py with a model of a real shape, while another thread reads the memory that is in use on the
GPU. The driver counts all of it: also CUDA's context, NCCL, CUDA graphs and what vLLM maps by
itself, of which torch knows nothing. On a CPU the memory is that of the run's processes.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import tyro

from benchmarks.gpu import update
from benchmarks.gpu.rows import Clock, Row, attempt, judged
from benchmarks.gpu.train_runs import CASES, flags_of
from benchmarks.gpu.train_runs import Options as RunOptions
from benchmarks.start import as_flags, quick_folder, torchrun
from spmdrl.config import Config
from spmdrl.config.read import read
from spmdrl.model.load import build_meta_model
from spmdrl.tools.commands.create_model import create_model
from spmdrl.tools.plan.run import Rates, run_of_model
from spmdrl.tools.plan.search import Plan, make_plan
from spmdrl.world.axes import axes_of
from spmdrl.world.machine.hardware import Gpu, known_gpu

_OFF = 0.15  # of the planner's figure
_EVERY_S = 0.05
_PROMPT = 16


@dataclass(frozen=True)
class Options:
    """What to run."""

    shape: Literal["tiny", "1b", "4b"] = "1b"
    device: Literal["cpu", "cuda"] = "cuda"
    steps: int = 3
    limit_s: float = 120.0
    """Seconds of this process; see `rows.Clock`."""


@dataclass
class Peak:
    """The most memory that was seen."""

    before: int
    """Bytes in use when nothing ran yet."""
    most: int = 0
    times: int = 0
    """How often it was read."""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def bytes(self) -> int:
        """Bytes that came on top."""
        return self.most - self.before


def used_on_gpu() -> int:
    """Return the bytes in use on the first GPU that this process sees, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def used_by_children() -> int:
    """Return the resident bytes of the processes that this one started."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


@contextmanager
def watched(used: Callable[[], int]) -> Iterator[Peak]:
    """Read the memory in use, in a thread, until the block ends."""
    peak = Peak(before=used())

    def read_on() -> None:
        while not peak.ended.wait(_EVERY_S):
            peak.most = max(peak.most, used())
            peak.times += 1

    reader = threading.Thread(target=read_on, daemon=True)
    reader.start()
    try:
        yield peak
    finally:
        peak.ended.set()
        reader.join()


def flags_for(options: Options, scratch: Path, model: str) -> dict[str, Any]:
    """Return the fields of the config, with sequences that fill micro-batches."""
    is_tiny = options.shape == "tiny"
    words = create_model(scratch / "words", hidden_size=64, layers=1, heads=1, kv_heads=1)
    run_options = RunOptions("grpo", options.device, options.steps)
    own = flags_of(CASES["grpo"], run_options, model=Path(model), out=scratch / "run")
    return own | {
        "model.tokenizer": words,
        "data.max-prompt-tokens": _PROMPT,
        "sampling.max-response-tokens": 32 if is_tiny else 1008,
        "batch.prompts-per-step": 8,
        "batch.group-size": 4,
        "batch.tokens-per-microbatch": 512 if is_tiny else 8192,
        "engine.gpu-memory-frac": 0.4,
        "engine.max-num-seqs": 32,
    }


def plan_of(cfg: Config, options: Options, gpu: Gpu) -> Plan:
    """Return what the planner says of the run."""
    run = run_of_model(
        cfg,
        build_meta_model(cfg.model),
        prompt_tokens=_PROMPT,
        response_tokens=cfg.sampling.max_response_tokens,
    )
    return make_plan(run, axes_of(cfg), rates=Rates(gpu))


def main(options: Options) -> None:
    """Run it, and tell the peak beside the plan."""
    clock = Clock(options.limit_s)
    what = f"memory of a colocated run at {options.shape}"
    file_bytes = update.FILE_BYTES[options.shape]
    with tempfile.TemporaryDirectory(dir=quick_folder(file_bytes)) as folder, attempt(what):
        scratch = Path(folder)
        shaped = update.Options(shape=options.shape, device=options.device)
        model = update.write_model(scratch / "model", shaped)
        update.free()
        flags = flags_for(options, scratch, model)
        cfg = read(as_flags(flags), prog="train.py")
        is_cuda = options.device == "cuda"
        with watched(used_on_gpu if is_cuda else used_by_children) as peak:
            torchrun(1, "train.py", *as_flags(flags), timeout_s=clock.left_s)
        gpu = known_gpu(torch.cuda.get_device_name()) if is_cuda else _HOST
        if gpu is None:
            Row(what, f"{_gib(peak.bytes)} at most", verdict="measured").tell()
            return
        tell(what, peak, plan_of(cfg, options, gpu), steps_of=scratch / "run", is_judged=is_cuda)


_HOST = Gpu("CPU", 16.0, 1e12, 1e10, 1e10, 1e10, 1e10)


def tell(what: str, peak: Peak, plan: Plan, *, steps_of: Path, is_judged: bool) -> None:
    """Print the peak beside the plan's, and what torch counted."""
    lines = (steps_of / "metrics.jsonl").read_text().splitlines()
    counted = max((json.loads(line).get("mem/cuda_gib", 0.0) for line in lines), default=0.0)
    off = peak.bytes / plan.rank_bytes - 1
    numbers = dict(
        peak=peak.bytes, planned=plan.rank_bytes, torch_gib=counted, times=peak.times,
        trainer=dict(plan.trainer.causes), engine=dict(plan.engine.causes) if plan.engine else {},
    )  # fmt: skip
    found = f"{_gib(peak.bytes)} at most, {counted:.2f} GiB by torch's count"
    beside = f"{_gib(plan.rank_bytes)} planned"
    if is_judged:
        aim = f"within {_OFF:.0%}"
        judged(what, found, met=abs(off) <= _OFF, aim=aim, beside=beside, **numbers).tell()
    else:
        Row(what, found, beside, numbers=numbers).tell()


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    main(tyro.cli(Options))
