"""The report of a run: console, metrics.jsonl, trackers, curves of rank 0; logs and timeline of
all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spmdrl.report.console as text
from spmdrl.config import Config, flatten
from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.journal import Journal
from spmdrl.model.decode_reads import device_bandwidth
from spmdrl.model.flops import device_peak_flops
from spmdrl.report.advice import Advisor
from spmdrl.report.bottleneck import explain_run
from spmdrl.report.config_sizes import config_sizes
from spmdrl.report.console import Console
from spmdrl.report.curves import draw
from spmdrl.report.derived_metrics import derived_sums
from spmdrl.report.exit_status import exit_status
from spmdrl.report.glossary import clean_name, values_of, with_aliases
from spmdrl.report.logs import RankLog, agree_attempt_folder
from spmdrl.report.page.write import PAGE, PageLimits, RunPage
from spmdrl.report.profile import StepProfiler
from spmdrl.report.progress import SAMPLES_KEPT, Progress, Samples
from spmdrl.report.provenance import save_environment
from spmdrl.report.timeline_writer import TimelineWriter
from spmdrl.report.tracker import Status, Trackers
from spmdrl.report.trackers import make_trackers
from spmdrl.rollout.metrics import batch_sums
from spmdrl.rollout.outcomes import evaluation_file
from spmdrl.types import Advantages, Batch, Sums, add_sums, as_pair
from spmdrl.world.lost_peers.watch import Ending
from spmdrl.world.world import World

if TYPE_CHECKING:
    from spmdrl.roles import NullTrainer
    from spmdrl.rollout.trained_tokens import TrainedTokens
    from spmdrl.train.trainer import Trainer

log = logging.getLogger(__name__)

_ABANDON_S = 15.0  # torchrun kills after 30 s
_PAGE_LIMITS = PageLimits(mib=16.0, seconds=5.0)
"""Of the page at the run's end; `python -m spmdrl view` takes more."""
_NEWEST_BYTES = 2**15  # of each rank's timeline, some thirty steps


