"""What-if: a run's own numbers come back, alternatives are measured right, bad input is refused."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from spmdrl.algorithms import registry
from spmdrl.config import load_yaml
from spmdrl.imports import attempt
from spmdrl.rollout.recordings import find_recorded, read_table
from spmdrl.tools.what_if.alternatives import AS_RUN, alternatives
from spmdrl.tools.what_if.measures import cosine, disagreement, effective_share, push_shares, share
from spmdrl.tools.what_if.run import _columns, open_run, select_steps, steps_of
from tests.helpers.built import refused, small_model
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import TINY, metrics, run

REWARD = """
def varied(prompts, completions, **columns):
    return [1 + sum(map(ord, c)) % 7 / 7 for c in completions]
"""
OWN = """
import torch
def half(logprobs, advantages, loss_mask, *, factor=0.5):
    return torch.where(loss_mask, -factor * advantages * logprobs, 0.0), {}
def on_real_data(logprobs, advantages, loss_mask):
    if len(logprobs) > 3:
        raise KeyError("no such token")
    return torch.where(loss_mask, -advantages * logprobs, 0.0), {}
def on_all_data(logprobs, advantages, loss_mask):
    raise KeyError("never")
"""
STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with runs of three steps, each with recordings and all checkpoints.

    `grpo` sampled, on two ranks that both train; `ppo` and `updates` trained again on what it
    recorded, on one rank: with a value model and a KL that moves, and by two updates a step.
    """
    where = tmp_path_factory.mktemp("what_if")
    model = small_model(where / "model", hidden_size=64, heads=2, kv_heads=1)
    (where / "r.py").write_text(REWARD)
    (where / "own.py").write_text(OWN)
    flags = TINY["rl"] | {
        "model.path": model,
        "steps": STEPS,
        "lag": 1,
        "optimizer.lr": 3e-3,
        "rewards.functions": f"{where / 'r.py'}:varied",
        "checkpoint.every-steps": 1,
        "checkpoint.keep.last": STEPS,
    }
    live = {"layout.placement": "colocated", "engine.kind": "transformers"}
    live |= {"algorithm.kl-coef": 0.1, "rollout.record.every": 1, "output-dir": where / "grpo"}
    live |= {"algorithm.loss": "dppo_tv", "algorithm.correction": "none"}
    live |= {"algorithm.loss-options": "{threshold_low: 0.0001, threshold_high: 0.0001}"}
    run("demo_grpo.yaml", 2, **flags | live)
    again = flags | {"layout.placement": "offline", "rollout.record.replay": where / "grpo"}
    ppo = {"algorithm.advantage": "gae", "algorithm.kl-coef": 0.1, "algorithm.kl-in": "reward"}
    ppo |= {"algorithm.kl-control.target": 0.01, "algorithm.kl-control.horizon": 1000}
    ppo |= {"algorithm.correction": "icepop", "algorithm.mask-truncated": "true"}
    run("demo_grpo.yaml", 1, **again | ppo | {"output-dir": where / "ppo"})
    updates = {"batch.updates-per-step": 2, "output-dir": where / "updates"}
    run("demo_grpo.yaml", 1, **again | updates)
    for name in ("ppo", "updates"):
        shutil.copytree(where / "grpo" / "rollouts", where / name / "rollouts")
    return where


def looked_at(where: Path, name: str, steps: tuple[int, ...], settings: list[dict]) -> Any:
    """Return what the command finds, as plain data."""
    from spmdrl.tools.what_if.run import compare_alternatives
    from spmdrl.tools.what_if.text import as_plain_data

    opened = open_run(where / name)
    chosen = alternatives(opened.cfg, others=[json.dumps(one) for one in settings])
    found = [
        as_plain_data(one)
        for one in compare_alternatives(opened, select_steps(opened, steps), chosen)
    ]
    return [one | {"alternatives": {a["name"]: a for a in one["alternatives"]}} for one in found]


