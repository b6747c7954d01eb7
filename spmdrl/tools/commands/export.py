"""Write a checkpoint as a Hugging Face folder that transformers and vLLM load.

    python -m spmdrl export runs/demo --out exported
    python -m spmdrl export runs/demo --which best --out exported
    python -m spmdrl export runs/demo/checkpoints/step_40 --out exported --dtype bfloat16
    python -m spmdrl export runs/lora --out adapter --adapter
    torchrun --nproc-per-node 4 -m spmdrl export runs/demo --out exported

One process, or as many as torchrun or srun starts, which then share the weight files, on a disk
that all of them see; whatever layout wrote the checkpoint. The folder is the same. Memory of each
is that of one output file and one parameter. A reward model becomes a sequence classifier of one
label. Adapters are merged into the weights that they were trained on, or with --adapter written by
themselves, in PEFT's format.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from spmdrl.config import ModelSettings
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.run_folder import make_folder, remove, rename
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:
    from spmdrl.checkpoint.manifest import Manifest


def export(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path,
    which: Literal["last", "best"] = "last",
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    max_shard_gib: float = 4.0,
    model: str = "",
    tokenizer: str = "",
    adapter: bool = False,
    trust_remote_code: bool = False,
    is_shared: tyro.conf.Suppress[bool] = False,
) -> Path:
    """Write the policy of a checkpoint into a Hugging Face folder.

    Args:
        checkpoint: a checkpoint folder, or a run's folder to take its newest whole one.
        out: folder to write; must be new or empty.
        which: of a run's checkpoints, its newest whole one, or the `best` by checkpoint.keep.
        dtype: of the floating-point weights; `auto` takes that of the model trained from.
        max_shard_gib: largest weight file, GiB; a tensor above it gets a file of its own.
        model: folder or hub name for config.json, where the one in the checkpoint has moved.
        tokenizer: the same for the tokenizer's files.
        adapter: write the adapters alone, which `model` goes with, in PEFT's format.
        trust_remote_code: run and copy Python code of the model, whatever the checkpoint says.
        is_shared: every rank that torchrun or srun started calls this, and writes its share.
    Returns: the folder.
    Raises: Refusal when there is no whole checkpoint, `out` is taken, the model's small files
        cannot be found, or it needs code that is not trusted.
    """
    from spmdrl.tools.export.hf_folder import Ranks, write_folder
    from spmdrl.tools.export.weights import SavedWeights, export_adapter

    if not max_shard_gib > 0:
        raise Refusal(f"--max-shard-gib must be above 0, got {max_shard_gib}")
    made = out.with_name(out.name + ".partial")
    with Ranks.joined(is_shared=is_shared) as ranks:
        folder, content = ranks.first(lambda: _begin(checkpoint, out, which=which, made=made))
        base = model or content.model
        trusts = trust_remote_code
        ranks.first(lambda: _check_code(content, base, trusts=trust_remote_code))
        if adapter:
            saved = SavedWeights(folder)
            ranks.first(lambda: export_adapter(saved, made, base=base, trust_remote_code=trusts))
        else:
            words = content.tokenizer if base == content.model else base
            write_folder(
                folder,
                made,
                model=ModelSettings(
                    path=base,
                    tokenizer=tokenizer or words,
                    trust_remote_code=trust_remote_code,
                    part="text" if content.config.get("model.part") == "text" else "all",
                ),
                dtype=dtype,
                max_file_bytes=int(max_shard_gib * 2**30),
                ranks=ranks,
            )
        return ranks.first(lambda: _moved(made, out))


def _begin(checkpoint: Path, out: Path, *, which: str, made: Path) -> tuple[Path, Manifest]:
    from spmdrl.checkpoint.keep import named
    from spmdrl.checkpoint.manifest import whole_checkpoint

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal(f"--out {out} exists and is not empty; give a new folder")
    found = whole_checkpoint(named(checkpoint, which))
    with refusing(f"--out {out}: nothing can be written there", OSError):
        remove(made)
        make_folder(made, within=made.parent)
    return found


def _check_code(content: Manifest, base: str, *, trusts: bool) -> None:
    from spmdrl.tools.export.hf_folder import brings_code

    if content.config.get("model.trust_remote_code") and brings_code(base) and not trusts:
        raise Refusal(
            f"the checkpoint's run had model.trust_remote_code, and {base} brings Python code of "
            "its own; look at it, and run it by --trust-remote-code"
        )


def _moved(made: Path, out: Path) -> Path:
    if out.is_dir():
        out.rmdir()
    rename(made, out)
    return out


main = partial(run_command, "export", partial(export, is_shared=True))
