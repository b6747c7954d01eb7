"""The jobs of a proof. Each runs parts of the program on ranks and returns measurements.

Differences of logprobs are mean and largest value over tokens, in nats. Differences of parameters
after two updates are the largest of all elements, relative to the largest change by the updates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.checkpoint import Checkpointer
from spmdrl.config import Config
from spmdrl.credit import per_token
from spmdrl.engine import make_engine
from spmdrl.engine.protocol import Completion, EngineProtocol, Request
from spmdrl.model.transformers_internals import class_of
from spmdrl.model.vision.noise_images import image_inputs, num_text_ids, with_noise_image
from spmdrl.model_inputs import TokenIds, concat_ids
from spmdrl.roles import make_trainer
from spmdrl.sync.stream import WeightStream
from spmdrl.tools.export.hf_folder import Ranks, write_folder
from spmdrl.types import Batch, Microbatch, Scalars
from spmdrl.world.world import World

ROWS = (5, 70, 33, 2, 9, 40)
"""Lengths of the sequences to score: some are longer than every window and chunk of a small model,
and a packed row has several of them."""
PACKED = 128  # tokens of a packed row
_TRAINED = (9, 5, 30, 12, 7, 2, 24, 11)
"""Lengths of the sequences to train on; the first third of each is its prompt."""
_FIRST = 3  # smaller ids are those of padding, beginning and end


def _rows(trainer: Any) -> list[TokenIds]:
    """Return the sequences to score."""
    hf_model = trainer.policy.model.hf_model
    return with_images(hf_model, random_rows(num_text_ids(hf_model)))


def with_images(hf_model: nn.Module, rows: Iterable[Sequence[int]]) -> list[TokenIds]:
    """Return the rows; for a vision model, with a noise image in each that has room for one."""
    return [with_noise_image(hf_model, row, seed=at) for at, row in enumerate(rows)]


def random_rows(vocabulary: int) -> list[list[int]]:
    """Return the random ids of the sequences to score, the same in each call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(_FIRST, vocabulary, (n,), generator=generator).tolist() for n in ROWS]


