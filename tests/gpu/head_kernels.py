"""The head's Triton kernels: against torch's own operations, and compiled for GPUs.

    TRITON_INTERPRET=1 python -m tests.gpu.head_kernels interpret
    python -m tests.gpu.head_kernels compile

A process of its own, since Triton reads the variable where kernels are defined. Both need Triton
and no GPU.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import torch

from spmdrl.config import Penalties
from spmdrl.model import logit_kernels, logit_passes
from spmdrl.model.head import HeadOptions
from spmdrl.model.logit_passes import LogitForm, Positions
from tests.common import test_sampling_masks as masks
from tests.engine import test_penalties as penalties
from tests.model import test_head as head

FORMS = [LogitForm(), LogitForm(2.0, None, 1.3), LogitForm(0.5, 3.0, 0.7)]
CAPABILITIES = (80, 90, 100)


def compare(device: str, *, width: int, dtype: torch.dtype) -> None:
    """Compare sums and gradients with those of torch's operations, in all forms of logits."""
    generator = torch.Generator().manual_seed(0)
    count = 6
    products = (4 * torch.randn(count, width, generator=generator)).to(device, dtype)
    # Some are of another rank's part.
    targets = torch.randint(-width // 4, 5 * width // 4, (count,), generator=generator).to(device)
    grads = torch.randn(2, count, generator=generator).to(device)
    # As SamplingMask makes them: not contiguous.
    masked = (torch.rand(count, width + 1, generator=generator) < 0.6).to(device)[:, :width]
    masked[0, : width - 1] = True  # whole blocks
    for form in FORMS:
        for dropped in (None, masked):
            sums = torch.full((2, 5, count + 2), 7.0, device=device)
            for module, own in zip((logit_passes, logit_kernels), sums):
                part = own[:, 1:-1]
                module.summarize(products.clone(), targets, form, dropped=dropped, sums=part)
            torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-5)
            top, total, moment, *_ = sums[0, :, 1:-1]
            positions = Positions(
                targets, total.log() + top, total.log() - moment / total, grads[0], grads[1]
            )
            for own in (positions, replace(positions, grad_entropy=None)):
                want, found = products.clone(), products.clone()
                logit_passes.differentiate(want, own, form, dropped=dropped)
                logit_kernels.differentiate(found, own, form, dropped=dropped)
                rounding = 1e-5 if dtype == torch.float32 else 1e-2
                torch.testing.assert_close(found, want, rtol=rounding, atol=1e-6)
                if dropped is not None:
                    assert not found[dropped].any()


def interpret() -> None:
    """Run the kernels in the interpreter, and heads that use them against float64."""
    logit_kernels._BLOCK = 16  # several blocks in a small vocabulary
    for dtype in (torch.float32, torch.bfloat16):
        compare("cpu", width=40, dtype=dtype)
    for temperature, softcap, scale in [(1.0, None, 1.0), (0.8, 3.0, 2.0)]:
        options = HeadOptions(5, temperature, softcap, scale, is_fused=True)
        head._assert_equal(
            head._ours(options, has_bias=True), head._reference(options, has_bias=True)
        )
        masks.assert_equal(masks.ours(options), masks.reference(options))
        for how in ("all", "kept"):
            own = replace(options, penalties=Penalties(1.3, 0.7, 0.25, ((3, -2.0),)))
            want = penalties.reference(own.penalties, own, how)
            penalties.assert_close(penalties.ours(own, how), want)


def compile_for_gpus() -> None:
    """Compile both kernels for several GPUs, neither may add atomically."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    for kernel in (logit_kernels._summarize, logit_kernels._differentiate):
        for dtype, flag in (("*bf16", False), ("*fp32", True)):
            types = {name: _type(name, dtype) for name in kernel.arg_names}
            constants = {name: flag for name in types if name.startswith("HAS_")}
            constants["BLOCK"] = logit_kernels._BLOCK
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            for capability in CAPABILITIES:
                target = GPUTarget("cuda", capability, 32)
                made: Any = compile(source, target=target, options={"num_warps": 8})
                assert not re.search(r"\b(atom|red)\.", made.asm["ptx"])


def _type(name: str, dtype: str) -> str:
    """Return the type that Triton gives an argument of a kernel."""
    if name.startswith("HAS_") or name == "BLOCK":
        return "constexpr"
    if name == "width" or name.endswith("_stride"):
        return "i32"
    if name in ("scale", "softcap", "inverse_temperature"):
        return "fp32"
    return {"products": dtype, "dropped": "*i1", "targets": "*i64"}.get(name, "*fp32")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()
    print("done")
