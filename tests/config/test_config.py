"""The config: strict reading, overrides, all problems at once, faithful dumping."""

from __future__ import annotations

import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import docstring_parser
import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spmdrl import config
from spmdrl.check.settings import parse
from spmdrl.config.files import load_yaml
from spmdrl.config.read import read, with_flags
from spmdrl.config.tree import build, convert, hints, is_section, kinds, sections, settings
from spmdrl.errors import Refusal
from tests.helpers.built import good

ROOT = Path(__file__).resolve().parents[2]


def write(tmp_path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_each_field_and_section_has_a_docstring():
    for section, cls in sections().items():
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__), section
        params = docstring_parser.parse_from_object(cls).params
        docs = {param.arg_name: param.description for param in params}
        for name, hint in hints(cls).items():
            assert docs.get(name) or is_section(hint), f"{section}.{name}"


def test_dump_reads_back_equal(tmp_path):
    cfg = good(optimizer=dict(lr=3e-7, eps=1e-7))
    assert config.load_yaml(write(tmp_path, config.dump(cfg))) == cfg


def test_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(
        ValueError, match="optimizer.learning_rate: unknown key; that is optimizer.lr here"
    ):
        config.load_yaml(write(tmp_path, "optimizer: {learning_rate: 1}"))
    with pytest.raises(ValueError, match="optimizer.nonsense: unknown key; known here: kind, lr"):
        config.load_yaml(write(tmp_path, "optimizer: {nonsense: 1}"))
    with pytest.raises(ValueError, match="did you mean group_size"):
        config.load_yaml(write(tmp_path, "batch: {groupsize: 4}"))
    with pytest.raises(ValueError, match="did you mean batch.group_size"):
        config.load_yaml(write(tmp_path, "group_size: 4"))


def test_all_problems_of_a_file_are_reported_at_once(tmp_path):
    text = "steps: many\nlayout: {placement: splitt}\nbatch: {group_size: 2.5}\nseeed: 1\n"
    with pytest.raises(ValueError) as error:
        config.load_yaml(write(tmp_path, text))
    for part in (
        "4 problems",
        "steps: expected int, got 'many'",
        "did you mean split?",
        "batch.group_size: expected int, got 2.5",
        "did you mean seed?",
    ):
        assert part in str(error.value)


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    assert config.load_yaml(write(tmp_path, "optimizer: {lr: 1e-6}")).optimizer.lr == 1e-6
    with pytest.raises(ValueError, match="expected a number, got 'fast'"):
        config.load_yaml(write(tmp_path, "optimizer: {lr: fast}"))


def test_missing_file_names_a_near_one(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ValueError, match="does not exist; did you mean .*c.yaml"):
        config.load_yaml(tmp_path / "cc.yaml")


def test_flags_override_the_file(tmp_path):
    path = write(tmp_path, config.dump(good(steps=5)))
    cfg = parse(["--config", str(path), "--steps", "7", "--batch.group-size", "3"])
    assert (cfg.steps, cfg.batch.group_size, cfg.data.size) == (7, 3, 10)


def test_a_value_that_is_refused_is_of_the_file_or_of_flags(tmp_path, capsys):
    path = write(tmp_path, config.dump(good()))
    for argv, says in (
        (["--config", str(path), "--steps", "-1"], f"config of {path} and flags: 1 problem"),
        (["--model.path", "m", "--data.train", "task:copy", "--steps", "-1"], "config of flags: "),
    ):
        with pytest.raises(SystemExit):
            parse(argv)
        assert says in capsys.readouterr().err


def test_method_options_are_given_as_one_mapping(tmp_path):
    own = dict(loss_options={"clip_low": 0.1})
    path = write(tmp_path, config.dump(good(algorithm=own)))
    flags = ["--algorithm.loss", "cispo", "--algorithm.loss-options", "{ratio_high: 4.0}"]
    cfg = parse(["--config", str(path), *flags])
    assert cfg.algorithm.loss_options == {"ratio_high": 4.0}
    assert parse(["--config", str(path)]).algorithm.loss_options == {"clip_low": 0.1}


