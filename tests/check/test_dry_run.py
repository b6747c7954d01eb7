"""What a dry run finds without reading weights or having the run's device."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from spmdrl.check import dry_run
from spmdrl.check.fit import build_policy
from spmdrl.config import Config
from spmdrl.data import prompts
from spmdrl.engine.vllm.families import cpu_head_sizes, head_size_problem
from spmdrl.errors import Refusal
from spmdrl.imports import in_child
from spmdrl.model.load import load_hf_config
from spmdrl.tools.plan.run import run_of_model
from spmdrl.tools.proof.prove import Proof
from spmdrl.tools.small_models.families import family_config, family_names
from spmdrl.workers.environment_jobs import check_environment
from spmdrl.world.world import pick_device
from tests.helpers.built import changed, made, small_model


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A folder whose weights stand in several files."""
    return small_model(tmp_path_factory.mktemp("shards"), max_shard_size="20KB")


def config(model: Path, folder: Path, **fields: Any) -> Config:
    """Return a config that nothing is wrong with."""
    cfg = made(
        model=dict(path=str(model)),
        output_dir=str(folder / "run"),
        data=dict(train="task:addition", size=64, max_prompt_tokens=32),
        sampling=dict(max_response_tokens=16),
        batch=dict(prompts_per_step=4),
        engine=dict(kind="transformers"),
    )
    return changed(cfg, **fields)


def copied(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder / "model")
    return folder / "model"


def shown(cfg: Config, capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    status = dry_run.show(cfg)
    return status, *capsys.readouterr()


# --------------------------------------------------------------------------- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without GPUs")
@pytest.mark.parametrize("layout", [dict(device="cuda"), dict(backend="nccl")])
def test_a_device_that_is_not_here_is_named_last_and_sizes_are_shown(
    layout, tiny_model, tmp_path, capsys
):
    cfg = config(tiny_model, tmp_path, layout=layout)
    status, out, err = shown(cfg, capsys)
    assert status == 3 and "sequences per step" in out and "parameters" in out
    lack, last = err.splitlines()
    (field,) = layout
    assert lack.startswith(f"here the run would stop: layout.{field}: {layout[field]} needs ")
    assert last.startswith("no problems but for this machine (")
    with pytest.raises(Refusal) as refused:  # as the run is
        pick_device(cfg, 0)
    assert str(refused.value) in lack
    broken = changed(cfg, data=dict(max_prompt_tokens=1))
    assert shown(broken, capsys)[0] == 2


@pytest.mark.parametrize("attention", ["flash", "varlen"])
def test_attention_of_gpus_is_refused_on_the_cpu(attention, tiny_model, tmp_path):
    cfg = config(tiny_model, tmp_path, layout=dict(device="cpu"))
    cfg = changed(cfg, model=dict(kernels=dict(attention=attention)))
    (found,) = dry_run.problems(cfg)
    assert f"model.kernels.attention: {attention} needs CUDA" in found


def test_kernels_that_cannot_be_imported_are_refused_where_gpus_are(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, "spmdrl.model.logit_kernels", raising=False)
    cfg = config(tiny_model, tmp_path)
    assert not list(dry_run.problems(cfg))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dry_run, "check_driver", lambda cfg: None)
    on_gpu = changed(cfg, layout=dict(device="cuda"))
    liger, head = dry_run.problems(on_gpu)
    assert liger.startswith("model.kernels.liger: cannot import liger-kernel")
    assert head.startswith("model.kernels.fused_head: cannot import triton")
    assert head.endswith("; install it or set fused_head to false")
    plain = dict(kernels=dict(liger=False, fused_head=False))
    assert not list(dry_run.problems(changed(on_gpu, model=plain)))


# --------------------------------------------------------------------------- files


def cut(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    return "cut short or corrupted"


def header_cut(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:100])
    return "cut short or corrupted"


def no_header(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return "cut short or corrupted"


def gone(folder: Path) -> str:
    sorted(folder.glob("*.safetensors"))[1].unlink()
    return "the file is missing"


def no_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return "is not a weight index"


def other_shapes(folder: Path) -> str:
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"intermediate_size": 64}))
    return "by config.json"


DAMAGES = [cut, header_cut, no_header, gone, no_index, other_shapes]


@pytest.mark.parametrize("damage", DAMAGES, ids=[own.__name__ for own in DAMAGES])
def test_files_of_weights_are_looked_at_by_their_headers(damage, shards, tmp_path):
    folder = copied(shards, tmp_path)
    cfg = config(folder, tmp_path)
    assert not list(dry_run.problems(cfg))
    says = damage(folder)
    (found,) = dry_run.problems(cfg)
    assert found.startswith("model.path: ") and says in found and str(folder) in found


