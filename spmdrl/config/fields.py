"""A config: one frozen dataclass of sections, and sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spmdrl.config.data import SPLITS, DataSettings, SourceSettings, Split
from spmdrl.config.generation import (
    EngineSettings,
    RewardsSettings,
    RolloutSettings,
    StreamSettings,
)
from spmdrl.config.method import AlgorithmSettings, CriticSettings, OptimizerSettings
from spmdrl.config.model import ModelSettings
from spmdrl.config.objectives import OBJECTIVES, Objective
from spmdrl.config.options import NestedOptions
from spmdrl.config.placements import PLACEMENTS, Placement
from spmdrl.config.ranges import (
    Count,
    Deadline,
    Fraction,
    Natural,
    PathText,
    Ranks,
    Samples,
    Share,
    Temperature,
    within,
)
from spmdrl.config.sampling import SamplingSettings
from spmdrl.config.trackers import (
    MlflowSettings,
    TensorboardSettings,
    TrackioSettings,
    WandbSettings,
)

OWN_TEACHERS = ("policy", "reference")
"""Teachers that are not a model of their own."""


@dataclass(frozen=True)
class LayoutSettings:
    """Which ranks train, which generate, and how each role is split."""

    placement: Literal["split", "colocated", "offline"] = "split"
    """`split`: ranks [0, trainer_ranks) train, the others generate. `colocated`: every rank does
    both in turns. `offline`: all train, on a dataset or recorded rollouts; no engine is built."""
    world_size: Ranks = 2
    """Number of ranks. Must equal the number that the launcher starts. It is in the config so that
    a layout can be checked without a launcher."""
    trainer_ranks: Ranks = 1
    """Ranks that train under `split` placement. Ignored otherwise (all ranks train)."""
    dp_replicate: Ranks = 1
    """Copies of the sharded policy (HSDP). The dp_shard axis takes the ranks that
    dp_replicate, cp and tp leave: dp_shard = trainers / (dp_replicate * cp * tp)."""
    cp: Ranks = 1
    """Context-parallel ranks: each computes a slice of every packed row, so that sequences may be
    longer than one rank can hold. The shards of dp_shard are divided among them too."""
    ep: Ranks = 1
    """Expert-parallel ranks of a mixture of experts: each has some of a layer's experts, and tokens
    travel to them. They are ranks of dp_shard * cp * tp, which it must divide, as the experts."""
    tp: Ranks = 1
    """Tensor-parallel ranks of the policy, by the model's own plan. If a block is attention, MLP
    and norms alone, tokens are sharded between these (sequence parallelism); if not, a log line
    says so. Experts are not split: each rank sends its tokens to them, see ep."""
    inference_tp: Ranks = 1
    """Tensor-parallel ranks of an engine. A replica has inference_tp * inference_dp ranks, so
    replicas = inference ranks / these."""
    inference_dp: Ranks = 1
    """Data-parallel attention inside an engine replica, for mixtures of experts in vLLM: each of
    these parts has attention and KV cache of its own, for its share of the replica's requests, and
    all ranks of the replica share the experts. Needs engine.options.enable_expert_parallel."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live. `auto` takes CUDA when this machine has it."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend: `auto` takes NCCL between GPUs, gloo between CPUs. `gloo` with device
    cuda sends every message through the host: slow and exact. With it several ranks can share one
    GPU, which NCCL refuses, so that a split run can be tried on it."""
    wait_timeout_s: Deadline = 600.0
    """Seconds that one named cross-rank wait may take before the job reports who is missing
    and ends. Longer than the slowest generation phase."""
    startup_timeout_s: Deadline = 1800.0
    """The same for waits before the first step, because models load and compile slowly."""

    @property
    def roles(self) -> Placement:
        """Return which ranks have which role under `placement`."""
        return PLACEMENTS[self.placement]

    @property
    def replica_ranks(self) -> int:
        """Return the number of ranks of one engine replica."""
        return self.inference_tp * self.inference_dp


@dataclass(frozen=True)
class BatchSettings:
    """How much one step generates and how it is cut for training."""

    prompts_per_step: Annotated[int, within(1, 10**6)] = 64
    """Prompts sampled per step; in SFT, rows per step."""
    group_size: Samples = 8
    """Responses sampled per prompt."""
    tokens_per_microbatch: Annotated[int, within(0, 2**30)] = 16384
    """Token budget of one forward pass on one dp rank, at least the longest sequence. 0: it is
    found before the first step, by forward and backward passes over growing rows, so that a tenth
    of the free memory is left; a resumed run finds it again for the same layout and model. Not for
    a vision model."""
    share_prefixes: Literal["auto", "never"] = "auto"
    """Compute a prefix that sequences of a micro-batch have in common once, forward and backward:
    the prompt of a group, or the turns of episodes that branch. `auto` shares prefixes of at least
    16 tokens, unless a model of the run cannot; the log says which. `never` computes each sequence
    whole."""
    updates_per_step: Annotated[int, within(1, 10**6)] = 1
    """Optimizer steps per batch (mini-batches). Above 1, old logprobs take a forward pass; at 1
    they are the current ones, and the ratio is exactly 1."""
    epochs: Annotated[int, within(1, 1000)] = 1
    """Epochs over a batch (PPO's epochs; verl's ppo_epochs, TRL's num_iterations). An update holds
    the same groups in each epoch; from the second epoch on the order of updates is drawn by (seed,
    step, epoch). Above 1, old logprobs take a forward pass."""

    @property
    def optimizer_steps(self) -> int:
        """Return the optimizer steps of the policy per batch."""
        return self.updates_per_step * self.epochs


@dataclass(frozen=True)
class KeepSettings:
    """Which checkpoints are kept."""

    last: Count = 2
    """Keep the newest N."""
    best: str = ""
    """Also keep the best one by this metric of the in-loop evaluation, e.g. eval/reward. A new best
    is saved when it is found, whatever every_steps says, and linked as checkpoints/best."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest value is the best, or the smallest."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Saving, resuming, exporting."""

    every_steps: Natural = 0
    """Save every N steps; 0 saves only at the end and on SIGTERM."""
    resume: PathText = "auto"
    """`auto` takes the newest complete checkpoint of output_dir; `never` starts at step 0 and
    refuses an output_dir that has checkpoints; anything else is the path of a checkpoint folder."""
    write_timeout_s: Deadline = 3600.0
    """Seconds to wait for a save to be on disk, at the end of a run or when the next one is due.
    It replaces layout.wait_timeout_s there, because disks may be slow."""
    allow_config_change: bool = False
    """Resume although fields that change the result differ; the difference is printed."""
    trust_pickles: bool = False
    """Resume episodes whose environments are pickled in the checkpoint. A pickle can run any code
    of its writer. Environments of plain data need no pickle, see docs/environments.md."""
    keep: KeepSettings = field(default_factory=KeepSettings)


@dataclass(frozen=True)
class EvaluateSettings:
    """Held-out evaluation inside the loop."""

    every_steps: Natural = 0
    """Evaluate every N steps and at the end; 0 switches it off."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Share = 1.0
    """As sampling.top_p, which holds in training alone."""
    top_k: Annotated[int, within(0, 2**31 - 1)] = 0
    """As sampling.top_k."""
    min_p: Fraction = 0.0
    """As sampling.min_p."""
    samples: Samples = 1
    """Responses per held-out prompt."""


@dataclass(frozen=True)
class ConsoleSettings:
    """What a run prints."""

    table_every: Count = 5
    """Steps between two rows of the table."""
    samples_every: Natural = 0
    """Steps between printed sample responses; 0 prints none."""


@dataclass(frozen=True)
class ProfileSettings:
    """Traces of single steps by torch.profiler, as Chrome traces in output_dir/profile."""

    steps: tuple[Natural, ...] = ()
    """Steps to trace, e.g. [20, 21]. Each is a file for each rank."""
    ranks: tuple[Natural, ...] = (0,)
    """Ranks that trace."""
    memory: bool = False
    """Also record the memory that each operation takes and frees."""
    stacks: bool = False
    """Also record the Python lines that called an operation, which makes steps much slower."""


@dataclass(frozen=True)
class ReportSettings:
    """Metrics, warnings and certificates."""

    trackers: tuple[Literal["mlflow", "wandb", "tensorboard", "trackio"], ...] = ("mlflow",)
    """Trackers of metrics, each with a section here; [] for none. `metrics.jsonl` is always written
    too."""
    aliases: Literal["none", "verl", "trl"] = "none"
    """Also log the metrics by their names in verl or TRL, for dashboards made for these."""
    warn_after: Natural = 5
    """Steps in a row that must show a problem before the log warns: nothing is learnt (no spread of
    rewards, a gradient of 0), entropy collapses, responses hit the limit, or the gap between engine
    and trainer grows. 0: no such warnings."""
    certificate: Natural = 1
    """Write digests of all numbers of every N-th step, and of the last one, to certificate.jsonl,
    by which `diff` and `verify` compare runs; 0 switches it off."""
    certificate_norms: Natural = 100
    """Also write norms for every N-th certified step and the last one. With norms, runs on two
    layouts can be compared, which are equal only up to rounding. 0: never."""
    layer_norms: Natural = 0
    """Every N-th step also record the norm of each layer's gradient, before clipping, as metrics
    `policy/grad_norm_layer/...`; the run's page draws them. A model of many layers has as many
    more metrics. 0: never."""
    mlflow: MlflowSettings = field(default_factory=MlflowSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)
    tensorboard: TensorboardSettings = field(default_factory=TensorboardSettings)
    trackio: TrackioSettings = field(default_factory=TrackioSettings)
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)


