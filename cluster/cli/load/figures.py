"""The figures of a run, under the names of `vllm bench serve`, and the points of its plots.

ttft    from sending the request to its first token
itl     between two consecutive events with tokens; a step may bring several tokens in one event
tpot    (end - first token) / (output tokens - 1)
e2el    from sending the request to its last token
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from baton.engine.core.speculation.stats import NO_DRAFTS, DraftCounts, SpeculationStats

from .options import GOALS, METRICS, ServeLoad

PLOT_POINTS = 401  # quantiles of each distribution that are kept for plots
PLOT_BUCKETS = 60  # approximate number of time buckets
DATE = "%Y%m%d-%H%M%S"
PLOTS = "plots"  # key under which a result has the points of its plots
DETAILS = (  # keys of the lists with one value a request
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "request_errors"),
)


@dataclass
class MeasuredRequest:
    """A request as its client measured it, in seconds."""

    start_s: float = 0.0  # since the start of the run
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)  # by stamp, from the server's timeline
    drafts: DraftCounts = NO_DRAFTS  # checked by engines for this request, from the server's timeline
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens after the first one; None for an answer of one token."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def summary(load: ServeLoad, model: str, answers: Sequence[MeasuredRequest], duration_s: float) -> dict[str, Any]:
    """Return a run's figures. Names of times end in `_ms`; the mean of no values is 0."""
    good = [answer for answer in answers if not answer.error]
    output_tokens = sum(answer.output_tokens for answer in good)
    input_tokens = sum(answer.input_tokens for answer in good)
    result: dict[str, Any] = {
        **load.facts,  # first, so that no name given by the user replaces a measured figure
        "date": datetime.now().strftime(DATE),
        "model_id": model,
        "label": load.label,
        "backend": str(load.backend),
        "dataset_name": str(load.dataset_name),
        "num_prompts": len(answers),
        "request_rate": load.rate or "inf",
        "burstiness": load.burstiness if math.isfinite(load.burstiness) else "inf",
        "max_concurrency": load.max_concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
    }
    if goals := load.goals_ms:
        reached = [answer for answer in good if all(_ms(answer, name) <= most for name, most in goals.items())]
        result["request_goodput"] = len(reached) / duration_s
    samples = _samples(good)
    for name in METRICS:
        result |= _figures(name, samples[name], load.percentiles if name in load.percentile_figures else ())
    if load.timeline:
        result["median_parts_ms"] = _median_parts_ms(good)
        result |= _acceptance(good)
    result["errors"] = sorted({answer.error for answer in answers if answer.error})
    if load.save_detailed:
        result |= _details(answers)
    return result | {PLOTS: _plots(good, samples, duration_s)}


def save(result: dict[str, Any], load: ServeLoad) -> Path:
    """Write a result to the file that `--save-result` or `--append-result` asks for, and return its path.

    The default name is that of `vllm bench serve`: rate, model and time. Raises `OSError`.
    """
    run = result.get("runs", [result])[-1]
    if load.ramp_up_strategy is not None:
        pace = f"ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps:g}qps-{load.ramp_up_end_rps:g}qps"
    else:
        pace = f"{load.rate or math.inf:g}qps"
    limit = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    model = run["model_id"].rstrip("/").rpartition("/")[2]
    name = f"{load.label or load.backend}-{pace}{limit}-{model}-{run['date']}.json".replace("/", "_")
    file = (load.result_dir or Path()) / (load.result_filename or name)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a" if load.append_result else "w") as stream:
        stream.write(json.dumps(result) + "\n")
    return file


def printed(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result as it is printed: without the points of plots and without each request's times."""
    shown = {key: value for key, value in result.items() if key not in (PLOTS, *DETAILS)}
    return shown | {"runs": [printed(run) for run in result["runs"]]} if "runs" in result else shown


def _ms(answer: MeasuredRequest, metric: str) -> float:
    seconds = dict(zip(GOALS, (answer.ttft_s, answer.tpot_s or 0.0, answer.latency_s), strict=True))
    return 1000 * seconds[metric]


def _samples(answers: Sequence[MeasuredRequest]) -> dict[str, list[float]]:
    """Return all values of each metric, in seconds."""
    return {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers if answer.tpot_s is not None],
        "itl": [seconds for answer in answers for seconds in answer.itl_s],
        "e2el": [answer.latency_s for answer in answers],
    }


