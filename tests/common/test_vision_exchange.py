"""Pictures on their way: from who drew to who trains once each, through files and into pages."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import pad

from spmdrl.check.fit import fit_problems
from spmdrl.config import Config, dump, inference_ranks
from spmdrl.data.microbatch_plan import partition
from spmdrl.errors import Refusal
from spmdrl.exchange import exchange_rollouts
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import model_shape
from spmdrl.model_inputs import PICTURE_FEATURES, MultimodalItem, MultimodalItems
from spmdrl.rollout.episode import Episode, Group
from spmdrl.rollout.packing import pack_step, rollouts_from_dict, rollouts_to_dict
from spmdrl.rollout.recorder import HEADER, SCHEMA, digest_line
from spmdrl.rollout.recordings import find_recorded, read_header, read_rollouts, read_table
from spmdrl.rollout.resumed_work import group_from_dict, group_to_dict
from spmdrl.tools.commands import view as viewer
from spmdrl.tools.plan.run import run_of
from spmdrl.tools.plan.text import _step_text
from spmdrl.tools.plan.trainer_memory import trainer_memory
from spmdrl.train.companions.reencoding import check_other_tokenizer
from spmdrl.types import Batch as ExchangedBatch
from spmdrl.types import Rollouts, Tokens
from spmdrl.world.axes import axes_of
from tests.common import test_exchange as texts
from tests.helpers import vlm
from tests.helpers.built import changed, refused, small_model, started
from tests.helpers.pages import part_of
from tests.helpers.ranks import run_ranks
from tests.rollout import test_record as records

# ---------------------------------------------------------------- a batch that shows


def picture(number: int) -> MultimodalItem:
    """Make one of a shape of its own, of features of two dtypes."""
    draw, tokens = torch.Generator().manual_seed(number), 1 + number % 2
    rows = 3 * tokens + number  # sizes of bytes that no wider dtype divides
    features = {
        "pixel_values": torch.rand(rows, 5, generator=draw).to(torch.float16),
        "grid": torch.tensor([[1, rows, 5]]),
    }
    return MultimodalItem(f"key {number}", tokens, features)


def numbers_of(group: int, sample: int) -> list[int]:
    """Say what a sequence shows: its group's picture; 6 in all of groups 0 and 1; a later one of
    its own in a sample of group 2; nothing in group 3."""
    return [[0, 6], [6, 5], [2, 20 + sample] if sample == 1 else [2], []][group]


def pictures_of(group: int, sample: int) -> MultimodalItems:
    length = len(texts.sequence(group, sample)["tokens"])
    shown = [picture(number) for number in numbers_of(group, sample)]
    count = sum(p.num_tokens for p in shown)
    return MultimodalItems.at_placeholders(
        pad(torch.ones(count).bool(), (0, length - count)), shown
    )


def items_of(tokens: Tokens) -> MultimodalItems | None:
    return MultimodalItems.of(tokens.extra_columns)


def with_items_of(tokens: Any, items: MultimodalItems | None) -> Any:
    return dataclasses.replace(tokens, extra_columns={} if items is None else {items.key: items})


def showing(keys: list[tuple[int, int]]) -> Rollouts:
    own = texts.rollouts(keys)
    lengths = own.scalars.lengths.tolist()
    shown = MultimodalItems.concat([pictures_of(*key) for key in keys], lengths)
    if shown is not None:  # every rank has group 2's, which some show to no token
        items = tuple(dict.fromkeys([*shown.items, picture(2)]))
        shown = MultimodalItems(shown.places, items)
    return with_items_of(own, shown)


def deliver(cfg: Config) -> tuple[list[ExchangedBatch], list[list[int]], int]:
    """Exchange pictures of sequences that are spread over ranks; of one rank alone; text of a model
    that sees; and pictures where the first leader has a model that does not."""
    batches, sizes, counts = [], [], []
    take = MultimodalItem.with_bytes
    MultimodalItem.with_bytes = lambda form, data: counts.append(len(data)) or take(form, data)
    with started(cfg) as world:
        silent = world.rank == inference_ranks(cfg)[0]
        for how in ("spread", "last has all", "text", "silent"):
            mine = texts.share(world, "spread" if how in ("text", "silent") else how)
            own = showing(mine)
            if how == "text":
                own = with_items_of(own, MultimodalItems.none(len(own.tokens)))
            if how == "silent" and silent:
                own = with_items_of(own, None)
            batches.append(exchange_rollouts(own, world, step=3))
            sizes.append([*counts])
            counts.clear()
        return batches, sizes, world.dp_index(world.rank) if world.is_trainer else -1


def placeholders_of(pictures: MultimodalItems) -> list[tuple[str, int] | None]:
    rows = [(p.key, row) for p in pictures.items for row in range(p.num_tokens)]
    return [None if at < 0 else rows[at] for at in pictures.places.tolist()]


def check_pictures(batch: ExchangedBatch) -> tuple[set[str], int]:
    """Compare what every token shows with what was made; return the keys, and silent sequences."""
    keys: set[str] = set()
    num_silent = 0
    for mb in batch.microbatches:
        assert items_of(mb) is not None and len(items_of(mb)) == len(mb.tokens)
        shown = placeholders_of(items_of(mb))
        cu = mb.cu_seqlens.tolist()
        for row, a, b in zip(mb.sequence_ids.tolist(), cu, cu[1:]):
            if row < 0:
                assert shown == [None] and items_of(mb).items == ()
                continue
            key = (int(batch.scalars.group_ids[row]), int(batch.scalars.sample_ids[row]))
            made = placeholders_of(pictures_of(*key))
            is_silent = any(made) and not any(shown[a:b])
            assert is_silent or shown[a:b] == made
            num_silent += is_silent
        for item in items_of(mb).items:
            keys.add(item.key)
            made = picture(int(item.key.split()[1]))
            assert item.num_tokens == made.num_tokens
            for name, tensor in made.features.items():
                assert item.features[name].dtype == tensor.dtype
                assert torch.equal(item.features[name], tensor)
        assert {p.key for p in items_of(mb).items} == {show[0] for show in shown if show}
    return keys, num_silent


LAYOUTS = [
    (texts.lay("colocated", 1), {}),
    (texts.lay("split", 2), {}),
    (texts.lay("split", 4, trainer_ranks=2), {"tokens_per_microbatch": 400}),
    (texts.lay("colocated", 4, cp=2, inference_tp=2), {"updates_per_step": 2}),
]


@pytest.mark.parametrize("layout, sizes", LAYOUTS)
def test_pictures_arrive_once_at_every_rank_that_trains_on_them(layout, sizes):
    cfg = texts.config(layout, **sizes)
    results = run_ranks(layout.world_size, deliver, cfg)
    for which, how in enumerate(("spread", "last has all", "text", "silent")):
        texts.check_delivery([(batches[which], dp) for batches, _, dp in results], cfg)
        silent = 0
        for batches, counts, _ in results:
            batch = batches[which]
            if how == "text" or (how == "silent" and layout.world_size < 4):  # one leader
                assert all(items_of(mb) is None for mb in batch.microbatches)
                assert not counts[which]
                continue
            keys, num_silent = check_pictures(batch)
            silent += num_silent
            # Each once, and no byte besides.
            sent = sorted(picture(int(key.split()[1])).nbytes for key in keys)
            assert sorted(counts[which]) == sent
        assert silent == 0 or how == "silent"


# ---------------------------------------------------------------- the plan


@given(
    sizes=st.lists(st.tuples(st.integers(20, 60), st.integers(0, 60)), min_size=64, max_size=96),
    dp_size=st.sampled_from([2, 4]),
)
@settings(max_examples=50, deadline=None)
def test_what_is_added_counts_in_the_balance_and_takes_no_room(sizes, dp_size):
    lengths, added = torch.tensor(sizes).t()
    ids = torch.arange(len(sizes))
    options = dict(group_ids=ids, dp_size=dp_size, tokens_per_microbatch=512)
    plan = partition(lengths, added=added, **options)
    places = plan.dp_ids * 1000 + plan.microbatch_ids
    loads = torch.zeros(dp_size).index_add(0, plan.dp_ids, (lengths + added).float())
    assert loads.max() - loads.min() <= 0.1 * loads.mean()
    assert all(int(lengths[places == place].sum()) <= 512 for place in places.unique())
    text, none = partition(lengths, **options), partition(lengths, added=added * 0, **options)
    assert torch.equal(none.dp_ids, text.dp_ids)
    assert none.num_microbatches == text.num_microbatches


def test_sequences_with_pictures_are_spread_over_ranks():
    lengths, shows = torch.full((16,), 50), torch.arange(16) < 4
    plan = partition(
        lengths, group_ids=torch.arange(16), dp_size=4, tokens_per_microbatch=200, added=shows * 40
    )
    assert sorted(plan.dp_ids[shows].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("family", vlm.FAMILIES)
def test_the_planner_counts_the_pixels_that_a_processor_gives(family, tmp_path):
    folder = vlm.seeing_model(family, tmp_path)
    model = build_meta_model(changed(Config().model, path=str(folder)))
    if family == "glm4v":
        with pytest.raises(Refusal, match="no up_proj with a gate_proj"):
            model_shape(model)
        return
    shape = model_shape(model)
    reader = vlm.reader(folder)
    (one,) = reader.encode(reader.placeholder, [vlm.noise(60, 90)]).items
    pixels = one.features["pixel_values"].nbytes
    assert pixels == one.num_tokens * shape.tower.patches * shape.tower.patch_bytes
    cfg = texts.config(texts.lay("offline", 1))
    means = dict(on_gpu=False, chunk_tokens=64, prompt_tokens=20, response_tokens=80)
    runs = [run_of(cfg, own, **means) for own in (shape, dataclasses.replace(shape, tower=None))]
    assert ["without a tower's work" in _step_text(run) for run in runs] == [True, False]
    found, blind = (trainer_memory(run, axes_of(cfg)) for run in runs)
    assert found.total - blind.total == found.causes["images"] > 4 * 20 * pixels / one.num_tokens
    assert "images" not in blind.causes


# ---------------------------------------------------------------- files and pages


def image(number: int) -> torch.Tensor:
    return torch.full((4 + number, 6, 3), 40 * number, dtype=torch.uint8)


def seeing_group(slot: int) -> Group:
    """A group whose prompt shows a picture, and one of whose samples saw another between turns;
    group 0 and 1 show the same, group 3 shows nothing."""
    group = records.group_of(slot, has_greedy=True)
    number = max(0, slot - 1) if slot < 3 else None
    for sample in group.samples.values():
        places = torch.full_like(sample.trajectory.tokens, -1)
        items = (
            [] if number is None else [dataclasses.replace(one_token(number), view=image(number))]
        )
        places[1] = -1 if number is None else 0
        if sample.sample == 1 and items:
            items.append(one_token(3))  # of which no image is known
            places[5] = 1
        seen = with_items_of(sample.trajectory, MultimodalItems(places, tuple(items)))
        group.samples[sample.sample] = dataclasses.replace(sample, traces=(seen,))
    return group


def one_token(number: int) -> MultimodalItem:
    return dataclasses.replace(picture(2 * number), num_tokens=1)


def assert_same_pictures(a: MultimodalItems, b: MultimodalItems) -> None:
    assert placeholders_of(a) == placeholders_of(b)
    for left in a.items:
        right = next(item for item in b.items if item == left)
        assert left.num_tokens == right.num_tokens
        assert left.features.keys() == right.features.keys()
        for name, own in left.features.items():
            assert own.dtype == right.features[name].dtype and torch.equal(
                own, right.features[name]
            )


def test_recorded_pictures_come_back_bit_by_bit_each_once_in_its_group(tmp_path):
    cfg = records.config_of(tmp_path / "live", steps=1)
    groups = [seeing_group(slot) for slot in range(4)]
    share = records.record_groups(cfg, 0, groups)
    (file,) = find_recorded(tmp_path / "live").files_of(0)
    table = read_table(file)
    new = table["picture_forms"].to_pylist()
    assert [sum(map(len, new[at : at + 3])) for at in (0, 3, 6, 9)] == [2, 2, 2, 0]
    assert PICTURE_FEATURES not in read_table(file, without_features=True).column_names
    source = records.replay_source(
        records.replay_config(tmp_path / "a", tmp_path / "live", steps=1)
    )
    back = source.take(0)
    records.assert_same_rollouts(share, back)
    assert_same_pictures(items_of(share), items_of(back))
    half = read_rollouts([file], part=1, num_parts=2)  # groups 1 and 3
    drawn = [sample for group in groups[1::2] for sample in group.drawn_samples]
    assert placeholders_of(items_of(half)) == [
        show for sample in drawn for show in placeholders_of(items_of(sample.trajectory))
    ]
    blind = dict(model=dict(part="text"))
    source = records.replay_source(changed(source.cfg, **blind))
    with refused("step 0 has images, and model.part: text leaves out the tower"):
        source.take(0)


def test_rollouts_without_pictures_are_recorded_as_before(tmp_path):
    share = records.record(records.config_of(tmp_path), 0, range(2))
    (file,) = find_recorded(tmp_path).files_of(0)
    assert read_table(file).column_names == SCHEMA.names
    assert items_of(share) is None and items_of(read_rollouts([file], part=0, num_parts=1)) is None
    groups = [records.group_of(0)]
    for sample in groups[0].samples.values():
        own = with_items_of(sample.trajectory, MultimodalItems.none(len(sample.trajectory.tokens)))
        groups[0].samples[sample.sample] = dataclasses.replace(sample, traces=(own,))
    records.record_groups(records.config_of(tmp_path / "seeing"), 0, groups)
    (file,) = find_recorded(tmp_path / "seeing").files_of(0)
    assert read_table(file).column_names == SCHEMA.names


def test_nonsense_in_recorded_pictures_is_refused_with_the_file(tmp_path):
    records.record_groups(records.config_of(tmp_path), 0, [seeing_group(0)])
    (file,) = find_recorded(tmp_path).files_of(0)
    table = read_table(file)
    header = {HEADER: json.dumps(read_header(file))}
    column = table.column_names.index("picture_places")
    for places in ([0] * 3, [9] * 7, [-2] * 7):
        rows = table["picture_places"].to_pylist()
        rows[2] = places
        kind = table.schema.field(column)
        changed_table = table.set_column(column, kind, pyarrow.array(rows, kind.type))
        pyarrow.parquet.write_table(changed_table.replace_schema_metadata(header), file)
        file.with_suffix(".sha256").write_text(digest_line(file, file.name))
        with refused(str(file), "in 2 pictures, of 7"):
            read_rollouts([file], part=0, num_parts=1)


def test_the_viewer_shows_images_where_they_stand(tmp_path, capsys):
    cfg = records.config_of(tmp_path)
    records.record_groups(cfg, 0, [seeing_group(slot) for slot in range(4)])
    (tmp_path / "config.yaml").write_text(dump(cfg))
    small_model(tmp_path / "model", layers=1)
    asked = [str(tmp_path), "--step", "0", "--group", "2", "--tokenizer", str(tmp_path / "model")]
    page = tmp_path / "group.html"
    assert viewer.main([*asked, "--html", str(page)]) == 0
    assert "<img" not in page.read_text()
    (group,) = part_of(page, "rollouts-0-0")["groups"]
    before, png, after = group["prompt"]  # between the first token and the third
    assert isinstance(before, str) and isinstance(after, str) and png["label"] == "image 6 x 5"
    pixels = numpy.array(Image.open(io.BytesIO(base64.b64decode(png["png"]))))
    assert numpy.array_equal(pixels, image(1).numpy())
    between_turns = [s["images"] for s in group["samples"] if s["images"]]
    assert [[*one.values()] for one in between_turns] == [[{"label": "image", "png": ""}]]
    assert viewer.main([*asked, "--tokens"]) == 0
    out = capsys.readouterr().out
    assert out.count("[image 6 x 5]") == 1 and out.count("[image] (not sampled)") == 1
    assert viewer.main(asked[:-2]) == 0
    assert "[image 6 x 5]what is <2>?" in capsys.readouterr().out
    assert viewer.main([*asked[:4], "3"]) == 0 and "[image" not in capsys.readouterr().out


def test_what_was_made_ahead_and_what_is_under_way_is_saved_with_its_pictures(tmp_path):
    groups = [seeing_group(slot) for slot in range(3)]
    plain = dict(seconds=1.5, measured={}, dropped=[], num_carried=0)
    share = pack_step(groups, records.config_of(tmp_path), is_first=True, **plain)
    first = groups[2].samples[0].trajectory
    prompt = dataclasses.replace(groups[2].prompt, tokens=first.token_ids[:3])
    half = Episode(groups[2], 0, groups[2].samples.pop(0).trajectory)
    state = {"ahead": rollouts_to_dict(share), "group": group_to_dict(groups[2], [half])}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    back = rollouts_from_dict(loaded["ahead"])
    records.assert_same_rollouts(share, back)
    assert_same_pictures(items_of(share), items_of(back))
    again, (going_on,) = group_from_dict(
        loaded["group"], number=0, draw=groups[2].draw, prompt=prompt
    )
    assert_same_pictures(items_of(going_on.trajectory), items_of(half.trajectory))
    for at, sample in again.samples.items():
        assert_same_pictures(
            items_of(sample.trajectory), items_of(groups[2].samples[at].trajectory)
        )
        assert_same_pictures(sample.prompt.tokens.multimodal, prompt.tokens.multimodal)
    (shown,) = prompt.tokens.items
    kept = next(item for item in items_of(back).items if item == shown)
    assert torch.equal(kept.view, shown.view)  # for what is recorded later


# ---------------------------------------------------------------- models beside the policy


def test_models_that_do_not_see_are_refused_beside_one_that_does(tmp_path):
    folder = vlm.seeing_model("qwen2_5_vl", tmp_path / "seeing")
    blind, other = small_model(tmp_path / "blind"), f"model:{tmp_path / 'blind'}"
    cfg = changed(Config(), model=dict(path=str(folder)), layout=dict(device="cpu"))

    def said(**fields) -> str:
        return "\n".join(fit_problems(changed(cfg, **fields)))

    assert "does not see" not in said() and "and the policy sees" not in said()
    own = dict(reference=dict(path=str(blind)))
    assert f"model.reference.path {blind}: it does not see, and the policy does" in said(model=own)
    scored = said(rewards=dict(functions=(other,)))
    assert (
        f"{blind}: it does not see, and the policy does" in scored and "rewards.functions" in scored
    )
    cached = dict(reference=dict(cache=True))
    assert "model.reference.cache: true, and the policy sees" in said(model=cached)
    text = dict(path=str(blind), reference=dict(cache=True))
    assert "and the policy sees" not in said(model=text)
    with refused("its tokenizer is not the policy's, which sees"):
        check_other_tokenizer(cfg, blind, vocab_size=10**6, row=None)
