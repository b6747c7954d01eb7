"""Fingerprints of numbers on any layout, the chain of lines, and what a comparison names."""

from __future__ import annotations

import base64
import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.certificate import digests
from spmdrl.certificate.compare import step_differences
from spmdrl.certificate.digests import Digester
from spmdrl.certificate.fingerprint_collector import (
    SECTIONS,
    FingerprintCollector,
    _places,
    _sequence_ids,
    to_base64,
)
from spmdrl.certificate.fingerprints import _COUNT, _sketch, deviation
from spmdrl.certificate.line_form import FORMAT, problem_of
from spmdrl.certificate.lines import NAME, has_norms, journal_of, read
from spmdrl.config import Config, flatten
from spmdrl.credit import advantages_of
from spmdrl.model.tensor_parts import Box, narrow
from spmdrl.tools.commands import diff
from spmdrl.types import Batch
from tests.helpers.built import refused
from tests.helpers.policy_runs import config, own_batch, scalars, small_model
from tests.helpers.ragged import scalars_of
from tests.helpers.worlds import another_trainer, with_trainer

# --------------------------------------------------------------------------- digests


@st.composite
def _cut_tensors(draw: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Elements of some dtype, and their places dealt to ranks in any order."""
    kinds = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64, torch.float64]
    kind, count = draw(st.sampled_from(kinds)), draw(st.integers(2, 40))
    values = draw(st.lists(st.integers(-100, 100), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    parts = torch.tensor(order).tensor_split(cuts)
    return (torch.tensor(values) / 4).to(kind), list(parts)


def _digest(values: torch.Tensor, parts: list[torch.Tensor]) -> int:
    """Sum what boxes of one element each, in any order, add to a row's digest."""
    found = 0
    for part in parts:
        boxes = [(0, Box((at,), (1,)), values.shape) for at in part.tolist()]
        digester = Digester(boxes, itemsize=values.element_size(), device=torch.device("cpu"))
        views = [values[at : at + 1] for at in part.tolist()]
        found += int(digester.digests(views, count=1)) + len(views) * _COUNT
    return found % 2**64


@given(_cut_tensors(), st.data())
@settings(max_examples=150)
def test_a_digest_is_the_same_however_elements_lie_and_another_for_any_other(cut, data):
    values, parts = cut
    whole = _digest(values, [torch.arange(len(values))])
    assert _digest(values, parts) == whole
    at = data.draw(st.integers(0, len(values) - 1))
    flipped = values.clone()
    if values.dtype == torch.bool:
        flipped[at] = not values[at]
    else:
        number = flipped[at : at + 1].view(torch.uint8)
        byte = data.draw(st.integers(0, len(number) - 1))
        number[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert _digest(flipped, parts) != whole
    other = data.draw(st.integers(0, len(values) - 1))
    swapped = values.clone()
    swapped[[at, other]] = swapped[[other, at]]
    assert (_digest(swapped, parts) == whole) == bool(values[at] == values[other])
    assert _digest(values[:-1], [torch.arange(len(values) - 1)]) != whole


def _of_boxes(whole: torch.Tensor, boxes: list[Box]) -> int:
    """Sum what each box, on a rank of its own, adds to the digest."""
    found = 0
    for box in boxes:
        view = narrow(whole, outer=Box.whole(whole.shape), part=box)
        one = [(0, box, whole.shape)]
        digester = Digester(one, itemsize=whole.element_size(), device=torch.device("cpu"))
        found += int(digester.digests([view], count=1))
    return found % 2**64


SHAPES = [(5,), (3, 200), (2, 3, 77), (4, 256), (2, 4, 128), (70, 3), (1, 5000), (3, 1, 2, 9)]


@given(
    st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]), st.data()
)
@settings(max_examples=60, deadline=None)
def test_the_digests_of_any_boxes_add_up(shape, kind, data):
    whole = (torch.arange(math.prod(shape)) % 251 - 100).to(kind).view(shape)
    boxes = [Box.whole(shape)]
    before = _of_boxes(whole, boxes)
    for _ in range(data.draw(st.integers(1, 5))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, box.shape[dim]))
        for at, size in ((0, cut), (cut, box.shape[dim] - cut)):
            start, own = list(box.start), list(box.shape)
            start[dim], own[dim] = start[dim] + at, size
            if size:
                boxes.append(Box(tuple(start), tuple(own)))
    assert _of_boxes(whole, boxes) == before
    at = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    whole[at] += 1
    assert _of_boxes(whole, boxes) != before


