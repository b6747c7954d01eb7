"""Whether going through a batch more than once is right for what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spmdrl.config.fields import Config


def epoch_problems(cfg: Config, loss: Callable[..., Any] | None = None) -> Iterator[str]:
    """Yield what is wrong with batch.epochs, each as `field: what, value seen`.

    Args:
        cfg: whose methods exist and take their options.
        loss: that takes the place of the one that it names.
    """
    epochs = cfg.batch.epochs
    chosen = cfg.algorithm
    if epochs == 1 or not cfg.objective.has_advantages:
        return  # a divergence is right wherever the policy stands
    from spmdrl.algorithms import registry

    loss = loss or registry.get("loss", chosen.loss)
    if not depends_on_distance(loss, chosen.loss_options):
        name = getattr(loss, "__name__", chosen.loss)
        yield (
            f"batch.epochs: {epochs} with the loss {name}, which pulls alike however far the "
            "policy has moved since the batch was sampled: from the second time on its "
            "gradient would not be of the expected reward; take a loss with a ratio such as "
            "ppo_clip, or epochs 1"
        )


def depends_on_distance(loss: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return whether a policy loss's gradient changes as the policy leaves the one that sampled.

    Tried on three tokens: as probable as they were, e times as probable, and a part of it.
    """
    import torch

    from spmdrl.algorithms import registry

    gradients = []
    for nats in (0.0, -1.0, 1.0):
        inputs = registry.trial_inputs("loss")
        inputs |= {name: inputs[name] + nats for name in ("old_logprobs", "rollout_logprobs")}
        inputs |= registry.call_helper(loss, "statistics", inputs, options)
        terms, _ = registry.call(loss, inputs, options)
        of = [inputs[name] for name in ("logprobs", "entropy")]
        gradients.append(torch.autograd.grad(terms.sum(), of, allow_unused=True)[0])
    return len({tuple([] if g is None else g.tolist()) for g in gradients}) > 1
