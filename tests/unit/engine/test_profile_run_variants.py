"""The profile run launches all that a step launches: a kernel that came later would compile then.

Launches are noted and skipped, so this runs anywhere. Options of kernels are the untuned ones here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ... import ROOT
from ...helpers.checkpoints import edit_config, write_checkpoint
from ...helpers.fake_gpu import FAKE_GPU
from ...helpers.tiny_shapes import wide_shape

pytest.importorskip("triton")

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
SCRIPT = (
    FAKE_GPU
    + """
import random
import sys
from dataclasses import replace

from tests.helpers.inline_stream import InlineStream

from baton.engine.core.sampling import SamplingParams
from baton.engine.core.step import Chunk, RowStart, StepPlan
from baton.engine.layers import embedding, method
from baton.engine.models import load_config, load_model, stub_model
from baton.engine.worker import outputs
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import CudaShapes, StepLimits, StepShape
from baton.engine.worker.warmup import ProfileRun, padding_steps
from baton.kernels import fp8
from baton.kernels.compiler import recording
from baton.kernels.linear import gpu as linear_gpu
from baton.kernels.linear.operands import PackedWeight

TILES = {
    "method": linear_gpu.Method.TILES, "TOKENS": 256, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3
}

fp8.has_gpu_kernels = lambda device: True
method.pack = embedding.pack = lambda weight: PackedWeight(weight, tuple(weight.shape), in_panels=False)
outputs._PIECE_BYTES = 55 * 4 * 256  # a prompt comes in many pieces, as with a large vocabulary
config = load_config(sys.argv[1], dtype="bfloat16", load_format="dummy")
layout = config.caches.only.blocks
most_tokens = int(sys.argv[2])
limits = StepLimits(40, most_tokens, 2048, max_drafts=int(sys.argv[3]))
sizes = CudaShapes(limits, max_tokens=128)
linear_gpu.UNTUNED_MANY = {**linear_gpu.NOTHING, **TILES}  # as tuned, other kernels serve other numbers of tokens

rng = random.Random(3)
def any_step():
    seqs = rng.choice([1, 2, 3, 7, 16, 33, 40])
    tokens = rng.randint(129, most_tokens)
    decodes = rng.randint(0, seqs - 1)
    longest = rng.randint(-(-(tokens - decodes) // (seqs - decodes)), tokens - decodes)
    num_kv_tokens, num_wanted = rng.choice([tokens, 5000, 100_000]), rng.choice([None, seqs, seqs])
    shape = StepShape(seqs, tokens, decodes, longest, 2048, num_kv_tokens, num_wanted)
    draws = min(tokens - 1, seqs + rng.randint(1, 4) * (seqs - 1))
    if not limits.max_drafts or draws <= seqs or rng.random() < 0.3:
        return shape
    return replace(shape, num_wanted=num_wanted and draws, max_drafts=rng.randint(1, 4), num_draws=draws)

def any_request():
    def maybe(*values): return rng.choice([None, *values])
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]), top_k=rng.choice([0, 7]), top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]), repetition_penalty=rng.choice([1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.5]), logit_bias=rng.choice([{}, {3: 1.5, 7: -2.0}]),
        bad_words_token_ids=rng.choice([[], [[5]], [[1, 2], [3]]]), allowed_token_ids=maybe([1, 2, 3]),
        min_tokens=rng.choice([0, 0, 2]), logprobs=maybe(0, 1, 3, 20), prompt_logprobs=maybe(0, 1, 3, 20),
    )

