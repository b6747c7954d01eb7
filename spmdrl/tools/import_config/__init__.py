"""Configs of verl, TRL and NeMo-RL, translated into one of spmdrl.

For each there is a page with a table (`verl.md` ...) of its settings, with its own defaults, and a
module with the rules for settings that follow from several others. `python -m spmdrl import_config`
reads the table.
"""
