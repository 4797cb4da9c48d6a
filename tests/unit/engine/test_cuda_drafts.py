"""Steps with drafts as a GPU runs them, emulated on a CPU: answers are those without drafts.

The drafter knows the answers, and errs in a given share of drafts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.core.lockstep import EMPTY_STEP
from baton.engine.core.messages import EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.step import PADDING, Chunk, GroupStep, RowStart, StepPlan
from baton.engine.layers.step_context import RankRows
from baton.engine.models import load_config
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.worker.backends import cuda
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes, drafted_sizes
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits, StepShape
from baton.engine.worker.warmup import ProfileRun, drafted_mix, padding_steps
from baton.kernels import step

from ...helpers.inline_stream import InlineStream
from .controls import EVERYTHING, prompts_of
from .cores import Engines, answers_of, tokens_and_logprobs
from .guessing import requests_of
from .narrow_grammars import with_grammars
from .random_workload import random_requests

LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, max_drafts=4)


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Engines:
    return Engines(load_config(checkpoint, dtype="float32"), LIMITS)


def cuda_backend(max_tokens: int) -> CudaBackend:
    return CudaBackend(InlineStream(), CudaShapes(LIMITS, max_tokens=max_tokens), torch.float32)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 14])
@pytest.mark.parametrize("errors", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["free", "grammars", "everything"])
def test_answers_are_those_of_an_engine_without_drafts(
    engines: Engines,
    kind: str,
    errors: float,
    num_blocks: int,
    captured: bool,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = requests_of_kind(kind)
    plain = engines.core(engines.runner(CpuBackend(CpuShapes(LIMITS)), num_blocks), num_blocks, depth=1)
    expected = answers_of(plain, requests)
    whole = {
        request.request_id: request.prompt_token_ids + tokens_and_logprobs(expected[request.request_id])[0]
        for request in requests
    }
    drafter = InformedDrafter(lambda request_id, _: whole[request_id], 1 - errors, engines.config.vocab_size)
    drafting = Drafting(drafter, LIMITS.max_drafts, adapts=False, edits_on_host=True)
    runner = engines.runner(cuda_backend(64 if captured else 0), num_blocks)
    if captured:
        runner.capture()
    run = shapes_run(runner, monkeypatch)
    core = engines.core(runner, num_blocks, depth, drafting)
    answers = answers_of(core, requests)
    if kind == "grammars" and errors < 1:  # hardly any wrong draft fits a grammar
        of_grammars = [output for number in range(1, 14, 2) for output in answers[str(number)]]
        assert any(output.drafts and output.drafts.num_accepted_tokens for output in of_grammars)
    for request_id, outputs in answers.items():
        tokens, values = tokens_and_logprobs(outputs)
        plain_tokens, plain_values = tokens_and_logprobs(expected[request_id])
        assert tokens == plain_tokens
        assert values == pytest.approx(plain_values, abs=1e-4)
        assert outputs[-1].finish_reason == expected[request_id][-1].finish_reason
    stats = core.stats()
    assert stats.speculation is not None
    assert stats.speculation.num_drafts > (10 if num_blocks == 64 else 4)
    if errors in (0.0, 1.0):
        assert stats.speculation.acceptance_rate == 1 - errors
    assert stats.num_preemptions > 0 or num_blocks == 64
    if captured:
        assert runner.captured.num_replays > runner.captured.num_eager
    beside_prompts = [shape for shape in run if shape.max_drafts and not shape.is_drafted]
    assert len(beside_prompts) > (5 if num_blocks == 64 else 0)


def requests_of_kind(kind: str) -> list[EngineRequest]:
    """Return requests of all sorts: every second with a grammar, or none, or all with every sampling control."""
    if kind == "everything":
        return requests_of(prompts_of(*range(1, 90, 7)), msgspec.structs.replace(EVERYTHING, max_tokens=40))
    requests = random_requests(random.Random(5), 14)
    return with_grammars(requests) if kind == "grammars" else requests


def shapes_run(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """Return a list that gets the shape of each step that the runner runs from now on."""
    shapes: list[StepShape] = []
    run = runner.captured.run

    def note(shape: StepShape, *others: Any) -> torch.Tensor | None:
        shapes.append(shape)
        return run(shape, *others)

    monkeypatch.setattr(runner.captured, "run", note)
    return shapes


SAMPLING = SamplingParams(temperature=1.0)
DRAFTED = Chunk(0, 6, 4, True, [], num_drafts=3, drafts=(5, 6, 7))
PROMPT = RowStart(1, "prompt", [9] * 30, [], SAMPLING, 1, [], [[3, 4]])
PLANS = {
    "idle": StepPlan(EMPTY_STEP, [], [], []),
    "decodes": StepPlan(1, [], [], [Chunk(0, 6, 1, True, [])]),
    "drafts": StepPlan(1, [], [], [DRAFTED]),
    "prompt": StepPlan(1, [], [PROMPT], [Chunk(1, 0, 30, True, [])]),
    "drafts, prompt": StepPlan(1, [], [PROMPT], [DRAFTED, Chunk(1, 0, 28, False, [])]),
    "scored": StepPlan(1, [], [PROMPT], [DRAFTED, Chunk(1, 0, 30, True, [], prompt_logprobs=True)]),
}


@pytest.mark.parametrize("max_tokens", [32, 64])
@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(PLANS, 2)), ids=", ".join)
def test_ranks_that_run_a_step_together_agree_about_its_rows(
    engines: Engines, kinds: tuple[str, str], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replay the same captured size, or each runs its own size and knows the others'.

    Up to `max_tokens` are captured.
    """
    plans = [PLANS[kind] for kind in kinds]
    if PLANS["scored"] in plans:
        scored = msgspec.structs.replace(PROMPT, sampling=SamplingParams(prompt_logprobs=1))
        plans = [msgspec.structs.replace(plan, started_rows=[scored] * len(plan.started_rows)) for plan in plans]
    group = GroupStep([plan.size if plan.chunks else PADDING for plan in plans])
    runs: list[tuple[StepShape, RankRows | None]] = []
    for plan in plans:
        runner = engines.runner(cuda_backend(max_tokens), 8)
        runner.capture()
        start = RowStart(0, "first", [3] * 6, [], SAMPLING, 1, [], [[0, 1]])
        runner.launch(StepPlan(0, [], [start], [Chunk(0, 0, 6, True, [])])).result()
        run = runner.captured.run
        monkeypatch.setattr(runner.captured, "run", lambda *args, run=run: runs.append(args) or run(*args))
        result = runner.launch(msgspec.structs.replace(plan, group=group)).result()
        assert [bool(chunk.token_ids) for chunk in result.chunks] == [chunk.samples for chunk in plan.chunks]
    (one, rows), (other, _) = runs
    assert {ranks for _, ranks in runs} == {rows}
    if rows is None:
        assert (one.num_tokens, one.wanted_rows, one.max_drafts) == (
            other.num_tokens,
            other.wanted_rows,
            other.max_drafts,
        )
        assert all(size.num_drafts <= one.max_drafts * one.num_seqs for size in group.sizes)
    else:
        assert rows.tokens == (one.num_tokens, other.num_tokens)
        assert rows.wanted == (one.wanted_rows, other.wanted_rows)
        assert "scored" in kinds or max_tokens == 32


