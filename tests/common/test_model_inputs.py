"""Pictures of tokens: joined, cut, moved; and the ids that a model's own processor gives."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from spmdrl.model_inputs import MultimodalItem, MultimodalItems, TokenIds
from tests.helpers import vlm

COUNTS = [2, 3, 1]


def _picture(number: int) -> MultimodalItem:
    rows = torch.full((COUNTS[number], 2), float(number))
    return MultimodalItem(f"p{number}", COUNTS[number], {"pixel_values": rows})


def _pictures(
    numbers: list[int], *, gap: int
) -> tuple[MultimodalItems, list[tuple[int, int] | None]]:
    """Return pictures with `gap` plain tokens before each, and what each token shows."""
    shows: list[tuple[int, int] | None] = []
    for number in numbers:
        shows += [None] * gap + [(number, row) for row in range(COUNTS[number])]
    mask = torch.tensor([show is not None for show in shows], dtype=torch.bool)
    return MultimodalItems.at_placeholders(mask, [_picture(number) for number in numbers]), shows


def _shows(pictures: MultimodalItems) -> list[tuple[int, int] | None]:
    rows = [(int(p.key[1:]), row) for p in pictures.items for row in range(p.num_tokens)]
    return [None if at < 0 else rows[at] for at in pictures.places.tolist()]


NUMBERS = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2)), min_size=1, max_size=4), st.data())
def test_joined_and_cut_tokens_show_what_they_showed(parts, data):
    made = [_pictures(numbers, gap=gap) for numbers, gap in parts]
    shows = [show for _, own in made for show in own]
    joined = MultimodalItems.concat([own for own, _ in made], [len(own) for _, own in made])
    assert _shows(joined) == shows
    assert len({item.key for item in joined.items}) == len(joined.items)
    indices = st.lists(st.integers(0, max(0, len(shows) - 1)), max_size=6 if shows else 0)
    order = data.draw(indices)
    cut = joined[torch.tensor(order, dtype=torch.int64)]
    assert _shows(cut) == [shows[i] for i in order]
    used = {show[0] for i in order if (show := shows[i])}
    assert {int(item.key[1:]) for item in cut.items} == used
    again = MultimodalItems.from_state_dict(joined.state_dict())
    assert _shows(again) == shows and again.items == joined.items


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2)), min_size=1, max_size=4), st.data())
def test_ids_keep_what_they_show_in_sums_and_slices(parts, data):
    made = [_pictures(numbers, gap=gap) for numbers, gap in parts]
    rows = [TokenIds(range(len(shows)), own) for own, shows in made]
    whole, shows = sum(rows, (9,)), [None, *(show for _, own in made for show in own)]
    assert [*whole] == [9, *(one for row in rows for one in row)] and _shows(
        whole.multimodal
    ) == shows
    begin, end = (data.draw(st.integers(-len(whole), len(whole))) for _ in range(2))
    cut = whole[begin:end]
    assert [*cut] == [*whole][begin:end] and _shows(cut.multimodal) == shows[begin:end]
    assert TokenIds(cut) == cut and hash(TokenIds(cut)) == hash(cut)
    assert (cut == tuple(cut)) == (not cut.items) == (not any(cut.are_placeholders))
    assert pickle.loads(pickle.dumps(cut)) == cut


def test_tokens_that_are_not_as_many_as_pictures_have_are_refused():
    with pytest.raises(ValueError, match="1 tokens are placeholders of items that have 2"):
        MultimodalItems.at_placeholders(torch.tensor([True, False]), [_picture(0)])
    assert MultimodalItems.concat([None, None], [1, 2]) is None
    assert _shows(MultimodalItems.concat([None, MultimodalItems.none(2)], [1, 2])) == [None] * 3


@pytest.mark.parametrize("family", vlm.FAMILIES)
def test_ids_and_features_are_those_of_the_models_own_processor(family, tmp_path):
    """The processor as transformers makes it: all images of a text at once."""
    folder = vlm.seeing_model(family, tmp_path)
    reader, tokenizer = vlm.reader(folder), AutoTokenizer.from_pretrained(folder)
    images = [vlm.noise(60, 90), vlm.noise(56, 40, seed=1), vlm.noise(60, 90)]
    content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}] * 2
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content[:-1]}], tokenize=False, add_generation_prompt=True
    )
    ids = reader.encode(text, images)
    theirs = reader._processor(text=[text], images=[images], return_tensors="pt")
    assert [*ids] == theirs["input_ids"][0].tolist()
    assert len(ids.items) == 2 and ids.items[0] != ids.items[1]
    shown = [ids.items[i] for i in (0, 1, 0)]
    for name in ids.items[0].features:
        joined = torch.cat([picture.features[name] for picture in shown])
        assert torch.equal(joined, theirs[name])
    with pytest.raises(ValueError, match="2 images, and 3 placeholders"):
        reader.encode(text, images[:2])


def test_what_is_shown_has_one_token_each_time_where_a_prompt_is_told():
    shown, _ = _pictures([0, 1, 0, 2], gap=1)
    ids = TokenIds(range(len(shown)), shown)
    #    0 |1 1| 2 |3 3 3| 4 |5 5| 6 |7|: the first of each picture stays
    assert ids.once() == [0, 1, 3, 4, 7, 8, 10, 11]
    assert TokenIds([3, 4]).once() == [3, 4]
