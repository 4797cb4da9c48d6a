"""CPU graphs: steps that repeat recorded calls give what the model's Python gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine import LLM, SamplingParams
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.layout import KVLayout
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.step import PendingStep, StepPlan
from baton.engine.layers import mlp
from baton.engine.layers.norm import ResidualStream, RMSNorm
from baton.engine.layers.step_context import GroupCache, rows_at
from baton.engine.worker.backends import CapturedSteps, cpu
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits
from baton.engine.worker.tables import CacheArenas
from baton.kernels import native
from baton.kernels.attention import AttentionRule, paged_attention
from baton.kernels.embedding import embedding
from baton.kernels.linear import pack
from baton.kernels.native.cpu_graph import CpuGraph, Workspace, record
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope_kv import rope_and_cache

from ...helpers.checkpoints import write_checkpoint
from ...helpers.kv_memory import allocate_kv
from .random_workload import live, same

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 200 + 3 for j in range(4 + 9 * i)]} for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=4 + 5 * i, temperature=0.0 if i % 2 else 1.0, seed=i, ignore_eos=True, logprobs=i % 3)
    for i in range(6)
]
IN_PANELS = pack(torch.zeros(32, 32, dtype=torch.bfloat16)).in_panels  # else torch multiplies: not recordable

Answer = tuple[list[int], list[list[float]]]  # tokens, log probabilities


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Answer]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        (list(output.token_ids), [[each.logprob for each in position.values()] for position in output.logprobs or []])
        for output in outputs
    ]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the tokens and sequences of each step that a CPU graph serves."""
    made: list[tuple[int, int]] = []
    replayed: list[CpuGraph] = []
    replay, launch = CpuGraph.replay, ModelRunner.launch

    def noted(graph: CpuGraph, *sizes: int) -> None:
        replayed.append(graph)
        replay(graph, *sizes)

    def counted(runner: ModelRunner, plan: StepPlan) -> PendingStep:
        replayed.clear()
        step = launch(runner, plan)
        if replayed:
            made.append((plan.num_tokens, len(plan.chunks)))
        return step

    monkeypatch.setattr(CpuGraph, "replay", noted)
    monkeypatch.setattr(ModelRunner, "launch", counted)
    return made


def without_graphs(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, **args: object) -> list[Answer]:
    with monkeypatch.context() as patch:
        patch.setattr(CapturedSteps, "fitting", lambda *_, **__: None)
        return answers(make_llm(dtype="bfloat16", **args))


def test_batches_that_shrink_and_grow_give_the_answers_of_steps_without_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]]
) -> None:
    expected = without_graphs(make_llm, monkeypatch)
    llm = make_llm(dtype="bfloat16")
    served.clear()
    monkeypatch.setattr(cpu, "record", None)  # no request may record a graph
    assert answers(llm) == expected
    assert answers(llm) == expected
    if IN_PANELS:
        sizes = {seqs for tokens, seqs in served if tokens == seqs}
        assert sizes == {1, 2, 3, 4, 5, 6}, "some that are recorded, and some that are filled up"
        assert (sum(4 + 9 * i for i in range(6)), 6) in served, "all prompts in one step"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, 32, 100])
def test_chunks_of_prompts_beside_decodes_give_the_answers_of_steps_without_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]], budget: int
) -> None:
    expected = without_graphs(make_llm, monkeypatch, max_num_batched_tokens=budget)
    llm = make_llm(dtype="bfloat16", max_num_batched_tokens=budget)
    served.clear()
    assert answers(llm) == expected
    if IN_PANELS:
        assert any(1 < seqs < tokens for tokens, seqs in served)


def test_a_step_that_wants_more_tokens_than_sequences_can_draw_runs_through_python(
    make_llm: Callable[..., LLM], served: list[tuple[int, int]]
) -> None:
    """For example one with prompt logprobs; the answers of other requests in it do not change."""
    llm = make_llm(dtype="bfloat16", enable_prefix_caching=False)
    expected = answers(llm)
    assert not IN_PANELS or any(tokens > seqs for tokens, seqs in served)
    served.clear()
    asking = SamplingParams(max_tokens=29, temperature=0.0, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found = answers(llm, [*PARAMS[:5], asking])
    assert found == expected
    if IN_PANELS:
        assert all(tokens == seqs for tokens, seqs in served), "the prompts, which ran together, ran through Python"


def test_sizes_that_cannot_be_recorded_go_on_without_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]]
) -> None:
    """For example steps of more sequences than an MLP takes at once: torch joins the slices."""
    expected = answers(make_llm(dtype="bfloat16"))
    served.clear()
    monkeypatch.setattr(mlp, "CPU_SLICE", 3)
    assert answers(make_llm(dtype="bfloat16")) == expected
    if IN_PANELS:
        assert set(served) == {(1, 1), (2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo2", "gemma2", "gemma3_text"])
def test_steps_of_a_model_with_norms_behind_its_layers_are_recorded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]]
) -> None:
    folder = write_checkpoint(tmp_path, kind)

    def make(**args: object) -> LLM:
        return LLM(str(folder), skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=256, **args)

    expected = without_graphs(make, monkeypatch)
    served.clear()
    assert answers(make(dtype="bfloat16")) == expected
    if IN_PANELS:
        assert {seqs for tokens, seqs in served if tokens == seqs} == {1, 2, 3, 4, 5, 6}


