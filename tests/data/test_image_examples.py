"""Rows with images to imitate and to compare: their tokens, masks and pictures, packed."""

from __future__ import annotations

import base64
import io
import json

import pytest
import torch

from spmdrl.data.examples import LabelledSource, PairSource, SupervisedSource
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.rollout.row_source import pack_units
from tests.helpers.built import made
from tests.helpers.vlm import READERS, noise, seeing_model

SIZES = ((60, 40), (30, 80))


def uri(seed):
    buffer = io.BytesIO()
    noise(*SIZES[seed % 2], seed=seed).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def opened(kind, folder, rows, **data):
    path = folder.parent / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = made(
        data=dict(train=str(path), max_prompt_tokens=300, shuffle=False, **data),
        batch=dict(prompts_per_step=len(rows)),
        model=dict(path=str(folder)),
        sampling=dict(max_response_tokens=60),
    )
    words = load_tokenizer(cfg)
    return words, kind(cfg, words).units_at(0)


def check_shown(words, example, images):
    """The pictures of an example are those of its image tokens, in order."""
    read = words.image_reader
    ids = read.encode(" ".join([read.placeholder] * len(images)), images)
    stands_for = {one for one, is_placeholder in zip(ids, ids.are_placeholders) if is_placeholder}
    is_placeholder = [token in stands_for for token in example.tokens]
    assert example.tokens.are_placeholders == is_placeholder
    assert example.tokens.items == ids.items
    shown, places = (p.multimodal.places[p.multimodal.places >= 0] for p in (example.tokens, ids))
    assert torch.equal(shown, places)
    assert not any(m and own for m, own in zip(example.mask, example.tokens.are_placeholders))


def said(words, example):
    return words.decode([t for t, is_trained in zip(example.tokens, example.mask) if is_trained])


@pytest.mark.parametrize("family", READERS)
def test_supervised_rows_of_each_form_show_their_images_and_train_the_replies(family, tmp_path):
    folder = seeing_model(family, tmp_path / "model")
    talk = [
        {"role": "user", "content": "a <image> b"},
        {"role": "assistant", "content": "one <image>"},
        {"role": "user", "content": "<image><image>"},
        {"role": "assistant", "content": "two"},
    ]
    rows = [
        dict(prompt="q <image>", completion="r", images=[uri(0)]),
        dict(prompt=[{"role": "user", "content": "q <image>"}], completion="r", images=[uri(1)]),
        dict(messages=talk, images=[uri(0), uri(1), uri(0)]),
        dict(text="see <image> there", images=[uri(1)]),
        dict(prompt="blind", answer="r"),
    ]
    words, units = opened(SupervisedSource, folder, rows)
    images = [noise(*SIZES[i], seed=i) for i in range(2)]
    shown = [[images[0]], [images[1]], [images[0], images[1], images[0]], [images[1]], []]
    for unit, expected in zip(units, shown):
        check_shown(words, unit.examples[0], expected)
    replies = [said(words, unit.examples[0]) for unit in units]
    assert replies[:3] == ["r<eos>", "r<eos>", "one <image><eos>two<eos>"]
    assert replies[4] == "r<eos>" and "ee " in replies[3] and replies[3].endswith(" there<eos>")
    packed = pack_units(list(enumerate(units)), version=3)
    of_rows = [unit.examples[0].tokens for unit in units]
    assert packed.extra_columns["multimodal"].items == of_rows[0].items + of_rows[1].items
    begin, end = packed.cu_seqlens[2:4].tolist()
    own = packed.extra_columns["multimodal"][torch.arange(begin, end)]
    assert torch.equal(own.places, of_rows[2].multimodal.places)


def test_pairs_and_labels_show_the_image_of_their_prompt(tmp_path):
    folder = seeing_model("qwen2_5_vl", tmp_path / "model")
    rows = [
        dict(prompt="<image>?", chosen=f"yes{i}", rejected="no", images=[uri(i)]) for i in range(2)
    ]
    words, units = opened(PairSource, folder, rows)
    for i, unit in enumerate(units):
        for example in unit.examples:
            check_shown(words, example, [noise(*SIZES[i], seed=i)])
        assert [said(words, one) for one in unit.examples] == [f"yes{i}<eos>", "no<eos>"]
    # One text, two images: two prompts, so that each has the other's reply for KTO's KL.
    rows = [
        dict(prompt="<image>?", completion=f"say{i}", label=True, images=[uri(i)]) for i in (0, 2)
    ]
    words, units = opened(LabelledSource, folder, rows)
    for i, unit in zip((0, 2), units):
        own, other = unit.examples
        for example in (own, other):
            check_shown(words, example, [noise(*SIZES[0], seed=i)])
        assert (said(words, own), said(words, other)) == (f"say{i}<eos>", f"say{2 - i}<eos>")


def test_images_beyond_the_budget_and_wrong_counts_are_refused_by_line(tmp_path):
    folder = seeing_model("qwen2_5_vl", tmp_path / "model")
    good = dict(prompt="<image>", completion="r", images=[uri(0)])
    short = dict(prompt="<image>", completion="r", images=[uri(0), uri(1)])
    with pytest.raises(Refusal, match="rows.jsonl:2: the row has 2 images, and its text 1 places"):
        opened(SupervisedSource, folder, [good, short])
    many = dict(prompt="<image>" * 9, completion="r", images=[uri(0)] * 9)
    with pytest.raises(Refusal, match="rows.jsonl:2: 9 images, above data.images.max_per_prompt"):
        opened(SupervisedSource, folder, [good, many], images=dict(max_per_prompt=8))
