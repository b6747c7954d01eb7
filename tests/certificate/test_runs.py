"""Certificates of whole runs: repeated, resumed, taken again; what is changed in them is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from spmdrl.certificate.compare import SequencePlace
from spmdrl.certificate.lines import NAME, read
from spmdrl.checkpoint.manifest import read_manifest, write_manifest
from spmdrl.config import load_yaml
from spmdrl.rollout.recorder import digest_line
from spmdrl.tools.certificates.replay import plan_ways
from spmdrl.tools.certificates.report import first_token
from spmdrl.tools.commands import diff
from spmdrl.tools.recorded_run import RecordedRun
from tests.helpers.built import small_model
from tests.helpers.runs import TINY, command, run

REWARD = """
def varied(prompts, completions, **columns): return [sum(map(ord, c)) % 7 / 7 for c in completions]
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run of four certified, recorded steps with a lag, and its flags."""
    folder = tmp_path_factory.mktemp("live")
    model = small_model(folder / "model", hidden_size=64, heads=2, kv_heads=1)
    (folder / "r.py").write_text(REWARD)  # varied: every step must move the weights
    flags = TINY["rl"] | {
        "model.path": model,
        "steps": 4,
        "engine.kind": "transformers",
        "rewards.functions": f"{folder / 'r.py'}:varied",
        "rollout.record.every": 1,
        "checkpoint.every-steps": 2,
        "report.certificate-norms": 1,
    }
    run("demo_grpo.yaml", 2, **flags | {"output-dir": folder / "run"})
    return folder / "run", flags


def test_a_resumed_run_leaves_the_same_bytes_and_another_layout_the_same_to_rounding(
    live, tmp_path, capsys
):
    first, flags = live
    again = tmp_path / "again"
    shutil.copytree(first, again)
    shutil.rmtree(again / "checkpoints" / "step_4")
    lines = (again / NAME).read_text().splitlines(keepends=True)
    assert len(lines) == 5
    (again / NAME).write_text("".join(lines[:4]) + lines[4][:100])  # cut by a kill
    run("demo_grpo.yaml", 2, **flags | {"output-dir": again})
    assert (again / NAME).read_bytes() == (first / NAME).read_bytes()
    assert len(list((again / "logs").glob(f"*/removed_{NAME}"))) == 1
    assert diff.main([str(first), str(again)]) == 0
    assert capsys.readouterr().out == "equal bit for bit: 4 certified steps (0 to 3)\n"
    other = flags | {"output-dir": tmp_path / "other", "layout.trainer-ranks": 2}
    run("demo_grpo.yaml", 3, **other)
    assert diff.main([str(first), str(tmp_path / "other")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("equal to rounding: 4 certified steps")
    largest = [float(line.split()[-1]) for line in said.splitlines() if "e-0" in line]
    assert largest and max(largest) < 1e-4, said


def _verify(folder: Path, *flags: str) -> tuple[int, str]:
    done = command("verify", folder, *flags, status=None)
    return done.status, done.output


def _change_a_token(path: Path, *, group: int) -> int:
    """Change the fourth token of a group's second sample, and the file's digest; return it."""
    file = parquet.ParquetFile(path)
    groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    table = groups[group]
    tokens = table["tokens"].to_pylist()
    was = tokens[1][3]
    tokens[1][3] ^= 1
    at = table.schema.get_field_index("tokens")
    field = table.schema.field(at)
    groups[group] = table.set_column(at, field, pa.array(tokens, type=field.type))
    schema = file.schema_arrow
    with parquet.ParquetWriter(path, schema) as writer:
        for one in groups:
            writer.write_table(one.cast(schema))
    path.with_suffix(".sha256").write_text(digest_line(path, path.name))
    return was


def test_recorded_steps_repeat_and_what_was_changed_since_is_named(live, tmp_path):
    first, _ = live
    status, said = _verify(first)
    assert status == 0 and "equal bit for bit: 4 certified steps (0 to 3)" in said, said
    spoiled = tmp_path / "spoiled"
    shutil.copytree(first, spoiled)
    (path,) = (spoiled / "rollouts").glob("step_000002_replica_*.parquet")
    was = _change_a_token(path, group=5)
    status, said = _verify(spoiled, "--steps", "2")
    assert status == 1 and "differ: step 2: rollouts' tokens of group 5, sample 1" in said, said
    at = SequencePlace("tokens", group=5, sample=1, count=1)
    assert first_token((first, spoiled), at, step=2) == f"token 3: {was} and {was ^ 1}"
    assert first_token((first, first), at, step=2) == ""
    shutil.copy(path.with_name(path.name.replace("000002", "000003")), path)
    path.with_suffix(".sha256").write_text(digest_line(path, path.name))
    status, said = _verify(spoiled, "--steps", "2")
    assert status == 2 and "was renamed: it says step 3, its name 2" in said, said
    shutil.copytree(first / "rollouts", spoiled / "rollouts", dirs_exist_ok=True)
    # Other weights under this step's name.
    saved = spoiled / "checkpoints" / "step_2"
    content = read_manifest(saved.with_name("step_4"))
    shutil.rmtree(saved)
    shutil.copytree(saved.with_name("step_4"), saved)
    write_manifest(saved, replace(content, step=2))
    status, said = _verify(spoiled, "--steps", "2")
    assert status == 1, said
    assert "differ: step 2: weight model.embed_tokens.weight before the update" in said


def test_what_a_step_lacks_to_be_taken_again_is_named(live, tmp_path):
    first, _ = live
    left = tmp_path / "left"
    shutil.copytree(first, left)
    cfg = load_yaml(left / "config.yaml")
    certified = read(left)
    recorded = RecordedRun.open(left, cfg)
    ways = plan_ways(certified, recorded)
    assert [(s.step, s.start, s.checkpoint) for s in ways] == [
        (0, 0, None),
        (1, 0, None),
        (2, 2, left / "checkpoints" / "step_2"),
        (3, 2, left / "checkpoints" / "step_2"),
    ]
    for path in (left / "rollouts").glob("step_000002_*"):
        path.unlink()
    recorded = RecordedRun.open(left, cfg)
    assert [way.step for way in plan_ways(certified, recorded)] == [0, 1]
    with pytest.raises(ValueError, match="step 3 cannot be verified: .* steps 2 are not recorded"):
        plan_ways(certified, recorded, requested=[3])
    with pytest.raises(ValueError, match="step 7 cannot be .*: it is not certified; the certified"):
        plan_ways(certified, recorded, requested=[0, 7])
    config = left / "config.yaml"
    for was, now, says in (
        ("seed: 0", "seed: 1", "seed: 0 there, 1 now"),
        ("trainer_ranks: 1", "trainer_ranks: 2", "layout.trainer_ranks: 1 there, 2 now"),
        (f"path: {cfg.model.path}", "path: other/model", "model.path: "),
    ):
        text = config.read_text()
        config.write_text(text.replace(was, now, 1))
        with pytest.raises(ValueError, match=f"another config or layout .*{says}"):
            plan_ways(certified, RecordedRun.open(left, load_yaml(config)), requested=[1])
        config.write_text(text)
    shutil.copytree(first / "rollouts", left / "rollouts", dirs_exist_ok=True)
    shutil.rmtree(left / "checkpoints" / "step_2")
    shutil.copytree(first / "checkpoints" / "step_4", left / "checkpoints" / "step_2")
    with pytest.raises(ValueError, match="is of step 4, and its folder is called step_2"):
        plan_ways(certified, RecordedRun.open(left, cfg), requested=[3])
