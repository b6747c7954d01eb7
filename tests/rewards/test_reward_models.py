"""A trained reward model as a reward: scores of any mesh, shaping, failures, refusals, a run."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from spmdrl import config as configs
from spmdrl.algorithms.shaping import shape
from spmdrl.check import dry_run
from spmdrl.check.settings import parse
from spmdrl.config import Config, ShapingSettings
from spmdrl.evaluate import _with_scores
from spmdrl.rewards.signatures import part_names, reward_models
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.rollout.metrics import batch_sums
from spmdrl.rollout.packing import pack
from spmdrl.tools.commands.export import export
from spmdrl.train.companions.model_rewards import check_reward_model, with_scores
from spmdrl.train.companions.reencoding import Reencoder, other_tokens
from spmdrl.types import Batch, Prompt
from spmdrl.workers.pool import RewardPool, RewardResult
from tests.helpers.built import changed, good, made, small_model, started, training
from tests.helpers.drawn import trajectory
from tests.helpers.policy_runs import LENGTHS, batch, config, sequence
from tests.helpers.pool_runs import drained, submit
from tests.helpers.ragged import scalars_of
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import ROOT, TINY, metrics, run

SHAPING = ShapingSettings(truncated_penalty=0.25, scale=2.0, shift=0.5)
WEIGHTS = (1.0, 0.5, -2.0)
OWN = torch.linspace(0, 1, len(LENGTHS)).double().cos()  # what a function gave each sequence
ROWS = [sequence(i).tolist() for i in range(len(LENGTHS))]


def _classifier(
    where: Path,
    trainer: Path,
    *,
    seed: int = 1,
    labels: int = 1,
    overflows: bool = False,
    **changes: object,
) -> Path:
    """Write a sequence classifier as transformers does, its scores well apart."""
    hf = AutoModelForCausalLM.from_pretrained(trainer).config
    hf.num_labels, hf.architectures = labels, None
    for name, value in changes.items():
        setattr(hf, name, value)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(hf)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
        if overflows:
            # The score is one element of the last state, times a weight by which the larger half
            # of the sequences leaves the numbers of float32; none of them is close to the limit.
            model.model.norm.weight.mul_(100)  # states above 1, so that the weight is finite
            last = torch.stack([_last_state(model, row)[0].abs() for row in ROWS])
            half = last.sort().values[len(ROWS) // 2 - 1 :][:2].mean()
            model.score.weight.zero_()
            model.score.weight[0, 0] = torch.finfo(torch.float32).max / half
    model.save_pretrained(where)
    AutoTokenizer.from_pretrained(trainer).save_pretrained(where)
    return where


def _last_state(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    return model.model(torch.tensor([row])).last_hidden_state[0, -1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("models")
    trainer = small_model(at / "policy")
    scorers = {
        "good": {},
        "other": {"seed": 2},
        "spoiled": {"overflows": True},
        "two": {"labels": 2},
        "short": {"max_position_embeddings": 16},
        "few": {"vocab_size": 64},
    }
    made_of = {name: _classifier(at / name, trainer, **own) for name, own in scorers.items()}
    return {"policy": trainer} | made_of


def _scores(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    """Score each sequence by itself with transformers: [S] float64."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows]).double()


def _config(
    folders: dict,
    out: Path,
    *models: str,
    on_failure: str = "fail",
    shaping: ShapingSettings = ShapingSettings(),
    **options: object,
) -> Config:
    functions = ("r.py:f", *(f"model:{folders[name]}" for name in models))
    weights = WEIGHTS[: len(functions)]
    return changed(
        config(folders["policy"], out, **options),
        sampling=dict(max_response_tokens=64),
        data=dict(max_prompt_tokens=64),
        rewards=dict(functions=functions, weights=weights, shaping=shaping, on_failure=on_failure),
    )


