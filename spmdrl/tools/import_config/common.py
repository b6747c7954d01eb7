"""Arithmetic that the rules of several frameworks share."""

from __future__ import annotations

from typing import Any

from spmdrl.tools.import_config.translation import Ours, Theirs


def batch_of(ours: Ours, *, prompts: int, mini: int, unit: str, whole: int | None = None) -> None:
    """Set prompts_per_step, and updates_per_step as the batch over the mini-batch.

    Args:
        mini: what one optimizer step takes over all GPUs, in `unit`.
        whole: the batch in that unit; None if the unit is prompts.
    """
    whole = prompts if whole is None else whole
    ours.set(batch__prompts_per_step=prompts, batch__updates_per_step=max(1, whole // max(1, mini)))
    if whole % mini or mini > whole:
        ours.ask(
            "batch.updates_per_step",
            f"a batch of {whole} {unit} is not divided by mini-batches of {mini}",
        )


def steps_of(theirs: Theirs, *, epochs: float, prompts: int) -> int | None:
    """Return the steps of so many epochs, each without its last, smaller batch; None if the number
    of rows was not said."""
    return int(epochs * (theirs.rows // prompts)) if theirs.rows else None


def set_steps(ours: Ours, steps: int | None, *, epochs: float) -> None:
    """Set the number of steps, or ask for the rows that decide it where `steps` is None."""
    if steps is None:
        ours.ask("steps", f"{epochs:g} epochs of an unknown number of rows: give --rows")
    else:
        ours.set(steps=steps)


def schedule_of(ours: Ours, kind: str, *, min_lr_frac: float) -> None:
    """Set the shape of the learning rate."""
    own = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
    }.get(kind)
    if own is None:
        ours.ask("optimizer.schedule", f"{kind} is not there: constant, linear or cosine")
        return
    ours.set(optimizer__schedule=own)
    if own != "constant":
        ours.set(optimizer__min_lr_frac=min_lr_frac)


def clips_of(low: float, high: float) -> dict[str, Any]:
    """Return the bounds of a clipped ratio, which is never below 0: distances from 1."""
    return {"clip_low": min(low, 1.0), "clip_high": high}


def set_kl(ours: Ours, coef: float, kind: str | None, *, place: str, theirs: str) -> None:
    """Set the KL to the reference.

    Args:
        kind: estimator here; None if there is none.
        theirs: its name there.
    """
    ours.set(algorithm__kl_coef=coef, algorithm__kl_in=place)
    if kind is None:
        ours.ask("algorithm.kl", f"{theirs} has no counterpart: k1, k2 or k3")
    elif kind == "k1" and place == "loss" and coef:
        ours.ask("algorithm.kl", f"{theirs} in the loss has a gradient of mean 0: take k2 or k3")
    elif coef:
        ours.set(algorithm__kl=kind)


def correction_of(
    ours: Ours,
    name: str,
    *,
    level: str | None = None,
    lower: float | None = None,
    upper: float | None = None,
) -> None:
    """Set the correction of the gap between engine and trainer."""
    options = {"level": level, "lower": lower, "upper": upper} if name != "none" else {}
    ours.set(
        algorithm__correction=name,
        algorithm__correction_options={k: v for k, v in options.items() if v is not None},
    )
