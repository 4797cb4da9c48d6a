"""Models of several cache groups with tiers: restored blocks of each group give the same tokens as computed ones."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.kv import restore_cost
from baton.engine.core.layout import BLOCK_SIZE, CHECKPOINT_TOKENS, CacheKind
from baton.engine.core.messages import EngineRequest
from baton.engine.core.prefix import BlockHash
from baton.engine.core.regions import CacheRegion
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.tiers import CopyId, Restored, TierEvent
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.disk_files import TierRefused
from baton.kv_transfer.tiers.store import TierStore

from ....helpers.checkpoints import write_checkpoint
from ....helpers.recall import HYBRID, Questions
from .tier_requests import Tokens
from .tiered_engine import TieredEngine, engine

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(240)]

WINDOW = 40
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": WINDOW},
    "gemma4_text": {"sliding_window": WINDOW},  # window layers have other heads than full ones
    "qwen3_5_text": {},  # gated delta rule, as in Qwen3-Next
}
LENGTH = CHECKPOINT_TOKENS + 9
SIZES = {"max_model_len": LENGTH + 40, "max_num_batched_tokens": 300, "max_num_seqs": 2}
FEW = 48  # blocks of an arena: enough for one sequence and a few more
STEM = random.Random(2).choices(range(3, 250), k=LENGTH)


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, request.param, max_position_embeddings=2048, **VARIANTS[request.param])


def asked(name: str, first: int) -> EngineRequest:
    """Return a request whose prompt shares no prefix with others, as its first token is `first`."""
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[first, *STEM[1:]],
        sampling=SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True),
        seed=first,
    )


PROMPTS = [asked(f"r{first}", first) for first in (3, 4, 5)]
OTHERS = [asked(f"r{first}", first) for first in range(6, 13)]  # enough to evict every state


@pytest.fixture(autouse=True)
def computing_is_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines restore from a disk that takes longer than this small model."""
    monkeypatch.setattr(restore_cost, "MIN_MEASURED_TOKENS", sys.maxsize)


@pytest.fixture(scope="module")
def expected(model: Path) -> Tokens:
    with engine(model, None, enable_prefix_caching=False, **SIZES) as alone:
        return alone.run(PROMPTS)


def host(folder: Path) -> TierSettings:
    return TierSettings(host_bytes=64 << 20, min_tokens=16)


def disk(folder: Path) -> TierSettings:
    return TierSettings(disk_path=str(folder), disk_bytes=64 << 20, min_tokens=16)


def run_one_by_one(tiered: TieredEngine, requests: Sequence[EngineRequest] = PROMPTS) -> Tokens:
    """Run each request after the blocks of the previous one are stored, so that those are evicted from the pool."""
    tokens: Tokens = {}
    for request in requests:
        tokens |= tiered.run([request])
        tiered.quiet()
    return tokens


@pytest.mark.parametrize("where", [host, disk])
def test_restored_blocks_of_all_groups_give_the_same_tokens_as_computed_ones(
    model: Path, expected: Tokens, tmp_path: Path, where: Callable[[Path], TierSettings]
) -> None:
    with engine(model, where(tmp_path), num_gpu_blocks_override=FEW, **SIZES) as tiered:
        full, _ = tiered.engine.region.caches.groups
        assert full.kind is CacheKind.FULL
        for _ in range(2):
            assert run_one_by_one(tiered) == expected
        stats = tiered.quiet()
        assert stats.restored_tokens >= len(PROMPTS) * CHECKPOINT_TOKENS
        assert stats.failures == {}


