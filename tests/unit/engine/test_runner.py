"""The runner executes plans. These are hand-made, without a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.core.layout import BLOCK_SIZE, CacheKind, CacheLayout, GroupLayout, KVLayout
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.step import Chunk, ChunkResult, RowStart, StepPlan
from baton.engine.models import load_config, load_model
from baton.engine.startup.kv_cache import region_of
from baton.engine.worker import outputs
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.batch import Batch
from baton.engine.worker.inputs import StepInputs
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits
from baton.engine.worker.tables import CacheArenas
from baton.kernels.attention import AttentionBatch

from ...helpers.kv_memory import allocate_kv

PROMPT = [(37 * i) % 251 + 3 for i in range(50)]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def make_runner(checkpoint: Path) -> Callable[[], ModelRunner]:
    """Make a runner of four rows and 32 blocks, which start as NaN, so that reading an unwritten one shows."""
    config = load_config(checkpoint, dtype="float32")
    model = load_model(config)

    def make() -> ModelRunner:
        layout = KVLayout(
            model="tiny",
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="float32",
        )
        kv = allocate_kv(layout, 32).fill_(float("nan"))
        limits = StepLimits(4, 128, config.max_model_len)
        return ModelRunner(model, CacheArenas([kv]), CpuBackend(CpuShapes(limits)), limits, config.vocab_size)

    return make


def row_start(
    row: int, prompt: list[int], blocks: list[int], sampling: SamplingParams = GREEDY, num_computed: int = 0
) -> RowStart:
    name = f"request-{row}"
    return RowStart(row, name, prompt, [], sampling, 5, [2], block_tables=[blocks], num_computed=num_computed)


def step(
    runner: ModelRunner, *chunks: Chunk, started: tuple[RowStart, ...] = (), freed: list[int] | None = None
) -> list[ChunkResult]:
    return runner.launch(StepPlan(0, freed or [], list(started), list(chunks))).result().chunks


def greedy_tokens(runner: ModelRunner, row: int, blocks: list[int], chunk_len: int, count: int = 8) -> list[int]:
    """Prefill PROMPT in chunks, then decode, with the blocks in the given order."""
    started = (row_start(row, PROMPT, []),)
    tokens: list[int] = []
    computed, held = 0, 0
    while len(tokens) < count:
        length = min(chunk_len, len(PROMPT) - computed) if computed < len(PROMPT) else 1
        needed = -(-(computed + length) // BLOCK_SIZE)
        samples = computed + length >= len(PROMPT)
        (result,) = step(runner, Chunk(row, computed, length, samples, [blocks[held:needed]]), started=started)
        started, held, computed = (), needed, computed + length
        assert len(result.token_ids) == samples
        tokens += result.token_ids
    return tokens


@pytest.mark.parametrize("chunk_len", [1, 7, 16, 33])
def test_chunks_and_scattered_blocks_give_what_a_whole_prompt_in_fresh_blocks_gives(
    make_runner: Callable[[], ModelRunner], chunk_len: int
) -> None:
    whole = greedy_tokens(make_runner(), row=0, blocks=[0, 1, 2, 3], chunk_len=len(PROMPT))
    assert greedy_tokens(make_runner(), row=3, blocks=[31, 2, 17, 5], chunk_len=chunk_len) == whole


def test_a_row_that_is_taken_again_remembers_nothing(make_runner: Callable[[], ModelRunner]) -> None:
    fresh, used = make_runner(), make_runner()
    biased = SamplingParams(temperature=2.0, logit_bias={9: 100.0}, logprobs=4, prompt_logprobs=1, max_tokens=None)
    prompt = list(reversed(PROMPT)) + PROMPT
    (result,) = step(used, Chunk(1, 0, 100, True, []), started=(row_start(1, prompt, list(range(8, 15)), biased),))
    assert result.token_ids == [9]
    assert result.logprobs is not None
    again = row_start(1, PROMPT, [4, 5, 6, 7])
    (second,) = step(used, Chunk(1, 0, len(PROMPT), True, []), started=(again,), freed=[1])
    (expected,) = step(fresh, Chunk(1, 0, len(PROMPT), True, []), started=(again,))
    assert second == expected
    assert second.logprobs is None


def test_a_step_mixes_decodes_and_chunks_and_answers_in_the_order_of_the_plan(
    make_runner: Callable[[], ModelRunner],
) -> None:
    apart = make_runner()
    (first,) = step(apart, Chunk(0, 0, 20, True, []), started=(row_start(0, PROMPT[:20], [0, 1]),))
    (decoded,) = step(apart, Chunk(0, 20, 1, True, []))
    (other,) = step(apart, Chunk(2, 0, 50, True, []), started=(row_start(2, PROMPT, [2, 3, 4, 5]),))

    mixed = make_runner()
    assert step(mixed, Chunk(0, 0, 20, True, []), started=(row_start(0, PROMPT[:20], [0, 1]),)) == [first]
    started = (row_start(2, PROMPT, [2, 3, 4, 5]), row_start(3, PROMPT, [6, 7, 8, 9]))
    results = step(
        mixed, Chunk(0, 20, 1, True, []), Chunk(3, 0, 30, False, []), Chunk(2, 0, 50, True, []), started=started
    )
    assert results == [decoded, ChunkResult([]), other]


def test_single_tokens_are_drawn_from_behind_a_prompt_that_begins_with_one(
    make_runner: Callable[[], ModelRunner],
) -> None:
    """A prompt's first token draws nothing, though every chunk of its step is as long as a decode."""
    apart = make_runner()
    started = (row_start(0, PROMPT[:20], [0, 1]), row_start(1, PROMPT[:34], [2, 3, 4]))
    prompts = (Chunk(0, 0, 20, True, []), Chunk(1, 0, 33, False, []))
    expected = step(apart, *prompts, started=started)
    (decoded,) = step(apart, Chunk(0, 20, 1, True, []))
    (first,) = step(apart, Chunk(1, 33, 1, True, []))

    mixed = make_runner()
    assert step(mixed, *prompts, started=started) == expected
    singles = (Chunk(2, 0, 1, False, []), Chunk(0, 20, 1, True, []), Chunk(1, 33, 1, True, []))
    assert step(mixed, *singles, started=(row_start(2, PROMPT, [5, 6, 7, 8]),)) == [ChunkResult([]), decoded, first]


