"""From the name of a method in the config to its function, and how a run calls it.

A method is a function in the `__all__` of a module here, or a user's function, named by
`module:function` or `path/file.py:function`. Its parameters without a default are inputs: a run
passes those of INPUTS by name. Its parameters with a default are options.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

import torch
from torch import Tensor

from spmdrl.algorithms.combinations import combination
from spmdrl.algorithms.result_form import PAIR_KINDS, form_problem
from spmdrl.errors import RAISED, Refusal, error_text, place_of
from spmdrl.imports import attempt, import_object, nearest

Method = Callable[..., Any]
"""A built-in method, or a user's function with parameters of the same names."""
NamedValues = Mapping[str, Any]
"""Inputs or options by name."""
Helper = Literal["statistics", "matched", "totals", "per_sequence"]
"""Functions that compute whole-batch inputs of a method, in the order of calls; see `attach`."""
Kind = Literal[
    "advantage", "loss", "correction", "kl", "preference", "reward_model", "distillation"
]

MODULES: dict[Kind, tuple[str, ...]] = {
    "advantage": ("advantages", "token_advantages"),
    "loss": ("losses.batchwise", "losses.clip", "losses.sequence", "losses.weighted"),
    "correction": ("corrections",),
    "kl": ("kl",),
    "preference": (
        "preference.reference_free",
        "preference.sorted_pairs",
        "preference.unpaired",
        "preference.with_reference",
    ),
    "reward_model": ("bradley_terry",),
    "distillation": ("distillation",),
}
"""{kind: modules of this folder that have its methods in their `__all__`}."""

_TRIAL_POSITIONS = {
    "sequence_ids": torch.arange(2),
    "num_sequences": 2,
    "num_groups": 1,
    "num_positions": 2,
}
_TRIAL_LENGTHS = torch.tensor([2, 1])
_LARGEST = 10**9  # a larger value of an option is surely a mistake
_PAIRS = "chosen_lengths rejected_lengths"
_PER_TOKEN = "loss_mask cu_seqlens old_logprobs rollout_logprobs"
INPUTS: dict[str, tuple[str, ...]] = {
    kind: tuple(names.split())
    for kind, names in {
        "advantage": "rewards reward_parts greedy_rewards group_ids sample_ids is_valid "
        "is_truncated lengths response_lengths turns",
        "token_advantage": f"{_PER_TOKEN} rewards group_ids kl_rewards ref_logprobs "
        "teacher_logprobs values prm_logprobs square_probs",
        "loss": f"{_PER_TOKEN} logprobs advantages entropy ref_logprobs teacher_logprobs "
        "policy_versions version token_keys",
        "correction": f"{_PER_TOKEN} advantages",
        "kl": f"{_PER_TOKEN} logprobs ref_logprobs",
        "preference": f"{_PAIRS} chosen_logps rejected_logps ref_chosen_logps "
        "ref_rejected_logps margins mean_log_ratio",
        "unpaired_preference": "logps ref_logps is_chosen lengths kl",
        "reward_model": f"{_PAIRS} chosen_scores rejected_scores margins",
        "distillation": "student_logits teacher_logits loss_mask",
    }.items()
}
"""{kind: names of the inputs that its methods may have}.

- advantage: an advantage with the input `cu_seqlens` is computed per token, on one micro-batch. It
  gets [T] tensors, `rewards` and `group_ids` [S] of the micro-batch's sequences, and the results of
  its `totals` and `per_sequence`. Other advantages get [S] tensors of `types.Scalars` for the whole
  batch.
- preference, reward_model: one number per pair, [P], of one micro-batch, and [] scalars of the
  whole batch. A loss with the input `is_chosen` gets single responses instead of pairs.
- distillation: [T, V] logits of student and teacher.
- others: [T] tensors of one micro-batch, `cu_seqlens` [S+1], and the results of `statistics`.
"""


def names(kind: Kind) -> tuple[str, ...]:
    """Return the built-in method names of a kind."""
    return tuple(sorted(_built_in(kind)))


def _built_in(kind: Kind) -> dict[str, Method]:
    modules = [importlib.import_module(f"spmdrl.algorithms.{name}") for name in MODULES[kind]]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def get(kind: Kind, name: str) -> Method:
    """Return the function of a method name, a `module:function` or a `file.py:function`.

    Raises: Refusal if there is none, with the nearest known name.
    """
    method = _find(kind, name)
    if isinstance(method, str):
        raise Refusal(method)
    return method


def _find(kind: Kind, name: str) -> Method | str:
    """Return a method, or the reason why there is none."""
    if ":" in name:
        function, error = attempt(lambda: import_object(name, kind="function"))
        return function or str(error)
    if method := _built_in(kind).get(name):
        return method
    if settings := combination(name):
        return f"unknown {kind} {name!r}: {settings}"
    other_kinds = [k for k in MODULES if k != kind and name in names(k)]
    hint = nearest(name, names(kind))
    if other_kinds:
        hint = f", which is a method of the kind {other_kinds[0]}; known: {', '.join(names(kind))}"
    return (
        f"unknown {kind} {name!r}{hint}; or name a function of your own as "
        "path/file.py:function or module:function"
    )


