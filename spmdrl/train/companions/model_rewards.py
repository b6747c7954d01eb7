"""Reward models: trained sequence classifiers whose scores are rewards, on the trainer ranks.

A model among `rewards.functions` reads the sampled tokens as they are, or, where its tokenizer is
another than the policy's, their text in its own tokens (reencoding.py); the value after the last
token of a sequence is its reward. S sequences, K reward functions.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.algorithms.shaping import shape
from spmdrl.config import Config
from spmdrl.config.data import Split
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.model.files.reader import CheckpointReader, check_files
from spmdrl.model.load import SCALAR_HEAD, hf_config_of, max_positions, model_folder
from spmdrl.model.parallel.layout import reshard
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model_inputs import MultimodalItems
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.train.companions.reencoding import (
    Reencoder,
    check_other_tokenizer,
    other_tokens,
    packed,
)
from spmdrl.train.microbatches import on_host
from spmdrl.types import Batch, Microbatch, Scalars, Sums, add_sums
from spmdrl.world.world import World

log = logging.getLogger(__name__)

TOO_LONG = -math.inf
"""Score of a sequence that is longer than its model reads."""


class RewardModels:
    """The models among rewards.functions, sharded like the policy; possibly none.

    Args:
        cfg, world: the config and the view of a trainer rank.
    Raises: Refusal naming the entry when a model cannot be used; see `check_reward_model`.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.world = world
        named = reward_models(cfg.rewards.functions) if cfg.objective.samples else {}
        self._models: dict[int, ShardedModel] = {}
        self._reencoders: dict[int, Reencoder] = {}  # of those with another tokenizer
        for position, path in named.items():
            with refusing(f"rewards.functions: model:{path} cannot be a reward", Refusal):
                check_reward_model(cfg, path, folder=model_folder(path))
                model = ShardedModel(cfg, world, path=path, is_trained=False, is_scalar=True)
                self._models[position] = model
                if difference := other_tokens(cfg, model_folder(path)):
                    self._reencode(position, model, path=path, difference=difference)

    def _reencode(self, position: int, model: ShardedModel, *, path: str, difference: str) -> None:
        limit = max_positions(model.hf_model.config)
        found = Reencoder(self.cfg, folder=model_folder(path), limit=limit)
        self._reencoders[position] = found
        if self.world.rank == 0:
            log.info(
                "reward model:%s has another tokenizer than the policy (%s): responses are "
                "decoded, and read by its own tokenizer and chat template",
                path,
                difference,
            )

    def add_to(self, batch: Batch, *, step: int) -> Batch:
        """Score every sequence and make the scores a part of the rewards; see `with_scores`.

        Args:
            batch: as exchanged. Trainer ranks meet, each with its micro-batches.
            step: for the names of waits and messages.
        Returns: the batch, the same rewards on every trainer rank; as it was without models.
        """
        if not self._models:
            return batch
        return with_scores(batch, self.scores(batch, step=step), cfg=self.cfg, step=step)

    def scores(self, batch: Batch, *, step: int, split: Split = "train") -> dict[int, Tensor]:
        """Return {position in rewards.functions: [S] float64, task units} of a batch's sequences,
        the same on every trainer rank; they meet.

        Args:
            split: which data the prompts are rows of.
        """
        if not self._models:
            return {}
        with self.world.watch.wait("reward model", step):
            own = [self._scores(position, batch, split=split) for position in self._models]
            found = self.world.sum_over_trainers(torch.stack(own))
        return dict(zip(self._models, found))

    @torch.no_grad()
    def _scores(self, position: int, batch: Batch, *, split: Split) -> Tensor:
        """Return [S] float64, task units, on the CPU: 0 for the sequences of other ranks."""
        model = self._models[position]
        scores = torch.zeros(len(batch.scalars) + 1, dtype=torch.float64)  # a dummy's row is -1
        for microbatch in batch.microbatches:
            own = self._ends(position, microbatch, scalars=batch.scalars, split=split)
            scores[microbatch.sequence_ids.cpu()] = own.double().cpu()
        reshard(model.scorer)
        return scores[:-1]

    def _ends(
        self, position: int, microbatch: Microbatch, *, scalars: Scalars, split: Split
    ) -> Tensor:
        """Return the value after the last token of each sequence: [s] float32; TOO_LONG where the
        model cannot read it."""
        model = self._models[position]
        host = on_host(microbatch)
        tokens = host.tokens
        lengths = host.cu_seqlens.diff().tolist()
        columns = {}
        if (items := MultimodalItems.of(host.extra_columns)) is not None:
            columns = {items.key: items}
        is_long = [False] * len(lengths)
        if (reencoder := self._reencoders.get(position)) is not None:
            sequences, is_long = reencoder.sequences(host, scalars, split=split)
            tokens, lengths = packed(sequences)
            assert not columns, "refused: another tokenizer's tokens have no images"
        # Not the policy's packing: the two may need different attention.
        none = torch.zeros_like(tokens, dtype=torch.bool)
        row = model.row(tokens, lengths, mask=none, columns=columns)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self.world.device)
        found = model.values(row).index_select(0, ends)
        return found.masked_fill(torch.tensor(is_long, device=found.device), TOO_LONG)


