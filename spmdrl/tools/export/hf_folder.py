"""A policy's checkpoint as a Hugging Face folder: its small files, and its weights file by file."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.config import ModelSettings
from spmdrl.data.hub import find_on_hub
from spmdrl.data.tokenizer import read_tokenizer
from spmdrl.errors import Refusal
from spmdrl.imports import parsed_json, refusing
from spmdrl.model.files.file_tensors import file_tensors
from spmdrl.model.files.quantised import QUANTISATION_KEYS
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.load import SCALAR_HEAD, build_meta_model, model_folder
from spmdrl.model.lora.quantised_base import base_weights
from spmdrl.model.tensor_parts import Box, Part, narrow
from spmdrl.run_folder import write_file
from spmdrl.tools.export.weights import MergedWeights, SavedWeights
from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.groups import join_world, meet
from spmdrl.world.launch import is_launched, read_launch

T = TypeVar("T")
_WAIT = timedelta(hours=2)  # for the slowest rank's files; one that dies is noticed at once
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "*.tiktoken",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""The only files that are copied from a folder: another person's checkpoint may name any folder."""
_CODE = "auto_map"
"""The key of config.json and tokenizer_config.json that names Python files of the folder."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that write one folder together."""

    rank: int = 0
    size: int = 1

    @classmethod
    @contextlib.contextmanager
    def joined(cls, *, is_shared: bool) -> Iterator[Ranks]:
        """Yield the ranks that torchrun or srun started, in a gloo group; else one process.

        Within an allocation of Slurm, but not under srun, this is one process.
        """
        launch = read_launch() if is_shared and is_launched() else None
        if launch is None or launch.world_size == 1:
            yield cls()
            return
        if dist.is_initialized():
            yield cls(launch.rank, launch.world_size)
            return
        launch.pass_on()
        store = meet(launch, shared=None, within=_WAIT)
        join_world("gloo", launch, store=store, device=torch.device("cpu"), timeout=_WAIT)
        yield cls(launch.rank, launch.world_size)
        dist.destroy_process_group()

    def first(self, work: Callable[[], T]) -> T:
        """Return on every rank what `work` returns on the first. Raises: as it does, on all."""
        if self.size == 1:
            return work()
        own = self.all(work if self.rank == 0 else lambda: None)
        return gather_objects(own, group=dist.group.WORLD)[0]

    def all(self, work: Callable[[], T]) -> T:
        """Have every rank work. Raises: Refusal on all of them where one of them fails."""
        if self.size == 1:
            return work()
        with agree(group=dist.group.WORLD):
            done = work()
        return done


def write_folder(
    checkpoint: Path,
    out: Path,
    *,
    model: ModelSettings,
    dtype: str,
    max_file_bytes: int,
    ranks: Ranks,
) -> None:
    """Write the weights of a whole checkpoint, adapters merged, beside the small files of `model`.

    Args:
        checkpoint: its folder.
        out: an existing, empty folder.
        model: where config.json and the tokenizer's files come from.
        dtype: of the floating-point weights; `auto` takes that of config.json.
        max_file_bytes: of a weight file; a tensor above it gets a file of its own.
    Raises: Refusal when files of `model` cannot be found, or do not fit the weights.
    """

    def describe() -> torch.dtype:
        trusts = model.trust_remote_code
        own = ("config.json", "generation_config.json")
        _copy_small_files(model.path, out, flag="--model", trusts=trusts)
        _copy_small_files(model.tokenizer, out, flag="--tokenizer", trusts=trusts, skip=own)
        return _set_dtype(out / "config.json", dtype)

    cast = ranks.first(describe)
    saved = SavedWeights(checkpoint)
    is_scalar = SCALAR_HEAD in saved.dtypes
    if is_scalar:
        ranks.first(lambda: _make_classifier(out))

    def write() -> None:
        hf_model = build_meta_model(replace(model, path=str(out)), is_scalar=is_scalar)
        parts = file_tensors(hf_model)
        weights: SavedWeights | MergedWeights = saved
        if saved.has_adapters:
            base = model_folder(model.path)
            own = base_weights(hf_model)
            weights = MergedWeights(saved, base, parts, quantisable=own, part=model.part)
        rest = None
        if model.part != "all":
            rest = CheckpointReader(model_folder(model.path), part=model.part)
            parts = {rest.named.get(name, name): part for name, part in parts.items()}
        _write_weights(
            weights, out, parts=parts, rest=rest, dtype=cast, limit=max_file_bytes, ranks=ranks
        )

    ranks.all(write)


def _copy_small_files(
    name: str, target: Path, *, flag: str, trusts: bool, skip: tuple[str, ...] = ()
) -> None:
    """Copy the small files of a model or tokenizer, and its Python files where they are trusted."""
    source = Path(name)
    if not source.is_dir():
        source = _from_hub(name, flag=flag)
    if flag == "--model" and not (source / "config.json").is_file():
        raise Refusal(f"{source} has no config.json; give the model's folder by {flag}")
    for pattern in (*_SMALL_FILES, *(["*.py"] if trusts else [])):
        for path in sorted(source.glob(pattern)):
            if path.name not in skip:
                _check_inside(path, source)
                shutil.copyfile(path, target / path.name)
    for path in () if trusts else (target / "config.json", target / "tokenizer_config.json"):
        _leave_out_code(path)


