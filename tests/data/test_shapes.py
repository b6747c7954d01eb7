"""task:shapes: what is drawn is what is asked, the same for all, and only who sees it knows."""

from __future__ import annotations

import io
from collections import Counter

import numpy
import pytest
from PIL import Image

from spmdrl.data.prompts import PromptSource, held_out_prompts
from spmdrl.data.tasks import make_task
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.data.vision.shapes_task import _COLOURS, Shapes
from spmdrl.errors import Refusal
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import made
from tests.helpers.vlm import seeing_model

MIXED = dict(kind="digits+count+colour+form+compare", most=4, side=84, forms=3, jitter=2)
OPTIONS = [
    {},
    dict(kind="digits", most=1, colours=1, jitter=6),
    dict(kind="digits", most=3, side=168, jitter=3),
    dict(kind="compare", most=6, colours=4),
    dict(kind="colour", most=9, cells=3, side=42),
    dict(kind="count", most=9, cells=3, colours=6, dark=True, least=9),
    MIXED,
]


def pixels(row):
    image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
    return numpy.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o.get("kind", "default"))
def test_rows_are_a_function_of_seed_split_and_index_and_splits_share_no_scene(options):
    task, again = make_task("task:shapes", options), make_task("task:shapes", options)
    seen = {}
    for split in ("train", "eval"):
        rows = [task.row(1, i, split=split) for i in range(60)]
        assert rows == [again.row(1, i, split=split) for i in range(60)]
        assert rows != [task.row(2, i, split=split) for i in range(60)]
        seen[split] = {(row["prompt"], row["images"][0]["bytes"]) for row in rows}
        for row in rows:
            assert row["prompt"].startswith("<image>") and pixels(row).shape[0] == task.side
            assert task.score_answer(f" {row['answer']}\n", row) == 1.0
            assert task.score_answer(row["answer"] + "1", row) == 0.0
            words = character_tokenizer()
            assert words.unk_token_id not in words(row["prompt"] + row["answer"])["input_ids"]
    assert not seen["train"] & seen["eval"]