def in_one_process(body: Any, *args: Any) -> Any:
    """Return what `body(*args)` returns in a process that no launcher started."""
    (found,) = run_ranks(1, _unlaunched, body, args)
    return found


def _unlaunched(body: Any, args: tuple) -> Any:
    del os.environ["RANK"]
    return body(*args)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_runs_own_settings_give_what_the_run_reported(made, name):
    found = in_one_process(looked_at, made, name, (0, 1, 2), [{"entropy_coef": 0.0}])
    rows = metrics(made / name)
    for step, (one, row) in enumerate(zip(found, rows, strict=True)):
        own = one["alternatives"][AS_RUN]
        assert one["step"] == row["step"] == step
        assert own["cosine"] == pytest.approx(1, abs=1e-12)
        reported = {name for name in own["metrics"] if name in row}
        wanted = {"policy/grad_norm", "policy/loss", "policy/entropy", "policy/mismatch_ess"}
        wanted |= {"policy/dropped_frac"} if name == "grpo" else {"policy/clip_frac"}
        assert wanted <= reported
        for metric in reported:
            value = own["metrics"][metric]
            assert value == pytest.approx(row[metric], rel=1e-5, abs=1e-7), (step, metric)
        # Settings that change nothing change nothing.
        same = one["alternatives"]["entropy_coef 0.0"]
        assert same["cosine"] == pytest.approx(1, abs=1e-12)
    if name == "grpo":
        assert [one["alternatives"][AS_RUN]["metrics"]["policy/staleness"] for one in found] == [
            row["policy/staleness"] for row in rows
        ]
        assert any(row["policy/dropped_frac"] > 0.05 for row in rows)


MEASURED = [
    {"loss": "reinforce", "advantage": "reinforce", "kl_coef": 0.0},
    {"loss": "reinforce", "advantage": "reinforce", "kl_coef": 0.0, "correction": "mis"}
    | {"correction_options": {"level": "token", "upper": 100.0}},
    {"loss": "ppo_clip", "kl_coef": 0.0, "correction": "sequence_mask"}
    | {"correction_options": {"lower": 0.97, "upper": 1.03}},
    {"loss": "dppo_tv", "kl_coef": 0.0}
    | {"loss_options": {"threshold_low": 1e-3, "threshold_high": 1e-3}},
]


def test_alternatives_are_measured_as_their_formulas_say(made):
    own_loss = {"loss": f"{made / 'own.py'}:half", "advantage": "reinforce", "kl_coef": 0.0}
    settings = [*MEASURED, own_loss, {"advantage": "rloo", "loss": "gspo"}]
    (found,) = in_one_process(looked_at, made, "grpo", (2,), settings)
    plain, weighed, masked, dropped, half, gspo = list(found["alternatives"].values())[1:]
    assert gspo["settings"]["aggregation"] == "seq_mean_token_mean"
    # Every advantage is a reward of at least 1, and every weight 1, or rho.
    assert plain["ess"] == pytest.approx(1, abs=1e-6) and plain["clipped"] == plain["masked"] == 0
    about = weighed["metrics"]
    expected = about["policy/mismatch_ratio"] ** 2 * about["policy/mismatch_ess"]
    assert expected < 0.9999 and weighed["ess"] == pytest.approx(expected, rel=1e-5)
    assert weighed["masked"] == about["policy/correction_cut_frac"] == 0
    cut = masked["metrics"]["policy/correction_cut_frac"]
    assert 0 < cut < 1 and masked["masked"] == pytest.approx(cut)
    gone = dropped["metrics"]["policy/dropped_frac"]
    assert gone > 0 and dropped["clipped"] == pytest.approx(gone) and dropped["masked"] == 0
    # Half of a loss has half of its gradient.
    assert half["grad_norm"] == pytest.approx(plain["grad_norm"] / 2, rel=1e-5)
    assert half["cosine"] == pytest.approx(plain["cosine"], abs=1e-5)
    assert -1 <= plain["cosine"] < 1
    # A push is the advantage times the number of tokens, over the tokens of the batch.
    files = find_recorded(made / "grpo").files_of(2)
    told = [row for file in files for row in read_table(file).to_pylist()]
    rows = {(row["group"], row["sample"]): row for row in told}
    total, name = sum(row["response_length"] for row in rows.values()), plain["name"]
    assert len(found["samples"]) == len(rows) == 32
    for one in found["samples"]:
        row = rows[one["group"], one["sample"]]
        expected = row["reward"] * row["response_length"] / total
        assert one["pushes"][name] == pytest.approx(expected, rel=1e-5)


