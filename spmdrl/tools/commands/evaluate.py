"""Sample held-out problems with a model, a run or a checkpoint, and print how it does.

    python -m spmdrl evaluate runs/demo/grpo --evaluate.samples 8
    python -m spmdrl evaluate runs/demo/grpo --which best
    python -m spmdrl evaluate runs/demo/grpo/checkpoints/step_50
    python -m spmdrl evaluate my_model --config configs/demo_grpo.yaml --right-at 0.5
    torchrun --nproc-per-node 4 -m spmdrl evaluate my_model --config configs/gpu_qwen3_1.7b_8.yaml

The first argument is a Hugging Face folder or hub name, a run's folder (its newest whole checkpoint
is taken, or its best one) or a checkpoint. Runs and checkpoints bring their own config; any field
of it is a flag, as in train.py. Every rank generates, layout.inference_tp * inference_dp of them to
an engine. The result is printed as a table, written as JSON, and with --tracking-uri added to the
run's MLflow run. A run's config may be somebody else's: code that it names is run only with
--trust-run.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from spmdrl import config
from spmdrl.check.settings import validate
from spmdrl.config import Config, load_yaml
from spmdrl.config.read import read, refuse, take_config_flags
from spmdrl.errors import Refusal, say
from spmdrl.imports import attempt, is_missing_folder
from spmdrl.rewards.signatures import reward_models
from spmdrl.tools.commands import typed
from spmdrl.tools.foreign_code import named_code, refuse_code
from spmdrl.world.own_runs import is_own

if TYPE_CHECKING:  # and in the functions: `--help` needs none of it
    from spmdrl.evaluate import Result
    from spmdrl.world.world import World


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    """Flags in addition to those of the config."""

    out: Path = Path()
    """JSON file to write; by default evaluation_MODEL.json in this folder."""
    right_at: float = 1.0
    """Reward from which a sample counts as right in pass@k and maj@n, task units."""
    which: Literal["last", "best"] = "last"
    """Of a run's checkpoints: the newest whole one, or the best by checkpoint.keep."""
    trust_run: bool = False
    """Run the reward functions, environments and tools that the run's own config names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tracking_uri: str = ""
    """Add the result to the run's MLflow run, which is at this URI."""


@dataclass(frozen=True, kw_only=True)
class CommandLine(EvaluateFlags):
    """The command line, read and checked."""

    model: str
    """Folder or hub name, as on the command line."""
    is_checkpoint: bool
    """Whether it is a checkpoint or a run's folder."""
    cfg: Config
    """Config to evaluate with: colocated on all ranks, model.path still `model`."""


def parse(argv: Sequence[str], *, world_size: int) -> CommandLine:
    """Read the command line.

    Raises: Refusal for a model that is none, for a run without its config, and for a config that
        cannot be evaluated with, with every problem listed.
    """
    prog = f"{typed('evaluate')} MODEL"
    if {"-h", "--help"} & set(argv):
        read(["--help"], prog=prog, own=EvaluateFlags)
    if not argv or argv[0].startswith("-"):
        raise Refusal(
            "the first argument is what to evaluate: a model's folder or hub name, a "
            "run's folder, or a checkpoint"
        )
    model = argv[0]
    own, rest = tyro.cli(EvaluateFlags, args=argv[1:], add_help=False, return_unknown_args=True)
    paths, flags = take_config_flags(rest)
    is_checkpoint = _is_checkpoint(model)
    if paths or not is_checkpoint:
        cfg = read(rest, prog=prog)
    else:
        paths = [str(_config_of(Path(model)))]
        cfg = read(rest, prog=prog, default=load_yaml(paths[0]))
        cfg = _trusted(cfg, flags, file=Path(paths[0]), own=own)
    if own.which == "best" and not is_checkpoint:
        raise Refusal(f"--which best: {model} is a model, not a run that keeps its best one")
    if cfg.objective.is_scalar and is_checkpoint:
        raise Refusal(f"{model} is a reward model, which answers nothing; evaluate a policy")
    if left_out := reward_models(cfg.rewards.functions):
        names = ", ".join(left_out.values())
        say(
            f"reward models score on a run's trainers and are left out here: {names}",
            file=sys.stderr,
        )
    cfg = evaluation_config(cfg, model=model, world_size=world_size)
    refuse(_problems(cfg), argv=[*(f"--config={path}" for path in paths), *flags])
    if own.out == Path():
        name = Path(model).resolve().name if Path(model).exists() else model.replace("/", "_")
        own = replace(own, out=Path(f"evaluation_{name}.json"))
    return CommandLine(**vars(own), model=model, is_checkpoint=is_checkpoint, cfg=cfg)


