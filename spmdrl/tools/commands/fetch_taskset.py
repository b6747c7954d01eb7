r"""Write the tasks of a taskset of the `verifiers` package as rows that a run trains on.

    python -m spmdrl fetch_taskset my_taskset.py train.jsonl --count 1000
    python -m spmdrl fetch_taskset gsm8k test.jsonl --options '{split: test}'

Each row is the data of one task, for `environment: {name: verifiers, taskset: ...}`
(docs/outside_environments.md).
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from spmdrl.environments.verifiers import rows_of
from spmdrl.errors import Refusal, say
from spmdrl.run_folder import write_file
from spmdrl.tools.commands import run_command


def fetch(
    taskset: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    *,
    options: str = "{}",
    count: int = 10_000,
) -> None:
    """Write the tasks of a taskset of the verifiers package as rows that a run trains on.

    Args:
        taskset: name of an installed taskset, or a file `path/file.py` with one.
        out: JSONL file.
        options: fields of the taskset's config, as YAML.
        count: most tasks; a taskset may have infinitely many.
    """
    chosen = yaml.safe_load(options)
    if not isinstance(chosen, dict):
        raise Refusal(f"--options: expected a mapping, got {options!r}")
    rows = itertools.islice(rows_of(taskset, chosen), count)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if not lines:
        raise Refusal(f"{taskset} has no tasks")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, "".join(f"{line}\n" for line in lines))
    say(f"{out}: {len(lines)} tasks")


main = partial(run_command, "fetch_taskset", fetch)
