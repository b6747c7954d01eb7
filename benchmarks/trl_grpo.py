"""One of duel.py's contestants: TRL's GRPOTrainer on the same work, in one process or several.

    make .venv/trl
    PYTHONPATH=.venv/trl python benchmarks/trl_grpo.py --model runs/demo/warm

TRL generates with transformers and trains in turns, as it does without a vLLM server. Prints a JSON
object as its last line.

- `--lengths forced`: each response has the length that it has in schedules.py. A logits processor
  forbids the end of sequence before that length and forces it there, which is asserted.
- `--lengths own`: responses end where the model ends them. Every `evaluate_every` steps, responses
  to the held-out problems are sampled and scored; the clock stands still meanwhile.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro
from datasets import Dataset
from schedules import Workload
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from spmdrl.data.tasks import make_task


@dataclass(frozen=True)
class Options(Workload):
    """What to run."""

    lengths: Literal["forced", "own"] = "forced"
    """See above."""
    threads: int = 2
    sequences_per_device_batch: int = 128
    """Of one forward and backward pass; smaller ones accumulate."""
    lr: float = 1e-6
    seed: int = 0
    evaluate_every: int = 25
    """Steps; only with `--lengths own`."""
    problems: int = 256
    """Held-out problems of an evaluation."""

    @property
    def size(self) -> int:
        """Responses of a step."""
        return self.prompts * self.group_size

    def numbered(self, number: int) -> int:
        """Return how long a response is to be, tokens; the run's are in the order of steps."""
        step, place = divmod(number, self.size)
        slot, sample = divmod(place, self.group_size)
        return self.length(f"train-{step}-{slot}-{sample}")


class Lengths(LogitsProcessor):
    """Ends each row of a batch at a length of its own.

    Args:
        lengths: [rows] int64, tokens. prompt: tokens before. eos: id of the end.
    """

    def __init__(self, lengths: torch.Tensor, *, prompt: int, eos: int):
        self.lengths = lengths
        self.prompt = prompt
        self.eos = eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_end = self.lengths <= input_ids.shape[1] - self.prompt + 1
        scores[:, self.eos] = torch.where(is_end, 0.0, -math.inf)
        others = torch.ones_like(scores, dtype=torch.bool)
        others[:, self.eos] = False
        return scores.masked_fill(is_end[:, None] & others, -math.inf)


class Clock(TrainerCallback):
    """Notes when each step ends, seconds, without the time of evaluations.

    Args:
        evaluate: returns the held-out reward; called after every `every` steps. None: never.
    """

    def __init__(self, evaluate: Callable[[], float] | None, *, every: int):
        self.ends: list[float] = []
        self.rewards: dict[int, float] = {}
        """{steps done: held-out reward}."""
        self._evaluate = evaluate
        self._every = every
        self._paused_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate the model that training starts from."""
        self._measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the time."""
        self.ends.append(time.perf_counter() - self._paused_s)
        if state.global_step % self._every == 0:
            self._measure(state.global_step)

    def _measure(self, steps: int) -> None:
        if self._evaluate is not None:
            began = time.perf_counter()
            self.rewards[steps] = self._evaluate()
            self._paused_s += time.perf_counter() - began


def arguments(options: Options, *, folder: str, ranks: int) -> GRPOConfig:
    """Return TRL's config of the workload: that of configs/demo_grpo.yaml in TRL's words."""
    own = options.size // ranks
    per_batch = min(options.sequences_per_device_batch, own)
    return GRPOConfig(
        output_dir=folder,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over all tokens of the batch
        temperature=1.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5 if options.lengths == "own" else 0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=per_batch,
        gradient_accumulation_steps=own // per_batch,
        num_generations=options.group_size,
        max_completion_length=options.limit,
        max_steps=options.steps,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )


def force_lengths(trainer: GRPOTrainer, options: Options, *, rank: int, ranks: int) -> list[int]:
    """Have the trainer's model draw responses of the workload's lengths; return the list that
    those of this process are noted in, in the order of steps."""
    lengths: list[int] = []
    generate = trainer.model.generate
    eos = trainer.processing_class.eos_token_id
    own_size = options.size // ranks

    def number(i: int) -> int:
        step, place = divmod(i, own_size)
        return step * options.size + rank * own_size + place

    @functools.wraps(generate)
    def generate_to_lengths(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Generate, and check that every response has its length."""
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        numbers = [number(len(lengths) + i) for i in range(len(ids))]
        own = torch.tensor([options.numbered(i) for i in numbers])
        forced = Lengths(own, prompt=ids.shape[1], eos=eos)
        lengths.extend(own.tolist())
        drawn = generate(*args, logits_processor=LogitsProcessorList([forced]), **kwargs)
        ends_at = (drawn[:, ids.shape[1] :] == eos).int().argmax(1) + 1
        assert torch.equal(ends_at.cpu(), own), "a response has another length"
        return drawn

    trainer.model.generate = generate_to_lengths
    return lengths


def held_out_reward(trainer: GRPOTrainer, options: Options, task: Any) -> float:
    """Return the mean reward of one sampled response to each held-out problem."""
    tokenizer = trainer.processing_class
    rows = [task.row(options.seed, i, split="eval") for i in range(options.problems)]
    inputs = tokenizer(
        [row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left"
    )
    state = torch.random.get_rng_state()
    with torch.no_grad():
        drawn = trainer.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=options.limit,
        )
    torch.random.set_rng_state(state)
    texts = tokenizer.batch_decode(
        drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return sum(task.score_answer(text, row) for text, row in zip(texts, rows)) / len(rows)


def main(options: Options) -> None:
    """Train, and print what was measured."""
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(max(1, options.threads // ranks))
    task = make_task("task:addition", {"digits": 2}, size=200_000)
    rows = [
        task.row(options.seed, i, split="train") for i in range(options.steps * options.prompts)
    ]
    answers = {row["prompt"]: row for row in rows}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """Score each completion by its prompt's row."""
        return [float(task.score_answer(c, answers[p])) for p, c in zip(prompts, completions)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(options.model),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            args=arguments(options, folder=folder, ranks=ranks),
        )
        lengths: list[int] = []
        evaluate = None
        if options.lengths == "forced":
            lengths = force_lengths(trainer, options, rank=rank, ranks=ranks)
        else:
            evaluate = functools.partial(held_out_reward, trainer, options, task)
        clock = Clock(evaluate, every=options.evaluate_every)
        trainer.add_callback(clock)
        began = time.perf_counter()
        trainer.train()
    if rank == 0:
        ends = [end - began for end in clock.ends]
        print(json.dumps({"ends": ends, "lengths": lengths, "rewards": clock.rewards}))


if __name__ == "__main__":
    main(tyro.cli(Options))
