"""The GPU runner, emulated on a CPU, gives the results of the CPU runner.

Padding, sizes, tables, staged writes, draws and pages are the same on every device; streams and graphs are not tested
here.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import EngineConfig, SamplingParams
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.grammar import GrammarSource
from baton.engine.core.layout import KVLayout
from baton.engine.core.messages import EngineRequest, ErrorKind
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.step import Chunk, RowStart, Runner, StepPlan
from baton.engine.layers.step_context import RankRows
from baton.engine.models import load_config, load_model, stub_model
from baton.engine.startup.kv_size import KVBudget, kv_budget
from baton.engine.startup.memory import GpuMemory
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend, CudaStep
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.backends.staged_writes import StagedWrites
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits, StepShape
from baton.engine.worker.tables import CacheArenas
from baton.engine.worker.warmup import ProfileRun, StepMemory, eager_shapes, largest_step, padding_steps

from ...helpers.inline_stream import InlineStream
from ...helpers.kv_memory import allocate_kv
from .narrow_grammars import NarrowGrammars, with_grammars
from .random_workload import live, random_requests, same

MAX_NUM_SEQS, MAX_TOKENS, MODEL_LEN = 8, 64, 200
LIMITS = StepLimits(MAX_NUM_SEQS, MAX_TOKENS, MODEL_LEN)


class Workshop:
    """Runners of one tiny model. Each one's blocks start as NaN, so that reading an unwritten one shows."""

    def __init__(self, checkpoint: Path) -> None:
        self.config = load_config(checkpoint, dtype="float32")
        self.model = load_model(self.config)
        self.layout = KVLayout(
            model="tiny",
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype="float32",
        )

    def kv(self, num_blocks: int) -> torch.Tensor:
        return allocate_kv(self.layout, num_blocks).fill_(float("nan"))

    def cpu_runner(self, num_blocks: int = 64) -> ModelRunner:
        backend = CpuBackend(CpuShapes(LIMITS))
        return ModelRunner(self.model, CacheArenas([self.kv(num_blocks)]), backend, LIMITS, self.config.vocab_size)

    def device_runner(self, num_blocks: int = 64, *, max_captured_tokens: int = 32) -> ModelRunner:
        """Make a runner that has "captured" decodes and mixed steps up to so many tokens, or nothing if None."""
        shapes = CudaShapes(LIMITS, max_tokens=max_captured_tokens)
        backend = CudaBackend(InlineStream(), shapes, torch.float32)
        return ModelRunner(self.model, CacheArenas([self.kv(num_blocks)]), backend, LIMITS, self.config.vocab_size)

    def captured_runner(self, num_blocks: int = 64) -> ModelRunner:
        runner = self.device_runner(num_blocks)
        runner.capture()
        return runner

    def core(
        self, runner: Runner, num_blocks: int = 64, *, depth: int = 2, grammars: GrammarSource | None = None
    ) -> EngineCore:
        config = EngineCoreConfig(
            num_blocks=num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MODEL_LEN,
            vocab_size=self.config.vocab_size,
            eos_token_ids=[2],
            depth=depth,
        )
        return EngineCore(Scheduler(config, grammars=grammars), runner)


@pytest.fixture(scope="module")
def workshop(checkpoint: Path) -> Workshop:
    return Workshop(checkpoint)


# ------------------------------------------------------------------------------------ random lives of engines


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("seed", range(5))
def test_random_lives_are_those_of_an_engine_on_a_cpu(
    workshop: Workshop, seed: int, num_blocks: int, captured: bool, depth: int
) -> None:
    runner = workshop.captured_runner(num_blocks) if captured else workshop.device_runner(num_blocks)
    ours = workshop.core(runner, num_blocks, depth=depth)
    theirs = workshop.core(workshop.cpu_runner(num_blocks), num_blocks, depth=depth)
    for outputs, expected in zip(live(ours, seed), live(theirs, seed), strict=True):
        assert len(outputs) == len(expected)
        assert all(map(same, outputs, expected)), (outputs, expected)
    if captured:
        assert runner.captured.num_replays > runner.captured.num_eager > 0
    else:
        assert runner.captured.num_replays == 0
    if num_blocks == 13:
        assert ours.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("seed", range(3))