def _batch(cfg: Config, world: object) -> Batch:
    """As exchanged: the function's rewards, unshaped, and an empty column for each model."""
    own = batch(world.dp_index(world.rank), world.dp_size)
    valid = own.scalars.is_valid
    parts = torch.zeros(len(LENGTHS), len(cfg.rewards.functions), dtype=torch.float64)
    parts[:, 0] = torch.where(valid, OWN, 0.0)
    scalars = dataclasses.replace(
        own.scalars, rewards=parts[:, 0].clone(), reward_parts=parts, rows=own.scalars.group_ids
    )
    samples = (
        {"prompt": "p", "response": "r", "reward": float(parts[3, 0]), "group": 1, "sample": 1}
        | {"reward_parts": {"own": float(parts[3, 0])}},
    )
    return dataclasses.replace(own, scalars=scalars, samples=samples)


def _annotate(cfgs: list[Config]) -> list[Batch | str]:
    """Annotate with each config in one world: the batch, or the error's text."""
    from spmdrl.roles import make_trainer

    found = []
    with started(cfgs[0]) as world:
        for cfg in cfgs:
            try:
                trainer = make_trainer(cfg, world)
                assert "reward_model" not in str(trainer.state_dict().keys())
                done = trainer.annotate(_batch(cfg, world), step=3)
                assert len(done.columns) == 1 and "old_logprobs" in done.columns[0][0]
                found.append(dataclasses.replace(done, updates=(), columns=()))
            except ValueError as error:
                found.append(str(error))
    return found


@pytest.fixture(
    scope="module",
    params=[{}, *({"world_size": 2} | own for own in ({}, {"tp": 2}, {"dp_replicate": 2}))],
    ids=["one", "dp", "tp", "replicas"],
)
def annotated(request, folders, tmp_path_factory) -> list[list]:
    """Per rank: what became of the batch under each of four configs."""
    out = tmp_path_factory.mktemp("run")
    options = {"kl_coef": 0.1, "kl_in": "reward"} | request.param  # old logprobs are asked for
    cfgs = [
        _config(folders, out, "good", "other", shaping=SHAPING, **options),
        _config(folders, out, "spoiled", on_failure="drop", **options),
        _config(folders, out, "spoiled", **options),
        _config(folders, out, "policy", **options),
    ]
    return run_ranks(request.param.get("world_size", 1), _annotate, cfgs)


def test_scores_of_any_mesh_are_those_of_transformers(annotated, folders):
    first, second = (_scores(folders[name], ROWS) for name in ("good", "other"))
    assert float(first.std()) > 0.1, "scores too alike to tell a mistake"
    for done, *_ in annotated:
        valid = done.scalars.is_valid
        assert valid.tolist() == [i != 4 for i in range(len(LENGTHS))]
        parts = done.scalars.reward_parts
        torch.testing.assert_close(parts[:, 1], first, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts[:, 2], second, rtol=1e-4, atol=1e-5)
        raw = torch.where(valid, OWN, 0.0) + 0.5 * first - 2.0 * second
        total = shape(
            raw,
            done.scalars.response_lengths,
            done.scalars.is_truncated,
            max_response_tokens=64,
            **dataclasses.asdict(SHAPING),
        )
        expected = torch.where(valid, total, 0.0)
        torch.testing.assert_close(done.scalars.rewards, expected, rtol=1e-4, atol=1e-5)
        (sample,) = done.samples
        assert sample.keys() == {"prompt", "response", "reward", "reward_parts"}
        assert sample["reward_parts"].keys() == {"own", "good", "other"}
        assert sample["reward"] == pytest.approx(float(raw[3]), rel=1e-4)
        assert sample["reward_parts"]["good"] == pytest.approx(float(first[3]), rel=1e-4)
        sums = batch_sums(done)
        for name, values in (
            ("mean", expected),
            ("mean_raw", raw),
            ("good/mean", first),
            ("other/mean", second),
        ):
            total, count = sums[f"reward/{name}"]
            assert (total, count) == (pytest.approx(float(values[valid].sum()), rel=1e-4), 7)
        pairs = expected.view(-1, 2)[[0, 1, 3]]  # group 2 has one valid sample
        spread = math.sqrt(float(pairs.var(dim=1, correction=0).mean()))
        assert sums["reward/std"] == (pytest.approx(spread, rel=1e-4), 1)


