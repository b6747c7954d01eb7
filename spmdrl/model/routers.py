"""Layers with experts: their routers, which load balancing is possible, and replay of routes.

Rollout Routing Replay sends the trainer's tokens to the experts that the engine chose for them.
Engine and trainer round differently. Near a tie their routers choose different experts, which
changes a logprob far more than rounding does. A hook on each router replaces its choice by the
recorded experts. Their weights are computed from the trainer's own logits, with gradients, in the
way of the model. Tokens without a record keep the router's choice.
Source: arXiv 2510.11370, section 4 (its equations 6 and 7), for the tokens of prompt and response.

Shape letters: t tokens of this rank's slice of a row, L layers with experts, E experts of each, K
experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.blocks import base_of, experts_modules
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.transformers_internals import router_class

BIAS = "e_score_correction_bias"


@dataclass
class RoutedLayer:
    """The modules of a layer, and what its hooks noted of the current micro-batch."""

    experts: nn.Module
    router: nn.Module | None
    """Returns its logits [t, E] first; None if transformers does not say which module it is."""
    bias: Tensor | None
    """[E] float32, live: added to scores for the choice of experts, but not for their weights."""
    counts: list[Tensor] = field(default_factory=list)  # [E] float64: (token, choice) pairs
    logits: list[Tensor] = field(default_factory=list)  # [t, E], with a graph

    def probs(self, logits: Tensor) -> Tensor:
        """Return each expert's share of a token's scores, [t, E] float64."""
        if self.bias is None:
            return torch.softmax(logits.double(), dim=-1)
        # Routers with a bias use sigmoids; normalised as in arXiv 2412.19437, equation 19.
        scores = torch.sigmoid(logits.double())
        return scores / scores.sum(dim=-1, keepdim=True)


def routed_layers(hf_model: nn.Module) -> list[RoutedLayer]:
    """Return the layers with experts, first to last."""
    experts = list(experts_modules(hf_model).values())
    kind = router_class(base_of(hf_model)[1])
    found = [m for m in hf_model.modules() if kind is not None and type(m) is kind]
    routers = found if len(found) == len(experts) else [None] * len(experts)
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
    kind = hf_model.config.model_type
    why = ""
    if balance != "none" and not layers:
        why = f"{balance} with a {kind}, which has no experts; leave it out"
    elif balance == "bias" and any(layer.bias is None for layer in layers):
        why = f"bias moves the routers' {BIAS}, which a {kind} does not have; take aux"
    elif balance == "aux" and any(layer.bias is not None for layer in layers):
        why = (
            f"aux, whose loss is on softmax probabilities, with a {kind}, whose routers have "
            f"sigmoids and a {BIAS}; take bias"
        )
    elif balance == "aux" and any(layer.router is None for layer in layers):
        why = (
            "aux needs the routers' logits, and transformers does not say which modules of a "
            f"{kind} return them; take none"
        )
    if why:
        raise Refusal(f"model.moe.balance: {why}")


Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From a router, its logits [t, E] and chosen experts [t, K] int64 to their weights [t, K], float32
or wider, before the router's own cast."""


def softmax_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return softmax probabilities, normalised to a sum of 1 unless norm_topk_prob is False."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always are
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights


def chosen_softmax_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return softmax probabilities over the chosen experts."""
    return torch.softmax(logits.gather(1, chosen), dim=-1)


def sigmoid_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return sigmoids without the correction bias, normalised if norm_topk_prob, and scaled (arXiv
    2412.19437, equations 13 to 16)."""
    weights = torch.sigmoid(logits).gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


WEIGHTS: dict[str, Weigh] = {
    **dict.fromkeys(("flex_olmo", "mixtral", "olmoe"), softmax_weights),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"), softmax_weights),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), softmax_weights),
    "gpt_oss": chosen_softmax_weights,
    **dict.fromkeys(("deepseek_v3", "dots1", "exaone_moe", "glm4_moe"), sigmoid_weights),
    **dict.fromkeys(("glm4_moe_lite", "kimi_linear", "nemotron_h"), sigmoid_weights),
}
"""{model_type: how its routers weigh the experts that they chose}. These routers return logits,
weights and choice, in this order."""


class RouterReplay:
    """Has routers choose the recorded experts, in all forward passes over rows with routes.

    A forward pass that activation checkpointing repeats gets the same routes.

    Args:
        scorer: whose first argument, a ScoredRow, has the routes.
        routers: of its L layers with experts, first to last.
        model_type: the family.
        experts: of these layers, under expert parallelism; they get their Room in each pass.
    Raises: Refusal for a family whose routers are not known.
    """

    def __init__(
        self,
        scorer: nn.Module,
        routers: Sequence[nn.Module | None],
        *,
        model_type: str,
        experts: Sequence[nn.Module] = (),
    ):
        if model_type not in WEIGHTS or None in routers:
            raise Refusal(unknown_router(model_type))
        self._weigh = WEIGHTS[model_type]
        self._experts = experts
        self._routes: Tensor | None = None
        self._uses: Tensor  # of the row, see RowSlice
        self.seen: list[Tensor] | None = None
        """If it is a list, each layer appends [2] float64: how many tokens the router would have
        sent to other experts, and how many have a recorded route."""
        scorer.register_forward_pre_hook(self._begin)
        for layer, router in enumerate(routers):
            assert router is not None
            router.register_forward_hook(partial(self._choose, layer))

    def _begin(self, scorer: nn.Module, args: tuple[ScoredRow, Any]) -> None:
        # Kept after the forward pass: the backward pass may repeat blocks.
        own = args[0].own
        self._routes = own.routes
        self._uses = own.uses
        for layer, experts in enumerate(self._experts):
            experts.room = own.room[layer] if own.room else None

    def _choose(
        self, layer: int, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._routes is None:
            return None
        logits, weights, own = output
        recorded = self._routes[:, layer].long()  # of the tokens that this router sees
        assert recorded.shape == own.shape, (recorded.shape, own.shape)
        is_recorded = recorded[:, :1] >= 0
        chosen = torch.where(is_recorded, recorded, own)
        if self.seen is not None:
            # Sorted: the order of a token's experts does not matter.
            is_other = (recorded.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
            known = is_recorded[:, 0] * self._uses
            self.seen.append(torch.stack([(is_other * known).sum(), known.sum()]).double())
        return logits, self._weigh(router, logits, chosen).to(weights.dtype), chosen


def unknown_router(model_type: str) -> str:
    """Return why the routes of a family cannot be replayed."""
    return (
        f"model.moe.replay: true with a {model_type}, whose routers are not among those that "
        f"can be told what to choose ({', '.join(sorted(WEIGHTS))}); set it to false"
    )
