"""Configs of verl, TRL and NeMo-RL: every conversion with its arithmetic, and nothing is lost."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdrl.check.settings import validate
from spmdrl.config import Config, flatten, load_yaml
from spmdrl.config.files import load_fields
from spmdrl.config.other_frameworks import in_other_frameworks
from spmdrl.config.tree import settings
from spmdrl.errors import Refusal
from spmdrl.tools.commands.import_config import import_config
from spmdrl.tools.import_config.read import FRAMEWORKS, read_source
from spmdrl.tools.import_config.shell_text import commands
from spmdrl.tools.import_config.table import table_of
from spmdrl.tools.import_config.translation import CONVERSIONS, ShellValue, Theirs, translate

VERL = """\
#!/usr/bin/env bash
set -x
# a run of ours, in the form of verl's examples
MODEL=${MODEL:-my/model}
max_prompt=$((1024 * 2))
EXTRA=(
    trainer.save_freq=20
    data.shuffle=False
)
train_files="['$HOME/data/a.parquet', '$HOME/data/b.parquet']"
echo "training $MODEL"
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.train_batch_size=512 \\
    data.max_prompt_length=${max_prompt} \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    +actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.n=8 \\
    custom_reward_function.path=mine.py \\
    trainer.logger='["console","mlflow"]' \\
    trainer.experiment_name="run of $(hostname)" \\
    trainer.total_epochs=3 "${EXTRA[@]}" $@
"""

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."
PPO = "python -m verl.trainer.main_ppo"


def translated(framework: str, values: dict[str, Any], *, gpus: int = 0, rows: int = 0) -> Any:
    """Return what settings become, with the framework's defaults for the others."""
    table = table_of(framework)
    rules = importlib.import_module(f"spmdrl.tools.import_config.{framework}").RULES
    return translate(Theirs(values, table, gpus=gpus, rows=rows), table, rules)


def written(tmp_path: Path, text: str, *, name: str = "run.sh", **options: Any) -> tuple[str, Path]:
    source = tmp_path / name
    source.write_text(text)
    out = tmp_path / "mine.yaml"
    return import_config(source, out=out, **options), out


# --------------------------------------------------------------------------- whole files


def test_a_script_of_verl_becomes_a_config_that_our_checks_accept(tmp_path):
    said, out = written(tmp_path, VERL, rows=10_000)
    found = flatten(load_yaml(out))
    wanted = {
        "model.path": "my/model",
        "data.max_prompt_tokens": 2048,
        "sampling.max_response_tokens": 1024,
        "batch.prompts_per_step": 512,
        "batch.group_size": 8,
        "batch.updates_per_step": 4,  # 512 / 128 prompts
        "batch.tokens_per_microbatch": 12_288,  # 4 sequences of 2048 + 1024
        "steps": 57,  # 3 epochs of 10,000 // 512 = 19
        "algorithm.kl_coef": 0.001,  # verl's default, once use_kl_loss is on
        "algorithm.kl": "k3",
        "checkpoint.every_steps": 20,
        "data.shuffle": False,
        "rewards.functions": ("mine.py:compute_score",),
        "layout.world_size": 8,
        "layout.placement": "colocated",
        "report.trackers": ("mlflow",),
    }
    assert {name: found[name] for name in wanted} == wanted
    files = ["~/data/a.parquet", "~/data/b.parquet"]
    assert [source["path"] for source in found["data.train"]] == files
    problems = validate(load_yaml(out))
    assert [p for p in problems if "does not exist" not in p and "no such file" not in p] == []
    assert "set report.wandb.name by hand" in said and "$(hostname)" in said
    assert "0 have no counterpart, 0 unknown" in said


