"""Export to a Hugging Face folder from any layout, and asking that folder."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from spmdrl.checkpoint import manifest as disk
from spmdrl.tools.commands.ask import ask
from spmdrl.tools.commands.export import export
from tests.helpers.built import refused
from tests.helpers.checkpoint_runs import config, save
from tests.helpers.comparing import differing, whole
from tests.helpers.policy_runs import small_model
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import call, command
from tests.helpers.worlds import with_trainer


def _nudged(trainer: Any) -> dict[str, Tensor]:
    """Save a policy that differs from its folder, and return its whole tensors."""
    model = trainer.state_dict()["model"]
    for k, (_, tensor) in enumerate(sorted(model.items())):
        tensor.mul_(1.0 + 0.01 * k)
    save(trainer, 1)
    return whole(model)


@pytest.fixture(scope="module", params=["untied", "tied"])
def run(request, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A run of dp_shard x tp = 2 x 2 (tied: 1 x 2) ranks, and the whole tensors it saved."""
    folder = tmp_path_factory.mktemp("run")
    sizes = dict(hidden_size=64, heads=2, intermediate=96)
    model = small_model(folder, tied=request.param == "tied", **sizes)
    ranks = 2 if request.param == "tied" else 4
    cfg = config(folder / "out", world_size=ranks, tp=2, model=str(model))
    return folder / "out", with_trainer(cfg, _nudged)[0]


# Of the two kinds of run, the first is enough.
once = pytest.mark.parametrize("run", ["untied"], indirect=True)


def test_an_export_loads_in_transformers_bit_equal_and_in_several_files(run, tmp_path):
    folder, saved = run
    out = export(folder, out=tmp_path / "out", max_shard_gib=60_000 / 2**30)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert model.dtype == torch.float32
    assert not differing(dict(model.named_parameters()), saved)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("12+3=")["input_ids"]) == "12+3="


def test_an_export_in_bfloat16_is_the_cast_of_the_masters_in_one_file(run, tmp_path):
    folder, saved = run
    export(folder / "checkpoints/step_1", out=tmp_path / "out", dtype="bfloat16")
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert not differing(
        {n: t.bfloat16() for n, t in saved.items()}, dict(model.named_parameters())
    )