def test_a_step_of_several_updates_gives_the_gradient_of_the_first(made):
    (found,) = in_one_process(looked_at, made, "updates", (1,), [{"advantage": "rloo"}])
    assert "the run took 2 optimizer steps" in found["notes"][0] and not found["recorded"]
    groups = {one["group"] for one in found["samples"] if one["pushes"][AS_RUN] is not None}
    assert groups == set(range(4))


# --------------------------------------------------------------------------- the command


def test_the_command_prints_a_table_and_json_and_writes_a_page(made):
    table, plain, text, failed = in_one_process(_commands, made)
    assert re.search(r"^step 1: 32 samples, weights of .*checkpoints/step_1$", table, flags=re.M)
    assert "in metrics.jsonl" in table and re.search(r"^  as run .* 1\.0000 ", table, flags=re.M)
    (step,) = json.loads(plain)["steps"]
    names = [one["name"] for one in step["alternatives"]]
    assert names == [AS_RUN, "loss gspo, aggregation seq_mean_token_mean", "loss cispo"]
    amounts = [one["amount"] for one in step["samples"]]
    assert amounts == sorted(amounts, reverse=True) and amounts[0] > 0
    # The page has the first of them, in this order, with their tokens in colour.
    shown = re.findall(r'<h2 id="step1_group(\d+)_sample(\d+)"', text)
    first = [(str(one["group"]), str(one["sample"])) for one in step["samples"][:4]]
    assert shown == first and "push +" in text and "push -" in text
    assert all(name in text for name in names)
    # A function of one's own that fails on real tokens: its line, and no alternative's numbers.
    assert failed[0] == 1 and "KeyError: 'no such token'" in failed[1]
    assert re.search(r'own\.py", line 7, in on_real_data', failed[1])


def _commands(where: Path) -> Any:
    from spmdrl.tools.commands.what_if import main

    def called(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(where / "grpo"), "--steps", "1", *words])
        return status, out.getvalue(), err.getvalue()

    page, some = where / "page.html", ("--loss", "gspo", "cispo", "--limit", "4")
    status, plain, _ = called("--json", "--html", str(page), *some)
    first = called("--loss", "cispo")
    assert status == first[0] == 0
    assert called(*some, "--html", "nowhere/page.html")[0] == 2
    failed = called("--loss", f"{where / 'own.py'}:on_real_data")
    return first[1], plain, page.read_text(), (failed[0], failed[2])


# --------------------------------------------------------------------------- what is refused


