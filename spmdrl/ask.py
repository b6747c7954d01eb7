"""Put held-out problems of a generated task to a Hugging Face folder, by plain transformers.

    python -m spmdrl.ask exported --task task:addition --task-option digits=2 -n 5

Nothing of the trainer takes part, so an answer here shows what was really exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmdrl.data.prompts import encode_prompt
from spmdrl.data.tasks import make_task


def ask(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    task: str = "task:addition",
    task_option: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    num_problems: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 5,
    max_response_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> float:
    """Print problems, the model's answers and their rewards.

    Args:
        folder: Hugging Face folder, e.g. one that `spmdrl.export` wrote.
        task: a generated task, as in data.train.
        task_option: an option of the task as NAME=VALUE; may be repeated.
        num_problems: problems to ask, of the task's held-out ones.
        max_response_tokens: longest answer, tokens.
        temperature: of sampling; 0 is greedy.
        seed: of the problems and of sampling.
    Returns: mean reward.
    Raises: ValueError for a folder, task or option that does not exist.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Hugging Face folder: it has no config.json")
    if num_problems < 1:
        raise ValueError(f"-n must be at least 1, got {num_problems}")
    problems = make_task(task, _options(task_option), size=num_problems)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    rewards = []
    for index in range(num_problems):
        row = problems.row(seed, index, split="eval")
        tokens, _ = encode_prompt(row["prompt"], tokenizer, template="auto", tools=None,
                                  where=f"{task}: problem {index}")
        answer = tokenizer.decode(
            _response(model, tokens, max_tokens=max_response_tokens, temperature=temperature),
            skip_special_tokens=True)
        rewards.append(problems.score_answer(answer, row))
        print(f"{row['prompt']}  ->  {answer}  (reward {rewards[-1]:g}; right: {row['answer']})")
    mean = sum(rewards) / len(rewards)
    print(f"mean reward {mean:.3f} over {len(rewards)} problems")
    return mean


def _response(model: Any, tokens: list[int], *, max_tokens: int, temperature: float) -> list[int]:
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # The policy's own distribution: no top-k or top-p of a generation config.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids),
                                max_new_tokens=max_tokens, **sampling)
    return output[0, len(tokens):].tolist()


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found:
            raise ValueError(f"--task-option {pair}: expected NAME=VALUE, e.g. digits=2")
        options[name] = yaml.safe_load(value)
    return options


def main() -> None:
    """Run from the command line."""
    try:
        tyro.cli(ask, prog="python -m spmdrl.ask")
    except ValueError as error:
        raise SystemExit(f"ask: {error}") from error


if __name__ == "__main__":
    main()
