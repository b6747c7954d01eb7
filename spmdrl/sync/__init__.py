"""Weights from the trainers' shards into the engines' storage: trace, plan, stream, prove."""
