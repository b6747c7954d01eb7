"""Held-out evaluation: the estimates, in the loop, and of runs, checkpoints and models alone."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from spmdrl import config
from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.evaluate import Result, table
from spmdrl.report.glossary import values_of
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.rollout.outcomes import ProblemOutcome, eval_sums, outcomes_of, summarize
from spmdrl.tools.commands.evaluate import _show, parse
from spmdrl.tools.commands.export import export
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardResult
from tests.helpers.built import made, refused, small_model
from tests.helpers.drawn import trajectory
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import command


def outcome(
    index: int, rewards, *, source: str = "", answers=(), failed: int = 0
) -> ProblemOutcome:
    return ProblemOutcome(
        index,
        source,
        tuple(rewards),
        tuple(answers),
        lengths=(3,) * (len(rewards) + failed),
        num_truncated=1,
    )


OUTCOMES = [
    outcome(0, (1, 0, 0, 0), source="a"),
    outcome(1, (0, 0, 0, 0), source="b"),
    outcome(2, (1, 0.5, 1, 1.5), source="b"),
]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_and_best_at_k_are_means_over_all_subsets(k):
    found = summarize(OUTCOMES, samples=4)
    best = [[max(some) for some in itertools.combinations(o.rewards, k)] for o in OUTCOMES]
    for name, right in ((f"pass_at_{k}", lambda r: r >= 1), (f"best_at_{k}", float)):
        means = [statistics.mean(map(float, map(right, own))) for own in best]
        assert found[name].mean == pytest.approx(statistics.mean(means), abs=1e-12)
        spread = 1.96 * statistics.stdev(means) / len(means) ** 0.5
        assert found[name].half_width == pytest.approx(spread, abs=1e-12)
        assert found[name].num_problems == 3


def test_sizes_are_powers_of_two_and_the_number_of_samples():
    names = [name for name in summarize([outcome(0, [1] * 6)], samples=6) if "pass" in name]
    assert names == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]
    assert [n for n in summarize([outcome(0, [1])], samples=1) if "pass" in n] == ["pass_at_1"]


def test_right_begins_at_the_threshold_up_to_rounding():
    for rewards, right_at, passes in (
        ((0.7 + 0.2 + 0.1, 0.0), 1.0, 0.5),
        ((0.99, 0.0), 1.0, 0.0),
        ((0.99, 0.5), 0.5, 1.0),
        ((2.0, -1.0), 1.0, 0.5),
    ):
        found = summarize([outcome(0, rewards)], samples=2, right_at=right_at)
        assert found["pass_at_1"].mean == passes, (rewards, right_at)


def test_a_problem_counts_where_it_has_samples_enough():
    some = [outcome(0, (1, 1)), outcome(1, (0,), failed=1), outcome(2, (), failed=2)]
    found = summarize(some, samples=2)
    counts = {name: estimate.num_problems for name, estimate in found.items()}
    assert counts == {
        "reward": 2,
        "pass_at_1": 2,
        "pass_at_2": 1,
        "best_at_1": 2,
        "best_at_2": 1,
        "response_length": 3,
        "truncated_frac": 3,
        "failed_frac": 3,
    }
    assert found["reward"].mean == 0.5 and found["failed_frac"].mean == 0.5
    assert found["pass_at_2"].half_width is None


@pytest.mark.parametrize(
    "answers, rewards, share",
    [
        ("4454", (1, 1, 0, 1), 1.0),
        ("4555", (1, 0, 0, 0), 0.0),
        ("4455", (1, 1, 0, 0), 0.5),
        ("4567", (1, 0, 0, 0), 0.25),
        ("4445", (1, 1, 0, 0), 2 / 3),
    ],
)
def test_maj_is_of_the_most_frequent_answer(answers, rewards, share):
    found = summarize([outcome(0, rewards, answers=answers)], samples=4)
    assert found["maj_at_4"].mean == pytest.approx(share)
    assert "maj_at_4" not in summarize([outcome(0, rewards)], samples=4)


def test_the_loop_reports_every_source_and_only_names_of_the_glossary():
    values = values_of(eval_sums(OUTCOMES, samples=4))
    assert values["eval/a/reward"] == 0.25 and values["eval/b/reward"] == 0.5
    assert values["eval/b/pass_at_n"] == 0.5 and values["eval/pass_at_4"] == pytest.approx(2 / 3)
    assert values["eval/reward"] == pytest.approx(1.25 / 3) and values["eval/reward_ci95"] > 0
    one = values_of(eval_sums([outcome(0, (1,)), outcome(1, (0,))], samples=1))
    assert sorted(one) == [
        f"eval/{name}"
        for name in ("failed_frac", "response_length", "reward", "reward_ci95", "truncated_frac")
    ]
    assert eval_sums([], samples=4) == {}


def _sample(index: int, position: int, reward: RewardResult) -> FinishedEpisode:
    prompt = Prompt(index, (1,), "q", {"prompt": "q", "data_source": "s"})
    drawn = trajectory((1,), [1, 2], is_truncated=position == 0)
    return FinishedEpisode(0, position, prompt, (drawn,), "", reward)


def test_answers_and_numbers_come_from_what_reward_functions_report():
    def reward(value, **reported) -> RewardResult:
        return RewardResult("k", value, parts={"f": value or 0.0, "g": 0.5}, **reported)

    samples = [
        _sample(7, 0, reward(1.0, extras={"f/pred": "42"}, metrics={"f/acc": 1.0})),
        _sample(7, 1, reward(0.0, metrics={"f/pred": 41.0, "f/acc": 0.0})),
        _sample(3, 0, reward(1.0, extras={"f/pred": "42"})),
        _sample(3, 1, reward(None)),
    ]
    first, second = outcomes_of(samples, names={})
    assert (first.index, first.rewards, first.answers) == (3, (1.0,), ("42",))
    assert (second.source, second.rewards, second.answers) == ("s", (1.0, 0.0), ("42", "41.0"))
    assert second.parts == {"f": (1.0, 0.0), "g": (0.5, 0.5), "f/acc": (1.0, 0.0)}
    assert second.lengths == (2, 2) and second.num_truncated == 1
    values = values_of(eval_sums([first, second], samples=2))
    assert values["eval/f/acc/mean"] == 0.5 and values["eval/maj_at_2"] == 0.5


def test_the_table_says_what_right_means_where_rewards_are_not_0_or_1():
    text = table(OUTCOMES, samples=4, right_at=2.0)
    assert "best@4" in text and "right from 2 on" in text and "no sample is right" in text
    text = table(OUTCOMES[:2], samples=4, right_at=1.0)
    assert "best@4" not in text and "no sample is right" not in text
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["data", "all", "a", "b"]


# --------------------------------------------------------------------------- by itself

STEPS = 2


def _trained(cfg: Config) -> None:
    from spmdrl.world.world import World
    from train import train

    train(cfg, World.start(cfg))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run on one rank that evaluated its last weights."""
    from transformers import AutoTokenizer

    where = tmp_path_factory.mktemp("evaluate")
    sizes = dict(hidden_size=64, layers=1, heads=2, kv_heads=1, max_positions=64)
    model = small_model(where / "start", **sizes)
    digits = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(list("0123456789"))
    sources, rows = ("even", "odd"), where / "rows.jsonl"
    row = '{{"prompt": "{0}+{0}=", "data_source": "{1}", "ground_truth": "{2}"}}\n'
    rows.write_text("".join(row.format(i, sources[i % 2], i % 10) for i in range(10, 22)))
    task = dict(train="task:addition", size=100, task_options={"digits": 2})
    cfg = made(
        output_dir=str(where / "run"),
        steps=STEPS,
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=str(model), compute_dtype="float32"),
        data=task | dict(eval=str(rows), max_prompt_tokens=8),
        batch=dict(prompts_per_step=4, group_size=4, tokens_per_microbatch=128),
        sampling=dict(max_response_tokens=24, stop_token_ids=tuple(digits)),
        optimizer=dict(lr=1e-3),
        engine=dict(kind="transformers", dtype="float32", cpu_kv_cache_gib=0.1, max_num_seqs=64),
        # The answer is the last number: the responses end with a digit.
        rewards=dict(functions=("spmdrl.rewards.graders:numeric",)),
        evaluate=dict(every_steps=STEPS, samples=4),
        checkpoint=dict(keep=dict(last=1, best="eval/maj_at_4")),
    )
    run_ranks(1, _trained, cfg)
    return where / "run"


