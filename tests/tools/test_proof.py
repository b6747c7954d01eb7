"""The proof of a model: that it finds what is wrong, what it keeps, and a few families whole."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoConfig, AutoTokenizer

from spmdrl.check import proved_models as records
from spmdrl.check.proved_models import Line, Record
from spmdrl.config import LayoutSettings
from spmdrl.data.attachments import VISION_FAMILIES
from spmdrl.data.vision.image_tokens import ImageReader
from spmdrl.tools.commands.check import _status
from spmdrl.tools.proof import jobs, prove
from spmdrl.tools.proof.prove import Proof
from spmdrl.tools.proof.table import page_with
from spmdrl.tools.small_models.families import FAMILIES, WITH_TOWERS, family_config, family_names
from spmdrl.tools.small_models.tiny import tiny_of

# fmt: off
DENSE = [
    "qwen2", "qwen3", "llama", "mistral", "ministral", "gemma2",
    "gemma3_text", "phi", "phi3", "olmo2", "olmo3", "glm4",
    "starcoder2", "granite", "cohere2", "ernie4_5", "exaone4", "smollm3",
    "seed_oss", "hunyuan_v1_dense", "gpt_neox", "gpt2",
]
MIXTURES = [
    "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "hunyuan_v1_moe", "minimax_m2", "ernie4_5_moe",
    "gemma4_text+moe", "dots1", "glm4_moe_lite",
]
OTHERS = [
    "mamba2", "granitemoehybrid", "falcon_h1", "lfm2", "nemotron_h", "qwen3_5_text",
    "gemma4_text+shared", "phi3+longrope", "ministral3", "qwen2_moe+window",
    "bamba", "lfm2_moe", "falcon_mamba", "mamba",
]
# fmt: on
"""A family is proved whole in each run of the suite, another every day, of the three lists in turn;
those that take over a minute are left to `pytest -m models`."""
KINDS = {"dense": DENSE, "mixture": MIXTURES, "other": OTHERS}
TODAY = datetime.date.today().toordinal()


def leaking(*args: str) -> jobs.Measurements:
    """Do a job with rows whose sequences are taken for one."""
    from spmdrl.model.parallel import row_slices

    def whole(lengths, *others, **options):
        return row_slices_packing([sum(lengths)], *others, **options)

    row_slices_packing = row_slices.make_packing
    with mock.patch.object(row_slices, "make_packing", whole):
        return jobs.single_rank(*args)


def still(cfg) -> jobs.Measurements:
    """Do a job with a stream whose pushes move nothing."""
    from spmdrl.sync.change_choice import Moved
    from spmdrl.sync.in_place import TracedTensors
    from spmdrl.sync.stream import WeightStream

    with (
        mock.patch.object(TracedTensors, "move", lambda self: Moved(0)),
        mock.patch.object(WeightStream, "_differences", lambda self, version: []),
    ):
        return jobs.engine(cfg)


def test_sequences_that_see_each_other_and_pushes_that_move_nothing_are_wrong(tmp_path):
    with mock.patch.object(jobs, "single_rank", leaking), mock.patch.object(jobs, "engine", still):
        proof = Proof(family_config("qwen3"), tmp_path)
        lines = {line.name: line for line in proof.lines(engines=("transformers",))}
    packed, engine = lines["packed = single = plain"], lines["transformers engine"]
    assert packed.verdict == "WRONG" and "single" in packed.note, packed
    assert lines["gradients"].verdict == "WRONG" and lines["export"].verdict == "proved"
    assert engine.verdict == "WRONG" and "moved 0.0e+00" in engine.note
    # Two ranks are compared with the one that leaks; what leaks not is as it was.
    assert lines["tp 2"].verdict == "WRONG" and lines["LoRA"].verdict == "proved"
    assert lines["ep 2"].verdict == "refused" and "no experts" in lines["ep 2"].note


def test_a_model_that_is_not_served_is_refused_by_name(tmp_path):
    (line,) = Proof(family_config("falcon+alibi"), tmp_path).lines()
    assert line.verdict == "refused" and "FalconForCausalLM" in line.note


def sleeping(*args: str) -> jobs.Measurements:
    """Do a job that takes longer than it is given."""
    time.sleep(600)
    return {}


def test_a_line_that_takes_too_long_is_not_finished_and_not_wrong(tmp_path):
    with mock.patch.object(jobs, "engine", sleeping):
        proof = Proof(family_config("qwen3"), tmp_path, timeout_s=1.0)
        proof._make()
        line = proof._engine_line("vllm")
    assert line.verdict == "not finished" and "no answer in time from ranks [0]" in line.note
    assert line.seconds < 60, "it is not tried again in another dtype"
    found = known(*GOOD[:-1], line)
    assert not found.is_proved and found.is_unfinished
    assert "not finished (1)" in page_with([found], "# M\n")
    good, wrong = known(*GOOD), known(*changed("export", "WRONG"), replace(line, name="tp 2"))
    assert [_status(own) for own in ([good], [good, found], [found, wrong])] == [0, 3, 1]
    refused = known(Line("model", "refused", "leaks", 0.0))
    assert _status([found, refused]) == 1


def test_a_model_of_which_no_small_one_can_be_made_is_refused_with_what_went_wrong(tmp_path):
    (line,) = Proof(family_config("blt"), tmp_path).lines()
    assert line.verdict == "refused"
    assert "no small model of it can be made" in line.note and "KeyError" in line.note


def test_a_mesh_of_more_ranks_than_a_machine_holds_is_refused(tmp_path):
    layout = LayoutSettings(placement="offline", world_size=1024, tp=8)
    line = Proof(family_config("qwen3"), tmp_path, layout=layout)._layout_line(layout)
    assert line.verdict == "refused" and "1024 ranks train, more than the limit of 16" in line.note


def assert_whole(family: str, folder: Path) -> None:
    lines = list(Proof(family_config(family), folder, timeout_s=600.0).lines())
    wrong = [str(line) for line in lines if line.verdict == "WRONG"]
    assert not wrong, "\n".join(wrong)
    known = records.record_of(family, family_config(family), lines, class_name="")
    assert known.is_proved or lines[-1].verdict == "refused", "\n".join(map(str, lines))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_family_of_the_day_is_proved_whole(tmp_path):  # one name on all days: workers compare
    day, kind = divmod(TODAY, len(KINDS))
    families = [*KINDS.values()][kind]
    assert_whole(families[day % len(families)], tmp_path)


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_proved_or_refused(family, tmp_path):
    assert_whole(family, tmp_path)


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_family_that_sees_is_proved_with_its_tower(family, tmp_path):
    lines = list(Proof(family_config(family), tmp_path, timeout_s=600.0).lines())
    assert not [str(line) for line in lines if line.verdict == "WRONG"]
    known = records.record_of(family, family_config(family), lines, class_name="")
    assert known.is_proved and known.model_type == family, "\n".join(map(str, lines))


def test_a_small_model_that_sees_has_a_tower_of_the_same_code(tmp_path):
    real = AutoConfig.for_model("qwen3_vl")
    real.vision_config.hidden_act = "gelu"
    small = tiny_of(real, tmp_path, kv_heads=2).config
    assert small.model_type == "qwen3_vl" and small.vision_config.hidden_act == "gelu"
    assert small.vision_config.deepstack_visual_indexes == [0, 2]
    assert small.text_config.rope_parameters["rope_theta"] == 500000.0
    assert ImageReader(
        str(tmp_path),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path),
        image_token_id=small.image_token_id,
    )
    kinds = [
        records.record_of("", c, (), class_name="").model_type for c in (real, real.text_config)
    ]
    assert kinds == ["qwen3_vl", "qwen3_vl_text"]


def test_the_families_of_the_days_are_in_the_table():
    for names in KINDS.values():
        assert len({*names}) == len(names) and {*names} <= {*FAMILIES}
    shipped = {one.model: one for one in records.read(records.SHIPPED)}
    assert {*shipped} == {*family_names()} and {*WITH_TOWERS} == {*VISION_FAMILIES}
    proved = [name for names in (*KINDS.values(), VISION_FAMILIES) for name in names]
    assert all(shipped[name].is_proved for name in proved)
    assert all(shipped[name].model_type == name for name in VISION_FAMILIES)


# ------------------------------------------------------------------------- records, table

GOOD = tuple(
    Line(name, "proved", "1e-7", 1.0, kind)
    for name, kind in (
        ("model", ""),
        ("packed = single = plain", ""),
        ("gradients", ""),
        ("export", ""),
        ("transformers engine", "traced"),
        ("vllm engine", "reload"),
    )
)


def known(*lines: Line, model: str = "llama") -> Record:
    kept = records.record_of(model, family_config("llama"), lines, class_name="LlamaForCausalLM")
    return replace(kept, date="2026-11-22")


def changed(name: str, verdict: str, note: str = "") -> tuple[Line, ...]:
    found = [replace(one, verdict=verdict, note=note) if one.name == name else one for one in GOOD]
    return tuple(found)


def test_what_counts_as_proved():
    assert known(*GOOD).is_proved
    assert known(*changed("vllm engine", "refused")).is_proved  # the other engine serves
    assert known(*GOOD, Line("ep 2", "refused", "no experts", 0.0)).is_proved
    assert not known(*changed("vllm engine", "WRONG")).is_proved
    assert not known(*changed("gradients", "refused")).is_proved
    assert not known(Line("model", "refused", "leaks", 0.0)).is_proved
    assert not known(*GOOD, Line("layout", "refused", "heads", 0.0)).is_proved


def test_records_are_kept_once_per_model_and_read_back(tmp_path):
    path = tmp_path / "deep" / "file.jsonl"
    records.keep(known(*GOOD), path)
    records.keep(known(*GOOD, model="other"), path)
    records.keep(known(*changed("export", "WRONG", "2.0")), path)
    found = records.read(path)
    assert [one.model for one in found] == ["llama", "other"]
    assert found[0] == known(*changed("export", "WRONG", "2.0")) and not found[0].is_proved


def test_a_run_says_what_was_never_checked_and_what_was_found_wrong():
    good, wrong = known(*GOOD), known(*changed("export", "WRONG", "2.0 nats"))
    old = replace(good, versions=good.versions | {"torch": "1.0"})
    assert records.unchecked("llama", [wrong, good]) == ""
    assert "never checked with spmdrl" in records.unchecked("qwen2", [good])
    assert "only with other versions" in records.unchecked("llama", [old])
    assert "2.0 nats" in records.unchecked("llama", [wrong])


def test_the_table_has_a_row_per_model_and_its_reasons_below():
    page = page_with([known(*GOOD), known(*changed("export", "WRONG", "off"), model="b")], "# M\n")
    assert "| `llama` | proved | proved |" in page and "| reload | traced | proved |" in page
    assert "WRONG (1)" in page and "1. export: off" in page
    again = page_with([known(*GOOD)], page)
    assert again.count("`llama`") == 1 and "`b`" not in again and again.startswith("# M\n")


def test_limits_are_those_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert "at most 2e-6 nats apart" in page and prove.EXACT == 2e-6
