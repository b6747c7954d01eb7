"""All that is refused before a group exists, and the dry run.

Each rule stands once, where it can be asked by whoever needs it:

- `settings`: values of fields, alone and together; `options`, `lora`, `moe` their mappings. What
  ranks must divide whatever the model is in world/axes.py. Asked when a config is read.
- `fit`: the models of the config, by their config.json: adapters, experts, and what axes must
  divide in a model, which is in model/fits.py. Asked by train.py, the dry run and the planner; the
  weights' files, and what cannot be offloaded here, by train.py alone.
- `inputs`: data, tokenizer, environment and reward functions, as far as opening them is quick.
  Asked by the dry run; a run opens them itself.
- `dry_run`: prints what a config amounts to, and all of the above.
"""
