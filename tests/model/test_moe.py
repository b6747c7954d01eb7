"""Mixtures of experts: what the files' tensors are, and scores and gradients as transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from spmdrl.config import ModelSettings
from spmdrl.model.files.file_tensors import file_tensors, live_tensors
from spmdrl.model.load import load_whole_model
from spmdrl.model.tensor_parts import Box, Held, Part
from tests.helpers.comparing import differing
from tests.helpers.policy_runs import meta_model, small_model
from tests.model.test_forward import assert_scored_as_by_transformers, plain_scorer

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.5.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.5.w3.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.5.up_proj.weight",
}
HIDDEN, WIDTH = 32, 24


def make_moe(where: Path, family: str, **options: object) -> Path:
    """A tiny mixture of eight experts, whose routers tell tokens apart."""
    sizes = dict(hidden_size=HIDDEN, intermediate=WIDTH, initializer_std=0.1)
    folder = small_model(where, family, architecture=family, **sizes | options)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):  # large enough to change the choice
            order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(1))
            tensors[name] = torch.linspace(-0.3, 0.3, len(tensor))[order]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    return request.param, make_moe(tmp_path_factory.mktemp("moe"), request.param)


def test_each_file_tensor_is_the_part_that_transformers_makes_of_it(family):
    name, folder = family
    tensors = load_file(folder / "model.safetensors")
    parts = file_tensors(meta_model(folder))
    assert parts.keys() == tensors.keys()
    expert = parts[EXPERT[name]]
    assert expert.tensor == "model.layers.1.mlp.experts.gate_up_proj"
    assert expert.box == Box((5, WIDTH, 0), (1, WIDTH, HIDDEN)) and expert.dims == (1, 2)
    theirs = live_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    held = Held(theirs, parts)
    for key, part in parts.items():
        whole = Box((0,) * len(part.shape), part.shape)
        assert held.boxes()[key] == (whole,)
        assert torch.equal(held.value(key, whole).read(), tensors[key]), key
    ours = load_whole_model(
        ModelSettings(path=str(folder)),
        attention="eager",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert not differing(theirs, live_tensors(ours))


def test_scores_and_gradients_are_those_of_plain_transformers(family):
    _, folder = family
    hf_model, scorer = plain_scorer(folder)
    assert_scored_as_by_transformers(folder, scorer, dict(hf_model.named_parameters()))


def test_a_value_may_be_computed_when_it_is_read_and_is_that_of_its_box():
    generator = torch.Generator().manual_seed(2)
    base, a, b = (
        torch.randn(*shape, generator=generator) for shape in ((4, 6, 10), (4, 6, 2), (4, 2, 10))
    )
    parts = {f"expert.{e}": Part("fused", Box((e, 3, 0), (1, 3, 10)), (2, 1)) for e in range(4)}

    def delta(box: Box) -> torch.Tensor:
        e, i, h = (slice(s, s + n) for s, n in zip(box.start, box.shape))
        return b[e].new_tensor(0.5) * a[e, i] @ b[e, :, h]

    held = Held({"fused": base}, parts, {"fused": delta})
    whole = base + 0.5 * a @ b
    part = Box((4, 1), (5, 2))
    value = held.value("expert.2", part)
    expected = whole[2, 3:].T[4:9, 1:3]
    torch.testing.assert_close(value.read(), expected)
    a.mul_(3.0)  # the value follows what it is computed from
    torch.testing.assert_close(value.read(), (base + 0.5 * a @ b)[2, 3:].T[4:9, 1:3])
    assert value.live.data_ptr() == base[2, 3 + 1, 4].data_ptr()


def test_weights_that_are_computed_on_saving_are_refused_by_name(tmp_path, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    model = meta_model(make_moe(tmp_path, "qwen3_moe"))
    converter = WeightConverter(
        source_patterns="mlp.experts.mixed",
        target_patterns="mlp.experts.gate_up_proj",
        operations=[Interleave(dim=1)],
    )
    monkeypatch.setitem(
        conversion_mapping._checkpoint_conversion_mapping_cache, "qwen3_moe", [converter]
    )
    with pytest.raises(ValueError, match="qwen3_moe.*model.layers.0.mlp.experts.mixed is computed"):
        file_tensors(model)


def test_a_dense_model_is_the_plain_case(tiny_model):
    model = meta_model(tiny_model)
    assert isinstance(model, nn.Module)
    for name, part in file_tensors(model).items():
        assert part == Part.whole(name, tuple(model.get_parameter(name).shape))
