"""Images of rows: the forms in which datasets hold them, and what is refused of them."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spmdrl.config.data import ImageSettings
from spmdrl.data.prompts import PromptSource
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.data.vision.images import ImageFiles
from spmdrl.errors import Refusal
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import made
from tests.helpers.vlm import noise, seeing_model

SPOKEN = [{"role": "user", "content": "see <image>?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeing_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_uri(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def config(folder, path, **data):
    return made(
        data=dict(train=str(path), shuffle=False, **dict(dict(max_prompt_tokens=200), **data)),
        batch=dict(prompts_per_step=1),
        model=dict(path=str(folder)),
        sampling=dict(max_response_tokens=16),
    )


def prompts(folder, path, **data):
    cfg = config(folder, path, **data)
    source = PromptSource(cfg, load_tokenizer(cfg))
    return [source.of([i])[0] for i in range(len(source.kept))]


def jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


IMAGE = noise(60, 40)
PNG = encoded(IMAGE)


# --------------------------------------------------------------------------- forms


def test_every_form_of_one_image_gives_the_same_prompt(folder, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(PNG)
    uri, parts = data_uri(PNG), [{"type": "text", "text": "see "}, None]
    parts.append({"type": "text", "text": "?"})

    def with_part(part):
        return [{"role": "user", "content": [parts[0], part, parts[2]]}]

    rows = [
        dict(prompt=SPOKEN, images=["in/a.png"]),
        dict(prompt=SPOKEN, images=[{"bytes": None, "path": "in/a.png"}]),
        dict(prompt=SPOKEN, images=[uri]),
        dict(prompt=SPOKEN, image=uri),
        dict(prompt=SPOKEN, image=str(tmp_path / "in/a.png")),
        dict(prompt=with_part({"type": "image"}), images=[uri]),
        dict(prompt=with_part({"type": "image", "image": "in/a.png"})),
        dict(prompt=with_part({"type": "image_url", "image_url": {"url": uri}})),
        dict(prompt=with_part({"type": "image_url", "image_url": {"url": "in/a.png"}})),
        dict(messages=with_part({"type": "image", "url": uri})),
    ]
    found = prompts(folder, jsonl(tmp_path, *rows))
    assert len({p.tokens for p in found}) == len({p.tokens.items for p in found}) == 1
    assert "see <|vision_start|><|image_pad|><|vision_end|>?" in found[0].text
    (picture,) = found[0].tokens.items
    assert sum(found[0].tokens.are_placeholders) == picture.num_tokens


def test_parquet_holds_bytes_as_datasets_stores_them(folder, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    mixed = [
        {"type": "text", "text": "see ", "image": None},
        {"type": "image", "text": None, "image": None},
        {"type": "text", "text": "?", "image": None},
    ]
    table = pyarrow.table(
        {
            "prompt": [[{"role": "user", "content": mixed}]] * 2,
            "images": [[{"bytes": PNG, "path": None}], [{"bytes": None, "path": "a.png"}]],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    one, two = prompts(folder, tmp_path / "rows.parquet")
    (spoken,) = prompts(folder, jsonl(tmp_path, dict(prompt=SPOKEN, images=["a.png"])))
    assert one.tokens == two.tokens == spoken.tokens
    assert one.tokens.items == two.tokens.items == spoken.tokens.items
    assert one.row["images"][0]["bytes"] == PNG


def test_images_of_a_hub_layout_are_not_decoded_before_they_are_checked(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    bomb = flat_png(30000, 30000)
    kept = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    for name, data in (("good", PNG), ("bomb", bomb)):
        rows = {"prompt": ["see <image>?"], "images": [[{"bytes": data, "path": None}]]}
        made_rows = datasets.Dataset.from_dict(rows, features=kept)
        (tmp_path / name / "data").mkdir(parents=True)
        made_rows.to_parquet(tmp_path / name / "data/train-00000-of-00001.parquet")
    (one,) = prompts(folder, tmp_path / "good")
    assert len(one.tokens.items) == 1
    with pytest.raises(Refusal, match="row 1: image 1: .*900000000 pixels.* above data.images.max"):
        prompts(folder, tmp_path / "bomb")


def test_several_images_stand_among_text_in_order_and_without_a_place_they_come_first(
    folder, tmp_path
):
    uris = [data_uri(encoded(noise(60, 40, seed=i))) for i in range(2)]
    spoken = [{"role": "user", "content": "<image>a<image><image>b"}]
    bare = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [
        dict(prompt=spoken, images=[uris[0], uris[1], uris[0]]),
        dict(prompt=bare, images=uris),
        dict(prompt="text <image> only", images=uris[:1]),
    ]
    three, led, text = prompts(folder, jsonl(tmp_path, *rows))
    first, second = three.tokens.items
    counts = [first.num_tokens, second.num_tokens]
    rows_shown = three.tokens.multimodal.places[three.tokens.multimodal.places >= 0].tolist()
    assert rows_shown == [*range(sum(counts)), *range(counts[0])]
    assert led.tokens.items == (first, second)
    assert led.text.index("<|vision_end|>q") > led.text.index("<|image_pad|>")
    assert text.text == "text <|vision_start|><|image_pad|><|vision_end|> only"
    assert text.tokens.items == (first,)


def test_images_with_nothing_between_them_are_refused_by_file_and_line(tmp_path):
    folder = seeing_model("qwen2_5_vl", tmp_path / "model")
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)  # which would put marks around each
    uri, apart = data_uri(PNG), "<image> <image><image>x<image>"
    (close,) = prompts(folder, jsonl(tmp_path, dict(prompt=apart[:7], images=[uri])))
    assert "vision_start" not in close.text
    path = jsonl(tmp_path, dict(prompt="a"), dict(prompt=apart, images=[uri] * 4))
    with pytest.raises(Refusal, match=r"rows.jsonl:2: images 2 and 3 stand side by side"):
        prompts(folder, path)


def test_text_of_a_model_that_sees_shows_nothing_and_of_one_that_does_not_has_no_pictures(
    folder, tmp_path
):
    path = jsonl(
        tmp_path, dict(prompt="a literal <image> here"), dict(prompt=SPOKEN, image="img:1")
    )
    for prompt in prompts(folder, path):
        assert not prompt.tokens.items and len(prompt.tokens.multimodal) == len(prompt.tokens)
        assert "<image>" in prompt.text
    cfg = config(folder, path)
    blind = PromptSource(cfg, character_tokenizer(chat_template=True))
    assert blind.of([0])[0].tokens.multimodal is None


# --------------------------------------------------------------------------- pixels


def opened(data, *, folder=None, **options):
    return ImageFiles(ImageSettings(**options), folder).open([data], where="f:1")[0]


def flat_png(width, height):
    """A PNG of one colour, of few bytes."""

    def chunk(kind, data):
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(min((width + 1) * height, 10**6)))
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_colours_are_made_rgb_and_turned_as_their_exif_says():
    red = Image.new("RGB", (6, 4), "red")
    for image, kind in (
        (red.convert("CMYK"), "TIFF"),
        (red.convert("P"), "PNG"),
        (red.convert("RGBA"), "PNG"),
        (red, "BMP"),
        (red, "GIF"),
    ):
        got = opened(encoded(image, kind))
        assert got.mode == "RGB" and got.size == (6, 4)
        assert all(abs(a - b) < 3 for a, b in zip(got.getpixel((2, 2)), (255, 0, 0))), kind
    clear = opened(encoded(Image.new("RGBA", (4, 4), (9, 9, 9, 0))))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert opened(encoded(red, "JPEG", exif=exif)).size == (4, 6)


def animation(kind):
    frames = [noise(20, 20, seed=i) for i in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


REFUSED = {
    "truncated png": (PNG[: len(PNG) // 2], "cannot be read as an image"),
    "truncated jpeg": (encoded(IMAGE, "JPEG")[:900], "cannot be read as an image"),
    "cut header": (PNG[:20], "cannot be read as an image"),
    "text": (b"<svg></svg>", "cannot be read as an image .11 bytes that begin b'<svg"),
    "another format": (encoded(IMAGE, "PPM"), "cannot be read as an image"),
    "empty": (b"", "cannot be read as an image .0 bytes"),
    "no pixels": (flat_png(0, 0), "cannot be read as an image|holds no pixel"),
    "a line": (flat_png(20000, 1), "is 20000 x 1; one side may be at most 200 times"),
    "bomb": (flat_png(20000, 20000), "400000000 pixels.*above data.images.max_pixels = 33554432"),
    "large": (flat_png(9000, 9000), "81000000 pixels, above data.images.max_pixels = 33554432"),
    "huge": (flat_png(2**31 - 1, 2**31 - 1), "above data.images.max_pixels|cannot be read"),
    "gif": (animation("GIF"), "is a GIF of several frames"),
    "webp": (animation("WEBP"), "is a WEBP of several frames"),
    "apng": (animation("PNG"), "is a PNG of several frames"),
    "tiff": (animation("TIFF"), "is a TIFF of several frames"),
    "16 bit": (encoded(Image.new("I;16", (9, 9), 40000)), "more than 8 bits"),
    "url": ("https://example.org/a.png", "is not fetched"),
    "s3": ("s3://bucket/a.png", "is not fetched"),
    "no base64": ("data:image/png;base64,@@@", "the data URI is no base64"),
    "no data uri": ("data:image/png,abc", "is no data URI in base64"),
    "number": (7, "expected bytes, a data URI or the path of a file, got 7"),
    "null": ({"bytes": None, "path": None}, "expected bytes, a data URI or the path"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_is_refused_by_file_line_and_image(name):
    data, says = REFUSED[name]
    with pytest.raises(Refusal, match=rf"^f:1: image 1: .*({says})"):
        opened(data)


def test_only_files_in_the_folder_of_the_data_are_read(tmp_path):
    inner = tmp_path / "data"
    inner.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (inner / "link.png").symlink_to(tmp_path / "secret.png")
    (inner / "own.png").write_bytes(PNG)
    (inner / "alias.png").symlink_to(inner / "own.png")
    for name in ("own.png", "alias.png", "./own.png", f"file://{inner}/own.png"):
        assert opened(name, folder=inner).size == IMAGE.size
    for name in ("../secret.png", "link.png", str(tmp_path / "secret.png"), "/etc/passwd"):
        with pytest.raises(Refusal, match="is not in the folder of the data file"):
            opened(name, folder=inner)
    for name in ("absent.png", ".", "a\0b", "x" * 5000):
        with pytest.raises(Refusal, match="is no file|cannot be read"):
            opened(name, folder=inner)
    with pytest.raises(Refusal, match="there is no data file whose folder"):
        opened("own.png")
    (inner / "big.png").write_bytes(bytes(2**21))
    with pytest.raises(Refusal, match="has 2097152 bytes, more than data.images.max_pixels = 16"):
        opened("big.png", folder=inner, max_pixels=16)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_files_are_read_or_refused(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"]))
    whole = bytearray(encoded(noise(24, 20), kind))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    try:
        assert opened(bytes(whole[:cut]), max_pixels=10**4).mode == "RGB"
    except Refusal as error:
        assert str(error).startswith("f:1: image 1: ")


# --------------------------------------------------------------------------- rows that are refused


@pytest.mark.parametrize(
    "row, says",
    [
        (dict(prompt=SPOKEN, images=["a.png", "a.png"]), "has 2 images, and its text 1 places"),
        (dict(prompt="<image><image>", images=["a.png"]), "has 1 images, and its text 2 places"),
        (dict(prompt="none", images=["a.png"]), "has 1 images, and its text 0 places"),
        (
            dict(prompt=[{"role": "user", "content": [{"type": "image"}]}]),
            "has 0 images, and its text 1 places",
        ),
        (dict(prompt=SPOKEN, images=["a.png"], image="a.png"), "columns `images` and `image`"),
        (
            dict(prompt=[{"role": "user", "content": [{"type": "video", "video": "v"}]}]),
            "a part of a message's content is",
        ),
        (dict(prompt="<image>" * 3, images=["a.png"] * 3), "3 images, above data.images.max_per"),
        (dict(prompt="<|image_pad|>"), "0 images, and 1 placeholders '<.image_pad.>' for them"),
        (dict(prompt=SPOKEN, images=["cut.png"]), "image 1: cannot be read as an image"),
    ],
)
def test_rows_are_refused_by_file_and_line(folder, tmp_path, row, says):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "cut.png").write_bytes(PNG[:200])
    path = jsonl(tmp_path, dict(prompt="fine"), row)
    with pytest.raises(Refusal, match=rf"rows.jsonl:2: .*{says}"):
        prompts(folder, path, images=dict(max_per_prompt=2))


@pytest.mark.parametrize("overlong", ["error", "drop"])
def test_image_tokens_count_among_those_of_a_prompt(folder, tmp_path, overlong):
    long = data_uri(encoded(noise(84, 84)))
    path = jsonl(tmp_path, dict(prompt="hi"), dict(prompt="<image>" * 3, images=[long] * 3))
    options = dict(max_prompt_tokens=20, overlong_prompts=overlong)
    if overlong == "drop":
        assert [p.text for p in prompts(folder, path, **options)] == ["hi"]
        return
    with pytest.raises(Refusal, match="rows.jsonl:2: 33 tokens, above data.max_prompt_tokens = 20"):
        prompts(folder, path, **options)


def test_a_model_that_does_not_see_refuses_images(folder, tmp_path):
    path = jsonl(tmp_path, dict(prompt=SPOKEN, images=["a.png"]))
    cfg = config(folder, path)
    with pytest.raises(Refusal, match="jsonl:1: it holds 1 images, and the model reads none"):
        PromptSource(cfg, character_tokenizer(chat_template=True))


@pytest.mark.parametrize("damage", ["missing", "no class", "unknown class", "no json"])
def test_a_model_that_sees_needs_its_processor(tmp_path, damage):
    folder = seeing_model("qwen2_5_vl", tmp_path)
    file = folder / "preprocessor_config.json"
    options = json.loads(file.read_text())
    (folder / "processor_config.json").unlink()
    if damage == "missing":
        file.unlink()
    elif damage == "no json":
        file.write_text("{")
    else:
        options["processor_class"] = "Unknown"
        if damage == "no class":
            del options["processor_class"]
        file.write_text(json.dumps(options))
    path = jsonl(tmp_path, dict(prompt="hi"))
    with pytest.raises(Refusal, match="model.path: no image processor .*from the original model$"):
        load_tokenizer(config(folder, path))


def test_images_behind_the_first_rows_are_read_when_their_turn_comes(folder, tmp_path):
    path = jsonl(tmp_path, *[dict(prompt="hi")] * 256, dict(prompt="<image>", images=["a.png"]))
    (tmp_path / "a.png").write_bytes(PNG[:99])
    cfg = config(folder, path)
    source = PromptSource(cfg, load_tokenizer(cfg))
    with pytest.raises(Refusal, match="rows.jsonl:257: image 1: cannot be read"):
        source.of([256])
    with pytest.raises(Refusal, match="rows.jsonl:257: image 1: cannot be read"):
        prompts(folder, path, overlong_prompts="drop")
