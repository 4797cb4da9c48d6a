"""Abandoned requests leave nothing behind, whatever happened to engines, hand-offs and clients before."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.cluster.contracts import Role
from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.routing.breaker import BreakerSettings
from baton.cluster.gateway.routing.cost import Load
from baton.cluster.gateway.serving.context import ServingContext
from baton.cluster.gateway.serving.sequence import OUT_OF_TURN, ServedSequence
from baton.cluster.gateway.serving.timeline import Timeline
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind
from baton.engine.core.sampling import SamplingParams

from ...helpers.fake_cluster import FakeCluster, FakeEngine
from ...helpers.tiny_model import MAX_MODEL_LEN

FLEETS = [
    [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE],
    [Role.PREFILL, Role.DECODE, Role.UNIFIED],
    [Role.UNIFIED, Role.UNIFIED],
]
MOST_EVENTS = 12
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 4)),
        st.tuples(st.just("ask"), st.integers(1, 120)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("die"), st.integers(0, 7)),
        st.tuples(st.just("stop"), st.integers(0, 7)),
        st.tuples(st.just("go"), st.integers(0, 7)),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("lose"), st.integers(1, 2)),
        st.tuples(st.just("refuse"), st.sampled_from([ErrorKind.OVERLOADED, ErrorKind.LEAVING, ErrorKind.INTERNAL])),
    ),
    min_size=3,
    max_size=MOST_EVENTS,
)


class World:
    def __init__(self, roles: list[Role], progressive: bool) -> None:
        self.cluster = FakeCluster(
            {},
            num_blocks=48,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=300,
            eos_token_ids=[1],
        )
        self.cluster.wire.progressive = progressive
        for role in roles:
            self.cluster.start(role)
        settings = GatewaySettings(
            capacity_timeout_s=5.0, breaker=BreakerSettings(failures=2, open_s=0.02), local_prefill_max_tokens=64
        )
        self.serving = ServingContext(self.cluster, settings, GatewayMetrics("m", self.cluster.engines))
        self.clients: list[asyncio.Task[None]] = []

    async def happen(self, what: str, value: object) -> None:
        match what, value:
            case "wait", int(steps):
                await asyncio.sleep(0.001 * steps)
            case "ask", int(length):
                self.clients.append(asyncio.create_task(self._read(len(self.clients), length)))
                await asyncio.sleep(0)
            case "leave", int(number) if number < len(self.clients):
                self.clients[number].cancel()
            case "die", int(number) if (engine := self._engine(number)) and len(self.cluster.engines()) > 1:
                engine.die()
            case "stop", int(number) if engine := self._engine(number):
                engine.running.clear()
            case "go", int(number) if engine := self._engine(number):
                engine.running.set()
            case "hold", bool(hold):
                self.cluster.wire.hold = hold
            case "lose", int(count):
                self.cluster.wire.lose = count
            case "refuse", ErrorKind() as kind:
                coming = [EngineError(kind, "now not")]
                self.cluster.fault = lambda engine, request: coming.pop() if coming else None

    def _engine(self, number: int) -> FakeEngine | None:
        members = self.cluster.members
        return members[number] if number < len(members) and members[number].alive else None

    async def _read(self, number: int, length: int) -> None:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        request = EngineRequest(
            request_id=f"r{number}", prompt_token_ids=[5 + number] * length, sampling=sampling, seed=number
        )
        outputs = ServedSequence(self.serving, request, Timeline(0.0, 0.0)).outputs()
        async with contextlib.aclosing(outputs):
            try:
                async for _ in outputs:
                    pass
            except ApiError as error:
                if error.message == OUT_OF_TURN:  # the state machine has no transition for an event that can occur
                    raise

    async def abandon(self) -> None:
        for client in self.clients:
            client.cancel()
        results = await asyncio.gather(*self.clients, return_exceptions=True)
        assert not [result for result in results if isinstance(result, Exception)]

    async def check_nothing_is_left(self) -> None:
        cluster, loads = self.cluster, self.serving.router.loads
        assert not [engine.streams for engine in cluster.members if engine.streams], "every attempt must end at once"
        cluster.wire.hold = False
        for engine in cluster.members:
            engine.running.set()
        await cluster.settled()
        held = [offer.holder for offer in cluster.wire.offers.values()]
        assert not [engine for engine in cluster.members if engine.alive and engine.connector in held]
        while any(engine.core.has_work() for engine in cluster.members if engine.alive):  # `play` has a limit
            await asyncio.sleep(0.001)
        assert loads.own == Load(0, 0)
        assert self.serving.retry_budget.num_running == 0
        assert self.serving.breakers.num_trials == 0


async def play(roles: list[Role], progressive: bool, events: list[tuple[str, object]]) -> None:
    world = World(roles, progressive)
    try:
        async with asyncio.timeout(20):
            for event in events:
                await world.happen(*event)
            await world.abandon()
            await world.check_nothing_is_left()
    finally:
        await world.cluster.close()


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(FLEETS), st.booleans(), EVENTS)
def test_abandoned_requests_leave_nothing_behind(
    roles: list[Role], progressive: bool, events: list[tuple[str, object]]
) -> None:
    asyncio.run(play(roles, progressive, [("ask", 100), ("ask", 20), *events]))
