"""Every field of a config, with unit, default and reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro
import yaml

from spmdrl.config.objectives import OBJECTIVES, Objective
from spmdrl.config.placements import PLACEMENTS, Placement


def _options_of(words: list[str]) -> dict:
    options = yaml.safe_load(words[0])
    if not isinstance(options, dict):
        raise ValueError(f"expected a mapping such as '{{name: 1.5}}', got {words[0]!r}")
    return {name: option_value(value) for name, value in options.items()}


def option_value(value: Any) -> Any:
    """Return an option as it is meant: YAML 1.1 reads 1e-8 as text, for want of a dot."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _text_of(options: dict) -> list[str]:
    return [yaml.safe_dump(options, default_flow_style=True, width=1000).strip()]


# As one YAML mapping: tyro would offer only the keys that the file already has.
_mapping = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="{NAME: VALUE}",
    instance_from_str=_options_of,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=_text_of,
)
Options = Annotated[dict[str, bool | int | float | str], _mapping]
NestedOptions = Annotated[dict[str, Any], _mapping]


@dataclass(frozen=True)
class Layout:
    """Which ranks train, which generate, and how each role is split."""

    placement: Literal["split", "colocated", "offline"] = "split"
    """`split`: ranks [0, trainer_ranks) train, the others generate. `colocated`: every rank
    does both in turns. `offline`: every rank trains on a dataset, or on recorded rollouts; no
    engine is built."""
    world_size: int = 2
    """Number of ranks. Must equal what the launcher started; written down here so that a
    layout can be checked without starting one."""
    trainer_ranks: int = 1
    """Ranks that train under `split` placement. Ignored otherwise (all ranks train)."""
    dp_replicate: int = 1
    """Copies of the sharded policy (HSDP). The dp_shard axis takes the ranks that
    dp_replicate, cp and tp leave: dp_shard = trainers / (dp_replicate * cp * tp)."""
    cp: int = 1
    """Context-parallel ranks: each computes a slice of every packed row, so that sequences may
    be as long as these ranks together hold. They also share the shards of dp_shard."""
    ep: int = 1
    """Expert-parallel ranks of a mixture of experts, taken from the dp_shard * cp * tp ranks: each
    has some of the experts of a layer, and tokens travel to them. Must divide dp_shard * cp * tp
    and the number of experts."""
    tp: int = 1
    """Tensor-parallel ranks of the policy, by the model's own plan. Between attention and MLP they
    shard the tokens (sequence parallelism) if blocks are those two and norms; else a log tells.
    Experts are not split by it: each rank sends its own tokens to them, see ep."""
    inference_tp: int = 1
    """Tensor-parallel ranks of one engine replica. Replicas = inference ranks / this."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live. `auto` takes CUDA when this machine has it."""
    wait_timeout_s: float = 600.0
    """Seconds that one named cross-rank wait may take before the job reports who is missing
    and ends. Longer than the slowest generation phase."""
    startup_timeout_s: float = 1800.0
    """The same for waits before the first step: model loading and compilation are slow."""

    @property
    def roles(self) -> Placement:
        """What `placement` means."""
        return PLACEMENTS[self.placement]


