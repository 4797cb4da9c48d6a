"""Latent attention in Triton against the reference; interpreted without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from baton.kernels.mla import gpu
from baton.kernels.mla.gpu import absorbed, expanded
from baton.kernels.mla.gpu.work_list import WorkTiles, plan_work

from .kernel_checks import untouched_memory
from .mla_cases import LAYER, SCALE, SMALL, Shape, latent_step, padded
from .mla_writes import check_write, prepare, write

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

RAGGED = [37, 1, 16, 70, 17, 32]
MIXED = ([1, 1, 5, 40], [50, 33, 60, 40])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seq_lens", [RAGGED, [1], [15], [500]], ids=str)
def test_decodes_of_any_lengths(seq_lens: list[int], triton_device: torch.device) -> None:
    step = latent_step([1] * len(seq_lens), seq_lens, triton_device)
    step.check(step.attend(prepare, gpu.mla_attention))


@pytest.mark.slow
@pytest.mark.parametrize("num_programs", [1, 3, 7, 20])
def test_the_result_is_right_however_many_programs_share_the_work(
    num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    step = latent_step([1] * len(RAGGED), RAGGED, triton_device)
    step.check(step.attend(prepare, gpu.mla_attention))


@pytest.mark.slow
def test_chunks_of_any_lengths_and_decodes_among_them(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device)
    step.check(step.attend(prepare, gpu.mla_attention))


@pytest.mark.slow
@pytest.mark.parametrize("num_programs", [1, 3, 7, 40])
def test_decodes_with_drafts_of_any_lengths(
    num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens are also between sequences with drafts: a program passes them, and must not write their rows."""
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    step = latent_step([3, 1, 4, 2, 1, 5, 4], [50, 33, 70, 40, 1, 35, 4], triton_device)
    step.check(step.attend(prepare, gpu.mla_attention))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 12, 20, 40, 70, 130])
def test_products_of_heads_for_any_number_of_tokens(num_tokens: int, triton_device: torch.device) -> None:
    step = padded(latent_step([1] * num_tokens, [1 + 7 * (i % 12) for i in range(num_tokens)], triton_device), 2)
    result = step.attend(prepare, gpu.mla_attention)
    step.check(result)
    assert not result[-2:].any()


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 3, 70])
def test_any_number_of_heads(num_heads: int, triton_device: torch.device) -> None:
    step = latent_step([1, 3], [40, 20], triton_device, shape=dataclasses.replace(SMALL, num_heads=num_heads))
    step.check(step.attend(prepare, gpu.mla_attention))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [([1] * 4, [50, 33, 1, 17]), MIXED], ids=["decodes", "chunks"])
def test_padding_is_zero_and_changes_nothing(lengths: tuple[list[int], list[int]], triton_device: torch.device) -> None:
    step = padded(latent_step(*lengths, triton_device), 9)
    result = step.attend(prepare, gpu.mla_attention)
    step.check(result)
    assert not result[-9:].any()


@pytest.mark.slow
def test_half_precision_sums_in_float32(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device, dtype=torch.float16)
    step.check(step.attend(prepare, gpu.mla_attention))


def test_heads_may_lie_further_apart_than_32_bits_count(triton_device: torch.device) -> None:
    """As in the projected queries of tens of thousands of tokens, which are stored head by head."""
    step = latent_step([1, 1], [70, 20], triton_device, shape=dataclasses.replace(SMALL, num_heads=3))
    batch = gpu.prepare(step.batch, num_heads=3, head_dim=step.q.shape[2])
    (part,) = batch.prepared.absorbed
    near = step.up.absorb(step.q[..., : SMALL.nope]).half()
    apart, half = 1 << 30, 1 << 31
    size = half + 2 * apart + near[0].numel()
    memory = untouched_memory((size,), near.dtype) if near.is_cpu else near.new_zeros(size)
    far = memory.as_strided(near.shape, (SMALL.rank, apart, 1), half)  # an offset that wraps finds zeros before it
    far.copy_(near)
    kv, q_rope = step.kv.half(), step.q[..., SMALL.nope :].half()
    results = [near.new_empty(near.shape) for _ in range(2)]
    for q_latent, out in zip((near, far), results, strict=True):
        absorbed.latent_attention(
            q_latent, q_rope, kv, LAYER, batch, part.work, part.tiles, scale=SCALE, out=out, pads=True
        )
    assert torch.equal(*results)


