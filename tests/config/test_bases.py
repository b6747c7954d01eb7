"""A config may name another one as its base."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spmdrl import config
from spmdrl.check.settings import parse
from spmdrl.config.files import load_yaml
from spmdrl.config.read import read
from spmdrl.errors import Refusal
from spmdrl.tools.commands import show_config


@pytest.fixture
def files(tmp_path):
    """Write config files by their paths and texts."""

    def write(**texts: str) -> Path:
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


BASE = """\
steps: 10
data: {train: [a.jsonl, b.jsonl]}
sampling: {stop: [END, STOP], temperature: 0.5}
algorithm:
  loss_options: {clip_low: 0.1, clip_high: 0.3}
"""
OWN = """\
base: ../base.yaml
lag: 1
sampling.stop: [DONE]
data: {train: c.jsonl, size: 5}
algorithm: {loss_options: {clip_high: 0.28}}
"""


def test_mappings_of_a_base_are_merged_and_lists_and_scalars_replaced(files):
    folder = files(base=BASE, deeper__own=OWN, deeper__last="{base: own.yaml, lag: 2}")
    cfg = load_yaml(folder / "deeper" / "last.yaml")
    assert (cfg.steps, cfg.lag) == (10, 2)
    assert cfg.data.train == "c.jsonl" and cfg.data.size == 5
    assert cfg.sampling.stop == ("DONE",) and cfg.sampling.temperature == 0.5
    assert cfg.algorithm.loss_options == {"clip_low": 0.1, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("options", "merged"), [("{}", {}), ("{clip_low: null, cap: 5}", {"clip_high": 0.3, "cap": 5})]
)
def test_options_of_a_base_are_removed_by_null_or_all_by_an_empty_mapping(options, merged, files):
    folder = files(base=BASE, own=f"base: base.yaml\nalgorithm: {{loss_options: {options}}}")
    assert load_yaml(folder / "own.yaml").algorithm.loss_options == merged


def test_a_resolved_config_needs_no_base(files):
    folder = files(base=BASE, deeper__own=OWN)
    cfg = load_yaml(folder / "deeper" / "own.yaml")
    assert "\nbase:" not in f"\n{config.dump(cfg)}"
    files(resolved=config.dump(cfg))
    assert load_yaml(folder / "resolved.yaml") == cfg


def test_a_later_file_overrides_a_base(files):
    folder = files(base=BASE, deeper__own=OWN, machine="steps: 3")
    argv = [f"--config={folder}/deeper/own.yaml", f"--config={folder}/machine.yaml", "--lag", "0"]
    cfg = read(argv, prog="x")
    assert (cfg.steps, cfg.lag, cfg.sampling.temperature) == (3, 0, 0.5)


def test_a_cycle_is_refused_by_name(files):
    folder = files(a="lag: 0\nbase: b.yaml", b="base: deeper/../c.yaml", c="base: ./a.yaml")
    (folder / "deeper").mkdir()
    with pytest.raises(Refusal, match=r"c.yaml, line 1: base: a cycle of files, .*a.yaml -> .*b"):
        load_yaml(folder / "a.yaml")


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ("base: bse.yaml", "bse.yaml (base of {0}/own.yaml) does not exist; did you mean"),
        ("base: [base.yaml]", "own.yaml, line 1: base: expected the path of one config file, got"),
        ("base:", "own.yaml, line 1: base: expected the path of one config file, got None"),
        ("base: .", "{0} (base of {0}/own.yaml) is a folder"),
    ],
)
def test_a_base_that_is_none_is_refused(own, says, files):
    folder = files(base=BASE, own=own)
    with pytest.raises(Refusal, match=re.escape(says.format(folder))):
        load_yaml(folder / "own.yaml")


def test_a_wrong_key_is_named_with_the_file_and_line_that_have_it(files):
    folder = files(base="steps: 3\nmodel:\n  pth: x\n  memory: {offlod: 1}", own="base: base.yaml")
    with pytest.raises(Refusal) as refused:
        load_yaml(folder / "own.yaml")
    first, *rest = str(refused.value).splitlines()
    assert first == f"config file {folder}/own.yaml: 2 problems"
    places = [line.rpartition(" (")[2] for line in rest]
    assert places == [f"{folder}/base.yaml, line 3)", f"{folder}/base.yaml, line 4)"]


def test_a_field_that_a_file_sets_twice_is_refused(files):
    folder = files(base="model.path: x\nmodel: {path: y}", own="base: base.yaml")
    with pytest.raises(Refusal, match=r"base.yaml \(base of .*own.yaml\): 1 problem"):
        load_yaml(folder / "own.yaml")


def test_a_refused_value_is_named_with_the_file_and_line_that_set_it(files, capsys):
    base = "model: {path: m}\ndata: {train: task:copy, size: 9}\nlag: -1\noptimizer:\n  lr: -1"
    folder = files(base=base, own="base: base.yaml\nseed: 1")
    with pytest.raises(SystemExit):
        parse([f"--config={folder}/own.yaml", "--steps", "-1"])
    told = capsys.readouterr().err
    assert re.search(rf"lag: .*\({folder}/base.yaml, line 3\)", told)
    assert re.search(rf"optimizer.lr: .*\({folder}/base.yaml, line 5\)", told)
    assert re.search(r"steps: .*\(flag\)", told)


def test_the_resolved_config_is_shown_with_the_place_of_each_value(files, capsys):
    folder = files(base=BASE, deeper__own=OWN)
    argv = ["--config", f"{folder}/deeper/own.yaml", "--steps", "7", "--data.no-shuffle"]
    assert show_config.main(argv) == 0
    shown = capsys.readouterr().out
    own = f"{folder}/deeper/own.yaml"
    base = f"{folder}/deeper/../base.yaml"
    for line in (
        "steps: 7  # flag",
        f"lag: 1  # {own}, line 2",
        f"  stop: [DONE]  # {own}, line 3",
        f"  temperature: 0.5  # {base}, line 3",
        f"    clip_low: 0.1  # {base}, line 5",
        f"    clip_high: 0.28  # {own}, line 5",
        "  shuffle: false  # flag",
        "seed: 0",
    ):
        assert f"\n{line}\n" in f"\n{shown}", line
    files(shown=shown)
    assert load_yaml(folder / "shown.yaml") == read(argv, prog="x")
    assert show_config.main(["--config", f"{folder}/none.yaml"]) == 2


def test_merge_keys_of_yaml_keep_their_lines(files, capsys):
    text = "algorithm:\n  loss_options: &mine\n    cap: 1.5\n  advantage_options:\n    <<: *mine\n"
    folder = files(own=text)
    assert show_config.main(["--config", f"{folder}/own.yaml"]) == 0
    assert capsys.readouterr().out.count(f"    cap: 1.5  # {folder}/own.yaml, line 3") == 2
