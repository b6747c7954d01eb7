"""Rollout Routing Replay: the trainer's tokens go to the experts that the engine chose for them.

Engine and trainer round differently, and near a tie their routers choose other experts, which moves
a logprob far more than rounding does. Here a hook on each router puts the recorded experts in the
place of its own choice; their weights come from the trainer's own logits, with gradients, as the
model makes them of the experts it chooses itself. Tokens without a record are routed as ever.

Source: arXiv 2510.11370, section 4 (its equations 6 and 7), for the tokens of prompt and response.

Shape letters: t tokens of this rank's slice of a row, L layers with experts, E experts of each, K
experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.errors import Refusal
from spmdrl.model.scorer import ScoredRow

Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From a router, its logits [t, E] and chosen experts [t, K] int64 to their weights [t, K], float32
or wider, before the router's own cast."""


def softmax_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return softmax probabilities, made to add up to 1 unless norm_topk_prob is False."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always are
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights


def chosen_softmax_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return softmax probabilities among the chosen ones alone."""
    return torch.softmax(logits.gather(1, chosen), dim=-1)


def sigmoid_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return sigmoids without the correction bias, made to add up to 1 if norm_topk_prob, and
    scaled (arXiv 2412.19437, equations 13 to 16)."""
    weights = torch.sigmoid(logits).gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


WEIGHTS: dict[str, Weigh] = {
    **dict.fromkeys(("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), softmax_weights),
    "gpt_oss": chosen_softmax_weights,
    **dict.fromkeys(
        ("deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"), sigmoid_weights
    ),
}
"""How the routers of a family weigh the experts that they have chosen, by model_type. They return
logits, weights and choice, in this order."""


class RouterReplay:
    """Routers that choose what was recorded, in every forward pass of a scorer over rows with
    routes; a pass that activation checkpointing repeats gets the routes of the first one.

    Args:
        scorer: whose first argument, a ScoredRow, has the routes.
        routers: of its L layers with experts, first to last.
        model_type: the family.
    Raises: Refusal for a family whose routers are not known.
    """

    def __init__(self, scorer: nn.Module, routers: Sequence[nn.Module | None], *, model_type: str):
        if model_type not in WEIGHTS or None in routers:
            raise Refusal(unknown_router(model_type))
        self._weigh = WEIGHTS[model_type]
        self._routes: Tensor | None = None
        self.seen: list[Tensor] | None = None
        """While it is a list, each layer adds [2] float64: tokens of which the router would have
        chosen other experts, and tokens with a recorded route."""
        scorer.register_forward_pre_hook(self._begin)
        for layer, router in enumerate(routers):
            assert router is not None
            router.register_forward_hook(partial(self._choose, layer))

    def _begin(self, scorer: nn.Module, args: tuple[ScoredRow, Any]) -> None:
        # It stays when the pass is over: the backward pass may repeat blocks.
        self._routes = args[0].own.routes

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
            is_other = (recorded.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
            known = is_recorded[:, 0]
            self.seen.append(torch.stack([(is_other & known).sum(), known.sum()]).double())
        return logits, self._weigh(router, logits, chosen).to(weights.dtype), chosen


def unknown_router(model_type: str) -> str:
    """Return why the routes of a family cannot be replayed."""
    return (
        f"model.moe.replay: true with a {model_type}, whose routers are not among those that "
        f"can be told what to choose ({', '.join(sorted(WEIGHTS))}); set it to false"
    )