def test_every_rank_has_the_same_rewards_to_the_bit(annotated):
    for mine in annotated[1:]:
        for ours, theirs in zip(mine[:2], annotated[0][:2]):
            assert torch.equal(ours.scalars.rewards, theirs.scalars.rewards)
            assert torch.equal(ours.scalars.reward_parts, theirs.scalars.reward_parts)


def test_scores_that_are_not_finite_follow_on_failure(annotated, folders):
    right = _scores(folders["spoiled"], ROWS)
    bad = (~right.isfinite()).tolist()
    assert any(bad[:4]) and not all(bad[:4])
    lost = sum(b for i, b in enumerate(bad) if i != 4)
    first = next(i for i, b in enumerate(bad) if b and i != 4)
    for _, dropped, failed, _ in annotated:
        assert dropped.scalars.is_valid.tolist() == [i != 4 and not b for i, b in enumerate(bad)]
        assert not dropped.scalars.rewards[first] and dropped.scalars.rewards.isfinite().all()
        assert dropped.scalars.reward_parts.isfinite().all()
        kept = dropped.scalars.is_valid
        torch.testing.assert_close(
            dropped.scalars.rewards[kept], (OWN + 0.5 * right)[kept], rtol=1e-4, atol=1e-5
        )
        assert dropped.sums["rollout/failed_rewards"][0] == lost
        assert dropped.sums["reward/errors"][0] == lost
        assert f"step 3: the reward of group {first // 2}, sample {first % 2} (" in failed
        assert f"model:{folders['spoiled']} of rewards.functions " in failed
        assert "rewards.on_failure=drop" in failed


def test_a_causal_lm_is_refused_at_start_on_every_rank(annotated, folders):
    for *_, refused in annotated:
        assert refused.startswith(
            f"rewards.functions: model:{folders['policy']} cannot be a "
            "reward: its weights have no score.weight"
        )


def test_without_a_sample_left_the_run_ends():
    scalars = scalars_of([0.0, 0.0], is_valid=[True, False])
    cfg = made(rewards=dict(functions=("model:m",), on_failure="drop"))
    own = Batch(scalars=scalars, updates=(), update_ids=torch.zeros(2))
    with pytest.raises(RuntimeError, match="step 5: no sample is left.* 1 scores"):
        with_scores(own, {0: torch.tensor([math.inf, 0.0]).double()}, cfg=cfg, step=5)


# --------------------------------------------------------------------------- what does not fit


def _tokenizer_of(folder: Path, out: Path, *, template: str = "") -> Path:
    """Copy a model folder with two characters of its tokenizer exchanged, and a chat template."""
    shutil.copytree(folder, out)
    path = out / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]
    path.write_text(json.dumps(tree))
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokenizer.chat_template = template or None
    (out / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("policy", "no trained reward model"),
        ("few", "embeds 64 tokens, fewer than the policy's"),
        ("two", r"has shape \[2, 32\]; a reward is one number"),
        ("short", "sequences of up to 16 tokens, and .* is 128"),
    ],
)
def test_models_that_cannot_be_a_reward_are_refused(folders, tmp_path, name, says):
    cfg = _config(folders, tmp_path, name)
    with pytest.raises(ValueError, match=says):
        check_reward_model(cfg, str(folders[name]), folder=folders[name])
    check_reward_model(cfg, str(folders["good"]), folder=folders["good"])


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = [
    [{"role": "user", "content": "3 or 7?"}],
    [{"role": "user", "content": "7?"}, {"role": "assistant", "content": "It is 3"}],
    "37 is ",
    "",
]


