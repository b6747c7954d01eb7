"""From a name in the config to a function: the only seam between the program and a method.

A method is a public function listed in its module's `__all__`, or one's own as `module:function`
or `path/file.py:function`. Its parameters without a default are inputs, passed by name out of
INPUTS; those with a default are its options.
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
from spmdrl.algorithms.result_form import OF_PAIRS, form_problem
from spmdrl.errors import RAISED, Refusal, error_text, place_of
from spmdrl.imports import attempt, import_object, nearest

Method = Callable[..., Any]
"""A function of the registry, or one's own with parameters of the same names."""
Named = Mapping[str, Any]
"""Inputs, or options."""
Helper = Literal["statistics", "matched", "totals", "per_sequence"]
"""What gives a method its whole-batch inputs, in the order of calls."""
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
"""Files of this folder, whose `__all__` names their methods."""

_TRIAL_PLACES = {
    "sequence_ids": torch.arange(2),
    "num_sequences": 2,
    "num_groups": 1,
    "num_positions": 2,
}
_TRIAL_LENGTHS = torch.tensor([2, 1])
_LARGEST = 10**9  # of an option; beyond that lie mistakes alone
_PAIRS = "chosen_lengths rejected_lengths"
_PER_TOKEN = "loss_mask cu_seqlens old_logprobs rollout_logprobs"
INPUTS: dict[str, tuple[str, ...]] = {
    kind: tuple(named.split())
    for kind, named in {
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
"""What a method of each kind may ask for. Advantages that ask for `cu_seqlens` are computed per
token, on one micro-batch, from [T] tensors, `rewards` and `group_ids` [S] of its sequences, and
what their own `totals` and `per_sequence` give; the others get [S] tensors of `types.Scalars`, the
whole batch. Preference losses and those of reward models get one number per pair, [P], of one
micro-batch, and [] scalars of the whole batch; those that ask for `is_chosen` get single
responses. Distillation losses get [T, V] logits of both sides. The rest get [T] tensors of one
micro-batch, `cu_seqlens` [S+1], and the scalars that their own `statistics` gives."""


def names(kind: Kind) -> tuple[str, ...]:
    """Return the built-in method names of a kind."""
    return tuple(sorted(_built_in(kind)))


def _built_in(kind: Kind) -> dict[str, Method]:
    modules = [importlib.import_module(f"spmdrl.algorithms.{name}") for name in MODULES[kind]]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def get(kind: Kind, name: str) -> Method:
    """Return the function of a method name, a `module:function` or `file.py:function`.

    Raises: Refusal when there is none, naming the nearest known one.
    """
    found = _found(kind, name)
    if isinstance(found, str):
        raise Refusal(found)
    return found


def _found(kind: Kind, name: str) -> Method | str:
    """Return a method, or why there is none."""
    if ":" in name:
        function, error = attempt(lambda: import_object(name, kind="function"))
        return function or str(error)
    if known := _built_in(kind).get(name):
        return known
    if known_as := combination(name):
        return f"unknown {kind} {name!r}: {known_as}"
    other = [k for k in MODULES if k != kind and name in names(k)]
    hint = nearest(name, names(kind))
    if other:
        hint = f", which is a method of the kind {other[0]}; known: {', '.join(names(kind))}"
    return (
        f"unknown {kind} {name!r}{hint}; or name a function of your own as "
        "path/file.py:function or module:function"
    )


def inputs_of(function: Method) -> tuple[str, ...]:
    """Return the names of the tensors that a method asks for."""
    return tuple(p.name for p in _parameters(function) if p.default is p.empty)


def options_of(function: Method) -> dict[str, Any]:
    """Return a method's options with their defaults."""
    return {p.name: p.default for p in _parameters(function) if p.default is not p.empty}


def _parameters(function: Method) -> list[inspect.Parameter]:
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind not in packed]


def is_per_token(advantage: Method) -> bool:
    """Return whether an advantage is computed per token, on one micro-batch."""
    return "cu_seqlens" in inputs_of(advantage)


def is_unpaired(preference: Method) -> bool:
    """Return whether a preference loss judges single responses, labelled good or bad."""
    return "is_chosen" in inputs_of(preference)


def statistics_of(function: Method) -> Method | None:
    """Return the function that gives a method its whole-batch scalars, if it has one."""
    return getattr(function, "statistics", None)


def helpers_of(function: Method) -> list[Method]:
    """Return the functions that give a method its whole-batch inputs, in the order of calls."""
    known = (getattr(function, name, None) for name in typing.get_args(Helper))
    return [helper for helper in known if helper is not None]


def asked_by(function: Method) -> set[str]:
    """Return the names of all that a method and its helpers ask for."""
    return {name for each in (function, *helpers_of(function)) for name in inputs_of(each)}


def needs_group(name: str) -> bool:
    """Return whether an advantage uses the other samples of a prompt as its baseline.

    It does if it, or a helper of it, asks for `group_ids`. False for a name that cannot be
    found, which `problems` reports.
    """
    function = _found("advantage", name)
    return callable(function) and "group_ids" in asked_by(function)


def call(function: Method, inputs: Mapping[str, Tensor], options: Named) -> Any:
    """Call a method with the inputs that it names, out of a larger set, and with its options.

    Raises: Refusal for an input that is not there or an option that it does not have.
    """
    wanted = inputs_of(function)
    missing = [name for name in wanted if name not in inputs]
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
    return function(**{name: inputs[name] for name in wanted}, **options)


# --------------------------------------------------------------------------- checking


def problems(kind: Kind, name: str, options: Named) -> list[str]:
    """Return what is wrong with a choice, each as text that goes after `algorithm.<kind>`.

    Besides names and types of the options it makes a trial call on three tokens of two sequences,
    so that a bound out of range is reported before anything starts.
    """
    function = _found(kind, name)
    if isinstance(function, str):
        return [f": {function}"]
    return function_problems(kind, function, options)


def function_problems(kind: Kind, function: Method, options: Named) -> list[str]:
    """Return what is wrong with a function and its options, as `problems` does."""
    name = getattr(function, "__name__", repr(function))
    offered = _offered(kind, function)
    strange = [n for n in inputs_of(function) if n not in offered]
    if strange and not helpers_of(function):
        return [
            f": {name} has the parameter {strange[0]!r} without a default, which is no input "
            f"of methods of the kind {kind}; known: {', '.join(offered)}{place_of(function)}"
        ]
    found = []
    for option, value in options.items():
        text = _option_problem(function, option, value)
        if text:
            found.append(f"_options.{option}: {text}")
    return found or _trial_problems(kind, function, options)


def _option_problem(function: Method, option: str, value: Any) -> str:
    known = options_of(function)
    if option not in known:
        return (
            f"unknown option of {function.__name__}{nearest(option, known)}; options of a config "
            "go to whatever function is used: {} for none"
        )
    is_number = isinstance(value, (int, float)) and value not in (float("inf"), -float("inf"))
    if is_number and not -_LARGEST <= value <= _LARGEST:  # nan too
        return f"must be a number of at most {_LARGEST}, or inf for no bound, got {value}"
    hint = typing.get_type_hints(function).get(option, type(known[option]))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        return "" if value in choices else f"{value!r} is no choice{nearest(str(value), choices)}"
    union = typing.get_origin(hint) in (Union, types.UnionType)
    accepted = typing.get_args(hint) if union else (hint,)
    if type(value) in accepted or (type(value) is int and float in accepted):
        return ""
    if not all(isinstance(a, type) for a in accepted):
        return ""  # an annotation that says more than a plain type: the trial call decides
    return f"expected {' or '.join(a.__name__ for a in accepted)}, got {value!r}"


def _offered(kind: Kind, function: Method) -> dict[str, Tensor]:
    """Return the trial inputs of the form that a method asks for."""
    if kind == "preference" and is_unpaired(function):
        return trial_inputs("unpaired_preference")
    return trial_inputs(kind, is_per_token=kind == "advantage" and is_per_token(function))


def _trial_problems(kind: Kind, function: Method, options: Named) -> list[str]:
    try:
        result = trial(kind, function, options)
    except RAISED as error:  # whatever a function of the user's own raises
        return [f"_options: {error_text(error)}"]
    per_token = kind == "advantage" and is_per_token(function)
    own = getattr(function, "__name__", repr(function))
    problem = form_problem(kind, result, name=own, is_per_token=per_token)
    return [f": {problem}{place_of(function)}"] if problem else []


def own_statistics(kind: Kind, function: Method, options: Named) -> list[str]:
    """Return the names of the statistics of a function of the user's own, from the trial; [] for
    one of this package's, or one that has none."""
    if kind in ("advantage", "kl") or not place_of(function):
        return []
    return list(trial(kind, function, options)[1])


def trial(kind: Kind, function: Method, options: Named) -> Any:
    """Return what a method gives for the trial's two sequences, pairs or responses."""
    inputs = _offered(kind, function)
    inputs |= call_helper(function, "statistics", inputs, options)
    inputs |= call_helper(function, "matched", inputs, options)
    if kind == "advantage":
        inputs |= call_totals(function, [inputs | _TRIAL_PLACES], options)
        scalars = trial_inputs("advantage") | {"loss_lengths": _TRIAL_LENGTHS}
        inputs |= call_helper(function, "per_sequence", scalars | inputs, options)
    return call(function, inputs, options)


def call_totals(
    function: Method, microbatches: Sequence[Named], options: Named
) -> dict[str, Tensor]:
    """Return this rank's share of the sums over the whole batch that an advantage asks for.

    Args:
        microbatches: inputs of each, with those of `masked.attach`.
    Returns: {name: sum over the micro-batches}; {} for a method without such a helper.
    """
    found: dict[str, Tensor] = {}
    for inputs in microbatches:
        part = call_helper(function, "totals", inputs, options)
        found = {name: found[name] + value if found else value for name, value in part.items()}
    return found


def call_helper(
    function: Method, which: Helper, inputs: Named, options: Named
) -> dict[str, Tensor]:
    """Return what a method asks for of the whole batch, by name; {} for one without the helper.

    Args:
        which: `statistics`: scalars, from [N] columns; `matched`: [P], from those of all pairs of
            the batch; `totals`: a micro-batch's share of sums;
            `per_sequence`: [B, ...] each, from those sums and the batch's scalars.
        options: of the method; the helper gets those that it has.
    """
    helper = getattr(function, which, None)
    if helper is None:
        return {}
    known = options_of(helper)
    return call(helper, inputs, {k: v for k, v in options.items() if k in known})


def trial_inputs(kind: str, *, is_per_token: bool = False) -> dict[str, Tensor]:
    """Return all that a method of a kind may ask for: three tokens of two sequences, two pairs or
    responses. What has a value per sequence is not taken for what has one per token.

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
    if kind in (*OF_PAIRS, "unpaired_preference"):
        of_pairs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
        values["lengths"] = ones
        learned = {n for n in INPUTS[name] if n.endswith(("logps", "scores")) and n[:4] != "ref_"}
        return {
            n: of_pairs.clone().requires_grad_() if n in learned else values.get(n, of_pairs)
            for n in INPUTS[name]
        }
    return {n: values.get(n, zeros) for n in INPUTS[name]}
