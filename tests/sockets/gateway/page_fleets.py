"""Fleets that the tests and the screenshots of the page at `/` show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from baton.cluster.contracts import GatewayRecord, Reach, Role
from baton.engine.core.messages import EngineError, ErrorKind
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from ...helpers.gateway_service import Service

ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
STEP_S = 0.02
PAUSE_S = 0.05  # between two requests of a client
LONG = "the fox and the dog " * 6


def list_gateway(service: Service, name: str = "gateway") -> None:
    """List a gateway, as the directory does."""
    record = GatewayRecord(
        identity=name,
        node_id="node",
        node_ip="192.0.2.200",
        pid=1,
        host="0.0.0.0",
        port=8000,
        reach=Reach(),
        is_serving=True,
    )
    service.cluster.gateways.append(record)


def pair(service: Service, *, slow: bool = False) -> None:
    """Give each decode engine a lane to each prefill engine."""
    prefill, decode = ([each for each in service.cluster.members if each.record.role is role] for role in ROLES[1:3])
    for at, reader in enumerate(decode):
        lanes = [
            PeerLane(
                engine_id=holder.record.engine_id,
                transport="ucx",
                bytes_per_s=4.1e7 if slow and at == 0 else 4.2e10 - 9e9 * number,
                is_slow=slow and at == 0,
                num_reads=120 + 31 * number,
            )
            for number, holder in enumerate(prefill)
        ]
        reader.transfers = TransferStats(lanes=lanes, peers_ready=len(lanes))


@asynccontextmanager
async def load(service: Service, clients: int = 12, *, tokens: int = 40) -> AsyncIterator[None]:
    """Keep so many requests running."""
    for engine in service.cluster.members:
        engine.step_s = STEP_S

    over = asyncio.Event()

    async def client(number: int) -> None:
        turn = 0
        while not over.is_set():
            prompt = f"{LONG} {number} {turn % 3}"
            await service.complete(prompt, max_tokens=tokens, ignore_eos=True, stream=True)
            turn += 1
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)


def busy(start: Callable[..., Service]) -> Service:
    service = start(*ROLES)
    list_gateway(service)
    pair(service)
    return service


def failing(start: Callable[..., Service]) -> Service:
    """Start a fleet with a dead decode engine and one on a slow lane that refuses every second request."""
    service = start(*ROLES, max_attempts=1)
    list_gateway(service)
    pair(service, slow=True)
    lost = service.cluster.members[3]
    lost.die()
    listed = service.cluster.listed
    service.cluster.listed = lambda: msgspec.structs.replace(
        listed(), engines=[each.record for each in service.cluster.members]
    )
    flip = iter(range(10**9))

    def fault(engine: object, request: object) -> EngineError | None:
        return EngineError(ErrorKind.INTERNAL, "the device is gone") if next(flip) % 3 == 0 else None

    service.cluster.fault = fault
    return service
