"""What several settings of NeMo-RL become together; the rules of `nemo_rl.md`."""

from __future__ import annotations

from typing import Any

from spmdrl.tools.import_config.common import (
    batch_of,
    clips_of,
    correction_of,
    schedule_of,
    set_kl,
    steps_of,
)
from spmdrl.tools.import_config.translation import Ours, Rule, Theirs

_MEGATRON = "policy.megatron_cfg"
_TORCH = "policy.optimizer.kwargs"
_GENERATION = "policy.generation"
_ALWAYS = 10**6
"""Steps that mean: until the epochs end."""


def _batch(theirs: Theirs, ours: Ours) -> None:
    prompts = theirs["grpo.num_prompts_per_step"]
    group = theirs["grpo.num_generations_per_prompt"]
    mini = theirs["policy.train_global_batch_size"]
    batch_of(ours, prompts=prompts, mini=mini, whole=prompts * group, unit="sequences")
    ours.set(batch__group_size=group)


def _microbatch(theirs: Theirs, ours: Ours) -> None:
    prompt, response = _lengths(theirs)
    tokens = theirs["policy.train_micro_batch_size"] * theirs["policy.max_total_sequence_length"]
    for kind in ("sequence_packing", "dynamic_batching"):
        if theirs[f"policy.{kind}.enabled"]:
            tokens = theirs[f"policy.{kind}.train_mb_tokens"] or tokens
    ours.set(batch__tokens_per_microbatch=max(tokens, prompt + response))


def _lengths(theirs: Theirs) -> tuple[int, int]:
    """Return the longest prompt and response, tokens."""
    total = theirs["policy.max_total_sequence_length"]
    prompt = theirs["data.max_input_seq_length"] or total
    return prompt, theirs[f"{_GENERATION}.max_new_tokens"] or total


def _set_lengths(theirs: Theirs, ours: Ours) -> None:
    total = theirs["policy.max_total_sequence_length"]
    prompt, response = _lengths(theirs)
    ours.set(data__max_prompt_tokens=prompt, sampling__max_response_tokens=response)
    if prompt + response > total:
        ours.tell(
            f"policy.max_total_sequence_length = {total}",
            f"a sequence ends there at {total} tokens; here it may have {prompt} + {response}, and "
            "memory is needed for that: lower data.max_prompt_tokens to your longest prompt",
        )


def _set_steps(theirs: Theirs, ours: Ours) -> None:
    most = theirs["grpo.max_num_steps"]
    epochs = theirs["grpo.max_num_epochs"]
    steps = steps_of(theirs, epochs=epochs, prompts=theirs["grpo.num_prompts_per_step"])
    if steps is not None:
        ours.set(steps=min(most, steps))
    elif most < _ALWAYS:
        ours.set(steps=most)
        ours.tell(f"grpo.max_num_epochs = {epochs}", f"not counted without --rows: {most} steps")
    else:
        ours.ask("steps", f"{epochs} epochs of an unknown number of rows: give --rows")


def _optimizer(theirs: Theirs, ours: Ours) -> None:
    if theirs[f"{_MEGATRON}.enabled"]:
        own = f"{_MEGATRON}.optimizer"
        kind = theirs[f"{own}.optimizer"]
        beta1, beta2, eps = (theirs[f"{own}.adam_{name}"] for name in ("beta1", "beta2", "eps"))
    else:
        own = _TORCH
        kind = theirs["policy.optimizer.name"]
        beta1, beta2 = theirs[f"{own}.betas"]
        eps = theirs[f"{own}.eps"]
    ours.set(
        optimizer__lr=theirs[f"{own}.lr"],
        optimizer__weight_decay=theirs[f"{own}.weight_decay"],
        optimizer__beta1=beta1,
        optimizer__beta2=beta2,
        optimizer__eps=eps,
    )
    if not str(kind).lower().endswith(("adam", "adamw")):
        ours.ask("optimizer.kind", f"{kind} has no counterpart: adamw or muon")


