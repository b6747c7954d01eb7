"""What a model makes of its output head's products, read off its own forward pass.

Some models scale logits, some cap them, each by fields of its own. Instead of a table of fields,
the model's forward pass is run once on a few numbers, with stand-ins for what is below the head and
for the head itself: no weights are needed, and what is not of the form that head.py computes is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.blocks import blocks, replaced_forward

_LEVELS = (1.0, -1.0, 1e-4, 1e6, 3.0, -40.0)  # of the numbers that pass; 1e6 fills any cap
_CLOSE = 1e-5


@dataclass(frozen=True)
class HeadForm:
    """Logits are scale * x, or softcap * tanh(scale * x / softcap), of the head's products x."""

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Return what becomes of the head's products."""
        scaled = products * self.scale
        cap = self.softcap
        return scaled if cap is None else cap * torch.tanh(scaled / cap)


def head_form(hf_model: nn.Module) -> HeadForm:
    """Return the form of a causal LM's logits.

    Args:
        hf_model: on the meta device or any other; it is left as it was.
    Raises: Refusal for a model without a linear output head, or one that makes logits of its
        products in another way.
    """
    head, kind = hf_model.get_output_embeddings(), type(hf_model).__name__
    if head is None or getattr(head, "weight", None) is None:
        raise Refusal(f"model: {kind} has no linear output head, from which logprobs are made")
    has_bias = getattr(head, "bias", None) is not None
    levels = torch.tensor(_LEVELS, dtype=torch.float64)
    rows, width = head.weight.shape
    products = (levels + 0.5 * has_bias)[:, None].expand(-1, rows)
    try:
        logits = _run(
            hf_model,
            head,
            hidden=levels[:, None].expand(-1, width),
            product=lambda x: x[..., :1].expand(*x.shape[:-1], rows) + 0.5 * has_bias,
        )
    except Exception as error:  # whatever the model's own code runs into
        raise Refusal(_refused(kind, f"cannot be followed ({error!r:.200})")) from error
    form = _form(products, logits)
    if logits.shape != products.shape or not torch.allclose(
        form.logits(products), logits, rtol=_CLOSE, atol=0
    ):
        raise Refusal(_refused(kind, "is neither a factor nor a softcap"))
    return form


def _refused(kind: str, why: str) -> str:
    return (
        f"model: what {kind} does between its last states and its logits {why}, so that logprobs "
        "would be those of another model; take a family whose logits are a linear head's, scaled "
        "or softcapped"
    )


def _form(products: Tensor, logits: Tensor) -> HeadForm:
    ratios = (logits / products)[:, 0]
    one, small, large = (float(ratios[_LEVELS.index(level)]) for level in (1.0, 1e-4, 1e6))
    if abs(large - one) <= _CLOSE * abs(one):
        return HeadForm(scale=one)
    cap = abs(float(logits[_LEVELS.index(1e6), 0]))
    return HeadForm(scale=float(f"{small:.5g}"), softcap=cap)


def _run(
    hf_model: nn.Module, head: nn.Module, *, hidden: Tensor, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return [n, V] logits that a model makes of states [n, H], with `product` for its head."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class _States(BaseModelOutputWithPast):
        """What is below the head returns, and None for all else that a family asks of it."""

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
    """Return what may be asked for states: some models ask a part of what is below their head."""
    first = next(iter(blocks(hf_model)))
    parts = first.split(".")[:-1]
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    found = map(hf_model.get_submodule, names)
    return [module for module in found if not isinstance(module, nn.ModuleList)]
