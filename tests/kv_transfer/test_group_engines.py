"""A prompt read by one group of ranks and continued by another, of any size, gives the tokens that one engine gives."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from checkpoints import write_checkpoint
from group_engines import GroupEngine

from baton.engine.core.messages import EngineRequest, FinishReason
from baton.engine.core.sampling import SamplingParams
from baton.kv_transfer.curve import ClusterKey

pytestmark = pytest.mark.timeout(300)

CASES = {
    "divided-heads": ("qwen3", {"num_key_value_heads": 4}, (1, 2, 4)),
    "copied-heads": ("qwen3", {"num_key_value_heads": 2}, (2, 4)),
    "latents": ("deepseek_v2", {}, (1, 2)),
}
ENGINE_ARGS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,  # long prompts run in chunks
    "num_gpu_blocks_override": 64,
    "enable_prefix_caching": False,
}
SAMPLING = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=CASES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GroupEngine]]:
    """One of each size, that all know each other."""
    architecture, changes, sizes = CASES[request.param]
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("model"), architecture, num_hidden_layers=2, **changes)
    key = ClusterKey.generate()
    engines = [GroupEngine(f"of {size}", key, size, {"model": str(folder), **ENGINE_ARGS}) for size in sizes]
    try:
        for engine in engines:
            engine.meet([other.info for other in engines if other is not engine])
        deadline = time.monotonic() + 20
        while any(engine.num_ready() < len(engines) - 1 for engine in engines):
            assert time.monotonic() < deadline, "the engines did not meet"
            time.sleep(0.02)
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def a_batch() -> list[EngineRequest]:
    rng = random.Random(0)
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[rng.randrange(3, 256) for _ in range(length)],
            sampling=SAMPLING,
            seed=number,
        )
        for number, length in enumerate((1, 16, 17, 50, 90, 130))
    ]


def tokens_of(engine: GroupEngine, requests: list[EngineRequest]) -> list[list[int]]:
    outputs = engine.run(requests)
    return [[token for step in outputs[r.request_id] for token in step.token_ids] for r in requests]


def hand_off(prefill: GroupEngine, decode: GroupEngine, requests: list[EngineRequest]) -> list[list[int]]:
    """Runs the prompts on one engine, the rest on the other; the tokens of both."""
    first = prefill.run([msgspec.structs.replace(request, keep_kv=True) for request in requests])
    begun, moved = [], []
    for request in requests:
        steps = first[request.request_id]
        assert steps[-1].finish_reason is FinishReason.HANDOFF
        begun.append([token for step in steps for token in step.token_ids])
        moved.append(msgspec.structs.replace(request, output_token_ids=begun[-1], kv_source=steps[-1].kv_source))
    return [begin + rest for begin, rest in zip(begun, tokens_of(decode, moved), strict=True)]


def test_tokens_do_not_depend_on_who_read_the_prompt_and_who_goes_on(engines: list[GroupEngine]) -> None:
    expected = tokens_of(engines[0], a_batch())
    assert len({tuple(answer) for answer in expected}) == len(expected)  # else the comparison would be blind
    for prefill, decode in itertools.permutations(engines, 2):
        assert hand_off(prefill, decode, a_batch()) == expected
    for engine in engines:
        stats = engine.stats()
        assert (stats.num_blocks_free, stats.num_blocks_held, stats.num_blocks_quarantined) == (64, 0, 0)
