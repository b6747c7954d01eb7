"""The check at a run's start that packed rows are computed right.

It takes random sequences of the lengths that the run will see, and compares:

- packed rows before and after every second sequence gets other tokens: the rest must not change;
- packed rows with rows of one sequence;
- a row of two sequences that share a prefix with these sequences alone;
- packed rows of the first layers, in float32 on one rank, with transformers' own forward pass over
  each sequence;
- that forward pass with the same one over weights loaded by transformers' own from_pretrained.

The effect of rounding is measured on the same sequences (model/rounding.py). A difference that is
much larger is refused.

The last comparison is left out for a text part and for quantised weights, which from_pretrained
loads in another form.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.config import Config, ModelSettings
from spmdrl.data.prefix_tree import LEAST
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
from spmdrl.model.rounding import EXACT, MOST, TIMES, allowed_gap, first_halves
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.model.transformers_internals import class_of, own_layers, quiet
from spmdrl.model.vision.families import set_attention, with_text_config
from spmdrl.model.vision.layout import vision_layout_of
from spmdrl.model.vision.noise_images import image_inputs, noise_image_sequence
from spmdrl.model_inputs import MultimodalItems, TokenIds, concat_ids
from spmdrl.types import Sums
from spmdrl.world.comm import agree, any_of
from spmdrl.world.lost_peers.watch import first_line
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_MOST_SEQUENCES = 8
_HEAD = 16
"""Only the first tokens of a sequence are compared: a leak is largest there."""
_SEEDS = (0, 1)
"""Of the random tokens. A difference counts if it shows with the second ones too: where two experts
are nearly tied, rounding decides, and what one such choice changes has no limit."""
_WORK = {"cpu": 2e12, "cuda": 5e14}
"""Multiplications that the comparison with plain transformers may take."""
_PLAIN_TOKENS = 4096
"""Tokens of the longest sequence for plain transformers, which may hold all attention scores."""


@dataclass(frozen=True)
class _Gap:
    """How far two ways to compute the same are apart."""

    name: str
    """Of the metric, after `proof/`."""
    value: float
    limit: float
    fault: str
    """What is wrong if it is above the limit."""

    @property
    def is_fault(self) -> bool:
        """Return whether it is above the limit, or not a number."""
        return not self.value <= self.limit


def lengths_of(longest: int) -> list[int]:
    """Return lengths from the longest sequence of a run down to 2 tokens, descending."""
    found = [longest]
    while len(found) < _MOST_SEQUENCES and found[-1] > 2:
        found.append(max(2, (found[-1] + 1) // 2))
    return found


def check_packing(model: ShardedModel, cfg: Config, world: World) -> Sums:
    """Compare the ways to compute a model; trainer ranks call it together.

    Returns: proof/leak, proof/packed_gap, proof/shared_gap, proof/rounding and, on rank 0,
        proof/plain_gap and proof/loaded_gap. Each is (gap, 1); a gap is the largest of the means
        over a sequence's first 16 tokens (for shared_gap those after the prefix), in nats, or in
        units of a scalar head.
    Raises: RuntimeError on all trainer ranks where two differ by more than rounding.
    """
    gaps: list[_Gap] = []
    for seed in _SEEDS:
        gaps = _gaps(model, cfg, seed=seed)
        is_fault = any(gap.is_fault for gap in gaps)
        if not any_of(is_fault, group=world.trainer_control):
            break
    with agree(group=world.trainer_control, kind=RuntimeError):
        _refuse(gaps, cfg)
        if world.rank == 0 and not cfg.objective.is_scalar:
            with own_layers():
                plain = _plain_gaps(cfg, world)
            _refuse(plain, cfg)
            gaps += plain
    return {f"proof/{gap.name}": (gap.value, 1.0) for gap in gaps}


def _refuse(gaps: Sequence[_Gap], cfg: Config) -> None:
    """Raise a RuntimeError for the first gap above its limit."""
    unit = "" if cfg.objective.is_scalar else " nats"
    for gap in gaps:
        if gap.is_fault:
            raise RuntimeError(
                f"model.path {cfg.model.path}: {gap.fault}. The difference is {gap.value:.3g}"
                f"{unit} on average over a sequence's first {_HEAD} tokens, where up to "
                f"{gap.limit:.3g} would be rounding"
            )


def _gaps(model: ShardedModel, cfg: Config, *, seed: int) -> list[_Gap]:
    """Score random sequences in several ways; trainer ranks call it together."""
    longest = longest_sequence(cfg)
    hf_model = model.hf_model
    vocabulary = _vocabulary(hf_model)

    def sequences(seed: int) -> list[TokenIds]:
        random = drawn(lengths_of(longest), vocabulary=vocabulary, seed=seed)
        return with_image_sequence(random, hf_model, longest=longest)

    rows = sequences(seed)
    others = sequences(seed + len(_SEEDS))
    swapped = [other if at % 2 else row for at, (row, other) in enumerate(zip(rows, others))]
    packed = model.score(rows)
    leak = worst(packed[::2], model.score(swapped)[::2])
    single = model.score(rows, row_tokens=1)
    noise = worst(single, model.score(first_halves(rows), row_tokens=1))
    dtype = getattr(torch, cfg.model.compute_dtype)
    most = math.inf if cfg.objective.is_scalar else MOST
    limit = min(most, allowed_gap(noise, single, dtype=dtype))
    exact = limit
    if not experts_modules(hf_model):
        # Rows of one shape are computed alike to the last bit, but where ranks or threads add in
        # an order of their own. Experts get rows of other shapes.
        exact = min(most, TIMES * worst(packed, model.score(rows)) + EXACT)
    scores = "values" if cfg.objective.is_scalar else "logprobs"
    end = (
        f"packed sequences see each other, so that {type(hf_model).__name__} cannot be trained here"
    )
    return [
        _Gap("leak", leak, exact, f"other tokens in one sequence change another's {scores}: {end}"),
        _Gap(
            "packed_gap",
            worst(packed, single),
            limit,
            f"rows of several sequences and of one differ in {scores}: {end}",
        ),
        *_shared_gaps(model, longest=longest, seed=seed, limit=limit),
        _Gap("rounding", noise, math.inf, f"{scores} are no numbers"),
    ]


def _shared_gaps(model: ShardedModel, *, longest: int, seed: int, limit: float) -> list[_Gap]:
    """Compare two sequences that share a prefix with each alone; [] where none is shared."""
    common = max(LEAST, longest // 4)
    own = max(1, longest // 2 - common)
    if not model.world.shares_prefixes or common + own > longest // 2:
        return []
    prefix, *ends = drawn([common, own, own], vocabulary=_vocabulary(model.hf_model), seed=seed)
    pair = [prefix + end for end in ends]
    together = [scores[common:] for scores in model.score(pair)]
    single = [scores[common:] for scores in model.score(pair, row_tokens=1)]
    fault = (
        "two sequences whose common prefix is computed once have other scores than each alone; set "
        "batch.share_prefixes to never"
    )
    return [_Gap("shared_gap", worst(together, single), limit, fault)]


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
    """Return the largest mean difference over the first tokens that two sequences both have."""
    gaps = []
    for a, b in zip(ours, theirs, strict=True):
        # One more than _HEAD: nothing predicts the first token, whose logprob is 0.
        count = min(len(a), len(b), _HEAD + 1)
        gaps.append((a[:count] - b[:count]).abs().mean())
    return float(torch.stack(gaps).max())


def _plain_gaps(cfg: Config, world: World) -> list[_Gap]:
    """Compare packed rows of the model's first layers, in float32, with plain transformers, and
    weights as they are loaded here with those of transformers' own loader.

    Returns: what was compared; of several draws of tokens, the one with the smallest difference.
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
        return []
    # The first layers of a dense model choose nothing, so that one draw of tokens shows all.
    seeds = _SEEDS if experts_modules(sizes) else _SEEDS[:1]
    draws = []
    for seed in seeds:
        random = drawn(lengths_of(longest), vocabulary=_vocabulary(sizes), seed=seed)
        draws.append(with_image_sequence(random, sizes, longest=longest))
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    attention = None if cap is None else "eager"  # transformers' own choice leaves the cap out
    released = _scored_as_released(model, own_config, draws, attention=attention, device=device)
    hf_model = load_whole_model(  # after: there is memory for one model
        model, attention=attention, dtype=torch.float32, device=device, config=config
    )
    score = partial(_by_transformers, hf_model, device=device)
    layers = f"its first {len(blocks(hf_model))} layers"
    plain = []
    limits = []
    for rows in draws:
        plain.append([score(row) for row in rows])
        noise = worst(plain[-1], [score(row) for row in first_halves(rows)])
        limits.append(allowed_gap(noise, plain[-1], dtype=torch.float32))
    found = []
    if released is not None:
        fault = (
            "the weights that are loaded here are not those that transformers' own from_pretrained "
            f"loads, by the logprobs of {layers}: save the model again by transformers "
            "(from_pretrained, save_pretrained) and train that folder"
        )
        found.append(_least_gap("loaded_gap", plain, released, limits=limits, fault=fault))
    # Last, since it sets the model's attention.
    packed = [_packed(hf_model, rows, device=device) for rows in draws]
    fault = (
        f"packed rows of {type(hf_model).__name__} disagree with transformers' own forward pass in "
        f"the logprobs of {layers}: its attention is not computed right, and it cannot be trained "
        "here"
    )
    found.append(_least_gap("plain_gap", packed, plain, limits=limits, fault=fault))
    return found


