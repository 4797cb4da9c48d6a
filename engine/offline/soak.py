"""A soak test: an engine under load for hours must answer every request, keep to its memory, and free all of it.

Requests have all lengths and sampling features; some are aborted, some share prefixes. More are open than the engine
has rows or blocks for, so that it preempts. After the last one, everything must be free again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import EngineConfig
from ..core.messages import EngineRequest, FinishReason
from ..core.sampling import SamplingParams
from ..startup.build import Engine, build_engine
from ..startup.model_config import fetch_models

ABORTED_SHARE = 0.05
SHARED_SHARE = 0.3  # of prompts that begin like an earlier one
OPEN_PER_ROW = 1.5
LONGEST_OUTPUT = 1024
PROGRESS_S = 10.0


class SoakFailed(RuntimeError):
    """The engine failed the test: a request got an error, memory was not freed, or a kernel was compiled late."""


def soak(
    model: str,
    *,
    seconds: float,
    seed: int = 0,
    engine_args: Mapping[str, Any] | None = None,
    progress: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Run random requests for `seconds`, then finish the open ones. Returns counts and bytes.

    `clock` is read once a step.

    `peak_memory` is the most memory of the device in use by all processes (0 on a CPU), `memory_limit` the limit that
    `gpu_memory_utilization` sets. Raises `SoakFailed`.
    """
    config = fetch_models(EngineConfig.from_args({"model": model, **(engine_args or {})}))
    engine = build_engine(config)
    load = _Load(engine, config, seed)
    start = reported_s = clock()
    while (now := clock()) - start < seconds:
        load.keep_open(int(OPEN_PER_ROW * engine.core.config.max_num_seqs))
        load.step()
        if progress and now - reported_s > PROGRESS_S:
            reported_s = now
            print(f"{now - start:.0f} s: {load.summary()}", flush=True)
    while load.open:
        load.step()
    stats = engine.core.stats()
    if stats.num_blocks_free != stats.num_blocks:
        raise SoakFailed(f"{stats.num_blocks - stats.num_blocks_free} of {stats.num_blocks} blocks were not given back")
    if stats.num_late_compilations:
        raise SoakFailed(f"{stats.num_late_compilations} kernels were compiled after the engine was ready")
    return {"elapsed_time": clock() - start, "seed": seed, **load.summary()}


class _Load:
    """The client's side: the open requests, and counts of ended ones."""

    def __init__(self, engine: Engine, config: EngineConfig, seed: int) -> None:
        self.open: set[str] = set()
        self._engine = engine
        self._random = random.Random(seed)
        self._longest = engine.core.config.max_length - 1
        self._prompts: list[list[int]] = []  # the newest, with which others may begin
        self._counts = dict.fromkeys(("completed", "aborted", "input_tokens", "output_tokens"), 0)
        self._memory = _DeviceMemory(engine.region.device, config.gpu_memory_utilization)

    def keep_open(self, count: int) -> None:
        while len(self.open) < count:
            request = self._request(f"soak-{sum(self._counts.values())}-{self._random.getrandbits(48):x}")
            self.open.add(request.request_id)
            self._engine.core.add(request)
            self._counts["input_tokens"] += len(request.prompt_token_ids)
        if self._random.random() < ABORTED_SHARE:
            self._engine.core.abort(self._random.choice(sorted(self.open)))

    def step(self) -> None:
        """Run one step. Raises `SoakFailed` if a request is answered with an error."""
        for output in self._engine.core.step():
            self._counts["output_tokens"] += len(output.token_ids)
            if output.finish_reason is None:
                continue
            if output.error is not None:
                raise SoakFailed(f"{output.request_id}: {output.error.text}")
            self.open.remove(output.request_id)
            self._counts["aborted" if output.finish_reason is FinishReason.ABORT else "completed"] += 1
        self._memory.look()

    def summary(self) -> dict[str, int]:
        stats = self._engine.core.stats()
        return {
            **self._counts,
            "num_steps": stats.num_steps,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "peak_memory": self._memory.peak,
            "memory_limit": self._memory.limit,
        }

    def _request(self, request_id: str) -> EngineRequest:
        rng, vocab_size = self._random, self._engine.model_config.vocab_size
        prompt = [rng.randrange(vocab_size) for _ in range(self._length(self._longest))]
        if self._prompts and rng.random() < SHARED_SHARE:
            earlier = rng.choice(self._prompts)
            prompt = (earlier[: rng.randrange(1, len(earlier) + 1)] + prompt)[: self._longest]
        self._prompts = [*self._prompts[-7:], prompt]
        output_len = self._length(min(LONGEST_OUTPUT, self._longest + 1 - len(prompt)))
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=self._sampling(output_len, vocab_size),
            seed=rng.getrandbits(32),
            priority=rng.choice((0, 0, 0, 1)),
            arrival_s=time.time(),
        )

    def _length(self, longest: int) -> int:
        """Return a random length. Every order of magnitude is equally likely."""
        return min(longest, int(math.exp(self._random.uniform(0, math.log(longest + 1)))))

    def _sampling(self, output_len: int, vocab_size: int) -> SamplingParams:
        rng = self._random
        features: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"top_k": 20, "top_p": 0.9},
            {"min_p": 0.1},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
            {"logprobs": 5},
            {"logit_bias": {rng.randrange(vocab_size): 5.0}},
            {"bad_words_token_ids": [[rng.randrange(vocab_size), rng.randrange(vocab_size)]]},
            {"allowed_token_ids": [rng.randrange(vocab_size) for _ in range(8)]},
        ]
        chosen = features[0] if rng.random() < 0.7 else rng.choice(features)
        return SamplingParams(max_tokens=output_len, min_tokens=rng.randrange(output_len + 1), **chosen)


class _DeviceMemory:
    """Used memory of the whole device, by the driver's count. On a CPU all figures are 0."""

    def __init__(self, device: str, utilization: float) -> None:
        self._device = device
        self.peak = self.limit = 0
        if device != "cpu":
            self.limit = int(utilization * self._free_and_total()[1])
        self.look()

    def look(self) -> None:
        if self._device != "cpu":
            free, total = self._free_and_total()
            self.peak = max(self.peak, total - free)

    def _free_and_total(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info(self._device)