def _trusted(cfg: Config, flags: Sequence[str], *, file: Path, own: EvaluateFlags) -> Config:
    """Return a run's config with the trust that the command line gives, unless the run is this
    user's own.

    Args:
        cfg: read from the run's config file and the flags.
        flags: of the config's fields, which may name code too.
    Raises: Refusal naming the code that the run's own config would have this command run.
    """
    words = [word for word in flags if word.startswith("--")]
    fields = tuple(word.partition("=")[0][2:].replace("-", "_") for word in words)
    sets_trust = any(name.startswith("model.trust_remote_code") for name in fields)
    code = [] if own.trust_run else named_code(cfg)
    if fields:
        code = [text for text in code if not text.startswith(fields)]
    of_model = cfg.model.trust_remote_code and not (sets_trust or own.trust_remote_code)
    refuse_code(code, file, of_model=of_model, otherwise=", or set these fields yourself")
    if sets_trust or is_own(file)[0]:
        return cfg
    return replace(cfg, model=replace(cfg.model, trust_remote_code=own.trust_remote_code))


def _problems(cfg: Config) -> list[str]:
    """Return what is wrong with the config, by the names of this command's fields."""
    if not cfg.data.eval:
        return ["data.eval: is empty; name held-out rows, e.g. --data.eval problems.jsonl"]
    return [
        problem.replace("data.train", "data.eval").replace("data.size", "data.eval_size")
        for problem in validate(cfg)
    ]


def _is_checkpoint(model: str) -> bool:
    from spmdrl.checkpoint import manifest as disk

    path = Path(model)
    if (path / "config.json").is_file():
        return False
    if (
        (path / disk.NAME).is_file()
        or (path / "config.yaml").is_file()
        or any(disk.complete_checkpoints(p) for p in (path, disk.checkpoints_folder(path)))
    ):
        return True
    if path.is_dir():
        raise Refusal(
            f"{model} has neither config.json (a model) nor config.yaml (a run) nor manifest.json "
            "(a checkpoint)"
        )
    if is_missing_folder(model):
        raise Refusal(f"{model} does not exist (looked from {Path.cwd()})")
    return False  # a hub name


def _config_of(path: Path) -> Path:
    """Return the config file of a run, by its folder or a checkpoint of it."""
    folder = _run_folder(path)
    if folder is None:
        raise Refusal(
            f"{path} lies in no run's folder: there is no config.yaml there or above; "
            "give one by --config"
        )
    return folder / "config.yaml"


def _run_folder(path: Path) -> Path | None:
    places = (path.resolve(), *path.resolve().parents[:2])
    return next((place for place in places if (place / "config.yaml").is_file()), None)


def evaluation_config(cfg: Config, *, model: str, world_size: int) -> Config:
    """Return a config with what generating and rewarding need of a training one."""
    rewards = cfg.rewards
    models = reward_models(rewards.functions)  # these score on trainers
    scored = [i for i in range(len(rewards.functions)) if i not in models]
    unset = config.RolloutSettings()
    # Settings of the training rows alone would be refused without these rows.
    sources = cfg.data.sources("eval")
    options = cfg.data.task_options
    if not any(source.is_generated and source.task_options == options for source in sources):
        options = {}
    return Config(
        seed=cfg.seed,
        deterministic=cfg.deterministic,
        dry_run=cfg.dry_run,
        steps=1,
        layout=replace(
            cfg.layout,
            placement="colocated",
            world_size=world_size,
            trainer_ranks=1,
            dp_replicate=1,
            cp=1,
            ep=1,
            tp=1,
        ),
        model=config.ModelSettings(
            path=model, tokenizer=cfg.model.tokenizer, trust_remote_code=cfg.model.trust_remote_code
        ),
        # The training rows are not needed, and may be on another machine.
        data=replace(
            cfg.data,
            train=cfg.data.eval,
            size=cfg.data.eval_size,
            task_options=options,
            columns={} if all(source.is_generated for source in sources) else cfg.data.columns,
        ),
        batch=config.BatchSettings(prompts_per_step=1, tokens_per_microbatch=cfg.longest_sequence),
        sampling=cfg.sampling,
        engine=cfg.engine,
        evaluate=cfg.evaluate,
        # The sources of data.eval bring their own environments.
        rollout=replace(
            cfg.rollout,
            environment=cfg.environment_fields("eval").get("rollout.environment", {}),
            schedule=unset.schedule,
            record=unset.record,
            replay_schedule="",
            serve=0,
        ),
        rewards=replace(
            rewards,
            shaping=config.ShapingSettings(),
            functions=tuple(rewards.functions[i] for i in scored),
            weights=tuple(rewards.weights[i] for i in scored) if rewards.weights else (),
        ),
    )


