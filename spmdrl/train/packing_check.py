"""The check at a run's start that packed rows are computed right.

It takes random sequences of the lengths that the run will see, and compares:

- packed rows before and after every second sequence gets other tokens: the rest must not change;
- packed rows with rows of one sequence;
- packed rows of the first layers, in float32 on one rank, with transformers' own forward pass over
  each sequence;
- that forward pass with the same one over weights loaded by transformers' own from_pretrained.

The last is left out for a text part alone and for quantised weights, which from_pretrained loads
in another form.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.config import Config, ModelSettings
from spmdrl.imports import attempt
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing import packs
from spmdrl.model.attention.packing_support import enable_packing
from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.files.quantised import quantisation
from spmdrl.model.first_layers import first_layers
from spmdrl.model.head import HeadOptions
from spmdrl.model.load import (
    build_meta_model,
    hf_config_of,
    load_whole_model,
    longest_sequence,
    model_folder,
)
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.transformers_internals import class_of, quiet
from spmdrl.model.vision.families import set_attention, with_text_config
from spmdrl.model.vision.layout import vision_layout_of
from spmdrl.model.vision.noise_images import image_inputs, noise_image_sequence
from spmdrl.model_inputs import MultimodalItems, TokenIds, concat_ids
from spmdrl.types import Sums
from spmdrl.world.comm import agree
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_MOST_SEQUENCES = 8
_HEAD = 16
"""Only the first tokens of a sequence are compared: a leak is largest there."""
_LIMITS = {torch.float32: 1e-4, torch.float64: 1e-4}
_LIMIT = 0.05
"""Nats by which two ways to compute the same may differ in the mean, in float32 and in 16 bits."""
_WORK = {"cpu": 2e12, "cuda": 5e14}
"""Multiplications that the comparison with plain transformers may take."""
_PLAIN_TOKENS = 4096
"""Tokens of the longest sequence for plain transformers, which may hold all attention scores."""


def lengths_of(longest: int) -> list[int]:
    """Return lengths from the longest sequence of a run down to 2 tokens, descending."""
    found = [longest]
    while len(found) < _MOST_SEQUENCES and found[-1] > 2:
        found.append(max(2, (found[-1] + 1) // 2))
    return found


def check_packing(model: ShardedModel, cfg: Config, world: World) -> Sums:
    """Compare the ways to compute a model; trainer ranks call it together.

    Returns: proof/leak, proof/packed_gap and, on rank 0, proof/plain_gap and proof/loaded_gap:
        (largest mean over the first 16 tokens of a sequence, 1), in nats, or units of a scalar
        head.
    Raises: RuntimeError on all trainer ranks where two differ.
    """
    longest = longest_sequence(cfg)
    vocabulary = _vocabulary(model.hf_model)
    rows = with_image_sequence(
        drawn(lengths_of(longest), vocabulary=vocabulary), model.hf_model, longest=longest
    )
    dtype = getattr(torch, cfg.model.compute_dtype)
    limit = _LIMITS.get(dtype, _LIMIT)
    packed = model.score(rows)
    others = with_image_sequence(
        drawn(lengths_of(longest), vocabulary=vocabulary, seed=1), model.hf_model, longest=longest
    )
    swapped = model.score([o if at % 2 else r for at, (r, o) in enumerate(zip(rows, others))])
    leak = worst(packed[::2], swapped[::2])
    single = worst(packed, model.score(rows, row_tokens=1))
    with agree(group=world.trainer_control, kind=RuntimeError):
        # Rows of one shape are computed alike to the last bit, but for experts, which get others.
        exact = limit if experts_modules(model.hf_model) else _LIMITS[torch.float32]
        _refuse(leak, exact, cfg, model, what="other tokens in one sequence change another's {}")
        _refuse(single, limit, cfg, model, what="rows of several sequences and of one differ in {}")
        is_compared = world.rank == 0 and not cfg.objective.is_scalar
        plain = _plain_gaps(cfg, world) if is_compared else {}
    return {"proof/leak": (leak, 1.0), "proof/packed_gap": (single, 1.0)} | plain


def _refuse(gap: float, limit: float, cfg: Config, model: ShardedModel, *, what: str) -> None:
    """Raise a RuntimeError for a gap above the limit.

    Args:
        what: the fault, for the message; {} stands for logprobs or values.
    """
    given = "values" if cfg.objective.is_scalar else "logprobs"
    # Not `gap > limit`, which is False for NaN.
    if not gap <= limit:
        raise RuntimeError(
            f"model.path {cfg.model.path}: {what.format(given)}, by {gap:.3g} on average over a "
            f"sequence's first {_HEAD} tokens, where {limit:g} would be rounding: packed sequences "
            f"see each other, so that {type(model.hf_model).__name__} cannot be trained here"
        )


def _vocabulary(hf_model: nn.Module) -> int:
    return hf_model.get_input_embeddings().weight.shape[0]


def drawn(lengths: Sequence[int], *, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return sequences of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def with_image_sequence(
    rows: list[list[int]], hf_model: nn.Module, *, longest: int
) -> list[TokenIds]:
    """Add a sequence with an image, if the model reads images."""
    seen = noise_image_sequence(hf_model, longest=longest)
    if seen is None:
        return [TokenIds(row) for row in rows]
    return [*(TokenIds(row, MultimodalItems.none(len(row))) for row in rows), seen]


def worst(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest mean difference over the first tokens of a sequence."""
    # One more than _HEAD: nothing predicts the first token, whose logprob is 0.
    gaps = [(a - b)[: _HEAD + 1].abs().mean() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(gaps).max())


