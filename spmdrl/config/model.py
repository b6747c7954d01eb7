"""Settings of the policy's weights and of how the trainer computes with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spmdrl.config.ranges import LearningRate, Natural, PathText, Positive, Share, within


@dataclass(frozen=True)
class ReferenceSettings:
    """The policy that KL terms and preference losses compare with. Loaded, and sharded like the
    policy, only if a method needs it."""

    path: PathText = ""
    """Folder or hub name; empty: model.path, the policy as training began (with model.lora the
    policy without its adapters: no second model)."""
    sync_every: Natural = 0
    """Steps between two moves toward the policy (TR-DPO); 0: it stays as it is."""
    sync_mix: Share = 1.0
    """Share of the policy in such a move, in (0, 1]; at 1 the reference becomes the policy."""
    cache: bool = False
    """Offline: find its logprobs of all rows once, before training, and free the model."""
    cache_folder: PathText = ""
    """Where they are kept, for other runs with this reference to use; empty:
    output_dir/reference_logprobs."""


@dataclass(frozen=True)
class KernelsSettings:
    """By which kernels the trainer computes."""

    attention: Literal["auto", "varlen", "flash", "padded"] = "auto"
    """Packed, by torch's `varlen` or by `flash` (flash-attn; both CUDA), or `padded` SDPA (any
    device). `auto`: varlen on CUDA, padded on the CPU."""
    context: Literal["auto", "ulysses", "gather", "ring"] = "auto"
    """How ranks of layout.cp exchange in attention: `ulysses`, whole sequences of some heads;
    `gather`, the row's keys and values for a few heads at a time; `ring`, keys and values from
    rank to rank. `auto`: ulysses if cp divides the heads, gather if not."""
    liger: bool = True
    """liger-kernel's RMSNorm, RoPE and SwiGLU, on CUDA."""
    compile: bool = False
    """torch.compile each block, which pays on CUDA after a minute."""


@dataclass(frozen=True)
class MoeSettings:
    """What the routers of a mixture of experts do in training (docs/moe.md)."""

    balance: Literal["none", "aux", "bias"] = "none"
    """Balance the load by Switch's loss over the global batch (`aux`: one more forward pass per
    update), or by the routers' correction bias (`bias`: families that have one, deepseek_v3)."""
    coef: Positive = 0.001
    """Weight of that loss, under `aux`."""
    rate: Positive = 0.001
    """What the bias moves by after each update, under `bias`: up where load is below the mean."""
    replay: bool = False
    """Record the engine's choice of experts, and make it again in the trainer's passes over the
    samples."""


@dataclass(frozen=True)
class MemorySettings:
    """What is spared in the trainers' memory. A weight with gradient and AdamW's moments takes 16
    bytes in float32, 8 in bfloat16."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` recomputes each block in the backward pass: a third more time, far less memory;
    `selective` keeps products of linear layers and attention, and recomputes what is cheap."""
    offload: Literal["none", "activations", "optimizer", "all", "parameters"] = "none"
    """What waits in host memory: `activations` of blocks, for the backward pass; `optimizer`,
    AdamW's state; `all`, both; `parameters`, shards, gradients and AdamW's state (FSDP2's
    CPUOffloadPolicy): weights then come over the bus for each pass. All but activations: CUDA."""
    head_chunk_tokens: Annotated[int, within(0, 2**30)] = 0
    """Positions whose logits exist at once, each vocabulary * 4 bytes; 0: as many as have 512
    MiB."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights between updates, and of their gradients. In bfloat16 updates are
    rounded stochastically, so that small ones are not lost."""
    optimizer_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of AdamW's moments; the update itself is float32. int8: torchao's blocks of 256, of
    tensors of 4096 elements or more (pip install --no-deps torchao==0.18.0)."""
    reshard: Literal["auto", "always", "never"] = "auto"
    """Whether a block's gathered weights are freed between forward and backward pass: `always`;
    `auto`, not the last block's, needed next; `never`: gathered once per micro-batch instead of
    twice, the whole model on each rank meanwhile. Changes no result."""
    reduce: Literal["each", "last"] = "each"
    """Whether `each` micro-batch's gradients go to their shards, or the `last` one's with all
    before: one reduction per update, for a float32 of every weight on each rank (tp and ep divide
    them) and sums in another order."""
    prefetch: Annotated[int, within(0, 10**4)] | Literal["auto"] = "auto"
    """Blocks whose weights are asked for ahead, in memory for as many more. `auto`: 1 on CUDA with
    ep, whose host waits within a block; else 0, FSDP2's own order. Changes no result."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters that train instead of the weights (arXiv 2106.09685). The weights are
    frozen, in compute_dtype, and no part of checkpoints; the section critic trains in full."""

    rank: Annotated[int, within(0, 2**16)] = 0
    """Rank of the adapters; 0: none, all weights train (unless `path` names adapters)."""
    alpha: Positive = 32.0
    """An update is scaled by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """What gets adapters: all-linear, the linear layers of the language model's blocks and all
    their experts, and none of a tower; or
    like PEFT's target_modules and target_parameters a list of names or their ends (q_proj,
    experts, embed_tokens), or one regular expression."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """First values of the A matrices; B starts at zero."""
    path: PathText = ""
    """Folder of an adapter in PEFT's format to start from, which says all the rest but push."""
    push: Literal["merged", "adapter"] = "merged"
    """`merged` sends engines the weights with the adapters in them at each step; `adapter` sends
    the weights once, then A and B, with which vLLM computes itself (not for mixtures)."""

    @property
    def is_on(self) -> bool:
        """Whether adapters train."""
        return bool(self.rank or self.path)

    @property
    def pushes_adapter(self) -> bool:
        """Whether engines compute with the adapters themselves."""
        return self.is_on and self.push == "adapter"


@dataclass(frozen=True)
class ModelSettings:
    """The policy's weights and how the trainer computes with them."""

    path: PathText = ""
    """Local Hugging Face folder, or a hub name. Required."""
    tokenizer: PathText = ""
    """Folder or hub name of the tokenizer; empty means the model's own."""
    teacher: PathText = ""
    """Model that distillation follows; it must share the policy's tokenizer."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of forward and backward. float16, with engine.dtype float16, has a smaller gap to the
    engine than bfloat16, and optimizer.loss_scale (docs/optimizers.md). Master weights and
    optimizer state are float32, unless model.memory says otherwise."""
    part: Literal["all", "text"] = "all"
    """`text`: of a model that sees or hears too, train the text model within. The rest is left out,
    and written by export as it was."""
    train: Literal["all", "language"] = "all"
    """`language`: of a model that sees, tower and projector stay as they are: no gradients, no
    optimizer state, nothing of them in pushes. Adapters train where model.lora.targets says."""
    vision_lr: LearningRate = 0.0
    """Peak learning rate of the policy's tower and projector, by optimizer.lr's schedule; 0: as
    optimizer.lr."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Only for folders you trust."""
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    kernels: KernelsSettings = field(default_factory=KernelsSettings)
    moe: MoeSettings = field(default_factory=MoeSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    lora: LoraSettings = field(default_factory=LoraSettings)

    @property
    def own_rates(self) -> dict[str, float]:
        """{field: peak learning rate} of towers, where they have one of their own."""
        return {"vision_lr": self.vision_lr} if self.vision_lr else {}
