"""Every metric in one place: unit, estimator, denominator, meaning, and its name elsewhere.

`python -m spmdrl catalogue metrics > docs/metrics.md` writes the page for people.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from spmdrl.errors import Refusal
from spmdrl.types import Sums, as_pair


class Metric(NamedTuple):
    """What one metric is."""

    unit: str
    estimator: str
    """How one step's value is formed. `total` means a count or amount that adds up over ranks:
    the value is the numerator alone."""
    denominator: str
    """What a mean is over, counted in the whole world, never per rank."""
    description: str


_M = Metric


def _total(unit: str, description: str) -> Metric:
    return Metric(unit, "total", "-", description)


def _mean(unit: str, denominator: str, description: str) -> Metric:
    return Metric(unit, "mean", denominator, description)


def _share(denominator: str, description: str) -> Metric:
    return _mean("share", denominator, description)


GLOSSARY: dict[str, Metric] = {
    # ---- what the samples earned
    "reward/mean": _mean(
        "task units", "valid samples", "reward of sampled responses, after rewards.shaping"
    ),
    "reward/mean_raw": _mean(
        "task units",
        "valid samples",
        "the same before rewards.shaping; absent where nothing is shaped",
    ),
    "reward/std": _M(
        "task units",
        "root of the mean within-group variance (population form)",
        "groups of at least 2 valid samples",
        "how much samples of a prompt differ",
    ),
    "reward/zero_spread_groups_frac": _share(
        "groups of at least 2 valid samples",
        "groups whose rewards are all equal: they carry no signal",
    ),
    "reward/timeouts": _total("samples", "rewards that passed their deadline"),
    "reward/errors": _total("samples", "rewards that raised or were not a finite number"),
    "reward/seconds": _mean("s", "samples", "wall time of one reward in its worker"),
    "reward/<name>/mean": _mean(
        "task units",
        "samples that have it",
        "one reward function or model, or one number that it reports besides",
    ),
    # ---- of each of several sources of data.train
    "source/<source>/reward": _mean(
        "task units",
        "samples whose reward did not fail",
        "reward of a source's responses, before rewards.shaping and without reward models",
    ),
    "source/<source>/zero_spread_groups_frac": _share(
        "groups of at least 2 valid samples", "its groups whose rewards are all equal"
    ),
    "source/<source>/samples": _total("samples", "its responses in the step's batch"),
    "source/<source>/response_length": _mean("tokens", "samples", "sampled tokens of a response"),
    "source/<source>/truncated_frac": _share("samples", "responses cut at the length limit"),
    # ---- what the engines produced
    "rollout/response_length": _mean("tokens", "samples", "sampled tokens of a response"),
    "rollout/response_length_max": _M("tokens", "max", "steps", "longest response"),
    "rollout/prompt_length": _mean("tokens", "samples", "tokens of a prompt"),
    "rollout/truncated_frac": _share("samples", "responses cut at sampling.max_response_tokens"),
    "rollout/kept_set_bytes": _mean(
        "bytes",
        "sampled tokens",
        "of the ids that a token was drawn among, which go to the trainer with it; with top_p, "
        "top_k or min_p",
    ),
    "rollout/kept_set_ids": _mean(
        "ids", "sampled tokens", "that a token was drawn among, of tokens not drawn among all"
    ),
    "rollout/kept_all_frac": _share(
        "sampled tokens", "drawn among the whole vocabulary, under top_p, top_k or min_p"
    ),
    "rollout/left_out_frac": _share(
        "samples", "taken out of the training by Batch.without; absent where nothing does"
    ),
    "rollout/failed_rewards": _total("samples", "samples left out: reward failed"),
    "rollout/greedy_reward": _mean(
        "task units",
        "prompts whose greedy response was rewarded",
        "reward of greedy responses, unshaped: baselines of `remax`, in no other metric",
    ),
    "rollout/failed_greedy_rewards": _total(
        "prompts", "greedy responses whose reward failed: their prompts' advantages are 0"
    ),
    "rollout/turns": _mean(
        "turns", "samples", "turns of the policy, in a step where a sample has more than one"
    ),
    "environment/<name>": _mean(
        "see the environment",
        "samples that have it",
        "what rollout.environment reports, added up over an episode's turns",
    ),
    "rollout/samples": _total("samples", "responses in the step's batch"),
    "rollout/dropped_groups": _total(
        "groups",
        "groups without a spread of rewards that others took the place of, since the last step "
        "(dynamic)",
    ),
    "rollout/carried_groups": _total(
        "groups", "groups under way or complete that stay for later steps"
    ),
    "rollout/overlong_openings": _total(
        "samples",
        "samples left out: the environment opened with more than data.max_prompt_tokens; absent "
        "for none",
    ),
    "time/engine_idle": _mean(
        "s",
        "replicas",
        "idle time of an engine from one step's share to the next, evaluation and checkpoints "
        "left out: its seconds, each counted by the share of places that are empty (places: what "
        "a share can fill, at most engine.max_num_seqs); the sum of the rows below",
    ),
    "time/engine_idle_tail": _mean("s", "replicas", "of it: the last sequences are long"),
    "time/engine_idle_reward": _mean("s", "replicas", "of it: nothing is left to do but to score"),
    "time/engine_idle_environment": _mean("s", "replicas", "of it: an environment is to answer"),
    "time/engine_idle_replicas": _mean(
        "s", "replicas", "of it: another replica has what is missing"
    ),
    "time/engine_idle_exchange": _mean("s", "replicas", "of it: rollouts go to the trainers"),
    "time/engine_idle_update": _mean(
        "s", "replicas", "of it: the trainers are at work, or, with lag above 0, another replica"
    ),
    "time/engine_idle_push": _mean("s", "replicas", "of it: weights come in"),
    "time/await_rollouts_sampling": _M(
        "s",
        "time/await_rollouts * (1 - the shares below)",
        "steps",
        "the trainers' wait for rollouts (split placement) while engines sampled; with the three "
        "rows below it adds up",
    ),
    "time/await_rollouts_tail": _M(
        "s",
        "time/await_rollouts * engine_idle_tail / time/generate",
        "steps",
        "the same, while engines were empty since the last sequences are long; wait and idle time "
        "are taken to overlap in proportion",
    ),
    "time/await_rollouts_reward": _M(
        "s",
        "time/await_rollouts * engine_idle_reward / time/generate",
        "steps",
        "the same, while nothing was left to do but to score",
    ),
    "time/await_rollouts_environment": _M(
        "s",
        "time/await_rollouts * engine_idle_environment / time/generate",
        "steps",
        "the same, while environments were to answer",
    ),
    "rollout/logprob": _mean(
        "nats", "sampled tokens", "engine's log-probability of a sampled token"
    ),
    # ---- the update
    "policy/loss": _M(
        "objective",
        "sum over micro-batches, normalised globally",
        "updates",
        "the value that was differentiated",
    ),
    "policy/grad_norm": _M(
        "1",
        "global 2-norm before clipping",
        "updates",
        "over all parameters and ranks; skipped updates left out",
    ),
    "policy/lr": _mean("1", "updates", "learning rate in use"),
    "policy/entropy": _M(
        "nats",
        "exact, full softmax at the sampling temperature",
        "loss tokens",
        "entropy of the policy's next-token distribution",
    ),
    "policy/nll": _mean("nats", "loss tokens", "negative log-likelihood (sft)"),
    "policy/accuracy": _share("loss tokens", "targets that are the most likely token (sft)"),
    "policy/clip_frac": _share(
        "loss tokens", "tokens whose ratio is clipped, so that they get no gradient"
    ),
    "policy/clip_low_frac": _share("loss tokens", "clipped at the lower bound"),
    "policy/clip_high_frac": _share("loss tokens", "clipped at the upper bound"),
    "policy/dual_clip_frac": _share("loss tokens", "cut by the dual clip"),
    "policy/ratio": _M(
        "1",
        "mean of exp(logprobs - old_logprobs)",
        "loss tokens",
        "1 exactly while there is one optimizer step per batch",
    ),
    "policy/ratio_max": _M("1", "max", "updates", "largest ratio"),
    "policy/kl_old": _M(
        "nats", "k1: old_logprobs - logprobs", "loss tokens", "drift of the policy within one batch"
    ),
    "policy/kl_old_last": _M(
        "nats",
        "k1: old_logprobs - logprobs",
        "loss tokens of the last epoch",
        "the same in the last of several epochs over a batch",
    ),
    "policy/clip_frac_last": _share(
        "loss tokens of the last epoch", "policy/clip_frac in the last of several epochs"
    ),
    "policy/kl_rollout": _M(
        "nats",
        "k1: rollout_logprobs - logprobs",
        "loss tokens",
        "drift of the policy from the one that sampled",
    ),
    "policy/rollout_ratio": _M(
        "1",
        "mean of exp(logprobs - rollout_logprobs)",
        "loss tokens",
        "ratio of losses that are anchored at the engine's policy",
    ),
    "policy/dropped_frac": _share("loss tokens", "tokens that the loss leaves out"),
    "policy/kl_cov_frac": _share("loss tokens", "tokens that kl_cov holds back by a KL"),
    "policy/sequence_weight": _mean("1", "loss tokens", "vespo's weight of a sequence"),
    "<model>/router_max_load": _M(
        "1",
        "largest load of an expert / mean load",
        "layers with experts * updates",
        "how far the experts of a layer are from equal shares of (token, choice) pairs; 1 is "
        "balanced. No token is dropped",
    ),
    "<model>/router_idle_experts_frac": _share(
        "experts of all layers * updates", "experts that no token of the update chose"
    ),
    "<model>/router_entropy": _mean(
        "nats", "tokens * layers with experts", "entropy of the router's distribution over experts"
    ),
    "<model>/router_balance_loss": _M(
        "1",
        "experts * sum of load shares * mean probabilities",
        "tokens * layers with experts",
        "Switch's balancing loss of a layer, before model.moe.coef; 1 is balanced",
    ),
    "policy/router_disagreement": _share(
        "tokens * layers with a recorded route",
        "the trainer's router would have chosen other experts than the engine's, which were "
        "replayed (model.moe.replay)",
    ),
    "policy/router_replayed_frac": _share(
        "tokens * layers with experts",
        "a route of the engine was replayed; the rest, such as each sequence's last token, was "
        "routed by the trainer",
    ),
    "policy/entropy_coef": _mean(
        "1",
        "steps",
        "weight of the entropy bonus in this step, moved toward entropy_control.target",
    ),
    "policy/kl_coef": _mean(
        "1", "steps", "weight of the KL in this step, moved toward kl_control.target"
    ),
    "policy/low_entropy_frac": _share(
        "loss tokens", "tokens below the entropy that top_entropy asks for"
    ),
    "policy/kl_ref": _M(
        "nats",
        "k1: logprobs - ref_logprobs",
        "loss tokens",
        "distance from the frozen reference; single tokens may be negative",
    ),
    "policy/kl_ref_k3": _M(
        "nats", "k3", "loss tokens", "distance from the frozen reference, never negative"
    ),
    "policy/distill": _mean("nats", "loss tokens", "divergence from the teacher"),
    "policy/distill_teacher_mass": _mean(
        "probability", "loss tokens", "of the teacher, on the tokens it names"
    ),
    "policy/distill_student_mass": _mean(
        "probability", "loss tokens", "of the policy, on the tokens that the teacher names"
    ),
    # ---- pairs: preference losses and reward models
    "preference/accuracy": _M(
        "share",
        "mean, ties count one half",
        "pairs",
        "pairs whose chosen response has the higher implicit reward",
    ),
    "preference/margin": _mean(
        "as the loss says", "pairs", "implicit reward of the chosen minus that of the rejected"
    ),
    "preference/chosen_reward": _mean("as the loss says", "chosen responses", "implicit reward"),
    "preference/rejected_reward": _mean(
        "as the loss says", "rejected responses", "implicit reward"
    ),
    "preference/chosen_logprob": _M(
        "nats", "mean of means over tokens", "chosen responses", "log-probability of a token"
    ),
    "preference/rejected_logprob": _M(
        "nats", "mean of means over tokens", "rejected responses", "log-probability of a token"
    ),
    "preference/nll": _M(
        "nats",
        "mean of means over tokens",
        "chosen responses",
        "negative log-likelihood (cpo, orpo)",
    ),
    "preference/log_ratio": _mean("nats", "responses", "log-ratio to the reference (bco)"),
    "preference/kl": _M(
        "nats", "mean, at least 0", "mismatched pairs", "KL to the reference that kto compares with"
    ),
    "reward_model/accuracy": _M(
        "share", "mean, ties count one half", "pairs", "pairs whose chosen response scores higher"
    ),
    "reward_model/margin": _mean("score", "pairs", "chosen score minus rejected score"),
    "reward_model/chosen_score": _mean("score", "pairs", "of the chosen response"),
    "reward_model/rejected_score": _mean("score", "pairs", "of the rejected response"),
    # ---- the value model of PPO
    "value/loss": _M("task units squared", "half the mean square", "loss tokens", "value loss"),
    "value/grad_norm": _mean("1", "updates", "global gradient norm before clipping"),
    "value/lr": _mean("1", "updates", "learning rate of the value model"),
    "value/skipped_updates": _total("updates", "as policy/skipped_updates"),
    "value/mean": _mean("task units", "loss tokens", "predicted value"),
    "value/clip_frac": _share("loss tokens", "values cut by the clip"),
    "value/returns": _mean("task units", "loss tokens", "target of the value model"),
    "value/returns_square": _mean("task units squared", "loss tokens", "square of it"),
    "value/error": _mean("task units", "loss tokens", "returns minus old values"),
    "value/error_square": _mean("task units squared", "loss tokens", "square of it"),
    "value/explained_variance": _M(
        "1",
        "1 - Var(returns - values) / Var(returns)",
        "loss tokens of the world",
        "1 is a perfect value model, 0 one no better than the mean",
    ),
    # ---- the process reward model of PRIME
    "prm/loss": _M(
        "nats",
        "cross-entropy with the outcome",
        "sequences with loss tokens",
        "loss of the process reward model; ln 2 knows nothing",
    ),
    "prm/grad_norm": _mean("1", "updates", "global gradient norm before clipping"),
    "prm/lr": _mean("1", "updates", "learning rate of the process reward model"),
    "prm/skipped_updates": _total("updates", "as policy/skipped_updates"),
    "prm/accuracy": _share(
        "sequences with loss tokens",
        "outcomes on the predicted side of one half, before the update",
    ),
    "prm/score": _mean(
        "task units",
        "sequences with loss tokens",
        "summed process rewards: beta times the log-ratio to the reference",
    ),
    "policy/skipped_updates": _total(
        "updates", "updates skipped on all ranks: loss or gradient not finite"
    ),
    **{
        f"{name}/{own}": metric
        for name in ("policy", "value", "prm")
        for own, metric in (
            ("loss_scale", _mean("1", "updates", "factor on the loss under float16")),
            (
                "overflowed_updates",
                _total("updates", "of the skipped ones, those whose gradient overflowed float16"),
            ),
        )
    },
    "policy/staleness": _mean(
        "versions", "sampled tokens", "trainer's version minus the version that sampled the token"
    ),
    "policy/staleness_max": _M("versions", "max", "steps", "largest staleness"),
    "policy/advantage": _mean("1", "valid samples", "advantage of a sample"),
    "policy/advantage_std": _M("1", "standard deviation", "steps", "spread of advantages"),
    "loss/<name>": _mean(
        "see the loss",
        "as the loss says",
        "a statistic that the loss function returned under this name",
    ),
    # ---- engine against trainer, on the sampled tokens: d = old_logprobs - rollout_logprobs
    "policy/mismatch_k1": _M(
        "nats", "k1: -d", "loss tokens", "KL(engine to trainer), unbiased, may be negative"
    ),
    "policy/mismatch_k3": _M(
        "nats",
        "k3: exp(d) - 1 - d",
        "loss tokens",
        "KL(engine to trainer), never negative; healthy below 1e-3",
    ),
    "policy/mismatch_prob_diff": _M(
        "probability",
        "mean of |exp(old) - exp(rollout)|",
        "loss tokens",
        "below 0.005 healthy, above 0.01 broken",
    ),
    "policy/mismatch_prob_diff_p999": _M(
        "probability",
        "0.999 quantile of |exp(old) - exp(rollout)|, within 2.4 %, mean over updates",
        "loss tokens of the world",
        "one token in a thousand differs by more",
    ),
    "policy/mismatch_prob_diff_max": _M(
        "probability",
        "max of |exp(old) - exp(rollout)|, up to 4.8 % above it, mean over updates",
        "loss tokens of the world",
        "worst token",
    ),
    "policy/mismatch_logprob_diff": _M(
        "nats", "mean of |d|", "loss tokens", "absolute log-probability gap"
    ),
    "policy/mismatch_logprob_diff_max": _M("nats", "max of |d|", "updates", "worst token"),
    "policy/mismatch_ratio": _M(
        "1", "mean of exp(d)", "loss tokens", "importance ratio, should hover at 1"
    ),
    "policy/mismatch_ratio_max": _M("1", "max of exp(d)", "updates", "worst token"),
    "policy/mismatch_ess": _M(
        "share",
        "1 / mean of exp(2 d)",
        "loss tokens",
        "effective share of the samples; 1 is on-policy",
    ),
    "policy/mismatch_seq_k1": _M(
        "nats",
        "k1: -d, mean within a sequence",
        "sequences with loss tokens",
        "as mismatch_k1, every sequence counting the same",
    ),
    "policy/mismatch_outside_frac": _share("loss tokens", "tokens with exp(d) outside [0.5, 2]"),
    "policy/mismatch_nan_frac": _share(
        "loss tokens", "engine logprobs that are not finite; they count as d = 0"
    ),
    "policy/correction_weight": _mean(
        "1", "loss tokens", "weight that the mismatch correction applied"
    ),
    "policy/correction_cut_frac": _share(
        "loss tokens", "tokens truncated or masked by the correction"
    ),
    # ---- the model's rows, at start
    "proof/leak": _mean(
        "nats", "starts", "change of a sequence's logprobs by other tokens elsewhere in its row"
    ),
    "proof/packed_gap": _mean("nats", "starts", "packed rows against rows of one sequence"),
    "proof/plain_gap": _mean("nats", "starts", "packed rows against plain transformers, float32"),
    # ---- the weight stream
    "sync/bytes": _total("bytes", "weights sent per push"),
    "sync/seconds": _mean("s", "pushes", "wall time of a push, from when all ranks are there"),
    "sync/gb_per_s": _M("GB/s", "bytes / seconds / 1e9", "pushes", "throughput of a push"),
    "sync/probe_gap": _M(
        "nats",
        "mean of |engine - trainer| logprobs",
        "probe tokens",
        "gap at start, gated by stream.max_logprob_gap",
    ),
    "sync/probe_gap_max": _M("nats", "max", "probes", "worst token of the probe"),
    # ---- time and throughput
    "time/<phase>": _mean(
        "s",
        "ranks that report it",
        "wall time in a phase or named wait: rank 0's; time/generate where rank 0 does not "
        "generate: engine replicas'",
    ),
    "perf/step_s": _mean("s", "steps", "wall time from one step's report to the next"),
    "perf/generated_tokens": _total("tokens", "sampled tokens in the batch"),
    "perf/batch_tokens": _total("tokens", "prompt and sampled tokens in the batch"),
    "perf/trained_tokens": _total(
        "tokens", "tokens through forward and backward, prompts included"
    ),
    "perf/trainer_flops": _total(
        "operations",
        "floating point operations of the policy's matmuls on real tokens, a tower's left out, "
        "forward and backward; see spmdrl/model/flops.py",
    ),
    "perf/trainer_tflops_per_s": _M(
        "TFLOP/s",
        "perf/trainer_flops / 1e12 / trainer ranks / seconds",
        "seconds of time/update",
        "arithmetic of one trainer rank, recomputation not counted",
    ),
    "perf/mfu": _M(
        "share",
        "perf/trainer_tflops_per_s / peak of the device in bfloat16",
        "seconds of time/update",
        "model FLOPs utilisation in the update; absent where the peak is not known, as on the CPU",
    ),
    "perf/tokens_per_s": _M(
        "tokens/s",
        "generated (sft: trained) tokens / (step - evaluate - checkpoint)",
        "-",
        "throughput of the whole job",
    ),
    "perf/other_frac": _M(
        "share",
        "1 - (generate + update + push) / (step - evaluate - checkpoint); max(generate, update) "
        "where the two overlap",
        "-",
        "wall time outside the work, as rank 0 sees it",
    ),
    "mem/rss_gib": _M("GiB", "peak so far", "-", "resident memory of rank 0's process"),
    "mem/engine_freed_gib": _mean(
        "GiB",
        "pushes",
        "memory that rank 0's engine gave up while it slept, by the device's count (on the CPU, "
        "its cache's); absent where it stays awake",
    ),
    "mem/after_wake_gib": _mean(
        "GiB",
        "pushes",
        "memory in use on rank 0's device after its engine woke, by whomever (on the CPU, by the "
        "engine); a run ends if it grows by 5% (and 0.5 GiB)",
    ),
    "mem/cuda_gib": _M("GiB", "peak so far", "-", "CUDA memory that torch allocated on rank 0"),
    # ---- data and evaluation
    "data/groups": _total("groups", "prompts in the step's batch"),
    "data/groups_of_one": _total(
        "groups", "groups left with one valid sample, whose advantage is 0 under group baselines"
    ),
    "data/epoch": _mean("epochs", "steps", "passes over the training rows so far"),
    "data/passed_over_prompts": _total(
        "prompts",
        "prompts whose turn came and that were passed over for this step, since they were always "
        "or never solved (curriculum)",
    ),
    "data/settled_prompts_frac": _share(
        "rows that were sampled before",
        "rows that were always or never solved when the step was planned (curriculum)",
    ),
    "data/dropped_prompts": _total("rows", "rows left out as longer than data.max_prompt_tokens"),
    "eval/reward": _M(
        "task units",
        "mean of the means over a problem's samples (avg@n)",
        "held-out problems with a valid sample",
        "reward on held-out rows, at evaluate.temperature, of functions and reward models; never "
        "shaped",
    ),
    "eval/reward_ci95": _M(
        "task units",
        "1.96 standard errors of the mean over problems",
        "steps",
        "half-width of the 95% interval of eval/reward; absent for a single problem",
    ),
    "eval/pass_at_<k>": _M(
        "share",
        "1 - C(n - c, k) / C(n, k) with c right of n samples, mean",
        "held-out problems with k valid samples",
        "at least one of k samples has a reward of at least 1; k is 1, 2, 4, ... and "
        "evaluate.samples, absent where that is 1",
    ),
    "eval/maj_at_<n>": _M(
        "share",
        "mean; equally frequent answers share",
        "held-out problems with n valid samples",
        "the most frequent answer has a reward of at least 1; where a reward function reports the "
        "answer as `pred`",
    ),
    "eval/response_length": _mean("tokens", "held-out samples", "sampled tokens"),
    "eval/truncated_frac": _share("held-out samples", "responses cut"),
    "eval/failed_frac": _share("held-out samples", "rewards that failed"),
    "eval/loss": _mean("nats", "held-out loss tokens", "negative log-likelihood (sft)"),
    "eval/<name>/mean": _mean(
        "task units",
        "held-out samples that have it",
        "one of several reward functions, or one number that they report besides",
    ),
    "eval/<source>/reward": _M(
        "task units",
        "as eval/reward",
        "problems of one source or data_source",
        "where held-out rows are of several",
    ),
    "eval/<source>/pass_at_n": _M(
        "share",
        "as eval/pass_at_<k>, k = evaluate.samples",
        "problems of one source or data_source",
        "where held-out rows are of several",
    ),
    "eval/<source>/maj_at_n": _M(
        "share",
        "as eval/maj_at_<n>",
        "problems of one source or data_source",
        "where held-out rows are of several",
    ),
    # ---- your own
    "mine/<name>": _mean("its own", "as you count", "what an edit of train.py adds to `sums`"),
    "my/<name>": _mean("its own", "as you count", "the same"),
}

ALIASES: dict[str, dict[str, str]] = {
    "none": {},
    "verl": {
        "reward/mean": "critic/score/mean",
        "rollout/response_length": "response_length/mean",
        "rollout/response_length_max": "response_length/max",
        "rollout/truncated_frac": "response_length/clip_ratio",
        "rollout/prompt_length": "prompt_length/mean",
        "policy/loss": "actor/loss",
        "policy/grad_norm": "actor/grad_norm",
        "policy/lr": "actor/lr",
        "policy/entropy": "actor/entropy",
        "policy/clip_frac": "actor/pg_clipfrac",
        "policy/dual_clip_frac": "actor/pg_clipfrac_lower",
        "policy/kl_old": "actor/ppo_kl",
        "policy/kl_ref": "actor/kl_loss",
        "policy/mismatch_k1": "rollout_corr/kl",
        "policy/mismatch_k3": "rollout_corr/k3_kl",
        "policy/mismatch_prob_diff": "training/rollout_probs_diff_mean",
        "policy/mismatch_prob_diff_max": "training/rollout_probs_diff_max",
        "policy/mismatch_ess": "rollout_corr/rollout_is_eff_sample_size",
        "policy/advantage": "critic/advantages/mean",
        "perf/step_s": "perf/time_per_step",
        "perf/batch_tokens": "perf/total_num_tokens",
        "time/generate": "timing_s/gen",
        "time/update": "timing_s/update_actor",
        "time/push": "timing_s/update_weights",
        "time/copy_checkpoint": "timing_s/save_checkpoint",
        "time/evaluate": "timing_s/testing",
        "eval/reward": "val-core/eval/reward/mean@1",
    },
    "trl": {
        "reward/mean": "reward",
        "reward/std": "reward_std",
        "reward/zero_spread_groups_frac": "frac_reward_zero_std",
        "rollout/response_length": "completions/mean_length",
        "rollout/response_length_max": "completions/max_length",
        "rollout/truncated_frac": "completions/clipped_ratio",
        "policy/loss": "loss",
        "policy/grad_norm": "grad_norm",
        "policy/lr": "learning_rate",
        "policy/entropy": "entropy",
        "policy/clip_frac": "clip_ratio/region_mean",
        "policy/clip_low_frac": "clip_ratio/low_mean",
        "policy/clip_high_frac": "clip_ratio/high_mean",
        "policy/kl_ref": "kl",
        "policy/mismatch_logprob_diff": "sampling/sampling_logp_difference/mean",
        "policy/mismatch_logprob_diff_max": "sampling/sampling_logp_difference/max",
        "policy/mismatch_ratio": "sampling/importance_sampling_ratio/mean",
        "policy/mismatch_ratio_max": "sampling/importance_sampling_ratio/max",
        "perf/step_s": "step_time",
        "eval/reward": "eval_reward",
    },
}
"""{system: {our name: its name}}; only where the definition is the same."""


def lookup(name: str) -> Metric:
    """Return the glossary's entry of a metric.

    Raises: Refusal naming the nearest known metric when there is none.
    """
    if (found := _entry(name)) is None:
        raise Refusal(f"metric {name!r} {unknown(name)}")
    return found


def unknown(name: str) -> str:
    """Return why a metric cannot be called so, text that goes after its name; empty if it can."""
    if _entry(name):
        return ""
    near = difflib.get_close_matches(name, list(GLOSSARY), n=1)
    hint = f"did you mean {near[0]}? Or " if near else ""
    own = name.rpartition("/")[2] or "NAME"
    return (
        f"is not in the glossary; {hint}call one of your own my/{own}, which needs no entry there "
        "(spmdrl/report/glossary.py)"
    )


def _entry(name: str) -> Metric | None:
    patterns = (pattern for pattern in GLOSSARY if "<" in pattern and _matches(name, pattern))
    return GLOSSARY.get(name) or next((GLOSSARY[pattern] for pattern in patterns), None)


def _matches(name: str, pattern: str) -> bool:
    head, tail = re.split(r"<\w+>", pattern)
    return name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)


def clean_name(name: str) -> str:
    """Return a metric name with the characters that trackers refuse replaced by `_`."""
    return re.sub(r"[^\w./:-]", "_", name, flags=re.ASCII)


def values_of(sums: Sums) -> dict[str, float]:
    """Return {clean name: numerator / denominator}; for totals, the numerator.

    A mean over nothing has no value: with denominator 0 the metric is left out.
    Raises: Refusal for a metric that is not in the glossary, TypeError for one that is no pair.
    """
    values = {}
    for given, pair in sums.items():
        name, (numerator, denominator) = clean_name(given), as_pair(given, pair)
        if lookup(name).estimator == "total":
            values[name] = float(numerator)
        elif denominator != 0:
            values[name] = float(numerator) / float(denominator)
    return values


def with_aliases(values: dict[str, float], system: str) -> dict[str, float]:
    """Return the values, and once more under verl's or TRL's names where those exist."""
    names = ALIASES[system]
    return values | {names[name]: value for name, value in values.items() if name in names}


_HEAD = """# Metrics