def batch_of(world: Any, hf_model: nn.Module) -> tuple[Batch, Tensor]:
    """Return this rank's part of a batch, and each sequence's advantage [S] float64.

    The batch is the same on every layout. A dp rank gets every dp_size-th sequence.
    """
    count = len(_TRAINED)
    own = list(range(world.dp_index(world.rank), count, world.dp_size))
    half = -(-len(own) // 2)
    rows = with_images(hf_model, (_sequence(i, num_text_ids(hf_model)) for i in range(count)))
    parts = tuple(_microbatch(part, rows) for part in (own[:half], own[half:]))
    advantages = torch.linspace(-1.0, 1.5, count).double()
    ids = torch.zeros(count, dtype=torch.int64)
    return Batch(scalars=scalars_of(_TRAINED), updates=(parts,), update_ids=ids), advantages


def scalars_of(lengths: Sequence[int]) -> Scalars:
    """Return the scalars of sequences in groups of two: one is not valid, one is truncated.

    The first third of each sequence is its prompt.
    """
    ids = torch.arange(len(lengths))
    own = torch.tensor(lengths)
    return Scalars(
        lengths=own,
        response_lengths=own - (own + 2) // 3,
        group_ids=ids // 2,
        sample_ids=ids % 2,
        rewards=torch.zeros(len(ids)).double(),
        is_truncated=ids == 6,
        is_valid=ids != 4,
        min_versions=torch.zeros_like(ids),
    )


def _microbatch(ids: list[int], rows: list[TokenIds]) -> Microbatch:
    lengths = torch.tensor([_TRAINED[i] for i in ids])
    mask = torch.cat([torch.arange(n) >= (n + 2) // 3 for n in lengths])
    drawn = [-3 - torch.rand(_TRAINED[i], generator=_generator(i)) for i in ids]
    batch_ids = concat_ids([rows[i] for i in ids])
    return Microbatch(
        tokens=torch.tensor(batch_ids),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        response_mask=mask,
        rollout_logprobs=torch.where(mask, torch.cat(drawn), 0.0),
        policy_versions=torch.where(mask, 0, -1),
        sequence_ids=torch.tensor(ids),
        extra_columns=batch_ids.extra_columns,
    )


def _sequence(index: int, vocabulary: int) -> list[int]:
    count = (_TRAINED[index],)
    generator = _generator(index)
    return torch.randint(_FIRST, vocabulary, count, generator=generator).tolist()


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + index)


Measurements = dict[str, Any]
UPDATES = 2
_SAMPLED = 12  # tokens of each response that engines draw


class NoSource:
    """A source without state, for a checkpoint."""

    def state_dict(self) -> None:
        """Return None."""

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Do nothing."""

    def start(self, step: int) -> None:
        """Do nothing."""


def single_rank(cfg: Config, export_to: str, reference: str) -> Measurements:
    """Compare one rank with plain transformers, train it, save and export.

    Args:
        export_to: new folder for the trained weights.
        reference: file to which the parameters before and after the updates are saved.
    """
    world = World.start(cfg)
    trainer: Any = make_trainer(cfg, world)
    rows = _rows(trainer)
    plain = _plain(cfg.model.path)
    packed = trainer.weights.score(rows)
    expected = [_plain_logprobs(plain, row).detach() for row in rows]
    measured = {
        "packed": gap(packed, expected),
        "single": gap(_score_one_by_one(trainer, rows), expected),
        "gradients": _gradient_gap(trainer, plain, rows),
    }
    before = _full_parameters(trainer)
    saver = Checkpointer(cfg, world)
    for step in range(UPDATES):
        _update(trainer, step)
        saver.maybe_save(step + 1, trainer, NoSource())
    torch.save((before, _full_parameters(trainer)), reference)
    measured["export"] = _export_gap(trainer, cfg, export_to)
    world.close()
    return measured


def mesh(cfg: Config, reference: str) -> Measurements:
    """Compare two updates on a layout with those of one rank.

    If the config resumes a checkpoint of another layout, only the remaining updates are taken.
    """
    world = World.start(cfg)
    trainer: Any = make_trainer(cfg, world)
    state = Checkpointer(cfg, world).restore(trainer, NoSource())
    for step in range(state.step, UPDATES):
        _update(trainer, step)
    measured = {"parameters": _parameter_gap(trainer, reference), "step": state.step}
    world.close()
    return measured


def adapters(cfg: Config, export_to: str) -> Measurements:
    """Train adapters, and compare their logprobs with those of the export with merged adapters."""
    world = World.start(cfg)
    trainer: Any = make_trainer(cfg, world)
    rows = _rows(trainer)
    plain = _plain(cfg.model.path)
    expected = [_plain_logprobs(plain, row).detach() for row in rows]
    first = trainer.weights.score(rows)
    saver = Checkpointer(cfg, world)
    for step in range(UPDATES):
        _update(trainer, step)
        saver.maybe_save(step + 1, trainer, NoSource())
    measured = {
        "before": gap(first, expected),
        "moved": gap(trainer.weights.score(rows), first),
        "export": _export_gap(trainer, cfg, export_to),
    }
    world.close()
    return measured


def engine(cfg: Config) -> Measurements:
    """Push weights into an engine, train, push again; compare engine and trainer each time."""
    warnings = _Warnings()
    world = World.start(cfg)
    generator = make_engine(cfg, world)
    trainer: Any = make_trainer(cfg, world)
    rows = _rows(trainer)
    measured: Measurements = {"loaded": gap(generator.score(rows), trainer.weights.score(rows))}
    stream = WeightStream(trainer.weights, generator, world)
    measured |= {
        "mode": stream.mode,
        "why": [line for line in warnings.lines if "falling back" in line],
    }
    stream.push(version=0)
    first = generator.score(rows)
    measured["before"] = gap(first, trainer.weights.score(rows))
    for step in range(UPDATES):
        stream.lend_memory()
        _update(trainer, step)
        stream.push(version=step + 1)
    stream.verify(UPDATES)
    last = generator.score(rows)
    measured |= {"after": gap(last, trainer.weights.score(rows)), "moved": gap(last, first)}
    measured["sampled"] = _sampled_gap(generator, trainer, rows)
    if cfg.engine.dtype == "bfloat16":
        measured["rounding"] = _rounding(cfg.model.path, rows)
    generator.close()
    world.close()
    return measured


class _Warnings(logging.Handler):
    """Collects the warnings of this program."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("spmdrl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store a line."""
        self.lines.append(record.getMessage())


def gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float]:
    """Return mean and largest absolute difference of logprobs, without each sequence's first."""
    differences = [
        (a[1:].double() - b[1:].double()).abs() for a, b in zip(ours, theirs, strict=True)
    ]
    flat = torch.cat(differences)
    return float(flat.mean()), float(flat.max())


def _update(trainer: Any, step: int) -> None:
    world = trainer.world
    own, advantages = batch_of(world, trainer.policy.model.hf_model)
    own = trainer.annotate(own, step=step)
    trainer.update(own, per_token(own, advantages), step=step)


def _plain(folder: str) -> nn.Module:
    from transformers import AutoConfig

    return (
        class_of(AutoConfig.from_pretrained(folder))
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def _rounding(folder: str, rows: list[TokenIds]) -> float:
    """Return the mean difference between plain transformers in bfloat16 and in float32."""
    plain = _plain(folder)
    with torch.no_grad():
        exact = [_plain_logprobs(plain, row) for row in rows]
        plain.bfloat16()
        return gap([_plain_logprobs(plain, row) for row in rows], exact)[0]


def _plain_logprobs(model: nn.Module, row: Sequence[int]) -> Tensor:
    """Return [len] float64 logprobs of a plain model; the first is 0."""
    tokens = torch.tensor(row)
    images = image_inputs(model, row, tokens.device)
    logits = model(input_ids=tokens[None], use_cache=False, **images).logits[0].double()
    logprobs = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return nn.functional.pad(logprobs, (1, 0))


def _gradient_gap(trainer: Any, plain: nn.Module, rows: list[TokenIds]) -> Measurements:
    """Compare the gradients of a sum of logprobs with those of plain transformers.

    Returns: `gap`, the largest difference, relative to the largest element of its tensor; `tensor`,
        its name; `tensors`, their number.
    """
    model = trainer.policy.model
    lengths = [len(row) for row in rows]
    ids = concat_ids(rows)
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    signs = torch.cos(torch.arange(int(mask.sum())).double())
    row = model.row(torch.tensor(ids), lengths, mask=mask, columns=ids.extra_columns)
    logprobs, _ = model.forward(row)
    (logprobs.double() * signs).sum().backward()
    expected = torch.cat([_plain_logprobs(plain, row)[1:] for row in rows])
    (expected * signs).sum().backward()
    theirs = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in theirs.values())
    worst: tuple[float, str] = (0.0, "")
    for name, shard in model.named_shards().items():
        if name in theirs:
            own = _full(shard.grad)
            grad = theirs[name]
            scale = max(float(grad.abs().max()), 1e-3 * largest)
            worst = max(worst, (float((own - grad).abs().max()) / scale, name))
    for shard in model.named_shards().values():
        shard.grad = None
    return {"gap": worst[0], "tensor": worst[1], "tensors": len(theirs)}


def _full(tensor: Any) -> Tensor:
    if tensor is None:
        raise RuntimeError("a parameter that transformers trains gets no gradient")
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _full_parameters(trainer: Any) -> dict[str, Tensor]:
    shards: Mapping[str, Tensor] = trainer.weights.shards()
    return {name: _full(tensor).detach().clone() for name, tensor in shards.items()}


def _parameter_gap(trainer: Any, reference: str) -> float:
    before, after = torch.load(reference)
    own = _full_parameters(trainer)
    if own.keys() != after.keys():
        raise RuntimeError(f"different tensors: {sorted(own.keys() ^ after.keys())}")
    change = max(float((after[n] - before[n]).abs().max()) for n in after if after[n].numel())
    difference = max(float((own[n] - after[n]).abs().max()) for n in after if after[n].numel())
    return difference / change


def _export_gap(trainer: Any, cfg: Config, export_to: str) -> tuple[float, float]:
    """Export the last checkpoint and compare plain transformers with the trainer."""
    checkpoint = Path(cfg.output_dir) / "checkpoints" / f"step_{UPDATES}"
    out = Path(export_to)
    out.mkdir(parents=True)
    write_folder(
        checkpoint, out, model=cfg.model, dtype="float32", max_file_bytes=2**30, ranks=Ranks()
    )
    rows = _rows(trainer)
    plain = _plain(export_to)
    with torch.no_grad():
        expected = [_plain_logprobs(plain, row) for row in rows]
    # Score one at a time: another line tests packing.
    return gap(_score_one_by_one(trainer, rows), expected)


def _score_one_by_one(trainer: Any, rows: list[TokenIds]) -> list[Tensor]:
    return [trainer.weights.score([row])[0] for row in rows]


def _sampled_gap(
    generator: EngineProtocol, trainer: Any, rows: list[TokenIds]
) -> tuple[float, float]:
    """Sample responses, several at once, and compare their logprobs with the trainer's."""
    prompts = {str(i): row for i, row in enumerate(rows)}
    for key, prompt in prompts.items():
        generator.add(Request(key, prompt, _SAMPLED, 1.0, int(key), stop_token_ids=()))
    drawn: list[Completion] = []
    while len(drawn) < len(prompts):
        drawn += generator.step()
    scored = trainer.weights.score([prompts[one.key] + one.tokens.tolist() for one in drawn])
    # `gap` skips the first element, so prepend one.
    ours = [nn.functional.pad(one.logprobs.float(), (1, 0)) for one in drawn]
    theirs = [nn.functional.pad(s[-len(d.tokens) :], (1, 0)) for s, d in zip(scored, drawn)]
    return gap(ours, theirs)
