"""The root modules of FSDP2: tokens in, logprobs or values out.

Some models scale or cap logits, each by config fields of its own. Instead of a table of these
fields, the model's forward pass runs once on a few numbers, with stand-ins for the base model and
the head. This needs no weights. Logits that head.py cannot compute are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.columns import Columns, to_device
from spmdrl.errors import Refusal
from spmdrl.model.blocks import base_of, blocks, name_of, replaced_forward
from spmdrl.model.files.reader import some
from spmdrl.model.head import HeadOptions, logprobs_and_entropy
from spmdrl.model.parallel.row_slices import RowSlice, Slicing, make_slice
from spmdrl.model.sampling_rules import make_sampling_rules
from spmdrl.model.tensor_parts import to_local
from spmdrl.model.vision.tower import vision_tower_of
from spmdrl.sampling_masks import SamplingMasks

_SMALL = 2.0**-13
_LARGE = 2.0**20  # reaches any cap
_LEVELS = (1.0, -1.0, _SMALL, _LARGE, 3.0, -40.0)
"""Numbers that the forward pass runs on; bfloat16 has them, which some models cast states to."""
_CLOSE = 1e-5


@dataclass(frozen=True)
class HeadForm:
    """Logits are scale * x or softcap * tanh(scale * x / softcap), where x is the head's output."""

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Return logits from the output of the head's matrix product."""
        scaled = products * self.scale
        cap = self.softcap
        return scaled if cap is None else cap * torch.tanh(scaled / cap)


def head_form(hf_model: nn.Module) -> HeadForm:
    """Return how a causal LM computes logits from the output of its head.

    Args:
        hf_model: on any device; it is not changed.
    Raises: Refusal for a model without a linear head, or with logits of another form.
    """
    head = hf_model.get_output_embeddings()
    kind = type(hf_model).__name__
    if head is None or getattr(head, "weight", None) is None:
        raise Refusal(f"model: {kind} has no linear output head, from which logprobs are made")
    has_bias = getattr(head, "bias", None) is not None
    levels = torch.tensor(_LEVELS, dtype=torch.float64)
    rows, width = head.weight.shape
    # The stand-in for a head with a bias adds one, which must be scaled and capped as well.
    products = (levels + 0.5 * has_bias)[:, None].expand(-1, rows)
    try:
        logits = _run(
            hf_model,
            head,
            hidden=levels[:, None].expand(-1, width),
            product=lambda x: x[..., :1].double().expand(*x.shape[:-1], rows) + 0.5 * has_bias,
        )
    except Exception as error:  # the model's own code may raise anything
        between = _between(hf_model, head)
        why = f"goes through {some(between)}" if between else f"cannot be followed ({error!r:.200})"
        raise Refusal(_refused(kind, why)) from error
    form = _form(products, logits)
    if logits.shape != products.shape or not torch.allclose(
        form.logits(products), logits, rtol=_CLOSE, atol=0
    ):
        raise Refusal(_refused(kind, "is neither a factor nor a softcap"))
    return form


def _between(hf_model: nn.Module, head: nn.Module) -> list[str]:
    """Return the modules with weights that are neither in the base model nor the head."""
    below = base_of(hf_model)[1]
    known = {*below.modules(), *head.modules()}
    return [
        f"{name} ({type(module).__name__})"
        for name, module in hf_model.named_modules()
        if module not in known and any(True for _ in module.parameters(recurse=False))
    ]


def _refused(kind: str, why: str) -> str:
    return (
        f"model: what {kind} does between its last states and its logits {why}, so that logprobs "
        "would be those of another model; take a family whose logits are a linear head's, scaled "
        "or softcapped"
    )


def _form(products: Tensor, logits: Tensor) -> HeadForm:
    ratios = (logits / products)[:, 0]
    one, small, large = (float(ratios[_LEVELS.index(level)]) for level in (1.0, _SMALL, _LARGE))
    if abs(large - one) <= _CLOSE * abs(one):
        return HeadForm(scale=one)
    cap = abs(float(logits[_LEVELS.index(_LARGE), 0]))
    return HeadForm(scale=float(f"{small:.5g}"), softcap=cap)