def test_pieces_of_any_size_give_one_digest(monkeypatch):
    found = set()
    for most in (64, 256, 4096):
        monkeypatch.setitem(digests._CHUNK, "cpu", most)
        monkeypatch.setattr(digests, "_CACHED_BLOCKS", most)
        whole = torch.randn(60, 130, generator=torch.Generator().manual_seed(0))
        found.add(_of_boxes(whole, [Box.whole(whole.shape)]))
        assert _of_boxes(whole, [Box((0, 0), (60, 30)), Box((0, 30), (60, 100))]) in found
    assert len(found) == 1


def test_other_devices_come_to_the_same_digests():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**63), 2**63 - 1, (50, 64), generator=generator)
    weights = digests.odd_weights(0, 64, dim=0, device=torch.device("cpu"))
    own, other = torch.empty_like(words), torch.empty_like(words)
    found = digests._sums_by_torch(words, weights, room=other)
    assert torch.equal(digests._sums_by_numpy(words, weights, room=own), found)
    exact = sum((x + (x >> 32)) * w for x, w in zip(words[7].tolist(), weights.tolist()))
    assert int(found[7]) % 2**64 == exact % 2**64


def test_a_batch_of_many_updates_keeps_the_places_of_sequences_apart():
    row = torch.tensor([3])
    sequence = digests.Sequences(row, torch.tensor([0, 1]))
    # Two pairs that are one number if an update has 8 bits in it, and a micro-batch 16.
    microbatches = [(0, 256, 0), (1, 0, 0), (0, 0, 2**16), (0, 1, 0)]
    found = {int(sequence.digests([_places(place, like=row)])) for place in microbatches}
    assert len(found) == 4


def test_a_deviation_is_about_what_two_tensors_are_apart():
    generator = torch.Generator().manual_seed(0)

    def row(values: torch.Tensor) -> list:
        box, cpu = Box.whole((100, 200)), torch.device("cpu")
        square, *signed = _sketch(values.view(100, 200), box, device=cpu).tolist()
        return ["", square**0.5, *signed]

    found, one = [], torch.randn(20000, generator=generator)
    for _ in range(50):
        noise = 1e-5 * torch.randn(20000, generator=generator).double()
        found.append(deviation(row(one), row(one.double() + noise)))
    assert 0.85e-5 < torch.tensor(found).square().mean().sqrt() < 1.15e-5
    moved = one.double().clone()
    moved[7] += 0.5  # of one element it is exact
    assert deviation(row(one), row(moved)) == pytest.approx(0.5 / float(moved.norm()), rel=1e-3)
    assert deviation(row(one), row(one * torch.nan)) == float("inf")


# --------------------------------------------------------------------------- real ranks


def _content(trainer: Any, plant: str = "") -> dict[str, Any]:
    """Return what a step comes to, with one thing changed where `plant` says what."""
    always = [lambda step: True] * 2
    collector = FingerprintCollector(trainer.world, trainer, is_due=always[0], with_norms=always[1])
    state, rank = trainer.state_dict(), trainer.world.rank
    own = own_batch(trainer.world, rewards=scalars().lengths.double() / 7)
    first = own.microbatches[0]
    weight = state["model"]["model.layers.1.mlp.up_proj.weight"].to_local()
    moment = state["optimizer"]["exp_avg_sq"]["model.layers.0.self_attn.q_proj.weight"].to_local()
    see = trainer.policy.on_gradients

    def spoil(gradients: dict, **named: int) -> None:
        if plant == "gradient" and named["number"] == 1:
            gradients["lm_head.weight"].view(-1)[5] *= 1.5
        see(gradients, **named)

    trainer.policy.on_gradients = spoil
    if plant == "weight" and rank == trainer.world.world_size - 1:
        weight.view(-1)[:1].view(torch.int32)[0] ^= 1
    elif plant == "moment":
        moment.view(-1)[3] = 1e-9
    elif plant == "token":
        first.tokens[1] += 1
    elif plant == "reward":
        own.scalars.rewards[2] += 1e-9
    elif plant == "logprob":
        first.rollout_logprobs[-1] += 1e-3
    annotated = trainer.annotate(own, step=0)
    advantages = advantages_of(annotated, cfg=trainer.cfg, world=trainer.world, step=0)
    if plant == "advantage":
        advantages.tokens[0][0][-1] += 1e-4
    updated = trainer.update(annotated, advantages, step=0)
    if plant == "late weight":
        weight.view(-1)[:1].view(torch.int32)[0] ^= 1
    return collector.content(0, annotated, advantages, updated)


