"""The layers of a model that have experts: their routers, and which balance these allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.blocks import base_of, experts_modules

BIAS = "e_score_correction_bias"


@dataclass
class RoutedLayer:
    """A layer's modules, and what its hooks have seen of the micro-batch that is watched."""

    experts: nn.Module
    router: nn.Module | None
    """Returns its logits [t, E] first; None where transformers does not say which module it is."""
    bias: Tensor | None
    """[E] float32, live: added to scores to choose, not to weight."""
    counts: list[Tensor] = field(default_factory=list)  # [E] float64: (token, choice) pairs
    logits: list[Tensor] = field(default_factory=list)  # [t, E], with a graph

    def probs(self, logits: Tensor) -> Tensor:
        """Return each expert's share of a token's favour, [t, E] float64."""
        if self.bias is None:
            return torch.softmax(logits.double(), dim=-1)
        # Routers with a bias take sigmoids, made shares as in arXiv 2412.19437, equation 19.
        scores = torch.sigmoid(logits.double())
        return scores / scores.sum(dim=-1, keepdim=True)


def routed_layers(hf_model: nn.Module) -> list[RoutedLayer]:
    """Return the layers with experts, first to last."""
    experts = list(experts_modules(hf_model).values())
    recorders = getattr(base_of(hf_model)[1], "_can_record_outputs", None) or {}
    recorder = recorders.get("router_logits")
    kind = getattr(recorder, "target_class", None)
    found = [m for m in hf_model.modules() if kind is not None and type(m) is kind]
    known = len(found) == len(experts) and getattr(recorder, "index", 0) == 0
    routers = found if known else [None] * len(experts)
    biases = [
        buffer
        for module in hf_model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name == BIAS
    ]
    biases = biases if len(biases) == len(experts) else [None] * len(experts)
    return [RoutedLayer(*one) for one in zip(experts, routers, biases)]


def check_balance(hf_model: nn.Module, *, balance: str) -> None:
    """Refuse model.moe.balance for a policy that has no experts, or no such routers.

    Args:
        hf_model: as it was built, on any device.
    Raises: Refusal.
    """
    layers = routed_layers(hf_model)
    if balance != "none" and not layers:
        raise Refusal(
            f"model.moe.balance: {balance} with a {hf_model.config.model_type}, which "
            "has no experts; leave it out"
        )
    check_layers(hf_model, layers, balance=balance)


def check_layers(hf_model: nn.Module, layers: Sequence[RoutedLayer], *, balance: str) -> None:
    """Refuse a balance that the routers of these layers do not know. Raises: Refusal."""
    kind = hf_model.config.model_type
    if balance == "bias" and any(layer.bias is None for layer in layers):
        raise Refusal(
            f"model.moe.balance: bias moves the routers' {BIAS}, which a {kind} does "
            "not have; take aux"
        )
    if balance == "aux" and any(layer.bias is not None for layer in layers):
        raise Refusal(
            f"model.moe.balance: aux, whose loss is on softmax probabilities, with a "
            f"{kind}, whose routers have sigmoids and a {BIAS}; take bias"
        )
    if balance == "aux" and any(layer.router is None for layer in layers):
        raise Refusal(
            f"model.moe.balance: aux needs the routers' logits, and transformers does "
            f"not say which modules of a {kind} return them; take none"
        )