def _said_again(folders: dict, other: Path) -> list[list[int]]:
    """What a model with another tokenizer is to read of each sequence."""
    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (folders["policy"], other))
    found = []
    for i, ids in enumerate(ROWS):
        text = ours.decode(ids[(LENGTHS[i] + 2) // 3 :], skip_special_tokens=True)
        texts = {
            0: f"<user>3 or 7?;<assistant>{text};",
            1: f"<user>7?;<assistant>It is 3{text};",
            2: f"37 is {text}",
            3: f"9{text}",
        }
        read = theirs(texts[i // 2], add_special_tokens=i >= 4)["input_ids"]
        found.append([*read, theirs.eos_token_id] if i in (4, 5, 7) else read)
    return found


def test_a_model_with_another_tokenizer_reads_what_the_tokens_say(folders, tmp_path):
    other = _tokenizer_of(folders["good"], tmp_path / "exchanged", template=TEMPLATE)
    expected = _said_again(folders, other)
    cut = sorted(map(len, expected))[5]
    shutil.copytree(other, tmp_path / "cut")
    hf = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": cut}
    (tmp_path / "cut" / "config.json").write_text(json.dumps(hf))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p or "9"}) + "\n" for p in PROMPTS))
    places = folders | {"exchanged": other, "cut": tmp_path / "cut"}
    shared = dict(world_size=2, kl_coef=0.1, kl_in="reward")
    cfgs = [
        _config(places, tmp_path / "run", name, on_failure=on_failure, **shared)
        for name, on_failure in (("exchanged", "fail"), ("cut", "drop"), ("cut", "fail"))
    ]
    cfgs = [changed(cfg, data=dict(train=str(rows))) for cfg in cfgs]
    scores, same = _scores(other, expected), _scores(folders["good"], ROWS)
    assert (scores - same).abs().min() > 1e-3, "as if the tokens had been read as they are"
    for done, dropped, failed in run_ranks(2, _annotate, cfgs):
        torch.testing.assert_close(done.scalars.reward_parts[:, 1], scores, rtol=1e-4, atol=1e-5)
        fits = [len(ids) <= cut and i != 4 for i, ids in enumerate(expected)]
        assert dropped.scalars.is_valid.tolist() == fits and 0 < sum(fits) < 7
        kept = torch.tensor(fits)
        torch.testing.assert_close(
            dropped.scalars.reward_parts[kept, 1], scores[kept], rtol=1e-4, atol=1e-5
        )
        assert "cannot read a sequence that is so long in its own tokens" in failed


def test_a_model_with_another_tokenizer_reads_what_responses_begin_with_too(folders, tmp_path):
    other = _tokenizer_of(folders["good"], tmp_path / "exchanged", template=TEMPLATE)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p or "9"}) + "\n" for p in PROMPTS))
    cfg = changed(
        _config(folders | {"x": other}, tmp_path / "run", "x"),
        data=dict(train=str(rows), generation_prefix="= "),
    )
    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (folders["policy"], other))
    said = torch.tensor(ours("37")["input_ids"])
    reencoder = Reencoder(cfg, folder=other, limit=None)
    read = [
        theirs.decode(reencoder._encoded(i, said, is_cut=True, split="train")) for i in range(3)
    ]
    # A turn that the row begins itself gets no other begin.
    assert read == [
        "<user>3 or 7?;<assistant>= 37;",
        "<user>7?;<assistant>It is 337;",
        "37 is = 37",
    ]


def _scored_as_held_out(cfg: Config) -> torch.Tensor:
    with training(cfg) as (world, trainer):
        return trainer.scores(_batch(cfg, world), step=3, split="eval")[1]


