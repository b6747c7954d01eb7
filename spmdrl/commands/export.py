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

import functools
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
import torch.distributed as dist
import tyro
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from spmdrl.checkpoint import manifest as disk
from spmdrl.checkpoint.keep import named
from spmdrl.checkpoint.weights import SavedWeights
from spmdrl.commands.export_adapter import MergedWeights, export_adapter
from spmdrl.config import ModelSettings
from spmdrl.model.file_tensors import file_tensors
from spmdrl.model.load import SCALAR_HEAD, build_meta_model, model_folder
from spmdrl.model.shards import Box, Part, narrow
from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.launch import is_launched, known_rank, read_launch

T = TypeVar("T")
_WAIT = timedelta(hours=2)  # for the slowest rank's files; one that dies is noticed at once
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")


def export(
    checkpoint: Annotated[Path, tyro.conf.Positional],
    *,
    out: Path,
    which: Literal["last", "best"] = "last",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    max_shard_gib: float = 4.0,
    model: str = "",
    tokenizer: str = "",
    adapter: bool = False,
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
        is_shared: every rank that torchrun or srun started calls this, and writes its share.
    Returns: the folder.
    Raises: ValueError when there is no whole checkpoint, `out` is taken, or the model's small
        files cannot be found.
    """
    ranks = Ranks.here() if is_shared else Ranks()
    if not max_shard_gib > 0:
        raise ValueError(f"--max-shard-gib must be above 0, got {max_shard_gib}")
    made = out.with_name(out.name + ".partial")

    def begin() -> tuple[Path, disk.Manifest]:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out {out} exists and is not empty; give a new folder")
        found = whole_checkpoint(named(checkpoint, which))
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        return found

    folder, content = ranks.first(begin)
    model = model or content.model
    trusts = bool(content.config.get("model.trust_remote_code"))
    if adapter:
        ranks.first(
            lambda: export_adapter(SavedWeights(folder), made, base=model, trust_remote_code=trusts)
        )
        return ranks.first(lambda: _moved(made, out))

    def describe() -> torch.dtype:
        _copy_small_files(model, made, flag="--model")
        _copy_small_files(
            tokenizer or (content.tokenizer if model == content.model else model),
            made,
            flag="--tokenizer",
            skip=("config.json", "generation_config.json"),
        )
        return _set_dtype(made / "config.json", dtype)

    cast = ranks.first(describe)
    saved = SavedWeights(folder)
    is_scalar = SCALAR_HEAD in saved.dtypes
    if is_scalar:
        ranks.first(lambda: _make_classifier(made))

    def write() -> None:
        parts = file_tensors(
            build_meta_model(
                ModelSettings(path=str(made), trust_remote_code=trusts), is_scalar=is_scalar
            )
        )
        weights = MergedWeights(saved, model_folder(model), parts) if saved.has_adapters else saved
        _write_weights(
            weights, made, parts=parts, dtype=cast, limit=int(max_shard_gib * 2**30), ranks=ranks
        )

    ranks.all(write)
    return ranks.first(lambda: _moved(made, out))


@dataclass(frozen=True)
class Ranks:
    """This process among those that write one folder together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> Ranks:
        """Return what torchrun or srun started, joined by a gloo group; else one process.

        Within an allocation of Slurm, but not under srun, this is one process.
        """
        launch = read_launch() if is_launched() else None
        if launch is None or launch.world_size == 1:
            return cls()
        if not dist.is_initialized():
            launch.pass_on()
            dist.init_process_group("gloo", init_method="env://", timeout=_WAIT)
        return cls(launch.rank, launch.world_size)

    def first(self, work: Callable[[], T]) -> T:
        """Return on every rank what `work` returns on the first. Raises: as it does, on all."""
        own = self.all(work if self.rank == 0 else lambda: None)
        return own if self.size == 1 else gather_objects(own, group=dist.group.WORLD)[0]

    def all(self, work: Callable[[], T]) -> T:
        """Have every rank work. Raises: ValueError on all of them where it does on one."""
        if self.size == 1:
            return work()
        with agree(group=dist.group.WORLD):
            done = work()
        return done


def _moved(made: Path, out: Path) -> Path:
    if out.is_dir():
        out.rmdir()
    os.rename(made, out)
    return out


def whole_checkpoint(path: Path) -> tuple[Path, disk.Manifest]:
    """Return a checkpoint's folder and manifest: `path` itself, or the newest whole one of a run.

    Raises: ValueError when there is none, saying what is wrong with each that is there.
    """
    candidates = [path]
    if not (path / disk.NAME).is_file():
        candidates = disk.complete_checkpoints(disk.checkpoints_folder(path))
        candidates = candidates or disk.complete_checkpoints(path)
    problems = []
    for folder in candidates:
        try:
            content = disk.read_manifest(folder)
            damages = disk.damages(folder, content)
        except ValueError as error:
            damages = [str(error)]
        if not damages:
            return folder, content
        problems += damages
        warnings.warn(f"{folder} cannot be used: {'; '.join(damages)}", stacklevel=2)
    raise ValueError(
        f"{path} is no whole checkpoint and no run that has one"
        + "".join(f"\n  {problem}" for problem in problems)
    )


def _copy_small_files(name: str, target: Path, *, flag: str, skip: tuple[str, ...] = ()) -> None:
    source = Path(name)
    if not source.is_dir():
        source = _from_hub(name, flag=flag)
    if flag == "--model" and not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json; give the model's folder by {flag}")
    for pattern in _SMALL_FILES:
        for path in sorted(source.glob(pattern)):
            if path.name not in skip and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)


