"""The grader `code`: runs the program in a response against tests, in the sandbox."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from spmdrl.errors import Refusal
from spmdrl.imports import parsed_json, refusing
from spmdrl.rewards.answers import fenced_code
from spmdrl.sandbox import NotProtected, check_protection, run_python

_SHAPES = """\
  {"inputs": [...], "outputs": [...]}                  stdin and stdout (APPS, PRIME)
  the same with "fn_name": NAME                        arguments and result of a function
  [{"input": ..., "output": ...}, ...]                 the same, one by one (LiveCodeBench)
  ["assert f(1) == 2", ...], {"assert_case": [...]}    assertions (MBPP)
  a program                                            that raises when a test fails; with
                                                       extra_info.entry_point it has check(f)
all but the program also as JSON"""
# The response's code can read the mark. The mark only prevents that it passes by exiting early.
_ASSERTING = """\
import os, sys
mark, names = sys.stdin.read(), {"__name__": "solution"}
for file in ("solution.py", "test.py"):
    exec(compile(open(file).read(), file, "exec"), names)
sys.stdout.flush()
os.write(1, mark.encode())
"""
_CALLING = """\
import json, sys
sys.set_int_max_str_digits(0)
given, names = json.loads(sys.stdin.read()), {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
name = given["name"]
function = names[name] if name in names else getattr(names["Solution"](), name)
print("\\n" + given["mark"] + json.dumps(function(*given["arguments"])))
"""


@dataclass(frozen=True)
class Case:
    """One test."""

    kind: Literal["stdin", "call", "assert"]
    given: Any
    """Standard input, arguments, or the program that tests."""
    expected: Any = None
    """Standard output, or the function's result."""
    name: str = ""
    """Of the function."""


def code(
    data_source: str | None,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    *,
    score: str = "all",
    timeout_s: float = 4.0,
    total_s: float = 8.0,
    memory_mb: int = 512,
    packages: Sequence[str] = (),
    needs_fence: bool = False,
    allow_unprotected: bool = False,
) -> dict[str, Any]:
    """Run the last ``` block of a response (without one: all of it) against the reference's tests.

    Each test is a program of its own in the sandbox, see `spmdrl.sandbox`. Output is compared
    outside of it: lines must be equal, apart from space at their ends, or hold equal numbers.
    Assertions run inside the process of the response's code, which can pretend that they hold;
    prefer tests of input and output.

    Args:
        ground_truth: the tests, in a shape of APPS, PRIME, LiveCodeBench, MBPP or HumanEval.
        score: `all` gives 1 if every test passes (and stops at the first that does not),
            `fraction` the share that passes.
        timeout_s: wall-clock seconds of one test; a test that takes longer has failed.
        total_s: of all tests; tests after that have failed. Keep it below rewards.timeout_s, at
            which the reward itself fails.
        memory_mb: address space of each process, MiB.
        packages: folders that programs may import from.
        needs_fence: a response without a ``` block gets 0.
        allow_unprotected: run without isolation if the system permits none.
    Returns: score; `timed_out`, 1 if a test ran out of time; `why` the first failed test failed.
    Raises: Refusal for tests of unknown shape; NotProtected or LaunchError when the sandbox
        cannot run, so that the reward fails and is not 0.
    """
    if score not in ("all", "fraction"):
        raise Refusal(f"score: expected all or fraction, got {score!r}")
    cases = read_cases(ground_truth, entry_point=(extra_info or {}).get("entry_point"))
    program = fenced_code(solution_str)
    if program is None:
        if needs_fence:
            return {"score": 0.0, "timed_out": 0.0, "why": "no ``` block"}
        program = solution_str
    options = {"memory_mb": memory_mb, "packages": packages, "allow_unprotected": allow_unprotected}
    end = time.monotonic() + total_s
    passed = 0
    timed_out = False
    why = ""
    for number, case in enumerate(cases):
        left = min(timeout_s, end - time.monotonic())
        failure = "timeout"
        if left > 0:
            failure = _failure(program, case, timeout_s=left, **options)
        if not failure:
            passed += 1
            continue
        timed_out |= failure == "timeout"
        why = why or f"test {number}: {failure}"
        if score == "all" or left <= 0:
            break
    value = passed / len(cases)
    if score == "all":
        value = float(passed == len(cases))
    return {"score": value, "timed_out": float(timed_out), "why": why}


def _prepare(*, allow_unprotected: bool = False, **_: Any) -> None:
    with refusing("the grader `code`", NotProtected):
        check_protection(allow_unprotected=allow_unprotected)


vars(code)["prepare"] = _prepare


# --------------------------------------------------------------------------- one test


def _failure(program: str, case: Case, **options: Any) -> str:
    """Return why the program fails a test; empty if it passes."""
    if case.kind == "stdin":
        got = run_python(program, stdin=case.given, **options)
        return _status(got) or ("" if _same_output(got.stdout, case.expected) else "wrong output")
    mark = secrets.token_hex(16)
    files = {"solution.py": program}
    if case.kind == "assert":
        got = run_python(_ASSERTING, stdin=mark, files=files | {"test.py": case.given}, **options)
        return _status(got) or ("" if got.stdout.endswith(mark) else "left early")
    asked = json.dumps({"mark": mark, "name": case.name, "arguments": case.given})
    got = run_python(_CALLING, stdin=asked, files=files, **options)
    if failure := _status(got):
        return failure
    result, problem = parsed_json(got.stdout.rpartition(mark)[2])
    if problem:
        return "no result"
    # Some data sets wrap each result into a list.
    is_wrapped = isinstance(case.expected, list) and len(case.expected) == 1
    is_right = _same(result, case.expected) or (is_wrapped and _same(result, case.expected[0]))
    return "" if is_right else "wrong result"


def _status(got: Any) -> str:
    if got.status == "error":
        return got.stderr.strip().rpartition("\n")[2][:200] or f"exit status {got.exit_code}"
    return "" if got.status == "ok" else got.status


def _same(result: Any, expected: Any) -> bool:
    kinds = {type(result), type(expected)}
    if float not in kinds or not kinds <= {int, float}:
        return result == expected  # integers exactly
    with contextlib.suppress(OverflowError):  # an integer above all floats
        return math.isclose(result, expected, rel_tol=1e-9)
    return False


def _same_output(given: str, expected: str) -> bool:
    lines = given.strip().splitlines()
    expected_lines = expected.strip().splitlines()
    if len(lines) != len(expected_lines):
        return False
    return all(_same_line(a.strip(), b.strip()) for a, b in zip(lines, expected_lines))


def _same_line(a: str, b: str) -> bool:
    if a == b:
        return True
    numbers = _numbers(a)
    return numbers is not None and numbers == _numbers(b)


def _numbers(line: str) -> list[Decimal] | None:
    with contextlib.suppress(InvalidOperation):
        numbers = [Decimal(word) for word in line.split()]
        if not any(number.is_nan() for number in numbers):  # comparing a signalling NaN raises
            return numbers
    return None


# --------------------------------------------------------------------------- reading tests


def read_cases(ground_truth: Any, *, entry_point: str | None = None) -> list[Case]:
    """Return the tests of a reference.

    Args:
        entry_point: the function for `check` of a HumanEval program.
    Raises: Refusal showing the known shapes for any other shape, and for no tests.
    """
    kinds = (TypeError, AttributeError, KeyError, ValueError)
    what = f"the tests {ground_truth!r:.80} cannot be read"
    with refusing(what, *kinds, passes_refusals=True):  # a known shape may hold wrong values
        cases = _known_cases(_from_json(ground_truth), entry_point)
    if not cases:
        raise Refusal(
            f"the tests {ground_truth!r:.80} have none of the known shapes, or there "
            f"are none:\n{_SHAPES}"
        )
    return cases


def _known_cases(tests: Any, entry_point: str | None) -> list[Case]:
    if isinstance(tests, str) and tests.strip():
        return [Case("assert", tests + (f"\ncheck({entry_point})\n" if entry_point else ""))]
    cases = []
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        inputs = tests["inputs"]
        outputs = tests["outputs"]
        if len(inputs) != len(outputs):
            raise Refusal(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
        name = tests.get("fn_name") or ""
        cases = [_pair(i, o, name) for i, o in zip(inputs, outputs)]
    elif isinstance(tests, dict) and "assert_case" in tests:
        cases = [Case("assert", test) for test in tests["assert_case"]]
    elif isinstance(tests, (list, tuple)) and all(isinstance(t, str) for t in tests):
        cases = [Case("assert", test) for test in tests]
    elif isinstance(tests, (list, tuple)) and all(
        isinstance(t, dict) and {"input", "output"} <= t.keys() for t in tests
    ):
        cases = [_pair(t["input"], t["output"], _name_of(t)) for t in tests]
    return cases


def _from_json(ground_truth: Any) -> Any:
    if hasattr(ground_truth, "tolist"):  # parquet may give arrays
        return ground_truth.tolist()
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("{", "["):
        tests, problem = parsed_json(ground_truth)
        if problem:
            raise Refusal(f"the tests {ground_truth!r:.80} look like JSON and are not: {problem}")
        return tests
    return ground_truth


def _name_of(test: dict) -> str:
    meta = _from_json(test.get("metadata"))
    return test.get("fn_name") or (meta or {}).get("func_name") or ""


def _as_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _pair(given: Any, expected: Any, name: str) -> Case:
    if not name:
        return Case("stdin", _as_lines(given), _as_lines(expected))
    if isinstance(given, str):  # LiveCodeBench: one argument in JSON on each line
        given = [json.loads(line) for line in given.splitlines()]
        expected = json.loads(expected)
    # As JSON returns them from the program: keys are texts, and tuples are lists.
    given = json.loads(json.dumps(given))
    expected = json.loads(json.dumps(expected))
    return Case("call", given, expected, name)