def inputs_of(function: Method) -> tuple[str, ...]:
    """Return the names of a method's inputs."""
    return tuple(p.name for p in _parameters(function) if p.default is p.empty)


def options_of(function: Method) -> dict[str, Any]:
    """Return a method's options with their defaults."""
    return {p.name: p.default for p in _parameters(function) if p.default is not p.empty}


def _parameters(function: Method) -> list[inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind not in variadic]


def is_per_token(advantage: Method) -> bool:
    """Return whether an advantage is computed per token, on one micro-batch."""
    return "cu_seqlens" in inputs_of(advantage)


def is_unpaired(preference: Method) -> bool:
    """Return whether a preference loss takes single responses with a label, not pairs."""
    return "is_chosen" in inputs_of(preference)


def statistics_of(function: Method) -> Method | None:
    """Return the function that computes whole-batch scalars for a method; None without one."""
    return getattr(function, "statistics", None)


def helpers_of(function: Method) -> list[Method]:
    """Return the functions that compute whole-batch inputs of a method, in the order of calls."""
    helpers = (getattr(function, name, None) for name in typing.get_args(Helper))
    return [helper for helper in helpers if helper is not None]


def inputs_with_helpers(function: Method) -> set[str]:
    """Return the names of the inputs of a method and of its helpers."""
    return {name for each in (function, *helpers_of(function)) for name in inputs_of(each)}


def needs_group(name: str) -> bool:
    """Return whether an advantage uses the other samples of a prompt as its baseline.

    It does if the method or one of its helpers has the input `group_ids`. False for an unknown
    name, which `problems` reports.
    """
    function = _find("advantage", name)
    return callable(function) and "group_ids" in inputs_with_helpers(function)


def call(function: Method, inputs: Mapping[str, Tensor], options: NamedValues) -> Any:
    """Call a method with its inputs, selected by name from a larger set, and with options.

    Raises: Refusal for an input that is missing, or an option that the method does not have.
    """
    needed = inputs_of(function)
    missing = [name for name in needed if name not in inputs]
    if missing:
        raise Refusal(
            f"{function.__name__} asks for {', '.join(missing)}; available: {', '.join(inputs)}"
        )
    unknown = [name for name in options if name not in options_of(function)]
    if unknown:
        raise Refusal(
            f"{function.__name__} has no option {unknown[0]!r}"
            f"{nearest(unknown[0], options_of(function))}"
        )
    return function(**{name: inputs[name] for name in needed}, **options)


# --------------------------------------------------------------------------- checking


def problems(kind: Kind, name: str, options: NamedValues) -> list[str]:
    """Return the problems of a method and its options, each as text to follow `algorithm.<kind>`.

    This checks the names and types of the options, and then calls the method on three tokens of two
    sequences. So a value out of range is reported before anything starts.
    """
    function = _find(kind, name)
    if isinstance(function, str):
        return [f": {function}"]
    return function_problems(kind, function, options)


def function_problems(kind: Kind, function: Method, options: NamedValues) -> list[str]:
    """Return the problems of a function and its options, as `problems` does."""
    name = getattr(function, "__name__", repr(function))
    known = _trial_inputs_for(kind, function)
    unknown = [n for n in inputs_of(function) if n not in known]
    if unknown and not helpers_of(function):
        return [
            f": {name} has the parameter {unknown[0]!r} without a default, which is no input "
            f"of methods of the kind {kind}; known: {', '.join(known)}{place_of(function)}"
        ]
    option_problems = []
    for option, value in options.items():
        text = _option_problem(function, option, value)
        if text:
            option_problems.append(f"_options.{option}: {text}")
    return option_problems or _trial_problems(kind, function, options)


def _option_problem(function: Method, option: str, value: Any) -> str:
    known = options_of(function)
    if option not in known:
        return (
            f"unknown option of {function.__name__}{nearest(option, known)}; options of a config "
            "go to whatever function is used: {} for none"
        )
    is_number = isinstance(value, (int, float)) and value not in (float("inf"), -float("inf"))
    if is_number and not -_LARGEST <= value <= _LARGEST:  # also true for nan
        return f"must be a number of at most {_LARGEST}, or inf for no bound, got {value}"
    hint = typing.get_type_hints(function).get(option, type(known[option]))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return "" if value in choices else f"{value!r} is no choice{nearest(str(value), choices)}"
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    accepted = typing.get_args(hint) if is_union else (hint,)
    if type(value) in accepted or (type(value) is int and float in accepted):
        return ""
    if not all(isinstance(a, type) for a in accepted):
        return ""  # e.g. Sequence[float]: the trial call decides
    return f"expected {' or '.join(a.__name__ for a in accepted)}, got {value!r}"


