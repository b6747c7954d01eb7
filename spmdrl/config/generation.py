"""Settings of engines, the weight stream, rollouts and rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from spmdrl.config.engine_traits import ENGINE_TRAITS, EngineTraits
from spmdrl.config.options import NestedOptions
from spmdrl.config.ranges import (
    Fraction,
    InsideUnit,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Real,
    Seconds,
    Share,
    Tokens,
    within,
)


@dataclass(frozen=True)
class EngineSettings:
    """The engine of an inference rank."""

    kind: Literal["vllm", "transformers"] = "vllm"
    """`transformers` generates with the model's own modules, one rank per engine, where vLLM does
    not run."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the engine's weights; trainer shards are cast to it by the sender."""
    gpu_memory_frac: InsideUnit = 0.85
    """Share of GPU memory for weights and KV cache; CUDA only. Under `colocated` placement, leave
    room for the trainers' weights and optimizer state; see docs/engines.md."""
    cpu_kv_cache_gib: Positive = 0.5
    """KV cache size on the CPU, GiB per rank."""
    max_num_seqs: Annotated[int, within(1, 10**6)] = 256
    """Sequences decoded together in one replica, fewer if the KV cache is too small. `transformers`
    reserves the longest prompt and response for every sequence."""
    max_batched_tokens: Tokens = 8192
    """Token budget of one engine step."""
    options: NestedOptions = field(default_factory=dict)
    """Further arguments of vLLM's engine by their names in `EngineArgs`, e.g. {enforce_eager: true}
    (no CUDA graphs, no compilation; always so on the CPU); see docs/engines.md."""
    seed_per_request: bool = True
    """Key every sample by (seed, step, prompt, sample), so that every rank would draw the same
    tokens. Costs vLLM about 8% of throughput at 256 sequences, and `transformers` nothing."""

    exact: bool = False
    """Engine and trainer compute the same bits: the logprob that a token was sampled with is the
    one that the trainer computes for it, and a run in which they differ ends. On CPUs, at lag 0;
    see docs/exact.md."""

    @property
    def traits(self) -> EngineTraits:
        """What engines of this kind can do."""
        traits = ENGINE_TRAITS[self.kind]
        return replace(traits, has_own_models=False) if self.exact else traits

    @property
    def draft_tokens(self) -> int:
        """Most tokens of a sequence that vLLM drafts for one step; 0 without speculative decoding,
        and where check/engine_options.py refuses its settings."""
        asked = self.options.get("speculative_config")
        number = asked.get("num_speculative_tokens") if isinstance(asked, dict) else 0
        return number if isinstance(number, int) else 0


@dataclass(frozen=True)
class StreamSettings:
    """The weight stream, from trainer shards into engine storage."""

    bucket_bytes: Annotated[int, within(1024, 2**40, zero="to have it chosen")] = 0
    """Most bytes of one bucket. Two buckets per rank and role are in memory at once. 0 chooses the
    size from bytes, ranks and links, up to 512 MiB; see docs/stream.md."""
    mode: Literal["auto", "traced", "reload"] = "auto"
    """`traced` writes slices in place and refuses what it cannot prove; `reload` sends whole
    tensors through the engine's own loader; `auto` traces, and says why when it has to reload."""
    delta: Literal["auto", "always", "never"] = "auto"
    """Send only the elements that changed since the last push, in their new bits. Each trainer
    keeps a copy of what it sent, in the engine's dtype. `auto`: on CPUs, where `gbit_per_s` is so
    low that it saves time; see docs/stream.md."""
    full_every: Natural = 100
    """With `delta`, send everything every N pushes; 0 means at the first push, and where a checksum
    differs."""
    gbit_per_s: Annotated[float, within(1e-3, 1e5, zero="for that of the hardware")] = 0.0
    """What a rank can send over its slowest link, where that is not what the hardware's data sheet
    says. Sizes of buckets and `delta: auto` follow from it."""
    verify_every: Natural = 0
    """Compare per-chunk checksums every N pushes; 0 means after the first push only."""
    max_logprob_gap: Annotated[float, within(1e-9, 1000, zero="to have it chosen")] = 0.0
    """Largest allowed mean |engine - trainer| logprob on the start-up probe, in nats. 0 chooses
    0.1, or more where rounding is measured to be larger, up to 0.5 (docs/gpu.md)."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Departures from "a step samples its prompts to the end"."""

    in_flight: bool = False
    """Engines take new weights between two tokens, as soon as the trainers are done, and continue.
    The policy version of every token is kept. Needs lag 1 or more and split placement."""
    over_sample: Annotated[float, within(1, 1000)] = 1.0
    """Groups under way per group of a step: 1.5 samples half as many more. The first complete ones
    make the step, the others continue into later steps."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Cache of unfinished sequences after new weights: `keep` leaves what older weights wrote."""
    max_staleness: Natural | Literal["auto"] = "auto"
    """Most steps between sampling a token and training on it; `auto`: the least that works."""
    dynamic: Annotated[int, within(2, 10**4, zero="for off")] = 0
    """Replace groups whose rewards are all the same (DAPO). The run ends with an error if a step is
    not full after sampling this many times the groups of all steps under way; 0 switches it off."""
    balance: Literal["auto", "even", "length", "steal"] = "auto"
    """How prompts are divided among engine replicas. `even`: the same number each. `length`: about
    the same sum of expected lengths each, by the prompt and earlier responses to its row. `steal`:
    as `length`, and a replica that is done early takes over prompts of another. `auto`: `steal`
    where timing decides on the batch anyway, else `length`."""
    curriculum: Share = 1.0
    """Share of their turns in which prompts are taken that were always or never solved (reward 1)
    when last sampled; in (0, 1]."""

    @property
    def leaves_unfinished(self) -> bool:
        """Whether requests stay under way from step to step."""
        return self.over_sample > 1

    @property
    def mixes_versions(self) -> bool:
        """Whether weights may change while a response is under way."""
        return self.in_flight or self.leaves_unfinished

    @property
    def dealing(self) -> Literal["even", "length", "steal"]:
        """Return what `balance` means here. The replica that draws a sample decides the batch that
        it is computed in, and so the last bits of its logits. `auto` is `steal` only where timing
        decides on the batch anyway."""
        if self.balance != "auto":
            return self.balance
        return "steal" if self.mixes_versions else "length"

    @property
    def is_plain(self) -> bool:
        """Return whether all of this is off."""
        return self == ScheduleSettings()


