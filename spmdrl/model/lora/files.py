"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors.

For a linear layer, files have the same matrices as the model. For an embedding they are transposed:
A [r, V] (here B) and B [H, r] (here A). For fused experts, which PEFT lists in `target_parameters`,
they have two dims: A [E r, in], expert after expert, and B [out, r E], the experts side by side
within each of the r. Their names have the module only. If several parameters of a module have
adapters, PEFT wraps the module once for each, in the order of the parameters: those of the last
parameter are named by the module, those of the one before by its `base_layer`, and so on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.files.digests import shared_digests
from spmdrl.model.files.reader import CheckpointReader
from spmdrl.model.lora.expert_adapters import EXPERT_PARAMETERS
from spmdrl.model.lora.targets import LoraForm
from spmdrl.run_folder import write_file
from spmdrl.value_forms import is_number

if TYPE_CHECKING:
    from spmdrl.world.world import World

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WRAPPED = ".base_layer"
LAYER_A = re.compile(r"\.lora_A\.weight$|_lora_A$")
"""The end of the name of an A matrix, of a linear layer, an embedding or experts."""
_OF_EMBEDDING = {"lora_B.weight": "lora_embedding_A", "lora_A.weight": "lora_embedding_B"}
"""Names here and in the file."""
# Features of PEFT that change what an adapter computes, with the values that switch them off.
_OFF: dict[str, tuple] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "alora_invocation_tokens": (None,),
    "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
}
_LARGEST_ALPHA = 1e9
# These also change the weights under the adapter.
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class _FilePlace:
    """The name of a matrix in the file, and what it belongs to."""

    file: str
    expert_part: str = ""  # A or B of experts; empty: of a linear layer
    is_transposed: bool = False  # of an embedding

    def from_file(self, matrix: Tensor, *, rank: int) -> Tensor:
        """Return [E, r, in] for [E r, in], [E, out, r] for [out, r E], the transposed matrix of an
        embedding, and other matrices unchanged."""
        if self.is_transposed:
            return matrix.t()
        if self.expert_part == "A":
            return matrix.reshape(-1, rank, matrix.shape[1])
        if self.expert_part == "B":
            return matrix.reshape(matrix.shape[0], rank, -1).permute(2, 0, 1)
        return matrix

    def to_file(self, matrix: Tensor) -> Tensor:
        """Undo `from_file`."""
        if self.is_transposed:
            return matrix.t()
        if self.expert_part == "A":
            return matrix.flatten(0, 1)
        return matrix.permute(1, 2, 0).flatten(1) if self.expert_part else matrix


def _expert_places(module: str, keys: Iterable[str]) -> dict[str, _FilePlace]:
    """Return {name here: place in the file} of all matrices of one module of experts."""
    places: dict[str, _FilePlace] = {}
    where = f"{_PREFIX}{module}"
    for key in sorted(keys, key=EXPERT_PARAMETERS.index, reverse=True):
        places |= {
            f"{module}.{key}_lora_{part}": _FilePlace(f"{where}.lora_{part}.weight", part)
            for part in "AB"
        }
        where += _WRAPPED
    return places


