"""The config: strict reading, overrides, all problems at once, faithful dumping."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from spmdrl import config
from spmdrl.config import Config, Layout


def good(**changes) -> Config:
    base = Config(model=config.Model(path="m"), data=config.Data(train="task:addition", size=10))
    return dataclasses.replace(base, **changes)


def write(tmp_path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_a_good_config_has_no_problems():
    assert config.validate(good()) == []


def test_fields_stay_under_one_hundred_and_each_has_a_docstring():
    assert len(config.flatten(Config())) < 100
    from tyro._docstrings import get_field_docstring

    def walk(cls):
        for f in dataclasses.fields(cls):
            if f.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(
                    f.default_factory):
                walk(f.default_factory)
            else:
                assert get_field_docstring(cls, f.name, ()), f"{cls.__name__}.{f.name}"

    walk(Config)


def test_dump_reads_back_equal(tmp_path):
    cfg = good(optimizer=config.Optimizer(lr=3e-7, betas=(0.8, 0.99)))
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
    for part in ("4 problems", "steps: expected int, got 'many'", "did you mean split?",
                 "batch.group_size: expected int, got 2.5", "did you mean seed?"):
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
    cfg = config.parse(["--config", str(path), "--steps", "7", "--batch.group-size", "3"])
    assert (cfg.steps, cfg.batch.group_size, cfg.data.size) == (7, 3, 10)


def test_method_options_are_given_as_one_mapping(tmp_path):
    own = config.Algorithm(loss_options={"clip_low": 0.1})
    path = write(tmp_path, config.dump(good(algorithm=own)))
    cfg = config.parse(["--config", str(path), "--algorithm.loss", "cispo",
                        "--algorithm.loss-options", "{ratio_high: 4.0}"])
    assert cfg.algorithm.loss_options == {"ratio_high": 4.0}
    assert config.parse(["--config", str(path)]).algorithm.loss_options == {"clip_low": 0.1}


def test_impossible_layouts_spell_out_the_arithmetic():
    def layout_problems(**fields):
        return "\n".join(config.validate(good(layout=Layout(**fields))))

    assert "leaves 0 ranks to generate" in layout_problems(world_size=2, trainer_ranks=2)
    assert "3 trainer ranks do not divide by dp_replicate 1 * tp 2 = 2" in layout_problems(
        world_size=4, trainer_ranks=3, tp=2)
    assert "3 inference ranks / inference_tp 2 = 1.5 replicas" in layout_problems(
        world_size=5, trainer_ranks=2, inference_tp=2)
    assert "must be a multiple of inference_tp 2" in layout_problems(
        world_size=5, trainer_ranks=3, inference_tp=2)
    assert layout_problems(world_size=4, trainer_ranks=2, inference_tp=2, tp=2) == ""


def test_senseless_combinations_are_refused():
    def problems(**changes):
        return "\n".join(config.validate(good(**changes)))

    assert "every advantage would be 0" in problems(batch=config.Batch(group_size=1))
    assert "one sequence may not fit" in problems(batch=config.Batch(tokens_per_microbatch=64))
    assert "data.eval is empty" in problems(evaluate=config.Evaluate(every_steps=2))
    assert "has no size of its own" in problems(data=config.Data(train="task:addition"))
    assert "name at least one reward function" in problems(data=config.Data(train="x.jsonl"))
    assert "rl `split` or `colocated`" in problems(layout=Layout(placement="offline"))


def test_combinations_of_methods_are_refused():
    def problems(layout=Layout(), model=config.Model(path="m"), **algorithm):
        changed = good(algorithm=config.Algorithm(**algorithm), layout=layout, model=model)
        return "\n".join(config.validate(changed))

    assert "the engine would be corrected for twice" in problems(loss="dppo_tv")
    assert problems(loss="dppo_tv", correction="none") == ""
    assert "expected gradient of 0" in problems(kl="k1", kl_coef=0.1)
    assert problems(kl="k1", kl_coef=0.1, kl_in="reward") == ""
    assert "model.teacher: is empty" in problems(advantage="distill")
    offline = Layout(placement="offline")
    assert "model.teacher: is empty" in problems(layout=offline, objective="distill",
                                                 loss="divergence")
    assert "which is a method of the kind loss" in problems(layout=offline, objective="preference",
                                                            loss="ppo_clip")
    split = Layout(placement="offline", world_size=2, tp=2)
    assert "the whole vocabulary on each rank" in problems(
        layout=split, objective="distill", loss="divergence",
        model=config.Model(path="m", teacher="t"))


def test_method_and_option_names_are_checked():
    wrong = config.Algorithm(advantage="grop", loss_options={"clip_lo": 0.1})
    text = "\n".join(config.validate(good(algorithm=wrong)))
    assert "grpo" in text and "clip_low" in text


def test_importing_the_config_is_light():
    code = ("import sys, spmdrl.config; bad = [m for m in ('torch.distributed', 'torch', 'vllm') "
            "if m in sys.modules]; sys.exit(str(bad) if bad else 0)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_old_logprob_pass_is_made_only_for_methods_that_need_one():
    from spmdrl.policy.objective import needed_columns

    def columns(updates=2, **algorithm):
        return needed_columns(good(algorithm=config.Algorithm(**algorithm),
                                   batch=config.Batch(updates_per_step=updates)))

    assert columns(updates=1) == set() and columns() == {"old_logprobs"}
    assert columns(loss="dppo_tv", correction="none") == set()
    assert columns(updates=1, loss="kl_cov") == {"old_logprobs"}
    assert columns(updates=1, kl_coef=0.1) == {"ref_logprobs"}
    assert columns(updates=1, kl_coef=0.1, kl_in="reward") == {"ref_logprobs", "old_logprobs"}
    assert columns(updates=1, advantage="gae") == {"values"}