@pytest.mark.parametrize(
    "text, says",
    [
        ("optimizer: {beta3: 1}", "optimizer.beta3: unknown key; did you mean beta"),
        ("optimizer: {beta1: high}", "optimizer.beta1: expected a number, got 'high'"),
        ("optimizer: {beta1: true}", "optimizer.beta1: expected float, got True"),
        ("optimizer: {warmup: 10}", "optimizer.warmup: unknown key; did you mean warmup_steps?"),
        ("optimizer: {warmup_steps: 0.5}", "optimizer.warmup_steps: expected int, got 0.5"),
        ("model: {memory: full}", "model.memory: expected a mapping of fields, got 'full'"),
        ("rollout: {schedule: {in_flight: 1}}", "in_flight: expected true or false, got 1"),
        ("rollout: {schedule: {kv_cache: drop}}", "'drop' is not one of recompute, keep"),
        ("rollout: {schedule: {over_sampel: 2}}", "unknown key; did you mean over_sample?"),
        ("rollout: {record: {evry: 1}}", "record.evry: unknown key; did you mean every?"),
        ("rewards: {shaping: {scale: x}}", "rewards.shaping.scale: expected a number, got 'x'"),
        ("report: {console: {table: 1}}", "console.table: unknown key; did you mean table_every"),
        ("model: {moe: {balance: loss}}", "moe.balance: 'loss' is not one of none, aux, bias"),
    ],
)
def test_what_fields_cannot_hold_is_refused(text, says, tmp_path):
    with pytest.raises(ValueError, match=re.escape(says)):
        config.load_yaml(write(tmp_path, text))


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--model.memory {offload: all}", "--model.memory: is a section, whose fields are flags"),
        ("--model.lora {rank: 16}", "--model.lora.rank --model.lora.alpha --model.lora.targets"),
        ("--model.reference a/b", "--model.reference.path --model.reference.sync_every"),
        ("--optimizer.options {eps: 1e-7}", "--optimizer.options: unknown key"),
    ],
)
def test_a_section_as_a_flag_is_refused_with_the_flags_of_its_fields(flag, says):
    name, _, value = flag.partition(" ")
    with pytest.raises(Refusal, match=re.escape(says)):
        read([name, value], prog="x")


def test_the_problems_of_flags_are_reported_at_once():
    wrong = ["stray", "--bacth.group-size", "3", "--steps", "many", "--lag", "--model.lora.r", "4"]
    with pytest.raises(Refusal) as refused:
        read(wrong, prog="x")
    said = str(refused.value)
    for part in (
        "5 problems",
        "stray: expected a flag",
        "--bacth.group_size: unknown key; did you mean batch.group_size?",
        "--steps: expected int, got 'many'",
        "--lag: expected one value, got none",
        "--model.lora.r: unknown key; PEFT's r is rank here",
    ):
        assert part in said


