"""Call reward functions that see all samples of a step at once.

A step has all its samples only when its last group is complete, so the engine is idle during the
call. A run with several replicas is refused, since each would have only a share of the step; see
`SampledSource`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from spmdrl.errors import RewardFailed
from spmdrl.rewards.samples import RewardSample
from spmdrl.rollout.episode import FinishedEpisode, Group, failure_text, place
from spmdrl.rollout.loop import Loop


def score_step(loop: Loop, groups: Sequence[Group], *, step: int) -> None:
    """Call the reward functions that see whole steps and add their values to the samples' rewards.

    The call leaves out samples whose reward failed before.

    Args:
        groups: complete groups of the step, or of an evaluation.
        step: number of the step; functions may take it as a parameter.
    Raises: RewardFailed naming a sample whose reward fails under on_failure=fail.
    """
    if "step" not in loop.pool.scopes:
        return
    scorable = {
        f"{group.key}-{s.sample}": (group, s)
        for group in groups
        for s in group.drawn_samples
        if not s.reward.failure
    }
    if not scorable:
        return
    began = time.perf_counter()
    state = loop.pool.state(step)
    texts = loop.texts([_last_turn(s) for _, s in scorable.values()])
    samples = {
        key: RewardSample(s.prompt.row, text, _last_turn(s), s.is_truncated, state, s.prompt.source)
        for (key, (_, s)), text in zip(scorable.items(), texts)
    }
    rewards = {key: s.reward for key, (_, s) in scorable.items()}
    for key, reward in loop.pool.score_step(samples, rewards, what=f"step {step}").items():
        group, sample = scorable[key]
        group.samples[sample.sample] = scored = replace(sample, reward=reward)
        if reward.failure:
            if group.draw.must_score:
                raise RewardFailed(
                    f"{place(group)}: {failure_text(scored)}\nFix the reward function, or set "
                    "rewards.on_failure=drop to leave such samples out"
                )
            loop.failed_rewards.add(scored, where=place(group))
    loop.idle.add("reward", time.perf_counter() - began)


def _last_turn(sample: FinishedEpisode) -> list[int]:
    """Return the ids of the policy's last turn."""
    trace = sample.traces[-1]
    own = trace.response_mask.nonzero()[:, 0]
    breaks = (own.diff() > 1).nonzero()[:, 0]
    last = own[int(breaks[-1]) + 1 :] if len(breaks) else own
    return trace.tokens[last].tolist()
