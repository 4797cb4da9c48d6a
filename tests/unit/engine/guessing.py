"""Engines whose requests always get as many drafts as allowed, made by a drafter on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from baton.engine import LLM, CompletionOutput, EngineConfig, SamplingParams, build_engine
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.speculation.config import make_drafter
from baton.engine.core.speculation.drafter import DeviceDrafter
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.startup import build
from baton.engine.worker.backends import Backend
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.shapes import StepLimits

from ...helpers.inline_stream import InlineStream
from .controls import EVERYTHING, own_seeds
from .copy_connector import Room
from .cores import Engines, answers_of, tokens_and_logprobs
from .handing_off import hand_off, run
from .narrow_grammars import with_grammars

MOST = 3
HOT = SamplingParams(temperature=1.5, seed=77, max_tokens=40, ignore_eos=True, logprobs=2)
LIMITS = StepLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, max_drafts=MOST, guesses_on_device=True
)


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines that are built from now on give requests as many drafts as allowed."""

    def drafting(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        if config is None:
            return None
        return Drafting(
            make_drafter(config),
            config.num_speculative_tokens,
            adapts=False,
            edits_on_host=device == "cuda",
            on_device=config.guesses_on_device,
        )

    monkeypatch.setattr(build, "make_drafting", drafting)


def answers(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[Any]:
    """Return the tokens and the finish reason of each answer; each request has a seed of its own."""
    return [(each.token_ids, each.finish_reason) for each in outputs_of(llm, prompts, params)]


def outputs_of(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[CompletionOutput]:
    results = llm.generate(prompts, own_seeds(params, len(prompts)), use_tqdm=False)
    return [result.outputs[0] for result in results]


def close(ours: Any, theirs: Any) -> bool:
    """Return whether logprobs are of the same tokens, and equal except for the order of sums."""
    return len(ours) == len(theirs) and all(
        mine.keys() == other.keys() and all(abs(mine[key].logprob - other[key].logprob) < 1e-4 for key in mine)
        for mine, other in zip(ours, theirs, strict=True)
    )


def stats_of(llm: LLM) -> SpeculationStats:
    stats = llm.engine.core.stats().speculation
    assert stats is not None
    return stats


def check_same_answers(
    plain: LLM, make: Callable[..., LLM], prompts: Sequence[list[int]], params: SamplingParams, **args: Any
) -> SpeculationStats:
    """Check that an engine made with `args`, which enable drafts, answers as the engine `plain` without drafts.

    Tokens, ends and log probabilities are compared, and all blocks must be free again. Return its statistics.
    """
    expected, drafting = outputs_of(plain, prompts, params), make(**args)
    for _ in range(2):  # the second time, prompts are cached
        for found, undisturbed in zip(outputs_of(drafting, prompts, params), expected, strict=True):
            assert found.token_ids == undisturbed.token_ids
            assert (found.finish_reason, found.stop_reason) == (undisturbed.finish_reason, undisturbed.stop_reason)
            assert close(found.logprobs, undisturbed.logprobs)
    core, stats = drafting.engine.core, stats_of(drafting)
    assert stats.num_draft_tokens > 100
    if "num_gpu_blocks_override" in args:
        assert core.stats().num_preemptions > 0
    assert core.stats().num_blocks_free == core.stats().num_blocks
    return stats


def check_guesses(
    drafting: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    expected_accepted: Callable[[list[int], int, SamplingParams], list[int]],
) -> list[int]:
    """Run requests one by one, and check and return how many drafts were right, by position in their step.

    `expected_accepted` returns the right numbers for one request, given prompt and answer, the prompt's length, and its
    parameters.
    """
    found = []
    for prompt, own in zip(prompts, own_seeds(params, len(prompts)), strict=True):
        (output,) = drafting.generate(prompt, own, use_tqdm=False)
        found.append(expected_accepted([*prompt, *output.outputs[0].token_ids], len(prompt), own))
    expected = [sum(each) for each in zip(*found, strict=True)]
    assert stats_of(drafting).num_accepted_per_pos == expected
    return expected


def check_handed_over(
    plain: LLM, args: dict[str, Any], prompts: Sequence[list[int]], params: SamplingParams
) -> SpeculationStats:
    """Check that a prefill and a decode engine, of which the second has drafts, answer as one engine without.

    The decode engine also continues the second halves of these answers, as if another engine had been lost. Return its
    statistics before that.
    """
    room = Room()
    prefill, decode = (build_engine(EngineConfig.from_args(args), room.connect).core for _ in range(2))
    requests = requests_of(prompts, params)
    found = hand_off(prefill, decode, requests)
    assert found == [token_ids for token_ids, _ in answers(plain, prompts, params)]
    there, here = prefill.stats().speculation, decode.stats().speculation
    assert there is not None
    assert here is not None
    halves = [tokens[: len(tokens) // 2] for tokens in found]
    begun = [msgspec.structs.replace(each, output_token_ids=half) for each, half in zip(requests, halves, strict=True)]
    for outputs, half, tokens in zip(run(decode, begun).values(), halves, found, strict=True):
        assert half + [token for output in outputs for token in output.token_ids] == tokens
    after = decode.stats().speculation
    assert after is not None
    assert after.num_draft_tokens > here.num_draft_tokens
    assert there.num_drafts == 0
    assert here.num_drafts > 20
    return here


def requests_of(prompts: Sequence[list[int]], params: SamplingParams) -> list[EngineRequest]:
    own = own_seeds(params, len(prompts))
    return [
        EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=each, seed=each.seed or 0)
        for i, (prompt, each) in enumerate(zip(prompts, own, strict=True))
    ]


def check_both_backends(
    engines: Engines,
    prompts: Sequence[list[int]],
    *,
    num_blocks: int = 64,
    captured: bool = True,
    depth: int = 2,
    have_grammars: bool = False,
) -> EngineStats:
    """Serve prompts on a CPU by CPU steps and by GPU steps: answers and accepted drafts are the same.

    Answers are those of CPU steps without drafts, too. With grammars, every other request has one: the host drafts for
    these.
    """
    requests = requests_of(prompts, HOT)
    if have_grammars:
        requests = with_grammars(requests)

    def serve(
        backend: Backend, *, has_drafts: bool = True
    ) -> tuple[EngineStats, dict[str, tuple[list[int], list[float]]]]:
        runner = engines.runner(backend, num_blocks)
        if captured:
            runner.capture()
        drafting = None
        if has_drafts:
            drafting = Drafting(DeviceDrafter(), MOST, adapts=False, edits_on_host=True, on_device=True)
        core = engines.core(runner, num_blocks, depth, drafting)
        outputs = answers_of(core, requests)
        return core.stats(), {name: tokens_and_logprobs(each) for name, each in outputs.items()}

    there = CudaBackend(InlineStream(), CudaShapes(LIMITS, max_tokens=32 if captured else 0), torch.float32)
    (stats, found), (plain, drafted) = serve(there), serve(CpuBackend(CpuShapes(LIMITS)))
    _, expected = serve(CpuBackend(CpuShapes(LIMITS)), has_drafts=False)
    assert found.keys() == drafted.keys() == expected.keys()
    for each in (found, drafted):
        for name, (tokens, values) in each.items():
            assert tokens == expected[name][0]
            assert values == pytest.approx(expected[name][1], abs=1e-4)
    assert stats.speculation == plain.speculation
    assert stats.speculation is not None
    assert stats.speculation.num_draft_tokens > 100
    return stats


def check_edited_draws(engines: Engines, prompts: Sequence[list[int]], depth: int) -> SpeculationStats:
    """Serve requests with edited logits by GPU steps on a CPU: answers are those without drafts.

    A draft model never counts more tokens as read than are known, whichever draws were kept.
    """
    requests = requests_of(prompts, msgspec.structs.replace(EVERYTHING, max_tokens=40))
    plain = engines.core(engines.runner(CpuBackend(CpuShapes(LIMITS)), 64), 64, depth=1)
    expected = answers_of(plain, requests)
    runner = engines.runner(CudaBackend(InlineStream(), CudaShapes(LIMITS, max_tokens=32), torch.float32), 64)
    runner.capture()
    drafting = Drafting(DeviceDrafter(), MOST, adapts=False, edits_on_host=True, on_device=True)
    core = engines.core(runner, 64, depth, drafting)
    found: dict[str, list[EngineOutput]] = {}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            found.setdefault(output.request_id, []).append(output)
        computed = runner.tables.computed.tensor[0]
        assert (runner.tables.read.tensor[0, : len(computed)] <= computed + 1).all()
    assert found.keys() == expected.keys()
    for name, outputs in found.items():
        (tokens, values), (plain_tokens, plain_values) = map(tokens_and_logprobs, (outputs, expected[name]))
        assert tokens == plain_tokens
        assert values == pytest.approx(plain_values, abs=1e-4)
    stats = core.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens > 100
    return stats
