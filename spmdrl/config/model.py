"""Settings of the policy's weights and of the trainer's computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from spmdrl.config.ranges import LearningRate, Natural, PathText, Positive, Share, within


@dataclass(frozen=True)
class ReferenceSettings:
    """The policy that KL terms and preference losses compare with. It is loaded only if a method
    needs it, and sharded like the policy."""

    path: PathText = ""
    """Folder or hub name; empty: model.path, the policy as training began. With model.lora this is
    the policy without its adapters, which needs no second model."""
    sync_every: Natural = 0
    """Steps between two moves toward the policy (TR-DPO); 0: it never moves."""
    sync_mix: Share = 1.0
    """Share of the policy in such a move, in (0, 1]; at 1 the reference becomes the policy."""
    cache: bool = False
    """Offline: compute its logprobs of all rows once, before training, and free the model."""
    cache_folder: PathText = ""
    """Folder of these logprobs, which other runs with this reference can use; empty:
    output_dir/reference_logprobs."""


@dataclass(frozen=True)
class KernelsSettings:
    """Kernels of the trainer."""

    attention: Literal["auto", "varlen", "flash", "padded"] = "auto"
    """Packed, by torch's `varlen` or by `flash` (flash-attn; both CUDA), or `padded` SDPA (any
    device). `auto`: varlen on CUDA, padded on the CPU."""
    context: Literal["auto", "ulysses", "gather", "ring"] = "auto"
    """What ranks of layout.cp exchange in attention: `ulysses`, whole sequences of some heads;
    `gather`, the row's keys and values for a few heads at a time; `ring`, keys and values from
    rank to rank. `auto`: ulysses if cp divides the heads, else gather."""
    liger: bool = True
    """liger-kernel's RMSNorm, RoPE and SwiGLU, on CUDA."""
    fused_head: bool = True
    """Logprobs, entropy and their gradients by two Triton kernels, on CUDA; false: by torch's own
    operations, as on the CPU."""
    compile: bool = False
    """torch.compile each block. It takes a minute, and is faster on CUDA."""


@dataclass(frozen=True)
class MoeSettings:
    """Routers of a mixture of experts in training (docs/moe.md)."""

    balance: Literal["none", "aux", "bias"] = "none"
    """Balance the load by Switch's loss over the global batch (`aux`: one more forward pass per
    update), or by the routers' correction bias (`bias`: families that have one, deepseek_v3)."""
    coef: Positive = 0.001
    """Weight of that loss, under `aux`."""
    rate: Positive = 0.001
    """Step of the bias after each update, under `bias`: up where the load is below the mean."""
    replay: bool = False
    """Record the engine's choice of experts, and use it in the trainer's passes over samples."""


