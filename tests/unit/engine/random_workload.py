"""Random workloads: requests of every kind arrive, and some are aborted, until the engine is idle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.engine import SamplingParams
from baton.engine.core.engine import EngineCore
from baton.engine.core.messages import EngineOutput, EngineRequest


def random_params(rng: random.Random) -> SamplingParams:
    args: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.3]), "max_tokens": rng.randint(1, 60)}
    choices: dict[str, list[Any]] = {
        "top_k": [5, 40],
        "top_p": [0.5, 0.95],
        "min_p": [0.02],
        "repetition_penalty": [1.3],
        "presence_penalty": [1.5],
        "frequency_penalty": [0.8],
        "min_tokens": [min(6, args["max_tokens"])],
        "stop_token_ids": [[7, 9], list(range(3, 60))],
        "logit_bias": [{5: 3.0, 9: -4.0}, {2: 8.0}],
        "allowed_token_ids": [list(range(2, 90))],
        "bad_words_token_ids": [[[11], [12, 13]]],
        "ignore_eos": [True],
        "logprobs": [0, 3],
        "prompt_logprobs": [0, 2],
    }
    for name, values in choices.items():
        if rng.random() < 0.15:
            args[name] = rng.choice(values)
    return SamplingParams(**args)


def random_requests(rng: random.Random, count: int) -> list[EngineRequest]:
    prefix = [rng.randrange(3, 256) for _ in range(50)]
    return [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=prefix[: rng.choice([0, 0, 33, 48])]
            + [rng.randrange(3, 256) for _ in range(rng.choice([1, 3, 16, 40, 90]))],
            sampling=random_params(rng),
            seed=rng.getrandbits(63),
        )
        for i in range(count)
    ]


def live(core: EngineCore, seed: int) -> Iterator[list[EngineOutput]]:
    """Yield the outputs of each step of an engine that gets random requests, and aborts of some, until it is idle."""
    rng = random.Random(seed)
    waiting = random_requests(rng, 14)
    started: list[str] = []
    while waiting or core.has_work():
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                request = waiting.pop()
                started.append(request.request_id)
                core.add(request)
        if started and rng.random() < 0.03:
            core.abort(rng.choice(started))
        yield core.step()


def same(ours: EngineOutput, theirs: EngineOutput) -> bool:
    """Return True if two outputs are equal but for the last bits of log probabilities, and for times."""
    plain = {"logprobs": None, "prompt_logprobs": None, "ages": None}
    if msgspec.structs.replace(ours, **plain) != msgspec.structs.replace(theirs, **plain):
        return False
    pairs = [
        *zip(ours.logprobs or (), theirs.logprobs or (), strict=True),
        *zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True),
    ]
    return all(
        (a.token_ids, a.rank) == (b.token_ids, b.rank) and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for a, b in pairs
    )