def test_a_step_without_chunks_only_updates_rows(make_runner: Callable[[], ModelRunner]) -> None:
    assert step(make_runner(), started=(row_start(0, PROMPT, [0]),), freed=[1, 2]) == []


def test_logits_are_computed_for_chunks_that_sample_and_for_nothing_else(
    make_runner: Callable[[], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    rows: list[int] = []
    whole = runner.model.logits
    monkeypatch.setattr(runner.model, "logits", lambda hidden: rows.append(len(hidden)) or whole(hidden))
    started = (row_start(0, PROMPT, [0, 1, 2, 3]), row_start(1, PROMPT, [4, 5, 6, 7]))
    step(runner, Chunk(0, 0, 50, True, []), Chunk(1, 0, 40, False, []), started=started)
    assert rows == [1]


def test_prompt_logprobs_in_pieces_equal_those_in_one(
    make_runner: Callable[[], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SamplingParams(temperature=0.0, prompt_logprobs=2)
    start = row_start(0, PROMPT, [0, 1, 2, 3], asked)
    (whole,) = step(make_runner(), Chunk(0, 0, 50, True, [], True), started=(start,))
    assert whole.prompt_logprobs is not None
    assert [entry.token_ids[0] for entry in whole.prompt_logprobs] == PROMPT[1:]

    monkeypatch.setattr(outputs, "PIECE_BYTES", 1)  # as few rows of logits a piece as possible
    runner = make_runner()
    pieces = step(runner, Chunk(0, 0, 30, False, [], True), started=(start,))
    pieces += step(runner, Chunk(0, 30, 20, True, [], True))
    found = [entry for piece in pieces for entry in piece.prompt_logprobs or ()]
    assert [entry.token_ids for entry in found] == [entry.token_ids for entry in whole.prompt_logprobs]
    for entry, expected in zip(found, whole.prompt_logprobs, strict=True):
        assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_each_request_gets_as_many_alternatives_as_it_asked_for(make_runner: Callable[[], ModelRunner]) -> None:
    started = tuple(
        row_start(row, PROMPT[: 16 + row], [2 * row, 2 * row + 1], SamplingParams(temperature=0.0, logprobs=count))
        for row, count in ((0, 5), (1, None), (2, 0))
    )
    results = step(make_runner(), *(Chunk(row, 0, 16 + row, True, []) for row in range(3)), started=started)
    assert [result.logprobs and result.logprobs.width for result in results] == [6, None, 1]
    assert [result.logprobs and result.logprobs[0].rank for result in results] == [1, None, 1]


def test_step_inputs_equal_the_definition_of_an_attention_batch(make_runner: Callable[[], ModelRunner]) -> None:
    runner = make_runner()
    tables = runner.tables
    for row, length, blocks in ((0, 20, [7, 3]), (1, 40, [9, 1, 4]), (2, 33, [5, 6, 8]), (3, 64, [10, 11, 12, 13])):
        num_computed = {0: 19, 1: 14, 2: 0, 3: 63}[row]
        prompt = list(range(100 * row, 100 * row + length))
        tables.start(row_start(row, prompt, blocks[:1], num_computed=num_computed))
        tables.append_blocks([Chunk(row, 0, 1, False, [blocks[1:]])])
    chunks = [
        Chunk(3, 63, 1, True, []),
        Chunk(0, 19, 1, True, []),
        Chunk(2, 0, 33, False, []),
        Chunk(1, 14, 20, False, []),
    ]
    for chosen in (chunks, chunks[:2], chunks[2:]):
        inputs = inputs_of(runner, chosen)
        (cache,) = inputs.caches
        lens = [chunk.num_tokens for chunk in chosen]
        ends = [chunk.start + chunk.num_tokens for chunk in chosen]
        widest = -(-max(ends) // BLOCK_SIZE)
        table = tables.blocks[0, [chunk.row for chunk in chosen], :widest]
        expected = AttentionBatch.plan(lens, ends, table, BLOCK_SIZE)
        for name in ("query_start", "seq_lens", "positions", "slots"):
            ours, theirs = getattr(cache.batch, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        assert cache.batch.table_rows is not None
        own_table = cache.batch.block_tables[cache.batch.table_rows.long(), :widest]
        assert own_table.dtype == expected.block_tables.dtype
        assert torch.equal(own_table, expected.block_tables)
        for name in ("max_query_len", "max_seq_len", "num_decodes", "num_kv_tokens"):
            assert getattr(cache.batch, name) == getattr(expected, name)
        tokens = [100 * c.row + position for c in chosen for position in range(c.start, c.start + c.num_tokens)]
        assert inputs.token_ids.tolist() == tokens
        num_through_the_last_layer = len(tokens) if inputs.wanted is None else len(inputs.wanted)
        num_wanted = max(1, sum(chunk.samples for chunk in chosen))
        assert num_through_the_last_layer == StepPlan(0, [], [], chosen).size.num_wanted == num_wanted


def inputs_of(runner: ModelRunner, chunks: list[Chunk]) -> StepInputs:
    """Return the model's inputs in an eager step of these chunks."""
    seen: list[StepInputs] = []

    def forward(token_ids: torch.Tensor, caches: Any, wanted: Any, ranks: object) -> None:
        seen.append(StepInputs(token_ids, caches, wanted))

    batch = Batch.of(chunks)
    assert batch.size == StepPlan(0, [], [], chunks).size
    shape = batch.exact_shape(runner.backend.shapes.num_wanted(batch.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.model, "forward", forward)
        runner.current.set(batch, shape)
        runner.step.run(shape)
    return seen[0]


def test_kv_memory_is_page_aligned_zeroed_and_untouched() -> None:
    layout = KVLayout(model="m", num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    before = resident_bytes()
    kv = allocate_kv(layout, 65536)  # a gigabyte
    assert kv.nbytes == 1 << 30
    assert resident_bytes() - before < 64 << 20
    assert kv.shape == (65536, 2, 2, 2, 16, 64)
    group = GroupLayout(kind=CacheKind.FULL, window=None, layers=(0, 1), blocks=layout)
    region = region_of([kv], CacheLayout((group,)))
    assert region.address % 4096 == 0
    assert (region.num_blocks, region.device) == (65536, "cpu")
    kv[65535, 1, 1, 1, 15, 63] = 1.0
    assert np.count_nonzero(kv[65535].float().numpy()) == 1


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
