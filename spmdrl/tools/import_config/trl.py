"""What several settings of TRL become together; the rules of `trl.md`."""

from __future__ import annotations

import math
from typing import Any

from spmdrl.errors import Refusal
from spmdrl.tools.import_config.common import (
    batch_of,
    clips_of,
    correction_of,
    schedule_of,
    set_steps,
    steps_of,
)
from spmdrl.tools.import_config.translation import Ours, Rule, Theirs

_PROMPT_TOKENS = 1024


def _strategy(theirs: Theirs, key: str) -> str:
    """Return `no`, `steps` or `epoch`; YAML reads no as false."""
    value = theirs[key]
    return "no" if value is False else str(value)


def _processes(theirs: Theirs) -> int:
    """Return the number of processes that train."""
    found = theirs.gpus or theirs["num_processes"]
    if not found:
        raise Refusal(
            "TRL's batch is per GPU, and the source does not say how many train: give --gpus"
        )
    return found


def _completions(theirs: Theirs) -> tuple[int, int]:
    """Return the completions of one generation, and of one optimizer step, over all GPUs."""
    forward = theirs["per_device_train_batch_size"] * _processes(theirs)
    accumulated = theirs["gradient_accumulation_steps"]
    generation = theirs["generation_batch_size"]
    if generation is None:
        generation = forward * (theirs["steps_per_generation"] or accumulated)
    return generation, forward * accumulated


