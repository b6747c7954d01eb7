"""Sizes and problems of a config, before anything is started: `train.py --config X --dry-run`."""

from __future__ import annotations

import itertools
import math
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from spmdrl import config
from spmdrl.check.fit import absent_weights, build_policy, fit_problems, refusal, weight_problems
from spmdrl.check.inputs import input_problems
from spmdrl.check.methods import FunctionsAccepted
from spmdrl.check.prefixes import sharing_of
from spmdrl.check.proved_models import unchecked_policy
from spmdrl.check.settings import missing_models
from spmdrl.config import Config, inference_ranks, trainer_ranks
from spmdrl.data.prefix_tree import LEAST
from spmdrl.errors import RAISED, Refusal, say, with_line
from spmdrl.model.load import build_meta_model, checkpoint_shapes
from spmdrl.model.lora.layers import Adapters, lora_form, sent_adapter
from spmdrl.model.model_shape import with_known_shape
from spmdrl.report.config_sizes import config_sizes
from spmdrl.rewards.signatures import reward_models
from spmdrl.sync.buckets import LARGEST
from spmdrl.sync.change_choice import why_not
from spmdrl.world.axes import axes_of
from spmdrl.world.folder_lock import folder_problems
from spmdrl.world.machine.gpus import check_driver
from spmdrl.world.machine.hardware import CPU_LINK
from spmdrl.world.mesh import MESH_AXES, mesh_shape
from spmdrl.world.world import device_problem, pick_backend

_FEW_RANKS = 8


def show(cfg: Config, train: Callable[..., int] | None = None) -> int:
    """Print derived sizes, mesh and stream size, then the problems.

    Needs the model's config.json, and no weights, no launcher and no other rank.

    Args:
        train: the function of train.py, whose loss and advantage are tried.
    Returns: exit status: 2 for a problem; 3 if a run would stop only on this machine, because it
        has no GPU or no weights; else 0.
    """
    is_full = cfg.dry_run == "full"
    # A missing folder of the policy may have a known shape, see `with_known_shape`.
    found = missing_models(cfg, but_policy=True)
    # Before the handler of SIGPIPE below, which lets a broken pipe to a worker end this process.
    found += problems(cfg)
    if train is not None:
        found += _train_py_problems(cfg, train)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends without a message
    try:
        if is_full:
            say(config.dump(cfg))
        _print_section("derived", config_sizes(cfg))
        _print_section("mesh", mesh_map(cfg, shows_all=is_full))
        models = reward_models(cfg.rewards.functions) if cfg.objective.samples else {}
        # Refusals of these are dropped: `problems` names their causes, or `unbuilt` does.
        for path in models.values():
            refusal(lambda: say(f"reward model:{path}: {reward_model_size(cfg, path)}"))
        refusal(lambda: _print_adapter(cfg))
        refusal(lambda: _print_unchecked(cfg))
        refusal(lambda: say(f"prefixes: {shared_prefixes(with_known_shape(cfg))}"))
        unbuilt = refusal(lambda: _print_section("stream", stream_size(with_known_shape(cfg))))
        sys.stdout.flush()
        found = list(dict.fromkeys([*unbuilt, *found]))
        for problem in found:
            say(f"problem: {problem}", file=sys.stderr)
        lacks = [lack for lack in (absent_weights(cfg), device_problem(cfg)) if lack]
        for lack in lacks:
            say(f"here the run would stop: {lack}", file=sys.stderr)
        last = f"{len(found) or 'no'} problem{'s' * (len(found) != 1)}"
        if lacks and not found:
            last += " but for this machine"
        if not is_full:
            last += " (the whole config, every rank: --dry-run full)"
        say(last, file=sys.stderr if found or lacks else sys.stdout, flush=True)
    finally:
        signal.signal(signal.SIGPIPE, before)
    if found:
        return 2
    return 3 if lacks else 0


def _train_py_problems(cfg: Config, train: Callable[..., int]) -> list[str]:
    """Return what is wrong with the loss and the advantage that train.py uses.

    An edited train.py may use functions that the config does not name. So its `train` is run: it
    calls `try_functions`, which ends a dry run by raising FunctionsAccepted.
    """
    try:
        train(cfg, None)
    except FunctionsAccepted:
        return []
    except Refusal as error:
        return [str(error)]
    except RAISED as error:  # an edited train.py may need a world first; then only a run tries them
        say(f"loss and advantage of train.py are not tried here: {with_line(error)}")
        return []
    raise AssertionError("train() of train.py did not call try_functions")


def _print_section(title: str, pairs: dict[str, str]) -> None:
    lines = [f"{title}:", *(f"  {name:<28} {value}" for name, value in pairs.items())]
    say("\n".join(lines))


def _print_adapter(cfg: Config) -> None:
    """Raises: Refusal when targets match nothing, or a path holds no adapter."""
    if not cfg.model.lora.is_on:
        return
    model = build_policy(cfg)
    total = sum(p.numel() for p in model.parameters())
    adapters = Adapters(model, lora_form(cfg.model.lora))
    count = sum(model.get_parameter(name).numel() for name in adapters.names)
    say(f"lora: {adapters.summary()}, {count:,} parameters beside the model's {total:,}")


def _print_unchecked(cfg: Config) -> None:
    """Print that the policy's code was never proved with the installed versions, if so."""
    if reason := unchecked_policy(cfg):
        say(f"model: {reason}")


