"""Write a small random language model and its tokenizer into a Hugging Face folder.

    python -m spmdrl create_model FOLDER --architecture qwen3 --hidden-size 128 --layers 4

For demos and tests: what it writes is an ordinary folder that transformers and vLLM load.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from spmdrl.errors import Refusal
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:  # and in the functions: `--help` needs none of it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Architecture = Literal[
    "qwen3",
    "qwen2",
    "llama",
    "gemma2",
    "gemma3",
    "mistral",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "gemma3_vision",
    "internvl",
]

# gemma3 without its vision tower has a model type of its own.
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_VISION_MODELS = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "gemma3_vision": "gemma3",
    "internvl": "internvl",
}
"""{architecture with a vision tower: its model type}."""


@dataclass(frozen=True)
class TowerSizes:
    """Of the vision tower of a model that sees: qwen2_5_vl, qwen3_vl, qwen3_vl_moe, gemma3_vision,
    internvl. Those have the character tokenizer, a chat template and a processor of images."""

    width: int = 64
    """Hidden size, a multiple of 16."""
    layers: int = 2
    """Blocks."""
    image_side: int = 56
    """Pixels of the side of the largest image, a multiple of 28; larger ones are shrunk."""
    fan_in: bool = False
    """Draw each matrix with a standard deviation of inputs ** -0.5, from which a small tower learns
    soon, rather than with the family's 0.02."""


_TOWER = TowerSizes()


