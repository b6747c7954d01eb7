"""The planner's answers: layouts, refusals, traffic, seconds, and the page with examples."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
import torch

from spmdrl.check.proved_models import pushed_by
from spmdrl.config import Config, ModelSettings, SourceSettings
from spmdrl.data.microbatch_plan import partition
from spmdrl.data.prefix_tree import LEAST
from spmdrl.model.divisibility import misfits
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import SHAPES, ModelShape, model_shape
from spmdrl.tools.commands.plan import main
from spmdrl.tools.commands.plan_examples import examples, output
from spmdrl.tools.plan import search
from spmdrl.tools.plan.engine_memory import (
    best_num_seqs,
    cache_bytes_per_token,
    engine_weight_bytes,
    state_bytes_per_sequence,
)
from spmdrl.tools.plan.memory import link_of
from spmdrl.tools.plan.run import _SCALES, Run, rates_of, run_of
from spmdrl.tools.plan.search import best_plans, layouts, make_plan
from spmdrl.tools.plan.seconds import step_seconds
from spmdrl.tools.plan.shared_prompts import group_of
from spmdrl.tools.plan.slower_links import push_lines
from spmdrl.tools.plan.text import page
from spmdrl.tools.plan.traffic import Flow, push_flows, trainer_flows
from spmdrl.world.axes import Axes, rank_problems
from tests.helpers.built import changed
from tests.helpers.runs import ROOT

PARAMETERS = {
    "qwen3-1.7b": (1.72, 1.72),  # its head is its embedding
    "qwen3-8b": (8.19, 7.57),
    "qwen3-32b": (32.8, 32.0),
    "qwen3-30b-a3b": (30.5, 3.04),
    "qwen3-235b-a22b": (235.1, 21.6),
    "qwen3.5-35b-a3b": (34.7, 2.94),
    "nemotron-3-nano-30b-a3b": (31.6, 3.22),  # 3.6 with its embedding
    "llama-3-8b": (8.03, 7.50),
    "qwen2.5-vl-7b": (8.29, 7.07),
    "deepseek-v3": (671.0, 36.6),
}
"""As their makers say, in billions: all, and those that a token meets (without its embedding)."""
GIB = 2**30
RECOMPUTE = "--model.memory.activation_checkpointing full"


@pytest.fixture(scope="module")
def shapes():
    return {
        name: model_shape(build_meta_model(ModelSettings(path=str(SHAPES / name))))
        for name in PARAMETERS
    }


def _plan(command: str) -> int:
    return main(shlex.split(command))


def _run(shape: ModelShape, **changed: object) -> Run:
    cfg = replace(Config(), sampling=replace(Config().sampling, max_response_tokens=3072))
    means = {"prompt_tokens": 512, "response_tokens": 1024}
    own = run_of(cfg, shape, on_gpu=True, chunk_tokens=1024, **means)
    return replace(own, kernels=replace(own.kernels, recomputes=True), **changed)


def test_teachers_are_counted_with_the_prompts_that_they_read(shapes):
    shape = shapes["qwen3-8b"]
    layout = Axes("colocated", 8, 8)
    distilling = {"objective": "on_policy_distill", "loss": "divergence"}
    cases = {
        "none": {},
        "one": {"model": {"teacher": "t"}},
        "hinted": {"model": {"teacher": "t"}, "data": {"teacher_prompt": "hint"}},
        "policy": {"model": {"teacher": "policy"}, "data": {"teacher_prompt": "hint"}},
        "two": {
            "data": {"train": (SourceSettings("a", teacher="t"), SourceSettings("b", teacher="u"))}
        },
    }
    runs = {}
    seconds = {}
    for name, fields in cases.items():
        cfg = changed(Config(), batch={"epochs": 2}, **fields)
        if fields:
            cfg = changed(cfg, algorithm=distilling)
        run = run_of(
            cfg, shape, on_gpu=True, chunk_tokens=1024, prompt_tokens=256, response_tokens=256
        )
        runs[name] = run
        seconds[name] = step_seconds(
            run, layout, rates=rates_of("H100"), tokens=16384, slots=256
        ).update
    assert [runs[name].frozen_models for name in cases] == [0, 1, 1, 0, 2]
    assert [runs[name].teacher_passes for name in cases] == [0, 2, 2, 2, 2]
    assert runs["one"].teacher_prompt_tokens == 256 and runs["hinted"].teacher_prompt_tokens == 1024
    assert seconds["one"] < seconds["hinted"] == seconds["policy"]


def test_shapes_are_those_of_the_published_models(shapes):
    assert {p.name for p in SHAPES.iterdir()} == set(PARAMETERS)
    for name, (total, active) in PARAMETERS.items():
        assert shapes[name].numel / 1e9 == pytest.approx(total, rel=2e-3)
        assert shapes[name].active_numel / 1e9 == pytest.approx(active, rel=5e-3)
    one = Axes("split", 2, 1)
    # 2 * 36 layers * 8 heads * 128 * 2 bytes; the latent of 512 + 64 in 61 layers, 2 bytes.
    assert cache_bytes_per_token(_run(shapes["qwen3-8b"]), one) == 147456
    assert cache_bytes_per_token(_run(shapes["deepseek-v3"]), one) == 70272


def test_a_layout_that_does_not_divide_is_refused_with_those_that_do(shapes, capsys):
    layout = "--layout.world-size 32 --layout.trainer-ranks 16 --layout.tp 16"
    status = _plan(f"--shape qwen3-8b {layout} --top 0")
    error = capsys.readouterr().err
    assert status == 2 and "layout.tp: 16 does not divide num_key_value_heads 8" in error
    assert "tp cuts: 1, 2, 4, 8 (" in error
    axes = Axes("split", 32, 16, ep=3)
    (of_ranks,) = rank_problems(axes, engine_kind="vllm")
    (of_model,) = misfits(shapes["qwen3-30b-a3b"].counts, axes)
    assert of_ranks.startswith("layout.ep: 3 does not divide the 16 ranks")
    assert of_ranks.endswith(": 1, 2, 4, 8, 16")
    assert of_model.startswith("layout.ep: 3 does not divide the 128 experts")
    assert of_model.endswith(": 1, 2, 4, 8, 16, 32, 64, 128")
    assert "no experts" in next(misfits(shapes["qwen3-8b"].counts, axes))
    layout = "--layout.world-size 8 --layout.trainer-ranks 6 --layout.tp 4"
    status = _plan(f"--shape qwen3-8b {layout}")
    assert status == 2 and "6 trainer ranks do not divide" in capsys.readouterr().err


def test_what_does_not_fit_says_cause_amount_and_cure(capsys):
    layout = "--layout.world-size 4 --layout.trainer-ranks 2 --top 0"
    command = f"--shape qwen3-8b {layout} --gpu H200 --gpu-memory-gib 140"
    assert _plan(command) == 1
    printed = capsys.readouterr()
    needs, over = map(float, re.search(r"needs ([\d.]+) GiB, ([\d.]+) GiB", printed.err).groups())
    assert over == pytest.approx(needs - 0.95 * 140, abs=0.11)
    assert "most of it is activations" in printed.err
    assert "would fit: " in printed.err
    assert "model.memory.activation_checkpointing full" in printed.err
    assert _plan(f"{command} {RECOMPUTE}") == 0 and not capsys.readouterr().err
    status = _plan("--shape deepseek-v3 --gpus 8")
    assert status == 1 and "no layout of 8 ranks fits" in capsys.readouterr().err
    assert _plan("--shape qwen3-8b --gpus 8 --gpu-memory-gib 4") == 1
    found = capsys.readouterr().err  # nothing is left for engines, whatever their share
    for needs, over, room in re.findall(
        r"needs ([\d.]+) GiB, ([\d.]+) GiB more than the ([\d.]+)", found
    ):
        assert float(over) == pytest.approx(float(needs) - float(room), abs=0.11)
    assert "GiB more than the 0.0 GiB that the trainer's" in found
    assert "gpu_memory_frac" not in found


def test_output_for_programs_adds_up(capsys):
    assert _plan("--shape qwen3-8b --gpus 8 --json --lag 1") == 0
    found = json.loads(capsys.readouterr().out)
    plan = found["plan"]
    assert plan == found["best"][0] and plan["problems"] == []
    assert plan["layout"]["world_size"] == 8
    assert sum(plan["trainer_bytes"].values()) <= plan["room_bytes"] == int(0.95 * int(79 * GIB))
    steps = [p["seconds"]["step"] + p["slow_seconds"]["step"] for p in found["best"]]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--model.lora.rank 4 --model.lora.targets query o_proj", "'query' matches"),
        ("--engine.gpu-memory-frac 1.5", "engine.gpu_memory_frac: must be below 1, got 1.5"),
    ],
)
@pytest.mark.parametrize("layout", ["", "--gpus 8"], ids=["own layout", "search"])
def test_fields_that_would_not_run_are_not_planned_with(arguments, says, layout, capsys):
    assert _plan(f"--shape qwen3-8b {layout} {arguments}") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, says",
    [
        (
            "--model.memory.activation_checkpoint full",
            "that is model.memory.activation_checkpointing here",
        ),
        ("--model.memory.optimizer_dtype int4", "is not one of float32, bfloat16, int8"),
        ("--model.lora.rnk 4", "model.lora.rnk: unknown key; did you mean rank?"),
    ],
)
def test_fields_that_do_not_exist_are_refused(arguments, says, capsys):
    assert _plan(f"--shape qwen3-8b {arguments}") == 2
    assert says in capsys.readouterr().err


def test_heads_that_ulysses_cannot_deal_out_are_refused(capsys):
    layout = "--layout.world-size 6 --layout.trainer-ranks 3 --layout.cp 3 --top 0"
    _plan(f"--shape qwen3-8b {layout} {RECOMPUTE}")
    assert "layout.cp" not in capsys.readouterr().err
    assert _plan(f"--shape qwen3-8b {layout} --model.kernels.context ulysses") == 2
    assert "layout.cp: 3 does not divide the 32 / tp 1 = 32 query heads" in capsys.readouterr().err


def test_moments_in_8_bits_are_planned_where_torchao_is_not_installed():
    memory = f"--model.memory.optimizer_dtype int8 {RECOMPUTE}"
    assert _plan(f"--shape qwen3-8b --gpus 8 --top 1 {memory}") == 0


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--response-tokens 600", "at most sampling.max_response_tokens 512"),
        ("--prompt-tokens -1", "at most data.max_prompt_tokens 1024"),
        ("--matmul-frac 0", "in (0, 1]"),
        ("--tflops -5", "a number above 0"),
        ("--gpu-memory-gib nan", "a number above 0"),
        ("--gpu H1000", "known: A100, H100, H200, B200"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, says, capsys):
    assert _plan(f"--shape qwen3-8b --gpus 8 {flags}") == 2
    error = capsys.readouterr().err
    assert error.startswith(flags.split()[0]) and says in error


def test_an_engine_with_data_parallel_attention_is_not_planned(capsys):
    assert _plan("--shape qwen3-30b-a3b --gpus 8 --layout.inference_dp 2") == 2
    assert "layout.inference_dp: 2 is not planned" in capsys.readouterr().err


def test_a_folder_with_a_config_is_enough_and_one_that_is_not_there_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text((SHAPES / "qwen3-8b" / "config.json").read_text())
    assert _plan(f"--shape {tmp_path} --gpus 8 --top 1") == 0
    assert "8.19 G parameters" in capsys.readouterr().out
    assert _plan("--shape nowhere/at/all") == 2
    assert "nowhere/at/all" in capsys.readouterr().err


# --------------------------------------------------------------------------- traffic and time


def test_fsdp_moves_what_its_collectives_move(shapes):
    shape = shapes["qwen3-8b"]
    run = _run(shape, sequences=64)
    flows = {f.name: f for f in trainer_flows(run, Axes("split", 32, 16), tokens=16384)}
    # 64 * 1536 tokens over 16 ranks: one micro-batch. Shards are all 16 times smaller.
    shard = shape.numel / 16
    assert flows["FSDP gathers"].bytes == pytest.approx(2 * 15 * 2 * shard, rel=1e-4)
    assert flows["FSDP reduces"].bytes == pytest.approx(15 * 4 * shard, rel=1e-4)
    assert flows["FSDP gathers"].span == 16 and flows["FSDP gathers"].hides
    axes = Axes("split", 32, 16, dp_replicate=2, tp=2)
    both = {f.name: f for f in trainer_flows(run, axes, tokens=16384)}
    assert both["dp_replicate reduces"].span == 16 and both["FSDP gathers"].span == 8
    assert both["tp all-reduces"].span == 2 and not both["tp all-reduces"].hides
    # A ring all-reduce over two ranks sends the tensor once: two in each pass.
    tokens = 64 * 1536 / 8
    assert both["tp all-reduces"].bytes == 36 * 6 * tokens * 4096 * 2


def test_experts_travel_less_under_ep_and_tokens_travel_instead(shapes):
    run = _run(shapes["qwen3-30b-a3b"])
    one, eight = (
        {f.name: f.bytes for f in trainer_flows(run, Axes("split", 64, 32, ep=ep), tokens=16384)}
        for ep in (1, 8)
    )
    assert "ep exchanges" not in one
    assert eight["FSDP gathers"] < 0.2 * one["FSDP gathers"]
    own = run.tokens / 32  # forward, again, backward; there and back; 7 of 8 rows leave
    assert eight["ep exchanges"] == pytest.approx(3 * 2 * 7 / 8 * own * 48 * 8 * 2048 * 2)


def test_a_push_leaves_the_trainers_once_for_all_replicas(shapes):
    shape = shapes["qwen3-8b"]
    flows = {f.name: f.bytes for f in push_flows(_run(shape), Axes("split", 8, 4))}
    assert flows["stream"] == pytest.approx(2 * shape.numel / 4, rel=1e-3)
    assert flows["stream among replicas"] == pytest.approx(2 * shape.numel * 3 / 4, rel=1e-3)


def test_a_push_over_slower_links_is_planned_with_everything_and_with_what_changed(shapes):
    run = _run(shapes["qwen3-8b"])
    lines = list(push_lines(run, Axes("split", 8, 4)))
    rows = [list(map(float, line.split())) for line in lines[2:]]
    assert [row[0] for row in rows] == [400, 25, 1]
    for _, everything, changed in rows:
        assert 0 < changed < everything
    _, everything, changed = rows[-1]
    assert changed / everything == pytest.approx(0.075, rel=0.05)  # 3 bytes for 5% of the elements
    assert rows[-1][1] > 15 * rows[-2][1]


def test_a_push_goes_at_the_rate_that_the_config_gives(shapes):
    run = _run(shapes["qwen3-8b"])
    rates, axes = rates_of("H100"), Axes("split", 8, 4)
    slow = replace(run, cfg=changed(run.cfg, stream=dict(gbit_per_s=1.0)))
    for own in (slow, replace(slow, reloads="stream.mode is reload")):
        for flow in push_flows(own, axes):
            assert flow.seconds(rates) == pytest.approx(flow.bytes / (1e9 / 8), rel=0.01)
    fast = {flow.name: flow.seconds(rates) for flow in push_flows(run, axes)}
    assert fast["stream"] < 0.02
    assert link_of(slow, axes).bytes_per_s == 1e9 / 8 < link_of(run, axes).bytes_per_s


def test_engines_on_several_nodes_are_a_problem(shapes):
    run, rates = _run(shapes["qwen3-8b"]), rates_of("H100")
    (problem,) = make_plan(run, Axes("split", 32, 16, inference_tp=16), rates=rates).problems
    assert "layout.inference_tp 16 would lie on several nodes of 8 GPUs" in problem
    assert not make_plan(run, Axes("split", 32, 16, inference_tp=8), rates=rates).problems


def test_a_page_makes_no_second_plan(shapes, monkeypatch):
    run, rates = _run(shapes["qwen3-8b"], shares_prefixes=True), rates_of("H100")
    plan = make_plan(run, Axes("split", 8, 4), rates=rates)
    monkeypatch.setattr(search, "trainer_memory", None)
    monkeypatch.setattr(search, "most_tokens", None)
    assert "share_prefixes never" in "".join(page(plan, [], run=run, rates=rates))


def test_a_reload_brings_whole_tensors_to_each_engine_rank(shapes):
    shape = shapes["qwen3-8b"]
    rates = rates_of("H100")
    run = _run(shape, reloads="stream.mode is reload")
    flows = {f.name: f for f in push_flows(run, Axes("split", 16, 8, inference_tp=2))}
    whole = 4 * shape.numel  # float32
    assert flows["whole tensors"].bytes == whole / 8
    assert flows["whole tensors among engines"].bytes == whole * 7 / 8
    assert flows["whole tensors among engines"].calls == -(-whole // 2**29)
    assert "engine weights to and from host" not in flows
    # Colocated, the engine keeps its weights while it sleeps: over PCIe and back in each step.
    axes = Axes("colocated", 8, 8, inference_tp=2)
    flows = {f.name: f for f in push_flows(run, axes)}
    weights = engine_weight_bytes(run, axes)
    own = flows["engine weights to and from host"]
    assert own.bytes == 2 * weights and own.seconds(rates) == 2 * weights / (64e9 * 0.7)
    plan = make_plan(run, axes, rates=rates)
    assert plan.host["engine weights while it sleeps"] == 8 * weights
    assert "engine weights while it sleeps" not in make_plan(_run(shape), axes, rates=rates).host


def test_an_engine_in_8_bits_holds_bytes_and_scales(shapes):
    dense, mixture = shapes["qwen3-8b"], shapes["deepseek-v3"]
    one, eight = Axes("split", 2, 1), Axes("split", 16, 8, inference_tp=8)
    whole = engine_weight_bytes(_run(dense), one)
    # By hand, of a block of 4096: 32 and 8 heads of 128, an MLP of 12288.
    outs = 32 * 128 + 2 * 8 * 128 + 4096 + 2 * 12288 + 4096
    blocks = (2 * 32 + 2 * 8) * 128 // 128 * 32 + 3 * 96 * 32
    numel = 36 * 4096 * ((2 * 32 + 2 * 8) * 128 + 3 * 12288)
    for name, scales in {"fp8": 7, "fp8_per_channel": outs, "fp8_per_block": blocks}.items():
        own = replace(_run(dense), engine_scales=_SCALES[name])
        assert engine_weight_bytes(own, one) == whole - numel + 4 * 36 * scales
        halves = engine_weight_bytes(own, replace(eight, inference_tp=4))
        assert 4 * halves == pytest.approx(engine_weight_bytes(own, one), rel=2e-3)
    own = replace(_run(mixture), engine_scales=_SCALES["fp8_per_block"])
    assert engine_weight_bytes(_run(mixture), eight) / GIB == pytest.approx(157.9, abs=0.1)
    assert engine_weight_bytes(own, eight) / GIB == pytest.approx(79.5, abs=0.1)


def test_options_of_vllm_that_change_bytes_are_planned_with(shapes, capsys):
    cfg = Config()
    bytes_of = {}
    for name, options in {
        "": {},
        "cache": {"kv_cache_dtype": "fp8"},
        "states": {"mamba_ssm_cache_dtype": "bfloat16"},
    }.items():
        own = changed(cfg, engine={"kind": "vllm", "options": options})
        run = replace(_run(shapes["qwen3.5-35b-a3b"]), engine=own.engine)
        axes = Axes("split", 2, 1)
        bytes_of[name] = cache_bytes_per_token(run, axes), state_bytes_per_sequence(run, axes)
    matrices = 30 * 32 * 128 * 128
    assert bytes_of["cache"] == (bytes_of[""][0] // 2, bytes_of[""][1])
    assert bytes_of["states"] == (bytes_of[""][0], bytes_of[""][1] - 2 * matrices)
    assert bytes_of[""][1] == 4 * matrices + 30 * 3 * 2 * (2 * 16 + 32) * 128
    main([*shlex.split(f"--shape qwen3-8b {RECOMPUTE} --engine.options"), "{quantization: mxfp4}"])
    assert "the planner does not know the bytes of mxfp4" in capsys.readouterr().err


def test_a_plan_names_no_folder_of_the_program(capsys):
    for shape in ("nemotron-3-nano-30b-a3b", "nowhere"):
        _plan(f"--shape {shape} --layout.world-size 8 {RECOMPUTE} --top 0")
        printed = "".join(capsys.readouterr())
        assert shape in printed and str(SHAPES) not in printed


def test_a_plan_says_why_weights_are_reloaded(capsys):
    for flags, why in {
        "": "push: slices, written in place",
        "--stream.mode reload": "to each engine rank, because stream.mode is reload",
        "--engine.options {quantization: fp8}": "because engine.options quantization is fp8",
    }.items():
        command = f"--shape qwen3-8b --layout.world-size 8 --top 0 {RECOMPUTE}"
        main([*shlex.split(command), *flags.split(maxsplit=1)])
        assert why in capsys.readouterr().out
    for family, mode in {"deepseek_v3": "traced", "llama4_text": "reload", "new": ""}.items():
        assert pushed_by(family, engine_kind="vllm") == mode


def test_host_memory_of_a_node_is_that_of_its_ranks(shapes, capsys):
    shape = shapes["qwen3-8b"]
    rates = rates_of("H100")
    state = shape.numel / 16
    run = _run(shape)
    held = make_plan(run, Axes("split", 32, 16), rates=rates).host  # a node has one role
    assert held["copies for checkpoints"] == pytest.approx(8 * 12 * state, rel=1e-3)
    assert held["processes"] == 8 * 4 * GIB and "reward workers" not in held
    memory = replace(run.cfg.model.memory, offload="parameters")
    cfg = replace(run.cfg, model=replace(run.cfg.model, memory=memory))
    offloaded = make_plan(replace(run, cfg=cfg), Axes("split", 32, 16), rates=rates).host
    assert offloaded["optimizer offloaded"] == pytest.approx(8 * 8 * state, rel=1e-3)
    assert offloaded["weights and gradients offloaded"] == pytest.approx(8 * 8 * state, rel=1e-3)
    layout = f"--shape qwen3-8b --layout.world-size 8 --layout.trainer-ranks 4 {RECOMPUTE} --top 0"
    assert _plan(f"{layout} --host-memory-gib 2000") == 0
    assert "Host memory of a node, GiB (of 2000.0)" in capsys.readouterr().out
    assert _plan(f"{layout} --host-memory-gib 64") == 1
    error = capsys.readouterr().err
    assert "more than the node's 64.0 GiB (--host-memory-gib); most of it is copies for" in error


def test_a_plan_proposes_how_many_sequences_an_engine_decodes(shapes, capsys):
    run = _run(shapes["qwen3-8b"], sequences=600)
    roomy = {"memory_bytes": 139 * GIB}
    assert best_num_seqs(run, Axes("split", 4, 2, inference_tp=2), **roomy) == 600
    assert best_num_seqs(run, Axes("split", 4, 2), **roomy) == 300
    assert best_num_seqs(replace(run, sequences=5000), Axes("split", 2, 1), **roomy) < 1024
    tight = best_num_seqs(run, Axes("split", 2, 1), memory_bytes=40 * GIB)
    assert 0 < tight < 600 and tight % 8 == 0
    layout = f"--shape qwen3-8b --layout.world-size 8 --layout.trainer-ranks 6 {RECOMPUTE} --top 0"
    assert _plan(f"{layout} --batch.prompts-per-step 100 --batch.group-size 6") == 0
    assert "engine.max_num_seqs 300 would decode 300 of" in capsys.readouterr().out


def test_links_within_a_node_are_those_of_the_node():
    rates = rates_of("H100")
    within, across = (Flow("x", 1e9, 0, span).seconds(rates) for span in (8, 9))
    assert within == pytest.approx(1e9 / (450e9 * 0.7))
    assert across == pytest.approx(1e9 / (50e9 * 0.7))
    assert rates_of("H100", memory_gib=80).gpu.memory_gib == 80


def test_seconds_follow_from_rates(shapes):
    shape, rates = shapes["qwen3-8b"], rates_of("H100")
    run = _run(shape)
    axes = Axes("split", 8, 4)
    own = step_seconds(run, axes, rates=rates, tokens=16384, slots=256)
    faster = replace(rates, gpu=replace(rates.gpu, memory_bytes_per_s=1e15))
    decoded = step_seconds(run, axes, rates=faster, tokens=16384, slots=256)
    assert decoded.generate < own.generate and "reading weights" in own.limits["generate"]
    # 6 * parameters * tokens and a third more for recomputation; attention comes on top.
    floor = 8 * (shape.active_numel - shape.vocab * shape.hidden) * run.tokens / 4 / rates.flops
    assert floor < own.update < 1.35 * floor
    ahead = replace(run, cfg=replace(run.cfg, lag=1))
    beside = step_seconds(ahead, axes, rates=rates, tokens=16384, slots=256)
    assert own.step == pytest.approx(own.generate + own.update + own.push)
    assert beside.step == pytest.approx(max(own.generate, own.update) + own.push)


def test_a_group_is_divided_into_pieces_that_fit(shapes):
    # By hand: 512 + 1024 tokens. Each further sequence takes 1024 + 15 tokens that may not be
    # shared + 497 // 8 for copied keys = 1101 of the budget; 8 sequences take 1536 + 7 * 1101.
    run = _run(shapes["qwen3-8b"], shares_prefixes=True)
    axes = Axes("split", 8, 4)
    for tokens, pieces in {16384: 1, 9243: 1, 9242: 2, 4000: 3, 2636: 8}.items():
        group = group_of(run, axes, tokens=tokens)
        assert group.pieces == pieces
        assert group.computed_tokens == pieces * 512 + 8 * 1024
    assert group_of(run, axes, tokens=16384).planned_tokens == 9243
    assert group_of(run, axes, tokens=16384).copied_keys == 8 * 512
    # 512 sequences: a rank of 256 has two of them.
    assert group_of(run, Axes("split", 512, 256), tokens=16384).pieces == 4
    short = replace(run, prompt_tokens=15)
    for own in (short, replace(run, shares_prefixes=False)):
        assert group_of(own, axes, tokens=16384).size == 1


@pytest.mark.parametrize("tokens, ranks", [(16384, 4), (9242, 4), (4000, 4), (16384, 256)])
def test_groups_are_divided_as_trainers_divide_them(shapes, tokens, ranks):
    run = _run(shapes["qwen3-8b"], shares_prefixes=True)
    ids = torch.arange(run.sequences)
    groups = ids // 8
    plan = partition(
        torch.full_like(ids, 512 + 1024),
        group_ids=groups,
        dp_size=ranks,
        tokens_per_microbatch=tokens,
        shared=torch.where(ids % 8 > 0, 512 - LEAST + 1, 0),
    )
    places = torch.stack([groups, plan.dp_ids, plan.microbatch_ids])
    pieces = len(places.unique(dim=1).T)
    group = group_of(run, Axes("offline", ranks, ranks), tokens=tokens)
    assert pieces == group.pieces * run.sequences / 8


def test_pairs_share_their_prompt_and_stay_together(shapes):
    run = _run(shapes["qwen3-8b"], shares_prefixes=True)
    algorithm = replace(run.cfg.algorithm, objective="preference")
    run = replace(run, cfg=replace(run.cfg, algorithm=algorithm))
    group = group_of(run, Axes("offline", 512, 512), tokens=16384)
    assert (group.size, group.pieces) == (2, 1)


def test_a_shared_prompt_is_not_computed_again(shapes):
    # By hand: 7 of 8 prompts are spared in 64 groups; 4 passes with recomputation. A prompt's
    # queries see half of 512 * 512 keys, with 32 heads of 128 elements in 36 blocks.
    shape = shapes["qwen3-8b"]
    rates = rates_of("H100")
    run = _run(shape)
    shared = replace(run, shares_prefixes=True)
    axes = Axes("colocated", 1, 1)
    whole, once = (
        step_seconds(own, axes, rates=rates, tokens=16384, slots=256).update
        for own in (run, shared)
    )
    linear = 2 * 512 * (shape.active_numel - shape.vocab * shape.hidden)
    attention = 2 * 32 * (128 + 128) * 36 * 512**2 / 2
    assert run.sequences == 64 * 8
    spared = 64 * 7 * 4 * (linear + attention)
    assert whole - once == pytest.approx(spared / rates.flops, rel=1e-6)
    # Fewer micro-batches, and fewer tokens between ranks of tp.
    axes = Axes("colocated", 8, 8, tp=2)
    whole, once = (
        {flow.name: flow for flow in trainer_flows(own, axes, tokens=16384)}
        for own in (run, shared)
    )
    assert once["tp all-reduces"].bytes == whole["tp all-reduces"].bytes * 8704 / (8 * 1536)
    assert whole["FSDP gathers"].bytes * 10 == once["FSDP gathers"].bytes * 12


def test_a_plan_says_that_prompts_are_computed_once(capsys):
    layout = f"--shape qwen3-8b --layout.world-size 8 --layout.trainer-ranks 4 {RECOMPUTE} --top 0"
    _plan(layout)
    shared = capsys.readouterr().out
    _plan(f"{layout} --batch.share-prefixes never")
    whole = capsys.readouterr().out
    seconds = re.search(r"\n  update +([\d.]+ to [\d.]+) ", whole)[1]
    assert f"once (with batch.share_prefixes never: {seconds} s)\n" in shared
    assert "share_prefixes" not in whole


def test_seconds_are_a_range_until_rates_are_known(shapes, capsys):
    run = _run(shapes["qwen3-8b"])
    rates = rates_of("H100")
    plan = make_plan(run, Axes("split", 8, 4), rates=rates)
    assert plan.seconds.update < plan.slow_seconds.update < plan.seconds.update * 0.46 / 0.31
    assert plan.seconds.generate < plan.slow_seconds.generate
    known = rates.known({"matmul_frac": 0.4, "engine_step_s": 0.005}, source="a file")
    sure = make_plan(run, Axes("split", 8, 4), rates=known)
    assert sure.seconds == sure.slow_seconds
    assert plan.seconds.step < sure.seconds.step < plan.slow_seconds.step
    layout = f"--shape qwen3-8b --layout.world-size 8 --layout.trainer-ranks 4 {RECOMPUTE} --top 0"
    _plan(layout)
    printed = capsys.readouterr().out
    assert "rates: matmul_frac 0.31 to 0.45, memory_frac 0.7, " in printed
    assert "engine_step_s 0.003 to 0.012" in printed
    assert re.search(r"\n  update +[\d.]+ to [\d.]+  limited by matmuls\n", printed)


# --------------------------------------------------------------------------- search


def test_every_layout_of_the_search_is_one_that_the_config_takes(shapes):
    from spmdrl.check.settings import validate

    for name in ("qwen3-8b", "qwen3-30b-a3b"):
        found = list(layouts(_run(shapes[name]), gpus=16, gpus_per_node=8))
        assert len(set(found)) == len(found) > 20
        assert {a.placement for a in found} == {"split", "colocated"}
        for axes in found:
            sizes = vars(axes) | {"trainer_ranks": axes.trainers}
            sizes.pop("trainers")
            layout = replace(Config().layout, **sizes)
            problems = validate(replace(Config(), layout=layout))
            assert not [p for p in problems if p.startswith("layout")], (axes, problems)
    assert any(a.ep > a.fsdp > 1 for a in found), "experts are dealt out to tp ranks too"


def test_the_best_layout_fits_and_none_that_fits_is_faster(shapes):
    run, rates = _run(shapes["qwen3-8b"]), rates_of("H100")
    run = replace(run, cfg=replace(run.cfg, lag=1))
    best, nearest = best_plans(run, gpus=8, rates=rates)
    assert best and all(not p.problems and p.rank_bytes <= p.room for p in best)
    assert nearest is not None and nearest.problems
    for trainers in (2, 4, 6):
        plan = make_plan(run, Axes("split", 8, trainers), rates=rates)
        assert plan.problems or plan.middle >= best[0].middle - 0.01


def test_the_page_shows_what_the_commands_print():
    found = examples((ROOT / "docs" / "plans.md").read_text())
    assert len(found) == 11
    for command, shown in (found[0], found[-1]):
        assert output(command) == shown, "run `python -m spmdrl plan_examples docs/plans.md`"