def shared_prefixes(cfg: Config) -> str:
    """Return whether prefixes that sequences have in common are computed once, for people.

    Raises: Refusal when the policy cannot be built, or a method is unknown.
    """
    if cfg.batch.share_prefixes == "never":
        return "each sequence is computed whole (batch.share_prefixes never)"
    found = sharing_of(cfg, build_policy(cfg))
    models = ", ".join(found.able)
    if found.unable:
        others = f"; others could share: {models}" if found.able else ""
        return f"each sequence is computed whole: {found.reason}{others}"
    text = f"those of {LEAST} tokens or more that sequences share are computed once"
    count = cfg.sequences_per_row
    prompt = cfg.data.max_prompt_tokens
    if count > 1 and prompt >= LEAST:
        whole = count * cfg.longest_sequence
        computed = whole - (count - 1) * prompt
        kind = "group" if cfg.objective.samples else "pair"
        text += f"; of a {kind} of the longest sequences {computed} of {whole} tokens"
    return f"{text}; by all models: {models}" if len(found.able) > 1 else text


def problems(cfg: Config) -> Iterator[str]:
    """Yield what a run would refuse at its start."""
    yield from folder_problems(Path(cfg.output_dir))
    yield from refusal(lambda: check_driver(cfg))
    yield from fit_problems(cfg)
    yield from weight_problems(cfg)
    yield from input_problems(cfg)


def mesh_map(cfg: Config, *, shows_all: bool = True) -> dict[str, str]:
    """Return the two meshes, and {rank: its coordinates in each role}, of few ranks or of all."""
    axes = axes_of(cfg)
    trainers = trainer_ranks(cfg)
    engines = inference_ranks(cfg)
    shape = mesh_shape(cfg)
    tp = axes.inference_tp
    dp = axes.inference_dp
    at = list(itertools.product(*map(range, shape)))  # of each trainer, in order
    parts = f" x dp {dp}" if dp > 1 else ""
    pairs = {
        "trainer mesh": " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape)),
        "inference mesh": f"replica {axes.replicas}{parts} x tp {tp}" if engines else "none",
    }
    for rank in range(axes.world_size) if shows_all or axes.world_size <= _FEW_RANKS else ():
        roles = []
        if rank in trainers:
            roles.append("trains    " + " ".join(f"{a}={i}" for a, i in zip(MESH_AXES, at[rank])))
        if rank in engines:
            i = engines.index(rank)
            part = f" dp={i // tp % dp}" if dp > 1 else ""
            roles.append(f"generates replica={i // (dp * tp)}{part} tp={i % tp}")
        pairs[f"rank {rank}"] = "; ".join(roles)
    return pairs


def reward_model_size(cfg: Config, path: str) -> str:
    """Return the size of a reward model, for people.

    Raises: Refusal when it cannot be built.
    """
    model = build_meta_model(replace(cfg.model, path=path), is_scalar=True)
    count = sum(p.numel() for p in model.parameters())
    item = getattr(torch, cfg.model.compute_dtype).itemsize
    return (
        f"{count:,} parameters, scored with on the trainers, about "
        f"{count * item // axes_of(cfg).trainers:,} bytes on each"
    )


def stream_size(cfg: Config) -> dict[str, str]:
    """Return the sizes of one push of the weights, for people.

    Raises: Refusal when the model folder cannot be read.
    """
    shapes = checkpoint_shapes(cfg)
    count = sum(shape.numel() for shape in shapes.values())
    pairs = {"parameters": f"{count:,} in {len(shapes)} tensors"}
    if not inference_ranks(cfg):
        return pairs
    item = getattr(torch, cfg.engine.dtype).itemsize
    experts = sum(shape.numel() for name, shape in shapes.items() if ".experts." in name)
    into_each = (count - experts + experts // cfg.layout.inference_dp) * item
    into_each //= cfg.layout.inference_tp
    pairs["bytes per push"] = (
        f"{count:,} * {item} = {count * item:,} out of the trainers, "
        f"about {into_each:,} into each engine rank"
    )
    if sent := sent_adapter(build_meta_model(cfg.model), cfg.model.lora):
        matrices = sum(math.prod(shape) for shape in sent.shapes.values())
        pairs["bytes per later push"] = (
            f"{matrices:,} * {item} = {matrices * item:,} for each whole engine: adapters alone"
        )
    most = cfg.stream.bucket_bytes
    if not most:
        buckets = f"chosen from bytes, ranks and links, up to {LARGEST:,} bytes each"
    elif into_each > most:
        buckets = f"about {-(-into_each // most)} of {most:,} bytes"
    else:
        buckets = f"1 (they may hold {most:,} bytes)"
    pairs["later pushes"] = _later_pushes(cfg, into_each)
    return pairs | {"buckets": buckets}


def _later_pushes(cfg: Config, into_each: int) -> str:
    """Return whether pushes after the first send everything, or what changed, for people."""
    everything = "everything, as the first"
    if cfg.layout.roles.shares_devices:
        return f"{everything}: engines drop their weights while they sleep"
    if cfg.stream.mode == "reload":
        return f"{everything}: stream.mode is reload"
    if cfg.model.lora.pushes_adapter:
        return "all adapters"
    against = why_not(
        cfg.stream,
        CPU_LINK.at(cfg.stream.gbit_per_s),  # used on CPUs alone
        busiest=into_each,
        itemsize=getattr(torch, cfg.engine.dtype).itemsize,
        is_on_gpu=pick_backend(cfg) == "nccl",
    )
    if against:
        return f"{everything}: {against}"
    every = f"every {cfg.stream.full_every} pushes" if cfg.stream.full_every else "never again"
    return f"what changed since the push before, everything {every}"
