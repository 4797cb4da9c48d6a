"""Latent attention in Triton against the definition; interpreted where there is no GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.mla import AttentionBatch, reference

from ...helpers.aot import compile_for_h200
from .kernel_checks import without_poison
from .mla_cases import BLOCK_SIZE, DEEPSEEK_V2_LITE, LAYER, SCALE, SMALL, LatentStep, Shape, latent_step, padded

pytest.importorskip("triton")

from baton.kernels.mla import gpu
from baton.kernels.mla.gpu import absorbed, absorbed_hopper, dense, expanded, latent_cache
from baton.kernels.mla.gpu.work_list import WorkTiles, deal

pytestmark = pytest.mark.exhaustive

RAGGED = [37, 1, 16, 70, 17, 32]
MIXED = ([1, 1, 5, 40], [50, 33, 60, 40])


# WorkTiles of 16 keys, so that short sequences have many.
prepare = functools.partial(gpu.prepare, tile=16)


# ---- absorbed -------------------------------------------------------------------------------------------------------


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


def test_chunks_of_any_lengths_and_decodes_among_them(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device)
    step.check(step.attend(prepare, gpu.mla_attention))


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


def test_half_precision_sums_in_float32(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device, dtype=torch.float16)
    step.check(step.attend(prepare, gpu.mla_attention))


def test_queries_may_be_a_view_into_a_fused_projection(triton_device: torch.device) -> None:
    step = latent_step(*MIXED, triton_device)
    fused = torch.cat([step.q.flatten(1), torch.full((len(step.q), 9), float("nan"), device=triton_device)], dim=1)
    step = dataclasses.replace(step, q=fused[:, :-9].unflatten(1, step.q.shape[1:]))
    step.check(step.attend(prepare, gpu.mla_attention))


# ---- the deal -------------------------------------------------------------------------------------------------------


def items_of(query_lens: Sequence[int], seq_lens: Sequence[int], singles: bool, queries: int) -> list[list[int]]:
    """[first token, how many, keys that the first sees, table row] of every item, counted on the host."""
    first_tokens = itertools.accumulate(query_lens, initial=0)
    return [
        [token + query, min(queries, length - query), seq_len - length + query + 1, seq]
        for seq, (token, length, seq_len) in enumerate(zip(first_tokens, query_lens, seq_lens, strict=False))
        if (length == 1) == singles
        for query in range(0, length, queries)
    ]


@pytest.mark.parametrize("singles", [False, True])
@pytest.mark.parametrize("num_programs", [6, 300])
def test_every_tile_is_dealt_once_and_shares_differ_by_one_at_most(
    singles: bool, num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    generator = torch.Generator().manual_seed(0)
    query_lens = torch.randint(1, 9, (300,), generator=generator).tolist()
    seq_lens = [length + extra for length, extra in zip(query_lens, range(300), strict=True)]
    batch = latent_step(query_lens, seq_lens, triton_device).batch
    tiles = WorkTiles(16, 16 if singles else 4, 16)
    work = deal(batch, 300, tiles, 4, singles=singles)
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
def test_no_part_has_arrived_of_any_group_of_heads(
    num_programs: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    batch = latent_step([1, 1], [40, 20], triton_device).batch
    work = deal(batch, 2, WorkTiles(16, 16, 16), num_heads=33, singles=True)
    assert work.arrivals.tolist() == [[0] * (num_programs // 3)] * 3


# ---- expanded -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("slack", [0, 100])
def test_long_prompts_are_spelt_out_beside_decodes(
    slack: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "LEAST_QUERIES", 16)
    lengths = ([1, 1, 150, 40, 70], [50, 33, 200, 40, 130])
    step = latent_step(*lengths, triton_device, num_kv_tokens=sum(lengths[1][2:]) + slack)
    batch = prepare(step.batch, num_heads=4, head_dim=48)
    assert batch.prepared.prompts is not None
    assert batch.prepared.num_absorbed_tokens == 2
    step.check(gpu.mla_attention(step.q, step.kv, LAYER, batch, step.up, scale=SCALE))


def test_chunks_too_short_or_contexts_too_long_to_spell_out_stay_absorbed(triton_device: torch.device) -> None:
    batch = latent_step([1, 130, 130], [5, 200, 130], triton_device, num_kv_tokens=330).batch
    assert expanded.pays_to_expand(batch)
    assert not expanded.pays_to_expand(dataclasses.replace(batch, num_kv_tokens=None))
    assert not expanded.pays_to_expand(dataclasses.replace(batch, num_kv_tokens=1 << 20))
    short = latent_step([1, 130, 100], [5, 200, 130], triton_device, num_kv_tokens=330).batch
    assert not expanded.pays_to_expand(short)


# ---- the write into the cache ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Write:
    """What one layer projects for the tokens of a step, and where its angles are."""

    step: LatentStep
    compressed: Tensor
    norm: Tensor
    cos_sin: Tensor

    def run(self, op: Callable[..., None], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rotated queries and the cache, in `dtype`."""
        q, kv = self.step.q.to(dtype, copy=True), self.step.kv.to(dtype, copy=True)
        q_rope = q[..., self.step.up.nope_dim :]
        norm, compressed = self.norm.to(dtype), self.compressed.to(dtype)
        op(q_rope, compressed, norm, self.cos_sin, kv, LAYER, self.step.batch, eps=1e-6)
        return q, kv