@once
def test_an_export_is_refused_with_the_reason(run, tmp_path):
    folder, _ = run
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(ValueError, match="not empty"):
        export(folder, out=tmp_path / "taken")
    with pytest.raises(ValueError, match="no whole checkpoint"):
        export(tmp_path / "nothing", out=tmp_path / "out")
    with pytest.raises(ValueError, match="--model"):
        export(folder, out=tmp_path / "out", model=str(tmp_path / "taken"))
    moved = disk.read_manifest(folder / "checkpoints/step_1")
    copy = tmp_path / "step_1"
    (copy / "policy").mkdir(parents=True)
    disk.write_manifest(copy, dataclasses.replace(moved, model="/no/such/folder", files={}))
    with pytest.raises(ValueError, match="--model"):
        export(copy, out=tmp_path / "out")
    disk.write_manifest(copy, moved)
    with (
        pytest.warns(UserWarning, match="cannot be used"),
        pytest.raises(ValueError, match="is missing"),
    ):
        export(copy, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@once
def test_vllm_answers_as_transformers_does_from_an_export(run, tmp_path):
    pytest.importorskip("vllm")
    out = export(run[0], out=tmp_path / "out")
    program = (
        "import sys, vllm\n"
        "llm = vllm.LLM(sys.argv[1], dtype='float32', max_model_len=64, enforce_eager=True,\n"
        "               kv_cache_memory_bytes=2**26, disable_log_stats=True)\n"
        "params = vllm.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)\n"
        "print('TOKENS', *llm.generate('12+34=', params)[0].outputs[0].token_ids)\n"
    )
    done = call(
        *("-c", program, out),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        TORCHDYNAMO_DISABLE="1",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answered = re.search(r"^TOKENS (.*)$", done.stdout, re.MULTILINE)[1].split()
    tokens = AutoTokenizer.from_pretrained(out)("12+34=", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = model.generate(**tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert [int(t) for t in answered] == expected[0, tokens["input_ids"].shape[1] :].tolist()


@once
def test_the_command_asks_the_folder_of_an_export(run, tmp_path):
    out = export(run[0], out=tmp_path / "out")
    words = f"ask {out} --task task:addition --task-option digits=2 -n 3 --max-response-tokens 4"
    lines = command(*words.split()).output.splitlines()
    answers = [line for line in lines if "  ->  " in line]
    assert len(answers) == 3
    assert re.search(r"\d\d\+\d\d=  ->  .*\(reward 0; right: \d+\)", answers[0])
    assert lines[-1] == "mean reward 0.000 over 3 problems"


def _exported(folder: Path, out: Path) -> str:
    try:
        return str(export(folder, out=out, max_shard_gib=60_000 / 2**30, is_shared=True))
    except ValueError as error:
        return f"refused: {error}"


@once
def test_several_ranks_write_the_folder_that_one_does(run, tmp_path):
    folder, _ = run
    alone = export(folder, out=tmp_path / "alone", max_shard_gib=60_000 / 2**30)
    together = tmp_path / "together"
    assert run_ranks(3, _exported, folder, together) == [str(together)] * 3
    names = sorted(p.name for p in alone.iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) >= 3
    assert sorted(p.name for p in together.iterdir()) == names
    for name in names:
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    # What one rank finds wrong ends all of them.
    assert all(
        text.startswith("refused: --out") and "not empty" in text
        for text in run_ranks(2, _exported, folder, together)
    )


def test_asking_refuses_bad_input(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        ask(tmp_path)
    with pytest.raises(ValueError, match="NAME=VALUE"):
        ask(tiny_model, task_option=("digits",))
    with pytest.raises(ValueError, match="did you mean digits"):
        ask(tiny_model, task_option=("digit=3",))
    with pytest.raises(ValueError, match="at least 1"):
        ask(tiny_model, num_problems=0)


@once
def test_older_config_files_keep_their_name_of_the_dtype(run, tmp_path):
    folder, _ = run
    source = Path(disk.read_manifest(folder / "checkpoints/step_1").model)
    old = tmp_path / "old"
    old.mkdir()
    fields = json.loads((source / "config.json").read_text())
    fields["torch_dtype"] = fields.pop("dtype")
    (old / "config.json").write_text(json.dumps(fields))
    export(folder, out=tmp_path / "out", model=str(old), tokenizer=str(source), dtype="bfloat16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["torch_dtype"] == "bfloat16" and "dtype" not in written
    assert (tmp_path / "out/tokenizer.json").is_file()


EVIL = """
import pathlib
pathlib.Path("{marker}").touch()
from transformers import Qwen3Config
class Evil(Qwen3Config):
    model_type = "evil"
"""


@once
def test_an_export_runs_and_copies_nothing_that_a_manifest_names(run, tmp_path):
    folder, _ = run
    content = disk.read_manifest(folder / "checkpoints/step_1")
    checkpoint, model, marker = tmp_path / "step_1", tmp_path / "model", tmp_path / "marker"
    shutil.copytree(folder / "checkpoints/step_1", checkpoint)
    shutil.copytree(content.model, model)
    (model / "evil.py").write_text(EVIL.format(marker=marker))
    for name in ("secret.json", "passwords.txt"):
        (model / name).write_text("{}")
    fields = json.loads((model / "config.json").read_text())
    named = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (model / "config.json").write_text(json.dumps(fields | {"auto_map": named}))
    hostile = content.config | {"model.trust_remote_code": True}
    changes = dict(model=str(model), tokenizer=str(model))
    disk.write_manifest(checkpoint, dataclasses.replace(content, config=hostile, **changes))
    with refused("brings Python code", "--trust-remote-code"):
        export(checkpoint, out=tmp_path / "refused")
    # A run that did without the code: the export does too, and names none of it.
    disk.write_manifest(checkpoint, dataclasses.replace(content, **changes))
    out = export(checkpoint, out=tmp_path / "out")
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    names = {path.name for path in out.iterdir()}
    assert not names & {"evil.py", "secret.json", "passwords.txt"} and "tokenizer.json" in names
    assert not marker.exists()
    (model / "vocab.txt").symlink_to("/etc/hostname")
    with refused("vocab.txt is no file of", "but a link to /etc/hostname"):
        export(checkpoint, out=tmp_path / "linked")
    AutoConfig.from_pretrained(model, trust_remote_code=True)  # the bait was live
    assert marker.exists()