def test_masked_draws_are_those_of_an_engine_on_a_cpu(workshop: Workshop, seed: int, num_blocks: int) -> None:
    answers = []
    for runner in (workshop.captured_runner(num_blocks), workshop.cpu_runner(num_blocks)):
        core = workshop.core(runner, num_blocks, grammars=NarrowGrammars())
        said: dict[str, list[int]] = {}
        for request in with_grammars(random_requests(random.Random(seed), 14)):
            core.add(request)
        while core.has_work():
            for output in core.step():
                assert output.error is None
                said.setdefault(output.request_id, []).extend(output.token_ids)
        answers.append(said)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 14


# ------------------------------------------------------------------------------------ what a step costs


def decoding(core: EngineCore, count: int, prompt_len: int, max_tokens: int = 100) -> None:
    """Step until `count` requests have their first token."""
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    for i in range(count):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=[i + 3] * prompt_len, sampling=params, seed=i))
    seen: set[str] = set()
    while len(seen) < count:
        seen.update(output.request_id for output in core.step())


def test_a_steady_decode_step_is_one_replay_and_writes_nothing(workshop: Workshop) -> None:
    runner = workshop.captured_runner()
    core = workshop.core(runner)
    decoding(core, 3, prompt_len=17)
    core.step()
    flushes, replays, eager = runner.writes.num_flushes, runner.captured.num_replays, runner.captured.num_eager
    for _ in range(8):
        assert len(core.step()) == 3
    assert runner.captured.num_replays == replays + 8
    assert (runner.writes.num_flushes, runner.captured.num_eager) == (flushes, eager)


def test_blocks_that_grow_and_rows_that_leave_cost_one_write_a_step(workshop: Workshop) -> None:
    runner = workshop.captured_runner()
    core = workshop.core(runner)
    decoding(core, 4, prompt_len=12)
    before = runner.writes.num_flushes
    for _ in range(32):  # every row gets two blocks, all in the same steps
        core.step()
    assert runner.writes.num_flushes == before + 2
    core.abort("1")
    core.step()
    core.step()
    assert runner.writes.num_flushes == before + 3


def test_rows_that_need_more_than_a_graph_draws_still_replay_it(workshop: Workshop) -> None:
    runner = workshop.captured_runner()
    core = workshop.core(runner)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={77: 100.0}, logprobs=1)
    core.add(EngineRequest(request_id="biased", prompt_token_ids=[5, 6, 7], sampling=params))
    decoding(core, 2, prompt_len=5)
    eager = runner.captured.num_eager
    tokens = [output.token_ids for _ in range(6) for output in core.step() if output.request_id == "biased"]
    assert tokens == [[77]] * 6
    assert runner.captured.num_eager == eager


# ------------------------------------------------------------------------------------ corners


def row_start(row: int, prompt: list[int], blocks: list[int]) -> RowStart:
    params = SamplingParams(temperature=0.0)
    return RowStart(row, str(row), prompt, [], params, seed=0, stop_token_ids=[], block_tables=[blocks])


@pytest.mark.parametrize("kind", ["cpu_runner", "device_runner", "captured_runner"])
@pytest.mark.parametrize("asks", [{}, {"logprobs": 2}, {"repetition_penalty": 1.5}], ids=lambda asks: "".join(asks))
def test_a_request_whose_kv_is_damaged_ends_with_an_error_and_no_other_does(
    workshop: Workshop, kind: str, asks: dict[str, Any]
) -> None:
    runner = getattr(workshop, kind)()
    core = workshop.core(runner)
    sampling = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, **asks)
    core.add(EngineRequest(request_id="damaged", prompt_token_ids=list(range(3, 40)), sampling=sampling))
    while not (outputs := core.step()):
        pass
    runner.arenas.tensors[0].fill_(float("nan"))
    core.add(EngineRequest(request_id="sound", prompt_token_ids=list(range(50, 90)), sampling=sampling))
    while core.has_work():
        outputs += core.step()
    last = {output.request_id: output for output in outputs}
    error = last["damaged"].error
    assert error is not None
    assert error.kind is ErrorKind.INTERNAL
    assert last["sound"].error is None
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "sound") == 40
    assert all(token_id >= 0 for output in outputs for token_id in output.token_ids)


