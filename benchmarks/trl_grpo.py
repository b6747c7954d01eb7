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
import os
import statistics
import tempfile
import time
from dataclasses import dataclass

import tyro
from schedules import Workload


@dataclass(frozen=True)
class Options(Workload):
    """What to run."""

    threads: int = 2
    sequences_per_device_batch: int = 128
    """Of one forward and backward pass; smaller ones accumulate."""


def main(options: Options) -> None:
    """Train, and print the mean over the steps from `first` on."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    from datasets import Dataset
    from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from spmdrl.data.tasks import make_task

    torch.set_num_threads(options.threads)
    task = make_task("task:addition", {"digits": 2}, size=20000)
    rows = [task.row(0, i, split="train") for i in range(options.steps * options.prompts)]
    answers = {row["prompt"]: row for row in rows}
    lengths: list[float] = []
    ends: list[float] = []

    size = options.prompts * options.group_size

    def own_length(number: int) -> int:
        step, place = divmod(number, size)
        slot, sample = divmod(place, options.group_size)
        return options.length(f"train-{step}-{slot}-{sample}")

    class Lengths(LogitsProcessor):
        """Ends each row of a batch at a length of its own."""

        def __init__(self, count: int, prompt: int, eos: int):
            first = len(lengths)  # of the run's responses, in the order of steps
            self.lengths = torch.tensor([own_length(first + i) for i in range(count)])
            self.prompt, self.eos = prompt, eos

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            is_end = self.lengths <= input_ids.shape[1] - self.prompt + 1
            scores[:, self.eos] = torch.where(is_end, 0.0, -math.inf)
            others = torch.ones_like(scores, dtype=torch.bool)
            others[:, self.eos] = False
            return scores.masked_fill(is_end[:, None] & others, -math.inf)

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

    def reward(prompts, completions, **_):
        return [float(task.score_answer(c, answers[p])) for p, c in zip(prompts, completions)]

    accumulation = size // options.sequences_per_device_batch
    trainer = GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            beta=0.0,
            learning_rate=1e-6,
            per_device_train_batch_size=options.sequences_per_device_batch,
            gradient_accumulation_steps=accumulation,
            num_generations=options.group_size,
            max_completion_length=options.limit,
            max_steps=options.steps,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    generate = trainer.model.generate

    @functools.wraps(generate)
    def generate_to_lengths(*args, **kwargs):
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        forced = Lengths(len(ids), ids.shape[1], trainer.processing_class.eos_token_id)
        lengths.extend(forced.lengths.tolist())
        drawn = generate(*args, logits_processor=LogitsProcessorList([forced]), **kwargs)
        new = drawn[:, ids.shape[1] :]
        ends_at = (new == trainer.processing_class.eos_token_id).int().argmax(1) + 1
        assert torch.equal(ends_at.cpu(), forced.lengths), "a response has another length"
        return drawn

    trainer.model.generate = generate_to_lengths
    trainer.train()
    counted = ends[options.first - 1 :]
    seconds = statistics.fmean(b - a for a, b in zip(counted, counted[1:]))
    print(
        f"TRL: {size / seconds:.1f} sequences/s, {seconds:.3f} s a step, mean length "
        f"{statistics.fmean(lengths):.1f}, {options.threads} threads, "
        f"{options.sequences_per_device_batch} sequences per device batch"
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
