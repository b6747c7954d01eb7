"""Load a Hugging Face folder: first the modules on the meta device, then slices of the weights.

No rank ever holds a whole model. Modules are built without storage and sharded. Then each rank
reads its own slices of the safetensors files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.config import Config, ModelSettings
from spmdrl.data.hub import find_on_hub
from spmdrl.errors import Refusal
from spmdrl.imports import is_missing_folder, missing_folder, refusing, versions
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.files.quantised import quantisation
from spmdrl.model.files.reader import CheckpointReader, some, text_config, text_part
from spmdrl.model.files.tied import check_copy, check_sample, copies_in, tied_names
from spmdrl.model.tensor_parts import Held, Part
from spmdrl.model.transformers_internals import (
    has_towers,
    ignored_names,
    initialise,
    owners,
    written_by_initialising,
)
from spmdrl.model.vision.families import build_vision_model, check_vision_family, set_attention
from spmdrl.world.torch_internals import is_persistent, storage_id

SCALAR_HEAD = "score.weight"


def hf_config_of(model: ModelSettings, *, path: str = "") -> Any:
    """Return the transformers config of a run's model, or of the model at `path` beside it.

    Raises: Refusal as `load_hf_config`.
    """
    return load_hf_config(
        path or model.path, trust_remote_code=model.trust_remote_code, part=model.part
    )


def load_hf_config(path: str, *, trust_remote_code: bool = False, part: str = "all") -> Any:
    """Read a model's config.json from a local folder or the hub; no weights are touched.

    Args:
        part: model.part; `text` returns the text model's own config.
    Returns: the transformers PreTrainedConfig.
    Raises: Refusal when the folder is missing or its config cannot be read.
    """
    from transformers import AutoConfig

    if not path:
        raise Refusal("model.path: is required and empty; name a folder or a hub model")
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise Refusal(
            f"model.path: folder {path} has no config.json; is it a Hugging Face "
            f"model folder? it holds {some(p.name for p in folder.iterdir())}"
        )
    if is_missing_folder(path):
        raise Refusal(f"model.path: {missing_folder(path)}")
    find_on_hub(path, field="model.path")
    where = "unreadable" if folder.is_dir() else "neither a folder nor a hub model in reach"
    # transformers raises many kinds, all of them mean the same here.
    with refusing(f"model.path: {path} is {where}", Exception):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with refusing(f"model.path: {path} cannot be loaded", ValueError):
        quantisation(config.to_dict())
    if not has_towers(config):
        return config
    if part != "text":
        check_vision_family(config, path=path)
        return config
    own = text_part(path)
    config = text_config(config)
    config.tie_word_embeddings = own is not None and own.is_tied
    return config


def model_folder(path: str) -> Path:
    """Return the local folder of a model's weights, fetching a hub model into the cache.

    Raises: Refusal when it is not there and cannot be fetched.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    # For network, access and unknown names, the message is the hub's.
    with refusing(f"model.path: cannot fetch the weights of {path}", Exception):
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))


def build_meta_model(
    model: ModelSettings,
    *,
    attention: str | None = "eager",
    is_scalar: bool = False,
    config: Any = None,
) -> nn.Module:
    """Build a model's modules without storage, tied weights tied.

    Args:
        model: the config's model section.
        attention: name in transformers' attention interface; None: transformers chooses.
        is_scalar: with a head `score` of one output instead of the vocabulary's.
        config: a transformers config instead of that of `model.path`.
    Returns: a transformers causal LM, vision model or sequence classifier, all parameters float32
        on the meta device.
    Raises: Refusal for a missing folder, or an architecture without such a class.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    config = config or hf_config_of(model)
    kind = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    build = partial(
        kind.from_config,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=model.trust_remote_code,
    )
    if has_towers(config):
        build = partial(build_vision_model, attention=attention, is_scalar=is_scalar)
    elif is_scalar:
        config.num_labels = 1
    what = f"{config.model_type} of {model.path} as a " + (
        "sequence classifier" if is_scalar else "causal language model"
    )
    # Code of many families reads the config and may raise anything.
    what = f"model.path: cannot build {what}"
    hint = "; mend its config.json, or take a model of another family"
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if is_scalar else MODEL_FOR_CAUSAL_LM_MAPPING
    if not (has_towers(config) or model.trust_remote_code or type(config) in known):
        raise Refusal(f"{what}: transformers {versions()['transformers']} has no such class{hint}")
    with torch.device("meta"), refusing(what, Exception, names_kind=True, hint=hint):
        hf_model = build(config)
    head = hf_model.get_output_embeddings()
    embedding = hf_model.get_input_embeddings()
    # The field of some configs is wrong, and some have no such field.
    config.tie_word_embeddings = getattr(head, "weight", None) is embedding.weight
    return hf_model


def max_positions(config: Any) -> int | None:
    """Return the tokens that a sequence may have; None where the model's config names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def longest_sequence(cfg: Config) -> int:
    """Return the length of the longest sequence that a run can have, in tokens.

    It is at most the positions of the policy: longer dataset rows are refused.
    """
    positions = max_positions(hf_config_of(cfg.model))
    if positions is None:
        return cfg.longest_sequence
    return min(cfg.longest_sequence, positions)