_PLANTS = {
    "weight": "weight model.layers.1.mlp.up_proj.weight before the update",
    "moment": "optimizer state exp_avg_sq.model.layers.0.self_attn.q_proj.weight",
    "token": "rollouts' tokens of group 0, sample 0",
    "reward": "rollouts' rewards of group 1, sample 0",
    "logprob": "rollouts' rollout_logprobs of group 2, sample 0",
    "advantage": "advantages of group 2, sample 0",
    "gradient": "gradient of lm_head.weight",
    "late weight": "weight model.layers.1.mlp.up_proj.weight",
}


def _with_plants(trainer: Any) -> dict[str, Any]:
    plain = _content(trainer)
    found = {"plain": plain, "again": _content(another_trainer(trainer))}
    for plant in _PLANTS:
        spoiled = _content(another_trainer(trainer), plant)
        found[plant] = [str(one) for one in step_differences(plain, spoiled)]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model's folder, and what a step of one rank comes to, without and with plants."""
    folder = tmp_path_factory.mktemp("alone")
    cfg = config(small_model(folder), folder, advantage="grpo", updates=2)
    return folder, with_trainer(cfg, _with_plants)[0]


def test_each_plant_is_the_first_difference_and_a_repeated_step_has_none(alone):
    _, found = alone
    assert not list(step_differences(found["plain"], found["again"]))
    for plant, says in _PLANTS.items():
        assert found[plant][0].startswith(says), (plant, found[plant][:3])
    assert len(found["late weight"]) == 1


OTHERS: tuple[dict[str, int], ...] = ({}, {"dp_replicate": 2}, {"cp": 2})


@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, *(pytest.param(mesh, marks=pytest.mark.grid) for mesh in OTHERS)]
)
def test_digests_of_two_ranks_are_those_of_one(mesh, alone):
    folder, found = alone
    path, plain = folder / "model", found["plain"]
    cfg = config(path, folder, advantage="grpo", updates=2, world_size=2, **mesh)
    for content in with_trainer(cfg, _content):
        assert content["before"] == plain["before"] and "differing_copies" not in content
        for name, row in plain["rollouts"].items():
            assert content["rollouts"][name][0] == row[0], name
        assert content["plan"]["update_ids"] == plain["plan"]["update_ids"]
        apart = [one for one in step_differences(plain, content) if one.section != "plan"]
        assert apart and max(one.deviation for one in apart) < 1e-4, [str(one) for one in apart]
    spoiled = with_trainer(cfg, _content, "weight")[0]
    name = "model.model.layers.1.mlp.up_proj.weight"
    if mesh.get("dp_replicate"):  # one copy of two
        assert f"before/{name}" in spoiled["differing_copies"]
        first = str(next(step_differences(plain, spoiled)))
        assert first.startswith("copies on several ranks of the second run's weight model.layers.1")
    else:
        assert {n for n in plain["before"] if spoiled["before"][n] != plain["before"][n]} == {name}


# --------------------------------------------------------------------------- lines


MADE: dict[str, Any] = {
    "config": json.loads(json.dumps(flatten(Config(steps=3)))) | {"report.certificate": 1},
    "packages": {"torch": "2.13.0"},
    "code": {"program": "00"},
    "data": {"data.train": "00"},
    "machine": {"threads": 1},
}