@dataclass(frozen=True)
class MemorySettings:
    """Ways to save memory of the trainers. A weight with gradient and AdamW's moments takes 16
    bytes in float32, 8 in bfloat16."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` recomputes each block in the backward pass: a third more time, far less memory;
    `selective` keeps products of linear layers and attention, and recomputes what is cheap."""
    offload: Literal["none", "activations", "optimizer", "all", "parameters"] = "none"
    """What is stored in host memory: `activations` of blocks until the backward pass; `optimizer`,
    AdamW's state; `all`, both; `parameters`, shards, gradients and AdamW's state (FSDP2's
    CPUOffloadPolicy), where weights cross the bus in each pass. All but activations need CUDA."""
    head_chunk_tokens: Annotated[int, within(0, 2**30)] = 0
    """Positions whose logits exist at once, in compute_dtype; 0: as many as fit into 512 MiB, or 1
    GiB on CUDA."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights between updates, and of their gradients. In bfloat16 updates are
    rounded stochastically, so that small ones are not lost."""
    optimizer_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of AdamW's moments; the update itself is float32. int8: torchao's blocks of 256, of
    tensors of 4096 elements or more (pip install --no-deps torchao==0.18.0)."""
    reshard: Literal["auto", "always", "never"] = "auto"
    """Whether a block's gathered weights are freed between forward and backward pass: `always`;
    `auto`, except for the last block, which is needed next; `never`, which gathers once per
    micro-batch instead of twice and holds the whole model on each rank. Changes no result."""
    reduce: Literal["each", "last"] = "each"
    """Reduce gradients to their shards after `each` micro-batch, or after the `last` one of an
    update, which takes a float32 of every weight on each rank (tp and ep divide them) and sums in
    another order."""
    prefetch: Annotated[int, within(0, 10**4)] | Literal["auto"] = "auto"
    """Blocks whose weights are gathered ahead; each takes its memory. `auto`: 1 on CUDA with ep
    and without moe.replay, where the host waits within a block; else 0, FSDP2's own order. Changes
    no result."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters that train instead of the weights (arXiv 2106.09685). The weights are
    frozen in compute_dtype and are not in checkpoints. The section critic's model trains in
    full."""

    rank: Annotated[int, within(0, 2**16)] = 0
    """Rank of the adapters; 0: none, all weights train (unless `path` names adapters)."""
    alpha: Positive = 32.0
    """An update is scaled by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Modules with adapters: all-linear, the linear layers and experts of the language model's
    blocks, not those of a vision tower; or, like PEFT's target_modules and target_parameters, a
    list of names or their ends (q_proj, experts, embed_tokens), or one regular expression."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """First values of the A matrices; B starts at zero."""
    path: PathText = ""
    """Folder of an adapter in PEFT's format to start from, which decides all of these but push and
    base."""
    base: Literal["full", "nf4", "int8"] = "full"
    """How the trainers hold the frozen weights of the blocks' linear layers and experts: `full`, in
    compute_dtype; `nf4`, in 4.5 bits per element (QLoRA, arXiv 2305.14314); `int8`, in 8.5.
    Engines get the dequantised weights (docs/lora.md)."""
    push: Literal["merged", "adapter"] = "merged"
    """`merged` sends engines the weights with the adapters merged at each step; `adapter` sends the
    weights once and A and B at each step, and vLLM applies them (mixtures: docs/moe.md)."""

    @property
    def is_on(self) -> bool:
        """Return whether adapters train."""
        return bool(self.rank or self.path)

    @property
    def quantises(self) -> bool:
        """Return whether the weights under the adapters are quantised."""
        return self.is_on and self.base != "full"

    @property
    def pushes_adapter(self) -> bool:
        """Return whether engines apply the adapters."""
        return self.is_on and self.push == "adapter"


@dataclass(frozen=True)
class ModelSettings:
    """The policy's weights and the trainer's computation with them."""

    path: PathText = ""
    """Local Hugging Face folder, or a hub name. Required."""
    tokenizer: PathText = ""
    """Folder or hub name of the tokenizer; empty means the model's own."""
    teacher: PathText = ""
    """Model that distillation follows, with the policy's tokenizer: folder or hub name; `policy`,
    the policy itself as it is now, which needs data.teacher_prompt; or `reference`, that of
    model.reference. A folder of such a name is ./policy. Sources of data.train may name others."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of forward and backward. float16, with engine.dtype float16, has a smaller gap to the
    engine than bfloat16, and needs optimizer.loss_scale (docs/optimizers.md). Master weights and
    optimizer state are float32, unless model.memory says otherwise."""
    part: Literal["all", "text"] = "all"
    """`text`: of a multimodal model, train the text model alone. The rest is left out, and export
    writes it as it was."""
    train: Literal["all", "language"] = "all"
    """`language`: freeze tower and projector of a vision model: no gradients, no optimizer state,
    no pushes of them. Adapters train where model.lora.targets says."""
    vision_lr: LearningRate = 0.0
    """Peak learning rate of the policy's tower and projector, with the schedule of optimizer.lr; 0:
    that of optimizer.lr."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Only for folders you trust."""
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    kernels: KernelsSettings = field(default_factory=KernelsSettings)
    moe: MoeSettings = field(default_factory=MoeSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    lora: LoraSettings = field(default_factory=LoraSettings)

    @property
    def own_rates(self) -> dict[str, float]:
        """Return {field: peak learning rate} of the parts that do not train at optimizer.lr."""
        return {"vision_lr": self.vision_lr} if self.vision_lr else {}