def checkpoint_shapes(cfg: Config) -> dict[str, torch.Size]:
    """Return {name in the safetensors files: shape} of the policy; tied weights appear once."""
    model = build_meta_model(cfg.model, is_scalar=cfg.objective.is_scalar)
    return {name: torch.Size(part.shape) for name, part in file_tensors(model).items()}


def check_weights(
    reader: CheckpointReader,
    hf_model: nn.Module,
    parts: Mapping[str, Part],
    *,
    is_scalar: bool = False,
) -> dict[str, str]:
    """Compare the files' tensors with the model's, by the files' headers, and a sample of the rows
    of tied tensors that are stored twice.

    Args:
        reader: the files.
        parts: of the model, see file_tensors.
        is_scalar: it has a scalar head, which the files may lack.
    Returns: {name of a copy of a tied tensor: name of that}, for `read_tensors`.
    Raises: Refusal naming every tensor that is missing, extra, or of a wrong shape or dtype, or a
        copy of a tied tensor that has other values.
    """
    names = reader.names()
    shapes = {name: part.shape for name, part in parts.items()}
    if is_scalar and SCALAR_HEAD not in names:
        del shapes[SCALAR_HEAD]
    problems = [f"missing: {some(shapes.keys() - names)}"] if shapes.keys() - names else []
    copies = copies_in(reader, tied_names(hf_model, parts))
    patterns = _may_be_extra(hf_model, is_scalar=is_scalar)
    extra = {
        name
        for name in names - shapes.keys() - copies.keys()
        if not any(re.search(pattern, name) for pattern in patterns)
    }
    if extra:
        problems.append(f"not part of the model: {some(extra)}")
    live = live_tensors(hf_model)
    for name in sorted(shapes.keys() & names):
        if reader.shape(name) != tuple(shapes[name]):
            problems.append(
                f"{name} has shape {list(reader.shape(name))} in the file, "
                f"{list(shapes[name])} by config.json"
            )
        if misfit := reader.misfit(name, live[parts[name].tensor].dtype):
            problems.append(misfit)
    if problems:
        raise Refusal(
            f"model.path: the weights in {reader.folder} do not fit its config.json: "
            + "; ".join(problems)
        )
    check_sample(reader, copies)
    return copies


def _may_be_extra(hf_model: nn.Module, *, is_scalar: bool) -> list[str]:
    """Return regular expressions of names in files that are no part of the model: tensors that
    transformers ignores, and the head that a scalar head replaces."""
    patterns = ignored_names(hf_model)
    patterns.append(r"rotary_emb\.inv_freq$")  # stored by old versions, computed by us
    if is_scalar:
        patterns.append(r"(^|\.)(lm_head|embed_out)\.(weight|bias)$")
    return patterns


