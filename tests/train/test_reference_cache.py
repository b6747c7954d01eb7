"""The reference's logprobs on disk: equal to computed ones, reused, never used when stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spmdrl.config import Config
from spmdrl.data.examples import PairSource
from spmdrl.data.tokenizer import load_tokenizer
from tests.helpers.comparing import assert_same_sums, differing
from tests.helpers.policy_runs import changed, small_model
from tests.helpers.worlds import Said, in_world, make_trainer
from tests.train.test_preference import (
    NARROW,
    batch_of_pairs,
    config,
    jsonl,
    ragged,
    train_on_pairs,
)

NUM_ROWS, ROWS_PER_STEP = 24, 6
LAYOUTS = {"one": {}, "dp": dict(world_size=2), "tp": dict(world_size=2, tp=2)}


def _config(folder: Path, *, cache: object, rows: str = "", **options: object) -> Config:
    cfg = config(
        rows or str(folder / "rows.jsonl"),
        model=folder / "model",
        out=folder / "run",
        rows=ROWS_PER_STEP,
        budget=NARROW,
        **options,
    )
    of = {"cache": bool(cache), "cache_folder": cache if isinstance(cache, str) else ""}
    return changed(cfg, model={"reference": of | {"path": str(folder / "reference")}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("cache")
    small_model(where)
    small_model(where, "reference", seed=7)
    jsonl(where, ragged(NUM_ROWS))
    return where


def _columns(trainer: object, world: object, *, steps: int) -> list[torch.Tensor]:
    """ref_logprobs of this rank's micro-batches, step after step."""
    found = []
    for step in range(steps):
        own = trainer.annotate(batch_of_pairs(trainer.cfg, world, step=step), step=step)
        found += [columns["ref_logprobs"] for columns in own.columns[0]]
    return found


def _compare(world: Any, without: Config, *, unshared: Path | None = None) -> dict:
    """Columns and training with and without the cache; then what a second run says."""
    from spmdrl.train.companions import reference_cache, reference_table

    with_cache, said = world.cfg, Said()
    if unshared is not None:  # each rank sees a folder of its own
        own = {"cache_folder": str(unshared / str(world.rank))}
        with_cache = changed(with_cache, model={"reference": own})
    sent, send = [], reference_table._sent
    reference_table._sent = lambda *args, **sizes: sent.append(sizes) or send(*args, **sizes)
    trainer = make_trainer(with_cache, world)
    found = {"first": said.take(), "has_model": hasattr(trainer.companions["reference"], "model")}
    plain = make_trainer(without, world)
    pairs = zip(_columns(trainer, world, steps=8), _columns(plain, world, steps=8), strict=True)
    pairs = list(pairs)
    found["zeros"] = all(torch.equal(a == 0, b == 0) for a, b in pairs)
    found["gap"] = max(float((a - b).abs().max()) for a, b in pairs)
    found["sums"] = [
        train_on_pairs(cfg, world, steps=2, trainer=p)["sums"]
        for cfg, p in ((with_cache, trainer), (without, plain))
    ]
    said.take()
    reference_cache.ShardedModel = None  # a second run loads no reference
    _columns(make_trainer(with_cache, world), world, steps=1)
    return found | {"second": said.take(), "sent": len(sent)}


@pytest.mark.parametrize(
    "layout", ["dp", *(pytest.param(name, marks=pytest.mark.grid) for name in ("one", "tp"))]
)
def test_looked_up_logprobs_are_those_computed_and_are_reused(layout, folder, tmp_path):
    configs = [
        changed(_config(folder, cache=cache, **LAYOUTS[layout]), output_dir=str(tmp_path))
        for cache in (True, False)
    ]
    results = in_world(configs[0], _compare, configs[1])
    for found in results:
        # Not bit-equal: a row's neighbours in a packed row are others. One ulp of -5 is 5e-7.
        assert found["gap"] < 1e-5 and found["zeros"] and not found["has_model"], found["gap"]
        assert found["sent"] == 0, "all ranks see the file"
        assert_same_sums(*found["sums"], layout, rel=1e-4, abs_=1e-4)
    said = results[0]
    assert f"computing {2 * NUM_ROWS} of {2 * NUM_ROWS} sequences" in said["first"]
    assert "reference logprobs: 804 of 804 tokens in" in said["first"], said["first"]
    assert f"all {2 * NUM_ROWS} sequences are in" in said["second"]
    (file,) = tmp_path.glob("reference_logprobs/*")
    keys = load_file(file)["keys"]
    assert len(keys) == 2 * NUM_ROWS and (keys.diff() > 0).all()


def test_ranks_that_do_not_share_the_folder_are_sent_the_logprobs(folder, tmp_path):
    configs = [_config(folder, cache=cache, world_size=2) for cache in (True, False)]
    results = in_world(configs[0], _unshared, configs[1], tmp_path)
    for found in results:
        assert found["gap"] < 1e-5 and found["zeros"] and found["sent"] == 2
    assert f"all {2 * NUM_ROWS} sequences are in" in results[0]["second"]
    assert [p.name for p in tmp_path.iterdir()] == ["0"], "rank 1 wrote nothing"


def _unshared(world: Any, without: Config, where: Path) -> dict:
    return _compare(world, without, unshared=where)


# --------------------------------------------------------------------------- stale ones


