"""Models of several cache groups through a prefill and a decode engine draw what one engine draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.layout import BLOCK_SIZE, CHECKPOINT_TOKENS, CacheKind
from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SamplingParams
from baton.engine.startup.build import Engine, build_engine

from ...helpers.checkpoints import write_checkpoint
from ...helpers.paged import random_tokens
from .copy_connector import GrowingRoom, Room
from .handing_off import hand_off, run

pytestmark = pytest.mark.exhaustive

VARIANTS = [
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "kimi_linear",
    "olmo_hybrid",
    "falcon_h1",
    "nemotron_h",
    "granitemoehybrid",
    "bamba",
    "mimo_v2_flash",
    "gemma4_text",
]
LENGTHS = [1, 16, 17, 90, CHECKPOINT_TOKENS - 1, CHECKPOINT_TOKENS, CHECKPOINT_TOKENS + 9, 1030]
SAMPLING = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            target = tmp_path_factory.mktemp("groups") / variant
            made[variant] = write_checkpoint(target, variant, max_position_embeddings=2048)
        return made[variant]

    return folder


def engine_of(folder: Path, room: Room | None = None) -> Engine:
    args = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1100, "max_num_seqs": 8}
    config = EngineConfig.from_args({**args, "model": str(folder), "max_num_batched_tokens": 300})
    return build_engine(config, None if room is None else room.connect)


def requests_of(lengths: list[int]) -> list[EngineRequest]:
    tokens = random_tokens(1030)
    return [
        EngineRequest(request_id=str(number), prompt_token_ids=tokens[-length:], sampling=SAMPLING, seed=number)
        for number, length in enumerate(lengths)
    ]


def alone(core: EngineCore, requests: list[EngineRequest]) -> list[list[int]]:
    steps = run(core, requests)
    return [[token for step in steps[each.request_id] for token in step.token_ids] for each in requests]


@pytest.mark.slow
@pytest.mark.parametrize("make_room", [Room, GrowingRoom], ids=["at the end", "early"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_here_and_decode_there_draws_what_one_engine_draws(
    variant: str, make_room: type[Room], folders: Callable[[str], Path]
) -> None:
    room, folder = make_room(), folders(variant)
    prefill, decode, unified = engine_of(folder, room), engine_of(folder, room), engine_of(folder)
    assert len(prefill.region.caches.groups) == 2
    requests = requests_of(LENGTHS)
    expected = alone(unified.core, requests)
    for _ in range(2):  # the second time some of it is in both caches
        assert hand_off(prefill.core, decode.core, requests) == expected
    for engine in (prefill, decode):
        engine.core.step()  # the prefill engine hears that its blocks were read
        stats = engine.core.stats()
        assert (stats.num_blocks_free, stats.num_blocks_held, stats.num_blocks_quarantined) == (stats.num_blocks, 0, 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_of_windows_and_states_only_what_is_read_later_moves(variant: str, folders: Callable[[str], Path]) -> None:
    room, folder = Room(), folders(variant)
    prefill, decode = engine_of(folder, room), engine_of(folder, room)
    hand_off(prefill.core, decode.core, requests_of([1030]))
    full, other = prefill.region.arenas
    group = prefill.region.caches.groups[1]
    assert group.kind in (CacheKind.WINDOW, CacheKind.STATE)
    moved = room.peers[1].bytes_moved - -(-1030 // BLOCK_SIZE) * full.block_bytes
    most = 1 if group.window is None else -(-group.window // BLOCK_SIZE) + 1
    assert 0 < moved <= most * other.block_bytes
    before = room.peers[1].bytes_moved
    again = msgspec.structs.replace(requests_of([1030])[0], request_id="next turn")
    longer = msgspec.structs.replace(again, prompt_token_ids=[*again.prompt_token_ids, *range(3, 33)])
    hand_off(prefill.core, decode.core, [longer])
    assert room.peers[1].bytes_moved - before <= 3 * full.block_bytes + most * other.block_bytes


def test_a_state_that_was_not_read_shows(folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    room, folder = Room(), folders("qwen3_5_text")
    prefill, decode, unified = engine_of(folder, room), engine_of(folder, room), engine_of(folder)
    requests = requests_of([90, 400])
    monkeypatch.setattr(room.peers[1], "skips", lambda region, block: block >= region.first_blocks[1])
    assert hand_off(prefill.core, decode.core, requests) != alone(unified.core, requests)
