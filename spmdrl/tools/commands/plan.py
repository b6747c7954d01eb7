"""Find the layout of a number of GPUs that a run fits on, its speed and its needs.

    python -m spmdrl plan --config FILE --gpus 64

Exit status 1: it cannot run.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from spmdrl import config
from spmdrl.check.fit import policy_problems
from spmdrl.check.settings import validate
from spmdrl.config.read import read
from spmdrl.errors import Refusal, say
from spmdrl.model.load import build_meta_model
from spmdrl.model.model_shape import SHAPES, with_known_shape
from spmdrl.tools.commands import typed
from spmdrl.tools.plan.measured_run import read_run
from spmdrl.tools.plan.run import Rates, Run, rates_of, read_measured, run_of_model
from spmdrl.tools.plan.search import Plan, best_plans, distinct, make_plan, remedies
from spmdrl.tools.plan.text import as_dict, brief, layout_text, page, rates_dict
from spmdrl.world.axes import axes_of
from spmdrl.world.machine.host_memory import host_memory

_RATES = {
    "gpu_memory_gib": ("memory_gib", 1.0),
    "tflops": ("flops", 1e12),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "node_gb_per_s": ("node_bytes_per_s", 1e9),
    "network_gb_per_s": ("network_bytes_per_s", 1e9),
}
"""Flag: the field of Gpu that it replaces, and its unit there."""
_MEANS = {
    "prompt_tokens": "data.max_prompt_tokens",
    "response_tokens": "sampling.max_response_tokens",
}
"""Flag: the field that bounds it."""


@dataclass(frozen=True)
class PlanFlags:
    """What a config amounts to in memory, traffic and seconds. Besides these flags: --config FILE
    and any field of it, as for train.py."""

    gpus: int = 0
    """Plan for the best layout of so many ranks; left out: for the layout of the config."""
    shape: str = ""
    """A model by its shape, instead of model.path: a folder with a config.json, or a name in
    spmdrl/model/shapes, e.g. qwen3-8b."""
    gpu: str = ""
    """Of the table, e.g. H200; left out: that of --measured, else H100."""
    measured: str = ""
    """Rates from the .json that python -m benchmarks.gpu writes, or the seconds of a run's phases
    from its output_dir, instead of the formula's."""
    gpu_memory_gib: float = 0.0
    """GiB of a GPU, instead of the table's."""
    tflops: float = 0.0
    """Of a GPU, dense bfloat16, instead of the table's."""
    memory_gb_per_s: float = 0.0
    """Of the GPU's memory, instead of the table's."""
    node_gb_per_s: float = 0.0
    """Within a node, per GPU and direction, instead of the table's."""
    network_gb_per_s: float = 0.0
    """Between nodes, per GPU and direction, instead of the table's."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    host_memory_gib: float = 0.0
    """GiB of host memory of a node; left out: this machine's, if it has GPUs or the plan is for
    CPUs, else it is not compared."""
    matmul_frac: float | None = None
    """Of the peak that is reached; left out: that of --measured, else 0.31 to 0.45."""
    prompt_tokens: float = 0.0
    """Mean; left out: half of the longest."""
    response_tokens: float = 0.0
    """Mean; left out: half of the longest."""
    top: int = 5
    """Layouts to compare; 0 looks for none."""
    brief: bool = False
    """Three lines: what a rank holds, seconds of a step."""
    json: bool = False
    """For programs: bytes and seconds."""


def main(argv: list[str] | None = None) -> int:
    """Print the plan and return the exit status: 0, 1 when nothing fits, 2 for bad input."""
    if argv is None:  # the program
        logging.disable(logging.WARNING)
    prog = typed("plan")
    own, rest = tyro.cli(PlanFlags, prog=prog, args=argv, return_unknown_args=True)
    try:
        run, rates = _read_run(own, rest)
        plan, best = _plans(own, run, rates)
    except Refusal as error:
        say(_shown(error), file=sys.stderr)
        return 2
    if own.json:
        first, *others = (as_dict(each, rates=rates) for each in (plan, *best))
        say(json.dumps({"plan": first, "best": others, "rates": rates_dict(rates)}, indent=2))
    elif own.brief:
        say(_shown("\n".join(brief(plan, run=run, rates=rates))))
    else:
        say(_shown("\n".join(page(plan, best, run=run, rates=rates))))
    sys.stdout.flush()
    for line in _refusal(own.gpus, run, rates, plan):
        say(_shown(line), file=sys.stderr)
    return 1 if plan.problems else 0


def _shown(text: object) -> str:
    """Return a text that names the built-in shapes as flags do, without their folder."""
    return str(text).replace(f"{SHAPES}/", "")


def _read_run(own: PlanFlags, rest: list[str]) -> tuple[Run, Rates]:
    """Return the run that the command line describes, and the rates of its GPUs.

    Raises: Refusal for a run that cannot be planned, and for unknown flags.
    """
    cfg = read(rest, prog=f"{typed('plan')} --config FILE") if rest else config.Config()
    if own.shape:
        folder = SHAPES / own.shape if (SHAPES / own.shape).is_dir() else Path(own.shape)
        cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
    cfg = with_known_shape(cfg)
    _check_flags(own, cfg)
    rates = _rates(own)
    _refuse(validate(cfg), has_layout=not own.gpus)
    hf_model = build_meta_model(cfg.model)
    _refuse(policy_problems(cfg, hf_model), has_layout=not own.gpus)
    run = run_of_model(
        cfg, hf_model, prompt_tokens=own.prompt_tokens, response_tokens=own.response_tokens
    )
    rates = replace(rates, host_memory_bytes=_host_memory(own, on_gpu=run.on_gpu))
    if own.measured and Path(own.measured).is_dir():
        run, rates = _by_run(own, run, rates)
    return run, rates


def _by_run(own: PlanFlags, run: Run, rates: Rates) -> tuple[Run, Rates]:
    """Return the run with the lengths of a measured one, unless flags give them, and its rates.

    Raises: Refusal for a run on another kind of device.
    """
    measured = read_run(Path(own.measured))
    had = measured.gpu or "the CPU"
    if bool(measured.gpu) != run.on_gpu or (own.gpu and own.gpu != measured.gpu):
        plans = rates.gpu.name if run.on_gpu else "the CPU"
        raise Refusal(
            f"--measured {own.measured}: the run was on {had}, and this plan is for {plans}; its "
            "seconds say nothing of that; leave --measured out, or set layout.device and --gpu"
        )
    if measured.gpu:
        rates = replace(rates, gpu=rates_of(measured.gpu, **_of_gpu(own)).gpu)
    cfg = with_known_shape(measured.cfg)
    prompt = measured.prompt_tokens
    response = measured.response_tokens
    hf_model = build_meta_model(cfg.model)
    before = run_of_model(cfg, hf_model, prompt_tokens=prompt, response_tokens=response)
    planned = make_plan(before, axes_of(cfg), rates=rates).seconds
    rates = rates.by_run(measured.scales(planned), source=f"measured: {own.measured}")
    if prompt and not own.prompt_tokens:
        run = replace(run, prompt_tokens=min(prompt, run.cfg.data.max_prompt_tokens))
    if response and not own.response_tokens:
        run = replace(run, response_tokens=min(response, run.cfg.sampling.max_response_tokens))
    return run, rates


def _of_gpu(own: PlanFlags) -> dict[str, float]:
    """Return the fields of a GPU that flags replace."""
    return {field: getattr(own, flag) * unit for flag, (field, unit) in _RATES.items()}


def _host_memory(own: PlanFlags, *, on_gpu: bool) -> int:
    """Return the bytes of host memory of a node; 0 where they are not known."""
    if own.host_memory_gib:
        return int(own.host_memory_gib * 2**30)
    is_node = torch.cuda.is_available() if on_gpu else True
    return host_memory().total if is_node else 0


def _rates(own: PlanFlags) -> Rates:
    """Return the table's rates; over them the measured ones; over these the flags'.

    Raises: Refusal for a GPU that is not in the table, or is another than the measured one.
    """
    gpu = ""
    measured: dict[str, float] = {}
    if own.measured and not Path(own.measured).is_dir():
        gpu, measured = read_measured(own.measured)
    rates = rates_of(own.gpu or gpu or "H100", **_of_gpu(own))
    rates = replace(rates, gpus_per_node=own.gpus_per_node)
    if gpu and rates.gpu.name != gpu:
        raise Refusal(
            f"--gpu {own.gpu}: {own.measured} was measured on {gpu}, and the rates of one "
            "GPU say nothing of another; leave one of the two flags out"
        )
    if measured:
        rates = rates.known(measured, source=f"measured: {own.measured}")
    if own.matmul_frac is not None:
        rates = rates.known({"matmul_frac": own.matmul_frac}, source="--matmul-frac")
    return rates


def _check_flags(own: PlanFlags, cfg: config.Config) -> None:
    if cfg.layout.inference_dp > 1:
        raise Refusal(
            f"layout.inference_dp: {cfg.layout.inference_dp} is not planned: plan with 1, where "
            "each engine has all experts"
        )
    if own.gpus < 0 or own.gpus_per_node < 1:
        raise Refusal(
            f"--gpus {own.gpus}, --gpus-per-node {own.gpus_per_node}: expected numbers of GPUs"
        )
    if own.matmul_frac is not None and not 0 < own.matmul_frac <= 1:
        raise Refusal(f"--matmul-frac {own.matmul_frac:g}: expected a fraction, in (0, 1]")
    for flag in (*_RATES, "host_memory_gib"):
        if not 0 <= (value := getattr(own, flag)) < math.inf:
            raise Refusal(f"{_text(flag)} {value:g}: expected a number above 0, or leave it out")
    for flag, field in _MEANS.items():
        mean = getattr(own, flag)
        most = operator.attrgetter(field)(cfg)
        if not 0 <= mean <= most:
            raise Refusal(
                f"{_text(flag)} {mean:g}: expected a mean length of at most {field} {most}, "
                "or 0 for half of it; raise that if sequences are longer"
            )


def _text(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


_PLANNED = (
    "batch.",
    "engine.",
    "model.kernels",
    "model.lora",
    "model.memory",
    "model.moe",
    "sampling.",
    "stream.",
)
"""The fields that a plan's figures follow from, apart from the layout."""
_NEEDS_TORCHAO = "model.memory.optimizer_dtype: int8 takes"