def _evaluated(ranks: int, out: Path, *arguments: object) -> tuple[dict, str]:
    done = command("evaluate", *arguments, "--out", out, ranks=ranks)
    return json.loads(out.read_text()), done.output


def test_a_run_and_its_model_give_what_the_loop_measured_on_any_ranks(run, tmp_path):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    first, looped = [row for row in rows if "eval/reward" in row]
    assert (first["step"], looped["step"]) == (0, STEPS)
    uri = json.loads((run / "mlflow_run.json").read_text())["uri"]
    words = (run, "--which", "best", "--tracking-uri", uri)
    of_run, printed = _evaluated(2, tmp_path / "run.json", *words)
    assert of_run["step"] == STEPS and len(of_run["problems"]) == 12
    assert 0 < of_run["all"]["reward"]["mean"] < 1
    names = {f"eval/{name}": name for name in of_run["all"] if not name.startswith("best")}
    assert {"eval/pass_at_1", "eval/pass_at_2", "eval/pass_at_4", "eval/maj_at_4"} <= names.keys()
    for theirs, name in names.items():
        assert of_run["all"][name]["mean"] == pytest.approx(looped[theirs], abs=1e-12), name
    for source in ("odd", "even"):
        own = of_run["sources"][source]
        assert own["pass_at_4"]["mean"] == pytest.approx(looped[f"eval/{source}/pass_at_n"])
    assert "pass@4" in printed and "maj@4" in printed and " ±" in printed

    # The votes of our own grader's answers, counted anew.
    votes = []
    for problem in of_run["problems"]:
        answers, rewards = problem["answers"], problem["rewards"]
        assert len(answers) == 4 and all(
            (reward == 1) == (answer == str((problem["index"] + 10) % 10))
            for answer, reward in zip(answers, rewards)
        )
        most = max(map(answers.count, answers))
        ahead = {answer for answer in answers if answers.count(answer) == most}
        votes.append(sum(rewards[answers.index(answer)] for answer in ahead) / len(ahead))
    assert of_run["all"]["maj_at_4"]["mean"] == pytest.approx(statistics.mean(votes))
    assert of_run["all"]["maj_at_4"]["half_width"] > 0
    assert of_run["sources"]["odd"]["maj_at_4"]["mean"] == pytest.approx(
        looped["eval/odd/maj_at_n"]
    )

    # The loop wrote the same, and MLflow has both.
    own = json.loads((run / f"evaluations/evaluation_{STEPS}.json").read_text())
    for part in ("all", "sources", "problems"):
        assert own[part] == of_run[part], part
    assert (run / f"evaluations/evaluation_{STEPS}.txt").read_text() in printed
    assert "and to MLflow at sqlite:" in printed
    names_there = {path.name for path in (run / "mlflow_artifacts").rglob("*.json")}
    assert {"evaluation_0.json", f"evaluation_{STEPS}.json", "run.json"} <= names_there
    assert (run / "checkpoints" / "best" / "manifest.json").is_file()

    # A model's folder counts as step 0, by which the loop's first samples were keyed too.
    start, options = run.parent / "start", ("--config", run / "config.yaml")
    of_model, _ = _evaluated(1, tmp_path / "model.json", start, *options)
    assert of_model["step"] == 0
    for theirs, name in names.items():
        assert of_model["all"][name]["mean"] == pytest.approx(first[theirs], abs=1e-12), name


