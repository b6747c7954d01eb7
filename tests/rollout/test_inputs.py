"""What generation hands to training: parts, greedy baselines, shaped rewards, failures by name."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import time

import pytest
import torch

from spmdrl.algorithms.mismatch import NUM_GAP_BINS, correction_advice, gap_max, gap_sums
from spmdrl.algorithms.shaping import shape
from spmdrl.config import Config, ShapingSettings
from spmdrl.engine.protocol import Completion, Drafts, Request
from spmdrl.rollout.episode import GREEDY, Draw, Episode, FinishedEpisode, Group
from spmdrl.rollout.failed_rewards import FailedRewardLog
from spmdrl.rollout.loop import Loop
from spmdrl.rollout.packing import concat_rollouts, empty_rollouts, pack, rollouts_from_dict
from spmdrl.rollout.resumed_work import group_from_dict, group_to_dict
from spmdrl.rollout.sums import source_sums, step_sums, warn_if_all_failed
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.types import Prompt, Scalars, join_sums, round_sums
from spmdrl.workers.pool import RewardPool, RewardResult
from tests.helpers.built import made, small_model
from tests.helpers.drawn import completion, trajectory, values
from tests.helpers.report_world import config as report_config
from tests.helpers.report_world import record_steps, reporting
from tests.helpers.runs import TINY, metrics, run

DRAW = Draw(
    seed=3,
    purpose="train",
    samples=3,
    max_tokens=9,
    temperature=0.8,
    is_seeded=True,
    stop_token_ids=(1,),
)
PROMPTS = [
    (slot, Prompt(index=40 + slot, tokens=(slot, 2), text="q", row={"prompt": "q"}))
    for slot in (4, 0)
]
GROUPS = [Group(0, 7, 4, PROMPTS[0][1], version=2, draw=DRAW)]


class Engine:
    """Finishes two requests per step, the last one first."""

    def __init__(self):
        self.seen: list[Request] = []
        self.open: list[Request] = []
        self.drafts: Drafts | None = None

    def add(self, request: Request) -> None:
        self.seen.append(request)
        self.open.append(request)

    @property
    def is_busy(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Completion]:
        return [
            dataclasses.replace(
                completion(
                    (7, 1),
                    key=r.key,
                    logprobs=(-0.5, -0.25),
                    versions=(2, 2),
                    is_truncated=r.temperature == 0,
                ),
                drafts=self.drafts,
            )
            for r in (self.open.pop() for _ in range(min(2, len(self.open))))
        ]


class Tokenizer:
    def batch_decode(self, rows, *, skip_special_tokens):
        return ["text"] * len(rows)


class Pool:
    """Scores at once: a sample whose key ends in one of `bad` fails."""

    scopes = ()

    def __init__(self, *bad: str):
        self.bad, self.waiting = bad, []

    def submit(self, key, **_):
        failed = dict(failure="error", message="KeyError: 'lost'", seconds=0.5)
        bad = any(key.endswith(end) for end in self.bad)
        self.waiting.append(RewardResult(key, None, **failed) if bad else RewardResult(key, 1.0))

    def poll(self):
        done, self.waiting = self.waiting, []
        return done


class Link:
    """Of a replica of one rank."""

    def step(self, requests) -> None:
        pass


def draw_all(
    pool, *, engine: Engine | None = None, **changes
) -> tuple[list[FinishedEpisode], Engine]:
    engine = engine or Engine()
    loop = Loop(Config(), tokenizer=Tokenizer(), pool=pool, link=Link())
    draw = dataclasses.replace(DRAW, **changes)
    groups = [
        Group(number, 7, slot, prompt, version=2, draw=draw)
        for number, (slot, prompt) in enumerate(PROMPTS)
    ]
    for group in groups:
        loop.admit(group)
    while loop.is_busy:
        loop.tick(engine)
    assert all(group.is_complete for group in groups)
    found = [group.samples[i] for group in groups for i in group.positions]
    return sorted(found, key=lambda s: (s.slot, s.sample)), engine


# ---------------------------------------------------------------- the loop


def test_the_greedy_sample_is_one_more_request_and_changes_no_other():
    plain, without = draw_all(Pool())
    samples, engine = draw_all(Pool(), has_greedy=True)
    assert [(s.slot, s.sample) for s in samples] == [
        (slot, i) for slot in (0, 4) for i in (GREEDY, 0, 1, 2)
    ]
    greedy = [r for r in engine.seen if r.temperature == 0]
    assert len(greedy) == 2 and all(r.seed is None for r in greedy)
    assert [r for r in engine.seen if r.temperature] == without.seen
    drawn = [values(s) for s in samples if s.sample != GREEDY]
    assert drawn == [values(s) for s in plain]


def test_drafts_of_training_samples_are_counted_once():
    loop = Loop(Config(), tokenizer=Tokenizer(), pool=Pool(), link=Link())
    engine = Engine()
    for purpose in ("train", "eval"):
        draw = dataclasses.replace(DRAW, purpose=purpose, samples=3)
        loop.admit(Group(0, 7, 4, PROMPTS[0][1], version=2, draw=draw))
        engine.drafts = Drafts(num_tokens=8, num_accepted=3, num_steps=2)
        while loop.is_busy:
            loop.tick(engine)
    sums = loop.draft_sums()
    assert sums == {"rollout/draft_accepted_frac": (9, 24), "rollout/draft_step_tokens": (15, 6)}
    assert loop.draft_sums() == {}


@pytest.mark.parametrize(
    "purpose, place", [("train", "step 7: "), ("eval", "evaluation after 7 steps: ")]
)
def test_the_first_failed_reward_ends_generation_by_name(purpose, place):
    engine = Engine()
    says = f"{place}the reward of data row 41, sample 1 failed: error after 0.5 s: KeyError: 'lost'"
    advice = "more may follow. Fix the reward function, or set rewards.on_failure=drop"
    with pytest.raises(RuntimeError) as caught:
        draw_all(Pool("-0-1"), engine=engine, purpose=purpose)
    assert str(caught.value).startswith(f"{says}\n  response: 'text'\n")
    assert advice in str(caught.value)
    assert len(engine.open) == 4  # it did not wait for the engine


def test_a_failed_greedy_reward_is_named_as_such_and_can_be_dropped():
    with pytest.raises(RuntimeError, match="data row 45, the greedy sample failed"):
        draw_all(Pool("4-greedy"), has_greedy=True)
    samples, _ = draw_all(Pool("4-greedy", "0-2"), has_greedy=True, must_score=False)
    assert [(s.slot, s.sample) for s in samples if s.reward.failure] == [(0, 2), (4, GREEDY)]
    scalars = pack(samples, sums={}, num_shown=0).scalars
    assert scalars.greedy_rewards[:3].tolist() == [1.0] * 3
    assert scalars.greedy_rewards[3:].isnan().all()
    assert scalars.is_valid.tolist() == [True, True, False, True, True, True]


def test_a_hanging_reward_is_waited_for_once_not_once_per_sample(tmp_path):
    (tmp_path / "r.py").write_text("import time\ndef f(completions, **row): time.sleep(1000)\n")
    rewards = dict(functions=(f"{tmp_path}/r.py:f",), timeout_s=3.0)
    with RewardPool(made(rewards=rewards)) as pool:
        pool.start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="timeout after "):
            draw_all(pool, samples=16)
        assert time.monotonic() - began < 40  # 32 samples: 96 s


def test_a_replica_without_one_good_reward_is_warned_about_once(caplog):
    caplog.set_level(logging.WARNING)
    samples, _ = draw_all(Pool("0-2"), must_score=False)
    caplog.clear()
    warn_if_all_failed(samples, GROUPS)
    assert not caplog.records
    samples, _ = draw_all(Pool(""), must_score=False)
    caplog.clear()
    warn_if_all_failed(samples, GROUPS)
    (record,) = caplog.records
    for part in ("step 7", "all 6 samples", "data row 41, sample 0", "KeyError: 'lost'"):
        assert part in record.getMessage()


def test_the_first_dropped_sample_of_each_kind_is_logged_then_counts(caplog):
    caplog.set_level(logging.WARNING)
    draw_all(Pool("0-1", "0-2"), must_score=False)
    (record,) = caplog.records
    for part in ("step 7: left out:", "data row 41, sample ", "error after 0.5 s: KeyError"):
        assert part in record.getMessage()
    caplog.clear()
    dropped, (sample, *_) = FailedRewardLog(), draw_all(Pool())[0]
    for number in range(150):
        for name in ("f: KeyError: ", "f: ValueError: "):
            failed = RewardResult("k", failure="error", message=f"{name}{number}")
            dropped.add(dataclasses.replace(sample, reward=failed), where="step 1")
    said = [record.getMessage() for record in caplog.records]
    assert sum("left out: the reward of data row" in text for text in said) == 2
    counts = [int(text.split()[2]) for text in said if "of this replica left out so far" in text]
    assert counts == [10, 10, 100, 100]
    assert said[-1].endswith("left out so far: error: f: ValueError")
    caplog.clear()
    for number in range(1000):  # as many kinds
        failed = RewardResult("k", failure="bad_value", message=f"{number}")
        dropped.add(dataclasses.replace(sample, reward=failed), where="step 1")
    assert len(caplog.records) < 25


# ---------------------------------------------------------------- packing


def sample(
    slot: int, number: int, value: float | None, *, length: int = 2, **parts
) -> FinishedEpisode:
    drawn = trajectory(
        PROMPTS[0][1].tokens,
        range(length),
        logprobs=(-0.5,) * length,
        versions=(2,) * length,
        is_truncated=length > 4,
    )
    return FinishedEpisode(
        slot,
        number,
        PROMPTS[0][1],
        (drawn,),
        "text",
        RewardResult("k", value, parts=parts, failure=None if value is not None else "error"),
    )


SAMPLES = [
    sample(0, GREEDY, 0.5, length=5, right=0.5),
    sample(0, 0, 1.5, right=1.0, format=1.0),
    sample(0, 1, 1.0, length=5, right=1.0),
    sample(1, 0, None, right=1.0),
]


def test_parts_and_greedy_rewards_are_columns_of_the_sampled_sequences():
    scalars = pack(SAMPLES, sums={}, num_shown=0, part_names=("format", "right")).scalars
    assert scalars.reward_parts.tolist() == [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert scalars.greedy_rewards.tolist()[:2] == [0.5, 0.5]
    assert math.isnan(scalars.greedy_rewards[2])  # this prompt has none
    assert scalars.rewards.tolist() == [1.5, 1.0, 0.0]
    assert scalars.is_valid.tolist() == [True, True, False]
    assert len(scalars) == 3 and int(scalars.lengths.sum()) == 4 + 7 + 4
    one = pack(SAMPLES, sums={}, num_shown=0).scalars  # one task's grader
    assert one.reward_parts.tolist() == [[1.5], [1.0], [0.0]]


def test_each_trace_of_a_sample_is_a_sequence_with_the_samples_numbers():
    cut = sample(0, 1, 1.0, length=5, right=1.0)
    branched = dataclasses.replace(cut, traces=(*cut.traces, *SAMPLES[1].traces))
    rollouts = pack([SAMPLES[1], branched], sums={}, num_shown=0, part_names=("right", "format"))
    scalars = rollouts.scalars
    assert scalars.sample_ids.tolist() == [0, 1, 1]
    assert scalars.traces.tolist() == [0, 0, 1]
    assert scalars.response_lengths.tolist() == [2, 5, 2]
    assert scalars.is_truncated.tolist() == [False, True, False]
    assert scalars.rewards.tolist() == [1.5, 1.0, 1.0]
    assert scalars.reward_parts.tolist() == [[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    all_traces = [*SAMPLES[1].traces, *branched.traces]
    assert rollouts.cu_seqlens.diff().tolist() == [len(t.tokens) for t in all_traces]
    sums = step_sums([SAMPLES[1], branched], is_first=True)
    assert sums["rollout/response_length"] == (2 + 7, 2)
    assert sums["rollout/truncated_frac"] == (1, 2)


def test_shown_samples_have_each_functions_own_reward_by_its_name():
    noted = sample(2, 0, 0.25, right=0.5, other=-1.0)
    noted.reward.extras["right"] = "a text of the same name"
    shown = pack([*SAMPLES, noted], sums={}, num_shown=3, part_names=("format", "right")).samples
    assert [row["reward_parts"] for row in shown] == [
        {"right": 1.0, "format": 1.0},
        {"right": 1.0},
        {"right": 0.5, "other": -1.0},
    ]
    assert shown[2]["reward/right"] == "a text of the same name"
    retried = dataclasses.replace(noted, reward=dataclasses.replace(noted.reward, retries=3))
    assert step_sums([noted, retried, retried], is_first=False)["reward/retries"] == (6, 0)


def test_shaping_changes_rewards_and_baselines_but_no_part_and_no_failed_sample():
    shaping = ShapingSettings(
        overlong_tokens=2, overlong_penalty=0.5, truncated_penalty=0.25, shift=1.0
    )
    scalars = pack(
        SAMPLES, sums={}, num_shown=0, part_names=("right",), shaping=shaping, max_response_tokens=6
    ).scalars
    assert scalars.rewards.tolist() == [2.5, 1.5, 0.0]  # 1.0 - 0.5 / 2 - 0.25 + 1.0
    assert scalars.greedy_rewards.tolist()[:2] == [1.0, 1.0]
    assert scalars.reward_parts.tolist() == [[1.0], [1.0], [1.0]]


def test_rollouts_keep_their_new_columns_through_a_checkpoint():
    made = pack(SAMPLES, sums={}, num_shown=1, part_names=("format", "right"))
    file = io.BytesIO()
    torch.save(dataclasses.asdict(made), file)
    file.seek(0)
    loaded = rollouts_from_dict(torch.load(file, weights_only=False))
    joined = concat_rollouts([empty_rollouts(), loaded, empty_rollouts()])
    for name, values in vars(made.scalars).items():
        torch.testing.assert_close(
            getattr(joined.scalars, name), values, rtol=0, atol=0, equal_nan=True
        )
    assert len(concat_rollouts([empty_rollouts(), empty_rollouts()])) == 0


def test_a_group_under_way_goes_on_as_it_was_saved():
    prompt = Prompt(index=44, tokens=(4, 2), text="q", row={})
    group = Group(3, 7, 4, prompt, version=2, draw=DRAW)
    done = trajectory((9, 8), [7, 5, 1], versions=[2] * 3, logprobs=[-0.5] * 3, states=[6])
    seen = dataclasses.replace(prompt, tokens=(9, 8), text="opened")
    group.samples[0] = FinishedEpisode(4, 0, seen, (done,), "text", RewardResult("k", 1.0))
    half = Episode(
        group, 1, Trajectory.from_prompt((4, 2)).append_completion(completion([3], versions=[2]))
    )
    plain = group_to_dict(group, [half])
    again, (going_on,) = group_from_dict(plain, number=3, draw=DRAW, prompt=prompt)
    assert values(again.samples[0]) == values(group.samples[0])
    assert going_on.group is again and going_on.request() == half.request()


def test_scalars_made_without_the_new_columns_have_them_all_the_same():
    made = pack(SAMPLES, sums={}, num_shown=0).scalars
    old = {k: v for k, v in vars(made).items() if k not in ("reward_parts", "greedy_rewards")}
    scalars = Scalars(**old)  # as in a checkpoint of an earlier version
    assert torch.equal(scalars.reward_parts, scalars.rewards[:, None])
    assert scalars.greedy_rewards.shape == (3,) and scalars.greedy_rewards.isnan().all()
    moved = dataclasses.replace(made, rewards=made.rewards + 1)
    assert torch.equal(moved.reward_parts, made.reward_parts)


def test_shaping_goes_penalties_scale_clamp():
    rewards, lengths = torch.tensor([1.0, 1.0, -1.0, math.nan]), torch.tensor([2, 10, 10, 9])
    cut = torch.tensor([False, True, True, False])
    options = dict(overlong_tokens=4, truncated_factor=0.5, truncated_penalty=0.25, scale=2.0)
    got, unchanged = (
        shape(rewards, lengths, cut, max_response_tokens=10, **dataclasses.asdict(own))
        for own in (ShapingSettings(**options, clamp_low=-3.0), ShapingSettings())
    )
    assert got.tolist()[:3] == [2.0, -0.5, -3.0] and math.isnan(got[3])
    assert unchanged[:3].tolist() == [1.0, 1.0, -1.0]


# ---------------------------------------------------------------- engine against trainer


def advice(correction: str, lag: int, *, ess: float = 0.9, outside: float = 0.0) -> str:
    return correction_advice(
        {"policy/mismatch_ess": ess, "policy/mismatch_outside_frac": outside}, correction, lag
    )


def test_the_advice_comes_when_the_correction_rests_on_few_tokens():
    assert advice("tis", 1, ess=0.5, outside=0.05) == ""
    assert correction_advice({}, "tis", 1) == ""
    for text in (advice("tis", 3, ess=0.4), advice("tis", 3, outside=0.06)):
        for part in ("'tis' is not enough for lag 3", "icepop or mis", "lower lag below 3"):
            assert part in text
    assert "unless the loss weighs by pi / mu" in advice("none", 1, ess=0.1)
    assert "icepop" not in advice("mis", 1, ess=0.1)
    assert "engine.dtype" in advice("tis", 0, ess=0.1) and "lower lag" not in advice(
        "tis", 0, ess=0.1
    )
    assert "mismatch_ess nan" in advice("tis", 1, ess=math.nan)


def test_a_run_warns_once_of_a_correction_that_is_not_enough(tmp_path, caplog):
    with reporting(report_config(tmp_path)) as report:
        record_steps(report, 0, 2)
        for step in (2, 3):
            report.record(step, {"policy/mismatch_ess": (30, 100)}, seconds={})
    (text,) = [r.getMessage() for r in caplog.records if "not enough" in r.getMessage()]
    assert text.startswith("step 2: policy/mismatch_ess 0.30 (healthy from 0.5)")


def test_gap_metrics_come_from_the_sum_of_all_ranks():
    histogram = torch.zeros(NUM_GAP_BINS, dtype=torch.float64)
    assert gap_sums(histogram) == {}
    histogram[300], histogram[350] = 998.0, 2.0
    found = gap_sums(histogram)
    assert found["policy/mismatch_prob_diff_max"] == (float(gap_max(histogram)), 1.0)
    assert found["policy/mismatch_prob_diff_p999"][0] == pytest.approx(0.1, rel=0.05)


# ---------------------------------------------------------------- the whole program


def test_remax_trains_on_sampled_responses_with_greedy_baselines(tmp_path):
    (tmp_path / "r.py").write_text(
        "def varied(completions, **row): return [sum(map(ord, completions[0])) % 7 / 7]\n"
    )
    flags = {
        "model.path": small_model(tmp_path / "model", hidden_size=64, heads=2, kv_heads=1),
        "output-dir": tmp_path / "out",
        "steps": 2,
        "rewards.functions": f"{tmp_path}/r.py:varied",
        "rewards.scope": "sample",  # the greedy response is in no group
        "rewards.shaping.scale": "2.0",
        "rewards.shaping.shift": "1.0",
        "algorithm.advantage": "remax",
    }
    run("demo_grpo.yaml", 2, **TINY["rl"], **flags)
    rows = metrics(tmp_path / "out")
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/samples"] == 32 and row["rollout/failed_greedy_rewards"] == 0
        assert 0 <= row["rollout/greedy_reward"] <= 1 and row["policy/grad_norm"] > 0
        assert row["reward/mean"] == pytest.approx(2 * (row["reward/mean_raw"] + 1))


def test_metrics_are_the_same_bits_however_replicas_share_the_samples():
    samples = [
        dataclasses.replace(
            SAMPLES[0],
            slot=i,
            sample=0,
            reward=RewardResult(None, 10.0 ** (i % 7) / 3, parts={"a": (-0.9) ** i / 3}),
        )
        for i in range(40)
    ]

    def totals(count: int, order: int) -> dict[str, tuple[float, float]]:
        """Return the sums of so many replicas, which deal samples in turns."""
        sums = []
        for replica in range(count):
            own = samples[::order][replica::count]
            groups = [Group(s.slot, 0, s.slot, s.prompt, 0, DRAW, {0: s}) for s in own]
            sums.append(step_sums(own, is_first=replica == 0))
            sums.append(source_sums(groups, ["first", "second"], is_first=replica == 0))
        return round_sums(join_sums(*sums[::order]))

    alone = totals(1, 1)
    assert alone["reward/a/mean"] == (math.fsum((-0.9) ** i / 3 for i in range(40)), 40)
    assert alone["source/first/reward"][1] == 40
    for count, order in ((1, -1), (2, 1), (3, -1), (7, 1)):
        assert totals(count, order) == alone
