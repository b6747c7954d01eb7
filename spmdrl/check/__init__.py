"""All that is refused before a group exists, and the dry run.

Each rule stands once, where whoever needs it can ask:

- `rules`: one table of the settings that do not go together; `python -m spmdrl matrix` prints it.
- `settings`: reads a config and gathers what is wrong with its values: together from `rules`, alone
  from `ranges`, `methods`, `model`, `engine_options`, `rollouts` and others, and from world/axes.py
  what ranks must divide whatever the model is. Asked by whatever takes a config.
- `fit`: the models of a config by their config.json: adapters, routers, and what axes must divide
  in a model, which is in model/divisibility.py. Asked by train.py, the dry run and the planner; the
  files of the weights, and what cannot be offloaded here, by train.py alone.
- `inputs`: data, tokenizer, environment, rewards, and what a resumed run goes on from. Asked
  by the dry run, and by train.py before anything is loaded, which opens the rows of data.train
  itself right after it.
- `methods` tries loss and advantage on three tokens, those that stand in train.py too.
- `dry_run`: prints what a config amounts to, and all of the above.
"""