def test_results_may_be_read_late_and_in_any_order(workshop: Workshop) -> None:
    runner, reference = workshop.captured_runner(), workshop.cpu_runner()
    plans = [StepPlan(0, [], [row_start(3, [9] * 20, [5, 6])], [Chunk(3, 0, 20, True, [])])]
    plans += [StepPlan(step, [], [], [Chunk(3, 19 + step, 1, True, [])]) for step in range(1, 12)]
    expected = [reference.launch(plan).result() for plan in plans]
    pending = [runner.launch(plan) for plan in plans]
    found = {step: pending[step].result() for step in reversed(range(len(plans)))}
    assert [found[step] for step in range(len(plans))] == expected


def test_a_step_without_chunks_only_updates_rows(workshop: Workshop) -> None:
    runner = workshop.captured_runner()
    plan = StepPlan(7, [1, 2], [row_start(0, [4, 5], [0])], [])
    assert runner.launch(plan).result().chunks == []
    assert runner.tables.tokens.tensor[0, :2].tolist() == [4, 5]


def test_a_prompt_larger_than_a_buffer_of_writes_arrives_whole(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagedWrites, "BUFFER_VALUES", 16)
    monkeypatch.setattr(StagedWrites, "BUFFER_PIECES", 3)
    runner = workshop.captured_runner()
    prompts = [[row * 20 + i for i in range(50)] for row in range(3)]
    starts = [row_start(row, prompt, list(range(8 * row, 8 * row + 4))) for row, prompt in enumerate(prompts)]
    chunks = [Chunk(row, 0, 50 if row == 0 else 1, row == 0, [[50 + row]]) for row in range(3)]
    runner.launch(StepPlan(0, [], starts, chunks)).result()
    assert runner.tables.tokens.tensor[:3, :50].tolist() == prompts
    assert runner.tables.blocks[0, :3, :5].tolist() == [[*range(8 * r, 8 * r + 4), 50 + r] for r in range(3)]
    assert runner.writes.num_flushes > 10


def test_a_step_of_nothing_but_padding_leaves_no_trace(workshop: Workshop) -> None:
    runner, fresh = workshop.device_runner(), workshop.device_runner()
    padding_steps(runner, list(CudaShapes(LIMITS, max_tokens=32).in_capture_order()))
    assert torch.equal(runner.tables.memory, fresh.tables.memory)
    assert not runner.outputs.ring.pages.any()
    assert bool(torch.isnan(runner.arenas.tensors[0]).all()), "padding wrote into a block"


# ------------------------------------------------------------------------------------ before ready


def test_the_largest_step_leaves_rows_that_remember_nothing(workshop: Workshop) -> None:
    runner = workshop.device_runner()
    largest_step(runner)
    core = workshop.core(runner)
    fresh = workshop.core(workshop.device_runner())
    for i in range(MAX_NUM_SEQS):
        request = EngineRequest(
            request_id=str(i), prompt_token_ids=[i + 9] * (3 + i), sampling=SamplingParams(temperature=1.0), seed=i
        )
        core.add(request)
        fresh.add(request)
    while core.has_work():
        assert all(map(same, core.step(), fresh.step()))


def test_sizes_that_are_run_before_ready_reach_from_the_captured_ones_to_the_largest(workshop: Workshop) -> None:
    runner = workshop.device_runner()
    shapes = list(eager_shapes(LIMITS, largest_captured=32))
    assert [shape.num_tokens for shape in shapes] == [64, 64]
    assert {shape.num_kv_tokens is None for shape in shapes} == {True, False}
    everything = list(eager_shapes(LIMITS, largest_captured=0))
    assert [shape.num_tokens for shape in everything] == [64, 64, 32, 32, 16, 16, 8, 8, 4, 4]
    padding_steps(runner, everything)
    assert bool(torch.isnan(runner.arenas.tensors[0]).all()), "padding wrote into a block"