def test_folders_are_told_apart(run, tiny_model, tmp_path):
    flags = ["--data.eval", "task:addition", "--data.max-prompt-tokens", "8"]
    assert parse([str(run), "--which", "best"], world_size=1).which == "best"
    with pytest.raises(ValueError, match="--which best: .* is a model"):
        parse([str(tiny_model), "--which", "best", *flags], world_size=1)
    for part in ("", "checkpoints", "checkpoints/best", f"checkpoints/step_{STEPS}"):
        path = run / part
        request = parse([str(path), "--evaluate.samples", "2"], world_size=3)
        assert request.is_checkpoint and request.cfg.evaluate.samples == 2
        assert request.cfg.layout.world_size == 3 and request.cfg.engine.dtype == "float32"
        assert request.cfg.data.eval.endswith("rows.jsonl") and request.right_at == 1
    for folder in (tiny_model, export(run, out=tmp_path / "exported")):
        request = parse([str(folder), *flags, "--right-at", "0.5"], world_size=1)
        assert not request.is_checkpoint and request.right_at == 0.5
        assert request.out == Path(f"evaluation_{folder.name}.json")
    assert not parse(["owner/name", *flags], world_size=1).is_checkpoint


def hostile_run(folder: Path, marker: Path, **changes: Any) -> Path:
    """Return a run's folder whose config names code that would leave a marker."""
    (folder / "checkpoints").mkdir(parents=True)
    code = folder / "evil.py"
    code.write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    named = dict(rewards=dict(functions=(f"{code}:score",)))
    own = {k: v(code) if callable(v) else v for k, v in changes.items()} or named
    cfg = made(
        output_dir=str(folder),
        data=dict(train="task:addition", size=4, eval="task:addition"),
        layout=dict(device="cpu"),
        **own,
    )
    (folder / "config.yaml").write_text(config.dump(cfg))
    return folder