@dataclass(frozen=True)
class Config:
    """One experiment. Every rank reads the same config, and ranks compare it at start."""

    output_dir: PathText = "runs/default"
    """Checkpoints, logs, metrics and the resolved config go here."""
    seed: Annotated[int, within(0, 2**32 - 1)] = 0
    """Every random draw is keyed by it, step, prompt and sample, and never by the rank."""
    steps: Count = 100
    """Number of training steps (batches)."""
    lag: Annotated[int, within(0, 1000)] = 0
    """Steps that generation is ahead of training. 0 is on-policy; 1 overlaps generation with the
    update in split placement."""
    deterministic: bool = True
    """Use deterministic kernels, so that a resumed run is bit-identical to an uninterrupted one."""
    dry_run: bool | Literal["full"] = False
    """Print the derived sizes, the mesh, the stream's size and the problems, and stop. `full`: also
    the resolved config and the place of every rank."""
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    rewards: RewardsSettings = field(default_factory=RewardsSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    report: ReportSettings = field(default_factory=ReportSettings)

    @property
    def objective(self) -> Objective:
        """Return the properties of `algorithm.objective`."""
        return OBJECTIVES[self.algorithm.objective]

    @property
    def loss_name(self) -> str:
        """Return the name of the loss among those of `objective.loss_kind`."""
        return self.objective.only_loss or self.algorithm.loss

    def functions_of(self, source: SourceSettings) -> tuple[str, ...]:
        """Return the reward functions of a source's rows; none if its task or its environment alone
        decides their rewards."""
        if source.rewards or self.rewards.functions:
            return source.rewards or self.rewards.functions
        # If other sources have functions, a task's grader becomes one of them.
        is_one = source.is_generated and not self.environment_of(source)
        others = any(other.rewards for other in self.data.all_sources())
        return (source.path,) if is_one and others else ()

    def environment_of(self, source: SourceSettings) -> NestedOptions:
        """Return the environment of a source's rows, its name and options; {} if responses are
        final."""
        own = source.environment or self.rollout.environment
        # The only text is `none`.
        return {} if isinstance(own, str) else own

    def environments(self, *splits: Split) -> list[tuple[str, NestedOptions]]:
        """Return (field, environment) of each source of these splits, by default of all: the field
        that sets it, and its value; see `environment_of`."""
        return [
            (
                f"data.{split}[{i}].environment" if source.environment else "rollout.environment",
                self.environment_of(source),
            )
            for split in splits or SPLITS
            for i, source in enumerate(self.data.sources(split))
        ]

    def environment_fields(self, *splits: Split) -> dict[str, NestedOptions]:
        """Return {field: environment} of `environments`, without responses that are final."""
        return {field: options for field, options in self.environments(*splits) if options}

    def teacher_fields(self) -> dict[str, str]:
        """Return {field: teacher of some rows of data.train}: a path, `policy` or `reference`. See
        `teacher_of`."""
        sources = self.data.sources("train")
        own = {f"data.train[{i}].teacher": s.teacher for i, s in enumerate(sources) if s.teacher}
        is_shared = len(own) < max(1, len(sources))
        return ({"model.teacher": self.model.teacher} if is_shared else {}) | own

    def teacher_of(self, source: SourceSettings) -> str:
        """Return the teacher of a source's rows; empty for none."""
        return source.teacher or self.model.teacher

    @property
    def teachers(self) -> tuple[str, ...]:
        """Return the different teachers of data.train, in the order of `teacher_fields`."""
        return tuple(dict.fromkeys(filter(None, self.teacher_fields().values())))

    @property
    def teacher_paths(self) -> dict[str, str]:
        """Return {field: path} of the teachers that are models of their own, each once."""
        fields = {teacher: field for field, teacher in reversed(self.teacher_fields().items())}
        return {fields[path]: path for path in self.teachers if path not in OWN_TEACHERS}

    @property
    def hints_teacher(self) -> bool:
        """Return whether a teacher reads other prompts than the policy."""
        sources = self.data.sources("train")
        return any(source.teacher_prompt for source in sources) or bool(self.data.teacher_prompt)

    @property
    def agents_at_once(self) -> int:
        """Return how many agents run at a time, per engine replica."""
        return self.rollout.agents_at_once or min(32, self.engine.max_num_seqs)

    @property
    def reward_functions(self) -> tuple[str, ...]:
        """Return rewards.functions, and after them the functions of single sources."""
        own = [spec for source in self.data.all_sources() for spec in self.functions_of(source)]
        given = self.rewards.functions
        return (*given, *dict.fromkeys(spec for spec in own if spec not in given))

    @property
    def reward_weights(self) -> tuple[float, ...]:
        """Return the weight of each of `reward_functions`: 1 where rewards.weights has none."""
        functions = self.rewards.functions
        given = self.rewards.weights or (1.0,) * len(functions)
        return given + (1.0,) * (len(self.reward_functions) - len(functions))

    @property
    def sequences_per_row(self) -> int:
        """Return the sequences of a prompt or row: a group, a pair, or one."""
        if self.objective.samples:
            return self.batch.group_size
        if self.objective.trains_on_pairs:
            return 2
        return 1

    @property
    def longest_sequence(self) -> int:
        """Return the tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_tokens + self.sampling.max_response_tokens

    @property
    def longest_in_engine(self) -> int:
        """Return the tokens of the longest sequence of an engine, which may be a judge's."""
        judge = self.rewards.judge
        if not judge.is_on:
            return self.longest_sequence
        return max(self.longest_sequence, judge.max_prompt_tokens + judge.max_response_tokens)


def sequences_together(cfg: Config) -> int:
    """Return how many sequences must be in one micro-batch: a row's pair, or a whole group, two of
    which are compared by their rewards."""
    if not cfg.objective.trains_on_pairs:
        return 1
    return cfg.batch.group_size if cfg.objective.samples else 2


def least_tokens(cfg: Config) -> int:
    """Return the most tokens that one micro-batch must be able to hold."""
    return cfg.longest_sequence * sequences_together(cfg)


def useful_tokens(cfg: Config, *, dp_size: int = 0) -> int:
    """Return the tokens of a dp rank's share of the largest update, if all its sequences are as
    long as possible: a larger micro-batch would not be filled. An update takes whole groups.

    Args:
        dp_size: parts of a batch; 0 takes the layout's.
    """
    layout = cfg.layout
    batch = cfg.batch
    is_alone = cfg.objective.samples and not cfg.objective.trains_on_pairs
    groups = -(-batch.prompts_per_step // batch.updates_per_step)
    units = groups * (batch.group_size if is_alone else 1)
    dp_size = dp_size or len(trainer_ranks(cfg)) // (layout.cp * layout.tp)
    return -(-units // max(1, dp_size)) * least_tokens(cfg)


def replay_folder(cfg: Config) -> str:
    """Return the folder of recorded rollouts to train on; empty for a run that samples."""
    return cfg.rollout.record.replay


def trainer_ranks(cfg: Config) -> list[int]:
    """Return the ranks that hold the policy."""
    layout = cfg.layout
    return list(layout.roles.trainer_ranks(layout.world_size, trainers=layout.trainer_ranks))


def inference_ranks(cfg: Config) -> list[int]:
    """Return the ranks that hold an engine."""
    layout = cfg.layout
    return list(layout.roles.inference_ranks(layout.world_size, trainers=layout.trainer_ranks))