def test_steps_that_cannot_be_evaluated_are_refused_with_those_that_can(made, tmp_path):
    run_folder = tmp_path / "run"
    shutil.copytree(made / "grpo", run_folder)
    shutil.rmtree(run_folder / "checkpoints" / "step_1")
    opened = open_run(run_folder)
    assert steps_of(opened) == [0, 2] and select_steps(opened, []) == [2]
    with refused("step 1 cannot be evaluated: no checkpoint", "steps that can: 0, 2"):
        select_steps(opened, [0, 1])
    with refused("step 7 cannot be evaluated: it was not recorded"):
        select_steps(opened, [7])
    (file,) = (run_folder / "rollouts").glob("step_000002_replica_0*.parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with refused("step_000002_", "does not match its sha256"):
        select_steps(opened, [2])
    file.write_bytes(whole)
    tensors = next((run_folder / "checkpoints" / "step_2").rglob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with refused("step_2 cannot be used", "it was truncated or changed"):
        select_steps(opened, [2])
    for name in ("step_2", "step_3"):
        shutil.rmtree(run_folder / "checkpoints" / name)
    text = (run_folder / "config.yaml").read_text()
    changed = re.sub(r"^seed: 0$", "seed: 1", text, flags=re.M)
    (run_folder / "config.yaml").write_text(changed)
    with refused("is not of this run", "seed: 0 there, 1 now"):
        select_steps(open_run(run_folder), [0])
    (run_folder / "config.yaml").write_text(text.replace(str(made / "model"), str(made / "gone")))
    with refused("no recorded step has a checkpoint of its first", "checkpoint.every_steps"):
        open_run(run_folder)
    shutil.rmtree(run_folder / "rollouts")
    with refused("holds no whole step of recorded rollouts", "rollout.record.every"):
        open_run(run_folder)
    with refused("config.yaml does not exist"):
        open_run(tmp_path)


def test_a_checkpoint_of_another_config_is_refused_with_the_difference(made, tmp_path):
    run_folder = tmp_path / "run"
    shutil.copytree(made / "grpo", run_folder)
    file = run_folder / "config.yaml"
    file.write_text(file.read_text().replace("kl_coef: 0.1", "kl_coef: 0.2"))
    with refused("written under another config", "algorithm.kl_coef: 0.1 there, 0.2"):
        select_steps(open_run(run_folder), [1])


def test_alternatives_that_are_none_are_refused_by_name(made):
    cfg = load_yaml(made / "grpo" / "config.yaml")
    bad = {
        ("unknown loss 'gpso'", "did you mean gspo"): dict(losses=["gpso"]),
        ("correction with_none", "unknown correction"): dict(corrections=["with_none"]),
        ("no alternative is named",): {},
        ("is named twice",): dict(losses=["cispo", "cispo"]),
        ("unknown key", "clip_high"): dict(others=["{clip_high: 0.3}"]),
        ("expected a mapping",): dict(others=["cispo"]),
        ("unknown option of cispo", "nothing"): dict(
            others=["{loss: cispo, correction: none, loss_options: {nothing: 1}}"]
        ),
        ("the objective cannot change",): dict(others=["{objective: sft}"]),
        ("corrected for twice",): dict(others=["{loss: vespo, correction: icepop}"]),
        ("KeyError: 'never'", "own.py:10"): dict(losses=[f"{made / 'own.py'}:on_all_data"]),
    }
    for words, given in bad.items():
        with refused(*words):
            alternatives(cfg, **given)
    names = [one.name for one in alternatives(cfg, losses=["cispo", "sapo"], corrections=["tis"])]
    assert names == ["loss cispo, correction tis", "loss sapo, correction tis"]
    (one,) = alternatives(cfg, losses=["ppo_clip"])
    assert cfg.algorithm.loss_options and one.cfg.algorithm.loss_options == {}


def test_models_that_no_checkpoint_has_are_refused_before_anything_is_loaded(made):
    from spmdrl.tools.what_if.run import compare_alternatives

    opened = open_run(made / "grpo")
    chosen = alternatives(opened.cfg, advantages=["gae"])
    with refused("alternative advantage gae: needs values, of a value model"):
        next(compare_alternatives(opened, [1], chosen))
    with refused("model.teacher: is empty"):
        alternatives(opened.cfg, advantages=["distill"])


def test_code_that_the_runs_config_names_runs_only_when_allowed(made, tmp_path):
    run_folder = tmp_path / "run"
    shutil.copytree(made / "grpo", run_folder, ignore=shutil.ignore_patterns("checkpoints"))
    file = run_folder / "config.yaml"
    file.write_text(file.read_text().replace("loss: dppo_tv", "loss: theirs.py:evil"))
    with refused("algorithm.loss: theirs.py:evil", "--trust-run"):
        open_run(run_folder)
    assert open_run(run_folder, trust_run=True).cfg.algorithm.loss == "theirs.py:evil"


def test_a_step_whose_gradient_is_not_the_recorded_one_is_refused(made, tmp_path):
    run_folder = tmp_path / "run"
    shutil.copytree(made / "ppo", run_folder)
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"policy/grad_norm": 1.01 * row.get("policy/grad_norm", 1)} for row in rows]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = in_one_process(_refusal, tmp_path, "run", {"advantage": "rloo"})
    assert "step 1: the run's own settings give a gradient norm of" in said
    assert "metrics.jsonl has" in said


