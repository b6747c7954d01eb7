"""Recorded rollouts: what comes back, what is refused, replays, and the viewer."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import resource
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch

from spmdrl import config
from spmdrl.check import dry_run
from spmdrl.check.settings import validate
from spmdrl.checkpoint.restore import config_differences
from spmdrl.columns import RouterRoutes
from spmdrl.config import Config
from spmdrl.credit import per_token, sequence_advantages
from spmdrl.report.recorded_groups import Branch, branches_of
from spmdrl.rollout import recorder
from spmdrl.rollout.episode import GREEDY, Draw, FinishedEpisode, Group
from spmdrl.rollout.packing import pack_step
from spmdrl.rollout.recorder import Recorder, digest_line
from spmdrl.rollout.recordings import find_recorded, ranges, read_header, read_rollouts, read_table
from spmdrl.rollout.replay_source import ReplaySource, check_recorded
from spmdrl.rollout.trained_tokens import TrainedTokens, read_trained
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.same_run.differences import config_of as config_of_run
from spmdrl.tools.commands import view as viewer
from spmdrl.types import Advantages, Batch, Microbatch, Prompt, Rollouts, Scalars
from spmdrl.workers.pool import RewardResult
from tests.helpers.built import changed, made, refused, small_model
from tests.helpers.drawn import trajectory
from tests.helpers.pages import part_of, parts_of
from tests.helpers.runs import TINY, metrics, run
from tests.program.test_train import assert_same_end
from tests.rollout.test_tree import compacted

NO_ENGINE = dict(placement="offline", world_size=1, device="cpu")


def config_of(folder: Path, *, every: int = 1, replay: str | Path = "", **rest) -> Config:
    functions = ("r.py:right", "r.py:brief")
    cfg = made(
        output_dir=str(folder),
        steps=3,
        data=dict(train="task:addition", size=100),
        model=dict(path="./somewhere"),
        batch=dict(prompts_per_step=4, group_size=2),
        sampling=dict(max_response_tokens=8),
        rewards=dict(functions=functions, weights=(1.0, 0.5), shaping=dict(scale=2.0)),
        rollout=dict(record=dict(every=every, replay=str(replay))),
    )
    return changed(cfg, **rest)


def group_of(slot: int, *, has_greedy: bool = False) -> Group:
    """A group of two: one whose reward failed, and one of two turns with tokens between."""
    prompt = Prompt(100 + slot, (5, 6, 7 + slot), f"what is <{slot}>?\n", {})
    draw = Draw(0, "train", 2, 8, 1.0, True, (), has_greedy=has_greedy)
    group = Group(slot, 0, slot, prompt, 0, draw)
    one_turn = dict(versions=[2], states=[-1], earned=[0.0])

    def add(sample: int, made: Trajectory, text: str, reward: RewardResult) -> None:
        group.samples[sample] = FinishedEpisode(slot, sample, prompt, (made,), text, reward)

    good = RewardResult("k", -1.0, {"right": -1.0}, seconds=0.1)
    failed = RewardResult("k", None, seconds=0.1, failure="error", message="KeyError: x")
    broken = trajectory(prompt.tokens, [11], logprobs=[-0.1], **one_turn)
    add(0, broken, "no", failed if slot else good)
    two_turns = trajectory(
        prompt.tokens,
        [1, 2, 9, 3],
        is_sampled=[True, True, False, True],
        logprobs=[-0.5, -2.0 - slot, 0.0, -1 / 3],
        versions=[1, 1, -1, 2],
        is_truncated=True,
        states=[2**47, 7],
        earned=[0.25, -1.0],
    )
    parts = {"right": slot, "brief": 0.2}
    add(1, two_turns, "a <b> & c", RewardResult("k", 0.1 + slot, parts))
    if has_greedy:
        greedy = trajectory(prompt.tokens, [4], logprobs=[-0.25], **one_turn)
        add(GREEDY, greedy, "greedy", RewardResult("k", 0.75))
    return group


def record(
    cfg: Config,
    step: int,
    slots: range,
    *,
    replica: int = 0,
    replicas: int = 1,
    has_greedy: bool = False,
) -> Rollouts:
    groups = [group_of(slot, has_greedy=has_greedy) for slot in slots]
    return record_groups(cfg, step, groups, replica=replica, replicas=replicas)


def record_groups(
    cfg: Config, step: int, groups: list[Group], *, replica: int = 0, replicas: int = 1
) -> Rollouts:
    plain = dict(seconds=1.5, measured={}, dropped=[], num_carried=0)
    share = pack_step(groups, cfg, is_first=replica == 0, **plain)
    Recorder(cfg, replica=replica, num_replicas=replicas).record(step, groups, share)
    return share


GAP = 0.125
"""Of the trainer's logprobs to the engine's, nats."""


def record_trained(cfg: Config, step: int, share: Rollouts) -> Advantages:
    """Write what the trainers would: advantages of the config, and logprobs lower by GAP."""
    rows = torch.arange(len(share)).flip(0)  # micro-batches have an order of their own
    bounds = list(pairwise(share.cu_seqlens.tolist()))
    order = torch.cat([torch.arange(*bounds[row]) for row in rows])
    lengths = share.cu_seqlens.diff()[rows]
    one = Microbatch(
        **share.at(order).token_fields(),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        sequence_ids=rows,
    )
    ids = torch.zeros(len(share), dtype=torch.int64)
    batch = Batch(share.scalars, ((one,),), update_ids=ids)
    advantages = per_token(batch, sequence_advantages(batch, cfg=cfg))
    trained = TrainedTokens(cfg, SimpleNamespace(rank=0, dp_size=1, dp_index=lambda rank: 0))
    trained.begin(step)
    trained.add(one.rollout_logprobs - GAP)
    trained.write(step, batch, advantages)
    return advantages


def assert_same_rollouts(a: Rollouts, b: Rollouts) -> None:
    for name in ("tokens", "response_mask", "rollout_logprobs", "policy_versions", "cu_seqlens"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and torch.equal(left, right), name
    for field in dataclasses.fields(Scalars):
        left, right = getattr(a.scalars, field.name), getattr(b.scalars, field.name)
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True, msg=field.name)


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("has_greedy", [False, True])
def test_a_share_comes_back_bit_by_bit(has_greedy, tmp_path):
    cfg = config_of(tmp_path)
    share = record(cfg, 2, range(4), has_greedy=has_greedy)
    files = find_recorded(tmp_path).files_of(2)
    back = read_rollouts(files, part=0, num_parts=1)
    assert_same_rollouts(share, back)
    assert back.samples == share.samples and back.samples[0]["prompt"] == "what is <0>?\n"
    own = {k: v for k, v in share.sums.items() if not k.startswith(("time/", "perf/"))}
    assert back.sums == own
    assert "rollout/truncated_frac" in back.sums and "time/generate" in share.sums
    rows = read_table(files[0], group=3).to_pylist()
    assert [row["sample"] for row in rows] == ([GREEDY] if has_greedy else []) + [0, 1]
    assert all(row["row"] == 103 and row["prompt"] == "what is <3>?\n" for row in rows)
    failed, good = rows[-2:]
    assert failed["failure"] == "error: KeyError: x" and failed["raw_reward"] is None
    assert good["raw_reward"] == 3.1 and good["reward"] == 6.2 and good["turns"] == 2
    assert good["response"] == "a <b> & c" and good["reward_parts"] == [3.0, 0.2]
    assert math.isnan(good["greedy_reward"]) != has_greedy
    if has_greedy:
        assert rows[0]["tokens"] == [5, 6, 10, 4] and rows[0]["reward"] == 1.5
        assert rows[0]["response_mask"] == [False] * 3 + [True]


def test_each_trace_of_an_episode_is_a_row_and_the_viewer_counts_episodes(tmp_path, capsys):
    groups = [group_of(slot) for slot in range(4)]
    for group in groups:
        (whole,) = group.samples[1].traces
        summary = trajectory((8, 9), [3, 4], logprobs=[-0.25, -4.0], states=[-1], earned=[0.0])
        group.samples[1] = dataclasses.replace(group.samples[1], traces=(whole, summary))
    cfg = config_of(tmp_path, algorithm=dict(advantage="rloo"))
    (tmp_path / "config.yaml").write_text(config.dump(cfg))
    share = record_groups(cfg, 0, groups)
    record_trained(cfg, 0, share)
    files = find_recorded(tmp_path).files_of(0)
    assert_same_rollouts(share, read_rollouts(files, part=0, num_parts=1))
    assert len(share) == 12 and len(share.scalars.episodes()) == 8
    rows = read_table(files[0], group=0).to_pylist()
    assert [(row["sample"], row["trace"]) for row in rows] == [(0, 0), (1, 0), (1, 1)]
    assert rows[1]["response"] == rows[2]["response"] and rows[1]["reward"] == rows[2]["reward"]
    assert [row["turns"] for row in rows] == [1, 2, 1]
    assert viewer.main([str(tmp_path), "--step", "0"]) == 0
    # Group 0 has two samples of 1 and 3 + 2 tokens.
    assert capsys.readouterr().out.splitlines()[1].split()[2:6] == ["2", "-0.900", "1.100", "3.0"]
    assert viewer.main([str(tmp_path), "--step", "0", "--group", "0"]) == 0
    out = capsys.readouterr().out
    assert "sample 1, reward 0.2, " in out and "sample 1 trace 1, reward 0.2, " in out
    assert out.count("advantage 2.2, ") == 2


def test_any_number_of_ranks_reads_each_group_once(tmp_path):
    cfg = config_of(tmp_path)
    shares = [
        record(cfg, 0, range(replica, 5, 2), replica=replica, replicas=2) for replica in range(2)
    ]
    files = find_recorded(tmp_path / "rollouts").files_of(0)
    assert len(files) == 2
    for num_parts in (1, 2, 3, 7):
        parts = [read_rollouts(files, part=i, num_parts=num_parts) for i in range(num_parts)]
        groups = [set(part.scalars.group_ids.tolist()) for part in parts]
        assert sorted(g for own in groups for g in own) == list(range(5))
        assert sum(len(part) for part in parts) == 10
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        lengths = {
            name: sum(part.sums.get(name, (0, 0))[0] for part in parts)
            for name in ("rollout/response_length", "rollout/failed_rewards")
        }
        assert lengths == {name: sum(share.sums[name][0] for share in shares) for name in lengths}


def test_steps_are_replaced_whole_and_only_every_nth_is_kept(tmp_path):
    cfg = config_of(tmp_path, every=2)
    for step in range(5):
        for replica in range(2):
            record(cfg, step, range(replica, 4, 2), replica=replica, replicas=2)
    assert list(find_recorded(tmp_path).steps) == [0, 2, 4]
    record(cfg, 2, range(1))  # resumed with one replica
    found = find_recorded(tmp_path)
    assert [path.name for path in found.files_of(2)] == ["step_000002_replica_0_of_1.parquet"]
    assert len(read_rollouts(found.files_of(2), part=0, num_parts=1)) == 2
    assert not list(found.folder.glob(".*")), "partial files are left"
    found.files_of(4)[1].unlink()
    assert list(find_recorded(tmp_path).steps) == [0, 2]
    with pytest.raises(ValueError, match="step 4 was not recorded; there are steps 0, 2"):
        find_recorded(tmp_path).files_of(4)
    assert ranges([0, 5, 10, 15, 16, 18, 19, 20]) == "0 to 15 by 5, 16, 18 to 20"


def test_a_full_disk_ends_the_run_and_leaves_nothing(tmp_path):
    cfg = config_of(tmp_path)
    record(cfg, 0, range(4))
    before = find_recorded(tmp_path).files_of(0)[0].read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # a write beyond fails
        with pytest.raises(RuntimeError, match="rollouts cannot be .*make room"):
            record(cfg, 0, range(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.read_bytes() for path in (tmp_path / "rollouts").glob("*.parquet")] == [before]
    assert len(list((tmp_path / "rollouts").iterdir())) == 2  # its digest, and nothing else


def test_a_folder_that_cannot_be_written_to_is_refused_at_start(tmp_path):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match="rollout.record: .*rollouts cannot be written to"):
        Recorder(config_of(tmp_path), replica=0, num_replicas=1)


# --------------------------------------------------------------------------- the config


def test_a_replay_needs_no_engine_and_its_schedule_does_nothing():
    cfg = replay_config(Path("runs/b"), Path("runs/a"), lag=1)
    cfg = changed(cfg, rollout=dict(schedule=dict(in_flight=True, dynamic=4)))
    assert validate(cfg) == []
    saved = config_of_run(cfg) | {"rollout.record.replay": "runs/other"}
    (line,) = config_differences(saved, cfg)
    assert str(line) == "rollout.record.replay: 'runs/other' there, 'runs/a' now"
    silent = dataclasses.replace(cfg, rollout=config.RolloutSettings())
    recording = changed(silent, rollout=dict(record=dict(every=3)))
    assert config_differences(config_of_run(recording), silent) == []


# --------------------------------------------------------------------------- replays


def replay_config(folder: Path, recorded: Path, **rest) -> Config:
    return config_of(folder, every=0, replay=recorded, layout=NO_ENGINE, **rest)


def replay_source(cfg: Config, *, max_positions: int = 7, vocab_size: int = 12) -> ReplaySource:
    world = SimpleNamespace(cfg=cfg, rank=0, dp_size=1, dp_index=lambda rank: 0, is_dp_leader=True)
    return ReplaySource(cfg, world, max_positions=max_positions, vocab_size=vocab_size)


def test_what_a_replay_cannot_train_on_is_refused_by_name(tmp_path):
    live = config_of(tmp_path / "live")
    for step in (0, 1, 3):
        record(live, step, range(4))
    cfg = replay_config(tmp_path / "again", tmp_path / "live", steps=2)
    assert list(check_recorded(cfg).steps) == [0, 1, 3]
    refused = {
        "not recorded, of steps 4: 2": dict(steps=4),
        r"not recorded, of steps 6: 2, 4, 5": dict(steps=6),
        "batch.group_size: 2 there, 3 now": dict(batch=dict(group_size=3)),
        "rewards.shaping.scale: 2.0 there, 1.0 now": dict(rewards=dict(shaping=dict(scale=1.0))),
    }
    for says, other in refused.items():
        with pytest.raises(ValueError, match=says):
            check_recorded(changed(cfg, **other))
    with pytest.raises(ValueError, match="rollout.record.replay: .*nowhere is not a folder"):
        check_recorded(replay_config(tmp_path / "again", tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    found = list(dry_run.problems(replay_config(tmp_path / "again", tmp_path / "empty")))
    assert "empty holds no whole step of recorded rollouts" in found[0]

    source = replay_source(cfg)
    assert len(source.take(0)) == 8
    with pytest.raises(ValueError, match="step 0 has a sequence of 7 tokens, above .* 6"):
        replay_source(cfg, max_positions=6).take(0)
    with pytest.raises(ValueError, match="the token 11, and the model's embedding 11 rows"):
        replay_source(cfg, vocab_size=11).take(0)
    with pytest.raises(ValueError, match="step 2 was not recorded; there are steps 0, 1, 3"):
        source.take(2)
    file = source.recorded.files_of(1)[0]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="step_000001_.*does not match its sha256"):
        source.take(1)


def test_the_engines_routes_come_back_and_a_run_that_needs_them_is_refused_without(tmp_path):
    groups = [group_of(slot, has_greedy=True) for slot in range(3)]
    made = {}
    for group in groups[:2]:  # the last group has none
        for sample in group.drawn_samples:
            tokens = len(sample.trajectory.tokens)
            routes = (torch.arange((tokens - 1) * 6) * (sample.slot + 3) % 120).view(-1, 3, 2)
            made[sample.slot, sample.sample] = routes = routes.to(torch.int8)
            with_routes = dataclasses.replace(
                sample.trajectory, extra_columns={"routes": RouterRoutes(routes)}
            )
            group.samples[sample.sample] = dataclasses.replace(sample, traces=(with_routes,))
    cfg = config_of(tmp_path / "live", steps=1)
    share = record_groups(cfg, 0, groups)
    replay = replay_config(
        tmp_path / "again", tmp_path / "live", steps=1, model=dict(moe=dict(replay=True))
    )
    source = replay_source(replay)
    back = source.take(0)
    assert_same_rollouts(share, back)
    replayed = back.extra_columns["routes"].rows
    assert replayed.dtype == torch.int8
    assert torch.equal(replayed, share.extra_columns["routes"].rows)
    starts = back.cu_seqlens.tolist()
    for key, a, b in zip(
        zip(back.scalars.group_ids.tolist(), back.scalars.sample_ids.tolist()), starts, starts[1:]
    ):
        own = replayed[a:b]
        assert bool((own[-1] == -1).all()) and torch.equal(
            own[:-1], made.get(key, torch.full_like(own[:-1], -1))
        )
    off = replay_source(changed(replay, model=dict(moe=dict(replay=False))))
    assert not off.take(0).extra_columns
    record(config_of(tmp_path / "without"), 0, range(4))
    without = dict(record=dict(replay=str(tmp_path / "without")))
    with pytest.raises(ValueError, match="model.moe.replay: .* was recorded without the engine's"):
        check_recorded(changed(replay, rollout=without))


REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""


@pytest.mark.proves("record", "lag", "split")
@pytest.mark.proves("replay", "lag")
def test_a_replay_ends_bit_equal_to_the_live_run(tmp_path):
    model = small_model(tmp_path / "model", hidden_size=64, heads=2, kv_heads=1)
    (tmp_path / "r.py").write_text(REWARD)  # varied: every step must move the weights
    live, again = tmp_path / "live", tmp_path / "again"
    flags = TINY["rl"] | {
        "model.path": model,
        "steps": 3,
        "lag": 1,
        "rewards.functions": f"{tmp_path / 'r.py'}:varied",
    }
    run("demo_grpo.yaml", 2, **flags | {"output-dir": live, "rollout.record.every": "1"})
    replay = {"layout.placement": "offline", "rollout.record.replay": live}
    flags |= replay | {"output-dir": again, "evaluate.every-steps": 2}
    finished = run("demo_grpo.yaml", 1, **flags)
    assert "evaluation is left out: a replay has no engine" in finished.output
    assert_same_end(live, again)
    rows = [metrics(folder) for folder in (live, again)]
    assert [row["policy/staleness"] for row in rows[1]] == [0, 1, 1]
    for name in ("rollout/response_length", "policy/mismatch_k3", "policy/grad_norm"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]], name
    assert not (again / "rollouts").exists()
    assert_trained_as_measured(live, rows[0])
    header = read_header(find_recorded(live).files_of(2)[0])
    assert header["step"] == 2 and header["config"]["lag"] == 1
    assert header["config"]["model.path"] == str(model)


def assert_trained_as_measured(run_folder: Path, rows: list[dict]) -> None:
    """The recorded tokens give the metrics of their step."""
    recorded = find_recorded(run_folder)
    for row in rows:
        step = row["step"]
        trained = read_trained(recorded.trained[step], group=None)
        gaps, signs = [], set()
        for file in recorded.files_of(step):
            for one in read_table(file).to_pylist():
                own = trained.pop((one["group"], one["sample"], one["trace"]))
                pairs = zip(one["rollout_logprobs"], one["response_mask"])
                sampled = [logprob for logprob, is_sampled in pairs if is_sampled]
                gaps += [a - b for a, b in zip(sampled, own.logprobs, strict=True)]
                assert len(own.advantages) == len(sampled) and len({*own.advantages}) == 1
                signs.add(own.advantages[0] > 0)
        assert not trained and signs == {True, False}
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(row["policy/mismatch_k1"], rel=1e-3, abs=1e-9)


def test_damage_to_a_recorded_file_is_seen(tmp_path):
    cfg, draw = config_of(tmp_path), random.Random(0)
    record(cfg, 0, range(3))
    (file,) = find_recorded(tmp_path).files_of(0)
    digest, whole = file.with_suffix(".sha256"), file.read_bytes()
    right = read_rollouts([file], part=0, num_parts=1)
    for number in range(300):
        damaged = bytearray(whole)
        if number % 10:
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        else:
            del damaged[draw.randrange(len(whole)) :]
        file.write_bytes(damaged)
        with refused(f"{file} does not match its sha256"):
            read_rollouts([file], part=0, num_parts=1)
    for reading in (read_header, read_table):
        with refused(str(file)):
            reading(file)
    file.write_bytes(whole)
    text = digest.read_text()
    for _ in range(50):
        changed_text = bytearray(text.encode())
        changed_text[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
        digest.write_bytes(changed_text)
        with refused(f"{file} does not match its sha256"):
            read_rollouts([file], part=0, num_parts=1)
    digest.write_text(text)
    assert_same_rollouts(read_rollouts([file], part=0, num_parts=1), right)
    checked = subprocess.run(["sha256sum", "-c", digest.name], cwd=file.parent, capture_output=True)
    assert checked.returncode == 0


def test_a_file_without_its_digest_is_refused(tmp_path):
    record(config_of(tmp_path), 0, range(3))
    (file,) = find_recorded(tmp_path).files_of(0)
    file.with_suffix(".sha256").unlink()
    for reading in (read_header, read_table):
        with refused(f"{file} has no {file.stem}.sha256 beside it"):
            reading(file)


def test_a_file_that_no_run_wrote_is_explained(tmp_path):
    """Its digest is right: a stranger can write one too."""
    cfg, draw = config_of(tmp_path), random.Random(1)
    record(cfg, 0, range(3))
    (file,) = find_recorded(tmp_path).files_of(0)
    digest, whole = file.with_suffix(".sha256"), file.read_bytes()
    for _ in range(100):
        file.write_bytes(whole[: draw.randrange(len(whole))])
        digest.write_text(digest_line(file, file.name))
        with refused(str(file)):
            read_rollouts([file], part=0, num_parts=1)
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(whole))
    for name in ("group", "tokens", "reward_parts", "turn_rewards"):
        pyarrow.parquet.write_table(table.drop_columns([name]), file)
        digest.write_text(digest_line(file, file.name))
        with refused(str(file), name):
            read_rollouts([file], part=0, num_parts=1)


def test_a_replaced_file_is_never_without_its_digest(tmp_path, monkeypatch):
    cfg, rename = config_of(tmp_path), recorder.rename
    record(cfg, 0, range(3))
    (file,) = find_recorded(tmp_path).files_of(0)
    for allowed in range(3):  # a kill before each renaming
        left = iter(range(allowed))

        def renamed(*paths: Path, **folder: Path) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            rename(*paths, **folder)

        monkeypatch.setattr(recorder, "rename", renamed)
        with pytest.raises(KeyboardInterrupt):
            record(cfg, 0, range(allowed + 1))
        read_rollouts([file], part=0, num_parts=1)
    monkeypatch.undo()
    record(cfg, 0, range(2))
    assert len(file.with_suffix(".sha256").read_text().splitlines()) == 1


# --------------------------------------------------------------------------- the viewer


@pytest.fixture
def shown(tmp_path) -> Path:
    """A run's folder with two recorded steps and its config."""
    cfg = config_of(tmp_path, algorithm=dict(advantage="rloo"))
    for step in (0, 1):
        record_trained(cfg, step, record(cfg, step, range(4), has_greedy=True))
    (tmp_path / "config.yaml").write_text(config.dump(cfg))
    return tmp_path


