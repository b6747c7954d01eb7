"""Sources of batches, behind one interface: rollouts sampled here, dataset rows in `rows`.

A source works ahead: `generate(until=k)` makes sure that this rank's share of the batches up
to step k exists, `take(k)` hands one over. Only inference ranks generate; nothing here waits
for another role.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from spmdrl.algorithms import registry
from spmdrl.config import Config
from spmdrl.data.prompts import PromptSource
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.policy.load import load_hf_config
from spmdrl.rewards.pool import RewardPool
from spmdrl.rewards.signatures import part_names
from spmdrl.rollout.burst import GREEDY, Draw, Sample, burst, failure_text, place
from spmdrl.rollout.packing import concat_rollouts, empty_rollouts, pack, rollouts_from_dict
from spmdrl.rollout.rows import RowSource
from spmdrl.types import Prompt, Rollouts, Sums
from spmdrl.world import World

log = logging.getLogger(__name__)

_PROBE_PROMPTS = 16


class Source(Protocol):
    """What the loop asks of a source."""

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Make this rank's share of all batches up to step `until`, with the engine's weights."""

    def take(self, step: int) -> Rollouts:
        """Hand over this rank's share of the batch of `step`."""

    def probe_tokens(self) -> list[tuple[int, ...]]:
        """Return a few sequences for engine and trainer to score; the same on every rank."""

    def evaluate(self, engine: EngineProtocol, *, step: int) -> Sums:
        """Return this rank's share of the eval/ sums for the engine's weights."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was made ahead and not yet taken; None where nothing is held."""

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Take up what all ranks had made ahead when a checkpoint of `step` was written."""

    def close(self) -> None:
        """End worker processes."""


def make_source(cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return the source that the config's objective asks for.

    Raises: ValueError when prompts and responses do not fit the model's context or vocabulary,
        or a reward function cannot be used.
    """
    hf = load_hf_config(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    if cfg.algorithm.objective != "rl":
        source = RowSource(cfg, world, tokenizer=tokenizer)
    else:
        source = RolloutSource(cfg, world, tokenizer=tokenizer)
    source.check_context(max_positions=hf.max_position_embeddings, vocab_size=hf.vocab_size)
    return source


class RolloutSource:
    """Prompts answered by this rank's engine replica and rewarded by its leader's workers."""

    def __init__(self, cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase):
        self.cfg, self.world, self.tokenizer = cfg, world, tokenizer
        self.prompts = PromptSource(cfg, tokenizer)
        self.is_leader = world.inference_tp_rank == 0
        self.pool = RewardPool(cfg) if self.is_leader else None
        if self.pool is not None:
            self.pool.start()  # an unusable reward function is refused now
        self.check_context = self.prompts.check_context
        advantage = registry.get("advantage", cfg.algorithm.advantage)
        self._has_greedy = "greedy_rewards" in registry.inputs_of(advantage)
        self._ahead: dict[int, Rollouts] = {}
        self._next = 0
        eos = tokenizer.eos_token_id
        self._stops = tuple(cfg.sampling.stop_token_ids) + ((eos,) if eos is not None else ())

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Sample this replica's prompts of every step up to `until` with the current weights.

        Raises: RuntimeError naming the sample when a reward fails under on_failure=fail.
        """
        while self._next <= min(until, self.cfg.steps - 1):
            if self.world.is_inference:
                with self.world.watch.phase("generate", self._next):
                    self._ahead[self._next] = self._sample(engine, self._next)
            self._next += 1

    def take(self, step: int) -> Rollouts:
        """Hand over this rank's rollouts of `step`; ranks that are no leader hold none."""
        return self._ahead.pop(step, None) or empty_rollouts()

    def probe_tokens(self) -> list[tuple[int, ...]]:
        """Return the first prompts of the data, those with more than one token."""
        prompts = self.prompts.at(0)[:_PROBE_PROMPTS]
        return [p.tokens for p in prompts if len(p.tokens) > 1]

    def evaluate(self, engine: EngineProtocol, *, step: int) -> Sums:
        """Sample the held-out prompts and return eval/ sums of this replica's share.

        Rewards are as the functions give them, without rewards.shaping. Raises as `generate`.
        """
        if not self.world.is_inference:
            return {}
        cfg, prompts = self.cfg, self._mine(self.prompts.eval())
        draw = self._draw(step, purpose="eval", samples=cfg.evaluate.samples,
                          temperature=cfg.evaluate.temperature)
        samples = burst(engine, prompts, draw=draw, tokenizer=self.tokenizer,
                        pool=self.pool)
        _warn_if_all_failed(samples, draw)
        valid = [s for s in samples if s.reward.value is not None]
        return {
            "eval/reward": (sum(s.reward.value for s in valid), len(valid)),
            "eval/response_length": (sum(len(s.completion.tokens) for s in samples),
                                     len(samples)),
            "eval/failed_frac": (len(samples) - len(valid), len(samples)),
        }

    def state_dict(self) -> dict[str, Any] | None:
        """Return the rollouts made ahead as plain dictionaries of tensors; leaders only."""
        if not self.is_leader:
            return None
        return {"ahead": {k: dataclasses.asdict(r) for k, r in self._ahead.items()}}

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Share the saved rollouts out over this job's leaders, whatever their number."""
        self._next = max([step, *(k + 1 for state in states for k in state["ahead"])])
        if not self.is_leader:
            return
        mine = states[self.world.replica :: self.world.num_replicas]
        for k in sorted({k for state in mine for k in state["ahead"]}):
            parts = [state["ahead"][k] for state in mine if k in state["ahead"]]
            self._ahead[k] = concat_rollouts([rollouts_from_dict(part) for part in parts])

    def close(self) -> None:
        """End the reward workers."""
        if self.pool is not None:
            self.pool.close()

    def _mine(self, prompts: list[Prompt]) -> list[tuple[int, Prompt]]:
        # Whole groups go to one replica, which prefills the prompt once.
        pairs = list(enumerate(prompts))
        return pairs[self.world.replica :: self.world.num_replicas]

    def _draw(self, step: int, *, purpose: str, samples: int, temperature: float) -> Draw:
        return Draw(
            seed=self.cfg.seed, step=step, purpose=purpose, samples=samples,
            max_tokens=self.cfg.sampling.max_response_tokens, temperature=temperature,
            is_seeded=self.cfg.engine.seed_per_request, stop_token_ids=self._stops,
            has_greedy=self._has_greedy and purpose == "train",
            must_score=self.cfg.rewards.on_failure == "fail",
        )

    def _sample(self, engine: EngineProtocol, step: int) -> Rollouts:
        cfg, began = self.cfg, time.perf_counter()
        # A burst starts from an empty prefix cache, so that its numbers are a function of
        # weights and step alone and a resumed run repeats them.
        engine.weights_changed(engine.version)
        draw = self._draw(step, purpose="train", samples=cfg.batch.group_size,
                          temperature=cfg.sampling.temperature)
        samples = burst(engine, self._mine(self.prompts.at(step)), draw=draw,
                        tokenizer=self.tokenizer, pool=self.pool)
        if not self.is_leader:
            return empty_rollouts()
        drawn = [s for s in samples if s.sample != GREEDY]
        _warn_if_all_failed(drawn, draw)
        is_first = self.world.replica == 0
        sums = _sums(drawn, is_first=is_first)
        if self._has_greedy:
            sums |= _greedy_sums([s for s in samples if s.sample == GREEDY], is_first=is_first)
        if cfg.rewards.shaping:
            sums["reward/mean_raw"] = _mean_reward(drawn)
        sums["time/generate"] = (time.perf_counter() - began, 1)
        return pack(samples, version=engine.version, sums=sums, num_shown=4 if is_first else 0,
                    part_names=part_names(cfg.rewards.functions), shaping=cfg.rewards.shaping,
                    max_response_tokens=cfg.sampling.max_response_tokens)


# --------------------------------------------------------------------------- rewards


def _warn_if_all_failed(samples: list[Sample], draw: Draw) -> None:
    if samples and all(s.reward.failure for s in samples):
        log.warning("%s: the reward of all %d samples of this replica failed and they are left out "
                    "(rewards.on_failure=drop). First: %s", place(draw), len(samples),
                    failure_text(samples[0]))


def _mean_reward(samples: list[Sample]) -> tuple[float, float]:
    values = [s.reward.value for s in samples if s.reward.value is not None]
    return sum(values), len(values)


def _greedy_sums(samples: list[Sample], *, is_first: bool) -> Sums:
    total, count = _mean_reward(samples)
    return {"rollout/greedy_reward": (total, count),
            "rollout/failed_greedy_rewards": (len(samples) - count, 1 if is_first else 0)}


def _sums(samples: list[Sample], *, is_first: bool) -> Sums:
    count, one = len(samples), 1 if is_first else 0  # counts add up over replicas: n / 1
    sums: Sums = {
        "rollout/response_length": (sum(len(s.completion.tokens) for s in samples), count),
        "rollout/prompt_length": (sum(len(s.prompt.tokens) for s in samples), count),
        "rollout/truncated_frac": (sum(s.completion.is_truncated for s in samples), count),
        "rollout/failed_rewards": (sum(s.reward.value is None for s in samples), one),
        "reward/timeouts": (sum(s.reward.failure == "timeout" for s in samples), one),
        "reward/errors": (
            sum(s.reward.failure in ("error", "bad_value") for s in samples), one),
        "reward/seconds": (sum(s.reward.seconds for s in samples), count),
    }
    for s in samples:
        for name, value in s.reward.parts.items():
            total, seen = sums.get(f"reward/{name}/mean", (0.0, 0))
            sums[f"reward/{name}/mean"] = (total + value, seen + 1)
    return sums
