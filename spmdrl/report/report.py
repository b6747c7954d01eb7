"""The report of a run: rank 0 prints, logs and draws; every rank keeps a log file."""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmdrl.algorithms.mismatch import correction_advice
from spmdrl.config import Config, flatten, trainer_ranks
from spmdrl.model.flops import device_peak_flops, utilisation
from spmdrl.report import console as text
from spmdrl.report.console import Console
from spmdrl.report.curves import draw
from spmdrl.report.glossary import clean_name, values_of, with_aliases
from spmdrl.report.jsonl import JsonLines, read_rows
from spmdrl.report.logs import RankLog, agree_attempt_folder
from spmdrl.report.provenance import save_environment
from spmdrl.report.tracker import MlflowTracker, Status
from spmdrl.rollout.idle import trainer_wait
from spmdrl.rollout.outcomes import evaluation_file
from spmdrl.types import Sums, add_sums
from spmdrl.world import World
from spmdrl.world.watch import Ending

log = logging.getLogger(__name__)

WORK_PHASES = ("generate", "update", "push")
"""Phases that are a step's work; the rest of its time is `perf/other_frac`. Generation that
overlaps the update (split placement, lag above 0) counts as far as it is the longer one."""
BESIDE_PHASES = (
    "evaluate",
    "gather evaluation",
    "begin checkpoint",
    "copy checkpoint",
    "checkpoint",
)
"""Phases between two steps: not part of a step's `perf/other_frac` and `perf/tokens_per_s`."""

_SAMPLES_SHOWN = 3
_ABANDON_S = 15.0  # torchrun kills after 30 s
_SAMPLE_ROWS_TRACKED, _CELL_CHARS = 200, 4000  # the tracker's table is rewritten each time


