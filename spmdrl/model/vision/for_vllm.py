"""Pictures for vLLM's models that see: given as the trainer has them, so that nothing is prepared
twice, and a sample's tokens mean the same to both.

Serves vLLM 0.32 and 0.33. Per line: the name here, vLLM's own, and when it can go.

vision_arguments    EngineArgs limit_mm_per_prompt, mm_processor_cache_gb ...   never: documented
reset_encoder_cache     LLMEngine.reset_encoder_cache           never: documented
vllm_prompt           inputs.engine.mm_input, multimodal.inputs       never: its form of a prompt
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.data.attachments import VISION_FAMILIES
from spmdrl.model_inputs import MultimodalItem, MultimodalItems, multimodal_of

_PARTS = {"gemma3": "num_patches", "internvl": "image_num_patches"}
"""{model type: argument of vLLM's class with the images that a picture was cut into}"""


def vision_arguments(family: str, *, on_cpu: bool) -> dict[str, Any]:
    """Return what an engine is told of pictures where engine.options says nothing else.

    Args:
        family: model type.
    """
    if family not in VISION_FAMILIES:
        return {}
    return {
        "skip_tokenizer_init": False,  # vLLM asks how many tokens a picture may have
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,  # of what it would prepare itself
        "skip_mm_profiling": on_cpu,  # there the memory of the KV cache is said
    }


def missing_for_vision(family: str, *, on_cpu: bool) -> str:
    """Return what vLLM lacks for a model that sees, and what helps; empty for nothing."""
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    if family.startswith("qwen3_5") and not has_torchvision:  # its text part too
        return (
            "vLLM's module for it imports torchvision, which is not installed; pip install the "
            "torchvision of this torch"
        )
    if family not in VISION_FAMILIES:
        return ""
    if on_cpu and family == "gemma3":
        return (
            "tokens of one image attend to each other in both directions, and vLLM's attention on "
            "the CPU knows no such mask: compute on CUDA"
        )
    if not has_torchvision:
        return (
            "vLLM's classes for models that see import torchvision, which is not installed; on the "
            "CPU `make .venv/torchvision` and put that folder on PYTHONPATH, elsewhere pip install "
            "the torchvision of this torch"
        )
    return ""


def vllm_prompt(tokens: Sequence[int], *, salt: str, model_config: Any) -> dict[str, Any]:
    """Return a prompt as vLLM's engine takes it.

    Args:
        tokens: all ids, several of them for each picture; TokenIds where they show some.
        salt: neither keys and values nor what the tower makes of a picture are shared with prompts
            of another one.
        model_config: vLLM's.
    Raises: ValueError for a picture that is cut.
    """
    pictures = multimodal_of(tokens)
    if pictures is None or not pictures.items:
        return {"prompt_token_ids": list(tokens), "cache_salt": salt}
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    seen = list(_occurrences(pictures))
    items = {picture: _item(picture, model_config) for picture in pictures.items}
    ranges = [
        PlaceholderRange(offset=at[0], length=at[-1] - at[0] + 1, is_embed=_shown_among(at))
        for at, _ in seen
    ]
    return mm_input(
        list(tokens),
        MultiModalKwargsItems({"image": [items[picture] for _, picture in seen]}),
        {"image": [f"{salt}:{picture.key}" for _, picture in seen]},
        {"image": ranges},
        cache_salt=salt,
    )


def _occurrences(pictures: MultimodalItems) -> Iterator[tuple[list[int], MultimodalItem]]:
    """Yield the positions of the tokens of each picture, each time that it is shown."""
    starts = pictures.starts.tolist()
    for picture, first, last in zip(pictures.items, starts, starts[1:]):
        is_own = (pictures.places >= first) & (pictures.places < last)
        shown = torch.arange(first, last)
        for at in is_own.nonzero()[:, 0].split(picture.num_tokens):
            if not torch.equal(pictures.places[at].cpu(), shown[: len(at)]) or len(at) < len(shown):
                raise ValueError(
                    f"the tokens of a picture are not whole, or not in order: {len(at)} of "
                    f"{len(shown)} from token {int(at[0])} on"
                )
            yield at.tolist(), picture


def _shown_among(at: Sequence[int]) -> Tensor | None:
    """Return which tokens between the first and the last position are named, [n] bool; None where
    all are."""
    if len(at) == at[-1] - at[0] + 1:
        return None
    among = torch.zeros(at[-1] - at[0] + 1, dtype=torch.bool)
    among[torch.tensor(at) - at[0]] = True
    return among


def _item(picture: MultimodalItem, model_config: Any) -> Any:
    """Return a picture as vLLM hands it to its class for the model."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig as Field
    from vllm.multimodal.inputs import MultiModalKwargsItems

    config = model_config.hf_config
    given = {
        name: rows.to(model_config.dtype) if rows.is_floating_point() else rows
        for name, rows in picture.features.items()
    }
    rows = torch.tensor([len(given["pixel_values"])])
    fields = {"pixel_values": Field.flat_from_sizes("image", rows)}
    if part := _PARTS.get(config.model_type):
        given[part] = rows
        fields[part] = Field.batched("image", keep_on_cpu=True)
    else:
        fields["image_grid_thw"] = Field.batched("image", keep_on_cpu=True)
    if config.model_type == "internvl":
        given["image_token_id"] = torch.tensor(config.image_token_id)
        fields["image_token_id"] = Field.shared("image", 1, keep_on_cpu=True)
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(given), fields)["image"][0]


def reset_encoder_cache(llm: Any) -> None:
    """Forget what the tower made of pictures; no request that has some is past its prompt."""
    if llm.vllm_config.model_config.is_multimodal_model:
        llm.reset_encoder_cache()
