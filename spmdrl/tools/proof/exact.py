"""Where a model's bits first depend on the batch: a search over its modules (docs/exact.md).

The same sequences are computed twice: in one packed row, as a trainer does, and token by token
beside each other, as an engine does. Inputs and outputs of all modules are compared in the order in
which they are computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from spmdrl.config import Config, DataSettings, EngineSettings, ModelSettings, SamplingSettings
from spmdrl.engine.protocol import Request
from spmdrl.engine.transformers.runner import ModelRunner, RunningSequence

_PROMPTS = (1, 13, 130)
"""Tokens of the prompts: one, few, and more than attention takes at a time."""
_NUM_DRAWN = 20
"""Tokens that are computed one by one after each prompt."""

Dtype = Literal["float32", "bfloat16"]
Event = tuple[str, str]
"""(module, `input` or `output`)."""


def make_runner(model: ModelSettings, *, dtype: Dtype) -> ModelRunner:
    """Load a model with its weights, as the engine of a run with engine.exact does.

    Raises: Refusal when it cannot be loaded.
    """
    cfg = Config(
        model=replace(model, compute_dtype=dtype),
        data=DataSettings(max_prompt_tokens=max(_PROMPTS)),
        sampling=SamplingSettings(max_response_tokens=_NUM_DRAWN),
        engine=EngineSettings(kind="transformers", dtype=dtype, exact=True),
    )
    return ModelRunner(cfg, torch.device("cpu"), longest=cfg.longest_sequence)


@torch.inference_mode()
def first_difference(runner: ModelRunner) -> str:
    """Return what first has other bits alone than in a packed row; empty for nothing."""
    vocab = runner.hf_model.get_input_embeddings().weight.shape[0]
    draw = random.Random(0)
    rows = [[draw.randrange(vocab) for _ in range(count + _NUM_DRAWN)] for count in _PROMPTS]
    starts = [sum(map(len, rows[:index])) for index in range(len(rows))]
    with _recording(runner.hf_model) as packed:
        scores = runner.score(rows)
    requests = [
        Request(str(index), tuple(row[:count]), _NUM_DRAWN, 1.0, index, ())
        for index, (row, count) in enumerate(zip(rows, _PROMPTS))
    ]
    sequences = [RunningSequence(request, 0) for request in requests]
    num_old = 0
    for number in range(_NUM_DRAWN):
        with _recording(runner.hf_model) as alone:
            logits = runner.next_logits(sequences, num_old=num_old)
        if num_old:
            at = [start + sequence.num_tokens - 1 for start, sequence in zip(starts, sequences)]
            if found := _compared(runner.hf_model, packed, alone, at=torch.tensor(at)):
                return found
        num_old = len(sequences)
        logprobs = torch.log_softmax(logits, dim=-1)
        for index, (sequence, row, count) in enumerate(zip(sequences, rows, _PROMPTS)):
            token = row[count + number]
            if not torch.isclose(logprobs[index, token], scores[index][count + number], atol=0.5):
                return "the tokens that are computed: the cache is not that of the sequences"
            sequence.tokens.append(token)
    return ""


@contextmanager
def _recording(hf_model: nn.Module) -> Iterator[dict[Event, Tensor]]:
    """Record the first tensor that goes into and comes out of each module within the block."""
    found: dict[Event, Tensor] = {}

    def note(event: Event, values: Any) -> None:
        while isinstance(values, (tuple, list)) and values:
            values = values[0]
        if isinstance(values, Tensor):
            found.setdefault(event, values.clone())

    def before(name: str, module: nn.Module, args: Any, options: Any) -> None:
        note((name, "input"), args or options.get("hidden_states"))

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        note((name, "output"), getattr(output, "last_hidden_state", output))

    handles = []
    for name, module in hf_model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _compared(
    hf_model: nn.Module, packed: dict[Event, Tensor], alone: dict[Event, Tensor], *, at: Tensor
) -> str:
    """Return the first event in which a token has other bits; empty for none.

    Args:
        packed: of a row. alone: of one token of each sequence.
        at: [n] int64, where these tokens are in the row.
    """
    num_packed = _num_tokens(hf_model, packed)
    for (name, side), values in alone.items():
        own = _rows(values, len(at))
        row = packed.get((name, side))
        whole = None if row is None else _rows(row, num_packed)
        if own is None or whole is None or torch.equal(own, whole[at]):
            continue
        gap = float((own.double() - whole[at].double()).abs().max())
        kind = type(hf_model.get_submodule(name)).__name__
        if side == "output":
            return f"{name} ({kind}): of equal inputs, outputs differ by up to {gap:.2g}"
        parent = name.rpartition(".")[0]
        return (
            f"what {parent} ({type(hf_model.get_submodule(parent)).__name__}) computes between its "
            f"modules: the input of {name} ({kind}) differs by up to {gap:.2g}"
        )
    return ""


def _num_tokens(hf_model: nn.Module, found: dict[Event, Tensor]) -> int:
    embedding = hf_model.get_input_embeddings()
    name = next(name for name, module in hf_model.named_modules() if module is embedding)
    return found[name, "output"].shape[1]


def _rows(values: Tensor, count: int) -> Tensor | None:
    """Return values [count, ...] of tokens, given with or without a first dim of 1; None for what
    has no row for each token."""
    if values.dim() > 1 and values.shape[:2] == (1, count):
        return values[0]
    return values if values.dim() and values.shape[0] == count else None


def exact_lines(model: ModelSettings) -> Iterator[str]:
    """Yield, for each dtype, whether a model's bits depend on the batch, and where first.

    Args:
        model: whose weights are read.
    Raises: Refusal when it cannot be loaded.
    """
    threads = torch.get_num_threads()
    for dtype in get_args(Dtype):
        found = first_difference(make_runner(model, dtype=dtype))
        yield (
            f"{dtype}: WRONG: {found}"
            if found
            else f"{dtype}: exact: {len(_PROMPTS) * _NUM_DRAWN} tokens have the same bits alone "
            f"and in a packed row, after every module ({threads} threads)"
        )
