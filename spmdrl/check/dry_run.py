"""What a config amounts to, before anything is started: `train.py --config X --dry-run`."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from spmdrl import config
from spmdrl.config import Config, inference_ranks, trainer_ranks
from spmdrl.config.fields import least_tokens, replay_folder, useful_tokens
from spmdrl.data.rows import ground_truth_of, read_rows
from spmdrl.data.tasks import is_generated, make_task
from spmdrl.rewards.signatures import reward_models
from spmdrl.workers.environment_jobs import check_environment

_TRL_GIVEN = {"prompts", "completions", "completion_ids", "log_metric", "log_extra"}
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def show(cfg: Config) -> int:
    """Print resolved config, derived sizes, mesh map and stream size; return the exit status.

    Needs the model's config.json, no weights, no launcher and no second process. Data and reward
    functions are opened as far as that is quick: the first row, the import.
    """
    print(config.dump(cfg))
    for title, pairs in (("derived", derived(cfg)), ("mesh", mesh_map(cfg))):
        print(f"{title}:")
        for name, value in pairs.items():
            print(f"  {name:<28} {value}")
    found = list(problems(cfg))
    for spec, size in reward_model_sizes(cfg).items():
        print(f"reward {spec}: {size}")
    try:
        if cfg.model.lora:
            print(f"lora: {adapter_size(cfg)}")
        print("stream:", *(f"  {k:<28} {v}" for k, v in stream_size(cfg).items()), sep="\n")
    except ValueError as error:
        found.insert(0, str(error))
    sys.stdout.flush()
    for problem in dict.fromkeys(found):
        print(f"problem: {problem}", file=sys.stderr)
    return 2 if found else 0


# --------------------------------------------------------------------------- what would fail


def problems(cfg: Config) -> Iterator[str]:
    """Yield what a run would stumble over at its start: data, tokenizer, reward functions."""
    from spmdrl.check.fit import fit_problems
    from spmdrl.data.prompts import load_tokenizer

    yield from fit_problems(cfg)
    if replay_folder(cfg):
        yield from _replay_problems(cfg)
        return
    rows = {}
    for field, spec in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        try:
            rows[field] = _first_row(cfg, spec) if spec else None
        except ValueError as error:
            yield f"{field}: {error}"
    try:
        load_tokenizer(cfg)
    except ValueError as error:
        yield str(error)
    if cfg.rollout.environment and rows.get("data.train"):
        try:
            check_environment(cfg.rollout.environment, rows["data.train"])
        except ValueError as error:
            yield str(error)
    for spec in cfg.rewards.functions if cfg.objective.samples else ():
        try:
            _check_reward(spec, rows.get("data.train"), cfg=cfg)
        except (ValueError, SystemExit) as error:  # a module of the user's may exit
            yield str(error) or f"rewards.functions: importing {spec!r} exits"


def _replay_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with recorded rollouts: of data and rewards they need nothing else."""
    from spmdrl.data.prompts import load_tokenizer
    from spmdrl.rollout.replay_source import check_recorded

    for check in (check_recorded, load_tokenizer):
        try:
            check(cfg)
        except ValueError as error:
            yield str(error)


def _first_row(cfg: Config, spec: str) -> dict | None:
    """Return the first row; None of a hub dataset, which would have to be fetched."""
    if is_generated(spec):
        task = make_task(spec, cfg.data.task_options, size=max(1, cfg.data.size))
        return task.row(cfg.seed, 0, split="train")
    from spmdrl.data.examples import row_kind

    is_file = Path(spec).suffix in (".jsonl", ".json", ".parquet")
    if not is_file and importlib.util.find_spec("datasets"):
        return None
    return read_rows(spec, size=1, need=row_kind(cfg))[0]