def _refuse(problems: list[str], *, has_layout: bool) -> None:
    """Raises: Refusal for what is wrong with the fields that are planned with.

    Args:
        has_layout: that of the config is planned, not looked for.
    """
    names = (*_PLANNED, "layout") if has_layout else _PLANNED
    # The machine that plans need not have what the run needs.
    own = [p for p in problems if p.startswith(names) and not p.startswith(_NEEDS_TORCHAO)]
    if own:
        raise Refusal("\n".join(own))


def _plans(own: PlanFlags, run: Run, rates: Rates) -> tuple[Plan, list[Plan]]:
    """Return the plan of the config's layout, or of the best one, and the best few plans.

    Raises: Refusal if there is no layout of this number of ranks.
    """
    axes = axes_of(run.cfg)
    top = 0 if own.brief else own.top
    best: list[Plan] = []
    nearest: Plan | None = None
    if top or own.gpus:
        best, nearest = best_plans(run, gpus=own.gpus or axes.world_size, rates=rates)
    few = distinct(best)[:top]
    if not own.gpus:
        return make_plan(run, axes, rates=rates), few
    plan = best[0] if best else nearest
    if plan is None:
        raise Refusal(
            f"--gpus {own.gpus}: no layout of this many ranks suits the model and this kind of "
            "run; rl needs at least one rank"
        )
    return plan, few


def _refusal(gpus: int, run: Run, rates: Rates, plan: Plan) -> list[str]:
    """Return why a plan cannot run and what to change; empty if it can."""
    if not plan.problems:
        return []
    lines = [f"does not fit: {problem}" for problem in plan.problems]
    changes = remedies(run, plan, rates=rates)
    remedy = "take more GPUs, or GPUs with more memory"
    if not gpus:
        remedy = "--gpus N looks for a layout of N ranks"
    if changes:
        lines.append(f"would fit: {'; or '.join(changes)}")
    else:
        lines.append(f"neither one change nor two are enough; {remedy}")
    if gpus:
        lines.append(
            f"no layout of {gpus} ranks fits; the nearest is shown: {layout_text(plan.axes)}"
        )
    return lines
