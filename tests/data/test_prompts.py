"""Prompts of a step and supervised examples: order, limits, templates, masks."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import strategies as st

from spmdrl.data.examples import SupervisedSource, example_source, row_kind
from spmdrl.data.imitation import encode_example
from spmdrl.data.prompt_order import Order
from spmdrl.data.prompts import PromptSource, check_context
from spmdrl.data.tokenizer import end_token_ids, load_tokenizer
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from tests.helpers.built import changed, examples, made

PLAIN, CHAT = character_tokenizer(), character_tokenizer(chat_template=True)
USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def config(train, *, per_step=4, seed=0, max_prompt=64, max_response=16, **data):
    return made(
        seed=seed,
        data=dict(train=train, max_prompt_tokens=max_prompt, **data),
        batch=dict(prompts_per_step=per_step),
        model=dict(path="m"),
        sampling=dict(max_response_tokens=max_response),
    )


def jsonl(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --------------------------------------------------------------------------- order


@examples(
    50,
    num_rows=st.integers(1, 60),
    data=st.data(),
    seed=st.integers(-3, 2**70),
    shuffle=st.booleans(),
)
def test_order_takes_every_row_once_per_epoch(num_rows, data, seed, shuffle):
    per_step = data.draw(st.integers(1, num_rows))
    order = Order(num_rows, per_step=per_step, seed=seed, shuffle=shuffle)
    taken = [i for step in range(num_rows) for i in order.at(step)]  # per_step whole epochs
    for epoch in range(per_step):
        assert sorted(taken[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    step = data.draw(st.integers(0, 10**6))
    fresh = Order(num_rows, per_step=per_step, seed=seed, shuffle=shuffle)
    assert order.at(step) == fresh.at(step)


def test_order_differs_between_epochs_and_seeds():
    order = Order(100, per_step=100, seed=0, shuffle=True)
    assert order.at(0) != order.at(1)
    assert order.at(0) != Order(100, per_step=100, seed=1, shuffle=True).at(0)
    assert Order(100, per_step=100, seed=0, shuffle=False).at(3) == list(range(100))


def test_prompts_of_a_step_do_not_depend_on_the_steps_before():
    cfg = config("task:addition", size=100, per_step=16, eval="task:addition", eval_size=20)
    source, fresh = PromptSource(cfg, PLAIN), PromptSource(cfg, PLAIN)
    prompts = [source.at(step) for step in range(10)][9]
    assert fresh.at(9) == prompts
    assert [PLAIN.decode(p.tokens) for p in prompts] == [p.text for p in prompts]
    assert all(p.row["prompt"] == p.text for p in prompts)
    drawn = Counter(p.index for s in range(25) for p in source.at(s))
    assert drawn == dict.fromkeys(range(100), 4)


def test_held_out_prompts_are_the_same_for_every_seed_and_never_trained_on():
    def source(seed):
        held_out = dict(eval="task:addition", eval_size=50, task_options={"digits": 2})
        return PromptSource(config("task:addition", size=400, seed=seed, **held_out), PLAIN)

    held_out = source(0).eval()
    assert len(held_out) == 50
    assert held_out == source(7).eval()
    assert not {p.text for p in held_out} & {
        p.text for step in range(100) for p in source(7).at(step)
    }
    assert PromptSource(config("task:addition", size=10), PLAIN).eval() == []


# --------------------------------------------------------------------------- limits


def test_overlong_prompt_is_an_error_with_file_and_line_or_dropped_and_counted(tmp_path):
    file = jsonl(tmp_path, [{"prompt": "x" * n} for n in (5, 2000, 64, 65, 3)])
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: 2000 tokens.*max_prompt_tokens = 64"):
        PromptSource(config(file, per_step=1), PLAIN)
    source = PromptSource(config(file, per_step=3, overlong_prompts="drop"), PLAIN)
    assert source.num_dropped == 2
    assert sorted(p.index for p in source.at(0)) == [0, 2, 4]
    long = jsonl(tmp_path, [{"prompt": "x" * 2000}] * 3)
    with pytest.raises(ValueError, match="all 3 rows are longer"):
        PromptSource(config(long, per_step=1, overlong_prompts="drop"), PLAIN)


def test_columns_are_renamed_for_prompts_held_out_prompts_and_examples(tmp_path):
    file = jsonl(tmp_path, [{"question": f"q{i}", "solution": "s"} for i in range(4)])
    columns = {"prompt": "question", "completion": "solution"}
    cfg = config(file, eval=file, columns=columns, shuffle=False)
    source = PromptSource(cfg, PLAIN)
    assert [p.text for p in source.at(0)] == [p.text for p in source.eval()]
    assert [p.text for p in source.at(0)] == ["q0", "q1", "q2", "q3"]
    assert SupervisedSource(cfg, PLAIN).units_at(0)


def test_a_generated_prompt_too_long_is_refused_at_start():
    with pytest.raises(ValueError, match="8 tokens, above data.max_prompt_tokens = 7"):
        PromptSource(config("task:addition", size=1000, max_prompt=7), PLAIN)


def test_a_step_larger_than_the_data_is_refused(tmp_path):
    file = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ValueError, match="prompts_per_step: 3 is above the 2 usable rows"):
        PromptSource(config(file, per_step=3), PLAIN)


def test_prompt_and_response_beyond_the_context_are_refused_with_the_arithmetic():
    cfg = config("task:addition", size=10)
    check_context(cfg, PLAIN, max_positions=80, vocab_size=len(PLAIN))
    with pytest.raises(ValueError, match=r"64 \+ .* 16 = 80 tokens, above .* 79"):
        check_context(cfg, PLAIN, max_positions=79)
    with pytest.raises(ValueError, match="embedding 10 rows"):
        check_context(cfg, PLAIN, max_positions=80, vocab_size=10)


def test_rows_are_held_to_the_context_and_limits_of_sampling_are_not(tmp_path):
    rows = [{"prompt": "q", "completion": "a" * length} for length in (3, 20)]
    cfg = changed(config(jsonl(tmp_path, rows), per_step=1), algorithm=dict(objective="sft"))
    assert cfg.longest_sequence == 80
    check_context(cfg, PLAIN, max_positions=30, vocab_size=len(PLAIN))
    assert example_source(cfg, PLAIN, max_positions=30).num_dropped == 0
    says = (
        r"rows\.jsonl:2: 22 tokens, above the model's max_position_embeddings = 10; shorten the row"
    )
    with pytest.raises(ValueError, match=says):
        example_source(cfg, PLAIN, max_positions=10)
    drops = changed(cfg, data=dict(overlong_prompts="drop"))
    assert example_source(drops, PLAIN, max_positions=10).num_dropped == 1


# --------------------------------------------------------------------------- templates


def test_chat_template_applies_to_messages_and_on_request_to_text(tmp_path):
    file = jsonl(tmp_path, [{"prompt": [USER]}, {"prompt": "hi"}, {"messages": [USER, REPLY]}])
    asked = "<|im_start|>user\nhi<eos>\n<|im_start|>assistant\n"

    def texts(mode):
        cfg = config(file, per_step=3, shuffle=False, chat_template=mode)
        prompts = PromptSource(cfg, CHAT).at(0)
        assert [CHAT.decode(p.tokens) for p in prompts] == [p.text for p in prompts]
        return [p.text for p in prompts]

    assert texts("auto") == [asked, "hi", asked]
    assert texts("always") == [asked] * 3
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*chat_template is `never`"):
        texts("never")


def test_a_prompt_that_ends_with_the_assistant_is_left_open_to_continue(tmp_path):
    file = jsonl(tmp_path, [{"prompt": [USER, {"role": "assistant", "content": "The sum"}]}])
    prompt = PromptSource(config(file, per_step=1), CHAT).at(0)[0]
    assert prompt.text == "<|im_start|>user\nhi<eos>\n<|im_start|>assistant\nThe sum"


def test_missing_chat_template_names_the_row_that_needs_one(tmp_path):
    file = jsonl(tmp_path, [{"prompt": [USER]}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the row needs a chat template"):
        PromptSource(config(file, per_step=1), PLAIN)


def test_missing_tokenizer_folder_is_refused(tmp_path):
    for folder, says in (
        ("none", "folder .* does not exist"),
        ("", "the folder .* has no files of a tokenizer"),
    ):
        with pytest.raises(ValueError, match=f"model.path: {says}"):
            load_tokenizer(made(model=dict(path=str(tmp_path / folder))))
    PLAIN.save_pretrained(tmp_path / "t")
    assert load_tokenizer(made(model=dict(path=str(tmp_path / "t")))).eos_token == "<eos>"


# --------------------------------------------------------------------------- supervised


def trained_texts(tokens, mask, tokenizer=CHAT):
    """Return the decoded runs of trained tokens."""
    runs, before = [], False
    for token, is_trained in zip(tokens, mask, strict=True):
        if is_trained:
            runs = runs[:-1] + [runs[-1] + [token]] if before else runs + [[token]]
        before = is_trained
    return [tokenizer.decode(run) for run in runs]


def encode(row, tokenizer=CHAT, template="auto"):
    return encode_example(row, tokenizer, template=template, where="f:1")[:2]


def test_generated_rows_train_the_answer_and_eos():
    source = SupervisedSource(config("task:addition", size=64, per_step=8), PLAIN)
    rows = source.units_at(3)
    assert rows == SupervisedSource(config("task:addition", size=64, per_step=8), PLAIN).units_at(3)
    for ((tokens, mask),) in (unit.examples for unit in rows):
        question, answer = PLAIN.decode(tokens).removesuffix("<eos>").split("=")
        assert eval(question) == int(answer)  # our own digits
        assert trained_texts(tokens, mask, PLAIN) == [answer + "<eos>"]
        assert not any(mask[: len(question) + 1])


def test_distillation_takes_the_rows_of_supervised_training(tmp_path):
    file = jsonl(tmp_path, [{"prompt": f"q{i}", "completion": "a"} for i in range(4)])
    cfg = changed(config(file), algorithm=dict(objective="distill", loss="divergence"))
    assert row_kind(cfg) == "example"
    assert example_source(cfg, PLAIN).units_at(0) == SupervisedSource(cfg, PLAIN).units_at(0)


def test_only_assistant_turns_and_their_end_token_are_trained():
    later = [("user", "ho"), ("assistant", "bye"), ("user", "never seen")]
    messages = [{"role": "system", "content": "s"}, USER, REPLY]
    messages += [{"role": role, "content": text} for role, text in later]
    tokens, mask = encode({"messages": messages})
    assert trained_texts(tokens, mask) == ["ho<eos>", "bye<eos>"]
    assert CHAT.decode(tokens) == (
        "<|im_start|>system\ns<eos>\n<|im_start|>user\nhi<eos>\n<|im_start|>assistant\nho<eos>\n"
        "<|im_start|>user\nho<eos>\n<|im_start|>assistant\nbye<eos>"
    )


def test_completions_train_only_themselves():
    for row in ({"prompt": "2+2=", "completion": "4"}, {"prompt": "2+2=", "answer": "4"}):
        tokens, mask = encode(row)
        assert (CHAT.decode(tokens), trained_texts(tokens, mask)) == ("2+2=4<eos>", ["4<eos>"])
    chat = {"prompt": [USER, REPLY, USER], "completion": [REPLY]}
    assert trained_texts(*encode(chat)) == ["ho<eos>"]
    assert trained_texts(*encode({"prompt": "2+2=", "answer": "4"}, template="always")) == [
        "4<eos>"
    ]
    assert trained_texts(*encode({"text": "abc"})) == ["bc<eos>"]
    with pytest.raises(ValueError, match="f:1: the response to imitate must be text"):
        encode({"prompt": "2+2=", "answer": 4})


def test_supervised_context_is_what_generation_starts_from(tmp_path):
    file = jsonl(tmp_path, [{"messages": [USER, REPLY]}])
    prompt = PromptSource(config(file, per_step=1), CHAT).at(0)[0]
    (unit,) = SupervisedSource(config(file, per_step=1), CHAT).units_at(0)
    ((tokens, mask),) = unit.examples
    assert tuple(tokens[: mask.index(True)]) == prompt.tokens


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = character_tokenizer(chat_template=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}think {% endif %}{{ m.content }}<eos>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert trained_texts(*encode({"messages": [USER, REPLY]}, tokenizer)) == ["think ho<eos>"]
    with pytest.raises(ValueError, match="f:1: the chat template rewrites .* 'think"):
        encode({"messages": [USER, REPLY, USER, REPLY]}, tokenizer)


def test_a_template_without_an_end_token_or_that_fails_is_refused():
    tokenizer = character_tokenizer(chat_template=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="could not learn to stop"):
        encode({"messages": [USER, REPLY]}, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="f:1: the chat template refuses .*alternate"):
        encode({"messages": [USER, REPLY]}, tokenizer)
    with pytest.raises(ValueError, match="begins with an assistant turn"):
        encode({"messages": [REPLY, USER, REPLY]})


def test_a_merge_across_the_border_does_not_leak_into_the_mask():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "c": 4}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    assert tokenizer("cab")["input_ids"] == [4, 3]
    tokens, mask = encode({"prompt": "ca", "completion": "b"}, tokenizer)
    assert [*tokens] == [*tokenizer("ca")["input_ids"], 2, 0]
    assert mask == [False, False, True, True]


def test_overlong_supervised_rows_are_refused_or_dropped(tmp_path):
    file = jsonl(tmp_path, [{"text": "x" * 20}, {"text": "y" * 900}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: 901 tokens.*= 80"):
        SupervisedSource(config(file, per_step=1), PLAIN)
    source = SupervisedSource(config(file, per_step=1, overlong_prompts="drop"), PLAIN)
    assert source.num_dropped == 1 and len(source.units_at(5)[0].examples[0][0]) == 21


def test_a_response_ends_at_the_ids_of_config_tokenizer_and_model(tiny_model, tmp_path):
    tokenizer = load_tokenizer(made(model=dict(path=str(tiny_model))))
    eos = tokenizer.eos_token_id
    for name, content in (("config.json", [eos, 7]), ("generation_config.json", 9)):
        text = {"eos_token_id": content}
        if name == "config.json":
            text = json.loads((tiny_model / name).read_text()) | text
        (tmp_path / name).write_text(json.dumps(text))
        cfg = made(model=dict(path=str(tmp_path)), sampling=dict(stop_token_ids=(5,)))
        expected = {5, eos, 7} if name == "config.json" else {5, eos, 9}
        assert set(end_token_ids(cfg, tokenizer)) == expected