def _check_reward(spec: str, row: dict | None, *, cfg: Config) -> None:
    """Raises: ValueError when a function or model cannot be used, or asks for what a row does
    not have."""
    from spmdrl.rewards.signatures import import_function, load_reward

    if is_generated(spec):
        return  # made with the first row of data.train
    for path in reward_models([spec]).values():
        return _check_reward_model(path, cfg=cfg)
    load_reward(spec)
    parameters = inspect.signature(import_function(spec)).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = {p.name for p in named if p.default is p.empty}
    if row is None:
        return
    if "ground_truth" in required and "solution_str" in {p.name for p in named}:
        try:
            ground_truth_of(row)
        except ValueError as error:
            raise ValueError(
                f"rewards.functions: {spec} asks for ground_truth, and in the first "
                f"row of data.train {error}"
            ) from None
    elif "completions" in {p.name for p in named}:
        absent = required - set(row) - _TRL_GIVEN
        if absent:
            raise ValueError(
                f"rewards.functions: {spec} asks for {', '.join(sorted(absent))}; the "
                f"first row of data.train has {', '.join(map(str, row))}"
            )


def _check_reward_model(path: str, *, cfg: Config) -> None:
    from spmdrl.train.companions.model_rewards import check_reward_model

    folder = Path(path)  # the files of a hub model would have to be fetched
    try:
        check_reward_model(cfg, path, folder=folder if folder.is_dir() else None)
    except ValueError as error:
        raise ValueError(f"rewards.functions: model:{path} cannot be a reward: {error}") from None


# --------------------------------------------------------------------------- what follows


