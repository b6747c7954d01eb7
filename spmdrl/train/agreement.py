"""Whether a model computes packed sequences as single ones, and as plain transformers: the proof
at a run's start that its rows are right.

Three things are compared, of sequences of the lengths that the run will see: rows that hold several
with the same rows where every second sequence has other tokens (whatever else changes has leaked);
rows that hold several with rows of one; and, of the model's first layers in float32, on one rank,
packed rows with transformers' own forward pass over each sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spmdrl.config import Config
from spmdrl.given import Given, Shown, joined
from spmdrl.imports import attempt
from spmdrl.model.attention.kernels import register_attention
from spmdrl.model.attention.packing import packs
from spmdrl.model.attention.separation import separate
from spmdrl.model.blocks import blocks, experts_modules
from spmdrl.model.head import HeadOptions
from spmdrl.model.load import build_meta_model, hf_config_of, load_whole_model, longest_sequence
from spmdrl.model.parallel.row_slices import Slicing
from spmdrl.model.scorer import Scorer, make_row
from spmdrl.model.senses import noisy_sequence, plain_inputs, sight_of
from spmdrl.model.sharded import ShardedModel
from spmdrl.model.shrink import first_layers
from spmdrl.model.towers import set_attention, with_text_config
from spmdrl.types import Sums
from spmdrl.world.comm import agree
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_MOST_SEQUENCES = 8
_HEAD = 16
"""Tokens at a sequence's beginning that are compared by themselves: what leaks fades from there."""
_LIMITS = {torch.float32: 1e-4, torch.float64: 1e-4}
_LIMIT = 0.05
"""Nats by which two ways to compute the same may differ in the mean, in float32 and in 16 bits."""
_WORK = {"cpu": 2e12, "cuda": 5e14}
"""Multiplications that the comparison with plain transformers may take."""
_PLAIN_TOKENS = 4096
"""Of the longest sequence that plain transformers gets: some of its attention holds all scores."""


def lengths_of(longest: int) -> list[int]:
    """Return lengths from the longest sequence of a run down to 2 tokens, descending."""
    found = [longest]
    while len(found) < _MOST_SEQUENCES and found[-1] > 2:
        found.append(max(2, (found[-1] + 1) // 2))
    return found


def check_agreement(model: ShardedModel, cfg: Config, world: World) -> Sums:
    """Compare the ways to compute a model; trainer ranks call it together.

    Returns: proof/leak, proof/packed_gap and, on rank 0, proof/plain_gap: (largest mean over the
        first 16 tokens of a sequence, 1), in nats, or units of a scalar head.
    Raises: RuntimeError on all trainer ranks where two differ.
    """
    longest = longest_sequence(cfg)
    vocabulary = _vocabulary(model.hf_model)
    rows = with_shown(
        drawn(lengths_of(longest), vocabulary=vocabulary), model.hf_model, longest=longest
    )
    dtype = getattr(torch, cfg.model.compute_dtype)
    limit = _LIMITS.get(dtype, _LIMIT)
    packed = model.score(rows)
    others = with_shown(
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
        plain = _plain_gap(cfg, world) if world.rank == 0 and not cfg.objective.is_scalar else None
    found = {"proof/leak": (leak, 1.0), "proof/packed_gap": (single, 1.0)}
    return found if plain is None else found | {"proof/plain_gap": (plain, 1.0)}


def _refuse(gap: float, limit: float, cfg: Config, model: ShardedModel, *, what: str) -> None:
    """Raise a RuntimeError for a gap above the limit.

    Args:
        what: found; {} stands for what the model gives.
    """
    given = "values" if cfg.objective.is_scalar else "logprobs"
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


def with_shown(rows: list[list[int]], hf_model: nn.Module, *, longest: int) -> list[Given]:
    """Add a sequence that shows something, of a model that sees."""
    seen = noisy_sequence(hf_model, longest=longest)
    if seen is None:
        return [Given(row) for row in rows]
    return [*(Given(row, Shown.none(len(row))) for row in rows), seen]


def worst(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest mean difference over the first tokens of a sequence."""
    gaps = [(a - b)[: _HEAD + 1].abs().mean() for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(gaps).max())


def _plain_gap(cfg: Config, world: World) -> float | None:
    """Compare packed rows of the model's first layers, in float32, with plain transformers.

    Raises: RuntimeError where they differ.
    """
    model, device = cfg.model, world.device
    register_attention()
    whole = hf_config_of(model)
    small, _ = attempt(lambda: first_layers(whole.get_text_config()), Exception)
    # Else of a layout of layers that is not known.
    config = with_text_config(whole, small or whole.get_text_config())
    size = sum(p.numel() for p in build_meta_model(model, config=config).parameters())
    most = min(_PLAIN_TOKENS, int(_WORK[device.type] / (2 * size)) // 4)
    longest = min(most, longest_sequence(cfg))
    if longest < 2 * _HEAD and longest == most:
        log.warning("too large to compare with plain transformers: %d parameters in float32", size)
        return None
    hf_model = load_whole_model(
        model, attention=None, dtype=torch.float32, device=device, config=config
    )
    random = drawn(lengths_of(longest), vocabulary=_vocabulary(hf_model), seed=1)
    rows = with_shown(random, hf_model, longest=longest)
    with torch.no_grad():
        plain = [_by_transformers(hf_model, row, device=device) for row in rows]
        gap = worst(_packed(hf_model, rows, device=device), plain)
    if not gap <= (limit := _LIMITS[torch.float32]):
        raise RuntimeError(
            f"model.path {model.path}: packed rows of {type(hf_model).__name__} disagree with "
            f"transformers' own forward pass: logprobs of its first {len(blocks(hf_model))} "
            f"layers differ by {gap:.3g} nats on average over a sequence's first {_HEAD} tokens, "
            f"and {limit:g} is rounding; its attention is not computed right, and it cannot be "
            "trained here"
        )
    return gap


def _by_transformers(hf_model: nn.Module, row: Given, *, device: torch.device) -> Tensor:
    tokens, given = torch.tensor(row, device=device), plain_inputs(hf_model, row, device)
    logits = hf_model(input_ids=tokens[None], use_cache=False, **given).logits[0, :-1].float()
    own = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([own.new_zeros(1), own]).cpu()


def _packed(hf_model: nn.Module, rows: list[Given], *, device: torch.device) -> list[Tensor]:
    sight = sight_of(hf_model, device=device)
    slicing = Slicing(chunk=separate(hf_model).chunk, device=device, sight=sight)
    set_attention(hf_model, "spmdrl_padded")
    scorer = Scorer(hf_model, HeadOptions(1024))
    found: list[Tensor] = []
    for pack in packs(rows, len(rows[0])):
        lengths, given = [len(row) for row in pack], joined(pack)
        mask = torch.cat([torch.arange(n) > 0 for n in lengths])
        row = make_row(torch.tensor(given), lengths, mask=mask, slicing=slicing, shown=given.shown)
        found += row.spread(scorer(row)[0]).cpu().split(lengths)
    return found
