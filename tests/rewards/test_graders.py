"""The ready-made graders: what they read, what they pass, what they refuse."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import sys
import textwrap
import time
from functools import partial

import pytest

from spmdrl.data.tasks import make_task
from spmdrl.environments import tool_calls
from spmdrl.environments.calculator import calculator
from spmdrl.errors import Refusal
from spmdrl.rewards import graders
from spmdrl.rewards.answers import boxed, fenced_code, find_answer, last_match, reference_answer
from spmdrl.rewards.judge import _SCORE
from spmdrl.rewards.programs import read_cases
from spmdrl.rewards.samples import RewardSample
from spmdrl.rewards.signatures import adapt, load_reward
from spmdrl.sandbox import protection
from tests.helpers.pool_runs import drained, pool_of, submit

pytestmark = pytest.mark.timeout(300)


def graded(function, text, truth=None, **row):
    sample = RewardSample({"prompt": "q", "answer": truth} | row, text, [1] * len(text), False)
    return adapt(function, spec="f")([sample])[0].value


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("3/4", "0.75", 1.0),
        ("so $\\frac{3}{4}$", "0.75", 1.0),
        ("-\\dfrac{1}{2}", "-0.5", 1.0),
        ("0.75", "3/4", 1.0),
        ("1/0", "1", 0.0),
        ("3 / 4", "\\frac34", 1.0),
        ("50%", "50%", 1.0),
        ("50%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("50", "50\\%", 1.0),
        ("50%", "50", 1.0),
        ("0.5%", "50%", 0.0),
        ("0.5", "50", 0.0),
        ("5000%", "50%", 0.0),
        ("$1,234.50", "1234.5", 1.0),
        ("1,234,567", "1234567", 1.0),
        ("12{,}345", "12,345", 1.0),
        ("10-5", "5", 1.0),
        ("x=-5", "-5", 1.0),
        ("(-5)", "-5", 1.0),
        ("\u22125", "-5", 1.0),
        ("1.5e-3", "0.0015", 1.0),
        ("2.", "2", 1.0),
        ("1e999", "1", 0.0),
        ("", "1", 0.0),
        ("72", "She sold 48/2 = 24. 48+24 = 72.\n#### 72", 1.0),
        ("7", "so \\boxed{7} of 9", 1.0),
        ("the answer is 72.", "... #### 72", 1.0),
        ("1,234", "1234", 1.0),
        ("-5", 5, 0.0),
        ("x = 1e3", "1000", 1.0),
        ("12 then 13", "12", 0.0),
        ("none", "3", 0.0),
        (".5", "0.5", 1.0),
        ("12345", "12345", 1.0),
        ("3.0000001", "3", 1.0),
        ("3.001", "3", 0.0),
        ("1\\frac{1}{2}", "1.5", 1.0),
        ("1\\frac{1}{2}", "5.5", 0.0),
        ("1.5", "1\\frac12", 1.0),
        ("-\\cfrac{3}4", "-0.75", 1.0),
        ("\\frac{1}{-2}", "-0.5", 1.0),
        ("\\frac{1}{2}3", "0.5", 0.0),
        ("12", "\\frac12", 0.0),
        ("10,\\!000", "10000", 1.0),
        ("1\\,234{,}567", "1234567", 1.0),
        ("1\u202f234", "1234", 1.0),
        ("\u20115", "5", 0.0),
        ("\u20135", "-5", 1.0),
        ("-$5", "-5", 1.0),
        ("1 1/2", "1.5", 1.0),
        ("1\u00bd", "1", 0.0),
        ("-\u00bd", "-0.5", 1.0),
        ("2\u00b3", "8", 1.0),
        ("5 \\times 10^{3}", "5000", 1.0),
        ("5 \\times 10^{3}", "3", 0.0),
        ("10^{-3}", "0.001", 1.0),
        ("9^{99999}", "9", 0.0),
        ("5 cm^2", "5", 1.0),
        ("x^{2} + 7", "7", 1.0),
    ],
)
def test_numeric_reads_numbers_as_people_write_them(text, truth, value):
    assert graded(graders.numeric, text, truth) == value


@pytest.mark.parametrize(
    ("where", "text", "value"),
    [
        ("boxed", "\\boxed{3} or \\boxed{\\text{it is } 7}", 1.0),
        ("boxed", "7", 0.0),
        ("boxed", "\\boxed{7", 0.0),
        ("hashes", "9 #### 7\nand 8", 1.0),
        ("hashes", "7", 0.0),
        ("tag", "<answer>1</answer><answer> 7 </answer> 8", 1.0),
        ("tag", "<answer>7", 0.0),
    ],
)
def test_the_answer_is_looked_for_where_it_should_stand(where, text, value):
    assert graded(partial(graders.numeric, where=where), text, "7") == value


def test_options_of_graders_hold_and_wrong_ones_are_refused():
    assert graded(partial(graders.numeric, tolerance=0.01), "3.14", "3.1416") == 1.0
    assert graded(graders.numeric, "3.14", "3.1416") == 0.0
    assert graded(partial(graders.exact, where="boxed"), "\\boxed{x^{2}}", "so \\boxed{x^{2}}") == 1
    in_tag = partial(graders.exact, where="tag", ignore_case=True)
    assert graded(in_tag, "<answer>Paris</answer>", "PARIS") == 1.0
    assert graded(graders.exact, "Paris", "PARIS") == 0.0
    with pytest.raises(ValueError, match="where: expected one of all, boxed, hashes, tag"):
        graded(partial(graders.exact, where="box"), "x", "x")


def test_braces_are_matched_and_fences_found():
    assert boxed("\\boxed{a{b}c} \\fbox{d}") == "d" and boxed("\\boxed{a{b}c}") == "a{b}c"
    assert boxed("\\boxed{{a}") is None
    assert fenced_code("```\na\n```\ntext\n```python\nb\n```") == "b\n"
    assert fenced_code("```py\nc") == "c" and fenced_code("c") is None


_UNITS = (
    *("1", "1,111", "1,", "1/", "1 ", "1.", "1e", "-1", "1e1", "\u0661", " ", "\n", "`", "*", '"'),
    *(
        "1\\frac{1",
        "1^",
        "1^{",
        "\\,111",
        "1 1/",
        "\u00bd",
        "\u00b2",
        "1\\times 10^",
        "\\frac{",
        "\\frac{1}{",
        "\\frac ",
        "\\boxed{",
        "{",
        "}",
        "\\text{",
        "\\",
        "#### \n",
    ),
    *("<answer>", "</answer>", "<answer>a</answer>", "```", "```\n", "<think>", "</think>"),
    *("score", "score:", "score: ", "score**", "<tool_call>", "<tool_call>{", "(1,234", ";"),
    *('{"', '{"a":', '{"a":[', '{"a":1,', "{}", '{"name":"f","parameters":{', '{"a":{"'),
)
_HEADS = ("", "<think>", "score:", "{")


def _calculated(text):
    with contextlib.suppress(ValueError):
        calculator(text)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(partial(graders.numeric, None, ground_truth="3"), id="numeric"),
        pytest.param(partial(find_answer, where="tag"), id="tag"),
        pytest.param(partial(find_answer, where="boxed"), id="boxed"),
        pytest.param(partial(find_answer, where="hashes"), id="hashes"),
        pytest.param(reference_answer, id="reference"),
        pytest.param(fenced_code, id="fence"),
        pytest.param(partial(graders.think_format, None), id="think"),
        pytest.param(partial(last_match, re.compile(_SCORE)), id="judge"),
        pytest.param(tool_calls.hermes, id="hermes"),
        pytest.param(tool_calls.llama3, id="llama3"),
        pytest.param(_calculated, id="calculator"),
    ],
)
def test_long_hostile_responses_are_read_in_linear_time(read):
    """Eight times the text takes about eight times as long, not 64 times."""

    def seconds(text):
        began = time.thread_time()
        read(text)
        return time.thread_time() - began

    def is_read_within(limit, text):  # other programs slow some tries down, and speed none up
        return any(seconds(text) < limit for _ in range(3))

    for unit, head in itertools.product(_UNITS, _HEADS):
        text = head + unit * (12_500 // len(unit))
        if is_read_within(0.004, text):  # nothing that grows with the square is so quick
            continue
        short = min(seconds(text) for _ in range(3))
        text = head + unit * (100_000 // len(unit))
        assert is_read_within(30 * short, text), (head, unit)


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (str(10**400), "3", 0.0),
        (str(10**400), str(10**400), 1.0),
        (str(math.factorial(200)), str(math.factorial(200)), 1.0),
        ("1" * 5000, "3", 0.0),
        ("1e999999999999", "3", 0.0),
        ("1e-999999999999", "0", 0.0),
        ("1/1e4000", "0", 1.0),
        ("9e4000%", "9e4000", 1.0),
        ("1/0", "1", 0.0),
    ],
)
def test_numbers_beyond_floats_are_compared_and_never_raise(text, truth, value):
    assert graded(graders.numeric, text, truth) == value


def test_format_and_length_rewards():
    form = partial(graders.matches, pattern=r"A.*B\s*")
    assert (graded(form, "A\nB \n"), graded(form, "AB!")) == (1.0, 0.0)
    with pytest.raises(ValueError, match="requires pattern"):
        adapt(graders.matches, spec="f")
    short = partial(graders.length, min_tokens=2, max_tokens=4, slack_tokens=3)
    values = [graded(short, "x" * n) for n in range(10)]
    assert values == [0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    strict = partial(graders.length, max_tokens=1)
    assert [graded(strict, "x" * n) for n in range(4)] == [1.0, 1.0, 0.0, 0.0]


# --------------------------------------------------------------------------- their answers


@pytest.mark.parametrize(
    ("grader", "texts", "pred"),
    [
        (graders.numeric, ("it is 1,234", "1234.0", "so 2468/2"), "1234"),
        (graders.numeric, ("7%", "that is 7 %"), "7%"),
        (partial(graders.numeric, where="boxed"), ("7", "\\boxed{none}"), "[INVALID]"),
        (
            partial(graders.exact, where="tag", ignore_case=True),
            ("<answer>PARIS</answer>", "a <answer> paris\n</answer>"),
            "paris",
        ),
        (graders.exact, ("", " "), "[INVALID]"),
    ],
)
def test_graders_report_the_answer_and_equal_ones_equally(grader, texts, pred):
    assert {grader("d", text, "1234")["pred"] for text in texts} == {pred}


def test_math_reports_the_answer_in_and_out_of_a_forked_process():
    pytest.importorskip("math_verify")
    texts = ("\\boxed{\\frac{1}{2}}", "I say $\\frac{2}{4}$, no: $\\frac{1}{2}$", "\\boxed{1/2}")
    got = [graders.math("d", text, "$0.5$") for text in texts]
    assert [(one["score"], one["pred"]) for one in got] == [(1.0, "1/2")] * 3
    assert graders.math("d", "\\boxed{x+1}", "7") == {"score": 0.0, "pred": "x + 1"}
    assert graders.math("d", "no idea", "7") == {"score": 0.0, "pred": "[INVALID]"}


# --------------------------------------------------------------------------- mathematics


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        ("\\boxed{(1,2)}", "$(1, 2)$", 1.0),
        ("x = 3", "3", 1.0),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
        ("\\boxed{-\\frac{1}{2}}", "$-0.5$", 1.0),
        ("$\\{2,1\\}$", "$\\{1,2\\}$", 1.0),
        ("\\boxed{x+1}", "$x+2$", 0.0),
        ("so it is $\\boxed{0.5}$", "$\\frac{1}{2}$", 1.0),
        ("so it is $\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}", 1.0),
        ("I say 7", "8", 0.0),
        ("nothing", "8", 0.0),
    ],
)
def test_math_compares_expressions(text, truth, value):
    pytest.importorskip("math_verify")
    assert graded(partial(graders.math, timeout_s=100.0), text, truth) == value


_REFERENCES = (
    r"3\sqrt{13}",
    "6 - 5i",
    "y = 2x + 3",
    "1,-2",
    r"(-\infty,2) \cup (3,\infty)",
    r"\text{June 20}",
    r"10,\!080",
    "p - q",
    r"\$32,\!348",
    r"\frac12",
    "(1,2)",
    "x^2+1",
    "1/2",
    "-3",
)


@pytest.mark.parametrize("truth", _REFERENCES)
def test_a_bare_reference_is_read_whole(truth):
    pytest.importorskip("math_verify")
    grade = partial(graders.math, timeout_s=100.0)
    assert graded(grade, f"so it is \\boxed{{{truth}}}", truth) == 1.0
    assert graded(grade, "so it is \\boxed{13}", truth) == 0.0


@pytest.mark.parametrize(
    "truth, value", [("The answer is 5", "5"), ("72 dollars", "72"), ("#### 1,000", "1000")]
)
def test_a_reference_in_words_is_its_last_number(truth, value):
    pytest.importorskip("math_verify")
    assert graded(partial(graders.math, timeout_s=100.0), f"\\boxed{{{value}}}", truth) == 1.0


def test_a_response_that_cannot_be_computed_is_wrong_and_costs_its_time_only():
    pytest.importorskip("math_verify")
    graders.math.prepare()
    began = time.monotonic()
    assert graded(partial(graders.math, timeout_s=1.0), "\\boxed{9^{9^{9^{9}}}}", "$3$") == 0.0
    assert time.monotonic() - began < 30
    hashes = partial(graders.math, where="hashes", timeout_s=100.0)
    assert graded(hashes, "#### \\frac{1}{2}", "$0.5$") == 1.0
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        graded(graders.math, "3", "")


# --------------------------------------------------------------------------- programs

needs_sandbox = pytest.mark.skipif(not protection().is_enough, reason=protection().text)
ADD = "Sure:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
DOUBLE = "```python\ndef double(x):\n    print('noise')\n    return x * 2\n```"
SUMS = {"inputs": ["1 2", "3 4\n"], "outputs": ["3\n", "7"]}


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (ADD, SUMS, 1.0),
        (ADD, json.dumps(SUMS), 1.0),
        (ADD, [{"input": "1 2", "output": "3"}], 1.0),
        (ADD.replace("a + b", "3"), SUMS, 0.0),
        ("print(input())", {"inputs": ["1.50 x"], "outputs": ["1.50 x"]}, 1.0),
        ("print('1.50 2 ')", {"inputs": [""], "outputs": ["1.5 2.0"]}, 1.0),
        ("print('1.50 y')", {"inputs": [""], "outputs": ["1.5 y"]}, 0.0),
        (DOUBLE, {"inputs": [[2], [[1]]], "outputs": [4, [1, 1]], "fn_name": "double"}, 1.0),
        (DOUBLE, {"inputs": [[2]], "outputs": [[4]], "fn_name": "double"}, 1.0),
        (DOUBLE, {"inputs": [[2]], "outputs": [5], "fn_name": "double"}, 0.0),
        (DOUBLE, {"inputs": [[2]], "outputs": [4], "fn_name": "missing"}, 0.0),
        (
            "class Solution:\n    def f(self, a, b): return (a, b)",
            [{"input": "1\n[2]", "output": "[1, [2]]", "metadata": {"func_name": "f"}}],
            1.0,
        ),
        (DOUBLE, ["assert double(2) == 4", "assert double('a') == 'aa'"], 1.0),
        (DOUBLE, {"assert_case": ["assert double(2) == 5"]}, 0.0),
        ("```\nimport os\nos._exit(0)\n```", ["assert False"], 0.0),
        ("import sys; sys.exit()", ["assert False"], 0.0),
        ("def f(:", SUMS, 0.0),
        ("", SUMS, 0.0),
    ],
)
def test_programs_are_graded_by_tests_of_every_known_shape(text, truth, value):
    assert graded(partial(graders.code, timeout_s=60.0, total_s=200.0), text, truth) == value


@needs_sandbox
@pytest.mark.parametrize(
    ("printed", "expected", "value"),
    [
        ("print('sNaN')", "3", 0.0),
        ("print('sNaN 1')", "NaN 1", 0.0),
        ("print('1e999999999999999999999')", "3", 0.0),
        ("print(10**400)", "3", 0.0),
        ("import math; print(math.factorial(200))", str(math.factorial(200)), 1.0),
        ("print('Infinity')", "inf", 1.0),
        ("print('1e3')", "1000.0", 1.0),
    ],
)
def test_whatever_is_printed_against_a_number_is_right_or_wrong(printed, expected, value):
    truth = {"inputs": [""], "outputs": [expected]}
    assert graded(partial(graders.code, timeout_s=60.0, total_s=60.0), printed, truth) == value


@needs_sandbox
@pytest.mark.parametrize(
    ("result", "expected", "value"),
    [
        ("10**400", 1.5, 0.0),
        ("10**400", 10**400, 1.0),
        ("10**5000", 1, 0.0),
        ("10**15", 10**15 + 1, 0.0),
        ("1e15", 10**15, 1.0),
        ("0.1 + 0.2", 0.3, 1.0),
        ("float('nan')", 1, 0.0),
        ("True", 1, 1.0),
        ("nested(5000)", [], 0.0),
    ],
)
def test_integers_are_compared_exactly_and_floats_nearly(result, expected, value):
    truth = {"inputs": [[]], "outputs": [expected], "fn_name": "f"}
    program = textwrap.dedent(f"""
        def nested(depth):
            inner = []
            for _ in range(depth):
                inner = [inner]
            return inner

        def f():
            return {result}
    """)
    assert graded(partial(graders.code, timeout_s=60.0, total_s=60.0), program, truth) == value


@needs_sandbox
def test_humaneval_programs_check_the_entry_point():
    truth = "def check(candidate):\n    assert candidate(2) == 4\n"
    for text, value in ((DOUBLE, 1.0), (DOUBLE.replace("* 2", "* 3"), 0.0)):
        assert graded(graders.code, text, truth, extra_info={"entry_point": "double"}) == value


@needs_sandbox
def test_a_case_that_times_out_has_failed_and_the_others_count():
    slow = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    truth = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    began = time.monotonic()
    share = partial(graders.code, score="fraction", timeout_s=4.0, total_s=30.0)
    got = share("d", slow, truth)
    assert (got["score"], got["timed_out"], got["why"]) == (2 / 3, 1.0, "test 1: timeout")
    got = graders.code("d", slow, truth, timeout_s=4.0, total_s=30.0)
    assert (got["score"], got["why"]) == (0.0, "test 1: timeout")
    # What comes after the time of all tests has failed too.
    got = share("d", "while True: pass", truth, total_s=1.0)
    assert (got["score"], got["timed_out"]) == (0.0, 1.0)
    assert time.monotonic() - began < 100
    got = graders.code("d", "plain text", truth, needs_fence=True)
    assert (got["score"], got["why"]) == (0.0, "no ``` block")


PARTIAL = [{"inputs": ["1"]}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}]


@pytest.mark.parametrize("truth", [{}, [], "", 7, *PARTIAL, [1], "[]"])
def test_tests_of_unknown_shape_are_refused(truth):
    with pytest.raises(ValueError, match="known shapes|inputs and"):
        read_cases(truth)


@needs_sandbox
def test_graders_run_by_name_in_the_pool_and_options_are_bound_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from functools import partial\nfrom spmdrl.rewards import graders\n"
        "half = partial(graders.code, score='fraction', allow_unprotected=True)\n"
        "close = partial(graders.numeric, tolerance=0.1)\n"
        "short = partial(graders.length, max_tokens=100)\n"
    )
    own = [f"{tmp_path}/mine.py:{name}" for name in ("half", "short")]
    truth = {"inputs": ["1 2", "3 5"], "outputs": ["3", "7"]}
    with pool_of("spmdrl.rewards.graders:code", *own) as pool:
        pool.start()
        submit(pool, 0, ADD, answer=truth)
        submit(pool, 1, ADD, answer="{]")
        first, second = drained(pool)
    assert first.parts == {"code": 0.0, "half": 0.5, "short": 1.0}, first
    assert first.metrics["half/timed_out"] == 0.0 and first.extras["code/why"] == (
        "test 1: wrong output"
    )
    assert (second.value, second.failure) == (None, "error") and "not" in second.message


def test_a_sandbox_that_cannot_run_fails_the_reward_and_is_no_zero(tmp_path):
    """The real sandbox, in a worker from which the kernel's means were taken."""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls below are those of x86_64")
    (tmp_path / "mine.py").write_text(
        "import struct\nfrom functools import partial\nfrom spmdrl.rewards import graders\n"
        "from spmdrl.sandbox import launcher\n"
        "lines = [(32, 0, 0, 0), (21, 0, 1, 272), (6, 0, 0, 0x50001), (21, 0, 1, 444),\n"
        "         (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]\n"
        "launcher._call('prctl', 38, 1, 0, 0, 0)\n"
        "launcher._filter_calls(b''.join(struct.pack('<HBBI', *line) for line in lines))\n"
        "def late(data_source, solution_str, ground_truth): return graders.code("
        "data_source, solution_str, ground_truth)\n"
        "strict = graders.code\n"
    )

    with pool_of(f"{tmp_path}/mine.py:late") as pool:
        submit(pool, 0, ADD, answer=SUMS)
        (got,) = drained(pool)
    assert (got.value, got.failure) == (None, "error")
    assert "NotProtected: this machine permits no isolation" in got.message
    strict = pool_of(f"{tmp_path}/mine.py:strict")
    with strict as pool, pytest.raises(ValueError, match="set allow_unprotected=True"):
        pool.start()


def test_math_verify_missing_is_said_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    graders._read_reference.cache_clear()
    with pytest.raises(ValueError, match="needs math-verify.*pip install"):
        load_reward("spmdrl.rewards.graders:math")


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": 1, "outputs": 2},
        {"assert_case": 5},
        {"inputs": ["x"], "outputs": ["2"], "fn_name": "f"},
        {"inputs": ["1"], "outputs": [2], "fn_name": "f"},
        [{"input": "1", "output": "2", "metadata": 3}],
    ],
)
def test_a_known_shape_with_other_things_in_it_is_refused(tests):
    with pytest.raises(Refusal, match="cannot be read"):
        read_cases(tests)


def test_the_name_of_a_function_may_stand_in_json():
    (case,) = read_cases([{"input": "1", "output": "2", "metadata": '{"func_name": "f"}'}])
    assert (case.kind, case.name) == ("call", "f")


@pytest.mark.parametrize("prompt", ["{low:999999999}", "{low.x}", "{low[0]}", "{}", "{"])
def test_a_prompt_that_names_anything_but_its_bounds_is_refused(prompt):
    with pytest.raises(Refusal, match="may hold {low} and {high} only"):
        make_task("task:guess_number", {"prompt": prompt})
