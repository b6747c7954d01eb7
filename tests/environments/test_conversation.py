"""What the policy sampled is never tokenised again, and the template's words stand around it."""

from __future__ import annotations

import functools

import pytest
from hypothesis import strategies as st

from spmdrl.check.settings import validate
from spmdrl.data.prompts import PromptSource
from spmdrl.data.templates import encode_prompt
from spmdrl.data.tokenizer import load_tokenizer, with_template_options
from spmdrl.environments.conversation import Chat
from spmdrl.environments.protocol import ToolCall
from spmdrl.environments.tool_calls import hermes, make_parser
from spmdrl.environments.tools import make_tools
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import changed, examples, good, made, small_model
from tests.helpers.chat_templates import GEMMA, QWEN, QWEN3, chat_tokenizer
from tests.helpers.drawn import completion

FAMILIES = ("qwen", "llama3", "gemma")
TOOLS = [tool.description for tool in make_tools(["calculator"]).values()]


@functools.cache
def chat_of(family, tools=False):
    tokenizer = chat_tokenizer(family)
    return Chat(tokenizer, stop_token_ids=[tokenizer.eos_token_id], tools=TOOLS if tools else None)


# --------------------------------------------------------------------------- properties

words = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=30)
user = words.map(lambda text: [{"role": "user", "content": text}])
tool = words.map(lambda text: {"role": "tool", "name": "calculator", "content": text})
turn_ends = st.sampled_from(["stopped", "cut", "empty"])


def conversations(family):
    answers = user if family == "gemma" else user | st.lists(tool, min_size=1, max_size=3)
    head = (
        user
        if family == "gemma"
        else user | user.map(lambda m: [{"role": "system", "content": "rules"}, *m])
    )
    # Any ids of the vocabulary: a policy samples splits that no tokenizer would make.
    sampled = st.lists(st.integers(0, 255), max_size=12)
    return st.tuples(head, st.lists(st.tuples(sampled, turn_ends, answers), max_size=4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_tools", [False, True])
def test_ids_decode_to_the_templates_rendering_and_samples_are_untouched(family, with_tools):
    if family == "gemma" and with_tools:
        pytest.skip("this family has no tool turns")
    chat = chat_of(family, with_tools)
    end = chat.tokenizer.eos_token_id

    @examples(80, conversations(family))
    def check(conversation):
        head, turns = conversation
        prompt, whole, drawn = chat.encode_opening(head), list(head), []
        made = Trajectory.from_prompt(prompt)
        for n, (sampled, how, answer) in enumerate(turns):
            tokens = [*([] if how == "empty" else sampled), *([end] if how != "cut" else [])]
            drawn.append((made.num_following, tokens))
            made = made.append_completion(completion(tokens, is_truncated=how == "cut"))
            made = made.append_answer(chat.encode_answer(tokens, answer))
            whole += [{"role": "assistant", "content": f"reply-number-{n}"}, *answer]
        rendered = chat.tokenizer.apply_chat_template(
            whole, tools=TOOLS if with_tools else None, tokenize=False, add_generation_prompt=True
        )
        decode = chat.tokenizer.decode
        for n, (_, tokens) in enumerate(drawn):
            reply = decode([t for t in tokens if t != end])
            rendered = rendered.replace(f"reply-number-{n}", f"{n}\ufffd{reply}\ufffd{n}", 1)
        # Cut between replies, since bytes of a reply that are no UTF-8 decode as a whole.
        response, is_sampled = made.response, made.response_mask[len(prompt) :].tolist()
        assert made.tokens[: len(prompt)].tolist() == list(prompt)
        assert _decoded(chat, prompt, response, drawn) == rendered
        marked = made.tokens[made.response_mask].tolist()
        assert marked == [t for _, tokens in drawn for t in tokens]
        for start, tokens in drawn:
            assert response[start : start + len(tokens)] == tokens
            assert is_sampled[start : start + len(tokens)] == [True] * len(tokens)

    check()


def _decoded(chat, prompt, response, drawn):
    """Decode a conversation piece by piece, marking the replies as the test does."""
    decode, end = chat.tokenizer.decode, chat.tokenizer.eos_token_id
    text, at = decode(prompt), 0
    for n, (start, tokens) in enumerate(drawn):
        stop = start + len(tokens)
        is_closed = tokens[-1:] == [end]
        text += decode(response[at:start])
        text += f"{n}\ufffd{decode(tokens[: len(tokens) - is_closed])}\ufffd{n}"
        text += decode([end]) if is_closed else ""
        at = stop
    return text + decode(response[at:])


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_whole_text_where_the_policy_splits_as_the_tokenizer_does(family):
    chat = chat_of(family)
    end = chat.tokenizer.eos_token_id
    head, answer = (
        [{"role": "user", "content": "in the end"}],
        [{"role": "user", "content": "the other, then"}],
    )
    reply = "then on"
    tokens = chat.encode_opening(head)
    for _ in range(3):
        sampled = [*chat.tokenizer(reply, add_special_tokens=False)["input_ids"], end]
        tokens += sampled + chat.encode_answer(sampled, answer)
    turns = [{"role": "assistant", "content": reply}, *answer]
    text = chat.tokenizer.apply_chat_template(
        [*head, *turns * 3], tokenize=False, add_generation_prompt=True
    )
    assert [*tokens] == chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_turn_that_ended_by_another_stop_token_is_closed_by_it():
    tokenizer = chat_tokenizer("llama3")
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    chat = Chat(tokenizer, stop_token_ids=[tokenizer.eos_token_id, eom])
    answer = [{"role": "tool", "content": "7"}]
    assert chat.encode_answer([5, eom], answer) == chat.encode_answer(
        [5, tokenizer.eos_token_id], answer
    )
    assert [*chat.encode_answer([5], answer)] == [
        tokenizer.eos_token_id,
        *chat.encode_answer([eom], answer),
    ]


def test_a_final_assistant_message_is_continued():
    chat = chat_of("qwen")
    opened = chat.encode_opening(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}]
    )
    assert chat.tokenizer.decode(opened).endswith("<|im_start|>assistant\nSo")


