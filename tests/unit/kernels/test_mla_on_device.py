"""The MLA kernels on a GPU: bfloat16, sums of parts, writes before reads, blocks past 4 GiB, graphs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from baton.kernels.mla import AttentionBatch, gpu

from .kernel_checks import without_poison
from .mla_cases import BLOCK_SIZE, DEEPSEEK_V2_LITE, LAYER, SCALE, LatentStep, latent_step, padded
from .mla_writes import Write, check_write, write

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

LENGTHS = {
    "decodes": ([1] * 9, [5000, 1, 16, 333, 64, 65, 2048, 700, 9000], None),
    "drafts": ([4, 1, 3, 2, 4, 4, 4, 1, 4], [5000, 1, 16, 333, 64, 65, 2048, 700, 9000], None),
    "chunks": ([1, 1, 7, 130, 64], [900, 33, 1007, 130, 2064], None),
    "prompts": ([1, 1, 300, 130, 640], [900, 33, 1300, 130, 641], 2100),
}


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_bfloat16_on_the_device(lengths: str, num_heads: int) -> None:
    query_lens, seq_lens, num_kv_tokens = LENGTHS[lengths]
    shape = dataclasses.replace(DEEPSEEK_V2_LITE, num_heads=num_heads)
    device = torch.device("cuda")
    step = latent_step(query_lens, seq_lens, device, shape=shape, dtype=torch.bfloat16, num_kv_tokens=num_kv_tokens)
    step.check(step.attend(gpu.prepare, gpu.mla_attention))


FEW = [5000, 1, 700]
MANY = LENGTHS["decodes"][1]
UNEVEN = random.Random(1).choices(range(1, 1000), k=150)


def on_hopper(query_lens: Sequence[int], seq_lens: Sequence[int], num_heads: int = 16) -> LatentStep:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    shape = dataclasses.replace(DEEPSEEK_V2_LITE, num_heads=num_heads)
    return latent_step(query_lens, seq_lens, torch.device("cuda"), shape=shape, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("num_programs", [1, 2, 5, 20, 132])
@pytest.mark.parametrize("seq_lens", [[9000], FEW, MANY, UNEVEN], ids=["one", "few", "many", "uneven"])
def test_parts_are_added_up_however_many_there_are(
    seq_lens: list[int], num_programs: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    step = padded(on_hopper([min(queries, length) for length in seq_lens], seq_lens), 4)
    result = step.attend(gpu.prepare, gpu.mla_attention)
    step.check(result)
    assert not result[-4:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 40, 128])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 161])
def test_programs_go_on_to_the_next_item_after_any_number_of_tiles(
    length: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work list of several queries has items without tiles between others."""
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: 7)
    lengths = [length, 200, length, 33, 500, length, length]
    step = on_hopper([min(3, length) for length in lengths], lengths, num_heads)
    step.check(step.attend(gpu.prepare, gpu.mla_attention))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("num_heads", [5, 16, 40, 128])