def _again(world: Any, configs: dict[str, Config], damage: str) -> dict[str, tuple[str, float]]:
    """What each config in turn says, and how far its columns are from computed ones."""
    said, found = Said(), {}
    for name, cfg in configs.items():
        if name == "damaged":
            _damage(Path(damage))
        trainer = make_trainer(cfg, world)
        text, own = said.take(), _columns(trainer, world, steps=4)
        plain = changed(cfg, model={"reference": {"cache": False, "cache_folder": ""}})
        computed = _columns(make_trainer(plain, world), world, steps=4)
        found[name] = text, max(float((a - b).abs().max()) for a, b in zip(own, computed))
        said.take()
    return found


def _damage(folder: Path) -> None:
    """Change one logprob in every file, as a bad disk would."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            metadata = f.metadata()
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        tensors["values"][3] += 1
        save_file(tensors, file, metadata=metadata)


def test_what_is_not_of_this_reference_and_these_rows_is_never_used(folder, tmp_path):
    kept = tmp_path / "kept"
    cfg = changed(_config(folder, cache=str(kept)), steps=4)
    other = small_model(tmp_path, "other", seed=9)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows[5]["chosen"] += "h"
    configs = {
        "first": cfg,
        "one response": changed(cfg, data={"train": jsonl(tmp_path, rows)}),
        "weights": changed(cfg, model={"reference": {"path": str(other)}}),
        "dtype": changed(cfg, model={"compute_dtype": "bfloat16"}),
        "both": cfg,
        "damaged": cfg,
    }
    found = in_world(cfg, _again, configs, str(kept))[0]
    said = {name: text for name, (text, _) in found.items()}
    for name, (_, gap) in found.items():
        assert gap < (0.1 if name == "dtype" else 1e-5), (name, gap)
    every = f"computing {2 * NUM_ROWS} of {2 * NUM_ROWS} sequences"
    assert every in said["first"] and "another reference" not in said["first"]
    assert f"computing 1 of {2 * NUM_ROWS} sequences" in said["one response"]
    assert every in said["weights"] and "another reference (other model's files)" in said["weights"]
    assert every in said["dtype"] and "model.compute_dtype)" in said["dtype"]
    assert f"all {2 * NUM_ROWS} sequences are in" in said["both"]
    assert "does not match its own sha256" in said["damaged"] and every in said["damaged"]


# --------------------------------------------------------------------------- on the way


def _interrupted(world: Any) -> list[str]:
    """Stop a run amid its computing, and say what the next one says; then a changed row."""
    from spmdrl.train.companions import reference_cache

    cfg, said = world.cfg, Said()
    reference_cache._PACKS = 1
    reference_cache._LOG_EVERY_S = reference_cache._SAVE_EVERY_S = -1.0
    score, calls = reference_cache._score, []

    def stopping(*args: object) -> dict:
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("the machine goes down")
        return score(*args)

    reference_cache._score = stopping
    with pytest.raises(RuntimeError, match="goes down"):
        make_trainer(cfg, world)
    found = [said.take()]
    trainer = make_trainer(cfg, world)
    found.append(said.take())
    whole = changed(cfg, output_dir=cfg.output_dir + "/whole")
    make_trainer(whole, world)
    files = [list(Path(c.output_dir).glob("reference_logprobs/*")) for c in (cfg, whole)]
    assert [len(f) for f in files] == [1, 1] and files[0][0].name == files[1][0].name
    ours, expected = (load_file(f[0]) for f in files)
    assert not differing(ours, expected), "not the same bits"
    batch = batch_of_pairs(cfg, world, step=0)
    batch.updates[0][0].tokens[1] += 1
    with pytest.raises(RuntimeError, match="is not among the reference's logprobs"):
        trainer.annotate(batch, step=0)
    file = cfg.output_dir + "/file"
    Path(file).write_text("")
    broken = changed(cfg, model={"reference": {"cache": True, "cache_folder": file + "/folder"}})
    with pytest.raises(RuntimeError, match="cannot be written to .*/file/folder"):
        make_trainer(broken, world)
    return found


def test_a_run_that_was_stopped_goes_on_with_what_it_had_found(folder, tmp_path):
    cfg = changed(_config(folder, cache=True), output_dir=str(tmp_path))
    first, second = in_world(cfg, _interrupted)[0]
    assert re.search(r"\d+ of 804 tokens in \d+ s, about \d+ s left", first), first
    left = re.search(r"an earlier start computed (\d+) sequences", second)
    assert left and 0 < int(left[1]) < 2 * NUM_ROWS, second
    rest = re.search(r"(\d+) of (\d+) tokens in \d+ s$", second)
    assert rest and rest[1] == rest[2] and int(rest[1]) < 804, second


def test_only_the_rows_of_the_runs_steps_are_needed(folder):
    cfg = _config(folder, cache=True)
    tokenizer = load_tokenizer(cfg)
    for steps, count in ((1, ROWS_PER_STEP), (2, 2 * ROWS_PER_STEP), (9, NUM_ROWS)):
        source = PairSource(changed(cfg, steps=steps), tokenizer)
        rows = source.rows_of_run()
        taken = [unit for step in range(steps) for unit in source.units_at(step)]
        units = [source.unit(i) for i in rows]
        assert len(rows) == count and all(unit in units for unit in taken), steps
        assert all(unit in taken for unit in units), steps
