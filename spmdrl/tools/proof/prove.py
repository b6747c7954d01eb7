"""Prove that a model's code works, line by line, on the CPUs of this machine.

Each line runs parts of this program, in new processes, on a small model of the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.check.fit import check_fit
from spmdrl.check.proved_models import Line, Verdict
from spmdrl.config import (
    BatchSettings,
    CheckpointSettings,
    Config,
    DataSettings,
    LayoutSettings,
    OptimizerSettings,
    SamplingSettings,
    from_tree,
)
from spmdrl.config.engine_traits import ENGINE_TRAITS
from spmdrl.engine.vllm.families import head_size_problem
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.tools.proof import jobs
from spmdrl.tools.proof.jobs import PACKED, ROWS
from spmdrl.tools.proof.ranks import RankError, on_ranks
from spmdrl.tools.small_models.shrink import CHUNK
from spmdrl.tools.small_models.tiny import tiny_of
from spmdrl.world.lost_peers.watch import first_line

EXACT = 2e-6
"""Largest mean difference of logprobs, nats, between two float32 computations of one function."""
NEAR = 1e-3
"""The same between the trainer and an engine, which has other kernels; and the largest relative
difference of a gradient, or of parameters after two updates."""
MOVED = 1e-3
"""Smallest mean change of logprobs by two updates, nats, at which following them proves a push."""
MOST_RANKS = 16
"""Largest number of processes for the proof of a layout."""
ENGINES = ("transformers", "vllm")


class Proof:
    """The lines of one model.

    Args:
        hf_config: the real model's transformers config.
        folder: for small models, checkpoints and logs; new or empty.
        layout: another mesh to prove; None for none.
        timeout_s: limit for each line.
    """

    def __init__(
        self,
        hf_config: Any,
        folder: Path,
        *,
        layout: LayoutSettings | None = None,
        timeout_s: float = 180.0,
    ):
        self.folder = folder
        self._layout = layout
        self._timeout_s = timeout_s
        self._hf_config = hf_config
        self._model = folder / "model"
        self._export = folder / "export"
        self._reference = str(folder / "reference.pt")
        self.class_name = ""
        """Class of the small transformers model; empty before it is made."""

    def lines(self, *, engines: tuple[str, ...] = ENGINES) -> Iterator[Line]:
        """Yield each line as soon as it is done.

        Args:
            engines: kinds of engines to push weights into.
        """
        began = time.monotonic()
        _, error = attempt(self._make, Exception)  # transformers' own code may raise anything
        note = _short(error)
        if error is not None and not isinstance(error, Refusal):
            note = f"no small model of it can be made: {first_line(error)}"
        if error is None:
            _, error = attempt(lambda: check_fit(self._config("fit")), Exception)
            note = _short(error)
        if error is not None:
            is_refusal = isinstance(error, Refusal) or not self.class_name
            verdict: Verdict = "refused" if is_refusal else "WRONG"
            yield Line("model", verdict, note, time.monotonic() - began)
            return
        yield Line("model", "proved", self._description, time.monotonic() - began)
        yield from self._single_rank_lines()
        for axis in ("tp", "cp", "ep"):
            yield self._line(
                f"{axis} 2", jobs.mesh, self._two_rank_config(**{axis: 2}), _parameters
            )
        two = self._two_rank_config()
        saved = f"{self.folder}/alone/checkpoints/step_1"
        resuming = replace(two, checkpoint=CheckpointSettings(resume=saved))
        yield self._line("resume on dp 2", jobs.mesh, resuming, _resumed)
        lora = self._config("lora", model={"lora": {"rank": 4}})
        yield self._line("LoRA", jobs.adapters, lora, _adapters, str(self.folder / "merged"))
        if self._layout is not None:
            yield self._layout_line(self._layout)
        for kind in engines:
            yield self._engine_line(kind)

    # ---------------------------------------------------------------- jobs

    def _make(self) -> None:
        kv_heads = max(2, self._layout.tp if self._layout else 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        model = tiny_of(self._hf_config, self._model, kv_heads=kv_heads)
        small: Any = model.config.get_text_config()
        self._has_chunks = bool(getattr(small, "attention_chunk_size", None))
        count = sum(p.numel() for p in model.parameters())
        self.class_name = type(model).__name__
        self._description = (
            f"{self.class_name} of {small.num_hidden_layers} layers, {count:,} weights"
        )

    def _single_rank_lines(self) -> Iterator[Line]:
        """Yield three lines from one job on one rank."""
        began = time.monotonic()
        cfg = self._config("alone")
        measured, error = self._run(jobs.single_rank, cfg, str(self._export), self._reference)
        seconds = time.monotonic() - began
        for name, judge in (("packed = single = plain", _packed), ("gradients", _gradients)):
            yield _line_of(name, measured, error, judge, seconds)
        yield _line_of("export", measured, error, _export, seconds)

    def _layout_line(self, layout: LayoutSettings) -> Line:
        cfg = self._layout_config(layout)
        if (ranks := cfg.layout.world_size) > MOST_RANKS:
            note = f"{ranks} ranks train, more than the limit of {MOST_RANKS} processes"
            return Line("layout", "refused", f"{note}; give a config with fewer dp ranks", 0.0)
        return self._line("layout", jobs.mesh, cfg, _parameters)

    def _engine_line(self, kind: str) -> Line:
        """Return the line of an engine: in float32, or in bfloat16 if float32 does not work."""
        name = f"{kind} engine"
        # Check the real model, because the heads of the small one have another size.
        has_own_models = ENGINE_TRAITS[kind].has_own_models
        if has_own_models and (wrong := head_size_problem(self._hf_config)):
            return Line(name, "refused", f"engine.kind: vllm: {wrong}; set it to transformers", 0.0)
        line = self._line(name, jobs.engine, self._engine(kind), _engine)
        if line.verdict in ("proved", "not finished") or line.kind or not has_own_models:
            return line
        cfg = self._engine(kind)
        cfg = replace(cfg, engine=replace(cfg.engine, dtype="bfloat16"))
        cfg = replace(cfg, output_dir=f"{cfg.output_dir}_16")
        second = self._line(name, jobs.engine, cfg, _engine)
        if second.verdict != "proved":
            return second if second.kind else line
        note = f"in bfloat16: {second.note}; not in float32: {line.note}"
        return replace(second, note=note, seconds=line.seconds + second.seconds)

    def _line(
        self,
        name: str,
        job: Callable[..., jobs.Measurements],
        cfg: Config,
        judge: Callable[[jobs.Measurements], tuple[bool, str]],
        *args: str,
    ) -> Line:
        began = time.monotonic()
        _, refused = attempt(lambda: check_fit(cfg))
        if refused is not None:
            return Line(name, "refused", _short(refused), time.monotonic() - began)
        if job is jobs.mesh:
            args = (*args, self._reference)
        measured, error = self._run(job, cfg, *args)
        return _line_of(name, measured, error, judge, time.monotonic() - began)

    def _run(
        self, job: Callable[..., jobs.Measurements], cfg: Config, *args: str
    ) -> tuple[jobs.Measurements | None, BaseException | None]:
        ranks = cfg.layout.world_size
        log = Path(f"{cfg.output_dir}.log")
        measured, error = attempt(
            lambda: on_ranks(ranks, job, cfg, *args, log=log, timeout_s=self._timeout_s)[0],
            RankError,
        )
        return measured, error

    # ---------------------------------------------------------------- configs

    def _config(self, name: str, *, model: dict[str, Any] | None = None) -> Config:
        """Return a float32 config of one rank without an engine."""
        own = {"compute_dtype": "float32", "path": str(self._model), **(model or {})}
        return Config(
            output_dir=str(self.folder / name),
            steps=jobs.UPDATES,
            layout=LayoutSettings(placement="offline", world_size=1, device="cpu"),
            model=from_tree({"model": own}).model,
            data=DataSettings(train="task:addition", size=64, max_prompt_tokens=max(ROWS)),
            batch=BatchSettings(tokens_per_microbatch=PACKED),
            sampling=SamplingSettings(max_response_tokens=32),
            # With a small eps, rounding errors of small gradients would change Adam's steps.
            optimizer=OptimizerSettings(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.2),
            checkpoint=CheckpointSettings(every_steps=1),
        )

    def _two_rank_config(self, **axes: Any) -> Config:
        name = "_".join(f"{axis}{size}" for axis, size in axes.items()) or "dp2"
        cfg = self._config(name)
        return replace(cfg, layout=replace(cfg.layout, world_size=2, **axes))

    def _layout_config(self, layout: LayoutSettings) -> Config:
        """Return a config whose ranks are the trainers of a layout."""
        placed = layout.roles.trainer_ranks(layout.world_size, trainers=layout.trainer_ranks)
        own = replace(layout, placement="offline", world_size=len(placed), device="cpu")
        return replace(self._config("layout"), layout=own)

    def _engine(self, kind: str) -> Config:
        """Return a config of one rank that trains and generates, with the exported weights."""
        path = self._export if (self._export / "config.json").is_file() else self._model
        cfg = self._config(kind, model={"path": str(path)})
        settings = {"kind": kind, "dtype": "float32", "cpu_kv_cache_gib": 0.1, "max_num_seqs": 64}
        if ENGINE_TRAITS[kind].pages_cache and self._has_chunks:  # a chunk must be whole pages
            settings["options"] = {"block_size": CHUNK}
        return replace(
            cfg,
            layout=replace(cfg.layout, placement="colocated"),
            engine=from_tree({"engine": settings}).engine,
        )


# ---------------------------------------------------------------------------- verdicts


def _line_of(
    name: str,
    measured: jobs.Measurements | None,
    error: BaseException | None,
    judge: Callable[[jobs.Measurements], tuple[bool, str]],
    seconds: float,
) -> Line:
    if measured is None:
        return Line(name, _verdict_of(error), _short(error), seconds)
    is_right, note = judge(measured)
    return Line(name, "proved" if is_right else "WRONG", note, seconds, measured.get("mode", ""))


def _verdict_of(error: BaseException | None) -> Verdict:
    """Return the verdict of a job that ended with an error."""
    if isinstance(error, RankError) and error.is_timeout:
        return "not finished"
    is_refusal = isinstance(error, RankError) and error.is_refusal
    return "refused" if is_refusal else "WRONG"


def _packed(measured: jobs.Measurements) -> tuple[bool, str]:
    (packed, most), (single, _) = measured["packed"], measured["single"]
    note = f"packed {packed:.1e}, single {single:.1e} nats from plain, largest {most:.1e}"
    return packed <= EXACT and single <= EXACT and most <= NEAR, note


def _gradients(measured: jobs.Measurements) -> tuple[bool, str]:
    own = measured["gradients"]
    note = f"{own['gap']:.1e} of the largest, in {own['tensor'] or 'none'} of {own['tensors']}"
    return own["gap"] <= NEAR and own["tensors"] > 0, note


def _export(measured: jobs.Measurements) -> tuple[bool, str]:
    mean, most = measured["export"]
    return mean <= EXACT and most <= NEAR, f"plain transformers differs by {mean:.1e} nats"


def _parameters(measured: jobs.Measurements) -> tuple[bool, str]:
    gap = measured["parameters"]
    return gap <= NEAR, f"{gap:.1e} of the largest change after {jobs.UPDATES} updates"


def _resumed(measured: jobs.Measurements) -> tuple[bool, str]:
    is_right, note = _parameters(measured)
    return is_right and measured["step"] == 1, note


def _adapters(measured: jobs.Measurements) -> tuple[bool, str]:
    (first, _), (merged, _), (moved, _) = (measured[n] for n in ("before", "export", "moved"))
    note = f"untrained {first:.1e}, trained and merged {merged:.1e} nats, moved {moved:.1e}"
    return first <= EXACT and merged <= 10 * EXACT and moved > MOVED, note


def _engine(measured: jobs.Measurements) -> tuple[bool, str]:
    names = ("loaded", "before", "after", "sampled")
    gaps = [measured[name][0] for name in names]
    moved = measured["moved"][0]
    gaps_text = ", ".join(f"{name} {gap:.1e}" for name, gap in zip(names, gaps))
    why = " ".join(" ".join(line.split("because", 1)[-1].split()) for line in measured["why"])
    note = f"{measured['mode']}; gaps {gaps_text} nats; moved {moved:.1e}"
    if why:
        note = f"{note}; {why}"
    limit = NEAR
    if "rounding" in measured:
        # Rounding can change the choice of experts, so the limit is measured on the same model.
        rounding = measured["rounding"]
        limit = 2 * rounding
        note = f"{note}; plain transformers in bfloat16 {rounding:.1e}"
    return max(gaps) <= limit and moved > MOVED, note


def _short(error: BaseException | None) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 600 else f"{text[:600]} ..."
