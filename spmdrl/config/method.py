"""Settings of the objective, of the optimizer and of the model that trains beside the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spmdrl.config.options import Options
from spmdrl.config.ranges import (
    BelowOne,
    Coefficient,
    Count,
    Fraction,
    LearningRate,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Share,
    above,
    within,
)


@dataclass(frozen=True)
class KlControlSettings:
    """Hold the KL at a target: kl_coef is the first value and moves after each step, by at most a
    fifth per horizon (arXiv 1909.08593). Off unless both are set."""

    target: NonNegative = 0.0
    """KL to hold, nats per token."""
    horizon: NonNegative = 0.0
    """Samples over which the coefficient may change by a fifth."""

    @property
    def is_on(self) -> bool:
        """Whether the coefficient moves."""
        return self.horizon > 0


@dataclass(frozen=True)
class EntropyControlSettings:
    """Further control of the policy's entropy. With target and delta, entropy_coef is the first
    value and moves after each step; above the target there is no bonus."""

    keep_frac: Share = 1.0
    """Share of the batch's tokens, those with the highest entropy, that enter the policy loss;
    in (0, 1]."""
    target: NonNegative = 0.0
    """Entropy to hold, nats per token."""
    delta: Coefficient = 0.0
    """Step of the coefficient after each training step, up while the entropy is below target; 0: it
    is fixed."""
    lower: Coefficient = 0.0
    """Least that the coefficient may be."""
    upper: Coefficient = 1.0
    """Most that the coefficient may be."""

    @property
    def is_on(self) -> bool:
        """Whether the coefficient moves."""
        return self.delta > 0


@dataclass(frozen=True)
class CoefficientScheduleSettings:
    """Move a coefficient linearly from its value at step 0 to `end`, where it stays. Off unless
    `steps` is set."""

    end: Coefficient = 0.0
    """The last value."""
    steps: Annotated[int, within(0, 10**9)] = 0
    """Steps until then; 0: the coefficient is fixed."""

    @property
    def is_on(self) -> bool:
        """Whether the coefficient moves."""
        return self.steps > 0


@dataclass(frozen=True)
class AlgorithmSettings:
    """The objective: names from `spmdrl.algorithms`, or `module:function` of your own."""

    objective: Literal[
        "rl",
        "sft",
        "preference",
        "reward_model",
        "distill",
        "on_policy_distill",
        "online_preference",
    ] = "rl"
    """`rl` samples and rewards; `sft` fits the rows' responses; `preference` compares the
    chosen and rejected responses of rows; `reward_model` trains a scalar head on such pairs;
    `distill` follows `model.teacher` on the rows' responses, `on_policy_distill` on sampled ones
    (GKD); `online_preference` compares the best and the worst of each group that it samples."""
    advantage: str = "grpo"
    """Advantage estimator."""
    advantage_options: Options = field(default_factory=dict)
    """Its keyword options."""
    loss: str = "ppo_clip"
    """Policy loss. `sft` uses `sft`; `preference` needs one of its own: dpo, kto, simpo, alphapo,
    orpo, cpo, sppo, nca, apo_zero, apo_down, aot, aot_unpaired, bco, exo_pair, discopop;
    `reward_model` takes bradley_terry, `distill`
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
    """Its keyword options, e.g. {unbiased: true}."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL to `model.reference`, per token in nats; 0 needs no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss, or subtracted from the rewards (where k1 is usual)."""
    entropy_coef: Annotated[float, within(-1000, 1000)] = 0.0
    """Weight of the entropy bonus, per token in nats."""
    mask_truncated: bool = False
    """Leave responses cut at max_response_tokens out of the loss (DAPO overlong filter); of an
    agent's episode all traces, if one was cut."""
    kl_control: KlControlSettings = field(default_factory=KlControlSettings)
    entropy_control: EntropyControlSettings = field(default_factory=EntropyControlSettings)
    kl_schedule: CoefficientScheduleSettings = field(default_factory=CoefficientScheduleSettings)
    entropy_schedule: CoefficientScheduleSettings = field(
        default_factory=CoefficientScheduleSettings
    )


@dataclass(frozen=True)
class MuonSettings:
    """Muon on the matrices of the blocks, under optimizer.kind muon; see train/muon.py."""

    momentum: BelowOne = 0.95
    """Decay of the mean of gradients, per update; in [0, 1)."""
    nesterov: bool = True
    """Look one step ahead of the momentum."""
    ns_steps: Annotated[int, within(1, 99)] = 5
    """Steps of Newton and Schulz's iteration, which orthogonalises the momentum."""
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of these steps."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the learning rate of a matrix [m, n]: 0.2 sqrt(max(m, n)), so that AdamW's rates
    serve; or `original`, sqrt(max(1, m / n)), whose rates are near 0.02."""
    lr_factor: Positive = 1.0
    """Factor on optimizer.lr for the matrices."""


@dataclass(frozen=True)
class LossScaleSettings:
    """Factor on the loss in backward passes under model.compute_dtype float16, as in torch's
    GradScaler: it is halved when a gradient overflows, and that update is skipped on all ranks."""

    initial: Annotated[float, within(1, 2**40)] = 65536.0
    """First factor, a power of 2."""
    growth_interval: Count = 2000
    """Updates without an overflow after which it is doubled."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` trains the matrices of the blocks' linear layers by Muon, all else by AdamW."""
    lr: LearningRate = 1e-6
    """Peak learning rate."""
    beta1: BelowOne = 0.9
    """Decay of AdamW's mean of gradients, per update; in [0, 1)."""
    beta2: BelowOne = 0.95
    """Decay of its mean of their squares, per update; in [0, 1)."""
    eps: Annotated[float, above(0, 1)] = 1e-8
    """Added to the root of that mean; above 0."""
    weight_decay: BelowOne = 0.0
    """Decoupled, in [0, 1), and of matrices only: norms, biases and embeddings have none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up from 0."""
    min_lr_frac: Fraction = 0.1
    """Final learning rate as a fraction of lr, under linear and cosine."""
    max_grad_norm: NonNegative = 1.0
    """Global gradient-norm bound; 0 switches clipping off."""
    muon: MuonSettings = field(default_factory=MuonSettings)
    loss_scale: LossScaleSettings = field(default_factory=LossScaleSettings)


@dataclass(frozen=True)
class CriticSettings:
    """A model that an advantage needs and that trains with the policy, sharded like it and with its
    `optimizer` but for the fields here: the value model of `gae`, which learns the returns, or the
    implicit process reward model of `prime`, which learns the outcomes. Ignored, warm-up too, under
    an advantage that needs neither."""

    path: PathText = ""
    """Folder or hub name to start from: a causal LM with the policy's tokenizer, or for `gae` a
    model with a scalar head. Empty means model.path. A missing head starts at zero."""
    lr: LearningRate = 1e-5
    """Peak learning rate. Ten times the policy's default, because a head starts from zero. `prime`
    has no head; its paper takes 1e-6."""
    warmup_steps: Natural = 0
    """First steps that train this model alone, because advantages of an untrained one mislead. The
    policy's schedule counts these steps, and they have no metrics of the policy."""
    epochs: Annotated[int, within(0, 1000)] = 0
    """Epochs over a batch; 0: those of the policy, batch.epochs."""
    clip: NonNegative = 0.0
    """Most that `gae`'s value of a state may move in the updates of one batch, task units (PPO's
    value clipping). 0, the default, clips nothing: no number suits all rewards, it acts only with
    several updates per batch, and arXiv 2006.05990 finds that it hurts."""
