"""The planner's bytes against what real ranks hold, and against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from spmdrl.config import Config, MemorySettings
from spmdrl.config.fields import useful_tokens
from spmdrl.model.attention.packing import padded_groups
from spmdrl.model.block_shape import Attention
from spmdrl.model.lora.layers import Adapters
from spmdrl.model.lora.targets import LoraForm, adapter_numel
from spmdrl.model.model_shape import ModelShape, model_shape
from spmdrl.model.tensor_parts import Box
from spmdrl.sync.buckets import Traffic, choose_buckets
from spmdrl.sync.verify import checksum, checksum_bytes
from spmdrl.tools.plan import trainer_memory as trainer_memory_module
from spmdrl.tools.plan.activations import (
    Cut,
    Kernels,
    RowPart,
    exchange_bytes,
    flash_backward_bytes,
    saved_bytes,
    shared_groups,
)
from spmdrl.tools.plan.engine_memory import (
    cache_bytes_per_token,
    engine_memory,
    engine_weight_bytes,
)
from spmdrl.tools.plan.memory import shards_numel
from spmdrl.tools.plan.run import Run, run_of
from spmdrl.tools.plan.trainer_memory import most_tokens, trainer_memory
from spmdrl.train.muon import block_matrices
from spmdrl.world.axes import Axes, axes_of
from spmdrl.world.machine.hardware import CPU_LINK
from spmdrl.world.machine.live_bytes import peak_bytes
from tests.helpers.plan_runs import (
    FAMILIES,
    WITH_STATE,
    hold,
    run_config,
    saved_by_family,
    tiny_model,
    vllm_holds,
    write_model,
)
from tests.helpers.policy_runs import changed
from tests.helpers.worlds import in_world

_WIDE = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=4, head_dim=32, vocab_size=1000
)


_OF_A_PUSH = ("stream buckets", "checksums of a push")


def _shape(family: str, **sizes: object) -> ModelShape:
    return model_shape(tiny_model(family, **sizes))


def _run(cfg: object, shape: ModelShape) -> Run:
    # The measured row: sequences of 20 + 80 tokens.
    return run_of(cfg, shape, on_gpu=False, chunk_tokens=64, prompt_tokens=20, response_tokens=80)


@pytest.mark.parametrize(
    "family, layout",
    [
        ("qwen3", dict(world_size=2, dtype="bfloat16")),
        ("qwen3", dict(world_size=2, tp=2, recomputes=True)),
        pytest.param(
            "qwen3_moe",
            dict(world_size=2, ep=2, dtype="bfloat16", recomputes=True),
            marks=pytest.mark.grid,
        ),
        ("qwen3_moe", dict(world_size=2, tp=2, dtype="bfloat16", recomputes=True)),
        ("gemma2", dict(world_size=3)),
        ("qwen3_5_text", dict(world_size=2, tp=2)),
        ("nemotron_h", dict(world_size=2, tp=2, ep=2)),
        pytest.param(
            "qwen3", dict(world_size=2, memory={"reshard": "never"}), marks=pytest.mark.grid
        ),
    ],
    ids=[
        "fsdp",
        "tp",
        "ep",
        "experts under tp",
        "uneven",
        "states under tp",
        "blocks of one layer",
        "never resharded",
    ],
)
def test_ranks_hold_what_the_plan_says(family, layout, tmp_path):
    sizes = {} if family == "gemma2" else _WIDE
    if family == "qwen3_5_text":
        sizes = sizes | {"num_hidden_layers": 2}
    _compare(family, layout, tmp_path, sizes=sizes, within=0.1)


@pytest.mark.parametrize(
    "layout",
    [
        dict(world_size=2, cp=2),
        pytest.param(dict(world_size=2, cp=2, context="gather"), marks=pytest.mark.grid),
        pytest.param(dict(world_size=4, cp=4, recomputes=True), marks=pytest.mark.grid),
    ],
    ids=["ulysses", "gather", "repeated keys"],
)
def test_ranks_hold_what_attention_exchanges_over_cp(layout, tmp_path):
    # Attention is most of this model, and there are fewer key heads than four ranks.
    sizes = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=200,
    )
    _compare("qwen3", layout, tmp_path, sizes=sizes, within=0.06)


def _compare(family: str, layout: dict, tmp_path: Path, *, sizes: dict, within: float) -> None:
    path = write_model(tmp_path / "model", family, **sizes)
    cfg = run_config(path, str(tmp_path / "out"), **layout)
    shape, axes = _shape(family, **sizes), axes_of(cfg)
    run = _run(cfg, shape)
    engine = engine_memory(run, axes, memory_bytes=0)
    plan = trainer_memory(run, axes)
    for rank, held in enumerate(in_world(cfg, hold)):
        numel = shards_numel(shape, axes, index=rank)
        assert held["weights"] == 4 * numel, (rank, held["weights"] / 4, numel)
        assert held["gradients"] == 4 * numel and held["optimizer"] == 8 * numel
        assert held["engine weights"] == engine.causes["engine weights"]
        states = engine.causes.get("states of sequences", 0)
        assert held["KV cache"] == engine.causes["KV cache"] + states
        assert held["slots"] == engine.sequences == 7
        if rank == 0:
            exact = {"weights": 4 * numel, "gradients": 4 * numel, "optimizer": 8 * numel}
            assert {name: plan.causes[name] for name in exact} == exact
            others = plan.causes.keys() - exact.keys() - {"stream buckets"}
            working = sum(plan.causes[name] for name in others)
            assert 16 * numel + working == pytest.approx(
                16 * numel + held["working"], rel=within
            ), f"planned {working} beside these, {plan.moment}, measured {held['working']}"


def test_a_forward_pass_keeps_what_the_plan_says(tmp_path):
    folders = {f: write_model(tmp_path / f, f) for f in FAMILIES | WITH_STATE}
    cases = [
        (family, dtype, recomputes, lengths, 0)
        for family in FAMILIES
        for dtype, recomputes, lengths in (
            ("bfloat16", False, [120, 90, 33, 20, 7]),
            ("float32", False, [20, 19, 18, 17]),
            ("bfloat16", True, [100, 90, 80]),
        )
    ]
    # Responses of which attention computes the prompt's queries too, and others.
    cases += [
        (family, "float32", False, [prompt + response] * 5, prompt)
        for family in ("llama", "gemma2")
        for prompt, response in ((40, 70), (150, 12))
    ]
    # Half a chunk is unused after each prompt and response, as the planner expects.
    cases += [(family, "float32", False, [192] * 5, 160) for family in WITH_STATE]
    cases += [
        (family, dtype, False, [120, 90, 33, 20, 7], 0)
        for family in WITH_STATE
        for dtype in ("float32", "bfloat16")
    ]
    first = run_config(folders["llama"], str(tmp_path), placement="offline")
    measured = in_world(first, saved_by_family, folders, cases)[0]
    for (family, dtype, recomputes, lengths, shared), found in zip(cases, measured):
        kernels = Kernels(
            {"float32": 4, "bfloat16": 2}[dtype],
            is_padded=True,
            has_liger=False,
            recomputes=recomputes,
        )
        groups = padded_groups(lengths)
        if shared:
            groups = shared_groups(shared, lengths[0] - shared, count=len(lengths))
        computed = sum(lengths) - shared * (len(lengths) - 1)
        branches = (len(lengths) + 1) * bool(shared)
        work = RowPart(kernels, computed, groups=groups, branches=branches)
        scored = sum(lengths) - (3 + shared) * len(lengths)
        own = saved_bytes(_shape(family), work, num_scored=scored)
        planned = own.blocks + own.rest  # what is made again is not there yet
        assert planned == pytest.approx(found, rel=0.1 if family in WITH_STATE else 0.05), (
            family,
            dtype,
            recomputes,
            lengths,
            shared,
        )


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8_per_channel"}], ids=str)
def test_a_vllm_engine_holds_what_the_plan_says(options, tmp_path):
    pytest.importorskip("vllm")
    sizes = dict(hidden_size=128, head_dim=32, vocab_size=1000)
    path = write_model(tmp_path / "model", "qwen3", **sizes)
    cfg = run_config(path, str(tmp_path / "out"), world_size=2, inference_tp=2)
    cfg = changed(cfg, engine={"kind": "vllm", "options": options})
    run = _run(cfg, _shape("qwen3", **sizes))
    engine = engine_memory(run, axes_of(cfg), memory_bytes=0)
    for held in in_world(cfg, vllm_holds):
        assert held["engine weights"] == engine.causes["engine weights"]
        assert held["KV cache"] == engine.causes["KV cache"]


# --------------------------------------------------------------------------- by hand


def test_layers_with_a_state_take_memory_by_the_sequence_and_not_by_the_token(tmp_path):
    shape = _shape("qwen3_5_text")
    (state,) = [block.state for block in shape.blocks if block.state]
    assert (state.heads, state.keys, state.values) == (4, 32, 32)
    assert (state.channels, state.kernel, state.corrects) == (2 * 2 * 32 + 4 * 32, 4, True)
    assert (state.matrix_numel, state.input_numel) == (4 * 32 * 32, 256 * 3)
    assert state.flops == 6 * 4 * 32 * 32 + 2 * 256 * 4
    cfg = run_config(str(tmp_path), str(tmp_path), world_size=2, inference_tp=1)
    run = _run(changed(cfg, engine={"kind": "vllm"}), shape)
    axes = axes_of(run.cfg)
    assert cache_bytes_per_token(run, axes) == 2 * 2 * 16 * run.engine_bytes
    assert run.engine_bytes == 2
    for kind, of_matrix in (("vllm", 2), ("transformers", 4)):
        run = _run(changed(cfg, engine={"kind": kind}), shape)
        held = engine_memory(run, axes, memory_bytes=0)
        of_sequence = 4 * 32 * 32 * of_matrix + 256 * 3 * 2
        assert held.causes["states of sequences"] == run.engine.max_num_seqs * of_sequence


def _gpu_run(cfg: Config, shape: ModelShape, *, lora_numel: int = 0, **engine: object) -> Run:
    return run_of(
        changed(cfg, engine=engine),
        shape,
        on_gpu=True,
        chunk_tokens=64,
        prompt_tokens=20,
        response_tokens=80,
        lora_numel=lora_numel,
    )


def test_kernels_on_cuda_keep_what_their_definitions_say():
    # By hand, per token: two norms keep their input and a float32; the inputs of the projections;
    # query, key, value and output; log-sum-exp of each head; gate, up and product.
    shape, c, tokens = _shape("llama"), 2, 1000
    block = 2 * (64 * c + 4) + 2 * 64 * c + (2 * 64 + 2 * 32) * c + 4 * 4 + 3 * 160 * c
    rest = 2 * 16 * c + 64 * c + 4
    kernels = Kernels(compute_bytes=2, is_padded=False, has_liger=True, recomputes=False)
    own = saved_bytes(shape, RowPart(kernels, tokens), num_scored=0)
    assert own.total == tokens * (2 * block + rest)
    again = saved_bytes(shape, RowPart(replace(kernels, recomputes=True), tokens), num_scored=0)
    assert again.blocks == tokens * 2 * 64 * c and again.recomputed == tokens * block


def test_short_padded_rows_save_no_scores_on_a_gpu():
    # By hand: the CPU's matmuls save scores and weights of 4 heads; SDPA on a GPU saves its output
    # and log-sum-exp instead, and in float32 keys and values that are repeated for 4 heads.
    shape, lengths = _shape("llama"), [10] * 7
    for c, repeated in ((2, 0), (4, 2 * 32 * 4)):
        on_cpu = Kernels(compute_bytes=c, is_padded=True, has_liger=False, recomputes=False)
        cpu, gpu = (
            saved_bytes(shape, RowPart(kernels, 70, groups=padded_groups(lengths)), num_scored=0)
            for kernels in (on_cpu, replace(on_cpu, on_gpu=True))
        )
        scores = 7 * 4 * 10 * 10 * (4 if c == 4 else 4 + c)
        assert cpu.total - gpu.total == 2 * (scores - 70 * (64 * c + 4 * 4 + repeated))


def test_flash_attention_takes_the_memory_that_its_source_says():
    # By hand, with 16 query heads and 8 others of 128 elements: gradients of queries in float32, in
    # 3 parts for 4 sequences on 148 multiprocessors; bfloat16 ones of 16 keys and values.
    own = Attention(16, 8, 128, 128, window=None, has_softcap=False, has_qk_norm=False)
    kernels = Kernels(2, is_padded=False, has_liger=True, recomputes=True, on_gpu=True)
    work = RowPart(kernels, 16384, sequences=4)
    queries, others = 4 * (16384 + 4 * 128) * 16 * 128, 2 * 2 * 16384 * 16 * 128
    assert flash_backward_bytes(own, work) == queries + others
    repeated = replace(work, kernels=replace(kernels, is_deterministic=True))
    assert flash_backward_bytes(own, repeated) == 3 * queries + others
    # As many tokens of half as many heads, in twice as many parts.
    shared = replace(repeated, tokens=8192, cut=Cut(cp=2, method="ulysses"))
    assert flash_backward_bytes(own, shared) == 5 * queries // 2 + others // 2
    assert flash_backward_bytes(own, replace(work, kernels=replace(kernels, on_gpu=False))) == 0


def test_copied_keys_of_shared_prompts_take_memory():
    # By hand: 1039 + 57 tokens, of which 1024 are surely shared. Each further sequence takes 57 +
    # 15 + 1024 / 8 = 200 of the budget, a group of 8 takes 1096 + 7 * 200 = 2496: 10 groups.
    sizes = dict(head_dim=64, num_key_value_heads=4, intermediate_size=32, vocab_size=400_000)
    shape = _shape("llama", **sizes)
    batch = {"prompts_per_step": 64, "group_size": 8, "tokens_per_microbatch": 24960}
    cfg = changed(run_config("m", "o", world_size=1, dtype="bfloat16"), batch=batch)
    run = replace(_gpu_run(cfg, shape), prompt_tokens=1039, response_tokens=57)
    axes = Axes("colocated", 1, 1)
    alone = trainer_memory(run, axes)
    shared = trainer_memory(replace(run, shares_prefixes=True), axes)
    work = RowPart(run.kernels, 10 * (1039 + 8 * 57))
    without = saved_bytes(shape, work, num_scored=10 * 8 * 57)
    copied = 10 * 8 * 1039
    # Keys and values of 4 heads of 64 elements of 2 bytes, in 2 blocks.
    expected = without.total + copied * 2 * 4 * 64 * 2 * 2
    assert shared.moment == "where the head's backward pass begins"
    assert shared.causes["activations"] == expected
    # Without shared prompts, a push takes most: the checksum of the table.
    assert alone.moment == "where a push is checked"
    assert sum(shared.causes.values()) > sum(alone.causes.values())
    flash = Attention(4, 2, 64, 64, window=None, has_softcap=False, has_qk_norm=False)
    extra = flash_backward_bytes(flash, replace(work, copied_keys=copied))
    assert extra - flash_backward_bytes(flash, work) == 2 * 2 * copied * 4 * 64


def test_gather_copies_the_keys_of_own_responses_and_a_ring_none():
    own = Attention(8, 4, 64, 64, window=None, has_softcap=False, has_qk_norm=False)
    kernels = Kernels(2, is_padded=False, has_liger=True, recomputes=False, on_gpu=True)
    # By hand: 2000 keys and values on each of 4 ranks, of one head at a time, with gradients.
    for method, expected in (("gather", 2 * 2000 * (64 + 64) * 2), ("ring", 0)):
        work = RowPart(kernels, 1000, Cut(cp=4, method=method))
        copying = replace(work, copied_keys=8000)
        assert exchange_bytes(own, copying) - exchange_bytes(own, work) == expected


def test_padded_attention_copies_the_keys_of_shared_prompts():
    # As above, with 4 key heads of 64 elements of 4 bytes in 2 blocks: each response has keys and
    # values of 1039 + 57 tokens.
    sizes = dict(head_dim=64, num_key_value_heads=4, intermediate_size=32, vocab_size=1000)
    batch = {"prompts_per_step": 64, "group_size": 8, "tokens_per_microbatch": 24960}
    cfg = changed(run_config("m", "o", world_size=1), batch=batch)
    run = replace(_run(cfg, _shape("llama", **sizes)), prompt_tokens=1039, response_tokens=57)
    axes = Axes("colocated", 1, 1)
    alone = trainer_memory(run, axes)
    shared = trainer_memory(replace(run, shares_prefixes=True), axes)
    assert shared.causes["activations"] > alone.causes["activations"]
    assert shared.causes["activations"] > 80 * 1096 * 2 * 4 * 64 * 4 * 2


def test_a_plan_for_gpus_counts_with_the_kernels_of_gpus():
    assert _gpu_run(run_config("m", "o", world_size=2), _shape("llama")).kernels.on_gpu


@pytest.mark.parametrize(
    "tp, expected", [(1, 2 * 2 * 2 * 2 * 16), (2, 2 * 2 * 2 * 16), (4, 2 * 2 * 2 * 16)]
)
def test_key_value_heads_are_shared_out_and_then_repeated(tp, expected):
    run = _gpu_run(run_config("m", "o", world_size=8), _shape("llama"), kind="vllm")
    axes = Axes("colocated", 8, 8, inference_tp=tp)
    assert cache_bytes_per_token(run, axes) == expected  # bytes, bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 256), (8192, 256), (96, 1024)])
def test_a_checksum_takes_what_the_plan_says(shape, dtype):
    view = torch.zeros(shape, dtype=dtype)
    with peak_bytes(torch.device("cpu")) as peak:
        checksum(view, Box.whole(shape), shape=shape)
    planned = checksum_bytes(view.numel(), device_type="cpu")
    assert peak.bytes == pytest.approx(planned, rel=0.01)


def test_a_push_takes_buckets_and_checksums():
    # By hand: one trainer sends 4 * numel bytes; the buckets are those of the stream's own plan.
    cfg = run_config("m", "o", placement="split", world_size=2, trainer_ranks=1)
    cfg = changed(cfg, engine={"dtype": "float32"})
    shape = _shape("qwen3", **_WIDE | {"intermediate_size": 4096})
    run = _run(cfg, shape)
    nbytes = 4 * shape.numel
    traffic = Traffic(((1,),), numpy.array([[nbytes], [0]]))
    number = choose_buckets(traffic, CPU_LINK)
    sent, received = traffic.bucket_bytes(number)
    trainer = trainer_memory(run, axes_of(cfg)).causes
    engine = engine_memory(run, axes_of(cfg), memory_bytes=0).causes
    assert number > 1 and trainer["stream buckets"] == 2 * sent[0] == 2 * received[1]
    assert engine["stream buckets"] == trainer["stream buckets"]
    assert engine["checksums of a push"] == 40 * 128 * 4096


def test_the_engine_gets_its_part_of_a_gpu_and_the_cache_the_rest():
    shape = _shape("llama", vocab_size=1000)
    run = _gpu_run(run_config("m", "o", world_size=1), shape, kind="vllm", gpu_memory_frac=0.5)
    engine = engine_memory(run, Axes("split", 2, 1), memory_bytes=16 * 2**30)
    used = sum(size for name, size in engine.causes.items() if name not in _OF_A_PUSH)
    block = 16 * cache_bytes_per_token(run, Axes("split", 2, 1))
    assert 0 <= 8 * 2**30 - used < block
    # 1000 rows become 1024; two tables.
    assert engine_weight_bytes(run, Axes("split", 2, 1)) == 2 * (
        shape.numel + 2 * 24 * shape.hidden
    )


def test_adapters_alone_have_gradients_and_state():
    cfg = run_config("m", "o", world_size=4, dtype="bfloat16")
    cfg = changed(cfg, model={"lora": {"rank": 4}})
    shape, axes = _shape("llama"), Axes("colocated", 4, 4)
    form = LoraForm(rank=4, alpha=8, targets="all-linear")
    numel = adapter_numel(tiny_model("llama"), form)
    plan = trainer_memory(_gpu_run(cfg, shape, lora_numel=numel), axes)
    outs = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]
    adapters = 2 * sum(4 * (a + b) for a, b in outs) // 4
    assert plan.causes["gradients"] == 4 * adapters
    assert plan.causes["optimizer"] == 8 * adapters
    assert plan.causes["weights"] == 4 * adapters + 2 * shards_numel(shape, axes)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_muon_keeps_one_moment_of_the_matrices_that_it_trains(family):
    cfg = run_config("m", "o", world_size=4)
    hf_model, shape, axes = tiny_model(family), _shape(family), Axes("colocated", 1, 1)
    own = dict(hf_model.named_parameters())
    matrices = sum(own[name].numel() for name in block_matrices(hf_model, own))
    plans = [
        trainer_memory(_gpu_run(changed(cfg, optimizer={"kind": kind}), shape), axes)
        for kind in ("adamw", "muon")
    ]
    adamw, muon = (plan.causes["optimizer"] for plan in plans)
    assert adamw == 8 * shape.numel and muon == adamw - 4 * matrices


@pytest.mark.parametrize(
    "targets, numel",
    [(("experts",), 2 * 8 * 4 * (64 + 2 * 48 + 48 + 64)), (r".*\.0\..*q_proj", 4 * (64 + 64))],
)
def test_adapters_are_counted_as_their_targets_say(targets, numel):
    hf_model = tiny_model("qwen3_moe")
    form = LoraForm(rank=4, alpha=8, targets=targets)
    assert adapter_numel(hf_model, form) == numel
    before = {n for n, _ in hf_model.named_parameters()}
    made = Adapters(hf_model, form).names
    assert sum(hf_model.get_parameter(n).numel() for n in made) == numel
    assert not before & set(made)


def test_the_largest_microbatch_is_the_largest():
    cfg = changed(run_config("m", "o", world_size=2), batch={"prompts_per_step": 2**14})
    run = _gpu_run(cfg, _shape("llama"))
    axes = Axes("split", 4, 2)
    room = 2 * 2**30
    most = most_tokens(run, axes, room=room)
    assert trainer_memory(run, axes, tokens=most).total <= room
    assert trainer_memory(run, axes, tokens=most + 256).total > room
    assert most_tokens(run, axes, room=2**20) == 0


def test_no_microbatch_is_tried_that_an_update_cannot_fill(monkeypatch):
    # A tiny model would fit with millions of tokens, whose layout alone takes minutes.
    cfg = changed(
        run_config("m", "o", world_size=2),
        batch={"tokens_per_microbatch": 0, "prompts_per_step": 2, "group_size": 8},
    )
    filled = useful_tokens(cfg, dp_size=2)
    tried: list[int] = []

    def counted_groups(lengths):
        tried.append(sum(lengths))
        return actual_groups(lengths)

    actual_groups = trainer_memory_module.padded_groups
    monkeypatch.setattr(trainer_memory_module, "padded_groups", counted_groups)
    assert most_tokens(_run(cfg, _shape("llama")), Axes("split", 4, 2), room=2**40) == filled
    assert max(tried) <= filled and len(tried) <= 2


def test_options_of_memory_spare_what_they_say():
    def planned(**memory: object) -> dict[str, int]:
        cfg = run_config("m", "o", world_size=4, dtype="bfloat16")
        cfg = changed(cfg, model={"memory": MemorySettings(**memory)}, deterministic=False)
        return dict(trainer_memory(_gpu_run(cfg, shape), Axes("colocated", 4, 4)).causes)

    shape = _shape("llama", num_hidden_layers=8)
    own = planned()
    small = planned(master_dtype="bfloat16", optimizer_dtype="bfloat16")
    for name in ("weights", "gradients", "optimizer"):
        assert 2 * small[name] == own[name]
    eight = planned(optimizer_dtype="int8")
    assert eight["optimizer"] == pytest.approx(own["optimizer"] / 4 * (1 + 4 / 256), abs=1)
    assert planned(reduce="last")["gradients to be reduced"] == 4 * shape.numel
    assert planned(reshard="never")["gathered by FSDP"] == 2 * shape.numel
    assert "optimizer" not in planned(offload="optimizer")
    assert planned(offload="parameters").keys() & {"weights", "gradients", "optimizer"} == set()
    modes = [
        planned(activation_checkpointing=mode)["activations"]
        for mode in ("none", "selective", "full")
    ]
    assert modes[0] > 1.2 * modes[1] and modes[1] > 2 * modes[2]
    away = [
        planned(activation_checkpointing=mode, offload="activations")["activations"]
        for mode in ("none", "full")
    ]
    # The device holds what two of the eight blocks save.
    assert away[0] < 0.5 * modes[0] and away[1] < modes[2]
