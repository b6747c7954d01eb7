"""Plan a run: does it fit on a number of GPUs, and how fast is it?

`python -m spmdrl plan --config FILE` only needs the model's config.json; see docs/planning.md.
Files: run (the run to plan, and a GPU's rates), memory (with trainer_memory, engine_memory and
activations), host_memory, shared_prompts, traffic, seconds, measured_run, search, text (with
slower_links). The layout itself is in world/axes.py.
"""
