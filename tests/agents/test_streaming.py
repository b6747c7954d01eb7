"""What is sent of a text that is still sampled goes on to the whole, and never beyond it."""

from __future__ import annotations

import copy

from hypothesis import strategies as st

from spmdrl.agents.replies import CONTENT, REASONING, cut_at, split_reasoning
from spmdrl.agents.streaming import GrowingText
from tests.helpers.built import examples
from tests.helpers.chat_templates import chat_tokenizer

WORDS = chat_tokenizer("qwen")
BACKEND = copy.deepcopy(WORDS.backend_tokenizer)
STOPS = ["STOP", "ab\n"]
PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<th",
        "</thi",
        "nk>",
        "\n",
        " ",
        "ST",
        "OP",
        "STO",
        "a",
        "b",
        "é",
        "🌍",
    ]
)


def sent_of(tokens: list[int], cuts: list[int], *, is_open: bool | None, stop: list[str]):
    """Feed tokens in parts; return what was sent, with the rest, and the whole message."""
    growing = GrowingText(BACKEND, ends=[WORDS.eos_token_id], stop=stop, is_open=is_open)
    sent = {CONTENT: "", REASONING: ""}
    at = 0
    for count in cuts:
        for key, text in growing.feed(tokens[at : at + count]).items():
            assert "\ufffd" not in text
            sent[key] += text
        at += count
    text = growing.complete(tokens, WORDS.decode(tokens, skip_special_tokens=True))
    text = cut_at(text, stop)
    whole = {CONTENT: text, REASONING: ""}
    if is_open is not None:
        reasoning, content = split_reasoning(text, is_open=is_open)
        whole = {CONTENT: content, REASONING: reasoning}
    for key in sent:
        assert whole[key].startswith(sent[key]), (sent, whole)
        sent[key] += growing.rest(key, whole[key])
    return sent, whole


@examples(
    300,
    st.lists(PIECES, max_size=12),
    st.lists(st.integers(1, 5), max_size=30),
    st.sampled_from([True, False, None]),
    st.booleans(),
)
def test_the_parts_of_a_stream_are_the_whole_message(pieces, cuts, is_open, has_stops):
    tokens = WORDS("".join(pieces), add_special_tokens=False)["input_ids"]
    stop = STOPS if has_stops else []
    sent, whole = sent_of(tokens, cuts, is_open=is_open, stop=stop)
    assert sent == whole
    assert not any(word in text for word in stop for text in sent.values())


def test_characters_are_not_cut_in_two():
    tokens = WORDS("a🌍b", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 6  # one for each byte
    growing = GrowingText(BACKEND, ends=[], stop=[], is_open=None)
    assert [growing.feed([token]) for token in tokens] == [
        {CONTENT: "a"}, {}, {}, {}, {CONTENT: "🌍"}, {CONTENT: "b"}
    ]  # fmt: skip
    # A sample that ends within a character has the mark of one that is broken, at its end.
    growing = GrowingText(BACKEND, ends=[], stop=[], is_open=None)
    growing.feed(tokens[:3])
    assert growing.complete(tokens[:3], WORDS.decode(tokens[:3])) == "a\ufffd"


def test_the_beginning_of_a_stop_string_waits():
    growing = GrowingText(BACKEND, ends=[], stop=["STOP"], is_open=None)
    shown = [growing.feed(WORDS(text)["input_ids"]) for text in ("xS", "T", "a", "STO", "P and on")]
    assert shown == [{CONTENT: "x"}, {}, {CONTENT: "STa"}, {}, {}]


def test_nothing_is_sent_of_a_text_that_may_become_a_call():
    growing = GrowingText(None, ends=[], stop=[], is_open=False)
    tokens = WORDS("one")["input_ids"]
    assert growing.feed(tokens) == {} and growing.complete(tokens, "one") == "one"
    assert growing.rest(CONTENT, "one") == "one"
