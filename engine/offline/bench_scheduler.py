"""Measures the cost of a scheduler step: `python -m baton.engine.offline.bench_scheduler`.

Steady decode: every request runs and draws one token in each step; none begins or ends. Request lengths are spread over
a block, so in each step one request in `block_size` gets a new block and registers a full one. `plan_step` and `settle`
are timed. A step is planned while another is in flight, as in an engine of depth 2.

With `--starved`, all requests share their prompt, half of them have a lower priority, and the head of the queue waits
for more blocks than these could release.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence

from ..core.config import EngineCoreConfig
from ..core.layout import BLOCK_SIZE
from ..core.messages import EngineRequest
from ..core.sampling import SamplingParams
from ..core.scheduling.scheduler import Scheduler
from ..core.step import ChunkResult, StepPlan, StepResult

VOCAB_SIZE = 32_000


def result_of(plan: StepPlan) -> StepResult:
    """Return a result as a runner would, with tokens that depend only on row and position."""
    return StepResult(
        plan.step,
        [ChunkResult([(chunk.start * 31 + chunk.row) % VOCAB_SIZE] if chunk.samples else []) for chunk in plan.chunks],
    )


def running_scheduler(num_requests: int, prompt_tokens: int, num_steps: int, *, starved: bool = False) -> Scheduler:
    """Return a scheduler whose requests all decode, with `num_steps` steps left. `starved`: see this module."""
    max_tokens = prompt_tokens + BLOCK_SIZE + num_steps + 2
    shared = prompt_tokens // BLOCK_SIZE if starved else 0  # blocks of the prompt that all requests begin with
    num_blocks = shared + num_requests * (-(-max_tokens // BLOCK_SIZE) - shared)
    config = EngineCoreConfig(
        num_blocks=num_blocks,
        max_num_seqs=num_requests + starved,
        max_num_batched_tokens=num_requests * (prompt_tokens + BLOCK_SIZE),
        max_model_len=num_blocks * BLOCK_SIZE if starved else max_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
    )
    scheduler = Scheduler(config)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(num_requests):
        length = prompt_tokens + index % BLOCK_SIZE
        prompt = [(position if starved else index * 7 + position) % VOCAB_SIZE for position in range(length)]
        priority = index % 2 if starved else 0
        scheduler.add(
            EngineRequest(request_id=f"request-{index}", prompt_token_ids=prompt, sampling=sampling, priority=priority)
        )
    if starved:
        while scheduler.waiting:
            settle_one_step(scheduler)
        prompt = [VOCAB_SIZE - 2] * (num_blocks * BLOCK_SIZE - 1)  # all blocks
        scheduler.add(EngineRequest(request_id="head", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1)))
    return scheduler


def settle_one_step(scheduler: Scheduler) -> None:
    plan = scheduler.plan_step()
    assert plan is not None
    scheduler.settle(result_of(plan))


def step_times_s(scheduler: Scheduler, num_steps: int) -> list[tuple[float, float]]:
    """Return the seconds of `plan_step` and of `settle` for each step."""
    times = []
    in_flight: deque[StepResult] = deque()
    for _ in range(num_steps):
        began = time.perf_counter()
        plan = scheduler.plan_step()
        planned = time.perf_counter()
        assert plan is not None
        in_flight.append(result_of(plan))
        if len(in_flight) < scheduler.config.depth:
            continue
        result = in_flight.popleft()
        settling = time.perf_counter()
        scheduler.settle(result)
        times.append((planned - began, time.perf_counter() - settling))
    return times


def measure(num_requests: int, prompt_tokens: int, num_steps: int, *, starved: bool = False) -> dict[str, float]:
    warm_up = 2 * BLOCK_SIZE
    scheduler = running_scheduler(num_requests, prompt_tokens, warm_up + num_steps, starved=starved)
    times = step_times_s(scheduler, warm_up + num_steps)[warm_up:]
    both_ms = [1e3 * (plan + settle) for plan, settle in times]
    return {
        "num_requests": num_requests,
        "num_steps": len(times),
        "median_plan_ms": 1e3 * statistics.median(plan for plan, _ in times),
        "median_settle_ms": 1e3 * statistics.median(settle for _, settle in times),
        "median_step_ms": statistics.median(both_ms),
        "p90_step_ms": statistics.quantiles(both_ms, n=10)[-1],
        "mean_step_ms": statistics.fmean(both_ms),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Cost of a scheduler step (plan and settle) in a steady decode.")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 512], help="numbers of running requests")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--starved", action="store_true", help="the head of the queue waits for blocks all the time")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    rows = [measure(count, options.prompt_tokens, options.steps, starved=options.starved) for count in options.requests]
    print(f"{'requests':>8} {'plan ms':>9} {'settle ms':>10} {'step ms':>9} {'p90 ms':>8} {'mean ms':>8}")
    for row in rows:
        print(
            f"{row['num_requests']:>8} {row['median_plan_ms']:>9.3f} {row['median_settle_ms']:>10.3f} "
            f"{row['median_step_ms']:>9.3f} {row['p90_step_ms']:>8.3f} {row['mean_step_ms']:>8.3f}"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