def test_held_out_samples_are_read_behind_the_held_out_prompts(folders, tmp_path):
    other = _tokenizer_of(folders["good"], tmp_path / "exchanged", template=TEMPLATE)
    for name, prompts in (("train", ["3"] * 4), ("eval", PROMPTS)):
        lines = [json.dumps({"prompt": p or "9"}) + "\n" for p in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")}
    cfg = changed(_config(folders | {"x": other}, tmp_path / "run", "x"), data=files)
    (found,) = run_ranks(1, _scored_as_held_out, cfg)
    expected = _scores(other, _said_again(folders, other))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _held_out_rewards(cfg: Config) -> list[float]:
    prompt = Prompt(0, tuple(ROWS[0][:2]), "q", {})
    samples = [
        FinishedEpisode(
            slot,
            i,
            prompt,
            (trajectory(row[:2], row[2:], logprobs=[-0.5] * len(row[2:])),),
            "t",
            RewardResult("k", 1.0, parts={"f": 1.0}),
        )
        for slot in range(2)
        for i, row in enumerate(ROWS[:3])
    ]
    with training(cfg) as (world, trainer):
        found = _with_scores(samples, trainer=trainer, world=world, step=3)
    assert [(s.slot, s.sample) for s in found] == [(s.slot, s.sample) for s in samples]
    return [s.reward.value for s in found]


def test_held_out_groups_need_not_fit_a_microbatch_where_pairs_of_training_do(folders, tmp_path):
    pairs = dict(objective="online_preference", loss="dpo")
    cfg = changed(
        _config(folders, tmp_path / "run", "good", **pairs),
        batch=dict(tokens_per_microbatch=max(map(len, ROWS[:3]))),
        evaluate=dict(samples=3),
    )
    (found,) = run_ranks(1, _held_out_rewards, cfg)
    expected = (1.0 + 0.5 * _scores(folders["good"], ROWS[:3])).repeat(2)
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=1e-4, atol=1e-5)


def test_another_tokenizer_that_nothing_can_be_said_in_is_refused(folders, tmp_path):
    other = _tokenizer_of(folders["good"], tmp_path / "exchanged")
    cfg = _config(folders, tmp_path, "good")

    def check(cfg: Config, row: dict | None = None) -> None:
        check_reward_model(cfg, str(other), folder=other, row=row)

    assert "2 of " in other_tokens(cfg, other) and "is '3' to the policy" in other_tokens(
        cfg, other
    )
    assert not other_tokens(cfg, folders["good"])
    check(cfg, {"prompt": "text"})
    with pytest.raises(ValueError, match="has no chat template, and the rows are conv"):
        check(cfg, {"prompt": PROMPTS[0]})
    with pytest.raises(ValueError, match="has no chat template, and the rows are conv"):
        check(changed(cfg, data=dict(chat_template="always")), {"prompt": "text"})
    with pytest.raises(ValueError, match="rollout.environment.*no conversation"):
        own = changed(cfg, data=dict(train="task:addition"))
        check(changed(own, rollout=dict(environment={"name": "calculator"})))
    hf = json.loads((other / "config.json").read_text()) | {"vocab_size": 64}
    (other / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match="and it embeds 64; give it its own"):
        check(cfg)


def _good(functions: tuple[str, ...], **changes: object) -> Config:
    return changed(
        good(rewards=dict(functions=functions), data=dict(eval="task:addition")), **changes
    )


def _parsed(folders: dict, scorer: object, *flags: str) -> Config:
    path, policy = str(ROOT / "configs" / "demo_grpo.yaml"), str(folders["policy"])
    rewards = ["--rewards.functions", "task:addition", f"model:{scorer}"]
    # The file's own folder may hold a run.
    own = ["--output-dir", f"{policy}_run", "--model.path", policy]
    own += ["--engine.kind", "transformers"]  # vLLM has no attention for heads of 8 elements
    return parse([*flags, "--config", path, *own, *rewards])


def test_a_missing_folder_is_refused_before_anything_starts(folders, capsys):
    with pytest.raises(SystemExit):
        _parsed(folders, "./nowhere")
    assert "rewards.functions: folder './nowhere' does not exist" in capsys.readouterr().err


