"""A draft model drafts at the end of each step: answers are those without drafts, and drafts are what it would draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine import LLM, EngineConfig, InvalidEngineConfig, SamplingParams, build_engine
from baton.engine.core.lockstep import EMPTY_STEP
from baton.engine.core.step import PADDING, Chunk, GroupStep, RowStart, StepPlan, StepSize
from baton.engine.startup import load
from baton.engine.startup.model_config import read_model_config
from baton.engine.startup.weight_counts import weight_bytes_of_rank
from baton.engine.worker.backends import Backend
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes

from ...helpers.checkpoints import write_checkpoint
from ...helpers.inline_stream import InlineStream
from .controls import EVERYTHING, GREEDY, WAYS, prompts_of
from .cores import Engines
from .guessing import (
    HOT,
    LIMITS,
    MOST,
    answers,
    check_both_backends,
    check_edited_draws,
    check_guesses,
    check_handed_over,
    check_same_answers,
    draft_always,
    stats_of,
)

PROMPTS = prompts_of(1, 17, 33, 40, 56, 90)  # leaving space for drafts in the last block
KINDS = pytest.mark.parametrize("params", [GREEDY, EVERYTHING, HOT], ids=["greedy", "everything", "hot"])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of another family with the same vocabulary: one layer, other heads, other weights."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 48}
    return write_checkpoint(tmp_path_factory.mktemp("draft") / "llama", "llama", seed=3, **shape)


@pytest.fixture
def make(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    draft_always(monkeypatch)
    return make_llm


def guessing(model: Path) -> dict[str, Any]:
    return {"model": str(model), "num_speculative_tokens": MOST}


@pytest.mark.slow
@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("args", WAYS.values(), ids=WAYS)
def test_answers_are_those_without_a_draft_model(
    llm: LLM, make: Callable[..., LLM], other: Path, params: SamplingParams, args: dict[str, Any]
) -> None:
    check_same_answers(llm, make, PROMPTS, params, speculative_config=guessing(other), **args)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("args", [{}, {"max_num_batched_tokens": 16, "async_scheduling": True}], ids=["", "chunked"])
def test_a_model_guesses_itself_right(
    make: Callable[..., LLM], checkpoint: Path, params: SamplingParams, args: dict[str, Any]
) -> None:
    drafting = make(speculative_config=guessing(checkpoint), **args)
    answers(drafting, PROMPTS, params)
    stats = stats_of(drafting)
    assert stats.num_draft_tokens > 100
    assert stats.acceptance_rate == 1, "its cache has all tokens, and no others"


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_guesses_are_what_the_draft_model_draws_by_itself(
    make: Callable[..., LLM], other: Path, params: SamplingParams
) -> None:
    alone = LLM(str(other), skip_tokenizer_init=True, dtype="float32", max_num_seqs=1)
    drafting = make(speculative_config=guessing(other), max_num_seqs=1)

    def expected_accepted(whole: list[int], num_prompt: int, own: SamplingParams) -> list[int]:
        accepted, known = [0] * MOST, num_prompt  # index of the newest token, which was drawn and not run
        while known + 1 < len(whole):
            count = min(MOST, len(whole) - 2 - known)
            few = msgspec.structs.replace(own, max_tokens=max(1, count), logprobs=None)
            guesses = alone.generate(whole[: known + 1], few, use_tqdm=False)[0].outputs[0].token_ids[:count]
            right = 0
            while right < len(guesses) and guesses[right] == whole[known + 1 + right]:
                accepted[right] += 1
                right += 1
            known += right + 1
        return accepted

    found = check_guesses(drafting, PROMPTS[::2], params, expected_accepted)
    assert any(found) or params is GREEDY


@pytest.mark.slow
@pytest.mark.exhaustive
@KINDS
def test_requests_that_were_handed_over_or_migrated_go_on_as_without_drafts(
    llm: LLM, make: Callable[..., LLM], checkpoint: Path, other: Path, params: SamplingParams
) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_num_seqs": 8, "speculative_config": guessing(other)}
    check_handed_over(llm, args, PROMPTS, params)


def test_what_the_draft_model_keeps_is_handed_over(llm: LLM, make: Callable[..., LLM], checkpoint: Path) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_num_seqs": 8}
    stats = check_handed_over(llm, {**args, "speculative_config": guessing(checkpoint)}, PROMPTS, HOT)
    assert stats.num_draft_tokens > 100
    assert stats.acceptance_rate == 1, "the prompts' part of its cache came with the model's"


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("have_grammars", [False, True], ids=["free", "grammars"])
def test_steps_as_a_gpu_runs_them_guess_the_same(
    checkpoint: Path, other: Path, have_grammars: bool, depth: int
) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 200}
    config = read_model_config(EngineConfig.from_args({**args, "speculative_config": guessing(other)}))
    stats = check_both_backends(Engines(config, LIMITS), PROMPTS, depth=depth, have_grammars=have_grammars)
    assert stats.speculation is not None
    assert stats.speculation.num_accepted_tokens > 30


def test_a_rank_with_nothing_to_do_does_not_wait_for_tokens_that_an_ended_request_left_unread(
    checkpoint: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 200}
    config = read_model_config(EngineConfig.from_args({**args, "speculative_config": guessing(other)}))
    engines = Engines(config, LIMITS)
    assert engines.draft_model is not None
    runner, draft_model = engines.runner(CpuBackend(CpuShapes(LIMITS)), 8), engines.draft_model.model
    assert draft_model is not None
    row = LIMITS.max_num_seqs - 1
    start = RowStart(row, "ended", [3] * 6, [], SamplingParams(), 1, [], [[0], [0]])
    runner.launch(StepPlan(0, [], [start], [Chunk(row, 0, 6, True, [])], num_guesses=MOST)).result()
    runner.launch(StepPlan(1, [], [], [Chunk(row, 6, 1, True, [])])).result()  # makes no guesses: nothing is read
    forward, runs = draft_model.forward, iter(range(MOST))

    def run(*inputs: Any) -> Any:
        assert next(runs, None) is not None, "it runs for guesses, and there is nothing to read"
        return forward(*inputs)

    monkeypatch.setattr(draft_model, "forward", run)
    of_another_rank = StepSize(1, 1, 1, num_guesses=MOST)
    runner.launch(StepPlan(EMPTY_STEP, [], [], [], GroupStep([PADDING, of_another_rank]))).result()


def _cpu() -> Backend:
    return CpuBackend(CpuShapes(LIMITS))


def _gpu() -> Backend:
    return CudaBackend(InlineStream(), CudaShapes(LIMITS, max_tokens=32), torch.float32)


class _Rows:
    """A runner with a draft model, whose rows hold up to 80 tokens each, and a count of the draft model's runs."""

    def __init__(self, engines: Engines, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = engines.runner(backend, 16)
        self.runner.capture()
        self.num_runs = 0
        assert engines.draft_model is not None
        draft_model = engines.draft_model.model
        assert draft_model is not None
        forward = draft_model.forward

        def run(*inputs: Any) -> Any:
            self.num_runs += 1
            return forward(*inputs)

        monkeypatch.setattr(draft_model, "forward", run)

    def step(
        self,
        *chunks: Chunk,
        starts: Sequence[int] = (),
        num_guesses: int = 0,
        num_blocks: int = 5,
        reads_from: int | None = None,
    ) -> int:
        """Run chunks, some of them the first of a prompt of as many tokens, whose row gets so many blocks.

        Returns how often the draft model ran.
        """
        before, started = self.num_runs, []
        for row in starts:
            (prompt,) = (chunk.num_tokens for chunk in chunks if chunk.row == row)
            blocks = list(range(5 * row, 5 * row + num_blocks))
            params = SamplingParams(temperature=1.5)
            started.append(RowStart(row, str(row), [3] * prompt, [], params, 7 + row, [], [blocks] * 2))
        plan = StepPlan(0, [], started, list(chunks), num_guesses=num_guesses, reads_from=reads_from)
        self.runner.launch(plan).result()
        return self.num_runs - before

    def known(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Return the first tokens of row 0, and the guesses after its last one."""
        tables = self.runner.tables
        return tables.tokens.tensor[0, :num_tokens].tolist(), tables.guesses.tensor[0, :MOST].tolist()

    def num_read(self) -> list[int]:
        tables = self.runner.tables
        return [int(value) for value in tables.read.tensor[0, :2]]


def _chunk(row: int, start: int, num_tokens: int = 1) -> Chunk:
    return Chunk(row, start, num_tokens, True, [])


BACKENDS = pytest.mark.parametrize("backend", [_cpu, _gpu])


@pytest.fixture(scope="module")
def engines(checkpoint: Path, other: Path) -> Engines:
    args = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 200}
    return Engines(read_model_config(EngineConfig.from_args({**args, "speculative_config": guessing(other)})), LIMITS)


@BACKENDS
def test_a_rank_that_makes_no_guesses_makes_none_for_other_ranks(
    engines: Engines, backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have much to read before it could."""
    rows = _Rows(engines, backend(), monkeypatch)
    assert rows.step(_chunk(0, 0, 6), starts=[0]) == 1
    sizes = GroupStep([StepSize(1, 1, 1), StepSize(1, 1, 1, num_guesses=MOST)])
    rows.runner.launch(StepPlan(1, [], [], [_chunk(0, 6)], sizes)).result()
    assert rows.num_runs == 1
    assert rows.num_read()[0] == 6


@BACKENDS
def test_the_draft_model_runs_once_for_each_guess(
    engines: Engines, backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _Rows(engines, backend(), monkeypatch)
    assert rows.step(_chunk(0, 0, 6), starts=[0], num_guesses=MOST) == MOST, "reading gives the first guess"
    for start in range(6, 12):
        assert rows.step(_chunk(0, start), num_guesses=MOST) == MOST


@BACKENDS
def test_what_no_guess_needs_is_read_later_and_then_guesses_are_the_same(
    engines: Engines, backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    every, late = (_Rows(engines, backend(), monkeypatch) for _ in range(2))
    ends = range(6, 6 + 24)
    every.step(_chunk(0, 0, 6), starts=[0], num_guesses=MOST)
    assert late.step(_chunk(0, 0, 6), starts=[0]) == 1, "a prompt is read at once"
    for start in ends:
        every.step(_chunk(0, start), num_guesses=MOST)
        if start < ends[-1]:
            assert late.step(_chunk(0, start)) == 0
    assert late.num_read()[0] == 6
    assert late.step(_chunk(0, ends[-1]), num_guesses=MOST) == MOST
    assert late.num_read() == every.num_read() == [ends[-1] + 2, 0], "with the token drawn last"
    assert late.known(ends[-1] + 2) == every.known(ends[-1] + 2)


@BACKENDS
def test_a_token_that_had_no_block_is_read_once_it_has_one(
    engines: Engines, backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, roomy = (_Rows(engines, backend(), monkeypatch) for _ in range(2))
    rows.step(_chunk(0, 0, 16), starts=[0], num_guesses=MOST, num_blocks=1)
    assert rows.num_read()[0] == 16
    roomy.step(_chunk(0, 0, 16), starts=[0], num_guesses=MOST)
    assert roomy.num_read()[0] == 17
    for start in range(16, 20):
        new_blocks = [[1], [1]] if start == 16 else []
        rows.step(Chunk(0, start, 1, True, new_blocks), num_guesses=MOST)
        roomy.step(_chunk(0, start), num_guesses=MOST)
        assert rows.num_read() == roomy.num_read() == [start + 2, 0]
        assert rows.known(start + 2) == roomy.known(start + 2)


@BACKENDS
def test_prompts_are_read_at_once_beside_decodes_of_which_those_are_read_that_the_plan_names(
    engines: Engines, backend: Callable[[], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, every = (_Rows(engines, backend(), monkeypatch) for _ in range(2))
    for each in (rows, every):
        each.step(_chunk(0, 0, 6), starts=[0])
        each.step(_chunk(0, 6), _chunk(1, 0, 9), starts=[1])
    assert rows.num_read() == [6, 9]
    for number in range(20):
        assert rows.step(_chunk(0, 7 + number), _chunk(1, 9 + number)) == 0
        every.step(_chunk(0, 7 + number), _chunk(1, 9 + number), num_guesses=MOST)
    assert rows.num_read() == [6, 9]
    assert rows.step(_chunk(0, 27), _chunk(1, 29), reads_from=1) == 1
    assert rows.num_read() == [6, 30], "the first one waits"
    assert rows.step(_chunk(0, 28), _chunk(1, 30), reads_from=0) == 1
    assert rows.num_read() == [29, 31]
    every.step(_chunk(0, 27), _chunk(1, 29))
    every.step(_chunk(0, 28), _chunk(1, 30))
    for each in (rows, every):
        each.step(_chunk(0, 29), _chunk(1, 31), num_guesses=MOST)
    assert rows.known(31) == every.known(31), "the guesses are the same"


def test_a_gpu_reads_late_by_replaying_captured_sizes(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """To launch so many tokens otherwise would take the CPU longer than the device needs for the step."""
    stream = _CountingStream()
    late = _Rows(engines, CudaBackend(stream, CudaShapes(LIMITS, max_tokens=32), torch.float32), monkeypatch)
    at_once = _Rows(engines, _cpu(), monkeypatch)
    for rows in (late, at_once):
        rows.step(_chunk(0, 0, 6), _chunk(1, 0, 9), starts=[0, 1])
        for number in range(25):
            rows.step(_chunk(0, 6 + number), _chunk(1, 9 + number))
    assert at_once.step(_chunk(0, 31), _chunk(1, 34), reads_from=0) == 1
    stream.num_replays = 0
    assert late.step(_chunk(0, 31), _chunk(1, 34), reads_from=0) == 2, "52 tokens, of which 32 are captured at most"
    assert stream.num_replays == 3, "the step, and both parts of what is read"
    assert late.num_read() == [32, 35]
    for rows in (late, at_once):
        rows.step(_chunk(0, 32), _chunk(1, 35), num_guesses=MOST)
    assert late.known(34) == at_once.known(34), "the guesses are the same"


class _CountingStream(InlineStream):
    """An inline stream that counts the replays of what was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        replay = super().capture(work)

        def counted() -> object:
            self.num_replays += 1
            return replay()

        return counted


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("knows", [True, False])
def test_edited_draws_of_a_gpu_are_checked_against_drafts(
    checkpoint: Path, other: Path, knows: bool, depth: int
) -> None:
    args = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 200}
    config = read_model_config(
        EngineConfig.from_args({**args, "speculative_config": guessing(checkpoint if knows else other)})
    )
    stats = check_edited_draws(Engines(config, LIMITS), PROMPTS, depth)
    assert stats.num_accepted_tokens > 10 or not knows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "its vocabulary has 300 tokens, and the model's 256"),
        ({"max_position_embeddings": 128}, "max_model_len is 256, but the model has 128 positions"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1, **changes)
    config = EngineConfig.from_args({"model": str(checkpoint), "speculative_config": guessing(folder)})
    with pytest.raises(InvalidEngineConfig, match=message) as caught:
        read_model_config(config)
    assert caught.value.field == "speculative_config.model"


def test_a_draft_model_larger_than_memory_is_refused_by_name(
    checkpoint: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"model": str(checkpoint), "dtype": "float32"}
    plain = EngineConfig.from_args(args)
    alone = weight_bytes_of_rank(read_model_config(plain), plain, has_fp8=False)
    monkeypatch.setattr(load, "available_memory_bytes", lambda: alone)
    build_engine(plain).close()
    with pytest.raises(InvalidEngineConfig, match="the weights of llama take") as caught:
        build_engine(EngineConfig.from_args({**args, "speculative_config": guessing(other)}))
    assert caught.value.field == "speculative_config.model"
    monkeypatch.setattr(load, "available_memory_bytes", lambda: alone - 1)
    with pytest.raises(InvalidEngineConfig, match="its weights take") as caught:
        build_engine(plain)
    assert caught.value.field == "model"


def test_a_draft_model_with_states_or_other_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    hybrid = write_checkpoint(tmp_path / "hybrid", "qwen3_next")
    with pytest.raises(InvalidEngineConfig, match="keeps recurrent states"):
        read_model_config(EngineConfig.from_args({"model": str(checkpoint), "speculative_config": guessing(hybrid)}))
    same = write_checkpoint(tmp_path / "same", "llama")
    tokens = (checkpoint / "tokenizer.json").read_text()
    (same / "tokenizer.json").write_text(tokens.replace('"version": "1.0"', '"version":"1.0"'))
    config = EngineConfig.from_args({"model": str(checkpoint), "speculative_config": guessing(same)})
    assert read_model_config(config).draft_model is not None
    (same / "tokenizer.json").write_text(tokens.replace('"!": 0', '"!": 1'))
    with pytest.raises(InvalidEngineConfig, match=r"its tokenizer\.json has other tokens than the model's"):
        read_model_config(config)
