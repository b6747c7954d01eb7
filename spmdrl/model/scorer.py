"""The modules that FSDP2 sees as its roots: tokens in; logprobs, or values, out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.parallel.row_slices import RowSlice, Slicing, make_slice
from spmdrl.model.shards import to_local

Head = Callable[..., Any]
"""From the states before scored tokens [n, H], this rank's rows of the vocabulary [V, H] and, as
`targets`, these tokens [n] to tensors [n, ...] and sums over them; see RowSlice.join_scored."""


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
) -> ScoredRow:
    """Return what the scorer needs to score the masked tokens of a packed row.

    Args:
        tokens: [T] int64 on the CPU.
        lengths: tokens per sequence.
        mask: [T] bool on the CPU.
        slicing: which slice of the row this rank computes, and where; by default all of it.
        routes: [T, L, K] on the CPU, to be replayed; None for none.
    Raises: ValueError when the mask holds a sequence's first token, which nothing predicts.
    """
    firsts = torch.tensor([0, *accumulate(lengths[:-1])])
    first = firsts[mask[firsts]]
    if len(first):
        raise ValueError(
            f"response_mask holds the first token of a sequence (packed position "
            f"{int(first[0])}), which no token comes before; mask it out where rows are read"
        )
    scored, device = mask.nonzero()[:, 0], slicing.device
    own = make_slice(tokens, lengths, scored=scored, slicing=slicing, routes=routes)
    return ScoredRow(
        tokens=tokens.to(device), lengths=tuple(lengths), scored=scored.to(device), own=own
    )


class Scorer(nn.Module):
    """A transformers base model and an output head that never makes full logits.

    Args:
        hf_model: a transformers causal LM; its base model and head are used, its forward not.
        chunk_tokens: positions whose logits exist at once.
        temperature: of the distribution that is scored.
        tp_group: ranks among which the head's rows are sharded; None when they are not.
    Raises: ValueError for a head with a bias.
    """

    def __init__(
        self,
        hf_model: nn.Module,
        *,
        chunk_tokens: int,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
    ):
        super().__init__()
        head, embedding = hf_model.get_output_embeddings(), hf_model.get_input_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ValueError(
                f"model: the output head of {type(hf_model).__name__} is missing or "
                "has a bias, which the logprob head does not support"
            )
        config = hf_model.config
        is_tied = bool(config.tie_word_embeddings)
        assert is_tied or head.weight is not embedding.weight
        self.base = hf_model.base_model
        self.lm_head = None if is_tied else head
        scale = getattr(config, "logit_scale", None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        self.head_options = HeadOptions(
            chunk_tokens=chunk_tokens,
            temperature=temperature,
            group=tp_group,
            scale=scale,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def forward(self, row: ScoredRow, head: Head | None = None) -> Any:
        """Return logprobs and entropy of the slice's scored tokens, each [n] float32, nats.

        Args:
            head: what to make of the states instead.
        """
        hidden, own = _states(self.base, row.own), row.own
        rows = self.base.get_input_embeddings() if self.lm_head is None else self.lm_head
        weight = to_local(rows.weight)
        before = hidden.index_select(0, own.before)
        if head is not None:
            return head(before, weight, targets=own.targets)
        return logprobs_and_entropy(before, weight, targets=own.targets, options=self.head_options)


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
        self.base, self.score = hf_model.base_model, hf_model.score

    def forward(self, row: ScoredRow) -> Tensor:
        """Return the value after each token of the slice: [t] float32."""
        values = self.score(_states(self.base, row.own))
        return values.float().sum(-1)  # not a view, which FSDP2 warns of
