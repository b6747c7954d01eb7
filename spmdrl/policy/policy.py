"""The policy of this rank: a shard of the model and of its optimizer, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from spmdrl.comm import gather_objects
from spmdrl.config import Config
from spmdrl.policy import parallelize, tensor_parallel
from spmdrl.policy.attention import pick_attention, register_attention
from spmdrl.policy.load import (
    CheckpointReader, build_meta_model, check_names, compute_buffers, model_folder,
    read_parameters,
)
from spmdrl.policy.objective import Job, Objective, make_jobs, make_scoring, spread
from spmdrl.policy.optimizer import AdamW, copies, learning_rate, local_part, square_sum
from spmdrl.policy.scorer import Scorer, Scoring
from spmdrl.policy.update import Outcome, Totals, clip_gradients, dump_skipped, exchange_totals
from spmdrl.types import Batch, Sums, add_sums
from spmdrl.world import World


class Policy:
    """Train and score with a sharded transformers model. Off the trainers it holds nothing.

    Args:
        cfg: the config.
        world: this rank's view of the job. Every rank constructs, trainers or not.
    Raises: ValueError, on all ranks together, when the model cannot be loaded or laid out.
    """

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.scorer: Scorer | None = None
        problem = None
        try:
            self._build()
        except ValueError as error:
            problem = str(error)
        with world.watch.wait("load the policy", -1):
            problems = gather_objects(problem, group=world.control)
        for rank, text in enumerate(problems):
            if text:
                raise ValueError(text if text in problems[:1] else f"rank {rank}: {text}")

    def _build(self) -> None:
        cfg, device = self.cfg, self.world.device
        self._dtype = getattr(torch, cfg.model.compute_dtype)
        register_attention()
        hf_model = build_meta_model(cfg.model)
        self._names = {n: (p.shape, p.dtype) for n, p in hf_model.named_parameters()}
        if not self.world.is_trainer:
            return
        self._attention = pick_attention(
            cfg.model.attention, device=device, dtype=self._dtype,
            has_softcap=getattr(hf_model.config, "attn_logit_softcapping", None) is not None,
        )
        hf_model.set_attn_implementation(f"spmdrl_{self._attention}")
        reader = CheckpointReader(model_folder(cfg.model.path))
        check_names(reader, {n: shape for n, (shape, _) in self._names.items()},
                    may_be_extra=_may_be_extra(hf_model))
        self._parallelize(hf_model)
        self.scorer.to_empty(device=device)
        self.scorer.eval()  # no dropout: current and old logprobs must come out alike
        read_parameters(reader, self.named_shards())
        compute_buffers(hf_model)
        self._make_optimizer(hf_model)

    def _parallelize(self, hf_model: nn.Module) -> None:
        cfg, mesh = self.cfg, self.world.mesh
        self._whole: dict[str, str] = {}  # parameters that every tp rank holds whole
        tp_group = None
        if cfg.model.liger and self.world.device.type == "cuda":
            parallelize.apply_liger(hf_model)
        if mesh["tp"].size() > 1:
            self._whole = tensor_parallel.apply_tp(hf_model, mesh["tp"])
            head = hf_model.get_output_embeddings()
            if hf_model.config.tie_word_embeddings:
                head = hf_model.get_input_embeddings()
            tp_group = mesh["tp"].get_group() if hasattr(head.weight, "placements") else None
        if cfg.model.activation_checkpointing:
            parallelize.apply_activation_checkpointing(hf_model)
        hf_blocks = [getattr(parent, name) for parent, name in parallelize.blocks(hf_model)]
        if cfg.model.compile:
            parallelize.apply_compile(hf_blocks)
        self.scorer = Scorer(
            hf_model, chunk_tokens=cfg.model.head_chunk_tokens, tp_group=tp_group,
            temperature=cfg.sampling.temperature if cfg.algorithm.objective == "rl" else 1.0,
        )
        self._prefix = f"{hf_model.base_model_prefix}."
        parallelize.apply_fsdp(self.scorer, hf_blocks, mesh=mesh, dtype=self._dtype)

    def _make_optimizer(self, hf_model: nn.Module) -> None:
        shards = self.named_shards()
        embedding = hf_model.get_input_embeddings().weight
        self.optimizer = AdamW(
            shards, options=self.cfg.optimizer,
            no_decay={name for name, p in shards.items() if p is embedding},
        )
        trainers = len(self.world.trainer_ranks)
        self._copies = {name: copies(p, num_trainers=trainers) for name, p in shards.items()}
        self._objective = Objective(self.cfg)
        # tp ranks of one dp index see the same batch: the first speaks for all of them.
        self._counts = self.world.mesh.get_local_rank("tp") == 0

    # ---------------------------------------------------------------- names and state

    def names(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return {name in the safetensors files: (shape, float32)}, on every rank."""
        return dict(self._names)

    def named_shards(self) -> dict[str, Tensor]:
        """Return {name in the safetensors files: float32 master parameter}.

        DTensors over (dp_replicate,) dp_shard and tp; tied weights once; {} off the trainers.
        The storage stays the same for the life of the policy and is updated in place.
        """
        if self.scorer is None:
            return {}
        named = {}
        for name, parameter in self.scorer.named_parameters():
            name = parallelize.plain_name(name)
            name = self._prefix + name[5:] if name.startswith("base.") else name
            named[name] = parameter
        return {name: named[name] for name in self._names}

    def state_dict(self) -> dict[str, object]:
        """Return model and optimizer state as nested dicts of DTensors that share live storage.

        Names are those of the safetensors files. Loading into the tensors in place restores
        the policy up to the optimizer's update count, which `load_state_dict` sets.
        """
        if self.scorer is None:
            return {}
        model = {name: p.detach() for name, p in self.named_shards().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        if self.scorer is None:
            return
        for name, parameter in self.named_shards().items():
            local, source = local_part(parameter), local_part(state["model"][name])
            if local.data_ptr() != source.data_ptr():
                local.copy_(source)
        self.optimizer.load_state_dict(state["optimizer"])

    # ---------------------------------------------------------------- scoring

    @torch.no_grad()
    def logprobs(self, batch: Batch, *, step: int = -1) -> list[Tensor]:
        """Score a batch's loss tokens without gradients.

        Returns: per micro-batch, in order of updates, [T] float32 nats, 0 off the loss mask.
        """
        if self.scorer is None:
            return []
        with self.world.watch.wait("logprobs", step):
            zeros = torch.zeros(len(batch.scalars), dtype=torch.float64)
            return self._old_logprobs(self._jobs(batch, zeros))

    @torch.no_grad()
    def score(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Score plain sequences at temperature 1; every trainer rank must call with the same.

        Returns: per sequence [len] float32 natural logprobs on the CPU; the first is 0.
        """
        if self.scorer is None:
            return []
        scored: list[Tensor] = []
        options = replace(self.scorer.head_options, temperature=1.0)
        with self.world.watch.wait("score", -1):
            for rows in _packs(tokens, self.cfg.batch.tokens_per_microbatch):
                lengths = [len(row) for row in rows]
                positions = torch.cat([torch.arange(n) for n in lengths])
                work = make_scoring(
                    torch.tensor([t for row in rows for t in row]), lengths, mask=positions > 0,
                    position_ids=positions, device=self.world.device,
                    padded=self._attention == "padded",
                )
                logprobs, _ = self.scorer(work, options)
                scored += spread(logprobs, work).cpu().split(lengths)
            parallelize.reshard(self.scorer)
        return scored

    def _forward(self, work: Scoring) -> tuple[Tensor, Tensor]:
        return self.scorer(work, self.scorer.head_options)

    def _jobs(self, batch: Batch, advantages: Tensor) -> list[list[Job]]:
        return make_jobs(batch, advantages, cfg=self.cfg, device=self.world.device,
                         padded=self._attention == "padded")

    def _old_logprobs(self, jobs: list[list[Job]]) -> list[Tensor]:
        with torch.no_grad():
            scored = [spread(self._forward(job.scoring)[0], job.scoring)
                      for update in jobs for job in update]
        parallelize.reshard(self.scorer)
        return scored

    # ---------------------------------------------------------------- training

    def update(self, batch: Batch, advantages: Tensor, *, step: int) -> Sums:
        """Take the batch's optimizer steps; call on every rank.

        An update whose loss or gradient norm is not finite is skipped on all ranks together,
        counted, and its micro-batches are saved under output_dir/skipped.

        Args:
            batch: as exchanged; on trainers every update has the same number of micro-batches.
            advantages: [S] float64, by row of the batch's scalars.
            step: training step, for the schedule.
        Returns: policy/, loss/ and perf/ sums over all trainer ranks, equal on each of them;
            {} elsewhere.
        """
        if self.scorer is None:
            return {}
        with self.world.watch.wait("update", step):
            jobs = self._jobs(batch, advantages)
            # With one update the current logprobs are the old ones: no pass of their own.
            old: list[Tensor | None] = [None] * len(jobs[0])
            if len(jobs) > 1:
                old = self._old_logprobs(jobs)
            sums: Sums = {}
            for number, update in enumerate(jobs):
                old_of, old = old[:len(update)], old[len(update):]
                sums = add_sums(sums, self._take_step(update, old_of, step=step, number=number))
            return sums

    def _take_step(
        self, jobs: list[Job], old: list[Tensor | None], *, step: int, number: int
    ) -> Sums:
        totals = Totals()
        for index, job in enumerate(jobs):
            self.scorer.set_requires_all_reduce(index == len(jobs) - 1)
            logprobs, entropy = self._forward(job.scoring)
            loss, stats = self._objective(job, logprobs, entropy=entropy, step=step,
                                          old_logprobs=old[index])
            # FSDP2 averages gradients over the dp ranks; the loss is a sum.
            (loss * self.world.dp_size).backward()
            totals.add(job, loss, stats)
        gradients = self.optimizer.gradients()
        if self._whole:
            tensor_parallel.sum_replicated_gradients(
                gradients, self._whole, group=self.world.mesh["tp"].get_group())
        outcome = exchange_totals(
            totals, square_sum(gradients, self._copies), counts=self._counts,
            group=self.world.trainer_control,
        )
        lr = learning_rate(self.cfg.optimizer, step, steps=self.cfg.steps)
        if outcome.is_finite:
            clip_gradients(list(gradients.values()), norm=outcome.grad_norm,
                           max_norm=self.cfg.optimizer.max_grad_norm)
            self.optimizer.step(gradients, lr=lr)
        else:
            dump_skipped(jobs, outcome, folder=Path(self.cfg.output_dir) / "skipped", step=step,
                         update=number, rank=self.world.rank)
        self.optimizer.zero_grad()
        return _sums(outcome, lr=lr, is_first=number == 0)


def _may_be_extra(hf_model: nn.Module) -> list[str]:
    """Names a file may hold besides: what transformers ignores, and a tied head's copy."""
    patterns = list(getattr(hf_model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns.append(r"rotary_emb\.inv_freq$")  # stored by old versions, computed by us
    if hf_model.config.tie_word_embeddings:
        patterns.append(r"^lm_head\.weight$")
    return patterns


def _packs(tokens: Sequence[Sequence[int]], budget: int) -> list[list[Sequence[int]]]:
    """Split sequences into runs of at most `budget` tokens, each at least one sequence."""
    packs: list[list[Sequence[int]]] = []
    room = 0
    for row in tokens:
        if not packs or len(row) > room:
            packs.append([])
            room = budget
        packs[-1].append(row)
        room -= len(row)
    return packs


def _sums(outcome: Outcome, *, lr: float, is_first: bool) -> Sums:
    once = float(is_first)  # the denominator of what is a total over the step's updates
    is_finite = outcome.is_finite
    sums: Sums = {
        "policy/lr": (lr, 1.0), "policy/skipped_updates": (float(not is_finite), once),
        "perf/trained_tokens": (outcome.num_tokens if is_finite else 0.0, once),
    }
    if not is_finite:
        return sums
    return outcome.stats | sums | {
        "policy/loss": (outcome.loss, 1.0), "policy/grad_norm": (outcome.grad_norm, 1.0),
    }
