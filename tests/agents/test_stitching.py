"""Which requests continue an earlier answer's ids, over HTTP with a real client."""

from __future__ import annotations

import contextlib

import pytest

from spmdrl.agents.messages import NO_PARENT
from spmdrl.agents.requests import normal_message
from spmdrl.agents.stitching import EpisodeHistory, KnownAnswer
from tests.helpers.chat_templates import LLAMA3, QWEN, QWEN3, chat_tokenizer
from tests.helpers.gateway_runs import QUESTION, agent_config, gateway_in_thread, standing_in

# As the family's own templates: with the calls of earlier turns, and reasoning by its own key.
CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments}
    | tojson) + '\\n</tool_call>' }}{%- endfor %}"""
QWEN_CALLS = QWEN.replace(
    "message.content + '<|im_end|>\\n' }}\n{%- elif message.role == 'tool' %}",
    "message.content }}" + CALLS + "{{- '<|im_end|>\\n' }}\n{%- elif message.role == 'tool' %}",
)
assert QWEN_CALLS != QWEN
END = {"qwen": "<|im_end|>", "llama3": "<|eot_id|>"}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


@contextlib.contextmanager
def served(tmp_path, write, *, family="qwen", template=QWEN_CALLS, **fields):
    """Yield a stand-in leader and a client of its gateway."""
    cfg = agent_config(tmp_path / "m", family=family, template=template, **fields)
    tokenizer = chat_tokenizer(family, template=template)
    with gateway_in_thread(cfg) as gateway, standing_in(gateway, tokenizer, write) as leader:
        yield leader, leader.client()


def said(*texts, end="<|im_end|>"):
    """Return a writer of these texts, one after the other."""
    left = list(texts)
    return lambda ask: [left.pop(0) + end for _ in range(ask.samples)]


def ask(client, messages, **options):
    return client.chat.completions.create(model="m", messages=messages, **options)


def reply(client, messages, **options):
    """Return the conversation with its answer, as an agent appends it."""
    message = ask(client, messages, **options).choices[0].message
    return [*messages, message.model_dump(exclude_none=True)]


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("family", ["qwen", "llama3"])
def test_a_continued_conversation_appends_to_the_sampled_ids(tmp_path, family):
    template = {"qwen": QWEN_CALLS, "llama3": LLAMA3}[family]
    write = said("4", "Yes, 4.", end=END[family])
    with served(tmp_path, write, family=family, template=template) as (leader, client):
        system = {"role": "system", "content": "Be brief."}
        conversation = reply(client, [system, *QUESTION])
        assert conversation[-1] == {"role": "assistant", "content": "4"}
        reply(client, [*conversation, user("Sure?")])
        first, second = leader.asks
        assert (first.parent, second.parent) == (NO_PARENT, 0)
        assert (first.id, second.id) == (0, 1)
        conversation = [*conversation, user("Sure?"), {"role": "assistant", "content": "Yes, 4."}]
        text = leader.tokenizer.apply_chat_template(conversation, tokenize=False)
        assert leader.text(1) == text.rstrip("\n")


def test_ids_that_no_tokenizer_would_make_stay(tmp_path):
    """`th` + `e` as two tokens: the text `the` encoded again would be one."""
    with served(tmp_path, said("the", "done")) as (leader, client):
        pieces = leader.tokenizer.convert_tokens_to_ids(["th", "e", "<|im_end|>"])
        whole = leader.tokenizer("the")["input_ids"]
        assert len(whole) == 1
        encode = leader.tokenizer.__class__.__call__

        class Pieces(type(leader.tokenizer)):
            def __call__(self, text, **options):
                return {"input_ids": pieces} if "the" in text else encode(self, text, **options)

        leader.tokenizer.__class__ = Pieces
        conversation = reply(client, QUESTION)
        assert conversation[-1]["content"] == "the"
        reply(client, [*conversation, user("more")])
        assert leader.asks[1].parent == 0
        assert leader.paths["e", 1][len(leader.asks[0].tokens) :][:3] == tuple(pieces)


def test_a_tool_call_and_its_result(tmp_path):
    call = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    with served(tmp_path, said(call, "It is 7.")) as (leader, client):
        answer = ask(client, QUESTION, tools=[LOOK]).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content == "I look."
        made = answer.message.tool_calls[0]
        assert (made.type, made.function.name) == ("function", "look")
        assert made.function.arguments == '{"at": "x"}' and len(made.id) == 9
        result = {"role": "tool", "tool_call_id": made.id, "content": "7"}
        # A client may write null content, other spaces in the arguments, and keys in any order.
        history = {
            "tool_calls": [
                {
                    "function": {"arguments": '{"at":"x"}', "name": "look"},
                    "type": "function",
                    "id": made.id,
                }
            ],
            "content": [{"type": "text", "text": "I look."}],
            "refusal": None,
            "role": "assistant",
        }
        ask(client, [*QUESTION, history, result], tools=[LOOK])
        assert leader.asks[1].parent == 0
        assert leader.text(1).count("<tool_call>\n{") == 2  # the template's own words, and the call
        assert leader.text(1).endswith(
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>"
        )


def test_a_tool_result_that_is_cut_later_begins_a_branch_at_the_call(tmp_path):
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    with served(tmp_path, said(call, "Long.", "Short.")) as (leader, client):
        conversation = reply(client, QUESTION, tools=[LOOK])
        id = conversation[-1]["tool_calls"][0]["id"]
        long = {"role": "tool", "tool_call_id": id, "content": "a very long result"}
        longer = reply(client, [*conversation, long], tools=[LOOK])
        cut = [*conversation, long | {"content": "a very ..."}, longer[-1], user("And?")]
        ask(client, cut, tools=[LOOK])
        assert [a.parent for a in leader.asks] == [NO_PARENT, 0, 0]
        branch = leader.tokenizer.decode(leader.asks[2].tokens)
        assert "a very ..." in branch and "Long." in branch and "And?" in branch


@pytest.mark.parametrize("keeps", [True, False])
def test_reasoning_may_be_left_out(tmp_path, keeps):
    thought = "<think>\ntwo and two\n</think>\n\n4"
    with served(tmp_path, said(thought, "Yes."), template=QWEN3) as (leader, client):
        message = ask(client, QUESTION).choices[0].message
        assert message.content == "4" and message.reasoning_content == "two and two"
        own = message.model_dump(exclude_none=True)
        if not keeps:
            own = {"role": "assistant", "content": "4"}
        ask(client, [*QUESTION, own, user("Sure?")])
        assert leader.asks[1].parent == 0
        assert leader.text(1).count("two and two") == 1  # as it was sampled


def test_reasoning_may_not_be_changed(tmp_path):
    thought = "<think>\ntwo and two\n</think>\n\n4"
    with served(tmp_path, said(thought, "Yes."), template=QWEN3) as (leader, client):
        own = reply(client, QUESTION)[-1]
        ask(client, [*QUESTION, own | {"reasoning_content": "a guess"}, user("Sure?")])
        assert leader.asks[1].parent == NO_PARENT


def test_reasoning_put_back_into_the_content_is_a_changed_text(tmp_path):
    with served(tmp_path, said("why</think>4", "Yes.")) as (leader, client):
        own = reply(client, QUESTION)[-1]
        assert own["content"] == "4"
        ask(client, [*QUESTION, own | {"content": "why</think>4"}, user("Sure?")])
        assert leader.asks[1].parent == NO_PARENT


def test_a_summary_begins_a_trace(tmp_path):
    with served(tmp_path, said("4", "A question about 4.", "Yes.")) as (leader, client):
        conversation = reply(client, QUESTION)
        summary = reply(client, [*conversation, user("Sum up.")])[-1]["content"]
        ask(client, [user(f"So far: {summary} Sure?")])
        assert [a.parent for a in leader.asks] == [NO_PARENT, 0, NO_PARENT]
        assert "A question about 4." in leader.text(2)


def test_a_sub_agent_has_a_trace_of_its_own_and_the_agent_goes_on(tmp_path):
    with served(tmp_path, said("I ask.", "7", "It is 7.")) as (leader, client):
        conversation = reply(client, QUESTION)
        sub = ask(client, [{"role": "system", "content": "You look."}, user("x?")])
        found = sub.choices[0].message.content
        ask(client, [*conversation, user(f"The other says {found}.")])
        assert [a.parent for a in leader.asks] == [NO_PARENT, NO_PARENT, 0]


def test_the_second_of_two_samples_is_continued(tmp_path):
    with served(tmp_path, said("four", "4", "Yes.")) as (leader, client):
        answer = ask(client, QUESTION, n=2)
        assert [c.message.content for c in answer.choices] == ["four", "4"]
        assert [c.index for c in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == len(leader.asks[0].tokens)
        assert answer.usage.completion_tokens == sum(
            len(leader.tokenizer(text)["input_ids"]) + 1 for text in ("four", "4")
        )
        second = {"role": "assistant", "content": "4"}
        ask(client, [*QUESTION, second, user("Sure?")])
        assert leader.asks[1].parent == 1


def test_equal_answers_are_continued_one_after_the_other(tmp_path):
    with served(tmp_path, said("4", "4", "a", "b", "c")) as (leader, client):
        conversation = reply(client, QUESTION, n=2)
        for _ in range(3):
            ask(client, [*conversation, user("Sure?")])
        assert [a.parent for a in leader.asks[1:]] == [0, 1, 0]


def test_an_assistant_message_of_the_agents_own_is_not_an_answer(tmp_path):
    with served(tmp_path, said("4", "Yes.", "No.")) as (leader, client):
        conversation = reply(client, QUESTION)
        own = {"role": "assistant", "content": "5"}
        ask(client, [*QUESTION, own, user("Sure?")])  # in place of the answer
        ask(client, [*conversation, user("Hm."), own, user("Sure?")])  # after the answer
        assert [a.parent for a in leader.asks] == [NO_PARENT, NO_PARENT, 0]
        assert "assistant\n5<|im_end|>" in leader.tokenizer.decode(leader.asks[2].tokens)


def test_other_tools_begin_a_trace(tmp_path):
    other = {"type": "function", "function": {"name": "other"}}
    with served(tmp_path, said("4", "Yes.", "No.")) as (leader, client):
        conversation = [*reply(client, QUESTION, tools=[LOOK]), user("Sure?")]
        ask(client, conversation, tools=[LOOK, other])
        ask(client, conversation, tools=[LOOK])
        assert [a.parent for a in leader.asks] == [NO_PARENT, NO_PARENT, 0]


def test_changed_white_space_begins_a_trace(tmp_path):
    with served(tmp_path, said("4 ", "Yes.")) as (leader, client):
        own = reply(client, QUESTION)[-1]
        assert own["content"] == "4 "
        ask(client, [*QUESTION, own | {"content": "4"}, user("Sure?")])
        assert leader.asks[1].parent == NO_PARENT


def test_an_answer_that_was_cut_is_closed_and_continued(tmp_path):
    with served(tmp_path, said("4 and", " more", end="")) as (leader, client):
        answer = ask(client, QUESTION, max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        own = {"role": "assistant", "content": "4 and"}
        ask(client, [*QUESTION, own, user("Go on.")])
        assert leader.asks[1].parent == 0
        assert "4 and<|im_end|>\n<|im_start|>user\nGo on." in leader.text(1)


def test_a_text_prompt_continues_a_text_that_no_token_ended(tmp_path):
    def write(ask):
        return ["Look.\nResult:"]

    with served(tmp_path, write) as (leader, client):
        first = client.completions.create(model="m", prompt="Q: x?\n", stop=["\nResult:"])
        assert first.choices[0].text == "Look."
        client.completions.create(model="m", prompt="Q: x?\nLook.\nResult: 7\nA:")
        client.completions.create(model="m", prompt="Q: x?\nAnother.")
        assert leader.asks[0].stop == ("\nResult:",)
        assert [a.parent for a in leader.asks] == [NO_PARENT, 0, NO_PARENT]
        assert leader.tokenizer.decode(leader.asks[1].tokens) == " 7\nA:"


def test_a_text_that_a_token_ended_is_not_continued(tmp_path):
    with served(tmp_path, said("a", "b")) as (leader, client):
        client.completions.create(model="m", prompt="x")
        client.completions.create(model="m", prompt="xa, and")
        assert [a.parent for a in leader.asks] == [NO_PARENT, NO_PARENT]


def test_a_prompt_of_ids_continues_ids(tmp_path):
    with served(tmp_path, said("a", "b")) as (leader, client):
        client.completions.create(model="m", prompt=[70, 71])
        more = [*leader.paths["e", 0], 72]
        client.completions.create(model="m", prompt=more)
        assert leader.asks[0].tokens == (70, 71)
        assert (leader.asks[1].parent, leader.asks[1].tokens) == (0, (72,))


def test_the_longest_of_several_answers_is_continued():
    history = EpisodeHistory()
    conversation = []
    for node in range(3):
        conversation += [user(f"{node}?"), {"role": "assistant", "content": str(node)}]
        normal = [normal_message(m, place="") for m in conversation]
        history.add_chat(normal, [], KnownAnswer(node, 1, (node,)))
    for count, node in ((1, None), (3, 0), (5, 1), (7, 2)):
        asked = [*conversation, user("more")][:count]
        known, covered = history.find_chat([normal_message(m, place="") for m in asked], [])
        assert (known and known.node) == node and covered == count - 1
