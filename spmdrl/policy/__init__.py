"""The policy: a transformers model, sharded from outside, trained on packed micro-batches."""

from spmdrl.policy.policy import Policy

__all__ = ["Policy"]