def test_the_viewer_lists_steps_groups_and_one_group(shown, capsys):
    assert viewer.main([str(shown), "--list-steps"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["0", "1"]
    assert viewer.main([str(shown), "--step", "1", "--sort", "reward", "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["3", "2", "1"]
    assert lines[1].split()[:5] == ["3", "104", "2", "6.200", "0.000"]
    assert lines[4] == "... 1 more: --limit 4"
    assert viewer.main([str(shown), "--step", "1", "--sort", "spread"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "0"  # the others have one reward
    assert viewer.main([str(shown), "--step", "1", "--group", "0", "--tokens"]) == 0
    out = capsys.readouterr().out
    assert "greedy, reward 1.5, before shaping 0.75, 1 tokens" in out
    # Leave one out: the rewards after shaping are -2 and 0.2.
    assert "sample 0, reward -2, before shaping -1, right -1, brief 0, advantage -2.2, " in out
    assert "right 0, brief 0.2, advantage 2.2, 3 tokens, cut, 2 turns" in out
    assert "tokens are printed as ids: no tokenizer can be loaded from './somewhere'" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["4", "2", "-2.0000", "0.8825", "2.2", "1"] in lines  # exp(-GAP)
    assert ["5", "9", "-", "-", "-", "-", "(not", "sampled)"] in lines
    assert viewer.main([str(shown), "--step", "0", "--group", "3"]) == 0
    assert "reward failed (error: KeyError: x)" in capsys.readouterr().out


def test_the_page_has_the_responses_of_all_steps_or_of_one_group(shown, capsys, tmp_path):
    page = tmp_path / "group.html"
    small_model(tmp_path / "model", layers=1)
    tokenizer = ["--tokenizer", str(tmp_path / "model")]
    assert viewer.main([str(shown), *tokenizer]) == 0
    assert f"wrote {shown / 'page.html'}" in capsys.readouterr().out
    assert parts_of(shown / "page.html") == ["main", "rollouts-0-1", "rollouts-0-0"]
    asked = [str(shown), "--step", "1", "--group", "0", "--html", str(page)]
    assert viewer.main([*asked, *tokenizer]) == 0
    assert parts_of(page) == ["main", "rollouts-0-1"]
    step = part_of(page, "rollouts-0-1")
    assert step["notes"] == [] and step["part_names"] == ["right", "brief"]
    (group,) = step["groups"]
    assert group["prompt"] == ["what is <0>?\n"] and group["row"] == 100
    greedy, first, second = group["samples"]
    assert greedy["sample"] == -1 and greedy["advantages"] == [] and greedy["raw"] == 0.75
    # Leave one out: the rewards after shaping are -2 and 0.2.
    assert first["advantages"] == [[1, -2.2]] and first["reward"] == -2.0 and first["raw"] == -1.0
    assert second["advantages"] == [[3, 2.2]] and second["truncated"] and second["turns"] == 2
    assert second["mask"] == [[2, 1], [1, 0], [1, 1]] and second["tokens"] == [1, 2, 9, 3]
    assert second["logprobs"] == [-0.5, -2.0, -0.3333]
    assert second["trainer"] == [-0.625, -2.125, -0.4583]
    assert second["versions"] == [[2, 1], [1, -1], [1, 2]]
    assert {str(token) for token in second["tokens"]} <= step["vocabulary"].keys()
    assert viewer.main(asked) == 0
    step = part_of(page, "rollouts-0-1")
    assert step["vocabulary"] == {} and step["groups"][0]["samples"][1]["text"]
    assert "tokens are printed as ids" in step["notes"][0]
    assert viewer.main([*asked[:-1], str(tmp_path / "none" / "page.html")]) == 2
    error = capsys.readouterr().err
    assert "No such file" in error and "cannot be read" not in error


TREE = """
sample 1, 1 tokens
    read: 8 9
    sampled: 10
sample 1 trace 1, 3 tokens, 2 turns
    read: 1 2
    sampled: 3 4
    read: 7
    sampled: 11
    sample 1 trace 2, after token 4 of trace 1, 2 tokens, 2 turns
        read: 5
        sampled: 6
        read: 12
        sampled: 13
"""


def test_the_viewer_draws_an_agents_episode_as_a_tree(tmp_path, capsys):
    group = group_of(0)
    group.samples[1] = dataclasses.replace(group.samples[1], traces=compacted().traces())
    record_groups(config_of(tmp_path), 0, [group, *map(group_of, range(1, 4))])
    asked = [str(tmp_path), "--step", "0", "--group", "0"]
    assert viewer.main(asked) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    drawn = re.sub("reward .* brief [0-9.]+, ", "", "\n".join(["", *lines, ""]))
    assert TREE in drawn
    page = tmp_path / "group.html"
    assert viewer.main([*asked, "--html", str(page)]) == 0
    samples = part_of(page, "rollouts-0-0")["groups"][0]["samples"]
    traces = [(s["trace"], s["parent"], s["depth"], s["start"]) for s in samples if "depth" in s]
    assert traces == [(0, None, 0, 0), (1, None, 0, 0), (2, 1, 1, 4)]


def test_samples_that_begin_with_the_same_token_are_branches_of_their_own():
    rows = [
        dict(sample=0, tokens=[1, 2, 3], response_mask=[False, True, True]),
        dict(sample=0, tokens=[1, 2, 4], response_mask=[False, True, True]),
        dict(sample=0, tokens=[1, 2, 3, 5, 6], response_mask=[False] * 4 + [True]),
        dict(sample=1, tokens=[1, 2], response_mask=[False, True]),
    ]
    assert branches_of(rows) == [Branch(0, None, 0), Branch(1, 0, 1), Branch(3, 0, 1), None]


def test_the_viewer_says_where_it_knows_no_advantages(shown, capsys):
    asked = [str(shown), "--step", "1", "--group", "0"]
    (file,) = find_recorded(shown).trained[1]
    whole = {path: path.read_bytes() for path in (file, file.with_suffix(".sha256"))}
    (other,) = find_recorded(shown).trained[0]
    file.unlink()
    assert viewer.main(asked) == 0
    out = capsys.readouterr().out
    assert "what the trainers did with this step is not recorded" in out
    assert "advantage " not in out
    for path, content in whole.items():
        path.write_bytes(content)
    file.write_bytes(file.read_bytes()[:-9])
    assert viewer.main(asked) == 2
    assert f"{file} does not match its sha256" in capsys.readouterr().err
    # Of another attempt, whose sequences had other lengths.
    table = pyarrow.parquet.read_table(other)
    short = [values[:-1] for values in table["advantages"].to_pylist()]
    table = table.set_column(3, "advantages", pyarrow.array(short, table["advantages"].type))
    pyarrow.parquet.write_table(table, file)
    file.with_suffix(".sha256").write_text(digest_line(file, file.name))
    assert viewer.main(asked) == 2
    assert "1 tokens were sampled, and 0 trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, says",
    [
        (["--step", "7"], "step 7 was not recorded; there are steps 0, 1"),
        (["--step", "1", "--group", "9"], "has no group 9; it has groups 0 to 3"),
    ],
)
def test_the_viewer_names_what_is_there(words, says, shown, capsys):
    assert viewer.main([str(shown), *words]) == 2
    assert says in capsys.readouterr().err
    assert viewer.main([str(shown), "--group", "1"]) == 2
    assert "--group needs --step" in capsys.readouterr().err


def test_the_viewer_runs_nothing_that_a_run_names(tmp_path, capsys, monkeypatch):
    marker = tmp_path / "marker"
    mark = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "evil.py").write_text(mark)
    named = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(named))
    cfg = config_of(tmp_path, model=dict(tokenizer=str(tokenizer), trust_remote_code=True))
    record(cfg, 0, range(2))
    (tmp_path / "config.yaml").write_text(config.dump(cfg))
    monkeypatch.syspath_prepend(str(tmp_path))
    viewer.main([str(tmp_path), "--step", "0", "--group", "0", "--tokens"])
    text = capsys.readouterr().out
    assert "--trust-remote-code" in text and not marker.exists()
    viewer.main([str(tmp_path), "--step", "0", "--group", "0", "--tokens", "--trust-remote-code"])
    assert marker.exists()  # the bait was live
