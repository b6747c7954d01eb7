"""Put liger's kernels into models on the meta device, and print which of their norms they are.

A process of its own, since liger changes transformers' classes for good, and triton is a stub.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers.modeling_utils  # noqa: F401  (asks for triton's version, before the stub)

from tests.gpu.triton_stub import install
from tests.helpers.plan_runs import FAMILIES, tiny_config

MORE = {
    "mixtral": dict(num_local_experts=4),
    "deepseek_v3": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        num_key_value_heads=4,
    ),
}


def main() -> dict[str, list[str]]:
    """Return {family and kind: names of what computes its norms}, and what own_layers gives."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from spmdrl.model.blocks import base_of, experts_modules
    from spmdrl.model.transformers_internals import apply_liger, own_layers

    FAMILIES.update(MORE)
    autos = {"causal": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification}
    with torch.device("meta"):  # all before the first is changed: what is put in stays for good
        models = {
            f"{family} {kind}": auto.from_config(tiny_config(family, num_labels=1))
            for family in FAMILIES
            for kind, auto in autos.items()
        }
    found = {}
    for name, model in models.items():
        norms = [m for n, m in model.named_modules() if n.endswith("layernorm")]
        is_dense = not experts_modules(model)
        is_done = apply_liger(model, base_of(model)[1], has_rope=True, is_dense=is_dense)
        assert is_done, name
        found[name] = sorted({norm.forward.__qualname__ for norm in norms})
    config = tiny_config("qwen3", num_labels=1)
    with torch.device("meta"):
        built = {"qwen3 built later": AutoModelForCausalLM.from_config(config)}
        with own_layers():
            built["qwen3 of its own layers"] = AutoModelForCausalLM.from_config(config)
            rope = sys.modules[type(built["qwen3 built later"]).__module__].apply_rotary_pos_emb
    for name, model in built.items():
        norms = [m for n, m in model.named_modules() if n.endswith("layernorm")]
        found[name] = sorted({norm.forward.__qualname__ for norm in norms})
    found["rope"] = [rope.__module__]
    return found


if __name__ == "__main__":
    sys.path.append(str(Path(sys.prefix) / "liger"))
    install()
    print(json.dumps(main()))