@pytest.mark.parametrize(
    "changes, names, flag",
    [
        ({}, "rewards.functions: ", "--trust-run"),
        (
            dict(rollout=lambda code: dict(environment=dict(name=f"{code}:Game"))),
            "rollout.environment.name: ",
            "--trust-run",
        ),
        (
            dict(rollout=lambda code: dict(environment=dict(name="tools", tools=f"a, {code}:b"))),
            "rollout.environment.tools: ",
            "--trust-run",
        ),
        (
            dict(
                rollout=dict(
                    environment=dict(name="tools", tools={"python": {"allow_unprotected": True}})
                )
            ),
            "allow_unprotected: True",
            "--trust-run",
        ),
        (
            dict(rewards=lambda code: dict(functions=(f"spmdrl.rewards./..{code}:score",))),
            "rewards.functions: ",
            "--trust-run",
        ),
        (
            dict(
                rollout=lambda code: dict(
                    environment=dict(name="verifiers", load=f"task:x/..{code}:Game")
                )
            ),
            "rollout.environment.load: ",
            "--trust-run",
        ),
        (dict(engine=dict(options={"worker_cls": "evil.Worker"})), "worker_cls", "--trust-run"),
        (dict(model=dict(trust_remote_code=True)), "trust_remote_code", "--trust-remote-code"),
    ],
)
def test_a_run_is_not_believed_in_what_it_would_run(changes, names, flag, tmp_path):
    marker = tmp_path / "marker"
    run = hostile_run(tmp_path / "run", marker, **changes)
    (run / "checkpoints/step_1").mkdir()
    with refused(f"{run}/config.yaml may be somebody else's", names, f"allow it by {flag}"):
        parse([str(run)], world_size=1)
    assert not marker.exists()


def test_what_the_command_line_names_is_believed(tmp_path):
    run = hostile_run(tmp_path / "run", tmp_path / "marker")
    (run / "checkpoints/step_1").mkdir()
    mine = ("--rewards.functions", "spmdrl.rewards.graders:numeric")
    trusted = parse([str(run), "--trust-run"], world_size=1).cfg
    assert trusted.rewards.functions == (f"{run / 'evil.py'}:score",)
    request = parse([str(run), *mine, "--trust-remote-code"], world_size=1)
    assert request.cfg.model.trust_remote_code
    assert not parse([str(run), *mine], world_size=1).cfg.model.trust_remote_code


def test_a_runs_tracker_is_contacted_where_the_command_line_names_it(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "spmdrl.report.trackers.mlflow_tracker.log_files", lambda *a: asked.append(a) or "uri"
    )
    monkeypatch.setattr("spmdrl.evaluate.write", lambda *a, **k: [])
    monkeypatch.setattr("spmdrl.evaluate.table", lambda *a, **k: "")
    run = hostile_run(tmp_path / "run", tmp_path / "marker")
    (run / "checkpoints/step_1").mkdir()
    (run / "mlflow_run.json").write_text('{"uri": "http://elsewhere", "run_id": "1"}')
    mine = ("--rewards.functions", "spmdrl.rewards.graders:numeric")
    for uri in ("", "http://other", "http://elsewhere"):
        request = parse([str(run), *mine, "--tracking-uri", uri], world_size=1)
        _show(request, Result(1, []))
        assert bool(asked) == (uri == "http://elsewhere")
    assert "give --tracking-uri http://elsewhere" in capsys.readouterr().out


def test_what_cannot_be_evaluated_is_refused_with_the_reason(run, tiny_model, tmp_path, capsys):
    shutil.copytree(run / f"checkpoints/step_{STEPS}", tmp_path / "far/from/its/run")
    for arguments, says in (
        ([str(tmp_path / "far/from/its/run")], "give one by --config"),
        ([], "the first argument"),
        (["--data.eval", "x"], "the first argument"),
        ([str(tmp_path)], "neither config.json"),
        ([str(tmp_path / "gone")], "does not exist"),
    ):
        with pytest.raises(ValueError, match=says):
            parse(arguments, world_size=1)
    for arguments, says in (
        ([str(tiny_model)], "data.eval: is empty"),
        ([str(tiny_model), "--data.eval", "rows.jsonl"], "rewards.functions: is empty"),
        (
            [str(tiny_model), "--data.eval", "task:addition", "--data.eval-size", "0"],
            "data.eval_size",
        ),
        ([str(run), "--layout.inference-tp", "2"], "inference_tp"),
    ):
        with pytest.raises(Refusal, match=re.escape(says)):
            parse(arguments, world_size=1)