@dataclass(frozen=True)
class RecordSettings:
    """Rollouts that are recorded, or replayed from another run (docs/rollouts.md)."""

    every: Natural = 0
    """Record every N-th step's rollouts, with prompts, texts, logprobs and rewards, in
    output_dir/rollouts; 0 records none."""
    replay: PathText = ""
    """A run's output_dir, or its folder of rollouts: train on these, under placement `offline`.
    Nothing is sampled, rewarded or evaluated."""


@dataclass(frozen=True)
class ContainerSettings:
    """A container for each episode of rollout.agent_command (docs/agents.md)."""

    image: str = ""
    """Image in which the command runs; it must be on the machine. Empty: no container."""
    program: Literal["auto", "docker", "podman"] = "auto"
    """What runs it; `auto` takes docker if it answers, else podman."""
    network: str = "none"
    """With `none` it reaches the policy and nothing else, and with the name of a network this one
    too; both need python3 in the image. `host`: the network of the machine."""
    memory_gib: Annotated[float, within(0, 2**20)] = 4.0
    """Most memory of a container, GiB; 0: no limit."""
    cpus: Annotated[float, within(0, 2**16)] = 1.0
    """Most processors' time that it gets; 0: no limit."""
    processes: Annotated[int, within(0, 2**22)] = 256
    """Most processes in it; 0: as many as docker or podman allow."""
    options: tuple[str, ...] = ()
    """Further arguments of `docker run`, e.g. `--volume=/data:/data:ro`."""