def _run(
    hf_model: nn.Module, head: nn.Module, *, hidden: Tensor, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return logits [n, V] of a model for states [n, H], with `product` in place of its head."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class _States(BaseModelOutputWithPast):
        """The output of the base model; None for all other attributes that a family reads."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    def below(*_args: Any, **_options: Any) -> _States:
        return _States(last_hidden_state=hidden[None])

    ids = torch.zeros(1, len(hidden), dtype=torch.int64)
    with torch.no_grad(), ExitStack() as stack:
        for module in _around_blocks(hf_model):
            stack.enter_context(replaced_forward(module, below))
        stack.enter_context(replaced_forward(head, product))
        return hf_model(input_ids=ids, use_cache=False, return_dict=True).logits[0].double().cpu()


def _around_blocks(hf_model: nn.Module) -> list[nn.Module]:
    """Return the modules that may return states: some models call a part of the base model."""
    first = next(iter(blocks(hf_model)))
    parts = first.split(".")[:-1]
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    found = map(hf_model.get_submodule, names)
    return [module for module in found if not isinstance(module, nn.ModuleList)]


Head = Callable[..., Any]
"""Called with the states before scored tokens [n, H], this rank's rows of the vocabulary [V, H],
their bias [V] or None, and `targets`, the scored tokens [n]. Returns tensors [n, ...] and sums over
them; see RowSlice.join_scored."""


@dataclass(frozen=True)
class ScoredRow:
    """One packed row and the positions of it to score. N scored positions, T tokens."""

    tokens: Tensor  # [T] int64
    lengths: tuple[int, ...]  # tokens per sequence
    scored: Tensor  # [N] int64, positions of the scored tokens; none is a sequence's first
    own: RowSlice
    """The part that this rank computes."""

    def join_scored(self, found: Any) -> Any:
        """Return the results of a head for all N scored tokens; see RowSlice.join_scored."""
        return self.own.join_scored(found, count=len(self.scored))

    def without_routes(self) -> ScoredRow:
        """Return the same row without routes, so that the model's own routers choose experts."""
        return replace(self, own=replace(self.own, routes=None, room=None))

    def join_tokens(self, values: Tensor) -> Tensor:
        """Return [T, ...] of all tokens from [t, ...] of the slice's."""
        own = self.own
        whole = own.join(values, own.rows, count=own.row_length)
        if own.places is not None:
            return own.places.of(whole)
        return whole[: len(self.tokens)]  # without padding

    def spread(self, values: Tensor) -> Tensor:
        """Return [N] values of the scored tokens as [T], 0 for other tokens; differentiable."""
        return values.new_zeros(self.tokens.shape).index_copy(0, self.scored, values)


def make_row(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    mask: Tensor,
    slicing: Slicing = Slicing(),
    columns: Columns = MappingProxyType({}),
    drawn: Tensor | None = None,
) -> ScoredRow:
    """Prepare a packed row for the scorer, to score the masked tokens.

    Args:
        tokens: [T] int64 on the CPU.
        lengths: tokens per sequence.
        mask: [T] bool on the CPU.
        slicing: which slice of the row this rank computes; by default all of it.
        columns: of the tokens, on the CPU: router routes to replay, sampling masks, images.
        drawn: [T] bool on the CPU, tokens of responses, if penalties count them.
    Raises: Refusal when the mask holds a sequence's first token, which nothing predicts.
    """
    firsts = torch.tensor([0, *accumulate(lengths[:-1])])
    first = firsts[mask[firsts]]
    if len(first):
        raise Refusal(
            f"response_mask holds the first token of a sequence (packed position "
            f"{int(first[0])}), which no token comes before; mask it out where rows are read"
        )
    scored = mask.nonzero()[:, 0]
    device = slicing.device
    rules = partial(
        make_sampling_rules,
        tokens,
        lengths,
        sampling_masks=SamplingMasks.of(columns),
        drawn=drawn,
        device=device,
    )
    own = make_slice(tokens, lengths, scored=scored, slicing=slicing, columns=columns, rules=rules)
    return ScoredRow(to_device(tokens, device), tuple(lengths), to_device(scored, device), own)


class Scorer(nn.Module):
    """A transformers base model and an output head that never makes full logits.

    Args:
        hf_model: a transformers causal LM; its base model and head are used, its forward not.
        options: how logits become the distribution that is scored; its scale and softcap are
            replaced by the model's own.
    Raises: Refusal for a model whose head makes logits in another way; see head_form.
    """

    def __init__(self, hf_model: nn.Module, options: HeadOptions):
        super().__init__()
        form = head_form(hf_model)
        head = hf_model.get_output_embeddings()
        _, self.base = base_of(hf_model)
        self.vision = vision_tower_of(hf_model)
        self._is_tied = bool(hf_model.config.tie_word_embeddings)
        self.lm_head = _own_part(head) if self._is_tied else head
        self.head_options = replace(options, scale=form.scale, softcap=form.softcap)

    def forward(self, row: ScoredRow, head: Head | None = None) -> Any:
        """Return logprobs and entropy of the slice's scored tokens, each [n] float32, nats.

        Args:
            head: computes something else from the states.
        """
        hidden = _states(self.base, row.own, self.vision)
        own = row.own
        rows: Any = self.base.get_input_embeddings() if self._is_tied else self.lm_head
        weight = to_local(rows.weight)
        bias = to_local(getattr(self.lm_head, "bias", None))
        head = head or partial(logprobs_and_entropy, options=self.head_options, rules=own.rules)
        # Mamba's last states may be float32 where weights are not.
        return head(own.before.of(hidden).to(weight.dtype), weight, bias, targets=own.targets)


def _own_part(head: nn.Module) -> nn.Module | None:
    """Return a module with the bias of a tied head; None without a bias."""
    if getattr(head, "bias", None) is None:
        return None
    own = nn.Module()
    own.bias = head.bias
    return own


def scorer_prefixes(hf_model: nn.Module) -> dict[str, str]:
    """Return {a child of the scorer: the name that the model has for it}."""
    base = base_of(hf_model)[0]
    prefixes = {"base": base, "vision": base.rpartition(".")[0], "score": "score"}
    if head := hf_model.get_output_embeddings():
        prefixes["lm_head"] = name_of(hf_model, head)
    return prefixes


def _states(base: nn.Module, own: RowSlice, vision: nn.Module | None) -> Tensor:
    """Return the last hidden states of the slice's tokens: [t, H].

    Args:
        vision: of a vision model; it runs if the row has images on any rank.
    """
    inputs = {"input_ids": own.tokens[None]}
    if own.multimodal is not None:
        assert vision is not None, "only a vision model has images"
        inputs = vision(base.get_input_embeddings()(own.tokens[None]), own.multimodal)  # type: ignore[operator]
    return base(
        **inputs,
        position_ids=own.position_ids.unsqueeze(-2),
        attention_mask=None,
        use_cache=False,
        packing=own.packing,
    ).last_hidden_state.squeeze(0)


class Valuer(nn.Module):
    """A transformers base model and a scalar head: one number after each token.

    Args:
        hf_model: a transformers sequence classifier with one label, whose head is `score`.
    """

    def __init__(self, hf_model: nn.Module):
        super().__init__()
        _, self.base = base_of(hf_model)
        self.vision = vision_tower_of(hf_model)
        self.score = hf_model.score

    def forward(self, row: ScoredRow) -> Tensor:
        """Return the value after each token of the slice: [t] float32."""
        states = _states(self.base, row.own, self.vision)
        values = self.score(states.to(self.score.weight.dtype))
        return values.float().sum(-1)  # not a view: FSDP2 warns about views
