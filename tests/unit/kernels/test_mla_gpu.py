"""Latent attention in Triton against the reference; interpreted without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from baton.kernels.mla import gpu
from baton.kernels.mla.gpu import absorbed, expanded
from baton.kernels.mla.gpu.combine import combine
from baton.kernels.mla.gpu.partial_results import PartialResults
from baton.kernels.mla.gpu.work_list import FIRST_PROGRAM, LAST_PROGRAM, NUM_CACHED, WorkList, WorkTiles, plan_work

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
def test_products_to_values_merge_any_number_of_parts(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of many sequences is so long that it has more parts than are loaded at a time."""
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: 26)
    monkeypatch.setattr("baton.kernels.mla.gpu.head_products.combine", None)
    step = latent_step([1] * 9, [300, *range(3, 11)], triton_device)
    batch = prepare(step.batch, num_heads=4, head_dim=step.q.shape[2])
    assert max(len(programs) for programs in programs_by_item(batch.prepared.absorbed)) > 4
    step.check(gpu.mla_attention(step.q, step.kv, LAYER, batch, step.up, scale=SCALE))


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_padding_is_zero_where_parts_have_a_kernel_of_their_own(num_tokens: int, triton_device: torch.device) -> None:
    step = padded(latent_step([1] * num_tokens, [40] * num_tokens, triton_device), 1)
    result = step.attend(prepare, gpu.mla_attention)
    step.check(result)
    assert not result[-1].any()


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
    work = batch.prepared.absorbed
    near = step.up.absorb(step.q[..., : SMALL.nope]).half()
    apart, half = 1 << 30, 1 << 31
    size = half + 2 * apart + near[0].numel()
    memory = untouched_memory((size,), near.dtype) if near.is_cpu else near.new_zeros(size)
    far = memory.as_strided(near.shape, (SMALL.rank, apart, 1), half)  # an offset that wraps finds zeros before it
    far.copy_(near)
    kv, q_rope = step.kv.half(), step.q[..., SMALL.nope :].half()
    attended = []
    for q_latent in (near, far):
        results = PartialResults.empty(q_latent, work)
        absorbed.latent_attention(q_latent, q_rope, kv, LAYER, batch, work, scale=SCALE, results=results)
        combine(results, batch, work)
        attended.append(results.attended)
    assert torch.equal(*attended)


@pytest.mark.slow
def test_queries_may_be_a_view_into_a_fused_projection(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device)
    fused = torch.cat([step.q.flatten(1), torch.full((len(step.q), 9), float("nan"), device=triton_device)], dim=1)
    step = dataclasses.replace(step, q=fused[:, :-9].unflatten(1, step.q.shape[1:]))
    step.check(step.attend(prepare, gpu.mla_attention))


# ---- the plan of work -----------------------------------------------------------------------------------------------


def items_of(query_lens: Sequence[int], seq_lens: Sequence[int], queries: int, num_decodes: int) -> list[list[int]]:
    """Return [first token, number of tokens, keys of the first token, cached keys, table row] of every item."""
    first_tokens = itertools.accumulate(query_lens, initial=0)
    return [
        [
            token + query,
            min(queries, length - query),
            seq_len - length + query + 1,
            seq_len - length if seq < num_decodes else 0,
            seq,
        ]
        for seq, (token, length, seq_len) in enumerate(zip(first_tokens, query_lens, seq_lens, strict=False))
        for query in range(0, length, queries)
    ]


