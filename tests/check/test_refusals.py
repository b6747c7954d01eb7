"""What the checks of a config refuse before anything starts: one change each, and what is said."""

from __future__ import annotations

import math
from functools import reduce

import pytest

from spmdrl.check.rules import rule_problems
from spmdrl.check.settings import validate
from tests.helpers.built import changed, good

KL = dict(kl="k1", kl_coef=0.1)
IN_REWARD = KL | dict(kl_in="reward")
NGRAM = dict(method="ngram", num_speculative_tokens=4)
OFFLINE = dict(layout=dict(placement="offline"))
BESIDE = {  # what else is changed
    "": {},
    "kl": dict(algorithm=dict(kl_coef=0.1)),
    "adaptive kl": dict(algorithm=dict(kl_coef=0.1, kl_control=dict(target=0.02, horizon=10000))),
    "entropy": dict(algorithm=dict(entropy_coef=0.1)),
    "much entropy": dict(algorithm=dict(entropy_coef=0.5)),
    "gdpo": dict(algorithm=dict(advantage="gdpo")),
    "remax": dict(algorithm=dict(advantage="remax")),
    "evaluation": dict(data=dict(eval="task:addition"), evaluate=dict(every_steps=2)),
    "colocated": dict(layout=dict(placement="colocated")),
    "offline": OFFLINE,
    "offline in runs/a": dict(output_dir="runs/a", **OFFLINE),
    "no lag": dict(lag=0),
    "cpu": dict(layout=dict(device="cpu")),
    "gpu": dict(layout=dict(device="cuda")),
    "experts": dict(engine=dict(options=dict(enable_expert_parallel=True))),
    "drafts": dict(layout=dict(device="cpu"), engine=dict(options=dict(speculative_config=NGRAM))),
    "reward model": dict(rewards=dict(functions=("model:m",))),
    "short": dict(sampling=dict(max_response_tokens=16)),
    "online pairs": dict(algorithm=dict(objective="online_preference", loss="dpo")),
    "teacher": dict(model=dict(teacher="t")),
    "transformers": dict(engine=dict(kind="transformers")),
}
for objective, loss in dict(sft="sft", distill="divergence", preference="dpo").items():
    own = dict(algorithm=dict(objective=objective, loss=loss), model=dict(teacher="t"))
    BESIDE[objective] = own | OFFLINE

# By section or field, and what else is changed: its values.
ACCEPTED = {
    ("layout", ""): [{}, dict(world_size=4, trainer_ranks=2, inference_tp=2, tp=2)],
    ("layout", "experts"): [dict(world_size=4, trainer_ranks=2, inference_dp=2, ep=2)],
    ("algorithm", ""): [
        dict(loss="dppo_tv", correction="none"),
        dict(loss="gspo", aggregation="seq_mean_token_mean"),
        IN_REWARD,
        dict(advantage="otb", **IN_REWARD),
    ],
    ("algorithm.entropy_control", ""): [dict(keep_frac=0.2, target=0.3, delta=0.005)],
    ("algorithm.entropy_control", "entropy"): [dict(target=1, delta=0.1, lower=0.05, upper=0.2)],
    ("algorithm.kl_control", "kl"): [dict(target=0.02, horizon=10000)],
    ("algorithm.kl_schedule", "kl"): [dict(end=0.0, steps=100), dict(end=0.2, steps=1)],
    ("algorithm.entropy_schedule", ""): [dict(end=0.1, steps=5)],
    ("optimizer", ""): [dict(beta1=0.8, beta2=0.0, eps=1e-8, warmup_steps=10, min_lr_frac=0.0)],
    ("model.memory", ""): [dict(activation_checkpointing="full", head_chunk_tokens=100)],
    ("model.moe", ""): [dict(replay=True), dict(replay=False)],
    ("engine.options", ""): [dict(enforce_eager=True, enable_prefix_caching=False)],
    ("engine.options", "cpu"): [
        dict(speculative_config=NGRAM),
        dict(speculative_config=NGRAM | dict(prompt_lookup_min=2, prompt_lookup_max=2)),
    ],
    ("rewards.functions", ""): [("task:addition", "model:x"), ("model:x", "model:y")],
    ("rewards.functions", "evaluation"): [("task:addition", "model:x"), ("model:x",)],
    ("rewards.functions", "remax"): [("r:f",)],
    ("rewards.shaping", ""): [dict(scale=2.0)],
    ("evaluate", ""): [dict(temperature=0), dict(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1)],
}