def any_plans(step):
    # Some requests come, with some of their tokens known already; some of them decode; all go.
    rows = rng.sample(range(40), rng.choice([1, 2, 3, 5, 9, 21, 40]))
    longest = most_tokens // len(rows)
    starts, chunks = [], []
    for row in rows:
        length = rng.choice([1, 2, rng.randint(1, longest), longest])
        cached = rng.choice([0, 0, 16 * rng.randint(0, 30)])
        request, total = any_request(), cached + length
        starts.append(RowStart(row, str(row), [0] * total, [], request, 1, [2], [[0] * (total // 16 + 1)]))
        chunks.append(Chunk(row, cached, length, True, [], request.prompt_logprobs is not None))
    chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
    yield StepPlan(step, [], starts, chunks)
    for further in range(2):
        some = rng.sample(chunks, rng.randint(1, len(chunks)))
        yield StepPlan(step, [], [], [Chunk(c.row, c.start + c.num_tokens + further, 1, True, []) for c in some])
    if limits.max_drafts:
        # Decodes with drafts, beside prompts of others or not.
        some = rng.sample(chunks, rng.randint(1, 9) % len(rows) + 1)
        drafted = [with_drafts(chunk.row, chunk.start + chunk.num_tokens + 2) for chunk in some]
        yield StepPlan(step, [], [], drafted)
        others = [row for row in range(40) if row not in rows][: rng.randint(0, 3)]
        coming = [RowStart(row, str(row), [0] * 30, [], any_request(), 1, [2], [[0] * 3]) for row in others]
        prompts = [Chunk(start.row, 0, 30, True, [], start.sampling.prompt_logprobs is not None) for start in coming]
        again = [with_drafts(chunk.row, chunk.start + chunk.num_tokens) for chunk in drafted]
        yield StepPlan(step, [], coming, again + prompts)
        rows = rows + others
    yield StepPlan(step, rows, [], [])

def with_drafts(row, start):
    count = rng.randint(1, limits.max_drafts)
    return Chunk(row, start, 1 + count, True, [], num_drafts=count, drafts=(3,) * count)

def mm(a, b, out_dtype=None, *, out=None, mm=torch.mm):
    product = mm(a, b, out=out)
    return product if out_dtype is None else product.to(out_dtype)

torch.mm = mm  # another type for the result is there on a GPU only
models = [load_model(config), stub_model(config, device="cpu")]
torch.Tensor.is_cuda, torch.Tensor.is_cpu = True, False  # of every tensor: kernels for a GPU are chosen
kv = torch.zeros(layout.shape(1), dtype=torch.bfloat16)
whole, stub = (
    ModelRunner(model, [kv], CudaBackend(InlineStream(), sizes, torch.bfloat16), limits, config.vocab_size)
    for model in models
)
with recording() as variants:
    ProfileRun(lambda: stub, list(sizes.in_capture_order()), lambda work: work() or 0, limits).run()
    profiled = len(variants)
    if most_tokens > 128:
        padding_steps(whole, [any_step() for _ in range(40)])
    whole.capture()
    for step in range(25):
        for plan in any_plans(step):
            whole.launch(plan).result()
assert profiled > 10, variants
assert not variants[profiled:], variants[profiled:]
"""
)


WITH_KERNELS_OF_THEIR_OWN = (
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmo2",
    "gemma2",
    "gemma3_text",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
@pytest.mark.parametrize("kind", WITH_KERNELS_OF_THEIR_OWN)
def test_no_step_launches_what_the_profile_run_did_not(kind: str, tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, kind))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v2"])
def test_nor_does_one_where_all_but_scored_prompts_are_captured(kind: str, tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, kind, **wide_shape(kind)), max_num_batched_tokens=128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
@pytest.mark.parametrize(("kind", "most_tokens"), [("qwen3", 1024), ("qwen3", 128), ("deepseek_v2", 1024)])
def test_nor_does_one_with_drafts(kind: str, most_tokens: int, tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, kind), max_num_batched_tokens=most_tokens, max_drafts=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
def test_nor_does_one_of_weights_in_8_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 64}
    folder = write_checkpoint(tmp_path, "qwen3_moe", **sizes)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    check(folder)


def check(folder: Path, *, max_num_batched_tokens: int = 1024, max_drafts: int = 0) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(max_num_batched_tokens), str(max_drafts)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
