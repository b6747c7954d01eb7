"""Plan a run: does it fit on a number of GPUs, and how fast is it?

`python -m spmdrl plan --config FILE` only needs the model's config.json; see docs/planning.md.
Files: run (the run to plan, and a GPU's rates), memory (with trainer_memory and engine_memory),
activations, traffic, seconds, search, text. The layout itself is in world/axes.py.
"""