@dataclass(frozen=True)
class RolloutSettings:
    """Environments, agents, schedules and recordings of rollouts."""

    environment: NestedOptions = field(default_factory=dict)
    """Environment that answers the policy in episodes of several turns, by its name and options,
    e.g. {name: guess_number, high: 20}; docs/environments.md. Empty: every response is final."""
    agent: PathText = ""
    """Agent that calls the policy itself, over OpenAI's protocol: `module:function` or
    `path/file.py:function`, a function of a row and a client (`openai.AsyncOpenAI`)."""
    agent_command: tuple[str, ...] = ()
    """The same as a program: a command and its arguments. It finds OPENAI_BASE_URL, OPENAI_API_KEY,
    SPMDRL_ROW (file of the row, JSON) and SPMDRL_RESULT (file that it may write) in its
    environment."""
    agent_container: ContainerSettings = field(default_factory=ContainerSettings)
    agent_timeout_s: Seconds = 600.0
    """Wall-clock seconds for one episode of an agent; then it is killed, and its sample fails. Time
    in which the run answers no agent does not count: that of updates, and for agents of training
    samples that of evaluations."""
    agent_max_requests: Annotated[int, within(1, 10**6)] = 64
    """Most requests of an agent in one episode, a request with `n` counted n times. With more, its
    sample fails."""
    agent_tool_parser: str = "auto"
    """Format of the tool calls that agents get, see `make_parser`: `hermes`, `llama3`, `vllm:NAME`,
    or `auto`, that of the chat template."""
    agents_at_once: Annotated[int, within(1, 10**4, zero="to have it chosen")] = 0
    """Agents that run at a time, per engine replica. 0 chooses 32, or engine.max_num_seqs if that
    is less. Those of training samples that wait for the end of an evaluation are not counted."""
    serve: Annotated[int, within(0, 1024)] = 0
    """Answers that each engine replica draws at a time for other programs while the run trains,
    over OpenAI's protocol (docs/serving.md). They are not trained on. 0: no endpoint."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    record: RecordSettings = field(default_factory=RecordSettings)
    replay_schedule: PathText = ""
    """The output_dir of a run of the same config, whose decisions are repeated: which answers came
    when, when weights were exchanged, which replica took which prompts. So a run gives the same
    numbers although timing decides in it; see docs/schedules.md."""

    @property
    def has_agent(self) -> bool:
        """Return whether an agent makes the episodes, which may then have several traces."""
        return bool(self.agent or self.agent_command)

    @property
    def runs_agent(self) -> bool:
        """Return whether the agent runs: repeated decisions hold what it asked and returned."""
        return self.has_agent and not self.replay_schedule


@dataclass(frozen=True)
class ShapingSettings:
    """Changes of a reward before training, not in evaluation: penalties first, then shift, scale
    and bounds (algorithms/shaping.py). All but tokens and factors are in task units."""

    overlong_tokens: Annotated[int, within(0, 2**24)] = 0
    """Last tokens before the length limit, over which a penalty grows linearly (DAPO); 0: none."""
    overlong_penalty: NonNegative = 1.0
    """That penalty at the limit; 0 or more."""
    truncated_factor: Fraction = 1.0
    """Factor of a truncated response's positive reward, from 0 to 1."""
    truncated_penalty: NonNegative = 0.0
    """Subtracted from the reward of a truncated response; 0 or more."""
    shift: Real = 0.0
    """Added, before scale."""
    scale: Real = 1.0
    """Factor; not 0."""
    clamp_low: Annotated[float, within(-math.inf, math.inf)] = -math.inf
    """Least reward, after shift and scale; -.inf: no bound."""
    clamp_high: Annotated[float, within(-math.inf, math.inf)] = math.inf
    """Largest reward, after shift and scale; .inf: no bound."""

    @property
    def is_on(self) -> bool:
        """Return whether a reward may change."""
        return self != ShapingSettings()


@dataclass(frozen=True)
class JudgeSettings:
    """A judge for reward functions without a second model: the run's own engines answer them
    (docs/rewards.md). Its tokens are never trained on. A verdict must come within
    rewards.timeout_s."""

    engine: Literal["none", "base", "policy"] = "none"
    """Weights that judge: `base`, the frozen ones, with the policy's adapters switched off, under
    model.lora.push adapter; `policy`, the current ones, so that the policy judges itself."""
    max_prompt_tokens: Tokens = 2048
    """Longest question, with the chat template; a longer one fails its sample."""
    max_response_tokens: Tokens = 512
    """Longest verdict."""

    @property
    def is_on(self) -> bool:
        """Return whether engines judge."""
        return self.engine != "none"


@dataclass(frozen=True)
class RewardsSettings:
    """Reward functions and the processes that run them."""

    functions: tuple[PathText, ...] = ()
    """Each `module:function` or `path/file.py:function`, a generated task (`task:addition`), or
    `model:PATH`, a reward model; see docs/rewards.md. Empty: the generated task's grader."""
    weights: tuple[Real, ...] = ()
    """One weight per function; empty means 1 each."""
    scope: Literal["auto", "sample", "group", "step"] = "auto"
    """What functions of lists get in one call: a `sample` in lists of one, a whole `group`, or a
    `step`. auto: the group. A function's own attribute `scope` comes first; see docs/rewards.md."""
    workers: Annotated[int, within(1, 4096)] = 1
    """Worker processes per engine replica. Where some fail or are stuck, half as many stand by
    and at most as many stand in."""
    concurrency: Annotated[int, within(1, 4096, zero="for each function's own")] = 0
    """Calls that a worker may have under way at once, for functions that wait, say for a server:
    plain functions in threads of their own, so they must be safe in threads, `async def` in one
    event loop. 0: 32 of an `async def` function, one of a plain one. A function's own attribute
    `concurrency` comes first; see docs/rewards.md."""
    retries: Annotated[int, within(0, 100)] = 2
    """Further calls of a function after one that failed in a way that may pass: no connection, a
    timeout, HTTP status 429 or 503. Waits double from 0.5 s; all is within timeout_s."""
    timeout_s: Seconds = 10.0
    """Wall-clock seconds for one call, of a sample, a group or a step, with its retries; then its
    worker is killed and replaced, or, of several under way at once, the call is given up."""
    worker_memory_gib: Annotated[float, within(0.125, 10**6, zero="for no limit")] = 0.0
    """Memory that a worker and all that it starts may hold, GiB; above it a sample fails. 0 for no
    limit: what libraries need differs, and a worker is the kernel's victim before the trainer."""
    on_failure: Literal["fail", "drop"] = "fail"
    """A reward that raises, hangs or is not a finite number: end the run, or drop the sample, all
    of a group where it was called with them; see docs/rewards.md."""
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
