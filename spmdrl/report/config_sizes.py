"""Sizes that follow from a config, such as sequences per step, as a run prints them at start."""

from __future__ import annotations

from spmdrl.config import Config
from spmdrl.config.fields import least_tokens, useful_tokens
from spmdrl.world.axes import axes_of


def config_sizes(cfg: Config, *, tokens: int = 0) -> dict[str, str]:
    """Return the sizes that follow from a config, as {name: text with the formula}.

    Args:
        tokens: measured token budget of a micro-batch, if the config leaves it open; 0: unknown.
    """
    batch = cfg.batch
    axes = axes_of(cfg)
    is_rl = cfg.objective.samples
    group = cfg.sequences_per_row
    sequences = batch.prompts_per_step * group
    longest = cfg.longest_sequence
    pairs = {
        "sequences per step": f"{batch.prompts_per_step} {'prompts' if is_rl else 'rows'} * "
        f"{group} = {sequences}",
        "optimizer steps per step": f"{batch.updates_per_step}, of about "
        f"{sequences / batch.updates_per_step:.0f} sequences"
        + (f", {batch.epochs} times" if batch.epochs > 1 else ""),
        "tokens per step": f"at most {sequences} * {longest} = {sequences * longest:,}",
        "sequences per dp rank": _share(sequences, axes.dp_size),
        "micro-batches per dp rank": _microbatches(cfg, useful_tokens(cfg), measured=tokens),
    }
    if len(cfg.teachers) > 1:
        pairs["teachers"] = ", ".join(cfg.teachers)
    if cfg.hints_teacher:
        longest_read = cfg.data.max_teacher_prompt_tokens + cfg.sampling.max_response_tokens
        pairs["tokens per step of teachers"] = (
            f"at most {sequences} * {longest_read} = {sequences * longest_read:,}"
        )
    if axes.engines:
        pairs["steps of generation ahead"] = f"{cfg.lag}" + (
            f", each sample {cfg.lag} steps stale and nothing overlaps: under layout.placement "
            f"{cfg.layout.placement} ranks generate and train in turns; lag 0 is as fast"
            if cfg.lag and not cfg.layout.roles.overlaps
            else ""
        )
        pairs["prompts per engine replica"] = _share(batch.prompts_per_step, axes.replicas)
        rounds = -(-sequences // (axes.replicas * cfg.engine.max_num_seqs))
        text = (
            f"{rounds}: {sequences / axes.replicas:.0f} sequences, "
            f"{cfg.engine.max_num_seqs} at a time"
        )
        if rounds > 1:
            text += (
                f"; engine.max_num_seqs {-(-sequences // axes.replicas)} would decode them at "
                "once, if its KV cache holds them (python -m spmdrl plan)"
            )
        pairs["engine rounds per step"] = text
    return pairs


def _share(total: int, parts: int) -> str:
    about = "" if total % parts == 0 else "about "
    return f"{total} / {parts} = {about}{total / parts:.0f}"


def _microbatches(cfg: Config, tokens: int, *, measured: int) -> str:
    """Return the number of micro-batches as text.

    Args:
        tokens: most tokens of a data-parallel rank in one update.
        measured: measured token budget of a micro-batch; 0: unknown.
    """
    budget = cfg.batch.tokens_per_microbatch
    updates = cfg.batch.updates_per_step
    if not (budget or measured):
        return (
            f"auto: of {least_tokens(cfg)} to {useful_tokens(cfg)} tokens, as many as fit; "
            "found at start (python -m spmdrl plan estimates it)"
        )
    most = max(1, -(-tokens // (budget or measured)))
    return (
        f"at most about {most} of {budget or measured} tokens"
        + ("" if budget else ", as found")
        + (f", for each of {updates} updates" if updates > 1 else "")
    )
