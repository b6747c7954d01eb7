"""The config: strict reading, overrides, all problems at once, faithful dumping."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from spmdrl import config
from spmdrl.check.settings import parse, validate
from spmdrl.config import Config, KernelsSettings, LayoutSettings, MemorySettings


def good(**changes) -> Config:
    base = Config(
        model=config.ModelSettings(path="m"),
        data=config.DataSettings(train="task:addition", size=10),
    )
    return dataclasses.replace(base, **changes)


def write(tmp_path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_a_good_config_has_no_problems():
    assert validate(good()) == []


def test_fields_stay_under_one_hundred_and_each_has_a_docstring():
    assert len(config.flatten(Config())) < 100
    from tyro._docstrings import get_field_docstring

    def walk(cls):
        for f in dataclasses.fields(cls):
            if f.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(
                f.default_factory
            ):
                walk(f.default_factory)
            else:
                assert get_field_docstring(cls, f.name, ()), f"{cls.__name__}.{f.name}"

    walk(Config)


def test_dump_reads_back_equal(tmp_path):
    cfg = good(optimizer=config.OptimizerSettings(lr=3e-7, options={"eps": 1e-7}))
    assert config.load_yaml(write(tmp_path, config.dump(cfg))) == cfg


def test_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="optimizer.learning_rate: unknown key; known here"):
        config.load_yaml(write(tmp_path, "optimizer: {learning_rate: 1}"))
    with pytest.raises(ValueError, match="did you mean group_size"):
        config.load_yaml(write(tmp_path, "batch: {groupsize: 4}"))
    with pytest.raises(ValueError, match="did you mean batch.group_size"):
        config.load_yaml(write(tmp_path, "group_size: 4"))


def test_all_problems_of_a_file_are_reported_at_once(tmp_path):
    text = "steps: many\nlayout: {placement: splitt}\nbatch: {group_size: 2.5}\nseeed: 1\n"
    with pytest.raises(ValueError) as error:
        config.load_yaml(write(tmp_path, text))
    for part in (
        "4 problems",
        "steps: expected int, got 'many'",
        "did you mean split?",
        "batch.group_size: expected int, got 2.5",
        "did you mean seed?",
    ):
        assert part in str(error.value)


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    assert config.load_yaml(write(tmp_path, "optimizer: {lr: 1e-6}")).optimizer.lr == 1e-6
    with pytest.raises(ValueError, match="expected a number, got 'fast'"):
        config.load_yaml(write(tmp_path, "optimizer: {lr: fast}"))


def test_missing_file_names_a_near_one(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ValueError, match="does not exist; did you mean .*c.yaml"):
        config.load_yaml(tmp_path / "cc.yaml")


def test_flags_override_the_file(tmp_path):
    path = write(tmp_path, config.dump(good(steps=5)))
    cfg = parse(["--config", str(path), "--steps", "7", "--batch.group-size", "3"])
    assert (cfg.steps, cfg.batch.group_size, cfg.data.size) == (7, 3, 10)


def test_method_options_are_given_as_one_mapping(tmp_path):
    own = config.AlgorithmSettings(loss_options={"clip_low": 0.1})
    path = write(tmp_path, config.dump(good(algorithm=own)))
    cfg = parse(
        [
            "--config",
            str(path),
            "--algorithm.loss",
            "cispo",
            "--algorithm.loss-options",
            "{ratio_high: 4.0}",
        ]
    )
    assert cfg.algorithm.loss_options == {"ratio_high": 4.0}
    assert parse(["--config", str(path)]).algorithm.loss_options == {"clip_low": 0.1}


def test_impossible_layouts_spell_out_the_arithmetic():
    def layout_problems(**fields):
        return "\n".join(validate(good(layout=LayoutSettings(**fields))))

    assert "leaves 0 ranks to generate" in layout_problems(world_size=2, trainer_ranks=2)
    assert "3 trainer ranks do not divide by dp_replicate 1 * cp 1 * tp 2 = 2" in layout_problems(
        world_size=4, trainer_ranks=3, tp=2
    )
    assert "3 inference ranks / inference_tp 2 = 1.5 replicas" in layout_problems(
        world_size=5, trainer_ranks=2, inference_tp=2
    )
    assert "must be a multiple of inference_tp 2" in layout_problems(
        world_size=5, trainer_ranks=3, inference_tp=2
    )
    assert layout_problems(world_size=4, trainer_ranks=2, inference_tp=2, tp=2) == ""


def test_senseless_combinations_are_refused():
    def problems(**changes):
        return "\n".join(validate(good(**changes)))

    assert "every advantage would be 0" in problems(batch=config.BatchSettings(group_size=1))
    assert "one sequence may not fit" in problems(
        batch=config.BatchSettings(tokens_per_microbatch=64)
    )
    assert "data.eval is empty" in problems(evaluate=config.EvaluateSettings(every_steps=2))
    assert "has no size of its own" in problems(data=config.DataSettings(train="task:addition"))
    assert "name at least one reward function" in problems(
        data=config.DataSettings(train="x.jsonl")
    )
    assert "rl `split` or `colocated`" in problems(layout=LayoutSettings(placement="offline"))


def test_combinations_of_methods_are_refused():
    def problems(layout=LayoutSettings(), model=config.ModelSettings(path="m"), **algorithm):
        changed = good(algorithm=config.AlgorithmSettings(**algorithm), layout=layout, model=model)
        return "\n".join(validate(changed))

    assert "the engine would be corrected for twice" in problems(loss="dppo_tv")
    assert problems(loss="dppo_tv", correction="none") == ""
    assert "expected gradient of 0" in problems(kl="k1", kl_coef=0.1)
    assert "take seq_mean_token_mean" in problems(loss="gspo")
    assert problems(loss="gspo", aggregation="seq_mean_token_mean") == ""
    assert "name an environment" in problems(advantage="gigpo")
    assert problems(kl="k1", kl_coef=0.1, kl_in="reward") == ""
    assert "model.teacher: is empty" in problems(advantage="distill")
    for advantage in ("prime", "distill"):
        assert "has no place for a KL in the reward" in problems(
            advantage=advantage, kl="k1", kl_coef=0.1, kl_in="reward"
        )
    assert problems(advantage="otb", kl="k1", kl_coef=0.1, kl_in="reward") == ""
    offline = LayoutSettings(placement="offline")
    assert "model.teacher: is empty" in problems(
        layout=offline, objective="distill", loss="divergence"
    )
    assert "which is a method of the kind loss" in problems(
        layout=offline, objective="preference", loss="ppo_clip"
    )


def test_coefficients_that_move_are_checked():
    def problems(**algorithm):
        placement = "colocated" if algorithm.get("objective", "rl") == "rl" else "offline"
        return "\n".join(
            validate(
                good(
                    algorithm=config.AlgorithmSettings(**algorithm),
                    layout=LayoutSettings(placement=placement),
                    model=config.ModelSettings(path="m", teacher="t"),
                )
            )
        )

    def entropy(coef=0.0, **options):
        return problems(entropy_coef=coef, entropy_options=options)

    def kl(coef=0.1, **options):
        return problems(kl_coef=coef, kl_options=options)

    assert entropy(keep_frac=0.2, target=0.3, delta=0.005) == ""
    assert entropy(0.1, target=1, delta=0.1, lower=0.05, upper=0.2) == ""
    place = "algorithm.entropy_options."
    assert entropy(keep_fra=0.2) == (
        f"{place}keep_fra: no such option; did you mean keep_frac?; "
        "known: keep_frac, target, delta, lower, upper"
    )
    assert entropy(keep_frac="all") == f"{place}keep_frac: expected a number, got 'all'"
    assert entropy(keep_frac=1.5).startswith(f"{place}keep_frac: a share, must be above 0")
    assert entropy(target=0.3).startswith(f"{place}delta: is missing")
    assert entropy(upper=0.3).startswith(f"{place}target: is missing")
    assert entropy(target=0.3, delta=0).startswith(f"{place}delta: must be above 0, got 0")
    assert "entropy_coef starts at 0.5, outside [0.0, 0.2]" in entropy(
        0.5, target=0.3, delta=0.1, upper=0.2
    )
    place = "algorithm.kl_options."
    assert kl(target=0.02, horizon=10000) == kl(target=0.02, horizon=1e4, unbiased=True) == ""
    assert kl(target=0.02).startswith(f"{place}horizon: is missing")
    assert kl(horizon=9.0).startswith(f"{place}target: is missing")
    assert kl(target="low", horizon=9).startswith(f"{place}target: expected a number, got 'low'")
    assert kl(0.0, target=0.02, horizon=1e4).startswith(
        f"{place}target: 0.02 with algorithm.kl_coef 0.0"
    )
    assert kl(target=0.02, horizon=10).startswith(
        f"{place}horizon: 10 is too short for 512 samples a step"
    )
    for objective, loss in (("sft", "sft"), ("distill", "divergence"), ("preference", "dpo")):
        found = problems(
            objective=objective,
            loss=loss,
            entropy_options={"keep_frac": 0.2},
            kl_options={"target": 0.1},
        )
        assert "algorithm.entropy_options.keep_frac: has no effect under the objective" in found
        assert "algorithm.kl_options.target: has no effect under the objective" in found


def test_method_and_option_names_are_checked():
    wrong = config.AlgorithmSettings(advantage="grop", loss_options={"clip_lo": 0.1})
    text = "\n".join(validate(good(algorithm=wrong)))
    assert "grpo" in text and "clip_low" in text


def test_options_of_the_optimizer_are_checked(tmp_path):
    def problems(text: str) -> str:
        return "\n".join(
            validate(
                good(
                    optimizer=config.load_yaml(
                        write(tmp_path, f"optimizer: {{options: {text}}}")
                    ).optimizer
                )
            )
        )

    assert problems("{beta1: 0.8, beta2: 0, eps: 1e-8}") == ""  # to YAML, 1e-8 is a text
    assert "options.beta3: unknown option of AdamW; did you mean" in problems("{beta3: 1}")
    assert "optimizer.options.eps: must be above 0, got 0" in problems("{eps: 0}")
    assert "optimizer.options.beta2: must be in [0, 1), got 1.0" in problems("{beta2: 1.0}")
    assert "optimizer.options.beta1: expected a number, got 'high'" in problems("{beta1: high}")
    assert "optimizer.options.beta1: expected a number, got True" in problems("{beta1: true}")


def test_options_of_the_schedule_are_checked():
    def problems(**options):
        return "\n".join(
            validate(good(optimizer=config.OptimizerSettings(schedule_options=options)))
        )

    assert problems(warmup_steps=10, min_lr_frac=0) == problems() == ""
    place = "optimizer.schedule_options."
    assert problems(warmup=10) == f"{place}warmup: unknown option; did you mean warmup_steps?"
    assert problems(warmup_steps=-1) == (
        f"{place}warmup_steps: expected a number of steps, 0 or more, got -1"
    )
    assert "got 0.5" in problems(warmup_steps=0.5) and "got True" in problems(warmup_steps=True)
    assert problems(min_lr_frac=2) == f"{place}min_lr_frac: expected a fraction from 0 to 1, got 2"


def test_the_transformers_engine_is_one_rank_and_takes_no_options_of_vllm():
    cfg = good(
        layout=config.LayoutSettings(world_size=4, trainer_ranks=2, inference_tp=2),
        engine=config.EngineSettings(kind="transformers", options={"enforce_eager": True}),
    )
    tp, options = validate(cfg)
    assert tp.startswith(
        "layout.inference_tp: 2 with engine.kind transformers, whose engine holds "
        "the whole model on one rank"
    )
    assert options.startswith("engine.options.enforce_eager: is an argument of vLLM's engine")


def test_options_of_the_engine_are_names_of_vllm_that_are_not_set_here():
    from spmdrl.check.options import ENGINE_ARGUMENTS, engine_argument_names

    from spmdrl.engine.vllm import _own_arguments

    def problems(**options):
        return "\n".join(validate(good(engine=config.EngineSettings(options=options))))

    assert problems(enforce_eager=True, enable_prefix_caching=False) == ""
    assert (
        "engine.options.enforce_eagr: the vLLM that is installed has no such engine argument; "
        "did you mean enforce_eager?" in problems(enforce_eagr=True)
    )
    assert "engine.options.max_num_seqs: is set by engine.max_num_seqs" in problems(max_num_seqs=4)
    assert "engine.options.load_format: cannot be changed" in problems(load_format="dummy")
    known = config.flatten(Config())
    for field in filter(None, ENGINE_ARGUMENTS.values()):
        assert all(part in known for part in field.split(" + ")), field
    own = {*_own_arguments(good(), on_cpu=True), "distributed_executor_backend"}
    assert own <= ENGINE_ARGUMENTS.keys() <= set(engine_argument_names())


def test_importing_the_config_is_light():
    code = (
        "import sys, spmdrl.config; bad = [m for m in ('torch.distributed', 'torch', 'vllm') "
        "if m in sys.modules]; sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_old_logprob_pass_is_made_only_for_methods_that_need_one():
    from spmdrl.train.objectives.rl import needed_columns

    def columns(updates=2, **algorithm):
        return needed_columns(
            good(
                algorithm=config.AlgorithmSettings(**algorithm),
                batch=config.BatchSettings(updates_per_step=updates),
            )
        )

    assert columns(updates=1) == set() and columns() == {"old_logprobs"}
    assert columns(loss="dppo_tv", correction="none") == set()
    assert columns(updates=1, loss="kl_cov") == {"old_logprobs"}
    assert columns(updates=1, kl_coef=0.1) == {"ref_logprobs"}
    assert columns(updates=1, kl_coef=0.1, kl_in="reward") == {"ref_logprobs", "old_logprobs"}
    assert columns(updates=1, advantage="gae") == {"values"}
    assert columns(updates=1, advantage="otb") == {"square_probs", "old_logprobs"}
    assert columns(updates=1, advantage="prime") == {"prm_logprobs", "ref_logprobs"}
    assert columns(updates=1, entropy_options={"keep_frac": 0.2}) == {"old_logprobs"}


def test_options_of_kernels_and_memory_are_checked():
    def problems(**fields):
        return "\n".join(validate(good(model=config.ModelSettings(path="m", **fields))))

    assert problems(kernels=KernelsSettings(attention="flash", liger=False, compile=True)) == ""
    assert (
        problems(memory=MemorySettings(activation_checkpointing="full", head_chunk_tokens=100))
        == ""
    )
    assert problems(kernels=KernelsSettings(atention="flash")) == (
        "model.kernels.atention: unknown option; did you mean attention?"
    )
    assert problems(kernels=KernelsSettings(attention="sdpa")) == (
        "model.kernels.attention: expected one of auto, varlen, flash, padded; got 'sdpa'"
    )
    assert "got True" in problems(memory=MemorySettings(activation_checkpointing=True))
    assert "got -1" in problems(memory=MemorySettings(head_chunk_tokens=-1))
