"""Measures the cost of a scheduler step: `python -m baton.engine.offline.bench_scheduler`.

Steady decode: every request runs and draws one token in each step; none begins or ends. Request lengths are spread over
a block, so in each step one request in `block_size` gets a new block and registers a full one. `plan_step` and `settle`
are timed. A step is planned while another is in flight, as in an engine of depth 2.
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


def running_scheduler(num_requests: int, prompt_tokens: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose requests all decode, with `num_steps` steps left."""
    max_model_len = prompt_tokens + BLOCK_SIZE + num_steps + 2
    config = EngineCoreConfig(
        num_blocks=num_requests * -(-max_model_len // BLOCK_SIZE),
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * (prompt_tokens + BLOCK_SIZE),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[VOCAB_SIZE - 1],
    )
    scheduler = Scheduler(config)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(num_requests):
        length = prompt_tokens + index % BLOCK_SIZE
        prompt = [(index * 7 + position) % VOCAB_SIZE for position in range(length)]
        scheduler.add(EngineRequest(request_id=f"request-{index}", prompt_token_ids=prompt, sampling=sampling))
    return scheduler


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


def measure(num_requests: int, prompt_tokens: int, num_steps: int) -> dict[str, float]:
    warm_up = 2 * BLOCK_SIZE
    scheduler = running_scheduler(num_requests, prompt_tokens, warm_up + num_steps)
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
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(arguments)
    rows = [measure(count, options.prompt_tokens, options.steps) for count in options.requests]
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
