"""Engines of a group in the processes of a `MemberPool`: the same requests, however the model is divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine import EngineConfig, SamplingParams, build_engine
from baton.engine.core.engine import EngineCore
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats, FinishReason
from baton.engine.parallel import ALONE_MEMBER, Member
from baton.engine.startup.build import follow


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: Logprobs | None
    num_cached_tokens: int


@dataclass(frozen=True)
class Served:
    """One engine's answers, in the order of the requests."""

    answers: list[Answer]
    stats: EngineStats


def engine_config(folder: str, **args: Any) -> EngineConfig:
    small = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 48}
    return EngineConfig.from_args({"model": str(folder), **small, **args})


def requests_of(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[EngineRequest]:
    """Return one request for each prompt, each with a seed of its own."""
    return [
        EngineRequest(request_id=str(i), prompt_token_ids=list(prompt), sampling=params, seed=1234 + i)
        for i, prompt in enumerate(prompts)
    ]


def serve(member: Member, config: EngineConfig, batches: Sequence[Sequence[EngineRequest]]) -> Served | None:
    """Run batches of requests one after another; return the answers on the scheduling rank, None on the other ranks."""
    if member.tp_rank:
        follow(config, member)
        return None
    engine = build_engine(config, member=member)
    answers = [answer for batch in batches for answer in run(engine.core, batch)]
    stats = engine.core.stats()
    engine.close()
    return Served(answers, stats)


def serve_alone(config: EngineConfig, batches: Sequence[Sequence[EngineRequest]]) -> Served:
    served = serve(ALONE_MEMBER, config, batches)
    assert served is not None
    return served


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> list[Answer]:
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while any(not steps or steps[-1].finish_reason is None for steps in outputs.values()):
        for step in core.step():
            assert step.finish_reason is not FinishReason.ERROR, step.error
            outputs[step.request_id].append(step)
    while core.has_work():  # data-parallel ranks with expert parallelism step until all of them are done
        core.step()
    return [_answer(outputs[request.request_id]) for request in requests]


def _answer(steps: Sequence[EngineOutput]) -> Answer:
    prompt_logprobs = next((step.prompt_logprobs for step in steps if step.prompt_logprobs is not None), None)
    return Answer(
        token_ids=[token for step in steps for token in step.token_ids],
        logprobs=[entry for step in steps for entry in step.logprobs or ()],
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=max(step.num_cached_tokens for step in steps),
    )


def logprob_error(ours: Iterable[TokenLogprobs], theirs: Iterable[TokenLogprobs]) -> float:
    """Return the largest difference between the logprobs of the same tokens."""
    return max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(ours, theirs, strict=True))