@torch.no_grad()
def read_tensors(
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    *,
    copies: Mapping[str, str],
) -> None:
    """Fill this rank's part of each live tensor from the files, cast to the tensor's dtype.

    A scalar head that the files do not have starts at zero: every value is 0 at first.

    Args:
        reader: the files, checked by `check_weights`.
        tensors: {live name: DTensor or Tensor with storage}.
        parts: {name in the files: part of a live tensor}, see files/file_tensors.py.
        copies: as `check_weights` returned; this rank compares its part of them.
    Raises: Refusal, on a rank that reads it, for a value that is not finite, and for one in which
        a copy of a tied tensor differs.
    """
    held = Held(tensors, parts)
    names = reader.names()
    copies_of = {name: copy for copy, name in copies.items()}
    for name, boxes in held.boxes().items():
        for box in boxes:
            live = held.value(name, box).live
            if name == SCALAR_HEAD and name not in names:
                live.zero_()
                continue
            live.copy_(reader.read(name, start=box.start, shape=box.shape))
            if not _is_finite(live):
                raise _not_finite(reader, name, live)
            if name in copies_of:
                check_copy(reader, copies_of[name], name, start=box.start, shape=box.shape)


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite; a finite sum shows it faster."""
    if not values.is_floating_point():
        return True
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return bool(total.isfinite()) or bool(values.isfinite().all())  # the sum alone may overflow


def _not_finite(reader: CheckpointReader, name: str, values: Tensor) -> Refusal:
    count = int((~values.isfinite()).sum())
    return Refusal(
        f"model.path: {reader.place(name)} has values that are not finite in {values.dtype}: "
        f"{count} of the {values.numel()} that this rank reads of it, {int(values.isnan().sum())} "
        "of them NaN; take another copy of this model"
    )


@torch.no_grad()
def compute_buffers(hf_model: nn.Module) -> None:
    """Give values to the buffers that no file holds (rotary frequencies, embedding scales).

    Args:
        hf_model: the transformers model, these buffers with storage and undefined values.
    Raises: Refusal naming a buffer that stayed without a value.
    """
    _compute(hf_model, over=False)
    booleans = {n: b.clone() for _, n, b in _computed_buffers(hf_model) if b.dtype is torch.bool}
    if booleans:  # no value marks one that is not computed: it keeps what was there before
        _compute(hf_model, over=True)
    for module, name, buffer in _computed_buffers(hf_model):
        if name in booleans:
            unset = buffer != booleans[name]
        else:
            unset = buffer.isnan() if buffer.is_floating_point() else buffer == _unset(buffer)
        if bool(unset.any()):
            raise _unknown_buffer(name, module)


def _compute(hf_model: nn.Module, *, over: bool) -> None:
    """Have a model compute its buffers.

    Args:
        over: what buffers of booleans hold before.
    """
    from_files = live_tensors(hf_model).values()
    computed = _computed_buffers(hf_model)
    for _, _, buffer in computed:
        buffer.fill_(over if buffer.dtype is torch.bool else _unset(buffer))
    modules = {id(module) for module, _, _ in computed}
    for name, owner in owners(hf_model).items():
        module = hf_model.get_submodule(name)
        if id(module) in modules or module is owner:  # a model may compute what its layers have
            initialise(owner, module, except_for=from_files)


def check_buffers(hf_model: nn.Module) -> None:
    """Refuse buffers of booleans that no file holds and that the model's code does not compute.

    Args:
        hf_model: on the meta device.
    Raises: Refusal naming one.
    """
    found = [own for own in _computed_buffers(hf_model) if own[2].dtype is torch.bool]
    written = written_by_initialising(hf_model, [buffer for _, _, buffer in found])
    for module, name, buffer in found:
        if storage_id(buffer) not in written:
            raise _unknown_buffer(name, module)


def _unset(buffer: Tensor) -> float:
    """Return a value that marks a buffer of this dtype as not yet filled."""
    return float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def _unknown_buffer(name: str, module: nn.Module) -> Refusal:
    return Refusal(
        f"model: buffer {name} of {type(module).__name__} is computed in a way "
        "that loading on the meta device does not know; this model cannot be trained"
    )


def _computed_buffers(hf_model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return (module, name in the model, buffer) of those that no file holds."""
    return [
        (module, f"{name}.{key}", buffer)
        for name, module in hf_model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if not is_persistent(module, key)
    ]


def load_whole_model(
    model: ModelSettings,
    *,
    attention: str | None,
    dtype: torch.dtype,
    device: torch.device,
    config: Any = None,
) -> nn.Module:
    """Build a causal LM with all its weights on this rank, for inference alone.

    Args:
        model: the config's model section; `path` is read.
        attention: name in transformers' attention interface; None for its own choice.
        dtype: of the parameters; buffers stay as the model makes them.
        device: of parameters and buffers.
        config: a transformers config of the model's first layers; the files have more.
    Raises: Refusal when the files do not fit the model, or cannot be read.
    """
    hf_model = build_meta_model(model, attention=attention and "eager", config=config)
    if attention is not None:  # after it is built: some models choose classes by the name
        set_attention(hf_model, attention)
    names = list(live_tensors(hf_model))
    parts = file_tensors(hf_model)
    reader = CheckpointReader(model_folder(model.path), part=model.part)
    copies = check_weights(reader, hf_model, parts) if config is None else {}
    for parameter in hf_model.parameters():
        parameter.requires_grad = False
        parameter.data = parameter.data.to(dtype)
    hf_model.to_empty(device=device)
    hf_model.tie_weights()  # to_empty gave tied parameters a storage each
    assert list(live_tensors(hf_model)) == names
    read_tensors(reader, live_tensors(hf_model), parts, copies=copies)
    compute_buffers(hf_model)
    return hf_model.eval()