@dataclass(frozen=True)
class Model:
    """The policy's weights and how the trainer computes with them."""

    path: str = ""
    """Local Hugging Face folder, or a hub name. Required."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer; empty means the model's own."""
    reference: str = ""
    """Policy that KL terms and preference losses compare with, frozen unless reference_options
    say otherwise; empty means `path`, the policy as training began. Loaded, sharded like the
    policy, only if a method needs it."""
    teacher: str = ""
    """Model that distillation follows; it must share the policy's tokenizer."""
    reference_options: Options = field(default_factory=dict)
    """What becomes of the reference. {sync_every: 100, sync_mix: 0.6}: every 100 steps it takes
    0.6 of the policy and keeps 0.4 of itself (TR-DPO; sync_mix is 1 if left out: it becomes the
    policy). {cache: true}, offline: its logprobs of all rows are found once, before training,
    and read from output_dir/reference_logprobs; the reference is freed. {cache: FOLDER} keeps
    them there, for other runs with the same reference to use."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of forward and backward. Master weights and optimizer state are float32, unless
    memory says otherwise."""
    kernels: Options = field(default_factory=dict)
    """How it computes, where that differs from {attention: auto, context: auto, liger: true,
    compile: false}. attention: packed, by torch's `varlen` or by `flash` (flash-attn; both CUDA),
    or `padded` SDPA (any device); auto is varlen on CUDA and padded on the CPU. context: how ranks
    of layout.cp exchange in attention: `ulysses`, whole sequences of some heads; `gather`, the
    row's keys and values for a few heads at a time; `ring`, keys and values from rank to rank; auto
    is ulysses if cp divides the heads, and gather if not.
    liger: its kernels for RMSNorm, RoPE and SwiGLU, on CUDA. compile: torch.compile each block,
    which pays on CUDA after a minute."""
    moe: Options = field(default_factory=dict)
    """What the routers of a mixture of experts do in training; empty: the load is not balanced, and
    they choose by themselves. {balance: aux, coef: 0.001}: balanced by Switch's loss, over the
    global batch, for one more forward pass per update. {balance: bias, rate: 0.001}: by the
    routers' correction bias, for families that have one, such as deepseek_v3; it moves by rate
    after each update, up where the load is below the mean. replay: true, with any balance: the
    engine's choice of experts is recorded, and made again in the trainer's passes over the
    samples (docs/moe.md)."""
    memory: Options = field(default_factory=dict)
    """What is spared, where that differs from {activation_checkpointing: none, offload: none,
    head_chunk_tokens: 0, master_dtype: float32, optimizer_dtype: float32, reshard: auto, reduce:
    each, prefetch: auto}. activation_checkpointing: full recomputes each block in the backward
    pass: about a third more time, far less memory; selective keeps the products of its linear
    layers and its attention, and recomputes what is cheap. offload: what waits in host memory while
    it is not needed: activations (of blocks, for the backward pass), optimizer (AdamW's state; CUDA
    only), all (both) or parameters (shards, gradients and AdamW's state, by FSDP2's
    CPUOffloadPolicy; CUDA only): each block's weights then come over the bus for each pass.
    master_dtype: of the weights between updates, and of their gradients; in bfloat16 updates are
    rounded stochastically, so that small ones are not lost. optimizer_dtype: of AdamW's two
    moments, float32, bfloat16 or int8: torchao's blocks of 256 elements in 8 bits, of tensors of
    4096 elements or more (pip install --no-deps torchao==0.18.0); the update itself is float32. A
    weight with gradient and moments takes 16 bytes, and 8 if both are bfloat16. head_chunk_tokens:
    positions whose logits exist at once, each vocabulary * 4 bytes; 0 takes as many as have 512
    MiB. reshard: whether a block's weights, gathered by FSDP2 in compute_dtype, are freed between
    forward and backward pass: `always`, `auto` (not the last block's, which are needed next) or
    `never`, which gathers them once per micro-batch instead of twice and has the whole model on
    each rank meanwhile. reduce: `each` micro-batch's gradients go to their shards, or the `last`
    one's with all before: one reduction per update for a float32 of every weight on each rank (tp
    and ep divide them). prefetch: blocks whose weights are asked for ahead, in memory for as many
    more; auto is 1 on CUDA with ep, whose host waits within a block, and 0, FSDP2's own order,
    elsewhere.
    None of these three changes what is computed; under `last` sums are in another order."""
    lora: NestedOptions = field(default_factory=dict)
    """Train low-rank adapters and nothing else (arXiv 2106.09685), e.g. {rank: 16}; empty trains
    all weights. Left out: {rank: 16, alpha: 32, targets: all-linear, use_rslora: false, init:
    kaiming, push: merged}. targets: all linear layers of the blocks and all their experts, or as
    PEFT's target_modules and target_parameters a list of names (or their ends: experts,
    down_proj, embed_tokens) or one regular expression. An update is scaled by alpha / rank, or by
    alpha / sqrt(rank) under use_rslora. init of the A matrices: kaiming or gaussian; B starts at
    zero. {path: FOLDER} starts from an adapter in PEFT's format, which says all the rest but push.
    The model's own weights are frozen, in compute_dtype, and no part of checkpoints. push: merged
    sends engines the weights with the adapters in them at each step; adapter sends them the weights
    once and then A and B alone, with which vLLM computes itself (not of mixtures). Without
    model.reference the reference is the policy without its adapters: no second model. The section
    critic trains in full."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Only for folders you trust."""


