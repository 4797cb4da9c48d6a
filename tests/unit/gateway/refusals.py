"""The check that a service still answers after it has refused requests."""

from __future__ import annotations

from ...helpers.gateway_service import Service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HUGE = 10**30


async def check_alive(service: Service) -> None:
    response = await service.complete("hello", max_tokens=2)
    assert response.status_code == 200
    await service.cluster.settled()


BOTH = [(COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": [{"role": "user", "content": "hello"}]})]