def _check_inside(path: Path, source: Path) -> None:
    """Refuse a path that is no file of its folder, or of the hub's cache around the folder."""
    root = source.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    if not path.is_file() or not any(path.resolve().is_relative_to(own) for own in roots):
        raise Refusal(
            f"{path} is no file of {source}, but a link to {path.resolve()}; put the file there "
            "if the export is to have it"
        )


def _leave_out_code(path: Path) -> None:
    """Remove the names of Python files from a copied file: these were not copied."""
    content = _json_of(path) if path.is_file() else {}
    if content.pop(_CODE, None):
        write_file(path, json.dumps(content, indent=2) + "\n")


def brings_code(name: str) -> bool:
    """Return whether a model's folder names Python files that come with it."""
    path = Path(name) / "config.json"
    return path.is_file() and bool(_json_of(path).get(_CODE))


def _json_of(path: Path) -> dict[str, Any]:
    content, why = parsed_json(path.read_text(errors="replace"))
    if not isinstance(content, dict):
        raise Refusal(f"{path} is no JSON object{f': {why}' if why else ''}")
    return content


def _from_hub(name: str, *, flag: str) -> Path:
    from huggingface_hub import snapshot_download

    what = "is neither a folder here nor a hub name in reach"
    hint = f"; say by {flag} where it is now"
    with refusing(f"{name} {what}", OSError, ValueError, hint=hint):
        find_on_hub(name, field=flag)
        return Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, "*.py"]))


def _set_dtype(path: Path, dtype: str) -> torch.dtype:
    """Write the dtype of the weights into config.json and return it; they are plain now."""
    config = _json_of(path)
    for key in QUANTISATION_KEYS:
        config.pop(key, None)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # older files have the former
    if dtype == "auto":
        dtype = config.get(key) or "float32"
    config[key] = dtype
    write_file(path, json.dumps(config, indent=2) + "\n")
    cast = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(cast, torch.dtype) or not cast.is_floating_point:
        raise Refusal(f"config.json names the dtype {dtype!r}; choose one by --dtype")
    return cast


def _make_classifier(folder: Path) -> None:
    """Let config.json say that the model is a sequence classifier of one label.

    transformers takes the score after the last token that is not padding, so padding must not
    be a token that ends a sequence: then it is the tokenizer's own, or none, which allows one
    sequence at a time.
    """
    path = folder / "config.json"
    config = _json_of(path)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refusal(f"{path} names the architectures {names!r}; expected a list of classes")
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in names
    ]
    config |= {"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}}
    tokenizer = read_tokenizer(str(folder))
    ends = config.get("eos_token_id")
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    candidates = (config.get("pad_token_id"), tokenizer.pad_token_id)
    config["pad_token_id"] = next((i for i in candidates if i is not None and i not in ends), None)
    write_file(path, json.dumps(config, indent=2) + "\n")


def _write_weights(
    weights: SavedWeights | MergedWeights,
    target: Path,
    *,
    parts: dict[str, Part],
    rest: CheckpointReader | None,
    dtype: torch.dtype,
    limit: int,
    ranks: Ranks,
) -> None:
    """Write every file tensor, cut from the checkpoint's tensors as `parts` says, and the `rest`,
    tensors that were not trained. Each rank writes its share of the files, the first one the index.

    Raises: Refusal when the checkpoint's tensors are not those that config.json asks for.
    """
    kept = weights.dtypes
    _check_fit(kept, parts)
    sizes = {
        name: math.prod(part.shape) * _out_dtype(kept[part.tensor], dtype).itemsize
        for name, part in parts.items()
    }
    carried = sorted(rest.rest) if rest else []
    sizes |= {name: _whole(rest, name).nbytes for name in carried if rest}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for number, (file, names) in enumerate(split.filename_to_tensors.items(), start=1):
        if number % ranks.size != ranks.rank:
            continue
        content = {name: _whole(rest, name) for name in names if rest and name not in parts}
        trained = [name for name in names if name in parts]
        for live, own in itertools.groupby(trained, key=lambda name: parts[name].tensor):
            whole = weights.read(live)
            cast = _out_dtype(kept[live], dtype)
            content |= {name: _file_tensor(whole, parts[name], dtype=cast) for name in own}
        save_file(content, target / file, metadata={"format": "pt"})
    if split.is_sharded and ranks.rank == 0:
        text = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_file(target / "model.safetensors.index.json", json.dumps(text, indent=2) + "\n")


def _whole(reader: CheckpointReader, name: str) -> Tensor:
    shape = reader.shape(name)
    return reader.read(name, start=(0,) * len(shape), shape=shape)


def _check_fit(kept: dict[str, torch.dtype], parts: dict[str, Part]) -> None:
    differing = sorted({part.tensor for part in parts.values()} ^ kept.keys())
    if differing:
        where = "checkpoint" if differing[0] in kept else "model of config.json"
        raise Refusal(
            f"only the {where} has {differing[0]} ({len(differing)} tensors are in "
            "one alone); name the model that was trained from by --model"
        )


def _out_dtype(kept: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype if kept.is_floating_point else kept


def _file_tensor(whole: Tensor, part: Part, *, dtype: torch.dtype) -> Tensor:
    """Return a copy of the file tensor, contiguous."""
    values = part.as_in_file(narrow(whole, outer=Box.whole(whole.shape), part=part.box))
    return torch.empty(part.shape, dtype=dtype).copy_(values)