def _plain_gaps(cfg: Config, world: World) -> Sums:
    """Compare packed rows of the model's first layers, in float32, with plain transformers, and
    weights as they are loaded here with those of transformers' own loader.

    Returns: the gaps that were measured.
    Raises: RuntimeError where two differ.
    """
    model = cfg.model
    device = world.device
    register_attention()
    whole = hf_config_of(model)
    small, _ = attempt(lambda: first_layers(whole.get_text_config()), Exception)
    # None for an unknown layout of layers: then the whole model is compared.
    config = with_text_config(whole, small or whole.get_text_config())
    own_config = copy.deepcopy(config)  # building a model chooses its attention
    sizes = build_meta_model(model, config=config)
    size = sum(p.numel() for p in sizes.parameters())
    most = min(_PLAIN_TOKENS, int(_WORK[device.type] / (2 * size)) // 4)
    longest = min(most, longest_sequence(cfg))
    if longest < 2 * _HEAD and longest == most:
        log.warning("too large to compare with plain transformers: %d parameters in float32", size)
        return {}
    random = drawn(lengths_of(longest), vocabulary=_vocabulary(sizes), seed=1)
    rows = with_image_sequence(random, sizes, longest=longest)
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    attention = None if cap is None else "eager"  # transformers' own choice leaves the cap out
    released = _scored_as_released(model, own_config, rows, attention=attention, device=device)
    hf_model = load_whole_model(  # after: there is memory for one model
        model, attention=attention, dtype=torch.float32, device=device, config=config
    )
    with torch.no_grad():
        plain = [_by_transformers(hf_model, row, device=device) for row in rows]
        gap = worst(_packed(hf_model, rows, device=device), plain)
    layers = f"its first {len(blocks(hf_model))} layers"
    limit = _LIMITS[torch.float32]
    found: Sums = {"proof/plain_gap": (gap, 1.0)}
    if released is not None:
        loaded = worst(plain, released)
        found["proof/loaded_gap"] = (loaded, 1.0)
        if not loaded <= limit:
            raise RuntimeError(
                f"model.path {model.path}: the weights that are loaded here are not those that "
                f"transformers' own from_pretrained loads: logprobs of {layers} differ by "
                f"{loaded:.3g} nats on average over a sequence's first {_HEAD} tokens, and "
                f"{limit:g} is rounding. Save the model again by transformers (from_pretrained, "
                "save_pretrained) and train that folder"
            )
    if not gap <= limit:
        raise RuntimeError(
            f"model.path {model.path}: packed rows of {type(hf_model).__name__} disagree with "
            f"transformers' own forward pass: logprobs of {layers} differ by {gap:.3g} nats on "
            f"average over a sequence's first {_HEAD} tokens, and {limit:g} is rounding; its "
            "attention is not computed right, and it cannot be trained here"
        )
    return found


def _scored_as_released(
    model: ModelSettings,
    config: Any,
    rows: list[TokenIds],
    *,
    attention: str | None,
    device: torch.device,
) -> list[Tensor] | None:
    """Return the logprobs of plain transformers, with weights loaded by its own from_pretrained;
    None if that loads the folder in another form, or cannot load it.

    Args:
        config: of the model's first layers.
        attention: name in transformers' attention interface; None for its own choice.
    """
    if model.part != "all" or quantisation(config.to_dict()):
        return None
    load = partial(
        class_of(config).from_pretrained,
        model_folder(model.path),
        config=config,
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=model.trust_remote_code,
    )
    with quiet():  # it would warn of the layers that are left out
        hf_model, error = attempt(load, Exception)  # of code of any kind
    if error is not None:
        log.warning(
            "transformers' from_pretrained cannot load the first layers of %s (%s): whether the "
            "weights that are read here are those that it would load is not checked. The run goes "
            "on; who loads this folder by transformers will meet the same error",
            model.path,
            first_line(error),
        )
        return None
    assert hf_model is not None
    hf_model = hf_model.to(device).eval()
    with torch.no_grad():
        return [_by_transformers(hf_model, row, device=device) for row in rows]


def _by_transformers(hf_model: nn.Module, row: TokenIds, *, device: torch.device) -> Tensor:
    tokens = torch.tensor(row, device=device)
    given = image_inputs(hf_model, row, device)
    logits = hf_model(input_ids=tokens[None], use_cache=False, **given).logits[0, :-1].float()
    own = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([own.new_zeros(1), own]).cpu()


def _packed(hf_model: nn.Module, rows: list[TokenIds], *, device: torch.device) -> list[Tensor]:
    vision = vision_layout_of(hf_model, device=device)
    slicing = Slicing(chunk=enable_packing(hf_model).chunk, device=device, vision=vision)
    set_attention(hf_model, "spmdrl_padded")
    scorer = Scorer(hf_model, HeadOptions(1024))
    found: list[Tensor] = []
    for pack in packs(rows, len(rows[0])):
        lengths = [len(row) for row in pack]
        given = concat_ids(pack)
        mask = torch.cat([torch.arange(n) > 0 for n in lengths])
        row = make_row(
            torch.tensor(given), lengths, mask=mask, slicing=slicing, columns=given.extra_columns
        )
        found += row.spread(scorer(row)[0]).cpu().split(lengths)
    return found