def test_a_dry_run_opens_reward_models(folders, capsys):
    def show(name: str) -> int:
        return dry_run.show(_parsed(folders, folders[name], "--dry-run"))

    assert show("good") == 0
    model = AutoModelForSequenceClassification.from_pretrained(folders["good"])
    count = sum(p.numel() for p in model.parameters())
    assert f"reward model:{folders['good']}: {count:,} parameters" in capsys.readouterr().out
    assert show("policy") == 2
    assert "no trained reward model" in capsys.readouterr().err


def test_a_dry_run_counts_a_policy_with_a_scalar_head(folders, capsys):
    cfg = configs.load_yaml(ROOT / "configs" / "demo_reward_model.yaml")
    cfg = changed(cfg, model=dict(path=str(folders["policy"])))
    model = AutoModelForSequenceClassification.from_pretrained(folders["good"])
    count = sum(p.numel() for p in model.parameters())
    assert dry_run.stream_size(cfg)["parameters"].startswith(f"{count:,} in ")


# --------------------------------------------------------------------------- beside functions


def test_names_and_positions_of_models():
    specs = ("a.py:f", "model:runs/x/scorer", "b.py:f", "model:me/scorer/", "model:.", "task:add")
    assert reward_models(specs) == {1: "runs/x/scorer", 3: "me/scorer/", 4: "."}
    assert part_names(specs) == ("f_0", "scorer_1", "f_2", "scorer_3", "model", "add")


def _pooled(cfg: Config, texts: list[str]) -> tuple[int, list[RewardResult]]:
    with RewardPool(cfg) as pool:
        pool.start()
        num_workers = len(pool._workers)
        for key, text in enumerate(texts):
            submit(pool, key, text, answer="12", data_source="task:addition")
        return num_workers, drained(pool)


def test_workers_score_the_functions_and_leave_the_models_out(tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(completions, **row): return [2.0]\ndef none(completions, **row): return [None]\n"
    )
    functions = (f"{tmp_path}/r.py:f", "model:x", f"{tmp_path}/r.py:f", "task:addition")
    cfg = _good(functions, rewards=dict(weights=(1.0, 7.0, 0.5, 10.0)))
    _, (right, wrong) = _pooled(cfg, ["12", "13"])
    assert right.value == 13.0 and wrong.value == 3.0
    assert right.parts == {"f_0": 2.0, "f_2": 2.0, "addition": 1.0}
    _, (alone,) = _pooled(_good((f"{tmp_path}/r.py:none", "model:x")), ["12"])
    assert alone.value == 0.0 and not alone.failure  # the model applies to every row


def test_models_alone_need_no_worker():
    num_workers, results = _pooled(_good(("model:x",)), ["12", "13"])
    assert num_workers == 0 and [r.key for r in results] == [0, 1]
    assert all(r.value == 0.0 and not r.failure and r.parts == {} for r in results)


def test_what_is_packed_for_a_model_is_not_shaped_and_says_which_sample_it_is():
    sample = FinishedEpisode(
        4,
        1,
        Prompt(0, (5, 6), "q", {}),
        (trajectory((5, 6), [7], logprobs=[-0.5], is_truncated=True),),
        "t",
        RewardResult("k", 1.0, parts={"f": 1.0}),
    )
    made = pack(
        [sample],
        sums={},
        num_shown=1,
        part_names=("f", "scorer"),
        shaping=ShapingSettings(scale=3.0),
        max_response_tokens=8,
        is_partial=True,
    )
    assert made.scalars.rewards.tolist() == [1.0]
    assert made.scalars.reward_parts.tolist() == [[1.0, 0.0]]
    assert (made.samples[0]["group"], made.samples[0]["sample"]) == (4, 1)


# --------------------------------------------------------------------------- a whole run