@dataclass(frozen=True)
class Data:
    """Rows that prompts (or supervised examples) come from."""

    train: str = ""
    """JSONL or parquet file, a hub dataset name, or a generated task:
    `task:addition`, `reasoning_gym:NAME`. Required."""
    eval: str = ""
    """Held-out rows for evaluation, same forms; empty switches evaluation off."""
    task_options: Options = field(default_factory=dict)
    """Keyword options of a generated task, e.g. {digits: 3}."""
    size: int = 0
    """Rows to take: required for a generated task, 0 means all rows of a file."""
    eval_size: int = 256
    """Held-out rows to take from `eval`; 0 means all."""
    shuffle: bool = True
    """New order each epoch, a function of (seed, epoch) alone."""
    max_prompt_tokens: int = 1024
    """Longest prompt in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """A prompt above max_prompt_tokens stops the run at start, or is dropped and counted."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies it to message lists and leaves plain strings alone."""


@dataclass(frozen=True)
class Batch:
    """How much one step generates and how it is cut for training."""

    prompts_per_step: int = 64
    """Prompts sampled per step; in SFT, rows per step."""
    group_size: int = 8
    """Responses sampled per prompt."""
    tokens_per_microbatch: int = 16384
    """Token budget of one forward pass on one dp rank. At least the longest sequence. 0: found
    before the first step, by forward and backward passes over rows of growing size, as many as
    leave a tenth of the free memory; a resumed run repeats it on the same layout and model."""
    updates_per_step: int = 1
    """Optimizer steps per batch (mini-batches). Above 1, old logprobs get a pass of their
    own; at 1 they are the current ones and the ratio is exactly 1."""


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn in training."""

    temperature: float = 1.0
    """Softmax temperature. The trainer scores at the same temperature."""
    max_response_tokens: int = 512
    """Longest response in tokens; longer ones are cut and marked truncated."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response besides the tokenizer's eos and the model's own: those of
    its generation_config.json, or of its config.json where there is none."""


@dataclass(frozen=True)
class Algorithm:
    """The objective: names from `spmdrl.algorithms`, or `module:function` of your own."""

    objective: Literal["rl", "sft", "preference", "reward_model", "distill"] = "rl"
    """`rl` samples and rewards; `sft` fits the rows' responses; `preference` compares the
    chosen and rejected responses of rows; `reward_model` trains a scalar head on such pairs;
    `distill` follows `model.teacher` on the rows' responses."""
    advantage: str = "grpo"
    """Advantage estimator."""
    advantage_options: Options = field(default_factory=dict)
    """Its keyword options."""
    loss: str = "ppo_clip"
    """Policy loss. `sft` uses `sft`; `preference` needs one of its own: dpo, kto, simpo, orpo,
    cpo, sppo, nca, apo_zero, apo_down, bco; `reward_model` takes bradley_terry, `distill`
    divergence or distill_topk."""
    loss_options: Options = field(default_factory=dict)
    """Its keyword options, e.g. {clip_low: 0.2, clip_high: 0.28}."""
    aggregation: Literal[
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "prompt_mean",
    ] = "token_mean"
    """How per-token terms become one number; all denominators are global."""
    correction: str = "tis"
    """Engine/trainer mismatch weights, or `none`. `tis` (each token's ratio cut at 2) serves lag
    0 and 1; for longer lags take `icepop` or `mis`, which leave far tokens out. The log warns
    when the measured ratios say that the choice is not enough."""
    correction_options: Options = field(default_factory=dict)
    """Its keyword options, e.g. {level: token, upper: 2.0}."""
    kl: str = "k3"
    """Estimator of the KL to the reference: `k1`, `k2` or `k3`."""
    kl_options: Options = field(default_factory=dict)
    """Its keyword options, e.g. {unbiased: true}. Beside them {target: 0.01, horizon: 10000}
    holds the KL at 0.01 nats per token: kl_coef, the first value, moves after each step, by at
    most a fifth per 10000 samples."""
    kl_coef: float = 0.0
    """Weight of the KL to `model.reference`, per token in nats; 0 needs no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or taken off the rewards (where k1 is usual)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per token in nats."""
    entropy_options: Options = field(default_factory=dict)
    """{keep_frac: 0.2}: only the fifth of the batch's tokens with the highest entropy enters the
    policy loss. {target: 0.2, delta: 0.005, lower: 0, upper: 0.1}: entropy_coef, the first
    value, moves by delta after each step, up while the entropy is below target; above it there
    is no bonus. Both may be given."""
    mask_truncated: bool = False
    """Leave responses cut at max_response_tokens out of the loss (DAPO overlong filter)."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    options: Options = field(default_factory=dict)
    """AdamW's own, where they differ from {beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0}.
    The decay is decoupled, and of matrices only (norms, biases and embeddings excluded)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    schedule_options: Options = field(default_factory=dict)
    """{warmup_steps: 10}: steps of linear warm-up from 0, none if left out. {min_lr_frac: 0.1}:
    final learning rate as a fraction of lr, under linear and cosine; 0.1 if left out."""
    max_grad_norm: float = 1.0
    """Global gradient-norm bound; 0 switches clipping off."""


