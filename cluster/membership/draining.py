"""Draining a group of engines: gateways choose it no more, its requests end, or are returned and go on elsewhere.

SERVING ──listed as draining──> DRAINING ──nothing is left────────────────────────> DRAINED
                                    └────deadline──> REQUESTS RETURNED ──sent────────┘

Nothing is left: no request without its last token, no blocks that wait for a reader, none that are being received.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from baton.cluster.contracts import Drained, EnginePulse

SETTLE_S = 0.5  # until every gateway knows, and the requests that it had sent before have arrived
POLL_S = 0.1  # between looks at the engines
QUIET_S = 0.3  # for which nothing must be left: an engine's number of leases is that much older than of its requests
RETURN_S = 1.0  # for returned requests to reach the gateways
ANSWER_S = 2.0  # for one call to the engines: Ray waits for ever for an answer that was lost with a link
LONGEST_S = SETTLE_S + QUIET_S + RETURN_S + 2 * POLL_S + 4 * ANSWER_S  # beside the wait itself


class DrainingGroup(Protocol):
    """The part of a group that draining uses."""

    async def pulses(self) -> list[EnginePulse]: ...

    async def return_requests(self) -> None: ...


async def drain(engines: DrainingGroup, timeout_s: float) -> Drained:
    """Wait until a group's requests have ended, `timeout_s` at most, and return those that are left to their gateways.

    The directory must list the group as draining before. Raises what the engines raise; where no answer comes they
    are asked again, and count as busy.
    """
    began_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    handed_over = 0
    if not await _becomes_idle(engines, timeout_s):
        handed_over = await _num_requests(engines) or 0
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engines.return_requests(), ANSWER_S)
        await _wait_until_returned(engines)
    return Drained(time.monotonic() - began_s, handed_over)


async def _pulses(engines: DrainingGroup) -> list[EnginePulse] | None:
    """Return the pulses of all engines; None where no answer has come."""
    try:
        return await asyncio.wait_for(engines.pulses(), ANSWER_S)
    except TimeoutError:
        return None


async def _num_requests(engines: DrainingGroup) -> int | None:
    pulses = await _pulses(engines)
    return None if pulses is None else sum(pulse.num_requests for pulse in pulses)


async def _becomes_idle(engines: DrainingGroup, timeout_s: float) -> bool:
    """Wait until nothing is left; return whether that was in time."""
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
        await asyncio.sleep(POLL_S)


async def _wait_until_returned(engines: DrainingGroup) -> None:
    """Wait until the returned requests have been sent."""
    deadline_s = time.monotonic() + RETURN_S
    while await _num_requests(engines) != 0 and time.monotonic() < deadline_s:
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(POLL_S)