@pytest.mark.slow
def test_queries_may_be_a_view_into_a_fused_projection(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device)
    fused = torch.cat([step.q.flatten(1), torch.full((len(step.q), 9), float("nan"), device=triton_device)], dim=1)
    step = dataclasses.replace(step, q=fused[:, :-9].unflatten(1, step.q.shape[1:]))
    step.check(step.attend(prepare, gpu.mla_attention))


# ---- the plan of work -----------------------------------------------------------------------------------------------


def items_of(query_lens: Sequence[int], seq_lens: Sequence[int], singles: bool, queries: int) -> list[list[int]]:
    """Return [first token, number of tokens, keys of the first token, table row] of every item, from the host."""
    first_tokens = itertools.accumulate(query_lens, initial=0)
    return [
        [token + query, min(queries, length - query), seq_len - length + query + 1, seq]
        for seq, (token, length, seq_len) in enumerate(zip(first_tokens, query_lens, seq_lens, strict=False))
        if (length == 1) == singles
        for query in range(0, length, queries)
    ]


@pytest.mark.parametrize("singles", [False, True])
@pytest.mark.parametrize("num_programs", [6, 300])
def test_every_tile_is_in_one_share_and_shares_differ_by_one_at_most(
    singles: bool, num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    generator = torch.Generator().manual_seed(0)
    query_lens = torch.randint(1, 9, (300,), generator=generator).tolist()
    seq_lens = [length + extra for length, extra in zip(query_lens, range(300), strict=True)]
    batch = latent_step(query_lens, seq_lens, triton_device).batch
    tiles = WorkTiles(16, 16 if singles else 4, 16)
    work = plan_work(batch, 300, tiles, 4, singles=singles)
    expected = items_of(query_lens, seq_lens, singles, tiles.queries)
    counts = work.starts.diff().tolist()
    assert [item for item, count in zip(work.items.tolist(), counts, strict=True) if count] == expected
    assert [count for count in counts if count] == [-(-(keys + tokens - 1) // 16) for _, tokens, keys, _ in expected]
    begins, owners = work.shares.T.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(begins)]
    assert sum(sizes) == work.starts[-1]
    assert max(sizes) - min(size for size in sizes if size) <= 1
    for begin, size, item in zip(begins, sizes, owners, strict=False):
        assert not size or work.starts[item] <= begin < work.starts[item + 1]


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("num_programs", [6, 3000])
def test_counters_of_arrivals_start_at_zero_for_every_group_of_heads(
    num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    batch = latent_step([1, 1], [40, 20], triton_device).batch
    work = plan_work(batch, 2, WorkTiles(16, 16, 16), num_heads=33, singles=True)
    assert work.arrivals.tolist() == [[0] * (num_programs // 3)] * 3


# ---- expanded -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("slack", "shape"), [(0, SMALL), (100, SMALL), (0, Shape(nope=48, value=64))])
def test_long_prompts_are_expanded_beside_decodes(
    slack: int, shape: Shape, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "LEAST_QUERIES", 16)
    lengths = ([1, 1, 150, 40, 70], [50, 33, 200, 40, 130])
    step = latent_step(*lengths, triton_device, shape=shape, num_kv_tokens=sum(lengths[1][2:]) + slack)
    batch = prepare(step.batch, num_heads=4, head_dim=shape.nope + shape.rope)
    assert batch.prepared.prompts is not None
    assert batch.prepared.num_absorbed_tokens == 2
    step.check(gpu.mla_attention(step.q, step.kv, LAYER, batch, step.up, scale=SCALE))


def test_chunks_too_short_or_contexts_too_long_to_expand_stay_absorbed(triton_device: torch.device) -> None:
    batch = latent_step([1, 130, 130], [5, 200, 130], triton_device, num_kv_tokens=330).batch
    assert expanded.pays_to_expand(batch)
    assert not expanded.pays_to_expand(dataclasses.replace(batch, num_kv_tokens=None))
    assert not expanded.pays_to_expand(dataclasses.replace(batch, num_kv_tokens=1 << 20))
    short = latent_step([1, 130, 100], [5, 200, 130], triton_device, num_kv_tokens=330).batch
    assert not expanded.pays_to_expand(short)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_latents_are_normed_and_cached_and_rotary_parts_are_rotated(
    dtype: torch.dtype, triton_device: torch.device
) -> None:
    check_write(write(triton_device, dtype))


@pytest.mark.parametrize("num_heads", [1, 5])
def test_any_number_of_query_heads_is_rotated(num_heads: int, triton_device: torch.device) -> None:
    check_write(write(triton_device, torch.float32, dataclasses.replace(SMALL, num_heads=num_heads)))
