"""The autoscaler's decisions: the number of groups of each fleet, as a pure function of measurements.

Gateways report the demand: requests a second, and the tokens of their prompts and answers. The capacity of a group is
measured while it works. The number of groups is:

    prefill   uncached prompt tokens a second / (prompt tokens that a group computes in a busy second x utilization)
    decode    output tokens a second / output tokens a second of a group whose steps take inter_token_s x utilization
              (a straight line fitted to measured steps gives the batch size of such a step)
    unified   does both, so no formula fits: up to twice as many groups if a latency target is missed, one less if
              both latencies are below half of their targets

A group that hardly works has no measured capacity; then one group is enough, unless work waits. So fleets shrink
within about `look_back_period_s` + `downscale_delay_s` of a peak, also if requests still come now and then.

Prefill and decode fleets are both sized by the requests that arrive, so an overloaded prefill fleet does not hide the
demand from the decode fleet. Queues add to the demand. A missed latency target or full KV caches add groups whatever
the formula says. If no request has come for long, a fleet whose minimum is 0 has no group; the first request starts
one in each fleet.

Hysteresis: a fleet grows when every desired size of the last `upscale_delay_s` is above its present size, to the
smallest of them; it shrinks when every desired size of the last `downscale_delay_s` is below, to the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.cluster.contracts import Role, ScalePlan

from .load_samples import FIRST_TOKEN_S, PER_TOKEN_S, FleetLoad, GatewayLoad, Sample, percentile

MIN_WINDOW_S = 2.0  # samples must cover this time before anything is decided
MIN_RECENT_S = 5.0  # the newest rate of arrivals is measured over at least this time
MIN_OBSERVED = 10  # fewer latencies give no percentile
MIN_BUSY_S = 0.2  # less work gives no speed of a group
TOLERANCE = 0.05  # groups by which the demand may exceed a whole number before one more is added
FULL = 0.9  # share of KV blocks in use above which a fleet gets another group
MAX_EXTRAPOLATION = 2.0  # the fitted line is used up to this multiple of the largest measured batch
MAX_BOOST = 2.0  # a missed target multiplies the number of groups at most by this
HALF = 0.5


@dataclass(frozen=True)
class Moment:
    """A sample, and the fleet sizes that were desired at that time."""

    sample: Sample
    desired: Mapping[Role, int]


def desired_sizes(window: Sequence[Sample], plan: ScalePlan) -> dict[Role, int]:
    """Return each fleet's desired size by the samples of the last `look_back_period_s`, oldest first.

    Empty if they cover too little time.
    """
    if not window or window[-1].at_s - window[0].at_s < MIN_WINDOW_S:
        return {}
    return {role: bounds.clip(max(1, SIZE_RULES[role](window, plan))) for role, bounds in plan.fleets.items()}


def decide(history: Sequence[Moment], plan: ScalePlan, now_s: float, current: Mapping[Role, int]) -> dict[Role, int]:
    """Decide the size of each fleet.

    `current` is the last decision; `history` has about one moment a second, oldest first.
    """
    if not history:
        return dict(current)
    if _must_wake(history[-1].sample, current):
        return {role: bounds.clip(max(1, current[role])) for role, bounds in plan.fleets.items()}
    if _may_sleep(history, plan, now_s):
        return {role: bounds.min_replicas for role, bounds in plan.fleets.items()}
    return {role: _settle(history, plan, role, now_s, current[role]) for role in plan.fleets}


def _must_wake(newest: Sample, current: Mapping[Role, int]) -> bool:
    asked = newest.gateways.unplaced > 0 or newest.gateways.inflight > 0
    return asked and any(count == 0 for count in current.values())


def _may_sleep(history: Sequence[Moment], plan: ScalePlan, now_s: float) -> bool:
    """Return whether no request has come for so long that every fleet may go to its minimum."""
    since_s = now_s - plan.downscale_to_zero_delay_s
    gateways = [moment.sample.gateways for moment in history if moment.sample.at_s >= since_s]
    if history[0].sample.at_s > since_s or not gateways:
        return False
    return gateways[-1].requests == gateways[0].requests and all(load.inflight == 0 for load in gateways)


def _settle(history: Sequence[Moment], plan: ScalePlan, role: Role, now_s: float, current: int) -> int:
    """Apply hysteresis to the desired sizes of one fleet."""
    bounds = plan.fleets[role]
    if current == 0:  # only a request starts it again
        return bounds.clip(0)
    up = _desired_since(history, role, now_s - plan.upscale_delay_s)
    if up and min(up) > current:
        return bounds.clip(min(up))
    down = _desired_since(history, role, now_s - plan.downscale_delay_s)
    if down and max(down) < current:
        return bounds.clip(max(1, max(down)))
    return bounds.clip(current)


def _desired_since(history: Sequence[Moment], role: Role, since_s: float) -> list[int]:
    """Return the desired sizes since then; empty if they are not known for all of that time."""
    moments = [moment for moment in history if moment.sample.at_s >= since_s] or [history[-1]]
    if history[0].sample.at_s > since_s or not all(moment.desired for moment in moments):
        return []
    return [moment.desired[role] for moment in moments]


class _Demand:
    """Rates over a window, or over its newest third where they are higher there: the load is rising."""

    def __init__(self, window: Sequence[Sample]) -> None:
        old, new = window[0], window[-1]
        self.seconds = new.at_s - old.at_s
        since_s = new.at_s - max(MIN_RECENT_S, self.seconds / 3)
        recent = (sample for sample in window[:-1] if sample.at_s >= since_s)
        parts = (old, next(recent, window[-2]))  # if all recent ones are missing: the last sample before the newest

        def rate(counter: Callable[[GatewayLoad], float]) -> float:
            return max((counter(new.gateways) - counter(at.gateways)) / (new.at_s - at.at_s) for at in parts)

        self.requests = rate(lambda load: load.requests)
        self.prompt_tokens = rate(lambda load: load.prompt_tokens)
        self.generation_tokens = rate(lambda load: load.generation_tokens)
        self.prompt_of_each = self.prompt_tokens / self.requests if self.requests else 0.0
        self.answer_of_each = _answer_of_each(old.gateways, new.gateways)


def _answer_of_each(old: GatewayLoad, new: GatewayLoad) -> float:
    """Return the tokens of an answer: of those that ended in between, or of all up to now if too few have.

    While the load rises, tokens of answers that have not ended make an answer look longer, but not longer than all.
    """
    mean = new.generation_tokens / max(1.0, new.requests)
    began, tokens = new.requests - old.requests, new.generation_tokens - old.generation_tokens
    ended = began - (new.inflight - old.inflight)
    if min(began, ended) < MIN_OBSERVED:
        return mean
    return min(tokens / ended, max(mean, tokens / began))


def _prefill(window: Sequence[Sample], plan: ScalePlan) -> int:
    demand, done, new = _Demand(window), _work(window, Role.PREFILL), window[-1].fleet(Role.PREFILL)
    speed = done.prompt_tokens / done.busy_s if done.busy_s > MIN_BUSY_S else 0.0
    if not speed:
        return _without_speed(window, Role.PREFILL)
    looked_up = done.prompt_tokens + done.cached_tokens
    uncached = done.prompt_tokens / looked_up if looked_up else 1.0
    queue = (new.waiting + window[-1].gateways.unplaced) * demand.prompt_of_each
    tokens = (demand.prompt_tokens + queue / plan.look_back_period_s) * uncached
    needed = _whole(tokens / (speed * plan.target_utilization))
    # If the groups are less busy than this, first tokens are late because prompts are long: more groups would not help.
    if done.busy_s / demand.seconds > HALF * plan.target_utilization * new.serving:
        needed = max(needed, _by_target(window, plan, Role.PREFILL))
    return max(needed, _by_blocks(new))


def _decode(window: Sequence[Sample], plan: ScalePlan) -> int:
    demand, done, new = _Demand(window), _work(window, Role.DECODE), window[-1].fleet(Role.DECODE)
    if done.busy_s < MIN_BUSY_S or not done.generation_tokens:
        return _without_speed(window, Role.DECODE)
    queue = (new.waiting + window[-1].gateways.unplaced) * demand.answer_of_each
    tokens = max(demand.generation_tokens, demand.requests * demand.answer_of_each) + queue / plan.look_back_period_s
    needed = _whole(
        tokens / max(_tokens_per_s(window, plan), done.generation_tokens / done.busy_s * plan.target_utilization)
    )
    return max(needed, _by_target(window, plan, Role.DECODE), _by_blocks(new))


def _unified(window: Sequence[Sample], plan: ScalePlan) -> int:
    new = window[-1].fleet(Role.UNIFIED)
    missed = _by_target(window, plan, Role.UNIFIED)
    if missed > new.serving or window[-1].gateways.unplaced:
        return max(missed, new.serving + 1)
    steady = _since_change(window, Role.UNIFIED)
    met = max(_first_token_s(steady, plan) / plan.ttft_s, _inter_token_s(steady, plan) / plan.inter_token_s)
    fewer = new.serving - 1 if met < HALF and new.waiting == 0 else new.serving
    return max(fewer, _by_blocks(new))


SIZE_RULES: dict[Role, Callable[[Sequence[Sample], ScalePlan], int]] = {
    Role.PREFILL: _prefill,
    Role.DECODE: _decode,
    Role.UNIFIED: _unified,
}


def _without_speed(window: Sequence[Sample], role: Role) -> int:
    """Return the number of groups of a fleet that has worked too little to be measured: one is enough for that.

    While work waits, the fleet keeps its size.
    """
    new = window[-1].fleet(role)
    return new.serving if new.waiting or window[-1].gateways.unplaced else max(1, _by_blocks(new))


def _tokens_per_s(window: Sequence[Sample], plan: ScalePlan) -> float:
    """Return the output tokens a second of a decode group whose steps take the allowed time.

    The rate is read off a straight line through the measured steps. If they give no line, it is the measured rate,
    reduced if steps take longer than allowed.
    """
    points = []
    for old, new in itertools.pairwise(window):
        done = _work((old, new), Role.DECODE)
        if done.steps and done.generation_tokens:
            points.append((done.generation_tokens / done.steps, done.busy_s / done.steps, done.steps))
    weight = sum(point[2] for point in points) or 1.0
    mean_x = sum(x * w for x, _, w in points) / weight
    mean_y = sum(y * w for _, y, w in points) / weight
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread if spread > 1e-9 * weight else math.inf
    limit_s = plan.inter_token_s * plan.target_utilization
    if not 0 <= slope < math.inf or mean_y >= limit_s:
        return mean_x / mean_y * min(1.0, limit_s / mean_y) if mean_y else 0.0
    largest = MAX_EXTRAPOLATION * max(x for x, _, _ in points)
    batch = min(largest, mean_x + (limit_s - mean_y) / slope) if slope else largest
    return batch / (mean_y + slope * (batch - mean_x))


def _by_target(window: Sequence[Sample], plan: ScalePlan, role: Role) -> int:
    """Return the number of groups that a missed target demands; 0 if targets are met.

    The present number is multiplied by latency / target, of the latencies since the fleet has had its present size.
    """
    steady = _since_change(window, role)
    missed = 0.0
    if role is not Role.DECODE:
        missed = max(missed, _first_token_s(steady, plan) / plan.ttft_s)
    if role is not Role.PREFILL:
        missed = max(missed, _inter_token_s(steady, plan) / plan.inter_token_s)
    serving = window[-1].fleet(role).serving
    return math.ceil(serving * min(missed, MAX_BOOST)) if missed > 1 else 0


def _since_change(window: Sequence[Sample], role: Role) -> Sequence[Sample]:
    """Return the newest part of a window, with the fleet's present size: older latencies belong to other sizes."""
    serving, first = window[-1].fleet(role).serving, len(window) - 1
    while first > 0 and window[first - 1].fleet(role).serving == serving:
        first -= 1
    return window[first:]