@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("optimizer.beta2", 0.95, 0.999),
        ("optimizer.weight_decay", 0.0, 0.01),
        ("algorithm.correction", "tis", "none"),
        ("algorithm.loss_options", {}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("evaluate.temperature", 1.0, 0.0),
        ("data.eval_size", 256, 0),
        ("model.memory.activation_checkpointing", "none", "full"),
        ("layout.inference_tp", 1, 2),
        ("batch.prompts_per_step", 64, 1024),
    ],
)
def test_their_defaults_that_differ_from_ours_are_written_out(tmp_path, name, ours, theirs):
    out = tmp_path / "mine.yaml"
    import_config(arguments="python -m verl.trainer.main_ppo data.shuffle=True", out=out)
    assert flatten(Config())[name] == ours
    text = out.read_text()
    tree: Any = yaml.safe_load(text)
    for part in name.split("."):
        tree = tree[part]
    assert tree == theirs and "# their default" in text


def test_what_has_to_be_set_by_hand_is_refused_until_it_is(tmp_path):
    said, out = written(tmp_path, VERL.replace("custom_reward_function.path=mine.py", ""))
    assert "steps: 3 epochs of an unknown number of rows: give --rows" in said
    with pytest.raises(Refusal) as refused:
        load_fields(out)
    for field in ("steps", "rewards.functions"):
        assert f"{field}: expected" in str(refused.value) and f"  {field}: " in said


def test_nothing_of_a_script_is_run_and_what_only_a_shell_knows_is_asked_for(tmp_path):
    mark = tmp_path / "mark"
    text = VERL.replace("MODEL=${MODEL:-my/model}", f"MODEL=$(touch {mark})").replace(
        "data.train_batch_size=512", "data.train_batch_size=$UNKNOWN"
    )
    said, out = written(tmp_path, text)
    assert not mark.exists()
    assert "batch.prompts_per_step: data.train_batch_size is $UNKNOWN" in said
    assert "model.path: actor_rollout_ref.model.path is $(touch" in said
    with pytest.raises(Refusal, match="batch.prompts_per_step: expected"):
        load_fields(out)


def test_what_our_checks_refuse_is_said_beside_what_has_to_be_set(tmp_path):
    text = VERL.replace("$@", f"{A}loss_agg_mode=new {R}temperature=-1")
    said, _ = written(tmp_path, text)
    asked, refused = said.split("Also refused:")
    assert "algorithm.aggregation: loss_agg_mode new has no counterpart" in asked
    assert "sampling.temperature: " in refused and "algorithm.aggregation" not in refused


