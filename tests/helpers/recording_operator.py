"""A gateway's operator without Ray: it knows two ranks and one engine, and records the calls."""

from __future__ import annotations

from baton.cluster.contracts import EngineTrace
from baton.cluster.gateway.errors import bad_request


class RecordingOperator:
    """An operator that knows the ranks 0 and 1, and one engine to profile."""

    def __init__(self) -> None:
        self.drained: list[int] = []
        self.is_recording = False

    async def drain(self, rank: int) -> list[int]:
        if rank > 1:
            raise bad_request("rank", f"'rank': there is no rank {rank} now; there are: 0, 1.", "unknown_rank")
        self.drained.append(rank)
        return [0, 1]

    async def start_profile(self) -> list[EngineTrace]:
        self.is_recording = True
        return [EngineTrace("engine", "192.0.2.1", "/tmp/trace")]

    async def stop_profile(self) -> list[EngineTrace]:
        was, self.is_recording = self.is_recording, False
        return [EngineTrace("engine", "192.0.2.1", "/tmp/trace", 1.5, 1000)] if was else []
