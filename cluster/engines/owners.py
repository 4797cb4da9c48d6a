"""Whose requests an engine serves: the gateway that waits for each, and under which generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.core.messages import EngineOutput, EngineRequest


@dataclass(frozen=True)
class Owner:
    gateway: bytes
    generation: int


class Owners:
    """By request id. The step thread uses it; any may ask how many there are."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def of(self, request_id: str) -> Owner | None:
        return self._owners.get(request_id)

    def add(self, request: EngineRequest, gateway: bytes) -> None:
        self._owners[request.request_id] = Owner(gateway, request.generation)

    def remove(self, request_id: str) -> None:
        """One that is not here is ignored."""
        self._owners.pop(request_id, None)

    def all(self) -> list[tuple[str, Owner]]:
        return list(self._owners.items())

    def all_of(self, gateway: bytes) -> list[tuple[str, Owner]]:
        return [(request_id, owner) for request_id, owner in self._owners.items() if owner.gateway == gateway]

    def address(self, outputs: Sequence[EngineOutput]) -> dict[bytes, list[EngineOutput]]:
        """By gateway; for aborted requests nobody waits. What is a request's last ends it here."""
        of_gateway: dict[bytes, list[EngineOutput]] = defaultdict(list)
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None or owner.generation != output.generation:
                continue
            of_gateway[owner.gateway].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        return of_gateway