def test_files_of_models_beside_the_policy_are_looked_at(shards, tmp_path):
    folder = copied(shards, tmp_path)
    cfg = config(shards, tmp_path, algorithm=dict(kl_coef=0.1))
    cfg = changed(cfg, model=dict(reference=dict(path=str(folder))))
    assert not list(dry_run.problems(cfg))
    gone(folder)
    (found,) = dry_run.problems(cfg)
    assert found.startswith("model.reference.path: cannot read ") and "missing" in found


def test_a_folder_without_weights_can_be_planned_with_and_is_named(tiny_model, tmp_path, capsys):
    folder = copied(tiny_model, tmp_path)
    (folder / "model.safetensors").unlink()
    status, out, err = shown(config(folder, tmp_path), capsys)
    assert status == 3 and "bytes per push" in out
    assert re.search("later pushes +everything, as the first: over links of 16 Gbit/s", out)
    assert f"here the run would stop: model.path: {folder} has no files of weights" in err


def test_a_folder_without_a_tokenizer_is_refused_as_such(tiny_model, tmp_path):
    folder = copied(tiny_model, tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (found,) = dry_run.problems(config(folder, tmp_path))
    assert found.startswith(f"model.path: the folder {folder} has no files of a tokenizer")
    assert "it has config.json, generation_config.json, model.safetensors" in found


def test_a_rank_above_the_matrices_is_refused(tiny_model, tmp_path):
    cfg = config(tiny_model, tmp_path)
    assert not list(dry_run.problems(changed(cfg, model=dict(lora=dict(rank=64)))))
    (found,) = dry_run.problems(changed(cfg, model=dict(lora=dict(rank=10**9))))
    assert "model.lora.rank: 1000000000 is above 64" in found and "take at most 64" in found


# --------------------------------------------------------------------------- engines


def test_heads_that_vllm_has_not_on_the_cpu_are_refused_and_not_proved(tmp_path):
    narrow = small_model(tmp_path / "narrow")  # heads of 8
    cfg = config(narrow, tmp_path, layout=dict(device="cpu"), engine=dict(kind="vllm"))
    says = "its attention has heads of 8 elements, and vLLM's on the CPU has heads of 32, 64, "
    (found,) = dry_run.problems(cfg)
    assert f"engine.kind: vllm with a qwen3: {says}" in found and "transformers" in found
    on_gpus = changed(cfg, layout=dict(device="cuda"))
    assert not list(dry_run.problems(on_gpus))  # vLLM has more than one backend there
    line = Proof(load_hf_config(str(narrow)), tmp_path / "proof")._engine_line("vllm")
    assert line.verdict == "refused" and says in line.note


def test_heads_of_released_families_are_those_that_vllm_has():
    assert {32, 64, 128} <= {*cpu_head_sizes()}
    for name in family_names():
        config = family_config(name)
        assert name == "bloom" or not head_size_problem(config), name


@pytest.mark.parametrize(
    ("capability", "hidden", "says"),
    [("AVX512", 64, ""), ("AVX2", 64, "by AVX-512 or AMX alone"), ("AVX512", 160, "have 80")],
)
def test_caches_of_8_bits_are_refused_where_vllm_has_none(
    capability, hidden, says, tmp_path, monkeypatch
):
    model = small_model(tmp_path / "model", hidden_size=hidden, heads=2)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cfg = config(model, tmp_path, layout=dict(device="cpu"))
    cfg = changed(cfg, engine=dict(kind="vllm", options=dict(kv_cache_dtype="fp8")))
    found = "".join(dry_run.problems(cfg))
    assert says in found and bool(says) == ("engine.options.kv_cache_dtype: fp8" in found)


# --------------------------------------------------------------------------- environments


GAME = """
class Game:
    def reset(self, row):
        assert isinstance(row["image"]["bytes"], bytes), row
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, response): pass
"""


def test_rows_of_bytes_reach_an_environment(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    row = {"prompt": "a", "image": {"bytes": b"\x89PNG", "path": None}}
    options = {"name": f"{tmp_path}/game.py:Game"}
    facts, problem = in_child(check_environment, options, row, what="opening it", timeout_s=60)
    assert not problem and facts["tools"] == []


def test_tools_are_refused_where_the_template_shows_none(tmp_path):
    model = small_model(tmp_path / "model", chat_template=True)
    words = AutoTokenizer.from_pretrained(model)
    words.chat_template = words.chat_template.replace("tools", "nothing")
    words.save_pretrained(model)
    tools = dict(name="tools", tools="calculator")
    cfg = config(model, tmp_path, rollout=dict(environment=tools))
    (found,) = dry_run.problems(cfg)
    assert "knows no tools" in found and "calculator" in found
    assert "set rollout.environment.reply_role to user" in found
    told = dict(tools, reply_role="user")
    assert not list(dry_run.problems(changed(cfg, rollout=dict(environment=told))))


@pytest.mark.parametrize(("rank", "is_shown"), [("", True), ("0", True), ("1", False)])
def test_rows_that_take_long_show_a_bar_on_one_rank(rank, is_shown, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "_BAR_AFTER_S", 0)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert [*prompts._with_bar(range(3), what="a.jsonl:1")] == [0, 1, 2]
    assert ("measuring rows of a.jsonl" in capsys.readouterr().err) == is_shown


# --------------------------------------------------------------------------- shared prefixes


def test_it_says_whether_prefixes_are_computed_once(shards, tmp_path, capsys):
    cfg = config(shards, tmp_path, batch={"group_size": 8})
    # A prompt of 32 tokens and 8 responses of 16.
    assert "of a group of the longest sequences 160 of 384 tokens" in shown(cfg, capsys)[1]
    never = changed(cfg, batch={"share_prefixes": "never"})
    assert "computed whole (batch.share_prefixes never)" in dry_run.shared_prefixes(never)


@pytest.mark.parametrize(
    "field, changes",
    [
        ("model.teacher", {"algorithm": {"advantage": "distill"}, "model": {"teacher": "MODEL"}}),
        ("critic.path", {"algorithm": {"advantage": "gae"}, "critic": {"path": "MODEL"}}),
        ("critic.path", {"algorithm": {"advantage": "prime"}, "critic": {"path": "MODEL"}}),
        (
            "model.reference.path",
            {"algorithm": {"kl_coef": 0.1}, "model": {"reference": {"path": "MODEL"}}},
        ),
        ("rewards.functions[0]", {"rewards": {"functions": ("model:MODEL",)}}),
    ],
    ids=["teacher", "value model", "process reward model", "reference", "reward model"],
)
def test_each_model_that_cannot_share_prefixes_is_named_with_its_layer(
    shards, tmp_path, field, changes
):
    folder = str(tmp_path / "gptj")
    family_config("gptj").save_pretrained(folder)
    named = json.loads(json.dumps(changes).replace("MODEL", folder))
    cfg = changed(config(shards, tmp_path, batch={"group_size": 8}), **named)
    found = dry_run.shared_prefixes(cfg)
    why = "h.0.attn computes one sequence per row"
    assert found.startswith(f"each sequence is computed whole: {field} {folder}: transformer.{why}")
    assert found.endswith(f"; others could share: model.path {shards}")
    run = run_of_model(cfg, build_policy(cfg), prompt_tokens=0, response_tokens=0)
    assert not run.shares_prefixes and run.unshared.endswith(why)


def test_a_model_that_the_methods_do_not_use_keeps_none_from_sharing(shards, tmp_path):
    family_config("gptj").save_pretrained(tmp_path / "gptj")
    cfg = config(shards, tmp_path, batch={"group_size": 8})
    cfg = changed(cfg, critic={"path": str(tmp_path / "gptj")})
    assert "are computed once" in dry_run.shared_prefixes(cfg)


# --------------------------------------------------------------------------- agents


def test_agents_that_cannot_run_are_refused(tmp_path, monkeypatch):
    model = small_model(tmp_path / "model", chat_template=True)
    agent = tmp_path / "agent.py"
    agent.write_text("async def solve(row, client): ...\ndef odd(row): ...\n")
    cases: list[tuple[dict, list[str]]] = [
        (dict(agent=f"{agent}:solve"), []),
        (dict(agent=f"{agent}:odd"), ["cannot be called as solve(row, client)", "agent.py:2"]),
        (dict(agent=f"{agent}:sovle"), ["has no function 'sovle'; did you mean solve?"]),
        (dict(agent_command=("nowhere",)), ["no program 'nowhere' is found"]),
        (dict(agent=f"{agent}:solve", agent_tool_parser="hemres"), ["did you mean hermes?"]),
    ]
    for rollout, says in cases:
        found = "\n".join(dry_run.problems(config(model, tmp_path, rollout=rollout)))
        assert bool(found) == bool(says), found
        assert not [text for text in says if text not in found], found
    words = AutoTokenizer.from_pretrained(model)
    words.chat_template = words.chat_template.replace("'assistant' %}", "'assistant' %}x", 1)
    words.chat_template = words.chat_template.replace(
        "{% for message in messages %}", "{% for message in messages[-2:] %}"
    )
    words.save_pretrained(model)
    (found,) = dry_run.problems(config(model, tmp_path, rollout=dict(agent=f"{agent}:solve")))
    assert "rollout.agent: the chat template " in found
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "aiohttp" else find(name, *a)
    )
    found = "\n".join(dry_run.problems(config(model, tmp_path, rollout=dict(agent="x.py:y"))))
    assert "needs the package aiohttp" in found
