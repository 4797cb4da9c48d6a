"""Requests that share prefixes, and arguments of an engine that cannot hold all of them."""

from __future__ import annotations

import random

from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SamplingParams

ENGINE_ARGS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,  # long prompts run in chunks
}
FEW_BLOCKS, MANY_BLOCKS = 18, 400
Tokens = dict[str, list[int]]


def a_batch(count: int = 15, max_tokens: int = 20) -> list[EngineRequest]:
    """Return requests that share prefixes, and need more blocks than the engine has."""
    rng = random.Random(1)
    stems = [[rng.randrange(3, 256) for _ in range(70)] for _ in range(5)]
    return [
        EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=[*stems[number % 5][: 30 + 5 * (number % 9)], number + 3],
            sampling=SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=True),
            seed=number,
            cache_salt="mine" if number % 7 == 0 else "",
        )
        for number in range(count)
    ]