def test_the_character_tokenizer_of_the_demos_serves():
    words = character_tokenizer(chat_template=True)
    chat = Chat(words, stop_token_ids=[words.eos_token_id])
    tokens = chat.encode_opening([{"role": "user", "content": "go"}])
    tokens += [words.eos_token_id] + chat.encode_answer(
        [words.eos_token_id], [{"role": "user", "content": "higher"}]
    )
    assert words.decode(tokens) == (
        "<|im_start|>user\ngo<eos>\n<|im_start|>assistant\n<eos>\n"
        "<|im_start|>user\nhigher<eos>\n<|im_start|>assistant\n"
    )


# --------------------------------------------------------------------------- refusals


def refusal(tokenizer, **options):
    stops = options.pop("stops", [tokenizer.eos_token_id])
    with pytest.raises(ValueError) as caught:
        Chat(tokenizer, stop_token_ids=stops, **options)
    return str(caught.value)


def test_a_template_that_strips_reasoning_is_taken_or_refused_with_what_it_strips():
    words = chat_tokenizer("qwen", template=QWEN3)
    assert Chat(words, stop_token_ids=[words.eos_token_id]).drops_reasoning
    assert not chat_of("qwen").drops_reasoning
    for prefix in ("<think>", "<think>\n"):  # which the policy closes
        assert Chat(words, stop_token_ids=[words.eos_token_id], prefix=prefix).drops_reasoning
        assert "<think>" in refusal(words, rewrites="refuse", prefix=prefix)
    message = refusal(words, rewrites="refuse")
    assert "rewrites earlier turns" in message and "{rewrites: keep}" in message
    ours, theirs = message.split("becomes")
    assert "<think>" in ours and "<think>" not in theirs.split("The policy")[0]


