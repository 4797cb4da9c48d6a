"""Whole engines with a tiny model and few blocks: restored blocks give the same tokens as computed ones."""

from __future__ import annotations

import itertools
import multiprocessing.connection
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.core.block_log import pack_names, unpack_names
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.prefix import block_hashes
from baton.kv_transfer.settings import TierSettings

from ....helpers.checkpoints import write_checkpoint
from ....helpers.process_context import FORKING
from .tier_requests import MANY_BLOCKS, Tokens, a_batch
from .tiered_engine import engine

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    with engine(model, None, enable_prefix_caching=False) as alone:
        return alone.run(a_batch())


Where = Callable[[Path], TierSettings]
HOST: Where = lambda folder: TierSettings(host_bytes=8 << 20, min_tokens=16)  # noqa: E731
DISK: Where = lambda folder: TierSettings(disk_path=str(folder), disk_bytes=8 << 20, min_tokens=16)  # noqa: E731
BOTH: Where = lambda folder: TierSettings(  # noqa: E731
    host_bytes=60_000, disk_path=str(folder), disk_bytes=8 << 20, min_tokens=16
)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("where", "overlap"),
    [(HOST, True), (DISK, False), (BOTH, True)],
    ids=["host, two steps", "disk, one step", "both, two steps"],
)
def test_tokens_are_those_of_an_engine_that_computes_everything(
    model: Path, expected: Tokens, tmp_path: Path, where: Where, overlap: bool
) -> None:
    with engine(model, where(tmp_path), async_scheduling=overlap) as tiered:
        for _ in range(3):
            assert tiered.run(a_batch()) == expected
            stats = tiered.quiet()
        assert stats.restored_tokens > 0
        assert stats.hits * 16 == stats.restored_tokens
        assert stats.failures == {}
        assert all(stats.blocks.values()), "every tier must be used"


@pytest.mark.slow
def test_the_next_engine_restores_blocks_of_the_last_one(model: Path, expected: Tokens, tmp_path: Path) -> None:
    # With few blocks, some would be evicted before they are stored.
    with engine(model, DISK(tmp_path), num_gpu_blocks_override=MANY_BLOCKS) as first:
        first.run(a_batch())
        first.quiet()
    with engine(model, DISK(tmp_path)) as second:
        told = second.engine.core.block_log().snapshot()
        assert told.stored == told.host == b""
        prompts = (block_hashes(each.prompt_token_ids, BLOCK_SIZE, each.cache_salt) for each in a_batch())
        prompt_names = {name for hashes in prompts for name in unpack_names(pack_names(hashes))}
        assert prompt_names <= set(unpack_names(told.disk)), "gateways must know the blocks before the first request"
        assert second.run(a_batch()) == expected
        # Which blocks are still on the device when the next request asks for them depends on how fast disks are.
        full_blocks = {each.request_id: len(each.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE for each in a_batch()}
        assert second.num_cached_tokens == full_blocks, "no block of a prompt is computed again"
        stats = second.quiet()
        assert stats.restored_tokens > 0
        assert stats.failures == {}
        assert stats.restore_s.keys() == {"disk"}


@pytest.mark.slow
def test_damaged_blocks_are_computed_again_and_counted(model: Path, expected: Tokens, tmp_path: Path) -> None:
    with engine(model, DISK(tmp_path)) as first:
        first.run(a_batch())
        first.quiet()
    (path,) = tmp_path.glob("*.kv")
    with path.open("r+b") as file:
        for place in range(first.block_bytes // 3, path.stat().st_size, 2 * first.block_bytes):
            file.seek(place)
            file.write(b"\x17\x2a")  # in every second slot
    with engine(model, DISK(tmp_path)) as second:
        assert second.run(a_batch()) == expected
        stats = second.quiet()
        assert stats.failures["corrupt"] > 0
        assert stats.restored_tokens > 0


def _serve_for_ever(pipe: multiprocessing.connection.Connection, model: Path, settings: TierSettings) -> None:
    with engine(model, settings) as it:
        for number in itertools.count():
            it.run(a_batch())
            pipe.send(number)


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_blocks_that_the_next_one_restores(
    model: Path, expected: Tokens, tmp_path: Path
) -> None:
    ours, theirs = FORKING.Pipe()
    small = TierSettings(disk_path=str(tmp_path), disk_bytes=150_000, min_tokens=16)  # slots are overwritten many times
    process = FORKING.Process(target=_serve_for_ever, args=(theirs, model, small), daemon=True)
    process.start()
    theirs.close()
    try:
        for _ in range(2):
            assert ours.poll(60)
            ours.recv()
    finally:
        process.kill()
        process.join(10)
    with engine(model, small) as second:
        assert second.run(a_batch()) == expected
        assert second.quiet().restored_tokens > 0