def _updates(theirs: Theirs) -> int:
    """Return TRL's steps, which are optimizer steps, in one step here."""
    generation, mini = _completions(theirs)
    return max(1, generation // mini) * theirs["num_iterations"]


def _batch(theirs: Theirs, ours: Ours) -> None:
    group = theirs["num_generations"]
    generation, mini = _completions(theirs)
    prompts = generation // group
    if generation % group:
        raise Refusal(f"a generation of {generation} completions is not divided by {group}")
    batch_of(ours, prompts=prompts, mini=mini, whole=generation, unit="completions")
    ours.set(batch__group_size=group, batch__epochs=theirs["num_iterations"])
    prompt = theirs["max_prompt_length"] or _PROMPT_TOKENS
    if theirs["max_prompt_length"]:
        ours.set(data__max_prompt_tokens=prompt)
    longest = prompt + theirs["max_completion_length"]
    ours.set(batch__tokens_per_microbatch=theirs["per_device_train_batch_size"] * longest)


def _steps(theirs: Theirs) -> int | None:
    if theirs["max_steps"] > 0:
        return math.ceil(theirs["max_steps"] / _updates(theirs))
    prompts = _completions(theirs)[0] // theirs["num_generations"]
    return steps_of(theirs, epochs=theirs["num_train_epochs"], prompts=prompts)


def _set_steps(theirs: Theirs, ours: Ours) -> None:
    set_steps(ours, _steps(theirs), epochs=theirs["num_train_epochs"])


def _schedule(theirs: Theirs, ours: Ours) -> None:
    kind = theirs["lr_scheduler_type"]
    options = theirs["lr_scheduler_kwargs"] or {}
    floor = options.get("min_lr_rate", options.get("min_lr", 0.0) / theirs["learning_rate"])
    schedule_of(ours, kind, min_lr_frac=floor)
    warmup = theirs["warmup_ratio"] or theirs["warmup_steps"]
    if kind == "constant":  # transformers has no warm-up there
        ours.set(optimizer__warmup_steps=0)
    elif warmup == 0 or warmup >= 1:
        ours.set(optimizer__warmup_steps=math.ceil(warmup / _updates(theirs)))
    elif (steps := _steps(theirs)) is not None:
        ours.set(optimizer__warmup_steps=math.ceil(warmup * steps))
    else:
        ours.ask("optimizer.warmup_steps", f"{warmup} of the steps, whose number needs --rows")


_TOKEN_MEAN = "token_mean"
_SEQUENCE_MEAN = "seq_mean_token_mean"


def _loss(theirs: Theirs, ours: Ours) -> None:
    kind = theirs["loss_type"]
    low = theirs["epsilon"]
    high = low if theirs["epsilon_high"] is None else theirs["epsilon_high"]
    clips = clips_of(low, high)
    by_sequence = theirs["importance_sampling_level"] == "sequence"
    clipped = "gspo" if by_sequence else "ppo_clip"
    capped = clips | ({"ratio_cap": theirs["delta"]} if theirs["delta"] and not by_sequence else {})
    sapo = {"tau_pos": theirs["sapo_temperature_pos"], "tau_neg": theirs["sapo_temperature_neg"]}
    vespo = {
        name: theirs[f"vespo_{name}"] for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    }
    found: dict[str, tuple[str, dict[str, Any], str]] = {
        "grpo": (clipped, capped, _SEQUENCE_MEAN),
        "dapo": (clipped, capped, _TOKEN_MEAN),
        "bnpo": (clipped, capped, _TOKEN_MEAN),
        "dr_grpo": (clipped, capped, "seq_mean_token_sum_norm"),
        "cispo": ("cispo", {"ratio_low": 0.0, "ratio_high": high}, _TOKEN_MEAN),
        "sapo": ("sapo", sapo, _SEQUENCE_MEAN),
        "luspo": ("luspo", clips, "seq_mean_token_sum"),
        "vespo": ("vespo", vespo, _TOKEN_MEAN),
    }
    if kind not in found:
        ours.ask("algorithm.loss", f"loss_type {kind} has no counterpart; see docs/algorithms.md")
        return
    loss, options, aggregation = found[kind]
    ours.set(
        algorithm__loss=loss, algorithm__loss_options=options, algorithm__aggregation=aggregation
    )
    if kind == "bnpo":
        ours.tell(
            "loss_type = bnpo", "a mean over all tokens here, in TRL over a GPU's micro-batch"
        )


def _advantage(theirs: Theirs, ours: Ours) -> None:
    scale = str(theirs["scale_rewards"]).lower()
    own = {
        "group": "grpo", "true": "grpo", "batch": "lite_ppo", "none": "dr_grpo", "false": "dr_grpo"
    }.get(scale)  # fmt: skip
    if theirs["multi_objective_aggregation"] == "normalize_then_sum":
        own = "gdpo"
    if own is None:
        ours.ask("algorithm.advantage", f"scale_rewards {scale} has no counterpart")
        return
    eps = {"std_eps": 1e-4} if own in ("grpo", "lite_ppo", "gdpo") else {}
    ours.set(algorithm__advantage=own, algorithm__advantage_options=eps)


def _kl(theirs: Theirs, ours: Ours) -> None:
    if theirs["use_bias_correction_kl"]:
        ours.set(algorithm__kl_options={"unbiased": True})


def _reference(theirs: Theirs, ours: Ours) -> None:
    if theirs["sync_ref_model"]:
        every = math.ceil(theirs["ref_model_sync_steps"] / _updates(theirs))
        ours.set(
            model__reference__sync_every=every,
            model__reference__sync_mix=theirs["ref_model_mixup_alpha"],
        )


def _entropy(theirs: Theirs, ours: Ours) -> None:
    if theirs["use_adaptive_entropy"]:
        ours.set(
            algorithm__entropy_control__target=theirs["entropy_target"],
            algorithm__entropy_control__delta=theirs["entropy_coef_delta"] * _updates(theirs),
            algorithm__entropy_control__lower=theirs["entropy_coef_min"],
            algorithm__entropy_control__upper=theirs["entropy_coef_max"],
        )


def _correction(theirs: Theirs, ours: Ours) -> None:
    if theirs["off_policy_mask_threshold"] is not None:
        ours.ask("algorithm.correction", "off_policy_mask_threshold is opsm with its delta here")
        return
    # vespo weighs by the ratio to the engine itself.
    weighs = theirs["loss_type"] == "vespo" or not theirs["vllm_importance_sampling_correction"]
    if weighs or not theirs["use_vllm"]:
        correction_of(ours, "none")
        return
    mode = theirs["vllm_importance_sampling_mode"]
    level, _, kind = mode.partition("_")
    upper = theirs["vllm_importance_sampling_cap"] or theirs["vllm_importance_sampling_clip_max"]
    lower = theirs["vllm_importance_sampling_clip_min"]
    if kind not in ("mask", "truncate") or upper is None or (kind == "truncate" and lower):
        ours.ask("algorithm.correction", f"{mode} from {lower} to {upper} has no counterpart")
    elif kind == "truncate":
        correction_of(ours, "tis", level=level, upper=upper)
    else:
        correction_of(ours, "mis", level=level, lower=lower or 0.0, upper=upper)


def _engine(theirs: Theirs, ours: Ours) -> None:
    ours.set(
        engine__kind="vllm", layout__placement="colocated", layout__world_size=_processes(theirs)
    )
    if not theirs["use_vllm"]:
        ours.tell("use_vllm = False", "TRL generates by transformers; here by vLLM, or engine.kind")
    elif theirs["vllm_mode"] == "server":
        trainers = _processes(theirs)
        ours.set(layout__placement="split", layout__trainer_ranks=trainers)
        ours.ask(
            "layout.world_size",
            f"{trainers} GPUs train; add those of the vLLM server, which generate here",
        )


def _model(theirs: Theirs, ours: Ours) -> None:
    path = theirs["model_name_or_path"] or theirs["model"]
    if path:
        ours.set(model__path=path)
    else:
        ours.ask("model.path", "the source names no model")
    dtype = theirs["torch_dtype"] or theirs["dtype"]
    if dtype in ("bfloat16", "float32"):
        # Frozen weights under adapters are in compute_dtype here.
        ours.set(model__memory__master_dtype="float32" if theirs["use_peft"] else dtype)
    else:
        ours.tell(f"dtype = {dtype}", "weights are float32 between updates here")
    half = "float16" if theirs["fp16"] else "bfloat16"
    is_mixed = theirs["fp16"] or theirs["bf16"] in (None, True)
    ours.set(model__compute_dtype=half if is_mixed else "float32", engine__dtype=half)


def _lora(theirs: Theirs, ours: Ours) -> None:
    if not theirs["use_peft"]:
        for key in ("load_in_4bit", "load_in_8bit"):
            if theirs[key]:
                ours.tell(key, "only weights under adapters are quantized in training (use_peft)")
        return
    targets = theirs["lora_target_modules"]
    ours.set(model__lora__rank=theirs["lora_r"], model__lora__alpha=theirs["lora_alpha"])
    if targets is None:
        ours.ask("model.lora.targets", "PEFT chooses by family, often [q_proj, v_proj]: name them")
    else:
        ours.set(model__lora__targets=targets)
    kind = theirs["bnb_4bit_quant_type"]
    if theirs["load_in_4bit"] and kind != "nf4":
        ours.ask("model.lora.base", f"bnb_4bit_quant_type is {kind}: of 4 bits only nf4 is here")
    elif theirs["load_in_4bit"]:
        ours.set(model__lora__base="nf4")
    elif theirs["load_in_8bit"]:
        ours.set(model__lora__base="int8")
    if theirs["lora_dropout"]:
        ours.tell(f"lora_dropout = {theirs['lora_dropout']}", "adapters have no dropout here")


def _data(theirs: Theirs, ours: Ours) -> None:
    name = theirs["dataset_name"]
    if not name:
        ours.ask("data.train", "the source names no dataset (docs/data.md)")
        return
    config = f":{theirs['dataset_config']}" if theirs["dataset_config"] else ""
    ours.set(data__train=f"{name}{config}:{theirs['dataset_train_split']}")
    if _strategy(theirs, "eval_strategy") != "no":
        ours.set(data__eval=f"{name}{config}:{theirs['dataset_test_split']}", data__eval_size=0)


_GRADERS = {
    "accuracy_reward": "spmdrl.rewards.graders:math",
    "think_format_reward": "spmdrl.rewards.graders:think_format",
}


def _rewards(theirs: Theirs, ours: Ours) -> None:
    names = theirs["reward_funcs"] or []
    functions = []
    if theirs["reward_model_name_or_path"]:
        functions.append(f"model:{theirs['reward_model_name_or_path']}")
    for name in names if isinstance(names, list) else [names]:
        module, _, function = name.rpartition(".")
        functions.append(_GRADERS.get(name) or (f"{module}:{function}" if module else ""))
    if functions and all(functions):
        ours.set(rewards__functions=functions)
    else:
        ours.ask("rewards.functions", "reward functions are code of the script: my_rewards.py:NAME")


def _frequencies(theirs: Theirs, ours: Ours) -> None:
    updates = _updates(theirs)

    def steps(theirs_steps: float) -> int:
        return max(1, round(theirs_steps / updates))

    if _strategy(theirs, "eval_strategy") == "steps":
        every = theirs["eval_steps"] or theirs["logging_steps"]
        ours.set(evaluate__every_steps=steps(every))
    if _strategy(theirs, "eval_strategy") != "no":
        samples = theirs["num_generations_eval"] or theirs["num_generations"]
        ours.set(evaluate__samples=samples, evaluate__temperature=theirs["temperature"])
    if _strategy(theirs, "eval_strategy") == "epoch":
        ours.ask("evaluate.every_steps", "once per epoch there, in steps here")
    ours.set(checkpoint__every_steps=0)
    if _strategy(theirs, "save_strategy") == "steps":
        ours.set(checkpoint__every_steps=steps(theirs["save_steps"]))
    elif _strategy(theirs, "save_strategy") == "epoch":
        ours.ask("checkpoint.every_steps", "once per epoch there, in steps here")
    if theirs["logging_steps"] >= 1:
        ours.set(report__console__table_every=steps(theirs["logging_steps"]))


RULES: dict[str, Rule] = {
    "batch": _batch,
    "steps": _set_steps,
    "schedule": _schedule,
    "loss": _loss,
    "advantage": _advantage,
    "kl": _kl,
    "reference": _reference,
    "entropy": _entropy,
    "correction": _correction,
    "engine": _engine,
    "model": _model,
    "lora": _lora,
    "data": _data,
    "rewards": _rewards,
    "frequencies": _frequencies,
}