def squares_of(row, colour, *, cells, side):
    """Count, by the pixels, the cells whose middle has a colour."""
    cell = side // cells
    shown = pixels(row)
    at = [i * cell + cell // 2 for i in range(cells)]
    near = [abs(shown[y, x] - numpy.array(colour)).max() < 8 for y in at for x in at]
    return sum(near)


def test_counts_and_comparisons_are_those_of_the_pixels():
    cells, side = 4, 56
    for kind in ("count", "colour", "compare"):
        task = Shapes(kind=kind, most=6, cells=cells, side=side)
        answers = Counter()
        for i in range(80):
            row = task.row(0, i, split="train")
            counts = {
                name: squares_of(row, value, cells=cells, side=side)
                for name, value in _COLOURS.items()
            }
            asked = row["prompt"].removeprefix("<image>").removesuffix("? ")
            if kind == "count":
                assert row["answer"] == str(sum(counts.values()))
            elif kind == "colour":
                assert row["answer"] == str(counts[asked])
            else:
                one, other = asked.split(" or ")
                assert counts[one] != counts[other]
                assert row["answer"] == (one if counts[one] > counts[other] else other)
            answers[row["answer"]] += 1
        assert len(answers) > 2 and max(answers.values()) < 60


def test_things_of_sizes_of_their_own_stand_apart_in_their_cells():
    task = Shapes(most=9, cells=3, colours=6, dark=True, least=9)
    sides, answers = set(), Counter()
    for i in range(150):
        row = task.row(0, i, split="train")
        shown = pixels(row)[:54, :54].any(axis=2).reshape(3, 18, 3, 18).swapaxes(1, 2)
        boxes = [cell for cell in shown.reshape(9, 18, 18) if cell.any()]
        assert len(boxes) == int(row["answer"]) and not pixels(row)[54:].any()
        for box in boxes:
            side = int(box.any(axis=0).sum())
            assert box.sum() == side**2 and not box[-1].any() and not box[:, -1].any()
            sides.add(side)
        answers[row["answer"]] += 1
    assert sides == set(range(9, 17)) and set(answers) == set("123456789")
    assert max(answers.values()) < 30


def test_a_slip_is_one_too_high():
    slips = {}
    for options in (dict(most=9), dict(kind="digits", most=1, jitter=6)):
        task = Shapes(mistakes=1.0, **options)
        rows = [task.row(0, i, split="train") for i in range(200)]
        slips[task.kinds[0]] = {row["answer"] + row["completion"] for row in rows}
    assert slips["count"] == {f"{n}{n % 9 + 1}" for n in range(1, 10)}
    assert slips["digits"] == {f"{n}{(n + 1) % 10}" for n in range(10)}


def test_each_digit_looks_different_and_moves_with_jitter():
    task = Shapes(kind="digits", most=1, colours=1, jitter=4)
    shown = {}
    for i in range(200):
        row = task.row(0, i, split="train")
        shown.setdefault(row["answer"], set()).add(row["images"][0]["bytes"])
    assert set(shown) == set("0123456789")
    every = [data for found in shown.values() for data in found]
    assert len(every) == len(set(every)) and min(map(len, shown.values())) > 3


def test_careless_demonstrations_are_wrong_in_their_share_of_training_rows():
    task = Shapes(kind="digits+count+compare", most=2, jitter=2, mistakes=0.5)
    rows = [task.row(0, i, split="train") for i in range(300)]
    careless = [row for row in rows if "completion" in row]
    assert 110 < len(careless) < 190
    assert all(task.score_answer(row["completion"], row) == 0.0 for row in careless)
    right = [Shapes(kind="digits+count+compare", most=2, jitter=2).row(0, 3, split="train")]
    assert right[0]["images"] == rows[3]["images"]
    assert all("completion" not in task.row(0, i, split="eval") for i in range(20))


def test_noise_asks_the_same_questions_and_shows_nothing_of_them():
    plain, control = Shapes(), Shapes(noise=True)
    one, two = (task.row(0, 5, split="eval") for task in (plain, control))
    assert (one["prompt"], one["answer"]) == (two["prompt"], two["answer"])
    assert one["images"] != two["images"] and two == control.row(0, 5, split="eval")
    assert len(numpy.unique(pixels(two))) > 200


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(kind="cuont"), "kind: unknown 'cuont'.*count"),
        (dict(most=17), "most: 17 shapes do not fit into 4 x 4 cells"),
        (dict(side=4), "side: must be from 8 to 1024, got 4"),
        (dict(side=8), "side: 8 pixels have cells of 2"),
        (dict(jitter=9), "jitter: must be from 0 to 5 pixels"),
        (dict(least=13), "least: must be 0, or from 2 to 12 pixels in cells of 14"),
        (dict(least=4, jitter=1), "jitter: with least"),
        (dict(colours=1, kind="compare"), "colours: kind compare needs two"),
        (dict(mistakes=1.5), "mistakes: must be a share"),
        (dict(sides=4), "sides: task:shapes has no such option"),
    ],
)
def test_options_are_refused_by_name(options, says):
    with pytest.raises(Refusal, match=f"data.task_options.{says}"):
        make_task("task:shapes", options)


def test_a_model_that_sees_gets_a_picture_in_each_prompt(tmp_path):
    folder = seeing_model("qwen2_5_vl", tmp_path)
    cfg = made(
        data=dict(
            train="task:shapes", eval="task:shapes", size=12, eval_size=5, task_options=MIXED
        ),
        batch=dict(prompts_per_step=4),
        model=dict(path=str(folder)),
    )
    words = load_tokenizer(cfg)
    for prompt in [*PromptSource(cfg, words).at(0), *held_out_prompts(cfg, words)]:
        (picture,) = prompt.tokens.items
        assert picture.num_tokens == 9 == sum(prompt.tokens.are_placeholders)
