"""Sequence parallelism: tokens are sharded between attention and MLP, and the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmdrl.model.parallel import sequence_parallel
from spmdrl.model.parallel.tp_plan import tp_styles
from tests.helpers.worlds import in_world, make_trainer
from tests.model.test_tp_plan import model_of
from tests.train import test_parity_grid as grid

ROWS = [[5, 9, 12, 7, 30, 21, 8], [1, 8, 40, 41]]  # 11 tokens, padded to 12 under tp 2


def _tokens_between(trainer: object) -> set[int]:
    """Return how many tokens come into the blocks when the policy scores ROWS."""
    seen, handles = set(), []
    for block in trainer.policy.model.hf_model.base_model.layers:
        handles.append(
            block.register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[1]))
        )
    trainer.weights.score(ROWS)
    for handle in handles:
        handle.remove()
    return seen


def _on_ranks(base: Any) -> dict:
    """Train with and without, and alone; return the gaps and the tokens between layers."""
    cfg = grid.replace(base.cfg, layout=grid.layout_of("shard2 tp2"))
    reference = [grid._train(grid.replace(cfg, layout=grid.ALONE), base)]
    torch.distributed.broadcast_object_list(reference, src=0, group=base.control)
    found, why_not = {}, sequence_parallel.why_not
    for name, reason in (("sharded", why_not), ("whole", lambda *_: "asked for by the test")):
        sequence_parallel.why_not = reason
        world = grid.world_under(base, cfg)
        found[name] = (
            _tokens_between(make_trainer(cfg, world)),
            grid._gaps(grid._train(cfg, base), reference[0]),
        )
    sequence_parallel.why_not = why_not
    return found


@pytest.mark.parametrize("row", ["qwen2, tied, checkpointing", "gemma2"])
def test_tokens_are_sharded_between_layers_and_training_is_the_same(row, tmp_path):
    cfg = grid._config(tmp_path, grid.ROWS[row])
    cfg = grid.replace(cfg, layout=grid.layout_of("shard4"))
    for rank, found in enumerate(in_world(cfg, _on_ranks)):
        assert found["sharded"] == ({6}, []), f"rank {rank}"
        assert found["whole"] == ({12}, []), f"rank {rank}"


def _reason(kind: str) -> str:
    model = model_of(kind)
    return sequence_parallel.why_not(model, tp_styles(model))


FAMILIES = (
    "qwen2 qwen3 llama gemma2 gemma3_text mistral phi3 olmo2 cohere granite qwen3_moe qwen2_moe "
    "mixtral olmoe deepseek_v2 deepseek_v3 glm4_moe"
)


@pytest.mark.parametrize("kind", FAMILIES.split())
def test_families_of_attention_and_mlp_shard_their_tokens(kind):
    assert _reason(kind) == ""


@pytest.mark.parametrize(
    "kind, says", [("gpt_neox", "gpt_neox.layers.0.attention is neither attention, MLP nor norm")]
)
def test_others_say_why_they_do_not(kind, says):
    assert says in _reason(kind)