# And what is said.
REFUSED = {
    ("layout", ""): [
        (dict(world_size=2, trainer_ranks=2), "leaves 0 ranks to generate"),
        (
            dict(world_size=4, trainer_ranks=3, tp=2),
            "3 trainer ranks do not divide by dp_replicate 1 * cp 1 * tp 2 = 2",
        ),
        (
            dict(world_size=5, trainer_ranks=2, inference_tp=2),
            "3 inference ranks / inference_tp 2 = 1.5 replicas",
        ),
        (
            dict(world_size=5, trainer_ranks=3, inference_tp=2),
            "must be a multiple of inference_tp 2",
        ),
        (
            dict(world_size=4, trainer_ranks=2, inference_dp=2),
            "layout.inference_dp: 2 with engine.options.enable_expert_parallel",
        ),
        (dict(placement="offline"), "else split or colocated"),
        (dict(placement="offline"), "layout.placement: offline with algorithm.objective rl"),
    ],
    ("batch", ""): [
        (dict(group_size=1), "every advantage would be 0"),
        (dict(tokens_per_microbatch=64), "one sequence may not fit"),
        (dict(updates_per_step=0), "batch.updates_per_step: must be at least 1, got 0"),
    ],
    ("evaluate", ""): [
        (dict(every_steps=2), "every_steps: 2 with data.eval empty"),
        (dict(temperature=0, top_p=0.9), "evaluate.top_p: 0.9 with evaluate.temperature 0; it"),
        (dict(temperature=0, top_k=4), "evaluate.top_k: 4 with evaluate.temperature 0"),
        (dict(temperature=0, min_p=0.1), "evaluate.min_p: 0.1 with evaluate.temperature 0"),
    ],
    ("data", ""): [
        (dict(size=0), "has no size of its own"),
        (dict(train="x.jsonl", size=0), "name at least one reward function"),
        (dict(columns={"prompt": "q"}), "is generated, with names of its own"),
    ],
    ("algorithm", ""): [
        (dict(loss="dppo_tv"), "the engine would be corrected for twice"),
        (KL, "expected gradient of 0"),
        (dict(loss="gspo"), "take seq_mean_token_mean"),
        (dict(advantage="gigpo"), "name an environment"),
        (dict(advantage="distill"), "model.teacher: is empty"),
        (dict(advantage="prime", **IN_REWARD), "has no place for a KL in the reward"),
        (dict(advantage="grop"), "did you mean grpo"),
        (dict(loss_options={"clip_lo": 0.1}), "clip_low"),
        (dict(advantage="gdpo", kl_coef=0.1, kl_in="reward"), "algorithm.kl_in: "),
    ],
    ("algorithm", "teacher"): [
        (dict(advantage="distill", **IN_REWARD), "has no place for a KL in the reward")
    ],
    ("algorithm", "offline"): [
        (dict(objective="distill", loss="divergence"), "model.teacher: is empty"),
        (dict(objective="preference", loss="ppo_clip"), "which is a method of the kind loss"),
    ],
    ("algorithm.entropy_control", ""): [
        (dict(keep_frac=1.5), "algorithm.entropy_control.keep_frac: must be at most 1, got 1.5"),
        (dict(target=0.3), "delta: is missing"),
        (dict(delta=0.3), "target: is missing"),
        (dict(upper=0.3), "upper: 0.3 without target and delta"),
    ],
    ("algorithm.entropy_control", "much entropy"): [
        (
            dict(target=0.3, delta=0.1, lower=0.5, upper=0.2),
            "must be 0 <= lower <= upper, got 0.5, 0.2",
        ),
        (
            dict(target=0.3, delta=0.1, upper=0.2),
            "entropy_coef starts at 0.5, outside lower, upper [0.0, 0.2]",
        ),
    ],
    ("algorithm.kl_control", "kl"): [
        (dict(target=0.02), "horizon: is missing"),
        (dict(horizon=9.0), "target: is missing"),
        (dict(target=-1.0, horizon=1e4), "target: must be at least 0"),
        (dict(target=0.02, horizon=10), "horizon: 10 is too short for 512 samples a step"),
    ],
    ("algorithm.kl_schedule", "kl"): [
        (dict(end=0.1), "steps: is missing"),
        (dict(end=-0.1, steps=5), "end: must be at least 0, got -0.1"),
    ],
    ("algorithm.kl_schedule", "adaptive kl"): [
        (dict(steps=5), "with algorithm.kl_control; both move algorithm.kl_coef")
    ],
    ("algorithm.kl_schedule", ""): [
        (dict(steps=5), "steps: 5 with algorithm.kl_coef 0.0; the schedule begins")
    ],
    ("algorithm.kl_schedule", "sft"): [
        (dict(steps=5), "steps: 5 with algorithm.objective sft; it acts")
    ],
    ("algorithm.kl_control", ""): [
        (dict(target=0.02, horizon=1e4), "target: 0.02 with algorithm.kl_coef 0.0; ")
    ],
    ("optimizer", ""): [
        (dict(eps=0.0), "optimizer.eps: must be above 0, got 0"),
        (dict(beta2=1.0), "optimizer.beta2: must be below 1, got 1.0"),
        (dict(warmup_steps=-1), "optimizer.warmup_steps: must be at least 0, got -1"),
        (dict(min_lr_frac=2), "optimizer.min_lr_frac: must be at most 1, got 2"),
    ],
    ("model.memory", ""): [
        (dict(head_chunk_tokens=-1), "got -1"),
        (dict(prefetch=-1), "model.memory.prefetch: must be at least 0, got -1"),
    ],
    ("model.moe", "sft"): [(dict(replay=True), "replay: true with algorithm.objective sft")],
    ("algorithm", "online pairs"): [
        (dict(advantage="rloo"), "algorithm.advantage: rloo with algorithm.objective online_"),
        (dict(correction="none"), "algorithm.correction: none with algorithm.objective online_"),
        (
            dict(correction_options={"upper": 3.0}),
            "algorithm.correction_options: {upper: 3.0} with",
        ),
    ],
    ("engine.options", ""): [
        (
            dict(enforce_eagr=True),
            "enforce_eagr: the vLLM that is installed has no such engine argument; "
            "did you mean enforce_eager?",
        ),
        (dict(max_num_seqs=4), "max_num_seqs: is set by engine.max_num_seqs"),
        (dict(spec_tokens=4), "spec_tokens: is set by engine.options.speculative_config"),
        (
            dict(speculative_config=dict(method="suffix")),
            "speculative_config: {method: suffix}, and the method ngram alone is proved",
        ),
        (dict(speculative_config="ngram"), "speculative_config: ngram, and the method ngram alone"),
        (
            dict(speculative_config=dict(method="ngram")),
            "num_speculative_tokens must be a whole number from 1 to 128, got None",
        ),
        (
            dict(speculative_config=NGRAM | dict(rejection_sample_method="synthetic")),
            "rejection_sample_method is not proved; it takes method, num_speculative_tokens,",
        ),
        (
            dict(speculative_config=NGRAM | dict(prompt_lookup_min=5, prompt_lookup_max=2)),
            "prompt_lookup_min 5 is above prompt_lookup_max",
        ),
        (dict(load_format="dummy"), "load_format: cannot be changed"),
        (dict(data_parallel_size=2), "data_parallel_size: is set by layout.inference_dp"),
        (dict(data_parallel_rank=1), "data_parallel_rank: cannot be changed"),
        (dict(enable_expert_parallel=True), "an engine of one rank holds all experts"),
        (
            dict(hf_overrides={"rope_scaling": None}),
            "hf_overrides: may change what the engine computes, and was never compared",
        ),
    ],
    ("engine.options", "gpu"): [
        (dict(speculative_config=NGRAM), "with layout.device cuda; the log-probabilities of draft")
    ],
    ("sampling", "drafts"): [
        (dict(min_p=0.1), "speculative_config: {method: ngram, num_speculative_tokens: 4} with "),
        (dict(logit_bias={"7": 1.0}), "vLLM does not apply it to draft tokens"),
    ],
    ("engine.options", "transformers"): [
        (dict(enforce_eager=True), "enforce_eager: is an argument of vLLM's engine")
    ],
    ("layout", "experts"): [
        (
            dict(world_size=10, trainer_ranks=2, inference_tp=2, inference_dp=2),
            "must be a multiple of inference_tp 2 * inference_dp 2",
        ),
        (
            dict(world_size=7, trainer_ranks=4, inference_dp=2),
            "3 inference ranks / inference_tp 1 * inference_dp 2 = 1.5 replicas",
        ),
    ],
    ("layout", "transformers"): [
        (
            dict(world_size=4, trainer_ranks=2, inference_tp=2),
            "layout.inference_tp: 2 with engine.kind transformers, whose engine holds "
            "the whole model on one rank",
        ),
        (
            dict(world_size=4, trainer_ranks=2, inference_dp=2),
            "layout.inference_dp: 2 with engine.kind transformers, whose engine holds "
            "the whole model on one rank",
        ),
    ],
    ("rollout.schedule", ""): [
        (dict(over_sample=0.5), "over_sample: must be at least 1, got 0.5"),
        (dict(over_sample=math.inf), "over_sample: must be at most 1000, got inf"),
        (dict(dynamic=1), "dynamic: must be at least 2, or 0 for off, got 1"),
        (
            dict(curriculum=0.5, dynamic=2),
            "curriculum: 0.5 with rollout.schedule.dynamic 2; dynamic",
        ),
    ],
    ("rollout.schedule", "colocated"): [
        (dict(in_flight=True), "in_flight: true with layout.placement colocated")
    ],
    ("rollout.schedule", "no lag"): [
        (dict(over_sample=2.5, max_staleness=1), "max_staleness: 1 is below lag 0 + ceil(")
    ],
    ("rollout.schedule", "reward model"): [
        (dict(curriculum=0.5), "curriculum: 0.5 with rewards.functions ['model:")
    ],
    ("rollout.record", ""): [
        (dict(every=-1), "every: must be at least 0, got -1"),
        (dict(replay="elsewhere"), "layout.placement: split with algorithm.objective rl"),
    ],
    ("rollout.record", "offline"): [
        (dict(replay="elsewhere", every=1), "every: 1 with rollout.record.replay elsewhere")
    ],
    ("rollout.record", "offline in runs/a"): [
        (dict(replay="runs/a"), "replay: runs/a is this run's own output_dir"),
        (dict(replay="runs/a/rollouts"), "replay: runs/a/rollouts is this run's own output_dir"),
    ],
    ("rollout.record", "sft"): [(dict(every=1), "every: 1 with algorithm.objective sft")],
    ("report.console", ""): [(dict(table_every=0), "table_every: must be at least 1, got 0")],
    ("rewards.functions", ""): [
        (("model:",), "`model:` names no folder"),
        (("reasoning_gym:chain_sum",), "grades its own problems"),
    ],
    ("rewards.functions", "remax"): [(("model:x",), "needs the reward of greedy ones")],
    ("rewards.shaping", "short"): [
        (
            dict(overlong_tokens=17),
            "overlong_tokens: must be at most sampling.max_response_tokens = 16, got 17",
        )
    ],
    ("rewards.shaping", ""): [
        (dict(overlong_tokens=-1), "overlong_tokens: must be at least 0, got -1"),
        (
            dict(overlong_penalty=2.0),
            "overlong_penalty: 2.0 with rewards.shaping.overlong_tokens 0",
        ),
        (dict(truncated_factor=2), "truncated_factor: must be at most 1, got 2"),
        (
            dict(truncated_penalty=math.nan),
            "truncated_penalty: must be a number in [0, 1000000000], got nan",
        ),
        (dict(scale=0), "scale: must not be 0, which"),
        (dict(clamp_low=1, clamp_high=1), "clamp_low: must be below clamp_high = 1, got 1"),
    ],
    ("rewards.shaping", "gdpo"): [(dict(scale=2.0), "rewards.shaping: ")],
}


