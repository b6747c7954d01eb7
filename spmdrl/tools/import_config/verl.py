"""What several settings of verl become together; the rules of `verl.md`."""

from __future__ import annotations

from typing import Any

from spmdrl.tools.import_config.common import (
    batch_of,
    clips_of,
    correction_of,
    schedule_of,
    set_kl,
    set_steps,
    steps_of,
)
from spmdrl.tools.import_config.translation import Ours, Rule, Theirs

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"


def _batch(theirs: Theirs, ours: Ours) -> None:
    prompts = theirs["data.train_batch_size"]
    batch_of(ours, prompts=prompts, mini=theirs[f"{_ACTOR}.ppo_mini_batch_size"], unit="prompts")
    ours.set(
        batch__group_size=theirs[f"{_ROLLOUT}.n"], batch__epochs=theirs[f"{_ACTOR}.ppo_epochs"]
    )


def _microbatch(theirs: Theirs, ours: Ours) -> None:
    longest = theirs["data.max_prompt_length"] + theirs["data.max_response_length"]
    sequences = theirs[f"{_ACTOR}.ppo_micro_batch_size_per_gpu"]
    total = theirs[f"{_ACTOR}.ppo_micro_batch_size"]
    ulysses = theirs[f"{_ACTOR}.ulysses_sequence_parallel_size"]
    if theirs[f"{_ACTOR}.use_dynamic_bsz"]:
        tokens = theirs[f"{_ACTOR}.ppo_max_token_len_per_gpu"] * ulysses
        ours.set(batch__tokens_per_microbatch=max(tokens, longest))
    elif sequences:
        ours.set(batch__tokens_per_microbatch=sequences * longest)
    elif total:
        ranks = _gpus(theirs) // ulysses
        ours.set(batch__tokens_per_microbatch=max(1, total // ranks) * longest)
    else:
        ours.set(batch__tokens_per_microbatch=0)


def _gpus(theirs: Theirs) -> int:
    return theirs.gpus or theirs["trainer.nnodes"] * theirs["trainer.n_gpus_per_node"]


def _steps(theirs: Theirs) -> int | None:
    return theirs["trainer.total_training_steps"] or steps_of(
        theirs, epochs=theirs["trainer.total_epochs"], prompts=theirs["data.train_batch_size"]
    )


def _set_steps(theirs: Theirs, ours: Ours) -> None:
    set_steps(ours, _steps(theirs), epochs=theirs["trainer.total_epochs"])


def _has_megatron(theirs: Theirs) -> bool:
    return "megatron" in f"{theirs['config_name']} {theirs.values.get(f'{_ACTOR}.strategy')}"


def _clip(theirs: Theirs, ours: Ours) -> None:
    key = "optim.clip_grad" if _has_megatron(theirs) else "grad_clip"
    ours.set(optimizer__max_grad_norm=theirs[f"{_ACTOR}.{key}"])


def _schedule(theirs: Theirs, ours: Ours) -> None:
    optim = f"{_ACTOR}.optim"
    floor = theirs[f"{optim}.min_lr_ratio"]
    if _has_megatron(theirs):
        floor = theirs[f"{optim}.min_lr"] / theirs[f"{optim}.lr"]
    kind = (
        theirs[f"{optim}.warmup_style"]
        or theirs[f"{optim}.lr_decay_style"]
        or theirs[f"{optim}.lr_scheduler_type"]
    )
    schedule_of(ours, kind, min_lr_frac=floor)
    warmup = theirs[f"{optim}.lr_warmup_steps"]
    ratio = theirs[f"{optim}.lr_warmup_steps_ratio"]
    if warmup is not None and warmup >= 0:
        ours.set(optimizer__warmup_steps=warmup)
    elif not ratio:
        ours.set(optimizer__warmup_steps=0)
    elif (steps := _steps(theirs)) is not None:
        ours.set(optimizer__warmup_steps=int(ratio * steps))
    else:
        ours.ask("optimizer.warmup_steps", f"{ratio} of the steps, whose number needs --rows")


def _betas(theirs: Theirs, ours: Ours) -> None:
    beta1, beta2 = theirs[f"{_ACTOR}.optim.betas"]
    ours.set(optimizer__beta1=beta1, optimizer__beta2=beta2)


_ADVANTAGES = {
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "optimal_token_baseline": "otb",
}


def _advantage(theirs: Theirs, ours: Ours) -> None:
    name = theirs["algorithm.adv_estimator"]
    options: dict[str, Any] = {}
    if name == "gae":
        own = "gae"
        options = {"gamma": theirs["algorithm.gamma"], "lam": theirs["algorithm.lam"]}
        options["value_lam"] = theirs["algorithm.lam"]
        ours.tell("algorithm.adv_estimator = gae", "verl whitens the advantages of a batch")
    elif name == "grpo":
        own = "grpo" if theirs["algorithm.norm_adv_by_std_in_grpo"] else "dr_grpo"
    elif name == "grpo_passk":
        own = "pass_at_k"
        options = {"scale": "std" if theirs["algorithm.norm_adv_by_std_in_grpo"] else "none"}
    elif name in _ADVANTAGES:
        own = _ADVANTAGES[name]
    else:
        why = f"{name} has no counterpart; see docs/algorithms.md"
        if name == "reinforce_plus_plus":
            why = "verl whitens the rewards of a batch: nearest is reinforce_plus_plus_baseline"
        ours.ask("algorithm.advantage", why)
        return
    ours.set(algorithm__advantage=own, algorithm__advantage_options=options)


_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


def _loss(theirs: Theirs, ours: Ours) -> None:
    kind = theirs[f"{_ACTOR}.policy_loss.loss_mode"]
    low, high = (
        bound
        if (bound := theirs[f"{_ACTOR}.clip_ratio_{side}"]) is not None
        else theirs[f"{_ACTOR}.clip_ratio"]
        for side in ("low", "high")
    )
    if theirs.is_set(f"{_ACTOR}.clip_ratio") and theirs[f"{_ACTOR}.clip_ratio"] not in (low, high):
        ours.tell(
            f"{_ACTOR}.clip_ratio = {theirs[f'{_ACTOR}.clip_ratio']}",
            f"verl takes clip_ratio_low {low} and clip_ratio_high {high} instead; so it is here",
        )
    cov = f"{_ACTOR}.policy_loss"
    clips = clips_of(low, high)
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "vanilla": ("ppo_clip", clips | {"dual_clip": theirs[f"{_ACTOR}.clip_ratio_c"]}),
        "gspo": ("gspo_token", clips),
        "geo_mean": ("gmpo", {"clip_low": low, "clip_high": high}),
        "gpg": ("reinforce", {}),
        "cispo": ("cispo", {"ratio_low": max(0.0, 1 - low), "ratio_high": 1 + high}),
        "sapo": (
            "sapo",
            {"tau_pos": theirs[f"{_ACTOR}.tau_pos"], "tau_neg": theirs[f"{_ACTOR}.tau_neg"]},
        ),
        "clip_cov": (
            "clip_cov",
            clips
            | {
                "select_frac": theirs[f"{cov}.clip_cov_ratio"],
                "cov_low": theirs[f"{cov}.clip_cov_lb"],
                "cov_high": theirs[f"{cov}.clip_cov_ub"],
            },
        ),
        "kl_cov": (
            "kl_cov",
            {"select_frac": theirs[f"{cov}.kl_cov_ratio"], "kl_coef": theirs[f"{cov}.ppo_kl_coef"]},
        ),
    }
    if kind not in found:
        ours.ask("algorithm.loss", f"loss_mode {kind} has no counterpart; see docs/algorithms.md")
        return
    loss, options = found[kind]
    mode = theirs[f"{_ACTOR}.loss_agg_mode"]
    # verl's code of these three does not read loss_agg_mode.
    own = "seq_mean_token_mean" if kind in ("gspo", "geo_mean", "sapo") else _AGGREGATIONS.get(mode)
    ours.set(algorithm__loss=loss, algorithm__loss_options=options)
    if own is None:
        ours.ask("algorithm.aggregation", f"loss_agg_mode {mode} has no counterpart")
        return
    ours.set(algorithm__aggregation=own)
    if own == "seq_mean_token_sum_norm":
        scale = theirs[f"{_ACTOR}.loss_scale_factor"] or theirs["data.max_response_length"]
        ours.tell(
            f"{_ACTOR}.loss_agg_mode = {mode}",
            f"verl divides a micro-batch's sum by {scale} alone, so that its size scales the loss; "
            "here the sum is divided by max_response_tokens and the number of sequences",
        )


_KLS = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    "low_var_kl+": "k2", "k3+": "k2",
}  # fmt: skip
"""k3+ has the gradient of k2."""


