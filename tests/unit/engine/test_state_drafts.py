"""Drafts in models with recurrent states: answers and logprobs are exactly those of an engine without drafts.

The drafter knows the answers, and errs in a given share of drafts. Checkpoints are close together, so that answers
pass several.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.layout import draft_places
from baton.engine.core.messages import EngineOutput, EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.speculation.config import SpeculativeConfig, make_drafter
from baton.engine.layers.decoder import CausalLM
from baton.engine.models import load_config, load_model
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.offline.llm import LLM
from baton.engine.startup import build
from baton.engine.startup.arenas import draft_bytes
from baton.engine.startup.kv_cache import allocate_draft_inputs, allocate_on_cpu
from baton.engine.startup.kv_size import kv_budget
from baton.engine.startup.memory import CpuMemory
from baton.engine.worker import inputs
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits
from baton.engine.worker.tables import CacheArenas
from baton.kernels.linear.cpu import pack
from baton.kernels.state_batch import StateBatch

from ...helpers.at_once import make_masks_at_once
from ...helpers.checkpoints import write_checkpoint
from ...helpers.inline_stream import InlineStream
from ...helpers.kv_memory import allocate_kv
from ...helpers.paged import random_tokens
from .narrow_grammars import NarrowGrammars, with_grammars
from .random_workload import live, random_requests
from .small_engines import hybrid_config

LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, max_drafts=4)
CHECKPOINTS = 32  # tokens apart
# A row's products must not depend on the number of rows: torch's do, without the C++ kernels.
IN_PANELS = pack(torch.zeros(32, 2, dtype=torch.bfloat16)) is not None
ROWS_APART = pytest.mark.skipif(not IN_PANELS, reason="needs the C++ kernels")
FAMILIES = ["qwen3_5_text", "kimi_linear", "nemotron_h", "falcon_h1", "bamba", "granitemoehybrid", "olmo_hybrid"]


@dataclass
class Engines:
    """Engines of one tiny model. Memory starts as NaN, so that reading an unwritten block or slot shows."""

    model: CausalLM

    def core(
        self,
        kind: str = "cpu",
        drafting: Drafting | None = None,
        *,
        num_blocks: int = 100,
        num_slots: int = 60,
        depth: int = 1,
        captured_tokens: int = 0,
    ) -> EngineCore:
        config = self.model.config
        tokens, states = config.caches.groups
        arenas = [
            allocate_kv(tokens.blocks, num_blocks).fill_(float("nan")),
            allocate_kv(states.blocks, num_slots).fill_(0xFF),
        ]
        limits = LIMITS if drafting is not None else replace(LIMITS, max_drafts=0)
        backend: CpuBackend | CudaBackend = CpuBackend(CpuShapes(limits))
        if kind == "cuda":
            backend = CudaBackend(InlineStream(), CudaShapes(limits, max_tokens=captured_tokens), torch.float32)
        places = allocate_draft_inputs(allocate_on_cpu, config, limits, 0, 1)
        for each in places.values():
            each.fill_(0xFF)
        caches = CacheArenas(arenas, draft_inputs=places, checkpoint_tokens=CHECKPOINTS)
        runner = ModelRunner(self.model, caches, backend, limits, config.vocab_size)
        if captured_tokens:
            runner.capture()
        core_config = hybrid_config(config, limits, num_blocks, num_slots, CHECKPOINTS, depth=depth)
        core = EngineCore(Scheduler(core_config, drafting=drafting, grammars=NarrowGrammars()), runner)
        make_masks_at_once(core)
        return core

    def knowing(
        self,
        expected: Answers,
        requests: Sequence[EngineRequest],
        errors: float,
        kind: str,
        *,
        may_differ: bool = False,
    ) -> Drafting:
        whole = {each.request_id: each.prompt_token_ids + expected[each.request_id].tokens for each in requests}
        drafter = InformedDrafter(
            lambda request_id, _: whole[request_id], 1 - errors, self.model.config.vocab_size, may_differ=may_differ
        )
        return Drafting(drafter, LIMITS.max_drafts, adapts=False, edits_on_host=kind == "cuda")


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    end: object


Answers = dict[str, Answer]


def answers_of(core: EngineCore, requests: Sequence[EngineRequest]) -> Answers:
    outputs: dict[str, list[EngineOutput]] = {}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return {
        name: Answer(
            [token for output in parts for token in output.token_ids],
            [entry.logprobs[0] for output in parts if output.logprobs for entry in output.logprobs],
            parts[-1].finish_reason,
        )
        for name, parts in outputs.items()
    }


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda family: write_checkpoint(tmp_path_factory.mktemp("drafts") / family, family))


@pytest.fixture(scope="module")
def engines_of(folder_of: Callable[[str], Path]) -> Callable[..., Engines]:
    def make(family: str, dtype: str = "float32") -> Engines:
        return Engines(load_model(load_config(folder_of(family), dtype=dtype)))

    return functools.cache(make)


def check_drafts(core: EngineCore, errors: float, at_least: int = 10) -> None:
    speculation = core.stats().speculation
    assert speculation is not None
    assert speculation.num_drafts > at_least
    if errors in (0.0, 1.0):
        assert speculation.acceptance_rate == 1 - errors


def check_close(ours: Answers, theirs: Answers) -> None:
    """Check that answers are the same except for the order of sums, as prompts were cut at other places."""
    assert ours.keys() == theirs.keys()
    for name, answer in ours.items():
        assert (answer.tokens, answer.end) == (theirs[name].tokens, theirs[name].end)
        assert answer.logprobs == pytest.approx(theirs[name].logprobs, abs=1e-4)


def short_prompts() -> list[EngineRequest]:
    """Return as many requests as there are rows; each prompt fits into one step: drafts cannot change its cuts."""
    lens = [1, 3, 5, 7, 9, 11, 13, 15]
    params = [
        msgspec.structs.replace(each.sampling, logprobs=2) for each in random_requests(random.Random(7), len(lens))
    ]
    hot = SamplingParams(temperature=1.5, max_tokens=90, ignore_eos=True, logprobs=2)
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=random_tokens(length, seed=length),
            sampling=params[number] if number % 2 else hot,
            seed=number,
        )
        for number, length in enumerate(lens)
    ]


@pytest.mark.exhaustive
@ROWS_APART
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("errors", "depth"), [(0.0, 1), (0.3, 2), (1.0, 2)])
def test_answers_are_those_without_drafts_to_the_bit(
    engines_of: Callable[..., Engines], family: str, errors: float, depth: int
) -> None:
    engines, requests = engines_of(family, "bfloat16"), short_prompts()
    expected = answers_of(engines.core(), requests)
    core = engines.core(drafting=engines.knowing(expected, requests, errors, "cpu"), depth=depth)
    assert answers_of(core, requests) == expected
    check_drafts(core, errors)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("errors", "depth"), [(0.0, 1), (0.3, 2), (1.0, 2)])
def test_random_requests_are_answered_as_without_drafts_and_again_from_checkpoints(
    engines_of: Callable[..., Engines], family: str, errors: float, depth: int
) -> None:
    engines, requests = engines_of(family), random_requests(random.Random(5), 14)
    expected = answers_of(engines.core(), requests)
    core = engines.core(drafting=engines.knowing(expected, requests, errors, "cpu"), depth=depth)
    for _ in range(2):
        check_close(answers_of(core, requests), expected)
    check_drafts(core, errors)
    assert core.stats().prefix_cache_hits > 4 * CHECKPOINTS


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(14, 60), (100, 3), (14, 4)])
def test_requests_that_are_preempted_and_slots_that_go_from_one_to_another_change_nothing(
    engines_of: Callable[..., Engines], family: str, depth: int, num_blocks: int, num_slots: int
) -> None:
    engines, requests = engines_of(family), random_requests(random.Random(7), 14)
    expected = answers_of(engines.core(), requests)
    drafting = engines.knowing(expected, requests, 0.2, "cpu")
    core = engines.core(drafting=drafting, depth=depth, num_blocks=num_blocks, num_slots=num_slots)
    for _ in range(2):
        check_close(answers_of(core, requests), expected)
    check_drafts(core, 0.2)
    assert (core.stats().num_preemptions > 0) == (num_blocks < 20)
    assert core.stats().num_blocks_free == num_blocks + num_slots


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_at_any_time_and_are_aborted_leave_nothing_behind(
    engines_of: Callable[..., Engines], kind: str, seed: int
) -> None:
    engines, requests = engines_of("qwen3_5_text"), random_requests(random.Random(seed), 14)
    expected = answers_of(engines.core(), requests)
    drafting = engines.knowing(expected, requests, 0.2, kind)
    core = engines.core(kind, drafting, num_blocks=20, num_slots=7, depth=2, captured_tokens=32)
    drawn: dict[str, list[int]] = {each.request_id: [] for each in requests}
    for outputs in live(core, seed):
        for output in outputs:
            drawn[output.request_id] += output.token_ids
    for name, tokens in drawn.items():
        assert tokens == expected[name].tokens[: len(tokens)]
    assert core.stats().num_blocks_free == 27


@pytest.mark.exhaustive
@ROWS_APART
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
@pytest.mark.parametrize("errors", [0.0, 0.3])
def test_a_checkpoint_that_was_passed_with_drafts_is_that_of_a_run_without(
    engines_of: Callable[..., Engines], family: str, errors: float
) -> None:
    """Requests run one by one: each begins after a checkpoint that the previous answer has left."""
    engines = engines_of(family, "bfloat16")
    sampling = SamplingParams(temperature=1.5, max_tokens=50, ignore_eos=True, logprobs=1)
    tokens, expected, plain = random_tokens(20), [], engines.core()
    for number in range(3):
        request = EngineRequest(request_id=str(number), prompt_token_ids=tokens, sampling=sampling, seed=number)
        expected.append((request, answers_of(plain, [request])[str(number)]))
        tokens = [*tokens, *expected[-1][1].tokens[:-1]]
    known = {request.request_id: answer for request, answer in expected}
    core = engines.core(drafting=engines.knowing(known, [each for each, _ in expected], errors, "cpu"))
    for request, answer in expected:
        assert answers_of(core, [request]) == {request.request_id: answer}
    assert core.stats().prefix_cache_hits == plain.stats().prefix_cache_hits > 2 * CHECKPOINTS
    check_drafts(core, errors)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "nemotron_h"])
@pytest.mark.parametrize("captured_tokens", [0, 32])
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(100, 60), (26, 9)])
def test_steps_of_a_gpu_answer_the_same(
    engines_of: Callable[..., Engines], family: str, captured_tokens: int, num_blocks: int, num_slots: int
) -> None:
    engines, requests = engines_of(family), with_grammars(random_requests(random.Random(5), 14))
    expected = answers_of(engines.core(), requests)
    core = engines.core(
        "cuda",
        engines.knowing(expected, requests, 0.3, "cuda"),
        num_blocks=num_blocks,
        num_slots=num_slots,
        depth=2,
        captured_tokens=captured_tokens,
    )
    check_close(answers_of(core, requests), expected)
    check_drafts(core, 0.3, at_least=3)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "speculation", [{"method": "ngram", "prompt_lookup_max": 2}, {"method": "suffix"}], ids=["ngram", "suffix"]
)
@pytest.mark.parametrize(
    "args",
    [
        {"max_num_batched_tokens": 16},
        {"async_scheduling": True, "enable_prefix_caching": False},
        {"async_scheduling": True, "num_gpu_blocks_override": 16},
    ],
    ids=["chunked", "two in flight", "preempted"],
)
def test_drafts_of_the_engines_own_drafters_change_nothing(
    folder_of: Callable[[str], Path],
    speculation: dict[str, Any],
    args: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        return None if config is None else Drafting(make_drafter(config), config.num_speculative_tokens, adapts=False)

    monkeypatch.setattr(build, "make_drafting", make)
    prompts = [random_tokens(length, seed=length) * 2 for length in (1, 15, 30)]
    hot = SamplingParams(temperature=1.5, seed=7, max_tokens=60, ignore_eos=True)
    params = [msgspec.structs.replace(hot, temperature=0.0), hot, msgspec.structs.replace(hot, temperature=0.3)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts for _ in params]
    sampling = [each for _ in prompts for each in params]
    shared = {"model": str(folder_of("qwen3_5_text")), "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8}
    config = speculation | {"num_speculative_tokens": 4}
    with (
        LLM(**shared, dtype="float32") as plain,
        LLM(**shared, dtype="float32", speculative_config=config, **args) as llm,
    ):
        expected = [output.outputs[0].token_ids for output in plain.generate(inputs, sampling, use_tqdm=False)]
        predicted = [{**each, "prediction": answer} for each, answer in zip(inputs, expected, strict=True)]
        for asked in (inputs, predicted):
            outputs = llm.generate(asked, sampling, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        stats = llm.engine.core.stats()
    assert stats.speculation is not None
    assert stats.speculation.num_accepted_tokens > 10
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in args)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_one_draft_too_many_or_too_few_in_a_replay_shows(
    engines_of: Callable[..., Engines], family: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the equalities above really test replays."""
    engines, requests = engines_of(family, "bfloat16"), short_prompts()
    expected = answers_of(engines.core(), requests)
    whole = inputs.replay_states

    def shifted(*tables: Any) -> None:
        whole(*tables)
        states = next(each for each in tables if isinstance(each, StateBatch))
        assert states.replay is not None
        states.replay.counts.add_(shift * (states.replay.counts > 0))

    monkeypatch.setattr(inputs, "replay_states", shifted)
    drafting = engines.knowing(expected, requests, 0.3, "cpu", may_differ=True)
    assert answers_of(engines.core(drafting=drafting), requests) != expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_much_memory_is_planned_for_drafts_as_a_rank_takes(
    folder_of: Callable[[str], Path], family: str, ranks: int
) -> None:
    model = load_config(folder_of(family))
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=LIMITS.max_drafts)
    places = allocate_draft_inputs(allocate_on_cpu, model, LIMITS, ranks - 1, ranks)
    taken = sum(each.numel() for each in places.values())
    assert draft_bytes(model, config, LIMITS.max_num_seqs, ranks) == taken > 0
    assert draft_bytes(model, None, LIMITS.max_num_seqs, ranks) == 0


def test_a_cpu_engine_keeps_its_drafts_within_the_memory_for_blocks() -> None:
    none, some, all_of_it = (
        kv_budget(EngineConfig(model="m"), CpuMemory(free_bytes=1 << 30, num_local=2, draft_bytes=taken)).num_bytes
        for taken in (0, 1 << 20, 1 << 40)
    )
    assert none - some == 1 << 20
    assert all_of_it == 0


def test_places_hold_the_drafts_of_two_steps_and_the_token_between_them() -> None:
    assert [draft_places(drafts) for drafts in (0, 1, 4)] == [0, 3, 9]
