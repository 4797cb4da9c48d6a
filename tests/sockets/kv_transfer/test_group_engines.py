"""Prefill by one group of ranks and decode by another, of any sizes, give the tokens of a single engine."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from baton.engine.core.messages import EngineRequest, FinishReason
from baton.engine.core.sampling import SamplingParams
from baton.engine.net.curve import ClusterKey

from ...helpers.checkpoints import write_checkpoint
from .group_engines import GroupEngine

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]

CASES = {
    "divided-heads": ("qwen3", {"num_key_value_heads": 4}, (1, 2, 4)),
    "copied-heads": ("qwen3", {"num_key_value_heads": 2}, (2, 4)),
    "latents": ("deepseek_v2", {}, (1, 2)),
    "windows": ("gpt_oss", {}, (1, 2)),
    "heads-by-window": ("mimo_v2_flash", {"layer_types": ["full_attention", "sliding_attention"]}, (1, 2)),
    "shared": ("gemma4_text", {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1}, (1, 2)),
    "states": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, (1, 2)),
    "states-of-four": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        (1, 2, 4),
    ),
    "states-of-unequal-dims": ("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"]}, (1, 2)),
    "states-of-groups": ("falcon_h1", {"mamba_n_groups": 2}, (1, 2)),
    "states-of-shared-groups": ("falcon_h1", {"mamba_n_groups": 1}, (1, 2)),
    "states-and-latents": ("kimi_linear", {"layer_types": ["linear_attention", "full_attention"]}, (1, 2)),
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
    """Engines of each size, all connected to each other."""
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
    """Run the prompts on one engine and the rest on the other. Return the tokens of both."""
    first = prefill.run([msgspec.structs.replace(request, keep_kv=True) for request in requests])
    begun, moved = [], []
    for request in requests:
        steps = first[request.request_id]
        assert steps[-1].finish_reason is FinishReason.HANDOFF
        begun.append([token for step in steps for token in step.token_ids])
        moved.append(msgspec.structs.replace(request, output_token_ids=begun[-1], kv_source=steps[-1].kv_source))
    return [begin + rest for begin, rest in zip(begun, tokens_of(decode, moved), strict=True)]


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_engines_of_prefill_and_decode(engines: list[GroupEngine]) -> None:
    expected = tokens_of(engines[0], a_batch())
    assert len({tuple(answer) for answer in expected}) == len(expected)  # otherwise the comparison would show nothing
    for prefill, decode in itertools.permutations(engines, 2):
        assert hand_off(prefill, decode, a_batch()) == expected
    for engine in engines:
        stats = engine.stats()
        assert (stats.num_blocks_free, stats.num_blocks_held, stats.num_blocks_quarantined) == (stats.num_blocks, 0, 0)


def hand_off_early(prefill: GroupEngine, decode: GroupEngine, request: EngineRequest) -> tuple[list[int], int]:
    """Let decode fetch each chunk before prefill runs the next. Return tokens, and blocks that came before the last."""
    chunk, blocks_before = ENGINE_ARGS["max_num_batched_tokens"], decode.transfers().blocks_read_early
    prefill.add([msgspec.structs.replace(request, keep_kv=True)])
    (early,) = prefill.step()
    assert early.finish_reason is None
    decode.add([msgspec.structs.replace(request, kv_source=early.kv_source, awaits_first_token=True)])
    steps, num_read = [], chunk  # the first step has run one chunk
    while not steps:
        expected = blocks_before + num_read // 16
        wait_until(lambda: decode.step() == [] and decode.transfers().blocks_read_early >= expected)  # noqa: B023
        steps, num_read = prefill.step(), num_read + chunk
    (last,) = steps
    assert (last.finish_reason, last.kv_source) == (FinishReason.HANDOFF, early.kv_source)
    decode.begin(request.request_id, last.token_ids[0])
    rest: list[int] = []
    while len(rest) < SAMPLING.max_tokens - 1:
        rest += [token for step in decode.step() for token in step.token_ids]
    return [*last.token_ids, *rest], decode.transfers().blocks_read_early - blocks_before


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


@pytest.mark.slow
def test_most_of_a_long_prompt_has_arrived_when_prefill_ends_and_the_tokens_are_the_same(
    engines: list[GroupEngine],
) -> None:
    request = a_batch()[-1]
    (expected,) = tokens_of(engines[0], [request])
    num_chunks = -(-len(request.prompt_token_ids) // ENGINE_ARGS["max_num_batched_tokens"])
    before_the_last = (num_chunks - 1) * ENGINE_ARGS["max_num_batched_tokens"] // 16
    for prefill, decode in itertools.permutations(engines, 2):
        assert hand_off_early(prefill, decode, request) == (expected, before_the_last)
    for engine in engines:
        wait_until(lambda engine=engine: engine.stats().num_blocks_free == engine.stats().num_blocks)
        assert engine.stats().num_blocks_held == engine.stats().num_blocks_quarantined == 0
