"""Whether models can be teachers of the policy, by their config.json and tokenizers."""

from __future__ import annotations

from pathlib import Path

from spmdrl.config import Config
from spmdrl.data.tokenizer import has_tokenizer, load_tokenizer, read_tokenizer
from spmdrl.errors import Refusal
from spmdrl.model.load import hf_config_of, max_positions


def check_teachers(cfg: Config) -> None:
    """Refuse teachers that cannot be compared with the policy token by token.

    The tokenizers of hub models that are not in a folder are not compared.

    Raises: Refusal with the `field` of the first.
    """
    for field, path in cfg.teacher_paths.items():
        _check_vocabulary(cfg, path, field=field)
    if cfg.hints_teacher:
        for field, teacher in cfg.teacher_fields().items():
            _check_context(cfg, teacher, field=field)


def _check_vocabulary(cfg: Config, path: str, *, field: str) -> None:
    own, other = (
        hf_config_of(cfg.model, path=model).get_text_config().vocab_size
        for model in (cfg.model.path, path)
    )
    if own != other and not cfg.objective.needs_teacher:
        raise Refusal(
            f"{field}: has a vocabulary of {other} rows, the policy one of {own}; logprobs of "
            "whole vocabularies are not cut to the ids of both; take the objective distill or "
            "on_policy_distill, or a teacher with as many rows",
            field=field,
        )
    folder = Path(path)
    if not folder.is_dir():
        return
    if has_tokenizer(folder):
        _check_tokens(cfg, path, field=field, shared=min(own, other))
    elif own != other:
        raise Refusal(
            f"{field}: has a vocabulary of {other} rows, the policy one of {own}, and {folder} has "
            "no tokenizer that shows whether the ids of both are the same tokens; put its "
            "tokenizer there",
            field=field,
        )


def _check_tokens(cfg: Config, path: str, *, field: str, shared: int) -> None:
    """Refuse a teacher whose ids are not the policy's tokens.

    Args:
        shared: rows of the vocabulary that both models have.
    """
    theirs = read_tokenizer(path, trust_remote_code=cfg.model.trust_remote_code)
    vocabularies = [tokenizer.get_vocab() for tokenizer in (load_tokenizer(cfg), theirs)]
    own, other = ({index: token for token, index in one.items()} for one in vocabularies)
    differing = sorted(i for i in own.keys() | other.keys() if own.get(i) != other.get(i))
    if differing:
        index = differing[0]
        raise Refusal(
            f"{field}: {path} has another tokenizer than the policy: {len(differing)} ids differ, "
            f"e.g. {index} is {own.get(index, 'nothing')!r} to the policy and "
            f"{other.get(index, 'nothing')!r} to it; distillation compares the same ids on both "
            "sides: take a teacher with the policy's tokenizer",
            field=field,
        )
    if max(own) >= shared:
        raise Refusal(
            f"{field}: the tokenizer has the id {max(own)}, and policy and teacher share the "
            f"first {shared} ids alone; take models that embed all tokens",
            field=field,
        )


def _check_context(cfg: Config, teacher: str, *, field: str) -> None:
    """Refuse a teacher that cannot read its longest prompt with the longest response."""
    own = {"policy": cfg.model.path, "reference": cfg.model.reference.path or cfg.model.path}
    most = max_positions(hf_config_of(cfg.model, path=own.get(teacher, teacher)))
    prompt = cfg.data.max_teacher_prompt_tokens
    response = cfg.sampling.max_response_tokens
    if most is not None and prompt + response > most:
        raise Refusal(
            f"data.max_teacher_prompt_tokens: {prompt} + sampling.max_response_tokens {response} = "
            f"{prompt + response} tokens, above the context of {most} of {field} {teacher}; lower "
            "one of them",
            field=field,
        )
