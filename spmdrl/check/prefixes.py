"""Which models of a run can compute once the prefixes that sequences share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.model.attention.packing_support import packing_support
from spmdrl.model.load import build_meta_model
from spmdrl.model.sharded_model import unshared
from spmdrl.rewards.signatures import reward_models
from spmdrl.train.objectives.objective_loss import follows_teacher, needed_columns


@dataclass(frozen=True)
class PrefixSharing:
    """Which models of a run can share prefixes. All do, or none does."""

    able: tuple[str, ...]
    """`field path` of each model that can."""
    unable: dict[str, str]
    """{`field path`: the layer that keeps it from sharing, or another reason}."""

    @property
    def reason(self) -> str:
        """Return why no model shares; empty if all can."""
        return "; ".join(f"{model}: {why}" for model, why in self.unable.items())


def models_of(cfg: Config) -> dict[str, tuple[str, bool]]:
    """Return {field: (folder or hub name, whether its head is a scalar)} of the trainers' models.

    A model that a field does not name is the policy's own.

    Raises: Refusal for an unknown method.
    """
    columns = needed_columns(cfg)
    chosen = cfg.model
    found = {"model.path": (chosen.path, cfg.objective.is_scalar)}
    follows_reference = follows_teacher(cfg) and "reference" in cfg.teachers
    if chosen.reference.path and ("ref_logprobs" in columns or follows_reference):
        found["model.reference.path"] = (chosen.reference.path, False)
    if follows_teacher(cfg):
        found |= {field: (path, False) for field, path in cfg.teacher_paths.items()}
    if not columns.isdisjoint({"values", "prm_logprobs"}):
        found["critic.path"] = (cfg.critic.path or chosen.path, "values" in columns)
    scorers = reward_models(cfg.rewards.functions) if cfg.objective.samples else {}
    return found | {f"rewards.functions[{at}]": (path, True) for at, path in scorers.items()}


def sharing_of(cfg: Config, policy: nn.Module) -> PrefixSharing:
    """Return which models of a run can share prefixes.

    Args:
        policy: as transformers builds it; may be on meta.
    Raises: Refusal for an unknown method.
    """
    able = []
    unable = {}
    for field, (path, is_scalar) in models_of(cfg).items():
        if field == "model.path":
            why = _why_not(policy)
        else:
            try:
                why = _why_not(build_meta_model(replace(cfg.model, path=path), is_scalar=is_scalar))
            except Refusal:  # named as a problem of its own
                why = "not known, because it cannot be built here"
        if why:
            unable[f"{field} {path}"] = why
        else:
            able.append(f"{field} {path}")
    return PrefixSharing(tuple(able), unable)


def _why_not(hf_model: nn.Module) -> str:
    return unshared(hf_model, packing_support(hf_model))
