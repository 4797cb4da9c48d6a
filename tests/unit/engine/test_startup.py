"""Start-up turns arguments into a ready engine: its memory, the longest sequences, and the facts that others learn."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import EngineConfig, InvalidEngineConfig, build_engine
from baton.engine.core.regions import CacheRegion
from baton.engine.startup import cpu
from baton.engine.startup.build import Engine
from baton.engine.startup.memory import available_memory_bytes

BLOCK_BYTES = 3 * 2 * 16 * 2 * 32 * 4  # layers, K and V, tokens, kv heads, head_dim, float32


@pytest.fixture
def build(checkpoint: Path) -> Any:
    def make(**args: Any) -> Engine:
        return build_engine(EngineConfig.from_args({"model": str(checkpoint), "dtype": "float32", **args}))

    return make


def test_the_region_says_where_the_blocks_are_and_what_they_look_like(checkpoint: Path) -> None:
    seen: list[CacheRegion] = []
    config = EngineConfig.from_args({"model": str(checkpoint), "dtype": "float32", "num_gpu_blocks_override": 40})
    engine = build_engine(config, connect=seen.append)  # type: ignore[arg-type,func-returns-value]
    assert seen == [engine.region]
    assert engine.region.num_blocks == engine.core.config.num_blocks == 40
    assert engine.region.address % 4096 == 0
    assert "p" in permissions_at(engine.region.address), "shared memory is given no huge pages"
    assert engine.region.caches.only.blocks.block_bytes == BLOCK_BYTES


def permissions_at(address: int) -> str:
    """Return the permissions of the mapping in this process that an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        begin, end = (int(border, 16) for border in span.split("-"))
        if begin <= address < end:
            return permissions
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_an_argument_without_effect_is_said_to_be_ignored(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    build(num_gpu_blocks_override=4)
    assert "ignored" not in caplog.text
    build(num_gpu_blocks_override=4, gpu_memory_utilization=0.5)
    assert "gpu_memory_utilization is ignored: a CPU engine" in caplog.text
    build(num_gpu_blocks_override=4, kv_cache_memory_bytes=50 * BLOCK_BYTES)
    assert "kv_cache_memory_bytes is ignored: num_gpu_blocks_override" in caplog.text


@pytest.mark.parametrize("setting", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_a_share_of_a_gpu_is_ignored_beside_a_size(setting: str) -> None:
    config = EngineConfig(model="folder", gpu_memory_utilization=0.5)
    assert config.ignored_on("cuda") == {}
    sized = config.model_copy(update={setting: 10**9})
    assert sized.ignored_on("cuda") == {"gpu_memory_utilization": f"the KV cache is sized by {setting}"}
    share = EngineConfig(model="folder", gpu_share=0.5, **{setting: 10})
    assert share.ignored_on("cuda") == {"gpu_share": f"the KV cache is sized by {setting}"}


@pytest.mark.parametrize("args", [{"num_gpu_blocks_override": 10**8}, {"kv_cache_memory_bytes": 10**15}])
def test_blocks_for_which_there_is_no_memory_are_refused_by_name(build: Any, args: dict[str, int]) -> None:
    with pytest.raises(InvalidEngineConfig, match=r"its KV blocks take .* GB are left for them: give less") as caught:
        build(max_num_seqs=1 << 16, max_num_batched_tokens=1 << 16, **args)
    assert [caught.value.field] == [*args]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name(build: Any) -> None:
    with pytest.raises(InvalidEngineConfig, match="finds no CUDA device") as caught:
        build(device="cuda")
    assert caught.value.field == "device"


def test_equal_weights_have_equal_fingerprints_and_others_do_not(build: Any) -> None:
    same, other, seeded = (
        build(num_gpu_blocks_override=4, **args).region.caches.fingerprint
        for args in ({}, {"load_format": "dummy"}, {"load_format": "dummy", "seed": 1})
    )
    assert same == build(num_gpu_blocks_override=9, max_num_seqs=2).region.caches.fingerprint
    assert len({same, other, seeded}) == 3


def test_blocks_come_from_the_bytes_given(build: Any) -> None:
    assert build(kv_cache_memory_bytes=50 * BLOCK_BYTES + 1, max_model_len=160).core.config.num_blocks == 50


def test_blocks_that_no_row_could_fill_cache_prefixes_unless_there_are_none(build: Any) -> None:
    few: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 100, "kv_cache_memory_bytes": 100 * BLOCK_BYTES}
    assert build(**few).core.config.num_blocks == 100
    assert build(**few, enable_prefix_caching=False).core.config.num_blocks == 3 * 7
    assert build(max_num_seqs=3, max_model_len=100).core.config.num_blocks == 3 * 7, "nobody gave it more memory"


def test_a_share_of_free_memory_serves_where_nobody_says(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 400 * BLOCK_BYTES)
    assert build().core.config.num_blocks == 100


def test_little_memory_shortens_sequences_unless_their_length_was_asked_for(build: Any) -> None:
    short = build(kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert (short.core.config.max_model_len, short.core.config.num_blocks) == (80, 5)
    with pytest.raises(InvalidEngineConfig, match=f"give at least {7 * BLOCK_BYTES} bytes") as caught:
        build(kv_cache_memory_bytes=5 * BLOCK_BYTES, max_model_len=100)
    assert caught.value.field == "kv_cache_memory_bytes"
    fewer = build(num_gpu_blocks_override=5)
    assert fewer.core.config.max_model_len == 80, "what an engine says of itself is what it can serve"
    with pytest.raises(InvalidEngineConfig, match=r"5 blocks hold 80 tokens, .* give at least 7 blocks") as caught:
        build(num_gpu_blocks_override=5, max_model_len=100)
    assert caught.value.field == "num_gpu_blocks_override"
    with pytest.raises(InvalidEngineConfig, match="hold 0 tokens"):
        build(kv_cache_memory_bytes=100)


def test_start_up_is_measured_by_phase_and_leaves_the_books_clean(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="baton.engine.startup.build"):
        engine = build(num_gpu_blocks_override=4)
    ready = next(record for record in caplog.records if "is ready in" in record.getMessage())
    assert ready.startup_s is engine.startup_s  # type: ignore[attr-defined]
    assert f"weights {engine.startup_s['weights']:.2f}" in ready.getMessage()
    assert list(engine.startup_s) == [
        "config",
        "imports",
        "join",
        "kernels",
        "weights",
        "kv_cache",
        "connect",
        "warm_up",
    ]
    assert all(seconds >= 0 for seconds in engine.startup_s.values())
    stats = engine.core.stats()
    assert (stats.num_blocks_free, stats.num_steps, stats.num_requests_running) == (4, 0, 0)


def test_the_garbage_collector_looks_through_nothing_that_start_up_left_until_the_engine_ends(build: Any) -> None:
    gc.unfreeze()  # as in a process that runs no tests
    try:
        engine = build(num_gpu_blocks_override=4)
        assert gc.get_freeze_count() > 100 * len(gc.get_objects())
        engine.close()
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_what_somebody_else_kept_from_the_garbage_collector_stays_so(build: Any) -> None:
    kept: list[object] = []
    gc.freeze()
    before = gc.get_freeze_count()
    build(num_gpu_blocks_override=4).close()
    assert all(each is not kept for each in gc.get_objects())
    assert 0 < gc.get_freeze_count() <= before, "others of those that were frozen may have ended meanwhile"


def test_an_engine_of_a_single_block_warms_up(build: Any) -> None:
    assert build(num_gpu_blocks_override=1, max_model_len=2).core.config.num_blocks == 1


def test_free_memory_is_the_smaller_of_the_machines_and_the_control_groups() -> None:
    machine = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < available_memory_bytes() <= int(machine.split()[1]) * 1024


@pytest.mark.parametrize(
    ("args", "wrong"),
    [({}, "kv_cache_memory_bytes: 0 bytes hold"), ({"device": "cuda"}, "device: is 'cuda'")],
)
def test_processes_that_compile_are_gone_when_the_start_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], wrong: str
) -> None:
    class Compiler:
        closed = False

        def close(self) -> None:
            self.closed = True

    compiler = Compiler()
    monkeypatch.setattr("baton.engine.startup.build.start_compiler", lambda: compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: 0)
    with pytest.raises(InvalidEngineConfig, match=wrong):
        build_engine(EngineConfig.from_args({"model": str(checkpoint), "max_model_len": 64, **args}))
    assert compiler.closed