def _schedule(theirs: Theirs, ours: Ours) -> None:
    if theirs[f"{_MEGATRON}.enabled"]:
        floor = theirs[f"{_MEGATRON}.optimizer.min_lr"] / theirs[f"{_MEGATRON}.optimizer.lr"]
        schedule_of(ours, theirs[f"{_MEGATRON}.scheduler.lr_decay_style"], min_lr_frac=floor)
        ours.set(optimizer__warmup_steps=theirs[f"{_MEGATRON}.scheduler.lr_warmup_iters"] or 0)
        return
    schedulers = theirs["policy.scheduler"] or []
    ours.set(optimizer__schedule="constant", optimizer__warmup_steps=0)
    for own in schedulers if isinstance(schedulers, list) else [schedulers]:
        options = own.get("kwargs", {})
        kind = str(own.get("name", "ConstantLR")).rpartition(".")[2]
        if kind == "LinearLR" and options.get("start_factor", 1) < options.get("end_factor", 1):
            ours.set(optimizer__warmup_steps=options.get("total_iters", 5))
        elif kind == "CosineAnnealingLR":
            floor = options.get("eta_min", 0.0) / theirs[f"{_TORCH}.lr"]
            schedule_of(ours, "cosine", min_lr_frac=floor)
            ours.tell(f"T_max = {options.get('T_max')}", "the cosine ends at the last step here")
        elif kind != "ConstantLR" and not (kind == "LinearLR" and _is_flat(options)):
            ours.ask("optimizer.schedule", f"{kind} has no counterpart")


def _is_flat(options: dict[str, Any]) -> bool:
    return options.get("start_factor", 1) == options.get("end_factor", 1)


def _advantage(theirs: Theirs, ours: Ours) -> None:
    name = theirs["grpo.adv_estimator.name"]
    settings = {}
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        own = theirs[f"grpo.adv_estimator.{key}"]
        settings[key] = theirs[f"grpo.{key}"] if own is None else own
    scales = settings["normalize_rewards"]
    leaves_out = settings["use_leave_one_out_baseline"]
    if name == "grpo":
        own = "grpo" if scales else "rloo" if leaves_out else "dr_grpo"
        if scales and leaves_out:
            ours.tell(
                "grpo.use_leave_one_out_baseline = True",
                "NeMo-RL takes mean and deviation of the group's other samples, grpo of all",
            )
    elif name == "gdpo":
        own = "gdpo"
    elif name == "reinforce_plus_plus" and theirs["grpo.adv_estimator.minus_baseline"]:
        own = "reinforce_plus_plus_baseline"
    else:
        ours.ask("algorithm.advantage", f"{name} has no counterpart; see docs/algorithms.md")
        return
    ours.set(algorithm__advantage=own, algorithm__advantage_options={})


def _loss(theirs: Theirs, ours: Ours) -> None:
    low = theirs["loss_fn.ratio_clip_min"]
    high = theirs["loss_fn.ratio_clip_max"]
    options = clips_of(low, high)
    loss = "ppo_clip"
    if theirs["loss_fn.use_cispo"]:
        loss = "cispo"
        options = {"ratio_low": max(0.0, 1 - low), "ratio_high": 1 + high}
    elif theirs["loss_fn.disable_ppo_ratio"]:
        loss = "reinforce"
        options = {}
    elif theirs["loss_fn.sequence_level_importance_ratios"]:
        loss = "gspo"
    elif theirs["loss_fn.ratio_clip_c"]:
        options["dual_clip"] = theirs["loss_fn.ratio_clip_c"]
    by_token = theirs["loss_fn.token_level_loss"]
    ours.set(
        algorithm__loss=loss,
        algorithm__loss_options=options,
        algorithm__aggregation="token_mean" if by_token else "seq_mean_token_mean",
    )


def _kl(theirs: Theirs, ours: Ours) -> None:
    kind = theirs["loss_fn.reference_policy_kl_type"]
    coef = theirs["loss_fn.reference_policy_kl_penalty"]
    place = "reward" if theirs["loss_fn.use_kl_in_reward"] else "loss"
    set_kl(ours, coef, kind if kind in ("k1", "k2", "k3") else None, place=place, theirs=kind)
    if theirs["loss_fn.use_on_policy_kl_approximation"] and coef:
        ours.set(algorithm__kl_options={"unbiased": True})


def _correction(theirs: Theirs, ours: Ours) -> None:
    kind = theirs["loss_fn.truncated_importance_sampling_type"]
    upper = theirs["loss_fn.truncated_importance_sampling_ratio"]
    lower = theirs["loss_fn.truncated_importance_sampling_ratio_min"]
    by_sequence = theirs["loss_fn.sequence_level_importance_ratios"]
    if not theirs["loss_fn.use_importance_sampling_correction"]:
        correction_of(ours, "none")
    elif kind == "icepop":
        correction_of(ours, "icepop", level="token", lower=lower, upper=upper)
    elif kind == "seq-mask-tis":
        ours.ask("algorithm.correction", "seq-mask-tis: see seq_mask_tis, whose weights are cut")
    elif lower or (kind == "tis" and upper is None):
        ours.ask("algorithm.correction", f"{kind} from {lower} to {upper} has no counterpart")
    else:
        # Without a type NeMo-RL cuts nothing, unless a ratio is set.
        level = "sequence" if by_sequence else "token"
        correction_of(ours, "tis", level=level, upper=upper or 1e6)


