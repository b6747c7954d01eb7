"""Prove a model on this machine's CPUs: trainer, meshes, adapters, engines, export.

    python -m spmdrl check Qwen/Qwen3-0.6B
    python -m spmdrl check my_model --layout configs/gpu_qwen3_1.7b_8.yaml
    python -m spmdrl check --families all --table docs/models.md
    python -m spmdrl check my_model --exact

Makes a small model of the same code (only config.json is needed) and runs the product on it, in
float32: each line is proved with what was measured, refused with the reason that a run would give,
WRONG, or not finished within --timeout-s. Exit status 0: one rank trains it right, an engine serves
it, and nothing is wrong; 3: nothing is wrong, and a line was not finished; 1: all else.

With --exact: whether the model's bits depend on the batch, with its own weights (docs/exact.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from spmdrl.errors import Refusal, say
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:  # and in the functions: `--help` needs none of it
    from spmdrl.check.proved_models import Record
    from spmdrl.config import LayoutSettings

_UNFINISHED = 3
"""Exit status if nothing is wrong and a line took longer than --timeout-s."""


def check(
    model: Annotated[str, tyro.conf.Positional] = "",
    *,
    layout: Path | None = None,
    families: str = "",
    table: Path | None = None,
    again: bool = False,
    engines: Literal["both", "vllm", "transformers", "none"] = "both",
    keep: Path | None = None,
    timeout_s: float = 180.0,
    trust_remote_code: bool = False,
    part: Literal["all", "text"] = "all",
    exact: bool = False,
) -> int:
    """Check one model, or families of transformers.

    Args:
        model: folder or hub name; its weights are not read.
        layout: a config file, whose mesh of trainers is proved too.
        families: instead of a model: `all` for the table's, or model types of transformers,
            separated by commas, or a file with one on each line.
        table: Markdown page to write the results of all families into. Families with a record of
            the installed versions are not checked again.
        again: check them again.
        engines: which kinds to stream into.
        keep: folder for small models, checkpoints and logs of ranks, which then stay.
        timeout_s: longest that one line may take, in seconds.
        trust_remote_code: run Python code of the model's folder.
        part: as model.part: all of a vision model, or its text model alone.
        exact: only find where the bits of the model first depend on the batch; reads its weights.
    Returns: the exit status: 0 if everything that a run would use is proved.
    Raises: Refusal for a model or layout that cannot be read, or none given.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    kinds = {"both": ("transformers", "vllm"), "none": ()}.get(engines, (engines,))
    options = dict(engines=kinds, keep=keep, timeout_s=timeout_s)
    if families and not model:
        return _check_families(families, table=table, again=again, options=options)
    if not model or families:
        raise Refusal("name a folder or hub model, or --families, one of both")
    if exact:
        return _check_exact(model, trust_remote_code=trust_remote_code, part=part)
    from spmdrl.check.proved_models import keep as keep_record
    from spmdrl.check.proved_models import own_records
    from spmdrl.config import load_yaml
    from spmdrl.model.load import load_hf_config

    hf_config = load_hf_config(model, trust_remote_code=trust_remote_code, part=part)
    mesh = load_yaml(layout).layout if layout else None
    record = _checked(model, hf_config, layout=mesh, options=options)
    keep_record(record, own_records())
    say(_closing(record))
    return _status([record])


def _check_exact(model: str, *, trust_remote_code: bool, part: Literal["all", "text"]) -> int:
    from spmdrl.config import ModelSettings
    from spmdrl.tools.proof.exact_search import exact_lines

    settings = ModelSettings(path=model, trust_remote_code=trust_remote_code, part=part)
    is_exact = True
    for line in exact_lines(settings):
        say(line, flush=True)
        is_exact &= "WRONG" not in line
    return 0 if is_exact else 1


def _status(records: Sequence[Record]) -> int:
    """Return the exit status for the records of models."""
    left = [record for record in records if not record.is_proved]
    if not left:
        return 0
    return _UNFINISHED if all(record.is_unfinished for record in left) else 1


def _check_families(
    families: str, *, table: Path | None, again: bool, options: dict[str, Any]
) -> int:
    from spmdrl.check import proved_models as records
    from spmdrl.tools.proof.table import write
    from spmdrl.tools.small_models.families import family_config, family_names

    names = list(family_names()) if families == "all" else families.split(",")
    if Path(families).is_file():
        names = Path(families).read_text().split()
    path = records.SHIPPED if table else records.own_records()
    known = {one.model: one for one in records.read(path) if one.versions == records.versions()}
    for at, name in enumerate(names, 1):
        if name in known and not again:
            continue
        say(f"\n{name} ({at} of {len(names)})", flush=True)
        known[name] = _checked(name, family_config(name), layout=None, options=options)
        records.keep(known[name], path)
        if table:
            write(records.read(path), table)
    if table:
        write(records.read(path), table)
    return _status([known[name] for name in names])


def _checked(
    name: str, hf_config: Any, *, layout: LayoutSettings | None, options: dict[str, Any]
) -> Record:
    """Print each line when it is done; return all of them."""
    from spmdrl.check.proved_models import record_of
    from spmdrl.sandbox.removal import own_folder
    from spmdrl.tools.proof.prove import Proof

    kept = options["keep"]
    with contextlib.ExitStack() as stack:
        folder = kept / name if kept else Path(stack.enter_context(own_folder("check")))
        proof = Proof(hf_config, folder, layout=layout, timeout_s=options["timeout_s"])
        lines = []
        for line in proof.lines(engines=options["engines"]):
            line = replace(line, note=line.note.replace(f"{folder}/", ""))
            say(line, flush=True)
            lines.append(line)
        return record_of(name, hf_config, lines, class_name=proof.class_name)


def _closing(record: Record) -> str:
    if record.is_unfinished:
        return "not proved: some lines were not finished; give them longer by --timeout-s"
    if not record.is_proved:
        return "not proved"
    engines = [line for line in record.lines if "engine" in line.name]
    served = [line.name.split()[0] for line in engines if line.verdict == "proved"]
    return f"proved; engine.kind: {' or '.join(served) or 'none was tried'}"


main = partial(run_command, "check", check)