def _figures(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = sorted(1000 * value for value in seconds) or [0.0]
    figures = {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
    }
    return figures | {f"p{percent:g}_{name}_ms": quantile(values, percent / 100) for percent in percentiles}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated linearly between neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _median_parts_ms(answers: Sequence[MeasuredRequest]) -> dict[str, float]:
    """Return the median of each part of the timeline by its stamp, over all answers.

    A part that an answer lacks counts as 0.
    """
    stamps = dict.fromkeys(stamp for answer in answers for stamp in answer.parts_s)
    return {stamp: 1000 * statistics.median(answer.parts_s.get(stamp, 0.0) for answer in answers) for stamp in stamps}


def _acceptance(answers: Sequence[MeasuredRequest]) -> dict[str, float]:
    """Return the figures of drafts, under the names of `vllm bench serve`; empty if no engine has drafted."""
    drafts = sum((answer.drafts for answer in answers), NO_DRAFTS)
    counted = SpeculationStats(drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens)
    if not counted.num_drafts:
        return {}
    return {
        "spec_decode_num_drafts": counted.num_drafts,
        "spec_decode_draft_tokens": counted.num_draft_tokens,
        "spec_decode_accepted_tokens": counted.num_accepted_tokens,
        "spec_decode_acceptance_rate": 100 * counted.acceptance_rate,
        "spec_decode_acceptance_length": counted.mean_length,
    }


def _details(answers: Sequence[MeasuredRequest]) -> dict[str, Any]:
    """Return each request's times in seconds, named as in `vllm bench serve --save-detailed` where it has them."""
    return {
        "input_lens": [answer.input_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "start_times": [answer.start_s for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itl_s for answer in answers],
        "latencies": [answer.latency_s for answer in answers],
        "request_errors": [answer.error for answer in answers],
    }


def _plots(
    answers: Sequence[MeasuredRequest], samples: dict[str, list[float]], duration_s: float
) -> dict[str, float | list[float]]:
    """Return the points of the report's plots: quantiles of each metric, and rates in time buckets of `bucket_s`."""
    result: dict[str, float | list[float]] = {}
    for name, seconds in samples.items():
        values = sorted(1000 * value for value in seconds)
        steps = range(min(PLOT_POINTS, len(values)))
        result[f"{name}_ms"] = [round(quantile(values, step / max(1, len(steps) - 1)), 4) for step in steps]
    bucket_s = _round_up(max(duration_s, 1e-3) / PLOT_BUCKETS)
    num_buckets = math.ceil(duration_s / bucket_s) or 1
    tokens, starts, busy_s = ([0.0] * num_buckets for _ in range(3))
    for answer in answers:
        starts[min(int(answer.start_s / bucket_s), num_buckets - 1)] += 1
        times = list(_token_times(answer))
        for at_s in times:
            tokens[min(int(at_s / bucket_s), num_buckets - 1)] += answer.output_tokens / len(times)
        for index in range(int(answer.start_s / bucket_s), num_buckets):
            until_s = min((index + 1) * bucket_s, answer.start_s + answer.latency_s)
            if (part_s := until_s - max(index * bucket_s, answer.start_s)) <= 0:
                break
            busy_s[index] += part_s
    return result | {
        "bucket_s": bucket_s,
        "output_tokens_per_s": [round(count / bucket_s, 3) for count in tokens],
        "requests_per_s": [round(count / bucket_s, 3) for count in starts],
        "requests_in_flight": [round(seconds / bucket_s, 3) for seconds in busy_s],
    }


def _token_times(answer: MeasuredRequest) -> Iterator[float]:
    """Yield the time of each event with tokens, in seconds since the start of the run."""
    at_s = answer.start_s + answer.ttft_s
    yield at_s
    for seconds in answer.itl_s:
        at_s += seconds
        yield at_s


def _round_up(value: float) -> float:
    """Return the next number that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))
