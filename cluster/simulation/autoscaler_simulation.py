"""A simulation of an application whose fleets change size, in virtual time.

The gateways' router, the engines' schedulers and the autoscaler are the real ones. Groups take time to start, and drain
before they end.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.cluster.autoscaling.load_samples import FIRST_TOKEN_S, PER_TOKEN_S, GatewayLoad, bucket_of
from baton.cluster.contracts import EngineGroup, EnginePulse, EngineView, Role
from baton.cluster.gateway.routing.load import Placement
from baton.cluster.gateway.routing.rates import CostRates, LearntRates
from baton.cluster.gateway.routing.router import Router
from baton.engine.core.messages import EngineOutput, EngineRequest, FinishReason
from baton.engine.core.sampling import SamplingParams

from .fleet_sizing import SimulatedFleet, Sizer
from .traffic import RequestArrival
from .virtual_engine import (
    Speed,
    VirtualConnector,
    VirtualEngine,
    VirtualNetwork,
    VirtualTime,
    make_config,
    make_record,
)

TICK_S = 1.0  # between two reports, as in a cluster
RETRY_S = 0.1  # after which a request that found no engine tries again
GATEWAY = "gateway"


@dataclass(frozen=True)
class SimulatedHardware:
    """The speed and size of groups, and the latency targets. Here, each group is one GPU."""

    speed: Speed
    rates: CostRates  # the router's guess of that speed
    start_s: float  # from the decision to start a group until it serves
    num_blocks: int
    ttft_s: float  # targets, for the report only
    inter_token_s: float


class ScalingOutcome(msgspec.Struct, frozen=True):
    """The outcome of one run."""

    sizes: str
    num_requests: int
    gpu_seconds: float  # of all groups, from their start to their end
    most: int  # groups at the same time
    changes: int  # times that the fleets' sizes changed
    ttft_attained: float  # share of the requests within the target
    inter_token_attained: float  # the same, by the mean of each request
    ttft_p50_s: float
    ttft_p99_s: float


@dataclass
class _Group:
    """One replica of a fleet: starting (no engine yet), serving, or draining."""

    name: str
    role: Role
    began_s: float
    engine: VirtualEngine | None = None
    draining: bool = False

    @property
    def is_empty(self) -> bool:
        if self.engine is None:
            return True
        stats = self.engine.stats
        return not stats.num_requests and not stats.num_blocks_held


@dataclass
class _ServedRequest:
    arrival: RequestArrival
    request: EngineRequest
    placement: Placement | None = None
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass
class _Counts:
    """The counts that the simulated gateway reports."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_token: list[float] = field(default_factory=lambda: [0.0] * (len(FIRST_TOKEN_S) + 1))
    inter_token: list[float] = field(default_factory=lambda: [0.0] * (len(PER_TOKEN_S) + 1))
    inflight: int = 0
    unplaced: int = 0

    def report(self) -> GatewayLoad:
        values = {**vars(self), "first_token": tuple(self.first_token), "inter_token": tuple(self.inter_token)}
        return GatewayLoad(**values)