def with_scores(batch: Batch, scores: dict[int, Tensor], *, cfg: Config, step: int) -> Batch:
    """Add the scores of reward models to a batch; a pure function.

    A score takes its column of `reward_parts`, and weighted its part of `rewards`, which
    rewards.shaping then acts on. Metrics and the samples for the log get it too. Scores that are
    not finite end the run, or make the sample invalid, by rewards.on_failure.

    Args:
        batch: as exchanged, its rewards those of the other functions and not shaped.
        scores: {position in rewards.functions: [S] float64, task units}.
        step: for messages.
    Raises: Refusal naming the sample for a score that is not finite under on_failure=fail;
        RuntimeError when none is left; Refusal for samples made under other functions.
    """
    scalars = batch.scalars
    rewards = cfg.rewards
    num_parts = scalars.reward_parts.shape[1]
    num_functions = len(rewards.functions)
    if num_parts != num_functions:
        raise Refusal(
            f"step {step}: its samples were rewarded by {num_parts} functions before "
            f"the run was resumed, and rewards.functions now has {num_functions}; "
            "resume with the old ones, or start a run of its own"
        )
    names = part_names(rewards.functions)
    weights = rewards.weights or (1.0,) * num_functions
    is_finite = torch.stack(list(scores.values())).isfinite().all(dim=0)
    num_failed = int((scalars.is_valid & ~is_finite).sum())
    if num_failed and rewards.on_failure == "fail":
        raise Refusal(_failure_text(scalars, scores, cfg=cfg, step=step))
    is_valid = scalars.is_valid & is_finite
    count = int(is_valid.sum())
    if not count:
        raise RuntimeError(
            f"step {step}: no sample is left to train on: {num_failed} scores of "
            "reward models are not finite; check the models of rewards.functions"
        )
    sums: Sums = {}
    parts = scalars.reward_parts.clone()
    raw = scalars.rewards.clone()
    for position, score in scores.items():
        parts[:, position] = torch.where(score.isfinite(), score, 0.0)
        raw += weights[position] * parts[:, position]
        sums[f"reward/{names[position]}/mean"] = (parts[is_valid, position].sum().item(), count)
    total = raw
    if rewards.shaping.is_on:
        total = _shaped(raw, scalars, cfg=cfg)
        sums["reward/mean_raw"] = (raw[is_valid].sum().item(), count)
    if num_failed:
        sums |= {name: (num_failed, 0) for name in ("rollout/failed_rewards", "reward/errors")}
    scalars = replace(
        scalars, reward_parts=parts, is_valid=is_valid, rewards=torch.where(is_valid, total, 0.0)
    )
    shown = {names[i]: score for i, score in scores.items()}
    return replace(
        batch,
        scalars=scalars,
        sums=add_sums(batch.sums, sums),
        samples=_with_rewards(batch.samples, scalars, rewards=raw, parts=shown),
    )