def test_a_text_that_looks_like_a_number_stays_text_where_none_can_stand(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {lora: {rank: 4, targets: 1e3}}")
    assert config.load_yaml(tmp_path / "c.yaml").model.lora.targets == "1e3"


def test_long_words_are_not_told_whole():
    with pytest.raises(ValueError, match="expected one value") as raised:
        with_flags(config.Config(), ["--lag", "a" * 70_000, "b"])
    assert len(str(raised.value)) < 400


def test_what_may_be_false_is_denied_by_name():
    full = read(["--dry-run", "full"], prog="x")
    cfg = read(["--no-dry-run", "--data.no-shuffle"], prog="x", default=full)
    assert cfg.dry_run is False and cfg.data.shuffle is False
    for flag in ("--no-steps", "--no-seed", "--no-thing"):
        with pytest.raises(Refusal, match="unknown key"):
            read([flag], prog="x")


def test_flags_and_files_take_the_same_values(tmp_path):
    flags = [
        "--engine.options",
        "{speculative_config: {method: ngram, sizes: [1, 1e-8]}}",
        "--data.no-shuffle",
        "--model.lora.targets",
        "q_proj",
        "v_proj",
        "--rewards.functions=a.py:f",
        "--model.memory.prefetch",
        "2",
        "--rewards.shaping.clamp-low",
        "-1",
        "--sampling.stop-token-ids",
        "3",
        "4",
    ]
    text = """
    engine: {options: {speculative_config: {method: ngram, sizes: [1, 1e-8]}}}
    data: {shuffle: false}
    model: {lora: {targets: [q_proj, v_proj]}, memory: {prefetch: 2}}
    rewards: {functions: ["a.py:f"], shaping: {clamp_low: -1}}
    sampling: {stop_token_ids: [3, 4]}
    """
    cfg = read(flags, prog="x")
    assert cfg == config.load_yaml(write(tmp_path, text))
    assert cfg.engine.options["speculative_config"]["sizes"] == [1, 1e-8]
    assert config.load_yaml(write(tmp_path, config.dump(cfg))) == cfg


TEXTS = st.text("ab: #-'\"[]{}1.e~", max_size=6)
WORDS = TEXTS.filter(lambda text: not text.startswith("-"))  # a list takes others only as YAML
NUMBERS = st.floats(allow_nan=False)
PLAIN = st.one_of(st.booleans(), st.integers(-9, 9**9), NUMBERS, st.sampled_from(["x", "1e-3"]))
NESTED = st.recursive(
    PLAIN, lambda own: st.lists(own, max_size=2) | st.dictionaries(st.sampled_from("ab"), own)
)


def values(hint: Any) -> st.SearchStrategy:
    """Draw what a field may hold, as YAML has it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if len(kinds(hint)) > 1:
        return st.one_of(*map(values, kinds(hint)))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        own = WORDS if args[0] is str else values(args[0])
        return st.lists(own, min_size=2, max_size=3)
    if origin is dict:
        own = NESTED if args[1] is Any else TEXTS if args[1] is str else PLAIN
        return st.dictionaries(st.sampled_from(["one", "two"]), own, max_size=2)
    if is_section(hint):
        own = {name: values(kind) for name, kind in hints(hint).items()}
        return st.fixed_dictionaries({}, optional=own)
    return {bool: st.booleans(), int: st.integers(-9, 9**9), float: NUMBERS, str: TEXTS}[hint]


def as_flag(name: str, value: Any) -> list[str]:
    words = [w if isinstance(w, str) else in_yaml(w) for w in value_list(value)]
    # The way to give a value that begins with a hyphen.
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]


def value_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def in_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, width=10**6, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda f: f.stem)
def test_what_a_run_writes_reads_back_and_flags_are_as_good_as_a_file(file, tmp_path):
    path = tmp_path / "config.yaml"

    @hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        names = data.draw(
            st.lists(st.sampled_from(list(settings())), min_size=20, max_size=20, unique=True)
        )
        chosen = {name: data.draw(values(settings()[name])) for name in names}
        flags = [word for pair in chosen.items() for word in as_flag(*pair)]
        cfg = read(["--config", str(file), *flags], prog="x")
        path.write_text(config.dump(cfg))
        assert config.load_yaml(path) == cfg
        tree = config.flatten(config.load_yaml(file)) | chosen
        assert build(settings_of(tree)) == cfg

    check()


def test_a_later_file_overrides_the_fields_of_an_earlier_one_and_flags_those_of_all(tmp_path):
    for name, text in {
        "a.yaml": "{steps: 7, lag: 0, algorithm: {loss: cispo, loss_options: {x: 1, y: 2}}}",
        "b.yaml": "{lag: 1, algorithm: {loss_options: {x: 3}}, optimizer: {lr: 1e-6}}",
        "odd.yaml": "optimizer: {speed: 1}",
    }.items():
        (tmp_path / name).write_text(text)
    files = [f"--config={tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"]
    cfg = read([*files, "--optimizer.lr", "2e-6"], prog="x")
    assert (cfg.steps, cfg.lag, cfg.optimizer.lr) == (7, 1, 2e-6)
    assert cfg.algorithm.loss == "cispo" and cfg.algorithm.loss_options == {"x": 3}
    assert read(files[::-1][:2][::-1] + files[:1], prog="x").lag == 0, "the order counts"
    with pytest.raises(ValueError, match=r"config file .*odd.yaml: 1 problem\n.*optimizer.speed"):
        read([*files, "--config", f"{tmp_path}/odd.yaml"], prog="x")
    with pytest.raises(ValueError, match="--config needs a file name"):
        read([*files, "--config"], prog="x")
    with pytest.raises(ValueError, match="c.yaml: expected a flag, --config c.yaml"):
        read(["c.yaml", *files], prog="x")
    with pytest.raises(ValueError, match="c.yaml: expected a flag, --config c.yaml"):
        read([*files, "c.yaml"], prog="x")


def test_what_is_wrong_with_several_files_names_all_of_them(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("steps: 7")
    (tmp_path / "b.yaml").write_text("steps: -7")
    with pytest.raises(SystemExit):
        parse([f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml", "--lag", "0"])
    said = capsys.readouterr().err
    assert f"config of {tmp_path}/a.yaml and {tmp_path}/b.yaml and flags: " in said


def settings_of(flat: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(value, settings()[name]) for name, value in flat.items()}


# --------------------------------------------------------------------------- former runs

# --------------------------------------------------------------------------- help


def help_of(*words: str, capsys, first: tuple[str, ...] = ()) -> str:
    with pytest.raises(SystemExit) as ended:
        read([*first, "--help", *words], prog="train.py --config FILE")
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_help_has_every_field_under_its_section(capsys):
    said = help_of(capsys=capsys)
    for name in settings():
        assert f"--{name.replace('_', '-')} " in said
    assert said.index("Ways to save memory of the trainers") < said.index("--model.memory.offload")


def test_the_help_of_a_section_shows_it_alone(capsys):
    memory = help_of("model.memory", capsys=capsys)
    shown = re.findall(r"^. --(\w\S+)", memory, re.MULTILINE)
    names = [name.replace("_", "-") for name in settings() if name.startswith("model.memory.")]
    assert shown == names
    assert "none|activations|optimizer|all|parameters" in memory and "(default: none)" in memory
    assert "--critic.warmup-steps INT in [0, 1000000000]" in help_of("critic", capsys=capsys)
    with pytest.raises(Refusal, match="did you mean"):
        read(["--help", "model.memroy"], prog="x")


def test_the_help_shows_the_values_of_a_file(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("optimizer: {lr: 3.5e-4}")
    said = help_of("optimizer", capsys=capsys, first=("--config", f"{tmp_path}/c.yaml"))
    assert "(default: 0.00035)" in said


def test_options_of_the_engine_are_names_of_vllm_that_are_not_set_here():
    from spmdrl.check.engine_options import (
        ALLOWED_ARGUMENTS,
        ENGINE_ARGUMENTS,
        engine_argument_names,
    )
    from spmdrl.engine.vllm.arguments import _own_arguments

    known = {*config.flatten(config.Config()), "engine.options.speculative_config"}
    for field in filter(None, ENGINE_ARGUMENTS.values()):
        assert all(part in {*known, *sections()} for part in field.split(" + ")), field
    own = {*_own_arguments(good(), on_cpu=True), "distributed_executor_backend"}
    assert own <= ENGINE_ARGUMENTS.keys() <= set(engine_argument_names())
    assert ALLOWED_ARGUMENTS.keys() <= set(engine_argument_names())
    assert not ALLOWED_ARGUMENTS.keys() & ENGINE_ARGUMENTS.keys()


def test_importing_the_config_is_light():
    code = (
        "import sys, spmdrl.config; bad = [m for m in sys.modules if m in ('torch', 'vllm') or "
        "m.startswith('spmdrl.') and not m.startswith(('spmdrl.config', 'spmdrl.errors', "
        "'spmdrl.imports', 'spmdrl.run_files'))]; "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_old_logprob_pass_is_made_only_for_methods_that_need_one():
    from spmdrl.train.objectives.objective_loss import needed_columns

    def columns(updates=2, **algorithm):
        return needed_columns(good(algorithm=algorithm, batch=dict(updates_per_step=updates)))

    entropy = {"old_logprobs", "old_entropy"}
    assert columns(updates=1) == set() and columns() == {"old_logprobs"}
    assert columns(loss="dppo_tv", correction="none") == set()
    assert columns(updates=1, loss="kl_cov") == entropy
    assert columns(updates=1, kl_coef=0.1) == {"ref_logprobs"}
    assert columns(updates=1, kl_coef=0.1, kl_in="reward") == {"ref_logprobs", "old_logprobs"}
    assert columns(updates=1, advantage="gae") == {"values"}
    assert columns(updates=1, advantage="otb") == {"square_probs", *entropy}
    assert columns(updates=1, advantage="prime") == {"prm_logprobs", "ref_logprobs"}
    assert columns(updates=1, entropy_control=dict(keep_frac=0.2)) == entropy


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--learning-rate", "optimizer.lr"),
        ("--lr", "optimizer.lr"),
        ("--batch-size", "batch.prompts_per_step"),
        ("--num-generations", "batch.group_size"),
        ("--rollout-n", "batch.group_size"),
        ("--rollout.n", "batch.group_size"),
        ("--max-completion-length", "sampling.max_response_tokens"),
        ("--beta", "algorithm.kl_coef"),
        ("--epsilon", "algorithm.loss_options {clip_low: 0.2, clip_high: 0.2}"),
        ("--kl-coef", "algorithm.kl_coef"),
        ("--model-name-or-path", "model.path"),
        ("--actor_rollout_ref.actor.ppo_mini_batch_size", "batch.updates_per_step"),
        ("--run-name", "report.mlflow.run_name"),
    ],
)
def test_a_name_of_other_programs_is_told_by_ours(flag, field):
    with pytest.raises(Refusal, match="unknown key; ") as refused:
        read([flag, "1"], prog="x")
    assert f"that is {field} here" in str(refused.value) or f"mean {field}?" in str(refused.value)


def test_the_names_of_other_programs_lead_to_fields_and_are_none_of_ours():
    from spmdrl.config.other_frameworks import ELSEWHERE

    own = {name.rpartition(".")[2] for name in settings()}
    for other, text in ELSEWHERE.items():
        assert other not in own, other
        if text.startswith("that is "):
            assert text.split()[2] in settings(), text
    assert len(ELSEWHERE) > 150


VERL = """
actor_rollout_ref:
  model: {path: m}
  actor: {optim: {lr: 1e-6}, strategy: fsdp}
  rollout: {n: 8, val_kwargs: {n: 4}}
trainer: {total_epochs: 1, balance_batch: true}
critic: {optim: {lr: 1e-5}, model: {path: c}}
"""


def test_each_field_of_another_programs_tree_is_told_by_ours(tmp_path):
    (tmp_path / "verl.yaml").write_text(VERL)
    with pytest.raises(Refusal) as refused:
        load_yaml(tmp_path / "verl.yaml")
    told = dict(line[4:].split(": ", 1) for line in str(refused.value).splitlines()[1:])
    fields = {
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
        "actor_rollout_ref.rollout.n": "batch.group_size",
        "actor_rollout_ref.rollout.val_kwargs.n": "evaluate.samples",
        "trainer.total_epochs": "steps",
        "critic.optim.lr": "critic.lr",
        "critic.model.path": "critic.path",
    }
    assert {name: text.split()[4] for name, text in told.items() if name in fields} == fields
    left = "nothing here is called actor.strategy; leave it out"
    assert told["actor_rollout_ref"].endswith(f"{left} ({tmp_path}/verl.yaml, line 2)")
    left = "nothing here is called balance_batch; leave it out"
    assert told["trainer"].endswith(f"{left} ({tmp_path}/verl.yaml, line 6)")
    assert len(told) == len(fields) + 2


def test_a_slip_of_the_pen_in_a_section_is_one_problem(tmp_path):
    (tmp_path / "c.yaml").write_text("optimiser: {lr: 1, beta1: 0.8}")
    with pytest.raises(Refusal, match="1 problem\n  - optimiser: unknown key; did you mean opti"):
        load_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["\u2013config", "a.yaml"], "begins with one en dash (U+2013); flags begin with two"),
        (["--lag", "0", "\u2014steps", "3"], "two plain hyphens: --steps"),
        (
            ["-steps", "3"],
            "-steps: begins with one hyphen-minus (U+002D); flags begin with two plain",
        ),
        (["batch.group_size=3"], "NAME=VALUE here but --NAME VALUE: --batch.group-size 3"),
        (["--dry-run", "steps=3"], "--dry_run: expected true|false|full, got 'steps=3'"),
        (["--dry-run", "full", "steps=3"], "steps=3: flags are not written NAME=VALUE"),
        (["--sampling.stop", "a", "-b"], "a value that begins with a hyphen after =: --FLAG=-b"),
        (["actor_rollout_ref.rollout.n=3"], "that is batch.group_size here"),
    ],
)
def test_flags_in_other_spellings_are_named_as_such(argv, says):
    with pytest.raises(Refusal, match="flags: 1 problem") as refused:
        read(argv, prog="x")
    assert says in str(refused.value)


def test_values_that_look_like_flags_are_values():
    own = read(["--sampling.stop", "a=b", "--output-dir", "x=1"], prog="x")
    assert (own.sampling.stop, own.output_dir) == (("a=b",), "x=1")
    assert read(["--evaluate.temperature", "-1"], prog="x").evaluate.temperature == -1


def test_one_value_stands_for_a_list_of_it(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "sampling: {stop: END, stop_token_ids: 5}\nrewards: {functions: 'a.py:f', weights: 2}\n"
        "data: {train: {path: a.jsonl, name: b}}\n"
    )
    cfg = load_yaml(tmp_path / "c.yaml")
    assert cfg.sampling.stop == ("END",) and cfg.sampling.stop_token_ids == (5,)
    assert cfg.rewards.functions == ("a.py:f",) and cfg.rewards.weights == (2.0,)
    assert [source.name for source in cfg.data.sources("train")] == ["b"]
    (tmp_path / "c.yaml").write_text("sampling: {stop_token_ids: [1, x]}")
    with pytest.raises(Refusal, match=r"stop_token_ids: \[1\]: expected int, got 'x'"):
        load_yaml(tmp_path / "c.yaml")


def test_a_tab_is_named(tmp_path):
    (tmp_path / "c.yaml").write_text("steps: 3\nmodel:\n\tpath: x\n")
    with pytest.raises(Refusal, match="line 3 is indented by a tab, where YAML takes spaces"):
        load_yaml(tmp_path / "c.yaml")
