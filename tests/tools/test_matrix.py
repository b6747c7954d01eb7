"""The table of rules, and the matrix of features that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.check.rules import RULES, broken_rules
from spmdrl.check.rules.rule import Rule
from spmdrl.check.settings import validate
from spmdrl.config import Config, LoraSettings, ModelSettings, OptimizerSettings
from spmdrl.config.tree import sections, settings
from spmdrl.tools.commands.matrix import matrix
from spmdrl.tools.matrix.features import FEATURES, config_of
from spmdrl.tools.matrix.pairs import Pair, pairs
from spmdrl.tools.matrix.proofs import SHIPPED, FeatureProof, as_lines, proofs
from tests.helpers.built import good

NAMES = {feature.name for feature in FEATURES}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Pair]:
    return {(pair.first, pair.second): pair for pair in pairs()}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " with ".join(rule.fields))
def test_a_rule_names_fields_that_exist_and_ends_no_part_with_a_mark(rule: Rule):
    for name in rule.fields:
        is_option = name.startswith("engine.options.")
        assert is_option or name in settings() or name in sections(), name
    assert len(rule.fields) > 1
    assert rule.reason and not rule.reason.endswith((".", ";"))
    assert rule.remedy and rule.kind in ("principle", "not built", "untried")
    assert not rule.when(good())


def test_a_broken_rule_says_what_was_seen_why_and_what_to_do():
    cfg = Config(
        model=ModelSettings(lora=LoraSettings(rank=8)), optimizer=OptimizerSettings(kind="muon")
    )
    (rule,) = (own for own in broken_rules(cfg) if own.fields[0] == "optimizer.kind")
    assert rule.problem(cfg) == (
        "optimizer.kind: muon with model.lora; Muon orthogonalises the step of a weight, and an "
        "adapter's factors are no weights; take adamw"
    )


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_feature_by_itself_is_right(feature, device):
    problems = validate(config_of(feature, device=device))
    if feature.name == "drafts" and device == "cuda":
        (problem,) = problems
        assert "with layout.device cuda" in problem
        return
    assert not [text for text in problems if "torchao, which is not installed" not in text]


def test_pairs_are_refused_by_the_rule_that_they_break(found):
    pair = found["lora", "muon"]
    assert (pair.verdict, pair.kind) == ("refused", "principle")
    assert pair.evidence.startswith("optimizer.kind: muon with model.lora;")
    pair = found["in_flight", "penalties"]
    assert (pair.verdict, pair.kind) == ("refused", "not built")
    pair = found["split", "colocated"]
    assert pair.evidence == "layout.placement: split or colocated, not both"


def test_no_test_proves_what_is_refused_and_all_name_features_that_exist(found):
    for proof in proofs():
        assert set(proof.features) <= NAMES, proof
        refused = [
            pair
            for (first, second), pair in found.items()
            if {first, second} <= set(proof.features) and pair.verdict == "refused"
        ]
        assert not refused, (proof, refused)


def test_a_proof_is_read_from_the_marker_of_a_test_and_of_its_cases(tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.proves('lora', 'lag')\n"
        "def test_one(): pass\n"
        "@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.proves('tp', 'cp'))])\n"
        "def test_two(n): pass\n"
        "def test_three(): pass\n"
    )
    assert proofs(tmp_path) == [
        FeatureProof("train/test_some.py::test_one", ("lora", "lag")),
        FeatureProof("train/test_some.py::test_two", ("tp", "cp")),
    ]
    shipped = proofs(tmp_path / "nowhere")
    assert as_lines(shipped) == SHIPPED.read_text(encoding="utf-8")


def test_the_shipped_proofs_are_those_of_the_tests():
    says = "write it again: python -c 'from spmdrl.tools.matrix.proofs import *; "
    says += "SHIPPED.write_text(as_lines(proofs()))'"
    assert SHIPPED.read_text(encoding="utf-8") == as_lines(proofs()), says


def test_the_command_prints_one_line_per_pair_and_the_counts():
    lines = matrix(feature="muon", verdict="refused").splitlines()
    assert any(line.startswith("lora x muon: refused, principle: optimizer.kind") for line in lines)
    assert len(lines) > 2 and lines[-1].startswith(f"{len(lines) - 1} pairs: 0 proved")
    with pytest.raises(ValueError, match="--feature muo: there is none; did you mean muon"):
        matrix(feature="muo")