class AutoscalerSimulation:
    """One simulation. Call `run` once."""

    def __init__(self, world: SimulatedHardware, sizer: Sizer) -> None:
        self._world, self._sizer = world, sizer
        self._time = VirtualTime()
        self._router = Router(
            GATEWAY,
            rates=LearntRates(world.rates, self._time),
            session_patience_s=0.0,
            local_prefill_max_tokens=8192,
            clock=self._time,
        )
        self._network = VirtualNetwork(self._time, world.speed)
        self._config = make_config(world.num_blocks)
        self._groups: dict[str, _Group] = {}
        self._served: dict[str, _ServedRequest] = {}
        self._outstanding: Counter[str] = Counter()
        self._counts = _Counts()
        self._num_started = 0
        self._gpu_seconds, self._most, self._changes = 0.0, 0, 0
        self._last_sizes: dict[Role, int] = {}
        self._to_come = 0

    def run(self, arrivals: Sequence[RequestArrival]) -> ScalingOutcome:
        self._to_come = len(arrivals)
        for index, arrival in enumerate(arrivals):
            self._time.after(arrival.at_s, functools.partial(self._arrive, index, arrival))
        for role, size in self._sizer.first().items():
            for _ in range(size):
                self._serve(self._start(role))
        self._time.after(0.0, self._tick)
        self._time.run()
        return self._outcome()

    # ---- groups ----

    def _tick(self) -> None:
        """Report, decide and change the fleets, once a second."""
        sizes = self._sizer.sizes(self._time(), self._counts.report(), self._fleets())
        self._changes += self._last_sizes not in ({}, sizes)
        self._last_sizes = dict(sizes)
        for role, size in sizes.items():
            self._resize(role, size)
        for group in [group for group in self._groups.values() if group.draining and group.is_empty]:
            self._end(group)
        self._most = max(self._most, len(self._groups))
        if self._to_come or self._counts.inflight:
            self._time.after(TICK_S, self._tick)

    def _fleets(self) -> dict[Role, SimulatedFleet]:
        fleets: defaultdict[Role, SimulatedFleet] = defaultdict(SimulatedFleet)
        for group in self._groups.values():
            fleet = fleets[group.role]
            if group.engine is None:
                fleet.starting += 1
                continue
            stats = group.engine.stats
            record = msgspec.structs.replace(group.engine.record, draining=group.draining)
            own = EngineGroup(group_id=group.name, first_rank=0, engines=[record])
            fleet.groups.append(own)
            fleet.pulses[group.name] = [EnginePulse(0.0, stats.num_requests, 0, 0, group.engine.busy_s, stats)]
        return fleets

    def _resize(self, role: Role, size: int) -> None:
        """Resize a fleet as Serve does: it stops groups that have not started, then chosen ones, then the newest."""
        there = [group for group in self._groups.values() if group.role is role and not group.draining]
        for _ in range(size - len(there)):
            group = self._start(role)
            self._time.after(self._world.start_s, functools.partial(self._serve, group))
        surplus = len(there) - size
        if surplus > 0:
            chosen = self._sizer.leaving(role)
            there.sort(key=lambda group: (group.engine is not None, group.name not in chosen, -group.began_s))
            for group in there[:surplus]:
                self._drain(group)

    def _start(self, role: Role) -> _Group:
        self._num_started += 1
        group = _Group(f"{role}-{self._num_started}", role, self._time())
        self._groups[group.name] = group
        return group

    def _serve(self, group: _Group) -> None:
        if group.name not in self._groups:  # it was stopped before it had started
            return
        world = self._world
        record = msgspec.structs.replace(make_record(self._num_started, group.role, world.num_blocks), node_id="node")
        record = msgspec.structs.replace(record, engine_id=group.name, group_id=group.name)
        connector = VirtualConnector(record, self._network)
        group.engine = VirtualEngine(record, self._config, self._time, world.speed, connector, self._on_output)

    def _drain(self, group: _Group) -> None:
        group.draining = True
        if group.engine is None:
            self._end(group)
        else:
            group.engine.record = msgspec.structs.replace(group.engine.record, draining=True)

    def _end(self, group: _Group) -> None:
        del self._groups[group.name]
        self._gpu_seconds += self._time() - group.began_s

    # ---- requests ----

    def _arrive(self, index: int, arrival: RequestArrival) -> None:
        self._to_come -= 1
        sampling = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        request = EngineRequest(request_id=f"r{index}", prompt_token_ids=arrival.prompt, sampling=sampling)
        served = self._served[request.request_id] = _ServedRequest(arrival, request)
        self._counts.requests += 1
        self._counts.prompt_tokens += len(arrival.prompt)
        self._counts.inflight += 1
        self._counts.unplaced += 1
        self._place(served)

    def _place(self, served: _ServedRequest) -> None:
        route = self._router.route(self._views(), self._router.query(served.request))
        if route is None:
            self._time.after(RETRY_S, functools.partial(self._place, served))
            return
        self._counts.unplaced -= 1
        self._send(served, route.placement, msgspec.structs.replace(served.request, keep_kv=route.hands_off))

    def _send(self, served: _ServedRequest, placement: Placement, request: EngineRequest) -> None:
        served.placement = placement
        self._router.loads.sent(placement)
        self._outstanding[placement.engine.engine_id] += 1
        engine = self._groups[placement.engine.engine_id].engine
        assert engine is not None, "only engines that serve are chosen"
        engine.add(request)

    def _views(self) -> list[EngineView]:
        engines = [group.engine for group in self._groups.values() if group.engine is not None]
        return [engine.view(self._outstanding[engine.record.engine_id]) for engine in engines]

    def _on_output(self, output: EngineOutput) -> None:
        served, now_s, counts = self._served[output.request_id], self._time(), self._counts
        assert output.error is None, output.error
        assert served.placement is not None, "nobody answers what was not sent"
        if not served.first_s:
            served.first_s = now_s
            counts.first_token[bucket_of(FIRST_TOKEN_S, now_s - served.arrival.at_s)] += 1
            self._router.loads.first_token(served.placement)
        elif output.token_ids:
            counts.inter_token[bucket_of(PER_TOKEN_S, now_s - served.last_s)] += 1
        served.last_s = now_s
        counts.generation_tokens += len(output.token_ids)
        if output.finish_reason is None:
            return
        self._router.loads.ended(served.placement)
        self._outstanding[served.placement.engine.engine_id] -= 1
        if output.finish_reason is FinishReason.HANDOFF:
            self._go_on(served, output)
        else:
            counts.inflight -= 1

    def _go_on(self, served: _ServedRequest, output: EngineOutput) -> None:
        assert served.placement is not None, "who hands over was sent something"
        wanted = self._router.query(served.request)
        placement = self._router.decode_placement(self._views(), wanted, served.placement.engine)
        assert placement is not None, "a prefill fleet never goes before the last request has"
        request = msgspec.structs.replace(
            served.request, kv_source=output.kv_source, output_token_ids=list(output.token_ids)
        )
        self._send(served, placement, request)
        self._router.loads.first_token(placement)

    def _outcome(self) -> ScalingOutcome:
        for group in list(self._groups.values()):
            self._end(group)
        served, world = list(self._served.values()), self._world
        first_s = sorted(each.first_s - each.arrival.at_s for each in served)
        per_token_s = [(each.last_s - each.first_s) / max(1, each.arrival.output_tokens - 1) for each in served]
        return ScalingOutcome(
            sizes=self._sizer.name,
            num_requests=len(served),
            gpu_seconds=self._gpu_seconds,
            most=self._most,
            changes=self._changes,
            ttft_attained=sum(seconds <= world.ttft_s for seconds in first_s) / len(served),
            inter_token_attained=sum(seconds <= world.inter_token_s for seconds in per_token_s) / len(served),
            ttft_p50_s=first_s[len(first_s) // 2],
            ttft_p99_s=first_s[round(0.99 * (len(first_s) - 1))],
        )
