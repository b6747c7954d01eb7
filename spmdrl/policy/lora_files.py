"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmdrl.comm import gather_objects
from spmdrl.policy.load import CheckpointReader

if TYPE_CHECKING:
    from spmdrl.policy.lora import LoraForm
    from spmdrl.world import World

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Features of PEFT that change what an adapter computes, with the values that switch them off.
_OFF: dict[str, tuple] = {
    "use_dora": (False,), "bias": ("none",), "lora_bias": (False,), "fan_in_fan_out": (False,),
    "rank_pattern": ({},), "alpha_pattern": ({},), "layer_replication": (None,),
    "trainable_token_indices": (None,), "target_parameters": (None, []), "use_qalora": (False,),
    "use_bdlora": (None,), "alora_invocation_tokens": (None,),
    "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
}
# These also change the weights under the adapter.
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterFolder:
    """One adapter of linear layers, with plain A and B matrices of one rank.

    Raises: ValueError when the folder holds no such adapter.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        config = self._config()
        self._check_features(config)
        self.form = {"rank": config["r"], "alpha": config["lora_alpha"],
                     "use_rslora": bool(config.get("use_rslora", False))}
        try:
            self._file = safe_open(folder / WEIGHTS, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.lora.path: cannot read {folder / WEIGHTS}: {error}") from error
        self._names = {name.removeprefix(_PREFIX): name for name in self._file.keys()}
        self.modules = tuple(sorted(name.removesuffix(".lora_A.weight") for name in self._names
                                    if name.endswith(".lora_A.weight")))
        """Full names of the layers that have adapters."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with the adapters that a model has.

        Args:
            shapes: {name: shape} of all A and B matrices.
        Raises: ValueError naming what is missing, extra or of another shape.
        """
        problems = [f"{len(names)} tensors {what}, e.g. {min(names)}" for names, what in (
            (shapes.keys() - self._names.keys(), "are missing"),
            (self._names.keys() - shapes.keys() - {"score.weight"}, "do not belong to the model"),
        ) if names]
        for name in sorted(shapes.keys() & self._names.keys()):
            found = tuple(self._file.get_slice(self._names[name]).get_shape())
            if found != shapes[name]:
                problems.append(f"{name} has shape {list(found)} there, {list(shapes[name])} here")
        if problems:
            raise ValueError(f"model.lora.path: the adapter in {self.folder} does not fit the "
                             f"model: {'; '.join(problems[:8])}")

    def read(self, name: str) -> Tensor | None:
        """Return a tensor whole, on the CPU; None where there is none of this name."""
        return self._file.get_tensor(self._names[name]) if name in self._names else None

    def _config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"model.lora.path: cannot read {path}: {error}; name a folder that "
                             "PEFT's save_pretrained wrote") from error
        kind, rank, alpha = (config.get(name) for name in ("peft_type", "r", "lora_alpha"))
        if kind != "LORA" or type(rank) is not int or not isinstance(alpha, (int, float)):
            raise ValueError(f"model.lora.path: {path} is of no LoRA adapter: peft_type {kind!r}, "
                             f"r {rank!r}, lora_alpha {alpha!r}")
        return config

    def _check_features(self, config: Mapping[str, Any]) -> None:
        for name, off in _OFF.items():
            if config.get(name, off[0]) not in off:
                raise ValueError(f"model.lora.path: the adapter in {self.folder} has {name} "
                                 f"{config[name]!r}, which is not supported")
        init = str(config.get("init_lora_weights", True)).lower()
        if init.startswith(_CHANGING_INITS):
            raise ValueError(
                f"model.lora.path: the adapter in {self.folder} has init_lora_weights {init!r}, "
                "which changes the weights under it; convert it by PEFT's "
                "path_initial_model_for_weight_conversion")


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], *, rank: int, alpha: float, use_rslora: bool,
    base: str,
) -> None:
    """Write an adapter, and a scalar head if there is one, as PEFT does.

    Args:
        tensors: {name of the parameter: CPU tensor}: A and B matrices, score.weight.
        base: folder or hub name of the model that it belongs to.
    """
    modules = sorted(name.removesuffix(".lora_A.weight") for name in tensors
                     if name.endswith(".lora_A.weight"))
    has_head = "score.weight" in tensors
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base, "r": rank, "use_rslora": use_rslora,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        # Full names: ends of names could match more than was trained.
        "target_modules": modules, "modules_to_save": ["score"] if has_head else None,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file({_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / WEIGHTS, metadata={"format": "pt"})


class AdapterRecord:
    """What a checkpoint of adapters says besides them: their scale, and to which weights they
    belong.

    Args:
        form: of the adapters.
        folder: of the weights under them.
        world: view of a trainer rank; all trainer ranks construct it, each reads a share of files.
    """

    def __init__(self, form: LoraForm, folder: Path, world: World):
        names = sorted(CheckpointReader(folder).files())
        mine = {name: file_digest(folder / name)
                for name in names[world.rank :: len(world.trainer_ranks)]}
        with world.watch.wait("read the base weights", -1):
            shared = gather_objects(mine, group=world.trainer_control)
        digests = {name: digest for part in shared for name, digest in part.items()}
        self._folder, self._form, self._base = folder, form, base_digest(digests)

    def state_dict(self) -> dict[str, object]:
        """Return {alpha: [] float64, use_rslora: [] int64, base: [] int64}."""
        return {"alpha": torch.tensor(self._form.alpha, dtype=torch.float64),
                "use_rslora": torch.tensor(int(self._form.use_rslora)),
                "base": torch.tensor(self._base)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Compare with what a checkpoint says.

        Raises: ValueError when its adapters were trained on other weights, or at another scale.
        """
        if int(state["base"]) != self._base:
            raise ValueError(
                "the checkpoint has adapters only, and they were trained on other weights than "
                f"those in {self._folder} (digest {int(state['base']):016x}, here "
                f"{self._base:016x}); set model.path to the folder they were trained on")
        for name, own in self.state_dict().items():
            if float(state[name]) != float(own):
                raise ValueError(f"the checkpoint's adapters have {name} {float(state[name]):g}, "
                                 f"and model.lora has {float(own):g}; set the old value")


def base_digest(digests: Mapping[str, str]) -> int:
    """Return a number, at least 0 and below 2^63, for the weights whose files have these digests.

    Args:
        digests: {file name: sha256, hex}.
    """
    text = json.dumps(sorted(digests.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, hex. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
