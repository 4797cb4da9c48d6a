"""The requests that an engine serves: for each, the gateway that waits for it and its generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.core.messages import EngineOutput, EngineRequest


@dataclass(frozen=True)
class RequestOwner:
    gateway: bytes
    generation: int


class RequestRegistry:
    """Owners by request id. The step thread uses it; any thread may ask how many requests there are."""

    def __init__(self) -> None:
        self._owners: dict[str, RequestOwner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def owner_of(self, request_id: str) -> RequestOwner | None:
        return self._owners.get(request_id)

    def add(self, request: EngineRequest, gateway: bytes) -> None:
        self._owners[request.request_id] = RequestOwner(gateway, request.generation)

    def remove(self, request_id: str) -> None:
        """Forget a request. An id that is not registered is ignored."""
        self._owners.pop(request_id, None)

    def all(self) -> list[tuple[str, RequestOwner]]:
        return list(self._owners.items())

    def all_of(self, gateway: bytes) -> list[tuple[str, RequestOwner]]:
        return [(request_id, owner) for request_id, owner in self._owners.items() if owner.gateway == gateway]

    def by_gateway(self, outputs: Sequence[EngineOutput]) -> dict[bytes, list[EngineOutput]]:
        """Group outputs by the gateway that waits for them; those of aborted requests are dropped.

        A request's last output removes it.
        """
        grouped: dict[bytes, list[EngineOutput]] = defaultdict(list)
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None or owner.generation != output.generation:
                continue
            grouped[owner.gateway].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        return grouped
