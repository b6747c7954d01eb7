"""The modules that FSDP2 sees as its roots: tokens in; logprobs, or values, out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.config import NO_PENALTIES, Penalties
from spmdrl.errors import Refusal
from spmdrl.kept_sets import KeptSets
from spmdrl.model.blocks import base_of, name_of
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.head_form import head_form
from spmdrl.model.parallel.row_slices import RowSlice, Slicing, make_slice
from spmdrl.model.shards import to_local

Head = Callable[..., Any]
"""From the states before scored tokens [n, H], this rank's rows of the vocabulary [V, H], their
bias [V] or None and, as `targets`, these tokens [n] to tensors [n, ...] and sums over them; see
RowSlice.join_scored."""


@dataclass(frozen=True)
class ScoredRow:
    """One packed row and the positions of it to score. N scored positions, T tokens."""

    tokens: Tensor  # [T] int64
    lengths: tuple[int, ...]  # tokens per sequence
    scored: Tensor  # [N] int64, positions of the scored tokens; none is a sequence's first
    own: RowSlice
    """What this rank computes of it."""

    def join_scored(self, found: Any) -> Any:
        """Return what a head made, for all N scored tokens; see RowSlice.join_scored."""
        return self.own.join_scored(found, count=len(self.scored))

    def without_routes(self) -> ScoredRow:
        """Return the same, with the model's own routers to choose the experts."""
        return replace(self, own=replace(self.own, routes=None))

    def join_tokens(self, values: Tensor) -> Tensor:
        """Return [T, ...] of all tokens from [t, ...] of the slice's."""
        whole = self.own.join(values, self.own.rows, count=self.own.row_length)
        return whole[: len(self.tokens)]  # what the row was padded by is no token of anyone

    def spread(self, values: Tensor) -> Tensor:
        """Return [N] values of the scored tokens as [T], 0 elsewhere; differentiable."""
        return values.new_zeros(self.tokens.shape).index_copy(0, self.scored, values)


def make_row(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    mask: Tensor,
    slicing: Slicing = Slicing(),
    routes: Tensor | None = None,
    kept_sets: KeptSets | None = None,
    drawn: Tensor | None = None,
) -> ScoredRow:
    """Return what the scorer needs to score the masked tokens of a packed row.

    Args:
        tokens: [T] int64 on the CPU.
        lengths: tokens per sequence.
        mask: [T] bool on the CPU.
        slicing: which slice of the row this rank computes, and where; by default all of it.
        routes: [T, L, K] on the CPU, to be replayed; None for none.
        kept_sets: among which ids each token was drawn, on the CPU; None: all of them.
        drawn: [T] bool on the CPU, tokens of responses, where penalties count them.
    Raises: Refusal when the mask holds a sequence's first token, which nothing predicts.
    """
    firsts = torch.tensor([0, *accumulate(lengths[:-1])])
    first = firsts[mask[firsts]]
    if len(first):
        raise Refusal(
            f"response_mask holds the first token of a sequence (packed position "
            f"{int(first[0])}), which no token comes before; mask it out where rows are read"
        )
    scored, device = mask.nonzero()[:, 0], slicing.device
    own = make_slice(
        tokens,
        lengths,
        scored=scored,
        slicing=slicing,
        routes=routes,
        kept_sets=kept_sets,
        drawn=drawn,
    )
    return ScoredRow(
        tokens=tokens.to(device), lengths=tuple(lengths), scored=scored.to(device), own=own
    )


class Scorer(nn.Module):
    """A transformers base model and an output head that never makes full logits.

    Args:
        hf_model: a transformers causal LM; its base model and head are used, its forward not.
        chunk_tokens: positions whose logits exist at once.
        temperature: of the distribution that is scored.
        penalties: likewise, of tokens with a history.
        tp_group: ranks among which the head's rows are sharded; None when they are not.
    Raises: Refusal for a model whose head makes logits in another way; see head_form.
    """

    def __init__(
        self,
        hf_model: nn.Module,
        *,
        chunk_tokens: int,
        temperature: float,
        penalties: Penalties = NO_PENALTIES,
        tp_group: dist.ProcessGroup | None,
    ):
        super().__init__()
        form, head = head_form(hf_model), hf_model.get_output_embeddings()
        _, self.base = base_of(hf_model)
        self._is_tied = bool(hf_model.config.tie_word_embeddings)
        self.lm_head = _own_part(head) if self._is_tied else head
        self.head_options = HeadOptions(
            chunk_tokens=chunk_tokens,
            temperature=temperature,
            penalties=penalties,
            group=tp_group,
            scale=form.scale,
            softcap=form.softcap,
        )

    def forward(self, row: ScoredRow, head: Head | None = None) -> Any:
        """Return logprobs and entropy of the slice's scored tokens, each [n] float32, nats.

        Args:
            head: what to make of the states instead.
        """
        hidden, own = _states(self.base, row.own), row.own
        rows: Any = self.base.get_input_embeddings() if self._is_tied else self.lm_head
        weight, bias = to_local(rows.weight), to_local(getattr(self.lm_head, "bias", None))
        head = head or partial(logprobs_and_entropy, options=self.head_options, rules=own.rules)
        return head(hidden.index_select(0, own.before), weight, bias, targets=own.targets)


class _OwnPart(nn.Module):
    """What a head has besides the embedding's rows."""

    def __init__(self, bias: nn.Parameter):
        super().__init__()
        self.bias = bias


def _own_part(head: nn.Module) -> nn.Module | None:
    bias = getattr(head, "bias", None)
    return None if bias is None else _OwnPart(bias)


def scorer_prefixes(hf_model: nn.Module) -> dict[str, str]:
    """Return {a child of the scorer: the name that the model has for it}."""
    prefixes = {"base": base_of(hf_model)[0], "score": "score"}
    if head := hf_model.get_output_embeddings():
        prefixes["lm_head"] = name_of(hf_model, head)
    return prefixes


def _states(base: nn.Module, own: RowSlice) -> Tensor:
    """Return the last hidden states of the slice's tokens: [t, H]."""
    return base(
        input_ids=own.tokens[None],
        position_ids=own.position_ids[None],
        attention_mask=None,
        use_cache=False,
        packing=own.packing,
    ).last_hidden_state[0]


class Valuer(nn.Module):
    """A transformers base model and a scalar head: one number after each token.

    Args:
        hf_model: a transformers sequence classifier with one label, whose head is `score`.
    """

    def __init__(self, hf_model: nn.Module):
        super().__init__()
        (_, self.base), self.score = base_of(hf_model), hf_model.score

    def forward(self, row: ScoredRow) -> Tensor:
        """Return the value after each token of the slice: [t] float32."""
        values = self.score(_states(self.base, row.own))
        return values.float().sum(-1)  # not a view, which FSDP2 warns of