@dataclass(frozen=True)
class Critic:
    """The model that an advantage asks for and that is trained beside the policy, sharded like
    it, with the rest of `optimizer`: the value model of `gae`, which learns the returns, or the
    implicit process reward model of `prime`, which learns the outcomes. Ignored, warm-up too,
    under an advantage that asks for neither."""

    path: str = ""
    """Folder or hub name it starts from: a causal LM with the policy's tokenizer, or for `gae`
    a model with a scalar head. Empty means model.path. A head that is not there starts at
    zero."""
    lr: float = 1e-5
    """Peak learning rate. Ten times the policy's default: a head starts from nothing. `prime`
    has none; its paper takes 1e-6."""
    options: Options = field(default_factory=dict)
    """{warmup_steps: 10}: first steps that train this model alone, since advantages of a model
    that knows nothing mislead; the policy's schedule counts them, its metrics are absent in them.
    {clip: 0.2}: most that `gae`'s value of a state may move in the updates of one batch, task
    units (PPO's value clipping). 0, if left out, clips nothing: in task units no one number suits
    all rewards, it acts only above one update per batch, and arXiv 2006.05990 finds that it
    hurts."""


@dataclass(frozen=True)
class Engine:
    """The engine of an inference rank."""

    kind: Literal["vllm", "transformers"] = "vllm"
    """`transformers` generates with the model's own modules, one rank to an engine, where vLLM
    does not run."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the engine's weights; trainer shards are cast to it by the sender."""
    gpu_memory_frac: float = 0.85
    """Share of GPU memory for weights and KV cache; CUDA only. Colocated, the engine has it while
    it generates, beside the trainers' weights and optimizer state: leave room for these. During
    updates it sleeps (vLLM with options {enable_sleep_mode: true}, the default there; transformers
    frees its cache), unless requests are unfinished (over_sample), and its memory is theirs."""
    cpu_kv_cache_gib: float = 0.5
    """KV cache size on the CPU, GiB per rank."""
    max_num_seqs: int = 256
    """Sequences decoded together in one replica; fewer where the KV cache has no room. To
    `transformers` every sequence is as long as prompt and response may be."""
    max_batched_tokens: int = 8192
    """Token budget of one engine step."""
    options: Options = field(default_factory=dict)
    """Further arguments of vLLM's engine alone, by their names in `EngineArgs`, e.g.
    {enforce_eager: true} (no CUDA graphs and no compilation; always so on the CPU) or
    {enable_prefix_caching: false} (by default the samples of a prompt share its prefill).
    {quantization: fp8_per_channel} makes an engine of another precision of the weights sent; the
    gap to the trainers then needs algorithm.correction, and a higher stream.max_logprob_gap."""
    seed_per_request: bool = True
    """Key every sample by (seed, step, prompt, sample): same tokens whatever rank draws them.
    Costs vLLM about 8% of throughput at 256 sequences, and `transformers` nothing."""


