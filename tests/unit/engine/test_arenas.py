"""The memory for blocks is divided between cache groups so that sequences of any length find room."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.config import EngineConfig, InvalidEngineConfig
from baton.engine.core.layout import BLOCK_SIZE, CacheKind, CacheLayout, LayerCache, LayerState, StatePart
from baton.engine.startup.arenas import (
    LEAST_SLOTS,
    divide_blocks,
    divide_memory,
    longest_sequence,
    needs_of,
)
from baton.engine.startup.kv_size import ENOUGH_FREE_BYTES, MOST_CACHE_BLOCKS, KVSize, check_blocks_fit, size_kv_cache
from baton.engine.startup.memory import CpuMemory, GpuMemory

FULL = LayerCache(kind=CacheKind.FULL, num_kv_heads=8, head_dim=64, dtype="bfloat16")
WINDOW = msgspec.structs.replace(FULL, kind=CacheKind.WINDOW, window=128)
STATE = LayerState((StatePart((8192, 3), "bfloat16"), StatePart((32, 128, 128), "float32")))
WHOLE = 32_768 // BLOCK_SIZE


def layout(*layers: LayerCache | LayerState) -> CacheLayout:
    return CacheLayout.of_layers("m", [(kept,) for kept in layers])


def num_bytes(caches: CacheLayout, blocks: list[int]) -> int:
    return sum(count * group.blocks.block_bytes for count, group in zip(blocks, caches.groups, strict=True))


@given(st.integers(0, 10**11), st.integers(1, 300), st.integers(1, 200_000), st.integers(0, 10**6))
def test_one_group_gets_all_blocks_that_fit_or_that_requests_or_prefixes_may_fill(
    memory: int, max_num_seqs: int, max_model_len: int, cache_blocks: int
) -> None:
    caches = layout(FULL, FULL)
    most = max(max_num_seqs * -(-max_model_len // BLOCK_SIZE), cache_blocks)
    (count,) = divide_memory(caches, memory, max_num_seqs, max_model_len, cache_blocks)
    assert count == min(most, memory // caches.only.blocks.block_bytes)


@given(
    st.integers(0, 10**11), st.integers(1, 300), st.integers(1, 200_000), st.integers(1, 5000), st.integers(0, 10**5)
)
def test_arenas_never_exceed_the_memory_and_hold_one_whole_sequence_where_that_fits(
    memory: int, max_num_seqs: int, max_model_len: int, window: int, cache_blocks: int
) -> None:
    caches = layout(FULL, msgspec.structs.replace(WINDOW, window=window), FULL)
    counts = list(divide_memory(caches, memory, max_num_seqs, max_model_len, cache_blocks))
    whole = -(-max_model_len // BLOCK_SIZE)
    assert num_bytes(caches, counts) <= memory
    if num_bytes(caches, [whole, whole]) <= memory:
        assert min(counts) >= whole
    else:
        assert len(set(counts)) == 1


def test_at_full_load_a_window_takes_little_beside_full_layers() -> None:
    """Half of the layers have a window of 128 tokens, as in gpt-oss: 64 requests of 32k."""
    full, windowed = layout(FULL, WINDOW).groups
    needed = [needs_of(group).at_full_load(64, 32_768) for group in (full, windowed)]
    assert needed[0] == 64 * WHOLE
    assert sum(needed) <= 0.55 * 2 * needed[0]
    assert list(divide_memory(layout(FULL, WINDOW), 1 << 50, 64, 32_768)) == needed


@pytest.mark.parametrize(
    ("layers", "share"),
    [
        ([FULL, *[msgspec.structs.replace(WINDOW, window=1024)] * 5], 0.5),  # as in Gemma 3
        ([FULL, WINDOW], 0.65),  # as in gpt-oss
        ([FULL, STATE, STATE, STATE], 0.5),  # as in Qwen3.5
        ([FULL, STATE, WINDOW], 0.4),
    ],
)
@pytest.mark.parametrize("max_num_seqs", [16, 512])
def test_of_any_length_a_good_part_of_the_sequences_that_would_fit_run_at_once(
    layers: list[LayerCache | LayerState], share: float, max_num_seqs: int
) -> None:
    """Dividing by full load alone left windows so little that an eighth of Gemma's short sequences ran at once."""
    caches, memory = layout(*layers), 4 << 30
    groups = [needs_of(group) for group in caches.groups]
    counts = divide_memory(caches, memory, max_num_seqs, 40_960)
    for length in (64, 500, 1000, 1300, 4000, 10_000, 40_000):
        held = [needs.while_running(length) for needs in groups]
        fitting = min(max_num_seqs, memory // num_bytes(caches, held))
        running = min(count // each for count, each in zip(counts, held, strict=True))
        assert running >= share * fitting - 1, length


def test_a_group_that_holds_all_of_full_load_leaves_the_rest_to_others() -> None:
    caches = layout(FULL, WINDOW)
    full, windowed = (needs_of(group).at_full_load(16, 32_768) for group in caches.groups)
    nearly = num_bytes(caches, [full - 100, windowed])
    counts = list(divide_memory(caches, nearly, 16, 32_768))
    assert counts[1] == windowed
    assert counts[0] == pytest.approx(full - 100, abs=1)


@pytest.mark.parametrize(
    "layers",
    [[FULL], [FULL, WINDOW], [FULL, STATE, STATE, STATE], [FULL, STATE, WINDOW]],
    ids=["full", "windows", "states", "all kinds"],
)
def test_memory_that_full_load_does_not_need_keeps_more_sequences_of_any_length(
    layers: list[LayerCache | LayerState],
) -> None:
    """With 4 sequences a GPU cached no more than what these had, and left the rest of its memory free."""
    caches, memory = layout(*layers), 100 << 30
    loaded, counts = (list(divide_memory(caches, memory, 4, 8192, most)) for most in (0, MOST_CACHE_BLOCKS))
    assert num_bytes(caches, loaded) < 0.1 * memory
    assert num_bytes(caches, counts) > 0.999 * memory or counts == [MOST_CACHE_BLOCKS] * len(counts)
    for length in (500, 2000, 8192):
        kept = [needs_of(group).while_running(length) for group in caches.groups]
        fitting = memory // num_bytes(caches, kept)
        assert min(count // each for count, each in zip(counts, kept, strict=True)) >= min(0.25 * fitting, 512), length


def size_of(memory: CpuMemory | GpuMemory, **args: Any) -> KVSize:
    return size_kv_cache(
        EngineConfig(model="m", **args), memory, layout(FULL), max_num_seqs=4, context_len=args["max_model_len"]
    )


def test_an_engine_that_is_given_memory_caches_prefixes_in_all_of_it_up_to_a_bound() -> None:
    gpu = GpuMemory(total_bytes=100 << 30, used_bytes=4 << 30, step_bytes=1 << 30)
    block_bytes = layout(FULL).only.blocks.block_bytes
    assert MOST_CACHE_BLOCKS * block_bytes < 85 << 30
    assert size_of(gpu, max_model_len=8192).blocks_by_group == [MOST_CACHE_BLOCKS]
    assert size_of(gpu, max_model_len=8192, gpu_memory_utilization=0.1).blocks_by_group == [(5 << 30) // block_bytes]
    cpu = CpuMemory(free_bytes=ENOUGH_FREE_BYTES)
    assert size_of(cpu, max_model_len=8192, kv_cache_memory_bytes=1 << 30).blocks_by_group == [(1 << 30) // block_bytes]


def test_an_engine_with_a_share_of_a_gpu_counts_its_own_memory_alone_but_takes_no_more_than_is_free() -> None:
    block_bytes = layout(FULL).only.blocks.block_bytes

    def blocks(used: int, others: int, share: float = 0.4) -> int:
        memory = GpuMemory(total_bytes=10 << 30, used_bytes=used << 30, others_bytes=others << 30, step_bytes=1 << 30)
        size = size_of(memory, max_model_len=8192, gpu_share=share, gpu_memory_utilization=1.0)
        return sum(size.blocks_by_group)

    assert blocks(1, 0) == blocks(5, 4) == (2 << 30) // block_bytes
    assert blocks(8, 7) == (1 << 30) // block_bytes, "others take more than their shares"
    with pytest.raises(InvalidEngineConfig, match=r"gpu_share.* take 4.3 GB of 4.3, steps 1.1 GB; raise the share"):
        blocks(6, 2)


@pytest.mark.parametrize("setting", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_blocks_of_a_given_size_must_fit_beside_what_steps_take_of_a_gpu(setting: str) -> None:
    memory = GpuMemory(total_bytes=10 << 30, used_bytes=4 << 30, step_bytes=1 << 30)
    caches, unit = layout(FULL), layout(FULL).only.blocks.block_bytes if setting == "num_gpu_blocks_override" else 1

    def check(num_bytes: int) -> None:
        args: dict[str, int] = {setting: num_bytes // unit}
        check_blocks_fit(
            EngineConfig(model="m", **args), caches, size_of(memory, max_model_len=8192, **args), memory.left_bytes
        )

    check(5 << 30)
    with pytest.raises(InvalidEngineConfig, match=r"its KV blocks take 5.9 GB, and 5.4 GB are left") as caught:
        check(11 << 29)
    assert caught.value.field == setting


def test_more_than_full_load_is_taken_for_prefixes_only_and_not_unasked_on_a_cpu() -> None:
    gpu = GpuMemory(total_bytes=100 << 30, used_bytes=4 << 30, step_bytes=1 << 30)
    full_load = [4 * 8192 // BLOCK_SIZE]
    assert size_of(gpu, max_model_len=8192, enable_prefix_caching=False).blocks_by_group == full_load
    assert size_of(CpuMemory(free_bytes=ENOUGH_FREE_BYTES), max_model_len=8192).blocks_by_group == full_load
    assert size_of(gpu, max_model_len=32 << 20).blocks_by_group[0] > MOST_CACHE_BLOCKS, "full load comes first"


def test_requests_of_a_size_that_fit_at_once() -> None:
    full, windowed = layout(FULL, WINDOW).groups
    assert needs_of(full).requests_at_once(10 * WHOLE + 1, 32_768) == 10
    assert needs_of(windowed).requests_at_once(WHOLE - 1, 32_768) == 0
    assert needs_of(windowed).requests_at_once(WHOLE + 22, 32_768) == 3, (
        "one that is read, and two that hold 11 blocks each"
    )


@given(st.integers(0, 10**11), st.integers(1, 300), st.integers(1, 200_000))
def test_slots_of_states_never_exceed_the_memory_and_every_engine_has_a_few(
    memory: int, max_num_seqs: int, max_model_len: int
) -> None:
    caches = layout(STATE, STATE, FULL)
    blocks, slots = counts = list(divide_memory(caches, memory, max_num_seqs, max_model_len))
    assert slots >= LEAST_SLOTS
    assert blocks <= needs_of(caches.groups[0]).at_full_load(max_num_seqs, max_model_len)
    longest = longest_sequence(caches, counts)
    assert longest == blocks * BLOCK_SIZE
    assert num_bytes(caches, counts) <= memory or longest == 0


def test_at_full_load_each_sequence_has_two_slots_and_one_for_each_stretch_of_it() -> None:
    """Three of four layers have states, as in Qwen3.5: at 32k tokens they take a fraction of the keys and values."""
    caches = layout(*[STATE, STATE, STATE, FULL] * 8)
    blocks, slots = divide_memory(caches, 1 << 50, 64, 32_768)
    assert (blocks, slots) == (64 * WHOLE, LEAST_SLOTS + 64 * (2 + 8))
    assert needs_of(caches.groups[1]).requests_at_once(slots, 32_768) >= 64
    assert list(divide_blocks(caches, 10**6, 64, 32_768)) == [10**6, slots]


def test_the_blocks_that_a_refusal_asks_for_are_enough_for_states() -> None:
    def size(num_blocks: int) -> KVSize:
        config = EngineConfig(model="m", num_gpu_blocks_override=num_blocks, max_model_len=31)
        return size_kv_cache(config, CpuMemory(free_bytes=0), layout(FULL, STATE), max_num_seqs=4, context_len=31)

    with pytest.raises(InvalidEngineConfig, match=f"2 blocks hold 0 tokens, .* give at least {LEAST_SLOTS} blocks"):
        size(2)
    assert size(LEAST_SLOTS) == KVSize(31, [LEAST_SLOTS, LEAST_SLOTS])


def test_without_slots_there_is_no_sequence() -> None:
    assert longest_sequence(layout(FULL, STATE), [100, LEAST_SLOTS - 1]) == 0
