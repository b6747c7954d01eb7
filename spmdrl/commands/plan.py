"""Say which layout of so many GPUs a run fits on, how fast it goes and what it needs.

    python -m spmdrl plan --config FILE --gpus 64

Exit status 1: it cannot run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import operator
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from spmdrl import config
from spmdrl.check.fit import policy_problems
from spmdrl.check.settings import validate
from spmdrl.config.read import read
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.model.head import head_chunk_tokens
from spmdrl.model.known_shapes import SHAPES, with_known_shape
from spmdrl.model.load import build_meta_model
from spmdrl.model.lora.settings import lora_form
from spmdrl.model.lora.targets import adapter_numel
from spmdrl.model.shape import model_shape
from spmdrl.plan.measured import read_measured
from spmdrl.plan.run import Rates, Run, rates_of, run_of
from spmdrl.plan.search import Plan, best_plans, distinct, make_plan, remedies
from spmdrl.plan.text import as_dict, brief, layout_text, page, rates_dict
from spmdrl.world.axes import axes_of
from spmdrl.world.hardware import GPUS

_RATES = {
    "--gpu-memory-gib": ("memory_gib", 1.0, "GiB of a GPU"),
    "--tflops": ("flops", 1e12, "of a GPU, dense bfloat16"),
    "--memory-gb-per-s": ("memory_bytes_per_s", 1e9, "of the GPU's memory"),
    "--node-gb-per-s": ("node_bytes_per_s", 1e9, "within a node, per GPU and direction"),
    "--network-gb-per-s": ("network_bytes_per_s", 1e9, "between nodes, per GPU and direction"),
}
"""Flag: the field of Gpu that it replaces, its unit there, what it is."""
_MEANS = {
    "--prompt-tokens": "data.max_prompt_tokens",
    "--response-tokens": "sampling.max_response_tokens",
}
"""Flag: the field that bounds it."""


@dataclass(frozen=True)
class Question:
    """What is asked: a run of a model, and what it runs on."""

    cfg: config.Config
    run: Run
    rates: Rates
    gpus: int  # 0: the layout of the config


def main(argv: list[str] | None = None) -> int:
    """Print the plan and return the exit status: 0, 1 when nothing fits, 2 for bad input."""
    if argv is None:  # the program
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends without a word
        logging.disable(logging.WARNING)
    own, rest = _arguments(sys.argv[1:] if argv is None else argv)
    found, error = attempt(lambda: answer(ask(own, rest), top=0 if own.brief else own.top))
    if found is None:
        print(error, file=sys.stderr)
        return 2
    question, plan, best = found
    if own.json:
        plain, *others = (as_dict(each, rates=question.rates) for each in (plan, *best))
        told = {"plan": plain, "best": others, "rates": rates_dict(question.rates)}
        print(json.dumps(told, indent=2))
    elif own.brief:
        print("\n".join(brief(plan, run=question.run, rates=question.rates)))
    else:
        print("\n".join(page(plan, best, run=question.run, rates=question.rates)))
    sys.stdout.flush()
    for line in _refusal(question, plan):
        print(line, file=sys.stderr)
    return 1 if plan.problems else 0


def _arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl plan",
        allow_abbrev=False,
        description="What a config amounts to in memory, traffic and seconds. Besides these "
        "flags: --config FILE and any field of it, as for train.py.",
    )
    add = parser.add_argument
    add(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="plan for the best layout of N ranks; left out: for the layout of the config",
    )
    add(
        "--shape",
        default="",
        metavar="NAME",
        help="a model by its shape, instead of model.path: a folder with a config.json, or "
        + ", ".join(sorted(p.name for p in SHAPES.iterdir())),
    )
    add(
        "--gpu",
        default="",
        help=f"of the table: {', '.join(GPUS)} (default: that of --measured, else H100)",
    )
    add(
        "--measured",
        default="",
        metavar="FILE",
        help="rates from the .json that python -m benchmarks.gpu writes, instead of the formula's",
    )
    for flag, (_, _, what) in _RATES.items():
        add(flag, type=float, default=0.0, metavar="X", help=f"{what}, instead of the table's")
    add("--gpus-per-node", type=int, default=8)
    add(
        "--matmul-frac",
        type=float,
        metavar="X",
        help="of the peak that is reached (default: that of --measured, else 0.5)",
    )
    for flag in _MEANS:
        add(flag, type=float, default=0.0, help="mean; default half of the longest")
    add("--top", type=int, default=5, help="layouts to compare (5); 0 looks for none")
    add("--brief", action="store_true", help="three lines: what a rank holds, seconds of a step")
    add("--json", action="store_true", help="for programs: bytes and seconds")
    return parser.parse_known_args(argv)


def ask(own: argparse.Namespace, rest: list[str]) -> Question:
    """Read the config and the model's shape.

    Raises: Refusal for what cannot be planned; SystemExit(2) for fields that do not exist.
    """
    cfg = read(rest, prog="python -m spmdrl plan --config FILE") if rest else config.Config()
    if own.shape:
        folder = SHAPES / own.shape if (SHAPES / own.shape).is_dir() else Path(own.shape)
        cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
    cfg = with_known_shape(cfg)
    _check_flags(own, cfg)
    rates = _rates(own)
    _refuse(validate(cfg), has_layout=not own.gpus)
    hf_model = build_meta_model(cfg.model)
    _refuse(policy_problems(cfg, hf_model), has_layout=not own.gpus)
    shape = model_shape(hf_model, name=Path(cfg.model.path).name)
    lora = cfg.model.lora
    run = run_of(
        cfg,
        shape,
        on_gpu=cfg.layout.device != "cpu",
        prompt_tokens=own.prompt_tokens,
        response_tokens=own.response_tokens,
        lora_numel=adapter_numel(hf_model, lora_form(lora)) if lora.is_on else 0,
        chunk_tokens=head_chunk_tokens(cfg.model, hf_model),
    )
    return Question(cfg, run, rates, own.gpus)


def _rates(own: argparse.Namespace) -> Rates:
    """Return the table's rates; over them the measured ones; over these the flags'.

    Raises: Refusal for a GPU that is not in the table, or is another than the measured one.
    """
    measured = read_measured(own.measured) if own.measured else None
    changed = {field: _value(own, flag) * unit for flag, (field, unit, _) in _RATES.items()}
    rates = rates_of(own.gpu or (measured.gpu if measured else "H100"), **changed)
    rates = replace(rates, gpus_per_node=own.gpus_per_node)
    if measured and rates.gpu.name != measured.gpu:
        raise Refusal(
            f"--gpu {own.gpu}: {own.measured} was measured on {measured.gpu}, and the rates of one "
            "GPU say nothing of another; leave one of the two flags out"
        )
    if measured:
        rates = rates.known(measured.rates, source=measured.source)
    if own.matmul_frac is not None:
        rates = rates.known({"matmul_frac": own.matmul_frac}, source="--matmul-frac")
    return rates


def _check_flags(own: argparse.Namespace, cfg: config.Config) -> None:
    if own.gpus < 0 or own.gpus_per_node < 1:
        raise Refusal(
            f"--gpus {own.gpus}, --gpus-per-node {own.gpus_per_node}: expected numbers of GPUs"
        )
    if own.matmul_frac is not None and not 0 < own.matmul_frac <= 1:
        raise Refusal(f"--matmul-frac {own.matmul_frac:g}: expected a fraction, in (0, 1]")
    for flag in _RATES:
        if not 0 <= _value(own, flag) < math.inf:
            raise Refusal(
                f"{flag} {_value(own, flag):g}: expected a number above 0, or 0 for the table's"
            )
    for flag, field in _MEANS.items():
        mean, most = _value(own, flag), operator.attrgetter(field)(cfg)
        if not 0 <= mean <= most:
            raise Refusal(
                f"{flag} {mean:g}: expected a mean length of at most {field} {most}, "
                "or 0 for half of it; raise that if sequences are longer"
            )


def _value(own: argparse.Namespace, flag: str) -> float:
    return getattr(own, flag.removeprefix("--").replace("-", "_"))


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
"""What a plan's figures follow from, besides the layout; of the rest it needs nothing."""
_NEEDS_TORCHAO = "model.memory.optimizer_dtype: int8 takes"


