"""The head's Triton kernels, without a GPU: in Triton's interpreter, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix) / "triton"


@pytest.mark.parametrize("what", ["interpret", "compile"])
def test_kernels_of_the_head_compute_what_torch_does_and_compile(what, tmp_path):
    if not TRITON.exists():
        pytest.skip("Triton is not there: make .venv/triton")
    own = {"PYTHONPATH": f"{ROOT}:{TRITON}", "TRITON_CACHE_DIR": str(tmp_path)}
    if what == "interpret":
        own["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.head_kernels", what],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [1000, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_the_head_compute_on_a_gpu_what_torch_does(width, dtype):
    from tests.gpu.head_kernels import compare

    compare("cuda", width=width, dtype=dtype)
