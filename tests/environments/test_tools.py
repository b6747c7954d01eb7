"""Tools and their calls: what is run, read, described, refused, and how it is bounded."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Literal

import pytest
from hypothesis import strategies as st

from spmdrl.environments.base_tool import BrokenTool
from spmdrl.environments.calculator import calculator
from spmdrl.environments.protocol import Response, ToolCall, Turn
from spmdrl.environments.retrieval import Index, Search
from spmdrl.environments.tool_calls import hermes, llama3
from spmdrl.environments.tool_schema import argument_problem, describe
from spmdrl.environments.tools import ToolEnvironment, make_tools
from spmdrl.rewards.samples import BadValue
from spmdrl.sandbox import LaunchError
from spmdrl.workers.environment_jobs import checked_turn
from spmdrl.workers.messages import Respond, pack_message
from tests.environments.environment_runs import ROW, play, served
from tests.helpers.built import examples

NO_CALLS = {"tool_calls": 0, "malformed_calls": 0, "tool_errors": 0}

# --------------------------------------------------------------------------- tool environment


def hermes_call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def test_calls_are_run_until_a_response_has_none():
    calls = [hermes_call("calculator", expression=text) for text in ("2+3", "2*3")]
    texts = ["\n".join(calls), "It is 5."]
    turns = play(served("tools", tools=["calculator"]), ROW, texts, read=hermes)
    assert turns[0].messages == [
        {"role": "tool", "name": "calculator", "content": "5", "tool_call_id": "call00001"},
        {"role": "tool", "name": "calculator", "content": "6", "tool_call_id": "call00002"},
    ]
    assert turns[0].info == {"tool_calls": 2, "malformed_calls": 0, "tool_errors": 0}
    assert turns[1] == Turn(is_done=True, info=NO_CALLS | {"out_of_turns": 0.0})


def test_malformed_and_failing_calls_are_answered_and_counted():
    text = "<tool_call>{name: calculator}</tool_call>" + hermes_call("calculate", expression="1")
    for arguments in ({"expression": "1/0"}, {"expr": "1"}, {"expression": 3}):
        text += hermes_call("calculator", **arguments)
    (turn,) = play(served("tools", tools="calculator", reply_role="user"), ROW, [text], read=hermes)
    (message,) = turn.messages
    assert message["role"] == "user"
    for words in (
        "cannot be read: not valid JSON",
        "no tool 'calculate'; there are calculator",
        "ZeroDivisionError",
        "unknown argument 'expr'; did you mean expression?",
        "argument 'expression': expected string, got 3",
    ):
        assert words in message["content"], message["content"]
    assert turn.info == {"tool_calls": 5, "malformed_calls": 1, "tool_errors": 4}


def test_templates_without_tools_are_told_of_them_in_the_first_message():
    server = served("tools", tools="calculator", reply_role="user", rewrites="keep")
    assert server.tools == [] and server.tool_parser == "hermes"
    system = {"role": "system", "content": "rules"}
    row = {"prompt": [system, {"role": "user", "content": "Q"}]}
    messages = server.open(row, seed=0)[1].messages
    assert messages[0] == system and messages[1]["content"].endswith("\n\nQ")
    assert json.dumps(describe(calculator)) in messages[1]["content"]
    example = messages[1]["content"].split("write ")[1]
    assert hermes(example)[0].error.startswith("not valid JSON")  # dots, not an example to repeat
    assert served("tools", tools="calculator", parser="llama3").tool_parser == "llama3"
    assert served("guess_number").tool_parser == ""


def test_turns_and_results_are_bounded(tmp_path):
    (tmp_path / "long_tool.py").write_text(
        'def long(n: int) -> str:\n    """Say much.\n\n    Args:\n        n: How much.\n    """\n'
        '    return "x" * n\n'
    )
    limits = dict(max_turns=2, max_result_chars=100)
    server = served("tools", tools=[f"{tmp_path}/long_tool.py:long"], **limits)
    text = hermes_call("long", n=150)
    turns = play(server, ROW, [text, text], read=hermes)
    assert turns[0].messages[0]["content"] == "x" * 100 + "\n[50 more characters left out]"
    assert turns[1].is_done and turns[1].info == NO_CALLS | {"out_of_turns": 1.0}


def test_tools_do_not_travel_with_the_episode(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    rows = ({"text": f"text {i} " + "word " * 50} for i in range(200))
    corpus.write_text("\n".join(map(json.dumps, rows)))
    server = served("tools", tools={"search": {"corpus": str(corpus)}})
    assert len(server.open(ROW, seed=0)[0]) < 1000
    assert server.is_graded and server.tools[0]["function"]["name"] == "search"


def test_a_subclass_may_keep_state_for_its_tools():
    class Counting(ToolEnvironment):
        def run(self, call):
            self.calls_seen = getattr(self, "calls_seen", 0) + 1
            return str(self.calls_seen), True

    environment = Counting(tools=["calculator"])
    environment.reset(ROW)
    call = ToolCall("calculator", {})
    turn = environment.step(Response("", (call, call)))
    assert [m["content"] for m in turn.messages] == ["1", "2"]


# --------------------------------------------------------------------------- calls, schemas


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (hermes, "no call at all", []),
        (hermes, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        (hermes, 'Hm.<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        (
            hermes,
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            ["must be a JSON object"],
        ),
        (
            hermes,
            '<tool_call>{"nam": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            ["expected a JSON object", ("g", {})],
        ),
        (hermes, "<tool_call>f(1)</tool_call>", ["not valid JSON"]),
        (hermes, "<tool_call>" + "[" * 100000, ["not valid JSON"]),
        (llama3, "In {braces} there is no call", []),
        (llama3, '{"name": "f", "parameters": {"a": {"b": "}"}}}', [("f", {"a": {"b": "}"}})]),
        (
            llama3,
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"x": 2}}',
            [("f", {}), ("g", {"x": 2})],
        ),
        (llama3, '{"name": "f", "parameters": {"a": 1}', ["not valid JSON"]),
        (llama3, "<|python_tag|>print(1)", ["not valid JSON"]),
        (llama3, 'A set is {"a": 1}.', []),
        (llama3, '{"name": "f", "parameters": {"a": ' + "9" * 5000 + "}}", ["not valid JSON"]),
        (llama3, 'So {"a": ' + "9" * 5000 + '}; {"name": "f", "parameters": {}}', [("f", {})]),
        (llama3, '{"name": "\\ud800", "parameters": {}}', ["half of a character"]),
    ],
)
def test_calls_are_read_from_text(parse, text, expected):
    calls = parse(text)
    assert len(calls) == len(expected), calls
    for call, wanted in zip(calls, expected):
        if isinstance(wanted, str):
            assert wanted in call.error
        else:
            assert (call.name, call.arguments, call.error) == (*wanted, "")


@examples(200, st.text(alphabet='<tool_cal>{}/"name:,[]1 ;\\', max_size=80))
def test_no_text_breaks_a_parser(text):
    for parse in (hermes, llama3):
        for call in parse(text):
            assert isinstance(call, ToolCall) and isinstance(call.arguments, dict)


@pytest.mark.parametrize("depth", [100, 495, 700, 990])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_deep_is_no_call_and_does_not_end_the_engine(depth, begin, end):
    body = f'{{"name": "f", "arguments": {{"x": {begin * depth}1{end * depth}}}}}'
    for text, parse in ((f"<tool_call>{body}</tool_call>", hermes), (body, llama3)):
        (call,) = parse(text)
        assert call.error and not call.arguments
        pack_message(Respond("", b"", Response(text, (call,))))  # pickles it


def test_half_a_character_stays_in_its_worker():
    class Halves(ToolEnvironment):
        def run(self, call):
            return "a\ud800", True

    turn = Halves(tools="calculator").step(Response("", (ToolCall("x", {}),)))
    assert turn.messages[0]["content"] == "a?"
    for message in ({"content": "\ud800"}, {"content": "", "name": "\udfff"}):
        with pytest.raises(BadValue, match="half of a character"):
            checked_turn(Turn(messages=[{"role": "user"} | message]))


def every_type(
    text: str,
    count: int,
    share: float,
    yes: bool,
    names: list[str],
    table: dict[str, int],
    kind: Literal["a", "b"],
    either: int | str,
    maybe: str | None = None,
    size: int = 3,
) -> str:
    """Do something with everything.

    Over two lines.

    Args:
        text: A text. With: a colon.
        count: A number
            told in two lines.
        share: A share.
        yes: Whether.
        names: Some names.
        table: Some counts.
        kind: One of two.
        either: A number or a text.
        maybe: Perhaps a text.
        size: A size.

    Returns:
        A text.
    """


def test_descriptions_are_those_of_transformers():
    from transformers.utils import get_json_schema

    for function in (every_type, calculator):
        wanted = get_json_schema(function)
        wanted["function"].pop("return", None)  # the policy need not know
        assert describe(function) == wanted


def test_arguments_are_checked():
    schema = describe(every_type)["function"]["parameters"]
    good = dict(text="a", count=1, share=1, yes=True, names=["x"], kind="a", either="x")
    good["table"] = {"a": 1}
    assert argument_problem(good, schema) == ""
    assert argument_problem(good | {"maybe": None, "either": 3}, schema) == ""
    for name, value, words in [
        ("count", True, "expected integer, got True"),
        ("count", 1.5, "expected integer"),
        ("names", ["x", 1], "expected string, got 1"),
        ("table", {"a": "b"}, "expected integer"),
        ("kind", "c", "must be one of 'a', 'b'"),
        ("either", 1.5, "expected integer or string"),
        ("siz", 1, "unknown argument 'siz'; did you mean size?"),
        ("yes", 1, "expected boolean"),
        ("share", math.nan, "expected number"),
    ]:
        assert words in argument_problem(good | {name: value}, schema)
    assert argument_problem({}, schema) == "argument 'text' is missing"


def test_functions_that_cannot_be_described_are_refused():
    def untyped(a):
        """Do.

        Args:
            a: A.
        """

    def untold(a: int):
        """Do."""

    def odd(a: bytes):
        """Do.

        Args:
            a: A.
        """

    for function, words in (
        (untyped, "parameter a: has no type hint"),
        (untold, "not described"),
        (odd, "bytes"),
        (lambda: 1, "no docstring"),
    ):
        with pytest.raises(ValueError, match=words):
            describe(function)
    with pytest.raises(ValueError, match="two have the name 'calculator'"):
        make_tools(["calculator", "spmdrl.environments.calculator:calculator"])


# --------------------------------------------------------------------------- provided tools


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*(3+4)**2", "98"),
        ("1/3", "0.333333333333"),
        ("7 // 2 + 7 % 4", "6"),
        ("2^10", "1024"),
        ("1,234 + 1", "1235"),
        ("sqrt(16) - -1", "5"),
        ("max(1, 200)", "200"),
        ("round(2.567, 1)", "2.6"),
        ("3 \u00d7 4 \u00f7 6", "2"),
        ("2**100", str(2**100)),
        ("-7 // 2", "-4"),
        ("10**-2", "0.01"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "9**999999999",
        "(10**1000)**4",
        "round(5, -10**9)",
        "1e999",
        "1/0",
        "(-8)**0.5",
        "__import__('os')",
        "().__class__",
        "a",
        "print(1)",
        "x=1",
        "1 if 1 else 2",
        "[1]*9",
        "'a'*9",
        "1j",
        "True",
        "2" * 301,
        "(" * 250,
        "-" * 299 + "1x",
        "10**400*1.0",
        "min()",
        "1<2",
        "",
        "1,000 +",
        "sqrt(-1)",
        "2**4000*2**4000",
        "lambda: 1",
        "max(*[1])",
        "f(x=1)",
    ],
)
def test_the_calculator_refuses_at_once(expression):
    began = time.thread_time()
    with pytest.raises((ValueError, ArithmeticError, TypeError)):
        calculator(expression)
    assert time.thread_time() - began < 0.5


@examples(300, st.text(alphabet="0123456789+-*/().%^, esqrtround", max_size=60))
def test_no_expression_takes_long_or_raises_anything_else(expression):
    began = time.thread_time()
    with contextlib.suppress(ValueError, ArithmeticError, TypeError):
        calculator(expression)
    assert time.thread_time() - began < 0.5


def test_bm25_scores_are_those_of_the_formula():
    texts = ["the cat sat", "the dog sat on the mat", "birds fly", "a cat and a dog"]
    split = [t.split() for t in texts]
    mean = sum(map(len, split)) / len(split)

    def score(document, query):
        total = 0.0
        for word in set(query.split()):
            n = sum(word in d for d in split)
            idf = math.log(1 + (len(split) - n + 0.5) / (n + 0.5))
            tf = document.count(word)
            total += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(document) / mean))
        return total

    found = Index(texts).search("The cat sat", count=4)
    wanted = sorted(
        ((i, score(d, "the cat sat")) for i, d in enumerate(split)),
        key=lambda pair: (-pair[1], pair[0]),
    )
    assert found == [(i, pytest.approx(s)) for i, s in wanted if s]
    assert found[0][0] == 0 and len(found) == 3
    assert Index(texts).search("unicorn", count=4) == []


def test_search_shows_titles_and_refuses_bad_corpora(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        '{"title": "Paris", "text": "is the capital of France"}\n\n{"text": "Rome is in Italy"}\n'
    )
    search = Search(corpus=str(corpus), results=1)
    assert search("capital of France?") == "[1] Paris: is the capital of France"
    assert search("zzz") == "No passage matches."
    corpus.with_name("bad.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n')
    with pytest.raises(ValueError, match="bad.jsonl:2: .*KeyError: 'text'"):
        Search(corpus=str(corpus.with_name("bad.jsonl"))).prepare()


def test_programs_run_in_the_sandbox():
    from spmdrl.sandbox import protection

    if not protection().is_enough:
        pytest.skip(protection().text)

    def run(code, *, timeout_s=30.0):
        tool = make_tools({"python": {"timeout_s": timeout_s}})["python"]
        tool.prepare()
        return tool.run(ToolCall("python", {"code": code}))[0]

    assert run("print(6 * 7)") == "42"
    assert run("x = 1") == "[no output]"
    assert run("print(1)\n1/0").startswith("1\nTraceback") and "ZeroDivisionError" in run("1/0")
    assert run("print('a')\nwhile True: pass", timeout_s=1.0) == "[stopped after 1 s]"
    assert "Error" in run(f"open({__file__!r})")


@pytest.mark.parametrize("kind", [LaunchError, BrokenTool])
def test_a_broken_tool_ends_the_episode_and_is_not_shown_to_the_policy(monkeypatch, kind):
    from spmdrl.environments import python_tool

    def broken(*args, **options):
        raise kind("no space left")

    monkeypatch.setattr(python_tool, "run_python", broken)
    with pytest.raises(kind, match="no space left"):
        server = served("tools", tools={"python": {"allow_unprotected": True}})
        play(server, ROW, [hermes_call("python", code="1")], read=hermes)