def test_unknown_settings_and_those_without_counterpart_are_listed(tmp_path):
    more = (
        "actor_rollout_ref.rollout.quantization=fp8 my.new_setting=3 critic.extra=1 "
        "trainer.mystery_epochs=4"
    )
    said, out = written(tmp_path, VERL.replace("$@", more), rows=10_000)
    assert "actor_rollout_ref.rollout.quantization = 'fp8': quantised engines" in said
    assert "my.new_setting = 3: not in the table" in said
    assert "1 have no counterpart, 2 unknown" in said
    assert "# Not translated: my.new_setting = 3" in out.read_text()


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.sh", "ls -l\n", "looks like none of verl, trl, nemo_rl"),
        ("a.sh", "python -m verl.trainer.main_generation data.path=x\n", "no command that trains"),
        ("a.yaml", "policy: {model_name: a}\nppo: {seed: 1}\n", "no section grpo, only policy"),
        ("a.yaml", "defaults: there.yaml\ngrpo: {seed: 1}\nloss_fn: {}\n", "its base there.yaml"),
        ("a.sh", f"{PPO} --config-name=own data.shuffle=True\n", "begins with config own"),
        ("a.sh", "trl grpo --config own.yaml --beta 0.1\n", "begins with config own"),
        ("a.sh", "uv run run_grpo.py --config a/own.yaml grpo.seed=1 # nemo_rl\n", "config own"),
        ("a.py", "import trl\n", "no command that trains"),
        ("a.py", "from trl import (\n", "is no Python"),
    ],
)
def test_what_is_no_config_of_theirs_is_refused_by_its_name(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(Refusal, match=message):
        import_config(tmp_path / name, out=tmp_path / "mine.yaml", gpus=1)


def test_a_config_of_verl_is_merged_with_the_command_that_overrides_it(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "defaults: [ppo_megatron_trainer, _self_]\n"
        "data: {train_batch_size: 64, max_prompt_length: 100}\n"
        "actor_rollout_ref: {actor: {grad_clip: 3.0, optim: {clip_grad: 0.5}}}\n"
    )
    script = f"{PPO} --config-name own data.train_batch_size=256 ~data.image_key\n"
    _, found = read_source(tmp_path / "own.yaml", script, framework="auto")
    wanted = {"data.train_batch_size": 256, "data.max_prompt_length": 100, "data.image_key": None}
    assert found.items() >= wanted.items() and found["config_name"] == "ppo_megatron_trainer"
    # under Megatron verl reads optim.clip_grad, under FSDP grad_clip
    assert translated("verl", found).fields["optimizer.max_grad_norm"] == 0.5
    del found["config_name"]
    assert translated("verl", found).fields["optimizer.max_grad_norm"] == 3.0


def test_values_that_name_other_settings_are_replaced_or_asked_for():
    text = f"{PPO} data.max_prompt_length='${{data.max_response_length}}' data.seed='${{my.own}}'"
    _, found = read_source(None, text, framework="auto")
    assert found["data.max_prompt_length"] == 512  # verl's default of the other one
    assert "${my.own}" in translated("verl", found).asked["seed"]


def test_settings_after_a_config_of_nemo_rl_and_trl_override_it(tmp_path):
    (tmp_path / "own.yaml").write_text("grpo: {seed: 1, num_prompts_per_step: 8}\n")
    for text in ("grpo.seed=2", "uv run run_grpo.py --config own.yaml grpo.seed=2"):
        _, found = read_source(tmp_path / "own.yaml", text, framework="nemo_rl")
        assert found == {"grpo.seed": 2, "grpo.num_prompts_per_step": 8}
    (tmp_path / "own.yaml").write_text("num_generations: 4\nbeta: 0.1\n")
    text = "trl grpo --config own.yaml --num_processes 2 --beta 0.2"
    _, found = read_source(tmp_path / "own.yaml", text, framework="trl")
    assert found == {"num_generations": 4, "beta": 0.2, "num_processes": 2}


def test_a_config_of_nemo_rl_inherits_and_interpolates(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 500}\n"
        "policy:\n  model_name: a/b\n  tokenizer: {name: '${policy.model_name}'}\n"
        "  max_total_sequence_length: 512\n  train_global_batch_size: 512\n"
        "  train_micro_batch_size: 4\n"
        "  sequence_packing: {enabled: true, train_mb_tokens: "
        "'${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}'}\n"
        "  generation: {max_new_tokens: '${policy.max_total_sequence_length}', temperature: 0.7,\n"
        "    val_temperature: '${.temperature}'}\n"
    )
    text = (
        "defaults: base.yaml\ngrpo: {num_prompts_per_step: 64}\nloss_fn: {ratio_clip_max: 0.28}\n"
        "policy: {max_total_sequence_length: 4096, optimizer: {kwargs: {lr: 3e-7}}}\n"
    )
    _, out = written(tmp_path, text, name="top.yaml")
    found = yaml.safe_load(out.read_text())
    assert found["steps"] == 500 and found["model"] == {"path": "a/b"}
    assert found["batch"]["updates_per_step"] == 2  # 64 * 16 sequences / 512
    assert found["batch"]["tokens_per_microbatch"] == 16_384  # 4096 * 4
    assert found["sampling"] == {"temperature": 0.7, "max_response_tokens": 4096}
    assert found["evaluate"]["temperature"] == 0.7
    assert found["optimizer"]["lr"] == 3e-7
    assert found["algorithm"]["loss_options"] == {"clip_low": 0.2, "clip_high": 0.28}


