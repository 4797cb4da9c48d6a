"""Models that cache something other than keys and values: the engine treats their blocks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import LLM, SamplingParams

from ...helpers.checkpoints import write_checkpoint
from .transformers_reference import PROMPTS, expected_logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("latents") / "deepseek_v2", "deepseek_v2")


@pytest.fixture(scope="module")
def yardstick(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def make_latent_llm(folder: Path) -> Callable[..., LLM]:
    return lambda **args: LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, **args)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [8, 256])
def test_latents_in_the_prefix_cache_serve_later_requests(
    make_latent_llm: Callable[..., LLM], yardstick: Any, chunk: int
) -> None:
    llm = make_latent_llm(max_num_batched_tokens=chunk)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [*PROMPTS, PROMPTS[-1][:50] + PROMPTS[-2]]  # the last shares three blocks with the one before it
    for _ in range(2):
        for prompt, result in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            tokens = result.outputs[0].token_ids
            expected = expected_logprobs(yardstick, prompt + tokens)[len(prompt) - 1 : -1]
            assert tokens == expected.argmax(-1).tolist()


@pytest.mark.slow
def test_a_pool_too_small_for_all_requests_preempts_and_gives_the_same_tokens(
    make_latent_llm: Callable[..., LLM], yardstick: Any
) -> None:
    llm = make_latent_llm(max_num_batched_tokens=64, num_gpu_blocks_override=17, max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        tokens = result.outputs[0].token_ids
        expected = expected_logprobs(yardstick, prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()
