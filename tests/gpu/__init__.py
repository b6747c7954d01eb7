import os

if file := os.environ.get("SPMDRL_CUDA_LINES"):
    from tests.gpu.cuda_lines import record

    record(file)