def test_trl_is_read_as_yaml_as_a_command_and_as_python(tmp_path):
    values = {"model_name_or_path": "a/b", "learning_rate": 1e-5, "num_generations": 4}
    flags = "trl grpo --model_name_or_path a/b --learning-rate 1e-5 --num_generations=4"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(values))
    python = "args = GRPOConfig(model_name_or_path='a/b', learning_rate=1e-5, num_generations=4)"
    (tmp_path / "a.py").write_text(f"from trl import GRPOConfig\n{python}\n")
    (tmp_path / "b.py").write_text(f'"""Run it:\n\n{flags} \\\n  --use_vllm\n"""\n')
    assert read_source(tmp_path / "a.yaml", "", framework="auto") == ("trl", values)
    assert read_source(None, flags, framework="auto") == ("trl", values)
    assert read_source(tmp_path / "a.py", "", framework="auto") == ("trl", values)
    assert read_source(tmp_path / "b.py", "", framework="auto")[1] == values | {"use_vllm": True}
    launch = f"accelerate launch --num_processes 4 grpo.py --beta 0.1 {flags[9:]}"
    found = read_source(None, launch, framework="auto")[1]
    assert found["num_processes"] == 4 and found["beta"] == 0.1


def test_the_number_of_gpus_of_trl_is_asked_for():
    with pytest.raises(Refusal, match="give --gpus"):
        translated("trl", {})


