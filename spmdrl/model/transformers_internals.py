"""Private parts of transformers and liger-kernel that this program uses.

Serves transformers 5.16 to 5.19 and liger-kernel 0.8. Each line has the name here, the name in the
library, and when it can be removed.

block_kinds        PreTrainedModel._no_split_modules        once a model tells its blocks in public
tp_plan            PreTrainedModel._tp_plan                 once `tp_plan` has the model's own part
ignored_names      _keys_to_ignore_on_load_unexpected       once it is public
owners, initialise _init_weights, Tensor._is_hf_initialized once from_pretrained takes a meta model
rewritten_on_loading  the same, and what guards torch's init  once loading changes no loaded weight
written_by_initialising  the same                         as rewritten_on_loading
as_saved           core_model_loading.revert_weight_conversion  once it is documented
released_names     vision_tower.vision_model of SigLIP's files   once saving keeps it
has_towers, class_of  sub_configs, by which parts are known   once configs tell what they take
quiet              utils.logging's progress bars and verbosity   never: documented
is_experts, activated  experts modules' _apply_gate         once their functions' contract is public
grouped_experts, grouped_linear  integrations.moe           once they are documented
HAS_EMPTY_ROWS     _is_expert_parallel of experts           as grouped_experts
zero_idle_experts  integrations.moe._grouped_mm (patched)  once torch zeroes them on Blackwell
router_class       PreTrainedModel._can_record_outputs      once a model tells its routers in public
attention_implementation  config._attn_implementation_internal   once masks can be asked for
apply_liger, own_layers  liger_kernel's _apply_liger_kernel_to_instance   once it is public
check_liger        liger_kernel.transformers                never: documented
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.imports import attempt, refusing
from spmdrl.model.parallel.collectives import same, with_gradient
from spmdrl.world.torch_internals import TorchDispatchMode, storage_id

log = logging.getLogger(__name__)

HAS_EMPTY_ROWS = "_is_expert_parallel"
"""Attribute of experts: whether some rows are of no expert. Their index is the number of experts,
and products skip them."""


def block_kinds(hf_model: nn.Module) -> set[str]:
    """Return the class names of a model's transformer blocks; empty if it names none."""
    return set(getattr(hf_model, "_no_split_modules", None) or ())


def tp_plan(hf_model: nn.Module) -> dict[str, str]:
    """Return a model's own tensor-parallel plan, {name pattern: style}; {} if it has none."""
    return dict(getattr(hf_model, "_tp_plan", None) or {})


def ignored_names(hf_model: nn.Module) -> list[str]:
    """Return regular expressions of names in files that transformers ignores for this model."""
    return list(getattr(hf_model, "_keys_to_ignore_on_load_unexpected", None) or ())


def owners(hf_model: nn.Module) -> dict[str, nn.Module]:
    """Return {name of a module: the innermost model that it belongs to, or itself}, whose
    `_init_weights` initialises it."""
    found: dict[str, nn.Module] = {}
    for name, module in hf_model.named_modules():
        outer = found.get(name.rpartition(".")[0], hf_model)
        found[name] = module if hasattr(type(module), "_init_weights") else outer
    return found


def initialise(hf_model: nn.Module, module: nn.Module, *, except_for: Iterable[Tensor]) -> None:
    """Have a model initialise one of its modules, except for some tensors."""
    for tensor in except_for:
        tensor._is_hf_initialized = True
    hf_model._init_weights(module)


def rewritten_on_loading(hf_model: nn.Module) -> list[str]:
    """Return the names of saved tensors that transformers changes after loading: the code of some
    models for new weights also writes into loaded weights.

    Args:
        hf_model: on the meta device.
    """
    saved = hf_model.state_dict(keep_vars=True)
    of_storage: dict[int, str] = {}  # tied ones by their first name
    for name, tensor in saved.items():
        of_storage.setdefault(storage_id(tensor), name)
    written = written_by_initialising(hf_model, saved.values())
    return [name for storage, name in of_storage.items() if storage in written]