def _shaped(raw: Tensor, scalars: Scalars, *, cfg: Config) -> Tensor:
    return shape(
        raw,
        scalars.response_lengths,
        scalars.is_truncated,
        max_response_tokens=cfg.sampling.max_response_tokens,
        **asdict(cfg.rewards.shaping),
    )


def _failure_text(scalars: Scalars, scores: dict[int, Tensor], *, cfg: Config, step: int) -> str:
    position, row = next(
        (i, int(bad.nonzero()[0]))
        for i, score in scores.items()
        if (bad := scalars.is_valid & ~score.isfinite()).any()
    )
    return (
        f"step {step}: the reward of group {int(scalars.group_ids[row])}, sample "
        f"{int(scalars.sample_ids[row])} ({int(scalars.lengths[row])} tokens) failed: "
        f"{cfg.rewards.functions[position]} of rewards.functions {_why(scores[position][row])}, "
        "or set rewards.on_failure=drop to leave such samples out"
    )


def _why(score: Tensor) -> str:
    if float(score) == TOO_LONG:
        return (
            "cannot read a sequence that is so long in its own tokens; lower "
            "sampling.max_response_tokens"
        )
    return f"gave {float(score)}. Check the model's weights and model.compute_dtype"


def _with_rewards(
    samples: tuple[dict, ...], scalars: Scalars, *, rewards: Tensor, parts: dict[str, Tensor]
) -> tuple[dict, ...]:
    """Give the samples for the log their whole unshaped reward and each model's score."""
    rows = {
        pair: row
        for row, pair in enumerate(zip(scalars.group_ids.tolist(), scalars.sample_ids.tolist()))
    }
    found = []
    for sample in samples:
        text = {k: v for k, v in sample.items() if k not in ("group", "sample")}
        row = rows[sample["group"], sample["sample"]]
        text["reward"] = float(rewards[row]) if scalars.is_valid[row] else None
        of_models = {name: float(part[row]) for name, part in parts.items()}
        text["reward_parts"] = text["reward_parts"] | of_models
        found.append(text)
    return tuple(found)


# --------------------------------------------------------------------------- what fits


def check_reward_model(
    cfg: Config, path: str, *, folder: Path | None, row: dict | None = None
) -> None:
    """Check what can be known of a reward model before its weights are read.

    Args:
        path: its folder or hub name.
        folder: where its files are; None where they are not here yet: then only its config.json
            is looked at.
        row: the first of data.train; None if it is not known.
    Raises: Refusal for a model without config.json or weights, one without a trained scalar
        head, or one that cannot read the policy's sequences: fewer tokens, shorter sequences,
        or another tokenizer (its tokenizer.json) that nothing can be put into.
    """
    hf = hf_config_of(cfg.model, path=path)
    policy = hf_config_of(cfg.model)
    is_other = folder is not None and bool(other_tokens(cfg, folder))
    if hf.get_text_config().vocab_size < policy.get_text_config().vocab_size and not is_other:
        raise Refusal(
            f"it embeds {hf.get_text_config().vocab_size} tokens, fewer than the policy's "
            f"{policy.get_text_config().vocab_size}; take one with the policy's tokenizer"
        )
    longest = cfg.longest_sequence
    limit = max_positions(hf)
    if limit is not None and limit < longest and not is_other:
        raise Refusal(
            f"it reads sequences of up to {limit} tokens, and "
            f"data.max_prompt_tokens + sampling.max_response_tokens is {longest}; lower those"
        )
    if folder is None:
        return
    check_files(folder)
    reader = CheckpointReader(folder)
    if SCALAR_HEAD not in reader.names():
        raise Refusal(
            f"its weights have no {SCALAR_HEAD}: it is no trained reward model, and a new head "
            "would score everything 0. Train one (objective reward_model) and export it"
        )
    if reader.shape(SCALAR_HEAD)[0] != 1:
        raise Refusal(
            f"its {SCALAR_HEAD} has shape {list(reader.shape(SCALAR_HEAD))}; a reward "
            "is one number, of a head with one row"
        )
    if is_other:
        check_other_tokenizer(cfg, folder, vocab_size=hf.get_text_config().vocab_size, row=row)