# ---------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    "values, wanted",
    [
        # tokens of a forward pass: 3000 per GPU times 2 GPUs of a sequence
        (
            {
                f"{A}use_dynamic_bsz": True,
                f"{A}ppo_max_token_len_per_gpu": 3000,
                f"{A}ulysses_sequence_parallel_size": 2,
            },
            {"batch.tokens_per_microbatch": 6000, "layout.cp": 2},
        ),
        # 64 sequences over 2 * 8 GPUs are 4 on each, of 512 + 512 tokens
        (
            {f"{A}ppo_micro_batch_size": 64, "trainer.nnodes": 2},
            {"batch.tokens_per_microbatch": 4096, "layout.world_size": 16},
        ),
        ({}, {"batch.tokens_per_microbatch": 0}),
        # 0.1 of 200 steps
        (
            {"trainer.total_training_steps": 200, f"{A}optim.lr_warmup_steps_ratio": 0.1},
            {"optimizer.warmup_steps": 20, "steps": 200, "optimizer.schedule": "constant"},
        ),
        (
            {
                f"{A}optim.lr_warmup_steps": 7,
                f"{A}optim.warmup_style": "cosine",
                f"{A}optim.min_lr_ratio": 0.3,
            },
            {
                "optimizer.warmup_steps": 7,
                "optimizer.schedule": "cosine",
                "optimizer.min_lr_frac": 0.3,
            },
        ),
        ({f"{A}optim.betas": [0.8, 0.9]}, {"optimizer.beta1": 0.8, "optimizer.beta2": 0.9}),
        # Megatron's floor is a rate: 2e-7 of 1e-6
        (
            {
                "config_name": "ppo_megatron_trainer",
                f"{A}optim.lr_decay_style": "cosine",
                f"{A}optim.min_lr": 2e-7,
            },
            {"optimizer.schedule": "cosine", "optimizer.min_lr_frac": pytest.approx(0.2)},
        ),
        # clip_ratio alone has no effect in verl, whose two bounds have defaults
        (
            {f"{A}clip_ratio": 0.3, f"{A}clip_ratio_high": 0.28},
            {"algorithm.loss_options": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}},
        ),
        (
            {f"{A}clip_ratio": 0.3, f"{A}clip_ratio_low": None, f"{A}clip_ratio_high": None},
            {"algorithm.loss_options": {"clip_low": 0.3, "clip_high": 0.3, "dual_clip": 3.0}},
        ),
        # verl clips CISPO's ratio to [1 - 0.2, 1 + 0.5]
        (
            {f"{A}policy_loss.loss_mode": "cispo", f"{A}clip_ratio_high": 0.5},
            {
                "algorithm.loss": "cispo",
                "algorithm.loss_options": {"ratio_low": 0.8, "ratio_high": 1.5},
            },
        ),
        (
            {f"{A}policy_loss.loss_mode": "gspo", f"{A}loss_agg_mode": "token-mean"},
            {"algorithm.loss": "gspo_token", "algorithm.aggregation": "seq_mean_token_mean"},
        ),
        (
            {f"{A}loss_agg_mode": "seq-mean-token-sum"},
            {"algorithm.aggregation": "seq_mean_token_sum"},
        ),
        ({}, {"algorithm.kl_coef": 0.0}),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
            {
                "algorithm.kl_in": "reward",
                "algorithm.kl": "k1",
                "algorithm.kl_coef": 0.001,
                "algorithm.kl_control.target": 0.1,
                "algorithm.kl_control.horizon": 10_000,
            },
        ),
        (
            {f"{A}use_kl_loss": True, f"{A}kl_loss_type": "mse", f"{A}kl_loss_coef": 0.01},
            {"algorithm.kl": "k2", "algorithm.kl_coef": 0.01, "algorithm.kl_in": "loss"},
        ),
        (
            {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
            {"algorithm.advantage": "dr_grpo"},
        ),
        # GAE's lam is that of advantages and returns; the value's clip has another default here
        (
            {"algorithm.lam": 0.9},
            {
                "algorithm.advantage": "gae",
                "algorithm.advantage_options": {"gamma": 1.0, "lam": 0.9, "value_lam": 0.9},
                "critic.clip": 0.5,
                "critic.lr": 1e-5,
            },
        ),
        (
            {"algorithm.rollout_correction.rollout_is": "sequence"},
            {
                "algorithm.correction": "tis",
                "algorithm.correction_options": {"level": "sequence", "upper": 2.0},
            },
        ),
        (
            {f"{R}top_k": -1, f"{R}val_kwargs.top_k": -1, "trainer.test_freq": -1},
            {"sampling.top_k": 0, "evaluate.top_k": None, "evaluate.every_steps": 0},
        ),
        (
            {f"{R}val_kwargs.do_sample": True, f"{R}val_kwargs.temperature": 0.6},
            {"evaluate.temperature": 0.6},
        ),
        # greedy evaluation: top_p has no effect
        ({f"{R}val_kwargs.top_p": 0.7}, {"evaluate.temperature": 0.0, "evaluate.top_p": None}),
        # a ratio is never below 0: 1 - 10 is no bound
        (
            {f"{A}policy_loss.loss_mode": "cispo", f"{A}clip_ratio_low": 10},
            {"algorithm.loss_options": {"ratio_low": 0.0, "ratio_high": 1.2}},
        ),
        # two copies, each sharded over 4 of 8 GPUs
        ({f"{A}fsdp_config.fsdp_size": 4}, {"layout.dp_replicate": 2}),
        (
            {
                f"{A}megatron.tensor_model_parallel_size": 4,
                f"{A}megatron.expert_model_parallel_size": 8,
            },
            {"layout.tp": 4, "layout.ep": 8},
        ),
        (
            {
                "algorithm.filter_groups.enable": True,
                "algorithm.filter_groups.max_num_gen_batches": 5,
            },
            {"rollout.schedule.dynamic": 5},
        ),
        ({"data.prompt_key": "question"}, {"data.columns": {"prompt": "question"}}),
        (
            {"reward_model.enable": True, "reward_model.model.path": "rm"},
            {"rewards.functions": ["model:rm"]},
        ),
    ],
)
def test_of_verl(values, wanted):
    found = translated("verl", values, rows=4096)
    assert {name: found.fields.get(name) for name in wanted} == wanted
    assert not wanted.keys() & found.asked.keys()


@pytest.mark.parametrize(
    "values, field, why",
    [
        ({f"{A}ppo_mini_batch_size": 300}, "batch.updates_per_step", "1024 prompts is not divided"),
        ({f"{A}use_kl_loss": True, f"{A}kl_loss_type": "kl"}, "algorithm.kl", "gradient of mean 0"),
        ({f"{A}policy_loss.loss_mode": "new"}, "algorithm.loss", "loss_mode new"),
        ({"algorithm.adv_estimator": "new"}, "algorithm.advantage", "new has no counterpart"),
        ({"algorithm.rollout_correction.rollout_rs": "token"}, "algorithm.correction", "rejects"),
        ({"data.truncation": "left"}, "data.overlong_prompts", "verl cuts"),
        ({"data.train_batch_size": ShellValue("$N")}, "batch.prompts_per_step", r"\$N"),
        ({f"{A}optim.lr": ShellValue("$LR")}, "optimizer.lr", r"\$LR"),
    ],
)
def test_what_verl_has_and_we_have_not_is_asked_for(values, field, why):
    found = translated("verl", values, rows=4096)
    assert field not in found.fields
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.asked[field])


