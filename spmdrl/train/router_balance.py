"""Count the choices of a mixture's routers in training, and balance the load of its experts.

The model's own routers choose, unless the engine's choices are replayed (model/routers.py). Hooks
record the choices. A token counts once per layer, on the rank that computes it. A token of a shared
prefix counts once for each sequence, and padding does not count. No token is dropped, whatever the
load.

Shape letters: L layers with experts, E experts of each, t tokens of a row that this rank keeps
between layers, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmdrl.config import MoeSettings
from spmdrl.errors import Refusal
from spmdrl.model.parallel.expert_room import plan_room
from spmdrl.model.routers import RoutedLayer, RouterReplay, check_balance, routed_layers
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.microbatches import PreparedMicrobatch
from spmdrl.types import Sums


class Routers:
    """The routers of one trained model; of a dense one, nothing.

    Args:
        model: whose they are.
        name: first part of the metrics' names.
    Raises: Refusal when model.moe is for experts or routers that the model does not have.
    """

    def __init__(self, model: ShardedModel, *, name: str):
        hf_model = model.hf_model
        options = model.cfg.model.moe
        self._balance = options.balance
        self._coef = options.coef
        self._rate = options.rate
        self._world = model.world
        self._name = name
        self._layers = routed_layers(hf_model)
        if name == "policy" and options != MoeSettings() and not self._layers:
            raise Refusal(
                f"model.moe: balance {options.balance}, replay {options.replay} with a "
                f"{hf_model.config.model_type}, which has no experts; leave it out"
            )
        if self._layers:
            check_balance(hf_model, balance=self._balance)
        self._replay: RouterReplay | None = None
        # A value model's experts are not those that the engine chose from.
        if options.replay and name == "policy":
            has_room = model.cfg.layout.ep > 1
            self._replay = RouterReplay(
                model.scorer,
                [layer.router for layer in self._layers],
                model_type=hf_model.config.model_type,
                experts=[layer.experts for layer in self._layers] if has_room else (),
            )
            if has_room:
                model.give_room = self._give_room
        self._uses: Tensor  # [t] float64, of the forward pass that is watched; see RowSlice
        self._is_watching = False
        self._shares: Tensor | None = None  # [L, E] float64, under `aux`
        self._num_tokens = 1.0  # of the update, in the whole world
        self._replayed: Sequence[Tensor] = ()  # see RouterReplay.seen
        for layer in self._layers:
            layer.experts.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)
            if layer.router is not None:
                layer.router.register_forward_hook(partial(self._keep, layer))
        self._clear()

    def _clear(self) -> None:
        shape = (len(self._layers), max((x.experts.num_experts for x in self._layers), default=0))
        zeros = torch.zeros(*shape, dtype=torch.float64, device=self._world.device)
        self._counts = zeros
        # Sums over tokens and layers: of entropy, of the balancing loss, of tokens, of tokens with
        # other experts than the router's own choice, of tokens with recorded experts.
        self._sums = zeros.new_zeros(5)

    def _give_room(self, rows: Sequence[ScoredRow]) -> list[ScoredRow]:
        """Return rows with the room of their exchanges; see plan_room."""
        assert self._world.experts is not None
        found = plan_room(
            [row.own.routes for row in rows],
            [len(row.own.kept) for row in rows],
            num_layers=len(self._layers),
            num_experts=self._layers[0].experts.num_experts,
            group=self._world.experts["ep"].get_group(),
            device=self._world.device,
        )
        return [replace(row, own=replace(row.own, room=room)) for row, room in zip(rows, found)]

    # ---------------------------------------------------------------- recording

    @contextlib.contextmanager
    def watching(self, microbatch: PreparedMicrobatch) -> Iterator[None]:
        """Record what the routers choose while a forward pass over a micro-batch runs. Passes
        outside, such as those that activation checkpointing repeats, are not counted."""
        # A dummy micro-batch has one token, which nobody sampled.
        uses = microbatch.row.own.uses.double()
        self._uses = uses if microbatch.num_tokens else torch.zeros_like(uses)
        self._is_watching = True
        for layer in self._layers:
            layer.counts = []
            layer.logits = []
        seen: list[Tensor] = []
        if self._replay:
            self._replay.seen = seen
        yield
        self._is_watching = False
        if self._replay:
            self._replayed = seen
            self._replay.seen = None

    def _count(self, layer: RoutedLayer, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._is_watching:
            return
        index = args[1] if len(args) > 1 else kwargs["top_k_index"]  # [t, K]
        none = self._uses.new_zeros(module.num_experts)
        uses = self._uses[:, None].expand(index.shape).flatten()
        layer.counts.append(none.index_add(0, index.flatten(), uses))

    def _keep(self, layer: RoutedLayer, module: nn.Module, args: tuple, output: tuple) -> None:
        # Nothing is computed here: activation checkpointing must see the same operations when it
        # repeats the pass, which nobody watches.
        if self._is_watching:
            layer.logits.append(output[0])

    def _watched_counts(self) -> Tensor:
        return torch.stack([torch.stack(layer.counts).sum(0) for layer in self._layers])

    # ---------------------------------------------------------------- an update

    def prepare(
        self,
        microbatches: Sequence[PreparedMicrobatch],
        forward: Callable[[PreparedMicrobatch], object],
    ) -> None:
        """Begin an update.

        Under `balance: aux`, one more forward pass finds the share of the update's tokens that each
        expert gets. The balancing loss of every micro-batch needs these shares.

        Args:
            microbatches: this rank's.
            forward: runs the model over one.
        """
        self._clear()
        if self._balance != "aux":
            return
        with torch.no_grad():
            for microbatch in microbatches:
                with self.watching(microbatch):
                    forward(microbatch)
                self._counts += self._watched_counts()
                self._sums[2] += self._uses.sum()
        counts, sums = self._over_ranks()
        self._shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        self._num_tokens = max(1.0, float(sums[2]))
        self._clear()

    def take(self) -> Tensor | float:
        """Count the choices in a micro-batch, and return its share of the balancing loss.

        Returns: what to add to the loss, 0 without `balance: aux`. The shares of all micro-batches
            and ranks, [] float64 with graphs, add up to coef * sum over layers of E * sum over
            experts of f * P: f is an expert's share of the update's (token, choice) pairs, P its
            mean probability over the update's tokens.
        Source: arXiv 2101.03961, equations 4 to 6, with f over the global batch as in arXiv
            2501.11873; pairs instead of first choices, where a token has several experts.
        Invariant under: dp size, micro-batching, packing order.
        """
        if not self._layers:
            return 0.0
        self._counts += self._watched_counts()
        self._sums[2] += self._uses.sum() * len(self._layers)
        for pair in self._replayed:
            self._sums[3:] += pair
        loss = self._sums.new_zeros(())
        for index, layer in enumerate(self._layers):
            for logits in layer.logits:
                probs = layer.probs(logits)
                uses = self._uses[:, None]
                self._sums[0] += (torch.special.entr(probs.detach()) * uses).sum()
                if self._shares is not None:
                    loss = loss + ((probs * uses).sum(0) * self._shares[index]).sum()
            layer.counts = []
            layer.logits = []
        loss = loss * self._counts.shape[1]
        self._sums[1] += loss.detach()
        return 0.0 if self._shares is None else self._coef * loss / self._num_tokens

    @torch.no_grad()
    def finish(self, *, is_taken: bool) -> Sums:
        """End an update: add up over the trainer ranks, and return metrics.

        Under `balance: bias`, if the update is taken, the correction bias of an expert goes up by
        `rate` where its load is below the mean, and down where it is above.

        Source: arXiv 2408.15664, algorithm 1.
        """
        if not self._layers:
            return {}
        counts, sums = self._over_ranks()
        mean = counts.mean(dim=1, keepdim=True)
        if self._balance == "bias" and is_taken:
            for layer, error in zip(self._layers, mean - counts):
                layer.bias += self._rate * error.sign().to(layer.bias)
        entropy, loss, tokens, others, recorded = sums.tolist()
        loads = counts.amax(dim=1) / mean[:, 0].clamp(min=1)
        found = {
            "router_max_load": (float(loads.sum()), float(len(loads))),
            "router_idle_experts_frac": (float((counts == 0).sum()), float(counts.numel())),
        }
        if all(layer.router is not None for layer in self._layers):
            found["router_entropy"] = (entropy, tokens)
        if self._shares is not None:
            found["router_balance_loss"] = (loss, tokens)
        if self._replay:
            found["router_disagreement"] = (others, recorded)
            found["router_replayed_frac"] = (recorded, tokens)
        return {f"{self._name}/{name}": pair for name, pair in found.items()}

    def _over_ranks(self) -> tuple[Tensor, Tensor]:
        """Return counts and sums of all trainer ranks, which have different tokens."""
        packed = torch.cat([self._counts.flatten(), self._sums]).cpu()
        dist.all_reduce(packed, group=self._world.trainer_control)
        packed = packed.to(self._counts.device)
        split = self._counts.numel()
        return packed[:split].view_as(self._counts), packed[split:]
