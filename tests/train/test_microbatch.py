"""batch.tokens_per_microbatch 0: what is found fits, is the largest, and changes nothing else."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmdrl.check.settings import parse, validate
from spmdrl.config import AlgorithmSettings, BatchSettings, Config
from spmdrl.config.fields import least_tokens, useful_tokens
from spmdrl.credit import per_token
from spmdrl.data.microbatch_plan import partition
from spmdrl.data.prefix_tree import LEAST, prefix_tree
from spmdrl.model.routers import BIAS
from spmdrl.model.tensor_parts import local_part
from spmdrl.tools.commands.create_model import create_model
from spmdrl.train import microbatch_size as microbatch
from spmdrl.train.microbatch_size import Point, RowSequences, SizeProbe, fitting_tokens
from spmdrl.types import Advantages, Batch
from spmdrl.world.machine.live_bytes import peak_bytes
from tests.helpers.comparing import differing, full_parameters
from tests.helpers.policy_runs import advantages, changed, config, own_batch, small_model
from tests.helpers.runs import TINY, metrics, run
from tests.helpers.worlds import another_trainer, with_trainer
from tests.program.test_train import assert_same_end, reward


def _config(where: Path, **options: object) -> Config:
    cfg = config(small_model(where), where / "run", **options)
    return changed(
        cfg,
        data={"max_prompt_tokens": 40},
        sampling={"max_response_tokens": 60},
        batch={"tokens_per_microbatch": 0, "prompts_per_step": 100, "group_size": 8},
    )


# ------------------------------------------------------------------ arithmetic


def test_a_line_through_two_peaks_says_what_fits():
    points = Point(100, 3000), Point(200, 5000)  # 1000 + 20 * tokens
    assert fitting_tokens(*points, room=21000, most=10**6) == 1000
    assert fitting_tokens(*points, room=21000, most=700) == 700
    assert fitting_tokens(*points, room=900, most=700) == 0
    flat = Point(100, 3000), Point(200, 3000)
    assert fitting_tokens(*flat, room=3000, most=700) == 700
    assert fitting_tokens(*flat, room=2999, most=700) == 0


def test_bounds_follow_from_the_config(tmp_path):
    cfg = _config(tmp_path, world_size=4, tp=2, updates=2)
    assert least_tokens(cfg) == 100
    assert useful_tokens(cfg) == 100 * 8 // 2 // 2 * 100  # samples, dp, updates, tokens
    pairs = changed(cfg, algorithm={"objective": "preference"})
    assert least_tokens(pairs) == 200 and useful_tokens(pairs) == 100 // 2 // 2 * 200


@pytest.mark.parametrize("objective", ["rl", "online_preference", "preference", "sft"])
@pytest.mark.parametrize("prompts, updates, dp_size", [(5, 2, 2), (3, 1, 2), (7, 3, 4), (8, 2, 2)])
def test_the_largest_share_is_what_a_dp_rank_gets(objective, prompts, updates, dp_size):
    cfg = Config(
        algorithm=AlgorithmSettings(objective=objective),
        batch=BatchSettings(prompts_per_step=prompts, group_size=8, updates_per_step=updates),
    )
    samples, pairs = cfg.objective.samples, cfg.objective.trains_on_pairs
    group = 8 if samples else 2 if pairs else 1
    group_ids = torch.arange(prompts).repeat_interleave(group)
    lengths = torch.full_like(group_ids, cfg.longest_sequence)
    plan = partition(
        lengths,
        group_ids=group_ids,
        dp_size=dp_size,
        tokens_per_microbatch=10**9,
        num_updates=updates,
        whole_groups=pairs,
    )
    shares = [
        int(lengths[(plan.update_ids == update) & (plan.dp_ids == rank)].sum())
        for update in range(updates)
        for rank in range(dp_size)
    ]
    assert max(shares) == useful_tokens(cfg, dp_size=dp_size)


def test_rows_with_shared_prompts_take_the_budget_that_partition_counts():
    # By hand: of 1024 prompt tokens 1009 are surely shared; each further sequence of a group takes
    # 1124 - 1009 + 1009 // 8 = 241 tokens.
    pair = RowSequences(1124, group=2, prompt=1024)
    assert [pair.tokens(count) for count in (1, 2, 3, 4)] == [1124, 1365, 2489, 2730]
    assert [pair.fitting(tokens) for tokens in (1364, 1365, 2488, 2489, 2730)] == [1, 2, 2, 3, 4]
    assert RowSequences(100).tokens(7) == 700 and RowSequences(100).fitting(799) == 7
    ids = torch.arange(8) // 2
    plan = partition(
        torch.full_like(ids, 1124),
        group_ids=ids,
        dp_size=1,
        tokens_per_microbatch=pair.tokens(8),
        shared=torch.arange(8) % 2 * (1024 - LEAST + 1),
    )
    assert plan.num_microbatches == (1,)


# ------------------------------------------------------------------ real ranks


def _update(trainer: Any) -> dict:
    own = trainer.annotate(own_batch(trainer.world), step=0)
    tokens = per_token(own, advantages()).tokens
    return trainer.update(own, Advantages(tokens, returns=tokens), step=0)


def _find(trainer: Any, room: int) -> dict:
    """Find the size with so many bytes free on the last rank; look at what is left behind."""
    world = trainer.world
    is_last = world.rank == world.world_size - 1
    # Shared by the ranks of this machine.
    microbatch.free_bytes = lambda device: world.world_size * (room if is_last else 10 * room)
    before = full_parameters(trainer), trainer.policy.optimizer.state_dict()["updates"].clone()
    random_state = torch.get_rng_state(), random.getstate()
    assert world.tokens_per_microbatch == least_tokens(world.cfg)
    trainer.size_microbatches()
    found = world.tokens_per_microbatch
    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert random.getstate() == random_state[1]
    assert not trainer.policy.optimizer.gradients()
    assert float(trainer.policy.optimizer.state_dict()["updates"]) == float(before[1]) == 0
    assert not differing(full_parameters(trainer), before[0])
    peaks = {}
    for tokens in (found, found + 400):
        peaks[tokens] = max(_peaks(trainer, tokens))
    other = another_trainer(trainer)  # which tries nothing
    assert _update(trainer) == _update(other)
    assert not differing(full_parameters(trainer), full_parameters(other))
    return {"found": found, "peaks": peaks}


def _peaks(trainer: Any, tokens: int) -> list[int]:
    """Return what each kind of row of so many tokens takes."""
    found = []
    for sequences in microbatch.sequences_to_try(
        trainer.world, longest=trainer.cfg.longest_sequence
    ):
        rows = microbatch.make_rows(
            trainer.world,
            sequences,
            count=sequences.fitting(tokens),
            vocab=96,
            columns=trainer.columns,
        )
        with peak_bytes(trainer.world.device) as peak:
            trainer._rehearse(*rows)
        found.append(peak.bytes)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.grid),
        pytest.param({"advantage": "gae", "kl_coef": 0.01}, marks=pytest.mark.grid),
        {"world_size": 2},
        pytest.param(
            {"world_size": 2, "model": {"memory": {"activation_checkpointing": "full"}}},
            marks=pytest.mark.grid,
        ),
    ],
    ids=["one", "critic, reference", "two", "checkpointing"],
)
def test_what_is_found_fits_and_400_tokens_more_do_not(options, tmp_path):
    cfg = _config(tmp_path, **options)
    room = 8 * 2**20
    results = with_trainer(cfg, _find, room)
    assert len({r["found"] for r in results}) == 1
    found, peaks = results[-1]["found"], results[-1]["peaks"]
    assert 500 < found < useful_tokens(cfg) and found % 256 == 0
    assert peaks[found] <= 0.9 * room < peaks[found + 400], (found, peaks)


@pytest.mark.parametrize("copied_bytes, expected", [(0, 10240), (100, 10240), (400, 5024)])
def test_keys_that_a_shared_prompt_copies_have_room(monkeypatch, tmp_path, copied_bytes, expected):
    # By hand: 1000 bytes for each computed token. Groups of 8 with a prompt of 512 tokens and 1 for
    # the response take 513 + 7 * 78 = 1059 of the budget, for 520 computed tokens and 4096 copied
    # keys: 491 + 3.87 * copied_bytes for each token of the budget.
    cfg = changed(
        _config(tmp_path), data={"max_prompt_tokens": 512}, sampling={"max_response_tokens": 88}
    )
    device = torch.device("cpu")
    world = SimpleNamespace(cfg=cfg, device=device, shares_prefixes=True)
    monkeypatch.setattr(microbatch, "free_bytes", lambda device: 10_240_000 / microbatch.ROOM_FRAC)
    monkeypatch.setattr(SizeProbe, "_most_of", lambda self, own: own)

    def rehearse(batch: Batch, advantages: Advantages) -> None:
        [own, _] = batch.updates[0]
        lengths = own.cu_seqlens.diff().tolist()
        tree = prefix_tree(own.tokens, lengths)
        keys = sum(end - begin for path in tree.paths() for begin, end in path)
        copied = keys - len(tree.sources)
        torch.empty(1000 * len(tree.sources) + copied_bytes * copied, dtype=torch.uint8)

    probe = SizeProbe(rehearse, world, columns=(), vocab=96, longest=600)
    assert probe.find(shares=1) == pytest.approx(expected, abs=256)


def _refused(trainer: Any, room: int) -> str:
    microbatch.free_bytes = lambda device: room * (2 if trainer.world.rank else 20)
    with pytest.raises(ValueError) as refused:
        trainer.size_microbatches()
    return str(refused.value)


def test_too_little_memory_for_one_sequence_is_refused_on_all_ranks(tmp_path):
    for text in with_trainer(_config(tmp_path, world_size=2), _refused, 2**18):
        assert text.startswith(
            "batch.tokens_per_microbatch: 0, and not even the longest sequence, 100 tokens"
        )
        lacking = re.search(
            r"about ([\d.e-]+) GiB, .* memory ([\d.e-]+) GiB .*; ([\d.e-]+) GiB", text
        )
        assert lacking and float(lacking[3]) > 0, text


def test_pairs_stay_together_and_a_router_is_left_alone(tmp_path):
    cfg = _config(tmp_path, objective="preference", loss="dpo")
    cfg = changed(cfg, batch={"prompts_per_step": 3})
    found = with_trainer(cfg, _found)[0]
    assert found["tokens"] == useful_tokens(cfg) == 3 * 200
    folder = small_model(tmp_path, "moe", architecture="deepseek_v3", kv_heads=4, intermediate=16)
    cfg = changed(
        _config(tmp_path, world_size=2, ep=2),
        batch={"prompts_per_step": 4},
        model={"path": str(folder), "moe": {"balance": "bias"}},
    )
    for found in with_trainer(cfg, _found):
        assert found["tokens"] == 4 * 8 // 2 * 100


def _found(trainer: Any) -> dict:
    def state() -> dict[str, torch.Tensor]:
        model = trainer.state_dict()["model"]
        return {name: local_part(tensor).clone() for name, tensor in model.items()}

    before = state()
    trainer.size_microbatches()
    after = state()
    assert not differing(after, before)
    if trainer.cfg.model.moe.balance != "none":
        assert any(BIAS in name for name in after), "routers have a bias that could have moved"
        assert _update(another_trainer(trainer)) == _update(trainer)
    return {"tokens": trainer.world.tokens_per_microbatch}


# ------------------------------------------------------------------ the program


def test_a_run_that_finds_its_size_equals_one_that_is_given_it_and_resumes(tmp_path):
    model = create_model(tmp_path / "start", hidden_size=32, layers=2, heads=2, kv_heads=1)
    flags = TINY["rl"] | {
        "model.path": model,
        "engine.kind": "transformers",
        "layout.placement": "colocated",
        "lag": 0,
        "steps": 2,
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": "9",
    }
    flags["rewards.functions"] = reward(tmp_path, "varied")  # every step must move the weights
    auto, given = tmp_path / "auto", tmp_path / "given"
    open_, steps = {"output-dir": auto, "batch.tokens-per-microbatch": 0}, {"steps": 1}
    finished = run("demo_grpo.yaml", 2, **flags | open_ | steps)
    tokens = int(re.search(r"of (\d+) tokens, as found", finished.output)[1])
    resumed = run("demo_grpo.yaml", 2, **flags | open_)
    assert f"of {tokens} tokens, as found" in resumed.output
    log = (auto / "logs" / "attempt_2" / "rank_0.log").read_text()
    assert f"micro-batches of {tokens} tokens (batch.tokens_per_microbatch: 0, as the ch" in log
    assert "at its peak" not in log, "nothing was tried again"
    run("demo_grpo.yaml", 2, **flags | {"output-dir": given, "batch.tokens-per-microbatch": tokens})
    assert_same_end(auto, given)
    assert len(metrics(given)) == 2


def test_the_dry_run_and_the_planner_say_auto(capsys, tmp_path):
    from spmdrl.report.config_sizes import config_sizes
    from spmdrl.tools.commands.plan import main

    cfg = parse(["--config", "configs/gpu_qwen3_1.7b_8.yaml", "--batch.tokens-per-microbatch", "0"])
    assert not [p for p in validate(cfg) if "tokens_per_microbatch" in p]
    text = config_sizes(cfg)["micro-batches per dp rank"]
    assert text.startswith(f"auto: of {least_tokens(cfg)} to {useful_tokens(cfg)} tokens")
    assert "as found" in config_sizes(cfg, tokens=5000)["micro-batches per dp rank"]
    shape = ["--config", "configs/gpu_qwen3_1.7b_8.yaml", "--shape", "qwen3-8b", "--top", "0"]
    assert main([*shape, "--batch.tokens-per-microbatch", "0"]) == 0
    out = capsys.readouterr().out
    most = re.search(r"largest tokens_per_microbatch that fits: (\d+)", out)[1]
    assert re.search(r"micro-batch of (\d+) tokens \(auto\)", out)[1] == str(
        min(int(most), useful_tokens(cfg))
    )