def test_sequences_have_up_to_two_or_four_tokens_or_as_many_as_they_may() -> None:
    few = replace(LIMITS, max_drafts=3)
    assert drafted_sizes([1, 2], few) == [(1, 2, 2), (1, 4, 4), (2, 4, 2), (2, 8, 4)]
    assert drafted_sizes([1, 2], replace(LIMITS, max_drafts=1)) == [(1, 2, 2), (2, 4, 2)]
    assert drafted_sizes([2], replace(LIMITS, max_drafts=15)) == [(2, 4, 2), (2, 8, 4), (2, 8, 16), (2, 32, 16)]
    shapes = CudaShapes(replace(LIMITS, max_drafts=15), max_tokens=32)
    found = [shapes.drafted(3, 9, single_seq_len=0, longest=longest) for longest in (4, 5, 16)]
    assert [(shape.num_tokens, shape.max_query_len) for shape in found if shape] == [(16, 4), (16, 16), (16, 16)]
    assert shapes.drafted(3, 17, single_seq_len=0, longest=8) == shapes.drafted(4, 64, single_seq_len=0, longest=16)
    assert shapes.drafted(8, 129, single_seq_len=0, longest=16) is None


def test_one_short_sequence_with_drafts_has_sizes_of_its_own() -> None:
    shapes = CudaShapes(replace(LIMITS, max_model_len=8192), max_tokens=32)
    found = [shapes.drafted(1, 3, single_seq_len=length, longest=3) for length in (1000, 1024, 1025, 5000)]
    assert [shape.max_seq_len for shape in found if shape] == [1024, 1024, 4096, 8192]
    captured = list(shapes.in_capture_order())
    assert len(set(captured)) == len(captured)
    lengths = [(tokens, length) for tokens in (2, 4, 5) for length in (9, 2000, 5000)]
    chosen = {shapes.drafted(1, tokens, single_seq_len=length, longest=tokens) for tokens, length in lengths}
    assert chosen <= set(captured)


def test_sizes_with_drafts_are_warmed_up_with_padding_and_draws_from_edited_logits(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted_again: list[int] = []

    def accept_again(drawn: torch.Tensor, index: torch.Tensor, *others: Any) -> None:
        accepted_again.extend(index.tolist())
        step.accept_again(drawn, index, *others)

    monkeypatch.setattr(cuda, "accept_again", accept_again)
    backend = cuda_backend(32)
    drafted = [shape for shape in backend.shapes.in_capture_order() if shape.max_drafts]
    padding_steps(engines.runner(backend, 4), drafted)
    memory = ProfileRun(lambda: engines.runner(cuda_backend(32), 4), drafted, lambda work: work() or 0, LIMITS).run()
    assert memory.num_captured == len(drafted)
    assert accepted_again == [0]


def test_the_memory_of_the_largest_step_of_prompts_and_drafts_is_measured(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (largest,) = drafted_mix(LIMITS, 32)
    assert (largest.num_tokens, largest.wanted_rows, largest.num_draws) == (64, 40, 40)
    assert not drafted_mix(LIMITS, 64), "it is captured, and the captured sizes are measured"
    assert not drafted_mix(replace(LIMITS, max_drafts=0), 32)
    measured: list[StepShape] = []

    def peak(work: Callable[[], object]) -> int:
        monkeypatch.setattr(cuda.CudaStep, "run", lambda step, shape, *_: measured.append(shape) or run(step, shape))
        work()
        monkeypatch.setattr(cuda.CudaStep, "run", run)
        return 100 if largest in measured[-1:] else 1

    run = cuda.CudaStep.run
    memory = ProfileRun(lambda: engines.runner(cuda_backend(32), 4), [], peak, LIMITS).run()
    assert largest in measured
    assert memory.step_bytes == 100