def _kl(theirs: Theirs, ours: Ours) -> None:
    in_loss = theirs[f"{_ACTOR}.use_kl_loss"]
    in_reward = theirs["algorithm.use_kl_in_reward"]
    if in_loss and in_reward:
        ours.ask("algorithm.kl_coef", "verl has a KL in loss and reward; here it is in one")
    elif in_loss:
        kind = theirs[f"{_ACTOR}.kl_loss_type"]
        set_kl(ours, theirs[f"{_ACTOR}.kl_loss_coef"], _KLS.get(kind), place="loss", theirs=kind)
    elif in_reward:
        kind = theirs["algorithm.kl_penalty"]
        coef = theirs["algorithm.kl_ctrl.kl_coef"]
        set_kl(ours, coef, _KLS.get(kind), place="reward", theirs=kind)
        if theirs["algorithm.kl_ctrl.type"] == "adaptive":
            ours.set(
                algorithm__kl_control__target=theirs["algorithm.kl_ctrl.target_kl"],
                algorithm__kl_control__horizon=theirs["algorithm.kl_ctrl.horizon"],
            )
    else:
        ours.set(algorithm__kl_coef=0.0)


def _correction(theirs: Theirs, ours: Ours) -> None:
    if theirs[f"{_CORRECTION}.rollout_rs"] is not None:
        kind = theirs[f"{_CORRECTION}.rollout_rs"]
        ours.ask("algorithm.correction", f"rollout_rs {kind} rejects: see mis, sequence_mask, veto")
        return
    level = theirs[f"{_CORRECTION}.rollout_is"]
    correction_of(
        ours,
        "tis" if level else "none",
        level=level,
        upper=theirs[f"{_CORRECTION}.rollout_is_threshold"],
    )


