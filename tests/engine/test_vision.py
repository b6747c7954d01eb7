"""Engines that see: they draw and score what plain transformers makes of the same images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from spmdrl.config import Config, LayoutSettings
from spmdrl.engine.protocol import Request
from spmdrl.engine.vllm.families import model_arguments
from spmdrl.errors import Refusal
from spmdrl.model_inputs import ItemCodec, TokenIds
from spmdrl.plain import pack, unpack
from tests.helpers.built import changed
from tests.helpers.drawn import finished
from tests.helpers.vlm import FAMILIES, noise, plain_logprobs, reader, seeing_model
from tests.helpers.worlds import in_world, make_engine
from tests.sync.test_engine import make_config

SIZES = ((70, 56), (100, 40), (30, 30))


def seeing_cfg(folder: Path | str, *, kind: str) -> Config:
    """Return a config of one rank that trains and generates, with room for images."""
    layout = LayoutSettings(placement="colocated", world_size=1)
    cfg = make_config(Path(folder), layout=layout, dtype="float32", kind=kind)
    return changed(cfg, data={"max_prompt_tokens": 192})


def message(folder: Path, images: list[int]) -> TokenIds:
    """Return the ids of a message with some images of noise, and what they show."""
    words = AutoTokenizer.from_pretrained(folder)
    shown = [[{"type": "text", "text": f" {i}: "}, {"type": "image"}] for i in images]
    content = [{"type": "text", "text": "say"}, *(part for parts in shown for part in parts)]
    text = words.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return reader(folder).encode(text, [noise(*SIZES[i], seed=i) for i in images])


def tower_runs(engine: Any) -> list[int]:
    """Return a list that gets the rows that each run of an engine's tower makes of pictures."""
    runs: list[int] = []
    owner = engine.model
    name = "embed_multimodal" if hasattr(owner, "embed_multimodal") else "get_image_features"
    owner = owner if name == "embed_multimodal" else owner.model
    embed = getattr(owner, name)

    def watched(*args: Any, **given: Any) -> Any:
        found = embed(*args, **given)
        parts = found if name == "embed_multimodal" else found.pooler_output
        runs.append(sum(part[..., 0].numel() for part in parts))
        return found

    setattr(owner, name, watched)
    return runs


def draw(engine: Any, rows: list[TokenIds], *, samples: int, turn: int = 0) -> dict[str, Any]:
    """Draw 8 tokens for each sample of each row, the first greedily."""
    for n, prompt in enumerate(rows):
        for s in range(samples):
            warmth, key = float(s > 0), f"{n}.{s}.{turn}"
            engine.add(Request(key, prompt, 8, warmth, s, ()))
    return finished(engine)


def gap(found: Tensor, right: Tensor) -> float:
    """Return the largest difference, nats."""
    return float((found - right).abs().max())


def gaps(engine: Any, model: Any, rows: list[TokenIds], done: dict[str, Any]) -> dict[str, float]:
    """Return largest differences to plain transformers, and drawn tokens that are not the likeliest
    where they should be."""
    whole, found = [], {"drawn": 0.0, "scored": 0.0, "unlikely": 0}
    for key, sample in done.items():
        n, s, _ = map(int, key.split("."))
        whole.append(rows[n] + sample.tokens)
        right = plain_logprobs(model, whole[-1])[-len(sample.tokens) :]
        own = right.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        found["drawn"] = max(found["drawn"], gap(torch.tensor(sample.logprobs), own))
        if s == 0:
            found["unlikely"] += int((right.argmax(1) != torch.tensor(sample.tokens)).sum())
    for scores, tokens in zip(engine.score(whole), whole, strict=True):
        right = plain_logprobs(model, tokens)
        own = right.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        found["scored"] = max(found["scored"], gap(scores[1:], own))
    return found


def in_each(world: Any, folders: dict[str, str]) -> dict[str, Any]:
    """Draw with an engine of each folder, over two turns, and compare with plain transformers."""
    found: dict[str, Any] = {}
    for family, name in folders.items():
        own, folder = copy.copy(world), Path(name)
        own.cfg = seeing_cfg(name, kind=world.cfg.engine.kind)
        engine = make_engine(own.cfg, own)
        engine.weights_changed(0)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        runs = tower_runs(engine)
        rows = [message(folder, images) for images in ([0, 1], [2, 0, 2], [])]
        first = draw(engine, rows, samples=4)
        once = {p.key: p.num_tokens for row in rows for p in row.items}
        towers = sum(runs) - sum(once.values())  # three images, twelve samples
        found[family] = [gaps(engine, model, rows, first) | {"repeated": towers}]
        answered = [
            row + first[f"{n}.0.0"].tokens + message(folder, [1]) for n, row in enumerate(rows)
        ]
        second = draw(engine, answered, samples=2, turn=1)
        found[family].append(gaps(engine, model, answered, second))
        engine.close()
    return found


def assert_exact(found: dict[str, Any]) -> None:
    """Check what `in_each` found."""
    for family, turns in found.items():
        for of in turns:
            assert max(of["drawn"], of["scored"]) < 1e-5 and not of["unlikely"], (family, of)
        assert turns[0]["repeated"] == 0, (family, turns)


def test_the_transformers_engine_draws_and_scores_images_as_transformers_does(tmp_path):
    folders = {f: str(seeing_model(f, tmp_path / f)) for f in FAMILIES}
    cfg = seeing_cfg(folders["qwen3_vl"], kind="transformers")
    (found,) = in_world(cfg, in_each, folders)
    assert_exact(found)


def test_vllm_refuses_what_it_cannot_see_with(tmp_path, monkeypatch):
    folder = seeing_model("gemma3", tmp_path / "gemma3")
    with pytest.raises(Refusal, match="both directions.*no such mask.*set it to transf"):
        model_arguments(seeing_cfg(folder, kind="vllm"))
    folder = seeing_model("internvl", tmp_path / "internvl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refusal, match="internvl: .*torchvision, which is not installed;"):
        model_arguments(seeing_cfg(folder, kind="vllm"))


def test_pictures_are_told_once(tmp_path):
    folder = seeing_model("internvl", tmp_path)
    rows = [message(folder, images) for images in ([0, 1], [1], [])]
    said, heard = ItemCodec(), ItemCodec()
    messages = [said.encode(row.multimodal) for row in (*rows, *rows)]
    assert [len(of["items"]) for of in messages] == [2, 0, 0, 0, 0, 0]
    for of, row in zip(messages, (*rows, *rows), strict=True):
        meant = heard.decode(unpack(pack(of)))
        assert TokenIds(row, meant) == row and torch.equal(meant.places, row.multimodal.places)
        for own, right in zip(meant.items, row.items, strict=True):
            assert torch.equal(own.features["pixel_values"], right.features["pixel_values"])
    assert said.encode(None) is None and heard.decode(None) is None