Written by `python -m spmdrl catalogue metrics > docs/metrics.md`; edit `spmdrl/report/glossary.py`
instead.

A metric is a sum over the whole world divided by a count over the whole world, so it does not
depend on the number of ranks or micro-batches. A `total` is the sum alone. A metric whose count is
0 in a step is absent from that step. Log-probabilities, KL and entropy are natural (nats). Names in
`<...>` stand for a function's or a phase's name. Means marked `updates` or `steps` are over those
of one step. `report.aliases` emits the names in the last columns besides ours.

A row of `metrics.jsonl` with `step` k, counted from 0, is the step that turned the weights after k
steps into those after k + 1. A row with `eval/` metrics and `step` k is of the weights after k
steps, so it comes before the training row of the same `step`. MLflow has the same numbers. The
console counts steps done: its row `done` 10 ends with `step` 9, and is the mean over the steps
since the row before.

| metric | unit | estimator | denominator | meaning | verl | TRL |
|---|---|---|---|---|---|---|
"""
_TAIL = """
`system/...` in MLflow are MLflow's own: CPU, memory, disk, network and GPU of rank 0's machine,
every 10 s.
"""


def page() -> str:
    """Return the glossary as a Markdown page."""
    rows = []
    for name, metric in GLOSSARY.items():
        theirs = [ALIASES[system].get(name, "") for system in ("verl", "trl")]
        cells = [
            f"`{name}`",
            *(cell.replace("|", "\\|") for cell in metric),
            *(f"`{other}`" if other else "" for other in theirs),
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows) + _TAIL
