"""Tiny random models of any family, for tests: config and weights in a folder, no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = dict(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    vocab_size=128,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)


def tiny_folder(folder: Path, family: str, **fields: Any) -> Path:
    """Write a random float32 model of a family into a folder.

    Args:
        family: its model_type in transformers.
        fields: of its config, beside SIZES; None takes one of SIZES out.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    sizes = {name: value for name, value in (SIZES | fields).items() if value is not None}
    config = AutoConfig.for_model(family, dtype="float32", **sizes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for tensor in model.parameters():
            noise = torch.randn_like(tensor)
            # Vectors start at 0 or 1: noise tells a misplaced one from the right one.
            tensor.copy_(noise * 0.8 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else tensor)
            tensor += 0.1 * noise if tensor.dim() == 1 else 0
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)
    model.save_pretrained(folder)
    return folder