def _dynamic(theirs: Theirs, ours: Ours) -> None:
    if theirs["grpo.use_dynamic_sampling"]:
        most = theirs["grpo.dynamic_sampling_max_gen_batches"]
        ours.set(rollout__schedule__dynamic=max(2, most))


def _shaping(theirs: Theirs, ours: Ours) -> None:
    if theirs["grpo.reward_shaping.enabled"]:
        factor = theirs["grpo.reward_shaping.stop_properly_penalty_coef"]
        if factor is not None:
            ours.set(rewards__shaping__truncated_factor=factor)
        else:
            ours.set(
                rewards__shaping__overlong_tokens=theirs[
                    "grpo.reward_shaping.overlong_buffer_length"
                ],
                rewards__shaping__overlong_penalty=theirs[
                    "grpo.reward_shaping.overlong_buffer_penalty"
                ],
            )
    if theirs["grpo.reward_scaling.enabled"]:
        low, high = (theirs[f"grpo.reward_scaling.source_{end}"] for end in ("min", "max"))
        least, most = (theirs[f"grpo.reward_scaling.target_{end}"] for end in ("min", "max"))
        scale = (most - least) / (high - low)
        # least + scale (R - low) is scale (R + shift).
        ours.set(
            rewards__shaping__scale=scale,
            rewards__shaping__shift=least / scale - low,
            rewards__shaping__clamp_low=least,
            rewards__shaping__clamp_high=most,
        )


def _schedules(theirs: Theirs, ours: Ours) -> None:
    if theirs["grpo.async_grpo.enabled"]:
        recomputes = theirs["grpo.async_grpo.recompute_kv_cache_after_weight_updates"]
        in_flight = theirs["grpo.async_grpo.in_flight_weight_updates"]
        ours.set(
            lag=theirs["grpo.async_grpo.max_trajectory_age_steps"],
            rollout__schedule__in_flight=in_flight,
            rollout__schedule__kv_cache="recompute" if recomputes or not in_flight else "keep",
        )


def _layout(theirs: Theirs, ours: Ours) -> None:
    per_node = theirs["cluster.gpus_per_node"]
    nodes = theirs["cluster.num_nodes"]
    ours.set(layout__placement="colocated", layout__world_size=per_node * nodes)
    if not theirs[f"{_GENERATION}.colocated.enabled"]:
        own = f"{_GENERATION}.colocated.resources"
        generators = (theirs[f"{own}.gpus_per_node"] or per_node) * (
            theirs[f"{own}.num_nodes"] or 1
        )
        trainers = per_node * nodes - generators
        ours.set(layout__placement="split", layout__trainer_ranks=trainers)
    if theirs[f"{_MEGATRON}.enabled"]:
        tp = theirs[f"{_MEGATRON}.tensor_model_parallel_size"]
        cp = theirs[f"{_MEGATRON}.context_parallel_size"]
        ep = theirs[f"{_MEGATRON}.expert_model_parallel_size"]
        stages = theirs[f"{_MEGATRON}.pipeline_model_parallel_size"]
        if stages != 1:
            ours.tell(
                f"{_MEGATRON}.pipeline_model_parallel_size = {stages}",
                "no pipeline here: its GPUs shard the weights by FSDP",
            )
    else:
        tp, cp, ep = (
            theirs[f"policy.dtensor_cfg.{name}_parallel_size"]
            for name in ("tensor", "context", "expert")
        )
    ours.set(layout__tp=tp, layout__cp=cp, layout__ep=ep)


def _tokenizer(theirs: Theirs, ours: Ours) -> None:
    name = theirs["policy.tokenizer.name"]
    if name and name != theirs["policy.model_name"]:
        ours.set(model__tokenizer=name)


def _memory(theirs: Theirs, ours: Ours) -> None:
    backend = _MEGATRON if theirs[f"{_MEGATRON}.enabled"] else "policy.dtensor_cfg"
    recomputes = theirs[f"{backend}.activation_checkpointing"]
    ours.set(model__memory__activation_checkpointing="full" if recomputes else "none")
    if backend != _MEGATRON and theirs["policy.dtensor_cfg.cpu_offload"]:
        ours.set(model__memory__offload="parameters")


