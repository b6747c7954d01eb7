"""Traces single steps by torch.profiler, with the phases of the loop as ranges."""

from __future__ import annotations

import logging
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from spmdrl.config import Config
from spmdrl.run_folder import make_folder, write_file
from spmdrl.world.world import World

log = logging.getLogger(__name__)

FOLDER = "profile"


class StepProfiler:
    """Writes output_dir/profile/step_S_rank_R.json.gz for the steps and ranks of report.profile.

    A step lasts from the report of the step before to its own.
    """

    def __init__(self, cfg: Config, world: World):
        self._options = cfg.report.profile
        self._output_dir = Path(cfg.output_dir)
        self._rank = world.rank
        self._watch = world.watch
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Trace from here on, if this rank is to trace this step."""
        if step not in self._options.steps or self._rank not in self._options.ranks:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            profile_memory=self._options.memory,
            with_stack=self._options.stacks,
        )
        self._profile.start()
        self._watch.mark = record_function

    def end(self, step: int) -> None:
        """Write the trace of this step, if there is one. A disk that is full costs only that."""
        if self._profile is None:
            return
        self._watch.mark = nullcontext
        self._profile.stop()
        folder = self._output_dir / FOLDER
        path = folder / f"step_{step}_rank_{self._rank}.json.gz"
        try:
            make_folder(folder, within=self._output_dir)
            with tempfile.TemporaryDirectory() as own:
                written = Path(own) / path.name
                self._profile.export_chrome_trace(str(written))
                write_file(path, written.read_bytes(), within=self._output_dir)
        except OSError as error:
            log.error("%s: the profile cannot be written (%s); training goes on", path, error)
        else:
            log.info("profile of step %d on rank %d: %s", step, self._rank, path)
        self._profile = None
