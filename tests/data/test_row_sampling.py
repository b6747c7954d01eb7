"""Rows that say how their own responses are drawn."""

from __future__ import annotations

import json

import pytest

from spmdrl.check.settings import validate
from spmdrl.data.prompts import PromptSource
from spmdrl.data.row_sampling import row_sampling
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.engine.protocol import Truncation
from spmdrl.rollout.episode import Draw
from spmdrl.rollout.recordings import find_recorded, read_table
from tests.helpers.built import changed, good, made, small_model
from tests.helpers.runs import metrics, run
from tests.program.test_sampling_masks import flags_of

WRONG = [
    ("x", "must be a mapping"),
    ({"temperature": 0.5}, "temperature is the same for all rows.*sampling.temperature"),
    ({"stop": ["a"]}, "stop is the same for all rows"),
    ({"top_q": 0.5}, "did you mean top_p"),
    ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
    ({"top_p": True}, "top_p must be in"),
    ({"min_p": 1.5}, r"min_p must be in \[0, 1\]"),
    ({"top_k": -1}, "top_k must be a whole number from 0"),
    ({"top_k": 2.0}, "top_k must be a whole number"),
    ({"max_tokens": 65}, "max_tokens must be a whole number from 1 to 64"),
]


def test_what_a_row_sets_is_taken_or_refused_with_its_place(tmp_path):
    cfg = good(sampling=dict(column="own", max_response_tokens=64), layout=dict(device="cpu"))
    assert validate(cfg) == [] and cfg.sampling.truncates
    asked = {"top_p": 0.9, "max_tokens": 7, "top_k": None}
    assert row_sampling({"own": asked}, cfg, where="w") == {"top_p": 0.9, "max_tokens": 7}
    assert row_sampling({}, cfg, where="w") == row_sampling({"own": None}, cfg, where="w") == {}
    assert row_sampling({"own": "x"}, good(), where="w") == {}  # no column is named
    for value, words in WRONG:
        with pytest.raises(ValueError, match=f"w: column own: .*{words}|w: column own: {words}"):
            row_sampling({"own": value}, cfg, where="w")
    shaped = good(sampling=dict(column="own"), rewards=dict(shaping=dict(overlong_tokens=5)))
    with pytest.raises(ValueError, match="overlong_tokens"):
        row_sampling({"own": {"max_tokens": 3}}, shaped, where="w")
    ngram = dict(method="ngram", num_speculative_tokens=4)
    drafting = changed(cfg, engine=dict(options=dict(speculative_config=ngram)))
    assert row_sampling({"own": {"min_p": 0}}, drafting, where="w") == {"min_p": 0}
    with pytest.raises(ValueError, match="min_p does not go with engine.options.speculative"):
        row_sampling({"own": {"min_p": 0.1}}, drafting, where="w")
    draw = Draw(0, "train", 2, 64, 1.0, True, (), truncation=Truncation(top_k=9))
    assert draw.of_row({}) is draw
    mine = draw.of_row(asked | {"top_k": 3})
    assert mine.max_tokens == 7 and mine.truncation == Truncation(top_p=0.9, top_k=3)
    assert draw.of_row({"min_p": 0.1}).truncation == Truncation(top_k=9, min_p=0.1)

    rows = [
        {"prompt": "a"},
        {"prompt": "b", "own": {"top_p": 0.5}},
        {"prompt": "c", "own": {"a": 1}},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    folder = small_model(tmp_path / "m")
    bad = made(
        model=dict(path=str(folder)),
        data=dict(train=str(file)),
        batch=dict(prompts_per_step=2),
        sampling=dict(column="own"),
    )
    with pytest.raises(ValueError, match=r"rows.jsonl.*3.*'a' is not known"):
        PromptSource(bad, load_tokenizer(bad))
    # Also behind the rows that are tokenised at start.
    many = [{"prompt": "a", "own": {"top_k": 3}}] * 300 + [{"prompt": "b", "own": {"top_k": -1}}]
    file.write_text("\n".join(map(json.dumps, many)))
    with pytest.raises(ValueError, match=r"rows.jsonl.*301.*top_k must be"):
        PromptSource(bad, load_tokenizer(bad))
    file.write_text("\n".join(map(json.dumps, [{"prompt": "a"}] * 5)))
    with pytest.raises(ValueError, match="sampling.column: no row has a column 'own'"):
        PromptSource(bad, load_tokenizer(bad))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "a", "own": {"top_k": 3}}))
    PromptSource(changed(bad, data=dict(eval=str(held_out))), load_tokenizer(bad))


def test_a_run_draws_each_row_by_its_own_settings(tmp_path):
    sizes = dict(hidden_size=64, heads=2, kv_heads=2)
    folder, file, out = (tmp_path / name for name in ("m", "rows.jsonl", "out"))
    small_model(folder, initializer_std=0.2, **sizes)
    own = [None, {"top_k": 2}, {"max_tokens": 3}, {"max_tokens": 4, "top_p": 1e-6}]
    rows = [{"prompt": f"{i}+1=", "sampling": own[i % 4]} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, rows)))
    flags = flags_of(folder, out) | {
        "engine.kind": "transformers",
        "data.train": file,
        "data.size": 0,
        "data.task-options": "{}",
        "data.eval": file,
        "evaluate.every-steps": 1,
        "evaluate.temperature": 0,
        "sampling.column": "sampling",
        "sampling.max-response-tokens": 12,
        "sampling.top-p": 1.0,
        "sampling.top-k": 0,
        "sampling.min-p": 0.0,
    }
    run("demo_grpo.yaml", 2, **flags, steps=1)
    (step, *_) = [row for row in metrics(out) if "policy/staleness" in row]
    assert step["policy/mismatch_logprob_diff"] < 2e-6 and 0 < step["rollout/kept_all_frac"] < 1
    (path,) = find_recorded(out).files_of(0)
    seen = set()
    for row in read_table(path).to_pylist():
        how = own[row["row"] % 4] or {}
        assert row["response_length"] <= how.get("max_tokens", 12)
        sizes = row["sampling_mask_bytes"] or [0] * row["length"]  # null: no token has a mask
        cut = [size > 0 for size, s in zip(sizes, row["response_mask"], strict=True) if s]
        assert all(cut) if {"top_k", "top_p"} & how.keys() else not any(cut)
        if "top_p" in how:
            drawn = [p for p, s in zip(row["rollout_logprobs"], row["response_mask"]) if s]
            assert drawn == [0.0] * len(drawn)
        seen.add(row["row"] % 4)
    assert seen == {0, 1, 2, 3}