def test_a_template_that_moves_the_tools_is_refused_only_with_tools():
    words = chat_tokenizer("mistral")
    Chat(words, stop_token_ids=[words.eos_token_id])
    assert "[AVAILABLE_TOOLS]" in refusal(words, tools=TOOLS)


def test_kept_conversations_go_on_from_what_was_sampled():
    words = chat_tokenizer("qwen", template=QWEN3)
    chat = Chat(words, stop_token_ids=[words.eos_token_id], rewrites="keep")
    plain = chat_of("qwen")
    more = [{"role": "user", "content": "more"}]
    assert chat.encode_opening(more) == plain.encode_opening(more)
    sampled = [1, 2, words.eos_token_id]
    assert chat.encode_answer(sampled, more) == plain.encode_answer(sampled, more)
    words = chat_tokenizer("mistral")
    chat = Chat(words, stop_token_ids=[words.eos_token_id], tools=TOOLS, rewrites="keep")
    assert "[AVAILABLE_TOOLS]" in words.decode(chat.encode_opening(more))
    assert words.decode(chat.encode_answer([1], more)) == "</s>[INST]more[/INST]"


def test_a_template_that_forgets_replies_is_refused():
    template = QWEN.replace(
        "or message.role == 'assistant'", "or loop.last and messages | length < 3"
    )
    assert "leaves a reply out" in refusal(chat_tokenizer("qwen", template=template))


def test_a_reply_must_close_by_a_token_that_stops_the_engine():
    words = chat_tokenizer("qwen")
    message = refusal(words, stops=[words.bos_token_id])
    assert f"sampling.stop_token_ids: {words.eos_token_id}" in message
    assert "'<|im_end|>'" in message and "'<|endoftext|>'" in message


