"""Measurements of an engine without a server. Results have the keys of `vllm bench`, so that one script reads both.

Each function builds an engine of the model with `engine_args` (those of `EngineConfig`), and returns plain data.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.sampling import SamplingParams

if TYPE_CHECKING:
    from .llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
_STARTUP_TIMEOUT_S = 600.0
REFUSAL = "refusal"  # key of a message in the output of a process that starts an engine


class StartupFailed(RuntimeError):
    """A process that should have started an engine ended, or took too long. The message has the end of its output."""


@dataclass(frozen=True)
class RandomBatch:
    """Prompts of random tokens. Lengths are in tokens, and exact."""

    num_prompts: int
    input_len: int
    output_len: int
    seed: int = 0


def throughput(
    model: str,
    batch: RandomBatch,
    *,
    engine_args: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run all prompts at once. Returns requests and tokens per second."""
    llm = engine_for(model, engine_args)
    _run(llm, random_prompts(llm, replace(batch, num_prompts=1, seed=batch.seed + 1)), min(batch.output_len, 8))
    elapsed_s = _run(llm, random_prompts(llm, batch), batch.output_len, progress)
    output_tokens = batch.num_prompts * batch.output_len
    total_tokens = batch.num_prompts * batch.input_len + output_tokens
    return {
        "elapsed_time": elapsed_s,
        "num_requests": batch.num_prompts,
        "total_num_tokens": total_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": batch.num_prompts / elapsed_s,
        "tokens_per_second": total_tokens / elapsed_s,
        "output_throughput": output_tokens / elapsed_s,
    }


def latency(
    model: str,
    batch: RandomBatch,
    *,
    num_iters_warmup: int = 2,
    num_iters: int = 10,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the seconds of one batch, prefill included. The prefix cache is off by default."""
    llm = engine_for(model, {"enable_prefix_caching": False, **(engine_args or {})})
    prompts = random_prompts(llm, batch)
    for _ in range(num_iters_warmup):
        _run(llm, prompts, batch.output_len)
    latencies = [_run(llm, prompts, batch.output_len) for _ in range(num_iters)]
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
    }


def startup(
    model: str,
    *,
    num_iters_cold: int = 1,
    num_iters_warm: int = 3,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the seconds from the first import to an engine that is ready, each time in a new process.

    Cold starts find no compiled kernels. `warm_startup_phases` has the mean seconds of each phase of warm starts.
    Raises `ValueError` for no start at all, or for what `LLM` refuses; `StartupFailed` if a process
    fails otherwise.
    """
    if not num_iters_cold and not num_iters_warm:
        raise ValueError("num_iters_cold and num_iters_warm are both 0: there is nothing to measure")
    args = {"model": model, **(engine_args or {})}
    cold = [_start_once(args, cold=True) for _ in range(num_iters_cold)]
    warm = [_start_once(args, cold=False) for _ in range(num_iters_warm)]
    result: dict[str, Any] = {}
    for name, runs in (("cold", cold), ("warm", warm)):
        times = [run["total_startup_time"] for run in runs]
        if times:
            result[f"avg_{name}_startup_time"] = sum(times) / len(times)
            result[f"{name}_startup_times"] = times
            result[f"{name}_startup_percentiles"] = percentiles(times)
    if warm:
        result["warm_startup_phases"] = {
            phase: sum(run["phases"][phase] for run in warm) / len(warm) for phase in warm[0]["phases"]
        }
    return result


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return percentiles by percent, interpolated linearly. `values` must not be empty."""
    ordered = sorted(values)
    found = {}
    for percent in PERCENTILES:
        place = (len(ordered) - 1) * percent / 100
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        found[str(percent)] = ordered[below] + (ordered[above] - ordered[below]) * (place - below)
    return found


def engine_for(model: str, engine_args: Mapping[str, Any] | None) -> LLM:
    """Return an `LLM` without a tokenizer, which takes token ids."""
    from .llm import LLM  # loads torch, which a command that only prints its help does not need

    return LLM(model, **{"skip_tokenizer_init": True, **(engine_args or {})})


def random_prompts(llm: LLM, batch: RandomBatch) -> list[list[int]]:
    """Return the token ids of the batch's prompts.

    Raises `ValueError` for requests that max_model_len would cut off: fewer tokens would be generated than counted.
    """
    longest = llm.engine.core.config.max_model_len
    if batch.input_len + batch.output_len > longest:
        raise ValueError(
            f"prompts of {batch.input_len} tokens with answers of {batch.output_len} are longer than max_model_len, "
            f"{longest}: give less input_len or output_len"
        )
    rng = random.Random(batch.seed)
    vocab_size = llm.engine.model_config.vocab_size
    return [[rng.randrange(vocab_size) for _ in range(batch.input_len)] for _ in range(batch.num_prompts)]


def _run(llm: LLM, prompts: list[list[int]], output_len: int, progress: bool = False) -> float:
    """Return the seconds that the batch takes. No token ends a request early."""
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=progress)
    return time.perf_counter() - start


def _start_once(args: Mapping[str, Any], cold: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty_cache:
        caches = {"XDG_CACHE_HOME": empty_cache, "TRITON_CACHE_DIR": str(Path(empty_cache, "triton"))} if cold else {}
        environment = {**os.environ, **caches}
        command = [sys.executable, "-m", __spec__.name, json.dumps(args)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_STARTUP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise StartupFailed(f"no engine after {_STARTUP_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise StartupFailed(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if REFUSAL in result:
        raise ValueError(result[REFUSAL])
    return result


def _main() -> None:
    """Start one engine in this process. Reads arguments as JSON from argv, prints seconds or a refusal as JSON."""
    start = time.perf_counter()
    args = json.loads(sys.argv[1])
    try:
        llm = engine_for(args.pop("model"), args)
    except ValueError as error:
        print(json.dumps({REFUSAL: str(error)}))
        return
    seconds = time.perf_counter() - start
    print(json.dumps({"total_startup_time": seconds, "phases": llm.engine.startup_s}))


if __name__ == "__main__":
    _main()