def _dynamic(theirs: Theirs, ours: Ours) -> None:
    if theirs["algorithm.filter_groups.enable"]:
        most = theirs["algorithm.filter_groups.max_num_gen_batches"]
        ours.set(rollout__schedule__dynamic=max(2, most) if most > 0 else 100)


def _layout(theirs: Theirs, ours: Ours) -> None:
    megatron = f"{_ACTOR}.megatron"
    cp = (
        theirs[f"{_ACTOR}.ulysses_sequence_parallel_size"]
        * theirs[f"{megatron}.context_parallel_size"]
    )
    tp = theirs[f"{megatron}.tensor_model_parallel_size"]
    ours.set(
        layout__placement="colocated",
        layout__inference_tp=theirs[f"{_ROLLOUT}.tensor_model_parallel_size"],
        layout__cp=cp,
        layout__tp=tp,
        layout__ep=theirs[f"{megatron}.expert_model_parallel_size"],
    )
    stages = theirs[f"{megatron}.pipeline_model_parallel_size"]
    if stages != 1:
        ours.tell(
            f"{megatron}.pipeline_model_parallel_size = {stages}",
            f"no pipeline here: its GPUs shard the weights by FSDP; tp is {tp}",
        )
    gpus = _gpus(theirs)
    shards = theirs[f"{_ACTOR}.fsdp_config.fsdp_size"]
    ours.set(layout__world_size=gpus)
    if shards > 0:
        ours.set(layout__dp_replicate=max(1, gpus // shards))


def _lora(theirs: Theirs, ours: Ours) -> None:
    model = "actor_rollout_ref.model"
    by_megatron = theirs[f"{model}.lora.rank"]
    rank = by_megatron or theirs[f"{model}.lora_rank"]
    if rank:
        alpha = theirs[f"{model}.lora.alpha" if by_megatron else f"{model}.lora_alpha"]
        targets = theirs[f"{model}.target_modules"]
        ours.set(model__lora__rank=rank, model__lora__alpha=alpha, model__lora__targets=targets)


def _offload(theirs: Theirs, ours: Ours) -> None:
    fsdp = f"{_ACTOR}.fsdp_config"
    activations = theirs["actor_rollout_ref.model.enable_activation_offload"]
    if theirs[f"{fsdp}.offload_policy"]:
        ours.set(model__memory__offload="parameters")
    elif theirs[f"{fsdp}.optimizer_offload"]:
        ours.set(model__memory__offload="all" if activations else "optimizer")
    elif activations:
        ours.set(model__memory__offload="activations")
    if theirs[f"{fsdp}.param_offload"] and not theirs[f"{fsdp}.offload_policy"]:
        ours.tell(f"{fsdp}.param_offload = True", "weights stay on the GPU while engines generate")


def _vision(theirs: Theirs, ours: Ours) -> None:
    ours.set(model__train="language" if theirs[f"{_ACTOR}.freeze_vision_tower"] else "all")


def _routes(theirs: Theirs, ours: Ours) -> None:
    mode = theirs[f"{_ACTOR}.router_replay.mode"]
    from_engine = theirs[f"{_ROLLOUT}.enable_rollout_routing_replay"] or mode == "R3"
    ours.set(model__moe__replay=from_engine)
    if mode == "R2":
        ours.tell("router_replay.mode = R2", "here the engine's routes are replayed, which is R3")


def _files(theirs: Theirs, ours: Ours) -> None:
    names = {"prompt": theirs["data.prompt_key"], "images": theirs["data.image_key"]}
    ours.set(data__columns={own: other for own, other in names.items() if own != other})
    for key, field in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = theirs[key]
        files = files if isinstance(files, list) else [files]
        ours.fields[field] = files[0] if len(files) == 1 else files


def _overlong(theirs: Theirs, ours: Ours) -> None:
    drops = theirs["data.filter_overlong_prompts"]
    ours.set(data__overlong_prompts="drop" if drops else "error")
    cut = theirs["data.truncation"]
    if cut != "error" and not drops:
        ours.ask("data.overlong_prompts", f"verl cuts long prompts ({cut}); here error or drop")


def _rewards(theirs: Theirs, ours: Ours) -> None:
    functions = []
    path = theirs["custom_reward_function.path"]
    if path:
        functions.append(f"{path}:{theirs['custom_reward_function.name']}")
    if theirs["reward_model.enable"]:
        functions.append(f"model:{theirs['reward_model.model.path']}")
    if functions:
        ours.set(rewards__functions=functions)
    else:
        ours.ask(
            "rewards.functions",
            "verl scores by the row's data_source: name the grader, such as "
            "spmdrl.rewards.graders:math for gsm8k and MATH",
        )


def _overlong_buffer(theirs: Theirs, ours: Ours) -> None:
    for own in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if theirs[f"{own}.enable"]:
            ours.set(
                rewards__shaping__overlong_tokens=theirs[f"{own}.len"],
                rewards__shaping__overlong_penalty=theirs[f"{own}.penalty_factor"],
            )


def _evaluate(theirs: Theirs, ours: Ours) -> None:
    ours.set(evaluate__temperature=0.0)
    if theirs[f"{_ROLLOUT}.val_kwargs.do_sample"]:
        ours.set(
            evaluate__temperature=theirs[f"{_ROLLOUT}.val_kwargs.temperature"],
            evaluate__top_p=theirs[f"{_ROLLOUT}.val_kwargs.top_p"],
            evaluate__top_k=max(0, theirs[f"{_ROLLOUT}.val_kwargs.top_k"]),
        )


def _resume(theirs: Theirs, ours: Ours) -> None:
    mode = theirs["trainer.resume_mode"]
    path = theirs["trainer.resume_from_path"]
    ours.set(checkpoint__resume=path if mode == "resume_path" and path else "auto")
    if mode == "disable":
        ours.set(checkpoint__resume="never")


def _critic(theirs: Theirs, ours: Ours) -> None:
    if theirs["algorithm.adv_estimator"] != "gae":
        return
    ours.set(
        critic__lr=theirs["critic.optim.lr"],
        critic__path=theirs["critic.model.path"],
        critic__epochs=theirs["critic.ppo_epochs"] or 0,
        critic__clip=theirs["critic.cliprange_value"],
        critic__warmup_steps=theirs["trainer.critic_warmup"],
    )


def _engine(theirs: Theirs, ours: Ours) -> None:
    name = theirs[f"{_ROLLOUT}.name"]
    ours.set(engine__kind="transformers" if name == "hf" else "vllm")
    if name not in ("vllm", "hf"):
        ours.tell(f"{_ROLLOUT}.name = {name}", "the engine is vLLM here")
    if theirs[f"{_ROLLOUT}.enforce_eager"]:
        ours.set(engine__options={"enforce_eager": True})


RULES: dict[str, Rule] = {
    "batch": _batch,
    "microbatch": _microbatch,
    "steps": _set_steps,
    "clip": _clip,
    "schedule": _schedule,
    "betas": _betas,
    "advantage": _advantage,
    "loss": _loss,
    "kl": _kl,
    "correction": _correction,
    "dynamic": _dynamic,
    "layout": _layout,
    "lora": _lora,
    "offload": _offload,
    "vision": _vision,
    "routes": _routes,
    "files": _files,
    "overlong": _overlong,
    "rewards": _rewards,
    "overlong_buffer": _overlong_buffer,
    "evaluate": _evaluate,
    "resume": _resume,
    "critic": _critic,
    "engine": _engine,
}