def _changed_made(section: str, name: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(MADE)
    made[section][name] = value
    return made


def _write(run: Path, content: dict[str, Any], made: dict[str, Any] = MADE) -> Path:
    """Write the certificate of a run of three steps, and its metrics."""
    run.mkdir(exist_ok=True)
    _write_lines(run, [{"step": 0, "made_of": made}, *_steps(content, content, content)])
    rows = ({"step": step, "perf/step_s": 0.1} for step in range(3))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def _steps(*contents: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, **content} for step, content in enumerate(contents)]


def _write_lines(run: Path, contents: list[Any]) -> None:
    """Write a certificate of lines that somebody sealed, whatever they hold."""
    (run / NAME).unlink(missing_ok=True)
    journal = journal_of(run)
    for own in contents:
        journal.append({"format": FORMAT, **own})


def test_lines_that_are_chained_again_are_refused_where_one_is_missing_or_moved(
    alone, tmp_path, capsys
):
    _, found = alone
    run, good = tmp_path / "run", tmp_path / "good"
    _write(run, found["plain"])
    _write(good, found["plain"])
    begin = {"step": 0, "made_of": MADE}
    zero, one, two = _steps(*[found["plain"]] * 3)
    off = {"step": 1, "made_of": _changed_made("config", "report.certificate", 0)}
    for lines, says in (
        ([begin, zero, two], "line 3 is of step 2, but the line of step 1 before it is missing"),
        ([begin, one, zero, two], "line 2 is of step 1, but the line of step 0 before it is"),
        ([begin, zero, one, one, two], "line 4 is of step 1, which is not due there"),
        ([zero, one, two], "line 1 is of a step, but no line before it says what"),
        ([begin, zero, {**begin, "step": 2}, two], "line 3 begins an attempt at step 2, but"),
        ([begin, begin, zero], "line 2 begins an attempt at step 0, but lines before it"),
        ([begin, zero, off, one], "line 4 is of step 1, which is not due there"),
    ):
        _write_lines(run, lines)
        assert diff.main([str(good), str(run)]) == 2
        assert says in capsys.readouterr().err
    # A run that ended early, and one that went on under other settings.
    (run / "metrics.jsonl").unlink()
    _write_lines(run, [begin, zero])
    assert read(run).steps.keys() == {0}
    more = _changed_made("config", "steps", 4)
    three = {"step": 3, **found["plain"]}
    _write_lines(run, [begin, zero, {"step": 1, "made_of": more}, one, two, three])
    assert read(run).steps.keys() == {0, 1, 2, 3}


ODD: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("rollouts",), None, "holds None as rollouts, which must be an object"),
    (("losses",), "absent", "has no losses"),
    (("sequences",), "absent", "has no sequences"),
    (("step",), "1", "holds '1' as step, which must be a whole number"),
    (("step",), True, "holds True as step"),
    (("after",), [], "holds [] as after"),
    (("rollouts", "tokens"), [1, 2.0], "as rollouts.tokens, which must be a digest, or a list"),
    (("rollouts", "tokens"), ["0", "x", 1.0, 1.0, 1.0, 1.0], "as rollouts.tokens"),
    (("plan", "tokens_per_microbatch"), -1, "holds -1 as plan.tokens_per_microbatch"),
    (("sequences", "tokens"), "%%%", "sequences.tokens is '%%%', which is not base64"),
    (("sequences", "group_size"), 0, "holds 0 as sequences.group_size"),
    (("sequences", "rewards"), "AAAAAAAAAAA=", "sequences holds columns of different lengths"),
    (("losses", "policy/loss"), {}, "holds {} as losses.policy/loss"),
    (("step",), 10**400, "line 3: step: the number 1000"),
)


