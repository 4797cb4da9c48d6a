"""A simulation of decoding with drafts, on devices that are formulas: speculation's gain, and its worst cost."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.core.speculation.config import MAX_DRAFTED_TOKENS
from baton.engine.core.speculation.length import DraftLengths

Device = Callable[[int], float]  # maps the tokens of a step to its seconds


def memory_bound(num_tokens: int) -> float:
    """Return the time of an 8B model's step on a GPU: reading weights dominates up to some 300 tokens."""
    return 5e-3 + 20e-6 * num_tokens if num_tokens <= 300 else 11e-3 * num_tokens / 300


def compute_bound(num_tokens: int) -> float:
    """Return the time of a step on a CPU."""
    return 1e-3 + 2e-3 * num_tokens


@dataclass
class Simulated:
    tokens: int = 0
    seconds: float = 0.0
    drafts: int = 0

    def slowdown(self, device: Device, num_requests: int) -> float:
        """Return the time relative to steps without drafts, for as many tokens."""
        return self.seconds / (device(num_requests) * self.tokens / num_requests)


def simulate(
    device: Device,
    num_requests: int,
    rates: Sequence[float],
    *,
    num_steps: int = 2000,
    most: int = 5,
    depth: int = 2,
    answer_steps: int = 200,
    noise: float = 0.02,
    seed: int = 0,
    looks_ahead: bool = False,
    guess_s: float | None = None,
    guesses_most: bool = False,
) -> Simulated:
    """Run steps in which a draft is right at its request's rate; requests take the `rates` in turn.

    A request is replaced after `answer_steps` steps. If it `looks_ahead`, a request gets only as many drafts as were
    expected when its last step was settled, as those with a grammar do. With `guess_s`, the device makes the drafts at
    the end of each step, and one draft for all requests takes so many seconds; with `guesses_most`, it makes `most` of
    them or none.
    """
    policy = DraftLengths(most, guesses_ahead=guess_s is not None, guesses_most=guesses_most)
    draw, done = random.Random(seed), Simulated()
    places = [f"{place} 0" for place in range(num_requests)]
    guessed: dict[str, int] = {}  # drafts of the next step by request, if they are made ahead
    made: dict[str, int] = {}  # drafts that the device has made for a request
    in_flight: deque[tuple[list[str], list[int], int]] = deque()
    for step in range(num_steps):
        if step and step % (answer_steps // min(answer_steps, num_requests) or 1) == 0:
            place = step % num_requests
            policy.end(places[place])
            places[place] = f"{place} {step}"
        limit = policy.begin_step(num_requests)
        known = made if guess_s is not None else guessed if looks_ahead else None
        rooms = [most if known is None else known.pop(request, 0) for request in places]
        counts, spare = [0] * num_requests, MAX_DRAFTED_TOKENS - num_requests
        for place, (request, room) in enumerate(zip(places, rooms, strict=True)):
            if limit and min(room, spare) > 0:
                counts[place] = policy.num_drafts_for(request, min(room, spare))
                spare -= counts[place]
        num_guesses = 0 if guess_s is None else policy.num_guesses_to_make(places)
        made = dict.fromkeys(places, num_guesses)
        in_flight.append((places.copy(), counts, num_guesses))
        if len(in_flight) < depth:
            continue
        requests, drafts, num_guesses = in_flight.popleft()
        num_drafts, num_accepted = sum(drafts), 0
        for request, count in zip(requests, drafts, strict=True):
            rate = rates[int(request.split()[0]) % len(rates)]
            accepted = 0
            while accepted < count and draw.random() < rate:
                accepted += 1
            num_accepted += accepted
            policy.settled(request, count, accepted)
            guessed[request] = policy.expected(request, most)
        seconds = device(num_requests + num_drafts) + num_guesses * (guess_s or 0.0)
        seconds *= draw.uniform(1 - noise, 1 + noise)
        policy.observe(num_requests + num_drafts, seconds, num_drafts, num_accepted, num_guesses)
        done.tokens += num_requests + num_accepted
        done.seconds += seconds
        done.drafts += num_drafts
    return done