def write(device: torch.device, dtype: torch.dtype, shape: Shape = SMALL, first_block: int = 0) -> Write:
    step = padded(latent_step([1, 3, 20], [34, 19, 20], device, shape=shape, dtype=dtype, first_block=first_block), 4)
    projected = torch.randn(step.batch.num_tokens, shape.rank + shape.rope + 16, device=device).to(dtype)
    angles = torch.randn(64, shape.rope // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    norm = torch.randn(shape.rank, device=device).to(dtype)
    return Write(step, projected[:, : shape.rank + shape.rope], norm, cos_sin)


def check_write(inputs: Write) -> None:
    dtype = inputs.step.q.dtype
    tolerance = 4 * torch.finfo(dtype).eps
    results, exact = inputs.run(gpu.latent_and_cache, dtype), inputs.run(reference.latent_and_cache, torch.float64)
    for result, expected in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_latents_are_normed_and_cached_and_what_carries_positions_is_rotated(
    dtype: torch.dtype, triton_device: torch.device
) -> None:
    check_write(write(triton_device, dtype))


@pytest.mark.parametrize("num_heads", [1, 5])
def test_any_number_of_query_heads_is_rotated(num_heads: int, triton_device: torch.device) -> None:
    check_write(write(triton_device, torch.float32, dataclasses.replace(SMALL, num_heads=num_heads)))


# ---- what the compiler makes of it ----------------------------------------------------------------------------------

SIZES = {"RANK": 512, "ROPE": 64, "PAGE": 16}
NUMBERS = dict.fromkeys(("items_ptr", "starts_ptr", "shares_ptr", "tables_ptr", "key_start_ptr"), "*i32") | {
    "parts_ptr": "*fp32",
    "softmax_ptr": "*fp32",
    "scale": "fp32",
}


def signature(kernel: Any, constexprs: dict[str, object], **others: str) -> dict[str, str]:
    """Types of a kernel's arguments by their names: tensors are bfloat16 unless `NUMBERS` knows better."""
    names = [name for name in kernel.arg_names if name not in constexprs]
    known = {**NUMBERS, **others}
    plain = {name: "*bf16" if name.endswith("_ptr") else "i32:16" if "stride" in name else "i32" for name in names}
    return {name: known.get(name, plain[name]) for name in names}


def test_latents_and_rotated_pairs_are_read_and_written_side_by_side() -> None:
    constexprs = {**SIZES, "HEADS": 16}
    types = dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64")
    types |= {"cos_sin_ptr": "*fp32", "layer_offset": "i32:16", "block_stride": "i32:16", "eps": "fp32"}
    kernel = latent_cache.latent_and_cache_kernel
    compiled = compile_for_h200(kernel, signature(kernel, constexprs, **types), constexprs, num_warps=4)
    assert compiled.widest_load_bytes == 16
    narrow = re.findall(r"(?:ld|st)\.global[\w.:]*\.b16 ", compiled.ptx)
    assert narrow == ["st.global.b16 "]  # the key part, which has fewer values than there are threads


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_stages"), [(16, 3), (64, 2)])
def test_pages_are_read_16_bytes_at_a_time_and_ahead_of_their_use(rows: int, num_stages: int) -> None:
    constexprs = {**SIZES, "ROWS": rows, "HEADS": 16, "TILE": 64}
    compiled = compile_for_h200(
        absorbed.latent_attention_kernel,
        signature(absorbed.latent_attention_kernel, constexprs, layer_offset="i32:16"),
        constexprs,
        num_warps=8,
        num_stages=num_stages,
        max_spill_bytes=700,  # addresses that are needed once an item
    )
    assert compiled.widest_load_bytes == 16
    assert "cp.async" in compiled.ptx


def test_long_prompts_run_on_warp_groups_with_tiles_fetched_by_the_copy_engine() -> None:
    constexprs = {"NOPE": 128, "ROPE": 64, "VALUE": 128, "QUERIES": 128, "KEYS": dense.KEYS}
    boxes = {
        "q_nope_boxes": (128, 128),
        "q_rope_boxes": (128, 64),
        "k_nope_boxes": (dense.KEYS, 128),
        "value_boxes": (dense.KEYS, 128),
        "k_rope_boxes": (dense.KEYS, 64),
    }
    types = {name: f"tensordesc<bf16[{rows}, {columns}]>" for name, (rows, columns) in boxes.items()}
    compiled = compile_for_h200(
        dense.dense_attention_kernel,
        signature(dense.dense_attention_kernel, constexprs, **types),
        constexprs,
        **dense.OPTIONS,
    )
    assert compiled.wgmma
    assert "cp.async.bulk.tensor" in compiled.ptx


BOXES = "swizzle_byte_width=128, element_bitwidth=16, rank={}, transposed=False, fp4_padded=False, cga_layout=[]"


def boxes(*shape: int) -> str:
    """The type of a tensor that the copy engine reads in boxes of this shape, for Gluon."""
    return f"tensordesc<bf16[{','.join(map(str, shape))}],NVMMASharedLayout({BOXES.format(len(shape))})>"


HOPPER_SIGNATURE = {
    "out": "*bf16",
    **dict.fromkeys(("sums", "softmax"), "*fp32"),
    **dict.fromkeys(("arrivals", "items", "starts", "shares", "block_tables"), "*i32"),
    "slots": "*i64",
    "scale": "fp32",
    **dict.fromkeys(("layer", "num_layers", "num_heads", "num_padded_tokens", "max_items", "num_decodes"), "i32"),
    "table_stride": "i32:16",
    "pages": boxes(16, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("rows", "max_spill_bytes"), [(16, 0), (32, 208)])
def test_on_hopper_the_copy_engine_fetches_and_a_program_leaves_registers_to_others(
    rows: int, max_spill_bytes: int, apart: bool
) -> None:
    constexprs = {"ROWS": rows, "RANK": 512, "PAGE": 16, "APART": apart}
    types = HOPPER_SIGNATURE | dict.fromkeys(("q_latents", "q_ropes"), boxes(1, rows, 64))
    options = {"num_warps": 4, "maxnreg": absorbed_hopper.REGISTERS, "max_spill_bytes": max_spill_bytes}
    compiled = compile_for_h200(absorbed_hopper.attend_share, types, constexprs, **options)
    assert compiled.wgmma
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx
    assert compiled.registers * 256 <= 0.6 * 65536


# ---- on the device --------------------------------------------------------------------------------------------------

LENGTHS = {
    "decodes": ([1] * 9, [5000, 1, 16, 333, 64, 65, 2048, 700, 9000], None),
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


FEW = [5000, 1, 700]  # whose parts are added by a kernel of its own
MANY = LENGTHS["decodes"][1]  # ... by the program that comes last
UNEVEN = random.Random(1).choices(range(1, 1000), k=150)


def on_hopper(query_lens: Sequence[int], seq_lens: Sequence[int], num_heads: int = 16) -> LatentStep:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    shape = dataclasses.replace(DEEPSEEK_V2_LITE, num_heads=num_heads)
    return latent_step(query_lens, seq_lens, torch.device("cuda"), shape=shape, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_programs", [1, 2, 5, 20, 132])
@pytest.mark.parametrize("seq_lens", [[9000], FEW, MANY, UNEVEN], ids=["one", "few", "many", "uneven"])
def test_parts_are_added_up_however_many_there_are(
    seq_lens: list[int], num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kernels.mla.gpu.work_list.multiprocessors", lambda device: num_programs)
    step = padded(on_hopper([1] * len(seq_lens), seq_lens), 4)
    result = step.attend(gpu.prepare, gpu.mla_attention)
    step.check(result)
    assert not result[-4:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [5, 16, 40, 128])
@pytest.mark.parametrize("seq_lens", [FEW, MANY, UNEVEN], ids=["few", "many", "uneven"])
def test_every_layer_and_every_time_gives_the_same(seq_lens: list[int], num_heads: int) -> None:
    step = on_hopper([1] * len(seq_lens), seq_lens, num_heads)
    batch = gpu.prepare(step.batch, num_heads=num_heads, head_dim=step.q.shape[2])
    results = [gpu.mla_attention(step.q, step.kv, LAYER, batch, step.up, scale=SCALE) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)
    (part,) = batch.prepared.absorbed
    assert not part.work.arrivals.any()


def tokens_of(step: LatentStep) -> Write:
    """Their latents, to be written by `latent_and_cache`; positions turn nothing."""
    compressed = torch.randn(len(step.q), step.kv.shape[5], device="cuda").bfloat16()
    angles = torch.zeros(10000, DEEPSEEK_V2_LITE.rope // 2, device="cuda")
    norm = torch.ones(step.up.rank, dtype=torch.bfloat16, device="cuda")
    return Write(step, compressed, norm, torch.cat([angles.cos(), angles.sin()], dim=1))


def check_step_by_step(tokens: Write) -> None:
    """Each time with other latents, right behind each other: what is read too early is of the time before."""
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
@pytest.mark.parametrize("count", [8, 64])
def test_the_newest_latent_counts_though_it_is_written_right_before(count: int) -> None:
    """Pages are fetched before the kernels ahead have ended, but not those that these write."""
    check_step_by_step(tokens_of(on_hopper([1] * count, [200 + 3 * index for index in range(count)])))


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
def test_a_captured_graph_serves_lengths_that_came_after_it() -> None:
    device = torch.device("cuda")
    query_lens, seq_lens, _ = LENGTHS["chunks"]
    step = padded(latent_step(query_lens, seq_lens, device, shape=DEEPSEEK_V2_LITE, dtype=torch.bfloat16), 30)
    step = dataclasses.replace(step, kv=step.kv.nan_to_num(0.5))
    step.attend(gpu.prepare, gpu.mla_attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step.attend(gpu.prepare, gpu.mla_attention)
    # A sequence is no shorter than its queries are many. Only padding, which has none, is of length 0.
    for lengths in (seq_lens, [1, 30, 1000, 130, 70], [900, 1, 7, 131, 64]):
        step.batch.seq_lens[: len(lengths)] = torch.tensor(lengths, device=device)
        graph.replay()
        assert torch.equal(result, step.attend(gpu.prepare, gpu.mla_attention))
