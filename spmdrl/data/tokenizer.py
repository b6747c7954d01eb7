"""The model's tokenizer, and which tokens end a response."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.attachments import attach_image_reader
from spmdrl.data.hub import find_on_hub
from spmdrl.errors import Refusal
from spmdrl.imports import is_missing_folder, missing_folder, refusing


def load_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with an image reader if the model reads images.

    Raises: Refusal when it cannot be read, or when nothing would end a response; see
        attach_image_reader.
    """
    name = cfg.model.tokenizer or cfg.model.path
    field = "model.tokenizer" if cfg.model.tokenizer else "model.path"
    if not name or is_missing_folder(name):
        raise Refusal(f"{field}: {missing_folder(name)}")
    trusts = cfg.model.trust_remote_code
    tokenizer = read_tokenizer(name, what=f"{field}: ", trust_remote_code=trusts)
    if tokenizer.eos_token_id is None and not cfg.sampling.stop_token_ids:
        raise Refusal(
            f"{field}: the tokenizer of {name!r} has no eos token, so no response "
            "would end; set sampling.stop_token_ids, or add an eos token to it"
        )
    attach_image_reader(cfg, tokenizer)
    return with_template_options(tokenizer, cfg.data.chat_template_kwargs)


def with_template_options(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that passes options to its chat template whenever it is applied.

    Raises: Refusal for options that the template does not read.
    """
    if not options:
        return tokenizer
    what = "data.chat_template_kwargs"
    templates = tokenizer.chat_template
    if not templates:
        raise Refusal(
            f"{what}: {dict(options)} are for a chat template, and the tokenizer of "
            f"{tokenizer.name_or_path or 'the model'} has none; leave them out"
        )
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    text = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
    for name in options:
        if name in own or name == "messages":  # the template's name of `conversation`
            raise Refusal(f"{what}.{name}: is set for each prompt; leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", text):
            raise Refusal(
                f"{what}.{name}: the chat template of {tokenizer.name_or_path or 'the model'} "
                "reads no such name, so that it would change nothing; leave it out"
            )
    with_options = partial(tokenizer.apply_chat_template, **options)
    tokenizer.apply_chat_template = with_options  # type: ignore[method-assign]
    return tokenizer


def read_tokenizer(
    name: str, *, what: str = "", trust_remote_code: bool = False, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by a hub name.

    Args:
        what: the beginning of messages.
    Raises: Refusal for files that make no tokenizer, whatever they hold.
    """
    if not local_files_only:
        find_on_hub(name, field=what.rstrip(": ") or "tokenizer")
    _check_files(Path(name), what=what)
    what = f"{what}no tokenizer can be loaded from {name!r}, as a folder or hub name"
    with refusing(what, Exception, names_kind=True):  # the code that reads files raises any error
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )


_TOKENIZER_FILES = (
    "tokenizer*", "tokenization*", "vocab*", "*.model", "*.tiktoken", "*.spm", "tekken.json"
)  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any(p for own in _TOKENIZER_FILES for p in folder.glob(own))


def _check_files(folder: Path, *, what: str) -> None:
    """Raise Refusal for a folder without a tokenizer: transformers would make an empty one."""
    if not folder.is_dir() or has_tokenizer(folder):
        return
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8])
    raise Refusal(
        f"{what}the folder {folder} has no files of a tokenizer (tokenizer.json, vocab.json, "
        f"tokenizer.model ...), it has {found or 'nothing'}; copy them from the model that this "
        "one was made of, or set model.tokenizer to a folder or hub name that has them"
    )


def end_token_ids(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response, as vLLM's own server does: sampling.stop_token_ids, the
    tokenizer's eos, and those of the model's generation_config.json (config.json without one).

    Raises: Refusal for a generation_config.json that cannot be read, or values that are no ids.
    """
    name = cfg.model.path
    trusted = cfg.model.trust_remote_code
    file = Path(name) / "generation_config.json"
    what = f"model.path: {file} cannot be read"
    with refusing(what, Exception, names_kind=True):  # the file may hold anything
        try:
            generation = GenerationConfig.from_pretrained(name, trust_remote_code=trusted)
        except OSError:
            # Without the file the ids are in config.json; a file that is there must be readable.
            if file.exists():
                raise
            hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
            generation = GenerationConfig.from_model_config(hf_config)
    own = generation.eos_token_id
    own = [i for i in (own if isinstance(own, list) else [own]) if i is not None]
    if wrong := [i for i in own if type(i) is not int or i < 0]:
        raise Refusal(
            f"model.path: {name} names {wrong[0]!r} as eos_token_id in its generation_config.json "
            "or config.json; expected ids of tokens, 0 or more"
        )
    known = (*cfg.sampling.stop_token_ids, tokenizer.eos_token_id, *own)
    return tuple(dict.fromkeys(i for i in known if i is not None))