def test_missing_templates_and_refused_roles_say_so():
    assert "has none" in refusal(character_tokenizer())
    message = refusal(chat_tokenizer("gemma"), tools=TOOLS)
    assert "knows no tools" in message and "reply_role" in message
    chat = chat_of("gemma")
    with pytest.raises(ValueError, match="must alternate"):
        chat.encode_opening([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(ValueError, match="must alternate"):
        chat.encode_answer(
            [1], [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        )
    assert chat.tokenizer.chat_template == GEMMA  # the conversation above is the template's limit


def test_a_run_says_how_to_treat_rewriting_in_its_config():
    words = chat_tokenizer("qwen", template=QWEN3)
    given = {"stop_token_ids": [words.eos_token_id], "tools": TOOLS}
    assert Chat(words, rewrites="keep", **given).tools == TOOLS
    assert Chat(words, **given).drops_reasoning
    with pytest.raises(ValueError, match="<think>"):
        Chat(words, rewrites="refuse", **given)
    # What changes more than reasoning is refused.
    worse = chat_tokenizer(
        "qwen", template=QWEN3.replace("lstrip('\\n')", "lstrip('\\n') | replace('second', '2nd')")
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        Chat(worse, stop_token_ids=[worse.eos_token_id])


def test_every_turn_begins_with_the_prefix_and_options_reach_the_template():
    thinking = "{{- '<think>\\n\\n</think>\\n\\n' }}"
    asked = "{%- if enable_thinking is defined and not enable_thinking %}"
    template = QWEN + "{%- if add_generation_prompt %}" + asked + thinking + 2 * "{%- endif %}"
    words = chat_tokenizer("qwen", template=template)
    more = [{"role": "user", "content": "more"}]
    end = words.eos_token_id

    def told(**options) -> str:
        chat = Chat(words, stop_token_ids=[end], **options)
        return words.decode(
            [*chat.encode_opening(more), 1, end, *chat.encode_answer([1, end], more)]
        )

    plain = told()
    assert told(prefix="<go>") == plain.replace("assistant\n", "assistant\n<go>")
    for name, word in (
        ("enable_thinkin", "reads no such name"),
        ("tools", "is set for each prompt"),
    ):
        with pytest.raises(ValueError, match=word):
            with_template_options(words, {name: False})
    with pytest.raises(ValueError, match="has none"):
        with_template_options(character_tokenizer(), {"enable_thinking": False})
    with_template_options(words, {"enable_thinking": False})
    assert told() == plain.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    assert encode_prompt(more, words, template="auto", tools=None, where="", prefix="<go>")[
        1
    ].endswith("</think>\n\n<go>")
    begun = [*more, {"role": "assistant", "content": "so"}]
    for prompt, text in ((begun, "so"), ("plain", "plain<go>")):
        found = encode_prompt(prompt, words, template="auto", tools=None, where="", prefix="<go>")
        assert found[1].endswith(text)


# --------------------------------------------------------------------------- responses


def test_responses_have_text_without_and_calls_with_special_tokens():
    words = chat_tokenizer("llama3")
    chat = Chat(
        words, stop_token_ids=[words.eos_token_id], tools=TOOLS, parser=make_parser("auto", words)
    )
    text = '<|python_tag|>{"name": "calculator", "parameters": {"expression": "1+1"}}<|eot_id|>'
    tokens = words(text, add_special_tokens=False)["input_ids"]
    found, cut = chat.decode_turns([tokens, [1, 2]], are_truncated=[False, True])
    assert found.text == '{"name": "calculator", "parameters": {"expression": "1+1"}}'
    assert found.tool_calls == (ToolCall("calculator", {"expression": "1+1"}),)
    assert not found.is_truncated and cut.is_truncated and cut.tool_calls == ()


def test_the_parser_is_told_from_the_template():
    assert make_parser("auto", chat_tokenizer("qwen")) is hermes
    with pytest.raises(ValueError, match="name one"):
        make_parser("auto", chat_tokenizer("gemma"))
    with pytest.raises(ValueError, match="did you mean hermes"):
        make_parser("hermse", chat_tokenizer("gemma"))


def test_calls_are_read_as_vllm_reads_them():
    words = chat_tokenizer("llama3")
    ours = {name: make_parser(name, words) for name in ("hermes", "llama3")}
    theirs = {
        "hermes": make_parser("vllm:hermes", words),
        "llama3": make_parser("vllm:llama3_json", words),
    }
    one = '{"name": "f", "arguments": {"a": [1, {"b": null}]}}'
    two = '{"name": "g", "arguments": {}}'
    for text in (
        "just text",
        f"Well. <tool_call>\n{one}\n</tool_call>",
        f"<tool_call>{one}</tool_call>\n<tool_call>{two}",
        f"{one}; {two}",
        f"<|python_tag|>{one.replace('arguments', 'parameters')}",
        f"So: {one} and so on",
    ):
        for name in ours:
            assert ours[name](text) == theirs[name](text), (name, text)
    with pytest.raises(ValueError, match="vllm:nothing"):
        make_parser("vllm:nothing", words)


def test_settings_reach_prompts_and_templates(tmp_path):
    folder = small_model(tmp_path / "m", chat_template=True)
    data = dict(train="task:addition", size=4, generation_prefix="= ", chat_template="always")
    cfg = made(model=dict(path=str(folder)), data=data, batch=dict(prompts_per_step=4))
    prompts = PromptSource(cfg, load_tokenizer(cfg)).at(0)
    assert all(prompt.text.endswith("= ") for prompt in prompts)
    never = dict(chat_template="never", chat_template_kwargs=dict(enable_thinking=False))
    (problem,) = validate(good(data=never))
    assert problem.startswith("data.chat_template_kwargs: {enable_thinking: false} with ")
    assert "data.chat_template never; they are for" in problem
    assert not validate(good(data=never, rollout=dict(environment=dict(name="guess_number"))))
    asked = changed(cfg, data=dict(chat_template_kwargs=dict(add_generation_promt=True)))
    with pytest.raises(ValueError, match="reads no such name"):
        load_tokenizer(asked)