@pytest.mark.parametrize(
    "values, wanted",
    [
        # 8 * 4 GPUs * 8 forward passes = 256 completions = 32 prompts; an optimizer step takes
        # 8 * 4 * 2 = 64 of them, so 4 updates; max_steps 1000 of TRL are 250 here
        (
            {
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 8,
                "max_steps": 1000,
                "warmup_steps": 100,
                "save_steps": 200,
                "eval_strategy": "steps",
                "eval_steps": 40,
            },
            {
                "batch.prompts_per_step": 32,
                "batch.group_size": 8,
                "batch.updates_per_step": 4,
                "steps": 250,
                "optimizer.warmup_steps": 25,
                "checkpoint.every_steps": 50,
                "evaluate.every_steps": 10,
                "batch.tokens_per_microbatch": 12_288,  # 8 * (1024 + 512)
            },
        ),
        # each batch is used twice: 1000 optimizer steps are 500 batches
        (
            {"num_iterations": 2, "max_steps": 1000},
            {"steps": 500, "batch.epochs": 2, "batch.updates_per_step": 1},
        ),
        # 3 epochs of 4096 // 4 prompts, and a tenth of them
        (
            {"warmup_ratio": 0.1},
            {"steps": 3072, "optimizer.warmup_steps": 308, "batch.prompts_per_step": 4},
        ),
        (
            {"generation_batch_size": 512, "num_generations": 16},
            {"batch.prompts_per_step": 32, "batch.updates_per_step": 16},
        ),
        ({}, {"optimizer.schedule": "linear", "optimizer.min_lr_frac": 0.0, "optimizer.lr": 1e-6}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}},
            {"optimizer.schedule": "cosine", "optimizer.min_lr_frac": pytest.approx(0.1)},
        ),
        (
            {"loss_type": "dr_grpo", "scale_rewards": False, "epsilon_high": 0.28},
            {
                "algorithm.aggregation": "seq_mean_token_sum_norm",
                "algorithm.advantage": "dr_grpo",
                "algorithm.loss_options": {"clip_low": 0.2, "clip_high": 0.28},
            },
        ),
        ({"loss_type": "grpo"}, {"algorithm.aggregation": "seq_mean_token_mean"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
            {
                "algorithm.loss": "gspo",
                "algorithm.loss_options": {"clip_low": 3e-4, "clip_high": 3e-4},
            },
        ),
        # TRL cuts CISPO's ratio at epsilon_high itself
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"algorithm.loss_options": {"ratio_low": 0.0, "ratio_high": 5.0}},
        ),
        ({}, {"algorithm.correction": "none"}),
        (
            {"use_vllm": True},
            {
                "algorithm.correction": "mis",
                "algorithm.correction_options": {"level": "sequence", "lower": 0.0, "upper": 3.0},
                "layout.placement": "colocated",
            },
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {
                "algorithm.correction": "tis",
                "algorithm.correction_options": {"level": "token", "upper": 3.0},
            },
        ),
        (
            {"sync_ref_model": True, "ref_model_sync_steps": 64, "steps_per_generation": 4},
            {"model.reference.sync_every": 16, "model.reference.sync_mix": 0.6},
        ),
        ({"fp16": True}, {"model.compute_dtype": "float16", "engine.dtype": "float16"}),
        ({"epsilon": 10.0}, {"algorithm.loss_options": {"clip_low": 1.0, "clip_high": 10.0}}),
        ({"loss_type": "vespo", "use_vllm": True}, {"algorithm.correction": "none"}),
        ({"use_peft": True, "dtype": "bfloat16"}, {"model.memory.master_dtype": "float32"}),
        ({"bf16": False}, {"model.compute_dtype": "float32"}),
        ({"dtype": "bfloat16"}, {"model.memory.master_dtype": "bfloat16"}),
        (
            {"dataset_name": "a/b", "dataset_config": "c", "eval_strategy": "steps"},
            {"data.train": "a/b:c:train", "data.eval": "a/b:c:test"},
        ),
        ({"eval_strategy": False, "dataset_name": "a/b"}, {"data.eval": None}),
        (
            {"reward_funcs": ["accuracy_reward", "lib.grade"]},
            {"rewards.functions": ["spmdrl.rewards.graders:math", "lib:grade"]},
        ),
        (
            {"use_peft": True, "lora_target_modules": ["q_proj"]},
            {"model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.targets": ["q_proj"]},
        ),
        ({"use_peft": True, "load_in_4bit": True}, {"model.lora.base": "nf4"}),
        ({"load_in_4bit": True}, {"model.lora.base": None}),
    ],
)
def test_of_trl_on_four_gpus(values, wanted):
    found = translated("trl", values, gpus=4, rows=4096)
    assert {name: found.fields.get(name) for name in wanted} == wanted


