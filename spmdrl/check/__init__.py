"""Everything that is refused before a process group exists, and the dry run.

- `settings` reads a config and gathers what is wrong with it. Every command that takes a config
  asks it. Single values are checked in `values`, `sources`, `methods` and `engine_options`. Values
  that do not go together are in `rules`, a table that `python -m spmdrl matrix` prints. The sizes
  that ranks must divide, for any model, are in world/axes.py.
- `fit` checks the models of a config by their config.json: adapters, routers, and the sizes that
  axes must divide (model/divisibility.py). train.py, the dry run and the planner ask it.
- `inputs` checks data, tokenizer, environment, rewards, and the checkpoint that a run resumes from.
  The dry run asks it, and train.py before anything is loaded.
- `methods` also tries on three tokens the loss and the advantage that train.py itself names.
- `dry_run` prints sizes that follow from a config, and the problems of all of the above.
"""