def _train_scorer(cfg: Config) -> None:
    """Train a reward model as train.py does, in this process alone, and save it."""
    from spmdrl.checkpoint import Checkpointer
    from spmdrl.credit import advantages_of
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.exchange import exchange
    from spmdrl.rollout.row_source import RowSource

    with training(cfg) as (world, trainer):
        source = RowSource(cfg, world, tokenizer=load_tokenizer(cfg))
        for step in range(cfg.steps):
            own = trainer.annotate(exchange(source, world, step=step), step=step)
            trainer.update(own, advantages_of(own, cfg=cfg, world=world, step=step), step=step)
        saver = Checkpointer(cfg, world)
        saver.maybe_save(cfg.steps, trainer, source)
        saver.finish()


def test_a_trained_and_exported_reward_model_is_a_reward(tmp_path):
    sizes = dict(hidden_size=64, heads=2, kv_heads=1, intermediate=288)
    model = small_model(tmp_path / "model", **sizes)
    cfg = changed(
        configs.load_yaml(ROOT / "configs" / "demo_reward_model.yaml"),
        steps=8,
        output_dir=str(tmp_path / "rm"),
        layout=dict(world_size=1, device="cpu"),
        model=dict(path=str(model)),
        batch=dict(prompts_per_step=16),
        optimizer=dict(lr=3e-3),
    )
    run_ranks(1, _train_scorer, cfg)
    scorer = export(tmp_path / "rm", out=tmp_path / "scorer")
    tree = yaml.safe_load((ROOT / "configs" / "demo_grpo.yaml").read_text())
    tree["rewards"] = {
        "functions": ["task:addition", f"model:{scorer}"],
        "weights": [1.0, 0.5],
        "shaping": {"scale": 2.0},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(tree))
    out = tmp_path / "grpo"
    flags = {
        "model.path": model,
        "output-dir": out,
        "steps": 3,
        "evaluate.every-steps": 3,
        "data.eval-size": 4,
        "report.console.samples_every": "1",
    }
    run(str(tmp_path / "grpo.yaml"), 2, **TINY["rl"] | flags)
    rows = metrics(out)
    assert len(rows) == 3
    for row in rows:
        raw = row["reward/addition/mean"] + 0.5 * row["reward/scorer/mean"]
        assert row["reward/mean_raw"] == pytest.approx(raw, abs=1e-9)
        assert row["reward/mean"] == pytest.approx(2 * raw, abs=1e-9)
        assert row["reward/std"] > 0 and row["policy/grad_norm"] > 0, "the model made no difference"
        assert row["time/reward_model"] > 0
    found = json.loads((out / "evaluations" / "evaluation_3.json").read_text())
    parts = found["parts"]
    assert parts.keys() == {"addition", "scorer"} and abs(parts["scorer"]) > 1e-3
    mean = parts["addition"] + 0.5 * parts["scorer"]  # unshaped
    assert found["all"]["reward"]["mean"] == pytest.approx(mean, abs=1e-9)
    _assert_samples_have_the_models_score(out / "samples.jsonl", scorer, max_tokens=8)


def _assert_samples_have_the_models_score(path: Path, scorer: Path, *, max_tokens: int) -> None:
    """Those whose tokens follow from their text: cut at the limit, no special token among them."""
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    samples, known = [json.loads(line) for line in path.read_text().splitlines()], []
    for sample in samples:
        response = tokenizer.encode(sample["response"], add_special_tokens=False)
        if len(response) == max_tokens:
            prompt = tokenizer.encode(sample["prompt"], add_special_tokens=False)
            known.append((prompt + response, sample))
    assert known and "group" not in samples[0]
    for score, (_, sample) in zip(_scores(scorer, [row for row, _ in known]).tolist(), known):
        assert sample["reward_parts"]["scorer"] == pytest.approx(score, rel=1e-3, abs=1e-4)
        assert sample["reward"] == pytest.approx(0.5 * score, rel=1e-3, abs=1e-4)