@dataclass(frozen=True)
class Stream:
    """Weights from trainer shards into engine storage."""

    bucket_bytes: int = 64 * 2**20
    """Bytes of one bucket; extra memory is two buckets in flight per rank and role."""
    mode: Literal["auto", "traced", "reload"] = "auto"
    """`traced` writes slices in place and refuses what it cannot prove; `reload` sends whole
    tensors through the engine's own loader; `auto` traces and falls back, saying why."""
    verify_every: int = 0
    """Compare per-chunk checksums every N pushes; 0 means after the first push only."""
    max_logprob_gap: float = 0.1
    """Largest allowed mean |engine - trainer| logprob on the start-up probe, in nats."""


@dataclass(frozen=True)
class Rollout:
    """How responses come about beyond one answer per prompt and one burst per step."""

    schedule: Options = field(default_factory=dict)
    """Departures from "a step samples its prompts to the end". {in_flight: true}, with lag 1 or
    more and split placement: engines take new weights between two tokens as soon as the trainers
    are done, and go on; every token keeps the version that sampled it. {over_sample: 1.5}: half
    as many groups more are under way than a step needs; the first that are complete make it, the
    others go on into the next steps. For both, {kv_cache: keep} leaves the cache of unfinished
    sequences as older weights made it, instead of making a new one. {max_staleness: 2}: steps
    that a token may be old; the least that the rest needs if left out. {dynamic: 4}: groups
    whose rewards are all the same are replaced (DAPO); the run ends with an error when a step has
    sampled 4 times its groups and is not full. {balance: length}: prompts are dealt out to engine
    replicas so that their expected lengths add up alike (prompt, and what its row's responses
    measured before); {balance: steal}: besides, a replica that is done early takes over prompts
    of another; {balance: even}: by number alone. Left out, it is steal under in_flight and
    over_sample, whose batches depend on timing anyway, and length otherwise. {curriculum: 0.25}:
    prompts that were always or never solved (reward 1) when last sampled are taken at a quarter
    of their turns."""
    environment: NestedOptions = field(default_factory=dict)
    """What answers the policy, for episodes of several turns: the name (built in: tools,
    guess_number, task, gym, verifiers; or `module:Class`, `path/file.py:Class`) and its options,
    e.g. {name: guess_number, high: 20}; see docs/environments.md. Empty: every response is
    final. A turn has rewards.timeout_s; {rewrites: keep} is for chat templates that would change
    earlier turns. sampling.max_response_tokens bounds a whole episode behind its opening."""
    record: Options = field(default_factory=dict)
    """{every: 10}: every 10th step's rollouts, with prompts, texts, logprobs and rewards, are kept
    in output_dir/rollouts, see docs/rollouts.md. {replay: FOLDER}: train on those that another
    run recorded, under placement `offline`: nothing is sampled, rewarded or evaluated."""


@dataclass(frozen=True)
class Rewards:
    """Reward functions and the processes that run them."""

    functions: tuple[str, ...] = ()
    """Each `module:function` or `path/file.py:function`, in verl's or TRL's signature; a
    generated task (`task:addition`), for its grader; or `model:PATH`, a reward model with a
    scalar head and the policy's tokenizer: its reward is the value after the last token. Models
    are sharded like the policy, on the trainer ranks; evaluation leaves them out. Empty means
    the generated task's own grader."""
    weights: tuple[float, ...] = ()
    """One weight per function; empty means 1 each."""
    workers: int = 1
    """Worker processes per engine replica. Where some fail or are stuck, half as many stand by
    and at most as many stand in."""
    timeout_s: float = 10.0
    """Wall-clock seconds for one sample; then its worker is killed and replaced."""
    on_failure: Literal["fail", "drop"] = "fail"
    """A reward that raises, hangs or is not a finite number: end the run, or drop the sample
    (counted, its group keeps the rest; a step that drops all samples ends the run)."""
    shaping: Options = field(default_factory=dict)
    """What becomes of a reward before training, not in evaluation: options of
    `algorithms/shaping.py`, e.g. {overlong_tokens: 128, overlong_penalty: 1.0,
    truncated_penalty: 0.5, scale: 1.0, clamp_low: -1.0}."""


