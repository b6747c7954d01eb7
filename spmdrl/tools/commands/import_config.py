"""Translate a config of verl, TRL or NeMo-RL, and list what has no counterpart.

python -m spmdrl import_config run_qwen3-8b.sh --out mine.yaml
python -m spmdrl import_config grpo_math_8B.yaml --out mine.yaml --rows 12000
python -m spmdrl import_config --arguments 'trl grpo --learning_rate 1e-5 ...' --gpus 8
"""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from spmdrl.errors import Refusal
from spmdrl.run_folder import write_file
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:
    from spmdrl.tools.import_config.translation import Ours

_NO_FILE = Path("-")
_OUT = Path("imported.yaml")


def import_config(
    source: Annotated[Path, tyro.conf.Positional] = _NO_FILE,
    *,
    arguments: str = "",
    out: Path = _OUT,
    framework: Literal["auto", "verl", "trl", "nemo_rl"] = "auto",
    gpus: int = 0,
    rows: int = 0,
) -> str:
    """Translate a config of verl, TRL or NeMo-RL, and list what has no counterpart.

    Nothing of the source is run. Fields that have to be set by hand are null in the result, which
    every run refuses by name.

    Args:
        source: their YAML, a shell script with the command, or Python with a call of GRPOConfig;
            `-` for none.
        arguments: their command, or overrides of the file: 'data.train_batch_size=64'.
        out: YAML file to write.
        framework: whose it is; `auto` tells it from the text.
        gpus: all GPUs, where the source does not say it (TRL).
        rows: of the training data, where the source counts epochs.
    Returns: the text to print.
    Raises: Refusal for a source that cannot be read, or has settings of no framework.
    """
    from spmdrl.tools.import_config.read import read_source
    from spmdrl.tools.import_config.table import table_of
    from spmdrl.tools.import_config.translation import Theirs, translate, yaml_of

    path = None if source == _NO_FILE else source
    if path is None and not arguments:
        raise Refusal("name a file, or give a command by --arguments")
    name, values = read_source(path, arguments, framework=framework)
    table = table_of(name)
    theirs = Theirs(values, table, gpus=gpus, rows=rows)
    ours = translate(
        theirs, table, importlib.import_module(f"spmdrl.tools.import_config.{name}").RULES
    )
    head = f"From {path or 'a command'} of {name}, with the defaults of version {table.version}."
    write_file(out, yaml_of(ours, theirs, table, head=head).encode())

    lines = [f"wrote {out}, from {len(values)} settings of {name} ({table.version}):"]
    lines.append(
        f"  {len(ours.translated)} translated, {len(ours.nothing)} need nothing here, "
        f"{len(ours.dropped)} have no counterpart, {len(ours.unknown)} unknown"
    )
    sections = {
        "To be set by hand (null in the file):": list(ours.asked.items()),
        "Differs here:": ours.notes,
        "Not translated:": ours.dropped,
        "Not in the table:": ours.unknown,
    }
    for title, own in sections.items():
        lines += [title, *(f"  {what}: {why}" for what, why in own)] if own else []
    problems = _problems(ours)
    lines += ["Also refused:", *(f"  {problem}" for problem in problems)] if problems else []
    if not problems and not ours.asked:
        lines.append(f"python train.py --config {out} --dry-run checks it with its files.")
    return "\n".join(lines)


def _problems(ours: Ours) -> list[str]:
    """Return what our checks refuse of the fields that are set, as far as no file is needed."""
    from spmdrl.check.settings import validate
    from spmdrl.config.tree import build, convert, settings

    values = {}
    problems = []
    for name, value in ours.fields.items():
        try:
            values[name] = convert(value, settings()[name])
        except Refusal as refusal:
            problems.append(f"{name}: {refusal}")
    for name in ours.asked:
        with contextlib.suppress(Refusal):
            values[name] = convert("asked", settings()[name])  # a text stands for what will be set
    # Without the number of ranks no layout can be judged.
    asked = tuple("layout." if name == "layout.world_size" else f"{name}:" for name in ours.asked)
    return problems + [text for text in validate(build(values)) if not text.startswith(asked)]


main = partial(run_command, "import_config", import_config)
