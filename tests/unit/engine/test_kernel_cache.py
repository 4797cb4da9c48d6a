"""On a GPU, the main process compiles nothing; the next start finds all kernels, and no request waits for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ...helpers.checkpoints import write_checkpoint
from ...helpers.tiny_shapes import wide_shape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]
START_S = 240.0
START = """
import logging, random, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from baton.engine import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=16,
          max_num_batched_tokens=128, kv_cache_memory_bytes=256 << 20)
rng = random.Random(1)
for controls in (
    {"temperature": 1.0},
    {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 3},
    {"temperature": 0.7, "logprobs": 0, "prompt_logprobs": 20},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1, "presence_penalty": 0.5,
     "min_tokens": 3, "stop_token_ids": [7], "logit_bias": {5: 2.0}},
):
    prompts = [[rng.randrange(10, 250) for _ in range(length)] for length in (5, 200, 1, 101, 64, 17, 39)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, detokenize=False, **controls)
    llm.generate(prompts, params, use_tqdm=False)
print("late", llm.engine.core.stats().num_late_compilations)
"""


def start(folder: Path, cache: Path) -> tuple[str, str]:
    """Start an engine; return the kernels that the process itself compiled, and its last output."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-3000:]
    made = re.search(r"this process itself made \d+ kernels and launchers: (.*)", done.stderr)
    assert made is not None
    return made[1], done.stdout.strip()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_first_start_leaves_compiling_to_others_and_a_second_finds_everything(
    tmp_path: Path, architecture: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", architecture, dtype="bfloat16", **wide_shape(architecture))
    made, said = start(folder, tmp_path / "cache")
    assert set(made.split(", ")) <= {"none", "cuda_utils"}  # the latter is the driver's own
    assert said == "late 0"
    assert start(folder, tmp_path / "cache") == ("none", "late 0")
