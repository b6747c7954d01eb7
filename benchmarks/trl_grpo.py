"""The workload of schedules.py in TRL's GRPOTrainer: sequences per second.

    pip install trl accelerate datasets            # or --target FOLDER, and PYTHONPATH=FOLDER
    python benchmarks/trl_grpo.py --model runs/demo/warm --threads 2

One process that has all cores generates with transformers and trains in turns, as TRL does without
a vLLM server. Each step's responses have the very lengths that they have there: a logits processor
forbids the end of sequence before a response's length and forces it there. Asserted.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
import tyro
from datasets import Dataset
from schedules import Workload
from start import say_commit
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from spmdrl.data.tasks import make_task


@dataclass(frozen=True)
class Options(Workload):
    """What to run."""

    threads: int = 2
    sequences_per_device_batch: int = 128
    """Of one forward and backward pass; smaller ones accumulate."""

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
        self.lengths, self.prompt, self.eos = lengths, prompt, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_end = self.lengths <= input_ids.shape[1] - self.prompt + 1
        scores[:, self.eos] = torch.where(is_end, 0.0, -math.inf)
        others = torch.ones_like(scores, dtype=torch.bool)
        others[:, self.eos] = False
        return scores.masked_fill(is_end[:, None] & others, -math.inf)


class Clock(TrainerCallback):
    """Notes when each step ends, seconds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **_):
        """Take the time."""
        self.ends.append(time.perf_counter())


def arguments(options: Options) -> GRPOConfig:
    """Return TRL's config of the workload."""
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        beta=0.0,
        learning_rate=1e-6,
        per_device_train_batch_size=options.sequences_per_device_batch,
        gradient_accumulation_steps=options.size // options.sequences_per_device_batch,
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


def force_lengths(trainer: GRPOTrainer, options: Options) -> list[int]:
    """Have the trainer's model draw responses of the workload's lengths; return the list that
    these are noted in, in the order of steps."""
    lengths: list[int] = []
    generate, eos = trainer.model.generate, trainer.processing_class.eos_token_id

    @functools.wraps(generate)
    def generate_to_lengths(*args, **kwargs):
        """Generate, and check that every response has its length."""
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        own = torch.tensor([options.numbered(len(lengths) + i) for i in range(len(ids))])
        forced = Lengths(own, prompt=ids.shape[1], eos=eos)
        lengths.extend(own.tolist())
        drawn = generate(*args, logits_processor=LogitsProcessorList([forced]), **kwargs)
        ends_at = (drawn[:, ids.shape[1] :] == eos).int().argmax(1) + 1
        assert torch.equal(ends_at.cpu(), own), "a response has another length"
        return drawn

    trainer.model.generate = generate_to_lengths
    return lengths


def main(options: Options) -> None:
    """Train, and print the mean over the steps from `first` on."""
    torch.set_num_threads(options.threads)
    task = make_task("task:addition", {"digits": 2}, size=20000)
    rows = [task.row(0, i, split="train") for i in range(options.steps * options.prompts)]
    answers, clock = {row["prompt"]: row for row in rows}, Clock()

    def reward(prompts, completions, **_):
        """Score each completion by its prompt's row."""
        return [float(task.score_answer(c, answers[p])) for p, c in zip(prompts, completions)]

    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[clock],
        args=arguments(options),
    )
    lengths = force_lengths(trainer, options)
    trainer.train()
    counted = clock.ends[options.first - 1 :]
    seconds = statistics.fmean(b - a for a, b in zip(counted, counted[1:]))
    say_commit()
    print(
        f"TRL: {options.size / seconds:.1f} sequences/s, {seconds:.3f} s a step, mean length "
        f"{statistics.fmean(lengths):.1f}, {options.threads} threads, "
        f"{options.sequences_per_device_batch} sequences per device batch"
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