def test_a_shortened_model_runs_each_kind_of_layer_and_the_last(workshop: Workshop) -> None:
    layers = workshop.model.model.layers
    runner = workshop.device_runner()
    with workshop.model.shortened():
        assert workshop.model.model.layers == [layers[0], layers[-1]]
        padding_steps(runner, list(eager_shapes(StepLimits(2, 8, 9), largest_captured=0)))
    assert workshop.model.model.layers is layers


def test_a_stub_model_steps_like_the_whole_one_with_weights_that_nothing_filled(checkpoint: Path) -> None:
    workshop = Workshop(checkpoint)
    kept = workshop.model
    workshop.model = stub_model(workshop.config, device="cpu")
    indexes = [layer.self_attn.place.index for layer in workshop.model.model.layers]  # type: ignore[attr-defined]
    assert indexes == [0, len(kept.model.layers) - 1]
    runner = workshop.device_runner()
    runner.arenas.tensors[0].zero_()
    padding_steps(runner, list(eager_shapes(StepLimits(2, 8, 9), largest_captured=0)))


def test_a_profile_run_runs_every_size_and_gives_the_peaks_of_the_largest(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list(CudaShapes(LIMITS, max_tokens=32).in_capture_order())
    ran: list[StepShape] = []
    at: list[int] = []  # how many sizes had been run when each measurement began

    def peak_bytes(work: Callable[[], object]) -> int:
        at.append(len(ran))
        work()
        return 100 + ran[-1].num_tokens

    inner = CudaStep.run

    def watched(step: CudaStep, shape: StepShape, ranks: RankRows | None = None) -> torch.Tensor:
        ran.append(shape)
        return inner(step, shape, ranks)

    def make_runner() -> ModelRunner:
        runner = workshop.device_runner()
        runner.arenas.tensors[0].zero_()
        return runner

    monkeypatch.setattr(CudaStep, "run", watched)
    memory = ProfileRun(make_runner, sizes, peak_bytes, LIMITS).run()
    assert {*sizes, *eager_shapes(LIMITS, largest_captured=32)} <= set(ran)
    assert (ran[at[1]].num_tokens, ran[at[2]]) == (MAX_TOKENS, sizes[0])
    assert ran[0].num_tokens == MAX_TOKENS // MAX_NUM_SEQS * MAX_NUM_SEQS
    assert memory == StepMemory(
        step_bytes=100 + MAX_TOKENS, captured_bytes=100 + sizes[0].num_tokens, num_captured=len(sizes)
    )


def cuda_step(runner: ModelRunner) -> CudaStep:
    assert isinstance(runner.step, CudaStep)
    return runner.step


def test_a_runner_is_gone_when_nobody_has_it(workshop: Workshop) -> None:
    """Memory is measured right after a profile run, whose memory must not wait for the garbage collector."""
    gc.disable()
    try:
        runner = workshop.device_runner()
        largest_step(runner)
        logits = weakref.ref(cuda_step(runner).logits)
        del runner
        assert logits() is None
    finally:
        gc.enable()


def test_blocks_get_what_the_step_and_the_graphs_leave_of_the_share() -> None:
    gib = 1 << 30
    memory = StepMemory(step_bytes=10 * gib, captured_bytes=gib, num_captured=64)

    def budget_of(share: float) -> KVBudget:
        config = EngineConfig(model="m", gpu_memory_utilization=share)
        gpu = GpuMemory(total_bytes=100 * gib, used_bytes=20 * gib, step_bytes=memory.num_bytes)
        return kv_budget(config, gpu)

    assert budget_of(0.9).num_bytes == 70 * gib - memory.num_bytes
    assert 11 * gib < memory.num_bytes < 12.5 * gib
    assert budget_of(0.2).num_bytes == 0
    assert budget_of(0.9).setting == "gpu_memory_utilization"
