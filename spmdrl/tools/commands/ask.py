"""Put questions to a Hugging Face folder, by plain transformers.

    python -m spmdrl ask exported --task task:addition --task-option digits=2 -n 5
    python -m spmdrl ask exported --prompt "What is 12+34?" --prompt "And 7+8?"
    python -m spmdrl ask exported --prompt "12+34=" --chat-template never
    python -m spmdrl ask exported --prompt "<image>count? " --image squares.png
    python -m spmdrl ask exported --data problems.jsonl -n 5

Held-out problems of a generated task are graded. For rows with an answer, the answer is also shown.

The trainer takes no part, so that an answer here shows what was really exported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
import yaml

from spmdrl.config import Config, ModelSettings
from spmdrl.data.rows import ground_truth_of, prompt_of, read_rows
from spmdrl.data.tasks import is_generated, make_task
from spmdrl.errors import Refusal, say
from spmdrl.imports import attempt, refusing
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def ask(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    task: str = "task:addition",
    task_option: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = (),
    data: str = "",
    num_problems: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 5,
    chat_template: Literal["auto", "always", "never"] = "auto",
    max_response_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> float | None:
    """Print questions, the model's answers and, for a task, their rewards.

    Args:
        folder: Hugging Face folder, e.g. one that `python -m spmdrl export` wrote.
        task: a generated task, as in data.train; used without --prompt and --data.
        task_option: an option of the task as NAME=VALUE; may be repeated.
        prompt: a question, or a text to continue (see --chat-template); may be repeated.
        image: a file for an `<image>` of every prompt, of a model that sees; may be repeated.
        data: a JSONL or parquet file whose rows hold prompts, as in data.train.
        num_problems: problems to ask, of the task's held-out ones or from the start of --data.
        chat_template: `auto` makes a --prompt the message of a user where the tokenizer has a chat
            template, and takes rows and tasks as training does under data.chat_template auto: lists
            of messages by the template, plain texts as they are. `always` and `never` hold for all.
        max_response_tokens: longest answer, tokens.
        temperature: of sampling; 0 is greedy.
        seed: of the problems and of sampling.
    Returns: mean reward; None where nothing is graded.
    Raises: Refusal for a folder, task, option or file that does not exist.
    """
    _check(folder, task=task, prompt=prompt, image=image, num_problems=num_problems)
    _check_sampling(max_response_tokens, temperature, seed)
    options = _options(task_option)
    problems = None
    if prompt or data:
        with refusing("--image", OSError):
            images = [{"bytes": path.read_bytes()} for path in image]
        rows = [{"prompt": text, "images": images} for text in prompt]
        rows += read_rows(data, size=num_problems) if data else []
    else:
        problems = make_task(task, options, size=num_problems)
        rows = [problems.row(seed, index, split="eval") for index in range(num_problems)]
    templates: list[str] = [chat_template] * len(rows)
    if chat_template == "auto":
        templates[: len(prompt)] = ["typed"] * len(prompt)
    answers = _answers(
        folder,
        rows,
        templates=templates,
        images_in=Path(data).parent if data else None,
        max_tokens=max_response_tokens,
        temperature=temperature,
        seed=seed,
    )
    rewards = []
    for row, answer in zip(rows, answers):
        if problems is None:
            right, error = attempt(lambda: ground_truth_of(row))
            reference = "" if error else f"  (right: {right})"
            question = prompt_of(row)
            if not isinstance(question, str):
                question = str(question[-1].get("content"))
            say(f"{question}  ->  {answer}{reference}")
            continue
        rewards.append(problems.score_answer(answer, row))
        say(f"{row['prompt']}  ->  {answer}  (reward {rewards[-1]:g}; right: {row['answer']})")
    if not rewards:
        return None
    mean = sum(rewards) / len(rewards)
    say(f"mean reward {mean:.3f} over {len(rewards)} problems")
    if mean == 0 and not options:
        say(
            f"All are wrong, and {task} was asked with its default options: was the model "
            "trained with data.task_options? Give them, e.g. --task-option digits=2"
        )
    return mean


def _check(
    folder: Path, *, task: str, prompt: tuple[str, ...], image: tuple[Path, ...], num_problems: int
) -> None:
    if not (folder / "config.json").is_file():
        raise Refusal(f"{folder} is not a Hugging Face folder: it has no config.json")
    if num_problems < 1:
        raise Refusal(f"-n must be at least 1, got {num_problems}")
    if not is_generated(task):
        raise Refusal(f"--task {task}: no generated task; e.g. task:addition")
    if image and not prompt:
        raise Refusal('--image goes with --prompt, e.g. --prompt "<image>what is it? "')
    with refusing("--prompt is no text", UnicodeEncodeError):
        "".join(prompt).encode()


def _check_sampling(max_response_tokens: int, temperature: float, seed: int) -> None:
    if max_response_tokens < 1:
        raise Refusal(f"--max-response-tokens must be at least 1, got {max_response_tokens}")
    if not 0 <= temperature < math.inf:
        raise Refusal(f"--temperature must be 0 or a finite number above, got {temperature}")
    if not -(2**63) <= seed < 2**63:
        raise Refusal(f"--seed must have at most 64 bits, got {seed}")


def _answers(
    folder: Path,
    rows: Sequence[dict],
    *,
    templates: Sequence[str],
    images_in: Path | None,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    import torch

    from spmdrl.data.attachments import ImageFiles, row_images
    from spmdrl.data.templates import encode_prompt
    from spmdrl.model.vision.noise_images import image_inputs

    torch.manual_seed(seed)
    model, tokenizer = _load(folder)
    of_typed = "always" if tokenizer.chat_template else "never"
    for index, (row, template) in enumerate(zip(rows, templates, strict=True)):
        tokens, _ = encode_prompt(
            prompt_of(row),
            tokenizer,
            template=of_typed if template == "typed" else template,
            tools=row.get("tools"),
            where=f"question {index}",
            images=row_images(row, where=f"question {index}"),
            files=ImageFiles(folder=images_in),
        )
        if not tokens:
            raise Refusal(f"question {index} has no tokens; give it some text")
        shown = image_inputs(model, tokens, model.device)
        response = _response(
            model, tokens, shown=shown, max_tokens=max_tokens, temperature=temperature
        )
        yield tokenizer.decode(response, skip_special_tokens=True)


def _load(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a folder's model and tokenizer; those of one that sees, with its image reader."""
    from transformers import AutoConfig

    from spmdrl.data.attachments import attach_image_reader
    from spmdrl.data.tokenizer import read_tokenizer
    from spmdrl.model.transformers_internals import class_of

    what = f"no model can be loaded from {folder}"
    with refusing(what, Exception, names_kind=True):  # of files that may hold anything
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = class_of(config).from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = read_tokenizer(str(folder))
    attach_image_reader(Config(model=ModelSettings(path=str(folder))), tokenizer)
    return model, tokenizer


def _response(
    model: Any, tokens: Sequence[int], *, shown: dict[str, Any], max_tokens: int, temperature: float
) -> list[int]:
    import torch

    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # The policy's own distribution: no top-k or top-p of a generation config.
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **shown, **sampling
        )
    return output[0, len(tokens) :].tolist()


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found:
            raise Refusal(f"--task-option {pair}: expected NAME=VALUE, e.g. digits=2")
        with refusing(f"--task-option {pair}: the value is no YAML", yaml.YAMLError, ValueError):
            options[name] = yaml.safe_load(value)
    return options


main = partial(run_command, "ask", ask)
