"""The parts of `make gpu`, each a process: what is run, and how long it may take.

A new part is a module with a `main` that prints rows, and with `device` and `limit_s` among its
options, and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.train_runs import CASES


@dataclass(frozen=True)
class Part:
    """One process of the whole. It is given `--limit-s`, see `rows.Clock`."""

    name: str
    command: tuple[str, ...]
    """What follows the interpreter."""
    needs_s: float
    """Seconds that it takes on a GPU, with nothing compiled yet. It does not start with less."""
    limit_s: float
    """Seconds after which it is ended."""
    gpus: int = 1
    rehearsal: tuple[str, ...] = ()
    """Further words that make it small and run on the CPU."""


def _module(name: str, *words: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.gpu.{name}", *words


def _run(name: str, *, needs_s: float, limit_s: float) -> Part:
    """Return the part that runs train.py in one of its cases."""
    # Ranks of `shared` share one GPU.
    gpus = 1 if name == "shared" else CASES[name].ranks
    on_cpu = ("--device", "cpu", "--steps", "2")
    return Part(name, _module("train_runs", "--case", name), needs_s, limit_s, gpus, on_cpu)


def _push(ranks: int) -> Part:
    words = () if ranks == 1 else ("--ranks", str(ranks))
    name = "push" if ranks == 1 else f"push_{ranks}"
    on_cpu = ("--megabytes", "20", "--hidden", "768")
    return Part(name, _module("push", *words), 40, 70, ranks, on_cpu)


def _meshes(ranks: int, *rehearsed: str) -> Part:
    words = ("--ranks", str(ranks))
    on_cpu = ("--device", "cpu", "--only", *rehearsed)
    return Part(f"meshes_{ranks}", _module("meshes", *words), 120, 300, ranks, on_cpu)


_ON_CPU = ("--device", "cpu")
_TINY = ("--shape", "tiny", "--device", "cpu", "--rounds", "1")
# An import of torch, transformers and vLLM takes about 20 s of each process, and an engine with
# nothing compiled 35 to 50 s more: 25 to 40 s of compilation, 10 s of CUDA graphs.
PARTS = [
    # What is worth most. Their limits together leave half a minute of the ten.
    _run("grpo", needs_s=60, limit_s=170),
    Part("update_1b", _module("update", "--shape", "1b"), 60, 120, 1, (*_TINY, "--length", "64")),
    Part("engine_1b", _module("engine", "--shape", "1b"), 120, 150, 1,
         (*_TINY, "--requests", "8", "--length", "8")),
    _push(1),
    Part("parity", _module("parity"), 40, 60, 1, (*_ON_CPU, "--variants", "no liger")),
    # Then what fits.
    Part("head", _module("head"), 30, 60, 1,
         (*_ON_CPU, "--vocabulary", "1024", "--hidden", "64", "--tokens", "64", "--rounds", "1")),
    Part("packing", _module("packing", "--shape", "1b"), 30, 60, 1,
         ("--shape", "tiny", "--device", "cpu", "--longest", "64")),
    Part("exact", _module("exact", "--shape", "1b"), 40, 60, 1,
         ("--shape", "tiny", "--device", "cpu")),
    Part("memory", _module("memory", "--shape", "1b"), 70, 200, 1,
         ("--shape", "tiny", "--device", "cpu", "--steps", "2")),
    _run("resumed", needs_s=80, limit_s=150),
    _run("moe", needs_s=60, limit_s=120),
    _run("lora", needs_s=60, limit_s=120),
    Part("tests", _module("cuda_tests"), 40, 120, 1, _ON_CPU),
    _run("replay", needs_s=50, limit_s=120),
    _run("shared", needs_s=70, limit_s=140),
    _run("deepseek", needs_s=50, limit_s=120),
    _run("transformers", needs_s=35, limit_s=100),
    _run("dpo", needs_s=30, limit_s=80),
    Part("update_4b", _module("update", "--shape", "4b", "--lean"), 80, 150, 1,
         (*_TINY, "--length", "64")),
    # For several GPUs, in ten minutes of their own.
    _run("split", needs_s=70, limit_s=130),
    Part("kills", _module("kills"), 170, 280, 2, _ON_CPU),
    _push(2),
    _run("colocated_tp", needs_s=80, limit_s=140),
    _meshes(2, "ring"),
    _run("split_tp", needs_s=80, limit_s=140),
    _run("hsdp", needs_s=80, limit_s=140),
    _push(4),
    _meshes(4, "hsdp"),
    _run("split_8", needs_s=80, limit_s=160),
    _run("experts_8", needs_s=80, limit_s=160),
    _push(8),
]  # fmt: skip
"""In the order of what is worth most, those for several GPUs last."""