def derived(cfg: Config, *, tokens: int = 0) -> dict[str, str]:
    """Return the arithmetic that follows from a config, as {name: text with its formula}.

    Args:
        tokens: of a micro-batch, if the config leaves them open and they are known.
    """
    batch, trainers, engines = cfg.batch, trainer_ranks(cfg), inference_ranks(cfg)
    dp = len(trainers) // (cfg.layout.cp * cfg.layout.tp)
    is_rl = cfg.objective.samples
    group = batch.group_size if is_rl else 2 if cfg.objective.trains_on_pairs else 1
    sequences = batch.prompts_per_step * group
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
    pairs = {
        "sequences per step": f"{batch.prompts_per_step} {'prompts' if is_rl else 'rows'} * "
        f"{group} = {sequences}",
        "optimizer steps per step": f"{batch.updates_per_step}, of about "
        f"{sequences / batch.updates_per_step:.0f} sequences",
        "tokens per step": f"at most {sequences} * {longest} = {sequences * longest:,}",
        "sequences per dp rank": _share(sequences, dp),
        "micro-batches per dp rank": _microbatches(
            sequences, longest, dp=dp, cfg=cfg, found=tokens
        ),
    }
    if engines:
        pairs["steps of generation ahead"] = f"{cfg.lag}"
        replicas = len(engines) // cfg.layout.inference_tp
        pairs["prompts per engine replica"] = _share(batch.prompts_per_step, replicas)
        rounds = -(-sequences // (replicas * cfg.engine.max_num_seqs))
        pairs["engine rounds per step"] = (
            f"{rounds}: {sequences / replicas:.0f} sequences, {cfg.engine.max_num_seqs} at a time"
        )
    return pairs


def _share(total: int, parts: int) -> str:
    about = "" if total % parts == 0 else "about "
    return f"{total} / {parts} = {about}{total / parts:.0f}"


def _microbatches(sequences: int, longest: int, *, dp: int, cfg: Config, found: int) -> str:
    budget = cfg.batch.tokens_per_microbatch
    updates = cfg.batch.updates_per_step
    if not (budget or found):
        return (
            f"auto: of {least_tokens(cfg)} to {useful_tokens(cfg)} tokens, as many as fit; "
            "found at start (python -m spmdrl plan estimates it)"
        )
    most = max(1, -(-int(sequences * longest / dp / updates) // (budget or found)))
    return (
        f"at most about {most} of {budget or found} tokens"
        + ("" if budget else ", as found")
        + (f", for each of {updates} updates" if updates > 1 else "")
    )


def mesh_map(cfg: Config) -> dict[str, str]:
    """Return {rank: its coordinates in each role}."""
    from spmdrl.world.mesh import MESH_AXES, mesh_shape

    shape = mesh_shape(cfg)
    at = list(itertools.product(*map(range, shape)))  # of each trainer, in order
    engines, pairs = inference_ranks(cfg), {}
    pairs["trainer mesh"] = " x ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape))
    itp = cfg.layout.inference_tp
    pairs["inference mesh"] = f"replica {len(engines) // itp} x tp {itp}" if engines else "none"
    for rank in range(cfg.layout.world_size):
        roles = []
        if rank in trainer_ranks(cfg):
            roles.append("trains    " + " ".join(f"{a}={i}" for a, i in zip(MESH_AXES, at[rank])))
        if rank in engines:
            i = engines.index(rank)
            roles.append(f"generates replica={i // itp} tp={i % itp}")
        pairs[f"rank {rank}"] = "; ".join(roles)
    return pairs


def reward_model_sizes(cfg: Config) -> dict[str, str]:
    """Return what each reward model that can be built amounts to, by its rewards.functions."""
    models = reward_models(cfg.rewards.functions) if cfg.objective.samples else {}
    if not models:
        return {}
    from spmdrl.model.load import build_meta_model

    sizes, trainers = {}, len(trainer_ranks(cfg))
    item = _DTYPE_BYTES[cfg.model.compute_dtype]
    for path in models.values():
        with contextlib.suppress(ValueError):  # `problems` says it
            model = build_meta_model(replace(cfg.model, path=path), is_scalar=True)
            count = sum(p.numel() for p in model.parameters())
            sizes[f"model:{path}"] = (
                f"{count:,} parameters, scored with on the trainers, about "
                f"{count * item // trainers:,} bytes on each"
            )
    return sizes


def adapter_size(cfg: Config) -> str:
    """Return what model.lora amounts to.

    Raises: ValueError when its targets match nothing, or its path holds no adapter.
    """
    from spmdrl.model.load import build_meta_model
    from spmdrl.model.lora.layers import Adapters, lora_form

    model = build_meta_model(cfg.model, is_scalar=cfg.objective.is_scalar)
    total = sum(p.numel() for p in model.parameters())
    adapters = Adapters(model, lora_form(cfg.model.lora))
    count = sum(model.get_parameter(name).numel() for name in adapters.names)
    return f"{adapters.summary()}, {count:,} parameters beside the model's {total:,}"


def stream_size(cfg: Config) -> dict[str, str]:
    """Return what one push of the weights amounts to.

    Raises: ValueError when the model folder cannot be read.
    """
    from spmdrl.model.load import build_meta_model, checkpoint_shapes
    from spmdrl.model.lora.layers import sent_adapter

    shapes = checkpoint_shapes(cfg)
    count = sum(shape.numel() for shape in shapes.values())
    pairs = {"parameters": f"{count:,} in {len(shapes)} tensors"}
    engines = inference_ranks(cfg)
    if engines:
        item = _DTYPE_BYTES[cfg.engine.dtype]
        tp = cfg.layout.inference_tp
        buckets = max(1, -(-count * item // tp // cfg.stream.bucket_bytes))
        pairs["bytes per push"] = (
            f"{count:,} * {item} = {count * item:,} out of the trainers, "
            f"about {count * item // tp:,} into each engine rank"
        )
        if sent := sent_adapter(build_meta_model(cfg.model), cfg.model.lora):
            matrices = sum(math.prod(shape) for shape in sent.shapes.values())
            pairs["bytes per later push"] = (
                f"{matrices:,} * {item} = {matrices * item:,} for each whole engine: adapters alone"
            )
        pairs["buckets"] = (
            f"about {buckets} of {cfg.stream.bucket_bytes:,} bytes"
            if buckets > 1
            else f"1 (they may hold {cfg.stream.bucket_bytes:,} bytes)"
        )
    return pairs