def plan(
    query_lens: Sequence[int], seq_lens: Sequence[int], device: torch.device, *, queries: int = 4, drafted: bool = False
) -> WorkList:
    batch = dataclasses.replace(latent_step(query_lens, seq_lens, device).batch, drafted=drafted)
    tiles = WorkTiles(16, 16 // queries, 16)
    return plan_work(batch, len(query_lens), sum(query_lens), tiles, 16 // queries, singles=max(query_lens) == 1)


def programs_by_item(work: WorkList) -> list[set[int]]:
    """Return the programs with a tile of each item that has any, from the shares."""
    begins, starts = work.shares[:, 0].tolist(), work.starts.tolist()
    return [
        {
            program
            for program, (begin, end) in enumerate(itertools.pairwise(begins))
            if max(begin, item_begin) < min(end, item_end)
        }
        for item_begin, item_end in itertools.pairwise(starts)
        if item_begin < item_end
    ]


def check_plan(work: WorkList) -> list[int]:
    """Check that every tile is in one share, and that items and shares agree. Return the sizes of the shares."""
    begins, owners = work.shares.T.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(begins)]
    assert begins[0] == 0
    assert begins[-1] == work.starts[-1]
    assert min(sizes) >= 0
    average = -(-sum(sizes) // len(sizes))
    assert max(sizes) <= average + average // 8 + 1
    for begin, size, owner in zip(begins, sizes, owners, strict=False):
        first = next(item for item in range(owner, work.max_items) if work.starts[item + 1] > begin) if size else 0
        assert not size or work.starts[first] <= begin
    items = work.items[work.starts.diff() > 0].tolist()
    spans = [set(range(item[FIRST_PROGRAM.value], item[LAST_PROGRAM.value] + 1)) for item in items]
    assert [span & {program for program, size in enumerate(sizes) if size} for span in spans] == programs_by_item(work)
    assert [min(span) for span in spans] == [min(programs) for programs in programs_by_item(work)]
    return sizes


UNEVEN = ([1 + 5 * index % 8 for index in range(300)], [1 + 5 * index % 8 + index for index in range(300)])


@pytest.mark.parametrize("singles", [False, True])
@pytest.mark.parametrize("num_programs", [1, 6, 70, 300, 3000])
def test_every_tile_of_every_item_is_in_one_share(
    singles: bool, num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    query_lens, seq_lens = ([1] * 300 if singles else UNEVEN[0]), UNEVEN[1]
    work = plan(query_lens, seq_lens, triton_device, queries=1 if singles else 4)
    check_plan(work)
    expected = items_of(query_lens, seq_lens, 1 if singles else 4, 300 if singles else 1)
    counts = work.starts.diff()
    assert [item[: NUM_CACHED.value + 2] for item in work.items[counts > 0].tolist()] == expected
    assert counts[counts > 0].tolist() == [-(-(keys + tokens - 1) // 16) for _, tokens, keys, *_ in expected]
    numbers = [item for item, count in enumerate(counts) if count]
    tokens = [tokens for _, tokens, *_ in expected]
    assert work.token_items.tolist() == [item for item, n in zip(numbers, tokens, strict=True) for _ in range(n)]


def test_with_drafts_only_the_tokens_of_the_step_are_not_cached(triton_device: torch.device) -> None:
    work = plan([3, 1, 4], [40, 20, 7], triton_device, drafted=True)
    assert work.items[work.starts.diff() > 0, NUM_CACHED.value].tolist() == [37, 19, 3]


@pytest.mark.parametrize("seq_lens", [[512] * 8, [500, 64, 300, 128, 40, 512], [4000]], ids=str)
def test_few_items_are_cut_so_that_no_program_has_two_pieces(
    seq_lens: list[int], triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: 17)
    work = plan([1] * len(seq_lens), seq_lens, triton_device, queries=1)
    check_plan(work)
    programs = [program for item in programs_by_item(work) for program in item]
    assert len(programs) == len(set(programs))


def test_many_items_of_like_lengths_stay_whole(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: 13)
    work = plan([1] * 25, [250] * 25, triton_device, queries=1)
    assert max(check_plan(work)) == 32
    assert all(len(programs) == 1 for programs in programs_by_item(work))


def test_items_are_cut_evenly_where_whole_ones_would_keep_programs_waiting(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: 16)
    sizes = check_plan(plan([1] * 17, [512] * 17, triton_device, queries=1))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.filterwarnings("error")  # a division by zero
def test_a_step_of_padding_alone_gives_no_program_a_tile(triton_device: torch.device) -> None:
    step = padded(latent_step([1], [5], triton_device), 3)
    step.batch.seq_lens.zero_()
    work = plan_work(step.batch, 4, 4, WorkTiles(16, 16, 16), 4, singles=True)
    assert not work.shares[:, 0].any()


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