def _first_token_s(window: Sequence[Sample], plan: ScalePlan) -> float:
    old, new = window[0].gateways.first_token, window[-1].gateways.first_token
    return _latency(FIRST_TOKEN_S, old, new, plan.percentile)


def _inter_token_s(window: Sequence[Sample], plan: ScalePlan) -> float:
    old, new = window[0].gateways.inter_token, window[-1].gateways.inter_token
    return _latency(PER_TOKEN_S, old, new, plan.percentile)


def _latency(bounds: Sequence[float], old: Sequence[float], new: Sequence[float], share: float) -> float:
    counts = [after - before for before, after in zip(old, new, strict=True)]
    return percentile(bounds, counts, share) if sum(counts) >= MIN_OBSERVED else 0.0


def _by_blocks(fleet: FleetLoad) -> int:
    """Return the number of groups that can hold the KV blocks in use."""
    capacity = FULL * fleet.blocks_of_a_group
    return _whole(fleet.used_blocks / capacity) if capacity else 0


def _work(window: Sequence[Sample], role: Role) -> FleetLoad:
    """Return a fleet's work between the first and the last sample of a window."""
    old, new = window[0].fleet(role), window[-1].fleet(role)
    return FleetLoad(
        busy_s=new.busy_s - old.busy_s,
        prompt_tokens=new.prompt_tokens - old.prompt_tokens,
        cached_tokens=new.cached_tokens - old.cached_tokens,
        generation_tokens=new.generation_tokens - old.generation_tokens,
        steps=new.steps - old.steps,
    )


def _whole(groups: float) -> int:
    """Round up, except for an excess within the tolerance."""
    return max(0, math.ceil(groups - TOLERANCE))