def _least_gap(
    name: str,
    ours: Sequence[Sequence[Tensor]],
    theirs: Sequence[Sequence[Tensor]],
    *,
    limits: Sequence[float],
    fault: str,
) -> _Gap:
    """Return the gap of the draw of tokens in which it exceeds its limit least.

    Args:
        ours, theirs: per draw, the scores of its sequences.
    """
    gaps = []
    for own, other, limit in zip(ours, theirs, limits, strict=True):
        gaps.append(_Gap(name, worst(own, other), limit, fault))
    # A NaN is larger than any number.
    return min(gaps, key=lambda gap: (math.isnan(gap.value), gap.value - gap.limit))


def _scored_as_released(
    model: ModelSettings,
    config: Any,
    draws: list[list[TokenIds]],
    *,
    attention: str | None,
    device: torch.device,
) -> list[list[Tensor]] | None:
    """Return the logprobs of plain transformers, per draw, with weights loaded by its own
    from_pretrained; None if that loads the folder in another form, or cannot load it.

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
    found = []
    for rows in draws:
        found.append([_by_transformers(hf_model, row, device=device) for row in rows])
    return found


@torch.no_grad()
def _by_transformers(hf_model: nn.Module, row: TokenIds, *, device: torch.device) -> Tensor:
    tokens = torch.tensor(row, device=device)
    given = image_inputs(hf_model, row, device)
    logits = hf_model(input_ids=tokens[None], use_cache=False, **given).logits[0, :-1].float()
    own = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([own.new_zeros(1), own]).cpu()


@torch.no_grad()
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