for objective in ("sft", "distill", "preference"):  # where nothing is sampled
    says = f"with algorithm.objective {objective}; it acts"
    for place, name, value in (("entropy", "keep_frac", 0.2), ("kl", "target", 0.1)):
        place = f"algorithm.{place}_control"
        REFUSED[place, objective] = [({name: value}, f"{place}.{name}: {value} {says}")]


def rows_of(table: dict) -> list:
    return [(*where, row) for where, rows in table.items() for row in rows]


def problems(place: str, beside: str, value: object) -> list[str]:
    """Check a config with a section or field changed, and something beside."""
    tree = reduce(lambda inner, name: {name: inner}, reversed(place.split(".")), value)
    return validate(changed(good(**BESIDE[beside]), **tree))


@pytest.mark.parametrize("place, beside, value", rows_of(ACCEPTED))
def test_what_goes_together_is_accepted(place, beside, value):
    assert problems(place, beside, value) == []


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(algorithm=dict(advantage="gae")), "advantage: gae with rollout.agent a.py:solve; it"),
        (dict(algorithm=dict(advantage="prime")), "take one with a number per episode"),
        (
            dict(algorithm=dict(objective="online_preference", loss="dpo")),
            "objective: online_preference with rollout.agent a.py:solve; it compares two",
        ),
        (dict(rewards=dict(functions=("model:m",))), "a reward model scores one sequence"),
        (dict(rewards=dict(shaping=dict(overlong_tokens=4))), "the length limit is of one trace"),
        (dict(sampling=dict(presence_penalty=1.0)), "each request of an agent counts its own"),
        (dict(sampling=dict(frequency_penalty=1.0)), "frequency_penalty: 1.0 with rollout.agent"),
        (
            dict(rollout=dict(environment=dict(name="guess_number"))),
            "an agent and an environment would both make the conversation",
        ),
    ],
)
def test_what_was_not_proved_for_episodes_of_several_traces_is_refused(changes, says):
    cfg = changed(good(), **changes)
    assert not rule_problems(cfg)
    (problem,) = rule_problems(changed(cfg, rollout=dict(agent="a.py:solve")))
    assert says in problem
    (problem,) = rule_problems(changed(cfg, rollout=dict(agent_command=("./solve", "-v"))))
    assert "rollout.agent_command [./solve, -v]" in problem


def test_an_agent_is_a_function_or_a_command():
    both = dict(agent="a.py:solve", agent_command=("./solve",))
    (problem,) = rule_problems(changed(good(), rollout=both))
    assert "agent_command: [./solve] with rollout.agent a.py:solve; both would play" in problem


@pytest.mark.parametrize("place, beside, row", rows_of(REFUSED))
def test_what_cannot_be_is_refused_with_the_reason(place, beside, row):
    value, says = row
    (problem,) = problems(place, beside, value)
    assert says in problem