def run(request: CommandLine, world: World) -> Result:
    """Build the engines, sample, and leave the job. Every rank calls it.

    Raises: Refusal for a checkpoint, model, data or reward function that cannot be used;
        RewardFailed naming the sample when a reward fails under on_failure=fail.
    """
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.engine import make_engine
    from spmdrl.evaluate import Result, sample
    from spmdrl.rollout import make_source

    with _model_folder(request, world) as (folder, step):
        cfg = replace(request.cfg, model=replace(request.cfg.model, path=folder))
        if request.is_checkpoint:  # its export has the tokenizer
            cfg = replace(cfg, model=replace(cfg.model, tokenizer=""))
        source = make_source(cfg, world, tokenizer=load_tokenizer(cfg))
        engine = make_engine(cfg, world)
        outcomes = sample(source, engine, world=world, step=step)
        source.close()
        engine.close()
    return Result(step, outcomes)


@contextlib.contextmanager
def _model_folder(request: CommandLine, world: World) -> Iterator[tuple[str, int]]:
    """Yield the folder or hub name of the model, and its step. A checkpoint is exported first, into
    a folder that is removed at the end."""
    if not request.is_checkpoint:
        yield request.model, 0
        return
    from spmdrl.checkpoint.keep import named
    from spmdrl.checkpoint.manifest import whole_checkpoint
    from spmdrl.tools.commands.export import export

    with contextlib.ExitStack() as stack:

        def exported() -> tuple[str, int]:
            checkpoint, content = whole_checkpoint(named(Path(request.model), request.which))
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            export(
                checkpoint,
                out=out,
                # As the weight stream does it: masters are cast to the engine's dtype.
                dtype=request.cfg.engine.dtype,
                trust_remote_code=request.cfg.model.trust_remote_code,
            )
            return str(out), content.step

        folder, step = world.from_rank_0(exported, wait="export checkpoint")
        if not Path(folder).is_dir():
            raise Refusal(
                f"{socket.gethostname()} does not see {folder}, where rank 0 put the model of the "
                "checkpoint; on several machines export it by `python -m spmdrl export` to a "
                "folder that all see, and evaluate that"
            )
        yield folder, step


def _show(request: CommandLine, result: Result) -> None:
    """Print the table, write the files, and add them to the MLflow run of a run's folder."""
    from spmdrl.evaluate import table, write
    from spmdrl.report.trackers.mlflow_tracker import log_files, tracking_uri

    say(table(result.outcomes, samples=request.cfg.evaluate.samples, right_at=request.right_at))
    files = write(request.out, request.cfg, result, model=request.model, right_at=request.right_at)
    say(f"written to {' and '.join(map(str, files))}")
    if not request.is_checkpoint:
        return
    folder = _run_folder(Path(request.model))
    uri = tracking_uri(folder)
    if not uri:
        say("the run has no MLflow run to add them to")
    elif uri != request.tracking_uri:
        say(f"the run's MLflow run is at {uri}; to add them there, give --tracking-uri {uri}")
    else:
        # The files are written: a tracker that is down is no reason to fail.
        _, error = attempt(lambda: log_files(folder, files), Exception)
        say(f"and to MLflow at {uri}" if error is None else f"MLflow did not take them: {error}")


def main() -> None:
    """Do what the command line says, and end this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse(["--help"], world_size=1)
    # Below the help: these load torch.
    from spmdrl.world.launch import launch_alone, read_launch
    from spmdrl.world.leaving import end_process, report_end
    from spmdrl.world.world import World

    launch_alone()
    world = None
    status = 0
    try:
        request = parse(sys.argv[1:], world_size=read_launch().world_size)
        if request.cfg.dry_run:
            say(config.dump(request.cfg))
        else:
            world = World.start(request.cfg)
            result = run(request, world)
            if world.rank == 0:
                _show(request, result)
            world.close()
    except Exception as error:
        status = report_end(error, world)  # says why, here and to the other ranks
    end_process(status)