def test_a_model_that_needs_torch_goes_on_without_graphs(
    make_llm: Callable[..., LLM], served: list[tuple[int, int]]
) -> None:
    """In float16, products are torch's."""
    llm = make_llm(dtype="float16")
    assert all(tokens for tokens, _ in answers(llm))
    assert not served


# ------------------------------------------------------------------------------------ on any machine


@pytest.mark.parametrize(("before", "behind"), [(True, False), (False, True), (True, True)])
def test_a_residual_stream_is_recorded_wherever_its_norms_are(before: bool, behind: bool) -> None:
    norms = [RMSNorm(32, 1e-6) for _ in range(7)]
    for index, norm in enumerate(norms):
        norm.allocate("cpu", torch.float32)
        norm.weight.data.fill_(1.0 + index / 8)
    hidden = torch.randn(4, 32)

    def run() -> Tensor:
        stream = ResidualStream(hidden, in_place=False)
        for first, block, second in zip(norms[:3], norms[3:6], norms[1:4], strict=True):
            x, _ = stream.read(first if before else None)
            stream.take(block(x), second if behind else None)
        return stream.normed(norms[6])

    expected = run()
    recording = record(run, Workspace(), [4])
    recording.graph.replay(4)
    assert torch.equal(recording.answer, expected)


LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)
HEADS, DIM, VOCAB_SIZE = 2, 32, 256
LAYOUT = KVLayout(model="native", num_layers=1, num_kv_heads=HEADS, head_dim=DIM, dtype="float32")


class NativeModel:
    """One layer of attention between an embedding and a norm: native calls only, which every machine can record."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._qkv = torch.randn(VOCAB_SIZE, 3 * HEADS * DIM, generator=generator)  # of each token
        self._head = torch.randn(HEADS * DIM, VOCAB_SIZE, generator=generator)
        angles = torch.outer(torch.arange(LIMITS.max_model_len), 0.1 ** torch.arange(DIM // 2))
        self._cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self._gain = torch.ones(HEADS * DIM)
        self._rule = AttentionRule(DIM**-0.5)

    def forward(
        self, token_ids: Tensor, caches: Sequence[GroupCache], wanted: Tensor | None, ranks: object = None
    ) -> Tensor:
        (cache,) = caches
        batch, kv = cache.batch, cache.kv
        q, k, v = embedding(token_ids, self._qkv).unflatten(1, (-1, DIM)).split([HEADS] * 3, dim=1)
        q = rope_and_cache(q, k, v, self._cos_sin, kv, 0, batch)
        out = paged_attention(q, kv, 0, batch, self._rule).flatten(1)
        normed = rms_norm(out if wanted is None else rows_at(out, wanted), self._gain, 1e-6)
        assert isinstance(normed, Tensor)
        return normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden @ self._head

    def shortened(self) -> AbstractContextManager[None]:
        return nullcontext()


def native_core(num_blocks: int, *, captured: bool) -> tuple[EngineCore, ModelRunner]:
    """Make an engine of the native model. Its blocks start as NaN, so that reading an unwritten one shows."""
    kv = allocate_kv(LAYOUT, num_blocks).fill_(float("nan"))
    runner = ModelRunner(NativeModel(), CacheArenas([kv]), CpuBackend(CpuShapes(LIMITS)), LIMITS, VOCAB_SIZE)
    if captured:
        runner.capture()
        assert bool(torch.isnan(kv).all()), "recording computes nothing"
    config = EngineCoreConfig(
        num_blocks=num_blocks,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[2],
    )
    return EngineCore(Scheduler(config), runner), runner


@pytest.mark.exhaustive
@pytest.mark.skipif(native.function("baton_rms_norm") is None, reason="no compiler for the native kernels")
@pytest.mark.parametrize("num_blocks", [64, 13])
@pytest.mark.parametrize("seed", range(5))
def test_random_lives_with_graphs_are_those_without(seed: int, num_blocks: int) -> None:
    (ours, runner), (theirs, plain) = (native_core(num_blocks, captured=captured) for captured in (True, False))
    for outputs, expected in zip(live(ours, seed), live(theirs, seed), strict=True):
        assert len(outputs) == len(expected)
        assert all(map(same, outputs, expected)), (outputs, expected)
    assert runner.captured.num_replays > runner.captured.num_eager, "all but scored prompts are replayed"
    assert plain.captured.num_replays == 0
    assert runner.captured.num_replays + runner.captured.num_eager == plain.captured.num_eager
