"""Which models a run needs beside its policy, and in which form."""

from __future__ import annotations

from collections.abc import Collection

from spmdrl.config import Config
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.companions.companion import Companion
from spmdrl.train.companions.process_reward_model import ProcessRewardModel
from spmdrl.train.companions.reference import Cached, Frozen, Synced, WithoutAdapters
from spmdrl.train.companions.teachers import Teachers
from spmdrl.train.companions.value_model import ValueModel
from spmdrl.world.world import World


def make_companions(
    cfg: Config, world: World, *, policy: ShardedModel, columns: Collection[str]
) -> dict[str, Companion]:
    """Return the models that compute the wanted columns, by name, on a trainer rank.

    Raises: Refusal when one cannot be loaded or laid out, or cannot read the policy's rows.
    """
    found: dict[str, Companion] = {}
    is_taught = cfg.objective.needs_teacher or "teacher_logprobs" in columns
    gives_logprobs = "ref_logprobs" in columns
    if gives_logprobs or (is_taught and "reference" in cfg.teachers):
        column = "ref_logprobs" if gives_logprobs else ""
        found["reference"] = make_reference(cfg, world, policy=policy, column=column)
    if is_taught:
        found["teacher"] = Teachers(
            cfg,
            world,
            policy=policy,
            reference=found.get("reference"),
            gives_logprobs="teacher_logprobs" in columns,
        )
    if "values" in columns:
        found["critic"] = ValueModel(cfg, world, policy=policy)
    if "prm_logprobs" in columns:
        found["prm"] = ProcessRewardModel(cfg, world, policy=policy)
    return found


def make_reference(
    cfg: Config, world: World, *, policy: ShardedModel, column: str = "ref_logprobs"
) -> Companion:
    """Return the reference in the form that model.reference asks for.

    Args:
        column: name of its logprobs; empty where only a teacher is wanted.
    Raises: Refusal when it cannot be loaded or laid out, or its rows cannot be read.
    """
    chosen = cfg.model.reference
    path = chosen.path or cfg.model.path
    if chosen.cache:
        return Cached(cfg, world, path=path)
    if policy.adapters and not chosen.path:
        return WithoutAdapters(policy, column=column)
    if chosen.sync_every:
        return Synced(
            cfg,
            world,
            path=path,
            column=column,
            policy=policy,
            every=chosen.sync_every,
            mix=chosen.sync_mix,
        )
    return Frozen(cfg, world, path=path, column=column)