def _refusal(where: Path, name: str, settings: dict) -> str:
    try:
        looked_at(where, name, (1,), [settings])
    except ValueError as error:
        return str(error)
    return "accepted"


# --------------------------------------------------------------------------- measures


def test_cosine_is_that_of_the_long_vectors():
    draw = numpy.random.default_rng(0)
    one = {"a": draw.normal(size=(3, 4)), "b": draw.normal(size=5)}
    other = {"a": draw.normal(size=(3, 4)), "c": draw.normal(size=2)}
    dot = float((one["a"] * other["a"]).sum())
    norms = [math.sqrt(sum(float((v * v).sum()) for v in side.values())) for side in (one, other)]
    as_tensors = [{k: torch.from_numpy(v) for k, v in side.items()} for side in (one, other)]
    assert cosine(*as_tensors) == pytest.approx(dot / norms[0] / norms[1], rel=1e-14)
    minus = {k: -v for k, v in as_tensors[0].items()}
    assert cosine(as_tensors[0], minus) == pytest.approx(-1, abs=1e-15)
    assert math.isnan(cosine(as_tensors[0], {})) and math.isnan(cosine({}, {}))


def test_the_effective_share_is_that_of_the_formula():
    weights = numpy.random.default_rng(1).gamma(0.5, size=1000)
    expected = sum(weights) ** 2 / (1000 * sum(w * w for w in weights))
    assert effective_share(torch.from_numpy(weights)) == pytest.approx(expected, rel=1e-12)
    assert effective_share(torch.full((7,), 3.0)) == pytest.approx(1, abs=1e-15)
    assert effective_share(torch.tensor([0.0, 0, 5, 0])) == 0.25
    assert math.isnan(effective_share(torch.zeros(3))) and math.isnan(
        effective_share(torch.ones(0))
    )
    some = torch.tensor([True, True, False, False])
    assert share(some, torch.tensor([True, False, True, True])) == pytest.approx(1 / 3)
    assert math.isnan(share(some, ~some & some))


def test_disagreement_is_of_shares_of_a_whole_push():
    pushes = torch.tensor([[1.0, -1, 2, 0], [10, 10, 20, 0], [0, 0, 0, 0]])
    amounts, up, down = disagreement(push_shares(pushes))
    assert amounts.tolist() == [0.25, 0.5, 0.5, 0]
    assert (up[1], down[1]) == (1, 0) and (up[2], down[2]) == (0, 2)


def test_every_method_can_be_an_alternative_by_its_name(made):
    settings, refusals = [], {}
    cfg = load_yaml(made / "grpo" / "config.yaml")
    for kind in ("loss", "advantage", "correction"):
        own = {"loss": "ppo_clip"} if kind == "correction" else {}
        for name in registry.names(kind):
            one = own | {kind: name}
            _, refusal = attempt(lambda: _columns(cfg, alternatives(cfg, others=[json.dumps(one)])))
            if refusal:
                refusals[name] = str(refusal)
            else:
                settings.append(one)
    # What these follow the run has not: models, turns, greedy samples.
    assert refusals.keys() == {"distill", "gae", "prime", "gigpo", "remax"}, refusals
    assert "greedy_rewards, of a greedy sample" in refusals["remax"]
    (found,) = in_one_process(looked_at, made, "grpo", (2,), settings)
    outcomes = list(found["alternatives"].values())
    assert len(outcomes) == 1 + len(settings)
    for one in outcomes:
        assert one["grad_norm"] > 0 and -1 <= one["cosine"] <= 1, one["name"]
        assert 0 <= one["clipped"] <= 1 and 0 <= one["masked"] <= 1, one["name"]
