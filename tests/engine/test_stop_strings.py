"""Strings that end responses: at the token that completes one, in both engines."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spmdrl.check.settings import validate
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.engine.protocol import Request, Truncation
from spmdrl.engine.stop_strings import StopStrings, make_stop_strings
from tests.helpers.built import changed, good, made, small_model
from tests.helpers.drawn import finished
from tests.helpers.worlds import in_world, make_engine

TEXTS = (
    "the answer is <answer>42</answer>\n\nand the answer again </answer>",
    "héllo wörld, ça va? 日本語 the answer</ans wer>",
    "no stop here",
    "</answer>",
    "an<pad>swer <pad><pad><pad><pad><pad><pad><pad><pad><pad><pad><pad><pad></answer>",
)
STOPS = ("</answer>", "\n\n", "日", "a?", "<pad></")


def words() -> PreTrainedTokenizerFast:
    """Byte pairs: characters in parts, parts of the strings in longer tokens."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<pad>"], show_progress=False
    )
    own.train_from_iterator(TEXTS[:1] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>")


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_response_ends_at_the_first_token_that_completes_a_string(step):
    tokenizer = words()
    ends = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for stops in (STOPS[:1], STOPS, STOPS[2:3]):
            for begun in (0, 3):
                found = StopStrings(tokenizer)
                prompt = (7, 8, *ids[:begun])
                found.add(Request("k", prompt, 99, 1.0, 0, (), stop=stops, num_begun=begun))
                want = next(
                    (
                        n
                        for n in range(begun + 1, len(ids) + 1)
                        if any(s in tokenizer.decode(ids[:n]) for s in stops)
                    ),
                    None,
                )
                end, own = None, ids[begun:]
                for n in range(step, len(own) + step, step):
                    end = found.end("k", own[:n])
                    if end is not None:
                        break
                assert end == (None if want is None else want - begun), (text, stops)
                ends.append(end)
    assert None in ends and len(set(ends)) > 5


def drawn_by(world) -> dict[str, tuple]:
    tokenizer = load_tokenizer(world.cfg)
    engine = make_engine(world.cfg, world)

    def drawn(stop: tuple[str, ...]) -> dict:
        for i in range(12):
            prompt = (5, 6, 7) if i % 2 else (9, 10, 11, 12)
            engine.add(Request(str(i), prompt, 10 + i, 1.0, i, (), Truncation(top_k=40), stop=stop))
        return finished(engine)

    whole = drawn(())
    # What some of them say, and one whose last token alone completes it at the length limit.
    texts = {key: tokenizer.decode(one.tokens) for key, one in whole.items()}
    stops = (texts["3"][4:6], texts["5"][1], texts["8"][-2:])
    cut = drawn(stops)
    assert not engine.is_busy
    engine.close()
    ends = {
        key: next(
            (
                n
                for n in range(1, len(one.tokens) + 1)
                if any(s in tokenizer.decode(one.tokens[:n]) for s in stops)
            ),
            None,
        )
        for key, one in whole.items()
    }
    return {"whole": whole, "cut": cut, "ends": ends}


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_engines_end_responses_alike_and_change_no_token_before(kind, tmp_path):
    folder = small_model(tmp_path / "m", hidden_size=64, heads=2, kv_heads=2)
    cfg = made(
        layout=dict(placement="colocated", world_size=1, device="cpu"),
        model=dict(path=str(folder)),
        data=dict(max_prompt_tokens=16),
        sampling=dict(max_response_tokens=24, stop=("x",), top_k=90),
        engine=dict(kind=kind, dtype="float32", cpu_kv_cache_gib=0.01, max_num_seqs=4),
    )
    (found,) = in_world(cfg, drawn_by)
    whole, cut = found["whole"], found["cut"]
    ended = 0
    for key, one in whole.items():
        end = found["ends"][key]
        assert cut[key].tokens == one.tokens[:end]
        assert cut[key].logprobs == pytest.approx(one.logprobs[:end], abs=1e-5)
        assert len(cut[key].versions) == len(cut[key].tokens)
        assert cut[key].is_truncated == (end is None), key
        ended += end is not None
    assert ended >= 3 and len(cut) == 12
    assert any(len(cut[k].tokens) == len(whole[k].tokens) and not cut[k].is_truncated for k in cut)


def test_strings_that_cannot_end_a_response_are_refused():
    layout = dict(device="cpu")
    assert validate(good(sampling=dict(stop=("</answer>",)), layout=layout)) == []
    for bad in ("", "a" * 257, "a\ufffd"):
        (found,) = validate(good(sampling=dict(stop=("ok", bad)), layout=layout))
        assert found.startswith("sampling.stop: ")


def test_strings_of_agents_are_sought_where_the_run_has_none(tmp_path):
    cfg = made(model=dict(path=str(small_model(tmp_path))))
    assert not make_stop_strings(cfg).are_sought
    found = make_stop_strings(changed(cfg, rollout=dict(agent="a.py:solve")))
    tokenizer = load_tokenizer(cfg)
    tokens = tokenizer("1+2", add_special_tokens=False)["input_ids"]
    found.add(Request("k", (7,), 99, 1.0, 0, (), stop=("+",)))
    assert found.end("k", tokens) == len(tokens) - 1