@pytest.mark.parametrize("place, value, says", ODD, ids=lambda value: str(value)[:40])
def test_a_chained_line_of_another_form_is_refused_with_its_field(
    place, value, says, alone, tmp_path, capsys
):
    _, found = alone
    run = _write(tmp_path / "run", found["plain"])
    line: Any = {"step": 1, **copy.deepcopy(found["plain"])}
    inner = line[place[0]] if len(place) == 2 else line
    inner[place[-1]] = value
    if value == "absent":
        del inner[place[-1]]
    begin = {"step": 0, "made_of": MADE}
    _write_lines(run, [begin, {"step": 0, **found["plain"]}, line])
    assert diff.main([str(run), str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / NAME}: line 3 {says}" in said or says in said


def test_what_a_run_was_made_of_is_checked_too(alone, tmp_path, capsys):
    _, found = alone
    for section, name, value in (
        ("config", "steps", "3"),
        ("config", "report.certificate", None),
        ("config", "model.compute_dtype", "int3"),
        ("code", "train.py", 1),
        ("data", "data.train", None),
    ):
        run = _write(tmp_path / "run", found["plain"], _changed_made(section, name, value))
        assert diff.main([str(run), str(run)]) == 2
        said = capsys.readouterr().err
        assert f"line 1 holds {value!r} as made_of.{section}.{name}" in said


def test_a_difference_names_the_trace_of_an_episode():
    count = torch.zeros(4, dtype=torch.int64)
    own = scalars_of([0.5] * 4, sample_ids=count, traces=torch.arange(4))
    lines = []
    for rewards in ([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.25, 0.25]):
        batch = Batch(replace(own, rewards=torch.tensor(rewards).double()), (), count)
        sequences = _sequence_ids(batch)
        line = {"format": FORMAT, "step": 0} | {section: {} for section in SECTIONS}
        line["plan"] = {"tokens_per_microbatch": 0}
        lines.append(line | {"rollouts": {"rewards": f"{rewards}"}, "sequences": sequences})
    assert problem_of(lines[0]) == ""
    (found,) = step_differences(*lines)
    assert str(found) == "rollouts' rewards of group 0, sample 0, trace 2 and 1 more: 0.5 and 0.25"


def test_numbers_of_any_size_have_a_deviation():
    huge = ["00", 1e308, 1e308, -1e308, 1e308, 0.0]
    assert deviation(huge, ["01", 1.0, -1e308, 1e308, 0.0, 0.0]) > 0
    assert deviation(huge, ["01", None, None, None, None, None]) == float("inf")


def test_what_was_edited_cut_or_put_in_is_refused_with_its_line(alone, tmp_path, capsys):
    _, found = alone
    run = _write(tmp_path / "run", found["plain"])
    another = _changed_made("config", "seed", 1)
    other = _write(tmp_path / "other", found["plain"], another)
    lines = (run / NAME).read_text().splitlines(keepends=True)
    foreign = (other / NAME).read_text().splitlines(keepends=True)[2]
    digest = found["plain"]["rollouts"]["tokens"][0]
    for text, says in {
        "".join(lines).replace(digest, digest[::-1], 1): "line 2 does not follow from the lines",
        "".join(lines)[:-40]: "line 4 breaks off",
        "".join(lines[:2] + lines[3:]): "line 3 does not follow from the lines",
        "".join([*lines[:2], foreign, *lines[3:]]): "line 3 does not follow from the lines",
        "".join(lines[:3]): "ends with step 1, but metrics.jsonl has step 2: lines",
        lines[0]: "certifies no step",
    }.items():
        (run / NAME).write_text(text)
        with refused(f"{run / NAME}: ", says):
            read(run)
        assert diff.main([str(run), str(other)]) == 2
        assert says in capsys.readouterr().err
    _write_lines(run, [{"step": 0, "made_of": MADE, "format": 1}])
    with refused("line 1 is of format 1"):
        read(run)
    assert diff.main([str(tmp_path), str(other)]) == 2
    assert "name the output_dir of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "section, name, value, says",
    [
        ("config", "optimizer.lr", 0.5, "optimizer.lr: 1e-06 and 0.5"),
        ("packages", "torch", "2.12.0", "version of package torch: 2.13.0 and 2.12.0"),
        ("code", "program", "01", "code of program: 00 and 01"),
        ("data", "data.train", "01", "content of data.train: 00 and 01"),
    ],
)
def test_what_runs_are_made_of_is_named_first(section, name, value, says, alone, tmp_path, capsys):
    _, found = alone
    first = _write(tmp_path / "first", found["plain"])
    made = _changed_made(section, name, value)
    assert diff.main([str(first), str(_write(tmp_path / "same", found["plain"], made))]) == 1
    said = capsys.readouterr().out
    assert says in said.splitlines()[0] and "the numbers: equal bit for bit in 3 cert" in said