def _lora(theirs: Theirs, ours: Ours) -> None:
    own = f"{_MEGATRON}.peft" if theirs[f"{_MEGATRON}.enabled"] else "policy.dtensor_cfg.lora_cfg"
    if theirs[f"{own}.enabled"]:
        ours.set(
            model__lora__rank=theirs[f"{own}.dim"],
            model__lora__alpha=theirs[f"{own}.alpha"],
            model__lora__targets=theirs[f"{own}.target_modules"] or "all-linear",
        )


def _evaluate(theirs: Theirs, ours: Ours) -> None:
    for own in ("temperature", "top_p", "top_k"):
        value = theirs[f"{_GENERATION}.val_{own}"]
        value = theirs[f"{_GENERATION}.{own}"] if value is None else value
        if value is not None:
            ours.fields[f"evaluate.{own}"] = value


def _engine(theirs: Theirs, ours: Ours) -> None:
    backend = theirs[f"{_GENERATION}.backend"]
    ours.set(engine__kind="vllm")
    if backend != "vllm":
        ours.tell(f"{_GENERATION}.backend = {backend}", "the engine is vLLM here")
    precision = theirs[f"{_GENERATION}.vllm_cfg.precision"]
    if precision == "fp8":
        ours.tell(f"{_GENERATION}.vllm_cfg.precision = fp8", "quantised engines: docs/engines.md")
        precision = "bfloat16"
    ours.set(engine__dtype=precision)
    if theirs[f"{_GENERATION}.vllm_cfg.enforce_eager"]:
        ours.set(engine__options={"enforce_eager": True})


def _data(theirs: Theirs, ours: Ours) -> None:
    for split, field in (("train", "data.train"), ("validation", "data.eval")):
        path = theirs[f"data.{split}.data_path"]
        name = theirs[f"data.{split}.dataset_name"]
        if path:
            ours.fields[field] = path
        elif name or split == "train":
            ours.ask(field, f"{name or 'several sources'}: a file or dataset, docs/data.md")
        elif theirs["grpo.val_period"] > 0:
            ours.ask(field, "NeMo-RL takes a part of the training rows: write them to a file")
    columns = {}
    for own, key in (("prompt", "input_key"), ("answer", "output_key")):
        other = theirs[f"data.train.{key}"] or theirs[f"data.default.{key}"]
        if other and other != own:
            columns[own] = other
    ours.set(data__columns=columns)
    env = theirs["data.default.env_name"]
    ours.ask(
        "rewards.functions",
        f"NeMo-RL scores by its environment {env}; for math that is spmdrl.rewards.graders:math",
    )


def _checkpoints(theirs: Theirs, ours: Ours) -> None:
    saves = theirs["checkpointing.enabled"]
    ours.set(checkpoint__every_steps=theirs["checkpointing.save_period"] if saves else 0)
    kept = theirs["checkpointing.keep_top_k"]
    metric = theirs["checkpointing.metric_name"]
    if saves and metric:
        ours.set(checkpoint__keep__best="eval/reward")
        ours.tell(
            f"checkpointing.metric_name = {metric}, keep_top_k = {kept}",
            "here the best one by eval/reward is kept, and the newest checkpoint.keep.last",
        )
    elif saves and kept:
        ours.set(checkpoint__keep__last=kept)


def _trackers(theirs: Theirs, ours: Ours) -> None:
    names = ("wandb", "tensorboard", "mlflow")
    ours.set(report__trackers=[name for name in names if theirs[f"logger.{name}_enabled"]])


RULES: dict[str, Rule] = {
    "batch": _batch,
    "microbatch": _microbatch,
    "lengths": _set_lengths,
    "steps": _set_steps,
    "optimizer": _optimizer,
    "schedule": _schedule,
    "advantage": _advantage,
    "loss": _loss,
    "kl": _kl,
    "correction": _correction,
    "dynamic": _dynamic,
    "shaping": _shaping,
    "schedules": _schedules,
    "layout": _layout,
    "tokenizer": _tokenizer,
    "memory": _memory,
    "lora": _lora,
    "evaluate": _evaluate,
    "engine": _engine,
    "data": _data,
    "checkpoints": _checkpoints,
    "trackers": _trackers,
}
