"""Will it fit, and how fast: what a config amounts to on so many GPUs, before a job is queued.

`python -m spmdrl plan --config FILE` needs the model's config.json and nothing else; see
docs/planning.md. Files: run (what is asked, and a GPU's rates), memory (of trainer_memory and
engine_memory), activations, traffic, seconds, search, text. The layout itself is world/axes.py.
"""