def written_by_initialising(hf_model: nn.Module, tensors: Iterable[Tensor]) -> set[int]:
    """Return the storages that a model's code for new weights writes into, of the modules that have
    some tensors. Saved tensors are marked as loaded.

    Args:
        hf_model: on the meta device.
    """
    from transformers.initialization import guard_torch_init_functions

    saved = hf_model.state_dict(keep_vars=True).values()
    storages = {storage_id(tensor) for tensor in tensors}
    written = _Written()
    with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        for name, owner in owners(hf_model).items():
            module = hf_model.get_submodule(name)
            if not any(storage_id(tensor) in storages for tensor in _own_tensors(module)):
                continue
            begin = partial(initialise, owner, module, except_for=saved)
            # Code that fails without values only computes new weights.
            with written:
                attempt(begin, Exception)
    return written.storages


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


class _Written(TorchDispatchMode):
    """Records the storages that operations write into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and record the storage that it writes into."""
        if function._schema.is_mutable and args and isinstance(args[0], Tensor):
            self.storages.add(storage_id(args[0]))
        return function(*args, **(kwargs or {}))


def as_saved(hf_model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return {name in the safetensors files: tensor} from {live name: tensor}, as saving does.

    Where saved files differ from released ones, this follows the released ones, which vLLM needs;
    transformers loads both. Saving does not transpose the experts of Qwen3-VL, and leaves out a
    part of the names of SigLIP towers.
    """
    from transformers.core_model_loading import Transpose, revert_weight_conversion

    towers = [
        name.rpartition(".")[2]
        for name, module in hf_model.named_modules()
        if name and type(module).__name__ == "SiglipVisionModel"
    ]
    reverse_op = Transpose.reverse_op
    always = property(lambda self: Transpose(self.dim1, self.dim0))
    Transpose.reverse_op = always
    try:
        saved = revert_weight_conversion(hf_model, dict(tensors))
    finally:
        Transpose.reverse_op = reverse_op
    return {_released(name, towers): tensor for name, tensor in saved.items()}


def _released(name: str, towers: Iterable[str]) -> str:
    """Return the name of a tensor in released files; in SigLIP towers saving leaves out a part."""
    for tower in towers:
        name = re.sub(rf"^((?:.*\.)?{tower})\.(?!vision_model\.)", r"\1.vision_model.", name)
    return name


def released_names(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return {name in released files: name in these files} for the tensors of a SigLIP tower.

    transformers leaves out a part of the name when it saves a model that was not loaded from
    released files.

    Args:
        config: content of config.json.
    """
    tower = config.get("vision_config")
    if not isinstance(tower, dict) or tower.get("model_type") != "siglip_vision_model":
        return {}
    found = {_released(name, ["vision_tower"]): name for name in names}
    return {released: name for released, name in found.items() if released != name}


_MODALITIES = ("vision", "audio", "image", "video", "vq", "speech", "codec", "acoustic", "protein")
"""Words in the names of sub-configs that belong to towers."""


def has_towers(config: Any) -> bool:
    """Return whether a transformers config is of a multimodal model.

    Most towers have a sub-config. Some, such as Fuyu's single layer and Granite Speech's encoder,
    have none: then the text model has one, and transformers lists the model as multimodal.
    """
    parts = {"vision_config", "audio_config", *getattr(config, "sub_configs", ())}
    named = [name for name in parts if any(word in name for word in _MODALITIES)]
    if any(getattr(config, name, None) is not None for name in named):
        return True
    if not hasattr(config, "get_text_config") or any(hasattr(config, name) for name in named):
        return False  # a model without the towers that others of its kind have
    import transformers

    takes_more = type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    return takes_more and config.get_text_config() is not config


def class_of(config: Any) -> Any:
    """Return the class by which transformers builds and loads a model with its head."""
    import transformers

    name = "AutoModelForMultimodalLM" if has_towers(config) else "AutoModelForCausalLM"
    return getattr(transformers, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off transformers' warnings and progress bars inside a `with` block."""
    from transformers import logging as own

    level = own.get_verbosity()
    had_bar = own.is_progress_bar_enabled()
    own.set_verbosity_error()
    own.disable_progress_bar()
    try:
        yield
    finally:
        own.set_verbosity(level)
        if had_bar:
            own.enable_progress_bar()


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds fused experts, computed by transformers' functions."""
    return hasattr(module, "_apply_gate") and hasattr(module, "num_experts")


def activated(experts: Any, rows: Tensor) -> Tensor:
    """Apply an expert's activation: [S, I] from [S, 2 I] with a gate, or from [S, I]."""
    return experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)


def router_class(base: nn.Module) -> type | None:
    """Return the class of a model's routers, which return their logits first; None if transformers
    does not name it, or its routers return logits at another index."""
    recorder = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits")
    return getattr(recorder, "target_class", None) if getattr(recorder, "index", 0) == 0 else None


def grouped_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute a layer's experts: [T, H] of [T, H], the chosen [T, K] and their weights [T, K]."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)


def grouped_linear(
    rows: Tensor, weight: Tensor, offsets: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Multiply rows [S, in], sorted by expert and ending at offsets [E], by [E, out, in]."""
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(rows, weight, offsets, bias=bias)


def zero_idle_experts() -> None:
    """Set weight gradients of experts without tokens to zero, for the whole process.

    The kernels of Blackwell GPUs may leave them uninitialised (torch 2.11 to 2.13).
    """
    from transformers.integrations import moe

    original = moe._grouped_mm
    if hasattr(original, "original"):
        return

    def guarded(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return original(input, _without_idle(weight, offs), offs=offs)

    guarded.original = original  # type: ignore[attr-defined]
    moe._grouped_mm = guarded


def _zeroed(grad: Tensor, offs: Tensor) -> Tensor:
    is_idle = offs.diff(prepend=offs.new_zeros(1)) == 0
    return grad.masked_fill(is_idle.view(-1, *[1] * (grad.dim() - 1)), 0)


_without_idle = with_gradient(same, _zeroed)
"""Weights [E, ...]; the backward pass zeroes the gradients of experts without rows, by offs [E]."""


def check_liger() -> None:
    """Raises: Refusal when liger-kernel cannot be imported."""
    hint = "; install it or set liger to false"
    with refusing("model.kernels.liger: cannot import liger-kernel", ImportError, hint=hint):
        import liger_kernel.transformers  # noqa: F401


def apply_liger(hf_model: nn.Module, base: nn.Module, *, has_rope: bool, is_dense: bool) -> bool:
    """Put liger's RMSNorm, RoPE and gated-MLP kernels into the model (CUDA only).

    Not its cross entropy, because logprobs are computed by our own head; and not its MLP with
    experts, which are transformers' grouped matrix products.

    Args:
        base: the base model.
        has_rope: False keeps the model's own RoPE. Liger's may write into its query and key, which
            selective checkpointing keeps, so that they would be rotated twice.
        is_dense: without experts.
    Returns: whether it did. A model that liger refuses keeps transformers' own layers.
    Raises: as check_liger.
    """
    check_liger()
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    put = partial(
        _apply_liger_kernel_to_instance,
        rope=has_rope,
        rms_norm=True,
        swiglu=is_dense,
        geglu=is_dense,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
    before = {name: dict(vars(module)) for name, module in _modeling_modules()}
    for part in (hf_model, base):  # liger knows only the base of some models
        _, error = attempt(partial(put, model=part), TypeError)
        if error is None:
            _note_replaced(before)
            return True
    log.warning("%s goes without liger's kernels: %s", type(hf_model).__name__, error)
    return False


def _modeling_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules of transformers' models that are imported."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformers.models.") and ".modeling_" in name:
            yield name, module


_replaced: dict[tuple[str, str], Any] = {}
"""{(modeling module, name in it): transformers' own}, where apply_liger replaced it."""


def _note_replaced(before: Mapping[str, Mapping[str, Any]]) -> None:
    for module_name, module in _modeling_modules():
        for name, own in before.get(module_name, {}).items():
            if getattr(module, name, own) is not own:
                _replaced.setdefault((module_name, name), own)


@contextmanager
def own_layers() -> Iterator[None]:
    """Have transformers build and run models of its own layers inside a `with` block.

    liger replaces classes and functions in the modules of transformers' models, so that a model
    built later is no longer transformers' own.
    """
    by_liger = {}
    for module_name, name in _replaced:
        by_liger[module_name, name] = getattr(sys.modules[module_name], name)
    for (module_name, name), own in _replaced.items():
        setattr(sys.modules[module_name], name, own)
    try:
        yield
    finally:
        for (module_name, name), other in by_liger.items():
            setattr(sys.modules[module_name], name, other)


@contextmanager
def attention_implementation(hf_model: nn.Module, name: str) -> Iterator[None]:
    """Set the attention of all configs of a model inside a `with` block, without checks."""
    configs = {
        id(part.config): part.config for part in hf_model.modules() if hasattr(part, "config")
    }
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