def _trial_inputs_for(kind: Kind, function: Method) -> dict[str, Tensor]:
    """Return the trial inputs for a method: per sequence, token, pair or response."""
    if kind == "preference" and is_unpaired(function):
        return trial_inputs("unpaired_preference")
    return trial_inputs(kind, is_per_token=kind == "advantage" and is_per_token(function))


def _trial_problems(kind: Kind, function: Method, options: NamedValues) -> list[str]:
    try:
        result = trial(kind, function, options)
    except RAISED as error:  # a user's function may raise anything
        return [f"_options: {error_text(error)}"]
    per_token = kind == "advantage" and is_per_token(function)
    name = getattr(function, "__name__", repr(function))
    problem = form_problem(kind, result, name=name, is_per_token=per_token)
    return [f": {problem}{place_of(function)}"] if problem else []


def user_statistics(kind: Kind, function: Method, options: NamedValues) -> list[str]:
    """Return the names of the statistics that a user's function returns in a trial.

    Returns: [] for a built-in method, or one of a kind without statistics.
    """
    if kind in ("advantage", "kl") or not place_of(function):
        return []
    return list(trial(kind, function, options)[1])


def trial(kind: Kind, function: Method, options: NamedValues) -> Any:
    """Return a method's result for the trial inputs: two sequences, pairs or responses."""
    inputs = _trial_inputs_for(kind, function)
    inputs |= call_helper(function, "statistics", inputs, options)
    inputs |= call_helper(function, "matched", inputs, options)
    if kind == "advantage":
        inputs |= call_totals(function, [inputs | _TRIAL_POSITIONS], options)
        scalars = trial_inputs("advantage") | {"loss_lengths": _TRIAL_LENGTHS}
        inputs |= call_helper(function, "per_sequence", scalars | inputs, options)
    return call(function, inputs, options)


def call_totals(
    function: Method, microbatches: Sequence[NamedValues], options: NamedValues
) -> dict[str, Tensor]:
    """Return this rank's share of an advantage's `totals`, the sums over the whole batch.

    Args:
        microbatches: the inputs of each, with those that `masked.attach` lists for `totals`.
    Returns: {name: sum over the micro-batches}; {} for a method without `totals`.
    """
    sums: dict[str, Tensor] = {}
    for inputs in microbatches:
        part = call_helper(function, "totals", inputs, options)
        sums = {name: sums[name] + value if sums else value for name, value in part.items()}
    return sums


def call_helper(
    function: Method, which: Helper, inputs: NamedValues, options: NamedValues
) -> dict[str, Tensor]:
    """Call a helper of a method and return its result by name; {} for a method without it.

    Args:
        which: see `masked.attach`.
        options: of the method; the helper gets those that it has too.
    """
    helper = getattr(function, which, None)
    if helper is None:
        return {}
    known = options_of(helper)
    return call(helper, inputs, {k: v for k, v in options.items() if k in known})


def trial_inputs(kind: str, *, is_per_token: bool = False) -> dict[str, Tensor]:
    """Return all inputs of a kind for three tokens of two sequences, or two pairs or responses.

    The numbers of tokens and of sequences differ, so that a result of the wrong length is noticed.

    Args:
        kind: a key of INPUTS.
    """
    ones = torch.ones(2, dtype=torch.int64)
    yes = torch.ones(2, dtype=torch.bool)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    zeros = torch.zeros(3)
    values = dict(
        rewards=rewards,
        reward_parts=rewards[:, None],
        greedy_rewards=0 * rewards,
        group_ids=0 * ones,
        sample_ids=torch.arange(2),
        is_valid=yes,
        is_truncated=~yes,
        lengths=_TRIAL_LENGTHS + 1,
        response_lengths=_TRIAL_LENGTHS,
        turns=torch.zeros(2, 1, 2).double(),
        loss_mask=zeros == 0,
        cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        logprobs=zeros.clone().requires_grad_(),
        policy_versions=torch.zeros(3, dtype=torch.int64),
        version=ones[0],
        token_keys=torch.arange(3),
        entropy=zeros.clone().requires_grad_(),
        student_logits=zeros[:, None].repeat(1, 3).requires_grad_(),
        teacher_logits=zeros[:, None].repeat(1, 3),
        chosen_lengths=ones,
        rejected_lengths=ones,
        is_chosen=rewards > 0,
        kl=rewards[1],
        mean_log_ratio=rewards[1],
    )
    name = "token_advantage" if is_per_token else kind
    if kind in (*PAIR_KINDS, "unpaired_preference"):
        pair_values = torch.tensor([-1.0, -2.0], dtype=torch.float64)
        values["lengths"] = ones
        for input_name in INPUTS[name]:
            values.setdefault(input_name, pair_values)
            is_model_output = input_name.endswith(("logps", "scores"))
            if is_model_output and not input_name.startswith("ref_"):
                values[input_name] = pair_values.clone().requires_grad_()
        return {input_name: values[input_name] for input_name in INPUTS[name]}
    return {n: values.get(n, zeros) for n in INPUTS[name]}
