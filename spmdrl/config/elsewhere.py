"""What fields are called in other programs, and what they are here."""

from __future__ import annotations

LOSS_CLIP = "algorithm.loss_options {clip_low: 0.2, clip_high: 0.2}"

_NAMES: dict[str, tuple[str, ...]] = {
    "model.path": ("model_name_or_path", "model_name", "pretrain", "actor_model_path"),
    "output_dir": ("save_path", "default_local_dir", "ckpt_path"),
    "steps": ("max_steps", "total_training_steps", "max_num_steps", "num_rollout")
    + ("num_train_epochs", "total_epochs", "max_num_epochs", "num_episodes"),
    "lag": ("max_async_level", "async_level", "staleness_threshold"),
    "layout.world_size": ("n_gpus_per_node", "nnodes", "num_gpus", "gpus_per_node"),
    "layout.placement": ("vllm_mode", "hybrid_engine", "colocate_all_models"),
    "layout.tp": ("tensor_parallel_size",),
    "layout.inference_tp": ("tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    "layout.cp": ("context_parallel_size", "ulysses_sequence_parallel_size", "ring_attn_size"),
    "data.train": ("dataset_name", "train_files", "prompt_data", "train_file", "dataset"),
    "data.eval": ("val_files", "eval_dataset", "test_file"),
    "data.max_prompt_tokens": ("max_prompt_length", "prompt_max_len"),
    "batch.prompts_per_step": ("train_batch_size", "rollout_batch_size", "num_prompts_per_step")
    + ("batch_size", "gen_batch_size", "per_device_train_batch_size", "global_batch_size"),
    "batch.group_size": ("num_generations", "rollout_n", "n_samples_per_prompt", "n")
    + ("num_generations_per_prompt", "rollouts_per_example", "num_samples"),
    "batch.updates_per_step": ("ppo_mini_batch_size", "mini_batch_size", "num_minibatches")
    + ("steps_per_generation", "train_global_batch_size"),
    "batch.tokens_per_microbatch": ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size")
    + ("ppo_max_token_len_per_gpu", "max_tokens_per_gpu", "gradient_accumulation_steps")
    + ("micro_train_batch_size", "micro_batch_size", "train_micro_batch_size", "seq_len"),
    "batch.epochs": ("ppo_epochs", "num_iterations", "num_ppo_epochs", "max_epochs"),
    "sampling.max_response_tokens": ("max_completion_length", "max_response_length")
    + ("max_new_tokens", "generate_max_len", "rollout_max_response_len", "max_tokens"),
    "algorithm.advantage": ("adv_estimator", "advantage_estimator", "scale_rewards"),
    "algorithm.loss": ("loss_type", "policy_loss", "loss_mode"),
    "algorithm.aggregation": ("loss_agg_mode", "token_level_loss", "importance_sampling_level"),
    LOSS_CLIP: ("epsilon", "epsilon_low", "epsilon_high", "clip_ratio", "clip_ratio_low")
    + ("clip_ratio_high", "cliprange", "clip_range", "eps_clip", "eps_clip_high")
    + ("eps_clip_low_high", "ratio_clip_min", "ratio_clip_max", "clip_eps"),
    "algorithm.loss_options {dual_clip: 3.0}": ("clip_ratio_c", "dual_clip"),
    "algorithm.advantage_options {gamma: 1.0, lam: 0.95}": ("gamma", "lam", "lambd", "gae_lambda"),
    "algorithm.kl_coef": ("kl_loss_coef", "init_kl_coef", "kl_ctrl", "kl_penalty_coef")
    + ("reference_policy_kl_penalty", "kl_beta", "beta"),
    "algorithm.kl": ("kl_loss_type", "kl_estimator", "kl_penalty"),
    "algorithm.kl_in": ("use_kl_loss", "use_kl_in_reward"),
    "algorithm.entropy_coef": ("entropy_coeff", "entropy_loss_coef", "ent_coef"),
    "algorithm.mask_truncated": ("mask_truncated_completions", "overlong_filtering"),
    "optimizer.lr": ("learning_rate", "actor_learning_rate", "actor_lr"),
    "optimizer.schedule": ("lr_scheduler_type", "lr_scheduler", "warmup_style"),
    "optimizer.warmup_steps": ("lr_warmup_steps", "warmup_ratio", "lr_warmup_steps_ratio"),
    "optimizer.max_grad_norm": ("grad_clip", "clip_grad", "max_norm"),
    "critic.lr": ("critic_learning_rate", "critic_lr"),
    "critic.warmup_steps": ("critic_warmup",),
    "engine.gpu_memory_frac": ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "rollout.schedule.dynamic": ("dynamic_sampling", "filter_groups", "use_dynamic_sampling"),
    "rewards.functions": ("reward_funcs", "custom_reward_function", "reward_fn", "reward_function")
    + ("reward_model", "reward_pretrain", "remote_rm_url", "rm_type"),
    "rewards.weights": ("reward_weights",),
    "checkpoint.every_steps": ("save_steps", "save_freq", "save_period", "save_interval"),
    "checkpoint.resume": ("resume_from_checkpoint", "resume_mode", "load_checkpoint"),
    "evaluate.every_steps": ("eval_steps", "test_freq", "val_period", "eval_interval"),
    "model.memory.activation_checkpointing": (
        "gradient_checkpointing",
        "enable_gradient_checkpointing",
    ),
    "model.compute_dtype": ("bf16", "fp16", "torch_dtype", "precision"),
    "model.kernels.liger": ("use_liger_kernel", "use_liger"),
    "model.reference.path": ("ref_model", "reference_model"),
    "model.reference.sync_every": ("ref_model_sync_steps", "sync_ref_model"),
    "model.reference.sync_mix": ("ref_model_mixup_alpha",),
    "model.lora.rank": ("lora_r", "lora_rank"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.targets": ("lora_target_modules", "target_modules"),
    "report.tracker": ("report_to", "logger", "use_wandb"),
    "report.mlflow.experiment": ("project_name", "wandb_project"),
    "report.mlflow.run_name": ("experiment_name", "wandb_run_name"),
    "report.console.table_every": ("logging_steps", "log_interval"),
}
"""{field of ours: what TRL, verl, NeMo-RL, OpenRLHF, prime-rl or slime call it}."""

_NOTES = {
    "steps": "optimizer steps of the run: there are no epochs over the data",
    "layout.world_size": "all ranks; layout.trainer_ranks of them train",
    "batch.prompts_per_step": "prompts, each sampled batch.group_size times, over all ranks",
    "batch.updates_per_step": "into how many mini-batches, not of which size",
    "batch.tokens_per_microbatch": "tokens of one forward pass; how many follow from it",
    "algorithm.kl_coef": "of RL; under `preference` algorithm.loss_options {beta: 0.1}",
    "algorithm.kl_in": "loss or reward, with algorithm.kl_coef above 0",
    "algorithm.advantage": "dr_grpo is grpo without the division by the spread",
    "algorithm.loss": "GRPO, DAPO and Dr. GRPO are ppo_clip with an algorithm.aggregation",
    "algorithm.aggregation": "gspo is a loss",
    "optimizer.warmup_steps": "in steps",
    "rewards.functions": "my_rewards.py:function, or model:PATH",
    "report.tracker": "mlflow or none",
    "model.reference.path": "by default the policy as it begins",
}

ELSEWHERE = {
    other: f"that is {field} here" + (f" ({_NOTES[field]})" if field in _NOTES else "")
    for field, others in _NAMES.items()
    for other in others
} | {
    "model.lora.r": "PEFT's r is rank here",
    "model.lora.lora_alpha": "PEFT's lora_alpha is alpha here",
    "model.lora.target_modules": "PEFT's target_modules is targets here",
    "model.lora.init_lora_weights": "PEFT's init_lora_weights is init here",
    **dict.fromkeys(
        ("model.lora.dropout", "model.lora.lora_dropout"),
        "there is none: the logprobs before an update and in it must come out alike; leave it out",
    ),
}
"""What to do instead of fields that other programs have, by their names."""


def elsewhere(name: str) -> str:
    """Return what a field of another program is here; empty for none that is known.

    Args:
        name: with its sections or without them: `actor.optim.lr`, `learning_rate`.
    """
    return ELSEWHERE.get(name) or ELSEWHERE.get(name.rpartition(".")[2], "")


def page() -> str:
    """Return the names as a Markdown table."""
    rows = [
        f"| {', '.join(f'`{other}`' for other in others)} | `{field}` | {_NOTES.get(field, '')} |"
        for field, others in _NAMES.items()
    ]
    return "\n".join(["| elsewhere | here | |", "| --- | --- | --- |", *rows, ""])