class Report:
    """Shows a run to people. Every rank makes one and calls every method.

    Make it right after the world: from then on log records, warnings and tracebacks of each
    rank go to output_dir/logs/attempt_N/rank_K.log.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg = cfg
        self.rank = world.rank
        self._world = world
        self._watch = world.watch
        self._peak_flops = device_peak_flops(world.device, dtype=cfg.model.compute_dtype)
        self._bandwidth = device_bandwidth(world.device)
        self.folder = Path(cfg.output_dir)
        self.attempt_folder = agree_attempt_folder(world)
        self.console = Console()
        self._log = RankLog(
            self.attempt_folder / f"rank_{world.rank}.log", rank=world.rank, console=self.console
        )
        self._profiler = StepProfiler(cfg, world)
        self._timeline = TimelineWriter(world, self.folder, attempt_folder=self.attempt_folder)
        self._metrics = Journal(self.folder / "metrics.jsonl")
        self._samples_file = Journal(self.folder / "samples.jsonl")
        self._progress = Progress(cfg, self.console)
        self._samples = Samples(cfg, self.console, file=self._samples_file)
        self._trackers = Trackers()
        self._advisor = Advisor(cfg)
        self._trained: TrainedTokens | None = None
        self._last_at = time.perf_counter()
        world.watch.before_exit.append(self._abandon)

    # ---------------------------------------------------------------- start

    def start(
        self,
        sums: Sums,
        *,
        step: int,
        certify: Callable[[int, Batch, Advantages, Sums], None] | None = None,
        trainer: Trainer | NullTrainer | None = None,
    ) -> None:
        """Record config, versions and code of the run, and open its metrics at `step`.

        Call it right before the first step, whose time counts from here. Rows of an earlier
        attempt that this one will write again move from metrics.jsonl, samples.jsonl and the
        timeline to this attempt's log folder.

        Args:
            sums: what the comparison of rows, the first push and the probe of engine against
                trainer measured. Rows and probe are a row of metrics.jsonl.
            step: steps already done.
            certify: writes a step's line of the certificate, see `Certificate.add`.
            trainer: of this rank. Under rollout.record, what tokens were trained with is recorded.
        """
        self._certify = certify
        seconds = self._watch.take_seconds()  # else start-up would count as the first step
        if self.rank == 0:
            self._start(step)
            self._show_start(values_of(sums), seconds, step=step)
        if trainer and self._world.is_dp_leader and self.cfg.rollout.record.every:
            from spmdrl.rollout.trained_tokens import TrainedTokens

            self._trained = TrainedTokens(self.cfg, self._world)
            self._trained.begin(step)
            trainer.watch_logprobs(self._trained.add)
        self._profiler.begin(step)
        self._timeline.start(step)
        self._last_at = time.perf_counter()

    def _start(self, step: int) -> None:
        sizes = config_sizes(self.cfg, tokens=self._world.tokens_per_microbatch)
        environment = save_environment(
            self.cfg, folder=self.folder, attempt_folder=self.attempt_folder
        )
        dropped = self._rewind(step)
        self._start_trackers(sizes, environment, step=step)
        layout = self.cfg.layout
        begin = f"{self.cfg.steps} steps"
        if step:
            begin = f"resumed at step {step} of {self.cfg.steps}"
        elif dropped:
            begin += ", no checkpoint, starting at step 0"
        self.console.line(
            f"{self.folder}: {self.cfg.algorithm.objective}, {layout.placement} on "
            f"{layout.world_size} ranks, {self.attempt_folder.name}, {begin}"
        )
        self.console.line(text.pairs_text(sizes))
        for command in self._trackers.view_commands:
            self.console.line(f"  {command}")

    def _show_start(
        self, values: dict[str, float], seconds: dict[str, float], *, step: int
    ) -> None:
        slow = sorted((s, name) for name, s in seconds.items() if s >= 0.5)[::-1]
        if slow:
            self.console.line("start-up: " + ", ".join(f"{name} {s:.1f} s" for s, name in slow))
        if "sync/bytes" in values:
            line = f"first push of the weights: {values['sync/bytes']:,.0f} bytes"
            if "sync/gb_per_s" in values:
                line += f", {values['sync/gb_per_s']:.3f} GB/s"
            self.console.line(line)
        probe = {k: v for k, v in values.items() if k.startswith("sync/probe_gap")}
        if probe:
            limit = values["sync/probe_limit"]
            gaps = ", ".join(
                f"{k.removeprefix('sync/')} {v:.{'4f' if v >= 1e-3 else '1e'}}"
                for k, v in probe.items()
            )
            self._line(f"engine against trainer, nats: {gaps} (mean allowed: {limit:.3g})")
            probe["sync/probe_limit"] = limit
        proved = {k: v for k, v in values.items() if k.startswith("proof/")}
        if proved or probe:
            self._write(step, proved | probe)

    def _line(self, line: str) -> None:
        self.console.line(text.wrap(line, width=self.console.width))

    def _start_trackers(
        self, sizes: Mapping[str, str], environment: Mapping[str, Any], *, step: int
    ) -> None:
        params = flatten(self.cfg) | {f"derived.{name}": v for name, v in sizes.items()}
        tags = {"source.name": Path(environment["command"][0]).name}
        if environment["git"]:
            tags["source.git.commit"] = environment["git"]["commit"]
        self._trackers = Trackers(make_trackers(self.cfg, self.folder))
        self._trackers.start(params, tags, step=step)

    def _rewind(self, step: int) -> int:
        """Remove rows that this attempt writes again; return the number of metrics rows."""

        # A run that resumes at step k has done the evaluation of step k, which is of the weights
        # after k steps. The training row of step k is still to come.
        def is_past(row: dict[str, Any]) -> bool:
            is_evaluation = any(name.startswith("eval/") for name in row)
            return row["step"] < step or (is_evaluation and row["step"] == step)

        num_dropped = 0
        for file in (self._metrics, self._samples_file):
            removed = self.attempt_folder / f"removed_{file.path.name}"
            dropped = len(file.keep(is_past if step else lambda row: False, removed=removed))
            num_dropped += dropped if file is self._metrics else 0
            if dropped:
                log.warning(
                    "%s: %d rows from step %d on belong to an earlier attempt; moved to %s",
                    file.path,
                    dropped,
                    step,
                    removed,
                )
        self._progress.resume(self._metrics.rows())
        self._advisor.resume(self._metrics.rows())
        self._samples.resume(self._samples_file.rows(newest=SAMPLES_KEPT, holds_texts=True))
        return num_dropped

    # ---------------------------------------------------------------- each step

    def step(
        self,
        step: int,
        batch: Batch,
        advantages: Advantages,
        updated: Sums,
        pushed: Sums,
        evaluated: Sums,
        *,
        own: Sums | None = None,
    ) -> None:
        """Certify and record a finished training step, and the evaluation of its weights.

        Every rank calls it. Trainers wait for each other if the step is certified.

        Args:
            step: index of the step, from 0.
            batch, advantages: as the update had them.
            updated, pushed: the sums of update and push.
            evaluated: of the weights after this step; empty if none was due.
            own: metrics of your own, whose names begin with `my/`.
        """
        if self._certify is not None:
            self._certify(step, batch, advantages, updated)
        if self._trained:
            self._trained.write(step, batch, advantages)
        self._timeline.write(step)
        if self.rank == 0:
            self.record(
                step,
                add_sums(batch_sums(batch), updated, pushed, own or {}),
                seconds=self._watch.take_seconds(),
                samples=batch.samples,
            )
        self.evaluation(step + 1, evaluated)
        self._profiler.end(step)
        self._profiler.begin(step + 1)

    def record(
        self,
        step: int,
        sums: Sums,
        *,
        seconds: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, float]:
        """Record the metrics of one training step on rank 0; do nothing on other ranks.

        Args:
            step: index of the step, from 0.
            sums: its metrics over the whole world.
            seconds: this rank's wall time by phase, e.g. `Watch.take_seconds()`. A `time/...`
                in `sums` goes before it.
            samples: a few {prompt, response, reward}.
        Returns: {metric: value} on rank 0, without aliases; {} on other ranks.
        Raises: Refusal for a metric that is not in the glossary.
        """
        if self.rank != 0:
            return {}
        now = time.perf_counter()
        step_s = now - self._last_at
        self._last_at = now
        times: Sums = {clean_name(f"time/{name}"): (s, 1) for name, s in seconds.items()}
        sums = times | {clean_name(name): as_pair(name, pair) for name, pair in sums.items()}
        sums = {"perf/step_s": (step_s, 1)} | sums
        follows = derived_sums(
            sums, self.cfg, peak_flops=self._peak_flops, peak_bytes_per_s=self._bandwidth
        )
        sums |= {name: pair for name, pair in follows.items() if name not in sums}
        values = values_of(sums)
        self._write(step, values)
        for advice in self._advisor.look(values):
            log.warning("step %d: %s", step, advice)
        self._progress.show(step, sums, step_s=step_s)
        newest = self._samples.add(step, samples)
        if newest:
            self._trackers.table("samples.json", newest)
        return values

    def _write(self, step: int, values: dict[str, float]) -> None:
        values = with_aliases(values, self.cfg.report.aliases)
        self._metrics.append({"step": step, "unix_s": round(time.time(), 3), **values})
        self._trackers.metrics(step, values)

    def evaluation(self, step: int, sums: Sums) -> dict[str, float]:
        """Record an evaluation of the weights after `step` steps, if `sums` is not empty.

        Returns: {metric: value} on rank 0; {} on other ranks.
        """
        if self.rank != 0 or not sums:
            return {}
        values = values_of(sums)
        self._write(step, values)
        file = evaluation_file(self.folder, step)
        for path in (file, file.with_suffix(".txt")):
            if path.exists():
                self._trackers.artifact(path)
        shown = ", ".join(
            f"{name.removeprefix('eval/')} {text.number(v, width=6).strip()}"
            for name, v in values.items()
        )
        self._line(f"evaluation after {step} steps: {shown}")
        return values

    # ---------------------------------------------------------------- end

    def close(self, status: Status) -> int:
        """End the report: draw the curves, flush the trackers, print where everything is.

        All ranks wait for each other.

        Returns: the run's exit status, see `exit_status.exit_status`.
        """
        if self.rank == 0:
            self.console.progress("")
            self._close_outputs(status)
        code = exit_status(self.cfg, self._world, is_whole=status == "finished")
        self._log.close()
        return code

    def write_page(self) -> None:
        """Write the run's page on rank 0; other ranks do nothing. Nobody waits for it.

        The run does not fail if it cannot be written: the console says why.
        """
        if self.rank != 0:
            return
        page = self.folder / PAGE
        run_page = RunPage((self.folder,), limits=_PAGE_LIMITS)
        _, error = attempt(lambda: run_page.write(page, within=self.folder), Exception)
        if error is None:
            self.console.line(f"page: {page}")
        else:
            self.console.line(f"{page} cannot be written: {error or type(error).__name__}")

    def _abandon(self, ending: Ending) -> None:
        """End the trackers' runs with this status: the process ends before the run is done."""
        self._trackers.close(ending, timeout_s=_ABANDON_S)

    def _close_outputs(self, status: Status) -> None:
        chart = self.folder / "curves.png"
        has_chart = draw({self.folder.name: self._metrics.rows()}, out=chart)
        if has_chart:
            self._trackers.artifact(chart)
        self._trackers.artifact(self.folder / "config.yaml")
        self._trackers.close(status)
        if summary := self._progress.summary():
            self._line(f"{status}: {summary}")
        # A file that somebody has changed must not fail a run that is done.
        explained, error = attempt(
            lambda: explain_run(self.folder, self.cfg, newest_bytes=_NEWEST_BYTES),
            (OSError, Refusal),
        )
        if error:
            log.warning("the run's time is not explained: %s", error)
        if explained:
            self._line(explained)
        self.console.line(f"metrics and logs: {self._metrics.path}, {self.attempt_folder}")
        if has_chart:
            self.console.line(f"curves: {chart}")
