"""Sources of batches, behind one interface: sampled rollouts (RL) and dataset rows (SFT).

A source works ahead: `generate(until=k)` makes sure that this rank's share of the batches up
to step k exists, `take(k)` hands one over. Only inference ranks generate; nothing here waits
for another role.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.offline import SupervisedSource
from spmdrl.data.prompts import PromptSource
from spmdrl.engine.protocol import EngineProtocol
from spmdrl.policy.load import load_hf_config
from spmdrl.rewards.pool import RewardPool
from spmdrl.rollout.burst import Draw, Sample, burst
from spmdrl.types import Prompt, Rollouts, Scalars, Sums, add_sums
from spmdrl.world import World

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
    if cfg.algorithm.objective == "sft":
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
        """Sample the held-out prompts and return eval/ sums of this replica's share."""
        if not self.world.is_inference:
            return {}
        cfg, prompts = self.cfg, self._mine(self.prompts.eval())
        draw = self._draw(step, purpose="eval", samples=cfg.evaluate.samples,
                          temperature=cfg.evaluate.temperature)
        samples = burst(engine, prompts, draw=draw, tokenizer=self.tokenizer,
                        pool=self.pool)
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
        if cfg.rewards.on_failure == "fail":
            _raise_on_failure(samples, step)
        sums = _sums(samples, is_first=self.world.replica == 0)
        sums["time/generate"] = (time.perf_counter() - began, 1)
        return pack(samples, version=engine.version, sums=sums,
                    num_shown=4 if self.world.replica == 0 else 0)


class RowSource:
    """Supervised rows, cut to this rank's share; the first tp rank of each dp index supplies."""

    def __init__(self, cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase):
        self.world = world
        self.rows = SupervisedSource(cfg, tokenizer)
        self.check_context = self.rows.check_context

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Do nothing: rows are at hand."""

    def take(self, step: int) -> Rollouts:
        """Return this rank's rows of `step`."""
        world = self.world
        if not world.is_trainer or world.rank % world.cfg.layout.tp:
            return empty_rollouts()
        rows = list(enumerate(self.rows.rows_at(step)))
        return pack_rows(rows[world.dp_index(world.rank) :: world.dp_size], version=step)

    def probe_tokens(self) -> list[tuple[int, ...]]:
        """Return nothing: there is no engine to compare with."""
        return []

    def evaluate(self, engine: EngineProtocol, *, step: int) -> Sums:
        """Return nothing: there is no engine to sample with."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return None: rows are a function of the step."""
        return None

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Do nothing: rows are a function of the step."""

    def close(self) -> None:
        """Do nothing."""


# --------------------------------------------------------------------------- packing


def pack(samples: list[Sample], *, version: int, sums: Sums, num_shown: int) -> Rollouts:
    """Pack samples into flat tensors. A failed reward becomes is_valid = False, reward 0."""
    tokens, mask, logprobs, versions = [], [], [], []
    for s in samples:
        prompt, response = len(s.prompt.tokens), len(s.completion.tokens)
        tokens += [*s.prompt.tokens, *s.completion.tokens]
        mask += [False] * prompt + [True] * response
        logprobs += [0.0] * prompt + list(s.completion.logprobs)
        versions += [-1] * prompt + [version] * response
    lengths = [len(s.prompt.tokens) + len(s.completion.tokens) for s in samples]
    scalars = Scalars(
        lengths=_ints(lengths),
        response_lengths=_ints([len(s.completion.tokens) for s in samples]),
        group_ids=_ints([s.slot for s in samples]), sample_ids=_ints([s.sample for s in samples]),
        rewards=torch.tensor([s.reward.value or 0.0 for s in samples], dtype=torch.float64),
        is_truncated=torch.tensor([s.completion.is_truncated for s in samples], dtype=torch.bool),
        is_valid=torch.tensor([s.reward.value is not None for s in samples], dtype=torch.bool),
        min_versions=_ints([version] * len(samples)),
    )
    shown = tuple({"prompt": s.prompt.text, "response": s.text, "reward": s.reward.value}
                  for s in samples[:num_shown])
    return Rollouts(
        tokens=_ints(tokens), response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        policy_versions=_ints(versions), cu_seqlens=_cumulative(lengths), scalars=scalars,
        sums=sums, samples=shown,
    )


def pack_rows(rows: list[tuple[int, tuple[list[int], list[bool]]]], *, version: int) -> Rollouts:
    """Pack supervised (slot, (tokens, response_mask)) rows as rollouts with reward 0."""
    lengths = [len(tokens) for _, (tokens, _) in rows]
    mask = torch.tensor([m for _, (_, row) in rows for m in row], dtype=torch.bool)
    count = len(rows)
    return Rollouts(
        tokens=_ints([t for _, (row, _) in rows for t in row]), response_mask=mask,
        rollout_logprobs=torch.zeros(mask.numel()),
        policy_versions=torch.where(mask, version, -1), cu_seqlens=_cumulative(lengths),
        scalars=Scalars(
            lengths=_ints(lengths),
            response_lengths=_ints([sum(row) for _, (_, row) in rows]),
            group_ids=_ints([slot for slot, _ in rows]), sample_ids=_ints([0] * count),
            rewards=torch.zeros(count, dtype=torch.float64),
            is_truncated=torch.zeros(count, dtype=torch.bool),
            is_valid=torch.ones(count, dtype=torch.bool), min_versions=_ints([version] * count),
        ),
    )


def empty_rollouts() -> Rollouts:
    """Return the rollouts of a rank that made none."""
    return pack([], version=0, sums={}, num_shown=0)


def concat_rollouts(parts: list[Rollouts]) -> Rollouts:
    """Return all sequences of several Rollouts in one."""
    packed = {
        name: torch.cat([getattr(p, name) for p in parts])
        for name in ("tokens", "response_mask", "rollout_logprobs", "policy_versions")
    }
    scalars = Scalars(**{
        f.name: torch.cat([getattr(p.scalars, f.name) for p in parts])
        for f in dataclasses.fields(Scalars)
    })
    return Rollouts(**packed, cu_seqlens=_cumulative(scalars.lengths.tolist()), scalars=scalars,
                    sums=add_sums(*(p.sums for p in parts)),
                    samples=tuple(s for p in parts for s in p.samples))


def rollouts_from_dict(tree: dict[str, Any]) -> Rollouts:
    """Undo dataclasses.asdict."""
    return Rollouts(**{**tree, "scalars": Scalars(**tree["scalars"]),
                       "sums": {k: tuple(v) for k, v in tree["sums"].items()},
                       "samples": tuple(tree["samples"])})


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.cat([_ints([0]), _ints(lengths).cumsum(0)])


# --------------------------------------------------------------------------- rewards


def _raise_on_failure(samples: list[Sample], step: int) -> None:
    failed = [s for s in samples if s.reward.failure]
    if failed:
        s = failed[0]
        raise RuntimeError(
            f"step {step}: the reward of {len(failed)} of {len(samples)} samples failed. First: "
            f"data row {s.prompt.index}, sample {s.sample}: {s.reward.failure} after "
            f"{s.reward.seconds:.1f} s: {s.reward.message}\n  response: {s.text[:200]!r}\n"
            "Mend the reward function, or set rewards.on_failure=drop to leave such samples out"
        )


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
