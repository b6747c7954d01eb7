"""Images for vLLM's vision models: vLLM gets the features that the trainer has. So no image is
processed twice, and both see the same tokens and images.

Serves vLLM 0.32 and 0.33. Each line has the name here, vLLM's own, and when it can be removed.

vision_arguments      EngineArgs limit_mm_per_prompt, mm_processor_cache_gb ...   never: documented
reset_encoder_cache   LLMEngine.reset_encoder_cache           never: documented
make_prompt           inputs.engine.mm_input, multimodal.inputs       never: its form of a prompt
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from spmdrl.data.attachments import VISION_FAMILIES
from spmdrl.model_inputs import MultimodalItem, MultimodalItems, multimodal_of

_PARTS = {"gemma3": "num_patches", "internvl": "image_num_patches"}
"""{model type: argument of vLLM's class with the number of tiles of an image}"""


def vision_arguments(family: str, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments for a vision model; engine.options may replace them.

    Args:
        family: model type.
    """
    if family not in VISION_FAMILIES:
        return {}
    return {
        "skip_tokenizer_init": False,  # vLLM asks how many tokens an image may have
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,  # for images that vLLM would process itself
        "skip_mm_profiling": on_cpu,  # there engine.cpu_kv_cache_gib sets the size of the KV cache
    }


def missing_for_vision(family: str, *, on_cpu: bool) -> str:
    """Return what vLLM lacks for a vision model, and what to do; empty for nothing."""
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


def make_prompt(tokens: Sequence[int], *, salt: str, model_config: Any) -> dict[str, Any]:
    """Return a prompt in vLLM's form.

    Args:
        tokens: ids; TokenIds where they have images, several ids for each.
        salt: prompts of different salts share neither keys and values nor encoded images.
        model_config: vLLM's.
    Raises: ValueError when some tokens of an image are missing.
    """
    images = multimodal_of(tokens)
    if images is None or not images.items:
        return {"prompt_token_ids": list(tokens), "cache_salt": salt}
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    encoded = {image: _inputs_of(image, model_config) for image in images.items}
    inputs = []
    keys = []
    ranges = []
    for at, image in _occurrences(images):
        inputs.append(encoded[image])
        keys.append(f"{salt}:{image.key}")
        length = at[-1] - at[0] + 1
        is_embed = None
        if len(at) < length:  # other tokens are between them
            is_embed = torch.zeros(length, dtype=torch.bool)
            is_embed[torch.tensor(at) - at[0]] = True
        ranges.append(PlaceholderRange(offset=at[0], length=length, is_embed=is_embed))
    return mm_input(
        list(tokens),
        MultiModalKwargsItems({"image": inputs}),
        {"image": keys},
        {"image": ranges},
        cache_salt=salt,
    )


def _occurrences(images: MultimodalItems) -> Iterator[tuple[list[int], MultimodalItem]]:
    """Yield the positions of an image's tokens, each time that it occurs."""
    starts = images.starts.tolist()
    for image, first, last in zip(images.items, starts, starts[1:]):
        is_own = (images.places >= first) & (images.places < last)
        places = torch.arange(first, last)
        for at in is_own.nonzero()[:, 0].split(image.num_tokens):
            if not torch.equal(images.places[at].cpu(), places):
                raise ValueError(
                    f"the tokens of a picture are not whole, or not in order: {len(at)} of "
                    f"{len(places)} from token {int(at[0])} on"
                )
            yield at.tolist(), image


def _inputs_of(image: MultimodalItem, model_config: Any) -> Any:
    """Return an image's inputs of vLLM's class for the model."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig as Field
    from vllm.multimodal.inputs import MultiModalKwargsItems

    config = model_config.hf_config
    inputs = {}
    for name, values in image.features.items():
        inputs[name] = values.to(model_config.dtype) if values.is_floating_point() else values
    rows = torch.tensor([len(inputs["pixel_values"])])
    fields = {"pixel_values": Field.flat_from_sizes("image", rows)}
    if part := _PARTS.get(config.model_type):
        inputs[part] = rows
        fields[part] = Field.batched("image", keep_on_cpu=True)
    else:
        fields["image_grid_thw"] = Field.batched("image", keep_on_cpu=True)
    if config.model_type == "internvl":
        inputs["image_token_id"] = torch.tensor(config.image_token_id)
        fields["image_token_id"] = Field.shared("image", 1, keep_on_cpu=True)
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields)["image"][0]


def reset_encoder_cache(llm: Any) -> None:
    """Forget encoded images. No request with images may be past its prompt."""
    if llm.vllm_config.model_config.is_multimodal_model:
        llm.reset_encoder_cache()
