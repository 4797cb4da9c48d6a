"""Routing policies: the gateway's own router, and others for comparison."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

import msgspec

from baton.cluster.cached_blocks import BlockName, CachedBlocks, FoundPrefix
from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.cluster.gateway.routing.load import Placement
from baton.cluster.gateway.routing.rates import CostRates, LearntRates
from baton.cluster.gateway.routing.router import Router
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.core.messages import EngineRequest
from baton.kv_transfer.protocol.messages import EngineKey


class Start(NamedTuple):
    """The choice of an engine for a prompt."""

    placement: Placement
    hands_off: bool


class Policy(Protocol):
    """Chooses engines for one gateway, and is told how their requests proceed."""

    def prefill_start(self, views: Sequence[EngineView], request: EngineRequest) -> Start:
        """Choose the engine that computes the prompt."""
        ...

    def decode_placement(self, views: Sequence[EngineView], request: EngineRequest, source: EngineRecord) -> Placement:
        """Choose the decode engine that continues after the hand-off by `source`."""
        ...

    def sent(self, placement: Placement) -> None: ...

    def first_token(self, placement: Placement) -> None:
        """Note that the first token has come."""
        ...

    def ended(self, placement: Placement) -> None: ...


class LoadOnly:
    """Chooses by the engines' load alone, which `EngineView` has, whatever the prompt is."""

    def __init__(self, choose: Callable[[Sequence[EngineView]], EngineView]) -> None:
        self._choose = choose

    def prefill_start(self, views: Sequence[EngineView], request: EngineRequest) -> Start:
        placement = self._place([view for view in views if view.record.role is not Role.DECODE])
        return Start(placement, placement.engine.role is Role.PREFILL)

    def decode_placement(self, views: Sequence[EngineView], request: EngineRequest, source: EngineRecord) -> Placement:
        return self._place([view for view in views if view.record.role is Role.DECODE])

    def _place(self, views: Sequence[EngineView]) -> Placement:
        return Placement(self._choose(views).record, 0)

    def sent(self, placement: Placement) -> None:
        pass

    first_token = ended = sent


def round_robin(first: int) -> LoadOnly:
    turns = itertools.count(first)
    return LoadOnly(lambda views: views[next(turns) % len(views)])


def power_of_two(seed: int) -> LoadOnly:
    """Choose the less loaded of two random engines."""
    rng = random.Random(seed)
    return LoadOnly(lambda views: min(rng.sample(views, min(2, len(views))), key=_num_requests))


class ExactPrefixes:
    """The gateway's own router, with exact knowledge of the engines' cached blocks."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._router = Router(
            name,
            rates=LearntRates(CostRates(), clock),
            session_patience_s=0.0,
            local_prefill_max_tokens=GatewaySettings().local_prefill_max_tokens,
            clock=clock,
        )

    def prefill_start(self, views: Sequence[EngineView], request: EngineRequest) -> Start:
        route = self._router.route(views, self._router.query(request))
        assert route is not None, "every fleet of a replay can serve every request"
        return Start(route.placement, route.hands_off)

    def decode_placement(self, views: Sequence[EngineView], request: EngineRequest, source: EngineRecord) -> Placement:
        placement = self._router.decode_placement(views, self._router.query(request), source)
        assert placement is not None, "every fleet of a replay can serve every request"
        return placement

    def sent(self, placement: Placement) -> None:
        self._router.loads.sent(placement)

    def first_token(self, placement: Placement) -> None:
        self._router.loads.first_token(placement)

    def ended(self, placement: Placement) -> None:
        self._router.loads.ended(placement)


class ExactPools(ExactPrefixes):
    """The gateway's own router, if engines reported only the blocks in their pools, and not those in tiers."""

    def prefill_start(self, views: Sequence[EngineView], request: EngineRequest) -> Start:
        return super().prefill_start(
            [msgspec.structs.replace(view, cached=PoolAlone(view.cached)) for view in views], request
        )


class ApproximatePrefixes(ExactPrefixes):
    """The same costs, but from a gateway's own record of the prompts that it has sent, as in routers without events
    from engines.

    For each engine it remembers as many blocks as the engine can hold, including tiers, and forgets the least recently
    sent first.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        super().__init__(name, clock)
        self._remembered: dict[EngineKey, RememberedBlocks] = {}

    def prefill_start(self, views: Sequence[EngineView], request: EngineRequest) -> Start:
        return super().prefill_start([self._as_remembered(view) for view in views], request)

    def decode_placement(self, views: Sequence[EngineView], request: EngineRequest, source: EngineRecord) -> Placement:
        return super().decode_placement([self._as_remembered(view) for view in views], request, source)

    def sent(self, placement: Placement) -> None:
        super().sent(placement)
        self._memory_of(placement.engine).remember(placement.names)

    def _as_remembered(self, view: EngineView) -> EngineView:
        return msgspec.structs.replace(view, cached=self._memory_of(view.record))

    def _memory_of(self, engine: EngineRecord) -> RememberedBlocks:
        capacity = engine.num_blocks + engine.num_tier_blocks
        return self._remembered.setdefault(engine.key, RememberedBlocks(capacity))


class RememberedBlocks(CachedBlocks):
    """The blocks that were sent to an engine, in place of those that it reports."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._by_age: OrderedDict[BlockName, None] = OrderedDict()

    def remember(self, names: Sequence[BlockName]) -> None:
        for name in reversed(names):  # so that the end of a prompt is forgotten before its beginning
            self._by_age[name] = None
            self._by_age.move_to_end(name)
            self._first.pool.add(name)
        while len(self._by_age) > self._num_blocks:
            self._first.pool.remove(self._by_age.popitem(last=False)[0])


class PoolAlone(CachedBlocks):
    """Only the blocks in an engine's pool, as of now."""

    def __init__(self, known: CachedBlocks) -> None:
        super().__init__(0)
        self._known = known

    def find(self, names: Sequence[BlockName], expected: Container[BlockName] = ()) -> FoundPrefix:
        return FoundPrefix(self._known.find(names, expected).pool)

    def count_present(self, names: Sequence[BlockName], expected: Container[BlockName] = ()) -> int:
        return self._known.count_present(names, expected)


def _num_requests(view: EngineView) -> int:
    return view.outstanding if view.stats is None else max(view.outstanding, view.stats.num_requests)


PolicyMaker = Callable[[int, Callable[[], float]], Policy]  # makes the policy of a gateway from its number and a clock

POLICIES: dict[str, PolicyMaker] = {
    "round-robin": lambda number, clock: round_robin(number),
    "power-of-two": lambda number, clock: power_of_two(number),
    "approximate": lambda number, clock: ApproximatePrefixes(f"gateway-{number}", clock),
    "exact": lambda number, clock: ExactPrefixes(f"gateway-{number}", clock),
}
OF_TIERS: dict[str, PolicyMaker] = {  # additional policies if engines have tiers
    "exact-pools": lambda number, clock: ExactPools(f"gateway-{number}", clock),
}