class AdapterFolder:
    """One adapter of linear layers, experts and an embedding: plain A and B matrices of one rank.

    Raises: Refusal when the folder holds no such adapter.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        config = self._config()
        self._check_features(config)
        self.form = {
            "rank": config["r"],
            "alpha": config["lora_alpha"],
            "use_rslora": bool(config.get("use_rslora", False)),
        }
        what = f"model.lora.path: cannot read {folder / WEIGHTS}"
        with refusing(what, SafetensorError, OSError):
            self._file = safe_open(folder / WEIGHTS, framework="pt")
        self._places = self._find(config.get("target_parameters") or [])
        self.targets = tuple(
            sorted(LAYER_A.sub("", name) for name in self._places if LAYER_A.search(name))
        )
        """Full names of the linear layers, and of the experts' parameters, that have adapters."""

    def _find(self, target_parameters: Sequence[str]) -> dict[str, _FilePlace]:
        """Return {name here: place} of all tensors of the file."""
        left = set(self._file.keys())
        places: dict[str, _FilePlace] = {}
        wanted = [target.rpartition(".") for target in target_parameters]
        modules = {
            re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(_PREFIX)).replace(_WRAPPED, "")
            for name in left
        }
        for module in sorted(modules):
            keys = {key for end, _, key in wanted if f".{module}".endswith(f".{end}")}
            if not keys:
                continue
            if not keys <= set(EXPERT_PARAMETERS):
                raise Refusal(
                    f"model.lora.path: the adapter in {self.folder} is of parameters "
                    f"{sorted(keys)} of {module}; only {', '.join(EXPERT_PARAMETERS)} "
                    "of fused experts can have one here"
                )
            places |= _expert_places(module, keys)
        left -= {place.file for place in places.values()}
        for name in sorted(left):
            module, _, end = name.removeprefix(_PREFIX).rpartition(".")
            for own, there in _OF_EMBEDDING.items():
                if end == there:
                    places[f"{module}.{own}"] = _FilePlace(name, is_transposed=True)
                    left.discard(name)
        return places | {name.removeprefix(_PREFIX): _FilePlace(name) for name in left}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with the adapters that a model has.

        Args:
            shapes: {name: shape} of all A and B matrices.
        Raises: Refusal naming what is missing, extra or of another shape.
        """
        there = set(self._file.keys())
        own = {name: place for name, place in self._places.items() if place.file in there}
        wrong = {
            "are missing": shapes.keys() - own.keys(),
            "do not belong to the model": own.keys() - shapes.keys() - {"score.weight"},
        }
        problems = [f"{len(n)} tensors {what}, e.g. {min(n)}" for what, n in wrong.items() if n]
        for name in sorted(shapes.keys() & own.keys()):
            there = torch.empty(self._file.get_slice(own[name].file).get_shape(), device="meta")
            found = own[name].from_file(there, rank=self.form["rank"]).shape
            if found != shapes[name]:
                problems.append(f"{name} has shape {list(found)} there, {list(shapes[name])} here")
        if problems:
            hint = (
                ". Of an embedding PEFT saves the weight under the adapter too, unless "
                "save_embedding_layers is False"
            )
            has_embedding = any(place.is_transposed for place in self._places.values())
            raise Refusal(
                f"model.lora.path: the adapter in {self.folder} does not fit the "
                f"model: {'; '.join(problems[:8])}{hint * has_embedding}"
            )

    def read(self, name: str) -> Tensor | None:
        """Return a tensor whole, on the CPU; None where there is none of this name."""
        place = self._places.get(name)
        if place is None:
            return None
        return place.from_file(self._file.get_tensor(place.file), rank=self.form["rank"])

    def _config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        hint = "; name a folder that PEFT's save_pretrained wrote"
        kinds = (OSError, ValueError, RecursionError)
        with refusing(f"model.lora.path: cannot read {path}", *kinds, hint=hint):
            config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise Refusal(f"model.lora.path: {path} holds a {type(config).__name__}{hint}")
        kind, rank, alpha = (config.get(name) for name in ("peft_type", "r", "lora_alpha"))
        is_scale = is_number(alpha) and abs(alpha or 0) <= _LARGEST_ALPHA
        if kind != "LORA" or type(rank) is not int or rank < 1 or not is_scale:
            raise Refusal(
                f"model.lora.path: {path} is of no LoRA adapter: peft_type {kind!r}, "
                f"r {rank!r}, lora_alpha {alpha!r}"
            )
        names = config.get("target_parameters") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refusal(
                f"model.lora.path: {path} has target_parameters {names!r}; expected a list of names"
            )
        return config

    def _check_features(self, config: Mapping[str, Any]) -> None:
        for name, off in _OFF.items():
            if config.get(name, off[0]) not in off:
                raise Refusal(
                    f"model.lora.path: the adapter in {self.folder} has {name} "
                    f"{config[name]!r}, which is not supported"
                )
        init = str(config.get("init_lora_weights", True)).lower()
        if init.startswith(_CHANGING_INITS):
            raise Refusal(
                f"model.lora.path: the adapter in {self.folder} has init_lora_weights {init!r}, "
                "which changes the weights under it; convert it by PEFT's "
                "path_initial_model_for_weight_conversion"
            )


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    use_rslora: bool,
    base: str,
    embedding: str = "",
) -> None:
    """Write an adapter, and a scalar head if there is one, as PEFT does.

    Args:
        tensors: {name of the parameter: CPU tensor}: A and B matrices as lora.pair_names names
            them, score.weight.
        base: folder or hub name of the model that it belongs to.
        embedding: name of its embedding, which may have an adapter.
    """
    targets = sorted(LAYER_A.sub("", name) for name in tensors if LAYER_A.search(name))
    experts: dict[str, list[str]] = {}
    for name in targets:
        if f"{name}_lora_A" in tensors:
            module, _, key = name.rpartition(".")
            experts.setdefault(module, []).append(key)
    places = {name: _FilePlace(_PREFIX + name) for name in tensors}
    places |= {
        f"{embedding}.{own}": _FilePlace(f"{_PREFIX}{embedding}.{there}", is_transposed=True)
        for own, there in _OF_EMBEDDING.items()
        if f"{embedding}.{own}" in tensors
    }
    for module, keys in experts.items():
        places |= _expert_places(module, keys)
    has_head = "score.weight" in tensors
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "use_rslora": use_rslora,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        # Full names: ends of names could match more than was trained.
        "target_modules": [name for name in targets if f"{name}_lora_A" not in tensors],
        "target_parameters": [f"{module}.{key}" for module, keys in experts.items() for key in keys]
        or None,
        "modules_to_save": ["score"] if has_head else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_file(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    save_file(
        {
            places[name].file: places[name].to_file(tensor).contiguous()
            for name, tensor in tensors.items()
        },
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )


class AdapterRecord:
    """What a checkpoint of adapters stores beside their matrices: scale and digest of the weights.

    Args:
        form: of the adapters.
        folder: of the weights under them.
        quantised: the bits of a weight under them and the number of the dtype, see BaseForm; 0, 0
            if it is not quantised.
        world: of a trainer rank. All trainer ranks construct it, and each reads a share of files.
    """

    def __init__(
        self, form: LoraForm, folder: Path, world: World, *, quantised: tuple[int, int] = (0, 0)
    ):
        names = CheckpointReader(folder).files()
        digests = shared_digests(folder, names, world, field="model.path")
        self._folder = folder
        self._form = form
        self._base = base_digest(digests)
        self._quantised = quantised

    def state_dict(self) -> dict[str, Tensor]:
        """Return {alpha: [] float64, and [] int64: use_rslora, base, base_bits, base_dtype}."""
        return {
            "alpha": torch.tensor(self._form.alpha, dtype=torch.float64),
            "use_rslora": torch.tensor(int(self._form.use_rslora)),
            "base": torch.tensor(self._base),
            "base_bits": torch.tensor(self._quantised[0]),
            "base_dtype": torch.tensor(self._quantised[1]),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Compare with the state of a checkpoint.

        Raises: Refusal if its adapters were trained on other weights, or at another scale.
        """
        if int(state["base"]) != self._base:
            raise Refusal(
                "the checkpoint has adapters only, and they were trained on other weights than "
                f"those in {self._folder} (digest {int(state['base']):016x}, here "
                f"{self._base:016x}); set model.path to the folder they were trained on"
            )
        for name, own in self.state_dict().items():
            if float(state[name]) != float(own):
                raise Refusal(
                    f"the checkpoint's adapters have {name} {float(state[name]):g}, "
                    f"and model.lora has {float(own):g}; set the old value"
                )


def base_digest(digests: Mapping[str, str]) -> int:
    """Return a number, at least 0 and below 2^63, for the weights whose files have these digests.

    Args:
        digests: {file name: sha256, hex}.
    """
    text = json.dumps(sorted(digests.items()))
    # Checkpoints store the number as int64, so it must be below 2^63.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
