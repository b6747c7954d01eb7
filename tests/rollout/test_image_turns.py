"""Images in turns: what an environment shows is appended once, and equals the whole conversation
as the model's own processor reads it."""

from __future__ import annotations

import base64
import io

import pytest
import torch

from spmdrl.config.data import ImageSettings
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.data.vision.images import ImageFiles
from spmdrl.environments.conversation import Chat
from spmdrl.environments.protocol import image_part, opening_messages
from spmdrl.errors import Refusal
from spmdrl.rollout.trajectory import Trajectory
from tests.helpers.built import made
from tests.helpers.vlm import FAMILIES, noise, seeing_model


def png(seed, *, size=(60, 40)):
    buffer = io.BytesIO()
    noise(*size, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


def tokenizer_of(folder):
    return load_tokenizer(
        made(data=dict(train="task:addition", size=4), model=dict(path=str(folder)))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_with_images_are_what_the_processor_makes_of_the_whole(family, tmp_path):
    words = tokenizer_of(seeing_model(family, tmp_path))
    chat = Chat(words, stop_token_ids=[words.eos_token_id])
    row = {"prompt": "one <image> or <image>?", "images": [{"bytes": png(0)}, {"bytes": png(1)}]}
    opening = opening_messages(row)
    answer = [{"role": "user", "content": [{"type": "text", "text": "look"}, image_part(png(2))]}]
    again = [{"role": "user", "content": [image_part(png(0)), {"type": "text", "text": "!"}]}]
    ids = chat.encode_opening(opening)
    made_so_far = Trajectory.from_prompt(ids)
    reply, end = words("ab", add_special_tokens=False)["input_ids"], words.eos_token_id
    for sampled, messages in (([*reply, end], answer), (reply, again)):
        made_so_far = made_so_far.append_answer(sampled)  # which shows nothing, as what is sampled
        made_so_far = made_so_far.append_answer(chat.encode_answer(sampled, messages))
    bare = [{"type": "image"}]
    whole = [
        {"role": "user", "content": [*texts("one "), *bare, *texts(" or "), *bare, *texts("?")]},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": [*texts("look"), *bare]},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": [*bare, *texts("!")]},
    ]
    text = words.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    images = [noise(60, 40, seed=i) for i in (0, 1, 2, 0)]
    expected = words.image_reader.encode(text, images)
    assert made_so_far.token_ids == expected and made_so_far.tokens.tolist() == [*expected]
    items = made_so_far.extra_columns["multimodal"]
    assert items.items == expected.items and len(expected.items) == 3
    assert torch.equal(items.places, expected.multimodal.places)
    assert made_so_far.prompt == ids and ids.items == expected.items[:2]
    assert Trajectory.from_state_dict(made_so_far.state_dict()).token_ids == expected


def texts(text):
    return [{"type": "text", "text": text}]


def test_images_of_turns_are_refused_as_those_of_rows_are(tmp_path):
    folder = seeing_model("qwen2_5_vl", tmp_path / "model")
    words = tokenizer_of(folder)
    chat = Chat(words, stop_token_ids=[words.eos_token_id])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(png(0))

    def shown(part, *, of=chat):
        return of.encode_opening([{"role": "user", "content": [part]}])

    for part, says in (
        ({"type": "image"}, "has 0 images, and its text 1 places"),
        ({"type": "image", "image": "/etc/passwd"}, "no data file whose folder"),
        (image_part(png(0)[:99]), "image 1: cannot be read"),
        ({"type": "sound"}, "a part of a message's content is"),
    ):
        with pytest.raises(Refusal, match=f"rollout.environment: .*{says}"):
            shown(part)
    beside = chat.with_files(ImageFiles(ImageSettings(), tmp_path / "data"))
    uri = f"data:image/png;base64,{base64.b64encode(png(0)).decode()}"
    in_file = shown({"type": "image", "image": "a.png"}, of=beside)
    inline = shown({"type": "image_url", "image_url": {"url": uri}})
    assert in_file == inline and in_file.items == inline.items
    with pytest.raises(Refusal, match="is not in the folder of the data file"):
        shown({"type": "image", "image": "/etc/passwd"}, of=beside)
