"""The profile run launches all kernels that steps launch: any other one would have to compile during a request.

Launches are recorded and skipped, so this runs anywhere. Kernel options are the untuned ones here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ... import ROOT
from ...helpers.checkpoints import edit_config, write_checkpoint
from ...helpers.draft_layers import with_draft_layer
from ...helpers.eagle3 import write_eagle3
from ...helpers.fake_gpu import FAKE_GPU
from ...helpers.tiny_shapes import wide_shape

pytest.importorskip("triton")

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
SCRIPT = (
    FAKE_GPU
    + """
import json
import random
import sys
from dataclasses import replace

from tests.helpers.inline_stream import InlineStream

from baton.engine.config import EngineConfig
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.step import Chunk, RowStart, StepPlan
from baton.engine.layers import embedding, experts, method, plain_experts
from baton.engine.models import load_model, stub_model
from baton.engine.parallel.groups import ALL_ALONE
from baton.engine.startup.arenas import engine_caches
from baton.engine.startup.device import load_draft_model, stub_draft_model
from baton.engine.startup.model_config import read_model_config
from baton.engine.worker import outputs
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.tables import CacheArenas
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.shapes import StepLimits, StepShape
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
experts.pack_router = plain_experts.pack = lambda weights: weights
outputs._PIECE_BYTES = 55 * 4 * 256  # a prompt comes in many pieces, as with a large vocabulary
speculation, most_tokens = json.loads(sys.argv[3]), int(sys.argv[2])
engine_args = {"model": sys.argv[1], "dtype": "bfloat16", "load_format": "dummy"}
engine_config = EngineConfig.from_args({**engine_args, "speculative_config": speculation})
config = read_model_config(engine_config)
caches = engine_caches(config)
most_drafts = 0 if speculation is None else speculation["num_speculative_tokens"]
most_seqs = 12 if most_drafts else 40  # with drafts there are many more sizes
limits = StepLimits(most_seqs, most_tokens, 2048, most_drafts, guesses_on_device=engine_config.guesses_on_device)
sizes = CudaShapes(limits, max_tokens=64 if most_drafts else 128)
linear_gpu.UNTUNED_MANY = {**linear_gpu.NOTHING, **TILES}  # as tuned, other kernels serve other numbers of tokens

