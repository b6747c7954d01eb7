"""Part of `make gpu`: the language-model head by its Triton kernels against torch's operations.

    python -m benchmarks.gpu.head                   # the head of Qwen3 1.7B
    python -m benchmarks.gpu.head --vocabulary 32768 --hidden 512 --tokens 512 --device cpu

Scores bfloat16 states and differentiates, with a loss on logprobs and entropy, and compares
logprobs and gradients. Also tells how much of a GPU's memory bandwidth each kernel reaches, for
some sizes of blocks, of which logit_kernels.py fixes one. On the CPU only torch's operations run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import tyro
from torch import Tensor

from benchmarks.gpu.rows import Row, attempt, judged, median_seconds
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.logit_passes import LogitForm, Positions

_AIM = 0.6  # of the time by torch's operations
_SAME = 2e-2  # of the largest gradient, in bfloat16


@dataclass(frozen=True)
class Options:
    """What to run."""

    vocabulary: int = 151936
    hidden: int = 2048
    tokens: int = 8192
    chunk: int = 3533
    device: Literal["cpu", "cuda"] = "cuda"
    rounds: int = 8
    """Calls that count, after three that do not."""
    limit_s: float = 60.0
    """Seconds of this process, which starts no other."""


@dataclass(frozen=True)
class Inputs:
    """What a head gets."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


def inputs(options: Options) -> Inputs:
    """Draw states, weights and targets."""
    torch.manual_seed(0)
    like = dict(dtype=torch.bfloat16, device=options.device)
    hidden = torch.randn(options.tokens, options.hidden, **like).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, **like).mul_(0.02).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,), device=options.device)
    return Inputs(hidden, weight, targets)


def step(own: Inputs, options: HeadOptions) -> list[Tensor]:
    """Return logprobs and the gradients of states and weight."""
    logprobs, entropy = logprobs_and_entropy(
        own.hidden, own.weight, targets=own.targets, options=options
    )
    loss = logprobs.sum() + 0.01 * entropy.sum()
    return [logprobs.detach(), *torch.autograd.grad(loss, [own.hidden, own.weight])]


def compare(own: Inputs, plain: HeadOptions, fused: HeadOptions) -> float:
    """Return the largest difference, each as a share of its tensor's largest number."""
    pairs = zip(step(own, plain), step(own, fused))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def tell_bandwidth(options: Options, wait: Callable[[], object]) -> None:
    """Print what each kernel reaches, for several sizes of its blocks."""
    from spmdrl.model import logit_kernels

    products = torch.randn(options.chunk, options.vocabulary, device="cuda", dtype=torch.bfloat16)
    targets = torch.zeros(options.chunk, dtype=torch.int64, device="cuda")
    sums = torch.empty(4, options.chunk, device="cuda")
    positions = Positions(targets, sums[0] + 20, sums[0], sums[0] * 0, None)
    form = LogitForm()
    kernels = {
        "summarize": (
            1,
            lambda: logit_kernels.summarize(products, targets, form, dropped=None, sums=sums),
        ),
        "differentiate": (
            2,
            lambda: logit_kernels.differentiate(products, positions, form, dropped=None),
        ),
    }
    for block, warps in ((2048, 4), (4096, 8), (8192, 8), (8192, 16)):
        logit_kernels._BLOCK = block
        logit_kernels._WARPS = warps
        for name, (passes, call) in kernels.items():
            took = median_seconds(call, warm=3, rounds=options.rounds, wait=wait)
            rate = passes * products.numel() * products.itemsize / took
            what = f"head, {name} by blocks of {block} and {warps} warps"
            numbers = {"seconds": took, "bytes_per_s": rate}
            Row(what, f"{rate / 1e9:,.0f} GB/s", numbers=numbers).tell()


def main(options: Options) -> None:
    """Time both ways, and compare what they compute."""
    own = inputs(options)
    is_cuda = options.device == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if is_cuda else lambda: None
    plain = HeadOptions(options.chunk)
    by_torch = median_seconds(lambda: step(own, plain), warm=3, rounds=options.rounds, wait=wait)
    each = f"{1e6 * by_torch / options.tokens:.2f} us a token"
    Row("head by torch's operations", each, numbers={"seconds": by_torch}).tell()
    if not is_cuda:
        Row("head by Triton kernels", "needs CUDA", verdict="not run").tell()
        return
    fused = replace(plain, is_fused=True)
    with attempt("head by Triton kernels"):
        gap = compare(own, plain, fused)
        judged(
            "head: the two compute the same", f"{gap:.1e}", met=gap < _SAME, aim=f"{_SAME:g}"
        ).tell()
        first, again = step(own, fused), step(own, fused)
        same = all(torch.equal(a, b) for a, b in zip(first, again))
        judged(
            "head: bits of two calls", "equal" if same else "differ", met=same, aim="equal"
        ).tell()
        took = median_seconds(lambda: step(own, fused), warm=3, rounds=options.rounds, wait=wait)
        judged(
            "head by Triton kernels",
            f"{1e6 * took / options.tokens:.2f} us a token",
            beside=each,
            met=took < _AIM * by_torch,
            aim=f"{_AIM} of it",
            seconds=took,
            by_torch_s=by_torch,
        ).tell()
        tell_bandwidth(options, wait)


if __name__ == "__main__":
    main(tyro.cli(Options))
