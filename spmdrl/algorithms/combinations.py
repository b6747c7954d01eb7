"""Published methods that are a combination of settings here, not a function of their own."""

from __future__ import annotations

_CLIP_HIGHER = (
    "--algorithm.loss ppo_clip --algorithm.loss-options '{clip_low: 0.2, clip_high: 0.28}'"
)
_PPO = "--algorithm.loss ppo_clip"

COMBINATIONS = {
    "dapo": (
        f"{_CLIP_HIGHER} --algorithm.advantage grpo --algorithm.aggregation token_mean "
        "--rollout.schedule.dynamic 10 --rewards.shaping.overlong-tokens 512",
        "clip higher, mean over tokens, dynamic sampling, overlong shaping",
    ),
    "grpo": (
        f"{_PPO} --algorithm.advantage grpo --algorithm.aggregation seq_mean_token_mean "
        "--algorithm.kl-coef 0.04",
        "as in the paper; each part can be left out",
    ),
    "dr_grpo": (
        f"{_PPO} --algorithm.advantage dr_grpo --algorithm.aggregation seq_mean_token_sum_norm",
        "no division by the spread, nor by the response's length",
    ),
    "bnpo": (
        f"{_PPO} --algorithm.advantage grpo --algorithm.aggregation token_mean",
        "as in TRL: a mean over tokens, here over those of the whole step",
    ),
    "ppo": (
        f"{_PPO} --algorithm.advantage gae --batch.group-size 1",
        "with a value model, see the section critic",
    ),
    "vapo": (
        f"{_CLIP_HIGHER} --algorithm.advantage gae "
        "--algorithm.advantage-options '{value_lam: 1.0, length_alpha: 0.05}' "
        "--algorithm.aggregation token_mean --critic.warmup-steps 50",
        "clip higher, length-adaptive GAE, a value model that trains first",
    ),
    "rloo": (
        "--algorithm.loss reinforce --algorithm.advantage rloo",
        "the plain gradient with the other samples' mean as its baseline",
    ),
    "reinforce_plus_plus": (
        f"{_PPO} --algorithm.advantage reinforce_plus_plus --algorithm.kl-in reward "
        "--algorithm.kl-coef 0.01",
        "the KL is part of the rewards",
    ),
    "gspo": (
        "--algorithm.loss gspo --algorithm.advantage grpo "
        "--algorithm.aggregation seq_mean_token_mean",
        "the sequence's ratio, with GRPO's advantage",
    ),
    "online_dpo": (
        "--algorithm.objective online_preference --algorithm.loss dpo --batch.group-size 4",
        "the best and the worst of each group",
    ),
    "ipo": (
        "--algorithm.objective preference --layout.placement offline --algorithm.loss dpo "
        "--algorithm.loss-options '{variant: ipo}'",
        "a variant of dpo",
    ),
}
"""{name: (flags, description)}."""

_OTHER_SPELLINGS = {
    "grpo_dr": "dr_grpo",
    "drgrpo": "dr_grpo",
    "dr.grpo": "dr_grpo",
    "reinforce++": "reinforce_plus_plus",
    "reinforce_pp": "reinforce_plus_plus",
    "ppo_gae": "ppo",
    "onlinedpo": "online_dpo",
}


def combination(name: str) -> str:
    """Return a sentence on the combination of this name, for a message; empty if there is none."""
    key = name.lower().replace("-", "_").replace(" ", "_")
    key = _OTHER_SPELLINGS.get(key, key)
    if key not in COMBINATIONS:
        return ""
    flags, description = COMBINATIONS[key]
    return f"{name} is a combination of settings here: {flags} ({description})"