@pytest.mark.slow
def test_the_next_engine_restores_all_groups_and_computes_damaged_blocks(
    model: Path, expected: Tokens, tmp_path: Path
) -> None:
    with engine(model, disk(tmp_path), **SIZES, num_gpu_blocks_override=FEW) as first:
        run_one_by_one(first)
        layouts = first.engine.region.caches.groups
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == sorted(f"{group.kind}-{group.fingerprint[:12]}" for group in layouts)
    with engine(model, disk(tmp_path), **SIZES, num_gpu_blocks_override=FEW) as second:
        assert run_one_by_one(second) == expected
        assert second.quiet().restored_tokens >= len(PROMPTS) * CHECKPOINT_TOKENS
    (file,) = (tmp_path / f"{layouts[1].kind}-{layouts[1].fingerprint[:12]}").glob("*.kv")
    content = bytearray(file.read_bytes())
    content[:: layouts[1].blocks.block_bytes // 4] = bytes(
        byte ^ 1 for byte in content[:: layouts[1].blocks.block_bytes // 4]
    )
    file.write_bytes(content)
    with engine(model, disk(tmp_path), **SIZES, num_gpu_blocks_override=FEW) as third:
        assert run_one_by_one(third) == expected
        stats = third.quiet()
        assert stats.failures["corrupt"] > 0
        assert stats.restored_tokens == 0, "at no position can all groups be restored"


class SpyStore(TierStore):
    """A store that records which blocks are restored."""

    def __init__(self, region: CacheRegion, *arguments: Any, **named: Any) -> None:
        super().__init__(region, *arguments, **named)
        self.region = region
        self.restored: list[int] = []
        self.spoils = False  # whether to fill the last group's blocks with numbers of about 3 after they are restored

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        self.restored = list(block_ids)
        return super().restore(hashes, block_ids)

    def poll(self) -> list[TierEvent]:
        events = super().poll()
        if self.spoils and any(isinstance(event, Restored) for event in events):
            arena, first = self.region.arenas[-1], self.region.first_blocks[-1]
            for block in self.restored:
                if block >= first:
                    ctypes.memset(arena.address + (block - first) * arena.block_bytes, 0x40, arena.block_bytes)
        return events


@pytest.mark.slow
@pytest.mark.parametrize("spoils", [False, True])
def test_only_blocks_that_are_read_later_are_restored_and_all_of_them_matter(
    model: Path, expected: Tokens, tmp_path: Path, spoils: bool
) -> None:
    sizes = {**SIZES, "num_gpu_blocks_override": FEW}
    with engine(model, host(tmp_path), make_store=SpyStore, **sizes) as tiered:
        run_one_by_one(tiered, [*PROMPTS, *OTHERS])
        store = tiered.store
        assert isinstance(store, SpyStore)
        store.spoils = spoils
        tokens = tiered.run(PROMPTS[:1])
        assert (tokens == {name: expected[name] for name in tokens}) is not spoils
        layout, first = tiered.engine.region.caches.groups[-1], store.region.first_blocks[-1]
        full = [block for block in store.restored if block < first]
        assert len(full) in (LENGTH // BLOCK_SIZE, CHECKPOINT_TOKENS // BLOCK_SIZE)
        most = 1 if layout.window is None else layout.window // BLOCK_SIZE + 1
        assert 1 <= len(store.restored) - len(full) <= most


def test_tiers_without_room_for_a_block_of_each_group_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TierRefused, match=r"kv_tiers\.host_bytes is 1000, .* cache groups \(full, .*give at least"):
        TieredEngine(model, TierSettings(host_bytes=1000), num_gpu_blocks_override=FEW, **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", [host, disk])
def test_the_hybrid_demo_model_recalls_prompts_restored_from_tiers(
    tmp_path: Path, where: Callable[[Path], TierSettings], device: str
) -> None:
    questions = Questions.of(HYBRID, [LENGTH], 5)
    sizes = {**SIZES, "device": device, "dtype": "bfloat16" if device == "cuda" else "float32"}
    with engine(HYBRID, where(tmp_path), **sizes, num_gpu_blocks_override=FEW) as tiered:
        assert questions.share_right(run_one_by_one(tiered, questions.requests)) == 1.0
        again = run_one_by_one(tiered, questions.requests)
        assert questions.share_right(again) == 1.0
        assert tiered.quiet().restored_tokens >= 4 * CHECKPOINT_TOKENS
