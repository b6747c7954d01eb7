"""At which tokens a response ends, in either engine."""

from __future__ import annotations

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from spmdrl.config import Config


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
