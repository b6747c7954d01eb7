"""The model's tokenizer, and which tokens end a response."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.imports import is_missing_folder, refusing


def load_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer that goes with the model.

    Raises: Refusal when it cannot be read, or when nothing would end a response.
    """
    name = cfg.model.tokenizer or cfg.model.path
    field = "model.tokenizer" if cfg.model.tokenizer else "model.path"
    if not name or is_missing_folder(name):
        raise Refusal(f"{field}: {name!r} is not a folder (looked from {Path.cwd()})")
    what = f"{field}: no tokenizer can be loaded from {name!r}, as a folder or hub name"
    with refusing(what, OSError, ValueError, KeyError):
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=cfg.model.trust_remote_code
        )
    if tokenizer.eos_token_id is None and not cfg.sampling.stop_token_ids:
        raise Refusal(
            f"{field}: the tokenizer of {name!r} has no eos token, so no response "
            "would end; set sampling.stop_token_ids, or add an eos token to it"
        )
    return tokenizer


def end_token_ids(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response: sampling.stop_token_ids, the tokenizer's eos, and what
    the model's generation_config.json names (config.json where there is none), as vLLM's own
    server takes them."""
    name, trusted = cfg.model.path, cfg.model.trust_remote_code
    try:
        generation = GenerationConfig.from_pretrained(name, trust_remote_code=trusted)
    except OSError:
        hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
        generation = GenerationConfig.from_model_config(hf_config)
    own = generation.eos_token_id
    own = own if isinstance(own, list) else [own]
    known = (*cfg.sampling.stop_token_ids, tokenizer.eos_token_id, *own)
    return tuple(dict.fromkeys(i for i in known if i is not None))