rng = random.Random(3)
def any_step():
    seqs = rng.choice([count for count in (1, 2, 3, 7, 12, 16, 33, 40) if count <= most_seqs])
    tokens = rng.randint(129, most_tokens)
    decodes = rng.randint(0, seqs - 1)
    longest = rng.randint(-(-(tokens - decodes) // (seqs - decodes)), tokens - decodes)
    num_kv_tokens, num_wanted = rng.choice([tokens, 5000, 100_000]), rng.choice([None, seqs, seqs])
    shape = StepShape(
        num_seqs=seqs, num_tokens=tokens, num_decodes=decodes, max_query_len=longest, max_seq_len=2048,
        num_kv_tokens=num_kv_tokens, num_wanted=num_wanted,
    )
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
    rows = rng.sample(range(most_seqs), rng.choice([n for n in (1, 2, 3, 5, 9, 12, 21, 40) if n <= most_seqs]))
    longest = most_tokens // len(rows)
    starts, chunks = [], []
    for row in rows:
        length = rng.choice([1, 2, rng.randint(1, longest), longest])
        cached = rng.choice([0, 0, 16 * rng.randint(0, 30)])
        request, total = any_request(), cached + length
        tables = [[0] * (total // 16 + 1)] * len(caches.layout.groups)
        starts.append(RowStart(row, str(row), [0] * total, [], request, 1, [2], tables))
        chunks.append(Chunk(row, cached, length, True, [], request.prompt_logprobs is not None))
    chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
    yield StepPlan(step, [], starts, chunks, num_guesses=most_drafts)
    for further in range(2):
        some = rng.sample(chunks, rng.randint(1, len(chunks)))
        more = rng.randint(0, most_drafts)
        drafted = [with_drafts(chunk, further, more) for chunk in some]
        yield StepPlan(step, [], [], drafted, num_guesses=rng.choice([0, most_drafts]))
    if most_drafts:
        # Decodes with drafts beside prompts of others.
        others = [row for row in range(most_seqs) if row not in rows][: rng.randint(0, 3)]
        tables = [[0] * 3] * len(caches.layout.groups)
        coming = [RowStart(row, str(row), [0] * 30, [], any_request(), 1, [2], tables) for row in others]
        prompts = [Chunk(start.row, 0, 30, True, [], start.sampling.prompt_logprobs is not None) for start in coming]
        drafted = [with_drafts(chunk, 9, rng.randint(1, most_drafts)) for chunk in some[:9]]
        yield StepPlan(step, [], coming, drafted + prompts, num_guesses=most_drafts)
        rows = rows + others
    yield StepPlan(step, rows, [], [])

def with_drafts(chunk, further, count):
    guesses = () if limits.guesses_on_device else (3,) * count
    start = chunk.start + chunk.num_tokens + further
    return Chunk(chunk.row, start, 1 + count, True, [], num_drafts=count, drafts=guesses)

def mm(a, b, out_dtype=None, *, out=None, mm=torch.mm):
    product = mm(a, b, out=out)
    return product if out_dtype is None else product.to(out_dtype)

torch.mm = mm  # another type for the result is there on a GPU only
models = [load_model(config), stub_model(config, device="cpu")]
draft_models = [
    load_draft_model(config, models[0], progress=lambda *_: None, groups=ALL_ALONE),
    stub_draft_model(config, models[1], ALL_ALONE),
]
torch.Tensor.is_cuda, torch.Tensor.is_cpu = True, False  # of every tensor: kernels for a GPU are chosen
arenas = [torch.zeros(group.blocks.shape(1), dtype=torch.bfloat16) for group in caches.layout.groups]
whole, stub = (
    ModelRunner(
        model,
        CacheArenas(arenas, caches.of_model),
        CudaBackend(InlineStream(), sizes, torch.bfloat16),
        limits,
        config.vocab_size,
        draft_model,
    )
    for model, draft_model in zip(models, draft_models)
)
with recording() as variants:
    ProfileRun(lambda: stub, list(sizes.in_capture_order()), lambda work: work() or 0, limits).run()
    profiled = len(variants)
    if most_tokens > 128:
        padding_steps(whole, [any_step() for _ in range(40)])
    whole.capture()
    for step in range(10 if most_drafts else 25):
        for plan in any_plans(step):
            whole.launch(plan).result()
assert profiled > 10, variants
assert not variants[profiled:], variants[profiled:]
"""
)


SUFFIX: dict[str, object] = {"method": "suffix", "num_speculative_tokens": 4}
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
def test_nor_does_one_with_layers_that_do_not_rotate(tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, "smollm3", hidden_size=128))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
@pytest.mark.parametrize(("kind", "most_tokens"), [("qwen3", 1024), ("qwen3", 128), ("deepseek_v2", 1024)])
def test_nor_does_one_with_drafts(kind: str, most_tokens: int, tmp_path: Path) -> None:
    check(write_checkpoint(tmp_path, kind), max_num_batched_tokens=most_tokens, speculation=SUFFIX)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
def test_nor_does_one_of_weights_in_8_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 64}
    folder = write_checkpoint(tmp_path, "qwen3_moe", **sizes)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    check(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a device does not go with a real one")
@pytest.mark.parametrize("drafter", ["draft layer", "head", "model"])
def test_nor_does_one_with_guesses(drafter: str, tmp_path: Path) -> None:
    speculation: dict[str, object] = {"num_speculative_tokens": 3}
    if drafter == "draft layer":
        folder = with_draft_layer(tmp_path / "model", "deepseek_v3")
        speculation["method"] = "mtp"
    else:
        folder = write_checkpoint(tmp_path / "model", "qwen3")
        if drafter == "head":
            speculation |= {"method": "eagle3", "model": str(write_eagle3(tmp_path / "other"))}
        else:
            speculation["model"] = str(write_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1))
    check(folder, speculation=speculation)


def check(folder: Path, *, max_num_batched_tokens: int = 1024, speculation: dict[str, object] | None = None) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(max_num_batched_tokens), json.dumps(speculation)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
