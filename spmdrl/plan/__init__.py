"""Will it fit, and how fast: what a config amounts to on so many GPUs, before a job is queued.

`python -m spmdrl plan --config FILE` needs the model's config.json and nothing else; see
docs/planning.md. Files: setting (layout, run, rates), activations, memory, traffic, seconds,
search, text.
"""