def _refuse(problems: list[str], *, has_layout: bool) -> None:
    """Raises: Refusal for what is wrong with the fields that are planned with.

    Args:
        has_layout: that of the config is planned, not looked for.
    """
    names = (*_PLANNED, "layout") if has_layout else _PLANNED
    # Where a plan is made, nothing of the run has to be installed.
    own = [p for p in problems if p.startswith(names) and not p.startswith(_NEEDS_TORCHAO)]
    if own:
        raise Refusal("\n".join(own))


def answer(question: Question, *, top: int) -> tuple[Question, Plan, list[Plan]]:
    """Return the question, the plan of the config's layout, or of the best one, and the best few.

    Raises: Refusal when there is no layout of so many ranks.
    """
    run, rates = question.run, question.rates
    own = axes_of(question.cfg)
    best: list[Plan] = []
    plan: Plan | None = None
    if top or question.gpus:
        best, plan = best_plans(
            run, gpus=question.gpus or own.world_size, rates=rates, overlaps=question.cfg.lag > 0
        )
    if not question.gpus:
        plan = make_plan(run, own, rates=rates)
    elif best:
        plan = best[0]
    if plan is None:
        raise Refusal(
            f"--gpus {question.gpus}: no layout of so many ranks suits the model and "
            "this kind of run; rl needs one at least"
        )
    return question, plan, distinct(best)[:top]


def _refusal(question: Question, plan: Plan) -> list[str]:
    """Return why a plan cannot run and what to change; nothing when it can."""
    if not plan.problems:
        return []
    lines = [f"does not fit: {problem}" for problem in plan.problems]
    changes = remedies(question.run, plan, rates=question.rates)
    lines.append(
        f"would fit: {'; or '.join(changes)}"
        if changes
        else "neither one change nor two are enough; "
        + (
            "take more GPUs, or GPUs with more memory"
            if question.gpus
            else "--gpus N looks for a layout of N ranks"
        )
    )
    if question.gpus:
        lines.append(
            f"no layout of {question.gpus} ranks fits; the nearest is shown: "
            f"{layout_text(plan.axes)}"
        )
    return lines
