"""Draining a group of engines: gateways no longer choose it; its requests finish, or continue in other engines.

SERVING ──listed as draining──> DRAINING ──nothing is left────────────────────────> DRAINED
                                    └────deadline──> REQUESTS RETURNED ──sent────────┘

Nothing is left: no unfinished request, no blocks that wait for a reader, and none that are being received.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from baton.cluster.contracts import Drained, EnginePulse

SETTLE_S = 0.5  # until all gateways know, and requests that they had sent before have arrived
POLL_S = 0.1  # between two checks of the engines
QUIET_S = 0.3  # for which nothing must be left, since an engine's count of leases may be this much out of date
RETURN_S = 1.0  # for returned requests to reach the gateways
ANSWER_S = 2.0  # for one call to the engines, because Ray waits for ever for an answer that was lost with a link
LONGEST_S = SETTLE_S + QUIET_S + RETURN_S + 2 * POLL_S + 4 * ANSWER_S  # duration of a drain beyond its `timeout_s`


class DrainingGroup(Protocol):
    """The part of a group that draining uses."""

    async def pulses(self) -> list[EnginePulse]: ...

    async def return_requests(self) -> None: ...


async def drain(engines: DrainingGroup, timeout_s: float) -> Drained:
    """Wait until a group's requests have finished, at most `timeout_s`, and return the others to their gateways.

    The directory must list the group as draining before. Raises the engines' errors; engines that do not answer are
    asked again, and count as busy.
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
    """Return the pulses of all engines; None if there is no answer."""
    try:
        return await asyncio.wait_for(engines.pulses(), ANSWER_S)
    except TimeoutError:
        return None


async def _num_requests(engines: DrainingGroup) -> int | None:
    pulses = await _pulses(engines)
    return None if pulses is None else sum(pulse.num_requests for pulse in pulses)


async def _becomes_idle(engines: DrainingGroup, timeout_s: float) -> bool:
    """Wait until nothing is left; return whether that happened in time."""
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