def _from_hub(name: str, *, flag: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_SMALL_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{name} is neither a folder here nor a hub name in reach: {error}; "
            f"say by {flag} where it is now"
        ) from error


def _set_dtype(path: Path, dtype: str) -> torch.dtype:
    """Write the dtype of the weights into config.json and return it."""
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # older files have the former
    if dtype == "auto":
        dtype = config.get(key) or "float32"
    config[key] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
    cast = getattr(torch, dtype, None)
    if not isinstance(cast, torch.dtype) or not cast.is_floating_point:
        raise ValueError(f"config.json names the dtype {dtype!r}; choose one by --dtype")
    return cast


def _make_classifier(folder: Path) -> None:
    """Let config.json say that the model is a sequence classifier of one label.

    transformers takes the score after the last token that is not padding, so padding must not
    be a token that ends a sequence: then it is the tokenizer's own, or none, which allows one
    sequence at a time.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification")
        for name in config.get("architectures") or ()
    ]
    config |= {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = config.get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    candidates = (config.get("pad_token_id"), tokenizer.pad_token_id)
    config["pad_token_id"] = next((i for i in candidates if i is not None and i not in ends), None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_weights(
    weights: SavedWeights | MergedWeights,
    target: Path,
    *,
    parts: dict[str, Part],
    dtype: torch.dtype,
    limit: int,
    ranks: Ranks,
) -> None:
    """Write every file tensor, cut from the checkpoint's tensors as `parts` says; of the files
    every rank writes its share, and the first one the index.

    Raises: ValueError when the checkpoint's tensors are not those that config.json asks for.
    """
    kept = weights.dtypes
    _check_fit(kept, parts)
    sizes = {
        name: math.prod(part.shape) * _out_dtype(kept[part.tensor], dtype).itemsize
        for name, part in parts.items()
    }
    shards = _shards(sizes, limit=limit)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= dict.fromkeys(names, file)
        if number % ranks.size != ranks.rank:
            continue
        content: dict[str, Tensor] = {}
        for live, own in itertools.groupby(names, key=lambda name: parts[name].tensor):
            whole = weights.read(live)
            cast = _out_dtype(kept[live], dtype)
            content |= {name: _file_tensor(whole, parts[name], dtype=cast) for name in own}
        save_file(content, target / file, metadata={"format": "pt"})
    if len(shards) > 1 and ranks.rank == 0:
        text = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(text, indent=2) + "\n")


def _check_fit(kept: dict[str, torch.dtype], parts: dict[str, Part]) -> None:
    differing = sorted({part.tensor for part in parts.values()} ^ kept.keys())
    if differing:
        where = "checkpoint" if differing[0] in kept else "model of config.json"
        raise ValueError(
            f"only the {where} has {differing[0]} ({len(differing)} tensors are in "
            "one alone); name the model that was trained from by --model"
        )


def _out_dtype(kept: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if kept.is_floating_point else kept


def _file_tensor(whole: Tensor, part: Part, *, dtype: torch.dtype) -> Tensor:
    """Return a copy of the file tensor, contiguous."""
    everything = Box((0,) * whole.dim(), tuple(whole.shape))
    values = part.as_in_file(narrow(whole, outer=everything, part=part.box))
    return torch.empty(part.shape, dtype=dtype).copy_(values)


def _shards(sizes: dict[str, int], *, limit: int) -> list[list[str]]:
    """Cut names, in order, into lists of at most `limit` bytes."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def main() -> None:
    """Run from the command line; where several ranks do, the first one speaks."""
    is_first = known_rank() in ("0", "?")
    try:
        folder = tyro.cli(functools.partial(export, is_shared=True), prog="python -m spmdrl export")
    except ValueError as error:
        raise SystemExit(f"export: {error}" if is_first else 1) from error
    if is_first:
        print(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
