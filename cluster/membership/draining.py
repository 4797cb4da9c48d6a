"""How a group of engines leaves: nobody chooses it any more, what it has ends, the rest goes on elsewhere.

SERVING ──listed as draining──> DRAINING ──nothing is left──────────────────────> DRAINED
                                    └────deadline──> HANDED OVER ──last words──────┘

Nothing is left: no request without its last token, no blocks that wait for a reader, none on their way in.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from baton.cluster.contracts import Drained, EnginePulse

SETTLE_S = 0.5  # until every gateway has heard, and what it had sent before has arrived
LOOK_S = 0.1  # between looks at what is left
QUIET_S = 0.3  # for which nothing must be left: engines tell of their leases that much later than of their requests
LAST_WORDS_S = 1.0  # for what is handed over to reach the gateways
ANSWER_S = 2.0  # of one question to the engines: Ray waits for ever for an answer that was lost with a link
LONGEST_S = SETTLE_S + QUIET_S + LAST_WORDS_S + 2 * LOOK_S + 4 * ANSWER_S  # beside the wait itself


class Engines(Protocol):
    """One group, as far as draining goes."""

    async def pulses(self) -> list[EnginePulse]: ...

    async def return_requests(self) -> None: ...


async def drain(engines: Engines, timeout_s: float) -> Drained:
    """Once gateways have been told: waits for what is there, `timeout_s` at most, and hands over what then is left.

    Raises what the engines raise. What they do not answer is asked again, or taken for the worst when the time is over.
    """
    began_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    handed_over = 0
    if not await _ends(engines, timeout_s):
        handed_over = await _num_requests(engines) or 0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engines.return_requests(), ANSWER_S)
        await _answers(engines)
    return Drained(time.monotonic() - began_s, handed_over)


async def _pulses(engines: Engines) -> list[EnginePulse] | None:
    """None: no answer has come."""
    try:
        return await asyncio.wait_for(engines.pulses(), ANSWER_S)
    except TimeoutError:
        return None


async def _num_requests(engines: Engines) -> int | None:
    pulses = await _pulses(engines)
    return None if pulses is None else sum(pulse.num_requests for pulse in pulses)


async def _ends(engines: Engines, timeout_s: float) -> bool:
    """Whether nothing is left in time."""
    live_s = time.monotonic()
    deadline_s = live_s + timeout_s
    while True:
        pulses = await _pulses(engines)
        is_live = pulses is None or any(pulse.num_live for pulse in pulses)
        now_s = time.monotonic()
        if is_live:
            live_s = now_s
        elif now_s - live_s >= QUIET_S:
            return True
        if is_live and now_s >= deadline_s:
            return False
        await asyncio.sleep(LOOK_S)


async def _answers(engines: Engines) -> None:
    """Waits until what was handed over has gone out."""
    deadline_s = time.monotonic() + LAST_WORDS_S
    while await _num_requests(engines) != 0 and time.monotonic() < deadline_s:
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(LOOK_S)
