"""An engine of two ranks with tiers, one process per rank, gives the tokens of an engine that computes everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.settings import TierSettings

from ....helpers.checkpoints import write_checkpoint
from ..group_engines import GroupEngine
from .tier_requests import ENGINE_ARGS, FEW_BLOCKS, MANY_BLOCKS, Tokens, a_batch

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(180)]


class Model:
    """The model, and the tokens of one engine without tiers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        alone = self.engine(1, MANY_BLOCKS, None)
        try:
            self.expected = tokens_of(alone)
        finally:
            alone.kill()

    def engine(self, size: int, num_blocks: int, tiers: TierSettings | None) -> GroupEngine:
        arguments = {"model": str(self.folder), "num_gpu_blocks_override": num_blocks, **ENGINE_ARGS}
        return GroupEngine("of tiers", ClusterKey.generate(), size, arguments, tiers=tiers)


def tokens_of(engine: GroupEngine) -> Tokens:
    answers = engine.run(a_batch(12, max_tokens=12))
    return {name: [t for step in steps for t in step.token_ids] for name, steps in answers.items()}


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_checkpoint(tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=2))


def test_tokens_are_those_of_one_engine_also_after_a_restart(model: Model, tmp_path: Path) -> None:
    both = TierSettings(host_bytes=60_000, disk_path=str(tmp_path), disk_bytes=4 << 20, min_tokens=16)
    first = model.engine(2, FEW_BLOCKS, both)
    try:
        for _ in range(2):
            assert tokens_of(first) == model.expected
            stats = first.quiet()
        assert stats.restored_tokens > 0
        assert stats.failures == {}
        assert all(stats.blocks.values()), "every tier must be used"
        in_both = sum(stats.blocks.values())
        first.end()
    finally:
        first.kill()
    second = model.engine(2, FEW_BLOCKS, both)
    try:
        assert second.quiet().blocks["disk"] == in_both, "blocks in memory must be saved at the end"
        assert tokens_of(second) == model.expected
        stats = second.quiet()
        assert stats.restored_tokens > 0
        assert stats.failures == {}
    finally:
        second.kill()


def test_one_ranks_damaged_file_costs_time_and_no_token(model: Model, tmp_path: Path) -> None:
    disk = TierSettings(disk_path=str(tmp_path), disk_bytes=4 << 20, min_tokens=16)
    first = model.engine(2, FEW_BLOCKS, disk)
    try:
        assert tokens_of(first) == model.expected
        first.quiet()
    finally:
        first.kill()  # without an orderly end
    (index,) = [path for path in tmp_path.glob("*.index") if b'"rank": 1,' in path.read_bytes()]
    with index.with_suffix(".kv").open("r+b") as file:
        size = file.seek(0, 2)
        for place in range(700, size, 4000):  # in about every second slot
            file.seek(place)
            file.write(b"\x17\x2a")
    second = model.engine(2, FEW_BLOCKS, disk)
    try:
        assert tokens_of(second) == model.expected
        stats = second.quiet()
        assert stats.failures["corrupt"] > 0
    finally:
        second.kill()