def test_four_bits_of_another_kind_than_nf4_are_left_to_people():
    values = {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    found = translated("trl", values, gpus=4, rows=4096)
    assert "model.lora.base" not in found.fields
    assert "fp4: of 4 bits only nf4" in found.asked["model.lora.base"]
    found = translated("trl", {**values, "load_in_4bit": False}, gpus=4)
    assert "model.lora.base" not in found.asked


def test_a_vllm_server_of_trl_adds_gpus_that_only_people_know():
    found = translated("trl", {"use_vllm": True, "vllm_mode": "server"}, gpus=4)
    assert found.fields["layout.placement"] == "split"
    assert found.fields["layout.trainer_ranks"] == 4
    assert "4 GPUs train" in found.asked["layout.world_size"]


M = "policy.megatron_cfg."


@pytest.mark.parametrize(
    "values, wanted",
    [
        # 32 prompts * 16 / 128 sequences
        ({"policy.train_global_batch_size": 128}, {"batch.updates_per_step": 4}),
        (
            {"data.max_input_seq_length": 300, "policy.generation.max_new_tokens": 200},
            {"data.max_prompt_tokens": 300, "sampling.max_response_tokens": 200},
        ),
        # 2 epochs of 4096 // 32 prompts
        ({"grpo.max_num_epochs": 2}, {"steps": 256}),
        ({"grpo.max_num_steps": 100}, {"steps": 100}),
        ({}, {"optimizer.lr": 5e-6, "optimizer.warmup_steps": 50, "optimizer.beta2": 0.999}),
        (
            {
                f"{M}enabled": True,
                f"{M}optimizer.lr": 1e-6,
                f"{M}optimizer.min_lr": 2e-7,
                f"{M}scheduler.lr_decay_style": "cosine",
                f"{M}tensor_model_parallel_size": 2,
                "policy.dtensor_cfg.tensor_parallel_size": 8,
            },
            {
                "optimizer.lr": 1e-6,
                "optimizer.schedule": "cosine",
                "optimizer.min_lr_frac": pytest.approx(0.2),
                "optimizer.warmup_steps": 13,
                "layout.tp": 2,
            },
        ),
        # [0, 1] to [-1, 1] is 2 (R - 0.5); [1, 3] to [0, 4] is 2 (R - 1)
        (
            {"grpo.reward_scaling.enabled": True, "grpo.reward_scaling.target_min": -1.0},
            {
                "rewards.shaping.scale": 2.0,
                "rewards.shaping.shift": -0.5,
                "rewards.shaping.clamp_low": -1.0,
                "rewards.shaping.clamp_high": 1.0,
            },
        ),
        (
            {
                "grpo.reward_scaling.enabled": True,
                "grpo.reward_scaling.source_min": 1.0,
                "grpo.reward_scaling.source_max": 3.0,
                "grpo.reward_scaling.target_max": 4.0,
            },
            {"rewards.shaping.scale": 2.0, "rewards.shaping.shift": -1.0},
        ),
        # two nodes of 8, of which one node generates
        (
            {
                "cluster.gpus_per_node": 8,
                "cluster.num_nodes": 2,
                "policy.generation.colocated.enabled": False,
                "policy.generation.colocated.resources.gpus_per_node": 8,
                "policy.generation.colocated.resources.num_nodes": 1,
            },
            {"layout.world_size": 16, "layout.trainer_ranks": 8, "layout.placement": "split"},
        ),
        (
            {"grpo.async_grpo.enabled": True, "grpo.async_grpo.in_flight_weight_updates": True},
            {"lag": 1, "rollout.schedule.in_flight": True, "rollout.schedule.kv_cache": "keep"},
        ),
        ({}, {"algorithm.advantage": "grpo", "algorithm.kl_coef": 0.01, "algorithm.kl": "k3"}),
        ({"grpo.normalize_rewards": False}, {"algorithm.advantage": "rloo"}),
        (
            {"loss_fn.use_cispo": True, "loss_fn.ratio_clip_max": 4.0},
            {
                "algorithm.loss": "cispo",
                "algorithm.loss_options": {"ratio_low": 0.8, "ratio_high": 5.0},
            },
        ),
        (
            {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False},
            {"algorithm.loss": "gspo", "algorithm.aggregation": "seq_mean_token_mean"},
        ),
        (
            {
                "loss_fn.use_importance_sampling_correction": True,
                "loss_fn.truncated_importance_sampling_type": "tis",
                "loss_fn.truncated_importance_sampling_ratio": 2,
            },
            {
                "algorithm.correction": "tis",
                "algorithm.correction_options": {"level": "token", "upper": 2},
            },
        ),
    ],
)
def test_of_nemo_rl(values, wanted):
    found = translated("nemo_rl", values, rows=4096)
    assert {name: found.fields.get(name) for name in wanted} == wanted


# -------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_table_names_fields_rules_and_conversions_that_exist(framework):
    table = table_of(framework)
    rules = importlib.import_module(f"spmdrl.tools.import_config.{framework}").RULES
    assert len(table.rows) > 100 and {row.rule for row in table.rows} - {""} == rules.keys()
    for row in table.rows:
        assert set(row.fields) <= settings().keys(), row
        if not row.rule and row.how != "nothing":
            assert len(row.fields) < 2 and (not row.how or row.how in CONVERSIONS), row
            assert row.fields or row.note, f"{row.key}: neither a field nor a reason"
    keys = [row.key for row in table.rows]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_table_agrees_with_the_page_of_names(framework):
    for row in table_of(framework).rows:
        named = in_other_frameworks(row.key)
        if named and row.fields and not row.rule:
            assert row.fields[0] in named, row


# --------------------------------------------------------------------------------- shell


@pytest.mark.parametrize(
    "text, words",
    [
        ("A=1\nrun a=$A b=${A} c=${B:-2} d='$A'", ["run", "a=1", "b=1", "c=2", "d=1"]),
        ("A=3\nrun x=$((A * 1024)) y=$(((A + 1) / 2))", ["run", "x=3072", "y=2"]),
        ("A=(a=1 'b=2 3')\nrun \"${A[@]}\" z", ["run", "a=1", "b=2 3", "z"]),
        ("run a=1 \\\n  b=2  # why\n", ["run", "a=1", "b=2"]),
        ("run x=$(date +%s) y=$NONE", ["run", "x=$(date +%s)", "y=$NONE"]),
        ('A=${A:-"${B:-"${HOME}/x"}/y"}\nrun $A ${C:-${D}}', ["run", "~/x/y", "${C:-${D}}"]),
        ("A=$A/1\nrun $A", ["run", "$A/1"]),
        ("A=$((1 / 0))\nexport B=2\nC=1 run x=$B", ["run", "x=2"]),
    ],
)
def test_words_of_a_command_are_read_without_a_shell(text, words):
    assert commands(text)[-1] == words
