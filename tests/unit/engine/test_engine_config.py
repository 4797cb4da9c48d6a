"""Engine arguments: what is accepted, and what is refused with a reason that helps."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from baton.engine import EngineConfig, InvalidEngineConfig
from baton.engine.vllm_compat import ENGINE


def config(**args: Any) -> EngineConfig:
    return EngineConfig.from_args({"model": "folder", **args})


def test_defaults_need_no_more_than_a_model() -> None:
    assert config() == EngineConfig(model="folder")


@pytest.mark.parametrize(
    ("args", "field", "message"),
    [
        ({"max_modellen": 5}, "max_modellen", "is unknown; did you mean 'max_model_len'"),
        ({"zzzz": 5}, "zzzz", "is unknown; known are dtype, .*, model, revision, tokenizer"),
        ({"max_num_seqs": "many"}, "max_num_seqs", "is 'many', must be a whole number"),
        ({"max_num_seqs": 64.0}, "max_num_seqs", "is 64.0, must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs", "is true, must be a number"),
        ({"enforce_eager": 1}, "enforce_eager", "is 1, must be true or false"),
        ({"dtype": "int3"}, "dtype", "is 'int3', must be 'auto', 'bfloat16'"),
        ({"load_format": "gguf"}, "load_format", "must be 'auto', 'safetensors' or 'dummy'"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype", "must be 'auto', 'fp8' or 'fp8_e4m3'"),
        ({"device": "tpu"}, "device", "must be 'auto', 'cpu' or 'cuda'"),
        ({"block_size": 32}, "block_size", "is 32, must be 16: the layout of blocks is the wire format"),
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1"),
        ({"max_model_len": 1}, "max_model_len", "at least 2"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens", r"max_num_seqs \(64\)"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", "at most 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", "at least 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "tensor_parallel_size"),
        ({"data_parallel_size": -1}, "data_parallel_size", "at least 1"),
        ({"all2all_backend": "pigeons"}, "all2all_backend", "must be 'allgather_reducescatter' or 'all_to_all'"),
        ({"enable_eplb": True}, "enable_eplb", "needs enable_expert_parallel"),
        ({"num_redundant_experts": 2}, "num_redundant_experts", "needs enable_expert_parallel"),
        ({"trust_remote_code": True}, "trust_remote_code", "is true, must be false: .*never run"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill", "is false, must be true: .*one rule"),
        ({"seed": -1}, "seed", "is -1, must be at least 0"),
        ({"seed": 2**63}, "seed", "must be below 9223372036854775808"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override", "at least 1"),
        (
            {"download_dir": "/data", "speculative_config": {"model": "./drafter", "num_speculative_tokens": 2}},
            "download_dir",
            "is '/data', and 'folder' is a folder, which is not downloaded: leave it out",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_with_the_reason(
    args: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidEngineConfig, match=message) as caught:
        config(**args)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "args",
    [
        {"model": "org/name"},
        {"tokenizer": "org/name"},
        {"speculative_config": {"model": "org/name", "num_speculative_tokens": 2}},
    ],
)
def test_a_folder_for_downloads_is_taken_if_something_may_be_downloaded(args: dict[str, Any]) -> None:
    assert config(download_dir="/data", **args).download_dir == "/data"


def test_none_is_as_if_left_out() -> None:
    assert config(max_num_seqs=None, enable_prefix_caching=None, seed=None) == config()
    with pytest.raises(InvalidEngineConfig, match="did you mean 'max_model_len'"):
        config(max_modellen=None)


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_vllms_arguments_are_taken_where_they_ask_for_nothing(name: str) -> None:
    for value in (None, *ENGINE[name].accepted):
        assert config(**{name: value}) == config()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"swap_space": 8}, "swap_space: is 8: preempted requests are computed again; .*, or give 0, 4$"),
        ({"swap_space": False}, "swap_space: is False"),
        ({"enable_lora": True}, "enable_lora: is True: adapters are not served: .*, or give False$"),
        ({"enable_lora": 0}, "enable_lora: is 0"),
        (
            {"quantization": "awq"},
            "quantization: is .awq.: weights are served as the checkpoint.*leave it out$",
        ),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode: is 'slow': .*, or give 'auto', 'hf'$"),
        ({"compilation_config": 3}, "enforce_eager and max_cudagraph_capture_size"),
        ({"max_logprobs": 50}, "20 alternatives"),
        ({"distributed_executor_backend": "ray"}, "baton serve"),
        ({"tool_call_parser": "hermes"}, "tool_call_parser: is 'hermes': .* chat template; leave it out$"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser: is 'qwen3': .* chat template; leave it out"),
        ({"enable_auto_tool_choice": False}, "is False: .*, or give True$"),
        ({"served_model_name": "m"}, "--model-id of `baton serve`"),
    ],
)
def test_vllms_arguments_that_ask_for_something_are_refused_with_the_reason(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEngineConfig, match=message) as caught:
        config(**args)
    assert caught.value.field == next(iter(args))


def test_no_engine_argument_is_also_listed_as_unsupported() -> None:
    assert not set(ENGINE) & set(EngineConfig.model_fields)


def test_a_model_is_required() -> None:
    with pytest.raises(InvalidEngineConfig, match="required"):
        EngineConfig.from_args({})


def test_naming_the_engine_loads_no_torch() -> None:
    """Routers, gateways and tools import the engine package."""
    script = (
        "import sys, baton.engine, baton.engine.core.engine, baton.engine.config, baton.engine.offline.bench;"
        "from baton.engine import EngineConfig, SamplingParams, RequestOutput, build_engine;"
        "assert 'LLM' in dir(baton.engine);"
        "heavy = {'torch', 'transformers', 'numpy', 'ray', 'nixl'} & sys.modules.keys();"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="Nothing"):
        from baton.engine import Nothing  # noqa: F401
