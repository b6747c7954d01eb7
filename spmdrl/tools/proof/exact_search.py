"""Where a model's bits first depend on the batch: a search over its modules (docs/exact.md).

The same sequences are computed twice: in one packed row, as a trainer does, and token by token
beside each other, as an engine does. Inputs and outputs of all modules are compared in the order in
which they are computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from spmdrl.config import Config, DataSettings, EngineSettings, ModelSettings, SamplingSettings
from spmdrl.engine.protocol import Request
from spmdrl.engine.transformers.runner import ModelRunner, RunningSequence
from spmdrl.engine.vllm.exact import PagedModel
from spmdrl.engine.vllm.paged import PagedStep
from spmdrl.model.exact.units import KEYS, padded

_PROMPTS = (1, 13, 130)
"""Tokens of the prompts: one, few, and more than attention takes at a time."""
_NUM_DRAWN = 20
"""Tokens that are computed one by one after each prompt."""

Dtype = Literal["float32", "bfloat16"]
Event = tuple[str, str]
"""(module, `input` or `output`)."""


class Decoder(Protocol):
    """A model with a cache of sequences."""

    hf_model: nn.Module

    def next_logits(self, sequences: Sequence[RunningSequence], *, num_old: int) -> Tensor:
        """Return the logits of each sequence's next token, [n, V], see ModelRunner."""
        ...


class PagedDecoder:
    """Computes sequences over pages, as engine.kind vllm does with the same model."""

    def __init__(self, model: ModelSettings, *, dtype: Dtype):
        self._model = PagedModel(model, dtype=getattr(torch, dtype))
        self.hf_model = self._model.hf_model
        longest = max(_PROMPTS) + _NUM_DRAWN
        per_sequence = padded(longest, KEYS) // KEYS
        count = len(_PROMPTS) * per_sequence
        # Neighbouring pages are of different sequences.
        self._tables = torch.arange(count).view(per_sequence, -1).t().contiguous()
        for layer in self._model.layers.values():
            dims = layer.head_dim + layer.value_dim
            layer.bind_kv_cache(torch.zeros(count, layer.num_kv_heads, KEYS, dims).to(layer.dtype))

    def next_logits(self, sequences: Sequence[RunningSequence], *, num_old: int) -> Tensor:
        """See Decoder."""
        tokens = [list(sequence.all_tokens) for sequence in sequences]
        begins = [len(own) - 1 if index < num_old else 0 for index, own in enumerate(tokens)]
        rows = torch.tensor([i for i, own in enumerate(tokens) for _ in own[begins[i] :]])
        at = torch.cat([torch.arange(begin, len(own)) for begin, own in zip(begins, tokens)])
        ends = torch.tensor([len(own) - begin for begin, own in zip(begins, tokens)]).cumsum(0)
        tables = self._tables[: len(tokens)]
        metadata = SimpleNamespace(
            num_reqs=len(tokens),
            num_actual_tokens=len(at),
            query_start_loc_cpu=torch.cat([ends.new_zeros(1), ends]),
            seq_lens=torch.tensor([len(own) for own in tokens]),
            block_table_tensor=tables,
            slot_mapping=tables[rows, at // KEYS] * KEYS + at % KEYS,
        )
        ids = torch.tensor([tokens[row][place] for row, place in zip(rows.tolist(), at.tolist())])
        work = PagedStep(dict.fromkeys(self._model.layers, metadata))
        states = self._model.states(ids, at, work)
        return self._model.compute_logits(states[ends - 1])


CPU = torch.device("cpu")


def make_runner(model: ModelSettings, *, dtype: Dtype, device: torch.device = CPU) -> ModelRunner:
    """Load a model with its weights, as the engine of a run with engine.exact does.

    Raises: Refusal when it cannot be loaded.
    """
    cfg = Config(
        model=replace(model, compute_dtype=dtype),
        data=DataSettings(max_prompt_tokens=max(_PROMPTS)),
        sampling=SamplingSettings(max_response_tokens=_NUM_DRAWN),
        engine=EngineSettings(kind="transformers", dtype=dtype, exact=True),
    )
    return ModelRunner(cfg, device, longest=cfg.longest_sequence)


@torch.inference_mode()
def first_difference(runner: ModelRunner, decoder: Decoder) -> str:
    """Return what first has other bits alone than in a packed row; empty for nothing.

    Args:
        runner: computes the packed row.
        decoder: computes token by token; may be the runner.
    """
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
        with _recording(decoder.hf_model) as alone:
            logits = decoder.next_logits(sequences, num_old=num_old)
        if num_old:
            at = [start + sequence.num_tokens - 1 for start, sequence in zip(starts, sequences)]
            if found := _compared(decoder.hf_model, packed, alone, at=torch.tensor(at)):
                return found
        num_old = len(sequences)
        logprobs = torch.log_softmax(logits, dim=-1)
        for index, (sequence, row, count) in enumerate(zip(sequences, rows, _PROMPTS)):
            token = row[count + number]
            expected = float(scores[index][count + number])
            if not math.isclose(float(logprobs[index, token]), expected, abs_tol=0.5):
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
    num_alone = _num_tokens(hf_model, alone)
    for (name, side), values in alone.items():
        own = _rows(values, num_alone)
        row = packed.get((name, side))
        whole = None if row is None else _rows(row, num_packed)
        if own is None or whole is None:
            continue
        own = own[: len(at)]  # the others are padding
        if torch.equal(own, whole[at]):
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
    """Yield for each dtype and engine whether a model's bits depend on the batch, and where.

    Args:
        model: whose weights are read.
    Raises: Refusal when it cannot be loaded.
    """
    threads = torch.get_num_threads()
    for dtype in get_args(Dtype):
        runner = make_runner(model, dtype=dtype)
        decoders = {"transformers": runner, "vllm": PagedDecoder(model, dtype=dtype)}
        for kind, decoder in decoders.items():
            found = first_difference(runner, decoder)
            yield f"{dtype}, engine.kind {kind}: " + (
                f"WRONG: {found}"
                if found
                else f"exact: {len(_PROMPTS) * _NUM_DRAWN} tokens have the same bits alone and in "
                f"a packed row, after every module ({threads} threads)"
            )