class Report:
    """What a person sees of a run. Every rank makes one and calls every method.

    Make it right after the world: from then on log records, warnings and tracebacks of each
    rank are in output_dir/logs/attempt_N/rank_K.log.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.rank = cfg, world.rank
        self._watch = world.watch
        self._peak_flops = device_peak_flops(world.device, dtype=cfg.model.compute_dtype)
        self.folder = Path(cfg.output_dir)
        self.attempt_folder = agree_attempt_folder(world)
        self.console = Console()
        self._log = RankLog(
            self.attempt_folder / f"rank_{world.rank}.log", rank=world.rank, console=self.console
        )
        self._metrics = JsonLines(self.folder / "metrics.jsonl")
        self._samples = JsonLines(self.folder / "samples.jsonl")
        self._sample_rows: deque[dict[str, Any]] = deque(maxlen=_SAMPLE_ROWS_TRACKED)
        self._tracker: MlflowTracker | None = None
        self._trend: list[float] = []
        self._step_seconds: list[float] = []
        self._window: Sums = {}
        self._has_advised = False
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._last_at = time.perf_counter()
        self._columns = text.table_columns(
            cfg.objective.samples, spark=self._spark, has_ratio=cfg.batch.updates_per_step > 1
        )
        world.watch.before_exit.append(self._abandon)

    # ---------------------------------------------------------------- start

    def start(self, derived: Mapping[str, Any], *, step: int, sums: Sums | None = None) -> None:
        """Record what the run is made of and open its metrics at `step`, 0 or resumed.

        Call it right before the first step: the first step's time counts from here. Rows
        of an earlier attempt that this one will write again are taken out of metrics.jsonl and
        samples.jsonl (they stay in the attempt's log folder).

        Args:
            derived: the arithmetic that follows from the config, as {name: value} for people.
            step: steps already done.
            sums: what the first push and the probe of engine against trainer measured.
        """
        seconds = self._watch.take_seconds()  # start-up is no part of the first step
        if self.rank == 0:
            self._start(derived, step=step)
            self._show_start(values_of(sums or {}), seconds, step=step)
        self._last_at = time.perf_counter()

    def _start(self, derived: Mapping[str, Any], *, step: int) -> None:
        environment = save_environment(
            self.cfg, folder=self.folder, attempt_folder=self.attempt_folder
        )
        dropped = self._rewind(step)
        if self.cfg.report.tracker == "mlflow":
            self._tracker = self._open_tracker(environment, step=step)
            pairs = flatten(self.cfg) | {f"derived.{name}": v for name, v in derived.items()}
            self._tracker.params(pairs, step=step)
        layout = self.cfg.layout
        self.console.line(
            f"{self.folder}: {self.cfg.algorithm.objective}, {layout.placement} on "
            f"{layout.world_size} ranks, {self.attempt_folder.name}, "
            + (f"resumed at step {step} of {self.cfg.steps}" if step else f"{self.cfg.steps} steps")
            + (", no checkpoint, starting at step 0" if dropped and not step else "")
        )
        self.console.line(text.pairs_text(dict(derived)))
        if self._tracker:
            self.console.line(f"  mlflow ui --backend-store-uri {self._tracker.uri}")

    def _show_start(
        self, values: dict[str, float], seconds: dict[str, float], *, step: int
    ) -> None:
        slow = sorted((s, name) for name, s in seconds.items() if s >= 0.5)[::-1]
        if slow:
            self.console.line("start-up: " + ", ".join(f"{name} {s:.1f} s" for s, name in slow))
        if "sync/bytes" in values:
            speed = values.get("sync/gb_per_s")
            self.console.line(
                f"first push of the weights: {values['sync/bytes']:,.0f} bytes"
                + (f", {speed:.3f} GB/s" if speed is not None else "")
            )
        probe = {k: v for k, v in values.items() if k.startswith("sync/probe")}
        if probe:
            gaps = ", ".join(
                f"{k.removeprefix('sync/')} {v:.{'4f' if v >= 1e-3 else '1e'}}"
                for k, v in probe.items()
            )
            self.console.line(
                f"engine against trainer, |logprob| gap in nats: {gaps} "
                f"(mean allowed: {self.cfg.stream.max_logprob_gap})"
            )
            self._write(step, probe)

    def _open_tracker(self, environment: dict[str, Any], *, step: int) -> MlflowTracker:
        git = environment["git"]
        tags = {"mlflow.source.name": Path(environment["command"][0]).name}
        if git:
            tags["mlflow.source.git.commit"] = git["commit"]
        mlflow = self.cfg.report.mlflow
        return MlflowTracker(
            mlflow.uri,
            folder=self.folder,
            experiment=mlflow.experiment,
            run_name=mlflow.run_name or self.folder.resolve().name,
            resume=step > 0,
            tags=tags,
        )

    def _rewind(self, step: int) -> int:
        """Take out what this attempt writes again; return the number of metrics rows."""

        # An evaluation at step k is of the weights after k steps, which a checkpoint at k
        # already counts as done; a training row k is of the step that comes next.
        def is_past(row: dict[str, Any]) -> bool:
            is_evaluation = any(name.startswith("eval/") for name in row)
            return row["step"] < step or (is_evaluation and row["step"] == step)

        num_dropped = 0
        for file in (self._metrics, self._samples):
            removed = self.attempt_folder / f"removed_{file.path.name}"
            dropped = file.keep(is_past if step else lambda row: False, removed=removed)
            num_dropped += dropped if file is self._metrics else 0
            if dropped:
                log.warning(
                    "%s: %d rows from step %d on belong to an earlier attempt; moved to %s",
                    file.path,
                    dropped,
                    step,
                    removed,
                )
        if self._metrics.path.exists():
            name = self._trend_metric()
            rows = [row for row in read_rows(self._metrics.path) if row.get(name) is not None]
            self._trend = [row[name] for row in rows]
            self._first = dict(rows[0]) if rows else {}
        for row in read_rows(self._samples.path) if self._samples.path.exists() else []:
            self._track_sample(row)
        return num_dropped

    # ---------------------------------------------------------------- each step

    def step(
        self,
        step: int,
        sums: Sums,
        *,
        seconds: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, float]:
        """Record one finished training step.

        Args:
            step: index of the step, from 0.
            sums: its metrics over the whole world.
            seconds: this rank's wall time by phase, e.g. `Watch.take_seconds()`. A `time/...`
                in `sums` goes before it.
            samples: a few {prompt, response, reward}.
        Returns: {metric: value} on rank 0, aliases left out; {} elsewhere.
        Raises: ValueError for a metric that is not in the glossary.
        """
        if self.rank != 0:
            return {}
        now = time.perf_counter()
        step_s, self._last_at = now - self._last_at, now
        times: Sums = {clean_name(f"time/{name}"): (s, 1) for name, s in seconds.items()}
        sums = times | {clean_name(name): pair for name, pair in sums.items()}
        sums = {"perf/step_s": (step_s, 1)} | sums
        sums |= {k: pair for k, pair in self._derived_sums(sums).items() if k not in sums}
        values = values_of(sums)
        self._write(step, values)
        self._step_seconds.append(step_s)
        self._window = add_sums(self._window, sums)
        self._first, self._last = self._first or values, values
        if self._trend_metric() in values:
            self._trend.append(values[self._trend_metric()])
        self._advise(step, values)
        self._show(step)
        self._show_samples(step, samples)
        return values

    def _advise(self, step: int, values: Mapping[str, float]) -> None:
        advice = correction_advice(values, self.cfg.algorithm.correction, self.cfg.lag)
        if advice and not self._has_advised:
            self._has_advised = True
            log.warning("step %d: %s", step, advice)

    def _derived_sums(self, sums: Sums) -> Sums:
        """Return the metrics that follow from others, in a form that adds up over steps."""

        def of(name: str) -> float:
            numerator, denominator = sums.get(name, (0.0, 0.0))
            return numerator / denominator if denominator else 0.0

        step_s = of("perf/step_s")
        generate, update, push = (of(f"time/{name}") for name in WORK_PHASES)
        layout = self.cfg.layout
        overlaps = layout.roles.overlaps and self.cfg.lag > 0
        work = push + (max(generate, update) if overlaps else generate + update)
        inside = step_s - sum(of(clean_name(f"time/{name}")) for name in BESIDE_PHASES)
        tokens = sums.get("perf/generated_tokens", sums.get("perf/trained_tokens", (0, 0)))[0]
        own: Sums = {
            "perf/other_frac": (max(0.0, inside - work), max(0.0, inside)),
            "mem/rss_gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        }
        if "time/engine_idle" in sums and layout.roles.overlaps:
            own |= trainer_wait(of("time/await_rollouts"), generate, sums)
        if tokens:
            own["perf/tokens_per_s"] = (tokens, max(0.0, inside))
        own |= utilisation(
            of("perf/trainer_flops"),
            update,
            ranks=len(trainer_ranks(self.cfg)),
            peak_flops=self._peak_flops,
        )
        if torch.cuda.is_initialized():
            own["mem/cuda_gib"] = (torch.cuda.max_memory_allocated() / 2**30, 1)
        return own

    def _write(self, step: int, values: dict[str, float]) -> None:
        values = with_aliases(values, self.cfg.report.aliases)
        self._metrics.append({"step": step, "unix_s": round(time.time(), 3), **values})
        if self._tracker:
            self._tracker.metrics(step, values)

    def _show(self, step: int) -> None:
        done, every = step + 1, self.cfg.report.console.table_every
        left_s = text.time_left(self._step_seconds, self.cfg.steps - done)
        line = text.progress_line(
            done, self.cfg.steps, left_s=left_s, step_s=self._step_seconds[-1]
        )
        if done % every == 0 or done == self.cfg.steps or done == 1:
            values = values_of(self._window) | {"step": done}
            if left_s is not None:
                values["left_s"] = left_s
            self._window = {}
            had_header = self.console.table_row(self._columns, values, every=every)
            if had_header and not self.console.is_live:
                self.console.line(line)
        self.console.progress(line)

    def _spark(self) -> str:
        return text.sparkline(self._trend, width=10, blocks=self.console.blocks())

    def _trend_metric(self) -> str:
        return self.cfg.objective.headline

    def _show_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        every = self.cfg.report.console.samples_every
        if every and step % every == 0:
            for sample in samples[:_SAMPLES_SHOWN]:
                self.console.line(text.sample_text(dict(sample)))
        if not samples or step % (every or self.cfg.report.console.table_every):
            return
        for sample in samples:
            self._samples.append({"step": step, **sample})
            self._track_sample({"step": step, **sample})
        if self._tracker:
            self._tracker.table("samples.json", list(self._sample_rows))

    def _track_sample(self, row: dict[str, Any]) -> None:
        short = {k: v[:_CELL_CHARS] if isinstance(v, str) else v for k, v in row.items()}
        self._sample_rows.append(short)

    def evaluation(self, step: int, sums: Sums) -> dict[str, float]:
        """Record an evaluation of the weights after `step` steps; nothing where sums is empty.

        Returns: {metric: value} on rank 0; {} elsewhere.
        """
        if self.rank != 0 or not sums:
            return {}
        values = values_of({clean_name(name): pair for name, pair in sums.items()})
        self._write(step, values)
        if self._tracker:
            file = evaluation_file(self.folder, step)
            for path in (file, file.with_suffix(".txt")):
                if path.exists():
                    self._tracker.artifact(path)
        shown = ", ".join(
            f"{name.removeprefix('eval/')} {text.number(v, width=6).strip()}"
            for name, v in values.items()
        )
        self.console.line(f"evaluation after {step} steps: {shown}")
        return values

    # ---------------------------------------------------------------- end

    def close(self, status: Status) -> None:
        """End the report: draw the curves, flush the tracker, say where everything is."""
        if self.rank == 0:
            self.console.clear()
            self._close_outputs(status)
        self._log.close()

    def _abandon(self, ending: Ending) -> None:
        """Give the tracker's run its status: the process ends before the run is done."""
        if self._tracker:
            self._tracker.close(ending, timeout_s=_ABANDON_S)

    def _close_outputs(self, status: Status) -> None:
        picture = self.folder / "curves.png"
        rows = read_rows(self._metrics.path) if self._metrics.path.exists() else []
        has_picture = draw({self.folder.name: rows}, out=picture)
        if self._tracker:
            if has_picture:
                self._tracker.artifact(picture)
            self._tracker.artifact(self.folder / "config.yaml")
            self._tracker.close(status)
        name = self._trend_metric()
        if name in self._first and name in self._last:
            self.console.line(
                f"{status}: {name} {self._first[name]:.3f} in the first step, "
                f"{self._last[name]:.3f} in the last (of these single steps)"
            )
        self.console.line(f"metrics and logs: {self._metrics.path}, {self.attempt_folder}")
        if has_picture:
            self.console.line(f"curves: {picture}")