def create_model(
    folder: Annotated[Path | str, tyro.conf.Positional],
    *,
    architecture: Architecture = "qwen3",
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 288,
    moe_experts: int = 8,
    tokenizer: str = "characters",
    chat_template: bool = False,
    max_positions: int = 512,
    tied: bool | None = None,
    max_shard_size: str = "5GB",
    initializer_std: float = 0.02,
    tower: TowerSizes = _TOWER,
    seed: int = 0,
) -> Path:
    """Write a model with random float32 weights, and its tokenizer, into a folder.

    The defaults give a Qwen3 of 0.67 million parameters. The head dim is hidden_size / heads.

    Args:
        folder: where to write; made when missing. Files of the same names are replaced.
        architecture: model family.
        hidden_size: width of the residual stream.
        layers: number of blocks.
        heads: query heads per block; must divide hidden_size.
        kv_heads: key/value heads per block; must divide heads.
        intermediate: width of the MLP, or of each expert.
        moe_experts: experts per layer of a mixture (qwen3_moe, mixtral, deepseek_v3, gpt_oss), of
            which two serve each token; deepseek_v3 needs a multiple of 4. Others have none.
        tokenizer: `characters` (one token per ASCII character), or one to take along.
        chat_template: give the character tokenizer a chat template.
        max_positions: longest sequence in tokens.
        tied: use the embedding as the output head; None does as the family does.
        max_shard_size: weights above this are cut into several files, e.g. `100KB`.
        initializer_std: of the weights. Narrow models learn faster from hidden_size ** -0.5.
        tower: of a model that sees.
        seed: of the weights; the same seed gives the same bytes.
    Returns: the folder.
    Raises: Refusal when the head counts do not divide, or for an untied Gemma 2 or 3.
    """
    head_dim = _checked_head_dim(hidden_size, heads=heads, kv_heads=kv_heads)
    sizes: dict[str, Any] = dict(hidden_size=hidden_size, intermediate_size=intermediate)
    sizes |= dict(num_hidden_layers=layers, tie_word_embeddings=_is_tied(architecture, tied))
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    sizes |= dict(max_position_embeddings=max_positions, initializer_range=initializer_std)
    sizes |= _mixture(architecture, experts=moe_experts, sizes=sizes)
    if architecture in _VISION_MODELS:
        _check_tower(tower, tokenizer=tokenizer)
        own = dict(vars(tower), seed=seed, max_shard_size=max_shard_size)
        return _vision_model(_VISION_MODELS[architecture], folder, text=sizes, **own)
    words = _tokenizer(tokenizer, chat_template=chat_template)
    model = _random_model(architecture, sizes=sizes, words=words, seed=seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    words.save_pretrained(folder)
    return Path(folder)


def _checked_head_dim(hidden_size: int, *, heads: int, kv_heads: int) -> int:
    if hidden_size % heads:
        raise Refusal(f"hidden_size {hidden_size} is not a multiple of heads {heads}")
    if heads % kv_heads:
        raise Refusal(f"heads {heads} is not a multiple of kv_heads {kv_heads}")
    return hidden_size // heads


def _check_tower(tower: TowerSizes, *, tokenizer: str) -> None:
    for name, unit in (("width", 16), ("image_side", 28)):
        if (value := getattr(tower, name)) < unit or value % unit:
            raise Refusal(f"tower.{name} {value} is not a multiple of {unit}")
    if tower.layers < 1:
        raise Refusal(f"tower.layers {tower.layers}: a model that sees has one at least")
    if tokenizer != "characters":
        raise Refusal(
            f"tokenizer {tokenizer!r}: a model that sees is made with the character tokenizer, "
            "which has the tokens that stand for images; leave it out"
        )


def _tokenizer(name: str, *, chat_template: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from spmdrl.tools.small_models.character_tokenizer import character_tokenizer

    if name == "characters":
        return character_tokenizer(chat_template=chat_template)
    return AutoTokenizer.from_pretrained(name)


def _is_tied(architecture: Architecture, tied: bool | None) -> bool:
    if architecture in ("gemma2", "gemma3_vision") and tied is False:
        raise Refusal(
            f"tied False with {architecture}: its output head is the embedding, vLLM has "
            "no other; leave tied out"
        )
    return architecture in ("gemma2", "gemma3", "gemma3_vision") if tied is None else tied


def _vision_model(family: str, folder: Path | str, **sizes: Any) -> Path:
    from spmdrl.tools.small_models.random_vision import make_vision_model

    make_vision_model(family, folder, **sizes)
    return Path(folder)


def _mixture(architecture: Architecture, *, experts: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the further fields of a mixture of experts; none of a dense architecture."""
    width = sizes["intermediate_size"]
    head = sizes["head_dim"]
    own = dict(num_experts_per_tok=2)
    if architecture in ("qwen3_moe", "qwen3_vl_moe"):
        return own | dict(num_experts=experts, moe_intermediate_size=width, norm_topk_prob=True)
    if architecture == "gpt_oss":
        return own | dict(num_local_experts=experts)
    if architecture == "mixtral":
        return own | dict(num_local_experts=experts, sliding_window=None)
    if architecture != "deepseek_v3":
        return {}
    if experts % 4:
        raise Refusal(
            f"moe_experts {experts} with deepseek_v3, which has four groups of "
            "experts here; take a multiple of 4"
        )
    return own | dict(
        n_routed_experts=experts,
        moe_intermediate_size=width,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",  # as its own files say, for vLLM
        q_lora_rank=sizes["hidden_size"] // 2,
        kv_lora_rank=sizes["hidden_size"] // 2,
        qk_nope_head_dim=head,
        qk_rope_head_dim=head // 2,
        v_head_dim=head,
        head_dim=head // 2,
        num_key_value_heads=sizes["num_attention_heads"],
    )


def _make_config(
    architecture: Architecture, *, sizes: dict[str, Any], words: PreTrainedTokenizerBase
) -> Any:
    from transformers import AutoConfig

    fields = dict(
        sizes,
        dtype="float32",
        # A multiple of 8, so that a vocabulary-parallel head divides at tp 2, 4 and 8.
        vocab_size=-(-len(words) // 8) * 8,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    if architecture in ("gemma2", "gemma3", "gpt_oss"):
        # Both kinds of layer in a model of any depth, and a window that short texts leave:
        # otherwise half of the attention code would never run at this size.
        kinds = ("sliding_attention", "full_attention")
        fields["layer_types"] = [kinds[i % 2] for i in range(sizes["num_hidden_layers"])]
        fields["sliding_window"] = 32
    if architecture in ("gemma2", "gemma3"):
        fields["query_pre_attn_scalar"] = sizes["head_dim"]
    return AutoConfig.for_model(_MODEL_TYPES.get(architecture, architecture), **fields)


def _random_model(
    architecture: Architecture, *, sizes: dict[str, Any], words: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = _make_config(architecture, sizes=sizes, words=words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Norms start at 1 and biases at 0; noise tells a misplaced one from the right one.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += config.initializer_range * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id
    )
    return model


main = partial(run_command, "create_model", create_model)
