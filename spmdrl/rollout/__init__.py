"""Where batches come from: sampled by the policy, recorded, or rows of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spmdrl.config import Config
    from spmdrl.rollout.source import Source
    from spmdrl.world.world import World


def make_source(cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return the source that the config's objective asks for.

    Raises: Refusal when prompts and responses do not fit the model's context or vocabulary,
        a reward function cannot be used, or recorded rollouts are not there.
    """
    from spmdrl.config.fields import replay_folder
    from spmdrl.data.prompts import check_context

    limits = model_limits(cfg)
    if replay_folder(cfg):
        from spmdrl.rollout.replay_source import ReplaySource

        return ReplaySource(cfg, world, **limits)
    check_context(cfg, tokenizer, **limits)
    if cfg.objective.samples:
        from spmdrl.rollout.sampled_source import SampledSource

        return SampledSource(cfg, world, tokenizer=tokenizer)
    from spmdrl.rollout.row_source import RowSource

    return RowSource(cfg, world, tokenizer=tokenizer, max_positions=limits["max_positions"])


def model_limits(cfg: Config) -> dict[str, Any]:
    """Return the most positions and the vocabulary of the policy, by the names of `check_context`.

    Raises: Refusal when its config.json cannot be read.
    """
    from spmdrl.model.load import hf_config_of, max_positions

    hf = hf_config_of(cfg.model)
    return {"max_positions": max_positions(hf), "vocab_size": hf.get_text_config().vocab_size}
