"""A model's rows are proved at start, and what is wrong with them is told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3

from spmdrl.config import Config
from spmdrl.model import transformers_internals
from spmdrl.model.attention.mask_patterns import MaskPattern
from spmdrl.model.attention.packing import make_packing
from spmdrl.model.load import load_whole_model
from spmdrl.model.parallel import row_slices
from spmdrl.tools.small_models.families import family_config
from spmdrl.tools.small_models.shrink import shrunk, tiny_model
from spmdrl.train import packing_check
from spmdrl.train.packing_check import _least_gap, _plain_gaps, check_packing, lengths_of
from tests.helpers.built import made, small_model, training
from tests.helpers.ranks import run_ranks


def _mean_so_far(states: Tensor) -> Tensor:
    return 20 * states.cumsum(1) / torch.arange(1, states.shape[1] + 1)[None, :, None]


def _place_in_row(states: Tensor) -> Tensor:
    """A direction by a token's place in the row, as learned positions would be."""
    places = torch.arange(states.shape[1])[:, None] * torch.arange(1, states.shape[2] + 1)
    return torch.sin(places / 7)[None]


@contextmanager
def _plus(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have the first block add something to its output."""
    block = next(m for m in model.hf_model.modules() if isinstance(m, nn.ModuleList))[0]
    hook = block.register_forward_hook(
        lambda module, args, output: output + change(output).to(output)
    )
    yield
    hook.remove()


def _from_its_own_start(path: Any) -> tuple[int, int]:
    """Return the positions of what follows a shared prefix as if it were a sequence."""
    return 0, path[-1][1] - path[-1][0]


def _narrow(hf_model: nn.Module) -> Any:
    found = enable_packing_there(hf_model)
    for name in found.mask_patterns:
        hf_model.get_submodule(name).mask_pattern = MaskPattern(window=2)
    return found


enable_packing_there = packing_check.enable_packing


def _with_another_head(*args: Any, **options: Any) -> Any:
    """Load a model as a loader would that took the embedding for a head of its own."""
    hf_model = load_whole_model(*args, **options)
    with torch.no_grad():
        hf_model.get_output_embeddings().weight.mul_(1.5)
    return hf_model


def _config(path: str, dtype: str, *, tokens: int, budget: int) -> Config:
    """Return a config of one rank. `tokens`: of a prompt and of a response; `budget`: of a row."""
    return made(
        model=dict(path=path, compute_dtype=dtype),
        data=dict(train="task:addition", size=10, max_prompt_tokens=tokens),
        sampling=dict(max_response_tokens=tokens),
        layout=dict(world_size=1, trainer_ranks=1, device="cpu", placement="colocated"),
        batch=dict(tokens_per_microbatch=budget),
    )


def _said(path: str) -> dict[str, Any]:
    """Return what the check finds of a model as it is, and what it says of one that is changed."""
    cfg = _config(path, "float32", tokens=48, budget=128)
    with training(cfg) as (world, trainer):
        model = trainer.policy.model
        found: dict[str, Any] = {"right": check_packing(model, cfg, world)}
        changes = {
            "leak": _plus(model, _mean_so_far),
            "row": _plus(model, _place_in_row),
            "shared": mock.patch.object(row_slices, "_span", _from_its_own_start),
            "narrow": mock.patch.object(packing_check, "enable_packing", _narrow),
            "loaded": mock.patch.object(packing_check, "load_whole_model", _with_another_head),
        }
        for name, change in changes.items():
            with change, pytest.raises(RuntimeError) as error:
                check_packing(model, cfg, world)
            found[name] = str(error.value)
    return found


@pytest.fixture(scope="module")
def said(tiny_model: Path) -> dict[str, Any]:
    return run_ranks(1, _said, str(tiny_model))[0]


def test_rows_that_are_right_are_told_by_numbers(said):
    found = said["right"]
    names = ("leak", "packed_gap", "shared_gap", "plain_gap", "loaded_gap", "rounding")
    assert found.keys() == {f"proof/{name}" for name in names}
    assert found["proof/loaded_gap"][0] < 1e-6
    assert found["proof/leak"] == (0.0, 1.0)
    assert 0 <= found["proof/shared_gap"][0] < 1e-5
    assert 0 <= found["proof/packed_gap"][0] < 1e-5 and found["proof/plain_gap"][0] < 1e-5


def test_what_is_wrong_is_told_apart(said):
    assert "other tokens in one sequence change another's logprobs" in said["leak"]
    assert "rows of several sequences and of one differ in logprobs" in said["row"]
    assert "whose common prefix is computed once have other scores than each" in said["shared"]
    assert "disagree with transformers' own forward pass" in said["narrow"]
    assert "not those that transformers' own from_pretrained loads" in said["loaded"]
    assert not any("limit" in said[name] for name in ("leak", "row", "narrow"))


def _said_of_states(path: str) -> tuple[float, str]:
    cfg = _config(path, "float32", tokens=48, budget=128)
    with training(cfg) as (world, trainer):
        model = trainer.policy.model
        right = check_packing(model, cfg, world)["proof/shared_gap"][0]
        with (
            mock.patch.object(row_slices, "make_packing", _with_empty_states),
            pytest.raises(RuntimeError) as error,
        ):
            check_packing(model, cfg, world)
    return right, str(error.value)


def _with_empty_states(*args: Any, parents: Any = None, **options: Any) -> Any:
    """Return a packing whose shared prefixes layers with a state do not know."""
    return make_packing(*args, **options)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_states_that_do_not_begin_after_a_shared_prefix_are_refused(family, tmp_path):
    tiny_model(shrunk(family_config(family)), tmp_path)
    right, wrong = run_ranks(1, _said_of_states, str(tmp_path))[0]
    assert 0 <= right < 1e-5
    assert "whose common prefix is computed once have other scores than each" in wrong


def test_lengths_are_those_that_a_run_may_see():
    assert lengths_of(48) == [48, 24, 12, 6, 3, 2]
    assert lengths_of(2) == [2]
    assert lengths_of(10**5)[:3] == [100000, 50000, 25000] and len(lengths_of(10**5)) == 8


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_moe"])
def test_plain_transformers_caps_logits_and_loads_the_same_weights(architecture, tmp_path):
    folder = small_model(tmp_path / "m", architecture=architecture, initializer_std=0.5)
    cfg = made(
        model=dict(path=str(folder), compute_dtype="float32"),
        data=dict(max_prompt_tokens=48),
        sampling=dict(max_response_tokens=16),
    )
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    found = {gap.name: gap.value for gap in _plain_gaps(cfg, world)}
    assert found["loaded_gap"] < 1e-6 and found["plain_gap"] < 1e-5


def test_a_folder_that_transformers_cannot_load_is_not_compared_and_the_log_says_what_it_means(
    tmp_path, caplog
):
    folder = small_model(tmp_path / "m", architecture="qwen3_moe", initializer_std=0.5)
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))  # without `metadata`
    cfg = made(
        model=dict(path=str(folder), compute_dtype="float32"),
        data=dict(max_prompt_tokens=48),
        sampling=dict(max_response_tokens=16),
    )
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    assert [gap.name for gap in _plain_gaps(cfg, world)] == ["plain_gap"]
    (said,) = [r.getMessage() for r in caplog.records if "from_pretrained" in r.getMessage()]
    assert "KeyError: 'metadata'" in said and "is not checked. The run goes on" in said


# ------------------------------------------------------------------ rounding


def _linear_by_rows(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in blocks whose number and order depend on the number of rows, as the kernels of
    GPUs do, with a rounding after each block."""
    rows = states.numel() // states.shape[-1]
    size = -(-states.shape[-1] // (2 + rows % 7))
    blocks = [linear(a, b) for a, b in zip(states.split(size, -1), weight.split(size, -1))]
    at = rows % len(blocks)
    total = torch.stack(blocks[at:] + blocks[:at]).cumsum(0, dtype=states.dtype)[-1]
    return total if bias is None else total + bias


linear = nn.functional.linear


def _joined(row: Callable[..., Any]) -> Callable[..., Any]:
    """Have attention go over the boundaries of sequences."""
    return lambda tokens, lengths, **options: row(tokens, [sum(lengths)], **options)


def _checked(path: str, dtype: str) -> dict[str, Any]:
    """Return what the check finds where matrix products depend on the rows' number, and what it
    says where attention also leaks."""
    cfg = _config(path, dtype, tokens=64, budget=256)
    with training(cfg) as (world, trainer):
        model = trainer.policy.model
        with mock.patch.object(nn.functional, "linear", _linear_by_rows):
            found = check_packing(model, cfg, world)
            model.row = _joined(model.row)
            with pytest.raises(RuntimeError) as error:
                check_packing(model, cfg, world)
    return {"found": found, "leak": str(error.value)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture, layers, std", [("qwen3", 48, 0.2), ("qwen3_moe", 16, 0.1)])
def test_rounding_passes_and_a_leak_does_not(architecture, layers, std, dtype, tmp_path):
    sizes = dict(architecture=architecture, layers=layers, initializer_std=std)
    folder = small_model(tmp_path / "m", **sizes)
    (found,) = run_ranks(1, _checked, str(folder), dtype)
    gap = found["found"]["proof/packed_gap"][0]
    low, high = (0.02, 0.2) if dtype == "bfloat16" else (1e-8, 1e-4)
    assert low < gap < high
    assert "packed sequences see each other" in found["leak"]


def test_a_difference_that_other_tokens_do_not_show_is_none():
    tie = [torch.ones(2), torch.zeros(2)]
    same = [torch.zeros(2), torch.zeros(2)]
    options: dict[str, Any] = dict(limits=[0.1, 0.1], fault="")
    for ours, is_fault in (([tie, same], False), ([same, tie], False), ([tie, tie], True)):
        assert _least_gap("gap", ours, [same, same], **options).is_fault == is_fault
    nan = [torch.full((2,), torch.nan)] * 2
    assert _least_gap("gap", [nan, nan], [same, same], **options).is_fault


def _ropes(path: str) -> list[bool]:
    """Return whether plain transformers rotates by its own function after liger replaced it."""
    cfg = _config(path, "float32", tokens=48, budget=128)
    own = modeling_qwen3.apply_rotary_pos_emb
    seen = []

    def compared(*_: Any) -> list[Any]:
        seen.append(modeling_qwen3.apply_rotary_pos_emb is own)
        return []

    with training(cfg) as (world, trainer):
        before = {modeling_qwen3.__name__: dict(vars(modeling_qwen3))}
        modeling_qwen3.apply_rotary_pos_emb = lambda *args: own(*args)  # as liger does
        transformers_internals._note_replaced(before)
        with mock.patch.object(packing_check, "_plain_gaps", compared):
            check_packing(trainer.policy.model, cfg, world)
    return [*seen, modeling_qwen3.apply_rotary_pos_emb is own]


def test_plain_transformers_is_without_liger(tiny_model):
    assert run_ranks(1, _ropes, str(tiny_model)) == [[True, False]]