@pytest.mark.parametrize("seq_lens", [FEW, MANY, UNEVEN], ids=["few", "many", "uneven"])
def test_repeated_calls_with_one_plan_give_the_same_bits(seq_lens: list[int], num_heads: int, queries: int) -> None:
    step = on_hopper([min(queries, length) for length in seq_lens], seq_lens, num_heads)
    batch = gpu.prepare(step.batch, num_heads=num_heads, head_dim=step.q.shape[2])
    results = [gpu.mla_attention(step.q, step.kv, LAYER, batch, step.up, scale=SCALE) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


def tokens_of(step: LatentStep) -> Write:
    """Return the latents of a step's tokens, for `latent_and_cache` to write. Their rotation is by an angle of 0."""
    compressed = torch.randn(len(step.q), step.kv.shape[5], device="cuda").bfloat16()
    angles = torch.zeros(10000, DEEPSEEK_V2_LITE.rope // 2, device="cuda")
    norm = torch.ones(step.up.rank, dtype=torch.bfloat16, device="cuda")
    return Write(step, compressed, norm, torch.cat([angles.cos(), angles.sin()], dim=1))


def check_step_by_step(tokens: Write) -> None:
    """Write and read other latents in each of many rounds, without a pause. A read that is too early gets old ones."""
    step = tokens.step
    kv = without_poison(step.kv)
    batch = gpu.prepare(step.batch, num_heads=step.q.shape[1], head_dim=step.q.shape[2])
    results, caches = [], []
    for sign in (1, -1) * 10:
        q_rope = step.q[..., step.up.nope_dim :]
        gpu.latent_and_cache(q_rope, sign * tokens.compressed, tokens.norm, tokens.cos_sin, kv, LAYER, batch, eps=1e-6)
        results.append(gpu.mla_attention(step.q, kv, LAYER, batch, step.up, scale=SCALE))
        caches.append(kv.clone())
    for result, as_read in zip(results, caches, strict=True):
        dataclasses.replace(step, kv=as_read).check(result)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("count", [8, 64])
def test_the_newest_latents_count_though_they_are_written_right_before(count: int, queries: int) -> None:
    """Kernels fetch pages before earlier kernels have ended, except the pages that those write."""
    step = on_hopper([queries] * count, [200 + 3 * index for index in range(count)])
    check_step_by_step(tokens_of(dataclasses.replace(step, batch=dataclasses.replace(step.batch, drafted=True))))


@pytest.mark.gpu
def test_a_single_token_behind_a_chunk_finds_the_prefix_that_the_chunk_writes() -> None:
    step = on_hopper([1, 6, 1], [900, 64, 65])
    tables = step.batch.block_tables.clone()
    tables[2, :4] = tables[1, :4]
    batch = AttentionBatch.plan([1, 6, 1], [900, 64, 65], tables, BLOCK_SIZE)
    assert batch.num_decodes == 1
    check_step_by_step(tokens_of(dataclasses.replace(step, batch=batch)))


@pytest.mark.gpu
def test_bfloat16_is_written_on_the_device() -> None:
    check_write(write(torch.device("cuda"), torch.bfloat16, DEEPSEEK_V2_LITE))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_past_4_gib_are_read(lengths: str) -> None:
    query_lens, seq_lens, num_kv_tokens = LENGTHS[lengths]
    options = {"shape": DEEPSEEK_V2_LITE, "dtype": torch.bfloat16, "num_kv_tokens": num_kv_tokens}
    near = latent_step(query_lens, seq_lens, torch.device("cuda"), **options)
    far = latent_step(
        query_lens, seq_lens, torch.device("cuda"), first_block=(1 << 32) // near.kv[0].numel() + 1, **options
    )
    assert torch.equal(far.attend(gpu.prepare, gpu.mla_attention), near.attend(gpu.prepare, gpu.mla_attention))


@pytest.mark.gpu
def test_blocks_past_4_gib_are_written() -> None:
    near = write(torch.device("cuda"), torch.bfloat16, DEEPSEEK_V2_LITE)
    far_block = (1 << 32) // near.step.kv[0].numel() + 1
    slots = near.step.batch.slots
    batch = dataclasses.replace(near.step.batch, slots=torch.where(slots < 0, slots, slots + far_block * BLOCK_SIZE))
    kv = torch.empty((far_block + len(near.step.kv), *near.step.kv.shape[1:]), dtype=torch.bfloat16, device="cuda")
    kv[far_block:] = near.step.kv
    q = near.step.q.clone()
    q_rope = q[..., DEEPSEEK_V2_LITE.nope :]
    gpu.latent_and_cache(q_rope, near.compressed, near.norm, near.cos_sin, kv, LAYER, batch, eps=1e-6)
    q_near, kv_near = near.run(gpu.latent_and_cache, torch.bfloat16)
    assert torch.equal(q, q_near)
    assert torch.equal(kv[far_block:].nan_to_num(7.0), kv_near.nan_to_num(7.0))


@pytest.mark.gpu
def test_a_captured_graph_serves_later_lengths() -> None:
    device = torch.device("cuda")
    query_lens, seq_lens, _ = LENGTHS["chunks"]
    step = padded(latent_step(query_lens, seq_lens, device, shape=DEEPSEEK_V2_LITE, dtype=torch.bfloat16), 30)
    step = dataclasses.replace(step, kv=step.kv.nan_to_num(0.5))
    step.attend(gpu.prepare, gpu.mla_attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step.attend(gpu.prepare, gpu.mla_attention)
    # A sequence is at least as long as its number of queries. Only padding, which has none, has length 0.
    for lengths in (seq_lens, [1, 30, 1000, 130, 70], [900, 1, 7, 131, 64]):
        step.batch.seq_lens[: len(lengths)] = torch.tensor(lengths, device=device)
        graph.replay()
        assert torch.equal(result, step.attend(gpu.prepare, gpu.mla_attention))