def test_two_layouts_are_equal_to_rounding_or_differ_beyond_it(alone, tmp_path, capsys):
    _, found = alone
    plain = found["plain"]
    first = _write(tmp_path / "first", plain)
    assert diff.main([str(first), str(_write(tmp_path / "same", plain))]) == 0
    assert capsys.readouterr().out == "equal bit for bit: 3 certified steps (0 to 2)\n"
    near = copy.deepcopy(plain)
    row = near["gradients"]["lm_head.weight"]
    row[0], row[2] = "00", row[2] + 1e-5 * row[1]
    same = _write(tmp_path / "near", near)
    assert diff.main([str(first), str(same)]) == 1  # one layout repeats the bits
    assert "gradient of lm_head.weight: differs by 5.0e-06 of its" in capsys.readouterr().out
    layout = _changed_made("config", "layout.world_size", 8)
    other = _write(tmp_path / "other", near, layout)
    assert diff.main([str(first), str(other)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("equal to rounding") and "and 8" in said
    assert "gradient of lm_head.weight     0  5.0e-06" in said
    assert diff.main([str(first), str(other), "--rounding", "1e-6"]) == 1
    assert "differ: step 0: gradient of lm_head.weight" in capsys.readouterr().out
    near["rollouts"]["tokens"][0] = "00"  # a token is drawn, and not rounded
    assert diff.main([str(first), str(_write(other, near, layout))]) == 1
    assert "differ: step 0: rollouts' tokens" in capsys.readouterr().out


def _light(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a line without norms has."""
    found = copy.deepcopy(content)
    for section in SECTIONS:
        rows = found[section]
        found[section] = {name: r[0] if isinstance(r, list) else r for name, r in rows.items()}
    return found


def test_a_line_without_norms_repeats_bits_and_leaves_rounding_to_the_next_with(
    alone, tmp_path, capsys
):
    _, found = alone
    plain, light = found["plain"], _light(found["plain"])
    assert not has_norms(light) and has_norms(plain)
    assert len(json.dumps(light)) < 0.65 * len(json.dumps(plain))
    assert not list(step_differences(plain, light))  # as far as both say
    near = copy.deepcopy(light)
    near["gradients"]["lm_head.weight"] = "00"
    first = _write(tmp_path / "first", light)
    assert diff.main([str(first), str(_write(tmp_path / "same", near))]) == 1
    assert capsys.readouterr().out == "differ: step 0: gradient of lm_head.weight\n"
    layout = _changed_made("config", "layout.world_size", 8)
    other = _write(tmp_path / "other", near, layout)
    assert diff.main([str(first), str(other)]) == 2  # by how much they differ is not known
    said = capsys.readouterr().err
    assert "cannot be compared in steps 0 to 2" in said and "world_size: 2 and 8" in said
    # The last step has norms: what came of those before it is known there.
    _write_lines(first, [{"step": 0, "made_of": MADE}, *_steps(light, light, plain)])
    _write_lines(other, [{"step": 0, "made_of": layout}, *_steps(near, light, plain)])
    assert diff.main([str(first), str(other)]) == 0
    said = capsys.readouterr().out
    assert "equal to rounding: 3 certified steps (0 to 2), of which 2 with norms" in said
    assert "not compared: steps 0: digests differ there" in said
    near["sequences"]["rewards"] = _packed_but(plain["sequences"]["rewards"], 3)
    near["rollouts"]["rewards"] = "00"
    assert diff.main([str(first), str(_write(tmp_path / "rewards", near))]) == 1
    reward = float(scalars().lengths[3]) / 7
    says = f"differ: step 0: rollouts' rewards of group 1, sample 1: {reward} and 0.5"
    assert capsys.readouterr().out.startswith(says)


def _packed_but(text: str, row: int) -> str:
    values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float64).clone()
    values[row] = 0.5
    return to_base64(values)