@dataclass(frozen=True)
class Checkpoint:
    """Saving, resuming, exporting."""

    every_steps: int = 0
    """Save every N steps; 0 saves only at the end and on SIGTERM."""
    keep: Options = field(default_factory=lambda: {"last": 2})
    """{last: 2}: the newest two stay; 2 if left out. {best: eval/reward}: so does the best by
    this metric of the in-loop evaluation, the largest, or with {mode: min} the smallest; a new
    best is saved when it is found, whatever every_steps says. Its name is checkpoints/best."""
    resume: str = "auto"
    """`auto` takes the newest complete checkpoint of output_dir, `never` starts afresh (and
    refuses an output_dir that has checkpoints), else the path of one checkpoint folder."""
    allow_config_change: bool = False
    """Resume although fields that shape the result differ; the difference is printed."""


@dataclass(frozen=True)
class Evaluate:
    """Held-out evaluation inside the loop."""

    every_steps: int = 0
    """Evaluate every N steps and at the end; 0 switches it off."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    samples: int = 1
    """Responses per held-out prompt."""


@dataclass(frozen=True)
class Report:
    """What a person sees."""

    tracker: Literal["mlflow", "none"] = "mlflow"
    """`metrics.jsonl` is always written besides."""
    mlflow: Options = field(default_factory=dict)
    """Where MLflow writes: {uri: http://host:5000, experiment: sums, run_name: first}. Left out:
    a SQLite file in output_dir, `spmdrl`, and the name of output_dir."""
    aliases: Literal["none", "verl", "trl"] = "none"
    """Emit verl's or TRL's metric names besides ours, to overlay on their dashboards."""
    console: Options = field(default_factory=dict)
    """What is printed while it runs. {table_every: 5}: steps between two rows of the table.
    {samples_every: 50}: steps between printed sample responses; 0, if left out, prints none."""


@dataclass(frozen=True)
class Config:
    """One experiment. Every rank reads the same one; ranks compare it at start."""

    output_dir: str = "runs/default"
    """Checkpoints, logs, metrics and the resolved config go here."""
    seed: int = 0
    """Keys every random draw together with step, prompt and sample; never the rank."""
    steps: int = 100
    """Training steps (batches) in all."""
    lag: int = 0
    """Steps that generation runs ahead of training. 0 is on-policy; 1 overlaps generation
    with the update in split placement."""
    deterministic: bool = True
    """Deterministic kernels, so that a resumed run is bit-identical to one never killed."""
    dry_run: bool = False
    """Print the resolved config, the derived sizes, the mesh and the stream's size; stop."""
    layout: Layout = field(default_factory=Layout)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    sampling: Sampling = field(default_factory=Sampling)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    critic: Critic = field(default_factory=Critic)
    engine: Engine = field(default_factory=Engine)
    stream: Stream = field(default_factory=Stream)
    rollout: Rollout = field(default_factory=Rollout)
    rewards: Rewards = field(default_factory=Rewards)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluate: Evaluate = field(default_factory=Evaluate)
    report: Report = field(default_factory=Report)

    @property
    def objective(self) -> Objective:
        """What is known of `algorithm.objective`."""
        return OBJECTIVES[self.algorithm.objective]


def least_tokens(cfg: Config) -> int:
    """Return the tokens of the longest sequence, or pair of them: a micro-batch must hold it."""
    longest = cfg.data.max_prompt_tokens + cfg.sampling.max_response_tokens
    return 2 * longest if cfg.objective.trains_on_pairs else longest


def useful_tokens(cfg: Config) -> int:
    """Return the tokens of a dp rank's share of one update, were all its sequences the longest:
    a larger micro-batch would stay empty."""
    layout, batch = cfg.layout, cfg.batch
    rows = batch.prompts_per_step * (batch.group_size if cfg.objective.samples else 1)
    parts = len(trainer_ranks(cfg)) // (layout.cp * layout.tp) * batch.updates_per_step
    return -(-rows // max(1, parts)) * least_tokens(cfg)


def replay_folder(cfg: Config) -> str:
    """Return where recorded rollouts to train on are; empty for a run that samples its own."""
    return str(cfg.rollout.record.get("replay", ""))


def trainer_ranks(cfg: Config) -> list[int]:
    """Return the ranks that hold the policy."""
    layout = cfg.layout
    return list(layout.roles.trainer_ranks(layout.world_size, trainers=layout.trainer_ranks))


def inference_ranks(cfg: Config) -> list[int]:
    """Return the ranks that hold an engine."""
    layout = cfg.layout
    return list(layout.roles.inference_ranks(layout.world_size, trainers=layout.trainer_ranks))
